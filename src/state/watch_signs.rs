//! Signs of life of the watches: when the last event or bookmark of each kind arrived. The table of a kind is as old as its last sign,
//! whoever read it since.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::Duration;

use stowage_model::time::UnixMillis;

use crate::state::kinds::{KINDS, SERVICES};

/// A table that is older restrains nobody, and is not a basis for removing anything.
pub const MAX_AGE: Duration = Duration::from_mins(1);

/// The signs of every watched kind.
#[derive(Debug)]
pub struct WatchSigns {
    kinds: BTreeMap<&'static str, Sign>,
}

#[derive(Debug)]
struct Sign {
    /// [`UnixMillis::MIN`] until the kind is listed for the first time.
    last: AtomicI64,
    lists: AtomicU64,
    panics: AtomicU64,
    /// The time since which an object is left out of the table; [`UnixMillis::MIN`] for none.
    incomplete_since: AtomicI64,
}

impl Default for WatchSigns {
    fn default() -> Self {
        let sign = || Sign {
            last: AtomicI64::new(UnixMillis::MIN.0),
            lists: AtomicU64::new(0),
            panics: AtomicU64::new(0),
            incomplete_since: AtomicI64::new(UnixMillis::MIN.0),
        };
        Self { kinds: KINDS.into_iter().chain([SERVICES]).map(|kind| (kind, sign())).collect() }
    }
}

/// A kind whose last sign is too old.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stale {
    pub kind: &'static str,
    pub age: Duration,
}

impl WatchSigns {
    /// Records an event or a bookmark of a kind that was listed. Before, and of another resource, it is not a sign.
    pub fn record(&self, kind: &str, now: UnixMillis) {
        if let Some(sign) = self.kinds.get(kind) {
            let never = UnixMillis::MIN.0;
            let newer = |last: i64| (last != never && last < now.0).then_some(now.0);
            let _ = sign.last.fetch_update(Ordering::AcqRel, Ordering::Acquire, newer);
        }
    }

    /// Records a complete list of a kind.
    pub fn record_list(&self, kind: &str, now: UnixMillis) {
        if let Some(sign) = self.kinds.get(kind) {
            sign.last.fetch_max(now.0, Ordering::AcqRel);
            sign.lists.fetch_add(1, Ordering::AcqRel);
        }
    }

    /// Records that the table of a kind panicked over an object, which is left out of it.
    pub fn record_panic(&self, kind: &str, now: UnixMillis) {
        if let Some(sign) = self.kinds.get(kind) {
            sign.panics.fetch_add(1, Ordering::AcqRel);
            let never = UnixMillis::MIN.0;
            let _ = sign.incomplete_since.compare_exchange(never, now.0, Ordering::AcqRel, Ordering::Acquire);
        }
    }

    /// Records that no object is left out of the table of a kind any more.
    pub fn record_complete(&self, kind: &str) {
        if let Some(sign) = self.kinds.get(kind) {
            sign.incomplete_since.store(UnixMillis::MIN.0, Ordering::Release);
        }
    }

    /// Number of panics of each kind's table.
    pub fn panics(&self) -> impl Iterator<Item = (&'static str, u64)> {
        self.kinds.iter().map(|(kind, sign)| (*kind, sign.panics.load(Ordering::Acquire)))
    }

    /// Since when an object is left out of the table of a kind.
    fn incomplete_since(&self, kind: &str) -> Option<UnixMillis> {
        let since = self.kinds.get(kind)?.incomplete_since.load(Ordering::Acquire);
        (since != UnixMillis::MIN.0).then_some(UnixMillis(since))
    }

    /// The last sign of a kind; `None` until it is listed.
    fn last(&self, kind: &str) -> Option<UnixMillis> {
        let last = self.kinds.get(kind)?.last.load(Ordering::Acquire);
        (last != UnixMillis::MIN.0).then_some(UnixMillis(last))
    }

    /// The listed kinds, each with the age of its last sign and the number of its lists.
    pub fn ages(&self, now: UnixMillis) -> impl Iterator<Item = (&'static str, Duration, u64)> {
        self.kinds.iter().filter_map(move |(kind, sign)| {
            Some((*kind, now.saturating_since(self.last(kind)?), sign.lists.load(Ordering::Acquire)))
        })
    }

    /// The time up to which all of these kinds are known: the oldest of their last signs. `now` before any of them is listed.
    pub fn as_of(&self, kinds: &[&str], now: UnixMillis) -> UnixMillis {
        kinds.iter().filter_map(|kind| self.last(kind)).min().unwrap_or(now).min(now)
    }

    /// A kind whose table lacks an object, or the kind with the oldest sign, if that is older than [`MAX_AGE`].
    pub fn stale(&self, kinds: &'static [&'static str], now: UnixMillis) -> Option<Stale> {
        let incomplete = kinds.iter().find_map(|kind| Some((*kind, self.incomplete_since(kind)?)));
        if let Some((kind, since)) = incomplete {
            return Some(Stale { kind, age: now.saturating_since(since) });
        }
        let oldest = kinds.iter().filter_map(|kind| Some((self.last(kind)?, *kind))).min()?;
        let age = now.saturating_since(oldest.0);
        (age > MAX_AGE).then_some(Stale { kind: oldest.1, age })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TWO: &[&str] = &["pods", "nodes"];

    #[test]
    fn a_table_is_as_old_as_its_last_sign() {
        let signs = WatchSigns::default();
        let at = |seconds: i64| UnixMillis(seconds * 1_000);
        assert_eq!((signs.as_of(TWO, at(5)), signs.stale(TWO, at(5))), (at(5), None), "nothing is listed yet");
        signs.record("pods", at(1));
        assert_eq!(signs.stale(TWO, at(100)), None, "an event before the first list is no sign");
        signs.record_list("pods", at(10));
        signs.record_list("nodes", at(10));
        signs.record("nodes", at(50));
        signs.record("nodes", at(40));
        signs.record("secrets", at(50));
        assert_eq!(signs.as_of(TWO, at(60)), at(10));
        assert_eq!(signs.stale(TWO, at(70)), None);
        assert_eq!(signs.stale(TWO, at(71)), Some(Stale { kind: "pods", age: Duration::from_secs(61) }));
        assert_eq!(signs.stale(&["nodes"], at(71)), None);
        signs.record("pods", at(71));
        assert_eq!(signs.stale(TWO, at(71)), None);
        let ages: Vec<_> = signs.ages(at(71)).collect();
        assert_eq!(ages, [("nodes", Duration::from_secs(21), 1), ("pods", Duration::ZERO, 1)]);
    }

    #[test]
    fn a_table_that_lacks_an_object_is_stale_until_it_is_complete() {
        let signs = WatchSigns::default();
        let now = UnixMillis(5_000);
        signs.record_list("pods", now);
        signs.record_panic("pods", now);
        signs.record_panic("pods", now);
        let later = UnixMillis(7_000);
        assert_eq!(signs.stale(TWO, later), Some(Stale { kind: "pods", age: Duration::from_secs(2) }));
        assert_eq!((signs.stale(&["nodes"], later), signs.as_of(TWO, later)), (None, now));
        assert_eq!(signs.panics().find(|(_, panics)| *panics > 0), Some(("pods", 2)));
        signs.record_complete("pods");
        assert_eq!(signs.stale(TWO, later), None);
    }

    #[test]
    fn a_step_back_of_the_clock_makes_nothing_stale() {
        let signs = WatchSigns::default();
        signs.record_list("pods", UnixMillis(4_000_000));
        assert_eq!(signs.stale(&["pods"], UnixMillis(0)), None);
        assert_eq!(signs.as_of(&["pods"], UnixMillis(0)), UnixMillis(0));
    }
}
