//! The region's latest snapshot and the catalogs built from it, one for each distinct [`CatalogKey`].

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use arc_swap::ArcSwap;
use stowage_model::offering::{Catalog, InstanceType};
use stowage_model::time::UnixMillis;
use stowage_runtime::sync::lock;

use crate::ec2::offerings::catalog_key::CatalogKey;
use crate::ec2::offerings::class_offerings;
use crate::ec2::offerings::class_offerings::OfferingInputs;
use crate::ec2::offerings::region_snapshot::{Dataset, RegionResponses, RegionSnapshot, SourceTransition};

/// Maximum number of cached catalogs. All are dropped when one more is needed.
const MAX_CATALOGS: usize = 64;

/// A catalog and the versions of its inputs.
#[derive(Debug)]
struct CachedCatalog {
    snapshot_version: u64,
    base: Vec<Arc<InstanceType>>,
    input_versions: [u64; 3],
    catalog: Arc<Catalog>,
}

/// The region: its latest snapshot, and the catalogs built from it. No I/O: API responses are arguments.
#[derive(Debug)]
pub struct Region {
    snapshot: ArcSwap<RegionSnapshot>,
    catalogs: Mutex<BTreeMap<CatalogKey, CachedCatalog>>,
    read_at: Mutex<BTreeMap<Dataset, UnixMillis>>,
}

impl Region {
    /// A region that starts with a snapshot.
    pub fn new(snapshot: RegionSnapshot) -> Self {
        Self { snapshot: ArcSwap::from_pointee(snapshot), catalogs: Mutex::default(), read_at: Mutex::default() }
    }

    pub fn snapshot(&self) -> Arc<RegionSnapshot> {
        self.snapshot.load_full()
    }

    /// When a dataset was last read; `None` before.
    pub fn read_at(&self, dataset: Dataset) -> Option<UnixMillis> {
        lock(&self.read_at).get(&dataset).copied()
    }

    /// Records when a dataset was read.
    pub fn record_read(&self, dataset: Dataset, now: UnixMillis) {
        lock(&self.read_at).insert(dataset, now);
    }

    /// Applies responses and returns the APIs that started or stopped failing. Not for concurrent callers: one would lose its
    /// responses.
    pub fn apply(&self, responses: RegionResponses) -> Vec<SourceTransition> {
        let (next, transitions) = self.snapshot.load().updated(responses);
        self.snapshot.store(Arc::new(next));
        transitions
    }

    /// The offerings for nodes of a class. The same `Arc` until the snapshot, the class or the inputs change; then unchanged
    /// instance types are shared with the previous catalog.
    pub fn catalog(&self, class: &CatalogKey, inputs: &OfferingInputs<'_>) -> Arc<Catalog> {
        let snapshot = self.snapshot.load();
        let mut catalogs = lock(&self.catalogs);
        let cached = catalogs.get(class);
        let is_current = |cached: &&CachedCatalog| {
            cached.snapshot_version == snapshot.version && cached.input_versions == inputs.versions
        };
        if let Some(cached) = cached.filter(is_current) {
            return Arc::clone(&cached.catalog);
        }
        let base = match cached {
            Some(cached) if cached.snapshot_version == snapshot.version => cached.base.clone(),
            Some(cached) => reuse_unchanged(class_offerings::base(&snapshot, class), &cached.base),
            None => class_offerings::base(&snapshot, class),
        };
        let instance_types = class_offerings::with_inputs(&base, inputs);
        let instance_types = match cached {
            Some(cached) => reuse_unchanged(instance_types, &cached.catalog.instance_types),
            None => instance_types,
        };
        let catalog = Arc::new(Catalog { region: snapshot.region.clone(), instance_types });
        if catalogs.len() >= MAX_CATALOGS && !catalogs.contains_key(class) {
            catalogs.clear();
        }
        let (snapshot_version, input_versions) = (snapshot.version, inputs.versions);
        let cached = CachedCatalog { snapshot_version, base, input_versions, catalog: Arc::clone(&catalog) };
        catalogs.insert(class.clone(), cached);
        catalog
    }
}

/// The new list, with each instance type that equals an old one replaced by that `Arc`. Both lists are sorted by name.
pub(crate) fn reuse_unchanged(new: Vec<Arc<InstanceType>>, old: &[Arc<InstanceType>]) -> Vec<Arc<InstanceType>> {
    let same = |entry: Arc<InstanceType>| {
        let found = old.binary_search_by(|other| other.name.cmp(&entry.name)).ok().map(|at| &old[at]);
        found.filter(|found| **found == entry).map_or(entry, Arc::clone)
    };
    new.into_iter().map(same).collect()
}

#[cfg(test)]
mod tests;
