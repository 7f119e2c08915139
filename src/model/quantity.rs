//! Kubernetes quantities, parsed once at the edge into whole numbers.

use crate::labels::USD_PER_HOUR;
use crate::units::{Bytes, Millicores};

/// An invalid quantity.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum QuantityError {
    /// Not a number with an optional suffix.
    #[error("quantity {0:?} is not a number with an optional suffix such as m, k, Mi or Gi")]
    Malformed(String),
    /// Below zero.
    #[error("quantity {0:?} is negative")]
    Negative(String),
}

/// Parses a CPU quantity into millicores, rounded up. `"1.5"` is 1500, `"100m"` is 100.
///
/// # Errors
/// The text is not a quantity, or is negative.
pub fn parse_cpu(text: &str) -> Result<Millicores, QuantityError> {
    scaled(text, 1000).map(Millicores)
}

/// Parses a memory or storage quantity into bytes, rounded up. `"1Ki"` is 1024, `"1k"` is 1000.
///
/// # Errors
/// The text is not a quantity, or is negative.
pub fn parse_bytes(text: &str) -> Result<Bytes, QuantityError> {
    scaled(text, 1).map(Bytes)
}

/// Parses the quantity of a resource by its Kubernetes name, rounded up: millicores of `cpu`, bytes of `memory` and
/// `ephemeral-storage`, micro-USD of the limit `stowage.dev/usd-per-hour`, units of everything else.
///
/// # Errors
/// The text is not a quantity, or is negative.
pub fn parse_amount(resource: &str, text: &str) -> Result<i64, QuantityError> {
    let scale = match resource {
        "cpu" => 1_000,
        USD_PER_HOUR => 1_000_000,
        _ => 1,
    };
    scaled(text, scale)
}

/// The value times `scale`, rounded up and clamped to `i64`, as `Quantity.ScaledValue` of apimachinery.
fn scaled(text: &str, scale: i128) -> Result<i64, QuantityError> {
    let malformed = || QuantityError::Malformed(text.to_owned());
    let body = text.trim();
    let (negative, body) = match body.as_bytes().first() {
        Some(b'-') => (true, &body[1..]),
        Some(b'+') => (false, &body[1..]),
        _ => (false, body),
    };
    let digits_end = body.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(body.len());
    let (number, suffix) = body.split_at(digits_end);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if (whole.is_empty() && fraction.is_empty()) || fraction.contains('.') {
        return Err(malformed());
    }
    let (binary, mut exponent) = multiplier(suffix).ok_or_else(malformed)?;
    let mut mantissa: i128 = 0;
    let mut inexact = false;
    for (at, digit) in whole.bytes().chain(fraction.bytes()).enumerate() {
        // Beyond 27 significant digits, a digit only decides whether the result is rounded up.
        if mantissa > 100_000_000_000_000_000_000_000_000 {
            inexact |= digit != b'0';
            if at < whole.len() {
                exponent += 1;
            }
            continue;
        }
        mantissa = mantissa * 10 + i128::from(digit - b'0');
        if at >= whole.len() {
            exponent -= 1;
        }
    }
    if negative && mantissa != 0 {
        return Err(QuantityError::Negative(text.to_owned()));
    }
    if mantissa == 0 {
        return Ok(0);
    }
    let clamp = i128::from(i64::MAX);
    let Some(mut value) = mantissa.checked_mul(binary).and_then(|v| v.checked_mul(scale)) else {
        return Ok(i64::MAX);
    };
    while exponent > 0 {
        if value > clamp {
            return Ok(i64::MAX);
        }
        value *= 10;
        exponent -= 1;
    }
    while exponent < 0 {
        inexact |= value % 10 != 0;
        value /= 10;
        exponent += 1;
        if value == 0 {
            break;
        }
    }
    Ok(i64::try_from((value + i128::from(inexact)).min(clamp)).unwrap_or(i64::MAX))
}

/// Binary factor and power of ten of a suffix.
fn multiplier(suffix: &str) -> Option<(i128, i32)> {
    Some(match suffix {
        "" => (1, 0),
        "n" => (1, -9),
        "u" => (1, -6),
        "m" => (1, -3),
        "k" => (1, 3),
        "M" => (1, 6),
        "G" => (1, 9),
        "T" => (1, 12),
        "P" => (1, 15),
        "E" => (1, 18),
        "Ki" => (1 << 10, 0),
        "Mi" => (1 << 20, 0),
        "Gi" => (1 << 30, 0),
        "Ti" => (1 << 40, 0),
        "Pi" => (1 << 50, 0),
        "Ei" => (1 << 60, 0),
        _ => {
            let exponent: i32 = suffix.strip_prefix(['e', 'E'])?.parse().ok()?;
            (1, exponent.clamp(-60, 60))
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_suffix_and_exponent_is_parsed_and_rounded_up() {
        for (text, cpu, bytes) in [
            ("0", 0, 0),
            ("1", 1000, 1),
            ("100m", 100, 1),
            ("1.5", 1500, 2),
            (".5", 500, 1),
            ("2.", 2000, 2),
            ("0.1m", 1, 1),
            ("1500u", 2, 1),
            ("1n", 1, 1),
            ("1k", 1_000_000, 1000),
            ("1Ki", 1_024_000, 1024),
            ("1.5Gi", 1_610_612_736_000, 1_610_612_736),
            ("2M", 2_000_000_000, 2_000_000),
            ("1e3", 1_000_000, 1000),
            ("1E3", 1_000_000, 1000),
            ("1E", i64::MAX, 1_000_000_000_000_000_000),
            ("12e-1", 1200, 2),
            ("100Ei", i64::MAX, i64::MAX),
            ("+3", 3000, 3),
            ("-0", 0, 0),
            ("1e-400", 1, 1),
            ("99999999999999999999999999999999999999999999", i64::MAX, i64::MAX),
        ] {
            assert_eq!(parse_cpu(text), Ok(Millicores(cpu)), "{text} as cpu");
            assert_eq!(parse_bytes(text), Ok(Bytes(bytes)), "{text} as bytes");
        }
    }

    #[test]
    fn an_invalid_quantity_is_an_error_that_quotes_it() {
        for text in ["", "x", "1x", "1.2.3", "Gi", "1 Gi", "--1", "1e", "."] {
            assert_eq!(parse_bytes(text), Err(QuantityError::Malformed(text.into())));
        }
        assert_eq!(parse_bytes("-1Gi"), Err(QuantityError::Negative("-1Gi".into())));
    }

    #[test]
    fn formatted_amounts_parse_back() {
        for millicores in [0, 1, 999, 1000, 1500, 64_000].map(Millicores) {
            assert_eq!(parse_cpu(&millicores.to_string()), Ok(millicores));
        }
        for bytes in [0, 1, 1023, 1024, 5 << 20, (3 << 30) + 1, 7 << 40].map(Bytes) {
            assert_eq!(parse_bytes(&bytes.to_string()), Ok(bytes));
        }
    }
}
