//! The offerings of the region: the catalogs of node classes, insufficient capacity, and the remaining counts of capacity reservations.
//!
//! Locks: `state` is held while a catalog is built, which locks the internals of [`Region`] and [`SpotRisk`]; these lock nothing
//! else. Every other method holds one lock at a time, and no lock is held across an `await`.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use k8s_openapi::api::core::v1::Node;
use stowage_api::{Ec2NodeClass, NodeClaim};
use stowage_model::offering::Catalog;
use stowage_model::time::UnixMillis;
use stowage_runtime::sync::lock;

use crate::Override;
use crate::catalog::embedded;
use crate::ec2::offerings::catalog_cache::{CatalogCache, CatalogSources, ReservedOfferings};
use crate::ec2::offerings::discovered_memory::DiscoveredMemory;
use crate::ec2::offerings::placement_score_table::ScoreSettings;
use crate::ec2::offerings::region::Region;
use crate::ec2::offerings::region_snapshot::{RegionResponses, RegionSnapshot};
use crate::ec2::offerings::reservation_counts::ReservationCounts;
use crate::ec2::offerings::shifted_zones::ZonalShifts;
use crate::ec2::offerings::spot_risk::SpotRisk;
use crate::ec2::offerings::unavailable::{CapacityScope, UnavailableOfferings};
use crate::ec2::options::Options;
use crate::ec2::placement_group::PlacementGroup;

#[derive(Debug)]
pub struct OfferingStore {
    options: Arc<Options>,
    region: Arc<Region>,
    risk: Arc<SpotRisk>,
    shifts: ZonalShifts,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    unavailable: UnavailableOfferings,
    memory: DiscoveredMemory,
    reservations: ReservationCounts,
    catalogs: CatalogCache,
}

impl OfferingStore {
    /// The store of a region before the first API response.
    pub fn new(region: &str, options: Arc<Options>) -> Self {
        let scores = ScoreSettings { threshold: options.spot_score_threshold, ..ScoreSettings::default() };
        let snapshot = RegionSnapshot::embedded(region, embedded());
        Self {
            options,
            region: Arc::new(Region::new(snapshot)),
            risk: Arc::new(SpotRisk::new(scores)),
            shifts: ZonalShifts::default(),
            state: Mutex::default(),
        }
    }

    /// The region, for the loops that refresh it.
    pub fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// The interruption risk of spot offerings.
    pub fn risk(&self) -> &Arc<SpotRisk> {
        &self.risk
    }

    /// The zones with an active zonal shift.
    pub fn shifts(&self) -> &ZonalShifts {
        &self.shifts
    }

    /// The region as last read.
    pub fn snapshot(&self) -> Arc<RegionSnapshot> {
        self.region.snapshot()
    }

    /// Id of a zone; empty while it is unknown.
    pub fn zone_id(&self, zone: &str) -> String {
        self.region.snapshot().zone_ids.get(zone).cloned().unwrap_or_default()
    }

    /// Records the responses of the region's APIs.
    pub fn learn_region(&self, responses: RegionResponses) {
        self.region.apply(responses);
    }

    /// The current offerings for nodes of a class in a placement group.
    pub fn catalog(&self, class: &Ec2NodeClass, group: Option<PlacementGroup>, now: UnixMillis) -> Arc<Catalog> {
        let shifted: BTreeSet<String> = self.shifts.shifted_zone_ids(now);
        let mut state = lock(&self.state);
        let State { unavailable, memory, reservations, catalogs } = &mut *state;
        let mut sources = CatalogSources {
            region: &self.region,
            risk: &self.risk,
            unavailable,
            memory,
            reservations,
            shifted_zone_ids: &shifted,
            options: &self.options,
        };
        catalogs.catalog(&mut sources, class, group, now)
    }

    /// Deletes the cached catalogs of classes that no longer exist.
    pub fn retain_classes(&self, classes: &[Arc<Ec2NodeClass>]) {
        lock(&self.state).catalogs.retain_classes(classes);
    }

    /// The reserved offerings of the cached catalogs; `None` when reserved capacity is disabled.
    pub fn reserved(&self) -> Option<ReservedOfferings> {
        self.options.reserved_capacity.then(|| lock(&self.state).catalogs.reserved_offerings())
    }

    /// Marks capacity as unavailable for a while.
    pub fn mark_unavailable(&self, scopes: impl IntoIterator<Item = CapacityScope>, now: UnixMillis) {
        let mut state = lock(&self.state);
        for scope in scopes {
            state.unavailable.mark(scope, now);
        }
    }

    /// Marks an offering as unavailable for a while, in every placement group.
    pub fn mark_offering_unavailable(&self, offering: &Override, now: UnixMillis) {
        self.mark_unavailable([CapacityScope::Offering(offering.clone(), None)], now);
    }

    /// A copy of the marks of unavailable capacity.
    pub fn unavailable(&self) -> UnavailableOfferings {
        lock(&self.state).unavailable.clone()
    }

    /// The first entries of unavailable capacity with their ends, and the number of entries.
    pub fn unavailable_entries(&self, most: usize, now: UnixMillis) -> (Vec<(CapacityScope, UnixMillis)>, usize) {
        lock(&self.state).unavailable.entries(most, now)
    }

    /// Records the memory that a registered Node reports for its instance type.
    pub fn record_memory(&self, claim: &NodeClaim, node: &Node, now: UnixMillis) {
        lock(&self.state).memory.record(claim, node, now);
    }

    /// Reads or updates the counts of capacity reservations. `update` must not call this store.
    pub fn with_reservations<R>(&self, update: impl FnOnce(&mut ReservationCounts) -> R) -> R {
        update(&mut lock(&self.state).reservations)
    }
}
