//! Events on pods: why they are planned on no node, and what their annotations say.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::ObjectReference;
use kube::ResourceExt;
use stowage_model::events::DeclaredEvent;
use stowage_model::time::UnixMillis;
use stowage_model::{events, labels};
use stowage_planner::{Plan, Unschedulable};
use stowage_runtime::clock;
use stowage_runtime::sync::heartbeat;

use crate::controllers::context::{Context, pod_reference, reference};
use crate::decisions::provisioning::unschedulable::UnschedulablePods;
use crate::state::protections::is_invalid;
use crate::state::snapshot::Snapshot;
use crate::state::{ClusterState, PodRecord};

/// How often pods are looked through for what is reported.
const PERIOD: Duration = Duration::from_secs(10);
/// Maximum number of objects that are reported at a time for one reason.
const MAX_EVENTS: usize = 200;

fn reference_of(pod: &PodRecord) -> ObjectReference {
    pod_reference(&pod.namespace, &pod.name, &pod.uid)
}

/// Reports pods whose specs are invalid, which no plan includes, invalid annotations, and pods that are protected for a time. Runs until the process ends.
pub async fn report(ctx: Arc<Context>) {
    let mut protected = ProtectedPods::default();
    loop {
        heartbeat::rest(tokio::time::sleep(PERIOD)).await;
        let found = found(&ctx.cluster.read(), &mut protected);
        for (about, event, note) in found {
            ctx.emit(about, event.note(&note)).await;
            heartbeat::progress();
        }
    }
}

/// The events about pods now.
fn found(
    state: &ClusterState,
    protected: &mut ProtectedPods,
) -> Vec<(ObjectReference, &'static DeclaredEvent, String)> {
    let key = labels::DO_NOT_DISRUPT;
    let invalid = invalid(state).into_iter().map(|(pod, why)| {
        let note = format!("no node can be planned for it: {why}");
        (pod, events::FAILED_SCHEDULING, note)
    });
    let annotated = with_invalid_annotation(state).into_iter().map(|about| {
        let note = format!(
            "annotation {key} is neither true nor a duration such as 30m; it protects without an end until you correct it"
        );
        (about, events::INVALID_DO_NOT_DISRUPT, note)
    });
    let (begun, ended) = protected.changes(state, MAX_EVENTS);
    let begun = begun.into_iter().map(|(pod, until)| {
        let note = format!("{key} protects it until {}", until.rfc3339());
        (pod, events::DO_NOT_DISRUPT_UNTIL, note)
    });
    let ended = ended.into_iter().map(|pod| {
        let note = format!("the time for which {key} protected it is over");
        (pod, events::DO_NOT_DISRUPT_ENDED, note)
    });
    invalid.chain(annotated).chain(begun).chain(ended).collect()
}

/// The pods on nodes of ours whose protection for a time was reported, with its end, by key.
#[derive(Debug, Default)]
struct ProtectedPods(BTreeMap<String, (String, UnixMillis)>);

impl ProtectedPods {
    /// The pods that are protected, and until when, and those that are not any more; at most so many of each, the others at the next time.
    fn changes(
        &mut self,
        state: &ClusterState,
        most: usize,
    ) -> (Vec<(ObjectReference, UnixMillis)>, Vec<ObjectReference>) {
        let (mut begun, mut ended) = (Vec::new(), Vec::new());
        self.0.retain(|key, (uid, _)| {
            let pod = state.pods.get(key).filter(|pod| pod.uid == *uid && pod.active());
            // The annotation may have been removed.
            let Some(pod) = pod.filter(|pod| pod.protected_until > UnixMillis::MIN) else { return false };
            if !pod.do_not_disrupt && ended.len() < most {
                ended.push(reference_of(pod));
                return false;
            }
            true
        });
        let protected = state.protections.pods().filter_map(|key| Some((key, state.pods.get(key)?)));
        for (key, pod) in protected.filter(|(_, pod)| pod.active() && is_on_ours(state, pod)) {
            let now = (pod.uid.clone(), pod.protected_until);
            if begun.len() < most && self.0.get(key) != Some(&now) {
                begun.push((reference_of(pod), pod.protected_until));
                self.0.insert(key.clone(), now);
            }
        }
        (begun, ended)
    }
}

/// Whether a pod is on a node of ours.
fn is_on_ours(state: &ClusterState, pod: &PodRecord) -> bool {
    let node = pod.node.as_deref().and_then(|node| state.nodes.get(node));
    node.is_some_and(|node| state.claim_of(node).is_some())
}

/// Pods that wait for a node and whose specs are invalid, with the error.
fn invalid(state: &ClusterState) -> Vec<(ObjectReference, String)> {
    let pending = state.unbound.iter().filter_map(|key| state.pods.get(key)).filter(|pod| pod.unschedulable());
    let invalid = pending.filter_map(|pod| Some((reference_of(pod), pod.entry.as_ref().err()?.clone())));
    invalid.take(MAX_EVENTS).collect()
}

/// Pods on nodes of ours, these nodes and their NodeClaims with an invalid `karpenter.sh/do-not-disrupt`.
fn with_invalid_annotation(state: &ClusterState) -> Vec<ObjectReference> {
    let pods = state.pods.values().filter(|pod| pod.invalid_do_not_disrupt && pod.active() && is_on_ours(state, pod));
    let claims = state.claims.values().filter(|claim| has_invalid_annotation(&***claim));
    let nodes = state.claims.values().filter_map(|claim| state.node_of(claim));
    let nodes = nodes.filter(|node| has_invalid_annotation(&***node)).map(|node| reference(&**node));
    claims.map(|claim| reference(&**claim)).chain(nodes).chain(pods.map(reference_of)).take(MAX_EVENTS).collect()
}

fn has_invalid_annotation<K: ResourceExt>(object: &K) -> bool {
    object.annotations().get(labels::DO_NOT_DISRUPT).is_some_and(|value| is_invalid(value))
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
    use stowage_model::time::UnixMillis;
    use stowage_test_objects as objects;

    use super::*;

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

    /// The NodeClaim `c` with its Node `ours`, and the Node `other`; with this value of the annotation on the first two.
    fn nodes(value: &str) -> ClusterState {
        let (mut state, metadata) =
            (ClusterState::default(), json!({"annotations": {(labels::DO_NOT_DISRUPT): value}}));
        state.apply_claim(objects::claim("c", &json!({"metadata": metadata, "status": objects::launched("i-1", &[])})));
        let spec = json!({"providerID": "aws:///z/i-1"});
        state.apply_node(objects::node("ours", &json!({"metadata": metadata, "spec": spec})));
        state.apply_node(objects::node("other", &json!({"metadata": metadata})));
        state
    }

    fn apply(state: &mut ClusterState, name: &str, node: &str, value: &str, now: UnixMillis) {
        let metadata = json!({"annotations": {(labels::DO_NOT_DISRUPT): value}});
        let status = json!({"startTime": "1970-01-01T00:00:00Z"});
        let pod = objects::pod(name, &json!({"metadata": metadata, "spec": {"nodeName": node}, "status": status}));
        state.apply_pod(&pod, now);
    }

    fn described(found: Vec<(ObjectReference, &'static DeclaredEvent, String)>) -> Vec<String> {
        let describe = |(about, event, note): (ObjectReference, &'static DeclaredEvent, String)| {
            let [kind, name] = [about.kind, about.name].map(Option::unwrap_or_default);
            format!("{kind}/{name} {}: {note}", event.reason())
        };
        let mut lines: Vec<String> = found.into_iter().map(describe).collect();
        lines.sort();
        lines
    }

    #[test]
    fn an_invalid_annotation_is_reported_on_what_is_ours() {
        let mut state = nodes("soon");
        for (name, node, value) in [
            ("a", "ours", "true"),
            ("c", "ours", "soon"),
            ("d", "other", "soon"),
            ("e", "ours", "false"),
            ("f", "ours", "0s"),
        ] {
            apply(&mut state, name, node, value, UnixMillis(1));
        }
        let found = described(found(&state, &mut ProtectedPods::default()));
        let about: Vec<&str> = found.iter().filter_map(|line| line.split(' ').next()).collect();
        assert_eq!(about, ["Node/ours", "NodeClaim/c", "Pod/c", "Pod/f"]);
        assert!(found.iter().all(|line| {
            line.contains("InvalidDoNotDisruptAnnotation: annotation karpenter.sh/do-not-disrupt is neither")
        }));
        let valid = nodes("30m");
        assert_eq!(described(super::found(&valid, &mut ProtectedPods::default())), [""; 0]);
    }

    /// Karpenter core reference 9: `DoNotDisruptUntil` and `DoNotDisruptGracePeriodElapsed`.
    #[test]
    fn a_protection_for_a_time_is_reported_once_when_it_begins_and_when_it_ends() {
        let (mut state, mut protected) = (nodes("false"), ProtectedPods::default());
        let minute = |count: i64| UnixMillis(60_000 * count);
        let mut at = |state: &mut ClusterState, now: UnixMillis| {
            state.end_protections(now);
            described(found(state, &mut protected))
        };
        for (name, node, value) in [
            ("a", "ours", "30m"),
            ("b", "ours", "10m"),
            ("c", "other", "30m"),
            ("d", "ours", "true"),
            ("e", "ours", "1m"),
        ] {
            apply(&mut state, name, node, value, minute(5));
        }
        let until = |name: &str, time: &str| {
            format!(
                "Pod/{name} DoNotDisruptUntil: karpenter.sh/do-not-disrupt protects it until 1970-01-01T00:{time}:00Z"
            )
        };
        let ended = |name: &str| {
            format!(
                "Pod/{name} DoNotDisruptGracePeriodElapsed: the time for which karpenter.sh/do-not-disrupt protected it is over"
            )
        };
        // That of `e` ended before.
        assert_eq!(at(&mut state, minute(5)), [until("a", "30"), until("b", "10")]);
        assert_eq!(at(&mut state, minute(6)), [""; 0]);
        assert_eq!(at(&mut state, minute(10)), [ended("b")]);
        assert_eq!(at(&mut state, minute(11)), [""; 0]);
        apply(&mut state, "a", "ours", "40m", minute(12));
        assert_eq!(at(&mut state, minute(12)), [until("a", "40")], "it was extended");
        apply(&mut state, "a", "ours", "false", minute(13));
        assert_eq!(at(&mut state, minute(41)), [""; 0], "the annotation is gone");
        assert!(protected.0.is_empty());
    }

    #[test]
    fn a_namespace_full_of_protected_pods_is_reported_bit_by_bit() {
        let (mut state, mut protected) = (nodes("false"), ProtectedPods::default());
        for n in 0..450 {
            apply(&mut state, &format!("p{n:03}"), "ours", "30m", UnixMillis(0));
        }
        let counts = |state: &ClusterState, protected: &mut ProtectedPods| {
            (0..4).map(|_| found(state, protected).len()).collect::<Vec<_>>()
        };
        assert_eq!(counts(&state, &mut protected), [200, 200, 50, 0]);
        state.end_protections(UnixMillis(30 * 60_000));
        assert_eq!(counts(&state, &mut protected), [200, 200, 50, 0]);
    }
}
