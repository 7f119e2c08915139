//! Why nodes stay.

use k8s_openapi::api::core::v1::{Node, Taint};

use super::*;

#[test]
fn each_node_gets_a_verdict() {
    type Change = fn(&mut SmallCluster);
    let (none, free): (Change, Value) = (|_| {}, json!({}));
    let disruption = |disruption: Value| json!({"spec": {"disruption": disruption}});
    let fixed = json!({"spec": {"nodeSelector": {(labels::HOSTNAME): "a"}}});
    let protected = json!({"metadata": {"annotations": {(labels::DO_NOT_DISRUPT): "true"}}});
    for (case, pool, pod, change, expected) in [
        ("it is removed", &free, &free, none, None),
        ("Never", &disruption(json!({"consolidateAfter": "Never"})), &free, none, Some(Blocker::Never)),
        (
            "only when empty",
            &disruption(json!({"consolidationPolicy": "WhenEmpty"})),
            &free,
            none,
            Some(Blocker::WhenEmpty),
        ),
        (
            "a budget of 0",
            &disruption(json!({"budgets": [{"nodes": "0"}]})),
            &free,
            none,
            Some(Blocker::NodePoolBudget),
        ),
        ("a static NodePool", &json!({"spec": {"replicas": 2}}), &free, none, Some(Blocker::Static)),
        ("a protected pod", &free, &protected, none, Some(Blocker::PodProtected("n/on-a".into()))),
        (
            "a protected Node",
            &free,
            &free,
            |cluster| {
                let mut node = (*cluster.state.nodes["a"]).clone();
                node.metadata.annotations = Some([(labels::DO_NOT_DISRUPT.to_owned(), "true".to_owned())].into());
                cluster.state.apply_node(node);
            },
            Some(Blocker::NodeProtected),
        ),
        (
            "a protected NodeClaim",
            &free,
            &free,
            |cluster| {
                let mut claim = (*cluster.state.claims["a"]).clone();
                claim.metadata.annotations = Some([(labels::DO_NOT_DISRUPT.to_owned(), "true".to_owned())].into());
                cluster.state.apply_claim(claim);
            },
            Some(Blocker::NodeProtected),
        ),
        (
            "marked",
            &free,
            &free,
            |cluster| {
                patch_claim(cluster, "a", &json!({"metadata": {"annotations": {(labels::DISRUPTING): "Drifted/"}}}));
            },
            Some(Blocker::Leaving),
        ),
        (
            "not initialized",
            &free,
            &free,
            |cluster| patch_claim(cluster, "a", &json!({"status": {"conditions": null}})),
            Some(Blocker::NotInitialized),
        ),
        (
            "without its NodePool",
            &free,
            &free,
            |cluster| drop(cluster.state.pools.remove("p")),
            Some(Blocker::NoNodePool),
        ),
        (
            "of an unknown type",
            &free,
            &free,
            |cluster| patch_claim(cluster, "a", &json!({"metadata": {"labels": {(labels::INSTANCE_TYPE): "other"}}})),
            Some(Blocker::NoPrice),
        ),
        (
            "a pod ended lately",
            &free,
            &free,
            |cluster| {
                cluster.state.last_pod_event.insert("a".into(), NOW - Duration::from_secs(1));
            },
            Some(Blocker::NotQuiet(NOW + Duration::from_secs(29))),
        ),
        (
            "a PodDisruptionBudget",
            &free,
            &free,
            |cluster| cluster.state.pod_budgets.apply(&objects::pod_budget("all", &json!({"spec": {"selector": {}}}))),
            Some(Blocker::PodBudget("n/on-a".into(), EvictionBlock::Exhausted("n/all".into()))),
        ),
        ("a pod that fits nowhere else", &no_purchases(), &fixed, none, None),
    ] {
        let cluster = two_nodes(pool, pod);
        let mut cluster = cluster;
        change(&mut cluster);
        let found = verdicts(&cluster, &mut Memory::default(), &Holds::default(), 100, NOW);
        let names: Vec<&str> = found.iter().map(|verdict| &*verdict.claim).collect();
        assert_eq!(names, ["a", "b"], "{case}");
        if case == "a pod that fits nowhere else" {
            let [Blocker::Obstacle(Obstacle::NoPlace { pod, .. })] = &found[0].blockers[..] else {
                panic!("{:?}", found[0])
            };
            assert_eq!(&**pod, "n/on-a");
        } else {
            assert_eq!(found[0].blockers.first(), expected.as_ref(), "{case}: {:?}", found[0]);
        }
        if !["of an unknown type", "a PodDisruptionBudget"].contains(&case) {
            assert_eq!(found[0].price, MicroUsd(100_000), "{case}");
        }
    }
    let cluster = two_nodes(&json!({}), &json!({}));
    let found = verdicts(&cluster, &mut Memory::default(), &Holds::default(), 0, NOW);
    assert_eq!(found[0].blockers, [Blocker::RateCap]);
    assert_eq!(found[0].saving, MicroUsd(90_000), "its pod is worth a sixteenth of a large spot node");
}

#[test]
fn no_pod_of_a_workload_is_evicted_within_the_interval_of_its_newest_pod() {
    let pool = json!({"metadata": {"annotations": {(labels::MIN_EVICTION_INTERVAL): "30m"}}});
    let minute = Duration::from_mins(1);
    let other = json!({"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "o", "uid": "o", "controller": true});
    for (case, pool, sibling, age, expected) in [
        ("no newer pod", &pool, None, 1, None),
        (
            "a newer pod elsewhere",
            &pool,
            Some(json!({})),
            10,
            Some(Blocker::WorkloadChanged("n/on-a".into(), NOW + 20 * minute)),
        ),
        ("long ago", &pool, Some(json!({})), 30, None),
        ("without the annotation", &json!({}), Some(json!({})), 10, None),
        ("of another workload", &pool, Some(json!({"metadata": {"ownerReferences": [other]}})), 10, None),
        ("of another tenant, who copied the UID", &pool, Some(json!({"metadata": {"namespace": "tenant"}})), 10, None),
        ("that ended", &pool, Some(json!({"status": {"phase": "Succeeded"}})), 10, None),
    ] {
        let mut cluster = two_nodes(pool, &json!({}));
        if let Some(mut patch) = sibling {
            let created = json!({"metadata": {"creationTimestamp": (NOW - age * minute).rfc3339()}});
            json_patch::merge(&mut patch, &created);
            cluster.add_pod("sibling", Some("not-ours"), "100m", &patch);
        }
        let mut memory = Memory::default();
        let found = verdicts(&cluster, &mut memory, &Holds::default(), 100, NOW);
        assert_eq!(found[0].blockers.first(), expected.as_ref(), "{case}: {:?}", found[0]);
        assert_eq!(memory.next_eligible, expected.and_then(|blocker| blocker.until()), "{case}");
    }
}

/// Nodes have the planned taint while pods move, and the planner ignores it.
#[test]
fn the_planned_taint_of_a_node_is_no_reason_to_decide_again() {
    let on_demand = json!([{"key": labels::CAPACITY_TYPE, "operator": "In", "values": ["on-demand"]}]);
    let pool = json!({"spec": {"template": {"spec": {"requirements": on_demand}}}});
    let mut cluster = SmallCluster::new(&[("p", pool)]);
    for (name, offering, cpu) in [("a", "small/on-demand", "500m"), ("b", "large/on-demand", "7800m")] {
        cluster.add_node(name, "p", offering);
        cluster.add_pod(&format!("on-{name}"), Some(name), cpu, &json!({}));
    }
    let mut memory = Memory::default();
    let found = verdicts(&cluster, &mut memory, &Holds::default(), 100, NOW);
    assert!(matches!(found[0].blockers[..], [Blocker::SavesTooLittle { .. }]), "{:?}", found[0]);
    let decided = |cluster: &SmallCluster, memory: &mut Memory| {
        let facts = cluster.facts();
        let request = Request { pools: &cluster.pools, facts: &facts, most: 100, now: NOW };
        Consolidation::begin(&cluster.state, &Holds::default(), memory, request).is_decided(memory, NOW)
    };
    let tainted = |cluster: &mut SmallCluster, key: &str| {
        let mut node = Node::clone(&cluster.state.nodes["b"]);
        let taint = Taint { key: key.into(), effect: "NoSchedule".into(), ..Taint::default() };
        node.spec.get_or_insert_default().taints = Some(vec![taint]);
        cluster.state.apply_node(node);
    };
    assert!(decided(&cluster, &mut memory));
    tainted(&mut cluster, labels::PLANNED_TAINT);
    assert!(decided(&cluster, &mut memory));
    tainted(&mut cluster, "team");
    assert!(!decided(&cluster, &mut memory));
}

#[test]
fn b42_a_nominated_node_is_not_consolidated() {
    let mut cluster = two_nodes(&json!({}), &json!({}));
    cluster.add_pod("waits", None, "1", &json!({"metadata": {"annotations": {}}}));
    let plan = json!({"metadata": {"annotations": {(labels::PLANNED_PODS): "[\"n/waits\"]",
        (labels::HOLD_UNTIL): (NOW + Duration::from_mins(1)).rfc3339()}}});
    patch_claim(&mut cluster, "a", &plan);
    let holds = crate::decisions::holds::resolve(&cluster.state, NOW);
    assert_eq!(verdicts(&cluster, &mut Memory::default(), &holds, 100, NOW)[0].blockers, [Blocker::Nominated(1)]);
}

#[test]
fn a_verdict_names_every_lasting_blocker() {
    let protected = json!({"metadata": {"annotations": {(labels::DO_NOT_DISRUPT): "true"}}});
    let never = json!({"spec": {"disruption": {"consolidateAfter": "Never", "consolidationPolicy": "WhenEmpty"}}});
    let found = verdicts(&two_nodes(&never, &protected), &mut Memory::default(), &Holds::default(), 100, NOW);
    let all = [Blocker::Never, Blocker::WhenEmpty, Blocker::PodProtected("n/on-a".into())];
    assert_eq!(found[0].blockers, all);
}

#[test]
fn a_node_that_stays_for_its_price_says_what_it_saves_and_needs() {
    let on_demand = json!([{"key": labels::CAPACITY_TYPE, "operator": "In", "values": ["on-demand"]}]);
    let pool = json!({"spec": {"template": {"spec": {"requirements": on_demand}}}});
    let mut cluster = SmallCluster::new(&[("p", pool)]);
    // Full, so that its replacement costs as much.
    cluster.add_node("full", "p", "small/on-demand");
    cluster.add_pod("full", Some("full"), "1900m", &json!({}));
    let mut memory = Memory::default();
    let found = verdicts(&cluster, &mut memory, &Holds::default(), 100, NOW);
    let [Blocker::SavesTooLittle { saving: MicroUsd(0), needed }] = found[0].blockers[..] else { panic!("{found:?}") };
    assert!(needed.0 > 0);
    // What is not planned again keeps its verdict.
    let again = verdicts(&cluster, &mut memory, &Holds::default(), 100, NOW + Duration::from_secs(1));
    assert_eq!(again, found);
    // Two nodes whose pods fit on one: one of them is removed, and the other is needed.
    let mut cluster = SmallCluster::new(&[("p", no_purchases())]);
    for name in ["a", "b"] {
        cluster.add_node(name, "p", "small/on-demand");
        cluster.add_pod(name, Some(name), "900m", &json!({}));
    }
    let mut memory = Memory::default();
    let found = verdicts(&cluster, &mut memory, &Holds::default(), 100, NOW);
    assert_eq!(found.iter().map(|verdict| verdict.blockers.len()).sum::<usize>(), 1, "{found:?}");
}

#[test]
fn a_node_that_is_backed_off_keeps_its_reason() {
    let fixed = json!({"spec": {"nodeSelector": {(labels::HOSTNAME): "a"}}});
    let (cluster, mut memory) = (two_nodes(&no_purchases(), &fixed), Memory::default());
    let first = verdicts(&cluster, &mut memory, &Holds::default(), 100, NOW);
    assert!(matches!(&first[0].blockers[..], [Blocker::Obstacle(Obstacle::NoPlace { .. })]), "{first:?}");
    assert_eq!(verdicts(&cluster, &mut memory, &Holds::default(), 100, NOW + Duration::from_secs(20)), first);
    memory.backoff.abandoned("b", Duration::from_mins(1), NOW);
    let later = verdicts(&cluster, &mut memory, &Holds::default(), 100, NOW + Duration::from_secs(20));
    assert_eq!(later[1].blockers, [Blocker::Abandoned]);
}

#[test]
fn b49_nodes_whose_pods_a_budget_blocks_are_no_candidates() {
    let mut cluster = SmallCluster::new(&[("p", no_purchases())]);
    cluster
        .state
        .pod_budgets
        .apply(&objects::pod_budget("b", &json!({"spec": {"selector": {"matchLabels": {"app": "blocked"}}}})));
    for n in 0..24 {
        let (name, app) = (format!("c{n:02}"), if n < 20 { "blocked" } else { "free" });
        cluster.add_node(&name, "p", "small/on-demand");
        cluster.add_pod(&format!("p{n:02}"), Some(&name), "1", &json!({"metadata": {"labels": {"app": app}}}));
    }
    let found = verdicts(&cluster, &mut Memory::default(), &Holds::default(), 100, NOW);
    let is_blocked = |verdict: &&Verdict| matches!(verdict.blockers[..], [Blocker::PodBudget(..)]);
    assert_eq!(found.iter().filter(is_blocked).count(), 20);
    let why = "pdb prevents pod evictions: n/b allows no disruption of pod n/p00";
    assert_eq!(found[0].blockers[0].to_string(), why);
    assert_eq!(decide(&cluster).claims, ["c20", "c21", "c22", "c23"], "their pods fit beside the blocked ones");
}
