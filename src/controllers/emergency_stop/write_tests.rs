use serde_json::json;
use stowage_test_objects::node_class;

use super::*;
use crate::test_support::failures::{World, first_turn};
use crate::test_support::kubernetes::FakeApi;

fn world() -> World {
    let api = FakeApi::default();
    api.put(&node_class("default", &json!({})));
    World::new(api)
}

#[tokio::test]
async fn changes_of_the_emergency_stop_are_reported_once() {
    let world = world();
    let ctx = world.context();
    let paused = |scope: &str| ctx.metrics.paused.with_label_values(&[scope]).get();
    first_turn(run(Arc::clone(&ctx))).await;
    assert!(world.api.events().is_empty(), "nothing is paused");
    ctx.cluster.update(|state| state.pause = Some(Pause::parse(Some("disruption"))));
    first_turn(run(Arc::clone(&ctx))).await;
    assert_eq!(
        world.api.events(),
        ["Warning Paused on EC2NodeClass/default: paused by the emergency stop: disruption"]
    );
    assert_eq!((paused("provisioning"), paused("disruption")), (0, 1));
}

/// A pass begins before the pause and ends after it: the planner takes seconds, and a list of instances minutes.
#[tokio::test]
async fn nothing_is_admitted_while_it_is_paused() {
    for (paused, admitted) in [("provisioning", [0, 3]), ("disruption", [3, 0]), ("all", [0, 0]), ("none", [3, 3])] {
        let world = world();
        let ctx = world.context();
        ctx.cluster.update(|state| state.pause = Some(Pause::parse(Some(paused))));
        let both = [ctx.admit(Capped::Purchase, 3).await, ctx.admit(Capped::Disruption, 3).await];
        assert_eq!(both, admitted, "{paused}");
        assert!(world.api.events().is_empty(), "no cap is reached");
    }
}

#[tokio::test]
async fn beyond_the_cap_nothing_is_admitted_and_the_rest_is_reported() {
    let world = world();
    let ctx = world.context();
    let most = ctx.settings.max_purchases_per_minute;
    assert_eq!(ctx.admit(Capped::Purchase, most - 1).await, most - 1);
    assert!(world.api.events().is_empty());
    assert_eq!(ctx.admit(Capped::Purchase, 3).await, 1);
    assert_eq!(ctx.admit(Capped::Purchase, 2).await, 0);
    assert_eq!(ctx.metrics.capped.with_label_values(&["purchase"]).get(), 4);
    assert_eq!(
        world.api.events(),
        [format!(
            "Warning RateCapped on EC2NodeClass/default: the cap of {most} nodes per minute for purchases is reached; the rest waits"
        )]
    );
    assert_eq!(ctx.admit(Capped::Disruption, 1).await, 1, "the caps are separate");
}
