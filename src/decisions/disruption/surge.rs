//! Surge before evict: when the pods of a move's source that surge leave their ReplicaSets, when their successors are ready, and which pods go back.
//!
//! A pod without the label `pod-template-hash` does not belong to its ReplicaSet, which creates another one in its place; Services still select it. Its
//! successor has the room that the move keeps. With the label, the pod belongs to the ReplicaSet again, which deletes one pod too many: first of all
//! those that are not ready.

use kube::ResourceExt;

use crate::api::NodeClaim;
use crate::decisions::pod_ref::PodRef;
use crate::model::time::UnixMillis;
use crate::state::object_ext::{NodeClaimExt, ObjectExt};
use crate::state::pods::PodRecord;
use crate::state::surge::Surge;
use crate::state::tables::ClusterState;

/// A pod that leaves its ReplicaSet, or goes back to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Surging {
    pub pod: PodRef,
    pub surge: Surge,
}

/// What the nodes of a move wait for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// These pods leave their ReplicaSets.
    Leave(Vec<Surging>),
    /// The successors of pods that left are not ready.
    Successors,
    Nothing,
}

/// What is left to do before pods of these claims' nodes are evicted.
pub fn wanted<'c>(state: &ClusterState, claims: impl IntoIterator<Item = &'c NodeClaim>) -> Wanted {
    let nodes = claims.into_iter().filter_map(|claim| state.node_of(claim)).map(|node| node.name_any());
    let nodes: Vec<String> = nodes.collect();
    let pods = || nodes.iter().flat_map(|node| state.pods_on(node));
    let leave: Vec<Surging> = pods().filter(|pod| pod.reschedulable()).filter_map(|pod| surging(pod, false)).collect();
    if !leave.is_empty() {
        return Wanted::Leave(leave);
    }
    if pods().filter(|pod| is_left(pod)).all(|pod| has_ready_successor(state, pod)) {
        Wanted::Nothing
    } else {
        Wanted::Successors
    }
}

/// Pods that go back to their ReplicaSets: their nodes stay.
pub fn to_return(state: &ClusterState) -> Vec<Surging> {
    let stays = |pod: &&PodRecord| {
        let node = pod.node.as_deref().and_then(|node| state.nodes.get(node));
        let claim = node.and_then(|node| state.claim_of(node).filter(|_| !node.is_deleting()));
        is_left(pod) && claim.is_some_and(|claim| !claim.is_leaving())
    };
    let pods = state.surged.iter().filter_map(|key| state.pods.get(key));
    pods.filter(stays).filter_map(|pod| surging(pod, true)).collect()
}

fn surging(pod: &PodRecord, has_left: bool) -> Option<Surging> {
    let surge = pod.surge.as_deref().filter(|surge| surge.at.is_some() == has_left)?;
    Some(Surging { pod: PodRef::of(pod), surge: surge.clone() })
}

/// Whether the pod left its ReplicaSet and still runs.
fn is_left(pod: &PodRecord) -> bool {
    pod.has_surged() && pod.active() && pod.deleted_at.is_none()
}

/// Whether as many pods of its ReplicaSet are ready that were created since a pod left it as pods have left it in all, and none of the new ones is not
/// ready: they may be the successors of others.
fn has_ready_successor(state: &ClusterState, pod: &PodRecord) -> bool {
    let Some(surge) = pod.surge.as_deref() else { return true };
    let is_sibling = |other: &&PodRecord| {
        let of_same = other.surge.as_deref().is_some_and(|other| other.uid == surge.uid);
        of_same && other.namespace == pod.namespace && is_left(other)
    };
    let left = || state.surged.iter().filter_map(|key| state.pods.get(key)).filter(is_sibling);
    let since = left().filter_map(|pod| pod.surge.as_ref()?.at).min().unwrap_or(UnixMillis::MIN).whole_seconds();
    let is_new = |other: &&PodRecord| {
        let created = other.entry.as_ref().map_or(UnixMillis::MIN, |entry| entry.created_at);
        other.namespace == pod.namespace
            && other.active()
            && other.deleted_at.is_none()
            && !other.has_surged()
            && created >= since
    };
    let new = || state.pods_of(&surge.uid).filter(is_new);
    new().count() >= left().count() && new().all(|successor| successor.node.is_some() && successor.ready)
}

#[cfg(test)]
mod tests;
