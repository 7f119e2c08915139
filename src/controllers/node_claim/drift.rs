//! Sets the Drifted condition on NodeClaims that no longer match their NodePool or node class. [`crate::controllers::disruption::outdated_replacement`] replaces them.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures::{StreamExt, stream};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::ResourceExt;
use serde_json::json;
use stowage_api::NodeClaim;
use stowage_api::conditions::{DRIFTED, Status};
use stowage_cloud::{Drift, NodeClassCloud};
use stowage_model::time::UnixMillis;
use stowage_runtime::clock;

use crate::controllers::condition_writer::ConditionWriter;
use crate::controllers::context::{Context, is_conflict, is_not_found};
use crate::controllers::run_loop::{Pace, RunLoop};
use crate::decisions::lifecycle::drift::{DesiredState, DriftCheck, check, comparable, desired_states, live_claims};
use crate::state::object_ext::NodeClaimExt;

const PACE: Pace = Pace { debounce: Duration::from_secs(2), resync: Duration::from_secs(10) };
/// Claims that are compared and written concurrently.
const CONCURRENCY: usize = 16;

/// The claim's conditions with the Drifted condition set or cleared; `None` when nothing changes.
fn conditions_with(claim: &NodeClaim, drift: Option<&Drift>, now: UnixMillis) -> Option<Vec<Condition>> {
    if drift.is_none() && claim.condition(DRIFTED).is_none() {
        return None;
    }
    let mut writer = ConditionWriter::for_claim(claim, now);
    match drift {
        Some(drift) => writer.edit().set(DRIFTED, Status::True, drift.event.reason(), &drift.message),
        None => writer.edit().clear(DRIFTED),
    };
    writer.changed()
}

/// Runs until the process ends.
pub async fn run(ctx: Arc<Context>) {
    let mut run_loop = RunLoop::new(&ctx.cluster, PACE);
    loop {
        reconcile(&ctx).await;
        run_loop.next().await;
    }
}

async fn reconcile(ctx: &Context) {
    let ca = ctx.cloud.capabilities().node_classes.map(NodeClassCloud::instance_ca);
    let pairs = comparable(&ctx.cluster.read(), ca.as_deref());
    let desired = desired_states(pairs, |_, class| Some(ctx.cloud.catalog(class)));
    let claims = live_claims(&ctx.cluster.read());
    stream::iter(claims).for_each_concurrent(CONCURRENCY, |claim| detect(ctx, &desired, claim)).await;
}

/// Compares a claim with what is desired, and writes the result.
async fn detect(ctx: &Context, desired: &HashMap<String, DesiredState>, claim: Arc<NodeClaim>) {
    let drift = match check(&claim, desired, clock::now()) {
        DriftCheck::Incomparable => return,
        DriftCheck::Settled(drift) => drift,
        DriftCheck::MatchesPool(class) => match ctx.cloud.capabilities().node_classes {
            Some(node_classes) => match node_classes.drift(&claim, class).await {
                Ok(drift) => drift,
                Err(error) => {
                    tracing::debug!(claim = claim.name_any(), %error, "failed to detect drift");
                    return;
                }
            },
            None => None,
        },
    };
    if let Err(error) = write(ctx, &claim, drift.as_ref()).await
        && !is_conflict(&error)
        && !is_not_found(&error)
    {
        tracing::warn!(claim = claim.name_any(), %error, "failed to write drifted condition, retrying");
    }
}

/// Writes the Drifted condition. Conflicts when the claim was written since it was read; the next pass tries again.
async fn write(ctx: &Context, claim: &NodeClaim, drift: Option<&Drift>) -> Result<(), kube::Error> {
    let Some(list) = conditions_with(claim, drift, clock::now()) else { return Ok(()) };
    let new = claim.condition(DRIFTED).is_none();
    ctx.patch_claim_status_at(claim, &json!({ "conditions": list })).await?;
    match drift {
        Some(drift) if new => {
            tracing::info!(
                claim = claim.name_any(),
                reason = drift.event.reason(),
                why = drift.message,
                "drift detected"
            );
            ctx.emit_for_claim(claim, drift.event.note(&drift.message)).await;
        }
        Some(_) => {}
        None => tracing::info!(claim = claim.name_any(), "drift resolved"),
    }
    Ok(())
}

#[cfg(test)]
mod write_tests;

#[cfg(test)]
mod tests {
    use stowage_api::conditions;
    use stowage_model::events;
    use stowage_test_objects as objects;

    use super::*;

    #[test]
    fn the_condition_is_set_keeps_its_transition_time_and_is_cleared() {
        let second = |n: i64| UnixMillis(n * 1_000);
        let mut claim = objects::claim("c", &json!({"status": objects::launched("i-1", &["Launched"])}));
        assert_eq!(conditions_with(&claim, None, second(1)), None, "nothing to write");
        let drift = Drift { event: events::NODE_POOL_DRIFTED, message: "m".into() };
        let list = conditions_with(&claim, Some(&drift), second(2)).unwrap();
        assert_eq!(
            conditions::get(&list, DRIFTED).map(|found| (found.status.as_str(), found.reason.as_str())),
            Some(("True", "NodePoolDrifted"))
        );
        claim.status.as_mut().unwrap().conditions = list;
        assert_eq!(conditions_with(&claim, Some(&drift), second(3)), None, "unchanged");
        let other = Drift { event: events::REQUIREMENTS_DRIFTED, message: "m".into() };
        let list = conditions_with(&claim, Some(&other), second(4)).unwrap();
        assert_eq!(UnixMillis::from(&conditions::get(&list, DRIFTED).unwrap().last_transition_time), second(2));
        claim.status.as_mut().unwrap().conditions = list;
        let list = conditions_with(&claim, None, second(5)).unwrap();
        assert!(conditions::get(&list, DRIFTED).is_none() && conditions::is_true(&list, conditions::LAUNCHED));
    }
}
