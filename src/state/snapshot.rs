//! The planner's problem, built from the state: pods to place, nodes, and instance types to purchase.

use std::collections::BTreeSet;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;
use stowage_model::labels;
use stowage_model::time::UnixMillis;
use stowage_planner::{ColumnCache, NodeState, PlanSettings, PodEntry, Pool, Problem};
use stowage_runtime::sync::panics::catch;

use crate::state::claim_index::Usage;
use crate::state::node_state;
use crate::state::object_ext::{NodeClaimExt, ObjectExt};
use crate::state::plan_record::Holds;
use crate::state::pool_types::{InstanceTypes, ReadyPool};
use crate::state::snapshot_cache::{CachedNode, NodeRef, SnapshotCache};
use crate::state::tables::ClusterState;

/// The parameters of a snapshot.
#[derive(Clone, Copy, Debug)]
pub struct SnapshotRequest<'a> {
    /// Pools that may launch nodes.
    pub pools: &'a [ReadyPool],
    pub settings: &'a PlanSettings,
    pub now: UnixMillis,
}

/// Pods that need a node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Demand {
    /// Pods that the scheduler rejected and that have no hold.
    pub pending: BTreeSet<String>,
    /// Pods bound to a leaving node whose successors have no hold.
    pub displaced: BTreeSet<String>,
}

/// What a plan uses of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeUse {
    Whole,
    /// Its pods count for topology, but no pod is added.
    PodsOnly,
    None,
}

/// A problem and the objects that it was built from.
#[derive(Debug, Default)]
pub struct Snapshot {
    pub problem: Problem,
    /// Parallel to the problem's nodes.
    pub node_refs: Vec<Arc<NodeRef>>,
    /// Keys of the problem's pods that are bound to a leaving node.
    pub displaced: BTreeSet<String>,
    pub taken_at: UnixMillis,
    /// The planner's column table, shared with the next snapshots.
    pub column_cache: ColumnCache,
    /// NodePools whose parser panicked; they are left out.
    pub panicked_pools: Vec<String>,
    /// Nodes, or NodeClaims without one, whose parser panicked; they are left out.
    pub panicked_nodes: Vec<String>,
}

impl Snapshot {
    /// Restricts the NodePools and nodes, by name and in their order.
    pub fn restrict(
        &mut self,
        mut keeps_pool: impl FnMut(&Arc<str>) -> bool,
        mut node_use: impl FnMut(&Arc<str>) -> NodeUse,
    ) {
        self.problem.pools.retain(|pool| keeps_pool(&pool.name));
        let nodes = std::mem::take(&mut self.problem.nodes);
        let node_refs = std::mem::take(&mut self.node_refs);
        for (node, node_ref) in nodes.into_iter().zip(node_refs) {
            let node = match node_use(&node.name) {
                NodeUse::Whole => node,
                NodeUse::PodsOnly => Arc::new(NodeState { schedulable: false, ..NodeState::clone(&node) }),
                NodeUse::None => continue,
            };
            self.problem.nodes.push(node);
            self.node_refs.push(node_ref);
        }
    }

    /// The same snapshot with only these of its pods, by index, and with its own column table.
    pub fn of_pods(&self, pods: &[usize], column_cache: &ColumnCache) -> Self {
        let pods = pods.iter().filter_map(|pod| self.problem.pods.get(*pod)).cloned().collect();
        Self {
            problem: Problem { pods, ..self.problem.clone() },
            node_refs: self.node_refs.clone(),
            displaced: self.displaced.clone(),
            taken_at: self.taken_at,
            column_cache: column_cache.clone(),
            ..Self::default()
        }
    }
}

/// Takes a snapshot. `cache` must have been used with the same [`ClusterState`] only.
pub fn take(
    state: &ClusterState,
    holds: &Holds,
    demand: Demand,
    cache: &mut SnapshotCache,
    request: SnapshotRequest<'_>,
) -> Snapshot {
    let SnapshotRequest { pools, settings, now } = request;
    let mut out = Snapshot { taken_at: now, ..Snapshot::default() };
    // Holds expire without a change of an object.
    let held = holds.by_claim.keys().filter_map(|claim| state.node_of(state.claims.get(claim)?));
    let (types, rebuild) = cache.begin(state, pools, held.map(|node| node.name_any()));
    for name in rebuild {
        match catch(|| state.nodes.get(&name).and_then(|node| build(state, &types, holds, node, now))) {
            Ok(node) => cache.store(name, node),
            Err(panic) => {
                tracing::error!(node = name, %panic, "snapshot of a node panicked, leaving it out");
                cache.leave_out(name);
            }
        }
    }
    out.panicked_nodes = cache.left_out().cloned().collect();
    for node in cache.nodes() {
        out.problem.nodes.push(Arc::clone(&node.state));
        out.node_refs.push(Arc::clone(&node.node_ref));
    }
    out.column_cache = cache.column_cache.clone();
    for (name, claim) in state.in_flight.iter().filter_map(|name| state.claims.get_key_value(name)) {
        if !claim.is_leaving() {
            let Ok(node) = catch(|| node_state::in_flight(state, &types, holds, claim, now)) else {
                out.panicked_nodes.push(name.clone());
                continue;
            };
            out.problem.nodes.push(Arc::new(node));
            out.node_refs.push(Arc::new(NodeRef { node: None, claim: Some(name.clone()) }));
        }
    }
    for key in demand.pending.iter().chain(&demand.displaced) {
        if let Some(pod) = state.pods.get(key)
            && let Ok(entry) = &pod.entry
        {
            out.problem.pods.push(PodEntry { queued_at: pod.first_seen, ..entry.clone() });
        }
    }
    out.displaced = demand.displaced;
    for ready in pools {
        match catch(|| pool(state, &types, ready)) {
            Ok(pool) => out.problem.pools.extend(pool),
            Err(_) => out.panicked_pools.push(ready.pool.name_any()),
        }
    }
    out.problem.daemons = state.daemons.values().map(|record| record.daemon.clone()).collect();
    out.problem.namespaces = Arc::clone(&state.namespaces);
    out.problem.volumes = Arc::clone(&state.volumes);
    out.problem.services = Arc::clone(&state.services);
    out.problem.settings = settings.clone();
    out
}

fn pool(state: &ClusterState, types: &InstanceTypes, ready: &ReadyPool) -> Option<Pool> {
    let name = ready.pool.name_any();
    let Usage { mut capacity, count, unsized_claims } = state.claim_index.usage(&name);
    for claim in unsized_claims.iter().filter_map(|claim| state.claims.get(claim)) {
        capacity.add(&types.capacity(claim));
    }
    if let Some(price) = types.limited_price_of(state, &ready.pool, |_| true) {
        capacity.set(labels::USD_PER_HOUR, price.0);
    }
    Pool::new(&ready.pool, Arc::clone(&ready.catalog), capacity, count)
        .inspect_err(|error| tracing::warn!(node_pool = name, %error, "invalid node pool left out of the plan"))
        .ok()
}

/// A node for the problem; `None` for a leaving node of ours, whose pods are demand.
fn build(
    state: &ClusterState,
    types: &InstanceTypes,
    holds: &Holds,
    node: &Node,
    now: UnixMillis,
) -> Option<CachedNode> {
    let claim = state.claim_of(node);
    if claim.is_some_and(|claim| node.is_deleting() || claim.is_leaving()) {
        return None;
    }
    let stable = claim
        .is_none_or(|claim| node.is_labeled(labels::INITIALIZED) && !holds.by_claim.contains_key(&claim.name_any()));
    let node_ref = NodeRef { node: Some(node.name_any()), claim: claim.map(|claim| claim.name_any()) };
    let state = Arc::new(node_state::registered(state, types, holds, node, now));
    Some(CachedNode { state, node_ref: Arc::new(node_ref), stable })
}

#[cfg(test)]
mod tests;
