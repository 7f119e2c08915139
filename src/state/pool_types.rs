//! Instance types of NodePools, and the capacity and price of a NodeClaim's node.

use std::collections::HashMap;
use std::sync::Arc;

use kube::ResourceExt;
use stowage_api::{NodeClaim, NodePool};
use stowage_model::labels;
use stowage_model::offering::{CapacityType, Catalog, InstanceType};
use stowage_model::resources::Resources;
use stowage_model::units::MicroUsd;

use crate::state::claim_index::reported_capacity;
use crate::state::claim_offers::highest_price;
use crate::state::object_ext::{NodeClaimExt, ObjectExt};
use crate::state::tables::ClusterState;

/// A NodePool that may launch nodes, with the offerings of its node class.
#[derive(Clone, Debug)]
pub struct ReadyPool {
    pub pool: Arc<NodePool>,
    pub catalog: Arc<Catalog>,
}

/// The offering that a claim was launched as, or else the offering that it was planned as: instance type, zone, capacity type.
pub fn offering_of(claim: &NodeClaim) -> Option<(String, String, CapacityType)> {
    let label = |key: &str| claim.labels().get(key).cloned();
    if let (Some(name), Some(zone), Some(capacity_type)) =
        (label(labels::INSTANCE_TYPE), label(labels::ZONE), label(labels::CAPACITY_TYPE))
    {
        return Some((name, zone, CapacityType::parse(&capacity_type)?));
    }
    let mut parts = claim.annotations().get(labels::PLANNED_OFFERING)?.split('/');
    let (name, zone, capacity_type) = (parts.next()?, parts.next()?, parts.next()?);
    Some((name.to_owned(), zone.to_owned(), CapacityType::parse(capacity_type)?))
}

/// Instance types by NodePool and name.
#[derive(Debug, Default)]
pub struct InstanceTypes {
    by_pool: HashMap<String, HashMap<Arc<str>, Arc<InstanceType>>>,
}

impl InstanceTypes {
    /// Indexes the catalogs of the pools.
    pub fn new(pools: &[ReadyPool]) -> Self {
        let by_pool = pools
            .iter()
            .map(|ready| {
                let types = ready.catalog.instance_types.iter();
                (ready.pool.name_any(), types.map(|found| (Arc::clone(&found.name), Arc::clone(found))).collect())
            })
            .collect();
        Self { by_pool }
    }

    /// The instance type of a claim.
    pub fn of(&self, claim: &NodeClaim) -> Option<&Arc<InstanceType>> {
        let (name, _, _) = offering_of(claim)?;
        self.by_pool.get(claim.node_pool()?)?.get(name.as_str())
    }

    /// The instance types that a claim may be launched as; none once it is launched.
    fn alternatives(&self, claim: &NodeClaim) -> impl Iterator<Item = &Arc<InstanceType>> {
        let launched = claim.labels().contains_key(labels::INSTANCE_TYPE);
        let known = claim.node_pool().and_then(|pool| self.by_pool.get(pool));
        let asked = claim.spec.requirements.iter().filter(move |r| r.key == labels::INSTANCE_TYPE && !launched);
        let names = asked.filter(|r| r.operator == "In").flat_map(|r| &r.values);
        names.filter_map(move |name| known?.get(name.as_str()))
    }

    /// Capacity of a claim's node as NodePool limits count it: the reported capacity, or else that of its instance type. Before
    /// the launch it is, for each resource, the maximum over the instance types that the claim may be launched as.
    pub fn capacity(&self, claim: &NodeClaim) -> Resources {
        reported_capacity(claim).unwrap_or_else(|| {
            let mut most = self.of(claim).map(|found| found.capacity.clone()).unwrap_or_default();
            self.alternatives(claim).for_each(|found| most.raise_to(&found.capacity));
            most
        })
    }

    /// The hourly price of a claim's offering; zero when unknown.
    pub fn price(&self, claim: &NodeClaim) -> MicroUsd {
        let Some((_, zone, capacity_type)) = offering_of(claim) else {
            return MicroUsd::default();
        };
        self.of(claim).and_then(|found| found.price(&zone, capacity_type)).unwrap_or_default()
    }

    /// The hourly price of a claim's node as a NodePool's limit counts it. Before the launch it is the maximum over the offerings that the claim may
    /// be launched as. Of an offering that the catalog does not have, it is the price that the claim was annotated with.
    fn limited_price(&self, claim: &NodeClaim) -> MicroUsd {
        let is_launched = claim.labels().contains_key(labels::INSTANCE_TYPE);
        let highest = if is_launched { None } else { highest_price(claim, self.alternatives(claim)) };
        let known = Some(self.price(claim)).filter(|price| price.0 > 0);
        let annotated = || MicroUsd::from_usd(claim.annotations().get(labels::USD_PER_HOUR)?.parse().ok()?);
        highest.max(known).or_else(annotated).unwrap_or_default()
    }

    /// The hourly price of a NodePool's nodes, leaving ones excluded, of those whose claims `counts` admits. `None` where the NodePool does not
    /// limit it.
    pub fn limited_price_of(
        &self,
        state: &ClusterState,
        pool: &NodePool,
        counts: impl Fn(&NodeClaim) -> bool,
    ) -> Option<MicroUsd> {
        pool.spec.limits.as_ref()?.get(labels::USD_PER_HOUR)?;
        let claims =
            state.claim_index.of_pool(pool.metadata.name.as_deref()?).filter_map(|name| state.claims.get(name));
        let counted = claims.filter(|claim| !claim.is_leaving() && counts(claim));
        Some(MicroUsd(counted.map(|claim| self.limited_price(claim).0).fold(0, i64::saturating_add)))
    }
}
