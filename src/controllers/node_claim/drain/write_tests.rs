use std::sync::Arc;

use serde_json::json;
use stowage_model::labels;
use stowage_test_objects::{claim, launched, node, pod};

use super::*;
use crate::test_support::failures::{World, first_turn, outcome, transcript};
use crate::test_support::kubernetes::object_store::Refusal;
use crate::test_support::kubernetes::{FakeApi, Fault};

/// The Node x with a taint, the deleted claim c of it with these annotations, and the pods a and b on the node.
fn world(annotations: &serde_json::Value, taint: &str) -> World {
    let api = FakeApi::default();
    let deleting = json!({"deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": [labels::TERMINATION_FINALIZER],
        "annotations": annotations});
    api.put(&claim("c", &json!({"metadata": deleting, "status": launched("i-1", &["Launched"])})));
    let taints = json!([{"key": taint, "effect": "NoSchedule"}]);
    api.put(&node("x", &json!({"spec": {"providerID": "aws:///z/i-1", "taints": taints}})));
    for name in ["a", "b"] {
        api.put(&pod(name, &json!({"spec": {"nodeName": "x", "terminationGracePeriodSeconds": 30}})));
    }
    api.put(&pod("elsewhere", &json!({"spec": {"nodeName": "y"}})));
    World::new(api)
}

/// One pass of the drain: its error or its progress.
async fn drained(ctx: Arc<Context>) -> String {
    let (claim, node) = {
        let state = ctx.cluster.read();
        (state.claims.get("c").cloned(), state.nodes.get("x").cloned())
    };
    let (Some(claim), Some(node)) = (claim, node) else { return "no claim or no node".into() };
    match drain(&ctx, &claim, &node).await {
        Ok(DrainProgress::InProgress) => "in progress".into(),
        Ok(DrainProgress::Closing) => "closing".into(),
        Ok(DrainProgress::Blocked { .. }) => "blocked".into(),
        error => outcome(error),
    }
}

#[tokio::test]
async fn a_node_is_tainted_under_every_failure() {
    let text = transcript(
        || world(&json!({}), "team"),
        async |ctx| {
            let Some(node) = ctx.cluster.read().nodes.get("x").cloned() else { return "no node".into() };
            outcome(taint(&ctx, &node).await)
        },
    )
    .await;
    insta::assert_snapshot!(text, @r#"
    undisturbed: ok
      PATCH nodes/x [{"op":"test","path":"/metadata/uid","value":"uid-x"},{"op":"test","path":"/metadata/resourceVersion","value":"2"},{"op":"test","path":"/spec/taints","value":[{"effect":"NoSchedule","key":"team"}]},{"op":"replace","path":"/spec/taints","value":[{"effect":"NoSchedule","key":"team"},{"effect":"NoSchedule","key":"karpenter.sh/disrupted"}]},{"op":"add","path":"/metadata/labels","value":{}},{"op":"add","path":"/metadata/labels/node.kubernetes.io~1exclude-from-external-load-balancers","value":"karpenter"}]
      changes nodes/x (metadata.labels spec.taints)
    again: ok, no write, as undisturbed
    PATCH nodes/x
    "#);
}

#[tokio::test]
async fn pods_are_evicted_under_every_failure() {
    let text = transcript(|| world(&json!({}), labels::DISRUPTED_TAINT), drained).await;
    insta::assert_snapshot!(text, @r#"
    undisturbed: in progress
      POST pods/n/a/eviction {"apiVersion":"policy/v1","deleteOptions":{"preconditions":{"uid":"uid-a"}},"kind":"Eviction","metadata":{"name":"a"}}
      POST pods/n/b/eviction {"apiVersion":"policy/v1","deleteOptions":{"preconditions":{"uid":"uid-b"}},"kind":"Eviction","metadata":{"name":"b"}}
      PATCH nodeclaims/c/status {"metadata":{"resourceVersion":"1"},"status":{"conditions":[{"lastTransitionTime":"TIME","message":"","reason":"Launched","status":"True","type":"Launched"},{"lastTransitionTime":"TIME","message":"object is awaiting reconciliation","reason":"AwaitingReconciliation","status":"Unknown","type":"Registered"},{"lastTransitionTime":"TIME","message":"object is awaiting reconciliation","reason":"AwaitingReconciliation","status":"Unknown","type":"Initialized"},{"lastTransitionTime":"TIME","message":"Draining","reason":"Draining","status":"Unknown","type":"Drained"},{"lastTransitionTime":"TIME","message":"Registered=Unknown, Initialized=Unknown","reason":"ReconcilingDependents","status":"Unknown","type":"Ready"}]}}
      event Normal Evicted on Pod/a: node x is being drained
      event Normal Evicted on Pod/b: node x is being drained
      changes nodeclaims/c (status.conditions), pods/n/a (metadata.deletionGracePeriodSeconds metadata.deletionTimestamp), pods/n/b (metadata.deletionGracePeriodSeconds metadata.deletionTimestamp)
    again: in progress, no write, as undisturbed
    POST pods/n/a/eviction
      429, Retry-After 2 s, once: blocked; again: in progress, 1 write, as undisturbed
    POST pods/n/b/eviction
      429, Retry-After 2 s, once: blocked; again: in progress, 1 write, as undisturbed
    PATCH nodeclaims/c/status
    "#);
}

#[tokio::test]
async fn an_event_without_an_answer_delays_no_forced_deletion() {
    let world = world(&json!({(labels::TERMINATION_TIMESTAMP): "2026-01-01T00:00:10Z"}), labels::DISRUPTED_TAINT);
    world.api.inject(Fault::NoAnswer, usize::MAX, |request| request.key.resource == "events");
    let ctx = world.context();
    first_turn(async { drop(drained(ctx).await) }).await;
    let lines = world.api.lines();
    assert_eq!(lines.iter().filter(|line| line.starts_with("DELETE pods/")).count(), 2, "{lines:?}");
}

#[tokio::test]
async fn pods_are_deleted_after_the_deadline_under_every_failure() {
    let over = json!({(labels::TERMINATION_TIMESTAMP): "2026-01-01T00:00:10Z"});
    let text = transcript(|| world(&over, labels::DISRUPTED_TAINT), drained).await;
    insta::assert_snapshot!(text, @r#"
    undisturbed: in progress
      PATCH nodeclaims/c/status {"metadata":{"resourceVersion":"1"},"status":{"conditions":[{"lastTransitionTime":"TIME","message":"","reason":"Launched","status":"True","type":"Launched"},{"lastTransitionTime":"TIME","message":"object is awaiting reconciliation","reason":"AwaitingReconciliation","status":"Unknown","type":"Registered"},{"lastTransitionTime":"TIME","message":"object is awaiting reconciliation","reason":"AwaitingReconciliation","status":"Unknown","type":"Initialized"},{"lastTransitionTime":"TIME","message":"Draining","reason":"Draining","status":"Unknown","type":"Drained"},{"lastTransitionTime":"TIME","message":"Registered=Unknown, Initialized=Unknown","reason":"ReconcilingDependents","status":"Unknown","type":"Ready"}]}}
      DELETE pods/n/a {"gracePeriodSeconds":1,"preconditions":{"uid":"uid-a"}}
      DELETE pods/n/b {"gracePeriodSeconds":1,"preconditions":{"uid":"uid-b"}}
      event Warning Disrupted on Pod/a: deleted with a grace period of 1 s, because the time for the drain of node x ends: PodDisruptionBudgets and karpenter.sh/do-not-disrupt do not hold it up
      event Warning Disrupted on Pod/b: deleted with a grace period of 1 s, because the time for the drain of node x ends: PodDisruptionBudgets and karpenter.sh/do-not-disrupt do not hold it up
      changes nodeclaims/c (status.conditions), pods/n/a (metadata.deletionGracePeriodSeconds metadata.deletionTimestamp), pods/n/b (metadata.deletionGracePeriodSeconds metadata.deletionTimestamp)
    again: in progress, no write, as undisturbed
    PATCH nodeclaims/c/status
    DELETE pods/n/a
      429, Retry-After 2 s, once: in progress; again: in progress, 1 write, as undisturbed
    DELETE pods/n/b
      429, Retry-After 2 s, once: in progress; again: in progress, 1 write, as undisturbed
    "#);
}

#[tokio::test]
async fn a_budget_that_allows_no_eviction_is_reported_and_blocks_the_drain() {
    let world = world(&json!({}), labels::DISRUPTED_TAINT);
    world.api.inject_on("POST pods/n/a/eviction", Fault::Refused(Refusal::disruption_budget()));
    let ctx = world.context();
    assert_eq!(drained(Arc::clone(&ctx)).await, "blocked");
    assert_eq!(ctx.metrics.evictions.with_label_values(&["refused"]).get(), 1);
    assert_eq!(ctx.metrics.evictions.with_label_values(&["ok"]).get(), 1);
    let note = "1 pods can't be evicted now without breaking their PodDisruptionBudget";
    assert_eq!(
        world.api.events(),
        [
            &format!("Warning FailedDraining on NodeClaim/c: {note}"),
            &format!("Warning FailedDraining on Node/x: {note}"),
            "Normal Evicted on Pod/b: node x is being drained",
        ]
    );
    let asked = world.api.lines().iter().filter(|line| *line == "POST pods/n/a/eviction").count();
    assert_eq!(asked, 1, "the client does not repeat what a budget refuses");
}

#[tokio::test]
async fn a_successor_of_the_same_name_is_not_evicted() {
    let world = world(&json!({}), labels::DISRUPTED_TAINT);
    let ctx = world.context();
    world.api.put(&pod("a", &json!({"metadata": {"uid": "uid-successor"}, "spec": {"nodeName": "y"}})));
    assert_eq!(drained(ctx).await, "in progress");
    let of = |path: &str| world.api.stored(path).unwrap()["metadata"]["deletionTimestamp"].clone();
    assert!(of("pods/n/a").is_null(), "it has another UID");
    assert!(of("pods/n/b").is_string() && of("pods/n/elsewhere").is_null());
}

/// The pod of a node that is disrupted has room on the open node y, where its successor need not be bound.
#[tokio::test]
async fn evictions_begin_when_the_nodes_that_could_take_the_successors_are_closed() {
    let deletion = clock::now().rfc3339();
    let disrupted = json!({(labels::DISRUPTING): "Underutilized/"});
    let world = World { watched: true, ..world(&disrupted, labels::DISRUPTED_TAINT) };
    let meta = json!({"deletionTimestamp": deletion, "finalizers": ["f"], "annotations": disrupted});
    world.api.put(&claim("c", &json!({"metadata": meta, "status": launched("i-1", &["Launched"])})));
    let owner = json!({"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "rs", "uid": "rs", "controller": true});
    let owners = json!({"metadata": {"ownerReferences": [owner]}, "spec": {"nodeName": "x"}});
    world.api.put(&pod("a", &owners));
    let plan = json!({(labels::PLANNED_PODS): "[\"n/a\"]", (labels::HOLD_UNTIL): "2099-01-01T00:00:00Z",
        (labels::PLANNED_OWNERS): json!({"n/a": {"uid": "rs", "at_ms": 0}}).to_string()});
    world.api.put(&claim("d", &json!({"metadata": {"annotations": plan}, "status": launched("i-2", &["Launched"])})));
    let open = |taints: &serde_json::Value| {
        let labels = json!({(labels::REGISTERED): "true", (labels::INITIALIZED): "true"});
        let status = json!({"conditions": [{"type": "Ready", "status": "True"}], "allocatable": {"pods": "9"}});
        let spec = json!({"providerID": "aws:///z/i-2", "taints": taints});
        node("y", &json!({"metadata": {"labels": labels}, "spec": spec, "status": status}))
    };
    world.api.put(&open(&json!([])));
    let ctx = world.context();
    let evicted = || world.api.stored("pods/n/a").unwrap()["metadata"]["deletionTimestamp"].is_string();
    assert_eq!((drained(Arc::clone(&ctx)).await, evicted()), ("closing".into(), false));
    let planned = json!([{"key": labels::PLANNED_TAINT, "value": "uid-d", "effect": "NoSchedule"}]);
    ctx.cluster.update(|state| state.apply_node(open(&planned)));
    assert_eq!((drained(ctx).await, evicted()), ("in progress".into(), true));
}

#[tokio::test]
async fn evictions_keep_to_a_rate_unless_the_node_has_a_deadline() {
    let deadline = (clock::now() + Duration::from_hours(1)).rfc3339();
    for (mark, evicted) in [("Drifted/".to_owned(), 50), (format!("SpotInterruption/{deadline}"), 122)] {
        let world = world(&json!({(labels::DISRUPTING): mark}), "team");
        for n in 0..120 {
            let spec = json!({"nodeName": "x", "terminationGracePeriodSeconds": 30});
            world.api.put(&pod(&format!("p{n:03}"), &json!({"spec": spec})));
        }
        let ctx = world.context();
        assert_eq!(drained(Arc::clone(&ctx)).await, "in progress", "{mark}");
        assert_eq!(ctx.metrics.evictions.with_label_values(&["ok"]).get(), evicted, "{mark}");
    }
}

/// A pod that stays takes no part of the rate from others.
#[tokio::test]
async fn refused_evictions_do_not_count_for_the_rate() {
    let world = world(&json!({}), "team");
    for name in ["a", "b"] {
        world.api.inject_on(&format!("POST pods/n/{name}/eviction"), Fault::Refused(Refusal::disruption_budget()));
    }
    let ctx = world.context();
    assert_eq!(drained(Arc::clone(&ctx)).await, "blocked");
    assert_eq!(ctx.caps.admit_evictions(99, 50, clock::now()), 50);
}
