//! PersistentVolumeClaims, PersistentVolumes, StorageClasses and CSINodes, reduced to what planning needs.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::{CSINode, CSINodeDriver, StorageClass as ApiStorageClass};
use stowage_model::pod_class::NodeTerm;
use stowage_model::requirement::ValueSet;
use stowage_model::resources::UNLIMITED;

use crate::input::terms::{TermError, node_term};
use crate::input::volumes::capacity::{Capacity, Wanted};
use crate::input::volumes::conjunction::both;

/// The driver of volumes that the in-tree EBS plugin provisioned.
const EBS: &str = "ebs.csi.aws.com";

/// A `PersistentVolumeClaim`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Claim {
    /// `spec.volumeName`.
    pub volume: Option<Arc<str>>,
    /// The volume controller completed the binding.
    pub bound: bool,
    /// Its volume no longer exists.
    pub lost: bool,
    /// Being deleted.
    pub deleting: bool,
    /// `None` is the cluster's default class, an empty name means no class.
    pub storage_class: Option<Arc<str>>,
    /// `ReadWriteOncePod`: one pod uses it at a time, wherever it runs.
    pub single_pod: bool,
    /// What a volume must offer to serve the claim.
    pub wanted: Wanted,
}

impl Claim {
    /// Parses a claim.
    pub fn new(api: &PersistentVolumeClaim) -> Self {
        let spec = api.spec.as_ref();
        let annotated = |key: &str| api.metadata.annotations.as_ref().is_some_and(|map| map.contains_key(key));
        let volume = spec.and_then(|spec| spec.volume_name.as_deref()).filter(|name| !name.is_empty());
        Self {
            bound: volume.is_some() && annotated("pv.kubernetes.io/bind-completed"),
            volume: volume.map(Arc::from),
            lost: api.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Lost"),
            deleting: api.metadata.deletion_timestamp.is_some(),
            storage_class: spec.and_then(|spec| spec.storage_class_name.as_deref()).map(Arc::from),
            single_pod: spec
                .iter()
                .flat_map(|spec| spec.access_modes.iter().flatten())
                .any(|m| m == "ReadWriteOncePod"),
            wanted: spec.map(Wanted::new).unwrap_or_default(),
        }
    }
}

/// A `PersistentVolume`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Volume {
    /// Nodes that can use it, ORed; empty is every node.
    pub terms: Vec<NodeTerm>,
    /// CSI driver that attaches it.
    pub driver: Option<Arc<str>>,
    pub storage_class: Arc<str>,
    /// What it offers, while no claim is bound to it.
    pub free: Option<Arc<Capacity>>,
}

impl Volume {
    /// Parses a volume. Zone labels of volumes without node affinity count as terms, as in kube-scheduler's `VolumeZone` plugin.
    ///
    /// # Errors
    /// The node affinity has an unknown operator or field.
    pub fn new(api: &PersistentVolume) -> Result<Self, TermError> {
        let spec = api.spec.as_ref();
        let required =
            spec.and_then(|spec| spec.node_affinity.as_ref()).and_then(|affinity| affinity.required.as_ref());
        let mut terms: Vec<NodeTerm> =
            required.iter().flat_map(|r| &r.node_selector_terms).map(node_term).collect::<Result<_, _>>()?;
        let mut labeled = NodeTerm::default();
        for (key, value) in api.metadata.labels.iter().flatten() {
            if ZONAL.contains(&key.as_str()) {
                // A regional volume lists its zones with this separator.
                labeled.labels.require(key, &ValueSet::any_of(value.split("__")));
            }
        }
        if !labeled.labels.is_empty() {
            terms = both(&terms, &[labeled]);
        }
        let phase = api.status.as_ref().and_then(|status| status.phase.as_deref());
        let csi = spec.and_then(|spec| spec.csi.as_ref()).map(|csi| csi.driver.as_str());
        let in_tree = spec.and_then(|spec| spec.aws_elastic_block_store.as_ref()).map(|_| EBS);
        Ok(Self {
            terms,
            driver: csi.or(in_tree).map(Arc::from),
            storage_class: Arc::from(spec.and_then(|spec| spec.storage_class_name.as_deref()).unwrap_or_default()),
            free: spec
                .filter(|spec| spec.claim_ref.is_none() && phase.is_none_or(|phase| phase == "Available"))
                .filter(|_| api.metadata.deletion_timestamp.is_none())
                .map(|spec| Arc::new(Capacity::new(spec, api.metadata.labels.as_ref()))),
        })
    }
}

/// Topology labels of volumes.
const ZONAL: [&str; 4] = [
    "topology.kubernetes.io/zone",
    "topology.kubernetes.io/region",
    "failure-domain.beta.kubernetes.io/zone",
    "failure-domain.beta.kubernetes.io/region",
];

/// A `StorageClass`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StorageClass {
    /// `WaitForFirstConsumer`: the volume is provisioned where the pod is bound.
    pub waits: bool,
    /// CSI driver of the volumes it provisions; `None` for `kubernetes.io/no-provisioner`.
    pub driver: Option<Arc<str>>,
    /// `allowedTopologies`, ORed; empty is every node.
    pub terms: Vec<NodeTerm>,
    /// The default class of the cluster.
    pub default: bool,
}

impl StorageClass {
    /// Parses a storage class.
    pub fn new(api: &ApiStorageClass) -> Self {
        let terms = api.allowed_topologies.iter().flatten().map(|topology| {
            let mut term = NodeTerm::default();
            for wanted in topology.match_label_expressions.iter().flatten() {
                term.labels.require(&wanted.key, &ValueSet::any_of(wanted.values.iter().map(String::as_str)));
            }
            term
        });
        let annotations = api.metadata.annotations.as_ref();
        Self {
            waits: api.volume_binding_mode.as_deref() == Some("WaitForFirstConsumer"),
            driver: match api.provisioner.as_str() {
                "kubernetes.io/no-provisioner" => None,
                "kubernetes.io/aws-ebs" => Some(Arc::from(EBS)),
                other => Some(Arc::from(other)),
            },
            terms: terms.collect(),
            default: annotations
                .is_some_and(|map| map.get("storageclass.kubernetes.io/is-default-class").is_some_and(|v| v == "true")),
        }
    }
}

/// The volumes of a cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Volumes {
    /// Claims by `namespace/name`.
    pub claims: HashMap<String, Claim>,
    /// Volumes by name.
    pub volumes: HashMap<String, Volume>,
    /// Storage classes by name.
    pub classes: BTreeMap<String, StorageClass>,
    /// Attachment limits by node and driver; see [`attach_limits`].
    pub limits: HashMap<String, BTreeMap<Arc<str>, i64>>,
    /// Attachments by driver that every new node keeps free for claims of several pods; `resolve` sets it.
    pub(crate) reserved: BTreeMap<Arc<str>, i64>,
}

/// Attachment limits of a node by driver, from its `CSINode`. A driver without a count has no limit; for a driver that is not registered
/// yet, the limit of the node's instance type applies.
pub fn attach_limits(api: &CSINode) -> BTreeMap<Arc<str>, i64> {
    let limit = |driver: &CSINodeDriver| {
        let count = driver.allocatable.as_ref().and_then(|allocatable| allocatable.count);
        (Arc::from(driver.name.as_str()), count.map_or(UNLIMITED, |count| i64::from(count.max(0))))
    };
    api.spec.drivers.iter().map(limit).collect()
}
