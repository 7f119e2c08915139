//! Takes a move back: the room that is reserved for its pods, new nodes that are not launched yet, and the marks of its sources.

use std::collections::BTreeSet;
use std::time::Duration;

use futures::{StreamExt, stream};
use kube::ResourceExt;
use stowage_model::events;
use stowage_runtime::clock;
use stowage_runtime::sync::lock;

use crate::controllers::context::{Context, ignore_not_found};
use crate::controllers::deletion::request_deletion;
use crate::controllers::disruption::disruption_metrics::{self, Removed};
use crate::controllers::disruption::mark::unmark;
use crate::controllers::provisioning::plan_writer::change_plan;
use crate::decisions::disruption::progress::Progress;
use crate::decisions::provisioning::plan_changes::{claims_with, without_pods};
use crate::state::object_ext::NodeClaimExt;
use crate::state::pods::PodRecord;

/// Claims that are written concurrently.
const CONCURRENCY: usize = 16;

/// Shortest wait before the sources of a move are tried again, and that after a move that was given up: its new nodes would probably be late again,
/// and meanwhile its sources take no pods.
pub const RETRY: Duration = Duration::from_mins(1);
const RETRY_LATE: Duration = Duration::from_mins(10);

/// Has these NodeClaims left alone for at least this time.
pub fn abandon(ctx: &Context, sources: Vec<String>, at_least: Duration) {
    lock(&ctx.abandoned).extend(sources.into_iter().map(|source| (source, at_least)));
}

/// Rolls a move back: its marks go last, so that a failure before is found again.
pub async fn roll_back(ctx: &Context, one: &Progress, why: &str) {
    let sources: Vec<String> = one.sources.iter().map(|claim| claim.name_any()).collect();
    tracing::info!(id = one.record.id, ?sources, why, "disruption canceled");
    let (pods, has_new_nodes) = {
        let state = ctx.cluster.read();
        let nodes = one.sources.iter().filter_map(|claim| state.node_of(claim)).map(|node| node.name_any());
        let pods: BTreeSet<String> =
            nodes.flat_map(|node| state.pods_on(&node).map(PodRecord::key).collect::<Vec<_>>()).collect();
        let planned = claims_with(&state, &pods.iter().map(String::as_str).collect());
        let has_new_nodes = planned.iter().any(|claim| state.in_flight.contains(claim));
        (pods, has_new_nodes)
    };
    if !release(ctx, &pods.iter().map(String::as_str).collect()).await {
        return;
    }
    let has_replacements = one.record.replaced_by.is_some() || has_new_nodes;
    let removed = Removed { reason: one.reason, nodes: sources.len(), has_replacements };
    disruption_metrics::count_taken_back(ctx, removed);
    let is_late = one.record.give_up <= clock::now();
    abandon(ctx, sources, if is_late { RETRY_LATE } else { RETRY });
    stream::iter(&one.sources)
        .for_each_concurrent(CONCURRENCY, |claim| async move {
            match unmark(ctx, claim).await {
                Ok(()) => {
                    let note = format!("disruption as {} is taken back: {why}", one.reason.as_str());
                    ctx.emit_for_claim_and_node(claim, events::DISRUPTION_CANCELED.note(&note)).await;
                }
                Err(error) => tracing::warn!(claim = claim.name_any(), %error, "failed to cancel disruption, retrying"),
            }
        })
        .await;
}

/// Withdraws the room that is reserved for these pods, and deletes the NodeClaims that nobody else needs and that are not launched. Returns whether
/// everything was written.
pub async fn release(ctx: &Context, pods: &BTreeSet<&str>) -> bool {
    let claims: Vec<String> = {
        let state = ctx.cluster.read();
        let reserves = |claim: &String| {
            state.planned.get(claim).is_some_and(|plan| plan.owners.keys().any(|pod| pods.contains(&**pod)))
        };
        claims_with(&state, pods).into_iter().filter(reserves).collect()
    };
    let released = stream::iter(claims).map(|name| async move {
        let Some(plan) = without_pods(&ctx.cluster.read(), &name, pods) else { return true };
        let claim = ctx.cluster.read().claims.get(&name).cloned();
        let is_launched = claim.as_ref().is_none_or(|claim| claim.provider_id().is_some());
        let written = if let Some(claim) = claim.filter(|_| plan.pods.is_empty() && !is_launched) {
            request_deletion(ctx, &claim).await.map(|()| true)
        } else {
            let written = change_plan(ctx, &name, |state| without_pods(state, &name, pods)).await;
            // Another writer may have tried to write it, in vain.
            let is_written = || without_pods(&ctx.cluster.read(), &name, pods).is_none();
            written.map(|()| is_written()).or_else(|error| ignore_not_found(Err(error)).map(|()| true))
        };
        let warn =
            |error: &_| tracing::warn!(claim = name, %error, "failed to withdraw plan from node claim, retrying");
        written.inspect_err(warn).unwrap_or(false)
    });
    released.buffer_unordered(CONCURRENCY).fold(true, |all, written| async move { all && written }).await
}
