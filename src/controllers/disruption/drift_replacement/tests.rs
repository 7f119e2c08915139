use serde_json::{Value, json};

use super::*;
use crate::test_support::objects;

const READY: &str = r#"{"Launched": "00", "Registered": "00", "Initialized": "00", "Drifted": "05"}"#;

/// A claim with its node; conditions by kind with the second they came.
fn add(state: &mut ClusterState, name: &str, conditions: &str, claim: &Value, node: &Value) {
    let times: BTreeMap<String, String> = serde_json::from_str(conditions).unwrap();
    let list: Vec<Value> = times
        .iter()
        .map(|(kind, at)| json!({"type": kind, "status": "True", "reason": kind, "message": "", "lastTransitionTime": format!("1970-01-01T00:00:{at}Z")}))
        .collect();
    let mut object = json!({"metadata": {"labels": {(labels::NODE_POOL): "p"}},
        "status": {"providerID": format!("aws:///z/{name}"), "conditions": list}});
    json_patch::merge(&mut object, claim);
    state.apply_claim(objects::claim(name, &object));
    let mut object = json!({"spec": {"providerID": format!("aws:///z/{name}")}});
    json_patch::merge(&mut object, node);
    state.apply_node(objects::node(&format!("node-{name}"), &object));
}

fn bind(state: &mut ClusterState, pod: &str, node: &str, annotations: &Value) {
    let owner = json!({"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "rs", "controller": true});
    let object = json!({"metadata": {"annotations": annotations, "ownerReferences": [owner]},
        "spec": {"nodeName": node, "containers": [{"name": "c", "image": "i"}]}});
    state.apply_pod(&objects::pod(pod, &object), 1);
}

fn names(state: &ClusterState) -> Vec<(String, usize, bool)> {
    let all = drifted(state, &state.holds(1_000));
    all.into_iter().map(|found| (found.claim, found.pods, found.obstacle.is_some())).collect()
}

#[test]
fn nodes_that_are_up_and_stay_are_candidates_once_they_have_drifted() {
    let mut state = ClusterState::default();
    let none = json!({});
    let up = r#"{"Launched": "00", "Registered": "00", "Initialized": "00"}"#;
    add(&mut state, "drifted", READY, &none, &none);
    add(&mut state, "sound", up, &none, &none);
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
    let all = drifted(&state, &state.holds(1_000));
    assert_eq!((all[0].since_ms, &*all[0].pool), (5_000, "p"));
}

#[test]
fn a_node_that_room_is_held_on_comes_later() {
    let mut state = ClusterState::default();
    let planned = json!({"metadata": {"annotations": {(labels::PLANNED_PODS): "[\"n/a\"]", (labels::HOLD_UNTIL): "2099-01-01T00:00:00Z"}}});
    add(&mut state, "c", READY, &planned, &json!({}));
    assert_eq!(names(&state).len(), 1);
    let waiting = json!({"metadata": {"name": "a", "namespace": "n", "uid": "a"},
        "spec": {"containers": [{"name": "c", "image": "i"}]}});
    state.apply_pod(&serde_json::from_value(waiting).unwrap(), 1);
    assert_eq!(names(&state), []);
}

#[test]
fn b50_protected_pods_stop_a_replacement_unless_the_drain_has_an_end_and_protected_nodes_always() {
    let guard = json!({(labels::DO_NOT_DISRUPT): "true"});
    let bounded = json!({"spec": {"terminationGracePeriod": "1h"}});
    for (what, claim, pod, node, stopped) in [
        ("nothing protected", json!({}), json!({}), json!({}), false),
        ("a pod", json!({}), guard.clone(), json!({}), true),
        ("a pod whose time is bounded", bounded.clone(), guard.clone(), json!({}), false),
        ("the node", bounded, json!({}), json!({"metadata": {"annotations": guard}}), true),
    ] {
        let mut state = ClusterState::default();
        add(&mut state, "c", READY, &claim, &node);
        bind(&mut state, "a", "node-c", &pod);
        assert_eq!(names(&state), [("c".to_owned(), 1, stopped)], "{what}");
    }
}
