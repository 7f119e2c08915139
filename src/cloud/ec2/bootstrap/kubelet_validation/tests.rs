//! Kubelet validation: the result of each configuration by AMI family.

use serde_json::json;
use stowage_api::Ec2NodeClass;

use super::*;
use crate::catalog::embedded;

fn spec(family: &str, kubelet: Value) -> Ec2NodeClassSpec {
    let kubelet = serde_json::from_value(kubelet).unwrap();
    Ec2NodeClassSpec { ami_family: Some(family.to_owned()), kubelet, ..Ec2NodeClassSpec::default() }
}

fn outcome(family: &str, kubelet: Value) -> Result<(), InvalidKubelet> {
    validate(&spec(family, kubelet), Gate::Off).map(|dropped| assert_eq!(dropped, None))
}

/// The result with the gate on, on the embedded instance types: the member that counts as not set, if any.
fn outcome_with_gate(family: &str, kubelet: Value) -> Result<Option<String>, InvalidKubelet> {
    let class = Ec2NodeClass::new("default", spec(family, kubelet));
    let settings = NodeSettings::of(Some(&class)).with_expressions(&class);
    let types = embedded().instance_types.iter().map(|entry| (entry.name.clone(), entry.clone())).collect();
    let dropped = validate(&class.spec, Gate::On { settings: &settings, types: &types })?;
    Ok(dropped.map(|unusable| unusable.place))
}

fn problems(kubelet: Value) -> Vec<String> {
    match outcome("AL2023", kubelet.clone()) {
        Err(InvalidKubelet::Invalid(problems)) => problems,
        other => panic!("{kubelet} should be invalid, got {other:?}"),
    }
}

#[test]
fn c34_a_valid_configuration_is_accepted() {
    for kubelet in [
        json!(null),
        json!({}),
        json!({
            "maxPods": 110, "podsPerCore": 10, "kubeReserved": {"cpu": "200m", "memory": "100Mi"},
            "systemReserved": {"ephemeral-storage": "1Gi", "pid": "1000"}, "evictionHard": {"memory.available": "5%"},
        }),
        json!({"serializeImagePulls": false}),
        json!({"logging": {"format": "json", "flushFrequency": "5s",
            "options": {"json": {"infoBufferSize": "100Mi", "splitStream": true}}}}),
        json!({"evictionHard": {"nodefs.available": "500Mi"}}),
        json!({"evictionHard": {"memory.available": "0%", "imagefs.inodesFree": "100%", "pid.available": "12.5%"}}),
        json!({"evictionHard": {"memory.available": "-0"}}),
        json!({"evictionMinimumReclaim": {"memory.available": "0"}}),
        json!({"evictionSoft": {"memory.available": "10%"}, "evictionSoftGracePeriod": {"memory.available": "1m"}}),
        json!({"imageGCHighThresholdPercent": 80, "imageGCLowThresholdPercent": 60}),
        json!({"imageGCHighThresholdPercent": 100}),
        json!({"imageGCLowThresholdPercent": 0}),
        json!({"maxPods": 0, "podsPerCore": 0, "evictionMaxPodGracePeriod": 0}),
        json!({"clusterDNS": ["10.0.0.10", "10.0.0.11"]}),
        json!({"kubeReserved": null, "cpuCFSQuota": null}),
    ] {
        assert_eq!(outcome("AL2023", kubelet.clone()), Ok(()), "{kubelet}");
    }
}

#[test]
fn c34_members_that_a_kubelet_rejects_or_ignores_are_reported() {
    let signals = "use one of memory.available, nodefs.available, nodefs.inodesFree, imagefs.available, \
                   imagefs.inodesFree, pid.available";
    for (kubelet, expected) in [
        (
            json!({"notAKubeletField": true}),
            "spec.kubelet.notAKubeletField: not a member of the kubelet's configuration; check its spelling",
        ),
        (
            json!({"logging": {"bogus": true}}),
            "spec.kubelet.logging.bogus: not a member of the kubelet's configuration; check its spelling",
        ),
        (
            json!({"logging": {"options": {"json": {"nope": "x"}}}}),
            "spec.kubelet.logging.options.json.nope: not a member of the kubelet's configuration; check its spelling",
        ),
        (json!({"podsPerCore": "ten"}), "spec.kubelet.podsPerCore: expected a whole number of 32 bits, found \"ten\""),
        (json!({"logging": {"format": 12345}}), "spec.kubelet.logging.format: expected a string, found 12345"),
        (
            json!({"a": {"b": [1, "two", true]}}),
            "spec.kubelet.a: not a member of the kubelet's configuration; check its spelling",
        ),
        (json!({"maxPods": -1}), "spec.kubelet.maxPods: -1 is negative"),
        (json!({"maxPods": true}), "spec.kubelet.maxPods: expected a whole number of 32 bits, found true"),
        (json!({"podsPerCore": -1}), "spec.kubelet.podsPerCore: -1 is negative"),
        (json!({"evictionMaxPodGracePeriod": -1}), "spec.kubelet.evictionMaxPodGracePeriod: -1 is negative"),
        (
            json!({"imageGCHighThresholdPercent": 101}),
            "spec.kubelet.imageGCHighThresholdPercent: 101 is not a percentage, 0 to 100",
        ),
        (
            json!({"imageGCHighThresholdPercent": -1}),
            "spec.kubelet.imageGCHighThresholdPercent: -1 is not a percentage, 0 to 100",
        ),
        (
            json!({"imageGCLowThresholdPercent": 101}),
            "spec.kubelet.imageGCLowThresholdPercent: 101 is not a percentage, 0 to 100",
        ),
        (
            json!({"imageGCLowThresholdPercent": -1}),
            "spec.kubelet.imageGCLowThresholdPercent: -1 is not a percentage, 0 to 100",
        ),
        (
            json!({"imageGCHighThresholdPercent": 60, "imageGCLowThresholdPercent": 80}),
            "spec.kubelet.imageGCHighThresholdPercent: 60 is not above imageGCLowThresholdPercent, 80",
        ),
        (
            json!({"imageGCHighThresholdPercent": 70, "imageGCLowThresholdPercent": 70}),
            "spec.kubelet.imageGCHighThresholdPercent: 70 is not above imageGCLowThresholdPercent, 70",
        ),
        (
            json!({"kubeReserved": {"gpu": "1"}}),
            "spec.kubelet.kubeReserved: \"gpu\" can't be reserved, only cpu, memory, ephemeral-storage, pid",
        ),
        (
            json!({"systemReserved": {"gpu": "1"}}),
            "spec.kubelet.systemReserved: \"gpu\" can't be reserved, only cpu, memory, ephemeral-storage, pid",
        ),
        (json!({"kubeReserved": {"cpu": "-1"}}), "spec.kubelet.kubeReserved[cpu]: \"-1\" is negative"),
        (json!({"systemReserved": {"cpu": "-1"}}), "spec.kubelet.systemReserved[cpu]: \"-1\" is negative"),
        (json!({"kubeReserved": {"cpu": 1}}), "spec.kubelet.kubeReserved[cpu]: expected a string, found 1"),
        (json!({"systemReserved": {"cpu": 1}}), "spec.kubelet.systemReserved[cpu]: expected a string, found 1"),
        (
            json!({"evictionHard": {"notASignal": "5%"}}),
            &format!("spec.kubelet.evictionHard: \"notASignal\" is not a signal of eviction, {signals}"),
        ),
        (
            json!({"evictionMinimumReclaim": {"notASignal": "500Mi"}}),
            &format!("spec.kubelet.evictionMinimumReclaim: \"notASignal\" is not a signal of eviction, {signals}"),
        ),
        (
            json!({"evictionHard": {"memory.available": "lots"}}),
            "spec.kubelet.evictionHard[memory.available]: \"lots\" is neither a percentage nor a quantity",
        ),
        (
            json!({"evictionMinimumReclaim": {"memory.available": "lots"}}),
            "spec.kubelet.evictionMinimumReclaim[memory.available]: \"lots\" is neither a percentage nor a quantity",
        ),
        (
            json!({"evictionHard": {"memory.available": "101%"}}),
            "spec.kubelet.evictionHard[memory.available]: \"101%\" is not a percentage, 0% to 100%",
        ),
        (
            json!({"evictionHard": {"memory.available": "NaN%"}}),
            "spec.kubelet.evictionHard[memory.available]: \"NaN%\" is not a percentage, 0% to 100%",
        ),
        (
            json!({"evictionHard": {"memory.available": "-5Mi"}}),
            "spec.kubelet.evictionHard[memory.available]: \"-5Mi\" is negative",
        ),
        (
            json!({"evictionHard": {"memory.available": 5}}),
            "spec.kubelet.evictionHard[memory.available]: expected a string, found 5",
        ),
        (
            json!({"evictionSoft": {"memory.available": "10%"}}),
            "spec.kubelet.evictionSoft[memory.available]: evictionSoftGracePeriod has no period of this signal",
        ),
        (
            json!({"evictionSoftGracePeriod": {"memory.available": "1m"}}),
            "spec.kubelet.evictionSoftGracePeriod[memory.available]: evictionSoft has no threshold of this signal",
        ),
        (
            json!({"evictionSoft": {"memory.available": "10%"}, "evictionSoftGracePeriod": {"memory.available": "5x"}}),
            "spec.kubelet.evictionSoftGracePeriod[memory.available]: \"5x\" is not a duration such as 30s, 1m30s or 1.5h",
        ),
        (
            json!({"evictionSoft": {"memory.available": "10%"}, "evictionSoftGracePeriod": {"memory.available": "-1m"}}),
            "spec.kubelet.evictionSoftGracePeriod[memory.available]: \"-1m\" is negative",
        ),
        (
            json!({"registerWithTaints": [{"key": "dedicated", "value": "gpu", "effect": "NoSchedule"}]}),
            "spec.kubelet.registerWithTaints: can't be set, it is made from the NodeClaim's taints; set them on the NodePool",
        ),
        (json!({"clusterDNS": "10.0.0.10"}), "spec.kubelet.clusterDNS: expected a list, found \"10.0.0.10\""),
        (json!({"cpuCFSQuota": "true"}), "spec.kubelet.cpuCFSQuota: expected true or false, found \"true\""),
        (
            json!({"evictionMaxPodGracePeriod": "30"}),
            "spec.kubelet.evictionMaxPodGracePeriod: expected a whole number of 32 bits, found \"30\"",
        ),
        (
            json!({"imageGCHighThresholdPercent": "80"}),
            "spec.kubelet.imageGCHighThresholdPercent: expected a whole number of 32 bits, found \"80\"",
        ),
        (
            json!({"imageGCLowThresholdPercent": "70"}),
            "spec.kubelet.imageGCLowThresholdPercent: expected a whole number of 32 bits, found \"70\"",
        ),
    ] {
        assert_eq!(problems(kubelet.clone()), [expected], "{kubelet}");
    }
}

#[test]
fn c34_soft_thresholds_and_periods_of_unknown_signals_are_reported() {
    let found =
        problems(json!({"evictionSoft": {"notASignal": "5%"}, "evictionSoftGracePeriod": {"notASignal": "1m"}}));
    assert_eq!(found.len(), 2);
    assert!(found[0].starts_with("spec.kubelet.evictionSoft: \"notASignal\""), "{found:?}");
    assert!(found[1].starts_with("spec.kubelet.evictionSoftGracePeriod: \"notASignal\""), "{found:?}");
    let crossed = problems(json!({
        "evictionSoft": {"memory.available": "10%"}, "evictionSoftGracePeriod": {"nodefs.available": "1m"},
    }));
    assert_eq!(crossed.len(), 2);
}

#[test]
fn c34_all_problems_are_reported_at_once() {
    let error = outcome(
        "AL2023",
        json!({"podsPerCore": -1, "kubeReserved": {"gpu": "1", "cpu": "-1"}, "evictionHard": {"notASignal": "5%"}}),
    )
    .unwrap_err();
    assert_eq!(error.event().reason(), "InvalidKubeletConfiguration");
    assert_eq!(error.to_string().split("; ").count(), 4, "{error}");
}

#[test]
fn c34_expressions_are_rejected_while_off_after_the_schema_check() {
    for (kubelet, place) in [
        (json!({"maxPods": "vcpus * 10"}), "maxPods"),
        (json!({"maxPods": "vcpus * 10", "podsPerCore": 10}), "maxPods"),
        (json!({"kubeReserved": {"memory": "memory_mib * 0.1"}}), "kubeReserved[memory]"),
        (json!({"systemReserved": {"cpu": "vcpus * 10m", "memory": "1Gi"}}), "systemReserved[cpu]"),
    ] {
        for family in ["AL2023", "AL2", "Custom"] {
            let error = outcome(family, kubelet.clone()).unwrap_err();
            assert_eq!(error, InvalidKubelet::ExpressionsDisabled(vec![place.to_owned()]), "{kubelet}");
            assert_eq!(error.event().reason(), "KubeletExpressionsDisabled");
        }
    }
    let both = outcome("AL2", json!({"maxPods": "vcpus * 10", "podsPerCore": -1})).unwrap_err();
    assert_eq!(both.event().reason(), "InvalidKubeletConfiguration");
    let message = outcome("AL2", json!({"maxPods": "vcpus * 10"})).unwrap_err().to_string();
    assert_eq!(
        message,
        "spec.kubelet holds an expression in maxPods, and expressions are off: write a number, or set AWS_FEATURE_GATES to \
         NodeClassCEL=true"
    );
}

#[test]
fn c34_expressions_are_accepted_while_on_if_they_evaluate_on_every_type() {
    for (kubelet, dropped) in [
        (json!({"maxPods": "min(110, vcpus * 10)", "podsPerCore": 10}), None),
        (json!({"maxPods": 110, "kubeReserved": {"memory": "11 * max_pods + 255"}}), None),
        (json!({"systemReserved": {"cpu": "vcpus * 10", "memory": "1Gi", "pid": "max_pods * 20"}}), None),
        (json!({"kubeReserved": {"cpu": "vcpus * 10m"}}), Some("kubeReserved[cpu]")),
        (json!({"systemReserved": {"memory": "8192 - memory_mib"}}), Some("systemReserved[memory]")),
    ] {
        for family in ["AL2023", "AL2", "Windows2022", "Custom"] {
            let found = outcome_with_gate(family, kubelet.clone());
            assert_eq!(found, Ok(dropped.map(str::to_owned)), "{family} {kubelet}");
        }
    }
    let (invalid, failed) = ("KubeletExpressionInvalid", "KubeletExpressionEvaluationFailed");
    for (max_pods, reason, expected) in [
        ("vcpus *", invalid, "it is no CEL expression"),
        ("pods * 2", failed, "Undeclared reference to 'pods'"),
        ("8 - vcpus", failed, "is negative"),
        ("vcpus / (vcpus - 2)", failed, "Division by zero"),
        ("vcpus * 2147483647", failed, "above the maximum of 2147483647"),
        ("instance_type", failed, "the result is a string, expected a number (int or double)"),
    ] {
        let error = outcome_with_gate("AL2023", json!({"maxPods": max_pods})).unwrap_err();
        assert_eq!(error.event().reason(), reason);
        let message = error.to_string();
        assert!(
            message.starts_with("spec.kubelet.maxPods: the expression ") && message.contains(expected),
            "{message}"
        );
    }
    let shape = outcome_with_gate("AL2", json!({"maxPods": "vcpus * 10", "podsPerCore": -1})).unwrap_err();
    assert_eq!(shape.event().reason(), "InvalidKubeletConfiguration");
    let negative = outcome_with_gate("AL2", json!({"kubeReserved": {"cpu": "-1 * vcpus"}})).unwrap_err();
    assert_eq!(negative.to_string(), "spec.kubelet.kubeReserved[cpu]: \"-1 * vcpus\" is negative");
    let lost = outcome_with_gate("Bottlerocket", json!({"maxPods": "vcpus * 10", "podsPerCore": 2})).unwrap_err();
    assert_eq!(lost.event().reason(), "UnsupportedKubeletConfiguration");
    for (max_pods, reason) in [("vcpus *", invalid), ("8 - vcpus", "UnsupportedKubeletConfiguration")] {
        let both = outcome_with_gate("Bottlerocket", json!({"maxPods": max_pods, "podsPerCore": 2})).unwrap_err();
        assert_eq!(both.event().reason(), reason, "the first step that finds something decides");
    }
}

#[test]
fn c34_each_family_rejects_unsupported_settings() {
    let lost = "spec.kubelet: nodes of the AMI family {} can't be given ";
    let one = "spec.kubelet.clusterDNS: nodes of the AMI family {} take one address, found 2";
    let passthrough = json!({"serializeImagePulls": false, "cpuManagerPolicy": "static"});
    let per_core = json!({"podsPerCore": 2, "maxPods": 20});
    let addresses = json!({"clusterDNS": ["10.0.0.10", "10.0.0.11"]});
    let everything = json!({"serializeImagePulls": false, "podsPerCore": 2, "clusterDNS": ["10.0.0.10", "fd00::a"]});
    for (family, kubelet, expected) in [
        ("AL2", &passthrough, vec![format!("{lost}cpuManagerPolicy, serializeImagePulls")]),
        ("Bottlerocket", &passthrough, vec![format!("{lost}cpuManagerPolicy, serializeImagePulls")]),
        ("Windows2022", &passthrough, vec![format!("{lost}cpuManagerPolicy, serializeImagePulls")]),
        ("AL2023", &passthrough, vec![]),
        ("Custom", &passthrough, vec![]),
        ("AL2", &per_core, vec![]),
        ("Bottlerocket", &per_core, vec![format!("{lost}podsPerCore")]),
        ("Windows2019", &per_core, vec![]),
        ("AL2023", &per_core, vec![]),
        ("Custom", &per_core, vec![]),
        ("AL2", &addresses, vec![one.to_owned()]),
        ("Bottlerocket", &addresses, vec![one.to_owned()]),
        ("Windows2025", &addresses, vec![one.to_owned()]),
        ("AL2023", &addresses, vec![]),
        ("Custom", &addresses, vec![]),
        ("Bottlerocket", &everything, vec![format!("{lost}podsPerCore, serializeImagePulls"), one.to_owned()]),
        ("Bottlerocket", &json!({"podsPerCore": 0}), vec![format!("{lost}podsPerCore")]),
    ] {
        let expected: Vec<String> = expected.iter().map(|line| line.replace("{}", family)).collect();
        let outcome = outcome(family, kubelet.clone());
        if expected.is_empty() {
            assert_eq!(outcome, Ok(()), "{family} {kubelet}");
        } else {
            let error = outcome.unwrap_err();
            assert_eq!(error.event().reason(), "UnsupportedKubeletConfiguration");
            assert_eq!(error, InvalidKubelet::Unsupported(expected), "{family} {kubelet}");
        }
    }
}

#[test]
fn c34_a_configuration_that_passes_can_be_parsed() {
    // One wrong value for each interpreted member: none may pass, since a launch would fail.
    for (field, wrong) in [
        ("clusterDNS", json!("10.0.0.10")),
        ("cpuCFSQuota", json!("true")),
        ("evictionHard", json!({"memory.available": 5})),
        ("evictionMaxPodGracePeriod", json!("30")),
        ("evictionSoft", json!({"memory.available": 5})),
        ("evictionSoftGracePeriod", json!({"memory.available": "5x"})),
        ("imageGCHighThresholdPercent", json!("80")),
        ("imageGCLowThresholdPercent", json!("70")),
        ("kubeReserved", json!({"cpu": 1})),
        ("maxPods", json!(true)),
        ("podsPerCore", json!("10")),
        ("systemReserved", json!({"cpu": 1})),
    ] {
        assert!(INTERPRETED.contains(&field));
        let map: KubeletMap = serde_json::from_value(json!({field: wrong})).unwrap();
        assert!(Kubelet::parse(Some(&map)).is_err(), "{field}");
        assert!(!problems_of(&map).is_empty(), "{field}");
    }
}
