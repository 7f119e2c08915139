//! The policy `Balanced`: a move is approved if it saves a share of the cost of its NodePool that is large enough for the share of the evictions that it
//! takes (Karpenter core reference 4.11).

use std::fmt;

use stowage_model::units::MicroUsd;

use crate::decisions::disruption::eviction_cost::EvictionUnits;

/// A move is approved if its share of the savings is at least its share of the evictions divided by this.
const K: i64 = 2;

/// The nodes of a NodePool together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolTotals {
    /// Hourly price.
    pub price: MicroUsd,
    /// Cost of the removal of all of them in evictions.
    pub units: EvictionUnits,
}

impl PoolTotals {
    /// The most per hour that evictions may save and still not be approved.
    pub fn eviction_cost(&self, units: EvictionUnits) -> MicroUsd {
        let product = i128::from(self.price.0) * i128::from(units.0);
        let whole = i128::from(K) * i128::from(self.units.0.max(1));
        let most = (product - 1).max(0) / whole;
        MicroUsd(i64::try_from(most).unwrap_or(i64::MAX))
    }
}

/// The score of a move for one of the NodePools of its sources.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Score {
    /// The part of the saving that is this NodePool's.
    pub saving: MicroUsd,
    /// Evictions from its nodes.
    pub units: EvictionUnits,
    pub totals: PoolTotals,
}

impl Score {
    pub fn is_approved(&self) -> bool {
        self.saving.0 > 0 && self.totals.price.0 > 0 && self.saving > self.totals.eviction_cost(self.units)
    }

    /// What a move must save of which this score has its part, if `saving` is what it saves.
    pub fn needed(&self, saving: MicroUsd) -> MicroUsd {
        let least = self.totals.eviction_cost(self.units).0.saturating_add(1);
        if self.saving.0 <= 0 {
            return MicroUsd(least);
        }
        let whole = i128::from(least) * i128::from(saving.0) / i128::from(self.saving.0);
        MicroUsd(i64::try_from(whole).unwrap_or(i64::MAX))
    }

    /// The share of the savings by the share of the evictions.
    pub fn value(&self) -> f64 {
        let [savings, evictions] = self.shares();
        if savings <= 0.0 { 0.0 } else { savings / evictions }
    }

    #[expect(clippy::cast_precision_loss, reason = "for events and metrics")]
    fn shares(&self) -> [f64; 2] {
        let of = |part: i64, whole: i64| if whole > 0 { part as f64 / whole as f64 } else { 0.0 };
        [of(self.saving.0, self.totals.price.0), of(self.units.0, self.totals.units.0)]
    }
}

/// As in Karpenter's event `ConsolidationApproved`.
impl fmt::Display for Score {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [savings, evictions] = self.shares().map(|share| 100.0 * share);
        let value = self.value();
        let sign = if self.is_approved() { ">=" } else { "<" };
        write!(f, "score {value:.2} {sign} threshold 0.50 (k: {K}, savings {savings:.1}%, disruption {evictions:.1}%)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A NodePool that costs one USD per hour and 100 evictions.
    const TOTALS: PoolTotals = PoolTotals { price: MicroUsd(1_000_000), units: EvictionUnits(100_000) };

    fn score(saving: i64, units: i64) -> Score {
        Score { saving: MicroUsd(saving), units: EvictionUnits(units), totals: TOTALS }
    }

    #[test]
    fn a_move_is_approved_from_half_the_share_of_its_evictions_on() {
        for (saving, units, expected) in [
            (200_000, 10_000, "score 2.00 >= threshold 0.50 (k: 2, savings 20.0%, disruption 10.0%)"),
            (50_000, 10_000, "score 0.50 >= threshold 0.50 (k: 2, savings 5.0%, disruption 10.0%)"),
            (49_000, 10_000, "score 0.49 < threshold 0.50 (k: 2, savings 4.9%, disruption 10.0%)"),
            (0, 10_000, "score 0.00 < threshold 0.50 (k: 2, savings 0.0%, disruption 10.0%)"),
            (-50_000, 10_000, "score 0.00 < threshold 0.50 (k: 2, savings -5.0%, disruption 10.0%)"),
        ] {
            assert_eq!(score(saving, units).to_string(), expected);
        }
        assert!(!score(49_999, 10_000).is_approved(), "to the millionth of a USD");
        assert!(score(1, 0).is_approved(), "evictions that cost nothing");
    }

    #[test]
    fn what_evictions_cost_is_just_not_approved() {
        for (units, cost) in [(10_000, 49_999), (1, 4), (0, 0), (100_000, 499_999)] {
            assert_eq!(TOTALS.eviction_cost(EvictionUnits(units)), MicroUsd(cost));
            assert!(!score(cost, units).is_approved() && score(cost + 1, units).is_approved(), "{units}");
        }
    }

    #[test]
    fn what_is_needed_grows_with_the_share_of_other_pools() {
        for (saving, whole, needed) in [(10_000, 10_000, 50_000), (10_000, 40_000, 200_000), (0, 0, 50_000)] {
            assert_eq!(score(saving, 10_000).needed(MicroUsd(whole)), MicroUsd(needed));
        }
    }

    #[test]
    fn a_pool_of_which_nothing_is_known_approves_nothing_and_no_number_is_too_large() {
        let none = Score { totals: PoolTotals::default(), ..score(10, 10) };
        assert_eq!(none.to_string(), "score 0.00 < threshold 0.50 (k: 2, savings 0.0%, disruption 0.0%)");
        let most = PoolTotals { price: MicroUsd(i64::MAX), units: EvictionUnits(1) };
        assert_eq!(most.eviction_cost(EvictionUnits(i64::MAX)), MicroUsd(i64::MAX));
        assert!(!Score { saving: MicroUsd(i64::MAX), units: EvictionUnits(i64::MAX), totals: most }.is_approved());
    }
}
