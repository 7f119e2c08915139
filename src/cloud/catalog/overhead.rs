//! Predicted capacity and overhead of a node, by Karpenter's formulas for each AMI family.

use std::collections::BTreeMap;
use std::sync::Arc;

use stowage_model::resources::{EFA, Resources};
use stowage_model::units::{Bytes, Millicores};

use crate::catalog::node_settings::{NodeSettings, Threshold};
use crate::catalog::raw::RawInstanceType;

/// Bytes of a MiB.
#[cfg(test)]
pub const MIB: i64 = 1 << 20;
/// Bytes of a GB, the unit of local disks.
const GB: i64 = 1_000_000_000;
/// Maximum number of pods where nothing else limits it: the kubelet's default.
const UNBOUNDED_PODS: i64 = 110;
/// Default hard eviction threshold of memory.
const EVICTION_MEMORY: Bytes = Bytes::from_mib(100);

/// Number of pods that the addresses of the network interfaces allow, including two host-network pods; 0 where no interface is left.
fn interface_pods(entry: &RawInstanceType, settings: &NodeSettings, reserved_enis: i64) -> i64 {
    let efa_only = settings.efa_only.unwrap_or_default().first_card;
    match entry.default_card_enis.unwrap_or(entry.enis) - reserved_enis - efa_only {
        ..=0 => 0,
        enis => enis * (entry.ipv4_per_eni - 1) + 2,
    }
}

/// Maximum number of pods of a node whose class does not set it.
pub(crate) fn default_pods(entry: &RawInstanceType, settings: &NodeSettings) -> i64 {
    if settings.family.limits_pods_by_interfaces() {
        interface_pods(entry, settings, settings.reserved_enis)
    } else {
        UNBOUNDED_PODS
    }
}

/// Maximum number of pods of a node.
fn pods(entry: &RawInstanceType, settings: &NodeSettings) -> i64 {
    let pods = settings.max_pods.unwrap_or_else(|| default_pods(entry, settings));
    match settings.pods_per_core {
        Some(per_core) if per_core > 0 => pods.min(per_core.saturating_mul(entry.vcpu)),
        _ => pods,
    }
}

/// The capacity that the node reports.
pub(crate) fn capacity(entry: &RawInstanceType, settings: &NodeSettings) -> Resources {
    Resources {
        cpu: Millicores::from_cores(entry.vcpu),
        memory: Bytes::from_mib(usable_memory_mib(entry, settings)),
        ephemeral_storage: ephemeral_storage(entry, settings),
        pods: pods(entry, settings),
        extended: extended(entry, settings),
    }
}

/// The size of the local disks where the class uses them for pods and there are any, else of the volume.
fn ephemeral_storage(entry: &RawInstanceType, settings: &NodeSettings) -> Bytes {
    match entry.instance_store_gb {
        Some(size) if settings.local_disks => Bytes(size * GB),
        _ => settings.volume_bytes,
    }
}

/// Memory without the share that firmware and hypervisor reserve. On Arm the kernel reserves another 64 MiB.
fn usable_memory_mib(entry: &RawInstanceType, settings: &NodeSettings) -> i64 {
    let arm = entry.arch.first().is_some_and(|arch| arch == "arm64");
    let memory = entry.memory_mib - if arm { 64 } else { 0 };
    let kept = ceil_div(memory.saturating_mul(settings.vm_memory_overhead_ppm), 1_000_000);
    (memory - kept).max(0)
}

/// Capacity minus kube-reserved, system-reserved and the hard eviction thresholds, at least zero. Soft thresholds reserve nothing.
pub(crate) fn allocatable(entry: &RawInstanceType, settings: &NodeSettings, capacity: &Resources) -> Resources {
    let (kube, system, eviction) = (&settings.kube_reserved, &settings.system_reserved, &settings.eviction_hard);
    // Where network interfaces limit pods, memory is reserved for that number, even if maxPods or reserved interfaces lower it.
    let kept_for = if settings.family.reserves_memory_by_interfaces() {
        interface_pods(entry, settings, 0)
    } else {
        capacity.pods
    };
    let cpu = kube.cpu.unwrap_or_else(|| kube_reserved_cpu(entry.vcpu));
    let memory = kube.memory.unwrap_or_else(|| Bytes::from_mib(11 * kept_for + 255));
    let storage = kube.ephemeral_storage.unwrap_or(Bytes::from_gib(1));
    let evict_memory = eviction.memory.map_or(EVICTION_MEMORY, |threshold| threshold.of(capacity.memory));
    let evict_storage = eviction.ephemeral_storage.map_or_else(
        || Bytes(ceil_div(capacity.ephemeral_storage.0, 10)),
        |threshold| threshold.of(capacity.ephemeral_storage),
    );
    // Amounts are user input: sums saturate.
    let bytes = |capacity: Bytes, taken: [Option<Bytes>; 3]| {
        Bytes(rest(capacity.0, taken.map(|taken| taken.map(|bytes| bytes.0))))
    };
    Resources {
        cpu: Millicores(rest(capacity.cpu.0, [Some(cpu), system.cpu].map(|taken| taken.map(|cpu| cpu.0)))),
        memory: bytes(capacity.memory, [Some(memory), system.memory, Some(evict_memory)]),
        ephemeral_storage: bytes(
            capacity.ephemeral_storage,
            [Some(storage), system.ephemeral_storage, Some(evict_storage)],
        ),
        pods: capacity.pods,
        extended: capacity.extended.clone(),
    }
}

/// Capacity minus the reserved amounts, at least zero.
fn rest<const N: usize>(capacity: i64, taken: [Option<i64>; N]) -> i64 {
    let taken = taken.into_iter().flatten().fold(0_i64, i64::saturating_add);
    capacity.saturating_sub(taken).max(0)
}

impl Threshold {
    /// The threshold in bytes for a capacity; a share is rounded up.
    fn of(self, capacity: Bytes) -> Bytes {
        match self {
            Self::Bytes(bytes) => bytes,
            Self::Share(billionths) => {
                let share = (i128::from(capacity.0) * i128::from(billionths) + 999_999_999) / 1_000_000_000;
                Bytes(i64::try_from(share).unwrap_or(i64::MAX))
            }
        }
    }
}

/// 6 % of the first core, 1 % of the second, 0.5 % of the next two, 0.25 % of the rest, in millicores.
fn kube_reserved_cpu(vcpu: i64) -> Millicores {
    let milli = vcpu * 1000;
    let bands = [(0, 1000, 600), (1000, 2000, 100), (2000, 4000, 50), (4000, i64::MAX, 25)];
    let reserved =
        bands.iter().map(|(low, high, basis_points)| (milli.min(*high) - low).max(0) * basis_points / 10_000).sum();
    Millicores(reserved)
}

/// Extended resources by the names of their device plugins.
fn extended(entry: &RawInstanceType, settings: &NodeSettings) -> BTreeMap<Arc<str>, i64> {
    let gpus = |manufacturer: &str| {
        entry.gpus.iter().filter(|gpu| gpu.manufacturer == manufacturer).map(|gpu| gpu.count).sum::<i64>()
    };
    let neuron = entry.neuron_devices.iter().map(|device| device.count).sum();
    let cores = entry.neuron_devices.first().map_or(0, |device| device.count * device.cores_per_device);
    let addresses = if settings.family.is_windows() { entry.ipv4_per_eni - 1 } else { 0 };
    let amounts = [
        ("nvidia.com/gpu", gpus("NVIDIA")),
        ("amd.com/gpu", gpus("AMD")),
        ("habana.ai/gaudi", gpus("Habana")),
        ("aws.amazon.com/neuron", neuron),
        ("aws.amazon.com/neuroncore", cores),
        (EFA, settings.efa_only.map_or(entry.efa, |list| list.total)),
        ("vpc.amazonaws.com/pod-eni", entry.branch_enis),
        ("vpc.amazonaws.com/PrivateIPv4Address", addresses),
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

    const GIB: i64 = 1 << 30;

    #[test]
    fn reserved_cpu_follows_the_brackets() {
        for (vcpu, expected) in [(1, 60), (2, 70), (4, 80), (8, 90), (64, 230), (96, 310), (128, 390), (192, 550)] {
            assert_eq!(kube_reserved_cpu(vcpu), Millicores(expected), "{vcpu}");
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
