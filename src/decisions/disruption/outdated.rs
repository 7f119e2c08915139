//! Outdated nodes, which are drifted or expire soon, and the order in which they are replaced (Karpenter core reference 4.12).

use std::collections::BTreeSet;

use stowage_api::{NodeClaim, conditions};
use stowage_model::time::UnixMillis;

use crate::decisions::disruption::blockers::{Blocker, replacement_block};
use crate::decisions::disruption::candidates::{allows_none, pods_to_reschedule};
use crate::decisions::disruption::reason::DisruptionReason;
use crate::decisions::lifecycle::expiration::replaced_from;
use crate::state::object_ext::{NodeClaimExt, ObjectExt};
use crate::state::plan_record::Holds;
use crate::state::tables::ClusterState;

/// A node that is drifted or expires soon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutdatedNode {
    pub claim: String,
    pub pool: String,
    /// Transition of the Drifted condition, or when its last time began.
    pub since: UnixMillis,
    /// Pods on it that need another node.
    pub pods: usize,
    /// Why it may not be disrupted now.
    pub blocked_by: Option<Blocker>,
}

/// NodePools with or without `spec.replicas`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PoolKind {
    Dynamic,
    Static,
}

/// Nodes that are to be replaced for this reason, of NodePools of this kind, that are initialized, not leaving, and not held: a held node is still being
/// filled. A drifted node that expires soon is drifted.
pub fn outdated(
    state: &ClusterState,
    holds: &Holds,
    of: PoolKind,
    reason: DisruptionReason,
    now: UnixMillis,
) -> Vec<OutdatedNode> {
    let all = state.claims.iter().filter_map(|(name, claim)| {
        let since = outdated_since(claim, reason, now)?;
        let node = state.node_of(claim)?;
        let excluded = claim.is_leaving()
            || state.is_static(claim) != (of == PoolKind::Static)
            || node.is_deleting()
            || !claim.has_condition(conditions::INITIALIZED)
            || holds.by_claim.contains_key(name);
        (!excluded).then(|| OutdatedNode {
            claim: name.clone(),
            pool: claim.node_pool().unwrap_or_default().to_owned(),
            since,
            pods: pods_to_reschedule(state, holds, claim),
            blocked_by: replacement_block(state, claim, node, reason),
        })
    });
    all.collect()
}

fn outdated_since(claim: &NodeClaim, reason: DisruptionReason, now: UnixMillis) -> Option<UnixMillis> {
    let drifted = claim.true_since(conditions::DRIFTED);
    if reason == DisruptionReason::Expired {
        replaced_from(claim).filter(|since| *since <= now && drifted.is_none())
    } else {
        drifted
    }
}

/// The claims of nodes that will be replaced: nothing protects them, and the budgets of their NodePools allow it, if not now because others leave.
pub fn next_to_replace(state: &ClusterState, holds: &Holds, now: UnixMillis) -> BTreeSet<String> {
    let mut out = BTreeSet::new();
    for reason in [DisruptionReason::Drifted, DisruptionReason::Expired] {
        let is_open =
            |node: &OutdatedNode| state.pools.get(&node.pool).is_some_and(|pool| !allows_none(pool, reason, now));
        for of in [PoolKind::Dynamic, PoolKind::Static] {
            let all = outdated(state, holds, of, reason, now).into_iter();
            let next = all.filter(|node| node.blocked_by.is_none() && is_open(node));
            out.extend(next.map(|node| node.claim));
        }
    }
    out
}

/// The nodes that may be replaced now, in the order in which they are tried: empty ones first, then those that are outdated longest. Claims in
/// `backed_off` are left out.
pub fn order<'a>(nodes: &'a [OutdatedNode], backed_off: &BTreeSet<String>) -> Vec<&'a OutdatedNode> {
    let due = |node: &&OutdatedNode| node.blocked_by.is_none() && !backed_off.contains(&node.claim);
    let mut out: Vec<&OutdatedNode> = nodes.iter().filter(due).collect();
    out.sort_by(|a, b| (a.pods > 0, a.since, &a.claim).cmp(&(b.pods > 0, b.since, &b.claim)));
    out
}

#[cfg(test)]
mod tests;
