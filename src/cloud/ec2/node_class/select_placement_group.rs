//! The placement group that a node class selects.

use aws_sdk_ec2::config::retry::RetryConfig;
use stowage_api::node_class::PlacementGroupSelector;

use crate::ec2::aws::client::AwsClients;
use crate::ec2::aws::errors::{ApiError, Class};
use crate::ec2::aws::filters::filter;
use crate::ec2::placement_group::PlacementGroup;

/// Describes the placement group that a selector names; `None` where there is none.
///
/// # Errors
/// The call fails.
pub async fn find(clients: &AwsClients, selector: &PlacementGroupSelector) -> Result<Option<PlacementGroup>, ApiError> {
    let call = clients
        .ec2
        .describe_placement_groups()
        .set_group_ids(selector.id.clone().map(|id| vec![id]))
        .set_group_names(selector.name.clone().map(|name| vec![name]))
        .filters(filter("state", ["available"]));
    // Some EC2-compatible endpoints lack this action: few attempts, so that a class does not wait long.
    let few_attempts = aws_sdk_ec2::config::Builder::new().retry_config(RetryConfig::standard().with_max_attempts(3));
    match call
        .customize()
        .config_override(few_attempts)
        .send()
        .await
        .map_err(ApiError::of("ec2:DescribePlacementGroups"))
    {
        Ok(response) => Ok(response.placement_groups().first().and_then(|group| {
            Some(PlacementGroup {
                id: group.group_id()?.to_owned(),
                strategy: group.strategy().map(|strategy| strategy.as_str().to_owned()).unwrap_or_default(),
                partitions: group.partition_count().unwrap_or(0),
            })
        })),
        Err(error) if error.class == Class::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_support::fake_aws;

    #[tokio::test]
    async fn a_group_is_described_by_name_and_a_missing_one_is_none() {
        let (clients, seen) = fake_aws::clients(Box::new(|request| match request.form.get("GroupName.1") {
            Some(_) => fake_aws::ok(
                "DescribePlacementGroups",
                "<placementGroupSet><item><groupId>pg-1</groupId><strategy>partition</strategy><partitionCount>3</partitionCount></item></placementGroupSet>",
            ),
            None => fake_aws::error("InvalidPlacementGroup.Unknown", "no"),
        }));
        let by = |name: Option<&str>, id: Option<&str>| PlacementGroupSelector {
            name: name.map(str::to_owned),
            id: id.map(str::to_owned),
        };
        let group = PlacementGroup { id: "pg-1".into(), strategy: "partition".into(), partitions: 3 };
        assert_eq!(find(&clients, &by(Some("g"), None)).await.unwrap(), Some(group));
        assert_eq!(find(&clients, &by(None, Some("pg-2"))).await.unwrap(), None);
        assert_eq!(seen.lock().unwrap()[0].form["Filter.1.Value.1"], "available");
    }
}
