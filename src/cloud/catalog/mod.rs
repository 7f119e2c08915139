//! The catalog: what EC2 says of each instance type, and the pure step from there to the planner's
//! [`Catalog`] (labels, capacity after overhead, offerings, prices).
//!
//! The same facts come from three places in one shape: the table embedded in the binary ([`embedded`]), a file given by
//! `--catalog` ([`parse`]), or a caller that fills [`RawInstanceType`] from EC2's own answers. No I/O here.

pub mod embedded;
pub mod evaluated;
pub mod labels;
pub mod overhead;
pub mod price;
pub mod settings;

use std::collections::BTreeSet;
use std::sync::Arc;

use serde::{Deserialize, Deserializer};

pub use crate::cloud::catalog::embedded::embedded;
pub use crate::cloud::catalog::evaluated::Trial;
pub use crate::cloud::catalog::labels::architecture;
pub use crate::cloud::catalog::overhead::MIB;
pub use crate::cloud::catalog::price::{PriceError, SYNTHETIC_SPOT_NOTE, SpotPricing, SpotRatio, micro_usd};
pub use crate::cloud::catalog::settings::{EfaOnly, EvictionHard, NodeSettings, Reserved, Threshold};

use crate::api::Ec2NodeClass;
use crate::model::offering::{CapacityType, Catalog, InstanceType, Offering};
use crate::model::units::MicroUsd;

/// Why a catalog can't be used.
#[derive(Debug, thiserror::Error)]
pub enum CatalogError {
    /// Not JSON, or a provenance field is missing.
    #[error("the catalog is not JSON of the expected shape: {0}")]
    Json(#[from] serde_json::Error),
    /// An entry lacks a field or has one of a wrong type.
    #[error("instance type {entry} of the catalog: {source}")]
    Entry {
        /// The entry's name, or its place in the list, from 0.
        entry: String,
        /// What serde says.
        source: serde_json::Error,
    },
    /// A value that can't be.
    #[error("instance type {entry} of the catalog: {problem}")]
    Invalid {
        /// The entry's name.
        entry: String,
        /// What is wrong and what would be right.
        problem: String,
    },
    /// The embedded table's own shape is broken.
    #[error("row {row} of the catalog table: {problem}")]
    Row {
        /// Row, from 0.
        row: usize,
        /// What is wrong.
        problem: String,
    },
}

/// CSI driver of EBS.
pub const EBS_DRIVER: &str = "ebs.csi.aws.com";
/// Slots of a node that its root volume and its network interfaces at boot take.
const ROOT_AND_INTERFACES: i64 = 3;
/// The smallest instance store disk of types with several, in GB, and the most disks that any such type has.
const DISK_GB: i64 = 900;
const MOST_DISKS: i64 = 8;

/// A region's instance types as EC2 describes them, with where the figures come from.
#[derive(Clone, Debug, PartialEq)]
pub struct RawCatalog {
    /// Region, as `us-east-1`.
    pub region: String,
    /// Zones of the region.
    pub zones: Vec<String>,
    /// Date of the prices, as `2026-07-06`.
    pub prices_as_of: String,
    /// What kind of prices they are.
    pub price_note: String,
    /// Where the figures were taken from.
    pub source: String,
    /// Instance types by name.
    pub instance_types: Vec<RawInstanceType>,
}

/// One instance type as EC2 describes it. Field names are those of the `--catalog` file, in snake case.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct RawInstanceType {
    /// As `m7g.large`.
    pub name: String,
    /// Supported architectures in EC2's words (`x86_64`, `arm64`); the first decides.
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
    /// No hypervisor.
    #[serde(default)]
    pub bare_metal: bool,
    /// CPU by credits.
    #[serde(default)]
    pub burstable: bool,
    /// EC2 does not call it a previous generation.
    #[serde(default)]
    pub current_generation: bool,
    /// `on-demand`, `spot`, `capacity-block`.
    pub usage_classes: Vec<String>,
    /// Network interfaces, summed over all network cards.
    pub enis: i64,
    /// Network interfaces of the default network card, where that is known: only they carry pods' addresses.
    /// Without it [`RawInstanceType::enis`] is used, which is the same on the many types that have one card.
    #[serde(default)]
    pub default_card_enis: Option<i64>,
    /// IPv4 addresses of one interface.
    pub ipv4_per_eni: i64,
    /// Branch interfaces (security groups for pods); 0 where the type can't trunk.
    #[serde(default)]
    pub branch_enis: i64,
    /// Network interfaces of each network card, by the card's index; empty where only the sum is known.
    #[serde(default)]
    pub network_cards: Vec<i64>,
    /// Whether there is an Elastic Network Adapter, where that is known.
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
    /// Whether traffic between instances of this kind is encrypted, where that is known.
    #[serde(default)]
    pub encryption_in_transit: Option<bool>,
    /// Whether Nitro Enclaves are supported, where that is known.
    #[serde(default)]
    pub nitro_enclaves: Option<bool>,
    /// Whether virtual machines may run inside, where that is known.
    #[serde(default)]
    pub nested_virtualization: Option<bool>,
    /// Placement group strategies (`cluster`, `partition`, `spread`) it can be launched with, where they are known.
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
    /// Model, as `A10G`.
    pub name: String,
    /// `NVIDIA`, `AMD` or `Habana`.
    pub manufacturer: String,
    /// How many; 0 on types that share one.
    pub count: i64,
    /// Memory of one, in MiB.
    pub memory_mib: i64,
}

/// Inference accelerators of one model.
#[derive(Clone, Debug, Deserialize, PartialEq)]
pub struct RawAccelerator {
    /// Model, as `Inferentia`.
    pub name: String,
    /// As `AWS`.
    pub manufacturer: String,
    /// How many.
    pub count: i64,
}

/// Neuron devices of one model.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct RawNeuronDevice {
    /// Model, as `Trainium`.
    pub name: String,
    /// How many.
    pub count: i64,
    /// Cores of one.
    pub cores_per_device: i64,
}

/// The fields around the list of instance types.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Frame {
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

/// Reads a catalog file as `--catalog` takes it: provenance fields and `instanceTypes`, a list of objects.
///
/// # Errors
/// Names the entry and the field that is missing, of a wrong type or impossible.
pub fn parse(json: &str) -> Result<RawCatalog, CatalogError> {
    let file: File = serde_json::from_str(json)?;
    assemble(file.frame, file.instance_types)
}

/// The checks that both shapes share: known zones and architectures, positive sizes, unique names.
fn assemble(frame: Frame, entries: Vec<serde_json::Value>) -> Result<RawCatalog, CatalogError> {
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

/// What makes an entry impossible, if anything. The bounds keep all later arithmetic far from overflow.
fn problem_of(entry: &RawInstanceType, zones: &BTreeSet<&str>) -> Option<String> {
    const MOST: i64 = 1 << 40;
    let bounded = [
        ("vcpu", entry.vcpu, 1, 1 << 20),
        ("memoryMib", entry.memory_mib, 1, 1 << 34),
        ("enis", entry.enis, 0, 1 << 10),
        ("ipv4PerEni", entry.ipv4_per_eni, 1, 1 << 16),
        ("defaultCardEnis", entry.default_card_enis.unwrap_or(0), 0, 1 << 10),
        ("branchEnis", entry.branch_enis, 0, 1 << 20),
        ("efa", entry.efa, 0, 1 << 20),
        ("clockMhz", entry.clock_mhz.unwrap_or(0), 0, MOST),
        ("ebsMbps", entry.ebs_mbps.unwrap_or(0), 0, MOST),
        ("networkMbps", entry.network_mbps.unwrap_or(0), 0, MOST),
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
    if labels::architecture(entry).is_none() {
        return Some(format!("arch is {:?}, expected x86_64 or arm64", entry.arch));
    }
    if let Some(price) = entry.on_demand
        && price.0 < 0
    {
        return Some(format!("onDemandUsdPerHour is {}, expected 0 or more", price.usd()));
    }
    let stranger = entry.zones.iter().find(|zone| !zones.contains(zone.as_str()))?;
    Some(format!("zone {stranger} is not one of the catalog's zones"))
}

impl RawCatalog {
    /// An instance type by name.
    pub fn instance_type(&self, name: &str) -> Option<&RawInstanceType> {
        let found = self.instance_types.binary_search_by(|entry| entry.name.as_str().cmp(name));
        found.ok().and_then(|index| self.instance_types.get(index))
    }

    /// What the planner may buy for nodes of `class` (none: a class with Karpenter's defaults), every offering
    /// available that the class's images boot on. Instance types are sorted by name, offerings by zone, then capacity
    /// type.
    pub fn for_node_class(&self, class: Option<&Ec2NodeClass>, spot: SpotPricing) -> Catalog {
        self.with_settings(&NodeSettings::of(class), spot)
    }

    /// As [`RawCatalog::for_node_class`], for settings already read from a class. Nothing may be bought where an
    /// expression for `maxPods` fails on any instance type.
    pub fn with_settings(&self, settings: &NodeSettings, spot: SpotPricing) -> Catalog {
        let each = settings.on_each(&self.instance_types);
        let both = self.instance_types.iter().zip(&each);
        let instance_types = both.map(|(entry, own)| Arc::new(entry.as_node(&self.region, own, spot))).collect();
        Catalog { region: self.region.clone(), instance_types }
    }
}

impl RawInstanceType {
    /// What makes it impossible, if anything; `zones` are those of the region.
    pub fn problem(&self, zones: &BTreeSet<&str>) -> Option<String> {
        problem_of(self, zones)
    }

    /// This type as a node of a class with `settings`; expressions among them count as not set
    /// ([`NodeSettings::on`] puts numbers in their place).
    pub fn as_node(&self, region: &str, settings: &NodeSettings, spot: SpotPricing) -> InstanceType {
        let capacity = overhead::capacity(self, settings);
        let allocatable = overhead::allocatable(self, settings, &capacity);
        InstanceType {
            name: self.name.as_str().into(),
            labels: labels::labels(self, region, settings.family),
            capacity,
            allocatable,
            volume_limits: [(Arc::from(EBS_DRIVER), self.ebs_volumes())].into(),
            offerings: self.offerings(settings, spot),
        }
    }

    /// EBS volumes that the EBS CSI driver lets a node attach besides its root: of the type's attachments (28 slots on
    /// Nitro, 39 volumes elsewhere, as the EC2 User Guide's "EBS volume limits" has them) those that network interfaces at
    /// boot, instance store and accelerators use are gone. Some newer sizes have more: fewer than could be is safe.
    fn ebs_volumes(&self) -> i64 {
        if self.hypervisor == "xen" {
            return 39;
        }
        if matches!(self.name.as_str(), "d3.8xlarge" | "d3en.12xlarge") {
            return 3;
        }
        let disks = (self.instance_store_gb.unwrap_or(0) + DISK_GB - 1) / DISK_GB;
        let local = if self.instance_store_nvme == Some(true) { disks.min(MOST_DISKS) } else { 0 };
        let accelerators: i64 = self.gpus.iter().map(|gpu| gpu.count).sum::<i64>()
            + self.inference_accelerators.iter().map(|have| have.count).sum::<i64>()
            + self.neuron_devices.iter().map(|have| have.count).sum::<i64>();
        (28 - ROOT_AND_INTERFACES - local - accelerators).max(1)
    }

    /// Where and how the type can be bought. On a type that the class's images don't boot on nothing is available.
    fn offerings(&self, settings: &NodeSettings, spot: SpotPricing) -> Vec<Offering> {
        let instance_family = self.name.split('.').next().unwrap_or_default();
        let available = settings.family.boots_on(instance_family, labels::architecture(self).unwrap_or_default());
        let mut offerings = Vec::new();
        let none = Arc::default();
        for zone in self.zones.iter().collect::<BTreeSet<_>>() {
            for capacity_type in [CapacityType::Spot, CapacityType::OnDemand] {
                if let Some(price) = self.price(zone, capacity_type, spot) {
                    offerings.push(Offering {
                        zone: zone.as_str().into(),
                        capacity_type,
                        price,
                        available,
                        left: None,
                        labels: Arc::clone(&none),
                        risk_permille: 0,
                    });
                }
            }
        }
        offerings
    }

    /// The price of this type in a zone; `None` where it is not offered so.
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

/// Whether EC2's word for how a feature is supported means that it is there.
fn supported<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<bool>, D::Error> {
    Ok(Option::<String>::deserialize(deserializer)?.map(|word| word != "unsupported"))
}

fn null_is_empty<'de, D: Deserializer<'de>, T: Deserialize<'de>>(deserializer: D) -> Result<Vec<T>, D::Error> {
    Ok(Option::<Vec<T>>::deserialize(deserializer)?.unwrap_or_default())
}

#[cfg(test)]
mod conformance;

#[cfg(test)]
mod tests;
