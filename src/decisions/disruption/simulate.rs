//! Simulated removal of nodes: the plan for the cluster without them.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use kube::ResourceExt;

use crate::decisions::demand::{demand, moved_pods, unattempted};
use crate::decisions::disruption::late_nodes::pools_with_late_nodes;
use crate::decisions::provisioning::supply_quarantine::{Source, SupplyQuarantine};
use crate::model::offering::CapacityType;
use crate::model::pod_class::PodClass;
use crate::model::resources::Resources;
use crate::model::time::UnixMillis;
use crate::model::units::MicroUsd;
use crate::planner::input::pod::PodEntry;
use crate::planner::input::problem::Problem;
use crate::planner::{Effort, plan_with};
use crate::state::instance_types::offering_of;
use crate::state::object_ext::ObjectExt;
use crate::state::plan_record::Holds;
use crate::state::snapshot::{Snapshot, SnapshotRequest, take};
use crate::state::snapshot_cache::{NodeRef, SnapshotCache};
use crate::state::tables::ClusterState;

/// Why the removal of a node is not complete, or not wanted to save costs. The first of several counts. Pods are named `namespace/name`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Obstacle {
    /// Plans fail over the node.
    LeftOutOfPlans,
    /// This pod fits on no node and no new node.
    NoPlace { pod: Arc<str>, reason: String },
    /// This pod, which waits, has no place without the node.
    NeededByWaitingPod(Arc<str>),
    /// This pod goes to a node where no hold can be written: one that is not ours, or not initialized.
    NoHold(Arc<str>),
    /// A pod needs a new node of a NodePool whose newest node does not start up: that of this NodeClaim.
    LateNode(String),
    /// The spec of this pod is invalid, so that where it fits is not known.
    InvalidPod(Arc<str>),
    /// A new node would be without the pods of a DaemonSet that is left out of plans.
    DaemonLeftOut,
    /// A pod of a spot node goes to a new spot node, which may be interrupted sooner than the one that runs.
    SpotToSpot,
}

impl Obstacle {
    /// Whether a drifted node stays, too: the price of its replacement does not matter.
    fn concerns_drift(&self) -> bool {
        matches!(
            self,
            Self::LeftOutOfPlans
                | Self::NoPlace { .. }
                | Self::NeededByWaitingPod(_)
                | Self::NoHold(_)
                | Self::LateNode(_)
        )
    }

    /// The value of the label `blocker` of metrics.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::LeftOutOfPlans => "left_out_of_plans",
            Self::NoPlace { .. } => "no_place",
            Self::NeededByWaitingPod(_) => "needed_by_waiting_pod",
            Self::NoHold(_) => "no_hold",
            Self::LateNode(_) => "late_node",
            Self::InvalidPod(_) => "invalid_pod",
            Self::DaemonLeftOut => "daemon_left_out",
            Self::SpotToSpot => "spot_to_spot",
        }
    }

    /// The pod that it names.
    pub fn pod(&self) -> Option<&str> {
        match self {
            Self::NoPlace { pod, .. } | Self::NeededByWaitingPod(pod) | Self::NoHold(pod) | Self::InvalidPod(pod) => {
                Some(pod)
            }
            Self::LeftOutOfPlans | Self::LateNode(_) | Self::DaemonLeftOut | Self::SpotToSpot => None,
        }
    }
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::LeftOutOfPlans => f.write_str("the planner failed over the node, which is left out of plans"),
            Self::NoPlace { pod, reason } => {
                write!(f, "not all pods would schedule: {pod} fits on no other node, and on no new node: {reason}")
            }
            Self::NeededByWaitingPod(pod) => write!(f, "pod {pod}, which waits, has no place without the node"),
            Self::NoHold(pod) => write!(
                f,
                "not all pods would schedule: {pod} fits only on a node that Stowage does not manage, or that is not initialized"
            ),
            Self::LateNode(claim) => write!(
                f,
                "its pods need a new node, and the newest of its NodePool, that of NodeClaim {claim}, is not initialized: \
                 see its events; disruption goes on when it is, or when the NodePool changes"
            ),
            Self::InvalidPod(pod) => write!(f, "the spec of pod {pod} is invalid, so that where it fits is not known"),
            Self::DaemonLeftOut => f.write_str(
                "its pods need a new node, which would have no room for the pods of a DaemonSet that is left out of plans",
            ),
            Self::SpotToSpot => f.write_str("its pods need a new node, and can't replace a spot node with a spot node"),
        }
    }
}

/// Result of a simulated removal.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Cost of the new nodes per hour, by NodePool.
    pub purchases: BTreeMap<Arc<str>, MicroUsd>,
    /// The removed claims whose nodes should stay.
    pub obstacles: BTreeMap<String, Obstacle>,
}

impl Outcome {
    /// Whether every pod of the removed nodes has a place, at any price.
    pub fn is_complete(&self) -> bool {
        !self.obstacles.values().any(Obstacle::concerns_drift)
    }

    /// Why a drifted node is not replaced: its own obstacle before those of the nodes that are removed with it.
    pub fn obstacle_to_drift(&self, claim: &str) -> Option<&Obstacle> {
        let mut all = self.obstacles.get(claim).into_iter().chain(self.obstacles.values());
        all.find(|obstacle| obstacle.concerns_drift())
    }

    /// Adds an obstacle of a claim; the first of several counts.
    fn find(&mut self, claim: &str, found: Obstacle) {
        match self.obstacles.get_mut(claim) {
            Some(known) if *known <= found => {}
            Some(known) => *known = found,
            None => drop(self.obstacles.insert(claim.to_owned(), found)),
        }
    }
}

/// The cluster at one time, with nodes whose removal can be simulated. A simulation reads nothing else: neither the state nor its lock.
#[derive(Debug)]
pub struct Simulator {
    snapshot: Snapshot,
    removable: BTreeMap<String, Removable>,
    daemons_left_out: bool,
    /// NodePools of which no new node is bought, with a NodeClaim whose node does not start up.
    late: BTreeMap<String, String>,
}

/// A node that can be removed.
#[derive(Debug)]
struct Removable {
    node: String,
    pool: String,
    capacity: Resources,
    is_spot: bool,
    /// Those that need another node.
    pods: Vec<PodEntry>,
    /// An obstacle that needs no plan.
    known: Option<Obstacle>,
}

impl Simulator {
    /// Prepares the removal of the nodes of any of these claims. Those without a Node are not removed.
    pub fn new<'c>(
        state: &ClusterState,
        holds: &Holds,
        cache: &mut SnapshotCache,
        request: SnapshotRequest<'_>,
        claims: impl IntoIterator<Item = &'c str>,
    ) -> Self {
        let mut demand = demand(state, holds, request.now);
        demand.pending.extend(unattempted(state, holds, request.now));
        let snapshot = take(state, holds, demand, cache, request);
        let panicked: BTreeSet<&String> = snapshot.panicked_nodes.iter().collect();
        let moved = moved_pods(holds);
        let removable = claims.into_iter().filter_map(|name| {
            let claim = state.claims.get(name)?;
            let node = state.node_of(claim)?.name_any();
            let left_out = panicked.contains(&node).then_some(Obstacle::LeftOutOfPlans);
            let mut removable = Removable {
                pool: claim.node_pool().unwrap_or_default().to_owned(),
                capacity: cache.types().capacity(claim),
                is_spot: offering_of(claim).is_some_and(|(_, _, kind)| kind == CapacityType::Spot),
                pods: Vec::new(),
                known: left_out,
                node,
            };
            for pod in state.pods_on(&removable.node).filter(|pod| pod.reschedulable()) {
                match &pod.entry {
                    Ok(entry) if !moved.contains(&*entry.key) => removable.pods.push(entry.clone()),
                    Ok(_) => {}
                    Err(_) => {
                        removable.known = removable.known.or_else(|| Some(Obstacle::InvalidPod(pod.key().into())));
                    }
                }
            }
            Some((name.to_owned(), removable))
        });
        let removable = removable.collect();
        Self { snapshot, removable, daemons_left_out: false, late: pools_with_late_nodes(state, request.now) }
    }

    /// Leaves out pods that wait and that plans fail over.
    pub fn leave_out(&mut self, is_left_out: impl Fn(&PodClass) -> bool) {
        self.snapshot.problem.pods.retain(|pod| !is_left_out(&pod.class));
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
        let left_out = quarantine.left_out(now).filter_map(|(source, _)| match source {
            Source::Node(name) => Some(&**name),
            _ => None,
        });
        let left_out: BTreeSet<&str> = left_out.collect();
        for (claim, removable) in &mut self.removable {
            if left_out.contains(&*removable.node) || left_out.contains(&**claim) {
                removable.known = Some(Obstacle::LeftOutOfPlans);
            }
        }
    }

    /// Leaves out the pods that wait for a new node, or have no place, whatever is removed: neither are they the price of a removal, nor does
    /// their number slow down each simulation. Takes as long as the planner does.
    pub fn leave_out_unplaced(&mut self, effort: Effort) {
        let Snapshot { problem, column_cache, .. } = &self.snapshot;
        let plan = plan_with(problem, column_cache, effort);
        let mut placed = vec![false; problem.pods.len()];
        plan.placements.iter().flat_map(|placement| &placement.pods).for_each(|pod| placed[*pod] = true);
        let mut placed = placed.into_iter();
        self.snapshot.problem.pods.retain(|_| placed.next().unwrap_or(false));
    }

    /// Number of pods that each simulation places besides those of the removed nodes.
    pub fn waiting_pods(&self) -> usize {
        self.snapshot.problem.pods.len()
    }

    /// Plans the removal of the nodes of these claims. Takes as long as the planner does.
    pub fn simulate(&self, without: &BTreeSet<String>, effort: Effort) -> Outcome {
        let mut out = Outcome::default();
        let mut removed = Vec::new();
        for claim in without {
            match self.removable.get(claim) {
                Some(removable) => {
                    out.obstacles.extend(removable.known.clone().map(|known| (claim.clone(), known)));
                    removed.push((claim, removable));
                }
                None => drop(out.obstacles.insert(claim.clone(), Obstacle::LeftOutOfPlans)),
            }
        }
        let (problem, node_refs) = self.problem_without(without, &removed);
        let waiting = self.waiting_pods();
        let claims: Vec<&String> =
            removed.iter().flat_map(|(claim, removable)| removable.pods.iter().map(|_| *claim)).collect();
        let claim_of = |pod: &usize| pod.checked_sub(waiting).and_then(|at| claims.get(at)).copied();
        let plan = plan_with(&problem, &self.snapshot.column_cache, effort);
        for node in &plan.new_nodes {
            let pool = &problem.pools[node.pool].name;
            let price = node.choices.first().map_or(0, |choice| choice.price.0);
            out.purchases.entry(Arc::clone(pool)).or_default().0 += price;
            let is_spot = node.choices.iter().any(|choice| choice.capacity_type == CapacityType::Spot);
            for claim in node.pods.iter().filter_map(claim_of) {
                if let Some(late) = self.late.get(&**pool) {
                    out.find(claim, Obstacle::LateNode(late.clone()));
                } else if self.daemons_left_out {
                    out.find(claim, Obstacle::DaemonLeftOut);
                } else if is_spot && self.removable.get(claim).is_some_and(|removable| removable.is_spot) {
                    out.find(claim, Obstacle::SpotToSpot);
                }
            }
        }
        for placement in &plan.placements {
            // Holds are written on NodeClaims.
            let may_hold = node_refs[placement.node].claim.is_some() && problem.nodes[placement.node].initialized;
            if !may_hold {
                for pod in &placement.pods {
                    if let Some(claim) = claim_of(pod) {
                        out.find(claim, Obstacle::NoHold(Arc::clone(&problem.pods[*pod].key)));
                    }
                }
            }
        }
        let mut waits = None;
        for left_out in plan.unschedulable {
            let pod = &problem.pods[left_out.pod].key;
            match claim_of(&left_out.pod) {
                Some(claim) => out.find(claim, Obstacle::NoPlace { pod: Arc::clone(pod), reason: left_out.reason }),
                None => waits = waits.or_else(|| Some(Arc::clone(pod))),
            }
        }
        // A pod that waits has a place only while all of them stay.
        if let Some(pod) = waits {
            for claim in without {
                out.find(claim, Obstacle::NeededByWaitingPod(Arc::clone(&pod)));
            }
        }
        out
    }

    /// The problem without these nodes, and the objects behind its nodes.
    fn problem_without(
        &self,
        without: &BTreeSet<String>,
        removed: &[(&String, &Removable)],
    ) -> (Problem, Vec<&Arc<NodeRef>>) {
        let Snapshot { problem: base, node_refs, .. } = &self.snapshot;
        let all = base.nodes.iter().zip(node_refs);
        let stays = |node_ref: &NodeRef| node_ref.claim.as_ref().is_none_or(|claim| !without.contains(claim));
        let (nodes, node_refs) =
            all.filter(|(_, node_ref)| stays(node_ref)).map(|(node, node_ref)| (Arc::clone(node), node_ref)).unzip();
        let mut pools = base.pools.clone();
        for pool in &mut pools {
            for (_, removable) in removed.iter().filter(|(_, removable)| *removable.pool == *pool.name) {
                pool.usage.sub(&removable.capacity);
                pool.node_count -= 1;
            }
        }
        let moving = removed.iter().flat_map(|(_, removable)| &removable.pods);
        let problem = Problem {
            pods: base.pods.iter().chain(moving).cloned().collect(),
            nodes,
            pools,
            daemons: base.daemons.clone(),
            namespaces: Arc::clone(&base.namespaces),
            volumes: Arc::clone(&base.volumes),
            services: Arc::clone(&base.services),
            settings: base.settings.clone(),
        };
        (problem, node_refs)
    }
}

#[cfg(test)]
mod tests;
