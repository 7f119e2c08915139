//! A cap on how often something happens within any minute, or another period.

use std::collections::VecDeque;
use std::time::Duration;

use stowage_model::time::UnixMillis;

/// The period that the cap applies to, unless it has another.
pub const PERIOD: Duration = Duration::from_mins(1);

/// Times of what happened in the last period: at most as many as the cap admits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RateCap {
    period: Duration,
    admitted: VecDeque<UnixMillis>,
}

impl Default for RateCap {
    fn default() -> Self {
        Self::within(PERIOD)
    }
}

impl RateCap {
    /// A cap for any such period.
    pub fn within(period: Duration) -> Self {
        Self { period, admitted: VecDeque::new() }
    }

    /// A cap after these times of what happened before.
    pub fn after(times: impl Iterator<Item = UnixMillis>, now: UnixMillis) -> Self {
        let mut admitted: Vec<UnixMillis> = times.filter(|at| !at.is_older_than(PERIOD, now)).collect();
        admitted.sort_unstable();
        Self { admitted: admitted.into(), ..Self::default() }
    }

    /// How many may happen now, with at most `most` in any period.
    pub fn admissible(&mut self, most: usize, now: UnixMillis) -> usize {
        while self.admitted.front().is_some_and(|at| at.is_older_than(self.period, now)) {
            self.admitted.pop_front();
        }
        most.saturating_sub(self.admitted.len())
    }

    /// How many of `wanted` may happen now, with at most `most` in any period; records them.
    pub fn admit(&mut self, wanted: usize, most: usize, now: UnixMillis) -> usize {
        let admitted = wanted.min(self.admissible(most, now));
        self.admitted.extend(std::iter::repeat_n(now, admitted));
        admitted
    }

    /// Takes back what was admitted last and did not happen.
    pub fn take_back(&mut self, count: usize) {
        self.admitted.truncate(self.admitted.len().saturating_sub(count));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_minute_has_more_than_the_cap() {
        let mut cap = RateCap::default();
        let start = UnixMillis(1_000_000);
        assert_eq!(cap.admit(3, 5, start), 3);
        assert_eq!(cap.admit(3, 5, start + Duration::from_secs(30)), 2, "the rest of the minute");
        assert_eq!(cap.admit(1, 5, start + PERIOD - Duration::from_millis(1)), 0);
        assert_eq!(cap.admit(9, 5, start + PERIOD), 3, "the first three are a minute old");
        assert_eq!(cap.admit(9, 5, start + PERIOD), 0);
        assert_eq!(cap.admit(1, 0, start + 10 * PERIOD), 0);
        assert_eq!(cap.admit(4, 5, start + 10 * PERIOD), 4);
        cap.take_back(3);
        assert_eq!(cap.admissible(5, start + 10 * PERIOD), 4);
        cap.take_back(9);
        // A clock that is stepped back closes the cap for that time, and no longer.
        assert_eq!(cap.admit(5, 5, start + 10 * PERIOD), 5);
        assert_eq!(cap.admit(5, 5, start), 0);
        assert_eq!(cap.admit(5, 5, start + 11 * PERIOD), 5);
    }
}
