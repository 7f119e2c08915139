//! Tests of the wire format in both directions, of requests, and of preemption.

use stowage_model::time::UnixMillis;

use super::*;

#[test]
fn whole_nodes_are_returned_unchanged() {
    let view = view(vec![node("a", vec![hold("default/p", 4000)]), node("b", vec![])], []);
    let item =
        |name: &str| json!({"metadata": {"name": name, "labels": {"x": "y"}}, "spec": {}, "status": {"future": [1]}});
    let body =
        json!({"Pod": pod("x", "1"), "Nodes": {"metadata": {}, "items": [item("b"), item("a")]}, "NodeNames": null});
    let ask = |now: UnixMillis| {
        let body = body.to_string();
        serde_json::to_value(filter(&view, now, serde_json::from_str(&body).unwrap())).unwrap()
    };
    let judged = ask(NOW);
    assert_eq!(judged["Nodes"], json!({"metadata": {}, "items": [item("b")]}));
    assert_eq!(judged["NodeNames"], json!(["b"]));
    assert_eq!(judged["FailedAndUnresolvableNodes"], json!({"a": "room reserved for 1 planned pod"}));
    let echoed = ask(LATER);
    assert_eq!(echoed["Nodes"], body["Nodes"]);
    assert_eq!(echoed["NodeNames"], json!(["b", "a"]));
}

#[test]
fn requests_are_computed_as_in_kube_scheduler() {
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
        (json!({"containers": [cpu("1")], "initContainers": [sidecar("1"), cpu("3")]}), 4000),
        (json!({"containers": [cpu("1")], "initContainers": [cpu("3"), sidecar("1")]}), 3000),
        (json!({"containers": [cpu("4")], "initContainers": [sidecar("1"), sidecar("2")]}), 7000),
        (json!({"containers": [cpu("1")], "overhead": {"cpu": "250m"}}), 1250),
        (json!({"containers": [cpu("1")], "resources": {"requests": {"cpu": "2"}}, "overhead": {"cpu": "1"}}), 3000),
    ] {
        assert_eq!(of(spec.clone()).cpu.0, cpu_milli, "{spec}");
    }
    let all = of(json!({"containers": [{"resources": {"requests": {
        "memory": "1Gi", "ephemeral-storage": "1Mi", "nvidia.com/gpu": "1", "none.of/it": "0"
    }}}]}));
    assert_eq!((all.memory.0, all.ephemeral_storage.0, all.pods), (GI, 1 << 20, 1));
    assert_eq!(all.extended, [(Arc::from("nvidia.com/gpu"), 1)].into());
}

#[test]
fn the_wire_format_has_exactly_the_names_of_the_go_types() {
    let body = asked(&pod("x", "1"), &["a"]);
    let result = filter(&View::default(), NOW, serde_json::from_str(&body).unwrap());
    assert_eq!(
        serde_json::to_value(&result).unwrap(),
        json!({"Nodes": null, "NodeNames": ["a"], "FailedNodes": {}, "FailedAndUnresolvableNodes": {}, "Error": ""})
    );
    let none = json!({"Pod": pod("x", "1"), "Nodes": null, "NodeNames": null}).to_string();
    let result = filter(&View::default(), NOW, serde_json::from_str(&none).unwrap());
    assert_eq!(serde_json::to_value(&result).unwrap()["NodeNames"], json!([]), "never null");
    let scores = prioritize(&View::default(), NOW, serde_json::from_str(&body).unwrap());
    assert_eq!(serde_json::to_value(&scores).unwrap(), json!([{"Host": "a", "Score": 0}]));
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
fn names_are_borrowed_unless_they_contain_escapes() {
    let body = r#"{"Pod": {"metadata": {"name": "p", "namespace": "n"}}, "NodeNames": ["plain", "esc\u0061ped"]}"#;
    let args: FilterArgs<'_> = serde_json::from_str(body).unwrap();
    let names = args.node_names.unwrap();
    assert!(matches!(names[0].0, std::borrow::Cow::Borrowed("plain")));
    assert_eq!(names[1].as_str(), "escaped");
}

#[test]
fn malformed_arguments_are_errors_that_name_the_missing_field() {
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
fn preemption_drops_nodes_that_filter_would_still_deny() {
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
        result.meta_victims.keys().map(|name| name.as_str().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(ask("x", 0), ["b"]);
    assert_eq!(ask("x", 1), ["a", "b"], "the hold is of lower priority");
    assert_eq!(ask("p", 0), ["a"]);
    assert!(ask("w", 0).is_empty());
}

#[test]
fn victims_are_returned_as_uids_and_candidates_without_victims_dropped() {
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
