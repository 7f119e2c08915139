use serde_json::json;
use stowage_model::labels;
use stowage_model::pause::Pause;
use stowage_test_objects::claim;

use super::*;
use crate::test_support::failures::{World, first_turn, transcript};
use crate::test_support::kubernetes::{FakeApi, Fault};

fn world() -> World {
    let api = FakeApi::default();
    let meta = json!({"creationTimestamp": "2026-01-01T00:00:00Z", "finalizers": [labels::TERMINATION_FINALIZER]});
    api.put(&claim("c", &json!({"metadata": meta, "spec": {"expireAfter": "1m"}})));
    api.put(&claim("other", &json!({"metadata": meta, "spec": {"expireAfter": "Never"}})));
    World::new(api)
}

#[tokio::test]
async fn an_event_without_an_answer_does_not_delay_the_deletion() {
    let world = world();
    world.api.inject(Fault::NoAnswer, usize::MAX, |request| request.key.resource == "events");
    first_turn(run(world.context())).await;
    assert_eq!(world.api.lines(), ["DELETE nodeclaims/c"]);
    assert_eq!(world.api.events().len(), 1);
}

#[tokio::test]
async fn an_expired_claim_is_deleted_under_every_failure() {
    let text = transcript(world, async |ctx| {
        first_turn(run(ctx)).await;
        "waits".into()
    })
    .await;
    insta::assert_snapshot!(text, @r#"
    undisturbed: waits
      DELETE nodeclaims/c {"preconditions":{"uid":"uid-c"}}
      event Normal Expired on NodeClaim/c: older than its expireAfter of 1m
      changes nodeclaims/c (metadata.deletionGracePeriodSeconds metadata.deletionTimestamp)
    again: waits, no write, as undisturbed
    DELETE nodeclaims/c
    "#);
}

/// While provisioning is paused, the pods of an expired node would find no other.
#[tokio::test]
async fn nothing_expires_during_a_pause_or_beyond_the_cap() {
    let world = world();
    let ctx = world.context();
    for paused in ["disruption", "provisioning"] {
        ctx.cluster.update(|state| state.pause = Some(Pause::parse(Some(paused))));
        first_turn(run(Arc::clone(&ctx))).await;
        assert!(world.api.lines().is_empty(), "{paused}");
    }
    ctx.cluster.update(|state| state.pause = Some(Pause::default()));
    ctx.admit(Capped::Disruption, ctx.settings.max_disruptions_per_minute).await;
    first_turn(run(Arc::clone(&ctx))).await;
    assert!(world.api.lines().is_empty());
}
