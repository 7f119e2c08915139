//! The last look before nodes are marked: the budgets of their NodePools, which nodes that were marked since the choice use too.

use std::collections::BTreeMap;

use crate::decisions::disruption::candidates::{PoolAllowance, allowances};
use crate::decisions::disruption::reason::DisruptionReason;
use crate::model::time::UnixMillis;
use crate::state::object_ext::{NodeClaimExt, ObjectExt};
use crate::state::tables::ClusterState;

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
