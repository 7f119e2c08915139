//! Chooses the drifted nodes to replace: simulates the removal of those with pods.

use crate::clock;
use crate::controllers::context::Context;
use crate::controllers::disruption::blocked::report_blocked;
use crate::controllers::disruption::simulate::simulate;
use crate::decisions::disruption::drift_replacement::{DriftAttempt, DriftReplacement};
use crate::state::instance_types::{InstanceTypes, ReadyPool};

/// Claims whose nodes are to be replaced now, within the budgets of their pools.
pub async fn choose(
    replacement: &mut DriftReplacement,
    ctx: &Context,
    pools: &[ReadyPool],
    types: &InstanceTypes,
) -> Vec<String> {
    let now = clock::now();
    let mut pass = {
        let state = ctx.cluster.read();
        replacement.begin(&state, &ctx.derived.holds(&state, now), now)
    };
    let mut blocked = std::mem::take(&mut pass.blocked);
    for node in std::mem::take(&mut pass.order) {
        match pass.attempt(&node) {
            DriftAttempt::OverBudget => {}
            DriftAttempt::EndPass => break,
            DriftAttempt::Accept => pass.accept(&node),
            DriftAttempt::Simulate(without) => {
                if simulate(ctx, pools, types, &without, now).await.is_some_and(|outcome| outcome.complete) {
                    pass.accept(&node);
                } else {
                    replacement.blocked(&node.claim, now);
                    let why = "its pods fit on no other node, and no node can be launched for them";
                    blocked.push((node.claim.clone(), why.to_owned()));
                }
            }
        }
    }
    report_blocked(ctx, "drifted", &blocked).await;
    pass.finish()
}
