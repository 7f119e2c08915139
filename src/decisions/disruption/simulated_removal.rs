//! Simulated removal of nodes: the plan for the cluster without them.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use kube::ResourceExt;
use stowage_api::NodeClaim;
use stowage_model::labels;
use stowage_model::offering::CapacityType;
use stowage_model::pod_class::PodClass;
use stowage_model::time::UnixMillis;
use stowage_model::units::MicroUsd;
use stowage_planner::{
    Choice, ColumnCache, Effort, NodeState, Plan, PlannedNode, PodEntry, Problem, least_cost, plan_with,
};

use crate::decisions::demand::{demand, moved_pods, unattempted};
use crate::decisions::disruption::late_nodes::pools_with_late_nodes;
use crate::decisions::disruption::moves::{Move, is_spot, split};
use crate::decisions::disruption::node_facts::{Facts, NodeFacts};
use crate::decisions::disruption::obstacle::{MIN_ALTERNATIVES, Obstacle};
use crate::decisions::disruption::progress::unheld_pods;
use crate::decisions::disruption::size::{Size, less, size, sum};
use crate::decisions::provisioning::supply_quarantine::{Source, SupplyQuarantine};
use crate::state::object_ext::ObjectExt;
use crate::state::plan_record::Holds;
use crate::state::pool_types::ReadyPool;
use crate::state::snapshot::{Snapshot, SnapshotRequest, take};
use crate::state::snapshot_cache::{NodeRef, SnapshotCache};
use crate::state::tables::ClusterState;

/// Replacements in a row within an hour after which a node is only removed without new nodes: the prices go back and forth.
const MAX_REPLACEMENTS: u8 = 2;

/// Result of a simulated removal.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SimulatedRemoval {
    /// Cost of the new nodes per hour, by NodePool.
    pub purchases: BTreeMap<Arc<str>, MicroUsd>,
    /// The removed claims whose nodes should stay.
    pub obstacles: BTreeMap<String, Obstacle>,
    /// What is free afterwards on the nodes where a pod may move to. New nodes have no reference.
    pub rooms: Vec<(Option<Arc<NodeRef>>, Size)>,
    /// Cost of the new nodes per hour, by removed claim in proportion to its pods on them.
    pub bought: BTreeMap<String, MicroUsd>,
    /// What the pods on new nodes need.
    pub load_of_new: Size,
}

impl SimulatedRemoval {
    /// Whether every pod of the removed nodes has a place, at any price.
    pub fn is_complete(&self) -> bool {
        !self.obstacles.values().any(Obstacle::concerns_replacement)
    }

    /// Why a drifted node is not replaced: its own obstacle before those of the nodes that are removed with it.
    pub fn obstacle_to_replacement(&self, claim: &str) -> Option<&Obstacle> {
        let mut all = self.obstacles.get(claim).into_iter().chain(self.obstacles.values());
        all.find(|obstacle| obstacle.concerns_replacement())
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
    targets: Targets,
    /// Nodes that are closed until a pod has no other place, as they were before, by claim.
    avoided: BTreeMap<String, Arc<NodeState>>,
    /// Whether a new spot node may replace a spot node.
    spot_to_spot: bool,
    /// NodePools of which no new node is bought, with a NodeClaim whose node does not start up.
    late: BTreeMap<String, String>,
}

/// Where the pods of removed nodes may go.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Targets {
    /// To initialized nodes, and to new ones.
    #[default]
    Any,
    /// To initialized nodes.
    Initialized,
    /// To nodes that Stowage manages, also those that are not initialized yet: where room can be kept.
    Managed,
}

/// A node that can be removed.
#[derive(Debug)]
struct Removable {
    facts: Arc<NodeFacts>,
    /// Pods of it whose successors have a hold.
    moved: BTreeSet<Arc<str>>,
    /// An obstacle that needs no plan.
    known: Option<Obstacle>,
}

/// A planned removal.
struct Removal<'a> {
    without: &'a BTreeSet<String>,
    removed: Vec<(&'a String, &'a Removable)>,
    problem: Problem,
    node_refs: Vec<&'a Arc<NodeRef>>,
    /// Number of pods of the problem that wait. Those of the removed nodes follow.
    waiting: usize,
    /// The claim of each of those that follow.
    claims: Vec<&'a String>,
    plan: Plan,
}

impl Removable {
    /// The pods that need another node.
    fn pods(&self) -> impl Iterator<Item = &PodEntry> {
        self.facts.pods.iter().filter(|entry| self.moved.is_empty() || !self.moved.contains(&entry.key))
    }
}

impl Simulator {
    /// Prepares the removal of the nodes of any of these claims. Those without a Node are not removed.
    pub fn new<'c>(
        state: &ClusterState,
        holds: &Holds,
        facts: &Facts,
        cache: &mut SnapshotCache,
        request: SnapshotRequest<'_>,
        claims: impl IntoIterator<Item = &'c str>,
    ) -> Self {
        let mut demand = demand(state, holds, request.now);
        demand.pending.extend(unattempted(state, holds, request.now));
        let claims: HashSet<&str> = claims.into_iter().collect();
        demand.displaced.extend(unheld_pods(state, &claims));
        let snapshot = take(state, holds, demand, cache, request);
        let panicked: BTreeSet<&String> = snapshot.panicked_nodes.iter().collect();
        let mut moved: BTreeMap<&str, BTreeSet<Arc<str>>> = BTreeMap::new();
        for pod in moved_pods(holds).into_iter().filter_map(|key| state.pods.get(key)) {
            if let (Some(node), Ok(entry)) = (&pod.node, &pod.entry) {
                moved.entry(node).or_default().insert(Arc::clone(&entry.key));
            }
        }
        let removable = facts.nodes.iter().filter(|facts| claims.contains(&*facts.claim)).map(|facts| {
            let left_out = panicked.contains(&facts.node).then_some(Obstacle::LeftOutOfPlans);
            let known = left_out.or_else(|| facts.invalid_pod.clone().map(Obstacle::InvalidPod));
            let moved = moved.remove(&*facts.node).unwrap_or_default();
            (facts.claim.clone(), Removable { facts: Arc::clone(facts), moved, known })
        });
        let removable = removable.collect();
        let late = pools_with_late_nodes(state, request.now);
        let (targets, avoided) = Default::default();
        Self { snapshot, removable, daemons_left_out: false, targets, avoided, spot_to_spot: false, late }
    }

    /// Lets a new spot node replace a spot node, if enough instance types are cheaper.
    pub fn allow_spot_to_spot(&mut self) {
        self.spot_to_spot = true;
    }

    /// Limits where pods may go.
    pub fn limit_targets(&mut self, targets: Targets) {
        self.targets = targets;
        if targets == Targets::Any {
            return;
        }
        self.snapshot.problem.pools.clear();
        self.snapshot.column_cache = ColumnCache::default();
        self.close_where(|claim| targets == Targets::Managed && claim.is_none());
    }

    /// Lets no pod go to the nodes of these claims.
    pub fn close(&mut self, claims: &BTreeSet<String>) {
        self.close_where(|claim| claim.is_some_and(|claim| claims.contains(claim)));
    }

    /// Lets pods go to the nodes of these claims only where they have no other place.
    pub fn avoid(&mut self, claims: &BTreeSet<String>) {
        let all = self.snapshot.problem.nodes.iter_mut().zip(&self.snapshot.node_refs);
        for (node, claim) in all.filter_map(|(node, node_ref)| Some((node, node_ref.claim.as_ref()?))) {
            if claims.contains(claim) {
                self.avoided.insert(claim.clone(), Arc::clone(node));
                Arc::make_mut(node).schedulable = false;
            }
        }
    }

    fn close_where(&mut self, is_closed: impl Fn(Option<&String>) -> bool) {
        let nodes = self.snapshot.problem.nodes.iter_mut().zip(&self.snapshot.node_refs);
        for (node, _) in nodes.filter(|(_, node_ref)| is_closed(node_ref.claim.as_ref())) {
            Arc::make_mut(node).schedulable = false;
        }
    }

    fn is_ready(&self, node: &NodeState) -> bool {
        node.initialized || self.targets == Targets::Managed
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
            if left_out.contains(&*removable.facts.node) || left_out.contains(&**claim) {
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

    /// A lower bound on the price of new nodes for the pods of all nodes that can be removed, per hour. Takes as long as the LP does.
    pub fn least_cost(&self) -> Option<MicroUsd> {
        let removed: Vec<(&String, &Removable)> = self.removable.iter().collect();
        let (mut problem, _) = self.problem_without(&self.removable.keys().cloned().collect(), &removed);
        problem.pods.drain(..self.waiting_pods());
        least_cost(&problem, &self.snapshot.column_cache)
    }

    /// Plans the removal of the nodes of these claims. Takes as long as the planner does.
    pub fn simulate(&self, without: &BTreeSet<String>, effort: Effort) -> SimulatedRemoval {
        self.evaluate(&self.removal(without, effort))
    }

    /// Plans the removal of the nodes of these claims, as moves. Takes as long as the planner does.
    pub fn moves(&self, without: &BTreeSet<String>, effort: Effort) -> (SimulatedRemoval, Vec<Move>) {
        let removal = self.removal(without, effort);
        let outcome = self.evaluate(&removal);
        let Removal { problem, node_refs, removed, plan, waiting, claims, .. } = removal;
        let snapshot = Arc::new(Snapshot {
            displaced: problem.pods[waiting..].iter().map(|entry| entry.key.to_string()).collect(),
            node_refs: node_refs.into_iter().cloned().collect(),
            problem,
            taken_at: self.snapshot.taken_at,
            column_cache: self.snapshot.column_cache.clone(),
            ..Snapshot::default()
        });
        let sources = removed.iter().map(|(claim, removable)| ((*claim).clone(), Arc::clone(&removable.facts)));
        let source_of = |pod: usize| pod.checked_sub(waiting).and_then(|at| claims.get(at)).map(|claim| claim.as_str());
        (outcome, split(&sources.collect(), &snapshot, &plan, source_of))
    }

    fn removal<'a>(&'a self, without: &'a BTreeSet<String>, effort: Effort) -> Removal<'a> {
        let removed: Vec<(&String, &Removable)> =
            without.iter().filter_map(|claim| Some((claim, self.removable.get(claim)?))).collect();
        let (mut problem, node_refs) = self.problem_without(without, &removed);
        let mut plan = plan_with(&problem, &self.snapshot.column_cache, effort);
        if !(self.avoided.is_empty() || plan.unschedulable.is_empty()) {
            for (node, node_ref) in problem.nodes.iter_mut().zip(&node_refs) {
                if let Some(open) = node_ref.claim.as_ref().and_then(|claim| self.avoided.get(claim)) {
                    *node = Arc::clone(open);
                }
            }
            plan = plan_with(&problem, &self.snapshot.column_cache, effort);
        }
        let claims = removed.iter().flat_map(|(claim, removable)| removable.pods().map(|_| *claim)).collect();
        Removal { without, problem, node_refs, waiting: self.waiting_pods(), claims, removed, plan }
    }

    fn evaluate(&self, removal: &Removal<'_>) -> SimulatedRemoval {
        let Removal { without, problem, node_refs, waiting, claims, removed, plan } = removal;
        let mut out = SimulatedRemoval::default();
        for claim in without.iter().filter(|claim| !self.removable.contains_key(*claim)) {
            out.obstacles.insert(claim.clone(), Obstacle::LeftOutOfPlans);
        }
        for (claim, removable) in removed {
            out.obstacles.extend(removable.known.clone().map(|known| ((*claim).clone(), known)));
        }
        let claim_of = |pod: &usize| pod.checked_sub(*waiting).and_then(|at| claims.get(at)).copied();
        for node in &plan.new_nodes {
            let pool = &problem.pools[node.pool].name;
            let price = node.choices.first().map_or(0, |choice| choice.price.0);
            out.purchases.entry(Arc::clone(pool)).or_default().0 += price;
            let size_of = |pod: &usize| size(&problem.pods[*pod].class.requests);
            let load = node.pods.iter().map(size_of).fold([0; 2], sum);
            out.load_of_new = sum(out.load_of_new, load);
            for (claim, pod) in node.pods.iter().filter_map(|pod| Some((claim_of(pod)?, size_of(pod)))) {
                out.bought.entry(claim.clone()).or_default().0 += share(price, pod, load);
            }
            let replaced: BTreeSet<&String> = node.pods.iter().filter_map(claim_of).collect();
            for claim in &replaced {
                if let Some(late) = self.late.get(&**pool) {
                    out.find(claim, Obstacle::LateNode(late.clone()));
                } else if self.daemons_left_out {
                    out.find(claim, Obstacle::DaemonLeftOut);
                } else if let Some(Removable { facts, .. }) = self.removable.get(*claim)
                    && let Some(obstacle) = self.obstacle_to_cheaper(node, facts, replaced.len() == 1)
                {
                    out.find(claim, obstacle);
                }
            }
        }
        for placement in plan.placements.iter().filter(|placement| !self.is_ready(&problem.nodes[placement.node])) {
            for pod in &placement.pods {
                if let Some(claim) = claim_of(pod) {
                    out.find(claim, Obstacle::TargetNotInitialized(Arc::clone(&problem.pods[*pod].key)));
                }
            }
        }
        out.rooms = rooms(problem, node_refs, plan);
        let mut waits = None;
        for left_out in &plan.unschedulable {
            let pod = &problem.pods[left_out.pod].key;
            match claim_of(&left_out.pod) {
                Some(claim) => {
                    out.find(claim, Obstacle::NoPlace { pod: Arc::clone(pod), reason: left_out.reason.clone() });
                }
                None => waits = waits.or_else(|| Some(Arc::clone(pod))),
            }
        }
        // A pod that waits has a place only while all of them stay.
        if let Some(pod) = waits {
            for claim in *without {
                out.find(claim, Obstacle::NeededByWaitingPod(Arc::clone(&pod)));
            }
        }
        out
    }

    /// Why a new node does not replace a node to save costs. `is_alone`: it replaces no other.
    fn obstacle_to_cheaper(&self, node: &PlannedNode, facts: &NodeFacts, is_alone: bool) -> Option<Obstacle> {
        if let Some((generation, until)) = facts.replacements(self.snapshot.taken_at)
            && generation >= MAX_REPLACEMENTS
        {
            return Some(Obstacle::RepeatedReplacement(generation, until));
        }
        if !(facts.is_spot && is_spot(node)) {
            return None;
        }
        if !self.spot_to_spot {
            return Some(Obstacle::SpotToSpot);
        }
        let is_cheaper = |choice: &&Choice| choice.capacity_type == CapacityType::Spot && choice.price < facts.price;
        let cheaper = node.choices.iter().filter(is_cheaper).map(|choice| &choice.instance_type.name);
        let types = cheaper.collect::<BTreeSet<_>>().len();
        (is_alone && types < MIN_ALTERNATIVES).then_some(Obstacle::FewAlternatives(types))
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
            for (_, removable) in removed.iter().filter(|(_, removable)| *removable.facts.pool == *pool.name) {
                pool.usage.sub(&removable.facts.capacity);
                let rest = pool.usage.get(labels::USD_PER_HOUR).saturating_sub(removable.facts.price.0);
                pool.usage.set(labels::USD_PER_HOUR, rest);
                pool.node_count -= 1;
            }
        }
        let moving = removed.iter().flat_map(|(_, removable)| removable.pods());
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

/// Whether new nodes can be launched of the NodePool of every node that is not static. Where not, its pods would seem to cost nothing
/// ([`Simulator::least_cost`]).
pub fn offers_all_pools(state: &ClusterState, pools: &[ReadyPool]) -> bool {
    let names: HashSet<String> = pools.iter().map(|ready| ready.pool.name_any()).collect();
    let is_offered = |claim: &NodeClaim| claim.node_pool().is_some_and(|pool| names.contains(pool));
    state.claims.values().all(|claim| is_offered(claim) || state.is_static(claim))
}

/// What is free after a plan on the nodes where a pod may move to ([`SimulatedRemoval::rooms`]).
fn rooms(problem: &Problem, node_refs: &[&Arc<NodeRef>], plan: &Plan) -> Vec<(Option<Arc<NodeRef>>, Size)> {
    let mut taken: HashMap<usize, Size> = HashMap::new();
    for placement in &plan.placements {
        let taken = taken.entry(placement.node).or_default();
        placement.pods.iter().for_each(|pod| *taken = sum(*taken, size(&problem.pods[*pod].class.requests)));
    }
    let nodes = problem.nodes.iter().zip(node_refs).enumerate();
    let targets = nodes.filter(|(_, (node, _))| node.initialized && node.schedulable);
    let existing = targets.map(|(at, (node, node_ref))| {
        let reserved = [node.pods.requests(), &node.daemon_reserve].map(size);
        let free = reserved.into_iter().fold(size(&node.allocatable), less);
        (Some(Arc::clone(node_ref)), less(free, taken.get(&at).copied().unwrap_or_default()))
    });
    let new = plan.new_nodes.iter().filter_map(|node| {
        Some((None, less(size(&node.choices.first()?.instance_type.allocatable), size(&node.requests))))
    });
    existing.chain(new).collect()
}

/// The part of a price for a part of a load: the mean of its shares of CPU and memory, of those that the load has.
fn share(price: i64, part: Size, load: Size) -> i64 {
    let shares = part.iter().zip(load).filter(|(_, load)| *load > 0);
    let shares = shares.map(|(part, load)| i128::from(price) * i128::from(*part) / i128::from(load));
    let (sum, count) = shares.fold((0, 0), |(sum, count), share| (sum + share, count + 1));
    i64::try_from(sum / count.max(1)).unwrap_or(price)
}

#[cfg(test)]
mod tests;
