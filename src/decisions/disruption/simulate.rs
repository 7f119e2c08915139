//! Simulated removal of nodes: the plan for the cluster without them.

use std::collections::{BTreeMap, BTreeSet};

use kube::ResourceExt;

use crate::decisions::disruption::late_nodes::pools_with_late_nodes;
use crate::decisions::provisioning::supply_quarantine::SupplyQuarantine;
use crate::decisions::snapshot::snapshot;
use crate::model::offering::CapacityType;
use crate::model::pod_class::PodClass;
use crate::model::time::UnixMillis;
use crate::planner::plan;
use crate::state::instance_types::{InstanceTypes, offering_of};
use crate::state::plan_record::Holds;
use crate::state::pods::PodRecord;
use crate::state::snapshot::{Snapshot, SnapshotRequest};
use crate::state::snapshot_cache::SnapshotCache;
use crate::state::tables::ClusterState;

/// Result of a simulated removal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Every pod of the removed nodes has a node: an initialized node of ours, where a hold can be written, or a new node.
    pub complete: bool,
    /// The NodeClaim whose node does not start up, and of whose NodePool new nodes would be: the removal is not complete.
    pub late_node: Option<String>,
    /// Number of new nodes.
    pub new_nodes: usize,
    /// Whether a removed node is a spot instance.
    pub any_spot: bool,
    /// Whether a DaemonSet is left out of plans, so that new nodes reserve nothing for its pods.
    pub daemons_left_out: bool,
    /// Price of the removed nodes less that of the new nodes, micro-USD per hour.
    pub saving: i64,
}

/// Nodes to remove, with the snapshot of the cluster without them.
#[derive(Debug)]
pub struct Removal {
    snapshot: Snapshot,
    /// Keys of the pods on the removed nodes.
    moving: BTreeSet<String>,
    of_unknown: bool,
    any_spot: bool,
    daemons_left_out: bool,
    /// NodePools of which no new node is bought, with a NodeClaim whose node does not start up.
    late: BTreeMap<String, String>,
    /// Price of the removed nodes, micro-USD per hour.
    price: i64,
}

impl Removal {
    /// Prepares the removal of the nodes of the claims in `request.without`.
    pub fn new(
        state: &ClusterState,
        holds: &Holds,
        types: &InstanceTypes,
        cache: &mut SnapshotCache,
        request: SnapshotRequest<'_>,
    ) -> Self {
        let claims = || request.without.iter().filter_map(|name| state.claims.get(name));
        let mut moving = BTreeSet::new();
        for node in claims().filter_map(|claim| state.node_of(claim)) {
            moving.extend(state.pods_on(&node.name_any()).map(PodRecord::key));
        }
        let is_spot = |capacity_type| capacity_type == CapacityType::Spot;
        let late = pools_with_late_nodes(state, request.now);
        let snapshot = snapshot(state, holds, cache, request);
        let nodes: BTreeSet<String> =
            claims().filter_map(|claim| state.node_of(claim)).map(|node| node.name_any()).collect();
        Self {
            of_unknown: snapshot.panicked_nodes.iter().any(|name| nodes.contains(name)),
            any_spot: claims().any(|claim| offering_of(claim).is_some_and(|(_, _, kind)| is_spot(kind))),
            daemons_left_out: false,
            late,
            price: claims().map(|claim| types.price(claim).0).sum(),
            snapshot,
            moving,
        }
    }

    /// Leaves out pods that do not move: those that plans fail over.
    pub fn leave_out(&mut self, is_left_out: impl Fn(&PodClass) -> bool) {
        let Self { snapshot, moving, .. } = self;
        snapshot.problem.pods.retain(|pod| moving.contains(&*pod.key) || !is_left_out(&pod.class));
    }

    /// Leaves out the NodePools, nodes and DaemonSets that plans fail over.
    pub fn leave_out_supply(
        &mut self,
        quarantine: &SupplyQuarantine,
        generation: impl Fn(&str) -> Option<i64>,
        now: UnixMillis,
    ) {
        quarantine.leave_out(&mut self.snapshot, generation, now);
        self.daemons_left_out = quarantine.leaves_out_daemon_sets(now);
    }

    /// Whether the state of a removed node could not be read.
    pub fn is_of_unknown(&self) -> bool {
        self.of_unknown
    }

    /// Plans. Takes as long as the planner does.
    pub fn simulate(&self) -> Outcome {
        let problem = &self.snapshot.problem;
        let plan = plan(problem, &self.snapshot.column_cache);
        // Other pending or displaced pods do not affect the outcome.
        let moves = |pod: &usize| self.moving.contains(&*problem.pods[*pod].key);
        // Only existing nodes of ours that are initialized: holds are written on NodeClaims.
        let holdable = plan.placements.iter().filter(|placement| placement.pods.iter().any(moves)).all(|placement| {
            problem.nodes[placement.node].initialized && self.snapshot.node_refs[placement.node].claim.is_some()
        });
        let mut bought = plan.new_nodes.iter().filter(|node| node.pods.iter().any(moves));
        let late_node = bought.find_map(|node| self.late.get(&*problem.pools[node.pool].name)).cloned();
        Outcome {
            complete: holdable
                && late_node.is_none()
                && !plan.unschedulable.iter().any(|left_out| moves(&left_out.pod)),
            late_node,
            new_nodes: plan.new_nodes.len(),
            any_spot: self.any_spot,
            daemons_left_out: self.daemons_left_out,
            saving: self.price - plan.cost.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use serde_json::json;

    use super::*;
    use crate::decisions::provisioning::supply_quarantine::Source;
    use crate::model::labels;
    use crate::planner::input::settings::Settings;
    use crate::state::instance_types::ReadyPool;
    use crate::state::node_state::BOOT_TIMEOUT;
    use crate::test_support::objects;

    #[test]
    fn an_outcome_states_that_new_nodes_reserve_nothing_for_a_daemon_set() {
        let (state, settings, without) = (ClusterState::default(), Settings::default(), BTreeSet::new());
        let (mut quarantine, now) = (SupplyQuarantine::default(), UnixMillis(1_000_000));
        quarantine.add(Source::Node("n".into()), None, false, now);
        for left_out in [false, true] {
            if left_out {
                quarantine.add(Source::DaemonSet("n/d".into()), None, false, now);
            }
            let request = SnapshotRequest { pools: &[], settings: &settings, without: &without, now };
            let (holds, types) = (Holds::default(), InstanceTypes::default());
            let mut removal = Removal::new(&state, &holds, &types, &mut SnapshotCache::default(), request);
            removal.leave_out_supply(&quarantine, |_| None, now);
            assert_eq!(removal.simulate().daemons_left_out, left_out);
        }
    }

    #[test]
    fn a_removal_that_needs_a_node_of_a_pool_whose_newest_node_does_not_start_up_is_not_complete() {
        let pool = |name: &str| {
            let (pool, catalog) = (objects::node_pool(name, &json!({})), Arc::new(objects::catalog()));
            ReadyPool { pool: Arc::new(pool), catalog }
        };
        let (now, settings, without) = (UnixMillis(10_000_000), Settings::default(), ["old".to_owned()].into());
        let put = |state: &mut ClusterState, name: &str, age: Duration, conditions: &[&str]| {
            let meta = json!({"creationTimestamp": (now - age).rfc3339(), "labels": {(labels::NODE_POOL): "p"}});
            let status = objects::launched(name, conditions);
            state.apply_claim(objects::claim(name, &json!({"metadata": meta, "status": status})));
        };
        for (case, pools, late, late_node) in [
            ("no late node", vec![pool("p")], false, None),
            ("a late node", vec![pool("p")], true, Some("late")),
            ("a late node of another pool", vec![pool("q")], true, None),
        ] {
            let mut state = ClusterState::default();
            put(&mut state, "old", BOOT_TIMEOUT * 2, &["Initialized"]);
            if late {
                put(&mut state, "late", BOOT_TIMEOUT, &[]);
            }
            state.apply_node(objects::node("node-old", &json!({"spec": {"providerID": "aws:///z/old"}})));
            let owner =
                json!({"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "r", "controller": true});
            let spec =
                json!({"nodeName": "node-old", "containers": [{"name": "c", "resources": {"requests": {"cpu": "1"}}}]});
            state.apply_pod(&objects::pod("a", &json!({"metadata": {"ownerReferences": [owner]}, "spec": spec})), now);
            let request = SnapshotRequest { pools: &pools, settings: &settings, without: &without, now };
            let (holds, types) = (Holds::default(), InstanceTypes::new(&pools));
            let removal = Removal::new(&state, &holds, &types, &mut SnapshotCache::default(), request);
            let outcome = removal.simulate();
            assert_eq!((outcome.new_nodes, outcome.complete), (1, late_node.is_none()), "{case}");
            assert_eq!(outcome.late_node.as_deref(), late_node, "{case}");
        }
    }
}
