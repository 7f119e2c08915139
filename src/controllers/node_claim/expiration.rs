//! Deletes expired NodeClaims.

use std::sync::Arc;
use std::time::Duration;

use kube::ResourceExt;
use stowage_model::events;
use stowage_model::pause::Pause;
use stowage_runtime::clock;
use stowage_runtime::sync::heartbeat;

use crate::controllers::caps::Capped;
use crate::controllers::context::Context;
use crate::controllers::deletion::delete_claim_or_log;
use crate::decisions::disruption::reason::DisruptionReason;
use crate::decisions::lifecycle::expiration::expired;
use crate::decisions::staleness::Removal;

/// Shortest and longest wait between two passes.
const PERIOD: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(10));

/// Runs until the process ends.
pub async fn run(ctx: Arc<Context>) {
    loop {
        let (mut due, mut next) = expired(&ctx.cluster.read(), clock::now());
        // Without provisioning, the pods of a node would find no other.
        if ctx.pause() != Pause::default() {
            (due, next) = (vec![], None);
        }
        if !due.is_empty() && ctx.is_stale(Removal::Expiration) {
            due.clear();
        }
        let admitted = ctx.admit(Capped::Disruption, due.len()).await;
        due.truncate(admitted);
        for claim in due {
            let after = claim.spec.expire_after.as_deref().unwrap_or_default();
            tracing::info!(claim = claim.name_any(), expire_after = after, "deleting expired node claim");
            // The event last: it must not delay the deletion.
            if delete_claim_or_log(&ctx, &claim, DisruptionReason::Expired).await {
                let note = format!("older than its expireAfter of {after}");
                ctx.emit_for_claim(&claim, events::EXPIRED.note(&note)).await;
            }
        }
        let wait = next.map_or(PERIOD.1, |at| at.saturating_since(clock::now()));
        heartbeat::rest(tokio::time::sleep(wait.clamp(PERIOD.0, PERIOD.1))).await;
    }
}

#[cfg(test)]
mod write_tests;
