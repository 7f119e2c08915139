//! The wall clock. This is the only module that reads it: pure modules get the time as an argument.

use k8s_openapi::jiff::Timestamp;

use crate::model::time::UnixMillis;

/// The current time.
pub fn now() -> UnixMillis {
    UnixMillis(timestamp().as_millisecond())
}

/// The current time in full resolution, for fields of the Kubernetes API.
pub fn timestamp() -> Timestamp {
    Timestamp::now()
}
