//! The plan in the annotations of a NodeClaim, and the holds that follow from it.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use kube::ResourceExt;
use stowage_api::NodeClaim;
use stowage_model::labels;
use stowage_model::pod_class::PodClass;
use stowage_model::time::UnixMillis;

/// Room on one node reserved for one pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hold {
    /// The pod that the node was bought for, `namespace/name`.
    pub original: String,
    /// The pod that takes the room: the original or its successor. `None` while no successor exists.
    pub pod: Option<String>,
    /// UID of the controller whose next pod takes the room; set only when the original is displaced from another node.
    pub owner: Option<String>,
    /// Class of the pod; without a successor that of the original, or of another pod of its controller if the original is gone. `None` when
    /// none of them is known and valid.
    pub class: Option<Arc<PodClass>>,
    /// End of the hold.
    pub expires_at: UnixMillis,
}

/// Every live hold.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Holds {
    /// Holds by NodeClaim.
    pub by_claim: BTreeMap<String, Vec<Hold>>,
    /// NodeClaim by the pod that takes the room.
    pub by_pod: HashMap<String, String>,
    /// Successors of displaced pods that were bound to another node, with the NodeClaim where room was kept for them until then.
    pub strays: BTreeMap<String, String>,
}

/// The controller that creates the successor of a displaced pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Deserialize, serde::Serialize)]
pub struct Owner {
    /// UID of the controlling owner.
    pub uid: String,
    /// When the displacement was planned: pods created earlier are not successors.
    #[serde(rename = "at_ms")]
    pub planned_at: UnixMillis,
    /// Until when room is kept instead of [`PlanRecord::hold_until`], while the pod runs or its NodeClaim is there: the time at which its move is
    /// given up.
    #[serde(rename = "until_ms", default, skip_serializing_if = "Option::is_none")]
    pub until: Option<UnixMillis>,
    /// NodeClaim that the pod is moved from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<String>,
    /// Node that the pod is moved from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
}

/// Where a pod is moved from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MoveSource {
    pub claim: String,
    pub node: String,
}

/// What the owners of pods that a move plans have in addition.
#[derive(Clone, Debug, Default)]
pub struct MoveTerms {
    /// When the move is given up.
    pub until: UnixMillis,
    /// By pod.
    pub sources: BTreeMap<Arc<str>, MoveSource>,
    /// Of consolidation: the replacements in a row that its new nodes are the last of ([`stowage_model::labels::REPLACEMENT_GENERATION`]).
    pub generation: Option<u8>,
}

impl Owner {
    /// The controller of a displaced pod, which a move plans if there are terms.
    pub fn of(uid: &str, pod: &str, planned_at: UnixMillis, terms: Option<&MoveTerms>) -> Self {
        let source = terms.and_then(|terms| terms.sources.get(pod));
        Self {
            uid: uid.to_owned(),
            planned_at,
            until: terms.map(|terms| terms.until),
            source: source.map(|source| source.claim.clone()),
            node: source.map(|source| source.node.clone()),
        }
    }
}

/// The plan that a NodeClaim carries.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PlanRecord {
    /// Pods, `namespace/name`, in order.
    pub pods: Vec<String>,
    /// Owner by pod, for pods displaced from another node.
    pub owners: BTreeMap<String, Owner>,
    /// End of the holds that have no later end of their own; the epoch when absent or unreadable, so that an unbounded hold counts as none.
    pub hold_until: UnixMillis,
}

impl PlanRecord {
    /// Reads the annotations of a NodeClaim. Unreadable annotations count as absent.
    pub fn of(claim: &NodeClaim) -> Self {
        let annotation = |key: &str| claim.annotations().get(key).map(String::as_str).unwrap_or_default();
        Self {
            pods: serde_json::from_str(annotation(labels::PLANNED_PODS)).unwrap_or_default(),
            owners: serde_json::from_str(annotation(labels::PLANNED_OWNERS)).unwrap_or_default(),
            hold_until: UnixMillis::parse_rfc3339(annotation(labels::HOLD_UNTIL)).unwrap_or_default(),
        }
    }

    /// When its holds end, in no order.
    pub fn ends(&self) -> impl Iterator<Item = UnixMillis> {
        self.owners.values().filter_map(|owner| owner.until).chain([self.hold_until])
    }

    /// When the last hold ends.
    pub fn ends_at(&self) -> UnixMillis {
        self.ends().fold(self.hold_until, UnixMillis::max)
    }

    /// When the hold of a pod ends.
    pub fn until(&self, pod: &str) -> UnixMillis {
        self.owners.get(pod).and_then(|owner| owner.until).unwrap_or(self.hold_until)
    }

    /// The annotations.
    pub fn annotations(&self) -> BTreeMap<String, String> {
        let json = |value: serde_json::Value| value.to_string();
        BTreeMap::from([
            (labels::PLANNED_PODS.to_owned(), json(self.pods.clone().into())),
            (labels::PLANNED_OWNERS.to_owned(), json(serde_json::json!(self.owners))),
            (labels::HOLD_UNTIL.to_owned(), self.hold_until.rfc3339()),
        ])
    }
}
