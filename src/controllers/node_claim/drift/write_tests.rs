use serde_json::json;
use stowage_model::events;
use stowage_test_objects::{claim, launched};

use super::*;
use crate::test_support::failures::{World, outcome, transcript};
use crate::test_support::kubernetes::FakeApi;

fn world() -> World {
    let api = FakeApi::default();
    api.put(&claim("c", &json!({"status": launched("i-1", &["Launched"])})));
    api.put(&claim("other", &json!({"status": launched("i-2", &["Launched"])})));
    World::new(api)
}

#[tokio::test]
async fn drift_is_written_under_every_failure() {
    let drift = Drift { event: events::NODE_POOL_DRIFTED, message: "the template changed".into() };
    let text = transcript(world, async |ctx| {
        let Some(claim) = ctx.cluster.read().claims.get("c").cloned() else { return "no claim".into() };
        outcome(write(&ctx, &claim, Some(&drift)).await)
    })
    .await;
    insta::assert_snapshot!(text, @r#"
    undisturbed: ok
      PATCH nodeclaims/c/status {"metadata":{"resourceVersion":"1"},"status":{"conditions":[{"lastTransitionTime":"TIME","message":"","reason":"Launched","status":"True","type":"Launched"},{"lastTransitionTime":"TIME","message":"object is awaiting reconciliation","reason":"AwaitingReconciliation","status":"Unknown","type":"Registered"},{"lastTransitionTime":"TIME","message":"object is awaiting reconciliation","reason":"AwaitingReconciliation","status":"Unknown","type":"Initialized"},{"lastTransitionTime":"TIME","message":"the template changed","reason":"NodePoolDrifted","status":"True","type":"Drifted"},{"lastTransitionTime":"TIME","message":"Registered=Unknown, Initialized=Unknown","reason":"ReconcilingDependents","status":"Unknown","type":"Ready"}]}}
      event Normal NodePoolDrifted on NodeClaim/c: the template changed
      changes nodeclaims/c (status.conditions)
    again: ok, no write, as undisturbed
    PATCH nodeclaims/c/status
    "#);
}
