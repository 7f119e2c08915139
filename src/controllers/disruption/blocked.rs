//! Events about outdated nodes that are not replaced, on each claim and its Node.

use stowage_model::events;

use crate::controllers::context::Context;
use crate::controllers::event_queue::EventQueue;
use crate::decisions::disruption::reason::DisruptionReason;
use crate::decisions::lifecycle::expiration::expires_at;

/// Maximum number of claims that one pass reports: a tenant may block every node.
const MAX_REPORTED: usize = 100;

/// Reports why nodes that are outdated for this reason are not replaced: the first [`MAX_REPORTED`], in the background.
pub fn report_blocked(ctx: &Context, queue: &EventQueue, reason: DisruptionReason, blocked: &[(String, String)]) {
    for (claim, why) in blocked.iter().take(MAX_REPORTED) {
        let claim = ctx.cluster.read().claims.get(claim).cloned();
        if let Some(claim) = claim {
            let expires_at = expires_at(&claim).filter(|_| reason == DisruptionReason::Expired);
            let what = expires_at.map_or_else(|| "drifted".to_owned(), |at| format!("expires at {}", at.rfc3339()));
            let note = format!("{what}, but can't be disrupted now: {why}");
            queue.emit_for_claim_and_node(ctx, &claim, events::DISRUPTION_BLOCKED, &note);
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use stowage_test_objects::claim;

    use super::*;
    use crate::test_support::failures::World;
    use crate::test_support::kubernetes::FakeApi;

    /// The memory of events is bounded: those about thousands of nodes would keep out all others.
    #[tokio::test]
    async fn a_pass_reports_a_bounded_number_of_blocked_nodes() {
        let api = FakeApi::default();
        let blocked: Vec<_> = (0..=MAX_REPORTED).map(|n| (format!("c{n:03}"), "why".to_owned())).collect();
        for (name, _) in &blocked {
            api.put(&claim(name, &json!({})));
        }
        let world = World::new(api);
        let ctx = world.context();
        let queue = EventQueue::start(&ctx);
        report_blocked(&ctx, &queue, DisruptionReason::Drifted, &blocked);
        while world.api.events().len() < MAX_REPORTED {
            tokio::task::yield_now().await;
        }
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
        let events = world.api.events();
        assert_eq!(events.len(), MAX_REPORTED);
        assert!(!events.iter().any(|event| event.contains("NodeClaim/c100")), "{events:?}");
    }
}
