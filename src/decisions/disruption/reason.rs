//! Why a NodeClaim is deleted.

/// The reason, as it appears in budgets, events, the mark on a claim, and metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum DisruptionReason {
    /// No pod needs the node.
    Empty,
    /// The node no longer matches its NodePool or node class.
    Drifted,
    /// The node's pods fit elsewhere or on cheaper nodes.
    Underutilized,
    SpotInterruption,
    CapacityReservationInterruption,
    /// AWS Health scheduled a change of the instance.
    ScheduledChange,
    InstanceStopped,
    InstanceTerminated,
    /// The EC2 instance status check failed.
    InstanceStatus,
    /// The EC2 system status check failed.
    SystemStatus,
    /// EC2 scheduled an event for the instance.
    EventStatus,
    /// A condition of the Node has been unhealthy for too long.
    Unhealthy,
    /// The claim is older than its `expireAfter`, or will be soon.
    Expired,
    /// The claim's instance no longer exists.
    GarbageCollected,
    CapacityBlockExpiring,
    LaunchTimeout,
    RegistrationTimeout,
    /// The node has not initialized, and no pod needs it.
    InitializationTimeout,
    InsufficientCapacity,
    NodeClassNotReady,
    /// A mark with a reason that this version does not know.
    Unknown,
}

impl DisruptionReason {
    const ALL: [Self; 21] = [
        Self::Empty,
        Self::Drifted,
        Self::Underutilized,
        Self::SpotInterruption,
        Self::CapacityReservationInterruption,
        Self::ScheduledChange,
        Self::InstanceStopped,
        Self::InstanceTerminated,
        Self::InstanceStatus,
        Self::SystemStatus,
        Self::EventStatus,
        Self::Unhealthy,
        Self::Expired,
        Self::GarbageCollected,
        Self::CapacityBlockExpiring,
        Self::LaunchTimeout,
        Self::RegistrationTimeout,
        Self::InitializationTimeout,
        Self::InsufficientCapacity,
        Self::NodeClassNotReady,
        Self::Unknown,
    ];

    /// The reason in budgets, events and marks.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Empty => "Empty",
            Self::Drifted => "Drifted",
            Self::Underutilized => "Underutilized",
            Self::SpotInterruption => "SpotInterruption",
            Self::CapacityReservationInterruption => "CapacityReservationInterruption",
            Self::ScheduledChange => "ScheduledChange",
            Self::Expired => "Expired",
            other => other.metric_label(),
        }
    }

    /// The reason whose budgets apply. No budget can name the expiration: its nodes are replaced as drifted ones are.
    pub fn of_budget(self) -> Self {
        if self == Self::Expired { Self::Drifted } else { self }
    }

    /// Whether nodes are disrupted by choice for this reason, one move after the other.
    pub fn is_voluntary(self) -> bool {
        matches!(self, Self::Empty | Self::Drifted | Self::Expired | Self::Underutilized)
    }

    /// The value of the metric label `reason`, the same as Karpenter's (Karpenter core reference 8) where Karpenter has the reason.
    pub fn metric_label(self) -> &'static str {
        match self {
            Self::Empty => "empty",
            Self::Drifted => "drifted",
            Self::Underutilized => "underutilized",
            Self::SpotInterruption => "spot_interrupted",
            Self::CapacityReservationInterruption => "capacity_reservation_interrupted",
            Self::ScheduledChange => "scheduled_change",
            Self::InstanceStopped => "instance_stopped",
            Self::InstanceTerminated => "instance_terminated",
            Self::InstanceStatus => "instance_status",
            Self::SystemStatus => "system_status",
            Self::EventStatus => "event_status",
            Self::Unhealthy => "unhealthy",
            Self::Expired => "expired",
            Self::GarbageCollected => "garbage_collected",
            Self::CapacityBlockExpiring => "capacity_block_expiring",
            Self::LaunchTimeout => "launch_timeout",
            Self::RegistrationTimeout => "registration_timeout",
            Self::InitializationTimeout => "initialization_timeout",
            Self::InsufficientCapacity => "insufficient_capacity",
            Self::NodeClassNotReady => "nodeclass_not_ready",
            Self::Unknown => "unknown",
        }
    }

    /// Parses [`Self::as_str`].
    pub fn parse(text: &str) -> Self {
        Self::ALL.into_iter().find(|reason| reason.as_str() == text).unwrap_or(Self::Unknown)
    }

    /// Whether the reason is one of consolidation, so that metrics name the pool's policy.
    pub fn is_consolidation(self) -> bool {
        matches!(self, Self::Empty | Self::Underutilized)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_reason_is_parsed_from_its_text_and_has_its_own_label() {
        for reason in DisruptionReason::ALL {
            assert_eq!(DisruptionReason::parse(reason.as_str()), reason);
        }
        let labels: BTreeSet<&str> = DisruptionReason::ALL.iter().map(|reason| reason.metric_label()).collect();
        assert_eq!(labels.len(), DisruptionReason::ALL.len());
        assert_eq!(DisruptionReason::parse("Whim"), DisruptionReason::Unknown);
    }
}
