//! The progress of moves, from the objects alone: a new leader continues from them.
//!
//! A move waits until the pods of all its sources have room on nodes that are initialized, and until those that surge have successors that are ready; then
//! its sources are deleted. Before that it is rolled back when a pod has no room and none is found, when something protects a source now, and when it is given up.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;
use std::time::Duration;

use kube::ResourceExt;
use stowage_api::{NodeClaim, conditions};
use stowage_model::time::UnixMillis;

use crate::decisions::disruption::blockers::{
    Blocker, evicts_protected_pods, replacement_protection, surging_budget_block,
};
use crate::decisions::disruption::mark::DisruptionMark;
use crate::decisions::disruption::move_record::MoveRecord;
use crate::decisions::disruption::reason::DisruptionReason;
use crate::decisions::disruption::surge::{Surging, Wanted, wanted};
use crate::state::object_ext::{NodeClaimExt, ObjectExt};
use crate::state::plan_record::Holds;
use crate::state::pods::PodRecord;
use crate::state::tables::ClusterState;

/// A source that is not marked this long after its move began will not be.
const MARKING: Duration = Duration::from_secs(30);

/// A move is rolled back if its sources are still there after this time.
pub fn give_up_after(reason: DisruptionReason) -> Duration {
    if reason == DisruptionReason::Underutilized { Duration::from_mins(5) } else { Duration::from_mins(10) }
}

/// What a move does next.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    Wait,
    /// Find room for the pods of its sources that have none: bound since it was decided, or their target is gone.
    Reserve,
    /// These pods leave their ReplicaSets, which create their successors: the room of all pods is ready.
    Surge(Vec<Surging>),
    /// Delete these claims: their pods have room elsewhere.
    Depart(Vec<Arc<NodeClaim>>),
    /// Undo it, for this reason. Sources that are deleted already stay so.
    RollBack(String),
}

/// A move, by its sources that are marked and not deleted. Its record has the pods of all of them that no room can be kept for.
#[derive(Clone, Debug, PartialEq)]
pub struct Progress {
    pub record: MoveRecord,
    pub reason: DisruptionReason,
    pub sources: Vec<Arc<NodeClaim>>,
    pub step: Step,
}

/// The record of the move that a claim is a source of, if it is marked for it and not deleted. An interruption ends its part in the move.
pub fn source_of(claim: &NodeClaim) -> Option<(MoveRecord, DisruptionReason)> {
    let mark = DisruptionMark::of(claim).filter(|mark| mark.is_voluntary() && !claim.is_deleting())?;
    Some((MoveRecord::of(claim).filter(|_| mark.reason != DisruptionReason::Empty)?, mark.reason))
}

/// Every move that has sources which are not deleted.
pub fn progress(state: &ClusterState, holds: &Holds, now: UnixMillis) -> Vec<Progress> {
    steps(state, holds, |_| true, now)
}

/// The move with this id, if it has sources which are not deleted.
pub fn progress_of(state: &ClusterState, holds: &Holds, id: &str, now: UnixMillis) -> Option<Progress> {
    steps(state, holds, |record| record.id == id, now).pop()
}

fn steps(
    state: &ClusterState,
    holds: &Holds,
    is_meant: impl Fn(&MoveRecord) -> bool,
    now: UnixMillis,
) -> Vec<Progress> {
    let mut moves: BTreeMap<String, Progress> = BTreeMap::new();
    for (claim, record, reason) in sources(state).filter(|(_, record, _)| is_meant(record)) {
        let unheld = record.unheld.clone();
        let fresh = |record: MoveRecord| Progress { record, reason, sources: Vec::new(), step: Step::Wait };
        let one = moves.entry(record.id.clone()).or_insert_with(|| fresh(record));
        one.record.unheld.extend(unheld);
        one.sources.push(Arc::clone(claim));
    }
    if moves.is_empty() {
        return Vec::new();
    }
    let room = Room::of(state, holds);
    let mut moves: Vec<Progress> = moves.into_values().collect();
    for one in &mut moves {
        one.step = step(state, &room, one, now);
    }
    moves
}

/// The sources of moves that are not deleted.
fn sources(state: &ClusterState) -> impl Iterator<Item = (&Arc<NodeClaim>, MoveRecord, DisruptionReason)> {
    let leaving = state.claim_index.leaving.iter().filter_map(|name| state.claims.get(name));
    leaving.filter_map(|claim| source_of(claim).map(|(record, reason)| (claim, record, reason)))
}

/// Pods of the sources of moves, but for these NodeClaims, that go to nodes where no room can be kept.
pub fn unheld_pods(state: &ClusterState, but: &HashSet<&str>) -> BTreeSet<String> {
    let others = sources(state).filter(|(claim, ..)| !but.contains(&*claim.name_any()));
    others.flat_map(|(claim, record, _)| unheld_of(state, claim, &record)).collect()
}

/// Pods of a source that go to nodes where no room can be kept.
pub fn unheld_of(state: &ClusterState, claim: &NodeClaim, record: &MoveRecord) -> Vec<String> {
    let Some(node) = state.node_of(claim).filter(|_| !record.unheld.is_empty()) else { return Vec::new() };
    let node = node.name_any();
    let pods = state.pods_on(&node).filter(|pod| pod.reschedulable()).map(PodRecord::key);
    pods.filter(|pod| record.unheld.contains(pod)).collect()
}

/// Pods of sources that have room elsewhere, and those of them whose new node is initialized.
struct Room<'a> {
    held: HashSet<&'a str>,
    ready: HashSet<&'a str>,
}

impl<'a> Room<'a> {
    fn of(state: &ClusterState, holds: &'a Holds) -> Self {
        let mut out = Self { held: HashSet::new(), ready: HashSet::new() };
        for (claim, holds) in &holds.by_claim {
            let is_initialized =
                state.claims.get(claim).is_some_and(|claim| claim.has_condition(conditions::INITIALIZED));
            for hold in holds.iter().filter(|hold| hold.owner.is_some()) {
                out.held.insert(&hold.original);
                if is_initialized {
                    out.ready.insert(&hold.original);
                }
            }
        }
        out
    }
}

fn step(state: &ClusterState, room: &Room<'_>, one: &Progress, now: UnixMillis) -> Step {
    let record = &one.record;
    if let Some(name) = record.sources.iter().find(|name| is_unmarked(state, name, record)) {
        if record.at.is_older_than(MARKING, now) {
            return Step::RollBack(format!("NodeClaim {name} is not marked"));
        }
        return Step::Wait;
    }
    if let Some(name) = &record.replaced_by {
        return replacement_step(state, one, name, now);
    }
    let (mut ready, mut is_without_room) = (Vec::new(), false);
    for claim in &one.sources {
        let Some(node) = state.node_of(claim) else {
            ready.push(Arc::clone(claim));
            continue;
        };
        let name = node.name_any();
        if let Some(blocker) = blocker(state, claim, one.reason) {
            return Step::RollBack(blocker.to_string());
        }
        let moving = state.pods_on(&name).filter(|pod| pod.reschedulable());
        let moving: Vec<String> = moving
            .filter(|pod| pod.entry.as_ref().is_ok_and(|entry| entry.owner.is_some()))
            .map(PodRecord::key)
            .filter(|pod| !record.unheld.contains(pod))
            .collect();
        is_without_room |= moving.iter().any(|pod| !room.held.contains(&**pod));
        let may_drain = evicts_protected_pods(claim, one.reason) || surging_budget_block(state, &name).is_none();
        if may_drain && moving.iter().all(|pod| room.ready.contains(&**pod)) {
            ready.push(Arc::clone(claim));
        }
    }
    let has_begun = record.sources.iter().any(|name| state.claims.get(name).is_none_or(|claim| claim.is_deleting()));
    let may_depart = has_begun || ready.len() == one.sources.len();
    let next = if ready.is_empty() || !may_depart || is_without_room { None } else { departure(state, ready) };
    match next {
        Some(Step::Depart(ready)) => Step::Depart(ready),
        _ if record.give_up <= now => Step::RollBack("its pods found no other node in time".to_owned()),
        Some(next) => next,
        None if is_without_room => Step::Reserve,
        None => Step::Wait,
    }
}

/// The next step when the pods of these sources may leave; `None` while successors of pods that surge are not ready.
fn departure(state: &ClusterState, sources: Vec<Arc<NodeClaim>>) -> Option<Step> {
    match wanted(state, sources.iter().map(|claim| &**claim)) {
        Wanted::Leave(pods) => Some(Step::Surge(pods)),
        Wanted::Successors => None,
        Wanted::Nothing => Some(Step::Depart(sources)),
    }
}

/// The step of a move that replaces a node of a static NodePool: its pods leave when the new node is initialized.
fn replacement_step(state: &ClusterState, one: &Progress, replacement: &str, now: UnixMillis) -> Step {
    let Some(replacement) = state.claims.get(replacement).filter(|claim| !claim.is_leaving()) else {
        return Step::RollBack(format!("its replacement, NodeClaim {replacement}, is gone"));
    };
    if let Some(blocker) = one.sources.iter().find_map(|claim| blocker(state, claim, one.reason)) {
        return Step::RollBack(blocker.to_string());
    }
    let is_refused = |claim: &Arc<NodeClaim>| {
        let node = state.node_of(claim).filter(|_| !evicts_protected_pods(claim, one.reason));
        node.is_some_and(|node| surging_budget_block(state, &node.name_any()).is_some())
    };
    let may_depart = replacement.has_condition(conditions::INITIALIZED) && !one.sources.iter().any(is_refused);
    match may_depart.then(|| departure(state, one.sources.clone())).flatten() {
        Some(Step::Depart(sources)) => Step::Depart(sources),
        _ if one.record.give_up <= now => Step::RollBack("its replacement was not ready in time".to_owned()),
        Some(next) => next,
        None => Step::Wait,
    }
}

/// Whether a source of a move lacks its mark, although nothing else removes its node.
fn is_unmarked(state: &ClusterState, name: &str, record: &MoveRecord) -> bool {
    let Some(claim) = state.claims.get(name).filter(|claim| !claim.is_deleting()) else { return false };
    let of_move = source_of(claim).is_some_and(|(of_claim, _)| of_claim.id == record.id);
    let has_deadline = DisruptionMark::of(claim).is_some_and(|mark| mark.deadline.is_some());
    !of_move && !has_deadline
}

/// What protects a source since its move began.
fn blocker(state: &ClusterState, claim: &NodeClaim, reason: DisruptionReason) -> Option<Blocker> {
    replacement_protection(state, claim, state.node_of(claim)?, reason)
}

#[cfg(test)]
mod tests;
