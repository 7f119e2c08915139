//! The planner's problem of the present cluster: the demand, the nodes, and what can be bought.

use crate::decisions::demand::demand;
use crate::state::plan_record::Holds;
use crate::state::snapshot::{Snapshot, SnapshotRequest, take};
use crate::state::snapshot_cache::SnapshotCache;
use crate::state::tables::ClusterState;

/// Takes a snapshot. `cache` must have been used with the same [`ClusterState`] only.
pub fn snapshot(
    state: &ClusterState,
    holds: &Holds,
    cache: &mut SnapshotCache,
    request: SnapshotRequest<'_>,
) -> Snapshot {
    take(state, holds, demand(state, holds, request.now), cache, request)
}

#[cfg(test)]
mod tests;
