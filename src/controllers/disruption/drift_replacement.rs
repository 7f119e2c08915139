//! Chooses the drifted nodes to replace: simulates the removal of those with pods.

use std::sync::Arc;

use tokio::task::spawn_blocking;

use crate::clock;
use crate::controllers::context::Context;
use crate::controllers::disruption::blocked::report_blocked;
use crate::controllers::disruption::simulate::{plan_present, simulate, simulator};
use crate::controllers::event_queue::EventQueue;
use crate::decisions::disruption::drift_order::DriftedNode;
use crate::decisions::disruption::drift_replacement::{DriftAttempt, DriftReplacement};
use crate::decisions::disruption::simulate::{Outcome, Simulator};
use crate::model::time::UnixMillis;
use crate::state::instance_types::ReadyPool;
use crate::sync::heartbeat;

/// Claims whose nodes are to be replaced now, within the budgets of their pools.
pub async fn choose(
    replacement: &mut DriftReplacement,
    ctx: &Arc<Context>,
    pools: &Arc<Vec<ReadyPool>>,
    queue: &EventQueue,
) -> Vec<String> {
    let now = clock::now();
    let mut pass = {
        let state = ctx.cluster.read();
        replacement.begin(&state, &ctx.derived.holds(&state, now), now)
    };
    let mut blocked = std::mem::take(&mut pass.blocked);
    let order = std::mem::take(&mut pass.order);
    let mut prepared: Option<Arc<Simulator>> = None;
    for node in &order {
        match pass.attempt(node) {
            DriftAttempt::OverBudget => {}
            DriftAttempt::EndPass => break,
            DriftAttempt::Accept => pass.accept(node),
            DriftAttempt::Simulate(without) => {
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
                if outcome.as_ref().is_some_and(Outcome::is_complete) {
                    pass.accept(node);
                } else {
                    replacement.blocked(&node.claim, now);
                    let late = outcome.as_ref().and_then(Outcome::late_node);
                    blocked.push((node.claim.clone(), why_incomplete(late)));
                }
            }
        }
    }
    report_blocked(ctx, queue, "drifted", &blocked);
    pass.finish()
}

/// What simulates the removal of these nodes. `None` when the planner panicked.
async fn prepare(
    ctx: &Arc<Context>,
    pools: &Arc<Vec<ReadyPool>>,
    nodes: &[DriftedNode],
    now: UnixMillis,
) -> Option<Arc<Simulator>> {
    let mut simulator = simulator(ctx, pools, nodes.iter().map(|node| node.claim.as_str()), now);
    let ctx = Arc::clone(ctx);
    let planned = spawn_blocking(move || plan_present(&ctx, &mut simulator).map(|()| Arc::new(simulator)));
    planned.await.ok().flatten()
}

/// Why a drifted node is not replaced, given the NodeClaim whose node does not start up.
fn why_incomplete(late_node: Option<&str>) -> String {
    late_node.map_or_else(
        || "its pods fit on no other node, and no node can be launched for them".into(),
        |claim| {
            format!(
                "its pods need a new node, and the newest of its NodePool, that of NodeClaim {claim}, is not initialized: \
                 see its events; drift goes on when it is, or when the NodePool changes"
            )
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_event_of_a_node_that_is_not_replaced_names_the_node_claim_that_does_not_start_up() {
        assert!(why_incomplete(None).contains("no other node"));
        assert!(why_incomplete(Some("web-1")).contains("NodeClaim web-1, is not initialized"));
    }
}
