use serde_json::json;
use stowage_planner::Effort;

use super::*;
use crate::test_support::small_cluster::SmallCluster;

/// Sources, new nodes with their pods and maximum price, and placements of each move.
fn described(moves: &[Move]) -> Vec<String> {
    let describe = |one: &Move| {
        let key = |pod: &usize| one.snapshot.problem.pods[*pod].key.to_string();
        let sources: Vec<&str> = one.sources.keys().map(String::as_str).collect();
        let mut places = Vec::new();
        for node in &one.plan.new_nodes {
            let most = node.max_price.map_or("-".to_owned(), |price| price.0.to_string());
            let mut pods: Vec<String> = node.pods.iter().map(key).collect();
            pods.sort();
            places.push(format!("new {} <= {most}: {}", price(node), pods.join(" ")));
        }
        for placement in &one.plan.placements {
            let node = one.snapshot.node_refs[placement.node].node.as_deref().unwrap_or("?");
            let mut pods: Vec<String> = placement.pods.iter().map(key).collect();
            pods.sort();
            places.push(format!("{node}: {}", pods.join(" ")));
        }
        places.sort();
        format!("{} saves {}: {}", sources.join("+"), one.saving.0, places.join("; "))
    };
    moves.iter().map(describe).collect()
}

fn moves(cluster: &SmallCluster, without: &[&str]) -> Vec<Move> {
    let without = without.iter().map(|claim| (*claim).to_owned()).collect();
    cluster.simulator().moves(&without, Effort::Normal).1
}

/// On-demand nodes only, so that prices are those of [`crate::test_support::small_cluster`].
fn cluster() -> SmallCluster {
    let on_demand = json!([{"key": "karpenter.sh/capacity-type", "operator": "In", "values": ["on-demand"]}]);
    SmallCluster::new(&[("p", json!({"spec": {"template": {"spec": {"requirements": on_demand}}}}))])
}

#[test]
fn nodes_whose_pods_share_a_new_node_are_one_move_and_others_move_by_themselves() {
    let mut cluster = cluster();
    for name in ["a", "b", "c", "d"] {
        cluster.add_node(name, "p", "large/on-demand");
    }
    cluster.add_node("room", "p", "small/on-demand");
    // Those of a and b need a new node together; c and d have room on a node that exists.
    cluster.add_pod("a1", Some("a"), "900m", &json!({"spec": {"priority": 1}}));
    cluster.add_pod("b1", Some("b"), "900m", &json!({}));
    cluster.add_pod("stays", Some("room"), "1200m", &json!({}));
    cluster.add_pod("c1", Some("c"), "400m", &json!({}));
    cluster.add_pod("d1", Some("d"), "400m", &json!({}));
    let found = moves(&cluster, &["a", "b", "c", "d"]);
    assert_eq!(
        described(&found),
        ["a+b saves 700000: new 100000 <= -: n/a1 n/b1", "c saves 400000: room: n/c1", "d saves 400000: room: n/d1",]
    );
    let all: BTreeSet<&str> = found.iter().flat_map(Move::pods).collect();
    assert_eq!(all, ["n/a1", "n/b1", "n/c1", "n/d1"].into());
    assert_eq!(found[1].targets().collect::<Vec<_>>(), ["room"]);
}

#[test]
fn a_node_without_pods_is_a_move_without_a_plan() {
    let mut cluster = cluster();
    cluster.add_node("a", "p", "small/on-demand");
    assert_eq!(described(&moves(&cluster, &["a"])), ["a saves 100000: "]);
}

#[test]
fn new_nodes_cost_together_at_most_what_is_allowed() {
    let mut cluster = cluster();
    cluster.add_node("a", "p", "large/on-demand");
    cluster.add_pod("a1", Some("a"), "1900m", &json!({}));
    cluster.add_pod("a2", Some("a"), "1900m", &json!({}));
    let mut found = moves(&cluster, &["a"]);
    found[0].limit_prices(MicroUsd(50_001));
    assert_eq!(described(&found), ["a saves 200000: new 100000 <= 125000: n/a1; new 100000 <= 125000: n/a2"]);
    found[0].limit_prices(MicroUsd(-7));
    assert_eq!(
        found[0].plan.new_nodes[0].max_price,
        Some(MicroUsd(100_000)),
        "a lower limit stays, and none is below the plan"
    );
}

#[test]
fn no_pod_moves_to_a_node_that_the_same_decision_removes_and_each_has_one_place() {
    let (rng, mut moved) = (&mut fastrand::Rng::with_seed(7), 0);
    for round in 0..80 {
        let mut cluster = cluster();
        let nodes: Vec<String> = (0..rng.usize(2..9)).map(|at| format!("n{at}")).collect();
        let mut removed: BTreeSet<&str> = BTreeSet::new();
        let mut displaced = Vec::new();
        for name in &nodes {
            cluster.add_node(name, "p", ["small/on-demand", "large/on-demand"][rng.usize(..2)]);
            let is_removed = rng.bool() && removed.insert(name);
            for at in 0..rng.usize(..4) {
                let pod = format!("{name}-{at}");
                cluster.add_pod(&pod, Some(name), ["100m", "300m", "500m"][rng.usize(..3)], &json!({}));
                displaced.extend(is_removed.then(|| format!("n/{pod}")));
            }
        }
        let found = moves(&cluster, &removed.iter().copied().collect::<Vec<_>>());
        let targets = found.iter().flat_map(Move::targets);
        assert_eq!(targets.filter(|target| removed.contains(target.as_str())).count(), 0, "round {round}");
        let mut placed: Vec<&str> = found.iter().flat_map(Move::pods).collect();
        placed.sort_unstable();
        assert_eq!(placed, displaced, "round {round}");
        let sources: Vec<&str> = found.iter().flat_map(|one| one.sources.keys().map(String::as_str)).collect();
        assert_eq!(sources.iter().copied().collect::<BTreeSet<_>>(), removed, "round {round}");
        assert_eq!(sources.len(), removed.len(), "round {round}: each source is of one move");
        moved += placed.len();
    }
    assert!(moved > 300, "{moved}");
}
