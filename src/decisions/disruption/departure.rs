//! When a NodeClaim that is marked with a deadline is deleted, and which of its pods leave before.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;
use stowage_api::{NodeClaim, conditions};
use stowage_model::time::UnixMillis;

use crate::decisions::disruption::mark::{DisruptionMark, is_tainted};
use crate::decisions::pod_ref::PodRef;
use crate::state::object_ext::{NodeClaimExt, ObjectExt};
use crate::state::plan_record::Holds;
use crate::state::pods::PodRecord;
use crate::state::tables::ClusterState;

/// Duration of a drain in addition to a pod's grace period.
const DRAIN_MARGIN: Duration = Duration::from_secs(15);

/// A marked claim that departs, or pods of it.
#[derive(Clone, Debug)]
pub struct Departure {
    pub claim: Arc<NodeClaim>,
    pub mark: DisruptionMark,
    pub node: Option<String>,
    pub step: Step,
}

/// What is done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// The claim is deleted, which drains its node.
    Delete,
    /// These pods are evicted; the others wait for their places.
    Evict(Vec<PodRef>),
}

/// Claims that are marked with a deadline. The others are empty ([`crate::decisions::disruption::marked`]) or move their pods
/// ([`crate::decisions::disruption::progress`]).
fn marked(state: &ClusterState) -> impl Iterator<Item = (&Arc<NodeClaim>, DisruptionMark, UnixMillis)> {
    let claims = state.claim_index.leaving.iter().filter_map(|name| state.claims.get(name));
    let claims = claims.filter(|claim| !claim.is_deleting());
    claims.filter_map(|claim| {
        let mark = DisruptionMark::of(claim)?;
        Some((claim, mark, mark.deadline?))
    })
}

/// Whether [`due`] may find a claim.
pub fn any_marked(state: &ClusterState) -> bool {
    marked(state).next().is_some()
}

/// What departs now of the marked claims.
pub fn due(state: &ClusterState, holds: &Holds, now: UnixMillis) -> Vec<Departure> {
    let ready = ready(state, holds);
    let departure = |(claim, mark, deadline): (&Arc<NodeClaim>, DisruptionMark, UnixMillis)| {
        let node = state.node_of(claim);
        let step = step(state, &ready, node.map(|node| &**node), deadline, now)?;
        Some(Departure { claim: Arc::clone(claim), mark, node: node.map(|node| node.name_any()), step })
    };
    marked(state).filter_map(departure).collect()
}

/// Displaced pods whose replacement is ready: a hold on an initialized claim.
fn ready<'a>(state: &ClusterState, holds: &'a Holds) -> HashSet<&'a str> {
    let initialized =
        |name: &String| state.claims.get(name).is_some_and(|claim| claim.has_condition(conditions::INITIALIZED));
    let holds = holds.by_claim.iter().filter(|(name, _)| initialized(name)).flat_map(|(_, holds)| holds);
    holds.filter(|hold| hold.owner.is_some()).map(|hold| &*hold.original).collect()
}

/// A pod departs when its replacement is ready, or when the rest of the time until the deadline is just enough for it to terminate. The claim is
/// deleted when no other pod is left that a controller creates again.
fn step(
    state: &ClusterState,
    ready: &HashSet<&str>,
    node: Option<&Node>,
    deadline: UnixMillis,
    now: UnixMillis,
) -> Option<Step> {
    let Some(node) = node else { return Some(Step::Delete) };
    let name = node.name_any();
    let is_recreated = |pod: &PodRecord| pod.entry.as_ref().is_ok_and(|entry| entry.owner.is_some());
    let moving =
        state.pods_on(&name).filter(|pod| pod.reschedulable() && pod.deleted_at.is_none() && is_recreated(pod));
    let departs = |pod: &&PodRecord| now >= deadline - pod.grace_period - DRAIN_MARGIN || ready.contains(&*pod.key());
    let (departing, waiting): (Vec<&PodRecord>, Vec<&PodRecord>) = moving.partition(departs);
    if waiting.is_empty() {
        return Some(Step::Delete);
    }
    // Critical pods are the last, and nothing is gained by evictions that are refused.
    let may_be_evicted =
        |pod: &&PodRecord| !pod.critical && !pod.do_not_disrupt && state.pod_budgets.block(pod).is_none();
    let pods: Vec<PodRef> = departing.into_iter().filter(may_be_evicted).map(PodRef::of).collect();
    // Without the taint, a successor could be bound to the same node.
    (!pods.is_empty() && is_tainted(node)).then_some(Step::Evict(pods))
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use stowage_model::labels;
    use stowage_test_objects as objects;

    use super::*;
    use crate::decisions::holds::resolve;

    fn claim(name: &str, id: &str, initialized: bool, annotations: &serde_json::Value) -> NodeClaim {
        let status = objects::launched(id, if initialized { &["Initialized"] } else { &[] });
        objects::claim(name, &json!({"metadata": {"annotations": annotations}, "status": status}))
    }

    fn state(replacement_ready: bool) -> ClusterState {
        let mut state = ClusterState::default();
        state.apply_claim(claim(
            "old",
            "i-1",
            true,
            &json!({(labels::DISRUPTING): "SpotInterruption/1970-01-01T00:02:00Z"}),
        ));
        state.apply_claim(claim("new", "i-2", replacement_ready, &json!({
            (labels::PLANNED_PODS): "[\"n/a\"]", (labels::PLANNED_OWNERS): "{\"n/a\":{\"uid\":\"rs\",\"at_ms\":0}}", (labels::HOLD_UNTIL): "2099-01-01T00:00:00Z"})));
        state.apply_node(
            serde_json::from_value(json!({"metadata": {"name": "node-old"}, "spec": {"providerID": "aws:///z/i-1",
                "taints": [{"key": labels::DISRUPTED_TAINT, "effect": "NoSchedule"}]}}))
            .unwrap(),
        );
        let pod = json!({"metadata": {"name": "a", "namespace": "n", "uid": "a",
            "ownerReferences": [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "rs", "controller": true}]},
            "spec": {"nodeName": "node-old", "terminationGracePeriodSeconds": 30, "containers": [{"name": "c", "image": "i"}]}});
        state.apply_pod(&serde_json::from_value(pod).unwrap(), UnixMillis(1));
        state
    }

    #[test]
    fn an_interrupted_node_waits_for_its_replacement_until_shortly_before_the_deadline() {
        let deleted = |ready: bool, now: i64| {
            let (state, now) = (state(ready), UnixMillis(now));
            assert!(any_marked(&state));
            due(&state, &resolve(&state, now), now).iter().any(|one| one.step == Step::Delete)
        };
        assert!(!deleted(false, 10_000), "the replacement is not ready");
        assert!(deleted(true, 10_000), "the replacement is ready");
        assert!(!deleted(false, 74_999));
        assert!(deleted(false, 75_000), "30 s of grace period and 15 s of margin before the deadline");
    }

    #[test]
    fn f19_each_pod_leaves_when_its_place_is_ready_or_just_in_time_for_its_grace_period() {
        let critical = json!({"spec": {"priorityClassName": "system-cluster-critical"}});
        let protected = json!({"metadata": {"annotations": {(labels::DO_NOT_DISRUPT): "true"}}});
        let grace = |seconds: i64| json!({"spec": {"terminationGracePeriodSeconds": seconds}});
        let terminating = json!({"metadata": {"deletionTimestamp": "1970-01-01T00:01:00Z"}});
        // The replacement of `a` is ready. `b` waits for its own.
        for (case, patch, now, expected) in [
            ("its place is ready", json!({}), 1, "evict a"),
            ("critical pods are the last", critical, 1, "-"),
            ("a protected pod", protected, 1, "-"),
            ("a long grace period", grace(600), 1, "evict a"),
            ("it is evicted", terminating, 1, "-"),
            ("in time for the grace period of b", json!({}), 74, "evict a"),
            ("all are due", json!({}), 75, "delete"),
        ] {
            let mut state = state(true);
            let owner =
                json!([{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "rs", "controller": true}]);
            let meta = json!({"ownerReferences": owner});
            let spec = json!({"nodeName": "node-old", "terminationGracePeriodSeconds": 30});
            let mut a = json!({"metadata": meta, "spec": spec});
            json_patch::merge(&mut a, &patch);
            state.apply_pod(&objects::pod("a", &a), UnixMillis(2));
            state.apply_pod(&objects::pod("b", &json!({"metadata": meta, "spec": spec})), UnixMillis(2));
            let now = UnixMillis(now * 1_000);
            let step = due(&state, &resolve(&state, now), now).pop().map(|one| one.step);
            let text = match step {
                None => "-".to_owned(),
                Some(Step::Delete) => "delete".to_owned(),
                Some(Step::Evict(pods)) => {
                    format!("evict {}", pods.iter().map(|pod| pod.name.clone()).collect::<Vec<_>>().join(" "))
                }
            };
            assert_eq!(text, expected, "{case}");
        }
    }

    #[test]
    fn no_pod_is_evicted_before_the_node_is_tainted() {
        for (taint, expected) in [(labels::DISRUPTED_TAINT, true), ("other", false)] {
            let mut state = state(true);
            let spec = json!({"providerID": "aws:///z/i-1", "taints": [{"key": taint, "effect": "NoSchedule"}]});
            state.apply_node(objects::node("node-old", &json!({"metadata": {"uid": ""}, "spec": spec})));
            let owner =
                json!([{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "x", "controller": true}]);
            state.apply_pod(
                &objects::pod("b", &json!({"metadata": {"ownerReferences": owner}, "spec": {"nodeName": "node-old"}})),
                UnixMillis(2),
            );
            let now = UnixMillis(0);
            assert_eq!(!due(&state, &resolve(&state, now), now).is_empty(), expected, "{taint}");
        }
    }

    #[test]
    fn f19_a_pod_whose_grace_period_is_as_long_as_the_notice_leaves_at_once() {
        for (seconds, expected) in [(105, true), (104, false), (3_600, true)] {
            let mut state = state(false);
            let owner = json!([{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "other", "controller": true}]);
            let spec = json!({"nodeName": "node-old", "terminationGracePeriodSeconds": seconds});
            state.apply_pod(
                &objects::pod("long", &json!({"metadata": {"ownerReferences": owner}, "spec": spec})),
                UnixMillis(2),
            );
            let due = due(&state, &resolve(&state, UnixMillis(0)), UnixMillis(0));
            let evicted: Vec<String> = due
                .into_iter()
                .filter_map(|one| if let Step::Evict(pods) = one.step { Some(pods) } else { None })
                .flatten()
                .map(|pod| pod.name)
                .collect();
            assert_eq!(evicted, if expected { vec!["long".to_owned()] } else { vec![] }, "{seconds} s");
        }
    }

    #[test]
    fn only_claims_that_are_marked_with_a_deadline_and_not_deleted_depart() {
        for (annotations, deletion, departs) in [
            (json!({(labels::DISRUPTING): "SpotInterruption/1970-01-01T00:02:00Z"}), None, true),
            (
                json!({(labels::DISRUPTING): "SpotInterruption/1970-01-01T00:02:00Z"}),
                Some("2026-01-01T00:00:00Z"),
                false,
            ),
            (json!({(labels::DISRUPTING): "Underutilized/"}), None, false),
            (json!({(labels::DISRUPTING): "Empty/"}), None, false),
            (json!({}), None, false),
        ] {
            let mut state = ClusterState::default();
            let meta = json!({"annotations": annotations, "deletionTimestamp": deletion, "finalizers": ["f"]});
            state.apply_claim(objects::claim("c", &json!({"metadata": meta})));
            let due = due(&state, &Holds::default(), UnixMillis(0));
            assert_eq!((due.len(), any_marked(&state)), (usize::from(departs), departs), "{annotations} {deletion:?}");
        }
    }
}
