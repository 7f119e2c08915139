//! Workload controllers (Deployment, ReplicaSet, StatefulSet, Job, CronJob), expanded to the pods that they would create.

use std::path::Path;

use k8s_openapi::api::core::v1::{PersistentVolumeClaim, PersistentVolumeClaimVolumeSource, Pod, Volume as PodVolume};
use serde_json::{Value, json};

use crate::cli::manifests::input_error::{InputError, named, typed_as};

/// A workload: the template of its pods, and their number.
pub struct Workload {
    name: String,
    pod: Pod,
    pub replicas: i64,
    /// kube-scheduler would not schedule the pods.
    pub held_back: bool,
    /// `volumeClaimTemplates` of a StatefulSet; not parsed for pods that are held back.
    templates: Vec<PersistentVolumeClaim>,
}

impl Workload {
    /// Parses a workload.
    ///
    /// # Errors
    /// A field is invalid.
    pub fn new(file: &Path, kind: &str, object: &Value) -> Result<Self, InputError> {
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
        let pod: Pod = typed_as(file, &label, pod)?;
        let held_back = is_held_back(&pod);
        let templates = object.pointer("/spec/volumeClaimTemplates");
        let templates = templates.filter(|_| kind == "StatefulSet" && !held_back).cloned();
        let templates: Vec<PersistentVolumeClaim> =
            templates.map(|list| typed_as(file, &label, list)).transpose()?.unwrap_or_default();
        Ok(Self { name, pod, replicas, held_back, templates })
    }

    /// A pod, and the claims that its StatefulSet creates for it.
    pub fn pod(&self, index: i64) -> (Pod, Vec<PersistentVolumeClaim>) {
        let mut pod = self.pod.clone();
        let name = &self.name;
        pod.metadata.name = Some(format!("{name}-{index}"));
        // Pods that mount a volume of a volumeClaimTemplate do not list it in their own volumes.
        let template_names: Vec<String> = self.templates.iter().filter_map(|t| t.metadata.name.clone()).collect();
        if let Some(spec) = pod.spec.as_mut().filter(|_| !template_names.is_empty()) {
            let claim_of = |template: &String| PodVolume {
                name: template.clone(),
                persistent_volume_claim: Some(PersistentVolumeClaimVolumeSource {
                    claim_name: format!("{template}-{name}-{index}"),
                    read_only: None,
                }),
                ..Default::default()
            };
            let own_volumes = spec.volumes.take().unwrap_or_default();
            let own = own_volumes.into_iter().filter(|volume| !template_names.contains(&volume.name));
            spec.volumes = Some(own.chain(template_names.iter().map(claim_of)).collect());
        }
        let claims = self.templates.iter().map(|template| {
            let mut claim = template.clone();
            let of = template.metadata.name.as_deref().unwrap_or_default();
            claim.metadata.name = Some(format!("{of}-{name}-{index}"));
            claim.metadata.namespace.clone_from(&pod.metadata.namespace);
            claim
        });
        let claims = claims.collect();
        (pod, claims)
    }
}

/// Whether kube-scheduler does not schedule the pod: it is gated, or being deleted while unbound.
pub fn is_held_back(pod: &Pod) -> bool {
    let spec = pod.spec.as_ref();
    let unbound = spec.is_none_or(|spec| spec.node_name.as_ref().is_none_or(String::is_empty));
    let gated = spec.and_then(|spec| spec.scheduling_gates.as_ref()).is_some_and(|gates| !gates.is_empty());
    unbound && (gated || pod.metadata.deletion_timestamp.is_some())
}
