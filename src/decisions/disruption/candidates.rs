//! Candidates of voluntary disruption: initialized nodes that are not leaving, and what their NodePools allow.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use kube::ResourceExt;
use stowage_api::{NodeClaim, NodePool, conditions, duration};
use stowage_model::time::UnixMillis;

use crate::decisions::disruption::blockers::Blocker;
use crate::decisions::disruption::budget;
use crate::decisions::disruption::node_facts::{Facts, NodeFacts};
use crate::decisions::disruption::reason::DisruptionReason;
use crate::state::object_ext::{NodeClaimExt, NodeExt};
use crate::state::plan_record::Holds;
use crate::state::tables::ClusterState;

/// A node that may be empty or underutilized.
#[derive(Clone, Debug)]
pub struct Candidate<'f> {
    pub facts: &'f NodeFacts,
    /// Pods on the node or held for it that need another node.
    pub pods: usize,
    /// The last time a pod was bound to or removed from the node, or its initialization.
    pub quiet_since: UnixMillis,
}

/// What a NodePool allows for one reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolAllowance {
    /// `consolidateAfter`; `None` is `Never`.
    pub consolidate_after: Option<Duration>,
    /// Number of nodes that may be disrupted now.
    pub nodes: i64,
}

/// Every candidate.
pub fn candidates<'f>(state: &ClusterState, holds: &Holds, facts: &'f Facts) -> Vec<Candidate<'f>> {
    facts.nodes.iter().filter_map(|node| candidate(state, holds, node).ok()).collect()
}

/// The candidate of a node.
///
/// # Errors
/// It is none: why.
pub fn candidate<'f>(state: &ClusterState, holds: &Holds, facts: &'f NodeFacts) -> Result<Candidate<'f>, Blocker> {
    if facts.is_leaving {
        return Err(Blocker::Leaving);
    }
    let quiet_since = facts.quiet_since.ok_or(Blocker::NotInitialized)?;
    if state.pools.get(&facts.pool).is_some_and(|pool| pool.spec.replicas.is_some()) {
        return Err(Blocker::Static);
    }
    let held = holds.by_claim.get(&facts.claim).map_or(0, Vec::len);
    Ok(Candidate { facts, pods: facts.pod_count + held, quiet_since })
}

/// What each NodePool allows for a reason.
pub fn allowances(state: &ClusterState, reason: DisruptionReason, now: UnixMillis) -> BTreeMap<String, PoolAllowance> {
    state.pools.iter().map(|(name, pool)| (name.clone(), allowance(state, name, pool, reason, now))).collect()
}

fn allowance(
    state: &ClusterState,
    name: &str,
    pool: &NodePool,
    reason: DisruptionReason,
    now: UnixMillis,
) -> PoolAllowance {
    let (nodes, consuming) = counted(state, name);
    let disruption = &pool.spec.disruption;
    let after = duration::parse_or_never(&disruption.consolidate_after).unwrap_or(None);
    PoolAllowance {
        consolidate_after: after.map(|after| Duration::from_millis(u64::try_from(after).unwrap_or(0))),
        nodes: budget::allowed(&disruption.budgets, reason, nodes, consuming, now),
    }
}

/// The nodes of a NodePool that count for its budgets, and those of them that are leaving or not ready.
pub fn counted(state: &ClusterState, pool: &str) -> (i64, i64) {
    let (mut nodes, mut consuming) = (0, 0);
    let claims = state.claim_index.of_pool(pool).filter_map(|claim| state.claims.get(claim));
    // A node whose instance shuts down is gone for its pods (Karpenter core reference 4.4).
    let counts = |claim: &&Arc<NodeClaim>| {
        claim.has_condition(conditions::INITIALIZED) && !claim.has_condition(conditions::INSTANCE_TERMINATING)
    };
    for claim in claims.filter(counts) {
        nodes += 1;
        let ready = state.node_of(claim).is_some_and(|node| node.is_ready());
        if claim.is_leaving() || !ready {
            consuming += 1;
        }
    }
    (nodes, consuming)
}

/// NodePools with nodes, of which a budget allows none to be disrupted for this reason, even while none of them is leaving.
pub fn blocked_by_budgets(
    state: &ClusterState,
    reason: DisruptionReason,
    now: UnixMillis,
) -> impl Iterator<Item = &Arc<NodePool>> {
    let is_initialized = |name: &String| {
        let claim = state.claims.get(name);
        claim.is_some_and(|claim| claim.has_condition(conditions::INITIALIZED))
    };
    let blocked = state.pools.iter().filter(move |(_, pool)| allows_none(pool, reason, now));
    blocked.filter(move |(name, _)| state.claim_index.of_pool(name).any(is_initialized)).map(|(_, pool)| pool)
}

/// Whether a budget allows no node of a NodePool to be disrupted for this reason, even while none of them is leaving. What allows none of one node allows
/// none of more: percentages round up.
pub fn allows_none(pool: &NodePool, reason: DisruptionReason, now: UnixMillis) -> bool {
    budget::allowed(&pool.spec.disruption.budgets, reason, 1, 0, now) == 0
}

/// Number of pods on a claim's node, or held for it, that need another node when it is removed.
pub fn pods_to_reschedule(state: &ClusterState, holds: &Holds, claim: &NodeClaim) -> usize {
    let bound = state
        .node_of(claim)
        .map_or(0, |node| state.pods_on(&node.name_any()).filter(|pod| pod.needs_another_node()).count());
    bound + holds.by_claim.get(&claim.name_any()).map_or(0, Vec::len)
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use stowage_model::labels;
    use stowage_test_objects as objects;

    use super::*;

    #[test]
    fn a_pool_with_nodes_is_blocked_by_a_budget_that_allows_none_of_them() {
        let only_drifted = json!([{"nodes": "0", "reasons": ["Drifted"]}, {"nodes": "100%"}]);
        for (case, budgets, is_initialized, blocked) in [
            ("a budget of 0", json!([{"nodes": "5"}, {"nodes": "0"}]), true, true),
            ("0 %", json!([{"nodes": "0%"}]), true, true),
            ("a percentage rounds up", json!([{"nodes": "1%"}]), true, false),
            ("for another reason", only_drifted, true, false),
            ("no node", json!([{"nodes": "0"}]), false, false),
        ] {
            let mut state = ClusterState::default();
            state.apply_pool(objects::node_pool("p", &json!({"spec": {"disruption": {"budgets": budgets}}})));
            let list: &[&str] = if is_initialized { &[conditions::INITIALIZED] } else { &[] };
            let claim =
                json!({"metadata": {"labels": {(labels::NODE_POOL): "p"}}, "status": objects::launched("i", list)});
            state.apply_claim(objects::claim("c", &claim));
            let found = blocked_by_budgets(&state, DisruptionReason::Underutilized, UnixMillis(0)).count();
            assert_eq!(found, usize::from(blocked), "{case}");
        }
    }

    #[test]
    fn f16_nodes_whose_instance_shuts_down_neither_count_nor_consume() {
        for (case, deleting, condition, ready, allowed) in [
            ("all run", false, None, "True", 2),
            ("one is not ready", false, None, "Unknown", 1),
            ("one drains", true, None, "True", 1),
            ("the instance of one shuts down", true, Some(conditions::INSTANCE_TERMINATING), "Unknown", 2),
        ] {
            let mut state = ClusterState::default();
            let budgets = json!([{"nodes": "50%"}]);
            state.apply_pool(objects::node_pool("p", &json!({"spec": {"disruption": {"budgets": budgets}}})));
            for n in 0..4 {
                let (first, id) = (n == 0, format!("i-{n}"));
                let deletion = (first && deleting).then_some("2026-01-01T00:00:00Z");
                let meta =
                    json!({"labels": {(labels::NODE_POOL): "p"}, "deletionTimestamp": deletion, "finalizers": ["f"]});
                let list: Vec<&str> =
                    [conditions::INITIALIZED].into_iter().chain(condition.filter(|_| first)).collect();
                let claim = json!({"metadata": meta, "status": objects::launched(&id, &list)});
                state.apply_claim(objects::claim(&format!("c{n}"), &claim));
                let status = json!({"conditions": [{"type": "Ready", "status": if first { ready } else { "True" }}]});
                let spec = json!({"providerID": format!("aws:///z/{id}")});
                state.apply_node(objects::node(&format!("x{n}"), &json!({"spec": spec, "status": status})));
            }
            assert_eq!(allowances(&state, DisruptionReason::Empty, UnixMillis(0))["p"].nodes, allowed, "{case}");
        }
    }
}
