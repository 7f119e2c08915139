use proptest::prelude::*;

use super::*;

/// An m5.large.
const M5_LARGE: Variables<'_> =
    Variables { vcpus: 2, memory_mib: 8192, default_enis: 3, ips_per_eni: 10, max_pods: 29, instance_type: "m5.large" };

fn number(text: &str) -> Result<i64, ExpressionError> {
    Expression::parse(text)?.number(&M5_LARGE)
}

#[test]
fn c34_an_expression_evaluates_to_an_integer() {
    for (text, expected) in [
        ("110", 110),
        ("vcpus * 10", 20),
        ("11 * max_pods + 255", 574),
        ("default_enis * (ips_per_eni - 1) + 2", 29),
        ("min(110, vcpus * 10)", 20),
        ("max(vcpus, 8)", 8),
        ("max(1.5, 2.5) * 10.0", 25),
        ("max(vcpus, 2.5)", 2),
        ("min(vcpus, 1.5) * 2.0", 3),
        ("double(memory_mib) * 0.1", 819),
        ("-double(vcpus) * 0.7", -1),
        ("2.999999", 2),
        ("-2.999999", -2),
        ("vcpus > 1 ? 70 : 60", 70),
        ("vcpus <= 1 ? 60 : vcpus <= 2 ? 70 : 80", 70),
        ("60 + (vcpus > 1 ? 10 : 0) + (vcpus > 2 ? min(vcpus - 2, 2) * 5 : 0)", 70),
        ("instance_type == 'm5.large' ? 1 : 2", 1),
        ("instance_type.startsWith(\"m5.\") ? 1 : 2", 1),
        ("instance_type in ['c5.large', 'm5.large'] ? 1 : 2", 1),
        ("int(double(memory_mib) / 1024.0)", 8),
        ("memory_mib / 3 % 1000", 730),
        ("9223372036854775807", i64::MAX),
    ] {
        assert_eq!(number(text), Ok(expected), "{text}");
    }
}

#[test]
fn c34_an_expression_without_a_number_is_an_error() {
    for (text, expected) in [
        ("", "it is no CEL expression"),
        ("vcpus *", "it is no CEL expression"),
        ("vcpus * 10m", "it is no CEL expression"),
        ("100x", "it is no CEL expression"),
        ("pods * 2", "Undeclared reference to 'pods'"),
        ("sum(vcpus, 2)", "Undeclared reference to 'sum'"),
        ("max(vcpus)", "no matching overload"),
        ("max(1, 2, 3)", "no matching overload"),
        ("max('a', 2)", "no matching overload"),
        ("vcpus / 0", "Division by zero"),
        ("vcpus % 0", "Remainder by zero"),
        ("9223372036854775807 + vcpus", "Overflow"),
        ("memory_mib * 0.1", "Unsupported binary operator"),
        ("instance_type", "the result is a string"),
        ("vcpus > 1", "the result is a bool"),
        ("2u", "the result is a uint"),
        ("[1]", "the result is a list"),
        ("null", "the result is a null"),
        ("0.0 / 0.0", "the result NaN"),
        ("1.0 / 0.0", "the result inf"),
        ("max(0.0 / 0.0, 1.0)", "the result NaN"),
        ("9.3e18", "is not a finite 64-bit number"),
        ("-9.3e18", "is not a finite 64-bit number"),
    ] {
        let error = number(text).unwrap_err().to_string();
        assert!(error.contains(expected), "{text}: {error}");
    }
}

#[test]
fn c34_macros_and_regular_expressions_are_rejected() {
    for text in [
        "[1, 2].map(x, x * 2)[0]",
        "[1].exists(x, x == 1) ? 1 : 2",
        "[1].all(x, x == 1) ? 1 : 2",
        "[1].filter(x, x == 1)[0]",
        "has(instance_type.a) ? 1 : 2",
        "instance_type.matches('(a+)+$') ? 1 : 2",
    ] {
        assert!(number(text).is_err(), "{text}");
    }
}

#[test]
fn c34_a_hostile_expression_is_rejected_or_terminates() {
    let repeated = |part: &str, count: usize, last: &str| format!("{}{last}", part.repeat(count));
    let nested = |open: &str, close: &str, count: usize| format!("{}1{}", open.repeat(count), close.repeat(count));
    assert_eq!(number(&"1".repeat(MAX_LENGTH + 1)), Err(ExpressionError::TooLong(MAX_LENGTH + 1)));
    assert_eq!(number(&repeated("1+", 129, "1")), Err(ExpressionError::TooComplex(129)));
    assert_eq!(number(&repeated("1+", 128, "1")), Ok(129), "the longest chain");
    let depth = usize::from(MAX_DEPTH);
    assert_eq!(number(&nested("(", ")", depth)), Ok(1), "the deepest brackets");
    // With a quarter of the stack size of a worker thread.
    let quarter = std::thread::Builder::new().stack_size(512 << 10);
    let deepest = [nested("(", ")", depth), nested("max(1,", ")", depth), repeated("instance_type+", 70, "'a'")];
    let chain = repeated("1+", 112, &nested("(", ")", 8));
    let run = move || deepest.iter().chain([&chain]).for_each(|text| drop(number(text)));
    quarter.spawn(run).unwrap().join().unwrap();
    for text in [
        nested("(", ")", 64),
        nested("[", "]", 64),
        nested("max(1,", ")", 60),
        nested("-(", ")", 40),
        nested("{1:", "}", 40),
        repeated("(", 128, ""),
        repeated("!", 128, "1"),
        repeated("-", 127, "1"),
        repeated("vcpus.a", 128, ""),
        repeated("1?", 60, "1"),
        repeated("instance_type+", 60, "instance_type"),
        repeated("true?1:", 60, "1"),
        repeated("'a'.b().", 30, "c()"),
        "\"".repeat(MAX_LENGTH),
        "\\".repeat(MAX_LENGTH),
        "'\\u00".to_owned(),
        "b'\\xff'".to_owned(),
        "\0".repeat(MAX_LENGTH),
        "é".repeat(MAX_LENGTH / 2),
        "r'''".to_owned(),
        "0x".to_owned(),
        "u".to_owned(),
        "`".to_owned(),
        "1".repeat(MAX_LENGTH),
    ] {
        // Returns an error or a number without a delay.
        let _ = number(&text);
    }
}

/// Texts of expression tokens, many of which are almost valid.
fn almost_valid() -> impl Strategy<Value = String> {
    const PARTS: &[&str] = &[
        "vcpus",
        "memory_mib",
        "max_pods",
        "instance_type",
        "max(",
        "min(",
        "(",
        ")",
        "[",
        "]",
        "{",
        "}",
        ",",
        ":",
        "?",
        "+",
        "-",
        "*",
        "/",
        "%",
        "==",
        "<",
        ">=",
        "&&",
        "||",
        "!",
        ".",
        "1",
        "0",
        "0.0",
        "1e308",
        "9223372036854775807",
        "2u",
        "'a'",
        "\"",
        "b'",
        "r\"",
        "\\",
        "true",
        "null",
        "size(",
        "int(",
        "double(",
        "string(",
        "in",
        ".startsWith(",
        " ",
        "\n",
        "x",
    ];
    prop::collection::vec(prop::sample::select(PARTS), 0..40).prop_map(|parts| parts.concat())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn c34_no_text_panics(text in "\\PC{0,80}|[ -~]{0,200}") {
        prop_assert_ne!(number(&text), Err(ExpressionError::Panicked));
    }

    #[test]
    fn c34_no_almost_valid_text_panics(text in almost_valid()) {
        prop_assert_ne!(number(&text), Err(ExpressionError::Panicked), "{}", text);
    }
}
