use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};
use stowage_api::NodePool;
use stowage_model::labels;
use stowage_model::pause::Pause;
use stowage_model::units::MicroUsd;
use stowage_planner::Plan;
use stowage_runtime::sync::lock;
use stowage_test_objects::{claim, launched, node, node_pool, pod};

use super::*;
use crate::controllers::disruption::consolidation;
use crate::controllers::disruption::simulated_removal::{simulate, simulator};
use crate::controllers::disruption::taint::taint;
use crate::controllers::event_queue::EventQueue;
use crate::decisions::disruption::consolidation::Memory;
use crate::decisions::disruption::marked::MarkedNodes;
use crate::decisions::disruption::verdicts::Reports;
use crate::decisions::provisioning::supply_quarantine::Source;
use crate::state::kinds::KINDS;
use crate::test_support::consolidation_world::{self, add, add_of_others, add_of_type};
use crate::test_support::failures::{World, transcript};
use crate::test_support::kubernetes::FakeApi;

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
            start(&ctx, "c".into(), DisruptionReason::Empty, None).await;
            "done".into()
        },
    )
    .await;
    insta::assert_snapshot!(text, @r#"
    undisturbed: done
      PATCH nodeclaims/c {"metadata":{"annotations":{"stowage.dev/disrupting":"Empty/"},"resourceVersion":"2"}}
      PATCH nodes/x [{"op":"test","path":"/metadata/uid","value":"uid-x"},{"op":"test","path":"/metadata/resourceVersion","value":"3"},{"op":"test","path":"/spec/taints","value":[{"effect":"NoSchedule","key":"team"}]},{"op":"replace","path":"/spec/taints","value":[{"effect":"NoSchedule","key":"team"},{"effect":"NoSchedule","key":"karpenter.sh/disrupted"}]},{"op":"add","path":"/metadata/labels","value":{}},{"op":"add","path":"/metadata/labels/node.kubernetes.io~1exclude-from-external-load-balancers","value":"karpenter"}]
      event Normal DisruptionTerminating on NodeClaim/c: disrupting node: Empty
      event Normal DisruptionTerminating on Node/x: disrupting node: Empty
      changes nodeclaims/c (metadata.annotations), nodes/x (metadata.labels spec.taints)
    again: done, no write, as undisturbed
    PATCH nodeclaims/c
      404: done; again: done, no write, differs: nodes/x (metadata.labels spec.taints), -nodeclaims/c
    PATCH nodes/x
    "#);
}

/// A move of these nodes, which have no pods.
fn move_of(ctx: &Context, claims: &[&str]) -> Move {
    let facts = ctx.derived.facts(&ctx.cluster.read(), &[]).nodes;
    let sources = facts.into_iter().filter(|node| claims.contains(&&*node.claim));
    let sources = sources.map(|node| (node.claim.clone(), node)).collect();
    Move { sources, snapshot: Arc::default(), plan: Plan::default(), saving: MicroUsd(0), scores: BTreeMap::new() }
}

#[tokio::test]
async fn the_sources_of_a_move_are_disrupted_together_or_not_at_all() {
    use DisruptionReason::{Drifted, Underutilized};
    type Change = fn(&Context);
    let nothing: Change = |_| {};
    let is_left_out: Change = |ctx| {
        lock(&ctx.supply_quarantine).add(Source::Node("x".into()), None, true, clock::now());
    };
    let is_gone: Change = |ctx| ctx.cluster.update(|state| state.delete_claim("c"));
    let has_a_pod: Change = |ctx| {
        let on_x = json!({"spec": {"nodeName": "x"}});
        ctx.cluster.update(|state| state.apply_pod(&pod("new", &on_x), clock::now()));
    };
    let is_protected: Change = |ctx| {
        let annotations = json!({"annotations": {(labels::DO_NOT_DISRUPT): "true"}});
        let mut protected = serde_json::to_value(&*ctx.cluster.read().nodes["x"]).unwrap();
        json_patch::merge(&mut protected, &json!({"metadata": annotations}));
        ctx.cluster.update(|state| state.apply_node(serde_json::from_value(protected).unwrap()));
    };
    for (case, budget, change, together, apart) in [
        ("both may", "100%", nothing, &["c", "other"][..], &["c", "other"][..]),
        ("the budget allows one", "1", nothing, &[], &["c"]),
        ("one is left out of plans", "100%", is_left_out, &[], &["other"]),
        ("one is gone", "100%", is_gone, &[], &["other"]),
        ("a pod was bound to one", "100%", has_a_pod, &[], &["other"]),
        ("one is protected now", "100%", is_protected, &[], &["other"]),
    ] {
        for (moves, expected) in [(&[&["c", "other"][..]][..], together), (&[&["c"], &["other"]], apart)] {
            for reason in [Drifted, Underutilized] {
                let world = world(budget);
                let ctx = world.context();
                let moves = moves.iter().map(|claims| move_of(&ctx, claims)).collect();
                change(&ctx);
                let count = begin(&ctx, &EventQueue::start(&ctx), &[], moves, reason).await;
                let found = (marked(&world), count);
                assert_eq!((found.0.as_slice(), found.1), (expected, expected.len()), "{case}, {}", reason.as_str());
            }
        }
    }
}

#[tokio::test]
async fn the_cap_admits_a_part_of_the_empty_nodes_and_all_sources_of_a_move_or_none() {
    for (left, expected) in [(1, 0), (2, 2)] {
        let world = world("100%");
        let ctx = world.context();
        ctx.admit(Capped::Disruption, ctx.settings.max_disruptions_per_minute - left).await;
        let both = vec![move_of(&ctx, &["c", "other"])];
        assert_eq!(begin(&ctx, &EventQueue::start(&ctx), &[], both, DisruptionReason::Underutilized).await, expected);
        assert_eq!(marked(&world).len(), expected);
    }
    let world = world("100%");
    let ctx = world.context();
    ctx.admit(Capped::Disruption, ctx.settings.max_disruptions_per_minute - 1).await;
    start_empty(&ctx, both()).await;
    assert_eq!(marked(&world).len(), 1);
}

/// The choice took time.
#[tokio::test]
async fn nothing_begins_when_a_pause_or_a_stale_watch_came_after_the_choice() {
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
        let moves = vec![move_of(&ctx, &["c", "other"])];
        change(&ctx);
        assert_eq!(begin(&ctx, &EventQueue::start(&ctx), &[], moves, DisruptionReason::Drifted).await, 0);
        start_empty(&ctx, both()).await;
        assert!(marked(&world).is_empty());
    }
}

/// Two loops choose at the same time.
#[tokio::test]
async fn two_choices_share_one_budget() {
    let world = world("1");
    let ctx = world.context();
    let (other, queue) = (vec![move_of(&ctx, &["other"])], EventQueue::start(&ctx));
    let ((), drifted) =
        tokio::join!(start_empty(&ctx, vec!["c".into()]), begin(&ctx, &queue, &[], other, DisruptionReason::Drifted));
    assert_eq!((drifted, marked(&world)), (0, vec!["c"]));
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
    let world = world("100%");
    let pending = json!({"type": "PodScheduled", "status": "False", "reason": "Unschedulable"});
    world.api.put(&pod("a", &json!({"status": {"conditions": [pending]}})));
    let ctx = world.context();
    let plan = json!({"metadata": {"annotations": {(labels::PLANNED_PODS): "[\"n/a\"]",
        (labels::HOLD_UNTIL): "2099-01-01T00:00:00Z"}}});
    ctx.patch_claim("c", &plan).await.unwrap();
    start_empty(&ctx, both()).await;
    assert_eq!(marked(&world), ["other"]);
}

/// A decision that begins, and the pass of the loop of marks after it.
async fn decided(ctx: Arc<Context>) -> String {
    let pools = Arc::new(ctx.ready_pools());
    let queue = EventQueue::start(&ctx);
    let (mut memory, mut reports) = (Memory::default(), Reports::default());
    let moves = consolidation::choose(&mut memory, &mut reports, &ctx, &pools, &queue).await;
    let begun = begin(&ctx, &queue, &pools, moves, DisruptionReason::Underutilized).await;
    let untainted = MarkedNodes::untainted(&ctx.cluster.read());
    for claim in untainted {
        let node = ctx.cluster.read().node_of(&claim).cloned().unwrap();
        let _ = taint(&ctx, &node).await;
    }
    format!("{begun} begun")
}

/// The room on a node that exists is written before the mark, and a failure before the mark takes it back.
#[tokio::test]
async fn a_move_to_a_node_that_exists_begins_under_every_failure() {
    let setup = || {
        let world = consolidation_world::world(&["p"], "100%");
        add(&world, "light", "p", None, "100m");
        add(&world, "other", "p", None, "1500m");
        world
    };
    insta::assert_snapshot!(transcript(setup, decided).await, @r#"
    undisturbed: 1 begun
      PATCH nodeclaims/other {"metadata":{"annotations":{"stowage.dev/hold-until":"TIME","stowage.dev/planned-owners":"{\"n/on-light\":{\"at_ms\":MILLIS,\"node\":\"light\",\"source\":\"light\",\"uid\":\"r\",\"until_ms\":MILLIS}}","stowage.dev/planned-pods":"[\"n/on-light\"]"}}}
      PATCH nodeclaims/light {"metadata":{"annotations":{"stowage.dev/disrupting":"Underutilized/","stowage.dev/move":"{\"at\":\"TIME\",\"give_up\":\"TIME\",\"id\":\"light/TIME\",\"sources\":[\"light\"],\"usd_per_hour\":0.096}"},"resourceVersion":"3"}}
      PATCH nodes/light [{"op":"test","path":"/metadata/uid","value":"node-light"},{"op":"test","path":"/metadata/resourceVersion","value":"4"},{"op":"add","path":"/spec/taints","value":[{"effect":"NoSchedule","key":"karpenter.sh/disrupted"}]},{"op":"add","path":"/metadata/labels/node.kubernetes.io~1exclude-from-external-load-balancers","value":"karpenter"}]
      event Normal Unconsolidatable on NodeClaim/other: node stays: can't replace with a cheaper node: the new nodes for its pods would cost as much or more. It costs 0.0960 USD/h
      event Normal Unconsolidatable on Node/other: node stays: can't replace with a cheaper node: the new nodes for its pods would cost as much or more. It costs 0.0960 USD/h
      event Normal ConsolidationCandidate on NodeClaim/light: remove 1 node and purchase none: saves 0.0960 USD per hour
      event Normal ConsolidationCandidate on Node/light: remove 1 node and purchase none: saves 0.0960 USD per hour
      event Normal DisruptionTerminating on NodeClaim/light: disrupting node: Underutilized
      event Normal DisruptionTerminating on Node/light: disrupting node: Underutilized
      changes nodeclaims/light (metadata.annotations), nodeclaims/other (metadata.annotations), nodes/light (metadata.labels spec.taints)
    again: 0 begun, no write, as undisturbed
    PATCH nodeclaims/other
      404: 0 begun; again: 0 begun, no write, differs: nodeclaims/light (metadata.annotations), nodes/light (metadata.labels spec.taints), -nodeclaims/other
    PATCH nodeclaims/light
      404: 1 begun; again: 0 begun, no write, differs: nodes/light (metadata.labels spec.taints), -nodeclaims/light
    PATCH nodes/light
    "#);
}

/// The new node is written before the mark, with the most that it may cost, and is never created twice.
#[tokio::test]
async fn f4_a_move_to_a_new_node_begins_under_every_failure() {
    let setup = || {
        let world = consolidation_world::world(&["p"], "100%");
        add_of_type(&world, "big", "p", None, "1500m", ("m5.4xlarge", "16"));
        world
    };
    insta::assert_snapshot!(transcript(setup, decided).await, @r#"
    undisturbed: 1 begun
      POST nodeclaims {"apiVersion":"karpenter.sh/v1","kind":"NodeClaim","metadata":{"annotations":{"karpenter.sh/nodepool-hash":"12956780401768863148","karpenter.sh/nodepool-hash-version":"v3","stowage.dev/hold-until":"TIME","stowage.dev/max-price":"0.729600","stowage.dev/planned-offering":"m5.large/z/on-demand","stowage.dev/planned-owners":"{\"n/on-big\":{\"at_ms\":MILLIS,\"node\":\"big\",\"source\":\"big\",\"uid\":\"r\",\"until_ms\":MILLIS}}","stowage.dev/planned-pods":"[\"n/on-big\"]","stowage.dev/replacement-generation":"1"},"finalizers":["karpenter.sh/termination"],"generateName":"p-","labels":{"karpenter.k8s.aws/ec2nodeclass":"default","karpenter.sh/nodepool":"p","team":"p"},"name":"p-1","ownerReferences":[{"apiVersion":"karpenter.sh/v1","blockOwnerDeletion":true,"kind":"NodePool","name":"p","uid":"uid-p"}]},"spec":{"expireAfter":"720h","nodeClassRef":{"group":"karpenter.k8s.aws","kind":"EC2NodeClass","name":"default"},"requirements":[{"key":"node.kubernetes.io/instance-type","operator":"In","values":["m5.large","m5.4xlarge"]},{"key":"topology.kubernetes.io/zone","operator":"In","values":["z"]},{"key":"karpenter.sh/capacity-type","operator":"In","values":["on-demand"]}],"resources":{"requests":{"cpu":"1500m","pods":"1"}}}}
      PATCH nodeclaims/big {"metadata":{"annotations":{"stowage.dev/disrupting":"Underutilized/","stowage.dev/move":"{\"at\":\"TIME\",\"give_up\":\"TIME\",\"id\":\"big/TIME\",\"sources\":[\"big\"],\"usd_per_hour\":0.672}"},"resourceVersion":"3"}}
      PATCH nodes/big [{"op":"test","path":"/metadata/uid","value":"node-big"},{"op":"test","path":"/metadata/resourceVersion","value":"4"},{"op":"add","path":"/spec/taints","value":[{"effect":"NoSchedule","key":"karpenter.sh/disrupted"}]},{"op":"add","path":"/metadata/labels/node.kubernetes.io~1exclude-from-external-load-balancers","value":"karpenter"}]
      event Normal ConsolidationCandidate on NodeClaim/big: remove 1 node and purchase 1 m5.large: saves 0.6720 USD per hour
      event Normal ConsolidationCandidate on Node/big: remove 1 node and purchase 1 m5.large: saves 0.6720 USD per hour
      event Normal DisruptionTerminating on NodeClaim/big: disrupting node: Underutilized
      event Normal DisruptionTerminating on Node/big: disrupting node: Underutilized
      changes nodeclaims/big (metadata.annotations), +nodeclaims/p-1, nodes/big (metadata.labels spec.taints)
    again: 0 begun, no write, as undisturbed
    POST nodeclaims
      crash after: stopped; again: 1 begun, 2 writes, differs: nodeclaims/big (metadata.annotations)
    PATCH nodeclaims/big
      409: 1 begun, sent 8 times; again: 1 begun, 2 writes, differs: nodeclaims/big (metadata.annotations)
      404: 1 begun; again: 0 begun, no write, differs: nodes/big (metadata.labels spec.taints), -nodeclaims/big
      422: 1 begun; again: 1 begun, 2 writes, differs: nodeclaims/big (metadata.annotations)
      504: 1 begun, sent 7 times; again: 1 begun, 2 writes, differs: nodeclaims/big (metadata.annotations)
      no answer: waits forever; again: 1 begun, 2 writes, differs: nodeclaims/big (metadata.annotations)
      crash before: stopped; again: 1 begun, 2 writes, differs: nodeclaims/big (metadata.annotations)
    PATCH nodes/big
    "#);
}

/// Karpenter core reference 4.11: a move of one node is reported on it, one of several on their NodePool.
#[tokio::test]
async fn a_move_under_balanced_is_reported_and_counted_with_its_score() {
    let score = "score 1.00 >= threshold 0.50 (k: 2, savings 50.0%, disruption 50.0%)";
    for (names, about, note) in [
        // Both nodes cost the same, and have a pod.
        (&["light", "other"][..], &["NodeClaim/light", "Node/light"][..], score),
        (&["a", "b"], &["NodePool/p"], "score 1.32 >= threshold 0.50 (k: 2, savings 88.2%, disruption 66.7%)"),
    ] {
        let world = consolidation_world::world(&["p"], "100%");
        let mut pool = world.api.stored("nodepools/p").unwrap();
        pool["spec"]["disruption"]["consolidationPolicy"] = json!("Balanced");
        world.api.put(&serde_json::from_value::<NodePool>(pool).unwrap());
        if names[0] == "light" {
            add(&world, "light", "p", None, "100m");
            add(&world, "other", "p", None, "1500m");
        } else {
            // Both pods need a new node, which costs an eighth of each: four of six units, for 1.44 of 1.632 USD.
            for name in names {
                add_of_type(&world, name, "p", None, "900m", ("m5.4xlarge", "2"));
            }
            add(&world, "full", "p", None, "1900m");
        }
        let ctx = world.context();
        assert_eq!(decided(Arc::clone(&ctx)).await, format!("{} begun", about.len() % 2 + 1));
        let approved = world.api.events().into_iter().filter(|event| event.contains("ConsolidationApproved"));
        let expected: Vec<String> =
            about.iter().map(|about| format!("Normal ConsolidationApproved on {about}: {note}")).collect();
        assert_eq!(approved.collect::<Vec<_>>(), expected);
        let labels = ["approved", "p", "Balanced"];
        assert_eq!(ctx.metrics.consolidation_moves.with_label_values(&labels).get(), 1);
        assert_eq!(ctx.metrics.consolidation_score.with_label_values(&labels).get_sample_count(), 1);
    }
}

/// Other pods took the room between the decision and its writes: nothing is purchased, and nothing stays.
#[tokio::test]
async fn a_move_whose_room_was_taken_is_dropped_before_any_purchase_and_mark() {
    let world = consolidation_world::world(&["p"], "100%");
    add_of_type(&world, "big", "p", None, "1900m", ("m5.4xlarge", "16"));
    add(&world, "other", "p", None, "1500m");
    let mut second = world.api.stored("pods/n/on-big").unwrap();
    second["metadata"]["name"] = json!("second");
    second["metadata"]["uid"] = json!("uid-second");
    second["spec"]["containers"][0]["resources"]["requests"]["cpu"] = json!("400m");
    world.api.put(&serde_json::from_value::<Pod>(second).unwrap());
    let ctx = world.context();
    let pools = Arc::new(ctx.ready_pools());
    let (mut memory, mut reports, queue) = (Memory::default(), Reports::default(), EventQueue::start(&ctx));
    let moves = consolidation::choose(&mut memory, &mut reports, &ctx, &pools, &queue).await;
    let [one] = &moves[..] else { panic!("{moves:?}") };
    assert_eq!((one.plan.new_nodes.len(), one.plan.placements.len()), (1, 1));
    let requests = json!({"requests": {"cpu": "300m"}});
    let taken = json!({"spec": {"nodeName": "other", "containers": [{"name": "c", "resources": requests}]}});
    ctx.cluster.update(|state| state.apply_pod(&pod("taken", &taken), clock::now()));
    assert_eq!(begin(&ctx, &EventQueue::start(&ctx), &pools, moves, DisruptionReason::Underutilized).await, 0);
    assert_eq!(world.api.lines(), ["PATCH nodeclaims/other", "PATCH nodeclaims/other"]);
    let annotations = world.api.stored("nodeclaims/other").unwrap()["metadata"]["annotations"].clone();
    let planned = [labels::PLANNED_PODS, labels::PLANNED_OWNERS].map(|key| annotations[key].clone());
    assert_eq!(planned, [json!("[]"), json!("{}")]);
    assert!(lock(&ctx.abandoned).contains_key("big"), "it is not tried again at once");
}

/// Moves begin concurrently, and may share a target.
#[tokio::test]
async fn the_room_of_two_moves_on_one_node_is_kept_for_both() {
    let world = consolidation_world::world(&["p"], "100%");
    for (name, cpu) in [("a", "100m"), ("b", "100m"), ("other", "1500m")] {
        add(&world, name, "p", None, cpu);
    }
    let ctx = world.context();
    assert_eq!(decided(Arc::clone(&ctx)).await, "2 begun");
    let planned = ctx.cluster.read().planned["other"].clone();
    assert_eq!(planned.owners.keys().collect::<Vec<_>>(), ["n/on-a", "n/on-b"]);
    assert_eq!(planned.pods.len(), 2);
}

#[tokio::test]
async fn f5_a_move_to_a_node_that_is_not_ours_names_the_pods_that_no_room_is_kept_for() {
    let world = consolidation_world::world(&["p"], "100%");
    add(&world, "a", "p", None, "100m");
    add_of_others(&world, "others", "1");
    assert_eq!(decided(world.context()).await, "1 begun");
    assert_eq!(world.api.lines(), ["PATCH nodeclaims/a", "PATCH nodes/a"]);
    let claim = serde_json::from_value(world.api.stored("nodeclaims/a").unwrap()).unwrap();
    assert_eq!(MoveRecord::of(&claim).unwrap().unheld.into_iter().collect::<Vec<_>>(), ["n/on-a"]);
}

/// An empty node costs nothing in a plan, and is removed by itself: a move there would keep it.
#[tokio::test]
async fn an_empty_node_that_is_about_to_be_removed_is_no_target() {
    for (is_empty, begun) in [(true, "0 begun"), (false, "1 begun")] {
        let world = consolidation_world::world(&["p"], "100%");
        add(&world, "light", "p", None, "100m");
        add(&world, "target", "p", None, if is_empty { "1" } else { "1500m" });
        let mut pod = world.api.stored("pods/n/on-target").unwrap();
        pod["status"] = json!({"phase": if is_empty { "Succeeded" } else { "Running" }});
        world.api.put(&serde_json::from_value::<Pod>(pod).unwrap());
        assert_eq!(decided(world.context()).await, begun);
    }
}
