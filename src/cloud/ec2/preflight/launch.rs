//! Launch rights, tried dry: CreateLaunchTemplate, CreateFleet and RunInstances as a launch for the class would call them.
//!
//! The controller's own dry launch makes a launch template first. Here nothing may be made, so CreateFleet names a template of the
//! cluster that is there already, and RunInstances says itself what a template would say.

use aws_sdk_ec2::types::{IamInstanceProfileSpecification, InstanceNetworkInterfaceSpecification, ResourceType};

use crate::api::Ec2NodeClass;
use crate::cloud::Verdict;
use crate::cloud::ec2::Ec2Provider;
use crate::cloud::ec2::aws::errors::{ApiError, Class};
use crate::cloud::ec2::launch::dry_run::{Outcome, Tried, once};
use crate::cloud::ec2::launch::templates::spec::Template;
use crate::cloud::ec2::launch::templates::store;
use crate::cloud::ec2::preflight::finding::{Finding, brief, fix};
use crate::cloud::ec2::tags::{CLUSTER_TAG, tag_specification};
use crate::model::requirement::Requirements;

const TEMPLATE: &str = "ec2:CreateLaunchTemplate";
const FLEET: &str = "ec2:CreateFleet";
const RUN: &str = "ec2:RunInstances";
/// A template that is not there.
const NO_TEMPLATE: &str = "karpenter.k8s.aws/preflight";

/// Tries to launch for a class, whose status is what it comes to and whose NodePools ask for `demands`. `profile` is its instance profile, if there is one yet.
pub async fn rights(
    ec2: &Ec2Provider,
    class: &Ec2NodeClass,
    demands: &[Requirements],
    profile: Option<String>,
) -> Vec<Finding> {
    let check = "launch rights";
    let status = class.status.clone().unwrap_or_default();
    if status.subnets.is_empty() || status.amis.is_empty() || status.security_groups.is_empty() {
        let detail = "not tried, since subnets, security groups or images are missing".to_owned();
        return vec![Finding::warning(check, detail, "see the rows above".to_owned())];
    }
    let tried = match ec2.to_try(class, demands).map_err(Outcome::verdict) {
        Ok(tried) => tried,
        Err(Verdict::False(_, why) | Verdict::Unknown(_, why) | Verdict::Unjudged(why)) => {
            return vec![Finding::failed(check, why, "do as it says".to_owned())];
        }
        Err(_) => return vec![],
    };
    let existing = store::list(&ec2.clients, &[(CLUSTER_TAG, &ec2.options.cluster_name)]).await;
    let existing = existing.ok().and_then(|found| found.into_iter().next()).map(|(name, _)| name);
    let fleet = tried.fleet(class, existing.as_deref().unwrap_or(NO_TEMPLATE));
    let (made, fleet, run) =
        futures::join!(make(ec2, &tried.template), ec2.dry_fleet(&fleet), run(ec2, &tried, profile.as_deref()));
    let instance_type = &tried.instance_type;
    vec![
        of_template(made),
        of_fleet(fleet, instance_type, existing.is_some()),
        of_run(&run, instance_type, profile.as_deref()),
    ]
}

async fn make(ec2: &Ec2Provider, template: &Template) -> Result<(), ApiError> {
    let call = ec2
        .clients
        .ec2
        .create_launch_template()
        .dry_run(true)
        .launch_template_name(NO_TEMPLATE)
        .launch_template_data(template.data())
        .tag_specifications(template.tags());
    call.customize().config_override(once()).send().await.map(|_| ()).map_err(ApiError::of(TEMPLATE))
}

/// One try for each subnet until one passes.
async fn run(ec2: &Ec2Provider, tried: &Tried, profile: Option<&str>) -> Vec<Result<(), ApiError>> {
    let mut answers = Vec::new();
    for subnet in &tried.subnets {
        let answer = run_in(ec2, tried, subnet, profile).await;
        let passed = passes(&answer);
        answers.push(answer);
        if passed {
            break;
        }
    }
    answers
}

async fn run_in(ec2: &Ec2Provider, tried: &Tried, subnet: &str, profile: Option<&str>) -> Result<(), ApiError> {
    let interface = InstanceNetworkInterfaceSpecification::builder()
        .device_index(0)
        .subnet_id(subnet)
        .set_groups(Some(tried.template.security_groups.clone()))
        .build();
    let profile = profile.map(|name| IamInstanceProfileSpecification::builder().name(name).build());
    let kinds = [ResourceType::Instance, ResourceType::Volume, ResourceType::NetworkInterface];
    let call = ec2
        .clients
        .ec2
        .run_instances()
        .dry_run(true)
        .min_count(1)
        .max_count(1)
        .image_id(&tried.template.image_id)
        .instance_type(tried.instance_type.as_str().into())
        .user_data(&tried.template.user_data)
        .network_interfaces(interface)
        .set_iam_instance_profile(profile)
        .set_tag_specifications(Some(kinds.into_iter().map(|kind| tag_specification(kind, &tried.tags)).collect()));
    call.customize().config_override(once()).send().await.map(|_| ()).map_err(ApiError::of(RUN))
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
        _ => Finding::warning(RUN, "not tried".to_owned(), "see the rows above".to_owned()),
    }
}
