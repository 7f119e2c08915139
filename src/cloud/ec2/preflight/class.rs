//! What a node class selects: subnets, security groups, images, the role or the instance profile, a placement group.

use std::collections::BTreeMap;

use kube::ResourceExt;

use crate::api::Ec2NodeClass;
use crate::api::node_class::{AmiRequirement, AmiStatus};
use crate::cloud::Verdict;
use crate::cloud::ec2::aws::client::Clients;
use crate::cloud::ec2::aws::errors::{ApiError, Class};
use crate::cloud::ec2::bootstrap::kubelet_validation::InvalidKubelet;
use crate::cloud::ec2::node_class::images;
use crate::cloud::ec2::node_class::images::{Image, ImageError, Parameters};
use crate::cloud::ec2::node_class::instance_profiles;
use crate::cloud::ec2::node_class::instance_profiles::role_name;
use crate::cloud::ec2::node_class::resolve;
use crate::cloud::ec2::node_class::resolve::{judge as judge_status, validate};
use crate::cloud::ec2::node_class::subnets;
use crate::cloud::ec2::node_class::subnets::Subnet;
use crate::cloud::ec2::node_class::{placement_group, security_groups};
use crate::cloud::ec2::placement_group::PlacementGroup;
use crate::cloud::ec2::preflight::finding::{Finding, brief, fix};
use crate::cloud::kubelet_config::expressions::Unusable;
use crate::model::labels;

/// Addresses of a zone below which it is told that they are few.
const FEW_ADDRESSES: i64 = 32;
/// Conditions that validation asks for; each has a finding of its own here.
const JUDGED: [&str; 4] = ["AMIsReady", "InstanceProfileReady", "SecurityGroupsReady", "SubnetsReady"];

/// What a node gets its rights by.
#[derive(Clone, Debug)]
pub enum Identity {
    /// `spec.instanceProfile`.
    Profile(Result<Profile, ApiError>),
    /// `spec.role`: whether there is one of the name; and the profile that the controller made for it, if it did.
    Role(Result<bool, ApiError>, Option<String>),
}

/// What is known of an instance profile.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Profile {
    /// There is none of the name.
    Missing,
    /// It has no role.
    Empty,
    /// It has this role.
    Of(String),
}

/// What was answered about a class.
#[derive(Debug)]
pub struct Answers {
    /// Subnets.
    pub subnets: Result<Vec<Subnet>, ApiError>,
    /// Ids and names of security groups.
    pub security_groups: Result<Vec<(String, Option<String>)>, ApiError>,
    /// Images and what each boots on; `None` where the cluster's version, which decides, is not known.
    pub images: Option<Result<Vec<(Image, Vec<AmiRequirement>)>, ImageError>>,
    /// The profile or the role.
    pub identity: Identity,
    /// The placement group; `None` where the class asks for none.
    pub placement: Option<Result<Option<PlacementGroup>, ApiError>>,
}

/// Asks for what a class selects, in a cluster of `version`.
pub async fn ask(
    clients: &Clients,
    parameters: &Parameters,
    class: &Ec2NodeClass,
    version: Option<&str>,
    now_ms: i64,
) -> Answers {
    let spec = &class.spec;
    let by_version = spec.ami_selector_terms.iter().any(|term| term.alias.is_some());
    let find_images = async {
        match version {
            None if by_version => None,
            _ => {
                let version = version.unwrap_or_default();
                Some(images::find(clients, parameters, &spec.ami_selector_terms, version, now_ms).await)
            }
        }
    };
    let find_group = async {
        match &spec.placement_group_selector {
            None => None,
            Some(selector) => Some(placement_group::find(clients, selector).await),
        }
    };
    let (subnets, security_groups, images, identity, placement) = futures::join!(
        subnets::find(clients, &spec.subnet_selector_terms),
        security_groups::find(clients, &spec.security_group_selector_terms),
        find_images,
        ask_identity(clients, class),
        find_group,
    );
    Answers { subnets, security_groups, images, identity, placement }
}

async fn ask_identity(clients: &Clients, class: &Ec2NodeClass) -> Identity {
    if let Some(name) = &class.spec.instance_profile {
        let found = instance_profiles::get(clients, name).await;
        return Identity::Profile(found.map(|found| match found {
            None => Profile::Missing,
            Some(None) => Profile::Empty,
            Some(Some(role)) => Profile::Of(role),
        }));
    }
    let role = role_name(class.spec.role.as_deref().unwrap_or_default());
    let made = class.status.as_ref().and_then(|status| status.instance_profile.clone());
    let known = match clients.iam.get_role().role_name(role).send().await.map_err(ApiError::of("iam:GetRole")) {
        Ok(_) => Ok(true),
        Err(error) if error.class == Class::NotFound => Ok(false),
        Err(error) => Err(error),
    };
    Identity::Role(known, made)
}

/// What the answers mean.
pub fn judge(class: &Ec2NodeClass, answers: &Answers, now_ms: i64) -> Vec<Finding> {
    let mut findings = vec![
        of_subnets(&answers.subnets),
        of_groups(&answers.security_groups),
        of_images(answers.images.as_ref(), now_ms),
        of_identity(class, &answers.identity),
    ];
    findings.extend(answers.placement.as_ref().map(of_placement));
    findings
}

fn of_subnets(answer: &Result<Vec<Subnet>, ApiError>) -> Finding {
    let check = "subnets";
    let found = match answer {
        Ok(found) => found,
        Err(error) => return Finding::failed(check, brief(error), fix(error)),
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
    let short: Vec<&str> = zones.iter().filter(|(_, of)| free(of) < FEW_ADDRESSES).map(|(zone, _)| *zone).collect();
    if short.is_empty() {
        return Finding::ok(check, detail);
    }
    Finding::warning(check, detail, format!("add subnets in {}: addresses are few there", short.join(", ")))
}

fn of_groups(answer: &Result<Vec<(String, Option<String>)>, ApiError>) -> Finding {
    let check = "security groups";
    match answer {
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
        Err(error) => Finding::failed(check, brief(error), fix(error)),
    }
}

fn of_images(answer: Option<&Result<Vec<(Image, Vec<AmiRequirement>)>, ImageError>>, now_ms: i64) -> Finding {
    let check = "images";
    let found = match answer {
        None => {
            let detail = "not looked for: an alias needs the version of the cluster".to_owned();
            return Finding::warning(check, detail, "see the row about the cluster".to_owned());
        }
        Some(Ok(found)) => found,
        Some(Err(ImageError::Api(error))) if error.class == Class::NotFound => {
            let help = "correct the version in amiSelectorTerms";
            return Finding::failed(check, format!("no image has this alias: {}", brief(error)), help.to_owned());
        }
        Some(Err(ImageError::Api(error))) => return Finding::failed(check, brief(error), fix(error)),
        Some(Err(ImageError::Alias(error))) => {
            return Finding::failed(check, error.to_string(), "choose another alias in amiSelectorTerms".to_owned());
        }
    };
    let kept = images::status(found.clone(), now_ms);
    if kept.is_empty() {
        let detail = "amiSelectorTerms select no images".to_owned();
        return Finding::failed(check, detail, "correct the terms: id, name, owner and tags must all fit".to_owned());
    }
    let detail = by_architecture(&kept);
    if kept.iter().any(|image| image.deprecated == Some(true)) {
        let help = "choose newer images: deprecated ones are only used where there is no other";
        return Finding::warning(check, detail, help.to_owned());
    }
    Finding::ok(check, detail)
}

/// As `amd64: ami-1 (a), ami-2 (b); arm64: none`.
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

fn of_identity(class: &Ec2NodeClass, identity: &Identity) -> Finding {
    match identity {
        Identity::Profile(answer) => {
            let (check, name) = ("instance profile", class.spec.instance_profile.as_deref().unwrap_or_default());
            match answer {
                Ok(Profile::Of(role)) => Finding::ok(check, format!("{name} with role {role}")),
                Ok(Profile::Empty) => {
                    let help = "add the nodes' role to the profile";
                    Finding::failed(check, format!("{name} has no role"), help.to_owned())
                }
                Ok(Profile::Missing) => {
                    let help = "make it, or correct spec.instanceProfile";
                    Finding::failed(check, format!("there is no instance profile {name}"), help.to_owned())
                }
                Err(error) => Finding::failed(check, brief(error), fix(error)),
            }
        }
        Identity::Role(known, made) => {
            let (check, role) = ("role", role_name(class.spec.role.as_deref().unwrap_or_default()));
            let profile = match made {
                Some(name) => format!("instance profile {name}"),
                None => "the controller makes an instance profile for it".to_owned(),
            };
            match known {
                Ok(true) => Finding::ok(check, format!("{role}; {profile}")),
                Ok(false) => {
                    let help = "make the role for ec2.amazonaws.com (on EKS with AmazonEKSWorkerNodePolicy, AmazonEKS_CNI_Policy and \
                                AmazonEC2ContainerRegistryPullOnly), or correct spec.role";
                    Finding::failed(check, format!("there is no role {role}"), help.to_owned())
                }
                Err(error) => {
                    let detail = format!("not known whether there is a role {role}: {}", brief(error));
                    Finding::warning(check, detail, "allow iam:GetRole, which only this check needs".to_owned())
                }
            }
        }
    }
}

fn of_placement(answer: &Result<Option<PlacementGroup>, ApiError>) -> Finding {
    let check = "placement group";
    match answer {
        Ok(Some(group)) => Finding::ok(check, format!("{} ({})", group.id, group.strategy)),
        Ok(None) => {
            let detail = "placementGroupSelector selects no group".to_owned();
            Finding::failed(check, detail, "make it, or correct the selector".to_owned())
        }
        Err(error) => Finding::failed(check, brief(error), fix(error)),
    }
}

/// What is wrong with the class by itself: the first thing, or nothing. `known` says whether the cluster is.
/// `kubelet` is what was found about its kubelet configuration.
pub fn settings(
    class: &Ec2NodeClass,
    service_cidr: Option<&str>,
    known: bool,
    kubelet: &Result<Option<Unusable>, InvalidKubelet>,
) -> Vec<Finding> {
    let check = "settings";
    // The cluster has its own finding: here it counts as having what it must.
    let cidr = service_cidr.or((!known).then_some("0.0.0.0/0"));
    let fine = JUDGED.map(|kind| (kind, Verdict::True));
    match validate(class, &fine, cidr, kubelet.as_ref().err()) {
        Some(Verdict::False(reason, message) | Verdict::Unknown(reason, message)) => {
            vec![Finding::failed(check, format!("{reason}: {message}"), "do as it says".to_owned())]
        }
        None if let Ok(Some(unusable)) = kubelet => {
            let detail = format!("{unusable}; what it would reserve counts as not set");
            vec![Finding::warning(check, detail, "correct the expression".to_owned())]
        }
        _ => vec![Finding::ok(check, "kubelet settings and tags can be used".to_owned())],
    }
}

/// The class with the status that the answers come to, and the name of its instance profile if that is there.
pub fn resolved(class: &Ec2NodeClass, answers: Answers, now_ms: i64) -> (Ec2NodeClass, Option<String>) {
    let profile = match &answers.identity {
        Identity::Profile(Ok(Profile::Of(_))) => class.spec.instance_profile.clone(),
        Identity::Role(_, made) => made.clone(),
        Identity::Profile(_) => None,
    };
    let answers = resolve::Answers {
        subnets: answers.subnets,
        security_groups: answers.security_groups,
        images: answers.images.unwrap_or(Ok(vec![])),
        // A template wants a name, whether there is a profile of it yet or not.
        profile: Ok(profile.clone().unwrap_or_else(|| format!("{}-preflight", class.name_any()))),
        placement: answers.placement,
        reservations: None,
    };
    let (status, _) = judge_status(&class.status.clone().unwrap_or_default(), answers, now_ms);
    (Ec2NodeClass { status: Some(status), ..class.clone() }, profile)
}

fn counted(count: usize, of: &str) -> String {
    format!("{count} {of}{}", if count == 1 { "" } else { "s" })
}
