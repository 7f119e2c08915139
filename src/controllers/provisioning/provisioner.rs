//! Provisioning loop: waits for the end of a burst, plans, writes the plan.

use std::collections::BTreeSet;
use std::mem;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use stowage_planner::{ColumnCache, Plan, plan};
use stowage_runtime::clock;
use stowage_runtime::sync::lock;
use stowage_runtime::sync::panics::catch;
use tracing::Instrument;

use crate::controllers::context::Context;
use crate::controllers::provisioning::in_vain::report_in_vain;
use crate::controllers::provisioning::isolation;
use crate::controllers::provisioning::isolation::{MAX_TRIALS, Planned, Planner, isolate, take_snapshot};
use crate::controllers::provisioning::plan_writer::{Extension, PlanWriter, write_extensions};
use crate::controllers::provisioning::pod_events::emit_plan_events;
use crate::controllers::provisioning::quarantine::quarantine;
use crate::controllers::provisioning::rejections::{Rejected, serve_rejected};
use crate::controllers::provisioning::supply::{self, Trials, isolate_supply, quarantine_sources};
use crate::controllers::run_loop::{Pace, RunLoop};
use crate::decisions::last_decisions::LastPlan;
use crate::decisions::provisioning::batch_window::closes_at;
use crate::decisions::provisioning::commit::Commit;
use crate::decisions::provisioning::plan_changes::still_waits;
use crate::decisions::provisioning::pod_queue::PodQueue;
use crate::decisions::provisioning::quarantine::Cause;
use crate::decisions::provisioning::supply_quarantine::Source;
use crate::decisions::provisioning::unschedulable::UnschedulablePods;
use crate::state::pool_types::ReadyPool;
use crate::state::snapshot::Snapshot;

/// Labels of counters without labels.
const NONE: [&str; 0] = [];
const PACE: Pace = Pace { debounce: Duration::from_millis(20), resync: Duration::from_secs(1) };

/// Runs until the process ends.
pub async fn run(ctx: Arc<Context>) {
    let mut run_loop = RunLoop::new(&ctx.cluster, PACE);
    let (mut queue, mut unschedulable) = (PodQueue::default(), Unschedulable::default());
    let mut last_pass = Duration::ZERO;
    loop {
        let now = clock::now();
        if queue.has_failed() {
            let pools = ctx.ready_pools();
            queue.help(&ctx.cluster.read(), &pools, now);
        }
        let window = {
            let state = ctx.cluster.read();
            for pod in mem::take(&mut *lock(&ctx.unwritten)) {
                queue.fail(&pod, now);
            }
            let (holds, demand) = (ctx.derived.holds(&state, now), ctx.derived.demand(&state, now));
            let (mut quarantine, mut backoff) = (lock(&ctx.quarantine), lock(&ctx.purchase_backoff));
            queue.observe(&state, &holds, &demand, &mut quarantine, &mut backoff, now)
        };
        report_in_vain(&ctx, now);
        let counts = lock(&ctx.supply_quarantine).counts(now);
        for (kind, count) in Source::KINDS.into_iter().zip(counts) {
            let count = i64::try_from(count).unwrap_or(i64::MAX);
            ctx.metrics.supply_quarantined.with_label_values(&[kind]).set(count);
        }
        for cause in Cause::ALL {
            let pods = i64::try_from(queue.quarantined(cause)).unwrap_or(i64::MAX);
            ctx.metrics.pods_quarantined.with_label_values(&[cause.as_str()]).set(pods);
        }
        let window = window.filter(|_| !ctx.pause().provisioning);
        ctx.is_planning.store(window.is_some(), Ordering::Relaxed);
        match window {
            Some(window) => {
                let due = closes_at(&window, ctx.settings.batch);
                if due <= now {
                    let begun = Instant::now();
                    let commit = Commit::of(&window, ctx.settings.batch, last_pass, now);
                    provision(&ctx, &mut queue, &mut unschedulable, plan, commit).await;
                    last_pass = begun.elapsed();
                } else {
                    run_loop.next_within(due.saturating_since(now)).await;
                }
            }
            None => run_loop.next().await,
        }
    }
}

/// What was reported about pods without a node, by plan.
#[derive(Debug, Default)]
struct Unschedulable {
    others: UnschedulablePods,
    suspects: UnschedulablePods,
}

/// Plans the pods that wait, and writes the plan as far as it is committed: first most of them, then those that new nodes did not take, with what was
/// seen on these.
async fn provision(
    ctx: &Arc<Context>,
    queue: &mut PodQueue,
    unschedulable: &mut Unschedulable,
    planner: Planner,
    commit: Commit,
) {
    let pools = ctx.ready_pools();
    queue.planned_with(&ctx.cluster.read(), &pools, clock::now());
    let mut snapshot = take_snapshot(ctx, &pools);
    report_panicked(ctx, &snapshot);
    let has_suspects = leave_only(ctx, &mut snapshot, Suspects::LeftOut);
    let others = !has_suspects || !snapshot.problem.pods.is_empty();
    if others {
        let plan =
            provision_snapshot(ctx, &pools, queue, &mut unschedulable.others, planner, Arc::new(snapshot), commit)
                .await;
        if let Some(plan) = plan {
            *lock(&ctx.last_plan) = Some(Arc::new(plan));
        }
    }
    if has_suspects {
        // The nodes of the first plan count.
        let mut snapshot = take_snapshot(ctx, &pools);
        leave_only(ctx, &mut snapshot, Suspects::Only);
        snapshot.column_cache = ColumnCache::default();
        lock(&ctx.purchase_backoff).amend(&mut snapshot.problem);
        let suspects = &mut unschedulable.suspects;
        if let Some(plan) =
            provision_snapshot(ctx, &pools, queue, suspects, planner, Arc::new(snapshot), Commit::All).await
        {
            let mut last = lock(&ctx.last_plan);
            let first = last.take().filter(|_| others);
            *last = Some(Arc::new(plan.after(first.as_deref())));
        }
    }
}

/// Which pods a snapshot keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Suspects {
    LeftOut,
    Only,
}

/// Restricts the pods of a snapshot. Returns whether there were others.
fn leave_only(ctx: &Context, snapshot: &mut Snapshot, keep: Suspects) -> bool {
    let (state, backoff) = (ctx.cluster.read(), lock(&ctx.purchase_backoff));
    let all = snapshot.problem.pods.len();
    snapshot.problem.pods.retain(|pod| backoff.is_suspect(&state, &pod.key) == (keep == Suspects::Only));
    snapshot.problem.pods.len() < all
}

/// Plans the pods of a snapshot, and writes what is committed of the plan: other pods are planned again. Pods that make the planner panic, or the API server reject a NodeClaim, are left out for
/// a while, and the others are planned in the same pass. Returns a summary; `None` when no plan was made.
async fn provision_snapshot(
    ctx: &Arc<Context>,
    pools: &[ReadyPool],
    queue: &mut PodQueue,
    unschedulable: &mut UnschedulablePods,
    planner: Planner,
    snapshot: Arc<Snapshot>,
    commit: Commit,
) -> Option<LastPlan> {
    let mut last = None;
    let mut trials_left = MAX_TRIALS;
    let started = Instant::now();
    let mut planned = plan_passing(ctx, planner, &snapshot, &mut trials_left).await;
    let (mut served, mut later) = (BTreeSet::new(), BTreeSet::new());
    if let Some(Planned { snapshot, plan }) = &mut planned {
        let took = started.elapsed();
        ctx.metrics.plan_seconds.observe(took.as_secs_f64());
        ctx.metrics.scheduling_seconds.with_label_values(&["provisioner"]).observe(took.as_secs_f64());
        let gap = gap(plan);
        if let Some(bound) = plan.lower_bound {
            // The bound has rounding errors of its own.
            ctx.metrics.planned_cost.with_label_values(&NONE).inc_by(plan.cost.usd().max(0.0));
            ctx.metrics.planned_bound.with_label_values(&NONE).inc_by(bound.usd().clamp(0.0, plan.cost.usd().max(0.0)));
        }
        let problem = &snapshot.problem;
        let uncommitted = commit.apply(problem, plan, queue.first_seen());
        later.extend(uncommitted.into_iter().map(|pod| Arc::clone(&problem.pods[pod].key)));
        log_plan(snapshot, plan, &gap, later.len(), took);
        last = Some(LastPlan::of(snapshot, plan, took));
        let writer = PlanWriter { ctx, pools, snapshot, plan, of_move: None, reason: None };
        let (mut written, extensions) = writer.create(queue.first_seen()).await;
        served.append(&mut written.served);
        served.extend(extensions.iter().flat_map(|extension| extension.pods.iter().cloned()));
        write_soon(ctx, extensions).await;
        let now = clock::now();
        ctx.cluster.update(|state| {
            let decided = problem.pods.iter().map(|pod| &*pod.key).filter(|key| !later.contains(*key));
            state.record_decided(decided, now);
            state.record_planned(&served, now);
        });
        let rejected = Rejected { snapshot, plan, rejections: &written.rejected };
        served.extend(serve_rejected(ctx, planner, pools, rejected, &mut trials_left, queue.first_seen()).await);
    }
    let now = clock::now();
    {
        let (state, mut quarantine) = (ctx.cluster.read(), lock(&ctx.quarantine));
        for (index, pod) in snapshot.problem.pods.iter().enumerate() {
            if served.contains(&*pod.key) {
                quarantine.release(&pod.class);
            } else if !later.contains(&pod.key) && still_waits(&state, &snapshot, index) {
                queue.fail(&pod.key, now);
            }
        }
    }
    if let Some(Planned { snapshot, plan }) = planned {
        emit_plan_events(ctx, unschedulable, &snapshot, &plan, pools.is_empty());
        prove(ctx, plan);
    }
    last
}

/// Writes what a plan adds to the plans of existing NodeClaims, which takes long while the API server is busy. The next plan does not wait for it, unless it
/// takes longer than several plans.
async fn write_soon(ctx: &Arc<Context>, extensions: Vec<Extension>) {
    if extensions.is_empty() {
        return;
    }
    let Ok(slot) = Arc::clone(&ctx.extension_slots).try_acquire_owned() else {
        write_extensions(ctx, extensions).await;
        return;
    };
    let ctx = Arc::clone(ctx);
    let write = async move {
        write_extensions(&ctx, extensions).await;
        drop(slot);
    };
    tokio::spawn(write.in_current_span());
}

/// Proves the lower bound of a written plan, and logs it if it is raised. Nobody waits for it; not while that of an earlier plan is proven.
fn prove(ctx: &Context, mut plan: Plan) {
    let slot = Arc::clone(&ctx.proof_slots).try_acquire_owned();
    let Some(slot) = slot.ok().filter(|_| plan.proof.is_some()) else { return };
    tokio::task::spawn_blocking(move || {
        let (begun, known) = (Instant::now(), plan.lower_bound);
        match catch(|| plan.prove()) {
            Ok(()) if plan.lower_bound > known => {
                let prove_ms = u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX);
                let usd_per_hour = plan.cost.usd();
                tracing::info!(usd_per_hour, gap = gap(&plan), optimal = plan.optimal, prove_ms, "proved lower bound");
            }
            Ok(()) => {}
            Err(panic) => tracing::error!(%panic, "the proof of a lower bound panicked"),
        }
        drop(slot);
    });
}

/// Plans all pods but those that the planner panics over, which are quarantined, and so are NodePools and nodes. `None` when it panics whatever it plans.
async fn plan_passing(
    ctx: &Arc<Context>,
    planner: Planner,
    snapshot: &Arc<Snapshot>,
    trials_left: &mut usize,
) -> Option<Planned> {
    if let Some(plan) = isolation::plan(planner, snapshot).await {
        lock(&ctx.supply_quarantine).plan_passed(snapshot.taken_at);
        return Some(Planned { snapshot: Arc::clone(snapshot), plan });
    }
    ctx.metrics.plans_failed.inc();
    let mut supply_trials_left = supply::MAX_TRIALS;
    let mut snapshot = Arc::clone(snapshot);
    if let Some(rest) = isolate_supply(ctx, planner, &snapshot, Trials::Probe, &mut supply_trials_left).await {
        snapshot = Arc::new(rest);
        if let Some(plan) = isolation::plan(planner, &snapshot).await {
            return Some(Planned { snapshot, plan });
        }
    }
    let isolated = isolate(ctx, planner, &snapshot, trials_left, None).await.unwrap_or_default();
    if isolated.rest.is_none() && isolated.culprits.is_empty() {
        // Pods of several namespaces fail, each without the others.
        let rest = isolate_supply(ctx, planner, &snapshot, Trials::Pods, &mut supply_trials_left).await;
        let snapshot = Arc::new(rest?);
        return isolation::plan(planner, &snapshot).await.map(|plan| Planned { snapshot, plan });
    }
    quarantine(ctx, &isolated.culprits, Cause::PlannerPanic, "the planner panics over it, which is a defect");
    isolated.rest
}

/// Reports the NodePools and nodes that the snapshot left out because its parser panicked.
fn report_panicked(ctx: &Arc<Context>, snapshot: &Snapshot) {
    let pools = snapshot.panicked_pools.iter().map(|name| Source::NodePool(Arc::from(name.as_str())));
    let nodes = snapshot.panicked_nodes.iter().map(|name| Source::Node(Arc::from(name.as_str())));
    let mut sources: Vec<Source> = pools.chain(nodes).collect();
    if !sources.is_empty() {
        let quarantine = lock(&ctx.supply_quarantine);
        sources.retain(|source| !quarantine.is_left_out(source, snapshot.taken_at));
    }
    quarantine_sources(ctx, sources.into_iter(), false);
}

/// What the cost of a plan is above its lower bound.
fn gap(plan: &Plan) -> String {
    let gap = plan.lower_bound.filter(|bound| bound.0 > 0).map(|bound| {
        let over = plan.cost.0.saturating_sub(bound.0);
        format!("{}.{}%", over * 100 / bound.0, over * 1_000 / bound.0 % 10)
    });
    gap.unwrap_or_else(|| "unknown".into())
}

/// What is committed of a plan with this gap, and how many pods are planned again.
fn log_plan(snapshot: &Snapshot, plan: &Plan, gap: &str, later: usize, took: Duration) {
    let on_existing: usize = plan.placements.iter().map(|placement| placement.pods.len()).sum();
    tracing::info!(
        pods = plan.pods().count(),
        nodes = plan.new_nodes.len(),
        on_existing,
        unschedulable = plan.unschedulable.len(),
        later,
        usd_per_hour = plan.cost.usd(),
        gap,
        optimal = plan.optimal,
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
mod tests;
#[cfg(test)]
mod write_tests;
