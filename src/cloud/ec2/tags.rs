//! Tags of everything that the provider creates: their keys, and their form in requests.

use std::collections::BTreeMap;

use aws_sdk_ec2::types::{ResourceType, Tag, TagSpecification};
use stowage_model::labels;

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

/// Maximum number of tags of an EC2 resource, without those of AWS.
const MAX_TAGS: usize = 50;
/// Tags that Stowage adds to those of a class in a launch: those of [`launch_tags`], [`CLAIM_TAG`] and [`LAUNCH_TAG`]. A class can set
/// none of them.
const ADDED_TAGS: usize = 6;

/// Whether the tags of a class leave room for those that Stowage adds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TagRoom {
    Enough,
    /// Instances launch, but have no tag `Name`.
    NoName,
    /// EC2 refuses every launch.
    TooMany,
}

/// See [`TagRoom`].
pub fn tag_room(own: &BTreeMap<String, String>) -> TagRoom {
    let launched = own.len() + ADDED_TAGS;
    let named = launched + usize::from(!own.contains_key("Name"));
    match () {
        () if launched > MAX_TAGS => TagRoom::TooMany,
        () if named > MAX_TAGS => TagRoom::NoName,
        () => TagRoom::Enough,
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_of_a_class_leave_room_for_those_of_a_launch() {
        let many = |count: usize| (0..count).map(|n| (format!("tag-{n}"), String::new())).collect::<BTreeMap<_, _>>();
        let added =
            launch_tags(&BTreeMap::new(), "c1", "default", "default").unwrap().len() + [CLAIM_TAG, LAUNCH_TAG].len();
        assert_eq!(added, ADDED_TAGS);
        for (count, room) in
            [(0, TagRoom::Enough), (43, TagRoom::Enough), (44, TagRoom::NoName), (45, TagRoom::TooMany)]
        {
            assert_eq!(tag_room(&many(count)), room, "{count}");
        }
        let mut named = many(43);
        named.insert("Name".into(), "x".into());
        assert_eq!(tag_room(&named), TagRoom::Enough);
    }
}
