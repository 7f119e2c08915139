//! Instance types and their zones from the EC2 API, as entries of the catalog.

use std::collections::{BTreeMap, BTreeSet};

use aws_sdk_ec2::Client;
use aws_sdk_ec2::types::{
    ArchitectureType, EbsOptimizedInfo, EbsOptimizedSupport, EfaInfo, EnaSupport, EphemeralNvmeSupport, GpuDeviceInfo,
    GpuDeviceMemoryInfo, InferenceDeviceInfo, InstanceStorageInfo, InstanceTypeInfo, InstanceTypeOffering,
    LocationType, MemoryInfo, NetworkInfo, NeuronDeviceCoreInfo, NeuronDeviceInfo, NitroEnclavesSupport, ProcessorInfo,
    SupportedAdditionalProcessorFeature, VCpuInfo,
};

use crate::catalog::{RawAccelerator, RawCatalog, RawGpu, RawInstanceType, RawNeuronDevice};
use crate::ec2::aws::errors::{ApiError, Class};
use crate::ec2::aws::filters::filter;

const TYPES: &str = "ec2:DescribeInstanceTypes";
const OFFERINGS: &str = "ec2:DescribeInstanceTypeOfferings";
/// Instance types per page, the API's maximum.
const TYPES_PAGE: i32 = 100;
/// Offerings per page, the API's maximum.
const OFFERINGS_PAGE: i32 = 1000;

/// Zones by instance type.
pub type ZonesByType = BTreeMap<String, BTreeSet<String>>;

/// An instance type whose description can't be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{name}: {problem}")]
pub struct UnusableType {
    pub name: String,
    /// What is missing or impossible.
    pub problem: String,
}

/// One instance type of DescribeInstanceTypes. Zones and price are left empty: other APIs report them. Branch interfaces, which
/// EC2 does not report, and baseline bandwidth, which it reports for newer types only, come from `tables` by name.
///
/// # Errors
/// A required member is absent, or a number is impossible.
pub fn raw_instance_type(info: &InstanceTypeInfo, tables: &RawCatalog) -> Result<RawInstanceType, UnusableType> {
    let name = info.instance_type().map(|name| name.as_str().to_owned()).unwrap_or_default();
    let missing = |member: &str| UnusableType { name: name.clone(), problem: format!("{member} is absent") };
    let table = tables.instance_type(&name);
    let processor = info.processor_info();
    let network = info.network_info().ok_or_else(|| missing("networkInfo"))?;
    let cards = network_cards(network);
    let default_card = usize::try_from(network.default_network_card_index().unwrap_or(0)).ok();
    let storage = info.instance_storage_info();
    let entry = RawInstanceType {
        arch: architectures(processor.map(ProcessorInfo::supported_architectures).unwrap_or_default()),
        cpu_manufacturer: processor.and_then(|processor| processor.manufacturer()).map(str::to_owned),
        clock_mhz: processor.and_then(ProcessorInfo::sustained_clock_speed_in_ghz).and_then(times_1000),
        vcpu: info.v_cpu_info().and_then(VCpuInfo::default_v_cpus).ok_or_else(|| missing("vCpuInfo"))?.into(),
        memory_mib: info.memory_info().and_then(MemoryInfo::size_in_mib).ok_or_else(|| missing("memoryInfo"))?,
        hypervisor: info.hypervisor().map(|hypervisor| hypervisor.as_str().to_owned()).unwrap_or_default(),
        bare_metal: info.bare_metal().unwrap_or(false),
        burstable: info.burstable_performance_supported().unwrap_or(false),
        current_generation: info.current_generation().unwrap_or(false),
        usage_classes: info.supported_usage_classes().iter().map(|class| class.as_str().to_owned()).collect(),
        enis: if cards.is_empty() {
            network.maximum_network_interfaces().unwrap_or(0).into()
        } else {
            cards.iter().sum()
        },
        default_card_enis: default_card.and_then(|index| cards.get(index)).copied(),
        ipv4_per_eni: network
            .ipv4_addresses_per_interface()
            .ok_or_else(|| missing("networkInfo.ipv4AddressesPerInterface"))?
            .into(),
        branch_enis: table.map_or(0, |table| table.branch_enis),
        ena_supported: network.ena_support().map(|ena| *ena != EnaSupport::Unsupported),
        efa: network.efa_info().and_then(EfaInfo::maximum_efa_interfaces).unwrap_or(0).into(),
        ebs_mbps: info
            .ebs_info()
            .filter(|ebs| ebs.ebs_optimized_support() == Some(&EbsOptimizedSupport::Default))
            .and_then(|ebs| ebs.ebs_optimized_info())
            .and_then(EbsOptimizedInfo::maximum_bandwidth_in_mbps)
            .map(i64::from),
        network_mbps: match table {
            Some(table) => table.network_mbps,
            None => baseline_mbps(network),
        },
        encryption_in_transit: Some(network.encryption_in_transit_supported().unwrap_or(false)),
        nitro_enclaves: Some(info.nitro_enclaves_support() == Some(&NitroEnclavesSupport::Supported)),
        nested_virtualization: Some(processor.is_some_and(|processor| {
            processor.supported_features().contains(&SupportedAdditionalProcessorFeature::NestedVirtualization)
        })),
        placement_strategies: info
            .placement_group_info()
            .map(|groups| groups.supported_strategies().iter().map(|strategy| strategy.as_str().to_owned()).collect()),
        on_demand: None,
        zones: Vec::new(),
        instance_store_gb: storage.and_then(InstanceStorageInfo::total_size_in_gb),
        instance_store_nvme: storage.map(|storage| storage.nvme_support() != Some(&EphemeralNvmeSupport::Unsupported)),
        gpus: info.gpu_info().map(|gpus| gpus.gpus().iter().map(gpu).collect()).unwrap_or_default(),
        inference_accelerators: info
            .inference_accelerator_info()
            .map(|info| info.accelerators().iter().map(accelerator).collect())
            .unwrap_or_default(),
        neuron_devices: info
            .neuron_info()
            .map(|info| info.neuron_devices().iter().map(neuron_device).collect())
            .unwrap_or_default(),
        network_cards: cards,
        name,
    };
    match entry.problem(&BTreeSet::new()) {
        Some(problem) => Err(UnusableType { name: entry.name, problem }),
        None => Ok(entry),
    }
}

/// EC2's names, including those without a Kubernetes name: the first one decides how much memory the kernel reserves.
fn architectures(found: &[ArchitectureType]) -> Vec<String> {
    found.iter().map(|architecture| architecture.as_str().to_owned()).collect()
}

/// Interfaces by card index; a card that is not listed has none.
fn network_cards(network: &NetworkInfo) -> Vec<i64> {
    // EC2 has some dozens; a much larger index is invalid.
    const MAX_CARDS: usize = 1024;
    let mut cards = Vec::new();
    for (position, card) in network.network_cards().iter().enumerate() {
        let index = card.network_card_index().map_or(Some(position), |index| usize::try_from(index).ok());
        let Some(index) = index.filter(|index| *index < MAX_CARDS) else { continue };
        if cards.len() <= index {
            cards.resize(index + 1, 0);
        }
        cards[index] = card.maximum_network_interfaces().unwrap_or(0).into();
    }
    cards
}

/// The sum of the cards' baselines, for types newer than the table.
fn baseline_mbps(network: &NetworkInfo) -> Option<i64> {
    let cards = network.network_cards();
    if cards.is_empty() {
        return None;
    }
    cards.iter().map(|card| card.baseline_bandwidth_in_gbps().and_then(times_1000)).sum()
}

/// GHz as MHz, Gbit/s as Mbit/s; `None` for an impossible number.
fn times_1000(number: f64) -> Option<i64> {
    let number = (number * 1000.0).round();
    // Rounded and in range, so the cast is exact.
    #[allow(clippy::cast_possible_truncation)]
    (0.0..1e12).contains(&number).then_some(number as i64)
}

fn gpu(device: &GpuDeviceInfo) -> RawGpu {
    RawGpu {
        name: device.name().unwrap_or_default().to_owned(),
        manufacturer: device.manufacturer().unwrap_or_default().to_owned(),
        count: device.count().unwrap_or(0).into(),
        memory_mib: device.memory_info().and_then(GpuDeviceMemoryInfo::size_in_mib).unwrap_or(0).into(),
    }
}

fn accelerator(device: &InferenceDeviceInfo) -> RawAccelerator {
    RawAccelerator {
        name: device.name().unwrap_or_default().to_owned(),
        manufacturer: device.manufacturer().unwrap_or_default().to_owned(),
        count: device.count().unwrap_or(0).into(),
    }
}

fn neuron_device(device: &NeuronDeviceInfo) -> RawNeuronDevice {
    RawNeuronDevice {
        name: device.name().unwrap_or_default().to_owned(),
        count: device.count().unwrap_or(0).into(),
        cores_per_device: device.core_info().and_then(NeuronDeviceCoreInfo::count).unwrap_or(0).into(),
    }
}

/// All usable instance types by name, and the unusable ones.
pub fn raw_instance_types(
    infos: &[InstanceTypeInfo],
    tables: &RawCatalog,
) -> (BTreeMap<String, RawInstanceType>, Vec<UnusableType>) {
    let mut usable = BTreeMap::new();
    let mut unusable = Vec::new();
    for info in infos {
        match raw_instance_type(info, tables) {
            Ok(entry) => {
                usable.insert(entry.name.clone(), entry);
            }
            Err(error) => unusable.push(error),
        }
    }
    (usable, unusable)
}

/// Zones by instance type, from DescribeInstanceTypeOfferings.
pub fn zones_by_type(offerings: &[InstanceTypeOffering]) -> ZonesByType {
    let mut zones = ZonesByType::new();
    for offering in offerings {
        if let (Some(name), Some(zone)) = (offering.instance_type(), offering.location()) {
            zones.entry(name.as_str().to_owned()).or_default().insert(zone.to_owned());
        }
    }
    zones
}

/// Describes the region's instance types that boot Linux or Windows images: hardware virtualization, x86-64 or Arm.
///
/// # Errors
/// The call fails, or the response is empty.
pub async fn describe_instance_types(ec2: &Client) -> Result<Vec<InstanceTypeInfo>, ApiError> {
    let found: Result<Vec<_>, _> = ec2
        .describe_instance_types()
        .filters(filter("supported-virtualization-type", ["hvm"]))
        .filters(filter("processor-info.supported-architecture", ["x86_64", "arm64"]))
        .into_paginator()
        .page_size(TYPES_PAGE)
        .items()
        .send()
        .collect()
        .await;
    let found = found.map_err(ApiError::of(TYPES))?;
    if found.is_empty() {
        return Err(unusable_response(TYPES, "no instance types"));
    }
    Ok(found)
}

/// Describes which zones offer which instance types, including local zones.
///
/// # Errors
/// The call fails, or the response is empty.
pub async fn describe_offerings(ec2: &Client) -> Result<Vec<InstanceTypeOffering>, ApiError> {
    let found: Result<Vec<_>, _> = ec2
        .describe_instance_type_offerings()
        .location_type(LocationType::AvailabilityZone)
        .into_paginator()
        .page_size(OFFERINGS_PAGE)
        .items()
        .send()
        .collect()
        .await;
    let found = found.map_err(ApiError::of(OFFERINGS))?;
    if found.is_empty() {
        return Err(unusable_response(OFFERINGS, "no offerings"));
    }
    Ok(found)
}

/// The error of a call that succeeds with an unusable response.
pub(crate) fn unusable_response(action: &'static str, message: impl Into<String>) -> ApiError {
    ApiError { action, code: String::new(), message: message.into(), class: Class::Server }
}

#[cfg(test)]
mod tests;
