//! Checks of launch permissions by dry runs of CreateLaunchTemplate, CreateFleet and RunInstances, as a launch would call them.
//!
//! The controller creates a launch template before its own dry runs. Preflight creates nothing: CreateFleet names an existing
//! template of the cluster, and RunInstances contains the template's members.

use aws_sdk_ec2::types::{IamInstanceProfileSpecification, InstanceNetworkInterfaceSpecification};
use stowage_api::Ec2NodeClass;
use stowage_model::requirement::Requirements;

use crate::Verdict;
use crate::ec2::Ec2Provider;
use crate::ec2::aws::errors::{ApiError, Class};
use crate::ec2::launch::class_dry_run::{DryRunInputs, DryRunOutcome};
use crate::ec2::launch::dry_run_instance::{dry_run_instance, is_permitted, no_retries};
use crate::ec2::launch::templates::spec::Template;
use crate::ec2::launch::templates::template_store;
use crate::ec2::preflight::finding::{Finding, brief, remediation};
use crate::ec2::tags::CLUSTER_TAG;

const TEMPLATE: &str = "ec2:CreateLaunchTemplate";
const FLEET: &str = "ec2:CreateFleet";
const RUN: &str = "ec2:RunInstances";
/// The name of a launch template that does not exist.
const NO_TEMPLATE: &str = "karpenter.k8s.aws/preflight";

/// Runs the dry runs for a class with a resolved status, whose NodePools require `demands`. `profile` is its instance profile, if it
/// exists.
pub async fn rights(
    ec2: &Ec2Provider,
    class: &Ec2NodeClass,
    demands: &[Requirements],
    profile: Option<String>,
) -> Vec<Finding> {
    let check = "launch rights";
    let status = class.status.clone().unwrap_or_default();
    if status.subnets.is_empty() || status.amis.is_empty() || status.security_groups.is_empty() {
        let detail = "not checked, since subnets, security groups or images are missing".to_owned();
        return vec![Finding::warning(check, detail, "see the rows above".to_owned())];
    }
    let attempt = match ec2.dry_run.inputs(class, demands).map_err(DryRunOutcome::verdict) {
        Ok(attempt) => attempt,
        Err(Verdict::False(_, why) | Verdict::Unknown(_, why) | Verdict::Unjudged(why)) => {
            return vec![Finding::failed(check, why, "follow the message".to_owned())];
        }
        Err(_) => return vec![],
    };
    let existing = template_store::list(&ec2.clients, &[(CLUSTER_TAG, &ec2.options.cluster_name)]).await;
    let existing = existing.ok().and_then(|found| found.into_iter().next()).map(|(name, _)| name);
    let fleet = attempt.fleet(class, existing.as_deref().unwrap_or(NO_TEMPLATE));
    let (template, fleet, run) = futures::join!(
        create_template(ec2, &attempt.template),
        ec2.dry_run.create_fleet(&fleet),
        run(ec2, &attempt, profile.as_deref())
    );
    let instance_type = &attempt.instance_type;
    vec![
        of_template(template),
        of_fleet(fleet, instance_type, existing.is_some()),
        of_run(&run, instance_type, profile.as_deref()),
    ]
}

async fn create_template(ec2: &Ec2Provider, template: &Template) -> Result<(), ApiError> {
    let call = ec2
        .clients
        .ec2
        .create_launch_template()
        .dry_run(true)
        .launch_template_name(NO_TEMPLATE)
        .launch_template_data(template.data())
        .tag_specifications(template.tags());
    call.customize().config_override(no_retries()).send().await.map(|_| ()).map_err(ApiError::of(TEMPLATE))
}

/// A dry-run RunInstances request in each subnet until one is permitted.
async fn run(ec2: &Ec2Provider, attempt: &DryRunInputs, profile: Option<&str>) -> Vec<Result<(), ApiError>> {
    let mut responses = Vec::new();
    for subnet in &attempt.subnets {
        let response = run_in(ec2, attempt, subnet, profile).await;
        let permitted = is_permitted(&response);
        responses.push(response);
        if permitted {
            break;
        }
    }
    responses
}

async fn run_in(
    ec2: &Ec2Provider,
    attempt: &DryRunInputs,
    subnet: &str,
    profile: Option<&str>,
) -> Result<(), ApiError> {
    let template = &attempt.template;
    let interface = InstanceNetworkInterfaceSpecification::builder()
        .device_index(0)
        .subnet_id(subnet)
        .set_groups(Some(template.security_groups.clone()))
        .build();
    let profile = profile.map(|name| IamInstanceProfileSpecification::builder().name(name).build());
    let metadata = template.metadata_of_request();
    dry_run_instance(&ec2.clients, &attempt.instance_type, vec![interface], &attempt.tags, metadata, |call| {
        call.image_id(&template.image_id).user_data(&template.user_data).set_iam_instance_profile(profile)
    })
    .await
}

/// The finding about a dry-run CreateLaunchTemplate request.
pub fn of_template(response: Result<(), ApiError>) -> Finding {
    match response {
        Err(error) if error.is_user_data_too_long() => {
            Finding::failed(TEMPLATE, brief(&error), "shorten spec.userData".to_owned())
        }
        Err(error) if error.class != Class::DryRunOk => Finding::failed(TEMPLATE, brief(&error), remediation(&error)),
        _ => Finding::ok(TEMPLATE, "permitted".to_owned()),
    }
}

/// The finding about a dry-run CreateFleet request. `with_template` says whether it named an existing template.
pub fn of_fleet(response: Result<(), ApiError>, instance_type: &str, with_template: bool) -> Finding {
    let error = match response {
        Err(error) if error.class != Class::DryRunOk => error,
        _ => return Finding::ok(FLEET, format!("permitted, for {instance_type}")),
    };
    let about_template = error.is_about_launch_template();
    if !with_template && about_template {
        let detail = "not checked: it requires a launch template, and the cluster has none yet".to_owned();
        let help = "run this again when a node class is Ready in the cluster: the controller has created one by then";
        return Finding::warning(FLEET, detail, help.to_owned());
    }
    Finding::failed(FLEET, brief(&error), remediation(&error))
}

/// The finding about dry-run RunInstances requests, one for each subnet: one permitted request is enough, else the first error is
/// reported.
pub fn of_run(responses: &[Result<(), ApiError>], instance_type: &str, profile: Option<&str>) -> Finding {
    match responses.first() {
        _ if responses.iter().any(is_permitted) => {
            let with = profile.map_or_else(
                || "without an instance profile, which is created later".to_owned(),
                |name| format!("with instance profile {name}"),
            );
            Finding::ok(RUN, format!("permitted, for {instance_type} {with}"))
        }
        Some(Err(error)) => Finding::failed(RUN, brief(error), remediation(error)),
        _ => Finding::warning(RUN, "not checked".to_owned(), "see the rows above".to_owned()),
    }
}
