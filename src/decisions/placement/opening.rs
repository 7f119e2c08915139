//! When a new node opens for pods, which of its planned pods are nominated before, and whether it gets the planned taint.

use std::time::Duration;

use k8s_openapi::api::core::v1::{Node, Taint};
use kube::ResourceExt;
use stowage_api::NodeClaim;
use stowage_model::labels;
use stowage_model::time::UnixMillis;

use crate::decisions::holds::HOLD_READY;
use crate::decisions::lifecycle::initialization::is_complete;
use crate::decisions::placement::mode::PlacementMode;
use crate::decisions::placement::nominations::to_nominate;
use crate::decisions::placement::planned_taint::{planned_taint, suffices};
use crate::decisions::pod_ref::PodRef;
use crate::state::node_state::is_ephemeral;
use crate::state::object_ext::{NodeClaimExt, NodeExt, ObjectExt};
use crate::state::plan_record::Holds;
use crate::state::tables::ClusterState;

/// A node that is not ready this long after its creation is opened regardless: an agent that it needs may not tolerate our taint.
const OPEN_TIMEOUT: Duration = Duration::from_secs(20);
/// With [`PlacementMode::Off`] a hold only prevents that a pod is planned twice: it ends this long after the node was opened.
const HOLD_WITHOUT_ENFORCEMENT: Duration = Duration::from_secs(10);

/// Whether a node may still wait: for its readiness and for the nominations of its pods.
fn may_wait(node: &Node, placement: PlacementMode, now: UnixMillis) -> bool {
    placement != PlacementMode::Off && !node.created_at().is_older_than(OPEN_TIMEOUT, now)
}

/// Whether a node waits until it is ready.
pub fn must_wait(claim: &NodeClaim, node: &Node, placement: PlacementMode, now: UnixMillis) -> bool {
    may_wait(node, placement, now) && !can_open(claim, node)
}

/// The end that the holds of a node get when it opens, given their `planned` end; `None` leaves it unchanged.
pub fn hold_until(planned: UnixMillis, placement: PlacementMode, now: UnixMillis) -> Option<UnixMillis> {
    let until = now + if placement == PlacementMode::Off { HOLD_WITHOUT_ENFORCEMENT } else { HOLD_READY };
    (planned > until || planned < now + HOLD_WITHOUT_ENFORCEMENT / 2).then_some(until)
}

/// How a node opens.
#[derive(Debug, Default, PartialEq)]
pub struct NodeOpening {
    /// Pods to nominate first. The node is opened when the watch shows the nominations.
    pub nominate: Vec<PodRef>,
    /// The planned taint that the node gets.
    pub planned_taint: Option<Taint>,
}

/// Decides how a node opens that need not wait ([`must_wait`]).
pub fn opening(
    state: &ClusterState,
    holds: &Holds,
    claim: &NodeClaim,
    node: &Node,
    placement: PlacementMode,
    now: UnixMillis,
) -> NodeOpening {
    if placement == PlacementMode::Off {
        return NodeOpening::default();
    }
    let claim_name = claim.name_any();
    let held = holds.by_claim.contains_key(&claim_name);
    // An incomplete node may wait for a DaemonSet pod that does not tolerate the planned taint.
    let tainted = held && can_open(claim, node) && is_complete(claim, node);
    let planned_taint = if tainted { planned_taint(claim, now) } else { None };
    let needless = planned_taint.as_ref().is_some_and(|taint| suffices(state, node, taint, placement, now));
    let nominate = if may_wait(node, placement, now) && !needless {
        to_nominate(state, holds, placement, planned_taint.is_some(), &claim_name, &node.name_any())
    } else {
        Vec::new()
    };
    NodeOpening { nominate, planned_taint }
}

/// Whether only the unregistered taint keeps planned pods off a node.
fn can_open(claim: &NodeClaim, node: &Node) -> bool {
    node.is_ready()
        && !node.taints().any(|taint| {
            taint.key != labels::UNREGISTERED_TAINT && is_ephemeral(taint) && !claim.is_startup_taint(taint)
        })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use stowage_test_objects as objects;

    use super::*;
    use crate::decisions::holds::resolve;
    use crate::test_support::state_with_planned_pod;

    const CREATED: UnixMillis = UnixMillis(1_000_000);

    fn node(ready: bool, taints: &[&str]) -> Node {
        let taints: Value = taints.iter().map(|key| json!({"key": key, "effect": "NoSchedule"})).collect();
        let status = json!({"conditions": [{"type": "Ready", "status": if ready { "True" } else { "False" }}]});
        let meta = json!({"creationTimestamp": CREATED.rfc3339()});
        let spec = json!({"providerID": "aws:///z/i-1", "taints": taints});
        objects::node("node-c", &json!({"metadata": meta, "spec": spec, "status": status}))
    }

    fn claim() -> NodeClaim {
        objects::claim("c", &json!({"spec": {"startupTaints": [{"key": "cni", "effect": "NoSchedule"}]}}))
    }

    #[test]
    fn a_node_waits_to_be_ready_for_twenty_seconds_where_placement_is_enforced() {
        use PlacementMode::{Extender, Nominate, Off};
        let late = CREATED + OPEN_TIMEOUT;
        let soon = late - Duration::from_millis(1);
        for (case, ready, taints, placement, now, waits) in [
            ("ready", true, &[labels::UNREGISTERED_TAINT][..], Nominate, soon, false),
            ("not ready", false, &[], Nominate, soon, true),
            ("not ready, with the extender", false, &[], Extender, soon, true),
            ("not ready, not enforced", false, &[], Off, soon, false),
            ("not ready in time", false, &[], Nominate, late, false),
            ("ephemeral taint", true, &["node.kubernetes.io/not-ready"], Nominate, soon, true),
            ("startup taint", true, &["cni"], Nominate, soon, false),
        ] {
            assert_eq!(must_wait(&claim(), &node(ready, taints), placement, now), waits, "{case}");
        }
    }

    #[test]
    fn holds_of_a_node_that_opens_last_a_minute_or_ten_seconds_where_placement_is_off() {
        use PlacementMode::{Nominate, Off};
        let now = UnixMillis(0);
        for (planned, placement, until) in [
            (300_000, Nominate, Some(60_000)),
            (60_001, Nominate, Some(60_000)),
            (60_000, Nominate, None),
            (5_000, Nominate, None),
            (4_999, Nominate, Some(60_000)),
            (10_001, Off, Some(10_000)),
            (10_000, Off, None),
            (4_999, Off, Some(10_000)),
        ] {
            assert_eq!(
                hold_until(UnixMillis(planned), placement, now),
                until.map(UnixMillis),
                "{planned} {placement:?}"
            );
        }
    }

    #[test]
    fn a_complete_node_gets_the_planned_taint_after_nominations_for_other_nodes() {
        use PlacementMode::{Extender, Nominate, Off};
        let state = state_with_planned_pod(None);
        let bound = state_with_planned_pod(Some("node-c"));
        let late = CREATED + OPEN_TIMEOUT;
        for (case, state, taints, placement, now, nominated, tainted) in [
            ("planned", &state, &[][..], Nominate, CREATED, 0, true),
            ("incomplete", &state, &["cni"], Nominate, CREATED, 1, false),
            ("with the extender", &state, &[], Extender, CREATED, 0, true),
            ("incomplete, with the extender", &state, &["cni"], Extender, CREATED, 1, false),
            ("not enforced", &state, &[], Off, CREATED, 0, false),
            ("overdue", &state, &["cni"], Nominate, late, 0, false),
            ("without holds", &bound, &[], Nominate, CREATED, 0, false),
        ] {
            let found = opening(state, &resolve(state, now), &claim(), &node(true, taints), placement, now);
            assert_eq!((found.nominate.len(), found.planned_taint.is_some()), (nominated, tainted), "{case}");
        }
    }
}
