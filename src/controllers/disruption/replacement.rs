//! Replacement of drifted nodes, of those that expire soon, then of underutilized ones: in one pass, within the same budgets. Choices take time, so
//! that they have a loop of their own.

use std::sync::Arc;
use std::time::{Duration, Instant};

use stowage_model::time::UnixMillis;
use stowage_runtime::clock;
use stowage_runtime::sync::{heartbeat, lock};

use crate::controllers::context::Context;
use crate::controllers::disruption::blocked::report_blocked;
use crate::controllers::disruption::report_only::ReportOnly;
use crate::controllers::disruption::run::choose_empty;
use crate::controllers::disruption::start::begin;
use crate::controllers::disruption::{consolidation, outdated_replacement};
use crate::controllers::event_queue::EventQueue;
use crate::controllers::run_loop::{Pace, RunLoop};
use crate::controllers::static_pools;
use crate::decisions::disruption::consolidation::Memory;
use crate::decisions::disruption::moves::Move;
use crate::decisions::disruption::outdated_replacement::OutdatedReplacement;
use crate::decisions::disruption::reason::DisruptionReason;
use crate::decisions::disruption::verdicts::Reports;
use crate::decisions::lifecycle::expiration::next_replaced_from;
use crate::decisions::staleness::Removal;
use crate::decisions::static_pools::rollout::replaceable;
use crate::state::pool_types::ReadyPool;

const PACE: Pace = Pace { debounce: Duration::from_secs(1), resync: Duration::from_secs(10) };
/// A pass that began nothing is followed by this multiple of its time without one, at most for the maximum: a busy cluster changes always.
const REST: u32 = 4;
const MAX_REST: Duration = Duration::from_secs(30);

/// Runs until the process ends.
pub async fn run(ctx: Arc<Context>) {
    let mut run_loop = RunLoop::new(&ctx.cluster, PACE);
    let mut replacement = Replacement::new(&ctx);
    loop {
        run_loop.next_within(replacement.wait(clock::now())).await;
        let begin = Instant::now();
        if replacement.pass(&ctx).await == 0 {
            heartbeat::rest(tokio::time::sleep((begin.elapsed() * REST).min(MAX_REST))).await;
        }
    }
}

/// What is remembered between two passes.
struct Replacement {
    outdated: OutdatedReplacement,
    /// When the next node is old enough to be replaced before it expires.
    next_outdated: Option<UnixMillis>,
    consolidation: Memory,
    reports: Reports,
    report_only: ReportOnly,
    queue: EventQueue,
}

impl Replacement {
    fn new(ctx: &Arc<Context>) -> Self {
        Self {
            outdated: OutdatedReplacement::default(),
            next_outdated: None,
            consolidation: Memory::default(),
            reports: Reports::default(),
            report_only: ReportOnly::default(),
            queue: EventQueue::start(ctx),
        }
    }

    /// How long to wait for a change: until a node may be removed because of the time.
    fn wait(&self, now: UnixMillis) -> Duration {
        let times = [self.consolidation.next_eligible, self.next_outdated].into_iter().flatten();
        let next = times.filter(|at| *at > now).min();
        next.map_or(PACE.resync, |at| at.saturating_since(now).min(PACE.resync))
    }

    /// Begins to replace nodes of static NodePools that are outdated for this reason, and reports those that can't be replaced. Returns the nodes that
    /// are due, and how many replacements began.
    async fn replace_replicas(
        &mut self,
        ctx: &Context,
        reason: DisruptionReason,
        is_report: bool,
        now: UnixMillis,
    ) -> (Vec<String>, usize) {
        if !ctx.settings.static_capacity {
            return (Vec::new(), 0);
        }
        let backed_off = self.outdated.backed_off(now);
        let found = {
            let state = ctx.cluster.read();
            replaceable(&state, &ctx.derived.holds(&state, now), &backed_off, reason, now)
        };
        report_blocked(ctx, &self.queue, reason, &found.blocked);
        let begins = !is_report && !found.due.is_empty();
        let begun = if begins { static_pools::rollout::begin(ctx, reason, &backed_off).await } else { 0 };
        (found.due, begun)
    }

    /// Begins to replace nodes that are outdated for this reason. Returns those that are due if that is only reported, and how many replacements began.
    async fn replace_outdated(
        &mut self,
        ctx: &Arc<Context>,
        pools: &Arc<Vec<ReadyPool>>,
        reason: DisruptionReason,
        is_report: bool,
    ) -> (Vec<String>, usize) {
        let now = clock::now();
        let chosen = outdated_replacement::choose(&mut self.outdated, reason, ctx, pools, &self.queue).await;
        let (replicas, begun) = self.replace_replicas(ctx, reason, is_report, now).await;
        if is_report {
            return ([replicas, claims(&chosen)].concat(), 0);
        }
        (Vec::new(), begun + begin(ctx, &self.queue, pools, chosen, reason).await)
    }

    /// Returns the number of nodes whose disruption began.
    async fn pass(&mut self, ctx: &Arc<Context>) -> usize {
        let now = clock::now();
        for (claim, at_least) in std::mem::take(&mut *lock(&ctx.abandoned)) {
            self.outdated.abandoned(&claim, at_least, now);
            self.consolidation.backoff.abandoned(&claim, at_least, now);
        }
        self.next_outdated = next_replaced_from(&ctx.cluster.read(), now);
        // The pods of a node need another one.
        let pause = ctx.pause();
        if !pause.report {
            lock(&ctx.reported).clear();
        }
        if !pause.allows_decisions() || pause.provisioning || ctx.is_stale(Removal::Disruption) {
            return 0;
        }
        let pools = Arc::new(ctx.ready_pools());
        let (drifted, begun) = self.replace_outdated(ctx, &pools, DisruptionReason::Drifted, pause.report).await;
        let (expiring, also) = self.replace_outdated(ctx, &pools, DisruptionReason::Expired, pause.report).await;
        consolidation::report_budgets(ctx, &self.queue, now);
        let (memory, reports) = (&mut self.consolidation, &mut self.reports);
        let chosen = consolidation::choose(memory, reports, ctx, &pools, &self.queue).await;
        if pause.report {
            let chosen = [
                (DisruptionReason::Empty, choose_empty(ctx, &pools, now)),
                (DisruptionReason::Drifted, drifted),
                (DisruptionReason::Expired, expiring),
                (DisruptionReason::Underutilized, claims(&chosen)),
            ];
            self.report_only.report(ctx, &pools, &self.queue, chosen, now);
            return 0;
        }
        begun + also + begin(ctx, &self.queue, &pools, chosen, DisruptionReason::Underutilized).await
    }
}

/// The claims of the sources of these moves.
fn claims(moves: &[Move]) -> Vec<String> {
    moves.iter().flat_map(|one| one.sources.keys()).cloned().collect()
}

#[cfg(test)]
mod write_tests;
