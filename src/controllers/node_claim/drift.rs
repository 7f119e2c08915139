//! NodeClaims that are not what their NodePool and node class ask for any more: the Drifted condition (core reference 5.11).
//! What happens to them is decided in [`crate::controllers::disruption::drift_replacement`].

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use serde_json::json;

use crate::api::conditions;
use crate::api::conditions::{Conditions, DRIFTED, LAUNCHED, NODE_CLAIM_DEPENDENTS, Status};
use crate::api::{Ec2NodeClass, NodeClaim, NodePool};
use crate::cloud::{Drift, NodeClassCloud};
use crate::controllers::context::{Context, is_conflict, is_not_found, reference};
use crate::controllers::node_class::reconcile;
use crate::controllers::node_pool::status;
use crate::model::labels;
use crate::model::offering::{CapacityType, InstanceType};
use crate::model::requirement::Requirements;
use crate::state::{ClusterState, created_ms, now_ms};

/// The pool's template changed.
const NODE_POOL: &str = "NodePoolDrifted";
/// The pool's requirements don't admit the node.
const REQUIREMENTS: &str = "RequirementsDrifted";
/// The instance type can't be bought for the pool any more.
const INSTANCE_TYPE: &str = "InstanceTypeNotFound";

/// A node's instance type may be missing from the catalog until it is so old, milliseconds.
const TYPE_GRACE_MS: i64 = 3_600_000;
/// Claims are looked at no more often than this.
const LOOK: Duration = Duration::from_secs(2);
/// Claims are looked at at least this often.
const TICK: Duration = Duration::from_secs(10);

/// A pool with what its nodes are compared with.
pub struct Wanted {
    /// The pool.
    pub pool: Arc<NodePool>,
    /// Its node class.
    pub class: Arc<Ec2NodeClass>,
    /// The pool's requirements.
    pub requirements: Requirements,
    /// What can be bought for it, by name.
    pub types: HashMap<Arc<str>, Arc<InstanceType>>,
}

/// Why a claim's node is not what its pool asks for; `None` where it is. The first reason in the reference's order.
pub fn pool_drift(claim: &NodeClaim, wanted: &Wanted, now_ms: i64) -> Option<Drift> {
    template_drift(claim, &wanted.pool)
        .or_else(|| requirement_drift(claim, &wanted.requirements))
        .or_else(|| type_drift(claim, &wanted.types, now_ms))
}

/// The hashes differ. Hashes of different versions, or absent ones, say nothing.
fn template_drift(claim: &NodeClaim, pool: &NodePool) -> Option<Drift> {
    let of = |annotations: &BTreeMap<String, String>, key: &str| annotations.get(key).cloned();
    let version = labels::NODE_POOL_HASH_VERSION;
    let same_version = of(claim.annotations(), version)? == of(pool.annotations(), version)?;
    let before = of(claim.annotations(), labels::NODE_POOL_HASH)?;
    let now = of(pool.annotations(), labels::NODE_POOL_HASH)?;
    (same_version && before != now).then(|| Drift {
        reason: NODE_POOL,
        message: format!("the template of NodePool {} changed since it was made", pool.name_any()),
    })
}

/// A label of the claim is not what the pool requires. For a key that is no label of it, what it was asked to be counts: such
/// keys were left open when it was made.
fn requirement_drift(claim: &NodeClaim, wanted: &Requirements) -> Option<Drift> {
    let own = Requirements::from_api(&claim.spec.requirements).unwrap_or_default();
    let admits = |key: &str| match (claim.labels().get(key), wanted.get(key), own.get(key)) {
        (_, None, _) => true,
        (Some(value), Some(wanted), _) => wanted.contains(value),
        (None, Some(wanted), Some(own)) => !wanted.intersect(own).is_empty(),
        (None, Some(wanted), None) => wanted.accepts_absence(),
    };
    let (key, set) = wanted.iter().find(|(key, _)| !admits(key))?;
    let has = claim.labels().get(&**key).map_or_else(|| "no value".to_owned(), |value| format!("the value {value}"));
    Some(Drift { reason: REQUIREMENTS, message: format!("its label {key} has {has}, and the NodePool requires {set}") })
}

/// The offering is gone for good: not only out of capacity. A node in a reservation may stay as an on-demand one.
fn type_drift(claim: &NodeClaim, types: &HashMap<Arc<str>, Arc<InstanceType>>, now_ms: i64) -> Option<Drift> {
    // A catalog without anything in it is one that could not be made.
    if types.is_empty() || now_ms - created_ms(&claim.metadata) < TYPE_GRACE_MS {
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
        reason: INSTANCE_TYPE,
        message: format!("{name} can't be bought as {bought} in {zone} any more"),
    })
}

/// The claim's conditions with what was found; `None` where they say so already.
pub fn judged(claim: &NodeClaim, drift: Option<&Drift>, now: &Time) -> Option<Vec<Condition>> {
    let before = claim.status.as_ref().map(|status| status.conditions.clone()).unwrap_or_default();
    if drift.is_none() && conditions::get(&before, DRIFTED).is_none() {
        return None;
    }
    let mut list = before.clone();
    let (generation, created) = (claim.metadata.generation, claim.metadata.creation_timestamp.as_ref());
    let mut open = Conditions::open(&mut list, NODE_CLAIM_DEPENDENTS, generation, created, now);
    match drift {
        Some(drift) => open.set(DRIFTED, Status::True, drift.reason, &drift.message),
        None => open.clear(DRIFTED),
    };
    (list != before).then_some(list)
}

/// Runs until the process ends.
pub async fn run(ctx: Arc<Context>) {
    let mut changes = ctx.cluster.changes();
    loop {
        look(&ctx).await;
        let _ = tokio::time::timeout(TICK, changes.changed()).await;
        tokio::time::sleep(LOOK).await;
        changes.mark_unchanged();
    }
}

async fn look(ctx: &Context) {
    let pools = wanted(ctx);
    let claims: Vec<Arc<NodeClaim>> = {
        let state = ctx.cluster.read();
        state.claims.values().filter(|claim| claim.metadata.deletion_timestamp.is_none()).cloned().collect()
    };
    for claim in claims {
        let drift = if is_launched(&claim) {
            // Without its pool and the pool's class there is nothing to compare it with.
            let pool = claim.labels().get(labels::NODE_POOL);
            let Some(wanted) = pool.and_then(|name| pools.get(name)) else { continue };
            match reason(ctx, &claim, wanted).await {
                Ok(drift) => drift,
                Err(error) => {
                    tracing::debug!(claim = claim.name_any(), %error, "whether it has drifted can't be told now");
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
            tracing::warn!(claim = claim.name_any(), %error, "its drift could not be written down, trying again");
        }
    }
}

fn is_launched(claim: &NodeClaim) -> bool {
    claim.status.as_ref().is_some_and(|status| conditions::is_true(&status.conditions, LAUNCHED))
}

async fn reason(ctx: &Context, claim: &NodeClaim, wanted: &Wanted) -> Result<Option<Drift>, crate::cloud::CloudError> {
    match pool_drift(claim, wanted, now_ms()) {
        Some(drift) => Ok(Some(drift)),
        None => match ctx.cloud.capabilities().node_classes {
            Some(node_classes) => node_classes.drift(claim, &wanted.class).await,
            None => Ok(None),
        },
    }
}

/// Pools whose nodes can be compared: their own hashes, and those of their classes, are those of what they say now.
fn wanted(ctx: &Context) -> HashMap<String, Wanted> {
    let ca = ctx.cloud.capabilities().node_classes.map(NodeClassCloud::instance_ca);
    let pairs = comparable(&ctx.cluster.read(), ca.as_deref());
    let whole = |(pool, class): (Arc<NodePool>, Arc<Ec2NodeClass>)| {
        let requirements = Requirements::from_api(&pool.spec.template.spec.requirements).ok()?;
        let catalog = ctx.cloud.catalog(&class);
        let types = catalog.instance_types.iter().map(|found| (Arc::clone(&found.name), Arc::clone(found))).collect();
        Some((pool.name_any(), Wanted { pool, class, requirements, types }))
    };
    pairs.into_iter().filter_map(whole).collect()
}

fn comparable(state: &ClusterState, ca: Option<&str>) -> Vec<(Arc<NodePool>, Arc<Ec2NodeClass>)> {
    let stands = |pool: &&Arc<NodePool>| status::is_stamped(pool);
    let with_class = |pool: &Arc<NodePool>| {
        let class = state.classes.get(&pool.spec.template.spec.node_class_ref.name)?;
        let stands =
            class.metadata.deletion_timestamp.is_none() && ca.is_none_or(|ca| reconcile::is_stamped(class, ca));
        stands.then(|| (Arc::clone(pool), Arc::clone(class)))
    };
    state.pools.values().filter(stands).filter_map(with_class).collect()
}

/// Writes what was found. It must not undo what was written since the look: such a write fails, and the next look repeats it.
async fn write(ctx: &Context, claim: &NodeClaim, drift: Option<&Drift>) -> Result<(), kube::Error> {
    let Some(list) = judged(claim, drift, &Time(Timestamp::now())) else { return Ok(()) };
    let new = claim.status.as_ref().is_none_or(|status| conditions::get(&status.conditions, DRIFTED).is_none());
    ctx.patch_claim_status_at(claim, &json!({ "conditions": list })).await?;
    match drift {
        Some(drift) if new => {
            tracing::info!(claim = claim.name_any(), reason = drift.reason, why = drift.message, "drifted");
            ctx.event(reference(claim), false, drift.reason, &drift.message).await;
        }
        Some(_) => {}
        None => tracing::info!(claim = claim.name_any(), "drifted no more"),
    }
    Ok(())
}

#[cfg(test)]
mod write_tests;

#[cfg(test)]
mod tests;
