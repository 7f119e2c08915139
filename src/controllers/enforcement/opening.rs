//! Opens a new node: nominates its planned pods while the unregistered taint keeps all pods off, then removes that taint. Without an
//! extender, the planned taint replaces it.

use std::time::Duration;

use k8s_openapi::api::core::v1::{Node, Taint};
use kube::ResourceExt;
use serde_json::json;

use crate::api::NodeClaim;
use crate::clock;
use crate::controllers::context::{Context, PlacementMode};
use crate::controllers::enforcement::nominations::{nominate, to_nominate};
use crate::controllers::enforcement::planned_taint::planned_taint;
use crate::controllers::node_claim::registration::is_complete;
use crate::decisions::holds::HOLD_READY;
use crate::model::labels;
use crate::state::node_state::is_ephemeral;
use crate::state::object_ext::{NodeClaimExt, NodeExt, ObjectExt};

/// A node that is not ready this long after its creation is opened regardless: an agent that it needs may not tolerate our taint.
const OPEN_TIMEOUT: Duration = Duration::from_secs(20);
/// With [`PlacementMode::Off`] a hold only prevents that a pod is planned twice: it ends this long after the node was opened.
const HOLD_WITHOUT_ENFORCEMENT: Duration = Duration::from_secs(10);
/// Wait for a node that is not ready to be opened.
const POLL_PERIOD: Duration = Duration::from_millis(50);

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
    let now = clock::now();
    let placement = ctx.settings.placement;
    let enforced = placement != PlacementMode::Off;
    let may_wait = enforced && !node.created_at().is_older_than(OPEN_TIMEOUT, now);
    if may_wait && !can_open(claim, node) {
        return Ok(Opening::Wait(POLL_PERIOD));
    }
    // Before the nominations, so that nothing delays the opening after them.
    let until = now + if enforced { HOLD_READY } else { HOLD_WITHOUT_ENFORCEMENT };
    let planned = ctx.cluster.read().planned.get(&claim_name).map(|plan| plan.hold_until).unwrap_or_default();
    if planned > until || planned < now + HOLD_WITHOUT_ENFORCEMENT / 2 {
        let patch = json!({"metadata": {"annotations": {(labels::HOLD_UNTIL): until.rfc3339()}}});
        ctx.patch_claim(&claim_name, &patch).await?;
    }
    let mut guard = None;
    if enforced {
        let pods = {
            let state = ctx.cluster.read();
            let holds = ctx.derived.holds(&state, now);
            let held = holds.by_claim.contains_key(&claim_name);
            // An incomplete node may wait for a DaemonSet pod that does not tolerate the planned taint.
            if placement == PlacementMode::Nominate && held && can_open(claim, node) && is_complete(claim, node) {
                guard = planned_taint(claim, now);
            }
            to_nominate(&state, &holds, placement, guard.is_some(), &claim_name, &name)
        };
        if may_wait && !pods.is_empty() {
            nominate(ctx, &name, pods).await;
            // The node is opened in the next pass, when our own watch shows the nominations.
            return Ok(Opening::Wait(Duration::ZERO));
        }
    }
    let removed = [labels::UNREGISTERED_TAINT, labels::GUARD_TAINT];
    let taints = node.taints().filter(|taint| !removed.contains(&taint.key.as_str()));
    let taints: Vec<&Taint> = taints.chain(&guard).collect();
    let patch = json!({
        "metadata": {"resourceVersion": node.resource_version(), "labels": {(labels::REGISTERED): "true"}},
        "spec": {"taints": taints},
    });
    ctx.patch_node(&name, &patch).await?;
    tracing::info!(node = name, claim = claim_name, planned_taint = guard.is_some(), "opened node for pods");
    Ok(Opening::Opened)
}

/// Whether only the unregistered taint keeps planned pods off a node.
fn can_open(claim: &NodeClaim, node: &Node) -> bool {
    node.is_ready()
        && !node.taints().any(|taint| {
            taint.key != labels::UNREGISTERED_TAINT && is_ephemeral(taint) && !claim.is_startup_taint(taint)
        })
}
