//! Hostile pods of one namespace beside ordinary pods of another: each shape affects its own namespace only.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::output::plan::Plan;
use crate::test_support::{World, pod};

const VICTIM: &str = "payments";

fn world() -> World {
    World::with_pools(&[("default", json!({"requirements": [{"key": "team", "operator": "Exists"}]}))])
}

/// Adds pods of a namespace, each with its own spec, and with this controller.
fn add(world: &mut World, namespace: &str, specs: impl IntoIterator<Item = Value>, cpu: &str, owner: Option<&str>) {
    let first = world.problem.pods.len();
    for (at, spec) in specs.into_iter().enumerate() {
        let mut pod = pod(&format!("p-{first}-{at}"), &json!({"app": "web"}), cpu, "1Gi", &spec);
        pod.metadata.namespace = Some(namespace.to_owned());
        pod.metadata.owner_references = owner.map(|uid| {
            let owner =
                json!([{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": uid, "controller": true}]);
            serde_json::from_value(owner).unwrap()
        });
        let entry = world.interner.intern(&pod).unwrap();
        world.problem.pods.push(entry);
    }
}

fn victims(world: &mut World) {
    let selector = json!({"nodeSelector": {"team": "payments"}});
    add(world, VICTIM, [json!({}), json!({}), selector.clone(), selector], "1", None);
}

/// The number of pods without a node, by namespace.
fn unplaced(world: &World, plan: &Plan) -> BTreeMap<String, usize> {
    let mut out = BTreeMap::new();
    for failed in &plan.unschedulable {
        *out.entry(world.problem.pods[failed.pod].class.namespace.to_string()).or_default() += 1;
    }
    out
}

#[test]
fn hostile_pods_leave_the_pods_of_other_namespaces_their_nodes() {
    let affinity = |term: Value| json!({"affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}});
    let prefers = |values: Vec<String>| {
        let term = json!({"matchExpressions": [{"key": "team", "operator": "In", "values": values}]});
        json!({"affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "preference": term}]}}})
    };
    let requires = |at: usize| json!({"nodeSelector": {"team": format!("a{at:05}")}});
    let spread = |key: &str| {
        json!({"topologySpreadConstraints": [{"maxSkew": 1, "minDomains": i32::MAX, "topologyKey": key,
            "whenUnsatisfiable": "DoNotSchedule", "labelSelector": {"matchLabels": {"app": "web"}}}]})
    };
    let shapes: Vec<(&str, &str, Vec<Value>)> = vec![
        ("requests beyond every instance type", "9000000000000000", vec![json!({}); 50]),
        ("a label that no NodePool has", "1", vec![json!({"nodeSelector": {"nothing.example.com/has": "it"}}); 50]),
        ("preferred text that is no label value", "1", vec![prefers(vec!["!not a label value".into()]); 50]),
        ("thousands of preferred values", "1", vec![prefers((0..3_000).map(|at| format!("a{at:05}")).collect())]),
        ("hundreds of required values", "1", (0..500).map(requires).collect()),
        ("more topology domains than there are", "1", vec![spread("topology.kubernetes.io/zone"); 20]),
        ("a topology key that no node has", "1", vec![spread("nothing.example.com/rack"); 20]),
        (
            "anti-affinity to its own kind everywhere",
            "1",
            vec![
                affinity(json!({"topologyKey": "kubernetes.io/os", "labelSelector": {"matchLabels": {"app": "web"}}}));
                20
            ],
        ),
        ("the highest priority and no room", "9000000000000000", vec![json!({"priority": i32::MAX}); 20]),
    ];
    for (case, cpu, specs) in shapes {
        let mut world = world();
        victims(&mut world);
        add(&mut world, "a-attacker", specs, cpu, None);
        let plan = world.plan();
        assert_eq!(unplaced(&world, &plan).get(VICTIM), None, "{case}: {:?}", plan.unschedulable.first());
        let pinned = plan.new_nodes.iter().flat_map(|node| &node.requirements).flat_map(|r| &r.values);
        assert!(!pinned.clone().any(|value| value.contains('!')), "{case}");
        assert!(plan.new_nodes.len() <= 600, "{case}");
    }
}

#[test]
fn a_copied_controller_uid_does_not_count_for_the_limit_of_pods_per_node() {
    for (case, namespace, nodes) in [("its own pods", VICTIM, 2), ("copies in another namespace", "a-attacker", 1)] {
        let mut world = world();
        world.problem.settings.workload_pods_per_node = Some(2);
        add(&mut world, VICTIM, [json!({}), json!({})], "100m", Some("rs"));
        let before = world.plan().new_nodes.len();
        assert_eq!(before, 1);
        add(&mut world, namespace, [json!({}), json!({})], "100m", Some("rs"));
        assert_eq!(world.plan().new_nodes.len(), nodes, "{case}");
    }
}
