//! Simulated removal of nodes: what it depends on, and plans that fail.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use stowage_model::time::UnixMillis;
use stowage_model::units::MicroUsd;
use stowage_planner::Effort;
use stowage_runtime::sync::lock;
use stowage_runtime::sync::panics::catch;

use crate::controllers::context::Context;
use crate::controllers::disruption::run::choose_empty;
use crate::controllers::provisioning::isolation::generation;
use crate::decisions::disruption::moves::Move;
use crate::decisions::disruption::outdated::next_to_replace;
use crate::decisions::disruption::simulated_removal::{SimulatedRemoval, Simulator, offers_all_pools};
use crate::state::pool_types::ReadyPool;
use crate::state::snapshot::SnapshotRequest;

/// Effort of the plans, which are only compared with each other.
const EFFORT: Effort = Effort::Quick;
/// Empty nodes that are removed within this time are not targets.
const SOON: Duration = Duration::from_secs(10);

/// The cluster now, from which the nodes of these claims can be removed. Reads the state; plans nothing.
pub fn simulator<'c>(
    ctx: &Context,
    pools: &[ReadyPool],
    claims: impl IntoIterator<Item = &'c str>,
    now: UnixMillis,
) -> Simulator {
    let mut simulator = {
        let request = SnapshotRequest { pools, settings: &ctx.settings.plan, now };
        ctx.derived.simulator(&ctx.cluster.read(), request, claims)
    };
    if ctx.settings.spot_to_spot {
        simulator.allow_spot_to_spot();
    }
    // These nodes are replaced next: the pods would move again.
    let outdated = {
        let state = ctx.cluster.read();
        next_to_replace(&state, &ctx.derived.holds(&state, now), now)
    };
    simulator.avoid(&outdated);
    // An empty node is not free of charge: it is removed if no pod comes.
    simulator.close(&choose_empty(ctx, pools, now + SOON).into_iter().collect());
    {
        let quarantine = lock(&ctx.quarantine);
        simulator.leave_out(|class| quarantine.cause(class, now).is_some());
    }
    simulator.leave_out_supply(&lock(&ctx.supply_quarantine), |name| generation(pools, name), now);
    simulator
}

/// Plans the present demand ([`Simulator::leave_out_unplaced`]). `None` when the planner panicked.
pub fn plan_present(ctx: &Context, simulator: &mut Simulator) -> Option<()> {
    caught(ctx, &BTreeSet::new(), || simulator.leave_out_unplaced(EFFORT))
}

/// Simulates the removal of the nodes of the claims `without`. Takes as long as the planner does. `None` when the planner panicked.
pub fn simulate(ctx: &Context, simulator: &Simulator, without: &BTreeSet<String>) -> Option<SimulatedRemoval> {
    caught(ctx, without, || simulator.simulate(without, EFFORT))
}

/// Plans the removal of the nodes of these claims, as moves. Takes as long as the planner does. `None` when the planner panicked.
pub fn plan_moves(
    ctx: &Context,
    simulator: &Simulator,
    without: &BTreeSet<String>,
    effort: Effort,
) -> Option<(SimulatedRemoval, Vec<Move>)> {
    caught(ctx, without, || simulator.moves(without, effort))
}

/// A lower bound on the price of new nodes for all pods of the nodes of NodePools, per hour. Takes as long as the LP does. `None` without one, or
/// when the planner panicked, or while the NodePool of a node is not ready.
pub fn least_cost(ctx: &Context, pools: &[ReadyPool], now: UnixMillis) -> Option<MicroUsd> {
    let claims: Vec<String> = {
        let state = ctx.cluster.read();
        offers_all_pools(&state, pools).then(|| state.claims.keys().cloned().collect())?
    };
    let simulator = simulator(ctx, pools, claims.iter().map(String::as_str), now);
    caught(ctx, &BTreeSet::new(), || simulator.least_cost()).flatten()
}

fn caught<T>(ctx: &Context, without: &BTreeSet<String>, plan: impl FnOnce() -> T) -> Option<T> {
    let begin = Instant::now();
    let result = catch(plan).inspect_err(|error| {
        ctx.metrics.plans_failed.inc();
        tracing::error!(%error, claims = ?without, "planner panicked in a simulation");
    });
    ctx.metrics.scheduling_seconds.with_label_values(&["disruption"]).observe(begin.elapsed().as_secs_f64());
    result.ok()
}
