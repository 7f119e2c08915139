//! The account, the region and the cluster: who we are, what may be read, what the region offers and for how much.

use std::collections::BTreeMap;

use aws_sdk_ec2::types::TargetCapacityUnitType;

use crate::cloud::ec2::aws::client::Clients;
use crate::cloud::ec2::aws::errors::{ApiError, Class};
use crate::cloud::ec2::launch::dry_run::once;
use crate::cloud::ec2::node_class::cluster_facts::{ClusterError, ClusterFacts};
use crate::cloud::ec2::offerings::region::{Answers, Part};
use crate::cloud::ec2::preflight::finding::{Finding, brief, fix};

/// Types that placement scores are asked for, dry: EC2 wants three.
const SCORED: [&str; 3] = ["m5.large", "m5.xlarge", "m5.2xlarge"];
/// vCPUs that they are asked for.
const SCORED_VCPUS: i32 = 64;

/// Who we are: the ARN.
///
/// # Errors
/// STS's.
pub async fn ask(clients: &Clients) -> Result<String, ApiError> {
    let answer = clients.sts.get_caller_identity().send().await.map_err(ApiError::of("sts:GetCallerIdentity"))?;
    Ok(answer.arn().unwrap_or("an identity without a name").to_owned())
}

/// What the answer of STS means, where EC2 answers or not. `variable` is the environment.
pub fn identity(
    region: &str,
    answer: &Result<String, ApiError>,
    ec2_answers: bool,
    variable: impl Fn(&str) -> Option<String>,
) -> Finding {
    let check = "credentials";
    match answer {
        Ok(arn) => Finding::ok(check, format!("{arn} in {region}")),
        Err(error) if ec2_answers => {
            let detail = format!("EC2 in {region} answers, but who we are is not known: {}", brief(error));
            Finding::warning(check, detail, "nothing, unless rights are missing below".to_owned())
        }
        Err(error) => Finding::failed(check, brief(error), without_credentials(variable)),
    }
}

/// What to do where there are no credentials: EKS tells a pod by its environment where to get them.
fn without_credentials(variable: impl Fn(&str) -> Option<String>) -> String {
    let irsa = variable("AWS_WEB_IDENTITY_TOKEN_FILE").zip(variable("AWS_ROLE_ARN"));
    // In the order in which the SDK looks.
    match (variable("AWS_ACCESS_KEY_ID"), irsa, variable("AWS_CONTAINER_CREDENTIALS_FULL_URI")) {
        (None, Some((file, role)), _) => format!(
            "IRSA: the token must be in {file}, the trust policy of {role} must admit the ServiceAccount (docs/aws has one), and STS must \
             be in reach"
        ),
        (None, None, Some(agent)) => {
            let file = variable("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE").unwrap_or_default();
            format!(
                "Pod Identity: the token must be in {file}, the add-on eks-pod-identity-agent must answer at {agent}, and the ServiceAccount \
                 must have an association with a role that trusts pods.eks.amazonaws.com (docs/aws has one)"
            )
        }
        _ => "set AWS_REGION and credentials: IRSA, Pod Identity, a profile, or a role by --role that may be assumed"
            .to_owned(),
    }
}

/// What the region's APIs answered: one finding for each part.
pub fn region(answers: &Answers) -> Vec<Finding> {
    Part::ALL.into_iter().map(|part| of_part(part, counted(part, answers))).collect()
}

/// How many there are of a part, in words; `None` where it was not asked.
fn counted(part: Part, answers: &Answers) -> Option<Result<(usize, String), ApiError>> {
    let inner = |map: &BTreeMap<String, BTreeMap<String, _>>| map.values().map(BTreeMap::len).sum::<usize>();
    match part {
        Part::Types => answers.types.as_ref().map(|answer| {
            answer.as_ref().map(|types| (types.len(), format!("{} instance types", types.len()))).map_err(Clone::clone)
        }),
        Part::Zones => answers.zones.as_ref().map(|answer| {
            let text = |types: usize, zones: usize| format!("{types} instance types in {zones} zones");
            answer
                .as_ref()
                .map(|zones| {
                    let names: std::collections::BTreeSet<_> = zones.values().flatten().collect();
                    (zones.len(), text(zones.len(), names.len()))
                })
                .map_err(Clone::clone)
        }),
        Part::OnDemandPrices => answers.on_demand.as_ref().map(|answer| {
            answer.as_ref().map(|prices| (prices.len(), format!("{} prices", prices.len()))).map_err(Clone::clone)
        }),
        Part::SpotPrices => answers.spot.as_ref().map(|answer| {
            let count = |prices| (inner(prices), format!("{} prices", inner(prices)));
            answer.as_ref().map(|history| count(&history.prices)).map_err(Clone::clone)
        }),
    }
}

fn of_part(part: Part, counted: Option<Result<(usize, String), ApiError>>) -> Finding {
    let check = part.to_string();
    // Without them nothing starts, or what is bought is a guess.
    let needed = matches!(part, Part::Types | Part::Zones);
    let lost = match part {
        Part::Types => "the controller does not start without them",
        Part::Zones => "types are tried in zones that may not have them",
        Part::OnDemandPrices => "the price list of us-east-1 in the binary stands in: plans may not be the cheapest",
        Part::SpotPrices => "on-demand prices stand in for spot prices: plans may not be the cheapest",
    };
    match counted {
        Some(Ok((count, text))) if count > 0 => Finding::ok(&check, text),
        Some(Ok(_)) if needed => Finding::failed(&check, "none".to_owned(), "check the name of the region".to_owned()),
        Some(Ok(_)) => Finding::warning(&check, format!("none; {lost}"), "check the name of the region".to_owned()),
        Some(Err(error)) if needed => Finding::failed(&check, format!("{}; {lost}", brief(&error)), fix(&error)),
        Some(Err(error)) => Finding::warning(&check, format!("{}; {lost}", brief(&error)), fix(&error)),
        None => {
            let detail = format!("not asked for: the price list can't be reached from here; {lost}");
            Finding::warning(&check, detail, "nothing, where ISOLATED_VPC is meant".to_owned())
        }
    }
}

/// Asks for spot placement scores, dry: EC2 allows few real requests a day.
///
/// # Errors
/// EC2's; [`Class::DryRunOk`] says that they would be told.
pub async fn ask_scores(clients: &Clients) -> Result<(), ApiError> {
    let call = clients
        .ec2
        .get_spot_placement_scores()
        .dry_run(true)
        .set_instance_types(Some(SCORED.map(str::to_owned).into()))
        .target_capacity(SCORED_VCPUS)
        .target_capacity_unit_type(TargetCapacityUnitType::Vcpu)
        .single_availability_zone(true)
        .region_names(&clients.region);
    let answer = call.customize().config_override(once()).send().await;
    answer.map(|_| ()).map_err(ApiError::of("ec2:GetSpotPlacementScores"))
}

/// What their answer means.
pub fn scores(answer: &Result<(), ApiError>) -> Finding {
    let check = "spot placement scores";
    match answer {
        Err(error) if error.class != Class::DryRunOk => {
            let detail = format!("{}; spot is chosen by price and by past interruptions alone", brief(error));
            Finding::warning(check, detail, fix(error))
        }
        _ => Finding::ok(check, "may be read".to_owned()),
    }
}

/// Whether the rest of EC2 may be read.
pub async fn reads(clients: &Clients) -> Vec<Finding> {
    let ec2 = &clients.ec2;
    let (instances, statuses, templates) = futures::join!(
        async {
            ec2.describe_instances()
                .dry_run(true)
                .send()
                .await
                .map(|_| ())
                .map_err(ApiError::of("ec2:DescribeInstances"))
        },
        async {
            let answer = ec2.describe_instance_status().dry_run(true).send().await;
            answer.map(|_| ()).map_err(ApiError::of("ec2:DescribeInstanceStatus"))
        },
        async {
            let answer = ec2.describe_launch_templates().dry_run(true).send().await;
            answer.map(|_| ()).map_err(ApiError::of("ec2:DescribeLaunchTemplates"))
        },
    );
    vec![
        read("instances", instances, None),
        read("launch templates", templates, None),
        read("instance status", statuses, Some("instances that fail EC2's checks are not replaced")),
    ]
}

/// What the answer to a dry read means. `lost` says what works no more without it; without one nothing works.
fn read(check: &str, answer: Result<(), ApiError>, lost: Option<&str>) -> Finding {
    match (answer, lost) {
        (Err(error), None) if error.class != Class::DryRunOk => Finding::failed(check, brief(&error), fix(&error)),
        (Err(error), Some(lost)) if error.class != Class::DryRunOk => {
            Finding::warning(check, format!("{}; {lost}", brief(&error)), fix(&error))
        }
        _ => Finding::ok(check, "may be read".to_owned()),
    }
}

/// What is known of the cluster.
pub fn cluster(found: &Result<ClusterFacts, ClusterError>) -> Finding {
    let check = "cluster";
    match found {
        Ok(facts) => {
            let part = |name: &str, value: Option<&str>| format!("{name} {}", value.unwrap_or("not known"));
            let parts = [
                facts.name.clone(),
                format!("Kubernetes {}", facts.version),
                facts.endpoint.clone(),
                part("services", facts.service_cidr.as_deref()),
            ];
            let detail = parts.join(", ");
            if facts.ca_bundle.is_empty() {
                let lost = format!("{detail}; its CA is not known, and nodes can't join without it");
                return Finding::failed(check, lost, "set CLUSTER_CA_BUNDLE".to_owned());
            }
            Finding::ok(check, detail)
        }
        Err(error) => {
            let (text, help) = match error {
                ClusterError::Endpoint { cluster, source } => (
                    format!("EKS does not describe {cluster}: {}", brief(source)),
                    "check the name, allow eks:DescribeCluster, or set CLUSTER_ENDPOINT",
                ),
                ClusterError::EksVersion(source) => (
                    format!("the version is not known: {}", brief(source)),
                    "allow eks:DescribeCluster, or use a kubeconfig",
                ),
                other => (other.to_string(), "check the cluster and the kubeconfig"),
            };
            Finding::failed(check, text, help.to_owned())
        }
    }
}
