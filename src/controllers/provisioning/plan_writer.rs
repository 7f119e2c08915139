//! Writes a plan to the API server: a NodeClaim for each new node, and the planned pods on the NodeClaims of existing nodes.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::pin::pin;
use std::time::Instant;

use futures::{StreamExt, stream};
use kube::ResourceExt;
use serde_json::json;
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
use crate::state::plan_record::MoveTerms;
use crate::state::pool_types::ReadyPool;
use crate::state::snapshot::Snapshot;

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
    let _one_at_a_time = ctx.plan_writes.lock(&claim).await;
    let Some(plan) = without_pods(&ctx.cluster.read(), &claim, pods) else { return };
    let patch = json!({"metadata": {"annotations": plan.annotations()}});
    if let Err(error) = ignore_not_found(ctx.patch_claim(&claim, &patch).await) {
        tracing::warn!(claim, %error, "failed to withdraw stale plan from node claim");
    }
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
    ///
    /// Pods that were bound or deleted since the snapshot are left out, and nodes that are for such pods only are not purchased.
    ///
    /// Room that other claims reserve for these pods is given up first, so that no pod has two reservations, also after a crash; that is rare. Then new
    /// claims are created: no launch waits for the other patches.
    pub async fn write(&self, first_seen: &BTreeMap<String, UnixMillis>) -> Written {
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
        let mut written = self.create_claims(hold_until, first_seen).await;
        withdraw_from(stale).await;
        let placements = self.plan.placements.iter().filter_map(|placement| {
            let claim = self.snapshot.node_refs[placement.node].claim.as_ref()?;
            let state = self.ctx.cluster.read();
            let waits = |pod: &usize| still_waits(&state, self.snapshot, *pod);
            let pods: Vec<usize> = placement.pods.iter().copied().filter(waits).collect();
            let placement = ExistingNodePlacement { node: placement.node, pods };
            (!placement.pods.is_empty()).then(|| self.extend_plan(claim, placement, hold_until))
        });
        let mut extended = stream::iter(placements.collect::<Vec<_>>()).buffer_unordered(CONCURRENCY);
        while let Some(added) = extended.next().await {
            written.served.extend(added);
        }
        written
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

    /// Adds the pods planned on an existing node to the plan of its NodeClaim. Returns the added pods.
    async fn extend_plan(
        &self,
        claim: &str,
        placement: ExistingNodePlacement,
        hold_until_launched: UnixMillis,
    ) -> Vec<String> {
        let _one_at_a_time = self.ctx.plan_writes.lock(claim).await;
        let now = clock::now();
        let extended = with_placement(
            &self.ctx.cluster.read(),
            self.snapshot,
            claim,
            &placement,
            hold_until_launched,
            self.of_move.as_ref(),
            now,
        );
        let Some((plan, added)) = extended else { return Vec::new() };
        let patch = json!({"metadata": {"annotations": plan.annotations()}});
        match self.ctx.patch_claim(claim, &patch).await {
            Ok(()) => added,
            Err(error) => {
                tracing::warn!(claim, %error, "failed to write plan to node claim");
                Vec::new()
            }
        }
    }
}
