use std::sync::Arc;

use serde_json::{Value, json};
use stowage_test_objects::{claim, launched, node, pod};

use super::*;
use crate::decisions::pod_ref::PodRef;
use crate::state::surging_pods::Surge;
use crate::test_support::failures::{World, transcript};
use crate::test_support::kubernetes::object_store::Refusal;
use crate::test_support::kubernetes::{FakeApi, Fault};

/// A pod of the ReplicaSet `web-7d` that surges on a node that stays; it `left` the ReplicaSet.
fn setup(left: bool) -> World {
    let api = FakeApi::default();
    api.put(&claim("c", &json!({"status": launched("i-1", &["Initialized"])})));
    api.put(&node("node-c", &json!({"spec": {"providerID": "aws:///z/i-1"}})));
    let other = json!({"apiVersion": "v1", "kind": "ConfigMap", "name": "other", "uid": "other"});
    let owner =
        json!({"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "web-7d", "uid": "rs", "controller": true});
    let mut meta =
        json!({"labels": {"app": "web"}, "annotations": {(labels::SURGE): "true"}, "ownerReferences": [other]});
    if left {
        meta["annotations"][labels::SURGED] = json!(json!(surge(Some(1))).to_string());
    } else {
        meta["labels"][labels::POD_TEMPLATE_HASH] = json!("7d");
        meta["ownerReferences"] = json!([other, owner]);
    }
    api.put(&pod("web-1", &json!({"metadata": meta, "spec": {"nodeName": "node-c"}})));
    World { watched: true, ..World::new(api) }
}

fn surge(ready: Option<usize>) -> Surge {
    Surge { replica_set: "web-7d".into(), uid: "rs".into(), hash: "7d".into(), ready }
}

fn stored(world: &World) -> Value {
    world.api.stored("pods/n/web-1").unwrap()["metadata"].clone()
}

async fn released(ctx: Arc<Context>) -> String {
    let pods: Vec<Surging> = {
        let state = ctx.cluster.read();
        let pods = state.pods.values().filter(|pod| pod.will_surge());
        pods.map(|pod| Surging { pod: PodRef::of(pod), surge: surge(Some(1)) }).collect()
    };
    match release(&ctx, &pods).await {
        Ok(()) => "ok".into(),
        Err(why) => why,
    }
}

async fn brought_back(ctx: Arc<Context>) -> String {
    format!("all written: {}", bring_back(&ctx).await)
}

#[tokio::test]
async fn a_pod_leaves_its_replica_set_under_every_failure() {
    insta::assert_snapshot!(transcript(|| setup(false), released).await, @r#"
    undisturbed: ok
      PATCH pods/n/web-1 [{"op":"test","path":"/metadata/uid","value":"uid-web-1"},{"op":"test","path":"/metadata/labels/pod-template-hash","value":"7d"},{"op":"remove","path":"/metadata/labels/pod-template-hash"},{"op":"add","path":"/metadata/annotations/stowage.dev~1surged","value":"{\"hash\":\"7d\",\"ready\":1,\"replica_set\":\"web-7d\",\"uid\":\"rs\"}"}]
      event Normal Surged on Pod/web-1: the pod leaves its ReplicaSet, and its node when its successor is ready
      changes pods/n/web-1 (metadata.annotations metadata.labels)
    again: ok, no write, as undisturbed
    PATCH pods/n/web-1
    "#);
    let world = setup(false);
    released(world.context()).await;
    let meta = stored(&world);
    assert_eq!(meta["labels"], json!({"app": "web"}));
    let left: Surge = serde_json::from_str(meta["annotations"][labels::SURGED].as_str().unwrap()).unwrap();
    assert_eq!(left, surge(Some(1)));
}

#[tokio::test]
async fn a_pod_goes_back_to_its_replica_set_under_every_failure() {
    insta::assert_snapshot!(transcript(|| setup(true), brought_back).await, @r#"
    undisturbed: all written: true
      PATCH pods/n/web-1 {"metadata":{"annotations":{"stowage.dev/surged":null},"labels":{"pod-template-hash":"7d"},"ownerReferences":[{"apiVersion":"v1","kind":"ConfigMap","name":"other","uid":"other"},{"apiVersion":"apps/v1","controller":true,"kind":"ReplicaSet","name":"web-7d","uid":"rs"}],"resourceVersion":"3","uid":"uid-web-1"}}
      changes pods/n/web-1 (metadata.annotations metadata.labels metadata.ownerReferences)
    again: all written: true, no write, as undisturbed
    PATCH pods/n/web-1
    "#);
    let world = setup(true);
    brought_back(world.context()).await;
    let (back, never) = (stored(&world), stored(&setup(false)));
    for key in ["labels", "annotations", "ownerReferences"] {
        assert_eq!(back[key], never[key], "{key}");
    }
}

#[tokio::test]
async fn a_pod_that_may_not_be_written_ends_the_surge_and_is_brought_back_later() {
    let denied = "ValidatingAdmissionPolicy 'p' with binding 'b' denied request: no";
    for refusal in [Refusal::forbidden("a webhook denies it"), Refusal::invalid(denied)] {
        let world = setup(false);
        world.api.inject(Fault::Refused(refusal.clone()), 1, |_| true);
        let why = released(world.context()).await;
        assert!(
            why.starts_with("pod n/web-1 may not leave its ReplicaSet: ") && why.contains(&refusal.message),
            "{why}"
        );
        let world = setup(true);
        world.api.inject(Fault::Refused(refusal), 1, |request| request.method == "PATCH");
        assert_eq!(brought_back(world.context()).await, "all written: false");
    }
}

/// The watch lags behind: a new leader does not know that the pod left.
#[tokio::test]
async fn a_pod_that_left_before_keeps_what_was_recorded_then() {
    let world = World { watched: false, ..setup(false) };
    let (first, second) = (world.context(), world.context());
    assert_eq!(released(first).await, "ok");
    let before = stored(&world);
    assert_eq!(released(second).await, "ok");
    assert_eq!(stored(&world), before);
}
