//! Marks NodeClaims for disruption and taints their nodes, or reverts both.

use std::time::Duration;

use kube::ResourceExt;
use serde_json::json;

use crate::api::NodeClaim;
use crate::controllers::context::{Context, is_conflict};
use crate::controllers::disruption::taint::{taint, untaint};
use crate::decisions::disruption::mark::DisruptionMark;
use crate::decisions::disruption::move_record::MoveRecord;
use crate::model::labels;

/// Attempts to taint a node that other clients write at the same time, and the wait for the watch between two of them.
const ATTEMPTS: u32 = 8;
const RETRY_DELAY: Duration = Duration::from_millis(200);

/// Marks a claim, with the record of its move if it is a source of one, and taints its node. A mark with an earlier deadline is kept, also one
/// that was written since `claim` was read.
pub async fn mark(
    ctx: &Context,
    claim: &NodeClaim,
    mark: DisruptionMark,
    of_move: Option<&MoveRecord>,
) -> Result<(), kube::Error> {
    annotate(ctx, claim, mark, of_move).await?;
    let mut changes = ctx.cluster.changes();
    for _ in 1..ATTEMPTS {
        match taint_node_of(ctx, claim).await {
            // Another client wrote the Node; the watch delivers its present version.
            Err(error) if is_conflict(&error) => drop(tokio::time::timeout(RETRY_DELAY, changes.changed()).await),
            done => return done,
        }
    }
    taint_node_of(ctx, claim).await
}

async fn annotate(
    ctx: &Context,
    claim: &NodeClaim,
    mark: DisruptionMark,
    of_move: Option<&MoveRecord>,
) -> Result<(), kube::Error> {
    let (name, mut known) = (claim.name_any(), claim.clone());
    for attempt in 1..=ATTEMPTS {
        if !mark.replaces(DisruptionMark::of(&known)) {
            return Ok(());
        }
        let version = known.resource_version();
        let mut annotations = json!({(labels::DISRUPTING): mark.annotation()});
        if let Some(record) = of_move {
            annotations[labels::MOVE] = json!(record.annotation());
        }
        let patch = json!({"metadata": {"resourceVersion": version, "annotations": annotations}});
        match ctx.patch_claim(&name, &patch).await {
            // Another client wrote the claim; its mark may have an earlier deadline.
            Err(error) if is_conflict(&error) && attempt < ATTEMPTS => known = ctx.read_claim(&name).await?,
            done => return done,
        }
    }
    Ok(())
}

async fn taint_node_of(ctx: &Context, claim: &NodeClaim) -> Result<(), kube::Error> {
    let node = ctx.cluster.read().node_of(claim).cloned();
    match node {
        Some(node) => taint(ctx, &node).await,
        None => Ok(()),
    }
}

/// Removes the taint and the mark.
pub async fn unmark(ctx: &Context, claim: &NodeClaim) -> Result<(), kube::Error> {
    let node = ctx.cluster.read().node_of(claim).cloned();
    if let Some(node) = node {
        untaint(ctx, &node).await?;
    }
    // Conflicts when another mark, such as that of an interruption, was written since the claim was read.
    let version = claim.resource_version();
    let annotations = json!({(labels::DISRUPTING): null, (labels::MOVE): null});
    let patch = json!({"metadata": {"resourceVersion": version, "annotations": annotations}});
    ctx.patch_claim(&claim.name_any(), &patch).await
}
