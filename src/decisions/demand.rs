//! Which pods need a node, and which NodePools may launch one.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use kube::ResourceExt;

use crate::api::{NodeClaim, NodePool, conditions};
use crate::decisions::disruption::mark::DisruptionMark;
use crate::model::labels;
use crate::model::pod_class::PodClass;
use crate::model::time::UnixMillis;
use crate::state::object_ext::ObjectExt;
use crate::state::plan_record::Holds;
use crate::state::pods::{PodRecord, Scheduling};
use crate::state::snapshot::Demand;
use crate::state::tables::ClusterState;

/// Whether new nodes of the pool may be launched: it is Ready, not deleted, and not static (`spec.replicas`).
pub fn may_launch(pool: &NodePool) -> bool {
    !pool.is_deleting()
        && pool.spec.replicas.is_none()
        && pool.status.as_ref().is_some_and(|status| conditions::is_true(&status.conditions, conditions::READY))
}

/// A new pod that the scheduler has not attempted for this time waits for something else than the scheduler.
const UNATTEMPTED_PERIOD: Duration = Duration::from_secs(30);
/// As [`UNATTEMPTED_PERIOD`], in a burst: the scheduler is late.
const BURST_PERIOD: Duration = Duration::from_mins(5);

/// Pods that need a node.
pub fn demand(state: &ClusterState, holds: &Holds, now: UnixMillis) -> Demand {
    Demand { pending: pending(state, holds, now), displaced: displaced(state, holds) }
}

/// New pods without a hold that the scheduler has not attempted yet: they are about to need room.
pub fn unattempted(state: &ClusterState, holds: &Holds, now: UnixMillis) -> BTreeSet<String> {
    newer_than(UNATTEMPTED_PERIOD, state, holds, now).map(|(key, _)| key.clone()).collect()
}

fn newer_than<'a>(
    period: Duration,
    state: &'a ClusterState,
    holds: &Holds,
    now: UnixMillis,
) -> impl Iterator<Item = (&'a String, &'a PodRecord)> {
    let is_new = move |pod: &PodRecord| {
        pod.scheduling == Scheduling::Unattempted
            && !pod.daemon
            && !pod.mirror
            && !pod.terminal
            && pod.deleted_at.is_none()
            && pod.entry.is_ok()
            && !pod.first_seen.is_older_than(period, now)
            && state.schedulers.has(pod)
    };
    let unbound = state.unbound.iter().filter(|key| !holds.by_pod.contains_key(*key));
    let pods = unbound.filter_map(|key| Some((key, state.pods.get(key)?)));
    pods.filter(move |(_, pod)| is_new(pod))
}

/// Pods of leaving nodes whose successors have a hold.
pub fn moved_pods(holds: &Holds) -> HashSet<&str> {
    holds.by_claim.values().flatten().filter(|hold| hold.owner.is_some()).map(|hold| &*hold.original).collect()
}

/// Pods without a hold that the scheduler rejected; and, while such pods wait, those that it has not attempted yet because it is late, or that are
/// of the class of a rejected pod. It would reject them, too, one after the other, and each attempt that fails is a write.
fn pending(state: &ClusterState, holds: &Holds, now: UnixMillis) -> BTreeSet<String> {
    let rejected = rejected(state);
    if rejected.is_empty() {
        return BTreeSet::new();
    }
    let class = |pod: &PodRecord| pod.entry.as_ref().map(|entry| Arc::as_ptr(&entry.class)).ok();
    let classes: HashSet<*const PodClass> = rejected.iter().filter_map(|(_, pod)| class(pod)).collect();
    let is_sibling = |pod: &PodRecord| class(pod).is_some_and(|class| classes.contains(&class));
    let in_burst = newer_than(BURST_PERIOD, state, holds, now)
        .filter(|(_, pod)| is_sibling(pod) || state.schedulers.is_late(pod, now));
    let without_hold = rejected.iter().filter(|(key, _)| !holds.by_pod.contains_key(*key)).copied();
    without_hold.chain(in_burst).map(|(key, _)| key.clone()).collect()
}

/// Pods that the scheduler rejected, and for which it makes no room by preemption.
fn rejected(state: &ClusterState) -> Vec<(&String, &PodRecord)> {
    let mut planned: HashMap<&str, BTreeSet<&String>> = HashMap::new();
    let mut out = Vec::new();
    for key in &state.unbound {
        let Some(pod) = state.pods.get(key).filter(|pod| pod.unschedulable() && pod.entry.is_ok()) else {
            continue;
        };
        // A nomination that does not follow a plan is the scheduler's own: it preempts pods on that node.
        let preempting = pod.nominated.as_deref().is_some_and(|node| {
            let has_victims = state.pods_on(node).any(|pod| pod.deleted_at.is_some());
            has_victims
                && !state
                    .nodes
                    .get(node)
                    .and_then(|node| state.claim_of(node))
                    .and_then(|claim| state.planned.get(&claim.name_any()))
                    .is_some_and(|plan| planned.entry(node).or_insert_with(|| plan.pods.iter().collect()).contains(key))
        });
        if !preempting {
            out.push((key, pod));
        }
    }
    out
}

fn displaced(state: &ClusterState, holds: &Holds) -> BTreeSet<String> {
    let mut out = BTreeSet::new();
    let moved = moved_pods(holds);
    let leaving = state.claim_index.leaving.iter().filter_map(|name| state.claims.get(name));
    // A move has planned the pods of its sources itself, and is rolled back if one of them has no room any more.
    let of_move = |claim: &NodeClaim| {
        !claim.is_deleting() && DisruptionMark::of(claim).is_some_and(|mark| mark.deadline.is_none())
    };
    for claim in leaving.filter(|claim| !of_move(claim)) {
        let Some(node) = state.node_of(claim) else { continue };
        // A protected pod, or one whose eviction a PodDisruptionBudget refuses now, stays until then, unless the node has a deadline.
        // A node purchased for it would stay empty.
        let has_deadline = claim.spec.termination_grace_period.is_some()
            || claim.annotations().contains_key(labels::TERMINATION_TIMESTAMP)
            || claim.annotations().get(labels::DISRUPTING).is_some_and(|mark| !mark.ends_with('/'));
        for pod in state.pods_on(&node.name_any()).filter(|pod| pod.reschedulable()) {
            let key = pod.key();
            // A bare pod has no successor.
            let has_owner = pod.entry.as_ref().is_ok_and(|entry| entry.owner.is_some());
            let stays = || pod.do_not_disrupt || state.pod_budgets.block(pod).is_some();
            if has_owner && !moved.contains(&*key) && (has_deadline || !stays()) {
                out.insert(key);
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::test_support::objects;

    /// The claim `c` with this metadata, and its node x.
    fn state(meta: &Value, spec: &Value) -> ClusterState {
        let mut state = ClusterState::default();
        let status = objects::launched("i-1", &[]);
        state.apply_claim(objects::claim("c", &json!({"metadata": meta, "spec": spec, "status": status})));
        state.apply_node(objects::node("x", &json!({"spec": {"providerID": "aws:///z/i-1"}})));
        state
    }

    fn put(state: &mut ClusterState, name: &str, patch: &Value) {
        state.apply_pod(&objects::pod(name, patch), UnixMillis(1));
    }

    fn rejected(nominated: Option<&str>) -> Value {
        let condition = json!({"type": "PodScheduled", "status": "False", "reason": "Unschedulable"});
        json!({"status": {"conditions": [condition], "nominatedNodeName": nominated}})
    }

    #[test]
    fn a_preempting_pod_is_no_demand_unless_a_plan_nominated_it() {
        for (case, nominated, planned, victim, pending) in [
            ("not nominated", None, "[]", true, true),
            ("nominated to a node without victims", Some("x"), "[]", false, true),
            ("nominated to a node with victims", Some("x"), "[]", true, false),
            ("nominated by a plan whose hold is over", Some("x"), "[\"n/a\"]", true, true),
            ("the plan names another pod", Some("x"), "[\"n/b\"]", true, false),
            ("nominated to an unknown node", Some("y"), "[]", true, true),
        ] {
            let mut state = state(&json!({"annotations": {(labels::PLANNED_PODS): planned}}), &json!({}));
            put(&mut state, "a", &rejected(nominated));
            let deletion = victim.then_some("2026-01-01T00:00:00Z");
            put(
                &mut state,
                "running",
                &json!({"metadata": {"deletionTimestamp": deletion}, "spec": {"nodeName": "x"}}),
            );
            let demand = demand(&state, &Holds::default(), UnixMillis(1));
            assert_eq!(demand.pending.contains("n/a"), pending, "{case}");
            assert!(demand.displaced.is_empty(), "{case}");
        }
    }

    #[test]
    fn pods_that_no_scheduler_has_attempted_join_those_of_their_class_that_were_rejected() {
        let of_cpu = |cpu: &str, status: &Value| {
            let container = json!({"name": "c", "resources": {"requests": {"cpu": cpu}}});
            json!({"spec": {"containers": [container]}, "status": status["status"]})
        };
        let pending = |state: &ClusterState, holds: &Holds, at: i64| {
            demand(state, holds, UnixMillis(at)).pending.into_iter().collect::<Vec<_>>().join(" ")
        };
        let (mut state, none) = (ClusterState::default(), Holds::default());
        put(&mut state, "sibling", &of_cpu("1", &json!({})));
        put(&mut state, "other", &of_cpu("2", &json!({})));
        assert_eq!(pending(&state, &none, 1), "", "none was rejected");
        put(&mut state, "a", &of_cpu("1", &rejected(None)));
        assert_eq!(pending(&state, &none, 1), "n/a n/sibling");
        assert_eq!(pending(&state, &none, 300_001), "n/a", "not attempted for five minutes");
        let held = |pod: &str| Holds { by_pod: [(format!("n/{pod}"), "c".to_owned())].into(), ..Holds::default() };
        assert_eq!(pending(&state, &held("sibling"), 1), "n/a");
        assert_eq!(pending(&state, &held("a"), 1), "n/sibling", "the next plan has it, too");
        let mut gated = of_cpu("1", &json!({}));
        gated["spec"]["schedulingGates"] = json!([{"name": "g"}]);
        put(&mut state, "sibling", &gated);
        assert_eq!(pending(&state, &none, 1), "n/a", "it has a gate");
    }

    #[test]
    fn pods_in_the_queue_of_a_late_scheduler_are_planned_with_those_that_it_rejected() {
        let pending = |state: &ClusterState, at: i64| {
            demand(state, &Holds::default(), UnixMillis(at)).pending.into_iter().collect::<Vec<_>>().join(" ")
        };
        let apply = |state: &mut ClusterState, name: &str, cpu: &str, status: &Value, at: i64| {
            let container = json!({"name": "c", "resources": {"requests": {"cpu": cpu}}});
            let pod = json!({"spec": {"containers": [container]}, "status": status["status"]});
            state.apply_pod(&objects::pod(name, &pod), UnixMillis(at));
        };
        let mut state = ClusterState::default();
        for (at, name, cpu) in [(0, "first", "1"), (1, "second", "2"), (2, "third", "3")] {
            apply(&mut state, name, cpu, &json!({}), at);
        }
        apply(&mut state, "first", "1", &rejected(None), 900);
        assert_eq!(pending(&state, 1_000), "n/first");
        assert_eq!(pending(&state, 1_100), "n/first n/second n/third");
        let bound = objects::pod("first", &json!({"spec": {"nodeName": "x"}}));
        state.apply_pod(&bound, UnixMillis(1_200));
        assert_eq!(pending(&state, 1_300), "", "there may be room for them");
    }

    #[test]
    fn a_pod_with_a_hold_is_no_demand() {
        let mut state = state(&json!({}), &json!({}));
        put(&mut state, "a", &rejected(None));
        let holds = Holds { by_pod: [("n/a".to_owned(), "c".to_owned())].into(), ..Holds::default() };
        assert!(demand(&state, &holds, UnixMillis(1)).pending.is_empty());
    }

    #[test]
    fn b26_a_protected_or_blocked_pod_is_displaced_only_when_its_node_has_a_deadline() {
        let marked = |mark: &str| json!({"annotations": {(labels::DISRUPTING): mark}});
        let draining = json!({"annotations": {(labels::DISRUPTING): "Drifted/"},
            "deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": ["f"]});
        let deadline = "SpotInterruption/2026-01-01T00:02:00Z";
        let timestamp = json!({"annotations": {(labels::TERMINATION_TIMESTAMP): "2026-01-01T00:00:00Z"},
            "deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": ["f"]});
        for (case, meta, spec, displaced) in [
            ("not leaving", json!({}), json!({}), &[][..]),
            ("voluntary: its move has planned them", marked("Drifted/"), json!({}), &[]),
            ("voluntary, draining", draining, json!({}), &["n/web"]),
            ("interrupted", marked(deadline), json!({}), &["n/blocked", "n/protected", "n/web"]),
            ("voluntary, with a grace period", marked("Drifted/"), json!({"terminationGracePeriod": "1h"}), &[]),
            ("terminated", timestamp, json!({}), &["n/blocked", "n/protected", "n/web"]),
        ] {
            let mut state = state(&meta, &spec);
            let owner =
                json!({"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "r", "controller": true});
            state
                .pod_budgets
                .apply(&objects::pod_budget("b", &json!({"spec": {"selector": {"matchLabels": {"app": "blocked"}}}})));
            for (name, owners, protected) in [
                ("web", json!([owner]), false),
                ("protected", json!([owner]), true),
                ("blocked", json!([owner]), false),
                ("bare", json!([]), false),
            ] {
                let annotation = if protected { "true" } else { "" };
                let meta = json!({"ownerReferences": owners, "labels": {"app": name},
                    "annotations": {(labels::DO_NOT_DISRUPT): annotation}});
                put(&mut state, name, &json!({"metadata": meta, "spec": {"nodeName": "x"}}));
            }
            let demand = demand(&state, &Holds::default(), UnixMillis(1));
            assert_eq!(demand.displaced.iter().map(String::as_str).collect::<Vec<_>>(), displaced, "{case}");
        }
    }

    #[test]
    fn only_a_ready_pool_that_is_neither_static_nor_deleted_may_launch() {
        let ready = json!({"status": {"conditions": objects::conditions_true(&["Ready"])}});
        let deletion = json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": ["f"]}});
        let fixed = json!({"spec": {"replicas": 3}});
        for (case, patches, launches) in [
            ("ready", vec![&ready], true),
            ("not ready", vec![], false),
            ("deleted", vec![&ready, &deletion], false),
            ("static", vec![&ready, &fixed], false),
        ] {
            let mut patch = json!({});
            for one in patches {
                json_patch::merge(&mut patch, one);
            }
            assert_eq!(may_launch(&objects::node_pool("p", &patch)), launches, "{case}");
        }
    }
}
