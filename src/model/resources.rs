//! Resource vectors. By name, CPU is a number of millicores, memory and storage of bytes, the price that a NodePool may limit of micro-USD per hour,
//! everything else of units.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use crate::labels::USD_PER_HOUR;
use crate::quantity::{QuantityError, parse_amount};
use crate::units::{Bytes, MicroUsd, Millicores};

/// Elastic Fabric Adapter interfaces. An instance has them only if its launch requests them.
pub const EFA: &str = "vpc.amazonaws.com/efa";

/// Extended resources that the instance type determines. Others are unknown until a device plugin reports them.
const OF_TYPES: [&str; 8] = [
    "amd.com/gpu",
    "aws.amazon.com/neuron",
    "aws.amazon.com/neuroncore",
    "habana.ai/gaudi",
    "nvidia.com/gpu",
    "vpc.amazonaws.com/PrivateIPv4Address",
    EFA,
    "vpc.amazonaws.com/pod-eni",
];

/// Attachments of a node without a limit: more than any pod or node has.
pub const UNLIMITED: i64 = 1 << 20;
/// Prefix of the resource names that count attached volumes, the same as for the limits of in-tree volumes.
const ATTACHED: &str = "attachable-volumes-csi-";

/// The CSI driver whose attached volumes a resource counts.
pub fn attached_by(resource: &str) -> Option<&str> {
    resource.strip_prefix(ATTACHED)
}

/// Name of the resource that counts the volumes attached by a CSI driver.
pub fn attachments_of(driver: &str) -> String {
    format!("{ATTACHED}{driver}")
}

/// An amount of every resource. Absent is zero.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Resources {
    pub cpu: Millicores,
    pub memory: Bytes,
    pub ephemeral_storage: Bytes,
    /// Pod slots.
    pub pods: i64,
    /// Extended resources by name, such as `nvidia.com/gpu`; no zero entries.
    pub extended: BTreeMap<Arc<str>, i64>,
}

/// A resource with an invalid quantity.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("resource {resource}: {source}")]
pub struct ResourceError {
    /// Resource name.
    pub resource: String,
    /// The error of the quantity.
    #[source]
    pub source: QuantityError,
}

impl Resources {
    /// Parses a Kubernetes resource list.
    ///
    /// # Errors
    /// A quantity is malformed or negative; the error names the resource and the text.
    pub fn from_map(map: &BTreeMap<String, Quantity>) -> Result<Self, ResourceError> {
        let mut out = Self::default();
        for (name, quantity) in map {
            let value =
                parse_amount(name, &quantity.0).map_err(|source| ResourceError { resource: name.clone(), source })?;
            out.set(name, value);
        }
        Ok(out)
    }

    /// The list as Kubernetes writes it, zeros left out.
    pub fn to_map(&self) -> BTreeMap<String, Quantity> {
        self.iter()
            .filter(|(_, value)| *value != 0)
            .map(|(name, value)| {
                let text = match name {
                    "cpu" => Millicores(value).to_string(),
                    USD_PER_HOUR => MicroUsd(value).to_string(),
                    _ if is_in_bytes(name) => Bytes(value).to_string(),
                    _ => value.to_string(),
                };
                (name.to_owned(), Quantity(text))
            })
            .collect()
    }

    /// Every resource by its Kubernetes name, the four common ones first (zero or not).
    pub fn iter(&self) -> impl Iterator<Item = (&str, i64)> {
        [
            ("cpu", self.cpu.0),
            ("memory", self.memory.0),
            ("ephemeral-storage", self.ephemeral_storage.0),
            ("pods", self.pods),
        ]
        .into_iter()
        .chain(self.extended.iter().map(|(name, value)| (name.as_ref(), *value)))
    }

    /// The amount of a resource by its Kubernetes name; absent is zero.
    pub fn get(&self, name: &str) -> i64 {
        match name {
            "cpu" => self.cpu.0,
            "memory" => self.memory.0,
            "ephemeral-storage" => self.ephemeral_storage.0,
            "pods" => self.pods,
            other => self.extended.get(other).copied().unwrap_or(0),
        }
    }

    /// Sets a resource by its Kubernetes name.
    pub fn set(&mut self, name: &str, value: i64) {
        match name {
            "cpu" => self.cpu = Millicores(value),
            "memory" => self.memory = Bytes(value),
            "ephemeral-storage" => self.ephemeral_storage = Bytes(value),
            "pods" => self.pods = value,
            other if value == 0 => {
                self.extended.remove(other);
            }
            other => {
                self.extended.insert(Arc::from(other), value);
            }
        }
    }

    /// Adds `other`, saturating.
    pub fn add(&mut self, other: &Self) {
        self.combine(other, i64::saturating_add);
    }

    /// Subtracts `other`, saturating; may become negative.
    pub fn sub(&mut self, other: &Self) {
        self.combine(other, i64::saturating_sub);
    }

    /// The elementwise maximum.
    pub fn raise_to(&mut self, other: &Self) {
        self.combine(other, i64::max);
    }

    /// This vector `count` times.
    #[must_use]
    pub fn times(&self, count: i64) -> Self {
        let mut out = self.clone();
        for value in [&mut out.cpu.0, &mut out.memory.0, &mut out.ephemeral_storage.0, &mut out.pods] {
            *value = value.saturating_mul(count);
        }
        for value in out.extended.values_mut() {
            *value = value.saturating_mul(count);
        }
        out.extended.retain(|_, value| *value != 0);
        out
    }

    fn combine(&mut self, other: &Self, op: fn(i64, i64) -> i64) {
        self.cpu.0 = op(self.cpu.0, other.cpu.0);
        self.memory.0 = op(self.memory.0, other.memory.0);
        self.ephemeral_storage.0 = op(self.ephemeral_storage.0, other.ephemeral_storage.0);
        self.pods = op(self.pods, other.pods);
        for (name, value) in &other.extended {
            let combined = op(self.extended.get(name).copied().unwrap_or(0), *value);
            if combined == 0 {
                self.extended.remove(name);
            } else {
                self.extended.insert(Arc::clone(name), combined);
            }
        }
    }

    /// Whether the requests fit `room`. A resource that is not requested never prevents a fit.
    pub fn fits(&self, room: &Self) -> bool {
        self.iter().all(|(name, value)| value <= 0 || value <= room.get(name))
    }

    /// Whether an instance type has the requested devices that instance types determine: a daemon that lacks one stays pending there.
    pub fn has_devices(&self, allocatable: &Self) -> bool {
        OF_TYPES.iter().all(|name| self.get(name) <= allocatable.get(name))
    }

    /// Whether an empty node runs a pod with these requests. Otherwise a daemon stays pending there, and takes no room.
    pub fn may_run_on(&self, allocatable: &Self) -> bool {
        self.has_devices(allocatable) && self.foreseeable().fits(allocatable)
    }

    /// Without the resources that only a device plugin reports: whether a new node has them is unknown.
    #[must_use]
    pub fn foreseeable(&self) -> Self {
        let mut out = self.clone();
        out.extended.retain(|name, _| OF_TYPES.contains(&&**name) || attached_by(name).is_some());
        out
    }

    /// Whether every amount is zero.
    pub fn is_zero(&self) -> bool {
        self.iter().all(|(_, value)| value == 0)
    }
}

/// Whether an amount of a resource is a number of bytes.
pub fn is_in_bytes(name: &str) -> bool {
    matches!(name, "memory" | "ephemeral-storage") || name.starts_with("hugepages-")
}

/// An amount of a resource for people; may lose precision.
pub fn human(name: &str, value: i64) -> String {
    match name {
        "cpu" => Millicores(value).to_string(),
        USD_PER_HOUR => MicroUsd(value).to_string(),
        _ if is_in_bytes(name) => Bytes(value).human().to_string(),
        _ => value.to_string(),
    }
}

impl fmt::Display for Resources {
    /// Human-readable form without pod slots: `cpu 2, memory 4Gi, nvidia.com/gpu 1`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut first = true;
        for (name, value) in self.iter().filter(|(name, value)| *value != 0 && *name != "pods") {
            if !first {
                f.write_str(", ")?;
            }
            first = false;
            write!(f, "{name} {}", human(name, value))?;
        }
        if first { f.write_str("nothing") } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_names_the_resource_and_quotes_the_quantity() {
        let map = BTreeMap::from([("memory".to_owned(), Quantity("12Q".into()))]);
        let text = Resources::from_map(&map).unwrap_err().to_string();
        assert!(text.contains("memory"), "{text}");
        let source = Resources::from_map(&map).unwrap_err().source.to_string();
        assert!(source.contains("12Q"), "{source}");
    }

    #[test]
    fn maps_survive_a_round_trip() {
        let list =
            [("cpu", "1500m"), ("memory", "3Gi"), ("pods", "29"), ("nvidia.com/gpu", "4"), (USD_PER_HOUR, "2.5")];
        let map: BTreeMap<String, Quantity> =
            list.into_iter().map(|(k, v)| (k.to_owned(), Quantity(v.into()))).collect();
        let resources = Resources::from_map(&map).unwrap();
        assert_eq!(resources.to_map(), map);
        assert_eq!(resources.to_string(), "cpu 1500m, memory 3Gi, nvidia.com/gpu 4, stowage.dev/usd-per-hour 2.5");
    }

    #[test]
    fn only_requested_resources_can_prevent_a_fit() {
        let gpu =
            |n| Resources { extended: BTreeMap::from([(Arc::from("nvidia.com/gpu"), n)]), ..Resources::default() };
        assert!(!gpu(1).fits(&Resources::default()));
        assert!(gpu(1).fits(&gpu(1)));
        let overfull = Resources { memory: Bytes(-1), ..gpu(1) };
        assert!(gpu(1).fits(&overfull));
        let mut room = gpu(3);
        room.sub(&gpu(3));
        assert!(room.is_zero());
        assert_eq!(gpu(2).times(3), gpu(6));
    }
}
