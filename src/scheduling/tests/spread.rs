//! Behaviours 23 to 28: topology spread.

use serde_json::json;

use super::{HOST, World, ZONE, one, reason, spread, zones};

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
