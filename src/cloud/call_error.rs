//! Errors of cloud calls other than launches.

/// A cloud call that failed; [`crate::LaunchError`] is the error of launches.
#[derive(Debug, thiserror::Error, Clone, PartialEq)]
pub enum CloudError {
    /// The API throttled the call.
    #[error("request rate exceeded, retry with backoff")]
    Throttled,
    /// The controller lacks a permission: a retry succeeds only after its policy changes.
    #[error("{0}")]
    Refused(String),
    #[error("{0}")]
    Other(String),
}

/// The text of an error without the encoded authorization details, which EC2 encrypts differently in each response.
pub fn without_encoded_details(text: &str) -> &str {
    text.split_once("Encoded authorization failure message").map_or(text, |(stable, _)| stable).trim_end()
}
