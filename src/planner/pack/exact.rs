//! Small instances to optimality, by dynamic programming over sub-multisets of the demand. Most plans of an idle cluster are for a
//! few pods, where one node too large is a large share of the cost.
//!
//! Pods of an item are interchangeable, so a load is a count per item. The cheapest division of a load over nodes is the cheapest
//! column for a part of it plus the cheapest division of the rest.

use crate::columns::dims::fits;
use crate::pack::min_values::min_values_hold;
use crate::pack::substitutes::load;
use crate::pricing::subproblem::Subproblem;
use crate::state::demand::pattern::{Bin, Pattern};
use crate::state::plan_state::{PlanState, PurchasedNode};
use crate::state::pool_budget::Budget;

/// States of the dynamic program above which the instance is not small.
const MAX_LOADS: usize = 1_024;
/// Transitions of the dynamic program above which the instance is not small.
const MAX_TRANSITIONS: usize = 60_000;

/// The cheapest division of a load: its cost in micro-USD per hour, its nodes, and the load of one of them.
#[derive(Clone, Copy)]
struct Division {
    cost: i64,
    nodes: usize,
    part: usize,
}

/// Loads as mixed-radix numbers with one digit per item: how many of its pods the load contains.
struct Loads {
    /// The load of all pods.
    items: Pattern,
    /// Place value of each item's digit.
    unit: Vec<usize>,
}

impl Loads {
    /// `None` when there are too many loads or transitions.
    fn of(items: Pattern) -> Option<Self> {
        let (mut loads, mut transitions) = (1_usize, 1_usize);
        let mut unit = Vec::with_capacity(items.len());
        for (_, count) in &items {
            unit.push(loads);
            loads = loads.checked_mul(count + 1).filter(|loads| *loads <= MAX_LOADS)?;
            let of_item = (count + 1) * (count + 2) / 2;
            transitions = transitions.checked_mul(of_item).filter(|pairs| *pairs <= MAX_TRANSITIONS)?;
        }
        Some(Self { items, unit })
    }

    /// The load of all pods.
    fn all(&self) -> usize {
        self.items.iter().zip(&self.unit).map(|((_, count), unit)| count * unit).sum()
    }

    fn digits(&self, load: usize) -> Vec<usize> {
        self.items.iter().zip(&self.unit).map(|((_, count), unit)| load / unit % (count + 1)).collect()
    }

    fn pattern(&self, load: usize) -> Pattern {
        let counts = self.items.iter().zip(self.digits(load));
        counts.filter(|(_, count)| *count > 0).map(|((item, _), count)| (*item, count)).collect()
    }

    /// The parts of a load that contain a pod of its last item, largest first. Every division has such a node, so divisions that
    /// differ only in the order of nodes are considered once.
    fn parts(&self, load: usize) -> Vec<usize> {
        let digits = self.digits(load);
        let last = digits.iter().rposition(|digit| *digit > 0);
        let mut parts = vec![0];
        for (at, (digit, unit)) in digits.iter().zip(&self.unit).enumerate().rev() {
            let least = usize::from(Some(at) == last);
            parts = parts.into_iter().flat_map(|part| (least..=*digit).rev().map(move |n| part + n * unit)).collect();
        }
        parts
    }
}

/// The cheapest nodes for the whole remaining demand (of equal cost, the fewest nodes), and the budgets after their purchase. `None`
/// when the instance is too large, when pods have required host affinity, or when limits forbid the result. The state is
/// unchanged.
pub(crate) fn buy_exactly(
    state: &mut PlanState<'_, '_>,
    subproblem: &Subproblem,
) -> Option<(Vec<PurchasedNode>, Vec<Budget>)> {
    if !state.demand.followers().is_empty() {
        return None;
    }
    let unplaceable = subproblem.unplaceable(state);
    let items = state.demand.items.iter().enumerate();
    let covered = items.filter(|(_, item)| item.remaining > 0 && subproblem.column_set(item.column_pool).is_some());
    let remaining = covered.map(|(at, item)| (at, item.remaining));
    let loads = Loads::of(remaining.filter(|item| !unplaceable.contains(item)).collect())?;
    // Of each load: the cheapest column for it as one node, and its cheapest division.
    let mut single: Vec<Option<usize>> = vec![None];
    let mut best: Vec<Option<Division>> = vec![Some(Division { cost: 0, nodes: 0, part: 0 })];
    for load in 1..=loads.all() {
        single.push(cheapest_column(state, subproblem, &loads.pattern(load)));
        let mut found: Option<Division> = None;
        for part in loads.parts(load) {
            let (Some(column), Some(rest)) = (single[part], best[load - part]) else { continue };
            let cost = state.column_sets.columns[column].price.saturating_add(rest.cost);
            let division = Division { cost, nodes: rest.nodes + 1, part };
            if found.is_none_or(|have| (division.cost, division.nodes) < (have.cost, have.nodes)) {
                found = Some(division);
            }
        }
        best.push(found);
    }
    let mut budgets = state.budgets.clone();
    let mut purchased = Vec::new();
    let mut load = loads.all();
    while load > 0 {
        let part = best[load]?.part;
        let column = single[part]?;
        let (charge, pool) = (state.column_sets.charge(column), state.column_sets.pool(column));
        if budgets[pool].copies(charge, 1) == 0 {
            return None;
        }
        budgets[pool].spend(charge, 1);
        purchased.push(PurchasedNode { column, pattern: loads.pattern(part) });
        load -= part;
    }
    Some((purchased, budgets))
}

/// The cheapest column that can hold a pattern as one node.
fn cheapest_column(
    state: &mut PlanState<'_, '_>,
    subproblem: &Subproblem,
    pattern: &[(usize, usize)],
) -> Option<usize> {
    let load = load(state, pattern);
    let mut bits = None;
    for (item, _) in pattern {
        let set = subproblem.column_set(state.demand.items[*item].column_pool)?;
        let own = &state.column_sets.sets[set].bits;
        bits.get_or_insert_with(|| own.clone()).and(own);
    }
    let bits = bits?;
    // Host rules depend on the column only by its daemons: checked once per daemon set in a row.
    let (mut checked, mut feasible) = (None, false);
    let first = state.column_sets.by_price.len() - state.column_sets.by_price_for(&load).len();
    for at in first..state.column_sets.by_price.len() {
        let column = state.column_sets.by_price[at];
        let limited = state.budgets[state.column_sets.pool(column)].is_limited();
        if !bits.contains(column) || !fits(&load, state.column_sets.room(column)) || (limited && !state.affords(column))
        {
            continue;
        }
        let daemons = state.column_sets.daemon_set(column);
        if checked != Some(daemons) {
            let host = state.daemon_host(column).clone();
            let bin = Bin { room: state.column_sets.room(column), host: &host, pattern };
            feasible = state.demand.is_feasible(&bin);
            checked = Some(daemons);
        }
        if feasible && min_values_hold(state, column, pattern) {
            return Some(column);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::pack::exact::buy_exactly;
    use crate::state::plan_state::PlanState;
    use crate::test_support::plan_stages::{instance, purchased, subproblem};
    use crate::test_support::{HOST, World, affinity};

    fn bought(state: &mut PlanState<'_, '_>) -> Option<Vec<String>> {
        let subproblem = subproblem(state);
        let remaining = state.demand.remaining();
        let (nodes, _) = buy_exactly(state, &subproblem)?;
        assert_eq!((state.demand.remaining(), state.purchased.len()), (remaining, 0), "the state is unchanged");
        state.purchased = nodes;
        let mut out = purchased(state);
        out.sort();
        Some(out)
    }

    fn of(pods: &[(&str, usize, &str, &str)], pool: Value, spec: &Value) -> Option<Vec<String>> {
        let mut world = World::with_pools(&[("default", pool)]);
        for (name, count, cpu, memory) in pods {
            world.pods(name, *count, &json!({"app": "p"}), cpu, memory, spec);
        }
        let mut instance = instance(&world);
        bought(&mut instance.state(false))
    }

    #[test]
    fn the_division_over_nodes_is_the_cheapest_and_of_equals_has_the_fewest_nodes() {
        // Six CPUs would be 320,000 on one node of eight.
        let nodes = of(&[("p", 3, "2", "1Gi")], json!({}), &json!({})).unwrap();
        assert_eq!(nodes, ["a1.x2 in z-a: p 1", "a1.x4 in z-a: p 2"]);
        let nodes = of(&[("p", 8, "1", "1Gi")], json!({}), &json!({})).unwrap();
        assert_eq!(nodes, ["a1.x8 in z-a: p 8"]);
    }

    #[test]
    fn pods_of_different_shape_share_a_node_where_that_is_cheaper() {
        let pods = [("cpu", 1, "3", "1Gi"), ("memory", 1, "1", "14Gi")];
        assert_eq!(of(&pods, json!({}), &json!({})).unwrap(), ["a1.x4 in z-a: cpu 1, memory 1"]);
    }

    #[test]
    fn pods_that_exclude_each_other_get_a_node_each() {
        let apart = affinity("podAntiAffinity", HOST, &json!({"app": "p"}));
        let nodes = of(&[("p", 2, "1", "1Gi")], json!({}), &apart).unwrap();
        assert_eq!(nodes, ["a1.x2 in z-a: p 1", "a1.x2 in z-a: p 1"]);
    }

    #[test]
    fn pods_that_no_column_holds_are_left_out() {
        let pods = [("p", 1, "1", "1Gi"), ("huge", 1, "17", "1Gi")];
        assert_eq!(of(&pods, json!({}), &json!({})).unwrap(), ["a1.x2 in z-a: p 1"]);
    }

    #[test]
    fn large_instances_followers_and_limits_are_left_to_the_strategies() {
        assert!(of(&[("p", 1_100, "1", "1Gi")], json!({}), &json!({})).is_none(), "too many loads");
        let together = affinity("podAffinity", HOST, &json!({"app": "p"}));
        assert!(of(&[("p", 2, "1", "1Gi")], json!({}), &together).is_none(), "required host affinity");
        assert!(of(&[("p", 8, "2", "1Gi")], json!({"limits": {"cpu": "8"}}), &json!({})).is_none(), "limit");
    }
}
