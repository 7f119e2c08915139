//! Spare capacity of purchased nodes: filled with remaining demand before further nodes are purchased.

use crate::planner::pack::min_values::min_values_still_hold;
use crate::planner::state::demand::{Bin, add_pods};
use crate::planner::state::plan_state::PlanState;

/// First fit over purchased nodes, in their order, each filled greedily at the reference prices. `active` is by column pool; a pod
/// may join a node of any of its preference levels.
pub(crate) fn refill_purchased(state: &mut PlanState<'_, '_>, active: &[bool]) {
    for at in 0..state.purchased.len() {
        let node = state.purchased[at].clone();
        let in_levels =
            |levels: &[usize]| levels.iter().any(|id| state.column_sets.sets[*id].bits.contains(node.column));
        let pools = state.demand.column_pools.iter().zip(active);
        let accepts: Vec<bool> = pools.map(|(pool, active)| *active && in_levels(&pool.levels)).collect();
        let buckets = state.demand.open_buckets(|pool| accepts[pool]);
        if buckets.is_empty() {
            continue;
        }
        let host = state.daemon_host(node.column).clone();
        let bin = Bin { room: state.column_sets.room(node.column), host: &host, pattern: &node.pattern };
        let added = state.demand.fill(&bin, &state.reference_prices, &buckets, None, &[], 0);
        if added.is_empty() {
            continue;
        }
        let mut pattern = node.pattern.clone();
        added.iter().for_each(|(item, count)| add_pods(&mut pattern, *item, *count));
        if min_values_still_hold(state, node.column, &pattern) {
            state.demand.take(&added, 1);
            state.purchased[at].pattern = pattern;
        }
    }
}
