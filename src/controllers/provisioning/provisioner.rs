//! Pods that the scheduler rejected become NodeClaims: wait for the burst to end, plan, write the plan down.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::{StreamExt, stream};
use kube::api::PostParams;
use kube::{Api, ResourceExt};

use crate::api::NodeClaim;
use crate::cloud::launch_group;
use crate::controllers::context::{Context, pod_reference, reference};
use crate::controllers::node_claim::metrics;
use crate::controllers::provisioning::batch_window::{Window, closes_at};
use crate::controllers::provisioning::claim_template;
use crate::planner::output::plan::Plan;
use crate::state::holds::{Owner, Planned};
use crate::state::snapshot;
use crate::state::snapshot::{NodeRef, ReadyPool, Snapshot};
use crate::state::{ClusterState, PodRecord, Scheduling, now_ms};

/// A hold outlives the boot of its node by what a slow boot takes, milliseconds.
pub const HOLD_LAUNCH_MS: i64 = snapshot::BOOT_PATIENCE_MS;
/// A hold on a node that is up ends after so long, milliseconds.
pub const HOLD_READY_MS: i64 = 60_000;
/// A pod that a plan bought nothing for is looked at again after so long, milliseconds.
const RETRY_MS: i64 = 10_000;
/// The state is looked at no more often than this.
const LOOK: Duration = Duration::from_millis(20);
/// NodeClaims written at the same time.
const WRITES: usize = 16;
/// At most so many pods are told in an event why no plan holds them, for each plan.
const EVENTS: usize = 200;
/// At most so many pods are told in an event where they will go, for each plan: the NodeClaims name them all.
const NOMINATED_EVENTS: usize = 10;

/// Pods that need a node and weren't served by a plan yet, and the window they opened.
#[derive(Debug, Default)]
struct Queue {
    /// When each pod was first seen to need a node, milliseconds since the epoch.
    seen: BTreeMap<String, i64>,
    /// When a plan last bought nothing for a pod.
    tried: HashMap<String, i64>,
}

impl Queue {
    /// Takes in the demand as it is now and says what window it makes.
    fn observe(&mut self, state: &ClusterState, now: i64) -> Option<Window> {
        let holds = state.holds(now);
        let demand = snapshot::demand(state, &holds, &BTreeSet::new());
        let wanted: BTreeSet<&String> = demand.pending.iter().chain(&demand.displaced).collect();
        self.tried.retain(|key, at| wanted.contains(key) && now - *at < RETRY_MS);
        self.seen.retain(|key, _| wanted.contains(key));
        for key in wanted {
            if !self.tried.contains_key(key) {
                self.seen.entry(key.clone()).or_insert(now);
            }
        }
        let fresh = || self.seen.iter().filter(|(key, _)| !self.tried.contains_key(*key)).map(|(_, at)| *at);
        let untried = state.unbound.iter().filter_map(|key| state.pods.get(key));
        Some(Window {
            opened_ms: fresh().min()?,
            latest_ms: fresh().max()?,
            last_created_ms: state.last_pod_created_ms,
            untried: untried
                .filter(|pod| pod.scheduling == Scheduling::Untried && !pod.daemon && pod.deleting_since_ms.is_none())
                .count(),
        })
    }
}

/// Runs until the process ends.
pub async fn run(ctx: Arc<Context>) {
    let mut changes = ctx.cluster.changes();
    let mut queue = Queue::default();
    loop {
        let now = now_ms();
        let window = queue.observe(&ctx.cluster.read(), now);
        let wait = match window {
            Some(window) => {
                let due = closes_at(&window, ctx.settings.batch_idle_ms, ctx.settings.batch_max_ms);
                if due <= now {
                    pass(&ctx, &mut queue).await;
                    continue;
                }
                Duration::from_millis(u64::try_from(due - now).unwrap_or(0))
            }
            None => Duration::from_secs(1),
        };
        // Whatever happens first: something changed, or the window is due.
        let _ = tokio::time::timeout(wait, changes.changed()).await;
        tokio::time::sleep(LOOK).await;
        changes.mark_unchanged();
    }
}

/// Tells pods that can't be understood, and that no plan will ever hold, why; until the process ends.
pub async fn tell_unreadable(ctx: Arc<Context>) {
    loop {
        tokio::time::sleep(Duration::from_millis(u64::try_from(RETRY_MS).unwrap_or(10_000))).await;
        let unreadable: Vec<_> = {
            let state = ctx.cluster.read();
            let waiting = state.unbound.iter().filter_map(|key| state.pods.get(key)).filter(|pod| pod.unschedulable());
            let told = waiting.filter_map(|pod| {
                let why = pod.entry.as_ref().err()?;
                Some((pod_reference(&pod.namespace, &pod.name, &pod.uid), why.clone()))
            });
            told.take(EVENTS).collect()
        };
        for (pod, why) in unreadable {
            ctx.event(pod, true, "FailedScheduling", &format!("no node can be planned for it: {why}")).await;
        }
    }
}

async fn pass(ctx: &Arc<Context>, queue: &mut Queue) {
    let pools = ctx.ready_pools();
    let started = now_ms();
    let taken = snapshot::take(&ctx.cluster.read(), &pools, &ctx.settings.plan, &BTreeSet::new(), started);
    let planned = tokio::task::spawn_blocking(move || {
        let clock = Instant::now();
        let plan = crate::planner::plan(&taken.problem, &taken.column_cache);
        (taken, plan, clock.elapsed())
    })
    .await;
    let (taken, plan, took) = match planned {
        Ok(planned) => planned,
        Err(error) => {
            // A panic in the core is a defect, but must not end the service: the pods are tried again later.
            tracing::error!(%error, "the planner failed");
            ctx.metrics.plans_failed.inc();
            for key in queue.seen.keys() {
                queue.tried.insert(key.clone(), now_ms());
            }
            return;
        }
    };
    ctx.metrics.plan_seconds.observe(took.as_secs_f64());
    report(&taken, &plan, took);
    let bought = write(ctx, &pools, &taken, &plan, queue).await;
    let now = now_ms();
    for pod in &taken.problem.pods {
        if !bought.contains(&*pod.key) {
            queue.tried.insert(pod.key.to_string(), now);
        }
    }
    tell(ctx, &taken, &plan, pools.is_empty());
}

fn report(taken: &Snapshot, plan: &Plan, took: Duration) {
    let reused: usize = plan.placements.iter().map(|placement| placement.pods.len()).sum();
    let gap = plan.lower_bound.filter(|bound| bound.0 > 0).map(|bound| {
        let over = plan.cost.0.saturating_sub(bound.0);
        format!("{}.{}%", over * 100 / bound.0, over * 1_000 / bound.0 % 10)
    });
    tracing::info!(
        pods = taken.problem.pods.len(),
        nodes = plan.new_nodes.len(),
        on_existing = reused,
        unschedulable = plan.unschedulable.len(),
        usd_per_hour = plan.cost.usd(),
        gap = gap.unwrap_or_else(|| "unknown".into()),
        solve_ms = u64::try_from(took.as_millis()).unwrap_or(u64::MAX),
        "planned"
    );
    for node in &plan.new_nodes {
        if let Some(choice) = node.choices.first() {
            tracing::info!(
                node_pool = &*taken.problem.pools[node.pool].name,
                instance_type = &*choice.instance_type.name,
                zone = &*choice.zone,
                capacity_type = %choice.capacity_type,
                usd_per_hour = choice.price.usd(),
                pods = node.pods.len(),
                alternatives = node.choices.len() - 1,
                "planned node"
            );
        }
    }
}

/// Writes the plan down. Returns the pods that room is held for.
async fn write(
    ctx: &Arc<Context>,
    pools: &[ReadyPool],
    taken: &Snapshot,
    plan: &Plan,
    queue: &Queue,
) -> BTreeSet<String> {
    let mut served = BTreeSet::new();
    if let Err(error) = forget(ctx, taken).await {
        tracing::warn!(%error, "old plans could not be taken back, the pods are planned again");
        return served;
    }
    let api: Api<NodeClaim> = Api::all(ctx.client.clone());
    let until = now_ms() + HOLD_LAUNCH_MS;
    let (mut nodes, mut claims) = (Vec::new(), Vec::new());
    for (index, node) in plan.new_nodes.iter().enumerate() {
        let name = &taken.problem.pools[node.pool].name;
        let Some(pool) = pools.iter().find(|ready| *ready.pool.name_any() == **name) else {
            continue;
        };
        nodes.push(index);
        claims.push(claim_template::of(&pool.pool, node, taken, until));
    }
    launch_group::mark(&mut claims, until);
    let creations: Vec<_> = nodes
        .into_iter()
        .zip(claims)
        .map(|(index, claim)| {
            let api = api.clone();
            async move { (index, api.create(&PostParams::default(), &claim).await) }
        })
        .collect();
    let (asked, total) = (Instant::now(), creations.len());
    let mut results = stream::iter(creations).buffer_unordered(WRITES);
    while let Some((index, result)) = results.next().await {
        let node = &plan.new_nodes[index];
        match result {
            Ok(claim) => {
                metrics::count_created(ctx, &claim);
                for pod in &node.pods {
                    let key = &taken.problem.pods[*pod].key;
                    if let Some(seen) = queue.seen.get(&**key) {
                        #[allow(clippy::cast_precision_loss)]
                        ctx.metrics.detect_to_claim_seconds.observe((now_ms() - seen) as f64 / 1e3);
                    }
                    served.insert(key.to_string());
                }
                ctx.cluster.update(|state| state.apply_claim(claim));
            }
            Err(error) => tracing::warn!(%error, "node claim could not be written, its pods are planned again"),
        }
    }
    if total > 0 {
        ctx.claimed.notify_one();
        tracing::info!(
            claims = total,
            api_us = u64::try_from(asked.elapsed().as_micros()).unwrap_or(u64::MAX),
            "node claims written"
        );
    }
    for placement in &plan.placements {
        let NodeRef { claim: Some(name), .. } = &*taken.node_refs[placement.node] else {
            continue;
        };
        let pods = placement.pods.iter().map(|pod| &taken.problem.pods[*pod]);
        // As it is now: the node may have come since the snapshot was taken.
        let up = {
            let state = ctx.cluster.read();
            state.claims.get(name).and_then(|claim| state.node_of(claim)).is_some()
        };
        let until = if up { now_ms() + HOLD_READY_MS } else { until };
        let Some(mut planned) = ctx.cluster.read().planned.get(name).cloned() else {
            continue;
        };
        {
            // What has come to its place, or went away for good, need not be listed for ever.
            let state = ctx.cluster.read();
            let here = |pod: &str| state.pods.get(pod).is_some_and(PodRecord::active);
            planned.pods.retain(|pod| here(pod) || planned.owners.contains_key(pod) && planned.until_ms > now_ms());
            planned.owners.retain(|pod, _| planned.pods.contains(pod));
        }
        let mut added = Vec::new();
        for pod in pods {
            if !planned.pods.iter().any(|key| **key == *pod.key) {
                planned.pods.push(pod.key.to_string());
            }
            if let Some(owner) = pod.owner.as_ref().filter(|_| taken.displaced.contains(&*pod.key)) {
                planned.owners.insert(pod.key.to_string(), Owner { uid: owner.to_string(), at_ms: taken.at_ms });
            }
            added.push(pod.key.to_string());
        }
        planned.until_ms = planned.until_ms.max(until);
        let patch = serde_json::json!({"metadata": {"annotations": planned.annotations()}});
        match ctx.patch_claim(name, &patch).await {
            Ok(()) => served.extend(added),
            Err(error) => tracing::warn!(claim = name, %error, "plan could not be written on the node claim"),
        }
    }
    served
}

/// Takes the pods that are planned anew off the claims they were planned on before, whose holds have run out or
/// whose node is going: at any time a pod is on one claim's plan.
async fn forget(ctx: &Context, taken: &Snapshot) -> Result<(), kube::Error> {
    let anew: BTreeSet<&str> = taken.problem.pods.iter().map(|pod| &*pod.key).collect();
    let stale: Vec<(String, Planned)> = {
        let state = ctx.cluster.read();
        let outdated = |planned: &Planned| planned.pods.iter().any(|pod| anew.contains(pod.as_str()));
        let left = |planned: &Planned| {
            let mut planned = planned.clone();
            planned.pods.retain(|pod| !anew.contains(pod.as_str()));
            planned.owners.retain(|pod, _| planned.pods.contains(pod));
            planned
        };
        let plans = state.planned.iter().filter(|(_, planned)| outdated(planned));
        plans.map(|(name, planned)| (name.clone(), left(planned))).collect()
    };
    for (name, planned) in stale {
        let patch = serde_json::json!({"metadata": {"annotations": planned.annotations()}});
        match ctx.patch_claim(&name, &patch).await {
            Err(error) if !crate::controllers::context::is_not_found(&error) => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

/// Events on pods: where they will go, or why they can't.
fn tell(ctx: &Arc<Context>, taken: &Snapshot, plan: &Plan, no_pools: bool) {
    let mut notes = Vec::new();
    for failed in &plan.unschedulable {
        let key = &taken.problem.pods[failed.pod].key;
        let reason = if no_pools { "no NodePool is ready; see their conditions" } else { &failed.reason };
        tracing::info!(pod = &**key, reason, "unschedulable");
        notes.push((key.to_string(), true, format!("no node can be bought for it: {reason}")));
    }
    notes.truncate(EVENTS);
    let planned =
        plan.new_nodes.iter().flat_map(|node| node.pods.iter().filter_map(|pod| Some((*pod, node.choices.first()?))));
    for (pod, choice) in planned.take(NOMINATED_EVENTS) {
        let note = format!("planned on a new {} in {}", choice.instance_type.name, choice.zone);
        notes.push((taken.problem.pods[pod].key.to_string(), false, note));
    }
    let ctx = Arc::clone(ctx);
    let references: Vec<_> = {
        let state = ctx.cluster.read();
        notes
            .into_iter()
            .filter_map(|(key, warning, note)| {
                let pod = state.pods.get(&key)?;
                Some((pod_reference(&pod.namespace, &pod.name, &pod.uid), warning, note))
            })
            .collect()
    };
    tokio::spawn(async move {
        for (pod, warning, note) in references {
            let reason = if warning { "FailedScheduling" } else { "Nominated" };
            ctx.event(pod, warning, reason, &note).await;
        }
    });
}

/// An event about a NodeClaim.
pub async fn claim_event(ctx: &Context, claim: &NodeClaim, warning: bool, reason: &str, note: &str) {
    ctx.event(reference(claim), warning, reason, note).await;
}

#[cfg(test)]
mod write_tests;
