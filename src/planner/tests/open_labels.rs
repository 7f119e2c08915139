//! NodePools that leave the values of custom labels to pods.

use serde_json::{Value, json};

use crate::test_support::{World, pod};

/// A pool with these open labels.
fn world(keys: &[&str]) -> World {
    let open: Vec<Value> = keys.iter().map(|key| json!({"key": key, "operator": "Exists"})).collect();
    World::with_pools(&[("default", json!({"requirements": open}))])
}

/// A pod in a namespace.
fn add(world: &mut World, namespace: &str, name: &str, spec: &Value) {
    let mut pod = pod(name, &json!({}), "1", "1Gi", spec);
    pod.metadata.namespace = Some(namespace.to_owned());
    let entry = world.interner.intern(&pod).unwrap();
    world.problem.pods.push(entry);
}

fn preferring(key: &str, values: &[String]) -> Value {
    let term = json!({"matchExpressions": [{"key": key, "operator": "In", "values": values}]});
    json!({"affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1, "preference": term}]}}})
}

#[test]
fn every_combination_that_pods_require_gets_a_node() {
    let mut world = world(&["example.com/app", "example.com/team"]);
    for at in 0..16 {
        let selector = json!({"example.com/app": format!("x{at:02}"), "example.com/team": format!("t{at:02}")});
        add(&mut world, "default", &format!("p-{at}"), &json!({"nodeSelector": selector}));
    }
    let plan = world.plan();
    assert!(plan.unschedulable.is_empty(), "{:?}", plan.unschedulable);
    assert_eq!(plan.new_nodes.len(), 16);
}

#[test]
fn values_that_one_tenant_prefers_do_not_displace_those_that_another_requires() {
    for keys in [&["team"][..], &["app", "team"]] {
        let mut world = world(keys);
        let values: Vec<String> = (0..200).map(|n| format!("a{n:03}")).collect();
        add(&mut world, "attacker", "greedy", &preferring(keys[0], &values));
        let selector = json!({keys[0]: "payments"});
        add(&mut world, "payments", "victim", &json!({"nodeSelector": selector}));
        let plan = world.plan();
        assert!(plan.unschedulable.is_empty(), "{keys:?}: {:?}", plan.unschedulable);
    }
}

#[test]
fn text_that_is_no_label_value_never_reaches_a_node() {
    let mut world = world(&["team"]);
    add(&mut world, "default", "typo", &preferring("team", &["Data Science!".to_owned()]));
    add(&mut world, "default", "indifferent", &json!({}));
    let plan = world.plan();
    assert!(plan.unschedulable.is_empty(), "{:?}", plan.unschedulable);
    let values: Vec<&String> =
        plan.new_nodes.iter().flat_map(|node| &node.requirements).flat_map(|r| &r.values).collect();
    assert!(!values.iter().any(|value| value.contains(' ')), "{values:?}");
}

#[test]
fn a_pod_whose_value_is_beyond_the_bound_is_told_so() {
    let mut world = world(&["team"]);
    for at in 0..200 {
        add(&mut world, "default", &format!("p-{at:03}"), &json!({"nodeSelector": {"team": format!("t{at:03}")}}));
    }
    add(&mut world, "default", "gone", &json!({"nodeSelector": {"kubernetes.io/arch": "riscv"}}));
    let plan = world.plan();
    let reasons: Vec<&str> = plan.unschedulable.iter().map(|failed| &*failed.reason).collect();
    assert!(reasons.len() > 1 && reasons.len() < 200, "{}", reasons.len());
    let crowded = "NodePool default: pods of this plan ask for more values of team than the 128 that a plan considers; the pod is planned again \
                   in seconds, when others have their nodes";
    assert_eq!(reasons.iter().filter(|reason| **reason == crowded).count(), reasons.len() - 1, "{reasons:?}");
}
