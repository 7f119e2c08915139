//! Provisioning loop: waits for the end of a burst, plans, writes the plan.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::clock;
use crate::controllers::context::Context;
use crate::controllers::provisioning::batch_window::{BatchWindow, closes_at};
use crate::controllers::provisioning::plan_writer::PlanWriter;
use crate::controllers::provisioning::pod_events::emit_plan_events;
use crate::controllers::run_loop::{Pace, RunLoop};
use crate::decisions::demand::demand;
use crate::model::time::UnixMillis;
use crate::planner::output::plan::Plan;
use crate::planner::plan;
use crate::state::plan_record::Holds;
use crate::state::snapshot::{Snapshot, SnapshotRequest};
use crate::state::{ClusterState, Scheduling};

const PACE: Pace = Pace { debounce: Duration::from_millis(20), resync: Duration::from_secs(1) };
/// A pod that a plan left without a node is planned again after this time.
const RETRY_AFTER: Duration = Duration::from_secs(10);

/// Pods that need a node.
#[derive(Debug, Default)]
struct Queue {
    /// When each pod was first observed to need a node.
    first_seen: BTreeMap<String, UnixMillis>,
    /// When a plan last left a pod without a node.
    failed: HashMap<String, UnixMillis>,
}

impl Queue {
    /// Updates the queue with the present demand. Returns the batch of pods to plan; `None` when there are none.
    fn observe(&mut self, state: &ClusterState, holds: &Holds, now: UnixMillis) -> Option<BatchWindow> {
        let demand = demand(state, holds, &BTreeSet::new());
        let demand: BTreeSet<&String> = demand.pending.iter().chain(&demand.displaced).collect();
        self.failed.retain(|key, at| demand.contains(key) && !at.is_older_than(RETRY_AFTER, now));
        self.first_seen.retain(|key, _| demand.contains(key));
        for key in demand {
            if !self.failed.contains_key(key) {
                self.first_seen.entry(key.clone()).or_insert(now);
            }
        }
        let batch = || self.first_seen.iter().filter(|(key, _)| !self.failed.contains_key(*key)).map(|(_, at)| *at);
        let unbound = state.unbound.iter().filter_map(|key| state.pods.get(key));
        let unattempted = unbound
            .filter(|pod| pod.scheduling == Scheduling::Unattempted && !pod.daemon && pod.deleted_at.is_none())
            .count();
        let (opened, latest) = (batch().min()?, batch().max()?);
        Some(BatchWindow { opened, latest, last_created: state.last_pod_created, unattempted })
    }
}

/// Runs until the process ends.
pub async fn run(ctx: Arc<Context>) {
    let mut run_loop = RunLoop::new(&ctx.cluster, PACE);
    let mut queue = Queue::default();
    loop {
        let now = clock::now();
        let window = {
            let state = ctx.cluster.read();
            queue.observe(&state, &ctx.derived.holds(&state, now), now)
        };
        match window {
            Some(window) => {
                let due = closes_at(&window, ctx.settings.batch_idle, ctx.settings.batch_max);
                if due <= now {
                    provision(&ctx, &mut queue).await;
                } else {
                    run_loop.next_within(due.saturating_since(now)).await;
                }
            }
            None => run_loop.next().await,
        }
    }
}

async fn provision(ctx: &Arc<Context>, queue: &mut Queue) {
    let pools = ctx.ready_pools();
    let snapshot = {
        let (settings, without) = (&ctx.settings.plan, BTreeSet::new());
        let request = SnapshotRequest { pools: &pools, settings, without: &without, now: clock::now() };
        ctx.derived.snapshot(&ctx.cluster.read(), request)
    };
    let planned = tokio::task::spawn_blocking(move || {
        let started = Instant::now();
        let plan = plan(&snapshot.problem, &snapshot.column_cache);
        (snapshot, plan, started.elapsed())
    })
    .await;
    let (snapshot, plan, took) = match planned {
        Ok(planned) => planned,
        Err(error) => {
            // A panic in the planner is a defect, but must not end the service: the pods are planned again later.
            tracing::error!(%error, "planner panicked");
            ctx.metrics.plans_failed.inc();
            for key in queue.first_seen.keys() {
                queue.failed.insert(key.clone(), clock::now());
            }
            return;
        }
    };
    ctx.metrics.plan_seconds.observe(took.as_secs_f64());
    log_plan(&snapshot, &plan, took);
    let writer = PlanWriter { ctx, pools: &pools, snapshot: &snapshot, plan: &plan };
    let served = writer.write(&queue.first_seen).await;
    let now = clock::now();
    for pod in &snapshot.problem.pods {
        if !served.contains(&*pod.key) {
            queue.failed.insert(pod.key.to_string(), now);
        }
    }
    emit_plan_events(ctx, &snapshot, &plan, pools.is_empty());
}

fn log_plan(snapshot: &Snapshot, plan: &Plan, took: Duration) {
    let on_existing: usize = plan.placements.iter().map(|placement| placement.pods.len()).sum();
    let gap = plan.lower_bound.filter(|bound| bound.0 > 0).map(|bound| {
        let over = plan.cost.0.saturating_sub(bound.0);
        format!("{}.{}%", over * 100 / bound.0, over * 1_000 / bound.0 % 10)
    });
    tracing::info!(
        pods = snapshot.problem.pods.len(),
        nodes = plan.new_nodes.len(),
        on_existing,
        unschedulable = plan.unschedulable.len(),
        usd_per_hour = plan.cost.usd(),
        gap = gap.unwrap_or_else(|| "unknown".into()),
        solve_ms = u64::try_from(took.as_millis()).unwrap_or(u64::MAX),
        "planned"
    );
    for node in &plan.new_nodes {
        if let Some(choice) = node.choices.first() {
            tracing::info!(
                node_pool = &*snapshot.problem.pools[node.pool].name,
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

#[cfg(test)]
mod write_tests;
