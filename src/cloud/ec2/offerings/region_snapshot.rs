//! The region's offerings as the AWS APIs last reported them: an immutable snapshot, and the step from one snapshot to the next.
//!
//! No I/O: API responses are arguments.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use stowage_model::offering::CapacityType;
use stowage_model::units::MicroUsd;

use crate::OptionalApi;
use crate::catalog::{RawCatalog, RawInstanceType};
use crate::ec2::aws::errors::ApiError;
use crate::ec2::offerings::instance_types::ZonesByType;
use crate::ec2::offerings::list_prices;
use crate::ec2::offerings::list_prices::OnDemandPrices;
use crate::ec2::offerings::spot_prices;
use crate::ec2::offerings::spot_prices::{SpotHistory, SpotPrices};

/// Where a dataset of the snapshot comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// The response to the last API call.
    Live,
    /// The response to an earlier API call: the last one failed.
    Stale {
        /// Why it failed.
        error: String,
    },
    /// The table embedded in the binary.
    Embedded {
        /// Why there is no response; `None` before the first call.
        error: Option<String>,
    },
}

impl Source {
    /// Whether it is the response to the last API call.
    pub fn is_live(&self) -> bool {
        matches!(self, Self::Live)
    }

    /// The source after another API call, which failed where there is an error.
    fn after_call(&self, error: Option<&str>) -> Self {
        match (self, error) {
            (_, None) => Self::Live,
            (Self::Live | Self::Stale { .. }, Some(error)) => Self::Stale { error: error.to_owned() },
            (Self::Embedded { .. }, Some(error)) => Self::Embedded { error: Some(error.to_owned()) },
        }
    }
}

/// The data of the snapshot that one API reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Dataset {
    /// DescribeInstanceTypes.
    Types,
    /// DescribeInstanceTypeOfferings.
    Zones,
    /// Pricing.
    OnDemandPrices,
    /// DescribeSpotPriceHistory.
    SpotPrices,
}

impl Dataset {
    pub const ALL: [Self; 4] = [Self::Types, Self::Zones, Self::OnDemandPrices, Self::SpotPrices];

    /// The fallback while there is no response, for log lines and event notes.
    pub(crate) fn fallback(self) -> &'static str {
        match self {
            Self::Types => "using the instance types embedded in the binary",
            Self::Zones => {
                "using the zones embedded in the binary, or in another region every zone of the node class's subnets"
            }
            Self::OnDemandPrices => "using the us-east-1 price list embedded in the binary",
            Self::SpotPrices => "using on-demand prices as spot prices",
        }
    }

    /// The API that reports it.
    fn api(self) -> OptionalApi {
        match self {
            Self::Types => OptionalApi::InstanceTypes,
            Self::Zones => OptionalApi::InstanceTypeZones,
            Self::OnDemandPrices => OptionalApi::OnDemandPrices,
            Self::SpotPrices => OptionalApi::SpotPrices,
        }
    }
}

impl fmt::Display for Dataset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Types => "instance types",
            Self::Zones => "zones of instance types",
            Self::OnDemandPrices => "on-demand prices",
            Self::SpotPrices => "spot prices",
        })
    }
}

/// Responses of the region's APIs; `None` where an API was not called.
#[derive(Debug, Default)]
pub struct RegionResponses {
    /// Instance types by name, without zones and prices.
    pub types: Option<Result<BTreeMap<String, RawInstanceType>, ApiError>>,
    /// Zones by instance type.
    pub zones: Option<Result<ZonesByType, ApiError>>,
    pub on_demand: Option<Result<OnDemandPrices, ApiError>>,
    pub spot: Option<Result<SpotHistory, ApiError>>,
}

/// A dataset whose API started or stopped failing: one log line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceTransition {
    pub dataset: Dataset,
    /// Why the API fails; `None` where it recovered.
    pub error: Option<String>,
}

impl fmt::Display for SourceTransition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.error {
            None => write!(f, "{} are read from AWS again", self.dataset),
            Some(error) => write!(f, "{} could not be read, {}: {error}", self.dataset, self.dataset.fallback()),
        }
    }
}

/// The offerings of a region at one time. Immutable; datasets that did not change are shared with the previous snapshot.
#[derive(Clone, Debug)]
pub struct RegionSnapshot {
    /// Incremented with every change of the data.
    pub version: u64,
    /// Such as `us-east-1`.
    pub region: String,
    /// Instance types by name. Their own zones and prices are ignored: see the members below.
    pub types: Arc<BTreeMap<String, RawInstanceType>>,
    /// Zones by instance type; `None` while unknown: every zone is assumed to offer every type.
    pub zones: Option<Arc<ZonesByType>>,
    pub on_demand: Arc<OnDemandPrices>,
    /// Spot prices; `None` until they were read once: the on-demand price is used instead.
    pub spot: Option<Arc<SpotPrices>>,
    /// Zone ids by zone name, as far as they are known.
    pub zone_ids: Arc<BTreeMap<String, String>>,
    sources: [Source; 4],
}

impl RegionSnapshot {
    /// The table embedded in the binary, before the first API call.
    pub fn embedded(region: &str, tables: &RawCatalog) -> Self {
        let entries = || tables.instance_types.iter();
        let zones = (tables.region == region).then(|| {
            let by_type = entries().map(|entry| (entry.name.clone(), entry.zones.iter().cloned().collect()));
            Arc::new(by_type.collect())
        });
        let uncalled = || Source::Embedded { error: None };
        let priced = |entry: &RawInstanceType| {
            entry.on_demand.map(|price| (entry.name.clone(), list_prices::fallback_price(region, price)))
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
                uncalled(),
                uncalled(),
                // Where there is no Pricing API it is never called: report that from the start.
                Source::Embedded { error: list_prices::missing_api(region) },
                uncalled(),
            ],
        }
    }

    /// Where a dataset comes from.
    pub fn source(&self, dataset: Dataset) -> &Source {
        &self.sources[dataset as usize]
    }

    /// The APIs of datasets that fail, with the consequence.
    pub fn failing_apis(&self) -> BTreeMap<OptionalApi, String> {
        let mut out = BTreeMap::new();
        for dataset in Dataset::ALL {
            let error = match self.source(dataset) {
                Source::Live | Source::Embedded { error: None } => continue,
                Source::Stale { error } | Source::Embedded { error: Some(error) } => error.clone(),
            };
            out.insert(dataset.api(), SourceTransition { dataset, error: Some(error) }.to_string());
        }
        out
    }

    /// Zones that offer an instance type; `None` while the zones of all types are unknown.
    pub fn zones_of(&self, name: &str) -> Option<&BTreeSet<String>> {
        static NONE: BTreeSet<String> = BTreeSet::new();
        self.zones.as_ref().map(|zones| zones.get(name).unwrap_or(&NONE))
    }

    /// The price of an instance type in a zone; `None` where the capacity type is not supported or has no price.
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

    /// The snapshot with responses applied: types and zones are replaced, prices are overlaid and none is removed. Datasets
    /// without a response stay. Also returns the APIs that started or stopped failing.
    #[must_use]
    pub fn updated(&self, responses: RegionResponses) -> (Self, Vec<SourceTransition>) {
        let mut next = self.clone();
        let mut transitions = Vec::new();
        if let Some(types) = next.record_response(Dataset::Types, responses.types, &mut transitions)
            && *next.types != types
        {
            next.types = Arc::new(types);
            next.version += 1;
        }
        if let Some(zones) = next.record_response(Dataset::Zones, responses.zones, &mut transitions)
            && next.zones.as_deref() != Some(&zones)
        {
            next.zones = Some(Arc::new(zones));
            next.version += 1;
        }
        if let Some(new) = next.record_response(Dataset::OnDemandPrices, responses.on_demand, &mut transitions) {
            let mut prices = OnDemandPrices::clone(&next.on_demand);
            prices.extend(new);
            if prices != *next.on_demand {
                next.on_demand = Arc::new(prices);
                next.version += 1;
            }
        }
        if let Some(history) = next.record_response(Dataset::SpotPrices, responses.spot, &mut transitions) {
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
        (next, transitions)
    }

    /// Updates the source of a dataset after a call, and returns the data.
    fn record_response<T>(
        &mut self,
        dataset: Dataset,
        response: Option<Result<T, ApiError>>,
        transitions: &mut Vec<SourceTransition>,
    ) -> Option<T> {
        let (value, error) = match response? {
            Ok(value) => (Some(value), None),
            Err(error) => (None, Some(error.to_string())),
        };
        let source = &mut self.sources[dataset as usize];
        let first = matches!(source, Source::Embedded { error: None });
        let before = source.is_live();
        *source = source.after_call(error.as_deref());
        // A first response that succeeds is not a transition.
        let is_transition = if first { error.is_some() } else { source.is_live() != before };
        if is_transition {
            transitions.push(SourceTransition { dataset, error });
        }
        value
    }
}

#[cfg(test)]
mod tests;
