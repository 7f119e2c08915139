//! The catalog of a node class: a pure function of the region's snapshot, the class, and inputs that change from minute to
//! minute (capacity, reservations, risk).
//!
//! It has two steps, so that the frequent one is cheap: [`base`] after a refresh or a change of the class, [`with_inputs`] after
//! each change of the inputs, which copies only the instance types that it changes.

use std::collections::BTreeMap;
use std::sync::Arc;

use stowage_model::labels;
use stowage_model::offering::{CapacityType, InstanceType, Offering};
use stowage_model::units::MicroUsd;

use crate::Override;
use crate::catalog::{NodeSettings, RawInstanceType, SpotPricing};
use crate::ec2::offerings::catalog_key::{CatalogKey, Reservation};
use crate::ec2::offerings::region_snapshot::RegionSnapshot;

/// A reservation is paid for in any case, so its price only orders reservations among each other: the on-demand price divided
/// by this, rounded up, which preserves most of the order.
const RESERVED_PRICE_DIVISOR: i64 = 100_000;
/// Upper bound of a reserved price: the cheapest spot instances cost little more.
const MAX_RESERVED_PRICE: MicroUsd = MicroUsd(1_000);

/// Inputs that change between two refreshes of the region.
pub struct OfferingInputs<'a> {
    /// Versions of the data behind the three functions, in their order. Equal versions mean equal results.
    pub versions: [u64; 3],
    /// Whether a spot or on-demand offering has no capacity, in this partition of the class's placement group where it has
    /// partitions.
    pub unavailable: &'a dyn Fn(&Override, Option<&str>) -> bool,
    /// The available instances of a capacity reservation, by its id; 0 while unknown.
    pub reserved: &'a dyn Fn(&str) -> i64,
    /// Risk surcharge of a spot offering by instance type and zone, thousandths of its price.
    pub risk_permille: &'a dyn Fn(&str, &str) -> i64,
}

/// Instance types as nodes of the class, by name, with every offering of the region. Offerings of types that the class does not
/// admit, or outside its zones, are included as unavailable. Empty where the class's expression for `maxPods` fails.
pub fn base(region: &RegionSnapshot, class: &CatalogKey) -> Vec<Arc<InstanceType>> {
    let zone_labels = ZoneLabels::of(class);
    let each = class.settings.on_each(region.types.values());
    let both = region.types.values().zip(&each);
    both.map(|(entry, settings)| Arc::new(instance_type(region, class, settings, &zone_labels, entry))).collect()
}

fn instance_type(
    region: &RegionSnapshot,
    class: &CatalogKey,
    settings: &NodeSettings,
    zone_labels: &ZoneLabels,
    entry: &RawInstanceType,
) -> InstanceType {
    let mut node = entry.as_node(&region.region, settings, SpotPricing::Off);
    class.apply_labels(&mut node.labels);
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
            for own in zone_labels.of_zone(zone) {
                let own = Arc::new(with_reservation(own, reservation));
                offerings.push(offer(CapacityType::Reserved, price, !reservation.expiring, Some(0), &own));
            }
        }
        for capacity_type in [CapacityType::Spot, CapacityType::OnDemand] {
            if let Some(price) = region.price(entry, zone, capacity_type) {
                offerings
                    .extend(zone_labels.of_zone(zone).iter().map(|own| offer(capacity_type, price, true, None, own)));
            }
        }
    }
    node.offerings = offerings;
    node
}

fn reserved_price(on_demand: MicroUsd) -> MicroUsd {
    MicroUsd((on_demand.0.max(0) + RESERVED_PRICE_DIVISOR - 1) / RESERVED_PRICE_DIVISOR).min(MAX_RESERVED_PRICE)
}

fn with_reservation(own: &BTreeMap<String, String>, reservation: &Reservation) -> BTreeMap<String, String> {
    let mut out = own.clone();
    out.insert(labels::CAPACITY_RESERVATION_ID.to_owned(), reservation.id.clone());
    out.insert(labels::CAPACITY_RESERVATION_TYPE.to_owned(), reservation.kind.clone());
    out.insert(labels::CAPACITY_RESERVATION_INTERRUPTIBLE.to_owned(), reservation.interruptible.to_string());
    out
}

/// Labels of offerings by zone: one map for each partition, shared by all instance types.
struct ZoneLabels {
    by_zone: BTreeMap<String, Vec<Arc<BTreeMap<String, String>>>>,
    elsewhere: Vec<Arc<BTreeMap<String, String>>>,
}

impl ZoneLabels {
    fn of(class: &CatalogKey) -> Self {
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

/// The instance types with the current inputs. Unchanged ones are shared with `base`.
pub fn with_inputs(base: &[Arc<InstanceType>], inputs: &OfferingInputs<'_>) -> Vec<Arc<InstanceType>> {
    // One key, reused for some ten thousand lookups.
    let mut key = Override { instance_type: String::new(), zone: String::new(), capacity_type: CapacityType::OnDemand };
    base.iter()
        .map(|entry| {
            key.instance_type.clear();
            key.instance_type.push_str(&entry.name);
            let mut changed: Option<InstanceType> = None;
            for (at, offering) in entry.offerings.iter().enumerate() {
                let (available, left, risk_permille) = current_state(entry, offering, inputs, &mut key);
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

/// Current availability, instance count and risk of an offering.
fn current_state(
    entry: &InstanceType,
    offering: &Offering,
    inputs: &OfferingInputs<'_>,
    key: &mut Override,
) -> (bool, Option<i64>, i64) {
    if !offering.available {
        return (false, offering.left, 0);
    }
    if offering.capacity_type == CapacityType::Reserved {
        let id = offering.labels.get(labels::CAPACITY_RESERVATION_ID);
        let left = id.map_or(0, |id| (inputs.reserved)(id).max(0));
        return (left > 0, Some(left), 0);
    }
    key.zone.clear();
    key.zone.push_str(&offering.zone);
    key.capacity_type = offering.capacity_type;
    let risk = match offering.capacity_type {
        CapacityType::Spot => (inputs.risk_permille)(&entry.name, &offering.zone).max(0),
        _ => 0,
    };
    (!(inputs.unavailable)(key, offering.label(labels::PLACEMENT_GROUP_PARTITION)), None, risk)
}

#[cfg(test)]
mod tests;
