//! Metrics of the conditions of a kind of objects, with the names of Karpenter's library.

use prometheus::{HistogramVec, IntCounterVec, Registry};

use crate::telemetry::metric::{Metric, register};

/// Counters and durations; the gauges are made at each scrape.
#[derive(Clone, Debug)]
pub struct ConditionMetrics {
    pub transitions: IntCounterVec,
    pub transition_seconds: HistogramVec,
    pub termination_seconds: HistogramVec,
}

impl ConditionMetrics {
    pub(super) fn new(
        registry: &Registry,
        transitions: &Metric,
        transition_seconds: &Metric,
        termination_seconds: &Metric,
    ) -> Result<Self, prometheus::Error> {
        Ok(Self {
            transitions: register(registry, transitions.counters())?,
            transition_seconds: register(registry, transition_seconds.histograms())?,
            termination_seconds: register(registry, termination_seconds.histograms())?,
        })
    }
}
