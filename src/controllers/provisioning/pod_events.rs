//! Events on pods: on which node they are planned, or why on none.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::ObjectReference;

use crate::clock;
use crate::controllers::context::{Context, pod_reference};
use crate::decisions::provisioning::unschedulable::UnschedulablePods;
use crate::model::{events, labels};
use crate::planner::output::plan::{Plan, Unschedulable};
use crate::state::snapshot::Snapshot;
use crate::state::{ClusterState, PodRecord};
use crate::sync::heartbeat;

/// How often invalid pods are reported.
const INVALID_PERIOD: Duration = Duration::from_secs(10);
/// Maximum number of invalid pods that are reported at a time.
const MAX_EVENTS: usize = 200;
/// Maximum number of planned pods that one plan emits events for: the NodeClaims name all of them.
const MAX_NOMINATED_EVENTS: usize = 10;

fn reference_of(pod: &PodRecord) -> ObjectReference {
    pod_reference(&pod.namespace, &pod.name, &pod.uid)
}

/// Reports pods whose specs are invalid, which no plan includes, and those with an invalid annotation. Runs until the process ends.
pub async fn report_invalid(ctx: Arc<Context>) {
    loop {
        heartbeat::rest(tokio::time::sleep(INVALID_PERIOD)).await;
        let invalid = invalid(&ctx.cluster.read());
        for (pod, why) in invalid {
            let note = format!("no node can be planned for it: {why}");
            ctx.emit(pod, events::FAILED_SCHEDULING.note(&note)).await;
        }
        let invalid = with_invalid_annotation(&ctx.cluster.read());
        for pod in invalid {
            let key = labels::DO_NOT_DISRUPT;
            let note = format!(
                "annotation {key} is neither true nor a duration such as 30m; it protects the pod until you correct it"
            );
            ctx.emit(pod, events::INVALID_DO_NOT_DISRUPT.note(&note)).await;
        }
    }
}

/// Pods that wait for a node and whose specs are invalid, with the error.
fn invalid(state: &ClusterState) -> Vec<(ObjectReference, String)> {
    let pending = state.unbound.iter().filter_map(|key| state.pods.get(key)).filter(|pod| pod.unschedulable());
    let invalid = pending.filter_map(|pod| Some((reference_of(pod), pod.entry.as_ref().err()?.clone())));
    invalid.take(MAX_EVENTS).collect()
}

/// Pods on nodes of ours with an invalid `karpenter.sh/do-not-disrupt`.
fn with_invalid_annotation(state: &ClusterState) -> Vec<ObjectReference> {
    let is_ours = |pod: &PodRecord| {
        let node = pod.node.as_deref().and_then(|node| state.nodes.get(node));
        pod.active() && node.is_some_and(|node| state.claim_of(node).is_some())
    };
    let invalid = state.pods.values().filter(|pod| pod.invalid_do_not_disrupt);
    invalid.filter(|pod| is_ours(pod)).map(reference_of).take(MAX_EVENTS).collect()
}

/// Emits the events of a plan in the background. `no_pools` says that no NodePool is ready.
pub fn emit_plan_events(
    ctx: &Arc<Context>,
    unschedulable: &mut UnschedulablePods,
    snapshot: &Snapshot,
    plan: &Plan,
    no_pools: bool,
) {
    let key_of = |pod: usize| &snapshot.problem.pods[pod].key;
    let reason = |failed| reason_of(failed, no_pools);
    let failed: Vec<_> =
        plan.unschedulable.iter().map(|failed| (&snapshot.problem.pods[failed.pod], reason(failed))).collect();
    let report = unschedulable.report(&failed, clock::now());
    for (reason, pods) in &report.reasons {
        tracing::info!(pods, reason, other_reasons = report.other_reasons, "no node for pods");
    }
    let mut notes = Vec::new();
    for index in report.pods {
        let (failed, reason) = (plan.unschedulable[index].pod, failed[index].1);
        tracing::debug!(pod = &**key_of(failed), reason, "no node for pod");
        notes.push((failed, events::FAILED_SCHEDULING, format!("no node can be bought for it: {reason}")));
    }
    let planned = plan.new_nodes.iter().filter_map(|node| Some((node, node.choices.first()?)));
    let planned = planned.flat_map(|(node, choice)| node.pods.iter().map(move |pod| (*pod, choice)));
    for (pod, choice) in planned.take(MAX_NOMINATED_EVENTS) {
        let note = format!("planned on a new {} in {}", choice.instance_type.name, choice.zone);
        notes.push((pod, events::NOMINATED, note));
    }
    let emitted: Vec<_> = {
        let state = ctx.cluster.read();
        let emitted = notes
            .into_iter()
            .filter_map(|(pod, event, note)| Some((reference_of(state.pods.get(&**key_of(pod))?), event, note)));
        emitted.collect()
    };
    let ctx = Arc::clone(ctx);
    tokio::spawn(async move {
        for (pod, event, note) in emitted {
            ctx.emit(pod, event.note(&note)).await;
        }
    });
}

fn reason_of(failed: &Unschedulable, no_pools: bool) -> &str {
    if no_pools { "no NodePool is ready; see their conditions" } else { &failed.reason }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::model::time::UnixMillis;
    use crate::test_support::objects;

    #[test]
    fn a_pod_that_waits_with_an_invalid_spec_is_reported_with_the_error() {
        let rejected = json!({"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}]});
        let terms = json!([{"matchExpressions": [{"key": "k", "operator": "Odd"}]}]);
        let affinity =
            json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}});
        let mut state = ClusterState::default();
        for (name, spec, status) in [
            ("invalid", json!({"affinity": affinity}), rejected.clone()),
            ("untried", json!({"affinity": affinity}), json!({})),
            ("valid", json!({}), rejected),
        ] {
            state.apply_pod(&objects::pod(name, &json!({"spec": spec, "status": status})), UnixMillis(1));
        }
        let found = invalid(&state);
        assert_eq!(found.iter().map(|(pod, _)| pod.name.as_deref()).collect::<Vec<_>>(), [Some("invalid")]);
        assert!(found[0].1.contains("Odd"), "{}", found[0].1);
    }

    #[test]
    fn a_pod_on_a_node_of_ours_with_an_invalid_annotation_is_reported() {
        let mut state = ClusterState::default();
        state.apply_claim(objects::claim("c", &json!({"status": objects::launched("i-1", &[])})));
        state.apply_node(objects::node("ours", &json!({"spec": {"providerID": "aws:///z/i-1"}})));
        state.apply_node(objects::node("other", &json!({})));
        for (name, node, value) in [
            ("a", "ours", "true"),
            ("b", "ours", "30m"),
            ("c", "ours", "soon"),
            ("d", "other", "soon"),
            ("e", "ours", "false"),
            ("f", "ours", "0s"),
        ] {
            let metadata = json!({"annotations": {(labels::DO_NOT_DISRUPT): value}});
            let pod = objects::pod(name, &json!({"metadata": metadata, "spec": {"nodeName": node}}));
            state.apply_pod(&pod, UnixMillis(1));
        }
        let mut found: Vec<String> = with_invalid_annotation(&state).into_iter().filter_map(|pod| pod.name).collect();
        found.sort();
        assert_eq!(found, ["c", "f"]);
    }
}
