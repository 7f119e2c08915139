//! A difference between a node and the objects that it was launched from.

/// A difference that replaces a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Drift {
    /// Reason of the `Drifted` condition.
    pub reason: &'static str,
    /// Actual and desired value, for people.
    pub message: String,
}
