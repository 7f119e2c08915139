//! The placement mode.

/// How kube-scheduler is made to follow the plan (`--placement`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum PlacementMode {
    /// New nodes get the planned taint, and the extender's filter reserves the room.
    Extender,
    /// New nodes get the planned taint, and pods are nominated where it is not enough; without an extender.
    Nominate,
    /// Nodes are launched, and kube-scheduler places pods on its own.
    Off,
}
