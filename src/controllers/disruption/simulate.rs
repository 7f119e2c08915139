//! Runs the simulated removal of nodes on a blocking thread.

use std::collections::BTreeSet;

use crate::controllers::context::Context;
use crate::decisions::disruption::simulate::Outcome;
use crate::model::time::UnixMillis;
use crate::state::instance_types::{InstanceTypes, ReadyPool};
use crate::state::snapshot::SnapshotRequest;
use crate::sync::heartbeat;
use crate::sync::lock;

/// Simulates the removal of the nodes of the claims `without`. `None` when the planner panicked.
pub async fn simulate(
    ctx: &Context,
    pools: &[ReadyPool],
    types: &InstanceTypes,
    without: &BTreeSet<String>,
    now: UnixMillis,
) -> Option<Outcome> {
    let mut removal = {
        let request = SnapshotRequest { pools, settings: &ctx.settings.plan, without, now };
        ctx.derived.removal(&ctx.cluster.read(), types, request)
    };
    {
        let quarantine = lock(&ctx.quarantine);
        removal.leave_out(|class| quarantine.cause(class, now).is_some());
    }
    let outcome = tokio::task::spawn_blocking(move || removal.simulate()).await;
    heartbeat::progress();
    outcome.inspect_err(|error| tracing::error!(%error, "planner panicked in a simulation")).ok()
}
