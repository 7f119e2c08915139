//! A node that is going: keep pods off, evict those there in order, never against a budget.

use std::sync::Arc;

use futures::{StreamExt, stream};
use k8s_openapi::api::core::v1::{Node, Pod, Taint};
use k8s_openapi::jiff::Timestamp;
use kube::api::{DeleteParams, EvictParams, Preconditions};
use kube::core::Status;
use kube::{Api, ResourceExt};
use serde_json::json;

use crate::api::NodeClaim;
use crate::controllers::context::{Context, is_conflict, is_not_found, pod_reference, reference};
use crate::model::labels;
use crate::state::{ClusterState, PodRecord, now_ms};

/// A pod is stuck when it is still there so long after its deletion timestamp, which has its grace period in it,
/// milliseconds (core reference 5.10).
const STUCK_MS: i64 = 60_000;
/// The same once the drain's own time is up, milliseconds: the instance takes the pod with it.
const OVERDUE_MS: i64 = 5_000;
/// Evictions under way at the same time for one node.
const CONCURRENCY: usize = 10;

/// Pods that a drain of the claim's node still has to wait for.
pub fn waiting<'a>(state: &'a ClusterState, claim: &NodeClaim, node: &str, now_ms: i64) -> Vec<&'a PodRecord> {
    let over = termination_deadline(claim).is_some_and(|deadline| now_ms > deadline);
    let patience = if over { OVERDUE_MS } else { STUCK_MS };
    let stuck = |pod: &PodRecord| pod.deleting_since_ms.is_some_and(|since| now_ms > since + patience);
    state.pods_on(node).filter(|pod| pod.drainable() && !stuck(pod)).collect()
}

/// Which of the waiting pods are evicted now: the first group that isn't empty of: others, daemons', critical others,
/// critical daemons'. A protected pod is waited for, not evicted.
pub fn next_group<'a>(waiting: &[&'a PodRecord]) -> Vec<&'a PodRecord> {
    let group = |pod: &PodRecord| (pod.critical, pod.daemon);
    let Some(first) = waiting.iter().map(|pod| group(pod)).min() else {
        return Vec::new();
    };
    let mut out: Vec<&PodRecord> = waiting
        .iter()
        .filter(|pod| group(pod) == first && pod.deleting_since_ms.is_none() && !pod.do_not_disrupt)
        .copied()
        .collect();
    out.sort_by_key(|pod| pod.key());
    out
}

/// One look at a draining node: taints it if need be and asks for the next evictions. What can't be evicted now is asked
/// for again at the next look. Returns, when asking again soon is of no use, until when to look less and less often,
/// milliseconds since the epoch: then a pod is due to be deleted whatever its budget says.
///
/// # Errors
/// The API server's, on writing the node.
pub async fn step(ctx: &Arc<Context>, claim: &NodeClaim, node: &Node) -> Result<Option<i64>, kube::Error> {
    let name = node.name_any();
    close(ctx, node).await?;
    let deadline = termination_deadline(claim);
    let now = now_ms();
    let (evict, force, until): (Vec<(String, String, String)>, Vec<_>, i64) = {
        let state = ctx.cluster.read();
        let waiting = waiting(&state, claim, &name, now);
        let id = |pod: &PodRecord| (pod.namespace.clone(), pod.name.clone(), pod.uid.clone());
        let late = |pod: &PodRecord| deadline.is_some_and(|at| forced(pod, at, now));
        (
            next_group(&waiting).into_iter().filter(|pod| !late(pod)).map(id).collect(),
            waiting.iter().copied().filter(|pod| late(pod)).map(id).collect(),
            deadline.map_or(i64::MAX, |at| next_forced(&waiting, at, now)),
        )
    };
    let evictions = evict.into_iter().map(|(namespace, pod, uid)| {
        let api: Api<Pod> = Api::namespaced(ctx.evictions.clone(), &namespace);
        async move {
            let delete = DeleteParams {
                preconditions: Some(Preconditions { uid: Some(uid.clone()), resource_version: None }),
                ..DeleteParams::default()
            };
            let params = EvictParams { delete_options: Some(delete), ..EvictParams::default() };
            (api.evict(&pod, &params).await.map(|_| ()), pod_reference(&namespace, &pod, &uid))
        }
    });
    let mut results = stream::iter(evictions).buffer_unordered(CONCURRENCY);
    let (mut blocked, mut busy) = (0, false);
    while let Some((result, pod)) = results.next().await {
        match result {
            Ok(()) => {
                ctx.metrics.evictions.with_label_values(&["ok"]).inc();
                ctx.event(pod, false, "Evicted", &format!("node {name} is going away")).await;
            }
            Err(error) if is_not_found(&error) || is_conflict(&error) => {}
            Err(kube::Error::Api(status)) if is_budgets(&status) => {
                ctx.metrics.evictions.with_label_values(&["refused"]).inc();
                blocked += 1;
            }
            Err(error) => {
                ctx.metrics.evictions.with_label_values(&["failed"]).inc();
                tracing::warn!(node = name, %error, "eviction failed, trying again");
                busy = true;
            }
        }
    }
    if blocked > 0 {
        let note = format!("{blocked} pods can't be evicted now without breaking their PodDisruptionBudget");
        ctx.event(reference(node), true, "FailedDraining", &note).await;
    }
    let mut undeleted = false;
    for (namespace, pod, uid) in force {
        let left = deadline.map_or(1, |at| ((at - now) / 1_000).max(1));
        let api: Api<Pod> = Api::namespaced(ctx.evictions.clone(), &namespace);
        let params = DeleteParams {
            grace_period_seconds: u32::try_from(left).ok(),
            preconditions: Some(Preconditions { uid: Some(uid), resource_version: None }),
            ..DeleteParams::default()
        };
        match api.delete(&pod, &params).await {
            Err(error) if !is_not_found(&error) => {
                tracing::warn!(node = name, pod, %error, "pod could not be deleted, trying again");
                undeleted = true;
            }
            _ => {}
        }
    }
    Ok((!undeleted && (blocked > 0 || busy)).then_some(until))
}

/// Whether an eviction was refused for the sake of PodDisruptionBudgets: one allows no more, or there are several (500). An API
/// server that is asked too much answers 429, too, without that cause.
fn is_budgets(status: &Status) -> bool {
    let causes = status.details.iter().flat_map(|details| &details.causes);
    status.code == 500 || (status.code == 429 && causes.into_iter().any(|cause| cause.reason == "DisruptionBudget"))
}

/// Whether a node is closed.
pub fn is_closed(node: &Node) -> bool {
    let mut taints = node.spec.iter().flat_map(|spec| spec.taints.iter().flatten());
    taints.any(|taint| taint.key == labels::DISRUPTED_TAINT && taint.effect == "NoSchedule")
}

/// Keeps pods and load balancers off a node. Does nothing where it is closed already.
///
/// # Errors
/// The API server's.
pub async fn close(ctx: &Context, node: &Node) -> Result<(), kube::Error> {
    let mut taints: Vec<Taint> = node.spec.as_ref().and_then(|spec| spec.taints.clone()).unwrap_or_default();
    if is_closed(node) {
        return Ok(());
    }
    taints.retain(|taint| taint.key != labels::DISRUPTED_TAINT);
    taints.push(Taint { key: labels::DISRUPTED_TAINT.into(), effect: "NoSchedule".into(), ..Taint::default() });
    let patch = json!({
        "metadata": {
            "resourceVersion": node.resource_version(),
            "labels": {(labels::EXCLUDE_FROM_LOAD_BALANCERS): "karpenter"},
        },
        "spec": {"taints": taints},
    });
    ctx.patch_node(&node.name_any(), &patch).await
}

/// Whether a pod must be deleted for the node to be drained by the deadline: it runs, and needs the time that is left, or it was
/// given more time than there is.
fn forced(pod: &PodRecord, deadline_ms: i64, now_ms: i64) -> bool {
    match pod.deleting_since_ms {
        None => now_ms > last_call(pod, deadline_ms),
        // Deleting it again sets the end of its grace to no less than a second from now.
        Some(end) => end > deadline_ms.max(now_ms + 2_000),
    }
}

/// Until when a pod may be left running for the node to be drained by the deadline, milliseconds since the epoch.
fn last_call(pod: &PodRecord, deadline_ms: i64) -> i64 {
    deadline_ms - pod.grace_seconds * 1_000
}

/// When the next of these pods has to be deleted, milliseconds since the epoch; never is the end of time.
fn next_forced(waiting: &[&PodRecord], deadline_ms: i64, now_ms: i64) -> i64 {
    let running = waiting.iter().filter(|pod| pod.deleting_since_ms.is_none());
    let ahead = running.map(|pod| last_call(pod, deadline_ms) + 1).filter(|at| *at > now_ms);
    ahead.min().unwrap_or(i64::MAX)
}

/// When a drain must be over, milliseconds since the epoch: as it was written on the claim, else its deletion and termination
/// grace period.
pub fn termination_deadline(claim: &NodeClaim) -> Option<i64> {
    if let Some(text) = claim.annotations().get(labels::TERMINATION_TIMESTAMP)
        && let Ok(at) = text.parse::<Timestamp>()
    {
        return Some(at.as_millisecond());
    }
    reckoned_deadline(claim)
}

fn reckoned_deadline(claim: &NodeClaim) -> Option<i64> {
    let deleted = claim.metadata.deletion_timestamp.as_ref()?.0.as_millisecond();
    let grace = crate::api::duration::parse(claim.spec.termination_grace_period.as_deref()?).ok()?;
    deleted.checked_add(grace)
}

/// When the drain of a deleted claim must be over, where that follows from its grace period and is not written on it yet:
/// milliseconds since the epoch.
pub fn unwritten_deadline(claim: &NodeClaim) -> Option<i64> {
    if claim.annotations().contains_key(labels::TERMINATION_TIMESTAMP) { None } else { reckoned_deadline(claim) }
}

#[cfg(test)]
mod write_tests;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_support::objects;

    fn pod(name: &str, patch: serde_json::Value) -> PodRecord {
        let mut bound = json!({"spec": {"nodeName": "x"}});
        json_patch::merge(&mut bound, &patch);
        objects::pod_record(name, &bound)
    }

    fn claim(annotations: &serde_json::Value) -> NodeClaim {
        let meta =
            json!({"annotations": annotations, "deletionTimestamp": "1970-01-01T00:01:40Z", "finalizers": ["f"]});
        objects::claim("c", &json!({"metadata": meta, "spec": {"terminationGracePeriod": "1h"}}))
    }

    #[test]
    fn the_written_deadline_counts_before_the_grace_period() {
        assert_eq!(termination_deadline(&claim(&json!({}))), Some(3_700_000));
        let written = |text: &str| termination_deadline(&claim(&json!({(labels::TERMINATION_TIMESTAMP): text})));
        assert_eq!(written("1970-01-01T00:00:50Z"), Some(50_000));
        assert_eq!(written("soon"), Some(3_700_000), "what can't be read is absent");
        assert_eq!(unwritten_deadline(&claim(&json!({}))), Some(3_700_000));
        assert_eq!(unwritten_deadline(&claim(&json!({(labels::TERMINATION_TIMESTAMP): "soon"}))), None);
    }

    #[test]
    fn a_drain_that_budgets_hold_up_is_looked_at_again_when_a_pod_has_to_go() {
        let running = |grace: i64| pod("p", json!({"spec": {"terminationGracePeriodSeconds": grace}}));
        let leaving = pod("q", json!({"metadata": {"deletionTimestamp": "1970-01-01T00:00:01Z"}}));
        let (short, long) = (running(10), running(40));
        assert_eq!(next_forced(&[&short, &long, &leaving], 100_000, 0), 60_001);
        assert_eq!(next_forced(&[&short, &long, &leaving], 100_000, 60_001), 90_001, "one is due already");
        assert!(forced(&long, 100_000, 60_001) && !forced(&long, 100_000, 60_000));
        assert_eq!(next_forced(&[&leaving], 100_000, 0), i64::MAX);
    }

    #[test]
    fn only_a_budget_is_said_to_refuse_an_eviction() {
        let said = |code: u16, cause: Option<&str>| {
            let causes: Vec<_> = cause.map(|reason| json!({"reason": reason, "message": "m"})).into_iter().collect();
            is_budgets(&serde_json::from_value(json!({"code": code, "details": {"causes": causes}})).unwrap())
        };
        assert!(said(429, Some("DisruptionBudget")) && said(500, None));
        assert!(!said(429, None) && !said(429, Some("Other")) && !said(503, Some("DisruptionBudget")));
    }

    #[test]
    fn c38_past_its_deadline_a_drain_deletes_every_pod_and_waits_for_none_that_hangs() {
        let mut state = ClusterState::default();
        let mut put = |name: &str, deletion: Option<&str>| {
            let pod = json!({"metadata": {"name": name, "namespace": "n", "uid": name, "deletionTimestamp": deletion,
                    "annotations": {(labels::DO_NOT_DISRUPT): "true"}},
                "spec": {"containers": [], "nodeName": "x", "terminationGracePeriodSeconds": 600}});
            state.apply_pod(&serde_json::from_value(pod).unwrap(), 1);
        };
        put("runs", None);
        put("hangs", Some("1970-01-01T00:01:35Z"));
        put("slow", Some("1970-01-01T00:10:00Z"));
        let names = |annotations: serde_json::Value, now| {
            let waiting = waiting(&state, &claim(&annotations), "x", now);
            let mut names: Vec<_> = waiting.iter().map(|pod| pod.name.clone()).collect();
            names.sort();
            names
        };
        let over = json!({(labels::TERMINATION_TIMESTAMP): "1970-01-01T00:01:30Z"});
        assert_eq!(names(over, 101_000), ["runs", "slow"]);
        assert_eq!(names(json!({}), 101_000), ["hangs", "runs", "slow"], "there is an hour for it");
        let late = |name: &str| forced(&state.pods[&format!("n/{name}")], 90_000, 101_000);
        assert!(late("runs") && late("slow"), "protected or given ten minutes, it goes now");
        assert!(!late("hangs"), "its time is over, and it is not deleted again and again");
    }

    #[test]
    fn groups_go_one_after_the_other_and_protected_pods_are_waited_for() {
        let daemon = json!({"metadata": {"ownerReferences": [{"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "d", "uid": "d", "controller": true}]}});
        let critical = json!({"spec": {"priorityClassName": "system-cluster-critical"}});
        let all = [
            pod("web", json!({})),
            pod("guarded", json!({"metadata": {"annotations": {(labels::DO_NOT_DISRUPT): "true"}}})),
            pod("agent", daemon),
            pod("dns", critical),
        ];
        let names = |from: usize| {
            next_group(&all[from..].iter().collect::<Vec<_>>()).iter().map(|pod| pod.name.clone()).collect::<Vec<_>>()
        };
        assert_eq!(names(0), ["web"]);
        assert_eq!(names(1), Vec::<String>::new(), "nothing else goes while a protected pod is waited for");
        assert_eq!(names(2), ["agent"]);
        assert_eq!(names(3), ["dns"]);
    }
}
