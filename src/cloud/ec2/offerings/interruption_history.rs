//! How often spot instances of an offering were taken back of late: a count that halves every six hours.

use std::collections::BTreeMap;

/// Time in which a count halves, milliseconds.
const HALF_LIFE_MS: i64 = 6 * 3_600_000;
/// A count that is as good as none, thousandths.
const FORGOTTEN: i64 = 10;
/// The most that a count grows to, thousandths: one bad hour must not outlast a day.
const MOST: i64 = 16_000;

/// What happened to an instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Setback {
    /// EC2 takes it back.
    Interrupted,
    /// EC2 says it may soon.
    RebalanceRecommended,
}

impl Setback {
    /// Thousandths of an interruption.
    fn milli(self) -> i64 {
        match self {
            Self::Interrupted => 1_000,
            Self::RebalanceRecommended => 250,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Count {
    milli: i64,
    at_ms: i64,
}

impl Count {
    /// The count at a time: halved for each half-life gone, and in a line between. Before its own time it is itself.
    fn at(self, now_ms: i64) -> i64 {
        let gone = now_ms.saturating_sub(self.at_ms).max(0);
        let (halvings, rest) = (gone / HALF_LIFE_MS, gone % HALF_LIFE_MS);
        if halvings >= 62 {
            return 0;
        }
        let milli = self.milli >> halvings;
        milli - milli * rest / (2 * HALF_LIFE_MS)
    }
}

/// Decaying counts of interruptions by instance type and zone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct InterruptionHistory {
    counts: BTreeMap<String, BTreeMap<String, Count>>,
}

impl InterruptionHistory {
    /// Notes what happened to a spot instance of an offering.
    pub fn note(&mut self, instance_type: &str, zone: &str, setback: Setback, now_ms: i64) {
        let milli = (self.milli(instance_type, zone, now_ms) + setback.milli()).min(MOST);
        let zones = self.counts.entry(instance_type.to_owned()).or_default();
        zones.insert(zone.to_owned(), Count { milli, at_ms: now_ms });
    }

    /// Interruptions of an offering as they still count, in thousandths.
    pub fn milli(&self, instance_type: &str, zone: &str, now_ms: i64) -> i64 {
        self.counts.get(instance_type).and_then(|zones| zones.get(zone)).map_or(0, |count| count.at(now_ms))
    }

    /// Drops what is as good as forgotten.
    pub fn forget(&mut self, now_ms: i64) {
        self.counts.retain(|_, zones| {
            zones.retain(|_, count| count.at(now_ms) > FORGOTTEN);
            !zones.is_empty()
        });
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_count_halves_every_six_hours_and_in_a_line_between() {
        let mut history = InterruptionHistory::default();
        history.note("m5.large", "a", Setback::Interrupted, 0);
        for (hours, expected) in [(0, 1_000), (3, 750), (6, 500), (9, 375), (12, 250), (600, 0)] {
            assert_eq!(history.milli("m5.large", "a", hours * 3_600_000), expected, "{hours} h");
        }
        assert_eq!(history.milli("m5.large", "a", -5), 1_000, "a clock that went back changes nothing");
        assert_eq!(history.milli("m5.large", "b", 0), 0, "another zone is another offering");
    }

    #[test]
    fn setbacks_add_up_to_a_bound_and_are_forgotten() {
        let mut history = InterruptionHistory::default();
        history.note("m5.large", "a", Setback::Interrupted, 0);
        history.note("m5.large", "a", Setback::RebalanceRecommended, HALF_LIFE_MS);
        assert_eq!(history.milli("m5.large", "a", HALF_LIFE_MS), 750);
        for _ in 0..100 {
            history.note("c5.large", "a", Setback::Interrupted, 0);
        }
        assert_eq!(history.milli("c5.large", "a", 0), MOST);
        history.forget(8 * HALF_LIFE_MS);
        assert_eq!(history.milli("m5.large", "a", 0), 0, "forgotten for good");
        assert_eq!(history.milli("c5.large", "a", 8 * HALF_LIFE_MS), 62);
        history.forget(i64::MAX);
        assert_eq!(history, InterruptionHistory::default());
    }

    proptest! {
        #[test]
        fn a_count_never_grows_by_itself(milli in 0..MOST, at in 0..1_i64 << 40, first in 0..1_i64 << 40, then in 0..1_i64 << 40) {
            let count = Count { milli, at_ms: at };
            let (early, late) = (at + first.min(then), at + first.max(then));
            prop_assert!(count.at(late) <= count.at(early));
            prop_assert!((0..=milli).contains(&count.at(early)));
        }
    }
}
