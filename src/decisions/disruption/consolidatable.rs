//! What the status of a NodeClaim says of the quiet of its node: the time of the last pod event, and the condition Consolidatable. Another leader
//! goes on from the time; decisions read no condition.

use std::sync::Arc;
use std::time::Duration;

use stowage_api::conditions::{CONSOLIDATABLE, INITIALIZED};
use stowage_api::{NodeClaim, duration};
use stowage_model::time::UnixMillis;

use crate::decisions::disruption::node_facts::{Facts, NodeFacts};
use crate::state::object_ext::{NodeClaimExt, ObjectExt};
use crate::state::plan_record::Holds;
use crate::state::tables::ClusterState;

/// Least time between two writes of the last pod event of a claim, as in Karpenter, and from its initialization to the first: pods come one after the
/// other to a new node, and while many nodes are launched at once nothing else should be written.
const INTERVAL: Duration = Duration::from_secs(10);

/// A status that is out of date.
#[derive(Clone, Debug, PartialEq)]
pub struct QuietStatus {
    pub claim: Arc<NodeClaim>,
    /// Name of the node.
    pub node: String,
    /// When the last pod was bound or ended, if the claim has an earlier time.
    pub last_pod_event: Option<UnixMillis>,
    pub is_consolidatable: bool,
}

/// What is out of date, at most `most`; the nodes after the one of this name come first. A node that holds keep in use is written when they end: until
/// then its pods come one after the other, and nothing depends on when the last one did.
pub fn outdated(
    state: &ClusterState,
    holds: &Holds,
    facts: &Facts,
    after: &str,
    most: usize,
    now: UnixMillis,
) -> Vec<QuietStatus> {
    let next = facts.nodes.partition_point(|node| node.node.as_str() <= after);
    let (before, nodes) = facts.nodes.split_at(next);
    let nodes = nodes.iter().chain(before).filter(|node| !holds.by_claim.contains_key(&node.claim));
    nodes.filter_map(|node| outdated_status(state, node, now)).take(most).collect()
}

fn outdated_status(state: &ClusterState, facts: &NodeFacts, now: UnixMillis) -> Option<QuietStatus> {
    let claim = state.claims.get(&facts.claim).filter(|claim| !claim.is_deleting())?;
    let initialized = claim.true_since(INITIALIZED)?;
    let written = claim.last_pod_event();
    let observed = state.last_pod_event.get(&*facts.node).map(|at| at.whole_seconds());
    let last_pod_event = observed.filter(|at| written.is_none_or(|written| *at > written));
    let is_consolidatable = is_consolidatable(state, facts, now);
    let is_due = match (claim.has_condition(CONSOLIDATABLE), is_consolidatable) {
        // Its removal may have begun as soon as it was quiet, before this was written.
        (false, true) => true,
        _ if facts.is_leaving => false,
        // Because of something else than a pod event.
        (true, false) if last_pod_event.is_none() => true,
        _ => last_pod_event.is_some() && written.unwrap_or(initialized).is_older_than(INTERVAL, now),
    };
    is_due.then(|| QuietStatus {
        claim: Arc::clone(claim),
        node: facts.node.clone(),
        last_pod_event,
        is_consolidatable,
    })
}

/// Whether the node has been quiet for `consolidateAfter`.
fn is_consolidatable(state: &ClusterState, facts: &NodeFacts, now: UnixMillis) -> bool {
    let Some(pool) = state.pools.get(&facts.pool).filter(|pool| pool.spec.replicas.is_none()) else { return false };
    let after = duration::parse_or_never(&pool.spec.disruption.consolidate_after).ok().flatten();
    let after = after.map(|after| Duration::from_millis(u64::try_from(after).unwrap_or(0)));
    facts.quiet_since.zip(after).is_some_and(|(since, after)| since.is_older_than(after, now))
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use stowage_model::labels;
    use stowage_test_objects as objects;

    use super::*;
    use crate::test_support::small_cluster::{NOW, SmallCluster};

    const SECOND: Duration = Duration::from_secs(1);

    /// The seconds since the last pod event that are written, and whether the condition is, for a node whose last pod event was `event` seconds
    /// ago, and whose status has another and the condition.
    fn found(
        pool: &serde_json::Value,
        event: u32,
        written: Option<u32>,
        condition: bool,
    ) -> Option<(Option<i64>, bool)> {
        let mut cluster = SmallCluster::new(&[("p", json!({ "spec": pool }))]);
        cluster.add_node("a", "p", "small/on-demand");
        let mut claim = (*cluster.state.claims["a"]).clone();
        let status = claim.status.get_or_insert_default();
        let time = |seconds| serde_json::from_value(json!((NOW - SECOND * seconds).rfc3339())).unwrap();
        status.last_pod_event_time = written.map(time);
        if condition {
            let conditions: Vec<_> = serde_json::from_value(objects::conditions_true(&[CONSOLIDATABLE])).unwrap();
            status.conditions.extend(conditions);
        }
        cluster.state.apply_claim(claim);
        cluster.state.last_pod_event.insert("a".into(), NOW - SECOND * event);
        let found = outdated(&cluster.state, &Holds::default(), &cluster.facts(), "", 9, NOW).pop()?;
        let seconds = found.last_pod_event.map(|at| (NOW.0 - at.0) / 1_000);
        Some((seconds, found.is_consolidatable))
    }

    #[test]
    fn the_status_follows_pod_events_every_ten_seconds_and_consolidate_after() {
        let pool = |after: &str| json!({"disruption": {"consolidateAfter": after}});
        let is_static = json!({"replicas": 1, "disruption": {"consolidateAfter": "30s"}});
        for (case, pool, event, written, condition, expected) in [
            ("the first event", pool("30s"), 2, None, false, Some((Some(2), false))),
            ("a new event", pool("30s"), 2, Some(10), false, Some((Some(2), false))),
            ("soon after another", pool("30s"), 2, Some(9), false, None),
            ("soon after another, with the condition", pool("30s"), 2, Some(9), true, None),
            ("an event ends the quiet", pool("30s"), 2, Some(40), true, Some((Some(2), false))),
            ("not yet quiet", pool("30s"), 29, Some(29), false, None),
            ("quiet", pool("30s"), 30, Some(30), false, Some((None, true))),
            ("quiet and written", pool("30s"), 30, Some(30), true, None),
            ("quiet since an event that is not written", pool("1s"), 2, Some(9), false, Some((Some(2), true))),
            ("another consolidateAfter", pool("1h"), 30, Some(30), true, Some((None, false))),
            ("never", pool("Never"), 30, Some(30), true, Some((None, false))),
            ("static", is_static, 30, Some(30), true, Some((None, false))),
            ("an event that another leader saw", pool("30s"), 90, Some(20), false, None),
        ] {
            assert_eq!(found(&pool, event, written, condition), expected, "{case}");
        }
    }

    #[test]
    fn the_first_event_is_written_ten_seconds_after_the_initialization() {
        for (seconds, is_due) in [(9, false), (10, true)] {
            let mut cluster = SmallCluster::new(&[("p", json!({"spec": {"disruption": {"consolidateAfter": "30s"}}}))]);
            cluster.add_node("a", "p", "small/on-demand");
            let mut claim = (*cluster.state.claims["a"]).clone();
            let since = json!((NOW - SECOND * seconds).rfc3339());
            for condition in &mut claim.status.get_or_insert_default().conditions {
                condition.last_transition_time = serde_json::from_value(since.clone()).unwrap();
            }
            cluster.state.apply_claim(claim);
            cluster.state.last_pod_event.insert("a".into(), NOW);
            assert_eq!(
                !outdated(&cluster.state, &Holds::default(), &cluster.facts(), "", 9, NOW).is_empty(),
                is_due,
                "{seconds}"
            );
        }
    }

    #[test]
    fn a_node_that_is_marked_at_once_is_consolidatable_until_its_claim_is_deleted() {
        let deletion = json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": ["f"]}});
        for (case, event, patch, expected) in [
            ("marked before it was written", 30, json!({}), Some((None, true))),
            ("its pods leave", 2, json!({}), None),
            ("deleted", 30, deletion, None),
        ] {
            let mut cluster = SmallCluster::new(&[("p", json!({"spec": {"disruption": {"consolidateAfter": "30s"}}}))]);
            cluster.add_node("a", "p", "small/on-demand");
            let mut claim = json!(&*cluster.state.claims["a"]);
            let written = (NOW - SECOND * 30).rfc3339();
            json_patch::merge(
                &mut claim,
                &json!({"metadata": {"annotations": {(labels::DISRUPTING): "Empty/"}}, "status": {"lastPodEventTime": written}}),
            );
            json_patch::merge(&mut claim, &patch);
            cluster.state.apply_claim(serde_json::from_value(claim).unwrap());
            cluster.state.last_pod_event.insert("a".into(), NOW - SECOND * event);
            let found = outdated(&cluster.state, &Holds::default(), &cluster.facts(), "", 9, NOW).pop();
            assert_eq!(found.map(|status| (status.last_pod_event, status.is_consolidatable)), expected, "{case}");
        }
    }

    #[test]
    fn each_node_has_its_turn() {
        let mut cluster = SmallCluster::new(&[("p", json!({"spec": {"disruption": {"consolidateAfter": "0s"}}}))]);
        for name in ["a", "b", "c"] {
            cluster.add_node(name, "p", "small/on-demand");
        }
        let facts = cluster.facts();
        let nodes = |after: &str, most: usize| {
            let found = outdated(&cluster.state, &Holds::default(), &facts, after, most, NOW);
            found.into_iter().map(|status| status.node).collect::<Vec<_>>()
        };
        assert_eq!(nodes("", 2), ["a", "b"]);
        assert_eq!(nodes("b", 2), ["c", "a"]);
        assert_eq!(nodes("c", 9), ["a", "b", "c"]);
    }
    #[test]
    fn nodes_with_holds_are_written_when_they_end() {
        let mut cluster = SmallCluster::new(&[("p", json!({"spec": {"disruption": {"consolidateAfter": "0s"}}}))]);
        for name in ["a", "b"] {
            cluster.add_node(name, "p", "small/on-demand");
        }
        let holds = Holds { by_claim: [("a".to_owned(), Vec::new())].into(), ..Holds::default() };
        let found = outdated(&cluster.state, &holds, &cluster.facts(), "", 9, NOW);
        assert_eq!(found.iter().map(|status| &*status.node).collect::<Vec<_>>(), ["b"]);
    }
}
