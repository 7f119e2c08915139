//! Parsers of flag values that several subcommands share.

use std::time::Duration;

use crate::api::duration;

/// A boolean in the spellings of Go's `strconv.ParseBool`, as Karpenter accepts it.
pub(crate) fn parse_bool(text: &str) -> Result<bool, String> {
    match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Ok(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Ok(false),
        _ => Err("expected a boolean: true, false, 1, 0, t or f".into()),
    }
}

/// A duration such as 500ms, 10s or 1m30s.
pub(crate) fn parse_duration(text: &str) -> Result<Duration, String> {
    let expected = "expected a duration such as 500ms, 10s or 1m30s";
    let milliseconds = match text.strip_suffix("ms").map(str::parse::<i64>) {
        Some(parsed) => parsed.map_err(|_| expected.to_owned())?,
        None => duration::parse(text).map_err(|error| format!("{error}; {expected}"))?,
    };
    u64::try_from(milliseconds).map(Duration::from_millis).map_err(|_| expected.to_owned())
}
