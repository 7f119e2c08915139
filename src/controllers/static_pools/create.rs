//! Creates NodeClaims of a static NodePool.

use std::pin::pin;
use std::sync::Arc;

use futures::StreamExt;
use kube::ResourceExt;
use stowage_api::launch_group;
use stowage_api::{NodeClaim, NodePool};
use stowage_model::events;
use stowage_runtime::clock;

use crate::controllers::caps::Capped;
use crate::controllers::context::{Context, is_rejection, reference};
use crate::controllers::node_claim::creation::create_all;
use crate::controllers::node_claim::launch::acceptable;
use crate::controllers::provisioning::claim_template::claim_of_template;
use crate::decisions::disruption::reason::DisruptionReason;

/// What became of NodeClaims that were to be created.
#[derive(Debug, Default)]
pub struct Created {
    pub claims: Vec<NodeClaim>,
    /// Whether one failed, or none was tried because no offering is available: the caller waits before it tries again. A NodeClaim whose creation failed
    /// may exist.
    pub failed: bool,
}

/// Creates up to `count` NodeClaims, which replace nodes for `reason` if there is one, as far as the emergency stop and the cap per minute allow it. They are launched at once.
pub async fn create(ctx: &Context, pool: &Arc<NodePool>, count: usize, reason: Option<DisruptionReason>) -> Created {
    let claim = claim_of_template(pool);
    let class = ctx.cluster.read().classes.get(&pool.spec.template.spec.node_class_ref.name).cloned();
    if class.is_none_or(|class| acceptable(&claim, &ctx.cloud.catalog(&class)).is_empty()) {
        tracing::warn!(node_pool = pool.name_any(), missing = count, "no offering available for static node pool");
        let note = format!("{count} nodes are missing, and no available offering satisfies its requirements");
        ctx.emit(reference(&**pool), events::NO_OFFERING_AVAILABLE.note(&note)).await;
        return Created { failed: true, ..Created::default() };
    }
    let mut claims = vec![claim; ctx.admit(Capped::Purchase, count).await];
    launch_group::mark(&mut claims, clock::now());
    let mut out = Created::default();
    let mut results = pin!(create_all(ctx, claims.into_iter().map(|claim| ((), claim)).collect(), reason));
    while let Some(((), result)) = results.next().await {
        match result {
            Ok(claim) => out.claims.push(claim),
            Err(error) => {
                tracing::warn!(node_pool = pool.name_any(), %error, "failed to create node claim of static node pool, retrying");
                if is_rejection(&error) {
                    ctx.emit(reference(&**pool), events::NODE_CLAIM_REJECTED.note(&error.to_string())).await;
                }
                out.failed = true;
            }
        }
    }
    if !out.claims.is_empty() {
        ctx.claims_created.notify_one();
    }
    out
}
