//! Resolves an EC2NodeClass to subnets, security groups, images, instance profile, placement group and capacity reservations, and
//! decides the status condition of each.

use std::sync::Arc;
use std::time::Duration;

use kube::ResourceExt;

use crate::api::conditions;
use crate::api::conditions::VALIDATION_SUCCEEDED;
use crate::api::node_class::AmiRequirement;
use crate::api::{Ec2NodeClass, Ec2NodeClassStatus, NodePool};
use crate::clock;
use crate::cloud::ami_family::AmiFamily;
use crate::cloud::ec2::Ec2Provider;
use crate::cloud::ec2::aws::errors::ApiError;
use crate::cloud::ec2::bootstrap::kubelet_validation;
use crate::cloud::ec2::bootstrap::kubelet_validation::{Gate, InvalidKubelet};
use crate::cloud::ec2::launch::dry_run_type::demands;
use crate::cloud::ec2::node_class::images;
use crate::cloud::ec2::node_class::images::ImageError;
use crate::cloud::ec2::node_class::subnets::Subnet;
use crate::cloud::ec2::node_class::{capacity_reservations, placement_group, security_groups, subnets};
use crate::cloud::ec2::placement_group::PlacementGroup;
use crate::cloud::ec2::tags::restricted_tag;
use crate::cloud::kubelet_config::expressions::Unusable;
use crate::cloud::{Resolution, Verdict};
use crate::model::time::UnixMillis;

/// Conditions, by the names that [`conditions::EC2_NODE_CLASS_DEPENDENTS`] lists.
const AMIS: &str = "AMIsReady";
const RESERVATIONS: &str = "CapacityReservationsReady";
const PROFILE: &str = "InstanceProfileReady";
const PLACEMENT: &str = "PlacementGroupReady";
const SECURITY_GROUPS: &str = "SecurityGroupsReady";
const SUBNETS: &str = "SubnetsReady";

/// Conditions that validation depends on.
const BEFORE_VALIDATION: [&str; 4] = [AMIS, PROFILE, SECURITY_GROUPS, SUBNETS];
/// Wait before the next resolution after an API failed.
const RETRY: Duration = Duration::from_secs(10);

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
    pub reservations: Option<Result<Vec<capacity_reservations::DescribedReservation>, ApiError>>,
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
            found_or(status.subnets.is_empty(), "SubnetsNotFound", "subnetSelectorTerms select no subnets")
        }
        Err(error) => unjudged(&error),
    };
    let security_groups = match responses.security_groups {
        Ok(found) => {
            status.security_groups = security_groups::status(found);
            let none = status.security_groups.is_empty();
            found_or(none, "SecurityGroupsNotFound", "securityGroupSelectorTerms select no security groups")
        }
        Err(error) => unjudged(&error),
    };
    let amis = match responses.images {
        Ok(found) => {
            status.amis = images::status(found, now);
            found_or(status.amis.is_empty(), "AMINotFound", "amiSelectorTerms select no images")
        }
        Err(ImageError::Alias(error)) => {
            status.amis = vec![];
            Verdict::False("UnsupportedAlias", error.to_string())
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
        Some(Ok(None)) => Verdict::False("PlacementGroupNotFound", "placementGroupSelector selects no group".into()),
        Some(Err(error)) => Verdict::False("PlacementGroupResolutionFailed", error.to_string()),
    };
    let (found, reservations) = match responses.reservations {
        None => (vec![], Verdict::True),
        Some(Ok(found)) => (found.into_iter().map(|one| one.status).collect(), Verdict::True),
        // Known reservations stay, and the class stays Ready: reservations save money, but no node depends on them.
        Some(Err(error)) => {
            let known = std::mem::take(&mut status.capacity_reservations);
            let left = if known.is_empty() { "none is used" } else { "those known so far are used" };
            let message = format!("capacity reservations could not be read, {left}: {error}");
            (known, Verdict::Degraded("CapacityReservationsUnreadable", message))
        }
    };
    status.capacity_reservations = capacity_reservations::status(found, now);
    let verdicts = vec![
        (AMIS, amis),
        (RESERVATIONS, reservations),
        (PROFILE, profile),
        (PLACEMENT, placement),
        (SECURITY_GROUPS, security_groups),
        (SUBNETS, subnets),
    ];
    (status, verdicts)
}

fn found_or(none: bool, reason: &'static str, message: &str) -> Verdict {
    if none { Verdict::False(reason, message.to_owned()) } else { Verdict::True }
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
        return Some(Verdict::False("ClusterCIDRResolutionFailed", message.into()));
    }
    if let Some(error) = kubelet {
        return Some(Verdict::False(error.reason(), error.to_string()));
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
        return Some(Verdict::False("DependenciesNotReady", format!("waiting for {}", unready.join(", "))));
    }
    if !unknown.is_empty() {
        return Some(Verdict::Unknown("DependenciesNotReady", format!("waiting for {}", unknown.join(", "))));
    }
    restricted_tag(&class.spec.tags)
        .map(|key| Verdict::False("TagValidationFailed", format!("tag {key} may not be set, remove it from spec.tags")))
}

impl Ec2Provider {
    /// Validates a class's kubelet configuration on the instance types of the region.
    pub(crate) fn validate_kubelet(&self, class: &Ec2NodeClass) -> Result<Option<Unusable>, InvalidKubelet> {
        let settings = self.options.settings(class);
        kubelet_validation::validate(&class.spec, Gate::of(&self.options, &settings, &self.snapshot().types))
    }

    /// Resolves and validates a class.
    pub(crate) async fn resolve_class(&self, class: &Ec2NodeClass, pools: &[Arc<NodePool>]) -> Resolution {
        let (clients, spec, now) = (&self.clients, &class.spec, clock::now());
        let facts = self.facts.load_full();
        let placement = async {
            match &spec.placement_group_selector {
                None => None,
                Some(selector) => Some(placement_group::find(clients, selector).await),
            }
        };
        let reservations = async {
            let terms = &spec.capacity_reservation_selector_terms;
            let selected = self.options.reserved_capacity && !terms.is_empty();
            if selected { Some(capacity_reservations::find(clients, terms).await) } else { None }
        };
        // Names of new profiles must be unique, even if two processes start in the same millisecond.
        let nonce = format!("{}/{}", now.0, std::process::id());
        let (subnets, security_groups, images, profile, placement, reservations) = futures::join!(
            subnets::find(clients, &spec.subnet_selector_terms),
            security_groups::find(clients, &spec.security_group_selector_terms),
            images::find(clients, &self.parameters, &spec.ami_selector_terms, &facts.version, now),
            self.profiles.resolve(clients, &self.options.cluster_name, class, &nonce, now),
            placement,
            reservations,
        );
        if let Ok(subnets) = &subnets {
            self.addresses().set_described(subnets);
            let zones = subnets.iter().filter_map(|subnet| Some((subnet.zone.as_str(), subnet.zone_id.as_deref()?)));
            self.shifts().record_zone_ids(zones);
        }
        match &placement {
            None => self.know_group(class, None),
            Some(Ok(group)) => self.know_group(class, group.clone()),
            // The last resolved group stays valid, so that launches keep working.
            Some(Err(_)) => {}
        }
        if let Some(Ok(found)) = &reservations {
            let counts = found.iter().map(|one| (one.status.id.as_str(), one.available));
            self.reservations().set_described(counts, now);
        }
        let before = class.status.clone().unwrap_or_default();
        let responses = ClassResponses { subnets, security_groups, images, profile, placement, reservations };
        let (status, mut verdicts) = resolved_status(&before, responses, now);
        let mut resolved = class.clone();
        resolved.status = Some(status.clone());
        let kubelet = self.validate_kubelet(class);
        let verdict = validate(&resolved, &verdicts, facts.service_cidr.as_deref(), kubelet.as_ref().err());
        let validation = if let Some(verdict) = verdict {
            verdict
        } else {
            let demands = demands(pools.iter().map(|pool| &**pool), &class.name_any());
            self.try_dry(&resolved, &demands, now.0).await
        };
        let validation = match (validation, kubelet) {
            (Verdict::True, Ok(Some(unusable))) => Verdict::Degraded(
                "KubeletExpressionDropped",
                format!("{unusable}; what it would reserve counts as not set"),
            ),
            (verdict, _) => verdict,
        };
        verdicts.push((VALIDATION_SUCCEEDED, validation));
        let failed = verdicts.iter().any(|(_, verdict)| matches!(verdict, Verdict::Unjudged(_)));
        let again = if failed { RETRY } else { self.options.refresh };
        let again =
            capacity_reservations::changes_in(&status.capacity_reservations, now).map_or(again, |wait| again.min(wait));
        Resolution { status: Some(status), verdicts, requeue_after: again }
    }
}

#[cfg(test)]
mod tests;
