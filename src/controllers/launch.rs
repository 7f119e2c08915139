//! A NodeClaim becomes an instance.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use k8s_openapi::api::core::v1::Taint;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use serde_json::json;

use super::context::{Context, single_values};
use super::provisioner::claim_event;
use crate::api::conditions::{Conditions, LAUNCHED, NODE_CLAIM_DEPENDENTS};
use crate::api::{Ec2NodeClass, NodeClaim, hash, labels};
use crate::cloud::launch_group::{self, LaunchGroup};
use crate::cloud::{Instance, LaunchDetails, LaunchError, LaunchRequest, Launched, Override, ReservedIn};
use crate::cluster::now_ms;
use crate::scheduling::offering::{Catalogue, InstanceType, MicroUsd, OFFERING_LABELS, Offering};
use crate::scheduling::requirement::Requirements;
use crate::scheduling::resources::Resources;

/// Resource of the interfaces that an instance has only where it is launched with them.
const EFA: &str = "vpc.amazonaws.com/efa";

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
    let catalogue = ctx.cloud.catalogue(&class);
    let overrides = acceptable(claim, &catalogue);
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
            catalogue: Arc::clone(&catalogue),
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
            record(ctx, claim, &class, &launched, &catalogue).await
        }
        Err(error @ LaunchError::NoSpotRole) => {
            claim_event(ctx, claim, true, "SpotSLRCreationFailed", &error.to_string()).await;
            Err(Failure::Hopeless("insufficient_capacity", error.to_string()))
        }
        Err(LaunchError::Rejected { reason, message }) => {
            claim_event(ctx, claim, true, reason, &message).await;
            not_launched(ctx, claim, reason, &message).await?;
            Err(Failure::Later(format!("{reason}: {message}")))
        }
        Err(LaunchError::InsufficientCapacity { unavailable }) => {
            for offering in &unavailable {
                ctx.cloud.mark_unavailable(offering);
            }
            let note = format!("{} offerings are out of capacity; its pods are planned anew", unavailable.len());
            claim_event(ctx, claim, true, "InsufficientCapacityError", &note).await;
            Err(Failure::Hopeless("insufficient_capacity", note))
        }
        Err(LaunchError::NodeClassNotReady { name, reason }) => {
            Err(Failure::Hopeless("nodeclass_not_ready", format!("EC2NodeClass {name} is not ready: {reason}")))
        }
        Err(error @ (LaunchError::Throttled | LaunchError::Other(_))) => {
            claim_event(ctx, claim, true, "LaunchFailed", &error.to_string()).await;
            Err(Failure::Later(error.to_string()))
        }
    }
}

/// Offerings that a claim may be launched as, cheapest first.
pub fn acceptable(claim: &NodeClaim, catalogue: &Catalogue) -> Vec<Override> {
    let allowed = |key: &str| {
        let found = claim.spec.requirements.iter().find(|r| r.key == key && r.operator == "In");
        move |value: &str| found.is_none_or(|r| r.values.iter().any(|other| other == value))
    };
    let (type_ok, zone_ok, capacity_ok) =
        (allowed(labels::INSTANCE_TYPE), allowed(labels::ZONE), allowed(labels::CAPACITY_TYPE));
    let requirements = Requirements::from_api(&claim.spec.requirements).unwrap_or_default();
    let mut found: Vec<(i64, Override)> = Vec::new();
    for instance_type in &catalogue.instance_types {
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

/// Says on the claim why it isn't launched.
async fn not_launched(ctx: &Context, claim: &NodeClaim, reason: &str, message: &str) -> Result<(), Failure> {
    let before = claim.status.as_ref().map(|status| status.conditions.clone()).unwrap_or_default();
    let mut list = before.clone();
    let (generation, created) = (claim.metadata.generation, claim.metadata.creation_timestamp.as_ref());
    let now = Time(Timestamp::now());
    Conditions::open(&mut list, NODE_CLAIM_DEPENDENTS, generation, created, &now)
        .set_unknown(LAUNCHED, reason, message);
    if list != before {
        ctx.patch_claim_status(&claim.name_any(), &json!({ "conditions": list })).await?;
    }
    Ok(())
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
    catalogue: &Catalogue,
) -> Result<(), Failure> {
    let name = claim.name_any();
    let instance = &launched.instance;
    let found: Option<&Arc<InstanceType>> =
        catalogue.instance_types.iter().find(|found| *found.name == instance.instance_type);
    let mut own = instance_labels(found, instance);
    // What the user put on the claim wins (core reference 5.2).
    own.extend(single_values(claim));
    let mut metadata = json!({ "labels": own });
    if let Some(ca) = ctx.cloud.instance_ca() {
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
mod tests {
    use super::*;
    use crate::cloud::InstanceState;
    use crate::cloud::reservation::ReservationKind;
    use crate::scheduling::offering::CapacityType;

    fn found(partitions: &[&str]) -> Arc<InstanceType> {
        let offering = |partition: &&str| Offering {
            zone: "z".into(),
            capacity_type: CapacityType::OnDemand,
            price: MicroUsd(1),
            available: true,
            left: None,
            labels: Arc::new([(labels::PLACEMENT_GROUP_PARTITION.to_owned(), (*partition).to_owned())].into()),
            risk_permille: 0,
        };
        Arc::new(InstanceType {
            name: "m5.large".into(),
            labels: BTreeMap::new(),
            capacity: Resources::default(),
            allocatable: Resources::default(),
            volume_limits: BTreeMap::new(),
            offerings: partitions.iter().map(offering).collect(),
        })
    }

    fn instance(partition: Option<i32>) -> Instance {
        Instance {
            id: "i-1".into(),
            provider_id: "aws:///z/i-1".into(),
            client_token: String::new(),
            node_claim: String::new(),
            instance_type: "m5.large".into(),
            zone: "z".into(),
            capacity_type: CapacityType::OnDemand,
            reservation: None,
            partition,
            image_id: "ami-1".into(),
            launched_at_ms: 0,
            state: InstanceState::Pending,
        }
    }

    #[test]
    fn only_what_was_launched_into_a_reservation_has_its_labels() {
        let reservation = ReservedIn { id: "cr-1".into(), kind: ReservationKind::CapacityBlock };
        let reserved =
            Instance { capacity_type: CapacityType::Reserved, reservation: Some(reservation), ..instance(None) };
        let lines = |instance: &Instance| {
            let found = instance_labels(Some(&found(&[])), instance);
            found.into_iter().map(|(key, value)| format!("{key}={value}")).collect::<Vec<_>>().join("\n")
        };
        insta::assert_snapshot!(lines(&reserved), @r"
        karpenter.k8s.aws/capacity-reservation-id=cr-1
        karpenter.k8s.aws/capacity-reservation-interruptible=false
        karpenter.k8s.aws/capacity-reservation-type=capacity-block
        karpenter.sh/capacity-type=reserved
        node.kubernetes.io/instance-type=m5.large
        topology.kubernetes.io/zone=z
        ");
        insta::assert_snapshot!(lines(&instance(None)), @r"
        karpenter.sh/capacity-type=on-demand
        node.kubernetes.io/instance-type=m5.large
        topology.kubernetes.io/zone=z
        ");
    }

    #[test]
    fn c28_efa_is_promised_only_where_the_instance_was_launched_with_it() {
        let mut found = InstanceType::clone(&found(&[]));
        for room in [&mut found.capacity, &mut found.allocatable] {
            room.set(EFA, 4);
            room.set("cpu", 8_000);
        }
        let claim = |requests: serde_json::Value| -> NodeClaim {
            serde_json::from_value(json!({"apiVersion": "karpenter.sh/v1", "kind": "NodeClaim", "metadata": {"name": "c"},
                "spec": {"requirements": [], "resources": {"requests": requests}, "nodeClassRef": {"group": "g", "kind": "k", "name": "n"}}}))
            .unwrap()
        };
        let class = |kinds: &[&str]| -> Ec2NodeClass {
            let interface = |(device, kind): (usize, &&str)| json!({"networkCardIndex": 0, "deviceIndex": device, "interfaceType": kind});
            let interfaces: Vec<_> = kinds.iter().enumerate().map(interface).collect();
            serde_json::from_value(
                json!({"apiVersion": "karpenter.k8s.aws/v1", "kind": "EC2NodeClass", "metadata": {"name": "n"},
                "spec": {"amiSelectorTerms": [], "networkInterfaces": interfaces}}),
            )
            .unwrap()
        };
        for (what, requests, kinds, efa) in [
            ("plain", json!({"cpu": "1"}), &[][..], false),
            ("asked for", json!({(EFA): "1"}), &[], true),
            ("none asked for", json!({(EFA): "0"}), &[], false),
            ("listed", json!({}), &["interface", "efa-only"], true),
            ("others listed", json!({}), &["interface"], false),
        ] {
            let (capacity, allocatable) = room(&found, &claim(requests), &class(kinds));
            let promised = [&capacity, &allocatable].map(|room| room.to_map().contains_key(EFA));
            assert_eq!(promised, [efa, efa], "{what}");
            assert!(capacity.to_map().contains_key("cpu"), "{what}");
        }
    }

    #[test]
    fn a_partition_that_is_yet_to_be_told_is_an_empty_label_and_none_is_none() {
        let label =
            |partitions: &[&str], told| partition(Some(&found(partitions)), &instance(told)).map(|(_, value)| value);
        assert_eq!(label(&["1", "2"], Some(2)).as_deref(), Some("2"));
        assert_eq!(label(&["1", "2"], None).as_deref(), Some(""));
        assert_eq!(label(&[], None), None, "no partitions");
        let claim = |value: Option<&str>| -> NodeClaim {
            let own: BTreeMap<&str, &str> =
                value.iter().map(|value| (labels::PLACEMENT_GROUP_PARTITION, *value)).collect();
            serde_json::from_value(json!({"apiVersion": "karpenter.sh/v1", "kind": "NodeClaim",
                "metadata": {"name": "c", "labels": own},
                "spec": {"requirements": [], "nodeClassRef": {"group": "g", "kind": "k", "name": "n"}}}))
            .unwrap()
        };
        assert!(lacks_partition(&claim(Some(""))));
        assert!(!lacks_partition(&claim(Some("2"))) && !lacks_partition(&claim(None)));
    }
}
