//! Resource vectors. By name, CPU is a number of millicores, memory and storage of bytes, everything else of units.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Container, PodSpec, PodStatus, ResourceRequirements};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use crate::model::quantity::{QuantityError, parse_amount};
use crate::model::units::{Bytes, Millicores};

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
                    "memory" | "ephemeral-storage" => Bytes(value).to_string(),
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
    pub fn may_run_on(&self, allocatable: &Self) -> bool {
        OF_TYPES.iter().all(|name| self.get(name) <= allocatable.get(name))
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

    /// Requests of a running pod: as [`Resources::of_pod`], but while containers are resized in place, the larger of the requested and the
    /// allocated resources.
    ///
    /// # Errors
    /// As [`Resources::of_pod`].
    pub fn of_running_pod(spec: &PodSpec, status: Option<&PodStatus>) -> Result<Self, ResourceError> {
        let statuses =
            status.iter().flat_map(|s| [&s.container_statuses, &s.init_container_statuses]).flatten().flatten();
        let mut resized: Option<PodSpec> = None;
        for status in statuses {
            let actual = status.resources.as_ref().and_then(|resources| resources.requests.as_ref());
            for have in [actual, status.allocated_resources.as_ref()].into_iter().flatten() {
                let of = |spec: &PodSpec| {
                    let mut containers = spec.containers.iter().chain(spec.init_containers.iter().flatten());
                    containers.find(|container| container.name == status.name).and_then(|c| c.resources.clone())
                };
                let Some(asked) = of(resized.as_ref().unwrap_or(spec)) else { continue };
                if asked.requests.as_ref() == Some(have) {
                    continue;
                }
                let mut larger = requirements(&asked)?;
                larger.raise_to(&Self::from_map(have)?);
                let spec = resized.get_or_insert_with(|| spec.clone());
                let mut containers = spec.containers.iter_mut().chain(spec.init_containers.iter_mut().flatten());
                if let Some(container) = containers.find(|container| container.name == status.name) {
                    let requests = Some(larger.to_map());
                    container.resources = Some(ResourceRequirements { requests, ..asked });
                }
            }
        }
        Self::of_pod(resized.as_ref().unwrap_or(spec))
    }

    /// Requests of a pod, one pod slot included: the larger of (containers + sidecars) and the peak of the init
    /// containers with the sidecars started before them; pod-level resources override; overhead is added.
    /// A container's limit replaces an absent request, as the API server defaults it.
    ///
    /// # Errors
    /// A quantity is malformed or negative.
    pub fn of_pod(spec: &PodSpec) -> Result<Self, ResourceError> {
        let mut running = Self::default();
        for container in &spec.containers {
            running.add(&container_requests(container)?);
        }
        let mut sidecars = Self::default();
        let mut peak = Self::default();
        for container in spec.init_containers.as_deref().unwrap_or_default() {
            let requests = container_requests(container)?;
            if container.restart_policy.as_deref() == Some("Always") {
                sidecars.add(&requests);
                peak.raise_to(&sidecars);
            } else {
                let mut during = sidecars.clone();
                during.add(&requests);
                peak.raise_to(&during);
            }
        }
        running.add(&sidecars);
        running.raise_to(&peak);
        if let Some(pod_level) = &spec.resources {
            let declared = requirements(pod_level)?;
            let requested = |name: &str| pod_level.requests.as_ref().is_some_and(|map| map.contains_key(name));
            for name in declared_names(pod_level) {
                let supported = name == "cpu" || name == "memory" || name.starts_with("hugepages-");
                // As the API server defaults it: a limit replaces the request only where no container requests the resource.
                if supported && (requested(name) || running.get(name) == 0) {
                    running.set(name, declared.get(name));
                }
            }
        }
        if let Some(overhead) = &spec.overhead {
            running.add(&Self::from_map(overhead)?);
        }
        running.pods = 1;
        Ok(running)
    }
}

fn container_requests(container: &Container) -> Result<Resources, ResourceError> {
    container.resources.as_ref().map_or_else(|| Ok(Resources::default()), requirements)
}

fn requirements(resources: &ResourceRequirements) -> Result<Resources, ResourceError> {
    let mut out = Resources::default();
    if let Some(limits) = &resources.limits {
        out = Resources::from_map(limits)?;
    }
    if let Some(requests) = &resources.requests {
        let requests_read = Resources::from_map(requests)?;
        for name in requests.keys() {
            out.set(name, requests_read.get(name));
        }
    }
    Ok(out)
}

fn declared_names(resources: &ResourceRequirements) -> impl Iterator<Item = &str> {
    resources.limits.iter().chain(&resources.requests).flat_map(|map| map.keys().map(String::as_str))
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
            match name {
                "cpu" => write!(f, "cpu {}", Millicores(value))?,
                "memory" | "ephemeral-storage" => write!(f, "{name} {}", Bytes(value).human())?,
                _ => write!(f, "{name} {value}")?,
            }
        }
        if first { f.write_str("nothing") } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn requests_of(spec: Value) -> Resources {
        Resources::of_pod(&serde_json::from_value(spec).unwrap()).unwrap()
    }

    #[test]
    fn pod_requests_follow_the_kubelet() {
        for (name, spec, cpu, memory, gpu) in [
            (
                "b11 an init container larger than the sum determines the requests",
                json!({"containers": [{"name": "a", "resources": {"requests": {"cpu": "1"}}}],
                       "initContainers": [{"name": "i", "resources": {"requests": {"cpu": "3", "memory": "1Gi"}}}]}),
                3000,
                1 << 30,
                0,
            ),
            (
                "b12 a sidecar is added",
                json!({"containers": [{"name": "a", "resources": {"requests": {"cpu": "1"}}}],
                       "initContainers": [
                         {"name": "s", "restartPolicy": "Always", "resources": {"requests": {"cpu": "500m"}}},
                         {"name": "i", "resources": {"requests": {"cpu": "700m"}}}]}),
                1500,
                0,
                0,
            ),
            (
                "an init container after a sidecar runs concurrently with it",
                json!({"containers": [{"name": "a", "resources": {"requests": {"cpu": "1"}}}],
                       "initContainers": [
                         {"name": "s", "restartPolicy": "Always", "resources": {"requests": {"cpu": "500m"}}},
                         {"name": "i", "resources": {"requests": {"cpu": "2"}}}]}),
                2500,
                0,
                0,
            ),
            (
                "b13 pod overhead is added",
                json!({"containers": [{"name": "a", "resources": {"requests": {"cpu": "1"}}}],
                       "overhead": {"cpu": "250m", "memory": "120Mi"}}),
                1250,
                120 << 20,
                0,
            ),
            (
                "b14 a limit replaces an absent request",
                json!({"containers": [{"name": "a", "resources": {"limits": {"nvidia.com/gpu": "2"}}}]}),
                0,
                0,
                2,
            ),
            (
                "pod-level resources override the sum",
                json!({"containers": [{"name": "a", "resources": {"requests": {"cpu": "1", "memory": "1Gi"}}}],
                       "resources": {"requests": {"cpu": "2"}}}),
                2000,
                1 << 30,
                0,
            ),
            ("b16 a pod without requests still takes a slot", json!({"containers": [{"name": "a"}]}), 0, 0, 0),
        ] {
            let got = requests_of(spec);
            assert_eq!((got.cpu.0, got.memory.0, got.get("nvidia.com/gpu")), (cpu, memory, gpu), "{name}");
            assert_eq!(got.pods, 1, "{name}");
        }
    }

    #[test]
    fn a_pod_that_is_resized_takes_the_larger_of_both() {
        let spec = json!({"containers": [{"name": "a", "resources": {"requests": {"cpu": "1", "memory": "2Gi"}}},
            {"name": "b", "resources": {"requests": {"cpu": "1"}}}]});
        let spec: PodSpec = serde_json::from_value(spec).unwrap();
        for (status, cpu, memory) in [
            (json!({}), 2000, 2),
            (
                json!({"containerStatuses": [{"name": "a", "resources": {"requests": {"cpu": "3", "memory": "1Gi"}}}]}),
                4000,
                2,
            ),
            (
                json!({"containerStatuses": [{"name": "b", "allocatedResources": {"cpu": "2", "memory": "1Gi"}}]}),
                3000,
                3,
            ),
            (json!({"containerStatuses": [{"name": "gone", "allocatedResources": {"cpu": "9"}}]}), 2000, 2),
        ] {
            let mut status = status;
            for entry in status["containerStatuses"].as_array_mut().into_iter().flatten() {
                for (key, value) in
                    [("image", json!("i")), ("imageID", json!("i")), ("ready", json!(true)), ("restartCount", json!(0))]
                {
                    entry[key] = value;
                }
            }
            let status: PodStatus = serde_json::from_value(status).unwrap();
            let got = Resources::of_running_pod(&spec, Some(&status)).unwrap();
            assert_eq!((got.cpu.0, got.memory.0 >> 30), (cpu, memory), "{status:?}");
        }
    }

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
        let map: BTreeMap<String, Quantity> =
            [("cpu", "1500m"), ("memory", "3Gi"), ("pods", "29"), ("nvidia.com/gpu", "4")]
                .into_iter()
                .map(|(k, v)| (k.to_owned(), Quantity(v.into())))
                .collect();
        let resources = Resources::from_map(&map).unwrap();
        assert_eq!(resources.to_map(), map);
        assert_eq!(resources.to_string(), "cpu 1500m, memory 3Gi, nvidia.com/gpu 4");
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
