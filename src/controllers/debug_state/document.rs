//! The document: a pure function of the snapshot, bounded in bytes.

use std::collections::BTreeMap;
use std::collections::HashMap;
use std::time::Duration;

use kube::ResourceExt;
use serde::Serialize;
use stowage_api::NodeClaim;
use stowage_api::conditions;
use stowage_model::time::UnixMillis;

use crate::cloud::offering_state::OfferingState;
use crate::controllers::debug_state::snapshot::{Capped, LeaderCopy, Snapshot};
use crate::decisions::disruption::mark::DisruptionMark;
use crate::decisions::last_decisions::{LastConsolidation, LastPlan};
use crate::decisions::provisioning::quarantine::Cause;
use crate::state::object_ext::{NodeClaimExt, ObjectExt};
use crate::state::plan_record::Holds;
use crate::sync::heartbeat::Turn;

/// Maximum size of a document.
pub const MAX_BYTES: usize = 4 << 20;
/// Maximum length of a text, in characters: the longest name of a pod with its namespace fits.
const MAX_TEXT: usize = 400;

/// What a replica believes. Times are RFC 3339 in UTC, of the API server's clock; ages are whole seconds.
#[derive(Debug, Serialize)]
pub struct DebugState<'a> {
    time: String,
    version: &'a str,
    leading: bool,
    leading_since: Option<String>,
    not_ready: &'a [&'static str],
    /// `null` before the emergency stop was read.
    paused: Option<&'static str>,
    objects: HashMap<&'static str, usize>,
    watches: Vec<Watch>,
    loops: Vec<Loop>,
    pending_pods: List<Pending<'a>>,
    holds: Option<HoldList>,
    nodeclaims_in_flight: List<InFlight>,
    nodes_leaving: List<Leaving>,
    /// `null` on other replicas.
    leader: Option<Leader>,
}

/// The first entries of a list.
#[derive(Debug, Serialize)]
struct List<T> {
    items: Vec<T>,
    /// Number of entries that are left out; of pending pods at most so many.
    truncated: usize,
}

#[derive(Debug, Serialize)]
struct Watch {
    kind: &'static str,
    age_seconds: u64,
    lists: u64,
}

#[derive(Debug, Serialize)]
struct Loop {
    name: &'static str,
    /// Time in the present turn without progress; zero between two turns.
    turn_seconds: u64,
    limit_seconds: u64,
    /// `null` before the first; watches have one turn only.
    completed_seconds_ago: Option<u64>,
}

#[derive(Debug, Serialize)]
struct Pending<'a> {
    pod: String,
    since: String,
    /// The NodeClaim that holds room for it.
    nodeclaim: Option<String>,
    /// Why it has none, as far as this replica knows.
    reason: Option<Reason<'a>>,
}

#[derive(Debug, Serialize)]
#[serde(untagged)]
enum Reason<'a> {
    Quarantined { quarantined: &'a str },
    Invalid { invalid: String },
    LeftOut { left_out: String },
}

#[derive(Debug, Serialize)]
struct HoldList {
    as_of: String,
    #[serde(flatten)]
    list: List<Hold>,
}

#[derive(Debug, Serialize)]
struct Hold {
    nodeclaim: String,
    /// `null` until a displaced pod has a successor.
    pod: Option<String>,
    /// The pod that the room was planned for.
    planned_pod: String,
    expires_at: String,
}

#[derive(Debug, Serialize)]
struct InFlight {
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
struct Leaving {
    nodeclaim: String,
    node: Option<String>,
    /// `null` where the NodeClaim was deleted without a mark.
    reason: Option<&'static str>,
    deadline: Option<String>,
    deleting: bool,
}

#[derive(Debug, Serialize)]
struct Leader {
    last_plan: Option<PlanSummary>,
    last_consolidation: Option<Consolidation>,
    would_disrupt: List<WouldDisrupt>,
    quarantined_pod_classes: List<QuarantinedClass>,
    quarantined_supply: List<QuarantinedSource>,
    caps: Vec<Cap>,
    /// `null` with simulated EC2.
    offerings: Option<Offerings>,
}

#[derive(Debug, Serialize)]
struct PlanSummary {
    at: String,
    milliseconds: u64,
    pods: usize,
    new_nodes: usize,
    on_existing: usize,
    left_out: usize,
}

#[derive(Debug, Serialize)]
struct Consolidation {
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
struct WouldDisrupt {
    nodeclaim: String,
    reason: &'static str,
}

#[derive(Debug, Serialize)]
struct QuarantinedClass {
    namespace: String,
    cause: &'static str,
    until: String,
}

#[derive(Debug, Serialize)]
struct QuarantinedSource {
    kind: &'static str,
    name: String,
    until: String,
}

#[derive(Debug, Serialize)]
struct Cap {
    action: &'static str,
    per_minute: usize,
    left: usize,
}

#[derive(Debug, Serialize)]
struct Offerings {
    data: Vec<OfferingData>,
    unavailable: List<Unavailable>,
}

#[derive(Debug, Serialize)]
struct OfferingData {
    kind: String,
    source: &'static str,
    read_seconds_ago: Option<u64>,
    error: Option<String>,
}

#[derive(Debug, Serialize)]
struct Unavailable {
    what: String,
    until: String,
}

/// The document of a snapshot, in at most [`MAX_BYTES`]: with fewer entries of each list if need be.
pub fn render(snapshot: &Snapshot) -> Vec<u8> {
    for most in [1_000, 300, 100, 30] {
        match serde_json::to_vec(&DebugState::of(snapshot, most)) {
            Ok(document) if document.len() <= MAX_BYTES => return document,
            _ => {}
        }
    }
    // No map has keys that are not text, so that this is never an error.
    serde_json::to_vec(&DebugState::of(snapshot, 0)).unwrap_or_default()
}

impl<'a> DebugState<'a> {
    /// The state, with at most `most` entries of each list.
    pub fn of(snapshot: &'a Snapshot, most: usize) -> Self {
        let (now, cluster, process) = (snapshot.now, &snapshot.cluster, &snapshot.process);
        Self {
            time: now.rfc3339(),
            version: process.version,
            leading: process.leading_since.is_some(),
            leading_since: process.leading_since.map(UnixMillis::rfc3339),
            not_ready: &process.not_ready,
            paused: cluster.pause.map(stowage_model::pause::Pause::label),
            objects: cluster.counts.iter().copied().collect(),
            watches: snapshot
                .watches
                .iter()
                .map(|(kind, age, lists)| Watch { kind, age_seconds: age.as_secs(), lists: *lists })
                .collect(),
            loops: process.turns.iter().map(Loop::of).collect(),
            pending_pods: pending(snapshot, most),
            holds: snapshot.holds.as_ref().map(|(at, holds)| HoldList { as_of: at.rfc3339(), list: held(holds, most) }),
            nodeclaims_in_flight: list(&cluster.in_flight, most, |claim| InFlight::of(claim, now)),
            nodes_leaving: list(&cluster.leaving, most, |(claim, node)| Leaving::of(claim, node.as_deref())),
            leader: snapshot.leader.as_ref().map(|leader| Leader::of(leader, most, now)),
        }
    }
}

/// At most `most` entries of a list.
fn list<T, U>(of: &Capped<T>, most: usize, entry: impl Fn(&T) -> U) -> List<U> {
    let items: Vec<U> = of.items.iter().take(most).map(entry).collect();
    List { truncated: of.truncated + of.items.len() - items.len(), items }
}

/// A text of bounded length without control characters, also none that change the direction of what follows or end a line: operators read
/// it in a terminal.
fn text(text: &str) -> String {
    let is_control = |c: char| {
        c.is_control()
            || matches!(c, '\u{61c}' | '\u{200e}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    text.chars().take(MAX_TEXT).map(|c| if is_control(c) { '\u{fffd}' } else { c }).collect()
}

fn pending(snapshot: &Snapshot, most: usize) -> List<Pending<'_>> {
    let (leader, pending) = (snapshot.leader.as_ref(), &snapshot.cluster.pending);
    let plan = leader.and_then(|leader| leader.last_plan.as_ref());
    let left_out: HashMap<&str, &str> =
        plan.iter().flat_map(|plan| &plan.reasons).map(|(pod, reason)| (&**pod, reason.as_str())).collect();
    let holds = snapshot.holds.as_ref().map(|(_, holds)| holds);
    let causes = leader.map_or(&[][..], |leader| &leader.causes);
    let items = pending.items.iter().take(most).enumerate().map(|(index, pod)| {
        let cause = causes.get(index).copied().flatten().map(Cause::as_str);
        let reason = match (&pod.class, cause, left_out.get(&*pod.key)) {
            (Err(error), ..) => Some(Reason::Invalid { invalid: text(error) }),
            (_, Some(quarantined), _) => Some(Reason::Quarantined { quarantined }),
            (.., Some(reason)) => Some(Reason::LeftOut { left_out: text(reason) }),
            _ => None,
        };
        let nodeclaim = holds.and_then(|holds| holds.by_pod.get(&pod.key)).map(|claim| text(claim));
        Pending { pod: text(&pod.key), since: pod.since.rfc3339(), nodeclaim, reason }
    });
    let items: Vec<_> = items.collect();
    List { truncated: pending.truncated + pending.items.len() - items.len(), items }
}

fn held(holds: &Holds, most: usize) -> List<Hold> {
    let total: usize = holds.by_claim.values().map(Vec::len).sum();
    let all = holds.by_claim.iter().flat_map(|(claim, holds)| holds.iter().map(move |hold| (claim, hold)));
    let items: Vec<Hold> = all
        .take(most)
        .map(|(claim, hold)| Hold {
            nodeclaim: text(claim),
            pod: hold.pod.as_deref().map(text),
            planned_pod: text(&hold.original),
            expires_at: hold.expires_at.rfc3339(),
        })
        .collect();
    List { truncated: total - items.len(), items }
}

impl Loop {
    fn of(turn: &Turn) -> Self {
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

impl Leader {
    fn of(leader: &LeaderCopy, most: usize, now: UnixMillis) -> Self {
        let cap = |(action, per_minute, left): &(&'static str, usize, usize)| Cap {
            action,
            per_minute: *per_minute,
            left: *left,
        };
        Self {
            last_plan: leader.last_plan.as_deref().map(PlanSummary::of),
            last_consolidation: leader.last_consolidation.as_ref().map(Consolidation::of),
            would_disrupt: list(&leader.reported, most, |(claim, reason)| WouldDisrupt {
                nodeclaim: text(claim),
                reason: reason.as_str(),
            }),
            quarantined_pod_classes: list(&leader.pods_left_out, most, |(namespace, cause, until)| QuarantinedClass {
                namespace: text(namespace),
                cause: cause.as_str(),
                until: until.rfc3339(),
            }),
            quarantined_supply: list(&leader.supply_left_out, most, |(kind, name, until)| QuarantinedSource {
                kind,
                name: text(name),
                until: until.rfc3339(),
            }),
            caps: leader.caps.iter().map(cap).collect(),
            offerings: leader.offerings.as_ref().map(|offerings| Offerings::of(offerings, most, now)),
        }
    }
}

impl PlanSummary {
    fn of(plan: &LastPlan) -> Self {
        let LastPlan { at, took, pods, new_nodes, on_existing, left_out, .. } = *plan;
        Self { at: at.rfc3339(), milliseconds: millis(took), pods, new_nodes, on_existing, left_out }
    }
}

impl Consolidation {
    fn of(last: &LastConsolidation) -> Self {
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

impl Offerings {
    fn of(offerings: &OfferingState, most: usize, now: UnixMillis) -> Self {
        let data = offerings.data.iter().map(|data| OfferingData {
            kind: text(&data.kind),
            source: data.source,
            read_seconds_ago: data.read_at.map(|at| age(at, now)),
            error: data.error.as_deref().map(text),
        });
        let unavailable: Vec<Unavailable> = offerings
            .unavailable
            .iter()
            .take(most)
            .map(|(what, until)| Unavailable { what: text(what), until: until.rfc3339() })
            .collect();
        let truncated = offerings.unavailable_count.saturating_sub(unavailable.len());
        Self { data: data.collect(), unavailable: List { items: unavailable, truncated } }
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
