//! The document: what a replica believes, bounded in entries and bytes.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;
use std::time::Duration;

use kube::ResourceExt;
use serde::Serialize;
use stowage_api::NodeClaim;
use stowage_api::conditions;
use stowage_cloud::offering_state::OfferingState;
use stowage_model::pause::Pause;
use stowage_model::pod_class::PodClass;
use stowage_model::time::UnixMillis;
use stowage_runtime::sync::heartbeat::Turn;

use crate::decisions::disruption::mark::DisruptionMark;
use crate::decisions::disruption::reason::DisruptionReason;
use crate::decisions::last_decisions::{LastConsolidation, LastPlan};
use crate::decisions::provisioning::quarantine::Cause;
use crate::decisions::provisioning::unschedulable::in_turns;
use crate::state::ClusterState;
use crate::state::object_ext::{NodeClaimExt, ObjectExt};
use crate::state::plan_record::Holds;
use crate::state::pods::{PodRecord, Scheduling};

/// Maximum number of entries of each list.
pub const MAX_ENTRIES: usize = 1_000;
/// Maximum number of pods without a node that are examined for pending ones.
const MAX_EXAMINED: usize = 10_000;
/// The same of one namespace, so that none hides the others.
const MAX_EXAMINED_PER_NAMESPACE: usize = 1_000;
/// Maximum size of a document.
pub const MAX_BYTES: usize = 4 << 20;
/// Maximum length of a text, in characters: the longest name of a pod with its namespace fits.
const MAX_TEXT: usize = 400;

/// What a replica believes. Times are RFC 3339 in UTC, of the API server's clock; ages are whole seconds.
#[derive(Debug, Default, Serialize)]
pub struct DebugState {
    pub time: String,
    pub version: &'static str,
    pub leading: bool,
    pub leading_since: Option<String>,
    pub not_ready: Vec<&'static str>,
    /// `null` before the emergency stop was read.
    pub paused: Option<&'static str>,
    pub objects: BTreeMap<&'static str, usize>,
    pub watches: Vec<Watch>,
    pub loops: Vec<Loop>,
    pub pending_pods: List<Pending>,
    pub holds: Option<HoldList>,
    pub nodeclaims_in_flight: List<InFlight>,
    pub nodes_leaving: List<Leaving>,
    /// `null` on other replicas.
    pub leader: Option<Leader>,
}

/// The first entries of a list.
#[derive(Debug, Serialize)]
pub struct List<T> {
    pub items: Vec<T>,
    /// Number of entries that are left out; of pending pods at most so many.
    pub truncated: usize,
}

impl<T> Default for List<T> {
    fn default() -> Self {
        Self { items: Vec::new(), truncated: 0 }
    }
}

impl<T> List<T> {
    /// The first [`MAX_ENTRIES`] of `total` entries.
    pub fn of(items: impl Iterator<Item = T>, total: usize) -> Self {
        let items: Vec<T> = items.take(MAX_ENTRIES).collect();
        let truncated = total.saturating_sub(items.len());
        Self { items, truncated }
    }

    fn cut(&mut self, most: usize) {
        self.truncated += self.items.len().saturating_sub(most);
        self.items.truncate(most);
    }
}

#[derive(Debug, Serialize)]
pub struct Watch {
    pub kind: &'static str,
    pub age_seconds: u64,
    pub lists: u64,
}

#[derive(Debug, Serialize)]
pub struct Loop {
    name: &'static str,
    /// Time in the present turn without progress; zero between two turns.
    turn_seconds: u64,
    limit_seconds: u64,
    /// `null` before the first; watches have one turn only.
    completed_seconds_ago: Option<u64>,
}

/// A pod that the scheduler found no node for.
#[derive(Debug, Serialize)]
pub struct Pending {
    /// `namespace/name`.
    pub pod: String,
    pub since: String,
    /// The NodeClaim that holds room for it.
    pub nodeclaim: Option<String>,
    /// Why it has none, as far as this replica knows.
    pub reason: Option<Reason>,
    #[serde(skip)]
    pub key: String,
    #[serde(skip)]
    pub class: Option<Arc<PodClass>>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    Quarantined(&'static str),
    Invalid(String),
    LeftOut(String),
}

#[derive(Debug, Serialize)]
pub struct HoldList {
    as_of: String,
    #[serde(flatten)]
    list: List<HeldRoom>,
}

#[derive(Debug, Serialize)]
pub struct HeldRoom {
    nodeclaim: String,
    /// `null` until a displaced pod has a successor.
    pod: Option<String>,
    /// The pod that the room was planned for.
    planned_pod: String,
    expires_at: String,
}

#[derive(Debug, Serialize)]
pub struct InFlight {
    nodeclaim: String,
    nodepool: Option<String>,
    age_seconds: u64,
    launched: bool,
    deleting: bool,
    /// Of the first condition that is not True.
    reason: Option<String>,
    message: Option<String>,
}

#[derive(Debug, Serialize)]
pub struct Leaving {
    nodeclaim: String,
    node: Option<String>,
    /// `null` where the NodeClaim was deleted without a mark.
    reason: Option<&'static str>,
    deadline: Option<String>,
    deleting: bool,
}

#[derive(Debug, Default, Serialize)]
pub struct Leader {
    pub last_plan: Option<PlanSummary>,
    pub last_consolidation: Option<Consolidation>,
    pub would_disrupt: List<WouldDisrupt>,
    pub quarantined_pod_classes: List<QuarantinedClass>,
    pub quarantined_supply: List<QuarantinedSource>,
    pub caps: Vec<Cap>,
    /// `null` with simulated EC2.
    pub offerings: Option<Offerings>,
}

#[derive(Debug, Serialize)]
pub struct PlanSummary {
    at: String,
    milliseconds: u64,
    pods: usize,
    new_nodes: usize,
    on_existing: usize,
    left_out: usize,
}

#[derive(Debug, Serialize)]
pub struct Consolidation {
    at: String,
    waits: bool,
    candidates: usize,
    verdicts: BTreeMap<&'static str, usize>,
    chosen: usize,
    pods: usize,
    plans: usize,
    milliseconds: u64,
    usd_per_hour_saved: f64,
}

/// Disruption is only reported.
#[derive(Debug, Serialize)]
pub struct WouldDisrupt {
    nodeclaim: String,
    reason: &'static str,
}

#[derive(Debug, Serialize)]
pub struct QuarantinedClass {
    namespace: String,
    cause: &'static str,
    until: String,
}

#[derive(Debug, Serialize)]
pub struct QuarantinedSource {
    kind: &'static str,
    name: String,
    until: String,
}

#[derive(Debug, Serialize)]
pub struct Cap {
    pub action: &'static str,
    pub per_minute: usize,
    pub left: usize,
}

#[derive(Debug, Serialize)]
pub struct Offerings {
    data: Vec<OfferingData>,
    unavailable: List<Unavailable>,
}

#[derive(Debug, Serialize)]
pub struct OfferingData {
    kind: String,
    source: &'static str,
    read_seconds_ago: Option<u64>,
    error: Option<String>,
}

#[derive(Debug, Serialize)]
pub struct Unavailable {
    what: String,
    until: String,
}

impl DebugState {
    /// The document in at most [`MAX_BYTES`]: with fewer entries of each list if need be.
    pub fn render(mut self) -> Vec<u8> {
        for most in [MAX_ENTRIES, 300, 100, 30] {
            self.cut(most);
            match serde_json::to_vec(&self) {
                Ok(document) if document.len() <= MAX_BYTES => return document,
                _ => {}
            }
        }
        self.cut(0);
        // No map has keys that are not text, so that this is never an error.
        serde_json::to_vec(&self).unwrap_or_default()
    }

    fn cut(&mut self, most: usize) {
        self.pending_pods.cut(most);
        self.nodeclaims_in_flight.cut(most);
        self.nodes_leaving.cut(most);
        if let Some(holds) = &mut self.holds {
            holds.list.cut(most);
        }
        if let Some(leader) = &mut self.leader {
            leader.would_disrupt.cut(most);
            leader.quarantined_pod_classes.cut(most);
            leader.quarantined_supply.cut(most);
            if let Some(offerings) = &mut leader.offerings {
                offerings.unavailable.cut(most);
            }
        }
    }

    /// Copies from the tables: the work is bounded, whatever their size.
    pub fn of_tables(state: &ClusterState, now: UnixMillis) -> Self {
        let leaving = &state.claim_index.leaving;
        let flying = state.in_flight.iter().filter_map(|name| Some(InFlight::of(state.claims.get(name)?, now)));
        let leaves = leaving.iter().filter_map(|name| {
            let claim = state.claims.get(name)?;
            Some(Leaving::of(claim, state.node_of(claim).map(|node| node.name_any()).as_deref()))
        });
        Self {
            time: now.rfc3339(),
            paused: state.pause.map(Pause::label),
            objects: BTreeMap::from([
                ("nodes", state.nodes.len()),
                ("nodeclaims", state.claims.len()),
                ("nodepools", state.pools.len()),
                ("ec2nodeclasses", state.classes.len()),
                ("pods", state.pods.len()),
                ("pods_without_node", state.unbound.len()),
            ]),
            pending_pods: pending(state),
            nodeclaims_in_flight: List::of(flying, state.in_flight.len()),
            nodes_leaving: List::of(leaves, leaving.len()),
            ..Self::default()
        }
    }

    /// Adds the holds that were resolved last, and when.
    pub fn add_holds(&mut self, at: UnixMillis, holds: &Holds) {
        for pod in &mut self.pending_pods.items {
            pod.nodeclaim = holds.by_pod.get(&pod.key).map(|claim| text(claim));
        }
        self.holds = Some(HoldList::of(at, holds));
    }

    /// Adds what the leader knows about pending pods: why each is left out of plans, in their order, and why it was left out of the last
    /// plan.
    pub fn add_reasons(&mut self, causes: &[Option<Cause>], last_plan: Option<&LastPlan>) {
        let left_out: BTreeMap<&str, &str> =
            last_plan.iter().flat_map(|plan| &plan.reasons).map(|(pod, reason)| (&**pod, reason.as_str())).collect();
        for (index, pod) in self.pending_pods.items.iter_mut().enumerate().filter(|(_, pod)| pod.reason.is_none()) {
            let cause = causes.get(index).copied().flatten().map(|cause| Reason::Quarantined(cause.as_str()));
            pod.reason = cause.or_else(|| left_out.get(&*pod.key).map(|reason| Reason::LeftOut(text(reason))));
        }
    }
}

/// A text of bounded length without control characters, also none that change the direction of what follows or end a line: operators read
/// it in a terminal.
pub fn text(text: &str) -> String {
    let is_control = |c: char| {
        c.is_control()
            || matches!(c, '\u{61c}' | '\u{200e}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    text.chars().take(MAX_TEXT).map(|c| if is_control(c) { '\u{fffd}' } else { c }).collect()
}

/// Pending pods, namespaces in turns, among the first pods without a node of each namespace. Those that are not examined count as left
/// out.
fn pending(state: &ClusterState) -> List<Pending> {
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
    List::of(in_turns(found, MAX_ENTRIES).into_iter().map(|(pod, since)| Pending::of(pod, since)), total)
}

impl Pending {
    fn of(pod: &PodRecord, since: UnixMillis) -> Self {
        let (class, reason) = match &pod.entry {
            Ok(entry) => (Some(Arc::clone(&entry.class)), None),
            Err(error) => (None, Some(Reason::Invalid(text(error)))),
        };
        let key = pod.key();
        Self { pod: text(&key), since: since.rfc3339(), nodeclaim: None, reason, key, class }
    }
}

impl HoldList {
    fn of(at: UnixMillis, holds: &Holds) -> Self {
        let total: usize = holds.by_claim.values().map(Vec::len).sum();
        let all = holds.by_claim.iter().flat_map(|(claim, holds)| holds.iter().map(move |hold| (claim, hold)));
        let entries = all.map(|(claim, hold)| HeldRoom {
            nodeclaim: text(claim),
            pod: hold.pod.as_deref().map(text),
            planned_pod: text(&hold.original),
            expires_at: hold.expires_at.rfc3339(),
        });
        Self { as_of: at.rfc3339(), list: List::of(entries, total) }
    }
}

impl Loop {
    pub fn of(turn: &Turn) -> Self {
        Self {
            name: turn.name,
            turn_seconds: turn.age.as_secs(),
            limit_seconds: turn.limit.as_secs(),
            completed_seconds_ago: turn.completed.map(|ago| ago.as_secs()),
        }
    }
}

impl InFlight {
    fn of(claim: &NodeClaim, now: UnixMillis) -> Self {
        let launched = claim.has_condition(conditions::LAUNCHED);
        let missing = if launched { conditions::REGISTERED } else { conditions::LAUNCHED };
        let condition = claim.condition(missing);
        Self {
            nodeclaim: text(&claim.name_any()),
            nodepool: claim.node_pool().map(text),
            age_seconds: age(claim.created_at(), now),
            launched,
            deleting: claim.is_deleting(),
            reason: condition.map(|condition| text(&condition.reason)),
            message: condition.map(|condition| text(&condition.message)),
        }
    }
}

impl Leaving {
    fn of(claim: &NodeClaim, node: Option<&str>) -> Self {
        let mark = DisruptionMark::of(claim);
        Self {
            nodeclaim: text(&claim.name_any()),
            node: node.map(text),
            reason: mark.map(|mark| mark.reason.as_str()),
            deadline: mark.and_then(|mark| mark.deadline).map(UnixMillis::rfc3339),
            deleting: claim.is_deleting(),
        }
    }
}

impl PlanSummary {
    pub fn of(plan: &LastPlan) -> Self {
        let LastPlan { at, took, pods, new_nodes, on_existing, left_out, .. } = *plan;
        Self { at: at.rfc3339(), milliseconds: millis(took), pods, new_nodes, on_existing, left_out }
    }
}

impl Consolidation {
    pub fn of(last: &LastConsolidation) -> Self {
        Self {
            at: last.at.rfc3339(),
            waits: last.waits,
            candidates: last.candidates,
            verdicts: last.verdicts.clone(),
            chosen: last.chosen,
            pods: last.pods,
            plans: last.plans,
            milliseconds: millis(last.took),
            usd_per_hour_saved: last.saving.usd(),
        }
    }
}

impl WouldDisrupt {
    pub fn of(claim: &str, reason: DisruptionReason) -> Self {
        Self { nodeclaim: text(claim), reason: reason.as_str() }
    }
}

impl QuarantinedClass {
    pub fn of(namespace: &str, cause: Cause, until: UnixMillis) -> Self {
        Self { namespace: text(namespace), cause: cause.as_str(), until: until.rfc3339() }
    }
}

impl QuarantinedSource {
    pub fn of(kind: &'static str, name: &str, until: UnixMillis) -> Self {
        Self { kind, name: text(name), until: until.rfc3339() }
    }
}

impl Offerings {
    pub fn of(offerings: &OfferingState, now: UnixMillis) -> Self {
        let data = offerings.data.iter().map(|data| OfferingData {
            kind: text(&data.kind),
            source: data.source,
            read_seconds_ago: data.read_at.map(|at| age(at, now)),
            error: data.error.as_deref().map(text),
        });
        let unavailable =
            offerings.unavailable.iter().map(|(what, until)| Unavailable { what: text(what), until: until.rfc3339() });
        Self { data: data.collect(), unavailable: List::of(unavailable, offerings.unavailable_count) }
    }
}

fn age(since: UnixMillis, now: UnixMillis) -> u64 {
    now.saturating_since(since).as_secs()
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
