use serde_json::json;
use stowage_test_objects as objects;

use super::*;
use crate::decisions::holds::resolve;

const LATER: &str = "2099-01-01T00:00:00Z";

fn claim(state: &mut ClusterState, name: &str, pods: &[&str]) {
    let plan = json!({(labels::PLANNED_PODS): json!(pods).to_string(), (labels::HOLD_UNTIL): LATER});
    let status = objects::launched(name, &[]);
    state.apply_claim(objects::claim(name, &json!({"metadata": {"annotations": plan}, "status": status})));
}

fn node(state: &mut ClusterState, name: &str, tainted_at: Option<&str>) {
    let taints = tainted_at.map(|at| {
        json!([{"key": labels::PLANNED_TAINT, "value": format!("uid-{name}"), "effect": "NoSchedule", "timeAdded": at}])
    });
    let node = json!({"metadata": {"name": format!("node-{name}"), "labels": {(labels::REGISTERED): "true"}},
        "spec": {"providerID": format!("aws:///z/{name}"), "taints": taints}, "status": {"allocatable": {"pods": "9"}}});
    state.apply_node(serde_json::from_value(node).unwrap());
}

fn pod(state: &mut ClusterState, name: &str, tolerations: serde_json::Value, bound: Option<&str>) {
    let pod = json!({"metadata": {"name": name, "namespace": "n", "uid": name},
        "spec": {"containers": [], "tolerations": tolerations, "nodeName": bound}});
    state.apply_pod(&serde_json::from_value(pod).unwrap(), UnixMillis(1));
}

#[test]
fn planned_pods_are_admitted_once_when_their_node_is_open_and_tainted() {
    let admitted = |node_of: fn(&mut ClusterState), tolerations: serde_json::Value| {
        let mut state = ClusterState::default();
        claim(&mut state, "c", &["n/a"]);
        node_of(&mut state);
        pod(&mut state, "a", tolerations, None);
        let pods = to_admit(&state, &resolve(&state, UnixMillis(5)), UnixMillis(5)).into_iter();
        pods.map(|admission| (admission.pod.name, admission.claim, admission.first)).collect::<Vec<_>>()
    };
    let want = |first| vec![("a".to_owned(), "uid-c".to_owned(), first)];
    let tainted: fn(&mut ClusterState) = |state| node(state, "c", Some(LATER));
    assert_eq!(admitted(|_| {}, json!(null)), [], "its node is still booting");
    assert_eq!(admitted(tainted, json!(null)), want(true));
    assert_eq!(admitted(tainted, json!([{"operator": "Exists", "key": "x"}])), want(false));
    let own = |value: &str| json!([{"key": labels::PLANNED_TAINT, "value": value, "effect": "NoSchedule"}]);
    assert_eq!(admitted(tainted, own("uid-other")), want(false), "re-planned");
    assert_eq!(admitted(tainted, own("uid-c")), []);
    assert_eq!(admitted(|state| node(state, "c", None), json!(null)), [], "open to all");
}

#[test]
fn pods_that_the_scheduler_attempts_first_are_admitted_first() {
    let mut state = ClusterState::default();
    claim(&mut state, "c", &["n/a", "n/b", "n/c", "n/d"]);
    node(&mut state, "c", Some(LATER));
    let rejected = json!([{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}]);
    for (name, conditions, at) in [("a", rejected, 1), ("b", json!([]), 30), ("c", json!([]), 10), ("d", json!([]), 20)]
    {
        state.apply_pod(&objects::pod(name, &json!({"status": {"conditions": conditions}})), UnixMillis(at));
    }
    let admitted = to_admit(&state, &resolve(&state, UnixMillis(50)), UnixMillis(50)).into_iter();
    let names: Vec<String> = admitted.map(|admission| admission.pod.name).collect();
    assert_eq!(names, ["c", "d", "b", "a"], "those in its queue, then those that it comes back to");
}

#[test]
fn a_pass_admits_a_limited_number_of_pods_and_the_next_one_goes_on() {
    let mut state = ClusterState::default();
    let names: Vec<String> = (0..=MAX_ADMISSIONS).map(|number| format!("p{number:03}")).collect();
    let keys: Vec<String> = names.iter().map(|name| format!("n/{name}")).collect();
    claim(&mut state, "c", &keys.iter().map(String::as_str).collect::<Vec<_>>());
    node(&mut state, "c", Some(LATER));
    for name in &names {
        pod(&mut state, name, json!(null), None);
    }
    let (mut taints, now) = (PlannedTaints::default(), UnixMillis(5));
    let holds = resolve(&state, now);
    let mut pass = |now: UnixMillis| {
        let actions = taints.choose(&state, &holds, &BTreeSet::new(), PlacementMode::Nominate, now);
        actions.admit.into_iter().map(|admission| admission.pod.name).collect::<Vec<_>>()
    };
    assert_eq!(pass(now), names[..MAX_ADMISSIONS]);
    assert_eq!(pass(now + RETRY_PERIOD)[..2], [&*names[MAX_ADMISSIONS], "p000"], "a webhook refuses the first ones");
    assert_eq!(
        pass(now + RETRY_PERIOD),
        names[MAX_ADMISSIONS - 1..MAX_ADMISSIONS],
        "tried before the others were again"
    );
    assert!(pass(now + RETRY_PERIOD).is_empty());
}

#[test]
fn pods_of_a_hard_spread_are_admitted_in_balanced_order() {
    let mut state = ClusterState::default();
    let put = |state: &mut ClusterState, name: &str, admitted: Option<&str>, bound: Option<&str>| {
        let tolerations = admitted.map(
            |claim| json!([{"key": labels::PLANNED_TAINT, "value": format!("uid-{claim}"), "effect": "NoSchedule"}]),
        );
        let rejected = json!({"type": "PodScheduled", "status": "False", "reason": "Unschedulable"});
        let pod = json!({"metadata": {"name": name, "namespace": "n", "uid": name}, "status": {"conditions": [rejected]},
            "spec": {"containers": [], "nodeName": bound, "tolerations": tolerations, "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": labels::ZONE,
                "whenUnsatisfiable": "DoNotSchedule", "labelSelector": {"matchLabels": {"app": "s"}}}]}});
        state.apply_pod(&serde_json::from_value(pod).unwrap(), UnixMillis(1));
    };
    let zoned = |state: &mut ClusterState, name: &str, tainted_at: &str| {
        node(state, name, Some(tainted_at));
        let mut open = Node::clone(&state.nodes[&format!("node-{name}")]);
        open.metadata.labels.get_or_insert_default().insert(labels::ZONE.into(), format!("zone-{name}"));
        state.apply_node(open);
    };
    let admitted = |state: &ClusterState, now: i64| {
        let now = UnixMillis(now);
        let mut names: Vec<String> =
            to_admit(state, &resolve(state, now), now).into_iter().map(|admission| admission.pod.name).collect();
        names.sort();
        names.join(" ")
    };
    claim(&mut state, "x", &["n/x1", "n/x2", "n/x3", "n/x4"]);
    claim(&mut state, "y", &["n/y1", "n/y2", "n/y3", "n/y4"]);
    for name in ["x1", "x2", "x3", "x4", "y1", "y2", "y3", "y4"] {
        put(&mut state, name, None, None);
    }
    let opened = "1970-01-01T00:01:00Z";
    let soon = 61_000;
    zoned(&mut state, "x", opened);
    assert_eq!(admitted(&state, soon), "x1 x2", "the zone of the other claim is unknown: no domain to balance with");
    let mut known = NodeClaim::clone(&state.claims["y"]);
    known.metadata.labels.get_or_insert_default().insert(labels::ZONE.into(), "zone-y".into());
    state.apply_claim(known);
    assert_eq!(admitted(&state, soon), "x1", "one more than in the other zone, whose node is not open");
    zoned(&mut state, "y", opened);
    assert_eq!(admitted(&state, soon), "x1 x2 y1 y2", "twice the skew in each zone");
    put(&mut state, "x1", Some("x"), None);
    put(&mut state, "x2", Some("x"), None);
    put(&mut state, "y1", Some("y"), Some("node-y"));
    assert_eq!(admitted(&state, soon), "y2 y3", "balanced, and at most two unbound in each zone");
    assert_eq!(admitted(&state, 60_000 + 10_000), "x3 x4 y2 y3 y4", "after the order timeout");
    let mut queued = state.pods["n/y4"].clone();
    queued.scheduling = Scheduling::Unattempted;
    state.pods.insert("n/y4".into(), queued);
    assert_eq!(admitted(&state, soon), "y2 y3 y4", "the first attempt of y4 is still to come");
}

#[test]
fn the_taint_is_removed_when_its_pods_are_bound_and_no_others_wait() {
    use PlacementMode::{Extender, Nominate, Off};
    let (own, other) = (Some("node-c"), Some("node-d"));
    for (case, pods, placement, rejected, is_planning, second, removed) in [
        ("its pod waits", (None, other), Nominate, &[][..], false, 1, false),
        ("another pod waits", (own, None), Nominate, &[], false, 1, false),
        ("both wait for long", (None, None), Nominate, &[], false, 60, false),
        ("another pod waits for long", (own, None), Nominate, &[], false, 60, true),
        ("no pod waits", (own, other), Nominate, &[], false, 1, true),
        ("others are about to be planned", (own, other), Nominate, &[], true, 1, false),
        ("for long", (own, other), Nominate, &[], true, 60, true),
        ("its pod waits, with the extender", (None, other), Extender, &[], false, 1, false),
        ("others are about to be planned, with the extender", (own, other), Extender, &[], true, 1, false),
        ("no pod waits, with the extender", (own, other), Extender, &[], false, 1, true),
        ("left over from another placement mode", (None, None), Off, &[], true, 1, true),
        ("a pod can't be admitted", (None, None), Nominate, &["uid-c"], true, 1, true),
    ] {
        let mut state = ClusterState::default();
        claim(&mut state, "c", &["n/a"]);
        claim(&mut state, "d", &["n/b"]);
        node(&mut state, "c", Some("1970-01-01T00:00:00Z"));
        pod(&mut state, "a", json!(null), pods.0);
        pod(&mut state, "b", json!(null), pods.1);
        node(&mut state, "d", None);
        let now = UnixMillis(second * 1_000);
        let rejected = rejected.iter().map(|claim| (*claim).to_owned()).collect();
        let holds = resolve(&state, now);
        let untainted = to_untaint(&state, &holds, &BTreeSet::new(), placement, &rejected, is_planning, now);
        assert_eq!(untainted, if removed { vec!["node-c"] } else { vec![] }, "{case}");
    }
}

/// The room of a pod that is gone, whose successor may never come, keeps its own node closed, and no other.
#[test]
fn a_new_node_is_closed_while_a_pod_of_another_node_is_about_to_move() {
    let mut state = ClusterState::default();
    claim(&mut state, "c", &[]);
    node(&mut state, "c", Some("1970-01-01T00:00:00Z"));
    let owners = json!({"n/b": {"uid": "rs", "at_ms": 0}}).to_string();
    let plan =
        json!({(labels::PLANNED_PODS): "[\"n/b\"]", (labels::PLANNED_OWNERS): owners, (labels::HOLD_UNTIL): LATER});
    let meta = json!({"annotations": plan});
    state.apply_claim(objects::claim("d", &json!({"metadata": meta, "status": objects::launched("d", &[])})));
    node(&mut state, "d", Some("1970-01-01T00:00:00Z"));
    let untainted = |state: &ClusterState| {
        let now = UnixMillis(1_000);
        let (holds, placement) = (resolve(state, now), PlacementMode::Nominate);
        to_untaint(state, &holds, &BTreeSet::new(), placement, &HashSet::new(), false, now)
    };
    pod(&mut state, "b", json!(null), Some("node-old"));
    assert_eq!(untainted(&state), Vec::<String>::new());
    state.delete_pod("n/b", UnixMillis(2));
    assert_eq!(untainted(&state), ["node-c"]);
}

#[test]
fn a_pod_is_admitted_again_after_a_second_and_abandoned_after_three_rejections() {
    let mut state = ClusterState::default();
    claim(&mut state, "c", &["n/a"]);
    node(&mut state, "c", Some(LATER));
    pod(&mut state, "a", json!(null), None);
    let holds = resolve(&state, UnixMillis(5));
    let mut taints = PlannedTaints::default();
    let pass = |taints: &mut PlannedTaints, state: &ClusterState, now| {
        let actions = taints.choose(state, &holds, &BTreeSet::new(), PlacementMode::Nominate, UnixMillis(now));
        (actions.admit, actions.untaint.len())
    };
    let (admissions, _) = pass(&mut taints, &state, 1_000);
    assert_eq!(admissions.len(), 1);
    assert_eq!(pass(&mut taints, &state, 1_999).0, [], "admitted a moment ago");
    assert_eq!(pass(&mut taints, &state, 2_000).0, admissions);
    assert_eq!(taints.record(&admissions[0], false), None);
    assert_eq!(taints.record(&admissions[0], false), None);
    assert_eq!(taints.record(&admissions[0], true), None, "a success starts the count again");
    assert_eq!([1, 2, 3, 4].map(|_| taints.record(&admissions[0], false)), [None, None, Some(3), Some(4)]);
    taints.forget_deleted(&state);
    assert_eq!(pass(&mut taints, &state, 3_000).1, 1, "the taint is removed");
    state.delete_pod("n/a", UnixMillis(2));
    taints.forget_deleted(&state);
    assert!(taints.rejections.is_empty() && !taints.rejected.is_empty());
    taints.forget_deleted(&ClusterState::default());
    assert!(taints.rejected.is_empty());
}

#[test]
fn no_pod_is_admitted_where_placement_is_off() {
    let mut state = ClusterState::default();
    claim(&mut state, "c", &["n/a"]);
    node(&mut state, "c", Some(LATER));
    pod(&mut state, "a", json!(null), None);
    for (placement, admitted) in [(PlacementMode::Nominate, 1), (PlacementMode::Extender, 1), (PlacementMode::Off, 0)] {
        let holds = resolve(&state, UnixMillis(5));
        let admissions =
            PlannedTaints::default().choose(&state, &holds, &BTreeSet::new(), placement, UnixMillis(5)).admit;
        assert_eq!(admissions.len(), admitted, "{placement:?}");
    }
}

#[test]
fn a_node_is_open_while_daemon_set_pods_are_missing_that_its_taint_keeps_off() {
    let second = 1_000;
    let nothing = json!(null);
    let exists = json!([{"operator": "Exists"}]);
    let spread = json!([{"maxSkew": 1, "topologyKey": labels::ZONE, "whenUnsatisfiable": "DoNotSchedule",
        "labelSelector": {"matchLabels": {"app": "s"}}}]);
    for (case, tolerations, daemon_on, own, other, other_spread, effect, age, changed) in [
        ("its own pod waits", &nothing, None, None, None, &nothing, CLOSED, 1, None),
        ("its own pod is bound", &nothing, None, Some("node-c"), None, &nothing, CLOSED, 1, Some(OPEN)),
        ("it is open", &nothing, None, Some("node-c"), None, &nothing, OPEN, 1, None),
        ("a pod with a spread waits", &nothing, None, Some("node-c"), None, &spread, CLOSED, 1, None),
        ("a pod with a spread waits for long", &nothing, None, Some("node-c"), None, &spread, CLOSED, 30, Some(OPEN)),
        ("its own pod waits for long", &nothing, None, None, None, &nothing, CLOSED, 30, Some(OPEN)),
        ("the DaemonSet pod does not come", &nothing, None, None, None, &nothing, OPEN, 39, None),
        ("nor after forty seconds", &nothing, None, None, None, &nothing, OPEN, 40, Some(CLOSED)),
        ("the DaemonSet pod is bound", &nothing, Some("node-c"), Some("node-c"), None, &nothing, OPEN, 1, Some(CLOSED)),
        ("it is bound elsewhere", &nothing, Some("node-d"), Some("node-c"), None, &nothing, OPEN, 1, None),
        ("it tolerates the taint", &exists, None, Some("node-c"), None, &nothing, CLOSED, 1, None),
        ("the taint is removed", &nothing, None, Some("node-c"), Some("node-d"), &nothing, OPEN, 1, None),
    ] {
        let mut state = ClusterState::default();
        claim(&mut state, "c", &["n/a"]);
        claim(&mut state, "d", &["n/b"]);
        node(&mut state, "c", Some("1970-01-01T00:00:00Z"));
        let mut tainted = Node::clone(&state.nodes["node-c"]);
        tainted.spec.as_mut().unwrap().taints.as_mut().unwrap()[0].effect = effect.into();
        state.apply_node(tainted);
        let template = json!({"spec": {"tolerations": tolerations, "containers": [{"name": "c"}]}});
        let set = json!({"metadata": {"name": "d", "namespace": "n", "uid": "set"}, "spec": {"selector": {}, "template": template}});
        state.apply_daemon_set(&serde_json::from_value(set).unwrap());
        let owners =
            json!([{"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "d", "uid": "set", "controller": true}]);
        if let Some(node) = daemon_on {
            let pod = json!({"metadata": {"ownerReferences": owners}, "spec": {"nodeName": node}});
            state.apply_pod(&objects::pod("daemon", &pod), UnixMillis(1));
        }
        for (name, bound, spread) in [("a", own, &nothing), ("b", other, other_spread)] {
            let pod =
                json!({"metadata": {"uid": name}, "spec": {"nodeName": bound, "topologySpreadConstraints": spread}});
            state.apply_pod(&objects::pod(name, &pod), UnixMillis(1));
        }
        let now = UnixMillis(age * second);
        let (holds, none) = (resolve(&state, now), BTreeSet::new());
        let actions = PlannedTaints::default().choose(&state, &holds, &none, PlacementMode::Nominate, now);
        let expected = changed.map(|effect| Change { node: "node-c".into(), effect });
        assert_eq!(actions.change, expected.into_iter().collect::<Vec<_>>(), "{case}");
        assert_eq!(actions.untaint.is_empty(), case != "the taint is removed", "{case}");
    }
}

#[test]
fn a_node_that_is_not_new_has_the_taint_exactly_while_it_is_to_be_closed() {
    let mut state = ClusterState::default();
    claim(&mut state, "c", &["n/a"]);
    pod(&mut state, "a", json!(null), None);
    node(&mut state, "c", None);
    let closed = BTreeSet::from(["node-c".to_owned(), "node-gone".to_owned()]);
    let mut taints = PlannedTaints::default();
    let choose = |taints: &mut PlannedTaints, state: &ClusterState, closed: &BTreeSet<String>, placement, now| {
        let now = UnixMillis(now);
        let actions = taints.choose(state, &resolve(state, now), closed, placement, now);
        (actions.close, actions.untaint)
    };
    let mut initialized = objects::launched("c", &["Initialized"]);
    initialized["conditions"][0]["lastTransitionTime"] = json!("1970-01-01T00:59:59Z");
    let mut known = NodeClaim::clone(&state.claims["c"]);
    known.status = serde_json::from_value(initialized).unwrap();
    state.apply_claim(known);
    let old = 3_600_000;
    let nothing = (vec![], vec![]);
    assert_eq!(choose(&mut taints, &state, &closed, PlacementMode::Off, old), nothing);
    let taint = planned_taint(&state.claims["c"], UnixMillis(old)).unwrap();
    let close = vec![("node-c".to_owned(), taint)];
    assert_eq!(choose(&mut taints, &state, &closed, PlacementMode::Nominate, old), (close, vec![]));
    assert_eq!(choose(&mut taints, &state, &closed, PlacementMode::Nominate, old + 999), nothing, "tried a moment ago");
    assert_eq!(choose(&mut taints, &state, &closed, PlacementMode::Nominate, old + 1_000).0.len(), 1, "again");
    node(&mut state, "c", Some("1970-01-01T01:00:00Z"));
    assert_eq!(choose(&mut taints, &state, &closed, PlacementMode::Nominate, old + 2_000), nothing);
    let removed = (vec![], vec!["node-c".to_owned()]);
    let none = BTreeSet::new();
    assert_eq!(
        choose(&mut taints, &state, &none, PlacementMode::Nominate, old + 2_000),
        removed,
        "by a new process, too"
    );
    taints.rejected.insert("uid-c".into());
    assert_eq!(
        choose(&mut taints, &state, &closed, PlacementMode::Nominate, old + 2_000),
        removed,
        "a pod can't be admitted"
    );
    node(&mut state, "c", None);
    assert_eq!(choose(&mut taints, &state, &closed, PlacementMode::Nominate, old + 4_000), nothing, "nor closed again");
}
