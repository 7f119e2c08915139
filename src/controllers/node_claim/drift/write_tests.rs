use serde_json::json;

use super::*;
use crate::model::events;
use crate::test_support::failures::{World, outcome, transcript};
use crate::test_support::kubernetes::FakeApi;
use crate::test_support::objects::{claim, launched};

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
      written by another | 409: error 409; again: ok, 1 write, as undisturbed
      404: error 404; again: no claim, no write, differs: -nodeclaims/c
      422: error 422; again: ok, 1 write, as undisturbed
      429, Retry-After 2 s, once: ok, sent 2 times in 2 s; again: ok, no write, as undisturbed
      504: error 504, sent 7 times; again: ok, 1 write, as undisturbed
      no answer: waits forever; again: ok, 1 write, as undisturbed
      lost answer: error connection reset; again: ok, no write, as undisturbed
      crash before: stopped; again: ok, 1 write, as undisturbed
      crash after: stopped; again: ok, no write, as undisturbed
    "#);
}
