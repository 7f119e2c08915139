//! Marks NodeClaims for disruption and taints their nodes, or reverts both.

use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;
use serde_json::json;
use stowage_api::NodeClaim;
use stowage_model::labels;

use crate::controllers::context::{Context, is_conflict};
use crate::controllers::disruption::taint::{taint, untaint};
use crate::decisions::disruption::mark::DisruptionMark;
use crate::decisions::disruption::move_record::MoveRecord;

/// Attempts to write the taint of a node that other clients write at the same time, and the wait for the watch between two of them.
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
    write_node(ctx, claim, taint).await
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

/// Removes the mark, then the taint: in the other order a pass in between taints the node again. A taint that stays is removed as a stray.
pub async fn unmark(ctx: &Context, claim: &NodeClaim) -> Result<(), kube::Error> {
    // Conflicts when another mark, such as that of an interruption, was written since the claim was read.
    let version = claim.resource_version();
    let annotations = json!({(labels::DISRUPTING): null, (labels::MOVE): null});
    let patch = json!({"metadata": {"resourceVersion": version, "annotations": annotations}});
    ctx.patch_claim(&claim.name_any(), &patch).await?;
    write_node(ctx, claim, untaint).await
}

/// Writes the taint of the claim's Node, and writes it again when another client wrote the Node at the same time.
async fn write_node(
    ctx: &Context,
    claim: &NodeClaim,
    write: impl AsyncFn(&Context, &Node) -> Result<(), kube::Error>,
) -> Result<(), kube::Error> {
    let mut changes = ctx.cluster.changes();
    for attempt in 1..=ATTEMPTS {
        let node = ctx.cluster.read().node_of(claim).cloned();
        let Some(node) = node else { return Ok(()) };
        match write(ctx, &node).await {
            // The watch delivers the present version of the Node.
            Err(error) if is_conflict(&error) && attempt < ATTEMPTS => {
                drop(tokio::time::timeout(RETRY_DELAY, changes.changed()).await);
            }
            done => return done,
        }
    }
    Ok(())
}
