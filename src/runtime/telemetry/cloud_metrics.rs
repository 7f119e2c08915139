//! Metrics of Amazon EC2.

use std::sync::Mutex;
use std::time::Instant;

use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;
use prometheus::{GaugeVec, Histogram, HistogramVec, IntCounter, IntCounterVec, IntGaugeVec, Registry};

use crate::sync::lock;
use crate::telemetry::registry as declared;

/// Value of the label `provider`.
const PROVIDER: &str = "aws";

/// Values of the label `result` of reads of the interruption queue.
const READS: [&str; 2] = ["ok", "error"];

/// Values of the label `error`.
const ERRORS: [&str; 4] = ["", "InsufficientCapacityError", "NodeClaimNotFoundError", "NodeClassNotReadyError"];

/// EC2 metrics, with names and labels of Karpenter's AWS provider; [`declared`] describes each metric.
/// Cheap to clone; clones share their values.
#[derive(Clone, Debug)]
pub struct CloudMetrics {
    duration: HistogramVec,
    errors: IntCounterVec,
    pub batch_seconds: HistogramVec,
    pub batch_size: HistogramVec,
    pub launch_failures: IntCounterVec,
    pub termination_failures: IntCounterVec,
    pub type_cpus: IntGaugeVec,
    pub type_memory: IntGaugeVec,
    pub offering_available: IntGaugeVec,
    pub offering_price: GaugeVec,
    pub user_data_bytes: IntGaugeVec,
    reads: IntCounterVec,
    pub messages_received: IntCounterVec,
    pub messages_deleted: IntCounter,
    pub message_seconds: Histogram,
    pub requests: IntCounterVec,
}

impl Default for CloudMetrics {
    fn default() -> Self {
        Self::new()
    }
}

impl CloudMetrics {
    /// Collectors that are not registered yet.
    ///
    /// # Panics
    /// Never: the names are distinct and well formed; a test verifies it.
    #[must_use]
    pub fn new() -> Self {
        Self {
            duration: declared::CLOUD_DURATION.histograms(),
            errors: declared::CLOUD_ERRORS.counters(),
            batch_seconds: declared::BATCH_SECONDS.histograms(),
            batch_size: declared::BATCH_SIZE.histograms(),
            launch_failures: declared::LAUNCH_FAILURES.counters(),
            termination_failures: declared::TERMINATION_FAILURES.counters(),
            type_cpus: declared::TYPE_CPUS.gauges(),
            type_memory: declared::TYPE_MEMORY.gauges(),
            offering_available: declared::OFFERING_AVAILABLE.gauges(),
            offering_price: declared::OFFERING_PRICE.float_gauges(),
            user_data_bytes: declared::USER_DATA_BYTES.gauges(),
            reads: declared::INTERRUPTION_READS.counters(),
            messages_received: declared::MESSAGES_RECEIVED.counters(),
            messages_deleted: declared::MESSAGES_DELETED.counter(),
            message_seconds: declared::MESSAGE_SECONDS.histogram(),
            requests: declared::EC2_REQUESTS.counters(),
        }
    }

    /// Registers the collectors. `refresh` is called on every scrape, before the gauges of the region's offerings and the
    /// counters that are kept elsewhere are read.
    ///
    /// # Errors
    /// A metric with the same name is already registered.
    pub fn register(
        &self,
        registry: &Registry,
        refresh: impl Fn(&Self) + Send + Sync + 'static,
    ) -> Result<(), prometheus::Error> {
        let refreshed = Refreshed { metrics: self.clone(), refresh: Box::new(refresh), refreshing: Mutex::default() };
        let all: [Box<dyn Collector>; 10] = [
            Box::new(self.reads.clone()),
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

    /// Removes every series of instance types and offerings.
    pub fn reset_offerings(&self) {
        self.type_cpus.reset();
        self.type_memory.reset();
        self.offering_available.reset();
        self.offering_price.reset();
    }

    /// Awaits a read of the interruption queue and counts it.
    ///
    /// # Errors
    /// The error of the read.
    pub async fn read<T, E>(&self, read: impl Future<Output = Result<T, E>>) -> Result<T, E> {
        // They are there before the first failure, which an alert on an increase would miss.
        for known in READS {
            self.reads.with_label_values(&[known]).inc_by(0);
        }
        let result = read.await;
        self.reads.with_label_values(&[READS[usize::from(result.is_err())]]).inc();
        result
    }

    /// Awaits a cloud provider call and records its duration and failure. `method` is Karpenter's name of the method, `controller` that of the
    /// controller which calls it there, `kind` maps an error to Karpenter's name of it.
    ///
    /// # Errors
    /// The error of the call.
    pub async fn timed<T, E>(
        &self,
        [controller, method]: [&str; 2],
        kind: impl Fn(&E) -> &'static str,
        call: impl Future<Output = Result<T, E>>,
    ) -> Result<T, E> {
        // They are there before the first error, which an alert on an increase would miss.
        for known in ERRORS {
            self.errors.with_label_values(&[controller, method, PROVIDER, known]).inc_by(0);
        }
        let begin = Instant::now();
        let result = call.await;
        self.duration.with_label_values(&[controller, method, PROVIDER]).observe(begin.elapsed().as_secs_f64());
        if let Err(error) = &result {
            self.errors.with_label_values(&[controller, method, PROVIDER, kind(error)]).inc();
        }
        result
    }
}

/// Collectors that are refreshed on every scrape.
struct Refreshed {
    metrics: CloudMetrics,
    refresh: Box<dyn Fn(&CloudMetrics) + Send + Sync>,
    /// Serializes refreshes: two concurrent refreshes would raise a counter beyond its total.
    refreshing: Mutex<()>,
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
        let _refreshing = lock(&self.refreshing);
        (self.refresh)(&self.metrics);
        self.parts().into_iter().flat_map(Collector::collect).collect()
    }
}

/// Raises a counter to a total that is kept elsewhere.
pub fn raise_to(counter: &IntCounter, total: u64) {
    counter.inc_by(total.saturating_sub(counter.get()));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::Metrics;

    #[tokio::test]
    async fn every_metric_is_published_exactly_once_under_its_name() {
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
        let failed: Result<(), u8> =
            metrics.timed(["nodeclaim.lifecycle", "Create"], |_| "CreateError", async { Err(1) }).await;
        assert_eq!(failed, Err(1));
        let worked: Result<u8, u8> = metrics.timed(["", "List"], |_| "", async { Ok(2) }).await;
        assert_eq!(worked, Ok(2));
        for read in [Ok(1), Err(2), Ok(3)] {
            let result: Result<u8, u8> = metrics.read(async { read }).await;
            assert_eq!(result, read);
        }
        all.text().unwrap();
        let text = all.text().unwrap();
        for line in [
            "stowage_cloudprovider_instance_launch_failures_total{capacity_type=\"spot\",reason=\"LaunchFailed\",zone=\"a\",zone_id=\"use1-az1\"} 1",
            "stowage_cloudprovider_batcher_batch_size_bucket{batcher=\"describe_instances\",le=\"4\"} 1",
            "stowage_cloudprovider_batcher_batch_size_bucket{batcher=\"describe_instances\",le=\"2\"} 0",
            "stowage_ec2nodeclasses_userdata_bytes{nodeclass=\"default\"} 900",
            "stowage_cloudprovider_instance_type_offering_available{capacity_type=\"spot\",instance_type=\"m5.large\",zone=\"a\"} 1",
            "stowage_cloudprovider_instance_type_offering_price_estimate{capacity_type=\"spot\",instance_type=\"m5.large\",zone=\"a\"} 0.035",
            "stowage_cloudprovider_errors_total{controller=\"nodeclaim.lifecycle\",error=\"CreateError\",method=\"Create\",provider=\"aws\"} 1",
            "stowage_cloudprovider_duration_seconds_count{controller=\"\",method=\"List\",provider=\"aws\"} 1",
            "stowage_interruption_deleted_messages_total 3",
            "stowage_interruption_reads_total{result=\"error\"} 1",
            "stowage_interruption_reads_total{result=\"ok\"} 2",
            "stowage_cloudprovider_instance_type_cpu_cores{instance_type=\"m5.large\"} 2",
        ] {
            assert!(text.lines().any(|have| have == line), "{line} in\n{text}");
        }
    }
}
