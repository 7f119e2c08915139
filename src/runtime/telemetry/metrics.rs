//! The serving metrics, and the Prometheus registry of all families.

use prometheus::process_collector::ProcessCollector;
use prometheus::{
    Encoder, GaugeVec, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Registry, TextEncoder,
};

use crate::telemetry::metric::{MetricNames, register};
use crate::telemetry::registry as declared;

/// Serving metrics. Cheap to clone; clones share their values.
#[derive(Clone, Debug)]
pub struct Metrics {
    registry: Registry,
    names: MetricNames,
    pub extender_requests: IntCounterVec,
    pub extender_seconds: HistogramVec,
    pub filter_denied: IntCounterVec,
    pub extender_stale: IntCounter,
    pub preempt_dropped: IntCounterVec,
    pub webhook_requests: IntCounterVec,
    pub webhook_seconds: HistogramVec,
    pub webhook_rules: IntCounterVec,
    pub cert_expiry: GaugeVec,
    pub cert_reloads: IntCounterVec,
    pub panics: IntCounter,
    pub connections: IntGaugeVec,
    pub connections_closed: IntCounterVec,
    pub in_flight: IntGauge,
    pub state_objects: IntGaugeVec,
    pub ready: IntGauge,
    pub api_requests: IntCounterVec,
    pub api_seconds: HistogramVec,
    pub watch_age: GaugeVec,
    pub watch_lists: IntCounterVec,
    pub loop_turn: GaugeVec,
    pub loop_panics: IntCounterVec,
    pub turns: IntCounterVec,
    pub turn_seconds: HistogramVec,
    pub leader: IntGauge,
    pub leader_status: IntGaugeVec,
    pub lease_transitions: IntGauge,
    pub other_leader: IntGauge,
    pub pods_pending: IntGauge,
    pub pods_pending_age: IntGauge,
    pub nodes_leaving: IntGaugeVec,
    pub nodes_leaving_age: IntGauge,
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    /// Metrics in a registry of their own.
    ///
    /// # Panics
    /// Never: the names are distinct and well formed; a test verifies it.
    #[must_use]
    pub fn new() -> Self {
        let registry = Registry::new();
        Self::registered_in(registry).expect("names in the registry are distinct")
    }

    fn registered_in(registry: Registry) -> Result<Self, prometheus::Error> {
        let build_info = register(&registry, declared::BUILD_INFO.gauges())?;
        build_info.with_label_values(&[env!("CARGO_PKG_VERSION"), "", goarch(), ""]).set(1);
        let extender_requests = register(&registry, declared::EXTENDER_REQUESTS.counters())?;
        let extender_seconds = register(&registry, declared::EXTENDER_SECONDS.histograms())?;
        let webhook_requests = register(&registry, declared::WEBHOOK_REQUESTS.counters())?;
        let cert_reloads = register(&registry, declared::CERT_RELOADS.counters())?;
        // Before the first failure: an alert on an increase would miss it.
        for verb in ["filter", "prioritize", "preempt"] {
            extender_requests.with_label_values(&[verb, "403"]).inc_by(0);
            let _ = extender_seconds.with_label_values(&[verb]);
        }
        webhook_requests.with_label_values(&["doubtful"]).inc_by(0);
        cert_reloads.with_label_values(&["error"]).inc_by(0);
        Ok(Self {
            names: MetricNames::default(),
            extender_requests,
            extender_seconds,
            filter_denied: register(&registry, declared::FILTER_DENIED.counters())?,
            extender_stale: register(&registry, declared::EXTENDER_STALE.counter())?,
            preempt_dropped: register(&registry, declared::PREEMPT_DROPPED.counters())?,
            webhook_requests,
            webhook_seconds: register(&registry, declared::WEBHOOK_SECONDS.histograms())?,
            webhook_rules: register(&registry, declared::WEBHOOK_RULES.counters())?,
            cert_expiry: register(&registry, declared::CERT_EXPIRY.float_gauges())?,
            cert_reloads,
            panics: register(&registry, declared::HANDLER_PANICS.counter())?,
            connections: register(&registry, declared::CONNECTIONS.gauges())?,
            connections_closed: register(&registry, declared::CONNECTIONS_CLOSED.counters())?,
            in_flight: register(&registry, declared::REQUESTS_IN_FLIGHT.gauge())?,
            state_objects: register(&registry, declared::STATE_OBJECTS.gauges())?,
            ready: register(&registry, declared::READY.gauge())?,
            api_requests: register(&registry, declared::API_REQUESTS.counters())?,
            api_seconds: register(&registry, declared::API_SECONDS.histograms())?,
            watch_age: register(&registry, declared::WATCH_AGE.float_gauges())?,
            watch_lists: register(&registry, declared::WATCH_LISTS.counters())?,
            loop_turn: register(&registry, declared::LOOP_TURN.float_gauges())?,
            loop_panics: register(&registry, declared::LOOP_PANICS.counters())?,
            turns: register(&registry, declared::TURNS.counters())?,
            turn_seconds: register(&registry, declared::TURN_SECONDS.histograms())?,
            leader: register(&registry, declared::LEADER.gauge())?,
            leader_status: register(&registry, declared::LEADER_STATUS.gauges())?,
            lease_transitions: register(&registry, declared::LEASE_TRANSITIONS.gauge())?,
            other_leader: register(&registry, declared::OTHER_LEADER.gauge())?,
            pods_pending: register(&registry, declared::PODS_PENDING.gauge())?,
            pods_pending_age: register(&registry, declared::PODS_PENDING_AGE.gauge())?,
            nodes_leaving: register(&registry, declared::NODES_LEAVING.gauges())?,
            nodes_leaving_age: register(&registry, declared::NODES_LEAVING_AGE.gauge())?,
            registry,
        })
    }

    /// Publishes metrics that have a name of Karpenter's and one of ours under these names.
    #[must_use]
    pub fn published_as(self, names: MetricNames) -> Self {
        Self { names, ..self }
    }

    /// The Prometheus registry, to which other families add their collectors.
    pub fn registry(&self) -> &Registry {
        &self.registry
    }

    /// Adds the metrics of the process (CPU, memory, file descriptors), with the names that every client of Prometheus gives them.
    ///
    /// # Errors
    /// They are registered already.
    pub fn register_process(&self) -> Result<(), prometheus::Error> {
        self.registry.register(Box::new(ProcessCollector::for_self()))
    }

    /// Content type of [`Metrics::text`].
    pub fn content_type() -> String {
        TextEncoder::new().format_type().to_owned()
    }

    /// Every metric of the registry in Prometheus' text format.
    ///
    /// # Errors
    /// A collector of another family breaks the format.
    pub fn text(&self) -> Result<String, prometheus::Error> {
        let (encoder, mut text) = (TextEncoder::new(), String::new());
        for mut family in self.registry.gather() {
            let own = family.name().to_owned();
            for name in declared::published(&own, self.names) {
                family.set_name(name.to_owned());
                encoder.encode_utf8(std::slice::from_ref(&family), &mut text)?;
            }
        }
        Ok(text)
    }
}

/// Go's name of the architecture.
fn goarch() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_metric_is_registered_under_its_name() {
        let metrics = Metrics::new();
        metrics.extender_requests.with_label_values(&["filter", "200"]).inc();
        metrics.extender_seconds.with_label_values(&["filter"]).observe(0.000_3);
        metrics.webhook_rules.with_label_values(&["n1"]).inc();
        metrics.cert_expiry.with_label_values(&["serving"]).set(86_400.0);
        let text = metrics.text().unwrap();
        for line in [
            "stowage_extender_requests_total{code=\"200\",verb=\"filter\"} 1",
            "stowage_extender_requests_total{code=\"403\",verb=\"preempt\"} 0",
            "stowage_webhook_requests_total{result=\"doubtful\"} 0",
            "stowage_cert_reloads_total{result=\"error\"} 0",
            "stowage_extender_seconds_bucket{verb=\"filter\",le=\"0.0005\"} 1",
            "stowage_webhook_rule_total{rule=\"n1\"} 1",
            "stowage_cert_expiry_seconds{certificate=\"serving\"} 86400",
            "stowage_ready 0",
        ] {
            assert!(text.lines().any(|have| have == line), "{line} in\n{text}");
        }
        let prefixes = ["stowage_", "karpenter_", "# "];
        assert!(text.lines().all(|line| prefixes.iter().any(|prefix| line.starts_with(prefix))), "{text}");
    }

    #[test]
    fn a_metric_of_karpenter_is_published_under_both_names_or_the_chosen_one() {
        let names = |names: MetricNames| {
            let metrics = Metrics::new().published_as(names);
            register(metrics.registry(), declared::SCHEDULING_SECONDS.histograms())
                .unwrap()
                .with_label_values(&["provisioner"])
                .observe(1.0);
            let text = metrics.text().unwrap();
            let has = |name: &str| text.lines().filter(|line| line.starts_with(name)).count();
            let [own, karpenter] = ["stowage_build_info{", "karpenter_build_info{"].map(has);
            // Metrics with one name keep it.
            (
                own,
                karpenter,
                has("stowage_ready "),
                has("karpenter_scheduler_scheduling_duration_seconds_sum"),
                has("# TYPE karpenter_build_info gauge"),
            )
        };
        assert_eq!(names(MetricNames::Both), (1, 1, 1, 1, 1));
        assert_eq!(names(MetricNames::Karpenter), (0, 1, 1, 1, 1));
        assert_eq!(names(MetricNames::Stowage), (1, 0, 1, 1, 0));
    }

    #[test]
    fn other_families_add_to_the_same_registry() {
        let metrics = Metrics::new();
        let theirs = IntCounter::new("stowage_nodes_launched_total", "Nodes.").unwrap();
        metrics.registry().register(Box::new(theirs.clone())).unwrap();
        theirs.inc();
        assert!(metrics.clone().text().unwrap().contains("stowage_nodes_launched_total 1"));
    }
}
