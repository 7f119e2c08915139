//! Begins the disruption of chosen nodes: the last look at the present state, the mark, and the taint.

use std::sync::Arc;

use futures::{StreamExt, stream};

use crate::clock;
use crate::controllers::caps::Capped;
use crate::controllers::context::Context;
use crate::controllers::disruption::mark::mark;
use crate::decisions::disruption::candidates::pods_to_reschedule;
use crate::decisions::disruption::ledger::admitted;
use crate::decisions::disruption::mark::DisruptionMark;
use crate::decisions::disruption::reason::DisruptionReason;
use crate::decisions::staleness::Removal;
use crate::model::events;
use crate::state::object_ext::ObjectExt;

/// Claims that are written concurrently.
pub const CONCURRENCY: usize = 16;

/// Marks and taints the nodes of chosen claims, as far as the emergency stop, the budgets and the cap per minute still allow it: a choice takes
/// time. Underutilized nodes were chosen together, and are disrupted together or not at all. Returns the number of nodes.
pub async fn start_all(ctx: &Context, chosen: Vec<String>, reason: DisruptionReason) -> usize {
    if chosen.is_empty() {
        return 0;
    }
    // The next choice sees these marks.
    let _one_at_a_time = ctx.disrupting.lock().await;
    if ctx.pause().disruption || ctx.is_stale(Removal::Disruption) {
        return 0;
    }
    let mut claims = admitted(&ctx.cluster.read(), &chosen, reason, clock::now());
    claims.retain(|claim| !ctx.is_left_out_of_plans(claim));
    if reason == DisruptionReason::Empty {
        // The provisioner may have planned pods on them since the choice.
        let state = ctx.cluster.read();
        let holds = ctx.derived.holds(&state, clock::now());
        claims
            .retain(|name| state.claims.get(name).is_some_and(|claim| pods_to_reschedule(&state, &holds, claim) == 0));
    }
    if reason == DisruptionReason::Underutilized {
        let admissible = ctx.admissible(Capped::Disruption);
        if claims.len() < chosen.len() || admissible < chosen.len() {
            tracing::info!(chosen = chosen.len(), admitted = claims.len(), "chosen nodes changed, deciding again");
            return 0;
        }
    }
    claims.truncate(ctx.admit(Capped::Disruption, claims.len()).await);
    let count = claims.len();
    stream::iter(claims).for_each_concurrent(CONCURRENCY, |name| start(ctx, name, reason)).await;
    count
}

pub(super) async fn start(ctx: &Context, name: String, reason: DisruptionReason) {
    let claim = ctx.cluster.read().claims.get(&name).map(Arc::clone);
    let Some(claim) = claim else { return };
    let node = ctx.node_name_of(&claim);
    tracing::info!(claim = name, node, node_pool = claim.node_pool(), reason = reason.as_str(), "disruption started");
    let note = format!("disrupting node: {}", reason.as_str());
    ctx.emit_for_claim(&claim, events::DISRUPTION_TERMINATING.note(&note)).await;
    if let Err(error) = mark(ctx, &claim, DisruptionMark { reason, deadline: None }).await {
        tracing::warn!(claim = name, %error, "failed to mark node claim for disruption, retrying");
    }
}

#[cfg(test)]
mod write_tests;
