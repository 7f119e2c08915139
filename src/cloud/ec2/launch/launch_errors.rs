//! Errors of AWS calls as errors of launches.

use crate::LaunchError;
use crate::ec2::aws::errors::{ApiError, Class};

/// The error of a call whose effect is unknown: an instance may have been launched, so retry with the same token.
pub fn no_response(error: &ApiError) -> LaunchError {
    match error.class {
        Class::Throttled => LaunchError::Throttled,
        _ => LaunchError::Other { reason: error.launch_event().reason(), message: error.to_string() },
    }
}

/// The error of a call that EC2 rejected, so that nothing was launched. The effect of a transient error is unknown.
pub fn refused(error: &ApiError) -> LaunchError {
    if error.is_transient() {
        return no_response(error);
    }
    LaunchError::Rejected { event: error.launch_event(), message: error.to_string() }
}
