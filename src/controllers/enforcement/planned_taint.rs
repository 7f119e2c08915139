//! Carries out the decisions about planned taints: adds tolerations to pods, and changes taints of nodes.

use std::future::ready;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures::{StreamExt, join, stream};
use k8s_openapi::api::core::v1::{Node, Pod, Taint};
use kube::Api;
use kube::api::{Patch, PatchParams};
use serde_json::json;
use stowage_model::labels;
use stowage_model::time::UnixMillis;
use stowage_runtime::clock;

use crate::controllers::context::{Context, is_conflict, is_not_found};
use crate::controllers::run_loop::{Pace, RunLoop};
use crate::decisions::placement::planned_taint::{Admission, Change, PlannedTaints, TaintActions, closed_for_moves};
use crate::state::object_ext::NodeExt;
use crate::state::plan_record::Holds;

const PACE: Pace = Pace { debounce: Duration::from_millis(20), resync: Duration::from_millis(500) };
/// Concurrent writes: half of what the client sends at a time.
const CONCURRENCY: usize = 16;

/// Runs on the leader until the process ends.
pub async fn run(ctx: Arc<Context>) {
    let mut run_loop = RunLoop::new(&ctx.cluster, PACE);
    let mut taints = PlannedTaints::default();
    loop {
        let now = clock::now();
        let holds = ctx.derived.holds(&ctx.cluster.read(), now);
        reconcile(&mut taints, &ctx, &holds, now).await;
        run_loop.next().await;
    }
}

/// One pass: admits pods, closes nodes while pods move, lets DaemonSet pods onto nodes, and removes taints that are no longer needed.
async fn reconcile(taints: &mut PlannedTaints, ctx: &Context, holds: &Holds, now: UnixMillis) {
    let closed = ctx.closed_nodes(now);
    taints.is_planning = ctx.is_planning.load(Ordering::Relaxed);
    let TaintActions { admit: admissions, close: to_close, change: to_change, untaint: to_open } =
        taints.choose(&ctx.cluster.read(), holds, &closed, ctx.settings.placement, now);
    if !(to_close.is_empty() && to_open.is_empty()) {
        tracing::info!(closed = to_close.len(), opened = to_open.len(), "nodes closed while pods move, or opened");
    }
    let admissions = stream::iter(admissions).map(|admission| admit(ctx, admission)).buffer_unordered(CONCURRENCY);
    let admitted = admissions.for_each(|(admission, accepted)| {
        if let Some(rejections) = taints.record(&admission, accepted) {
            let pod = admission.pod.name;
            tracing::warn!(pod, rejections, "toleration patch rejected repeatedly, removing planned taint");
        }
        ready(())
    });
    let changed = async {
        let close = async |(name, taint): (String, Taint)| {
            set_taints(ctx, &name, |node| other_taints(node).chain([taint]).collect()).await;
        };
        stream::iter(to_close).for_each_concurrent(CONCURRENCY, close).await;
        let change = async |change: Change| set_taints(ctx, &change.node, |node| change.taints(node)).await;
        stream::iter(to_change).for_each_concurrent(CONCURRENCY, change).await;
        untaint(ctx, to_open).await;
    };
    join!(admitted, changed);
    taints.forget_deleted(&ctx.cluster.read());
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
