//! Instances that the cloud finds unhealthy (AWS reference 9.4): after a failed check there is nothing left to drain, before a
//! scheduled event there is time to.

use std::sync::Arc;
use std::time::Duration;

use kube::ResourceExt;
use serde_json::json;

use crate::api::NodeClaim;
use crate::cloud::CloudError;
use crate::cloud::health::{Remedy, Unhealthy, UnhealthyTracker};
use crate::controllers::context::{Context, gone_is_fine, reference};
use crate::controllers::interruption::queue;
use crate::controllers::interruption::queue::{Disrupting, SCHEDULED_NOTICE_MS};
use crate::controllers::node_claim::{lifecycle, metrics};
use crate::model::labels;
use crate::state::{ClusterState, now_ms, rfc3339};

/// How often the cloud is asked.
const PERIOD: Duration = Duration::from_mins(1);

/// What is due for a claim whose instance is unhealthy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Response {
    /// Replace its node, then let it go by the deadline.
    Replace(Disrupting),
    /// Write that its drain is over (`stamp`), and delete it (`delete`): the one or the other may be done already.
    Force {
        /// Whether to write the termination timestamp.
        stamp: bool,
        /// Whether to delete it.
        delete: bool,
    },
}

/// What is due for a claim; `None` where all of it was done.
pub fn response(claim: &NodeClaim, unhealthy: &Unhealthy, now_ms: i64) -> Option<Response> {
    let deleting = claim.metadata.deletion_timestamp.is_some();
    match unhealthy.remedy() {
        Remedy::Force => {
            let stamp = !claim.annotations().contains_key(labels::TERMINATION_TIMESTAMP);
            (stamp || !deleting).then_some(Response::Force { stamp, delete: !deleting })
        }
        Remedy::Drain => {
            let hurried = Disrupting::of(claim).is_some_and(|disrupting| disrupting.deadline_ms.is_some());
            let deadline_ms = Some(now_ms + SCHEDULED_NOTICE_MS);
            let replace = Response::Replace(Disrupting { reason: unhealthy.reason().into(), deadline_ms });
            (!deleting && !hurried).then_some(replace)
        }
    }
}

/// The claims of unhealthy instances. The cloud tells of other clusters' instances, too.
pub fn ours(state: &ClusterState, found: &[Unhealthy]) -> Vec<(Arc<NodeClaim>, Unhealthy)> {
    let id = |claim: &NodeClaim| {
        let id = claim.status.as_ref()?.provider_id.as_deref()?.rsplit('/').next()?;
        Some(id.to_owned())
    };
    let claims = state.claims.values().filter_map(|claim| Some((id(claim)?, claim)));
    let with_trouble = claims.filter_map(|(id, claim)| {
        let trouble = found.iter().find(|trouble| trouble.instance_id == id)?;
        Some((Arc::clone(claim), trouble.clone()))
    });
    with_trouble.collect()
}

/// Runs until the process ends. A cloud that refuses the question isn't asked again.
pub async fn run(ctx: Arc<Context>) {
    let Some(events) = ctx.cloud.capabilities().instance_events else { return std::future::pending().await };
    let mut known = UnhealthyTracker::default();
    loop {
        match events.unhealthy().await {
            Ok(found) => look(&ctx, &mut known, &found).await,
            Err(error @ CloudError::Refused(_)) => {
                refused(&ctx, &error).await;
                return std::future::pending().await;
            }
            Err(error) => tracing::warn!(%error, "instance status checks could not be read, trying again"),
        }
        tokio::time::sleep(PERIOD).await;
    }
}

async fn look(ctx: &Context, known: &mut UnhealthyTracker, found: &[Unhealthy]) {
    let ours = ours(&ctx.cluster.read(), found);
    let troubles: Vec<Unhealthy> = ours.iter().map(|(_, trouble)| trouble.clone()).collect();
    for (instance, category) in known.newly_unhealthy(&troubles) {
        tracing::warn!(instance, category = category.label(), "instance is unhealthy");
        ctx.metrics.instances_unhealthy.with_label_values(&[category.label()]).inc();
    }
    for (claim, trouble) in ours {
        let Some(response) = response(&claim, &trouble, now_ms()) else { continue };
        if let Err(error) = respond(ctx, &claim, &trouble, response).await {
            tracing::warn!(claim = claim.name_any(), %error, "unhealthy instance was not handled, trying again");
        }
    }
}

async fn respond(ctx: &Context, claim: &NodeClaim, trouble: &Unhealthy, response: Response) -> Result<(), kube::Error> {
    let reason = trouble.reason();
    let note = format!("EC2 says {reason} of {}", trouble.instance_id);
    ctx.event(reference(claim), true, "InstanceUnhealthy", &note).await;
    let node = ctx.cluster.read().node_of(claim).cloned();
    if let Some(node) = node {
        ctx.event(reference(&*node), true, "InstanceUnhealthy", &note).await;
    }
    match response {
        Response::Replace(disrupting) => queue::mark(ctx, claim, &disrupting).await,
        Response::Force { stamp, delete } => {
            if stamp {
                let annotations = json!({(labels::TERMINATION_TIMESTAMP): rfc3339(now_ms())});
                let patch = json!({"metadata": {"annotations": annotations}});
                gone_is_fine(ctx.patch_claim(&claim.name_any(), &patch).await)?;
            }
            if delete {
                lifecycle::delete_claim(ctx, claim).await?;
                metrics::count(ctx, claim, reason);
                ctx.event(reference(claim), true, "TerminatingOnInterruption", &note).await;
            }
            Ok(())
        }
    }
}

/// Says once that nobody watches over instances, and what would change that.
async fn refused(ctx: &Context, error: &CloudError) {
    tracing::error!(
        %error,
        "instance status checks are off until the next start: allow ec2:DescribeInstanceStatus in the controller's policy"
    );
    let note = format!(
        "instances whose status checks fail are not replaced: allow ec2:DescribeInstanceStatus in the controller's policy and \
         restart it ({error})"
    );
    ctx.tell_classes(true, "StatusChecksRefused", &note).await;
}

#[cfg(test)]
mod write_tests;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cloud::health::Category;
    use crate::test_support::objects;

    fn claim(annotations: &serde_json::Value, deleting: bool) -> NodeClaim {
        let deletion = deleting.then_some("2026-01-01T00:00:00Z");
        let meta = json!({"annotations": annotations, "deletionTimestamp": deletion, "finalizers": ["f"]});
        objects::claim("c", &json!({"metadata": meta, "status": objects::launched("i-1", &[])}))
    }

    fn trouble(id: &str, categories: &[Category]) -> Unhealthy {
        Unhealthy { instance_id: id.into(), categories: categories.iter().copied().collect() }
    }

    #[test]
    fn c38_a_failed_check_ends_the_drain_and_a_scheduled_event_begins_one() {
        use Category::{EventStatus, InstanceStatus, SystemStatus};
        let force = |stamp, delete| Some(Response::Force { stamp, delete });
        let replace =
            || Some(Response::Replace(Disrupting { reason: "event_status".into(), deadline_ms: Some(600_000) }));
        let stamped = json!({(labels::TERMINATION_TIMESTAMP): "2026-01-01T00:00:00Z"});
        let interrupted = json!({(labels::DISRUPTING): "SpotInterruption/2026-01-01T00:02:00Z"});
        let consolidated = json!({(labels::DISRUPTING): "Underutilized/"});
        for (what, annotations, deleting, categories, expected) in [
            ("instance", json!({}), false, &[InstanceStatus][..], force(true, true)),
            ("system", json!({}), false, &[SystemStatus], force(true, true)),
            ("both kinds", json!({}), false, &[SystemStatus, EventStatus], force(true, true)),
            ("an earlier time stays", stamped.clone(), false, &[InstanceStatus], force(false, true)),
            ("stuck in its drain", json!({}), true, &[InstanceStatus], force(true, false)),
            ("all done", stamped, true, &[InstanceStatus], None),
            ("event", json!({}), false, &[EventStatus], replace()),
            ("event, draining", json!({}), true, &[EventStatus], None),
            ("event, interrupted", interrupted, false, &[EventStatus], None),
            ("event, no hurry before", consolidated, false, &[EventStatus], replace()),
        ] {
            assert_eq!(response(&claim(&annotations, deleting), &trouble("i-1", categories), 0), expected, "{what}");
        }
    }

    #[test]
    fn c38_instances_without_a_claim_are_nobodys_business() {
        let mut state = ClusterState::default();
        state.apply_claim(claim(&json!({}), false));
        let found = [trouble("i-1", &[Category::EventStatus]), trouble("i-11", &[Category::InstanceStatus])];
        let ours = ours(&state, &found);
        assert_eq!(ours.len(), 1);
        assert_eq!((ours[0].0.name_any(), &*ours[0].1.instance_id), ("c".to_owned(), "i-1"));
    }
}
