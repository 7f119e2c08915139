use serde_json::json;
use stowage_test_objects::{claim, launched, node};

use super::*;
use crate::test_support::failures::{World, first_turn, transcript};
use crate::test_support::kubernetes::FakeApi;

/// Initialized claims and their nodes; the node of the first one has half of its memory.
fn world(count: usize) -> World {
    let api = FakeApi::default();
    for n in 0..count {
        let id = format!("i-{n:03}");
        let mut status = launched(&id, &["Launched", "Registered", "Initialized"]);
        status["capacity"] = json!({"memory": "16Gi"});
        let spec = json!({"resources": {"requests": {"memory": "1Gi"}}});
        api.put(&claim(&format!("c{n:03}"), &json!({"spec": spec, "status": status})));
        let memory = if n == 0 { "8Gi" } else { "15Gi" };
        let spec = json!({"providerID": format!("aws:///z/{id}")});
        api.put(&node(&format!("x{n:03}"), &json!({"spec": spec, "status": {"capacity": {"memory": memory}}})));
    }
    World { watched: true, ..World::new(api) }
}

fn states(ctx: &Context) -> Vec<String> {
    let state = ctx.cluster.read();
    let conditions =
        state.claims.values().filter_map(|claim| claim.condition(conditions::CONSISTENT_STATE_FOUND).cloned());
    conditions.map(|condition| condition.status).collect()
}

#[tokio::test]
async fn the_condition_of_consistency_is_written_under_every_failure() {
    let text = transcript(
        || world(2),
        async |ctx| {
            let more = pass(&ctx, &mut BTreeSet::new()).await;
            format!("more: {more}")
        },
    )
    .await;
    insta::assert_snapshot!(text, @r#"
    undisturbed: more: false
      PATCH nodeclaims/c000/status {"metadata":{"resourceVersion":"1"},"status":{"conditions":[{"lastTransitionTime":"TIME","message":"","reason":"Launched","status":"True","type":"Launched"},{"lastTransitionTime":"TIME","message":"","reason":"Registered","status":"True","type":"Registered"},{"lastTransitionTime":"TIME","message":"","reason":"Initialized","status":"True","type":"Initialized"},{"lastTransitionTime":"TIME","message":"Consistency Check Failed","reason":"ConsistencyCheckFailed","status":"False","type":"ConsistentStateFound"},{"lastTransitionTime":"TIME","message":"","reason":"Ready","status":"True","type":"Ready"}]}}
      PATCH nodeclaims/c001/status {"metadata":{"resourceVersion":"3"},"status":{"conditions":[{"lastTransitionTime":"TIME","message":"","reason":"Launched","status":"True","type":"Launched"},{"lastTransitionTime":"TIME","message":"","reason":"Registered","status":"True","type":"Registered"},{"lastTransitionTime":"TIME","message":"","reason":"Initialized","status":"True","type":"Initialized"},{"lastTransitionTime":"TIME","message":"","reason":"ConsistentStateFound","status":"True","type":"ConsistentStateFound"},{"lastTransitionTime":"TIME","message":"","reason":"Ready","status":"True","type":"Ready"}]}}
      event Warning FailedConsistencyCheck on NodeClaim/c000: expected 16Gi of resource memory, but found 8Gi (50% of expected)
      changes nodeclaims/c000 (status.conditions), nodeclaims/c001 (status.conditions)
    again: more: false, no write, as undisturbed
    PATCH nodeclaims/c000/status
    PATCH nodeclaims/c001/status
    "#);
}

#[tokio::test]
async fn many_claims_are_written_in_parts_and_a_condition_that_is_current_is_not() {
    let world = world(MAX_WRITES + 3);
    let ctx = world.context();
    first_turn(run(Arc::clone(&ctx))).await;
    assert_eq!(states(&ctx).len(), MAX_WRITES);
    let mut done = BTreeSet::new();
    // The one that is not what was launched is reported in each pass.
    assert!(!pass(&ctx, &mut done).await);
    assert_eq!(done.len(), 4);
    let states = states(&ctx);
    assert_eq!((states.len(), states.iter().filter(|status| *status == "False").count()), (MAX_WRITES + 3, 1));
}
