//! Simulated removal of nodes: the plan for the cluster without them.

use std::collections::BTreeSet;

use kube::ResourceExt;

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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Every pod of the removed nodes has a node: an initialized node of ours, where a hold can be written, or a new node.
    pub complete: bool,
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
        let snapshot = snapshot(state, holds, cache, request);
        let nodes: BTreeSet<String> =
            claims().filter_map(|claim| state.node_of(claim)).map(|node| node.name_any()).collect();
        Self {
            of_unknown: snapshot.panicked_nodes.iter().any(|name| nodes.contains(name)),
            any_spot: claims().any(|claim| offering_of(claim).is_some_and(|(_, _, kind)| is_spot(kind))),
            daemons_left_out: false,
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
        Outcome {
            complete: holdable && !plan.unschedulable.iter().any(|left_out| moves(&left_out.pod)),
            new_nodes: plan.new_nodes.len(),
            any_spot: self.any_spot,
            daemons_left_out: self.daemons_left_out,
            saving: self.price - plan.cost.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decisions::provisioning::supply_quarantine::Source;
    use crate::planner::input::settings::Settings;

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
}
