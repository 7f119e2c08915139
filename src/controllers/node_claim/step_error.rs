//! Failures of a step of the NodeClaim lifecycle.

use crate::decisions::disruption::reason::DisruptionReason;

/// Why a step failed.
#[derive(Debug, thiserror::Error)]
pub enum StepError {
    /// No retry can succeed: the claim is deleted and its pods are re-planned.
    #[error("{message}")]
    Abandon { reason: DisruptionReason, message: String },
    /// The step may succeed later.
    #[error("{0}")]
    Retry(String),
    /// The API server refused a request.
    #[error("request to the API server: {0}")]
    Api(#[from] kube::Error),
}

impl StepError {
    pub fn abandon(reason: DisruptionReason, message: impl Into<String>) -> Self {
        Self::Abandon { reason, message: message.into() }
    }
}
