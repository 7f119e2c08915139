//! `minValues` of NodePool requirements: a new node must keep enough distinct values of each such key among its choices.

use std::collections::BTreeSet;

use crate::input::settings::MinValuesPolicy;
use crate::pack::nameable::{Order, nameable};
use crate::pack::substitutes::substitutes;
use crate::state::plan_state::PlanState;
use crate::state::pool_budget::Budget;

/// Whether a pattern can be purchased as `column`: enough distinct values remain among the types that hold it within the limits.
pub(crate) fn min_values_hold(state: &PlanState<'_, '_>, column: usize, pattern: &[(usize, usize)]) -> bool {
    let pool = state.column_sets.pool(column);
    !is_strict(state, pool) || hold_within(state, &state.budgets[pool], column, pattern)
}

/// As [`min_values_hold`], for a node that is purchased already, whose own capacity is spent.
pub(crate) fn min_values_still_hold(state: &PlanState<'_, '_>, column: usize, pattern: &[(usize, usize)]) -> bool {
    let pool = state.column_sets.pool(column);
    if !is_strict(state, pool) {
        return true;
    }
    let mut budget = state.budgets[pool].clone();
    budget.refund(state.column_sets.charge(column));
    hold_within(state, &budget, column, pattern)
}

fn hold_within(state: &PlanState<'_, '_>, budget: &Budget, column: usize, pattern: &[(usize, usize)]) -> bool {
    let pool = state.column_sets.pool(column);
    let affords = |c: &usize| !budget.is_limited() || budget.allows(state.column_sets.charge(*c));
    let others = substitutes(state, column, pattern).filter(|c| *c != column && affords(c));
    let columns: Vec<usize> = std::iter::once(column).chain(others).collect();
    satisfies_min_values(state, pool, &nameable_choices(state, pool, &columns))
}

/// Whether a NodePool has `minValues` that must hold.
pub(crate) fn is_strict(state: &PlanState<'_, '_>, pool: usize) -> bool {
    let problem = state.column_sets.problem;
    problem.settings.min_values_policy == MinValuesPolicy::Strict
        && problem.pools[pool].requirements.iter().any(|r| r.min_values.is_some())
}

/// Whether columns have enough distinct values of each key with `minValues`.
pub(crate) fn satisfies_min_values(state: &PlanState<'_, '_>, pool: usize, columns: &[usize]) -> bool {
    let requirements = &state.column_sets.problem.pools[pool].requirements;
    requirements.iter().filter(|r| r.min_values.is_some()).all(|r| {
        let least = usize::try_from(r.min_values.unwrap_or(0)).unwrap_or(0);
        let values: BTreeSet<&str> = columns.iter().filter_map(|c| state.column_sets.label(*c, &r.key)).collect();
        values.len() >= least
    })
}

/// The columns of a node that a NodeClaim can name, in the order that satisfies `minValues` if one does.
pub(crate) fn nameable_choices(state: &PlanState<'_, '_>, pool: usize, columns: &[usize]) -> Vec<usize> {
    let by_price = nameable(state.column_sets, columns, Order::Price);
    if by_price.len() == columns.len() || !is_strict(state, pool) || satisfies_min_values(state, pool, &by_price) {
        return by_price;
    }
    let others = [Order::Types, Order::Zones].into_iter().map(|order| nameable(state.column_sets, columns, order));
    others.into_iter().find(|columns| satisfies_min_values(state, pool, columns)).unwrap_or(by_price)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::input::settings::MinValuesPolicy;
    use crate::pack::min_values::{min_values_hold, min_values_still_hold};
    use crate::test_support::World;
    use crate::test_support::plan_stages::{column, instance, purchase};

    /// A pool that wants `families` instance families, and a pod.
    fn world(families: i64, cpu: &str, limit: &str) -> World {
        let requirement =
            json!({"key": "karpenter.k8s.aws/instance-family", "operator": "Exists", "minValues": families});
        let pool = json!({"requirements": [requirement], "limits": {"cpu": limit}});
        let mut world = World::with_pools(&[("default", pool)]);
        world.pods("p", 1, &json!({}), cpu, "1Gi", &json!({}));
        world
    }

    #[test]
    fn enough_values_must_remain_among_the_types_that_hold_the_pattern() {
        // Five families: a1, c1, m1, r1 and g1.
        for (families, cpu, holds) in [(5, "1", true), (6, "1", false), (5, "15", true)] {
            let world = world(families, cpu, "100");
            let mut instance = instance(&world);
            let state = instance.state(false);
            let column = column(&state, "a1.x16", "z-a");
            assert_eq!(min_values_hold(&state, column, &[(0, 1)]), holds, "{families} families, {cpu} CPUs");
        }
    }

    #[test]
    fn types_beyond_the_limits_do_not_count() {
        // Within 2 CPUs there is no g1.
        for (families, limit, holds) in [(4, "2", true), (5, "2", false), (5, "4", true)] {
            let world = world(families, "1", limit);
            let mut instance = instance(&world);
            let state = instance.state(false);
            let column = column(&state, "a1.x2", "z-a");
            assert_eq!(min_values_hold(&state, column, &[(0, 1)]), holds, "{families} families within {limit} CPUs");
        }
    }

    #[test]
    fn the_capacity_of_a_purchased_node_counts_as_its_own() {
        let world = world(4, "1", "2");
        let mut instance = instance(&world);
        let mut state = instance.state(false);
        purchase(&mut state, "a1.x2", "z-a", &[("p", 1)]);
        let column = column(&state, "a1.x2", "z-a");
        assert!(!min_values_hold(&state, column, &[(0, 1)]), "for another node the limit is used up");
        assert!(min_values_still_hold(&state, column, &[(0, 1)]));
    }

    #[test]
    fn with_best_effort_they_always_hold() {
        let mut world = world(9, "1", "100");
        world.problem.settings.min_values_policy = MinValuesPolicy::BestEffort;
        let mut instance = instance(&world);
        let state = instance.state(false);
        assert!(min_values_hold(&state, column(&state, "a1.x2", "z-a"), &[(0, 1)]));
    }
}
