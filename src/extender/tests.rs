//! Verdicts as tables, and the wire in both directions.

use std::sync::Arc;

use serde_json::{Value, json};

use super::*;
use crate::scheduling::resources::Resources;

const NOW: i64 = 1_000_000;
const LATER: i64 = NOW + 60_000;
const GI: i64 = 1 << 30;

fn room(cpu_milli: i64, memory_gi: i64) -> Resources {
    Resources {
        cpu_milli,
        memory: memory_gi * GI,
        pods: 10,
        ..Resources::default()
    }
}

fn requests(cpu_milli: i64, memory_gi: i64) -> Resources {
    Resources {
        pods: 1,
        ..room(cpu_milli, memory_gi)
    }
}

fn node(name: &str, holds: Vec<Hold>) -> NodeRoom {
    NodeRoom {
        name: name.into(),
        allocatable: room(4000, 16),
        free: room(4000, 16),
        holds,
        ..NodeRoom::default()
    }
}

fn hold(pod: &str, cpu_milli: i64) -> Hold {
    Hold {
        pod: pod.into(),
        requests: requests(cpu_milli, 1),
        expires_at_ms: LATER,
        ..Hold::default()
    }
}

fn plan(pod: &str, node: Option<&str>) -> (Arc<str>, PlannedPod) {
    (
        pod.into(),
        PlannedPod {
            node: node.map(Arc::from),
            claim: "claim-1".into(),
            expires_at_ms: LATER,
        },
    )
}

fn view<const N: usize>(nodes: Vec<NodeRoom>, planned: [(Arc<str>, PlannedPod); N]) -> View {
    View::build(ViewInput {
        built_at_ms: NOW,
        max_age_ms: 120_000,
        nodes,
        planned: planned.into(),
    })
}

fn pod(name: &str, cpu: &str) -> Value {
    json!({
        "metadata": {"name": name, "namespace": "default", "uid": format!("uid-{name}"), "creationTimestamp": null},
        "spec": {"priority": 0, "containers": [{"name": "c", "resources": {"requests": {"cpu": cpu, "memory": "1Gi"}}}]},
        "status": {}
    })
}

fn asked(pod: &Value, names: &[&str]) -> String {
    json!({"Pod": pod, "Nodes": null, "NodeNames": names}).to_string()
}

/// Names that pass, then `name: reason` of those that don't.
fn filtered(view: &View, now_ms: i64, pod: &Value, names: &[&str]) -> (Vec<String>, Vec<String>) {
    let body = asked(pod, names);
    let args: FilterArgs<'_> = serde_json::from_str(&body).unwrap();
    let result = serde_json::to_value(filter(view, now_ms, args)).unwrap();
    assert_eq!(result["Error"], "");
    assert_eq!(result["FailedNodes"], json!({}));
    let passed = result["NodeNames"]
        .as_array()
        .unwrap()
        .iter()
        .map(|name| name.as_str().unwrap().to_owned())
        .collect();
    let failed = result["FailedAndUnresolvableNodes"].as_object().unwrap();
    (
        passed,
        failed
            .iter()
            .map(|(name, reason)| format!("{name}: {}", reason.as_str().unwrap()))
            .collect(),
    )
}

fn pass(names: &[&str]) -> (Vec<String>, Vec<String>) {
    (names.iter().map(|name| (*name).to_owned()).collect(), vec![])
}

fn scores(view: &View, pod: &Value, names: &[&str]) -> Vec<i64> {
    let body = asked(pod, names);
    prioritize(view, NOW, serde_json::from_str(&body).unwrap())
        .into_iter()
        .map(|entry| entry.score)
        .collect()
}

#[test]
fn without_holds_plans_or_disruption_names_are_echoed_in_order() {
    let view = view(vec![node("a", vec![]), node("b", vec![])], []);
    let body = asked(&pod("p", "64"), &["b", "ghost", "a"]);
    let result = filter(&view, NOW, serde_json::from_str(&body).unwrap());
    assert_eq!(result.answer, Answer::Unrestrained);
    assert_eq!(
        filtered(&view, NOW, &pod("p", "64"), &["b", "ghost", "a"]),
        pass(&["b", "ghost", "a"])
    );
}

#[test]
fn a_planned_pod_passes_on_its_node_only_until_the_plan_ends() {
    let view = view(
        vec![node("a", vec![hold("default/p", 1000)]), node("b", vec![])],
        [plan("default/p", Some("a"))],
    );
    let planned = pod("p", "1");
    let on_a = (
        vec!["a".to_owned()],
        vec!["b: planned on a".to_owned(), "c: planned on a".to_owned()],
    );
    assert_eq!(filtered(&view, NOW, &planned, &["a", "b", "c"]), on_a);
    assert_eq!(filtered(&view, LATER - 1, &planned, &["a", "b", "c"]), on_a);
    assert_eq!(
        filtered(&view, LATER, &planned, &["a", "b", "c"]),
        pass(&["a", "b", "c"])
    );
    assert_eq!(
        filtered(&view, NOW, &planned, &["b"]),
        (vec![], vec!["b: planned on a".to_owned()])
    );
    assert_eq!(
        filtered(&view, NOW, &planned, &["a"]),
        pass(&["a"]),
        "the single-name call of a nominated pod"
    );
    assert_eq!(filtered(&view, NOW, &planned, &[]), pass(&[]));
}

#[test]
fn a_pod_whose_node_is_still_being_made_waits_until_the_plan_ends() {
    let view = view(vec![node("a", vec![])], [plan("default/p", None)]);
    let waiting = (
        vec![],
        vec!["a: waiting for planned node of nodeclaim claim-1".to_owned()],
    );
    assert_eq!(filtered(&view, NOW, &pod("p", "1"), &["a"]), waiting);
    assert_eq!(filtered(&view, LATER, &pod("p", "1"), &["a"]), pass(&["a"]));
    assert_eq!(
        filtered(&view, NOW, &pod("other", "1"), &["a"]),
        pass(&["a"]),
        "others don't wait"
    );
}

#[test]
fn strangers_get_what_the_holds_and_daemons_leave() {
    let mut held = node("a", vec![hold("default/p", 1000), hold("default/q", 1000)]);
    held.daemon_reserve = Resources {
        cpu_milli: 500,
        ..Resources::default()
    };
    let view = view(vec![held, node("b", vec![])], []);
    // 4000 free, 2000 held, 500 for daemons: 1500 left.
    assert_eq!(filtered(&view, NOW, &pod("x", "1500m"), &["a", "b"]), pass(&["a", "b"]));
    let denied = (
        vec!["b".to_owned()],
        vec!["a: room reserved for 2 planned pods".to_owned()],
    );
    assert_eq!(filtered(&view, NOW, &pod("x", "1501m"), &["a", "b"]), denied);
    assert_eq!(
        filtered(&view, LATER, &pod("x", "1501m"), &["a", "b"]),
        pass(&["a", "b"]),
        "holds end"
    );
}

#[test]
fn every_kind_of_resource_is_guarded() {
    let mut full = hold("default/p", 0);
    full.requests = Resources {
        pods: 9,
        ..Resources::default()
    };
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
        assert_eq!(
            filtered(&view(vec![node], []), NOW, &pod, &["a"]).0.len() == 1,
            passes,
            "{pod}"
        );
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
    assert_eq!(
        with_priority(50, "1000m"),
        pass(&["a"]),
        "the hold of priority 0 does not bind"
    );
    assert_eq!(with_priority(100, "1001m"), denied("1 planned pod"));
    assert_eq!(with_priority(101, "4"), pass(&["a"]));
}

#[test]
fn daemon_pods_pass_everywhere() {
    let mut disrupting = node("b", vec![]);
    disrupting.disrupting = true;
    let view = view(
        vec![node("a", vec![hold("default/p", 4000)]), disrupting],
        [plan("default/d", None)],
    );
    let mut daemon = pod("d", "1");
    daemon["metadata"]["ownerReferences"] = json!([{"kind": "DaemonSet", "uid": "ds", "controller": true}]);
    assert_eq!(filtered(&view, NOW, &daemon, &["a", "b"]), pass(&["a", "b"]));
}

#[test]
fn nothing_new_comes_to_a_node_about_to_be_disrupted() {
    let mut disrupting = node("a", vec![hold("default/p", 100)]);
    disrupting.disrupting = true;
    let view = view(vec![disrupting, node("b", vec![])], [plan("default/p", Some("a"))]);
    let denied = (
        vec!["b".to_owned()],
        vec!["a: node is about to be disrupted".to_owned()],
    );
    assert_eq!(filtered(&view, NOW, &pod("x", "1"), &["a", "b"]), denied);
    assert_eq!(
        filtered(&view, NOW, &pod("p", "1"), &["a", "b"]),
        denied,
        "a plan onto such a node is void"
    );
    assert_eq!(
        filtered(&view, LATER, &pod("x", "1"), &["a", "b"]),
        denied,
        "this does not end with the holds"
    );
    for (toleration, passes) in [
        (json!({"key": "karpenter.sh/disrupted", "operator": "Exists"}), true),
        (json!({"key": "karpenter.sh/disrupted", "effect": "NoSchedule"}), true),
        (json!({"operator": "Exists"}), true),
        (
            json!({"key": "karpenter.sh/disrupted", "operator": "Exists", "effect": "NoExecute"}),
            false,
        ),
        (
            json!({"key": "karpenter.sh/disrupted", "operator": "Equal", "value": "yes"}),
            false,
        ),
        (json!({"key": "other", "operator": "Exists"}), false),
    ] {
        let mut tolerant = pod("x", "1");
        tolerant["spec"]["tolerations"] = json!([toleration]);
        assert_eq!(
            filtered(&view, NOW, &tolerant, &["a"]).0.len() == 1,
            passes,
            "{toleration}"
        );
    }
}

#[test]
fn the_successor_of_a_displaced_pod_takes_its_place() {
    let mut displaced = hold("default/web-old", 3000);
    displaced.owner = Some("rs".into());
    displaced.displaced = true;
    let input = |hold: Hold| {
        view(
            vec![node("a", vec![hold, self::hold("default/q", 1000)]), node("b", vec![])],
            [],
        )
    };
    let owned = |owner: &str, cpu: &str| {
        let mut pod = pod("web-new", cpu);
        pod["metadata"]["ownerReferences"] = json!([{"kind": "ReplicaSet", "uid": owner, "controller": true}]);
        pod
    };
    let on_a = (vec!["a".to_owned()], vec!["b: planned on a".to_owned()]);
    let not_a = (
        vec!["b".to_owned()],
        vec!["a: room reserved for 2 planned pods".to_owned()],
    );
    let view = input(displaced.clone());
    assert_eq!(filtered(&view, NOW, &owned("rs", "3"), &["a", "b"]), on_a);
    assert_eq!(
        filtered(&view, NOW, &owned("rs", "3"), &["b"]),
        pass(&["b"]),
        "it doesn't wait for a node it wasn't offered"
    );
    assert_eq!(
        filtered(&view, NOW, &owned("rs", "3500m"), &["a", "b"]),
        not_a,
        "it takes no more than its place"
    );
    assert_eq!(filtered(&view, NOW, &owned("other", "3"), &["a", "b"]), not_a);
    assert_eq!(
        filtered(&view, LATER, &owned("rs", "3"), &["a", "b"]),
        pass(&["a", "b"])
    );
    displaced.displaced = false;
    assert_eq!(
        filtered(&input(displaced), NOW, &owned("rs", "3"), &["a", "b"]),
        not_a,
        "the pod itself is still there"
    );
}

#[test]
fn a_stale_view_restrains_nobody() {
    let view = View::build(ViewInput {
        built_at_ms: NOW,
        max_age_ms: 1000,
        nodes: vec![node("a", vec![hold("default/p", 4000)])],
        planned: [plan("default/p", None)].into(),
    });
    assert!(filtered(&view, NOW + 1000, &pod("x", "1"), &["a"]).0.is_empty());
    assert_eq!(filtered(&view, NOW + 1001, &pod("x", "1"), &["a"]), pass(&["a"]));
    assert_eq!(filtered(&view, NOW + 1001, &pod("p", "1"), &["a"]), pass(&["a"]));
    let body = asked(&pod("p", "1"), &["a"]);
    assert_eq!(
        filter(&view, NOW + 1001, serde_json::from_str(&body).unwrap()).answer,
        Answer::Stale
    );
    assert!(View::default().is_stale(NOW), "a view built from nothing");
}

#[test]
fn denials_are_counted_by_reason() {
    let mut disrupting = node("c", vec![]);
    disrupting.disrupting = true;
    let view = view(
        vec![
            node("a", vec![hold("default/p", 4000)]),
            node("b", vec![hold("default/q", 4000)]),
            disrupting,
        ],
        [plan("default/p", Some("a")), plan("default/w", None)],
    );
    for (name, expected) in [("x", [0, 0, 2, 1]), ("p", [2, 0, 0, 0]), ("w", [0, 3, 0, 0])] {
        let body = asked(&pod(name, "1"), &["a", "b", "c"]);
        let denied = filter(&view, NOW, serde_json::from_str(&body).unwrap()).denied;
        assert_eq!(Denial::ALL.map(|denial| denied.get(denial)), expected, "{name}");
    }
}

#[test]
fn whole_nodes_are_given_back_as_they_came() {
    let view = view(vec![node("a", vec![hold("default/p", 4000)]), node("b", vec![])], []);
    let item =
        |name: &str| json!({"metadata": {"name": name, "labels": {"x": "y"}}, "spec": {}, "status": {"future": [1]}});
    let body =
        json!({"Pod": pod("x", "1"), "Nodes": {"metadata": {}, "items": [item("b"), item("a")]}, "NodeNames": null});
    let ask = |now_ms: i64| {
        let body = body.to_string();
        serde_json::to_value(filter(&view, now_ms, serde_json::from_str(&body).unwrap())).unwrap()
    };
    let judged = ask(NOW);
    assert_eq!(judged["Nodes"], json!({"metadata": {}, "items": [item("b")]}));
    assert_eq!(judged["NodeNames"], json!(["b"]));
    assert_eq!(
        judged["FailedAndUnresolvableNodes"],
        json!({"a": "room reserved for 1 planned pod"})
    );
    let echoed = ask(LATER);
    assert_eq!(echoed["Nodes"], body["Nodes"]);
    assert_eq!(echoed["NodeNames"], json!(["b", "a"]));
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
    assert_eq!(
        scores(&View::default(), &pod("x", "1"), &names),
        [0; 6],
        "a stale view has no opinion"
    );
}

#[test]
fn scores_stay_in_range_whatever_the_amounts() {
    let mut odd = node("a", vec![]);
    odd.allocatable = Resources {
        cpu_milli: i64::MAX,
        memory: i64::MAX,
        ..Resources::default()
    };
    odd.free = Resources {
        cpu_milli: i64::MAX,
        memory: i64::MIN,
        ..Resources::default()
    };
    let mut none = node("b", vec![]);
    none.allocatable = Resources::default();
    let view = view(vec![odd, none], []);
    for score in scores(&view, &pod("x", "1"), &["a", "b"]) {
        assert!((0..MAX_SCORE).contains(&score), "{score}");
    }
}

#[test]
fn requests_are_counted_as_the_scheduler_counts_them() {
    let of = |spec: Value| {
        let body = json!({"metadata": {"name": "p", "namespace": "n"}, "spec": spec, "status": {}}).to_string();
        serde_json::from_str::<ExtenderPod<'_>>(&body).unwrap().requests()
    };
    let cpu = |amount: &str| json!({"resources": {"requests": {"cpu": amount}}});
    let sidecar = |amount: &str| json!({"restartPolicy": "Always", "resources": {"requests": {"cpu": amount}}});
    for (spec, cpu_milli) in [
        (json!({}), 0),
        (json!({"containers": null}), 0),
        (json!({"containers": [cpu("1"), cpu("500m")]}), 1500),
        (json!({"containers": [cpu("1")], "initContainers": [cpu("3")]}), 3000),
        (
            json!({"containers": [cpu("1")], "initContainers": [sidecar("1"), cpu("3")]}),
            4000,
        ),
        (
            json!({"containers": [cpu("1")], "initContainers": [cpu("3"), sidecar("1")]}),
            3000,
        ),
        (
            json!({"containers": [cpu("4")], "initContainers": [sidecar("1"), sidecar("2")]}),
            7000,
        ),
        (json!({"containers": [cpu("1")], "overhead": {"cpu": "250m"}}), 1250),
        (
            json!({"containers": [cpu("1")], "resources": {"requests": {"cpu": "2"}}, "overhead": {"cpu": "1"}}),
            3000,
        ),
    ] {
        assert_eq!(of(spec.clone()).cpu_milli, cpu_milli, "{spec}");
    }
    let all = of(json!({"containers": [{"resources": {"requests": {
        "memory": "1Gi", "ephemeral-storage": "1Mi", "nvidia.com/gpu": "1", "none.of/it": "0"
    }}}]}));
    assert_eq!((all.memory, all.ephemeral_storage, all.pods), (GI, 1 << 20, 1));
    assert_eq!(all.extended, [(Arc::from("nvidia.com/gpu"), 1)].into());
}

#[test]
fn the_wire_has_exactly_gos_names() {
    let body = asked(&pod("x", "1"), &["a"]);
    let result = filter(&View::default(), NOW, serde_json::from_str(&body).unwrap());
    assert_eq!(
        serde_json::to_value(&result).unwrap(),
        json!({"Nodes": null, "NodeNames": ["a"], "FailedNodes": {}, "FailedAndUnresolvableNodes": {}, "Error": ""})
    );
    let none = json!({"Pod": pod("x", "1"), "Nodes": null, "NodeNames": null}).to_string();
    let result = filter(&View::default(), NOW, serde_json::from_str(&none).unwrap());
    assert_eq!(
        serde_json::to_value(&result).unwrap()["NodeNames"],
        json!([]),
        "never null"
    );
    let scores = prioritize(&View::default(), NOW, serde_json::from_str(&body).unwrap());
    assert_eq!(
        serde_json::to_value(&scores).unwrap(),
        json!([{"Host": "a", "Score": 0}])
    );
    let args = json!({
        "Pod": pod("x", "1"), "NodeNameToVictims": null,
        "NodeNameToMetaVictims": {"a": {"Pods": [{"UID": "u1"}], "NumPDBViolations": 2}}
    });
    let body = args.to_string();
    let result = preempt(&View::default(), NOW, serde_json::from_str(&body).unwrap());
    assert_eq!(
        serde_json::to_value(&result).unwrap(),
        json!({"NodeNameToMetaVictims": {"a": {"Pods": [{"UID": "u1"}], "NumPDBViolations": 2}}})
    );
}

#[test]
fn names_are_borrowed_and_escapes_are_read() {
    let body = r#"{"Pod": {"metadata": {"name": "p", "namespace": "n"}}, "NodeNames": ["plain", "esc\u0061ped"]}"#;
    let args: FilterArgs<'_> = serde_json::from_str(body).unwrap();
    let names = args.node_names.unwrap();
    assert!(matches!(names[0].0, std::borrow::Cow::Borrowed("plain")));
    assert_eq!(names[1].as_str(), "escaped");
}

#[test]
fn malformed_arguments_are_errors_that_say_what_is_missing() {
    for (body, message) in [
        ("{}", "missing field `Pod`"),
        (r#"{"Pod": null}"#, "invalid type: null"),
        (r#"{"Pod": {}, "NodeNames": [1]}"#, "invalid type: integer `1`"),
        (r#"{"pod": {}, "nodenames": []}"#, "missing field `Pod`"),
        ("", "EOF"),
    ] {
        let error = serde_json::from_str::<FilterArgs<'_>>(body).unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
    }
}

#[test]
fn preemption_is_kept_off_nodes_that_filter_would_still_refuse() {
    let mut disrupting = node("c", vec![]);
    disrupting.disrupting = true;
    let view = view(
        vec![node("a", vec![hold("default/p", 4000)]), node("b", vec![]), disrupting],
        [plan("default/p", Some("a")), plan("default/w", None)],
    );
    let victims = |uid: &str| json!({"Pods": [{"UID": uid}], "NumPDBViolations": 0});
    let ask = |name: &str, priority: i32| {
        let mut pod = pod(name, "1");
        pod["spec"]["priority"] = json!(priority);
        let body =
            json!({"Pod": pod, "NodeNameToMetaVictims": {"a": victims("1"), "b": victims("2"), "c": victims("3")}})
                .to_string();
        let result = preempt(&view, NOW, serde_json::from_str(&body).unwrap());
        result
            .meta_victims
            .keys()
            .map(|name| name.as_str().to_owned())
            .collect::<Vec<_>>()
    };
    assert_eq!(ask("x", 0), ["b"]);
    assert_eq!(ask("x", 1), ["a", "b"], "the hold is of lower priority");
    assert_eq!(ask("p", 0), ["a"]);
    assert!(ask("w", 0).is_empty());
}

#[test]
fn whole_victims_come_back_as_uids_and_candidates_without_victims_go() {
    let body = json!({"Pod": pod("x", "1"), "NodeNameToMetaVictims": null, "NodeNameToVictims": {
        "a": {"Pods": [pod("v", "1")], "NumPDBViolations": 1}, "b": {"Pods": [], "NumPDBViolations": 0}, "c": {"Pods": null}
    }})
    .to_string();
    let result = preempt(&View::default(), NOW, serde_json::from_str(&body).unwrap());
    assert_eq!(
        serde_json::to_value(&result).unwrap(),
        json!({"NodeNameToMetaVictims": {"a": {"Pods": [{"UID": "uid-v"}], "NumPDBViolations": 1}}})
    );
}
