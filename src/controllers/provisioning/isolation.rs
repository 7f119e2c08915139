//! Plans on a blocking thread, and isolates the pods that plans fail over.

use std::collections::BTreeSet;
use std::sync::Arc;

use kube::ResourceExt;
use stowage_planner::{ColumnCache, Plan, PodEntry, Problem};
use stowage_runtime::clock;
use stowage_runtime::sync::{heartbeat, lock};

use crate::controllers::context::Context;
use crate::controllers::provisioning::claim_dry_run::accepts_plan;
use crate::decisions::provisioning::culprit_search::CulpritSearch;
use crate::state::pool_types::ReadyPool;
use crate::state::snapshot::{Snapshot, SnapshotRequest};

/// The planner, or a test's substitute for it.
pub type Planner = fn(&Problem, &ColumnCache) -> Plan;

/// Maximum number of plans that one pass makes in search of the pods that a plan fails over.
pub const MAX_TRIALS: usize = 32;

/// A plan with the snapshot that it is for.
#[derive(Debug)]
pub struct Planned {
    pub snapshot: Arc<Snapshot>,
    pub plan: Plan,
}

/// Result of [`isolate`].
#[derive(Debug, Default)]
pub struct Isolated {
    /// A plan of the pods that it does not fail over; `None` when there are none.
    pub rest: Option<Planned>,
    /// Pods that a plan fails over.
    pub culprits: Vec<PodEntry>,
}

/// Plans; `None` when the planner panics, which is a defect but must not end the service.
pub async fn plan(planner: Planner, snapshot: &Arc<Snapshot>) -> Option<Plan> {
    let shared = Arc::clone(snapshot);
    let plan = tokio::task::spawn_blocking(move || planner(&shared.problem, &shared.column_cache)).await;
    heartbeat::progress();
    plan.inspect_err(|error| tracing::error!(%error, pods = snapshot.problem.pods.len(), "planner panicked")).ok()
}

/// Searches for the pods that a plan of this snapshot fails over, and plans the others. A plan fails when the planner panics and, with
/// `pools`, when the API server rejects one of its NodeClaims. Each trial counts against `trials_left`.
///
/// # Errors
/// The API server did not answer a dry run.
pub async fn isolate(
    ctx: &Context,
    planner: Planner,
    snapshot: &Snapshot,
    trials_left: &mut usize,
    pools: Option<&[ReadyPool]>,
) -> Result<Isolated, kube::Error> {
    let pods = &snapshot.problem.pods;
    let cache = ColumnCache::default();
    let mut search = {
        let quarantine = lock(&ctx.quarantine);
        CulpritSearch::new(pods, |class| quarantine.has_failed(class), *trials_left)
    };
    let mut last: Option<(Vec<usize>, Planned)> = None;
    while let Some(trial) = search.trial() {
        *trials_left = trials_left.saturating_sub(1);
        let tried = Arc::new(snapshot.of_pods(&trial, &cache));
        let plan = plan(planner, &tried).await;
        let passed = match (&plan, pools) {
            (Some(plan), Some(pools)) => accepts_plan(ctx, pools, &tried, plan).await?,
            (plan, _) => plan.is_some(),
        };
        search.record(passed);
        if let Some(plan) = plan.filter(|_| passed) {
            last = Some((trial, Planned { snapshot: tried, plan }));
        }
    }
    let verdict = search.finish();
    let rest = match last.filter(|(pods, _)| *pods == verdict.accepted) {
        Some((_, planned)) => Some(planned),
        None if verdict.accepted.is_empty() => None,
        None => {
            let snapshot = Arc::new(snapshot.of_pods(&verdict.accepted, &cache));
            plan(planner, &snapshot).await.map(|plan| Planned { snapshot, plan })
        }
    };
    let namespaces: BTreeSet<&str> = verdict.culprits.iter().map(|pod| &*pods[*pod].class.namespace).collect();
    let culprits = if pools.is_none() && rest.is_none() && namespaces.len() > 1 {
        // The planner panics whoever's pods it plans: the cause is elsewhere. That of a rejection is not: without pods, the API server
        // accepts the NodeClaims.
        Vec::new()
    } else {
        verdict.culprits.iter().map(|pod| pods[*pod].clone()).collect()
    };
    tracing::warn!(
        trials = MAX_TRIALS - *trials_left,
        culprits = culprits.len(),
        untried = verdict.untried.len(),
        "searched for the pods that a plan fails over"
    );
    Ok(Isolated { rest, culprits })
}

/// The generation of the NodePool with this name.
pub fn generation(pools: &[ReadyPool], name: &str) -> Option<i64> {
    pools.iter().find(|ready| ready.pool.name_any() == name)?.pool.metadata.generation
}

/// The planner's problem, without the pods, NodePools and nodes that are left out of plans at present.
pub fn take_snapshot(ctx: &Context, pools: &[ReadyPool]) -> Snapshot {
    let (settings, now) = (&ctx.settings.plan, clock::now());
    let request = SnapshotRequest { pools, settings, now };
    let mut snapshot = ctx.derived.snapshot(&ctx.cluster.read(), request);
    lock(&ctx.supply_quarantine).leave_out(&mut snapshot, |name| generation(pools, name), now);
    let (quarantine, backoff) = (lock(&ctx.quarantine), lock(&ctx.purchase_backoff));
    snapshot.problem.pods.retain(|pod| quarantine.cause(&pod.class, now).is_none() && !backoff.leaves_out(&pod.key));
    snapshot
}
