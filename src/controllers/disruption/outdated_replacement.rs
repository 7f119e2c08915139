//! Chooses the outdated nodes to replace: simulates the removal of those with pods.

use std::sync::Arc;
use std::time::Instant;

use stowage_model::time::UnixMillis;
use stowage_planner::Effort;
use stowage_runtime::clock;
use stowage_runtime::sync::heartbeat;
use tokio::task::spawn_blocking;

use crate::controllers::context::Context;
use crate::controllers::disruption::blocked::report_blocked;
use crate::controllers::disruption::disruption_metrics;
use crate::controllers::disruption::simulated_removal::{plan_moves, plan_present, simulate, simulator};
use crate::controllers::event_queue::EventQueue;
use crate::decisions::disruption::moves::Move;
use crate::decisions::disruption::obstacle::Obstacle;
use crate::decisions::disruption::outdated::OutdatedNode;
use crate::decisions::disruption::outdated_replacement::{OutdatedAttempt, OutdatedReplacement};
use crate::decisions::disruption::reason::DisruptionReason;
use crate::decisions::disruption::simulated_removal::{SimulatedRemoval, Simulator};
use crate::state::pool_types::ReadyPool;

/// Moves whose sources are to be replaced now for this reason, within the budgets of their pools.
pub async fn choose(
    replacement: &mut OutdatedReplacement,
    reason: DisruptionReason,
    ctx: &Arc<Context>,
    pools: &Arc<Vec<ReadyPool>>,
    queue: &EventQueue,
) -> Vec<Move> {
    let (now, begin) = (clock::now(), Instant::now());
    let mut pass = {
        let state = ctx.cluster.read();
        replacement.begin(&state, &ctx.derived.holds(&state, now), reason, now)
    };
    let mut blocked = std::mem::take(&mut pass.blocked);
    let order = std::mem::take(&mut pass.order);
    let mut prepared: Option<Arc<Simulator>> = None;
    for node in &order {
        match pass.attempt(node) {
            OutdatedAttempt::OverBudget => {}
            OutdatedAttempt::EndPass => break,
            OutdatedAttempt::Accept => pass.accept(node),
            OutdatedAttempt::Simulate(without) => {
                if prepared.is_none() {
                    prepared = prepare(ctx, pools, &order, now).await;
                }
                let Some(simulator) = prepared.clone() else { break };
                let ctx = Arc::clone(ctx);
                let outcome = spawn_blocking(move || simulate(&ctx, &simulator, &without)).await;
                heartbeat::progress();
                let outcome = outcome
                    .inspect_err(
                        |error| tracing::error!(%error, claim = node.claim, "simulation of a removal panicked"),
                    )
                    .ok()
                    .flatten();
                if outcome.as_ref().is_some_and(SimulatedRemoval::is_complete) {
                    pass.accept(node);
                } else {
                    replacement.blocked(&node.claim, now);
                    let obstacle = outcome.as_ref().and_then(|outcome| outcome.obstacle_to_replacement(&node.claim));
                    let why = obstacle.map_or_else(|| "the planner failed".to_owned(), ToString::to_string);
                    blocked.push((node.claim.clone(), why));
                }
            }
        }
    }
    report_blocked(ctx, queue, reason, &blocked);
    disruption_metrics::observe(ctx, reason, begin.elapsed());
    let chosen = pass.finish();
    if chosen.is_empty() {
        return Vec::new();
    }
    if prepared.is_none() {
        prepared = prepare(ctx, pools, &order, now).await;
    }
    let Some(simulator) = prepared else { return Vec::new() };
    let ctx = Arc::clone(ctx);
    let moves = spawn_blocking(move || {
        let (outcome, mut moves) = plan_moves(&ctx, &simulator, &chosen, Effort::Quick)?;
        let stays = |claim: &String| outcome.obstacles.get(claim).is_some_and(Obstacle::concerns_replacement);
        moves.retain(|one| !one.sources.keys().any(stays));
        Some(moves)
    });
    moves.await.ok().flatten().unwrap_or_default()
}

/// What simulates the removal of these nodes. `None` when the planner panicked.
async fn prepare(
    ctx: &Arc<Context>,
    pools: &Arc<Vec<ReadyPool>>,
    nodes: &[OutdatedNode],
    now: UnixMillis,
) -> Option<Arc<Simulator>> {
    let mut simulator = simulator(ctx, pools, nodes.iter().map(|node| node.claim.as_str()), now);
    let ctx = Arc::clone(ctx);
    let planned = spawn_blocking(move || plan_present(&ctx, &mut simulator).map(|()| Arc::new(simulator)));
    planned.await.ok().flatten()
}
