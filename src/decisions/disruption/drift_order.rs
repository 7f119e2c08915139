//! Drifted nodes and the order in which they are replaced (Karpenter core reference 4.12).

use std::collections::BTreeSet;

use crate::api::conditions;
use crate::decisions::disruption::blockers::{Blocker, drift_block};
use crate::decisions::disruption::candidates::pods_to_reschedule;
use crate::model::time::UnixMillis;
use crate::state::object_ext::{NodeClaimExt, ObjectExt};
use crate::state::plan_record::Holds;
use crate::state::tables::ClusterState;

/// A drifted node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriftedNode {
    pub claim: String,
    pub pool: String,
    /// Transition of the Drifted condition.
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

/// Drifted nodes of NodePools of this kind that are initialized, not leaving, and not held: a held node is still being filled.
pub fn drifted(state: &ClusterState, holds: &Holds, of: PoolKind) -> Vec<DriftedNode> {
    let all = state.claims.iter().filter_map(|(name, claim)| {
        let since = claim.true_since(conditions::DRIFTED)?;
        let node = state.node_of(claim)?;
        let excluded = claim.is_leaving()
            || state.is_static(claim) != (of == PoolKind::Static)
            || node.is_deleting()
            || !claim.has_condition(conditions::INITIALIZED)
            || holds.by_claim.contains_key(name);
        (!excluded).then(|| DriftedNode {
            claim: name.clone(),
            pool: claim.node_pool().unwrap_or_default().to_owned(),
            since,
            pods: pods_to_reschedule(state, holds, claim),
            blocked_by: drift_block(state, claim, node),
        })
    });
    all.collect()
}

/// The nodes that may be replaced now, in the order in which they are tried: empty ones first, then by time of the drift. Claims in
/// `backed_off` are left out.
pub fn order<'a>(nodes: &'a [DriftedNode], backed_off: &BTreeSet<String>) -> Vec<&'a DriftedNode> {
    let due = |node: &&DriftedNode| node.blocked_by.is_none() && !backed_off.contains(&node.claim);
    let mut out: Vec<&DriftedNode> = nodes.iter().filter(due).collect();
    out.sort_by(|a, b| (a.pods > 0, a.since, &a.claim).cmp(&(b.pods > 0, b.since, &b.claim)));
    out
}

#[cfg(test)]
mod tests;
