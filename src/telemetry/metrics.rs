//! The serving metrics, and the registry that other rooms add theirs to.
//!
//! Names start with `stowage_`. Labels take few values: verbs, codes, rules and reasons, never names of pods or nodes.

use prometheus::core::Collector;
use prometheus::{
    Encoder, GaugeVec, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, Opts, Registry, TextEncoder,
};

/// Buckets of a verdict's duration, in seconds: the aim is 1 ms at 5,000 names.
const VERDICT_SECONDS: &[f64] =
    &[0.000_05, 0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0];

/// Serving metrics. Cheap to clone; clones share their values.
#[derive(Clone, Debug)]
pub struct Metrics {
    registry: Registry,
    /// `stowage_extender_requests_total{verb,code}`.
    pub extender_requests: IntCounterVec,
    /// `stowage_extender_seconds{verb}`: from the whole body read to the answer.
    pub extender_seconds: HistogramVec,
    /// `stowage_filter_denied_total{reason}`: nodes denied by filter.
    pub filter_denied: IntCounterVec,
    /// `stowage_extender_stale_total`: requests answered "anywhere" because the view was too old.
    pub extender_stale: IntCounter,
    /// `stowage_preempt_dropped_total{reason}`: preemption candidates dropped.
    pub preempt_dropped: IntCounterVec,
    /// `stowage_webhook_requests_total{result}`.
    pub webhook_requests: IntCounterVec,
    /// `stowage_webhook_seconds`: from the whole body read to the answer.
    pub webhook_seconds: HistogramVec,
    /// `stowage_webhook_rule_total{rule,mode}`: pods that a rule changed or would have changed.
    pub webhook_rules: IntCounterVec,
    /// `stowage_cert_expiry_seconds{certificate}`: seconds until it expires, negative afterwards.
    pub cert_expiry: GaugeVec,
    /// `stowage_cert_reloads_total{result}`.
    pub cert_reloads: IntCounterVec,
    /// `stowage_handler_panics_total`: requests answered 500 because their handler panicked.
    pub panics: IntCounter,
    /// `stowage_connections{listener}`: open connections.
    pub connections: prometheus::IntGaugeVec,
    /// `stowage_connections_refused_total{listener}`: closed at once because the limit was reached.
    pub connections_refused: IntCounterVec,
    /// `stowage_requests_in_flight`: HTTPS requests whose head is read and that are not answered yet.
    pub in_flight: IntGauge,
    /// `stowage_ready`: 1 when `/readyz` says so.
    pub ready: IntGauge,
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
    /// Never: the names are distinct and well formed, which a test holds.
    #[must_use]
    pub fn new() -> Self {
        let registry = Registry::new();
        let counters = |name: &str, help: &str, labels: &[&str]| {
            add(&registry, IntCounterVec::new(Opts::new(name, help), labels).expect("a well-formed constant name"))
        };
        let counter =
            |name: &str, help: &str| add(&registry, IntCounter::new(name, help).expect("a well-formed constant name"));
        let seconds = |name: &str, help: &str, labels: &[&str]| {
            let options = HistogramOpts::new(name, help).buckets(VERDICT_SECONDS.to_vec());
            add(&registry, HistogramVec::new(options, labels).expect("a well-formed constant name"))
        };
        Self {
            extender_requests: counters("stowage_extender_requests_total", "Extender requests.", &["verb", "code"]),
            extender_seconds: seconds("stowage_extender_seconds", "Time to answer an extender request.", &["verb"]),
            filter_denied: counters("stowage_filter_denied_total", "Nodes denied by filter.", &["reason"]),
            extender_stale: counter(
                "stowage_extender_stale_total",
                "Extender requests answered without restraint because the view was too old.",
            ),
            preempt_dropped: counters("stowage_preempt_dropped_total", "Preemption candidates dropped.", &["reason"]),
            webhook_requests: counters("stowage_webhook_requests_total", "Admission reviews.", &["result"]),
            webhook_seconds: seconds("stowage_webhook_seconds", "Time to answer an admission review.", &[]),
            webhook_rules: counters(
                "stowage_webhook_rule_total",
                "Pods that an admission rule changed, or would have changed.",
                &["rule", "mode"],
            ),
            cert_expiry: add(
                &registry,
                GaugeVec::new(
                    Opts::new("stowage_cert_expiry_seconds", "Seconds until the certificate expires."),
                    &["certificate"],
                )
                .expect("a well-formed constant name"),
            ),
            cert_reloads: counters("stowage_cert_reloads_total", "Certificate reloads.", &["result"]),
            panics: counter("stowage_handler_panics_total", "Requests whose handler panicked."),
            connections: add(
                &registry,
                prometheus::IntGaugeVec::new(Opts::new("stowage_connections", "Open connections."), &["listener"])
                    .expect("a well-formed constant name"),
            ),
            connections_refused: counters(
                "stowage_connections_refused_total",
                "Connections closed at once because the limit was reached.",
                &["listener"],
            ),
            in_flight: add(
                &registry,
                IntGauge::new("stowage_requests_in_flight", "HTTPS requests being answered.")
                    .expect("a well-formed constant name"),
            ),
            ready: add(
                &registry,
                IntGauge::new("stowage_ready", "1 when ready to serve.").expect("a well-formed constant name"),
            ),
            registry,
        }
    }

    /// The registry, for other rooms to add their metrics to.
    pub fn registry(&self) -> &Registry {
        &self.registry
    }

    /// Content type of [`Metrics::text`].
    pub fn content_type() -> String {
        TextEncoder::new().format_type().to_owned()
    }

    /// Every metric of the registry in Prometheus' text format.
    ///
    /// # Errors
    /// When a collector added by another room breaks the format.
    pub fn text(&self) -> Result<String, prometheus::Error> {
        TextEncoder::new().encode_to_string(&self.registry.gather())
    }
}

fn add<C: Collector + Clone + 'static>(registry: &Registry, metric: C) -> C {
    registry.register(Box::new(metric.clone())).expect("names in this file are distinct");
    metric
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_metric_is_registered_under_our_prefix() {
        let metrics = Metrics::new();
        metrics.extender_requests.with_label_values(&["filter", "200"]).inc();
        metrics.extender_seconds.with_label_values(&["filter"]).observe(0.000_3);
        metrics.webhook_rules.with_label_values(&["n1", "enforce"]).inc();
        metrics.cert_expiry.with_label_values(&["serving"]).set(86_400.0);
        let text = metrics.text().unwrap();
        for line in [
            "stowage_extender_requests_total{code=\"200\",verb=\"filter\"} 1",
            "stowage_extender_seconds_bucket{verb=\"filter\",le=\"0.0005\"} 1",
            "stowage_webhook_rule_total{mode=\"enforce\",rule=\"n1\"} 1",
            "stowage_cert_expiry_seconds{certificate=\"serving\"} 86400",
            "stowage_ready 0",
        ] {
            assert!(text.lines().any(|have| have == line), "{line} in\n{text}");
        }
        assert!(text.lines().all(|line| line.starts_with("stowage_") || line.starts_with("# ")), "{text}");
    }

    #[test]
    fn other_rooms_add_to_the_same_registry() {
        let metrics = Metrics::new();
        let theirs = IntCounter::new("stowage_nodes_launched_total", "Nodes.").unwrap();
        metrics.registry().register(Box::new(theirs.clone())).unwrap();
        theirs.inc();
        assert!(metrics.clone().text().unwrap().contains("stowage_nodes_launched_total 1"));
    }
}
