//! Launch groups: equal NodeClaims of one plan are launched by one CreateFleet call.
//!
//! The group is written on the claims at creation, because a later process cannot derive the same set from the claims that remain. It
//! makes a lost call for many instances recoverable: each instance carries its launch group as a tag, and any instance of a group
//! serves any claim of it. Pure.

use std::collections::BTreeMap;

use kube::ResourceExt;

use crate::api::NodeClaim;
use crate::api::launch_group::MAX_SIZE;
use crate::cloud::draw::draw;
use crate::model::labels;
use crate::model::time::UnixMillis;

/// Resources that every type in a claim's requirements provides in sufficient quantity.
const FITTED: [&str; 4] = ["cpu", "memory", "pods", "ephemeral-storage"];

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

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::api::launch_group::LaunchGroup;
    use crate::test_support::objects;

    fn claim(pods: &str, zone: &str, requests: &serde_json::Value) -> NodeClaim {
        let meta = json!({"labels": {"team": "a"}, "annotations": {(labels::PLANNED_PODS): pods}});
        let requirements = json!([{"key": labels::ZONE, "operator": "In", "values": [zone]}]);
        let spec = json!({"requirements": requirements, "resources": {"requests": requests}});
        objects::claim(pods, &json!({"metadata": meta, "spec": spec}))
    }

    #[test]
    fn claims_with_equal_requirements_share_a_group_for_any_requests() {
        let mut claims = [
            claim("a", "z1", &json!({"cpu": "1"})),
            claim("b", "z2", &json!({"cpu": "1"})),
            claim("c", "z1", &json!({"cpu": "2", "memory": "1Gi"})),
            claim("d", "z1", &json!({"cpu": "1", "vpc.amazonaws.com/efa": "1"})),
        ];
        mark(&mut claims, UnixMillis(1));
        let groups = claims.each_ref().map(LaunchGroup::of);
        assert_eq!((groups[0].size, &groups[0]), (2, &groups[2]));
        assert_eq!(groups[1], LaunchGroup { id: "uid-b".into(), size: 1 }, "the only claim in its zone");
        assert_eq!(groups[3].id, "uid-d", "only its instances have EFA interfaces");
    }

    #[test]
    fn members_of_a_group_follow_each_other() {
        let mut claims = ["z1", "z2", "z1", "z3", "z2"].map(|zone| claim(zone, zone, &json!({})));
        mark(&mut claims, UnixMillis(1));
        let ordered = in_order((0..).zip(claims).collect());
        assert_eq!(ordered.iter().map(|(at, _)| *at).collect::<Vec<i32>>(), [0, 2, 1, 4, 3]);
    }

    #[test]
    fn plans_have_distinct_groups_and_groups_are_at_most_one_call() {
        let id = |pods: &str, planned_at: i64| {
            let mut claims = [claim(pods, "z", &json!({})), claim("other", "z", &json!({}))];
            mark(&mut claims, UnixMillis(planned_at));
            LaunchGroup::of(&claims[0]).id
        };
        assert_eq!(id("a", 1), id("a", 1));
        assert_ne!(id("a", 1), id("a", 2));
        assert_ne!(id("a", 1), id("b", 1));
        let mut many = vec![claim("a", "z", &json!({})); MAX_SIZE + 2];
        mark(&mut many, UnixMillis(1));
        assert_eq!((LaunchGroup::of(&many[0]).size, LaunchGroup::of(&many[MAX_SIZE]).size), (MAX_SIZE, 2));
    }
}
