//! Behaviors 40 to 42: existing and launching nodes.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Taint;
use serde_json::json;
use stowage_model::resources::Resources;
use stowage_model::units::{MicroUsd, Millicores};

use crate::input::node::Tenure;
use crate::test_support::{HOST, World, ZONE, affinity, spread, zones};

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

/// Pods go to nodes that stay, then to the node whose unused part costs least per pod: that is removed last. None goes to a node that the
/// next decision removes while another one has room.
#[test]
fn f20_pods_go_to_nodes_that_stay() {
    let running = json!({});
    for (pods, filled) in [
        (7, &["e protected"][..]),
        (11, &["c half full", "e protected"]),
        (13, &["c half full", "d small", "e protected"]),
        (21, &["b empty", "c half full", "d small", "e protected"]),
        (27, &["a not ours", "b empty", "c half full", "d small", "e protected"]),
    ] {
        let mut world = World::new();
        for (name, cpus, price, pods, tenure) in [
            ("a not ours", 8, 0, 2, Tenure::NotOurs),
            ("b empty", 8, 400_000, 0, Tenure::MayBeRemoved),
            ("c half full", 8, 400_000, 4, Tenure::MayBeRemoved),
            // Its price per pod is lower than that of the half full one.
            ("d small", 2, 70_000, 0, Tenure::MayBeRemoved),
            ("e protected", 8, 800_000, 1, Tenure::Stays),
        ] {
            let node = world.node(name, "z-a", cpus, &vec![(&running, &running); pods]);
            (node.price, node.tenure) = (MicroUsd(price), tenure);
        }
        world.pods("p", pods, &json!({}), "1", "1Gi", &json!({}));
        let plan = world.plan();
        let used: Vec<&str> =
            plan.placements.iter().map(|placement| &*world.problem.nodes[placement.node].name).collect();
        assert_eq!((used.as_slice(), plan.new_nodes.len()), (filled, 0), "{pods} pods");
    }
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
