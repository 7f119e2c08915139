//! Launch groups: equal NodeClaims of one plan, whose instances one CreateFleet call launches.
//!
//! The group is an annotation, written at creation, because a later process cannot derive the same set from the claims that remain. It
//! makes a lost call for many instances recoverable: each instance carries its launch group as a tag, and any instance of a group
//! serves any claim of it.

use std::collections::{BTreeMap, BTreeSet};

use kube::ResourceExt;
use stowage_model::draw::draw;
use stowage_model::instance::Instance;
use stowage_model::labels;
use stowage_model::time::UnixMillis;

use crate::NodeClaim;

/// Maximum claims of a launch group, which are the instances of one CreateFleet call.
pub const MAX_SIZE: usize = 1_000;
/// Resources that every type in a claim's requirements provides in sufficient quantity.
const FITTED: [&str; 4] = ["cpu", "memory", "pods", "ephemeral-storage"];

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

/// Writes launch groups on the claims of a plan made at `planned_at`, before they are created. Claims are equal if labels, user
/// annotations, requirements, maximum price, taints and node class are; requests may differ, because each admitted type satisfies them.
pub fn mark(claims: &mut [NodeClaim], planned_at: UnixMillis) {
    let mut alike: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    for (index, claim) in claims.iter().enumerate() {
        alike.entry(shape(claim)).or_default().push(index);
    }
    for (shape, members) in alike {
        for (number, part) in members.chunks(MAX_SIZE).enumerate().filter(|(_, part)| part.len() > 1) {
            let first = claims[part[0]].annotations().get(labels::PLANNED_PODS).cloned().unwrap_or_default();
            let id = draw(planned_at.0.unsigned_abs(), &[&shape, &first, &number.to_string()]);
            for index in part {
                claims[*index]
                    .annotations_mut()
                    .insert(labels::LAUNCH_GROUP.into(), format!("{id:016x}/{}", part.len()));
            }
        }
    }
}

/// These claims with the members of a launch group next to each other, where the first of them is: its call waits for the last one.
pub fn in_order<T>(claims: Vec<(T, NodeClaim)>) -> Vec<(T, NodeClaim)> {
    let mut first: BTreeMap<String, usize> = BTreeMap::new();
    let mut placed: Vec<(usize, (T, NodeClaim))> = Vec::with_capacity(claims.len());
    for (at, (of, claim)) in claims.into_iter().enumerate() {
        let group = claim.annotations().get(labels::LAUNCH_GROUP).cloned();
        placed.push((group.map_or(at, |group| *first.entry(group).or_insert(at)), (of, claim)));
    }
    placed.sort_by_key(|(at, _)| *at);
    placed.into_iter().map(|(_, claim)| claim).collect()
}

/// The attributes that claims of a group share.
fn shape(claim: &NodeClaim) -> String {
    let mut spec = claim.spec.clone();
    spec.resources.requests.retain(|name, _| !FITTED.contains(&name.as_str()));
    let users: BTreeMap<_, _> =
        claim.annotations().iter().filter(|(key, _)| !key.starts_with("stowage.dev/")).collect();
    let max_price = claim.annotations().get(labels::MAX_PRICE);
    serde_json::json!([spec, claim.labels(), users, max_price]).to_string()
}

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
    use serde_json::{Value, json};
    use stowage_model::instance::InstanceState;
    use stowage_model::offering::CapacityType;

    use super::*;

    /// The NodeClaim `name` with the UID `uid-NAME`.
    fn claim(name: &str, metadata: &Value, spec: &Value) -> NodeClaim {
        let mut claim =
            json!({"apiVersion": "karpenter.sh/v1", "kind": "NodeClaim", "metadata": metadata, "spec": spec});
        claim["metadata"]["name"] = name.into();
        claim["metadata"]["uid"] = format!("uid-{name}").into();
        claim["spec"]["nodeClassRef"] =
            json!({"group": "karpenter.k8s.aws", "kind": "EC2NodeClass", "name": "default"});
        serde_json::from_value(claim).unwrap()
    }

    fn bare(name: &str) -> NodeClaim {
        claim(name, &json!({}), &json!({"requirements": []}))
    }

    #[test]
    fn an_absent_or_invalid_annotation_is_a_group_of_its_own() {
        let alone = LaunchGroup { id: "uid-a".into(), size: 1 };
        let mut claim = bare("a");
        assert_eq!(LaunchGroup::of(&claim), alone);
        for text in ["", "x", "x/0", "/3", "x/many", "x/1001"] {
            claim.annotations_mut().insert(labels::LAUNCH_GROUP.into(), text.into());
            assert_eq!(LaunchGroup::of(&claim), alone, "{text}");
        }
        claim.annotations_mut().insert(labels::LAUNCH_GROUP.into(), "x/1000".into());
        assert_eq!(LaunchGroup::of(&claim), LaunchGroup { id: "x".into(), size: MAX_SIZE });
    }

    fn planned(pods: &str, zone: &str, requests: &Value) -> NodeClaim {
        let meta = json!({"labels": {"team": "a"}, "annotations": {(labels::PLANNED_PODS): pods}});
        let requirements = json!([{"key": labels::ZONE, "operator": "In", "values": [zone]}]);
        let spec = json!({"requirements": requirements, "resources": {"requests": requests}});
        claim(pods, &meta, &spec)
    }

    #[test]
    fn claims_with_equal_requirements_share_a_group_for_any_requests() {
        let mut claims = [
            planned("a", "z1", &json!({"cpu": "1"})),
            planned("b", "z2", &json!({"cpu": "1"})),
            planned("c", "z1", &json!({"cpu": "2", "memory": "1Gi"})),
            planned("d", "z1", &json!({"cpu": "1", "vpc.amazonaws.com/efa": "1"})),
        ];
        mark(&mut claims, UnixMillis(1));
        let groups = claims.each_ref().map(LaunchGroup::of);
        assert_eq!((groups[0].size, &groups[0]), (2, &groups[2]));
        assert_eq!(groups[1], LaunchGroup { id: "uid-b".into(), size: 1 }, "the only claim in its zone");
        assert_eq!(groups[3].id, "uid-d", "only its instances have EFA interfaces");
    }

    #[test]
    fn members_of_a_group_follow_each_other() {
        let mut claims = ["z1", "z2", "z1", "z3", "z2"].map(|zone| planned(zone, zone, &json!({})));
        mark(&mut claims, UnixMillis(1));
        let ordered = in_order((0..).zip(claims).collect());
        assert_eq!(ordered.iter().map(|(at, _)| *at).collect::<Vec<i32>>(), [0, 2, 1, 4, 3]);
    }

    #[test]
    fn plans_have_distinct_groups_and_groups_are_at_most_one_call() {
        let id = |pods: &str, planned_at: i64| {
            let mut claims = [planned(pods, "z", &json!({})), planned("other", "z", &json!({}))];
            mark(&mut claims, UnixMillis(planned_at));
            LaunchGroup::of(&claims[0]).id
        };
        assert_eq!(id("a", 1), id("a", 1));
        assert_ne!(id("a", 1), id("a", 2));
        assert_ne!(id("a", 1), id("b", 1));
        let mut many = vec![planned("a", "z", &json!({})); MAX_SIZE + 2];
        mark(&mut many, UnixMillis(1));
        assert_eq!((LaunchGroup::of(&many[0]).size, LaunchGroup::of(&many[MAX_SIZE]).size), (MAX_SIZE, 2));
    }

    #[test]
    fn provider_ids_of_the_claims_of_a_group_are_named() {
        let with = |pods: &str, group: &str, id: Option<&str>| {
            let mut claim = bare(pods);
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
            let mut claim = bare(name);
            claim.annotations_mut().insert(labels::LAUNCH_GROUP.into(), "group/3".into());
            claim.status = serde_json::from_value(json!({"providerID": id})).unwrap();
            let deletion = deleting.then_some("2026-01-01T00:01:00Z");
            claim.metadata.deletion_timestamp = serde_json::from_value(json!(deletion)).unwrap();
            claim
        };
        let instance = |id: &str, token: &str, node_claim: &str| Instance {
            id: id.into(),
            provider_id: format!("aws:///z/{id}"),
            client_token: token.into(),
            node_claim: node_claim.into(),
            instance_type: "m5.large".into(),
            zone: "z".into(),
            capacity_type: CapacityType::OnDemand,
            reservation: None,
            partition: None,
            image_id: "ami-1".into(),
            launched_at: UnixMillis(0),
            state: InstanceState::Running,
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
        let alone = bare("c");
        let ids = left_behind(&alone, [&alone], &[instance("i-1", "uid-c", "")]);
        assert_eq!(ids, ["aws:///z/i-1"]);
    }
}
