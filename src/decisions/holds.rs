//! Resolves the plans of NodeClaims to live holds. Every replica and every restart derives the same holds from the same objects.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;

use crate::model::labels;
use crate::model::resources::Resources;
use crate::model::time::UnixMillis;
use crate::state::node_state::BOOT_TIMEOUT;
use crate::state::object_ext::ObjectExt;
use crate::state::plan_record::{Hold, Holds, Owner};
use crate::state::pods::PodRecord;
use crate::state::tables::ClusterState;

/// Duration of a hold on a node that is yet to boot.
pub const HOLD_LAUNCH: Duration = BOOT_TIMEOUT;
/// Duration of a hold on a registered node.
pub const HOLD_READY: Duration = Duration::from_mins(1);

/// The last result of [`resolve`] for one [`ClusterState`], reused until an object changes or a hold ends.
#[derive(Debug, Default)]
pub struct HoldsCache {
    last: Option<Resolved>,
}

#[derive(Debug)]
struct Resolved {
    holds: Arc<Holds>,
    revision: u64,
    /// End of the first hold.
    until: UnixMillis,
}

impl HoldsCache {
    /// The live holds at `now`.
    pub fn resolve(&mut self, state: &ClusterState, now: UnixMillis) -> Arc<Holds> {
        if let Some(last) = self.last.as_ref().filter(|last| last.revision == state.revision && now < last.until) {
            return Arc::clone(&last.holds);
        }
        let holds = Arc::new(resolve(state, now));
        let until = state.held_after(now).next().map_or(UnixMillis::MAX, |(until, _)| *until);
        self.last = Some(Resolved { holds: Arc::clone(&holds), revision: state.revision, until });
        holds
    }
}

/// The live holds at `now`: first those of the planned pods themselves, on every claim; then the room of displaced pods that are
/// gone is assigned to their successors.
pub fn resolve(state: &ClusterState, now: UnixMillis) -> Holds {
    let mut holds = Holds::default();
    let mut open: BTreeMap<&String, Vec<(&String, &Owner)>> = BTreeMap::new();
    let mut names: Vec<&String> = state.held_after(now).map(|(_, name)| name).collect();
    names.sort_unstable();
    for name in names {
        let (Some(claim), Some(planned)) = (state.claims.get(name), state.planned.get(name)) else { continue };
        if claim.is_deleting()
            || claim.annotations().get(labels::DISRUPTING).is_some_and(|why| !why.starts_with("Empty/"))
        {
            continue;
        }
        let node = state.node_of(claim).map(|node| node.name_any());
        let mut live = Vec::new();
        for key in &planned.pods {
            let record = state.pods.get(key).filter(|record| record.active());
            match (record, planned.owners.get(key)) {
                (Some(record), owner) if record.node.is_none() && record.deleted_at.is_none() => {
                    live.push(hold(key, Some(key), owner, planned.hold_until));
                }
                // Bound to the planned node: the hold is over.
                (Some(record), _) if record.node.is_some() && record.node.as_deref() == node.as_deref() => {}
                // Still running on the node that it is displaced from.
                (Some(record), Some(owner)) if record.deleted_at.is_none() => {
                    live.push(hold(key, None, Some(owner), planned.hold_until));
                }
                (_, Some(owner)) => open.entry(name).or_default().push((key, owner)),
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
    // A pod that two plans name has the hold of the first: the withdrawal from the other failed.
    for (name, live) in &mut holds.by_claim {
        live.retain(|hold| hold.pod.as_ref().is_none_or(|pod| holds.by_pod.get(pod) == Some(name)));
    }
    if !open.is_empty() {
        assign_successors(state, &mut holds, open);
    }
    for (name, live) in &mut holds.by_claim {
        if let Some(node) = state.claims.get(name).and_then(|claim| state.node_of(claim)) {
            drop_overcommitted(state, node, live);
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

/// Assigns the room of displaced pods that are gone, by NodeClaim, to new pods of the same controllers.
fn assign_successors(state: &ClusterState, holds: &mut Holds, open: BTreeMap<&String, Vec<(&String, &Owner)>>) {
    let by_owner = pods_by_owner(state);
    for (name, originals) in open {
        let Some(planned) = state.planned.get(name) else { continue };
        let node = state.claims.get(name).and_then(|claim| state.node_of(claim)).map(|node| node.name_any());
        let mut of_owner: BTreeMap<(&str, &str), Vec<(&String, &Owner)>> = BTreeMap::new();
        for (original, owner) in originals {
            let namespace = original.split_once('/').map_or("", |(namespace, _)| namespace);
            of_owner.entry((namespace, &owner.uid)).or_default().push((original, owner));
        }
        for (controller, originals) in of_owner {
            let pods = by_owner.get(&controller).map(Vec::as_slice).unwrap_or_default();
            let planned_at = originals.iter().map(|(_, owner)| owner.planned_at).min().unwrap_or_default();
            // Creation timestamps are whole seconds.
            let is_successor = |pod: &PodRecord| {
                let created = pod.entry.as_ref().map(|entry| entry.created_at.0.div_euclid(1_000));
                created.is_ok_and(|created| created >= planned_at.0.div_euclid(1_000))
            };
            let arrived = pods
                .iter()
                .filter(|pod| pod.node.is_some() && pod.node.as_deref() == node.as_deref() && is_successor(pod))
                .filter(|pod| !planned.pods.contains(&pod.key()))
                .count();
            let mut waiting: Vec<String> = pods
                .iter()
                .filter(|pod| pod.node.is_none() && pod.deleted_at.is_none())
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
                live.push(hold(original, next.as_ref(), Some(owner), planned.hold_until));
            }
        }
    }
}

/// Drops the holds that no longer fit next to the pods bound to the node, such as those bound while the plan was computed. The
/// pods of dropped holds are demand again.
fn drop_overcommitted(state: &ClusterState, node: &Node, live: &mut Vec<Hold>) {
    let Some(allocatable) = node.status.as_ref().and_then(|status| status.allocatable.as_ref()) else {
        return;
    };
    let Ok(mut room) = Resources::from_map(allocatable) else {
        return;
    };
    if room.cpu.0 == 0 || room.memory.0 == 0 || room.pods == 0 {
        // The kubelet has not reported them yet.
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

fn hold(original: &str, pod: Option<&String>, owner: Option<&Owner>, expires_at: UnixMillis) -> Hold {
    let owner = owner.map(|owner| owner.uid.clone());
    Hold { original: original.to_owned(), pod: pod.cloned(), owner, expires_at }
}

/// Pods by the namespace and UID of their controller: a UID may be copied to another namespace.
fn pods_by_owner(state: &ClusterState) -> HashMap<(&str, &str), Vec<&PodRecord>> {
    let mut out: HashMap<(&str, &str), Vec<&PodRecord>> = HashMap::new();
    for record in state.pods.values().filter(|record| record.active()) {
        if let Some(owner) = record.entry.as_ref().ok().and_then(|entry| entry.owner.as_deref()) {
            out.entry((&record.namespace, owner)).or_default().push(record);
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
            (labels::HOLD_UNTIL): until,
        });
        let patch = serde_json::json!({"metadata": {"annotations": plan}, "status": objects::launched("i-1", &[])});
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
        state.apply_pod(&pod, UnixMillis(1));
    }

    #[test]
    fn a_hold_is_live_until_its_pod_is_bound_or_gone() {
        let mut state = state(&["n/a", "n/gone"], &[], LATER);
        put(&mut state, "a", "rs", None);
        let holds = resolve(&state, UnixMillis(0));
        assert_eq!(holds.by_pod.get("n/a").map(String::as_str), Some("c"));
        assert_eq!(holds.by_claim["c"].len(), 1, "a deleted pod holds nothing");
        put(&mut state, "a", "rs", Some("node-c"));
        assert_eq!(resolve(&state, UnixMillis(0)), Holds::default());
    }

    #[test]
    fn an_expired_hold_is_not_live() {
        let mut state = state(&["n/a"], &[], "2001-01-01T00:00:00Z");
        put(&mut state, "a", "rs", None);
        assert_eq!(resolve(&state, UnixMillis(1_700_000_000_000)), Holds::default());
    }

    #[test]
    fn a_hold_without_room_is_dropped() {
        let mut state = state(&["n/a"], &[], LATER);
        let node = |cpu: &str| {
            serde_json::from_value(
                serde_json::json!({"metadata": {"name": "node-c"}, "spec": {"providerID": "aws:///z/i-1"},
                "status": {"allocatable": {"cpu": cpu, "memory": "1Gi", "pods": "10"}}}),
            )
            .unwrap()
        };
        state.apply_node(node("1"));
        for (name, bound) in [("a", None), ("intruder", Some("node-c"))] {
            let pod = serde_json::from_value(
                serde_json::json!({"metadata": {"name": name, "namespace": "n", "uid": name},
                "spec": {"nodeName": bound, "containers": [{"name": "c", "image": "i", "resources": {"requests": {"cpu": "600m"}}}]}}),
            );
            state.apply_pod(&pod.unwrap(), UnixMillis(1));
        }
        assert_eq!(resolve(&state, UnixMillis(0)), Holds::default());
        state.apply_node(node("2"));
        assert_eq!(resolve(&state, UnixMillis(0)).by_claim["c"].len(), 1, "both fit");
    }

    #[test]
    fn a_copied_controller_uid_takes_no_room_in_another_namespace() {
        let mut state = state(&["n/old"], &[("n/old", "rs")], LATER);
        let owner = serde_json::json!([{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "rs", "controller": true}]);
        let meta = serde_json::json!({"namespace": "attacker", "ownerReferences": owner, "creationTimestamp": "1970-01-01T00:00:09Z"});
        state.apply_pod(&objects::pod("copy", &serde_json::json!({ "metadata": meta })), UnixMillis(1));
        let holds = resolve(&state, UnixMillis(0));
        assert_eq!((holds.by_pod.len(), holds.by_claim["c"][0].pod.as_ref()), (0, None));
        let meta = serde_json::json!({"ownerReferences": owner, "creationTimestamp": "1970-01-01T00:00:09Z"});
        state.apply_pod(&objects::pod("new", &serde_json::json!({ "metadata": meta })), UnixMillis(1));
        assert_eq!(resolve(&state, UnixMillis(0)).by_pod.keys().collect::<Vec<_>>(), ["n/new"]);
    }

    #[test]
    fn a_pod_that_two_plans_name_has_one_hold() {
        let mut state = state(&["n/a"], &[], LATER);
        put(&mut state, "a", "rs", None);
        let plan = serde_json::json!({(labels::PLANNED_PODS): "[\"n/a\"]", (labels::HOLD_UNTIL): LATER});
        state.apply_claim(objects::claim("b", &serde_json::json!({"metadata": {"annotations": plan}})));
        let holds = resolve(&state, UnixMillis(0));
        assert_eq!(holds.by_claim.keys().collect::<Vec<_>>(), ["b"]);
        assert_eq!(holds.by_pod["n/a"], "b");
    }

    #[test]
    fn a_displaced_pods_successor_takes_its_room() {
        let mut state = state(&["n/old"], &[("n/old", "rs")], LATER);
        put(&mut state, "old", "rs", Some("node-old"));
        let holds = resolve(&state, UnixMillis(0));
        assert_eq!(holds.by_claim["c"][0].pod, None, "the original still runs elsewhere");
        put(&mut state, "early", "rs", Some("node-c"));
        let mut terminating: k8s_openapi::api::core::v1::Pod = serde_json::from_value(serde_json::json!({"metadata": {
            "name": "old", "namespace": "n", "uid": "old", "deletionTimestamp": "1970-01-01T00:00:10Z", "ownerReferences": [
            {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "rs", "controller": true}]},
            "spec": {"nodeName": "node-old", "containers": [{"name": "c", "image": "i"}]}}))
        .unwrap();
        terminating.metadata.resource_version = Some("7".into());
        state.apply_pod(&terminating, UnixMillis(2));
        put(&mut state, "new", "rs", None);
        let holds = resolve(&state, UnixMillis(0));
        assert_eq!(holds.by_pod.get("n/new").map(String::as_str), Some("c"), "while the original terminates");
        state.delete_pod("n/old", UnixMillis(2));
        let holds = resolve(&state, UnixMillis(0));
        assert_eq!(holds.by_pod.get("n/new").map(String::as_str), Some("c"));
        put(&mut state, "new", "rs", Some("node-c"));
        assert_eq!(resolve(&state, UnixMillis(0)), Holds::default(), "the successor is bound");
    }
}
