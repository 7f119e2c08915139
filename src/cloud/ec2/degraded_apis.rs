//! Optional AWS APIs that fail at present, each with the consequence. Controllers report them as events.

use std::collections::BTreeMap;
use std::sync::Mutex;

use crate::sync::lock;

/// Spot placement scores.
pub const SCORES: &str = "PlacementScores";
/// ARC zonal shifts.
pub const SHIFTS: &str = "ZonalShifts";
/// Version, service addresses and CA of the cluster.
pub const CLUSTER: &str = "ClusterFacts";
/// Status checks of instances.
pub const STATUS_CHECKS: &str = "StatusChecks";
/// Tags that instances get after registration.
pub const TAGS: &str = "InstanceTags";
/// Deletion of unused instance profiles.
pub const PROFILES: &str = "InstanceProfiles";

/// The features that write; all others read.
const WRITING: [&str; 2] = [TAGS, PROFILES];

/// Features whose API fails, by name, with the consequence.
#[derive(Debug, Default)]
pub struct DegradedApis {
    failing: Mutex<BTreeMap<&'static str, String>>,
}

impl DegradedApis {
    /// Records that the API of a feature fails, and the consequence.
    pub fn record_failure(&self, feature: &'static str, consequence: String) {
        lock(&self.failing).insert(feature, consequence);
    }

    /// Records that the API of a feature works.
    pub fn record_recovery(&self, feature: &'static str) {
        lock(&self.failing).remove(feature);
    }

    fn failing(&self, writing: bool) -> BTreeMap<&'static str, String> {
        let mut out = lock(&self.failing).clone();
        out.retain(|feature, _| WRITING.contains(feature) == writing);
        out
    }

    /// Features whose writes fail.
    pub fn unwritable(&self) -> BTreeMap<&'static str, String> {
        self.failing(true)
    }

    /// Features whose reads fail. The region's data is not included.
    pub fn unreadable(&self) -> BTreeMap<&'static str, String> {
        self.failing(false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_feature_is_degraded_until_it_recovers() {
        let degraded = DegradedApis::default();
        degraded.record_failure(SCORES, "off".into());
        degraded.record_failure(TAGS, "denied".into());
        assert_eq!(degraded.unreadable(), [(SCORES, "off".to_owned())].into());
        assert_eq!(degraded.unwritable(), [(TAGS, "denied".to_owned())].into());
        degraded.record_recovery(SCORES);
        assert!(degraded.unreadable().is_empty());
        assert_eq!(degraded.unwritable().into_keys().collect::<Vec<_>>(), [TAGS]);
    }
}
