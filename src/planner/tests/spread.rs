//! Behaviors 23 to 28: topology spread.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Service, Taint};
use serde_json::{Value, json};
use stowage_model::time::UnixMillis;

use crate::input::default_spread::{DefaultSpread, Services};
use crate::input::intern::Interner;
use crate::input::pod::PodEntry;
use crate::input::settings::PreferencePolicy;
use crate::output::plan::Plan;
use crate::test_support::{HOST, World, ZONE, affinity, one, reason, spread, zones};

#[test]
fn b23_zone_spread_over_three_zones_is_level() {
    let labels = json!({"app": "p"});
    for (pods, want) in [(3, vec![1, 1, 1]), (4, vec![1, 1, 2]), (7, vec![2, 2, 3])] {
        let mut world = World::new();
        world.pods("p", pods, &labels, "1", "1Gi", &spread(ZONE, &labels, &json!({})));
        let mut counts: Vec<usize> = zones(&world.plan()).into_values().collect();
        counts.sort_unstable();
        assert_eq!(counts, want);
    }
}

#[test]
fn b24_skew_counts_running_pods() {
    let labels = json!({"app": "p"});
    let mut world = World::new();
    for (name, zone) in [("a", "z-a"), ("b", "z-b")] {
        world.node(name, zone, 1, &[(&labels, &json!({}))]);
    }
    world.pods("p", 1, &labels, "1", "1Gi", &spread(ZONE, &labels, &json!({})));
    assert_eq!(zones(&world.plan()).keys().collect::<Vec<_>>(), ["z-c"]);
}

#[test]
fn pods_spread_by_the_counts_of_other_pods_are_spread_too() {
    let (a, b) = (json!({"app": "a"}), json!({"app": "b"}));
    let mut world = World::new();
    // 4 pods of `a`: one zone has one more than the others.
    world.pods("a", 4, &a, "1", "1Gi", &spread(ZONE, &a, &json!({})));
    world.pods("b", 3, &b, "1", "1Gi", &spread(ZONE, &b, &json!({})));
    world.pods("b-by-a", 6, &b, "1", "1Gi", &spread(ZONE, &a, &json!({})));
    let plan = world.plan();
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for node in &plan.new_nodes {
        let of_b = node.pods.iter().filter(|pod| world.problem.pods[**pod].key.contains("/b-")).count();
        *counts.entry(node.choices[0].zone.as_ref()).or_default() += of_b;
    }
    // kube-scheduler may try the last pod of `b` after it has bound all others.
    assert_eq!(counts.into_values().collect::<Vec<_>>(), [3, 3, 3]);
}

/// Gives the pods of a problem another order in their scheduler's queue than that of their names.
fn queue(world: &mut World) {
    for (at, pod) in world.problem.pods.iter_mut().enumerate() {
        pod.queued_at = UnixMillis(i64::try_from(100 - at).unwrap());
    }
}

#[test]
fn pods_of_a_spread_are_dealt_to_zones_in_an_order_in_which_they_can_be_bound() {
    let labels = json!({"app": "p"});
    let plain = json!({});
    let running = [(&labels, &plain), (&labels, &plain)];
    for (mut counts, pods) in [([0, 0, 0], 7), ([2, 1, 0], 6), ([2, 2, 0], 5)] {
        let mut world = World::new();
        for (zone, count) in ["z-a", "z-b", "z-c"].iter().zip(counts).filter(|(_, count)| *count > 0) {
            world.node(zone, zone, i64::try_from(count).unwrap(), &running[..count]);
        }
        world.pods("p", pods, &labels, "1", "1Gi", &spread(ZONE, &labels, &json!({})));
        queue(&mut world);
        let plan = world.plan();
        let zoned = plan.new_nodes.iter().flat_map(|node| node.pods.iter().map(|pod| (*pod, &*node.choices[0].zone)));
        let mut zoned: Vec<(usize, &str)> = zoned.collect();
        assert_eq!(zoned.len(), pods);
        zoned.sort_by_key(|(pod, _)| world.problem.pods[*pod].queued_at);
        for (_, zone) in zoned {
            let at = ["z-a", "z-b", "z-c"].iter().position(|known| *known == zone).unwrap();
            counts[at] += 1;
            assert!(counts[at] <= counts.iter().min().unwrap() + 1, "{counts:?} of {pods}");
        }
    }
}

#[test]
fn a_deleting_pod_keeps_its_room_but_no_spread_counts_it() {
    let labels = json!({"app": "p"});
    let mut world = World::new();
    let plain = json!({});
    let running = [(&labels, &plain), (&labels, &plain)];
    world.node("a", "z-a", 2, &running);
    world.node("b", "z-b", 1, &running[..1]);
    world.node("c", "z-c", 1, &running[..1]);
    let leaving = world.problem.nodes[0].pods.iter().map(|pod| PodEntry { deleting: true, ..pod.clone() }).collect();
    world.at(0).pods = leaving;
    world.pods("p", 1, &labels, "1", "1Gi", &spread(ZONE, &labels, &json!({})));
    assert_eq!(zones(&world.plan()).keys().collect::<Vec<_>>(), ["z-a"], "the fullest, had it been counted");
    // On a host: besides the deleting pod, the node has room for one pod.
    for (deleting, placed) in [(false, 0), (true, 1)] {
        let mut world = World::new();
        world.node("a", "z-a", 4, &running[..1]);
        let pods = world.problem.nodes[0].pods.iter().map(|pod| PodEntry { deleting, ..pod.clone() }).collect();
        world.at(0).pods = pods;
        world.pods("p", 1, &labels, "1", "1Gi", &spread(HOST, &labels, &json!({})));
        assert_eq!(world.plan().placements.len(), placed, "deleting: {deleting}");
        // Anti-affinity includes it until it is removed.
        let mut spec = spread(HOST, &labels, &json!({}));
        spec["affinity"] = affinity("podAntiAffinity", HOST, &labels)["affinity"].clone();
        world.problem.pods.clear();
        world.pods("p", 1, &labels, "1", "1Gi", &spec);
        assert_eq!(world.plan().placements.len(), 0, "deleting: {deleting}");
    }
}

#[test]
fn b25_spread_is_limited_by_the_pods_own_node_affinity() {
    let labels = json!({"app": "p"});
    let mut spec = spread(ZONE, &labels, &json!({}));
    let only = one(ZONE, "In", &["z-a", "z-b"]);
    spec["affinity"] = only["affinity"].clone();
    let mut world = World::new();
    world.pods("p", 6, &labels, "1", "1Gi", &spec);
    assert_eq!(zones(&world.plan()).into_values().collect::<Vec<_>>(), [3, 3]);
}

#[test]
fn b26_with_fewer_domains_than_min_domains_the_minimum_is_zero() {
    let labels = json!({"app": "p"});
    let mut spec = spread(ZONE, &labels, &json!({"minDomains": 4}));
    let mut world = World::new();
    world.pods("p", 5, &labels, "1", "1Gi", &spec);
    let plan = world.plan();
    assert_eq!(plan.unschedulable.len(), 2, "one in each of three zones");
    assert!(reason(&plan).contains("topology spread"), "{}", reason(&plan));
    spec = spread(ZONE, &labels, &json!({"minDomains": 3}));
    let mut world = World::new();
    world.pods("p", 5, &labels, "1", "1Gi", &spec);
    assert!(world.plan().unschedulable.is_empty());
}

#[test]
fn b27_schedule_anyway_is_balanced_but_excludes_no_pod() {
    let labels = json!({"app": "p"});
    let soft = json!({"whenUnsatisfiable": "ScheduleAnyway"});
    let mut world = World::new();
    world.pods("p", 3, &labels, "1", "1Gi", &spread(ZONE, &labels, &soft));
    assert_eq!(zones(&world.plan()).len(), 3);
    let mut pinned = spread(ZONE, &labels, &soft);
    pinned["nodeSelector"] = json!({ZONE: "z-a"});
    let mut world = World::new();
    world.pods("p", 5, &labels, "1", "1Gi", &pinned);
    assert!(world.plan().unschedulable.is_empty());
    let mut world = World::new();
    world.pods("p", 12, &labels, "100m", "64Mi", &spread(HOST, &labels, &soft));
    assert_eq!(world.plan().new_nodes.len(), 1, "a host preference does not add nodes");
}

#[test]
fn b28_host_spread_of_skew_one_is_one_pod_a_node() {
    let labels = json!({"app": "p"});
    let mut world = World::new();
    world.pods("p", 5, &labels, "100m", "64Mi", &spread(HOST, &labels, &json!({})));
    assert_eq!(world.plan().new_nodes.len(), 5);
    let mut world = World::new();
    world.pods("p", 5, &labels, "100m", "64Mi", &spread(HOST, &labels, &json!({"maxSkew": 2})));
    assert_eq!(world.plan().new_nodes.len(), 3);
}

/// Number of these pods on each node of the plan, existing nodes first.
fn per_node(plan: &Plan, from: usize, to: usize) -> Vec<usize> {
    let old = plan.placements.iter().map(|p| &p.pods);
    let counts = old.chain(plan.new_nodes.iter().map(|n| &n.pods));
    counts.map(|pods| pods.iter().filter(|pod| (from..to).contains(*pod)).count()).collect()
}

#[test]
fn soft_host_spread_balances_pods_without_more_nodes() {
    let labels = json!({"app": "p"});
    let soft = spread(HOST, &labels, &json!({"whenUnsatisfiable": "ScheduleAnyway"}));
    let mut prefers = affinity("podAntiAffinity", HOST, &labels);
    let term = prefers["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"].take();
    prefers["affinity"]["podAntiAffinity"] = json!({"preferredDuringSchedulingIgnoredDuringExecution": [
        {"weight": 1, "podAffinityTerm": term[0]}]});
    for spec in [soft, prefers] {
        // Small pods that prefer different nodes, and three pods that require different nodes.
        let apart = affinity("podAntiAffinity", HOST, &json!({"app": "q"}));
        let plan_of = |spec: &Value| {
            let mut world = World::new();
            world.pods("p", 6, &labels, "250m", "64Mi", spec);
            world.pods("q", 3, &json!({"app": "q"}), "1", "1Gi", &apart);
            world.plan()
        };
        let plan = plan_of(&spec);
        assert_eq!(per_node(&plan, 0, 6), [2, 2, 2]);
        assert_eq!(plan.cost, plan_of(&json!({})).cost, "it does not raise the cost");

        // Three nodes with room: two pods on each, although one node could hold all.
        let mut world = World::new();
        for name in ["a", "b", "c"] {
            world.node(name, "z-a", 8, &[]);
        }
        world.pods("p", 6, &labels, "1", "1Gi", &spec);
        assert_eq!(per_node(&world.plan(), 0, 6), [2, 2, 2]);

        // A preference does not make a pod wait for a launching node.
        world.at(1).initialized = false;
        assert_eq!(per_node(&world.plan(), 0, 6), [3, 3]);

        // Full nodes swap pods.
        let mut world = World::new();
        for name in ["a", "b"] {
            world.node(name, "z-a", 4, &[]);
        }
        world.pods("p", 4, &labels, "1", "1Gi", &spec);
        world.pods("q", 4, &json!({}), "1", "1Gi", &json!({}));
        assert_eq!(per_node(&world.plan(), 0, 4), [2, 2]);
    }
}

#[test]
fn ignored_preferences_have_no_effect() {
    let labels = json!({"app": "p"});
    let mut world = World::new();
    for name in ["a", "b", "c"] {
        world.node(name, "z-a", 8, &[]);
    }
    world.pods("p", 6, &labels, "1", "1Gi", &spread(HOST, &labels, &json!({"whenUnsatisfiable": "ScheduleAnyway"})));
    world.problem.settings.preference_policy = PreferencePolicy::Ignore;
    assert_eq!(per_node(&world.plan(), 0, 6), [6]);
}

#[test]
fn node_policies_determine_the_domains() {
    let labels = json!({"app": "p"});
    let taint = Taint { key: "k".into(), effect: "NoSchedule".into(), ..Taint::default() };
    // Two zones are allowed; the third has a node that the pods' affinity or tolerations exclude.
    for (tainted, policy, level) in [
        (false, json!({"nodeAffinityPolicy": "Honor"}), true),
        (false, json!({"nodeAffinityPolicy": "Ignore"}), false),
        (true, json!({"nodeTaintsPolicy": "Honor"}), true),
        (true, json!({"nodeTaintsPolicy": "Ignore"}), false),
    ] {
        let two = json!([{"key": ZONE, "operator": "In", "values": ["z-a", "z-b"]}]);
        let mut world = World::with_pools(&[("default", json!({"requirements": two}))]);
        let node = world.node("n", "z-c", 1, &[]);
        node.allocatable.cpu.0 = 0;
        let mut spec = spread(ZONE, &labels, &policy);
        if tainted {
            node.taints = vec![taint.clone()];
        } else {
            spec["affinity"] = one(ZONE, "In", &["z-a", "z-b"])["affinity"].clone();
        }
        world.pods("p", 6, &labels, "1", "1Gi", &spec);
        let plan = world.plan();
        let want = if level { (vec![3, 3], 0) } else { (vec![1, 1], 4) };
        assert_eq!((zones(&plan).into_values().collect::<Vec<_>>(), plan.unschedulable.len()), want, "{policy}");
    }
}

#[test]
fn default_constraints_apply_to_pods_of_a_controller_without_any() {
    let default = |when: &str| {
        let constraint = json!({"maxSkew": 1, "topologyKey": ZONE, "whenUnsatisfiable": when});
        let config = json!({"podTopologySpread": {"defaultConstraints": [constraint]}});
        DefaultSpread::parse(&config.to_string()).unwrap()
    };
    let own = spread(ZONE, &json!({"app": "p"}), &json!({"maxSkew": 5}));
    for (kind, spec, when, level) in [
        ("ReplicaSet", json!({}), "DoNotSchedule", true),
        ("StatefulSet", json!({}), "ScheduleAnyway", true),
        ("Job", json!({}), "DoNotSchedule", false),
        ("ReplicaSet", own, "DoNotSchedule", false),
    ] {
        let mut world = World { interner: Interner::with_default_spread(default(when)), ..World::new() };
        // Four already run in one zone, of another revision.
        for (uid, node, count) in [("old", Some("z-a"), 4), ("new", None, 6)] {
            for at in 0..count {
                let mut made =
                    crate::test_support::pod(&format!("{uid}-{at}"), &json!({"app": "p"}), "1", "1Gi", &spec);
                let owner = json!([{"apiVersion": "x", "kind": kind, "name": "n", "uid": uid, "controller": true}]);
                made.metadata.owner_references = serde_json::from_value(owner).unwrap();
                let entry = world.interner.intern(&made).unwrap();
                match node {
                    Some(zone) => world.node(&format!("n-{at}"), zone, 1, &[]).pods.push(entry),
                    None => world.problem.pods.push(entry),
                }
            }
        }
        let counts: Vec<usize> = zones(&world.plan()).into_values().collect();
        assert_eq!(counts == [2, 2, 2], level, "{kind} {when}: {counts:?}");
    }
}

#[test]
fn default_constraints_apply_to_pods_that_a_service_selects() {
    let constraint = json!({"maxSkew": 1, "topologyKey": ZONE, "whenUnsatisfiable": "DoNotSchedule"});
    let config = json!({"podTopologySpread": {"defaultConstraints": [constraint]}}).to_string();
    let service = |namespace: &str, selector: Value| -> Service {
        serde_json::from_value(
            json!({"metadata": {"name": "s", "namespace": namespace}, "spec": {"selector": selector}}),
        )
        .unwrap()
    };
    for (namespace, selector, level) in [
        ("default", json!({"app": "p"}), true),
        ("default", json!({"app": "q"}), false),
        ("default", json!({}), false),
        ("other", json!({"app": "p"}), false),
    ] {
        let spread = DefaultSpread::parse(&config).unwrap();
        let mut services = Services::new(spread.clone());
        services.apply(&service(namespace, selector.clone()));
        let mut world = World { interner: Interner::with_default_spread(spread), ..World::new() };
        world.problem.services = Arc::new(services);
        for (at, kind) in ["Job", "Job", "Other", "", "", ""].into_iter().enumerate() {
            let mut made = crate::test_support::pod(&format!("p-{at}"), &json!({"app": "p"}), "1", "1Gi", &json!({}));
            let owner = json!([{"apiVersion": "x", "kind": kind, "name": "n", "uid": "u", "controller": true}]);
            made.metadata.owner_references = serde_json::from_value(owner).ok().filter(|_| !kind.is_empty());
            let entry = world.interner.intern(&made).unwrap();
            world.problem.pods.push(entry);
        }
        let counts: Vec<usize> = zones(&world.plan()).into_values().collect();
        assert_eq!(counts == [2, 2, 2], level, "{namespace} {selector}: {counts:?}");
    }
}

#[test]
fn a_zone_occupied_by_other_pods_counts_for_pods_excluded_there() {
    // z-c has no GPU types: with a node there for another pod, kube-scheduler's minimum is the count in z-c.
    let labels = json!({"app": "gpu"});
    let mut spec = spread(ZONE, &labels, &json!({}));
    spec["requests"] = json!({"nvidia.com/gpu": "1"});
    let mut world = World::new();
    world.pods("gpu", 4, &labels, "1", "1Gi", &spec);
    assert_eq!(zones(&world.plan()).into_values().collect::<Vec<_>>(), [2, 2]);
    world.pods("other", 1, &json!({}), "1", "1Gi", &json!({"nodeSelector": {ZONE: "z-c"}}));
    let plan = world.plan();
    assert_eq!(plan.unschedulable.len(), 2, "{:?}", zones(&plan));
    assert!(reason(&plan).contains("topology spread on topology.kubernetes.io/zone"), "{}", reason(&plan));
    // A pod that selects its zones is not affected.
    let mut chosen = spec.clone();
    chosen["affinity"] = one(ZONE, "In", &["z-a", "z-b"])["affinity"].clone();
    let mut world = World::new();
    world.pods("gpu", 4, &labels, "1", "1Gi", &chosen);
    world.pods("other", 1, &json!({}), "1", "1Gi", &json!({"nodeSelector": {ZONE: "z-c"}}));
    assert!(world.plan().unschedulable.is_empty());
}

/// The large pods run on r1 nodes, which the constraint of the others does not count: they do not make up for the pod in z-a.
#[test]
fn pods_that_may_run_where_a_constraint_does_not_count_do_not_raise_its_minimum() {
    let labels = json!({"app": "p"});
    let mut rules = spread(ZONE, &labels, &json!({}));
    rules["affinity"] = one("karpenter.k8s.aws/instance-family", "NotIn", &["r1"])["affinity"].clone();
    let mut world = World::new();
    world.node("n", "z-a", 8, &[(&labels, &json!({}))]).schedulable = false;
    world.node("m", "z-b", 8, &[]).schedulable = false;
    world.pods("large", 2, &labels, "1", "14Gi", &json!({}));
    world.pods("p", 1, &labels, "500m", "512Mi", &rules);
    let plan = world.plan();
    assert_eq!(plan.unschedulable, []);
}
