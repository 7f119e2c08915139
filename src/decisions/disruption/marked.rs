//! Claims marked for voluntary disruption: the next step of those marked as empty, and marks and taints that nothing stands behind.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;
use stowage_api::NodeClaim;
use stowage_api::conditions::DISRUPTION_REASON;
use stowage_model::time::UnixMillis;

use crate::decisions::disruption::candidates::pods_to_reschedule;
use crate::decisions::disruption::emptiness::{EmptyNodeStep, next_step};
use crate::decisions::disruption::mark::{DisruptionMark, is_tainted};
use crate::decisions::disruption::progress::source_of;
use crate::decisions::disruption::reason::DisruptionReason;
use crate::state::object_ext::{NodeClaimExt, ObjectExt};
use crate::state::plan_record::Holds;
use crate::state::tables::ClusterState;

/// How long a mark or a taint that nothing stands behind is left alone: its writer may not be done.
const STRAY: Duration = Duration::from_secs(30);

/// What is remembered between two passes. A new process starts over.
#[derive(Debug, Default)]
pub struct MarkedNodes {
    /// Claims marked as empty and tainted, with the time when that was first observed.
    empty_since: BTreeMap<String, UnixMillis>,
    /// Strays, with the time when they were first observed.
    stray_since: BTreeMap<String, UnixMillis>,
}

impl MarkedNodes {
    /// The next step of each claim marked as empty.
    pub fn empty_steps(
        &mut self,
        state: &ClusterState,
        holds: &Holds,
        now: UnixMillis,
    ) -> Vec<(Arc<NodeClaim>, EmptyNodeStep)> {
        let is_empty = |claim: &&Arc<NodeClaim>| {
            let mark = DisruptionMark::of(claim);
            !claim.is_deleting() && mark.is_some_and(|mark| mark.reason == DisruptionReason::Empty)
        };
        self.empty_since.retain(|name, _| state.claims.get(name).as_ref().is_some_and(is_empty));
        let marked = state.claims.values().filter(is_empty);
        marked
            .map(|claim| {
                let name = claim.name_any();
                let since = *self.empty_since.entry(name.clone()).or_insert(now);
                let tainted = state.node_of(claim).is_none_or(|node| is_tainted(node));
                let step = next_step(pods_to_reschedule(state, holds, claim), tainted, since, now);
                if step == EmptyNodeStep::Taint {
                    self.empty_since.insert(name, now);
                }
                (Arc::clone(claim), step)
            })
            .collect()
    }

    /// Marked claims whose Node lacks the taint: the mark was written and the taint was not. Those of empty nodes are left to
    /// [`Self::empty_steps`].
    pub fn untainted(state: &ClusterState) -> Vec<Arc<NodeClaim>> {
        let lacks_taint = |claim: &&Arc<NodeClaim>| {
            let mark = DisruptionMark::of(claim).filter(|_| !claim.is_deleting());
            mark.is_some_and(|mark| mark.reason != DisruptionReason::Empty)
                && state.node_of(claim).is_some_and(|node| !is_tainted(node))
        };
        let marked = state.claim_index.leaving.iter().filter_map(|name| state.claims.get(name));
        marked.filter(lacks_taint).cloned().collect()
    }

    /// Claims and Nodes that are marked or tainted for [`STRAY`] although nothing stands behind it: a mark for a voluntary disruption without a move,
    /// and a taint without a mark, of an earlier version, of Karpenter, or of a process that crashed.
    pub fn strays(&mut self, state: &ClusterState, now: UnixMillis) -> Vec<Arc<NodeClaim>> {
        let marked = state
            .claim_index
            .leaving
            .iter()
            .filter_map(|name| state.claims.get(name))
            .filter(|claim| has_stray_mark(claim));
        let is_stray =
            |claim: &&Arc<NodeClaim>, node: &Node| !claim.is_leaving() && !node.is_deleting() && is_tainted(node);
        let tainted =
            state.nodes.values().filter_map(|node| state.claim_of(node).filter(|claim| is_stray(claim, node)));
        let strays: BTreeMap<String, Arc<NodeClaim>> =
            marked.chain(tainted).map(|claim| (claim.name_any(), Arc::clone(claim))).collect();
        self.stray_since.retain(|name, since| strays.contains_key(name) && *since <= now);
        let mut due = strays;
        due.retain(|name, _| self.stray_since.entry(name.clone()).or_insert(now).is_older_than(STRAY, now));
        due.into_values().collect()
    }
}

/// Claims whose condition DisruptionReason is not that of their mark, with the reason that it should have; `None` to clear it. A claim that another
/// cause removes keeps the condition.
pub fn unreported_reasons(state: &ClusterState) -> Vec<(Arc<NodeClaim>, Option<DisruptionReason>)> {
    let unreported = |claim: &Arc<NodeClaim>| {
        let condition = claim.condition(DISRUPTION_REASON);
        let Some(mark) = DisruptionMark::of(claim) else {
            return (condition.is_some() && !claim.is_deleting()).then_some(None);
        };
        let is_reported = condition.is_some_and(|known| known.reason == mark.reason.as_str() && known.status == "True");
        (mark.is_voluntary() && !is_reported).then_some(Some(mark.reason))
    };
    state.claims.values().filter_map(|claim| Some((Arc::clone(claim), unreported(claim)?))).collect()
}

fn has_stray_mark(claim: &NodeClaim) -> bool {
    let mark = DisruptionMark::of(claim).filter(|mark| mark.deadline.is_none() && !claim.is_deleting());
    mark.is_some_and(|mark| mark.reason != DisruptionReason::Empty) && source_of(claim).is_none()
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use stowage_model::labels;
    use stowage_test_objects as objects;

    use super::*;
    use crate::decisions::holds::resolve;

    /// The claim `c` with this mark, its node with this taint, and a pod if it is `occupied`.
    fn state(mark: Option<&str>, taint: &str, occupied: bool) -> ClusterState {
        let mut state = ClusterState::default();
        let meta = json!({"annotations": {(labels::DISRUPTING): mark}});
        state.apply_claim(objects::claim("c", &json!({"metadata": meta, "status": objects::launched("i-1", &[])})));
        let taints = json!([{"key": taint, "effect": "NoSchedule"}]);
        let spec = json!({"providerID": "aws:///z/i-1", "taints": taints});
        state.apply_node(objects::node("x", &json!({"spec": spec})));
        if occupied {
            let owner =
                json!({"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "r", "controller": true});
            let pod = json!({"metadata": {"ownerReferences": [owner]}, "spec": {"nodeName": "x"}});
            state.apply_pod(&objects::pod("a", &pod), UnixMillis(1));
        }
        state
    }

    #[test]
    fn the_settling_period_of_an_empty_node_starts_with_its_taint_and_its_mark() {
        let mut marked = MarkedNodes::default();
        let mut step = |mark, taint, occupied, now| {
            let state = state(mark, taint, occupied);
            let steps = marked.empty_steps(&state, &resolve(&state, UnixMillis(now)), UnixMillis(now));
            steps.into_iter().map(|(_, step)| step).next()
        };
        let (empty, taint) = (Some("Empty/"), labels::DISRUPTED_TAINT);
        assert_eq!(step(empty, "team", false, 0), Some(EmptyNodeStep::Taint));
        assert_eq!(step(empty, "team", false, 5_000), Some(EmptyNodeStep::Taint), "the taint was not written");
        assert_eq!(step(empty, taint, false, 6_999), Some(EmptyNodeStep::Wait));
        assert_eq!(step(empty, taint, false, 7_000), Some(EmptyNodeStep::Delete));
        assert_eq!(step(empty, taint, true, 7_000), Some(EmptyNodeStep::Unmark));
        assert_eq!(step(None, taint, false, 7_000), None);
        assert_eq!(step(empty, taint, false, 7_000), Some(EmptyNodeStep::Wait), "another mark");
        assert_eq!(step(Some("Drifted/"), taint, false, 99_000), None);
    }

    #[test]
    fn strays_are_found_thirty_seconds_after_they_were_first_observed() {
        let mut marked = MarkedNodes::default();
        let mut strays = |mark, taint, now| marked.strays(&state(mark, taint, true), UnixMillis(now)).len();
        let taint = labels::DISRUPTED_TAINT;
        assert_eq!([0, 29_999, 30_000].map(|now| strays(Some("Drifted/"), "team", now)), [0, 0, 1]);
        assert_eq!([31_000, 61_000].map(|now| strays(None, taint, now)), [1, 1], "the same node");
        assert_eq!(strays(None, "team", 62_000), 0);
        assert_eq!([63_000, 92_999, 93_000].map(|now| strays(None, taint, now)), [0, 0, 1], "another stray");
        assert_eq!(strays(Some("SpotInterruption/2026-01-01T00:02:00Z"), taint, 999_000), 0);
        assert_eq!(strays(Some("Empty/"), taint, 999_000), 0);
    }
}
