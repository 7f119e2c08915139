//! Tags that an instance gets once it is a Node. The controller's IAM policy allows no others after the launch.

use std::collections::BTreeMap;

use super::client::Clients;
use super::errors::ApiError;
use super::fleet::CLAIM_TAG;
use super::launch_template::{CLUSTER_TAG, tags};

/// What is missing of an instance's tags: its node's name as `Name`, unless the user has one, its claim and its cluster.
pub fn missing(present: &BTreeMap<String, String>, node: &str, claim: &str, cluster: &str) -> BTreeMap<String, String> {
    let wanted = [("Name", node), (CLAIM_TAG, claim), (CLUSTER_TAG, cluster)];
    let absent = wanted.into_iter().filter(|(key, _)| !present.contains_key(*key));
    absent.map(|(key, value)| (key.to_owned(), value.to_owned())).collect()
}

/// Tags an instance. Returns false where there is no such instance.
///
/// # Errors
/// EC2's.
pub async fn tag(clients: &Clients, id: &str, node: &str, claim: &str, cluster: &str) -> Result<bool, ApiError> {
    let call = clients.ec2.describe_instances().instance_ids(id);
    let answer = match call.send().await.map_err(ApiError::of("ec2:DescribeInstances")) {
        Err(error) if error.class == super::errors::Class::NotFound => return Ok(false),
        answer => answer?,
    };
    let Some(instance) = answer.reservations().iter().flat_map(aws_sdk_ec2::types::Reservation::instances).next()
    else {
        return Ok(false);
    };
    let present = instance.tags().iter().filter_map(|tag| Some((tag.key()?.to_owned(), tag.value()?.to_owned())));
    let missing = missing(&present.collect(), node, claim, cluster);
    if !missing.is_empty() {
        let call = clients.ec2.create_tags().resources(id).set_tags(Some(tags(&missing)));
        call.send().await.map_err(ApiError::of("ec2:CreateTags"))?;
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::super::client::wire;
    use super::*;

    #[test]
    fn c20_a_users_name_stays_and_what_is_missing_is_added() {
        let present = |keys: &[&str]| keys.iter().map(|key| ((*key).to_owned(), "x".to_owned())).collect();
        let keys = |have: &[&str]| missing(&present(have), "node", "claim", "c1").into_keys().collect::<Vec<_>>();
        assert_eq!(keys(&[]), ["Name", "eks:eks-cluster-name", "karpenter.sh/nodeclaim"]);
        assert_eq!(keys(&["Name", "eks:eks-cluster-name"]), ["karpenter.sh/nodeclaim"]);
        assert!(keys(&["Name", "eks:eks-cluster-name", "karpenter.sh/nodeclaim"]).is_empty());
    }

    #[tokio::test]
    async fn c20_only_the_missing_tags_go_over_the_wire() {
        let (clients, seen) = wire::clients(Box::new(|request| match request.action.as_str() {
            "DescribeInstances" => wire::ok(
                "DescribeInstances",
                "<reservationSet><item><instancesSet><item><instanceId>i-1</instanceId><tagSet><item><key>karpenter.sh/nodeclaim</key><value>c</value></item>\
                 <item><key>eks:eks-cluster-name</key><value>c1</value></item></tagSet></item></instancesSet></item></reservationSet>",
            ),
            _ => wire::ok("CreateTags", "<return>true</return>"),
        }));
        assert!(tag(&clients, "i-1", "node-1", "c", "c1").await.unwrap());
        let seen = seen.lock().unwrap();
        let form = &seen[1].form;
        assert_eq!((&*form["ResourceId.1"], &*form["Tag.1.Key"], &*form["Tag.1.Value"]), ("i-1", "Name", "node-1"));
        assert!(!form.contains_key("Tag.2.Key"));
    }
}
