//! Risk surcharge of spot offerings in plan comparisons, as a share of the price:
//!
//! - 50 thousandths for each point that the placement score lies below the threshold (7 by default, so 30 % at most);
//! - 100 thousandths for each interruption of the same type and zone, decayed with a half-life of six hours (a rebalance
//!   recommendation counts a quarter), in steps of 50;
//! - at most 1000 in total: the price counts twice.
//!
//! Only comparisons use the share. The reported cost of a node stays its price, and no offering is hidden: when every offering
//! that fits is risky, the best one by price and risk is bought. Steps are coarse, so that plans do not change continuously.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use stowage_model::time::UnixMillis;
use stowage_runtime::sync::lock;

use crate::ec2::offerings::interruption_history::{InterruptionHistory, InterruptionKind};
use crate::ec2::offerings::placement_score_table::{ScoreSettings, ScoreTable};

/// Share for each point below the threshold, thousandths.
const PER_POINT: i64 = 50;
/// Share for each interruption, thousandths.
const PER_INTERRUPTION: i64 = 100;
/// Step of the interruption share, thousandths.
const STEP: i64 = 50;
/// Upper bound of the share, thousandths.
const MAX_PERMILLE: i64 = 1_000;
/// Resolution of time: counts decay and scores expire in steps of this duration.
const TIME_STEP: Duration = Duration::from_mins(5);

/// Placement scores and interruptions of the region's spot offerings. Writers and planners share it.
#[derive(Debug)]
pub struct SpotRisk {
    settings: ScoreSettings,
    inputs: Mutex<RiskInputs>,
}

#[derive(Debug, Default)]
struct RiskInputs {
    /// Incremented with every change.
    version: u64,
    history: InterruptionHistory,
    scores: Arc<ScoreTable>,
}

impl SpotRisk {
    /// No scores and no interruptions.
    pub fn new(settings: ScoreSettings) -> Self {
        Self { settings, inputs: Mutex::default() }
    }

    /// The settings given to [`SpotRisk::new`].
    pub fn settings(&self) -> ScoreSettings {
        self.settings
    }

    /// Records an event about a spot instance of an offering.
    pub fn record(&self, instance_type: &str, zone: &str, kind: InterruptionKind, now: UnixMillis) {
        let mut inputs = lock(&self.inputs);
        inputs.history.record(instance_type, zone, kind, now);
        inputs.history.prune(now);
        inputs.version += 1;
    }

    /// Replaces the placement scores.
    pub fn set_scores(&self, scores: ScoreTable) {
        let mut inputs = lock(&self.inputs);
        inputs.scores = Arc::new(scores);
        inputs.version += 1;
    }

    /// The risks at a time. They stay the same for up to five minutes unless something is recorded.
    pub fn at(&self, now: UnixMillis) -> SpotRiskSnapshot {
        let step = i64::try_from(TIME_STEP.as_millis()).unwrap_or(i64::MAX);
        let slot = now.0.div_euclid(step);
        let inputs = lock(&self.inputs);
        // A version repeats after 2^32 changes, or 40,000 years.
        let version = (inputs.version << 32) | (slot.unsigned_abs() & u64::from(u32::MAX));
        SpotRiskSnapshot {
            version,
            now: UnixMillis(slot * step),
            threshold: self.settings.threshold,
            history: inputs.history.clone(),
            scores: Arc::clone(&inputs.scores),
        }
    }
}

/// The risks at one time.
#[derive(Clone, Debug)]
pub struct SpotRiskSnapshot {
    /// Snapshots with equal versions have equal risks.
    pub version: u64,
    now: UnixMillis,
    threshold: u8,
    history: InterruptionHistory,
    scores: Arc<ScoreTable>,
}

impl SpotRiskSnapshot {
    /// The risk surcharge of an offering, thousandths of its price.
    pub fn permille(&self, instance_type: &str, zone: &str) -> i64 {
        let score = self.scores.score(instance_type, zone, self.now);
        let missing = score.map_or(0, |score| i64::from(self.threshold.saturating_sub(score)));
        let interrupted = self.history.permille(instance_type, zone, self.now) * PER_INTERRUPTION / 1_000;
        (missing * PER_POINT + interrupted / STEP * STEP).min(MAX_PERMILLE)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use aws_sdk_ec2::types::SpotPlacementScore;

    use super::*;

    const START: UnixMillis = UnixMillis(0);
    const HOUR: Duration = Duration::from_hours(1);

    fn scored(points: i32) -> ScoreTable {
        let mut table = ScoreTable::new(&[("m/amd64".to_owned(), vec!["m5.large".to_owned()])].into(), START);
        let score = SpotPlacementScore::builder().availability_zone_id("az1").score(points).build();
        table.add("m/amd64", &[score], &BTreeMap::from([("a".to_owned(), "az1".to_owned())]));
        table
    }

    #[test]
    fn each_point_below_the_threshold_weighs_five_per_cent() {
        for (points, expected) in [(10, 0), (7, 0), (6, 50), (1, 300)] {
            let risk = SpotRisk::new(ScoreSettings::default());
            risk.set_scores(scored(points));
            assert_eq!(risk.at(START).permille("m5.large", "a"), expected, "{points}");
            assert_eq!(risk.at(START).permille("m5.large", "b"), 0, "no score, no share");
            assert_eq!(risk.at(START).permille("c5.large", "a"), 0, "no group, no share");
            assert_eq!(risk.at(START + 2 * HOUR).permille("m5.large", "a"), 0, "scores expire");
        }
        let lenient = SpotRisk::new(ScoreSettings { threshold: 1, ..ScoreSettings::default() });
        lenient.set_scores(scored(1));
        assert_eq!(lenient.at(START).permille("m5.large", "a"), 0);
    }

    #[test]
    fn interruptions_weigh_in_steps_decay_and_are_bounded() {
        let risk = SpotRisk::new(ScoreSettings::default());
        risk.record("m5.large", "a", InterruptionKind::Interruption, START);
        let share = |hours: u32| risk.at(START + hours * HOUR).permille("m5.large", "a");
        assert_eq!([share(0), share(1), share(6), share(7)], [100, 50, 50, 0]);
        for _ in 0..50 {
            risk.record("m5.large", "a", InterruptionKind::Interruption, START);
        }
        assert_eq!(share(0), 1_000);
        risk.set_scores(scored(1));
        assert_eq!(share(0), 1_000);
        assert_eq!(risk.at(START).permille("m5.large", "b"), 0);
    }

    #[test]
    fn the_version_changes_with_every_record_and_every_five_minutes() {
        let risk = SpotRisk::new(ScoreSettings::default());
        let first = risk.at(START).version;
        assert_eq!(risk.at(UnixMillis(299_999)).version, first);
        assert_ne!(risk.at(UnixMillis(300_000)).version, first);
        risk.record("m5.large", "a", InterruptionKind::RebalanceRecommendation, UnixMillis(1));
        assert_ne!(risk.at(START).version, first);
    }
}
