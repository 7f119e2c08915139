//! Durations in the syntax of Karpenter's objects.

use std::fmt;

/// A text that is not a duration.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is not a duration: write hours, minutes and seconds, as 720h, 30s or 1h30m{1}")]
pub struct ParseDurationError(String, Hint);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Hint {
    None,
    Never,
    TooLong,
}

impl fmt::Display for Hint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "",
            Self::Never => ", or Never",
            Self::TooLong => "; at most 2562047h, 292 years",
        })
    }
}

/// Longest duration that Karpenter can represent: 2^63 - 1 nanoseconds.
const MAX_MILLIS: i64 = i64::MAX / 1_000_000;

/// Parses a duration of hours, minutes and seconds in any order, such as `720h`, `30s` or `1h30m`; in milliseconds.
///
/// # Errors
/// When `text` is not a duration, or longer than 292 years.
pub fn parse(text: &str) -> Result<i64, ParseDurationError> {
    let error = |hint| ParseDurationError(text.to_owned(), hint);
    let mut total = 0_i64;
    let mut rest = text;
    while !rest.is_empty() {
        let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
        let (number, tail) = rest.split_at(digits);
        let unit = match tail.bytes().next() {
            _ if digits == 0 => return Err(error(Hint::None)),
            Some(b'h') => 3_600_000,
            Some(b'm') => 60_000,
            Some(b's') => 1_000,
            _ => return Err(error(Hint::None)),
        };
        total = number
            .parse::<i64>()
            .ok()
            .and_then(|number| number.checked_mul(unit))
            .and_then(|millis| total.checked_add(millis))
            .filter(|total| *total <= MAX_MILLIS)
            .ok_or_else(|| error(Hint::TooLong))?;
        rest = &tail[1..];
    }
    if text.is_empty() { Err(error(Hint::None)) } else { Ok(total) }
}

/// Parses a duration, in milliseconds, or `Never`, which is `None`.
///
/// # Errors
/// When `text` is neither, or the duration is longer than 292 years.
pub fn parse_or_never(text: &str) -> Result<Option<i64>, ParseDurationError> {
    if text == "Never" {
        return Ok(None);
    }
    parse(text).map(Some).map_err(|ParseDurationError(text, hint)| {
        ParseDurationError(text, if hint == Hint::None { Hint::Never } else { hint })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hours_minutes_and_seconds_add_up() {
        for (text, millis) in [
            ("0s", 0),
            ("30s", 30_000),
            ("720h", 2_592_000_000),
            ("43200m", 2_592_000_000),
            ("1h30m", 5_400_000),
            ("1h30m15s", 5_415_000),
            ("30m1h", 5_400_000),
            ("007s", 7_000),
            ("2562047h", 9_223_369_200_000),
        ] {
            assert_eq!(parse(text), Ok(millis), "{text}");
            assert_eq!(parse_or_never(text), Ok(Some(millis)), "{text}");
        }
        assert_eq!(parse_or_never("Never"), Ok(None));
    }

    #[test]
    fn any_other_text_is_rejected() {
        for text in [
            "",
            "5",
            "h",
            "1d",
            "-1s",
            "1.5h",
            "1h 30m",
            "1h30",
            "never",
            "Never",
            "１s",
            "2562048h",
            "99999999999999999999s",
        ] {
            assert!(parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn the_error_message_shows_the_syntax() {
        insta::assert_snapshot!(parse("30d").unwrap_err(), @"'30d' is not a duration: write hours, minutes and seconds, as 720h, 30s or 1h30m");
        insta::assert_snapshot!(
            parse_or_never("never").unwrap_err(),
            @"'never' is not a duration: write hours, minutes and seconds, as 720h, 30s or 1h30m, or Never"
        );
        insta::assert_snapshot!(
            parse("9999999h").unwrap_err(),
            @"'9999999h' is not a duration: write hours, minutes and seconds, as 720h, 30s or 1h30m; at most 2562047h, 292 years"
        );
    }
}
