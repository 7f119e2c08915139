//! Messages of the interruption queue.

use crate::model::time::UnixMillis;

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

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// Handle that deletes the message.
    pub receipt: String,
    pub kind: MessageKind,
    /// Id of the instance, as `i-0123456789abcdef0`.
    pub instance_id: String,
    /// Time of the event.
    pub at: UnixMillis,
}
