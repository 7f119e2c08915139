//! The pattern search as a stage of the solver: values of whole pods, and cheaper purchases, of all pods at once or of those of a few nodes.

use std::collections::BTreeSet;

use stowage_model::labels;
use stowage_model::pod_class::Spread;

use crate::columns::dims::real;
use crate::pack::min_values::is_strict;
use crate::patterns::neighborhoods::Neighborhoods;
use crate::patterns::node_kinds::{Kinds, Part, Scope};
use crate::patterns::pattern_search::PatternSearch;
use crate::patterns::proof::Proof;
use crate::pricing::lower_bound::LowerBound;
use crate::pricing::subproblem::Subproblem;
use crate::state::demand::pattern::{Pattern, add_pods};
use crate::state::plan_state::PlanState;

/// Effort of the bound and of its proof.
struct Effort {
    /// Work of column generation, and kinds of pods above which it is not worth its time: it does not end then.
    bound_work: usize,
    bound_kinds: usize,
    /// Steps of branch and bound, and kinds and number of pods above which it is not worth its time.
    branch_steps: usize,
    branch_kinds: usize,
    branch_pods: usize,
}

const QUICK: Effort =
    Effort { bound_work: 250_000, bound_kinds: 64, branch_steps: 200_000, branch_kinds: 40, branch_pods: 300 };
/// With `--prove`.
const THOROUGH: Effort = Effort {
    bound_work: 50_000_000,
    bound_kinds: 1_000,
    branch_steps: 5_000_000,
    branch_kinds: 80,
    branch_pods: 1_000,
};
/// Pods above which neither is worth its time: the plan is found in a fraction of a second, and its cost is near the bound.
pub(crate) const MAX_PODS: usize = 2_000;

/// Replaces purchased nodes by cheaper ones for the same pods. Raises `bound`, a lower bound on the cost of nodes for at least the pods of the
/// purchased nodes, to one of whole pods; `None` where none is known. Returns the proof that may raise it further.
pub(crate) fn improve_by_patterns(
    state: &mut PlanState<'_, '_>,
    subproblem: &mut Subproblem,
    mut bound: Option<&mut LowerBound>,
) -> Option<Proof> {
    // What no NodePool had the budget for may replace a node.
    subproblem.reset_exhausted();
    let movable: BTreeSet<usize> =
        (state.fixed..state.purchased.len()).filter(|at| may_move(state, subproblem, *at)).collect();
    let mut counts = vec![0; state.demand.items.len()];
    for (item, count) in movable.iter().flat_map(|at| &state.purchased[*at].pattern) {
        counts[*item] += count;
    }
    if movable.is_empty()
        || counts.iter().sum::<usize>() > MAX_PODS
        || bound.as_ref().is_some_and(|bound| bound.is_reached(state))
    {
        return None;
    }
    let mut proof = None;
    let mut values = bound.as_ref().map(|bound| bound.values.clone()).filter(|values| !values.is_empty());
    if let Some(bound) = bound.as_deref_mut().filter(|_| movable.len() == state.purchased.len()) {
        proof = raise_bound(state, &counts, bound);
        values = Some(bound.values.clone());
        if bound.is_reached(state) {
            return proof;
        }
    }
    // The values are those of paid prices.
    let same_prices = state.column_sets.columns.iter().all(|column| column.price == column.paid);
    let is_feasible = values.is_some() && same_prices;
    let values = values.unwrap_or_else(|| (0..counts.len()).map(|item| state.demand.value(item)).collect());
    let set = |item: usize| subproblem.column_set(state.demand.items[item].column_pool);
    let part = |(item, count): (usize, &usize)| Some(Part { item, count: *count, set: set(item)? });
    let parts: Vec<Part> = counts.iter().enumerate().filter_map(part).collect();
    // Nodes of NodePools with `minValues` are not movable: whether others may be purchased depends on their pods.
    let lenient = state.column_sets.where_column(|column| !is_strict(state, state.column_sets.pool(column)));
    let columns = |set: usize| {
        let mut bits = state.column_sets.sets[set].bits.clone();
        bits.and(&lenient);
        bits
    };
    let scope = Scope {
        parts: &parts,
        columns: &columns,
        price: &|column| state.column_sets.columns[column].price,
        keeps_rules: &|_| true,
    };
    if let Some(kinds) = Kinds::of(state, &scope, usize::MAX) {
        Neighborhoods::new(kinds, values, is_feasible).search(state, movable, bound.as_deref());
    }
    proof
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
fn raise_bound(state: &mut PlanState<'_, '_>, counts: &[usize], bound: &mut LowerBound) -> Option<Proof> {
    let effort = if state.column_sets.problem.settings.prove { &THOROUGH } else { &QUICK };
    let parts = parts(state, counts);
    let group = |item: usize| &state.demand.groups[state.demand.items[item].group];
    let over_hosts = |spread: &Spread| spread.hard && *spread.key == *labels::HOSTNAME;
    let scope = Scope {
        parts: &parts,
        columns: &|set| state.column_sets.sets[set].bits.clone(),
        price: &|column| state.column_sets.columns[column].paid,
        keeps_rules: &|item| !group(item).class.spread.iter().any(over_hosts),
    };
    let kinds = Kinds::of(state, &scope, effort.bound_kinds)?;
    let values = kinds.least_values(&bound.values);
    let mut search = PatternSearch::new(kinds, values, !bound.values.is_empty())?;
    for pattern in known_patterns(state, &search.kinds, counts.len()) {
        search.add_known(&pattern);
    }
    let paid: i64 = state.purchased.iter().map(|node| state.column_sets.columns[node.column].paid).sum();
    search.raise_bound(effort.bound_work, real(paid));
    if search.bound > bound.cost {
        bound.cost = search.bound;
        bound.values = vec![f64::INFINITY; counts.len()];
        for (pod, value) in search.kinds.pods.iter().zip(&search.values) {
            pod.items.iter().for_each(|item| bound.values[*item] = bound.values[*item].min(*value));
        }
        bound.values.iter_mut().filter(|value| value.is_infinite()).for_each(|value| *value = 0.0);
    }
    let pods: usize = counts.iter().sum();
    let is_small = search.kinds.pods.len() <= effort.branch_kinds && pods <= effort.branch_pods;
    is_small.then(|| Proof::new(search, effort.branch_steps))
}

/// The pods by the columns that any plan may use: those that a spread requires in the domain of the item, and others.
fn parts(state: &mut PlanState<'_, '_>, counts: &[usize]) -> Vec<Part> {
    let mut parts = Vec::new();
    for (at, count) in counts.iter().enumerate().filter(|(_, count)| **count > 0) {
        let item = state.demand.items[at];
        let groups = state.demand.groups;
        let Some(required) = groups[item.group].levels.last() else { continue };
        let required = state.column_sets.column_set(required.clone());
        let pinned = state.demand.column_pools[item.column_pool].levels.last().copied().unwrap_or(required);
        let placed = item.assigned.saturating_sub(*count);
        let least = item.least.saturating_sub(placed).min(*count);
        parts.push(Part { item: at, count: least, set: pinned });
        parts.push(Part { item: at, count: count - least, set: required });
    }
    parts.retain(|part| part.count > 0);
    parts
}

/// The patterns of the purchased nodes; an item may be in several kinds of pods.
fn known_patterns(state: &PlanState<'_, '_>, kinds: &Kinds, items: usize) -> Vec<Pattern> {
    let mut of_item: Vec<Vec<usize>> = vec![Vec::new(); items];
    for (kind, pod) in kinds.pods.iter().enumerate() {
        pod.items.iter().for_each(|item| of_item[*item].push(kind));
    }
    let mut left: Vec<usize> = kinds.pods.iter().map(|pod| pod.count).collect();
    let mut known = Vec::new();
    for node in &state.purchased {
        let mut pattern = Pattern::new();
        for (item, count) in &node.pattern {
            let mut count = *count;
            for kind in &of_item[*item] {
                let taken = count.min(left[*kind]);
                if taken > 0 {
                    add_pods(&mut pattern, *kind, taken);
                }
                left[*kind] -= taken;
                count -= taken;
            }
        }
        pattern.sort_unstable();
        known.push(pattern);
    }
    known
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::patterns::improve::improve_by_patterns;
    use crate::pricing::lower_bound::LowerBound;
    use crate::test_support::plan_stages::{instance, purchase, purchased, remaining, subproblem};
    use crate::test_support::{HOST, World, ZONE, affinity, spread};

    const CHEAPEST: [&str; 2] = ["a1.x16 in z-a: p 5", "a1.x4 in z-a: p 1"];

    /// Improves one node of 16 CPUs for each of six pods of 3 CPUs, and returns the nodes and the proven bound, in micro-USD per hour.
    fn improved(pool: Value, spec: &Value, bound: Option<f64>) -> (Vec<String>, Option<f64>) {
        let mut world = World::with_pools(&[("default", pool)]);
        world.pods("p", 6, &json!({"app": "p"}), "3", "2Gi", spec);
        let mut instance = instance(&world);
        let mut state = instance.state(false);
        (0..6).for_each(|_| purchase(&mut state, "a1.x16", "z-a", &[("p", 1)]));
        let mut subproblem = subproblem(&mut state);
        let mut bound = bound.map(|cost| LowerBound { cost, values: Vec::new() });
        let proof = improve_by_patterns(&mut state, &mut subproblem, bound.as_mut());
        assert_eq!(remaining(&state), "");
        let proven = |bound: LowerBound| proof.map_or(bound.cost, |proof| proof.raise(bound.cost, state.cost()));
        (purchased(&state), bound.map(proven))
    }

    #[test]
    fn the_pods_of_several_nodes_share_the_cheapest_ones() {
        let (nodes, _) = improved(json!({}), &json!({}), None);
        assert_eq!(nodes, CHEAPEST);
    }

    #[test]
    fn the_bound_is_raised_to_that_of_whole_pods_and_never_lowered() {
        let (_, bound) = improved(json!({}), &json!({}), Some(1.0));
        assert_eq!(bound, Some(800_000.0), "the cheapest whole nodes");
        let (_, bound) = improved(json!({}), &json!({}), Some(1e9));
        assert_eq!(bound, Some(1e9), "the purchases cost less than that: nothing is done");
    }

    #[test]
    fn the_bound_counts_the_pods_that_a_spread_requires_in_each_zone() {
        let mut world = World::new();
        let labels = json!({"app": "p"});
        world.pods("p", 6, &labels, "3", "2Gi", &spread(ZONE, &labels, &json!({})));
        let plan = world.plan();
        // Anywhere, five pods would share a node of 640,000.
        assert_eq!((plan.cost.0, plan.optimal), (960_000, true), "two pods in each of three zones");
        assert_eq!(plan.lower_bound, Some(plan.cost));
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
