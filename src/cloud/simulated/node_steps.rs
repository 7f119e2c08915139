//! Steps of an instance's Node object: registration at boot, end of heartbeats at shutdown, deletion after the
//! termination.

use stowage_model::time::UnixMillis;

use crate::simulated::engine_state::{InstanceRecord, NodeStep};

/// A due step of a Node object.
#[derive(Clone, Debug, PartialEq)]
pub struct NodeAction {
    pub record: InstanceRecord,
    /// The step, to be reported with [`Engine::node_step_done`](crate::simulated::engine::Engine::node_step_done).
    pub step: NodeStep,
}

/// The next step of an instance's Node, and when it is due.
pub(crate) fn next_step(record: &InstanceRecord, now: UnixMillis) -> Option<(UnixMillis, NodeStep)> {
    let node = record.node;
    if node.removed {
        return None;
    }
    if !node.registered {
        let boot = record.boot_at;
        // An instance that shuts down or panics before it boots never gets a Node.
        if node.panicked || record.shutdown_at.is_some_and(|end| end <= boot) {
            return None;
        }
        return match record.terminated_at {
            // Too late to register, but an attempt whose response was lost may have created a Node.
            Some(terminated) if !record.is_alive(now) => Some((terminated, NodeStep::Removed)),
            _ => Some((boot, NodeStep::Registered)),
        };
    }
    if let Some(terminated) = record.terminated_at
        && node.silenced
    {
        return Some((terminated, NodeStep::Removed));
    }
    let silent_from = if node.panicked { Some(UnixMillis::MIN) } else { record.shutdown_at };
    silent_from.filter(|_| !node.silenced).map(|at| (at, NodeStep::Silenced))
}
