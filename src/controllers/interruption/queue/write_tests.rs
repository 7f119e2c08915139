use serde_json::json;
use stowage_cloud::{Instance, InstanceState};
use stowage_model::labels;
use stowage_model::pause::Pause;
use stowage_model::time::UnixMillis;
use stowage_runtime::sync::lock;
use stowage_test_objects::{claim, instance, launched, node, node_class};

use super::*;
use crate::controllers::disruption::departure;
use crate::decisions::disruption::mark::DisruptionMark;
use crate::decisions::disruption::reason::DisruptionReason;
use crate::test_support::failures::{World, first_turn, outcome, transcript};
use crate::test_support::kubernetes::object_store::Refusal;
use crate::test_support::kubernetes::{FakeApi, Fault, Recorded};
use crate::test_support::scripted_cloud::FakeCloud;

/// The claims `c` and `other` with their nodes x and y.
fn world() -> World {
    let api = FakeApi::default();
    let finalizers = json!([labels::TERMINATION_FINALIZER]);
    for (name, id, node_name) in [("c", "i-1", "x"), ("other", "i-2", "y")] {
        let status = launched(id, &["Launched", "Registered", "Initialized"]);
        api.put(&claim(name, &json!({"metadata": {"finalizers": finalizers}, "status": status})));
        let taints = json!([{"key": "team", "effect": "NoSchedule"}]);
        api.put(&node(node_name, &json!({"spec": {"providerID": format!("aws:///z/{id}"), "taints": taints}})));
    }
    World { watched: true, ..World::new(api) }
}

async fn responded(ctx: Arc<Context>, kind: MessageKind) -> String {
    let message = Message { receipt: "r".into(), kind, instance_id: "i-1".into(), at: UnixMillis(4_102_444_800_000) };
    let handler = Handler::new(&ctx);
    let done = outcome(handler.respond(&ctx, &message).await);
    handler.events.drained().await;
    done
}

#[tokio::test]
async fn an_interrupted_node_is_marked_and_tainted_under_every_failure() {
    let text = transcript(world, async |ctx| responded(ctx, MessageKind::SpotInterruption).await).await;
    insta::assert_snapshot!(text, @r#"
    undisturbed: ok
      PATCH nodeclaims/c {"metadata":{"annotations":{"stowage.dev/disrupting":"SpotInterruption/2100-01-01T00:02:00Z"},"resourceVersion":"1"}}
      PATCH nodes/x [{"op":"test","path":"/metadata/uid","value":"uid-x"},{"op":"test","path":"/metadata/resourceVersion","value":"2"},{"op":"test","path":"/spec/taints","value":[{"effect":"NoSchedule","key":"team"}]},{"op":"replace","path":"/spec/taints","value":[{"effect":"NoSchedule","key":"team"},{"effect":"NoSchedule","key":"karpenter.sh/disrupted"}]},{"op":"add","path":"/metadata/labels","value":{}},{"op":"add","path":"/metadata/labels/node.kubernetes.io~1exclude-from-external-load-balancers","value":"karpenter"}]
      event Warning SpotInterrupted on NodeClaim/c: Spot interruption warning: instance will be reclaimed in 2 minutes
      event Warning SpotInterrupted on Node/x: Spot interruption warning: instance will be reclaimed in 2 minutes
      changes nodeclaims/c (metadata.annotations), nodes/x (metadata.labels spec.taints)
    again: ok, no write, as undisturbed
    PATCH nodeclaims/c
      404: error 404; again: ok, no write, differs: nodes/x (metadata.labels spec.taints), -nodeclaims/c
    PATCH nodes/x
    "#);
}

#[tokio::test]
async fn the_claim_of_a_stopped_instance_is_deleted_under_every_failure() {
    let text = transcript(world, async |ctx| responded(ctx, MessageKind::Stopped).await).await;
    insta::assert_snapshot!(text, @r#"
    undisturbed: ok
      DELETE nodeclaims/c {"preconditions":{"uid":"uid-c"}}
      event Warning InstanceStopping on NodeClaim/c: instance is stopping
      event Warning InstanceStopping on Node/x: instance is stopping
      event Warning TerminatingOnInterruption on NodeClaim/c: instance is shutting down or terminated
      event Warning TerminatingOnInterruption on Node/x: instance is shutting down or terminated
      changes nodeclaims/c (metadata.deletionGracePeriodSeconds metadata.deletionTimestamp)
    again: ok, no write, as undisturbed
    DELETE nodeclaims/c
    "#);
}

#[tokio::test]
async fn a_recommendation_is_reported_and_nothing_is_written() {
    let world = world();
    assert_eq!(responded(world.context(), MessageKind::RebalanceRecommendation).await, "ok");
    assert!(world.api.lines().is_empty());
    let note = "elevated risk of spot interruption (rebalance recommendation)";
    let event = |about: &str| format!("Normal SpotRebalanceRecommendation on {about}: {note}");
    assert_eq!(world.api.events(), [event("NodeClaim/c"), event("Node/x")]);
}

#[tokio::test]
async fn a_voluntary_mark_does_not_replace_an_interruption_that_it_has_not_observed() {
    let world = World { watched: false, ..world() };
    let (late, early) = (world.context(), world.context());
    let marked = async |ctx: &Context, reason: DisruptionReason, deadline: Option<i64>| {
        let claim = ctx.cluster.read().claims["c"].clone();
        let deadline = deadline.map(UnixMillis);
        mark(ctx, &claim, DisruptionMark { reason, deadline }, None).await.unwrap();
    };
    marked(&early, DisruptionReason::SpotInterruption, Some(2_000)).await;
    let node = serde_json::from_value(world.api.stored("nodes/x").unwrap()).unwrap();
    late.cluster.update(|state| state.apply_node(node));
    marked(&late, DisruptionReason::Empty, None).await;
    let written = world.api.stored("nodeclaims/c").unwrap()["metadata"]["annotations"][labels::DISRUPTING].clone();
    assert_eq!(written, "SpotInterruption/1970-01-01T00:00:02Z");
}

/// Of two notices the earlier deadline counts.
#[tokio::test]
async fn an_earlier_deadline_stays() {
    let world = world();
    let written = async |deadline: Option<i64>| {
        let ctx = world.context();
        let claim = ctx.cluster.read().claims["c"].clone();
        let deadline = deadline.map(UnixMillis);
        let new = DisruptionMark { reason: DisruptionReason::ScheduledChange, deadline };
        mark(&ctx, &claim, new, None).await.unwrap();
        world.api.stored("nodeclaims/c").unwrap()["metadata"]["annotations"][labels::DISRUPTING].clone()
    };
    assert_eq!(written(None).await, "ScheduledChange/");
    assert_eq!(written(Some(2_000)).await, "ScheduledChange/1970-01-01T00:00:02Z");
    assert_eq!(written(Some(3_000)).await, "ScheduledChange/1970-01-01T00:00:02Z");
    assert_eq!(written(None).await, "ScheduledChange/1970-01-01T00:00:02Z");
    assert_eq!(written(Some(1_000)).await, "ScheduledChange/1970-01-01T00:00:01Z");
}

#[tokio::test]
async fn a_marked_claim_whose_pods_have_moved_is_deleted_under_every_failure() {
    let marked = || {
        let world = World { watched: false, ..world() };
        let meta = json!({"annotations": {(labels::DISRUPTING): "SpotInterruption/2099-01-01T00:00:00Z"}, "finalizers": [labels::TERMINATION_FINALIZER]});
        world.api.put(&claim("c", &json!({"metadata": meta, "status": launched("i-1", &["Launched"])})));
        let mut empty = meta.clone();
        empty["annotations"][labels::DISRUPTING] = json!("Empty/");
        world.api.put(&claim("other", &json!({"metadata": empty, "status": launched("i-2", &["Launched"])})));
        world
    };
    let text = transcript(marked, async |ctx| {
        first_turn(departure::run(ctx)).await;
        "waits".into()
    })
    .await;
    insta::assert_snapshot!(text, @r#"
    undisturbed: waits
      DELETE nodeclaims/c {"preconditions":{"uid":"uid-c"}}
      event Warning TerminatingOnInterruption on NodeClaim/c: replacement is ready or the deadline has passed; terminating
      event Warning TerminatingOnInterruption on Node/x: replacement is ready or the deadline has passed; terminating
      changes nodeclaims/c (metadata.deletionGracePeriodSeconds metadata.deletionTimestamp)
    again: waits, no write, as undisturbed
    DELETE nodeclaims/c
    "#);
}

fn message(receipt: &str, instance_id: &str) -> Message {
    let (receipt, instance_id) = (receipt.to_owned(), instance_id.to_owned());
    Message { receipt, kind: MessageKind::RebalanceRecommendation, instance_id, at: UnixMillis(0) }
}

#[tokio::test]
async fn messages_are_received_handled_and_deleted_until_the_queue_is_empty() {
    let cloud = FakeCloud::default();
    let batches = [("r1", "i-1"), ("r2", "i-9"), ("r3", "i-2")].map(|(receipt, id)| vec![message(receipt, id)]);
    lock(&cloud.messages).extend(batches);
    let world = world().with_cloud(cloud);
    let ctx = world.context();
    first_turn(run(Arc::clone(&ctx))).await;
    let deleted = ["r1", "r2", "r3"].map(|receipt| format!("delete messages [{receipt:?}]"));
    assert_eq!(world.cloud.calls(), deleted);
    assert_eq!(world.api.events().len(), 4, "on claim and Node of i-1 and i-2, none for an unknown instance");
    assert!(world.api.writes().is_empty());
}

#[tokio::test]
async fn an_event_without_an_answer_delays_no_message() {
    let cloud = FakeCloud::default();
    lock(&cloud.messages).extend([vec![message("r1", "i-1")], vec![message("r2", "i-2")]]);
    let world = world().with_cloud(cloud);
    world.api.inject(Fault::NoAnswer, usize::MAX, |request| request.key.resource == "events");
    first_turn(run(world.context())).await;
    assert_eq!(world.cloud.calls(), ["r1", "r2"].map(|receipt| format!("delete messages [{receipt:?}]")));
}

#[tokio::test]
async fn an_unreadable_queue_is_reported_once_and_its_recovery_once() {
    let world = world();
    world.api.put(&node_class("default", &json!({})));
    let ctx = world.context();
    let mut reader = Reader::new(&ctx);
    let failure = |text: &str| Err(CloudError::Refused(text.into()));
    let seconds = |wait: Option<Duration>| wait.map(|wait| wait.as_secs());
    assert_eq!(seconds(reader.process(&ctx, failure("no")).await), Some(2));
    assert_eq!(seconds(reader.process(&ctx, failure("still no")).await), Some(4));
    assert_eq!(world.api.events().len(), 1);
    assert!(world.api.events()[0].starts_with("Warning InterruptionQueueUnreadable on EC2NodeClass/default: "));
    assert_eq!(reader.process(&ctx, Ok(vec![])).await, None);
    assert_eq!(reader.process(&ctx, Ok(vec![])).await, None);
    assert_eq!(world.api.events().len(), 2);
    assert!(world.api.events()[1].starts_with("Normal InterruptionQueueReadable on EC2NodeClass/default: "));
    assert_eq!(seconds(reader.process(&ctx, failure("no again")).await), Some(2), "the backoff starts again");
}

/// The reader's response to a message of the given kind about `i-1`, and what was written.
async fn untrusted(cloud: FakeCloud, capacity_type: &str, kind: MessageKind, at: UnixMillis) -> (String, Vec<String>) {
    let world = world();
    let meta =
        json!({"finalizers": [labels::TERMINATION_FINALIZER], "labels": {(labels::CAPACITY_TYPE): capacity_type}});
    let status = launched("i-1", &["Launched", "Registered", "Initialized"]);
    world.api.put(&claim("c", &json!({"metadata": meta, "status": status})));
    let world = world.with_cloud(FakeCloud { untrusted_messages: true, ..cloud });
    let message = Message { receipt: "r".into(), kind, instance_id: "i-1".into(), at };
    let ctx = world.context();
    let done = Handler::new(&ctx).respond(&ctx, &message).await;
    let lines = world.api.lines().into_iter().filter(|line| !line.contains("events")).collect();
    (done.map_or_else(|error| error.to_string(), |()| "ok".into()), lines)
}

#[tokio::test]
async fn nothing_is_deleted_before_ec2_confirms_the_end_of_the_instance() {
    let described = |state: InstanceState| FakeCloud {
        instances: Mutex::new(vec![Instance { state, ..instance("i-1", "", 0) }]),
        ..FakeCloud::default()
    };
    let unreadable = FakeCloud { describe_failure: Some(CloudError::Throttled), ..FakeCloud::default() };
    let (now, old) = (clock::now(), UnixMillis(0));
    let deleted = "DELETE nodeclaims/c";
    for (case, cloud, at, expected) in [
        ("absent", FakeCloud::default(), now, Some(deleted)),
        ("shutting down", described(InstanceState::ShuttingDown), now, Some(deleted)),
        ("stopped", described(InstanceState::Stopped), now, Some(deleted)),
        ("running, just now", described(InstanceState::Running), now, None),
        ("running, a minute later", described(InstanceState::Running), old, None),
        ("EC2 does not answer", unreadable, old, None),
    ] {
        let (done, lines) = untrusted(cloud, "spot", MessageKind::StateChange, at).await;
        let is_handled = expected.is_some() || case == "running, a minute later";
        assert_eq!(done == "ok", is_handled, "{case}: {done}");
        assert_eq!(lines.first().map(String::as_str), expected, "{case}: {lines:?}");
    }
}

#[tokio::test]
async fn a_spot_warning_about_an_on_demand_instance_is_refused() {
    for (capacity_type, is_marked) in [("spot", true), ("on-demand", false)] {
        let kind = MessageKind::SpotInterruption;
        let (done, lines) = untrusted(FakeCloud::default(), capacity_type, kind, clock::now()).await;
        assert_eq!((done.as_str(), !lines.is_empty()), ("ok", is_marked), "{capacity_type}: {lines:?}");
    }
}

#[tokio::test]
async fn forged_warnings_drain_few_nodes_per_minute() {
    let api = FakeApi::default();
    for n in 0..30 {
        api.put(&claim(&format!("c-{n}"), &json!({"status": launched(&format!("i-{n}"), &["Launched"])})));
    }
    let world = World::new(api).with_cloud(FakeCloud { untrusted_messages: true, ..FakeCloud::default() });
    let ctx = world.context();
    let mut reader = Reader::new(&ctx);
    let kind = MessageKind::ScheduledChange;
    let all = || {
        let one = |n| Message { kind, at: clock::now(), ..message(&format!("r-{n}"), &format!("i-{n}")) };
        (0..30).map(one).collect::<Vec<_>>()
    };
    let marked = || world.api.lines().iter().filter(|line| line.starts_with("PATCH nodeclaims/")).count();
    reader.process(&ctx, Ok(all())).await;
    assert_eq!(marked(), 10);
    reader.process(&ctx, Ok(all())).await;
    assert_eq!(marked(), 10, "redelivered messages do not count again");
    let refused = ctx.metrics.messages_refused.with_label_values(&["scheduled_change", "too_many"]).get();
    assert_eq!(refused, 40);
}

/// The notice of an interruption is two minutes: none of them may be spent on attempts that drained nothing.
#[tokio::test]
async fn warnings_whose_marks_could_not_be_written_do_not_count() {
    let api = FakeApi::default();
    for n in 0..10 {
        api.put(&claim(&format!("c-{n}"), &json!({"status": launched(&format!("i-{n}"), &["Launched"])})));
    }
    let world = World::new(api).with_cloud(FakeCloud { untrusted_messages: true, ..FakeCloud::default() });
    let ctx = world.context();
    let mut reader = Reader::new(&ctx);
    let all = || {
        let one = |n| {
            let kind = MessageKind::ScheduledChange;
            Message { kind, at: clock::now(), ..message(&format!("r-{n}"), &format!("i-{n}")) }
        };
        (0..10).map(one).collect::<Vec<_>>()
    };
    let marked = || ctx.cluster.read().claims.values().filter(|claim| DisruptionMark::of(claim).is_some()).count();
    world.api.inject(Fault::Refused(Refusal::gateway_timeout()), usize::MAX, Recorded::is_write);
    reader.process(&ctx, Ok(all())).await;
    assert_eq!(marked(), 0, "the API server is overloaded");
    world.api.reset();
    reader.process(&ctx, Ok(all())).await;
    assert_eq!(marked(), 10);
}

#[tokio::test]
async fn a_mass_spot_interruption_that_ec2_confirms_drains_every_node_at_once() {
    let (genuine, all) = (0..500, 0..600);
    let ids: std::collections::BTreeSet<String> = genuine.map(|n| format!("i-{n}")).collect();
    // A quarter of all nodes is 150.
    for (interrupted, kind, expected) in [
        (Some(ids.clone()), MessageKind::SpotInterruption, 500..=600),
        (Some(ids.clone()), MessageKind::ScheduledChange, 30..=30),
        (Some(std::collections::BTreeSet::new()), MessageKind::SpotInterruption, 150..=150),
        (None, MessageKind::SpotInterruption, 150..=150),
    ] {
        let api = FakeApi::default();
        for n in all.clone() {
            api.put(&claim(&format!("c-{n}"), &json!({"status": launched(&format!("i-{n}"), &["Launched"])})));
        }
        let case = format!("{kind:?} {:?}", interrupted.as_ref().map(std::collections::BTreeSet::len));
        let confirmed = interrupted.as_ref().map_or(0, std::collections::BTreeSet::len);
        let cloud = FakeCloud { untrusted_messages: true, interrupted, ..FakeCloud::default() };
        let world = World::new(api).with_cloud(cloud);
        let ctx = world.context();
        let mut reader = Reader::new(&ctx);
        let one = |n| Message { kind, at: clock::now(), ..message(&format!("r-{n}"), &format!("i-{n}")) };
        reader.process(&ctx, Ok(all.clone().map(one).collect())).await;
        let state = ctx.cluster.read();
        let marked = |n: &i32| DisruptionMark::of(&state.claims[&format!("c-{n}")]).is_some();
        let count = all.clone().filter(marked).count();
        assert!(expected.contains(&count), "{case}");
        let counted = ctx.metrics.spot_interruptions.with_label_values(&["", "", ""]).get();
        assert_eq!(counted, if kind == MessageKind::SpotInterruption { count as u64 } else { 0 }, "{case}");
        if kind == MessageKind::SpotInterruption {
            assert!((0..500).take(confirmed).all(|n| marked(&n)), "{case}: every confirmed warning has its effect");
            assert!((500..600).filter(marked).count() <= 150, "{case}: unconfirmed warnings are bounded");
        }
    }
}

#[tokio::test]
async fn the_emergency_stop_holds_back_no_interruption() {
    for (mark, paused, departs) in [
        ("Underutilized/", "none", false),
        ("SpotInterruption/1970-01-01T00:00:01Z", "none", true),
        ("SpotInterruption/1970-01-01T00:00:01Z", "all", true),
    ] {
        let world = World { watched: false, ..world() };
        let meta = json!({"annotations": {(labels::DISRUPTING): mark}, "finalizers": [labels::TERMINATION_FINALIZER]});
        world.api.put(&claim("c", &json!({"metadata": meta, "status": launched("i-1", &["Launched"])})));
        let ctx = world.context();
        ctx.cluster.update(|state| state.pause = Some(Pause::parse(Some(paused))));
        first_turn(departure::run(ctx)).await;
        assert_eq!(!world.api.lines().is_empty(), departs, "{mark} {paused}");
    }
}

#[tokio::test]
async fn a_spot_interruption_is_counted_once_for_each_node_whatever_else_disrupts_it() {
    let world = world();
    for (name, id, disrupting) in
        [("c", "i-1", json!({})), ("other", "i-2", json!({(labels::DISRUPTING): "Underutilized/"}))]
    {
        let meta = json!({"annotations": disrupting, "labels": {(labels::NODE_POOL): "p"}, "finalizers": [labels::TERMINATION_FINALIZER]});
        world.api.put(&claim(name, &json!({"metadata": meta, "status": launched(id, &["Launched"])})));
    }
    let ctx = world.context();
    let mut reader = Reader::new(&ctx);
    for round in ["first", "again"] {
        let one = |id: &str| Message { kind: MessageKind::SpotInterruption, at: clock::now(), ..message(round, id) };
        reader.process(&ctx, Ok(vec![one("i-1"), one("i-2")])).await;
        let counted = ctx.metrics.spot_interruptions.with_label_values(&["", "", "p"]).get();
        assert_eq!(counted, 2, "{round}");
    }
}
