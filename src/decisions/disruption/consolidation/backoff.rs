//! Nodes that could not be removed are tried again later, each by itself, so that the next ones follow.

use std::collections::BTreeMap;
use std::time::Duration;

use stowage_model::time::UnixMillis;

use crate::decisions::disruption::blockers::Blocker;
use crate::decisions::disruption::obstacle::Obstacle;

/// First and longest backoff of a node whose pods have no other place, or not a cheaper one; it doubles.
const BLOCKED: (Duration, Duration) = (Duration::from_mins(1), Duration::from_mins(15));

/// Backoff by claim.
#[derive(Debug, Default)]
pub struct Backoff(BTreeMap<String, Entry>);

#[derive(Debug)]
struct Entry {
    since: UnixMillis,
    wait: Duration,
    why: Blocker,
    /// Whether the node is tried earlier: after the first backoff when a pod was bound or ended somewhere, because there may be room now, and at
    /// once when a pod was bound to or ended on the node itself, because other pods need room now.
    needs_room: bool,
}

impl Backoff {
    /// Records that the pods of a node have no other place.
    pub fn blocked(&mut self, claim: &str, why: Obstacle, now: UnixMillis) {
        self.needs_room(claim, Blocker::Obstacle(why), now);
    }

    /// Records that a move of a node does not pay by itself.
    pub fn dropped(&mut self, claim: &str, why: Blocker, now: UnixMillis) {
        self.needs_room(claim, why, now);
    }

    fn needs_room(&mut self, claim: &str, why: Blocker, now: UnixMillis) {
        self.failed(claim, BLOCKED.0, Entry { since: now, wait: BLOCKED.0, why, needs_room: true });
    }

    /// Records that the removal of a node was rolled back. It is left alone for at least this time.
    pub fn abandoned(&mut self, claim: &str, at_least: Duration, now: UnixMillis) {
        self.failed(claim, at_least, Entry { since: now, wait: at_least, why: Blocker::Abandoned, needs_room: false });
    }

    /// Doubles the wait after the same kind of failure.
    fn failed(&mut self, claim: &str, first: Duration, entry: Entry) {
        let last = self.0.get(claim).filter(|last| last.needs_room == entry.needs_room);
        let wait = last.map_or(first, |last| (last.wait * 2).clamp(first, BLOCKED.1));
        self.0.insert(claim.to_owned(), Entry { wait, ..entry });
    }

    /// Why a node is left out now; `None`: it is not. The last pod was bound or ended on the node at `on_node`, and `anywhere` in the cluster.
    pub fn leaves_out(
        &self,
        claim: &str,
        on_node: UnixMillis,
        anywhere: UnixMillis,
        now: UnixMillis,
    ) -> Option<&Blocker> {
        let entry = self.0.get(claim)?;
        if entry.needs_room && on_node > entry.since {
            return None;
        }
        let may_have_room = entry.needs_room && anywhere > entry.since;
        let wait = if may_have_room { entry.wait.min(BLOCKED.0) } else { entry.wait };
        (!entry.since.is_older_than(wait, now)).then_some(&entry.why)
    }

    /// Forgets nodes that did not fail again for the longest backoff.
    pub fn forget(&mut self, now: UnixMillis) {
        self.0.retain(|_, entry| !entry.since.is_older_than(entry.wait + BLOCKED.1, now));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WHY: Obstacle = Obstacle::DaemonLeftOut;

    #[test]
    fn the_backoff_doubles_up_to_fifteen_minutes_and_ends_after_as_long() {
        let (mut backoff, mut now) = (Backoff::default(), UnixMillis(0));
        for minutes in [1, 2, 4, 8, 15, 15] {
            backoff.blocked("a", WHY, now);
            let end = now + Duration::from_mins(minutes);
            let leaves_out = |at: UnixMillis| backoff.leaves_out("a", now, now, at).is_some();
            assert!(leaves_out(UnixMillis(end.0 - 1)) && !leaves_out(end), "{minutes}");
            assert!(backoff.leaves_out("b", now, now, now).is_none());
            now = end;
            backoff.forget(now);
        }
        now += BLOCKED.1;
        backoff.forget(now);
        backoff.blocked("a", WHY, now);
        assert!(backoff.leaves_out("a", now, now, now + Duration::from_mins(1)).is_none(), "it starts over");
    }

    #[test]
    fn a_pod_event_ends_the_wait_for_room_but_not_after_an_abandoned_replacement() {
        let (mut backoff, minute) = (Backoff::default(), Duration::from_mins(1));
        backoff.blocked("a", WHY, UnixMillis(0));
        backoff.blocked("a", WHY, UnixMillis(0) + minute);
        let long = minute * 10;
        backoff.abandoned("b", long, UnixMillis(0));
        let (earlier, later) = (UnixMillis(1_000), UnixMillis(61_000));
        for (claim, event, minutes, left_out) in [
            ("a", earlier, 2, true),
            ("a", earlier, 3, false),
            ("a", later, 1, true),
            ("a", later, 2, false),
            ("b", later, 9, true),
            ("b", later, 10, false),
        ] {
            assert_eq!(
                backoff.leaves_out(claim, UnixMillis(0), event, UnixMillis(0) + minute * minutes).is_some(),
                left_out,
                "{claim} {minutes}"
            );
        }
        backoff.blocked("b", WHY, UnixMillis(0) + long);
        assert!(
            backoff.leaves_out("b", UnixMillis(0), UnixMillis(0), UnixMillis(0) + long + minute).is_none(),
            "a failure of another kind starts over"
        );
        for (at_least, minutes) in [(minute, 1), (minute, 2), (long, 10), (minute, 15), (minute, 15)] {
            backoff.abandoned("c", at_least, UnixMillis(0));
            let leaves_out = |at| backoff.leaves_out("c", UnixMillis(0), UnixMillis(0), at).is_some();
            let end = UnixMillis(0) + minute * minutes;
            assert!(leaves_out(UnixMillis(end.0 - 1)) && !leaves_out(end), "{at_least:?} {minutes}");
        }
    }

    #[test]
    fn a_node_with_changed_pods_is_tried_again_but_not_after_an_abandoned_replacement() {
        let (mut backoff, second) = (Backoff::default(), Duration::from_secs(1));
        let since = UnixMillis(0) + second * 10;
        backoff.blocked("a", WHY, since);
        backoff.abandoned("b", second * 60, since);
        for (claim, on_node, left_out) in [("a", 9, true), ("a", 10, true), ("a", 11, false), ("b", 11, true)] {
            let event = UnixMillis(0) + second * on_node;
            let found = backoff.leaves_out(claim, event, event, since + second * 2);
            assert_eq!(found.is_some(), left_out, "{claim} {on_node}");
        }
    }
}
