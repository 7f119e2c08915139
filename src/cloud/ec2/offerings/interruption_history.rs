//! Spot interruptions of each offering, as a count that decays exponentially with a half-life of six hours.

use std::collections::BTreeMap;
use std::time::Duration;

use stowage_model::time::UnixMillis;

/// Time in which a count halves.
const HALF_LIFE: Duration = Duration::from_hours(6);
/// A count of this many thousandths or fewer is dropped.
const NEGLIGIBLE_PERMILLE: i64 = 10;
/// Upper bound of a count, thousandths: one bad hour must not outlast a day.
const MAX_PERMILLE: i64 = 16_000;

/// An event about a spot instance that counts against its offering.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InterruptionKind {
    /// Spot interruption warning: EC2 reclaims the instance.
    Interruption,
    /// Rebalance recommendation: elevated risk of an interruption.
    RebalanceRecommendation,
}

impl InterruptionKind {
    /// Weight in thousandths of an interruption.
    fn weight_permille(self) -> i64 {
        match self {
            Self::Interruption => 1_000,
            Self::RebalanceRecommendation => 250,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct DecayingCount {
    /// Thousandths of an interruption at `as_of`.
    permille: i64,
    as_of: UnixMillis,
}

impl DecayingCount {
    /// The count at a time: halved for each half-life since `as_of`, interpolated linearly in between. Before `as_of` it does
    /// not change.
    fn at(self, now: UnixMillis) -> i64 {
        let (age, half_life) = (now.saturating_since(self.as_of).as_millis(), HALF_LIFE.as_millis());
        let (halvings, rest) = (age / half_life, age % half_life);
        if halvings >= 62 {
            return 0;
        }
        let permille = self.permille >> halvings;
        // Less than the half-life, so in range.
        let rest = i64::try_from(rest).unwrap_or(0);
        permille - permille * rest / (2 * i64::try_from(half_life).unwrap_or(i64::MAX / 2))
    }
}

/// Decaying counts of interruptions by instance type and zone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct InterruptionHistory {
    counts: BTreeMap<String, BTreeMap<String, DecayingCount>>,
}

impl InterruptionHistory {
    /// Adds an event about a spot instance of an offering.
    pub fn record(&mut self, instance_type: &str, zone: &str, kind: InterruptionKind, now: UnixMillis) {
        let permille = (self.permille(instance_type, zone, now) + kind.weight_permille()).min(MAX_PERMILLE);
        let zones = self.counts.entry(instance_type.to_owned()).or_default();
        zones.insert(zone.to_owned(), DecayingCount { permille, as_of: now });
    }

    /// The decayed count of an offering, in thousandths of an interruption.
    pub fn permille(&self, instance_type: &str, zone: &str, now: UnixMillis) -> i64 {
        self.counts.get(instance_type).and_then(|zones| zones.get(zone)).map_or(0, |count| count.at(now))
    }

    /// Drops negligible counts.
    pub fn prune(&mut self, now: UnixMillis) {
        self.counts.retain(|_, zones| {
            zones.retain(|_, count| count.at(now) > NEGLIGIBLE_PERMILLE);
            !zones.is_empty()
        });
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const START: UnixMillis = UnixMillis(0);

    #[test]
    fn a_count_halves_every_six_hours_and_linearly_in_between() {
        let mut history = InterruptionHistory::default();
        history.record("m5.large", "a", InterruptionKind::Interruption, START);
        for (hours, expected) in [(0, 1_000), (3, 750), (6, 500), (9, 375), (12, 250), (600, 0)] {
            assert_eq!(history.permille("m5.large", "a", START + Duration::from_hours(hours)), expected, "{hours} h");
        }
        assert_eq!(history.permille("m5.large", "a", UnixMillis(-5)), 1_000, "a clock set back changes nothing");
        assert_eq!(history.permille("m5.large", "b", START), 0, "another zone is another offering");
    }

    #[test]
    fn counts_are_bounded_and_pruned() {
        let mut history = InterruptionHistory::default();
        history.record("m5.large", "a", InterruptionKind::Interruption, START);
        history.record("m5.large", "a", InterruptionKind::RebalanceRecommendation, START + HALF_LIFE);
        assert_eq!(history.permille("m5.large", "a", START + HALF_LIFE), 750);
        for _ in 0..100 {
            history.record("c5.large", "a", InterruptionKind::Interruption, START);
        }
        assert_eq!(history.permille("c5.large", "a", START), MAX_PERMILLE);
        history.prune(START + 8 * HALF_LIFE);
        assert_eq!(history.permille("m5.large", "a", START), 0, "dropped for good");
        assert_eq!(history.permille("c5.large", "a", START + 8 * HALF_LIFE), 62);
        history.prune(UnixMillis::MAX);
        assert_eq!(history, InterruptionHistory::default());
    }

    proptest! {
        #[test]
        fn a_count_never_grows_with_time(permille in 0..MAX_PERMILLE, at in 0..1_i64 << 40, first in 0..1_i64 << 40, then in 0..1_i64 << 40) {
            let count = DecayingCount { permille, as_of: UnixMillis(at) };
            let (early, late) = (UnixMillis(at + first.min(then)), UnixMillis(at + first.max(then)));
            prop_assert!(count.at(late) <= count.at(early));
            prop_assert!((0..=permille).contains(&count.at(early)));
        }
    }
}
