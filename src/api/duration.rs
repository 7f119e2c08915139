//! Durations in the syntax of Karpenter's objects.

use std::fmt;

use crate::go_duration::GoDuration;

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

/// Parses a duration of hours, minutes and seconds in any order, such as `720h`, `30s` or `1h30m`; in milliseconds. It is Go's notation
/// without signs, fractions and shorter units.
///
/// # Errors
/// When `text` is not a duration, or longer than 292 years.
pub fn parse(text: &str) -> Result<i64, ParseDurationError> {
    let error = |hint| ParseDurationError(text.to_owned(), hint);
    let is_unit = |c| matches!(c, 'h' | 'm' | 's');
    let is_number = |number: &str| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit());
    if !text.ends_with(is_unit) || !text.split_terminator(is_unit).all(is_number) {
        return Err(error(Hint::None));
    }
    text.parse::<GoDuration>().map(|duration| duration.nanoseconds() / 1_000_000).map_err(|_| error(Hint::TooLong))
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
