//! Evicts the pods of marked NodeClaims when their replacements are ready or their deadline is near, and deletes the claims.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures::{StreamExt, stream};
use kube::ResourceExt;
use stowage_api::NodeClaim;
use stowage_model::events;
use stowage_model::time::UnixMillis;
use stowage_runtime::clock;

use crate::controllers::context::{Context, pod_reference};
use crate::controllers::deletion::delete_claim_or_log;
use crate::controllers::event_queue::EventQueue;
use crate::controllers::evictions::{evict, note};
use crate::controllers::run_loop::{Pace, RunLoop};
use crate::decisions::disruption::departure::{self, Departure, Step};
use crate::decisions::disruption::mark::DisruptionMark;

const PACE: Pace = Pace { debounce: Duration::from_millis(50), resync: Duration::from_millis(500) };

/// Claims that are deleted concurrently.
const CONCURRENCY: usize = 32;

/// An eviction of a pod is repeated after this time, such as when a PodDisruptionBudget refused it, or the watch lags behind.
const RETRY: Duration = Duration::from_secs(1);

/// Runs until the process ends.
pub async fn run(ctx: Arc<Context>) {
    let mut run_loop = RunLoop::new(&ctx.cluster, PACE);
    let (queue, mut evicted) = (EventQueue::start(&ctx), LastEvictions::default());
    loop {
        pass(&ctx, &queue, &mut evicted).await;
        run_loop.next().await;
    }
}

/// When pods were last evicted, by UID.
type LastEvictions = HashMap<String, UnixMillis>;

/// Deletes the claims that are due, and evicts the pods that are. Events are emitted in the background: the deadlines of a mass interruption are close
/// together.
async fn pass(ctx: &Context, queue: &EventQueue, evicted: &mut LastEvictions) {
    let departures = stream::iter(due(ctx, evicted)).map(|one| async move {
        let departs = match &one.step {
            Step::Delete => depart(ctx, &one.claim, one.mark).await,
            Step::Evict(pods) => {
                let node = one.node.as_deref().unwrap_or_default();
                for pod in evict(ctx, &one.claim, node, pods.clone(), true).await.pods {
                    let about = pod_reference(&pod.namespace, &pod.name, &pod.uid);
                    queue.emit_about(about, events::EVICTED, note(node));
                }
                false
            }
        };
        departs.then_some(one)
    });
    let departed: Vec<_> = departures.buffer_unordered(CONCURRENCY).filter_map(std::future::ready).collect().await;
    for Departure { claim, .. } in departed {
        let note = "replacement is ready or the deadline has passed; terminating";
        queue.emit_for_claim_and_node(ctx, &claim, events::TERMINATING_ON_INTERRUPTION, note);
    }
}

/// What departs now. Pods that were evicted a moment ago are left out.
fn due(ctx: &Context, evicted: &mut LastEvictions) -> Vec<Departure> {
    let state = ctx.cluster.read();
    if !departure::any_marked(&state) {
        evicted.clear();
        return Vec::new();
    }
    let now = clock::now();
    // Also during a pause, and whatever the age of the watches: the instance ends anyway.
    let mut due = departure::due(&state, &ctx.derived.holds(&state, now), now);
    evicted.retain(|_, at| !at.is_older_than(RETRY, now));
    for one in &mut due {
        if let Step::Evict(pods) = &mut one.step {
            pods.retain(|pod| evicted.insert(pod.uid.clone(), now).is_none());
        }
    }
    due.retain(|one| one.step != Step::Evict(Vec::new()));
    due
}

/// Returns whether the claim is deleted.
async fn depart(ctx: &Context, claim: &NodeClaim, mark: DisruptionMark) -> bool {
    let (name, reason) = (claim.name_any(), mark.reason);
    let node = ctx.node_name_of(claim);
    tracing::info!(claim = name, node, reason = reason.as_str(), "deleting marked node claim");
    delete_claim_or_log(ctx, claim, reason).await
}

#[cfg(test)]
mod write_tests;
