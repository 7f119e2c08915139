//! Drift detection: sets the Drifted condition on NodeClaims that no longer match their NodePool or node class (Karpenter core
//! reference 5.11). [`crate::controllers::disruption::drift_replacement`] replaces them.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::ResourceExt;
use serde_json::json;

use crate::api::conditions::{DRIFTED, LAUNCHED, Status};
use crate::api::{Ec2NodeClass, NodeClaim, NodePool};
use crate::clock;
use crate::cloud::{CloudError, Drift, NodeClassCloud};
use crate::controllers::condition_writer::ConditionWriter;
use crate::controllers::context::{Context, EventSpec, is_conflict, is_not_found};
use crate::controllers::node_class::class_hash;
use crate::controllers::node_pool::pool_hash;
use crate::controllers::run_loop::{Pace, RunLoop};
use crate::model::labels;
use crate::model::offering::{CapacityType, InstanceType};
use crate::model::requirement::Requirements;
use crate::model::time::UnixMillis;
use crate::state::ClusterState;
use crate::state::object_ext::{NodeClaimExt, ObjectExt};

/// The template of the pool changed.
const NODE_POOL: &str = "NodePoolDrifted";
/// The requirements of the pool do not admit the node.
const REQUIREMENTS: &str = "RequirementsDrifted";
/// The pool no longer offers the instance type.
const INSTANCE_TYPE: &str = "InstanceTypeNotFound";

/// The instance type of a younger node may be missing from the catalog.
const TYPE_GRACE: Duration = Duration::from_hours(1);

const PACE: Pace = Pace { debounce: Duration::from_secs(2), resync: Duration::from_secs(10) };

/// The state that the nodes of a pool should have.
struct DesiredState {
    pool: Arc<NodePool>,
    class: Arc<Ec2NodeClass>,
    /// Requirements of the pool.
    requirements: Requirements,
    /// Instance types of the pool, by name.
    types: HashMap<Arc<str>, Arc<InstanceType>>,
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
        reason: NODE_POOL,
        message: format!("the template of NodePool {} changed since the NodeClaim was created", pool.name_any()),
    })
}

/// A label of the claim violates a requirement of the pool. For a key without a label, the requirements of the claim count: such a key
/// was left open when the claim was created.
fn requirement_drift(claim: &NodeClaim, desired: &Requirements) -> Option<Drift> {
    let own = Requirements::from_api(&claim.spec.requirements).unwrap_or_default();
    let admits = |key: &str| match (claim.labels().get(key), desired.get(key), own.get(key)) {
        (_, None, _) => true,
        (Some(value), Some(desired), _) => desired.contains(value),
        (None, Some(desired), Some(own)) => !desired.intersect(own).is_empty(),
        (None, Some(desired), None) => desired.accepts_absence(),
    };
    let (key, set) = desired.iter().find(|(key, _)| !admits(key))?;
    let has = claim.labels().get(&**key).map_or_else(|| "no value".to_owned(), |value| format!("the value {value}"));
    Some(Drift { reason: REQUIREMENTS, message: format!("its label {key} has {has}, and the NodePool requires {set}") })
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
    (!offered)
        .then(|| Drift { reason: INSTANCE_TYPE, message: format!("{name} is no longer offered as {bought} in {zone}") })
}

/// The claim's conditions with the Drifted condition set or cleared; `None` when nothing changes.
fn conditions_with(claim: &NodeClaim, drift: Option<&Drift>, now: UnixMillis) -> Option<Vec<Condition>> {
    if drift.is_none() && claim.condition(DRIFTED).is_none() {
        return None;
    }
    let mut writer = ConditionWriter::for_claim(claim, now);
    match drift {
        Some(drift) => writer.edit().set(DRIFTED, Status::True, drift.reason, &drift.message),
        None => writer.edit().clear(DRIFTED),
    };
    writer.changed()
}

/// Runs until the process ends.
pub async fn run(ctx: Arc<Context>) {
    let mut run_loop = RunLoop::new(&ctx.cluster, PACE);
    loop {
        reconcile(&ctx).await;
        run_loop.next().await;
    }
}

async fn reconcile(ctx: &Context) {
    let pools = desired_states(ctx);
    let claims: Vec<Arc<NodeClaim>> = {
        let state = ctx.cluster.read();
        state.claims.values().filter(|claim| !claim.is_deleting()).cloned().collect()
    };
    for claim in claims {
        let drift = if claim.has_condition(LAUNCHED) {
            // Without its pool and node class, a claim can't be compared.
            let Some(desired) = claim.node_pool().and_then(|name| pools.get(name)) else { continue };
            match drift_of(ctx, &claim, desired).await {
                Ok(drift) => drift,
                Err(error) => {
                    tracing::debug!(claim = claim.name_any(), %error, "failed to detect drift");
                    continue;
                }
            }
        } else {
            None
        };
        if let Err(error) = write(ctx, &claim, drift.as_ref()).await
            && !is_conflict(&error)
            && !is_not_found(&error)
        {
            tracing::warn!(claim = claim.name_any(), %error, "failed to write drifted condition, retrying");
        }
    }
}

async fn drift_of(ctx: &Context, claim: &NodeClaim, desired: &DesiredState) -> Result<Option<Drift>, CloudError> {
    match pool_drift(claim, desired, clock::now()) {
        Some(drift) => Ok(Some(drift)),
        None => match ctx.cloud.capabilities().node_classes {
            Some(node_classes) => node_classes.drift(claim, &desired.class).await,
            None => Ok(None),
        },
    }
}

/// The desired state of each pool whose hash and whose class's hash are up to date.
fn desired_states(ctx: &Context) -> HashMap<String, DesiredState> {
    let ca = ctx.cloud.capabilities().node_classes.map(NodeClassCloud::instance_ca);
    let pairs = comparable(&ctx.cluster.read(), ca.as_deref());
    let desired = |(pool, class): (Arc<NodePool>, Arc<Ec2NodeClass>)| {
        let requirements = Requirements::from_api(&pool.spec.template.spec.requirements).ok()?;
        let catalog = ctx.cloud.catalog(&class);
        let types = catalog.instance_types.iter().map(|found| (Arc::clone(&found.name), Arc::clone(found))).collect();
        Some((pool.name_any(), DesiredState { pool, class, requirements, types }))
    };
    pairs.into_iter().filter_map(desired).collect()
}

fn comparable(state: &ClusterState, ca: Option<&str>) -> Vec<(Arc<NodePool>, Arc<Ec2NodeClass>)> {
    let up_to_date = |pool: &&Arc<NodePool>| pool_hash::is_up_to_date(pool);
    let with_class = |pool: &Arc<NodePool>| {
        let class = state.classes.get(&pool.spec.template.spec.node_class_ref.name)?;
        let up_to_date = !class.is_deleting() && ca.is_none_or(|ca| class_hash::is_up_to_date(class, ca));
        up_to_date.then(|| (Arc::clone(pool), Arc::clone(class)))
    };
    state.pools.values().filter(up_to_date).filter_map(with_class).collect()
}

/// Writes the Drifted condition. Conflicts when the claim was written since it was read; the next pass tries again.
async fn write(ctx: &Context, claim: &NodeClaim, drift: Option<&Drift>) -> Result<(), kube::Error> {
    let Some(list) = conditions_with(claim, drift, clock::now()) else { return Ok(()) };
    let new = claim.condition(DRIFTED).is_none();
    ctx.patch_claim_status_at(claim, &json!({ "conditions": list })).await?;
    match drift {
        Some(drift) if new => {
            tracing::info!(claim = claim.name_any(), reason = drift.reason, why = drift.message, "drift detected");
            ctx.emit_for_claim(claim, EventSpec::normal(drift.reason, &drift.message)).await;
        }
        Some(_) => {}
        None => tracing::info!(claim = claim.name_any(), "drift resolved"),
    }
    Ok(())
}

#[cfg(test)]
mod write_tests;

#[cfg(test)]
mod tests;
