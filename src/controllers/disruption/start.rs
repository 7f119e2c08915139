//! Begins the disruption of chosen nodes: the last look at the present state, the new places of the pods, the mark, and the taint.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use futures::{StreamExt, stream};
use stowage_model::events;
use stowage_model::events::DeclaredEvent;
use stowage_planner::Plan;
use stowage_runtime::clock;

use crate::controllers::caps::Capped;
use crate::controllers::context::Context;
use crate::controllers::disruption::disruption_metrics::{self, Removed};
use crate::controllers::disruption::mark::mark;
use crate::controllers::disruption::roll_back::{RETRY, abandon, release};
use crate::controllers::disruption::scores::report_approved;
use crate::controllers::event_queue::EventQueue;
use crate::controllers::provisioning::plan_writer::PlanWriter;
use crate::decisions::disruption::candidates::pods_to_reschedule;
use crate::decisions::disruption::ledger::{admitted, admitted_moves};
use crate::decisions::disruption::mark::DisruptionMark;
use crate::decisions::disruption::move_record::MoveRecord;
use crate::decisions::disruption::moves::Move;
use crate::decisions::disruption::progress::give_up_after;
use crate::decisions::disruption::reason::DisruptionReason;
use crate::decisions::holds::unheld;
use crate::decisions::staleness::Removal;
use crate::state::object_ext::ObjectExt;
use crate::state::plan_record::MoveTerms;
use crate::state::pool_types::ReadyPool;

/// Claims that are written concurrently.
pub const CONCURRENCY: usize = 16;

/// Marks and taints empty nodes that were chosen, as far as the emergency stop, the budgets and the cap per minute still allow it, and no pod was
/// planned on them: a choice takes time.
pub async fn start_empty(ctx: &Context, chosen: Vec<String>) {
    if chosen.is_empty() {
        return;
    }
    // The next choice sees these marks.
    let _one_at_a_time = ctx.disrupting.lock().await;
    if ctx.pause().disruption || ctx.is_stale(Removal::Disruption) {
        return;
    }
    let count = chosen.len();
    let mut claims = {
        let (state, now) = (ctx.cluster.read(), clock::now());
        let holds = ctx.derived.holds(&state, now);
        let mut claims = admitted(&state, &chosen, DisruptionReason::Empty, now);
        claims
            .retain(|name| state.claims.get(name).is_some_and(|claim| pods_to_reschedule(&state, &holds, claim) == 0));
        claims
    };
    claims.retain(|claim| !ctx.is_left_out_of_plans(claim));
    let reason = DisruptionReason::Empty;
    disruption_metrics::count_changed(ctx, reason, count - claims.len());
    claims.truncate(ctx.admit(Capped::Disruption, claims.len()).await);
    if !claims.is_empty() {
        let removed = Removed { reason, nodes: claims.len(), has_replacements: false };
        disruption_metrics::count_begun(ctx, removed, &claims);
    }
    stream::iter(claims).for_each_concurrent(CONCURRENCY, |name| start(ctx, name, reason, None)).await;
}

/// Begins moves: their new nodes and the room for their pods are written before any source is marked. Each as a whole, as far as the emergency
/// stop, the budgets and the cap per minute still allow it, and its sources are as they were: a choice takes time. Returns the number of sources.
pub async fn begin(
    ctx: &Context,
    queue: &EventQueue,
    pools: &[ReadyPool],
    moves: Vec<Move>,
    reason: DisruptionReason,
) -> usize {
    if moves.is_empty() {
        return 0;
    }
    let _one_at_a_time = ctx.disrupting.lock().await;
    if ctx.pause().disruption || ctx.is_stale(Removal::Disruption) {
        return 0;
    }
    let (chosen, nodes) = (moves.len(), nodes_of(&moves));
    let mut candidates = Candidates::default();
    if reason == DisruptionReason::Underutilized {
        candidates = report_candidates(ctx, queue, &moves);
    }
    let mut admitted = {
        let state = ctx.cluster.read();
        admitted_moves(&state, &ctx.derived.facts(&state, pools), moves, reason, clock::now())
    };
    admitted.retain(|one| !one.sources.keys().any(|claim| ctx.is_left_out_of_plans(claim)));
    disruption_metrics::count_changed(ctx, reason, nodes - nodes_of(&admitted));
    let mut due = Vec::new();
    for one in admitted {
        let sources = one.sources.len();
        if ctx.admissible(Capped::Disruption) >= sources && ctx.admit(Capped::Disruption, sources).await == sources {
            due.push(one);
        }
    }
    for one in &due {
        candidates.retain(|claim, _| !one.sources.contains_key(claim));
    }
    report_rejected(
        ctx,
        queue,
        &candidates,
        "a node or its pods changed meanwhile, or a budget or a cap allows no more",
    );
    if due.len() < chosen {
        tracing::info!(chosen, admitted = due.len(), "chosen nodes changed, deciding again");
    }
    let begun = stream::iter(due).map(|one| begin_one(ctx, queue, pools, one, reason)).buffer_unordered(CONCURRENCY);
    begun.fold(0, |sum, sources| async move { sum + sources }).await
}

/// What is removed and purchased together with each NodeClaim.
type Candidates = BTreeMap<String, String>;

/// Reports the nodes that consolidation chose.
fn report_candidates(ctx: &Context, queue: &EventQueue, moves: &[Move]) -> Candidates {
    let candidates = moves.iter().flat_map(candidates_of).collect();
    report_each(ctx, queue, &candidates, events::CONSOLIDATION_CANDIDATE, "");
    candidates
}

fn candidates_of(one: &Move) -> Candidates {
    let described = one.described();
    one.sources.keys().map(|claim| (claim.clone(), described.clone())).collect()
}

/// Reports chosen nodes that are not removed.
fn report_rejected(ctx: &Context, queue: &EventQueue, candidates: &Candidates, why: &str) {
    let why = format!("not now: {why}; chosen was to ");
    report_each(ctx, queue, candidates, events::CONSOLIDATION_REJECTED, &why);
}

fn report_each(ctx: &Context, queue: &EventQueue, candidates: &Candidates, event: &'static DeclaredEvent, why: &str) {
    for (claim, described) in candidates {
        let claim = ctx.cluster.read().claims.get(claim).map(Arc::clone);
        if let Some(claim) = claim {
            queue.emit_for_claim_and_node(ctx, &claim, event, &format!("{why}{described}"));
        }
    }
}

/// Number of nodes that moves remove.
fn nodes_of(moves: &[Move]) -> usize {
    moves.iter().map(|one| one.sources.len()).sum()
}

/// Begins a move, or takes back what was written of it. Returns the number of its sources.
async fn begin_one(
    ctx: &Context,
    queue: &EventQueue,
    pools: &[ReadyPool],
    one: Move,
    reason: DisruptionReason,
) -> usize {
    let now = clock::now();
    let record = MoveRecord {
        id: format!("{}/{}", one.sources.keys().next().map_or("", String::as_str), now.rfc3339()),
        at: now,
        give_up: now + give_up_after(reason),
        sources: one.sources.keys().cloned().collect(),
        usd_per_hour: one.saving.usd(),
        unheld: BTreeSet::new(),
        replaced_by: None,
    };
    let pods = one.pods();
    let terms = MoveTerms {
        until: record.give_up,
        sources: one.sources_by_pod(),
        generation: (reason == DisruptionReason::Underutilized).then(|| one.generation(now)),
    };
    if let Some(why) = reserve(ctx, pools, &one, &terms, Some(reason)).await {
        tracing::info!(sources = ?record.sources, why, "move dropped before any node was marked");
        if reason == DisruptionReason::Underutilized {
            report_rejected(ctx, queue, &candidates_of(&one), &why);
        }
        release(ctx, &pods).await;
        abandon(ctx, record.sources, RETRY);
        return 0;
    }
    let marks = stream::iter(record.sources.clone());
    let (record, one) = (&record, &one);
    let start_source = |name: String| async move {
        // Its own pods only: the size of an annotation is limited.
        let record = MoveRecord { unheld: one.unheld(&name), ..record.clone() };
        start(ctx, name, reason, Some(&record)).await;
    };
    marks.for_each_concurrent(CONCURRENCY, start_source).await;
    let has_replacements = !one.plan.new_nodes.is_empty();
    let removed = Removed { reason, nodes: record.sources.len(), has_replacements };
    disruption_metrics::count_begun(ctx, removed, &record.sources);
    if reason == DisruptionReason::Underutilized {
        report_approved(ctx, one).await;
    }
    record.sources.len()
}

/// Writes the room for the pods of a move: on its targets first, so that no node is launched if other pods took it. Returns why it failed.
pub(super) async fn reserve(
    ctx: &Context,
    pools: &[ReadyPool],
    one: &Move,
    terms: &MoveTerms,
    reason: Option<DisruptionReason>,
) -> Option<String> {
    let key = |pod: usize| &*one.snapshot.problem.pods[pod].key;
    let on_targets = one.held_on_targets();
    let on_new = Plan { new_nodes: one.plan.new_nodes.clone(), ..Plan::default() };
    for plan in [on_targets, on_new] {
        let writer =
            PlanWriter { ctx, pools, snapshot: &one.snapshot, plan: &plan, of_move: Some(terms.clone()), reason };
        let written = writer.write(&BTreeMap::new()).await;
        if let Some(pod) = plan.pods().map(key).find(|pod| !written.served.contains(*pod)) {
            return Some(format!("no room could be reserved for pod {pod}"));
        }
        let state = ctx.cluster.read();
        let holds = ctx.derived.holds(&state, clock::now());
        if let Some(pod) = unheld(&state, &holds, plan.pods().map(key)) {
            return Some(format!("other pods took the room for pod {pod}"));
        }
    }
    None
}

/// Marks and taints a node; of a move with its record.
pub(in crate::controllers) async fn start(
    ctx: &Context,
    name: String,
    reason: DisruptionReason,
    record: Option<&MoveRecord>,
) {
    let claim = ctx.cluster.read().claims.get(&name).map(Arc::clone);
    let Some(claim) = claim else { return };
    let node = ctx.node_name_of(&claim);
    let id = record.map(|record| record.id.as_str());
    tracing::info!(
        claim = name,
        node,
        node_pool = claim.node_pool(),
        reason = reason.as_str(),
        id,
        "disruption started"
    );
    let note = format!("disrupting node: {}", reason.as_str());
    ctx.emit_for_claim_and_node(&claim, events::DISRUPTION_TERMINATING.note(&note)).await;
    if let Err(error) = mark(ctx, &claim, DisruptionMark { reason, deadline: None }, record).await {
        tracing::warn!(claim = name, %error, "failed to mark node claim for disruption, retrying");
    }
}

#[cfg(test)]
mod write_tests;
