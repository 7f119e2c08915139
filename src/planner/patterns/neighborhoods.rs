//! Large neighborhood search over the purchased nodes: the pods of a few nodes are packed again by a pattern search, which finds the cheapest
//! nodes for them or a bound that shows that there are no cheaper ones.

use std::collections::BTreeSet;
use std::ops::RangeInclusive;

use crate::columns::dims::{float, real};
use crate::patterns::knapsack::Offered;
use crate::patterns::node_kinds::{Kinds, NodeKind, in_kinds};
use crate::patterns::pattern_search::PatternSearch;
use crate::pricing::lower_bound::LowerBound;
use crate::state::demand::pattern::{Bin, Pattern, add_pods};
use crate::state::plan_state::{PlanState, PurchasedNode};

/// Work of all neighborhoods per pod, within bounds, and of one.
const WORK_PER_POD: usize = 4_000;
const MIN_WORK: usize = 200_000;
const MAX_WORK: usize = 2_500_000;
const NEIGHBORHOOD_WORK: usize = 200_000;
/// How much more work, and how many more failures, `--prove` allows. The search begins with the same neighborhoods.
const THOROUGH: usize = 25;
/// Nodes and kinds of pods of a neighborhood.
const NEIGHBORHOOD_NODES: RangeInclusive<usize> = 3..=15;
const NEIGHBORHOOD_KINDS: usize = 40;
/// Kinds of nodes that are considered for each kind of pod, and steps of the subgradient method that rate them.
const NODES_PER_POD: usize = 20;
const RATING_STEPS: usize = 10;
/// Pods up to which all kinds of nodes are considered: the work suffices for them.
const PROMISING_PODS: usize = 100;
/// Pods up to which the cheapest nodes for all are first searched by branch and bound, and its steps.
const BRANCH_PODS: usize = 30;
const BRANCH_STEPS: usize = 200_000;
/// Neighborhoods without improvement, one after the other, per purchased node, that end the search.
const FAILURES_PER_NODE: usize = 4;
/// Weight of a node without slack when neighborhoods are drawn, as a share of its price.
const MIN_WEIGHT: f64 = 0.02;
const SEED: u64 = 1;

/// The search and what it knows of the pods.
pub(crate) struct Neighborhoods {
    kinds: Kinds,
    /// The kinds with the promising nodes only, while only these are considered.
    promising: Option<Kinds>,
    kind_of: Vec<usize>,
    /// By kind of pod, in micro-USD per hour.
    values: Vec<f64>,
    is_feasible: bool,
    work: usize,
}

impl Neighborhoods {
    /// `values` of items; `is_feasible` if the pods of no node are worth more than its price.
    pub fn new(kinds: Kinds, values: Vec<f64>, is_feasible: bool) -> Self {
        let kind_of = kinds.kind_of_items(values.len());
        let values = kinds.least_values(&values);
        Self { kinds, promising: None, kind_of, values, is_feasible, work: 0 }
    }

    /// Repacks neighborhoods of the movable nodes until the work is used up, or nothing improves any more.
    pub fn search(&mut self, state: &mut PlanState<'_, '_>, mut movable: BTreeSet<usize>, bound: Option<&LowerBound>) {
        let mut random = fastrand::Rng::with_seed(SEED);
        let mut failures = 0;
        let pods: usize = self.kinds.pods.iter().map(|pod| pod.count).sum();
        let effort = if state.column_sets.problem.settings.prove { THOROUGH } else { 1 };
        let limit = pods.saturating_mul(WORK_PER_POD).clamp(MIN_WORK, MAX_WORK) * effort;
        if pods <= BRANCH_PODS {
            let all = movable.clone();
            let (nodes, is_proven) = self.repack(state, &all, cheapest_nodes);
            let before = state.purchased.len();
            if let Some(nodes) = nodes
                && replace(state, &all, nodes)
            {
                movable = moved_up(&movable, &all);
                movable.extend(before - all.len()..state.purchased.len());
            } else if is_proven {
                return;
            }
            self.work = 0;
        }
        self.promising = (pods > PROMISING_PODS).then(|| with_promising_nodes(&self.kinds, &self.values));
        while self.work < limit {
            let most_failures = FAILURES_PER_NODE * movable.len();
            if self.promising.is_some() && failures >= most_failures {
                (self.promising, failures) = (None, 0);
            }
            if failures >= most_failures * effort {
                return;
            }
            let chosen = self.draw(state, &movable, &mut random);
            let is_all = chosen.len() == movable.len();
            let (Some(nodes), _) = self.repack(state, &chosen, cheaper_nodes) else {
                failures += 1;
                if is_all && self.promising.take().is_none() {
                    return;
                }
                continue;
            };
            failures = 0;
            let before = state.purchased.len();
            if !replace(state, &chosen, nodes) {
                return;
            }
            movable = moved_up(&movable, &chosen);
            movable.extend(before - chosen.len()..state.purchased.len());
            if bound.is_some_and(|bound| bound.is_reached(state)) {
                return;
            }
        }
    }

    fn slack(&self, state: &PlanState<'_, '_>, at: usize) -> f64 {
        let node = &state.purchased[at];
        let value =
            |(item, count): &(usize, usize)| self.values.get(self.kind_of[*item]).unwrap_or(&0.0) * float(*count);
        let price = real(state.column_sets.columns[node.column].price);
        (price - node.pattern.iter().map(value).sum::<f64>()).max(price * MIN_WEIGHT)
    }

    /// Share of the kinds of pods on a node that may use a column.
    fn relatedness(&self, node: &PurchasedNode, column: usize) -> f64 {
        let may_use = |(item, _): &&(usize, usize)| {
            let kind = self.kinds.pods.get(self.kind_of[*item]);
            kind.is_some_and(|kind| self.kinds.sets[kind.set].contains(column))
        };
        float(node.pattern.iter().filter(may_use).count()) / float(node.pattern.len().max(1))
    }

    /// Nodes to repack, drawn by slack: price minus the value of the pods. The others hold pods that may use the column of the first.
    fn draw(
        &self,
        state: &PlanState<'_, '_>,
        movable: &BTreeSet<usize>,
        random: &mut fastrand::Rng,
    ) -> BTreeSet<usize> {
        let mut weights: Vec<(usize, f64)> = movable.iter().map(|at| (*at, self.slack(state, *at))).collect();
        let mut chosen = BTreeSet::new();
        let mut kinds = BTreeSet::new();
        // Small ones more often than large ones.
        let size = random.usize(NEIGHBORHOOD_NODES).min(random.usize(NEIGHBORHOOD_NODES));
        let is_related = random.bool();
        while chosen.len() < size && !weights.is_empty() {
            let mut left = random.f64() * weights.iter().map(|(_, weight)| weight).sum::<f64>();
            let drawn = weights.iter().position(|(_, weight)| {
                left -= weight;
                left <= 0.0
            });
            let (at, _) = weights.swap_remove(drawn.unwrap_or(weights.len() - 1));
            let more = || state.purchased[at].pattern.iter().map(|(item, _)| self.kind_of[*item]);
            if chosen.len() >= 2
                && kinds.len() + more().filter(|kind| !kinds.contains(kind)).count() > NEIGHBORHOOD_KINDS
            {
                break;
            }
            kinds.extend(more());
            if chosen.is_empty() && is_related {
                let column = state.purchased[at].column;
                for (at, weight) in &mut weights {
                    *weight *= self.relatedness(&state.purchased[*at], column).powi(2);
                }
                weights.retain(|(_, weight)| *weight > 0.0);
            }
            chosen.insert(at);
        }
        chosen
    }

    /// Cheaper nodes for the pods of the chosen ones, and whether it is proven that there are no cheaper ones.
    fn repack(
        &mut self,
        state: &PlanState<'_, '_>,
        chosen: &BTreeSet<usize>,
        solve: fn(&mut PatternSearch, f64) -> (Option<Nodes>, bool),
    ) -> (Option<Vec<PurchasedNode>>, bool) {
        let patterns: Vec<Pattern> =
            chosen.iter().map(|at| in_kinds(&self.kind_of, &state.purchased[*at].pattern)).collect();
        let mut pods = Pattern::new();
        patterns.iter().flatten().for_each(|(kind, count)| add_pods(&mut pods, *kind, *count));
        pods.sort_unstable();
        let of = self.promising.as_ref().unwrap_or(&self.kinds);
        let (kinds, node_numbers) = of.subset(&pods);
        let values = pods.iter().map(|(kind, _)| self.values[*kind]).collect();
        let Some(mut search) = PatternSearch::new(kinds, values, self.is_feasible) else { return (None, false) };
        let position = |kind: usize| pods.binary_search_by_key(&kind, |(kind, _)| *kind).unwrap_or(usize::MAX);
        for pattern in &patterns {
            let known: Pattern = pattern.iter().map(|(kind, count)| (position(*kind), *count)).collect();
            search.add_known(&known);
        }
        let cost: i64 = chosen.iter().map(|at| state.column_sets.columns[state.purchased[*at].column].price).sum();
        let (nodes, is_proven) = solve(&mut search, real(cost) - 0.5);
        self.work += search.work + 1_000;
        // Kinds of pods become items again.
        let mut left: Vec<Pattern> = vec![Pattern::new(); pods.len()];
        for (item, count) in chosen.iter().flat_map(|at| &state.purchased[*at].pattern) {
            add_pods(&mut left[position(self.kind_of[*item])], *item, *count);
        }
        for items in &mut left {
            items.sort_unstable();
        }
        let node = |(node, pods): (usize, Pattern)| {
            let mut pattern = Pattern::new();
            for (pod, mut count) in pods {
                for (item, remaining) in &mut left[pod] {
                    let taken = count.min(*remaining);
                    if taken > 0 {
                        pattern.push((*item, taken));
                    }
                    *remaining -= taken;
                    count -= taken;
                }
            }
            PurchasedNode { column: of.nodes[node_numbers[node]].column, pattern }
        };
        (nodes.map(|nodes| nodes.into_iter().map(node).collect()), is_proven)
    }
}

/// The kinds with a few nodes for each kind of pod: the cheapest that holds it, and, of those that hold it, the ones that may be worth most per
/// price at these values. A neighborhood takes the less time the fewer there are.
pub(crate) fn with_promising_nodes(kinds: &Kinds, values: &[f64]) -> Kinds {
    let counts: Vec<usize> = kinds.pods.iter().map(|pod| pod.count).collect();
    let offered = Offered { kinds, counts: &counts, values };
    let rate =
        |node: &NodeKind| offered.upper_bound(node, &mut node.equal_shares(), 0.0, RATING_STEPS) / node.price.max(1.0);
    let mut rated: Vec<(f64, usize)> = kinds.nodes.iter().map(rate).zip(0..).collect();
    rated.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    let mut considered = vec![0; kinds.pods.len()];
    let cheapest = |pod: usize| kinds.nodes.iter().position(|node| node.pods.binary_search(&pod).is_ok());
    let mut kept: BTreeSet<usize> = (0..kinds.pods.len()).filter_map(cheapest).collect();
    for (_, at) in rated {
        let pods = &kinds.nodes[at].pods;
        if pods.iter().any(|pod| considered[*pod] < NODES_PER_POD) {
            for pod in pods {
                considered[*pod] += 1;
            }
            kept.insert(at);
        }
    }
    let nodes = kept.into_iter().map(|at| kinds.nodes[at].clone()).collect();
    Kinds { pods: kinds.pods.clone(), nodes, counters: kinds.counters, sets: Vec::new() }
}

/// Kinds of nodes and their pods.
type Nodes = Vec<(usize, Pattern)>;

/// Nodes for all pods of a search that cost less than `ceiling`, if diving finds some.
fn cheaper_nodes(search: &mut PatternSearch, ceiling: f64) -> (Option<Nodes>, bool) {
    (search.dive(ceiling, NEIGHBORHOOD_WORK), false)
}

/// The cheapest nodes for all pods of a search, or some that cost less than `ceiling`, and whether no others cost less.
fn cheapest_nodes(search: &mut PatternSearch, ceiling: f64) -> (Option<Nodes>, bool) {
    search.raise_bound(NEIGHBORHOOD_WORK, ceiling);
    if search.bound >= ceiling {
        return (None, true);
    }
    let branched = search.branch(ceiling, BRANCH_STEPS);
    (branched.nodes, branched.is_proven)
}

/// Positions after the chosen nodes were removed.
fn moved_up(positions: &BTreeSet<usize>, chosen: &BTreeSet<usize>) -> BTreeSet<usize> {
    positions.difference(chosen).map(|at| at - chosen.range(..at).count()).collect()
}

/// Replaces the chosen nodes by others for the same pods. Without effect, and false, where a rule or a limit forbids one.
fn replace(state: &mut PlanState<'_, '_>, chosen: &BTreeSet<usize>, nodes: Vec<PurchasedNode>) -> bool {
    let (budgets, before) = (state.budgets.clone(), state.purchased.clone());
    for at in chosen {
        state.demand.restore(&before[*at].pattern);
        state.refund(before[*at].column);
    }
    let kept = |(at, node): (usize, &PurchasedNode)| (!chosen.contains(&at)).then(|| node.clone());
    state.purchased = before.iter().enumerate().filter_map(kept).collect();
    let kept = state.purchased.len();
    let is_replaced = nodes.into_iter().all(|node| {
        let host = state.daemon_host(node.column).clone();
        let bin = Bin { room: state.column_sets.room(node.column), host: &host, pattern: &node.pattern };
        let is_feasible = state.demand.is_feasible(&bin) && state.affords(node.column);
        if is_feasible {
            state.purchase(node, 1);
        }
        is_feasible
    });
    if !is_replaced {
        for node in state.purchased.split_off(kept) {
            state.demand.restore(&node.pattern);
        }
        for at in chosen {
            state.demand.take(&before[*at].pattern, 1);
        }
        state.purchased = before;
        state.budgets = budgets;
    }
    is_replaced
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::json;

    use crate::patterns::neighborhoods::{Neighborhoods, cheaper_nodes, moved_up, replace};
    use crate::patterns::node_kinds::{Kinds, Part, Scope};
    use crate::pricing::lower_bound::LowerBound;
    use crate::state::plan_state::PurchasedNode;
    use crate::test_support::World;
    use crate::test_support::plan_stages::{
        all_columns, column, instance, item, pattern, purchase, purchased, remaining,
    };

    fn set(of: &[usize]) -> BTreeSet<usize> {
        of.iter().copied().collect()
    }

    #[test]
    fn positions_move_up_past_the_chosen() {
        assert_eq!(moved_up(&set(&[0, 2, 3, 5, 6]), &set(&[2, 5])), set(&[0, 2, 4]));
        assert_eq!(moved_up(&set(&[1]), &set(&[1])), set(&[]));
    }

    #[test]
    fn nodes_are_replaced_as_a_whole_or_not_at_all() {
        let mut world = World::with_pools(&[("default", json!({"limits": {"cpu": "24"}}))]);
        world.pods("p", 3, &json!({}), "3", "1Gi", &json!({}));
        let mut instance = instance(&world);
        let mut state = instance.state(false);
        for _ in 0..3 {
            purchase(&mut state, "a1.x4", "z-a", &[("p", 1)]);
        }
        let before = purchased(&state);
        let node = |state: &_, name: &str, count: usize| PurchasedNode {
            column: column(state, name, "z-a"),
            pattern: pattern(state, &[("p", count)]),
        };
        // Too small for its pods, and beyond the limit of 24 CPUs.
        for second in ["a1.x2", "a1.x16"] {
            let nodes = vec![node(&state, "a1.x8", 1), node(&state, second, 1)];
            assert!(!replace(&mut state, &set(&[0, 2]), nodes), "{second}");
            assert_eq!((purchased(&state), remaining(&state)), (before.clone(), String::new()), "{second}");
            assert_eq!(state.affordable_copies(column(&state, "a1.x4", "z-a"), 9), 3, "{second}");
        }
        let nodes = vec![node(&state, "a1.x8", 2)];
        assert!(replace(&mut state, &set(&[0, 2]), nodes));
        assert_eq!(purchased(&state), ["a1.x4 in z-a: p 1", "a1.x8 in z-a: p 2"]);
        assert_eq!(remaining(&state), "");
        assert_eq!(state.affordable_copies(column(&state, "a1.x4", "z-a"), 9), 3);
    }
    #[test]
    fn promising_nodes_come_first_where_the_pods_are_many() {
        for (pods, come_first) in [(100, false), (101, true)] {
            let mut world = World::new();
            world.pods("p", pods, &json!({}), "1", "1Gi", &json!({}));
            let mut instance = instance(&world);
            let mut state = instance.state(false);
            (0..pods).for_each(|_| purchase(&mut state, "c1.x16", "z-a", &[("p", 1)]));
            let (parts, all) = ([Part { item: item(&state, "p"), count: pods, set: 0 }], all_columns(&state));
            let price = |column: usize| state.column_sets.columns[column].price;
            let scope = Scope { parts: &parts, columns: &|_| all.clone(), price: &price, keeps_rules: &|_| true };
            let kinds = Kinds::of(&state, &scope, usize::MAX).unwrap();
            let mut search = Neighborhoods::new(kinds.clone(), vec![state.demand.value(0)], false);
            // The first nodes that cost less end the search.
            let reached = LowerBound { cost: f64::INFINITY, values: Vec::new() };
            search.search(&mut state, (0..pods).collect(), Some(&reached));
            assert!(state.purchased.len() < pods);
            assert_eq!(search.promising.is_some(), come_first, "{pods} pods");
            // A neighborhood has no other nodes.
            let only = column(&state, "a1.x8", "z-a");
            let nodes = kinds.nodes.iter().filter(|node| node.column == only).cloned().collect();
            search.promising = Some(Kinds { nodes, ..kinds });
            let (nodes, _) = search.repack(&state, &set(&[0, 1]), cheaper_nodes);
            assert!(nodes.unwrap().iter().all(|node| node.column == only));
        }
    }
}
