//! Metrics of the reconcilers.

use prometheus::{Histogram, HistogramVec, IntCounter, IntCounterVec, IntGaugeVec, Registry};

use crate::telemetry::registry::{self as declared, register};

/// Metrics of the reconcilers; [`declared`] describes each metric and its labels.
#[derive(Clone, Debug)]
pub struct ControllerMetrics {
    pub plan_seconds: Histogram,
    pub scheduling_seconds: HistogramVec,
    pub plans_failed: IntCounter,
    pub pods_quarantined: IntGaugeVec,
    pub purchased_in_vain: IntCounterVec,
    pub supply_quarantined: IntGaugeVec,
    pub claims_rejected: IntCounterVec,
    pub detect_to_claim_seconds: Histogram,
    pub pod_wait_seconds: HistogramVec,
    pub claims_created: IntCounterVec,
    pub claims_disrupted: IntCounterVec,
    pub claims_unhealthy: IntCounterVec,
    pub claims_terminated: IntCounterVec,
    pub claims_termination_seconds: HistogramVec,
    pub instance_termination_seconds: HistogramVec,
    pub nodes_created: IntCounterVec,
    pub nodes_terminated: IntCounterVec,
    pub nodes_drained: IntCounterVec,
    pub nodes_lifetime_seconds: HistogramVec,
    pub steps_panicked: IntCounter,
    pub nominations: IntCounter,
    pub holds_ended: IntCounterVec,
    pub pods_planned_unattempted: IntCounterVec,
    pub eviction_requests: IntCounterVec,
    pub pods_drained: IntCounterVec,
    pub evictions: IntCounterVec,
    pub instances_unhealthy: IntCounterVec,
    pub garbage_collected: IntCounterVec,
    pub stale_decisions: IntCounterVec,
    pub drains_resumed: IntCounter,
    pub cloud_starts_failed: IntCounter,
    pub messages_refused: IntCounterVec,
    pub paused: IntGaugeVec,
    pub capped: IntCounterVec,
    pub consolidation_nodes: IntGaugeVec,
    pub consolidation_moves: IntCounterVec,
    pub consolidation_score: HistogramVec,
}

impl ControllerMetrics {
    /// Creates and registers the collectors.
    ///
    /// # Errors
    /// A metric with the same name is already registered.
    pub fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        Ok(Self {
            plan_seconds: register(registry, declared::PLAN_SECONDS.histogram())?,
            scheduling_seconds: register(registry, declared::SCHEDULING_SECONDS.histograms())?,
            plans_failed: register(registry, declared::PLANS_FAILED.counter())?,
            pods_quarantined: register(registry, declared::PODS_QUARANTINED.gauges())?,
            purchased_in_vain: register(registry, declared::PURCHASED_IN_VAIN.counters())?,
            supply_quarantined: register(registry, declared::SUPPLY_QUARANTINED.gauges())?,
            claims_rejected: register(registry, declared::NODECLAIMS_REJECTED.counters())?,
            detect_to_claim_seconds: register(registry, declared::DETECT_TO_CLAIM_SECONDS.histogram())?,
            pod_wait_seconds: register(registry, declared::POD_WAIT_SECONDS.histograms())?,
            claims_created: register(registry, declared::NODECLAIMS_CREATED.counters())?,
            claims_disrupted: register(registry, declared::NODECLAIMS_DISRUPTED.counters())?,
            claims_unhealthy: register(registry, declared::NODECLAIMS_UNHEALTHY_DISRUPTED.counters())?,
            steps_panicked: register(registry, declared::STEPS_PANICKED.counter())?,
            claims_terminated: register(registry, declared::NODECLAIMS_TERMINATED.counters())?,
            claims_termination_seconds: register(registry, declared::NODECLAIMS_TERMINATION_SECONDS.histograms())?,
            instance_termination_seconds: register(registry, declared::INSTANCE_TERMINATION_SECONDS.histograms())?,
            nodes_created: register(registry, declared::NODES_CREATED.counters())?,
            nodes_terminated: register(registry, declared::NODES_TERMINATED.counters())?,
            nodes_drained: register(registry, declared::NODES_DRAINED.counters())?,
            nodes_lifetime_seconds: register(registry, declared::NODES_LIFETIME_SECONDS.histograms())?,
            nominations: register(registry, declared::NOMINATIONS.counter())?,
            holds_ended: register(registry, declared::HOLDS_ENDED.counters())?,
            pods_planned_unattempted: register(registry, declared::PODS_PLANNED_UNATTEMPTED.counters())?,
            eviction_requests: register(registry, declared::EVICTION_REQUESTS.counters())?,
            pods_drained: register(registry, declared::PODS_DRAINED.counters())?,
            evictions: register(registry, declared::EVICTIONS.counters())?,
            instances_unhealthy: register(registry, declared::INSTANCES_UNHEALTHY.counters())?,
            garbage_collected: register(registry, declared::GARBAGE_COLLECTED.counters())?,
            stale_decisions: register(registry, declared::STALE_DECISIONS.counters())?,
            drains_resumed: register(registry, declared::DRAINS_RESUMED.counter())?,
            cloud_starts_failed: register(registry, declared::CLOUD_STARTS_FAILED.counter())?,
            messages_refused: register(registry, declared::MESSAGES_REFUSED.counters())?,
            paused: register(registry, declared::PAUSED.gauges())?,
            capped: register(registry, declared::RATE_CAPPED.counters())?,
            consolidation_nodes: register(registry, declared::CONSOLIDATION_NODES.gauges())?,
            consolidation_moves: register(registry, declared::CONSOLIDATION_MOVES.counters())?,
            consolidation_score: register(registry, declared::CONSOLIDATION_SCORE.histograms())?,
        })
    }
}
