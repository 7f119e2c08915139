//! Empty-node consolidation: which empty nodes to mark, and what to do with marked ones.

use std::collections::BTreeMap;
use std::time::Duration;

use stowage_model::time::UnixMillis;

use crate::decisions::disruption::blockers::budget_block;
use crate::decisions::disruption::candidates::{Candidate, PoolAllowance, allowances, candidates};
use crate::decisions::disruption::node_facts::Facts;
use crate::decisions::disruption::reason::DisruptionReason;
use crate::state::plan_record::Holds;
use crate::state::tables::ClusterState;

/// Minimum time between the taint and the deletion of an empty node: pods that the scheduler was binding when the taint was
/// written are bound by then.
const SETTLING_PERIOD: Duration = Duration::from_secs(2);

/// Claims of empty nodes to remove, within the budgets of their pools.
pub fn removable(state: &ClusterState, holds: &Holds, facts: &Facts, now: UnixMillis) -> Vec<String> {
    let is_blocked = |node: &str| budget_block(state, node).is_some();
    choose(&candidates(state, holds, facts), &allowances(state, DisruptionReason::Empty, now), is_blocked, now)
}

/// Claims to mark as empty, in descending order of price, within each pool's allowance. `is_blocked` says whether a pod of a node cannot be
/// evicted now; it is asked only where nothing else keeps the node.
fn choose(
    candidates: &[Candidate<'_>],
    allowances: &BTreeMap<String, PoolAllowance>,
    is_blocked: impl Fn(&str) -> bool,
    now: UnixMillis,
) -> Vec<String> {
    let mut left: BTreeMap<&str, i64> = BTreeMap::new();
    let mut order: Vec<&Candidate<'_>> =
        candidates.iter().filter(|candidate| candidate.pods == 0 && candidate.facts.protection.is_none()).collect();
    order.sort_by(|a, b| b.facts.price.cmp(&a.facts.price).then_with(|| a.facts.claim.cmp(&b.facts.claim)));
    let mut out = Vec::new();
    for candidate in order {
        let Some(allowance) = allowances.get(&candidate.facts.pool) else { continue };
        let due = allowance.consolidate_after.is_some_and(|after| candidate.quiet_since.is_older_than(after, now));
        let left = left.entry(&candidate.facts.pool).or_insert(allowance.nodes);
        if due && *left > 0 && !is_blocked(&candidate.facts.node) {
            *left -= 1;
            out.push(candidate.facts.claim.clone());
        }
    }
    out
}

/// The next step for a claim that was marked as empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EmptyNodeStep {
    /// A pod was bound meanwhile: remove the mark.
    Unmark,
    /// The mark was written and the taint was not.
    Taint,
    /// Wait for the end of the settling period.
    Wait,
    Delete,
}

/// Re-validates a claim marked as empty and observed as marked `since`. `pods` need another node; `tainted` is false for a Node
/// without the disruption taint, and true without a Node.
pub fn next_step(pods: usize, tainted: bool, since: UnixMillis, now: UnixMillis) -> EmptyNodeStep {
    if pods > 0 {
        EmptyNodeStep::Unmark
    } else if !tainted {
        EmptyNodeStep::Taint
    } else if since.is_older_than(SETTLING_PERIOD, now) {
        EmptyNodeStep::Delete
    } else {
        EmptyNodeStep::Wait
    }
}

#[cfg(test)]
mod tests {
    use stowage_model::units::MicroUsd;

    use super::*;
    use crate::decisions::disruption::blockers::Blocker;
    use crate::decisions::disruption::node_facts::NodeFacts;

    fn node(claim: &str, price: i64) -> NodeFacts {
        let name = || claim.to_owned();
        NodeFacts { claim: name(), node: name(), pool: "p".into(), price: MicroUsd(price), ..NodeFacts::default() }
    }

    fn candidate(facts: &NodeFacts, pods: usize, quiet_since: i64) -> Candidate<'_> {
        Candidate { facts, pods, quiet_since: UnixMillis(quiet_since) }
    }

    fn allowances(after: Option<u64>, nodes: i64) -> BTreeMap<String, PoolAllowance> {
        let consolidate_after = after.map(Duration::from_millis);
        BTreeMap::from([("p".to_owned(), PoolAllowance { consolidate_after, nodes })])
    }

    #[test]
    fn b42_a_nominated_node_is_not_empty() {
        // Held pods count as pods on the node.
        let chosen = |pods| {
            let node = node("c", 1);
            let candidates = [candidate(&node, pods, 0)];
            choose(&candidates, &allowances(Some(0), 10), |_| false, UnixMillis(1_000_000))
        };
        assert!(chosen(1).is_empty());
        assert_eq!(chosen(0), ["c"]);
    }

    #[test]
    fn an_empty_node_is_chosen_after_consolidate_after_within_the_budget() {
        let nodes =
            [("cheap", 1), ("expensive", 9), ("occupied", 99), ("recent", 5)].map(|(name, price)| node(name, price));
        let protected = NodeFacts { protection: Some(Blocker::NodeProtected), ..node("protected", 50) };
        let all = [
            candidate(&nodes[0], 0, 0),
            candidate(&nodes[1], 0, 0),
            candidate(&nodes[2], 1, 0),
            candidate(&nodes[3], 0, 500),
            candidate(&protected, 0, 0),
        ];
        let chosen = |after, nodes, now| choose(&all, &allowances(after, nodes), |_| false, UnixMillis(now));
        assert_eq!(chosen(Some(600), 10, 700), ["expensive", "cheap"]);
        assert_eq!(chosen(Some(600), 1, 700), ["expensive"]);
        assert!(chosen(Some(600), 0, 700).is_empty());
        assert!(chosen(Some(600), 10, 599).is_empty(), "too early");
        assert!(chosen(None, 10, i64::MAX / 2).is_empty(), "Never");
    }

    #[test]
    fn a_blocked_node_leaves_the_budget_to_others() {
        let nodes = [("cheap", 1), ("expensive", 9), ("recent", 50)].map(|(name, price)| node(name, price));
        let all = [candidate(&nodes[0], 0, 0), candidate(&nodes[1], 0, 0), candidate(&nodes[2], 0, 500)];
        let is_blocked = |node: &str| node != "cheap";
        assert_eq!(choose(&all, &allowances(Some(600), 1), is_blocked, UnixMillis(700)), ["cheap"]);
    }

    #[test]
    fn a_marked_node_is_deleted_after_the_settling_period_unless_a_pod_was_bound() {
        let step = |pods, tainted, now| next_step(pods, tainted, UnixMillis(1_000), UnixMillis(now));
        assert_eq!(step(1, true, 9_000), EmptyNodeStep::Unmark);
        assert_eq!(step(0, false, 9_000), EmptyNodeStep::Taint);
        assert_eq!(step(0, true, 2_999), EmptyNodeStep::Wait);
        assert_eq!(step(0, true, 3_000), EmptyNodeStep::Delete);
    }
}
