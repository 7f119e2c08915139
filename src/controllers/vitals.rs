//! Gauges of every replica that change with time: ages of watches and turns, waiting pods, sizes of the tables.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use stowage_model::time::UnixMillis;
use stowage_runtime::clock;
use stowage_runtime::sync::heartbeat::Heartbeats;
use stowage_runtime::telemetry::Metrics;

use crate::decisions::disruption::mark::DisruptionMark;
use crate::state::pods::Scheduling;
use crate::state::{Cluster, ClusterState};

/// How often the gauges are set.
const PERIOD: Duration = Duration::from_secs(5);

/// Runs until the process ends.
pub async fn run(cluster: Arc<Cluster>, heartbeats: Heartbeats, metrics: Metrics) {
    let mut reasons = BTreeSet::new();
    loop {
        record(&cluster, &heartbeats, &metrics, &mut reasons, clock::now());
        tokio::time::sleep(PERIOD).await;
    }
}

/// Sets the gauges. `reasons` are those of nodes that left before: their gauges are set to zero.
fn record(
    cluster: &Cluster,
    heartbeats: &Heartbeats,
    metrics: &Metrics,
    reasons: &mut BTreeSet<&'static str>,
    now: UnixMillis,
) {
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
    let (counts, oldest) = leaving(&cluster.read(), now);
    reasons.extend(counts.keys());
    for reason in reasons.iter() {
        metrics.nodes_leaving.with_label_values(&[reason]).set(counts.get(reason).copied().unwrap_or(0));
    }
    metrics.nodes_leaving_age.set(i64::try_from(oldest.as_secs()).unwrap_or(i64::MAX));
}

/// Number of NodeClaims that leave, by reason, and the longest time since one of them was deleted.
fn leaving(state: &ClusterState, now: UnixMillis) -> (BTreeMap<&'static str, i64>, Duration) {
    let (mut counts, mut oldest) = (BTreeMap::new(), Duration::ZERO);
    for claim in state.claim_index.leaving.iter().filter_map(|name| state.claims.get(name)) {
        let reason = DisruptionMark::of(claim).map_or("deleted", |mark| mark.reason.metric_label());
        *counts.entry(reason).or_default() += 1;
        if let Some(at) = &claim.metadata.deletion_timestamp {
            oldest = oldest.max(now.saturating_since(UnixMillis::from(at)));
        }
    }
    (counts, oldest)
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
    use stowage_test_objects as objects;

    use super::*;

    #[test]
    fn leaving_nodes_are_counted_by_reason() {
        let mut state = ClusterState::default();
        let deleted = |at: &str| json!({"deletionTimestamp": at, "finalizers": ["f"]});
        let mut drifted = deleted("1970-01-01T00:00:30Z");
        drifted["annotations"] = json!({"stowage.dev/disrupting": "Drifted/"});
        for (name, meta) in [
            ("a", deleted("1970-01-01T00:00:10Z")),
            ("b", drifted),
            ("c", json!({"annotations": {"stowage.dev/disrupting": "Drifted/"}})),
            ("stays", json!({})),
        ] {
            state.apply_claim(objects::claim(name, &json!({"metadata": meta})));
        }
        let (cluster, metrics) = (Cluster::new(state), Metrics::new());
        let mut reasons = BTreeSet::new();
        record(&cluster, &Heartbeats::default(), &metrics, &mut reasons, UnixMillis(100_000));
        let count = |reason: &str| metrics.nodes_leaving.with_label_values(&[reason]).get();
        assert_eq!((count("deleted"), count("drifted"), metrics.nodes_leaving_age.get()), (1, 2, 90));
        cluster.update(|state| state.delete_claim("a"));
        record(&cluster, &Heartbeats::default(), &metrics, &mut reasons, UnixMillis(100_000));
        assert_eq!((count("deleted"), metrics.nodes_leaving_age.get()), (0, 70), "it is gone");
    }

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
            record(&cluster, &Heartbeats::default(), &metrics, &mut BTreeSet::new(), UnixMillis(100_000));
        }
        assert_eq!((metrics.pods_pending.get(), metrics.pods_pending_age.get()), (2, 90));
        assert!((metrics.watch_age.with_label_values(&["pods"]).get() - 10.0).abs() < 1e-9);
        assert_eq!(metrics.state_objects.with_label_values(&["pods"]).get(), 3);
        assert_eq!(metrics.watch_lists.with_label_values(&["pods"]).get(), 1, "each list is counted once");
    }
}
