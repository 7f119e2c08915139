//! The kubelets and the cloud controller manager of simulated instances: a Node is registered at boot and deleted after the
//! termination. The only module of the simulation that calls Kubernetes.
//!
//! With the annotation [`FAKE_NODE`] kwok acts as the kubelet from then on: heartbeats, running pods.
//! The annotation [`EVENT_ANNOTATION`] on a Node applies an event to its instance:
//! `kubectl annotate node ip-10-1-2-3.ec2.internal simulated.stowage.dev/event=spot-interruption`.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use futures::future::{BoxFuture, FutureExt};
use futures::stream::{FuturesUnordered, StreamExt};
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::api::core::v1::{
    DaemonEndpoint, Node, NodeAddress, NodeCondition, NodeDaemonEndpoints, NodeSpec, NodeStatus, NodeSystemInfo, Taint,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta, OwnerReference, Time};
use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams, Preconditions};
use kube::core::PartialObjectMeta;
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Client, ResourceExt};
use serde_json::json;
use stowage_model::labels;
use stowage_model::labels as keys;
use stowage_model::offering::InstanceType;
use stowage_model::resources::Resources;
use stowage_model::units::Bytes;
use stowage_runtime::clock;
use tokio::time::Instant;
use tracing::{debug, info, warn};

use crate::simulated::engine_state::{InstanceRecord, NodeStep};
use crate::simulated::instance_event::InstanceEvent;
use crate::simulated::node_steps::NodeAction;
use crate::simulated::provider::SimulatedEc2;

/// Annotation of the nodes that kwok manages.
pub const FAKE_NODE: &str = "kwok.x-k8s.io/node";
/// Annotation on a Node that applies an event to its instance, once: `spot-interruption`, `rebalance`,
/// `scheduled-change`, `terminate` or `kernel-panic`. It is removed when it takes effect.
pub const EVENT_ANNOTATION: &str = labels::SIMULATED_EVENT;
/// Annotation with the reason why an [`EVENT_ANNOTATION`] had no effect.
pub const EVENT_ERROR_ANNOTATION: &str = labels::SIMULATED_EVENT_ERROR;

/// Lease holder of a node whose kubelet stopped. kwok does not renew a lease of another holder, and does not manage the node and
/// its pods then. Removing [`FAKE_NODE`] is not enough: kwok keeps renewing the lease, even of a deleted node.
const SILENT: &str = "stowage-simulated-silence";
/// Duration of that lease: ten years.
const SILENT_SECONDS: i32 = 315_360_000;
/// Namespace of the kubelets' leases.
const LEASES: &str = "kube-node-lease";

/// Seconds after which the API server ends the watch of the nodes: before the client takes a silent connection for dead.
const WATCH_SECONDS: u32 = 30;
/// Maximum number of concurrent requests to the API server.
const MAX_CONCURRENT: usize = 32;
/// Longest backoff between attempts for one Node.
const MAX_BACKOFF: Duration = Duration::from_secs(5);

/// Why a step of a Node failed. It is retried.
#[derive(Debug, thiserror::Error)]
enum StepError {
    #[error(transparent)]
    Api(#[from] kube::Error),
    #[error("a Node of this name exists with provider id {0}; delete it")]
    NameTaken(String),
    #[error("instance type {0} is not in the catalog")]
    UnknownType(String),
}

/// The API resources that the simulation writes.
#[derive(Clone)]
struct ClusterApis {
    nodes: Api<Node>,
    leases: Api<Lease>,
}

/// The outcome of a task.
enum TaskOutcome {
    Step { id: String, step: NodeStep, result: Result<(), StepError> },
    Event,
}

impl SimulatedEc2 {
    /// Acts as the kubelets and the cloud controller manager until `shutdown` completes. Failed requests are retried with backoff
    /// while the instance is described. Launches do not wait for them.
    pub async fn run(self: Arc<Self>, client: Client, shutdown: impl Future<Output = ()> + Send) {
        let cluster = ClusterApis { nodes: Api::all(client.clone()), leases: Api::namespaced(client.clone(), LEASES) };
        let metadata: Api<PartialObjectMeta<Node>> = Api::all(client);
        let mut watch = watcher(metadata, watcher::Config::default().timeout(WATCH_SECONDS))
            .default_backoff()
            .touched_objects()
            .boxed();
        let mut tasks: FuturesUnordered<BoxFuture<'static, TaskOutcome>> = FuturesUnordered::new();
        let mut busy: BTreeSet<String> = BTreeSet::new();
        let mut failures: BTreeMap<String, (u32, Instant)> = BTreeMap::new();
        let mut watching = true;
        tokio::pin!(shutdown);
        loop {
            let now = Instant::now();
            // In batches, because each evaluation iterates over all instances.
            if tasks.len() <= MAX_CONCURRENT / 2 {
                let skipped = |id: &str| busy.contains(id) || failures.get(id).is_some_and(|(_, until)| now < *until);
                for action in self.node_actions(MAX_CONCURRENT / 2, skipped) {
                    busy.insert(action.record.id.clone());
                    tasks.push(Arc::clone(&self).perform(cluster.clone(), action).boxed());
                }
            }
            tokio::select! {
                () = &mut shutdown => return,
                Some(outcome) = tasks.next(), if !tasks.is_empty() => {
                    if let TaskOutcome::Step { id, step, result } = outcome {
                        busy.remove(&id);
                        match result {
                            Ok(()) => {
                                failures.remove(&id);
                                self.node_step_done(&id, step);
                            }
                            Err(error) => {
                                let attempt = failures.get(&id).map_or(0, |(attempt, _)| attempt + 1);
                                // An outage fails all nodes every few seconds: log every tenth attempt only.
                                if attempt.is_multiple_of(10) {
                                    warn!(instance = %id, ?step, attempt, %error, "step of a simulated node failed, retrying");
                                }
                                failures.insert(id, (attempt, Instant::now() + backoff(attempt)));
                            }
                        }
                    }
                }
                event = watch.next(), if watching => match event {
                    Some(Ok(node)) if node.annotations().contains_key(EVENT_ANNOTATION) => {
                        tasks.push(Arc::clone(&self).apply_annotation(cluster.nodes.clone(), node).boxed());
                    }
                    Some(Ok(_)) => {}
                    Some(Err(error)) => warn!(%error, "could not watch nodes for event annotations"),
                    // The watch retries for ever; if it ended, only event annotations would have no effect.
                    None => watching = false,
                },
                () = self.wait_for_change() => {}
            }
        }
    }

    async fn perform(self: Arc<Self>, cluster: ClusterApis, action: NodeAction) -> TaskOutcome {
        let NodeAction { record, step } = action;
        let result = match step {
            NodeStep::Registered => self.register(&cluster.nodes, &record).await,
            NodeStep::Silenced => silence(&cluster, &record).await,
            NodeStep::Removed => remove(&cluster.nodes, &record).await,
        };
        TaskOutcome::Step { id: record.id, step, result }
    }

    fn instance_type_of(&self, record: &InstanceRecord) -> Result<InstanceType, StepError> {
        let entry = self.instance_type(&record.instance_type, &record.node_class);
        entry.ok_or_else(|| StepError::UnknownType(record.instance_type.clone()))
    }

    async fn register(&self, nodes: &Api<Node>, record: &InstanceRecord) -> Result<(), StepError> {
        let node = node_object(record, &self.instance_type_of(record)?, clock::timestamp());
        let name = record.node_name();
        match nodes.create(&PostParams::default(), &node).await {
            Ok(_) => {
                info!(node = %name, instance = %record.id, r#type = %record.instance_type, "simulated instance registered its node");
            }
            Err(kube::Error::Api(status)) if status.code == 409 => {
                // Created by an earlier attempt whose response was lost, or by another component.
                let existing = nodes.get(&name).await?;
                let provider_id = existing.spec.and_then(|spec| spec.provider_id).unwrap_or_default();
                if provider_id != record.provider_id() {
                    return Err(StepError::NameTaken(provider_id));
                }
            }
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }

    /// Applies the event of a Node's annotation. Removes the annotation first, with optimistic locking, so that it applies once.
    async fn apply_annotation(self: Arc<Self>, nodes: Api<Node>, node: PartialObjectMeta<Node>) -> TaskOutcome {
        let name = node.name_any();
        let text = node.annotations().get(EVENT_ANNOTATION).cloned().unwrap_or_default();
        let patch = json!({"metadata": {
            "resourceVersion": node.resource_version(),
            "annotations": {EVENT_ANNOTATION: null, EVENT_ERROR_ANNOTATION: null},
        }});
        match nodes.patch_metadata(&name, &PatchParams::default(), &Patch::Merge(patch)).await {
            Ok(_) => {}
            // The Node changed, and the watch delivers it again, or it is deleted.
            Err(error) => {
                debug!(node = %name, %error, "event annotation not applied");
                return TaskOutcome::Event;
            }
        }
        let outcome =
            InstanceEvent::parse(&text).and_then(|event| self.trigger(&name, event).map_err(|error| error.to_string()));
        match outcome {
            Ok(()) => info!(node = %name, event = %text, "applied event annotation"),
            Err(problem) => {
                warn!(node = %name, %problem, "rejected event annotation");
                let patch = json!({"metadata": {"annotations": {EVENT_ERROR_ANNOTATION: problem}}});
                if let Err(error) = nodes.patch_metadata(&name, &PatchParams::default(), &Patch::Merge(patch)).await {
                    debug!(node = %name, %error, "could not write the rejection");
                }
            }
        }
        TaskOutcome::Event
    }
}

/// Stops the heartbeats by taking over the node's lease, or by creating it before kwok does. The renewal time stays, so that the
/// node becomes unreachable after the grace period.
async fn silence(cluster: &ClusterApis, record: &InstanceRecord) -> Result<(), StepError> {
    let name = record.node_name();
    let patch = json!({"spec": {"holderIdentity": SILENT, "leaseDurationSeconds": SILENT_SECONDS}});
    match cluster.leases.patch(&name, &PatchParams::default(), &Patch::Merge(patch)).await {
        Ok(_) => return Ok(()),
        Err(kube::Error::Api(status)) if status.code == 404 => {}
        Err(error) => return Err(error.into()),
    }
    let Some(node) = cluster.nodes.get_opt(&name).await? else {
        return Ok(());
    };
    let lease = Lease {
        metadata: ObjectMeta {
            name: Some(name.clone()),
            owner_references: Some(vec![OwnerReference {
                api_version: "v1".to_owned(),
                kind: "Node".to_owned(),
                uid: node.uid().unwrap_or_default(),
                name,
                ..OwnerReference::default()
            }]),
            ..ObjectMeta::default()
        },
        spec: Some(LeaseSpec {
            holder_identity: Some(SILENT.to_owned()),
            lease_duration_seconds: Some(SILENT_SECONDS),
            renew_time: Some(MicroTime(clock::timestamp())),
            ..LeaseSpec::default()
        }),
    };
    // If kwok creates it in between, this fails and the next attempt takes it over.
    cluster.leases.create(&PostParams::default(), &lease).await?;
    Ok(())
}

/// Deletes the Node if it belongs to this instance; finalizers may delay the deletion.
async fn remove(nodes: &Api<Node>, record: &InstanceRecord) -> Result<(), StepError> {
    let name = record.node_name();
    let Some(node) = nodes.get_opt(&name).await? else {
        return Ok(());
    };
    let provider_id = node.spec.as_ref().and_then(|spec| spec.provider_id.as_deref());
    if provider_id != Some(&record.provider_id()) || node.metadata.deletion_timestamp.is_some() {
        return Ok(());
    }
    let only_this = Preconditions { uid: node.uid(), resource_version: None };
    let parameters = DeleteParams { preconditions: Some(only_this), ..DeleteParams::default() };
    ignore_not_found(nodes.delete(&name, &parameters).await.map(drop))
}

fn ignore_not_found(result: Result<(), kube::Error>) -> Result<(), StepError> {
    match result {
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
        other => Ok(other?),
    }
}

/// A quarter of a second, doubled with every attempt up to [`MAX_BACKOFF`].
fn backoff(attempt: u32) -> Duration {
    Duration::from_millis(250).saturating_mul(1 << attempt.min(8)).min(MAX_BACKOFF)
}

/// The Node that an instance's kubelet registers, including the fields of the cloud controller manager.
fn node_object(record: &InstanceRecord, instance_type: &InstanceType, now: Timestamp) -> Node {
    let name = record.node_name();
    let label = |key: &str| instance_type.labels.get(key).cloned().unwrap_or_default();
    let (arch, os, region) = (label(keys::ARCH), label(keys::OS), label(keys::REGION));
    let mut labels = record.labels.clone();
    for (key, value) in [
        (keys::HOSTNAME, &name),
        (keys::OS, &os),
        (keys::ARCH, &arch),
        (keys::INSTANCE_TYPE, &record.instance_type),
        (keys::ZONE, &record.zone),
        (keys::REGION, &region),
        // Kubelets and cloud controllers still set the deprecated names, too.
        ("beta.kubernetes.io/os", &os),
        ("beta.kubernetes.io/arch", &arch),
        ("beta.kubernetes.io/instance-type", &record.instance_type),
        ("failure-domain.beta.kubernetes.io/zone", &record.zone),
        ("failure-domain.beta.kubernetes.io/region", &region),
    ] {
        labels.insert(key.to_owned(), value.clone());
    }
    let not_ready =
        Taint { key: "node.kubernetes.io/not-ready".to_owned(), effect: "NoSchedule".to_owned(), ..Taint::default() };
    let mut taints = record.taints.clone();
    if !taints.iter().any(|taint| taint.key == not_ready.key && taint.effect == not_ready.effect) {
        taints.push(not_ready);
    }
    let address = |kind: &str, address: &str| NodeAddress { type_: kind.to_owned(), address: address.to_owned() };
    let condition = |kind: &str, reason: &str, message: &str| NodeCondition {
        type_: kind.to_owned(),
        status: "False".to_owned(),
        reason: Some(reason.to_owned()),
        message: Some(message.to_owned()),
        last_heartbeat_time: Some(Time(now)),
        last_transition_time: Some(Time(now)),
    };
    Node {
        metadata: ObjectMeta {
            name: Some(name.clone()),
            labels: Some(labels),
            annotations: Some(BTreeMap::from([(FAKE_NODE.to_owned(), "fake".to_owned())])),
            ..ObjectMeta::default()
        },
        spec: Some(NodeSpec { provider_id: Some(record.provider_id()), taints: Some(taints), ..NodeSpec::default() }),
        status: Some(NodeStatus {
            addresses: Some(vec![
                address("InternalIP", &record.private_ip),
                address("InternalDNS", &name),
                address("Hostname", &name),
            ]),
            capacity: Some(quantities(&instance_type.capacity)),
            allocatable: Some(quantities(&instance_type.allocatable)),
            conditions: Some(vec![
                condition("Ready", "KubeletNotReady", "the simulated kubelet has just started"),
                condition("MemoryPressure", "KubeletHasSufficientMemory", "kubelet has sufficient memory available"),
                condition("DiskPressure", "KubeletHasNoDiskPressure", "kubelet has no disk pressure"),
                condition("PIDPressure", "KubeletHasSufficientPID", "kubelet has sufficient PID available"),
            ]),
            daemon_endpoints: Some(NodeDaemonEndpoints { kubelet_endpoint: Some(DaemonEndpoint { port: 10250 }) }),
            node_info: Some(NodeSystemInfo {
                architecture: arch,
                operating_system: os,
                os_image: "simulated by Stowage".to_owned(),
                kernel_version: "6.12.0-simulated".to_owned(),
                kubelet_version: "v1.34.0".to_owned(),
                container_runtime_version: "containerd://2.1.0".to_owned(),
                machine_id: record.id.trim_start_matches("i-").to_owned(),
                system_uuid: record.id.clone(),
                boot_id: record.id.clone(),
                ..NodeSystemInfo::default()
            }),
            ..NodeStatus::default()
        }),
    }
}

/// Resources in the kubelet's notation: whole cores without a unit, memory in Ki.
fn quantities(resources: &Resources) -> BTreeMap<String, Quantity> {
    let bytes = |bytes: Bytes| match bytes.0 {
        bytes if bytes % 1024 == 0 => format!("{}Ki", bytes / 1024),
        bytes => bytes.to_string(),
    };
    let mut out = BTreeMap::from([
        ("cpu".to_owned(), Quantity(resources.cpu.to_string())),
        ("memory".to_owned(), Quantity(bytes(resources.memory))),
        ("ephemeral-storage".to_owned(), Quantity(bytes(resources.ephemeral_storage))),
        ("pods".to_owned(), Quantity(resources.pods.to_string())),
    ]);
    out.extend(resources.extended.iter().map(|(name, amount)| (name.to_string(), Quantity(amount.to_string()))));
    out
}

#[cfg(test)]
mod tests;
