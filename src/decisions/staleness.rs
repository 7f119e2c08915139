//! Which watches a removal depends on. Voluntary removals wait until every watch they depend on is fresh: a node without pods in a
//! table that is a minute old may be full.

use stowage_model::time::UnixMillis;

use crate::state::kinds::KINDS;
use crate::state::watch_signs::{Stale, WatchSigns};

/// A decision that removes nodes and that nothing forces. Interruptions, and the drain of a node that is deleted already, are not held up:
/// their instances end anyway, and the API server confirms each eviction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Removal {
    /// Marks, taints and deletes empty, drifted and underutilized nodes.
    Disruption,
    /// Deletes a marked claim whose replacements are ready.
    Departure,
    Expiration,
    GarbageCollection,
    /// Removes unhealthy nodes.
    Repair,
    /// Deletes a claim that was not launched or whose Node did not register in time.
    Abandonment,
}

impl Removal {
    /// Kinds whose watches must be fresh.
    fn depends_on(self) -> &'static [&'static str] {
        match self {
            Self::Disruption => &KINDS,
            Self::Departure => &["pods", "nodes", "nodeclaims", "poddisruptionbudgets"],
            Self::Expiration => &["nodeclaims"],
            Self::GarbageCollection | Self::Repair | Self::Abandonment => &["nodes", "nodeclaims"],
        }
    }

    /// The oldest of these watches, if it is too old for this decision.
    pub fn held_up_by(self, signs: &WatchSigns, now: UnixMillis) -> Option<Stale> {
        signs.stale(self.depends_on(), now)
    }

    /// Value of the metric's label `decision`.
    pub fn metric_label(self) -> &'static str {
        match self {
            Self::Disruption => "disruption",
            Self::Departure => "departure",
            Self::Expiration => "expiration",
            Self::GarbageCollection => "garbage_collection",
            Self::Repair => "repair",
            Self::Abandonment => "abandonment",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_removal_waits_for_the_watches_that_it_depends_on() {
        use Removal::{Abandonment, Departure, Disruption, Expiration, GarbageCollection, Repair};
        let (listed, late) = (UnixMillis(0), UnixMillis(60_001));
        for (stale, held_up) in [
            ("pods", &[Disruption, Departure][..]),
            ("nodes", &[Disruption, Departure, GarbageCollection, Repair, Abandonment]),
            ("nodeclaims", &[Disruption, Departure, Expiration, GarbageCollection, Repair, Abandonment]),
            ("poddisruptionbudgets", &[Disruption, Departure]),
            ("csinodes", &[Disruption]),
            ("services", &[]),
        ] {
            let signs = WatchSigns::default();
            for kind in KINDS {
                signs.record_list(kind, listed);
            }
            for kind in KINDS.into_iter().filter(|kind| *kind != stale) {
                signs.record(kind, late);
            }
            for removal in [Disruption, Departure, Expiration, GarbageCollection, Repair, Abandonment] {
                let by = removal.held_up_by(&signs, late).map(|stale| stale.kind);
                assert_eq!(by, held_up.contains(&removal).then_some(stale), "{removal:?}");
                assert_eq!(removal.held_up_by(&signs, UnixMillis(60_000)), None, "a minute is fresh");
            }
        }
    }
}
