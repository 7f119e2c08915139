//! The catalog of a node class: a pure step from what is known of the region, what the class decides, and what changes from
//! minute to minute (capacity, reservations, risk).
//!
//! The step is made in two halves, so that the frequent one is cheap: [`base`] after a refresh or a change of the class,
//! [`overlaid`] after each change of the market, which copies only the instance types it touches.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::cloud::Override;
use crate::cloud::catalog::{NodeSettings, RawInstanceType, SpotPricing};
use crate::cloud::ec2::offerings::catalog_key::{ClassView, Reservation};
use crate::cloud::ec2::offerings::region::RegionSnapshot;
use crate::model::labels;
use crate::model::offering::{CapacityType, InstanceType, Offering};
use crate::model::units::MicroUsd;

/// A reservation is paid for already: what is left of the price only orders reservations among each other. A share that,
/// rounded up, keeps most of the order.
const RESERVED_SHARE: i64 = 100_000;
/// No reservation is dearer, micro-USD per hour: the cheapest spot instances cost little more.
const MOST_RESERVED: i64 = 1_000;

/// What changes between two refreshes of the region.
pub struct OfferingInputs<'a> {
    /// Versions of what the three functions answer from, in their order: one that grew says that answers may differ.
    pub stamp: [u64; 3],
    /// Whether a spot or on-demand offering is known to have no capacity, or must not be used for another reason; in this
    /// partition of the class's placement group, where it has partitions.
    pub unavailable: &'a dyn Fn(&Override, Option<&str>) -> bool,
    /// Instances that still fit a capacity reservation, by its id; 0 where that is not known.
    pub left: &'a dyn Fn(&str) -> i64,
    /// Risk of a spot offering by instance type and zone, thousandths of its price.
    pub risk_permille: &'a dyn Fn(&str, &str) -> i64,
}

/// Instance types as nodes of the class, by name, with every offering of the region. One that can't be a node of the class,
/// or lies outside its zones, is there and unavailable. None at all where the class's expression for `maxPods` fails.
pub fn base(region: &RegionSnapshot, class: &ClassView) -> Vec<Arc<InstanceType>> {
    let places = Places::of(class);
    let each = class.settings.on_each(region.types.values());
    let both = region.types.values().zip(&each);
    both.map(|(entry, settings)| Arc::new(shape(region, class, settings, &places, entry))).collect()
}

fn shape(
    region: &RegionSnapshot,
    class: &ClassView,
    settings: &NodeSettings,
    places: &Places,
    entry: &RawInstanceType,
) -> InstanceType {
    let mut node = entry.as_node(&region.region, settings, SpotPricing::Off);
    class.put_labels(&mut node.labels);
    let admitted = class.admits(entry);
    let zones: Vec<&String> = match region.zones_of(&entry.name) {
        Some(zones) => zones.iter().collect(),
        None => class.zones.keys().collect(),
    };
    let reservations: Vec<&Reservation> =
        class.reservations.iter().filter(|found| found.instance_type == entry.name).collect();
    let mut offerings = Vec::new();
    for zone in zones {
        let inside = class.zones.contains_key(zone);
        let offer = |capacity_type, price, available, left, labels: &Arc<BTreeMap<String, String>>| Offering {
            zone: zone.as_str().into(),
            capacity_type,
            price,
            available: available && admitted && inside,
            left,
            labels: Arc::clone(labels),
            risk_permille: 0,
        };
        for reservation in reservations.iter().filter(|found| found.zone == *zone) {
            let on_demand = region.on_demand.get(&entry.name).copied().unwrap_or_default();
            let price = reserved_price(on_demand);
            for own in places.of_zone(zone) {
                let own = Arc::new(with_reservation(own, reservation));
                offerings.push(offer(CapacityType::Reserved, price, !reservation.expiring, Some(0), &own));
            }
        }
        for capacity_type in [CapacityType::Spot, CapacityType::OnDemand] {
            if let Some(price) = region.price(entry, zone, capacity_type) {
                offerings.extend(places.of_zone(zone).iter().map(|own| offer(capacity_type, price, true, None, own)));
            }
        }
    }
    node.offerings = offerings;
    node
}

fn reserved_price(on_demand: MicroUsd) -> MicroUsd {
    MicroUsd(((on_demand.0.max(0) + RESERVED_SHARE - 1) / RESERVED_SHARE).min(MOST_RESERVED))
}

fn with_reservation(own: &BTreeMap<String, String>, reservation: &Reservation) -> BTreeMap<String, String> {
    let mut out = own.clone();
    out.insert(labels::CAPACITY_RESERVATION_ID.to_owned(), reservation.id.clone());
    out.insert(labels::CAPACITY_RESERVATION_TYPE.to_owned(), reservation.kind.clone());
    out.insert(labels::CAPACITY_RESERVATION_INTERRUPTIBLE.to_owned(), reservation.interruptible.to_string());
    out
}

/// Labels of offerings by zone: one map for each partition, shared by all instance types.
struct Places {
    by_zone: BTreeMap<String, Vec<Arc<BTreeMap<String, String>>>>,
    elsewhere: Vec<Arc<BTreeMap<String, String>>>,
}

impl Places {
    fn of(class: &ClassView) -> Self {
        let maps = |zone_id: Option<&String>| {
            let map = |partition: Option<String>| {
                let id = zone_id.map(|id| (labels::ZONE_ID.to_owned(), id.clone()));
                let partition = partition.map(|name| (labels::PLACEMENT_GROUP_PARTITION.to_owned(), name));
                Arc::new(id.into_iter().chain(partition).collect())
            };
            class.partitions().into_iter().map(map).collect::<Vec<_>>()
        };
        let by_zone = class.zones.iter().map(|(zone, id)| (zone.clone(), maps(id.as_ref()))).collect();
        Self { by_zone, elsewhere: maps(None) }
    }

    fn of_zone(&self, zone: &str) -> &[Arc<BTreeMap<String, String>>] {
        self.by_zone.get(zone).unwrap_or(&self.elsewhere)
    }
}

/// The same instance types as the market has them now. Those that nothing changes are shared with `base`.
pub fn overlaid(base: &[Arc<InstanceType>], market: &OfferingInputs<'_>) -> Vec<Arc<InstanceType>> {
    // One probe for all questions: there are some ten thousand.
    let mut probe =
        Override { instance_type: String::new(), zone: String::new(), capacity_type: CapacityType::OnDemand };
    base.iter()
        .map(|entry| {
            probe.instance_type.clear();
            probe.instance_type.push_str(&entry.name);
            let mut changed: Option<InstanceType> = None;
            for (at, offering) in entry.offerings.iter().enumerate() {
                let (available, left, risk_permille) = seen(entry, offering, market, &mut probe);
                let now = (offering.available, offering.left, offering.risk_permille);
                if now != (available, left, risk_permille) {
                    let changed = changed.get_or_insert_with(|| InstanceType::clone(entry));
                    let offering = &mut changed.offerings[at];
                    (offering.available, offering.left, offering.risk_permille) = (available, left, risk_permille);
                }
            }
            changed.map_or_else(|| Arc::clone(entry), Arc::new)
        })
        .collect()
}

/// Availability, count and risk of an offering now.
fn seen(
    entry: &InstanceType,
    offering: &Offering,
    market: &OfferingInputs<'_>,
    probe: &mut Override,
) -> (bool, Option<i64>, i64) {
    if !offering.available {
        return (false, offering.left, 0);
    }
    if offering.capacity_type == CapacityType::Reserved {
        let id = offering.labels.get(labels::CAPACITY_RESERVATION_ID);
        let left = id.map_or(0, |id| (market.left)(id).max(0));
        return (left > 0, Some(left), 0);
    }
    probe.zone.clear();
    probe.zone.push_str(&offering.zone);
    probe.capacity_type = offering.capacity_type;
    let risk = match offering.capacity_type {
        CapacityType::Spot => (market.risk_permille)(&entry.name, &offering.zone).max(0),
        _ => 0,
    };
    (!(market.unavailable)(probe, offering.label(labels::PLACEMENT_GROUP_PARTITION)), None, risk)
}

#[cfg(test)]
mod tests;
