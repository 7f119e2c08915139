//! The JSON of `k8s.io/kube-scheduler/extender/v1`.
//!
//! Its Go types have no JSON tags: top-level keys are PascalCase (written out here, since `NumPDBViolations` and `UID` follow no
//! rule), the pods and nodes inside are ordinary Kubernetes JSON without `kind` and `apiVersion`, and an absent list is `null`.
//! Requests borrow from the body: parsing 5,000 node names allocates one vector.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::ser::SerializeMap;
use serde::{Deserialize, Serialize, Serializer};
use serde_json::Value;

use crate::extender::name::Name;
use crate::extender::pod_fields::ExtenderPod;

/// `NodeList`: whole nodes, sent when the extender is configured with `nodeCacheCapable: false`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct NodeList {
    /// List metadata, returned unchanged.
    #[serde(default)]
    pub metadata: Value,
    /// Nodes, returned unchanged.
    #[serde(default)]
    pub items: Option<Vec<Value>>,
}

/// `ExtenderArgs`: the request of filter and prioritize.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FilterArgs<'a> {
    /// The pod to place.
    #[serde(rename = "Pod", borrow)]
    pub pod: ExtenderPod<'a>,
    /// Whole nodes, or null with `nodeCacheCapable: true`.
    #[serde(rename = "Nodes", default)]
    pub nodes: Option<NodeList>,
    /// Names of nodes, or null with `nodeCacheCapable: false`.
    #[serde(rename = "NodeNames", default, borrow)]
    pub node_names: Option<Vec<Name<'a>>>,
}

/// The reason why a node is denied to a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Denial {
    /// The pod is planned on another node.
    PlannedElsewhere,
    /// The planned node does not exist yet.
    WaitingForNode,
    /// The free resources are reserved for planned pods.
    RoomReserved,
    /// The node is being disrupted.
    Disrupting,
}

impl Denial {
    pub const ALL: [Self; 4] = [Self::PlannedElsewhere, Self::WaitingForNode, Self::RoomReserved, Self::Disrupting];

    /// Name in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::PlannedElsewhere => "planned_elsewhere",
            Self::WaitingForNode => "waiting_for_node",
            Self::RoomReserved => "room_reserved",
            Self::Disrupting => "disrupting",
        }
    }
}

/// How many nodes were denied for which reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DenialCounts([u64; Denial::ALL.len()]);

impl DenialCounts {
    pub(crate) fn count(&mut self, denial: Denial) {
        self.0[denial as usize] += 1;
    }

    /// Nodes denied for this reason.
    pub fn get(&self, denial: Denial) -> u64 {
        self.0[denial as usize]
    }
}

/// The basis of an answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Answer {
    /// Nothing restrains the pod: the nodes are echoed.
    #[default]
    Unrestrained,
    /// The view is stale: the nodes are echoed.
    Stale,
    /// Each node was evaluated.
    Judged,
}

/// `ExtenderFilterResult`.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct FilterResult<'a> {
    /// Nodes that pass, when whole nodes were given.
    #[serde(rename = "Nodes")]
    pub nodes: Option<NodeList>,
    /// Names of nodes that pass: a list in every response, because null would mean that no node passes.
    #[serde(rename = "NodeNames")]
    pub node_names: Vec<Name<'a>>,
    /// Nodes on which preemption might help: none, see [`FilterResult::failed_and_unresolvable`].
    #[serde(rename = "FailedNodes")]
    pub failed: BTreeMap<Name<'a>, &'static str>,
    /// Nodes that fail, with the reason that kube-scheduler writes into the pod's condition, in the order of the request.
    /// "Unresolvable" because evicting pods frees no room here for this pod: preemption must not try.
    #[serde(rename = "FailedAndUnresolvableNodes", serialize_with = "as_map")]
    pub failed_and_unresolvable: Vec<(Name<'a>, Arc<str>)>,
    /// Always empty: an error would turn the pod's condition into `SchedulerError`.
    #[serde(rename = "Error")]
    pub error: &'static str,
    /// Denials by reason, for the metrics.
    #[serde(skip)]
    pub denied: DenialCounts,
    /// The basis of the answer, for the metrics.
    #[serde(skip)]
    pub answer: Answer,
}

fn as_map<S: Serializer>(pairs: &[(Name<'_>, Arc<str>)], serializer: S) -> Result<S::Ok, S::Error> {
    let mut map = serializer.serialize_map(Some(pairs.len()))?;
    for (name, reason) in pairs {
        map.serialize_entry(name, &**reason)?;
    }
    map.end()
}

/// An entry of `HostPriorityList`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostPriority<'a> {
    /// Node name.
    #[serde(rename = "Host", borrow)]
    pub host: Name<'a>,
    /// Score from 0 to 10; higher is preferred.
    #[serde(rename = "Score")]
    pub score: i64,
}

/// `ExtenderPreemptionArgs`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PreemptArgs<'a> {
    /// The pod that preempts.
    #[serde(rename = "Pod", borrow)]
    pub pod: ExtenderPod<'a>,
    /// Candidates with whole pods, with `nodeCacheCapable: false`.
    #[serde(rename = "NodeNameToVictims", default, borrow)]
    pub victims: Option<BTreeMap<Name<'a>, Victims<'a>>>,
    /// Candidates with UIDs, with `nodeCacheCapable: true`.
    #[serde(rename = "NodeNameToMetaVictims", default, borrow)]
    pub meta_victims: Option<BTreeMap<Name<'a>, MetaVictims<'a>>>,
}

/// `Victims`: pods to evict from a node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Victims<'a> {
    /// Pods.
    #[serde(rename = "Pods", default, borrow)]
    pub pods: Option<Vec<ExtenderPod<'a>>>,
    /// Budgets their eviction violates.
    #[serde(rename = "NumPDBViolations", default)]
    pub num_pdb_violations: i64,
}

/// `MetaVictims`: UIDs of pods to evict from a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MetaVictims<'a> {
    /// Pods.
    #[serde(rename = "Pods", default, borrow)]
    pub pods: Option<Vec<MetaPod<'a>>>,
    /// Budgets their eviction violates.
    #[serde(rename = "NumPDBViolations", default)]
    pub num_pdb_violations: i64,
}

/// `MetaPod`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MetaPod<'a> {
    /// UID of the pod.
    #[serde(rename = "UID", borrow)]
    pub uid: Name<'a>,
}

/// `ExtenderPreemptionResult`.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct PreemptResult<'a> {
    /// Candidates that are left, always with UIDs.
    #[serde(rename = "NodeNameToMetaVictims")]
    pub meta_victims: BTreeMap<Name<'a>, MetaVictims<'a>>,
    /// Candidates dropped, by reason, for the metrics.
    #[serde(skip)]
    pub denied: DenialCounts,
}
