//! Volumes: where a pod's claims let it run, and how many volumes of a driver a node can attach.
//!
//! Before anything is planned, `resolve` turns claims into what the rest of the core understands: node terms and a
//! resource per driver. Terms of volumes stay apart from the pod's own, since kube-scheduler does not look at them when
//! it counts the domains of a spread constraint.

pub mod exclusive;
pub mod free;
pub mod resolve;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::{CSINode, CSINodeDriver, StorageClass as ApiStorageClass};

use crate::model::pod_class::NodeTerm;
use crate::model::requirement::ValueSet;
use crate::model::resources::UNLIMITED;
use crate::planner::input::intern::{PodProblem, node_term};
use crate::planner::input::volumes::free::Assigned;
pub use crate::planner::input::volumes::free::{Capacity, Wanted};
pub(crate) use crate::planner::input::volumes::resolve::resolve;

/// Most alternatives that the volumes of one pod are combined to.
const MAX_TERMS: usize = 64;
/// The driver that serves what the in-tree EBS plugin made.
const EBS: &str = "ebs.csi.aws.com";

/// A `PersistentVolumeClaim`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Claim {
    /// Volume it names.
    pub volume: Option<Arc<str>>,
    /// The volume controller has finished binding it.
    pub bound: bool,
    /// Its volume is gone.
    pub lost: bool,
    /// Being deleted.
    pub deleting: bool,
    /// Storage class; `None` is the cluster's default one, an empty name none at all.
    pub storage_class: Option<Arc<str>>,
    /// `ReadWriteOncePod`: one pod uses it at a time, wherever it runs.
    pub single_pod: bool,
    /// What a volume must have to serve it.
    pub wanted: Wanted,
}

impl Claim {
    /// Reads a claim.
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
    /// Nodes it can be used on, ORed; empty is every node.
    pub terms: Vec<NodeTerm>,
    /// CSI driver that attaches it.
    pub driver: Option<Arc<str>>,
    /// Storage class.
    pub storage_class: Arc<str>,
    /// What it has for a claim, where no claim has it yet.
    pub free: Option<Arc<Capacity>>,
}

impl Volume {
    /// Reads a volume. Zone labels of volumes that were made without node affinity count as well, as kube-scheduler's
    /// `VolumeZone` counts them.
    ///
    /// # Errors
    /// An operator of the node affinity is not understood.
    pub fn new(api: &PersistentVolume) -> Result<Self, PodProblem> {
        let spec = api.spec.as_ref();
        let required =
            spec.and_then(|spec| spec.node_affinity.as_ref()).and_then(|affinity| affinity.required.as_ref());
        let mut terms: Vec<NodeTerm> =
            required.iter().flat_map(|r| &r.node_selector_terms).map(node_term).collect::<Result<_, _>>()?;
        let mut labelled = NodeTerm::default();
        for (key, value) in api.metadata.labels.iter().flatten() {
            if ZONAL.contains(&key.as_str()) {
                // A regional volume names its zones like so.
                labelled.labels.require(key, &ValueSet::any_of(value.split("__")));
            }
        }
        if !labelled.labels.is_empty() {
            terms = both(&terms, &[labelled]);
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

/// Labels of a volume that say where it is.
const ZONAL: [&str; 4] = [
    "topology.kubernetes.io/zone",
    "topology.kubernetes.io/region",
    "failure-domain.beta.kubernetes.io/zone",
    "failure-domain.beta.kubernetes.io/region",
];

/// A `StorageClass`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StorageClass {
    /// `WaitForFirstConsumer`: the volume is made where the pod goes.
    pub waits: bool,
    /// CSI driver of what it makes; `None` where it makes nothing (`kubernetes.io/no-provisioner`).
    pub driver: Option<Arc<str>>,
    /// `allowedTopologies`, ORed; empty is everywhere.
    pub terms: Vec<NodeTerm>,
    /// The cluster's default.
    pub default: bool,
}

impl StorageClass {
    /// Reads a storage class.
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
    /// Volumes that a node can attach, by node and driver; see [`attach_limits`].
    pub limits: HashMap<String, BTreeMap<Arc<str>, i64>>,
}

/// What a `CSINode` says of each driver of its node. One without a count attaches any number; of a driver that isn't
/// there yet, the node's instance type says what it will be.
pub fn attach_limits(api: &CSINode) -> BTreeMap<Arc<str>, i64> {
    let limit = |driver: &CSINodeDriver| {
        let count = driver.allocatable.as_ref().and_then(|allocatable| allocatable.count);
        (Arc::from(driver.name.as_str()), count.map_or(UNLIMITED, |count| i64::from(count.max(0))))
    };
    api.spec.drivers.iter().map(limit).collect()
}

/// Why a pod has to wait for its volumes: no node would help it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum VolumeProblem {
    /// No such claim.
    #[error("PersistentVolumeClaim {0} does not exist")]
    NoClaim(Arc<str>),
    /// The claim is being deleted.
    #[error("PersistentVolumeClaim {0} is being deleted")]
    Deleting(Arc<str>),
    /// The claim lost its volume.
    #[error("PersistentVolumeClaim {0} has lost its volume")]
    Lost(Arc<str>),
    /// The claim is bound to a volume that is not there.
    #[error("PersistentVolumeClaim {claim} is bound to PersistentVolume {volume}, which does not exist")]
    NoVolume {
        /// Claim.
        claim: Arc<str>,
        /// Volume.
        volume: Arc<str>,
    },
    /// Neither bound nor of a class that could make a volume.
    #[error("PersistentVolumeClaim {0} is not bound and has no StorageClass")]
    Classless(Arc<str>),
    /// The class is not there.
    #[error("PersistentVolumeClaim {claim} is of StorageClass {class}, which does not exist")]
    NoClass {
        /// Claim.
        claim: Arc<str>,
        /// Storage class.
        class: Arc<str>,
    },
    /// Bound by the volume controller, whatever pods do.
    #[error("PersistentVolumeClaim {0} is not bound yet, and its StorageClass does not wait for a pod to bind it")]
    Unbound(Arc<str>),
    /// Nothing makes volumes of the class, and none is free.
    #[error(
        "no PersistentVolume of StorageClass {class} is free for PersistentVolumeClaim {claim}, and nothing makes one"
    )]
    NoneFree {
        /// Claim.
        claim: Arc<str>,
        /// Storage class.
        class: Arc<str>,
    },
    /// Another pod uses a claim that one pod may use.
    #[error("its PersistentVolumeClaim {claim} is ReadWriteOncePod and in use by pod {pod}")]
    InUse {
        /// Claim.
        claim: Arc<str>,
        /// `namespace/name` of the pod that has it.
        pod: Arc<str>,
    },
    /// Another pod is planned to use a claim that one pod may use.
    #[error("its PersistentVolumeClaim {claim} is ReadWriteOncePod, and pod {pod} comes first")]
    Taken {
        /// Claim.
        claim: Arc<str>,
        /// `namespace/name` of the pod that comes first.
        pod: Arc<str>,
    },
    /// Volumes that can't be on one node.
    #[error("no node can have all its volumes: {0} and the others are in different places")]
    Apart(Arc<str>),
}

/// What a pod's volumes ask of its node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Needs {
    terms: Vec<NodeTerm>,
    /// Volumes to attach, by driver.
    attach: BTreeMap<Arc<str>, i64>,
}

impl Volumes {
    fn class_of(&self, claim: &Claim) -> Option<Arc<str>> {
        match &claim.storage_class {
            Some(name) => Some(Arc::clone(name)).filter(|name| !name.is_empty()),
            None => self.classes.iter().find(|(_, class)| class.default).map(|(name, _)| Arc::from(name.as_str())),
        }
    }

    /// The driver that attaches a claim's volume, where that is known.
    fn driver_of(&self, claim: &str) -> Option<Arc<str>> {
        let claim = self.claims.get(claim)?;
        match claim.volume.as_ref().and_then(|name| self.volumes.get(name.as_ref())) {
            Some(volume) => volume.driver.clone(),
            None => self.classes.get(self.class_of(claim)?.as_ref())?.driver.clone(),
        }
    }

    /// Where one claim lets its pod run, and what attaches it.
    fn place(&self, key: &Arc<str>, assigned: &Assigned) -> Result<(Vec<NodeTerm>, Option<Arc<str>>), VolumeProblem> {
        let claim = self.claims.get(key.as_ref()).ok_or_else(|| VolumeProblem::NoClaim(Arc::clone(key)))?;
        if claim.deleting {
            return Err(VolumeProblem::Deleting(Arc::clone(key)));
        }
        if claim.lost {
            return Err(VolumeProblem::Lost(Arc::clone(key)));
        }
        if let Some(name) = claim.volume.as_ref().filter(|_| claim.bound) {
            let volume = self.volumes.get(name.as_ref());
            let volume = volume.ok_or_else(|| VolumeProblem::NoVolume { claim: key.clone(), volume: name.clone() })?;
            return Ok((volume.terms.clone(), volume.driver.clone()));
        }
        let name = self.class_of(claim).ok_or_else(|| VolumeProblem::Classless(Arc::clone(key)))?;
        let class = self.classes.get(name.as_ref());
        let class = class.ok_or_else(|| VolumeProblem::NoClass { claim: key.clone(), class: name.clone() })?;
        if !class.waits || claim.volume.is_some() {
            return Err(VolumeProblem::Unbound(Arc::clone(key)));
        }
        if class.driver.is_some() {
            return Ok((class.terms.clone(), class.driver.clone()));
        }
        let mut terms: BTreeSet<NodeTerm> = BTreeSet::new();
        let mut everywhere = false;
        let mut driver = None;
        let serving: Vec<&Volume> = match assigned.get(key) {
            Some(volume) => volume.iter().filter_map(|volume| self.volumes.get(volume.as_ref())).collect(),
            None => self.serving(claim, &name).map(|(_, volume)| volume).collect(),
        };
        for volume in serving {
            everywhere |= volume.terms.is_empty();
            terms.extend(volume.terms.iter().cloned());
            driver = driver.max(volume.driver.clone());
        }
        if terms.is_empty() && !everywhere {
            return Err(VolumeProblem::NoneFree { claim: Arc::clone(key), class: name });
        }
        Ok((if everywhere { Vec::new() } else { terms.into_iter().collect() }, driver))
    }

    fn needs(&self, claims: &[Arc<str>], assigned: &Assigned) -> Result<Needs, VolumeProblem> {
        let mut needs = Needs::default();
        for key in claims {
            let (terms, driver) = self.place(key, assigned)?;
            if !terms.is_empty() {
                needs.terms = both(&needs.terms, &terms);
                if needs.terms.is_empty() {
                    return Err(VolumeProblem::Apart(Arc::clone(key)));
                }
            }
            if let Some(driver) = driver {
                *needs.attach.entry(driver).or_default() += 1;
            }
        }
        Ok(needs)
    }
}

/// Alternatives that satisfy both lists of alternatives; no alternatives at all ask nothing. Contradictions are dropped.
fn both(left: &[NodeTerm], right: &[NodeTerm]) -> Vec<NodeTerm> {
    if left.is_empty() || right.is_empty() {
        return if left.is_empty() { right.to_vec() } else { left.to_vec() };
    }
    let pairs = left.iter().flat_map(|a| right.iter().map(|b| a.and(b)));
    let possible = pairs.filter(|term| {
        !term.never && term.labels.contradiction().is_none() && term.name.as_ref().is_none_or(|set| !set.is_empty())
    });
    let distinct: BTreeSet<NodeTerm> = possible.collect();
    distinct.into_iter().take(MAX_TERMS).collect()
}
