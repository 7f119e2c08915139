//! What an instance's life means for its Node object: register at boot, report devices, fall silent at the end, go when it is gone.

use crate::cloud::simulated::record::{NodeStep, Record};

/// What is to be done to a Node object.
#[derive(Clone, Debug, PartialEq)]
pub struct NodeAction {
    /// The instance, as it is now.
    pub record: Record,
    /// What to do, and to report by [`Ec2State::node_step_done`](crate::cloud::simulated::engine::Ec2State::node_step_done).
    pub step: NodeStep,
}

/// The next thing to be done to an instance's Node, and when.
pub(crate) fn next_step(record: &Record, now_ms: i64) -> Option<(i64, NodeStep)> {
    let node = record.node;
    if node.removed {
        return None;
    }
    if !node.registered {
        let boot = record.boot_at_ms?;
        // An instance that ends or panics before it boots never gets a Node.
        if node.panicked || record.shutdown_at_ms.is_some_and(|end| end <= boot) {
            return None;
        }
        return match record.gone_at_ms {
            // Too late to register, but an attempt whose answer was lost may have left a Node.
            Some(gone) if !record.lives(now_ms) => Some((gone, NodeStep::Removed)),
            _ => Some((boot, NodeStep::Registered)),
        };
    }
    if let Some(gone) = record.gone_at_ms
        && node.silenced
    {
        return Some((gone, NodeStep::Removed));
    }
    let silent_from = if node.panicked { Some(i64::MIN) } else { record.shutdown_at_ms };
    let silence = silent_from.filter(|_| !node.silenced).map(|at| (at, NodeStep::Silenced));
    let devices = record.devices_at_ms.filter(|_| !node.devices && !node.silenced).map(|at| (at, NodeStep::Devices));
    [silence, devices].into_iter().flatten().min_by_key(|(at, _)| *at)
}
