//! Drift of an instance from its node class (Karpenter AWS reference 10.1). The first reason in that order is reported.

use std::collections::{BTreeMap, BTreeSet};

use kube::ResourceExt;
use stowage_api::{Ec2NodeClass, NodeClaim};
use stowage_model::events;
use stowage_model::labels;

use crate::Drift;
use crate::ec2::boot_image::image_of;
use crate::ec2::instances::describe::InstanceFacts;

/// Why drift can't be evaluated.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DriftError {
    /// The claim has no instance type, or one that is not in the catalog.
    #[error("its instance type {0:?} is not in the catalog")]
    UnknownType(String),
    /// The claim's status has no image id.
    #[error("the claim's status has no imageID")]
    NoImageId,
    /// The class's status has no images.
    #[error("the class's status has no images")]
    NoImages,
    /// The instance type boots none of the class's images.
    #[error("no image of the class boots on {0}")]
    NoImageFor(String),
    /// The class's status has no security groups.
    #[error("the class's status has no security groups")]
    NoSecurityGroups,
    /// The class's status has no subnets.
    #[error("the class's status has no subnets")]
    NoSubnets,
    /// The class's placement group is not resolved yet.
    #[error("the class's placement group was not looked up yet")]
    PlacementGroupUnknown,
    /// The instance is not in the last list of instances.
    #[error("its instance was not listed yet")]
    InstanceUnknown,
}

/// The placement group that a class's selector resolves to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ResolvedGroup<'a> {
    /// Not resolved yet.
    #[default]
    Unknown,
    /// There is none.
    Absent,
    /// Such as `pg-0123456789abcdef0`.
    Id(&'a str),
}

/// The inputs of drift besides the claim and the class.
#[derive(Clone, Copy, Debug, Default)]
pub struct DriftInputs<'a> {
    /// Labels of the claim's instance type, if it is in the catalog.
    pub type_labels: Option<&'a BTreeMap<String, String>>,
    /// The instance as EC2 last listed it.
    pub instance: Option<&'a InstanceFacts>,
    pub placement_group: ResolvedGroup<'a>,
}

/// Why a claim's instance has drifted from its class; `None` where it has not.
///
/// # Errors
/// [`DriftError`] where an input is missing: the last evaluation stays valid.
pub fn drift_reason(
    claim: &NodeClaim,
    class: &Ec2NodeClass,
    inputs: &DriftInputs<'_>,
) -> Result<Option<Drift>, DriftError> {
    if let Some(drift) = class_drift(claim, class) {
        return Ok(Some(drift));
    }
    if let Some(drift) = image_drift(claim, class, inputs.type_labels)? {
        return Ok(Some(drift));
    }
    let instance = inputs.instance.ok_or(DriftError::InstanceUnknown)?;
    let all = [
        security_group_drift(instance, class)?,
        subnet_drift(instance, class)?,
        reservation_drift(instance, class),
        placement_group_drift(claim, class, inputs.placement_group)?,
    ];
    Ok(all.into_iter().flatten().next())
}

/// The hashes differ. Absent hashes and hashes of different versions are not comparable: no drift.
fn class_drift(claim: &NodeClaim, class: &Ec2NodeClass) -> Option<Drift> {
    let of = |annotations: &BTreeMap<String, String>, key: &str| annotations.get(key).cloned();
    let version = labels::EC2_NODE_CLASS_HASH_VERSION;
    let same_version = of(claim.annotations(), version)? == of(class.annotations(), version)?;
    let before = of(claim.annotations(), labels::EC2_NODE_CLASS_HASH)?;
    let now = of(class.annotations(), labels::EC2_NODE_CLASS_HASH)?;
    (same_version && before != now).then(|| Drift {
        event: events::NODE_CLASS_DRIFT,
        message: format!("EC2NodeClass {} changed since it was launched", class.name_any()),
    })
}

/// The class now selects another image for the instance type.
fn image_drift(
    claim: &NodeClaim,
    class: &Ec2NodeClass,
    type_labels: Option<&BTreeMap<String, String>>,
) -> Result<Option<Drift>, DriftError> {
    let name = claim.labels().get(labels::INSTANCE_TYPE).cloned().unwrap_or_default();
    let type_labels = type_labels.ok_or_else(|| DriftError::UnknownType(name.clone()))?;
    let images = class.status.as_ref().map(|status| status.amis.as_slice()).unwrap_or_default();
    if images.is_empty() {
        return Err(DriftError::NoImages);
    }
    let image = claim.status.as_ref().and_then(|status| status.image_id.as_deref()).unwrap_or_default();
    if image.is_empty() {
        return Err(DriftError::NoImageId);
    }
    let wanted = image_of(images, type_labels).ok_or_else(|| DriftError::NoImageFor(name.clone()))?;
    Ok((wanted.id != image).then(|| Drift {
        event: events::AMI_DRIFT,
        message: format!("it runs image {image}, and {name} boots {} now", wanted.id),
    }))
}

/// The sets of security groups differ.
fn security_group_drift(instance: &InstanceFacts, class: &Ec2NodeClass) -> Result<Option<Drift>, DriftError> {
    let status = class.status.as_ref().map(|status| status.security_groups.as_slice()).unwrap_or_default();
    let wanted: BTreeSet<&String> = status.iter().map(|group| &group.id).collect();
    if wanted.is_empty() {
        return Err(DriftError::NoSecurityGroups);
    }
    let has: BTreeSet<&String> = instance.security_groups.iter().collect();
    // In EC2 every instance has a security group: a response without any lacks the information.
    Ok((!has.is_empty() && has != wanted).then(|| Drift {
        event: events::SECURITY_GROUP_DRIFT,
        message: format!("it has the security groups {}, and {} are selected", list(&has), list(&wanted)),
    }))
}

fn subnet_drift(instance: &InstanceFacts, class: &Ec2NodeClass) -> Result<Option<Drift>, DriftError> {
    let subnets = class.status.as_ref().map(|status| status.subnets.as_slice()).unwrap_or_default();
    if subnets.is_empty() {
        return Err(DriftError::NoSubnets);
    }
    let left = instance.subnet.as_ref().filter(|own| subnets.iter().all(|subnet| subnet.id != **own));
    Ok(left.map(|own| Drift {
        event: events::SUBNET_DRIFT,
        message: format!("its subnet {own} is not selected any more"),
    }))
}

/// Applies only while the instance runs in a reservation: one that became on-demand does not drift.
fn reservation_drift(instance: &InstanceFacts, class: &Ec2NodeClass) -> Option<Drift> {
    let selected = class.status.as_ref().map(|status| status.capacity_reservations.as_slice()).unwrap_or_default();
    let own = instance.reservation.as_ref().filter(|own| selected.iter().all(|found| found.id != **own))?;
    let message = format!("its capacity reservation {own} is not selected any more");
    Some(Drift { event: events::CAPACITY_RESERVATION_DRIFT, message })
}

fn placement_group_drift(
    claim: &NodeClaim,
    class: &Ec2NodeClass,
    resolved: ResolvedGroup<'_>,
) -> Result<Option<Drift>, DriftError> {
    let wanted = match (&class.spec.placement_group_selector, resolved) {
        (None, _) | (Some(_), ResolvedGroup::Absent) => None,
        (Some(_), ResolvedGroup::Id(id)) => Some(id),
        (Some(_), ResolvedGroup::Unknown) => return Err(DriftError::PlacementGroupUnknown),
    };
    let has = claim.labels().get(labels::PLACEMENT_GROUP_ID).map(String::as_str).filter(|id| !id.is_empty());
    let name =
        |id: Option<&str>| id.map_or_else(|| "no placement group".to_owned(), |id| format!("placement group {id}"));
    Ok((has != wanted).then(|| Drift {
        event: events::PLACEMENT_GROUP_DRIFT,
        message: format!("it is in {}, and {} is selected", name(has), name(wanted)),
    }))
}

fn list(ids: &BTreeSet<&String>) -> String {
    ids.iter().map(|id| id.as_str()).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests;
