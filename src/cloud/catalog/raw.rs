//! Instance types as EC2 describes them, and the parsing and validation of catalog files.

use std::collections::BTreeSet;

use serde::{Deserialize, Deserializer};
use stowage_model::offering::CapacityType;
use stowage_model::units::MicroUsd;

use crate::catalog::price;
use crate::catalog::price::SpotPricing;

/// Why a catalog can't be used.
#[derive(Debug, thiserror::Error)]
pub enum CatalogError {
    /// Not JSON, or a provenance field is missing.
    #[error("the catalog is not JSON of the expected shape: {0}")]
    Json(#[from] serde_json::Error),
    /// An entry lacks a field or has one of a wrong type.
    #[error("instance type {entry} of the catalog: {source}")]
    Entry {
        /// The entry's name, or its index in the list, from 0.
        entry: String,
        source: serde_json::Error,
    },
    /// An impossible value.
    #[error("instance type {entry} of the catalog: {problem}")]
    Invalid {
        entry: String,
        /// What is wrong and the expected value.
        problem: String,
    },
    /// The embedded table is malformed.
    #[error("row {row} of the catalog table: {problem}")]
    Row {
        /// Row, from 0.
        row: usize,
        problem: String,
    },
}

/// The instance types of a region as EC2 describes them, and the source of the numbers.
#[derive(Clone, Debug, PartialEq)]
pub struct RawCatalog {
    /// Region, such as `us-east-1`.
    pub region: String,
    /// Zones of the region.
    pub zones: Vec<String>,
    /// Date of the prices, such as `2026-07-06`.
    pub prices_as_of: String,
    /// Kind of prices.
    pub price_note: String,
    /// Source of the numbers.
    pub source: String,
    /// Instance types by name.
    pub instance_types: Vec<RawInstanceType>,
}

/// One instance type as EC2 describes it. Field names are those of the `--catalog` file, in snake case.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct RawInstanceType {
    /// Such as `m7g.large`.
    pub name: String,
    /// Supported architectures by EC2's names (`x86_64`, `arm64`); the first one is used.
    pub arch: Vec<String>,
    /// `intel`, `amd` or `aws`.
    #[serde(default)]
    pub cpu_manufacturer: Option<String>,
    /// Sustained clock speed in MHz.
    #[serde(default)]
    pub clock_mhz: Option<i64>,
    /// Default vCPUs.
    pub vcpu: i64,
    /// Memory in MiB, before any overhead.
    pub memory_mib: i64,
    /// `nitro`, `xen`, or empty for bare metal.
    #[serde(default)]
    pub hypervisor: String,
    #[serde(default)]
    pub bare_metal: bool,
    /// Whether the CPU performance is burstable (CPU credits).
    #[serde(default)]
    pub burstable: bool,
    /// Whether it is not a previous generation.
    #[serde(default)]
    pub current_generation: bool,
    /// `on-demand`, `spot`, `capacity-block`.
    pub usage_classes: Vec<String>,
    /// Network interfaces, summed over all network cards.
    pub enis: i64,
    /// Network interfaces of the default network card, where known: only these carry pod addresses. Otherwise
    /// [`RawInstanceType::enis`] is used, which is equal for types with one card.
    #[serde(default)]
    pub default_card_enis: Option<i64>,
    /// IPv4 addresses of one interface.
    pub ipv4_per_eni: i64,
    /// Branch interfaces (security groups for pods); 0 where the type does not support trunking.
    #[serde(default)]
    pub branch_enis: i64,
    /// Network interfaces of each network card, by the card's index; empty where only the sum is known.
    #[serde(default)]
    pub network_cards: Vec<i64>,
    /// Whether it supports the Elastic Network Adapter, where known.
    #[serde(default, rename = "ena", deserialize_with = "supported")]
    pub ena_supported: Option<bool>,
    /// EFA interfaces.
    #[serde(default)]
    pub efa: i64,
    /// Bandwidth to EBS in Mbit/s, where the type is EBS-optimized by default.
    #[serde(default)]
    pub ebs_mbps: Option<i64>,
    /// Baseline network bandwidth in Mbit/s.
    #[serde(default)]
    pub network_mbps: Option<i64>,
    /// Whether traffic between instances is encrypted in transit, where known.
    #[serde(default)]
    pub encryption_in_transit: Option<bool>,
    /// Whether it supports Nitro Enclaves, where known.
    #[serde(default)]
    pub nitro_enclaves: Option<bool>,
    /// Whether it supports nested virtualization, where known.
    #[serde(default)]
    pub nested_virtualization: Option<bool>,
    /// Supported placement group strategies (`cluster`, `partition`, `spread`), where known.
    #[serde(default)]
    pub placement_strategies: Option<Vec<String>>,
    /// On-demand list price; without one the type is not offered.
    #[serde(default, rename = "onDemandUsdPerHour", deserialize_with = "price::deserialize_usd")]
    pub on_demand: Option<MicroUsd>,
    /// Zones that offer it.
    pub zones: Vec<String>,
    /// Instance store in GB (10⁹ bytes).
    #[serde(default)]
    pub instance_store_gb: Option<i64>,
    /// Whether the instance store is NVMe.
    #[serde(default)]
    pub instance_store_nvme: Option<bool>,
    /// GPUs by model.
    #[serde(default, deserialize_with = "null_is_empty")]
    pub gpus: Vec<RawGpu>,
    /// Inference accelerators by model.
    #[serde(default, deserialize_with = "null_is_empty")]
    pub inference_accelerators: Vec<RawAccelerator>,
    /// Neuron devices by model.
    #[serde(default, deserialize_with = "null_is_empty")]
    pub neuron_devices: Vec<RawNeuronDevice>,
}

/// GPUs of one model.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct RawGpu {
    /// Model, such as `A10G`.
    pub name: String,
    /// `NVIDIA`, `AMD` or `Habana`.
    pub manufacturer: String,
    /// Number of GPUs; 0 on types with a fraction of a GPU.
    pub count: i64,
    /// Memory of each GPU in MiB.
    pub memory_mib: i64,
}

/// Inference accelerators of one model.
#[derive(Clone, Debug, Deserialize, PartialEq)]
pub struct RawAccelerator {
    /// Model, such as `Inferentia`.
    pub name: String,
    /// Such as `AWS`.
    pub manufacturer: String,
    pub count: i64,
}

/// Neuron devices of one model.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct RawNeuronDevice {
    /// Model, such as `Trainium`.
    pub name: String,
    pub count: i64,
    /// Cores of each device.
    pub cores_per_device: i64,
}

/// The fields around the list of instance types.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Frame {
    region: String,
    zones: Vec<String>,
    #[serde(default)]
    prices_as_of: String,
    #[serde(default)]
    price_note: String,
    #[serde(default)]
    source: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct File {
    #[serde(flatten)]
    frame: Frame,
    instance_types: Vec<serde_json::Value>,
}

/// Parses a `--catalog` file: provenance fields and `instanceTypes`, a list of objects.
///
/// # Errors
/// [`CatalogError`] with the entry and the invalid field.
pub fn parse(json: &str) -> Result<RawCatalog, CatalogError> {
    let file: File = serde_json::from_str(json)?;
    assemble(file.frame, file.instance_types)
}

/// The checks for both formats: known zones and architectures, positive sizes, unique names.
pub(crate) fn assemble(frame: Frame, entries: Vec<serde_json::Value>) -> Result<RawCatalog, CatalogError> {
    let known: BTreeSet<&str> = frame.zones.iter().map(String::as_str).collect();
    let mut instance_types = Vec::with_capacity(entries.len());
    for (index, entry) in entries.into_iter().enumerate() {
        let name = entry.get("name").and_then(|name| name.as_str()).map(str::to_owned);
        let parsed: RawInstanceType = serde_json::from_value(entry).map_err(|source| CatalogError::Entry {
            entry: name.unwrap_or_else(|| format!("number {index}")),
            source,
        })?;
        if let Some(problem) = problem_of(&parsed, &known) {
            return Err(CatalogError::Invalid { entry: parsed.name, problem });
        }
        instance_types.push(parsed);
    }
    instance_types.sort_by(|a, b| a.name.cmp(&b.name));
    if let Some(pair) = instance_types.windows(2).find(|pair| pair[0].name == pair[1].name) {
        return Err(CatalogError::Invalid {
            entry: pair[0].name.clone(),
            problem: "is listed twice; keep one of the two".to_owned(),
        });
    }
    Ok(RawCatalog {
        region: frame.region,
        zones: frame.zones,
        prices_as_of: frame.prices_as_of,
        price_note: frame.price_note,
        source: frame.source,
        instance_types,
    })
}

/// The reason why an entry is invalid, if it is. The bounds prevent overflow in later arithmetic.
fn problem_of(entry: &RawInstanceType, zones: &BTreeSet<&str>) -> Option<String> {
    const MAX: i64 = 1 << 40;
    let bounded = [
        ("vcpu", entry.vcpu, 1, 1 << 20),
        ("memoryMib", entry.memory_mib, 1, 1 << 34),
        ("enis", entry.enis, 0, 1 << 10),
        ("ipv4PerEni", entry.ipv4_per_eni, 1, 1 << 16),
        ("defaultCardEnis", entry.default_card_enis.unwrap_or(0), 0, 1 << 10),
        ("branchEnis", entry.branch_enis, 0, 1 << 20),
        ("efa", entry.efa, 0, 1 << 20),
        ("clockMhz", entry.clock_mhz.unwrap_or(0), 0, MAX),
        ("ebsMbps", entry.ebs_mbps.unwrap_or(0), 0, MAX),
        ("networkMbps", entry.network_mbps.unwrap_or(0), 0, MAX),
        ("instanceStoreGb", entry.instance_store_gb.unwrap_or(0), 0, 1 << 30),
    ];
    let cards = entry.network_cards.iter().map(|enis| ("networkCards", *enis, 0, 1 << 10));
    for (field, value, low, high) in bounded.into_iter().chain(cards) {
        if !(low..=high).contains(&value) {
            return Some(format!("{field} is {value}, expected {low} to {high}"));
        }
    }
    let counts = (entry.gpus.iter().map(|gpu| ("gpus", gpu.count)))
        .chain(entry.inference_accelerators.iter().map(|a| ("inferenceAccelerators", a.count)))
        .chain(
            entry
                .neuron_devices
                .iter()
                .flat_map(|d| [("neuronDevices", d.count), ("neuronDevices", d.cores_per_device)]),
        );
    for (field, count) in counts {
        if !(0..=1 << 20).contains(&count) {
            return Some(format!("{field} holds the count {count}, expected 0 to {}", 1 << 20));
        }
    }
    if entry.name.matches('.').count() != 1 || entry.name.starts_with('.') || entry.name.ends_with('.') {
        return Some("name is not FAMILY.SIZE, as m7g.large".to_owned());
    }
    if architecture(entry).is_none() {
        return Some(format!("arch is {:?}, expected x86_64 or arm64", entry.arch));
    }
    if let Some(price) = entry.on_demand
        && price.0 < 0
    {
        return Some(format!("onDemandUsdPerHour is {}, expected 0 or more", price.usd()));
    }
    let unknown = entry.zones.iter().find(|zone| !zones.contains(zone.as_str()))?;
    Some(format!("zone {unknown} is not one of the catalog's zones"))
}

impl RawCatalog {
    /// An instance type by name.
    pub fn instance_type(&self, name: &str) -> Option<&RawInstanceType> {
        let found = self.instance_types.binary_search_by(|entry| entry.name.as_str().cmp(name));
        found.ok().and_then(|index| self.instance_types.get(index))
    }
}

impl RawInstanceType {
    /// The reason why the entry is invalid, if it is; `zones` are the zones of the region.
    pub fn problem(&self, zones: &BTreeSet<&str>) -> Option<String> {
        problem_of(self, zones)
    }

    /// The price of this type in a zone; `None` where it is not offered.
    pub fn price(&self, zone: &str, capacity_type: CapacityType, spot: SpotPricing) -> Option<MicroUsd> {
        let usage = |class: &str| self.usage_classes.iter().any(|have| have == class);
        if !usage(capacity_type.as_str()) || !self.zones.iter().any(|have| have == zone) {
            return None;
        }
        let on_demand = self.on_demand?;
        match capacity_type {
            CapacityType::OnDemand => Some(on_demand),
            CapacityType::Spot => spot.price(&self.name, zone, on_demand),
            CapacityType::Reserved => None,
        }
    }
}

/// The Kubernetes name of the architecture that EC2 lists first; `None` where Kubernetes has no name for it.
pub fn architecture(entry: &RawInstanceType) -> Option<&'static str> {
    entry.arch.iter().find_map(|arch| match arch.as_str() {
        "x86_64" => Some("amd64"),
        "arm64" => Some("arm64"),
        _ => None,
    })
}

/// Whether EC2's support value means that a feature is supported.
fn supported<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<bool>, D::Error> {
    Ok(Option::<String>::deserialize(deserializer)?.map(|word| word != "unsupported"))
}

fn null_is_empty<'de, D: Deserializer<'de>, T: Deserialize<'de>>(deserializer: D) -> Result<Vec<T>, D::Error> {
    Ok(Option::<Vec<T>>::deserialize(deserializer)?.unwrap_or_default())
}
