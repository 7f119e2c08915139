//! Chooses the nodes to consolidate: a search over simulated removals, on a blocking thread.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::clock;
use crate::controllers::caps::Capped;
use crate::controllers::context::Context;
use crate::controllers::disruption::blocked::report_blocked;
use crate::controllers::disruption::simulate::{plan_present, simulate, simulator};
use crate::controllers::event_queue::EventQueue;
use crate::decisions::disruption::consolidation::{Consolidation, Decision, Memory, Request};
use crate::decisions::last_decisions::LastConsolidation;
use crate::model::events;
use crate::model::time::UnixMillis;
use crate::state::instance_types::{InstanceTypes, ReadyPool};
use crate::sync::lock;

/// After this time nothing more is simulated: the best set so far is removed.
const MAX_TIME: Duration = Duration::from_secs(30);

/// Claims whose nodes are to be removed together: the pods of each fit on the others, or on new nodes that cost less than the
/// removed ones.
pub async fn choose(
    memory: &mut Memory,
    ctx: &Arc<Context>,
    pools: &Arc<Vec<ReadyPool>>,
    types: &InstanceTypes,
    queue: &EventQueue,
) -> Vec<String> {
    let (now, begin) = (clock::now(), Instant::now());
    let most = ctx.admissible(Capped::Disruption);
    let consolidation = {
        let state = ctx.cluster.read();
        let request = Request { pools, types, most, now };
        Consolidation::begin(&state, &ctx.derived.holds(&state, now), memory, request)
    };
    let (candidates, blocked) = (consolidation.candidates(), consolidation.blocked.clone());
    report_blocked(ctx, queue, "underutilized", &blocked);
    report_errors(ctx, queue, &consolidation.errors);
    let waits = consolidation.waits(memory, now);
    let decision = if waits { Decision::default() } else { decide(ctx, pools, memory, consolidation, now).await };
    *lock(&ctx.last_consolidation) = Some(LastConsolidation {
        waits,
        candidates,
        blocked: blocked.len(),
        chosen: decision.claims.len(),
        pods: decision.pods,
        saving: decision.saving,
        plans: decision.plans,
        took: begin.elapsed(),
        ..LastConsolidation::at(now)
    });
    if !decision.claims.is_empty() {
        tracing::info!(
            candidates,
            nodes = decision.claims.len(),
            pods = decision.pods,
            eviction_units = decision.units.as_number(),
            usd_per_hour = decision.saving.usd(),
            plans = decision.plans,
            seconds = begin.elapsed().as_secs_f64(),
            "consolidating nodes"
        );
    }
    decision.claims
}

/// Searches on a blocking thread.
async fn decide(
    ctx: &Arc<Context>,
    pools: &Arc<Vec<ReadyPool>>,
    memory: &mut Memory,
    consolidation: Consolidation,
    now: UnixMillis,
) -> Decision {
    if consolidation.is_decided(memory, now) {
        return Decision::default();
    }
    let mut simulator = simulator(ctx, pools, consolidation.claims_of_candidates(), now);
    let (ctx, mut known) = (Arc::clone(ctx), std::mem::take(memory));
    let search = move || {
        let begin = Instant::now();
        if plan_present(&ctx, &mut simulator).is_none() {
            return (known, Decision::default());
        }
        let simulate = |without: &_| {
            if begin.elapsed() > MAX_TIME { None } else { simulate(&ctx, &simulator, without) }
        };
        let decision = consolidation.decide(&mut known, simulator.waiting_pods(), simulate, now);
        (known, decision)
    };
    // The search does not panic: each plan is isolated. If it did, the memory would be lost, which costs repeated attempts.
    match tokio::task::spawn_blocking(search).await {
        Ok((known, decision)) => {
            *memory = known;
            decision
        }
        Err(error) => {
            tracing::error!(%error, "consolidation panicked, nothing is consolidated");
            Decision::default()
        }
    }
}

/// Reports the annotations of NodePools that are invalid.
fn report_errors(ctx: &Context, queue: &EventQueue, errors: &[(String, String)]) {
    for (pool, error) in errors {
        let pool = ctx.cluster.read().pools.get(pool).cloned();
        if let Some(pool) = pool {
            queue.emit(&*pool, events::INVALID_CONSOLIDATION_SETTING, error.clone());
        }
    }
}
