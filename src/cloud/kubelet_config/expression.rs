//! A CEL expression of a kubelet configuration, evaluated to an integer.
//!
//! The text is user input and must neither crash nor block the process:
//! - macros (`map`, `exists`, `has`, …) and regular expressions are not available. Without them there are no loops and no bindings,
//!   each part of the text is evaluated once, and the work is bounded by the length of the text;
//! - the text is bounded ([`MAX_LENGTH`], [`MAX_OPERATORS`], [`MAX_DEPTH`]), and with it the depth of the recursion;
//! - a panic of the parser or the interpreter fails that expression only.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, LazyLock};

use cel::common::types::{CelDouble, CelInt, DOUBLE_TYPE, INT_TYPE, Type};
use cel::common::value::CowVal;
use cel::parser::Expression as Parsed;
use cel::{Context, Env, ExecutionError, Value};

/// Maximum length of an expression in bytes.
pub const MAX_LENGTH: usize = 1024;
/// Maximum number of operators, brackets and dots of an expression: an upper bound of its depth.
pub const MAX_OPERATORS: usize = 128;
/// Maximum nesting of brackets and branches.
pub const MAX_DEPTH: u16 = 16;
/// Maximum length of an interpreter's error message, in characters.
const MAX_REASON_CHARS: usize = 200;

/// 2^63: the integer part of a double between its negative and itself fits an `i64`.
const I64_BOUND: f64 = 9_223_372_036_854_775_808.0;

/// Why an expression has no usable value.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, thiserror::Error)]
pub enum ExpressionError {
    /// Longer than [`MAX_LENGTH`].
    #[error("it is {0} bytes long, {MAX_LENGTH} are allowed")]
    TooLong(usize),
    /// More complex than [`MAX_OPERATORS`].
    #[error("it has {0} operators, brackets and dots, {MAX_OPERATORS} are allowed")]
    TooComplex(usize),
    /// Not CEL.
    #[error("it is no CEL expression: {0}")]
    Syntax(String),
    /// The evaluation with these values fails.
    #[error("{0}")]
    Failed(String),
    /// The result is not a number.
    #[error("the result is a {0}, expected a number (int or double)")]
    NoNumber(String),
    /// NaN, infinite, or out of range.
    #[error("the result {0} is not a finite 64-bit number")]
    Unbounded(String),
    /// Negative where that is not allowed.
    #[error("the result {0} is negative")]
    Negative(i64),
    /// Out of the range of a 32-bit field.
    #[error("the result {0} is above the maximum of 2147483647")]
    TooLarge(i64),
    /// A panic of the interpreter.
    #[error("it makes the interpreter panic")]
    Panicked,
}

impl ExpressionError {
    /// Whether the expression can't be parsed, independent of the values.
    pub const fn is_parse_error(&self) -> bool {
        matches!(self, Self::TooLong(_) | Self::TooComplex(_) | Self::Syntax(_))
    }
}

/// The values of an expression's variables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Variables<'a> {
    /// `vcpus`.
    pub vcpus: i64,
    /// `memory_mib`, before any overhead.
    pub memory_mib: i64,
    /// `default_enis`: network interfaces of the default network card.
    pub default_enis: i64,
    /// `ips_per_eni`: IPv4 addresses of an interface.
    pub ips_per_eni: i64,
    /// `max_pods`: the default number in an expression for `maxPods`, the resolved one in others.
    pub max_pods: i64,
    /// `instance_type`, such as `m7g.large`.
    pub instance_type: &'a str,
}

/// A parsed expression.
#[derive(Debug)]
pub struct Expression {
    parsed: Parsed,
}

/// The standard functions of CEL without macros, optional values, regular expressions and times; plus `max` and `min`.
static ENV: LazyLock<Arc<Env>> = LazyLock::new(|| {
    let mut env = Env::default().with_optional_support(false).with_stdlib();
    let types: [(&str, fn() -> Type); 2] = [("int", || INT_TYPE), ("double", || DOUBLE_TYPE)];
    for (left_name, left) in types {
        for (right_name, right) in types {
            let arguments = || vec![left(), right()];
            let id = |of: &str| format!("{of}_{left_name}_{right_name}");
            let declared = (env.add_overload("max", &id("max"), arguments(), |args| larger(&args)))
                .and_then(|()| env.add_overload("min", &id("min"), arguments(), |args| smaller(&args)));
            declared.expect("the standard library has no max and min, and each pair of types comes once");
        }
    }
    Arc::new(env)
});

impl Expression {
    /// Parses a text.
    ///
    /// # Errors
    /// It is too long, too complex, or not CEL.
    pub fn parse(text: &str) -> Result<Self, ExpressionError> {
        if text.len() > MAX_LENGTH {
            return Err(ExpressionError::TooLong(text.len()));
        }
        let operators = text.bytes().filter(|byte| b"+-*/%<>=!&|?:.([{}])".contains(byte)).count();
        if operators > MAX_OPERATORS {
            return Err(ExpressionError::TooComplex(operators));
        }
        let parse = || ENV.parser().max_recursion_depth(MAX_DEPTH).parse(text);
        match catch_unwind(AssertUnwindSafe(parse)) {
            Ok(Ok(parsed)) => Ok(Self { parsed }),
            Ok(Err(errors)) => {
                let first = errors.errors.first();
                let reason = first.map_or_else(String::new, |error| format!("column {}: {}", error.pos.1, error.msg));
                Err(ExpressionError::Syntax(shortened(&reason)))
            }
            Err(_) => Err(ExpressionError::Panicked),
        }
    }

    /// Evaluates the expression to a number, truncated to an integer.
    ///
    /// # Errors
    /// The evaluation fails, or the result is not a number.
    pub fn number(&self, variables: &Variables<'_>) -> Result<i64, ExpressionError> {
        let mut context = Context::with_env(Arc::clone(&ENV));
        for (name, value) in [
            ("vcpus", variables.vcpus),
            ("memory_mib", variables.memory_mib),
            ("default_enis", variables.default_enis),
            ("ips_per_eni", variables.ips_per_eni),
            ("max_pods", variables.max_pods),
        ] {
            context.add_variable_from_value(name, value);
        }
        context.add_variable_from_value("instance_type", variables.instance_type);
        match catch_unwind(AssertUnwindSafe(|| context.resolve(&self.parsed))) {
            Ok(Ok(Value::Int(number))) => Ok(number),
            Ok(Ok(Value::Float(number))) => truncated(number),
            Ok(Ok(other)) => Err(ExpressionError::NoNumber(other.type_of().to_string())),
            Ok(Err(error)) => Err(ExpressionError::Failed(shortened(&error.to_string()))),
            Err(_) => Err(ExpressionError::Panicked),
        }
    }
}

fn truncated(number: f64) -> Result<i64, ExpressionError> {
    if number > -I64_BOUND && number < I64_BOUND {
        // In range, so the cast only truncates.
        #[allow(clippy::cast_possible_truncation)]
        return Ok(number as i64);
    }
    Err(ExpressionError::Unbounded(number.to_string()))
}

fn shortened(reason: &str) -> String {
    let one_line = reason.split_whitespace().collect::<Vec<_>>().join(" ");
    match one_line.char_indices().nth(MAX_REASON_CHARS) {
        Some((end, _)) => format!("{}…", &one_line[..end]),
        None => one_line,
    }
}

fn larger<'b, 'v>(args: &[CowVal<'b, 'v>]) -> Result<CowVal<'b, 'v>, ExecutionError> {
    one_of("max", args, i64::max, f64::max)
}

fn smaller<'b, 'v>(args: &[CowVal<'b, 'v>]) -> Result<CowVal<'b, 'v>, ExecutionError> {
    one_of("min", args, i64::min, f64::min)
}

/// One of two numbers: a double where either is a double, NaN where either is NaN.
fn one_of<'b, 'v>(
    name: &str,
    args: &[CowVal<'b, 'v>],
    of_ints: fn(i64, i64) -> i64,
    of_doubles: fn(f64, f64) -> f64,
) -> Result<CowVal<'b, 'v>, ExecutionError> {
    let [left, right] = args else {
        return Err(ExecutionError::invalid_argument_count(2, args.len()));
    };
    let int = |value: &CowVal<'b, 'v>| value.downcast_ref::<CelInt>().map(|int| *int.inner());
    if let (Some(left), Some(right)) = (int(left), int(right)) {
        return Ok(CowVal::owned(CelInt::from(of_ints(left, right))));
    }
    // An int of more than 53 bits is rounded, as by CEL's double().
    #[allow(clippy::cast_precision_loss)]
    let double = |value: &CowVal<'b, 'v>| {
        let double = value.downcast_ref::<CelDouble>().map(|double| *double.inner());
        double.or_else(|| int(value).map(|int| int as f64))
    };
    match (double(left), double(right)) {
        (Some(left), Some(right)) if left.is_nan() || right.is_nan() => Ok(CowVal::owned(CelDouble::from(f64::NAN))),
        (Some(left), Some(right)) => Ok(CowVal::owned(CelDouble::from(of_doubles(left, right)))),
        _ => Err(ExecutionError::no_such_overload(name, vec![])),
    }
}

#[cfg(test)]
mod tests;
