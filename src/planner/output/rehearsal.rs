//! Rehearses how kube-scheduler binds the pods of a plan: one at a time, in whatever order its queue has them. Pods that orders leave
//! without their planned node are withdrawn from the plan: they are planned again when the others are bound.
//!
//! Spread over two keys, and constraints that select pods of each other, can come to a standstill: each remaining pod waits for the count that
//! another remaining pod would raise. Of a small plan, all pods that any rehearsed order leaves are withdrawn. In a large plan of many such
//! constraints, each order leaves a few others: only pods that most orders leave are withdrawn.
//!
//! The topology stage decides counts per domain; this stage sees the nodes that the pods got, all keys and the host name, and every running pod.

mod builder;
mod rehearsal_terms;

use std::collections::{BTreeMap, HashMap, VecDeque};

use stowage_model::pod_class::PodClass;

use crate::groups::topology::divide::mix;
use crate::output::pod_cursor::Turn;
use crate::output::rehearsal::builder::Builder;
use crate::output::rehearsal::rehearsal_terms::{Cell, NOWHERE, Node, Rules, SpreadTally, Tally};
use crate::state::demand::pattern::remove_pods;
use crate::state::plan_state::PlanState;

/// Orders that are rehearsed.
const ORDERS: u64 = 64;
/// The order in which each cell binds one pod, then each of them the next.
const ONE_BY_ONE: u64 = 1;
/// Checks of one pod on one node, over all orders of a rehearsal. A larger plan is rehearsed in fewer orders, or in part.
const MAX_CHECKS: usize = 200_000;
/// Pods with rules up to which a plan is small.
const SMALL: usize = 200;
/// Rehearsals, each without the pods that the one before withdrew.
const MAX_REHEARSALS: usize = 20;
/// Nodes times rules up to which plans are rehearsed: each rule counts pods by domain, and the host name has a domain for each node.
const MAX_COUNTED: usize = 2_000_000;

/// Withdraws pods that kube-scheduler binds in some orders only. Returns an order in which it can bind the others one after the other, as far as
/// rehearsed; empty where any order will do. Requires that merged items are split.
pub(crate) fn withdraw_unbindable(state: &mut PlanState<'_, '_>) -> Vec<Turn> {
    for _ in 0..MAX_REHEARSALS {
        let Some(rehearsal) = Rehearsal::of(state) else { return Vec::new() };
        let left = rehearsal.left();
        if left.iter().all(|left| *left == 0) {
            return rehearsal.turns();
        }
        for (cell, left) in rehearsal.cells.into_iter().zip(left) {
            withdraw(state, &cell.places, left);
        }
        remove_empty(state);
    }
    Vec::new()
}

fn withdraw(state: &mut PlanState<'_, '_>, places: &[(Node, usize, usize)], mut left: usize) {
    for (node, item, count) in places.iter().rev() {
        let removed = left.min(*count);
        if removed == 0 {
            return;
        }
        let pattern = match node {
            Node::Existing(at) => &mut state.placements[*at].1,
            Node::New(at) => &mut state.purchased[*at].pattern,
        };
        remove_pods(pattern, *item, removed);
        state.demand.restore(&[(*item, removed)]);
        state.unbindable.insert(*item);
        left -= removed;
    }
}

/// Removes nodes without pods from the purchases.
fn remove_empty(state: &mut PlanState<'_, '_>) {
    state.placements.retain(|(_, pattern)| !pattern.is_empty());
    let empty: Vec<usize> =
        state.purchased.iter().filter(|node| node.pattern.is_empty()).map(|node| node.column).collect();
    state.purchased.retain(|node| !node.pattern.is_empty());
    for column in empty {
        state.refund(column);
    }
}

struct Rehearsal {
    cells: Vec<Cell>,
    /// By group.
    rules: HashMap<usize, Rules>,
    tallies: Vec<Tally>,
    spreads: Vec<SpreadTally>,
}

impl Rehearsal {
    /// `None` where every order binds every pod.
    fn of(state: &mut PlanState<'_, '_>) -> Option<Self> {
        let placed = placed(state);
        let groups = state.demand.groups;
        let classes: BTreeMap<usize, &PodClass> = placed.keys().map(|group| (*group, &*groups[*group].class)).collect();
        let is_ruled = |class: &PodClass| {
            class.spread.iter().any(|spread| spread.hard)
                || !class.affinity.is_empty()
                || !class.anti_affinity.is_empty()
        };
        if !classes.values().any(|class| is_ruled(class)) {
            return None;
        }
        let problem = state.column_sets.problem;
        let running = || problem.nodes.iter().flat_map(|node| node.pods.exclusive());
        let of_class = |class: &&PodClass| class.spread.len() + class.affinity.len() + class.anti_affinity.len();
        let rules = classes.values().map(of_class).sum::<usize>() + running().count();
        if (problem.nodes.len() + state.purchased.len()).saturating_mul(rules) > MAX_COUNTED {
            return None;
        }
        let columns: Vec<usize> = state.purchased.iter().map(|node| node.column).collect();
        let mut builder = Builder::new(&problem.namespaces, &columns);
        let mut rules: HashMap<usize, Rules> = HashMap::new();
        for (group, class) in &classes {
            rules.insert(*group, builder.rules(state.column_sets, class));
        }
        for class in running().chain(problem.daemons.iter().map(|daemon| &daemon.class)) {
            builder.add_refusals(state.column_sets, class);
        }
        builder.count_running(state.column_sets);
        for (group, rules) in &mut rules {
            let sample = &problem.pods[groups[*group].pods[0]];
            builder.raise(rules, sample);
        }
        let cells = builder.cells(&rules, placed, state);
        let (tallies, spreads) = builder.tallies();
        Some(Self { cells, rules, tallies, spreads })
    }

    /// By cell: the pods to withdraw.
    fn left(&self) -> Vec<usize> {
        let mut by_order: Vec<Vec<usize>> = Vec::new();
        let mut checks = MAX_CHECKS;
        for order in 0..ORDERS {
            let left = self.bind_all(order, &mut checks, |_| ());
            if checks == 0 {
                break;
            }
            by_order.push(left);
        }
        let is_small = self.cells.iter().map(|cell| cell.pods).sum::<usize>() <= SMALL;
        let of_cell = |cell: usize| {
            let mut left: Vec<usize> = by_order.iter().map(|left| left[cell]).collect();
            left.sort_unstable();
            let median = left.len().saturating_sub(1) / 2;
            if is_small { left.last() } else { left.get(median) }.copied().unwrap_or(0)
        };
        (0..self.cells.len()).map(of_cell).collect()
    }

    /// The places of the pods in an order in which they can be bound, the domains in turn.
    fn turns(&self) -> Vec<Turn> {
        let mut next: HashMap<usize, usize> = HashMap::new();
        let mut places: Vec<_> = self.cells.iter().map(|_| VecDeque::new()).collect();
        let in_cells = self.cells.iter().enumerate();
        let mut in_plan: Vec<_> =
            in_cells.flat_map(|(at, cell)| cell.places.iter().map(move |place| (place, at))).collect();
        in_plan.sort_unstable();
        for ((_, item, count), cell) in in_plan {
            let from = next.entry(*item).or_default();
            places[cell].extend((*from..*from + count).map(|pod| Turn { item: *item, pod }));
            *from += count;
        }
        let mut out = Vec::new();
        let mut checks = MAX_CHECKS;
        self.bind_all(ONE_BY_ONE, &mut checks, |cell| out.extend(places[cell].pop_front()));
        out
    }

    /// Binds pods until none can be bound; returns how many are left in each cell. `bound` is called with the cell of each pod that is bound.
    fn bind_all(&self, order: u64, checks: &mut usize, mut bound: impl FnMut(usize)) -> Vec<usize> {
        let (mut tallies, mut spreads) = (self.tallies.clone(), self.spreads.clone());
        let mut left: Vec<usize> = self.cells.iter().map(|cell| cell.pods).collect();
        let mut cells: Vec<usize> = (0..self.cells.len()).collect();
        let mut round = 0;
        loop {
            let mut progress = false;
            if order > ONE_BY_ONE {
                round += 1;
                cells.sort_by_key(|cell| mix(mix(order, round), *cell as u64));
            }
            for cell in &cells {
                // All at once, one by one, or any number.
                let mut pods = match order {
                    0 => left[*cell],
                    ONE_BY_ONE => left[*cell].min(1),
                    _ => left[*cell].min(1 + (mix(round ^ order, *cell as u64) % 8) as usize),
                };
                while pods > 0 {
                    *checks = checks.saturating_sub(1);
                    if *checks == 0 {
                        return left;
                    }
                    if !self.is_allowed(&self.cells[*cell], &tallies, &spreads) {
                        break;
                    }
                    self.bind(&self.cells[*cell], &mut tallies, &mut spreads);
                    bound(*cell);
                    left[*cell] -= 1;
                    pods -= 1;
                    progress = true;
                }
            }
            cells.retain(|cell| left[*cell] > 0);
            if !progress || cells.is_empty() {
                return left;
            }
        }
    }

    /// Whether kube-scheduler accepts a pod of the cell on its node now.
    fn is_allowed(&self, cell: &Cell, tallies: &[Tally], spreads: &[SpreadTally]) -> bool {
        let rules = &self.rules[&cell.group];
        let level = |(at, own, max_skew, min_domains): &(usize, bool, i64, usize)| {
            let tally = &spreads[*at];
            let domain = cell.domains[tally.key];
            let least = if tally.eligible.len() < *min_domains { 0 } else { tally.least.0 };
            domain != NOWHERE && tally.pods[domain] + i64::from(*own) - least <= *max_skew
        };
        let here = |at: &usize| {
            let domain = cell.domains[tallies[*at].key];
            if domain == NOWHERE { 0 } else { tallies[*at].pods[domain] }
        };
        let refused = |at: &usize| {
            let domain = cell.domains[tallies[*at].key];
            domain != NOWHERE && tallies[*at].refusers[domain] > 0
        };
        let together = rules.affinity.as_ref().is_none_or(|(terms, own)| {
            let labeled = terms.iter().all(|at| cell.domains[tallies[*at].key] != NOWHERE);
            let first = *own && terms.iter().all(|at| tallies[*at].everywhere == 0);
            labeled && (first || terms.iter().all(|at| here(at) > 0))
        });
        together
            && rules.spread.iter().all(level)
            && rules.anti.iter().all(|at| here(at) == 0)
            && !rules.raises.iter().any(refused)
    }

    fn bind(&self, cell: &Cell, tallies: &mut [Tally], spreads: &mut [SpreadTally]) {
        let rules = &self.rules[&cell.group];
        for at in &rules.raises {
            let tally = &mut tallies[*at];
            if let Some(pods) = tally.pods.get_mut(cell.domains[tally.key]) {
                *pods += 1;
                tally.everywhere += 1;
            }
        }
        for at in &rules.anti {
            let tally = &mut tallies[*at];
            if let Some(refusers) = tally.refusers.get_mut(cell.domains[tally.key]) {
                *refusers += 1;
            }
        }
        for at in &cell.counted {
            let tally = &mut spreads[*at];
            tally.add(cell.domains[tally.key]);
        }
    }
}

/// Nodes, items and pods by group, in the order of the plan.
fn placed(state: &PlanState<'_, '_>) -> BTreeMap<usize, Vec<(Node, usize, usize)>> {
    let mut out: BTreeMap<usize, Vec<(Node, usize, usize)>> = BTreeMap::new();
    let existing = state.placements.iter().enumerate().map(|(at, (_, pattern))| (Node::Existing(at), pattern));
    let new = state.purchased.iter().enumerate().map(|(at, node)| (Node::New(at), &node.pattern));
    for (node, pattern) in existing.chain(new) {
        for (item, count) in pattern {
            out.entry(state.demand.items[*item].group).or_default().push((node, *item, *count));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::output::rehearsal::withdraw_unbindable;
    use crate::state::plan_state::{PlanState, PurchasedNode};
    use crate::test_support::plan_stages::{column, instance};
    use crate::test_support::{HOST, World, ZONE, affinity, spread};

    /// Purchases a node in a zone for pods, those that the topology stage assigned there if there are any.
    fn purchase_in(state: &mut PlanState<'_, '_>, zone: &str, count: usize) {
        let column = column(state, "a1.x4", zone);
        let is_elsewhere = |item: &usize| {
            let pool = &state.demand.column_pools[state.demand.items[*item].column_pool];
            !state.column_sets.sets[pool.levels[0]].bits.contains(column)
        };
        let items = 0..state.demand.items.len();
        let enough = items.filter(|item| state.demand.items[*item].remaining >= count);
        let item = enough.min_by_key(is_elsewhere).unwrap();
        state.purchase(PurchasedNode { column, pattern: vec![(item, count)] }, 1);
    }

    /// The pods that remain in each zone of a plan for six pods with this rule, and the pods that were withdrawn.
    fn rehearsed(rule: &Value, zones: &[(&str, usize)], running: &[(&Value, &Value)]) -> (Vec<usize>, usize) {
        let mut world = World::with_pools(&[("default", json!({"limits": {"cpu": "100"}}))]);
        if !running.is_empty() {
            world.node("n", "z-a", 8, running).schedulable = false;
        }
        world.pods("p", 6, &json!({"app": "p"}), "500m", "1Gi", rule);
        let mut instance = instance(&world);
        let mut state = instance.state(false);
        for (zone, count) in zones {
            purchase_in(&mut state, zone, *count);
        }
        state.split_merged();
        let before = state.demand.remaining();
        withdraw_unbindable(&mut state);
        let unspent = state.affordable_copies(column(&state, "a1.x4", "z-a"), 100);
        assert_eq!(unspent, 25 - state.purchased.len(), "nodes that became empty are not paid for");
        let left = state.purchased.iter().map(|node| node.pattern.iter().map(|(_, count)| count).sum()).collect();
        (left, state.demand.remaining() - before)
    }

    #[test]
    fn pods_beyond_the_skew_are_withdrawn() {
        let labels = json!({"app": "p"});
        let rule = spread(ZONE, &labels, &json!({}));
        assert_eq!(rehearsed(&rule, &[("z-a", 2), ("z-b", 1)], &[]), (vec![2, 1], 0));
        assert_eq!(rehearsed(&rule, &[("z-a", 2), ("z-b", 1)], &[(&labels, &json!({}))]), (vec![1, 1], 1));
        // The second of the pods in z-a could only bind when z-b has one, and no pod is in z-c.
        assert_eq!(rehearsed(&rule, &[("z-a", 2), ("z-b", 2)], &[]), (vec![2, 2], 0));
        let in_three = spread(ZONE, &labels, &json!({"minDomains": 3}));
        assert_eq!(rehearsed(&in_three, &[("z-a", 2), ("z-b", 2)], &[]), (vec![1, 1], 2));
    }

    #[test]
    fn pods_that_exclude_each_other_are_withdrawn() {
        let labels = json!({"app": "p"});
        let rule = affinity("podAntiAffinity", ZONE, &labels);
        assert_eq!(rehearsed(&rule, &[("z-a", 1), ("z-b", 1)], &[]), (vec![1, 1], 0));
        let guard = affinity("podAntiAffinity", ZONE, &labels);
        let other = json!({"app": "other"});
        assert_eq!(
            rehearsed(&rule, &[("z-a", 1), ("z-b", 1)], &[(&other, &guard)]),
            (vec![1], 1),
            "the empty node is gone"
        );
        let on_host = affinity("podAntiAffinity", HOST, &labels);
        assert_eq!(rehearsed(&on_host, &[("z-a", 1), ("z-a", 1)], &[]), (vec![1, 1], 0));
    }

    #[test]
    fn pods_without_the_company_that_they_require_are_withdrawn() {
        let labels = json!({"app": "p"});
        let rule = affinity("podAffinity", ZONE, &labels);
        assert_eq!(rehearsed(&rule, &[("z-b", 2)], &[]), (vec![2], 0), "the first pod is company for the second");
        assert_eq!(rehearsed(&rule, &[("z-b", 2)], &[(&labels, &json!({}))]), (vec![], 2), "their company is in z-a");
    }
}
