use serde_json::{Value, json};
use stowage_model::labels;
use stowage_model::pause::Pause;
use stowage_test_objects::{catalog, claim, conditions_true, launched, node, node_class, node_pool};

use super::*;
use crate::controllers::static_pools::scale;
use crate::decisions::static_pools::launch_backoff::LaunchBackoff;
use crate::decisions::static_pools::replicas::Size;
use crate::test_support::failures::{World, transcript};
use crate::test_support::kubernetes::FakeApi;
use crate::test_support::scripted_cloud::FakeCloud;

/// The static NodePool `p` with two drifted nodes.
fn world(budget: &str) -> World {
    let api = FakeApi::default();
    let ready = json!({"conditions": conditions_true(&["Ready"])});
    api.put(&node_class("default", &json!({"status": ready})));
    let spec = json!({"replicas": 2, "disruption": {"budgets": [{"nodes": budget}]}});
    api.put(&node_pool("p", &json!({"spec": spec, "status": ready})));
    let meta = json!({"labels": {(labels::NODE_POOL): "p"}, "finalizers": [labels::TERMINATION_FINALIZER]});
    for name in ["c", "d"] {
        let status = launched(name, &["Launched", "Registered", "Initialized", "Drifted"]);
        api.put(&claim(name, &json!({"metadata": meta, "status": status})));
        let ready = json!({"conditions": [{"type": "Ready", "status": "True"}]});
        let spec = json!({"providerID": format!("aws:///z/{name}")});
        api.put(&node(name, &json!({"spec": spec, "status": ready})));
    }
    let cloud = FakeCloud { catalog: Arc::new(catalog()), ..FakeCloud::default() };
    World { watched: true, ..World::new(api).with_cloud(cloud) }
}

fn size(ctx: &Context) -> (usize, usize) {
    let size = Size::of(&ctx.cluster.read(), "p");
    (size.replicas.len(), size.existing)
}

/// A turn of both loops.
async fn scale_and_replace(ctx: Arc<Context>) -> String {
    scale::pass(&ctx, &mut LaunchBackoff::default()).await;
    let begun = begin(&ctx, DisruptionReason::Drifted, &BTreeSet::new()).await;
    let (replicas, existing) = size(&ctx);
    format!("{begun} begun, {replicas} replicas, {existing} claims")
}

#[tokio::test]
async fn a_drifted_node_gets_its_replacement_under_every_failure() {
    let text = transcript(|| world("1"), scale_and_replace).await;
    insta::assert_snapshot!(text, @r#"
    undisturbed: 1 begun, 2 replicas, 3 claims
      POST nodeclaims {"apiVersion":"karpenter.sh/v1","kind":"NodeClaim","metadata":{"annotations":{"karpenter.sh/nodepool-hash":"6821555240594823858","karpenter.sh/nodepool-hash-version":"v3"},"finalizers":["karpenter.sh/termination"],"generateName":"p-","labels":{"karpenter.k8s.aws/ec2nodeclass":"default","karpenter.sh/nodepool":"p"},"name":"p-1","ownerReferences":[{"apiVersion":"karpenter.sh/v1","blockOwnerDeletion":true,"kind":"NodePool","name":"p","uid":"uid-p"}]},"spec":{"expireAfter":"720h","nodeClassRef":{"group":"karpenter.k8s.aws","kind":"EC2NodeClass","name":"default"},"requirements":[]}}
      PATCH nodeclaims/c {"metadata":{"annotations":{"stowage.dev/disrupting":"Drifted/","stowage.dev/move":"{\"at\":\"TIME\",\"give_up\":\"TIME\",\"id\":\"c/TIME\",\"replaced_by\":\"p-1\",\"sources\":[\"c\"],\"usd_per_hour\":0.0}"},"resourceVersion":"3"}}
      PATCH nodes/c [{"op":"test","path":"/metadata/uid","value":"uid-c"},{"op":"test","path":"/metadata/resourceVersion","value":"4"},{"op":"add","path":"/spec/taints","value":[{"effect":"NoSchedule","key":"karpenter.sh/disrupted"}]},{"op":"add","path":"/metadata/labels","value":{}},{"op":"add","path":"/metadata/labels/node.kubernetes.io~1exclude-from-external-load-balancers","value":"karpenter"}]
      event Normal DisruptionTerminating on NodeClaim/c: disrupting node: Drifted
      changes nodeclaims/c (metadata.annotations), +nodeclaims/p-1, nodes/c (metadata.labels spec.taints)
    again: 0 begun, 2 replicas, 3 claims, no write, as undisturbed
    POST nodeclaims
      crash after: stopped; again: 1 begun, 2 replicas, 4 claims, 4 writes, differs: nodeclaims/c (metadata.annotations), nodeclaims/p-1 (metadata.deletionGracePeriodSeconds metadata.deletionTimestamp), +nodeclaims/p-2
    PATCH nodeclaims/c
      409: 1 begun, 3 replicas, 3 claims, sent 8 times; again: 1 begun, 2 replicas, 4 claims, 4 writes, differs: nodeclaims/c (metadata.annotations), nodeclaims/p-1 (metadata.deletionGracePeriodSeconds metadata.deletionTimestamp), +nodeclaims/p-2
      404: 1 begun, 2 replicas, 2 claims; again: 1 begun, 2 replicas, 3 claims, 3 writes, differs: nodeclaims/d (metadata.annotations), +nodeclaims/p-2, nodes/c (metadata.labels spec.taints), nodes/d (metadata.labels spec.taints), -nodeclaims/c
      422: 1 begun, 3 replicas, 3 claims; again: 1 begun, 2 replicas, 4 claims, 4 writes, differs: nodeclaims/c (metadata.annotations), nodeclaims/p-1 (metadata.deletionGracePeriodSeconds metadata.deletionTimestamp), +nodeclaims/p-2
      504: 1 begun, 3 replicas, 3 claims, sent 7 times; again: 1 begun, 2 replicas, 4 claims, 4 writes, differs: nodeclaims/c (metadata.annotations), nodeclaims/p-1 (metadata.deletionGracePeriodSeconds metadata.deletionTimestamp), +nodeclaims/p-2
      no answer: waits forever; again: 1 begun, 2 replicas, 4 claims, 4 writes, differs: nodeclaims/c (metadata.annotations), nodeclaims/p-1 (metadata.deletionGracePeriodSeconds metadata.deletionTimestamp), +nodeclaims/p-2
      lost answer: 1 begun, 2 replicas, 3 claims; again: 0 begun, 2 replicas, 3 claims, no write, differs: nodes/c (metadata.labels spec.taints)
      crash before: stopped; again: 1 begun, 2 replicas, 4 claims, 4 writes, differs: nodeclaims/c (metadata.annotations), nodeclaims/p-1 (metadata.deletionGracePeriodSeconds metadata.deletionTimestamp), +nodeclaims/p-2
      crash after: stopped; again: 0 begun, 2 replicas, 3 claims, no write, differs: nodes/c (metadata.labels spec.taints)
    PATCH nodes/c
      409: 1 begun, 2 replicas, 3 claims, sent 8 times; again: 0 begun, 2 replicas, 3 claims, no write, differs: nodes/c (metadata.labels spec.taints)
      422: 1 begun, 2 replicas, 3 claims; again: 0 begun, 2 replicas, 3 claims, no write, differs: nodes/c (metadata.labels spec.taints)
      504: 1 begun, 2 replicas, 3 claims, sent 7 times; again: 0 begun, 2 replicas, 3 claims, no write, differs: nodes/c (metadata.labels spec.taints)
      no answer: waits forever; again: 0 begun, 2 replicas, 3 claims, no write, differs: nodes/c (metadata.labels spec.taints)
      crash before: stopped; again: 0 begun, 2 replicas, 3 claims, no write, differs: nodes/c (metadata.labels spec.taints)
    "#);
}

#[tokio::test]
async fn replacements_begin_within_the_budget_and_the_emergency_stop() {
    for (case, budget, pause, begun) in [
        ("both", "100%", Pause::default(), 2),
        ("a budget", "1", Pause::default(), 1),
        ("no budget", "0", Pause::default(), 0),
        ("provisioning is paused", "100%", Pause { provisioning: true, ..Pause::default() }, 0),
        ("disruption is paused", "100%", Pause { disruption: true, ..Pause::default() }, 0),
        ("disruption is only reported", "100%", Pause { disruption: true, report: true, ..Pause::default() }, 0),
    ] {
        let world = world(budget);
        let ctx = world.context();
        ctx.cluster.update(|state| state.pause = Some(pause));
        assert_eq!(begin(&ctx, DisruptionReason::Drifted, &BTreeSet::new()).await, begun, "{case}");
        assert_eq!(size(&ctx), (2, 2 + begun), "{case}");
        let marked: Vec<Value> = ["c", "d"]
            .map(|name| world.api.stored(&format!("nodeclaims/{name}")).unwrap()["metadata"]["annotations"].clone())
            .into_iter()
            .filter(|annotations| annotations[labels::DISRUPTING] == "Drifted/")
            .collect();
        assert_eq!(marked.len(), begun, "{case}");
        assert_eq!(begin(&ctx, DisruptionReason::Drifted, &BTreeSet::new()).await, 0, "{case}: again");
    }
    let ctx = world("100%").context();
    assert_eq!(
        begin(&ctx, DisruptionReason::Drifted, &BTreeSet::from(["c".to_owned()])).await,
        1,
        "one was given up a moment ago"
    );
}
