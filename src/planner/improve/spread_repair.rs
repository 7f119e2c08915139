//! Repair of topology spread: where limits leave pods of a group unplaced in one domain, pods placed in other domains are removed until
//! the skew holds again, and pods whose required affinity depends on them are removed too.

use crate::state::plan_state::PlanState;

/// Removes placed pods until every rule between domains holds for the pods that are still placed. Without unplaced pods that are
/// pinned to a domain, nothing changes. Requires that merged items are split.
pub(crate) fn repair_spread(state: &mut PlanState<'_, '_>) {
    let topology = state.topology;
    let mut planned = topology.planned();
    let mut any_unplaced = false;
    for item in &state.demand.items {
        if item.remaining > 0 {
            for (key, domain) in &state.demand.column_pools[item.column_pool].pins {
                any_unplaced = true;
                topology.unplan(&mut planned, item.group, *key, *domain, item.remaining);
            }
        }
    }
    if !any_unplaced {
        return;
    }
    let mut placed: Vec<usize> = vec![0; state.demand.items.len()];
    let purchased = state.purchased.iter().map(|node| &node.pattern);
    for (item, count) in purchased.chain(state.placements.iter().map(|(_, pattern)| pattern)).flatten() {
        placed[*item] += count;
    }
    loop {
        let placed_in = |group: usize, key: usize, domain: usize| -> usize {
            (0..placed.len()).filter(|item| is_in(state, *item, group, key, domain)).map(|item| placed[item]).sum()
        };
        let Some((group, key, domain, mut excess)) = topology.overflow(&planned, &placed_in) else {
            break;
        };
        for (item, placed) in placed.iter_mut().enumerate() {
            let count = excess.min(*placed);
            if count == 0 || !is_in(state, item, group, key, domain) {
                continue;
            }
            remove_placed(state, item, count);
            *placed -= count;
            excess -= count;
            for (key, domain) in &state.demand.column_pools[state.demand.items[item].column_pool].pins {
                topology.unplan(&mut planned, group, *key, *domain, count);
            }
        }
    }
}

/// Whether an item is of a group and pinned to a domain of a key.
fn is_in(state: &PlanState<'_, '_>, item: usize, group: usize, key: usize, domain: usize) -> bool {
    let item = &state.demand.items[item];
    item.group == group && state.demand.column_pools[item.column_pool].pins.contains(&(key, domain))
}

/// Removes pods of an item from nodes, new nodes before existing ones, the last first. Nodes that become empty are not purchased.
fn remove_placed(state: &mut PlanState<'_, '_>, item: usize, mut count: usize) {
    let PlanState { purchased, placements, demand, .. } = state;
    let new = purchased.iter_mut().rev().map(|node| &mut node.pattern);
    for pattern in new.chain(placements.iter_mut().rev().map(|(_, pattern)| pattern)) {
        if let Some((_, have)) = pattern.iter_mut().find(|(have, _)| *have == item) {
            let removed = count.min(*have);
            *have -= removed;
            count -= removed;
            demand.restore(&[(item, removed)]);
        }
        pattern.retain(|(_, n)| *n > 0);
        if count == 0 {
            break;
        }
    }
    placements.retain(|(_, pattern)| !pattern.is_empty());
    let mut emptied = Vec::new();
    purchased.retain(|node| {
        if node.pattern.is_empty() {
            emptied.push(node.column);
        }
        !node.pattern.is_empty()
    });
    for column in emptied {
        state.refund(column);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::improve::spread_repair::repair_spread;
    use crate::state::plan_state::{PlanState, PurchasedNode};
    use crate::test_support::plan_stages::{column, instance};
    use crate::test_support::{World, ZONE, spread};

    /// Purchases a node in each zone for the given number of the spread pods assigned there.
    fn purchase_in(state: &mut PlanState<'_, '_>, zones: &[(&str, usize)]) {
        for (zone, count) in zones {
            let column = column(state, "a1.x4", zone);
            let in_zone = |item: &usize| {
                let pool = &state.demand.column_pools[state.demand.items[*item].column_pool];
                state.column_sets.sets[pool.levels[0]].bits.contains(column)
            };
            let item = (0..state.demand.items.len()).find(in_zone).unwrap();
            state.purchase(PurchasedNode { column, pattern: vec![(item, *count)] }, 1);
        }
    }

    fn counts(state: &PlanState<'_, '_>) -> Vec<(String, usize)> {
        let zone = |node: &PurchasedNode| state.column_sets.columns[node.column].zone.to_string();
        let pods = |node: &PurchasedNode| node.pattern.iter().map(|(_, count)| count).sum();
        state.purchased.iter().map(|node| (zone(node), pods(node))).collect()
    }

    /// Six pods spread over three zones, of which the given numbers are placed. Returns the placed pods after the repair.
    fn repaired(zones: &[(&str, usize)]) -> (Vec<(String, usize)>, usize) {
        let labels = json!({"app": "p"});
        let mut world = World::with_pools(&[("default", json!({"limits": {"cpu": "100"}}))]);
        world.pods("p", 6, &labels, "1", "1Gi", &spread(ZONE, &labels, &json!({})));
        let mut instance = instance(&world);
        let mut state = instance.state(false);
        purchase_in(&mut state, zones);
        state.split_merged();
        repair_spread(&mut state);
        let unspent = state.affordable_copies(column(&state, "a1.x4", "z-a"), 100);
        assert_eq!(unspent, 25 - state.purchased.len(), "nodes that became empty are not paid for");
        (counts(&state), state.demand.remaining())
    }

    fn zones(expected: &[(&str, usize)]) -> Vec<(String, usize)> {
        expected.iter().map(|(zone, count)| ((*zone).to_owned(), *count)).collect()
    }

    #[test]
    fn pods_beyond_the_skew_are_removed_after_a_shortage_in_one_domain() {
        assert_eq!(repaired(&[("z-a", 2), ("z-b", 2)]), (zones(&[("z-a", 1), ("z-b", 1)]), 4));
    }

    #[test]
    fn a_skew_within_the_constraint_is_left() {
        let placed = [("z-a", 2), ("z-b", 2), ("z-c", 1)];
        assert_eq!(repaired(&placed), (zones(&placed), 1));
        let whole = [("z-a", 2), ("z-b", 2), ("z-c", 2)];
        assert_eq!(repaired(&whole), (zones(&whole), 0));
    }
}
