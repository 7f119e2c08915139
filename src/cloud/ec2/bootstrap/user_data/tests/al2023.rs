//! AL2023: MIME whose last part is a NodeConfig.

use serde_json::json;

use super::*;
use crate::ec2::bootstrap::user_data::tests::{
    NODE_CONFIG, OUR_LABELS, SCRIPT, SHELL, all_settings, input, made, mime_parts, our_node_config,
};

#[test]
fn c22_al2023_user_data_merges_shell_yaml_mime_and_empty() {
    let yaml =
        "apiVersion: node.eks.aws/v1alpha1\nkind: NodeConfig\nspec:\n  kubelet:\n    config:\n      maxPods: 42\n";
    // As in the reference, the last boundary may lack the closing dashes.
    let mime = format!(
        "MIME-Version: 1.0\nContent-Type: multipart/mixed; boundary=\"//\"\n\n--//\nContent-Type: {NODE_CONFIG}\nX-Mine: 1\n\n{yaml}--//\n\
         Content-Type: text/x-shellscript; charset=\"us-ascii\"\n\n{SCRIPT}\n--//\n"
    );
    let our_text = mime_parts(&made(AmiFamily::Al2023, &input())).pop().unwrap();
    let part = |kind: &str, body: &str| (kind.to_owned(), body.to_owned());
    for (custom, expected) in [
        (Some(SCRIPT), vec![part(SHELL, SCRIPT)]),
        (Some("echo hi\n"), vec![part(SHELL, "echo hi\n")]),
        (Some(yaml), vec![part(NODE_CONFIG, yaml)]),
        (Some(mime.as_str()), vec![part(NODE_CONFIG, yaml.trim_end()), part(SHELL, SCRIPT)]),
        (Some("\n"), vec![]),
        (None, vec![]),
    ] {
        let text = made(AmiFamily::Al2023, &UserDataInput { custom, ..input() });
        let expected: Vec<_> = expected.into_iter().chain([our_text.clone()]).collect();
        assert_eq!(mime_parts(&text), expected, "{custom:?}");
        assert!(!text.contains("X-Mine"), "only the type of a part is kept");
        assert!(text.ends_with("\n\n--//--\n"), "{text}");
    }
    let encoded = "Content-Type: multipart/mixed; boundary=b\n\n--b\nContent-Type: text/x-shellscript\n\
                   content-transfer-encoding: base64\n\nIyEvYmluL3NoCg==\n--b--\n";
    let text = made(AmiFamily::Al2023, &UserDataInput { custom: Some(encoded), ..input() });
    assert_eq!(mime_parts(&text)[0], part(SHELL, "#!/bin/sh\n"), "an encoded part can still be decoded");
}

#[test]
fn c22_al2023_node_config_is_complete() {
    let raw = mime_parts(&made(AmiFamily::Al2023, &input())).pop().unwrap().1;
    assert!(
        raw.starts_with("# NodeConfig made by Stowage\n") && raw.ends_with('\n') && !raw.ends_with("\n\n"),
        "{raw}"
    );
    assert_eq!(
        our_node_config(&input()),
        json!({
            "apiVersion": "node.eks.aws/v1alpha1", "kind": "NodeConfig", "metadata": {},
            "spec": {
                "cluster": {
                    "apiServerEndpoint": "https://test-cluster", "certificateAuthority": "Y2EtYnVuZGxlCg==",
                    "cidr": "10.100.0.0/16", "name": "test-cluster",
                },
                "containerd": {},
                "instance": {"localStorage": {}},
                "kubelet": {
                    "config": {
                        "clusterDNS": ["10.0.100.10"], "maxPods": 110,
                        "registerWithTaints": [
                            {"effect": "NoSchedule", "key": "dedicated", "value": "gpu"},
                            {"effect": "NoExecute", "key": "karpenter.sh/unregistered"},
                        ],
                    },
                    "flags": [format!("--node-labels=\"{OUR_LABELS}\"")],
                },
            },
        })
    );
}

#[test]
fn c22_al2023_passes_every_kubelet_field_and_local_disks() {
    let mut kubelet = all_settings();
    kubelet.insert("logging".to_owned(), json!({"verbosity": 4, "format": "on"}));
    kubelet.insert("kubeReserved".to_owned(), json!({"cpu": "vcpus * 10", "memory": "0755"}));
    kubelet.insert("clusterDNS".to_owned(), json!(["10.0.9.9", "fd00::a"]));
    let config = our_node_config(&UserDataInput { kubelet: Some(&kubelet), local_disks: true, ..input() });
    assert_eq!(config["spec"]["instance"], json!({"localStorage": {"strategy": "RAID0"}}));
    let mut expected = kubelet;
    expected.insert("kubeReserved".to_owned(), json!({"memory": "0755"}));
    expected.insert("registerWithTaints".to_owned(), config["spec"]["kubelet"]["config"]["registerWithTaints"].clone());
    assert_eq!(
        config["spec"]["kubelet"]["config"],
        json!(expected),
        "expressions are omitted, everything else is unchanged"
    );
}

#[test]
fn c22_al2023_without_a_service_cidr_the_class_is_not_ready() {
    for service_cidr in [None, Some("")] {
        let without = UserDataInput { service_cidr, ..input() };
        assert_eq!(user_data(AmiFamily::Al2023, &without), Err(UserDataError::NoServiceCidr));
        assert!(user_data(AmiFamily::Al2, &without).is_ok(), "no other family needs it");
    }
    let bundle = UserDataInput { ca_bundle: Some("not base64!"), ..input() };
    assert!(matches!(user_data(AmiFamily::Al2023, &bundle), Err(UserDataError::CaBundle(_))));
    assert_eq!(
        our_node_config(&UserDataInput { ca_bundle: None, ..input() })["spec"]["cluster"].get("certificateAuthority"),
        None
    );
}
