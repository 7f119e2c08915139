//! What a node has and its pods use, for metrics.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;
use stowage_model::resources::Resources;

use crate::state::node_state::{reported_allocatable, reported_capacity};
use crate::state::tables::ClusterState;

/// A node and the sums of its pods.
#[derive(Clone, Debug)]
pub struct NodeUsage {
    pub node: Arc<Node>,
    /// Whether it has a NodeClaim of ours.
    pub is_managed: bool,
    pub allocatable: Resources,
    /// Capacity less allocatable.
    pub overhead: Resources,
    /// Of all pods on it that are not finished.
    pub requests: Resources,
    pub limits: Resources,
    /// Of those of DaemonSets.
    pub daemon_requests: Resources,
    pub daemon_limits: Resources,
}

impl NodeUsage {
    /// The usage of a node.
    pub fn of(state: &ClusterState, node: &Arc<Node>) -> Self {
        let allocatable = reported_allocatable(node);
        let mut overhead = reported_capacity(node);
        overhead.sub(&allocatable);
        let mut out = Self {
            node: Arc::clone(node),
            is_managed: state.claim_of(node).is_some(),
            allocatable,
            overhead,
            requests: Resources::default(),
            limits: Resources::default(),
            daemon_requests: Resources::default(),
            daemon_limits: Resources::default(),
        };
        // Of a pod whose spec is invalid.
        let unknown = Resources::default();
        for pod in state.pods_on(&node.name_any()).filter(|pod| pod.active()) {
            let requests = pod.entry.as_ref().map_or(&unknown, |entry| &entry.class.requests);
            let mut limits = pod.limits.as_deref().cloned().unwrap_or_default();
            limits.pods = 1;
            out.requests.add(requests);
            out.limits.add(&limits);
            if pod.daemon {
                out.daemon_requests.add(requests);
                out.daemon_limits.add(&limits);
            }
        }
        out
    }
}
