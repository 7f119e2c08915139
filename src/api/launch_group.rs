//! The launch group of a NodeClaim, an annotation: equal claims of one plan, whose instances one CreateFleet call launches.

use kube::ResourceExt;

use crate::api::NodeClaim;
use crate::model::labels;

/// Maximum claims of a launch group, which are the instances of one CreateFleet call.
pub const MAX_SIZE: usize = 1_000;
/// The launch group of a claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LaunchGroup {
    /// Id of the group: value of the instance tag and base of client tokens. The UID of the claim if it is alone.
    pub id: String,
    /// Number of claims created in it.
    pub size: usize,
}

impl LaunchGroup {
    /// The launch group of the annotation; a group of its own if the annotation is absent or invalid.
    pub fn of(claim: &NodeClaim) -> Self {
        let written = claim.annotations().get(labels::LAUNCH_GROUP).and_then(|text| {
            let (id, size) = text.split_once('/')?;
            let size = size.parse().ok().filter(|size| (1..=MAX_SIZE).contains(size))?;
            (!id.is_empty()).then(|| Self { id: id.to_owned(), size })
        });
        written.unwrap_or_else(|| Self { id: claim.uid().unwrap_or_default(), size: 1 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_support::objects;

    #[test]
    fn an_absent_or_invalid_annotation_is_a_group_of_its_own() {
        let alone = LaunchGroup { id: "uid-a".into(), size: 1 };
        let mut claim = objects::claim("a", &serde_json::json!({}));
        assert_eq!(LaunchGroup::of(&claim), alone);
        for text in ["", "x", "x/0", "/3", "x/many", "x/1001"] {
            claim.annotations_mut().insert(labels::LAUNCH_GROUP.into(), text.into());
            assert_eq!(LaunchGroup::of(&claim), alone, "{text}");
        }
        claim.annotations_mut().insert(labels::LAUNCH_GROUP.into(), "x/1000".into());
        assert_eq!(LaunchGroup::of(&claim), LaunchGroup { id: "x".into(), size: MAX_SIZE });
    }
}
