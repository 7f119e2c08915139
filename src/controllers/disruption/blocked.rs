//! Events about nodes that are not disrupted, on each claim and its Node.

use futures::{StreamExt, stream};

use crate::controllers::context::Context;
use crate::model::events;

/// Events that are written concurrently: other nodes wait for them.
const CONCURRENCY: usize = 16;

/// Reports why nodes that are `empty`, `drifted` or `underutilized` are not disrupted.
pub async fn report_blocked(ctx: &Context, what: &str, blocked: &[(String, String)]) {
    let emit = |(claim, why): &(String, String)| {
        let claim = ctx.cluster.read().claims.get(claim).cloned();
        let note = format!("{what}, but can't be disrupted now: {why}");
        async move {
            if let Some(claim) = claim {
                ctx.emit_for_claim_and_node(&claim, events::DISRUPTION_BLOCKED.note(&note)).await;
            }
        }
    };
    stream::iter(blocked.iter().map(emit)).for_each_concurrent(CONCURRENCY, |emit| emit).await;
}
