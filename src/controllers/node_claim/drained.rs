//! Confirms with the API server that a node is drained before its instance is terminated: the watch of pods may lag behind, and pods that
//! the scheduler bound before it observed the taint would end with the instance, without eviction.

use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::ListParams;
use kube::{Api, ResourceExt};
use stowage_api::NodeClaim;
use stowage_runtime::clock;

use crate::controllers::context::Context;
use crate::controllers::node_claim::claim_metrics;
use crate::decisions::termination::deadlines::termination_deadline;
use crate::decisions::termination::drain_order;
use crate::state::object_ext::NodeClaimExt;

/// Whether no pod that a drain waits for is left on the node, by one list from the API server: the disruption taint keeps other pods off
/// afterwards. Pods that are left are applied to the state,
/// so that the drain continues. After the deadline of the drain, nothing is confirmed: termination is forced.
pub async fn is_drained(ctx: &Context, claim: &NodeClaim, node: &Node) -> Result<bool, kube::Error> {
    let (drains, uid) = (&ctx.confirmed_drains, claim.uid().unwrap_or_default());
    let is_forced = termination_deadline(claim).is_some_and(|deadline| clock::now() > deadline);
    if is_forced || drains.contains(&uid) {
        return Ok(true);
    }
    let name = node.name_any();
    let pods = {
        let _permit = drains.permit().await;
        // Without a resource version the list is as new as the last write.
        let on_node = ListParams::default().fields(&format!("spec.nodeName={name}"));
        Api::<Pod>::all(ctx.client.clone()).list(&on_node).await?
    };
    let waiting = {
        let now = clock::now();
        ctx.cluster.update(|state| {
            for pod in &pods.items {
                state.apply_pod(pod, now);
            }
        });
        drain_order::waiting(&ctx.cluster.read(), claim, &name, now).len()
    };
    if waiting > 0 && !is_gone(ctx, claim).await {
        tracing::info!(
            claim = claim.name_any(),
            node = name,
            pods = waiting,
            "node still has pods, its drain continues"
        );
        ctx.metrics.drains_resumed.inc();
        return Ok(false);
    }
    drains.insert(uid);
    claim_metrics::count_drained(ctx, claim);
    Ok(true)
}

/// Whether the cloud reports that the instance no longer exists: nothing is left to drain.
async fn is_gone(ctx: &Context, claim: &NodeClaim) -> bool {
    match claim.provider_id() {
        Some(id) => matches!(ctx.cloud.describe(id).await, Ok(None)),
        None => false,
    }
}

#[cfg(test)]
mod write_tests;
