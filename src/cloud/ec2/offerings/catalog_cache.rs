//! The catalog of each node class: the region's catalog without the types that boot none of its images, without zones that are
//! out of addresses or shifted away from, with the memory that nodes reported. Cached until an input changes.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use kube::ResourceExt;
use stowage_api::Ec2NodeClass;
use stowage_api::node_class::{AmiStatus, SubnetStatus};
use stowage_model::offering::{CapacityType, Catalog, InstanceType};
use stowage_model::time::UnixMillis;
use stowage_model::units::{Bytes, MicroUsd};

use crate::Override;
use crate::ec2::boot_image::image_of;
use crate::ec2::offerings::catalog_key::CatalogKey;
use crate::ec2::offerings::class_offerings::OfferingInputs;
use crate::ec2::offerings::discovered_memory::DiscoveredMemory;
use crate::ec2::offerings::region::{Region, reuse_unchanged};
use crate::ec2::offerings::reservation_counts::ReservationCounts;
use crate::ec2::offerings::spot_risk::SpotRisk;
use crate::ec2::offerings::unavailable::UnavailableOfferings;
use crate::ec2::options::Options;
use crate::ec2::placement_group::PlacementGroup;

#[derive(Debug)]
struct CachedCatalog {
    /// The region's catalog, before images, zones and memory are applied.
    region_catalog: Arc<Catalog>,
    images: Vec<AmiStatus>,
    closed_zones: BTreeSet<String>,
    memory_version: u64,
    catalog: Arc<Catalog>,
}

/// The inputs of a catalog besides the class.
pub struct CatalogSources<'a> {
    pub region: &'a Region,
    pub risk: &'a SpotRisk,
    pub unavailable: &'a mut UnavailableOfferings,
    pub memory: &'a mut DiscoveredMemory,
    pub reservations: &'a ReservationCounts,
    /// Ids of zones that are shifted away from.
    pub shifted_zone_ids: &'a BTreeSet<String>,
    pub options: &'a Options,
}

/// The catalogs of node classes, by name of the class.
#[derive(Debug, Default)]
pub struct CatalogCache {
    by_class: HashMap<String, CachedCatalog>,
}

/// Reserved offerings by instance type and zone: whether one of them is available, and the price.
pub type ReservedOfferings = BTreeMap<(String, String), (bool, MicroUsd)>;

impl CatalogCache {
    /// Drops the catalogs of deleted classes.
    pub fn retain_classes(&mut self, classes: &[Arc<Ec2NodeClass>]) {
        self.by_class.retain(|name, _| classes.iter().any(|class| class.name_any() == *name));
    }

    /// The reserved offerings of the cached catalogs.
    pub fn reserved_offerings(&self) -> ReservedOfferings {
        let mut out = ReservedOfferings::new();
        for found in self.by_class.values().flat_map(|cached| &cached.catalog.instance_types) {
            let reserved = found.offerings.iter().filter(|offering| offering.capacity_type == CapacityType::Reserved);
            for offering in reserved {
                let key = (found.name.to_string(), offering.zone.to_string());
                let (available, price) = out.entry(key).or_default();
                *available |= offering.available;
                *price = offering.price;
            }
        }
        out
    }

    /// The current offerings for nodes of a class, in its placement group where it has one. The same `Arc` until they change.
    pub fn catalog(
        &mut self,
        sources: &mut CatalogSources<'_>,
        class: &Ec2NodeClass,
        group: Option<PlacementGroup>,
        now: UnixMillis,
    ) -> Arc<Catalog> {
        let group_id = group.as_ref().map(|group| group.id.clone());
        let (unavailable_version, memory_version) = (sources.unavailable.prune(now), sources.memory.prune(now));
        let risk = sources.risk.at(now);
        let (unavailable, reservations, options) = (&*sources.unavailable, sources.reservations, sources.options);
        let inputs = OfferingInputs {
            versions: [unavailable_version, reservations.version(), risk.version],
            unavailable: &|offering: &Override, partition| {
                unavailable.is_unavailable_in_partition(offering, group_id.as_deref(), partition, now)
            },
            reserved: &|id| reservations.available(id),
            risk_permille: &|instance_type, zone| risk.permille(instance_type, zone),
        };
        let mut key = CatalogKey::of(class, group, options.reserved_capacity);
        key.settings = options.settings(class);
        let region_catalog = sources.region.catalog(&key, &inputs);
        let status = class.status.clone().unwrap_or_default();
        let mut closed_zones = unavailable.exhausted_zones(&status.subnets, now);
        let is_shifted =
            |subnet: &&SubnetStatus| subnet.zone_id.as_ref().is_some_and(|id| sources.shifted_zone_ids.contains(id));
        closed_zones.extend(status.subnets.iter().filter(is_shifted).map(|subnet| subnet.zone.clone()));
        let name = class.name_any();
        let cached = self.by_class.get(&name);
        if let Some(cached) = cached
            && Arc::ptr_eq(&cached.region_catalog, &region_catalog)
            && cached.images == status.amis
            && cached.closed_zones == closed_zones
            && cached.memory_version == memory_version
        {
            return Arc::clone(&cached.catalog);
        }
        let of_class = |found: &Arc<InstanceType>| {
            let image = image_of(&status.amis, &found.labels)?;
            let memory = sources.memory.memory(&image.id, &found.name);
            Some(with_memory(without_zones(found, &closed_zones), memory))
        };
        let instance_types = region_catalog.instance_types.iter().filter_map(of_class).collect();
        let catalog = Catalog { region: region_catalog.region.clone(), instance_types };
        let catalog = reusing(cached.map(|cached| &cached.catalog), catalog);
        let images = status.amis;
        let cached =
            CachedCatalog { region_catalog, images, closed_zones, memory_version, catalog: Arc::clone(&catalog) };
        self.by_class.insert(name, cached);
        catalog
    }
}

/// The type with its offerings in some zones unavailable; the same `Arc` where that changes nothing.
fn without_zones(found: &Arc<InstanceType>, zones: &BTreeSet<String>) -> Arc<InstanceType> {
    if !found.offerings.iter().any(|offering| offering.available && zones.contains(&*offering.zone)) {
        return Arc::clone(found);
    }
    let mut out = InstanceType::clone(found);
    for offering in &mut out.offerings {
        offering.available &= !zones.contains(&*offering.zone);
    }
    Arc::new(out)
}

/// The type with the memory that its nodes reported, unless that is implausible. The overhead stays the one computed from the
/// estimated memory.
fn with_memory(found: Arc<InstanceType>, reported: Option<Bytes>) -> Arc<InstanceType> {
    let estimate = found.capacity.memory;
    let plausible = |reported: &Bytes| reported.0 > estimate.0 / 2 && reported.0 < estimate.0 * 2;
    let Some(reported) = reported.filter(plausible).filter(|reported| *reported != estimate) else {
        return found;
    };
    let mut out = Arc::unwrap_or_clone(found);
    let more = reported.0 - estimate.0;
    out.capacity.memory = reported;
    // Where the overhead exceeds the estimate, the true overhead is unknown.
    if out.allocatable.memory.0 > 0 {
        out.allocatable.memory = Bytes((out.allocatable.memory.0 + more).max(0));
    }
    Arc::new(out)
}

/// The new catalog with unchanged instance types shared with the previous one; the previous one itself where none changed.
fn reusing(before: Option<&Arc<Catalog>>, new: Catalog) -> Arc<Catalog> {
    let Some(before) = before else { return Arc::new(new) };
    let new = Catalog { instance_types: reuse_unchanged(new.instance_types, &before.instance_types), ..new };
    if new == **before { Arc::clone(before) } else { Arc::new(new) }
}

#[cfg(test)]
mod tests;
