//! Metrics of the reconcilers.

use prometheus::{Histogram, HistogramOpts, IntCounter, IntCounterVec, Opts, Registry};

/// Metrics of the reconcilers, all prefixed `stowage_`.
#[derive(Clone, Debug)]
pub struct ControllerMetrics {
    /// Time to make a plan, seconds.
    pub plan_seconds: Histogram,
    /// Plans that ended in a panic of the core.
    pub plans_failed: IntCounter,
    /// From the first sight of a rejected pod to its NodeClaim, seconds.
    pub detect_to_claim_seconds: Histogram,
    /// NodeClaims written, by reason, NodePool and whether `minValues` were lowered.
    pub claims_created: IntCounterVec,
    /// NodeClaims taken away, by reason, NodePool, capacity type, consolidation policy and termination mode.
    pub claims_disrupted: IntCounterVec,
    /// Time of a launch call, seconds.
    pub launch_seconds: Histogram,
    /// Nodes that registered.
    pub nodes_registered: IntCounter,
    /// Nominations written.
    pub nominations: IntCounter,
    /// Holds that ended, by result: planned, elsewhere, released.
    pub holds_ended: IntCounterVec,
    /// Evictions asked for, by result: ok, refused.
    pub evictions: IntCounterVec,
    /// Messages of the interruption queue, by kind.
    pub interruption_messages: IntCounterVec,
    /// Troubles of instances that the cloud tells of, by category, each once until it is over.
    pub instances_unhealthy: IntCounterVec,
    /// Things found without their counterpart, by kind: instance, nodeclaim, node.
    pub garbage_collected: IntCounterVec,
}

impl ControllerMetrics {
    /// Makes and registers them.
    ///
    /// # Errors
    /// Where a name is registered already.
    pub fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let histogram = |name: &str, help: &str, buckets: &[f64]| {
            Histogram::with_opts(HistogramOpts::new(name, help).buckets(buckets.to_vec()))
        };
        let seconds = [0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0];
        let by_all = |name: &str, help: &str, labels: &[&str]| IntCounterVec::new(Opts::new(name, help), labels);
        let by = |name: &str, help: &str, label: &str| by_all(name, help, &[label]);
        let out = Self {
            plan_seconds: histogram("stowage_plan_seconds", "Time to make a plan", &seconds)?,
            plans_failed: IntCounter::new("stowage_plans_failed_total", "Plans that failed by a defect")?,
            detect_to_claim_seconds: histogram(
                "stowage_detect_to_claim_seconds",
                "From the first sight of a rejected pod to its NodeClaim",
                &seconds,
            )?,
            claims_created: by_all(
                "stowage_nodeclaims_created_total",
                "NodeClaims written",
                &["reason", "nodepool", "min_values_relaxed"],
            )?,
            claims_disrupted: by_all(
                "stowage_nodeclaims_disrupted_total",
                "NodeClaims taken away",
                &["reason", "nodepool", "capacity_type", "consolidation_policy", "termination_mode"],
            )?,
            launch_seconds: histogram("stowage_launch_seconds", "Time of a launch call", &seconds)?,
            nodes_registered: IntCounter::new("stowage_nodes_registered_total", "Nodes that registered")?,
            nominations: IntCounter::new("stowage_nominations_total", "Nominations written")?,
            holds_ended: by("stowage_holds_ended_total", "Holds that ended", "result")?,
            evictions: by("stowage_evictions_total", "Evictions asked for", "result")?,
            interruption_messages: by(
                "stowage_interruption_messages_total",
                "Messages of the interruption queue",
                "kind",
            )?,
            instances_unhealthy: by(
                "stowage_interruption_instance_status_unhealthy_total",
                "Troubles of instances that the cloud tells of",
                "category",
            )?,
            garbage_collected: by("stowage_garbage_collected_total", "Things without their counterpart", "kind")?,
        };
        let all: Vec<Box<dyn prometheus::core::Collector>> = vec![
            Box::new(out.plan_seconds.clone()),
            Box::new(out.plans_failed.clone()),
            Box::new(out.detect_to_claim_seconds.clone()),
            Box::new(out.claims_created.clone()),
            Box::new(out.claims_disrupted.clone()),
            Box::new(out.launch_seconds.clone()),
            Box::new(out.nodes_registered.clone()),
            Box::new(out.nominations.clone()),
            Box::new(out.holds_ended.clone()),
            Box::new(out.evictions.clone()),
            Box::new(out.interruption_messages.clone()),
            Box::new(out.instances_unhealthy.clone()),
            Box::new(out.garbage_collected.clone()),
        ];
        for collector in all {
            registry.register(collector)?;
        }
        Ok(out)
    }
}
