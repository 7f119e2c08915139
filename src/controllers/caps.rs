//! Caps on what the leader purchases and disrupts per minute, and on the pods that it evicts per second.

use std::sync::Mutex;
use std::time::Duration;

use stowage_model::time::UnixMillis;
use stowage_runtime::sync::lock;

use crate::decisions::rate_cap::RateCap;
use crate::state::ClusterState;
use crate::state::object_ext::ObjectExt;

/// What is capped per minute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Capped {
    /// NodeClaims that are created.
    Purchase,
    /// Nodes that are disrupted voluntarily, and instances that are collected as garbage.
    Disruption,
}

impl Capped {
    /// Value of the metric label `action`.
    pub fn label(self) -> &'static str {
        match self {
            Self::Purchase => "purchase",
            Self::Disruption => "disruption",
        }
    }
}

/// The caps of [`Capped`].
#[derive(Debug)]
pub struct Caps {
    purchases: Mutex<RateCap>,
    disruptions: Mutex<RateCap>,
    /// Per second.
    evictions: Mutex<RateCap>,
}

impl Caps {
    /// The caps of a new leader: what the objects show of the last minute counts, so that a process that restarts again and again
    /// purchases no more than one that does not.
    pub fn after(state: &ClusterState, now: UnixMillis) -> Self {
        let claims = || state.claims.values();
        let deleted = claims().filter_map(|claim| claim.metadata.deletion_timestamp.as_ref().map(UnixMillis::from));
        Self {
            purchases: Mutex::new(RateCap::after(claims().map(|claim| claim.created_at()), now)),
            disruptions: Mutex::new(RateCap::after(deleted, now)),
            evictions: Mutex::new(RateCap::within(Duration::from_secs(1))),
        }
    }

    /// How many of `wanted` pods may be evicted now, with at most `most` in any second; records them.
    pub fn admit_evictions(&self, wanted: usize, most: usize, now: UnixMillis) -> usize {
        lock(&self.evictions).admit(wanted, most, now)
    }

    /// See [`RateCap::take_back`].
    pub fn take_back_evictions(&self, count: usize) {
        lock(&self.evictions).take_back(count);
    }

    /// See [`RateCap::admit`].
    pub fn admit(&self, what: Capped, wanted: usize, most: usize, now: UnixMillis) -> usize {
        lock(self.of(what)).admit(wanted, most, now)
    }

    /// See [`RateCap::admissible`].
    pub fn admissible(&self, what: Capped, most: usize, now: UnixMillis) -> usize {
        lock(self.of(what)).admissible(most, now)
    }

    /// See [`RateCap::take_back`].
    pub fn take_back(&self, what: Capped, count: usize) {
        lock(self.of(what)).take_back(count);
    }

    fn of(&self, what: Capped) -> &Mutex<RateCap> {
        match what {
            Capped::Purchase => &self.purchases,
            Capped::Disruption => &self.disruptions,
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use stowage_test_objects as objects;

    use super::*;

    #[test]
    fn all_nodes_together_evict_so_many_pods_in_a_second() {
        let caps = Caps::after(&ClusterState::default(), UnixMillis(0));
        let admitted = |wanted: usize, at: i64| caps.admit_evictions(wanted, 50, UnixMillis(at));
        assert_eq!([admitted(30, 0), admitted(30, 400), admitted(30, 999)], [30, 20, 0]);
        caps.take_back_evictions(5);
        assert_eq!([admitted(30, 999), admitted(30, 1_000), admitted(30, 1_400)], [5, 30, 15]);
    }

    #[test]
    fn a_restart_does_not_reset_the_caps() {
        let mut state = ClusterState::default();
        for (name, created, deleted) in
            [("old", 0, None), ("new", 60, None), ("newer", 90, None), ("gone", 0, Some(80))]
        {
            let at = |seconds: i64| UnixMillis(seconds * 1_000).rfc3339();
            let meta =
                json!({"creationTimestamp": at(created), "deletionTimestamp": deleted.map(at), "finalizers": ["f"]});
            state.apply_claim(objects::claim(name, &json!({ "metadata": meta })));
        }
        let now = UnixMillis(100_000);
        let caps = Caps::after(&state, now);
        let both = |now| [Capped::Purchase, Capped::Disruption].map(|what| caps.admissible(what, 5, now));
        assert_eq!(both(now), [3, 4]);
        assert_eq!(both(now + Duration::from_secs(20)), [4, 4], "the older of two is a minute old");
        assert_eq!(both(now + Duration::from_secs(40)), [4, 5]);
        assert_eq!(both(now + Duration::from_secs(50)), [5, 5]);
    }
}
