//! Resolves the plans of NodeClaims to live holds. Every replica and every restart derives the same holds from the same objects.

use std::collections::BTreeMap;
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

/// Longest reuse of a result after a change that cannot affect it.
const MAX_AGE: Duration = Duration::from_secs(1);

/// The last result of [`resolve`] for one [`ClusterState`], reused until a change that affects holds, or until a hold ends.
#[derive(Debug, Default)]
pub struct HoldsCache {
    last: Option<Resolved>,
}

#[derive(Debug)]
struct Resolved {
    holds: Arc<Holds>,
    /// [`ClusterState::revision`], and the part of it that affects holds.
    revision: (u64, u64),
    at: UnixMillis,
    /// End of the first hold.
    until: UnixMillis,
}

impl Resolved {
    fn is_current(&self, state: &ClusterState, now: UnixMillis) -> bool {
        let unchanged = self.revision.0 == state.revision;
        let unaffected = self.revision.1 == state.hold_revision && now >= self.at && now < self.at + MAX_AGE;
        (unchanged || unaffected) && now < self.until
    }
}

impl HoldsCache {
    /// The last result, and its time.
    pub fn last(&self) -> Option<(UnixMillis, Arc<Holds>)> {
        self.last.as_ref().map(|last| (last.at, Arc::clone(&last.holds)))
    }

    /// The live holds at `now`.
    pub fn resolve(&mut self, state: &ClusterState, now: UnixMillis) -> Arc<Holds> {
        if let Some(last) = self.last.as_ref().filter(|last| last.is_current(state, now)) {
            return Arc::clone(&last.holds);
        }
        let holds = Arc::new(resolve(state, now));
        let until = state.held_after(now).next().map_or(UnixMillis::MAX, |(until, _)| *until);
        let revision = (state.revision, state.hold_revision);
        self.last = Some(Resolved { holds: Arc::clone(&holds), revision, at: now, until });
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
    if !open.is_empty() {
        assign_successors(state, &mut holds, open);
    }
    for (name, live) in &mut holds.by_claim {
        if let Some(node) = state.claims.get(name).and_then(|claim| state.node_of(claim)) {
            drop_overcommitted(state, node, live);
        }
    }
    // A pod that several plans name has the first of the holds that are left: its withdrawal from the other plans failed.
    holds.by_pod.clear();
    for (name, live) in &mut holds.by_claim {
        live.retain(|hold| {
            let Some(pod) = &hold.pod else { return true };
            holds.by_pod.entry(pod.clone()).or_insert_with(|| name.clone()) == name
        });
    }
    holds.by_claim.retain(|_, live| !live.is_empty());
    holds
}

/// Assigns the room of displaced pods that are gone, by NodeClaim, to new pods of the same controllers.
fn assign_successors(state: &ClusterState, holds: &mut Holds, open: BTreeMap<&String, Vec<(&String, &Owner)>>) {
    for (name, originals) in open {
        let Some(planned) = state.planned.get(name) else { continue };
        let node = state.claims.get(name).and_then(|claim| state.node_of(claim)).map(|node| node.name_any());
        let mut of_owner: BTreeMap<(&str, &str), Vec<(&String, &Owner)>> = BTreeMap::new();
        for (original, owner) in originals {
            let namespace = original.split_once('/').map_or("", |(namespace, _)| namespace);
            of_owner.entry((namespace, &owner.uid)).or_default().push((original, owner));
        }
        for ((namespace, uid), originals) in of_owner {
            // A UID may be copied to another namespace.
            let own = |pod: &&PodRecord| pod.active() && pod.namespace == namespace;
            let pods: Vec<&PodRecord> = state.pods_of(uid).filter(own).collect();
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

#[cfg(test)]
mod tests;
