//! Capacity and overhead of a node: what the kubelet will report before the node exists.
//! The model is Karpenter's for the AL2, AL2023 and custom image families.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::RawInstanceType;
use crate::api::Ec2NodeClass;
use crate::scheduling::resources::Resources;

/// Bytes of a MiB.
pub const MIB: i64 = 1 << 20;
const GIB: i64 = 1 << 30;

/// Amounts that replace, key by key, what would be reserved otherwise.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Reserved {
    /// Millicores.
    pub cpu_milli: Option<i64>,
    /// Bytes.
    pub memory: Option<i64>,
    /// Bytes.
    pub ephemeral_storage: Option<i64>,
}

/// What a node class decides about the shape of its nodes. Nodes of classes with equal settings have equal catalogues.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeSettings {
    /// Bytes of the volume that pods' ephemeral storage lives on.
    pub volume_bytes: i64,
    /// `maxPods` of the kubelet; replaces the limit by network interfaces.
    pub max_pods: Option<i64>,
    /// `podsPerCore` of the kubelet; 0 is as none.
    pub pods_per_core: Option<i64>,
    /// `kubeReserved` of the kubelet.
    pub kube_reserved: Reserved,
    /// `systemReserved` of the kubelet.
    pub system_reserved: Reserved,
    /// Share of memory the hypervisor and firmware keep, in millionths (Karpenter's `VM_MEMORY_OVERHEAD_PERCENT`).
    pub vm_memory_overhead_ppm: i64,
}

impl Default for NodeSettings {
    /// A 20 GiB volume, pods by network interfaces, 7.5 % memory overhead.
    fn default() -> Self {
        Self {
            volume_bytes: 20 * GIB,
            max_pods: None,
            pods_per_core: None,
            kube_reserved: Reserved::default(),
            system_reserved: Reserved::default(),
            vm_memory_overhead_ppm: 75_000,
        }
    }
}

impl NodeSettings {
    /// The settings of a node class. The one place where the class's kubelet and volume fields take effect; a class
    /// without them, or no class, gives the defaults.
    #[must_use]
    pub fn of(_class: Option<&Ec2NodeClass>) -> Self {
        Self::default()
    }
}

/// Pods that the addresses of the network interfaces allow, two host-network pods included.
fn interface_pods(entry: &RawInstanceType) -> i64 {
    match entry.default_card_enis.unwrap_or(entry.enis) {
        0 => 0,
        enis => enis * (entry.ipv4_per_eni - 1) + 2,
    }
}

/// What the node reports as capacity.
pub(super) fn capacity(entry: &RawInstanceType, settings: &NodeSettings) -> Resources {
    let mut pods = settings.max_pods.unwrap_or_else(|| interface_pods(entry));
    if let Some(per_core) = settings.pods_per_core.filter(|per_core| *per_core > 0) {
        pods = pods.min(per_core.saturating_mul(entry.vcpu));
    }
    Resources {
        cpu_milli: entry.vcpu * 1000,
        memory: usable_memory_mib(entry, settings) * MIB,
        ephemeral_storage: settings.volume_bytes,
        pods,
        extended: extended(entry),
    }
}

/// Memory less what firmware and hypervisor keep. Arm machines lose another 64 MiB to the kernel's own reservations.
fn usable_memory_mib(entry: &RawInstanceType, settings: &NodeSettings) -> i64 {
    let arm = entry.arch.first().is_some_and(|arch| arch == "arm64");
    let memory = entry.memory_mib - if arm { 64 } else { 0 };
    let kept = ceil_div(memory.saturating_mul(settings.vm_memory_overhead_ppm), 1_000_000);
    (memory - kept).max(0)
}

/// Capacity less kube-reserved, system-reserved and the hard eviction thresholds, never below zero.
pub(super) fn allocatable(entry: &RawInstanceType, settings: &NodeSettings, capacity: &Resources) -> Resources {
    let kube = &settings.kube_reserved;
    let system = &settings.system_reserved;
    let cpu = kube.cpu_milli.unwrap_or_else(|| kube_reserved_cpu(entry.vcpu)) + system.cpu_milli.unwrap_or(0);
    // The limit by interfaces counts even where maxPods says otherwise.
    let memory = kube.memory.unwrap_or_else(|| (11 * interface_pods(entry) + 255) * MIB)
        + system.memory.unwrap_or(0)
        + 100 * MIB;
    let storage = kube.ephemeral_storage.unwrap_or(GIB)
        + system.ephemeral_storage.unwrap_or(0)
        + ceil_div(capacity.ephemeral_storage, 10);
    Resources {
        cpu_milli: (capacity.cpu_milli - cpu).max(0),
        memory: (capacity.memory - memory).max(0),
        ephemeral_storage: (capacity.ephemeral_storage - storage).max(0),
        pods: capacity.pods,
        extended: capacity.extended.clone(),
    }
}

/// 6 % of the first core, 1 % of the second, 0.5 % of the next two, 0.25 % of the rest, in millicores.
fn kube_reserved_cpu(vcpu: i64) -> i64 {
    let milli = vcpu * 1000;
    let bands = [(0, 1000, 600), (1000, 2000, 100), (2000, 4000, 50), (4000, i64::MAX, 25)];
    bands.iter().map(|(low, high, basis_points)| (milli.min(*high) - low).max(0) * basis_points / 10_000).sum()
}

/// Extended resources, by the names their device plugins use.
fn extended(entry: &RawInstanceType) -> BTreeMap<Arc<str>, i64> {
    let gpus = |manufacturer: &str| {
        entry.gpus.iter().filter(|gpu| gpu.manufacturer == manufacturer).map(|gpu| gpu.count).sum::<i64>()
    };
    let neuron = entry.neuron_devices.iter().map(|device| device.count).sum();
    let cores = entry.neuron_devices.first().map_or(0, |device| device.count * device.cores_per_device);
    let amounts = [
        ("nvidia.com/gpu", gpus("NVIDIA")),
        ("amd.com/gpu", gpus("AMD")),
        ("habana.ai/gaudi", gpus("Habana")),
        ("aws.amazon.com/neuron", neuron),
        ("aws.amazon.com/neuroncore", cores),
        ("vpc.amazonaws.com/efa", entry.efa),
        ("vpc.amazonaws.com/pod-eni", entry.branch_enis),
    ];
    amounts.into_iter().filter(|(_, amount)| *amount > 0).map(|(name, amount)| (name.into(), amount)).collect()
}

/// Division rounded up, for a positive divisor.
fn ceil_div(dividend: i64, divisor: i64) -> i64 {
    -((-dividend).div_euclid(divisor))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reserved_cpu_follows_the_bands() {
        for (vcpu, expected) in [(1, 60), (2, 70), (4, 80), (8, 90), (64, 230), (96, 310), (128, 390), (192, 550)] {
            assert_eq!(kube_reserved_cpu(vcpu), expected, "{vcpu}");
        }
    }

    #[test]
    fn division_rounds_up() {
        for (dividend, divisor, expected) in [(0, 10, 0), (1, 10, 1), (10, 10, 1), (11, 10, 2), (20 * GIB, 10, 2 * GIB)]
        {
            assert_eq!(ceil_div(dividend, divisor), expected);
        }
    }
}
