//! Removes unhealthy nodes (node repair). Their pods get other nodes at once.

use std::sync::Arc;
use std::time::Duration;

use kube::ResourceExt;
use stowage_model::events;
use stowage_model::pause::Pause;
use stowage_runtime::clock;
use stowage_runtime::sync::heartbeat;

use crate::controllers::caps::Capped;
use crate::controllers::context::Context;
use crate::controllers::deletion::expel;
use crate::controllers::node_claim::claim_metrics;
use crate::controllers::run_loop::{Pace, RunLoop};
use crate::decisions::disruption::reason::DisruptionReason;
use crate::decisions::lifecycle::node_repair::{Repair, repairs};
use crate::decisions::staleness::Removal;
use crate::state::object_ext::ObjectExt;

/// A pass without unhealthy nodes costs nothing.
const PACE: Pace = Pace { debounce: Duration::from_millis(1), resync: Duration::from_secs(5) };
/// Wait after a pass with nodes that are due: it counts all nodes.
const REST: Duration = Duration::from_secs(1);
/// Maximum number of nodes that one pass emits events for because they are left alone.
const MAX_REPORTED: usize = 20;

/// Runs until the process ends.
pub async fn run(ctx: Arc<Context>) {
    if !ctx.settings.node_repair {
        return heartbeat::rest_forever().await;
    }
    let mut run_loop = RunLoop::new(&ctx.cluster, PACE);
    loop {
        let (has_due, next) = pass(&ctx).await;
        if has_due {
            heartbeat::rest(tokio::time::sleep(REST)).await;
        }
        run_loop.next_within(next.map_or(PACE.resync, |wait| wait.min(PACE.resync))).await;
    }
}

/// Repairs the nodes that are due. Returns whether there were any, also such that are left alone, and the time until the next one is.
async fn pass(ctx: &Context) -> (bool, Option<Duration>) {
    let now = clock::now();
    let mut found = repairs(&ctx.cluster.read(), now);
    let has_due = !found.due.is_empty() || !found.blocked.is_empty();
    let next = found.next.map(|at| at.saturating_since(now));
    // The pods of a node need others.
    if ctx.pause() != Pause::default() || (!found.due.is_empty() && ctx.is_stale(Removal::Repair)) {
        return (has_due, next);
    }
    // A drain that is under way needs no share of the cap.
    let (deleting, mut others): (Vec<Repair>, Vec<Repair>) =
        found.due.drain(..).partition(|repair| repair.claim.is_deleting());
    others.truncate(ctx.admit(Capped::Disruption, others.len()).await);
    let mut notes = Vec::new();
    for repair in deleting.into_iter().chain(others) {
        notes.extend(act(ctx, &repair).await.map(|note| (repair.claim, note)));
    }
    // The events last: they must not delay a repair.
    for (claim, note) in notes {
        ctx.emit_for_claim_and_node(&claim, events::NODE_UNHEALTHY.note(&note)).await;
    }
    for (claim, why) in found.blocked.iter().take(MAX_REPORTED) {
        let note = format!("unhealthy, but not repaired: {why}");
        ctx.emit_for_claim_and_node(claim, events::NODE_REPAIR_BLOCKED.note(&note)).await;
    }
    (has_due, next)
}

/// Removes a node. Returns the note of the event about it; `None` if it failed.
async fn act(ctx: &Context, repair: &Repair) -> Option<String> {
    let Repair { claim, condition, since, expire } = repair;
    let (name, node) = (claim.name_any(), ctx.node_name_of(claim));
    let since = since.rfc3339();
    tracing::warn!(claim = name, node, condition, since, "repairing unhealthy node");
    let is_deleting = claim.is_deleting();
    if let Err(error) = expel(ctx, claim, DisruptionReason::Unhealthy, *expire, !is_deleting).await {
        tracing::warn!(claim = name, %error, "failed to repair unhealthy node, retrying");
        return None;
    }
    if !is_deleting {
        claim_metrics::count_unhealthy(ctx, claim, condition);
    }
    Some(format!("condition {condition} is unhealthy since {since}: the node is removed without waiting for its pods"))
}

#[cfg(test)]
mod write_tests;
