//! Which pods need a node, and which NodePools may launch one.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use kube::ResourceExt;
use stowage_api::{NodeClaim, NodePool, conditions};
use stowage_model::labels;
use stowage_model::pod_class::PodClass;
use stowage_model::time::UnixMillis;

use crate::decisions::disruption::mark::DisruptionMark;
use crate::state::object_ext::ObjectExt;
use crate::state::plan_record::Holds;
use crate::state::pods::{PodRecord, Scheduling};
use crate::state::snapshot::Demand;
use crate::state::tables::ClusterState;

/// Whether new nodes of the pool may be launched: it is Ready, not deleted, and not static (`spec.replicas`).
pub fn may_launch(pool: &NodePool) -> bool {
    !pool.is_deleting()
        && pool.spec.replicas.is_none()
        && pool.status.as_ref().is_some_and(|status| conditions::is_true(&status.conditions, conditions::READY))
}

/// A new pod that the scheduler has not attempted for this time waits for something else than the scheduler.
const UNATTEMPTED_PERIOD: Duration = Duration::from_secs(30);
/// As [`UNATTEMPTED_PERIOD`], in a burst: the scheduler is late.
const BURST_PERIOD: Duration = Duration::from_mins(5);

/// Pods that need a node.
pub fn demand(state: &ClusterState, holds: &Holds, now: UnixMillis) -> Demand {
    Demand { pending: pending(state, holds, now), displaced: displaced(state, holds) }
}

/// New pods without a hold that the scheduler has not attempted yet: they are about to need room.
pub fn unattempted(state: &ClusterState, holds: &Holds, now: UnixMillis) -> BTreeSet<String> {
    newer_than(UNATTEMPTED_PERIOD, state, holds, now).map(|(key, _)| key.clone()).collect()
}

/// New pods without a hold that a known scheduler has not attempted, and that are not older than this.
pub fn newer_than<'a>(
    period: Duration,
    state: &'a ClusterState,
    holds: &Holds,
    now: UnixMillis,
) -> impl Iterator<Item = (&'a String, &'a PodRecord)> {
    let is_new = move |pod: &PodRecord| {
        pod.scheduling == Scheduling::Unattempted
            && !pod.daemon
            && !pod.mirror
            && pod.active()
            && pod.deleted_at.is_none()
            && pod.entry.is_ok()
            && !pod.first_seen.is_older_than(period, now)
            && state.schedulers.has(pod)
    };
    let unbound = state.unbound.iter().filter(|key| !holds.by_pod.contains_key(*key));
    let pods = unbound.filter_map(|key| Some((key, state.pods.get(key)?)));
    pods.filter(move |(_, pod)| is_new(pod))
}

/// Pods of leaving nodes whose successors have a hold.
pub fn moved_pods(holds: &Holds) -> HashSet<&str> {
    holds.by_claim.values().flatten().filter(|hold| hold.owner.is_some()).map(|hold| &*hold.original).collect()
}

/// Pods without a hold that the scheduler rejected; and, while such pods wait, those that it has not attempted yet because it is late, or that are
/// of the class of a rejected pod. It would reject them, too, one after the other, and each attempt that fails is a write.
fn pending(state: &ClusterState, holds: &Holds, now: UnixMillis) -> BTreeSet<String> {
    let rejected = rejected(state);
    if rejected.is_empty() {
        return BTreeSet::new();
    }
    let class = |pod: &PodRecord| pod.entry.as_ref().map(|entry| Arc::as_ptr(&entry.class)).ok();
    let classes: HashSet<*const PodClass> = rejected.iter().filter_map(|(_, pod)| class(pod)).collect();
    let is_sibling = |pod: &PodRecord| class(pod).is_some_and(|class| classes.contains(&class));
    let in_burst = newer_than(BURST_PERIOD, state, holds, now)
        .filter(|(_, pod)| is_sibling(pod) || state.schedulers.is_late(pod, now));
    let without_hold = rejected.iter().filter(|(key, _)| !holds.by_pod.contains_key(*key)).copied();
    without_hold.chain(in_burst).map(|(key, _)| key.clone()).collect()
}

/// Pods that the scheduler rejected, and for which it makes no room by preemption.
fn rejected(state: &ClusterState) -> Vec<(&String, &PodRecord)> {
    let mut planned: HashMap<&str, BTreeSet<&String>> = HashMap::new();
    let mut out = Vec::new();
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
        if !preempting {
            out.push((key, pod));
        }
    }
    out
}

fn displaced(state: &ClusterState, holds: &Holds) -> BTreeSet<String> {
    let mut out = BTreeSet::new();
    let moved = moved_pods(holds);
    let leaving = state.claim_index.leaving.iter().filter_map(|name| state.claims.get(name));
    // A move has planned the pods of its sources itself, and is rolled back if one of them has no room any more.
    let of_move = |claim: &NodeClaim| {
        !claim.is_deleting() && DisruptionMark::of(claim).is_some_and(|mark| mark.deadline.is_none())
    };
    for claim in leaving.filter(|claim| !of_move(claim)) {
        let Some(node) = state.node_of(claim) else { continue };
        // A protected pod, or one whose eviction a PodDisruptionBudget refuses now, stays until then, unless the node has a deadline.
        // A node purchased for it would stay empty.
        let has_deadline = claim.spec.termination_grace_period.is_some()
            || claim.annotations().contains_key(labels::TERMINATION_TIMESTAMP)
            || claim.annotations().get(labels::DISRUPTING).is_some_and(|mark| !mark.ends_with('/'));
        for pod in state.pods_on(&node.name_any()).filter(|pod| pod.reschedulable()) {
            let key = pod.key();
            // A bare pod has no successor.
            let has_owner = pod.entry.as_ref().is_ok_and(|entry| entry.owner.is_some());
            let stays = || pod.do_not_disrupt || state.pod_budgets.block(pod).is_some();
            if has_owner && !moved.contains(&*key) && (has_deadline || !stays()) {
                out.insert(key);
            }
        }
    }
    out
}

#[cfg(test)]
mod tests;
