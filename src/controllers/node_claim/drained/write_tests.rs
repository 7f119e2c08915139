use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use stowage_model::labels;
use stowage_test_objects::{claim, instance, launched, node, pod};

use super::*;
use crate::test_support::failures::World;
use crate::test_support::kubernetes::{FakeApi, Fault};
use crate::test_support::scripted_cloud::FakeCloud;

/// A deleted claim with its tainted node x, and a process whose watch has delivered no pod yet.
fn world(annotations: &Value) -> (World, Arc<Context>) {
    let api = FakeApi::default();
    let meta = json!({"finalizers": [labels::TERMINATION_FINALIZER], "deletionTimestamp": clock::now().rfc3339(),
        "annotations": annotations});
    api.put(&claim("c", &json!({"metadata": meta, "status": launched("i-1", &["Launched", "Registered"])})));
    let taint = json!({"key": labels::DISRUPTED_TAINT, "effect": "NoSchedule"});
    api.put(&node("x", &json!({"spec": {"providerID": "aws:///z/i-1", "taints": [taint]}})));
    let instances = vec![instance("i-1", "uid-c", 0)];
    let world = World::new(api).with_cloud(FakeCloud { instances: instances.into(), ..FakeCloud::default() });
    let ctx = world.context();
    (world, ctx)
}

async fn confirm(ctx: &Context) -> Result<bool, kube::Error> {
    let (claim, node) = {
        let state = ctx.cluster.read();
        (state.claims["c"].clone(), state.nodes["x"].clone())
    };
    is_drained(ctx, &claim, &node).await
}

fn bound(name: &str, patch: Value) -> k8s_openapi::api::core::v1::Pod {
    let mut spec = json!({"spec": {"nodeName": "x"}});
    json_patch::merge(&mut spec, &patch);
    pod(name, &spec)
}

#[tokio::test]
async fn f9_a_pod_that_the_watch_has_not_delivered_keeps_the_instance_and_is_drained() {
    let (world, ctx) = world(&json!({}));
    world.api.put(&bound("late", json!({})));
    assert!(!confirm(&ctx).await.unwrap());
    assert_eq!(ctx.metrics.drains_resumed.get(), 1);
    assert_eq!(ctx.cluster.read().pods_on("x").count(), 1, "the next step of the claim is Drain");
}

#[tokio::test]
async fn pods_that_no_drain_waits_for_do_not_keep_the_instance_and_a_node_is_listed_once() {
    let (world, ctx) = world(&json!({}));
    let tolerates = json!({"spec": {"tolerations": [{"key": labels::DISRUPTED_TAINT, "operator": "Exists"}]}});
    world.api.put(&bound("tolerates", tolerates));
    world.api.put(&bound("done", json!({"status": {"phase": "Succeeded"}})));
    assert!(confirm(&ctx).await.unwrap() && confirm(&ctx).await.unwrap());
    assert_eq!(world.api.lines(), ["GET pods"]);
}

#[tokio::test]
async fn without_a_list_nothing_is_terminated() {
    let (world, ctx) = world(&json!({}));
    world.api.inject_on("GET pods", Fault::LostAnswer);
    assert!(confirm(&ctx).await.is_err());
    world.api.reset();
    assert!(confirm(&ctx).await.unwrap());
}

#[tokio::test]
async fn forced_termination_and_an_instance_that_is_gone_wait_for_no_pod() {
    let past = (clock::now() - Duration::from_secs(1)).rfc3339();
    let (world_after_deadline, ctx) = world(&json!({(labels::TERMINATION_TIMESTAMP): past}));
    world_after_deadline.api.put(&bound("late", json!({})));
    assert!(confirm(&ctx).await.unwrap());
    assert!(world_after_deadline.api.lines().is_empty());

    let (world_without_instance, ctx) = world(&json!({}));
    world_without_instance.api.put(&bound("late", json!({})));
    stowage_runtime::sync::lock(&world_without_instance.cloud.instances).clear();
    assert!(confirm(&ctx).await.unwrap());
}
