//! Launches the instance of a NodeClaim and writes the result to the claim.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use k8s_openapi::api::core::v1::Taint;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::ResourceExt;
use serde_json::json;
use stowage_api::conditions::LAUNCHED;
use stowage_api::launch_group::{LaunchGroup, named};
use stowage_api::{Ec2NodeClass, NodeClaim};
use stowage_cloud::{
    Instance, LaunchDetails, LaunchError, LaunchRequest, Launched, NodeClassCloud, Override, ReservedIn,
    without_encoded_details,
};
use stowage_model::events;
use stowage_model::events::DeclaredEvent;
use stowage_model::labels;
use stowage_model::offering::{Catalog, InstanceType};
use stowage_model::resources::{EFA, Resources};
use stowage_model::time::UnixMillis;
use stowage_model::units::MicroUsd;
use stowage_runtime::clock;

use crate::controllers::condition_writer::ConditionWriter;
use crate::controllers::context::{Context, single_values};
use crate::controllers::node_claim::claim_metrics::preset_launched;
use crate::controllers::node_claim::step_error::StepError;
use crate::decisions::disruption::reason::DisruptionReason;
use crate::decisions::lifecycle::drift_hash::DriftHash;
use crate::state::claim_offers::offers;
use crate::state::object_ext::{NodeClaimExt, ObjectExt};

/// Longest message of an unclassified failure (Karpenter core reference 5.2).
const MAX_MESSAGE_BYTES: usize = 300;

/// Launches a claim's instance and writes the result to the claim. Idempotent: the claim's UID is the client token.
pub async fn launch(ctx: &Context, claim: &NodeClaim) -> Result<(), StepError> {
    let name = claim.name_any();
    let class_name = &claim.spec.node_class_ref.name;
    let class = ctx.cluster.read().classes.get(class_name).cloned();
    let Some(class) = class else {
        let message = format!("EC2NodeClass {class_name} does not exist");
        return Err(StepError::abandon(DisruptionReason::NodeClassNotReady, message));
    };
    let catalog = ctx.cloud.catalog(&class);
    let overrides = acceptable(claim, &catalog);
    if overrides.is_empty() {
        let message = match claim.annotations().get(labels::MAX_PRICE) {
            Some(max_price) => format!("none of its offerings is available for {max_price} USD per hour any more"),
            None => "none of its offerings is available any more".into(),
        };
        return Err(StepError::abandon(DisruptionReason::InsufficientCapacity, message));
    }
    let mut taints = claim.spec.taints.clone();
    taints.extend(claim.spec.startup_taints.clone());
    taints.push(Taint { key: labels::UNREGISTERED_TAINT.into(), effect: "NoExecute".into(), ..Taint::default() });
    let named = match LaunchGroup::of(claim) {
        LaunchGroup { size: 1, .. } => BTreeSet::new(),
        group => named(&group.id, ctx.cluster.read().claims.values().map(|claim| &**claim)),
    };
    let request = LaunchRequest {
        client_token: claim.uid().unwrap_or_default(),
        node_claim: name.clone(),
        node_pool: claim.node_pool().unwrap_or_default().to_owned(),
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
    match ctx.cloud.launch(request).await {
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
            let LaunchFailure { disposition, event, message } = LaunchFailure::of(&error);
            if let Some(event) = event {
                ctx.emit_for_claim(claim, event.note(&message)).await;
            }
            Err(match disposition {
                LaunchDisposition::Delete(reason) => StepError::abandon(reason, message),
                LaunchDisposition::Retry(reason) => {
                    report_not_launched(ctx, claim, reason, &message).await?;
                    StepError::Retry(format!("{reason}: {message}"))
                }
            })
        }
    }
}

/// What happens to a claim that was not launched.
#[derive(Debug, PartialEq, Eq)]
enum LaunchDisposition {
    /// It is deleted, and its pods are re-planned.
    Delete(DisruptionReason),
    /// The launch is retried; until then the Launched condition is Unknown with this reason.
    Retry(&'static str),
}

/// A failed launch (Karpenter AWS reference 5.1 and 5.9).
#[derive(Debug, PartialEq, Eq)]
struct LaunchFailure {
    disposition: LaunchDisposition,
    /// The event about it, if one is emitted.
    event: Option<&'static DeclaredEvent>,
    message: String,
}

impl LaunchFailure {
    fn of(error: &LaunchError) -> Self {
        let no_capacity = LaunchDisposition::Delete(DisruptionReason::InsufficientCapacity);
        let (disposition, event, message) = match error {
            LaunchError::NoSpotRole => (no_capacity, Some(events::SPOT_SLR_CREATION_FAILED), error.to_string()),
            LaunchError::InsufficientCapacity { unavailable } => {
                let what = match unavailable.len() {
                    0 => "no offering has capacity".to_owned(),
                    count => format!("all {count} offerings returned insufficient capacity"),
                };
                let message = format!("{what}; its pods will be re-planned");
                (no_capacity, Some(events::INSUFFICIENT_CAPACITY_ERROR), message)
            }
            LaunchError::NodeClassNotReady { name, reason } => {
                let message = format!("EC2NodeClass {name} is not ready: {reason}");
                (LaunchDisposition::Delete(DisruptionReason::NodeClassNotReady), None, message)
            }
            LaunchError::Rejected { event, message } => {
                (LaunchDisposition::Retry(event.reason()), Some(*event), message.clone())
            }
            LaunchError::Throttled => (
                LaunchDisposition::Retry(events::REQUEST_LIMIT_EXCEEDED.reason()),
                Some(events::LAUNCH_FAILED),
                error.to_string(),
            ),
            LaunchError::Other { reason, .. } => {
                let message = brief(&error.to_string()).to_owned();
                (LaunchDisposition::Retry(reason), Some(events::LAUNCH_FAILED), message)
            }
        };
        Self { disposition, event, message }
    }
}

/// Offerings that a claim may be launched as now, in ascending order of price.
pub fn acceptable(claim: &NodeClaim, catalog: &Catalog) -> Vec<Override> {
    let available = offers(claim, catalog).filter(|(_, offering)| offering.available);
    let found = available.map(|(instance_type, offering)| {
        let acceptable = Override {
            instance_type: instance_type.name.to_string(),
            zone: offering.zone.to_string(),
            capacity_type: offering.capacity_type,
        };
        (offering.price.0, acceptable)
    });
    let mut found: Vec<(i64, Override)> = found.collect();
    found.sort_by(|(price, a), (other, b)| {
        price.cmp(other).then_with(|| (&a.instance_type, &a.zone).cmp(&(&b.instance_type, &b.zone)))
    });
    found.into_iter().map(|(_, offering)| offering).collect()
}

/// Labels that a claim gets from its instance: those of its instance type and of its offering.
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

/// The partition label, if the placement group has partitions; empty until EC2 reports the partition.
fn partition(found: Option<&Arc<InstanceType>>, instance: &Instance) -> Option<(String, String)> {
    let key = labels::PLACEMENT_GROUP_PARTITION;
    let has_some = found?.offerings.iter().any(|offering| offering.label(key).is_some());
    let value = instance.partition.map(|partition| partition.to_string()).unwrap_or_default();
    has_some.then(|| (key.to_owned(), value))
}

/// Whether the partition of a claim's instance is not known yet.
pub fn lacks_partition(claim: &NodeClaim) -> bool {
    claim.labels().get(labels::PLACEMENT_GROUP_PARTITION).is_some_and(String::is_empty)
}

/// Queries the partition of a claim's instance and labels the claim. Returns false when EC2 does not report it yet.
pub async fn learn_partition(ctx: &Context, claim: &NodeClaim) -> Result<bool, StepError> {
    let Some(id) = claim.provider_id() else { return Ok(false) };
    let instance = ctx.cloud.describe(id).await;
    let instance = instance.map_err(|error| StepError::Retry(format!("describing its partition: {error}")))?;
    let Some(partition) = instance.and_then(|instance| instance.partition) else { return Ok(false) };
    let labels = json!({(labels::PLACEMENT_GROUP_PARTITION): partition.to_string()});
    ctx.patch_claim(&claim.name_any(), &json!({"metadata": {"labels": labels}})).await?;
    Ok(true)
}

/// Capacity and allocatable of a claim's instance. It has EFA interfaces only if the claim requests them or the class lists them,
/// whatever its type supports.
fn capacity_and_allocatable(found: &InstanceType, claim: &NodeClaim, class: &Ec2NodeClass) -> (Resources, Resources) {
    let asked = claim.spec.resources.requests.get(EFA);
    let asked = asked.is_some_and(|amount| amount.0.chars().any(|c| ('1'..='9').contains(&c)));
    let listed = class.spec.network_interfaces.iter().flatten().any(|interface| interface.interface_type == "efa-only");
    let (mut capacity, mut allocatable) = (found.capacity.clone(), found.allocatable.clone());
    if !asked && !listed {
        capacity.set(EFA, 0);
        allocatable.set(EFA, 0);
    }
    (capacity, allocatable)
}

/// The hourly price of an instance, if it is known.
fn price(found: Option<&Arc<InstanceType>>, instance: &Instance) -> Option<MicroUsd> {
    let mut offerings = found?.offerings.iter();
    let own = offerings.find(|other| *other.zone == instance.zone && other.capacity_type == instance.capacity_type);
    own.map(|offering| offering.price).filter(|price| price.0 > 0)
}

/// The beginning of the message of an unclassified failure.
fn brief(message: &str) -> &str {
    let fits =
        message.char_indices().map(|(at, c)| at + c.len_utf8()).take_while(|end| *end <= MAX_MESSAGE_BYTES).last();
    &message[..fits.unwrap_or(0)]
}

/// Writes to the Launched condition why the claim is not launched.
async fn report_not_launched(ctx: &Context, claim: &NodeClaim, reason: &str, message: &str) -> Result<(), kube::Error> {
    let status = |claim: &NodeClaim| {
        let list = unlaunched_conditions(claim, reason, message, clock::now());
        list.map(|list| json!({ "conditions": list }))
    };
    ctx.update_claim_status(claim, status).await
}

/// Conditions of a claim that is not launched; `None` when it has them already.
fn unlaunched_conditions(claim: &NodeClaim, reason: &str, message: &str, now: UnixMillis) -> Option<Vec<Condition>> {
    let mut writer = ConditionWriter::for_claim(claim, now);
    // Details that differ in every attempt would be written in every attempt.
    writer.edit().set_unknown(LAUNCHED, reason, without_encoded_details(message));
    writer.changed()
}

/// Annotations of a launched claim about its node class.
fn class_annotations(class: &Ec2NodeClass, ca: &str) -> BTreeMap<&'static str, String> {
    let profile = class.status.as_ref().and_then(|status| status.instance_profile.clone());
    let hash = DriftHash::of_class(class, ca);
    let hash = hash.annotations().into_iter().map(|(key, value)| (key, value.to_owned()));
    hash.chain(profile.map(|profile| (labels::INSTANCE_PROFILE_NAME, profile))).collect()
}

async fn record(
    ctx: &Context,
    claim: &NodeClaim,
    class: &Ec2NodeClass,
    launched: &Launched,
    catalog: &Catalog,
) -> Result<(), StepError> {
    let name = claim.name_any();
    let instance = &launched.instance;
    let found: Option<&Arc<InstanceType>> =
        catalog.instance_types.iter().find(|found| *found.name == instance.instance_type);
    let mut node_labels = instance_labels(found, instance);
    // The claim's own labels take precedence (Karpenter core reference 5.2).
    node_labels.extend(single_values(claim));
    preset_launched(ctx, claim, &node_labels);
    let mut metadata = json!({ "labels": node_labels });
    let price = price(found, instance);
    let mut annotations =
        price.map(|price| (labels::USD_PER_HOUR, price.to_string())).into_iter().collect::<BTreeMap<_, _>>();
    if let Some(ca) = ctx.cloud.capabilities().node_classes.map(NodeClassCloud::instance_ca) {
        annotations.extend(class_annotations(class, &ca));
    }
    if !annotations.is_empty() {
        metadata["annotations"] = json!(annotations);
    }
    ctx.patch_claim(&name, &json!({ "metadata": metadata })).await?;
    let status = |claim: &NodeClaim| {
        let mut writer = ConditionWriter::for_claim(claim, clock::now());
        writer.edit().set_true(LAUNCHED);
        let mut status = json!({
            "providerID": instance.provider_id,
            "imageID": instance.image_id,
            "conditions": writer.finish(),
        });
        if let Some(found) = found {
            let (capacity, allocatable) = capacity_and_allocatable(found, claim, class);
            status["capacity"] = json!(capacity.to_map());
            status["allocatable"] = json!(allocatable.to_map());
        }
        Some(status)
    };
    ctx.update_claim_status(claim, status).await?;
    let called = launched.called_at;
    if let Some(called) = called {
        for (wait, time) in ctx.cluster.update(|state| state.record_launch(&name, called, clock::now())) {
            ctx.metrics.pod_wait_seconds.with_label_values(&[wait.metric_label()]).observe(time.as_secs_f64());
        }
    }
    tracing::info!(
        claim = name,
        called_ms = called.map(|called| called.0),
        instance = instance.id,
        instance_type = instance.instance_type,
        zone = instance.zone,
        capacity_type = %instance.capacity_type,
        usd_per_hour = price.map(MicroUsd::usd),
        "launched nodeclaim"
    );
    let note = format!("{} in {} as {}", instance.instance_type, instance.zone, instance.capacity_type);
    ctx.emit_for_claim(claim, events::LAUNCHED.note(&note)).await;
    Ok(())
}

#[cfg(test)]
mod write_tests;

#[cfg(test)]
mod tests;
