use serde_json::{Value, json};
use stowage_model::labels;
use stowage_model::time::UnixMillis;
use stowage_test_objects as objects;

use super::*;

/// A node of the same name as its claim, with these annotations.
fn put_node(state: &mut ClusterState, name: &str, annotations: &Value) {
    let status = objects::launched(name, &["Initialized"]);
    state.apply_claim(objects::claim(name, &json!({"metadata": {"annotations": annotations}, "status": status})));
    state.apply_node(objects::node(name, &json!({"spec": {"providerID": format!("aws:///z/{name}")}})));
}

/// A pod of the ReplicaSet `web-7d` that surges; it left the ReplicaSet when so many of its pods were ready.
fn put(state: &mut ClusterState, name: &str, node: &str, left: Option<usize>, is_ready: bool) {
    let owner =
        json!([{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "web-7d", "uid": "rs", "controller": true}]);
    let mut meta = json!({"annotations": {(labels::SURGE): "true"}});
    match left {
        None => {
            meta["labels"] = json!({(labels::POD_TEMPLATE_HASH): "7d"});
            meta["ownerReferences"] = owner;
        }
        Some(ready) => {
            let surged = json!({"replica_set": "web-7d", "uid": "rs", "hash": "7d", "ready": ready});
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

/// What the node `a` waits for: each pod that leaves, with the number that is recorded.
fn found(state: &ClusterState) -> String {
    let leaves = |one: &Surging| format!("{} of {}", one.pod.name, one.surge.ready.unwrap());
    match wanted(state, [&*state.claims["a"]]) {
        Wanted::Leave(pods) => format!("leave: {}", pods.iter().map(leaves).collect::<Vec<_>>().join(", ")),
        Wanted::Successors => "successors".into(),
        Wanted::Nothing => "nothing".into(),
    }
}

#[test]
fn pods_leave_and_wait_until_as_many_pods_are_ready_as_before() {
    type Change = fn(&mut ClusterState);
    let old: Change = |state| put(state, "old", "a", None, true);
    let unready: Change = |state| put(state, "unready", "a", None, false);
    let left: Change = |state| put(state, "old", "a", Some(2), true);
    let second: Change = |state| put(state, "second", "a", Some(2), true);
    let elsewhere: Change = |state| put(state, "elsewhere", "b", Some(3), true);
    let sibling: Change = |state| put(state, "sibling", "b", None, true);
    let starts: Change = |state| put(state, "new", "b", None, false);
    let new: Change = |state| put(state, "new", "b", None, true);
    let newer: Change = |state| put(state, "newer", "b", None, true);
    let plain: Change = |state| state.apply_pod(&objects::pod("x", &json!({"spec": {"nodeName": "a"}})), UnixMillis(1));
    let other: Change = |state| {
        let owner =
            json!([{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "o", "uid": "o", "controller": true}]);
        let ready = json!({"conditions": [{"type": "Ready", "status": "True"}]});
        let pod = json!({"metadata": {"ownerReferences": owner}, "spec": {"nodeName": "b"}, "status": ready});
        state.apply_pod(&objects::pod("other", &pod), UnixMillis(1));
    };
    for (case, changes, expected) in [
        ("no pod", vec![], "nothing"),
        ("none surges", vec![plain], "nothing"),
        ("it leaves", vec![old, plain, sibling], "leave: old of 2"),
        ("it is not ready", vec![unready, sibling, other], "leave: unready of 1"),
        ("two leave", vec![old, unready, sibling], "leave: old of 2, unready of 2"),
        ("one leaves while another is away", vec![old, elsewhere, sibling], "leave: old of 2"),
        ("it left", vec![left, sibling], "successors"),
        ("its successor starts", vec![left, sibling, starts], "successors"),
        ("a pod of another ReplicaSet is ready", vec![left, sibling, starts, other], "successors"),
        ("its successor is ready", vec![left, sibling, new], "nothing"),
        ("two left, one successor is ready", vec![left, second, starts, newer], "successors"),
        ("two left, both successors are ready", vec![left, second, new, newer], "nothing"),
        ("one left another node before", vec![left, elsewhere, sibling, new], "successors"),
        ("one left another node before, both are ready", vec![left, elsewhere, sibling, new, newer], "nothing"),
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
        put(&mut state, "old", "a", Some(1), true);
        put(&mut state, "other", "a", None, true);
        assert_eq!(to_return(&state).len(), expected, "{case}");
        // It is back.
        put(&mut state, "old", "a", None, true);
        assert_eq!(to_return(&state).len(), 0, "{case}");
    }
    let mut state = ClusterState::default();
    put(&mut state, "old", "gone", Some(1), true);
    assert_eq!(to_return(&state), [], "its node is gone");
    state.delete_pod("n/old", UnixMillis(2));
    assert!(state.surged.is_empty());
}
