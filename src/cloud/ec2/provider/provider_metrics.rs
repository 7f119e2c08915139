//! EC2 metrics that are collected at scrape time: the region's offerings, and totals that other modules count.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use prometheus::Registry;
use stowage_model::offering::CapacityType;
use stowage_runtime::clock;
use stowage_runtime::sync::lock;
use stowage_runtime::telemetry::cloud_metrics::{CloudMetrics, raise_to};

use crate::Override;
use crate::ec2::offerings::catalog_cache::ReservedOfferings;
use crate::ec2::offerings::region_snapshot::RegionSnapshot;
use crate::ec2::provider::Ec2Provider;

/// The capacity types of the region's own offerings; reservations belong to node classes.
const REGION_CAPACITY_TYPES: [CapacityType; 2] = [CapacityType::OnDemand, CapacityType::Spot];

/// Registers the EC2 metrics.
///
/// # Errors
/// A name is already registered.
pub fn publish(ec2: &Arc<Ec2Provider>, registry: &Registry) -> Result<(), prometheus::Error> {
    let source = Arc::clone(ec2);
    let published = Mutex::new(Published::default());
    ec2.clients.metrics.register(registry, move |metrics| refresh(metrics, &source, &mut lock(&published)))
}

/// What the series of the last scrape were set from.
#[derive(Debug, Default)]
struct Published {
    region: Option<Arc<RegionSnapshot>>,
    /// Instance type and zone of the reserved offerings with a price.
    reserved: BTreeSet<(String, String)>,
}

impl Published {
    /// Removes the series of offerings that are in the last scrape and no longer in `region` and `reserved`.
    fn replace(&mut self, metrics: &CloudMetrics, region: &Arc<RegionSnapshot>, reserved: Option<&ReservedOfferings>) {
        if !self.region.as_ref().is_some_and(|last| Arc::ptr_eq(last, region)) {
            metrics.reset_offerings();
            self.region = Some(Arc::clone(region));
            self.reserved.clear();
        }
        let priced: BTreeSet<_> = reserved.into_iter().flat_map(|reserved| reserved.keys().cloned()).collect();
        for (instance_type, zone) in self.reserved.difference(&priced) {
            // Without the series there is nothing to remove.
            let _ = metrics.offering_price.remove_label_values(&[instance_type, CapacityType::Reserved.as_str(), zone]);
        }
        self.reserved = priced;
    }
}

fn refresh(metrics: &CloudMetrics, ec2: &Ec2Provider, published: &mut Published) {
    if ec2.options.offering_metrics {
        let now = clock::now();
        let unavailable = ec2.offerings.unavailable();
        let region = ec2.offerings.snapshot();
        let reserved = ec2.offerings.reserved();
        published.replace(metrics, &region, reserved.as_ref());
        set_region_offerings(metrics, &region, &|offering| unavailable.is_unavailable(offering, None, now));
        if let Some(reserved) = &reserved {
            set_reserved_offerings(metrics, &region, reserved);
        }
    }
    for (action, total) in ec2.clients.attempts() {
        raise_to(&metrics.requests.with_label_values(&[action]), total);
    }
    if let Some(counts) = ec2.queue_counts() {
        for (kind, total) in counts.received {
            raise_to(&metrics.messages_received.with_label_values(&[kind]), total);
        }
        raise_to(&metrics.messages_deleted, counts.deleted);
    }
}

/// Sets the gauges of the region's offerings.
fn set_region_offerings(metrics: &CloudMetrics, region: &RegionSnapshot, unavailable: &dyn Fn(&Override) -> bool) {
    for entry in region.types.values() {
        metrics.type_cpus.with_label_values(&[&entry.name]).set(entry.vcpu);
        metrics.type_memory.with_label_values(&[&entry.name]).set(entry.memory_mib.saturating_mul(1 << 20));
        for zone in region.zones_of(&entry.name).into_iter().flatten() {
            for capacity_type in REGION_CAPACITY_TYPES {
                let Some(price) = region.price(entry, zone, capacity_type) else { continue };
                let offering = Override { instance_type: entry.name.clone(), zone: zone.clone(), capacity_type };
                let labels = [entry.name.as_str(), capacity_type.as_str(), zone];
                let available = !unavailable(&offering);
                metrics.offering_available.with_label_values(&labels).set(i64::from(available));
                metrics.offering_price.with_label_values(&labels).set(price.usd());
            }
        }
    }
}

/// Sets the gauges of reserved offerings. A type and zone without a reservation is unavailable and has no price.
fn set_reserved_offerings(metrics: &CloudMetrics, region: &RegionSnapshot, reserved: &ReservedOfferings) {
    for entry in region.types.values() {
        for zone in region.zones_of(&entry.name).into_iter().flatten() {
            let labels = [entry.name.as_str(), CapacityType::Reserved.as_str(), zone];
            let offering = reserved.get(&(entry.name.clone(), zone.clone()));
            let available = offering.is_some_and(|(available, _)| *available);
            metrics.offering_available.with_label_values(&labels).set(i64::from(available));
            if let Some((_, price)) = offering {
                metrics.offering_price.with_label_values(&labels).set(price.usd());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use prometheus::core::Collector;
    use prometheus::proto::Metric;
    use stowage_model::units::MicroUsd;
    use stowage_runtime::telemetry::Metrics;

    use super::*;
    use crate::catalog::embedded;
    use crate::ec2::launch::request::tests::facts;
    use crate::ec2::options::Options;
    use crate::test_support::fake_aws;

    #[test]
    fn every_offering_of_the_region_has_a_price_and_an_availability() {
        let region = RegionSnapshot::embedded("us-east-1", embedded());
        let metrics = CloudMetrics::new();
        let out = |offering: &Override| {
            offering.instance_type == "m5.large"
                && offering.zone == "us-east-1a"
                && offering.capacity_type == CapacityType::Spot
        };
        set_region_offerings(&metrics, &region, &out);
        let available = |labels: &[&str; 3]| metrics.offering_available.with_label_values(labels).get();
        assert_eq!(available(&["m5.large", "spot", "us-east-1a"]), 0);
        assert_eq!(available(&["m5.large", "on-demand", "us-east-1a"]), 1);
        assert_eq!(available(&["m5.large", "spot", "us-east-1b"]), 1);
        let price = metrics.offering_price.with_label_values(&["m5.large", "on-demand", "us-east-1a"]).get();
        assert!((price - 0.096).abs() < 1e-9, "{price}");
        assert_eq!(metrics.type_cpus.with_label_values(&["m5.large"]).get(), 2);
        assert_eq!(metrics.type_memory.with_label_values(&["m5.large"]).get(), 8 << 30);
        set_region_offerings(&metrics, &region, &|_| false);
        assert_eq!(available(&["m5.large", "spot", "us-east-1a"]), 1, "available again");
    }

    #[tokio::test]
    async fn a_scrape_has_no_series_of_offerings_when_they_are_disabled() {
        let families = |offering_metrics: bool| {
            let (clients, _) = fake_aws::clients(Box::new(|_| None));
            let options = Options { offering_metrics, ..Options::of("c1") };
            let (ec2, metrics) = (Arc::new(Ec2Provider::new(clients, options, facts())), Metrics::new());
            publish(&ec2, metrics.registry()).unwrap();
            let text = metrics.text().unwrap();
            let offerings = text.lines().filter(|line| line.starts_with("stowage_cloudprovider_instance_type_"));
            offerings.filter_map(|line| line.split('{').next()).map(str::to_owned).collect::<BTreeSet<_>>().len()
        };
        assert_eq!((families(true), families(false)), (4, 0));
    }

    #[test]
    fn offerings_and_reservations_that_disappear_have_no_series() {
        let metrics = CloudMetrics::new();
        let all = Arc::new(RegionSnapshot::embedded("us-east-1", embedded()));
        let mut fewer = RegionSnapshot::embedded("us-east-1", embedded());
        let kept = fewer.types.iter().filter(|(name, _)| *name != "m5.large");
        fewer.types = Arc::new(kept.map(|(name, entry)| (name.clone(), entry.clone())).collect());
        let reserved: ReservedOfferings =
            [(("m5.xlarge".to_owned(), "us-east-1a".to_owned()), (true, MicroUsd(7)))].into();
        let mut published = Published::default();
        let mut series = |region: &Arc<RegionSnapshot>, reserved: &ReservedOfferings| {
            published.replace(&metrics, region, Some(reserved));
            set_region_offerings(&metrics, region, &|_| false);
            set_reserved_offerings(&metrics, region, reserved);
            let gathered: Vec<_> = [metrics.type_cpus.collect(), metrics.type_memory.collect()]
                .into_iter()
                .chain([metrics.offering_available.collect(), metrics.offering_price.collect()])
                .flatten()
                .flat_map(|family| family.get_metric().to_vec())
                .collect();
            let of = |value: &str| {
                let has = |metric: &&Metric| metric.get_label().iter().any(|label| label.value() == value);
                gathered.iter().filter(has).count()
            };
            let reserved_price = gathered.iter().filter(|metric| {
                let text = format!("{metric:?}");
                text.contains("m5.xlarge") && text.contains("reserved") && text.contains("us-east-1a")
            });
            (of("m5.large") > 0, reserved_price.count())
        };
        // Availability and price of the reservation; without it, only that it is not available.
        assert_eq!(series(&all, &reserved), (true, 2));
        assert_eq!(series(&all, &ReservedOfferings::default()), (true, 1));
        assert_eq!(series(&Arc::new(fewer), &reserved), (false, 2));
    }

    #[test]
    fn every_type_and_zone_has_the_availability_of_its_reservations() {
        let region = RegionSnapshot::embedded("us-east-1", embedded());
        let metrics = CloudMetrics::new();
        let key = |zone: &str| ("m5.large".to_owned(), zone.to_owned());
        let reserved = [(key("us-east-1a"), (true, MicroUsd(7))), (key("us-east-1b"), (false, MicroUsd(7)))].into();
        set_reserved_offerings(&metrics, &region, &reserved);
        let available =
            |zone: &str| metrics.offering_available.with_label_values(&["m5.large", "reserved", zone]).get();
        assert_eq!(["us-east-1a", "us-east-1b", "us-east-1c"].map(available), [1, 0, 0]);
        let price = metrics.offering_price.with_label_values(&["m5.large", "reserved", "us-east-1a"]).get();
        assert!((price - 7e-6).abs() < 1e-12, "{price}");
    }
}
