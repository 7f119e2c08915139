//! Deletes marked NodeClaims when their pods' replacements are ready or their deadline is near.

use std::sync::Arc;
use std::time::Duration;

use kube::ResourceExt;

use crate::api::NodeClaim;
use crate::clock;
use crate::controllers::context::Context;
use crate::controllers::deletion::delete_claim;
use crate::controllers::run_loop::{Pace, RunLoop};
use crate::decisions::disruption::departure;
use crate::decisions::disruption::mark::DisruptionMark;
use crate::decisions::staleness::Removal;
use crate::model::events;

const PACE: Pace = Pace { debounce: Duration::from_millis(50), resync: Duration::from_millis(500) };

/// Runs until the process ends.
pub async fn run(ctx: Arc<Context>) {
    let mut run_loop = RunLoop::new(&ctx.cluster, PACE);
    loop {
        for (claim, mark) in due(&ctx) {
            depart(&ctx, &claim, mark).await;
        }
        run_loop.next().await;
    }
}

/// Marked claims that may be deleted.
fn due(ctx: &Context) -> Vec<(Arc<NodeClaim>, DisruptionMark)> {
    let state = ctx.cluster.read();
    if !departure::any_marked(&state) {
        return Vec::new();
    }
    let now = clock::now();
    let mut due = departure::due(&state, &ctx.derived.holds(&state, now), now);
    // A mark with a deadline is that of an instance that ends anyway.
    if state.pause().disruption {
        due.retain(|(_, mark)| mark.deadline.is_some());
    }
    drop(state);
    if due.iter().any(|(_, mark)| mark.deadline.is_none()) && ctx.is_stale(Removal::Departure) {
        due.retain(|(_, mark)| mark.deadline.is_some());
    }
    due
}

async fn depart(ctx: &Context, claim: &NodeClaim, mark: DisruptionMark) {
    let (name, reason) = (claim.name_any(), mark.reason);
    tracing::info!(claim = name, reason = reason.as_str(), "deleting marked node claim");
    if let Err(error) = delete_claim(ctx, claim, reason).await {
        tracing::warn!(claim = name, %error, "failed to delete node claim, retrying");
        return;
    }
    // Voluntary disruption has no deadline, and an event of its own.
    if mark.deadline.is_some() {
        let note = "replacement is ready or the deadline has passed; terminating";
        ctx.emit_for_claim_and_node(claim, events::TERMINATING_ON_INTERRUPTION.note(note)).await;
    }
}
