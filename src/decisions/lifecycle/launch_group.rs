//! Which instances of a launch group belong to which claim: any instance of a group serves any of its claims.

use std::collections::BTreeSet;

use kube::ResourceExt;

use crate::api::NodeClaim;
use crate::api::launch_group::LaunchGroup;
use crate::model::instance::Instance;

/// Provider ids that claims of a group name: instances with an owner.
pub fn named<'a>(group: &str, claims: impl IntoIterator<Item = &'a NodeClaim>) -> BTreeSet<String> {
    let members = claims.into_iter().filter(|claim| LaunchGroup::of(claim).id == group);
    members.filter_map(|claim| claim.status.as_ref()?.provider_id.clone()).collect()
}

/// Provider ids of the instances `found` that are terminated with a claim that names none: its own, and the unclaimed instances of
/// its group unless another of its `claims` waits for an instance.
pub fn left_behind<'a>(
    claim: &NodeClaim,
    claims: impl IntoIterator<Item = &'a NodeClaim>,
    found: &[Instance],
) -> Vec<String> {
    let group = LaunchGroup::of(claim).id;
    let other = |other: &&NodeClaim| other.metadata.uid != claim.metadata.uid && LaunchGroup::of(other).id == group;
    let others: Vec<&NodeClaim> = claims.into_iter().filter(other).collect();
    let waits = others.iter().any(|other| {
        let has_instance = other.status.as_ref().is_some_and(|status| status.provider_id.is_some());
        other.metadata.deletion_timestamp.is_none() && !has_instance
    });
    let named = named(&group, others);
    let is_terminated = |instance: &&Instance| {
        let own =
            claim.uid().is_some_and(|uid| uid == instance.client_token) || instance.node_claim == claim.name_any();
        !named.contains(&instance.provider_id) && (own || !waits)
    };
    found.iter().filter(is_terminated).map(|instance| instance.provider_id.clone()).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::model::labels;
    use crate::test_support::objects;

    #[test]
    fn provider_ids_of_the_claims_of_a_group_are_named() {
        let with = |pods: &str, group: &str, id: Option<&str>| {
            let mut claim = objects::claim(pods, &json!({}));
            claim.annotations_mut().insert(labels::LAUNCH_GROUP.into(), format!("{group}/3"));
            claim.status = serde_json::from_value(json!({"providerID": id})).unwrap();
            claim
        };
        let claims = [with("a", "g", Some("i-1")), with("b", "g", None), with("c", "h", Some("i-2"))];
        assert_eq!(named("g", &claims), BTreeSet::from(["i-1".to_owned()]));
    }

    #[test]
    fn c39_a_claim_without_an_instance_is_deleted_with_its_unclaimed_instances() {
        let member = |name: &str, id: Option<&str>, deleting: bool| {
            let mut claim = objects::claim(name, &json!({}));
            claim.annotations_mut().insert(labels::LAUNCH_GROUP.into(), "group/3".into());
            claim.status = serde_json::from_value(json!({"providerID": id})).unwrap();
            let deletion = deleting.then_some("2026-01-01T00:01:00Z");
            claim.metadata.deletion_timestamp = serde_json::from_value(json!(deletion)).unwrap();
            claim
        };
        let instance = |id: &str, token: &str, node_claim: &str| Instance {
            node_claim: node_claim.into(),
            ..objects::instance(id, token, 0)
        };
        let found = [instance("i-1", "group", ""), instance("i-2", "group", ""), instance("i-3", "group", "a")];
        let deleted = member("a", None, true);
        for (what, others, expected) in [
            ("alone", vec![], &["i-1", "i-2", "i-3"][..]),
            ("another claim names one", vec![member("b", Some("aws:///z/i-2"), false)], &["i-1", "i-3"]),
            ("another claim names one and is deleted", vec![member("b", Some("aws:///z/i-2"), true)], &["i-1", "i-3"]),
            ("another claim waits for one", vec![member("b", None, false)], &["i-3"]),
            ("another claim is deleted, too", vec![member("b", None, true)], &["i-1", "i-2", "i-3"]),
        ] {
            let ids = left_behind(&deleted, others.iter().chain([&deleted]), &found);
            let expected: Vec<String> = expected.iter().map(|id| format!("aws:///z/{id}")).collect();
            assert_eq!(ids, expected, "{what}");
        }
        let alone = objects::claim("c", &json!({}));
        let ids = left_behind(&alone, [&alone], &[instance("i-1", "uid-c", "")]);
        assert_eq!(ids, ["aws:///z/i-1"]);
    }
}
