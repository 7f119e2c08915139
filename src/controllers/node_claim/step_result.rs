//! Results of a step of the NodeClaim lifecycle.

use std::time::Duration;

use crate::decisions::disruption::reason::DisruptionReason;
use crate::model::time::UnixMillis;

/// When the claim is processed again after a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Requeue {
    Now,
    After(Duration),
    /// With exponential backoff, but not later than `until`.
    Backoff {
        until: UnixMillis,
    },
}

/// Why a step failed.
#[derive(Debug, thiserror::Error)]
pub enum StepError {
    /// No retry can succeed: the claim is deleted and its pods are re-planned.
    #[error("{message}")]
    Abandon { reason: DisruptionReason, message: String },
    /// The step may succeed later.
    #[error("{0}")]
    Retry(String),
    /// The API server refused a write.
    #[error("writing the node claim: {0}")]
    Api(#[from] kube::Error),
}

impl StepError {
    pub fn abandon(reason: DisruptionReason, message: impl Into<String>) -> Self {
        Self::Abandon { reason, message: message.into() }
    }
}
