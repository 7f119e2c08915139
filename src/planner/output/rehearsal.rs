//! Rehearses how kube-scheduler binds the pods of a plan: one at a time, in whatever order its queue has them. Pods that orders leave
//! without their planned node are withdrawn from the plan: they are planned again when the others are bound.
//!
//! Spread over two keys, and constraints that select pods of each other, can come to a standstill: each remaining pod waits for the count that
//! another remaining pod would raise. Of a small plan, all pods that any rehearsed order leaves are withdrawn. In a large plan of many such
//! constraints, each order leaves a few others: only pods that most orders leave are withdrawn.
//!
//! The topology stage decides counts per domain; this stage sees the nodes that the pods got, all keys and the host name, and every running pod.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::rc::Rc;
use std::sync::Arc;

use crate::model::labels;
use crate::model::pod_class::PodClass;
use crate::planner::columns::sets::ColumnSets;
use crate::planner::groups::host_rules::add_spread;
use crate::planner::groups::selectors::Selectors;
use crate::planner::groups::topology::divide::mix;
use crate::planner::input::node::NodeState;
use crate::planner::input::pod::{Daemon, PodEntry};
use crate::planner::state::demand::pattern::remove_pods;
use crate::planner::state::plan_state::PlanState;

/// Orders that are rehearsed.
const ORDERS: u64 = 64;
/// Checks of one pod on one node, over all orders of a rehearsal. A larger plan is rehearsed in fewer orders, or in part.
const MAX_CHECKS: usize = 200_000;
/// Pods with rules up to which a plan is small.
const SMALL: usize = 200;
/// Rehearsals, each without the pods that the one before withdrew.
const MAX_REHEARSALS: usize = 20;
/// Nodes times rules up to which plans are rehearsed: each rule counts pods by domain, and the host name has a domain for each node.
const MAX_COUNTED: usize = 2_000_000;

/// Domain of a node without the label.
const NOWHERE: usize = usize::MAX;

/// Withdraws pods that kube-scheduler binds in some orders only. Requires that merged items are split.
pub(crate) fn withdraw_unbindable(state: &mut PlanState<'_, '_>) {
    for _ in 0..MAX_REHEARSALS {
        let Some(rehearsal) = Rehearsal::of(state) else { return };
        let left = rehearsal.left();
        if left.iter().all(|left| *left == 0) {
            return;
        }
        for (cell, left) in rehearsal.cells.into_iter().zip(left) {
            withdraw(state, &cell.places, left);
        }
        remove_empty(state);
    }
}

/// Where pods are: a node of the plan.
#[derive(Clone, Copy)]
enum Node {
    /// Index into the placements.
    Existing(usize),
    /// Index into the purchased nodes.
    New(usize),
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

/// Pods of one group whose nodes no rule of the group distinguishes.
struct Cell {
    group: usize,
    /// Domain by key.
    domains: Rc<[usize]>,
    /// The spread constraints that count the pods here, as indexes of tallies.
    counted: Vec<usize>,
    pods: usize,
    /// Node, item and number of pods.
    places: Vec<(Node, usize, usize)>,
}

/// Pods of a selector by domain of a key.
#[derive(Clone)]
struct Tally {
    key: usize,
    pods: Vec<i64>,
    everywhere: i64,
    /// Pods whose required anti-affinity excludes the selected pods.
    refusers: Vec<i64>,
}

/// Pods that a spread constraint counts.
#[derive(Clone)]
struct SpreadTally {
    key: usize,
    /// Whether it counts each node.
    nodes: Rc<[bool]>,
    pods: Vec<i64>,
    /// Domains with a counted node.
    eligible: Rc<[usize]>,
    /// The least count of the eligible domains, and how many have it.
    least: (i64, usize),
}

impl SpreadTally {
    fn find_least(&mut self) {
        let counts = || self.eligible.iter().map(|domain| self.pods[*domain]);
        let least = counts().min().unwrap_or(0);
        self.least = (least, counts().filter(|count| *count == least).count());
    }

    fn add(&mut self, domain: usize) {
        self.pods[domain] += 1;
        if self.pods[domain] == self.least.0 + 1 && self.eligible.binary_search(&domain).is_ok() {
            self.least.1 -= 1;
            if self.least.1 == 0 {
                self.find_least();
            }
        }
    }
}

/// What binding a pod of a group requires and changes, as indexes of tallies.
#[derive(Default)]
struct Rules {
    /// Tally, whether the constraint selects the pod itself, `maxSkew`, `minDomains`.
    spread: Vec<(usize, bool, i64, usize)>,
    anti: Vec<usize>,
    /// Tallies of the required terms, and whether all of them select the pod itself.
    affinity: Option<(Vec<usize>, bool)>,
    /// Tallies of the selectors that select it.
    raises: Vec<usize>,
    /// The same of spread constraints.
    raises_spread: Vec<usize>,
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
        let mut builder = Builder {
            selectors: Selectors::new(&problem.namespaces),
            columns: &columns,
            keys: BTreeMap::new(),
            domains: Vec::new(),
            tallies: Vec::new(),
            by_term: BTreeMap::new(),
            spreads: Vec::new(),
            by_spread: HashMap::new(),
            by_selector: HashMap::new(),
        };
        let mut rules: HashMap<usize, Rules> = HashMap::new();
        for (group, class) in &classes {
            rules.insert(*group, builder.rules(state.column_sets, class));
        }
        for class in running().chain(problem.daemons.iter().map(|daemon| &daemon.class)) {
            for term in &class.anti_affinity {
                if let Some(selector) = builder.selectors.add_term(term) {
                    builder.tally(state.column_sets, &term.key, selector);
                }
            }
        }
        builder.count_running(state.column_sets);
        for (group, rules) in &mut rules {
            let sample = &problem.pods[groups[*group].pods[0]];
            let matches = builder.selectors.matching(sample);
            builder.raise(rules, &matches);
        }
        let cells = builder.cells(&rules, placed, state);
        let Builder { tallies, mut spreads, .. } = builder;
        spreads.iter_mut().for_each(SpreadTally::find_least);
        Some(Self { cells, rules, tallies, spreads })
    }

    /// By cell: the pods to withdraw.
    fn left(&self) -> Vec<usize> {
        let mut by_order: Vec<Vec<usize>> = Vec::new();
        let mut checks = MAX_CHECKS;
        for order in 0..ORDERS {
            let left = self.bind_all(order, &mut checks);
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

    /// Binds pods until none can be bound; returns how many are left in each cell.
    fn bind_all(&self, order: u64, checks: &mut usize) -> Vec<usize> {
        let (mut tallies, mut spreads) = (self.tallies.clone(), self.spreads.clone());
        let mut left: Vec<usize> = self.cells.iter().map(|cell| cell.pods).collect();
        let mut cells: Vec<usize> = (0..self.cells.len()).collect();
        let mut round = 0;
        loop {
            let mut progress = false;
            if order > 1 {
                round += 1;
                cells.sort_by_key(|cell| mix(mix(order, round), *cell as u64));
            }
            for cell in &cells {
                // All at once, one by one, or any number.
                let mut pods = match order {
                    0 => left[*cell],
                    1 => left[*cell].min(1),
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

struct Builder<'p, 'c> {
    selectors: Selectors<'p>,
    /// Columns of the new nodes, which come after the existing ones.
    columns: &'c [usize],
    keys: BTreeMap<Arc<str>, usize>,
    /// By key and node.
    domains: Vec<Vec<usize>>,
    tallies: Vec<Tally>,
    by_term: BTreeMap<(usize, u32), usize>,
    spreads: Vec<SpreadTally>,
    by_spread: HashMap<(usize, u32, Rc<[bool]>), usize>,
    /// Tallies of each selector: of terms, and of spread constraints.
    by_selector: HashMap<u32, (Vec<usize>, Vec<usize>)>,
}

impl Builder<'_, '_> {
    fn key(&mut self, column_sets: &ColumnSets<'_>, name: &Arc<str>) -> usize {
        if let Some(key) = self.keys.get(name) {
            return *key;
        }
        let nodes = &column_sets.problem.nodes;
        let mut values: HashMap<String, usize> = HashMap::new();
        let mut domains = Vec::with_capacity(nodes.len() + self.columns.len());
        let on_host = **name == *labels::HOSTNAME;
        for at in 0..nodes.len() + self.columns.len() {
            let label = match nodes.get(at) {
                Some(node) => node.label(name).map(str::to_owned),
                None if on_host => Some(format!("{at} is new")),
                None => column_sets.label(self.columns[at - nodes.len()], name).map(str::to_owned),
            };
            let next = values.len();
            domains.push(label.map_or(NOWHERE, |label| *values.entry(label).or_insert(next)));
        }
        self.domains.push(domains);
        self.keys.insert(Arc::clone(name), self.domains.len() - 1);
        self.domains.len() - 1
    }

    fn zeros(&self, key: usize) -> Vec<i64> {
        let domains = self.domains[key].iter().filter(|domain| **domain != NOWHERE);
        vec![0; domains.max().map_or(0, |last| last + 1)]
    }

    fn tally(&mut self, column_sets: &ColumnSets<'_>, key: &Arc<str>, selector: u32) -> usize {
        let key = self.key(column_sets, key);
        if let Some(at) = self.by_term.get(&(key, selector)) {
            return *at;
        }
        let zeros = self.zeros(key);
        self.tallies.push(Tally { key, pods: zeros.clone(), everywhere: 0, refusers: zeros });
        let at = self.tallies.len() - 1;
        self.by_term.insert((key, selector), at);
        self.by_selector.entry(selector).or_default().0.push(at);
        at
    }

    /// The rules of a class.
    fn rules(&mut self, column_sets: &mut ColumnSets<'_>, class: &PodClass) -> Rules {
        let mut rules = Rules::default();
        for spread in class.spread.iter().filter(|spread| spread.hard) {
            let Some(selector) = add_spread(&mut self.selectors, class, spread) else { continue };
            let key = self.key(column_sets, &spread.key);
            let nodes = self.counted(column_sets, class, (spread.honor_affinity, spread.honor_taints));
            let known = self.by_spread.get(&(key, selector, Rc::clone(&nodes))).copied();
            let at = known.unwrap_or_else(|| {
                let eligible: BTreeSet<usize> =
                    nodes.iter().zip(&self.domains[key]).filter(|(counted, _)| **counted).map(|(_, d)| *d).collect();
                let pods = self.zeros(key);
                self.spreads.push(SpreadTally {
                    key,
                    nodes: Rc::clone(&nodes),
                    pods,
                    eligible: eligible.into_iter().collect(),
                    least: (0, 0),
                });
                let at = self.spreads.len() - 1;
                self.by_spread.insert((key, selector, nodes), at);
                self.by_selector.entry(selector).or_default().1.push(at);
                at
            });
            let min_domains = usize::try_from(spread.min_domains).unwrap_or(0);
            // Whether it selects the pod itself is known when all selectors are.
            rules.spread.push((at, false, spread.max_skew, min_domains));
        }
        for term in &class.anti_affinity {
            if let Some(selector) = self.selectors.add_term(term) {
                rules.anti.push(self.tally(column_sets, &term.key, selector));
            }
        }
        if let Some(selector) = self.selectors.add_required(&class.affinity) {
            let terms = class.affinity.iter().map(|term| self.tally(column_sets, &term.key, selector)).collect();
            rules.affinity = Some((terms, false));
        }
        rules
    }

    /// Whether a spread constraint with these inclusion policies counts each node.
    fn counted(
        &self,
        column_sets: &mut ColumnSets<'_>,
        class: &PodClass,
        (honor_affinity, honor_taints): (bool, bool),
    ) -> Rc<[bool]> {
        let keys: Vec<&Arc<str>> = class.spread.iter().filter(|spread| spread.hard).map(|spread| &spread.key).collect();
        let mut bits = column_sets.by_terms(if honor_affinity { &class.node_terms } else { &[] });
        if honor_taints {
            bits.and(&column_sets.tolerated(class));
        }
        let of_node = |node: &Arc<NodeState>| {
            (!honor_affinity || node.satisfies(&class.node_terms))
                && (!honor_taints || class.untolerated(&node.taints).is_none())
                && keys.iter().all(|key| node.label(key).is_some())
        };
        let of_column = |column: usize| {
            let labeled = |key: &&Arc<str>| ***key == *labels::HOSTNAME || column_sets.label(column, key).is_some();
            bits.contains(column) && keys.iter().all(labeled)
        };
        let existing = column_sets.problem.nodes.iter().map(of_node);
        existing.chain(self.columns.iter().map(|column| of_column(*column))).collect()
    }

    /// Counts the pods that run, and those of DaemonSets on new nodes.
    fn count_running(&mut self, column_sets: &ColumnSets<'_>) {
        for (index, node) in column_sets.problem.nodes.iter().enumerate() {
            for pod in &node.pods {
                self.count(index, pod);
            }
        }
        let daemons: Vec<PodEntry> = column_sets.problem.daemons.iter().map(Daemon::pod).collect();
        for (at, column) in self.columns.iter().enumerate() {
            for daemon in column_sets.daemons(*column) {
                self.count(column_sets.problem.nodes.len() + at, &daemons[*daemon]);
            }
        }
    }

    fn count(&mut self, node: usize, pod: &PodEntry) {
        for selector in self.selectors.matching(pod).iter() {
            let Some((terms, spreads)) = self.by_selector.get(selector) else { continue };
            for at in terms {
                let tally = &mut self.tallies[*at];
                if let Some(pods) = tally.pods.get_mut(self.domains[tally.key][node]) {
                    *pods += 1;
                    tally.everywhere += 1;
                }
            }
            for at in spreads.iter().filter(|_| !pod.deleting) {
                let tally = &mut self.spreads[*at];
                if tally.nodes[node] {
                    tally.pods[self.domains[tally.key][node]] += 1;
                }
            }
        }
        for term in &pod.class.anti_affinity {
            if let Some(selector) = self.selectors.add_term(term) {
                let tally = &mut self.tallies[self.by_term[&(self.keys[&term.key], selector)]];
                if let Some(refusers) = tally.refusers.get_mut(self.domains[tally.key][node]) {
                    *refusers += 1;
                }
            }
        }
    }

    /// Completes the rules of a group whose pods these selectors select.
    fn raise(&self, rules: &mut Rules, matches: &[u32]) {
        for selector in matches {
            if let Some((terms, spreads)) = self.by_selector.get(selector) {
                rules.raises.extend(terms);
                rules.raises_spread.extend(spreads);
            }
        }
        for (at, own, _, _) in &mut rules.spread {
            *own = rules.raises_spread.contains(at);
        }
        if let Some((terms, own)) = &mut rules.affinity {
            *own = terms.iter().all(|at| rules.raises.contains(at));
        }
    }

    /// The cells of the groups that rules concern.
    fn cells(
        &self,
        rules: &HashMap<usize, Rules>,
        placed: BTreeMap<usize, Vec<(Node, usize, usize)>>,
        state: &PlanState<'_, '_>,
    ) -> Vec<Cell> {
        let existing = state.column_sets.problem.nodes.len();
        let mut out: Vec<Cell> = Vec::new();
        for (group, places) in placed {
            let Rules { spread, anti, affinity, raises, raises_spread } = &rules[&group];
            let terms = affinity.iter().flat_map(|(terms, _)| terms).chain(anti).chain(raises);
            let of_spreads = spread.iter().map(|(at, ..)| at).chain(raises_spread).map(|at| self.spreads[*at].key);
            let keys: BTreeSet<usize> = terms.map(|at| self.tallies[*at].key).chain(of_spreads).collect();
            if keys.is_empty() {
                continue;
            }
            let mut known: HashMap<(Vec<usize>, Vec<usize>), usize> = HashMap::new();
            for (node, item, count) in places {
                let at = match node {
                    Node::Existing(at) => state.existing[state.placements[at].0].index,
                    Node::New(at) => existing + at,
                };
                // Keys that no rule of the group refers to distinguish no nodes.
                let domain = |key: usize| if keys.contains(&key) { self.domains[key][at] } else { NOWHERE };
                let domains: Vec<usize> = (0..self.domains.len()).map(domain).collect();
                let counted: Vec<usize> =
                    raises_spread.iter().copied().filter(|spread| self.spreads[*spread].nodes[at]).collect();
                let cell = *known.entry((domains, counted)).or_insert_with_key(|(domains, counted)| {
                    let domains = domains.as_slice().into();
                    out.push(Cell { group, domains, counted: counted.clone(), pods: 0, places: Vec::new() });
                    out.len() - 1
                });
                out[cell].pods += count;
                out[cell].places.push((node, item, count));
            }
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::planner::output::rehearsal::withdraw_unbindable;
    use crate::planner::state::plan_state::{PlanState, PurchasedNode};
    use crate::test_support::plan_stages::{column, instance};
    use crate::test_support::planner::{HOST, World, ZONE, affinity, spread};

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
