//! The mark of a disruption in progress, an annotation of the NodeClaim: `<reason>/<deadline>`, the deadline being optional; and the
//! taint of its Node.

use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;
use stowage_api::NodeClaim;
use stowage_model::labels;
use stowage_model::time::UnixMillis;

use crate::decisions::disruption::reason::DisruptionReason;
use crate::state::object_ext::NodeExt;

/// The mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DisruptionMark {
    pub reason: DisruptionReason,
    /// When the node must be gone; `None` for voluntary disruption.
    pub deadline: Option<UnixMillis>,
}

impl DisruptionMark {
    /// Reads the mark of a claim.
    pub fn of(claim: &NodeClaim) -> Option<Self> {
        let text = claim.annotations().get(labels::DISRUPTING)?;
        let (reason, deadline) = text.split_once('/').unwrap_or((text, ""));
        Some(Self { reason: DisruptionReason::parse(reason), deadline: UnixMillis::parse_rfc3339(deadline) })
    }

    /// The value of the annotation.
    pub fn annotation(self) -> String {
        format!("{}/{}", self.reason.as_str(), self.deadline.map(UnixMillis::rfc3339).unwrap_or_default())
    }

    /// Whether the node is disrupted by choice.
    pub fn is_voluntary(self) -> bool {
        self.deadline.is_none() && self.reason.is_voluntary()
    }

    /// Whether this mark replaces `known`, the mark on the claim: when there is none, or when this deadline is earlier.
    pub fn replaces(self, known: Option<Self>) -> bool {
        known.is_none_or(|known| match (known.deadline, self.deadline) {
            (Some(known), Some(new)) => new < known,
            (None, new) => new.is_some(),
            (Some(_), None) => false,
        })
    }
}

/// Whether a node has the disruption taint.
pub fn is_tainted(node: &Node) -> bool {
    node.taints().any(|taint| taint.key == labels::DISRUPTED_TAINT && taint.effect == "NoSchedule")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_earlier_deadline_wins() {
        let mark = |deadline: Option<i64>| DisruptionMark {
            reason: DisruptionReason::Drifted,
            deadline: deadline.map(UnixMillis),
        };
        assert!(mark(None).replaces(None));
        for (known, new, replaces) in [
            (None, None, false),
            (None, Some(9), true),
            (Some(5), None, false),
            (Some(5), Some(9), false),
            (Some(5), Some(4), true),
        ] {
            assert_eq!(mark(new).replaces(Some(mark(known))), replaces, "{new:?} after {known:?}");
        }
    }
}
