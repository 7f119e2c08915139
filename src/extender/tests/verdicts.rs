//! Table tests of filter and prioritize, and properties of every view.

use std::time::Duration;

use proptest::prelude::*;
use stowage_model::time::UnixMillis;
use stowage_model::units::{Bytes, Millicores};

use super::*;
use crate::extender::prioritize::MAX_SCORE;

#[test]
fn names_are_echoed_in_order_without_holds_plans_and_disruption() {
    let view = view(vec![node("a", vec![]), node("b", vec![])], []);
    let body = asked(&pod("p", "64"), &["b", "ghost", "a"]);
    let result = filter(&view, NOW, serde_json::from_str(&body).unwrap());
    assert_eq!(result.answer, Answer::Unrestrained);
    assert_eq!(filtered(&view, NOW, &pod("p", "64"), &["b", "ghost", "a"]), pass(&["b", "ghost", "a"]));
}

#[test]
fn a_planned_pod_passes_on_its_node_only_until_the_plan_ends() {
    let view = view(vec![node("a", vec![hold("default/p", 1000)]), node("b", vec![])], [plan("default/p", Some("a"))]);
    let planned = pod("p", "1");
    let on_a = (vec!["a".to_owned()], vec!["b: planned on a".to_owned(), "c: planned on a".to_owned()]);
    assert_eq!(filtered(&view, NOW, &planned, &["a", "b", "c"]), on_a);
    assert_eq!(filtered(&view, LATER - MILLISECOND, &planned, &["a", "b", "c"]), on_a);
    assert_eq!(filtered(&view, LATER, &planned, &["a", "b", "c"]), pass(&["a", "b", "c"]));
    assert_eq!(filtered(&view, NOW, &planned, &["b"]), (vec![], vec!["b: planned on a".to_owned()]));
    assert_eq!(filtered(&view, NOW, &planned, &["a"]), pass(&["a"]), "the single-name call of a nominated pod");
    assert_eq!(filtered(&view, NOW, &planned, &[]), pass(&[]));
}

#[test]
fn a_pod_whose_node_does_not_exist_waits_until_the_plan_ends() {
    let view = view(vec![node("a", vec![])], [plan("default/p", None)]);
    let waiting = (vec![], vec!["a: waiting for planned node of nodeclaim claim-1".to_owned()]);
    assert_eq!(filtered(&view, NOW, &pod("p", "1"), &["a"]), waiting);
    assert_eq!(filtered(&view, LATER, &pod("p", "1"), &["a"]), pass(&["a"]));
    assert_eq!(filtered(&view, NOW, &pod("other", "1"), &["a"]), pass(&["a"]), "others don't wait");
}

#[test]
fn unplanned_pods_get_the_room_besides_holds_and_daemons() {
    let mut held = node("a", vec![hold("default/p", 1000), hold("default/q", 1000)]);
    held.daemon_reserve = Resources { cpu: Millicores(500), ..Resources::default() };
    let view = view(vec![held, node("b", vec![])], []);
    // 4000 free, 2000 held, 500 for daemons: 1500 left.
    assert_eq!(filtered(&view, NOW, &pod("x", "1500m"), &["a", "b"]), pass(&["a", "b"]));
    let denied = (vec!["b".to_owned()], vec!["a: room reserved for 2 planned pods".to_owned()]);
    assert_eq!(filtered(&view, NOW, &pod("x", "1501m"), &["a", "b"]), denied);
    assert_eq!(filtered(&view, LATER, &pod("x", "1501m"), &["a", "b"]), pass(&["a", "b"]), "holds end");
}

#[test]
fn holds_reserve_every_kind_of_resource() {
    let mut full = hold("default/p", 0);
    full.requests = Resources { pods: 9, ..Resources::default() };
    let with_extended = |amount: i64| {
        let mut hold = hold("default/p", 0);
        hold.requests.extended.insert("nvidia.com/gpu".into(), amount);
        let mut node = node("a", vec![hold]);
        node.free.extended.insert("nvidia.com/gpu".into(), 4);
        node
    };
    let mut gpu = pod("x", "1");
    gpu["spec"]["containers"][0]["resources"]["requests"]["nvidia.com/gpu"] = json!("2");
    let mut big = pod("x", "1");
    big["spec"]["containers"][0]["resources"]["requests"]["memory"] = json!("15.5Gi");
    let mut unreadable = pod("x", "1");
    unreadable["spec"]["containers"][0]["resources"]["requests"]["memory"] = json!("much");
    for (node, pod, passes) in [
        (node("a", vec![full.clone()]), pod("x", "1"), true),
        (node("a", vec![full, hold("default/q", 0)]), pod("x", "1"), false),
        (with_extended(2), gpu.clone(), true),
        (with_extended(3), gpu.clone(), false),
        (with_extended(4), pod("x", "1"), true),
        (node("a", vec![hold("default/p", 0)]), gpu, false),
        (node("a", vec![hold("default/p", 0)]), big, false),
        (node("a", vec![hold("default/p", 0)]), unreadable, false),
    ] {
        assert_eq!(filtered(&view(vec![node], []), NOW, &pod, &["a"]).0.len() == 1, passes, "{pod}");
    }
}

#[test]
fn holds_bind_pods_of_equal_or_lower_priority_only() {
    let mut high = hold("default/p", 3000);
    high.priority = 100;
    let view = view(vec![node("a", vec![high, hold("default/q", 1000)])], []);
    let with_priority = |priority: i32, cpu: &str| {
        let mut pod = pod("x", cpu);
        pod["spec"]["priority"] = json!(priority);
        filtered(&view, NOW, &pod, &["a"])
    };
    let denied = |count: &str| (vec![], vec![format!("a: room reserved for {count}")]);
    assert_eq!(with_priority(0, "500m"), denied("2 planned pods"));
    assert_eq!(with_priority(50, "1000m"), pass(&["a"]), "the hold of priority 0 does not bind");
    assert_eq!(with_priority(100, "1001m"), denied("1 planned pod"));
    assert_eq!(with_priority(101, "4"), pass(&["a"]));
}

#[test]
fn daemon_pods_pass_everywhere() {
    let mut disrupting = node("b", vec![]);
    disrupting.disrupting = true;
    let view = view(vec![node("a", vec![hold("default/p", 4000)]), disrupting], [plan("default/d", None)]);
    let mut daemon = pod("d", "1");
    daemon["metadata"]["ownerReferences"] = json!([{"kind": "DaemonSet", "uid": "ds", "controller": true}]);
    assert_eq!(filtered(&view, NOW, &daemon, &["a", "b"]), pass(&["a", "b"]));
    let mut claimed = pod("x", "1");
    claimed["metadata"]["ownerReferences"] = json!([{"kind": "DaemonSet", "uid": "ds"}]);
    assert!(filtered(&view, NOW, &claimed, &["a", "b"]).0.is_empty(), "only the controller reference counts");
}

#[test]
fn a_node_that_is_being_disrupted_gets_no_new_pod() {
    let mut disrupting = node("a", vec![hold("default/p", 100)]);
    disrupting.disrupting = true;
    let view = view(vec![disrupting, node("b", vec![])], [plan("default/p", Some("a"))]);
    let denied = (vec!["b".to_owned()], vec!["a: node is about to be disrupted".to_owned()]);
    assert_eq!(filtered(&view, NOW, &pod("x", "1"), &["a", "b"]), denied);
    assert_eq!(filtered(&view, NOW, &pod("p", "1"), &["a", "b"]), denied, "a plan for such a node is void");
    assert_eq!(filtered(&view, LATER, &pod("x", "1"), &["a", "b"]), denied, "this does not end with the holds");
    for (toleration, passes) in [
        (json!({"key": "karpenter.sh/disrupted", "operator": "Exists"}), true),
        (json!({"key": "karpenter.sh/disrupted", "effect": "NoSchedule"}), true),
        (json!({"operator": "Exists"}), true),
        (json!({"key": "karpenter.sh/disrupted", "operator": "Exists", "effect": "NoExecute"}), false),
        (json!({"key": "karpenter.sh/disrupted", "operator": "Equal", "value": "yes"}), false),
        (json!({"key": "other", "operator": "Exists"}), false),
    ] {
        let mut tolerant = pod("x", "1");
        tolerant["spec"]["tolerations"] = json!([toleration]);
        assert_eq!(filtered(&view, NOW, &tolerant, &["a"]).0.len() == 1, passes, "{toleration}");
    }
}

#[test]
fn the_successor_of_a_displaced_pod_takes_its_hold() {
    let mut displaced = hold("default/web-old", 3000);
    displaced.owner = Some("rs".into());
    displaced.displaced = true;
    let input = |hold: Hold| view(vec![node("a", vec![hold, self::hold("default/q", 1000)]), node("b", vec![])], []);
    let owned = |owner: &str, cpu: &str| {
        let mut pod = pod("web-new", cpu);
        pod["metadata"]["ownerReferences"] = json!([{"kind": "ReplicaSet", "uid": owner, "controller": true}]);
        pod
    };
    let on_a = (vec!["a".to_owned()], vec!["b: planned on a".to_owned()]);
    let not_a = (vec!["b".to_owned()], vec!["a: room reserved for 2 planned pods".to_owned()]);
    let view = input(displaced.clone());
    assert_eq!(filtered(&view, NOW, &owned("rs", "3"), &["a", "b"]), on_a);
    assert_eq!(
        filtered(&view, NOW, &owned("rs", "3"), &["b"]),
        pass(&["b"]),
        "a successor does not wait for a node that is not a candidate"
    );
    assert_eq!(
        filtered(&view, NOW, &owned("rs", "3500m"), &["a", "b"]),
        not_a,
        "a successor takes no more room than the hold"
    );
    assert_eq!(filtered(&view, NOW, &owned("other", "3"), &["a", "b"]), not_a);
    let mut copy = owned("rs", "3");
    copy["metadata"]["namespace"] = json!("attacker");
    assert_eq!(filtered(&view, NOW, &copy, &["a", "b"]), not_a, "the UID is copied to another namespace");
    assert_eq!(filtered(&view, LATER, &owned("rs", "3"), &["a", "b"]), pass(&["a", "b"]));
    displaced.displaced = false;
    assert_eq!(
        filtered(&input(displaced), NOW, &owned("rs", "3"), &["a", "b"]),
        not_a,
        "the original pod still exists"
    );
}

#[test]
fn only_the_candidates_among_the_nodes_of_displaced_pods_matter() {
    let held = |name: &str| {
        let displaced =
            Hold { owner: Some("rs".into()), displaced: true, ..hold(&format!("default/old-{name}"), 3000) };
        node(name, vec![displaced])
    };
    let view = view(vec![held("a"), held("b"), held("d"), node("c", vec![])], []);
    let mut successor = pod("web-new", "3");
    successor["metadata"]["ownerReferences"] = json!([{"kind": "ReplicaSet", "uid": "rs", "controller": true}]);
    let on_b_or_d = (vec!["d".to_owned(), "b".to_owned()], vec!["c: planned on b".to_owned()]);
    assert_eq!(filtered(&view, NOW, &successor, &["d", "c", "b"]), on_b_or_d);
    assert_eq!(filtered(&view, NOW, &successor, &["c", "ghost"]), pass(&["c", "ghost"]));
}

#[test]
fn a_stale_view_restrains_no_pod() {
    let view = View::build(ViewInput {
        as_of: NOW,
        max_age: Duration::from_secs(1),
        nodes: vec![node("a", vec![hold("default/p", 4000)])],
        planned: [plan("default/p", None)].into(),
    });
    assert!(filtered(&view, NOW + Duration::from_secs(1), &pod("x", "1"), &["a"]).0.is_empty());
    assert_eq!(filtered(&view, NOW + Duration::from_millis(1001), &pod("x", "1"), &["a"]), pass(&["a"]));
    assert_eq!(filtered(&view, NOW + Duration::from_millis(1001), &pod("p", "1"), &["a"]), pass(&["a"]));
    let body = asked(&pod("p", "1"), &["a"]);
    assert_eq!(
        filter(&view, NOW + Duration::from_millis(1001), serde_json::from_str(&body).unwrap()).answer,
        Answer::Stale
    );
    assert!(View::default().is_stale(NOW), "a view built from nothing");
}

#[test]
fn denials_are_counted_by_reason() {
    let mut disrupting = node("c", vec![]);
    disrupting.disrupting = true;
    let view = view(
        vec![node("a", vec![hold("default/p", 4000)]), node("b", vec![hold("default/q", 4000)]), disrupting],
        [plan("default/p", Some("a")), plan("default/w", None)],
    );
    for (name, expected) in [("x", [0, 0, 2, 1]), ("p", [2, 0, 0, 0]), ("w", [0, 3, 0, 0])] {
        let body = asked(&pod(name, "1"), &["a", "b", "c"]);
        let denied = filter(&view, NOW, serde_json::from_str(&body).unwrap()).denied;
        assert_eq!(Denial::ALL.map(|denial| denied.get(denial)), expected, "{name}");
    }
}

#[test]
fn the_planned_node_beats_the_tightest_fit() {
    let with_free = |name: &str, cpu: i64, memory: i64| {
        let mut node = node(name, vec![]);
        node.free = room(cpu, memory);
        node
    };
    let nodes = || {
        let mut held = with_free("held", 4000, 16);
        held.holds = vec![hold("default/q", 3000)];
        vec![
            with_free("empty", 4000, 16),
            with_free("half", 2000, 8),
            with_free("tight", 1000, 1),
            with_free("lopsided", 1000, 16),
            held,
        ]
    };
    let names = ["empty", "half", "tight", "lopsided", "held", "ghost"];
    let plain = view(nodes(), []);
    // Left after 1 CPU and 1 GiB: 3000/4000 and 15/16; 1000/4000 and 7/16; nothing; 0 and 15/16; 0 and 14/16.
    assert_eq!(scores(&plain, &pod("x", "1"), &names), [1, 6, 9, 1, 2, 0]);
    let planned = view(nodes(), [plan("default/x", Some("empty"))]);
    assert_eq!(scores(&planned, &pod("x", "1"), &names)[0], MAX_SCORE);
    assert_eq!(scores(&View::default(), &pod("x", "1"), &names), [0; 6], "a stale view scores every node 0");
}

#[test]
fn scores_stay_in_range_whatever_the_amounts() {
    let mut odd = node("a", vec![]);
    odd.allocatable = Resources { cpu: Millicores(i64::MAX), memory: Bytes(i64::MAX), ..Resources::default() };
    odd.free = Resources { cpu: Millicores(i64::MAX), memory: Bytes(i64::MIN), ..Resources::default() };
    let mut none = node("b", vec![]);
    none.allocatable = Resources::default();
    let view = view(vec![odd, none], []);
    assert_eq!(scores(&view, &pod("x", "1"), &["a", "b"]), [1, 9]);
}

#[test]
fn a_hold_never_binds_its_own_pod() {
    let view = view(vec![node("a", vec![hold("default/p", 4000)])], []);
    assert_eq!(filtered(&view, NOW, &pod("p", "4"), &["a"]), pass(&["a"]), "the plan is dropped, the hold is not");
    assert!(filtered(&view, NOW, &pod("x", "4"), &["a"]).0.is_empty());
}

/// A point in time from `first` to `last` milliseconds after [`NOW`].
fn moment(first: i64, last: i64) -> impl Strategy<Value = UnixMillis> {
    (NOW.0 + first..=NOW.0 + last).prop_map(UnixMillis)
}

fn any_view() -> impl Strategy<Value = View> {
    let name = prop::sample::select(vec!["a", "b", "c", "d"]);
    let hold = (
        prop::sample::select(vec!["default/p", "default/q", "default/r"]),
        0..5000_i64,
        -1..2_i32,
        any::<bool>(),
        moment(-1, 1),
    )
        .prop_map(|(pod, cpu, priority, displaced, expires_at)| Hold {
            priority,
            displaced,
            expires_at,
            owner: Some("rs".into()),
            ..self::hold(pod, cpu)
        });
    let node = (name.clone(), prop::collection::vec(hold, 0..4), any::<bool>())
        .prop_map(|(name, holds, disrupting)| NodeRoom { disrupting, ..self::node(name, holds) });
    let plan = (prop::option::of(name), moment(-1, 1))
        .prop_map(|(node, expires_at)| PlannedPod { expires_at, ..self::plan("default/p", node).1 });
    (prop::collection::vec(node, 0..4), prop::option::of(plan), moment(-3, 0)).prop_map(|(nodes, plan, as_of)| {
        View::build(ViewInput {
            as_of,
            max_age: 2 * MILLISECOND,
            nodes,
            planned: plan.map(|plan| (Arc::from("default/p"), plan)).into_iter().collect(),
        })
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..ProptestConfig::default() })]

    /// A name that was not in the request fails the whole pod in kube-scheduler, and a name dropped without a reason hides the node.
    #[test]
    fn every_requested_name_is_returned_exactly_once_and_no_other(
        view in any_view(),
        names in prop::sample::subsequence(vec!["a", "b", "c", "d", "ghost"], 0..=5),
        cpu in 0..5000_i64,
        owner in prop::sample::select(vec!["rs", "other"]),
    ) {
        let mut pod = pod("p", &format!("{cpu}m"));
        pod["metadata"]["ownerReferences"] = json!([{"kind": "ReplicaSet", "uid": owner, "controller": true}]);
        let (passed, failed) = filtered(&view, NOW, &pod, &names);
        let mut back: Vec<String> = failed.iter().map(|entry| entry.split(':').next().unwrap().to_owned()).collect();
        back.extend(passed.iter().cloned());
        back.sort();
        prop_assert_eq!(back, names.clone());
        prop_assert!(passed.is_sorted(), "the order of the input");
        for score in scores(&view, &pod, &names) {
            prop_assert!((0..=MAX_SCORE).contains(&score));
        }
    }
}
