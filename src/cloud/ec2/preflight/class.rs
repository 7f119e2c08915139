//! Checks of what a node class selects: subnets, security groups, images, role or instance profile, placement group.

use std::collections::BTreeMap;

use kube::ResourceExt;
use stowage_api::Ec2NodeClass;
use stowage_api::conditions::BEFORE_VALIDATION;
use stowage_api::node_class::{AmiRequirement, AmiStatus};
use stowage_model::labels;
use stowage_model::time::UnixMillis;

use crate::Verdict;
use crate::ec2::aws::client::AwsClients;
use crate::ec2::aws::errors::{ApiError, Class};
use crate::ec2::bootstrap::kubelet_validation::InvalidKubelet;
use crate::ec2::node_class::images;
use crate::ec2::node_class::images::{Image, ImageError, SsmParameterCache};
use crate::ec2::node_class::instance_profiles;
use crate::ec2::node_class::instance_profiles::role_name;
use crate::ec2::node_class::resolve;
use crate::ec2::node_class::resolve::{resolved_status, validate};
use crate::ec2::node_class::subnets;
use crate::ec2::node_class::subnets::Subnet;
use crate::ec2::node_class::{security_groups, select_placement_group};
use crate::ec2::placement_group::PlacementGroup;
use crate::ec2::preflight::finding::{Finding, brief, remediation};
use crate::kubelet_config::expressions::Unusable;

/// A zone with fewer free addresses is a warning.
const MIN_ADDRESSES: i64 = 32;

/// How nodes of the class get their IAM permissions.
#[derive(Clone, Debug)]
pub enum NodeIdentity {
    /// `spec.instanceProfile`.
    Profile(Result<ProfileState, ApiError>),
    /// `spec.role`: whether the role exists, and the profile that the controller created for it.
    Role(Result<bool, ApiError>, Option<String>),
}

/// The state of an instance profile.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProfileState {
    Missing,
    WithoutRole,
    WithRole(String),
}

/// Responses of the APIs about a class.
#[derive(Debug)]
pub struct ClassChecks {
    pub subnets: Result<Vec<Subnet>, ApiError>,
    /// Ids and names of security groups.
    pub security_groups: Result<Vec<(String, Option<String>)>, ApiError>,
    /// Images and their requirements; `None` where they depend on the cluster's version and it is unknown.
    pub images: Option<Result<Vec<(Image, Vec<AmiRequirement>)>, ImageError>>,
    pub identity: NodeIdentity,
    /// The placement group; `None` where the class selects none.
    pub placement: Option<Result<Option<PlacementGroup>, ApiError>>,
}

/// Calls the APIs for what a class selects, in a cluster of `version`.
pub async fn fetch(
    clients: &AwsClients,
    parameters: &SsmParameterCache,
    class: &Ec2NodeClass,
    version: Option<&str>,
    now: UnixMillis,
) -> ClassChecks {
    let spec = &class.spec;
    let by_version = spec.ami_selector_terms.iter().any(|term| term.alias.is_some());
    let find_images = async {
        match version {
            None if by_version => None,
            _ => {
                let version = version.unwrap_or_default();
                Some(images::find(clients, parameters, &spec.ami_selector_terms, version, now).await)
            }
        }
    };
    let find_group = async {
        match &spec.placement_group_selector {
            None => None,
            Some(selector) => Some(select_placement_group::find(clients, selector).await),
        }
    };
    let (subnets, security_groups, images, identity, placement) = futures::join!(
        subnets::find(clients, &spec.subnet_selector_terms),
        security_groups::find(clients, &spec.security_group_selector_terms),
        find_images,
        fetch_identity(clients, class),
        find_group,
    );
    ClassChecks { subnets, security_groups, images, identity, placement }
}

async fn fetch_identity(clients: &AwsClients, class: &Ec2NodeClass) -> NodeIdentity {
    if let Some(name) = &class.spec.instance_profile {
        let found = instance_profiles::get(clients, name).await;
        return NodeIdentity::Profile(found.map(|found| match found {
            None => ProfileState::Missing,
            Some(None) => ProfileState::WithoutRole,
            Some(Some(role)) => ProfileState::WithRole(role),
        }));
    }
    let role = role_name(class.spec.role.as_deref().unwrap_or_default());
    let profile = class.status.as_ref().and_then(|status| status.instance_profile.clone());
    let exists = match clients.iam.get_role().role_name(role).send().await.map_err(ApiError::of("iam:GetRole")) {
        Ok(_) => Ok(true),
        Err(error) if error.class == Class::NotFound => Ok(false),
        Err(error) => Err(error),
    };
    NodeIdentity::Role(exists, profile)
}

/// The findings about what a class selects.
pub fn findings(class: &Ec2NodeClass, checks: &ClassChecks, now: UnixMillis) -> Vec<Finding> {
    let mut findings = vec![
        of_subnets(&checks.subnets),
        of_groups(&checks.security_groups),
        of_images(checks.images.as_ref(), now),
        of_identity(class, &checks.identity),
    ];
    findings.extend(checks.placement.as_ref().map(of_placement));
    findings
}

fn of_subnets(response: &Result<Vec<Subnet>, ApiError>) -> Finding {
    let check = "subnets";
    let found = match response {
        Ok(found) => found,
        Err(error) => return Finding::failed(check, brief(error), remediation(error)),
    };
    if found.is_empty() {
        let detail = "subnetSelectorTerms select no subnets".to_owned();
        return Finding::failed(check, detail, "tag the subnets as the terms say, or correct the terms".to_owned());
    }
    let mut zones: BTreeMap<&str, BTreeMap<&str, i64>> = BTreeMap::new();
    for subnet in found {
        zones.entry(&subnet.zone).or_default().insert(&subnet.id, subnet.free);
    }
    let free = |subnets: &BTreeMap<&str, i64>| subnets.values().sum::<i64>();
    let of_zone = |(zone, subnets): (&&str, &BTreeMap<&str, i64>)| {
        format!("{zone}: {} with {} free addresses", counted(subnets.len(), "subnet"), free(subnets))
    };
    let detail = zones.iter().map(of_zone).collect::<Vec<_>>().join("; ");
    if zones.values().all(|subnets| free(subnets) == 0) {
        return Finding::failed(check, detail, "give the class subnets with free addresses".to_owned());
    }
    let short: Vec<&str> = zones.iter().filter(|(_, of)| free(of) < MIN_ADDRESSES).map(|(zone, _)| *zone).collect();
    if short.is_empty() {
        return Finding::ok(check, detail);
    }
    Finding::warning(check, detail, format!("add subnets in {}: few free addresses are left there", short.join(", ")))
}

fn of_groups(response: &Result<Vec<(String, Option<String>)>, ApiError>) -> Finding {
    let check = "security groups";
    match response {
        Ok(found) if found.is_empty() => {
            let help = "tag the security groups as the terms say, or correct the terms";
            let detail = "securityGroupSelectorTerms select no security groups";
            Finding::failed(check, detail.to_owned(), help.to_owned())
        }
        Ok(found) => {
            let all: BTreeMap<&str, Option<&str>> =
                found.iter().map(|(id, name)| (id.as_str(), name.as_deref())).collect();
            let named = all.iter().map(|(id, name)| match name {
                Some(name) => format!("{id} ({name})"),
                None => (*id).to_owned(),
            });
            Finding::ok(check, named.collect::<Vec<_>>().join(", "))
        }
        Err(error) => Finding::failed(check, brief(error), remediation(error)),
    }
}

fn of_images(response: Option<&Result<Vec<(Image, Vec<AmiRequirement>)>, ImageError>>, now: UnixMillis) -> Finding {
    let check = "images";
    let found = match response {
        None => {
            let detail = "not checked: an alias needs the version of the cluster".to_owned();
            return Finding::warning(check, detail, "see the row about the cluster".to_owned());
        }
        Some(Ok(found)) => found,
        Some(Err(ImageError::Api(error))) if error.class == Class::NotFound => {
            let help = "correct the version in amiSelectorTerms";
            return Finding::failed(check, format!("no image has this alias: {}", brief(error)), help.to_owned());
        }
        Some(Err(ImageError::Api(error))) => return Finding::failed(check, brief(error), remediation(error)),
        Some(Err(ImageError::Alias(error))) => {
            return Finding::failed(check, error.to_string(), "choose another alias in amiSelectorTerms".to_owned());
        }
    };
    let kept = images::status(found.clone(), now);
    if kept.is_empty() {
        let detail = "amiSelectorTerms select no images".to_owned();
        return Finding::failed(check, detail, "correct the terms: id, name, owner and tags must all match".to_owned());
    }
    let detail = by_architecture(&kept);
    if kept.iter().any(|image| image.deprecated == Some(true)) {
        let help = "select newer images: a deprecated one is used only where there is no other";
        return Finding::warning(check, detail, help.to_owned());
    }
    Finding::ok(check, detail)
}

/// Such as `amd64: ami-1 (a), ami-2 (b); arm64: none`.
fn by_architecture(images: &[AmiStatus]) -> String {
    let of = |arch: &str| {
        let boots = |image: &&AmiStatus| {
            let wanted = image.requirements.iter().find(|requirement| requirement.key == labels::ARCH);
            wanted.is_some_and(|wanted| wanted.values.iter().any(|value| value == arch))
        };
        let text = |image: &AmiStatus| {
            let old = if image.deprecated == Some(true) { ", deprecated" } else { "" };
            format!("{} ({}{old})", image.id, image.name.as_deref().unwrap_or_default())
        };
        let all: Vec<String> = images.iter().filter(boots).map(text).collect();
        format!("{arch}: {}", if all.is_empty() { "none".to_owned() } else { all.join(", ") })
    };
    ["amd64", "arm64"].map(of).join("; ")
}

fn of_identity(class: &Ec2NodeClass, identity: &NodeIdentity) -> Finding {
    match identity {
        NodeIdentity::Profile(response) => {
            let (check, name) = ("instance profile", class.spec.instance_profile.as_deref().unwrap_or_default());
            match response {
                Ok(ProfileState::WithRole(role)) => Finding::ok(check, format!("{name} with role {role}")),
                Ok(ProfileState::WithoutRole) => {
                    let help = "add the nodes' role to the profile";
                    Finding::failed(check, format!("{name} has no role"), help.to_owned())
                }
                Ok(ProfileState::Missing) => {
                    let help = "create it, or correct spec.instanceProfile";
                    Finding::failed(check, format!("there is no instance profile {name}"), help.to_owned())
                }
                Err(error) => Finding::failed(check, brief(error), remediation(error)),
            }
        }
        NodeIdentity::Role(exists, profile) => {
            let (check, role) = ("role", role_name(class.spec.role.as_deref().unwrap_or_default()));
            let profile = match profile {
                Some(name) => format!("instance profile {name}"),
                None => "the controller creates an instance profile for it".to_owned(),
            };
            match exists {
                Ok(true) => Finding::ok(check, format!("{role}; {profile}")),
                Ok(false) => {
                    let help = "create the role for ec2.amazonaws.com (on EKS with AmazonEKSWorkerNodePolicy, AmazonEKS_CNI_Policy and \
                                AmazonEC2ContainerRegistryPullOnly), or correct spec.role";
                    Finding::failed(check, format!("there is no role {role}"), help.to_owned())
                }
                Err(error) => {
                    let detail = format!("unknown whether there is a role {role}: {}", brief(error));
                    Finding::warning(check, detail, "allow iam:GetRole, which only this check needs".to_owned())
                }
            }
        }
    }
}

fn of_placement(response: &Result<Option<PlacementGroup>, ApiError>) -> Finding {
    let check = "placement group";
    match response {
        Ok(Some(group)) => Finding::ok(check, format!("{} ({})", group.id, group.strategy)),
        Ok(None) => {
            let detail = "placementGroupSelector selects no group".to_owned();
            Finding::failed(check, detail, "create it, or correct the selector".to_owned())
        }
        Err(error) => Finding::failed(check, brief(error), remediation(error)),
    }
}

/// The first problem of the class that does not depend on AWS resources. `is_cluster_known` says whether the cluster facts were
/// discovered; `kubelet` is the result of the validation of its kubelet configuration.
pub fn settings(
    class: &Ec2NodeClass,
    service_cidr: Option<&str>,
    is_cluster_known: bool,
    kubelet: &Result<Option<Unusable>, InvalidKubelet>,
) -> Vec<Finding> {
    let check = "settings";
    // An unknown cluster has its own finding: assume a service CIDR here.
    let cidr = service_cidr.or((!is_cluster_known).then_some("0.0.0.0/0"));
    let invalid = |reason: &str, message: &str| {
        Finding::failed(check, format!("{reason}: {message}"), "follow the message".to_owned())
    };
    // Each has its own finding.
    let ready = BEFORE_VALIDATION.map(|kind| (kind, Verdict::True));
    match validate(class, &ready, cidr, kubelet.as_ref().err()) {
        Some(Verdict::False(event, message)) => vec![invalid(event.reason(), &message)],
        Some(Verdict::Unknown(reason, message)) => vec![invalid(reason, &message)],
        None if let Ok(Some(unusable)) = kubelet => {
            let detail = format!("{unusable}; what it would reserve counts as not set");
            vec![Finding::warning(check, detail, "correct the expression".to_owned())]
        }
        _ => vec![Finding::ok(check, "kubelet settings and tags are valid".to_owned())],
    }
}

/// The class with its resolved status, and the name of its instance profile if that exists.
pub fn resolved(class: &Ec2NodeClass, checks: ClassChecks, now: UnixMillis) -> (Ec2NodeClass, Option<String>) {
    let profile = match &checks.identity {
        NodeIdentity::Profile(Ok(ProfileState::WithRole(_))) => class.spec.instance_profile.clone(),
        NodeIdentity::Role(_, profile) => profile.clone(),
        NodeIdentity::Profile(_) => None,
    };
    let responses = resolve::ClassResponses {
        subnets: checks.subnets,
        security_groups: checks.security_groups,
        images: checks.images.unwrap_or(Ok(vec![])),
        // A launch template requires a name, even before the profile exists.
        profile: Ok(profile.clone().unwrap_or_else(|| format!("{}-preflight", class.name_any()))),
        placement: checks.placement,
        reservations: None,
    };
    let (status, _) = resolved_status(&class.status.clone().unwrap_or_default(), responses, now);
    (Ec2NodeClass { status: Some(status), ..class.clone() }, profile)
}

fn counted(count: usize, of: &str) -> String {
    format!("{count} {of}{}", if count == 1 { "" } else { "s" })
}
