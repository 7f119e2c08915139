//! The wall clock. This is the only module that reads it: pure modules get the time as an argument.

use crate::model::time::UnixMillis;

/// The current time.
pub fn now() -> UnixMillis {
    UnixMillis(k8s_openapi::jiff::Timestamp::now().as_millisecond())
}
