use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;
use serde_json::json;
use stowage_api::NodeClaim;
use stowage_test_objects::{claim, launched, node, pod};

use super::*;
use crate::controllers::enforcement::opening::{Opening, open};
use crate::decisions::placement::mode::PlacementMode;
use crate::test_support::failures::{World, first_turn, outcome, transcript};
use crate::test_support::kubernetes::object_store::Refusal;
use crate::test_support::kubernetes::{FakeApi, Fault};

const LATER: &str = "2099-01-01T00:00:00Z";

/// The claim `c` with the planned pods a and b, and its closed node x, ready and created at `created`.
fn world(placement: PlacementMode, created: &str) -> World {
    let api = FakeApi::default();
    let plan = json!({(labels::PLANNED_PODS): "[\"n/a\",\"n/b\"]", (labels::HOLD_UNTIL): LATER});
    api.put(&claim("c", &json!({"metadata": {"annotations": plan}, "status": launched("i-1", &["Launched"])})));
    let closed = json!({"key": labels::UNREGISTERED_TAINT, "effect": "NoExecute"});
    let team = json!({"key": "team", "effect": "NoSchedule"});
    api.put(&node(
        "x",
        &json!({"metadata": {"creationTimestamp": created}, "spec": {"providerID": "aws:///z/i-1", "taints": [team, closed]},
            "status": {"conditions": [{"type": "Ready", "status": "True"}],
                "allocatable": {"cpu": "2", "memory": "4Gi", "pods": "10"}}}),
    ));
    for name in ["a", "b", "stranger"] {
        api.put(&pod(name, &json!({"spec": {"containers": [{"name": "c", "image": "i"}]}})));
    }
    World { placement, ..World::new(api) }
}

/// The same node, which does not report a resource that the claim requests: it gets no planned taint.
fn incomplete(placement: PlacementMode) -> World {
    let world = world(placement, &fresh());
    let mut incomplete = world.api.stored("nodeclaims/c").unwrap();
    incomplete["spec"]["resources"] = json!({"requests": {"nvidia.com/gpu": "1"}});
    world.api.put::<NodeClaim>(&serde_json::from_value(incomplete).unwrap());
    world
}

fn fresh() -> String {
    (clock::now() + Duration::from_mins(10)).rfc3339()
}

async fn opened(ctx: Arc<Context>) -> String {
    let (claim, node) = {
        let state = ctx.cluster.read();
        (state.claims.get("c").cloned(), state.nodes.get("x").cloned())
    };
    let (Some(claim), Some(node)) = (claim, node) else { return "gone".into() };
    if node.labels().contains_key(labels::REGISTERED) {
        return "open already".into();
    }
    match open(&ctx, &claim, &node).await {
        Ok(Opening::Opened) => "open".into(),
        Ok(Opening::Wait(wait)) => format!("wait {} ms", wait.as_millis()),
        error => outcome(error),
    }
}

/// The first pass nominates the pods, the second opens the node.
async fn opened_at_last(ctx: Arc<Context>) -> String {
    let first = opened(Arc::clone(&ctx)).await;
    let second = opened(ctx).await;
    format!("{first}, {second}")
}

#[tokio::test]
async fn pods_are_nominated_before_the_node_opens_under_every_failure() {
    let text = transcript(|| incomplete(PlacementMode::Nominate), opened_at_last).await;
    insta::assert_snapshot!(text, @r#"
    undisturbed: wait 0 ms, open
      PATCH nodeclaims/c {"metadata":{"annotations":{"stowage.dev/hold-until":"TIME"}}}
      PATCH pods/n/a/status {"metadata":{"uid":"uid-a"},"status":{"nominatedNodeName":"x"}}
      PATCH pods/n/b/status {"metadata":{"uid":"uid-b"},"status":{"nominatedNodeName":"x"}}
      PATCH nodes/x [{"op":"test","path":"/metadata/uid","value":"uid-x"},{"op":"test","path":"/metadata/resourceVersion","value":"2"},{"op":"test","path":"/spec/taints","value":[{"effect":"NoSchedule","key":"team"},{"effect":"NoExecute","key":"karpenter.sh/unregistered"}]},{"op":"replace","path":"/spec/taints","value":[{"effect":"NoSchedule","key":"team"}]},{"op":"add","path":"/metadata/labels","value":{}},{"op":"add","path":"/metadata/labels/karpenter.sh~1registered","value":"true"}]
      changes nodes/x (metadata.labels spec.taints), pods/n/a (status), pods/n/b (status)
    again: open already, open already, no write, as undisturbed
    PATCH nodeclaims/c
      404: error 404, error 404, sent 2 times; again: gone, gone, no write, differs: nodes/x (metadata.labels spec.taints), pods/n/a (status), pods/n/b (status), -nodeclaims/c
    PATCH pods/n/a/status
      409 | 422: wait 0 ms, open, sent 2 times; again: open already, open already, no write, differs: pods/n/a (status)
    PATCH pods/n/b/status
      409 | 422: wait 0 ms, open, sent 2 times; again: open already, open already, no write, differs: pods/n/b (status)
    PATCH nodes/x
    "#);
}

#[tokio::test]
async fn the_planned_taint_needs_no_nominations_under_every_failure() {
    let text = transcript(|| world(PlacementMode::Nominate, &fresh()), opened).await;
    insta::assert_snapshot!(text, @r#"
    undisturbed: open
      PATCH nodeclaims/c {"metadata":{"annotations":{"stowage.dev/hold-until":"TIME"}}}
      PATCH nodes/x [{"op":"test","path":"/metadata/uid","value":"uid-x"},{"op":"test","path":"/metadata/resourceVersion","value":"2"},{"op":"test","path":"/spec/taints","value":[{"effect":"NoSchedule","key":"team"},{"effect":"NoExecute","key":"karpenter.sh/unregistered"}]},{"op":"replace","path":"/spec/taints","value":[{"effect":"NoSchedule","key":"team"},{"effect":"NoSchedule","key":"stowage.dev/planned","timeAdded":"TIME","value":"uid-c"}]},{"op":"add","path":"/metadata/labels","value":{}},{"op":"add","path":"/metadata/labels/karpenter.sh~1registered","value":"true"},{"op":"add","path":"/metadata/labels/karpenter.sh~1initialized","value":"true"}]
      changes nodes/x (metadata.labels spec.taints)
    again: open already, no write, as undisturbed
    PATCH nodeclaims/c
      404: error 404; again: gone, no write, differs: nodes/x (metadata.labels spec.taints), -nodeclaims/c
    PATCH nodes/x
    "#);
}

#[tokio::test]
async fn a_node_opens_without_nominations_where_placement_is_off_under_every_failure() {
    let text = transcript(|| world(PlacementMode::Off, &fresh()), opened).await;
    insta::assert_snapshot!(text, @r#"
    undisturbed: open
      PATCH nodeclaims/c {"metadata":{"annotations":{"stowage.dev/hold-until":"TIME"}}}
      PATCH nodes/x [{"op":"test","path":"/metadata/uid","value":"uid-x"},{"op":"test","path":"/metadata/resourceVersion","value":"2"},{"op":"test","path":"/spec/taints","value":[{"effect":"NoSchedule","key":"team"},{"effect":"NoExecute","key":"karpenter.sh/unregistered"}]},{"op":"replace","path":"/spec/taints","value":[{"effect":"NoSchedule","key":"team"}]},{"op":"add","path":"/metadata/labels","value":{}},{"op":"add","path":"/metadata/labels/karpenter.sh~1registered","value":"true"},{"op":"add","path":"/metadata/labels/karpenter.sh~1initialized","value":"true"}]
      changes nodes/x (metadata.labels spec.taints)
    again: open already, no write, as undisturbed
    PATCH nodeclaims/c
      404: error 404; again: gone, no write, differs: nodes/x (metadata.labels spec.taints), -nodeclaims/c
    PATCH nodes/x
    "#);
}

#[tokio::test]
async fn a_refused_nomination_does_not_keep_the_node_closed() {
    let world = incomplete(PlacementMode::Extender);
    world.api.inject_on("PATCH pods/n/a/status", Fault::Refused(Refusal::invalid("no")));
    let ctx = world.context();
    assert_eq!(opened(Arc::clone(&ctx)).await, "wait 0 ms", "b is nominated");
    assert_eq!(opened(Arc::clone(&ctx)).await, "open");
    let sent = world.api.lines().iter().filter(|line| *line == "PATCH pods/n/a/status").count();
    assert_eq!(sent, 2);
    assert_eq!(ctx.metrics.nominations.get(), 1, "refused nominations do not count");
}

#[tokio::test]
async fn a_nomination_that_fails_is_repeated_after_a_second() {
    let world = incomplete(PlacementMode::Extender);
    world.api.inject_on("PATCH pods/n/a/status", Fault::Refused(Refusal::gateway_timeout()));
    let ctx = world.context();
    assert_eq!(opened(Arc::clone(&ctx)).await, "wait 0 ms", "b is nominated");
    assert_eq!(opened(Arc::clone(&ctx)).await, "wait 1000 ms");
    world.api.reset();
    assert_eq!(opened(Arc::clone(&ctx)).await, "wait 0 ms");
    assert_eq!((opened(Arc::clone(&ctx)).await, ctx.metrics.nominations.get()), ("open".to_owned(), 2));
}

#[tokio::test]
async fn a_node_that_is_not_ready_is_not_written() {
    let world = world(PlacementMode::Nominate, &fresh());
    let mut unready = world.api.stored("nodes/x").unwrap();
    unready["status"]["conditions"][0]["status"] = json!("False");
    world.api.put::<Node>(&serde_json::from_value(unready).unwrap());
    assert_eq!(opened(world.context()).await, "wait 50 ms");
    assert!(world.api.lines().is_empty());
}

/// The leader nominates what a restart or a preemption left without a nomination.
#[tokio::test]
async fn pods_of_an_open_node_are_nominated_again_under_every_failure() {
    let open = || {
        let world = world(PlacementMode::Nominate, &fresh());
        let mut node = world.api.stored("nodes/x").unwrap();
        node["spec"]["taints"] = json!([]);
        node["metadata"]["labels"] = json!({(labels::REGISTERED): "true"});
        world.api.put::<Node>(&serde_json::from_value(node).unwrap());
        world
    };
    let text = transcript(open, async |ctx| {
        first_turn(run(ctx)).await;
        "waits".into()
    })
    .await;
    insta::assert_snapshot!(text, @r#"
    undisturbed: waits
      PATCH pods/n/a/status {"metadata":{"uid":"uid-a"},"status":{"nominatedNodeName":"x"}}
      PATCH pods/n/b/status {"metadata":{"uid":"uid-b"},"status":{"nominatedNodeName":"x"}}
      changes pods/n/a (status), pods/n/b (status)
    again: waits, no write, as undisturbed
    PATCH pods/n/a/status
    PATCH pods/n/b/status
    "#);
}

#[tokio::test]
async fn holds_are_renewed_while_pods_of_their_class_are_bound_as_planned() {
    let mut world = world(PlacementMode::Nominate, &clock::now().rfc3339());
    world.watched = true;
    let (now, second) = (clock::now(), Duration::from_secs(1));
    let soon = (now + second).rfc3339();
    let plan = json!({(labels::PLANNED_PODS): "[\"n/a\",\"n/b\"]", (labels::HOLD_UNTIL): soon});
    world.api.put(&claim("c", &json!({"metadata": {"annotations": plan}, "status": launched("i-1", &["Launched"])})));
    for name in ["a", "b"] {
        let rejected = json!({"type": "PodScheduled", "status": "False", "reason": "Unschedulable"});
        let containers = json!([{"name": "c", "image": "i"}]);
        world.api.put(&pod(name, &json!({"spec": {"containers": containers}, "status": {"conditions": [rejected]}})));
    }
    let ctx = world.context();
    let mut nominations = Nominations::new(now);
    let hold_until =
        || world.api.stored("nodeclaims/c").unwrap()["metadata"]["annotations"][labels::HOLD_UNTIL].clone();
    reconcile(&ctx, &mut nominations, &mut RateCap::default(), now).await;
    assert_eq!(hold_until(), soon, "no pod was bound");
    let bound = json!({"spec": {"nodeName": "x", "containers": [{"name": "c", "image": "i"}]}});
    ctx.cluster.update(|state| state.apply_pod(&pod("a", &bound), now));
    reconcile(&ctx, &mut nominations, &mut RateCap::default(), now).await;
    assert_eq!(hold_until(), (now + Duration::from_mins(1)).rfc3339());
    let writes = world.api.writes();
    assert_eq!(
        writes.iter().map(crate::test_support::kubernetes::Recorded::line).collect::<Vec<_>>(),
        ["PATCH nodeclaims/c"]
    );
    assert_eq!(ctx.metrics.holds_ended.with_label_values(&["planned", ""]).get(), 1);
}

#[tokio::test]
async fn a_refused_pod_is_withdrawn_from_its_plan_under_every_failure() {
    let refused = || {
        let world = world(PlacementMode::Nominate, &fresh());
        let mut status = launched("i-1", &["Launched", "Registered", "Initialized"]);
        for condition in status["conditions"].as_array_mut().unwrap() {
            condition["lastTransitionTime"] = json!("2000-01-01T00:00:00Z");
        }
        let plan = json!({(labels::PLANNED_PODS): "[\"n/a\",\"n/b\"]", (labels::HOLD_UNTIL): LATER});
        world.api.put(&claim("c", &json!({"metadata": {"annotations": plan}, "status": status})));
        let rejected =
            json!({"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "observedGeneration": 2});
        let containers = json!([{"name": "c", "image": "i"}]);
        let patch = json!({"metadata": {"generation": 2}, "spec": {"containers": containers}, "status": {"conditions": [rejected]}});
        world.api.put(&pod("a", &patch));
        world.api.put(&pod("b", &json!({"spec": {"nodeName": "x", "containers": containers}})));
        world
    };
    let text = transcript(refused, async |ctx| {
        let mut nominations = Nominations::new(clock::now());
        for seconds in [0, 20] {
            let now = clock::now() + Duration::from_secs(seconds);
            reconcile(&ctx, &mut nominations, &mut RateCap::default(), now).await;
        }
        "two passes".into()
    })
    .await;
    insta::assert_snapshot!(text, @r#"
    undisturbed: two passes
      PATCH nodeclaims/c {"metadata":{"annotations":{"stowage.dev/hold-until":"TIME","stowage.dev/planned-owners":"{}","stowage.dev/planned-pods":"[\"n/b\"]"}}}
      changes nodeclaims/c (metadata.annotations)
    again: two passes, no write, as undisturbed
    PATCH nodeclaims/c
    "#);
}

/// The pod s-0 was to move to the node of c, and its successor runs elsewhere: when that ends, the next one must not get the hold back.
#[tokio::test]
async fn a_pod_bound_elsewhere_is_withdrawn_from_its_plan_under_every_failure() {
    let strayed = |placement| {
        let api = FakeApi::default();
        let owner = json!({"uid": "s", "at_ms": 0, "until_ms": 4_000_000_000_000_i64, "source": "old", "node": "old"});
        let plan = json!({(labels::PLANNED_PODS): "[\"n/s-0\"]", (labels::HOLD_UNTIL): LATER,
            (labels::PLANNED_OWNERS): json!({"n/s-0": owner}).to_string()});
        api.put(&claim("c", &json!({"metadata": {"annotations": plan}, "status": launched("i-1", &["Launched"])})));
        api.put(&node("x", &json!({"spec": {"providerID": "aws:///z/i-1"}})));
        api.put(&node("third", &json!({})));
        let owners =
            json!([{"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "s", "uid": "s", "controller": true}]);
        let meta = json!({"ownerReferences": owners, "creationTimestamp": "1970-01-01T00:00:09Z"});
        api.put(&pod("s-0", &json!({"metadata": meta, "spec": {"nodeName": "third"}})));
        World { placement, ..World::new(api) }
    };
    let pass = async |ctx: Arc<Context>| {
        reconcile(&ctx, &mut Nominations::new(clock::now()), &mut RateCap::default(), clock::now()).await;
        format!("stray: {}", ctx.metrics.holds_ended.with_label_values(&["stray", ""]).get())
    };
    let text = transcript(|| strayed(PlacementMode::Nominate), pass).await;
    assert_eq!(text, transcript(|| strayed(PlacementMode::Off), pass).await);
    insta::assert_snapshot!(text, @r#"
    undisturbed: stray: 1
      PATCH nodeclaims/c {"metadata":{"annotations":{"stowage.dev/hold-until":"TIME","stowage.dev/planned-owners":"{}","stowage.dev/planned-pods":"[]"}}}
      changes nodeclaims/c (metadata.annotations)
    again: stray: 0, no write, as undisturbed
    PATCH nodeclaims/c
    "#);
}
