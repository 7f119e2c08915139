use serde_json::{Value, json};

use crate::improve::host_preferences::improve_host_preferences;
use crate::test_support::plan_stages::{instance, purchase, purchased};
use crate::test_support::{HOST, World, affinity};

fn soft_spread(labels: &Value) -> Value {
    json!({"topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": HOST, "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": labels}}]})
}

fn preferred_affinity(labels: &Value) -> Value {
    json!({"affinity": {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [
        {"weight": 1, "podAffinityTerm": {"topologyKey": HOST, "labelSelector": {"matchLabels": labels}}}]}}})
}

/// Places pods, given by name and count, on nodes of a1; each has the label `app: name` and the spec of its name. Returns the
/// contents of each node afterwards.
fn improved(specs: &[(&str, Value)], nodes: &[(&str, &[(&str, usize)])]) -> Vec<String> {
    let mut world = World::new();
    for (name, spec) in specs {
        let count = nodes.iter().flat_map(|(_, pods)| *pods).filter(|(of, _)| of == name).map(|(_, count)| count).sum();
        world.pods(name, count, &json!({"app": name}), "1", "1Gi", spec);
    }
    let mut instance = instance(&world);
    let mut state = instance.state(false);
    for (instance_type, pods) in nodes {
        purchase(&mut state, instance_type, "z-a", pods);
    }
    state.split_merged();
    let cost = state.cost();
    improve_host_preferences(&mut state);
    assert!(state.cost() <= cost && state.demand.is_empty(), "the cost does not increase, and no pod is lost");
    purchased(&state)
}

#[test]
fn pods_that_prefer_to_be_apart_move_to_nodes_with_room() {
    let specs = [("p", soft_spread(&json!({"app": "p"}))), ("q", json!({}))];
    let nodes = improved(&specs, &[("a1.x4", &[("p", 4)]), ("a1.x4", &[("q", 1)])]);
    assert_eq!(nodes, ["a1.x4 in z-a: p 2", "a1.x4 in z-a: q 1, p 2"]);
}

#[test]
fn without_room_they_are_swapped_with_pods_without_preferences() {
    let specs = [("p", soft_spread(&json!({"app": "p"}))), ("q", json!({}))];
    let nodes = improved(&specs, &[("a1.x2", &[("p", 2)]), ("a1.x2", &[("q", 2)])]);
    assert_eq!(nodes, ["a1.x2 in z-a: p 1, q 1", "a1.x2 in z-a: q 1, p 1"]);
}

#[test]
fn pods_move_to_pods_they_prefer_and_empty_nodes_are_not_purchased() {
    let specs = [("p", preferred_affinity(&json!({"app": "lead"}))), ("lead", json!({}))];
    let nodes = improved(&specs, &[("a1.x2", &[("p", 1)]), ("a1.x4", &[("lead", 1)])]);
    assert_eq!(nodes, ["a1.x4 in z-a: lead 1, p 1"]);
}

#[test]
fn pods_tied_by_required_affinity_stay_together() {
    let mut spec = affinity("podAffinity", HOST, &json!({"app": "p"}));
    spec.as_object_mut().unwrap().extend(soft_spread(&json!({"app": "p"})).as_object().unwrap().clone());
    let specs = [("p", spec), ("q", json!({}))];
    let nodes = improved(&specs, &[("a1.x4", &[("p", 4)]), ("a1.x4", &[("q", 1)])]);
    assert_eq!(nodes, ["a1.x4 in z-a: p 4", "a1.x4 in z-a: q 1"]);
}

#[test]
fn without_preferences_nothing_moves() {
    let nodes = improved(&[("p", json!({}))], &[("a1.x4", &[("p", 4)]), ("a1.x4", &[("p", 1)])]);
    assert_eq!(nodes, ["a1.x4 in z-a: p 4", "a1.x4 in z-a: p 1"]);
}
