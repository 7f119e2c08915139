//! Which open nodes are closed while pods move, so that the successors are bound where room is kept for them.
//!
//! The successor of an evicted pod exists at once, and kube-scheduler binds it to any open node before it can be nominated. So every
//! open node that could take it gets the planned taint before the first eviction, until the last successor is bound.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;

use crate::api::NodeClaim;
use crate::decisions::disruption::mark::DisruptionMark;
use crate::decisions::disruption::node_facts::{Facts, NodeFacts};
use crate::decisions::disruption::reason::DisruptionReason;
use crate::decisions::placement::planned_taint::{is_closed_as_new, planned_taint_of, taint_for};
use crate::model::labels;
use crate::model::pod_class::PodClass;
use crate::model::time::UnixMillis;
use crate::state::node_state::{keeps_daemons_off, without_pods};
use crate::state::object_ext::{NodeExt, ObjectExt};
use crate::state::plan_record::{Hold, Holds};
use crate::state::tables::ClusterState;

/// Nodes stay closed for the pods of a node no longer than this after its deletion: PodDisruptionBudgets may delay a drain for hours.
const MAX_MOVE: Duration = Duration::from_secs(30);
/// Evictions wait at most this long for nodes to be closed.
const MAX_CLOSING: Duration = Duration::from_secs(2);
/// How often the nodes that could take the moving pods are determined again.
const REFRESH_PERIOD: Duration = Duration::from_secs(1);
/// No node is closed if more than 5 % would have to be, within these limits, besides new ones, which are: other new pods wait until they are
/// planned.
const FEWEST: usize = 20;
const MOST: usize = 100;

/// Names of the nodes that are closed while pods move.
pub type ClosedNodes = Arc<BTreeSet<String>>;

/// The closed nodes as they were last determined.
#[derive(Debug, Default)]
pub struct Closure {
    last: Option<Determined>,
}

#[derive(Debug)]
struct Determined {
    /// NodeClaims of the nodes that pods leave.
    sources: Vec<String>,
    at: UnixMillis,
    nodes: ClosedNodes,
}

impl Closure {
    /// The nodes to keep closed now. `facts` is called when they are determined again: when other nodes drain, and every second.
    pub fn nodes(
        &mut self,
        state: &ClusterState,
        holds: &Holds,
        now: UnixMillis,
        facts: impl FnOnce() -> Facts,
    ) -> ClosedNodes {
        let sources: Vec<&NodeClaim> = sources(state, now).collect();
        let classes = moving(state, holds, &sources);
        if classes.is_empty() {
            self.last = None;
            return ClosedNodes::default();
        }
        let sources: Vec<String> = sources.into_iter().map(ResourceExt::name_any).collect();
        let is_current = |last: &&Determined| {
            last.sources == sources && last.at <= now && !last.at.is_older_than(REFRESH_PERIOD, now)
        };
        if let Some(last) = self.last.as_ref().filter(is_current) {
            return Arc::clone(&last.nodes);
        }
        let nodes = Arc::new(could_take(state, &facts(), &classes, now).unwrap_or_default());
        self.last = Some(Determined { sources, at: now, nodes: Arc::clone(&nodes) });
        nodes
    }
}

/// Whether the evictions from a claim's node wait until these nodes are closed.
pub fn must_wait(state: &ClusterState, closed: &ClosedNodes, claim: &NodeClaim, now: UnixMillis) -> bool {
    let began = deleted_at(claim).is_some_and(|at| at <= now + MAX_CLOSING && !at.is_older_than(MAX_CLOSING, now));
    let is_open = |name: &String| state.nodes.get(name).is_some_and(|node| planned_taint_of(node).is_none());
    began && is_source(claim, now) && closed.iter().any(is_open)
}

fn deleted_at(claim: &NodeClaim) -> Option<UnixMillis> {
    claim.metadata.deletion_timestamp.as_ref().map(UnixMillis::from)
}

/// Whether a claim was deleted for a voluntary disruption a moment ago. Where a deadline is near, no time is lost.
fn is_source(claim: &NodeClaim, now: UnixMillis) -> bool {
    let is_voluntary = |mark: DisruptionMark| mark.deadline.is_none() && mark.reason != DisruptionReason::Empty;
    deleted_at(claim).is_some_and(|at| !at.is_older_than(MAX_MOVE, now))
        && DisruptionMark::of(claim).is_some_and(is_voluntary)
}

/// Claims of the nodes that pods leave.
fn sources(state: &ClusterState, now: UnixMillis) -> impl Iterator<Item = &NodeClaim> {
    let leaving = state.claim_index.leaving.iter().filter_map(|name| state.claims.get(name));
    leaving.map(|claim| &**claim).filter(move |claim| is_source(claim, now))
}

/// Whether pods leave the node of any claim.
pub fn any_source(state: &ClusterState, now: UnixMillis) -> bool {
    sources(state, now).next().is_some()
}

/// Classes of the pods that are about to be evicted from these claims' nodes, and of the successors that are not bound.
fn moving(state: &ClusterState, holds: &Holds, sources: &[&NodeClaim]) -> Vec<Arc<PodClass>> {
    if sources.is_empty() {
        return Vec::new();
    }
    let nodes: HashSet<String> =
        sources.iter().filter_map(|claim| state.node_of(claim)).map(|node| node.name_any()).collect();
    let moves = |hold: &&Hold| {
        hold.owner.is_some()
            && match &hold.pod {
                Some(successor) => state.pods.get(successor).is_some_and(|pod| pod.node.is_none()),
                None => state.pods.get(&hold.original).is_none_or(|pod| {
                    pod.deleted_at.is_some() || pod.node.as_deref().is_some_and(|node| nodes.contains(node))
                }),
            }
    };
    let classes = holds.by_claim.values().flatten().filter(moves).filter_map(|hold| hold.class.as_ref());
    let distinct: HashMap<*const PodClass, &Arc<PodClass>> = classes.map(|class| (Arc::as_ptr(class), class)).collect();
    distinct.into_values().cloned().collect()
}

/// Open nodes of ours with room for a pod of one of these classes; `None` if they are too many.
fn could_take(
    state: &ClusterState,
    facts: &Facts,
    classes: &[Arc<PodClass>],
    now: UnixMillis,
) -> Option<BTreeSet<String>> {
    let limit = (state.nodes.len() / 20).clamp(FEWEST, MOST);
    let (mut out, mut others) = (BTreeSet::new(), 0);
    for facts in &facts.nodes {
        if let Some(node) = open_node(state, facts, classes, now) {
            out.insert(facts.node.clone());
            others += usize::from(!is_closed_as_new(state, node));
            if others > limit {
                return None;
            }
        }
    }
    Some(out)
}

/// The node, if it is open and has room for a pod of one of these classes.
fn open_node<'s>(
    state: &'s ClusterState,
    facts: &NodeFacts,
    classes: &[Arc<PodClass>],
    now: UnixMillis,
) -> Option<&'s Node> {
    let mut fitting = classes.iter().filter(|class| class.requests.fits(&facts.free)).peekable();
    if fitting.peek().is_none() || facts.is_leaving {
        return None;
    }
    let node = state.nodes.get(&facts.node).filter(|node| is_open(node))?;
    let admitting = without_pods(node);
    // A DaemonSet may be rolled out: its pods come first.
    let keeps_daemons_off = || taint_for(state, node, now).is_some_and(|taint| keeps_daemons_off(state, node, &taint));
    (fitting.any(|class| admitting.admits(class)) && !keeps_daemons_off()).then_some(node)
}

/// Whether pods without a toleration of the planned taint may be bound to a node when it does not have that.
fn is_open(node: &Node) -> bool {
    let is_cordoned = node.spec.as_ref().and_then(|spec| spec.unschedulable).unwrap_or(false);
    !is_cordoned && node.is_ready() && node.is_labeled(labels::INITIALIZED)
}

#[cfg(test)]
mod tests;
