use serde_json::json;
use stowage_model::events;
use stowage_test_objects::{claim, node_class};

use super::*;
use crate::test_support::failures::{World, first_turn, outcome, transcript};
use crate::test_support::kubernetes::FakeApi;
use crate::test_support::scripted_cloud::FakeCloud;

/// The class `default` with this metadata, and `other`.
fn world(metadata: &Value, cloud: FakeCloud) -> World {
    let api = FakeApi::default();
    api.put(&node_class("default", &json!({"metadata": metadata})));
    api.put(&node_class("other", &json!({})));
    World::new(api).with_cloud(cloud)
}

/// A cloud of real instances: classes carry a hash and a finalizer.
fn real() -> FakeCloud {
    FakeCloud { instance_ca: Some("ca".into()), ..FakeCloud::default() }
}

async fn reconciled(ctx: Arc<Context>) -> String {
    let Some(class) = ctx.cluster.read().classes.get("default").cloned() else { return "no class".into() };
    outcome(reconcile(&ctx, &class).await)
}

#[tokio::test]
async fn a_class_gets_hash_finalizer_and_status_under_every_failure() {
    let text = transcript(|| world(&json!({"finalizers": ["other/finalizer"]}), real()), reconciled).await;
    insta::assert_snapshot!(text, @r#"
    undisturbed: ok
      PATCH ec2nodeclasses/default {"metadata":{"annotations":{"karpenter.k8s.aws/ec2nodeclass-hash":"11102801143440347639","karpenter.k8s.aws/ec2nodeclass-hash-version":"v6"},"finalizers":["other/finalizer","karpenter.k8s.aws/termination"],"resourceVersion":"1"}}
      PATCH ec2nodeclasses/default/status {"metadata":{"resourceVersion":"3"},"status":{"amis":[],"capacityReservations":[],"conditions":[{"lastTransitionTime":"TIME","message":"","reason":"AMIsReady","status":"True","type":"AMIsReady"},{"lastTransitionTime":"TIME","message":"","reason":"CapacityReservationsReady","status":"True","type":"CapacityReservationsReady"},{"lastTransitionTime":"TIME","message":"","reason":"InstanceProfileReady","status":"True","type":"InstanceProfileReady"},{"lastTransitionTime":"TIME","message":"","reason":"PlacementGroupReady","status":"True","type":"PlacementGroupReady"},{"lastTransitionTime":"TIME","message":"","reason":"SecurityGroupsReady","status":"True","type":"SecurityGroupsReady"},{"lastTransitionTime":"TIME","message":"","reason":"SubnetsReady","status":"True","type":"SubnetsReady"},{"lastTransitionTime":"TIME","message":"","reason":"ValidationSucceeded","status":"True","type":"ValidationSucceeded"},{"lastTransitionTime":"TIME","message":"","reason":"Ready","status":"True","type":"Ready"}],"instanceProfile":null,"securityGroups":[],"subnets":[]}}
      changes ec2nodeclasses/default (metadata.annotations metadata.finalizers status)
    again: ok, no write, as undisturbed
    PATCH ec2nodeclasses/default
    PATCH ec2nodeclasses/default/status
    "#);
}

#[tokio::test]
async fn claims_get_the_new_version_of_the_hash_before_their_class_under_every_failure() {
    let old = json!({(labels::EC2_NODE_CLASS_HASH): "1", (labels::EC2_NODE_CLASS_HASH_VERSION): "v4"});
    let metadata = json!({"finalizers": [labels::EC2_TERMINATION_FINALIZER], "annotations": old});
    let with_claims = || {
        let world = world(&metadata, real());
        for name in ["a", "b"] {
            world.api.put(&claim(name, &json!({"metadata": {"annotations": old}})));
        }
        world
    };
    let text = transcript(with_claims, reconciled).await;
    insta::assert_snapshot!(text, @r#"
    undisturbed: ok
      PATCH nodeclaims/a {"metadata":{"annotations":{"karpenter.k8s.aws/ec2nodeclass-hash":"11102801143440347639","karpenter.k8s.aws/ec2nodeclass-hash-version":"v6"}}}
      PATCH nodeclaims/b {"metadata":{"annotations":{"karpenter.k8s.aws/ec2nodeclass-hash":"11102801143440347639","karpenter.k8s.aws/ec2nodeclass-hash-version":"v6"}}}
      PATCH ec2nodeclasses/default {"metadata":{"annotations":{"karpenter.k8s.aws/ec2nodeclass-hash":"11102801143440347639","karpenter.k8s.aws/ec2nodeclass-hash-version":"v6"}}}
      PATCH ec2nodeclasses/default/status {"metadata":{"resourceVersion":"7"},"status":{"amis":[],"capacityReservations":[],"conditions":[{"lastTransitionTime":"TIME","message":"","reason":"AMIsReady","status":"True","type":"AMIsReady"},{"lastTransitionTime":"TIME","message":"","reason":"CapacityReservationsReady","status":"True","type":"CapacityReservationsReady"},{"lastTransitionTime":"TIME","message":"","reason":"InstanceProfileReady","status":"True","type":"InstanceProfileReady"},{"lastTransitionTime":"TIME","message":"","reason":"PlacementGroupReady","status":"True","type":"PlacementGroupReady"},{"lastTransitionTime":"TIME","message":"","reason":"SecurityGroupsReady","status":"True","type":"SecurityGroupsReady"},{"lastTransitionTime":"TIME","message":"","reason":"SubnetsReady","status":"True","type":"SubnetsReady"},{"lastTransitionTime":"TIME","message":"","reason":"ValidationSucceeded","status":"True","type":"ValidationSucceeded"},{"lastTransitionTime":"TIME","message":"","reason":"Ready","status":"True","type":"Ready"}],"instanceProfile":null,"securityGroups":[],"subnets":[]}}
      changes ec2nodeclasses/default (metadata.annotations status), nodeclaims/a (metadata.annotations), nodeclaims/b (metadata.annotations)
    again: ok, no write, as undisturbed
    PATCH nodeclaims/a
    PATCH nodeclaims/b
    PATCH ec2nodeclasses/default
    PATCH ec2nodeclasses/default/status
    "#);
}

#[tokio::test]
async fn a_deleted_class_is_released_under_every_failure() {
    let metadata = json!({"deletionTimestamp": "2026-01-01T00:00:00Z",
        "finalizers": ["other/finalizer", labels::EC2_TERMINATION_FINALIZER]});
    let text = transcript(|| world(&metadata, real()), reconciled).await;
    insta::assert_snapshot!(text, @r#"
    undisturbed: ok
      PATCH ec2nodeclasses/default {"metadata":{"finalizers":["other/finalizer"],"resourceVersion":"1"}}
      cloud release class default
      changes ec2nodeclasses/default (metadata.finalizers)
    again: ok, no write, as undisturbed
    PATCH ec2nodeclasses/default
    "#);
}

#[tokio::test]
async fn a_deleted_class_waits_for_its_claims_and_for_the_cloud() {
    let metadata =
        json!({"deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": [labels::EC2_TERMINATION_FINALIZER]});
    let used = world(&metadata, real());
    used.api.put(&claim("c", &json!({})));
    assert_eq!(reconciled(used.context()).await, "ok");
    assert!(used.api.lines().is_empty() && used.cloud.calls().is_empty());
    let note = "waiting for 1 NodeClaims to be deleted: c";
    assert_eq!(used.api.events(), [format!("Normal WaitingOnNodeClaimTermination on EC2NodeClass/default: {note}")]);
    let failing = FakeCloud { failure: Some(CloudError::Throttled), ..real() };
    let stuck = world(&metadata, failing);
    assert!(reconciled(stuck.context()).await.starts_with("error"));
    assert!(stuck.api.lines().is_empty(), "the finalizer stays until all of it is deleted");
}

#[tokio::test]
async fn a_condition_that_becomes_false_is_reported_once() {
    let verdicts = vec![("SubnetsReady", Verdict::False(events::SUBNETS_NOT_FOUND, "no subnet matches".into()))];
    let resolution = Resolution { status: None, verdicts, requeue_after: PACE.resync };
    let world = world(&json!({}), FakeCloud { resolution: Some(resolution), ..real() });
    assert_eq!(reconciled(world.context()).await, "ok");
    let event = "Warning SubnetsNotFound on EC2NodeClass/default: SubnetsReady: no subnet matches";
    assert_eq!(world.api.events(), [event]);
    world.api.reset();
    assert_eq!(reconciled(world.context()).await, "ok");
    assert!(world.api.lines().is_empty() && world.api.events().is_empty());
}

#[tokio::test]
async fn an_event_reports_a_condition_that_is_degraded_or_could_not_be_evaluated() {
    let verdicts = vec![
        ("SubnetsReady", Verdict::Unjudged("ec2:DescribeSubnets refused".into())),
        ("AMIsReady", Verdict::Degraded(events::KUBELET_EXPRESSION_DROPPED, "no image for arm64".into())),
        ("SecurityGroupsReady", Verdict::False(events::SECURITY_GROUPS_NOT_FOUND, "none matches".into())),
    ];
    let resolution = Resolution { verdicts, ..Resolution::all_true() };
    let world = world(&json!({}), FakeCloud { resolution: Some(resolution), ..real() });
    assert_eq!(reconciled(world.context()).await, "ok");
    let expected = [
        "Warning NotJudged on EC2NodeClass/default: condition SubnetsReady unknown (ec2:DescribeSubnets refused); \
         keeping last status",
        "Warning KubeletExpressionDropped on EC2NodeClass/default: no image for arm64",
        "Warning SecurityGroupsNotFound on EC2NodeClass/default: SecurityGroupsReady: none matches",
    ];
    assert_eq!(world.api.events(), expected);
}

#[tokio::test]
async fn a_class_whose_resolution_hangs_delays_no_other() {
    let api = FakeApi::default();
    let names: Vec<String> = (0..30).map(|n| format!("class-{n:02}")).collect();
    for name in &names {
        api.put(&node_class(name, &json!({})));
    }
    let world = World::new(api).with_cloud(FakeCloud { hanging_class: Some("class-00".into()), ..real() });
    first_turn(run(world.context())).await;
    let is_ready = |name: &&String| {
        let class = world.api.stored(&format!("ec2nodeclasses/{name}")).unwrap();
        class["status"]["conditions"].is_array()
    };
    assert_eq!(names.iter().filter(is_ready).collect::<Vec<_>>(), names[1..].iter().collect::<Vec<_>>());
}

#[tokio::test]
async fn a_cloud_that_releases_nothing_is_called_with_backoff() {
    let class = node_class("default", &json!({}));
    let refused = || Err(Failure::Cloud(CloudError::Throttled));
    let first = completed(&class, refused(), None);
    let second = completed(&class, refused(), Some(&first));
    assert_eq!((first.failures, second.failures), (1, 2));
    assert_eq!(completed(&class, Ok((PACE.resync, true)), Some(&second)).failures, 0);
}
