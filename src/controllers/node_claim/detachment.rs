//! Reports that a drained node waits for its volumes.

use kube::ResourceExt;
use stowage_api::conditions::Conditions;
use stowage_api::{NodeClaim, conditions};
use stowage_model::events;

use crate::controllers::condition_writer::write_condition;
use crate::controllers::context::Context;
use crate::decisions::termination::detachment::Detachment;

/// Maximum number of volumes that an event names.
const MAX_NAMED: usize = 5;

/// Reports by an event and a condition that a drained node waits for its volumes, or that it does not any more.
pub async fn report_volumes(ctx: &Context, claim: &NodeClaim, volumes: &Detachment, waits: bool) {
    let written = match volumes {
        Detachment::Wait(volumes) if waits => {
            let more = volumes.len().saturating_sub(MAX_NAMED);
            let rest = if more > 0 { format!(" and {more} more") } else { String::new() };
            let named = volumes.iter().take(MAX_NAMED).map(String::as_str).collect::<Vec<_>>().join(", ");
            let note = format!("waits until its volumes are detached: {named}{rest}");
            ctx.emit_for_claim_and_node(claim, events::AWAITING_VOLUME_DETACHMENT.note(&note)).await;
            let reason = events::AWAITING_VOLUME_DETACHMENT.reason();
            let waiting = |list: &mut Conditions<'_>| list.set_unknown(conditions::VOLUMES_DETACHED, reason, reason);
            write_condition(ctx, claim, waiting).await
        }
        Detachment::GiveUp(reason) => {
            tracing::warn!(claim = claim.name_any(), reason, "volumes are not detached, terminating the instance");
            let over = |list: &mut Conditions<'_>| list.set_false(conditions::VOLUMES_DETACHED, reason, reason);
            write_condition(ctx, claim, over).await
        }
        Detachment::Done | Detachment::Wait(_) => return,
    };
    if let Err(error) = written {
        tracing::debug!(claim = claim.name_any(), %error, "failed to write the condition of attached volumes, retrying");
    }
}
