//! Nominations of planned pods, renewal of holds, and retries of kube-scheduler when a hold ends.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;
use stowage_model::labels;
use stowage_model::pod_class::PodClass;
use stowage_model::time::UnixMillis;

use crate::decisions::placement::hold_events::{EndedHold, HoldEnd, Progress, ended};
use crate::decisions::placement::mode::PlacementMode;
use crate::decisions::placement::planned_taint::{is_closed, planned_taint_of, suffices};
use crate::decisions::placement::refusals::{Refusals, Withdrawal};
use crate::decisions::pod_ref::PodRef;
use crate::state::object_ext::{NodeExt, ObjectExt};
use crate::state::plan_record::Holds;
use crate::state::pods::PodRecord;
use crate::state::tables::ClusterState;

/// How often kube-scheduler is triggered while pods wait for open nodes: it may have attempted them before the extender's view
/// included their holds, and no other event may follow.
const RETRY_TRIGGER_PERIOD: Duration = Duration::from_secs(2);
/// Minimum time between two nominations of a pod.
const RENOMINATE_PERIOD: Duration = Duration::from_millis(200);
/// A pass nominates no pods of further nodes after this many: it ends soon, so that the next one renews the holds that end meanwhile.
const MAX_NOMINATIONS: usize = 64;

/// Held pods of a claim that are not nominated to its node yet.
///
/// When the scheduler evaluates a node, it counts every pod nominated to that node, but none nominated elsewhere: if more pods of a
/// topology spread constraint than its `maxSkew` were nominated to one node, each would appear to violate it. So at most `maxSkew`
/// are nominated at a time, and none when the extender or the planned taint (`closed`) directs them anyway.
pub fn to_nominate(
    state: &ClusterState,
    holds: &Holds,
    placement: PlacementMode,
    closed: bool,
    claim: &str,
    node: &str,
) -> Vec<PodRef> {
    let mut left: HashMap<*const PodClass, i64> = HashMap::new();
    let mut out = Vec::new();
    let waiting = || {
        let live = holds.by_claim.get(claim).into_iter().flatten();
        live.filter_map(|hold| state.pods.get(hold.pod.as_ref()?)).filter(|pod| pod.node.is_none())
    };
    let limit = |pod: &PodRecord| {
        let class = &pod.entry.as_ref().ok()?.class;
        let hard = class.spread.iter().filter(|spread| spread.hard && *spread.key != *labels::HOSTNAME);
        let skew = hard.map(|spread| spread.max_skew).min()?;
        Some((Arc::as_ptr(class), if placement == PlacementMode::Extender || closed { 0 } else { skew }))
    };
    let nominated = |pod: &&PodRecord| pod.nominated.as_deref() == Some(node);
    for pod in waiting().filter(|pod| nominated(pod)) {
        if let Some((class, skew)) = limit(pod) {
            *left.entry(class).or_insert(skew) -= 1;
        }
    }
    for pod in waiting().filter(|pod| !nominated(pod)) {
        if let Some((class, skew)) = limit(pod) {
            let left = left.entry(class).or_insert(skew);
            if *left <= 0 {
                continue;
            }
            *left -= 1;
        }
        out.push(PodRef::of(pod));
    }
    out
}

/// What one pass does.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct NominationActions {
    /// Holds that ended since the last pass.
    pub ended: Vec<EndedHold>,
    /// For each pod that was bound as planned, to a node that became ready since: the time since then.
    pub bound_after: Vec<Duration>,
    /// Claims whose holds are renewed.
    pub renew: Vec<String>,
    /// Pods to withdraw from their plans.
    pub withdraw: Vec<Withdrawal>,
    /// Claims, each with the pod that its plan names and that was bound elsewhere: the next pod of this name must not get this hold back.
    pub strayed: Vec<(String, String)>,
    /// Pods to nominate, by node.
    pub nominate: BTreeMap<String, Vec<PodRef>>,
    /// Nodes to update, so that kube-scheduler retries the pods that only the extender rejected.
    pub trigger: Vec<String>,
}

/// What is remembered between two passes.
#[derive(Debug)]
pub struct Nominations {
    holds: Arc<Holds>,
    /// When the node of each claim with holds became ready: `None` while it is not, no entry if it was ready before it had holds.
    ready: HashMap<String, Option<UnixMillis>>,
    /// When each pod was last nominated, by UID.
    nominated: HashMap<String, UnixMillis>,
    /// The last claim whose pods were nominated: the next pass begins after it, so that each one has its turn.
    last: String,
    /// When kube-scheduler was last triggered, or had no reason to be.
    triggered: UnixMillis,
    progress: Progress,
    refusals: Refusals,
}

impl Nominations {
    /// Begins at `now`, without knowledge of earlier holds.
    pub fn new(now: UnixMillis) -> Self {
        Self {
            holds: Arc::default(),
            ready: HashMap::new(),
            nominated: HashMap::new(),
            last: String::new(),
            triggered: now,
            progress: Progress::default(),
            refusals: Refusals::default(),
        }
    }

    /// Compares the holds with those of the last pass, and records the nominations as made.
    pub fn choose(
        &mut self,
        state: &ClusterState,
        holds: &Arc<Holds>,
        placement: PlacementMode,
        now: UnixMillis,
    ) -> NominationActions {
        let ended = ended(&self.holds, holds, state);
        self.holds = Arc::clone(holds);
        let bound_after = self.bound_after(&ended, now);
        self.observe_ready(state, now);
        for hold in ended.iter().filter(|hold| hold.end == HoldEnd::Planned) {
            self.progress.record(state, &hold.pod, now);
        }
        self.nominated.retain(|_, at| !at.is_older_than(RENOMINATE_PERIOD, now));
        self.progress.expire(now);
        let is_named = |(pod, claim): &(&String, &String)| state.plan_index.claims_of(pod).any(|other| other == *claim);
        let strayed = holds.strays.iter().filter(is_named).map(|(pod, claim)| (claim.clone(), pod.clone())).collect();
        if placement == PlacementMode::Off {
            return NominationActions { ended, bound_after, strayed, ..NominationActions::default() };
        }
        let renew = self.progress.to_renew(state, holds, now);
        let withdraw = self.refusals.choose(state, holds, &self.progress, now);
        let nominate = self.next_nominations(state, holds, placement, now);
        let mut trigger = Vec::new();
        if placement == PlacementMode::Extender {
            let unplanned = ended.iter().filter(|hold| hold.end != HoldEnd::Planned);
            let node_of = |claim: &String| Some(state.node_of(state.claims.get(claim)?)?.name_any());
            let freed: Vec<String> = unplanned.filter_map(|hold| node_of(&hold.claim)).collect();
            let waited_for = |claim: &str| holds.by_claim[claim].iter().any(|hold| hold.pod.is_some());
            let awaited =
                open_nodes(state, holds).find(|(claim, _)| waited_for(claim)).map(|(_, node)| node.name_any());
            trigger = self.nodes_to_update(freed, awaited, now);
        }
        NominationActions { ended, bound_after, renew, withdraw, strayed, nominate, trigger }
    }

    /// How long the nodes of the pods that were bound as planned had been ready.
    fn bound_after(&self, ended: &[EndedHold], now: UnixMillis) -> Vec<Duration> {
        let bound = ended.iter().filter(|hold| hold.end == HoldEnd::Planned);
        bound.filter_map(|hold| self.ready.get(&hold.claim)?.map(|ready| now.saturating_since(ready))).collect()
    }

    fn observe_ready(&mut self, state: &ClusterState, now: UnixMillis) {
        self.ready.retain(|claim, _| self.holds.by_claim.contains_key(claim));
        for claim in self.holds.by_claim.keys() {
            let node = state.claims.get(claim).and_then(|claim| state.node_of(claim));
            let is_ready = node.is_some_and(|node| node.is_ready());
            match self.ready.get_mut(claim) {
                Some(since @ None) if is_ready => *since = Some(now),
                None if !is_ready => drop(self.ready.insert(claim.clone(), None)),
                _ => {}
            }
        }
    }

    /// Pods to nominate in this pass, by node, of the next claims in the order of their names.
    fn next_nominations(
        &mut self,
        state: &ClusterState,
        holds: &Holds,
        placement: PlacementMode,
        now: UnixMillis,
    ) -> BTreeMap<String, Vec<PodRef>> {
        let mut open: Vec<_> = open_nodes(state, holds).collect();
        open.sort_unstable_by_key(|(claim, _)| (**claim <= self.last, *claim));
        let (mut out, mut count) = (BTreeMap::new(), 0);
        for (claim, node) in open {
            let (name, taint) = (node.name_any(), planned_taint_of(node));
            let mut pods = to_nominate(state, holds, placement, taint.is_some_and(is_closed), claim, &name);
            pods.retain(|pod| !self.nominated.contains_key(&pod.uid));
            if pods.is_empty() || taint.is_some_and(|taint| suffices(state, node, taint, placement, now)) {
                continue;
            }
            self.nominated.extend(pods.iter().map(|pod| (pod.uid.clone(), now)));
            self.last.clone_from(claim);
            count += pods.len();
            out.insert(name, pods);
            if count >= MAX_NOMINATIONS {
                break;
            }
        }
        out
    }

    /// Nodes to update: those `freed` by holds that ended other than as planned, and periodically an open node that a held pod waits
    /// for (`awaited`).
    fn nodes_to_update(&mut self, freed: Vec<String>, awaited: Option<String>, now: UnixMillis) -> Vec<String> {
        let mut nodes = freed;
        if awaited.is_none() {
            self.triggered = now;
        } else if self.triggered.is_older_than(RETRY_TRIGGER_PERIOD, now) && nodes.is_empty() {
            // The update of one node triggers a retry of all of these pods.
            nodes.extend(awaited);
        }
        if !nodes.is_empty() {
            self.triggered = now;
        }
        nodes.sort();
        nodes.dedup();
        nodes
    }
}

/// Claims with holds whose nodes are registered and ready, with their nodes.
fn open_nodes<'a>(state: &'a ClusterState, holds: &'a Holds) -> impl Iterator<Item = (&'a String, &'a Node)> {
    holds.by_claim.keys().filter_map(|claim| {
        let node = state.node_of(state.claims.get(claim)?)?;
        let open = node.is_labeled(labels::REGISTERED) && node.is_ready();
        open.then_some((claim, &**node))
    })
}

#[cfg(test)]
mod tests;
