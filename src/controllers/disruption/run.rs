//! Voluntary disruption: emptiness, drift, consolidation.
//!
//! Every node is marked and tainted first. An empty node is re-validated after a settling period, then deleted or unmarked. A node
//! with pods is deleted when its pods' replacements are ready ([`crate::controllers::interruption::departure`]).

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use futures::{StreamExt, stream};
use kube::ResourceExt;

use crate::api::NodeClaim;
use crate::clock;
use crate::controllers::caps::Capped;
use crate::controllers::context::Context;
use crate::controllers::deletion::delete_claim;
use crate::controllers::disruption::blocked::report_blocked;
use crate::controllers::disruption::mark::{mark, unmark};
use crate::controllers::disruption::taint::taint;
use crate::controllers::disruption::{consolidation, drift_replacement};
use crate::decisions::disruption::blocks::budget_block_of_claim;
use crate::decisions::disruption::candidates::{allowances, candidates};
use crate::decisions::disruption::consolidation::Memory;
use crate::decisions::disruption::consolidation_pause::PendingPods;
use crate::decisions::disruption::drift_replacement::DriftReplacement;
use crate::decisions::disruption::emptiness::{self, EmptyNodeStep};
use crate::decisions::disruption::mark::DisruptionMark;
use crate::decisions::disruption::marked::MarkedNodes;
use crate::decisions::disruption::reason::DisruptionReason;
use crate::decisions::staleness::Removal;
use crate::model::events;
use crate::model::time::UnixMillis;
use crate::state::instance_types::{InstanceTypes, ReadyPool};
use crate::state::object_ext::ObjectExt;
use crate::sync::heartbeat;

/// How often empty nodes are evaluated.
const PERIOD: Duration = Duration::from_secs(1);
/// How often drifted and underutilized nodes are evaluated.
const REPLACEMENT_PERIOD: Duration = Duration::from_secs(5);
/// Claims that are written concurrently.
const CONCURRENCY: usize = 16;

/// Runs until the process ends.
pub async fn run(ctx: Arc<Context>) {
    let mut disruption = Disruption::new(clock::now());
    loop {
        heartbeat::rest(tokio::time::sleep(PERIOD)).await;
        disruption.pass(&ctx, clock::now()).await;
    }
}

/// Disruption between two passes.
#[derive(Debug)]
struct Disruption {
    marked: MarkedNodes,
    drift: DriftReplacement,
    pending: PendingPods,
    consolidation: Memory,
    /// When drifted and underutilized nodes were last evaluated.
    replaced: UnixMillis,
}

impl Disruption {
    fn new(now: UnixMillis) -> Self {
        Self {
            marked: MarkedNodes::default(),
            drift: DriftReplacement::default(),
            pending: PendingPods::default(),
            consolidation: Memory::default(),
            replaced: now,
        }
    }

    async fn pass(&mut self, ctx: &Arc<Context>, now: UnixMillis) {
        let pause = ctx.pause();
        if pause.disruption || ctx.is_stale(Removal::Disruption) {
            return;
        }
        let pools = Arc::new(ctx.ready_pools());
        let types = InstanceTypes::new(&pools);
        self.remove_empty(ctx, &types, now).await;
        // The pods of a node need another one.
        if !pause.provisioning && self.replaced.is_older_than(REPLACEMENT_PERIOD, now) {
            self.replaced = now;
            self.replace(ctx, &pools, &types).await;
        }
    }

    /// One pass for empty nodes and abandoned replacements.
    async fn remove_empty(&mut self, ctx: &Context, types: &InstanceTypes, now: UnixMillis) {
        let (found, steps) = {
            let state = ctx.cluster.read();
            let holds = ctx.derived.holds(&state, now);
            let allowances = allowances(&state, DisruptionReason::Empty, now);
            let block = |claim: &str| budget_block_of_claim(&state, claim);
            let found = emptiness::choose(&candidates(&state, &holds, types), &allowances, block, now);
            (found, self.marked.empty_steps(&state, &holds, now))
        };
        stream::iter(steps).for_each_concurrent(CONCURRENCY, |(claim, step)| take_step(ctx, claim, step)).await;
        let abandoned = self.marked.abandoned(&ctx.cluster.read(), now);
        for claim in &abandoned {
            self.drift.abandoned(&claim.name_any(), now);
            self.consolidation.backoff.abandoned(&claim.name_any(), now);
            cancel(ctx, claim, "its pods found no other node in time").await;
        }
        // After the abandoned ones: their mark may remain where only the taint could be removed.
        let abandoned: BTreeSet<String> = abandoned.iter().map(|claim| claim.name_any()).collect();
        let mut untainted = MarkedNodes::untainted(&ctx.cluster.read());
        untainted.retain(|claim| !abandoned.contains(&claim.name_any()));
        stream::iter(untainted).for_each_concurrent(CONCURRENCY, |claim| retaint(ctx, claim)).await;
        start_all(ctx, found.chosen, DisruptionReason::Empty).await;
        report_blocked(ctx, "empty", &found.blocked).await;
    }

    /// One pass for drifted nodes, or else for underutilized ones.
    async fn replace(&mut self, ctx: &Arc<Context>, pools: &Arc<Vec<ReadyPool>>, types: &InstanceTypes) {
        let drifted = drift_replacement::choose(&mut self.drift, ctx, pools).await;
        let (chosen, reason) = if drifted.is_empty() {
            let (memory, pending) = (&mut self.consolidation, &mut self.pending);
            (consolidation::choose(memory, pending, ctx, pools, types).await, DisruptionReason::Underutilized)
        } else {
            (drifted, DisruptionReason::Drifted)
        };
        start_all(ctx, chosen, reason).await;
    }
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
    if let Err(error) = taint(ctx, &node).await {
        tracing::warn!(claim = claim.name_any(), %error, "failed to taint marked node, retrying");
    }
}

async fn start_all(ctx: &Context, mut claims: Vec<String>, reason: DisruptionReason) {
    claims.retain(|claim| !ctx.is_left_out_of_plans(claim));
    let admitted = ctx.admit(Capped::Disruption, claims.len()).await;
    claims.truncate(admitted);
    stream::iter(claims).for_each_concurrent(CONCURRENCY, |name| start(ctx, name, reason)).await;
}

async fn start(ctx: &Context, name: String, reason: DisruptionReason) {
    let claim = ctx.cluster.read().claims.get(&name).cloned();
    let Some(claim) = claim else { return };
    let node = ctx.node_name_of(&claim);
    tracing::info!(claim = name, node, node_pool = claim.node_pool(), reason = reason.as_str(), "disruption started");
    let note = format!("disrupting node: {}", reason.as_str());
    ctx.emit_for_claim(&claim, events::DISRUPTION_TERMINATING.note(&note)).await;
    if let Err(error) = mark(ctx, &claim, DisruptionMark { reason, deadline: None }).await {
        tracing::warn!(claim = name, %error, "failed to mark node claim for disruption, retrying");
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
