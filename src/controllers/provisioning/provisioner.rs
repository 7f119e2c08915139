//! Provisioning loop: waits for the end of a burst, plans, writes the plan.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::clock;
use crate::controllers::context::Context;
use crate::controllers::provisioning::plan_writer::PlanWriter;
use crate::controllers::provisioning::pod_events::emit_plan_events;
use crate::controllers::run_loop::{Pace, RunLoop};
use crate::decisions::provisioning::batch_window::closes_at;
use crate::decisions::provisioning::pod_queue::PodQueue;
use crate::planner::output::plan::Plan;
use crate::planner::plan;
use crate::state::snapshot::{Snapshot, SnapshotRequest};

const PACE: Pace = Pace { debounce: Duration::from_millis(20), resync: Duration::from_secs(1) };

/// Runs until the process ends.
pub async fn run(ctx: Arc<Context>) {
    let mut run_loop = RunLoop::new(&ctx.cluster, PACE);
    let mut queue = PodQueue::default();
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

async fn provision(ctx: &Arc<Context>, queue: &mut PodQueue) {
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
            queue.fail_all(clock::now());
            return;
        }
    };
    ctx.metrics.plan_seconds.observe(took.as_secs_f64());
    log_plan(&snapshot, &plan, took);
    let writer = PlanWriter { ctx, pools: &pools, snapshot: &snapshot, plan: &plan };
    let served = writer.write(queue.first_seen()).await;
    let now = clock::now();
    for pod in &snapshot.problem.pods {
        if !served.contains(&*pod.key) {
            queue.fail(&pod.key, now);
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
