use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use stowage_test_objects as objects;

use super::*;
use crate::test_support::history::{self, History};

fn pod(json: serde_json::Value) -> Pod {
    serde_json::from_value(json).unwrap()
}

#[test]
fn a_problem_keeps_the_volumes_that_existed_when_it_was_built() {
    let read = |object: serde_json::Value| serde_json::from_value::<PersistentVolumeClaim>(object).unwrap();
    let mut state = ClusterState::default();
    state.apply_volume_claim(&read(serde_json::json!({"metadata": {"name": "c", "namespace": "n"}, "spec": {}})));
    let before = Arc::clone(&state.volumes);
    let metadata =
        serde_json::json!({"name": "c", "namespace": "n", "annotations": {"pv.kubernetes.io/bind-completed": "yes"}});
    state.apply_volume_claim(&read(serde_json::json!({"metadata": metadata, "spec": {"volumeName": "v"}})));
    assert!(!before.claims["n/c"].bound && state.volumes.claims["n/c"].bound);
    let volume = serde_json::json!({"metadata": {"name": "v"}, "spec": {"nodeAffinity": {"required": {"nodeSelectorTerms": [
        {"matchExpressions": [{"key": "z", "operator": "Near"}]}]}}}});
    state.apply_volume(&serde_json::from_value(volume).unwrap());
    assert!(state.volumes.volumes.is_empty(), "invalid");
}

#[test]
fn a_pod_moves_from_unbound_to_its_node_and_is_removed() {
    let mut state = ClusterState::default();
    let mut json = serde_json::json!({"metadata": {"name": "a", "namespace": "n", "uid": "1"},
        "spec": {"containers": [{"name": "c", "image": "i"}]}});
    state.apply_pod(&pod(json.clone()), UnixMillis(10));
    assert!(state.unbound.contains("n/a"));
    json["spec"]["nodeName"] = "node-1".into();
    state.apply_pod(&pod(json), UnixMillis(20));
    assert!(state.unbound.is_empty());
    assert_eq!(state.pods_on("node-1").count(), 1);
    assert_eq!(state.last_pod_event.get("node-1"), Some(&UnixMillis(20)));
    state.apply_node(serde_json::from_value(serde_json::json!({"metadata": {"name": "node-1"}})).unwrap());
    state.delete_pod("n/a", UnixMillis(30));
    assert_eq!(state.pods_on("node-1").count(), 0);
    assert!(state.pods_by_node.is_empty());
    assert_eq!(state.last_pod_event.get("node-1"), Some(&UnixMillis(30)));
}

#[test]
fn a_pod_that_is_first_observed_on_its_node_counts_from_when_it_was_bound_or_ended() {
    let time = |seconds: i64| UnixMillis(seconds * 1_000).rfc3339();
    let scheduled =
        |at: i64| serde_json::json!({"type": "PodScheduled", "status": "True", "lastTransitionTime": time(at)});
    let ended = serde_json::json!({"type": "Ready", "status": "False", "lastTransitionTime": time(8)});
    let of_daemon = serde_json::json!([{"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "d", "uid": "d", "controller": true}]);
    for (case, metadata, status, expected) in [
        ("it runs", serde_json::json!({}), serde_json::json!({"conditions": [scheduled(5)]}), Some(5_000)),
        ("no condition", serde_json::json!({}), serde_json::json!({}), Some(20_000)),
        (
            "a clock that is ahead",
            serde_json::json!({}),
            serde_json::json!({"conditions": [scheduled(90)]}),
            Some(20_000),
        ),
        (
            "it ended",
            serde_json::json!({}),
            serde_json::json!({"phase": "Succeeded", "conditions": [scheduled(5), ended]}),
            Some(8_000),
        ),
        (
            "it ends now",
            serde_json::json!({"deletionTimestamp": time(15)}),
            serde_json::json!({"conditions": [scheduled(5)]}),
            Some(20_000),
        ),
        (
            "a DaemonSet's",
            serde_json::json!({ "ownerReferences": of_daemon }),
            serde_json::json!({"conditions": [scheduled(5)]}),
            None,
        ),
    ] {
        let mut state = ClusterState::default();
        state.apply_node(objects::node("x", &serde_json::json!({})));
        let patch = serde_json::json!({"metadata": metadata, "spec": {"nodeName": "x"}, "status": status});
        state.apply_pod(&objects::pod("a", &patch), UnixMillis(20_000));
        let last = |state: &ClusterState| state.last_pod_event.get("x").map(|at| at.0);
        assert_eq!(last(&state), expected, "{case}");
        let earlier = serde_json::json!({"spec": {"nodeName": "x"}, "status": {"conditions": [scheduled(3)]}});
        state.apply_pod(&objects::pod("b", &earlier), UnixMillis(20_000));
        assert_eq!(last(&state), expected.or(Some(3_000)), "{case}: the last one counts");
        state.delete_pod("n/a", UnixMillis(30_000));
        let counts = !["it ended", "a DaemonSet's"].contains(&case);
        assert_eq!(last(&state), if counts { Some(30_000) } else { expected.or(Some(3_000)) }, "{case}: its deletion");
    }
}

#[test]
fn f17_a_duration_protects_a_pod_from_its_start_on_until_it_is_over() {
    let started = serde_json::json!({"startTime": "1970-01-01T00:01:40Z"});
    let (minute, until) = (60_000, 100_000 + 10 * 60_000);
    for (value, status, until) in [
        ("true", started.clone(), i64::MAX),
        ("10m", started.clone(), until),
        ("9m60s", started.clone(), until),
        ("10m", serde_json::json!({}), i64::MAX),
        ("2562047h", started.clone(), i64::MAX / 2),
        ("abc", started.clone(), i64::MAX),
        ("-10m", started.clone(), i64::MAX),
        ("0s", started.clone(), i64::MAX),
        ("false", started.clone(), 0),
        ("", started.clone(), 0),
    ] {
        let metadata = serde_json::json!({"annotations": {(stowage_model::labels::DO_NOT_DISRUPT): value}});
        let patch = serde_json::json!({"metadata": metadata, "spec": {"nodeName": "x"}, "status": status});
        let mut state = ClusterState::default();
        state.apply_node(objects::node("x", &serde_json::json!({})));
        state.apply_pod(&objects::pod("a", &patch), UnixMillis(100_000));
        for at in
            [101_000, 100_000 + 9 * minute, 100_000 + 10 * minute - 1, 100_000 + 10 * minute, 100_000 + 99 * minute]
        {
            let revision = state.node_changes.revision();
            let was = state.pods["n/a"].do_not_disrupt;
            state.end_protections(UnixMillis(at));
            let is = state.pods["n/a"].do_not_disrupt;
            assert_eq!(is, at < until, "{value} {status} at {at}");
            assert_eq!(state.node_changes.revision() != revision, was != is, "{value}: its node changes with it");
            let mut fresh = ClusterState::default();
            fresh.apply_pod(&objects::pod("a", &patch), UnixMillis(at));
            assert_eq!(fresh.pods["n/a"].do_not_disrupt, is, "{value}: as a process that starts now");
        }
        state.delete_pod("n/a", UnixMillis(until));
        assert!(state.protections.is_empty());
    }
}

#[test]
fn a_duration_protects_a_node_from_the_creation_of_node_or_claim_on() {
    let at = |minutes: i64| UnixMillis(60_000 * minutes);
    let meta = |value: &str, minutes: i64| serde_json::json!({"annotations": {(stowage_model::labels::DO_NOT_DISRUPT): value}, "creationTimestamp": at(minutes).rfc3339()});
    let protected =
        |state: &ClusterState| state.is_protected(&*state.nodes["x"]) || state.is_protected(&*state.claims["c"]);
    for (of_claim, of_node, until) in [
        ("false", "false", None),
        ("10m", "false", Some(11)),
        ("false", "10m", Some(12)),
        // It is copied at the registration.
        ("10m", "10m", Some(12)),
        ("10m", "true", Some(i64::MAX)),
        ("soon", "false", Some(i64::MAX)),
        ("false", "0s", Some(i64::MAX)),
    ] {
        let mut state = ClusterState::default();
        let apply = |state: &mut ClusterState| {
            let status = objects::launched("i-1", &[]);
            state.apply_claim(objects::claim(
                "c",
                &serde_json::json!({"metadata": meta(of_claim, 1), "status": status}),
            ));
            let spec = serde_json::json!({"providerID": "aws:///z/i-1"});
            state.apply_node(objects::node("x", &serde_json::json!({"metadata": meta(of_node, 2), "spec": spec})));
        };
        apply(&mut state);
        let mut was = true;
        for minute in [3, 10, 11, 12, 99] {
            let revision = state.node_changes.revision();
            state.end_protections(at(minute));
            let is = protected(&state);
            assert_eq!(is, until.is_some_and(|until| minute < until), "{of_claim} {of_node} at {minute}");
            assert!(minute == 3 || is == was || state.node_changes.revision() != revision, "its node changes with it");
            was = is;
            // The kubelet writes the Node all the time.
            apply(&mut state);
            assert_eq!(protected(&state), is);
        }
        apply(&mut state);
        state.delete_node("x");
        state.delete_claim("c");
        assert!(state.protections.is_empty());
    }
}

#[test]
fn a_late_response_does_not_restore_a_deleted_claim() {
    let mut state = ClusterState::default();
    let claim = |version: &str, finalizers: &[&str]| {
        let deleted = "2026-01-01T00:00:00Z";
        let metadata =
            serde_json::json!({"resourceVersion": version, "finalizers": finalizers, "deletionTimestamp": deleted});
        objects::claim("c", &serde_json::json!({ "metadata": metadata }))
    };
    state.apply_claim(claim("1", &["f"]));
    assert_eq!(state.claims.len(), 1);
    state.apply_claim(claim("2", &[]));
    assert!(state.claims.is_empty(), "the write removed the last finalizer");
    state.apply_claim(claim("1", &["f"]));
    assert!(state.claims.is_empty(), "a response older than the deletion");
}

#[test]
fn a_stale_event_does_not_undo_a_write() {
    let mut state = ClusterState::default();
    let claim = |version: &str, annotation: &str| {
        let metadata = serde_json::json!({"resourceVersion": version, "annotations": {"a": annotation}});
        objects::claim("c", &serde_json::json!({ "metadata": metadata }))
    };
    state.apply_claim(claim("9", "old"));
    state.apply_claim(claim("10", "new"));
    state.apply_claim(claim("9", "old"));
    assert_eq!(state.claims["c"].annotations()["a"], "new");
}

#[test]
fn an_assumed_plan_counts_until_its_write_ends_whatever_is_observed_meanwhile() {
    let mut state = ClusterState::default();
    let plan = |pods: &[&str]| PlanRecord {
        pods: pods.iter().map(|pod| format!("n/{pod}")).collect(),
        hold_until: UnixMillis(100_000),
        ..PlanRecord::default()
    };
    let observe = |state: &mut ClusterState, version: u32, pods: &[&str]| {
        let meta = serde_json::json!({"uid": "1", "resourceVersion": version.to_string(), "annotations": plan(pods).annotations()});
        state.apply_claim(objects::claim("c", &serde_json::json!({"metadata": meta})));
    };
    let live = |state: &ClusterState| {
        let now = UnixMillis(0);
        assert_eq!(
            state.held_after(now).count(),
            usize::from(state.planned.get("c").is_some_and(|plan| !plan.pods.is_empty()))
        );
        ["n/a", "n/b"].into_iter().filter(|pod| state.plan_index.is_live(pod, now)).collect::<Vec<_>>().concat()
    };
    state.assume_plan("c", plan(&["a"]));
    assert_eq!(live(&state), "", "no such NodeClaim");
    observe(&mut state, 1, &[]);
    let before = state.revision;
    state.assume_plan("c", plan(&["a"]));
    assert_eq!((live(&state), state.revision > before), ("n/a".into(), true));
    observe(&mut state, 2, &[]);
    assert_eq!(live(&state), "n/a", "another write of the NodeClaim");
    state.assume_plan("c", plan(&["a", "b"]));
    observe(&mut state, 3, &["a"]);
    state.settle_plan("c", &plan(&["a"]));
    assert_eq!(live(&state), "n/an/b", "the next plan was assumed before the first was written");
    state.settle_plan("c", &plan(&["a", "b"]));
    assert_eq!(live(&state), "n/a", "it could not be written");
    state.assume_plan("c", plan(&["b"]));
    observe(&mut state, 4, &["b"]);
    state.settle_plan("c", &plan(&["b"]));
    assert_eq!((live(&state), state.assumed.len()), ("n/b".into(), 0), "it is written");
    state.assume_plan("c", plan(&["a"]));
    let other = serde_json::json!({"metadata": {"uid": "2", "resourceVersion": "5"}});
    state.apply_claim(objects::claim("c", &other));
    assert_eq!((live(&state), state.assumed.len()), (String::new(), 0), "another of the same name");
    state.assume_plan("c", plan(&["a"]));
    state.delete_claim("c");
    assert_eq!((live(&state), state.assumed.len()), (String::new(), 0), "the NodeClaim is gone");
}

#[test]
fn objects_of_other_providers_are_never_acted_on() {
    let foreign = serde_json::json!({"group": "eks.amazonaws.com", "kind": "NodeClass", "name": "default"});
    let mut state = ClusterState::default();
    let claim = |reference: &serde_json::Value| {
        objects::claim(
            "auto",
            &serde_json::json!({"spec": {"nodeClassRef": reference}, "status": {"providerID": "aws:///z/i-1"}}),
        )
    };
    state.apply_claim(claim(&foreign));
    assert!(state.claims.is_empty() && state.planned.is_empty());
    assert_eq!(state.foreign_claims["auto"].as_deref(), Some("aws:///z/i-1"));
    let pool = |reference: &serde_json::Value| {
        objects::node_pool("auto", &serde_json::json!({"spec": {"template": {"spec": {"nodeClassRef": reference}}}}))
    };
    let ours = serde_json::json!({"group": "karpenter.k8s.aws", "kind": "EC2NodeClass", "name": "default"});
    state.apply_pool(pool(&ours));
    assert!(state.pools.contains_key("auto"));
    state.apply_pool(pool(&foreign));
    assert!(state.pools.is_empty(), "deleted, and created again for another provider while the watch was down");
    state.delete_claim("auto");
    assert!(state.foreign_claims.is_empty());
}

/// A Node with the provider id of the claim `c`, created in this second of 2026.
fn node_of_c(name: &str, second: u32) -> Node {
    let created = format!("2026-01-01T00:00:{second:02}Z");
    let json = serde_json::json!({"metadata": {"creationTimestamp": created}, "spec": {"providerID": "aws:///z/i-1"}});
    objects::node(name, &json)
}

#[test]
fn of_several_nodes_with_one_provider_id_the_first_keeps_the_claim() {
    let claim = |node: Option<&str>| {
        let mut status = objects::launched("i-1", &["Launched"]);
        status["nodeName"] = serde_json::json!(node);
        objects::claim("c", &serde_json::json!({ "status": status }))
    };
    for (case, registered, order, own) in [
        ("the older Node came first", None, ["old", "new"], "old"),
        ("the older Node came last", None, ["new", "old"], "old"),
        ("the newer Node is registered", Some("new"), ["old", "new"], "new"),
    ] {
        let mut state = ClusterState::default();
        state.apply_claim(claim(None));
        for name in order {
            state.apply_node(node_of_c(name, if name == "old" { 1 } else { 2 }));
        }
        state.apply_claim(claim(registered));
        let claim = Arc::clone(&state.claims["c"]);
        assert_eq!(state.node_of(&claim).unwrap().name_any(), own, "{case}");
        let other = if own == "old" { "new" } else { "old" };
        assert_eq!(state.duplicate_nodes(&claim).unwrap().iter().collect::<Vec<_>>(), [other], "{case}");
        assert!(state.claim_of(&state.nodes[other]).is_none(), "{case}");
        let mut deleted = state;
        deleted.delete_node(own);
        assert_eq!(deleted.node_of(&claim).unwrap().name_any(), other, "{case}: it is the only one left");
        assert!(deleted.duplicate_nodes(&claim).is_none() && deleted.duplicate_nodes.is_empty(), "{case}");
        deleted.delete_node(other);
        assert!(deleted.node_of(&claim).is_none() && deleted.in_flight.contains("c"), "{case}");
    }
}

/// Applies and deletes this many pods, each with a label set, an owner and a name of its own; `alive` of them exist at a time. Every
/// thousandth has 10,000 unique labels. `observe` is called 20 times.
fn churn(pods: usize, alive: usize, mut observe: impl FnMut(&ClusterState, usize)) {
    let mut state = ClusterState::default();
    let mut large = serde_json::Map::new();
    for number in 0..pods {
        large.clear();
        if number % 1_000 == 0 {
            large.extend(
                (0..10_000).map(|label| (format!("label-{number}-{label}"), format!("{number}-{label}").into())),
            );
        }
        large.insert("job".to_owned(), format!("job-{number}").into());
        let node = (number % 2 == 0).then(|| format!("node-{}", number % 5_000));
        let owner = serde_json::json!({"apiVersion": "batch/v1", "kind": "Job", "name": "j", "uid": format!("job-{number}"), "controller": true});
        let volume = serde_json::json!({"name": "v", "ephemeral": {}});
        let name = format!("pod-{number}");
        state.apply_pod(
            &pod(serde_json::json!({"metadata": {"name": name, "namespace": "n", "uid": name, "labels": large, "ownerReferences": [owner]},
                "spec": {"nodeName": node, "nodeSelector": {"for": name}, "containers": [], "volumes": [volume]}})),
            UnixMillis(1),
        );
        if let Some(gone) = number.checked_sub(alive) {
            state.delete_pod(&format!("n/pod-{gone}"), UnixMillis(1));
        }
        if (number + 1) % (pods / 20) == 0 {
            observe(&state, number + 1);
        }
    }
}

#[test]
fn f7_the_tables_forget_fifty_thousand_pods() {
    churn(50_000, 100, |state, number| {
        for (table, size) in state.table_sizes() {
            // Interned values of at most 2 MiB besides those in use, and the names of the nodes that changed.
            let most = if table == "node_changes" { 2_500 } else { 40_000 };
            assert!(size <= most, "{size} {table} after {number} pods");
        }
        assert!(state.table_sizes().contains(&("pods", 100)));
    });
}

/// `make soak-memory` runs it.
#[test]
#[ignore = "takes minutes"]
fn memory_stays_flat_over_a_million_pods() {
    let resident = || {
        let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
        pages.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4 / 1_024
    };
    let mut seen = Vec::new();
    churn(1_000_000, 10_000, |state, number| {
        seen.push(resident());
        println!("{number} pods: {} MiB resident, {:?}", resident(), state.table_sizes());
    });
    // The first twentieth fills the tables.
    let (first, last) = (seen[1], seen[seen.len() - 1]);
    assert!(last <= first + first / 4 + 16, "{first} MiB after 100,000 pods, {last} MiB at the end");
}

/// The indexes as text, in an order of their own.
fn indexes(state: &ClusterState, now: UnixMillis) -> String {
    let name = |node: Option<&Arc<Node>>| node.map(|node| node.name_any());
    let mut out = Vec::new();
    for claim in state.claims.values() {
        out.push(format!(
            "{} on {:?} besides {:?}",
            claim.name_any(),
            name(state.node_of(claim)),
            state.duplicate_nodes(claim)
        ));
    }
    for node in state.nodes.values() {
        out.push(format!("{} of {:?}", node.name_any(), state.claim_of(node).map(|claim| claim.name_any())));
    }
    for key in ["n/p0", "n/p1", "n/p2", "n/p3", "m/p0", "m/p1"] {
        out.push(format!("{key} {}", state.plan_index.is_live(key, now)));
    }
    for owner in ["owner-1", "owner-2"] {
        out.push(format!("{owner} {}", state.plan_index.is_live_owner(owner, now)));
    }
    for pool in ["pool-1", "pool-2"] {
        let claims: Vec<_> = state.claim_index.of_pool(pool).collect();
        out.push(format!("{pool} {:?} {claims:?}", state.claim_index.usage(pool)));
    }
    for owner in ["owner-1", "owner-2"] {
        out.push(format!("{owner} {:?}", state.pods_of(owner).map(PodRecord::key).collect::<Vec<_>>()));
    }
    let on: BTreeMap<_, _> = state.pods_by_node.iter().collect();
    let held: Vec<_> = state.held_after(now).collect();
    let owners = state.pods_by_owner.len();
    out.push(format!("{on:?} {:?} {held:?} {owners} {:?} {:?}", state.unbound, state.in_flight, state.tainted_nodes));
    out.push(format!("{:?} {:?} {:?}", state.claim_index.leaving, state.planned, state.duplicate_nodes));
    out.join("\n")
}

proptest::proptest! {
    #![proptest_config(history::config())]

    #[test]
    fn the_indexes_of_every_history_equal_those_of_a_state_that_got_its_final_objects_only(events in history::history()) {
        let mut history = History::default();
        for event in events {
            history.apply(event);
            let (state, now) = (&history.state, history.now);
            assert_eq!(indexes(state, now), indexes(&history.fresh(), now), "after {event:?}");
            let names = |found: &dyn Fn(&NodeClaim) -> bool| -> BTreeSet<String> {
                state.claims.iter().filter(|(_, claim)| found(claim)).map(|(name, _)| name.clone()).collect()
            };
            assert_eq!(state.in_flight, names(&|claim| state.node_of(claim).is_none()));
            assert_eq!(state.claim_index.leaving, names(&|claim| claim.is_leaving()));
            for pod in state.pods.keys() {
                let naming = names(&|claim| state.plan_of(claim).pods.contains(pod));
                assert_eq!(state.plan_index.claims_of(pod).cloned().collect::<BTreeSet<_>>(), naming);
            }
        }
    }
}

/// Each pod of a DaemonSet changes its status; a change of the DaemonSet evaluates every node again.
#[test]
fn the_status_of_a_daemon_set_changes_nothing() {
    let set = |uid: &str, cpu: &str, ready: i32| -> k8s_openapi::api::apps::v1::DaemonSet {
        let container = serde_json::json!({"name": "c", "image": "i", "resources": {"requests": {"cpu": cpu}}});
        let spec = serde_json::json!({"selector": {}, "template": {"spec": {"containers": [container]}}});
        let status = serde_json::json!({"currentNumberScheduled": 9, "desiredNumberScheduled": 9, "numberMisscheduled": 0, "numberReady": ready});
        let meta = serde_json::json!({"name": "d", "namespace": "n", "uid": uid});
        serde_json::from_value(serde_json::json!({"metadata": meta, "spec": spec, "status": status})).unwrap()
    };
    let mut state = ClusterState::default();
    let changes = |state: &mut ClusterState, change: &dyn Fn(&mut ClusterState)| {
        let before = state.daemons.revision();
        change(state);
        state.daemons.revision() != before
    };
    assert!(changes(&mut state, &|state| state.apply_daemon_set(&set("1", "1", 0))));
    assert!(!changes(&mut state, &|state| state.apply_daemon_set(&set("1", "1", 5))));
    assert!(changes(&mut state, &|state| state.apply_daemon_set(&set("1", "2", 5))));
    assert!(changes(&mut state, &|state| state.apply_daemon_set(&set("2", "2", 5))), "its pods have another owner");
    assert!(changes(&mut state, &|state| state.apply_daemon_set(&set("2", "lots", 5))));
    assert!(state.daemons.is_empty());
    assert!(!changes(&mut state, &|state| state.daemons.delete("n/d")));
}

#[test]
fn a_late_response_about_a_deleted_object_leaves_its_successor_alone() {
    let meta = |uid: &str, last: bool| {
        let deleted = "2026-01-01T00:00:00Z";
        serde_json::json!({"uid": uid, "finalizers": if last { vec![] } else { vec!["f"] }, "deletionTimestamp": last.then_some(deleted)})
    };
    let object = |uid: &str, last: bool| serde_json::json!({ "metadata": meta(uid, last) });
    for last in [false, true] {
        let mut state = ClusterState::default();
        state.apply_node(objects::node("x", &object("1", false)));
        state.apply_claim(objects::claim("c", &object("2", false)));
        state.delete_node("x");
        state.delete_claim("c");
        for _ in 0..2 {
            state.apply_node(objects::node("x", &object("3", false)));
            state.apply_claim(objects::claim("c", &object("4", false)));
            assert!(state.nodes.contains_key("x") && state.claims.contains_key("c"), "{last}");
            state.apply_node(objects::node("x", &object("1", last)));
            state.apply_claim(objects::claim("c", &object("2", last)));
            assert_eq!((state.nodes.len(), state.claims.len()), (1, 1), "{last}");
        }
    }
}
