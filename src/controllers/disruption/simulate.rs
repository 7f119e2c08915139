//! What would become of pods if their nodes went away.

use std::collections::BTreeSet;
use std::sync::Arc;

use kube::ResourceExt;

use crate::controllers::context::Context;
use crate::model::offering::CapacityType;
use crate::state::PodRecord;
use crate::state::snapshot;
use crate::state::snapshot::{ReadyPool, Types};

/// A plan for the pods of nodes that are imagined away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Each of those pods has a place: on an initialized node of ours, where holds can keep it, or on a new node.
    pub whole: bool,
    /// How many new nodes that takes.
    pub new_nodes: usize,
    /// Whether one of the nodes that go is a spot instance.
    pub any_spot: bool,
    /// Price of what goes less that of the new nodes, micro-USD per hour.
    pub saves: i64,
}

/// Plans for the cluster without the nodes of the claims `without`. `None` where the planner failed.
pub async fn imagine(
    ctx: &Arc<Context>,
    pools: &[ReadyPool],
    types: &Types,
    without: &BTreeSet<String>,
    now_ms: i64,
) -> Option<Outcome> {
    let (snapshot, moving, any_spot, gone) = {
        let state = ctx.cluster.read();
        let claims = || without.iter().filter_map(|name| state.claims.get(name));
        let mut moving = BTreeSet::new();
        for node in claims().filter_map(|claim| state.node_of(claim)) {
            moving.extend(state.pods_on(&node.name_any()).map(PodRecord::key));
        }
        let any_spot = claims().any(|claim| {
            snapshot::offering_of(claim).is_some_and(|(_, _, capacity_type)| capacity_type == CapacityType::Spot)
        });
        let gone: i64 = claims().map(|claim| types.price(claim).0).sum();
        (snapshot::take(&state, pools, &ctx.settings.plan, without, now_ms), moving, any_spot, gone)
    };
    let planned = tokio::task::spawn_blocking(move || {
        let plan = crate::planner::plan(&snapshot.problem, &snapshot.column_cache);
        // What else waits or moves is no reason to keep these nodes.
        let moves = |pod: &usize| moving.contains(&*snapshot.problem.pods[*pod].key);
        // Only places on nodes of ours that are up: the holds that keep them live on NodeClaims.
        let kept = plan.placements.iter().filter(|placement| placement.pods.iter().any(moves)).all(|placement| {
            snapshot.problem.nodes[placement.node].initialized && snapshot.node_refs[placement.node].claim.is_some()
        });
        Outcome {
            whole: kept && !plan.unschedulable.iter().any(|left_out| moves(&left_out.pod)),
            new_nodes: plan.new_nodes.len(),
            any_spot,
            saves: gone - plan.cost.0,
        }
    });
    planned.await.inspect_err(|error| tracing::error!(%error, "the planner failed")).ok()
}
