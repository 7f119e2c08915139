use serde_json::{Value, json};
use stowage_test_objects as objects;

use super::*;

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
        put(&mut state, "running", &json!({"metadata": {"deletionTimestamp": deletion}, "spec": {"nodeName": "x"}}));
        let demand = demand(&state, &Holds::default(), UnixMillis(1));
        assert_eq!(demand.pending.contains("n/a"), pending, "{case}");
        assert!(demand.displaced.is_empty(), "{case}");
    }
}

#[test]
fn unattempted_pods_join_those_of_their_class_that_were_rejected() {
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
    apply(&mut state, "first", "1", &rejected(None), 400);
    assert_eq!(pending(&state, 500), "n/first");
    assert_eq!(pending(&state, 600), "n/first n/second n/third");
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
        let owner = json!({"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "r", "controller": true});
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
