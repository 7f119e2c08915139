//! Reads the input of `stowage simulate` from a scenario file or from manifests.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};

use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::{
    Node, PersistentVolume, PersistentVolumeClaim, PersistentVolumeClaimVolumeSource, Pod, Service, Volume as PodVolume,
};
use k8s_openapi::api::storage::v1::{CSINode, StorageClass as ApiStorageClass};
use serde::de::{DeserializeOwned, DeserializeSeed, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::{Value, json};

use crate::api::{Ec2NodeClass, NodePool};
use crate::planner::input::default_spread::{DefaultSpread, Services};
use crate::planner::input::intern::Interner;
use crate::planner::input::pod::{Daemon, Labels, PodEntry};
use crate::planner::input::volumes::objects::{Claim, StorageClass, Volume, Volumes, attach_limits};

/// Invalid input; the message names the file, the object and the field.
#[derive(Debug, thiserror::Error)]
pub enum InputError {
    /// A file cannot be read.
    #[error("{}: {error}", .file.display())]
    Read {
        /// File.
        file: PathBuf,
        /// Cause.
        error: std::io::Error,
    },
    /// The text is neither JSON nor YAML, or has an unexpected shape.
    #[error("{}: {problem}", .file.display())]
    Syntax {
        /// File.
        file: PathBuf,
        /// The error and its position.
        problem: String,
    },
    /// A field of an object is invalid.
    #[error("{}: {object}: {problem}", .file.display())]
    Object {
        /// File.
        file: PathBuf,
        /// Kind and name.
        object: String,
        /// Field and error.
        problem: String,
    },
}

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
        let open = File::open(file).map_err(|error| InputError::Read { file: file.into(), error })?;
        let mut stopped = None;
        let mut reader = serde_json::Deserializer::from_reader(BufReader::with_capacity(1 << 18, open));
        let sections = Sections { input: self, file, stopped: &mut stopped };
        let read = sections.deserialize(&mut reader).and_then(|()| reader.end());
        match (stopped, read) {
            (Some(error), _) => Err(error),
            (None, Ok(())) => Ok(()),
            (None, Err(error)) => Err(InputError::Syntax { file: file.into(), problem: error.to_string() }),
        }
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
            "DaemonSet" => self.daemon_set(file, object)?,
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
        let namespace = object.metadata.namespace.as_deref().unwrap_or("default");
        let key = format!("{namespace}/{}", object.metadata.name.as_deref().unwrap_or_default());
        let mut claim = Claim::new(object);
        claim.bound = claim.volume.is_some();
        self.volumes.claims.insert(key, claim);
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

    fn daemon_set(&mut self, file: &Path, object: Value) -> Result<(), InputError> {
        let set: DaemonSet = typed(file, "DaemonSet", object)?;
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
        let daemon = pod.metadata.owner_references.iter().flatten().any(|owner| owner.kind == "DaemonSet");
        match pod.spec.as_ref().and_then(|spec| spec.node_name.as_ref()) {
            Some(node) => self.running.entry(node.clone()).or_default().push(Running { pod: entry, daemon }),
            None if daemon => {}
            None => self.pods.push(entry),
        }
        Ok(())
    }

    /// The pods that a workload controller would create.
    fn workload(&mut self, file: &Path, kind: &str, object: &Value) -> Result<(), InputError> {
        let name = named(object);
        let label = format!("{kind} {name}");
        let spec = if kind == "CronJob" { "/spec/jobTemplate/spec" } else { "/spec" };
        let count = |field: &str, default: i64| -> Result<i64, InputError> {
            match object.pointer(&format!("{spec}/{field}")) {
                None | Some(Value::Null) => Ok(default),
                Some(value) => {
                    value.as_i64().filter(|n| (0..=1_000_000).contains(n)).ok_or_else(|| InputError::Object {
                        file: file.into(),
                        object: label.clone(),
                        problem: format!("{}.{field}: {value} is not a count", &spec[1..].replace('/', ".")),
                    })
                }
            }
        };
        let replicas = match kind {
            "Job" | "CronJob" => {
                let parallel = count("parallelism", 1)?;
                count("completions", parallel)?.min(parallel)
            }
            _ => count("replicas", 1)?,
        };
        let template = object.pointer(&format!("{spec}/template")).cloned().unwrap_or_else(|| json!({}));
        let mut labels = template.pointer("/metadata/labels").cloned().unwrap_or_else(|| json!({}));
        if kind == "Deployment"
            && let Some(labels) = labels.as_object_mut()
        {
            // The label of the ReplicaSet, which matchLabelKeys commonly names.
            labels.entry("pod-template-hash").or_insert_with(|| json!("simulated"));
        }
        let namespace = object.pointer("/metadata/namespace").cloned().unwrap_or_else(|| json!("default"));
        let controller = match kind {
            "Deployment" => "ReplicaSet",
            "CronJob" => "Job",
            other => other,
        };
        let uid = format!("{kind}/{}/{name}", namespace.as_str().unwrap_or_default());
        let owner = json!({"apiVersion": "v1", "kind": controller, "name": name, "uid": uid, "controller": true});
        let metadata = json!({"name": name, "namespace": namespace, "labels": labels, "ownerReferences": [owner]});
        let pod = json!({"metadata": metadata, "spec": template.get("spec")});
        let mut pod: Pod = typed_as(file, &label, pod)?;
        if is_held_back(&pod) {
            (0..replicas).for_each(|_| self.skip(HELD_BACK));
            return Ok(());
        }
        let templates = object.pointer("/spec/volumeClaimTemplates").filter(|_| kind == "StatefulSet").cloned();
        let templates: Vec<PersistentVolumeClaim> =
            templates.map(|list| typed_as(file, &label, list)).transpose()?.unwrap_or_default();
        // Pods that mount a volume of a volumeClaimTemplate do not list it in their own volumes.
        let template_names: Vec<String> = templates.iter().filter_map(|t| t.metadata.name.clone()).collect();
        let own_volumes = pod.spec.as_ref().and_then(|spec| spec.volumes.clone()).unwrap_or_default();
        for index in 0..replicas {
            pod.metadata.name = Some(format!("{name}-{index}"));
            if let Some(spec) = pod.spec.as_mut().filter(|_| !template_names.is_empty()) {
                let claim_of = |template: &String| PodVolume {
                    name: template.clone(),
                    persistent_volume_claim: Some(PersistentVolumeClaimVolumeSource {
                        claim_name: format!("{template}-{name}-{index}"),
                        read_only: None,
                    }),
                    ..Default::default()
                };
                let own = own_volumes.iter().filter(|volume| !template_names.contains(&volume.name)).cloned();
                spec.volumes = Some(own.chain(template_names.iter().map(claim_of)).collect());
            }
            for template in &templates {
                let mut claim = template.clone();
                let of = template.metadata.name.as_deref().unwrap_or_default();
                claim.metadata.name = Some(format!("{of}-{name}-{index}"));
                claim.metadata.namespace.clone_from(&pod.metadata.namespace);
                let key = format!("{}/{of}-{name}-{index}", pod.metadata.namespace.as_deref().unwrap_or("default"));
                if !self.volumes.claims.contains_key(&key) {
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

fn bad_pod(file: &Path, kind: &str, error: &crate::planner::PodError) -> InputError {
    InputError::Object {
        file: file.into(),
        object: format!("{kind} {}", error.pod),
        problem: error.problem.to_string(),
    }
}

/// Pods that are skipped, as reported.
const HELD_BACK: &str = "Pod, gated or being deleted";

/// Whether kube-scheduler does not schedule the pod: it is gated, or being deleted while unbound.
fn is_held_back(pod: &Pod) -> bool {
    let spec = pod.spec.as_ref();
    let unbound = spec.is_none_or(|spec| spec.node_name.as_ref().is_none_or(String::is_empty));
    let gated = spec.and_then(|spec| spec.scheduling_gates.as_ref()).is_some_and(|gates| !gates.is_empty());
    unbound && (gated || pod.metadata.deletion_timestamp.is_some())
}

fn named(object: &Value) -> String {
    object.pointer("/metadata/name").and_then(Value::as_str).unwrap_or("without a name").to_owned()
}

fn typed<T: DeserializeOwned>(file: &Path, kind: &str, object: Value) -> Result<T, InputError> {
    let name = named(&object);
    typed_as(file, &format!("{kind} {name}"), object)
}

fn typed_as<T: DeserializeOwned>(file: &Path, name: &str, object: Value) -> Result<T, InputError> {
    serde_path_to_error::deserialize(object).map_err(|error| InputError::Object {
        file: file.into(),
        object: name.to_owned(),
        problem: format!("{}: {}", error.path(), error.inner()),
    })
}

/// Reads the scenario section by section.
struct Sections<'i> {
    input: &'i mut Input,
    file: &'i Path,
    stopped: &'i mut Option<InputError>,
}

impl<'de> DeserializeSeed<'de> for Sections<'_> {
    type Value = ();
    fn deserialize<D: serde::Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Sections<'_> {
    type Value = ();
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with nodePools, pods, nodes and daemonSets")
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(section) = map.next_key::<String>()? {
            let kind = match section.as_str() {
                "nodePools" => "NodePool",
                "pods" => "Pod",
                "nodes" => "Node",
                "daemonSets" => "DaemonSet",
                "nodeClasses" => "EC2NodeClass",
                "namespaces" => "Namespace",
                "persistentVolumes" => "PersistentVolume",
                "persistentVolumeClaims" => "PersistentVolumeClaim",
                "storageClasses" => "StorageClass",
                "csiNodes" => "CSINode",
                _ => {
                    map.next_value::<IgnoredAny>()?;
                    self.input.skip(&section);
                    continue;
                }
            };
            map.next_value_seed(Section { input: self.input, file: self.file, stopped: self.stopped, kind })?;
        }
        Ok(())
    }
}

/// Reads one list of objects, one object at a time.
struct Section<'i> {
    input: &'i mut Input,
    file: &'i Path,
    stopped: &'i mut Option<InputError>,
    kind: &'static str,
}

impl<'de> DeserializeSeed<'de> for Section<'_> {
    type Value = ();
    fn deserialize<D: serde::Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Section<'_> {
    type Value = ();
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a list of {}s", self.kind)
    }
    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        while let Some(mut object) = seq.next_element::<Value>()? {
            if let Some(fields) = object.as_object_mut() {
                fields.insert("kind".into(), self.kind.into());
            }
            if let Err(error) = self.input.object(self.file, object) {
                *self.stopped = Some(error);
                return Err(serde::de::Error::custom("stopped"));
            }
        }
        Ok(())
    }
}
