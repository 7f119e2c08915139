//! What Stowage tells about itself: metrics, events, logs.

pub mod cloud;
pub mod controllers;
pub mod metrics;

pub use crate::telemetry::metrics::Metrics;
