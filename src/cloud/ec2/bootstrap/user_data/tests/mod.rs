//! The conformance cases of user data, read back by each format's own parser: a mail parser for MIME, YAML for
//! NodeConfigs, TOML for Bottlerocket's settings. One file for each family.

mod al2;
mod al2023;
mod bottlerocket;
mod every_family;
mod properties;
mod windows;

use std::collections::BTreeMap;
use std::sync::LazyLock;

use k8s_openapi::api::core::v1::Taint;
use mail_parser::{MessageParser, MimeHeaders};
use serde_json::{Value, json};
use stowage_model::offering::CapacityType;

use super::*;
use crate::kubelet_config::KubeletMap;

const SCRIPT: &str = "#!/bin/bash\necho \"a: b\"";
const SHELL: &str = "text/x-shellscript";
const NODE_CONFIG: &str = "application/node.eks.aws";

static LABELS: LazyLock<BTreeMap<String, String>> = LazyLock::new(|| {
    [
        ("team", "shop"),
        ("karpenter.sh/nodepool", "default"),
        ("karpenter.k8s.aws/ec2nodeclass", "main"),
        ("topology.kubernetes.io/zone", "us-east-1a"),
    ]
    .map(|(key, value)| (key.to_owned(), value.to_owned()))
    .into()
});

fn taint(key: &str, value: &str, effect: &str) -> Taint {
    let value = (!value.is_empty()).then(|| value.to_owned());
    Taint { key: key.to_owned(), value, effect: effect.to_owned(), ..Taint::default() }
}

static TAINTS: LazyLock<Vec<Taint>> = LazyLock::new(|| vec![taint("dedicated", "gpu", "NoSchedule")]);

/// The inputs of the reference's goldens, with a few labels and a taint.
fn input() -> UserDataInput<'static> {
    UserDataInput {
        cluster_name: "test-cluster",
        endpoint: "https://test-cluster",
        ca_bundle: Some("Y2EtYnVuZGxlCg=="),
        service_cidr: Some("10.100.0.0/16"),
        cluster_dns: Some("10.0.100.10".parse().unwrap()),
        kubelet: None,
        max_pods: 110,
        labels: &LABELS,
        taints: &TAINTS,
        capacity_type: CapacityType::OnDemand,
        local_disks: false,
        custom: None,
        image_version: None,
    }
}

fn kubelet(value: Value) -> KubeletMap {
    serde_json::from_value(value).unwrap()
}

/// Type and body of each part, as a mail parser reads them.
fn mime_parts(text: &str) -> Vec<(String, String)> {
    assert!(!text.contains('\r'), "{text}");
    assert!(text.starts_with("MIME-Version: 1.0\nContent-Type: multipart/mixed; boundary=\"//"), "{text}");
    let message = MessageParser::default().parse(text.as_bytes()).unwrap();
    let part = |part: &mail_parser::MessagePart<'_>| {
        let kind = part.content_type().unwrap();
        let name = format!("{}/{}", kind.c_type, kind.c_subtype.as_deref().unwrap_or_default());
        (name, String::from_utf8(part.contents().to_vec()).unwrap())
    };
    // The first entry is the whole message.
    message.parts[1..].iter().map(part).collect()
}

fn made(family: AmiFamily, input: &UserDataInput<'_>) -> String {
    user_data(family, input).unwrap()
}

/// The generated part: the last one.
fn our_script(input: &UserDataInput<'_>) -> String {
    let (kind, body) = mime_parts(&made(AmiFamily::Al2, input)).pop().unwrap();
    assert_eq!(kind, SHELL);
    body
}

fn our_node_config(input: &UserDataInput<'_>) -> Value {
    let (kind, body) = mime_parts(&made(AmiFamily::Al2023, input)).pop().unwrap();
    assert_eq!(kind, NODE_CONFIG);
    serde_saphyr::from_str(&body).unwrap()
}

/// Bottlerocket's settings as JSON.
fn settings(input: &UserDataInput<'_>) -> Value {
    let document: toml::Table = made(AmiFamily::Bottlerocket, input).parse().unwrap();
    serde_json::to_value(&document["settings"]).unwrap()
}

/// Every interpreted member of a kubelet configuration.
fn all_settings() -> KubeletMap {
    kubelet(json!({
        "maxPods": 42, "podsPerCore": 3, "clusterDNS": ["10.0.9.9"],
        "systemReserved": {"memory": "200Mi", "cpu": "100m"},
        "kubeReserved": {"cpu": "50m", "ephemeral-storage": "2Gi"},
        "evictionHard": {"memory.available": "5%", "nodefs.available": "1Gi"},
        "evictionSoft": {"memory.available": "10%"},
        "evictionSoftGracePeriod": {"memory.available": "1m"},
        "evictionMaxPodGracePeriod": 30, "imageGCHighThresholdPercent": 80, "imageGCLowThresholdPercent": 60,
        "cpuCFSQuota": false,
    }))
}

const OUR_LABELS: &str = "karpenter.k8s.aws/ec2nodeclass=main,karpenter.sh/capacity-type=on-demand,\
                          karpenter.sh/do-not-sync-taints=true,karpenter.sh/nodepool=default,team=shop";
