//! Substitutes: the other columns that can hold the pattern of a purchased node under the same NodePool, labels and daemons.

use crate::planner::columns::bitset::Bits;
use crate::planner::columns::dims::fits;
use crate::planner::state::plan_state::PlanState;

/// Sum of the requests of a pattern, by resource.
pub(crate) fn load(state: &PlanState<'_, '_>, pattern: &[(usize, usize)]) -> Vec<i64> {
    let mut sum = vec![0; state.column_sets.dims.len()];
    for (item, count) in pattern {
        let count = i64::try_from(*count).unwrap_or(i64::MAX);
        for (total, need) in sum.iter_mut().zip(state.demand.need(*item)) {
            *total += need * count;
        }
    }
    sum
}

/// Columns that every pod of a pattern may use, at the preference level that `column` satisfies for the pod or a better level.
pub(crate) fn common_columns(state: &PlanState<'_, '_>, column: usize, pattern: &[(usize, usize)]) -> Bits {
    let sets = &state.column_sets.sets;
    let mut bits = Bits::full(state.column_sets.columns.len());
    let mut seen: Vec<usize> = Vec::new();
    for (item, _) in pattern {
        let levels = &state.demand.column_pools[state.demand.items[*item].column_pool].levels;
        let level = levels.iter().copied().find(|id| sets[*id].bits.contains(column)).or(levels.last().copied());
        if let Some(id) = level
            && !seen.contains(&id)
        {
            seen.push(id);
            bits.and(&sets[id].bits);
        }
    }
    bits
}

/// The columns that can hold a pattern instead of `column`, itself included, in ascending order of price.
pub(crate) fn substitutes(
    state: &PlanState<'_, '_>,
    column: usize,
    pattern: &[(usize, usize)],
) -> impl Iterator<Item = usize> {
    let load = load(state, pattern);
    let common = common_columns(state, column, pattern);
    let mut last: Option<(usize, bool)> = None;
    state.column_sets.by_price_for(&load).iter().copied().filter(move |c| {
        // Offerings of a shape and one price are adjacent, and differ in capacity only by their daemons: check a shape once.
        let shape = state.column_sets.columns[*c].shape;
        if last.is_none_or(|(of, _)| of != shape) {
            let mut offerings = state.column_sets.shapes[shape].first..state.column_sets.shapes[shape].end;
            last = Some((shape, offerings.any(|c| fits(&load, state.column_sets.room(c)))));
        }
        last.is_some_and(|(_, holds)| holds) && can_hold(state, *c, &load, &common, column)
    })
}

/// Whether a column can hold a load of pods with the common columns `common` instead of `column`.
pub(crate) fn can_hold(
    state: &PlanState<'_, '_>,
    candidate: usize,
    load: &[i64],
    common: &Bits,
    column: usize,
) -> bool {
    common.contains(candidate)
        && fits(load, state.column_sets.room(candidate))
        && is_compatible(state, candidate, column)
}

/// Whether a column has the NodePool and pinned labels of another, and its daemons' host ports.
pub(crate) fn is_compatible(state: &PlanState<'_, '_>, candidate: usize, column: usize) -> bool {
    let sets = &state.column_sets;
    sets.pool(candidate) == sets.pool(column)
        && sets.variant(candidate).pinned == sets.variant(column).pinned
        && (state.daemon_host(candidate).is_empty() || sets.daemon_set(candidate) == sets.daemon_set(column))
}
