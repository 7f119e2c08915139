//! Creates NodeClaims of static NodePools with too few nodes, and deletes those of NodePools with too many.

use std::sync::Arc;
use std::time::Duration;

use futures::{StreamExt, stream};
use kube::ResourceExt;
use stowage_api::NodePool;
use stowage_model::events;
use stowage_runtime::clock;

use crate::controllers::caps::Capped;
use crate::controllers::context::{Context, reference};
use crate::controllers::deletion::request_deletion;
use crate::controllers::run_loop::{Pace, RunLoop};
use crate::controllers::static_pools::create::create;
use crate::decisions::staleness::Removal;
use crate::decisions::static_pools::launch_backoff::LaunchBackoff;
use crate::decisions::static_pools::removal::removals;
use crate::decisions::static_pools::replicas::{Change, Size, changes, may_launch};
use crate::state::object_ext::ObjectExt;

const PACE: Pace = Pace { debounce: Duration::from_millis(200), resync: Duration::from_secs(2) };
/// Claims that are deleted concurrently.
const CONCURRENCY: usize = 16;

/// Runs until the process ends.
pub async fn run(ctx: Arc<Context>) {
    let mut run_loop = RunLoop::new(&ctx.cluster, PACE);
    let mut backoff = LaunchBackoff::default();
    loop {
        pass(&ctx, &mut backoff).await;
        run_loop.next().await;
    }
}

pub(super) async fn pass(ctx: &Context, backoff: &mut LaunchBackoff) {
    if !ctx.settings.static_capacity {
        return report_disabled(ctx).await;
    }
    let changes = {
        let state = ctx.cluster.read();
        backoff.observe(&state, clock::now());
        changes(&state)
    };
    for (pool, change) in changes {
        if change.create > 0 {
            grow(ctx, backoff, &pool, change.create).await;
        }
        if change.remove > 0 {
            shrink(ctx, backoff, &pool).await;
        }
        if change.over_limit > 0 {
            report_limit(ctx, &pool, change).await;
        }
    }
}

/// Reports static NodePools that get no nodes because of the feature gate.
async fn report_disabled(ctx: &Context) {
    let pools: Vec<Arc<NodePool>> =
        ctx.cluster.read().pools.values().filter(|pool| pool.spec.replicas.is_some()).cloned().collect();
    for pool in pools {
        let note = "spec.replicas has no effect: the feature gate StaticCapacity is off";
        ctx.emit(reference(&*pool), events::STATIC_CAPACITY_DISABLED.note(note)).await;
    }
}

async fn report_limit(ctx: &Context, pool: &NodePool, change: Change) {
    let replicas = pool.spec.replicas.unwrap_or_default();
    let note = format!("spec.limits.nodes leaves no room for {} of {replicas} spec.replicas", change.over_limit);
    ctx.emit(reference(pool), events::NODE_LIMIT_REACHED.note(&note)).await;
}

async fn grow(ctx: &Context, backoff: &mut LaunchBackoff, pool: &Arc<NodePool>, count: usize) {
    let name = pool.name_any();
    if !may_launch(pool) || ctx.pause().provisioning || backoff.until(&name) > clock::now() {
        return;
    }
    let created = create(ctx, pool, count, None).await;
    if !created.claims.is_empty() {
        tracing::info!(
            node_pool = name,
            replicas = pool.spec.replicas,
            claims = created.claims.len(),
            "created node claims of static node pool"
        );
    }
    for claim in &created.claims {
        backoff.created(&name, &claim.name_any());
    }
    if created.failed {
        backoff.failed(&name, clock::now());
    }
}

/// Deletes the nodes that a NodePool has too many, as far as the emergency stop and the cap per minute allow it.
async fn shrink(ctx: &Context, backoff: &mut LaunchBackoff, pool: &NodePool) {
    // The replacement of a drifted node would be one too many until its source is marked.
    let _one_at_a_time = ctx.disrupting.lock().await;
    if ctx.pause().disruption || ctx.is_stale(Removal::Disruption) {
        return;
    }
    let name = pool.name_any();
    let claims = {
        let (state, now) = (ctx.cluster.read(), clock::now());
        let Some(pool) = state.pools.get(&name).filter(|pool| !pool.is_deleting()) else { return };
        let size = Size::of(&state, &name);
        removals(&state, &ctx.derived.holds(&state, now), &size, size.change(pool).remove, now)
    };
    let admitted = ctx.admit(Capped::Disruption, claims.len()).await;
    let deletions = stream::iter(claims.into_iter().take(admitted)).map(|claim| async move {
        let (name, node) = (claim.name_any(), ctx.node_name_of(&claim));
        tracing::info!(
            claim = name,
            node,
            node_pool = claim.node_pool(),
            "deleting node claim of static node pool with too many nodes"
        );
        if let Err(error) = request_deletion(ctx, &claim).await {
            tracing::warn!(claim = name, %error, "failed to delete node claim, retrying");
        } else {
            let note = "its static NodePool has more nodes than spec.replicas";
            ctx.emit_for_claim_and_node(&claim, events::SCALED_DOWN.note(note)).await;
        }
        name
    });
    let mut deleted = deletions.buffer_unordered(CONCURRENCY);
    while let Some(claim) = deleted.next().await {
        backoff.removed(&name, &claim);
    }
}

#[cfg(test)]
mod write_tests;
