//! What is published of EC2. Most is counted where it happens; what the region offers, and what is counted elsewhere, is read when
//! somebody asks for it.

use std::sync::Arc;

use prometheus::Registry;

use crate::cloud::ec2::Ec2Provider;
use crate::cloud::ec2::interruption::queue::Received;
use crate::cloud::ec2::offerings::catalog_cache::ReservedOfferings;
use crate::cloud::ec2::offerings::region::RegionSnapshot;
use crate::cloud::{CloudError, LaunchError, Override};
use crate::model::offering::CapacityType;
use crate::sync::lock;
use crate::telemetry::cloud::{CloudMetrics, raise_to};

/// How an offering's capacity is bought, where the region decides what is offered.
const BOUGHT: [CapacityType; 2] = [CapacityType::OnDemand, CapacityType::Spot];

/// Karpenter's word for a failed launch.
pub(crate) fn launch_error(error: &LaunchError) -> &'static str {
    match error {
        LaunchError::InsufficientCapacity { .. } => "InsufficientCapacityError",
        LaunchError::NodeClassNotReady { .. } => "NodeClassNotReadyError",
        // Karpenter names no other.
        LaunchError::Rejected { .. } | LaunchError::NoSpotRole | LaunchError::Throttled | LaunchError::Other { .. } => {
            ""
        }
    }
}

/// Karpenter names no other failure than those of a launch, and that something is gone, which is none here.
pub(crate) fn cloud_error(_: &CloudError) -> &'static str {
    ""
}

/// Notes how old events were when their messages came.
pub(crate) fn received(metrics: &CloudMetrics, events: &[Received], now_ms: i64) {
    for event in events {
        // Ages of minutes: a float has them exactly.
        #[allow(clippy::cast_precision_loss)]
        metrics.message_seconds.observe((now_ms - event.at_ms).max(0) as f64 / 1e3);
    }
}

/// Publishes what EC2 does and offers.
///
/// # Errors
/// Where a name is registered already.
pub fn publish(ec2: &Arc<Ec2Provider>, registry: &Registry) -> Result<(), prometheus::Error> {
    let source = Arc::clone(ec2);
    ec2.clients.metrics.register(registry, move |metrics| refresh(metrics, &source))
}

fn refresh(metrics: &CloudMetrics, ec2: &Ec2Provider) {
    let now = crate::clock::now().0;
    let marks = lock(&ec2.unavailable).clone();
    let region = ec2.snapshot();
    offered(metrics, &region, &|offering| marks.covers(offering, None, now));
    if let Some(found) = ec2.reserved() {
        reserved(metrics, &region, &found);
    }
    for (action, total) in ec2.calls() {
        raise_to(&metrics.requests.with_label_values(&[action]), total);
    }
    if let Some(counts) = ec2.heard() {
        for (kind, total) in counts.received {
            raise_to(&metrics.messages_received.with_label_values(&[kind]), total);
        }
        raise_to(&metrics.messages_deleted, counts.deleted);
    }
}

/// Tells what a region offers. What it offers no more stays as it was last told.
fn offered(metrics: &CloudMetrics, region: &RegionSnapshot, unavailable: &dyn Fn(&Override) -> bool) {
    for entry in region.types.values() {
        metrics.type_cpus.with_label_values(&[&entry.name]).set(entry.vcpu);
        metrics.type_memory.with_label_values(&[&entry.name]).set(entry.memory_mib.saturating_mul(1 << 20));
        for zone in region.zones_of(&entry.name).into_iter().flatten() {
            for capacity_type in BOUGHT {
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

/// Tells which reserved offerings may be had: 0 for each type and zone without a reservation, which has no price either.
fn reserved(metrics: &CloudMetrics, region: &RegionSnapshot, found: &ReservedOfferings) {
    for entry in region.types.values() {
        for zone in region.zones_of(&entry.name).into_iter().flatten() {
            let labels = [entry.name.as_str(), CapacityType::Reserved.as_str(), zone];
            let known = found.get(&(entry.name.clone(), zone.clone()));
            let available = known.is_some_and(|(available, _)| *available);
            metrics.offering_available.with_label_values(&labels).set(i64::from(available));
            if let Some((_, price)) = known {
                metrics.offering_price.with_label_values(&labels).set(price.usd());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cloud::catalog::embedded;
    use crate::cloud::ec2::interruption::messages::EventKind;
    use crate::model::units::MicroUsd;

    #[test]
    fn every_offering_of_the_region_has_a_price_and_says_whether_it_may_be_had() {
        let region = RegionSnapshot::stand_in("us-east-1", embedded(), 0);
        let metrics = CloudMetrics::new();
        let out = |offering: &Override| {
            offering.instance_type == "m5.large"
                && offering.zone == "us-east-1a"
                && offering.capacity_type == CapacityType::Spot
        };
        offered(&metrics, &region, &out);
        let available = |labels: &[&str; 3]| metrics.offering_available.with_label_values(labels).get();
        assert_eq!(available(&["m5.large", "spot", "us-east-1a"]), 0);
        assert_eq!(available(&["m5.large", "on-demand", "us-east-1a"]), 1);
        assert_eq!(available(&["m5.large", "spot", "us-east-1b"]), 1);
        let price = metrics.offering_price.with_label_values(&["m5.large", "on-demand", "us-east-1a"]).get();
        assert!((price - 0.096).abs() < 1e-9, "{price}");
        assert_eq!(metrics.type_cpus.with_label_values(&["m5.large"]).get(), 2);
        assert_eq!(metrics.type_memory.with_label_values(&["m5.large"]).get(), 8 << 30);
        offered(&metrics, &region, &|_| false);
        assert_eq!(available(&["m5.large", "spot", "us-east-1a"]), 1, "it can be had again");
    }

    #[test]
    fn every_type_and_zone_says_whether_a_reservation_has_room() {
        let region = RegionSnapshot::stand_in("us-east-1", embedded(), 0);
        let metrics = CloudMetrics::new();
        let key = |zone: &str| ("m5.large".to_owned(), zone.to_owned());
        let found = [(key("us-east-1a"), (true, MicroUsd(7))), (key("us-east-1b"), (false, MicroUsd(7)))].into();
        reserved(&metrics, &region, &found);
        let available =
            |zone: &str| metrics.offering_available.with_label_values(&["m5.large", "reserved", zone]).get();
        assert_eq!(["us-east-1a", "us-east-1b", "us-east-1c"].map(available), [1, 0, 0]);
        let price = metrics.offering_price.with_label_values(&["m5.large", "reserved", "us-east-1a"]).get();
        assert!((price - 7e-6).abs() < 1e-12, "{price}");
    }

    #[test]
    fn the_age_of_events_is_told_and_a_clock_that_is_behind_makes_none_negative() {
        let metrics = CloudMetrics::new();
        let event = |at_ms| Received {
            receipt: String::new(),
            kind: EventKind::SpotInterrupted,
            instance_id: "i-1".into(),
            at_ms,
        };
        received(&metrics, &[event(1_500), event(9_000)], 4_000);
        assert_eq!(metrics.message_seconds.get_sample_count(), 2);
        assert!((metrics.message_seconds.get_sample_sum() - 2.5).abs() < 1e-9);
    }

    #[test]
    fn failed_launches_have_karpenters_words() {
        let out = LaunchError::InsufficientCapacity { unavailable: vec![] };
        let refused = LaunchError::Rejected { reason: "LaunchFailed", message: String::new() };
        let not_ready = LaunchError::NodeClassNotReady { name: "n".into(), reason: String::new() };
        let words = [out, not_ready, refused].map(|error| launch_error(&error));
        assert_eq!(words, ["InsufficientCapacityError", "NodeClassNotReadyError", ""]);
    }
}
