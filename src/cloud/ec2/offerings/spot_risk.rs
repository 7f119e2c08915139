//! What the risk of a spot offering is worth when plans are compared.
//!
//! An offering weighs its price plus a share of it:
//! - 50 thousandths for each point that its placement score lies below the threshold (7 by default, so 30 % at worst);
//! - 100 thousandths for each interruption of the same type and zone as it still counts (it halves every six hours; a
//!   rebalance recommendation is a quarter of one), in steps of 50;
//! - together at most 1000: the price counts twice.
//!
//! Only comparisons see the share. What a node is said to cost stays the price, and an offering is never hidden: when all that
//! fits is risky, the least risky of it for its price is bought. Steps are coarse, so that plans don't change with every tick.

use std::sync::{Arc, Mutex, MutexGuard};

use crate::cloud::ec2::offerings::interruption_history::{InterruptionHistory, Setback};
use crate::cloud::ec2::offerings::placement_scores::{ScoreSettings, ScoreTable};
use crate::sync::lock;

/// Share for each point below the threshold, thousandths.
const PER_POINT: i64 = 50;
/// Share for each interruption, thousandths.
const PER_INTERRUPTION: i64 = 100;
/// Steps in which interruptions weigh, thousandths.
const STEP: i64 = 50;
/// The largest share, thousandths.
const MOST: i64 = 1_000;
/// Time within which counts are not decayed further, milliseconds.
const SLOT_MS: i64 = 300_000;

/// Scores and interruptions of a region's spot offerings. Shared between those who note and those who plan.
#[derive(Debug)]
pub struct SpotRisk {
    settings: ScoreSettings,
    known: Mutex<Known>,
}

#[derive(Debug, Default)]
struct Known {
    changes: u64,
    history: InterruptionHistory,
    scores: Arc<ScoreTable>,
}

impl SpotRisk {
    /// Nothing known yet.
    pub fn new(settings: ScoreSettings) -> Self {
        Self { settings, known: Mutex::default() }
    }

    /// The settings it was made with.
    pub fn settings(&self) -> ScoreSettings {
        self.settings
    }

    /// Notes what happened to a spot instance of an offering.
    pub fn note(&self, instance_type: &str, zone: &str, setback: Setback, now_ms: i64) {
        let mut known = self.known();
        known.history.note(instance_type, zone, setback, now_ms);
        known.history.forget(now_ms);
        known.changes += 1;
    }

    /// Takes new scores.
    pub fn set_scores(&self, scores: ScoreTable) {
        let mut known = self.known();
        known.scores = Arc::new(scores);
        known.changes += 1;
    }

    /// The risks at a time, which stay as they are for up to five minutes if nothing is noted.
    pub fn at(&self, now_ms: i64) -> RiskNow {
        let slot = now_ms.div_euclid(SLOT_MS);
        let known = self.known();
        // A stamp repeats after 2^32 changes, or 40,000 years.
        let stamp = (known.changes << 32) | (slot.unsigned_abs() & u64::from(u32::MAX));
        RiskNow {
            stamp,
            now_ms: slot * SLOT_MS,
            threshold: self.settings.threshold,
            history: known.history.clone(),
            scores: Arc::clone(&known.scores),
        }
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        // Each change is whole, so a panic elsewhere leaves nothing half done.
        lock(&self.known)
    }
}

/// The risks at one time.
#[derive(Clone, Debug)]
pub struct RiskNow {
    /// Another one says that risks may be others.
    pub stamp: u64,
    now_ms: i64,
    threshold: u8,
    history: InterruptionHistory,
    scores: Arc<ScoreTable>,
}

impl RiskNow {
    /// The share of an offering's price that its risk is worth, thousandths.
    pub fn permille(&self, instance_type: &str, zone: &str) -> i64 {
        let score = self.scores.score(instance_type, zone, self.now_ms);
        let missing = score.map_or(0, |score| i64::from(self.threshold.saturating_sub(score)));
        let interrupted = self.history.milli(instance_type, zone, self.now_ms) * PER_INTERRUPTION / 1_000;
        (missing * PER_POINT + interrupted / STEP * STEP).min(MOST)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use aws_sdk_ec2::types::SpotPlacementScore;

    use super::*;

    const HOUR: i64 = 3_600_000;

    fn scored(points: i32, at: i64) -> ScoreTable {
        let mut table = ScoreTable::new(&[("m/amd64".to_owned(), vec!["m5.large".to_owned()])].into(), at);
        let score = SpotPlacementScore::builder().availability_zone_id("az1").score(points).build();
        table.add("m/amd64", &[score], &BTreeMap::from([("a".to_owned(), "az1".to_owned())]));
        table
    }

    #[test]
    fn each_point_below_the_threshold_weighs_five_per_cent() {
        for (points, expected) in [(10, 0), (7, 0), (6, 50), (1, 300)] {
            let risk = SpotRisk::new(ScoreSettings::default());
            risk.set_scores(scored(points, 0));
            assert_eq!(risk.at(0).permille("m5.large", "a"), expected, "{points}");
            assert_eq!(risk.at(0).permille("m5.large", "b"), 0, "no score, no share");
            assert_eq!(risk.at(0).permille("c5.large", "a"), 0, "no group, no share");
            assert_eq!(risk.at(2 * HOUR).permille("m5.large", "a"), 0, "scores get stale");
        }
        let lenient = SpotRisk::new(ScoreSettings { threshold: 1, ..ScoreSettings::default() });
        lenient.set_scores(scored(1, 0));
        assert_eq!(lenient.at(0).permille("m5.large", "a"), 0);
    }

    #[test]
    fn interruptions_weigh_in_steps_decay_and_are_bounded() {
        let risk = SpotRisk::new(ScoreSettings::default());
        risk.note("m5.large", "a", Setback::Interrupted, 0);
        let share = |at| risk.at(at).permille("m5.large", "a");
        assert_eq!([share(0), share(HOUR), share(6 * HOUR), share(7 * HOUR)], [100, 50, 50, 0]);
        for _ in 0..50 {
            risk.note("m5.large", "a", Setback::Interrupted, 0);
        }
        assert_eq!(share(0), 1_000);
        risk.set_scores(scored(1, 0));
        assert_eq!(share(0), 1_000);
        assert_eq!(risk.at(0).permille("m5.large", "b"), 0);
    }

    #[test]
    fn a_stamp_changes_with_what_is_noted_and_every_five_minutes() {
        let risk = SpotRisk::new(ScoreSettings::default());
        let first = risk.at(0).stamp;
        assert_eq!(risk.at(SLOT_MS - 1).stamp, first);
        assert_ne!(risk.at(SLOT_MS).stamp, first);
        risk.note("m5.large", "a", Setback::RebalanceRecommended, 1);
        assert_ne!(risk.at(0).stamp, first);
    }
}
