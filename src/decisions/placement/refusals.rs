//! Held pods that kube-scheduler rejects although their node is there. When nothing is about to change that, the plan no longer fits the cluster: the
//! pod is withdrawn from it, so that it is planned with what the cluster is now.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use stowage_api::{NodeClaim, conditions};
use stowage_model::pod_class::PodClass;
use stowage_model::time::UnixMillis;

use crate::decisions::holds::HOLD_READY;
use crate::decisions::placement::hold_events::Progress;
use crate::decisions::placement::planned_taint::{is_admitted, planned_taint_of};
use crate::state::object_ext::{NodeClaimExt, NodeExt};
use crate::state::plan_record::Holds;
use crate::state::pods::PodRecord;
use crate::state::tables::ClusterState;

/// A pod that is refused for this time is withdrawn: kube-scheduler waits up to ten seconds between two attempts.
const PATIENCE: Duration = Duration::from_secs(20);
/// Of its namespace, pods that are refused for this time are withdrawn with it. They may be planned as each other's company, which required
/// affinity asks for, where no such pod runs: planned again one after the other, each would have the others there.
const COMPANY_PATIENCE: Duration = Duration::from_secs(10);

/// A pod to withdraw from the plan of a claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Withdrawal {
    pub claim: String,
    /// The pod that the plan names: the refused pod, or the one that it succeeds.
    pub planned: String,
    /// The refused pod.
    pub pod: String,
}

/// Since when each held pod is refused on its node.
#[derive(Debug, Default)]
pub struct Refusals {
    /// By UID of the pod, and claim.
    since: HashMap<(String, String), UnixMillis>,
}

impl Refusals {
    /// The pods to withdraw: those that were refused all the time on a node that has been initialized for longer than a new node is held, and that
    /// no other pod of their class can help: none of them waits for a planned node, or none was bound as planned for a while. With a pod go the
    /// refused pods of its namespace.
    pub fn choose(
        &mut self,
        state: &ClusterState,
        holds: &Holds,
        progress: &Progress,
        now: UnixMillis,
    ) -> Vec<Withdrawal> {
        let class = |pod: &PodRecord| pod.entry.as_ref().ok().map(|entry| Arc::clone(&entry.class));
        let waiting = |pod: &String| state.pods.get(pod).filter(|pod| pod.node.is_none());
        let mut waiting_of: HashMap<*const PodClass, usize> = HashMap::new();
        for class in holds.by_pod.keys().filter_map(|pod| class(waiting(pod)?)) {
            *waiting_of.entry(Arc::as_ptr(&class)).or_default() += 1;
        }
        let mut since = HashMap::new();
        let (mut out, mut due) = (Vec::new(), HashSet::new());
        for (name, live) in &holds.by_claim {
            let Some((claim, node)) = settled(state, name, now) else { continue };
            let is_let_in = |pod: &PodRecord| planned_taint_of(node).is_none() || is_admitted(pod, claim);
            for hold in live {
                let pod = hold.pod.as_ref().and_then(waiting).filter(|pod| pod.refused && is_let_in(pod));
                let Some((pod, class)) = pod.and_then(|pod| Some((pod, class(pod)?))) else { continue };
                let key = (pod.uid.clone(), name.clone());
                let begin = self.since.get(&key).copied().unwrap_or(now);
                since.insert(key, begin);
                let is_alone = waiting_of.get(&Arc::as_ptr(&class)) == Some(&1);
                if begin.is_older_than(COMPANY_PATIENCE, now) && (is_alone || !progress.is_bound(&class)) {
                    due.extend(begin.is_older_than(PATIENCE, now).then_some(&*pod.namespace));
                    let withdrawal = Withdrawal { claim: name.clone(), planned: hold.original.clone(), pod: pod.key() };
                    out.push((&*pod.namespace, withdrawal));
                }
            }
        }
        self.since = since;
        out.retain(|(namespace, _)| due.contains(namespace));
        out.into_iter().map(|(_, withdrawal)| withdrawal).collect()
    }
}

/// The claim and its node, if that is ready, and has been initialized for longer than a new node is held.
fn settled<'a>(state: &'a ClusterState, claim: &str, now: UnixMillis) -> Option<(&'a NodeClaim, &'a Node)> {
    let claim = state.claims.get(claim)?;
    let node = state.node_of(claim).filter(|node| node.is_ready())?;
    claim.true_since(conditions::INITIALIZED).filter(|at| at.is_older_than(HOLD_READY, now))?;
    Some((claim, node))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use stowage_model::labels;
    use stowage_test_objects as objects;

    use super::*;
    use crate::decisions::holds::resolve;
    use crate::decisions::placement::planned_taint::planned_taint;

    /// The claim c, whose node was initialized at the epoch, with a hold for each of these pods, and the pods with their patches.
    fn state(pods: &[(&str, Value)]) -> ClusterState {
        let mut state = ClusterState::default();
        let namespace = |patch: &Value| patch["metadata"]["namespace"].as_str().unwrap_or("n").to_owned();
        let names: Vec<String> = pods.iter().map(|(name, patch)| format!("{}/{name}", namespace(patch))).collect();
        let plan =
            json!({(labels::PLANNED_PODS): json!(names).to_string(), (labels::HOLD_UNTIL): "2099-01-01T00:00:00Z"});
        let mut status = objects::launched("i-1", &["Launched", "Registered", "Initialized"]);
        for condition in status["conditions"].as_array_mut().unwrap() {
            condition["lastTransitionTime"] = json!("1970-01-01T00:00:00Z");
        }
        state.apply_claim(objects::claim("c", &json!({"metadata": {"annotations": plan}, "status": status})));
        let ready = json!({"conditions": [{"type": "Ready", "status": "True"}], "allocatable": {"cpu": "9", "memory": "9Gi", "pods": "9"}});
        state.apply_node(objects::node("x", &json!({"spec": {"providerID": "aws:///z/i-1"}, "status": ready})));
        for (name, patch) in pods {
            state.apply_pod(&objects::pod(name, patch), UnixMillis(1));
        }
        state
    }

    fn pod(attempted: Value) -> Value {
        let rejected = json!({"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "observedGeneration": attempted});
        json!({"metadata": {"generation": 2}, "status": {"conditions": [rejected]}})
    }

    /// The pods that are withdrawn at this time, when the passes began `before` it.
    fn withdrawn(state: &ClusterState, progress: &Progress, before: Duration, now: UnixMillis) -> Vec<String> {
        let mut refusals = Refusals::default();
        let holds = resolve(state, now);
        assert_eq!(refusals.choose(state, &holds, progress, now - before), [], "just refused");
        let found = refusals.choose(state, &holds, progress, now).into_iter();
        found.map(|found| found.pod).collect()
    }

    #[test]
    fn a_pod_is_withdrawn_when_it_is_refused_for_a_while_on_a_node_that_is_not_new() {
        let moment = Duration::from_millis(1);
        let settled = UnixMillis(0) + HOLD_READY + PATIENCE;
        for (case, attempted, before, now, found) in [
            ("refused", json!(2), PATIENCE, settled, 1),
            ("since a moment less", json!(2), PATIENCE.saturating_sub(moment), settled, 0),
            ("not attempted since its spec changed", json!(1), PATIENCE, settled, 0),
            ("not known", json!(null), PATIENCE, settled, 0),
            ("the node is new", json!(2), PATIENCE, UnixMillis(0) + HOLD_READY - moment, 0),
        ] {
            let state = state(&[("a", pod(attempted))]);
            assert_eq!(withdrawn(&state, &Progress::default(), before, now).len(), found, "{case}");
        }
    }

    #[test]
    fn a_pod_stays_while_others_of_its_class_are_bound_that_it_may_wait_for() {
        let now = UnixMillis(0) + HOLD_READY + PATIENCE;
        let other = json!({"metadata": {"generation": 2}});
        let state = state(&[("a", pod(json!(2))), ("b", other)]);
        let mut progress = Progress::default();
        assert_eq!(withdrawn(&state, &progress, PATIENCE, now), ["n/a"], "no pod of the class was bound");
        progress.record(&state, "n/b", now);
        assert!(withdrawn(&state, &progress, PATIENCE, now).is_empty());
        let mut alone = state;
        alone.delete_pod("n/b", now);
        assert_eq!(withdrawn(&alone, &progress, PATIENCE, now), ["n/a"], "none waits any more");
    }

    /// Withdrawn alone, a pod would be planned beside the other again, which is refused there as well.
    #[test]
    fn refused_pods_of_a_namespace_are_withdrawn_together() {
        let begin = UnixMillis(0) + HOLD_READY;
        let moment = Duration::from_millis(1);
        let of = |namespace: &str, attempted: i64| {
            let mut patch = pod(json!(attempted));
            patch["metadata"]["namespace"] = json!(namespace);
            patch
        };
        let company = PATIENCE.saturating_sub(COMPANY_PATIENCE);
        for (case, after, namespace, found) in [
            ("refused for a while", company, "n", &["n/a", "n/b"][..]),
            ("refused for less", company + moment, "n", &["n/a"]),
            ("of another namespace", company, "other", &["n/a"]),
        ] {
            let mut state = state(&[("a", pod(json!(2))), ("b", of(namespace, 1))]);
            let (mut refusals, progress) = (Refusals::default(), Progress::default());
            let mut pass = |state: &ClusterState, now: UnixMillis| {
                let found = refusals.choose(state, &resolve(state, now), &progress, now).into_iter();
                found.map(|found| found.pod).collect::<Vec<_>>()
            };
            assert!(pass(&state, begin).is_empty());
            state.apply_pod(&objects::pod("b", &of(namespace, 2)), UnixMillis(2));
            assert!(pass(&state, begin + after).is_empty());
            assert_eq!(pass(&state, begin + PATIENCE), found, "{case}");
        }
    }

    #[test]
    fn a_pod_that_the_closed_node_does_not_let_in_yet_stays() {
        let now = UnixMillis(0) + HOLD_READY + PATIENCE;
        let mut state = state(&[("a", pod(json!(2)))]);
        let mut node = (*state.nodes["x"]).clone();
        node.spec.as_mut().unwrap().taints = planned_taint(&state.claims["c"], UnixMillis(0)).map(|taint| vec![taint]);
        state.apply_node(node);
        assert!(withdrawn(&state, &Progress::default(), PATIENCE, now).is_empty(), "its toleration is to come");
        let mut admitted = pod(json!(2));
        admitted["spec"] = json!({"containers": [], "tolerations":
            [{"key": labels::PLANNED_TAINT, "operator": "Equal", "value": "uid-c", "effect": "NoSchedule"}]});
        state.apply_pod(&objects::pod("a", &admitted), UnixMillis(2));
        assert_eq!(withdrawn(&state, &Progress::default(), PATIENCE, now), ["n/a"]);
    }

    #[test]
    fn an_attempt_that_is_to_come_begins_a_new_wait() {
        let now = UnixMillis(0) + HOLD_READY;
        let mut state = state(&[("a", pod(json!(2)))]);
        let (mut refusals, progress) = (Refusals::default(), Progress::default());
        let mut pass =
            |state: &ClusterState, at: UnixMillis| refusals.choose(state, &resolve(state, at), &progress, at).len();
        assert_eq!(pass(&state, now), 0);
        state.apply_pod(&objects::pod("a", &pod(json!(1))), UnixMillis(2));
        assert_eq!(pass(&state, now + PATIENCE / 2), 0);
        state.apply_pod(&objects::pod("a", &pod(json!(2))), UnixMillis(3));
        assert_eq!(pass(&state, now + PATIENCE), 0);
        assert_eq!(pass(&state, now + PATIENCE * 2), 1);
    }
}
