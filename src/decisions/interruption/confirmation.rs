//! Whether a message of the interruption queue is acted on: whoever can write to the queue can write any message.
//!
//! EC2 confirms that an instance stops or shuts down. It offers no such confirmation of a warning with the rights of Karpenter's
//! policy, so that warnings only have to be plausible, and few. Beyond that number EC2 confirms spot warnings with an optional right.

use std::time::Duration;

use kube::ResourceExt;
use stowage_api::NodeClaim;
use stowage_model::instance::InstanceState;
use stowage_model::interruption::MessageKind;
use stowage_model::labels;
use stowage_model::offering::CapacityType;
use stowage_model::time::UnixMillis;

/// How long after an event EC2 may still describe the state before it.
const CONSISTENCY: Duration = Duration::from_mins(1);
/// Nodes that unconfirmed warnings may drain per minute: this many, or this percentage of all nodes if that is more. An instance that is
/// interrupted has two minutes; a scheduled change is usually days ahead.
const INTERRUPTED: (usize, usize) = (20, 25);
const SCHEDULED: (usize, usize) = (10, 5);

/// What is done with a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Confirmation {
    /// It is acted on.
    Confirmed,
    /// It is kept, and evaluated again when it is redelivered.
    Unknown,
    /// It is deleted without effect.
    Refused(Refusal),
}

/// Value of the metric label `reason` of a warning that comes after too many others.
pub const TOO_MANY: &str = "too_many";

/// Why a message has no effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// EC2 describes the instance as running.
    Running,
    /// A spot interruption warning of an instance that is not a spot instance, or the like.
    WrongCapacityType,
}

impl Refusal {
    /// Value of the metric label `reason`.
    pub fn label(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::WrongCapacityType => "wrong_capacity_type",
        }
    }
}

/// Confirms that an instance stops or shuts down with EC2's description; `None` is an instance that does not exist. `at` is the time
/// of the message.
pub fn of_end(observed: Option<InstanceState>, at: UnixMillis, now: UnixMillis) -> Confirmation {
    match observed {
        None | Some(InstanceState::Stopped | InstanceState::ShuttingDown | InstanceState::Terminated) => {
            Confirmation::Confirmed
        }
        Some(InstanceState::Pending | InstanceState::Running) if at.is_older_than(CONSISTENCY, now) => {
            Confirmation::Refused(Refusal::Running)
        }
        Some(InstanceState::Pending | InstanceState::Running) => Confirmation::Unknown,
    }
}

/// Whether a warning fits the capacity type of the instance. A claim without a label fits every warning.
pub fn of_warning(kind: MessageKind, claim: &NodeClaim) -> Confirmation {
    let label = claim.labels().get(labels::CAPACITY_TYPE).map(String::as_str);
    let is_spot = label.map(|label| label == CapacityType::Spot.as_str());
    match (kind, is_spot) {
        (MessageKind::SpotInterruption, Some(false)) | (MessageKind::CapacityReservationInterruption, Some(true)) => {
            Confirmation::Refused(Refusal::WrongCapacityType)
        }
        _ => Confirmation::Confirmed,
    }
}

/// The number of nodes drained by warnings in the last minute up to which one of this kind may drain another, in a cluster with this
/// many NodeClaims.
pub fn warned_per_minute(kind: MessageKind, claims: usize) -> usize {
    let (nodes, percent) = if kind == MessageKind::ScheduledChange { SCHEDULED } else { INTERRUPTED };
    nodes.max(claims * percent / 100)
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use stowage_test_objects as objects;

    use super::*;

    #[test]
    fn ec2_confirms_that_an_instance_ends_and_has_a_minute_to_notice() {
        let at = UnixMillis(1_000);
        let refused = Confirmation::Refused(Refusal::Running);
        for (observed, early, late) in [
            (None, Confirmation::Confirmed, Confirmation::Confirmed),
            (Some(InstanceState::Stopped), Confirmation::Confirmed, Confirmation::Confirmed),
            (Some(InstanceState::ShuttingDown), Confirmation::Confirmed, Confirmation::Confirmed),
            (Some(InstanceState::Terminated), Confirmation::Confirmed, Confirmation::Confirmed),
            (Some(InstanceState::Running), Confirmation::Unknown, refused),
            (Some(InstanceState::Pending), Confirmation::Unknown, refused),
        ] {
            assert_eq!(of_end(observed, at, at + CONSISTENCY - Duration::from_millis(1)), early, "{observed:?}");
            assert_eq!(of_end(observed, at, at + CONSISTENCY), late, "{observed:?}");
        }
    }

    #[test]
    fn a_warning_must_fit_the_capacity_type() {
        let refused = Confirmation::Refused(Refusal::WrongCapacityType);
        for (kind, capacity_type, expected) in [
            (MessageKind::SpotInterruption, Some("spot"), Confirmation::Confirmed),
            (MessageKind::SpotInterruption, Some("on-demand"), refused),
            (MessageKind::SpotInterruption, Some("reserved"), refused),
            (MessageKind::SpotInterruption, None, Confirmation::Confirmed),
            (MessageKind::CapacityReservationInterruption, Some("reserved"), Confirmation::Confirmed),
            (MessageKind::CapacityReservationInterruption, Some("spot"), refused),
            (MessageKind::ScheduledChange, Some("on-demand"), Confirmation::Confirmed),
        ] {
            let claim = objects::claim("c", &json!({"metadata": {"labels": {(labels::CAPACITY_TYPE): capacity_type}}}));
            assert_eq!(of_warning(kind, &claim), expected, "{kind:?} {capacity_type:?}");
        }
    }

    #[test]
    fn a_share_of_a_large_cluster_may_be_warned_per_minute() {
        let most = |kind| [0, 80, 2_000].map(|claims| warned_per_minute(kind, claims));
        assert_eq!(most(MessageKind::SpotInterruption), [20, 20, 500]);
        assert_eq!(most(MessageKind::ScheduledChange), [10, 10, 100]);
    }
}
