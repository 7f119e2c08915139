//! Launch rights, tried dry: CreateLaunchTemplate, CreateFleet and RunInstances as a launch for the class would call them.
//!
//! The controller's own dry launch makes a launch template first. Here nothing may be made, so CreateFleet names a template of the
//! cluster that is there already, and RunInstances says itself what a template would say.

use std::collections::BTreeMap;

use aws_sdk_ec2::types::{IamInstanceProfileSpecification, InstanceNetworkInterfaceSpecification, ResourceType};

use super::finding::{Finding, brief, fix};
use crate::api::Ec2NodeClass;
use crate::cloud::Cloud;
use crate::cloud::ec2::Ec2;
use crate::cloud::ec2::choose::Choice;
use crate::cloud::ec2::errors::{ApiError, Class};
use crate::cloud::ec2::fleet::{FleetRequest, Slot};
use crate::cloud::ec2::launch_template::{CLUSTER_TAG, Template, tag_specification};
use crate::cloud::ec2::prepare::Ground;
use crate::cloud::ec2::templates;
use crate::cloud::ec2::validate::{once, tried, unmade};
use crate::scheduling::offering::{CapacityType, MicroUsd};

const TEMPLATE: &str = "ec2:CreateLaunchTemplate";
const FLEET: &str = "ec2:CreateFleet";
const RUN: &str = "ec2:RunInstances";
/// A template that is not there.
const NO_TEMPLATE: &str = "karpenter.k8s.aws/preflight";

/// What is launched, dry.
struct Launch<'a> {
    ec2: &'a Ec2,
    class: &'a Ec2NodeClass,
    template: Template,
    instance_type: String,
    /// Subnets of the class that offer the type, with their zones.
    subnets: Vec<(String, String)>,
    tags: BTreeMap<String, String>,
}

/// Tries to launch for a class, whose status is what it comes to. `profile` is its instance profile, if there is one yet.
pub async fn rights(ec2: &Ec2, class: &Ec2NodeClass, profile: Option<String>) -> Vec<Finding> {
    let launch = match launch(ec2, class) {
        Ok(launch) => launch,
        Err(finding) => return vec![finding],
    };
    let existing = templates::list(&ec2.clients, &[(CLUSTER_TAG, &ec2.options.cluster_name)]).await;
    let existing = existing.ok().and_then(|found| found.into_iter().next()).map(|(name, _)| name);
    let (made, fleet, run) =
        futures::join!(launch.template(), launch.fleet(existing.as_deref()), launch.run(profile.as_deref()),);
    let instance_type = &launch.instance_type;
    vec![
        of_template(made),
        of_fleet(fleet, instance_type, existing.is_some()),
        of_run(&run, instance_type, profile.as_deref()),
    ]
}

/// What would be launched.
///
/// # Errors
/// The finding that says why there is nothing to try.
fn launch<'a>(ec2: &'a Ec2, class: &'a Ec2NodeClass) -> Result<Launch<'a>, Finding> {
    let check = "launch rights";
    let status = class.status.clone().unwrap_or_default();
    if status.subnets.is_empty() || status.amis.is_empty() || status.security_groups.is_empty() {
        let detail = "not tried, since subnets, security groups or images are missing".to_owned();
        return Err(Finding::warning(check, detail, "see the rows above".to_owned()));
    }
    let catalogue = ec2.catalogue(class);
    let Some(candidate) = tried(&catalogue) else {
        let detail = "no instance type is offered in the zones of the subnets and boots the images".to_owned();
        return Err(Finding::failed(check, detail, "choose other zones or images".to_owned()));
    };
    let offered = |zone: &String| candidate.zones.contains_key(zone);
    let zones: Vec<(String, String)> = status
        .subnets
        .into_iter()
        .filter(|subnet| offered(&subnet.zone))
        .map(|subnet| (subnet.id, subnet.zone))
        .collect();
    let instance_type = candidate.instance_type.name.to_string();
    let choice = Choice { capacity_type: CapacityType::OnDemand, candidates: vec![candidate] };
    let (details, request) = unmade(class, &catalogue);
    let facts = ec2.facts.load_full();
    let ground = Ground {
        request: &request,
        details: &details,
        cluster: &facts,
        region: &ec2.clients.region,
        placement_group: None,
    };
    let made = ground.tags().and_then(|tags| ground.groups(&choice, &tags).map(|groups| (tags, groups)));
    match made.map(|(tags, groups)| (tags, groups.into_iter().next())) {
        Ok((tags, Some(group))) => {
            Ok(Launch { ec2, class, template: group.template, instance_type, subnets: zones, tags })
        }
        Ok((_, None)) => Err(Finding::failed(check, "nothing to try".to_owned(), String::new())),
        Err(error) => Err(Finding::failed(check, error.to_string(), "correct the class as it says".to_owned())),
    }
}

impl Launch<'_> {
    async fn template(&self) -> Result<(), ApiError> {
        let call = self
            .ec2
            .clients
            .ec2
            .create_launch_template()
            .dry_run(true)
            .launch_template_name(NO_TEMPLATE)
            .launch_template_data(self.template.data())
            .tag_specifications(self.template.tags());
        call.customize().config_override(once()).send().await.map(|_| ()).map_err(ApiError::of(TEMPLATE))
    }

    async fn fleet(&self, template: Option<&str>) -> Result<(), ApiError> {
        let slot = |(subnet, zone): &(String, String)| Slot {
            instance_type: self.instance_type.clone(),
            zone: zone.clone(),
            subnet: subnet.clone(),
            image: self.template.image_id.clone(),
            price: MicroUsd(0),
        };
        let slots = self.subnets.iter().map(slot).collect();
        let fleet = FleetRequest {
            token: String::new(),
            context: self.class.spec.context.clone(),
            capacity_type: CapacityType::OnDemand,
            prioritized: false,
            templates: vec![(template.unwrap_or(NO_TEMPLATE).to_owned(), slots)],
            tags: self.tags.clone(),
            instance_tags: BTreeMap::new(),
        };
        self.ec2.dry_fleet(&fleet).await
    }

    /// One try for each subnet until one passes.
    async fn run(&self, profile: Option<&str>) -> Vec<Result<(), ApiError>> {
        let mut answers = Vec::new();
        for (subnet, _) in &self.subnets {
            let answer = self.run_in(subnet, profile).await;
            let passed = passes(&answer);
            answers.push(answer);
            if passed {
                break;
            }
        }
        answers
    }

    async fn run_in(&self, subnet: &str, profile: Option<&str>) -> Result<(), ApiError> {
        let interface = InstanceNetworkInterfaceSpecification::builder()
            .device_index(0)
            .subnet_id(subnet)
            .set_groups(Some(self.template.security_groups.clone()))
            .build();
        let profile = profile.map(|name| IamInstanceProfileSpecification::builder().name(name).build());
        let kinds = [ResourceType::Instance, ResourceType::Volume, ResourceType::NetworkInterface];
        let tagged = kinds.into_iter().map(|kind| tag_specification(kind, &self.tags)).collect();
        let call = self
            .ec2
            .clients
            .ec2
            .run_instances()
            .dry_run(true)
            .min_count(1)
            .max_count(1)
            .image_id(&self.template.image_id)
            .instance_type(self.instance_type.as_str().into())
            .user_data(&self.template.user_data)
            .network_interfaces(interface)
            .set_iam_instance_profile(profile)
            .set_tag_specifications(Some(tagged));
        call.customize().config_override(once()).send().await.map(|_| ()).map_err(ApiError::of(RUN))
    }
}

/// Some endpoints know no dry run, and would have done it: they permit it.
fn passes(answer: &Result<(), ApiError>) -> bool {
    answer.as_ref().map_or_else(|error| error.class == Class::DryRunOk, |()| true)
}

/// What the answer to a dry CreateLaunchTemplate means.
pub fn of_template(answer: Result<(), ApiError>) -> Finding {
    match answer {
        Err(error) if error.message.contains("User data is limited to") => {
            Finding::failed(TEMPLATE, brief(&error), "shorten spec.userData".to_owned())
        }
        Err(error) if error.class != Class::DryRunOk => Finding::failed(TEMPLATE, brief(&error), fix(&error)),
        _ => Finding::ok(TEMPLATE, "permitted".to_owned()),
    }
}

/// What the answer to a dry CreateFleet means; `with_template` says whether it named a template that is there.
pub fn of_fleet(answer: Result<(), ApiError>, instance_type: &str, with_template: bool) -> Finding {
    let error = match answer {
        Err(error) if error.class != Class::DryRunOk => error,
        _ => return Finding::ok(FLEET, format!("permitted, for {instance_type}")),
    };
    let about_template = error.class == Class::LaunchTemplateGone || error.message.contains("launch-template/");
    if !with_template && about_template {
        let detail = "not told: it takes a launch template, and the cluster has none yet".to_owned();
        let help = "run this again when a node class is Ready in the cluster: the controller has made one then";
        return Finding::warning(FLEET, detail, help.to_owned());
    }
    Finding::failed(FLEET, brief(&error), fix(&error))
}

/// What the answers to dry RunInstances mean, one for each subnet tried: one that passes is enough, else the first decides.
pub fn of_run(answers: &[Result<(), ApiError>], instance_type: &str, profile: Option<&str>) -> Finding {
    match answers.first() {
        _ if answers.iter().any(passes) => {
            let with = profile.map_or_else(
                || "without an instance profile, which is made later".to_owned(),
                |name| format!("with instance profile {name}"),
            );
            Finding::ok(RUN, format!("permitted, for {instance_type} {with}"))
        }
        Some(Err(error)) => Finding::failed(RUN, brief(error), fix(error)),
        _ => Finding::warning(RUN, "not tried: no subnet offers the type".to_owned(), String::new()),
    }
}
