//! EC2 metrics.

pub mod metrics;
pub mod recording;
