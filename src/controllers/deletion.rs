//! Deletion of NodeClaims and Nodes, and removal of our finalizer from them.

use k8s_openapi::api::core::v1::Node;
use kube::api::{DeleteParams, Preconditions};
use kube::{Api, ResourceExt};
use serde_json::json;
use stowage_api::NodeClaim;
use stowage_model::labels;
use stowage_runtime::clock;

use crate::controllers::context::{Context, ignore_not_found};
use crate::controllers::node_claim::claim_metrics;
use crate::decisions::disruption::reason::DisruptionReason;

/// Deletes a claim and counts the disruption. Its finalizer keeps it until the instance is terminated. No error when it is gone
/// already.
pub async fn delete_claim(ctx: &Context, claim: &NodeClaim, reason: DisruptionReason) -> Result<(), kube::Error> {
    request_deletion(ctx, claim).await?;
    claim_metrics::count_disrupted(ctx, claim, reason);
    Ok(())
}

/// Removes a node whose pods are not waited for: sets the time of its termination to now (`expire`) and deletes its claim (`delete`).
pub async fn expel(
    ctx: &Context,
    claim: &NodeClaim,
    reason: DisruptionReason,
    expire: bool,
    delete: bool,
) -> Result<(), kube::Error> {
    if expire {
        let annotations = json!({(labels::TERMINATION_TIMESTAMP): clock::now().rfc3339()});
        let patch = json!({"metadata": {"annotations": annotations}});
        ignore_not_found(ctx.patch_claim(&claim.name_any(), &patch).await)?;
    }
    if delete { delete_claim(ctx, claim, reason).await } else { Ok(()) }
}

/// [`delete_claim`] that fails with a conflict if the claim changed.
pub async fn delete_unchanged_claim(
    ctx: &Context,
    claim: &NodeClaim,
    reason: DisruptionReason,
) -> Result<(), kube::Error> {
    let only = Preconditions { uid: claim.uid(), resource_version: claim.resource_version() };
    delete_if(ctx, claim, only).await?;
    claim_metrics::count_disrupted(ctx, claim, reason);
    Ok(())
}

/// [`delete_claim`] that logs a failure: the caller tries again in its next pass. Returns whether it succeeded.
pub async fn delete_claim_or_log(ctx: &Context, claim: &NodeClaim, reason: DisruptionReason) -> bool {
    let deleted = delete_claim(ctx, claim, reason).await;
    if let Err(error) = &deleted {
        tracing::warn!(claim = claim.name_any(), %error, "failed to delete node claim, retrying");
    }
    deleted.is_ok()
}

/// Deletes a claim without counting a disruption. No error when it is gone already.
pub async fn request_deletion(ctx: &Context, claim: &NodeClaim) -> Result<(), kube::Error> {
    delete_if(ctx, claim, Preconditions { uid: claim.uid(), resource_version: None }).await
}

async fn delete_if(ctx: &Context, claim: &NodeClaim, only: Preconditions) -> Result<(), kube::Error> {
    let api: Api<NodeClaim> = Api::all(ctx.client.clone());
    let options = DeleteParams { preconditions: Some(only), ..DeleteParams::default() };
    let deleted = api.delete(&claim.name_any(), &options).await;
    ignore_not_found(deleted.map(|response| {
        if let Some(claim) = response.left() {
            ctx.cluster.update(|state| state.apply_claim(claim));
        }
    }))
}

/// Deletes a Node. Its finalizer, if it has one, keeps it until the instance is terminated. No error when it is gone already.
pub async fn delete_node(ctx: &Context, node: &Node) -> Result<(), kube::Error> {
    let api: Api<Node> = Api::all(ctx.client.clone());
    let deleted = api.delete(&node.name_any(), &with_uid(node.uid())).await;
    ignore_not_found(deleted.map(|response| {
        if let Some(node) = response.left() {
            ctx.cluster.update(|state| state.apply_node(node));
        }
    }))
}

fn with_uid(uid: Option<String>) -> DeleteParams {
    DeleteParams { preconditions: Some(Preconditions { uid, resource_version: None }), ..DeleteParams::default() }
}

/// Removes our finalizer from a Node. No error when it is gone already.
pub async fn release_node(ctx: &Context, node: &Node) -> Result<(), kube::Error> {
    let Some(left) = without_finalizer(node.finalizers()) else { return Ok(()) };
    let patch = json!({"metadata": {"finalizers": left, "resourceVersion": node.resource_version()}});
    let released = ctx.patch_node(&node.name_any(), &patch).await;
    if released.is_ok() {
        claim_metrics::count_terminated_node(ctx, node, clock::now());
    }
    ignore_not_found(released)
}

/// Removes our finalizer from a claim. No error when it is gone already.
pub async fn release_claim(ctx: &Context, claim: &NodeClaim) -> Result<(), kube::Error> {
    let Some(left) = without_finalizer(claim.finalizers()) else { return Ok(()) };
    let patch = json!({"metadata": {"finalizers": left, "resourceVersion": claim.resource_version()}});
    let released = ctx.patch_claim(&claim.name_any(), &patch).await;
    if released.is_ok() {
        claim_metrics::count_terminated(ctx, claim, clock::now());
    }
    ignore_not_found(released)
}

/// The finalizers without ours; `None` when ours is not among them.
fn without_finalizer(finalizers: &[String]) -> Option<Vec<&String>> {
    let left: Vec<&String> = finalizers.iter().filter(|other| *other != labels::TERMINATION_FINALIZER).collect();
    (left.len() < finalizers.len()).then_some(left)
}
