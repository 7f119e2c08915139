//! The resolution of a node class.

use std::time::Duration;

use stowage_api::Ec2NodeClassStatus;
use stowage_api::conditions::EC2_NODE_CLASS_DEPENDENTS;
use stowage_model::events::DeclaredEvent;

/// The evaluation of one condition of a node class.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    True,
    /// The event that reports it, whose reason is the condition's reason; and the message.
    False(&'static DeclaredEvent, String),
    /// True, but without something that the class requests. Only the event has the message.
    Degraded(&'static DeclaredEvent, String),
    /// Reason and message of the condition.
    Unknown(&'static str, String),
    /// An API call failed, so that the condition keeps its previous status. The message names the failure.
    Unjudged(String),
}

/// A resolved node class.
#[derive(Clone, Debug, PartialEq)]
pub struct Resolution {
    /// The new status without its conditions; `None` leaves the status unchanged.
    pub status: Option<Ec2NodeClassStatus>,
    /// Verdicts by condition type.
    pub verdicts: Vec<(&'static str, Verdict)>,
    /// When to resolve the class again, unless it changes before.
    pub requeue_after: Duration,
}

impl Resolution {
    /// The resolution of every class in a cloud that has nothing to discover: all conditions are true.
    pub fn all_true() -> Self {
        let verdicts = EC2_NODE_CLASS_DEPENDENTS.iter().map(|kind| (*kind, Verdict::True)).collect();
        Self { status: None, verdicts, requeue_after: Duration::ZERO }
    }
}
