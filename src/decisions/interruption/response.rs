//! The response to a message of the interruption queue.

use std::sync::Arc;
use std::time::Duration;

use stowage_api::NodeClaim;
use stowage_model::interruption::MessageKind;
use stowage_model::time::UnixMillis;

use crate::decisions::disruption::mark::DisruptionMark;
use crate::decisions::disruption::reason::DisruptionReason;
use crate::state::object_ext::{NodeClaimExt, ObjectExt};
use crate::state::tables::ClusterState;

/// Notice that EC2 gives of a spot interruption.
const SPOT_NOTICE: Duration = Duration::from_mins(2);
/// Time to drain before a scheduled change. The change itself is usually days ahead.
pub const SCHEDULED_NOTICE: Duration = Duration::from_mins(10);

/// What to do about a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InterruptionAction {
    /// Emit events only.
    Report,
    /// Mark the claim: its node is replaced and drained before the deadline.
    Mark(DisruptionMark),
    /// The instance is shutting down or terminated: delete the claim.
    Delete(DisruptionReason),
}

/// What to do about a message of this kind about an event at `at`.
pub fn action(kind: MessageKind, at: UnixMillis) -> InterruptionAction {
    let mark = |reason, notice| {
        let deadline = Some(at + notice);
        InterruptionAction::Mark(DisruptionMark { reason, deadline })
    };
    match kind {
        MessageKind::SpotInterruption => mark(DisruptionReason::SpotInterruption, SPOT_NOTICE),
        MessageKind::CapacityReservationInterruption => {
            mark(DisruptionReason::CapacityReservationInterruption, SPOT_NOTICE)
        }
        MessageKind::ScheduledChange => mark(DisruptionReason::ScheduledChange, SCHEDULED_NOTICE),
        MessageKind::Stopped => InterruptionAction::Delete(DisruptionReason::InstanceStopped),
        MessageKind::StateChange => InterruptionAction::Delete(DisruptionReason::InstanceTerminated),
        MessageKind::RebalanceRecommendation => InterruptionAction::Report,
    }
}

/// The claim of the instance with this id; `None` without one, or when it is deleted already.
pub fn claim_of(state: &ClusterState, instance_id: &str) -> Option<Arc<NodeClaim>> {
    let suffix = format!("/{instance_id}");
    let mut claims = state.claims.values();
    let claim = claims.find(|claim| claim.provider_id().is_some_and(|id| id.ends_with(&suffix)))?;
    (!claim.is_deleting()).then(|| Arc::clone(claim))
}

/// The name of a message's kind in logs, the same as Karpenter's.
pub fn kind_label(kind: MessageKind) -> &'static str {
    match kind {
        MessageKind::SpotInterruption => "spot_interrupted",
        MessageKind::RebalanceRecommendation => "rebalance_recommendation",
        MessageKind::CapacityReservationInterruption => "capacity_reservation_interrupted",
        MessageKind::ScheduledChange => "scheduled_change",
        MessageKind::Stopped => "instance_stopped",
        MessageKind::StateChange => "instance_terminated",
    }
}

#[cfg(test)]
mod tests {
    use kube::ResourceExt;
    use serde_json::json;
    use stowage_test_objects as objects;

    use super::*;

    #[test]
    fn every_kind_of_message_has_its_action_and_disruptions_are_counted_under_its_name() {
        use InterruptionAction::{Delete, Mark, Report};
        let mark = |reason, deadline| Mark(DisruptionMark { reason, deadline: Some(UnixMillis(deadline)) });
        for (kind, expected) in [
            (MessageKind::RebalanceRecommendation, Report),
            (MessageKind::Stopped, Delete(DisruptionReason::InstanceStopped)),
            (MessageKind::StateChange, Delete(DisruptionReason::InstanceTerminated)),
            (MessageKind::SpotInterruption, mark(DisruptionReason::SpotInterruption, 121_000)),
            (
                MessageKind::CapacityReservationInterruption,
                mark(DisruptionReason::CapacityReservationInterruption, 121_000),
            ),
            (MessageKind::ScheduledChange, mark(DisruptionReason::ScheduledChange, 601_000)),
        ] {
            let action = action(kind, UnixMillis(1_000));
            assert_eq!(action, expected);
            if let Delete(reason) | Mark(DisruptionMark { reason, .. }) = action {
                assert_eq!(reason.metric_label(), kind_label(kind));
            }
        }
    }

    #[test]
    fn c37_a_deleted_claim_is_left_alone() {
        let mut state = ClusterState::default();
        for (name, id, deletion) in [("present", "i-1", None), ("deleting", "i-2", Some("2026-01-01T00:00:00Z"))] {
            let meta = json!({"deletionTimestamp": deletion, "finalizers": ["f"]});
            let status = objects::launched(id, &[]);
            state.apply_claim(objects::claim(name, &json!({"metadata": meta, "status": status})));
        }
        for (instance, expected) in [("i-1", Some("present")), ("i-2", None), ("i-11", None), ("1", None)] {
            let found = claim_of(&state, instance).map(|claim| claim.name_any());
            assert_eq!(found.as_deref(), expected, "{instance}");
        }
    }
}
