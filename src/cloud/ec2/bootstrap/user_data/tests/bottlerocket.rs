//! Bottlerocket: TOML with the controller's settings merged over the user's.

use serde_json::json;

use super::*;
use crate::ec2::bootstrap::user_data::tests::{all_settings, input, settings};

#[test]
fn c23_bottlerocket_settings_override_the_users() {
    let custom = r#"
        [settings.kubernetes]
        "unknown-setting" = "unknown"
        api-server = 'replaceme'
        cloud-provider = 'external'
        cluster-certificate = "replaceme"
        cluster-name = 'replaceme'
        max-pods = 9999999999 # replaceme
        [settings.kubernetes.eviction-hard]
        "memory.available" = "12%"
        [settings.kubernetes.labels]
        "replace" = "me"
        [settings.kubernetes.node-labels]
        "custom-node-label" = "custom"
        "team" = "should-be-overridden"
        [settings.kubernetes.node-taints]
        "replace" = ["me:Schedule"]
        [settings.kubernetes.static-pods.web]
        enabled = true
        manifest = "cG9k"
        color = "blue"
        [settings.network]
        hostname = "test.local"
        hosts = [["10.0.0.0", ["test.example.com", "test1.example.com"]]]
        [settings.ntp]
        time-servers = ["169.254.169.123"]
    "#;
    let expected = json!({
        "kubernetes": {
            "api-server": "https://test-cluster", "cloud-provider": "external", "cluster-certificate": "Y2EtYnVuZGxlCg==",
            "cluster-dns-ip": "10.0.100.10", "cluster-name": "test-cluster", "max-pods": 110,
            "eviction-hard": {"memory.available": "12%"},
            "node-labels": {
                "custom-node-label": "custom", "karpenter.k8s.aws/ec2nodeclass": "main", "karpenter.sh/capacity-type": "on-demand",
                "karpenter.sh/do-not-sync-taints": "true", "karpenter.sh/nodepool": "default", "team": "shop",
            },
            "node-taints": {"dedicated": ["gpu:NoSchedule"], "karpenter.sh/unregistered": [":NoExecute"]},
            "static-pods": {"web": {"enabled": true, "manifest": "cG9k"}},
        },
        "network": {"hostname": "test.local", "hosts": [["10.0.0.0", ["test.example.com", "test1.example.com"]]]},
        "ntp": {"time-servers": ["169.254.169.123"]},
    });
    assert_eq!(settings(&UserDataInput { custom: Some(custom), ..input() }), expected);
    assert_eq!(
        ignored_settings(custom),
        [
            "settings.kubernetes.labels",
            "settings.kubernetes.static-pods.web.color",
            "settings.kubernetes.unknown-setting"
        ]
    );
    let bare = settings(&input());
    assert_eq!(bare["kubernetes"]["max-pods"], 110);
    assert_eq!(bare.as_object().unwrap().len(), 1);
    assert!(ignored_settings("").is_empty());
}

#[test]
fn c23_bottlerocket_each_kubelet_map_replaces_the_users_of_that_name() {
    let custom = "[settings.kubernetes]\ncluster-dns-ip = ['10.1.1.1']\n[settings.kubernetes.kube-reserved]\ncpu = '1'\nmemory = '1Gi'\n\
                  [settings.kubernetes.system-reserved]\ncpu = '1'\n[settings.kubernetes.eviction-hard]\n'memory.available' = '1%'\n";
    let mut kubelet = all_settings();
    kubelet.remove("evictionHard");
    kubelet.remove("podsPerCore");
    let kubernetes =
        settings(&UserDataInput { kubelet: Some(&kubelet), custom: Some(custom), ..input() })["kubernetes"].take();
    for (name, expected) in [
        ("cluster-dns-ip", json!("10.0.9.9")),
        ("max-pods", json!(42)),
        ("kube-reserved", json!({"cpu": "50m", "ephemeral-storage": "2Gi"})),
        ("system-reserved", json!({"cpu": "100m", "memory": "200Mi"})),
        ("eviction-hard", json!({"memory.available": "1%"})),
        ("eviction-soft", json!({"memory.available": "10%"})),
        ("eviction-soft-grace-period", json!({"memory.available": "1m0s"})),
        ("eviction-max-pod-grace-period", json!(30)),
        ("image-gc-high-threshold-percent", json!("80")),
        ("image-gc-low-threshold-percent", json!("60")),
        ("cpu-cfs-quota-enforced", json!(false)),
    ] {
        assert_eq!(kubernetes[name], expected, "{name}");
    }
    let nothing_discovered = UserDataInput { cluster_dns: None, custom: Some(custom), ..input() };
    assert_eq!(settings(&nothing_discovered)["kubernetes"]["cluster-dns-ip"], json!(["10.1.1.1"]));
}

#[test]
fn c23_bottlerocket_combines_local_disks_before_the_users_commands() {
    let custom = "[settings.bootstrap-commands.100-mine]\ncommands = [['true']]\nmode = 'once'\nessential = false\n";
    let long = [
        "apiclient",
        "ephemeral-storage",
        "bind",
        "--dirs",
        "/var/lib/containerd",
        "/var/lib/kubelet",
        "/var/log/pods",
    ];
    for (version, bind) in
        [(None, &long[..]), (Some("v1.45.0"), &long[..]), (Some("v1.46.0"), &long[..3]), (Some("latest"), &long[..3])]
    {
        let with = UserDataInput { local_disks: true, image_version: version, custom: Some(custom), ..input() };
        assert_eq!(
            settings(&with)["bootstrap-commands"],
            json!({
                "000-mount-instance-storage": {
                    "commands": [["apiclient", "ephemeral-storage", "init"], bind], "mode": "always", "essential": true,
                },
                "100-mine": {"commands": [["true"]], "mode": "once", "essential": false},
            }),
            "{version:?}"
        );
    }
    assert_eq!(settings(&input()).get("bootstrap-commands"), None);
}

#[test]
fn c23_invalid_bottlerocket_user_data_is_reported() {
    for (custom, expected) in [
        ("[settings]\nkubernetes = 5", "spec.userData: settings.kubernetes: expected a table, found integer"),
        ("settings = 'x'", "spec.userData: settings: expected a table, found string"),
        (
            "[settings.kubernetes]\nregistry-qps = 'ten'",
            "spec.userData: settings.kubernetes.registry-qps: expected a whole number, found string",
        ),
        (
            "[settings.kubernetes.node-labels]\nx = 1",
            "spec.userData: settings.kubernetes.node-labels: expected a table of strings, found table",
        ),
        (
            "[settings.kubernetes.static-pods]\nweb = true",
            "spec.userData: settings.kubernetes.static-pods.web: expected a table, found boolean",
        ),
        (
            "[settings.kubernetes]\nallowed-unsafe-sysctls = 'a'",
            "spec.userData: settings.kubernetes.allowed-unsafe-sysctls: expected a list of strings, found string",
        ),
    ] {
        let error = user_data(AmiFamily::Bottlerocket, &UserDataInput { custom: Some(custom), ..input() }).unwrap_err();
        assert_eq!(error.to_string(), expected, "{custom}");
    }
    let script = UserDataInput { custom: Some("[settings]\n#!/bin/bash\necho hi"), ..input() };
    let error = user_data(AmiFamily::Bottlerocket, &script).unwrap_err().to_string();
    assert!(error.starts_with("spec.userData is not TOML: line 3: "), "{error}");
}
