//! Dry runs of NodeClaims: whether the API server would create them.

use std::collections::BTreeMap;

use futures::{StreamExt, stream};
use kube::api::PostParams;
use kube::{Api, ResourceExt};
use stowage_api::NodeClaim;
use stowage_planner::Plan;
use stowage_runtime::clock;

use crate::controllers::context::{Context, is_rejection};
use crate::controllers::provisioning::claim_template::claim_of;
use crate::state::pool_types::ReadyPool;
use crate::state::snapshot::Snapshot;

/// Dry runs that are made concurrently.
const CONCURRENCY: usize = 16;
/// Maximum number of different NodeClaims of a plan that are tried; further ones count as accepted.
const MAX_CLAIMS: usize = 100;

/// Whether the API server accepts every NodeClaim of a plan. NodeClaims with equal specs are tried once.
///
/// # Errors
/// The API server did not answer.
pub async fn accepts_plan(
    ctx: &Context,
    pools: &[ReadyPool],
    snapshot: &Snapshot,
    plan: &Plan,
) -> Result<bool, kube::Error> {
    let mut distinct: BTreeMap<String, NodeClaim> = BTreeMap::new();
    for node in &plan.new_nodes {
        let name = &snapshot.problem.pools[node.pool].name;
        let Some(ready) = pools.iter().find(|ready| *ready.pool.name_any() == **name) else { continue };
        if distinct.len() < MAX_CLAIMS {
            let claim = claim_of(&ready.pool, node, snapshot, clock::now(), None);
            distinct.entry(serde_json::to_string(&claim.spec).unwrap_or_default()).or_insert(claim);
        }
    }
    let api: Api<NodeClaim> = Api::all(ctx.client.clone());
    let runs: Vec<_> = distinct.into_values().map(|claim| accepts(api.clone(), claim)).collect();
    let mut runs = stream::iter(runs).buffer_unordered(CONCURRENCY);
    while let Some(result) = runs.next().await {
        if !result? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Whether the API server accepts a NodeClaim.
///
/// # Errors
/// It did not answer.
pub async fn accepts(api: Api<NodeClaim>, claim: NodeClaim) -> Result<bool, kube::Error> {
    match api.create(&PostParams { dry_run: true, ..PostParams::default() }, &claim).await {
        Ok(_) => Ok(true),
        Err(error) if is_rejection(&error) => Ok(false),
        Err(error) => Err(error),
    }
}
