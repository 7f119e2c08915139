//! Counts of pods per topology domain: what runs, and what is planned so far.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use stowage_model::labels;
use stowage_model::pod_class::{PodClass, PodTerm, Spread};

use crate::columns::bitset::Bits;
use crate::columns::sets::ColumnSets;
use crate::groups::existing_nodes::ExistingNode;
use crate::groups::group::Group;
use crate::groups::host_rules::add_spread;
use crate::groups::pod_selectors::Selectors;
use crate::groups::topology::domains::{Domains, Key, Room};
use crate::groups::topology::rules::{Counter, Rule, Rules, SpreadRule, rules_of};
use crate::input::node::NodeState;
use crate::input::settings::PreferencePolicy;

/// The topology of a problem.
pub(crate) struct Topology {
    pub keys: Vec<Key>,
    pub counters: Vec<Counter>,
    ids: HashMap<(usize, u32), usize>,
    /// Pods of selector `s` raise these counters.
    by_selector: HashMap<u32, Vec<usize>>,
    pub load: Vec<Vec<i64>>,
    /// Load of all pods together.
    pub weight: i64,
    /// Group, key and rules of the divided groups.
    pub settled: Vec<(usize, usize, Rules)>,
    /// Domains that get a node from other pods, though no pod of some group that counts them fits there.
    pub occupied_domains: Domains,
    pub room: Room,
    /// Seed of random places; `None` for the places of least cost.
    pub scatter: Option<u64>,
}

/// What a spread constraint counts on one key.
struct SpreadDomains {
    base: Vec<i64>,
    occupied: Vec<bool>,
    counted: Bits,
    /// Whether it counts each node; `None` where it counts all nodes and columns.
    nodes: Option<Vec<bool>>,
}

impl Topology {
    /// Collects keys, domains and counts of running pods. A previous iteration found `occupied_domains` to get nodes, and `room` for
    /// pods in domains.
    pub fn new(
        column_sets: &ColumnSets<'_>,
        selectors: &mut Selectors<'_>,
        groups: &[Group],
        occupied_domains: Domains,
        room: Room,
    ) -> Self {
        let problem = column_sets.problem;
        let respect = problem.settings.preference_policy == PreferencePolicy::Respect;
        let mut names: BTreeSet<Arc<str>> = BTreeSet::new();
        for group in groups {
            names.extend(rules_of(&group.class, respect).map(|(key, _)| Arc::clone(key)));
        }
        let running_terms = |class: &PodClass| -> Vec<PodTerm> {
            class.anti_affinity.iter().filter(|t| *t.key != *labels::HOSTNAME).cloned().collect()
        };
        for class in problem.nodes.iter().flat_map(|n| n.pods.exclusive()) {
            names.extend(running_terms(class).into_iter().map(|t| t.key));
        }
        let keys: Vec<Key> = names
            .into_iter()
            .map(|name| {
                let mut by_value: BTreeMap<Arc<str>, Bits> = BTreeMap::new();
                let empty = || Bits::empty(column_sets.columns.len());
                let mut without = empty();
                for column in 0..column_sets.columns.len() {
                    let Some(value) = column_sets.label(column, &name) else {
                        without.insert(column);
                        continue;
                    };
                    if let Some(bits) = by_value.get_mut(value) {
                        bits.insert(column);
                    } else {
                        let mut bits = empty();
                        bits.insert(column);
                        by_value.insert(Arc::from(value), bits);
                    }
                }
                let of_nodes: Vec<Option<&str>> = problem.nodes.iter().map(|node| node.label(&name)).collect();
                for value in of_nodes.iter().flatten() {
                    if !by_value.contains_key(*value) {
                        by_value.insert(Arc::from(*value), empty());
                    }
                }
                let (mut values, mut columns): (Vec<Arc<str>>, Vec<Bits>) = by_value.into_iter().unzip();
                let index = |value: &str| values.binary_search_by(|have| have.as_ref().cmp(value)).ok();
                let of_node: Vec<Option<usize>> = of_nodes.into_iter().map(|value| index(value?)).collect();
                let absent = (!without.is_empty() || of_node.contains(&None)).then_some(values.len());
                if absent.is_some() {
                    values.push(Arc::from(""));
                    columns.push(without);
                }
                Key { name, values, columns, of_node, absent }
            })
            .collect();
        let load = keys.iter().map(|key| vec![0; key.values.len()]).collect();
        let mut topology = Self {
            keys,
            counters: Vec::new(),
            ids: HashMap::new(),
            by_selector: HashMap::new(),
            load,
            weight: groups.iter().map(Group::total_weight).fold(0, i64::saturating_add),
            settled: Vec::new(),
            occupied_domains,
            room,
            scatter: None,
        };
        if topology.keys.is_empty() {
            return topology;
        }
        for group in groups {
            for (key, rule) in rules_of(&group.class, respect) {
                let key = topology.key(key);
                let (selector, hard) = match rule {
                    // Whether a hard spread uses the counter depends on the nodes that the spread counts.
                    Rule::Spread(s) => (add_spread(selectors, &group.class, s), false),
                    Rule::Affinity(_, true) => (selectors.add_required(&group.class.affinity), true),
                    Rule::Anti(t, hard) | Rule::Affinity(t, hard) => (selectors.add_term(t), hard),
                };
                if let Some(selector) = selector {
                    let id = topology.counter(key, selector);
                    topology.counters[id].hard |= hard;
                }
            }
        }
        for class in problem.nodes.iter().flat_map(|n| n.pods.exclusive()) {
            for term in running_terms(class) {
                let key = topology.key(&term.key);
                if let Some(selector) = selectors.add_term(&term) {
                    let id = topology.counter(key, selector);
                    topology.counters[id].hard = true;
                }
            }
        }
        topology.count_running(column_sets, selectors);
        topology
    }

    fn key(&self, name: &Arc<str>) -> usize {
        self.keys.binary_search_by(|key| key.name.cmp(name)).expect("every rule's key was collected")
    }

    fn counter(&mut self, key: usize, selector: u32) -> usize {
        if let Some(id) = self.ids.get(&(key, selector)) {
            return *id;
        }
        let zeros = vec![0; self.keys[key].values.len()];
        self.counters.push(Counter {
            running: zeros.clone(),
            staying: zeros.clone(),
            planned: zeros.clone(),
            refusers: zeros,
            everywhere: 0,
            at: Vec::new(),
            hard: false,
            spread: false,
        });
        let id = self.counters.len() - 1;
        self.ids.insert((key, selector), id);
        self.by_selector.entry(selector).or_default().push(id);
        id
    }

    fn key_of(&self) -> Vec<usize> {
        let mut out = vec![0; self.counters.len()];
        for ((key, _), id) in &self.ids {
            out[*id] = *key;
        }
        out
    }

    fn count_running(&mut self, column_sets: &ColumnSets<'_>, selectors: &mut Selectors<'_>) {
        let key_of = self.key_of();
        for (index, node) in column_sets.problem.nodes.iter().enumerate() {
            let domains: Vec<Option<usize>> = self.keys.iter().map(|key| key.of_node[index]).collect();
            for pod in &node.pods {
                for selector in selectors.matching(pod).iter() {
                    for id in self.by_selector.get(selector).into_iter().flatten() {
                        if let Some(domain) = domains[key_of[*id]] {
                            let counter = &mut self.counters[*id];
                            counter.running[domain] += 1;
                            counter.everywhere += 1;
                            if pod.deleting {
                                continue;
                            }
                            counter.staying[domain] += 1;
                            match counter.at.last_mut() {
                                Some((at, count)) if *at == index => *count += 1,
                                _ => counter.at.push((index, 1)),
                            }
                        }
                    }
                }
                for term in pod.class.anti_affinity.iter().filter(|t| *t.key != *labels::HOSTNAME) {
                    let key = self.key(&term.key);
                    if let (Some(domain), Some(selector)) = (domains[key], selectors.add_term(term)) {
                        let id = self.counter(key, selector);
                        self.counters[id].refusers[domain] += 1;
                    }
                }
            }
        }
    }

    pub(crate) fn rules(
        &self,
        column_sets: &mut ColumnSets<'_>,
        selectors: &mut Selectors<'_>,
        group: &Group,
        key: usize,
    ) -> Rules {
        let respect = column_sets.problem.settings.preference_policy == PreferencePolicy::Respect;
        let mut rules = Rules::default();
        for (name, rule) in rules_of(&group.class, respect) {
            if self.keys[key].name != *name {
                continue;
            }
            let selector = match rule {
                Rule::Spread(s) => add_spread(selectors, &group.class, s),
                Rule::Affinity(_, true) => selectors.add_required(&group.class.affinity),
                Rule::Anti(t, _) | Rule::Affinity(t, _) => selectors.add_term(t),
            };
            let counter = selector.and_then(|s| self.ids.get(&(key, s)).copied());
            let own = selector.is_some_and(|s| group.matches.contains(&s));
            match (rule, counter) {
                (Rule::Spread(spread), Some(counter)) => {
                    let SpreadDomains { base, occupied, counted, nodes } =
                        self.spread_domains(column_sets, &group.class, key, spread, counter);
                    rules.spread.push(SpreadRule {
                        counter,
                        least_counter: counter,
                        own: i64::from(own),
                        max_skew: spread.max_skew,
                        min_domains: usize::try_from(spread.min_domains).unwrap_or(0),
                        hard: spread.hard,
                        base,
                        eligible: occupied.clone(),
                        occupied,
                        counted,
                        counted_nodes: nodes,
                    });
                }
                (Rule::Anti(_, hard), Some(counter)) => rules.anti.push((counter, own, hard)),
                (Rule::Affinity(_, hard), Some(counter)) => rules.affinity.push((counter, own, hard)),
                (Rule::Affinity(_, true), None) => rules.affinity.push((usize::MAX, false, true)),
                (_, None) => {}
            }
        }
        for selector in group.matches.iter() {
            rules.raises.extend(self.ids.get(&(key, *selector)));
        }
        rules
    }

    /// Adds a counter for the pods of `base` that a spread constraint with these counts of running pods counts.
    pub(crate) fn split_counter(&mut self, base: usize, running: &[i64]) -> usize {
        let zeros = vec![0; self.counters[base].planned.len()];
        self.counters.push(Counter {
            running: running.to_vec(),
            staying: running.to_vec(),
            planned: zeros.clone(),
            refusers: zeros,
            everywhere: running.iter().sum(),
            at: Vec::new(),
            hard: false,
            spread: false,
        });
        self.counters.len() - 1
    }

    /// Running pods that a spread constraint counts, the domains that have a node, and the columns and nodes that it counts: nodes that
    /// its inclusion policies admit and that have the labels of all constraints of the pod.
    fn spread_domains(
        &self,
        column_sets: &mut ColumnSets<'_>,
        class: &PodClass,
        key: usize,
        spread: &Spread,
        counter: usize,
    ) -> SpreadDomains {
        let other_keys = class.spread.iter().filter(|s| s.hard == spread.hard && s.key != spread.key);
        let other_keys: Vec<&str> = other_keys.map(|s| &*s.key).filter(|key| **key != *labels::HOSTNAME).collect();
        let everything =
            !spread.honor_taints && (!spread.honor_affinity || class.node_terms.is_empty()) && other_keys.is_empty();
        let mut counted = column_sets.by_terms(if spread.honor_affinity { &class.node_terms } else { &[] });
        if spread.honor_taints {
            counted.and(&column_sets.tolerated(class));
        }
        for other in self.keys.iter().filter(|key| other_keys.contains(&&*key.name)) {
            if let Some(absent) = other.absent {
                let without = &other.columns[absent];
                counted.and(&column_sets.where_column(|column| !without.contains(column)));
            }
        }
        let counts = |node: &NodeState| {
            (!spread.honor_affinity || node.satisfies(&class.node_terms))
                && (!spread.honor_taints || class.untolerated(&node.taints).is_none())
                && other_keys.iter().all(|key| node.label(key).is_some())
        };
        let Key { values, of_node, absent, name, .. } = &self.keys[key];
        let nodes: Option<Vec<bool>> =
            (!everything).then(|| column_sets.problem.nodes.iter().map(|node| counts(node)).collect());
        let is_counted = |node: usize| nodes.as_ref().is_none_or(|counted| counted[node]);
        let mut base = vec![0; values.len()];
        if everything {
            base.clone_from(&self.counters[counter].staying);
        } else {
            for (node, count) in &self.counters[counter].at {
                if let Some(domain) = of_node[*node].filter(|_| is_counted(*node)) {
                    base[domain] += count;
                }
            }
        }
        let mut occupied = vec![false; values.len()];
        for (node, domain) in of_node.iter().enumerate() {
            if let Some(domain) = domain.filter(|domain| !occupied[*domain]) {
                occupied[domain] = is_counted(node);
            }
        }
        if !self.occupied_domains.is_empty() {
            for (domain, columns) in self.keys[key].columns.iter().enumerate() {
                let here = (Arc::clone(name), Arc::clone(&values[domain]));
                occupied[domain] |= self.occupied_domains.contains(&here) && !counted.intersection(columns).is_empty();
            }
        }
        if let Some(absent) = absent {
            occupied[*absent] = false;
        }
        SpreadDomains { base, occupied, counted, nodes }
    }

    /// Whether a node is in a domain.
    pub fn in_domain(&self, node: &ExistingNode<'_>, key: usize, domain: usize) -> bool {
        let key = &self.keys[key];
        key.of_node[node.index].or(key.absent) == Some(domain)
    }
}
