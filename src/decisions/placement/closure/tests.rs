use serde_json::{Value, json};
use stowage_test_objects as objects;

use super::*;
use crate::decisions::disruption::node_facts::FactsCache;
use crate::decisions::holds::resolve;

/// The deletion of the claim `old`.
const DELETED: UnixMillis = UnixMillis(100_000);
const SECOND: Duration = Duration::from_secs(1);

/// The claim and the node `name` with room for `cpu` cores; the claim and the node are merged with patches.
fn put(state: &mut ClusterState, name: &str, cpu: &str, claim: &Value, node: &Value) {
    let mut whole = json!({"status": objects::launched(name, &["Launched", "Initialized"])});
    json_patch::merge(&mut whole, claim);
    state.apply_claim(objects::claim(name, &whole));
    let mut whole = json!({"metadata": {"labels": {(labels::REGISTERED): "true", (labels::INITIALIZED): "true"}},
        "spec": {"providerID": format!("aws:///z/{name}")},
        "status": {"conditions": [{"type": "Ready", "status": "True"}],
            "allocatable": {"cpu": cpu, "memory": "4Gi", "pods": "10"}}});
    json_patch::merge(&mut whole, node);
    state.apply_node(objects::node(&format!("node-{name}"), &whole));
}

fn mark(state: &mut ClusterState, mark: &str, deleted: bool) {
    let deletion = deleted.then(|| DELETED.rfc3339());
    let meta = json!({"annotations": {(labels::DISRUPTING): mark}, "deletionTimestamp": deletion, "finalizers": ["f"]});
    let status = objects::launched("old", &["Launched", "Initialized"]);
    state.apply_claim(objects::claim("old", &json!({"metadata": meta, "status": status})));
}

/// A pod of one core of the ReplicaSet rs.
fn pod(state: &mut ClusterState, name: &str, patch: &Value) {
    let owner = json!({"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "rs", "uid": "rs", "controller": true});
    let container = json!({"name": "c", "resources": {"requests": {"cpu": "1"}}});
    let mut whole = json!({"metadata": {"ownerReferences": [owner], "creationTimestamp": DELETED.rfc3339()},
        "spec": {"containers": [container]}});
    json_patch::merge(&mut whole, patch);
    state.apply_pod(&objects::pod(name, &whole), UnixMillis(1));
}

/// The pod a runs on the node of the deleted claim `old`, and room is kept for its successor on that of the claim `target`.
fn world() -> ClusterState {
    let mut state = ClusterState::default();
    put(&mut state, "old", "4", &json!({}), &json!({}));
    mark(&mut state, "Underutilized/", true);
    let owners = json!({"n/a": {"uid": "rs", "at_ms": 0}}).to_string();
    let plan = json!({(labels::PLANNED_PODS): "[\"n/a\"]", (labels::PLANNED_OWNERS): owners,
        (labels::HOLD_UNTIL): "2099-01-01T00:00:00Z"});
    put(&mut state, "target", "4", &json!({"metadata": {"annotations": plan}}), &json!({}));
    pod(&mut state, "a", &json!({"spec": {"nodeName": "node-old"}}));
    state
}

/// The nodes to close `after` the deletion, as a new process determines them.
fn closed(state: &ClusterState, after: Duration) -> Vec<String> {
    closed_by(&mut Closure::default(), state, after).iter().cloned().collect()
}

fn closed_by(closure: &mut Closure, state: &ClusterState, after: Duration) -> ClosedNodes {
    let now = DELETED + after;
    closure.nodes(state, &resolve(state, now), now, || FactsCache::default().update(state, &[]))
}

#[test]
fn every_open_node_that_could_take_a_moving_pod_is_closed() {
    let mut state = world();
    let dedicated = json!({"spec": {"taints": [{"key": "team", "effect": "NoSchedule"}]}});
    let leaving = json!({"metadata": {"annotations": {(labels::DISRUPTING): "Drifted/"}}});
    let not_ready = json!({"status": {"conditions": [{"type": "Ready", "status": "False"}]}});
    let uninitialized = json!({"metadata": {"labels": {(labels::INITIALIZED): null}}});
    for (name, cpu, claim, node) in [
        ("roomy", "2", json!({}), json!({})),
        ("full", "900m", json!({}), json!({})),
        ("dedicated", "2", json!({}), dedicated),
        ("cordoned", "2", json!({}), json!({"spec": {"unschedulable": true}})),
        ("not-ready", "2", json!({}), not_ready),
        ("new", "2", json!({}), uninitialized),
        ("leaving", "2", leaving, json!({})),
    ] {
        put(&mut state, name, cpu, &claim, &node);
    }
    let status =
        json!({"conditions": [{"type": "Ready", "status": "True"}], "allocatable": {"cpu": "4", "pods": "10"}});
    state.apply_node(objects::node("not-ours", &json!({"status": status})));
    assert_eq!(closed(&state, Duration::ZERO), ["node-roomy", "node-target"]);

    let template = json!({"spec": {"containers": [{"name": "c"}], "nodeSelector": {"disk": "fast"}}});
    let set = json!({"metadata": {"name": "d", "namespace": "n", "uid": "set"}, "spec": {"selector": {}, "template": template}});
    state.apply_daemon_set(&serde_json::from_value(set).unwrap());
    assert_eq!(closed(&state, Duration::ZERO), ["node-roomy", "node-target"]);
    put(&mut state, "roomy", "2", &json!({}), &json!({"metadata": {"labels": {"disk": "fast"}}}));
    assert_eq!(closed(&state, Duration::ZERO), ["node-target"], "it lacks a DaemonSet pod, which comes first");
}

#[test]
fn nodes_are_closed_from_the_deletion_of_a_claim_until_all_successors_are_bound() {
    let mut state = world();
    let none: [&str; 0] = [];
    for (text, deleted, moves) in [
        ("Underutilized/", true, true),
        ("Drifted/", true, true),
        ("Underutilized/", false, false),
        ("Empty/", true, false),
        ("SpotInterruption/2026-01-01T00:02:00Z", true, false),
    ] {
        mark(&mut state, text, deleted);
        assert_eq!(!closed(&state, Duration::ZERO).is_empty(), moves, "{text} {deleted}");
    }
    mark(&mut state, "Underutilized/", true);
    assert_eq!(closed(&state, Duration::from_millis(29_999)), ["node-target"]);
    assert_eq!(closed(&state, Duration::from_secs(30)), none, "a drain may take hours");
    let deletion = json!({"deletionTimestamp": "2099-01-01T00:00:00Z", "finalizers": ["f"]});
    pod(&mut state, "a", &json!({"metadata": deletion, "spec": {"nodeName": "node-old"}}));
    assert_eq!(closed(&state, SECOND), ["node-target"], "its successor is about to be created");
    pod(&mut state, "b", &json!({}));
    assert_eq!(closed(&state, SECOND), ["node-target"], "its successor waits");
    pod(&mut state, "b", &json!({"spec": {"nodeName": "node-target"}}));
    assert_eq!(closed(&state, SECOND), none);
}

#[test]
fn no_node_is_closed_for_pods_that_are_planned_and_do_not_move() {
    let mut state = world();
    pod(&mut state, "a", &json!({"spec": {"nodeName": "node-elsewhere"}}));
    assert!(closed(&state, Duration::ZERO).is_empty(), "its node stays until its replacement is ready");
    let plan = json!({(labels::PLANNED_PODS): "[\"n/new\"]", (labels::HOLD_UNTIL): "2099-01-01T00:00:00Z"});
    put(&mut state, "target", "4", &json!({"metadata": {"annotations": plan}}), &json!({}));
    pod(&mut state, "new", &json!({}));
    assert!(closed(&state, Duration::ZERO).is_empty());
}

/// This many nodes of this prefix with room for `cpu` cores each.
fn put_many(state: &mut ClusterState, prefix: &str, count: usize, cpu: &str) {
    for at in 0..count {
        put(state, &format!("{prefix}{at:04}"), cpu, &json!({}), &json!({}));
    }
}

#[test]
fn no_node_is_closed_if_more_than_a_twentieth_would_have_to_be() {
    let mut state = world();
    let mut count = |roomy: usize, full: usize| {
        put_many(&mut state, "c", roomy + full, "0");
        put_many(&mut state, "c", roomy, "2");
        closed(&state, Duration::ZERO).len()
    };
    assert_eq!(count(FEWEST - 1, 0), FEWEST, "with the target");
    assert_eq!(count(FEWEST, 0), 0);
    assert_eq!(count(FEWEST, FEWEST * FEWEST), FEWEST + 1);
    assert_eq!(count(MOST - 1, 19 * MOST), MOST);
    assert_eq!(count(MOST, 30 * MOST), 0);
}

#[test]
fn where_more_nodes_are_removed_more_are_closed() {
    let mut state = world();
    let marked = |mark: &str| json!({"metadata": {"annotations": {(labels::DISRUPTING): mark}}});
    put_many(&mut state, "c", 2 * FEWEST - 1, "2");
    assert_eq!(closed(&state, Duration::ZERO).len(), 0, "one node is removed");
    for at in 1..FEWEST - 1 {
        put(&mut state, &format!("source{at}"), "2", &marked("Underutilized/"), &json!({}));
    }
    put(&mut state, "empty", "2", &marked("Empty/"), &json!({}));
    put(&mut state, "interrupted", "2", &marked("SpotInterruption/2026-01-01T00:02:00Z"), &json!({}));
    assert_eq!(closed(&state, Duration::ZERO).len(), 0, "no pods move from two of them");
    put(&mut state, "source", "2", &marked("Drifted/"), &json!({}));
    assert_eq!(closed(&state, Duration::ZERO).len(), 2 * FEWEST, "with the target");
    put_many(&mut state, "d", 1, "2");
    assert_eq!(closed(&state, Duration::ZERO).len(), 0);
    let mut long_ago = marked("Drifted/");
    let deletion = json!({"deletionTimestamp": (DELETED - MAX_MOVE).rfc3339(), "finalizers": ["f"]});
    json_patch::merge(&mut long_ago, &json!({"metadata": deletion}));
    for at in 0..FEWEST {
        put(&mut state, &format!("long-ago{at}"), "2", &long_ago, &json!({}));
    }
    assert_eq!(closed(&state, Duration::ZERO).len(), 0, "its pods are no longer waited for");
    for at in 0..MOST_FOR_SOURCES {
        put(&mut state, &format!("more{at}"), "2", &marked("Drifted/"), &json!({}));
    }
    put_many(&mut state, "c", MOST_FOR_SOURCES - 2, "2");
    assert_eq!(closed(&state, Duration::ZERO).len(), MOST_FOR_SOURCES);
    put_many(&mut state, "c", MOST_FOR_SOURCES - 1, "2");
    assert_eq!(closed(&state, Duration::ZERO).len(), 0);
}

#[test]
fn where_too_many_nodes_have_room_those_of_the_pods_with_the_fewest_are_closed() {
    let mut state = world();
    let names = ["a", "large", "memory"];
    for (name, cpu, memory) in [("large", "3", "1Gi"), ("memory", "100m", "9Gi")] {
        let container = json!({"name": "c", "resources": {"requests": {"cpu": cpu, "memory": memory}}});
        pod(&mut state, name, &json!({"spec": {"nodeName": "node-old", "containers": [container]}}));
    }
    let keys = names.map(|name| format!("n/{name}"));
    let owners: serde_json::Map<String, Value> =
        keys.iter().map(|key| (key.clone(), json!({"uid": "rs", "at_ms": 0}))).collect();
    let plan = json!({(labels::PLANNED_PODS): json!(keys).to_string(), (labels::PLANNED_OWNERS): json!(owners).to_string(),
        (labels::HOLD_UNTIL): "2099-01-01T00:00:00Z"});
    let memory = |size: &str| json!({"status": {"allocatable": {"memory": size}}});
    put(&mut state, "target", "9", &json!({"metadata": {"annotations": plan}}), &memory("99Gi"));
    put_many(&mut state, "roomy", FEWEST / 2, "3");
    let put_memory = |state: &mut ClusterState, count: usize| {
        for at in 0..count {
            put(state, &format!("memory{at}"), "500m", &json!({}), &memory("9Gi"));
        }
    };
    put_memory(&mut state, FEWEST / 2 - 1);
    assert_eq!(closed(&state, Duration::ZERO).len(), FEWEST, "all");
    put_memory(&mut state, FEWEST / 2 + 1);
    let closed = closed(&state, Duration::ZERO);
    assert_eq!(closed.len(), FEWEST / 2 + 1, "with the target");
    assert!(closed.iter().all(|name| !name.contains("memory")), "more nodes have room for the pod with much memory");
}

#[test]
fn new_nodes_that_are_closed_already_do_not_count() {
    let mut state = world();
    let taint = |claim: &str| json!({"key": labels::PLANNED_TAINT, "value": format!("uid-{claim}"), "effect": "NoSchedule", "timeAdded": "2025-12-31T23:59:59Z"});
    for at in 0..2 * FEWEST {
        let name = format!("new{at}");
        put(&mut state, &name, "2", &json!({}), &json!({"spec": {"taints": [taint(&name)]}}));
    }
    assert_eq!(closed(&state, Duration::ZERO).len(), 2 * FEWEST + 1, "they stay closed while pods move");
}

#[test]
fn nodes_are_determined_again_every_second_and_when_another_node_drains() {
    let (mut state, mut closure) = (world(), Closure::default());
    assert_eq!(closed_by(&mut closure, &state, Duration::ZERO).len(), 1);
    put(&mut state, "roomy", "2", &json!({}), &json!({}));
    assert_eq!(closed_by(&mut closure, &state, Duration::from_millis(999)).len(), 1);
    assert_eq!(closed_by(&mut closure, &state, SECOND).len(), 2);
    let meta = json!({"annotations": {(labels::DISRUPTING): "Drifted/"}, "deletionTimestamp": DELETED.rfc3339(), "finalizers": ["f"]});
    put(&mut state, "roomy", "2", &json!({"metadata": meta}), &json!({}));
    assert_eq!(closed_by(&mut closure, &state, SECOND).len(), 1);
    state.delete_pod("n/a", UnixMillis(2));
    pod(&mut state, "b", &json!({"spec": {"nodeName": "node-target"}}));
    assert!(closed_by(&mut closure, &state, SECOND).is_empty(), "at once");
}

#[test]
fn evictions_wait_at_most_two_seconds_for_nodes_to_be_closed() {
    let mut state = world();
    let nodes = Arc::new(BTreeSet::from(["node-target".to_owned(), "node-gone".to_owned()]));
    let waits = |state: &ClusterState, now| must_wait(state, &nodes, &state.claims["old"], now);
    assert!(waits(&state, DELETED) && waits(&state, DELETED + MAX_CLOSING - Duration::from_millis(1)));
    assert!(!waits(&state, DELETED + MAX_CLOSING));
    assert!(!waits(&state, DELETED - MAX_CLOSING - SECOND), "the clock of the API server is far ahead");
    assert!(!must_wait(&state, &Arc::default(), &state.claims["old"], DELETED));
    let taint = taint_for(&state, &state.nodes["node-target"], DELETED).unwrap();
    put(&mut state, "target", "4", &json!({}), &json!({"spec": {"taints": [taint]}}));
    assert!(!waits(&state, DELETED), "all are closed");
    mark(&mut state, "SpotInterruption/2026-01-01T00:02:00Z", true);
    put(&mut state, "target", "4", &json!({}), &json!({}));
    assert!(!waits(&state, DELETED), "it has a deadline");
}
