use std::sync::Arc;

use prometheus::IntCounterVec;
use prometheus::core::Collector;
use serde_json::json;
use stowage_runtime::telemetry::Metrics;
use stowage_runtime::telemetry::controllers::ControllerMetrics;
use stowage_test_objects as objects;

use super::*;
use crate::decisions::placement::mode::PlacementMode;
use crate::test_support::kubernetes::FakeApi;
use crate::test_support::scripted_cloud::FakeCloud;

fn claim(grace: Option<&str>, annotations: &serde_json::Value) -> NodeClaim {
    let own = json!({(labels::NODE_POOL): "p", (labels::CAPACITY_TYPE): "spot"});
    let meta = json!({"labels": own, "annotations": annotations});
    objects::claim("c", &json!({"metadata": meta, "spec": {"terminationGracePeriod": grace}}))
}

fn pool(policy: &str) -> NodePool {
    objects::node_pool("p", &json!({"spec": {"disruption": {"consolidationPolicy": policy}}}))
}

#[test]
fn a_disrupted_claim_is_counted_with_karpenters_labels() {
    for (reason, policy, grace, expected) in [
        (DisruptionReason::Empty, "WhenEmpty", None, ["empty", "when_empty", "graceful"]),
        (DisruptionReason::Underutilized, "Balanced", Some("1h"), ["underutilized", "balanced", "eventual"]),
        (
            DisruptionReason::Underutilized,
            "WhenEmptyOrUnderutilized",
            Some("0s"),
            ["underutilized", "when_empty_or_underutilized", "forceful"],
        ),
        (DisruptionReason::Drifted, "WhenEmpty", None, ["drifted", "", "graceful"]),
        (DisruptionReason::Expired, "WhenEmpty", None, ["expired", "", "graceful"]),
        (DisruptionReason::SpotInterruption, "WhenEmpty", None, ["spot_interrupted", "", "graceful"]),
        (
            DisruptionReason::CapacityReservationInterruption,
            "WhenEmpty",
            None,
            ["capacity_reservation_interrupted", "", "graceful"],
        ),
        (DisruptionReason::ScheduledChange, "WhenEmpty", None, ["scheduled_change", "", "graceful"]),
        (DisruptionReason::InsufficientCapacity, "WhenEmpty", None, ["insufficient_capacity", "", "graceful"]),
    ] {
        let found = disrupted(&claim(grace, &json!({})), Some(&pool(policy)), reason);
        let [reason, policy, mode] = expected;
        assert_eq!(found, [reason, "p", "spot", policy, mode]);
    }
    let bare = NodeClaim { metadata: kube::api::ObjectMeta::default(), ..claim(None, &json!({})) };
    assert_eq!(disrupted(&bare, None, DisruptionReason::Empty), ["empty", "", "", "", "graceful"], "without its pool");
}

#[test]
fn a_new_claim_is_counted_by_whether_its_min_values_were_relaxed() {
    for (annotations, relaxed) in [
        (json!({}), "false"),
        (json!({(labels::MIN_VALUES_RELAXED): "false"}), "false"),
        (json!({(labels::MIN_VALUES_RELAXED): "true"}), "true"),
    ] {
        assert_eq!(created(&claim(None, &annotations), None), ["provisioned", "p", relaxed]);
    }
    let replacement = created(&claim(None, &json!({})), Some(DisruptionReason::Drifted));
    assert_eq!(replacement, ["drifted", "p", "false"]);
}

#[tokio::test]
async fn what_ends_is_counted_with_its_times() {
    let ctx = FakeApi::default().context(Arc::new(FakeCloud::default()), PlacementMode::Extender);
    let at = |seconds: i64| UnixMillis(seconds * 1_000).rfc3339();
    let zoned = json!({(labels::NODE_POOL): "p", (labels::CAPACITY_TYPE): "spot", (labels::ZONE): "z"});
    let condition = json!({"type": INSTANCE_TERMINATING, "status": "True", "reason": "r", "message": "", "lastTransitionTime": at(130)});
    let marked = json!({(labels::DISRUPTING): "Empty/"});
    let ended = objects::claim(
        "c",
        &json!({"metadata": {"labels": zoned, "annotations": marked, "deletionTimestamp": at(100)}, "status": {"conditions": [condition]}}),
    );
    let node = objects::node(
        "n",
        &json!({"metadata": {"labels": zoned, "creationTimestamp": at(40), "deletionTimestamp": at(110)}}),
    );
    let bare = claim(None, &json!({}));
    let now = UnixMillis(150_000);
    count_registered(&ctx, &ended);
    count_drained(&ctx, &ended);
    count_terminated_node(&ctx, &node, now);
    count_terminated(&ctx, &ended, now);
    count_terminated(&ctx, &bare, now);
    count_pods_drained(&ctx, &ended, 3);
    count_pods_drained(&ctx, &bare, 2);
    let metrics = &ctx.metrics;
    let counted = |counters: &IntCounterVec, labels: &[&str]| counters.with_label_values(labels).get();
    assert_eq!(counted(&metrics.nodes_created, &["p", "z"]), 1);
    assert_eq!(counted(&metrics.nodes_drained, &["p"]), 1);
    assert_eq!(counted(&metrics.nodes_terminated, &["p", "z"]), 1);
    assert_eq!(counted(&metrics.claims_terminated, &["p", "spot", "z"]), 1);
    assert_eq!(counted(&metrics.claims_terminated, &["p", "spot", ""]), 1, "of a claim without instance");
    assert_eq!(counted(&metrics.pods_drained, &["Empty"]), 3);
    assert_eq!(counted(&metrics.pods_drained, &["Forceful Termination"]), 2);
    for (seconds, expected) in [
        (&metrics.nodes_lifetime_seconds, 110.0),
        (&metrics.claims_termination_seconds, 50.0),
        (&metrics.instance_termination_seconds, 20.0),
    ] {
        let of_pool = seconds.with_label_values(&["p"]);
        assert_eq!((of_pool.get_sample_count(), of_pool.get_sample_sum().round()), (1, expected));
    }
    let terminations = metrics.nodes_termination_seconds.collect();
    let summary = terminations[0].get_metric()[0].get_summary();
    assert_eq!((summary.sample_count(), summary.sample_sum().round()), (1, 40.0));
}

#[tokio::test]
async fn a_node_that_does_not_register_is_counted_in_a_series_that_is_there_before() {
    let ctx = FakeApi::default().context(Arc::new(FakeCloud::default()), PlacementMode::Extender);
    let metrics = &ctx.metrics;
    let series = || -> BTreeMap<String, f64> {
        let families = metrics.claims_disrupted.collect();
        let of = |series: &prometheus::proto::Metric| {
            let values: Vec<_> = series.get_label().iter().map(prometheus::proto::LabelPair::value).collect();
            (values.join(" "), series.get_counter().get_value())
        };
        families[0].get_metric().iter().map(of).collect()
    };
    let zoned = json!({(labels::NODE_POOL): "p", (labels::CAPACITY_TYPE): "spot", (labels::ZONE): "z"});
    let created = objects::claim("c", &json!({"metadata": {"labels": {(labels::NODE_POOL): "p"}}}));
    count_created(&ctx, &created, None);
    assert_eq!(series(), [("  p launch_timeout graceful".to_owned(), 0.0)].into());
    preset_launched(&ctx, &created, &serde_json::from_value(zoned.clone()).unwrap());
    assert_eq!(metrics.nodes_created.with_label_values(&["p", "z"]).get(), 0);
    let launched = objects::claim("c", &json!({"metadata": {"labels": zoned}}));
    let before = series();
    count_disrupted(&ctx, &created, DisruptionReason::LaunchTimeout);
    for reason in [DisruptionReason::RegistrationTimeout, DisruptionReason::InitializationTimeout] {
        count_disrupted(&ctx, &launched, reason);
    }
    assert!(before.len() == 3 && before.values().all(|count| *count == 0.0), "{before:?}");
    assert_eq!(series(), before.into_keys().map(|series| (series, 1.0)).collect());
}

#[tokio::test]
async fn the_pods_of_a_disrupted_claim_that_need_another_node_are_counted() {
    let ctx = FakeApi::default().context(Arc::new(FakeCloud::default()), PlacementMode::Extender);
    let claim = objects::claim(
        "c",
        &json!({"metadata": {"labels": {(labels::NODE_POOL): "p"}}, "status": objects::launched("i-1", &[])}),
    );
    let owner = json!([{"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "d", "uid": "d", "controller": true}]);
    ctx.cluster.update(|state| {
        state.apply_claim(claim.clone());
        state.apply_node(objects::node("n1", &json!({"spec": {"providerID": "aws:///z/i-1"}})));
        for (name, patch) in [
            ("a", json!({})),
            ("b", json!({})),
            ("daemon", json!({"metadata": {"ownerReferences": owner}})),
            ("done", json!({"status": {"phase": "Succeeded"}})),
        ] {
            let mut pod = objects::pod(name, &patch);
            pod.spec.as_mut().unwrap().node_name = Some("n1".into());
            state.apply_pod(&pod, UnixMillis(1));
        }
    });
    count_disrupted(&ctx, &claim, DisruptionReason::Drifted);
    let labels = ["drifted", "p", "", "", "graceful"];
    assert_eq!(ctx.metrics.claims_disrupted.with_label_values(&labels).get(), 1);
    assert_eq!(ctx.metrics.pods_disrupted.with_label_values(&labels).get(), 2);
}

/// A node with 2 CPUs and 4 GiB, and a pod that requests a quarter of the CPUs, is removed.
#[tokio::test]
async fn the_removal_of_a_node_counts_what_it_saves_and_how_full_it_was() {
    let record = |usd: f64| {
        json!({(labels::MOVE): json!({"id": "m", "at": "2026-01-01T00:00:00Z", "give_up": "2026-01-01T00:00:00Z",
        "sources": ["c", "d"], "usd_per_hour": usd}).to_string()})
    };
    let price = |text: &str| json!({(labels::USD_PER_HOUR): text});
    for (annotations, reason, saved) in [
        (price("0.25"), DisruptionReason::Empty, 0.25),
        (price("free"), DisruptionReason::Empty, 0.0),
        (json!({}), DisruptionReason::Empty, 0.0),
        (record(0.5), DisruptionReason::Underutilized, 0.25),
        (record(-0.5), DisruptionReason::Underutilized, 0.0),
        (price("0.25"), DisruptionReason::Underutilized, 0.0),
        (price("0.25"), DisruptionReason::Drifted, 0.0),
    ] {
        let ctx = FakeApi::default().context(Arc::new(FakeCloud::default()), PlacementMode::Extender);
        let meta = json!({"labels": {(labels::NODE_POOL): "p"}, "annotations": annotations});
        let claim = objects::claim("c", &json!({"metadata": meta, "status": objects::launched("i-1", &[])}));
        ctx.cluster.update(|state| {
            state.apply_claim(claim.clone());
            let size = json!({"cpu": "2", "memory": "4Gi", "pods": "10"});
            let node =
                json!({"spec": {"providerID": "aws:///z/i-1"}, "status": {"allocatable": size, "capacity": size}});
            state.apply_node(objects::node("n1", &node));
            let requests = json!({"requests": {"cpu": "500m"}});
            let spec = json!({"nodeName": "n1", "containers": [{"name": "c", "resources": requests}]});
            state.apply_pod(&objects::pod("a", &json!({"spec": spec})), UnixMillis(1));
        });
        count_disrupted(&ctx, &claim, reason);
        let counted = ctx.metrics.saved.with_label_values(&["p", reason.metric_label()]).get();
        assert!((counted - saved).abs() < 1e-9, "{annotations}, {}: {counted}", reason.as_str());
        for (resource, share) in [("cpu", 0.25), ("memory", 0.0)] {
            let observed = ctx.metrics.disrupted_utilization.with_label_values(&["p", resource]);
            assert_eq!(observed.get_sample_count(), 1);
            assert!((observed.get_sample_sum() - share).abs() < 1e-9, "{resource}");
        }
    }
}

#[test]
fn the_values_match_the_label_names() {
    let all = Metrics::new();
    let metrics = ControllerMetrics::new(all.registry()).unwrap();
    let claim = claim(None, &json!({}));
    metrics.claims_created.with_label_values(&created(&claim, None)).inc();
    metrics
        .claims_disrupted
        .with_label_values(&disrupted(&claim, Some(&pool("WhenEmpty")), DisruptionReason::Empty))
        .inc();
    let text = all.text().unwrap();
    for line in [
        "stowage_nodeclaims_created_total{min_values_relaxed=\"false\",nodepool=\"p\",reason=\"provisioned\"} 1",
        "stowage_nodeclaims_disrupted_total{capacity_type=\"spot\",consolidation_policy=\"when_empty\",nodepool=\"p\",\
         reason=\"empty\",termination_mode=\"graceful\"} 1",
    ] {
        assert!(text.lines().any(|have| have == line), "{line} in\n{text}");
    }
}
