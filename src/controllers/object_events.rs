//! Events that follow from changes of watched objects: conditions that change their status, nodes that replace others, finalizers that are removed (Karpenter core reference 9).

use std::collections::BTreeSet;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Node, ObjectReference};
use kube::{Resource, ResourceExt};
use stowage_api::conditions::{INITIALIZED, LAUNCHED};
use stowage_api::{NodeClaim, NodePool};
use stowage_model::events::DeclaredEvent;
use stowage_model::{events, labels};

use crate::controllers::context::{Context, reference};
use crate::controllers::event_queue::EventQueue;
use crate::controllers::run_loop::{Pace, RunLoop};
use crate::decisions::condition_transitions::{Change, Conditioned, Followed, Transition, transitions};
use crate::decisions::disruption::mark::DisruptionMark;
use crate::state::ClusterState;
use crate::state::object_ext::{NodeClaimExt, ObjectExt};

/// Transitions that follow each other faster are one.
const PACE: Pace = Pace { debounce: Duration::from_secs(1), resync: Duration::from_secs(10) };
/// Events per second: a kubelet may write any condition of its Node at any time, and a burst of nodes has thousands of transitions.
const PER_SECOND: NonZeroU32 = NonZeroU32::new(20).unwrap();
/// Maximum number of replaced NodeClaims that a note names.
const MAX_NAMED: usize = 5;

/// Conditions whose transitions are reported. Three of Karpenter's are not among them: `Consolidatable`, which changes with each pod, `Launched`, which the launch reports with the offering,
/// and `InstanceTerminating`, which is also the reason of an interruption; `Finalized` follows it.
const CONDITIONS: [&DeclaredEvent; 15] = [
    events::CONSISTENT_STATE_FOUND,
    events::DISK_PRESSURE,
    events::DISRUPTION_REASON,
    events::DRAINED,
    events::DRIFTED,
    events::INITIALIZED,
    events::MEMORY_PRESSURE,
    events::NETWORK_UNAVAILABLE,
    events::NODE_CLASS_READY,
    events::NODE_REGISTRATION_HEALTHY,
    events::PID_PRESSURE,
    events::READY,
    events::REGISTERED,
    events::VALIDATION_SUCCEEDED,
    events::VOLUMES_DETACHED,
];

/// An event: about what, and its note.
type Found = (ObjectReference, &'static DeclaredEvent, String);

/// Runs until the process ends.
pub async fn run(ctx: Arc<Context>) {
    let (mut run_loop, mut objects) = (RunLoop::new(&ctx.cluster, PACE), Objects::default());
    let queue = EventQueue::paced(&ctx, PER_SECOND);
    loop {
        let found = objects.events(&ctx.cluster.read());
        for (about, event, note) in found {
            queue.emit_about(about, event, note);
        }
        run_loop.next().await;
    }
}

/// The objects that are followed.
#[derive(Debug, Default)]
struct Objects {
    pools: Followed<NodePool>,
    claims: Followed<NodeClaim>,
    nodes: Followed<Node>,
}

impl Objects {
    /// The events since the last call.
    fn events(&mut self, state: &ClusterState) -> Vec<Found> {
        let mut found = Vec::new();
        for change in self.pools.changes(&state.pools) {
            of_conditions(&change, &mut found);
        }
        for change in self.claims.changes(&state.claims) {
            of_replacement(state, &change, &mut found);
            of_conditions(&change, &mut found);
            of_finalizer(&change, &mut found);
        }
        for change in self.nodes.changes(&state.nodes) {
            let is_ours = change.new.iter().chain(&change.old).any(|node| node.node_pool().is_some());
            if is_ours {
                of_conditions(&change, &mut found);
                of_finalizer(&change, &mut found);
            }
        }
        found
    }
}

/// Conditions that have another status than before. A new condition is one that was `Unknown`, if it is `True`.
fn of_conditions<T: Conditioned + Resource<DynamicType = ()>>(change: &Change<T>, found: &mut Vec<Found>) {
    let Some(new) = change.new.as_deref() else { return };
    for Transition { from, to } in transitions(change.old.as_deref(), new) {
        let Some(event) = CONDITIONS.into_iter().find(|event| event.reason() == to.kind) else { continue };
        let before = from.map_or("Unknown", |from| from.status);
        if from.is_none() && (to.status != "True" || change.old.is_none()) {
            continue;
        }
        let message = if to.message.is_empty() { String::new() } else { format!(": {}", to.message) };
        let note = format!("{} {before} -> {}, {}{message}", to.kind, to.status, to.reason);
        found.push((reference(new), event, note));
    }
}

/// A NodeClaim that takes pods of nodes that are disrupted: when it appears, and when it is launched and not initialized.
fn of_replacement(state: &ClusterState, change: &Change<NodeClaim>, found: &mut Vec<Found>) {
    let Some(new) = change.new.as_deref() else { return };
    let launched = |claim: &NodeClaim| claim.true_since(LAUNCHED).is_some();
    let appeared = change.old.is_none();
    let waits = launched(new) && new.true_since(INITIALIZED).is_none() && !change.old.as_deref().is_some_and(launched);
    if !appeared && !waits {
        return;
    }
    let owners = state.planned.get(&new.name_any()).into_iter().flat_map(|plan| plan.owners.values());
    let sources: BTreeSet<&String> = owners.filter_map(|owner| owner.source.as_ref()).collect();
    let Some(first) = sources.first() else { return };
    let mut names = sources.iter().take(MAX_NAMED).map(|name| name.as_str()).collect::<Vec<_>>().join(", ");
    if sources.len() > MAX_NAMED {
        names.push_str(" and others");
    }
    if appeared {
        let mark = state.claims.get(*first).and_then(|claim| DisruptionMark::of(claim));
        let reason = mark.map_or(String::new(), |mark| format!(": {}", mark.reason.as_str()));
        found.push((reference(new), events::DISRUPTION_LAUNCHING, format!("takes the pods of {names}{reason}")));
    }
    if waits {
        let note = format!("{names} is removed when this node is ready");
        found.push((reference(new), events::DISRUPTION_WAITING_READINESS, note));
    }
}

/// An object whose finalizer is removed.
fn of_finalizer<T: Resource<DynamicType = ()>>(change: &Change<T>, found: &mut Vec<Found>) {
    let has = |object: &Arc<T>| object.finalizers().iter().any(|name| name == labels::TERMINATION_FINALIZER);
    let Some(old) = change.old.as_ref().filter(|old| has(old)) else { return };
    if !change.new.as_ref().is_some_and(has) {
        let note = format!("finalizer {} is removed", labels::TERMINATION_FINALIZER);
        found.push((reference(&**old), events::FINALIZED, note));
    }
}

#[cfg(test)]
mod tests;
