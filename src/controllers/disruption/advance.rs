//! Carries moves on: deletes their sources when the pods have room elsewhere, or rolls them back.

use std::sync::Arc;
use std::time::Duration;

use futures::{StreamExt, stream};
use k8s_openapi::api::core::v1::Pod;
use kube::api::ListParams;
use kube::{Api, ResourceExt};

use crate::api::NodeClaim;
use crate::clock;
use crate::controllers::context::{Context, is_conflict, is_not_found};
use crate::controllers::deletion::delete_unchanged_claim;
use crate::controllers::disruption::roll_back::roll_back;
use crate::controllers::run_loop::{Pace, RunLoop};
use crate::decisions::disruption::progress::{Progress, Step, progress};
use crate::decisions::staleness::Removal;

const PACE: Pace = Pace { debounce: Duration::from_millis(50), resync: Duration::from_millis(500) };
/// Moves that are carried on concurrently.
const CONCURRENCY: usize = 32;

/// Runs until the process ends.
pub async fn run(ctx: Arc<Context>) {
    let mut run_loop = RunLoop::new(&ctx.cluster, PACE);
    loop {
        pass(&ctx).await;
        run_loop.next().await;
    }
}

async fn pass(ctx: &Context) {
    let moves = now(ctx);
    if moves.iter().all(|one| one.step == Step::Wait) || ctx.pause().disruption || ctx.is_stale(Removal::Departure) {
        return;
    }
    stream::iter(moves)
        .for_each_concurrent(CONCURRENCY, |one| async move {
            match &one.step {
                Step::Wait => {}
                Step::Depart(sources) => depart(ctx, &one, sources).await,
                Step::RollBack(why) => roll_back(ctx, &one, why).await,
            }
        })
        .await;
}

fn now(ctx: &Context) -> Vec<Progress> {
    let (state, now) = (ctx.cluster.read(), clock::now());
    progress(&state, &ctx.derived.holds(&state, now), now)
}

/// Deletes the sources of a move whose pods have room elsewhere, if that is still so after reading them and their pods again: the watches may lag
/// behind.
async fn depart(ctx: &Context, one: &Progress, sources: &[Arc<NodeClaim>]) {
    for claim in sources {
        if let Err(error) = read_again(ctx, claim).await {
            if !is_not_found(&error) {
                tracing::warn!(claim = claim.name_any(), %error, "failed to read node claim and its pods, retrying");
            }
            return;
        }
    }
    let again = now(ctx).into_iter().find(|other| other.record.id == one.record.id);
    // Anything else is found in the next pass.
    let Some(Progress { step: Step::Depart(ready), reason, .. }) = again else { return };
    let was_read = |claim: &Arc<NodeClaim>| sources.iter().any(|read| read.name_any() == claim.name_any());
    let ready: Vec<_> = ready.into_iter().filter(was_read).collect();
    if ready.len() < sources.len() {
        return;
    }
    stream::iter(ready)
        .for_each_concurrent(CONCURRENCY, |claim| async move {
            let (name, node) = (claim.name_any(), ctx.node_name_of(&claim));
            tracing::info!(claim = name, node, reason = reason.as_str(), "deleting marked node claim");
            match delete_unchanged_claim(ctx, &claim, reason).await {
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
