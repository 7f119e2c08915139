//! A difference between a node and the objects that it was launched from.

use crate::events::DeclaredEvent;

/// A difference that replaces a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Drift {
    /// The event that reports it, whose reason is the reason of the `Drifted` condition.
    pub event: &'static DeclaredEvent,
    /// Actual and desired value, for people.
    pub message: String,
}
