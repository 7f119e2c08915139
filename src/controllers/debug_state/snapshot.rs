//! The copy of the state that a document is written from.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;
use std::time::Duration;

use kube::ResourceExt;
use stowage_api::NodeClaim;
use stowage_model::pause::Pause;
use stowage_model::pod_class::PodClass;
use stowage_model::time::UnixMillis;

use crate::cloud::offering_state::OfferingState;
use crate::decisions::disruption::reason::DisruptionReason;
use crate::decisions::last_decisions::{LastConsolidation, LastPlan};
use crate::decisions::provisioning::quarantine::Cause;
use crate::decisions::provisioning::unschedulable::in_turns;
use crate::state::ClusterState;
use crate::state::plan_record::Holds;
use crate::state::pods::{PodRecord, Scheduling};
use crate::sync::heartbeat::Turn;

/// Maximum number of entries of each list.
pub const MAX_ENTRIES: usize = 1_000;
/// Maximum number of pods without a node that are examined for pending ones.
const MAX_EXAMINED: usize = 10_000;
/// The same of one namespace, so that none hides the others.
const MAX_EXAMINED_PER_NAMESPACE: usize = 1_000;

/// The first entries of a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Capped<T> {
    pub items: Vec<T>,
    /// Number of entries that are left out.
    pub truncated: usize,
}

impl<T> Capped<T> {
    /// The first [`MAX_ENTRIES`] of `total` entries.
    pub fn of(items: impl Iterator<Item = T>, total: usize) -> Self {
        let items: Vec<T> = items.take(MAX_ENTRIES).collect();
        let truncated = total.saturating_sub(items.len());
        Self { items, truncated }
    }
}

impl<T> Default for Capped<T> {
    fn default() -> Self {
        Self { items: Vec::new(), truncated: 0 }
    }
}

/// What a replica believes at one moment.
#[derive(Debug)]
pub struct Snapshot {
    pub now: UnixMillis,
    pub process: Process,
    /// Kind, age of its last sign, number of lists.
    pub watches: Vec<(&'static str, Duration, u64)>,
    pub cluster: ClusterCopy,
    /// The holds that were resolved last, and when.
    pub holds: Option<(UnixMillis, Arc<Holds>)>,
    /// Of the leader only.
    pub leader: Option<LeaderCopy>,
}

/// What the process knows about itself.
#[derive(Debug, Default)]
pub struct Process {
    pub version: &'static str,
    pub leading_since: Option<UnixMillis>,
    /// Why it is not ready.
    pub not_ready: Vec<&'static str>,
    /// The turns of its loops.
    pub turns: Vec<Turn>,
}

/// From the tables of the watched objects.
#[derive(Debug, Default)]
pub struct ClusterCopy {
    /// `None` before it was read.
    pub pause: Option<Pause>,
    /// Kind and number of objects.
    pub counts: Vec<(&'static str, usize)>,
    pub pending: Capped<PendingPod>,
    /// NodeClaims without a Node.
    pub in_flight: Capped<Arc<NodeClaim>>,
    /// NodeClaims that are deleted or marked, with the name of their Node.
    pub leaving: Capped<(Arc<NodeClaim>, Option<String>)>,
}

/// A pod that the scheduler found no node for.
#[derive(Debug)]
pub struct PendingPod {
    /// `namespace/name`.
    pub key: String,
    pub since: UnixMillis,
    /// Its class, or the error of its spec.
    pub class: Result<Arc<PodClass>, String>,
}

/// What only the leader has.
#[derive(Debug, Default)]
pub struct LeaderCopy {
    pub last_plan: Option<Arc<LastPlan>>,
    pub last_consolidation: Option<LastConsolidation>,
    /// The nodes that would be disrupted, while disruption is only reported.
    pub reported: Capped<(String, DisruptionReason)>,
    /// Why each of [`ClusterCopy::pending`] is left out of plans.
    pub causes: Vec<Option<Cause>>,
    /// Namespace, cause and end, by pod class.
    pub pods_left_out: Capped<(Arc<str>, Cause, UnixMillis)>,
    /// Kind, name and end.
    pub supply_left_out: Capped<(&'static str, String, UnixMillis)>,
    /// Action, cap per minute, what is left of it.
    pub caps: Vec<(&'static str, usize, usize)>,
    pub offerings: Option<OfferingState>,
}

impl ClusterCopy {
    /// Copies from the tables: the work is bounded, whatever their size.
    pub fn of(state: &ClusterState) -> Self {
        let claim = |name: &String| state.claims.get(name).map(Arc::clone);
        let node = |claim: Arc<NodeClaim>| {
            let node = state.node_of(&claim).map(|node| node.name_any());
            (claim, node)
        };
        let leaving = &state.claim_index.leaving;
        Self {
            pause: state.pause,
            counts: vec![
                ("nodes", state.nodes.len()),
                ("nodeclaims", state.claims.len()),
                ("nodepools", state.pools.len()),
                ("ec2nodeclasses", state.classes.len()),
                ("pods", state.pods.len()),
                ("pods_without_node", state.unbound.len()),
            ],
            pending: pending(state),
            in_flight: Capped::of(state.in_flight.iter().filter_map(claim), state.in_flight.len()),
            leaving: Capped::of(leaving.iter().filter_map(claim).map(node), leaving.len()),
        }
    }
}

/// Pending pods, namespaces in turns, among the first pods without a node of each namespace. Those that are not examined count as left
/// out.
fn pending(state: &ClusterState) -> Capped<PendingPod> {
    let mut found: BTreeMap<&str, Vec<(&PodRecord, UnixMillis)>> = BTreeMap::new();
    let (mut examined, mut next) = (0, state.unbound.iter().next());
    while let Some((namespace, _)) = next.filter(|_| examined < MAX_EXAMINED).and_then(|key| key.split_once('/')) {
        // The character after the slash: the keys of a namespace are next to each other.
        let end = format!("{namespace}0");
        let most = MAX_EXAMINED_PER_NAMESPACE.min(MAX_EXAMINED - examined);
        let first = format!("{namespace}/");
        let keys = state.unbound.range::<str, _>((Bound::Included(&*first), Bound::Excluded(&*end))).take(most);
        for pod in
            keys.inspect(|_| examined += 1).filter_map(|key| state.pods.get(key)).filter(|pod| pod.unschedulable())
        {
            if let Scheduling::Unschedulable { since, .. } = pod.scheduling {
                found.entry(&pod.namespace).or_default().push((pod, since));
            }
        }
        next = state.unbound.range::<str, _>((Bound::Included(&*end), Bound::Unbounded)).next();
    }
    let total = found.values().map(Vec::len).sum::<usize>() + state.unbound.len().saturating_sub(examined);
    let pending = in_turns(found, MAX_ENTRIES).into_iter().map(|(pod, since)| {
        let class = pod.entry.as_ref().map(|entry| Arc::clone(&entry.class)).map_err(Clone::clone);
        PendingPod { key: pod.key(), since, class }
    });
    Capped::of(pending, total)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::test_support::objects;

    fn put(state: &mut ClusterState, namespace: &str, name: &str, rejected: bool) {
        let condition = json!({"type": "PodScheduled", "status": "False", "reason": "Unschedulable"});
        let conditions = if rejected { json!([condition]) } else { json!([]) };
        let patch = json!({"metadata": {"namespace": namespace}, "status": {"conditions": conditions}});
        state.apply_pod(&objects::pod(name, &patch), UnixMillis(1));
    }

    #[test]
    fn lists_are_capped_and_count_what_they_leave_out() {
        let mut state = ClusterState::default();
        for index in 0..MAX_ENTRIES + 3 {
            state.apply_claim(objects::claim(&format!("c{index:06}"), &json!({})));
        }
        let copy = ClusterCopy::of(&state);
        assert_eq!((copy.in_flight.items.len(), copy.in_flight.truncated), (MAX_ENTRIES, 3));
        assert_eq!((copy.leaving.items.len(), copy.leaving.truncated), (0, 0));
        assert!(copy.counts.contains(&("nodeclaims", MAX_ENTRIES + 3)));
    }

    #[test]
    fn a_namespace_with_many_pods_hides_no_pending_pod_of_another() {
        let mut state = ClusterState::default();
        for index in 0..MAX_EXAMINED_PER_NAMESPACE + 7 {
            put(&mut state, "a", &format!("p{index:06}"), true);
            put(&mut state, "a-b", &format!("p{index:06}"), false);
        }
        for namespace in ["a.b", "a0", "b", "b-"] {
            put(&mut state, namespace, "pending", true);
            put(&mut state, namespace, "untried", false);
        }
        let copy = ClusterCopy::of(&state);
        let keys: Vec<&str> = copy.pending.items.iter().map(|pod| pod.key.as_str()).collect();
        assert_eq!(keys[..6], ["a/p000000", "a.b/pending", "a0/pending", "b/pending", "b-/pending", "a/p000001"]);
        assert_eq!((keys.len(), copy.pending.truncated), (MAX_ENTRIES, 4 + 7 + 7));
    }
}
