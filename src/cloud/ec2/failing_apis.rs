//! Optional AWS APIs that fail at present, each with the consequence. Controllers report them as events.

use std::collections::BTreeMap;
use std::sync::Mutex;

use stowage_runtime::sync::lock;

use crate::OptionalApi;

/// Failing APIs, with the consequence.
#[derive(Debug, Default)]
pub struct DegradedApis {
    failing: Mutex<BTreeMap<OptionalApi, String>>,
}

impl DegradedApis {
    /// Records that an API fails, and the consequence.
    pub fn record_failure(&self, api: OptionalApi, consequence: String) {
        lock(&self.failing).insert(api, consequence);
    }

    /// Records that an API works.
    pub fn record_recovery(&self, api: OptionalApi) {
        lock(&self.failing).remove(&api);
    }

    /// The failing APIs, without those of the region's data.
    pub fn failing(&self) -> BTreeMap<OptionalApi, String> {
        lock(&self.failing).clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_api_is_degraded_until_it_recovers() {
        let degraded = DegradedApis::default();
        degraded.record_failure(OptionalApi::PlacementScores, "off".into());
        degraded.record_failure(OptionalApi::InstanceTags, "denied".into());
        let all = [(OptionalApi::PlacementScores, "off".to_owned()), (OptionalApi::InstanceTags, "denied".to_owned())];
        assert_eq!(degraded.failing(), all.into());
        degraded.record_recovery(OptionalApi::PlacementScores);
        assert_eq!(degraded.failing().into_keys().collect::<Vec<_>>(), [OptionalApi::InstanceTags]);
    }
}
