//! The choices of a new node: every offering that its NodeClaim names, and only offerings that its pods can use.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde_json::{Value, json};
use stowage_api::Requirement;
use stowage_model::labels;
use stowage_model::offering::CapacityType;

use crate::input::settings::MinValuesPolicy;
use crate::output::plan::PlannedNode;
use crate::test_support::{World, ZONE, expression, node_affinity, reason};

const ARCH: &str = "kubernetes.io/arch";
const FAMILY: &str = "karpenter.k8s.aws/instance-family";

/// Types by zone.
fn offered(node: &PlannedNode) -> BTreeMap<&str, BTreeSet<&str>> {
    let mut out: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for choice in node.choices.iter() {
        out.entry(&choice.zone).or_default().insert(&choice.instance_type.name);
    }
    out
}

fn families(node: &PlannedNode) -> BTreeSet<&str> {
    node.choices.iter().map(|choice| choice.instance_type.labels[FAMILY].as_str()).collect()
}

#[test]
fn choices_that_exclude_each_other_are_not_combined() {
    let term = |arch: &str, zone: &str| json!({"matchExpressions": [expression(ARCH, "In", &[arch]), expression(ZONE, "In", &[zone])]});
    let mut world = World::new();
    let either = node_affinity(&json!([term("arm64", "z-a"), term("amd64", "z-b")]));
    world.pods("p", 1, &json!({}), "1", "1Gi", &either);
    let plan = world.plan();
    let types = ["a1.x16", "a1.x2", "a1.x4", "a1.x8"].into();
    assert_eq!(offered(&plan.new_nodes[0]), [("z-a", types)].into(), "the cheaper of the two, completely");
}

#[test]
fn a_type_too_small_for_the_daemons_of_a_zone_is_no_choice_there() {
    let mut world = World::new();
    world.daemon("1", &json!({"nodeSelector": {ZONE: "z-c"}}));
    world.pods("p", 1, &json!({}), "1500m", "1Gi", &json!({}));
    let plan = world.plan();
    let node = &plan.new_nodes[0];
    assert_eq!(&*node.choices[0].instance_type.name, "a1.x2");
    assert_eq!(
        offered(node).into_keys().collect::<Vec<_>>(),
        ["z-a", "z-b"],
        "the checker verifies each type and zone"
    );
    assert!(offered(node)["z-b"].len() > 10, "every type that holds the pod");
}

/// The maximum price of the node for a pod of one CPU, and the highest price among its choices in percent of the planned price.
fn price_range(capacity_types: &[&str], pool: &Value) -> (Option<i64>, i64) {
    let mut world = World::with_pools(&[("default", pool.clone())]);
    let capacity_type = |r: &&mut Requirement| r.key == labels::CAPACITY_TYPE;
    world.problem.pools[0].requirements.iter_mut().find(capacity_type).unwrap().values =
        capacity_types.iter().map(|name| (*name).to_owned()).collect();
    // In z-b everything costs a tenth more than in the other zones, and memory-optimized types twice as much.
    let mut catalog = (*world.problem.pools[0].catalog).clone();
    for instance_type in &mut catalog.instance_types {
        let mut other = (**instance_type).clone();
        for offering in other.offerings.iter_mut().filter(|offering| &*offering.zone == "z-b") {
            offering.price.0 = offering.price.0 * if other.name.starts_with("r1") { 20 } else { 11 } / 10;
        }
        *instance_type = Arc::new(other);
    }
    world.problem.pools[0].catalog = Arc::new(catalog);
    world.pods("p", 1, &json!({}), "1", "1Gi", &json!({}));
    let node = world.plan().new_nodes.remove(0);
    let highest = node.choices.iter().map(|choice| choice.price.0).max().unwrap();
    (node.max_price.map(|price| price.0 * 100 / node.choices[0].price.0), highest * 100 / node.choices[0].price.0)
}

#[test]
fn spot_choices_cost_at_most_a_fifth_more_than_planned() {
    for capacity_types in [&["spot"][..], &["spot", "on-demand"]] {
        let (max_price, highest) = price_range(capacity_types, &json!({}));
        assert_eq!(max_price, Some(120));
        assert!((110..=120).contains(&highest), "{highest} percent: the other zone is among them");
    }
    // EC2 launches the cheapest on-demand offering that has capacity; minValues demand variety.
    assert!(matches!(price_range(&["on-demand"], &json!({})), (None, 200..)));
    let various = json!({"requirements": [{"key": FAMILY, "operator": "Exists", "minValues": 4}]});
    assert!(matches!(price_range(&["spot"], &various), (None, 200..)));
}

#[test]
fn choices_without_gaps_are_kept_completely() {
    let mut world = World::new();
    world.pods("p", 1, &json!({}), "1", "1Gi", &json!({}));
    // An unavailable offering does not count as a gap.
    let catalog = Arc::make_mut(&mut world.problem.pools[0].catalog);
    for found in catalog.instance_types.iter_mut().filter(|found| &*found.name == "m1.x2") {
        Arc::make_mut(found).offerings.retain(|offering| &*offering.zone != "z-b");
    }
    for found in catalog.instance_types.iter_mut().filter(|found| &*found.name == "c1.x2") {
        Arc::make_mut(found).offerings.iter_mut().for_each(|offering| offering.available = &*offering.zone != "z-a");
    }
    let plan = world.plan();
    assert_eq!(plan.new_nodes[0].choices.len(), 16 * 3 + 2 * 2 - 2, "GPUs are in two zones, two types in fewer");
}

#[test]
fn a_capacity_type_allowed_in_one_zone_only_is_dropped_with_the_zone() {
    let mut world = World::new();
    for r in &mut world.problem.pools[0].requirements {
        r.values.push("spot".into());
    }
    let term = |capacity_type: &str, zone: &str| {
        json!({"matchExpressions": [expression("karpenter.sh/capacity-type", "In", &[capacity_type]),
            expression(ZONE, "In", &[zone])]})
    };
    let either = node_affinity(&json!([term("spot", "z-a"), term("spot", "z-b"), term("on-demand", "z-b")]));
    world.pods("p", 1, &json!({}), "1", "1Gi", &either);
    let plan = world.plan();
    let node = &plan.new_nodes[0];
    assert_eq!(offered(node).into_keys().collect::<Vec<_>>(), ["z-a", "z-b"]);
    assert!(node.choices.iter().all(|choice| choice.capacity_type == CapacityType::Spot), "spot in both is cheaper");
}

fn min_values(families: i64, extra: &Value) -> Value {
    let mut pool = json!({"requirements": [{"key": FAMILY, "operator": "In", "values": ["c1", "m1", "r1"], "minValues": families}]});
    pool.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    pool
}

#[test]
fn min_values_hold_among_the_types_that_the_claim_names() {
    // c1 in any zone, the others in z-c only: all three are choices only together with z-c.
    let term = |families: &[&str], zones: &[&str]| json!({"matchExpressions": [expression(FAMILY, "In", families), expression(ZONE, "In", zones)]});
    let either = node_affinity(&json!([term(&["c1"], &["z-a", "z-b"]), term(&["c1", "m1", "r1"], &["z-c"])]));
    for (least, named) in [(3, &["c1", "m1", "r1"][..]), (1, &["c1"])] {
        let mut world = World::with_pools(&[("default", min_values(least, &json!({})))]);
        world.problem.settings.min_values_policy = MinValuesPolicy::Strict;
        world.pods("p", 1, &json!({}), "1", "1Gi", &either);
        let plan = world.plan();
        assert_eq!(plan.new_nodes.len(), 1, "{least}");
        assert_eq!(families(&plan.new_nodes[0]).into_iter().collect::<Vec<_>>(), named, "{least}");
    }
}

#[test]
fn strict_min_values_hold_within_limits_or_no_node_is_purchased() {
    // A limit of 24Gi admits c1.x4 and m1.x4 (8 and 16Gi) as choices, but not r1.x4 (32Gi).
    let world = |memory: &str, policy| {
        let mut world = World::with_pools(&[("default", min_values(3, &json!({"limits": {"memory": memory}})))]);
        world.problem.settings.min_values_policy = policy;
        world.pods("p", 1, &json!({}), "3", "1Gi", &json!({}));
        world
    };
    let plan = world("24Gi", MinValuesPolicy::Strict).plan();
    assert_eq!((plan.new_nodes.len(), plan.unschedulable.len()), (0, 1));
    assert!(reason(&plan).contains("within its limits, for the pool's minValues"), "{}", reason(&plan));
    let plan = world("24Gi", MinValuesPolicy::BestEffort).plan();
    assert_eq!(families(&plan.new_nodes[0]), ["c1", "m1"].into());
    let plan = world("32Gi", MinValuesPolicy::Strict).plan();
    assert_eq!(families(&plan.new_nodes[0]).len(), 3);

    // Of nodes that compete for the limit, as many are purchased as can keep their choices.
    let labels = json!({"app": "p"});
    let apart = crate::test_support::affinity("podAntiAffinity", crate::test_support::HOST, &labels);
    let mut world = World::with_pools(&[("default", min_values(3, &json!({"limits": {"memory": "40Gi"}})))]);
    world.pods("p", 4, &labels, "1", "1Gi", &apart);
    let plan = world.plan();
    assert!(plan.new_nodes.iter().all(|node| families(node).len() == 3), "x2 of each: 16Gi at most");
    assert_eq!((plan.new_nodes.len(), plan.unschedulable.len()), (2, 2));
}
