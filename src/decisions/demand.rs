//! Which pods need a node, and which NodePools may launch one.

use std::collections::{BTreeSet, HashMap};

use kube::ResourceExt;

use crate::api::{NodePool, conditions};
use crate::model::labels;
use crate::state::object_ext::ObjectExt;
use crate::state::plan_record::Holds;
use crate::state::snapshot::Demand;
use crate::state::tables::ClusterState;

/// Whether new nodes of the pool may be launched: it is Ready, not deleted, and not static (`spec.replicas`).
pub fn may_launch(pool: &NodePool) -> bool {
    !pool.is_deleting()
        && pool.spec.replicas.is_none()
        && pool.status.as_ref().is_some_and(|status| conditions::is_true(&status.conditions, conditions::READY))
}

/// Pods that need a node when the claims in `without` leave too.
pub fn demand(state: &ClusterState, holds: &Holds, without: &BTreeSet<String>) -> Demand {
    Demand { pending: pending(state, holds), displaced: displaced(state, holds, without) }
}

fn pending(state: &ClusterState, holds: &Holds) -> BTreeSet<String> {
    let mut planned: HashMap<&str, BTreeSet<&String>> = HashMap::new();
    let mut out = BTreeSet::new();
    for key in &state.unbound {
        let Some(pod) = state.pods.get(key).filter(|pod| pod.unschedulable() && pod.entry.is_ok()) else {
            continue;
        };
        // A nomination that does not follow a plan is the scheduler's own: it preempts pods on that node.
        let preempting = pod.nominated.as_deref().is_some_and(|node| {
            let has_victims = state.pods_on(node).any(|pod| pod.deleted_at.is_some());
            has_victims
                && !state
                    .nodes
                    .get(node)
                    .and_then(|node| state.claim_of(node))
                    .and_then(|claim| state.planned.get(&claim.name_any()))
                    .is_some_and(|plan| planned.entry(node).or_insert_with(|| plan.pods.iter().collect()).contains(key))
        });
        if !preempting && !holds.by_pod.contains_key(key) {
            out.insert(key.clone());
        }
    }
    out
}

fn displaced(state: &ClusterState, holds: &Holds, without: &BTreeSet<String>) -> BTreeSet<String> {
    let mut out = BTreeSet::new();
    let has_hold: BTreeSet<&String> =
        holds.by_claim.values().flatten().filter(|hold| hold.owner.is_some()).map(|hold| &hold.original).collect();
    let leaving: BTreeSet<&String> = state.claim_index.leaving.iter().chain(without).collect();
    for claim in leaving.into_iter().filter_map(|name| state.claims.get(name)) {
        let Some(node) = state.node_of(claim) else { continue };
        // A protected pod runs to its end, unless the node has a deadline.
        let has_deadline = claim.spec.termination_grace_period.is_some()
            || claim.annotations().contains_key(labels::TERMINATION_TIMESTAMP)
            || claim.annotations().get(labels::DISRUPTING).is_some_and(|mark| !mark.ends_with('/'));
        for pod in state.pods_on(&node.name_any()).filter(|pod| pod.reschedulable()) {
            let key = pod.key();
            // A bare pod has no successor.
            let has_owner = pod.entry.as_ref().is_ok_and(|entry| entry.owner.is_some());
            if has_owner && (has_deadline || !pod.do_not_disrupt) && !has_hold.contains(&key) {
                out.insert(key);
            }
        }
    }
    out
}
