//! Which room is kept for which pod: read off the plans that NodeClaims carry, so that every replica and every restart
//! comes to the same answer.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;

use crate::api::NodeClaim;
use crate::model::labels;
use crate::model::resources::Resources;
use crate::state::pods::PodRecord;
use crate::state::tables::ClusterState;

/// Room on one node kept for one pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hold {
    /// The pod the node was bought for, `namespace/name`.
    pub original: String,
    /// The pod that shall take the room now: the original, or its successor. `None` while no successor exists.
    pub pod: Option<String>,
    /// UID of the controller whose next pod takes the room; set only where the original was displaced from another node.
    pub owner: Option<String>,
    /// When the hold ends, milliseconds since the epoch.
    pub expires_ms: i64,
}

/// Every live hold.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Holds {
    /// Holds by NodeClaim.
    pub by_claim: BTreeMap<String, Vec<Hold>>,
    /// NodeClaim by the pod that shall take the room.
    pub by_pod: HashMap<String, String>,
}

/// Who makes the next pod in a displaced pod's place.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Deserialize, serde::Serialize)]
pub struct Owner {
    /// UID of the controlling owner.
    pub uid: String,
    /// When the displacement was planned, milliseconds since the epoch: pods created before it are no successors.
    pub at_ms: i64,
}

/// The plan a NodeClaim carries: pods, owners of displaced pods, end of the holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Planned {
    /// Pods, `namespace/name`, in order.
    pub pods: Vec<String>,
    /// Owner by pod, for pods that were displaced from another node.
    pub owners: BTreeMap<String, Owner>,
    /// Milliseconds since the epoch; 0 when absent or unreadable, so that a hold nobody bounds is no hold.
    pub until_ms: i64,
}

impl Planned {
    /// Reads the annotations of a NodeClaim. What can't be read counts as absent.
    pub fn of(claim: &NodeClaim) -> Self {
        let annotation = |key: &str| claim.annotations().get(key).map(String::as_str).unwrap_or_default();
        Self {
            pods: serde_json::from_str(annotation(labels::PLANNED_PODS)).unwrap_or_default(),
            owners: serde_json::from_str(annotation(labels::PLANNED_OWNERS)).unwrap_or_default(),
            until_ms: annotation(labels::HOLD_UNTIL)
                .parse::<k8s_openapi::jiff::Timestamp>()
                .map_or(0, k8s_openapi::jiff::Timestamp::as_millisecond),
        }
    }

    /// The annotations that carry it.
    pub fn annotations(&self) -> BTreeMap<String, String> {
        let json = |value: serde_json::Value| value.to_string();
        BTreeMap::from([
            (labels::PLANNED_PODS.to_owned(), json(self.pods.clone().into())),
            (labels::PLANNED_OWNERS.to_owned(), json(serde_json::json!(self.owners))),
            (labels::HOLD_UNTIL.to_owned(), crate::state::rfc3339(self.until_ms)),
        ])
    }
}

/// Works out the live holds at `now_ms`.
///
/// Holds of pods that are there come first, on every claim; then the successors of displaced pods are given what is left.
pub fn resolve(state: &ClusterState, now_ms: i64) -> Holds {
    let mut holds = Holds::default();
    let mut slots: BTreeMap<&String, Vec<(&String, &Owner)>> = BTreeMap::new();
    let mut names: Vec<&String> = state.held_after(now_ms).map(|(_, name)| name).collect();
    names.sort_unstable();
    for name in names {
        let (Some(claim), Some(planned)) = (state.claims.get(name), state.planned.get(name)) else { continue };
        if claim.metadata.deletion_timestamp.is_some()
            || claim.annotations().get(labels::DISRUPTING).is_some_and(|why| !why.starts_with("Empty/"))
        {
            continue;
        }
        let node = state.node_of(claim).map(|node| node.name_any());
        let mut live = Vec::new();
        for key in &planned.pods {
            let record = state.pods.get(key).filter(|record| record.active());
            match (record, planned.owners.get(key)) {
                (Some(record), owner) if record.node.is_none() && record.deleting_since_ms.is_none() => {
                    live.push(hold(key, Some(key), owner, planned.until_ms));
                }
                // Bound where it was planned: the hold has done its work.
                (Some(record), _) if record.node.is_some() && record.node.as_deref() == node.as_deref() => {}
                // Still running where it is to be displaced from.
                (Some(record), Some(owner)) if record.deleting_since_ms.is_none() => {
                    live.push(hold(key, None, Some(owner), planned.until_ms));
                }
                (_, Some(owner)) => slots.entry(name).or_default().push((key, owner)),
                _ => {}
            }
        }
        for pod in live.iter().filter_map(|hold| hold.pod.clone()) {
            holds.by_pod.entry(pod).or_insert_with(|| name.clone());
        }
        if !live.is_empty() {
            holds.by_claim.insert(name.clone(), live);
        }
    }
    if !slots.is_empty() {
        give_successors(state, &mut holds, slots);
    }
    for (name, live) in &mut holds.by_claim {
        if let Some(node) = state.claims.get(name).and_then(|claim| state.node_of(claim)) {
            drop_void(state, node, live);
        }
    }
    holds.by_claim.retain(|_, live| !live.is_empty());
    let kept: BTreeSet<(&String, &String)> = holds
        .by_claim
        .iter()
        .flat_map(|(name, live)| live.iter().filter_map(move |hold| Some((hold.pod.as_ref()?, name))))
        .collect();
    holds.by_pod.retain(|pod, claim| kept.contains(&(pod, &*claim)));
    holds
}

/// Gives the room of displaced pods that are gone to the next pods of their controllers.
fn give_successors(state: &ClusterState, holds: &mut Holds, slots: BTreeMap<&String, Vec<(&String, &Owner)>>) {
    let by_owner = owned(state);
    for (name, originals) in slots {
        let Some(planned) = state.planned.get(name) else { continue };
        let node = state.claims.get(name).and_then(|claim| state.node_of(claim)).map(|node| node.name_any());
        let mut of_owner: BTreeMap<&str, Vec<(&String, &Owner)>> = BTreeMap::new();
        for (original, owner) in originals {
            of_owner.entry(&owner.uid).or_default().push((original, owner));
        }
        for (uid, originals) in of_owner {
            let pods = by_owner.get(uid).map(Vec::as_slice).unwrap_or_default();
            let since = originals.iter().map(|(_, owner)| owner.at_ms).min().unwrap_or(0);
            // Times of creation are whole seconds.
            let young = |pod: &PodRecord| {
                pod.entry.as_ref().is_ok_and(|entry| entry.created_at.0.div_euclid(1_000) >= since.div_euclid(1_000))
            };
            let arrived = pods
                .iter()
                .filter(|pod| pod.node.is_some() && pod.node.as_deref() == node.as_deref() && young(pod))
                .filter(|pod| !planned.pods.contains(&pod.key()))
                .count();
            let mut waiting: Vec<String> = pods
                .iter()
                .filter(|pod| pod.node.is_none() && pod.deleting_since_ms.is_none())
                .map(|pod| pod.key())
                .filter(|key| !holds.by_pod.contains_key(key))
                .collect();
            waiting.sort();
            let mut waiting = waiting.into_iter();
            for (original, owner) in originals.into_iter().skip(arrived) {
                let next = waiting.next();
                if let Some(pod) = &next {
                    holds.by_pod.insert(pod.clone(), name.clone());
                }
                let live = holds.by_claim.entry(name.clone()).or_default();
                live.push(hold(original, next.as_ref(), Some(owner), planned.until_ms));
            }
        }
    }
}

/// Drops the holds whose room is gone: what was bound while the plan was being made took it. Their pods are planned anew.
fn drop_void(state: &ClusterState, node: &Node, live: &mut Vec<Hold>) {
    let Some(allocatable) = node.status.as_ref().and_then(|status| status.allocatable.as_ref()) else {
        return;
    };
    let Ok(mut room) = Resources::from_map(allocatable) else {
        return;
    };
    if room.cpu.0 == 0 || room.memory.0 == 0 || room.pods == 0 {
        // Not reported yet.
        return;
    }
    let requests = |pod: &PodRecord| pod.entry.as_ref().ok().map(|entry| Arc::clone(&entry.class));
    for class in state.pods_on(&node.name_any()).filter(|pod| pod.active()).filter_map(requests) {
        room.sub(&class.requests);
    }
    live.retain(|hold| {
        let record = hold.pod.as_ref().and_then(|pod| state.pods.get(pod));
        let Some(class) = record.and_then(requests) else {
            return true;
        };
        room.sub(&class.requests);
        let fits = room.cpu.0 >= 0 && room.memory.0 >= 0 && room.pods >= 0;
        if !fits {
            room.add(&class.requests);
        }
        fits
    });
}

fn hold(original: &str, pod: Option<&String>, owner: Option<&Owner>, expires_ms: i64) -> Hold {
    let owner = owner.map(|owner| owner.uid.clone());
    Hold { original: original.to_owned(), pod: pod.cloned(), owner, expires_ms }
}

fn owned(state: &ClusterState) -> HashMap<&str, Vec<&PodRecord>> {
    let mut out: HashMap<&str, Vec<&PodRecord>> = HashMap::new();
    for record in state.pods.values().filter(|record| record.active()) {
        if let Some(owner) = record.entry.as_ref().ok().and_then(|entry| entry.owner.as_deref()) {
            out.entry(owner).or_default().push(record);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_support::objects;

    const LATER: &str = "2030-01-01T00:00:00Z";

    fn state(planned: &[&str], owners: &[(&str, &str)], until: &str) -> ClusterState {
        let mut state = ClusterState::default();
        let owners: BTreeMap<_, _> =
            owners.iter().map(|(pod, uid)| (*pod, serde_json::json!({"uid": uid, "at_ms": 5_000}))).collect();
        let plan = serde_json::json!({
            (labels::PLANNED_PODS): serde_json::json!(planned).to_string(),
            (labels::PLANNED_OWNERS): serde_json::json!(owners).to_string(),
            (labels::HOLD_UNTIL): until});
        let status = objects::launched("i-1", &[]);
        let patch = serde_json::json!({"metadata": {"annotations": plan}, "status": status});
        state.apply_claim(objects::claim("c", &patch));
        state.apply_node(
            serde_json::from_value(
                serde_json::json!({"metadata": {"name": "node-c"}, "spec": {"providerID": "aws:///z/i-1"}}),
            )
            .unwrap(),
        );
        state
    }

    fn put(state: &mut ClusterState, name: &str, owner: &str, node: Option<&str>) {
        let created = if name.starts_with("early") { "1970-01-01T00:00:01Z" } else { "1970-01-01T00:00:09Z" };
        let pod = serde_json::from_value(serde_json::json!({"metadata": {"name": name, "namespace": "n", "uid": name,
            "creationTimestamp": created,
            "ownerReferences": [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": owner, "controller": true}]},
            "spec": {"containers": [{"name": "c", "image": "i"}], "nodeName": node}}))
        .unwrap();
        state.apply_pod(&pod, 1);
    }

    #[test]
    fn a_hold_lives_while_its_pod_waits_and_ends_when_it_is_bound() {
        let mut state = state(&["n/a", "n/gone"], &[], LATER);
        put(&mut state, "a", "rs", None);
        let holds = resolve(&state, 0);
        assert_eq!(holds.by_pod.get("n/a").map(String::as_str), Some("c"));
        assert_eq!(holds.by_claim["c"].len(), 1, "a pod that is gone holds nothing");
        put(&mut state, "a", "rs", Some("node-c"));
        assert_eq!(resolve(&state, 0), Holds::default());
    }

    #[test]
    fn an_expired_hold_is_no_hold() {
        let mut state = state(&["n/a"], &[], "2001-01-01T00:00:00Z");
        put(&mut state, "a", "rs", None);
        assert_eq!(resolve(&state, 1_700_000_000_000), Holds::default());
    }

    #[test]
    fn a_hold_whose_room_was_taken_is_void() {
        let mut state = state(&["n/a"], &[], LATER);
        let node = |cpu: &str| {
            serde_json::from_value(
                serde_json::json!({"metadata": {"name": "node-c"}, "spec": {"providerID": "aws:///z/i-1"},
                "status": {"allocatable": {"cpu": cpu, "memory": "1Gi", "pods": "10"}}}),
            )
            .unwrap()
        };
        state.apply_node(node("1"));
        for (name, bound) in [("a", None), ("thief", Some("node-c"))] {
            let pod = serde_json::from_value(
                serde_json::json!({"metadata": {"name": name, "namespace": "n", "uid": name},
                "spec": {"nodeName": bound, "containers": [{"name": "c", "image": "i", "resources": {"requests": {"cpu": "600m"}}}]}}),
            );
            state.apply_pod(&pod.unwrap(), 1);
        }
        assert_eq!(resolve(&state, 0), Holds::default());
        state.apply_node(node("2"));
        assert_eq!(resolve(&state, 0).by_claim["c"].len(), 1, "both fit");
    }

    #[test]
    fn a_displaced_pods_successor_takes_its_room() {
        let mut state = state(&["n/old"], &[("n/old", "rs")], LATER);
        put(&mut state, "old", "rs", Some("node-old"));
        let holds = resolve(&state, 0);
        assert_eq!(holds.by_claim["c"][0].pod, None, "the original still runs elsewhere");
        put(&mut state, "early", "rs", Some("node-c"));
        let mut terminating: k8s_openapi::api::core::v1::Pod = serde_json::from_value(serde_json::json!({"metadata": {
            "name": "old", "namespace": "n", "uid": "old", "deletionTimestamp": "1970-01-01T00:00:10Z", "ownerReferences": [
            {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "rs", "controller": true}]},
            "spec": {"nodeName": "node-old", "containers": [{"name": "c", "image": "i"}]}}))
        .unwrap();
        terminating.metadata.resource_version = Some("7".into());
        state.apply_pod(&terminating, 2);
        put(&mut state, "new", "rs", None);
        let holds = resolve(&state, 0);
        assert_eq!(holds.by_pod.get("n/new").map(String::as_str), Some("c"), "also while the original terminates");
        state.delete_pod("n/old", 2);
        let holds = resolve(&state, 0);
        assert_eq!(holds.by_pod.get("n/new").map(String::as_str), Some("c"));
        put(&mut state, "new", "rs", Some("node-c"));
        assert_eq!(resolve(&state, 0), Holds::default(), "the successor has arrived");
    }
}
