//! What a drain waits for, in words.

use std::time::Duration;

use stowage_api::NodeClaim;
use stowage_model::labels;
use stowage_model::time::UnixMillis;

use crate::decisions::termination::drain_order::waiting;
use crate::state::pod_budgets::EvictionBlock;
use crate::state::pods::PodRecord;
use crate::state::tables::ClusterState;

/// A pod is late this long after the end of its grace period: the kubelet kills it then, and deletes it a little later.
const LATE: Duration = Duration::from_secs(5);
/// Maximum number of pods that the text names.
const MAX_PODS: usize = 5;

/// The pods that keep the node of a claim for longer than their eviction and grace period take, up to five of them with the reason; `None`
/// when there are none. The text changes only with the pods and their reasons.
pub fn drain_report(state: &ClusterState, claim: &NodeClaim, node: &str, now: UnixMillis) -> Option<String> {
    let waiting = waiting(state, claim, node, now);
    let mut all: Vec<(String, String)> =
        waiting.iter().filter_map(|pod| Some((pod.key(), reason(state, pod, now)?))).collect();
    all.sort();
    let (count, more) = (all.len(), all.len().saturating_sub(MAX_PODS));
    let named: Vec<String> = all.into_iter().take(MAX_PODS).map(|(pod, why)| format!("{pod} {why}")).collect();
    let pods = if count == 1 { "pod keeps" } else { "pods keep" };
    let rest = if more > 0 { format!("; and {more} more") } else { String::new() };
    (count > 0).then(|| format!("{count} {pods} the node: {}{rest}", named.join("; ")))
}

/// Why a pod is still there; `None` when it may be evicted, or terminates within its grace period.
fn reason(state: &ClusterState, pod: &PodRecord, now: UnixMillis) -> Option<String> {
    if let Some(end) = pod.deleted_at {
        return (now > end + LATE).then(|| "terminates for longer than its grace period".to_owned());
    }
    if pod.do_not_disrupt {
        return Some(format!("is protected by the annotation {}", labels::DO_NOT_DISRUPT));
    }
    Some(match state.pod_budgets.block(pod)? {
        EvictionBlock::Exhausted(budget) => format!("is protected by the PodDisruptionBudget {budget}"),
        EvictionBlock::Several(first, second) => {
            format!("can't be evicted, because the PodDisruptionBudgets {first} and {second} both select it")
        }
        EvictionBlock::TooManyBudgets => {
            format!("is not evicted, because namespace {} has too many PodDisruptionBudgets", pod.namespace)
        }
    })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use stowage_test_objects as objects;

    use super::*;

    #[test]
    fn up_to_five_pods_are_named_with_the_reason() {
        let mut state = ClusterState::default();
        let claim = objects::claim("c", &json!({}));
        let now = UnixMillis::parse_rfc3339("2026-01-01T00:00:30Z").unwrap();
        let report = |state: &ClusterState| drain_report(state, &claim, "x", now);
        let put = |state: &mut ClusterState, name: &str, meta: &Value| {
            state.apply_pod(&objects::pod(name, &json!({"metadata": meta, "spec": {"nodeName": "x"}})), now);
        };
        put(&mut state, "evictable", &json!({}));
        put(&mut state, "ending", &json!({"deletionTimestamp": "2026-01-01T00:00:40Z"}));
        put(&mut state, "killed", &json!({"deletionTimestamp": "2026-01-01T00:00:25Z"}));
        assert_eq!(report(&state), None);
        put(&mut state, "stuck", &json!({"deletionTimestamp": "2026-01-01T00:00:20Z"}));
        assert_eq!(
            report(&state).as_deref(),
            Some("1 pod keeps the node: n/stuck terminates for longer than its grace period")
        );
        let budget = |name: &str, app: &str| {
            objects::pod_budget(name, &json!({"spec": {"selector": {"matchLabels": {"app": app}}}}))
        };
        for (name, app) in [("one", "a"), ("two", "b"), ("three", "b")] {
            state.pod_budgets.apply(&budget(name, app));
        }
        put(&mut state, "a", &json!({"labels": {"app": "a"}}));
        put(&mut state, "b", &json!({"labels": {"app": "b"}}));
        put(&mut state, "c", &json!({"annotations": {(labels::DO_NOT_DISRUPT): "true"}}));
        assert_eq!(
            report(&state).as_deref(),
            Some(
                "4 pods keep the node: n/a is protected by the PodDisruptionBudget n/one; n/b can't be evicted, because the \
                 PodDisruptionBudgets n/three and n/two both select it; n/c is protected by the annotation \
                 karpenter.sh/do-not-disrupt; n/stuck terminates for longer than its grace period"
            )
        );
        for index in 0..4 {
            put(&mut state, &format!("d{index}"), &json!({"annotations": {(labels::DO_NOT_DISRUPT): "true"}}));
        }
        let text = report(&state).unwrap();
        assert!(text.starts_with("8 pods keep the node: n/a ") && text.ends_with("; and 3 more"), "{text}");
    }
}
