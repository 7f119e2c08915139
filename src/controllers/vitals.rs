//! Gauges of every replica that change with time: ages of watches and turns, waiting pods, sizes of the tables.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::clock;
use crate::model::time::UnixMillis;
use crate::state::pods::Scheduling;
use crate::state::{Cluster, ClusterState};
use crate::sync::heartbeat::Heartbeats;
use crate::telemetry::Metrics;

/// How often the gauges are set.
const PERIOD: Duration = Duration::from_secs(5);

/// Runs until the process ends.
pub async fn run(cluster: Arc<Cluster>, heartbeats: Heartbeats, metrics: Metrics) {
    loop {
        record(&cluster, &heartbeats, &metrics, clock::now());
        tokio::time::sleep(PERIOD).await;
    }
}

fn record(cluster: &Cluster, heartbeats: &Heartbeats, metrics: &Metrics, now: UnixMillis) {
    for (kind, age, lists) in cluster.watch_signs().ages(now) {
        metrics.watch_age.with_label_values(&[kind]).set(age.as_secs_f64());
        let counter = metrics.watch_lists.with_label_values(&[kind]);
        counter.inc_by(lists.saturating_sub(counter.get()));
    }
    for (kind, panics) in cluster.watch_signs().panics().filter(|(_, panics)| *panics > 0) {
        let counter = metrics.loop_panics.with_label_values(&[kind]);
        counter.inc_by(panics.saturating_sub(counter.get()));
    }
    for turn in heartbeats.turns(Instant::now()) {
        metrics.loop_turn.with_label_values(&[turn.name]).set(turn.age.as_secs_f64());
    }
    let sizes = cluster.read().table_sizes();
    for (table, size) in sizes {
        metrics.state_objects.with_label_values(&[table]).set(i64::try_from(size).unwrap_or(i64::MAX));
    }
    let (count, oldest) = pending(&cluster.read(), now);
    metrics.pods_pending.set(i64::try_from(count).unwrap_or(i64::MAX));
    metrics.pods_pending_age.set(i64::try_from(oldest.as_secs()).unwrap_or(i64::MAX));
}

/// Number of pods that need a node, and the longest time since the scheduler rejected one of them.
fn pending(state: &ClusterState, now: UnixMillis) -> (usize, Duration) {
    let pods = state.unbound.iter().filter_map(|key| state.pods.get(key)).filter(|pod| pod.unschedulable());
    pods.fold((0, Duration::ZERO), |(count, oldest), pod| {
        let age = match &pod.scheduling {
            Scheduling::Unschedulable { since, .. } => now.saturating_since(*since),
            _ => Duration::ZERO,
        };
        (count + 1, oldest.max(age))
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::test_support::objects;

    #[test]
    fn the_gauges_show_the_age_of_watches_and_of_the_oldest_pending_pod() {
        let rejected = |at: &str| {
            json!({"status": {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable",
                "lastTransitionTime": at}]}})
        };
        let mut state = ClusterState::default();
        for (name, pod) in [
            ("a", rejected("1970-01-01T00:00:50Z")),
            ("b", rejected("1970-01-01T00:00:10Z")),
            ("bound", json!({"spec": {"nodeName": "x"}})),
        ] {
            state.apply_pod(&objects::pod(name, &pod), UnixMillis(1));
        }
        let (cluster, metrics) = (Cluster::new(state), Metrics::new());
        cluster.watch_signs().record_list("pods", UnixMillis(90_000));
        for _ in 0..2 {
            record(&cluster, &Heartbeats::default(), &metrics, UnixMillis(100_000));
        }
        assert_eq!((metrics.pods_pending.get(), metrics.pods_pending_age.get()), (2, 90));
        assert!((metrics.watch_age.with_label_values(&["pods"]).get() - 10.0).abs() < 1e-9);
        assert_eq!(metrics.state_objects.with_label_values(&["pods"]).get(), 3);
        assert_eq!(metrics.watch_lists.with_label_values(&["pods"]).get(), 1, "each list is counted once");
    }
}
