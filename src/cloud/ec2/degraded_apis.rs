//! Optional APIs that can't be used now: by what is lost, why. Kept for those who tell people of it.

use std::collections::BTreeMap;
use std::sync::Mutex;

use crate::cloud::ec2::offerings::region::{Part, RegionSnapshot, Source, Turn};
use crate::sync::lock;

/// Placement scores of spot capacity.
pub const SCORES: &str = "PlacementScores";
/// Zones that the cluster is shifted away from.
pub const SHIFTS: &str = "ZonalShifts";
/// Version, addresses and CA of the cluster.
pub const CLUSTER: &str = "ClusterFacts";
/// Status checks of instances.
pub const STATUS_CHECKS: &str = "StatusChecks";
/// Tags that instances get once they are Nodes.
pub const TAGS: &str = "InstanceTags";
/// Instance profiles that nothing uses any more.
pub const PROFILES: &str = "InstanceProfiles";

/// What is written, not read.
const WRITTEN: [&str; 2] = [TAGS, PROFILES];

/// What the loops in the background can't read or write.
#[derive(Debug, Default)]
pub struct Troubles {
    known: Mutex<BTreeMap<&'static str, String>>,
}

impl Troubles {
    /// Notes that something can't be read or written, and what that means.
    pub fn begin(&self, what: &'static str, note: String) {
        lock(&self.known).insert(what, note);
    }

    /// Notes that something can be read or written again.
    pub fn end(&self, what: &'static str) {
        lock(&self.known).remove(what);
    }

    fn known(&self, written: bool) -> BTreeMap<&'static str, String> {
        let mut out = lock(&self.known).clone();
        out.retain(|what, _| WRITTEN.contains(what) == written);
        out
    }

    /// All that can't be written.
    pub fn unwritable(&self) -> BTreeMap<&'static str, String> {
        self.known(true)
    }

    /// All that can't be read, parts of the region included.
    pub fn unreadable(&self, region: &RegionSnapshot) -> BTreeMap<&'static str, String> {
        let mut out = self.known(false);
        for part in Part::ALL {
            let why = match region.source(part) {
                Source::Live { .. } | Source::StandIn { why: None, .. } => continue,
                Source::Stale { why, .. } | Source::StandIn { why: Some(why), .. } => why.clone(),
            };
            out.insert(name(part), Turn { part, why: Some(why) }.to_string());
        }
        out
    }
}

fn name(part: Part) -> &'static str {
    match part {
        Part::Types => "InstanceTypes",
        Part::Zones => "InstanceTypeZones",
        Part::OnDemandPrices => "OnDemandPrices",
        Part::SpotPrices => "SpotPrices",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cloud::catalog::embedded;
    use crate::cloud::ec2::aws::errors::{ApiError, Class};
    use crate::cloud::ec2::offerings::region::Answers;

    #[test]
    fn what_can_not_be_read_is_a_trouble_until_it_is_read_again() {
        let refused = || ApiError {
            action: "pricing:GetProducts",
            code: "AccessDeniedException".into(),
            message: "no".into(),
            class: Class::Unauthorized,
        };
        let (troubles, unasked) = (Troubles::default(), RegionSnapshot::stand_in("us-east-1", embedded(), 0));
        assert!(troubles.unreadable(&unasked).is_empty(), "what was not asked yet is none");
        let answers = Answers { on_demand: Some(Err(refused())), ..Answers::default() };
        let (failing, _) = unasked.after(answers, 1);
        troubles.begin(SCORES, "off".into());
        let all = troubles.unreadable(&failing);
        assert_eq!(all.keys().copied().collect::<Vec<_>>(), ["OnDemandPrices", SCORES]);
        let note = &all["OnDemandPrices"];
        assert!(note.contains("stands in") && note.contains("AccessDeniedException"), "{note}");
        let (read, _) = failing.after(Answers { on_demand: Some(Ok([].into())), ..Answers::default() }, 2);
        troubles.end(SCORES);
        troubles.begin(TAGS, "refused".into());
        assert_eq!(troubles.unwritable().into_keys().collect::<Vec<_>>(), [TAGS]);
        assert!(troubles.unreadable(&read).is_empty());
    }
}
