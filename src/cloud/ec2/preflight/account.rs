//! Checks of the account, the region and the cluster: credentials, read permissions, offerings and prices.

use std::collections::BTreeMap;

use aws_sdk_ec2::types::TargetCapacityUnitType;

use crate::ec2::aws::client::AwsClients;
use crate::ec2::aws::errors::{ApiError, Class};
use crate::ec2::launch::dry_run_instance::no_retries;
use crate::ec2::node_class::cluster_facts::{ClusterError, ClusterFacts};
use crate::ec2::offerings::region_snapshot::{Dataset, RegionResponses};
use crate::ec2::preflight::finding::{Finding, brief, remediation};

/// Instance types of the dry-run request for placement scores: EC2 requires three.
const SCORED_TYPES: [&str; 3] = ["m5.large", "m5.xlarge", "m5.2xlarge"];
/// Target capacity of that request.
const SCORED_VCPUS: i32 = 64;

/// The ARN of the caller.
///
/// # Errors
/// The STS call fails.
pub async fn caller_identity(clients: &AwsClients) -> Result<String, ApiError> {
    let response = clients.sts.get_caller_identity().send().await.map_err(ApiError::of("sts:GetCallerIdentity"))?;
    Ok(response.arn().unwrap_or("an identity without an ARN").to_owned())
}

/// The finding about the credentials. `ec2_responds` says whether EC2 accepts them; `variable` reads the environment.
pub fn identity(
    region: &str,
    arn: &Result<String, ApiError>,
    ec2_responds: bool,
    variable: impl Fn(&str) -> Option<String>,
) -> Finding {
    let check = "credentials";
    match arn {
        Ok(arn) => Finding::ok(check, format!("{arn} in {region}")),
        Err(error) if ec2_responds => {
            let detail = format!("EC2 in {region} responds, but the caller identity is unknown: {}", brief(error));
            Finding::warning(check, detail, "nothing, unless permissions are missing below".to_owned())
        }
        Err(error) => Finding::failed(check, brief(error), credentials_remediation(variable)),
    }
}

/// The remediation for missing credentials, by the environment that EKS sets in a pod.
fn credentials_remediation(variable: impl Fn(&str) -> Option<String>) -> String {
    let irsa = variable("AWS_WEB_IDENTITY_TOKEN_FILE").zip(variable("AWS_ROLE_ARN"));
    // In the order of the SDK's credential chain.
    match (variable("AWS_ACCESS_KEY_ID"), irsa, variable("AWS_CONTAINER_CREDENTIALS_FULL_URI")) {
        (None, Some((file, role)), _) => format!(
            "IRSA: the token must be in {file}, the trust policy of {role} must admit the ServiceAccount (docs/aws has one), and STS must \
             be reachable"
        ),
        (None, None, Some(agent)) => {
            let file = variable("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE").unwrap_or_default();
            format!(
                "Pod Identity: the token must be in {file}, the add-on eks-pod-identity-agent must respond at {agent}, and the ServiceAccount \
                 must have an association with a role that trusts pods.eks.amazonaws.com (docs/aws has one)"
            )
        }
        _ => "set AWS_REGION and credentials: IRSA, Pod Identity, a profile, or a role by --role that may be assumed"
            .to_owned(),
    }
}

/// One finding for each dataset of the region.
pub fn region(responses: &RegionResponses) -> Vec<Finding> {
    Dataset::ALL.into_iter().map(|dataset| of_dataset(dataset, counted(dataset, responses))).collect()
}

/// The number of entries of a dataset, also in words; `None` where its API was not called.
fn counted(dataset: Dataset, responses: &RegionResponses) -> Option<Result<(usize, String), ApiError>> {
    let inner = |map: &BTreeMap<String, BTreeMap<String, _>>| map.values().map(BTreeMap::len).sum::<usize>();
    match dataset {
        Dataset::Types => responses.types.as_ref().map(|response| {
            response
                .as_ref()
                .map(|types| (types.len(), format!("{} instance types", types.len())))
                .map_err(Clone::clone)
        }),
        Dataset::Zones => responses.zones.as_ref().map(|response| {
            let text = |types: usize, zones: usize| format!("{types} instance types in {zones} zones");
            response
                .as_ref()
                .map(|zones| {
                    let names: std::collections::BTreeSet<_> = zones.values().flatten().collect();
                    (zones.len(), text(zones.len(), names.len()))
                })
                .map_err(Clone::clone)
        }),
        Dataset::OnDemandPrices => responses.on_demand.as_ref().map(|response| {
            response.as_ref().map(|prices| (prices.len(), format!("{} prices", prices.len()))).map_err(Clone::clone)
        }),
        Dataset::SpotPrices => responses.spot.as_ref().map(|response| {
            let count = |prices| (inner(prices), format!("{} prices", inner(prices)));
            response.as_ref().map(|history| count(&history.prices)).map_err(Clone::clone)
        }),
    }
}

fn of_dataset(dataset: Dataset, counted: Option<Result<(usize, String), ApiError>>) -> Finding {
    let check = dataset.to_string();
    // Without these no launch is possible, or its zone is a guess.
    let required = matches!(dataset, Dataset::Types | Dataset::Zones);
    let consequence = match dataset {
        Dataset::Types => "the controller does not start without them",
        Dataset::Zones => "launches may be tried in zones that do not offer the type",
        Dataset::OnDemandPrices => {
            "using the price list of us-east-1 embedded in the binary: plans may not be the cheapest"
        }
        Dataset::SpotPrices => "using on-demand prices as spot prices: plans may not be the cheapest",
    };
    match counted {
        Some(Ok((count, text))) if count > 0 => Finding::ok(&check, text),
        Some(Ok(_)) if required => {
            Finding::failed(&check, "none".to_owned(), "check the name of the region".to_owned())
        }
        Some(Ok(_)) => {
            Finding::warning(&check, format!("none; {consequence}"), "check the name of the region".to_owned())
        }
        Some(Err(error)) if required => {
            Finding::failed(&check, format!("{}; {consequence}", brief(&error)), remediation(&error))
        }
        Some(Err(error)) => Finding::warning(&check, format!("{}; {consequence}", brief(&error)), remediation(&error)),
        None => {
            let detail = format!("not read: the price list is not reachable from here; {consequence}");
            Finding::warning(&check, detail, "nothing, if ISOLATED_VPC is intended".to_owned())
        }
    }
}

/// Dry-run request for spot placement scores: EC2 allows few real requests a day.
///
/// # Errors
/// EC2's error; [`Class::DryRunOk`] where the request would succeed.
pub async fn dry_run_scores(clients: &AwsClients) -> Result<(), ApiError> {
    let call = clients
        .ec2
        .get_spot_placement_scores()
        .dry_run(true)
        .set_instance_types(Some(SCORED_TYPES.map(str::to_owned).into()))
        .target_capacity(SCORED_VCPUS)
        .target_capacity_unit_type(TargetCapacityUnitType::Vcpu)
        .single_availability_zone(true)
        .region_names(&clients.region);
    let response = call.customize().config_override(no_retries()).send().await;
    response.map(|_| ()).map_err(ApiError::of("ec2:GetSpotPlacementScores"))
}

/// The finding about spot placement scores.
pub fn scores(response: &Result<(), ApiError>) -> Finding {
    let check = "spot placement scores";
    match response {
        Err(error) if error.class != Class::DryRunOk => {
            let detail = format!("{}; spot offerings are compared by price and past interruptions only", brief(error));
            Finding::warning(check, detail, remediation(error))
        }
        _ => Finding::ok(check, "can be read".to_owned()),
    }
}

/// Dry-run reads of EC2 and their findings.
pub async fn reads(clients: &AwsClients) -> Vec<Finding> {
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
            let response = ec2.describe_instance_status().dry_run(true).send().await;
            response.map(|_| ()).map_err(ApiError::of("ec2:DescribeInstanceStatus"))
        },
        async {
            let response = ec2.describe_launch_templates().dry_run(true).send().await;
            response.map(|_| ()).map_err(ApiError::of("ec2:DescribeLaunchTemplates"))
        },
    );
    vec![
        read("instances", instances, None),
        read("launch templates", templates, None),
        read("instance status", statuses, Some("instances that fail EC2's status checks are not replaced")),
    ]
}

/// The finding about a dry-run read. `consequence` is the limitation without the permission; `None` where it is required.
fn read(check: &str, response: Result<(), ApiError>, consequence: Option<&str>) -> Finding {
    match (response, consequence) {
        (Err(error), None) if error.class != Class::DryRunOk => {
            Finding::failed(check, brief(&error), remediation(&error))
        }
        (Err(error), Some(consequence)) if error.class != Class::DryRunOk => {
            Finding::warning(check, format!("{}; {consequence}", brief(&error)), remediation(&error))
        }
        _ => Finding::ok(check, "can be read".to_owned()),
    }
}

/// The finding about the cluster.
pub fn cluster(found: &Result<ClusterFacts, ClusterError>) -> Finding {
    let check = "cluster";
    match found {
        Ok(facts) => {
            let dataset = |name: &str, value: Option<&str>| format!("{name} {}", value.unwrap_or("unknown"));
            let parts = [
                facts.name.clone(),
                format!("Kubernetes {}", facts.version),
                facts.endpoint.clone(),
                dataset("services", facts.service_cidr.as_deref()),
            ];
            let detail = parts.join(", ");
            if facts.ca_bundle.is_empty() {
                let detail = format!("{detail}; the CA is unknown, and nodes can't join without it");
                return Finding::failed(check, detail, "set CLUSTER_CA_BUNDLE".to_owned());
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
                    format!("the version is unknown: {}", brief(source)),
                    "allow eks:DescribeCluster, or use a kubeconfig",
                ),
                other => (other.to_string(), "check the cluster and the kubeconfig"),
            };
            Finding::failed(check, text, help.to_owned())
        }
    }
}
