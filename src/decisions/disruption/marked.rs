//! Claims marked for voluntary disruption: the next step of those marked as empty, and when the others are abandoned.

use std::collections::BTreeMap;
use std::sync::Arc;

use kube::ResourceExt;

use crate::api::NodeClaim;
use crate::decisions::disruption::candidates::pods_to_reschedule;
use crate::decisions::disruption::departure::abandon_after;
use crate::decisions::disruption::emptiness::{EmptyNodeStep, next_step};
use crate::decisions::disruption::mark::{DisruptionMark, is_tainted};
use crate::decisions::disruption::reason::DisruptionReason;
use crate::model::time::UnixMillis;
use crate::state::object_ext::ObjectExt;
use crate::state::plan_record::Holds;
use crate::state::tables::ClusterState;

/// What is remembered between two passes. A new process starts over.
#[derive(Debug, Default)]
pub struct MarkedNodes {
    /// Claims marked as empty and tainted, with the time when that was first observed.
    empty_since: BTreeMap<String, UnixMillis>,
    /// Claims marked as drifted or underutilized, with the time when that was first observed.
    since: BTreeMap<String, UnixMillis>,
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

    /// Marked claims whose pods have found no other node in time.
    pub fn abandoned(&mut self, state: &ClusterState, now: UnixMillis) -> Vec<Arc<NodeClaim>> {
        let timeout = |claim: &NodeClaim| {
            DisruptionMark::of(claim).filter(|_| !claim.is_deleting()).and_then(|mark| abandon_after(mark.reason))
        };
        self.since.retain(|name, _| state.claims.get(name).is_some_and(|claim| timeout(claim).is_some()));
        let marked = state.claims.values().filter_map(|claim| Some((claim, timeout(claim)?)));
        marked
            .filter(|(claim, timeout)| self.since.entry(claim.name_any()).or_insert(now).is_older_than(*timeout, now))
            .map(|(claim, _)| Arc::clone(claim))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::decisions::holds::resolve;
    use crate::model::labels;
    use crate::test_support::objects;

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
    fn a_replacement_is_abandoned_after_the_timeout_of_its_reason() {
        let mut marked = MarkedNodes::default();
        let mut abandoned = |mark, now| marked.abandoned(&state(mark, "team", true), UnixMillis(now)).len();
        let minute = 60_000;
        assert_eq!(abandoned(Some("Underutilized/"), 0), 0);
        assert_eq!(abandoned(Some("Underutilized/"), 5 * minute - 1), 0);
        assert_eq!(abandoned(Some("Underutilized/"), 5 * minute), 1);
        assert_eq!(abandoned(None, 5 * minute), 0);
        assert_eq!(abandoned(Some("Drifted/"), 6 * minute), 0, "another mark");
        assert_eq!(abandoned(Some("Drifted/"), 16 * minute - 1), 0);
        assert_eq!(abandoned(Some("Drifted/"), 16 * minute), 1);
        assert_eq!(abandoned(Some("SpotInterruption/2026-01-01T00:02:00Z"), 99 * minute), 0, "never");
    }
}
