//! Events on pods: on which node they are planned, or why on none.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::ObjectReference;

use crate::controllers::context::{Context, EventSpec, pod_reference};
use crate::planner::output::plan::Plan;
use crate::state::PodRecord;
use crate::state::snapshot::Snapshot;

/// How often invalid pods are reported.
const INVALID_PERIOD: Duration = Duration::from_secs(10);
/// Maximum number of pods without a node that one plan emits events for.
const MAX_EVENTS: usize = 200;
/// Maximum number of planned pods that one plan emits events for: the NodeClaims name all of them.
const MAX_NOMINATED_EVENTS: usize = 10;

fn reference_of(pod: &PodRecord) -> ObjectReference {
    pod_reference(&pod.namespace, &pod.name, &pod.uid)
}

/// Reports pods whose specs are invalid, which no plan includes. Runs until the process ends.
pub async fn report_invalid(ctx: Arc<Context>) {
    loop {
        tokio::time::sleep(INVALID_PERIOD).await;
        let invalid: Vec<_> = {
            let state = ctx.cluster.read();
            let pending = state.unbound.iter().filter_map(|key| state.pods.get(key)).filter(|pod| pod.unschedulable());
            let invalid = pending.filter_map(|pod| Some((reference_of(pod), pod.entry.as_ref().err()?.clone())));
            invalid.take(MAX_EVENTS).collect()
        };
        for (pod, why) in invalid {
            let note = format!("no node can be planned for it: {why}");
            ctx.emit(pod, EventSpec::warning("FailedScheduling", &note)).await;
        }
    }
}

/// Emits the events of a plan in the background. `no_pools` says that no NodePool is ready.
pub fn emit_plan_events(ctx: &Arc<Context>, snapshot: &Snapshot, plan: &Plan, no_pools: bool) {
    let key_of = |pod: usize| &snapshot.problem.pods[pod].key;
    let mut notes = Vec::new();
    for failed in &plan.unschedulable {
        let reason = if no_pools { "no NodePool is ready; see their conditions" } else { &failed.reason };
        tracing::info!(pod = &**key_of(failed.pod), reason, "no node for pod");
        notes.push((failed.pod, "FailedScheduling", format!("no node can be bought for it: {reason}")));
    }
    notes.truncate(MAX_EVENTS);
    let planned = plan.new_nodes.iter().filter_map(|node| Some((node, node.choices.first()?)));
    let planned = planned.flat_map(|(node, choice)| node.pods.iter().map(move |pod| (*pod, choice)));
    for (pod, choice) in planned.take(MAX_NOMINATED_EVENTS) {
        let note = format!("planned on a new {} in {}", choice.instance_type.name, choice.zone);
        notes.push((pod, "Nominated", note));
    }
    let events: Vec<_> = {
        let state = ctx.cluster.read();
        let events = notes
            .into_iter()
            .filter_map(|(pod, reason, note)| Some((reference_of(state.pods.get(&**key_of(pod))?), reason, note)));
        events.collect()
    };
    let ctx = Arc::clone(ctx);
    tokio::spawn(async move {
        for (pod, reason, note) in events {
            let warning = reason == "FailedScheduling";
            ctx.emit(pod, EventSpec { warning, reason, note: &note }).await;
        }
    });
}
