//! Simulated removal of nodes: the plan for the cluster without them.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use kube::ResourceExt;

use crate::api::NodeClaim;
use crate::decisions::disruption::late_nodes::pools_with_late_nodes;
use crate::decisions::provisioning::supply_quarantine::SupplyQuarantine;
use crate::decisions::snapshot::snapshot;
use crate::model::offering::CapacityType;
use crate::model::pod_class::PodClass;
use crate::model::time::UnixMillis;
use crate::model::units::MicroUsd;
use crate::planner::{Effort, plan_with};
use crate::state::instance_types::offering_of;
use crate::state::plan_record::Holds;
use crate::state::snapshot::{Snapshot, SnapshotRequest};
use crate::state::snapshot_cache::SnapshotCache;
use crate::state::tables::ClusterState;

/// Why the removal of a node is not complete, or not wanted to save costs. The first of several counts.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Obstacle {
    /// Plans fail over the node.
    LeftOutOfPlans,
    /// A pod fits on no node and no new node.
    NoPlace,
    /// A pod goes to a node where no hold can be written: one that is not ours, or not initialized.
    NoHold,
    /// A pod needs a new node of a NodePool whose newest node does not start up: that of this NodeClaim.
    LateNode(String),
    /// The spec of a pod is invalid, so that where it fits is not known.
    InvalidPod,
    /// A new node would be without the pods of a DaemonSet that is left out of plans.
    DaemonLeftOut,
    /// A pod of a spot node goes to a new spot node, which may be interrupted sooner than the one that runs.
    SpotToSpot,
}

impl Obstacle {
    /// Whether a drifted node stays, too: the price of its replacement does not matter.
    fn concerns_drift(&self) -> bool {
        matches!(self, Self::LeftOutOfPlans | Self::NoPlace | Self::NoHold | Self::LateNode(_))
    }
}

/// Result of a simulated removal.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Cost of the new nodes per hour, by NodePool, those of other pending pods included.
    pub purchases: BTreeMap<Arc<str>, MicroUsd>,
    /// The removed claims whose nodes should stay.
    pub obstacles: BTreeMap<String, Obstacle>,
}

impl Outcome {
    /// Whether every pod of the removed nodes has a place, at any price.
    pub fn is_complete(&self) -> bool {
        !self.obstacles.values().any(Obstacle::concerns_drift)
    }

    /// The NodeClaim whose node does not start up, for which the removal is not complete.
    pub fn late_node(&self) -> Option<&str> {
        self.obstacles.values().find_map(|obstacle| match obstacle {
            Obstacle::LateNode(claim) => Some(claim.as_str()),
            _ => None,
        })
    }
}

/// Nodes to remove, with the snapshot of the cluster without them.
#[derive(Debug)]
pub struct Removal {
    snapshot: Snapshot,
    /// The removed claim by pod, `namespace/name`.
    moving: HashMap<String, String>,
    /// The removed claims of spot nodes.
    spot: BTreeSet<String>,
    /// Obstacles that need no plan.
    known: BTreeMap<String, Obstacle>,
    daemons_left_out: bool,
    /// NodePools of which no new node is bought, with a NodeClaim whose node does not start up.
    late: BTreeMap<String, String>,
}

impl Removal {
    /// Prepares the removal of the nodes of the claims in `request.without`.
    pub fn new(state: &ClusterState, holds: &Holds, cache: &mut SnapshotCache, request: SnapshotRequest<'_>) -> Self {
        let claims = || request.without.iter().filter_map(|name| state.claims.get_key_value(name));
        let nodes = || claims().filter_map(|(name, claim)| Some((name, state.node_of(claim)?.name_any())));
        let late = pools_with_late_nodes(state, request.now);
        let mut snapshot = snapshot(state, holds, cache, request);
        let (mut moving, mut known) = (HashMap::new(), BTreeMap::new());
        for (name, node) in nodes() {
            for pod in state.pods_on(&node) {
                moving.insert(pod.key(), name.clone());
                match &pod.entry {
                    _ if !pod.reschedulable() => {}
                    // Nothing creates it again, so that it is no demand; it is moved only where it would fit.
                    Ok(entry) if entry.owner.is_none() => snapshot.problem.pods.push(entry.clone()),
                    Ok(_) => {}
                    Err(_) => {
                        known.insert(name.clone(), Obstacle::InvalidPod);
                    }
                }
            }
            if snapshot.panicked_nodes.contains(&node) {
                known.insert(name.clone(), Obstacle::LeftOutOfPlans);
            }
        }
        let is_spot = |claim: &NodeClaim| offering_of(claim).is_some_and(|(_, _, kind)| kind == CapacityType::Spot);
        Self {
            spot: claims().filter(|(_, claim)| is_spot(claim)).map(|(name, _)| name.clone()).collect(),
            known,
            daemons_left_out: false,
            late,
            snapshot,
            moving,
        }
    }

    /// Leaves out pods that do not move: those that plans fail over.
    pub fn leave_out(&mut self, is_left_out: impl Fn(&PodClass) -> bool) {
        let Self { snapshot, moving, .. } = self;
        snapshot.problem.pods.retain(|pod| moving.contains_key(&*pod.key) || !is_left_out(&pod.class));
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

    /// Plans. Takes as long as the planner does.
    pub fn simulate(&self, effort: Effort) -> Outcome {
        let problem = &self.snapshot.problem;
        let plan = plan_with(problem, &self.snapshot.column_cache, effort);
        let mut out = Outcome { obstacles: self.known.clone(), ..Outcome::default() };
        for node in &plan.new_nodes {
            let pool = &problem.pools[node.pool].name;
            let price = node.choices.first().map_or(0, |choice| choice.price.0);
            out.purchases.entry(Arc::clone(pool)).or_default().0 += price;
            let is_spot = node.choices.iter().any(|choice| choice.capacity_type == CapacityType::Spot);
            self.find_obstacles(&mut out, &node.pods, |claim| {
                let late = self.late.get(&**pool).map(|claim| Obstacle::LateNode(claim.clone()));
                late.or(self.daemons_left_out.then_some(Obstacle::DaemonLeftOut))
                    .or((is_spot && self.spot.contains(claim)).then_some(Obstacle::SpotToSpot))
            });
        }
        for placement in &plan.placements {
            // Holds are written on NodeClaims.
            let is_ours = self.snapshot.node_refs[placement.node].claim.is_some();
            let may_hold = is_ours && problem.nodes[placement.node].initialized;
            self.find_obstacles(&mut out, &placement.pods, |_| (!may_hold).then_some(Obstacle::NoHold));
        }
        let left_out: Vec<usize> = plan.unschedulable.iter().map(|left_out| left_out.pod).collect();
        self.find_obstacles(&mut out, &left_out, |_| Some(Obstacle::NoPlace));
        out
    }

    /// Adds the obstacle of each removed claim that one of the pods is from. Other pending or displaced pods are no obstacle.
    fn find_obstacles(&self, out: &mut Outcome, pods: &[usize], obstacle: impl Fn(&str) -> Option<Obstacle>) {
        for claim in pods.iter().filter_map(|pod| self.moving.get(&*self.snapshot.problem.pods[*pod].key)) {
            if let Some(found) = obstacle(claim) {
                let first = out.obstacles.entry(claim.clone()).or_insert_with(|| found.clone());
                *first = found.min(first.clone());
            }
        }
    }
}

#[cfg(test)]
mod tests;
