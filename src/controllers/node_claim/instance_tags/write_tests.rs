use serde_json::json;
use stowage_test_objects::{claim, launched};

use super::*;
use crate::test_support::failures::{World, transcript};
use crate::test_support::kubernetes::FakeApi;
use crate::test_support::scripted_cloud::FakeCloud;

fn world() -> World {
    let api = FakeApi::default();
    for (name, id) in [("a", "i-1"), ("b", "i-2")] {
        let mut status = launched(id, &["Launched"]);
        status["nodeName"] = json!(format!("node-{name}"));
        api.put(&claim(name, &json!({"status": status})));
    }
    World::new(api)
}

async fn pass(ctx: Arc<Context>) -> String {
    let due = untagged(&ctx.cluster.read());
    tag(&ctx, ctx.cloud.capabilities().instance_tagging.unwrap(), &due).await;
    format!("{} due", due.len())
}

#[tokio::test]
async fn tagged_instances_are_noted_under_every_failure() {
    let text = transcript(world, pass).await;
    insta::assert_snapshot!(text, @r#"
    undisturbed: 2 due
      PATCH nodeclaims/a {"metadata":{"annotations":{"compatibility.karpenter.k8s.aws/cluster-name-tagged":"true","karpenter.k8s.aws/tagged":"true"}}}
      PATCH nodeclaims/b {"metadata":{"annotations":{"compatibility.karpenter.k8s.aws/cluster-name-tagged":"true","karpenter.k8s.aws/tagged":"true"}}}
      cloud tag aws:///z/i-1 of a
      cloud tag aws:///z/i-2 of b
      changes nodeclaims/a (metadata.annotations), nodeclaims/b (metadata.annotations)
    again: 0 due, no write, as undisturbed
    PATCH nodeclaims/a
    PATCH nodeclaims/b
    "#);
}

#[tokio::test]
async fn nothing_is_noted_where_the_cloud_refuses_the_tags() {
    let refusal = CloudError::Refused("not allowed".into());
    let world = world().with_cloud(FakeCloud { failure: Some(refusal), ..FakeCloud::default() });
    assert_eq!(pass(world.context()).await, "2 due");
    assert!(world.api.lines().is_empty());
    assert_eq!(world.cloud.calls(), ["tag aws:///z/i-1 of a", "tag aws:///z/i-2 of b"]);
}
