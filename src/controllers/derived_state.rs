//! Results derived from the watched state that several loops share, so that each change is evaluated once.

use std::sync::{Arc, Mutex, MutexGuard};

use stowage_model::time::UnixMillis;

use crate::decisions::demand::demand;
use crate::decisions::disruption::node_facts::{Facts, FactsCache};
use crate::decisions::disruption::simulated_removal::Simulator;
use crate::decisions::holds::HoldsCache;
use crate::decisions::placement::closure::{ClosedNodes, Closure};
use crate::decisions::provisioning::certain_rejections::CertainRejections;
use crate::state::ClusterState;
use crate::state::plan_record::Holds;
use crate::state::pool_types::ReadyPool;
use crate::state::snapshot::{Demand, Snapshot, SnapshotRequest, take};
use crate::state::snapshot_cache::SnapshotCache;

/// Caches for the state of one [`Cluster`](crate::state::Cluster). Lock order: the state first.
#[derive(Debug, Default)]
pub struct DerivedState {
    holds: Mutex<HoldsCache>,
    snapshots: Mutex<SnapshotCache>,
    facts: Mutex<FactsCache>,
    closure: Mutex<Closure>,
    certain_rejections: Mutex<CertainRejections>,
    /// Whether pods that are certain to be rejected are planned before they are.
    plans_unattempted: bool,
}

impl DerivedState {
    /// Empty caches. `plans_unattempted`: pods that kube-scheduler is certain to reject are planned before it attempts them.
    pub fn new(plans_unattempted: bool) -> Self {
        Self { plans_unattempted, ..Self::default() }
    }

    /// The live holds at `now`.
    pub fn holds(&self, state: &ClusterState, now: UnixMillis) -> Arc<Holds> {
        intact(&self.holds).resolve(state, now)
    }

    /// The holds that were resolved last, and when. Resolves nothing.
    pub fn last_holds(&self) -> Option<(UnixMillis, Arc<Holds>)> {
        intact(&self.holds).last()
    }

    /// Pods that need a node at `now`.
    pub fn demand(&self, state: &ClusterState, now: UnixMillis) -> Demand {
        let holds = self.holds(state, now);
        let mut demand = demand(state, &holds, now);
        if self.plans_unattempted {
            demand.pending.extend(intact(&self.certain_rejections).evaluate(state, &holds, now));
        }
        demand
    }

    /// The planner's problem.
    pub fn snapshot(&self, state: &ClusterState, request: SnapshotRequest<'_>) -> Snapshot {
        let (holds, demand) = (self.holds(state, request.now), self.demand(state, request.now));
        self.with_cache(|cache| take(state, &holds, demand, cache, request))
    }

    /// What disruption reads of the nodes.
    pub fn facts(&self, state: &ClusterState, pools: &[ReadyPool]) -> Facts {
        intact(&self.facts).update(state, pools)
    }

    /// The nodes to keep closed while pods move.
    pub fn closed_nodes(&self, state: &ClusterState, pools: &[ReadyPool], now: UnixMillis) -> ClosedNodes {
        let holds = self.holds(state, now);
        intact(&self.closure).nodes(state, &holds, now, || self.facts(state, pools))
    }

    /// What simulates the removal of the nodes of these claims.
    pub fn simulator<'c>(
        &self,
        state: &ClusterState,
        request: SnapshotRequest<'_>,
        claims: impl IntoIterator<Item = &'c str>,
    ) -> Simulator {
        let (holds, facts) = (self.holds(state, request.now), self.facts(state, request.pools));
        self.with_cache(|cache| Simulator::new(state, &holds, &facts, cache, request, claims))
    }

    fn with_cache<T>(&self, take: impl FnOnce(&mut SnapshotCache) -> T) -> T {
        take(&mut intact(&self.snapshots))
    }
}

/// Locks a cache, which starts over after a panic: that may have left changes behind which were read, but not applied.
fn intact<T: Default>(cache: &Mutex<T>) -> MutexGuard<'_, T> {
    cache.lock().unwrap_or_else(|poisoned| {
        let mut empty = poisoned.into_inner();
        *empty = T::default();
        cache.clear_poison();
        empty
    })
}

#[cfg(test)]
mod snapshot_tests;
#[cfg(test)]
mod tests {
    use serde_json::json;
    use stowage_planner::PlanSettings;
    use stowage_test_objects as objects;

    use super::*;

    #[test]
    fn pods_that_no_scheduler_has_attempted_are_planned_if_that_is_set() {
        let mut state = ClusterState::default();
        state.apply_pod(&objects::pod("a", &json!({})), UnixMillis(1));
        for (derived, pods) in [(DerivedState::new(true), 1), (DerivedState::new(false), 0)] {
            let settings = PlanSettings::default();
            let request = SnapshotRequest { pools: &[], settings: &settings, now: UnixMillis(1) };
            assert_eq!(derived.demand(&state, UnixMillis(1)).pending.len(), pods);
            assert_eq!(derived.snapshot(&state, request).problem.pods.len(), pods);
        }
    }

    #[test]
    fn a_panic_during_a_snapshot_loses_no_change() {
        let (derived, mut state) = (DerivedState::default(), ClusterState::default());
        let take = |state: &ClusterState| {
            let settings = PlanSettings::default();
            let request = SnapshotRequest { pools: &[], settings: &settings, now: UnixMillis(1) };
            let nodes = derived.snapshot(state, request).problem.nodes;
            nodes.iter().map(|node| node.pods.len()).collect::<Vec<_>>()
        };
        state.apply_node(serde_json::from_value(json!({"metadata": {"name": "n"}})).unwrap());
        assert_eq!(take(&state), [0]);
        let pod = json!({"metadata": {"name": "a", "namespace": "n"}, "spec": {"nodeName": "n", "containers": []}});
        state.apply_pod(&serde_json::from_value(pod).unwrap(), UnixMillis(1));
        let result = std::thread::scope(|scope| {
            let holding = scope.spawn(|| {
                let _holds = derived.holds.lock();
                panic!("while holds are resolved");
            });
            assert!(holding.join().is_err());
            let panicking = scope.spawn(|| {
                derived.with_cache(|cache| {
                    assert_eq!(cache.begin(&state, &[], std::iter::empty()).1.len(), 1);
                    panic!("after the changes were read");
                })
            });
            panicking.join()
        });
        assert!(result.is_err() && derived.snapshots.is_poisoned());
        assert_eq!(take(&state), [1]);
        assert!(!derived.snapshots.is_poisoned() && !derived.holds.is_poisoned());
    }
}
