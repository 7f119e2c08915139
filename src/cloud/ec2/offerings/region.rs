//! What is known of the region: an immutable snapshot that a refresh replaces, and the catalogs made of it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Arc, Mutex};

use arc_swap::ArcSwap;

use crate::cloud::catalog::{RawCatalog, RawInstanceType};
use crate::cloud::ec2::aws::errors::ApiError;
use crate::cloud::ec2::offerings::catalog_key::ClassView;
use crate::cloud::ec2::offerings::class_offerings;
use crate::cloud::ec2::offerings::class_offerings::OfferingInputs;
use crate::cloud::ec2::offerings::instance_types::ZonesByType;
use crate::cloud::ec2::offerings::prices;
use crate::cloud::ec2::offerings::prices::OnDemandPrices;
use crate::cloud::ec2::offerings::spot_prices;
use crate::cloud::ec2::offerings::spot_prices::{SpotHistory, SpotPrices};
use crate::model::offering::{CapacityType, Catalog, InstanceType};
use crate::model::units::MicroUsd;
use crate::sync::lock;

/// Catalogs that are kept; node classes that share one are many more.
const MOST_CATALOGUES: usize = 64;

/// Where a part of the snapshot comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// EC2's answer.
    Live {
        /// When it was given, milliseconds since the epoch.
        as_of_ms: i64,
    },
    /// An older answer of EC2: the last refresh failed.
    Stale {
        /// When it was given, milliseconds since the epoch.
        as_of_ms: i64,
        /// Since when refreshes fail, milliseconds since the epoch.
        since_ms: i64,
        /// How.
        why: String,
    },
    /// The table in the binary.
    StandIn {
        /// Since when, milliseconds since the epoch.
        since_ms: i64,
        /// Why there is no answer of EC2; `None` while it was not asked.
        why: Option<String>,
    },
}

impl Source {
    /// Whether it is EC2's latest answer.
    pub fn is_live(&self) -> bool {
        matches!(self, Self::Live { .. })
    }

    fn after(&self, failed: Option<&str>, now_ms: i64) -> Self {
        match (self, failed) {
            (_, None) => Self::Live { as_of_ms: now_ms },
            (Self::Live { as_of_ms }, Some(why)) => {
                Self::Stale { as_of_ms: *as_of_ms, since_ms: now_ms, why: why.to_owned() }
            }
            (Self::Stale { as_of_ms, since_ms, .. }, Some(why)) => {
                Self::Stale { as_of_ms: *as_of_ms, since_ms: *since_ms, why: why.to_owned() }
            }
            (Self::StandIn { since_ms, .. }, Some(why)) => {
                Self::StandIn { since_ms: *since_ms, why: Some(why.to_owned()) }
            }
        }
    }
}

/// A part of the snapshot that one API tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// DescribeInstanceTypes.
    Types,
    /// DescribeInstanceTypeOfferings.
    Zones,
    /// Pricing.
    OnDemandPrices,
    /// DescribeSpotPriceHistory.
    SpotPrices,
}

impl Part {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Types, Self::Zones, Self::OnDemandPrices, Self::SpotPrices];

    /// What stands in while there is no answer.
    pub(crate) fn stand_in(self) -> &'static str {
        match self {
            Self::Types => "the instance types in the binary stand in",
            Self::Zones => {
                "the zones in the binary stand in, or in another region every zone of the node class's subnets"
            }
            Self::OnDemandPrices => "the price list of us-east-1 in the binary stands in",
            Self::SpotPrices => "on-demand prices stand in for spot prices",
        }
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Types => "instance types",
            Self::Zones => "zones of instance types",
            Self::OnDemandPrices => "on-demand prices",
            Self::SpotPrices => "spot prices",
        })
    }
}

/// What the APIs answered; `None` for what was not asked.
#[derive(Debug, Default)]
pub struct Answers {
    /// Instance types by name, without zones and prices.
    pub types: Option<Result<BTreeMap<String, RawInstanceType>, ApiError>>,
    /// Zones by instance type.
    pub zones: Option<Result<ZonesByType, ApiError>>,
    /// On-demand prices.
    pub on_demand: Option<Result<OnDemandPrices, ApiError>>,
    /// Spot prices.
    pub spot: Option<Result<SpotHistory, ApiError>>,
}

/// A part that changed between answered and not answered: one log line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Turn {
    /// Which part.
    pub part: Part,
    /// Why it is not answered any more; `None` when it is again.
    pub why: Option<String>,
}

impl fmt::Display for Turn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.why {
            None => write!(f, "{} are EC2's own", self.part),
            Some(why) => write!(f, "{} could not be read, {}: {why}", self.part, self.part.stand_in()),
        }
    }
}

/// What is known of a region at one time. Immutable; parts that did not change are shared with the snapshot before.
#[derive(Clone, Debug)]
pub struct RegionSnapshot {
    /// Grows with every change of what is known.
    pub version: u64,
    /// As `us-east-1`.
    pub region: String,
    /// Instance types by name. Their own zones and prices are not looked at: see the members below.
    pub types: Arc<BTreeMap<String, RawInstanceType>>,
    /// Zones by instance type; `None` while nobody knows, and every zone is as good as another.
    pub zones: Option<Arc<ZonesByType>>,
    /// On-demand prices.
    pub on_demand: Arc<OnDemandPrices>,
    /// Spot prices; `None` until they were read once, and the on-demand price is the best guess.
    pub spot: Option<Arc<SpotPrices>>,
    /// Zone ids by zone name, as far as they were seen.
    pub zone_ids: Arc<BTreeMap<String, String>>,
    sources: [Source; 4],
}

impl RegionSnapshot {
    /// What the table in the binary tells of a region, before EC2 was asked.
    pub fn stand_in(region: &str, tables: &RawCatalog, now_ms: i64) -> Self {
        let entries = || tables.instance_types.iter();
        let zones = (tables.region == region).then(|| {
            let by_type = entries().map(|entry| (entry.name.clone(), entry.zones.iter().cloned().collect()));
            Arc::new(by_type.collect())
        });
        let waiting = || Source::StandIn { since_ms: now_ms, why: None };
        let priced = |entry: &RawInstanceType| {
            entry.on_demand.map(|price| (entry.name.clone(), prices::stand_in(region, price)))
        };
        Self {
            version: 1,
            region: region.to_owned(),
            types: Arc::new(entries().map(|entry| (entry.name.clone(), entry.clone())).collect()),
            zones,
            on_demand: Arc::new(entries().filter_map(priced).collect()),
            spot: None,
            zone_ids: Arc::default(),
            sources: [
                waiting(),
                waiting(),
                // Nobody will ask, so nothing else would ever tell of it.
                Source::StandIn { since_ms: now_ms, why: prices::unlisted(region) },
                waiting(),
            ],
        }
    }

    /// Where a part comes from.
    pub fn source(&self, part: Part) -> &Source {
        &self.sources[part as usize]
    }

    /// Zones that offer an instance type; `None` while that is not known of any.
    pub fn zones_of(&self, name: &str) -> Option<&BTreeSet<String>> {
        static NONE: BTreeSet<String> = BTreeSet::new();
        self.zones.as_ref().map(|zones| zones.get(name).unwrap_or(&NONE))
    }

    /// The price of an instance type in a zone; `None` where it is not sold so, or has no price.
    pub fn price(&self, entry: &RawInstanceType, zone: &str, capacity_type: CapacityType) -> Option<MicroUsd> {
        if !entry.usage_classes.iter().any(|class| class == capacity_type.as_str()) {
            return None;
        }
        match (capacity_type, &self.spot) {
            (CapacityType::Reserved, _) => None,
            (CapacityType::Spot, Some(spot)) => spot.get(&entry.name)?.get(zone).copied(),
            (CapacityType::OnDemand, _) | (CapacityType::Spot, None) => self.on_demand.get(&entry.name).copied(),
        }
    }

    /// The snapshot after answers: what was answered is laid over what was known (types and zones replaced, prices overlaid,
    /// none taken away), and what was not stays. With what is to be told of it.
    #[must_use]
    pub fn after(&self, answers: Answers, now_ms: i64) -> (Self, Vec<Turn>) {
        let mut next = self.clone();
        let mut turns = Vec::new();
        if let Some(types) = next.heard(Part::Types, answers.types, now_ms, &mut turns)
            && *next.types != types
        {
            next.types = Arc::new(types);
            next.version += 1;
        }
        if let Some(zones) = next.heard(Part::Zones, answers.zones, now_ms, &mut turns)
            && next.zones.as_deref() != Some(&zones)
        {
            next.zones = Some(Arc::new(zones));
            next.version += 1;
        }
        if let Some(new) = next.heard(Part::OnDemandPrices, answers.on_demand, now_ms, &mut turns) {
            let mut prices = OnDemandPrices::clone(&next.on_demand);
            prices.extend(new);
            if prices != *next.on_demand {
                next.on_demand = Arc::new(prices);
                next.version += 1;
            }
        }
        if let Some(history) = next.heard(Part::SpotPrices, answers.spot, now_ms, &mut turns) {
            let mut ids = BTreeMap::clone(&next.zone_ids);
            ids.extend(history.zone_ids);
            next.zone_ids = Arc::new(ids);
            let mut prices = next.spot.as_deref().cloned().unwrap_or_default();
            spot_prices::overlay(&mut prices, history.prices);
            if next.spot.as_deref() != Some(&prices) {
                next.spot = Some(Arc::new(prices));
                next.version += 1;
            }
        }
        (next, turns)
    }

    /// Notes how a part was answered, and gives back the answer.
    fn heard<T>(
        &mut self,
        part: Part,
        answer: Option<Result<T, ApiError>>,
        now_ms: i64,
        turns: &mut Vec<Turn>,
    ) -> Option<T> {
        let (value, why) = match answer? {
            Ok(value) => (Some(value), None),
            Err(error) => (None, Some(error.to_string())),
        };
        let source = &mut self.sources[part as usize];
        let first = matches!(source, Source::StandIn { why: None, .. });
        let before = source.is_live();
        *source = source.after(why.as_deref(), now_ms);
        // Of the first answers only the missing ones are news.
        let is_news = if first { why.is_some() } else { source.is_live() != before };
        if is_news {
            turns.push(Turn { part, why });
        }
        value
    }
}

/// A catalog that was made, and of what.
#[derive(Debug)]
struct Built {
    version: u64,
    base: Vec<Arc<InstanceType>>,
    stamp: [u64; 3],
    catalog: Arc<Catalog>,
}

/// The region: its latest snapshot, and the catalogs made of it. No I/O: a refresh is handed in.
#[derive(Debug)]
pub struct Region {
    snapshot: ArcSwap<RegionSnapshot>,
    built: Mutex<BTreeMap<ClassView, Built>>,
}

impl Region {
    /// A region of which only the table in the binary is known.
    pub fn new(snapshot: RegionSnapshot) -> Self {
        Self { snapshot: ArcSwap::from_pointee(snapshot), built: Mutex::default() }
    }

    /// The latest snapshot.
    pub fn snapshot(&self) -> Arc<RegionSnapshot> {
        self.snapshot.load_full()
    }

    /// Takes answers in. What is to be told is returned. For one caller at a time: of two, one's answers are lost.
    pub fn learn(&self, answers: Answers, now_ms: i64) -> Vec<Turn> {
        let (next, turns) = self.snapshot.load().after(answers, now_ms);
        self.snapshot.store(Arc::new(next));
        turns
    }

    /// What may be bought for nodes of a class. The same `Arc` until the snapshot, the class or the market changes; then only
    /// instance types in which something changed are new.
    pub fn catalog(&self, class: &ClassView, market: &OfferingInputs<'_>) -> Arc<Catalog> {
        let snapshot = self.snapshot.load();
        let mut built = lock(&self.built);
        let known = built.get(class);
        if let Some(known) = known.filter(|known| known.version == snapshot.version && known.stamp == market.stamp) {
            return Arc::clone(&known.catalog);
        }
        let base = match known {
            Some(known) if known.version == snapshot.version => known.base.clone(),
            Some(known) => shared(class_offerings::base(&snapshot, class), &known.base),
            None => class_offerings::base(&snapshot, class),
        };
        let instance_types = class_offerings::overlaid(&base, market);
        let instance_types = match known {
            Some(known) => shared(instance_types, &known.catalog.instance_types),
            None => instance_types,
        };
        let catalog = Arc::new(Catalog { region: snapshot.region.clone(), instance_types });
        if built.len() >= MOST_CATALOGUES && !built.contains_key(class) {
            built.clear();
        }
        let (version, stamp) = (snapshot.version, market.stamp);
        built.insert(class.clone(), Built { version, base, stamp, catalog: Arc::clone(&catalog) });
        catalog
    }
}

/// The same instance types, those that equal an old one being that one. Both lists are sorted by name.
pub(crate) fn shared(new: Vec<Arc<InstanceType>>, old: &[Arc<InstanceType>]) -> Vec<Arc<InstanceType>> {
    let same = |entry: Arc<InstanceType>| {
        let found = old.binary_search_by(|other| other.name.cmp(&entry.name)).ok().map(|at| &old[at]);
        found.filter(|found| **found == entry).map_or(entry, Arc::clone)
    };
    new.into_iter().map(same).collect()
}

#[cfg(test)]
mod tests;
