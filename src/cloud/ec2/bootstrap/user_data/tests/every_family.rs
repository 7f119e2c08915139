//! User data of several families, and of Custom.

use serde_json::json;

use super::*;
use crate::ec2::bootstrap::user_data::input::node_labels;
use crate::ec2::bootstrap::user_data::tests::{
    LABELS, input, kubelet, made, our_node_config, our_script, settings, taint,
};

#[test]
fn c21_quotes_are_escaped() {
    let script = our_script(&UserDataInput { cluster_name: "it's; reboot", ..input() });
    assert!(script.contains(r"/etc/eks/bootstrap.sh 'it'\''s; reboot' --apiserver-endpoint"), "{script}");
    let text = made(AmiFamily::Windows2022, &UserDataInput { cluster_name: "it's; reboot", ..input() });
    assert!(text.contains("-EKSClusterName 'it''s; reboot' -APIServerEndpoint"), "{text}");
}

#[test]
fn c25_custom_user_data_is_not_changed() {
    for custom in [None, Some(""), Some("any\r\nthing \u{1f980}\0"), Some("MIME-Version: nonsense")] {
        let text = made(AmiFamily::Custom, &UserDataInput { custom, service_cidr: None, ..input() });
        assert_eq!(text, custom.unwrap_or_default());
    }
    let labels = node_labels(AmiFamily::Custom, &LABELS, CapacityType::Spot);
    assert_eq!(labels.get("karpenter.sh/do-not-sync-taints"), None);
    assert_eq!(labels["karpenter.sh/capacity-type"], "spot");
    assert!(AmiFamily::Custom.default_block_devices().is_empty());
}

#[test]
fn c26_labels_that_a_kubelet_may_not_set_are_left_out() {
    for (key, kept) in [
        ("kubernetes.io/os", false),
        ("node.kubernetes.io/instance-type", false),
        ("topology.kubernetes.io/zone", false),
        ("k8s.io/x", false),
        ("topology.k8s.io/x", false),
        ("node-restriction.kubernetes.io/x", false),
        ("sub.node-restriction.kubernetes.io/x", false),
        ("karpenter.sh/nodepool", true),
        ("karpenter.k8s.aws/instance-family", true),
        ("topology.k8s.aws/zone-id", true),
        ("mykubernetes.io/x", true),
        ("example.com/kubernetes.io", true),
        ("kubernetes.io", true),
        ("team", true),
    ] {
        let claim = [(key.to_owned(), "v".to_owned())].into();
        let labels = node_labels(AmiFamily::Al2023, &claim, CapacityType::Spot);
        assert_eq!(labels.contains_key(key), kept, "{key}");
        assert_eq!(labels.len(), if kept { 3 } else { 2 }, "{key}");
    }
    let zone = "topology.kubernetes.io/zone";
    for family in AmiFamily::ALL.into_iter().filter(|family| *family != AmiFamily::Custom) {
        let text = made(family, &input());
        assert!(!text.contains(zone) && text.contains("karpenter.sh/nodepool"), "{family}");
    }
}

#[test]
fn an_unregistered_taint_of_the_claim_is_not_duplicated() {
    let own = [
        taint("karpenter.sh/unregistered", "", "NoExecute"),
        taint("a", "1", "NoSchedule"),
        taint("a", "2", "NoExecute"),
    ];
    let with = UserDataInput { taints: &own, ..input() };
    let flag = "--register-with-taints=\"karpenter.sh/unregistered:NoExecute,a=1:NoSchedule,a=2:NoExecute\"";
    assert!(our_script(&with).contains(flag));
    assert_eq!(
        settings(&with)["kubernetes"]["node-taints"],
        json!({"a": ["1:NoSchedule", "2:NoExecute"], "karpenter.sh/unregistered": [":NoExecute"]})
    );
    assert_eq!(our_node_config(&with)["spec"]["kubelet"]["config"]["registerWithTaints"].as_array().unwrap().len(), 3);
}

#[test]
fn an_invalid_kubelet_configuration_is_an_error() {
    let wrong = kubelet(json!({"clusterDNS": "10.0.0.10"}));
    for family in AmiFamily::ALL.into_iter().filter(|family| *family != AmiFamily::Custom) {
        let error = user_data(family, &UserDataInput { kubelet: Some(&wrong), ..input() }).unwrap_err();
        assert!(matches!(error, UserDataError::Kubelet(_)), "{family}");
    }
}
