//! Carries moves on: deletes their sources when the pods have room elsewhere, or rolls them back.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use futures::{StreamExt, stream};
use k8s_openapi::api::core::v1::Pod;
use kube::api::ListParams;
use kube::{Api, ResourceExt};
use stowage_api::NodeClaim;
use stowage_planner::Effort;
use stowage_runtime::clock;
use tokio::time::Instant;

use crate::controllers::context::{Context, is_conflict, is_not_found};
use crate::controllers::deletion::delete_unchanged_claim;
use crate::controllers::disruption::roll_back::{release, roll_back};
use crate::controllers::disruption::simulated_removal::{plan_moves, plan_present, simulator};
use crate::controllers::disruption::start::reserve;
use crate::controllers::disruption::surge;
use crate::controllers::run_loop::{Pace, RunLoop};
use crate::decisions::disruption::moves::Move;
use crate::decisions::disruption::obstacle::Obstacle;
use crate::decisions::disruption::progress::{Progress, Step, progress, progress_of, unheld_of};
use crate::decisions::disruption::simulated_removal::Targets;
use crate::decisions::staleness::Removal;
use crate::state::plan_record::MoveTerms;

const PACE: Pace = Pace { debounce: Duration::from_millis(50), resync: Duration::from_millis(500) };
/// Attempts to keep room for pods that have none, while other pods are bound.
const ATTEMPTS: u32 = 3;
/// Wait after a failure to bring pods back to their ReplicaSets.
const RETRY_RETURN: Duration = Duration::from_secs(10);
/// Moves that are carried on concurrently.
const CONCURRENCY: usize = 32;

/// Runs until the process ends.
pub async fn run(ctx: Arc<Context>) {
    let mut run_loop = RunLoop::new(&ctx.cluster, PACE);
    let mut return_from = Instant::now();
    loop {
        if Instant::now() >= return_from && !surge::bring_back(&ctx).await {
            return_from = Instant::now() + RETRY_RETURN;
        }
        pass(&ctx).await;
        run_loop.next().await;
    }
}

async fn pass(ctx: &Arc<Context>) {
    let moves = {
        let (state, now) = (ctx.cluster.read(), clock::now());
        progress(&state, &ctx.derived.holds(&state, now), now)
    };
    if moves.iter().all(|one| one.step == Step::Wait) || ctx.pause().disruption || ctx.is_stale(Removal::Departure) {
        return;
    }
    stream::iter(moves)
        .for_each_concurrent(CONCURRENCY, |one| async move {
            match &one.step {
                Step::Wait => {}
                Step::Reserve => reserve_again(ctx, &one).await,
                Step::Surge(pods) => {
                    if let Err(why) = surge::release(ctx, pods).await {
                        roll_back(ctx, &one, &why).await;
                    }
                }
                Step::Depart(sources) => depart(ctx, &one, sources).await,
                Step::RollBack(why) => roll_back(ctx, &one, why).await,
            }
        })
        .await;
}

fn again(ctx: &Context, one: &Progress) -> Option<Progress> {
    let (state, now) = (ctx.cluster.read(), clock::now());
    progress_of(&state, &ctx.derived.holds(&state, now), &one.record.id, now)
}

/// Keeps room for the pods of a move that have none, on nodes that are there or start up. Nothing is bought for them: without room the move is
/// rolled back.
async fn reserve_again(ctx: &Arc<Context>, one: &Progress) {
    let _one_at_a_time = ctx.disrupting.lock().await;
    for attempt in 1..=ATTEMPTS {
        let Some(one) = again(ctx, one).filter(|one| one.step == Step::Reserve) else { return };
        let parts = match place(ctx, &one, Targets::Managed).await {
            Ok(parts) => parts,
            Err(why) => return roll_back(ctx, &one, &why).await,
        };
        for part in parts {
            let (until, sources) = (one.record.give_up, part.sources_by_pod());
            let terms = MoveTerms { until, sources, generation: None };
            let Some(why) = reserve(ctx, &[], &part, &terms, None).await else { continue };
            if attempt == ATTEMPTS {
                return roll_back(ctx, &one, &why).await;
            }
            release(ctx, &part.pods()).await;
        }
    }
}

/// Plans the pods of the sources of a move that have no room yet, beside the other pods that need a place. The error is why one of them has none.
async fn place(ctx: &Arc<Context>, one: &Progress, targets: Targets) -> Result<Vec<Move>, String> {
    let claims: BTreeSet<String> = one.sources.iter().map(|claim| claim.name_any()).collect();
    let mut simulator = simulator(ctx, &ctx.ready_pools(), claims.iter().map(String::as_str), clock::now());
    simulator.limit_targets(targets);
    let of_plans = Arc::clone(ctx);
    let plan = move || {
        plan_present(&of_plans, &mut simulator)?;
        plan_moves(&of_plans, &simulator, &claims, Effort::Quick)
    };
    let (outcome, parts) = tokio::task::spawn_blocking(plan).await.ok().flatten().ok_or("the planner failed")?;
    let obstacle = outcome.obstacles.into_values().next();
    obstacle.map_or(Ok(parts), |obstacle| {
        Err(match obstacle {
            Obstacle::NoPlace { pod, .. } => format!("pod {pod} fits on no other node"),
            other => other.to_string(),
        })
    })
}

/// Deletes the sources of a move whose pods have room elsewhere, if that is still so after reading them and their pods again: the watches may lag
/// behind.
async fn depart(ctx: &Arc<Context>, one: &Progress, sources: &[Arc<NodeClaim>]) {
    // The successors of its pods would be bound to the sources of moves that begin at this moment, and are not tainted yet.
    drop(ctx.disrupting.lock().await);
    for claim in sources {
        if let Err(error) = read_again(ctx, claim).await {
            if !is_not_found(&error) {
                tracing::warn!(claim = claim.name_any(), %error, "failed to read node claim and its pods, retrying");
            }
            return;
        }
    }
    let unheld = || {
        let state = ctx.cluster.read();
        sources.iter().any(|claim| !unheld_of(&state, claim, &one.record).is_empty())
    };
    // Where no room is kept, the pods of one move at a time are counted on.
    let alone = if unheld() { Some(ctx.disrupting.lock().await) } else { None };
    let Some(one) = again(ctx, one) else { return };
    // Anything else is found in the next pass.
    let Step::Depart(ready) = &one.step else { return };
    if alone.is_some()
        && let Err(why) = place(ctx, &one, Targets::Initialized).await
    {
        return roll_back(ctx, &one, &why).await;
    }
    let was_read = |claim: &Arc<NodeClaim>| sources.iter().any(|read| read.name_any() == claim.name_any());
    let (ready, reason): (Vec<_>, _) = (ready.iter().filter(|claim| was_read(claim)).collect(), one.reason);
    if ready.len() < sources.len() {
        return;
    }
    stream::iter(ready)
        .for_each_concurrent(CONCURRENCY, |claim| async move {
            let (name, node) = (claim.name_any(), ctx.node_name_of(claim));
            tracing::info!(claim = name, node, reason = reason.as_str(), "deleting marked node claim");
            match delete_unchanged_claim(ctx, claim, reason).await {
                Err(error) if is_conflict(&error) => {
                    tracing::debug!(claim = name, "node claim changed, deciding again");
                }
                Err(error) => tracing::warn!(claim = name, %error, "failed to delete node claim, retrying"),
                Ok(()) => {}
            }
        })
        .await;
}

/// Reads a claim and the pods of its node from the API server, and applies them to the state.
async fn read_again(ctx: &Context, claim: &NodeClaim) -> Result<(), kube::Error> {
    let claim = ctx.read_claim(&claim.name_any()).await?;
    let Some(node) = ctx.node_name_of(&claim) else { return Ok(()) };
    let pods = {
        let _permit = ctx.confirmed_drains.permit().await;
        // Without a resource version the list is as new as the last write.
        let on_node = ListParams::default().fields(&format!("spec.nodeName={node}"));
        Api::<Pod>::all(ctx.client.clone()).list(&on_node).await?
    };
    let now = clock::now();
    ctx.cluster.update(|state| pods.items.iter().for_each(|pod| state.apply_pod(pod, now)));
    Ok(())
}

#[cfg(test)]
mod write_tests;
