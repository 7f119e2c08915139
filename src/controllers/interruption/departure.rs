//! Deletes marked NodeClaims when their pods' replacements are ready or their deadline is near.

use std::sync::Arc;
use std::time::Duration;

use futures::{StreamExt, stream};
use kube::ResourceExt;

use crate::api::NodeClaim;
use crate::clock;
use crate::controllers::context::Context;
use crate::controllers::deletion::delete_claim_or_log;
use crate::controllers::event_queue::EventQueue;
use crate::controllers::run_loop::{Pace, RunLoop};
use crate::decisions::disruption::departure;
use crate::decisions::disruption::mark::DisruptionMark;
use crate::model::events;

const PACE: Pace = Pace { debounce: Duration::from_millis(50), resync: Duration::from_millis(500) };

/// Claims that are deleted concurrently.
const CONCURRENCY: usize = 32;

/// Runs until the process ends.
pub async fn run(ctx: Arc<Context>) {
    let mut run_loop = RunLoop::new(&ctx.cluster, PACE);
    let queue = EventQueue::start(&ctx);
    loop {
        pass(&ctx, &queue).await;
        run_loop.next().await;
    }
}

/// Deletes the claims that are due. Events are emitted in the background: the deadlines of a mass interruption are close together.
async fn pass(ctx: &Context, queue: &EventQueue) {
    let departures = stream::iter(due(ctx)).map(|(claim, mark)| async move {
        let deleted = depart(ctx, &claim, mark).await;
        deleted.then_some((claim, mark))
    });
    let departed: Vec<_> = departures.buffer_unordered(CONCURRENCY).filter_map(std::future::ready).collect().await;
    for (claim, _) in departed {
        let note = "replacement is ready or the deadline has passed; terminating";
        queue.emit_for_claim_and_node(ctx, &claim, events::TERMINATING_ON_INTERRUPTION, note);
    }
}

/// Marked claims that may be deleted.
fn due(ctx: &Context) -> Vec<(Arc<NodeClaim>, DisruptionMark)> {
    let state = ctx.cluster.read();
    if !departure::any_marked(&state) {
        return Vec::new();
    }
    let now = clock::now();
    // Also during a pause, and whatever the age of the watches: the instance ends anyway.
    departure::due(&state, &ctx.derived.holds(&state, now), now)
}

/// Returns whether the claim is deleted.
async fn depart(ctx: &Context, claim: &NodeClaim, mark: DisruptionMark) -> bool {
    let (name, reason) = (claim.name_any(), mark.reason);
    let node = ctx.node_name_of(claim);
    tracing::info!(claim = name, node, reason = reason.as_str(), "deleting marked node claim");
    delete_claim_or_log(ctx, claim, reason).await
}

#[cfg(test)]
mod write_tests;
