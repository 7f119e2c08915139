//! Chooses the nodes to consolidate: simulates the candidates one after the other.

use crate::clock;
use crate::controllers::caps::Capped;
use crate::controllers::context::Context;
use crate::controllers::disruption::blocked::report_blocked;
use crate::controllers::disruption::simulate::simulate;
use crate::decisions::disruption::consolidation::Consolidation;
use crate::decisions::disruption::consolidation_pause::{Pause, PendingPods, pause};
use crate::decisions::last_decisions::LastConsolidation;
use crate::state::instance_types::{InstanceTypes, ReadyPool};
use crate::sync::lock;

/// Claims whose nodes are to be removed together: the pods of each fit on the others, or on new nodes that cost less than the
/// removed ones.
pub async fn choose(
    ctx: &Context,
    pools: &[ReadyPool],
    types: &InstanceTypes,
    pending: &mut PendingPods,
) -> Vec<String> {
    let now = clock::now();
    let most = ctx.admissible(Capped::Disruption);
    let (mut consolidation, candidates) = {
        let state = ctx.cluster.read();
        let paused = pause(&state, pending, now);
        for reason in Pause::ALL {
            let gauge = ctx.metrics.consolidation_paused.with_label_values(&[reason.as_str()]);
            gauge.set(i64::from(paused == Some(reason)));
        }
        if paused.is_some() {
            *lock(&ctx.last_consolidation) = Some(LastConsolidation { paused, ..LastConsolidation::at(now) });
            return Vec::new();
        }
        Consolidation::begin(&state, &ctx.derived.holds(&state, now), types, most, now)
    };
    let mut decision = LastConsolidation {
        candidates: candidates.len(),
        blocked: consolidation.blocked.len(),
        ..LastConsolidation::at(now)
    };
    report_blocked(ctx, "underutilized", &consolidation.blocked).await;
    for candidate in candidates {
        let Some(without) = consolidation.removal(&candidate) else { continue };
        if let Some(outcome) = simulate(ctx, pools, types, &without, now).await {
            consolidation.record(&candidate, &outcome);
        }
    }
    let (claims, saving) = consolidation.finish();
    (decision.chosen, decision.saving) = (claims.len(), saving);
    *lock(&ctx.last_consolidation) = Some(decision);
    if !claims.is_empty() {
        tracing::info!(nodes = claims.len(), usd_per_hour = saving.usd(), "consolidating nodes");
    }
    claims
}
