use serde_json::{Value, json};
use stowage_model::labels;
use stowage_test_objects::{claim, launched, node, node_pool};

use super::*;
use crate::test_support::failures::{World, first_turn, transcript};
use crate::test_support::kubernetes::{FakeApi, Fault};

/// Nodes of the NodePool `p`; the first ones are not ready for a long time.
fn world(nodes: usize, unhealthy: usize) -> World {
    let api = FakeApi::default();
    api.put(&node_pool("p", &json!({"spec": {"disruption": {"budgets": [{"nodes": "0"}]}}})));
    let meta = json!({"labels": {(labels::NODE_POOL): "p"}, "finalizers": [labels::TERMINATION_FINALIZER]});
    for n in 0..nodes {
        let id = format!("i-{n}");
        let spec = json!({"terminationGracePeriod": "1h"});
        let status = launched(&id, &["Launched", "Registered", "Initialized"]);
        api.put(&claim(&format!("c{n}"), &json!({"metadata": meta, "spec": spec, "status": status})));
        let status = if n < unhealthy { "Unknown" } else { "True" };
        let ready: Value =
            json!({"conditions": [{"type": "Ready", "status": status, "lastTransitionTime": "2026-01-01T00:00:00Z"}]});
        let spec = json!({"providerID": format!("aws:///z/{id}")});
        api.put(&node(&format!("x{n}"), &json!({"spec": spec, "status": ready})));
    }
    World { watched: true, ..World::new(api) }
}

#[tokio::test]
async fn an_unhealthy_node_is_removed_under_every_failure() {
    let text = transcript(
        || world(2, 1),
        async |ctx| {
            pass(&ctx).await;
            "done".into()
        },
    )
    .await;
    insta::assert_snapshot!(text, @r#"
    undisturbed: done
      PATCH nodeclaims/c0 {"metadata":{"annotations":{"karpenter.sh/nodeclaim-termination-timestamp":"TIME"}}}
      DELETE nodeclaims/c0 {"preconditions":{"uid":"uid-c0"}}
      event Warning NodeUnhealthy on NodeClaim/c0: condition Ready is unhealthy since TIME: the node is removed without waiting for its pods
      event Warning NodeUnhealthy on Node/x0: condition Ready is unhealthy since TIME: the node is removed without waiting for its pods
      changes nodeclaims/c0 (metadata.annotations metadata.deletionGracePeriodSeconds metadata.deletionTimestamp)
    again: done, no write, as undisturbed
    PATCH nodeclaims/c0
    DELETE nodeclaims/c0
    "#);
}

#[tokio::test]
async fn an_event_without_an_answer_delays_no_repair() {
    let world = world(10, 2);
    world.api.inject(Fault::NoAnswer, usize::MAX, |request| request.key.resource == "events");
    first_turn(run(world.context())).await;
    let deleted = world.api.lines().iter().filter(|line| line.starts_with("DELETE nodeclaims/")).count();
    assert_eq!(deleted, 2, "{:?}", world.api.lines());
}

#[tokio::test]
async fn unhealthy_nodes_are_left_alone_and_reported_when_they_are_many() {
    let world = world(5, 2);
    let ctx = world.context();
    pass(&ctx).await;
    assert!(world.api.lines().iter().all(|line| !line.contains("nodeclaims")), "{:?}", world.api.lines());
    let note = "NodeRepairBlocked on NodeClaim/c0: unhealthy, but not repaired: 2 of the 5 nodes of its NodePool are unhealthy, more than 20 %";
    let events = world.api.events();
    assert!(events.len() == 4 && events.iter().any(|event| event.contains(note)), "{events:?}");
}

#[tokio::test]
async fn nothing_is_repaired_during_a_pause_beyond_the_cap_or_without_the_feature_gate() {
    for (case, pause, spent, gate, repaired) in [
        ("repaired", "none", 0, true, true),
        ("disruption is paused", "disruption", 0, true, false),
        ("provisioning is paused", "provisioning", 0, true, false),
        ("the cap is reached", "none", 100, true, false),
        ("the feature gate is off", "none", 0, false, false),
    ] {
        let world = world(2, 1);
        let mut ctx = world.context();
        std::sync::Arc::get_mut(&mut ctx).unwrap().settings.node_repair = gate;
        ctx.cluster.update(|state| state.pause = Some(Pause::parse(Some(pause))));
        ctx.caps.admit(Capped::Disruption, spent, 100, clock::now());
        first_turn(run(Arc::clone(&ctx))).await;
        let is_deleting = ctx.cluster.read().claims["c0"].is_deleting();
        assert_eq!(is_deleting, repaired, "{case}");
        assert!(!ctx.cluster.read().claims["c1"].is_deleting(), "{case}");
    }
}
