//! EC2 metrics.

pub mod metrics;
