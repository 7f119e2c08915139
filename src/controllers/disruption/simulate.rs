//! Runs the simulated removal of nodes on a blocking thread.

use std::collections::BTreeSet;

use crate::controllers::context::Context;
use crate::controllers::provisioning::isolation::generation;
use crate::decisions::disruption::simulate::Outcome;
use crate::model::time::UnixMillis;
use crate::state::instance_types::{InstanceTypes, ReadyPool};
use crate::state::snapshot::SnapshotRequest;
use crate::sync::heartbeat;
use crate::sync::lock;

/// Simulates the removal of the nodes of the claims `without`. `None` when the planner panicked, or panics over one of these nodes.
pub async fn simulate(
    ctx: &Context,
    pools: &[ReadyPool],
    types: &InstanceTypes,
    without: &BTreeSet<String>,
    now: UnixMillis,
) -> Option<Outcome> {
    if without.iter().any(|claim| ctx.is_left_out_of_plans(claim)) {
        return None;
    }
    let mut removal = {
        let request = SnapshotRequest { pools, settings: &ctx.settings.plan, without, now };
        ctx.derived.removal(&ctx.cluster.read(), types, request)
    };
    if removal.is_of_unknown() {
        return None;
    }
    {
        let quarantine = lock(&ctx.quarantine);
        removal.leave_out(|class| quarantine.cause(class, now).is_some());
    }
    removal.leave_out_supply(&lock(&ctx.supply_quarantine), |name| generation(pools, name), now);
    let outcome = tokio::task::spawn_blocking(move || removal.simulate()).await;
    heartbeat::progress();
    outcome
        .inspect_err(|error| {
            ctx.metrics.plans_failed.inc();
            tracing::error!(%error, claims = ?without, "planner panicked in a simulation");
        })
        .ok()
}
