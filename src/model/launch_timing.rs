//! How long a launch may take: limits that the launches of a cloud and the lifecycle of NodeClaims must agree on.

use std::time::Duration;

/// Maximum time without a byte of the response to a launch call: EC2 responds when the instances are allocated, which takes minutes
/// for large requests and under stress.
pub const LAUNCH_CALL_TIMEOUT: Duration = Duration::from_mins(4);
/// A claim that is not launched after this time is abandoned (Karpenter core reference 5.5). A call that is in flight then is awaited.
pub const LAUNCH_TIMEOUT: Duration = Duration::from_mins(5);
/// How long an allocation for a launch without a result is kept: a call that timed out is repeated, and the repetition may begin just
/// before [`LAUNCH_TIMEOUT`].
pub const MAX_LAUNCH_DURATION: Duration = Duration::from_mins(10);

// A call that times out is repeated with the same token before its claims are abandoned; otherwise its instances would be lost.
const _: () = assert!(LAUNCH_CALL_TIMEOUT.as_secs() + 30 < LAUNCH_TIMEOUT.as_secs());
const _: () = assert!(LAUNCH_CALL_TIMEOUT.as_secs() + LAUNCH_TIMEOUT.as_secs() < MAX_LAUNCH_DURATION.as_secs());
