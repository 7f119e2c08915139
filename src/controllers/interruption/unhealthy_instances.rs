//! Unhealthy instances reported by the cloud (Karpenter AWS reference 9.4).

use std::sync::Arc;
use std::time::Duration;

use kube::ResourceExt;
use stowage_api::NodeClaim;
use stowage_cloud::CloudError;
use stowage_model::events;
use stowage_model::instance_health::{Unhealthy, UnhealthyTracker};
use stowage_runtime::clock;
use stowage_runtime::sync::heartbeat;

use crate::controllers::context::Context;
use crate::controllers::deletion::expel;
use crate::controllers::disruption::mark::mark;
use crate::decisions::interruption::health_response::{HealthAction, action, reason, with_claims};

/// How often the cloud is queried.
const PERIOD: Duration = Duration::from_mins(1);

/// Runs until the process ends. A cloud that denies the query is not queried again. Does nothing when the cloud does not report
/// instance events.
pub async fn run(ctx: Arc<Context>) {
    let Some(events) = ctx.cloud.capabilities().instance_events else { return heartbeat::rest_forever().await };
    let mut tracker = UnhealthyTracker::default();
    loop {
        match events.unhealthy().await {
            Ok(found) => handle(&ctx, &mut tracker, &found).await,
            Err(error @ CloudError::Refused(_)) => {
                report_denied(&ctx, &error).await;
                return heartbeat::rest_forever().await;
            }
            Err(error) => tracing::warn!(%error, "failed to read instance status checks, retrying"),
        }
        heartbeat::rest(tokio::time::sleep(PERIOD)).await;
    }
}

async fn handle(ctx: &Context, tracker: &mut UnhealthyTracker, found: &[Unhealthy]) {
    let claims = with_claims(&ctx.cluster.read(), found);
    let ours: Vec<Unhealthy> = claims.iter().map(|(_, unhealthy)| unhealthy.clone()).collect();
    for (instance, category) in tracker.newly_unhealthy(&ours) {
        tracing::warn!(instance, category = category.label(), "instance is unhealthy");
        ctx.metrics.instances_unhealthy.with_label_values(&[category.label()]).inc();
    }
    for (claim, unhealthy) in claims {
        let Some(action) = action(&claim, &unhealthy, clock::now()) else { continue };
        if let Err(error) = act(ctx, &claim, &unhealthy, action).await {
            tracing::warn!(claim = claim.name_any(), %error, "failed to handle unhealthy instance, retrying");
        }
    }
}

async fn act(ctx: &Context, claim: &NodeClaim, unhealthy: &Unhealthy, action: HealthAction) -> Result<(), kube::Error> {
    let reason = reason(unhealthy);
    let note = format!("{} reported for instance {}", reason.as_str(), unhealthy.instance_id);
    ctx.emit_for_claim_and_node(claim, events::INSTANCE_UNHEALTHY.note(&note)).await;
    match action {
        HealthAction::Mark(new) => mark(ctx, claim, new, None).await,
        HealthAction::Terminate { expire, delete } => {
            expel(ctx, claim, reason, expire, delete).await?;
            if delete {
                ctx.emit_for_claim(claim, events::TERMINATING_ON_INTERRUPTION.note(&note)).await;
            }
            Ok(())
        }
    }
}

/// Reports once that unhealthy instances are not replaced, and the remedy.
async fn report_denied(ctx: &Context, error: &CloudError) {
    tracing::error!(
        %error,
        "instance status checks are off until the next start: allow ec2:DescribeInstanceStatus in the controller's policy"
    );
    let note = format!(
        "instances whose status checks fail are not replaced: allow ec2:DescribeInstanceStatus in the controller's policy and \
         restart it ({error})"
    );
    ctx.emit_for_classes(events::STATUS_CHECKS_REFUSED.note(&note)).await;
}

#[cfg(test)]
mod write_tests;
