use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use stowage_test_objects::{claim, launched, node, pod};

use super::*;
use crate::decisions::placement::mode::PlacementMode;
use crate::test_support::failures::{World, transcript};
use crate::test_support::kubernetes::object_store::Refusal;
use crate::test_support::kubernetes::{FakeApi, Fault};

const LATER: &str = "2099-01-01T00:00:00Z";

/// The claim `c` with the planned pods a and b, and its open node x with the planned taint. The pod b tolerates something already.
fn world() -> World {
    let api = FakeApi::default();
    let plan = json!({(labels::PLANNED_PODS): "[\"n/a\",\"n/b\"]", (labels::HOLD_UNTIL): LATER});
    api.put(&claim("c", &json!({"metadata": {"annotations": plan}, "status": launched("i-1", &["Launched"])})));
    let planned = json!({"key": labels::PLANNED_TAINT, "value": "uid-c", "effect": "NoSchedule", "timeAdded": LATER});
    let team = json!({"key": "team", "effect": "NoSchedule"});
    api.put(&node(
        "x",
        &json!({"metadata": {"labels": {(labels::REGISTERED): "true"}},
            "spec": {"providerID": "aws:///z/i-1", "taints": [team, planned]}, "status": {"allocatable": {"pods": "9"}}}),
    ));
    api.put(&pod("a", &json!({})));
    api.put(&pod("b", &json!({"spec": {"tolerations": [{"key": "team", "operator": "Exists"}]}})));
    api.put(&pod("stranger", &json!({})));
    World::new(api)
}

async fn reconciled(ctx: Arc<Context>) -> String {
    let mut taints = PlannedTaints::default();
    let now = clock::now();
    let holds = ctx.derived.holds(&ctx.cluster.read(), now);
    reconcile(&mut taints, &ctx, &holds, now).await;
    match taints.rejected_pods() {
        0 => "ok".into(),
        count => format!("{count} refused"),
    }
}

#[tokio::test]
async fn planned_pods_are_admitted_with_the_extender_too() {
    let world = World { placement: PlacementMode::Extender, ..world() };
    assert_eq!(reconciled(world.context()).await, "ok");
    assert_eq!(world.api.writes().len(), 2, "one for each planned pod, none for the node");
}

#[tokio::test]
async fn planned_pods_are_admitted_under_every_failure() {
    let text = transcript(world, reconciled).await;
    insta::assert_snapshot!(text, @r#"
    undisturbed: ok
      PATCH pods/n/a [{"op":"test","path":"/metadata/uid","value":"uid-a"},{"op":"add","path":"/spec/tolerations","value":[{"effect":"NoSchedule","key":"stowage.dev/planned","operator":"Equal","value":"uid-c"}]}]
      PATCH pods/n/b [{"op":"test","path":"/metadata/uid","value":"uid-b"},{"op":"add","path":"/spec/tolerations/-","value":{"effect":"NoSchedule","key":"stowage.dev/planned","operator":"Equal","value":"uid-c"}}]
      changes pods/n/a (spec.tolerations), pods/n/b (spec.tolerations)
    again: ok, no write, as undisturbed
    PATCH pods/n/a
      written by another: 1 refused; again: ok, 1 write, as undisturbed
    PATCH pods/n/b
    "#);
}

#[tokio::test]
async fn the_planned_taint_is_removed_under_every_failure() {
    let text = transcript(|| World { placement: PlacementMode::Off, ..world() }, reconciled).await;
    insta::assert_snapshot!(text, @r#"
    undisturbed: ok
      PATCH nodes/x [{"op":"test","path":"/metadata/uid","value":"uid-x"},{"op":"test","path":"/spec/taints","value":[{"effect":"NoSchedule","key":"team"},{"effect":"NoSchedule","key":"stowage.dev/planned","timeAdded":"TIME","value":"uid-c"}]},{"op":"replace","path":"/spec/taints","value":[{"effect":"NoSchedule","key":"team"}]}]
      changes nodes/x (spec.taints)
    again: ok, no write, as undisturbed
    PATCH nodes/x
    "#);
}

#[tokio::test]
async fn a_new_node_stays_closed_while_pods_are_about_to_be_planned() {
    for (is_planning, writes) in [(true, 0), (false, 1)] {
        let world = world();
        for name in ["a", "b"] {
            world.api.put(&pod(name, &json!({"spec": {"nodeName": "x"}})));
        }
        let ctx = world.context();
        ctx.is_planning.store(is_planning, Ordering::Relaxed);
        reconciled(ctx).await;
        assert_eq!(world.api.writes().len(), writes, "{is_planning}");
    }
}

/// A DaemonSet whose pods do not tolerate the taint lacks one on the node, whose planned pods are bound, while another pod is held elsewhere.
#[tokio::test]
async fn a_node_is_open_until_its_daemon_set_pods_are_bound() {
    let world = World { watched: true, ..world() };
    let plan = json!({(labels::PLANNED_PODS): "[\"n/stranger\"]", (labels::HOLD_UNTIL): LATER});
    world.api.put(&claim("d", &json!({"metadata": {"annotations": plan}, "status": launched("i-2", &["Launched"])})));
    for name in ["a", "b"] {
        world.api.put(&pod(name, &json!({"spec": {"nodeName": "x"}})));
    }
    let template =
        json!({"spec": {"containers": [{"name": "c"}], "tolerations": [{"key": "team", "operator": "Exists"}]}});
    let set = json!({"metadata": {"name": "d", "namespace": "n", "uid": "set"}, "spec": {"selector": {}, "template": template}});
    let ctx = world.context();
    ctx.cluster.update(|state| state.apply_daemon_set(&serde_json::from_value(set).unwrap()));
    let taints = || world.api.stored("nodes/x").unwrap()["spec"]["taints"].clone();
    let with = |effect| {
        json!([{"key": "team", "effect": "NoSchedule"},
            {"key": labels::PLANNED_TAINT, "value": "uid-c", "effect": effect, "timeAdded": LATER}])
    };
    assert_eq!(reconciled(Arc::clone(&ctx)).await, "ok");
    assert_eq!(taints(), with("PreferNoSchedule"));
    let owners = json!([{"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "d", "uid": "set", "controller": true}]);
    let daemon = pod("daemon", &json!({"metadata": {"ownerReferences": owners}, "spec": {"nodeName": "x"}}));
    ctx.cluster.update(|state| state.apply_pod(&daemon, clock::now()));
    assert_eq!(reconciled(ctx).await, "ok");
    assert_eq!(taints(), with("NoSchedule"));
}

#[tokio::test]
async fn a_pod_that_is_refused_three_times_opens_its_node_to_all() {
    let world = World { watched: true, ..world() };
    world.api.inject_on("PATCH pods/n/a", Fault::Refused(Refusal::invalid("no")));
    let ctx = world.context();
    let mut planned_taints = PlannedTaints::default();
    let mut now = clock::now();
    for turn in 1..=4 {
        now += Duration::from_secs(1);
        let holds = ctx.derived.holds(&ctx.cluster.read(), now);
        reconcile(&mut planned_taints, &ctx, &holds, now).await;
        let taints = world.api.stored("nodes/x").unwrap()["spec"]["taints"].clone();
        let tainted = taints.as_array().unwrap().iter().any(|taint| taint["key"] == labels::PLANNED_TAINT);
        assert_eq!(tainted, turn < 4, "pass {turn}");
    }
}

/// A pod that replaced the planned pod under the same name has another UID.
#[tokio::test]
async fn a_successor_of_the_same_name_is_not_admitted() {
    let world = world();
    let ctx = world.context();
    world.api.put(&pod("a", &json!({"metadata": {"uid": "uid-successor"}})));
    assert_eq!(reconciled(ctx).await, "1 refused");
    assert!(world.api.stored("pods/n/a").unwrap()["spec"]["tolerations"].is_null());
}

/// The node y, whose pod moves to the node x now.
fn moving() -> World {
    let api = FakeApi::default();
    let owners = json!({"n/a": {"uid": "rs", "at_ms": 0}}).to_string();
    let plan =
        json!({(labels::PLANNED_PODS): "[\"n/a\"]", (labels::PLANNED_OWNERS): owners, (labels::HOLD_UNTIL): LATER});
    let ready = json!({"conditions": [{"type": "Ready", "status": "True"}], "allocatable": {"cpu": "4", "pods": "9"}});
    let meta = json!({"labels": {(labels::REGISTERED): "true", (labels::INITIALIZED): "true"}});
    api.put(&claim(
        "c",
        &json!({"metadata": {"annotations": plan}, "status": launched("i-1", &["Launched", "Initialized"])}),
    ));
    let team = json!({"key": "team", "effect": "PreferNoSchedule"});
    let spec = json!({"providerID": "aws:///z/i-1", "taints": [team]});
    api.put(&node("x", &json!({"metadata": meta, "spec": spec, "status": ready})));
    let deleted = json!({"annotations": {(labels::DISRUPTING): "Underutilized/"}, "finalizers": ["f"],
        "deletionTimestamp": clock::now().rfc3339()});
    api.put(&claim("d", &json!({"metadata": deleted, "status": launched("i-2", &["Launched", "Initialized"])})));
    api.put(&node("y", &json!({"metadata": meta, "spec": {"providerID": "aws:///z/i-2"}, "status": ready})));
    let owner = json!({"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "rs", "uid": "rs", "controller": true});
    api.put(&pod("a", &json!({"metadata": {"ownerReferences": [owner]}, "spec": {"nodeName": "y"}})));
    World::new(api)
}

/// The other client adds a taint that the moving pod does not tolerate: the node need not be closed.
#[tokio::test]
async fn a_node_is_closed_while_pods_move_under_every_failure() {
    let text = transcript(moving, reconciled).await;
    insta::assert_snapshot!(text, @r#"
    undisturbed: ok
      PATCH nodes/x [{"op":"test","path":"/metadata/uid","value":"uid-x"},{"op":"test","path":"/spec/taints","value":[{"effect":"PreferNoSchedule","key":"team"}]},{"op":"replace","path":"/spec/taints","value":[{"effect":"PreferNoSchedule","key":"team"},{"effect":"NoSchedule","key":"stowage.dev/planned","timeAdded":"TIME","value":"uid-c"}]}]
      changes nodes/x (spec.taints)
    again: ok, no write, as undisturbed
    PATCH nodes/x
      written by another: ok; again: ok, no write, differs: nodes/x (spec.taints)
    "#);
}

/// A new process finds the taint of one that was killed.
#[tokio::test]
async fn a_node_is_opened_again_when_no_pod_moves() {
    let world = World { watched: true, ..moving() };
    let taints = || world.api.stored("nodes/x").unwrap()["spec"]["taints"].as_array().unwrap().len();
    let ctx = world.context();
    assert_eq!((reconciled(Arc::clone(&ctx)).await, taints()), ("ok".into(), 2));
    assert_eq!((reconciled(Arc::clone(&ctx)).await, taints()), ("ok".into(), 2));
    open_all(&ctx).await;
    assert_eq!(taints(), 1, "the process stops");
    assert_eq!((reconciled(Arc::clone(&ctx)).await, taints()), ("ok".into(), 2));
    world.api.put(&pod("b", &json!({"metadata": {"creationTimestamp": LATER}, "spec": {"nodeName": "x"}})));
    ctx.cluster.update(|state| state.delete_claim("d"));
    assert_eq!((reconciled(ctx).await, taints()), ("ok".into(), 1));
}
