use std::collections::BTreeSet;

use serde_json::json;
use stowage_model::labels;
use stowage_model::pause::Pause;
use stowage_test_objects::{claim, launched, node, node_pool};

use super::*;
use crate::controllers::disruption::start::start;
use crate::decisions::disruption::mark::{DisruptionMark, is_tainted};
use crate::decisions::disruption::move_record::MoveRecord;
use crate::state::kinds::KINDS;
use crate::state::object_ext::ObjectExt;
use crate::test_support::failures::{World, outcome, transcript};
use crate::test_support::kubernetes::object_store::Refusal;
use crate::test_support::kubernetes::{FakeApi, Fault};

/// The claims `c` and `other` with their nodes x and y; c and x have these annotations and taints.
fn world(annotations: &serde_json::Value, taint: Option<&str>) -> World {
    let api = FakeApi::default();
    let status = |id: &str| launched(id, &["Launched", "Registered", "Initialized"]);
    let finalizers = json!([labels::TERMINATION_FINALIZER]);
    let meta = json!({"annotations": annotations, "finalizers": finalizers});
    api.put(&claim("c", &json!({"metadata": meta, "status": status("i-1")})));
    api.put(&claim("other", &json!({"status": status("i-2")})));
    let mut taints = vec![json!({"key": "team", "effect": "NoSchedule"})];
    taints.extend(taint.map(|key| json!({"key": key, "effect": "NoSchedule"})));
    api.put(&node("x", &json!({"spec": {"providerID": "aws:///z/i-1", "taints": taints}})));
    api.put(&node("y", &json!({"spec": {"providerID": "aws:///z/i-2"}})));
    World::new(api)
}

fn record() -> MoveRecord {
    let at = clock::now();
    MoveRecord {
        id: "m".into(),
        at,
        give_up: at + Duration::from_mins(5),
        sources: vec!["c".into()],
        usd_per_hour: 0.1,
        unheld: BTreeSet::new(),
        replaced_by: None,
    }
}

fn claim_of(ctx: &Context) -> Option<Arc<NodeClaim>> {
    ctx.cluster.read().claims.get("c").cloned()
}

#[tokio::test]
async fn f24_a_marked_node_that_could_not_be_tainted_is_tainted_by_the_next_pass() {
    for reason in [DisruptionReason::Underutilized, DisruptionReason::Drifted, DisruptionReason::ScheduledChange] {
        let world = World { watched: true, ..world(&json!({}), None) };
        world.api.inject_on("PATCH nodes/x", Fault::Refused(Refusal::invalid("no")));
        start(&world.context(), "c".into(), reason, Some(&record())).await;
        world.api.reset();
        let (ctx, now) = (world.context(), clock::now());
        let tainted = || is_tainted(&ctx.cluster.read().nodes["x"]);
        assert!(DisruptionMark::of(&ctx.cluster.read().claims["c"]).is_some() && !tainted());
        Disruption::default().pass(&ctx, now).await;
        assert!(tainted(), "{}", reason.as_str());
        let mut lines = world.api.lines();
        lines.retain(|line| line != "PATCH nodeclaims/c/status");
        assert_eq!(lines, ["PATCH nodes/x"], "{}", reason.as_str());
    }
}

#[tokio::test]
async fn a_node_is_not_tainted_again_while_its_mark_is_removed() {
    let marked = json!({(labels::DISRUPTING): "Underutilized/", (labels::MOVE): record().annotation()});
    for write in ["PATCH nodes/x", "PATCH nodeclaims/c"] {
        let world = World { watched: true, ..world(&marked, Some(labels::DISRUPTED_TAINT)) };
        world.api.inject_on(write, Fault::Refused(Refusal::invalid("no")));
        let (ctx, now) = (world.context(), clock::now());
        unmark(&ctx, &claim_of(&ctx).unwrap()).await.unwrap_err();
        world.api.reset();
        Disruption::default().pass(&ctx, now).await;
        assert!(!world.api.lines().iter().any(|line| line == "PATCH nodes/x"), "{write}: {:?}", world.api.lines());
    }
}

#[tokio::test]
async fn a_node_is_unmarked_under_every_failure() {
    let marked = json!({(labels::DISRUPTING): "Empty/"});
    let text = transcript(
        || world(&marked, Some(labels::DISRUPTED_TAINT)),
        async |ctx| {
            let Some(claim) = claim_of(&ctx) else { return "no claim".into() };
            outcome(unmark(&ctx, &claim).await)
        },
    )
    .await;
    insta::assert_snapshot!(text, @r#"
    undisturbed: ok
      PATCH nodeclaims/c {"metadata":{"annotations":{"stowage.dev/disrupting":null,"stowage.dev/move":null},"resourceVersion":"1"}}
      PATCH nodes/x [{"op":"test","path":"/metadata/uid","value":"uid-x"},{"op":"test","path":"/spec/taints","value":[{"effect":"NoSchedule","key":"team"},{"effect":"NoSchedule","key":"karpenter.sh/disrupted"}]},{"op":"replace","path":"/spec/taints","value":[{"effect":"NoSchedule","key":"team"}]}]
      changes nodeclaims/c (metadata.annotations), nodes/x (spec.taints)
    again: ok, 2 writes, as undisturbed
    PATCH nodeclaims/c
      404: error 404; again: no claim, no write, differs: nodes/x (spec.taints), -nodeclaims/c
    PATCH nodes/x
    "#);
}

#[tokio::test]
async fn an_empty_node_is_deleted_under_every_failure() {
    let marked = json!({(labels::DISRUPTING): "Empty/"});
    let text = transcript(
        || world(&marked, Some(labels::DISRUPTED_TAINT)),
        async |ctx| {
            let Some(claim) = claim_of(&ctx) else { return "no claim".into() };
            take_step(&ctx, claim, EmptyNodeStep::Delete).await;
            "done".into()
        },
    )
    .await;
    insta::assert_snapshot!(text, @r#"
    undisturbed: done
      DELETE nodeclaims/c {"preconditions":{"uid":"uid-c"}}
      changes nodeclaims/c (metadata.deletionGracePeriodSeconds metadata.deletionTimestamp)
    again: done, 1 write, as undisturbed
    DELETE nodeclaims/c
    "#);
}

/// A world with the pool `p` that consolidates at once, the claim `c` of it, and the node x, which has no pod.
fn with_pool(conditions: &[&str], consolidate_after: &str) -> World {
    let api = FakeApi::default();
    let template = json!({"disruption": {"consolidateAfter": consolidate_after, "budgets": [{"nodes": "100%"}]}});
    api.put(&node_pool("p", &json!({"spec": template})));
    let meta = json!({"labels": {(labels::NODE_POOL): "p"}, "finalizers": [labels::TERMINATION_FINALIZER]});
    api.put(&claim("c", &json!({"metadata": meta, "status": launched("i-1", conditions)})));
    let status = json!({"conditions": [{"type": "Ready", "status": "True"}]});
    api.put(&node("x", &json!({"spec": {"providerID": "aws:///z/i-1"}, "status": status})));
    World { watched: true, ..World::new(api) }
}

fn mark_of(world: &World) -> serde_json::Value {
    world.api.stored("nodeclaims/c").unwrap()["metadata"]["annotations"][labels::DISRUPTING].clone()
}

#[tokio::test]
async fn an_empty_node_is_marked_then_deleted_two_seconds_after_the_mark_was_observed() {
    let world = with_pool(&["Launched", "Registered", "Initialized"], "0s");
    let (ctx, now) = (world.context(), clock::now());
    let mut disruption = Disruption::default();
    let deleted = |world: &World| !world.api.stored("nodeclaims/c").unwrap()["metadata"]["deletionTimestamp"].is_null();
    disruption.pass(&ctx, now).await;
    assert_eq!(mark_of(&world), "Empty/");
    for (seconds, expected) in [(1, false), (2, false), (3, true)] {
        disruption.pass(&ctx, now + Duration::from_secs(seconds)).await;
        assert_eq!(deleted(&world), expected, "after {seconds} s");
    }
}

/// Left by Karpenter, by an earlier version, or by a crash between two writes.
#[tokio::test]
async fn a_mark_or_a_taint_that_nothing_stands_behind_is_removed_after_thirty_seconds() {
    let of_move = json!({(labels::DISRUPTING): "Underutilized/", (labels::MOVE): record().annotation()});
    for (case, annotations, stray) in [
        ("a taint", json!({}), true),
        ("a mark of an earlier version", json!({(labels::DISRUPTING): "Drifted/"}), true),
        ("a mark that is not understood", json!({(labels::DISRUPTING): "Unheard/", (labels::MOVE): "{}"}), true),
        ("a source of a move", of_move, false),
        ("an interruption", json!({(labels::DISRUPTING): "SpotInterruption/2099-01-01T00:00:00Z"}), false),
    ] {
        let world = World { watched: true, ..world(&annotations, Some(labels::DISRUPTED_TAINT)) };
        let (ctx, now) = (world.context(), clock::now());
        let mut disruption = Disruption::default();
        let is_marked = || is_tainted(&ctx.cluster.read().nodes["x"]) || !mark_of(&world).is_null();
        for (seconds, removed) in [(0, false), (29, false), (30, stray)] {
            disruption.pass(&ctx, now + Duration::from_secs(seconds)).await;
            assert_eq!(!is_marked(), removed, "{case}, after {seconds} s");
        }
        let claim = world.api.stored("nodeclaims/c").unwrap();
        assert_eq!(claim["metadata"]["annotations"][labels::MOVE].is_null(), !case.starts_with("a source"), "{case}");
        assert!(claim["metadata"]["deletionTimestamp"].is_null(), "{case}");
    }
}

/// The condition follows the mark.
#[tokio::test]
async fn the_reason_of_a_disruption_is_a_condition_until_the_disruption_is_canceled() {
    let reason = |world: &World| {
        let claim = world.api.stored("nodeclaims/c").unwrap();
        let conditions = claim["status"]["conditions"].as_array().unwrap().clone();
        let found = conditions.iter().find(|one| one["type"] == "DisruptionReason");
        found.map_or(String::new(), |one| {
            format!("{} {}", one["status"].as_str().unwrap(), one["reason"].as_str().unwrap())
        })
    };
    let of_move = |reason: &str| json!({(labels::DISRUPTING): reason, (labels::MOVE): record().annotation()});
    for (annotations, expected) in [
        (of_move("Underutilized/"), "True Underutilized"),
        (of_move("Drifted/"), "True Drifted"),
        (json!({(labels::DISRUPTING): "SpotInterruption/2099-01-01T00:00:00Z"}), ""),
        (json!({}), ""),
    ] {
        let world = World { watched: true, ..world(&annotations, None) };
        world.api.inject_on("PATCH nodeclaims/c/status", Fault::Refused(Refusal::invalid("no")));
        let ctx = world.context();
        let mut disruption = Disruption::default();
        disruption.pass(&ctx, clock::now()).await;
        assert_eq!(reason(&world), "", "refused");
        world.api.reset();
        for _ in 0..2 {
            disruption.pass(&ctx, clock::now()).await;
            assert_eq!(reason(&world), expected);
        }
        let written = world.api.lines().iter().filter(|line| line.contains("nodeclaims/c/status")).count();
        assert_eq!(written, usize::from(!expected.is_empty()), "written once");
        let claim = claim_of(&ctx).unwrap();
        unmark(&ctx, &claim).await.unwrap();
        disruption.pass(&ctx, clock::now()).await;
        assert_eq!(reason(&world), "", "canceled");
    }
    let world = with_pool(&["Launched", "Registered", "Initialized"], "0s");
    let (ctx, now) = (world.context(), clock::now());
    let mut disruption = Disruption::default();
    for seconds in 0..4 {
        disruption.pass(&ctx, now + Duration::from_secs(seconds)).await;
        assert_eq!(reason(&world), "True Empty", "also while it is deleted");
    }
    assert!(claim_of(&ctx).unwrap().is_deleting());
}

#[tokio::test]
async fn f11_an_empty_node_is_not_deleted_while_a_watch_is_stale() {
    let world = world(&json!({(labels::DISRUPTING): "Empty/"}), Some(labels::DISRUPTED_TAINT));
    let ctx = world.context();
    let deletions = || world.api.lines().iter().filter(|line| *line == "DELETE nodeclaims/c").count();
    let run = async |now: UnixMillis| {
        let mut disruption = Disruption::default();
        for seconds in [0, 10] {
            disruption.pass(&ctx, now + Duration::from_secs(seconds)).await;
        }
    };
    let now = clock::now();
    for kind in KINDS {
        ctx.cluster.watch_signs().record_list(kind, now - Duration::from_mins(2));
    }
    run(now).await;
    assert_eq!(deletions(), 0);
    assert!(ctx.metrics.stale_decisions.with_label_values(&["disruption"]).get() >= 2);
    for kind in KINDS {
        ctx.cluster.watch_signs().record(kind, now);
    }
    run(now).await;
    assert_eq!(deletions(), 1, "with fresh watches the same node is deleted");
}

#[tokio::test]
async fn nothing_is_disrupted_while_disruption_is_paused() {
    for (paused, disrupted) in [("disruption", false), ("provisioning", true)] {
        // A pod was bound to the marked empty node: its mark is removed in the next pass.
        let world = world(&json!({(labels::DISRUPTING): "Empty/"}), None);
        let ctx = world.context();
        ctx.cluster.update(|state| state.pause = Some(Pause::parse(Some(paused))));
        let mut disruption = Disruption::default();
        disruption.pass(&ctx, clock::now()).await;
        assert_eq!(!world.api.lines().is_empty(), disrupted, "{paused}");
    }
}
