//! Right-sizing: each purchased node becomes the cheapest column that holds its pattern.

use crate::columns::bitset::Bits;
use crate::columns::dims::fits;
use crate::pack::min_values::min_values_hold;
use crate::pack::substitutes::{common_columns, is_compatible, load};
use crate::state::plan_state::{PlanState, PurchasedNode};

/// Right-sizes the nodes purchased from index `first` on, one after another, within the limits of their NodePools. No node becomes
/// more expensive.
pub(crate) fn right_size(state: &mut PlanState<'_, '_>, first: usize) {
    // Copies are adjacent, and without limits they have the same result.
    let mut last: Option<(PurchasedNode, usize)> = None;
    for at in first..state.purchased.len() {
        if let Some((before, column)) = last.as_ref().filter(|(before, _)| *before == state.purchased[at]) {
            let pool = state.column_sets.pool(before.column);
            if !state.budgets[pool].is_limited() {
                state.purchased[at].column = *column;
                continue;
            }
        }
        let before = state.purchased[at].clone();
        state.refund(before.column);
        let column = cheaper_column(state, before.column, &before.pattern).unwrap_or(before.column);
        state.spend(column, 1);
        state.purchased[at].column = column;
        last = Some((before, column));
    }
}

/// The cheapest column that holds a pattern at a lower price than `column`.
fn cheaper_column(state: &PlanState<'_, '_>, column: usize, pattern: &[(usize, usize)]) -> Option<usize> {
    let load = load(state, pattern);
    let price = |column: usize| state.column_sets.columns[column].price;
    let mut common: Option<Bits> = None;
    state
        .column_sets
        .by_price_in(state.column_sets.pool(column), &load)
        .iter()
        .copied()
        .take_while(|c| price(*c) < price(column))
        .filter(|c| fits(&load, state.column_sets.room(*c)))
        .find(|c| {
            common.get_or_insert_with(|| common_columns(state, column, pattern)).contains(*c)
                && is_compatible(state, *c, column)
                && state.affords(*c)
                && min_values_hold(state, *c, pattern)
        })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::improve::right_size::right_size;
    use crate::test_support::World;
    use crate::test_support::plan_stages::{column, instance, purchase, purchased};

    fn world(pool: Value, spec: &Value) -> World {
        let mut world = World::with_pools(&[("default", pool)]);
        world.pods("p", 3, &json!({}), "1", "1Gi", spec);
        world
    }

    #[test]
    fn each_node_becomes_the_cheapest_column_that_holds_its_pattern() {
        let world = world(json!({}), &json!({}));
        let mut instance = instance(&world);
        let mut state = instance.state(false);
        purchase(&mut state, "r1.x16", "z-c", &[("p", 2)]);
        purchase(&mut state, "c1.x2", "z-b", &[("p", 1)]);
        right_size(&mut state, 0);
        let expected = ["a1.x2 in z-a: p 2", "c1.x2 in z-b: p 1"];
        assert_eq!(purchased(&state), expected, "an equal price is no reason to change");
    }

    #[test]
    fn nodes_before_the_first_and_constraints_of_pods_are_kept() {
        let world = world(json!({}), &json!({"nodeSelector": {"kubernetes.io/arch": "amd64"}}));
        let mut instance = instance(&world);
        let mut state = instance.state(false);
        purchase(&mut state, "m1.x16", "z-a", &[("p", 1)]);
        purchase(&mut state, "m1.x16", "z-a", &[("p", 2)]);
        right_size(&mut state, 1);
        assert_eq!(purchased(&state), ["m1.x16 in z-a: p 1", "c1.x2 in z-a: p 2"]);
    }

    #[test]
    fn the_freed_capacity_returns_to_the_budget() {
        let world = world(json!({"limits": {"cpu": "16"}}), &json!({}));
        let mut instance = instance(&world);
        let mut state = instance.state(false);
        purchase(&mut state, "a1.x16", "z-a", &[("p", 1)]);
        let next = column(&state, "a1.x8", "z-a");
        assert_eq!(state.affordable_copies(next, 9), 0);
        right_size(&mut state, 0);
        assert_eq!(state.affordable_copies(next, 9), 1, "14 CPUs are left");
    }
}
