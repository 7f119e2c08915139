use std::time::Duration;

use serde_json::json;

use super::*;
use crate::model::labels;
use crate::test_support::objects;

fn candidate(claim: &str, pods: usize, price: i64) -> Candidate {
    Candidate {
        claim: claim.into(),
        pool: "p".into(),
        pods,
        quiet_since: UnixMillis(0),
        protected: false,
        price: MicroUsd(price),
    }
}

fn outcome(complete: bool, new_nodes: usize, any_spot: bool) -> Outcome {
    Outcome { complete, late_node: None, new_nodes, any_spot, daemons_left_out: false, saving: 5 }
}

#[test]
fn a_spot_node_is_replaced_by_existing_room_but_not_by_a_new_node() {
    assert_eq!(saving(&outcome(true, 1, false)), Some(5));
    assert_eq!(saving(&outcome(true, 0, true)), Some(5));
    assert_eq!(saving(&outcome(true, 1, true)), None);
    assert_eq!(saving(&outcome(false, 0, false)), None, "a pod is left without a node");
}

#[test]
fn a_node_is_not_replaced_by_a_new_one_without_room_for_a_daemon_set_that_is_left_out() {
    let left_out = |new_nodes| Outcome { daemons_left_out: true, ..outcome(true, new_nodes, false) };
    assert_eq!([0, 1].map(|new_nodes| saving(&left_out(new_nodes))), [Some(5), None]);
}

#[test]
fn b42_a_nominated_node_is_not_consolidated() {
    let candidate = |pods, quiet_since, protected| Candidate {
        quiet_since: UnixMillis(quiet_since),
        protected,
        ..candidate("c", pods, 1)
    };
    let ten = Some(Duration::from_millis(10));
    let policy = "WhenEmptyOrUnderutilized";
    for (case, candidate, consolidate_after, policy, held, want) in [
        ("its pods may move", candidate(2, 0, false), ten, policy, false, true),
        ("a pod is held for it", candidate(2, 0, false), ten, policy, true, false),
        ("it is empty", candidate(0, 0, false), ten, policy, false, false),
        ("a pod was bound recently", candidate(2, 91, false), ten, policy, false, false),
        ("it is protected", candidate(2, 0, true), ten, policy, false, false),
        ("Never", candidate(2, 0, false), None, policy, false, false),
        ("only when empty", candidate(2, 0, false), ten, "WhenEmpty", false, false),
    ] {
        let allowance = PoolAllowance { consolidate_after, nodes: 1 };
        assert_eq!(is_eligible(&candidate, &allowance, policy, held, UnixMillis(100)), want, "{case}");
    }
}

#[test]
fn the_most_expensive_node_per_pod_is_first() {
    let mut order = vec![candidate("full", 10, 100), candidate("light", 1, 50), candidate("same", 1, 10)];
    sort_by_price_per_pod(&mut order);
    assert_eq!(order.iter().map(|candidate| &*candidate.claim).collect::<Vec<_>>(), ["light", "full", "same"]);
}

#[test]
fn candidates_are_accepted_cumulatively_within_budget_and_minimum_saving() {
    let allowance = PoolAllowance { consolidate_after: Some(Duration::ZERO), nodes: 2 };
    let allowances = [("p".to_owned(), allowance)].into();
    let mut pass = Consolidation { blocked: vec![], allowances, accepted: BTreeSet::new(), saved: 0, most: 9 };
    let outcome = |saving| Outcome { saving, ..outcome(true, 0, false) };
    let all = ["a", "b", "c", "d"].map(|name| candidate(name, 1, 100));
    pass.record(&all[0], &outcome(50));
    assert_eq!(pass.removal(&all[1]), Some(["a".to_owned(), "b".to_owned()].into()));
    pass.record(&all[1], &outcome(59));
    assert_eq!(pass.removal(&all[2]), Some(["a".to_owned(), "c".to_owned()].into()), "b saved less than a tenth");
    pass.record(&all[2], &outcome(60));
    assert_eq!(pass.removal(&all[3]), None, "the budget is used up");
    assert_eq!(pass.finish(), (vec!["a".to_owned(), "c".to_owned()], MicroUsd(60)));
}

/// What a set saves says nothing about the members that a cap would leave of it.
#[test]
fn a_pass_accepts_no_more_nodes_than_may_be_disrupted_now() {
    let allowance = PoolAllowance { consolidate_after: Some(Duration::ZERO), nodes: 9 };
    let allowances = [("p".to_owned(), allowance)].into();
    let mut pass = Consolidation { blocked: vec![], allowances, accepted: BTreeSet::new(), saved: 0, most: 1 };
    let all = ["b", "a"].map(|name| candidate(name, 1, 100));
    assert!(pass.removal(&all[0]).is_some());
    pass.record(&all[0], &Outcome { saving: 50, ..outcome(true, 0, false) });
    assert_eq!(pass.removal(&all[1]), None);
    assert_eq!(pass.finish().0, ["b"]);
}

#[test]
fn b49_nodes_whose_pods_a_budget_blocks_take_no_place_among_the_candidates() {
    let mut state = ClusterState::default();
    let disruption = json!({"consolidateAfter": "0s", "budgets": [{"nodes": "100%"}]});
    state.apply_pool(objects::node_pool("p", &json!({"spec": {"disruption": disruption}})));
    state
        .pod_budgets
        .apply(&objects::pod_budget("b", &json!({"spec": {"selector": {"matchLabels": {"app": "blocked"}}}})));
    for n in 0..MAX_CANDIDATES + 2 {
        let (claim, node, id) = (format!("c{n:02}"), format!("x{n:02}"), format!("i-{n}"));
        let meta = json!({"labels": {(labels::NODE_POOL): "p"}});
        let status = objects::launched(&id, &["Initialized"]);
        state.apply_claim(objects::claim(&claim, &json!({"metadata": meta, "status": status})));
        let ready = json!({"conditions": [{"type": "Ready", "status": "True"}]});
        let spec = json!({"providerID": format!("aws:///z/{id}")});
        state.apply_node(objects::node(&node, &json!({"spec": spec, "status": ready})));
        let app = if n < MAX_CANDIDATES { "blocked" } else { "free" };
        let pod = json!({"metadata": {"labels": {"app": app}}, "spec": {"nodeName": node}});
        state.apply_pod(&objects::pod(&format!("p{n:02}"), &pod), UnixMillis(0));
    }
    let now = UnixMillis(2_000_000_000_000);
    let (pass, chosen) = Consolidation::begin(&state, &Holds::default(), &InstanceTypes::default(), 100, now);
    assert_eq!(chosen.iter().map(|candidate| &*candidate.claim).collect::<Vec<_>>(), ["c20", "c21"]);
    assert_eq!(pass.blocked.len(), MAX_CANDIDATES);
    let why = "pdb prevents pod evictions: n/b allows no disruption of pod n/p00";
    assert_eq!(pass.blocked[0], ("c00".to_owned(), why.to_owned()));
}
