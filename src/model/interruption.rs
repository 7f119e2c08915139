//! Kinds of messages about instances that EC2 interrupts or changes.

/// Kind of a message of the interruption queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MessageKind {
    /// Spot interruption warning, two minutes ahead.
    SpotInterruption,
    /// Elevated risk of a spot interruption.
    RebalanceRecommendation,
    /// The owner of an interruptible capacity reservation reclaims the instance in two minutes.
    CapacityReservationInterruption,
    /// Scheduled maintenance.
    ScheduledChange,
    /// The instance is stopping or stopped.
    Stopped,
    /// The instance is shutting down or terminated.
    StateChange,
}

impl MessageKind {
    pub const ALL: [Self; 6] = [
        Self::SpotInterruption,
        Self::RebalanceRecommendation,
        Self::CapacityReservationInterruption,
        Self::ScheduledChange,
        Self::Stopped,
        Self::StateChange,
    ];
}
