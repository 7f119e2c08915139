//! When a NodeClaim that is marked with a deadline may be deleted.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use kube::ResourceExt;

use crate::api::{NodeClaim, conditions};
use crate::decisions::disruption::mark::DisruptionMark;
use crate::model::time::UnixMillis;
use crate::state::object_ext::{NodeClaimExt, ObjectExt};
use crate::state::plan_record::Holds;
use crate::state::tables::ClusterState;

/// Longest pod grace period that is subtracted from the deadline.
const MAX_GRACE_PERIOD: Duration = Duration::from_mins(1);
/// Duration of a drain in addition to the pods' grace period.
const DRAIN_MARGIN: Duration = Duration::from_secs(15);

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

/// Marked claims that may be deleted, with their marks.
pub fn due(state: &ClusterState, holds: &Holds, now: UnixMillis) -> Vec<(Arc<NodeClaim>, DisruptionMark)> {
    let ready = ready(state, holds);
    let due = marked(state).filter(|(claim, _, deadline)| may_be_deleted(state, &ready, claim, *deadline, now));
    due.map(|(claim, mark, _)| (Arc::clone(claim), mark)).collect()
}

/// Displaced pods whose replacement is ready: a hold on an initialized claim.
fn ready<'a>(state: &ClusterState, holds: &'a Holds) -> HashSet<&'a str> {
    let initialized =
        |name: &String| state.claims.get(name).is_some_and(|claim| claim.has_condition(conditions::INITIALIZED));
    let holds = holds.by_claim.iter().filter(|(name, _)| initialized(name)).flat_map(|(_, holds)| holds);
    holds.filter(|hold| hold.owner.is_some()).map(|hold| &*hold.original).collect()
}

/// Whether a marked claim may be deleted: no pod on its node needs another node, or the replacement of every such pod is ready, or
/// the deadline is near.
fn may_be_deleted(
    state: &ClusterState,
    ready: &HashSet<&str>,
    claim: &NodeClaim,
    deadline: UnixMillis,
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
    now >= deadline - grace - DRAIN_MARGIN || moving.iter().all(|pod| ready.contains(&*pod.key()))
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
