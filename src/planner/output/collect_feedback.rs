//! What a finished solve reports to the next: capacity found per domain, domains that turned out to count, displaced priority.

use std::cmp::Reverse;

use crate::columns::bitset::Bits;
use crate::columns::dims::fits;
use crate::groups::existing_nodes::free_on;
use crate::groups::topology::domains::Room;
use crate::pack::reserved::reservable;
use crate::state::feedback::Feedback;
use crate::state::plan_state::PlanState;
use crate::state::pool_budget::Budget;

/// Feedback of a finished plan; `room` is that of [`placed_per_place`].
pub(crate) fn feedback(state: &mut PlanState<'_, '_>, room: Room, by_priority: bool) -> Feedback {
    let displaced_priority = if by_priority { None } else { displaced_priority(state) };
    let mut columns = Bits::empty(state.column_sets.columns.len());
    state.purchased.iter().for_each(|node| columns.insert(node.column));
    Feedback { occupied_domains: state.topology.overlooked(&columns), room, displaced_priority }
}

/// How many pods of a group each of its places took, for the places with unplaced pods. Requires that merged items are split.
pub(crate) fn placed_per_place(state: &PlanState<'_, '_>) -> Room {
    let place = |item: usize| {
        let item = &state.demand.items[item];
        (item.group, state.demand.column_pools[item.column_pool].pins.clone())
    };
    let unplaced = (0..state.demand.items.len()).filter(|item| state.demand.items[*item].remaining > 0);
    let mut out: Room = unplaced.map(place).filter(|(_, pins)| !pins.is_empty()).map(|at| (at, 0)).collect();
    if out.is_empty() {
        return out;
    }
    let purchased = state.purchased.iter().map(|node| &node.pattern);
    for (item, count) in purchased.chain(state.placements.iter().map(|(_, pattern)| pattern)).flatten() {
        if let Some(room) = out.get_mut(&place(*item)) {
            *room += count;
        }
    }
    out
}

/// The highest priority of the unplaced pods that could have been placed first: their capacity went to other pods. Pods of the
/// lowest priority displace nobody.
fn displaced_priority(state: &mut PlanState<'_, '_>) -> Option<i32> {
    let demand = &state.demand;
    let priority = |item: &usize| demand.groups[demand.items[*item].group].class.priority;
    let lowest = demand.groups.iter().map(|group| group.class.priority).min();
    let mut unplaced: Vec<usize> = (0..demand.items.len()).filter(|item| demand.items[*item].remaining > 0).collect();
    unplaced.retain(|item| Some(priority(item)) > lowest);
    unplaced.sort_by_key(|item| Reverse(priority(item)));
    // Items of one column pool and group request the same: one is enough.
    unplaced.dedup_by_key(|item| (demand.items[*item].column_pool, demand.items[*item].group));
    let unplaced: Vec<(usize, i32)> = unplaced.into_iter().map(|item| (item, priority(&item))).collect();
    unplaced.into_iter().find(|(item, _)| fits_empty_plan(state, *item)).map(|(_, priority)| priority)
}

/// Whether one pod of an item could be placed if no other pod were planned.
fn fits_empty_plan(state: &mut PlanState<'_, '_>, item: usize) -> bool {
    let id = state.demand.items[item].column_pool;
    let reservable = reservable(state, id);
    let column_sets = &*state.column_sets;
    let need = state.demand.need(item);
    let pool = &state.demand.column_pools[id];
    let budgets: Vec<Budget> = column_sets.problem.pools.iter().map(Budget::of).collect();
    let affordable = |column: usize| {
        fits(need, column_sets.room(column)) && budgets[column_sets.pool(column)].allows(column_sets.charge(column))
    };
    let required = pool.levels.last().map(|id| &column_sets.sets[*id].bits);
    let is_reserved = |column: usize| column_sets.columns[column].left.is_some_and(|left| left > 0);
    required.is_some_and(|bits| bits.iter().any(affordable))
        || (column_sets.has_counted && reservable.iter().any(|column| is_reserved(column) && affordable(column)))
        || state.existing.iter().any(|node| {
            pool.pins.iter().all(|(key, domain)| state.topology.in_domain(node, *key, *domain))
                && node.state.admits(&state.demand.groups[state.demand.items[item].group].class)
                && fits(need, &free_on(column_sets, node.state))
        })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::groups::topology::domains::Room;
    use crate::output::collect_feedback::{feedback, placed_per_place};
    use crate::test_support::plan_stages::{column, instance, purchase};
    use crate::test_support::{World, ZONE, spread};

    #[test]
    fn the_highest_priority_that_would_fit_an_empty_plan_is_displaced() {
        let pool = json!({"limits": {"cpu": "4"}});
        let priority = |priority: i32| json!({"priority": priority});
        for (cpu, high, displaced) in [("1", 10, Some(10)), ("9", 10, None), ("1", 0, None)] {
            let mut world = World::with_pools(&[("default", pool.clone())]);
            world.pods("high", 1, &json!({}), cpu, "1Gi", &priority(high));
            world.pods("low", 4, &json!({}), "1", "2Gi", &priority(0));
            let mut instance = instance(&world);
            let mut state = instance.state(false);
            purchase(&mut state, "a1.x4", "z-a", &[("low", 4)]);
            state.split_merged();
            let found = feedback(&mut state, Room::new(), false);
            assert_eq!(found.displaced_priority, displaced, "{cpu} CPUs at priority {high}");
            assert_eq!(
                feedback(&mut state, Room::new(), true).displaced_priority,
                None,
                "already placed in this order"
            );
        }
    }

    #[test]
    fn placed_pods_are_counted_per_domain_only_where_pods_of_the_group_are_unplaced() {
        let labels = json!({"app": "p"});
        let counted = |placed: usize| -> Vec<usize> {
            let mut world = World::new();
            let constraint: Value = spread(ZONE, &labels, &json!({"nodeAffinityPolicy": "Honor"}));
            world.pods("p", 6, &labels, "1", "1Gi", &constraint);
            let mut instance = instance(&world);
            let mut state = instance.state(false);
            for zone in ["z-a", "z-b", "z-c"] {
                let column = column(&state, "a1.x4", zone);
                let in_zone = |item: &usize| {
                    let pool = &state.demand.column_pools[state.demand.items[*item].column_pool];
                    state.column_sets.sets[pool.levels[0]].bits.contains(column)
                };
                let item = (0..state.demand.items.len()).find(in_zone).unwrap();
                let node = crate::state::plan_state::PurchasedNode { column, pattern: vec![(item, placed)] };
                state.purchase(node, 1);
            }
            state.split_merged();
            placed_per_place(&state).into_values().collect()
        };
        assert_eq!(counted(1), [1, 1, 1], "two are assigned to each zone");
        assert!(counted(2).is_empty(), "all are placed");
    }
}
