//! An instance as the cloud describes it.

use crate::offering::CapacityType;
use crate::reservation::ReservedIn;
use crate::time::UnixMillis;

#[derive(Clone, Debug, PartialEq)]
pub struct Instance {
    /// Such as `i-0123456789abcdef0`.
    pub id: String,
    /// Such as `aws:///us-east-1a/i-0123456789abcdef0`.
    pub provider_id: String,
    /// The idempotency token of its launch, or the id of the launch group it was launched for.
    pub client_token: String,
    /// NodeClaim it was launched for (a tag).
    pub node_claim: String,
    pub instance_type: String,
    /// Zone name, such as `us-east-1a`.
    pub zone: String,
    pub capacity_type: CapacityType,
    /// Capacity reservation it was launched into.
    pub reservation: Option<ReservedIn>,
    /// Partition of its placement group; `None` without a partition, and while the partition is unknown.
    pub partition: Option<i32>,
    pub image_id: String,
    pub launched_at: UnixMillis,
    pub state: InstanceState,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InstanceState {
    Pending,
    Running,
    /// Stopping or stopped: it can be started again.
    Stopped,
    ShuttingDown,
    /// Terminated; the cloud still describes it for a while.
    Terminated,
}
