//! Sets the gauges that the leader has of NodePools, nodes and waiting pods.

use std::sync::Arc;
use std::time::Duration;

use prometheus::{GaugeVec, HistogramVec};
use stowage_model::time::UnixMillis;
use stowage_runtime::clock;
use stowage_runtime::sync::{heartbeat, lock};
use stowage_runtime::telemetry::controllers::ControllerMetrics;

use crate::controllers::context::Context;
use crate::controllers::preset::{preset, preset_pools};
use crate::decisions::gauges::{Gauges, Series};
use crate::decisions::provisioning::pending_zones::pending_by_zone;
use crate::decisions::staleness::Removal;
use crate::state::pod_progress::PodStage;

/// Often enough for scrapes, and as Karpenter.
const PERIOD: Duration = Duration::from_secs(5);

/// Labels of gauges without labels.
const NONE: [&str; 0] = [];
/// Value of the label `controller`.
const PROVISIONER: &str = "provisioner";

/// Runs until the process ends.
pub async fn run(ctx: Arc<Context>) {
    preset(&ctx.metrics);
    for histogram in of_pods(&ctx.metrics) {
        // An increase from nothing would not be seen.
        let _ = histogram.with_label_values(&NONE);
    }
    let mut before = Gauges::default();
    loop {
        before = pass(&ctx, &before, clock::now());
        heartbeat::rest(tokio::time::sleep(PERIOD)).await;
    }
}

/// Sets the gauges, and removes series that were there `before` and are not any more. Returns what is there.
fn pass(ctx: &Context, before: &Gauges, now: UnixMillis) -> Gauges {
    let (metrics, pools) = (&ctx.metrics, ctx.ready_pools());
    let (gauges, times, nodes, waiting, ignored) = {
        let state = ctx.cluster.read();
        preset_pools(metrics, &state.pools);
        let (holds, facts) = (ctx.derived.holds(&state, now), ctx.derived.facts(&state, &pools));
        let demand = ctx.derived.demand(&state, now);
        let unbound = state.unbound.iter().filter_map(|key| state.pods.get(key));
        let ignored = unbound.filter(|pod| pod.entry.is_err() && pod.active()).count();
        let waiting = demand.pending.len() + demand.displaced.len();
        let nodes = state.nodes.len() + state.in_flight.len();
        let pending_by_zone = pending_by_zone(&state, &demand);
        let gauges = Gauges { pending_by_zone, ..Gauges::of(&state, &holds, &facts, now) };
        (gauges, state.pod_times.take(), nodes, waiting, ignored)
    };
    let count = |number: usize| i64::try_from(number).unwrap_or(i64::MAX);
    observe_pods(metrics, &times);
    metrics.state_nodes.with_label_values(&NONE).set(count(nodes));
    metrics.queue_depth.with_label_values(&[PROVISIONER, ""]).set(count(waiting));
    metrics.ignored_pods.with_label_values(&NONE).set(count(ignored));
    // Pods that the last plan left out, and that have a node or are gone since, wait no more.
    let left_out = lock(&ctx.last_plan).as_ref().map_or(0, |plan| plan.left_out).min(waiting);
    metrics.unschedulable_pods.with_label_values(&[PROVISIONER]).set(count(left_out));
    let stale = Removal::Disruption.held_up_by(ctx.cluster.watch_signs(), now);
    metrics.state_synced.with_label_values(&NONE).set(stale.is_none().into());
    let age = stale.map_or(0.0, |stale| stale.age.as_secs_f64());
    metrics.state_unsynced_seconds.with_label_values(&NONE).set(age);
    replace(&metrics.pool_usage, &before.usage, &gauges.usage);
    replace(&metrics.pool_limit, &before.limits, &gauges.limits);
    replace(&metrics.pool_allowed, &before.allowed, &gauges.allowed);
    replace(&metrics.pool_consuming, &before.consuming, &gauges.consuming);
    replace(&metrics.pool_cost, &before.cost, &gauges.cost);
    replace(&metrics.usd_per_hour, &before.usd_per_hour, &gauges.usd_per_hour);
    replace(&metrics.pending_by_zone, &before.pending_by_zone, &gauges.pending_by_zone);
    replace(&metrics.eligible_nodes, &before.eligible, &gauges.eligible);
    replace(&metrics.utilization, &before.utilization, &gauges.utilization);
    gauges
}

/// Histograms of the times of pods.
fn of_pods(metrics: &ControllerMetrics) -> [&HistogramVec; 4] {
    [
        &metrics.pods_decision_seconds,
        &metrics.pods_bound_seconds,
        &metrics.pods_planned_bound_seconds,
        &metrics.pods_planned_startup_seconds,
    ]
}

/// Observes what pods have come to.
fn observe_pods(metrics: &ControllerMetrics, times: &[(PodStage, Duration)]) {
    for (stage, time) in times {
        let [decision, bound, planned_bound, planned_startup] = of_pods(metrics);
        let histogram = match stage {
            PodStage::Startup => {
                metrics.pods_startup_seconds.observe(&NONE, *time);
                continue;
            }
            PodStage::Decision => decision,
            PodStage::Bound => bound,
            PodStage::PlannedToBound => planned_bound,
            PodStage::PlannedToStartup => planned_startup,
        };
        histogram.with_label_values(&NONE).observe(time.as_secs_f64());
    }
}

/// Sets the series of a gauge, and removes those that are not there any more.
fn replace<const N: usize>(gauge: &GaugeVec, before: &Series<N>, now: &Series<N>) {
    for (labels, value) in now {
        gauge.with_label_values(labels).set(*value);
    }
    for labels in before.keys().filter(|labels| !now.contains_key(*labels)) {
        // An error: there is no such series.
        let _ = gauge.remove_label_values(&labels.each_ref().map(String::as_str));
    }
}

#[cfg(test)]
mod tests {
    use stowage_runtime::telemetry::Metrics;
    use stowage_runtime::telemetry::metric::register;
    use stowage_runtime::telemetry::registry;

    use super::*;

    #[test]
    fn a_replica_that_does_not_lead_shows_no_gauge_of_the_cluster() {
        let metrics = Metrics::new();
        let own = ControllerMetrics::new(metrics.registry()).unwrap();
        let shown = || metrics.text().unwrap().contains("karpenter_cluster_state_");
        assert!(!shown());
        own.state_synced.with_label_values(&NONE).set(1);
        assert!(shown());
    }

    #[test]
    fn the_times_of_pods_are_observed_by_stage() {
        let metrics = Metrics::new();
        let own = ControllerMetrics::new(metrics.registry()).unwrap();
        let stages = [
            PodStage::Decision,
            PodStage::Bound,
            PodStage::Startup,
            PodStage::PlannedToBound,
            PodStage::PlannedToStartup,
        ];
        let seconds = [1, 2, 3, 4, 5].map(Duration::from_secs);
        observe_pods(&own, &std::iter::zip(stages, seconds).collect::<Vec<_>>());
        let text = metrics.text().unwrap();
        for (name, seconds) in [
            ("scheduling_decision", 1),
            ("bound", 2),
            ("startup", 3),
            ("provisioning_bound", 4),
            ("provisioning_startup", 5),
        ] {
            let line = format!("karpenter_pods_{name}_duration_seconds_sum {seconds}");
            assert!(text.lines().any(|have| have == line), "{line} in\n{text}");
        }
    }

    #[test]
    fn series_of_what_is_gone_are_removed() {
        let metrics = Metrics::new();
        let gauge = register(metrics.registry(), registry::NODEPOOLS_USAGE.float_gauges()).unwrap();
        let series = |pools: &[&str]| -> Series<2> {
            pools.iter().map(|pool| (["cpu".to_owned(), (*pool).to_owned()], 1.0)).collect()
        };
        replace(&gauge, &series(&[]), &series(&["a", "b"]));
        replace(&gauge, &series(&["a", "b"]), &series(&["b", "c"]));
        let text = metrics.text().unwrap();
        let shown: Vec<&str> = text.lines().filter(|line| line.starts_with("karpenter_nodepools_usage{")).collect();
        assert_eq!(
            shown,
            [
                "karpenter_nodepools_usage{nodepool=\"b\",resource_type=\"cpu\"} 1",
                "karpenter_nodepools_usage{nodepool=\"c\",resource_type=\"cpu\"} 1",
            ]
        );
    }
}
