//! Simulated removal of nodes in the present state.

use std::collections::{BTreeMap, BTreeSet};

use crate::controllers::context::Context;
use crate::controllers::provisioning::isolation::generation;
use crate::decisions::disruption::simulate::{Obstacle, Outcome};
use crate::model::time::UnixMillis;
use crate::planner::Effort;
use crate::state::instance_types::ReadyPool;
use crate::state::snapshot::SnapshotRequest;
use crate::sync::lock;
use crate::sync::panics::catch;

/// Simulates the removal of the nodes of the claims `without`. Takes as long as the planner does. `None` when the planner panicked.
pub fn simulate(
    ctx: &Context,
    pools: &[ReadyPool],
    without: &BTreeSet<String>,
    effort: Effort,
    now: UnixMillis,
) -> Option<Outcome> {
    let left_out = without.iter().filter(|claim| ctx.is_left_out_of_plans(claim));
    let obstacles: BTreeMap<_, _> = left_out.map(|claim| (claim.clone(), Obstacle::LeftOutOfPlans)).collect();
    if !obstacles.is_empty() {
        return Some(Outcome { obstacles, ..Outcome::default() });
    }
    let mut removal = {
        let request = SnapshotRequest { pools, settings: &ctx.settings.plan, without, now };
        ctx.derived.removal(&ctx.cluster.read(), request)
    };
    {
        let quarantine = lock(&ctx.quarantine);
        removal.leave_out(|class| quarantine.cause(class, now).is_some());
    }
    removal.leave_out_supply(&lock(&ctx.supply_quarantine), |name| generation(pools, name), now);
    catch(|| removal.simulate(effort))
        .inspect_err(|error| {
            ctx.metrics.plans_failed.inc();
            tracing::error!(%error, claims = ?without, "planner panicked in a simulation");
        })
        .ok()
}
