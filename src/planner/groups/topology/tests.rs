//! The topology stage alone: the assignment of groups to domains, and the checks of its counts after purchases.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::{Value, json};

use crate::columns::bitset::Bits;
use crate::columns::sets::ColumnSets;
use crate::columns::table::ColumnCache;
use crate::groups::existing_nodes::existing_nodes;
use crate::groups::group::group;
use crate::groups::host_rules::register;
use crate::groups::topology::counts::Topology;
use crate::groups::topology::domains::{Assignment, Domains, Room};
use crate::test_support::{World, ZONE, affinity, spread};

/// The stage's result, and the number of columns.
fn assigned(world: &World, occupied: Domains, room: Room) -> (Topology, Vec<Assignment>, usize) {
    let mut column_sets = ColumnSets::new(&world.problem, &ColumnCache::default());
    let (mut selectors, counters) = register(&world.problem);
    let groups = group(&mut column_sets, &mut selectors, &counters);
    let (nodes, running) = existing_nodes(&column_sets, &mut selectors, &counters, &groups);
    let mut topology = Topology::new(&column_sets, &mut selectors, &groups, occupied, room);
    let parts = topology.assign(&mut column_sets, &mut selectors, &groups, (&nodes, &running));
    (topology, parts, column_sets.columns.len())
}

/// Pods by domain of the first key; `none` for pods pinned to no domain, `refused` for pods without a domain.
fn by_domain(topology: &Topology, parts: &[Assignment]) -> BTreeMap<String, usize> {
    let mut out = BTreeMap::new();
    for part in parts {
        let pin = part.pins.first().map(|(key, domain)| topology.keys[*key].values[*domain].to_string());
        let domain = if part.refused.is_some() { "refused".to_owned() } else { pin.unwrap_or_else(|| "none".into()) };
        *out.entry(domain).or_default() += part.count;
    }
    out
}

fn counts(world: &World) -> BTreeMap<String, usize> {
    let (topology, parts, _) = assigned(world, Domains::default(), Room::default());
    by_domain(&topology, &parts)
}

fn of(expected: &[(&str, usize)]) -> BTreeMap<String, usize> {
    expected.iter().map(|(domain, count)| ((*domain).to_owned(), *count)).collect()
}

fn labels() -> Value {
    json!({"app": "p"})
}

fn world(count: usize, spec: &Value) -> World {
    let mut world = World::new();
    world.pods("p", count, &labels(), "1", "1Gi", spec);
    world
}

/// A hard spread over zones, of pods that request a GPU, which only two zones offer.
fn gpu_spread() -> Value {
    let mut spec = spread(ZONE, &labels(), &json!({}));
    spec["requests"] = json!({"nvidia.com/gpu": "1"});
    spec
}

#[test]
fn a_group_without_rules_is_pinned_to_no_domain() {
    assert_eq!(counts(&world(5, &json!({}))), of(&[("none", 5)]));
}

#[test]
fn a_hard_spread_is_level_within_its_skew() {
    let mut level: Vec<usize> = counts(&world(7, &spread(ZONE, &labels(), &json!({})))).into_values().collect();
    level.sort_unstable();
    assert_eq!(level, [2, 2, 3]);
}

#[test]
fn running_pods_count_for_the_spread() {
    let mut world = world(4, &spread(ZONE, &labels(), &json!({})));
    world.node("n", "z-a", 2, &[(&labels(), &json!({})), (&labels(), &json!({}))]);
    assert_eq!(counts(&world), of(&[("z-b", 2), ("z-c", 2)]));
}

#[test]
fn required_affinity_keeps_a_group_in_one_domain() {
    let counts = counts(&world(5, &affinity("podAffinity", ZONE, &labels())));
    assert_eq!(counts.into_values().collect::<Vec<_>>(), [5]);
}

#[test]
fn required_anti_affinity_refuses_pods_beyond_the_number_of_domains() {
    let world = world(4, &affinity("podAntiAffinity", ZONE, &labels()));
    assert_eq!(counts(&world), of(&[("refused", 1), ("z-a", 1), ("z-b", 1), ("z-c", 1)]));
    let (_, parts, _) = assigned(&world, Domains::default(), Room::default());
    let reason = parts.iter().find_map(|part| part.refused.as_deref()).unwrap();
    assert!(reason.contains("anti-affinity"), "{reason}");
}

#[test]
fn a_domain_is_assigned_no_more_pods_than_it_has_room_for() {
    let world = world(6, &spread(ZONE, &labels(), &json!({})));
    let room = Room::from([((0, vec![(0, 0)]), 1)]);
    let (topology, parts, _) = assigned(&world, Domains::default(), room);
    assert_eq!(by_domain(&topology, &parts), of(&[("refused", 1), ("z-a", 1), ("z-b", 2), ("z-c", 2)]));
}

#[test]
fn a_domain_without_a_column_counts_once_a_node_occupies_it() {
    let world = world(4, &gpu_spread());
    let (topology, parts, columns) = assigned(&world, Domains::default(), Room::default());
    assert_eq!(by_domain(&topology, &parts), of(&[("z-a", 2), ("z-b", 2)]));
    assert_eq!(topology.overlooked(&Bits::empty(columns)), Domains::default(), "nothing is purchased in z-c");
    let occupied = topology.overlooked(&Bits::full(columns));
    assert_eq!(occupied, Domains::from([(Arc::from(ZONE), Arc::from("z-c"))]));
    let (topology, parts, _) = assigned(&world, occupied, Room::default());
    assert_eq!(by_domain(&topology, &parts), of(&[("refused", 2), ("z-a", 1), ("z-b", 1)]));
}

#[test]
fn pods_left_unplaced_in_one_domain_make_the_others_exceed_the_skew() {
    let (topology, parts, _) =
        assigned(&world(6, &spread(ZONE, &labels(), &json!({}))), Domains::default(), Room::default());
    assert_eq!(by_domain(&topology, &parts), of(&[("z-a", 2), ("z-b", 2), ("z-c", 2)]));
    let mut planned = topology.planned();
    assert_eq!(topology.overflow(&planned, &|_, _, _| 2), None);
    topology.unplan(&mut planned, 0, 0, 0, 2);
    let placed = |_: usize, _: usize, domain: usize| if domain == 0 { 0 } else { 2 };
    assert_eq!(topology.overflow(&planned, &placed), Some((0, 0, 1, 1)), "one pod too many in z-b");
}

/// The pods that the group has in each zone at least.
fn least(world: &World) -> BTreeMap<String, usize> {
    let (topology, mut parts, _) = assigned(world, Domains::default(), Room::default());
    for part in &mut parts {
        part.count = part.least;
    }
    by_domain(&topology, &parts)
}

#[test]
fn each_zone_has_the_pods_that_the_others_have_no_room_for_at_least() {
    for (pods, skew, each) in [(6, 1, 2), (7, 1, 2), (8, 1, 2), (9, 1, 3), (9, 2, 2), (2, 1, 0), (9, 9, 0)] {
        let found = least(&world(pods, &spread(ZONE, &labels(), &json!({"maxSkew": skew}))));
        assert!(found.values().all(|least| *least == each), "{pods} pods with a skew of {skew}: {found:?}");
    }
}

#[test]
fn pods_that_other_rules_concern_have_no_least_number_in_a_zone() {
    let mut other = world(6, &spread(ZONE, &labels(), &json!({})));
    other.pods("other", 3, &labels(), "2", "1Gi", &json!({}));
    assert!(least(&other).values().all(|least| *least == 0), "pods of others are counted too");
    let soft = world(6, &spread(ZONE, &labels(), &json!({"whenUnsatisfiable": "ScheduleAnyway"})));
    assert!(least(&soft).values().all(|least| *least == 0), "a preference requires nothing");
}
