//! EC2 metrics that are collected at scrape time: the region's offerings, and totals that other modules count.

use std::sync::Arc;

use prometheus::Registry;

use crate::clock;
use crate::cloud::Override;
use crate::cloud::ec2::offerings::catalog_cache::ReservedOfferings;
use crate::cloud::ec2::offerings::region_snapshot::RegionSnapshot;
use crate::cloud::ec2::provider::Ec2Provider;
use crate::model::offering::CapacityType;
use crate::telemetry::cloud::{CloudMetrics, raise_to};

/// The capacity types of the region's own offerings; reservations belong to node classes.
const REGION_CAPACITY_TYPES: [CapacityType; 2] = [CapacityType::OnDemand, CapacityType::Spot];

/// Registers the EC2 metrics.
///
/// # Errors
/// A name is already registered.
pub fn publish(ec2: &Arc<Ec2Provider>, registry: &Registry) -> Result<(), prometheus::Error> {
    let source = Arc::clone(ec2);
    ec2.clients.metrics.register(registry, move |metrics| refresh(metrics, &source))
}

fn refresh(metrics: &CloudMetrics, ec2: &Ec2Provider) {
    let now = clock::now();
    let unavailable = ec2.offerings.unavailable();
    let region = ec2.offerings.snapshot();
    set_region_offerings(metrics, &region, &|offering| unavailable.is_unavailable(offering, None, now));
    if let Some(reserved) = ec2.offerings.reserved() {
        set_reserved_offerings(metrics, &region, &reserved);
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

/// Sets the gauges of the region's offerings. An offering that disappears keeps its last values.
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
    use super::*;
    use crate::cloud::catalog::embedded;
    use crate::model::units::MicroUsd;

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
