//! Waits between launches for a static NodePool whose NodeClaims end before their nodes are initialized: without capacity, or with nodes that do not
//! join the cluster, it would create NodeClaims without an end.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use stowage_api::conditions;
use stowage_model::time::UnixMillis;

use crate::state::object_ext::{NodeClaimExt, ObjectExt};
use crate::state::tables::ClusterState;

/// Wait after the first failure, and the longest one; each further failure doubles it.
const BACKOFF: (Duration, Duration) = (Duration::from_secs(5), Duration::from_mins(5));

/// The waits, by NodePool. A new process starts over.
#[derive(Debug, Default)]
pub struct LaunchBackoff {
    pools: BTreeMap<String, Launches>,
}

#[derive(Debug, Default)]
struct Launches {
    /// NodeClaims that were created and are not initialized.
    starting: BTreeSet<String>,
    /// Failures since the last initialized node.
    failures: u32,
    until: UnixMillis,
}

impl LaunchBackoff {
    /// Records a created NodeClaim.
    pub fn created(&mut self, pool: &str, claim: &str) {
        self.pools.entry(pool.to_owned()).or_default().starting.insert(claim.to_owned());
    }

    /// Records that a NodeClaim is removed because it is not needed any more.
    pub fn removed(&mut self, pool: &str, claim: &str) {
        if let Some(launches) = self.pools.get_mut(pool) {
            launches.starting.remove(claim);
        }
    }

    /// Records a failure: no NodeClaim is created before a wait.
    pub fn failed(&mut self, pool: &str, now: UnixMillis) {
        let launches = self.pools.entry(pool.to_owned()).or_default();
        let wait = BACKOFF.0.saturating_mul(1 << launches.failures.min(16)).min(BACKOFF.1);
        launches.failures += 1;
        launches.until = now + wait;
    }

    /// Records what became of the created NodeClaims. Several that end at once are one failure.
    pub fn observe(&mut self, state: &ClusterState, now: UnixMillis) {
        self.pools.retain(|pool, _| state.pools.contains_key(pool));
        let mut failed = Vec::new();
        for (pool, launches) in &mut self.pools {
            let before = launches.starting.len();
            let is_up = |name: &String| {
                state.claims.get(name).is_some_and(|claim| claim.has_condition(conditions::INITIALIZED))
            };
            launches.starting.retain(|name| !is_up(name));
            if launches.starting.len() < before {
                launches.failures = 0;
            }
            let before = launches.starting.len();
            launches.starting.retain(|name| state.claims.get(name).is_some_and(|claim| !claim.is_deleting()));
            if launches.starting.len() < before {
                failed.push(pool.clone());
            }
        }
        for pool in failed {
            self.failed(&pool, now);
        }
    }

    /// When NodeClaims of a NodePool may be created.
    pub fn until(&self, pool: &str) -> UnixMillis {
        self.pools.get(pool).map_or(UnixMillis::default(), |launches| launches.until)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use stowage_test_objects as objects;

    use super::*;

    fn state(claims: &[(&str, Value)]) -> ClusterState {
        let mut state = ClusterState::default();
        state.apply_pool(objects::node_pool("p", &json!({"spec": {"replicas": 9}})));
        for (name, patch) in claims {
            state.apply_claim(objects::claim(name, patch));
        }
        state
    }

    #[test]
    fn the_wait_doubles_with_each_failure_and_ends_with_a_node() {
        let mut backoff = LaunchBackoff::default();
        let mut now = UnixMillis(1_000_000);
        let mut waits = Vec::new();
        for _ in 0..9 {
            backoff.created("p", "gone");
            backoff.created("p", "gone too");
            backoff.observe(&state(&[]), now);
            backoff.observe(&state(&[]), now);
            waits.push(backoff.until("p").saturating_since(now).as_secs());
            now = backoff.until("p");
        }
        assert_eq!(waits, [5, 10, 20, 40, 80, 160, 300, 300, 300]);
        let deleting = json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": ["f"]}});
        let up = json!({"status": objects::launched("i-1", &["Initialized"])});
        backoff.created("p", "up");
        backoff.created("p", "deleting");
        backoff.created("p", "starting");
        backoff.observe(&state(&[("up", up), ("deleting", deleting), ("starting", json!({}))]), now);
        assert_eq!(backoff.until("p"), now + Duration::from_secs(5), "the first failure after a node");
        backoff.removed("p", "starting");
        backoff.observe(&state(&[]), now + Duration::from_secs(1));
        assert_eq!(backoff.until("p"), now + Duration::from_secs(5), "its NodePool needs it no more");
        let mut deleted = ClusterState::default();
        deleted.apply_pool(objects::node_pool("q", &json!({})));
        backoff.observe(&deleted, now);
        assert_eq!(backoff.until("p"), UnixMillis::default());
    }
}
