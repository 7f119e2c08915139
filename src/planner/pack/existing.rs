//! Existing nodes: filled before anything is purchased, because their capacity is paid for.

use std::collections::HashMap;

use crate::planner::columns::dims::PODS;
use crate::planner::state::demand::Bin;
use crate::planner::state::plan_state::PlanState;

/// First fit over existing nodes, in their order, each filled greedily at the reference prices. `active` is by column pool.
pub(crate) fn fill_existing(state: &mut PlanState<'_, '_>, active: &[bool]) {
    // Admission by column pool and kind of node: equal for all nodes of a kind.
    let mut admitted: HashMap<(usize, usize), bool> = HashMap::new();
    for at in 0..state.existing.len() {
        if state.existing[at].free[PODS] <= 0 || state.demand.is_empty() {
            continue;
        }
        let node = &state.existing[at];
        let accepts: Vec<bool> = (0..state.demand.column_pools.len())
            .map(|pool| {
                active[pool]
                    && *admitted.entry((pool, node.kind)).or_insert_with(|| node.state.admits(state.class(pool)))
                    && state.demand.column_pools[pool]
                        .pins
                        .iter()
                        .all(|(key, domain)| state.topology.in_domain(node, *key, *domain))
            })
            .collect();
        let buckets = state.demand.open_buckets(|pool| accepts[pool]);
        if buckets.is_empty() {
            continue;
        }
        let bin = Bin { room: &node.free, host: &node.host, pattern: &[] };
        let pattern = state.demand.fill(&bin, &state.reference_prices, &buckets, None, &[], 0);
        if pattern.is_empty() {
            continue;
        }
        state.demand.take(&pattern, 1);
        let node = &mut state.existing[at];
        for (item, count) in &pattern {
            for _ in 0..*count {
                node.host.add(state.demand.host(*item));
            }
            for (free, need) in node.free.iter_mut().zip(state.demand.need(*item)) {
                *free -= need * i64::try_from(*count).unwrap_or(i64::MAX);
            }
        }
        state.placements.push((at, pattern));
    }
}
