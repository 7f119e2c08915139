//! Counts and reports planned moves of consolidation, with their scores under the policy `Balanced` (Karpenter core reference 4.11).

use std::collections::BTreeSet;

use stowage_model::events;

use crate::controllers::context::{Context, reference};
use crate::decisions::disruption::moves::Move;

/// Values of the label `decision` of metrics.
pub const APPROVED: &str = "approved";
pub const REJECTED: &str = "rejected";

/// Counts a move for each NodePool of its sources, with its score.
fn count(ctx: &Context, one: &Move, decision: &str) {
    let pools: BTreeSet<&String> = one.sources.values().map(|source| &source.pool).collect();
    for pool in pools {
        let policy = ctx.cluster.read().pools.get(pool).map(|pool| pool.spec.disruption.consolidation_policy.clone());
        let policy = policy.unwrap_or_default();
        ctx.metrics.consolidation_moves.with_label_values(&[decision, pool, &policy]).inc();
        if let Some(score) = one.scores.get(pool) {
            let decision = if score.is_approved() { APPROVED } else { REJECTED };
            ctx.metrics.consolidation_score.with_label_values(&[decision, pool, &policy]).observe(score.value());
        }
    }
}

/// Counts a move that is dropped.
pub fn report_rejected(ctx: &Context, one: &Move) {
    count(ctx, one, REJECTED);
}

/// Counts and reports a move that begins: with its scores, on the node, or on the NodePools of several nodes.
pub async fn report_approved(ctx: &Context, one: &Move) {
    count(ctx, one, APPROVED);
    for (pool, score) in &one.scores {
        let note = score.to_string();
        let event = events::CONSOLIDATION_APPROVED.note(&note);
        if let [claim] = &*one.sources.keys().collect::<Vec<_>>() {
            let claim = ctx.cluster.read().claims.get(*claim).cloned();
            if let Some(claim) = claim {
                ctx.emit_for_claim_and_node(&claim, event).await;
            }
        } else {
            let pool = ctx.cluster.read().pools.get(pool).cloned();
            if let Some(pool) = pool {
                ctx.emit(reference(&*pool), event).await;
            }
        }
    }
}
