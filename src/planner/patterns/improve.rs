//! The pattern search as a stage of the solver: a bound of whole pods, and cheaper purchases, of all pods at once or of those of a few nodes.

use std::collections::BTreeSet;

use crate::model::labels;
use crate::model::pod_class::Spread;
use crate::planner::pack::min_values::is_strict;
use crate::planner::patterns::neighborhoods::Neighborhoods;
use crate::planner::patterns::node_kinds::{Kinds, Scope, in_kinds};
use crate::planner::patterns::search::PatternSearch;
use crate::planner::pricing::lower_bound::LowerBound;
use crate::planner::pricing::subproblem::Subproblem;
use crate::planner::state::plan_state::PlanState;

/// Work of the search for a bound, and kinds of pods above which it is not worth its time.
const BOUND_WORK: usize = 250_000;
const MAX_BOUND_KINDS: usize = 320;
/// Pods above which neither is worth its time: the plan is found in a fraction of a second, and its cost is near the bound.
const MAX_PODS: usize = 2_000;

/// Replaces purchased nodes by cheaper ones for the same pods. Raises `bound`, a lower bound on the cost of nodes for at least the pods of the
/// purchased nodes, to one of whole pods; `None` where none is known.
pub(crate) fn improve_by_patterns(
    state: &mut PlanState<'_, '_>,
    subproblem: &mut Subproblem,
    mut bound: Option<&mut LowerBound>,
) {
    // What no NodePool had the budget for may replace a node.
    subproblem.reset_exhausted();
    let movable: BTreeSet<usize> = (0..state.purchased.len()).filter(|at| may_move(state, subproblem, *at)).collect();
    let mut counts = vec![0; state.demand.items.len()];
    for (item, count) in movable.iter().flat_map(|at| &state.purchased[*at].pattern) {
        counts[*item] += count;
    }
    if movable.is_empty()
        || counts.iter().sum::<usize>() > MAX_PODS
        || bound.as_ref().is_some_and(|bound| bound.is_reached(state))
    {
        return;
    }
    let mut values = bound.as_ref().map(|bound| bound.values.clone()).filter(|values| !values.is_empty());
    if let Some(bound) = bound.as_deref_mut().filter(|_| movable.len() == state.purchased.len()) {
        raise_bound(state, &counts, bound);
        values = Some(bound.values.clone());
        if bound.is_reached(state) {
            return;
        }
    }
    let is_feasible = values.is_some();
    let values = values.unwrap_or_else(|| (0..counts.len()).map(|item| state.demand.value(item)).collect());
    let set = |item: usize| subproblem.column_set(state.demand.items[item].column_pool);
    let scope = Scope {
        counts: &counts,
        columns: &|item| Some(state.column_sets.sets[set(item)?].bits.clone()),
        column_key: &|item| set(item).unwrap_or(usize::MAX),
        price: &|column| state.column_sets.columns[column].price,
        keeps_rules: &|_| true,
    };
    let Some(kinds) = Kinds::of(state, &scope, usize::MAX) else { return };
    let mut neighborhoods = Neighborhoods::new(kinds, values, is_feasible);
    neighborhoods.search(state, movable, bound.as_deref());
}

/// Whether the pods of a purchased node may be packed again.
fn may_move(state: &PlanState<'_, '_>, subproblem: &Subproblem, at: usize) -> bool {
    let node = &state.purchased[at];
    let is_free = |(item, _): &(usize, usize)| {
        subproblem.covers(state.demand.items[*item].column_pool) && !state.demand.is_tied(*item)
    };
    !is_strict(state, state.column_sets.pool(node.column)) && node.pattern.iter().all(is_free)
}

/// Raises a bound and its values, for these pods without the choices of the planner: any required column, paid prices, and host rules that
/// hold in every plan only. A spread over hosts caps a node only while another node has fewer pods.
fn raise_bound(state: &PlanState<'_, '_>, counts: &[usize], bound: &mut LowerBound) {
    let group = |item: usize| &state.demand.groups[state.demand.items[item].group];
    let over_hosts = |spread: &Spread| spread.hard && *spread.key == *labels::HOSTNAME;
    let scope = Scope {
        counts,
        columns: &|item| group(item).levels.last().cloned(),
        column_key: &|item| state.demand.items[item].group,
        price: &|column| state.column_sets.columns[column].paid,
        keeps_rules: &|item| !group(item).class.spread.iter().any(over_hosts),
    };
    let Some(kinds) = Kinds::of(state, &scope, MAX_BOUND_KINDS) else { return };
    let values = kinds.least_values(&bound.values);
    let Some(mut search) = PatternSearch::new(kinds, values, !bound.values.is_empty()) else { return };
    let kind_of = search.kinds.kind_of_items(counts.len());
    for node in &state.purchased {
        search.add_known(&in_kinds(&kind_of, &node.pattern));
    }
    search.raise_bound(BOUND_WORK);
    if search.bound > bound.cost {
        bound.cost = search.bound;
        bound.values.resize(counts.len(), 0.0);
        for (pod, value) in search.kinds.pods.iter().zip(&search.values) {
            pod.items.iter().for_each(|item| bound.values[*item] = *value);
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::planner::patterns::improve::improve_by_patterns;
    use crate::planner::pricing::lower_bound::LowerBound;
    use crate::test_support::plan_stages::{instance, purchase, purchased, remaining, subproblem};
    use crate::test_support::planner::{HOST, World, affinity};

    const CHEAPEST: [&str; 2] = ["a1.x16 in z-a: p 5", "a1.x4 in z-a: p 1"];

    /// Improves one node of 16 CPUs for each of six pods of 3 CPUs, and returns the nodes and the bound, in micro-USD per hour.
    fn improved(pool: Value, spec: &Value, bound: Option<f64>) -> (Vec<String>, Option<f64>) {
        let mut world = World::with_pools(&[("default", pool)]);
        world.pods("p", 6, &json!({"app": "p"}), "3", "2Gi", spec);
        let mut instance = instance(&world);
        let mut state = instance.state(false);
        (0..6).for_each(|_| purchase(&mut state, "a1.x16", "z-a", &[("p", 1)]));
        let mut subproblem = subproblem(&mut state);
        let mut bound = bound.map(|cost| LowerBound { cost, values: Vec::new() });
        improve_by_patterns(&mut state, &mut subproblem, bound.as_mut());
        assert_eq!(remaining(&state), "");
        (purchased(&state), bound.map(|bound| bound.cost))
    }

    #[test]
    fn the_pods_of_several_nodes_share_the_cheapest_ones() {
        let (nodes, _) = improved(json!({}), &json!({}), None);
        assert_eq!(nodes, CHEAPEST);
    }

    #[test]
    fn the_bound_is_raised_to_that_of_whole_pods_and_never_lowered() {
        let (_, bound) = improved(json!({}), &json!({}), Some(1.0));
        // Five pods fill a node of 640,000.
        assert!(bound.is_some_and(|bound| (bound - 6.0 * 128_000.0).abs() < 200.0), "{bound:?}");
        let (_, bound) = improved(json!({}), &json!({}), Some(1e9));
        assert_eq!(bound, Some(1e9), "the purchases cost less than that: nothing is done");
    }

    #[test]
    fn pods_that_exclude_each_other_stay_apart() {
        let spec = affinity("podAntiAffinity", HOST, &json!({"app": "p"}));
        let (nodes, _) = improved(json!({}), &spec, None);
        assert_eq!(nodes, ["a1.x4 in z-a: p 1"; 6]);
    }

    #[test]
    fn pods_that_others_follow_are_not_moved() {
        let spec = affinity("podAffinity", HOST, &json!({"app": "p"}));
        let (nodes, _) = improved(json!({}), &spec, None);
        assert_eq!(nodes.len(), 6);
    }

    #[test]
    fn the_limits_of_node_pools_hold() {
        let limited = json!({"limits": {"cpu": "96"}});
        let (nodes, _) = improved(limited, &json!({}), None);
        assert_eq!(nodes, CHEAPEST, "the removed nodes return their share");
    }
}
