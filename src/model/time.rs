//! Points in time with their unit. Durations are [`std::time::Duration`].

use std::fmt;
use std::ops::{Add, AddAssign, Sub};
use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use serde::{Deserialize, Serialize};

/// A point in time: milliseconds since the Unix epoch. Arithmetic saturates, so that no input makes it panic.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct UnixMillis(pub i64);

impl UnixMillis {
    /// Before every other point in time: "never yet".
    pub const MIN: Self = Self(i64::MIN);
    /// After every other point in time: "never".
    pub const MAX: Self = Self(i64::MAX);

    /// The time since `earlier`; zero when `earlier` is later.
    #[must_use]
    pub fn saturating_since(self, earlier: Self) -> Duration {
        Duration::from_millis(u64::try_from(self.0.saturating_sub(earlier.0)).unwrap_or(0))
    }

    /// Whether `period` has passed since this point: `now >= self + period`.
    #[must_use]
    pub fn is_older_than(self, period: Duration, now: Self) -> bool {
        self + period <= now
    }

    /// RFC 3339 in UTC, whole seconds, the format of annotations. A time that RFC 3339 cannot represent is written as the epoch.
    #[must_use]
    pub fn rfc3339(self) -> String {
        Timestamp::from_second(self.0.div_euclid(1_000)).unwrap_or_default().to_string()
    }

    /// Without the fraction of a second, as in the status of an object.
    #[must_use]
    pub fn whole_seconds(self) -> Self {
        Self(self.0.div_euclid(1_000).saturating_mul(1_000))
    }

    /// Parses RFC 3339.
    pub fn parse_rfc3339(text: &str) -> Option<Self> {
        text.parse::<Timestamp>().ok().map(|time| Self(time.as_millisecond()))
    }
}

impl From<&Time> for UnixMillis {
    fn from(time: &Time) -> Self {
        Self(time.0.as_millisecond())
    }
}

impl Add<Duration> for UnixMillis {
    type Output = Self;

    fn add(self, duration: Duration) -> Self {
        Self(self.0.saturating_add(millis(duration)))
    }
}

impl AddAssign<Duration> for UnixMillis {
    fn add_assign(&mut self, duration: Duration) {
        *self = *self + duration;
    }
}

impl Sub<Duration> for UnixMillis {
    type Output = Self;

    fn sub(self, duration: Duration) -> Self {
        Self(self.0.saturating_sub(millis(duration)))
    }
}

impl fmt::Display for UnixMillis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.rfc3339())
    }
}

fn millis(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arithmetic_saturates_and_never_goes_back() {
        let second = Duration::from_secs(1);
        assert_eq!(UnixMillis(500) + second, UnixMillis(1_500));
        assert_eq!(UnixMillis(500) - second, UnixMillis(-500));
        assert_eq!(UnixMillis::MAX + second, UnixMillis::MAX);
        assert_eq!(UnixMillis::MIN - Duration::MAX, UnixMillis::MIN);
        assert_eq!(UnixMillis(1_500).saturating_since(UnixMillis(500)), second);
        assert_eq!(UnixMillis(500).saturating_since(UnixMillis(1_500)), Duration::ZERO);
        assert!(UnixMillis(0).is_older_than(second, UnixMillis(1_000)));
        assert!(!UnixMillis(0).is_older_than(second, UnixMillis(999)));
    }

    #[test]
    fn rfc3339_has_whole_seconds_and_parses_back() {
        assert_eq!(UnixMillis(1_999).rfc3339(), "1970-01-01T00:00:01Z");
        assert_eq!(UnixMillis::parse_rfc3339("1970-01-01T00:00:01Z"), Some(UnixMillis(1_000)));
        assert_eq!(UnixMillis::parse_rfc3339("soon"), None);
        assert_eq!(UnixMillis::MAX.rfc3339(), "1970-01-01T00:00:00Z", "a year that RFC 3339 cannot represent");
    }
}
