//! The last look before nodes are marked: the budgets of their NodePools, which nodes that were marked since the choice use too.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use stowage_model::time::UnixMillis;

use crate::decisions::disruption::candidates::{PoolAllowance, allowances};
use crate::decisions::disruption::moves::Move;
use crate::decisions::disruption::node_facts::{Facts, NodeFacts};
use crate::decisions::disruption::reason::DisruptionReason;
use crate::state::object_ext::{NodeClaimExt, ObjectExt};
use crate::state::tables::ClusterState;

/// The moves that may begin: their sources are as they were, and all of them may still be disrupted; their targets are not leaving.
pub fn admitted_moves(
    state: &ClusterState,
    facts: &Facts,
    moves: Vec<Move>,
    reason: DisruptionReason,
    now: UnixMillis,
) -> Vec<Move> {
    let current: HashMap<&str, &NodeFacts> = facts.nodes.iter().map(|node| (&*node.claim, &**node)).collect();
    let unchanged = |(claim, planned): (&String, &Arc<NodeFacts>)| {
        current.get(&**claim).is_some_and(|node| has_same_pods(node, planned) && node.protection == planned.protection)
    };
    let stays = |claim: &String| state.claims.get(claim).is_some_and(|claim| !claim.is_leaving());
    let mut moves = moves;
    moves.retain(|one| one.sources.iter().all(unchanged) && one.targets().all(stays));
    let chosen: Vec<String> = moves.iter().flat_map(|one| one.sources.keys()).cloned().collect();
    let mut left = admitted(state, &chosen, reason, now).into_iter().collect::<BTreeSet<_>>();
    moves.retain(|one| one.sources.keys().all(|claim| left.contains(claim)));
    // The target of a move cannot be the source of another.
    left.retain(|claim| moves.iter().any(|one| one.sources.contains_key(claim)));
    moves.retain(|one| !one.targets().any(|claim| left.contains(claim)));
    moves
}

fn has_same_pods(now: &NodeFacts, planned: &NodeFacts) -> bool {
    let keys = |facts: &NodeFacts| facts.pods.iter().map(|entry| Arc::clone(&entry.key)).collect::<BTreeSet<_>>();
    now.pod_count == planned.pod_count && keys(now) == keys(planned)
}

/// Those of `chosen`, claims in the order of preference, that may still be disrupted: they exist, are not leaving, and their NodePools
/// allow it.
pub fn admitted(state: &ClusterState, chosen: &[String], reason: DisruptionReason, now: UnixMillis) -> Vec<String> {
    let mut left: BTreeMap<String, PoolAllowance> = allowances(state, reason, now);
    let may_leave = |name: &&String| {
        let Some(claim) = state.claims.get(*name).filter(|claim| !claim.is_leaving()) else { return false };
        let allowance = claim.node_pool().and_then(|pool| left.get_mut(pool));
        let Some(allowance) = allowance.filter(|allowance| allowance.nodes > 0) else { return false };
        allowance.nodes -= 1;
        true
    };
    chosen.iter().filter(may_leave).cloned().collect()
}
