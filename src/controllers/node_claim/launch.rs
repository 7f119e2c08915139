//! A NodeClaim becomes an instance.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use k8s_openapi::api::core::v1::Taint;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use serde_json::json;

use crate::api::conditions::{Conditions, LAUNCHED, NODE_CLAIM_DEPENDENTS};
use crate::api::{Ec2NodeClass, NodeClaim, hash};
use crate::cloud::launch_group;
use crate::cloud::launch_group::LaunchGroup;
use crate::cloud::{
    Instance, LaunchDetails, LaunchError, LaunchRequest, Launched, NodeClassCloud, Override, ReservedIn,
    without_encoded_details,
};
use crate::controllers::context::{Context, single_values};
use crate::controllers::provisioning::provisioner::claim_event;
use crate::model::labels;
use crate::model::offering::{Catalog, InstanceType, OFFERING_LABELS, Offering};
use crate::model::requirement::Requirements;
use crate::model::resources::Resources;
use crate::model::units::MicroUsd;
use crate::state::now_ms;

/// Resource of the interfaces that an instance has only where it is launched with them.
const EFA: &str = "vpc.amazonaws.com/efa";

/// Longest message of a failure that nobody has named (core reference 5.2).
const CONDITION_BYTES: usize = 300;

/// Why a launch did not come about.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The claim can never be launched: it is deleted, and its pods are planned anew.
    #[error("{1}")]
    Hopeless(&'static str, String),
    /// It may be launched later.
    #[error("{0}")]
    Later(String),
    /// The API server refused a write.
    #[error("writing the node claim: {0}")]
    Api(#[from] kube::Error),
}

/// Launches a claim's instance and writes down what came of it. Safe to repeat: the claim's UID is the client token.
///
/// # Errors
/// [`Failure`].
pub async fn launch(ctx: &Arc<Context>, claim: &NodeClaim) -> Result<(), Failure> {
    let name = claim.name_any();
    let class_name = &claim.spec.node_class_ref.name;
    let class = ctx.cluster.read().classes.get(class_name).cloned();
    let Some(class) = class else {
        return Err(Failure::Hopeless("nodeclass_not_ready", format!("EC2NodeClass {class_name} does not exist")));
    };
    let catalog = ctx.cloud.catalog(&class);
    let overrides = acceptable(claim, &catalog);
    if overrides.is_empty() {
        let why = "none of its offerings is available any more".to_owned();
        return Err(Failure::Hopeless("insufficient_capacity", why));
    }
    let mut taints = claim.spec.taints.clone();
    taints.extend(claim.spec.startup_taints.clone());
    taints.push(Taint { key: labels::UNREGISTERED_TAINT.into(), effect: "NoExecute".into(), ..Taint::default() });
    let named = match LaunchGroup::of(claim) {
        LaunchGroup { size: 1, .. } => BTreeSet::new(),
        group => launch_group::named(&group.id, ctx.cluster.read().claims.values().map(|claim| &**claim)),
    };
    let request = LaunchRequest {
        client_token: claim.uid().unwrap_or_default(),
        node_claim: name.clone(),
        node_pool: claim.labels().get(labels::NODE_POOL).cloned().unwrap_or_default(),
        node_class: class_name.clone(),
        overrides,
        labels: single_values(claim),
        taints,
        details: Some(Arc::new(LaunchDetails {
            claim: claim.clone(),
            class: Arc::clone(&class),
            catalog: Arc::clone(&catalog),
            named,
        })),
    };
    let started = now_ms();
    let result = ctx.cloud.launch(request).await;
    #[allow(clippy::cast_precision_loss)]
    ctx.metrics.launch_seconds.observe((now_ms() - started) as f64 / 1e3);
    match result {
        Ok(launched) => {
            for offering in &launched.unavailable {
                ctx.cloud.mark_unavailable(offering);
            }
            record(ctx, claim, &class, &launched, &catalog).await
        }
        Err(error) => {
            if let LaunchError::InsufficientCapacity { unavailable } = &error {
                for offering in unavailable {
                    ctx.cloud.mark_unavailable(offering);
                }
            }
            let (fate, event, why) = outcome(&error);
            if let Some(event) = event {
                claim_event(ctx, claim, true, event, &why).await;
            }
            Err(match fate {
                Fate::Deleted(reason) => Failure::Hopeless(reason, why),
                Fate::Kept(reason) => {
                    not_launched(ctx, claim, reason, &why).await?;
                    Failure::Later(format!("{reason}: {why}"))
                }
            })
        }
    }
}

/// What becomes of a claim that was not launched.
#[derive(Debug, PartialEq, Eq)]
enum Fate {
    /// It is deleted, for this reason in the metrics, and its pods are planned anew.
    Deleted(&'static str),
    /// It is launched again later; until then Launched is Unknown for this reason.
    Kept(&'static str),
}

/// What a failed launch means: the claim's fate, the reason of the event that tells it, where one does, and why (AWS reference
/// 5.1 and 5.9).
fn outcome(error: &LaunchError) -> (Fate, Option<&'static str>, String) {
    let no_capacity = Fate::Deleted("insufficient_capacity");
    match error {
        LaunchError::NoSpotRole => (no_capacity, Some("SpotSLRCreationFailed"), error.to_string()),
        LaunchError::InsufficientCapacity { unavailable } => {
            let why = format!("{} offerings are out of capacity; its pods are planned anew", unavailable.len());
            (no_capacity, Some("InsufficientCapacityError"), why)
        }
        LaunchError::NodeClassNotReady { name, reason } => {
            (Fate::Deleted("nodeclass_not_ready"), None, format!("EC2NodeClass {name} is not ready: {reason}"))
        }
        LaunchError::Rejected { reason, message } => (Fate::Kept(reason), Some(*reason), message.clone()),
        LaunchError::Throttled => (Fate::Kept("RequestLimitExceeded"), Some("LaunchFailed"), error.to_string()),
        LaunchError::Other { reason, .. } => {
            (Fate::Kept(reason), Some("LaunchFailed"), brief(&error.to_string()).to_owned())
        }
    }
}

/// Offerings that a claim may be launched as, cheapest first.
pub fn acceptable(claim: &NodeClaim, catalog: &Catalog) -> Vec<Override> {
    let allowed = |key: &str| {
        let found = claim.spec.requirements.iter().find(|r| r.key == key && r.operator == "In");
        move |value: &str| found.is_none_or(|r| r.values.iter().any(|other| other == value))
    };
    let (type_ok, zone_ok, capacity_ok) =
        (allowed(labels::INSTANCE_TYPE), allowed(labels::ZONE), allowed(labels::CAPACITY_TYPE));
    let requirements = Requirements::from_api(&claim.spec.requirements).unwrap_or_default();
    let mut found: Vec<(i64, Override)> = Vec::new();
    for instance_type in &catalog.instance_types {
        if !type_ok(&instance_type.name) || !instance_type.serves(&requirements) {
            continue;
        }
        for offering in &instance_type.offerings {
            if offering.available
                && zone_ok(&offering.zone)
                && capacity_ok(offering.capacity_type.as_str())
                && offered(&requirements, offering)
            {
                found.push((
                    offering.price.0,
                    Override {
                        instance_type: instance_type.name.to_string(),
                        zone: offering.zone.to_string(),
                        capacity_type: offering.capacity_type,
                    },
                ));
            }
        }
    }
    found.sort_by(|(price, a), (other, b)| {
        price.cmp(other).then_with(|| (&a.instance_type, &a.zone).cmp(&(&b.instance_type, &b.zone)))
    });
    found.into_iter().map(|(_, offering)| offering).collect()
}

/// Whether an offering may serve a claim, by the labels that are its own.
fn offered(requirements: &Requirements, offering: &Offering) -> bool {
    OFFERING_LABELS.iter().all(|key| requirements.get(key).is_none_or(|set| set.accepts(offering.label(key))))
}

/// Labels that an instance gives its claim: its type's, and those of the offering that it was launched as.
fn instance_labels(found: Option<&Arc<InstanceType>>, instance: &Instance) -> BTreeMap<String, String> {
    let mut own: BTreeMap<String, String> = found.map(|found| found.labels.clone()).unwrap_or_default();
    own.insert(labels::INSTANCE_TYPE.into(), instance.instance_type.clone());
    own.insert(labels::ZONE.into(), instance.zone.clone());
    own.insert(labels::CAPACITY_TYPE.into(), instance.capacity_type.as_str().into());
    let offerings = found.iter().flat_map(|found| &found.offerings);
    let zone_id = offerings.filter(|other| *other.zone == instance.zone).find_map(|other| other.label(labels::ZONE_ID));
    own.extend(zone_id.map(|id| (labels::ZONE_ID.to_owned(), id.to_owned())));
    own.extend(instance.reservation.iter().flat_map(ReservedIn::labels));
    own.extend(partition(found, instance));
    own
}

/// The label of an instance's partition, where its placement group has some; empty while EC2 hasn't told which.
fn partition(found: Option<&Arc<InstanceType>>, instance: &Instance) -> Option<(String, String)> {
    let key = labels::PLACEMENT_GROUP_PARTITION;
    let has_some = found?.offerings.iter().any(|offering| offering.label(key).is_some());
    let value = instance.partition.map(|partition| partition.to_string()).unwrap_or_default();
    has_some.then(|| (key.to_owned(), value))
}

/// Whether a claim's instance is in a partition that nobody knows yet.
pub fn lacks_partition(claim: &NodeClaim) -> bool {
    claim.labels().get(labels::PLACEMENT_GROUP_PARTITION).is_some_and(String::is_empty)
}

/// Asks in which partition a claim's instance is and writes it down. Returns false where EC2 doesn't know yet.
///
/// # Errors
/// [`Failure`].
pub async fn learn_partition(ctx: &Context, claim: &NodeClaim) -> Result<bool, Failure> {
    let Some(id) = claim.status.as_ref().and_then(|status| status.provider_id.as_deref()) else { return Ok(false) };
    let told = ctx.cloud.describe(id).await;
    let told = told.map_err(|error| Failure::Later(format!("looking for its partition: {error}")))?;
    let Some(partition) = told.and_then(|instance| instance.partition) else { return Ok(false) };
    let labels = json!({(labels::PLACEMENT_GROUP_PARTITION): partition.to_string()});
    ctx.patch_claim(&claim.name_any(), &json!({"metadata": {"labels": labels}})).await?;
    Ok(true)
}

/// Capacity and allocatable of a claim's instance. It has EFA interfaces only where the claim asks for them or the class lists
/// them: what the type could have is no promise.
fn room(found: &InstanceType, claim: &NodeClaim, class: &Ec2NodeClass) -> (Resources, Resources) {
    let asked = claim.spec.resources.requests.get(EFA);
    let asked = asked.is_some_and(|amount| amount.0.chars().any(|c| ('1'..='9').contains(&c)));
    let listed = class.spec.network_interfaces.iter().any(|interface| interface.interface_type == "efa-only");
    let (mut capacity, mut allocatable) = (found.capacity.clone(), found.allocatable.clone());
    if !asked && !listed {
        capacity.set(EFA, 0);
        allocatable.set(EFA, 0);
    }
    (capacity, allocatable)
}

/// What an instance costs.
fn price(found: Option<&Arc<InstanceType>>, instance: &Instance) -> MicroUsd {
    let offering = found.and_then(|found| {
        let mut offerings = found.offerings.iter();
        offerings.find(|other| *other.zone == instance.zone && other.capacity_type == instance.capacity_type)
    });
    offering.map_or_else(MicroUsd::default, |offering| offering.price)
}

/// The beginning of what is told of a failure that nobody has named.
fn brief(why: &str) -> &str {
    let fits = why.char_indices().map(|(at, c)| at + c.len_utf8()).take_while(|end| *end <= CONDITION_BYTES).last();
    &why[..fits.unwrap_or(0)]
}

/// Says on the claim why it isn't launched. Writes only what is new: launches are tried again and again.
async fn not_launched(ctx: &Context, claim: &NodeClaim, reason: &str, message: &str) -> Result<(), Failure> {
    let list = unlaunched(claim, reason, message, &Time(Timestamp::now()));
    if claim.status.as_ref().is_none_or(|status| status.conditions != list) {
        ctx.patch_claim_status(&claim.name_any(), &json!({ "conditions": list })).await?;
    }
    Ok(())
}

/// Conditions of a claim that isn't launched yet.
fn unlaunched(claim: &NodeClaim, reason: &str, message: &str, now: &Time) -> Vec<Condition> {
    let mut list = claim.status.as_ref().map(|status| status.conditions.clone()).unwrap_or_default();
    let (generation, created) = (claim.metadata.generation, claim.metadata.creation_timestamp.as_ref());
    let mut judged = Conditions::open(&mut list, NODE_CLAIM_DEPENDENTS, generation, created, now);
    // What is another at each try would be written at each.
    judged.set_unknown(LAUNCHED, reason, without_encoded_details(message));
    list
}

/// What a launched claim says of the class it was launched from, where the cloud makes real instances of it.
fn origin(class: &Ec2NodeClass, ca: &str) -> BTreeMap<&'static str, String> {
    let profile = class.status.as_ref().and_then(|status| status.instance_profile.clone());
    let hash = [
        (labels::EC2_NODE_CLASS_HASH, hash::node_class(&class.spec, ca)),
        (labels::EC2_NODE_CLASS_HASH_VERSION, hash::NODE_CLASS_VERSION.to_owned()),
    ];
    hash.into_iter().chain(profile.map(|profile| (labels::INSTANCE_PROFILE_NAME, profile))).collect()
}

async fn record(
    ctx: &Arc<Context>,
    claim: &NodeClaim,
    class: &Ec2NodeClass,
    launched: &Launched,
    catalog: &Catalog,
) -> Result<(), Failure> {
    let name = claim.name_any();
    let instance = &launched.instance;
    let found: Option<&Arc<InstanceType>> =
        catalog.instance_types.iter().find(|found| *found.name == instance.instance_type);
    let mut own = instance_labels(found, instance);
    // What the user put on the claim wins (core reference 5.2).
    own.extend(single_values(claim));
    let mut metadata = json!({ "labels": own });
    if let Some(ca) = ctx.cloud.capabilities().node_classes.map(NodeClassCloud::instance_ca) {
        metadata["annotations"] = json!(origin(class, &ca));
    }
    ctx.patch_claim(&name, &json!({ "metadata": metadata })).await?;
    let generation = claim.metadata.generation;
    let mut list = claim.status.as_ref().map(|status| status.conditions.clone()).unwrap_or_default();
    let created = claim.metadata.creation_timestamp.as_ref();
    Conditions::open(&mut list, NODE_CLAIM_DEPENDENTS, generation, created, &Time(Timestamp::now())).set_true(LAUNCHED);
    let mut status = json!({
        "providerID": instance.provider_id,
        "imageID": instance.image_id,
        "conditions": list,
    });
    if let Some(found) = found {
        let (capacity, allocatable) = room(found, claim, class);
        status["capacity"] = json!(capacity.to_map());
        status["allocatable"] = json!(allocatable.to_map());
    }
    ctx.patch_claim_status(&name, &status).await?;
    tracing::info!(
        claim = name,
        instance = instance.id,
        instance_type = instance.instance_type,
        zone = instance.zone,
        capacity_type = %instance.capacity_type,
        usd_per_hour = price(found, instance).usd(),
        "launched"
    );
    let note = format!("{} in {} as {}", instance.instance_type, instance.zone, instance.capacity_type);
    claim_event(ctx, claim, false, "Launched", &note).await;
    Ok(())
}

#[cfg(test)]
mod write_tests;

#[cfg(test)]
mod tests;
