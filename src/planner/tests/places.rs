//! Rules on several topology keys at once, and host affinity together with rules on other keys.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::output::plan::Plan;
use crate::test_support::{HOST, World, ZONE, affinity, one, reason, spread, zones};

const CAPACITY: &str = "karpenter.sh/capacity-type";

fn both_capacity_types() -> World {
    World::with_pools(&[("default", json!({"capacity-types": ["spot", "on-demand"]}))])
}

/// The constraints of several specifications.
fn merged(specs: &[Value]) -> Value {
    let mut out = json!({});
    for (key, value) in specs.iter().flat_map(|spec| spec.as_object().unwrap()) {
        match (out.get_mut(key), value) {
            (Some(Value::Array(have)), Value::Array(more)) => have.extend(more.clone()),
            (Some(Value::Object(have)), Value::Object(more)) => have.extend(more.clone()),
            _ => out[key] = value.clone(),
        }
    }
    out
}

fn by_capacity_type(plan: &Plan) -> Vec<usize> {
    let mut out: BTreeMap<String, usize> = BTreeMap::new();
    for node in &plan.new_nodes {
        *out.entry(format!("{:?}", node.choices[0].capacity_type)).or_default() += node.pods.len();
    }
    out.into_values().collect()
}

/// Pods whose key starts with a name, by zone of their new node.
fn zones_of(world: &World, plan: &Plan, name: &str) -> BTreeMap<String, usize> {
    let mut out = BTreeMap::new();
    for node in &plan.new_nodes {
        let pods =
            node.pods.iter().filter(|pod| world.problem.pods[**pod].key.starts_with(&format!("default/{name}-")));
        *out.entry(node.choices[0].zone.to_string()).or_default() += pods.count();
    }
    out.retain(|_, count| *count > 0);
    out
}

fn of(expected: &[(&str, usize)]) -> BTreeMap<String, usize> {
    expected.iter().map(|(zone, count)| ((*zone).to_owned(), *count)).collect()
}

#[test]
fn a_spread_over_capacity_types_and_zone_anti_affinity_hold_together() {
    let labels = json!({"app": "p"});
    let spec = merged(&[spread(CAPACITY, &labels, &json!({})), affinity("podAntiAffinity", ZONE, &labels)]);
    let mut world = both_capacity_types();
    world.pods("p", 4, &labels, "1", "1Gi", &spec);
    let plan = world.plan();
    assert_eq!((zones(&plan), plan.unschedulable.len()), (of(&[("z-a", 1), ("z-b", 1), ("z-c", 1)]), 1));
    let mut counts = by_capacity_type(&plan);
    counts.sort_unstable();
    assert_eq!(counts, [1, 2]);
    assert!(reason(&plan).contains("anti-affinity"), "{}", reason(&plan));
}

#[test]
fn two_spreads_are_level_at_once() {
    let labels = json!({"app": "p"});
    let spec = merged(&[spread(CAPACITY, &labels, &json!({})), spread(ZONE, &labels, &json!({}))]);
    let mut world = both_capacity_types();
    world.pods("p", 6, &labels, "1", "1Gi", &spec);
    let plan = world.plan();
    assert_eq!(zones(&plan), of(&[("z-a", 2), ("z-b", 2), ("z-c", 2)]));
    assert_eq!(by_capacity_type(&plan), [3, 3]);
}

#[test]
fn a_pod_moves_so_that_the_last_one_finds_a_place() {
    // On-demand capacity exists in every zone, spot capacity in z-a only: one pod in each zone, and one spot pod in z-a.
    let labels = json!({"app": "p"});
    let zone_a = json!([{"key": ZONE, "operator": "In", "values": ["z-a"]}]);
    let spec = merged(&[spread(CAPACITY, &labels, &json!({})), affinity("podAntiAffinity", ZONE, &labels)]);
    let mut world = World::with_pools(&[
        ("spot", json!({"capacity-types": ["spot"], "requirements": zone_a})),
        ("demand", json!({"requirements": [{"key": ZONE, "operator": "In", "values": ["z-a", "z-b", "z-c"]}]})),
    ]);
    world.pods("p", 3, &labels, "1", "1Gi", &spec);
    let plan = world.plan();
    assert_eq!((zones(&plan).len(), plan.unschedulable.len()), (3, 0), "{:?}", plan.unschedulable);
}

#[test]
fn a_full_zone_does_not_close_a_capacity_type() {
    let labels = json!({"app": "p"});
    let soft = json!({"whenUnsatisfiable": "ScheduleAnyway"});
    let spec = merged(&[spread(CAPACITY, &labels, &json!({})), spread(ZONE, &labels, &soft)]);
    let mut world = World::default();
    for (zone, limit) in [("z-a", "0"), ("z-b", "64"), ("z-c", "64")] {
        let only = json!([{"key": ZONE, "operator": "In", "values": [zone]}]);
        let pool = json!({"capacity-types": ["spot", "on-demand"], "requirements": only, "limits": {"cpu": limit}});
        world.pool(&format!("pool-{zone}"), &pool);
    }
    world.pods("p", 6, &labels, "1", "1Gi", &spec);
    let plan = world.plan();
    assert!(plan.unschedulable.is_empty(), "{:?}", plan.unschedulable);
    assert_eq!(by_capacity_type(&plan), [3, 3]);
}

#[test]
fn pods_refused_first_are_placed_once_others_raise_the_least_count() {
    let labels = json!({"app": "p"});
    let in_zone = |zone: &str| json!({"nodeSelector": {ZONE: zone}});
    let mut world = World::new();
    let everywhere = spread(ZONE, &labels, &json!({"nodeAffinityPolicy": "Ignore"}));
    world.pods("a", 2, &labels, "1", "1Gi", &merged(&[everywhere, in_zone("z-a")]));
    world.pods("b", 1, &labels, "1", "1Gi", &in_zone("z-b"));
    world.pods("c", 1, &labels, "1", "1Gi", &in_zone("z-c"));
    let plan = world.plan();
    assert!(plan.unschedulable.is_empty(), "{:?}", plan.unschedulable);
}

#[test]
fn a_domain_that_other_rules_bar_counts_only_once_it_has_a_node() {
    // A pod in z-c refuses the pods; its node is none of those that they select.
    let labels = json!({"app": "p"});
    let spec = merged(&[
        spread(ZONE, &labels, &json!({})),
        json!({"nodeSelector": {"karpenter.k8s.aws/instance-family": "m1"}}),
    ]);
    let mut world = World::new();
    world.node("n", "z-c", 1, &[(&json!({"app": "other"}), &affinity("podAntiAffinity", ZONE, &labels))]);
    world.pods("p", 4, &labels, "1", "1Gi", &spec);
    let plan = world.plan();
    assert_eq!((zones(&plan), plan.unschedulable.len()), (of(&[("z-a", 2), ("z-b", 2)]), 0));
}

#[test]
fn a_spread_counts_planned_pods_only_on_nodes_that_it_includes() {
    let labels = json!({"app": "p"});
    let arch = |arch: &str| json!({"nodeSelector": {"kubernetes.io/arch": arch}});
    let mut world = World::new();
    let in_zone = json!({"nodeSelector": {ZONE: "z-a", "kubernetes.io/arch": "arm64"}});
    world.pods("arm", 3, &labels, "1", "1Gi", &in_zone);
    world.pods("amd", 3, &labels, "1", "1Gi", &merged(&[spread(ZONE, &labels, &json!({})), arch("amd64")]));
    let plan = world.plan();
    assert!(plan.unschedulable.is_empty());
    assert_eq!(zones_of(&world, &plan, "amd"), of(&[("z-a", 1), ("z-b", 1), ("z-c", 1)]));
}

#[test]
fn a_node_without_the_label_of_another_constraint_is_no_domain() {
    let labels = json!({"app": "p"});
    let two = json!([{"key": ZONE, "operator": "In", "values": ["z-a", "z-b"]}]);
    let pool = json!({"requirements": two, "capacity-types": ["spot", "on-demand"]});
    let spec = merged(&[spread(ZONE, &labels, &json!({})), spread(CAPACITY, &labels, &json!({}))]);
    for (labeled, placed) in [(false, 4), (true, 2)] {
        let mut world = World::with_pools(&[("default", pool.clone())]);
        let node = world.node("n", "z-c", 1, &[]);
        node.allocatable.cpu.0 = 0;
        if labeled {
            node.labels.insert(CAPACITY.to_owned(), "spot".to_owned());
        }
        world.pods("p", 4, &labels, "1", "1Gi", &spec);
        assert_eq!(4 - world.plan().unschedulable.len(), placed, "labeled: {labeled}");
    }
}

#[test]
fn a_target_is_placed_where_its_followers_can_be() {
    let target = json!({"app": "db"});
    let near = affinity("podAffinity", ZONE, &target);
    let mut world = World::new();
    world.pods("db", 2, &target, "1", "1Gi", &json!({}));
    world.pods("here", 1, &json!({"app": "a"}), "1", "1Gi", &merged(&[near.clone(), one(ZONE, "In", &["z-c"])]));
    world.pods("there", 1, &json!({"app": "b"}), "1", "1Gi", &merged(&[near, one(ZONE, "In", &["z-b"])]));
    let plan = world.plan();
    assert!(plan.unschedulable.is_empty(), "{:?}", plan.unschedulable);
    assert_eq!(zones(&plan), of(&[("z-b", 2), ("z-c", 2)]));
}

#[test]
fn host_affinity_chains_share_a_node_whatever_their_names() {
    for names in [["d", "c", "b", "a"], ["a", "b", "c", "d"], ["c", "a", "d", "b"]] {
        let mut world = World::new();
        for (at, name) in names.iter().enumerate() {
            let spec = if at == 0 { json!({}) } else { affinity("podAffinity", HOST, &json!({"app": names[at - 1]})) };
            world.pods(name, 1, &json!({"app": name}), "1", "1Gi", &spec);
        }
        let plan = world.plan();
        assert_eq!((plan.new_nodes.len(), plan.unschedulable.len()), (1, 0), "{names:?}: {:?}", plan.unschedulable);
    }
}

#[test]
fn host_followers_with_rules_on_zones_stay_with_their_leader() {
    let (db, web) = (json!({"app": "db"}), json!({"app": "web"}));
    let mut world = World::new();
    world.pods("db", 1, &db, "1", "1Gi", &json!({}));
    world.pods(
        "web",
        3,
        &web,
        "1",
        "1Gi",
        &merged(&[affinity("podAffinity", HOST, &db), spread(ZONE, &web, &json!({}))]),
    );
    world.pods("ui", 1, &json!({"app": "ui"}), "1", "1Gi", &affinity("podAffinity", ZONE, &web));
    let plan = world.plan();
    assert!(plan.unschedulable.is_empty(), "{:?}", plan.unschedulable);
    assert_eq!(zones(&plan).len(), 1);
}

#[test]
fn a_leader_that_cannot_share_a_node_is_passed_over() {
    // Two leaders: the first needs an Arm node, the follower needs a GPU.
    let lead = json!({"app": "lead"});
    let mut world = World::new();
    world.pods("a-lead", 1, &lead, "1", "1Gi", &json!({"nodeSelector": {"kubernetes.io/arch": "arm64"}}));
    world.pods("b-lead", 1, &lead, "1", "1Gi", &json!({}));
    let mut spec = affinity("podAffinity", HOST, &lead);
    spec["requests"] = json!({"nvidia.com/gpu": "1"});
    world.pods("side", 1, &json!({}), "1", "1Gi", &spec);
    let plan = world.plan();
    assert!(plan.unschedulable.is_empty(), "{:?}", plan.unschedulable);
}

/// A place of the exhaustive search: zone and capacity type.
type Place = (usize, usize);

/// A workload with a spread (maximum skew) or anti-affinity on a key, over its own pods.
#[derive(Clone, Copy, Debug)]
enum Rule {
    Spread(i64),
    Apart,
    Free,
}

#[derive(Clone, Copy, Debug)]
struct Small {
    pods: usize,
    zone: Rule,
    capacity: Rule,
}

/// The most pods of a workload that places with capacity can take, by enumeration of the number of pods in each place.
fn most(small: Small, open: &[Place]) -> usize {
    fn counts(left: usize, places: usize) -> Vec<Vec<usize>> {
        if places == 0 {
            return vec![Vec::new()];
        }
        let extend = |n: usize| {
            counts(left - n, places - 1).into_iter().map(move |mut rest| {
                rest.push(n);
                rest
            })
        };
        (0..=left).flat_map(extend).collect()
    }
    let holds = |rule: Rule, key: fn(&Place) -> usize, count: &[usize]| {
        let mut by_domain: BTreeMap<usize, i64> = open.iter().map(|place| (key(place), 0)).collect();
        for (place, n) in open.iter().zip(count) {
            *by_domain.get_mut(&key(place)).unwrap() += i64::try_from(*n).unwrap();
        }
        let least = by_domain.values().min().copied().unwrap_or(0);
        by_domain.values().all(|n| match rule {
            Rule::Spread(skew) => n - least <= skew,
            Rule::Apart => *n <= 1,
            Rule::Free => true,
        })
    };
    let valid = |count: &&Vec<usize>| {
        holds(small.zone, |(zone, _)| *zone, count) && holds(small.capacity, |(_, capacity)| *capacity, count)
    };
    counts(small.pods, open.len()).iter().filter(valid).map(|count| count.iter().sum()).max().unwrap_or(0)
}

#[test]
fn no_pod_is_refused_that_exhaustive_search_places() {
    let mut state: u64 = 7;
    let mut draw = |below: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from((state >> 33) % below as u64).unwrap()
    };
    let labels = json!({"app": "p"});
    for case in 0..120 {
        let mut rule = || [Rule::Spread(1), Rule::Spread(2), Rule::Apart, Rule::Free][draw(4)];
        let (zone, capacity) = (rule(), rule());
        let small = Small { pods: 1 + draw(6), zone, capacity };
        let mut open: Vec<Place> = (0..3).flat_map(|zone| [(zone, 0), (zone, 1)]).filter(|_| draw(3) > 0).collect();
        open.truncate(5);
        let mut world = World::default();
        for (zone, capacity) in &open {
            let name = ["z-a", "z-b", "z-c"][*zone];
            let requirement = json!([{"key": ZONE, "operator": "In", "values": [name]}]);
            let capacity_type = ["spot", "on-demand"][*capacity];
            let pool = json!({"capacity-types": [capacity_type], "requirements": requirement});
            world.pool(&format!("pool-{zone}-{capacity}"), &pool);
        }
        let constraint = |key: &str, rule: Rule| match rule {
            Rule::Spread(skew) => spread(key, &labels, &json!({"maxSkew": skew})),
            Rule::Apart => {
                json!({"anti": [{"topologyKey": key, "labelSelector": {"matchLabels": labels}}]})
            }
            Rule::Free => json!({}),
        };
        let mut spec = merged(&[constraint(ZONE, small.zone), constraint(CAPACITY, small.capacity)]);
        if let Some(terms) = spec.as_object_mut().unwrap().remove("anti") {
            spec["affinity"] = json!({"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}});
        }
        world.pods("p", small.pods, &labels, "1", "1Gi", &spec);
        let plan = world.plan();
        let placed = small.pods - plan.unschedulable.len();
        assert!(placed >= most(small, &open), "case {case}: {small:?} in {open:?}: {placed} placed");
    }
}

#[test]
fn pods_are_not_each_others_only_company() {
    // Replay, seed 410: followers went to a zone where a spread had put a pod that they select, and stayed when that pod moved on.
    let (one, other) = (json!({"app": "one"}), json!({"app": "other"}));
    let apart = |labels: &Value, key: &str| json!({"topologyKey": key, "labelSelector": {"matchLabels": labels}});
    let anti = |terms: Value| json!({"affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}});
    let mut world = World::new();
    world.node("node-0", "z-a", 2, &[]);
    world.node("node-1", "z-b", 4, &[(&one, &json!({})), (&one, &json!({}))]);
    let spreading = merged(&[spread(ZONE, &one, &json!({})), anti(json!([apart(&one, HOST)]))]);
    world.pods("spread", 9, &one, "500m", "512Mi", &spreading);
    world.pods("near", 5, &other, "100m", "128Mi", &affinity("podAffinity", ZONE, &one));
    let both = merged(&[affinity("podAffinity", ZONE, &one), anti(json!([apart(&other, ZONE), apart(&one, HOST)]))]);
    world.pods("follow", 9, &one, "1500m", "4Gi", &both);
    world.pods("free", 3, &other, "900m", "3Gi", &json!({}));
    let plan = world.plan();
    for (zone, followers) in zones_of(&world, &plan, "follow") {
        let company = zones_of(&world, &plan, "spread").contains_key(&zone) || zone == "z-b";
        assert!(company, "{followers} followers in {zone} have each other only: {:?}", zones(&plan));
    }
}
