//! When a marked NodeClaim may be deleted, and when its mark is removed.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use kube::ResourceExt;

use crate::api::{NodeClaim, conditions};
use crate::decisions::disruption::blockers::budget_block;
use crate::decisions::disruption::mark::DisruptionMark;
use crate::decisions::disruption::reason::DisruptionReason;
use crate::model::time::UnixMillis;
use crate::state::object_ext::{NodeClaimExt, ObjectExt};
use crate::state::plan_record::Holds;
use crate::state::tables::ClusterState;

/// Longest pod grace period that is subtracted from the deadline.
const MAX_GRACE_PERIOD: Duration = Duration::from_mins(1);
/// Duration of a drain in addition to the pods' grace period.
const DRAIN_MARGIN: Duration = Duration::from_secs(15);

/// Marked claims other than those of empty nodes ([`crate::decisions::disruption::marked`]).
fn marked(state: &ClusterState) -> impl Iterator<Item = (&Arc<NodeClaim>, DisruptionMark)> {
    let claims = state.claim_index.leaving.iter().filter_map(|name| state.claims.get(name));
    let claims = claims.filter(|claim| !claim.is_deleting());
    let marked = claims.filter_map(|claim| Some((claim, DisruptionMark::of(claim)?)));
    marked.filter(|(_, mark)| mark.reason != DisruptionReason::Empty)
}

/// Whether [`due`] may find a claim.
pub fn any_marked(state: &ClusterState) -> bool {
    marked(state).next().is_some()
}

/// Marked claims that may be deleted, with their marks.
pub fn due(state: &ClusterState, holds: &Holds, now: UnixMillis) -> Vec<(Arc<NodeClaim>, DisruptionMark)> {
    let ready = ready(state, holds);
    let due = marked(state).filter(|(claim, mark)| may_be_deleted(state, &ready, claim, *mark, now));
    due.map(|(claim, mark)| (Arc::clone(claim), mark)).collect()
}

/// Displaced pods whose replacement is ready: a hold on an initialized claim.
fn ready<'a>(state: &ClusterState, holds: &'a Holds) -> HashSet<&'a str> {
    let initialized =
        |name: &String| state.claims.get(name).is_some_and(|claim| claim.has_condition(conditions::INITIALIZED));
    let holds = holds.by_claim.iter().filter(|(name, _)| initialized(name)).flat_map(|(_, holds)| holds);
    holds.filter(|hold| hold.owner.is_some()).map(|hold| &*hold.original).collect()
}

/// Whether a marked claim may be deleted: no pod on its node needs another node, or the replacement of every such pod is ready, or
/// the deadline is near. Without a deadline, PodDisruptionBudgets must also allow the drain to begin.
fn may_be_deleted(
    state: &ClusterState,
    ready: &HashSet<&str>,
    claim: &NodeClaim,
    mark: DisruptionMark,
    now: UnixMillis,
) -> bool {
    let Some(node) = state.node_of(claim) else { return true };
    let node = node.name_any();
    let moving: Vec<_> = state
        .pods_on(&node)
        .filter(|pod| pod.reschedulable())
        .filter(|pod| pod.entry.as_ref().is_ok_and(|entry| entry.owner.is_some()))
        .collect();
    let grace = moving.iter().map(|pod| pod.grace_period).max().unwrap_or_default().min(MAX_GRACE_PERIOD);
    if mark.deadline.is_some_and(|deadline| now >= deadline - grace - DRAIN_MARGIN) {
        return true;
    }
    // A voluntary drain that PodDisruptionBudgets would refuse at once has time.
    let has_deadline = mark.deadline.is_some() || claim.spec.termination_grace_period.is_some();
    if !has_deadline && budget_block(state, &node).is_some() {
        return false;
    }
    moving.iter().all(|pod| ready.contains(&*pod.key()))
}

/// A mark for this reason is removed when the node's pods have found no other node within this time; `None` for never.
pub fn abandon_after(reason: DisruptionReason) -> Option<Duration> {
    match reason {
        DisruptionReason::Underutilized => Some(Duration::from_mins(5)),
        DisruptionReason::Drifted => Some(Duration::from_mins(10)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::decisions::holds::resolve;
    use crate::model::labels;
    use crate::test_support::objects;

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
            serde_json::from_value(json!({"metadata": {"name": "node-old"}, "spec": {"providerID": "aws:///z/i-1"}}))
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
            !due(&state, &resolve(&state, now), now).is_empty()
        };
        assert!(!deleted(false, 10_000), "the replacement is not ready");
        assert!(deleted(true, 10_000), "the replacement is ready");
        assert!(!deleted(false, 74_999));
        assert!(deleted(false, 75_000), "30 s of grace period and 15 s of margin before the deadline");
    }

    #[test]
    fn a_voluntary_drain_begins_when_budgets_allow_it() {
        for (mark, grace, departs) in [
            ("Drifted/", None, false),
            ("Drifted/", Some("1h"), true),
            ("SpotInterruption/1970-01-01T00:02:00Z", None, true),
        ] {
            let mut state = state(true);
            let mut old = claim("old", "i-1", true, &json!({(labels::DISRUPTING): mark}));
            old.spec.termination_grace_period = grace.map(str::to_owned);
            state.apply_claim(old);
            let now = UnixMillis(10_000);
            let due = |state: &ClusterState| !due(state, &resolve(state, now), now).is_empty();
            let budget = |allowed: i32| {
                let status = json!({"disruptionsAllowed": allowed});
                objects::pod_budget("b", &json!({"spec": {"selector": {}}, "status": status}))
            };
            state.pod_budgets.apply(&budget(0));
            assert_eq!(due(&state), departs, "{mark} {grace:?}");
            state.pod_budgets.apply(&budget(1));
            assert!(due(&state), "{mark} {grace:?}");
        }
    }

    #[test]
    fn unmarked_claims_deleted_claims_and_claims_of_empty_nodes_do_not_depart() {
        for (annotations, deletion, departs) in [
            (json!({(labels::DISRUPTING): "Underutilized/"}), None, true),
            (json!({(labels::DISRUPTING): "Underutilized/"}), Some("2026-01-01T00:00:00Z"), false),
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
