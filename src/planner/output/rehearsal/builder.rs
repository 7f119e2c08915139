//! What a rehearsal counts: the domains of the keys, the tallies of selectors with the running pods, and the rules of each group.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::rc::Rc;
use std::sync::Arc;

use stowage_model::labels;
use stowage_model::pod_class::PodClass;

use crate::columns::sets::ColumnSets;
use crate::groups::host_rules::add_spread;
use crate::groups::pod_selectors::Selectors;
use crate::input::node::NodeState;
use crate::input::pod::{Daemon, Labels, PodEntry};
use crate::output::rehearsal::rehearsal_terms::{Cell, NOWHERE, Node, Rules, SpreadTally, Tally};
use crate::state::plan_state::PlanState;

/// Numbers the keys, domains and tallies of a plan.
pub(super) struct Builder<'p, 'c> {
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

impl<'p, 'c> Builder<'p, 'c> {
    pub(super) fn new(namespaces: &'p BTreeMap<String, Labels>, columns: &'c [usize]) -> Self {
        Self {
            selectors: Selectors::new(namespaces),
            columns,
            keys: BTreeMap::new(),
            domains: Vec::new(),
            tallies: Vec::new(),
            by_term: BTreeMap::new(),
            spreads: Vec::new(),
            by_spread: HashMap::new(),
            by_selector: HashMap::new(),
        }
    }

    /// The tallies of terms and of spread constraints.
    pub(super) fn tallies(self) -> (Vec<Tally>, Vec<SpreadTally>) {
        let Self { tallies, mut spreads, .. } = self;
        spreads.iter_mut().for_each(SpreadTally::find_least);
        (tallies, spreads)
    }

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
    pub(super) fn rules(&mut self, column_sets: &mut ColumnSets<'_>, class: &PodClass) -> Rules {
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

    /// Tallies of the pods that those of a class keep away.
    pub(super) fn add_refusals(&mut self, column_sets: &ColumnSets<'_>, class: &PodClass) {
        for term in &class.anti_affinity {
            if let Some(selector) = self.selectors.add_term(term) {
                self.tally(column_sets, &term.key, selector);
            }
        }
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
    pub(super) fn count_running(&mut self, column_sets: &ColumnSets<'_>) {
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

    /// Completes the rules of a group, of which this is a pod.
    pub(super) fn raise(&mut self, rules: &mut Rules, pod: &PodEntry) {
        for selector in self.selectors.matching(pod).iter() {
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
    pub(super) fn cells(
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
