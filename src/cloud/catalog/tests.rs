//! The embedded numbers compared with the values of the Karpenter AWS reference and with the rule of the plan checker.

use stowage_model::offering::CapacityType;
use stowage_model::offering::InstanceType;
use stowage_model::offering::Offering;
use stowage_model::resources::Resources;
use stowage_model::units::MicroUsd;
use stowage_model::units::{Bytes, Millicores};

use crate::catalog::node_settings::Reserved;
use crate::catalog::overhead::MIB;
use std::collections::{BTreeMap, BTreeSet};

use super::*;
use crate::ami_family::AmiFamily;
use std::sync::Arc;

fn shape(name: &str, settings: &NodeSettings) -> InstanceType {
    embedded().instance_type(name).unwrap_or_else(|| panic!("{name} is embedded")).as_node(
        "us-east-1",
        settings,
        SpotPricing::Off,
    )
}

#[test]
fn the_embedded_catalog_keeps_its_provenance_and_every_instance_type() {
    let catalog = embedded();
    assert_eq!(catalog.region, "us-east-1");
    assert_eq!(catalog.prices_as_of, "2026-07-06");
    assert_eq!(catalog.price_note, "Linux shared-tenancy on-demand list price, USD per hour");
    assert!(catalog.source.contains("DescribeInstanceTypes"));
    assert_eq!(catalog.instance_types.len(), 1235);
    // The sum of all prices, as the source file has it.
    let total: i64 = catalog.instance_types.iter().filter_map(|entry| entry.on_demand).map(|price| price.0).sum();
    assert_eq!(total, 6_363_688_982);
}

#[test]
fn a_daemon_with_a_type_requirement_runs_on_matching_types_only() {
    let windows = NodeSettings { family: AmiFamily::Windows2022, ..NodeSettings::default() };
    let mut seen = BTreeSet::new();
    for entry in &embedded().instance_types {
        for settings in [&NodeSettings::default(), &windows] {
            let node = entry.as_node("us-east-1", settings, SpotPricing::Off);
            for name in node.allocatable.extended.keys() {
                let mut daemon = Resources::default();
                daemon.set(name, 1);
                assert!(daemon.may_run_on(&node.allocatable) && !daemon.may_run_on(&Resources::default()), "{name}");
                seen.insert(name.to_string());
            }
        }
    }
    assert!(seen.contains("nvidia.com/gpu") && seen.contains("vpc.amazonaws.com/PrivateIPv4Address"), "{seen:?}");
}

#[test]
fn capacity_and_overhead_match_karpenter() {
    for (name, pods, cpu, memory_mib, extra) in [
        ("m5.large", 29, 1930, 6903, vec![("vpc.amazonaws.com/pod-eni", 9)]),
        ("a1.medium", 8, 940, 1392, vec![("vpc.amazonaws.com/pod-eni", 10)]),
        ("t4g.small", 11, 1930, 1359, vec![]),
        ("m5.metal", 737, 95_690, 355_262, vec![("vpc.amazonaws.com/pod-eni", 120)]),
        ("g4ad.16xlarge", 234, 63_770, 239_554, vec![("amd.com/gpu", 4), ("vpc.amazonaws.com/pod-eni", 6)]),
        (
            "inf1.24xlarge",
            321,
            95_690,
            177_976,
            vec![
                ("aws.amazon.com/neuron", 16),
                ("aws.amazon.com/neuroncore", 64),
                ("vpc.amazonaws.com/efa", 1),
                ("vpc.amazonaws.com/pod-eni", 111),
            ],
        ),
        ("u-6tb1.112xlarge", 737, 446_810, 5_811_134, vec![]),
    ] {
        let node = shape(name, &NodeSettings::default());
        let allocatable = node.allocatable;
        assert_eq!((allocatable.pods, allocatable.cpu.0), (pods, cpu), "{name}");
        assert_eq!(allocatable.memory.0, memory_mib * MIB, "{name}");
        assert_eq!(allocatable.ephemeral_storage.0, 17 << 30, "{name}");
        let expected: BTreeMap<Arc<str>, i64> = extra.into_iter().map(|(key, value)| (key.into(), value)).collect();
        assert_eq!(allocatable.extended, expected, "{name}");
        assert_eq!(node.capacity.ephemeral_storage.0, 20 << 30, "{name}");
    }
}

#[test]
fn only_the_interfaces_of_the_default_network_card_carry_pods() {
    for (name, pods, cpu, memory_mib) in [
        ("p5.48xlarge", 100, 191_450, 1_938_410),
        ("trn1.32xlarge", 247, 127_610, 481_894),
        ("m6in.32xlarge", 394, 127_610, 480_277),
    ] {
        let node = shape(name, &NodeSettings::default());
        assert_eq!((node.allocatable.pods, node.allocatable.cpu.0), (pods, cpu), "{name}");
        assert_eq!(node.allocatable.memory.0, memory_mib * MIB, "{name}");
        let mut entry = embedded().instance_type(name).unwrap().clone();
        entry.default_card_enis = None;
        let node = entry.as_node("us-east-1", &NodeSettings::default(), SpotPricing::Off);
        assert!(node.allocatable.pods > pods, "{name}: all of them where the card is not known");
    }
}

/// The allocatable resources by the formula of the plan checker: memory rounded up, no deduction for Arm. Ours may be smaller, but
/// never larger, or the checker would reject a plan. It counts the interfaces of all network cards, and so reserves memory for pods
/// without an address on types with several cards.
fn checkers_limit(entry: &RawInstanceType) -> (i64, i64, i64, i64) {
    let pods = entry.enis * (entry.ipv4_per_eni - 1) + 2;
    let milli = entry.vcpu * 1000;
    let basis_points: i64 = [(0, 1000, 600), (1000, 2000, 100), (2000, 4000, 50), (4000, 1 << 31, 25)]
        .iter()
        .filter(|(low, _, _)| milli > *low)
        .map(|(low, high, share)| (milli.min(*high) - low) * share)
        .sum();
    let memory_mib = (entry.memory_mib * 925 + 999) / 1000 - (11 * pods + 255) - 100;
    (milli - basis_points / 10_000, memory_mib * MIB, pods, 17 << 30)
}

#[test]
fn no_type_with_one_network_card_exceeds_the_plan_checkers_limit() {
    let (several, one): (Vec<_>, Vec<_>) =
        embedded().instance_types.iter().partition(|entry| entry.default_card_enis.is_some());
    assert_eq!(several.len(), 38);
    for entry in one {
        let ours = entry.as_node("us-east-1", &NodeSettings::default(), SpotPricing::Off).allocatable;
        let (cpu, memory, pods, storage) = checkers_limit(entry);
        assert!(ours.cpu.0 <= cpu, "{}: cpu {} over {cpu}", entry.name, ours.cpu.0);
        // A type smaller than its overhead has nothing allocatable by either rule.
        assert!(ours.memory.0 <= memory.max(0), "{}: memory {} over {memory}", entry.name, ours.memory.0);
        assert!(ours.memory.0 + 200 * MIB >= memory, "{}: memory far below the checker's", entry.name);
        assert!(ours.pods <= pods && ours.ephemeral_storage.0 <= storage, "{}", entry.name);
        for (name, resource) in [("NVIDIA", "nvidia.com/gpu"), ("AMD", "amd.com/gpu")] {
            let have: i64 = entry.gpus.iter().filter(|gpu| gpu.manufacturer == name).map(|gpu| gpu.count).sum();
            assert_eq!(ours.extended.get(resource).copied().unwrap_or(0), have, "{}", entry.name);
        }
    }
}

#[test]
fn labels_match_karpenter() {
    let text = |name: &str| {
        let lines = shape(name, &NodeSettings::default()).labels;
        lines.iter().map(|(key, value)| format!("{key}={value}")).collect::<Vec<_>>().join("\n")
    };
    insta::assert_snapshot!(text("g5.xlarge"), @r"
    karpenter.k8s.aws/instance-capability-flex=false
    karpenter.k8s.aws/instance-category=g
    karpenter.k8s.aws/instance-cpu=4
    karpenter.k8s.aws/instance-cpu-manufacturer=amd
    karpenter.k8s.aws/instance-cpu-sustained-clock-speed-mhz=3300
    karpenter.k8s.aws/instance-ebs-bandwidth=3500
    karpenter.k8s.aws/instance-encryption-in-transit-supported=true
    karpenter.k8s.aws/instance-family=g5
    karpenter.k8s.aws/instance-generation=5
    karpenter.k8s.aws/instance-gpu-count=1
    karpenter.k8s.aws/instance-gpu-manufacturer=nvidia
    karpenter.k8s.aws/instance-gpu-memory=22888
    karpenter.k8s.aws/instance-gpu-name=a10g
    karpenter.k8s.aws/instance-hypervisor=nitro
    karpenter.k8s.aws/instance-local-nvme=250
    karpenter.k8s.aws/instance-memory=16384
    karpenter.k8s.aws/instance-network-bandwidth=2500
    karpenter.k8s.aws/instance-size=xlarge
    karpenter.k8s.aws/instance-tenancy=default
    karpenter.k8s.aws/nitro-sandbox=true
    kubernetes.io/arch=amd64
    kubernetes.io/os=linux
    node.kubernetes.io/instance-type=g5.xlarge
    topology.kubernetes.io/region=us-east-1
    ");
    insta::assert_snapshot!(text("m5.metal"), @r"
    karpenter.k8s.aws/instance-capability-flex=false
    karpenter.k8s.aws/instance-category=m
    karpenter.k8s.aws/instance-cpu=96
    karpenter.k8s.aws/instance-cpu-manufacturer=intel
    karpenter.k8s.aws/instance-cpu-sustained-clock-speed-mhz=3100
    karpenter.k8s.aws/instance-ebs-bandwidth=19000
    karpenter.k8s.aws/instance-encryption-in-transit-supported=false
    karpenter.k8s.aws/instance-family=m5
    karpenter.k8s.aws/instance-generation=5
    karpenter.k8s.aws/instance-hypervisor=
    karpenter.k8s.aws/instance-memory=393216
    karpenter.k8s.aws/instance-network-bandwidth=25000
    karpenter.k8s.aws/instance-size=metal
    karpenter.k8s.aws/instance-tenancy=default
    karpenter.k8s.aws/nitro-sandbox=false
    kubernetes.io/arch=amd64
    kubernetes.io/os=linux
    node.kubernetes.io/instance-type=m5.metal
    topology.kubernetes.io/region=us-east-1
    ");
    insta::assert_snapshot!(text("inf1.24xlarge"), @r"
    karpenter.k8s.aws/instance-accelerator-count=16
    karpenter.k8s.aws/instance-accelerator-manufacturer=aws
    karpenter.k8s.aws/instance-accelerator-name=inferentia
    karpenter.k8s.aws/instance-capability-flex=false
    karpenter.k8s.aws/instance-category=inf
    karpenter.k8s.aws/instance-cpu=96
    karpenter.k8s.aws/instance-cpu-manufacturer=intel
    karpenter.k8s.aws/instance-cpu-sustained-clock-speed-mhz=2500
    karpenter.k8s.aws/instance-ebs-bandwidth=19000
    karpenter.k8s.aws/instance-encryption-in-transit-supported=true
    karpenter.k8s.aws/instance-family=inf1
    karpenter.k8s.aws/instance-generation=1
    karpenter.k8s.aws/instance-hypervisor=nitro
    karpenter.k8s.aws/instance-memory=196608
    karpenter.k8s.aws/instance-network-bandwidth=100000
    karpenter.k8s.aws/instance-size=24xlarge
    karpenter.k8s.aws/instance-tenancy=default
    karpenter.k8s.aws/nitro-sandbox=true
    kubernetes.io/arch=amd64
    kubernetes.io/os=linux
    node.kubernetes.io/instance-type=inf1.24xlarge
    topology.kubernetes.io/region=us-east-1
    ");
}

#[test]
fn every_label_value_is_valid_in_kubernetes() {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    for entry in &embedded().instance_types {
        for (key, value) in entry.as_node("us-east-1", &NodeSettings::default(), SpotPricing::Off).labels {
            assert!(value.len() <= 63 && value.chars().all(plain), "{}: {key}={value}", entry.name);
            assert!(!value.ends_with('-') && !value.starts_with('-'), "{}: {key}={value}", entry.name);
        }
    }
}

#[test]
fn offerings_have_the_zones_and_usage_classes_of_ec2() {
    let catalog = embedded().for_node_class(None, SpotPricing::ratio(0.4).unwrap());
    let offerings = |name: &str| {
        let found = catalog.instance_types.iter().find(|entry| &*entry.name == name).unwrap();
        let line = |o: &Offering| format!("{} {} {}", o.zone, o.capacity_type, o.price.0);
        found.offerings.iter().map(line).collect::<Vec<_>>()
    };
    assert_eq!(
        offerings("a1.medium"),
        [
            "us-east-1a spot 10200",
            "us-east-1a on-demand 25500",
            "us-east-1b spot 10200",
            "us-east-1b on-demand 25500",
            "us-east-1c spot 10200",
            "us-east-1c on-demand 25500"
        ]
    );
    assert!(offerings("u-6tb1.112xlarge").iter().all(|line| line.contains(" on-demand ")));
    let none = embedded().for_node_class(None, SpotPricing::Off);
    assert!(none.instance_types.iter().flat_map(|t| &t.offerings).all(|o| o.capacity_type == CapacityType::OnDemand));
    assert!(none.instance_types.windows(2).all(|pair| pair[0].name < pair[1].name));
}

#[test]
fn kubelet_and_volume_settings_change_the_node() {
    let settings = NodeSettings {
        volume_bytes: Bytes::from_gib(100),
        max_pods: Some(110),
        pods_per_core: Some(20),
        kube_reserved: Reserved {
            cpu: Some(Millicores(200)),
            memory: Some(Bytes::from_mib(512)),
            ephemeral_storage: None,
        },
        system_reserved: Reserved {
            cpu: Some(Millicores(50)),
            memory: None,
            ephemeral_storage: Some(Bytes::from_gib(1)),
        },
        ..NodeSettings::default()
    };
    let node = shape("m5.large", &settings);
    assert_eq!(node.allocatable.pods, 40);
    assert_eq!(node.allocatable.cpu.0, 1750);
    assert_eq!(node.allocatable.memory.0, (7577 - 512 - 100) * MIB);
    assert_eq!(node.allocatable.ephemeral_storage.0, (100 - 10 - 1 - 1) << 30);
    let plain =
        shape("m5.large", &NodeSettings { pods_per_core: Some(0), max_pods: Some(50), ..NodeSettings::default() });
    assert_eq!(plain.allocatable.pods, 50);
    assert_eq!(plain.allocatable.memory.0, 6903 * MIB, "maxPods does not change the memory kept for pods");
}

const ONE: &str = r#"{"region": "r-1", "zones": ["r-1a"], "pricesAsOf": "2026-01-01", "priceNote": "n", "source": "s",
 "instanceTypes": [{"name":"m9.large","arch":["x86_64"],"cpuManufacturer":"intel","clockMhz":3000,"vcpu":2,"memoryMib":8192,"hypervisor":"nitro",
  "bareMetal":false,"burstable":false,"currentGeneration":true,"usageClasses":["on-demand"],"enis":3,"ipv4PerEni":10,"branchEnis":9,"ena":"required",
  "efa":0,"ebsMbps":null,"ebsAttachments":27,"ebsAttachmentType":"shared","networkMbps":null,"onDemandUsdPerHour":0.0961234,"zones":["r-1a"]}]}"#;

#[test]
fn a_catalog_file_is_parsed() {
    let catalog = parse(ONE).unwrap();
    assert_eq!((catalog.region.as_str(), catalog.prices_as_of.as_str()), ("r-1", "2026-01-01"));
    let entry = catalog.instance_type("m9.large").unwrap();
    assert_eq!((entry.on_demand, entry.ebs_mbps, entry.network_mbps), (Some(MicroUsd(96_123)), None, None));
    assert!(catalog.instance_type("m9.xlarge").is_none());
}

#[test]
fn errors_in_a_catalog_file_name_the_entry() {
    let (start, end) = (ONE.find("{\"name\"").unwrap(), ONE.rfind(']').unwrap());
    let twice = format!("{},{}", &ONE[..end], &ONE[start..]);
    for (text, expected) in [
        (
            "[]".to_owned(),
            "the catalog is not JSON of the expected shape: invalid type: sequence, expected struct File at line 1 column 0",
        ),
        (ONE.replace("\"vcpu\":2,", ""), "instance type m9.large of the catalog: missing field `vcpu`"),
        (
            ONE.replace("\"vcpu\":2,", "\"vcpu\":\"2\","),
            "instance type m9.large of the catalog: invalid type: string \"2\", expected i64",
        ),
        (
            ONE.replace("\"vcpu\":2,", "\"vcpu\":0,"),
            "instance type m9.large of the catalog: vcpu is 0, expected 1 to 1048576",
        ),
        (
            ONE.replace("[\"x86_64\"]", "[\"i386\"]"),
            "instance type m9.large of the catalog: arch is [\"i386\"], expected x86_64 or arm64",
        ),
        (
            ONE.replace("\"zones\":[\"r-1a\"]", "\"zones\":[\"r-1b\"]"),
            "instance type m9.large of the catalog: zone r-1b is not one of the catalog's zones",
        ),
        (ONE.replace("m9.large", "m9"), "instance type m9 of the catalog: name is not FAMILY.SIZE, as m7g.large"),
        (
            ONE.replace("0.0961234", "-1"),
            "instance type m9.large of the catalog: onDemandUsdPerHour is -1, expected 0 to 1000000",
        ),
        (ONE.replace("\"name\":\"m9.large\",", ""), "instance type number 0 of the catalog: missing field `name`"),
        (twice, "instance type m9.large of the catalog: is listed twice; keep one of the two"),
    ] {
        assert_eq!(parse(&text).unwrap_err().to_string(), expected);
    }
}
