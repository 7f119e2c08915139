//! How often a request to the API server is repeated that the server rejects because of its load (429, 503, 504).

use std::time::Duration;

use kube::client::retry::RetryPolicy;

/// First and longest wait before a repetition; the wait doubles. `Retry-After` of the response counts where it is longer.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(5));
/// Repetitions of a request. Their waits add up to three seconds: a spot interruption leaves two minutes, and every controller
/// repeats its failed steps by itself.
const RETRIES: u32 = 6;

/// The policy of every client that repeats requests.
pub fn retry_policy() -> RetryPolicy {
    RetryPolicy::new(BACKOFF.0, BACKOFF.1, RETRIES, true).expect("the first wait is the shorter one")
}
