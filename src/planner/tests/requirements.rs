//! Behaviors 1 to 10 of Karpenter core reference 14: requirements on labels.

use std::collections::BTreeSet;

use serde_json::json;

use crate::input::settings::{MinValuesPolicy, PreferencePolicy};
use crate::output::plan::PlannedNode;
use crate::test_support::{World, ZONE, expression, lone, node_affinity, one, read_pool, reason, types, zones};

#[test]
fn b01_contradictory_in_and_not_in_name_the_key() {
    let both = json!([
        expression("kubernetes.io/arch", "In", &["arm64"]),
        expression("kubernetes.io/arch", "NotIn", &["arm64"])
    ]);
    let plan = lone(&node_affinity(&json!([{"matchExpressions": both}]))).plan();
    assert!(reason(&plan).contains("kubernetes.io/arch") && reason(&plan).contains("contradict"), "{}", reason(&plan));
}

#[test]
fn b02_gt_and_lt_are_lower_and_upper_bounds() {
    let key = "karpenter.k8s.aws/instance-cpu";
    let both = json!([expression(key, "Gt", &["2"]), expression(key, "Lt", &["8"])]);
    let plan = lone(&node_affinity(&json!([{"matchExpressions": both}]))).plan();
    assert_eq!(types(&plan), ["a1.x4"]);
    assert!(plan.new_nodes[0].choices.iter().all(|c| c.instance_type.capacity.cpu.0 == 4000));
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
fn an_open_custom_label_is_pinned_to_the_value_that_pods_require() {
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
    let families = |node: &PlannedNode| {
        let names = node.choices.iter().map(|c| c.instance_type.labels["karpenter.k8s.aws/instance-family"].clone());
        names.collect::<BTreeSet<_>>().len()
    };
    let mut world = World::with_pools(&[("default", pool(3))]);
    world.pods("p", 6, &json!({}), "1", "1Gi", &json!({}));
    let plan = world.plan();
    assert!(plan.unschedulable.is_empty() && plan.new_nodes.iter().all(|node| families(node) == 3));
    // 100Gi fits r1.x16 only: the pod is unschedulable with Strict, not with BestEffort.
    let mut world = World::with_pools(&[("default", pool(3))]);
    world.pods("big", 1, &json!({}), "1", "100Gi", &json!({}));
    assert!(reason(&world.plan()).contains("minValues"));
    world.problem.settings.min_values_policy = MinValuesPolicy::BestEffort;
    assert_eq!(types(&world.plan()), ["r1.x16"]);
}

#[test]
fn b08_a_legacy_label_in_a_selector_is_normalized() {
    let plan = lone(
        &json!({"nodeSelector": {"failure-domain.beta.kubernetes.io/zone": "z-c", "beta.kubernetes.io/arch": "amd64"}}),
    )
    .plan();
    assert_eq!((zones(&plan).len(), &*types(&plan)[0]), (1, "c1.x2"));
}

#[test]
fn b09_a_pool_label_matches_the_pods_selector() {
    let mut world = World::with_pools(&[("plain", json!({})), ("labeled", json!({"labels": {"team": "a"}}))]);
    world.pods("p", 1, &json!({}), "1", "1Gi", &json!({"nodeSelector": {"team": "a"}}));
    assert_eq!(world.plan().new_nodes[0].pool, 1);
}

#[test]
fn preferred_node_affinity_is_satisfied_where_possible() {
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
fn a_requirement_that_conflicts_with_the_pool_is_named_with_both_sides() {
    let amd = json!({"requirements": [{"key": "kubernetes.io/arch", "operator": "In", "values": ["amd64"]}]});
    let mut world = World::with_pools(&[("default", amd)]);
    world.pods("p", 1, &json!({}), "1", "1Gi", &json!({"nodeSelector": {"kubernetes.io/arch": "arm64"}}));
    let plan = world.plan();
    let want = "NodePool default: requirement kubernetes.io/arch In [arm64] conflicts with the pool's In [amd64]";
    assert!(reason(&plan).contains(want), "{}", reason(&plan));
}

#[test]
fn b10_a_restricted_label_on_a_pool_is_rejected() {
    for (labels, requirements, key) in [
        (json!({"kubernetes.io/hostname": "h"}), json!([]), "kubernetes.io/hostname"),
        (json!({"karpenter.sh/nodepool": "other"}), json!([]), "karpenter.sh/nodepool"),
        (json!({"sub.karpenter.sh/x": "y"}), json!([]), "sub.karpenter.sh/x"),
        (json!({}), json!([{"key": "karpenter.sh/initialized", "operator": "Exists"}]), "karpenter.sh/initialized"),
    ] {
        let error = read_pool("p", &json!({"labels": labels, "requirements": requirements})).unwrap_err().to_string();
        assert!(error.contains("NodePool p") && error.contains(key) && error.contains("restricted"), "{error}");
    }
    for allowed in [json!({"team": "a"}), json!({"node.kubernetes.io/custom": "a"})] {
        assert!(read_pool("p", &json!({"labels": allowed})).is_ok());
    }
    let spot =
        json!({"requirements": [{"key": "karpenter.sh/capacity-type", "operator": "In", "values": ["on-demand"]}]});
    assert!(read_pool("p", &spot).is_ok(), "the only key of the domain that a pool may set");
}

#[test]
fn numeric_operators_of_a_pool_bound_the_purchased_types() {
    for (operator, value, want) in
        [("Gt", "4", "a1.x8"), ("Gte", "4", "a1.x4"), ("Lt", "4", "a1.x2"), ("Lte", "2", "a1.x2"), ("Gte", "17", "")]
    {
        let bound = json!([{"key": "karpenter.k8s.aws/instance-cpu", "operator": operator, "values": [value]}]);
        let mut world = World::with_pools(&[("default", json!({"requirements": bound}))]);
        world.pods("p", 1, &json!({}), "1", "1Gi", &json!({}));
        let plan = world.plan();
        assert_eq!(types(&plan).first().map_or("", String::as_str), want, "{operator} {value}");
    }
}

#[test]
fn match_fields_match_existing_nodes_only() {
    let on = |operator: &str| {
        node_affinity(&json!([{"matchFields": [{"key": "metadata.name", "operator": operator, "values": ["n"]}]}]))
    };
    let mut world = World::new();
    world.node("m", "z-a", 8, &[]);
    world.node("n", "z-a", 8, &[]);
    world.pods("p", 1, &json!({}), "1", "1Gi", &on("In"));
    assert_eq!(world.plan().placements[0].node, 1);
    world.problem.nodes.pop();
    assert!(reason(&world.plan()).contains("metadata.name In [n]"), "{}", reason(&world.plan()));
    world.problem.pods.clear();
    world.pods("p", 1, &json!({}), "1", "1Gi", &on("NotIn"));
    assert_eq!(world.plan().placements[0].node, 0);
}
