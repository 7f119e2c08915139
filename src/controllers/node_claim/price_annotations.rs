//! Writes the prices of nodes to their NodeClaims and Nodes, where the launch did not.

use std::sync::Arc;
use std::time::Duration;

use futures::{StreamExt, stream};
use kube::ResourceExt;
use serde_json::json;
use stowage_model::labels;
use stowage_runtime::sync::heartbeat;

use crate::controllers::context::{Context, ignore_not_found};
use crate::decisions::node_prices::{DuePrice, due};

const PERIOD: Duration = Duration::from_secs(10);
/// Nodes whose price is written in one pass, and of these concurrently: those of a cluster that is taken over have none.
const MAX_WRITES: usize = 50;
const CONCURRENCY: usize = 4;

/// Runs until the process ends.
pub async fn run(ctx: Arc<Context>) {
    let mut last = String::new();
    loop {
        heartbeat::rest(tokio::time::sleep(PERIOD)).await;
        last = pass(&ctx, &last).await;
    }
}

/// Writes the prices that are out of date, of the nodes after `last` first. Returns the last node.
async fn pass(ctx: &Context, last: &str) -> String {
    let pools = ctx.ready_pools();
    let due = {
        let state = ctx.cluster.read();
        due(&state, &ctx.derived.facts(&state, &pools), last, MAX_WRITES)
    };
    let last = due.last().map_or_else(|| last.to_owned(), |due| due.node.clone());
    stream::iter(&due).for_each_concurrent(CONCURRENCY, |due| write(ctx, due)).await;
    last
}

async fn write(ctx: &Context, due: &DuePrice) {
    let patch = json!({"metadata": {"annotations": {(labels::USD_PER_HOUR): due.price.to_string()}}});
    let (claim, node) = (due.claim.name_any(), &due.node);
    if due.on.0
        && let Err(error) = ignore_not_found(ctx.patch_claim(&claim, &patch).await)
    {
        tracing::debug!(claim, %error, "failed to write the price of a node claim, retrying");
    }
    if due.on.1
        && let Err(error) = ignore_not_found(ctx.patch_node(node, &patch).await)
    {
        tracing::debug!(node, %error, "failed to write the price of a node, retrying");
    }
}

#[cfg(test)]
mod write_tests;
