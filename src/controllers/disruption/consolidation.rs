//! Chooses the nodes to consolidate: a search over simulated removals, on a blocking thread.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use stowage_model::events;
use stowage_model::time::UnixMillis;
use stowage_planner::Effort;
use stowage_runtime::clock;
use stowage_runtime::sync::lock;

use crate::controllers::caps::Capped;
use crate::controllers::context::Context;
use crate::controllers::disruption::disruption_metrics;
use crate::controllers::disruption::scores::report_rejected;
use crate::controllers::disruption::simulated_removal::{plan_moves, plan_present, simulate, simulator};
use crate::controllers::event_queue::EventQueue;
use crate::decisions::disruption::candidates::blocked_by_budgets;
use crate::decisions::disruption::consolidation::{Consolidation, Decision, Memory, Priced, Request};
use crate::decisions::disruption::moves::Move;
use crate::decisions::disruption::reason::DisruptionReason;
use crate::decisions::disruption::simulated_removal::Simulator;
use crate::decisions::disruption::verdicts::{Reports, Verdict};
use crate::decisions::last_decisions::LastConsolidation;
use crate::state::pool_types::ReadyPool;

/// After this time nothing more is simulated: the best set so far is removed.
const MAX_TIME: Duration = Duration::from_secs(30);

/// Moves whose sources are to be removed: their pods fit on other nodes, or on new nodes that cost less than the removed ones.
pub async fn choose(
    memory: &mut Memory,
    reports: &mut Reports,
    ctx: &Arc<Context>,
    pools: &Arc<Vec<ReadyPool>>,
    queue: &EventQueue,
) -> Vec<Move> {
    let (now, begin) = (clock::now(), Instant::now());
    let most = ctx.admissible(Capped::Disruption);
    let consolidation = {
        let state = ctx.cluster.read();
        let facts = ctx.derived.facts(&state, pools);
        let request = Request { pools, facts: &facts, most, now };
        Consolidation::begin(&state, &ctx.derived.holds(&state, now), memory, request)
    };
    let candidates = consolidation.candidates();
    report_errors(ctx, queue, &consolidation.errors);
    let waits = consolidation.waits(memory, now);
    let consolidation = Arc::new(consolidation);
    let (decision, moves) =
        if waits { Default::default() } else { decide(ctx, pools, memory, Arc::clone(&consolidation), now).await };
    let verdicts = consolidation.verdicts(memory, &decision.claims);
    report_verdicts(ctx, reports, queue, &verdicts, now);
    let verdicts = count_by_kind(ctx, &verdicts);
    *lock(&ctx.last_consolidation) = Some(LastConsolidation {
        waits,
        candidates,
        verdicts,
        chosen: decision.claims.len(),
        pods: decision.pods,
        saving: decision.saving,
        plans: decision.plans,
        took: begin.elapsed(),
        ..LastConsolidation::at(now)
    });
    disruption_metrics::observe(ctx, DisruptionReason::Underutilized, begin.elapsed());
    log(candidates, &decision, begin.elapsed());
    moves
}

/// One line for each decision that made plans: where nothing is chosen, a busy cluster would write too many for the default level.
fn log(candidates: usize, decision: &Decision, took: Duration) {
    macro_rules! line {
        ($level:ident, $message:literal) => {
            tracing::$level!(
                candidates,
                nodes = decision.claims.len(),
                pods = decision.pods,
                eviction_units = decision.units.as_number(),
                usd_per_hour = decision.saving.usd(),
                plans = decision.plans,
                seconds = took.as_secs_f64(),
                $message
            )
        };
    }
    if !decision.claims.is_empty() {
        line!(info, "consolidating nodes");
    } else if decision.plans > 0 {
        line!(debug, "no node to consolidate");
    }
}

/// Number of nodes by the first blocker of their verdict; also as a metric.
fn count_by_kind(ctx: &Context, verdicts: &[Verdict]) -> BTreeMap<&'static str, usize> {
    let mut counts = BTreeMap::new();
    for verdict in verdicts {
        *counts.entry(verdict.kind()).or_default() += 1;
    }
    let gauges = &ctx.metrics.consolidation_nodes;
    for (kind, count) in &counts {
        gauges.with_label_values(&[*kind]).set(i64::try_from(*count).unwrap_or(i64::MAX));
    }
    // Not all at once: a scrape between would miss the others.
    let last = lock(&ctx.last_consolidation).as_ref().map(|last| last.verdicts.clone()).unwrap_or_default();
    for kind in last.keys().filter(|kind| !counts.contains_key(*kind)) {
        drop(gauges.remove_label_values(&[*kind]));
    }
    counts
}

/// Reports the verdicts that changed, in the background.
fn report_verdicts(ctx: &Context, reports: &mut Reports, queue: &EventQueue, verdicts: &[Verdict], now: UnixMillis) {
    for verdict in reports.due(verdicts, now) {
        let claim = ctx.cluster.read().claims.get(&verdict.claim).cloned();
        if let (Some(claim), Some((event, note))) = (claim, verdict.event()) {
            queue.emit_for_claim_and_node(ctx, &claim, event, &note);
        }
    }
}

/// Reports the budgets of NodePools that allow no disruption for a reason (Karpenter core reference 4.4).
pub fn report_budgets(ctx: &Context, queue: &EventQueue, now: UnixMillis) {
    let state = ctx.cluster.read();
    for reason in [DisruptionReason::Empty, DisruptionReason::Drifted, DisruptionReason::Underutilized] {
        for pool in blocked_by_budgets(&state, reason, now) {
            let note = format!("no allowed disruptions for reason {}: a budget allows none", reason.as_str());
            queue.emit(&**pool, events::DISRUPTION_BLOCKED, note);
        }
    }
}

/// Searches on a blocking thread.
async fn decide(
    ctx: &Arc<Context>,
    pools: &Arc<Vec<ReadyPool>>,
    memory: &mut Memory,
    consolidation: Arc<Consolidation>,
    now: UnixMillis,
) -> (Decision, Vec<Move>) {
    if consolidation.is_decided(memory, now) {
        return Default::default();
    }
    let mut simulator = simulator(ctx, pools, consolidation.claims_of_candidates(), now);
    let (ctx, mut known) = (Arc::clone(ctx), std::mem::take(memory));
    let search = move || {
        let begin = Instant::now();
        if plan_present(&ctx, &mut simulator).is_none() {
            return (known, Default::default());
        }
        let simulate = |without: &_| {
            if begin.elapsed() > MAX_TIME { None } else { simulate(&ctx, &simulator, without) }
        };
        let mut decision = consolidation.decide(&mut known, simulator.waiting_pods(), simulate, now);
        if begin.elapsed() > MAX_TIME {
            disruption_metrics::count_timeout(&ctx);
        }
        let moves = moves(&ctx, &consolidation, &mut known, &simulator, &decision.claims, now);
        decision.claims.retain(|claim| moves.iter().any(|one| one.sources.contains_key(claim)));
        (known, (decision, moves))
    };
    // The search does not panic: each plan is isolated. If it did, the memory would be lost, which costs repeated attempts.
    match tokio::task::spawn_blocking(search).await {
        Ok((known, decision)) => {
            *memory = known;
            decision
        }
        Err(error) => {
            tracing::error!(%error, "consolidation panicked, nothing is consolidated");
            Default::default()
        }
    }
}

/// The moves of a decision: by a better plan than those that were compared, unless it is worse.
fn moves(
    ctx: &Context,
    consolidation: &Consolidation,
    memory: &mut Memory,
    simulator: &Simulator,
    claims: &[String],
    now: UnixMillis,
) -> Vec<Move> {
    let without: BTreeSet<String> = claims.iter().cloned().collect();
    for effort in [Effort::Normal, Effort::Quick].into_iter().filter(|_| !claims.is_empty()) {
        let planned = plan_moves(ctx, simulator, &without, effort);
        let Some((_, moves)) = planned.filter(|(outcome, _)| outcome.obstacles.is_empty()) else { continue };
        let Priced { pay, others } = consolidation.priced(moves);
        if !pay.is_empty() || effort == Effort::Quick {
            memory.dropped(&others, now);
            for (one, _) in &others {
                report_rejected(ctx, one);
            }
            return pay;
        }
    }
    Vec::new()
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
