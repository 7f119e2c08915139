//! Tests of the pipeline: responses on the wire, exempt pods, and that a second review changes nothing.

use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;

use super::*;
use crate::webhook::rule::Rule;

fn pod_review(pod: &Value) -> Value {
    json!({
        "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
        "request": {
            "uid": "U", "kind": {"group": "", "version": "v1", "kind": "Pod"},
            "resource": {"group": "", "version": "v1", "resource": "pods"},
            "namespace": "default", "operation": "CREATE", "userInfo": {}, "object": pod, "oldObject": null, "dryRun": false,
            "options": {"kind": "CreateOptions", "apiVersion": "meta.k8s.io/v1"}
        }
    })
}

fn answered(review: &Value) -> Review {
    crate::webhook::review::review(review.to_string().as_bytes(), &Rules::default()).unwrap()
}

/// The pod as the API server would store it.
fn patched(pod: &Value, review: &Review) -> Value {
    let mut pod = pod.clone();
    if let Some(patch) = review.response["response"]["patch"].as_str() {
        let patch: json_patch::Patch = serde_json::from_slice(&STANDARD.decode(patch).unwrap()).unwrap();
        json_patch::patch(&mut pod, &patch).unwrap();
    }
    pod
}

#[test]
fn every_rule_is_applied_to_a_legacy_gpu_pod() {
    let pod = json!({
        "kind": "Pod", "apiVersion": "v1",
        "metadata": {"generateName": "web-7d9-", "annotations": {"karpenter.sh/do-not-evict": "true"}, "creationTimestamp": null},
        "spec": {
            "nodeSelector": {"beta.kubernetes.io/arch": "amd64", "a/b~c": "kept"},
            "containers": [{"name": "c", "image": "i", "resources": {"limits": {"nvidia.com/gpu": "1"}}, "fieldOfTomorrow": {"x": [1, 2.5]}}],
            "ephemeralContainers": [{"name": "e"}]
        },
        "status": {}
    });
    let review = answered(&pod_review(&pod));
    assert_eq!(
        patched(&pod, &review),
        json!({
            "kind": "Pod", "apiVersion": "v1",
            "metadata": {
                "generateName": "web-7d9-",
                "annotations": {
                    "karpenter.sh/do-not-evict": "true", "karpenter.sh/do-not-disrupt": "true",
                    "stowage.dev/normalized": "n1,n9,n22,n13"
                },
                "creationTimestamp": null
            },
            "spec": {
                "nodeSelector": {"kubernetes.io/arch": "amd64", "a/b~c": "kept"},
                "containers": [{
                    "name": "c", "image": "i",
                    "resources": {"limits": {"nvidia.com/gpu": "1"}, "requests": {"nvidia.com/gpu": "1"}},
                    "fieldOfTomorrow": {"x": [1, 2.5]}
                }],
                "ephemeralContainers": [{"name": "e"}],
                "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
            },
            "status": {}
        })
    );
    let response = &review.response["response"];
    assert_eq!(response["uid"], "U");
    assert_eq!(response["allowed"], true);
    assert_eq!(response["patchType"], "JSONPatch");
    assert_eq!(response["auditAnnotations"], json!({"rules": "n1,n9,n22,n13"}));
    assert_eq!(review.result, ReviewResult::Patched);
}

#[test]
fn a_response_without_a_patch_has_no_patch_type() {
    for pod in [
        json!({"metadata": {"name": "p"}, "spec": {}}),
        json!({"metadata": {}, "spec": {"containers": null}}),
        json!({}),
    ] {
        let review = answered(&pod_review(&pod));
        assert_eq!(
            review.response,
            json!({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": {"uid": "U", "allowed": true}})
        );
        assert_eq!(review.result, ReviewResult::Unchanged);
    }
}

#[test]
fn absent_annotations_are_created() {
    for annotations in [None, Some(Value::Null), Some(json!({}))] {
        let mut pod = json!({"metadata": {"name": "p"}, "spec": {"nodeSelector": {"beta.kubernetes.io/os": "linux"}}});
        if let Some(annotations) = annotations {
            pod["metadata"]["annotations"] = annotations;
        }
        let out = patched(&pod, &answered(&pod_review(&pod)));
        assert_eq!(out["metadata"]["annotations"], json!({"stowage.dev/normalized": "n1"}));
        assert_eq!(out["spec"]["nodeSelector"], json!({"kubernetes.io/os": "linux"}));
    }
}

#[test]
fn a_pod_that_cannot_be_annotated_is_allowed_unchanged() {
    for metadata in [json!(null), json!([]), json!({"annotations": "odd"})] {
        let pod = json!({"metadata": metadata, "spec": {"nodeSelector": {"beta.kubernetes.io/os": "linux"}}});
        let review = answered(&pod_review(&pod));
        assert_eq!(review.result, ReviewResult::Doubtful, "{pod}");
        assert_eq!(review.response["response"], json!({"uid": "U", "allowed": true}));
        assert!(review.rules.is_empty());
    }
}

#[test]
fn only_created_pods_that_a_scheduler_places_are_changed() {
    let pod = json!({"metadata": {"name": "p"}, "spec": {"nodeSelector": {"beta.kubernetes.io/os": "linux"}}});
    let change = |edit: &dyn Fn(&mut Value)| {
        let mut review = pod_review(&pod);
        edit(&mut review["request"]);
        answered(&review).result
    };
    assert_eq!(change(&|_| {}), ReviewResult::Patched);
    let exempt: [&dyn Fn(&mut Value); 12] = [
        &|request| request["operation"] = json!("UPDATE"),
        &|request| request["operation"] = json!("DELETE"),
        &|request| request["resource"]["resource"] = json!("deployments"),
        &|request| request["resource"]["group"] = json!("apps"),
        &|request| request["subResource"] = json!("ephemeralcontainers"),
        &|request| request["namespace"] = json!("kube-system"),
        &|request| request["namespace"] = json!("kube-public"),
        &|request| request["namespace"] = json!("kube-node-lease"),
        &|request| request["object"]["metadata"]["labels"] = json!({"stowage.dev/webhook": "ignore"}),
        &|request| {
            request["object"]["metadata"]["ownerReferences"] = json!([{"kind": "DaemonSet", "controller": true}]);
        },
        &|request| request["object"]["metadata"]["ownerReferences"] = json!([{"kind": "Node", "controller": true}]),
        &|request| request["object"]["spec"]["nodeName"] = json!("n1"),
    ];
    for edit in exempt {
        assert_eq!(change(edit), ReviewResult::Exempt);
    }
    let claimed = change(&|request| request["object"]["metadata"]["ownerReferences"] = json!([{"kind": "DaemonSet"}]));
    assert_eq!(claimed, ReviewResult::Patched, "only the controller reference counts");
}

#[test]
fn malformed_reviews_are_rejected_with_the_reason() {
    let with = |edit: &dyn Fn(&mut Value)| {
        let mut review = pod_review(&json!({"spec": {}}));
        edit(&mut review);
        review.to_string()
    };
    for (body, message) in [
        (String::new(), "the body is no AdmissionReview: EOF while parsing a value at line 1 column 0"),
        ("[1, 2".to_owned(), "the body is no AdmissionReview: EOF while parsing a list at line 1 column 5"),
        ("[]".to_owned(), "the body is \"\" \"\", not admission.k8s.io/v1 AdmissionReview"),
        ("7".to_owned(), "the body is \"\" \"\", not admission.k8s.io/v1 AdmissionReview"),
        (
            with(&|review| review["apiVersion"] = json!("admission.k8s.io/v1beta1")),
            "the body is \"admission.k8s.io/v1beta1\" \"AdmissionReview\", not admission.k8s.io/v1 AdmissionReview",
        ),
        (
            with(&|review| review["request"] = json!(null)),
            "the AdmissionReview's request is missing or is not an object",
        ),
        (
            with(&|review| review["request"]["uid"] = json!(7)),
            "the AdmissionReview's request.uid is missing or is not a non-empty string",
        ),
        (
            with(&|review| review["request"]["object"] = json!("pod")),
            "the AdmissionReview's request.object is missing or is not an object",
        ),
    ] {
        let error = crate::webhook::review::review(body.as_bytes(), &Rules::default()).unwrap_err();
        assert_eq!(error.to_string(), message);
    }
    let deep = "[".repeat(100_000);
    assert!(crate::webhook::review::review(deep.as_bytes(), &Rules::default()).is_err(), "nesting is bounded");
    assert!(crate::webhook::review::review(&[0xff, 0xfe], &Rules::default()).is_err());
}

#[test]
fn warnings_are_limited_in_length_and_number_and_have_one_line() {
    let long = "é".repeat(200);
    let pod = json!({"metadata": {}, "spec": {
        "nodeSelector": {"beta.kubernetes.io/os": format!("a\n{long}"), "kubernetes.io/os": "b"}
    }});
    let review = answered(&pod_review(&pod));
    let warnings = review.response["response"]["warnings"].as_array().unwrap();
    assert_eq!(warnings.len(), 1);
    let warning = warnings[0].as_str().unwrap();
    assert!(warning.len() < 120 && !warning.contains('\n'), "{warning:?}");
}

#[test]
fn ids_of_an_earlier_review_stay_in_the_annotation() {
    let pod = json!({
        "metadata": {"annotations": {"stowage.dev/normalized": "n13,junk"}},
        "spec": {"nodeSelector": {"beta.kubernetes.io/os": "linux"}}
    });
    let out = patched(&pod, &answered(&pod_review(&pod)));
    assert_eq!(out["metadata"]["annotations"]["stowage.dev/normalized"], "n1,n13");
}

#[test]
fn a_disabled_rule_neither_changes_pods_nor_warns_and_stays_in_the_annotation() {
    let pod = json!({
        "metadata": {"annotations": {"stowage.dev/normalized": "n1"}},
        "spec": {
            "nodeSelector": {"beta.kubernetes.io/os": "linux", "kubernetes.io/arch": "arm64", "beta.kubernetes.io/arch": "amd64"},
            "containers": [{"resources": {"limits": {"nvidia.com/gpu": "1"}}}]
        }
    });
    let rules = Rules::without(&["n1", "n13"]);
    let review = crate::webhook::review::review(pod_review(&pod).to_string().as_bytes(), &rules).unwrap();
    assert_eq!((review.rules.as_slice(), &review.response["response"]["warnings"]), (&["n22"][..], &Value::Null));
    let out = patched(&pod, &review);
    assert_eq!(out["spec"]["nodeSelector"], pod["spec"]["nodeSelector"]);
    assert_eq!(out["spec"].get("tolerations"), None);
    assert_eq!(out["metadata"]["annotations"]["stowage.dev/normalized"], "n1,n22");
    let every = answered(&pod_review(&pod));
    assert!(every.rules == ["n1", "n22", "n13"] && every.response["response"]["warnings"].is_array());
}

fn key() -> impl Strategy<Value = &'static str> {
    prop::sample::select(vec![
        "beta.kubernetes.io/arch",
        "beta.kubernetes.io/os",
        "beta.kubernetes.io/instance-type",
        "failure-domain.beta.kubernetes.io/zone",
        "failure-domain.beta.kubernetes.io/region",
        "kubernetes.io/arch",
        "kubernetes.io/os",
        "topology.kubernetes.io/zone",
        "topology.kubernetes.io/region",
        "custom/key~x",
    ])
}

fn value() -> impl Strategy<Value = &'static str> {
    prop::sample::select(vec!["a", "b", "amd64"])
}

/// Mostly `shape`, sometimes null or a value of a wrong type.
fn mostly(shape: impl Strategy<Value = Value> + 'static) -> BoxedStrategy<Value> {
    prop_oneof![8 => shape, 1 => Just(Value::Null), 1 => Just(json!("odd")), 1 => Just(json!([7]))].boxed()
}

fn expressions() -> impl Strategy<Value = Value> {
    let operator = prop::sample::select(vec!["In", "NotIn", "Exists", "DoesNotExist", "Gt"]);
    prop::collection::vec((key(), operator, prop::collection::vec(value(), 0..3)), 0..3).prop_map(|all| {
        all.into_iter()
            .map(|(key, operator, values)| json!({"key": key, "operator": operator, "values": values}))
            .collect()
    })
}

fn container() -> impl Strategy<Value = Value> {
    let resource = prop::sample::select(vec!["cpu", "nvidia.com/gpu", "nvidia.com/mig-1g.5gb", "amd.com/gpu", "x.y/z"]);
    let amounts = move || {
        let quantity = prop::sample::select(vec![json!("1"), json!("0"), json!(2), json!("100m")]);
        mostly(
            prop::collection::btree_map(resource.clone(), quantity, 0..3)
                .prop_map(|amounts| amounts.into_iter().map(|(k, v)| (k.to_owned(), v)).collect()),
        )
    };
    (amounts(), amounts(), any::<bool>()).prop_map(|(requests, limits, sidecar)| {
        let mut container =
            json!({"name": "c", "resources": {"requests": requests, "limits": limits}, "future": {"k": [null, 1.5]}});
        if sidecar {
            container["restartPolicy"] = json!("Always");
        }
        container
    })
}

fn pod() -> impl Strategy<Value = Value> {
    let selector = mostly(
        prop::collection::btree_map(key(), value(), 0..5)
            .prop_map(|entries| entries.into_iter().map(|(k, v)| (k.to_owned(), Value::from(v))).collect()),
    );
    let terms = mostly(
        prop::collection::vec(expressions().prop_map(|e| json!({"matchExpressions": e})), 0..3).prop_map(Value::from),
    );
    let spread = mostly(
        prop::collection::vec((key(), prop::sample::select(vec!["DoNotSchedule", "ScheduleAnyway"])), 0..4).prop_map(
            |all| {
                all.into_iter()
                    .map(|(key, when)| json!({"topologyKey": key, "whenUnsatisfiable": when, "maxSkew": 1}))
                    .collect()
            },
        ),
    );
    let tolerations = mostly(
        prop::collection::vec(
            (
                prop::sample::select(vec!["", "nvidia.com/gpu", "x"]),
                prop::sample::select(vec!["", "NoSchedule", "NoExecute"]),
            ),
            0..3,
        )
        .prop_map(|all| {
            all.into_iter().map(|(key, effect)| json!({"key": key, "operator": "Exists", "effect": effect})).collect()
        }),
    );
    let annotations = mostly(prop_oneof![
        Just(json!({})),
        Just(json!({"karpenter.sh/do-not-evict": "true"})),
        Just(
            json!({"karpenter.sh/do-not-evict": "true", "karpenter.sh/do-not-disrupt": "true", "stowage.dev/normalized": "n9"})
        ),
    ]);
    let containers = || mostly(prop::collection::vec(container(), 0..3).prop_map(Value::from));
    (selector, terms, spread, tolerations, annotations, containers(), containers(), key()).prop_map(
        |(selector, terms, spread, tolerations, annotations, containers, init, topology)| {
            json!({
                "metadata": {"generateName": "p-", "annotations": annotations},
                "spec": {
                    "nodeSelector": selector, "tolerations": tolerations, "topologySpreadConstraints": spread,
                    "containers": containers, "initContainers": init, "newField": {"deep": [1, {"x": null}]},
                    "affinity": {
                        "nodeAffinity": {
                            "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms},
                            "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1, "preference": {"matchExpressions": []}}]
                        },
                        "podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": topology}]}
                    }
                }
            })
        },
    )
}

#[test]
fn every_rule_acts_on_some_generated_pod() {
    let mut runner = TestRunner::deterministic();
    let pods: Vec<Value> = (0..512).map(|_| pod().new_tree(&mut runner).unwrap().current()).collect();
    let acts = |rule: &Rule| pods.iter().any(|pod| (rule.apply)(&mut pod.clone()) || !(rule.warnings)(pod).is_empty());
    let idle: Vec<&str> = RULES.iter().filter(|rule| !acts(rule)).map(|rule| rule.id).collect();
    assert!(idle.is_empty(), "no property tests the rules {idle:?}: add the fields that they read to `pod()`");
}

/// A pod without the members that rules may change.
fn untouchable(pod: &Value) -> Value {
    let mut pod = pod.clone();
    for pointer in ["/metadata", "/spec"] {
        if let Some(object) = pod.pointer_mut(pointer).and_then(Value::as_object_mut) {
            for member in ["annotations", "nodeSelector", "affinity", "topologySpreadConstraints", "tolerations"] {
                object.remove(member);
            }
        }
    }
    for member in ["containers", "initContainers"] {
        for container in
            pod.pointer_mut("/spec").and_then(|spec| spec.get_mut(member)?.as_array_mut()).into_iter().flatten()
        {
            if let Some(resources) = container.pointer_mut("/resources").and_then(Value::as_object_mut) {
                resources.remove("requests");
            }
        }
    }
    pod
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_second_review_changes_nothing_and_other_members_are_kept(pod in pod()) {
        let first = answered(&pod_review(&pod));
        let once = patched(&pod, &first);
        let second = answered(&pod_review(&once));
        prop_assert_eq!(&patched(&once, &second), &once);
        prop_assert!(second.response["response"].get("patch").is_none());
        prop_assert_eq!(untouchable(&once), untouchable(&pod));
        prop_assert_eq!(first.result == ReviewResult::Patched, once != pod);
    }

    #[test]
    fn no_body_causes_a_panic(body in prop::collection::vec(any::<u8>(), 0..64)) {
        let _ = crate::webhook::review::review(&body, &Rules::default());
    }
}
