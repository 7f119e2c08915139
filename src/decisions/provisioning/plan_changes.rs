//! Changes of the plans on existing NodeClaims by a new plan, and of a new plan by what happened while it was made.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use kube::ResourceExt;
use stowage_model::time::UnixMillis;
use stowage_planner::{ExistingNodePlacement, PlannedNode};

use crate::decisions::holds::{HOLD_READY, OwnerKey, has_left, keeps_room, owner_key, pods_of};
use crate::state::plan_record::{MoveTerms, Owner, PlanRecord};
use crate::state::pods::PodRecord;
use crate::state::snapshot::Snapshot;
use crate::state::tables::ClusterState;

/// The claims whose plans name one of these pods: their holds expired, their nodes are leaving, or they are not wanted any more.
pub fn claims_with(state: &ClusterState, pods: &BTreeSet<&str>) -> BTreeSet<String> {
    pods.iter().flat_map(|pod| state.plan_index.claims_of(pod)).cloned().collect()
}

/// Whether the plan of a claim reserves room for one of these pods now, on another node than the pod's own.
pub fn reserves_room(state: &ClusterState, claim: &str, pods: &BTreeSet<&str>, now: UnixMillis) -> bool {
    let (Some(object), Some(plan)) = (state.claims.get(claim), state.planned.get(claim)) else { return false };
    let node = state.node_of(object).map(|node| node.name_any());
    let runs_here =
        |pod: &str| state.pods.get(pod).is_some_and(|pod| pod.node.is_some() && pod.node.as_deref() == node.as_deref());
    let reserved = |pod: &String| pods.contains(&**pod) && plan.until(pod) > now && !runs_here(pod);
    keeps_room(object) && plan.pods.iter().any(reserved)
}

/// Whether a pod of a snapshot, by index, needs the room that a plan gives it: kube-scheduler may have bound it since, or its owner deleted it.
pub fn still_waits(state: &ClusterState, snapshot: &Snapshot, pod: usize) -> bool {
    let planned = &snapshot.problem.pods[pod];
    let waits = |now: &PodRecord| *now.uid == *planned.uid && now.node.is_none() && now.deleted_at.is_none();
    snapshot.displaced.contains(&*planned.key) || state.pods.get(&*planned.key).is_some_and(waits)
}

/// The planned node with those of its pods that still wait; `None` if none does.
pub fn for_waiting_pods<'p>(
    state: &ClusterState,
    snapshot: &Snapshot,
    node: &'p PlannedNode,
) -> Option<Cow<'p, PlannedNode>> {
    let (pods, gone): (Vec<usize>, Vec<usize>) = node.pods.iter().partition(|pod| still_waits(state, snapshot, **pod));
    if gone.is_empty() {
        return Some(Cow::Borrowed(node));
    }
    let mut requests = node.requests.clone();
    for pod in gone {
        requests.sub(&snapshot.problem.pods[pod].class.requests);
    }
    (!pods.is_empty()).then(|| Cow::Owned(PlannedNode { pods, requests, ..node.clone() }))
}

/// The plan of a claim without these pods; `None` when it has none of them.
pub fn without_pods(state: &ClusterState, claim: &str, pods: &BTreeSet<&str>) -> Option<PlanRecord> {
    let mut plan = state.planned.get(claim)?.clone();
    let before = plan.pods.len();
    plan.pods.retain(|pod| !pods.contains(pod.as_str()));
    plan.owners.retain(|pod, _| plan.pods.contains(pod));
    (plan.pods.len() < before).then_some(plan)
}

/// The plan of a claim with the pods of a placement on its node, and the keys of these pods; `None` when the claim has no plan. Its
/// holds end at `hold_until_launched` while it has no Node; those of pods that a move displaces last longer.
pub fn with_placement(
    state: &ClusterState,
    snapshot: &Snapshot,
    claim: &str,
    placement: &ExistingNodePlacement,
    hold_until_launched: UnixMillis,
    of_move: Option<&MoveTerms>,
    now: UnixMillis,
) -> Option<(PlanRecord, Vec<String>)> {
    let mut plan = state.planned.get(claim)?.clone();
    // The Node may have registered since the snapshot.
    let node = state.claims.get(claim).and_then(|claim| state.node_of(claim)).map(|node| node.name_any());
    let hold_until = if node.is_some() { now + HOLD_READY } else { hold_until_launched };
    // Finished and deleted pods need not stay in the list. A pod whose hold here is over and that another claim holds room for, because
    // it could not be withdrawn from this plan, must not get this hold back.
    let active = |pod: &str| state.pods.get(pod).is_some_and(PodRecord::active);
    let moved = |pod: &str| {
        let mut others = state.plan_index.claims_of(pod).filter(|other| *other != claim);
        let expired = plan.until(pod) <= now;
        expired && others.any(|other| state.planned.get(other).is_some_and(|plan| plan.until(pod) > now))
    };
    // A pod that left its old node stays in the list while its successor may wait for the room or run here: it would pass for that of another pod.
    let mut successors: BTreeMap<OwnerKey, usize> = BTreeMap::new();
    let may_be_here = |pod: &&PodRecord| pod.node.is_none() || pod.node.as_deref() == node.as_deref();
    let mut has_successor = |key: OwnerKey| {
        let count = |key: &OwnerKey| pods_of(state, key).filter(may_be_here).count();
        let left = successors.entry(key).or_insert_with_key(count);
        let has_one = *left > 0;
        *left = left.saturating_sub(1);
        has_one
    };
    let mut is_open = |owner: &Owner, pod: &str| {
        plan.until(pod) > now && (!has_left(state, owner) || has_successor(owner_key(pod, owner)))
    };
    let mut kept =
        |pod: &String| (active(pod) || plan.owners.get(pod).is_some_and(|owner| is_open(owner, pod))) && !moved(pod);
    let pods = plan.pods.iter().filter(|pod| kept(pod)).cloned().collect();
    plan.pods = pods;
    plan.owners.retain(|pod, _| plan.pods.contains(pod));
    plan.hold_until = plan.hold_until.max(hold_until);
    let mut added = Vec::new();
    for pod in placement.pods.iter().map(|pod| &snapshot.problem.pods[*pod]) {
        let key = pod.key.to_string();
        if !plan.pods.contains(&key) {
            plan.pods.push(key.clone());
        }
        if let Some(owner) = pod.owner.as_ref().filter(|_| snapshot.displaced.contains(&key)) {
            plan.owners.insert(key.clone(), Owner::of(owner, &key, snapshot.taken_at, of_move));
        }
        added.push(key);
    }
    Some((plan, added))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use stowage_model::labels;
    use stowage_planner::PlanSettings;
    use stowage_test_objects as objects;

    use super::*;
    use crate::decisions::demand::demand;
    use crate::state::snapshot::{SnapshotRequest, take};
    use crate::state::snapshot_cache::SnapshotCache;

    const NOW: UnixMillis = UnixMillis(100_000);

    /// The claim `c` with this plan, whose holds end at `until`, its node, if it is registered, and the pods a and b, of which b is
    /// rejected by the scheduler.
    fn state(pods: &[&str], owners: &Value, until: &str, registered: bool) -> ClusterState {
        let mut state = ClusterState::default();
        let annotations = json!({(labels::PLANNED_PODS): json!(pods).to_string(), (labels::HOLD_UNTIL): until,
            (labels::PLANNED_OWNERS): owners.to_string()});
        let meta = json!({"annotations": annotations});
        state.apply_claim(objects::claim("c", &json!({"metadata": meta, "status": objects::launched("i-1", &[])})));
        if registered {
            state.apply_node(objects::node("x", &json!({"spec": {"providerID": "aws:///z/i-1"}})));
        }
        let rejected = json!([{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}]);
        state.apply_pod(&objects::pod("a", &json!({"spec": {"nodeName": "x"}})), UnixMillis(1));
        state.apply_pod(&objects::pod("b", &json!({"status": {"conditions": rejected}})), UnixMillis(1));
        state
    }

    fn extended(state: &ClusterState) -> (PlanRecord, Vec<String>) {
        let settings = PlanSettings::default();
        let request = SnapshotRequest { pools: &[], settings: &settings, now: NOW };
        let holds = crate::state::plan_record::Holds::default();
        let snapshot = take(state, &holds, demand(state, &holds, NOW), &mut SnapshotCache::default(), request);
        assert_eq!(&*snapshot.problem.pods[0].key, "n/b");
        let placement = ExistingNodePlacement { node: 0, pods: vec![0] };
        with_placement(state, &snapshot, "c", &placement, UnixMillis(400_000), None, NOW).unwrap()
    }

    #[test]
    fn a_plan_is_extended_by_new_pods_and_loses_those_that_are_gone() {
        let owners = json!({"n/displaced": {"uid": "rs", "at_ms": 0}});
        let (late, early) = ("1970-01-01T00:10:00Z", "1970-01-01T00:01:40Z");
        for (case, registered, until, pods, hold_until) in [
            ("booting", false, early, vec!["n/a", "n/b"], 400_000),
            ("registered", true, early, vec!["n/a", "n/b"], 160_000),
            ("a longer hold is kept, and room for successors", true, late, vec!["n/a", "n/displaced", "n/b"], 600_000),
        ] {
            let state = state(&["n/a", "n/displaced", "n/gone"], &owners, until, registered);
            let (plan, added) = extended(&state);
            assert_eq!(plan.pods, pods, "{case}");
            assert_eq!((plan.owners.len(), plan.hold_until.0), (pods.len() - 2, hold_until), "{case}");
            assert_eq!(added, ["n/b"], "{case}");
        }
        assert_eq!(extended(&state(&["n/b"], &json!({}), late, true)).0.pods, ["n/b"], "it is named once");
    }

    #[test]
    fn a_pod_that_left_its_node_stays_planned_while_its_successor_may_come() {
        let moved = json!({"uid": "rs", "at_ms": 0, "until_ms": 600_000, "source": "gone"});
        let owners = json!({"n/moved-1": moved, "n/moved-2": moved});
        let mut state = state(&["n/moved-1", "n/moved-2"], &owners, "1970-01-01T00:01:40Z", true);
        for (node, pods) in
            [(Some("other"), &["n/b"][..]), (None, &["n/moved-1", "n/b"]), (Some("x"), &["n/moved-1", "n/b"])]
        {
            let owner =
                json!([{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "rs", "controller": true}]);
            let pod = json!({"metadata": {"ownerReferences": owner}, "spec": {"nodeName": node}});
            state.apply_pod(&objects::pod("z-successor", &pod), UnixMillis(1));
            let (plan, _) = extended(&state);
            assert_eq!(plan.pods, pods, "the successor is on {node:?}");
        }
    }

    #[test]
    fn a_plan_reserves_room_for_pods_to_come_until_holds_end_or_the_node_leaves() {
        let (late, over) = ("1970-01-01T00:10:00Z", "1970-01-01T00:01:40Z");
        let leaving = |why: &str| json!({"metadata": {"annotations": {(labels::DISRUPTING): why}}});
        let deleted = json!({"metadata": {"deletionTimestamp": late, "finalizers": ["f"]}});
        for (case, pod, registered, until, patch, expected) in [
            ("it waits", "n/b", true, late, json!({}), true),
            ("not named", "n/c", true, late, json!({}), false),
            ("the hold is over", "n/b", true, over, json!({}), false),
            ("it runs there", "n/a", true, late, json!({}), false),
            ("it runs elsewhere", "n/a", false, late, json!({}), true),
            ("interrupted", "n/b", true, late, leaving("SpotInterruption/1970-01-01T00:02:00Z"), false),
            ("an empty node keeps its room", "n/b", true, late, leaving("Empty/"), true),
            ("deleted", "n/b", true, late, deleted, false),
        ] {
            let mut state = state(&["n/a", "n/b"], &json!({}), until, registered);
            let mut claim = serde_json::to_value(&*state.claims["c"]).unwrap();
            json_patch::merge(&mut claim, &patch);
            state.apply_claim(serde_json::from_value(claim).unwrap());
            assert_eq!(reserves_room(&state, "c", &[pod].into(), NOW), expected, "{case}");
        }
    }

    #[test]
    fn a_pod_is_removed_from_the_plans_that_name_it() {
        let owners = json!({"n/a": {"uid": "rs", "at_ms": 0}, "n/b": {"uid": "rs", "at_ms": 0}});
        let state = state(&["n/a", "n/b"], &owners, "1970-01-01T00:10:00Z", true);
        assert!(claims_with(&state, &["n/other"].into()).is_empty());
        assert_eq!(without_pods(&state, "c", &["n/other"].into()), None);
        let pods = ["n/a", "n/other"].into();
        assert_eq!(claims_with(&state, &pods), ["c".to_owned()].into());
        let plan = without_pods(&state, "c", &pods).unwrap();
        assert_eq!((plan.pods.as_slice(), plan.owners.len()), (&["n/b".to_owned()][..], 1));
    }
}
