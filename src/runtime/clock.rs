//! The clock of the process: the time of the API server, which writes every timestamp that is compared with it. This is the only module
//! that reads the wall clock, and it reads it once: pure modules get the time as an argument.
//!
//! Between two corrections the clock is monotonic, so that a step of the machine's wall clock has no effect. The first response of the
//! API server sets it; later corrections change its rate by at most [`MAX_SLEW`], so that no decision observes a jump.

use std::sync::{LazyLock, Mutex};
use std::time::{Duration, Instant};

use jiff::{SignedDuration, Timestamp};
use stowage_model::time::UnixMillis;

use crate::sync::lock;

/// A difference to the API server's clock up to this is not corrected: its `Date` has whole seconds, and the response takes time.
const TOLERANCE: SignedDuration = SignedDuration::from_secs(2);
/// Later corrections are at most one tenth of the time since the correction before: an hour is absorbed in ten hours.
const MAX_SLEW: i32 = 10;

static CLOCK: LazyLock<Clock> = LazyLock::new(|| Clock::new(Timestamp::now(), Instant::now()));

/// The current time.
pub fn now() -> UnixMillis {
    UnixMillis(timestamp().as_millisecond())
}

/// The current time in full resolution, for fields of the Kubernetes API.
pub fn timestamp() -> Timestamp {
    CLOCK.at(Instant::now())
}

/// Corrects the clock by the `Date` of a response of the API server. Returns the first correction, if it was needed.
pub fn synchronize(server: Timestamp) -> Option<SignedDuration> {
    CLOCK.synchronize(server, Instant::now())
}

struct Clock {
    reading: Mutex<Reading>,
}

#[derive(Clone, Copy)]
struct Reading {
    /// The time at `base`.
    time: Timestamp,
    base: Instant,
    /// When the clock was last compared with the API server's.
    compared: Option<Instant>,
}

impl Reading {
    fn at(&self, now: Instant) -> Timestamp {
        self.time.saturating_add(now.saturating_duration_since(self.base)).unwrap_or(self.time)
    }
}

impl Clock {
    fn new(wall: Timestamp, now: Instant) -> Self {
        Self { reading: Mutex::new(Reading { time: wall, base: now, compared: None }) }
    }

    fn at(&self, now: Instant) -> Timestamp {
        lock(&self.reading).at(now)
    }

    fn synchronize(&self, server: Timestamp, now: Instant) -> Option<SignedDuration> {
        let mut reading = lock(&self.reading);
        let ours = reading.at(now);
        let ahead = server.duration_since(ours);
        let since = reading.compared.map(|compared| now.saturating_duration_since(compared));
        let correction = correction(ahead, since);
        let first = reading.compared.is_none() && !correction.is_zero();
        *reading = Reading { time: ours.saturating_add(correction).unwrap_or(ours), base: now, compared: Some(now) };
        first.then_some(correction)
    }
}

/// By how much a clock is corrected that the API server's is `ahead` of, and that was last compared `since` ago.
fn correction(ahead: SignedDuration, since: Option<Duration>) -> SignedDuration {
    if ahead.abs() <= TOLERANCE {
        return SignedDuration::ZERO;
    }
    let Some(since) = since else { return ahead };
    let most = SignedDuration::try_from(since).unwrap_or(SignedDuration::MAX) / MAX_SLEW;
    ahead.clamp(-most, most)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: Duration = Duration::from_hours(1);

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_second(1_000_000 + seconds).unwrap()
    }

    #[test]
    fn the_first_response_sets_the_clock() {
        for hour_off in [-3_600, 3_600] {
            let start = Instant::now();
            let clock = Clock::new(at(hour_off), start);
            let corrected = clock.synchronize(at(0), start);
            assert_eq!(corrected, Some(SignedDuration::from_secs(-hour_off)));
            assert_eq!(clock.at(start), at(0));
            assert_eq!(clock.at(start + HOUR), at(3_600), "the wall clock is not read again");
        }
    }

    #[test]
    fn a_step_of_the_api_servers_clock_is_absorbed_slowly_and_never_turns_time_back() {
        for step in [-3_600, 3_600] {
            let start = Instant::now();
            let clock = Clock::new(at(0), start);
            assert_eq!(clock.synchronize(at(1), start), None, "within the tolerance");
            let mut last = clock.at(start);
            for turn in 1..=36_000 {
                let now = start + Duration::from_secs(u64::try_from(turn).unwrap());
                assert_eq!(clock.synchronize(at(turn + step), now), None);
                let time = clock.at(now);
                let passed = time.duration_since(last);
                assert!(passed >= SignedDuration::from_millis(900) && passed <= SignedDuration::from_millis(1_100));
                last = time;
            }
            let left = last.duration_since(at(36_000 + step)).abs();
            assert!(left <= TOLERANCE, "absorbed after ten hours: {left}");
        }
    }

    #[test]
    fn small_differences_are_not_corrected() {
        for seconds in [-2, 0, 2] {
            assert_eq!(correction(SignedDuration::from_secs(seconds), None), SignedDuration::ZERO);
        }
        assert_eq!(correction(SignedDuration::from_secs(3), Some(Duration::ZERO)), SignedDuration::ZERO);
    }
}
