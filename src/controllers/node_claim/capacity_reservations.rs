//! Nodes in capacity reservations: relabeled as on-demand when their reservation has ended, and replaced before their capacity block
//! ends.

use std::sync::Arc;
use std::time::Duration;

use kube::ResourceExt;
use serde_json::{Value, json};
use stowage_api::NodeClaim;
use stowage_model::events;
use stowage_model::labels;
use stowage_model::offering::CapacityType;
use stowage_model::reservation::RESERVATION_LABELS;
use stowage_runtime::clock;
use stowage_runtime::sync::heartbeat;

use crate::controllers::context::{Context, ignore_not_found};
use crate::controllers::disruption::mark::mark;
use crate::decisions::disruption::mark::DisruptionMark;
use crate::decisions::lifecycle::capacity_reservations::{Demotions, demoted, expiring, has_reserved};

/// How often instances are compared with their labels.
const PERIOD: Duration = Duration::from_mins(1);

/// The labels of an on-demand node, as a merge patch.
fn as_on_demand() -> Value {
    let mut own: serde_json::Map<String, Value> =
        RESERVATION_LABELS.iter().map(|key| ((*key).to_owned(), Value::Null)).collect();
    own.insert(labels::CAPACITY_TYPE.to_owned(), json!(CapacityType::OnDemand.as_str()));
    json!({"metadata": {"labels": own}})
}

/// Runs until the process ends.
pub async fn run(ctx: Arc<Context>) {
    if !ctx.cloud.capabilities().capacity_reservations {
        return heartbeat::rest_forever().await;
    }
    loop {
        let expiring = expiring(&ctx.cluster.read());
        for (claim, new) in expiring {
            mark_expiring(&ctx, &claim, new).await;
            heartbeat::progress();
        }
        // Without reserved nodes, the instances are not listed.
        if has_reserved(&ctx.cluster.read()) {
            match ctx.cloud.list().await {
                Ok(instances) => {
                    let demoted = demoted(&ctx.cluster.read(), &instances, clock::now());
                    relabel(&ctx, demoted).await;
                }
                Err(error) => tracing::warn!(%error, "failed to list instances, retrying"),
            }
        }
        heartbeat::rest(tokio::time::sleep(PERIOD)).await;
    }
}

/// Marks a claim whose node is replaced and drained before its capacity block ends.
async fn mark_expiring(ctx: &Context, claim: &NodeClaim, new: DisruptionMark) {
    tracing::info!(claim = claim.name_any(), mark = new.annotation(), "marking node claim in expiring capacity block");
    let note = "the capacity block is about to end; its pods are moved";
    ctx.emit_for_claim(claim, events::CAPACITY_BLOCK_EXPIRING.note(note)).await;
    if let Err(error) = mark(ctx, claim, new, None).await {
        tracing::warn!(claim = claim.name_any(), %error, "failed to mark node claim, retrying");
    }
}

/// Relabels claims, then Nodes: an unregistered Node is synced from its claim.
async fn relabel(ctx: &Context, demoted: Demotions) {
    for name in demoted.claims {
        tracing::info!(claim = name, "reservation ended, relabeling node as on-demand");
        if let Err(error) = ignore_not_found(ctx.patch_claim(&name, &as_on_demand()).await) {
            tracing::warn!(claim = name, %error, "failed to relabel node claim, retrying");
        }
    }
    for name in demoted.nodes {
        if let Err(error) = ignore_not_found(ctx.patch_node(&name, &as_on_demand()).await) {
            tracing::warn!(node = name, %error, "failed to relabel node, retrying");
        }
    }
}

#[cfg(test)]
mod write_tests;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn c40_the_patch_removes_every_label_of_the_reservation() {
        let expected = json!({"metadata": {"labels": {
            "karpenter.sh/capacity-type": "on-demand",
            "karpenter.k8s.aws/capacity-reservation-id": null,
            "karpenter.k8s.aws/capacity-reservation-type": null,
            "karpenter.k8s.aws/capacity-reservation-interruptible": null,
        }}});
        assert_eq!(as_on_demand(), expected);
    }
}
