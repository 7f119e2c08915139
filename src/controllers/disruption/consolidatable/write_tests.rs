use serde_json::{Value, json};

use super::*;
use crate::api::conditions;
use crate::test_support::failures::{World, transcript};
use crate::test_support::kubernetes::FakeApi;
use crate::test_support::objects::{claim, launched, node, node_pool, pod};

/// The claim `c` of the NodePool `p`, and its node x with a pod.
fn world() -> World {
    let api = FakeApi::default();
    api.put(&node_pool("p", &json!({"spec": {"disruption": {"consolidateAfter": "30s"}}})));
    let meta = json!({"labels": {crate::model::labels::NODE_POOL: "p"}});
    let status = launched("i-1", &["Launched", "Registered", "Initialized"]);
    api.put(&claim("c", &json!({"metadata": meta, "status": status})));
    api.put(&node("x", &json!({"spec": {"providerID": "aws:///z/i-1"}})));
    let scheduled = json!([{"type": "PodScheduled", "status": "True", "lastTransitionTime": "2026-01-02T00:00:00Z"}]);
    api.put(&pod("a", &json!({"spec": {"nodeName": "x"}, "status": {"conditions": scheduled}})));
    World { watched: true, ..World::new(api) }
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
    pass(&world.context(), "", clock::now()).await;
    assert_eq!(status(&world), (json!("2026-01-02T00:00:00Z"), true), "since the pod was bound, before the first start");
    let ctx = world.context();
    let ended = clock::now();
    ctx.cluster.update(|state| state.delete_pod("n/a", ended));
    pass(&ctx, "", ended).await;
    assert_eq!(status(&world), (json!(ended.rfc3339()), false));
    // The next leader does not know that the pod ended.
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
        pass(&ctx, "", clock::now()).await;
        "done".into()
    })
    .await;
    insta::assert_snapshot!(text, @"");
}
