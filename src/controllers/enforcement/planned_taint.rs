//! Carries out the decisions about planned taints: adds tolerations to pods, and changes taints of nodes.

use futures::{StreamExt, stream};
use k8s_openapi::api::core::v1::{Node, Pod, Taint};
use kube::Api;
use kube::api::{Patch, PatchParams};
use serde_json::json;

use crate::clock;
use crate::controllers::context::{Context, is_conflict, is_not_found};
use crate::decisions::placement::planned_taint::{Admission, PlannedTaints, closed_for_moves};
use crate::model::labels;
use crate::model::time::UnixMillis;
use crate::state::object_ext::NodeExt;
use crate::state::plan_record::Holds;

/// Concurrent writes: half of what the client sends at a time.
const CONCURRENCY: usize = 16;

/// One pass: admits pods, closes nodes while pods move, lets DaemonSet pods onto nodes, and removes taints that are no longer needed.
pub async fn reconcile(taints: &mut PlannedTaints, ctx: &Context, holds: &Holds, now: UnixMillis) {
    let closed = ctx.closed_nodes(now);
    let actions = taints.choose(&ctx.cluster.read(), holds, &closed, ctx.settings.placement, now);
    let mut results =
        stream::iter(actions.admit.into_iter().map(|admission| admit(ctx, admission))).buffer_unordered(CONCURRENCY);
    while let Some((admission, accepted)) = results.next().await {
        if let Some(rejections) = taints.record(&admission, accepted) {
            let pod = admission.pod.name;
            tracing::warn!(pod, rejections, "toleration patch rejected repeatedly, removing planned taint");
        }
    }
    drop(results);
    taints.forget_deleted(&ctx.cluster.read());
    if !(actions.close.is_empty() && actions.untaint.is_empty()) {
        let (closed, opened) = (actions.close.len(), actions.untaint.len());
        tracing::info!(closed, opened, "nodes closed while pods move, or opened");
    }
    stream::iter(actions.close)
        .for_each_concurrent(CONCURRENCY, async |(name, taint)| {
            set_taints(ctx, &name, |node| other_taints(node).chain([taint]).collect()).await;
        })
        .await;
    for change in actions.change {
        set_taints(ctx, &change.node, |node| change.taints(node)).await;
    }
    untaint(ctx, actions.untaint).await;
}

/// Opens the nodes that are closed because pods move, when this process stops: without a leader they would stay closed to every pod.
pub async fn open_all(ctx: &Context) {
    let closed = closed_for_moves(&ctx.cluster.read());
    untaint(ctx, closed).await;
}

async fn untaint(ctx: &Context, nodes: Vec<String>) {
    let untaint = async |name: String| set_taints(ctx, &name, |node| other_taints(node).collect()).await;
    stream::iter(nodes).for_each_concurrent(CONCURRENCY, untaint).await;
}

fn other_taints(node: &Node) -> impl Iterator<Item = Taint> {
    node.taints().filter(|taint| taint.key != labels::PLANNED_TAINT).cloned()
}

/// Replaces the taints of a Node.
async fn set_taints(ctx: &Context, name: &str, taints: impl FnOnce(&Node) -> Vec<Taint>) {
    let Some(node) = ctx.cluster.read().nodes.get(name).cloned() else { return };
    let taints = taints(&node);
    match ctx.set_taints(&node, &taints, &[]).await {
        Ok(()) => tracing::debug!(node = name, "changed planned taint"),
        Err(error) if is_not_found(&error) || is_conflict(&error) => {}
        Err(error) => tracing::warn!(node = name, %error, "failed to change planned taint, retrying"),
    }
}

/// Adds the toleration to a pod. Returns false when the API server rejects the patch.
async fn admit(ctx: &Context, admission: Admission) -> (Admission, bool) {
    let pod = &admission.pod;
    let toleration =
        json!({"key": labels::PLANNED_TAINT, "operator": "Equal", "value": &admission.claim, "effect": "NoSchedule"});
    let (path, value) =
        if admission.first { ("/spec/tolerations", json!([toleration])) } else { ("/spec/tolerations/-", toleration) };
    let operations = json!([
        {"op": "test", "path": "/metadata/uid", "value": &pod.uid},
        {"op": "add", "path": path, "value": value},
    ]);
    let Ok(patch) = serde_json::from_value(operations) else { return (admission, false) };
    let api: Api<Pod> = Api::namespaced(ctx.client.clone(), &pod.namespace);
    match api.patch(&pod.name, &PatchParams::default(), &Patch::<()>::Json(patch)).await {
        Ok(changed) => ctx.cluster.update(|state| state.apply_pod(&changed, clock::now())),
        Err(error) if is_not_found(&error) || is_conflict(&error) => {}
        Err(kube::Error::Api(status)) if (400..500).contains(&status.code) && status.code != 429 => {
            tracing::debug!(pod = pod.name, error = %status, "toleration patch rejected");
            return (admission, false);
        }
        Err(error) => tracing::warn!(pod = pod.name, %error, "failed to add toleration to pod, retrying"),
    }
    (admission, true)
}

#[cfg(test)]
mod write_tests;
