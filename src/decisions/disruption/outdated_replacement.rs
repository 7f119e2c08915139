//! Replacement of outdated nodes (Karpenter core reference 4.12). Their pods need other nodes first, as in consolidation; the price does
//! not matter.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use stowage_model::time::UnixMillis;

use crate::decisions::disruption::candidates::{PoolAllowance, allowances};
use crate::decisions::disruption::outdated::{OutdatedNode, PoolKind, order, outdated};
use crate::decisions::disruption::reason::DisruptionReason;
use crate::state::plan_record::Holds;
use crate::state::tables::ClusterState;

/// Maximum number of nodes that one pass simulates.
const MAX_CANDIDATES: usize = 20;
/// Backoff of a node whose pods have no other node.
const BLOCKED_BACKOFF: Duration = Duration::from_mins(1);

/// Outdated nodes that could not be replaced, by claim, with the end of their backoff.
#[derive(Debug, Default)]
pub struct OutdatedReplacement {
    backoff_until: BTreeMap<String, UnixMillis>,
}

impl OutdatedReplacement {
    /// Records that the replacement of a node was rolled back. It is left alone for at least this time.
    pub fn abandoned(&mut self, claim: &str, at_least: Duration, now: UnixMillis) {
        self.backoff_until.insert(claim.to_owned(), now + at_least);
    }

    /// Records that the pods of a node have no other node.
    pub fn blocked(&mut self, claim: &str, now: UnixMillis) {
        self.backoff_until.insert(claim.to_owned(), now + BLOCKED_BACKOFF);
    }

    /// Begins a pass over the nodes that are outdated for this reason.
    pub fn begin(
        &mut self,
        state: &ClusterState,
        holds: &Holds,
        reason: DisruptionReason,
        now: UnixMillis,
    ) -> OutdatedPass {
        self.pass(&outdated(state, holds, PoolKind::Dynamic, reason, now), allowances(state, reason, now), now)
    }

    /// Claims that are left alone now.
    pub fn backed_off(&mut self, now: UnixMillis) -> BTreeSet<String> {
        self.backoff_until.retain(|_, until| *until > now);
        self.backoff_until.keys().cloned().collect()
    }

    fn pass(
        &mut self,
        nodes: &[OutdatedNode],
        allowances: BTreeMap<String, PoolAllowance>,
        now: UnixMillis,
    ) -> OutdatedPass {
        let backed_off = self.backed_off(now);
        let blocked = nodes.iter().filter_map(|node| Some((node.claim.clone(), node.blocked_by.as_ref()?.to_string())));
        OutdatedPass {
            blocked: blocked.collect(),
            order: order(nodes, &backed_off).into_iter().cloned().collect(),
            allowances,
            chosen: BTreeSet::new(),
            simulated: 0,
        }
    }
}

/// One pass over outdated nodes.
#[derive(Debug)]
pub struct OutdatedPass {
    /// Claims whose nodes may not be disrupted now, and why.
    pub blocked: Vec<(String, String)>,
    /// Nodes to try, in this order.
    pub order: Vec<OutdatedNode>,
    allowances: BTreeMap<String, PoolAllowance>,
    chosen: BTreeSet<String>,
    simulated: usize,
}

/// What to do with an outdated node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OutdatedAttempt {
    /// Its pool allows no more disruptions.
    OverBudget,
    /// The pass has simulated as many nodes as it may.
    EndPass,
    /// It has no pods: it is replaced.
    Accept,
    /// Simulate the removal of these claims: its own and those accepted.
    Simulate(BTreeSet<String>),
}

impl OutdatedPass {
    /// What to do with the next node.
    pub fn attempt(&mut self, node: &OutdatedNode) -> OutdatedAttempt {
        if self.allowances.get(&node.pool).is_none_or(|allowance| allowance.nodes <= 0) {
            return OutdatedAttempt::OverBudget;
        }
        if node.pods == 0 {
            return OutdatedAttempt::Accept;
        }
        self.simulated += 1;
        if self.simulated > MAX_CANDIDATES {
            return OutdatedAttempt::EndPass;
        }
        let mut without = self.chosen.clone();
        without.insert(node.claim.clone());
        OutdatedAttempt::Simulate(without)
    }

    /// Accepts a node.
    pub fn accept(&mut self, node: &OutdatedNode) {
        if let Some(allowance) = self.allowances.get_mut(&node.pool) {
            allowance.nodes -= 1;
        }
        self.chosen.insert(node.claim.clone());
    }

    /// The claims of the accepted nodes.
    pub fn finish(self) -> BTreeSet<String> {
        self.chosen
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decisions::disruption::blockers::Blocker;

    fn node(claim: &str, pods: usize, blocked_by: Option<Blocker>) -> OutdatedNode {
        OutdatedNode { claim: claim.into(), pool: "p".into(), since: UnixMillis(0), pods, blocked_by }
    }

    fn allowances(nodes: i64) -> BTreeMap<String, PoolAllowance> {
        BTreeMap::from([("p".to_owned(), PoolAllowance { consolidate_after: None, nodes })])
    }

    #[test]
    fn drifted_nodes_are_removed_cumulatively_within_the_budget() {
        let mut replacement = OutdatedReplacement::default();
        let nodes = [
            node("a", 1, None),
            node("b", 1, None),
            node("empty", 0, None),
            node("protected", 1, Some(Blocker::NodeProtected)),
        ];
        let mut pass = replacement.pass(&nodes, allowances(2), UnixMillis(0));
        assert_eq!(pass.blocked, [("protected".to_owned(), Blocker::NodeProtected.to_string())]);
        let [empty, a, b] = [&nodes[2], &nodes[0], &nodes[1]];
        assert_eq!(pass.order.iter().collect::<Vec<_>>(), [empty, a, b]);
        assert_eq!(pass.attempt(empty), OutdatedAttempt::Accept);
        pass.accept(empty);
        let with_empty = |name: &str| OutdatedAttempt::Simulate(["empty".to_owned(), name.to_owned()].into());
        assert_eq!(pass.attempt(a), with_empty("a"));
        assert_eq!(pass.attempt(b), with_empty("b"), "the simulation of the other was not complete");
        pass.accept(b);
        assert_eq!(pass.attempt(a), OutdatedAttempt::OverBudget);
        assert_eq!(pass.finish(), ["b".to_owned(), "empty".to_owned()].into());
        let unknown = OutdatedNode { pool: "deleted".into(), ..node("a", 0, None) };
        assert_eq!(replacement.pass(&[], allowances(2), UnixMillis(0)).attempt(&unknown), OutdatedAttempt::OverBudget);
    }

    #[test]
    fn one_pass_simulates_at_most_twenty_nodes() {
        let mut pass = OutdatedReplacement::default().pass(&[], allowances(100), UnixMillis(0));
        for _ in 0..MAX_CANDIDATES {
            assert!(matches!(pass.attempt(&node("a", 1, None)), OutdatedAttempt::Simulate(_)));
        }
        assert_eq!(pass.attempt(&node("empty", 0, None)), OutdatedAttempt::Accept);
        assert_eq!(pass.attempt(&node("a", 1, None)), OutdatedAttempt::EndPass);
    }

    #[test]
    fn a_node_that_could_not_be_replaced_is_tried_again_after_its_backoff() {
        let mut replacement = OutdatedReplacement::default();
        replacement.blocked("blocked", UnixMillis(0));
        replacement.abandoned("abandoned", Duration::from_mins(10), UnixMillis(0));
        let nodes = [node("blocked", 1, None), node("abandoned", 1, None)];
        for (now, expected) in [
            (59_999, vec![]),
            (60_000, vec!["blocked"]),
            (599_999, vec!["blocked"]),
            (600_000, vec!["abandoned", "blocked"]),
        ] {
            let pass = replacement.pass(&nodes, allowances(9), UnixMillis(now));
            assert_eq!(pass.order.iter().map(|node| node.claim.as_str()).collect::<Vec<_>>(), expected, "at {now}");
        }
    }
}
