//! Behaviors 35 to 39: NodePools, their order, limits and taints.

use std::collections::BTreeSet;

use serde_json::json;
use stowage_model::labels::USD_PER_HOUR;
use stowage_model::resources::Resources;
use stowage_model::units::{MicroUsd, Millicores};

use crate::columns::table::ColumnCache;
use crate::output::plan::PlannedNode;
use crate::solve::least_cost;
use crate::test_support::{HOST, World, affinity, lone, reason, types};

#[test]
fn nothing_to_place_costs_nothing() {
    let plan = World::new().plan();
    assert_eq!((plan.cost, plan.lower_bound, plan.new_nodes.len()), (MicroUsd(0), Some(MicroUsd(0)), 0));
}

#[test]
fn pods_cost_at_least_the_bound_of_their_plan_whatever_room_there_is() {
    let mut world = World::new();
    world.pods("p", 3, &json!({}), "1", "1Gi", &json!({}));
    world.pods("q", 5, &json!({"app": "q"}), "700m", "3Gi", &affinity("podAntiAffinity", HOST, &json!({"app": "q"})));
    let least_cost = |world: &World| least_cost(&world.problem, &ColumnCache::default());
    let plan = world.plan();
    assert!(least_cost(&world) > Some(MicroUsd(0)) && least_cost(&world) <= plan.lower_bound, "{plan:?}");
    let bound = least_cost(&world);
    world.node("free", "z-a", 64, &[]);
    assert!(world.plan().cost < plan.cost);
    assert_eq!(least_cost(&world), bound);
    // No type holds these, and the others still cost as much.
    world.pods("large", 2, &json!({}), "900", "1Gi", &json!({}));
    assert_eq!(least_cost(&world), bound);
    assert_eq!(least_cost(&World::new()), Some(MicroUsd(0)));
}

#[test]
fn a_single_pod_gets_the_cheapest_node_that_holds_it() {
    let plan = lone(&json!({})).plan();
    assert_eq!(types(&plan), ["a1.x2"]);
    let choices = &plan.new_nodes[0].choices;
    assert!(choices.windows(2).all(|w| w[0].price <= w[1].price), "cheapest first");
    assert!(choices.iter().any(|c| &*c.zone == "z-c") && choices.iter().any(|c| &*c.instance_type.name == "r1.x16"));
    assert_eq!(plan.cost, MicroUsd(80_000));
    assert_eq!((plan.lower_bound, plan.optimal), (Some(MicroUsd(80_000)), true), "no node of one CPU");
}

#[test]
fn b35_a_higher_weight_is_used_first_and_equal_weights_compete_by_price() {
    let expensive = json!({"requirements": [{"key": "karpenter.k8s.aws/instance-family", "operator": "In", "values": ["r1"]}], "weight": 10});
    let mut world = World::with_pools(&[("cheap", json!({})), ("expensive", expensive.clone())]);
    world.pods("p", 3, &json!({}), "1", "1Gi", &json!({}));
    assert!(world.plan().new_nodes.iter().all(|n| n.pool == 1));
    let mut level = expensive;
    level.as_object_mut().unwrap().remove("weight");
    let mut world = World::with_pools(&[("cheap", json!({})), ("expensive", level)]);
    world.pods("p", 3, &json!({}), "1", "1Gi", &json!({}));
    assert!(world.plan().new_nodes.iter().all(|n| n.pool == 0));
}

#[test]
fn b36_pods_beyond_a_limit_use_the_next_pool_or_name_the_limit() {
    let heavy = json!({"weight": 10, "limits": {"cpu": "4"}});
    let mut world = World::with_pools(&[("first", heavy.clone()), ("second", json!({}))]);
    world.pods("p", 8, &json!({}), "1", "1Gi", &json!({}));
    let plan = world.plan();
    let pools: BTreeSet<usize> = plan.new_nodes.iter().map(|n| n.pool).collect();
    assert_eq!((pools, plan.unschedulable.len()), ([0, 1].into(), 0));
    let mut world = World::with_pools(&[("first", heavy)]);
    world.pods("p", 8, &json!({}), "1", "1Gi", &json!({}));
    let plan = world.plan();
    assert!(reason(&plan).contains("NodePool first: limit on cpu reached (cpu 0 of 4"), "{}", reason(&plan));
    assert_eq!(plan.unschedulable.len(), 4);
}

#[test]
fn nodes_of_a_pool_of_higher_weight_stay_when_others_are_improved() {
    // Node for node, the second pool is cheaper.
    let heavy = json!({"weight": 10, "limits": {"cpu": "32"}, "requirements": [
        {"key": "karpenter.k8s.aws/instance-family", "operator": "In", "values": ["r1"]}]});
    let mut world = World::with_pools(&[("first", heavy), ("second", json!({}))]);
    for (at, cpu) in ["1100m", "1700m", "2300m", "2900m", "700m", "1300m", "1900m"].iter().enumerate() {
        world.pods(&format!("p{at}"), 5, &json!({}), cpu, "1Gi", &json!({}));
    }
    let plan = world.plan();
    assert!(plan.unschedulable.is_empty());
    let cpu = |pool: usize| -> i64 {
        let of_pool = plan.new_nodes.iter().filter(|node| node.pool == pool);
        of_pool.map(|node| node.choices[0].instance_type.capacity.cpu.0).sum()
    };
    assert_eq!(cpu(0), 32_000, "the limit of the first pool is used up: {:?}", types(&plan));
    assert!(cpu(1) > 0);
}

#[test]
fn pods_that_min_values_keep_from_one_pool_get_nodes_of_another() {
    let requirement = json!({"key": "karpenter.k8s.aws/instance-family", "operator": "Exists", "minValues": 9});
    let strict = json!({"requirements": [requirement]});
    // Of equal weight and price: every column of the strict pool is as promising.
    let pools = [("a", strict.clone()), ("b", strict.clone()), ("c", strict.clone()), ("d", strict), ("z", json!({}))];
    let mut world = World::with_pools(&pools);
    for (at, cpu) in ["1100m", "1700m", "2300m", "2900m", "700m"].iter().enumerate() {
        world.pods(&format!("p{at}"), 9, &json!({}), cpu, "1Gi", &json!({}));
    }
    let plan = world.plan();
    assert_eq!(plan.unschedulable.len(), 0, "{:?}", plan.unschedulable.first());
    assert!(plan.new_nodes.iter().all(|node| node.pool == 4));
}

#[test]
fn b37_limits_include_nodes_in_flight_and_the_number_of_nodes() {
    let mut world = World::with_pools(&[("default", json!({"limits": {"cpu": "6"}}))]);
    world.problem.pools[0].usage = Resources { cpu: Millicores(4000), ..Resources::default() };
    world.pods("p", 4, &json!({}), "1", "1Gi", &json!({}));
    assert_eq!(world.plan().unschedulable.len(), 2);
    let labels = json!({"app": "p"});
    let mut world = World::with_pools(&[("default", json!({"limits": {"nodes": "3"}}))]);
    world.problem.pools[0].node_count = 1;
    world.pods("p", 4, &labels, "1", "1Gi", &affinity("podAntiAffinity", HOST, &labels));
    let plan = world.plan();
    assert_eq!((plan.new_nodes.len(), plan.unschedulable.len()), (2, 2));
    assert!(reason(&plan).contains("limit on nodes"), "{}", reason(&plan));
}

#[test]
fn a_limit_in_usd_counts_the_nodes_that_exist_and_every_choice_of_a_new_one() {
    let pool = json!({"limits": {USD_PER_HOUR: "0.5"}, "capacity-types": ["spot", "on-demand"]});
    let mut world = World::with_pools(&[("default", pool)]);
    world.problem.pools[0].usage.set(USD_PER_HOUR, 300_000);
    world.pods("p", 40, &json!({}), "1", "1Gi", &json!({}));
    let plan = world.plan();
    let most = |node: &PlannedNode| node.choices.iter().map(|choice| choice.price.0).max().unwrap();
    let most: i64 = plan.new_nodes.iter().map(most).sum();
    // On spot for 0.016 USD per CPU and hour, 0.2 are enough for 12 of the 40 pods.
    assert_eq!((plan.cost, plan.unschedulable.len()), (MicroUsd(192_000), 28));
    assert!((plan.cost.0..=200_000).contains(&most), "{most}");
    let text = "limit on stowage.dev/usd-per-hour reached (stowage.dev/usd-per-hour 0.3 of 0.5 before this plan)";
    assert!(reason(&plan).contains(text), "{}", reason(&plan));
}

#[test]
fn limits_hold_for_every_choice_of_a_node() {
    let mut world = World::with_pools(&[("default", json!({"limits": {"cpu": "10"}}))]);
    world.pods("p", 4, &json!({"app": "p"}), "1", "1Gi", &affinity("podAntiAffinity", HOST, &json!({"app": "p"})));
    let plan = world.plan();
    assert!(plan.unschedulable.is_empty());
    let most: i64 =
        plan.new_nodes.iter().map(|n| n.choices.iter().map(|c| c.instance_type.capacity.cpu.0).max().unwrap()).sum();
    assert_eq!((plan.new_nodes.len(), most), (4, 10_000), "a1.x2 each; the rest of the limit admits one larger choice");
}

#[test]
fn higher_priority_is_placed_first_where_limits_exclude_some_pods() {
    let mut world = World::with_pools(&[("default", json!({"limits": {"cpu": "4"}}))]);
    world.pods("low", 4, &json!({}), "1", "1Gi", &json!({"priority": 1}));
    world.pods("top", 3, &json!({}), "1", "1Gi", &json!({"priority": 100}));
    let plan = world.plan();
    let left: Vec<&str> = plan.unschedulable.iter().map(|u| &*world.problem.pods[u.pod].key).collect();
    assert_eq!(left.len(), 3);
    assert!(left.iter().all(|key| key.contains("low")), "{left:?}");
}

#[test]
fn b38_taints_need_tolerations_and_startup_taints_do_not() {
    let taint = |effect: &str| json!([{"key": "dedicated", "value": "x", "effect": effect}]);
    for effect in ["NoSchedule", "NoExecute"] {
        let mut world = World::with_pools(&[("default", json!({"taints": taint(effect)}))]);
        world.pods("p", 1, &json!({}), "1", "1Gi", &json!({}));
        let text = reason(&world.plan()).to_owned();
        assert!(text.contains(&format!("taint dedicated=x:{effect} is not tolerated")), "{text}");
        world.pods(
            "t",
            1,
            &json!({}),
            "1",
            "1Gi",
            &json!({"tolerations": [{"key": "dedicated", "operator": "Exists"}]}),
        );
        assert_eq!(world.plan().unschedulable.len(), 1);
    }
    let mut world = World::with_pools(&[("default", json!({"startupTaints": taint("NoSchedule")}))]);
    world.pods("p", 1, &json!({}), "1", "1Gi", &json!({}));
    assert!(world.plan().unschedulable.is_empty());
}

#[test]
fn b39_prefer_no_schedule_is_avoided_and_tolerated_last() {
    let soft = json!({"weight": 10, "taints": [{"key": "slow", "effect": "PreferNoSchedule"}]});
    let mut world = World::with_pools(&[("soft", soft.clone()), ("plain", json!({}))]);
    world.pods("p", 1, &json!({}), "1", "1Gi", &json!({}));
    assert_eq!(world.plan().new_nodes[0].pool, 1);
    let mut world = World::with_pools(&[("soft", soft)]);
    world.pods("p", 1, &json!({}), "1", "1Gi", &json!({}));
    assert!(world.plan().unschedulable.is_empty());
}

#[test]
fn without_pools_the_reason_is_that_no_pool_is_ready() {
    let mut world = World::default();
    world.pods("p", 1, &json!({}), "1", "1Gi", &json!({}));
    assert!(reason(&world.plan()).contains("no NodePool is ready"));
}

#[test]
fn nodes_within_the_limits_are_purchased_despite_unplaced_pods() {
    let mut world = World::with_pools(&[("default", json!({"limits": {"cpu": "4"}}))]);
    world.pods("large", 1, &json!({}), "8", "1Gi", &json!({}));
    world.pods("small", 3, &json!({}), "1", "1Gi", &json!({}));
    let plan = world.plan();
    assert_eq!(plan.unschedulable.iter().map(|u| u.pod).collect::<Vec<_>>(), [0], "{:?}", plan.unschedulable);
}

/// The reason of a pod of 17 CPUs that no NodePool can provide a node for.
fn reason_with_pools(pools: &[(String, serde_json::Value)]) -> String {
    let pools: Vec<(&str, serde_json::Value)> =
        pools.iter().map(|(name, spec)| (name.as_str(), spec.clone())).collect();
    let mut world = World::with_pools(&pools);
    world.pods("p", 1, &json!({}), "17", "1Gi", &json!({}));
    reason(&world.plan()).to_owned()
}

#[test]
fn node_pools_with_one_reason_are_named_together() {
    let pool = |at: usize| (format!("p{at:02}"), json!({}));
    let alike = |count: usize| reason_with_pools(&(0..count).map(pool).collect::<Vec<_>>());
    let why = |names: &str| {
        format!(
            "{names}: no instance type holds cpu 17, memory 1Gi (largest: r1.x16 with cpu 16, memory 128Gi, ephemeral-storage 20Gi after overhead)"
        )
    };
    assert_eq!(alike(1), why("NodePool p00"));
    assert_eq!(alike(2), why("NodePools p00, p01"));
    assert_eq!(alike(4), why("NodePools p00, p01, p02, p03"));
    assert_eq!(alike(5), why("NodePools p00, p01, p02 and 2 others"));
    let tainted = json!({"taints": [{"key": "k", "effect": "NoSchedule"}]});
    let pools = [("a".to_owned(), json!({})), ("b".to_owned(), tainted), ("c".to_owned(), json!({}))];
    let both = format!("{}; NodePool b: taint k:NoSchedule is not tolerated", why("NodePools a, c"));
    assert_eq!(reason_with_pools(&pools), both, "in order of the first name");
}

#[test]
fn the_reasons_of_many_node_pools_are_bounded() {
    let pool = |at: usize| {
        let taint = json!([{"key": format!("team-{at:02}"), "effect": "NoSchedule"}]);
        (format!("p{at:02}"), json!({"taints": taint}))
    };
    let text = reason_with_pools(&(0..25).map(pool).collect::<Vec<_>>());
    let reasons: Vec<&str> = text.split("; ").collect();
    assert_eq!(reasons.len(), 21, "{text}");
    assert_eq!(reasons[19], "NodePool p19: taint team-19:NoSchedule is not tolerated");
    assert_eq!(reasons[20], "5 more NodePools have other reasons");
    let mut pools: Vec<_> = (0..25).map(pool).collect();
    pools.push(("p99".to_owned(), json!({})));
    let text = reason_with_pools(&pools);
    let reasons: Vec<&str> = text.split("; ").collect();
    assert!(
        reasons[0].starts_with("NodePool p99: no instance type holds"),
        "the NodePool that the pod tolerates: {text}"
    );
    assert_eq!((reasons.len(), reasons[20]), (21, "6 more NodePools have other reasons"));
}
