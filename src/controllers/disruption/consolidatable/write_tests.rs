use serde_json::{Value, json};
use stowage_api::conditions;
use stowage_test_objects::{claim, launched, node, node_pool, pod};

use super::*;
use crate::test_support::failures::{World, transcript};
use crate::test_support::kubernetes::FakeApi;

/// The claim `c` of the NodePool `p`, and its node x.
fn world() -> World {
    let api = FakeApi::default();
    api.put(&node_pool("p", &json!({"spec": {"disruption": {"consolidateAfter": "30s"}}})));
    let meta = json!({"labels": {stowage_model::labels::NODE_POOL: "p"}});
    let status = launched("i-1", &["Launched", "Registered", "Initialized"]);
    api.put(&claim("c", &json!({"metadata": meta, "status": status})));
    api.put(&node("x", &json!({"spec": {"providerID": "aws:///z/i-1"}})));
    World { watched: true, ..World::new(api) }
}

/// A pass of a process that has just started, and finds a pod on the node that was bound on 2026-01-02.
async fn first_pass(ctx: &Context) {
    let scheduled = json!([{"type": "PodScheduled", "status": "True", "lastTransitionTime": "2026-01-02T00:00:00Z"}]);
    let pod = pod("a", &json!({"spec": {"nodeName": "x"}, "status": {"conditions": scheduled}}));
    ctx.cluster.update(|state| state.apply_pod(&pod, clock::now()));
    pass(ctx, "", clock::now()).await;
}

fn status(world: &World) -> (Value, bool) {
    let claim = world.api.stored("nodeclaims/c").unwrap();
    let of_type = |one: &&Value| one["type"] == conditions::CONSOLIDATABLE;
    let found = claim["status"]["conditions"].as_array().unwrap().iter().filter(of_type).count();
    (claim["status"]["lastPodEventTime"].clone(), found == 1)
}

#[tokio::test]
async fn a_restart_begins_no_quiet_anew() {
    let world = world();
    let ctx = world.context();
    first_pass(&ctx).await;
    assert_eq!(status(&world), (json!("2026-01-02T00:00:00Z"), true), "since the pod was bound, before the start");
    let ended = clock::now();
    ctx.cluster.update(|state| state.delete_pod("n/a", ended));
    pass(&ctx, "", ended).await;
    assert_eq!(status(&world), (json!(ended.rfc3339()), false));
    // The next leader never saw the pod.
    let (next, quiet) = (world.context(), ended + Duration::from_secs(30));
    for (now, is_consolidatable) in [(ended + Duration::from_secs(28), false), (quiet, true)] {
        pass(&next, "", now).await;
        assert_eq!(status(&world), (json!(ended.rfc3339()), is_consolidatable));
    }
    world.api.reset();
    pass(&next, "x", quiet).await;
    assert_eq!(world.api.lines(), [""; 0], "nothing is written again");
}

#[tokio::test]
async fn the_status_is_written_under_every_failure() {
    let text = transcript(world, async |ctx| {
        first_pass(&ctx).await;
        "done".into()
    })
    .await;
    insta::assert_snapshot!(text, @r#"
    undisturbed: done
      PATCH nodeclaims/c/status {"metadata":{"resourceVersion":"2"},"status":{"conditions":[{"lastTransitionTime":"TIME","message":"","reason":"Launched","status":"True","type":"Launched"},{"lastTransitionTime":"TIME","message":"","reason":"Registered","status":"True","type":"Registered"},{"lastTransitionTime":"TIME","message":"","reason":"Initialized","status":"True","type":"Initialized"},{"lastTransitionTime":"TIME","message":"","reason":"Consolidatable","status":"True","type":"Consolidatable"},{"lastTransitionTime":"TIME","message":"","reason":"Ready","status":"True","type":"Ready"}],"lastPodEventTime":"TIME"}}
      changes nodeclaims/c (status.conditions status.lastPodEventTime)
    again: done, no write, as undisturbed
    PATCH nodeclaims/c/status
    "#);
}
