use serde_json::json;
use stowage_test_objects as objects;
use stowage_test_objects::{catalog, node_class};

use super::*;
use crate::test_support::failures::{World, outcome, transcript};
use crate::test_support::kubernetes::FakeApi;
use crate::test_support::scripted_cloud::FakeCloud;

/// The claims `c` and `other`, which may be an m5.large, and their class.
fn world(launched: Result<Launched, LaunchError>) -> World {
    let api = FakeApi::default();
    api.put(&node_class("default", &json!({})));
    let meta = json!({"labels": {(labels::NODE_POOL): "p"}, "finalizers": [labels::TERMINATION_FINALIZER]});
    let requirements = json!([{"key": labels::INSTANCE_TYPE, "operator": "In", "values": ["m5.large"]}]);
    for name in ["c", "other"] {
        api.put(&objects::claim(name, &json!({"metadata": meta, "spec": {"requirements": requirements}})));
    }
    let (catalog, instance_ca) = (Arc::new(catalog()), Some("ca".into()));
    World::new(api).with_cloud(FakeCloud { catalog, instance_ca, launched: Some(launched), ..FakeCloud::default() })
}

#[allow(clippy::unnecessary_wraps, reason = "an answer of the fake cloud")]
fn success() -> Result<Launched, LaunchError> {
    Ok(Launched { instance: objects::instance("i-1", "uid-c", 0), unavailable: vec![], called_at: None })
}

async fn launched(ctx: Arc<Context>) -> String {
    let Some(claim) = ctx.cluster.read().claims.get("c").cloned() else { return "no claim".into() };
    outcome(launch(&ctx, &claim).await)
}

#[tokio::test]
async fn a_launch_is_recorded_under_every_failure() {
    let text = transcript(|| world(success()), launched).await;
    insta::assert_snapshot!(text, @r#"
    undisturbed: ok
      PATCH nodeclaims/c {"metadata":{"annotations":{"karpenter.k8s.aws/ec2nodeclass-hash":"11102801143440347639","karpenter.k8s.aws/ec2nodeclass-hash-version":"v6","stowage.dev/usd-per-hour":"0.096"},"labels":{"karpenter.sh/capacity-type":"on-demand","karpenter.sh/nodepool":"p","kubernetes.io/arch":"amd64","kubernetes.io/os":"linux","node.kubernetes.io/instance-type":"m5.large","topology.kubernetes.io/zone":"z"}}}
      PATCH nodeclaims/c/status {"metadata":{"resourceVersion":"4"},"status":{"allocatable":{"cpu":"2","memory":"8Gi","pods":"29"},"capacity":{"cpu":"2","memory":"8Gi","pods":"29"},"conditions":[{"lastTransitionTime":"TIME","message":"","reason":"Launched","status":"True","type":"Launched"},{"lastTransitionTime":"TIME","message":"object is awaiting reconciliation","reason":"AwaitingReconciliation","status":"Unknown","type":"Registered"},{"lastTransitionTime":"TIME","message":"object is awaiting reconciliation","reason":"AwaitingReconciliation","status":"Unknown","type":"Initialized"},{"lastTransitionTime":"TIME","message":"Registered=Unknown, Initialized=Unknown","reason":"ReconcilingDependents","status":"Unknown","type":"Ready"}],"imageID":"ami-1","providerID":"aws:///z/i-1"}}
      event Normal Launched on NodeClaim/c: m5.large in z as on-demand
      cloud launch uid-c
      changes nodeclaims/c (metadata.annotations metadata.labels status)
    again: ok, 2 writes, as undisturbed
    PATCH nodeclaims/c
    PATCH nodeclaims/c/status
    "#);
}

#[tokio::test]
async fn a_failed_launch_is_recorded_under_every_failure() {
    let text = transcript(|| world(Err(LaunchError::other("broken"))), launched).await;
    insta::assert_snapshot!(text, @r#"
    undisturbed: error LaunchFailed: launch failed: broken
      PATCH nodeclaims/c/status {"metadata":{"resourceVersion":"2"},"status":{"conditions":[{"lastTransitionTime":"TIME","message":"launch failed: broken","reason":"LaunchFailed","status":"Unknown","type":"Launched"},{"lastTransitionTime":"TIME","message":"object is awaiting reconciliation","reason":"AwaitingReconciliation","status":"Unknown","type":"Registered"},{"lastTransitionTime":"TIME","message":"object is awaiting reconciliation","reason":"AwaitingReconciliation","status":"Unknown","type":"Initialized"},{"lastTransitionTime":"TIME","message":"Launched=Unknown, Registered=Unknown, Initialized=Unknown","reason":"ReconcilingDependents","status":"Unknown","type":"Ready"}]}}
      event Warning LaunchFailed on NodeClaim/c: launch failed: broken
      cloud launch uid-c
      changes nodeclaims/c (status)
    again: error LaunchFailed: launch failed: broken, no write, as undisturbed
    PATCH nodeclaims/c/status
    "#);
}

#[tokio::test]
async fn a_launch_without_capacity_marks_the_offerings_and_writes_nothing() {
    let offering = Override {
        instance_type: "m5.large".into(),
        zone: "z".into(),
        capacity_type: stowage_model::offering::CapacityType::OnDemand,
    };
    let world = world(Err(LaunchError::InsufficientCapacity { unavailable: vec![offering] }));
    let ctx = world.context();
    let claim = ctx.cluster.read().claims["c"].clone();
    let failure = launch(&ctx, &claim).await;
    assert!(
        matches!(failure, Err(StepError::Abandon { reason: DisruptionReason::InsufficientCapacity, .. })),
        "{failure:?}"
    );
    assert!(world.api.lines().is_empty());
    assert_eq!(world.cloud.calls(), ["launch uid-c", "mark unavailable m5.large z on-demand"]);
}

#[tokio::test]
async fn the_partition_of_an_instance_is_written_under_every_failure() {
    let with_partition = || {
        let world = world(success());
        let meta = json!({"labels": {(labels::PLACEMENT_GROUP_PARTITION): ""}});
        let status = objects::launched("i-1", &["Launched"]);
        world.api.put(&objects::claim("c", &json!({"metadata": meta, "status": status})));
        let instance = Instance { partition: Some(3), ..objects::instance("i-1", "uid-c", 0) };
        world.with_cloud(FakeCloud { instances: vec![instance].into(), ..FakeCloud::default() })
    };
    let text = transcript(with_partition, async |ctx| {
        let Some(claim) = ctx.cluster.read().claims.get("c").cloned() else { return "no claim".into() };
        outcome(learn_partition(&ctx, &claim).await)
    })
    .await;
    insta::assert_snapshot!(text, @r#"
    undisturbed: ok
      PATCH nodeclaims/c {"metadata":{"labels":{"karpenter.k8s.aws/placement-group-partition":"3"}}}
      changes nodeclaims/c (metadata.labels)
    again: ok, 1 write, as undisturbed
    PATCH nodeclaims/c
    "#);
}

/// An alert compares the NodeClaims with the Nodes that registered: the first one of a zone must not be missed.
#[tokio::test]
async fn a_launched_node_has_its_series_before_it_registers() {
    let ctx = world(success()).context();
    assert_eq!(launched(Arc::clone(&ctx)).await, "ok");
    let families = prometheus::core::Collector::collect(&ctx.metrics.nodes_created);
    let mut labels = Vec::new();
    for series in families.iter().flat_map(prometheus::proto::MetricFamily::get_metric) {
        labels.extend(series.get_label().iter().map(prometheus::proto::LabelPair::value));
    }
    assert_eq!(labels, ["p", "z"]);
    assert_eq!(ctx.metrics.nodes_created.with_label_values(&labels).get(), 0);
}
