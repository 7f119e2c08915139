//! Messages of the interruption queue.

pub use stowage_model::interruption::MessageKind;
use stowage_model::time::UnixMillis;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// Handle that deletes the message.
    pub receipt: String,
    pub kind: MessageKind,
    /// Id of the instance, such as `i-0123456789abcdef0`.
    pub instance_id: String,
    /// Time of the event.
    pub at: UnixMillis,
}
