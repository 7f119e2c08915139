//! The simulated instances as Kubernetes sees them: at boot each registers a Node as its kubelet would, and when it is gone
//! the Node is deleted as the cloud controller manager would. The only file of the simulation that talks to Kubernetes.
//!
//! The annotation [`FAKE_NODE`] hands the Node over to kwok, which plays the kubelet from then on: heartbeats, pods running.
//! The annotation [`EVENT_ANNOTATION`] on a Node makes something happen to its instance, for people with kubectl:
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
use tokio::time::Instant;
use tracing::{debug, info, warn};

use crate::cloud::simulated::node_steps::NodeAction;
use crate::cloud::simulated::provider::SimulatedEc2;
use crate::cloud::simulated::record::{NodeStep, Record};
use crate::cloud::simulated::script::InstanceEvent;
use crate::model::labels;
use crate::model::labels as keys;
use crate::model::offering::InstanceType;
use crate::model::resources::Resources;
use crate::model::units::Bytes;

/// Annotation by which kwok knows the nodes it plays.
pub const FAKE_NODE: &str = "kwok.x-k8s.io/node";
/// Annotation on a Node that makes something happen to its instance, once: `spot-interruption`, `rebalance`,
/// `scheduled-change`, `terminate` or `kernel-panic`. It is removed when it takes effect.
pub const EVENT_ANNOTATION: &str = labels::SIMULATED_EVENT;
/// Annotation that says why an [`EVENT_ANNOTATION`] had no effect.
pub const EVENT_ERROR_ANNOTATION: &str = labels::SIMULATED_EVENT_ERROR;

/// Holder of the lease of a node whose kubelet fell silent. kwok renews no lease that another holds, and leaves the node and its
/// pods alone. (Taking [`FAKE_NODE`] away would not do: kwok would go on renewing the lease, even of a deleted node.)
const SILENT: &str = "stowage-simulated-silence";
/// How long a silent kubelet's lease is taken from kwok: ten years.
const SILENT_SECONDS: i32 = 315_360_000;
/// Namespace of the kubelets' leases.
const LEASES: &str = "kube-node-lease";

/// Most requests to the API server at once.
const MOST_AT_ONCE: usize = 32;
/// Longest pause between attempts at one Node.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// Why a step on a Node failed; it is tried again.
#[derive(Debug, thiserror::Error)]
enum StepError {
    #[error(transparent)]
    Api(#[from] kube::Error),
    #[error("a Node of this name exists with provider id {0}; delete it")]
    NameTaken(String),
    #[error("instance type {0} is not in the catalog")]
    UnknownType(String),
}

/// What the simulation writes to.
#[derive(Clone)]
struct Cluster {
    nodes: Api<Node>,
    leases: Api<Lease>,
}

/// The outcome of one request or chain of requests.
enum Done {
    Step { id: String, step: NodeStep, result: Result<(), StepError> },
    Event,
}

impl SimulatedEc2 {
    /// Plays the kubelets and the cloud controller until `shutdown` is ready. Failed requests are repeated with growing
    /// pauses, for as long as the instance they are about is described; launches never wait for any of it.
    pub async fn run(self: Arc<Self>, client: Client, shutdown: impl Future<Output = ()> + Send) {
        let cluster = Cluster { nodes: Api::all(client.clone()), leases: Api::namespaced(client.clone(), LEASES) };
        let metadata: Api<PartialObjectMeta<Node>> = Api::all(client);
        let mut watch = watcher(metadata, watcher::Config::default()).default_backoff().touched_objects().boxed();
        let mut tasks: FuturesUnordered<BoxFuture<'static, Done>> = FuturesUnordered::new();
        let mut busy: BTreeSet<String> = BTreeSet::new();
        let mut failures: BTreeMap<String, (u32, Instant)> = BTreeMap::new();
        let mut watching = true;
        tokio::pin!(shutdown);
        loop {
            let now = Instant::now();
            // Looked for in batches: each look passes over every instance.
            if tasks.len() <= MOST_AT_ONCE / 2 {
                let resting = |id: &str| busy.contains(id) || failures.get(id).is_some_and(|(_, until)| now < *until);
                for action in self.node_actions(MOST_AT_ONCE / 2, resting) {
                    busy.insert(action.record.id.clone());
                    tasks.push(Arc::clone(&self).perform(cluster.clone(), action).boxed());
                }
            }
            tokio::select! {
                () = &mut shutdown => return,
                Some(done) = tasks.next(), if !tasks.is_empty() => {
                    if let Done::Step { id, step, result } = done {
                        busy.remove(&id);
                        match result {
                            Ok(()) => {
                                failures.remove(&id);
                                self.node_step_done(&id, step);
                            }
                            Err(error) => {
                                let attempt = failures.get(&id).map_or(0, |(attempt, _)| attempt + 1);
                                // An outage fails every node at once and every few seconds: say it once in a while.
                                if attempt.is_multiple_of(10) {
                                    warn!(instance = %id, ?step, attempt, %error, "a simulated node's step failed, trying again");
                                }
                                failures.insert(id, (attempt, Instant::now() + pause(attempt)));
                            }
                        }
                    }
                }
                seen = watch.next(), if watching => match seen {
                    Some(Ok(node)) if node.annotations().contains_key(EVENT_ANNOTATION) => {
                        tasks.push(Arc::clone(&self).take_event(cluster.nodes.clone(), node).boxed());
                    }
                    Some(Ok(_)) => {}
                    Some(Err(error)) => warn!(%error, "simulated EC2 can't watch nodes for events"),
                    // The watch repeats itself for ever; were it to end, only events by annotation would be lost.
                    None => watching = false,
                },
                () = self.idle() => {}
            }
        }
    }

    async fn perform(self: Arc<Self>, cluster: Cluster, action: NodeAction) -> Done {
        let NodeAction { record, step } = action;
        let result = match step {
            NodeStep::Registered => self.register(&cluster.nodes, &record).await,
            NodeStep::Devices => self.report_devices(&cluster.nodes, &record).await,
            NodeStep::Silenced => silence(&cluster, &record).await,
            NodeStep::Removed => remove(&cluster.nodes, &record).await,
        };
        Done::Step { id: record.id, step, result }
    }

    fn shape_of(&self, record: &Record) -> Result<InstanceType, StepError> {
        let shape = self.shape(&record.instance_type, &record.node_class);
        shape.ok_or_else(|| StepError::UnknownType(record.instance_type.clone()))
    }

    async fn register(&self, nodes: &Api<Node>, record: &Record) -> Result<(), StepError> {
        let node = node_object(record, &self.shape_of(record)?, Timestamp::now());
        let name = record.node_name();
        match nodes.create(&PostParams::default(), &node).await {
            Ok(_) => {
                info!(node = %name, instance = %record.id, r#type = %record.instance_type, "simulated instance registered its node");
            }
            Err(kube::Error::Api(status)) if status.code == 409 => {
                // An earlier attempt whose answer was lost, or a stranger.
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

    async fn report_devices(&self, nodes: &Api<Node>, record: &Record) -> Result<(), StepError> {
        let shape = self.shape_of(record)?;
        let amounts = |resources: &Resources| -> BTreeMap<String, Quantity> {
            resources.extended.iter().map(|(name, amount)| (name.to_string(), Quantity(amount.to_string()))).collect()
        };
        let status =
            json!({"status": {"capacity": amounts(&shape.capacity), "allocatable": amounts(&shape.allocatable)}});
        let patched = nodes.patch_status(&record.node_name(), &PatchParams::default(), &Patch::Merge(status)).await;
        unless_gone(patched.map(drop))
    }

    /// Takes an event from a Node's annotation. The annotation goes first, on the condition that nobody else took it.
    async fn take_event(self: Arc<Self>, nodes: Api<Node>, node: PartialObjectMeta<Node>) -> Done {
        let name = node.name_any();
        let text = node.annotations().get(EVENT_ANNOTATION).cloned().unwrap_or_default();
        let patch = json!({"metadata": {
            "resourceVersion": node.resource_version(),
            "annotations": {EVENT_ANNOTATION: null, EVENT_ERROR_ANNOTATION: null},
        }});
        match nodes.patch_metadata(&name, &PatchParams::default(), &Patch::Merge(patch)).await {
            Ok(_) => {}
            // Changed meanwhile, so the watch shows it again; or gone, and then there is nobody to tell.
            Err(error) => {
                debug!(node = %name, %error, "event not taken");
                return Done::Event;
            }
        }
        let outcome =
            InstanceEvent::parse(&text).and_then(|event| self.trigger(&name, event).map_err(|error| error.to_string()));
        match outcome {
            Ok(()) => info!(node = %name, event = %text, "simulated event"),
            Err(problem) => {
                warn!(node = %name, %problem, "simulated event refused");
                let patch = json!({"metadata": {"annotations": {EVENT_ERROR_ANNOTATION: problem}}});
                if let Err(error) = nodes.patch_metadata(&name, &PatchParams::default(), &Patch::Merge(patch)).await {
                    debug!(node = %name, %error, "the reason was not written");
                }
            }
        }
        Done::Event
    }
}

/// Stops the heartbeats by taking the node's lease, or by making it before kwok does. Its time of renewal stays, so that the
/// node becomes unreachable when its grace is over.
async fn silence(cluster: &Cluster, record: &Record) -> Result<(), StepError> {
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
            renew_time: Some(MicroTime(Timestamp::now())),
            ..LeaseSpec::default()
        }),
    };
    // Should kwok have made it in between, this fails and the next attempt takes it over.
    cluster.leases.create(&PostParams::default(), &lease).await?;
    Ok(())
}

/// Deletes the Node if it is this instance's; finalizers may keep it for a while.
async fn remove(nodes: &Api<Node>, record: &Record) -> Result<(), StepError> {
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
    unless_gone(nodes.delete(&name, &parameters).await.map(drop))
}

/// A Node that is not there any more needs nothing more done to it.
fn unless_gone(result: Result<(), kube::Error>) -> Result<(), StepError> {
    match result {
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
        other => Ok(other?),
    }
}

/// A quarter of a second, doubled with every attempt up to [`LONGEST_PAUSE`].
fn pause(attempt: u32) -> Duration {
    Duration::from_millis(250).saturating_mul(1 << attempt.min(8)).min(LONGEST_PAUSE)
}

/// The Node that an instance's kubelet registers, with what the cloud controller adds.
fn node_object(record: &Record, shape: &InstanceType, now: Timestamp) -> Node {
    let name = record.node_name();
    let label = |key: &str| shape.labels.get(key).cloned().unwrap_or_default();
    let (arch, os, region) = (label(keys::ARCH), label(keys::OS), label(keys::REGION));
    let mut labels = record.labels.clone();
    for (key, value) in [
        (keys::HOSTNAME, &name),
        (keys::OS, &os),
        (keys::ARCH, &arch),
        (keys::INSTANCE_TYPE, &record.instance_type),
        (keys::ZONE, &record.zone),
        (keys::REGION, &region),
        // Kubelets and cloud controllers still set the old names beside the new.
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
    let devices = record.devices_at_ms.is_none() || record.node.devices;
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
            capacity: Some(quantities(&shape.capacity, devices)),
            allocatable: Some(quantities(&shape.allocatable, devices)),
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

/// Resources as a kubelet writes them: whole cores without a unit, memory in Ki.
fn quantities(resources: &Resources, devices: bool) -> BTreeMap<String, Quantity> {
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
    if devices {
        out.extend(resources.extended.iter().map(|(name, amount)| (name.to_string(), Quantity(amount.to_string()))));
    }
    out
}

#[cfg(test)]
mod tests;
