//! Writes a plan to the API server: a NodeClaim for each new node, and the planned pods on the NodeClaims of existing nodes.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::pin::pin;
use std::time::Instant;

use futures::{StreamExt, stream};
use kube::ResourceExt;
use stowage_api::launch_group;
use stowage_model::time::UnixMillis;
use stowage_planner::{ExistingNodePlacement, Plan, PlannedNode};
use stowage_runtime::clock;
use stowage_runtime::sync::lock;

use crate::controllers::caps::Capped;
use crate::controllers::context::{Context, ignore_not_found, is_rejection};
use crate::controllers::node_claim::creation::create_all;
use crate::controllers::provisioning::claim_template::claim_of;
use crate::decisions::disruption::reason::DisruptionReason;
use crate::decisions::holds::HOLD_LAUNCH;
use crate::decisions::provisioning::plan_changes::{
    claims_with, for_waiting_pods, reserves_room, still_waits, with_placement, without_pods,
};
use crate::state::plan_record::{MoveTerms, PlanRecord};
use crate::state::pool_types::ReadyPool;
use crate::state::snapshot::Snapshot;
use crate::state::tables::ClusterState;

/// NodeClaims that are patched concurrently.
const CONCURRENCY: usize = 16;

/// The effect of a written plan.
#[derive(Debug, Default)]
pub struct Written {
    /// Pods that have a hold now.
    pub served: BTreeSet<String>,
    pub rejected: Vec<Rejection>,
}

/// A new node whose NodeClaim the API server rejected.
#[derive(Debug)]
pub struct Rejection {
    /// Index into [`Plan::new_nodes`].
    pub node: usize,
    /// The API server's message.
    pub message: String,
}

/// Removes pods from the plan of a NodeClaim: their holds there expired, its node is leaving, or kube-scheduler refuses them there. Where that fails,
/// a pod is in the plans of two claims once it is planned again; only one of them holds room for it.
pub async fn withdraw(ctx: &Context, claim: String, pods: &BTreeSet<&str>) {
    let changed = change_plan(ctx, &claim, |state| without_pods(state, &claim, pods)).await;
    if let Err(error) = ignore_not_found(changed) {
        tracing::warn!(claim, %error, "failed to withdraw stale plan from node claim");
    }
}

/// Changes the plan of a NodeClaim, and writes it. The change is assumed from the beginning; if the write fails, it is undone.
pub async fn change_plan(
    ctx: &Context,
    claim: &str,
    change: impl FnOnce(&ClusterState) -> Option<PlanRecord>,
) -> Result<(), kube::Error> {
    let changed = ctx.cluster.update(|state| change(state).map(|plan| state.assume_plan(claim, plan)));
    if changed.is_some() { write_assumed(ctx, claim).await } else { Ok(()) }
}

/// Writes the assumed plan of a NodeClaim, unless another writer did. If that fails, the pods that the NodeClaim does not carry are demand again, after a
/// while.
async fn write_assumed(ctx: &Context, claim: &str) -> Result<(), kube::Error> {
    let _one_at_a_time = ctx.plan_writes.lock(claim).await;
    let Some(plan) = ctx.cluster.read().assumed_plan(claim).cloned() else { return Ok(()) };
    let written = ctx.write_plan(claim, &plan).await;
    if written.is_err() {
        let carried = ctx.cluster.read().claims.get(claim).map(|claim| PlanRecord::of(claim)).unwrap_or_default();
        let lost = plan.pods.iter().filter(|pod| !carried.pods.contains(pod));
        lock(&ctx.unwritten).extend(lost.cloned());
    }
    ctx.cluster.update(|state| state.settle_plan(claim, &plan));
    written
}

/// Pods that are added to the plan of a NodeClaim, as is assumed.
#[derive(Debug)]
pub struct Extension {
    pub claim: String,
    pub pods: Vec<String>,
}

/// Writes the assumed plans. Returns the pods for which that failed.
pub async fn write_extensions(ctx: &Context, extensions: Vec<Extension>) -> BTreeSet<String> {
    let writes = extensions.into_iter().map(|Extension { claim, pods }| async move {
        if let Err(error) = write_assumed(ctx, &claim).await {
            tracing::warn!(claim, %error, "failed to write plan to node claim");
        }
        let state = ctx.cluster.read();
        let planned = state.planned.get(&claim).map(|plan| &*plan.pods).unwrap_or_default();
        pods.into_iter().filter(|pod| !planned.contains(pod)).collect::<Vec<_>>()
    });
    let mut writes = pin!(stream::iter(writes.collect::<Vec<_>>()).buffer_unordered(CONCURRENCY));
    let mut unwritten = BTreeSet::new();
    while let Some(pods) = writes.next().await {
        unwritten.extend(pods);
    }
    unwritten
}

/// A plan with its inputs.
pub struct PlanWriter<'a> {
    pub ctx: &'a Context,
    pub pools: &'a [ReadyPool],
    pub snapshot: &'a Snapshot,
    pub plan: &'a Plan,
    /// Of a move: until when room is kept for its pods, and where they come from.
    pub of_move: Option<MoveTerms>,
    /// Why the nodes are disrupted whose pods it is for.
    pub reason: Option<DisruptionReason>,
}

impl PlanWriter<'_> {
    /// Writes the plan. `first_seen` is since when each pod has needed a node. A write that fails affects its own pods only.
    pub async fn write(&self, first_seen: &BTreeMap<String, UnixMillis>) -> Written {
        let (mut written, extensions) = self.create(first_seen).await;
        let added: BTreeSet<String> = extensions.iter().flat_map(|extension| extension.pods.iter().cloned()).collect();
        let unwritten = write_extensions(self.ctx, extensions).await;
        written.served.extend(added.into_iter().filter(|pod| !unwritten.contains(pod)));
        written
    }

    /// Creates the NodeClaims of the new nodes, and assumes the plans of the existing ones, which are still to be written.
    ///
    /// Pods that were bound or deleted since the snapshot are left out, and nodes that are for such pods only are not purchased.
    ///
    /// Room that other claims reserve for these pods is given up first, so that no pod has two reservations, also after a crash; that is rare. Then new
    /// claims are created: no launch waits for the other patches.
    pub async fn create(&self, first_seen: &BTreeMap<String, UnixMillis>) -> (Written, Vec<Extension>) {
        let hold_until = clock::now() + HOLD_LAUNCH;
        // Chosen before the creation, which adds plans that name these pods.
        let planned: BTreeSet<&str> = self.plan.pods().map(|pod| &*self.snapshot.problem.pods[pod].key).collect();
        let (reserving, stale): (Vec<String>, Vec<String>) = {
            let (state, now) = (self.ctx.cluster.read(), clock::now());
            claims_with(&state, &planned).into_iter().partition(|claim| reserves_room(&state, claim, &planned, now))
        };
        let withdraw_from = async |claims: Vec<String>| {
            stream::iter(claims).for_each_concurrent(CONCURRENCY, |claim| withdraw(self.ctx, claim, &planned)).await;
        };
        withdraw_from(reserving).await;
        let written = self.create_claims(hold_until, first_seen).await;
        withdraw_from(stale).await;
        (written, self.extend(hold_until))
    }

    /// Creates the NodeClaims of the new nodes.
    async fn create_claims(&self, hold_until: UnixMillis, first_seen: &BTreeMap<String, UnixMillis>) -> Written {
        let (ctx, problem) = (self.ctx, &self.snapshot.problem);
        let (mut nodes, mut claims) = (Vec::new(), Vec::new());
        let planned = self.plan.new_nodes.iter().enumerate();
        let waiting: Vec<(usize, Cow<'_, PlannedNode>)> = {
            let state = ctx.cluster.read();
            planned.filter_map(|(index, node)| Some((index, for_waiting_pods(&state, self.snapshot, node)?))).collect()
        };
        for (index, node) in waiting {
            let name = &problem.pools[node.pool].name;
            let Some(ready) = self.pools.iter().find(|ready| *ready.pool.name_any() == **name) else {
                continue;
            };
            claims.push(claim_of(&ready.pool, &node, self.snapshot, hold_until, self.of_move.as_ref()));
            nodes.push((index, node));
        }
        let admitted = ctx.admit(Capped::Purchase, claims.len()).await;
        nodes.truncate(admitted);
        claims.truncate(admitted);
        launch_group::mark(&mut claims, hold_until);
        let (started, total) = (Instant::now(), claims.len());
        let mut written = Written::default();
        let claims = launch_group::in_order(nodes.into_iter().zip(claims).collect());
        let mut results = pin!(create_all(ctx, claims, self.reason));
        while let Some(((index, node), result)) = results.next().await {
            match result {
                Ok(claim) => {
                    for key in node.pods.iter().map(|pod| &problem.pods[*pod].key) {
                        if let Some(seen) = first_seen.get(&**key) {
                            let delay = clock::now().saturating_since(*seen);
                            ctx.metrics.detect_to_claim_seconds.observe(delay.as_secs_f64());
                        }
                        written.served.insert(key.to_string());
                    }
                    let name = claim.name_any();
                    let pods = node.pods.iter().map(|pod| problem.pods[*pod].key.to_string());
                    lock(&ctx.purchase_backoff).purchased(&ctx.cluster.read(), &name, pods, clock::now());
                }
                Err(error) if is_rejection(&error) => {
                    written.rejected.push(Rejection { node: index, message: error.to_string() });
                }
                Err(error) => tracing::warn!(%error, "failed to create node claim, replanning its pods"),
            }
        }
        ctx.caps.take_back(Capped::Purchase, written.rejected.len());
        if total > 0 {
            ctx.claims_created.notify_one();
            tracing::info!(
                claims = total,
                api_us = u64::try_from(started.elapsed().as_micros()).unwrap_or(u64::MAX),
                "node claims written"
            );
        }
        written
    }

    /// Adds the pods that are planned on existing nodes to the plans of their NodeClaims, as an assumption.
    fn extend(&self, hold_until_launched: UnixMillis) -> Vec<Extension> {
        let (snapshot, of_move, now) = (self.snapshot, self.of_move.as_ref(), clock::now());
        let extend = |state: &mut ClusterState, placement: &ExistingNodePlacement| {
            let claim = snapshot.node_refs[placement.node].claim.clone()?;
            let waits = |pod: &usize| still_waits(state, snapshot, *pod);
            let pods: Vec<usize> = placement.pods.iter().copied().filter(waits).collect();
            let placement = ExistingNodePlacement { node: placement.node, pods };
            if placement.pods.is_empty() {
                return None;
            }
            let extended = with_placement(state, snapshot, &claim, &placement, hold_until_launched, of_move, now);
            let (plan, pods) = extended?;
            state.assume_plan(&claim, plan);
            Some(Extension { claim, pods })
        };
        if self.plan.placements.is_empty() {
            return Vec::new();
        }
        self.ctx
            .cluster
            .update(|state| self.plan.placements.iter().filter_map(|placement| extend(state, placement)).collect())
    }
}
