//! Writes `status.lastPodEventTime` and the condition Consolidatable of NodeClaims.

use std::sync::Arc;
use std::time::Duration;

use futures::{StreamExt, stream};
use kube::ResourceExt;
use serde_json::json;
use stowage_api::NodeClaim;
use stowage_api::conditions::CONSOLIDATABLE;
use stowage_model::time::UnixMillis;
use stowage_runtime::clock;
use stowage_runtime::sync::heartbeat;

use crate::controllers::condition_writer::ConditionWriter;
use crate::controllers::context::{Context, ignore_not_found};
use crate::decisions::disruption::consolidatable::{QuietStatus, outdated};

const PERIOD: Duration = Duration::from_secs(1);
/// Claims that are written in one pass, and of these concurrently. In a large cluster pods come and go on hundreds of nodes per second.
const MAX_WRITES: usize = 20;
const CONCURRENCY: usize = 8;

/// Runs until the process ends.
pub async fn run(ctx: Arc<Context>) {
    let mut last = String::new();
    loop {
        heartbeat::rest(tokio::time::sleep(PERIOD)).await;
        last = pass(&ctx, &last, clock::now()).await;
    }
}

/// Writes the statuses that are out of date, of the nodes after `last` first. Returns the last node.
async fn pass(ctx: &Context, last: &str, now: UnixMillis) -> String {
    let pools = ctx.ready_pools();
    let due = {
        let state = ctx.cluster.read();
        outdated(&state, &ctx.derived.holds(&state, now), &ctx.derived.facts(&state, &pools), last, MAX_WRITES, now)
    };
    let last = due.last().map_or_else(|| last.to_owned(), |status| status.node.clone());
    stream::iter(&due).for_each_concurrent(CONCURRENCY, |status| write(ctx, status)).await;
    last
}

async fn write(ctx: &Context, status: &QuietStatus) {
    let next = |claim: &NodeClaim| {
        let mut writer = ConditionWriter::for_claim(claim, clock::now());
        if status.is_consolidatable {
            writer.edit().set_true(CONSOLIDATABLE);
        } else {
            writer.edit().clear(CONSOLIDATABLE);
        }
        let mut next = serde_json::Map::new();
        next.extend(writer.changed().map(|list| ("conditions".to_owned(), json!(list))));
        next.extend(status.last_pod_event.map(|at| ("lastPodEventTime".to_owned(), json!(at.rfc3339()))));
        (!next.is_empty()).then(|| next.into())
    };
    if let Err(error) = ignore_not_found(ctx.update_claim_status(&status.claim, next).await) {
        tracing::debug!(claim = status.claim.name_any(), %error, "failed to write the last pod event, retrying");
    }
}

#[cfg(test)]
mod write_tests;
