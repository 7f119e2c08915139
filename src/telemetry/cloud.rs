//! Metrics of Amazon EC2, with the names and labels of Karpenter's AWS provider after our own prefix.

use std::sync::Mutex;
use std::time::Instant;

use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;
use prometheus::{
    GaugeVec, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGaugeVec, Opts, Registry,
};

use crate::sync::lock;

/// Buckets of durations, in seconds.
const SECONDS: &[f64] = &[
    0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 45.0,
    60.0, 90.0, 120.0, 180.0, 300.0, 600.0,
];
/// Buckets of what is asked for in one call.
const SIZES: &[f64] = &[
    1.0, 2.0, 4.0, 5.0, 10.0, 15.0, 20.0, 25.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0, 90.0, 100.0, 125.0, 150.0, 175.0,
    200.0, 225.0, 250.0, 275.0, 300.0, 350.0, 400.0, 450.0, 500.0, 550.0, 600.0, 700.0, 800.0, 900.0, 1000.0,
];
/// The cloud's name in the labels.
const PROVIDER: &str = "aws";

/// What EC2 does and offers. Cheap to clone; clones share their values. Published by [`CloudMetrics::register`].
#[derive(Clone, Debug)]
pub struct CloudMetrics {
    /// `stowage_cloudprovider_duration_seconds{controller,method,provider}`: see [`CloudMetrics::timed`].
    duration: HistogramVec,
    /// `stowage_cloudprovider_errors_total{controller,error,method,provider}`.
    errors: IntCounterVec,
    /// `stowage_cloudprovider_batcher_batch_time_seconds{batcher}`: from the first of a window to its call.
    pub batch_seconds: HistogramVec,
    /// `stowage_cloudprovider_batcher_batch_size{batcher}`: keys of a window.
    pub batch_size: HistogramVec,
    /// `stowage_cloudprovider_instance_launch_failures_total{capacity_type,reason,zone,zone_id}`.
    pub launch_failures: IntCounterVec,
    /// `stowage_cloudprovider_instance_termination_failures_total{zone,zone_id}`.
    pub termination_failures: IntCounterVec,
    /// `stowage_cloudprovider_instance_type_cpu_cores{instance_type}`.
    pub type_cpus: IntGaugeVec,
    /// `stowage_cloudprovider_instance_type_memory_bytes{instance_type}`.
    pub type_memory: IntGaugeVec,
    /// `stowage_cloudprovider_instance_type_offering_available{capacity_type,instance_type,zone}`: 0 or 1.
    pub offering_available: IntGaugeVec,
    /// `stowage_cloudprovider_instance_type_offering_price_estimate{capacity_type,instance_type,zone}`: USD per hour.
    pub offering_price: GaugeVec,
    /// `stowage_ec2nodeclasses_userdata_bytes{nodeclass}`.
    pub user_data_bytes: IntGaugeVec,
    /// `stowage_interruption_received_messages_total{message_type}`.
    pub messages_received: IntCounterVec,
    /// `stowage_interruption_deleted_messages_total`.
    pub messages_deleted: IntCounter,
    /// `stowage_interruption_message_queue_duration_seconds`: from the event to its receipt.
    pub message_seconds: Histogram,
    /// `stowage_ec2_requests_total{action}`: attempts of calls.
    pub requests: IntCounterVec,
}

impl Default for CloudMetrics {
    fn default() -> Self {
        Self::new()
    }
}

impl CloudMetrics {
    /// Metrics that nobody sees yet.
    ///
    /// # Panics
    /// Never: the names are distinct and well formed, which a test holds.
    #[must_use]
    pub fn new() -> Self {
        let full = |name: &str| format!("stowage_{name}");
        let counters = |name: &str, help: &str, labels: &[&str]| {
            IntCounterVec::new(Opts::new(full(name), help), labels).expect("a well-formed constant name")
        };
        let gauges = |name: &str, help: &str, labels: &[&str]| {
            IntGaugeVec::new(Opts::new(full(name), help), labels).expect("a well-formed constant name")
        };
        let histograms = |name: &str, help: &str, buckets: &[f64], labels: &[&str]| {
            let options = HistogramOpts::new(full(name), help).buckets(buckets.to_vec());
            HistogramVec::new(options, labels).expect("a well-formed constant name")
        };
        let offering = ["instance_type", "capacity_type", "zone"];
        let price = Opts::new(
            full("cloudprovider_instance_type_offering_price_estimate"),
            "What an offering is thought to cost, USD per hour.",
        );
        let queue = HistogramOpts::new(
            full("interruption_message_queue_duration_seconds"),
            "Time from an event to the receipt of its message.",
        );
        Self {
            duration: histograms(
                "cloudprovider_duration_seconds",
                "Time of a call of the cloud.",
                SECONDS,
                &["controller", "method", "provider"],
            ),
            errors: counters(
                "cloudprovider_errors_total",
                "Calls of the cloud that failed.",
                &["controller", "method", "provider", "error"],
            ),
            batch_seconds: histograms(
                "cloudprovider_batcher_batch_time_seconds",
                "Time that a window of calls was open.",
                SECONDS,
                &["batcher"],
            ),
            batch_size: histograms(
                "cloudprovider_batcher_batch_size",
                "Requests that went into one call.",
                SIZES,
                &["batcher"],
            ),
            launch_failures: counters(
                "cloudprovider_instance_launch_failures_total",
                "Offerings that EC2 could not launch.",
                &["zone", "zone_id", "capacity_type", "reason"],
            ),
            termination_failures: counters(
                "cloudprovider_instance_termination_failures_total",
                "Terminations that failed.",
                &["zone", "zone_id"],
            ),
            type_cpus: gauges(
                "cloudprovider_instance_type_cpu_cores",
                "vCPUs of an instance type.",
                &["instance_type"],
            ),
            type_memory: gauges(
                "cloudprovider_instance_type_memory_bytes",
                "Memory of an instance type, before any overhead.",
                &["instance_type"],
            ),
            offering_available: gauges(
                "cloudprovider_instance_type_offering_available",
                "1 unless the offering was lately seen to have no capacity.",
                &offering,
            ),
            offering_price: GaugeVec::new(price, &offering).expect("a well-formed constant name"),
            user_data_bytes: gauges(
                "ec2nodeclasses_userdata_bytes",
                "User data of a node of the class, bytes before base64.",
                &["nodeclass"],
            ),
            messages_received: counters(
                "interruption_received_messages_total",
                "Messages of the interruption queue.",
                &["message_type"],
            ),
            messages_deleted: IntCounter::new(
                full("interruption_deleted_messages_total"),
                "Messages of the interruption queue that were deleted.",
            )
            .expect("a well-formed constant name"),
            message_seconds: Histogram::with_opts(queue.buckets(SECONDS.to_vec()))
                .expect("a well-formed constant name"),
            requests: counters("ec2_requests_total", "Attempts of calls of EC2.", &["action"]),
        }
    }

    /// Publishes them. `refresh` is called whenever somebody asks for them, before what the region offers and what is counted
    /// elsewhere is told.
    ///
    /// # Errors
    /// Where a name is registered already.
    pub fn register(
        &self,
        registry: &Registry,
        refresh: impl Fn(&Self) + Send + Sync + 'static,
    ) -> Result<(), prometheus::Error> {
        let refreshed = Refreshed { metrics: self.clone(), refresh: Box::new(refresh), turn: Mutex::default() };
        let all: [Box<dyn Collector>; 9] = [
            Box::new(self.duration.clone()),
            Box::new(self.errors.clone()),
            Box::new(self.batch_seconds.clone()),
            Box::new(self.batch_size.clone()),
            Box::new(self.launch_failures.clone()),
            Box::new(self.termination_failures.clone()),
            Box::new(self.user_data_bytes.clone()),
            Box::new(self.message_seconds.clone()),
            Box::new(refreshed),
        ];
        all.into_iter().try_for_each(|collector| registry.register(collector))
    }

    /// Waits for a call of the cloud, and notes how long it took and how it failed: `method` is Karpenter's word for it, `kind`
    /// gives that for an error.
    ///
    /// # Errors
    /// The call's own.
    pub async fn timed<T, E>(
        &self,
        method: &str,
        kind: impl Fn(&E) -> &'static str,
        call: impl Future<Output = Result<T, E>>,
    ) -> Result<T, E> {
        let begin = Instant::now();
        let result = call.await;
        // Karpenter knows which of its controllers called; here calls are not told apart.
        self.duration.with_label_values(&["", method, PROVIDER]).observe(begin.elapsed().as_secs_f64());
        if let Err(error) = &result {
            self.errors.with_label_values(&["", method, PROVIDER, kind(error)]).inc();
        }
        result
    }
}

/// Metrics that are brought up to date when somebody asks for them.
struct Refreshed {
    metrics: CloudMetrics,
    refresh: Box<dyn Fn(&CloudMetrics) + Send + Sync>,
    /// One at a time: a counter that is raised to a total by two at once would go beyond it.
    turn: Mutex<()>,
}

impl Refreshed {
    fn parts(&self) -> [&dyn Collector; 7] {
        let metrics = &self.metrics;
        [
            &metrics.type_cpus,
            &metrics.type_memory,
            &metrics.offering_available,
            &metrics.offering_price,
            &metrics.messages_received,
            &metrics.messages_deleted,
            &metrics.requests,
        ]
    }
}

impl Collector for Refreshed {
    fn desc(&self) -> Vec<&Desc> {
        self.parts().into_iter().flat_map(Collector::desc).collect()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let _turn = lock(&self.turn);
        (self.refresh)(&self.metrics);
        self.parts().into_iter().flat_map(Collector::collect).collect()
    }
}

/// Raises a counter to a total that is counted elsewhere.
pub fn raise_to(counter: &IntCounter, total: u64) {
    counter.inc_by(total.saturating_sub(counter.get()));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::Metrics;

    #[tokio::test]
    async fn every_metric_is_published_under_its_name_and_only_once() {
        let all = Metrics::new();
        let metrics = CloudMetrics::new();
        let refresh = |metrics: &CloudMetrics| {
            raise_to(&metrics.messages_deleted, 3);
            metrics.type_cpus.with_label_values(&["m5.large"]).set(2);
        };
        metrics.register(all.registry(), refresh).unwrap();
        assert!(metrics.register(all.registry(), refresh).is_err());
        metrics.launch_failures.with_label_values(&["a", "use1-az1", "spot", "LaunchFailed"]).inc();
        metrics.batch_size.with_label_values(&["describe_instances"]).observe(3.0);
        metrics.user_data_bytes.with_label_values(&["default"]).set(900);
        metrics.offering_available.with_label_values(&["m5.large", "spot", "a"]).set(1);
        metrics.offering_price.with_label_values(&["m5.large", "spot", "a"]).set(0.035);
        let failed: Result<(), u8> = metrics.timed("Create", |_| "CreateError", async { Err(1) }).await;
        assert_eq!(failed, Err(1));
        let worked: Result<u8, u8> = metrics.timed("List", |_| "", async { Ok(2) }).await;
        assert_eq!(worked, Ok(2));
        all.text().unwrap();
        let text = all.text().unwrap();
        for line in [
            "stowage_cloudprovider_instance_launch_failures_total{capacity_type=\"spot\",reason=\"LaunchFailed\",zone=\"a\",zone_id=\"use1-az1\"} 1",
            "stowage_cloudprovider_batcher_batch_size_bucket{batcher=\"describe_instances\",le=\"4\"} 1",
            "stowage_cloudprovider_batcher_batch_size_bucket{batcher=\"describe_instances\",le=\"2\"} 0",
            "stowage_ec2nodeclasses_userdata_bytes{nodeclass=\"default\"} 900",
            "stowage_cloudprovider_instance_type_offering_available{capacity_type=\"spot\",instance_type=\"m5.large\",zone=\"a\"} 1",
            "stowage_cloudprovider_instance_type_offering_price_estimate{capacity_type=\"spot\",instance_type=\"m5.large\",zone=\"a\"} 0.035",
            "stowage_cloudprovider_errors_total{controller=\"\",error=\"CreateError\",method=\"Create\",provider=\"aws\"} 1",
            "stowage_cloudprovider_duration_seconds_count{controller=\"\",method=\"List\",provider=\"aws\"} 1",
            "stowage_interruption_deleted_messages_total 3",
            "stowage_cloudprovider_instance_type_cpu_cores{instance_type=\"m5.large\"} 2",
        ] {
            assert!(text.lines().any(|have| have == line), "{line} in\n{text}");
        }
    }
}
