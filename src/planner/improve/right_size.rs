//! Right-sizing: each purchased node becomes the cheapest column that holds its pattern.

use crate::planner::columns::bitset::Bits;
use crate::planner::columns::dims::fits;
use crate::planner::pack::min_values::min_values_hold;
use crate::planner::pack::substitutes::{common_columns, is_compatible, load};
use crate::planner::state::plan_state::{PlanState, PurchasedNode};

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
        .by_price_for(&load)
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
