//! Capacity of topology domains: pods are placed in other domains where limits, sizes or the room on nodes are exhausted; and nodes
//! without the label.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::output::plan::Plan;
use crate::test_support::{HOST, World, ZONE, affinity, one, reason, spread, zones};

/// A pool of one zone.
fn zoned(zone: &str, extra: Value) -> Value {
    let mut pool = extra;
    let list = pool.get("requirements").and_then(Value::as_array).cloned().unwrap_or_default();
    let zone = json!({"key": ZONE, "operator": "In", "values": [zone]});
    pool["requirements"] = json!(list.into_iter().chain([zone]).collect::<Vec<_>>());
    pool
}

/// Three pools with one zone each; the first has this CPU limit.
fn limited(cpu: &str) -> World {
    World::with_pools(&[
        ("a", zoned("z-a", json!({"limits": {"cpu": cpu}}))),
        ("b", zoned("z-b", json!({}))),
        ("c", zoned("z-c", json!({}))),
    ])
}

fn preferred(kind: &str, key: &str, labels: &Value) -> Value {
    json!({"affinity": {kind: {"preferredDuringSchedulingIgnoredDuringExecution":
        [{"weight": 10, "podAffinityTerm": {"topologyKey": key, "labelSelector": {"matchLabels": labels}}}]}}})
}

/// Number of pods planned on each existing node, by name.
fn onto(world: &World, plan: &Plan) -> BTreeMap<String, usize> {
    let of = |node: usize| world.problem.nodes[node].name.to_string();
    plan.placements.iter().map(|placement| (of(placement.node), placement.pods.len())).collect()
}

#[test]
fn pods_excluded_from_a_zone_by_a_limit_use_another_zone() {
    let labels = json!({"app": "p"});
    let soft = json!({"whenUnsatisfiable": "ScheduleAnyway"});
    for (what, pods, cpu, spec) in [
        ("hard spread", 1, "0", spread(ZONE, &labels, &json!({}))),
        ("hard spread of several", 6, "0", spread(ZONE, &labels, &json!({}))),
        ("soft spread", 6, "0", spread(ZONE, &labels, &soft)),
        ("anti-affinity", 2, "0", affinity("podAntiAffinity", ZONE, &labels)),
        ("affinity", 6, "0", affinity("podAffinity", ZONE, &labels)),
        ("affinity, some pods would fit", 6, "2", affinity("podAffinity", ZONE, &labels)),
        ("hard spread where some fit", 5, "2", spread(ZONE, &labels, &json!({}))),
    ] {
        let mut world = limited(cpu);
        world.pods("p", pods, &labels, "1500m", "1Gi", &spec);
        let plan = world.plan();
        assert!(plan.unschedulable.is_empty(), "{what}: {}", reason(&plan));
    }
}

#[test]
fn the_limit_is_the_reason_when_no_zone_has_room() {
    let labels = json!({"app": "p"});
    let mut world = World::with_pools(&[("default", json!({"limits": {"cpu": "4"}}))]);
    world.pods("p", 6, &labels, "1500m", "1Gi", &spread(ZONE, &labels, &json!({})));
    let plan = world.plan();
    assert_eq!(plan.unschedulable.len(), 4);
    assert!(reason(&plan).contains("limit"), "{}", reason(&plan));
}

#[test]
fn a_zone_gets_only_the_pods_that_fit_on_its_node() {
    let (app, db) = (json!({"app": "p"}), json!({"app": "db"}));
    let pools = [("default", json!({"requirements": [{"key": ZONE, "operator": "In", "values": ["z-a", "z-b"]}]}))];
    // A node of two CPUs; the database uses one.
    let world = |spec: &Value, pods: usize| {
        let mut world = World::with_pools(&pools);
        world.node("n", "z-c", 2, &[(&db, &json!({}))]);
        world.pods("p", pods, &app, "1", "1Gi", spec);
        world
    };
    let likes = world(&preferred("podAffinity", ZONE, &db), 3);
    let plan = likes.plan();
    assert!(plan.unschedulable.is_empty(), "{}", reason(&plan));
    assert_eq!(onto(&likes, &plan), [("n".to_owned(), 1)].into());
    let together = world(&affinity("podAffinity", ZONE, &app), 5);
    let plan = together.plan();
    assert!(plan.unschedulable.is_empty(), "{}", reason(&plan));
    assert_eq!(zones(&plan).values().collect::<Vec<_>>(), [&5], "all in one zone");
}

#[test]
fn a_zone_with_types_too_small_becomes_a_domain_with_its_first_node() {
    let labels = json!({"app": "p"});
    let small = json!({"requirements": [{"key": "karpenter.k8s.aws/instance-cpu", "operator": "In", "values": ["2"]}]});
    let pools = [("a", zoned("z-a", json!({}))), ("b", zoned("z-b", json!({}))), ("c", zoned("z-c", small))];
    for (node, left_out) in [(false, 0), (true, 2)] {
        let mut world = World::with_pools(&pools);
        if node {
            world.node("n", "z-c", 1, &[]);
        }
        world.pods("p", 4, &labels, "4", "1Gi", &spread(ZONE, &labels, &json!({})));
        assert_eq!(world.plan().unschedulable.len(), left_out, "a node in z-c: {node}");
    }
}

#[test]
fn a_rule_on_an_unknown_label_excludes_only_pods_that_require_it() {
    let labels = json!({"app": "p"});
    let soft = json!({"whenUnsatisfiable": "ScheduleAnyway"});
    for (what, spec, placed) in [
        ("soft spread", spread("rack", &labels, &soft), true),
        ("hard spread", spread("rack", &labels, &json!({})), false),
        ("preferred affinity", preferred("podAffinity", "rack", &labels), true),
        ("preferred anti-affinity", preferred("podAntiAffinity", "rack", &labels), true),
        ("required anti-affinity", affinity("podAntiAffinity", "rack", &labels), true),
        ("required affinity", affinity("podAffinity", "rack", &labels), false),
    ] {
        let mut world = World::new();
        world.pods("p", 3, &labels, "1", "1Gi", &spec);
        assert_eq!(world.plan().unschedulable.is_empty(), placed, "{what}");
    }
}

#[test]
fn nodes_without_the_label_hold_pods_whose_rules_allow_it() {
    let labels = json!({"app": "p"});
    // No pool: a full node with the label, and a node without it.
    let soft = json!({"whenUnsatisfiable": "ScheduleAnyway"});
    let refusing = affinity("podAntiAffinity", "rack", &labels);
    for (what, spec, placed) in [
        ("soft spread", spread("rack", &labels, &soft), true),
        ("hard spread", spread("rack", &labels, &json!({})), false),
        ("required anti-affinity", refusing.clone(), true),
        ("required affinity", affinity("podAffinity", "rack", &labels), false),
        ("no rule, but a running pod excludes it on its rack", json!({}), true),
    ] {
        let mut world = World::with_pools(&[]);
        world.node("full", "z-a", 1, &[(&labels, &refusing)]).labels.insert("rack".into(), "r1".into());
        world.node("bare", "z-a", 4, &[]);
        world.pods("p", 1, &labels, "1", "1Gi", &spec);
        let plan = world.plan();
        let want = if placed { [("bare".to_owned(), 1)].into() } else { BTreeMap::new() };
        assert_eq!(onto(&world, &plan), want, "{what}");
    }
}

#[test]
fn required_affinity_terms_need_a_pod_that_all_of_them_select() {
    let (front, db, both) = (json!({"tier": "front"}), json!({"app": "db"}), json!({"tier": "front", "app": "db"}));
    for key in [ZONE, HOST] {
        let mut spec = affinity("podAffinity", key, &front);
        let second = affinity("podAffinity", key, &db);
        let list = "/affinity/podAffinity/requiredDuringSchedulingIgnoredDuringExecution";
        let term = second.pointer(list).unwrap()[0].clone();
        spec.pointer_mut(list).unwrap().as_array_mut().unwrap().push(term);
        for (running, placed) in [(vec![&front, &db], false), (vec![&both], true)] {
            let mut world = World::new();
            let pods: Vec<(&Value, &Value)> = running.into_iter().map(|labels| (labels, &Value::Null)).collect();
            world.node("n", "z-a", 8, &pods);
            world.pods("p", 1, &json!({"app": "p"}), "1", "1Gi", &spec);
            assert_eq!(world.plan().unschedulable.is_empty(), placed, "{key}: {} run", pods.len());
        }
    }
}

#[test]
fn affinity_without_a_selector_cannot_be_satisfied() {
    for key in [ZONE, HOST] {
        let mut world = World::new();
        let spec = json!({"affinity": {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": key}]}}});
        world.pods("p", 1, &json!({}), "1", "1Gi", &spec);
        assert!(reason(&world.plan()).contains("labelSelector"), "{key}");
    }
}

#[test]
fn a_pod_does_not_conflict_with_its_own_port_on_two_addresses() {
    let port = |ip: &str| json!({"containerPort": 80, "hostPort": 80, "hostIP": ip});
    let mut world = World::new();
    world.pods("p", 2, &json!({}), "1", "1Gi", &json!({"ports": [port("0.0.0.0"), port("10.0.0.1")]}));
    assert_eq!(world.plan().new_nodes.len(), 2);
    world.pods("q", 1, &json!({}), "1", "1Gi", &json!({"ports": [port("10.0.0.1")]}));
    assert_eq!(world.plan().new_nodes.len(), 3);
}

#[test]
fn an_invalid_term_does_not_invalidate_the_others() {
    let wrong = json!({"matchExpressions": [{"key": "size", "operator": "Gt", "values": ["x"]}]});
    let right = json!({"matchExpressions": [{"key": ZONE, "operator": "In", "values": ["z-b"]}]});
    let mut world = World::new();
    world.pods("p", 1, &json!({}), "1", "1Gi", &crate::test_support::node_affinity(&json!([wrong, right])));
    assert_eq!(zones(&world.plan()).keys().collect::<Vec<_>>(), ["z-b"]);
    let alone =
        crate::test_support::pod("p", &json!({}), "1", "1Gi", &crate::test_support::node_affinity(&json!([wrong])));
    assert!(world.interner.intern(&alone).is_err());
    let mut running = alone;
    running.spec.as_mut().unwrap().node_name = Some("n".into());
    assert_eq!(world.interner.intern(&running).unwrap().class.requests.cpu.0, 1000, "it uses room on its node");
}

#[test]
fn a_pod_that_no_node_holds_does_not_trigger_placement_by_priority() {
    let mut world = World::new();
    world.pods("giant", 1, &json!({}), "64", "1Gi", &json!({"priority": 1000}));
    world.pods("p", 4, &json!({}), "1", "1Gi", &json!({"priority": 1}));
    world.pods("q", 4, &json!({}), "1", "1Gi", &json!({"priority": 2}));
    let plan = world.plan();
    assert_eq!((plan.unschedulable.len(), plan.new_nodes.len()), (1, 1), "all others share a node");
}

#[test]
fn an_open_label_has_a_variant_for_every_value_that_pods_name() {
    let teams: Vec<String> = (0..100).map(|n| format!("team-{n:03}")).collect();
    let of_pool = json!({"requirements": [{"key": "team", "operator": "In", "values": teams}]});
    let mut world = World::with_pools(&[("default", of_pool)]);
    for team in [0, 64, 99] {
        world.pods(&teams[team], 1, &json!({}), "1", "1Gi", &one("team", "In", &[&teams[team]]));
    }
    let plan = world.plan();
    assert!(plan.unschedulable.is_empty(), "{}", reason(&plan));
    assert_eq!(plan.new_nodes.len(), 3);
}

#[test]
fn a_capacity_type_preference_does_not_exclude_a_required_zone() {
    let labels = json!({"app": "p"});
    let of_type = |kind: &str, more: Value| {
        let mut pool = more;
        pool["requirements"] = json!([{"key": "karpenter.sh/capacity-type", "operator": "In", "values": [kind]}]);
        pool
    };
    let mut world = World::default();
    for (name, mut pool) in
        [("od", of_type("on-demand", json!({}))), ("spot", of_type("spot", json!({"limits": {"cpu": "0"}})))]
    {
        pool["capacity-types"] = json!(["on-demand", "spot"]);
        world.problem.pools.push(crate::test_support::read_pool(name, &pool).unwrap());
    }
    let mut spec = spread(ZONE, &labels, &json!({}));
    let soft = spread("karpenter.sh/capacity-type", &labels, &json!({"whenUnsatisfiable": "ScheduleAnyway"}));
    let second = soft["topologySpreadConstraints"][0].clone();
    spec["topologySpreadConstraints"].as_array_mut().unwrap().push(second);
    world.pods("p", 6, &labels, "1", "1Gi", &spec);
    let plan = world.plan();
    assert!(plan.unschedulable.is_empty(), "{}", reason(&plan));
}

#[test]
fn numeric_bounds_on_an_open_label_are_satisfiable() {
    let tiers = json!({"requirements": [{"key": "tier", "operator": "In", "values": ["4", "8", "16"]}]});
    for (operator, bound, placed) in [("Lt", "10", true), ("Gt", "5", true), ("Gt", "16", false)] {
        let mut world = World::with_pools(&[("default", tiers.clone())]);
        world.pods("p", 1, &json!({}), "1", "1Gi", &one("tier", operator, &[bound]));
        assert_eq!(world.plan().unschedulable.is_empty(), placed, "{operator} {bound}");
    }
}
