//! Chooses the drifted nodes to replace: simulates the removal of those with pods.

use crate::clock;
use crate::controllers::context::Context;
use crate::controllers::disruption::simulate::simulate;
use crate::decisions::disruption::drift_replacement::{DriftAttempt, DriftReplacement};
use crate::model::events;
use crate::state::instance_types::{InstanceTypes, ReadyPool};

/// Claims whose nodes are to be replaced now, within the budgets of their pools.
pub async fn choose(
    replacement: &mut DriftReplacement,
    ctx: &Context,
    pools: &[ReadyPool],
    types: &InstanceTypes,
) -> Vec<String> {
    let now = clock::now();
    let mut pass = {
        let state = ctx.cluster.read();
        replacement.begin(&state, &ctx.derived.holds(&state, now), now)
    };
    for (claim, blocked_by) in &pass.blocked {
        emit_blocked(ctx, claim, blocked_by).await;
    }
    for node in std::mem::take(&mut pass.order) {
        match pass.attempt(&node) {
            DriftAttempt::OverBudget => {}
            DriftAttempt::EndPass => break,
            DriftAttempt::Accept => pass.accept(&node),
            DriftAttempt::Simulate(without) => {
                if simulate(ctx, pools, types, &without, now).await.is_some_and(|outcome| outcome.complete) {
                    pass.accept(&node);
                } else {
                    replacement.blocked(&node.claim, now);
                    let why = "its pods fit on no other node, and no node can be launched for them";
                    emit_blocked(ctx, &node.claim, why).await;
                }
            }
        }
    }
    pass.finish()
}

async fn emit_blocked(ctx: &Context, claim: &str, why: &str) {
    let claim = ctx.cluster.read().claims.get(claim).cloned();
    if let Some(claim) = claim {
        let note = format!("drifted, but can't be replaced now: {why}");
        ctx.emit_for_claim(&claim, events::DISRUPTION_BLOCKED.note(&note)).await;
    }
}
