//! The disruption taint, which keeps new pods off a leaving node.

use k8s_openapi::api::core::v1::{Node, Taint};
use stowage_model::labels;

use crate::controllers::context::Context;
use crate::decisions::disruption::mark::is_tainted;
use crate::state::object_ext::NodeExt;

/// Taints a node and excludes it from load balancers, unless it is tainted already.
pub async fn taint(ctx: &Context, node: &Node) -> Result<(), kube::Error> {
    if is_tainted(node) {
        return Ok(());
    }
    let taint = Taint { key: labels::DISRUPTED_TAINT.into(), effect: "NoSchedule".into(), ..Taint::default() };
    let taints: Vec<Taint> = other_taints(node).chain([taint]).collect();
    ctx.set_taints(node, &taints, &[(labels::EXCLUDE_FROM_LOAD_BALANCERS, Some("karpenter"))]).await
}

/// Reverts [`taint`].
pub async fn untaint(ctx: &Context, node: &Node) -> Result<(), kube::Error> {
    let taints: Vec<Taint> = other_taints(node).collect();
    ctx.set_taints(node, &taints, &[(labels::EXCLUDE_FROM_LOAD_BALANCERS, None)]).await
}

fn other_taints(node: &Node) -> impl Iterator<Item = Taint> {
    node.taints().filter(|taint| taint.key != labels::DISRUPTED_TAINT).cloned()
}
