//! Planner settings.

use std::collections::BTreeSet;
use std::sync::Arc;

use serde_json::{Value, json};
use stowage_model::offering::CapacityType;
use stowage_model::units::MicroUsd;

use crate::input::settings::NodeSizes;
use crate::output::plan::Plan;
use crate::test_support::{World, is_bound, reason, types};

const AMD64: &str = "kubernetes.io/arch";

fn amd64() -> Value {
    json!({"nodeSelector": {AMD64: "amd64"}})
}

fn real_price(plan: &Plan) -> i64 {
    plan.new_nodes.iter().map(|node| node.choices[0].price.0).sum()
}

#[test]
fn node_size_bounds_limit_the_purchased_types() {
    for (least, most, want, cpus) in [
        (None, None, "a1.x2", &[2, 4, 8, 16][..]),
        (Some(4), None, "a1.x4", &[4, 8, 16]),
        (Some(5), Some(9), "a1.x8", &[8]),
    ] {
        let mut world = World::new();
        world.problem.settings.node_sizes = NodeSizes { least_vcpus: least, most_vcpus: most };
        world.pods("p", 1, &json!({}), "1", "1Gi", &json!({}));
        let plan = world.plan();
        assert_eq!(types(&plan), [want]);
        let sizes: BTreeSet<i64> =
            plan.new_nodes[0].choices.iter().map(|c| c.instance_type.capacity.cpu.0 / 1000).collect();
        assert_eq!(sizes.into_iter().collect::<Vec<_>>(), cpus);
    }
    let mut world = World::new();
    world.problem.settings.node_sizes = NodeSizes { least_vcpus: Some(100), most_vcpus: None };
    world.pods("p", 1, &json!({}), "1", "1Gi", &json!({}));
    assert!(reason(&world.plan()).contains("of the node sizes that are set"), "{}", reason(&world.plan()));
}

#[test]
fn a_node_penalty_reduces_the_number_of_nodes_and_is_not_a_cost() {
    let mut world = World::new();
    // The largest size costs slightly more per CPU.
    let mut catalog = (*world.problem.pools[0].catalog).clone();
    for instance_type in catalog.instance_types.iter_mut().filter(|t| t.name.ends_with("x16")) {
        let mut raised = (**instance_type).clone();
        raised.offerings.iter_mut().for_each(|o| o.price.0 += 1_000);
        *instance_type = Arc::new(raised);
    }
    world.problem.pools[0].catalog = Arc::new(catalog);
    world.pods("p", 8, &json!({}), "2", "8Gi", &json!({}));
    let plan = world.plan();
    assert!(plan.new_nodes.len() > 1 && plan.cost.0 == 640_000, "{:?}", types(&plan));
    world.problem.settings.node_penalty = MicroUsd(100_000);
    let plan = world.plan();
    assert_eq!(types(&plan), ["a1.x16"]);
    assert_eq!((plan.cost.0, real_price(&plan)), (641_000, 641_000));
    assert!(is_bound(&plan, 640_000), "without the penalty: {:?}", plan.lower_bound);
}

#[test]
fn a_family_with_a_higher_weight_is_purchased_at_a_higher_price() {
    for (weights, want, cost) in [
        (vec![], "c1.x2", 80_000),
        (vec![("m1", 119)], "c1.x2", 80_000),
        (vec![("m1", 150)], "m1.x2", 96_000),
        (vec![("c1", 50)], "m1.x2", 96_000),
    ] {
        let mut world = World::new();
        world.problem.settings.family_weights = weights.iter().map(|(name, n)| ((*name).to_owned(), *n)).collect();
        world.pods("p", 1, &json!({}), "1", "1Gi", &amd64());
        let plan = world.plan();
        assert_eq!((types(&plan), plan.cost.0), (vec![want.to_owned()], cost), "{weights:?}");
    }
}

/// A world in which spot costs more than on-demand.
fn dear_spot(spot_available: bool) -> World {
    let any = json!({"requirements": []});
    let mut world = World::with_pools(&[("default", any)]);
    let pool = &mut world.problem.pools[0];
    pool.requirements.clear();
    let mut catalog = (*pool.catalog).clone();
    for instance_type in &mut catalog.instance_types {
        let mut changed = (**instance_type).clone();
        for offering in changed.offerings.iter_mut().filter(|o| o.capacity_type == CapacityType::Spot) {
            offering.price.0 *= 5;
            offering.available = spot_available;
        }
        *instance_type = Arc::new(changed);
    }
    pool.catalog = Arc::new(catalog);
    world.pods("p", 3, &json!({}), "1", "1Gi", &json!({}));
    world
}

#[test]
fn preferred_spot_capacity_is_purchased_first_where_available() {
    for (prefer, available, want) in
        [(false, true, CapacityType::OnDemand), (true, true, CapacityType::Spot), (true, false, CapacityType::OnDemand)]
    {
        let mut world = dear_spot(available);
        world.problem.settings.prefer_spot = prefer;
        let plan = world.plan();
        assert!(plan.unschedulable.is_empty());
        let bought = plan.new_nodes.iter().map(|node| node.choices[0].capacity_type);
        assert!(bought.clone().all(|capacity_type| capacity_type == want), "{prefer} {available}");
    }
}

/// Pods of 100m of a controller.
fn owned(world: &mut World, uid: &str, count: usize) {
    let from = world.problem.pods.len();
    world.pods(uid, count, &json!({}), "100m", "64Mi", &json!({}));
    for pod in &mut world.problem.pods[from..] {
        pod.owner = Some(Arc::from(uid));
    }
}

#[test]
fn a_node_holds_at_most_the_set_number_of_pods_per_workload() {
    let most_alike = |world: &World, plan: &Plan| {
        let old = plan.placements.iter().map(|p| &p.pods);
        let per_node = old.chain(plan.new_nodes.iter().map(|n| &n.pods)).map(|pods| {
            let mut of_owner = std::collections::BTreeMap::new();
            for owner in pods.iter().filter_map(|pod| world.problem.pods[*pod].owner.clone()) {
                *of_owner.entry(owner).or_insert(0) += 1;
            }
            of_owner.into_values().max().unwrap_or(0)
        });
        per_node.max().unwrap_or(0)
    };
    let mut world = World::new();
    owned(&mut world, "a", 6);
    owned(&mut world, "b", 4);
    owned(&mut world, "c", 1);
    world.pods("bare", 5, &json!({}), "100m", "64Mi", &json!({}));
    assert_eq!(world.plan().new_nodes.len(), 1, "no limit unless it is set");
    world.problem.settings.workload_pods_per_node = Some(2);
    let plan = world.plan();
    assert_eq!((plan.new_nodes.len(), most_alike(&world, &plan), plan.unschedulable.len()), (3, 2, 0));
    // Running pods count.
    let running = world.problem.pods[0].clone();
    let node = world.node("n", "z-a", 8, &[]);
    node.pods.push(crate::input::pod::PodEntry { key: "default/running".into(), ..running });
    let plan = world.plan();
    let there = plan.placements.iter().flat_map(|p| &p.pods).filter(|pod| **pod < 6).count();
    assert_eq!(there, 1, "a pod of workload a runs there");
}
