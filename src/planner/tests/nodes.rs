//! Behaviors 40 to 42: existing and launching nodes.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Taint;
use serde_json::json;

use crate::model::resources::Resources;
use crate::model::units::{MicroUsd, Millicores};
use crate::test_support::planner::{HOST, World, ZONE, affinity, spread, zones};

#[test]
fn b40_pods_use_room_on_a_node_in_flight_without_a_purchase() {
    let mut world = World::new();
    world.node("n", "z-a", 8, &[]).initialized = false;
    world.pods("p", 8, &json!({}), "1", "1Gi", &json!({}));
    let plan = world.plan();
    assert_eq!((plan.new_nodes.len(), plan.placements[0].pods.len(), plan.cost), (0, 8, MicroUsd(0)));
    world.pods("q", 1, &json!({}), "1", "1Gi", &json!({}));
    assert_eq!(world.plan().new_nodes.len(), 1);
}

#[test]
fn initialized_nodes_are_filled_first_and_then_by_name() {
    let mut world = World::new();
    world.node("a", "z-a", 8, &[]).initialized = false;
    world.node("c", "z-a", 8, &[]);
    world.node("b", "z-a", 8, &[]);
    world.pods("p", 1, &json!({}), "1", "1Gi", &json!({}));
    assert_eq!(world.plan().placements[0].node, 2);
}

#[test]
fn an_existing_node_reserves_room_for_daemons_and_keeps_its_taints() {
    let mut world = World::new();
    world.node("n", "z-a", 2, &[]).daemon_reserve = Resources { cpu: Millicores(1500), ..Resources::default() };
    world.pods("p", 1, &json!({}), "1", "1Gi", &json!({}));
    assert!(world.plan().placements.is_empty());
    let mut world = World::new();
    let taint = Taint { key: "k".into(), effect: "NoSchedule".into(), ..Taint::default() };
    world.node("n", "z-a", 2, &[]).taints = vec![taint];
    world.pods("p", 1, &json!({}), "1", "1Gi", &json!({}));
    assert!(world.plan().placements.is_empty());
}

#[test]
fn the_host_ports_of_expected_daemons_are_reserved() {
    let on = |port: i32| json!({"ports": [{"containerPort": 1, "hostPort": port}]});
    for (port, placed) in [(80, 0), (81, 1)] {
        let mut world = World::new();
        world.daemon("100m", &on(80));
        let class = Arc::clone(&world.problem.daemons[0].class);
        world.node("n", "z-a", 8, &[]).daemons = vec![class];
        world.pods("p", 1, &json!({}), "1", "1Gi", &on(port));
        let plan = world.plan();
        assert_eq!(
            (plan.placements.len(), plan.new_nodes.len()),
            (placed, 0),
            "port {port}: no new node is without the daemon"
        );
    }
}

#[test]
fn host_affinity_to_a_pod_on_an_unschedulable_node_waits() {
    let labels = json!({"app": "p"});
    let together = affinity("podAffinity", HOST, &labels);
    let mut world = World::new();
    world.node("n", "z-a", 8, &[(&labels, &together)]).schedulable = false;
    world.pods("p", 1, &labels, "1", "1Gi", &together);
    let plan = world.plan();
    assert_eq!((plan.new_nodes.len(), plan.unschedulable.len()), (0, 1), "kube-scheduler would reject a new node");
    world.at(0).schedulable = true;
    assert_eq!(world.plan().placements.len(), 1);
}

#[test]
fn b41_an_unschedulable_node_is_not_used_but_its_pods_count() {
    let labels = json!({"app": "p"});
    let mut world = World::new();
    world.node("n", "z-a", 8, &[(&labels, &json!({}))]).schedulable = false;
    world.pods("p", 2, &labels, "1", "1Gi", &spread(ZONE, &labels, &json!({})));
    let plan = world.plan();
    assert!(plan.placements.is_empty());
    assert_eq!(zones(&plan).into_keys().collect::<Vec<_>>(), ["z-b", "z-c"]);
}
