//! Metrics: their registry, and the structs that hold the collectors. Imports nothing of the crate but `sync`.

pub mod buckets;
pub mod cloud_metrics;
pub mod condition_series;
pub mod controllers;
pub mod metric;
pub mod metrics;
pub mod registry;
pub mod series;
pub mod summary;

pub use crate::telemetry::metrics::Metrics;
