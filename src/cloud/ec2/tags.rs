//! Tags of everything that the provider creates: their keys, and their form in requests.

use std::collections::BTreeMap;

use aws_sdk_ec2::types::{ResourceType, Tag, TagSpecification};

use crate::model::labels;

/// Tag key; the value is the name of the cluster.
pub const CLUSTER_TAG: &str = "eks:eks-cluster-name";
/// Tag key of an instance; the value is the name of its NodeClaim.
pub const CLAIM_TAG: &str = "karpenter.sh/nodeclaim";
/// Tag key of an instance; the value is its launch group. Finds the instances of a launch whose response was lost.
pub const LAUNCH_TAG: &str = "stowage.dev/launch";

pub fn tags(tags: &BTreeMap<String, String>) -> Vec<Tag> {
    tags.iter().map(|(key, value)| Tag::builder().key(key).value(value).build()).collect()
}

pub fn tag_specification(kind: ResourceType, all: &BTreeMap<String, String>) -> TagSpecification {
    TagSpecification::builder().resource_type(kind).set_tags(Some(tags(all))).build()
}

/// Tags of everything that is launched for a NodePool: the tags of its class, and the tags that the IAM policy of the controller
/// and the filters of Describe calls match. The key of the pool is present even when the pool has no name.
///
/// # Errors
/// The first key that a class may not set.
pub fn launch_tags(
    own: &BTreeMap<String, String>,
    cluster: &str,
    class: &str,
    pool: &str,
) -> Result<BTreeMap<String, String>, String> {
    if let Some(key) = restricted_tag(own) {
        return Err(format!("tag {key} may not be set, remove it from spec.tags"));
    }
    let mut out = own.clone();
    out.insert(format!("kubernetes.io/cluster/{cluster}"), "owned".into());
    out.insert(labels::NODE_POOL.into(), pool.into());
    out.insert(CLUSTER_TAG.into(), cluster.into());
    out.insert(labels::EC2_NODE_CLASS.into(), class.into());
    Ok(out)
}

/// The first key that a class may not set.
pub fn restricted_tag(own: &BTreeMap<String, String>) -> Option<&str> {
    let reserved = |key: &str| {
        let name = key.strip_prefix("kubernetes.io/cluster/");
        labels::RESTRICTED_TAGS.contains(&key)
            || name.is_some_and(|name| {
                name.starts_with(|c: char| c.is_ascii_alphanumeric())
                    && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '_')
            })
    };
    own.keys().map(String::as_str).find(|key| reserved(key))
}
