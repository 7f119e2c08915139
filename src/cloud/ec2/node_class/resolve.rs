//! Resolves an EC2NodeClass to subnets, security groups, images, instance profile, placement group and capacity reservations, and
//! decides the status condition of each.

use std::time::Duration;

use stowage_api::conditions;
use stowage_api::conditions::{
    AMIS_READY, BEFORE_VALIDATION, CAPACITY_RESERVATIONS_READY, INSTANCE_PROFILE_READY, PLACEMENT_GROUP_READY,
    SECURITY_GROUPS_READY, SUBNETS_READY,
};
use stowage_api::node_class::AmiRequirement;
use stowage_api::{Ec2NodeClass, Ec2NodeClassStatus};
use stowage_model::events;
use stowage_model::events::DeclaredEvent;
use stowage_model::time::UnixMillis;

use crate::Verdict;
use crate::ami_family::AmiFamily;
use crate::ec2::aws::errors::ApiError;
use crate::ec2::bootstrap::kubelet_validation::InvalidKubelet;
use crate::ec2::node_class::images;
use crate::ec2::node_class::images::ImageError;
use crate::ec2::node_class::subnets::Subnet;
use crate::ec2::node_class::{security_groups, select_capacity_reservations, subnets};
use crate::ec2::placement_group::PlacementGroup;
use crate::ec2::tags::{TagRoom, restricted_tag, tag_room};

/// Wait before the next resolution after an API failed.
pub const RETRY: Duration = Duration::from_secs(10);

/// Responses of EC2, SSM and IAM for a class.
pub struct ClassResponses {
    pub subnets: Result<Vec<Subnet>, ApiError>,
    /// Ids and names of security groups.
    pub security_groups: Result<Vec<(String, Option<String>)>, ApiError>,
    /// Images and their requirements.
    pub images: Result<Vec<(images::Image, Vec<AmiRequirement>)>, ImageError>,
    /// Name of the instance profile.
    pub profile: Result<String, ApiError>,
    /// The placement group; `None` where the class selects none.
    pub placement: Option<Result<Option<PlacementGroup>, ApiError>>,
    /// Capacity reservations; `None` where the class selects none, or the feature gate is off.
    pub reservations: Option<Result<Vec<select_capacity_reservations::DescribedReservation>, ApiError>>,
}

/// The status and the verdicts for the conditions. A failed API keeps the part of the status that depends on it.
pub fn resolved_status(
    before: &Ec2NodeClassStatus,
    responses: ClassResponses,
    now: UnixMillis,
) -> (Ec2NodeClassStatus, Vec<(&'static str, Verdict)>) {
    let mut status = before.clone();
    let unjudged = |error: &dyn std::fmt::Display| Verdict::Unjudged(error.to_string());
    let subnets = match responses.subnets {
        Ok(found) => {
            status.subnets = subnets::status(found);
            found_or(status.subnets.is_empty(), events::SUBNETS_NOT_FOUND, "subnetSelectorTerms select no subnets")
        }
        Err(error) => unjudged(&error),
    };
    let security_groups = match responses.security_groups {
        Ok(found) => {
            status.security_groups = security_groups::status(found);
            let none = status.security_groups.is_empty();
            found_or(none, events::SECURITY_GROUPS_NOT_FOUND, "securityGroupSelectorTerms select no security groups")
        }
        Err(error) => unjudged(&error),
    };
    let amis = match responses.images {
        Ok(found) => {
            status.amis = images::status(found, now);
            found_or(status.amis.is_empty(), events::AMI_NOT_FOUND, "amiSelectorTerms select no images")
        }
        Err(ImageError::Alias(error)) => {
            status.amis = vec![];
            Verdict::False(events::UNSUPPORTED_ALIAS, error.to_string())
        }
        Err(error @ ImageError::Api(_)) => unjudged(&error),
    };
    let profile = match responses.profile {
        Ok(name) => {
            status.instance_profile = Some(name);
            Verdict::True
        }
        Err(error) => unjudged(&error),
    };
    let placement = match responses.placement {
        None | Some(Ok(Some(_))) => Verdict::True,
        Some(Ok(None)) => {
            Verdict::False(events::PLACEMENT_GROUP_NOT_FOUND, "placementGroupSelector selects no group".into())
        }
        Some(Err(error)) => Verdict::False(events::PLACEMENT_GROUP_RESOLUTION_FAILED, error.to_string()),
    };
    let (found, reservations) = match responses.reservations {
        None => (vec![], Verdict::True),
        Some(Ok(found)) => (found.into_iter().map(|one| one.status).collect(), Verdict::True),
        // Known reservations stay, and the class stays Ready: reservations save money, but no node depends on them.
        Some(Err(error)) => {
            let known = std::mem::take(&mut status.capacity_reservations);
            let left = if known.is_empty() { "none is used" } else { "the last known ones are used" };
            let message = format!("capacity reservations could not be read, {left}: {error}");
            (known, Verdict::Degraded(events::CAPACITY_RESERVATIONS_UNREADABLE, message))
        }
    };
    status.capacity_reservations = select_capacity_reservations::status(found, now);
    let verdicts = vec![
        (AMIS_READY, amis),
        (CAPACITY_RESERVATIONS_READY, reservations),
        (INSTANCE_PROFILE_READY, profile),
        (PLACEMENT_GROUP_READY, placement),
        (SECURITY_GROUPS_READY, security_groups),
        (SUBNETS_READY, subnets),
    ];
    (status, verdicts)
}

fn found_or(none: bool, event: &'static DeclaredEvent, message: &str) -> Verdict {
    if none { Verdict::False(event, message.to_owned()) } else { Verdict::True }
}

/// Validates a class without EC2 dry runs; `None` where they decide. `kubelet` is the error of its kubelet configuration.
pub fn validate(
    class: &Ec2NodeClass,
    verdicts: &[(&'static str, Verdict)],
    service_cidr: Option<&str>,
    kubelet: Option<&InvalidKubelet>,
) -> Option<Verdict> {
    if AmiFamily::of(&class.spec) == AmiFamily::Al2023 && service_cidr.is_none() {
        let message = "the addresses of services are not known, which AL2023 needs: allow eks:DescribeCluster or set STOWAGE_SERVICE_CIDR";
        return Some(Verdict::False(events::CLUSTER_CIDR_RESOLUTION_FAILED, message.into()));
    }
    if let Some(error) = kubelet {
        return Some(Verdict::False(error.event(), error.to_string()));
    }
    let before = class.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default();
    let mut unknown = Vec::new();
    let mut unready = Vec::new();
    for kind in BEFORE_VALIDATION {
        let verdict = verdicts.iter().find(|(other, _)| *other == kind).map(|(_, verdict)| verdict);
        match verdict {
            Some(Verdict::True | Verdict::Degraded(..)) => {}
            Some(Verdict::False(..)) => unready.push(kind),
            // Not evaluated: the last condition stays valid.
            _ => match conditions::get(before, kind).map(|condition| condition.status.as_str()) {
                Some("True") => {}
                Some("False") => unready.push(kind),
                _ => unknown.push(kind),
            },
        }
    }
    if !unready.is_empty() {
        return Some(Verdict::False(events::DEPENDENCIES_NOT_READY, format!("waiting for {}", unready.join(", "))));
    }
    if !unknown.is_empty() {
        return Some(Verdict::Unknown("DependenciesNotReady", format!("waiting for {}", unknown.join(", "))));
    }
    let tags = class.spec.tags.as_ref()?;
    if let Some(key) = restricted_tag(tags) {
        let message = format!("tag {key} may not be set, remove it from spec.tags");
        return Some(Verdict::False(events::TAG_VALIDATION_FAILED, message));
    }
    (tag_room(tags) == TagRoom::TooMany).then(|| {
        let message = format!(
            "{} tags are too many: an instance has at most 50, of which 7 are added to those of spec.tags; remove some",
            tags.len()
        );
        Verdict::False(events::TAG_VALIDATION_FAILED, message)
    })
}

#[cfg(test)]
mod tests;
