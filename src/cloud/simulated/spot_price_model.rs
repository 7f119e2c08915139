//! Prices of the simulated region and the catalogs built from them, without the offerings that are marked as unavailable. Time is an
//! argument.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use stowage_model::offering::{CapacityType, Catalog, InstanceType};
use stowage_model::time::UnixMillis;
use stowage_model::units::MicroUsd;

use crate::Override;
use crate::catalog::{NodeSettings, RawCatalog, SpotPricing};

/// How long an offering is unavailable after a failed launch, as in Karpenter.
pub const UNAVAILABLE_TTL: Duration = Duration::from_mins(3);

#[derive(Debug)]
struct CachedCatalog {
    expires_at: UnixMillis,
    catalog: Arc<Catalog>,
}

/// Prices and availability of a simulated region.
#[derive(Debug)]
pub struct SpotPriceModel {
    raw: Arc<RawCatalog>,
    spot: SpotPricing,
    /// Expiry by instance type, zone and capacity type.
    unavailable: BTreeMap<(String, String, CapacityType), UnixMillis>,
    /// Catalogs with list prices.
    base: BTreeMap<NodeSettings, Arc<Catalog>>,
    cache: BTreeMap<NodeSettings, CachedCatalog>,
}

impl SpotPriceModel {
    pub fn new(raw: Arc<RawCatalog>, spot: SpotPricing) -> Self {
        Self { raw, spot, unavailable: BTreeMap::new(), base: BTreeMap::new(), cache: BTreeMap::new() }
    }

    /// The catalog with list prices.
    pub fn raw(&self) -> &RawCatalog {
        &self.raw
    }

    /// The price of an offering; `None` where it is not offered.
    pub fn price(&self, offering: &Override) -> Option<MicroUsd> {
        let entry = self.raw.instance_type(&offering.instance_type)?;
        entry.price(&offering.zone, offering.capacity_type, self.spot)
    }

    /// Marks an offering as unavailable; marking it again restarts the period.
    pub fn mark_unavailable(&mut self, offering: &Override, now: UnixMillis) {
        let key = (offering.instance_type.clone(), offering.zone.clone(), offering.capacity_type);
        self.unavailable.insert(key, now + UNAVAILABLE_TTL);
        self.cache.clear();
    }

    /// The offerings for nodes with `settings` at a time. The same `Arc` until something changes; a change copies only the affected
    /// instance types.
    pub fn catalog(&mut self, settings: &NodeSettings, now: UnixMillis) -> Arc<Catalog> {
        if let Some(cached) = self.cache.get(settings).filter(|cached| now < cached.expires_at) {
            return Arc::clone(&cached.catalog);
        }
        self.unavailable.retain(|_, expiry| *expiry > now);
        let base =
            self.base.entry(settings.clone()).or_insert_with(|| Arc::new(self.raw.with_settings(settings, self.spot)));
        let base = Arc::clone(base);
        let differs = |entry: &InstanceType| {
            let from = (entry.name.to_string(), String::new(), CapacityType::Reserved);
            self.unavailable.range(from..).next().is_some_and(|(key, _)| key.0 == *entry.name)
        };
        let catalog = if base.instance_types.iter().any(|entry| differs(entry)) {
            let instance_types = base
                .instance_types
                .iter()
                .map(|entry| if differs(entry) { self.current(entry) } else { Arc::clone(entry) });
            Arc::new(Catalog { region: base.region.clone(), instance_types: instance_types.collect() })
        } else {
            base
        };
        let expires_at = self.unavailable.values().copied().min().unwrap_or(UnixMillis::MAX);
        self.cache.insert(settings.clone(), CachedCatalog { expires_at, catalog: Arc::clone(&catalog) });
        catalog
    }

    /// The instance type with its current availability.
    fn current(&self, entry: &Arc<InstanceType>) -> Arc<InstanceType> {
        let mut copy = InstanceType::clone(entry);
        for offering in &mut copy.offerings {
            let key = (entry.name.to_string(), offering.zone.to_string(), offering.capacity_type);
            offering.available &= !self.unavailable.contains_key(&key);
        }
        if copy == **entry { Arc::clone(entry) } else { Arc::new(copy) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalog::embedded;

    fn prices() -> SpotPriceModel {
        SpotPriceModel::new(Arc::new(embedded().clone()), SpotPricing::ratio(0.5).unwrap())
    }

    fn offering(name: &str, zone: &str, capacity_type: CapacityType) -> Override {
        Override { instance_type: name.into(), zone: zone.into(), capacity_type }
    }

    fn seen(catalog: &Catalog, of: &Override) -> (bool, i64) {
        let entry = catalog.instance_types.iter().find(|entry| *entry.name == *of.instance_type).unwrap();
        let found = entry.offerings.iter().find(|o| *o.zone == *of.zone && o.capacity_type == of.capacity_type);
        found.map(|o| (o.available, o.price.0)).unwrap()
    }

    #[test]
    fn an_offering_without_capacity_is_unavailable_for_three_minutes() {
        let mut prices = prices();
        let (short, other) = (
            offering("m5.large", "us-east-1a", CapacityType::Spot),
            offering("m5.large", "us-east-1b", CapacityType::Spot),
        );
        let settings = NodeSettings::default();
        let before = prices.catalog(&settings, UnixMillis(0));
        assert!(Arc::ptr_eq(&before, &prices.catalog(&settings, UnixMillis(5))));
        prices.mark_unavailable(&short, UnixMillis(1_000));
        let during = prices.catalog(&settings, UnixMillis(1_001));
        assert_eq!((seen(&during, &short).0, seen(&during, &other).0), (false, true));
        let copied =
            before.instance_types.iter().zip(&during.instance_types).filter(|(a, b)| !Arc::ptr_eq(a, b)).count();
        assert_eq!(copied, 1);
        prices.mark_unavailable(&short, UnixMillis(100_000));
        assert!(
            !seen(&prices.catalog(&settings, UnixMillis(181_000)), &short).0,
            "the second mark restarts the period"
        );
        assert!(seen(&prices.catalog(&settings, UnixMillis(280_000)), &short).0);
    }

    #[test]
    fn an_unknown_offering_has_no_price() {
        let prices = prices();
        for of in [
            offering("m5.huge", "us-east-1a", CapacityType::Spot),
            offering("m5.large", "eu-west-1a", CapacityType::Spot),
            offering("u-6tb1.112xlarge", "us-east-1a", CapacityType::Spot),
            offering("m5.large", "us-east-1a", CapacityType::Reserved),
        ] {
            assert_eq!(prices.price(&of), None, "{of:?}");
        }
    }
}
