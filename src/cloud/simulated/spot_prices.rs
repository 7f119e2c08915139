//! Prices and what the planner is told of them: the base catalog, scripted price moves, and the memory of offerings that
//! had no capacity. Pure; time comes in as milliseconds.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::cloud::Override;
use crate::cloud::catalog::{NodeSettings, RawCatalog, SpotPricing, SpotRatio};
use crate::cloud::simulated::script::{Action, Event, Selector, Trigger};
use crate::model::offering::{CapacityType, Catalog, InstanceType};
use crate::model::units::MicroUsd;

/// How long an offering counts as out of capacity after a failed launch, in milliseconds. Karpenter's figure.
pub const UNAVAILABLE_MS: i64 = 180_000;

/// A scripted multiplication of prices.
#[derive(Clone, Debug)]
struct Move {
    from_ms: i64,
    until_ms: i64,
    selector: Selector,
    factor: SpotRatio,
}

#[derive(Debug)]
struct Built {
    /// From this time on the catalog is out of date.
    until_ms: i64,
    catalog: Arc<Catalog>,
}

/// The market of a simulated region.
#[derive(Debug)]
pub struct SpotPriceModel {
    raw: Arc<RawCatalog>,
    spot: SpotPricing,
    moves: Vec<Move>,
    unavailable: BTreeMap<(String, String, CapacityType), i64>,
    base: BTreeMap<NodeSettings, Arc<Catalog>>,
    built: BTreeMap<NodeSettings, Built>,
}

impl SpotPriceModel {
    /// A market without price moves.
    pub fn new(raw: Arc<RawCatalog>, spot: SpotPricing) -> Self {
        Self {
            raw,
            spot,
            moves: Vec::new(),
            unavailable: BTreeMap::new(),
            base: BTreeMap::new(),
            built: BTreeMap::new(),
        }
    }

    /// Takes the price moves out of a script whose simulation starts at `started_at_ms`.
    pub fn set_moves(&mut self, events: &[Event], started_at_ms: i64) {
        let as_move = |event: &Event| match (event.trigger, event.action) {
            (Trigger::At(at), Action::Price { factor_ppm }) => {
                let from_ms = started_at_ms.saturating_add(at);
                let until_ms = event.lasts_ms.map_or(i64::MAX, |lasts| from_ms.saturating_add(lasts));
                let factor = SpotRatio::from_parts_per_million(factor_ppm);
                Some(Move { from_ms, until_ms, selector: event.selector.clone(), factor })
            }
            _ => None,
        };
        self.moves = events.iter().filter_map(as_move).collect();
        self.built.clear();
    }

    /// The catalog data behind the market.
    pub fn raw(&self) -> &RawCatalog {
        &self.raw
    }

    /// EC2's price of an offering at a time; `None` where it is not offered.
    pub fn price(&self, offering: &Override, now_ms: i64) -> Option<MicroUsd> {
        let entry = self.raw.instance_type(&offering.instance_type)?;
        let listed = entry.price(&offering.zone, offering.capacity_type, self.spot)?;
        Some(self.moved(&offering.instance_type, &offering.zone, offering.capacity_type, listed, now_ms))
    }

    fn moved(&self, name: &str, zone: &str, capacity_type: CapacityType, listed: MicroUsd, now_ms: i64) -> MicroUsd {
        let touching = self.moves.iter().filter(|step| {
            (step.from_ms..step.until_ms).contains(&now_ms) && step.selector.matches_offering(name, zone, capacity_type)
        });
        touching.fold(listed, |price, step| step.factor.of(price))
    }

    /// Notes that an offering had no capacity; a second note renews the first.
    pub fn mark_unavailable(&mut self, offering: &Override, now_ms: i64) {
        let key = (offering.instance_type.clone(), offering.zone.clone(), offering.capacity_type);
        self.unavailable.insert(key, now_ms.saturating_add(UNAVAILABLE_MS));
        self.built.clear();
    }

    /// What the planner may buy for nodes with `settings`, as known at a time. The same `Arc` is returned until something
    /// in it changes, and a change copies only the instance types it touches.
    pub fn catalog(&mut self, settings: &NodeSettings, now_ms: i64) -> Arc<Catalog> {
        if let Some(built) = self.built.get(settings).filter(|built| now_ms < built.until_ms) {
            return Arc::clone(&built.catalog);
        }
        self.unavailable.retain(|_, until| *until > now_ms);
        let base =
            self.base.entry(settings.clone()).or_insert_with(|| Arc::new(self.raw.with_settings(settings, self.spot)));
        let base = Arc::clone(base);
        let touched = |entry: &InstanceType| {
            let from = (entry.name.to_string(), String::new(), CapacityType::Reserved);
            let short = self.unavailable.range(from..).next().is_some_and(|(key, _)| key.0 == *entry.name);
            short || self.moves.iter().any(|step| (step.from_ms..step.until_ms).contains(&now_ms))
        };
        let catalog = if base.instance_types.iter().any(|entry| touched(entry)) {
            let instance_types = base
                .instance_types
                .iter()
                .map(|entry| if touched(entry) { self.overlaid(entry, now_ms) } else { Arc::clone(entry) });
            Arc::new(Catalog { region: base.region.clone(), instance_types: instance_types.collect() })
        } else {
            base
        };
        let edges = self.moves.iter().flat_map(|step| [step.from_ms, step.until_ms]);
        let expiries = self.unavailable.values().copied();
        let until_ms = edges.chain(expiries).filter(|edge| *edge > now_ms).min().unwrap_or(i64::MAX);
        self.built.insert(settings.clone(), Built { until_ms, catalog: Arc::clone(&catalog) });
        catalog
    }

    fn overlaid(&self, entry: &Arc<InstanceType>, now_ms: i64) -> Arc<InstanceType> {
        let mut copy = InstanceType::clone(entry);
        for offering in &mut copy.offerings {
            let key = (entry.name.to_string(), offering.zone.to_string(), offering.capacity_type);
            offering.available &= !self.unavailable.contains_key(&key);
            offering.price = self.moved(&entry.name, &offering.zone, offering.capacity_type, offering.price, now_ms);
        }
        if copy == **entry { Arc::clone(entry) } else { Arc::new(copy) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cloud::catalog::embedded;
    use crate::cloud::simulated::script::Script;

    fn market() -> SpotPriceModel {
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
    fn an_offering_without_capacity_is_unavailable_for_three_minutes_and_only_it() {
        let mut market = market();
        let (short, other) = (
            offering("m5.large", "us-east-1a", CapacityType::Spot),
            offering("m5.large", "us-east-1b", CapacityType::Spot),
        );
        let settings = NodeSettings::default();
        let before = market.catalog(&settings, 0);
        assert!(Arc::ptr_eq(&before, &market.catalog(&settings, 5)));
        market.mark_unavailable(&short, 1_000);
        let during = market.catalog(&settings, 1_001);
        assert_eq!((seen(&during, &short).0, seen(&during, &other).0), (false, true));
        let copied =
            before.instance_types.iter().zip(&during.instance_types).filter(|(a, b)| !Arc::ptr_eq(a, b)).count();
        assert_eq!(copied, 1);
        market.mark_unavailable(&short, 100_000);
        assert!(!seen(&market.catalog(&settings, 181_000), &short).0, "a second mark renews the first");
        assert!(seen(&market.catalog(&settings, 280_000), &short).0);
    }

    #[test]
    fn a_price_move_begins_and_ends_on_time() {
        let mut market = market();
        let script = "[{at: 10s, for: 20s, do: price, factor: 3, instanceType: m5.*, capacityType: spot}]";
        market.set_moves(&Script::parse(script).unwrap().events, 100_000);
        let (spot, listed) = (
            offering("m5.large", "us-east-1a", CapacityType::Spot),
            offering("m5.large", "us-east-1a", CapacityType::OnDemand),
        );
        let other = offering("c5.large", "us-east-1a", CapacityType::Spot);
        let settings = NodeSettings::default();
        for (at, expected) in [(109_999, 48_000), (110_000, 144_000), (129_999, 144_000), (130_000, 48_000)] {
            assert_eq!(market.price(&spot, at), Some(MicroUsd(expected)), "{at}");
            let catalog = market.catalog(&settings, at);
            assert_eq!(seen(&catalog, &spot), (true, expected), "{at}");
            assert_eq!(seen(&catalog, &listed), (true, 96_000), "{at}");
            assert_eq!(seen(&catalog, &other), (true, 42_500), "{at}");
        }
    }

    #[test]
    fn what_is_not_offered_has_no_price() {
        let market = market();
        for of in [
            offering("m5.huge", "us-east-1a", CapacityType::Spot),
            offering("m5.large", "eu-west-1a", CapacityType::Spot),
            offering("u-6tb1.112xlarge", "us-east-1a", CapacityType::Spot),
            offering("m5.large", "us-east-1a", CapacityType::Reserved),
        ] {
            assert_eq!(market.price(&of, 0), None, "{of:?}");
        }
    }
}
