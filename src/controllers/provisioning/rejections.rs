//! NodeClaims that the API server rejects: which pods are the cause, and a plan for the others.
//!
//! A NodePool whose NodeClaims are rejected whatever their pods is reported by an event. Otherwise pods are the cause, such as by a label
//! value that they require: dry runs show which, they are quarantined, and the others are planned again at once.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use kube::{Api, ResourceExt};
use stowage_model::events;
use stowage_model::time::UnixMillis;
use stowage_planner::{Plan, PlannedNode};
use stowage_runtime::clock;

use crate::controllers::context::{Context, reference};
use crate::controllers::provisioning::claim_dry_run::accepts;
use crate::controllers::provisioning::claim_template::claim_without_pods;
use crate::controllers::provisioning::isolation::{Isolated, Planned, Planner, isolate, take_snapshot};
use crate::controllers::provisioning::plan_writer::{PlanWriter, Rejection};
use crate::controllers::provisioning::quarantine::quarantine;
use crate::decisions::provisioning::quarantine::Cause;
use crate::state::pool_types::ReadyPool;
use crate::state::snapshot::Snapshot;

/// The rejected NodeClaims of a plan.
#[derive(Clone, Copy, Debug)]
pub struct Rejected<'a> {
    pub snapshot: &'a Snapshot,
    pub plan: &'a Plan,
    pub rejections: &'a [Rejection],
}

/// Quarantines the pods that NodeClaims were rejected for, and plans and writes the other pods of these NodeClaims. Returns the pods that
/// have a hold now.
pub async fn serve_rejected(
    ctx: &Arc<Context>,
    planner: Planner,
    pools: &[ReadyPool],
    rejected: Rejected<'_>,
    trials_left: &mut usize,
    first_seen: &BTreeMap<String, UnixMillis>,
) -> BTreeSet<String> {
    let Some((suspects, message)) = suspects(ctx, pools, rejected).await else { return BTreeSet::new() };
    let mut snapshot = take_snapshot(ctx, pools);
    snapshot.problem.pods.retain(|pod| suspects.contains(&*pod.key));
    match isolate(ctx, planner, &snapshot, trials_left, Some(pools)).await {
        Ok(Isolated { rest, culprits }) => {
            quarantine(ctx, &culprits, Cause::NodeClaimRejected, &message);
            let Some(Planned { snapshot, plan }) = rest else { return BTreeSet::new() };
            PlanWriter { ctx, pools, snapshot: &snapshot, plan: &plan, of_move: None, reason: None }
                .write(first_seen)
                .await
                .served
        }
        Err(error) => {
            tracing::warn!(%error, "NodeClaim dry run failed, replanning its pods");
            BTreeSet::new()
        }
    }
}

/// The pods of the rejected NodeClaims, and the first message; `None` when their NodePools are the cause.
async fn suspects(
    ctx: &Context,
    pools: &[ReadyPool],
    Rejected { snapshot, plan, rejections }: Rejected<'_>,
) -> Option<(BTreeSet<String>, String)> {
    let mut of_pool: BTreeMap<usize, Vec<(&PlannedNode, &str)>> = BTreeMap::new();
    for rejection in rejections {
        if let Some(node) = plan.new_nodes.get(rejection.node) {
            of_pool.entry(node.pool).or_default().push((node, &rejection.message));
        }
    }
    let (mut pods, mut message) = (BTreeSet::new(), None);
    for (pool, nodes) in of_pool {
        let name = &snapshot.problem.pools[pool].name;
        ctx.metrics
            .claims_rejected
            .with_label_values(&[&**name])
            .inc_by(u64::try_from(nodes.len()).unwrap_or_default());
        let (Some(ready), Some((node, error))) = (ready(pools, name), nodes.first()) else { continue };
        tracing::warn!(node_pool = &**name, claims = nodes.len(), error, "node claims rejected");
        let bare = claim_without_pods(&ready.pool, node, snapshot, clock::now());
        match accepts(Api::all(ctx.client.clone()), bare).await {
            Ok(true) => {
                message.get_or_insert_with(|| format!("the API server rejects its NodeClaim: {error}"));
                let planned = nodes.iter().flat_map(|(node, _)| &node.pods);
                pods.extend(planned.map(|pod| snapshot.problem.pods[*pod].key.to_string()));
            }
            Ok(false) => {
                let note = format!("the API server rejects its NodeClaims: {error}");
                ctx.emit(reference(&*ready.pool), events::NODE_CLAIM_REJECTED.note(&note)).await;
            }
            Err(error) => tracing::warn!(%error, "NodeClaim dry run failed, replanning its pods"),
        }
    }
    Some((pods, message?))
}

fn ready<'a>(pools: &'a [ReadyPool], name: &str) -> Option<&'a ReadyPool> {
    pools.iter().find(|ready| *ready.pool.name_any() == *name)
}
