use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use serde_json::json;
use stowage_model::events;
use stowage_test_objects::{claim, node, node_class};

use super::*;
use crate::test_support::failures::{World, outcome, transcript};
use crate::test_support::kubernetes::object_store::Refusal;
use crate::test_support::kubernetes::{FakeApi, Fault};
use crate::test_support::scripted_cloud::FakeCloud;

fn world() -> World {
    let api = FakeApi::default();
    api.put(&claim("c", &json!({})));
    api.put(&claim("other", &json!({})));
    api.put(&node("x", &json!({})));
    World::new(api)
}

#[tokio::test]
async fn a_claim_is_patched_under_every_failure() {
    let patch = json!({"metadata": {"annotations": {"a": "b"}}});
    let text = transcript(world, async |ctx| outcome(ctx.patch_claim("c", &patch).await)).await;
    insta::assert_snapshot!(text, @r#"
    undisturbed: ok
      PATCH nodeclaims/c {"metadata":{"annotations":{"a":"b"}}}
      changes nodeclaims/c (metadata.annotations)
    again: ok, 1 write, as undisturbed
    PATCH nodeclaims/c
      404: error 404; again: error 404, 1 write, differs: -nodeclaims/c
    "#);
}

#[tokio::test]
async fn a_node_is_patched_under_every_failure() {
    let patch = json!({"metadata": {"labels": {"a": "b"}}});
    let text = transcript(world, async |ctx| outcome(ignore_not_found(ctx.patch_node("x", &patch).await))).await;
    insta::assert_snapshot!(text, @r#"
    undisturbed: ok
      PATCH nodes/x {"metadata":{"labels":{"a":"b"}}}
      changes nodes/x (metadata.labels)
    again: ok, 1 write, as undisturbed
    PATCH nodes/x
    "#);
}

#[tokio::test]
async fn a_claims_status_is_written_to_its_present_version_under_every_failure() {
    let status = json!({"nodeName": "x"});
    let text = transcript(world, async |ctx| {
        let Some(claim) = ctx.cluster.read().claims.get("c").cloned() else { return "no claim".into() };
        outcome(ctx.update_claim_status(&claim, |_| Some(status.clone())).await)
    })
    .await;
    insta::assert_snapshot!(text, @r#"
    undisturbed: ok
      PATCH nodeclaims/c/status {"metadata":{"resourceVersion":"1"},"status":{"nodeName":"x"}}
      changes nodeclaims/c (status)
    again: ok, 1 write, as undisturbed
    PATCH nodeclaims/c/status
    "#);
}

#[tokio::test]
async fn a_status_of_an_old_claim_is_refused_when_another_wrote_it() {
    let status = json!({"nodeName": "x"});
    let text = transcript(world, async |ctx| {
        let Some(claim) = ctx.cluster.read().claims.get("c").cloned() else { return "no claim".into() };
        outcome(ctx.patch_claim_status_at(&claim, &status).await)
    })
    .await;
    insta::assert_snapshot!(text, @r#"
    undisturbed: ok
      PATCH nodeclaims/c/status {"metadata":{"resourceVersion":"1"},"status":{"nodeName":"x"}}
      changes nodeclaims/c (status)
    again: ok, 1 write, as undisturbed
    PATCH nodeclaims/c/status
    "#);
}

#[tokio::test]
async fn a_response_to_a_write_is_applied_before_the_watch_reports_it() {
    let ctx = world().context();
    ctx.patch_claim("c", &json!({"metadata": {"annotations": {"a": "b"}}})).await.unwrap();
    ctx.patch_node("x", &json!({"metadata": {"labels": {"a": "b"}}})).await.unwrap();
    let state = ctx.cluster.read();
    assert_eq!(state.claims["c"].annotations()["a"], "b");
    assert_eq!(state.nodes["x"].labels()["a"], "b");
}

#[tokio::test]
async fn an_event_is_written_once_for_equal_texts() {
    let world = world();
    let ctx = world.context();
    let about: Arc<Node> = ctx.cluster.read().nodes["x"].clone();
    for note in ["first", "first", "second"] {
        ctx.emit(reference(&*about), events::FAILED_DRAINING.note(note)).await;
    }
    // Equal as far as they are written.
    for end in ["a", "b"] {
        let long = format!("{}{end}", "ä".repeat(2_000));
        ctx.emit(reference(&*about), events::LAUNCHED.note(&long)).await;
    }
    let events = world.api.events();
    assert_eq!(events[0], "Warning FailedDraining on Node/x: first");
    assert_eq!(events[1], "Warning FailedDraining on Node/x: second");
    assert!(events[2].starts_with("Normal Launched on Node/x: ää"));
    assert_eq!(events.len(), 3);
    assert_eq!(events[2].len(), "Normal Launched on Node/x: ".len() + 1_000, "bytes");
}

#[tokio::test]
async fn an_event_that_the_server_refuses_is_written_ten_seconds_later() {
    for fault in [Fault::Refused(Refusal::invalid("no")), Fault::LostAnswer, Fault::Refused(Refusal::gateway_timeout())]
    {
        let world = world();
        let (ctx, now) = (world.context(), clock::now());
        let about: Arc<Node> = ctx.cluster.read().nodes["x"].clone();
        world.api.inject(fault, usize::MAX, |request| request.key.resource == "events");
        let emitted = async |seconds| {
            let at = now + Duration::from_secs(seconds);
            ctx.emit_at(reference(&*about), events::FAILED_DRAINING.note("note"), at).await
        };
        assert!(!emitted(0).await);
        world.api.reset();
        assert!(!emitted(9).await && world.api.events().is_empty(), "some callers emit it in every pass");
        assert!(emitted(10).await && world.api.events().len() == 1);
        assert!(emitted(11).await && world.api.events().len() == 1, "equal");
    }
}

#[tokio::test]
async fn equal_events_are_counted_by_one_object() {
    let world = world();
    let (ctx, now) = (world.context(), clock::now());
    let about: Arc<Node> = ctx.cluster.read().nodes["x"].clone();
    for minutes in [0, 1, 2, 4] {
        let at = now + Duration::from_mins(minutes);
        assert!(ctx.emit_at(reference(&*about), events::FAILED_DRAINING.note("note"), at).await);
    }
    assert_eq!(world.api.events().len(), 1);
    assert_eq!(world.api.event_counts(), [3], "every two minutes");
}

#[tokio::test]
async fn an_event_waits_as_long_as_the_server_asks() {
    let world = world();
    let ctx = world.context();
    let about: Arc<Node> = ctx.cluster.read().nodes["x"].clone();
    world.api.inject(Fault::Refused(Refusal::too_many_requests(3)), 1, |_| true);
    ctx.emit(reference(&*about), events::FAILED_DRAINING.note("note")).await;
    assert_eq!((world.api.waited() + Duration::from_millis(500)).as_secs(), 3);
    assert_eq!(world.api.events().len(), 2, "sent twice");
    assert!(world.api.stored("nodes/x").is_some());
}

/// A spot interruption leaves two minutes, and an API server may take seconds for each answer.
#[tokio::test]
async fn a_server_that_times_out_keeps_the_caller_for_seconds() {
    let world = world();
    world.api.inject_on("PATCH nodes/x", Fault::Refused(Refusal::gateway_timeout()));
    let patched = world.context().patch_node("x", &json!({"metadata": {"labels": {"a": "b"}}})).await;
    assert_eq!(outcome(patched), "error 504");
    let waited = world.api.waited();
    assert!((Duration::from_secs(1)..Duration::from_secs(10)).contains(&waited), "{waited:?}");
    assert_eq!(world.api.lines().len(), 7);
}

#[tokio::test]
async fn every_node_class_gets_the_event() {
    let api = FakeApi::default();
    api.put(&node_class("a", &json!({})));
    api.put(&node_class("b", &json!({})));
    let ctx = api.context(Arc::new(FakeCloud::default()), PlacementMode::Nominate);
    ctx.emit_for_classes(events::SPOT_PRICES_READABLE.note("again")).await;
    let events = api.events();
    assert_eq!(events, ["a", "b"].map(|name| format!("Normal SpotPricesReadable on EC2NodeClass/{name}: again")));
}

#[tokio::test]
async fn taints_are_replaced_unless_they_changed() {
    let taint = |key: &str| json!({"key": key, "effect": "NoSchedule"});
    let known: Node = node("x", &json!({"spec": {"taints": [taint("a")]}, "metadata": {"labels": {"old": "1"}}}));
    let bare: Node = node("x", &json!({}));
    let refused = Fault::Refused(Refusal::invalid("denied by a policy"));
    for (case, read, patch, fault, expected) in [
        ("unchanged", &known, json!({}), None, Ok("b, new")),
        ("another status", &known, json!({"status": {"phase": "Running"}}), None, Ok("b, new")),
        ("another label", &known, json!({"metadata": {"labels": {"other": "1"}}}), None, Ok("b, new other")),
        ("another taint", &known, json!({"spec": {"taints": [taint("a"), taint("c")]}}), None, Err(409)),
        ("refused", &known, json!({}), Some(refused), Err(422)),
        ("without taints and labels", &bare, json!({}), None, Ok("b, new")),
        ("another status of one without taints", &bare, json!({"status": {"phase": "Running"}}), None, Ok("b, new")),
        ("a taint where there was none", &bare, json!({"spec": {"taints": [taint("c")]}}), None, Err(409)),
    ] {
        let api = FakeApi::default();
        api.put(read);
        let read: Node = serde_json::from_value(api.stored("nodes/x").unwrap()).unwrap();
        if patch != json!({}) {
            let mut present = serde_json::to_value(&read).unwrap();
            json_patch::merge(&mut present, &patch);
            api.put(&serde_json::from_value::<Node>(present).unwrap());
        }
        if let Some(fault) = fault {
            api.inject_on("PATCH nodes/x", fault);
        }
        let world = World::new(api);
        let taints: Vec<Taint> = serde_json::from_value(json!([taint("b")])).unwrap();
        let done = world.context().set_taints(&read, &taints, &[("new", Some("1")), ("old", None)]).await;
        let code = |error: &kube::Error| matches!(error, kube::Error::Api(status) if Err(status.code) == expected);
        match (&done, expected) {
            (Ok(()), Ok(expected)) => {
                let stored = world.api.stored("nodes/x").unwrap();
                let keys: Vec<String> = stored["metadata"]["labels"].as_object().unwrap().keys().cloned().collect();
                let found = format!("{}, {}", stored["spec"]["taints"][0]["key"].as_str().unwrap(), keys.join(" "));
                assert_eq!(found, expected, "{case}");
            }
            (Err(error), Err(_)) => assert!(code(error), "{case}: {error}"),
            _ => panic!("{case}: {done:?}"),
        }
    }
}
