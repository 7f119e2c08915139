//! Durations in Go's notation, which the kubelet uses.

use std::fmt;
use std::str::FromStr;

use serde::Deserialize;

/// A duration in nanoseconds, parsed and formatted as Go's `time.Duration`: `1m30s`, `1.5h`, `-2ms`.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[serde(try_from = "String")]
pub struct GoDuration(i64);

/// The text is not a duration.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a duration such as 30s, 1m30s or 1.5h")]
pub struct GoDurationError(String);

const NANOSECOND: i128 = 1;
const MICROSECOND: i128 = 1_000;
const MILLISECOND: i128 = 1_000_000;
const SECOND: i128 = 1_000_000_000;
const MINUTE: i128 = 60 * SECOND;
const HOUR: i128 = 60 * MINUTE;

impl GoDuration {
    pub const fn is_negative(self) -> bool {
        self.0 < 0
    }

    pub const fn nanoseconds(self) -> i64 {
        self.0
    }
}

fn unit_of(name: &str) -> Option<i128> {
    match name {
        "ns" => Some(NANOSECOND),
        // The micro sign and the Greek letter look alike.
        "us" | "\u{b5}s" | "\u{3bc}s" => Some(MICROSECOND),
        "ms" => Some(MILLISECOND),
        "s" => Some(SECOND),
        "m" => Some(MINUTE),
        "h" => Some(HOUR),
        _ => None,
    }
}

/// Nanoseconds of a sequence of decimal numbers, each with a unit; `None` for anything else and beyond 292 years.
fn nanoseconds(text: &str) -> Option<i64> {
    let (negative, mut rest) = match text.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, text.strip_prefix('+').unwrap_or(text)),
    };
    if rest == "0" {
        return Some(0);
    }
    if rest.is_empty() {
        return None;
    }
    let mut total: i128 = 0;
    while !rest.is_empty() {
        let number_end = rest.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(rest.len());
        let (number, tail) = rest.split_at(number_end);
        let unit_end = tail.find(|c: char| c.is_ascii_digit() || c == '.').unwrap_or(tail.len());
        let (unit, tail) = tail.split_at(unit_end);
        let unit = unit_of(unit)?;
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        if (whole.is_empty() && fraction.is_empty()) || fraction.contains('.') {
            return None;
        }
        let whole: i128 = if whole.is_empty() { 0 } else { whole.parse().ok()? };
        // Digits after the fifteenth are less than a nanosecond, even of an hour.
        let fraction = &fraction[..fraction.len().min(15)];
        let scale = 10_i128.pow(u32::try_from(fraction.len()).ok()?);
        let fraction: i128 = if fraction.is_empty() { 0 } else { fraction.parse().ok()? };
        total = total.checked_add(whole.checked_mul(unit)?)?.checked_add(fraction * unit / scale)?;
        rest = tail;
    }
    i64::try_from(if negative { -total } else { total }).ok()
}

impl FromStr for GoDuration {
    type Err = GoDurationError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        nanoseconds(text).map(Self).ok_or_else(|| GoDurationError(text.to_owned()))
    }
}

impl TryFrom<String> for GoDuration {
    type Error = GoDurationError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl fmt::Display for GoDuration {
    /// As Go prints it: `1m0s`, `1h30m0s`, `1.5s`, `200ms`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let total = i128::from(self.0.unsigned_abs());
        if total == 0 {
            return f.write_str("0s");
        }
        if self.0 < 0 {
            f.write_str("-")?;
        }
        if total < SECOND {
            let (unit, name) = if total < MICROSECOND {
                (NANOSECOND, "ns")
            } else if total < MILLISECOND {
                (MICROSECOND, "\u{b5}s")
            } else {
                (MILLISECOND, "ms")
            };
            return write!(f, "{}{name}", decimal(total, unit));
        }
        if total >= HOUR {
            write!(f, "{}h", total / HOUR)?;
        }
        if total >= MINUTE {
            write!(f, "{}m", total % HOUR / MINUTE)?;
        }
        write!(f, "{}s", decimal(total % MINUTE, SECOND))
    }
}

/// `amount` in `unit`s, a power of ten, as a decimal without trailing zeros.
fn decimal(amount: i128, unit: i128) -> String {
    let (whole, fraction) = (amount / unit, amount % unit);
    if fraction == 0 {
        return whole.to_string();
    }
    let digits = unit.ilog10() as usize;
    format!("{whole}.{fraction:0digits$}").trim_end_matches('0').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_formatted_as_in_go() {
        for (text, expected) in [
            ("0", "0s"),
            ("0s", "0s"),
            ("30s", "30s"),
            ("60s", "1m0s"),
            ("1m", "1m0s"),
            ("90m", "1h30m0s"),
            ("1h", "1h0m0s"),
            ("1.5h", "1h30m0s"),
            (".5m", "30s"),
            ("2.s", "2s"),
            ("1m30s", "1m30s"),
            ("1500ms", "1.5s"),
            ("1.0001s", "1.0001s"),
            ("200ms", "200ms"),
            ("2us", "2\u{b5}s"),
            ("2500\u{3bc}s", "2.5ms"),
            ("7ns", "7ns"),
            ("-1m", "-1m0s"),
            ("+5s", "5s"),
            ("2562047h47m16.854775807s", "2562047h47m16.854775807s"),
        ] {
            let duration: GoDuration = text.parse().unwrap();
            assert_eq!(duration.to_string(), expected, "{text}");
            assert_eq!(duration.is_negative(), text.starts_with('-'), "{text}");
        }
    }

    #[test]
    fn other_texts_are_rejected() {
        for text in ["", "-", "soon", "5", "5x", "1d", "s", ".s", "1..5s", "1h 30m", "2562048h", "９s"] {
            assert_eq!(text.parse::<GoDuration>(), Err(GoDurationError(text.to_owned())), "{text}");
        }
        let message = "soon".parse::<GoDuration>().unwrap_err().to_string();
        assert_eq!(message, "\"soon\" is not a duration such as 30s, 1m30s or 1.5h");
    }
}
