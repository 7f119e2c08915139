//! Conversion of a Node, or of a NodeClaim without a Node, to the planner's node.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Node, Taint};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::ResourceExt;
use stowage_api::NodeClaim;
use stowage_model::labels;
use stowage_model::pod_class::PodClass;
use stowage_model::resources::Resources;
use stowage_model::time::UnixMillis;
use stowage_model::units::MicroUsd;
use stowage_planner::{Labels, NodePods, NodeState, PodEntry, Tenure};

use crate::state::object_ext::{NodeClaimExt, NodeExt, ObjectExt};
use crate::state::plan_record::Holds;
use crate::state::pool_types::{InstanceTypes, offering_of};
use crate::state::tables::ClusterState;

/// A launched node that has not registered, or registered and has not initialized, within this time is not planned on.
pub const BOOT_TIMEOUT: Duration = Duration::from_mins(5);

/// Taints that are removed while a node starts up (Karpenter core reference 2.3).
const EPHEMERAL_TAINTS: [&str; 4] = [
    "node.kubernetes.io/not-ready",
    "node.kubernetes.io/unreachable",
    "node.cloudprovider.kubernetes.io/uninitialized",
    labels::UNREGISTERED_TAINT,
];

/// Whether a taint is removed while a node starts up.
pub fn is_ephemeral(taint: &Taint) -> bool {
    EPHEMERAL_TAINTS.contains(&taint.key.as_str()) || taint.key.starts_with("readiness.k8s.io/")
}

/// A Node with its claim, if it has one.
pub fn registered(
    state: &ClusterState,
    types: &InstanceTypes,
    holds: &Holds,
    node: &Node,
    now: UnixMillis,
) -> NodeState {
    let claim = state.claim_of(node);
    let name = node.name_any();
    let spec = node.spec.clone().unwrap_or_default();
    let initialized = claim.is_none() || node.is_labeled(labels::INITIALIZED);
    // The Node of a NodeClaim that is gone goes, too.
    let is_orphaned = claim.is_none() && node.labels().contains_key(labels::NODE_POOL);
    let leaving = node.is_deleting() || claim.is_some_and(|claim| claim.is_leaving()) || is_orphaned;
    let taints: Vec<Taint> = spec
        .taints
        .into_iter()
        .flatten()
        .filter(|taint| taint.key != labels::PLANNED_TAINT)
        .filter(|taint| {
            initialized || !(is_ephemeral(taint) || claim.is_some_and(|claim| claim.is_startup_taint(taint)))
        })
        .collect();
    let mut allocatable = reported_allocatable(node);
    let mut node_labels: Labels = node.labels().clone();
    if let Some(claim) = claim.filter(|_| !initialized) {
        // The kubelet and the device plugins may not have reported every resource yet.
        for (resource, promised) in allocatable_of(types, claim).iter() {
            if allocatable.get(resource) == 0 {
                allocatable.set(resource, promised);
            }
        }
        for (key, value) in claim.labels() {
            node_labels.entry(key.clone()).or_insert_with(|| value.clone());
        }
    }
    let mut pods: NodePods =
        state.pods_on(&name).filter(|pod| pod.active()).filter_map(|pod| pod.entry.clone().ok()).collect();
    let is_protected_by_a_pod = state.pods_on(&name).any(|pod| pod.do_not_disrupt && pod.active());
    if let Some(claim) = claim {
        pods.extend(held_pods(state, holds, &claim.name_any()));
    }
    let mut out = NodeState {
        name: Arc::from(name),
        labels: node_labels,
        taints,
        allocatable,
        pods,
        daemon_reserve: Resources::default(),
        daemons: Vec::new(),
        schedulable: !leaving && !spec.unschedulable.unwrap_or(false) && (node.is_ready() || !initialized),
        initialized,
        price: claim.map(|claim| types.price(claim)).unwrap_or_default(),
        tenure: match claim {
            None => Tenure::NotOurs,
            Some(claim) if state.is_protected(node) || state.is_protected(&**claim) || is_protected_by_a_pod => {
                Tenure::Stays
            }
            Some(_) => Tenure::MayBeRemoved,
        },
    };
    reserve_for_daemons(state, &mut out);
    out.schedulable &= initialized || !node.created_at().is_older_than(BOOT_TIMEOUT, now);
    out
}

/// A claim without a Node.
pub fn in_flight(
    state: &ClusterState,
    types: &InstanceTypes,
    holds: &Holds,
    claim: &NodeClaim,
    now: UnixMillis,
) -> NodeState {
    let name = claim.name_any();
    let mut node_labels = claim.labels().clone();
    if let Some(found) = types.of(claim) {
        for (key, value) in &found.labels {
            node_labels.entry(key.clone()).or_insert_with(|| value.clone());
        }
    }
    if let Some((_, zone, capacity_type)) = offering_of(claim) {
        node_labels.entry(labels::ZONE.into()).or_insert(zone);
        node_labels.entry(labels::CAPACITY_TYPE.into()).or_insert_with(|| capacity_type.as_str().into());
    }
    // The label is empty until EC2 reports the partition.
    node_labels.retain(|key, value| *key != *labels::PLACEMENT_GROUP_PARTITION || !value.is_empty());
    node_labels.entry(labels::HOSTNAME.into()).or_insert_with(|| name.clone());
    let mut out = NodeState {
        name: Arc::from(name.as_str()),
        labels: node_labels,
        taints: claim.spec.taints.clone(),
        allocatable: allocatable_of(types, claim),
        pods: held_pods(state, holds, &name).into_iter().collect(),
        daemon_reserve: Resources::default(),
        daemons: Vec::new(),
        schedulable: !claim.created_at().is_older_than(BOOT_TIMEOUT, now),
        initialized: false,
        price: types.price(claim),
        tenure: Tenure::MayBeRemoved,
    };
    reserve_for_daemons(state, &mut out);
    out
}

fn parse(quantities: &BTreeMap<String, Quantity>) -> Resources {
    Resources::from_map(quantities).unwrap_or_default()
}

/// What the kubelet reports as capacity.
pub fn reported_capacity(node: &Node) -> Resources {
    node.status.as_ref().and_then(|status| status.capacity.as_ref()).map(parse).unwrap_or_default()
}

/// What the kubelet reports as allocatable.
pub fn reported_allocatable(node: &Node) -> Resources {
    node.status.as_ref().and_then(|status| status.allocatable.as_ref()).map(parse).unwrap_or_default()
}

fn allocatable_of(types: &InstanceTypes, claim: &NodeClaim) -> Resources {
    let status = claim.status.as_ref();
    match status.map(|status| &status.allocatable).filter(|allocatable| !allocatable.is_empty()) {
        Some(allocatable) => parse(allocatable),
        None => types.of(claim).map(|found| found.allocatable.clone()).unwrap_or_default(),
    }
}

/// Entries of the pods that have holds on a claim's node. Between the deletion of a displaced pod and the creation of its
/// successor, another pod of the same owner represents it.
fn held_pods(state: &ClusterState, holds: &Holds, claim: &str) -> Vec<PodEntry> {
    let Some(live) = holds.by_claim.get(claim) else {
        return Vec::new();
    };
    live.iter()
        .filter_map(|hold| {
            let key = hold.pod.as_ref().unwrap_or(&hold.original);
            let namespace = key.split_once('/').map_or("", |(namespace, _)| namespace);
            let entry = state.pods.get(key).and_then(|record| record.entry.clone().ok());
            entry.or_else(|| {
                let owner = hold.owner.as_deref()?;
                let entries = state.pods_of(owner).filter_map(|record| record.entry.as_ref().ok());
                entries.into_iter().find(|entry| *entry.class.namespace == *namespace).cloned()
            })
        })
        // The successor is not deleting, although the pod that represents it may be.
        .map(|entry| PodEntry { deleting: false, ..entry })
        .collect()
}

/// Requests of the DaemonSet pods that belong on a Node and do not exist yet.
pub fn missing_daemon_requests(state: &ClusterState, node: &Node) -> Resources {
    let mut out = observed(state, node);
    reserve_for_daemons(state, &mut out);
    out.daemon_reserve
}

/// Whether a DaemonSet pod that belongs on a Node and is not bound there would be kept off by a taint.
pub fn keeps_daemons_off(state: &ClusterState, node: &Node, taint: &Taint) -> bool {
    if state.daemons.values().all(|daemon| daemon.daemon.class.tolerates(taint)) {
        return false;
    }
    let node = observed(state, node);
    missing_daemons(state, &node).any(|class| !class.tolerates(taint))
}

/// A Node as it is reported, without taints that are removed while it starts up.
fn observed(state: &ClusterState, node: &Node) -> NodeState {
    let pods = state.pods_on(&node.name_any()).filter_map(|pod| pod.entry.clone().ok()).collect();
    NodeState { pods, ..without_pods(node) }
}

/// The same without its pods.
pub fn without_pods(node: &Node) -> NodeState {
    let permanent = node.taints().filter(|taint| !is_ephemeral(taint) && taint.key != labels::PLANNED_TAINT);
    NodeState {
        name: Arc::from(node.name_any()),
        labels: node.labels().clone(),
        taints: permanent.cloned().collect(),
        allocatable: reported_allocatable(node),
        pods: NodePods::default(),
        daemon_reserve: Resources::default(),
        daemons: Vec::new(),
        schedulable: true,
        initialized: true,
        price: MicroUsd::default(),
        tenure: Tenure::NotOurs,
    }
}

/// Classes of the DaemonSet pods that belong on a node and do not exist yet.
fn missing_daemons<'a>(state: &'a ClusterState, node: &'a NodeState) -> impl Iterator<Item = &'a Arc<PodClass>> {
    state.daemons.values().filter_map(|daemon| {
        let class = &daemon.daemon.class;
        let owns = |pod: &PodEntry| pod.owner.as_ref() == Some(&daemon.uid) && pod.class.namespace == class.namespace;
        let runs = class.requests.may_run_on(&node.allocatable)
            && class.accepts_node(&node.labels, &node.name)
            && class.untolerated(&node.taints).is_none();
        (runs && !node.pods.iter().any(owns)).then_some(class)
    })
}

/// Reserves requests and host ports for the DaemonSet pods that belong on a node and do not exist yet.
fn reserve_for_daemons(state: &ClusterState, node: &mut NodeState) {
    let missing: Vec<_> = missing_daemons(state, node).cloned().collect();
    for class in missing {
        node.daemon_reserve.add(&class.requests);
        node.daemons.extend(Some(class).filter(|class| !class.host_ports.is_empty()));
    }
}
