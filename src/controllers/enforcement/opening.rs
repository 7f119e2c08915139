//! Opens a new node: the planned taint replaces the unregistered taint. A node without the planned taint is opened when its planned pods
//! are nominated.

use std::time::Duration;

use k8s_openapi::api::core::v1::{Node, Taint};
use kube::ResourceExt;
use serde_json::json;
use stowage_api::NodeClaim;
use stowage_model::labels;
use stowage_runtime::clock;

use crate::controllers::context::Context;
use crate::controllers::enforcement::nominations::nominate;
use crate::decisions::lifecycle::initialization::uninitialized_reason;
use crate::decisions::placement::opening::{hold_until, must_wait, opening};
use crate::state::object_ext::NodeExt;

/// Wait for a node that is not ready to be opened.
const POLL_PERIOD: Duration = Duration::from_millis(50);

/// Wait after nominations that failed.
const RETRY_PERIOD: Duration = Duration::from_secs(1);

/// Result of [`open`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Opening {
    Opened,
    /// Try again after this time.
    Wait(Duration),
}

/// Opens a node, or waits until it is ready and its pods are nominated.
pub async fn open(ctx: &Context, claim: &NodeClaim, node: &Node) -> Result<Opening, kube::Error> {
    let (name, claim_name) = (node.name_any(), claim.name_any());
    let (now, placement) = (clock::now(), ctx.settings.placement);
    if must_wait(claim, node, placement, now) {
        return Ok(Opening::Wait(POLL_PERIOD));
    }
    // Before the nominations, so that nothing delays the opening after them.
    let planned = ctx.cluster.read().planned.get(&claim_name).map(|plan| plan.hold_until).unwrap_or_default();
    if let Some(until) = hold_until(planned, placement, now) {
        let patch = json!({"metadata": {"annotations": {(labels::HOLD_UNTIL): until.rfc3339()}}});
        ctx.patch_claim(&claim_name, &patch).await?;
    }
    let opening = {
        let state = ctx.cluster.read();
        opening(&state, &ctx.derived.holds(&state, now), claim, node, placement, now)
    };
    if !opening.nominate.is_empty() {
        let nominated = nominate(ctx, opening.nominate.into_iter().map(|pod| (name.clone(), pod)).collect()).await;
        if nominated.accepted > 0 {
            // The node is opened in the next pass, when our own watch shows the nominations.
            return Ok(Opening::Wait(Duration::ZERO));
        }
        if nominated.failed > 0 {
            return Ok(Opening::Wait(RETRY_PERIOD));
        }
        // The remaining nominations are refused. The planned taint or the extender keeps other pods off.
    }
    let planned_taint = opening.planned_taint;
    let removed = [labels::UNREGISTERED_TAINT, labels::PLANNED_TAINT];
    let taints = node.taints().filter(|taint| !removed.contains(&taint.key.as_str()));
    let taints: Vec<Taint> = taints.chain(&planned_taint).cloned().collect();
    let mut written = vec![(labels::REGISTERED, Some("true"))];
    if is_initialized_with(claim, node, &taints) {
        written.push((labels::INITIALIZED, Some("true")));
    }
    ctx.set_taints(node, &taints, &written).await?;
    tracing::info!(node = name, claim = claim_name, planned_taint = planned_taint.is_some(), "opened node for pods");
    Ok(Opening::Opened)
}

/// Whether the Node is initialized when it has these taints.
fn is_initialized_with(claim: &NodeClaim, node: &Node, taints: &[Taint]) -> bool {
    let mut open = node.clone();
    open.spec.get_or_insert_default().taints = Some(taints.to_vec());
    uninitialized_reason(claim, &open).is_none()
}
