//! Drift detection: NodeClaims that no longer match their NodePool (Karpenter core reference 5.11). The cloud compares instances with
//! node classes.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use kube::ResourceExt;
use stowage_api::conditions::LAUNCHED;
use stowage_api::parse_requirements;
use stowage_api::{Ec2NodeClass, NodeClaim, NodePool};
use stowage_model::drift_reason::Drift;
use stowage_model::events;
use stowage_model::labels;
use stowage_model::offering::{CapacityType, Catalog, InstanceType};
use stowage_model::requirement::Requirements;
use stowage_model::time::UnixMillis;

use crate::decisions::lifecycle::drift_hash::DriftHash;
use crate::state::object_ext::{NodeClaimExt, ObjectExt};
use crate::state::tables::ClusterState;

/// The instance type of a younger node may be missing from the catalog.
const TYPE_GRACE: Duration = Duration::from_hours(1);

/// The state that the nodes of a pool should have.
pub struct DesiredState {
    pool: Arc<NodePool>,
    class: Arc<Ec2NodeClass>,
    /// Requirements of the pool.
    requirements: Requirements,
    /// Instance types of the pool, by name.
    types: HashMap<Arc<str>, Arc<InstanceType>>,
}

impl DesiredState {
    /// The desired state of a pool with this class and catalog; `None` when the requirements of the pool are invalid.
    fn new(pool: Arc<NodePool>, class: Arc<Ec2NodeClass>, catalog: &Catalog) -> Option<Self> {
        let requirements = parse_requirements(&pool.spec.template.spec.requirements).ok()?;
        let types = catalog.instance_types.iter().map(|found| (Arc::clone(&found.name), Arc::clone(found))).collect();
        Some(Self { pool, class, requirements, types })
    }
}

/// The desired states of the pools with their classes, by the name of the pool; not of pools without a catalog.
pub fn desired_states(
    pairs: Vec<(Arc<NodePool>, Arc<Ec2NodeClass>)>,
    catalog: impl Fn(&NodePool, &Ec2NodeClass) -> Option<Arc<Catalog>>,
) -> HashMap<String, DesiredState> {
    let desired = |(pool, class): (Arc<NodePool>, Arc<Ec2NodeClass>)| {
        let catalog = catalog(&pool, &class)?;
        Some((pool.name_any(), DesiredState::new(pool, class, &catalog)?))
    };
    pairs.into_iter().filter_map(desired).collect()
}

/// What is known about the drift of a claim without the cloud.
pub enum DriftCheck<'a> {
    /// Its pool or class is unknown or being changed: its condition is kept.
    Incomparable,
    /// The result.
    Settled(Option<Drift>),
    /// It matches its pool: the cloud compares its instance with this class.
    MatchesPool(&'a Ec2NodeClass),
}

/// Compares a claim with its pool. `desired` holds the pools of [`comparable`] by name.
pub fn check<'a>(claim: &NodeClaim, desired: &'a HashMap<String, DesiredState>, now: UnixMillis) -> DriftCheck<'a> {
    if !claim.has_condition(LAUNCHED) {
        return DriftCheck::Settled(None);
    }
    let Some(desired) = claim.node_pool().and_then(|name| desired.get(name)) else {
        return DriftCheck::Incomparable;
    };
    match pool_drift(claim, desired, now) {
        Some(drift) => DriftCheck::Settled(Some(drift)),
        None => DriftCheck::MatchesPool(&desired.class),
    }
}

/// Claims that are not deleting.
pub fn live_claims(state: &ClusterState) -> Vec<Arc<NodeClaim>> {
    state.claims.values().filter(|claim| !claim.is_deleting()).cloned().collect()
}

/// Why a claim does not match its pool, in the order of the reference; `None` when it matches.
fn pool_drift(claim: &NodeClaim, desired: &DesiredState, now: UnixMillis) -> Option<Drift> {
    template_drift(claim, &desired.pool)
        .or_else(|| requirement_drift(claim, &desired.requirements))
        .or_else(|| type_drift(claim, &desired.types, now))
}

/// The hashes differ. Absent hashes and hashes of different versions do not count.
fn template_drift(claim: &NodeClaim, pool: &NodePool) -> Option<Drift> {
    let of = |annotations: &BTreeMap<String, String>, key: &str| annotations.get(key).cloned();
    let version = labels::NODE_POOL_HASH_VERSION;
    let same_version = of(claim.annotations(), version)? == of(pool.annotations(), version)?;
    let before = of(claim.annotations(), labels::NODE_POOL_HASH)?;
    let now = of(pool.annotations(), labels::NODE_POOL_HASH)?;
    (same_version && before != now).then(|| Drift {
        event: events::NODE_POOL_DRIFTED,
        message: format!("the template of NodePool {} changed since the NodeClaim was created", pool.name_any()),
    })
}

/// A label of the claim violates a requirement of the pool. For a key without a label, the requirements of the claim count: such a key
/// was left open when the claim was created.
fn requirement_drift(claim: &NodeClaim, desired: &Requirements) -> Option<Drift> {
    let own = parse_requirements(&claim.spec.requirements).unwrap_or_default();
    let admits = |key: &str| match (claim.labels().get(key), desired.get(key), own.get(key)) {
        (_, None, _) => true,
        (Some(value), Some(desired), _) => desired.contains(value),
        (None, Some(desired), Some(own)) => !desired.intersect(own).is_empty(),
        (None, Some(desired), None) => desired.accepts_absence(),
    };
    let (key, set) = desired.iter().find(|(key, _)| !admits(key))?;
    let has = claim.labels().get(&**key).map_or_else(|| "no value".to_owned(), |value| format!("the value {value}"));
    Some(Drift {
        event: events::REQUIREMENTS_DRIFTED,
        message: format!("its label {key} has {has}, and the NodePool requires {set}"),
    })
}

/// The offering no longer exists, as opposed to being out of capacity. A reserved node may stay as an on-demand node.
fn type_drift(claim: &NodeClaim, types: &HashMap<Arc<str>, Arc<InstanceType>>, now: UnixMillis) -> Option<Drift> {
    // An empty catalog is one that could not be built.
    if types.is_empty() || !claim.created_at().is_older_than(TYPE_GRACE, now) {
        return None;
    }
    let label = |key: &str| claim.labels().get(key).map(String::as_str);
    let (name, zone) = (label(labels::INSTANCE_TYPE)?, label(labels::ZONE)?);
    let bought = CapacityType::parse(label(labels::CAPACITY_TYPE)?)?;
    let same =
        |other: CapacityType| other == bought || bought == CapacityType::Reserved && other == CapacityType::OnDemand;
    let offered = types.get(name).is_some_and(|found| {
        found.offerings.iter().any(|offering| *offering.zone == *zone && same(offering.capacity_type))
    });
    (!offered).then(|| Drift {
        event: events::INSTANCE_TYPE_NOT_FOUND,
        message: format!("{name} is no longer offered as {bought} in {zone}"),
    })
}

/// Pools whose hash and whose class's hash are up to date, with their classes. `ca` is what the instances of the cloud trust; `None`
/// when the cloud resolves no classes.
pub fn comparable(state: &ClusterState, ca: Option<&str>) -> Vec<(Arc<NodePool>, Arc<Ec2NodeClass>)> {
    let up_to_date = |pool: &&Arc<NodePool>| DriftHash::of_pool(pool).is_on(&***pool);
    let with_class = |pool: &Arc<NodePool>| {
        let class = state.classes.get(&pool.spec.template.spec.node_class_ref.name)?;
        let up_to_date = !class.is_deleting() && ca.is_none_or(|ca| DriftHash::of_class(class, ca).is_on(&**class));
        up_to_date.then(|| (Arc::clone(pool), Arc::clone(class)))
    };
    state.pools.values().filter(up_to_date).filter_map(with_class).collect()
}

#[cfg(test)]
mod tests;
