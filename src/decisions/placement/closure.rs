//! Which open nodes are closed while pods move, so that the successors are bound where room is kept for them.
//!
//! The successor of an evicted pod exists at once, and kube-scheduler binds it to any open node before it can be nominated. So every
//! open node that could take it gets the planned taint before the first eviction, until the last successor is bound.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;
use stowage_api::NodeClaim;
use stowage_model::labels;
use stowage_model::pod_class::PodClass;
use stowage_model::time::UnixMillis;
use stowage_planner::NodeState;

use crate::decisions::disruption::mark::DisruptionMark;
use crate::decisions::disruption::node_facts::{Facts, NodeFacts};
use crate::decisions::disruption::reason::DisruptionReason;
use crate::decisions::placement::planned_taint::{is_closed_as_new, planned_taint_of, taint_for};
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
/// At most 5 % of the nodes are closed, within these limits, besides new ones, which are: other new pods wait until they are planned.
const FEWEST: usize = 20;
const MOST: usize = 100;
/// Where more nodes are removed, more are closed: at most so many for each of them, up to this number.
const FOR_EACH_SOURCE: usize = 2;
const MOST_FOR_SOURCES: usize = 500;

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
        let nodes = Arc::new(could_take(state, &facts(), classes, now));
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
    deleted_at(claim).is_some() && is_moving(claim, now)
}

/// Whether a claim is marked for a voluntary disruption that moves pods, and was not deleted long ago.
fn is_moving(claim: &NodeClaim, now: UnixMillis) -> bool {
    let is_voluntary = |mark: DisruptionMark| mark.deadline.is_none() && mark.reason != DisruptionReason::Empty;
    deleted_at(claim).is_none_or(|at| !at.is_older_than(MAX_MOVE, now))
        && DisruptionMark::of(claim).is_some_and(is_voluntary)
}

fn leaving(state: &ClusterState) -> impl Iterator<Item = &NodeClaim> {
    state.claim_index.leaving.iter().filter_map(|name| state.claims.get(name)).map(|claim| &**claim)
}

/// Claims of the nodes that pods leave.
fn sources(state: &ClusterState, now: UnixMillis) -> impl Iterator<Item = &NodeClaim> {
    leaving(state).filter(move |claim| is_source(claim, now))
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
    let mut known = HashSet::new();
    let classes = holds.by_claim.values().flatten().filter(moves).filter_map(|hold| hold.class.as_ref());
    classes.filter(|class| known.insert(Arc::as_ptr(class))).cloned().collect()
}

/// How many nodes may be closed that are not new.
fn limit(state: &ClusterState, now: UnixMillis) -> usize {
    let moving = leaving(state).filter(|claim| is_moving(claim, now)).count();
    let usual = (state.nodes.len() / 20).clamp(FEWEST, MOST);
    usual.max((FOR_EACH_SOURCE * moving).min(MOST_FOR_SOURCES))
}

/// Open nodes of ours with room for a pod of one of these classes. Where they are too many, those of the classes with room on the fewest nodes, together with
/// which they are not: large pods find another place less often than small ones.
fn could_take(
    state: &ClusterState,
    facts: &Facts,
    mut classes: Vec<Arc<PodClass>>,
    now: UnixMillis,
) -> BTreeSet<String> {
    let limit = limit(state, now);
    let has_room = |facts: &&NodeFacts, class: &PodClass| !facts.is_leaving && class.requests.fits(&facts.free);
    let nodes = || facts.nodes.iter().map(|facts| &**facts);
    classes.sort_by_cached_key(|class| nodes().filter(|facts| has_room(facts, class)).take(limit + 1).count());
    let (mut out, mut others) = (BTreeSet::new(), 0);
    let mut open: HashMap<&str, Option<OpenNode>> = HashMap::new();
    for class in &classes {
        let mut more = Vec::new();
        let mut more_others = 0;
        for facts in nodes().filter(|facts| has_room(facts, class) && !out.contains(&facts.node)) {
            let open = open.entry(&facts.node).or_insert_with(|| OpenNode::of(state, &facts.node, now));
            let Some(node) = open.as_ref().filter(|node| node.admitting.admits(class)) else { continue };
            more_others += usize::from(!node.is_new);
            if others + more_others > limit {
                break;
            }
            more.push(facts.node.clone());
        }
        if others + more_others <= limit {
            out.extend(more);
            others += more_others;
        }
    }
    out
}

/// A node that can be closed.
struct OpenNode {
    /// Without its pods.
    admitting: NodeState,
    /// It has been closed since it opened.
    is_new: bool,
}

impl OpenNode {
    fn of(state: &ClusterState, name: &str, now: UnixMillis) -> Option<Self> {
        let node = state.nodes.get(name).filter(|node| is_open(node))?;
        // A DaemonSet may be rolled out: its pods come first.
        let is_left_open = taint_for(state, node, now).is_some_and(|taint| keeps_daemons_off(state, node, &taint));
        (!is_left_open).then(|| Self { admitting: without_pods(node), is_new: is_closed_as_new(state, node) })
    }
}

/// Whether pods without a toleration of the planned taint may be bound to a node when it does not have that.
fn is_open(node: &Node) -> bool {
    let is_cordoned = node.spec.as_ref().and_then(|spec| spec.unschedulable).unwrap_or(false);
    !is_cordoned && node.is_ready() && node.is_labeled(labels::INITIALIZED)
}

#[cfg(test)]
mod tests;
