use serde_json::json;

use super::*;
use crate::model::labels;
use crate::test_support::failures::{World, first_turn};
use crate::test_support::kubernetes::{FakeApi, Fault};
use crate::test_support::objects::{claim, launched, node};

/// The interrupted claims c-0 to c-2 with their nodes; their deadline is over.
fn interrupted() -> World {
    let api = FakeApi::default();
    for number in 0..3 {
        let id = format!("i-{number}");
        let meta = json!({"annotations": {(labels::DISRUPTING): "SpotInterruption/2001-01-01T00:00:00Z"},
            "finalizers": [labels::TERMINATION_FINALIZER]});
        let status = launched(&id, &["Launched", "Registered", "Initialized"]);
        api.put(&claim(&format!("c-{number}"), &json!({"metadata": meta, "status": status})));
        api.put(&node(&format!("x-{number}"), &json!({"spec": {"providerID": format!("aws:///z/{id}")}})));
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
    pass(&ctx, &queue).await;
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
