//! Nodes that could not be removed are tried again later, each by itself, so that the next ones follow.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::model::time::UnixMillis;

/// First and longest backoff of a node whose pods have no other place; it doubles.
const BLOCKED: (Duration, Duration) = (Duration::from_mins(1), Duration::from_mins(15));
/// Backoff of a node whose replacement was not ready in time.
const ABANDONED: Duration = Duration::from_mins(10);

/// Backoff by claim.
#[derive(Debug, Default)]
pub struct Backoff(BTreeMap<String, Entry>);

#[derive(Debug)]
struct Entry {
    last: Duration,
    until: UnixMillis,
}

impl Backoff {
    /// Records that the pods of a node have no other place.
    pub fn blocked(&mut self, claim: &str, now: UnixMillis) {
        let last = self.0.get(claim).map_or(Duration::ZERO, |entry| entry.last);
        let wait = (last * 2).clamp(BLOCKED.0, BLOCKED.1);
        self.0.insert(claim.to_owned(), Entry { last: wait, until: now + wait });
    }

    /// Records that the replacement of a node was not ready in time.
    pub fn abandoned(&mut self, claim: &str, now: UnixMillis) {
        self.0.insert(claim.to_owned(), Entry { last: ABANDONED, until: now + ABANDONED });
    }

    /// Whether a node is left out now.
    pub fn leaves_out(&self, claim: &str, now: UnixMillis) -> bool {
        self.0.get(claim).is_some_and(|entry| entry.until > now)
    }

    /// Forgets nodes that did not fail again for the longest backoff.
    pub fn forget(&mut self, now: UnixMillis) {
        self.0.retain(|_, entry| !entry.until.is_older_than(BLOCKED.1, now));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_backoff_doubles_up_to_fifteen_minutes_and_is_forgotten_after_as_long_without_a_failure() {
        let (mut backoff, mut now) = (Backoff::default(), UnixMillis(0));
        for minutes in [1, 2, 4, 8, 15, 15] {
            backoff.blocked("a", now);
            let end = now + Duration::from_mins(minutes);
            assert!(backoff.leaves_out("a", UnixMillis(end.0 - 1)) && !backoff.leaves_out("a", end), "{minutes}");
            assert!(!backoff.leaves_out("b", now));
            now = end;
            backoff.forget(now);
        }
        now += BLOCKED.1;
        backoff.forget(now);
        backoff.blocked("a", now);
        assert!(!backoff.leaves_out("a", now + Duration::from_mins(1)), "it starts over");
        backoff.abandoned("b", now);
        assert!(backoff.leaves_out("b", now + Duration::from_mins(9)) && !backoff.leaves_out("b", now + ABANDONED));
    }
}
