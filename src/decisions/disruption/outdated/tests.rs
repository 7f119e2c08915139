use std::collections::BTreeMap;

use serde_json::{Value, json};
use stowage_model::labels;
use stowage_test_objects as objects;

use super::*;
use crate::decisions::disruption::candidates::candidates;
use crate::decisions::disruption::node_facts::FactsCache;
use crate::decisions::holds::resolve;
use crate::state::pod_budgets::PodBudgets;

const READY: &str = r#"{"Launched": "00", "Registered": "00", "Initialized": "00", "Drifted": "05"}"#;

/// A claim with its node; conditions by type with the second of their transition.
fn add(state: &mut ClusterState, name: &str, conditions: &str, claim: &Value, node: &Value) {
    let times: BTreeMap<String, String> = serde_json::from_str(conditions).unwrap();
    let list: Vec<Value> = times
        .iter()
        .map(|(kind, at)| json!({"type": kind, "status": "True", "reason": kind, "message": "", "lastTransitionTime": format!("1970-01-01T00:00:{at}Z")}))
        .collect();
    let mut patch = json!({"metadata": {"labels": {(labels::NODE_POOL): "p"}},
        "status": {"providerID": format!("aws:///z/{name}"), "conditions": list}});
    json_patch::merge(&mut patch, claim);
    state.apply_claim(objects::claim(name, &patch));
    let mut object =
        json!({"metadata": {"name": format!("node-{name}")}, "spec": {"providerID": format!("aws:///z/{name}")}});
    json_patch::merge(&mut object, node);
    state.apply_node(serde_json::from_value(object).unwrap());
}

fn bind(state: &mut ClusterState, pod: &str, node: &str, annotations: &Value) {
    let object = json!({"metadata": {"name": pod, "namespace": "n", "uid": pod, "annotations": annotations,
            "ownerReferences": [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "rs", "controller": true}]},
        "spec": {"nodeName": node, "containers": [{"name": "c", "image": "i"}]}});
    state.apply_pod(&serde_json::from_value(object).unwrap(), UnixMillis(1));
}

fn names(state: &ClusterState) -> Vec<(String, usize, bool)> {
    names_for(state, DisruptionReason::Drifted, UnixMillis(1_000))
}

fn names_for(state: &ClusterState, reason: DisruptionReason, now: UnixMillis) -> Vec<(String, usize, bool)> {
    let all = outdated(state, &resolve(state, now), PoolKind::Dynamic, reason, now);
    all.into_iter().map(|found| (found.claim, found.pods, found.blocked_by.is_some())).collect()
}

#[test]
fn drifted_nodes_are_candidates_when_initialized_and_not_leaving() {
    let mut state = ClusterState::default();
    let none = json!({});
    let up = r#"{"Launched": "00", "Registered": "00", "Initialized": "00"}"#;
    add(&mut state, "drifted", READY, &none, &none);
    add(&mut state, "current", up, &none, &none);
    add(&mut state, "booting", r#"{"Launched": "00", "Drifted": "05"}"#, &none, &none);
    add(
        &mut state,
        "marked",
        READY,
        &json!({"metadata": {"annotations": {(labels::DISRUPTING): "Underutilized/"}}}),
        &none,
    );
    let deleting = json!({"metadata": {"deletionTimestamp": "1970-01-01T00:00:01Z", "finalizers": [labels::TERMINATION_FINALIZER]}});
    add(&mut state, "deleting", READY, &deleting, &none);
    add(&mut state, "by-hand", READY, &none, &deleting);
    bind(&mut state, "a", "node-drifted", &none);
    assert_eq!(names(&state), [("drifted".to_owned(), 1, false)]);
    let now = UnixMillis(1_000);
    let all = outdated(&state, &resolve(&state, now), PoolKind::Dynamic, DisruptionReason::Drifted, now);
    assert_eq!((all[0].since, &*all[0].pool), (UnixMillis(5_000), "p"));
}

#[test]
fn a_held_node_is_not_a_candidate() {
    let mut state = ClusterState::default();
    let planned = json!({"metadata": {"annotations": {(labels::PLANNED_PODS): "[\"n/a\"]", (labels::HOLD_UNTIL): "2099-01-01T00:00:00Z"}}});
    add(&mut state, "c", READY, &planned, &json!({}));
    assert_eq!(names(&state).len(), 1);
    let waiting = json!({"metadata": {"name": "a", "namespace": "n", "uid": "a"},
        "spec": {"containers": [{"name": "c", "image": "i"}]}});
    state.apply_pod(&serde_json::from_value(waiting).unwrap(), UnixMillis(1));
    assert_eq!(names(&state), []);
}

#[test]
fn b50_budgets_block_a_replacement_unless_the_drain_has_a_deadline() {
    let bounded = json!({"spec": {"terminationGracePeriod": "1h"}});
    for (case, claim, blocked) in [("without a deadline", json!({}), true), ("with a deadline", bounded, false)] {
        let mut state = ClusterState::default();
        add(&mut state, "c", READY, &claim, &json!({}));
        bind(&mut state, "a", "node-c", &json!({}));
        assert_eq!(names(&state), [("c".to_owned(), 1, false)], "{case}");
        state.pod_budgets.apply(&objects::pod_budget("b", &json!({"spec": {"selector": {}}})));
        assert_eq!(names(&state), [("c".to_owned(), 1, blocked)], "{case}");
    }
}

#[test]
fn b50_protected_pods_block_a_replacement_unless_the_drain_has_a_deadline() {
    let protected = json!({(labels::DO_NOT_DISRUPT): "true"});
    let bounded = json!({"spec": {"terminationGracePeriod": "1h"}});
    for (case, claim, pod, node, blocked) in [
        ("nothing protected", json!({}), json!({}), json!({}), false),
        ("a pod", json!({}), protected.clone(), json!({}), true),
        ("a pod, with a terminationGracePeriod", bounded.clone(), protected.clone(), json!({}), false),
        ("the node", bounded, json!({}), json!({"metadata": {"annotations": protected}}), true),
    ] {
        let mut state = ClusterState::default();
        add(&mut state, "c", READY, &claim, &node);
        bind(&mut state, "a", "node-c", &pod);
        assert_eq!(names(&state), [("c".to_owned(), 1, blocked)], "{case}");
    }
}

#[test]
fn a_node_is_outdated_in_the_last_part_of_its_lifetime() {
    let mut state = ClusterState::default();
    let up = r#"{"Launched": "00", "Registered": "00", "Initialized": "00"}"#;
    let claim = |after: &str| json!({"metadata": {"creationTimestamp": "1970-01-01T00:00:00Z"}, "spec": {"expireAfter": after}});
    let none = json!({});
    for (name, conditions, after) in [
        ("old", up, "100s"),
        ("young", up, "10h"),
        ("forever", up, "Never"),
        ("drifted", READY, "100s"),
        ("booting", r#"{"Launched": "00"}"#, "100s"),
    ] {
        add(&mut state, name, conditions, &claim(after), &none);
    }
    let found = |seconds: i64| names_for(&state, DisruptionReason::Expired, UnixMillis(seconds * 1_000));
    assert_eq!([found(89), found(90)], [vec![], vec![("old".to_owned(), 0, false)]]);
    // Its last pods have the rest of the lifetime, whatever the drain may do then.
    for grace in [Value::Null, json!("1h")] {
        let mut claim = claim("100s");
        claim["spec"]["terminationGracePeriod"] = grace;
        add(&mut state, "old", up, &claim, &none);
        let protected = json!({(labels::DO_NOT_DISRUPT): "true"});
        for (case, annotations, budget) in [("protected", &protected, false), ("a budget", &none, true)] {
            bind(&mut state, "a", "node-old", annotations);
            if budget {
                state.pod_budgets.apply(&objects::pod_budget("b", &json!({"spec": {"selector": {}}})));
            }
            let found = names_for(&state, DisruptionReason::Expired, UnixMillis(90_000));
            assert_eq!(found, [("old".to_owned(), 1, true)], "{case} {claim}");
        }
        state.pod_budgets = PodBudgets::default();
    }
}

#[test]
fn nodes_are_replaced_that_nothing_protects_and_whose_budgets_are_open() {
    let now = UnixMillis(95_000);
    let up = r#"{"Launched": "00", "Registered": "00", "Initialized": "00"}"#;
    let closed = json!([{"nodes": "0", "reasons": ["Drifted"]}]);
    let consolidation_closed = json!([{"nodes": "0", "reasons": ["Underutilized"]}, {"nodes": "1"}]);
    for (spec, expected) in [
        (json!({}), vec!["drifted", "old"]),
        (json!({"replicas": 3}), vec!["drifted", "old"]),
        (json!({"disruption": {"budgets": consolidation_closed}}), vec!["drifted", "old"]),
        (json!({"disruption": {"budgets": closed}}), vec![]),
    ] {
        let mut state = ClusterState::default();
        state.apply_pool(objects::node_pool("p", &json!({"spec": spec})));
        let aged = json!({"metadata": {"creationTimestamp": "1970-01-01T00:00:00Z"}, "spec": {"expireAfter": "100s"}});
        let protected = json!({"metadata": {"annotations": {(labels::DO_NOT_DISRUPT): "true"}}});
        for (name, conditions, node) in [
            ("drifted", READY, json!({})),
            ("protected", READY, protected),
            ("old", up, json!({})),
            ("booting", "{}", json!({})),
        ] {
            add(&mut state, name, conditions, &aged, &node);
        }
        add(&mut state, "young", up, &json!({"spec": {"expireAfter": "Never"}}), &json!({}));
        let found = next_to_replace(&state, &resolve(&state, now), now);
        assert_eq!(found.iter().map(String::as_str).collect::<Vec<_>>(), expected, "{spec}");
    }
}

#[test]
fn empty_nodes_are_first_and_then_the_earliest_drift() {
    let node = |claim: &str, since, pods, blocked_by: Option<Blocker>| OutdatedNode {
        claim: claim.into(),
        pool: "p".into(),
        since: UnixMillis(since),
        pods,
        blocked_by,
    };
    let all = [
        node("young", 30, 2, None),
        node("old", 10, 5, None),
        node("empty", 40, 0, None),
        node("protected", 1, 0, Some(Blocker::NodeProtected)),
        node("failed", 5, 1, None),
    ];
    let names = |backed_off: &[&str]| {
        let backed_off = backed_off.iter().map(|name| (*name).to_owned()).collect();
        order(&all, &backed_off).into_iter().map(|found| found.claim.clone()).collect::<Vec<_>>()
    };
    assert_eq!(names(&["failed"]), ["empty", "old", "young"]);
    assert_eq!(names(&[]), ["empty", "failed", "old", "young"]);
}

#[test]
fn f10_nodes_of_static_pools_are_replaced_apart_and_are_no_candidates() {
    let mut state = ClusterState::default();
    add(&mut state, "c", READY, &json!({}), &json!({}));
    let pool = |spec: Value| objects::node_pool("p", &json!({ "spec": spec }));
    state.apply_pool(pool(json!({})));
    assert_eq!(names(&state).len(), 1);
    state.apply_pool(pool(json!({"replicas": 1})));
    assert_eq!(names(&state), []);
    let holds = resolve(&state, UnixMillis(1_000));
    let found = outdated(&state, &holds, PoolKind::Static, DisruptionReason::Drifted, UnixMillis(1_000));
    assert_eq!(found.len(), 1);
    let facts = FactsCache::default().update(&state, &[]);
    assert!(candidates(&state, &holds, &facts).is_empty() && facts.nodes.len() == 1);
}

#[test]
fn any_value_of_do_not_disrupt_protects() {
    for (value, blocked) in [("true", true), ("4h", true), ("yes", true), ("", false), ("false", false)] {
        let annotation = json!({(labels::DO_NOT_DISRUPT): value});
        let mut state = ClusterState::default();
        add(&mut state, "c", READY, &json!({}), &json!({}));
        bind(&mut state, "a", "node-c", &annotation);
        assert_eq!(names(&state), [("c".to_owned(), 1, blocked)], "{value:?} on a pod");
        add(&mut state, "d", READY, &json!({}), &json!({"metadata": {"annotations": annotation}}));
        assert_eq!(names(&state)[1], ("d".to_owned(), 0, blocked), "{value:?} on a Node");
    }
}
