//! The planned taint of a new node: until its planned pods are bound, only they tolerate it. Without an extender, it replaces its filter, and
//! other nodes have it while pods move ([`crate::decisions::placement::closure`]).
//!
//! A nomination makes the scheduler try a node first and reserves room there, but does not keep the pod off other nodes; and of pods
//! with a hard topology spread constraint, at most `maxSkew` can be nominated to one node. The taint has neither limit.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Node, Taint};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use stowage_api::{NodeClaim, conditions};
use stowage_model::labels;
use stowage_model::pod_class::PodClass;
use stowage_model::time::UnixMillis;

use crate::decisions::holds::HOLD_READY;
use crate::decisions::placement::mode::PlacementMode;
use crate::decisions::pod_ref::PodRef;
use crate::state::node_state::keeps_daemons_off;
use crate::state::object_ext::{NodeClaimExt, NodeExt};
use crate::state::plan_record::{Hold, Holds};
use crate::state::pods::{PodRecord, Scheduling};
use crate::state::pool_types::offering_of;
use crate::state::tables::ClusterState;

/// In each topology domain, at most this many times `maxSkew` pods of a hard spread constraint are admitted and not bound.
const MAX_UNBOUND_SKEWS: i64 = 2;
/// A pod whose node has been open for this long is admitted regardless of the order: if the nodes of other domains do not appear, the
/// scheduler decides whether the pod may be bound first.
const ORDER_TIMEOUT: Duration = Duration::from_secs(10);
/// Minimum time between two admissions of a pod, and between two attempts to close a node.
const RETRY_PERIOD: Duration = Duration::from_secs(1);
/// Pods that one pass admits, so that it ends soon and the next one knows which nodes opened meanwhile.
const MAX_ADMISSIONS: usize = 64;
/// A pod that the API server rejects this many times in a row will not be admitted. A single rejection may be a race, such as with
/// another pod created under the same name.
const MAX_REJECTIONS: u32 = 3;
/// DaemonSet pods that the planned taint keeps off are let onto a node when its planned pods are bound, and no pod with a hard spread
/// constraint waits, or after this time.
const DAEMONS_FROM: Duration = Duration::from_secs(30);
/// End of the time for which a node is open for DaemonSet pods, since it was opened: some may never come.
const DAEMONS_UNTIL: Duration = Duration::from_secs(40);

/// Effect of a planned taint that keeps pods off.
const CLOSED: &str = "NoSchedule";
/// Effect of a planned taint that keeps no pod off, so that the DaemonSet controller creates pods that do not tolerate it.
const OPEN: &str = "PreferNoSchedule";

/// The planned taint of a claim's node, added at `now`.
pub fn planned_taint(claim: &NodeClaim, now: UnixMillis) -> Option<Taint> {
    Some(Taint {
        key: labels::PLANNED_TAINT.into(),
        value: Some(claim.uid()?),
        effect: CLOSED.into(),
        time_added: Timestamp::from_millisecond(now.0).ok().map(Time),
    })
}

/// The planned taint of a node of ours, added at `now`.
pub fn taint_for(state: &ClusterState, node: &Node, now: UnixMillis) -> Option<Taint> {
    planned_taint(state.claim_of(node)?, now)
}

/// Whether a planned taint keeps pods off that are not planned on its node.
pub fn is_closed(taint: &Taint) -> bool {
    taint.effect == CLOSED
}

/// Whether the planned taint alone keeps the pods of a node where they are planned, without nominations. They may stray when nodes open
/// for DaemonSet pods, or are open after a minute, unless the extender's filter keeps them off other nodes.
pub fn suffices(state: &ClusterState, node: &Node, taint: &Taint, placement: PlacementMode, now: UnixMillis) -> bool {
    let stays_closed = || {
        is_closed(taint) && !added_at(taint).is_older_than(DAEMONS_FROM, now) && !keeps_daemons_off(state, node, taint)
    };
    placement == PlacementMode::Extender || stays_closed()
}

/// The planned taint on a node.
pub fn planned_taint_of(node: &Node) -> Option<&Taint> {
    node.taints().find(|taint| taint.key == labels::PLANNED_TAINT)
}

fn added_at(taint: &Taint) -> UnixMillis {
    taint.time_added.as_ref().map(UnixMillis::from).unwrap_or_default()
}

/// Whether a node got its planned taint when it opened, and not because pods move: only initialized nodes are closed for that.
fn was_new(state: &ClusterState, node: &Node, taint: &Taint) -> bool {
    let initialized = state.claim_of(node).and_then(|claim| claim.true_since(conditions::INITIALIZED));
    initialized.is_none_or(|at| added_at(taint) <= at)
}

/// Whether a node is closed since it opened.
pub fn is_closed_as_new(state: &ClusterState, node: &Node) -> bool {
    planned_taint_of(node).is_some_and(|taint| was_new(state, node, taint))
}

/// Nodes that are closed because pods move.
pub fn closed_for_moves(state: &ClusterState) -> Vec<String> {
    let nodes = state.tainted_nodes.iter().filter_map(|name| state.nodes.get(name));
    let closed = nodes.filter(|node| !is_closed_as_new(state, node));
    closed.map(|node| node.name_any()).collect()
}

/// A pod that gets the toleration of its planned node's taint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Admission {
    pub pod: PodRef,
    /// UID of the NodeClaim.
    pub claim: String,
    /// The pod has no toleration at all: the patch adds the list.
    pub first: bool,
}

/// Held pods of a claim that are not bound.
fn waiting<'a>(state: &'a ClusterState, holds: &'a Holds, claim: &str) -> impl Iterator<Item = &'a PodRecord> {
    let live = holds.by_claim.get(claim).into_iter().flatten();
    live.filter_map(|hold| state.pods.get(hold.pod.as_ref()?)).filter(|pod| pod.node.is_none())
}

/// Whether a pod tolerates the planned taint of a claim's node by the toleration that it gets for it.
pub fn is_admitted(pod: &PodRecord, claim: &NodeClaim) -> bool {
    claim.metadata.uid.as_ref().is_some_and(|uid| pod.admitted.iter().any(|admitted| **admitted == **uid))
}

/// Topology keys of a pod's hard spread constraints, with their `maxSkew`. Every host name is a domain of its own: the order of
/// admission does not matter for it.
fn hard_spreads(pod: &PodRecord) -> impl Iterator<Item = (&str, i64)> {
    let spread = pod.entry.iter().flat_map(|entry| &entry.class.spread);
    spread
        .filter(|spread| spread.hard && *spread.key != *labels::HOSTNAME)
        .map(|spread| (&*spread.key, spread.max_skew))
}

/// Waiting pods of one class that are planned in one topology domain.
#[derive(Clone, Copy, Debug, Default)]
struct Domain {
    waiting: i64,
    admitted: i64,
}

impl Domain {
    fn not_admitted(self) -> i64 {
        self.waiting - self.admitted
    }
}

/// Waiting pods by class and topology key, and by domain.
type Domains<'a> = HashMap<(*const PodClass, &'a str), BTreeMap<String, Domain>>;

/// The topology domain of a claim's node.
fn domain_of(state: &ClusterState, claim: &NodeClaim, key: &str) -> Option<String> {
    let node = state.node_of(claim).and_then(|node| node.labels().get(key));
    node.or_else(|| claim.labels().get(key)).cloned().or_else(|| {
        let (instance_type, zone, capacity_type) = offering_of(claim)?;
        match key {
            labels::ZONE => Some(zone),
            labels::CAPACITY_TYPE => Some(capacity_type.as_str().to_owned()),
            labels::INSTANCE_TYPE => Some(instance_type),
            _ => None,
        }
    })
}

/// Pods to admit to nodes with the planned taint, in the order in which they should be. The toleration triggers a retry of the scheduler, so it is not added before the node
/// is open, and pods with a hard spread constraint get it in the order in which they can be bound: no attempt fails. A pod whose first attempt
/// is still to come gets it at once: without it, that attempt would fail. Those that are attempted first come first.
fn to_admit(state: &ClusterState, holds: &Holds, now: UnixMillis) -> Vec<Admission> {
    let mut at_once = Vec::new();
    let mut domains: Domains<'_> = HashMap::new();
    let mut candidates = Vec::new();
    for claim in holds.by_claim.keys().filter_map(|name| state.claims.get(name)) {
        let tainted_at = state.node_of(claim).and_then(|node| planned_taint_of(node)).map(added_at);
        for pod in waiting(state, holds, &claim.name_any()) {
            let admitted = is_admitted(pod, claim);
            let mut own = Vec::new();
            for (key, skew) in hard_spreads(pod) {
                let (Ok(entry), Some(domain)) = (&pod.entry, domain_of(state, claim, key)) else { continue };
                let spread = (Arc::as_ptr(&entry.class), key);
                let counts = domains.entry(spread).or_default().entry(domain.clone()).or_default();
                counts.waiting += 1;
                counts.admitted += i64::from(admitted);
                own.push((spread, domain, skew));
            }
            let Some(tainted_at) = tainted_at.filter(|_| !admitted) else { continue };
            let admission =
                Admission { pod: PodRef::of(pod), claim: claim.uid().unwrap_or_default(), first: !pod.tolerates };
            let is_queued = pod.scheduling == Scheduling::Unattempted;
            if own.is_empty() || is_queued || tainted_at.is_older_than(ORDER_TIMEOUT, now) {
                at_once.push((!is_queued, pod.first_seen, admission));
            } else {
                candidates.push((own, admission));
            }
        }
    }
    at_once.sort_by_key(|(attempted, first_seen, _)| (*attempted, *first_seen));
    let mut out: Vec<Admission> = at_once.into_iter().map(|(.., admission)| admission).collect();
    // Each round admits at most one pod of each domain, so that the domains advance together.
    let mut advanced = true;
    while std::mem::take(&mut advanced) {
        let mut round: HashSet<(*const PodClass, &str, String)> = HashSet::new();
        candidates.retain(|(own, admission)| {
            let admit = own.iter().all(|((class, key), domain, skew)| {
                let counts = &domains[&(*class, *key)];
                let most = counts.values().map(|domain| domain.not_admitted()).max().unwrap_or(0);
                let own = counts[domain];
                own.not_admitted() + skew > most
                    && own.admitted < skew * MAX_UNBOUND_SKEWS
                    && !round.contains(&(*class, *key, domain.clone()))
            });
            if admit {
                for ((class, key), domain, _) in own {
                    round.insert((*class, *key, domain.clone()));
                }
                out.push(admission.clone());
                advanced = true;
            }
            !admit
        });
        for (class, key, domain) in round {
            if let Some(counts) = domains.get_mut(&(class, key)).and_then(|counts| counts.get_mut(&domain)) {
                counts.admitted += 1;
            }
        }
    }
    out
}

/// UIDs of the claims with holds.
fn held_claims<'a>(state: &'a ClusterState, holds: &Holds) -> HashSet<&'a str> {
    holds.by_claim.keys().filter_map(|claim| state.claims.get(claim)?.metadata.uid.as_deref()).collect()
}

/// Nodes to remove the planned taint from. After its own pods are bound, a node keeps the taint while pods wait for other nodes or, if
/// `is_planning`, for a plan: otherwise they would take the remaining room, and their nodes would stay empty. It keeps it no longer than the
/// hold of a new node. Nodes that are not new keep it while they are to be `closed`.
fn to_untaint(
    state: &ClusterState,
    holds: &Holds,
    closed: &BTreeSet<String>,
    placement: PlacementMode,
    rejected: &HashSet<String>,
    is_planning: bool,
    now: UnixMillis,
) -> Vec<String> {
    if state.tainted_nodes.is_empty() {
        return Vec::new();
    }
    let held = held_claims(state, holds);
    // Room that is kept for the successor of a pod that is gone may never be needed.
    let waits = |hold: &Hold| hold.pod.is_some() || state.pods.contains_key(&hold.original);
    let pods_wait = is_planning || holds.by_claim.values().flatten().any(waits);
    let needed = |name: &String, node: &Node, taint: &Taint| {
        let rejects_pods = taint.value.as_ref().is_some_and(|claim| rejected.contains(claim));
        let young = !added_at(taint).is_older_than(HOLD_READY, now);
        let own = taint.value.as_deref().is_some_and(|claim| held.contains(claim));
        let is_needed_if_new = own || (young && pods_wait);
        placement != PlacementMode::Off
            && !rejects_pods
            && (closed.contains(name) || (is_needed_if_new && was_new(state, node, taint)))
    };
    let nodes = state.tainted_nodes.iter().filter_map(|name| state.nodes.get_key_value(name));
    let tainted = nodes.filter_map(|(name, node)| Some((name, node, planned_taint_of(node)?)));
    tainted.filter(|(name, node, taint)| !needed(name, node, taint)).map(|(name, ..)| name.clone()).collect()
}

/// Nodes among those to be `closed` that are open, with the planned taint that each gets.
fn to_close(
    state: &ClusterState,
    closed: &BTreeSet<String>,
    rejected: &HashSet<String>,
    now: UnixMillis,
) -> Vec<(String, Taint)> {
    let nodes = closed.iter().filter_map(|name| state.nodes.get_key_value(name));
    let open = nodes.filter(|(_, node)| planned_taint_of(node).is_none());
    let taint = |(name, node): (&String, &Arc<Node>)| Some((name.clone(), taint_for(state, node, now)?));
    let rejects_pods = |taint: &Taint| taint.value.as_ref().is_some_and(|claim| rejected.contains(claim));
    open.filter_map(taint).filter(|(_, taint)| !rejects_pods(taint)).collect()
}

/// Nodes whose planned taint gets another effect: they are open while DaemonSet pods are missing that it keeps off. Planned pods come first.
/// Other pods may use the room that is left meanwhile, which those with a hard spread constraint do most: they wait their turn.
fn to_change(state: &ClusterState, holds: &Holds, untaint: &[String], now: UnixMillis) -> Vec<Change> {
    if state.tainted_nodes.is_empty() {
        return Vec::new();
    }
    let held = held_claims(state, holds);
    let mut waiting = holds.by_claim.keys().flat_map(|claim| waiting(state, holds, claim));
    let in_turn = waiting.any(|pod| hard_spreads(pod).next().is_some());
    let lets_in = |node: &Node, taint: &Taint| {
        let is_held = taint.value.as_deref().is_some_and(|claim| held.contains(claim));
        let added_at = added_at(taint);
        let closed = Taint { effect: CLOSED.into(), ..taint.clone() };
        (!(is_held || in_turn) || added_at.is_older_than(DAEMONS_FROM, now))
            && !added_at.is_older_than(DAEMONS_UNTIL, now)
            && keeps_daemons_off(state, node, &closed)
    };
    let change = |name: &String| {
        let node = state.nodes.get(name)?;
        let taint = planned_taint_of(node)?;
        let effect = if lets_in(node, taint) { OPEN } else { CLOSED };
        (taint.effect != effect && !untaint.contains(name)).then(|| Change { node: name.clone(), effect })
    };
    state.tainted_nodes.iter().filter_map(change).collect()
}

/// A node whose planned taint gets another effect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    pub node: String,
    pub effect: &'static str,
}

impl Change {
    /// The taints of the Node afterwards.
    pub fn taints(&self, node: &Node) -> Vec<Taint> {
        let change = |taint: &Taint| {
            let effect = if taint.key == labels::PLANNED_TAINT { self.effect } else { &taint.effect };
            Taint { effect: effect.into(), ..taint.clone() }
        };
        node.taints().map(change).collect()
    }
}

/// What one pass does.
#[derive(Debug, Default, PartialEq)]
pub struct TaintActions {
    /// Pods to admit.
    pub admit: Vec<Admission>,
    /// Nodes to close, with the planned taint that each gets.
    pub close: Vec<(String, Taint)>,
    /// Nodes whose planned taint gets another effect.
    pub change: Vec<Change>,
    /// Nodes to remove the planned taint from.
    pub untaint: Vec<String>,
}

/// What is remembered between two passes.
#[derive(Debug, Default)]
pub struct PlannedTaints {
    /// Pods are about to be planned. It is set before each pass.
    pub is_planning: bool,
    /// When each pod that is to be admitted was last tried, by UID.
    admitted: HashMap<String, UnixMillis>,
    /// When each node was last closed, by name.
    closed: HashMap<String, UnixMillis>,
    /// Consecutive rejections of a pod's admission, by its UID.
    rejections: HashMap<String, u32>,
    /// UIDs of NodeClaims with pods that can't be admitted: their taint must not keep them off.
    rejected: HashSet<String>,
}

impl PlannedTaints {
    /// Chooses what to do in this pass, and records it as done. `closed` are the nodes to close while pods move.
    pub fn choose(
        &mut self,
        state: &ClusterState,
        holds: &Holds,
        closed: &BTreeSet<String>,
        placement: PlacementMode,
        now: UnixMillis,
    ) -> TaintActions {
        let enabled = placement != PlacementMode::Off;
        let mut admit = if enabled { to_admit(state, holds, now) } else { Vec::new() };
        let candidates: HashSet<&str> = admit.iter().map(|admission| &*admission.pod.uid).collect();
        self.admitted.retain(|uid, _| candidates.contains(uid.as_str()));
        let last = |admission: &Admission| self.admitted.get(&admission.pod.uid).copied();
        admit.retain(|admission| last(admission).is_none_or(|at| at.is_older_than(RETRY_PERIOD, now)));
        // Pods that cannot be patched keep nobody else waiting.
        admit.sort_by_key(last);
        admit.truncate(MAX_ADMISSIONS);
        self.admitted.extend(admit.iter().map(|admission| (admission.pod.uid.clone(), now)));
        let mut close = if enabled { to_close(state, closed, &self.rejected, now) } else { Vec::new() };
        self.closed.retain(|_, at| !at.is_older_than(RETRY_PERIOD, now));
        close.retain(|(node, _)| !self.closed.contains_key(node));
        self.closed.extend(close.iter().map(|(node, _)| (node.clone(), now)));
        let untaint = to_untaint(state, holds, closed, placement, &self.rejected, self.is_planning, now);
        TaintActions { admit, close, change: to_change(state, holds, &untaint, now), untaint }
    }

    /// Records whether the API server accepted an admission. Returns the number of consecutive rejections when there are too many: the
    /// taint of the pod's node is removed.
    pub fn record(&mut self, admission: &Admission, accepted: bool) -> Option<u32> {
        if accepted {
            self.rejections.remove(&admission.pod.uid);
            return None;
        }
        let rejections = self.rejections.entry(admission.pod.uid.clone()).or_default();
        *rejections += 1;
        if *rejections < MAX_REJECTIONS {
            return None;
        }
        self.rejected.insert(admission.claim.clone());
        Some(*rejections)
    }

    /// Number of waiting pods whose last admission was rejected.
    #[cfg(test)]
    pub fn rejected_pods(&self) -> usize {
        self.rejections.len()
    }

    /// Forgets the rejections of pods and claims that are gone, and of pods that are bound.
    pub fn forget_deleted(&mut self, state: &ClusterState) {
        if self.rejected.is_empty() && self.rejections.is_empty() {
            return;
        }
        let waiting: HashSet<&String> =
            state.unbound.iter().filter_map(|key| Some(&state.pods.get(key)?.uid)).collect();
        self.rejections.retain(|pod, _| waiting.contains(pod));
        let known: HashSet<&String> = state.claims.values().filter_map(|claim| claim.metadata.uid.as_ref()).collect();
        self.rejected.retain(|claim| known.contains(claim));
    }
}

#[cfg(test)]
mod tests;
