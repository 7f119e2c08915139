//! The planner's problem, made from the state: what must be placed, what there is, what can be bought.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Node, Taint};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::ResourceExt;

use crate::api::{NodeClaim, NodePool, conditions};
use crate::model::labels;
use crate::model::offering::{CapacityType, Catalog, InstanceType};
use crate::model::resources::Resources;
use crate::model::units::MicroUsd;
use crate::planner::columns::table::ColumnCache;
use crate::planner::input::node::NodeState;
use crate::planner::input::pod::{Labels, NodePods, PodEntry};
use crate::planner::input::pool::Pool;
use crate::planner::input::problem::Problem;
use crate::planner::input::settings::Settings;
use crate::state::claim_index::{Usage, reported};
use crate::state::holds::Holds;
use crate::state::snapshot_cache::{CachedNode, SnapshotCache, Stamp};
use crate::state::tables::ClusterState;

/// A NodePool that may buy, and what it may buy.
#[derive(Clone, Debug)]
pub struct ReadyPool {
    /// The pool.
    pub pool: Arc<NodePool>,
    /// What can be bought for its node class.
    pub catalog: Arc<Catalog>,
}

/// What an entry of [`Problem::nodes`] is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeRef {
    /// Node name, once there is a Node.
    pub node: Option<String>,
    /// NodeClaim, if it is ours.
    pub claim: Option<String>,
}

/// A problem and what its nodes are.
#[derive(Debug, Default)]
pub struct Snapshot {
    /// The problem.
    pub problem: Problem,
    /// One for each of the problem's nodes.
    pub node_refs: Vec<Arc<NodeRef>>,
    /// Keys of the pods to place that are still bound to a node about to go.
    pub displaced: BTreeSet<String>,
    /// When it was taken, milliseconds since the epoch.
    pub at_ms: i64,
    /// The planner's column table, shared with the next snapshots.
    pub column_cache: ColumnCache,
}

/// Taints that go by themselves while a node comes up (core reference section 2.3).
const EPHEMERAL_TAINTS: [&str; 4] = [
    "node.kubernetes.io/not-ready",
    "node.kubernetes.io/unreachable",
    "node.cloudprovider.kubernetes.io/uninitialized",
    labels::UNREGISTERED_TAINT,
];

/// Whether a taint goes by itself while a node comes up.
pub fn is_ephemeral(taint: &Taint) -> bool {
    EPHEMERAL_TAINTS.contains(&taint.key.as_str()) || taint.key.starts_with("readiness.k8s.io/")
}

/// Whether a claim's node is about to go: deleted, or marked as being disrupted.
pub fn is_leaving(claim: &NodeClaim) -> bool {
    claim.metadata.deletion_timestamp.is_some() || claim.annotations().contains_key(labels::DISRUPTING)
}

/// Pods that need a place.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Demand {
    /// Rejected by the scheduler, with no room held for them.
    pub pending: BTreeSet<String>,
    /// Still bound to a node about to go, with no room held for their successors.
    pub displaced: BTreeSet<String>,
}

/// Pods that need a place, imagining the claims in `without` to be on their way out.
pub fn demand(state: &ClusterState, holds: &Holds, without: &BTreeSet<String>) -> Demand {
    let mut out = Demand::default();
    let mut planned: HashMap<&str, BTreeSet<&String>> = HashMap::new();
    for key in &state.unbound {
        let Some(pod) = state.pods.get(key).filter(|pod| pod.unschedulable() && pod.entry.is_ok()) else {
            continue;
        };
        // A nomination that isn't ours is the scheduler's own: it is making room by preemption.
        let preempting = pod.nominated.as_deref().is_some_and(|node| {
            let making_room = state.pods_on(node).any(|pod| pod.deleting_since_ms.is_some());
            making_room
                && !state
                    .nodes
                    .get(node)
                    .and_then(|node| state.claim_of(node))
                    .and_then(|claim| state.planned.get(&claim.name_any()))
                    .is_some_and(|plan| planned.entry(node).or_insert_with(|| plan.pods.iter().collect()).contains(key))
        });
        if !preempting && !holds.by_pod.contains_key(key) {
            out.pending.insert(key.clone());
        }
    }
    let resettled: BTreeSet<&String> =
        holds.by_claim.values().flatten().filter(|hold| hold.owner.is_some()).map(|hold| &hold.original).collect();
    let leaving: BTreeSet<&String> = state.claim_index.leaving.iter().chain(without).collect();
    for claim in leaving.into_iter().filter_map(|name| state.claims.get(name)) {
        let Some(node) = state.node_of(claim) else { continue };
        // A protected pod stays until it ends, unless the node has a time by which it must be gone.
        let hurry = claim.spec.termination_grace_period.is_some()
            || claim.annotations().contains_key(labels::TERMINATION_TIMESTAMP)
            || claim.annotations().get(labels::DISRUPTING).is_some_and(|why| !why.ends_with('/'));
        for pod in state.pods_on(&node.name_any()).filter(|pod| pod.reschedulable()) {
            let key = pod.key();
            // Nobody makes a bare pod's successor.
            let succeeded = pod.entry.as_ref().is_ok_and(|entry| entry.owner.is_some());
            if succeeded && (hurry || !pod.do_not_disrupt) && !resettled.contains(&key) {
                out.displaced.insert(key);
            }
        }
    }
    out
}

/// How long a launched node may take to register before the planner stops counting on it, milliseconds.
pub const BOOT_PATIENCE_MS: i64 = 300_000;

/// Takes a snapshot at `now_ms`, imagining the claims in `without` to be on their way out.
pub fn take(
    state: &ClusterState,
    pools: &[ReadyPool],
    settings: &Settings,
    without: &BTreeSet<String>,
    now_ms: i64,
) -> Snapshot {
    let holds = state.holds(now_ms);
    let demand = demand(state, &holds, without);
    let mut out = Snapshot { at_ms: now_ms, ..Snapshot::default() };
    let mut seen = state.seen.lock().unwrap_or_else(|poisoned| {
        // A snapshot that ended halfway may have lost what changed: every node is worked out anew.
        let mut seen = poisoned.into_inner();
        *seen = SnapshotCache::default();
        state.seen.clear_poison();
        seen
    });
    let bought = pools.iter().map(|ready| (ready.pool.name_any(), Arc::clone(&ready.catalog)));
    let types = seen.begin(Stamp { daemons: state.daemon_changes, catalogs: bought.collect() }, pools, &state.nodes);
    // Room that is held changes with time.
    let held = holds.by_claim.keys().filter_map(|claim| state.node_of(state.claims.get(claim)?));
    for name in seen.changed(held.map(|node| node.name_any())) {
        let known = state.nodes.get(&name).and_then(|node| look(state, &types, &holds, node, now_ms));
        seen.keep(name, known);
    }
    for known in seen.nodes() {
        if known.subject.claim.as_ref().is_none_or(|claim| !without.contains(claim)) {
            out.problem.nodes.push(Arc::clone(&known.state));
            out.node_refs.push(Arc::clone(&known.subject));
        }
    }
    out.column_cache = seen.column_cache.clone();
    drop(seen);
    for (name, claim) in state.in_flight.iter().filter_map(|name| state.claims.get_key_value(name)) {
        if !is_leaving(claim) && !without.contains(name) {
            let mut node = in_flight(state, &types, &holds, claim);
            // A node that should be up by now may never come: nothing more is planned on it.
            node.schedulable = now_ms - crate::state::created_ms(&claim.metadata) < BOOT_PATIENCE_MS;
            out.problem.nodes.push(Arc::new(node));
            out.node_refs.push(Arc::new(NodeRef { node: None, claim: Some(name.clone()) }));
        }
    }
    for key in demand.pending.iter().chain(&demand.displaced) {
        if let Some(entry) = state.pods.get(key).and_then(|pod| pod.entry.as_ref().ok()) {
            out.problem.pods.push(entry.clone());
        }
    }
    out.displaced = demand.displaced;
    out.problem.pools = pools.iter().filter_map(|ready| pool(state, &types, ready, without)).collect();
    out.problem.daemons = state.daemons.values().map(|record| record.daemon.clone()).collect();
    out.problem.namespaces = Arc::clone(&state.namespaces);
    out.problem.volumes = Arc::clone(&state.volumes);
    out.problem.services = Arc::clone(&state.services);
    out.problem.settings = settings.clone();
    out
}

fn pool(state: &ClusterState, types: &Types, ready: &ReadyPool, without: &BTreeSet<String>) -> Option<Pool> {
    let name = ready.pool.name_any();
    let Usage { mut capacity, mut count, unsized_claims } = state.claim_index.usage(&name);
    for claim in unsized_claims.iter().filter_map(|claim| state.claims.get(claim)) {
        capacity.add(&capacity_of(types, claim));
    }
    for claim in without.iter().filter_map(|claim| state.claims.get(claim)) {
        if claim.labels().get(labels::NODE_POOL) == Some(&name) && !is_leaving(claim) {
            capacity.sub(&capacity_of(types, claim));
            count -= 1;
        }
    }
    Pool::new(&ready.pool, Arc::clone(&ready.catalog), capacity, count)
        .inspect_err(|error| tracing::warn!(node_pool = name, %error, "node pool is left out of the plan"))
        .ok()
}

/// Capacity of a claim's node as limits count it: as reported, or as its type promises. Until it is launched that is, of
/// each resource, the most that any type it may be launched as has.
pub fn capacity_of(types: &Types, claim: &NodeClaim) -> Resources {
    reported(claim).unwrap_or_else(|| {
        let mut most = types.of(claim).map(|found| found.capacity.clone()).unwrap_or_default();
        types.alternatives(claim).for_each(|found| most.raise_to(&found.capacity));
        most
    })
}

fn read(quantities: &BTreeMap<String, Quantity>) -> Resources {
    Resources::from_map(quantities).unwrap_or_default()
}

/// A node as the planner sees it; `None` where its pods are placed anew, as if it were gone already.
fn look(state: &ClusterState, types: &Types, holds: &Holds, node: &Node, now_ms: i64) -> Option<CachedNode> {
    let claim = state.claim_of(node);
    let leaving = node.metadata.deletion_timestamp.is_some() || claim.is_some_and(|claim| is_leaving(claim));
    if leaving && claim.is_some() {
        return None;
    }
    let settled = claim.is_none_or(|claim| {
        node.labels().get(labels::INITIALIZED).is_some_and(|value| value == "true")
            && !holds.by_claim.contains_key(&claim.name_any())
    });
    let subject = NodeRef { node: Some(node.name_any()), claim: claim.map(|claim| claim.name_any()) };
    let state = Arc::new(existing(state, types, holds, node, claim, leaving, now_ms));
    Some(CachedNode { state, subject: Arc::new(subject), settled })
}

fn existing(
    state: &ClusterState,
    types: &Types,
    holds: &Holds,
    node: &Node,
    claim: Option<&Arc<NodeClaim>>,
    leaving: bool,
    now_ms: i64,
) -> NodeState {
    let name = node.name_any();
    let spec = node.spec.clone().unwrap_or_default();
    let reported = node.status.as_ref().and_then(|status| status.allocatable.as_ref()).map(read).unwrap_or_default();
    let initialized = claim.is_none() || node.labels().get(labels::INITIALIZED).is_some_and(|value| value == "true");
    let ready = node_ready(node);
    let startup: &[Taint] = claim.map(|claim| claim.spec.startup_taints.as_slice()).unwrap_or_default();
    let taints: Vec<Taint> = spec
        .taints
        .into_iter()
        .flatten()
        .filter(|taint| taint.key != labels::GUARD_TAINT)
        .filter(|taint| {
            initialized
                || !(is_ephemeral(taint)
                    || startup.iter().any(|other| other.key == taint.key && other.effect == taint.effect))
        })
        .collect();
    let mut allocatable = reported;
    let mut node_labels: Labels = node.labels().clone();
    if let Some(claim) = claim.filter(|_| !initialized) {
        // The kubelet and the device plugins may not have reported all of it yet.
        for (resource, promised) in allocatable_of(types, claim).iter() {
            if allocatable.get(resource) == 0 {
                allocatable.set(resource, promised);
            }
        }
        for (key, value) in claim.labels() {
            node_labels.entry(key.clone()).or_insert_with(|| value.clone());
        }
    }
    let mut pods: NodePods =
        state.pods_on(&name).filter(|pod| pod.active()).filter_map(|pod| pod.entry.clone().ok()).collect();
    if let Some(claim) = claim {
        pods.extend(held(state, holds, &claim.name_any()));
    }
    let price = claim.map(|claim| types.price(claim)).unwrap_or_default();
    let mut out = NodeState {
        name: Arc::from(name),
        labels: node_labels,
        taints,
        allocatable,
        pods,
        daemon_reserve: Resources::default(),
        daemons: Vec::new(),
        schedulable: !leaving && !spec.unschedulable.unwrap_or(false) && (ready || !initialized),
        initialized,
        price,
    };
    reserve_for_daemons(state, &mut out);
    // A node that came up but never becomes usable is not counted on either.
    out.schedulable &= initialized || now_ms - crate::state::created_ms(&node.metadata) < BOOT_PATIENCE_MS;
    out
}

fn in_flight(state: &ClusterState, types: &Types, holds: &Holds, claim: &NodeClaim) -> NodeState {
    let name = claim.name_any();
    let mut node_labels = claim.labels().clone();
    if let Some(found) = types.of(claim) {
        for (key, value) in &found.labels {
            node_labels.entry(key.clone()).or_insert_with(|| value.clone());
        }
    }
    if let Some((_, zone, capacity_type)) = offering_of(claim) {
        node_labels.entry(labels::ZONE.into()).or_insert(zone);
        node_labels.entry(labels::CAPACITY_TYPE.into()).or_insert_with(|| capacity_type.as_str().into());
    }
    // A partition that EC2 is yet to tell is none.
    node_labels.retain(|key, value| *key != *labels::PLACEMENT_GROUP_PARTITION || !value.is_empty());
    node_labels.entry(labels::HOSTNAME.into()).or_insert_with(|| name.clone());
    let mut out = NodeState {
        name: Arc::from(name.as_str()),
        labels: node_labels,
        taints: claim.spec.taints.clone(),
        allocatable: allocatable_of(types, claim),
        pods: held(state, holds, &name).into_iter().collect(),
        daemon_reserve: Resources::default(),
        daemons: Vec::new(),
        schedulable: true,
        initialized: false,
        price: types.price(claim),
    };
    reserve_for_daemons(state, &mut out);
    out
}

fn allocatable_of(types: &Types, claim: &NodeClaim) -> Resources {
    let status = claim.status.as_ref();
    match status.map(|status| &status.allocatable).filter(|allocatable| !allocatable.is_empty()) {
        Some(allocatable) => read(allocatable),
        None => types.of(claim).map(|found| found.allocatable.clone()).unwrap_or_default(),
    }
}

/// Entries of the pods that a claim's node is held for. Where a displaced pod is gone and its successor not there yet, a
/// sibling stands in for it.
fn held(state: &ClusterState, holds: &Holds, claim: &str) -> Vec<PodEntry> {
    let Some(live) = holds.by_claim.get(claim) else {
        return Vec::new();
    };
    live.iter()
        .filter_map(|hold| {
            let key = hold.pod.as_ref().unwrap_or(&hold.original);
            let entry = state.pods.get(key).and_then(|record| record.entry.clone().ok());
            entry.or_else(|| {
                let owner = hold.owner.as_deref()?;
                state
                    .pods
                    .values()
                    .filter_map(|record| record.entry.as_ref().ok())
                    .filter(|entry| entry.owner.as_deref() == Some(owner))
                    .min_by(|a, b| a.key.cmp(&b.key))
                    .cloned()
            })
        })
        // Who comes is not being deleted, though the pod that it is known by may be.
        .map(|entry| PodEntry { deleting: false, ..entry })
        .collect()
}

/// Requests of the daemon pods that belong on a Node and aren't there yet.
pub fn daemons_to_come(state: &ClusterState, node: &Node) -> Resources {
    let pods = state.pods_on(&node.name_any()).filter_map(|pod| pod.entry.clone().ok()).collect();
    let allocatable = node.status.as_ref().and_then(|status| status.allocatable.as_ref());
    let taints = node.spec.iter().flat_map(|spec| spec.taints.iter().flatten());
    let lasting = taints.filter(|taint| !is_ephemeral(taint) && taint.key != labels::GUARD_TAINT).cloned().collect();
    let mut out = NodeState {
        name: Arc::from(node.name_any()),
        labels: node.labels().clone(),
        taints: lasting,
        allocatable: allocatable.map(read).unwrap_or_default(),
        pods,
        daemon_reserve: Resources::default(),
        daemons: Vec::new(),
        schedulable: true,
        initialized: true,
        price: MicroUsd::default(),
    };
    reserve_for_daemons(state, &mut out);
    out.daemon_reserve
}

/// Keeps room and host ports for the daemon pods that belong on a node and aren't there yet.
fn reserve_for_daemons(state: &ClusterState, node: &mut NodeState) {
    for daemon in state.daemons.values() {
        let present = node.pods.iter().any(|pod| pod.owner.as_ref() == Some(&daemon.uid));
        let class = &daemon.daemon.class;
        let runs = class.requests.may_run_on(&node.allocatable);
        if runs && !present && class.accepts_node(&node.labels, &node.name) && class.untolerated(&node.taints).is_none()
        {
            node.daemon_reserve.add(&class.requests);
            node.daemons.extend(Some(class).filter(|class| !class.host_ports.is_empty()).cloned());
        }
    }
}

/// Whether the node's Ready condition is true.
pub fn node_ready(node: &Node) -> bool {
    let list = node.status.as_ref().and_then(|status| status.conditions.as_ref());
    list.is_some_and(|list| list.iter().any(|condition| condition.type_ == "Ready" && condition.status == "True"))
}

/// Whether the pool's Ready condition is true.
pub fn pool_ready(pool: &NodePool) -> bool {
    pool.metadata.deletion_timestamp.is_none()
        && pool.spec.replicas.is_none()
        && pool.status.as_ref().is_some_and(|status| conditions::is_true(&status.conditions, "Ready"))
}

/// The offering a claim was launched as, or else the one it was planned as.
pub fn offering_of(claim: &NodeClaim) -> Option<(String, String, CapacityType)> {
    let label = |key: &str| claim.labels().get(key).cloned();
    if let (Some(name), Some(zone), Some(capacity_type)) =
        (label(labels::INSTANCE_TYPE), label(labels::ZONE), label(labels::CAPACITY_TYPE))
    {
        return Some((name, zone, CapacityType::parse(&capacity_type)?));
    }
    let mut parts = claim.annotations().get(labels::PLANNED_OFFERING)?.split('/');
    let (name, zone, capacity_type) = (parts.next()?, parts.next()?, parts.next()?);
    Some((name.to_owned(), zone.to_owned(), CapacityType::parse(capacity_type)?))
}

/// Instance types by pool and name.
#[derive(Debug, Default)]
pub struct Types {
    by_pool: HashMap<String, HashMap<Arc<str>, Arc<InstanceType>>>,
}

impl Types {
    /// Indexes the catalogs of the pools.
    pub fn new(pools: &[ReadyPool]) -> Self {
        let by_pool = pools
            .iter()
            .map(|ready| {
                let types = ready.catalog.instance_types.iter();
                (ready.pool.name_any(), types.map(|found| (Arc::clone(&found.name), Arc::clone(found))).collect())
            })
            .collect();
        Self { by_pool }
    }

    /// The instance type of a claim.
    pub fn of(&self, claim: &NodeClaim) -> Option<&Arc<InstanceType>> {
        let (name, _, _) = offering_of(claim)?;
        self.by_pool.get(claim.labels().get(labels::NODE_POOL)?)?.get(name.as_str())
    }

    /// The instance types that a claim may still be launched as; none once it is launched.
    fn alternatives(&self, claim: &NodeClaim) -> impl Iterator<Item = &Arc<InstanceType>> {
        let launched = claim.labels().contains_key(labels::INSTANCE_TYPE);
        let known = claim.labels().get(labels::NODE_POOL).and_then(|pool| self.by_pool.get(pool));
        let asked = claim.spec.requirements.iter().filter(move |r| r.key == labels::INSTANCE_TYPE && !launched);
        let names = asked.filter(|r| r.operator == "In").flat_map(|r| &r.values);
        names.filter_map(move |name| known?.get(name.as_str()))
    }

    /// The price of a claim's offering; zero when it isn't known.
    pub fn price(&self, claim: &NodeClaim) -> MicroUsd {
        let Some((_, zone, capacity_type)) = offering_of(claim) else {
            return MicroUsd::default();
        };
        self.of(claim)
            .and_then(|found| {
                found.offerings.iter().find(|offer| *offer.zone == zone && offer.capacity_type == capacity_type)
            })
            .map_or_else(MicroUsd::default, |offer| offer.price)
    }
}

#[cfg(test)]
mod tests;
