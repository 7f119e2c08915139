//! The placement mode.

/// How kube-scheduler is made to follow the plan (`--placement`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum PlacementMode {
    /// The extender's filter reserves the room, and pods are nominated.
    Extender,
    /// Pods are nominated to their nodes; without an extender.
    Nominate,
    /// Nodes are launched, and kube-scheduler places pods on its own.
    Off,
}
