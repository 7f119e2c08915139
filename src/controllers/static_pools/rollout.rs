//! Replaces outdated nodes of static NodePools: one new node each, and the outdated one leaves when the new one is initialized
//! ([`crate::controllers::disruption::advance`]).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use futures::{StreamExt, stream};
use kube::ResourceExt;
use stowage_api::NodePool;
use stowage_runtime::clock;

use crate::controllers::caps::Capped;
use crate::controllers::context::Context;
use crate::controllers::disruption::disruption_metrics::{self, Removed};
use crate::controllers::disruption::roll_back::{RETRY, abandon};
use crate::controllers::disruption::start::{CONCURRENCY, start};
use crate::controllers::static_pools::create::create;
use crate::decisions::disruption::move_record::MoveRecord;
use crate::decisions::disruption::progress::give_up_after;
use crate::decisions::disruption::reason::DisruptionReason;
use crate::decisions::staleness::Removal;
use crate::decisions::static_pools::rollout::replaceable;
use crate::state::object_ext::ObjectExt;

/// Begins to replace the nodes that are due for this reason ([`replaceable`]) but for those in `backed_off`, as far as the emergency stop and the caps per
/// minute allow it. Returns their number.
pub async fn begin(ctx: &Context, reason: DisruptionReason, backed_off: &BTreeSet<String>) -> usize {
    // Until a source is marked, its replacement is a node too many.
    let _one_at_a_time = ctx.disrupting.lock().await;
    let pause = ctx.pause();
    if pause.disruption || pause.provisioning || ctx.is_stale(Removal::Disruption) {
        return 0;
    }
    let mut claims = {
        let (state, now) = (ctx.cluster.read(), clock::now());
        replaceable(&state, &ctx.derived.holds(&state, now), backed_off, reason, now).due
    };
    claims.truncate(ctx.admit(Capped::Disruption, claims.len()).await);
    let mut by_pool: BTreeMap<String, (Arc<NodePool>, Vec<String>)> = BTreeMap::new();
    for source in claims {
        let pool = {
            let state = ctx.cluster.read();
            state.claims.get(&source).and_then(|claim| state.pools.get(claim.node_pool()?)).cloned()
        };
        let Some(pool) = pool else { continue };
        by_pool.entry(pool.name_any()).or_insert_with(|| (pool, Vec::new())).1.push(source);
    }
    let begun = stream::iter(by_pool.into_values()).map(|(pool, sources)| replace(ctx, pool, sources, reason));
    begun.buffer_unordered(CONCURRENCY).fold(0, |sum, begun| async move { sum + begun }).await
}

/// Creates a replacement of each of these claims, and marks the claim with it. A crash in between leaves a node too many, which is removed before any other
/// node is replaced.
async fn replace(ctx: &Context, pool: Arc<NodePool>, sources: Vec<String>, reason: DisruptionReason) -> usize {
    let created = create(ctx, &pool, sources.len(), Some(reason)).await;
    let (mut sources, replacements) = (sources.into_iter(), created.claims.into_iter());
    let pairs: Vec<(String, String)> = replacements
        .filter_map(|claim| claim.metadata.name)
        .zip(sources.by_ref())
        .map(|(new, old)| (old, new))
        .collect();
    if created.failed {
        abandon(ctx, sources.collect(), RETRY);
    }
    let begun = pairs.len();
    let marks = stream::iter(pairs).map(|(source, replacement)| async move {
        let now = clock::now();
        let record = MoveRecord {
            id: format!("{source}/{}", now.rfc3339()),
            at: now,
            give_up: now + give_up_after(reason),
            sources: vec![source.clone()],
            usd_per_hour: 0.0,
            unheld: BTreeSet::new(),
            replaced_by: Some(replacement),
        };
        let removed = Removed { reason, nodes: 1, has_replacements: true };
        disruption_metrics::count_begun(ctx, removed, &record.sources);
        start(ctx, source, reason, Some(&record)).await;
    });
    marks.buffer_unordered(CONCURRENCY).collect::<Vec<()>>().await;
    begun
}

#[cfg(test)]
mod write_tests;
