use serde_json::{Value, json};
use stowage_test_objects as objects;

use super::*;
use crate::test_support::history::{self, History};

const LATER: &str = "2030-01-01T00:00:00Z";

fn state(planned: &[&str], owners: &[(&str, &str)], until: &str) -> ClusterState {
    let mut state = ClusterState::default();
    let owners: BTreeMap<_, _> = owners.iter().map(|(pod, uid)| (*pod, json!({"uid": uid, "at_ms": 5_000}))).collect();
    let plan = json!({
        (labels::PLANNED_PODS): json!(planned).to_string(),
        (labels::PLANNED_OWNERS): json!(owners).to_string(),
        (labels::HOLD_UNTIL): until,
    });
    let patch = json!({"metadata": {"annotations": plan}, "status": objects::launched("i-1", &[])});
    state.apply_claim(objects::claim("c", &patch));
    state.apply_node(
        serde_json::from_value(json!({"metadata": {"name": "node-c"}, "spec": {"providerID": "aws:///z/i-1"}}))
            .unwrap(),
    );
    state
}

fn put(state: &mut ClusterState, name: &str, owner: &str, node: Option<&str>) {
    let created = if name.starts_with("early") { "1970-01-01T00:00:01Z" } else { "1970-01-01T00:00:09Z" };
    let pod = serde_json::from_value(json!({"metadata": {"name": name, "namespace": "n", "uid": name,
        "creationTimestamp": created,
        "ownerReferences": [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": owner, "controller": true}]},
        "spec": {"containers": [{"name": "c", "image": "i"}], "nodeName": node}}))
    .unwrap();
    state.apply_pod(&pod, UnixMillis(1));
}

#[test]
fn a_hold_is_live_until_its_pod_is_bound_or_gone() {
    let mut state = state(&["n/a", "n/gone"], &[], LATER);
    put(&mut state, "a", "rs", None);
    let holds = resolve(&state, UnixMillis(0));
    assert_eq!(holds.by_pod.get("n/a").map(String::as_str), Some("c"));
    assert_eq!(holds.by_claim["c"].len(), 1, "a deleted pod holds nothing");
    put(&mut state, "a", "rs", Some("node-c"));
    assert_eq!(resolve(&state, UnixMillis(0)), Holds::default());
}

#[test]
fn an_expired_hold_is_not_live() {
    let mut state = state(&["n/a"], &[], "2001-01-01T00:00:00Z");
    put(&mut state, "a", "rs", None);
    assert_eq!(resolve(&state, UnixMillis(1_700_000_000_000)), Holds::default());
}

#[test]
fn a_hold_without_room_is_dropped() {
    let node = |cpu: &str| {
        serde_json::from_value(json!({"metadata": {"name": "node-c"}, "spec": {"providerID": "aws:///z/i-1"},
            "status": {"allocatable": {"cpu": cpu, "memory": "1Gi", "pods": "10"}}}))
        .unwrap()
    };
    // One waits; the other runs on a node that it is moved from.
    for (owners, runs_on) in [(&[][..], None), (&[("n/a", "rs")], Some("source"))] {
        let mut state = state(&["n/a"], owners, LATER);
        state.apply_node(node("1"));
        for (name, bound) in [("a", runs_on), ("intruder", Some("node-c"))] {
            let pod = serde_json::from_value(json!({"metadata": {"name": name, "namespace": "n", "uid": name},
                "spec": {"nodeName": bound, "containers": [{"name": "c", "image": "i", "resources": {"requests": {"cpu": "600m"}}}]}}));
            state.apply_pod(&pod.unwrap(), UnixMillis(1));
        }
        assert_eq!(resolve(&state, UnixMillis(0)), Holds::default(), "{runs_on:?}");
        state.apply_node(node("2"));
        assert_eq!(resolve(&state, UnixMillis(0)).by_claim["c"].len(), 1, "both fit: {runs_on:?}");
    }
}

#[test]
fn a_copied_controller_uid_takes_no_room_in_another_namespace() {
    let mut state = state(&["n/old"], &[("n/old", "rs")], LATER);
    let owner = json!([{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "rs", "controller": true}]);
    let meta = json!({"namespace": "attacker", "ownerReferences": owner, "creationTimestamp": "1970-01-01T00:00:09Z"});
    state.apply_pod(&objects::pod("copy", &json!({ "metadata": meta })), UnixMillis(1));
    let holds = resolve(&state, UnixMillis(0));
    assert_eq!((holds.by_pod.len(), holds.by_claim["c"][0].pod.as_ref()), (0, None));
    let meta = json!({"ownerReferences": owner, "creationTimestamp": "1970-01-01T00:00:09Z"});
    state.apply_pod(&objects::pod("new", &json!({ "metadata": meta })), UnixMillis(1));
    assert_eq!(resolve(&state, UnixMillis(0)).by_pod.keys().collect::<Vec<_>>(), ["n/new"]);
}

#[test]
fn a_pod_that_two_plans_name_has_one_hold() {
    let mut state = state(&["n/a"], &[], LATER);
    put(&mut state, "a", "rs", None);
    let plan = json!({(labels::PLANNED_PODS): "[\"n/a\"]", (labels::HOLD_UNTIL): LATER});
    state.apply_claim(objects::claim("b", &json!({"metadata": {"annotations": plan}})));
    let holds = resolve(&state, UnixMillis(0));
    assert_eq!(holds.by_claim.keys().collect::<Vec<_>>(), ["b"]);
    assert_eq!(holds.by_pod["n/a"], "b");
}

#[test]
fn a_displaced_pods_successor_takes_its_room() {
    let mut state = state(&["n/old"], &[("n/old", "rs")], LATER);
    put(&mut state, "old", "rs", Some("node-old"));
    let holds = resolve(&state, UnixMillis(0));
    assert_eq!(holds.by_claim["c"][0].pod, None, "the original still runs elsewhere");
    put(&mut state, "early", "rs", Some("node-c"));
    let mut terminating: k8s_openapi::api::core::v1::Pod = serde_json::from_value(json!({"metadata": {
        "name": "old", "namespace": "n", "uid": "old", "deletionTimestamp": "1970-01-01T00:00:10Z", "ownerReferences": [
        {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "rs", "controller": true}]},
        "spec": {"nodeName": "node-old", "containers": [{"name": "c", "image": "i"}]}}))
    .unwrap();
    terminating.metadata.resource_version = Some("7".into());
    state.apply_pod(&terminating, UnixMillis(2));
    put(&mut state, "new", "rs", None);
    let holds = resolve(&state, UnixMillis(0));
    assert_eq!(holds.by_pod.get("n/new").map(String::as_str), Some("c"), "while the original terminates");
    state.delete_pod("n/old", UnixMillis(2));
    let holds = resolve(&state, UnixMillis(0));
    assert_eq!(holds.by_pod.get("n/new").map(String::as_str), Some("c"));
    put(&mut state, "new", "rs", Some("node-c"));
    assert_eq!(resolve(&state, UnixMillis(0)), Holds::default(), "the successor is bound");
}

#[test]
fn f13_the_holds_are_resolved_again_after_the_changes_that_affect_them_only() {
    let mut state = state(&["n/a", "n/old"], &[("n/old", "rs")], LATER);
    put(&mut state, "a", "other", None);
    put(&mut state, "old", "rs", Some("node-old"));
    let mut cache = HoldsCache::default();
    let mut after = |state: &mut ClusterState, change: &dyn Fn(&mut ClusterState)| {
        let before = cache.resolve(state, UnixMillis(5));
        change(state);
        !Arc::ptr_eq(&before, &cache.resolve(state, UnixMillis(6)))
    };
    assert!(!after(&mut state, &|state| put(state, "unplanned", "another", None)));
    assert!(!after(&mut state, &|state| put(state, "unplanned", "another", Some("node-x"))));
    assert!(!after(&mut state, &|state| put(state, "a", "other", None)), "nothing about it changed");
    assert!(after(&mut state, &|state| put(state, "successor", "rs", None)));
    assert!(after(&mut state, &|state| put(state, "intruder", "another", Some("node-c"))));
    assert!(after(&mut state, &|state| put(state, "a", "other", Some("node-c"))));
    assert!(after(&mut state, &|state| state.delete_pod("n/old", UnixMillis(7))));
    assert!(after(&mut state, &|state| state.delete_node("node-c")));
    let mut late = |now| Arc::as_ptr(&cache.resolve(&state, UnixMillis(now)));
    assert_eq!(late(7), late(60_000), "nothing changed at all");
}

/// Nothing changes meanwhile: only its end does.
#[test]
fn a_hold_with_an_end_of_its_own_is_over_then_in_a_quiet_cluster() {
    let mut state = ClusterState::default();
    let owner = |until: i64| json!({"uid": "rs", "at_ms": 0, "until_ms": until, "source": "from"});
    let plan = json!({(labels::PLANNED_PODS): "[\"n/a\",\"n/b\",\"n/c\"]", (labels::HOLD_UNTIL): LATER,
        (labels::PLANNED_OWNERS): json!({"n/a": owner(5_000), "n/b": owner(7_000), "n/c": owner(9_000)}).to_string()});
    put_node(&mut state, "to", &plan);
    put_node(&mut state, "from", &json!({}));
    let mut cache = HoldsCache::default();
    let mut held = |now| holds_of(&cache.resolve(&state, UnixMillis(now)), "to").len();
    assert_eq!([4_000, 5_000, 6_999, 7_000, 8_999, 9_000].map(&mut held), [3, 2, 2, 1, 1, 0]);
}

#[test]
fn a_change_of_an_ended_plan_counts_for_the_holds_of_others() {
    let mut state = state(&["n/old"], &[("n/old", "rs")], LATER);
    state.apply_node(objects::node("other", &json!({})));
    put(&mut state, "new", "rs", Some("other"));
    let mut cache = HoldsCache::default();
    let strays = |cache: &mut HoldsCache, state: &ClusterState| cache.resolve(state, UnixMillis(60_000)).strays.len();
    assert_eq!(strays(&mut cache, &state), 1);
    // The pod was planned on a node whose holds have ended.
    let ended = json!({(labels::PLANNED_PODS): "[\"n/new\"]", (labels::HOLD_UNTIL): "1970-01-01T00:00:01Z"});
    put_node(&mut state, "d", &ended);
    assert_eq!(strays(&mut cache, &state), 0, "a pod that a plan names is no stray");
    state.delete_claim("d");
    assert_eq!(strays(&mut cache, &state), 1);
}

#[test]
fn a_pod_in_two_plans_has_the_hold_that_is_left() {
    let mut state = state(&["n/a"], &[], LATER);
    let plan = json!({(labels::PLANNED_PODS): "[\"n/a\"]", (labels::HOLD_UNTIL): LATER});
    state.apply_claim(objects::claim("d", &json!({"metadata": {"annotations": plan}})));
    let pod = json!({"metadata": {"name": "a", "namespace": "n", "uid": "a"},
        "spec": {"containers": [{"name": "c", "image": "i", "resources": {"requests": {"cpu": "2"}}}]}});
    state.apply_pod(&serde_json::from_value(pod).unwrap(), UnixMillis(1));
    assert_eq!(resolve(&state, UnixMillis(0)).by_pod["n/a"], "c");
    state.apply_node(
        serde_json::from_value(json!({"metadata": {"name": "node-c"}, "spec": {"providerID": "aws:///z/i-1"},
            "status": {"allocatable": {"cpu": "1", "memory": "1Gi", "pods": "10"}}}))
        .unwrap(),
    );
    assert_eq!(resolve(&state, UnixMillis(0)).by_pod["n/a"], "d", "there is no room on the node of c");
}

#[test]
fn a_panic_over_one_claim_affects_no_other_and_its_pods_keep_their_room() {
    for step in [Step::Own, Step::Successors, Step::Fit] {
        let mut state = state(&["n/a", "n/old"], &[("n/old", "rs")], LATER);
        put(&mut state, "a", "other", None);
        put(&mut state, "new", "rs", None);
        put(&mut state, "b", "other", None);
        let plan = json!({(labels::PLANNED_PODS): "[\"n/b\"]", (labels::HOLD_UNTIL): LATER});
        let patch = json!({"metadata": {"annotations": plan}, "status": objects::launched("i-2", &[])});
        state.apply_claim(objects::claim("d", &patch));
        let calls = std::cell::Cell::new(0);
        let panics = |at, name: &str| {
            if (at, name) == (step, "c") {
                calls.set(calls.get() + 1);
                panic!("a defect");
            }
        };
        let (mut cache, mut now) = (HoldsCache::default(), UnixMillis(10_000));
        for pass in 0..3 {
            let holds = cache.resolve_by(&state, now, panics);
            assert_eq!((&*holds.by_pod["n/a"], &*holds.by_pod["n/b"]), ("c", "d"), "{step:?}, pass {pass}");
            assert!(
                holds.by_claim["c"].iter().all(|hold| hold.class.is_some()),
                "{step:?}: the extender counts their room"
            );
            assert_eq!(calls.get(), 1, "{step:?}: not evaluated again in each pass");
            state.revision += 1;
            state.hold_revision += 1;
            now += Duration::from_secs(10);
        }
        let holds = cache.resolve_by(&state, now, |_, _| ());
        assert_eq!(*holds, resolve(&state, now), "{step:?}: evaluated again after a while");
        assert_eq!(holds.by_pod["n/new"], "c");
    }
}

proptest::proptest! {
    #![proptest_config(history::config())]

    #[test]
    fn holds_that_follow_every_history_equal_new_ones(events in history::history()) {
        let mut history = History::default();
        let mut holds = HoldsCache::default();
        for event in events {
            history.apply(event);
            let (state, now) = (&history.state, history.now);
            assert_eq!(*holds.resolve(state, now), resolve(&history.fresh(), now), "after {event:?}");
        }
    }
}

fn holds_of<'h>(holds: &'h Holds, claim: &str) -> Vec<&'h str> {
    holds.by_claim.get(claim).into_iter().flatten().map(|hold| hold.original.as_str()).collect()
}

#[test]
fn a_successor_that_is_bound_elsewhere_ends_a_hold() {
    let mut state = state(&["n/old1", "n/old2"], &[("n/old1", "rs"), ("n/old2", "rs")], LATER);
    for other in ["other", "third"] {
        state.apply_node(objects::node(other, &json!({})));
    }
    assert_eq!(holds_of(&resolve(&state, UnixMillis(0)), "c"), ["n/old1", "n/old2"]);
    put(&mut state, "early", "rs", Some("other"));
    put(&mut state, "of-another", "rs2", Some("other"));
    let holds = resolve(&state, UnixMillis(0));
    assert_eq!((holds_of(&holds, "c").len(), holds.strays.len()), (2, 0), "no successors");
    put(&mut state, "stray", "rs", Some("other"));
    let holds = resolve(&state, UnixMillis(0));
    assert_eq!(holds_of(&holds, "c"), ["n/old2"]);
    assert_eq!(holds.strays, [("n/stray".to_owned(), "c".to_owned())].into());
    put(&mut state, "new", "rs", Some("node-c"));
    let holds = resolve(&state, UnixMillis(0));
    assert_eq!((holds_of(&holds, "c").len(), holds.strays.len()), (0, 1));
    put(&mut state, "scaled-up", "rs", Some("third"));
    assert_eq!(resolve(&state, UnixMillis(0)).strays.len(), 1, "no room is kept any longer");
}

/// Each of its two nodes admits a pod: both may be bound at any time.
#[test]
fn a_successor_has_the_room_of_the_node_that_admits_it() {
    let mut state = state(&["n/old1"], &[("n/old1", "rs")], LATER);
    let plan = json!({(labels::PLANNED_PODS): "[\"n/old2\"]", (labels::HOLD_UNTIL): LATER,
        (labels::PLANNED_OWNERS): json!({"n/old2": {"uid": "rs", "at_ms": 5_000}}).to_string()});
    state.apply_claim(objects::claim("d", &json!({"metadata": {"annotations": plan}})));
    let mut admitted = |pods: [(&str, Option<&str>); 3]| {
        for (name, claim) in pods {
            let owner =
                json!([{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "rs", "controller": true}]);
            let meta = json!({"ownerReferences": owner, "creationTimestamp": "1970-01-01T00:00:09Z"});
            let tolerations = claim.map(|uid| json!([{"key": labels::PLANNED_TAINT, "value": uid}]));
            let spec = json!({"tolerations": tolerations});
            state.apply_pod(&objects::pod(name, &json!({"metadata": meta, "spec": spec})), UnixMillis(1));
        }
        let holds = resolve(&state, UnixMillis(0));
        ["c", "d"].map(|claim| holds.by_claim[claim][0].pod.clone().unwrap_or_default())
    };
    assert_eq!(admitted([("p", None), ("q", None), ("r", None)]), ["n/p", "n/q"]);
    assert_eq!(admitted([("p", None), ("q", None), ("r", Some("uid-c"))]), ["n/r", "n/p"]);
    assert_eq!(admitted([("p", Some("uid-d")), ("q", None), ("r", None)]), ["n/q", "n/p"]);
    assert_eq!(admitted([("p", Some("uid-d")), ("q", Some("uid-c")), ("r", None)]), ["n/q", "n/p"]);
    assert_eq!(admitted([("p", Some("uid-gone")), ("q", Some("uid-gone")), ("r", None)]), ["n/r", "n/p"]);
}

#[test]
fn a_stray_ends_the_hold_of_the_plan_that_it_may_follow_and_no_arrival_is_a_stray() {
    // `c` planned at 5 s, `b` at 8 s and `d` at 20 s; all successors were created at 9 s.
    let mut state = state(&["n/old1"], &[("n/old1", "rs")], LATER);
    for (claim, at) in [("b", 8_000), ("d", 20_000)] {
        let original = format!("n/old-{claim}");
        let plan = json!({(labels::PLANNED_PODS): json!([original]).to_string(),
            (labels::PLANNED_OWNERS): json!({original: {"uid": "rs", "at_ms": at}}).to_string(), (labels::HOLD_UNTIL): LATER});
        put_node(&mut state, claim, &plan);
    }
    put(&mut state, "on-b", "rs", Some("node-b"));
    let left = |state: &ClusterState| {
        let holds = resolve(state, UnixMillis(0));
        (["b", "c", "d"].map(|claim| holds_of(&holds, claim).len()), holds.strays)
    };
    assert_eq!(left(&state), ([0, 1, 1], BTreeMap::new()));
    put(&mut state, "stray", "rs", Some("elsewhere"));
    assert_eq!(left(&state), ([0, 0, 1], [("n/stray".to_owned(), "c".to_owned())].into()));
    put(&mut state, "second", "rs", Some("elsewhere"));
    assert_eq!(left(&state).0, [0, 0, 1], "the plan of d is for pods that are created later");
    // More arrived than were planned: one follows the plan of another node.
    put(&mut state, "stray", "rs", Some("node-b"));
    put(&mut state, "second", "other", Some("elsewhere"));
    assert_eq!(left(&state).0, [0, 0, 1]);
}

/// A claim with its node.
fn put_node(state: &mut ClusterState, name: &str, annotations: &Value) {
    let status = objects::launched(name, &[]);
    state.apply_claim(objects::claim(name, &json!({"metadata": {"annotations": annotations}, "status": status})));
    let spec = json!({"providerID": format!("aws:///z/{name}")});
    state.apply_node(objects::node(&format!("node-{name}"), &json!({"spec": spec})));
}

/// The plan of a node that pods of one controller move to, each from a node of its own, `old-NAME`.
fn of_move(pods: &[&str], until: UnixMillis) -> Value {
    let owner = |name: &&str| {
        let owner = json!({"uid": "rs", "at_ms": 0, "until_ms": until.0, "source": format!("old-{name}")});
        (format!("n/{name}"), owner)
    };
    let owners: serde_json::Map<String, Value> = pods.iter().map(owner).collect();
    json!({(labels::PLANNED_PODS): json!(owners.keys().collect::<Vec<_>>()).to_string(),
        (labels::HOLD_UNTIL): "1970-01-01T00:00:00Z", (labels::PLANNED_OWNERS): json!(owners).to_string()})
}

/// The holds of the claims to-1 and to-2, and the strays.
fn left(state: &ClusterState, now: i64) -> ([usize; 2], usize) {
    let holds = resolve(state, UnixMillis(now));
    (["to-1", "to-2"].map(|claim| holds_of(&holds, claim).len()), holds.strays.len())
}

/// Pods of one controller leave two nodes, in two moves: the successor of the first has come and its old node is gone.
#[test]
fn a_successor_that_came_in_an_earlier_move_takes_no_room_of_a_later_one() {
    for (case, to_1, to_2, before, after) in [
        ("two nodes", &["a"][..], &["b", "c"][..], [0, 2], [0, 1]),
        ("one node", &["a", "b", "c"], &[], [2, 0], [1, 0]),
    ] {
        let mut state = ClusterState::default();
        for old in ["old-a", "old-b", "old-c", "elsewhere"] {
            put_node(&mut state, old, &json!({}));
        }
        put_node(&mut state, "to-1", &of_move(to_1, UnixMillis(100_000)));
        put_node(&mut state, "to-2", &of_move(to_2, UnixMillis(100_000)));
        put(&mut state, "successor-of-a", "rs", Some("node-to-1"));
        assert_eq!(left(&state, 10_000), (before, 0), "{case}: it has come");
        state.delete_claim("old-a");
        assert_eq!(left(&state, 10_000), (before, 0), "{case}: its old node is gone");
        put(&mut state, "stray", "rs", Some("node-elsewhere"));
        assert_eq!(left(&state, 10_000), (after, 1), "{case}: another one is bound elsewhere");
        put(&mut state, "successor-of-b", "rs", Some(if to_2.is_empty() { "node-to-1" } else { "node-to-2" }));
        assert_eq!(left(&state, 10_000), ([0, 0], 1), "{case}: all have come");
    }
}

#[test]
fn a_successor_without_a_hold_takes_no_room_of_another_move() {
    let mut state = ClusterState::default();
    for old in ["old-a", "old-b"] {
        put_node(&mut state, old, &json!({}));
    }
    let mut plan = of_move(&["a"], UnixMillis(50_000));
    put_node(&mut state, "to-1", &plan);
    put_node(&mut state, "to-2", &of_move(&["b"], UnixMillis(100_000)));
    put(&mut state, "successor-of-a", "rs", Some("node-to-1"));
    assert_eq!(left(&state, 10_000), ([0, 1], 0));
    assert_eq!(left(&state, 60_000), ([0, 1], 0), "its hold has ended");
    plan[labels::DISRUPTING] = json!("Drifted/");
    put_node(&mut state, "to-1", &plan);
    assert_eq!(left(&state, 10_000), ([0, 1], 0), "its node leaves");
}

/// Two pods of one controller that are gone are planned, one on each node; one or two others of it wait.
#[test]
fn a_waiting_pod_gets_the_room_that_moves_keep_the_latest_first() {
    for (sources, one, two) in [
        (&["old-a", "old-b"][..], ["n/w", ""], ["n/w", "n/x"]),
        (&["old-b"], ["", "n/w"], ["n/x", "n/w"]),
        (&["old-a"], ["n/w", ""], ["n/w", "n/x"]),
        (&[], ["", "n/w"], ["n/x", "n/w"]),
    ] {
        let mut state = ClusterState::default();
        for source in sources {
            put_node(&mut state, source, &json!({}));
        }
        put_node(&mut state, "to-1", &of_move(&["a"], UnixMillis(100_000)));
        let mut later = of_move(&["b"], UnixMillis(100_000));
        let owners = later[labels::PLANNED_OWNERS].as_str().map(|owners| owners.replace(":0,", ":5000,"));
        later[labels::PLANNED_OWNERS] = json!(owners);
        put_node(&mut state, "to-2", &later);
        let pods = |state: &ClusterState| {
            let holds = resolve(state, UnixMillis(10_000));
            ["to-1", "to-2"].map(|claim| {
                let pod = holds.by_claim.get(claim).and_then(|holds| holds[0].pod.clone());
                pod.inspect(|pod| assert_eq!(holds.by_pod[pod], claim)).unwrap_or_default()
            })
        };
        put(&mut state, "w", "rs", None);
        assert_eq!(pods(&state), one, "{sources:?} are there");
        put(&mut state, "x", "rs", None);
        assert_eq!(pods(&state), two, "{sources:?} are there");
    }
}

/// The room that a move keeps for a pod: while the pod runs, and while its node drains; not for a successor that came and has ended since.
#[test]
fn a_move_keeps_room_while_the_pod_runs_or_its_source_is_there() {
    const SOON: UnixMillis = UnixMillis(100_000);
    let owner = json!({"uid": "rs", "at_ms": 0, "until_ms": SOON.0, "source": "old"});
    let annotations = json!({(labels::PLANNED_PODS): "[\"n/a\"]", (labels::HOLD_UNTIL): "1970-01-01T00:00:00Z",
        (labels::PLANNED_OWNERS): json!({"n/a": owner}).to_string()});
    let mut state = ClusterState::default();
    put_node(&mut state, "old", &json!({}));
    put_node(&mut state, "new", &annotations);
    let owners = json!([{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "rs", "controller": true}]);
    let meta = json!({"ownerReferences": owners, "creationTimestamp": "1970-01-01T00:00:05Z"});
    let pod = |node: &str| json!({"metadata": meta, "spec": {"nodeName": node}});
    let held = |state: &ClusterState, now| resolve(state, now).by_claim.get("new").map_or(0, Vec::len);
    state.apply_pod(&objects::pod("a", &pod("node-old")), UnixMillis(1));
    let last = UnixMillis(SOON.0 - 1);
    assert_eq!((held(&state, last), held(&state, SOON)), (1, 0), "it runs");
    state.delete_pod("n/a", UnixMillis(6_000));
    assert_eq!((held(&state, last), held(&state, SOON)), (1, 0), "its node drains");
    state.apply_pod(&objects::pod("b", &pod("node-new")), UnixMillis(7_000));
    assert_eq!(held(&state, last), 0, "its successor has come");
    state.delete_claim("old");
    state.delete_pod("n/b", UnixMillis(8_000));
    assert_eq!(held(&state, last), 0, "the successor has ended");
    for (case, created, claim, kept) in [
        ("that its node admits", 0, "new", 1),
        ("that another node admits", 5, "other", 1),
        ("that is older than the plan, and not admitted", -1, "other", 0),
    ] {
        let tolerations = json!([{"key": labels::PLANNED_TAINT, "value": format!("uid-{claim}")}]);
        let created = UnixMillis(created * 1_000).rfc3339();
        let waits = json!({"metadata": {"ownerReferences": owners, "creationTimestamp": created}, "spec": {"tolerations": tolerations}});
        state.apply_pod(&objects::pod("c", &waits), UnixMillis(8_000));
        assert_eq!((held(&state, last), held(&state, SOON)), (kept, 0), "a pod waits {case}");
    }
    state.delete_pod("n/c", UnixMillis(9_000));
    // A later plan for other pods makes the other holds of the node longer.
    let mut longer = NodeClaim::clone(&state.claims["new"]);
    longer.metadata.annotations.as_mut().unwrap().insert(labels::HOLD_UNTIL.into(), LATER.into());
    state.apply_claim(longer);
    assert_eq!((held(&state, last), held(&state, SOON)), (0, 0), "it is not kept again");
}

/// A pod of a StatefulSet has the name of the one that it succeeds.
#[test]
fn a_successor_of_the_same_name_that_is_bound_elsewhere_ends_the_hold() {
    for (case, source, node, is_held) in [
        ("runs on its old node", Some("node-old"), "node-old", true),
        ("was created again, and runs on a third node", Some("node-old"), "node-third", false),
        ("was created again, and runs on the planned node", Some("node-old"), "node-new", false),
        ("may run on its old node, which the plan does not name", None, "node-third", true),
    ] {
        let owner = json!({"uid": "s", "at_ms": 5_000, "until_ms": 100_000, "source": "old", "node": source});
        let plan = json!({(labels::PLANNED_PODS): "[\"n/s-0\"]", (labels::HOLD_UNTIL): LATER,
            (labels::PLANNED_OWNERS): json!({"n/s-0": owner}).to_string()});
        let mut state = ClusterState::default();
        put_node(&mut state, "old", &json!({}));
        put_node(&mut state, "new", &plan);
        put(&mut state, "s-0", "s", Some(node));
        let holds = resolve(&state, UnixMillis(6_000));
        assert_eq!(holds_of(&holds, "new").len(), usize::from(is_held), "the pod {case}");
        let stray = (node == "node-third" && !is_held).then(|| ("n/s-0".to_owned(), "new".to_owned()));
        assert_eq!(holds.strays, stray.into_iter().collect(), "the pod {case}");
    }
}
