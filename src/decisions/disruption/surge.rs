//! Surge before evict: when the pods of a move's source that surge leave their ReplicaSets, when their successors are ready, and which pods go back.
//!
//! A pod without the label `pod-template-hash` does not belong to its ReplicaSet, which creates another one in its place; Services still select it. Its
//! successor has the room that the move keeps. With the label, the pod belongs to the ReplicaSet again, which deletes one pod too many: first of all
//! those that are not ready.

use kube::ResourceExt;
use stowage_api::NodeClaim;

use crate::decisions::pod_ref::PodRef;
use crate::state::object_ext::{NodeClaimExt, ObjectExt};
use crate::state::pods::PodRecord;
use crate::state::surging_pods::Surge;
use crate::state::tables::ClusterState;

/// A pod that leaves its ReplicaSet, or goes back to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Surging {
    pub pod: PodRef,
    /// Its annotation while it is away.
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
    let leave: Vec<Surging> = pods().filter(|pod| pod.reschedulable()).filter_map(|pod| leaving(state, pod)).collect();
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
    let surging = |pod: &PodRecord| Some(Surging { pod: PodRef::of(pod), surge: pod.surge.as_deref()?.clone() });
    pods.filter(stays).filter_map(surging).collect()
}

fn leaving(state: &ClusterState, pod: &PodRecord) -> Option<Surging> {
    let surge = pod.surge.as_deref().filter(|_| pod.will_surge())?;
    let ready = Some(ready_pods(state, &pod.namespace, &surge.uid));
    Some(Surging { pod: PodRef::of(pod), surge: Surge { ready, ..surge.clone() } })
}

/// How many pods that belong to a ReplicaSet are ready.
fn ready_pods(state: &ClusterState, namespace: &str, uid: &str) -> usize {
    let belongs = |pod: &&PodRecord| pod.namespace == namespace && !pod.has_surged();
    state.pods_of(uid).filter(belongs).filter(|pod| pod.is_ready() && pod.active() && pod.deleted_at.is_none()).count()
}

/// Whether the pod left its ReplicaSet and still runs.
fn is_left(pod: &PodRecord) -> bool {
    pod.has_surged() && pod.active() && pod.deleted_at.is_none()
}

/// Whether as many pods of its ReplicaSet are ready as there were when it left, and when others left that still run: nothing says which successor is
/// whose.
fn has_ready_successor(state: &ClusterState, pod: &PodRecord) -> bool {
    let Some(surge) = pod.surge.as_deref() else { return true };
    let others = state.surged.iter().filter_map(|key| state.pods.get(key));
    let left = others.filter(|other| other.namespace == pod.namespace && is_left(other));
    let of_same = left.filter_map(|other| other.surge.as_deref()).filter(|other| other.uid == surge.uid);
    let before = of_same.filter_map(|other| other.ready).max().unwrap_or(0);
    ready_pods(state, &pod.namespace, &surge.uid) >= before
}

#[cfg(test)]
mod tests;
