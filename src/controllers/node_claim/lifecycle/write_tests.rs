use serde_json::Value;
use stowage_api::conditions;
use stowage_model::pause::Pause;
use stowage_test_objects::{catalog, claim, instance, launched, node, node_class, pod};

use super::*;
use crate::test_support::failures::{World, first_turn, outcome, transcript};
use crate::test_support::kubernetes::{FakeApi, Fault, Recorded};
use crate::test_support::scripted_cloud::FakeCloud;

/// Takes the steps that are due for the claim `c`, one after the other, until none is due or one fails.
async fn settle(ctx: Arc<Context>) -> String {
    let mut taken: Vec<String> = Vec::new();
    for _ in 0..20 {
        let due = Queue::default().start_due(&ctx.cluster.read(), clock::now());
        let Some(DueStep { claim, step, .. }) = due.into_iter().find(|due| due.claim == "c") else { break };
        let word = format!("{step:?}");
        let word = word.split('(').next().unwrap().to_owned();
        match carry_out(&ctx, &claim, &step).await {
            Ok(_) if taken.last() == Some(&word) && step != Step::Terminate => break,
            Ok(_) => taken.push(word),
            error => {
                taken.push(format!("{word}: {}", outcome(error.map(|_| ()))));
                break;
            }
        }
    }
    if taken.is_empty() { "nothing due".into() } else { taken.join(", ") }
}

fn now() -> String {
    clock::now().rfc3339()
}

/// The claim `c` and its node x, merged with these.
fn world(of_claim: &Value, of_node: Option<&Value>) -> World {
    let api = FakeApi::default();
    api.put(&node_class("default", &json!({})));
    let mut whole = json!({"metadata": {"creationTimestamp": now(), "finalizers": [labels::TERMINATION_FINALIZER]}});
    json_patch::merge(&mut whole, of_claim);
    api.put(&claim("c", &whole));
    api.put(&claim(
        "other",
        &json!({"metadata": {"finalizers": [labels::TERMINATION_FINALIZER]},
        "status": launched("i-2", &["Launched", "Registered", "Initialized"])}),
    ));
    if let Some(of_node) = of_node {
        let mut whole = json!({"metadata": {"creationTimestamp": now()}, "spec": {"providerID": "aws:///z/i-1"},
            "status": {"conditions": [{"type": "Ready", "status": "True"}]}});
        json_patch::merge(&mut whole, of_node);
        api.put(&node("x", &whole));
    }
    let instances = vec![instance("i-1", "uid-c", 0), instance("i-2", "uid-other", 0)];
    World::new(api).with_cloud(FakeCloud { instances: instances.into(), ..FakeCloud::default() })
}

#[tokio::test]
async fn a_claim_gets_its_finalizer_under_every_failure() {
    let unheld = json!({"metadata": {"finalizers": ["other/finalizer"]}, "status": launched("i-1", &["Launched"])});
    let text = transcript(|| world(&unheld, None), settle).await;
    insta::assert_snapshot!(text, @r#"
    undisturbed: AddFinalizer
      PATCH nodeclaims/c {"metadata":{"finalizers":["other/finalizer","karpenter.sh/termination"],"resourceVersion":"2"}}
      changes nodeclaims/c (metadata.finalizers)
    again: nothing due, no write, as undisturbed
    PATCH nodeclaims/c
    "#);
}

/// What was missing when the node opened is there now.
#[tokio::test]
async fn a_registered_node_is_initialized_under_every_failure() {
    let of_claim = json!({"status": launched("i-1", &["Launched", "Registered"])});
    let of_node =
        json!({"metadata": {"labels": {(labels::REGISTERED): "true"}, "finalizers": [labels::TERMINATION_FINALIZER]}});
    let text = transcript(|| world(&of_claim, Some(&of_node)), settle).await;
    insta::assert_snapshot!(text, @r#"
    undisturbed: Initialize
      PATCH nodes/x {"metadata":{"labels":{"karpenter.sh/initialized":"true"}}}
      PATCH nodeclaims/c/status {"metadata":{"resourceVersion":"2"},"status":{"conditions":[{"lastTransitionTime":"TIME","message":"","reason":"Launched","status":"True","type":"Launched"},{"lastTransitionTime":"TIME","message":"","reason":"Registered","status":"True","type":"Registered"},{"lastTransitionTime":"TIME","message":"","reason":"Initialized","status":"True","type":"Initialized"},{"lastTransitionTime":"TIME","message":"","reason":"ConsistentStateFound","status":"True","type":"ConsistentStateFound"},{"lastTransitionTime":"TIME","message":"","reason":"Ready","status":"True","type":"Ready"}]}}
      changes nodeclaims/c (status.conditions), nodes/x (metadata.labels)
    again: nothing due, no write, as undisturbed
    PATCH nodes/x
      404: Initialize: error 404; again: nothing due, no write, differs: nodeclaims/c (status.conditions), -nodes/x
    PATCH nodeclaims/c/status
    "#);
}

#[tokio::test]
async fn a_node_that_is_not_ready_any_more_is_registered_and_not_initialized() {
    let opened = json!({(labels::REGISTERED): "true", (labels::INITIALIZED): "true"});
    let not_ready = json!([{"type": "Ready", "status": "False"}]);
    let of_node = json!({"metadata": {"labels": opened, "finalizers": [labels::TERMINATION_FINALIZER]},
        "status": {"conditions": not_ready}});
    let world = world(&json!({"status": launched("i-1", &["Launched"])}), Some(&of_node));
    assert_eq!(settle(world.context()).await, "Register, ReportUninitialized");
}

/// From the Node that the kubelet registered to an initialized claim.
#[tokio::test]
async fn a_node_is_brought_up_under_every_failure() {
    let of_claim = json!({"metadata": {"labels": {(labels::NODE_POOL): "p"}},
        "spec": {"taints": [{"key": "team", "effect": "NoSchedule"}]}, "status": launched("i-1", &["Launched"])});
    let unregistered = json!({"key": labels::UNREGISTERED_TAINT, "effect": "NoExecute"});
    let of_node = json!({"spec": {"taints": [unregistered]}});
    let text = transcript(|| world(&of_claim, Some(&of_node)), settle).await;
    insta::assert_snapshot!(text, @r#"
    undisturbed: Sync, Open, Register
      PATCH nodes/x {"metadata":{"annotations":{},"finalizers":["karpenter.sh/termination"],"labels":{"karpenter.sh/nodepool":"p"},"ownerReferences":[{"apiVersion":"karpenter.sh/v1","blockOwnerDeletion":true,"kind":"NodeClaim","name":"c","uid":"uid-c"}],"resourceVersion":"4","uid":"uid-x"},"spec":{"taints":[{"effect":"NoExecute","key":"karpenter.sh/unregistered"},{"effect":"NoSchedule","key":"team"}]}}
      PATCH nodeclaims/c {"metadata":{"annotations":{"stowage.dev/hold-until":"TIME"}}}
      PATCH nodes/x [{"op":"test","path":"/metadata/uid","value":"uid-x"},{"op":"test","path":"/spec/taints","value":[{"effect":"NoExecute","key":"karpenter.sh/unregistered"},{"effect":"NoSchedule","key":"team"}]},{"op":"replace","path":"/spec/taints","value":[{"effect":"NoSchedule","key":"team"}]},{"op":"add","path":"/metadata/labels/karpenter.sh~1registered","value":"true"},{"op":"add","path":"/metadata/labels/karpenter.sh~1initialized","value":"true"}]
      PATCH nodeclaims/c/status {"metadata":{"resourceVersion":"6"},"status":{"conditions":[{"lastTransitionTime":"TIME","message":"","reason":"Launched","status":"True","type":"Launched"},{"lastTransitionTime":"TIME","message":"","reason":"Registered","status":"True","type":"Registered"},{"lastTransitionTime":"TIME","message":"","reason":"Initialized","status":"True","type":"Initialized"},{"lastTransitionTime":"TIME","message":"","reason":"ConsistentStateFound","status":"True","type":"ConsistentStateFound"},{"lastTransitionTime":"TIME","message":"","reason":"Ready","status":"True","type":"Ready"}],"nodeName":"x"}}
      changes nodeclaims/c (metadata.annotations status.conditions status.nodeName), nodes/x (metadata.finalizers metadata.labels metadata.ownerReferences spec.taints)
    again: nothing due, no write, as undisturbed
    PATCH nodes/x
      404: Sync: error 404; again: nothing due, no write, differs: nodeclaims/c (metadata.annotations status.conditions status.nodeName), -nodes/x
    PATCH nodeclaims/c
      404: Sync, Open: error 404; again: nothing due, no write, differs: nodes/x (metadata.labels spec.taints), -nodeclaims/c
    PATCH nodeclaims/c/status
    "#);
}

#[tokio::test]
async fn of_two_nodes_with_one_provider_id_none_is_registered() {
    let world = world(&json!({"status": launched("i-1", &["Launched"])}), Some(&json!({})));
    world.api.put(&node(
        "intruder",
        &json!({"metadata": {"creationTimestamp": now()}, "spec": {"providerID": "aws:///z/i-1"}}),
    ));
    assert_eq!(settle(world.context()).await, "ReportDuplicateNodes");
    let lines: Vec<_> = world.api.writes().iter().map(Recorded::line).collect();
    assert_eq!(lines, ["PATCH nodeclaims/c/status"], "no node is written");
    let conditions = world.api.stored("nodeclaims/c").unwrap()["status"]["conditions"].clone();
    let registered = conditions.as_array().unwrap().iter().find(|one| one["type"] == "Registered").unwrap().clone();
    assert_eq!((&registered["status"], &registered["reason"]), (&json!("False"), &json!("MultipleNodesFound")));
    let events = world.api.events();
    assert!(events.iter().any(|event| event.starts_with("Warning MultipleNodesFound on NodeClaim/c: ")), "{events:?}");
    world.api.reset();
    let again = world.context();
    again.cluster.update(|state| state.delete_node("intruder"));
    let taken = settle(again).await;
    assert!(taken.starts_with("Sync, Open, Register"), "it registers once the other Node is gone: {taken}");
}

#[tokio::test]
async fn a_registered_node_keeps_its_claim_when_another_has_its_provider_id() {
    let mut status = launched("i-1", &["Launched", "Registered", "Initialized"]);
    status["nodeName"] = json!("x");
    let world = world(&json!({ "status": status }), Some(&json!({})));
    let older =
        json!({"metadata": {"creationTimestamp": "2026-01-01T00:00:00Z"}, "spec": {"providerID": "aws:///z/i-1"}});
    world.api.put(&node("intruder", &older));
    let ctx = world.context();
    {
        let state = ctx.cluster.read();
        assert_eq!(state.node_of(&state.claims["c"]).unwrap().name_any(), "x");
    }
    assert_eq!(settle(ctx).await, "ReportDuplicateNodes");
    assert!(world.api.writes().is_empty() && world.api.events()[0].contains("intruder"), "{:?}", world.api.events());
}

#[tokio::test]
async fn a_node_without_the_unregistered_taint_is_registered_with_an_event() {
    let world = world(&json!({"status": launched("i-1", &["Launched"])}), Some(&json!({})));
    assert_eq!(settle(world.context()).await, "Sync, Open, Register");
    let events = world.api.events();
    assert!(events[0].starts_with("Warning UnregisteredTaintMissing on NodeClaim/c: "), "{events:?}");
}

#[tokio::test]
async fn the_reason_why_a_node_is_not_initialized_is_written_under_every_failure() {
    let of_claim = json!({"status": launched("i-1", &["Launched", "Registered"])});
    let of_node = json!({"status": {"conditions": [{"type": "Ready", "status": "False"}]}});
    let text = transcript(|| world(&of_claim, Some(&of_node)), settle).await;
    insta::assert_snapshot!(text, @r#"
    undisturbed: ReportUninitialized
      PATCH nodeclaims/c/status {"metadata":{"resourceVersion":"2"},"status":{"conditions":[{"lastTransitionTime":"TIME","message":"","reason":"Launched","status":"True","type":"Launched"},{"lastTransitionTime":"TIME","message":"","reason":"Registered","status":"True","type":"Registered"},{"lastTransitionTime":"TIME","message":"","reason":"NodeNotReady","status":"Unknown","type":"Initialized"},{"lastTransitionTime":"TIME","message":"Initialized=Unknown","reason":"ReconcilingDependents","status":"Unknown","type":"Ready"}]}}
      event Warning NotInitialized on NodeClaim/c: not initialized 15 minutes after it registered: NodeNotReady
      event Warning NotInitialized on Node/x: not initialized 15 minutes after it registered: NodeNotReady
      changes nodeclaims/c (status.conditions)
    again: ReportUninitialized, no write, as undisturbed
    PATCH nodeclaims/c/status
    "#);
}

/// Nothing ends the pods of a machine that no longer exists.
#[tokio::test]
async fn b60_f6_a_node_whose_instance_is_gone_is_not_drained() {
    for (ready, exists, released) in [("Unknown", false, true), ("Unknown", true, false), ("True", false, false)] {
        let meta = json!({"deletionTimestamp": now(), "finalizers": [labels::TERMINATION_FINALIZER]});
        let of_claim = json!({"metadata": meta, "status": launched("i-1", &["Launched", "Registered", "Initialized"])});
        let taint = json!({"key": labels::DISRUPTED_TAINT, "effect": "NoSchedule"});
        let of_node = json!({"metadata": meta, "spec": {"taints": [taint]},
            "status": {"conditions": [{"type": "Ready", "status": ready}]}});
        let world = world(&of_claim, Some(&of_node));
        let protected = json!({(labels::DO_NOT_DISRUPT): "true"});
        world.api.put(&pod("a", &json!({"metadata": {"annotations": protected}, "spec": {"nodeName": "x"}})));
        if !exists {
            lock(&world.cloud.instances).clear();
        }
        settle(world.context()).await;
        let gone = |path: &str| world.api.stored(path).is_none();
        assert_eq!((gone("nodes/x"), gone("nodeclaims/c")), (released, released), "Ready {ready}, exists {exists}");
    }
}

/// A drained node whose instance has a volume of a pod that is gone.
#[tokio::test]
async fn an_instance_is_terminated_when_its_volumes_are_detached() {
    for (case, annotations, is_ready, exists, is_terminated, status) in [
        ("attached", json!({}), true, true, false, Some("Unknown")),
        (
            "the deadline is over",
            json!({(labels::TERMINATION_TIMESTAMP): "2026-01-01T00:00:00Z"}),
            true,
            true,
            true,
            Some("False"),
        ),
        ("the instance is gone", json!({}), false, false, true, None),
    ] {
        let meta = json!({"deletionTimestamp": now(), "finalizers": [labels::TERMINATION_FINALIZER], "annotations": annotations});
        let of_claim = json!({"metadata": meta, "status": launched("i-1", &["Launched", "Registered", "Initialized"])});
        let taint = json!({"key": labels::DISRUPTED_TAINT, "effect": "NoSchedule"});
        let ready = json!([{"type": "Ready", "status": if is_ready { "True" } else { "Unknown" }}]);
        let of_node = json!({"metadata": meta, "spec": {"taints": [taint]}, "status": {"conditions": ready}});
        let world = world(&of_claim, Some(&of_node));
        if !exists {
            lock(&world.cloud.instances).clear();
        }
        let ctx = world.context();
        let source = json!({"persistentVolumeName": "pv-1"});
        let spec = json!({"attacher": "ebs.csi.aws.com", "nodeName": "x", "source": source});
        let attachment = serde_json::from_value(json!({"metadata": {"name": "a"}, "spec": spec})).unwrap();
        ctx.cluster.update(|state| state.attachments.apply(&attachment));
        settle(Arc::clone(&ctx)).await;
        let calls = world.cloud.calls();
        assert_eq!(calls.iter().any(|call| call.starts_with("terminate")), is_terminated, "{case}: {calls:?}");
        let claim = ctx.cluster.read().claims.get("c").cloned();
        let condition = claim.as_ref().and_then(|claim| claim.condition(conditions::VOLUMES_DETACHED).cloned());
        let found = condition.map(|condition| condition.status);
        let events = world.api.events();
        if is_terminated {
            assert!(world.api.stored("nodeclaims/c").is_none(), "{case}");
            let written =
                world.api.writes().iter().any(|write| write.body.to_string().contains("TerminationGracePeriodElapsed"));
            assert_eq!(written, status == Some("False"), "{case}");
            continue;
        }
        assert_eq!(found.as_deref(), status, "{case}");
        let note = "Normal AwaitingVolumeDetachment on NodeClaim/c: waits until its volumes are detached: pv-1";
        assert!(events.iter().any(|event| event == note), "{events:?}");
        ctx.cluster.update(|state| state.attachments.delete("a"));
        settle(Arc::clone(&ctx)).await;
        assert!(world.api.stored("nodeclaims/c").is_none(), "{case}");
    }
}

/// From a deleted claim, whose node is empty, to nothing.
#[tokio::test]
async fn a_deleted_claim_is_torn_down_under_every_failure() {
    let meta = json!({"deletionTimestamp": now(), "finalizers": [labels::TERMINATION_FINALIZER]});
    let of_claim = json!({"metadata": meta, "spec": {"terminationGracePeriod": "1h"},
        "status": launched("i-1", &["Launched", "Registered", "Initialized"])});
    let of_node = json!({"metadata": {"finalizers": [labels::TERMINATION_FINALIZER]}});
    let text = transcript(|| world(&of_claim, Some(&of_node)), settle).await;
    insta::assert_snapshot!(text, @r#"
    undisturbed: WriteDeadline, DeleteNode, Drain, Terminate, Terminate
      PATCH nodeclaims/c {"metadata":{"annotations":{"karpenter.sh/nodeclaim-termination-timestamp":"TIME"}}}
      DELETE nodes/x {"preconditions":{"uid":"uid-x"}}
      PATCH nodes/x [{"op":"test","path":"/metadata/uid","value":"uid-x"},{"op":"test","path":"/metadata/resourceVersion","value":"8"},{"op":"add","path":"/spec/taints","value":[{"effect":"NoSchedule","key":"karpenter.sh/disrupted"}]},{"op":"add","path":"/metadata/labels","value":{}},{"op":"add","path":"/metadata/labels/node.kubernetes.io~1exclude-from-external-load-balancers","value":"karpenter"}]
      PATCH nodeclaims/c/status {"metadata":{"resourceVersion":"5"},"status":{"conditions":[{"lastTransitionTime":"TIME","message":"","reason":"Launched","status":"True","type":"Launched"},{"lastTransitionTime":"TIME","message":"","reason":"Registered","status":"True","type":"Registered"},{"lastTransitionTime":"TIME","message":"","reason":"Initialized","status":"True","type":"Initialized"},{"lastTransitionTime":"TIME","message":"","reason":"Drained","status":"True","type":"Drained"},{"lastTransitionTime":"TIME","message":"","reason":"VolumesDetached","status":"True","type":"VolumesDetached"},{"lastTransitionTime":"TIME","message":"","reason":"InstanceTerminating","status":"True","type":"InstanceTerminating"},{"lastTransitionTime":"TIME","message":"","reason":"Ready","status":"True","type":"Ready"}]}}
      PATCH nodes/x {"metadata":{"finalizers":[],"resourceVersion":"9"}}
      PATCH nodeclaims/c {"metadata":{"finalizers":[],"resourceVersion":"10"}}
      event Warning TerminationGracePeriodExpiring on NodeClaim/c: all its pods will be deleted by TIME
      event Warning TerminationGracePeriodExpiring on Node/x: all its pods will be deleted by TIME
      cloud terminate aws:///z/i-1
      cloud terminate aws:///z/i-1
      changes -nodeclaims/c, -nodes/x
    again: nothing due, no write, as undisturbed
    PATCH nodeclaims/c
      404: WriteDeadline: error 404; again: nothing due, no write, differs: +nodes/x
    DELETE nodes/x
    PATCH nodes/x
    PATCH nodeclaims/c/status
    "#);
}

#[tokio::test]
async fn a_claim_stays_as_long_as_a_finalizer_of_others_keeps_its_node() {
    let meta = |finalizers: &[&str]| json!({"deletionTimestamp": now(), "finalizers": finalizers});
    let of_claim = json!({"metadata": meta(&[labels::TERMINATION_FINALIZER]),
        "status": launched("i-1", &["Launched", "Registered", "Initialized"])});
    let taint = json!({"key": labels::DISRUPTED_TAINT, "effect": "NoSchedule"});
    let of_node = json!({"metadata": meta(&[labels::TERMINATION_FINALIZER, "others"]), "spec": {"taints": [taint]}});
    let world = world(&of_claim, Some(&of_node));
    let ctx = world.context();
    settle(Arc::clone(&ctx)).await;
    assert_eq!(world.api.stored("nodes/x").unwrap()["metadata"]["finalizers"], json!(["others"]));
    let calls = world.cloud.calls();
    assert_eq!(calls, ["terminate aws:///z/i-1", "terminate aws:///z/i-1"], "asked again only while it shuts down");
    assert!(ctx.cluster.read().claims["c"].has_condition(conditions::INSTANCE_TERMINATING));
    ctx.patch_node("x", &json!({"metadata": {"finalizers": []}})).await.unwrap();
    ctx.cluster.update(|state| state.delete_node("x"));
    settle(ctx).await;
    assert!(world.api.stored("nodeclaims/c").is_none());
}

/// A claim whose launch was never recorded: its instance is found by its token.
#[tokio::test]
async fn a_claim_without_provider_id_terminates_what_was_launched_for_it() {
    let of_claim = json!({"metadata": {"deletionTimestamp": now()}});
    let text = transcript(|| world(&of_claim, None), settle).await;
    insta::assert_snapshot!(text, @r#"
    undisturbed: Terminate, Terminate
      PATCH nodeclaims/c/status {"metadata":{"resourceVersion":"2"},"status":{"conditions":[{"lastTransitionTime":"TIME","message":"object is awaiting reconciliation","reason":"AwaitingReconciliation","status":"Unknown","type":"Launched"},{"lastTransitionTime":"TIME","message":"object is awaiting reconciliation","reason":"AwaitingReconciliation","status":"Unknown","type":"Registered"},{"lastTransitionTime":"TIME","message":"object is awaiting reconciliation","reason":"AwaitingReconciliation","status":"Unknown","type":"Initialized"},{"lastTransitionTime":"TIME","message":"","reason":"InstanceTerminating","status":"True","type":"InstanceTerminating"},{"lastTransitionTime":"TIME","message":"Launched=Unknown, Registered=Unknown, Initialized=Unknown","reason":"ReconcilingDependents","status":"Unknown","type":"Ready"}]}}
      PATCH nodeclaims/c {"metadata":{"finalizers":[],"resourceVersion":"4"}}
      cloud terminate aws:///z/i-1
      changes -nodeclaims/c
    again: nothing due, no write, as undisturbed
    PATCH nodeclaims/c/status
    PATCH nodeclaims/c
    "#);
}

#[tokio::test]
async fn a_claim_follows_its_deleted_node_under_every_failure() {
    let of_claim = json!({"status": launched("i-1", &["Launched", "Registered", "Initialized"])});
    let of_node = json!({"metadata": {"deletionTimestamp": now(), "finalizers": ["other/finalizer"]}});
    let first = async |ctx: Arc<Context>| match carry_out(&ctx, "c", &Step::DeleteClaim).await {
        Ok(_) => "ok".to_owned(),
        error => outcome(error.map(|_| ())),
    };
    let text = transcript(|| world(&of_claim, Some(&of_node)), first).await;
    insta::assert_snapshot!(text, @r#"
    undisturbed: ok
      DELETE nodeclaims/c {"preconditions":{"uid":"uid-c"}}
      changes nodeclaims/c (metadata.deletionGracePeriodSeconds metadata.deletionTimestamp)
    again: ok, 1 write, as undisturbed
    DELETE nodeclaims/c
    "#);
}

#[tokio::test]
async fn a_claim_is_abandoned_under_every_failure() {
    let text = transcript(
        || world(&json!({}), None),
        async |ctx| match carry_out(&ctx, "c", &Step::Abandon(DisruptionReason::LaunchTimeout)).await {
            Ok(_) => "ok".to_owned(),
            error => outcome(error.map(|_| ())),
        },
    )
    .await;
    insta::assert_snapshot!(text, @r#"
    undisturbed: ok
      DELETE nodeclaims/c {"preconditions":{"uid":"uid-c"}}
      event Warning Disrupted on NodeClaim/c: launch_timeout: launch or registration timed out
      changes nodeclaims/c (metadata.deletionGracePeriodSeconds metadata.deletionTimestamp)
    again: ok, 1 write, as undisturbed
    DELETE nodeclaims/c
    "#);
}

#[tokio::test]
async fn a_claim_that_no_offering_serves_is_deleted() {
    // The catalog of this cloud is empty.
    let world = world(&json!({}), None);
    first_turn(run(world.context())).await;
    assert_eq!(world.api.lines()[0], "DELETE nodeclaims/c");
    let event = &world.api.events()[0];
    assert!(event.starts_with("Warning Disrupted on NodeClaim/c: insufficient_capacity"), "{event}");
}

#[tokio::test]
async fn a_step_that_meets_a_conflict_is_followed_by_a_read() {
    let world =
        world(&json!({"metadata": {"finalizers": []}, "status": launched("i-1", &["Launched"])}), Some(&json!({})));
    world.api.inject(Fault::WrittenByAnother, 1, crate::test_support::kubernetes::Recorded::is_write);
    let ctx = world.context();
    first_turn(run(Arc::clone(&ctx))).await;
    assert_eq!(world.api.lines()[..3], ["PATCH nodeclaims/c", "GET nodes/x", "GET nodeclaims/c"]);
    assert!(ctx.cluster.read().claims["c"].annotations().contains_key("other.example/wrote"));
}

/// After a conflict the claim and its Node are read again, so that the next step does not depend on the watch.
#[tokio::test]
async fn a_conflict_is_followed_by_a_read() {
    let world = world(&json!({"status": launched("i-1", &["Launched"])}), Some(&json!({})));
    let ctx = world.context();
    world.api.put(&node("x", &json!({"metadata": {"labels": {"a": "b"}}, "spec": {"providerID": "aws:///z/i-1"}})));
    refresh(&ctx, "c").await;
    assert_eq!(world.api.lines(), ["GET nodes/x", "GET nodeclaims/c"]);
    assert_eq!(ctx.cluster.read().nodes["x"].labels()["a"], "b");
}

#[tokio::test]
async fn f9_a_claim_is_not_abandoned_while_the_watch_of_nodes_is_stale() {
    let of_claim =
        json!({"metadata": {"creationTimestamp": "2020-01-01T00:00:00Z"}, "status": launched("i-1", &["Launched"])});
    let world = world(&of_claim, None);
    let ctx = world.context();
    let (signs, now) = (ctx.cluster.watch_signs(), clock::now());
    signs.record_list("nodeclaims", now);
    signs.record_list("nodes", now - Duration::from_mins(2));
    let step = Step::Abandon(DisruptionReason::RegistrationTimeout);
    assert_eq!(carry_out(&ctx, "c", &step).await.unwrap(), Requeue::After(POLL_PERIOD));
    assert!(world.api.writes().is_empty());
    signs.record("nodes", now);
    carry_out(&ctx, "c", &step).await.unwrap();
    assert_eq!(world.api.writes().len(), 1, "with fresh watches it is");
}

#[tokio::test]
async fn nothing_is_launched_while_provisioning_is_paused() {
    for (paused, calls) in [("provisioning", 0), ("disruption", 1)] {
        let requirements = json!([{"key": labels::INSTANCE_TYPE, "operator": "In", "values": ["m5.large"]}]);
        let world = world(&json!({"spec": {"requirements": requirements}}), None);
        let world = world.with_cloud(FakeCloud { catalog: Arc::new(catalog()), ..FakeCloud::default() });
        let ctx = world.context();
        ctx.cluster.update(|state| state.pause = Some(Pause::parse(Some(paused))));
        let _ = carry_out(&ctx, "c", &Step::Launch).await;
        let launches = world.cloud.calls().iter().filter(|call| call.starts_with("launch ")).count();
        assert_eq!(launches, calls, "{paused}");
    }
}

#[tokio::test]
async fn a_step_that_panics_delays_no_other_claim_and_is_retried() {
    let api = FakeApi::default();
    let meta = json!({"deletionTimestamp": now(), "finalizers": [labels::TERMINATION_FINALIZER]});
    for (name, id) in [("a", "i-1"), ("b", "i-2")] {
        api.put(&claim(name, &json!({"metadata": meta, "status": launched(id, &["Launched"])})));
    }
    let instances = vec![instance("i-1", "uid-a", 0), instance("i-2", "uid-b", 0)];
    let panicking = Some("aws:///z/i-1".to_owned());
    let world =
        World::new(api).with_cloud(FakeCloud { instances: instances.into(), panicking, ..FakeCloud::default() });
    let ctx = world.context();
    let _ = tokio::time::timeout(Duration::from_secs(2), run(Arc::clone(&ctx))).await;
    assert!(world.cloud.calls().iter().all(|call| call == "terminate aws:///z/i-2"));
    assert_eq!(ctx.cluster.read().claims.keys().collect::<Vec<_>>(), ["a"]);
    assert_eq!(ctx.metrics.steps_panicked.get(), 1, "the next attempt is thirty seconds later");
}
