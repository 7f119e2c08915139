//! Offerings: prices, availability, reservations, partitions, risk premiums, tenancy.

use std::sync::Arc;

use serde_json::{Value, json};
use stowage_model::offering::{CapacityType, Offering};
use stowage_model::units::MicroUsd;

use crate::output::plan::Plan;
use crate::test_support::{World, ZONE, types};

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
fn an_unavailable_offering_is_not_purchased() {
    let mut world = World::new();
    let mut catalog = (*world.problem.pools[0].catalog).clone();
    for instance_type in &mut catalog.instance_types {
        if instance_type.name.starts_with("a1") {
            let mut gone = (**instance_type).clone();
            gone.offerings.iter_mut().for_each(|o| o.available = false);
            *instance_type = Arc::new(gone);
        }
    }
    world.problem.pools[0].catalog = Arc::new(catalog);
    world.pods("p", 1, &json!({}), "1", "1Gi", &json!({}));
    assert_eq!(types(&world.plan()), ["c1.x2"]);
}

#[test]
fn reserved_capacity_is_purchased_before_spot_and_spot_before_on_demand() {
    let mut gone: Vec<CapacityType> = Vec::new();
    for want in [CapacityType::Reserved, CapacityType::Spot, CapacityType::OnDemand] {
        let mut world = World::new();
        let pool = &mut world.problem.pools[0];
        pool.requirements.clear();
        let mut catalog = (*pool.catalog).clone();
        for instance_type in &mut catalog.instance_types {
            let mut changed = (**instance_type).clone();
            // A reservation is already paid for: its price is almost zero.
            let reserved: Vec<Offering> = changed
                .offerings
                .iter()
                .filter(|o| o.capacity_type == CapacityType::OnDemand)
                .map(|o| Offering {
                    capacity_type: CapacityType::Reserved,
                    price: MicroUsd(o.price.0 / 10_000),
                    ..o.clone()
                })
                .collect();
            changed.offerings.extend(reserved);
            changed.offerings.retain(|o| !gone.contains(&o.capacity_type));
            *instance_type = Arc::new(changed);
        }
        pool.catalog = Arc::new(catalog);
        world.pods("p", 2, &json!({}), "1", "1Gi", &json!({}));
        assert_eq!(world.plan().new_nodes[0].choices[0].capacity_type, want);
        gone.push(want);
    }
}

/// A world with `count` reserved instances of `a1.x4` in z-b.
fn reserved(pools: &[(&str, Value)], count: i64) -> World {
    let mut world = World::with_pools(pools);
    for pool in &mut world.problem.pools {
        pool.requirements.retain(|r| r.key != "karpenter.sh/capacity-type");
        let mut catalog = (*pool.catalog).clone();
        for instance_type in catalog.instance_types.iter_mut().filter(|t| &*t.name == "a1.x4") {
            let mut changed = (**instance_type).clone();
            let mut offering = changed.offerings.iter().find(|o| &*o.zone == "z-b").unwrap().clone();
            offering.capacity_type = CapacityType::Reserved;
            (offering.price, offering.left) = (MicroUsd(0), Some(count));
            changed.offerings.push(offering);
            *instance_type = Arc::new(changed);
        }
        pool.catalog = Arc::new(catalog);
    }
    world
}

#[test]
fn a_reservation_is_filled_first_and_never_beyond_its_count() {
    let count_of = |plan: &Plan| {
        let of = |n: &&crate::output::plan::PlannedNode| n.choices[0].capacity_type == CapacityType::Reserved;
        plan.new_nodes.iter().filter(of).count()
    };
    for (pods, count, used, others) in
        [(4, 3, 1, false), (5, 3, 2, false), (12, 3, 3, false), (40, 3, 3, true), (4, 0, 0, true)]
    {
        let mut world = reserved(&[("default", json!({}))], count);
        world.pods("p", pods, &json!({}), "1", "1Gi", &json!({}));
        let plan = world.plan();
        assert_eq!((count_of(&plan), plan.new_nodes.len() > used), (used, others), "{pods} pods, {count} reserved");
        assert!(plan.unschedulable.is_empty());
    }
    // Two pools share the reservation; a pod that may not use it does not.
    let mut world =
        reserved(&[("one", json!({"labels": {"team": "1"}})), ("two", json!({"labels": {"team": "2"}}))], 1);
    for team in ["1", "2"] {
        world.pods(team, 4, &json!({}), "1", "1Gi", &json!({"nodeSelector": {"team": team}}));
    }
    world.pods("elsewhere", 4, &json!({}), "1", "1Gi", &json!({"nodeSelector": {ZONE: "z-a"}}));
    let plan = world.plan();
    assert_eq!((count_of(&plan), plan.unschedulable.len()), (1, 0));
    // NodePool limits include reserved capacity.
    let mut world = reserved(&[("default", json!({"limits": {"cpu": "4"}}))], 3);
    world.pods("p", 12, &json!({}), "1", "1Gi", &json!({}));
    let plan = world.plan();
    assert_eq!((count_of(&plan), plan.unschedulable.len()), (1, 8));
}

/// A world with the reservations `cr-1` and `cr-2` of `a1.x4` in z-b, with these counts, and unreserved capacity.
fn two_reserved(counts: [i64; 2], pool: Value) -> World {
    let mut world = reserved(&[("default", pool)], 0);
    let pool = &mut world.problem.pools[0];
    let mut catalog = (*pool.catalog).clone();
    let found = catalog.instance_types.iter_mut().find(|t| &*t.name == "a1.x4").unwrap();
    let mut changed = (**found).clone();
    let template = changed.offerings.pop().unwrap();
    for (id, count) in ["cr-1", "cr-2"].into_iter().zip(counts) {
        let labels = Arc::new([("karpenter.k8s.aws/capacity-reservation-id".to_owned(), id.to_owned())].into());
        changed.offerings.push(Offering { left: Some(count), labels, ..template.clone() });
    }
    *found = Arc::new(changed);
    pool.catalog = Arc::new(catalog);
    world
}

#[test]
fn reservations_of_one_type_and_zone_are_counted_separately() {
    let used =
        |plan: &Plan| plan.new_nodes.iter().filter(|n| n.choices[0].capacity_type == CapacityType::Reserved).count();
    for (counts, want) in [([1, 2], 3), ([2, 1], 3), ([0, 2], 2), ([1, 0], 1)] {
        let mut world = two_reserved(counts, json!({}));
        world.pods("p", 40, &json!({}), "1", "1Gi", &json!({}));
        assert_eq!(used(&world.plan()), want, "{counts:?}");
    }
    let mut world = two_reserved([1, 2], json!({}));
    let only = json!({"nodeSelector": {"karpenter.k8s.aws/capacity-reservation-id": "cr-1"}});
    world.pods("p", 8, &json!({}), "1", "1Gi", &only);
    let plan = world.plan();
    assert_eq!((used(&plan), plan.unschedulable.len()), (1, 4), "the other reservation is not selected");
    let requirement = &plan.new_nodes[0].requirements[0];
    assert_eq!(
        (&*requirement.key, &requirement.values[..]),
        ("karpenter.k8s.aws/capacity-reservation-id", &["cr-1".to_owned()][..])
    );
}

#[test]
fn a_node_with_unreserved_choices_requires_no_reservation() {
    let mut world = two_reserved([1, 1], json!({}));
    world.pods("p", 4, &json!({}), "1", "1Gi", &json!({}));
    let plan = world.plan();
    assert_eq!(plan.new_nodes[0].choices[0].capacity_type, CapacityType::Reserved);
    assert!(plan.new_nodes[0].choices.len() > 1 && plan.new_nodes[0].requirements.is_empty());
}

#[test]
fn pods_are_spread_over_partitions_and_each_node_requires_one() {
    const PARTITION: &str = "karpenter.k8s.aws/placement-group-partition";
    let world = || {
        let mut world = World::with_pools(&[("default", json!({}))]);
        let mut catalog = (*world.problem.pools[0].catalog).clone();
        for instance_type in &mut catalog.instance_types {
            let mut copy = (**instance_type).clone();
            let labeled = |offering: &Offering, partition: &str| Offering {
                labels: Arc::new([(PARTITION.to_owned(), partition.to_owned())].into()),
                ..offering.clone()
            };
            copy.offerings =
                copy.offerings.iter().flat_map(|o| ["1", "2", "3"].map(|partition| labeled(o, partition))).collect();
            *instance_type = Arc::new(copy);
        }
        world.problem.pools[0].catalog = Arc::new(catalog);
        world
    };
    let mut spread_out = world();
    let labels = json!({"app": "p"});
    spread_out.pods("p", 6, &labels, "1", "1Gi", &crate::test_support::spread(PARTITION, &labels, &json!({})));
    let plan = spread_out.plan();
    let mut pods: std::collections::BTreeMap<&str, usize> = std::collections::BTreeMap::new();
    for node in &plan.new_nodes {
        let [demand] = &node.requirements[..] else { panic!("{:?}", node.requirements) };
        assert_eq!((&*demand.key, &*demand.operator, demand.values.len()), (PARTITION, "In", 1));
        *pods.entry(&demand.values[0]).or_default() += node.pods.len();
    }
    assert_eq!(pods, [("1", 2), ("2", 2), ("3", 2)].into());
    let mut careless = world();
    careless.pods("p", 6, &labels, "1", "1Gi", &json!({}));
    assert!(careless.plan().new_nodes.iter().all(|node| node.requirements.is_empty()), "EC2 selects the partition");
}

/// Applies `change` to each offering of the first pool.
fn changed(pools: &[(&str, Value)], change: impl Fn(&mut Offering)) -> World {
    let mut world = World::with_pools(pools);
    let mut catalog = (*world.problem.pools[0].catalog).clone();
    for instance_type in &mut catalog.instance_types {
        let mut copy = (**instance_type).clone();
        copy.offerings.iter_mut().for_each(&change);
        *instance_type = Arc::new(copy);
    }
    world.problem.pools[0].catalog = Arc::new(catalog);
    world
}

#[test]
fn pools_and_pods_can_require_labels_of_offerings() {
    const ID: &str = "topology.k8s.aws/zone-id";
    let with_ids = |offering: &mut Offering| {
        let id = format!("id-{}", offering.zone);
        offering.labels = Arc::new([(ID.to_owned(), id)].into());
    };
    let in_b = json!([{"key": ID, "operator": "In", "values": ["id-z-b"]}]);
    for (pool, pod) in [
        (json!({"requirements": in_b}), json!({})),
        (json!({}), json!({"nodeSelector": {ID: "id-z-b"}})),
        (json!({}), json!({"nodeSelector": {ID: "id-z-b", ZONE: "z-b"}})),
    ] {
        let mut world = changed(&[("default", pool.clone())], with_ids);
        world.pods("p", 1, &json!({}), "1", "1Gi", &pod);
        let plan = world.plan();
        assert!(plan.new_nodes[0].choices.iter().all(|choice| &*choice.zone == "z-b"), "{pool} {pod}");
    }
    let mut world = changed(&[("default", json!({"requirements": in_b}))], with_ids);
    world.pods("p", 1, &json!({}), "1", "1Gi", &json!({"nodeSelector": {ZONE: "z-a"}}));
    assert_eq!(world.plan().unschedulable.len(), 1, "the pool requires another zone");
    let mut world = changed(&[("default", json!({"requirements": in_b}))], |_| {});
    world.pods("p", 1, &json!({}), "1", "1Gi", &json!({}));
    assert_eq!(world.plan().unschedulable.len(), 1, "no offering has an id");
}

#[test]
fn a_risk_premium_changes_the_offering_but_not_the_cost() {
    let mut plain = World::new();
    plain.pods("p", 1, &json!({}), "1", "1Gi", &json!({}));
    let plain = plain.plan();
    let first = plain.new_nodes[0].choices[0].zone.clone();
    let risky = |all: bool| {
        let zone = first.clone();
        let mut world = changed(&[("default", json!({}))], move |offering| {
            if all || offering.zone == zone {
                offering.risk_permille = 300;
            }
        });
        world.pods("p", 1, &json!({}), "1", "1Gi", &json!({}));
        world.plan()
    };
    let elsewhere = risky(false);
    assert_ne!(elsewhere.new_nodes[0].choices[0].zone, first);
    assert_eq!(elsewhere.cost, plain.cost);
    let everywhere = risky(true);
    assert_eq!(everywhere.new_nodes[0].choices[0].price, plain.new_nodes[0].choices[0].price);
    assert_eq!(everywhere.cost, plain.cost);
}

#[test]
fn instances_are_shared_unless_a_pool_or_pod_requires_dedicated() {
    const TENANCY: &str = "karpenter.k8s.aws/instance-tenancy";
    let only = |value: &str| json!({"requirements": [{"key": TENANCY, "operator": "In", "values": [value]}]});
    let wants = |value: &str| json!({"nodeSelector": {TENANCY: value}});
    for (pool, pod, expected) in [
        (json!({}), json!({}), Some(None)),
        (json!({}), wants("default"), Some(None)),
        (json!({}), wants("dedicated"), Some(Some("dedicated"))),
        (only("dedicated"), json!({}), Some(Some("dedicated"))),
        (only("dedicated"), wants("dedicated"), Some(Some("dedicated"))),
        (only("dedicated"), wants("default"), None),
        (only("default"), json!({}), Some(None)),
        (only("default"), wants("dedicated"), None),
        (json!({"labels": {TENANCY: "dedicated"}}), wants("dedicated"), Some(None)),
        (json!({"labels": {TENANCY: "dedicated"}}), wants("default"), None),
    ] {
        let mut world = World::with_pools(&[("default", pool.clone())]);
        let mut catalog = (*world.problem.pools[0].catalog).clone();
        for instance_type in &mut catalog.instance_types {
            let mut copy = (**instance_type).clone();
            copy.labels.insert(TENANCY.to_owned(), "default".to_owned());
            *instance_type = Arc::new(copy);
        }
        world.problem.pools[0].catalog = Arc::new(catalog);
        world.pods("p", 1, &json!({}), "1", "1Gi", &pod);
        let plan = world.plan();
        let found = plan.new_nodes.first().map(|node| {
            let pinned = node.requirements.iter().find(|requirement| requirement.key == TENANCY);
            pinned.map(|requirement| requirement.values[0].as_str())
        });
        assert_eq!(found, expected, "{pool} {pod}");
    }
}
