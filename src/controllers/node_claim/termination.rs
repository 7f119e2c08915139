//! Termination of a drained NodeClaim: its instance, then our finalizer on the Node and on the claim.

use std::time::Duration;

use futures::future::join_all;
use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;
use stowage_api::conditions::Conditions;
use stowage_api::launch_group::left_behind;
use stowage_api::{NodeClaim, conditions};
use stowage_cloud::CloudError;
use stowage_model::labels;

use crate::controllers::condition_writer::write_condition;
use crate::controllers::context::Context;
use crate::controllers::deletion::{release_claim, release_node};
use crate::controllers::node_claim::step_error::StepError;
use crate::decisions::lifecycle::claim_queue::Requeue;
use crate::state::object_ext::{NodeClaimExt, ObjectExt};

/// Wait between two queries of an instance that shuts down.
const POLL_PERIOD: Duration = Duration::from_millis(500);

/// Terminates a claim's instance. When it is gone, removes our finalizer from the Node and then from the claim, but not while finalizers of others keep
/// the Node.
pub async fn terminate(ctx: &Context, claim: &NodeClaim, node: Option<&Node>) -> Result<Requeue, StepError> {
    let retry = |error: CloudError| StepError::Retry(format!("terminating its instance: {error}"));
    let ids = if let Some(id) = claim.provider_id() {
        vec![id.to_owned()]
    } else {
        // The instance may have been launched by a process that died before it wrote the provider id, or by a call whose response
        // was lost.
        let found = ctx.cloud.launched_for(claim).await.map_err(retry)?;
        let state = ctx.cluster.read();
        left_behind(claim, state.claims.values().map(|claim| &**claim), &found)
    };
    // Every instance is terminated, also when the call for another one fails.
    let shutting_down = join_all(ids.iter().map(|id| ctx.cloud.terminate(id))).await;
    if shutting_down.iter().any(|result| matches!(result, Ok(true))) {
        // Budgets count the node until then. A failed write does not delay the termination.
        let terminating = |list: &mut Conditions<'_>| {
            let detached = list.get(conditions::VOLUMES_DETACHED).is_none_or(|condition| condition.status != "False");
            let drained = node.is_some() && list.set_true(conditions::DRAINED);
            let detached = node.is_some() && detached && list.set_true(conditions::VOLUMES_DETACHED);
            list.set_true(conditions::INSTANCE_TERMINATING) || drained || detached
        };
        let written = write_condition(ctx, claim, terminating).await;
        if let Err(error) = written {
            tracing::debug!(claim = claim.name_any(), %error, "failed to write the condition of a terminating instance");
        }
        return Ok(Requeue::After(POLL_PERIOD));
    }
    shutting_down.into_iter().collect::<Result<Vec<bool>, _>>().map_err(retry)?;
    if let Some(node) = node {
        release_node(ctx, node).await?;
        if node.finalizers().iter().any(|other| other != labels::TERMINATION_FINALIZER) {
            // A Node without its claim would look like one of others.
            write_condition(ctx, claim, |list| list.set_true(conditions::INSTANCE_TERMINATING)).await?;
            return Ok(Requeue::After(POLL_PERIOD));
        }
    }
    release_claim(ctx, claim).await?;
    let uid = claim.uid().unwrap_or_default();
    ctx.confirmed_drains.remove(&uid);
    ctx.drains_logged.remove(&uid);
    let (node_pool, instance) = (claim.node_pool(), claim.instance_id());
    let (node, instance_type) = (node.map(Node::name_any), claim.labels().get(labels::INSTANCE_TYPE));
    tracing::info!(claim = claim.name_any(), node, node_pool, instance, instance_type, "terminated");
    Ok(Requeue::After(POLL_PERIOD))
}
