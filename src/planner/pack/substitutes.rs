//! Substitutes: the other columns that can hold the pattern of a purchased node under the same NodePool, labels and daemons.

use stowage_model::offering::CapacityType;

use crate::columns::bitset::Bits;
use crate::columns::dims::fits;
use crate::columns::sets::ColumnSets;
use crate::state::plan_state::PlanState;

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

/// Percent of the planned price that a spot node may cost at most. EC2 chooses among the spot offerings of a request by capacity too, so the
/// choices of a node must all be near the price that the plan assumes. On-demand offerings are chosen by price alone.
const MAX_SPOT_PERCENT: i64 = 120;

/// The most that a node purchased as `column` may cost, in micro-USD per hour. `None`: no limit, as for on-demand columns and NodePools
/// whose `minValues` demand a variety of types whatever it costs.
pub(crate) fn max_price(column_sets: &ColumnSets<'_>, column: usize) -> Option<i64> {
    let of = &column_sets.columns[column];
    let pool = &column_sets.problem.pools[column_sets.pool(column)];
    let is_limited = of.capacity_type == CapacityType::Spot && pool.requirements.iter().all(|r| r.min_values.is_none());
    is_limited.then(|| of.paid.saturating_mul(MAX_SPOT_PERCENT) / 100)
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
    let candidates = state.column_sets.by_price_in(state.column_sets.pool(column), &load);
    candidates.iter().copied().filter(move |c| {
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

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::{Value, json};

    use crate::pack::substitutes::{load, substitutes};
    use crate::test_support::World;
    use crate::test_support::plan_stages::{column, instance};

    /// Names of the types that can replace a1.x4 in z-a for one pod, and whether prices ascend.
    fn replacing(cpu: &str, spec: &Value, pools: &[(&str, Value)]) -> BTreeSet<String> {
        let mut world = World::with_pools(pools);
        world.pods("p", 1, &json!({}), cpu, "1Gi", spec);
        let mut instance = instance(&world);
        let state = instance.state(false);
        let found: Vec<usize> = substitutes(&state, column(&state, "a1.x4", "z-a"), &[(0, 1)]).collect();
        let prices: Vec<i64> = found.iter().map(|column| state.column_sets.columns[*column].price).collect();
        assert!(prices.is_sorted(), "ascending by price");
        found.iter().map(|column| state.column_sets.instance_type(*column).name.to_string()).collect()
    }

    #[test]
    fn every_column_of_the_pool_that_holds_the_load_is_a_substitute() {
        let default = [("default", json!({}))];
        assert_eq!(replacing("1", &json!({}), &default).len(), 18, "all types");
        let large = replacing("9", &json!({}), &default);
        assert_eq!(large, ["a1.x16", "c1.x16", "g1.x16", "m1.x16", "r1.x16"].map(str::to_owned).into());
    }

    #[test]
    fn substitutes_satisfy_the_constraints_of_every_pod() {
        let arm = json!({"nodeSelector": {"kubernetes.io/arch": "arm64"}});
        let found = replacing("1", &arm, &[("default", json!({}))]);
        assert_eq!(found, ["a1.x16", "a1.x2", "a1.x4", "a1.x8"].map(str::to_owned).into());
    }

    #[test]
    fn another_node_pool_is_no_substitute() {
        let amd = json!({"requirements": [{"key": "kubernetes.io/arch", "operator": "In", "values": ["amd64"]}]});
        let arm = json!({"requirements": [{"key": "kubernetes.io/arch", "operator": "In", "values": ["arm64"]}]});
        assert_eq!(replacing("1", &json!({}), &[("amd", amd), ("arm", arm)]).len(), 4, "a1 of its pool");
    }

    #[test]
    fn the_load_is_the_sum_of_requests() {
        let mut world = World::new();
        world.pods("p", 3, &json!({}), "1500m", "2Gi", &json!({}));
        let mut instance = instance(&world);
        assert_eq!(load(&instance.state(false), &[(0, 3)]), [4500, 6 << 30, 3, 0]);
    }
}
