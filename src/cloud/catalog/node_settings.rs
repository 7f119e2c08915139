//! The settings of a node class that decide the resources of its nodes.

use std::collections::BTreeMap;

use stowage_api::node_class::BlockDeviceMapping;
use stowage_api::{Ec2NodeClass, Ec2NodeClassSpec};
use stowage_model::quantity::{parse_bytes, parse_cpu};
use stowage_model::units::{Bytes, Millicores};

use crate::ami_family::AmiFamily;
use crate::kubelet_config::Kubelet;
use crate::kubelet_config::expressions::Expressions;

/// Default size of the volume for pods.
const DEFAULT_VOLUME: Bytes = Bytes::from_gib(20);

/// Reserved amounts that override the defaults, key by key.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Reserved {
    pub cpu: Option<Millicores>,
    pub memory: Option<Bytes>,
    pub ephemeral_storage: Option<Bytes>,
}

/// An eviction threshold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Threshold {
    /// A number of bytes.
    Bytes(Bytes),
    /// A share of the capacity, in billionths.
    Share(i64),
}

impl Threshold {
    /// Parses `500Mi` or `7.5%`; `None` for anything else. 100 % is 0: the kubelet's way to disable a threshold.
    pub fn parse(text: &str) -> Option<Self> {
        const ALL: i64 = 1_000_000_000;
        let Some(percent) = text.strip_suffix('%') else {
            return parse_bytes(text).ok().map(Self::Bytes);
        };
        let percent = percent.parse::<f64>().ok().filter(|percent| (0.0..=100.0).contains(percent))?;
        // Seven decimals of a percentage are billionths of the whole.
        let billionths: i64 = format!("{percent:.7}").replace('.', "").parse().ok()?;
        Some(Self::Share(if billionths == ALL { 0 } else { billionths }))
    }
}

/// Hard eviction thresholds that override the defaults.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EvictionHard {
    /// `memory.available`.
    pub memory: Option<Threshold>,
    /// `nodefs.available`.
    pub ephemeral_storage: Option<Threshold>,
}

/// EFA-only interfaces in a class's list of network interfaces.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EfaOnly {
    /// On all network cards.
    pub total: i64,
    /// On the first network card, where each one reduces the interfaces for pods.
    pub first_card: i64,
}

/// The settings of a node class that decide the resources of its nodes, and two controller settings with the same effect. Classes
/// with equal settings have equal catalogs.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeSettings {
    pub family: AmiFamily,
    /// Size of the volume for pods' ephemeral storage.
    pub volume_bytes: Bytes,
    /// Whether local disks, if any, are used for pods' ephemeral storage instead (`instanceStorePolicy: RAID0`).
    pub local_disks: bool,
    /// `maxPods` of the kubelet; replaces the limit by network interfaces.
    pub max_pods: Option<i64>,
    /// `podsPerCore` of the kubelet; 0 for no limit.
    pub pods_per_core: Option<i64>,
    /// `kubeReserved` of the kubelet.
    pub kube_reserved: Reserved,
    /// `systemReserved` of the kubelet.
    pub system_reserved: Reserved,
    /// CEL expressions of the kubelet configuration, where the gate NodeClassCEL is on: their values on an instance type override the
    /// three members above, key by key.
    pub expressions: Option<Expressions>,
    /// `evictionHard` of the kubelet.
    pub eviction_hard: EvictionHard,
    /// EFA-only interfaces of the class; `None` where it has no list of network interfaces.
    pub efa_only: Option<EfaOnly>,
    /// Network interfaces of each node that are reserved for other uses than pods (Karpenter's `RESERVED_ENIS`).
    pub reserved_enis: i64,
    /// Share of memory that hypervisor and firmware reserve, in millionths (Karpenter's `VM_MEMORY_OVERHEAD_PERCENT`).
    pub vm_memory_overhead_ppm: i64,
}

impl Default for NodeSettings {
    /// An unknown image, a 20 GiB volume, pods by network interfaces, 7.5 % memory overhead.
    fn default() -> Self {
        Self {
            family: AmiFamily::default(),
            volume_bytes: DEFAULT_VOLUME,
            local_disks: false,
            max_pods: None,
            pods_per_core: None,
            kube_reserved: Reserved::default(),
            system_reserved: Reserved::default(),
            expressions: None,
            eviction_hard: EvictionHard::default(),
            efa_only: None,
            reserved_enis: 0,
            vm_memory_overhead_ppm: 75_000,
        }
    }
}

impl NodeSettings {
    /// The settings of a node class from its kubelet, volume and interface fields; the defaults where it has none or there is no class.
    /// An invalid kubelet configuration counts as none: validation rejects it, and such a class launches nothing.
    #[must_use]
    pub fn of(class: Option<&Ec2NodeClass>) -> Self {
        let Some(spec) = class.map(|class| &class.spec) else {
            return Self::default();
        };
        let family = AmiFamily::of(spec);
        let kubelet = Kubelet::parse(spec.kubelet.as_ref()).unwrap_or_default();
        let per_core = kubelet.pods_per_core.filter(|_| family.honors_pods_per_core());
        Self {
            family,
            volume_bytes: volume_bytes(spec, family),
            local_disks: spec.instance_store_policy.as_deref() == Some("RAID0"),
            max_pods: kubelet.max_pods_count().map(i64::from).filter(|pods| *pods >= 0),
            pods_per_core: per_core.map(i64::from),
            kube_reserved: reserved(kubelet.fixed_kube_reserved()),
            system_reserved: reserved(kubelet.fixed_system_reserved()),
            eviction_hard: eviction_hard(kubelet.eviction_hard.as_ref()),
            efa_only: efa_only(spec),
            ..Self::default()
        }
    }

    /// The same settings with the class's expressions, for the gate NodeClassCEL.
    #[must_use]
    pub fn with_expressions(mut self, class: &Ec2NodeClass) -> Self {
        let kubelet = Kubelet::parse(class.spec.kubelet.as_ref()).unwrap_or_default();
        self.expressions = Expressions::of(&kubelet);
        self
    }
}

/// Size of the volume for pods: the one marked as root, else the one on the family's device (the last one where the device is
/// unknown), else the family's default.
fn volume_bytes(spec: &Ec2NodeClassSpec, family: AmiFamily) -> Bytes {
    let size = |mapping: &BlockDeviceMapping| parse_bytes(mapping.ebs.as_ref()?.volume_size.as_deref()?).ok();
    let on_device = |mappings: &[BlockDeviceMapping]| match family.ephemeral_device() {
        Some(device) => mappings.iter().find(|mapping| mapping.device_name.as_deref() == Some(device)).and_then(size),
        None => mappings.last().and_then(size),
    };
    let mappings = spec.block_device_mappings.as_deref().unwrap_or_default();
    (mappings.iter().find(|mapping| mapping.root_volume).and_then(size))
        .or_else(|| on_device(mappings))
        .or_else(|| on_device(&family.default_block_devices()))
        .unwrap_or(DEFAULT_VOLUME)
}

/// The valid amounts by resource.
pub(crate) fn reserved(amounts: Option<BTreeMap<String, String>>) -> Reserved {
    let amounts = amounts.unwrap_or_default();
    let bytes = |resource: &str| amounts.get(resource).and_then(|amount| parse_bytes(amount).ok());
    Reserved {
        cpu: amounts.get("cpu").and_then(|amount| parse_cpu(amount).ok()),
        memory: bytes("memory"),
        ephemeral_storage: bytes("ephemeral-storage"),
    }
}

fn eviction_hard(thresholds: Option<&BTreeMap<String, String>>) -> EvictionHard {
    let threshold = |signal: &str| thresholds?.get(signal).and_then(|text| Threshold::parse(text));
    EvictionHard { memory: threshold("memory.available"), ephemeral_storage: threshold("nodefs.available") }
}

fn efa_only(spec: &Ec2NodeClassSpec) -> Option<EfaOnly> {
    let interfaces = spec.network_interfaces.as_deref().filter(|interfaces| !interfaces.is_empty())?;
    let mut count = EfaOnly::default();
    for interface in interfaces.iter().filter(|interface| interface.interface_type == "efa-only") {
        count.total += 1;
        count.first_card += i64::from(interface.network_card_index == 0);
    }
    Some(count)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    const GIB: i64 = 1 << 30;

    fn of(spec: Value) -> NodeSettings {
        NodeSettings::of(Some(&Ec2NodeClass::new("default", serde_json::from_value(spec).unwrap())))
    }

    #[test]
    fn an_empty_class_has_the_defaults() {
        assert_eq!(of(json!({})), NodeSettings::default());
        assert_eq!(NodeSettings::of(None), NodeSettings::default());
    }

    #[test]
    fn the_volume_for_pods_is_the_first_that_is_known() {
        let volume = |device: &str, size: &str| json!({"deviceName": device, "ebs": {"volumeSize": size}});
        let root = |size: &str| json!({"deviceName": "/dev/sdz", "rootVolume": true, "ebs": {"volumeSize": size}});
        let snapshot = json!({"deviceName": "/dev/xvda", "ebs": {"snapshotID": "snap-1"}});
        let two = [volume("/dev/xvda", "100Gi"), volume("/dev/xvdb", "50G")];
        for (family, mappings, bytes) in [
            ("AL2023", json!([]), 20 * GIB),
            ("AL2023", json!(two), 100 * GIB),
            ("AL2", json!([two[1].clone()]), 20 * GIB),
            ("AL2", json!([snapshot]), 20 * GIB),
            ("AL2023", json!([two[0], root("1Ti")]), 1024 * GIB),
            ("AL2023", json!([two[0], {"deviceName": "/dev/sdz", "rootVolume": true}]), 100 * GIB),
            ("AL2023", json!([volume("/dev/xvda", "Ti")]), 20 * GIB),
            ("Bottlerocket", json!([]), 20 * GIB),
            ("Bottlerocket", json!(two), 50_000_000_000),
            ("Bottlerocket", json!([two[0]]), 20 * GIB),
            ("Custom", json!([]), 20 * GIB),
            ("Custom", json!(two), 50_000_000_000),
            ("Custom", json!([two[1], two[0]]), 100 * GIB),
            ("Custom", json!([two[1], snapshot]), 20 * GIB),
            ("Windows2022", json!([]), 50 * GIB),
            ("Windows2022", json!([volume("/dev/sda1", "80Gi")]), 80 * GIB),
        ] {
            let settings = of(json!({"amiFamily": family, "blockDeviceMappings": mappings}));
            assert_eq!(settings.volume_bytes, Bytes(bytes), "{family} {mappings}");
        }
    }

    #[test]
    fn kubelet_and_interface_fields_become_numbers() {
        let settings = of(json!({
            "amiFamily": "AL2023",
            "instanceStorePolicy": "RAID0",
            "kubelet": {
                "maxPods": 30, "podsPerCore": 4,
                "kubeReserved": {"cpu": "200m", "memory": "vcpus * 100", "ephemeral-storage": "2Gi", "pid": "100"},
                "systemReserved": {"memory": "100Mi"},
                "evictionHard": {"memory.available": "10%", "nodefs.available": "1Gi", "pid.available": "5%"},
            },
            "networkInterfaces": [
                {"networkCardIndex": 0, "deviceIndex": 0, "interfaceType": "interface"},
                {"networkCardIndex": 0, "deviceIndex": 1, "interfaceType": "efa-only"},
                {"networkCardIndex": 1, "deviceIndex": 0, "interfaceType": "efa-only"},
            ],
        }));
        let expected = NodeSettings {
            family: AmiFamily::Al2023,
            local_disks: true,
            max_pods: Some(30),
            pods_per_core: Some(4),
            kube_reserved: Reserved {
                cpu: Some(Millicores(200)),
                memory: None,
                ephemeral_storage: Some(Bytes::from_gib(2)),
            },
            system_reserved: Reserved { memory: Some(Bytes::from_mib(100)), ..Reserved::default() },
            eviction_hard: EvictionHard {
                memory: Some(Threshold::Share(100_000_000)),
                ephemeral_storage: Some(Threshold::Bytes(Bytes::from_gib(1))),
            },
            efa_only: Some(EfaOnly { total: 2, first_card: 1 }),
            ..NodeSettings::default()
        };
        assert_eq!(settings, expected);
        let per_core = |family: &str| of(json!({"amiFamily": family, "kubelet": {"podsPerCore": 4}})).pods_per_core;
        assert_eq!((per_core("Bottlerocket"), per_core("Windows2019"), per_core("Custom")), (None, Some(4), Some(4)));
    }

    #[test]
    fn an_invalid_setting_counts_as_unset() {
        for kubelet in [json!({"maxPods": "vcpus * 10"}), json!({"maxPods": true, "podsPerCore": 3})] {
            assert_eq!(of(json!({"amiFamily": "Custom", "kubelet": kubelet})), NodeSettings::default(), "{kubelet}");
        }
    }

    #[test]
    fn thresholds_are_bytes_or_shares() {
        for (text, expected) in [
            ("500Mi", Some(Threshold::Bytes(Bytes::from_mib(500)))),
            ("0", Some(Threshold::Bytes(Bytes(0)))),
            ("10%", Some(Threshold::Share(100_000_000))),
            ("7.5%", Some(Threshold::Share(75_000_000))),
            ("0.0000001%", Some(Threshold::Share(1))),
            ("0%", Some(Threshold::Share(0))),
            ("99.5%", Some(Threshold::Share(995_000_000))),
            ("100%", Some(Threshold::Share(0))),
            ("101%", None),
            ("-1%", None),
            ("NaN%", None),
            ("lots", None),
            ("-5Mi", None),
        ] {
            assert_eq!(Threshold::parse(text), expected, "{text}");
        }
    }
}
