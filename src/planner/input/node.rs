//! Nodes that exist or are being launched, and the node constraints of a pod evaluated against one.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Taint;
use stowage_model::labels;
use stowage_model::pod_class::{NodeTerm, PodClass};
use stowage_model::resources::Resources;
use stowage_model::units::MicroUsd;

use crate::input::pod::{Labels, NodePods};

/// A node that exists or is being launched.
#[derive(Clone, Debug)]
pub struct NodeState {
    /// Node name; the NodeClaim's name while there is no Node.
    pub name: Arc<str>,
    /// Labels; the NodeClaim's until the node registers.
    pub labels: Labels,
    /// Taints that a pod must tolerate. Startup taints and known ephemeral taints are left out before initialization.
    pub taints: Vec<Taint>,
    pub allocatable: Resources,
    /// Pods bound to it or nominated for it, daemons included.
    pub pods: NodePods,
    /// Requests of daemon pods that are expected but not in `pods` yet.
    pub daemon_reserve: Resources,
    /// The expected daemons with host ports, which no other pod may use.
    pub daemons: Vec<Arc<PodClass>>,
    /// False when no pod may be added (cordoned, being disrupted, not ready): its pods still count for topology.
    pub schedulable: bool,
    /// Registered and initialized; initialized nodes are filled first.
    pub initialized: bool,
    /// Zero for a node that Stowage does not own.
    pub price: MicroUsd,
    pub tenure: Tenure,
}

/// Whether a node may be removed to save costs, in the order in which nodes are filled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Tenure {
    /// Protected from voluntary disruption, or by one of its pods.
    Stays,
    #[default]
    MayBeRemoved,
    /// Not owned by Stowage: no room can be held there for a pod that moves.
    NotOurs,
}

impl NodeState {
    /// The value of a label: see [`labels::of_node`].
    pub(crate) fn label(&self, key: &str) -> Option<&str> {
        labels::of_node(&self.labels, &self.name, key)
    }

    /// Whether the node satisfies one of `terms`, or there are none.
    pub(crate) fn satisfies(&self, terms: &[NodeTerm]) -> bool {
        terms.is_empty() || terms.iter().any(|term| term.accepts(&self.labels, &self.name))
    }

    /// Whether a class's required node terms, volumes and tolerations admit the node.
    pub fn admits(&self, class: &PodClass) -> bool {
        class.untolerated(&self.taints).is_none()
            && self.satisfies(&class.node_terms)
            && self.satisfies(&class.volume_terms)
    }
}
