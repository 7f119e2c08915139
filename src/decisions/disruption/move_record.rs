//! What the NodeClaim of each source of a move records of it, as an annotation: a new leader continues from it.

use std::collections::BTreeSet;

use kube::ResourceExt;
use serde::{Deserialize, Serialize};
use stowage_api::NodeClaim;
use stowage_model::labels;
use stowage_model::time::UnixMillis;

/// The record.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MoveRecord {
    pub id: String,
    /// When it began.
    #[serde(with = "rfc3339")]
    pub at: UnixMillis,
    /// When it is rolled back, unless the pods have their new places by then.
    #[serde(with = "rfc3339")]
    pub give_up: UnixMillis,
    /// NodeClaims of all its sources.
    pub sources: Vec<String>,
    /// What it saves, USD per hour.
    pub usd_per_hour: f64,
    /// Pods of this source, `namespace/name`, that go to nodes that Stowage does not manage, where no room can be kept.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub unheld: BTreeSet<String>,
    /// The NodeClaim that replaces its only source, a node of a static NodePool: no room is kept for its pods.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replaced_by: Option<String>,
}

mod rfc3339 {
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};
    use stowage_model::time::UnixMillis;

    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
    pub fn serialize<S: Serializer>(at: &UnixMillis, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&at.rfc3339())
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<UnixMillis, D::Error> {
        let text = String::deserialize(deserializer)?;
        UnixMillis::parse_rfc3339(&text).ok_or_else(|| D::Error::custom("no RFC 3339 time"))
    }
}

impl MoveRecord {
    /// Reads the annotation of a NodeClaim. `None` where there is none, or none that is understood.
    pub fn of(claim: &NodeClaim) -> Option<Self> {
        serde_json::from_str(claim.annotations().get(labels::MOVE)?).ok()
    }

    /// The value of the annotation.
    pub fn annotation(&self) -> String {
        serde_json::json!(self).to_string()
    }
}
