//! Karpenter's conformance cases of capacity and overhead, and a comparison of every embedded instance type with a checked-in
//! table.

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::{Value, json};
use stowage_api::Ec2NodeClass;
use stowage_model::offering::InstanceType;

use super::*;
use crate::ami_family::AmiFamily;
use crate::catalog::overhead::MIB;
use crate::ec2::bootstrap::kubelet_validation;
use crate::ec2::bootstrap::kubelet_validation::Gate;

const GIB: i64 = 1 << 30;

/// A node of a class.
fn node(name: &str, spec: Value) -> InstanceType {
    with(name, |_| (), spec)
}

/// A node of a class with changed controller settings.
fn with(name: &str, change: impl FnOnce(&mut NodeSettings), spec: Value) -> InstanceType {
    let class = Ec2NodeClass::new("default", serde_json::from_value(spec).unwrap());
    let mut settings = NodeSettings::of(Some(&class));
    change(&mut settings);
    embedded().instance_type(name).unwrap().as_node("us-east-1", &settings, SpotPricing::Off)
}

/// MiB of kube-reserved memory, where everything else has its default.
fn kube_reserved_mib(node: &InstanceType) -> i64 {
    (node.capacity.memory.0 - node.allocatable.memory.0) / MIB - 100
}

#[test]
fn c01_m5_large_on_al2023_has_the_published_values() {
    let node = node("m5.large", json!({"amiSelectorTerms": [{"alias": "al2023@latest"}]}));
    let allocatable = &node.allocatable;
    assert_eq!((allocatable.cpu.0, allocatable.memory.0, allocatable.pods), (1930, 6903 * MIB, 29));
    assert_eq!(allocatable.ephemeral_storage.0, 17 * GIB);
    assert_eq!(allocatable.extended, [("vpc.amazonaws.com/pod-eni".into(), 9)].into());
    assert!(node.offerings.iter().all(|offering| offering.available));
}

/// Every type's labels, capacity and allocatable resources on AL2023 with Karpenter's defaults: one line a type, the
/// first line naming the columns; `-` where a node lacks the label or resource.
fn table() -> String {
    let settings = NodeSettings { family: AmiFamily::Al2023, ..NodeSettings::default() };
    let nodes: Vec<InstanceType> =
        embedded().instance_types.iter().map(|entry| entry.as_node("us-east-1", &settings, SpotPricing::Off)).collect();
    let resources: BTreeSet<&str> =
        nodes.iter().flat_map(|node| node.capacity.extended.keys()).map(|name| &**name).collect();
    let labels: BTreeSet<&str> = nodes.iter().flat_map(|node| node.labels.keys()).map(String::as_str).collect();
    let mut columns = vec!["instance-type", "cpu", "memory", "ephemeral-storage", "pods"];
    columns.extend(["allocatable.cpu", "allocatable.memory", "allocatable.ephemeral-storage"]);
    columns.extend(resources.iter().chain(&labels));
    let mut text = columns.join(" ");
    let mib = |bytes: i64| format!("{}Mi", bytes / MIB);
    for node in &nodes {
        let (capacity, allocatable) = (&node.capacity, &node.allocatable);
        let mut cells = vec![
            node.name.to_string(),
            capacity.cpu.to_string(),
            mib(capacity.memory.0),
            capacity.ephemeral_storage.to_string(),
            capacity.pods.to_string(),
            allocatable.cpu.to_string(),
            mib(allocatable.memory.0),
            allocatable.ephemeral_storage.to_string(),
        ];
        let amount = |name: &&str| allocatable.extended.get(*name).map_or_else(|| "-".to_owned(), i64::to_string);
        cells.extend(resources.iter().map(amount));
        let value = |key: &&str| match node.labels.get(*key).map(String::as_str) {
            None => "-".to_owned(),
            Some("") => "\"\"".to_owned(),
            Some(value) => value.to_owned(),
        };
        cells.extend(labels.iter().map(value));
        text.push('\n');
        text.push_str(&cells.join(" "));
    }
    text.push('\n');
    text
}

#[test]
fn c01_every_embedded_type_matches_the_table() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/instance-types.txt");
    let made = table();
    if std::env::var_os("STOWAGE_REGENERATE").is_some() {
        std::fs::write(&path, &made).unwrap();
    }
    let kept = std::fs::read_to_string(&path).unwrap();
    for (made, kept) in made.lines().zip(kept.lines()) {
        assert_eq!(made, kept, "STOWAGE_REGENERATE=1 cargo test --lib catalog regenerates the table");
    }
    assert_eq!(made.lines().count(), kept.lines().count());
    assert_eq!(made.lines().count(), 1236);
}

#[test]
fn c02_arm_has_64_mib_less_before_the_overhead() {
    let node = node("a1.medium", json!({"amiFamily": "AL2"}));
    assert_eq!(node.allocatable.memory.0, 1392 * MIB);
    assert_eq!(node.capacity.memory.0, (2048 - 64 - 149) * MIB, "149 is 7.5 % of 1984, rounded up");
}

#[test]
fn c03_reserved_enis_reduce_pods_and_on_bottlerocket_reserved_memory() {
    // m5.large has three interfaces of ten addresses.
    for (family, reserved_enis, pods, kept_mib) in [
        ("AL2023", 0, 29, 11 * 29 + 255),
        ("AL2023", 1, 20, 11 * 29 + 255),
        ("AL2", 1, 20, 11 * 29 + 255),
        ("Custom", 1, 20, 11 * 29 + 255),
        ("Bottlerocket", 0, 29, 11 * 29 + 255),
        ("Bottlerocket", 1, 20, 11 * 20 + 255),
        ("AL2023", 3, 0, 11 * 29 + 255),
        ("AL2023", 7, 0, 11 * 29 + 255),
        ("Bottlerocket", 3, 0, 255),
        ("Windows2022", 3, 110, 11 * 110 + 255),
    ] {
        let node = with("m5.large", |settings| settings.reserved_enis = reserved_enis, json!({"amiFamily": family}));
        assert_eq!(node.capacity.pods, pods, "{family} {reserved_enis}");
        assert_eq!(kube_reserved_mib(&node), kept_mib, "{family} {reserved_enis}");
    }
    let interfaces = json!([
        {"networkCardIndex": 0, "deviceIndex": 0, "interfaceType": "interface"},
        {"networkCardIndex": 0, "deviceIndex": 1, "interfaceType": "efa-only"},
        {"networkCardIndex": 1, "deviceIndex": 1, "interfaceType": "efa-only"},
    ]);
    let node = node("m5.large", json!({"amiFamily": "AL2023", "networkInterfaces": interfaces}));
    assert_eq!(node.capacity.pods, 20, "an interface for EFA alone carries no pods");
    assert_eq!(kube_reserved_mib(&node), 11 * 20 + 255);
    assert_eq!(node.capacity.extended["vpc.amazonaws.com/efa"], 2);
}

#[test]
fn c04_max_pods_changes_reserved_memory_on_bottlerocket_and_windows_only() {
    for (family, kept_for) in
        [("AL2023", 29), ("AL2", 29), ("Custom", 29), ("Bottlerocket", 10), ("Windows2019", 10), ("Windows2025", 10)]
    {
        let node = node("m5.large", json!({"amiFamily": family, "kubelet": {"maxPods": 10}}));
        assert_eq!(node.capacity.pods, 10, "{family}");
        assert_eq!(kube_reserved_mib(&node), 11 * kept_for + 255, "{family}");
    }
}

#[test]
fn c05_pods_per_core_limits_pods_where_the_family_supports_it() {
    for (family, kubelet, pods) in [
        ("AL2023", json!({"podsPerCore": 2, "maxPods": 20}), 8),
        ("AL2023", json!({"podsPerCore": 9, "maxPods": 20}), 20),
        ("AL2023", json!({"podsPerCore": 0, "maxPods": 20}), 20),
        ("AL2023", json!({"podsPerCore": 2}), 8),
        ("AL2023", json!({"podsPerCore": 0}), 58),
        ("Bottlerocket", json!({"podsPerCore": 2, "maxPods": 20}), 20),
        ("Windows2022", json!({"podsPerCore": 2}), 8),
    ] {
        // Four vCPUs, four interfaces of fifteen addresses.
        let node = node("m5.xlarge", json!({"amiFamily": family, "kubelet": kubelet}));
        assert_eq!(node.capacity.pods, pods, "{family} {kubelet}");
    }
    let class = json!({"amiFamily": "Bottlerocket", "kubelet": {"podsPerCore": 2}});
    let refused = kubelet_validation::validate(&serde_json::from_value(class).unwrap(), Gate::Off).unwrap_err();
    assert_eq!(refused.event().reason(), "UnsupportedKubeletConfiguration");
}

#[test]
fn c06_hard_eviction_thresholds_replace_the_defaults_and_soft_ones_do_not() {
    let capacity = node("m5.large", json!({"amiFamily": "AL2023"})).capacity;
    let kept = (11 * 29 + 255) * MIB;
    let tenth = (capacity.memory.0 + 9) / 10;
    for (kubelet, evicted) in [
        (json!({}), 100 * MIB),
        (json!({"evictionHard": {"memory.available": "10%"}}), tenth),
        (json!({"evictionHard": {"memory.available": "100%"}}), 0),
        (json!({"evictionHard": {"memory.available": "500Mi"}}), 500 * MIB),
        (json!({"evictionHard": {"nodefs.available": "20%"}}), 100 * MIB),
        (json!({"evictionSoft": {"memory.available": "50%"}}), 100 * MIB),
        (
            json!({"evictionSoft": {"memory.available": "50%"}, "evictionHard": {"memory.available": "500Mi"}}),
            500 * MIB,
        ),
    ] {
        let node = node("m5.large", json!({"amiFamily": "AL2023", "kubelet": kubelet}));
        assert_eq!(node.allocatable.memory.0, capacity.memory.0 - kept - evicted, "{kubelet}");
    }
    for (threshold, evicted) in [("25%", 5 * GIB), ("3Gi", 3 * GIB), ("100%", 0), ("0%", 0)] {
        let kubelet = json!({"evictionHard": {"nodefs.available": threshold}});
        let node = node("m5.large", json!({"amiFamily": "AL2023", "kubelet": kubelet}));
        assert_eq!(node.allocatable.ephemeral_storage.0, 20 * GIB - GIB - evicted, "{threshold}");
    }
    let kubelet = json!({"systemReserved": {"memory": "9Ei", "cpu": "1", "ephemeral-storage": "1Gi"},
        "kubeReserved": {"memory": "9Ei", "cpu": "500m"}});
    let node = node("m5.large", json!({"amiFamily": "AL2023", "kubelet": kubelet}));
    let allocatable = &node.allocatable;
    assert_eq!((allocatable.cpu.0, allocatable.memory.0, allocatable.ephemeral_storage.0), (500, 0, 16 * GIB));
}

#[test]
fn c07_storage_is_the_first_of_local_disks_root_device_and_default() {
    let volume = |device: &str, size: &str| json!({"deviceName": device, "ebs": {"volumeSize": size}});
    let root = json!({"deviceName": "/dev/sdb", "rootVolume": true, "ebs": {"volumeSize": "60Gi"}});
    let two = json!([volume("/dev/xvda", "100Gi"), volume("/dev/xvdb", "50G")]);
    for (name, spec, bytes) in [
        ("m5.large", json!({"amiFamily": "AL2023", "blockDeviceMappings": two}), 100 * GIB),
        (
            "m5.large",
            json!({"amiFamily": "AL2023", "blockDeviceMappings": [volume("/dev/xvda", "100Gi"), root]}),
            60 * GIB,
        ),
        ("m5.large", json!({"amiFamily": "Custom", "blockDeviceMappings": two}), 50_000_000_000),
        ("m5.large", json!({"amiFamily": "Bottlerocket", "blockDeviceMappings": two}), 50_000_000_000),
        ("m5.large", json!({"amiFamily": "Windows2022"}), 50 * GIB),
        ("m5d.large", json!({"amiFamily": "AL2023", "instanceStorePolicy": "RAID0"}), 75_000_000_000),
        (
            "m5d.large",
            json!({"amiFamily": "AL2023", "instanceStorePolicy": "RAID0", "blockDeviceMappings": [root]}),
            75_000_000_000,
        ),
        ("m5.large", json!({"amiFamily": "AL2023", "instanceStorePolicy": "RAID0"}), 20 * GIB),
        ("m5d.large", json!({"amiFamily": "AL2023"}), 20 * GIB),
    ] {
        assert_eq!(node(name, spec.clone()).capacity.ephemeral_storage.0, bytes, "{name} {spec}");
    }
}

#[test]
fn c24_windows_nodes_are_amd64_with_110_pods_and_one_eni_address_less() {
    for (family, build) in [("Windows2019", "10.0.17763"), ("Windows2022", "10.0.20348"), ("Windows2025", "10.0.26100")]
    {
        let spec = json!({"amiFamily": family, "instanceStorePolicy": "RAID0"});
        let windows = node("m5.large", spec.clone());
        assert_eq!(windows.labels["kubernetes.io/os"], "windows");
        assert_eq!(windows.labels["node.kubernetes.io/windows-build"], build);
        assert_eq!(windows.capacity.pods, 110);
        assert_eq!(windows.capacity.extended["vpc.amazonaws.com/PrivateIPv4Address"], 9);
        assert!(windows.offerings.iter().all(|offering| offering.available));
        let arm = node("m7g.large", spec);
        assert!(!arm.offerings.is_empty() && arm.offerings.iter().all(|offering| !offering.available));
    }
    let linux = node("m5.large", json!({"amiFamily": "AL2023"}));
    assert_eq!(linux.labels["kubernetes.io/os"], "linux");
    assert!(!linux.labels.contains_key("node.kubernetes.io/windows-build"));
    assert!(!linux.capacity.extended.contains_key("vpc.amazonaws.com/PrivateIPv4Address"));
}

#[test]
fn al2023_is_never_offered_on_a1() {
    let available = |family: &str| {
        let node = node("a1.medium", json!({"amiFamily": family}));
        node.offerings.iter().all(|offering| offering.available)
    };
    assert!(!available("AL2023") && available("AL2") && available("Bottlerocket") && available("Custom"));
}
