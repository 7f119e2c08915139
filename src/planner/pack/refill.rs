//! Spare capacity of purchased nodes: filled with remaining demand before further nodes are purchased.

use crate::pack::min_values::min_values_still_hold;
use crate::state::demand::pattern::{Bin, add_pods};
use crate::state::plan_state::PlanState;

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
        for (item, count) in &added {
            add_pods(&mut pattern, *item, *count);
        }
        if min_values_still_hold(state, node.column, &pattern) {
            state.demand.take(&added, 1);
            state.purchased[at].pattern = pattern;
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::pack::refill::refill_purchased;
    use crate::test_support::World;
    use crate::test_support::plan_stages::{instance, purchase, purchased, remaining};

    #[test]
    fn spare_capacity_of_purchased_nodes_takes_what_remains() {
        let mut world = World::new();
        world.pods("p", 7, &json!({}), "1", "1Gi", &json!({}));
        let mut instance = instance(&world);
        let mut state = instance.state(false);
        purchase(&mut state, "a1.x4", "z-a", &[("p", 1)]);
        purchase(&mut state, "a1.x2", "z-a", &[("p", 2)]);
        let cost = state.cost();
        refill_purchased(&mut state, &[false]);
        assert_eq!(remaining(&state), "p 4", "not active");
        refill_purchased(&mut state, &[true]);
        assert_eq!(purchased(&state), ["a1.x4 in z-a: p 4", "a1.x2 in z-a: p 2"]);
        assert_eq!((remaining(&state), state.cost()), ("p 1".to_owned(), cost), "nothing is bought");
    }

    #[test]
    fn a_node_of_no_preference_level_of_a_pod_is_not_used() {
        let mut world = World::new();
        world.pods("any", 1, &json!({}), "1", "1Gi", &json!({}));
        world.pods("amd", 1, &json!({}), "1", "1Gi", &json!({"nodeSelector": {"kubernetes.io/arch": "amd64"}}));
        let mut instance = instance(&world);
        let mut state = instance.state(false);
        purchase(&mut state, "a1.x4", "z-a", &[("any", 1)]);
        refill_purchased(&mut state, &[true, true]);
        assert_eq!(remaining(&state), "amd 1");
    }
}
