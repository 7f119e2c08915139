//! The objective of consolidation: what the removal of nodes saves per hour, less what the evictions and new nodes cost.
//!
//! An eviction costs a fraction of the market value of what is evicted, not of the present bill: in an oversized cluster evictions would be
//! most expensive when they are worth most. Under the policy `Balanced` they cost what its score demands.

use std::time::Duration;

use kube::ResourceExt;
use stowage_api::{NodePool, duration};
use stowage_model::labels;
use stowage_model::units::MicroUsd;

use crate::decisions::disruption::consolidation::balanced::{PoolTotals, Score};
use crate::decisions::disruption::eviction_cost::EvictionUnits;

/// Time in which the saving must pay for the evictions and new nodes, unless the NodePool has another.
const PAYBACK: Duration = Duration::from_hours(1);
/// Shortest such time: the cost is inversely proportional to it.
const MIN_PAYBACK: Duration = Duration::from_mins(1);
/// An eviction costs the market value of its pod for this time.
const EVICTION_PERIOD: Duration = Duration::from_mins(6);
/// A new node costs its price for this time in addition: it boots while the old ones still run, and those drain while it runs.
const OVERLAP: Duration = Duration::from_mins(5);
/// Least saving of a removal that needs new nodes, in thousandths of the price of the removed nodes, unless the NodePool has another.
const MIN_SAVING: i64 = 50;

/// The `consolidationPolicy` with a score.
const BALANCED: &str = "Balanced";

/// What evictions and savings of a NodePool's nodes are worth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolTerms {
    /// Milliseconds.
    payback: i64,
    /// Thousandths of the price.
    min_saving: Option<i64>,
    /// No pod is evicted of a workload whose newest pod is younger, in milliseconds.
    min_eviction_interval: i64,
    /// Market value of all its pods that may move, micro-USD per hour.
    market_value: i64,
    /// Eviction cost of all its nodes if all pods were ordinary ones.
    units: EvictionUnits,
    /// All its nodes, if its policy is `Balanced`.
    balanced: Option<PoolTotals>,
}

fn millis(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}

/// `amount * share / whole`, within 64 bits.
fn scaled(amount: i64, share: i64, whole: i64) -> i64 {
    i64::try_from(i128::from(amount) * i128::from(share) / i128::from(whole.max(1))).unwrap_or(i64::MAX)
}

impl Default for PoolTerms {
    fn default() -> Self {
        Self {
            payback: millis(PAYBACK),
            min_saving: None,
            min_eviction_interval: 0,
            market_value: 0,
            units: EvictionUnits(0),
            balanced: None,
        }
    }
}

impl PoolTerms {
    /// The terms of a NodePool without nodes, and the annotations that are invalid, with what to write.
    pub fn of(pool: &NodePool) -> (Self, Vec<String>) {
        let (mut terms, mut errors) = (Self::default(), Vec::new());
        let mut read = |key: &str, parse: fn(&str) -> Option<i64>, wanted: &str| {
            let text = pool.annotations().get(key)?;
            let value = parse(text);
            if value.is_none() {
                errors.push(format!("annotation {key}: '{text}' is not {wanted}"));
            }
            value
        };
        if let Some(payback) = read(labels::CONSOLIDATION_PAYBACK, payback, "a duration of at least 1m, such as 30m") {
            terms.payback = payback;
        }
        terms.min_saving =
            read(labels::CONSOLIDATION_MIN_SAVINGS, permille, "a percentage from 0% to 100%, such as 5%");
        terms.min_eviction_interval =
            read(labels::MIN_EVICTION_INTERVAL, |text| duration::parse(text).ok(), "a duration, such as 30m")
                .unwrap_or(0);
        terms.balanced = (pool.spec.disruption.consolidation_policy == BALANCED).then(PoolTotals::default);
        (terms, errors)
    }

    pub fn is_balanced(&self) -> bool {
        self.balanced.is_some()
    }

    /// Consolidation evicts no pod of a workload whose newest pod is younger; `None` where it does not matter.
    pub fn min_eviction_interval(&self) -> Option<Duration> {
        let millis = u64::try_from(self.min_eviction_interval).ok()?;
        (millis > 0).then(|| Duration::from_millis(millis))
    }

    /// Adds a node of the NodePool: the market value of its pods, and its eviction cost if they were ordinary ones.
    pub fn add(&mut self, market_value: MicroUsd, units: EvictionUnits) {
        self.market_value = self.market_value.saturating_add(market_value.0);
        self.units.0 = self.units.0.saturating_add(units.0);
    }

    /// Adds any node of the NodePool to what the policy `Balanced` compares moves with.
    pub fn add_to_totals(&mut self, price: MicroUsd, units: EvictionUnits) {
        if let Some(totals) = &mut self.balanced {
            totals.price.0 = totals.price.0.saturating_add(price.0);
            totals.units.0 = totals.units.0.saturating_add(units.0);
        }
    }

    /// The score of this saving for these evictions; `None` unless the policy is `Balanced`.
    pub fn score(&self, saving: MicroUsd, units: EvictionUnits) -> Option<Score> {
        self.balanced.map(|totals| Score { saving, units, totals })
    }

    /// What evictions cost.
    pub fn eviction_cost(&self, units: EvictionUnits) -> MicroUsd {
        if let Some(totals) = &self.balanced {
            return totals.eviction_cost(units);
        }
        let value = scaled(self.market_value, units.0, self.units.0);
        MicroUsd(scaled(value, millis(EVICTION_PERIOD), self.payback))
    }

    /// What a new node of this price costs.
    pub fn purchase_cost(&self, price: MicroUsd) -> MicroUsd {
        MicroUsd(price.0.saturating_add(scaled(price.0, millis(OVERLAP), self.payback)))
    }

    /// The least that the removal of nodes of this price must save.
    pub fn needed_saving(&self, price: MicroUsd, purchases: bool) -> MicroUsd {
        let default = if purchases { MIN_SAVING } else { 0 };
        MicroUsd(scaled(price.0, self.min_saving.unwrap_or(default), 1_000))
    }
}

fn payback(text: &str) -> Option<i64> {
    duration::parse(text).ok().filter(|payback| *payback >= millis(MIN_PAYBACK))
}

fn permille(text: &str) -> Option<i64> {
    let percent: f64 = text.strip_suffix('%')?.parse().ok()?;
    #[expect(clippy::cast_possible_truncation, reason = "at most 1000")]
    (0.0..=100.0).contains(&percent).then(|| (percent * 10.0).round() as i64)
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use stowage_test_objects as objects;

    use super::*;

    fn terms(payback: Option<&str>, min_savings: Option<&str>) -> (PoolTerms, Vec<String>) {
        annotated(&json!({(labels::CONSOLIDATION_PAYBACK): payback, (labels::CONSOLIDATION_MIN_SAVINGS): min_savings}))
    }

    fn annotated(annotations: &serde_json::Value) -> (PoolTerms, Vec<String>) {
        PoolTerms::of(&objects::node_pool("p", &json!({"metadata": {"annotations": annotations}})))
    }

    #[test]
    fn an_eviction_costs_a_tenth_of_the_hourly_value_of_a_unit_by_default() {
        for (payback, evictions, purchase) in [
            (None, 20_000, 108_333),
            (Some("30m"), 40_000, 116_666),
            (Some("10h"), 2_000, 100_833),
            (Some("1m"), 1_200_000, 600_000),
        ] {
            let (mut terms, errors) = terms(payback, None);
            assert!(errors.is_empty());
            // One USD for 50 units, of which ten are evicted.
            terms.add(MicroUsd(600_000), EvictionUnits(30_000));
            terms.add(MicroUsd(400_000), EvictionUnits(20_000));
            assert_eq!(terms.eviction_cost(EvictionUnits(10_000)), MicroUsd(evictions), "{payback:?}");
            assert_eq!(terms.purchase_cost(MicroUsd(100_000)), MicroUsd(purchase), "{payback:?}");
        }
        assert_eq!(PoolTerms::default().eviction_cost(EvictionUnits(10_000)), MicroUsd(0), "nothing is known");
        let mut most = PoolTerms::default();
        most.add(MicroUsd(i64::MAX), EvictionUnits(1));
        most.add(MicroUsd(i64::MAX), EvictionUnits(i64::MAX));
        assert!(most.eviction_cost(EvictionUnits(i64::MAX)).0 > 0, "no overflow");
    }

    #[test]
    fn under_balanced_evictions_cost_half_their_share_of_the_pool() {
        let pool =
            |policy: &str| objects::node_pool("p", &json!({"spec": {"disruption": {"consolidationPolicy": policy}}}));
        for (policy, cost, has_score) in [("Balanced", 49_999, true), ("WhenEmptyOrUnderutilized", 1_000, false)] {
            let (mut terms, errors) = PoolTerms::of(&pool(policy));
            assert!(errors.is_empty());
            terms.add_to_totals(MicroUsd(1_000_000), EvictionUnits(100_000));
            terms.add(MicroUsd(100_000), EvictionUnits(100_000));
            let evicted = EvictionUnits(10_000);
            assert_eq!(terms.eviction_cost(evicted), MicroUsd(cost));
            let score = terms.score(MicroUsd(50_000), evicted);
            assert_eq!(score.map(|score| score.is_approved()), has_score.then_some(true), "{policy}");
        }
    }

    #[test]
    fn a_removal_with_new_nodes_saves_at_least_five_percent_by_default() {
        for (annotation, purchases, needed) in [
            (None, true, 5_000),
            (None, false, 0),
            (Some("12.5%"), true, 12_500),
            (Some("12.5%"), false, 12_500),
            (Some("0%"), true, 0),
        ] {
            assert_eq!(terms(None, annotation).0.needed_saving(MicroUsd(100_000), purchases), MicroUsd(needed));
        }
    }

    #[test]
    fn an_invalid_annotation_is_an_error_that_says_what_to_write_and_leaves_the_default() {
        for (payback, min_savings, expected) in [
            (Some("soon"), None, "consolidation-payback: 'soon' is not a duration of at least 1m, such as 30m"),
            (Some("0s"), None, "'0s' is not a duration of at least 1m"),
            (Some("Never"), None, "'Never' is not a duration"),
            (None, Some("5"), "consolidation-min-savings: '5' is not a percentage from 0% to 100%, such as 5%"),
            (None, Some("-1%"), "'-1%' is not a percentage"),
            (None, Some("NaN%"), "'NaN%' is not a percentage"),
            (None, Some("101%"), "'101%' is not a percentage"),
        ] {
            let (terms, errors) = terms(payback, min_savings);
            assert_eq!(terms, PoolTerms::default());
            assert!(errors.len() == 1 && errors[0].contains(expected), "{errors:?}");
        }
        let interval = |text: &str| {
            let (terms, errors) = annotated(&json!({(labels::MIN_EVICTION_INTERVAL): text}));
            (terms.min_eviction_interval(), errors)
        };
        assert_eq!(interval("30m"), (Some(Duration::from_mins(30)), vec![]));
        assert_eq!(interval("0s"), (None, vec![]));
        let error = "annotation stowage.dev/min-eviction-interval: 'soon' is not a duration, such as 30m";
        assert_eq!(interval("soon"), (None, vec![error.to_owned()]));
    }
}
