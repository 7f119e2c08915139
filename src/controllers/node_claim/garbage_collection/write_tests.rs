use serde_json::json;
use stowage_model::labels;
use stowage_model::pause::Pause;
use stowage_test_objects::{claim, instance, launched, node};

use super::*;
use crate::test_support::failures::{World, first_turn, transcript};
use crate::test_support::kubernetes::FakeApi;
use crate::test_support::scripted_cloud::FakeCloud;

/// The leaked instance i-2 with its Node, the claim `orphan` without an instance, the stranded Node `stranded`, and the claim
/// `whole` with instance and Node.
fn world() -> World {
    let api = FakeApi::default();
    let finalizers = json!([labels::TERMINATION_FINALIZER]);
    for (name, id) in [("whole", "i-1"), ("orphan", "i-9")] {
        let patch = json!({"metadata": {"finalizers": finalizers}, "status": launched(id, &["Launched"])});
        api.put(&claim(name, &patch));
    }
    api.put(&node("whole", &json!({"spec": {"providerID": "aws:///z/i-1"}})));
    api.put(&node(
        "leaked",
        &json!({"metadata": {"finalizers": ["other/finalizer"]}, "spec": {"providerID": "aws:///z/i-2"}}),
    ));
    let stranded = json!({"labels": {(labels::NODE_POOL): "p"}, "deletionTimestamp": "2026-01-01T00:00:00Z",
        "finalizers": [labels::TERMINATION_FINALIZER, "other/finalizer"]});
    api.put(&node("stranded", &json!({"metadata": stranded, "spec": {"providerID": "aws:///z/i-8"}})));
    let instances = vec![instance("i-1", "uid-whole", 0), instance("i-2", "unknown", 0)];
    World::new(api).with_cloud(FakeCloud { instances: instances.into(), ..FakeCloud::default() })
}

async fn pass(ctx: Arc<Context>) -> String {
    let (garbage, most) = find(&ctx).await.unwrap();
    let found = (garbage.leaked.len(), garbage.orphaned.len(), garbage.stranded.len());
    collect(&ctx, garbage, most).await;
    format!("leaked, orphaned, stranded {found:?}")
}

#[tokio::test]
async fn garbage_is_cleared_under_every_failure() {
    let text = transcript(world, pass).await;
    insta::assert_snapshot!(text, @r#"
    undisturbed: leaked, orphaned, stranded (1, 1, 1)
      DELETE nodes/leaked {"preconditions":{"uid":"uid-leaked"}}
      DELETE nodeclaims/orphan {"preconditions":{"uid":"uid-orphan"}}
      PATCH nodes/stranded {"metadata":{"finalizers":["other/finalizer"],"resourceVersion":"5"}}
      cloud terminate aws:///z/i-2
      changes nodeclaims/orphan (metadata.deletionGracePeriodSeconds metadata.deletionTimestamp), nodes/leaked (metadata.deletionGracePeriodSeconds metadata.deletionTimestamp), nodes/stranded (metadata.finalizers)
    again: leaked, orphaned, stranded (0, 0, 0), no write, as undisturbed
    DELETE nodes/leaked
    DELETE nodeclaims/orphan
    PATCH nodes/stranded
    "#);
}

#[tokio::test]
async fn an_instance_that_can_not_be_terminated_is_found_again() {
    let failing = FakeCloud {
        instances: vec![instance("i-2", "unknown", 0)].into(),
        failure: Some(CloudError::Throttled),
        ..FakeCloud::default()
    };
    let world = World::new(FakeApi::default()).with_cloud(failing);
    let ctx = world.context();
    for _ in 0..2 {
        assert_eq!(pass(Arc::clone(&ctx)).await, "leaked, orphaned, stranded (1, 0, 0)");
    }
    let counted = ctx.metrics.garbage_collected.with_label_values(&["instance"]).get();
    assert_eq!(counted, 0, "nothing was terminated");
    assert_eq!(world.cloud.calls(), ["terminate aws:///z/i-2", "terminate aws:///z/i-2"]);
}

#[tokio::test]
async fn garbage_is_kept_while_disruption_is_paused() {
    for (paused, calls) in [("disruption", 0), ("provisioning", 1)] {
        let world = world();
        let ctx = world.context();
        ctx.cluster.update(|state| state.pause = Some(Pause::parse(Some(paused))));
        first_turn(run(ctx)).await;
        assert_eq!(world.cloud.calls().len(), calls, "{paused}");
    }
}

#[tokio::test]
async fn instances_beyond_the_cap_are_kept() {
    let world = world();
    let ctx = world.context();
    ctx.admit(Capped::Disruption, ctx.settings.max_disruptions_per_minute).await;
    first_turn(run(ctx)).await;
    assert!(world.cloud.calls().is_empty());
}
