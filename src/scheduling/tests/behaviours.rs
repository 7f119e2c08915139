//! The numbered behaviours of the Karpenter core reference, section 14, as far as the pure core decides them. Those about
//! parsing (8, 10 to 13, 33, 34 in part) are beside the code that parses.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use k8s_openapi::api::core::v1::Taint;
use serde_json::{Value, json};

use super::{HOST, World, ZONE, affinity, spread};
use crate::scheduling::offering::MicroUsd;
use crate::scheduling::plan::Plan;
use crate::scheduling::problem::{MinValuesPolicy, PreferencePolicy};
use crate::scheduling::resources::Resources;

fn zones(plan: &Plan) -> BTreeMap<String, usize> {
    let mut out = BTreeMap::new();
    for node in &plan.new_nodes {
        *out.entry(node.choices[0].zone.to_string()).or_default() += node.pods.len();
    }
    out
}

fn types(plan: &Plan) -> Vec<String> {
    plan.new_nodes.iter().map(|n| n.choices[0].instance_type.name.to_string()).collect()
}

fn reason(plan: &Plan) -> &str {
    &plan.unschedulable.first().expect("something is unschedulable").reason
}

fn node_affinity(terms: &Value) -> Value {
    json!({"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}})
}

fn expression(key: &str, operator: &str, values: &[&str]) -> Value {
    json!({"key": key, "operator": operator, "values": values})
}

fn one(key: &str, operator: &str, values: &[&str]) -> Value {
    node_affinity(&json!([{"matchExpressions": [expression(key, operator, values)]}]))
}

/// A world with one default pool and one pod of 1 CPU with this spec.
fn lone(spec: &Value) -> World {
    let mut world = World::new();
    world.pods("p", 1, &json!({"app": "p"}), "1", "1Gi", spec);
    world
}

#[test]
fn nothing_to_place_costs_nothing() {
    let plan = World::new().plan();
    assert_eq!((plan.cost, plan.lower_bound, plan.new_nodes.len()), (MicroUsd(0), Some(MicroUsd(0)), 0));
}

#[test]
fn a_lone_pod_gets_the_cheapest_node_that_holds_it() {
    let plan = lone(&json!({})).plan();
    assert_eq!(types(&plan), ["a1.x2"]);
    let choices = &plan.new_nodes[0].choices;
    assert!(choices.windows(2).all(|w| w[0].price <= w[1].price), "cheapest first");
    assert!(choices.iter().any(|c| &*c.zone == "z-c") && choices.iter().any(|c| &*c.instance_type.name == "r1.x16"));
    assert!(plan.lower_bound.unwrap() <= plan.cost);
}

#[test]
fn b01_in_and_not_in_that_leave_nothing_name_the_key() {
    let both = json!([
        expression("kubernetes.io/arch", "In", &["arm64"]),
        expression("kubernetes.io/arch", "NotIn", &["arm64"])
    ]);
    let plan = lone(&node_affinity(&json!([{"matchExpressions": both}]))).plan();
    assert!(reason(&plan).contains("kubernetes.io/arch") && reason(&plan).contains("contradict"), "{}", reason(&plan));
}

#[test]
fn b02_gt_and_lt_bound_both_sides() {
    let key = "karpenter.k8s.aws/instance-cpu";
    let both = json!([expression(key, "Gt", &["2"]), expression(key, "Lt", &["8"])]);
    let plan = lone(&node_affinity(&json!([{"matchExpressions": both}]))).plan();
    assert_eq!(types(&plan), ["a1.x4"]);
    assert!(plan.new_nodes[0].choices.iter().all(|c| c.instance_type.capacity.cpu_milli == 4000));
}

#[test]
fn b03_exists_on_a_custom_label_matches_only_pools_that_define_it() {
    let spec = one("team", "Exists", &[]);
    assert!(reason(&lone(&spec).plan()).contains("team"));
    for define in [
        json!({"labels": {"team": "a"}, "weight": 1}),
        json!({"requirements": [{"key": "team", "operator": "Exists"}]}),
        json!({"requirements": [{"key": "team", "operator": "In", "values": ["a", "b"]}]}),
    ] {
        let mut world = World::with_pools(&[("plain", json!({"weight": 50})), ("teams", define)]);
        world.pods("p", 1, &json!({}), "1", "1Gi", &spec);
        let plan = world.plan();
        assert_eq!(plan.new_nodes[0].pool, 1);
    }
}

#[test]
fn a_custom_label_left_open_is_pinned_to_what_the_pods_ask() {
    let open = json!({"requirements": [{"key": "team", "operator": "In", "values": ["a", "b"]}]});
    let mut world = World::with_pools(&[("teams", open)]);
    for team in ["a", "b"] {
        world.pods(&format!("p{team}"), 2, &json!({}), "100m", "64Mi", &json!({"nodeSelector": {"team": team}}));
    }
    let plan = world.plan();
    let pinned: BTreeSet<String> = plan.new_nodes.iter().map(|n| n.requirements[0].values[0].clone()).collect();
    assert_eq!(pinned, ["a".to_owned(), "b".to_owned()].into());
}

#[test]
fn b04_does_not_exist_on_a_well_known_label_excludes_offerings_that_have_it() {
    let plan = lone(&one("karpenter.k8s.aws/instance-gpu-count", "DoesNotExist", &[])).plan();
    assert!(plan.new_nodes[0].choices.iter().all(|c| !c.instance_type.name.starts_with("g1")));
    let plan = lone(&one("karpenter.k8s.aws/instance-gpu-count", "Exists", &[])).plan();
    assert_eq!(types(&plan), ["g1.x4"]);
}

#[test]
fn b05_not_in_on_an_undefined_label_is_satisfied() {
    assert!(lone(&one("team", "NotIn", &["a"])).plan().unschedulable.is_empty());
}

#[test]
fn b06_node_selector_terms_are_alternatives() {
    let terms = json!([
        {"matchExpressions": [expression("kubernetes.io/arch", "In", &["riscv"])]},
        {"matchExpressions": [expression(ZONE, "In", &["z-b"])]}]);
    let plan = lone(&node_affinity(&terms)).plan();
    assert_eq!(zones(&plan).keys().collect::<Vec<_>>(), ["z-b"]);
}

#[test]
fn b07_min_values_keeps_that_many_families_among_the_choices() {
    let pool = |least: i64| {
        json!({"requirements": [{"key": "karpenter.k8s.aws/instance-family", "operator": "In",
        "values": ["c1", "m1", "r1"], "minValues": least}]})
    };
    let families = |plan: &Plan| {
        let names = plan.new_nodes[0]
            .choices
            .iter()
            .map(|c| c.instance_type.labels["karpenter.k8s.aws/instance-family"].clone());
        names.collect::<BTreeSet<_>>().len()
    };
    let mut world = World::with_pools(&[("default", pool(3))]);
    world.pods("p", 6, &json!({}), "1", "1Gi", &json!({}));
    let plan = world.plan();
    assert!(plan.unschedulable.is_empty() && plan.new_nodes.iter().all(|_| families(&plan) == 3));
    // 100Gi fits r1.x16 alone: strict refuses, best effort doesn't.
    let mut world = World::with_pools(&[("default", pool(3))]);
    world.pods("big", 1, &json!({}), "1", "100Gi", &json!({}));
    assert!(reason(&world.plan()).contains("minValues"));
    world.problem.settings.min_values_policy = MinValuesPolicy::BestEffort;
    assert_eq!(types(&world.plan()), ["r1.x16"]);
}

#[test]
fn b08_a_legacy_label_in_a_selector_is_its_ga_twin() {
    let plan = lone(
        &json!({"nodeSelector": {"failure-domain.beta.kubernetes.io/zone": "z-c", "beta.kubernetes.io/arch": "amd64"}}),
    )
    .plan();
    assert_eq!((zones(&plan).len(), &*types(&plan)[0]), (1, "c1.x2"));
}

#[test]
fn b09_a_pool_label_matches_the_pods_selector() {
    let mut world = World::with_pools(&[("plain", json!({})), ("labelled", json!({"labels": {"team": "a"}}))]);
    world.pods("p", 1, &json!({}), "1", "1Gi", &json!({"nodeSelector": {"team": "a"}}));
    assert_eq!(world.plan().new_nodes[0].pool, 1);
}

#[test]
fn b14_a_gpu_pod_gets_a_gpu_type_and_the_reason_names_the_gpu_where_there_is_none() {
    let gpu = json!({"requests": {"nvidia.com/gpu": "1"}});
    assert_eq!(types(&lone(&gpu).plan()), ["g1.x4"]);
    let plan = lone(&json!({"requests": {"nvidia.com/gpu": "1"}, "nodeSelector": {ZONE: "z-c"}})).plan();
    let text = reason(&plan);
    assert!(
        text.contains("needs 1 nvidia.com/gpu") && text.contains("NodePool default") && text.contains("z-c"),
        "{text}"
    );
}

#[test]
fn b15_pod_slots_bind_before_cpu() {
    let mut world = World::new();
    world.pods("p", 32, &json!({}), "1m", "1Mi", &json!({}));
    let plan = world.plan();
    let slots: i64 = plan.new_nodes.iter().map(|n| n.choices[0].instance_type.allocatable.pods).sum();
    assert_eq!(slots, 32, "{:?}", types(&plan));
}

#[test]
fn b16_pods_without_requests_still_count() {
    let mut world = World::new();
    world.pods("p", 17, &json!({}), "0", "0", &json!({}));
    let plan = world.plan();
    assert!(
        plan.unschedulable.is_empty()
            && plan.new_nodes.iter().all(|n| n.pods.len() <= 16 || types(&plan)[0] != "a1.x2")
    );
}

#[test]
fn b17_daemon_overhead_shrinks_room_only_where_the_daemon_runs() {
    let mut world = World::new();
    world.pods("p", 1, &json!({}), "2", "1Gi", &json!({}));
    assert_eq!(types(&world.plan()), ["a1.x2"]);
    world.daemon("500m", &json!({"nodeSelector": {"kubernetes.io/arch": "arm64"}}));
    let plan = world.plan();
    assert_eq!(types(&plan), ["c1.x2"], "the daemon runs on Arm only");
    world.daemon("500m", &json!({}));
    let plan = world.plan();
    assert_eq!(types(&plan), ["a1.x4"]);
    assert_eq!(plan.new_nodes[0].requests.cpu_milli, 3000, "pods and daemons");
}

#[test]
fn b18_two_pods_on_one_host_port_never_share_a_node() {
    let mut world = World::new();
    let port = |ip: &str| json!({"ports": [{"containerPort": 80, "hostPort": 80, "hostIP": ip}]});
    world.pods("any", 2, &json!({}), "100m", "64Mi", &port(""));
    world.pods("one", 1, &json!({}), "100m", "64Mi", &port("10.0.0.1"));
    world.pods("two", 1, &json!({}), "100m", "64Mi", &port("10.0.0.2"));
    assert_eq!(world.plan().new_nodes.len(), 3, "two wildcards alone, the two addresses together");
    world.daemon("0", &port(""));
    assert_eq!(world.plan().unschedulable.len(), 4, "a daemon holds the port everywhere");
}

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
fn b26_min_domains_unmet_makes_the_minimum_zero() {
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
fn b27_schedule_anyway_levels_but_never_keeps_a_pod_out() {
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
    assert_eq!(world.plan().new_nodes.len(), 1, "a preference about hosts doesn't multiply nodes");
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

#[test]
fn b29_zone_anti_affinity_takes_a_zone_each_and_no_more() {
    let labels = json!({"app": "p"});
    let mut world = World::new();
    world.pods("p", 4, &labels, "100m", "64Mi", &affinity("podAntiAffinity", ZONE, &labels));
    let plan = world.plan();
    assert_eq!((plan.new_nodes.len(), zones(&plan).len(), plan.unschedulable.len()), (3, 3, 1));
    assert!(reason(&plan).contains("anti-affinity on topology.kubernetes.io/zone"), "{}", reason(&plan));
}

#[test]
fn b30_a_running_pods_anti_affinity_keeps_a_newcomer_away() {
    let (guard, web) = (json!({"app": "guard"}), json!({"app": "web"}));
    for (key, elsewhere) in [(HOST, 1), (ZONE, 1)] {
        let mut world = World::new();
        world.node("n", "z-a", 8, &[(&guard, &affinity("podAntiAffinity", key, &web))]);
        world.pods("p", 1, &web, "100m", "64Mi", &json!({}));
        let plan = world.plan();
        assert_eq!(plan.new_nodes.len(), elsewhere, "{key}");
        assert!(key == HOST || zones(&plan).keys().all(|z| z != "z-a"));
    }
}

#[test]
fn b31_affinity_to_a_running_pod_takes_its_zone() {
    let db = json!({"app": "db"});
    let mut world = World::new();
    world.node("n", "z-b", 1, &[(&db, &json!({}))]);
    world.pods("p", 3, &json!({"app": "p"}), "1", "1Gi", &affinity("podAffinity", ZONE, &db));
    assert_eq!(zones(&world.plan()).keys().collect::<Vec<_>>(), ["z-b"]);
}

#[test]
fn affinity_to_pods_of_the_same_plan_follows_them() {
    let db = json!({"app": "db"});
    let mut world = World::new();
    world.pods("p", 3, &json!({"app": "p"}), "1", "1Gi", &affinity("podAffinity", ZONE, &db));
    assert!(reason(&world.plan()).contains("affinity"));
    world.pods("db", 1, &db, "1", "1Gi", &json!({"nodeSelector": {ZONE: "z-c"}}));
    assert_eq!(zones(&world.plan()).keys().collect::<Vec<_>>(), ["z-c"]);
}

#[test]
fn b32_self_affinity_on_zone_keeps_all_in_one_zone_and_on_host_on_one_node() {
    let labels = json!({"app": "p"});
    let mut world = World::new();
    world.pods("p", 20, &labels, "1", "1Gi", &affinity("podAffinity", ZONE, &labels));
    let plan = world.plan();
    assert_eq!((zones(&plan).len(), plan.unschedulable.len()), (1, 0));
    let mut world = World::new();
    world.pods("p", 7, &labels, "1", "1Gi", &affinity("podAffinity", HOST, &labels));
    let plan = world.plan();
    assert_eq!((plan.new_nodes.len(), &*types(&plan)[0]), (1, "a1.x8"));
    let mut world = World::new();
    world.pods("p", 20, &labels, "1", "1Gi", &affinity("podAffinity", HOST, &labels));
    let plan = world.plan();
    assert_eq!((plan.new_nodes.len(), plan.unschedulable.len()), (1, 4), "no node holds more than 16");
}

#[test]
fn host_affinity_to_planned_pods_shares_their_nodes() {
    let db = json!({"app": "db"});
    let mut world = World::new();
    world.pods("db", 2, &db, "1", "1Gi", &affinity("podAntiAffinity", HOST, &db));
    world.pods("p", 20, &json!({"app": "p"}), "1", "1Gi", &affinity("podAffinity", HOST, &db));
    let plan = world.plan();
    assert_eq!((plan.new_nodes.len(), plan.unschedulable.len()), (2, 0));
}

#[test]
fn b33_namespaces_and_their_selector_are_respected() {
    let web = json!({"app": "web"});
    let away = |term: &Value| {
        let mut term = term.clone();
        term.as_object_mut().unwrap().extend([
            ("topologyKey".to_owned(), json!(HOST)),
            ("labelSelector".to_owned(), json!({"matchLabels": web})),
        ]);
        json!({"affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}})
    };
    for (term, nodes) in [
        (json!({}), 1),
        (json!({"namespaces": ["other"]}), 2),
        (json!({"namespaceSelector": {"matchLabels": {"tier": "x"}}}), 2),
        (json!({"namespaceSelector": {"matchLabels": {"tier": "y"}}}), 1),
        (json!({"namespaceSelector": {}}), 2),
    ] {
        let mut world = World::new();
        world.problem.namespaces.insert("other".into(), [("tier".to_owned(), "x".to_owned())].into());
        world.pods("p", 1, &json!({}), "100m", "64Mi", &away(&term));
        world.pods("web", 1, &web, "100m", "64Mi", &json!({"namespace": "other"}));
        assert_eq!(world.plan().new_nodes.len(), nodes, "{term}");
    }
}

#[test]
fn b34_match_label_keys_spread_each_revision_alone() {
    let mut world = World::new();
    for revision in ["v1", "v2"] {
        let labels = json!({"app": "p", "pod-template-hash": revision});
        let spec = spread(ZONE, &json!({"app": "p"}), &json!({"matchLabelKeys": ["pod-template-hash"]}));
        world.pods(revision, 3, &labels, "1", "1Gi", &spec);
    }
    let plan = world.plan();
    assert_eq!(zones(&plan).into_values().collect::<Vec<_>>(), [2, 2, 2]);
}

#[test]
fn b35_the_heavier_pool_comes_first_even_when_dearer_and_equal_weights_compete_by_price() {
    let dear = json!({"requirements": [{"key": "karpenter.k8s.aws/instance-family", "operator": "In", "values": ["r1"]}], "weight": 10});
    let mut world = World::with_pools(&[("cheap", json!({})), ("dear", dear.clone())]);
    world.pods("p", 3, &json!({}), "1", "1Gi", &json!({}));
    assert!(world.plan().new_nodes.iter().all(|n| n.pool == 1));
    let mut level = dear;
    level.as_object_mut().unwrap().remove("weight");
    let mut world = World::with_pools(&[("cheap", json!({})), ("dear", level)]);
    world.pods("p", 3, &json!({}), "1", "1Gi", &json!({}));
    assert!(world.plan().new_nodes.iter().all(|n| n.pool == 0));
}

#[test]
fn b36_a_limit_that_is_reached_sends_pods_to_the_next_pool_and_is_named_when_there_is_none() {
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
fn b37_limits_count_what_is_in_flight_and_nodes_are_counted_one_by_one() {
    let mut world = World::with_pools(&[("default", json!({"limits": {"cpu": "6"}}))]);
    world.problem.pools[0].usage = Resources { cpu_milli: 4000, ..Resources::default() };
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
fn whatever_choice_is_launched_the_limits_hold() {
    let mut world = World::with_pools(&[("default", json!({"limits": {"cpu": "10"}}))]);
    world.pods("p", 4, &json!({"app": "p"}), "1", "1Gi", &affinity("podAntiAffinity", HOST, &json!({"app": "p"})));
    let plan = world.plan();
    assert!(plan.unschedulable.is_empty());
    let most: i64 = plan
        .new_nodes
        .iter()
        .map(|n| n.choices.iter().map(|c| c.instance_type.capacity.cpu_milli).max().unwrap())
        .sum();
    assert!(most <= 10_000, "{most}");
}

#[test]
fn higher_priority_comes_first_where_limits_do_not_allow_all() {
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
fn preferred_node_affinity_is_met_where_it_can_be_and_dropped_where_not() {
    let prefer = |zone: &str| {
        json!({"affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [
        {"weight": 1, "preference": {"matchExpressions": [expression(ZONE, "In", &["z-b"])]}},
        {"weight": 9, "preference": {"matchExpressions": [expression(ZONE, "In", &[zone])]}}]}}})
    };
    assert!(zones(&lone(&prefer("z-c")).plan()).contains_key("z-c"));
    assert!(zones(&lone(&prefer("nowhere")).plan()).contains_key("z-b"));
    let mut world = lone(&prefer("z-c"));
    world.problem.settings.preference_policy = PreferencePolicy::Ignore;
    assert!(zones(&world.plan()).contains_key("z-a"));
}

#[test]
fn b40_room_on_a_node_in_flight_buys_nothing() {
    let mut world = World::new();
    world.node("n", "z-a", 8, &[]).initialized = false;
    world.pods("p", 8, &json!({}), "1", "1Gi", &json!({}));
    let plan = world.plan();
    assert_eq!((plan.new_nodes.len(), plan.placements[0].pods.len(), plan.cost), (0, 8, MicroUsd(0)));
    world.pods("q", 1, &json!({}), "1", "1Gi", &json!({}));
    assert_eq!(world.plan().new_nodes.len(), 1);
}

#[test]
fn initialized_nodes_come_before_others_and_then_names_decide() {
    let mut world = World::new();
    world.node("a", "z-a", 8, &[]).initialized = false;
    world.node("c", "z-a", 8, &[]);
    world.node("b", "z-a", 8, &[]);
    world.pods("p", 1, &json!({}), "1", "1Gi", &json!({}));
    assert_eq!(world.plan().placements[0].node, 2);
}

#[test]
fn an_existing_node_keeps_room_for_its_daemons_and_its_taints() {
    let mut world = World::new();
    world.node("n", "z-a", 2, &[]).daemon_reserve = Resources { cpu_milli: 1500, ..Resources::default() };
    world.pods("p", 1, &json!({}), "1", "1Gi", &json!({}));
    assert!(world.plan().placements.is_empty());
    let mut world = World::new();
    let taint = Taint { key: "k".into(), effect: "NoSchedule".into(), ..Taint::default() };
    world.node("n", "z-a", 2, &[]).taints = vec![taint];
    world.pods("p", 1, &json!({}), "1", "1Gi", &json!({}));
    assert!(world.plan().placements.is_empty());
}

#[test]
fn b41_a_node_that_takes_no_pods_is_not_used_but_its_pods_count() {
    let labels = json!({"app": "p"});
    let mut world = World::new();
    world.node("n", "z-a", 8, &[(&labels, &json!({}))]).schedulable = false;
    world.pods("p", 2, &labels, "1", "1Gi", &spread(ZONE, &labels, &json!({})));
    let plan = world.plan();
    assert!(plan.placements.is_empty());
    assert_eq!(zones(&plan).into_keys().collect::<Vec<_>>(), ["z-b", "z-c"]);
}

#[test]
fn the_capacity_type_with_the_lowest_price_wins() {
    let mut world = World::with_pools(&[]);
    world.pool("default", &json!({}));
    for r in &mut world.problem.pools[0].requirements {
        r.values.push("spot".into());
    }
    world.pods("p", 1, &json!({}), "1", "1Gi", &json!({}));
    assert_eq!(world.plan().new_nodes[0].choices[0].capacity_type.as_str(), "spot");
}

#[test]
fn an_offering_without_capacity_is_not_bought() {
    let mut world = World::new();
    let mut catalogue = (*world.problem.pools[0].catalogue).clone();
    for instance_type in &mut catalogue.instance_types {
        if instance_type.name.starts_with("a1") {
            let mut gone = (**instance_type).clone();
            gone.offerings.iter_mut().for_each(|o| o.available = false);
            *instance_type = Arc::new(gone);
        }
    }
    world.problem.pools[0].catalogue = Arc::new(catalogue);
    world.pods("p", 1, &json!({}), "1", "1Gi", &json!({}));
    assert_eq!(types(&world.plan()), ["c1.x2"]);
}

#[test]
fn a_pod_larger_than_any_type_is_told_the_largest() {
    let mut world = World::new();
    world.pods("p", 1, &json!({}), "500", "2Ti", &json!({}));
    let text = reason(&world.plan()).to_owned();
    assert!(text.contains("no instance type holds cpu 500, memory 2Ti (largest: "), "{text}");
}

#[test]
fn a_requirement_that_conflicts_with_the_pool_is_named_with_both_sides() {
    let amd = json!({"requirements": [{"key": "kubernetes.io/arch", "operator": "In", "values": ["amd64"]}]});
    let mut world = World::with_pools(&[("default", amd)]);
    world.pods("p", 1, &json!({}), "1", "1Gi", &json!({"nodeSelector": {"kubernetes.io/arch": "arm64"}}));
    let plan = world.plan();
    let want = "NodePool default: requirement kubernetes.io/arch In [arm64] conflicts with the pool's In [amd64]";
    assert!(reason(&plan).contains(want), "{}", reason(&plan));
}

#[test]
fn without_pools_the_reason_says_so() {
    let mut world = World::default();
    world.pods("p", 1, &json!({}), "1", "1Gi", &json!({}));
    assert!(reason(&world.plan()).contains("no NodePool is ready"));
}

#[test]
fn a_pod_that_cannot_be_held_stands_in_nobodys_way() {
    for (what, cpu, extra) in [
        ("too large", "500", json!({})),
        ("a resource that nobody sells", "1", json!({"example.com/rare": "1"})),
        ("a GPU in a pool without", "1", json!({"nvidia.com/gpu": "1"})),
    ] {
        let no_gpu = json!({"requirements": [
            {"key": "karpenter.k8s.aws/instance-gpu-count", "operator": "DoesNotExist"}]});
        let mut world = World::with_pools(&[("default", no_gpu)]);
        world.pods("small", 5, &json!({}), "1", "1Gi", &json!({}));
        world.pods("odd", 2, &json!({}), cpu, "1Gi", &json!({"requests": extra}));
        world.pods("middle", 3, &json!({}), "2", "1Gi", &json!({}));
        let plan = world.plan();
        let left_out: Vec<usize> = plan.unschedulable.iter().map(|u| u.pod).collect();
        assert_eq!(left_out, [5, 6], "{what}: {:?}", plan.unschedulable);
        assert!(plan.lower_bound.is_none_or(|bound| bound <= plan.cost), "{what}");
    }
}

#[test]
fn what_limits_leave_room_for_is_still_bought() {
    let mut world = World::with_pools(&[("default", json!({"limits": {"cpu": "4"}}))]);
    world.pods("large", 1, &json!({}), "8", "1Gi", &json!({}));
    world.pods("small", 3, &json!({}), "1", "1Gi", &json!({}));
    let plan = world.plan();
    assert_eq!(plan.unschedulable.iter().map(|u| u.pod).collect::<Vec<_>>(), [0], "{:?}", plan.unschedulable);
}
