use serde_json::{Value, json};

use super::*;
use crate::controllers::disruption::simulate::{simulate, simulator};
use crate::decisions::provisioning::supply_quarantine::Source;
use crate::model::labels;
use crate::model::pause::Pause;
use crate::state::kinds::KINDS;
use crate::sync::lock;
use crate::test_support::failures::{World, transcript};
use crate::test_support::kubernetes::FakeApi;
use crate::test_support::objects::{claim, launched, node, node_pool, pod};

/// The NodePool `p` with this budget, its claims `c` and `other`, and their nodes x and y.
fn world(budget: &str) -> World {
    let api = FakeApi::default();
    api.put(&node_pool("p", &json!({"spec": {"disruption": {"budgets": [{"nodes": budget}]}}})));
    let meta = json!({"labels": {(labels::NODE_POOL): "p"}, "finalizers": [labels::TERMINATION_FINALIZER]});
    for (name, node_name, id) in [("c", "x", "i-1"), ("other", "y", "i-2")] {
        let status = launched(id, &["Launched", "Registered", "Initialized"]);
        api.put(&claim(name, &json!({"metadata": meta, "status": status})));
        let taints = json!([{"key": "team", "effect": "NoSchedule"}]);
        let ready = json!({"conditions": [{"type": "Ready", "status": "True"}]});
        let spec = json!({"providerID": format!("aws:///z/{id}"), "taints": taints});
        api.put(&node(node_name, &json!({"spec": spec, "status": ready})));
    }
    World { watched: true, ..World::new(api) }
}

/// The claims that are marked.
fn marked(world: &World) -> Vec<&'static str> {
    let mark = |name: &str| -> Value {
        world.api.stored(&format!("nodeclaims/{name}")).unwrap()["metadata"]["annotations"][labels::DISRUPTING].clone()
    };
    ["c", "other"].into_iter().filter(|name| !mark(name).is_null()).collect()
}

fn both() -> Vec<String> {
    vec!["c".into(), "other".into()]
}

#[tokio::test]
async fn a_disruption_begins_under_every_failure() {
    let text = transcript(
        || world("100%"),
        async |ctx| {
            start(&ctx, "c".into(), DisruptionReason::Empty).await;
            "done".into()
        },
    )
    .await;
    insta::assert_snapshot!(text, @r#"
    undisturbed: done
      PATCH nodeclaims/c {"metadata":{"annotations":{"stowage.dev/disrupting":"Empty/"},"resourceVersion":"2"}}
      PATCH nodes/x {"metadata":{"labels":{"node.kubernetes.io/exclude-from-external-load-balancers":"karpenter"},"resourceVersion":"3"},"spec":{"taints":[{"effect":"NoSchedule","key":"team"},{"effect":"NoSchedule","key":"karpenter.sh/disrupted"}]}}
      event Normal DisruptionTerminating on NodeClaim/c: disrupting node: Empty
      changes nodeclaims/c (metadata.annotations), nodes/x (metadata.labels spec.taints)
    again: done, no write, as undisturbed
    PATCH nodeclaims/c
      written by another: done, sent 2 times; again: done, no write, as undisturbed
      409: done, sent 8 times; again: done, 2 writes, as undisturbed
      404: done; again: done, no write, differs: nodes/x (metadata.labels spec.taints), -nodeclaims/c
      422: done; again: done, 2 writes, as undisturbed
      429, Retry-After 2 s, once: done, sent 2 times in 2 s; again: done, no write, as undisturbed
      504: done, sent 7 times; again: done, 2 writes, as undisturbed
      no answer: waits forever; again: done, 2 writes, as undisturbed
      lost answer: done; again: done, 1 write, as undisturbed
      crash before: stopped; again: done, 2 writes, as undisturbed
      crash after: stopped; again: done, 1 write, as undisturbed
    PATCH nodes/x
      written by another: done, sent 2 times; again: done, no write, as undisturbed
      409: done, sent 8 times; again: done, 1 write, as undisturbed
      404: done; again: done, no write, differs: -nodes/x
      422: done; again: done, 1 write, as undisturbed
      429, Retry-After 2 s, once: done, sent 2 times in 2 s; again: done, no write, as undisturbed
      504: done, sent 7 times; again: done, 1 write, as undisturbed
      no answer: waits forever; again: done, 1 write, as undisturbed
      lost answer: done; again: done, no write, as undisturbed
      crash before: stopped; again: done, 1 write, as undisturbed
      crash after: stopped; again: done, no write, as undisturbed
    "#);
}

#[tokio::test]
async fn underutilized_nodes_are_disrupted_together_or_not_at_all() {
    use DisruptionReason::{Drifted, Underutilized};
    type Change = fn(&Context);
    let nothing: Change = |_| {};
    let is_left_out: Change = |ctx| {
        lock(&ctx.supply_quarantine).add(Source::Node("x".into()), None, true, clock::now());
    };
    let is_gone: Change = |ctx| ctx.cluster.update(|state| state.delete_claim("c"));
    for (case, budget, change, reason, expected) in [
        ("both may", "100%", nothing, Underutilized, &["c", "other"][..]),
        ("the budget allows one", "1", nothing, Underutilized, &[]),
        ("the budget allows one", "1", nothing, Drifted, &["c"]),
        ("one is left out of plans", "100%", is_left_out, Underutilized, &[]),
        ("one is left out of plans", "100%", is_left_out, Drifted, &["other"]),
        ("one is gone", "100%", is_gone, Underutilized, &[]),
        ("one is gone", "100%", is_gone, Drifted, &["other"]),
    ] {
        let world = world(budget);
        let ctx = world.context();
        change(&ctx);
        let count = start_all(&ctx, both(), reason).await;
        assert_eq!((marked(&world).as_slice(), count), (expected, expected.len()), "{case}, {}", reason.as_str());
    }
}

#[tokio::test]
async fn the_cap_admits_a_part_of_the_drifted_nodes_and_all_underutilized_ones_or_none() {
    for (left, reason, expected) in [
        (1, DisruptionReason::Empty, 1),
        (1, DisruptionReason::Underutilized, 0),
        (2, DisruptionReason::Underutilized, 2),
    ] {
        let world = world("100%");
        let ctx = world.context();
        ctx.admit(Capped::Disruption, ctx.settings.max_disruptions_per_minute - left).await;
        assert_eq!(start_all(&ctx, both(), reason).await, expected);
        assert_eq!(marked(&world).len(), expected);
    }
}

/// The choice took time.
#[tokio::test]
async fn nothing_begins_when_disruption_was_paused_or_a_watch_became_stale_since_the_choice() {
    let stale = |ctx: &Context| {
        for kind in KINDS {
            ctx.cluster.watch_signs().record_list(kind, clock::now() - std::time::Duration::from_mins(2));
        }
    };
    let paused = |ctx: &Context| {
        ctx.cluster.update(|state| state.pause = Some(Pause::parse(Some("disruption"))));
    };
    for change in [&stale as &dyn Fn(&Context), &paused] {
        let world = world("100%");
        let ctx = world.context();
        change(&ctx);
        assert_eq!(start_all(&ctx, both(), DisruptionReason::Drifted).await, 0);
        assert!(marked(&world).is_empty());
    }
}

/// Two loops choose at the same time.
#[tokio::test]
async fn two_choices_share_one_budget() {
    let world = world("1");
    let ctx = world.context();
    let (empty, drifted) = tokio::join!(
        start_all(&ctx, vec!["c".into()], DisruptionReason::Empty),
        start_all(&ctx, vec!["other".into()], DisruptionReason::Drifted)
    );
    assert_eq!((empty, drifted, marked(&world).len()), (1, 0, 1));
}

#[tokio::test]
async fn a_node_that_is_left_out_of_plans_has_no_simulated_removal() {
    let world = world("100%");
    let (ctx, now) = (world.context(), clock::now());
    lock(&ctx.supply_quarantine).add(Source::Node("x".into()), None, true, now);
    let simulator = simulator(&ctx, &[], ["c", "other"], now);
    for (claim, complete) in [("c", false), ("other", true)] {
        let outcome = simulate(&ctx, &simulator, &[claim.to_owned()].into()).unwrap();
        assert_eq!(outcome.is_complete(), complete, "{claim}");
    }
}

/// The choice of empty nodes took time.
#[tokio::test]
async fn a_node_that_pods_were_planned_on_since_the_choice_is_not_marked_as_empty() {
    for (reason, expected) in [(DisruptionReason::Empty, &["other"][..]), (DisruptionReason::Drifted, &["c", "other"])]
    {
        let world = world("100%");
        let pending = json!({"type": "PodScheduled", "status": "False", "reason": "Unschedulable"});
        world.api.put(&pod("a", &json!({"status": {"conditions": [pending]}})));
        let ctx = world.context();
        let plan = json!({"metadata": {"annotations": {(labels::PLANNED_PODS): "[\"n/a\"]",
            (labels::HOLD_UNTIL): "2099-01-01T00:00:00Z"}}});
        ctx.patch_claim("c", &plan).await.unwrap();
        assert_eq!(start_all(&ctx, both(), reason).await, expected.len());
        assert_eq!(marked(&world), expected, "{}", reason.as_str());
    }
}
