//! Dry-run requests that test a permission: RunInstances for one instance, and the rules for their responses.

use std::collections::BTreeMap;

use aws_sdk_ec2::config::retry::RetryConfig;
use aws_sdk_ec2::operation::run_instances::builders::RunInstancesFluentBuilder;
use aws_sdk_ec2::types::{InstanceMetadataOptionsRequest, InstanceNetworkInterfaceSpecification, ResourceType};

use crate::ec2::aws::client::AwsClients;
use crate::ec2::aws::errors::{ApiError, Class};
use crate::ec2::tags::tag_specification;

const ACTION: &str = "ec2:RunInstances";

/// Sends a dry-run RunInstances request for one instance. `complete` adds what the instance boots. The `metadata` options are in the
/// request also with a launch template: policies of an organization evaluate those of the request only.
///
/// # Errors
/// EC2's error; [`Class::DryRunOk`] where the instance would be launched.
pub(crate) async fn dry_run_instance(
    clients: &AwsClients,
    instance_type: &str,
    interfaces: Vec<InstanceNetworkInterfaceSpecification>,
    tags: &BTreeMap<String, String>,
    metadata: Option<InstanceMetadataOptionsRequest>,
    complete: impl FnOnce(RunInstancesFluentBuilder) -> RunInstancesFluentBuilder,
) -> Result<(), ApiError> {
    let kinds = [ResourceType::Instance, ResourceType::Volume, ResourceType::NetworkInterface];
    let call = clients
        .ec2
        .run_instances()
        .dry_run(true)
        .min_count(1)
        .max_count(1)
        .instance_type(instance_type.into())
        .set_metadata_options(metadata)
        .set_network_interfaces(Some(interfaces))
        .set_tag_specifications(Some(kinds.into_iter().map(|kind| tag_specification(kind, tags)).collect()));
    let response = complete(call).customize().config_override(no_retries()).send().await;
    response.map(|_| ()).map_err(ApiError::of(ACTION))
}

/// Whether a dry-run request is permitted. EC2-compatible endpoints without dry runs carry it out: that is a permission, too.
pub(crate) fn is_permitted(response: &Result<(), ApiError>) -> bool {
    response.as_ref().map_or_else(|error| error.class == Class::DryRunOk, |()| true)
}

/// The configuration of a call that is not retried.
pub(crate) fn no_retries() -> aws_sdk_ec2::config::Builder {
    aws_sdk_ec2::config::Builder::new().retry_config(RetryConfig::disabled())
}
