//! Events about nodes that are not disrupted, on each claim and its Node.

use futures::{StreamExt, stream};

use crate::controllers::context::Context;
use crate::model::events;

/// Events that are written concurrently: other nodes wait for them.
const CONCURRENCY: usize = 16;

/// Maximum number of claims that one pass reports: a tenant may block every node.
const MAX_REPORTED: usize = 100;

/// Reports why nodes that are `empty`, `drifted` or `underutilized` are not disrupted: the first [`MAX_REPORTED`].
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
    stream::iter(blocked.iter().take(MAX_REPORTED).map(emit)).for_each_concurrent(CONCURRENCY, |emit| emit).await;
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::test_support::failures::World;
    use crate::test_support::kubernetes::FakeApi;
    use crate::test_support::objects::claim;

    /// The memory of events is bounded: those about thousands of nodes would keep out all others.
    #[tokio::test]
    async fn a_pass_reports_a_bounded_number_of_blocked_nodes() {
        let api = FakeApi::default();
        let blocked: Vec<_> = (0..=MAX_REPORTED).map(|n| (format!("c{n:03}"), "why".to_owned())).collect();
        for (name, _) in &blocked {
            api.put(&claim(name, &json!({})));
        }
        let world = World::new(api);
        report_blocked(&world.context(), "empty", &blocked).await;
        let events = world.api.events();
        assert_eq!(events.len(), MAX_REPORTED);
        assert!(events[0].contains("NodeClaim/c000"), "{}", events[0]);
    }
}
