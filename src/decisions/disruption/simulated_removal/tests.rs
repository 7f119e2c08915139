use std::time::Duration;

use serde_json::{Value, json};
use stowage_model::labels;
use stowage_test_objects as objects;

use super::*;
use crate::decisions::provisioning::supply_quarantine::Source;
use crate::state::node_state::BOOT_TIMEOUT;
use crate::test_support::small_cluster::{NOW, SmallCluster};

fn with_limit(cpu: &str) -> Value {
    json!({"spec": {"limits": {"cpu": cpu}}})
}

/// The NodePool p with this patch, and its node `old` of this offering with the pod n/a.
fn cluster(pool: &Value, offering: &str, pod: &Value) -> SmallCluster {
    let mut cluster = SmallCluster::new(&[("p", pool.clone()), ("q", with_limit("0"))]);
    cluster.add_node("old", "p", offering);
    cluster.add_pod("a", Some("old"), "1", pod);
    cluster
}

/// A claim of a NodePool whose node does not start up.
fn add_late_node(cluster: &mut SmallCluster, pool: &str) {
    let meta = json!({"creationTimestamp": (NOW - BOOT_TIMEOUT).rfc3339(), "labels": {(labels::NODE_POOL): pool}});
    cluster
        .state
        .apply_claim(objects::claim("late", &json!({"metadata": meta, "status": objects::launched("late", &[])})));
}

#[test]
fn an_outcome_names_the_nodes_that_should_stay_and_why() {
    type Change = fn(&mut SmallCluster);
    let none: Change = |_| {};
    let on_demand_only = json!({"spec": {"template": {"spec": {"requirements":
        [{"key": labels::CAPACITY_TYPE, "operator": "In", "values": ["on-demand"]}]}}}});
    let free = json!({});
    let claims_a_volume = json!({"spec": {"nodeSelector": {"disk": "local"}}});
    let container = json!({"name": "c", "resources": {"requests": {"cpu": "12Q"}}});
    let invalid = json!({"spec": {"containers": [container]}});
    for (case, pool, offering, pod, change, expected) in [
        ("on a new node", &free, "large/on-demand", &free, none, None),
        ("no new node, no room", &with_limit("0"), "large/on-demand", &free, none, Some("no_place")),
        ("no node as selected", &free, "large/on-demand", &claims_a_volume, none, Some("no_place")),
        ("spot to spot", &free, "large/spot", &free, none, Some("spot_to_spot")),
        ("spot to on-demand", &on_demand_only, "large/spot", &free, none, None),
        (
            "spot to a node with room",
            &free,
            "large/spot",
            &free,
            |cluster| cluster.add_node("b", "p", "small/spot"),
            None,
        ),
        ("a spec that is not understood", &free, "large/on-demand", &invalid, none, Some("invalid_pod")),
        (
            "a late node of the NodePool",
            &free,
            "large/on-demand",
            &free,
            |cluster| add_late_node(cluster, "p"),
            Some("late_node"),
        ),
        (
            "a late node of another NodePool",
            &free,
            "large/on-demand",
            &free,
            |cluster| add_late_node(cluster, "q"),
            None,
        ),
        (
            "f5: on a node that is not ours",
            &with_limit("0"),
            "large/on-demand",
            &free,
            |cluster| cluster.add_node_of_others("b", "small"),
            None,
        ),
        (
            "on a node whose NodeClaim is gone",
            &with_limit("0"),
            "large/on-demand",
            &free,
            |cluster| {
                cluster.add_node("b", "p", "small/on-demand");
                cluster.state.delete_claim("b");
            },
            Some("no_place"),
        ),
        (
            "on a node that is not initialized",
            &with_limit("0"),
            "large/on-demand",
            &free,
            |cluster| {
                cluster.add_node("b", "p", "small/on-demand");
                let mut node = serde_json::to_value(&*cluster.state.nodes["b"]).unwrap();
                let young = json!({"creationTimestamp": NOW.rfc3339(), "labels": {(labels::INITIALIZED): null}});
                json_patch::merge(&mut node, &json!({"metadata": young}));
                cluster.state.apply_node(serde_json::from_value(node).unwrap());
            },
            Some("target_not_initialized"),
        ),
    ] {
        let mut cluster = cluster(pool, offering, pod);
        change(&mut cluster);
        let outcome = cluster.simulate(&["old"]);
        let obstacle = outcome.obstacles.get("old");
        assert_eq!(obstacle.map(Obstacle::kind), expected, "{case}");
        let names_pod = ["no_place", "target_not_initialized", "invalid_pod"];
        assert_eq!(obstacle.and_then(Obstacle::pod), expected.filter(|kind| names_pod.contains(kind)).map(|_| "n/a"));
        let concerns_replacement = expected.is_some_and(|kind| !["spot_to_spot", "invalid_pod"].contains(&kind));
        assert_eq!(outcome.is_complete(), !concerns_replacement, "{case}");
        assert_eq!(outcome.obstacle_to_replacement("old"), obstacle.filter(|_| concerns_replacement), "{case}");
    }
}

#[test]
fn a_new_node_without_room_for_a_daemon_set_that_is_left_out_replaces_none() {
    let (mut quarantine, without) = (SupplyQuarantine::default(), BTreeSet::from(["old".to_owned()]));
    quarantine.add(Source::Node("n".into()), None, false, NOW);
    for (left_out, room, expected) in
        [(false, false, None), (true, false, Some(Obstacle::DaemonLeftOut)), (true, true, None)]
    {
        if left_out {
            quarantine.add(Source::DaemonSet("n/d".into()), None, false, NOW);
        }
        let mut cluster = cluster(&json!({}), "large/on-demand", &json!({}));
        if room {
            cluster.add_node("b", "p", "small/on-demand");
        }
        let mut simulator = cluster.simulator();
        simulator.leave_out_supply(&quarantine, |_| None, NOW);
        let outcome = simulator.simulate(&without, Effort::Normal);
        assert_eq!(outcome.obstacles.get("old"), expected.as_ref(), "{left_out} {room}");
    }
}

#[test]
fn f18_only_nodes_whose_pods_need_what_is_refused_stay() {
    let mut cluster = cluster(&json!({}), "small/on-demand", &json!({}));
    // `old` and `spot` need a new node; `light` has room on `b`, whose pod does not move.
    for (name, offering) in [("spot", "small/spot"), ("light", "small/spot"), ("b", "small/on-demand")] {
        cluster.add_node(name, "p", offering);
    }
    cluster.add_pod("on-spot", Some("spot"), "1900m", &json!({}));
    cluster.add_pod("on-light", Some("light"), "500m", &json!({}));
    cluster.add_pod("stays", Some("b"), "1500m", &json!({}));
    let outcome = cluster.simulate(&["old", "spot", "light"]);
    assert_eq!(outcome.obstacles.into_iter().collect::<Vec<_>>(), [("spot".to_owned(), Obstacle::SpotToSpot)]);
}

#[test]
fn f18_pods_that_need_a_new_node_whatever_is_removed_are_no_price_of_a_removal() {
    let mut cluster = cluster(&json!({}), "small/on-demand", &json!({}));
    cluster.add_node("b", "p", "small/on-demand");
    for (name, cpu) in [("waits", "8"), ("fits nowhere", "9")] {
        cluster.add_pod(name, None, cpu, &json!({}));
    }
    let (mut simulator, without) = (cluster.simulator_before_plan(), BTreeSet::from(["old".to_owned()]));
    assert_eq!(simulator.waiting_pods(), 2);
    let purchases = [("p".into(), MicroUsd(160_000))].into();
    let obstacles = [("old".to_owned(), Obstacle::NeededByWaitingPod("n/fits nowhere".into()))].into();
    let found = |simulator: &Simulator| {
        let SimulatedRemoval { purchases, obstacles, .. } = simulator.simulate(&without, Effort::Normal);
        (purchases, obstacles)
    };
    assert_eq!(found(&simulator), (purchases, obstacles));
    simulator.leave_out_unplaced(Effort::Normal);
    assert_eq!(simulator.waiting_pods(), 0);
    assert_eq!(found(&simulator), Default::default());
}

#[test]
fn an_outcome_says_what_is_free_and_whose_pods_need_the_new_nodes() {
    let mut cluster = cluster(&json!({}), "large/on-demand", &json!({}));
    for (name, offering) in [("other", "large/on-demand"), ("b", "small/on-demand"), ("cordoned", "small/on-demand")] {
        cluster.add_node(name, "p", offering);
    }
    let mut cordoned = (*cluster.state.nodes["cordoned"]).clone();
    cordoned.spec.as_mut().unwrap().unschedulable = Some(true);
    cluster.state.apply_node(cordoned);
    // One core is free on `b`: for one of the pods on `old`. A new node of 8 cores holds the other three.
    for (name, node, cpu) in [("c", "old", "3"), ("d", "other", "3"), ("e", "old", "1"), ("f", "b", "1")] {
        cluster.add_pod(name, Some(node), cpu, &json!({}));
    }
    let outcome = cluster.simulate(&["old", "other"]);
    let price = outcome.purchases["p"].0;
    let room =
        |(node, free): &(Option<Arc<NodeRef>>, [i64; 2])| (node.as_ref().and_then(|node| node.claim.clone()), free[0]);
    let rooms: Vec<(Option<String>, i64)> = outcome.rooms.iter().map(room).collect();
    assert_eq!(rooms, [(Some("b".to_owned()), 0), (None, 1_000)]);
    assert_eq!(outcome.load_of_new, [7_000, 0]);
    // No pod requests memory.
    let bought: Vec<(&str, i64)> = outcome.bought.iter().map(|(claim, cost)| (&**claim, cost.0)).collect();
    let share = |cores: i64| price * cores / 7;
    assert_eq!(bought, [("old", share(3) + share(1)), ("other", share(3))]);
}

#[test]
fn a_pod_that_waits_keeps_its_place() {
    for (case, pool, cpu, price, obstacle) in [
        ("both fit on the other node", json!({}), "1", 0, None),
        ("one needs a new node", json!({}), "2", 40_000, None),
        ("none can be bought", with_limit("0"), "2", 0, Some("no_place")),
    ] {
        for unattempted in [false, true] {
            let mut cluster = cluster(&pool, "large/on-demand", &json!({}));
            cluster.add_node("b", "p", "small/on-demand");
            if unattempted {
                let container = json!({"name": "c", "resources": {"requests": {"cpu": cpu}}});
                let pod = objects::pod("waits", &json!({"spec": {"containers": [container]}}));
                cluster.state.apply_pod(&pod, NOW - Duration::from_secs(29));
            } else {
                cluster.add_pod("waits", None, cpu, &json!({}));
            }
            let outcome = cluster.simulate(&["old"]);
            assert_eq!(outcome.purchases.values().map(|price| price.0).sum::<i64>(), price, "{case}, {unattempted}");
            assert_eq!(outcome.obstacles.get("old").map(Obstacle::kind), obstacle, "{case}, {unattempted}");
        }
    }
}

#[test]
fn nodes_to_avoid_take_pods_that_have_no_other_place() {
    let without = BTreeSet::from(["old".to_owned()]);
    for (case, pool, avoided, other, expected) in [
        ("nothing to avoid", json!({}), false, false, Some("next")),
        ("a new node", json!({}), true, false, None),
        ("another node", json!({}), true, true, Some("other")),
        ("no new node", with_limit("0"), true, false, Some("next")),
        ("no new node, another node", with_limit("0"), true, true, Some("other")),
    ] {
        let mut cluster = cluster(&pool, "small/on-demand", &json!({}));
        cluster.add_node("next", "p", "small/on-demand");
        if other {
            cluster.add_node("other", "p", "small/on-demand");
        }
        let mut simulator = cluster.simulator();
        if avoided {
            simulator.avoid(&["next".to_owned(), "old".to_owned()].into());
        }
        let (outcome, moves) = simulator.moves(&without, Effort::Normal);
        assert!(outcome.is_complete(), "{case}");
        let targets: Vec<&String> = moves.iter().flat_map(Move::targets).collect();
        assert_eq!(targets, expected.iter().copied().collect::<Vec<_>>(), "{case}");
        assert_eq!(moves[0].plan.new_nodes.len(), usize::from(expected.is_none()), "{case}");
    }
}

#[test]
fn a_node_that_is_not_known_is_not_removed() {
    let outcome = cluster(&json!({}), "small/on-demand", &json!({})).simulate(&["other"]);
    assert_eq!(outcome.obstacles["other"], Obstacle::LeftOutOfPlans);
}

#[test]
fn a_removed_node_counts_no_longer_against_the_limits_of_its_pool() {
    for (resource, limit, expected) in [
        ("cpu", "1", Some("no_place")),
        ("cpu", "2", None),
        (labels::USD_PER_HOUR, "0.039", Some("no_place")),
        (labels::USD_PER_HOUR, "0.04", None),
    ] {
        let pool = json!({"spec": {"limits": {resource: limit}}});
        let cluster = cluster(&pool, "small/on-demand", &json!({}));
        let obstacle = cluster.simulate(&["old"]).obstacles.remove("old");
        assert_eq!(obstacle.as_ref().map(Obstacle::kind), expected, "{limit} of {resource}");
    }
}

#[test]
fn f22_a_pod_without_a_controller_needs_room_elsewhere() {
    let bare = json!({"metadata": {"ownerReferences": null}});
    let mut cluster = cluster(&with_limit("0"), "small/on-demand", &bare);
    assert_eq!(cluster.simulate(&["old"]).obstacles["old"].kind(), "no_place");
    cluster.add_node("b", "p", "small/on-demand");
    assert!(cluster.simulate(&["old"]).obstacles.is_empty());
    let done = json!({"metadata": {"ownerReferences": null}, "status": {"phase": "Succeeded"}});
    cluster.add_pod("done", Some("old"), "2", &done);
    assert!(cluster.simulate(&["old"]).obstacles.is_empty(), "a pod that ended needs none");
}

#[test]
fn of_several_obstacles_the_one_that_concerns_replacement_counts() {
    let mut cluster = cluster(&json!({}), "small/spot", &json!({}));
    cluster.add_pod("selects", Some("old"), "1", &json!({"spec": {"nodeSelector": {"disk": "local"}}}));
    assert_eq!(cluster.simulate(&["old"]).obstacles["old"].kind(), "no_place");
}

#[test]
fn the_pods_of_all_nodes_cost_at_least_the_bound() {
    let mut cluster = SmallCluster::new(&[("p", json!({}))]);
    assert_eq!(cluster.simulator().least_cost(), Some(MicroUsd(0)));
    for (name, offering) in [("a", "small/on-demand"), ("b", "large/on-demand"), ("empty", "large/spot")] {
        cluster.add_node(name, "p", offering);
    }
    cluster.add_node_of_others("other", "large");
    cluster.add_pod("1", Some("a"), "1", &json!({}));
    cluster.add_pod("2", Some("b"), "3", &json!({}));
    // Neither of these is on a node of a NodePool.
    cluster.add_pod("3", Some("other"), "4", &json!({}));
    cluster.add_pod("waits", None, "4", &json!({}));
    // Four cores at 20,000, the spot price; rounded down.
    assert_eq!(cluster.simulator().least_cost(), Some(MicroUsd(79_999)));
}

#[test]
fn the_bound_needs_the_offers_of_every_pool_with_a_node_that_is_not_static() {
    let static_pool = json!({"spec": {"replicas": 1}});
    let mut cluster = SmallCluster::new(&[("p", json!({})), ("q", json!({})), ("fixed", static_pool)]);
    assert!(offers_all_pools(&cluster.state, &[]), "no node");
    cluster.add_node("a", "fixed", "small/spot");
    assert!(offers_all_pools(&cluster.state, &[]), "static");
    cluster.add_node("b", "q", "small/spot");
    assert!(!offers_all_pools(&cluster.state, &cluster.pools[..1]), "q is not ready");
    assert!(offers_all_pools(&cluster.state, &cluster.pools[..2]));
}
