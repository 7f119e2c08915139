//! EC2 metrics, and the optional AWS APIs that are unavailable now.

pub mod degraded_apis;
pub mod metrics;
