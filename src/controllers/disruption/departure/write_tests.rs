use serde_json::json;
use stowage_api::NodeClaim;
use stowage_model::labels;
use stowage_test_objects::{claim, launched, node, pod};

use super::*;
use crate::test_support::failures::{World, first_turn};
use crate::test_support::kubernetes::{FakeApi, Fault};

/// The interrupted claims c-0 to c-2 with their nodes; their deadline is over.
fn interrupted() -> World {
    let api = FakeApi::default();
    for number in 0..3 {
        let id = format!("i-{number}");
        let meta = json!({"annotations": {(labels::DISRUPTING): "SpotInterruption/2001-01-01T00:00:00Z"},
            "finalizers": [labels::TERMINATION_FINALIZER]});
        let status = launched(&id, &["Launched", "Registered", "Initialized"]);
        api.put(&claim(&format!("c-{number}"), &json!({"metadata": meta, "status": status})));
        let taints = json!([{"key": labels::DISRUPTED_TAINT, "effect": "NoSchedule"}]);
        let spec = json!({"providerID": format!("aws:///z/{id}"), "taints": taints});
        api.put(&node(&format!("x-{number}"), &json!({"spec": spec})));
    }
    World::new(api)
}

fn deleted(world: &World) -> Vec<String> {
    let names = (0..3).map(|number| format!("c-{number}"));
    let deleting = |name: &String| {
        !world.api.stored(&format!("nodeclaims/{name}")).unwrap()["metadata"]["deletionTimestamp"].is_null()
    };
    names.filter(deleting).collect()
}

#[tokio::test]
async fn a_deletion_without_an_answer_delays_no_other_departure() {
    let world = interrupted();
    world.api.inject_on("DELETE nodeclaims/c-0", Fault::NoAnswer);
    first_turn(run(world.context())).await;
    assert_eq!(deleted(&world), ["c-1", "c-2"]);
}

#[tokio::test]
async fn an_event_without_an_answer_delays_no_departure() {
    let world = interrupted();
    world.api.inject(Fault::NoAnswer, usize::MAX, |request| request.key.resource == "events");
    let ctx = world.context();
    let queue = EventQueue::start(&ctx);
    pass(&ctx, &queue, &mut LastEvictions::default()).await;
    assert_eq!(deleted(&world), ["c-0", "c-1", "c-2"]);
}

#[tokio::test]
async fn every_departure_is_reported_on_the_claim_and_its_node() {
    let world = interrupted();
    first_turn(run(world.context())).await;
    let events = world.api.events();
    for number in 0..3 {
        for about in [format!("NodeClaim/c-{number}"), format!("Node/x-{number}")] {
            assert_eq!(events.iter().filter(|event| event.contains(&about)).count(), 1, "{about} in {events:#?}");
        }
    }
}

/// Adds a pod of a ReplicaSet to the node of `c-0`, whose deadline is an hour ahead.
fn with_pods(world: &World, pods: &[(&str, i64)]) {
    let mut later = world.api.stored("nodeclaims/c-0").unwrap();
    let deadline = format!("SpotInterruption/{}", (clock::now() + Duration::from_hours(1)).rfc3339());
    later["metadata"]["annotations"][labels::DISRUPTING] = json!(deadline);
    world.api.put(&serde_json::from_value::<NodeClaim>(later).unwrap());
    for (name, grace) in pods {
        let owner =
            json!([{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": name, "controller": true}]);
        let spec = json!({"nodeName": "x-0", "terminationGracePeriodSeconds": grace});
        world.api.put(&pod(name, &json!({"metadata": {"ownerReferences": owner}, "spec": spec})));
    }
}

#[tokio::test]
async fn f19_a_pod_that_is_due_is_evicted_before_the_others_and_reported() {
    let world = interrupted();
    with_pods(&world, &[("long", 4_000), ("short", 30)]);
    world.api.inject(Fault::NoAnswer, usize::MAX, |request| request.key.resource == "events");
    let ctx = world.context();
    let (queue, mut evicted) = (EventQueue::start(&ctx), LastEvictions::default());
    for _ in 0..3 {
        pass(&ctx, &queue, &mut evicted).await;
    }
    let of_c0 = world.api.lines().into_iter().filter(|line| line.contains("c-0") || line.contains("pods/"));
    assert_eq!(of_c0.collect::<Vec<_>>(), ["POST pods/n/long/eviction"], "once, although the watch lags behind");
    assert_eq!(ctx.metrics.evictions.with_label_values(&["ok"]).get(), 1);
}
