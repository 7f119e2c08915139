use serde_json::{Value, json};

use super::*;
use crate::model::labels;
use crate::test_support::objects;

/// A node of the same name as its claim, with these annotations.
fn put_node(state: &mut ClusterState, name: &str, annotations: &Value) {
    let status = objects::launched(name, &["Initialized"]);
    state.apply_claim(objects::claim(name, &json!({"metadata": {"annotations": annotations}, "status": status})));
    state.apply_node(objects::node(name, &json!({"spec": {"providerID": format!("aws:///z/{name}")}})));
}

/// A pod of the ReplicaSet `web-7d` that surges, created at this second; it left the ReplicaSet at the second `left`.
fn put(state: &mut ClusterState, name: &str, node: &str, created: i64, left: Option<i64>, is_ready: bool) {
    let owner =
        json!([{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "web-7d", "uid": "rs", "controller": true}]);
    let mut meta = json!({"creationTimestamp": UnixMillis(created * 1_000).rfc3339(),
        "annotations": {(labels::SURGE): "true"}});
    match left {
        None => {
            meta["labels"] = json!({(labels::POD_TEMPLATE_HASH): "7d"});
            meta["ownerReferences"] = owner;
        }
        Some(at) => {
            let surged = json!({"replica_set": "web-7d", "uid": "rs", "hash": "7d", "at_ms": at * 1_000});
            meta["annotations"][labels::SURGED] = json!(surged.to_string());
        }
    }
    let condition = json!({"type": "Ready", "status": if is_ready { "True" } else { "False" }});
    let pod = json!({"metadata": meta, "spec": {"nodeName": node}, "status": {"conditions": [condition]}});
    state.apply_pod(&objects::pod(name, &pod), UnixMillis(1));
}

fn leaving() -> Value {
    json!({(labels::DISRUPTING): "Drifted/"})
}

fn found(state: &ClusterState) -> String {
    match wanted(state, [&*state.claims["a"]]) {
        Wanted::Leave(pods) => {
            format!("leave {}", pods.iter().map(|one| &*one.pod.name).collect::<Vec<_>>().join(" "))
        }
        Wanted::Successors => "successors".into(),
        Wanted::Nothing => "nothing".into(),
    }
}

#[test]
fn pods_leave_and_wait_until_as_many_successors_are_ready() {
    type Change = fn(&mut ClusterState);
    let old: Change = |state| put(state, "old", "a", 1, None, true);
    let left: Change = |state| put(state, "old", "a", 1, Some(100), true);
    let second: Change = |state| put(state, "second", "a", 1, Some(101), true);
    let elsewhere: Change = |state| put(state, "elsewhere", "b", 1, Some(90), true);
    let earlier: Change = |state| put(state, "earlier", "b", 99, None, true);
    let new: Change = |state| put(state, "new", "b", 100, None, true);
    let newer: Change = |state| put(state, "newer", "b", 101, None, true);
    let starts: Change = |state| put(state, "new", "b", 100, None, false);
    let unbound: Change = |state| put(state, "newer", "", 101, None, true);
    let plain: Change = |state| state.apply_pod(&objects::pod("x", &json!({"spec": {"nodeName": "a"}})), UnixMillis(1));
    for (case, changes, expected) in [
        ("no pod", vec![], "nothing"),
        ("none surges", vec![plain], "nothing"),
        ("it leaves", vec![old, plain], "leave old"),
        ("it left", vec![left], "successors"),
        ("its sibling is older", vec![left, earlier], "successors"),
        ("its successor starts", vec![left, starts], "successors"),
        ("its successor is ready", vec![left, new], "nothing"),
        ("two left, one successor is ready", vec![left, second, new], "successors"),
        ("two left, one successor has no node", vec![left, second, new, unbound], "successors"),
        ("two left, both successors are ready", vec![left, second, new, newer], "nothing"),
        ("one left another node, one successor is ready", vec![left, elsewhere, new], "successors"),
        ("one left another node, both are ready", vec![left, elsewhere, new, newer], "nothing"),
    ] {
        let mut state = ClusterState::default();
        put_node(&mut state, "a", &leaving());
        put_node(&mut state, "b", &json!({}));
        for change in changes {
            change(&mut state);
        }
        assert_eq!(found(&state), expected, "{case}");
    }
}

#[test]
fn pods_go_back_where_their_node_stays() {
    for (case, annotations, deletion, expected) in [
        ("it stays", json!({}), None, 1),
        ("it leaves", leaving(), None, 0),
        ("it is deleted", json!({}), Some("2026-01-01T00:00:00Z"), 0),
    ] {
        let mut state = ClusterState::default();
        put_node(&mut state, "a", &annotations);
        if let Some(at) = deletion {
            let meta = json!({"annotations": annotations, "deletionTimestamp": at, "finalizers": ["f"]});
            state.apply_claim(objects::claim("a", &json!({"metadata": meta, "status": objects::launched("a", &[])})));
        }
        put(&mut state, "old", "a", 1, Some(100), true);
        put(&mut state, "other", "a", 1, None, true);
        assert_eq!(to_return(&state).len(), expected, "{case}");
        // It is back.
        put(&mut state, "old", "a", 1, None, true);
        assert_eq!(to_return(&state).len(), 0, "{case}");
    }
    let mut state = ClusterState::default();
    put(&mut state, "old", "gone", 1, Some(100), true);
    assert_eq!(to_return(&state), [], "its node is gone");
    state.delete_pod("n/old", UnixMillis(2));
    assert!(state.surged.is_empty());
}
