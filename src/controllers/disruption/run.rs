//! Empty nodes, and nodes that are marked for any voluntary disruption.
//!
//! Every node is marked and tainted first. An empty node is re-validated after a settling period, then deleted or unmarked. A node
//! with pods is deleted when its pods have room elsewhere ([`crate::controllers::disruption::advance`]).

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::{StreamExt, stream};
use kube::ResourceExt;
use stowage_api::conditions::{Conditions, Status};
use stowage_api::{NodeClaim, conditions};
use stowage_model::time::UnixMillis;
use stowage_runtime::clock;
use stowage_runtime::sync::heartbeat;

use crate::controllers::condition_writer::write_condition;
use crate::controllers::context::{Context, ignore_not_found, is_conflict};
use crate::controllers::deletion::delete_claim;
use crate::controllers::disruption::disruption_metrics;
use crate::controllers::disruption::mark::unmark;
use crate::controllers::disruption::start::{CONCURRENCY, start_empty};
use crate::controllers::disruption::taint::taint;
use crate::decisions::disruption::emptiness::{self, EmptyNodeStep};
use crate::decisions::disruption::marked::{MarkedNodes, unreported_reasons};
use crate::decisions::disruption::reason::DisruptionReason;
use crate::decisions::staleness::Removal;
use crate::state::pool_types::ReadyPool;

/// How often empty nodes are evaluated.
const PERIOD: Duration = Duration::from_secs(1);

/// Runs until the process ends.
pub async fn run(ctx: Arc<Context>) {
    let mut disruption = Disruption::default();
    loop {
        heartbeat::rest(tokio::time::sleep(PERIOD)).await;
        disruption.pass(&ctx, clock::now()).await;
    }
}

/// Disruption between two passes.
#[derive(Default)]
struct Disruption {
    marked: MarkedNodes,
}

impl Disruption {
    async fn pass(&mut self, ctx: &Context, now: UnixMillis) {
        if ctx.cluster.read().protections.has_ended(now) {
            ctx.cluster.update(|state| state.end_protections(now));
        }
        if ctx.pause().disruption || ctx.is_stale(Removal::Disruption) {
            return;
        }
        self.remove_empty(ctx, now).await;
    }

    /// One pass for empty nodes, and marks and taints that nothing stands behind.
    async fn remove_empty(&mut self, ctx: &Context, now: UnixMillis) {
        let begin = Instant::now();
        let chosen = choose_empty(ctx, &ctx.ready_pools(), now);
        disruption_metrics::observe(ctx, DisruptionReason::Empty, begin.elapsed());
        let steps = {
            let state = ctx.cluster.read();
            self.marked.empty_steps(&state, &ctx.derived.holds(&state, now), now)
        };
        stream::iter(steps).for_each_concurrent(CONCURRENCY, |(claim, step)| take_step(ctx, claim, step)).await;
        let strays = self.marked.strays(&ctx.cluster.read(), now);
        for claim in strays {
            cancel(ctx, &claim, "nothing stands behind its mark or the taint of its node").await;
        }
        let untainted = MarkedNodes::untainted(&ctx.cluster.read());
        stream::iter(untainted).for_each_concurrent(CONCURRENCY, |claim| retaint(ctx, claim)).await;
        start_empty(ctx, chosen).await;
        let reasons = unreported_reasons(&ctx.cluster.read());
        stream::iter(reasons)
            .for_each_concurrent(CONCURRENCY, |(claim, reason)| report_reason(ctx, claim, reason))
            .await;
    }
}

/// Claims of empty nodes to remove, within the budgets of their pools.
pub fn choose_empty(ctx: &Context, pools: &[ReadyPool], now: UnixMillis) -> Vec<String> {
    let state = ctx.cluster.read();
    let holds = ctx.derived.holds(&state, now);
    emptiness::removable(&state, &holds, &ctx.derived.facts(&state, pools), now)
}

async fn take_step(ctx: &Context, claim: Arc<NodeClaim>, step: EmptyNodeStep) {
    let name = claim.name_any();
    let result = match step {
        EmptyNodeStep::Wait => Ok(()),
        EmptyNodeStep::Unmark => {
            cancel(ctx, &claim, "a pod was bound to the node").await;
            Ok(())
        }
        EmptyNodeStep::Taint => {
            let node = ctx.cluster.read().node_of(&claim).cloned();
            match node {
                Some(node) => taint(ctx, &node).await,
                None => Ok(()),
            }
        }
        EmptyNodeStep::Delete => {
            tracing::info!(claim = name, "deleting node claim of empty node");
            delete_claim(ctx, &claim, DisruptionReason::Empty).await
        }
    };
    if let Err(error) = result {
        tracing::warn!(claim = name, ?step, %error, "failed to remove empty node, retrying");
    }
}

async fn retaint(ctx: &Context, claim: Arc<NodeClaim>) {
    let node = ctx.cluster.read().node_of(&claim).cloned();
    let Some(node) = node else { return };
    // A conflict: the process that marks the claim taints the node at this moment.
    if let Err(error) = taint(ctx, &node).await
        && !is_conflict(&error)
    {
        tracing::warn!(claim = claim.name_any(), %error, "failed to taint marked node, retrying");
    }
}

/// Writes the condition DisruptionReason, or clears it.
async fn report_reason(ctx: &Context, claim: Arc<NodeClaim>, reason: Option<DisruptionReason>) {
    let report = |list: &mut Conditions<'_>| match reason {
        Some(reason) => list.set(conditions::DISRUPTION_REASON, Status::True, reason.as_str(), reason.as_str()),
        None => list.clear(conditions::DISRUPTION_REASON),
    };
    let written = ignore_not_found(write_condition(ctx, &claim, report).await);
    if let Err(error) = written {
        tracing::debug!(claim = claim.name_any(), %error, "failed to write the condition of a disruption, retrying");
    }
}

async fn cancel(ctx: &Context, claim: &NodeClaim, why: &str) {
    tracing::info!(claim = claim.name_any(), why, "disruption canceled");
    if let Err(error) = unmark(ctx, claim).await {
        tracing::warn!(claim = claim.name_any(), %error, "failed to cancel disruption, retrying");
    }
}

#[cfg(test)]
mod write_tests;
