//! Reads the input of `stowage simulate` from a scenario file or from manifests.

mod input_error;
mod scenario;
mod workload;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::{LimitRange, Node, PersistentVolume, PersistentVolumeClaim, Pod, Service};
use k8s_openapi::api::storage::v1::{CSINode, StorageClass as ApiStorageClass};
use serde_json::{Value, json};
use stowage_api::{Ec2NodeClass, NodePool};
use stowage_model::limit_range::DefaultRequests;
use stowage_planner::{
    Daemon, DefaultSpread, Interner, Labels, PodEntry, Services,
    volumes::{Claim, StorageClass, Volume, Volumes, attach_limits},
};

use crate::cli::manifests::input_error::{named, typed};
use crate::cli::manifests::scenario::Part;
use crate::cli::manifests::workload::{Workload, is_held_back};

pub use crate::cli::manifests::input_error::InputError;

/// Everything read so far; pods are interned as they are read.
#[derive(Debug, Default)]
pub struct Input {
    /// NodePools and their files.
    pub pools: Vec<(PathBuf, NodePool)>,
    /// EC2NodeClasses by name.
    pub node_classes: BTreeMap<String, Ec2NodeClass>,
    /// Pods to place.
    pub pods: Vec<PodEntry>,
    /// Running pods, by node name.
    pub running: BTreeMap<String, Vec<Running>>,
    /// Nodes.
    pub nodes: Vec<Node>,
    /// DaemonSets.
    pub daemons: Vec<Daemon>,
    /// Labels of namespaces.
    pub namespaces: BTreeMap<String, Labels>,
    /// PersistentVolumeClaims, volumes, storage classes and attach limits.
    pub volumes: Volumes,
    /// Selectors of Services.
    pub services: Services,
    /// Number of skipped objects, by kind.
    pub skipped: BTreeMap<String, usize>,
    /// DaemonSets with their files, as read.
    daemon_sets: Vec<(PathBuf, DaemonSet)>,
    /// Default requests by namespace.
    limit_ranges: BTreeMap<String, DefaultRequests>,
    interner: Interner,
}

/// A running pod.
#[derive(Debug)]
pub struct Running {
    /// The pod.
    pub pod: PodEntry,
    /// Whether a DaemonSet owns it.
    pub daemon: bool,
}

impl Input {
    /// Empty input. Pods without topology spread constraints get the default constraints.
    pub fn with_default_spread(default_spread: DefaultSpread) -> Self {
        let services = Services::new(default_spread.clone());
        Self { interner: Interner::with_default_spread(default_spread), services, ..Self::default() }
    }

    /// Reads a scenario file: `{"nodePools", "pods", "nodes", "daemonSets"}`; each pod is dropped once interned.
    ///
    /// # Errors
    /// See [`InputError`].
    pub fn read_scenario(&mut self, file: &Path) -> Result<(), InputError> {
        scenario::read(file, &mut |part| match part {
            Part::Object(object) => self.object(file, object),
            Part::Unknown(section) => {
                self.skip(&section);
                Ok(())
            }
        })
    }

    /// Reads manifests (YAML or JSON, several documents per file, lists) from a file or from all such files of a directory.
    ///
    /// # Errors
    /// See [`InputError`].
    pub fn read_manifests(&mut self, path: &Path) -> Result<(), InputError> {
        let fail = |error| InputError::Read { file: path.into(), error };
        if path.is_dir() {
            let mut inside: Vec<PathBuf> = std::fs::read_dir(path)
                .and_then(|entries| entries.map(|entry| entry.map(|e| e.path())).collect())
                .map_err(fail)?;
            inside.sort();
            for entry in inside {
                let manifest = matches!(entry.extension().and_then(|e| e.to_str()), Some("yaml" | "yml" | "json"));
                if manifest || entry.is_dir() {
                    self.read_manifests(&entry)?;
                }
            }
            return Ok(());
        }
        let text = std::fs::read_to_string(path).map_err(fail)?;
        let documents: Vec<Value> = serde_saphyr::from_multiple(&text)
            .map_err(|error| InputError::Syntax { file: path.into(), problem: error.to_string() })?;
        for document in documents {
            if !document.is_null() {
                self.object(path, document)?;
            }
        }
        Ok(())
    }

    fn object(&mut self, file: &Path, object: Value) -> Result<(), InputError> {
        let kind = object.get("kind").and_then(Value::as_str).unwrap_or_default().to_owned();
        match kind.as_str() {
            "" => {
                let problem = "a document without kind".to_owned();
                return Err(InputError::Syntax { file: file.into(), problem });
            }
            "NodePool" => self.pools.push((file.into(), typed(file, "NodePool", object)?)),
            "EC2NodeClass" => {
                let class: Ec2NodeClass = typed(file, "EC2NodeClass", object)?;
                self.node_classes.insert(class.metadata.name.clone().unwrap_or_default(), class);
            }
            "Pod" => self.pod(file, object)?,
            "Node" => self.nodes.push(typed(file, "Node", object)?),
            "DaemonSet" => {
                let set: DaemonSet = typed(file, "DaemonSet", object)?;
                self.daemon_set(file, &set)?;
                self.daemon_sets.push((file.into(), set));
            }
            "LimitRange" => {
                let limit_range: LimitRange = typed(file, "LimitRange", object)?;
                let namespace = limit_range.metadata.namespace.clone().unwrap_or_else(|| "default".to_owned());
                self.limit_ranges.entry(namespace).or_default().raise_to(&DefaultRequests::of(&limit_range));
                // Those that were read before.
                self.daemons.clear();
                for (file, set) in self.daemon_sets.clone() {
                    self.daemon_set(&file, &set)?;
                }
            }
            "Namespace" => {
                let name = named(&object);
                let labels = object.pointer("/metadata/labels").cloned().unwrap_or_else(|| json!({}));
                self.namespaces.insert(name, typed(file, "Namespace", labels)?);
            }
            "PersistentVolumeClaim" => {
                let claim: PersistentVolumeClaim = typed(file, "PersistentVolumeClaim", object)?;
                self.claim(&claim);
            }
            "PersistentVolume" => {
                let volume: PersistentVolume = typed(file, "PersistentVolume", object)?;
                let name = volume.metadata.name.clone().unwrap_or_default();
                let read = Volume::new(&volume).map_err(|error| InputError::Object {
                    file: file.into(),
                    object: format!("PersistentVolume {name}"),
                    problem: error.to_string(),
                })?;
                self.volumes.volumes.insert(name, read);
            }
            "StorageClass" => {
                let class: ApiStorageClass = typed(file, "StorageClass", object)?;
                let name = class.metadata.name.clone().unwrap_or_default();
                self.volumes.classes.insert(name, StorageClass::new(&class));
            }
            "CSINode" => {
                let node: CSINode = typed(file, "CSINode", object)?;
                let name = node.metadata.name.clone().unwrap_or_default();
                self.volumes.limits.insert(name, attach_limits(&node));
            }
            "Service" => self.services.apply(&typed::<Service>(file, "Service", object)?),
            "Deployment" | "ReplicaSet" | "StatefulSet" | "Job" | "CronJob" => self.workload(file, &kind, &object)?,
            _ if kind.ends_with("List") && object.get("items").is_some_and(Value::is_array) => {
                for item in object.get("items").and_then(Value::as_array).into_iter().flatten() {
                    let mut item = item.clone();
                    if item.get("kind").is_none()
                        && let Some(fields) = item.as_object_mut()
                    {
                        fields.insert("kind".into(), kind.trim_end_matches("List").into());
                    }
                    self.object(file, item)?;
                }
            }
            _ => self.skip(&kind),
        }
        Ok(())
    }

    fn skip(&mut self, kind: &str) {
        *self.skipped.entry(kind.to_owned()).or_default() += 1;
    }

    /// Adds a PersistentVolumeClaim. A claim that names its volume counts as bound.
    fn claim(&mut self, object: &PersistentVolumeClaim) {
        let mut claim = Claim::new(object);
        claim.bound = claim.volume.is_some();
        self.volumes.claims.insert(claim_key(object), claim);
    }

    /// The PersistentVolumeClaims of a pod's ephemeral volumes.
    fn ephemeral_claims(&mut self, pod: &Pod) {
        let namespace = pod.metadata.namespace.as_deref().unwrap_or("default");
        let name = pod.metadata.name.as_deref().unwrap_or_default();
        for volume in pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten()) {
            let template = volume.ephemeral.as_ref().and_then(|e| e.volume_claim_template.as_ref());
            if let Some(template) = template {
                let claim = PersistentVolumeClaim { spec: Some(template.spec.clone()), ..Default::default() };
                let key = format!("{namespace}/{name}-{}", volume.name);
                self.volumes.claims.entry(key).or_insert_with(|| Claim::new(&claim));
            }
        }
    }

    /// Adds storage classes that claims name and no file contains, since manifests seldom include cluster-level objects. Such a
    /// class is assumed to wait for the first consumer and to provision volumes of `driver` in any zone.
    pub fn assume_classes(&mut self, driver: &str) -> Vec<String> {
        let named = self.volumes.claims.values().filter_map(|claim| claim.storage_class.as_deref());
        let mut missing: BTreeSet<String> = named
            .filter(|name| !name.is_empty() && !self.volumes.classes.contains_key(*name))
            .map(Into::into)
            .collect();
        let default = self.volumes.claims.values().any(|claim| claim.storage_class.is_none() && !claim.bound);
        if default && !self.volumes.classes.values().any(|class| class.default) {
            missing.insert("(default)".to_owned());
        }
        for name in &missing {
            let class = StorageClass {
                waits: true,
                driver: Some(driver.into()),
                terms: Vec::new(),
                default: name == "(default)",
            };
            self.volumes.classes.insert(name.clone(), class);
        }
        missing.into_iter().collect()
    }

    /// Adds a DaemonSet, with the requests that the LimitRanges of its namespace give its pods.
    fn daemon_set(&mut self, file: &Path, set: &DaemonSet) -> Result<(), InputError> {
        let mut set = set.clone();
        let defaults = self.limit_ranges.get(set.metadata.namespace.as_deref().unwrap_or("default"));
        let spec = set.spec.as_mut().and_then(|spec| spec.template.spec.as_mut());
        if let Some((defaults, spec)) = defaults.zip(spec) {
            defaults.apply_to(spec);
        }
        let daemon = self.interner.intern_daemon(&set).map_err(|error| bad_pod(file, "DaemonSet", &error))?;
        self.daemons.push(daemon);
        Ok(())
    }

    fn pod(&mut self, file: &Path, object: Value) -> Result<(), InputError> {
        let pod: Pod = typed(file, "Pod", object)?;
        let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
        if matches!(phase, Some("Succeeded" | "Failed")) {
            return Ok(());
        }
        if is_held_back(&pod) {
            self.skip(HELD_BACK);
            return Ok(());
        }
        let entry = self.interner.intern(&pod).map_err(|error| bad_pod(file, "Pod", &error))?;
        self.ephemeral_claims(&pod);
        let daemon = pod
            .metadata
            .owner_references
            .iter()
            .flatten()
            .any(|owner| owner.controller == Some(true) && owner.kind == "DaemonSet");
        match pod.spec.as_ref().and_then(|spec| spec.node_name.as_ref()) {
            Some(node) => self.running.entry(node.clone()).or_default().push(Running { pod: entry, daemon }),
            None if daemon => {}
            None => self.pods.push(entry),
        }
        Ok(())
    }

    /// The pods that a workload controller would create. A claim of a file takes precedence over one of a volumeClaimTemplate.
    fn workload(&mut self, file: &Path, kind: &str, object: &Value) -> Result<(), InputError> {
        let workload = Workload::new(file, kind, object)?;
        if workload.held_back {
            (0..workload.replicas).for_each(|_| self.skip(HELD_BACK));
            return Ok(());
        }
        for index in 0..workload.replicas {
            let (pod, claims) = workload.pod(index);
            for claim in claims {
                if !self.volumes.claims.contains_key(&claim_key(&claim)) {
                    self.claim(&claim);
                }
            }
            let entry = self.interner.intern(&pod).map_err(|error| bad_pod(file, kind, &error))?;
            self.ephemeral_claims(&pod);
            self.pods.push(entry);
        }
        Ok(())
    }
}

fn claim_key(claim: &PersistentVolumeClaim) -> String {
    let namespace = claim.metadata.namespace.as_deref().unwrap_or("default");
    format!("{namespace}/{}", claim.metadata.name.as_deref().unwrap_or_default())
}

fn bad_pod(file: &Path, kind: &str, error: &stowage_planner::PodError) -> InputError {
    InputError::Object {
        file: file.into(),
        object: format!("{kind} {}", error.pod),
        problem: error.problem.to_string(),
    }
}

/// Pods that are skipped, as reported.
const HELD_BACK: &str = "Pod, gated or being deleted";
