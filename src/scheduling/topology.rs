//! Topology on counts per domain, before any node is filled: every group that a rule on a zone (or any other key but the
//! host name) concerns is divided over that key's domains. What leaves here is pinned to its domains and needs no
//! further topology check but the host's.
//!
//! kube-scheduler binds the pods in any order, so the division is one that every order reaches: counts of a spread
//! selector are kept level over all pods it selects, whether they carry the constraint or not.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use super::bits::Bits;
use super::class::{PodClass, PodTerm};
use super::existing::{self, Existing};
use super::groups::{Group, add_spread};
use super::problem::PreferencePolicy;
use super::selectors::Selectors;
use super::universe::Universe;
use crate::api::labels;

/// A group's pods that share their domains.
#[derive(Clone, Debug)]
pub(super) struct Part {
    pub group: usize,
    /// Key and value index of each domain it is pinned to.
    pub pins: Vec<(usize, usize)>,
    pub count: usize,
    /// Why these pods can go nowhere.
    pub refused: Option<String>,
}

/// A topology key and its domains.
#[derive(Debug)]
pub(super) struct Key {
    pub name: Arc<str>,
    pub values: Vec<Arc<str>>,
    /// Columns of each value.
    pub columns: Vec<Bits>,
}

/// Counts of the pods that a selector selects, by domain of a key.
struct Counter {
    running: Vec<i64>,
    planned: Vec<i64>,
    /// Pods that run or are planned in the domain and refuse, by required anti-affinity, what the selector selects.
    refusers: Vec<i64>,
    /// Running pods selected, by node.
    at: Vec<(usize, i64)>,
    /// Some rule that must hold uses it.
    hard: bool,
    /// Some spread constraint that must hold uses it.
    spread: bool,
}

impl Counter {
    fn total(&self, domain: usize) -> i64 {
        self.running[domain] + self.planned[domain]
    }

    fn anywhere(&self) -> bool {
        self.running.iter().chain(&self.planned).any(|n| *n > 0)
    }
}

struct SpreadRule {
    counter: usize,
    own: i64,
    max_skew: i64,
    min_domains: usize,
    hard: bool,
    /// Running pods that count, by domain.
    base: Vec<i64>,
    /// Domains that count for the minimum.
    eligible: Vec<bool>,
    /// Columns whose nodes would make their domain count, whether the pod fits there or not.
    counted: Bits,
}

/// A group's rules on one key.
#[derive(Default)]
struct Rules {
    spread: Vec<SpreadRule>,
    /// Counter, whether the pod itself is selected, required.
    anti: Vec<(usize, bool, bool)>,
    affinity: Vec<(usize, bool, bool)>,
    raises: Vec<usize>,
}

impl Rules {
    fn concern(&self, counters: &[Counter]) -> bool {
        !self.spread.is_empty()
            || !self.anti.is_empty()
            || !self.affinity.is_empty()
            || self.raises.iter().any(|c| counters[*c].hard)
    }
}

/// The topology of a problem.
pub(super) struct Topology {
    pub keys: Vec<Key>,
    counters: Vec<Counter>,
    ids: HashMap<(usize, u32), usize>,
    /// Pods of selector `s` raise these counters.
    by_selector: HashMap<u32, Vec<usize>>,
    load: Vec<Vec<i64>>,
    /// Rules of the groups that were divided, by key.
    settled: Vec<(usize, usize, Rules)>,
    /// Domains that will have a node, though no pod of some group that counts them can go there.
    peopled: Domains,
}

/// Values of topology keys.
pub(super) type Domains = BTreeSet<(Arc<str>, Arc<str>)>;

fn rules_of(class: &PodClass, respect: bool) -> impl Iterator<Item = (&Arc<str>, Rule<'_>)> {
    let spread = class.spread.iter().filter(move |s| s.hard || respect).map(|s| (&s.key, Rule::Spread(s)));
    let anti = class.anti_affinity.iter().map(|t| (&t.key, Rule::Anti(t, true)));
    let affinity = class.affinity.iter().map(|t| (&t.key, Rule::Affinity(t, true)));
    let soft_anti = class.preferred_anti_affinity.iter().filter(move |_| respect);
    let soft = class.preferred_affinity.iter().filter(move |_| respect);
    spread
        .chain(anti)
        .chain(affinity)
        .chain(soft_anti.map(|(_, t)| (&t.key, Rule::Anti(t, false))))
        .chain(soft.map(|(_, t)| (&t.key, Rule::Affinity(t, false))))
        .filter(|(key, _)| ***key != *labels::HOSTNAME)
}

enum Rule<'c> {
    Spread(&'c super::class::Spread),
    Anti(&'c PodTerm, bool),
    Affinity(&'c PodTerm, bool),
}

impl Topology {
    /// Collects keys, domains and what runs already. `peopled` are domains that another plan found to get nodes.
    pub fn new(universe: &Universe<'_>, selectors: &mut Selectors<'_>, groups: &[Group], peopled: Domains) -> Self {
        let problem = universe.problem;
        let respect = problem.settings.preference_policy == PreferencePolicy::Respect;
        let mut names: BTreeSet<Arc<str>> = BTreeSet::new();
        for group in groups {
            names.extend(rules_of(&group.class, respect).map(|(key, _)| Arc::clone(key)));
        }
        let running_terms = |class: &PodClass| -> Vec<PodTerm> {
            class.anti_affinity.iter().filter(|t| *t.key != *labels::HOSTNAME).cloned().collect()
        };
        for pod in problem.nodes.iter().flat_map(|n| &n.pods) {
            names.extend(running_terms(&pod.class).into_iter().map(|t| t.key));
        }
        let keys: Vec<Key> = names
            .into_iter()
            .map(|name| {
                let mut by_value: BTreeMap<Arc<str>, Bits> = BTreeMap::new();
                let empty = || Bits::empty(universe.columns.len());
                for column in 0..universe.columns.len() {
                    if let Some(value) = universe.label(column, &name) {
                        if let Some(bits) = by_value.get_mut(value) {
                            bits.insert(column);
                        } else {
                            let mut bits = empty();
                            bits.insert(column);
                            by_value.insert(Arc::from(value), bits);
                        }
                    }
                }
                for node in &problem.nodes {
                    if let Some(value) = existing::label(node, &name)
                        && !by_value.contains_key(value)
                    {
                        by_value.insert(Arc::from(value), empty());
                    }
                }
                let (values, columns) = by_value.into_iter().unzip();
                Key { name, values, columns }
            })
            .collect();
        let load = keys.iter().map(|key| vec![0; key.values.len()]).collect();
        let mut topology = Self {
            keys,
            counters: Vec::new(),
            ids: HashMap::new(),
            by_selector: HashMap::new(),
            load,
            settled: Vec::new(),
            peopled,
        };
        if topology.keys.is_empty() {
            return topology;
        }
        for group in groups {
            for (key, rule) in rules_of(&group.class, respect) {
                let key = topology.key(key);
                let (selector, hard, spread) = match rule {
                    Rule::Spread(s) => (add_spread(selectors, &group.class, s), s.hard, s.hard),
                    Rule::Anti(t, hard) | Rule::Affinity(t, hard) => (selectors.add_term(t), hard, false),
                };
                if let Some(selector) = selector {
                    let id = topology.counter(key, selector);
                    topology.counters[id].hard |= hard;
                    topology.counters[id].spread |= spread;
                }
            }
        }
        for pod in problem.nodes.iter().flat_map(|n| &n.pods) {
            for term in running_terms(&pod.class) {
                let key = topology.key(&term.key);
                if let Some(selector) = selectors.add_term(&term) {
                    let id = topology.counter(key, selector);
                    topology.counters[id].hard = true;
                }
            }
        }
        topology.count_running(universe, selectors);
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
            planned: zeros.clone(),
            refusers: zeros,
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

    fn count_running(&mut self, universe: &Universe<'_>, selectors: &mut Selectors<'_>) {
        let key_of = self.key_of();
        for (index, node) in universe.problem.nodes.iter().enumerate() {
            let domains: Vec<Option<usize>> = self
                .keys
                .iter()
                .map(|key| {
                    let value = existing::label(node, &key.name)?;
                    key.values.binary_search_by(|have| have.as_ref().cmp(value)).ok()
                })
                .collect();
            for pod in &node.pods {
                for selector in selectors.matching(pod).iter() {
                    for id in self.by_selector.get(selector).into_iter().flatten() {
                        if let Some(domain) = domains[key_of[*id]] {
                            let counter = &mut self.counters[*id];
                            counter.running[domain] += 1;
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

    fn rules(&self, universe: &mut Universe<'_>, selectors: &mut Selectors<'_>, group: &Group, key: usize) -> Rules {
        let respect = universe.problem.settings.preference_policy == PreferencePolicy::Respect;
        let mut rules = Rules::default();
        for (name, rule) in rules_of(&group.class, respect) {
            if self.keys[key].name != *name {
                continue;
            }
            let selector = match rule {
                Rule::Spread(s) => add_spread(selectors, &group.class, s),
                Rule::Anti(t, _) | Rule::Affinity(t, _) => selectors.add_term(t),
            };
            let counter = selector.and_then(|s| self.ids.get(&(key, s)).copied());
            let own = selector.is_some_and(|s| group.matches.contains(&s));
            match (rule, counter) {
                (Rule::Spread(spread), Some(counter)) => {
                    let (base, eligible, counted) = self.spread_domains(universe, group, key, spread, counter);
                    rules.spread.push(SpreadRule {
                        counter,
                        own: i64::from(own),
                        max_skew: spread.max_skew,
                        min_domains: usize::try_from(spread.min_domains).unwrap_or(0),
                        hard: spread.hard,
                        base,
                        eligible,
                        counted,
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

    /// Which running pods a spread constraint counts, and which domains exist for it.
    fn spread_domains(
        &self,
        universe: &mut Universe<'_>,
        group: &Group,
        key: usize,
        spread: &super::class::Spread,
        counter: usize,
    ) -> (Vec<i64>, Vec<bool>, Bits) {
        let class = &group.class;
        let mut counted = universe.by_terms(if spread.honor_affinity { &class.node_terms } else { &[] });
        if spread.honor_taints {
            counted.and(&universe.tolerated(class));
        }
        let counts = |node: &super::problem::NodeState| {
            (!spread.honor_affinity || existing::accepted(&class.node_terms, node))
                && (!spread.honor_taints || class.untolerated(&node.taints).is_none())
        };
        let values = &self.keys[key].values;
        let everything = !spread.honor_taints && (!spread.honor_affinity || class.node_terms.is_empty());
        let base = if everything {
            self.counters[counter].running.clone()
        } else {
            let mut base = vec![0; values.len()];
            for (node, count) in &self.counters[counter].at {
                let node = &universe.problem.nodes[*node];
                let value = existing::label(node, &self.keys[key].name).filter(|_| counts(node));
                if let Some(domain) = value.and_then(|v| values.binary_search_by(|have| have.as_ref().cmp(v)).ok()) {
                    base[domain] += count;
                }
            }
            base
        };
        let mut eligible: Vec<bool> =
            self.keys[key].columns.iter().map(|columns| intersects(&group.domains, columns)).collect();
        for (domain, columns) in self.keys[key].columns.iter().enumerate() {
            let here = (Arc::clone(&self.keys[key].name), Arc::clone(&values[domain]));
            eligible[domain] |= self.peopled.contains(&here) && intersects(&counted, columns);
        }
        for node in &universe.problem.nodes {
            let value = existing::label(node, &self.keys[key].name);
            if let Some(domain) = value.and_then(|v| values.binary_search_by(|have| have.as_ref().cmp(v)).ok())
                && !eligible[domain]
            {
                eligible[domain] = counts(node);
            }
        }
        (base, eligible, counted)
    }

    /// Divides every group over the domains its rules concern.
    pub fn assign(
        &mut self,
        universe: &mut Universe<'_>,
        selectors: &mut Selectors<'_>,
        groups: &[Group],
        nodes: &[Existing<'_>],
    ) -> Vec<Part> {
        let mut done: Vec<Part> = Vec::new();
        let mut waiting: Vec<Waiting> = Vec::new();
        for (index, group) in groups.iter().enumerate() {
            let mut concerned: Vec<(usize, Rules)> = Vec::new();
            for key in 0..self.keys.len() {
                let rules = self.rules(universe, selectors, group, key);
                if rules.concern(&self.counters) {
                    concerned.push((key, rules));
                }
            }
            if concerned.is_empty() {
                done.push(Part { group: index, pins: Vec::new(), count: group.pods.len(), refused: None });
                continue;
            }
            let possible = concerned
                .iter()
                .map(|(key, _)| self.possible(universe, group, &Part::whole(index, group), *key, nodes))
                .collect::<Vec<_>>();
            waiting.push(Waiting { group: index, concerned, possible });
        }
        waiting.sort_by_key(|w| {
            let affinity = w.concerned.iter().any(|(_, r)| r.affinity.iter().any(|(_, _, hard)| *hard));
            let foreign = w.concerned.iter().any(|(_, r)| r.spread.iter().any(|s| s.hard && s.own == 0));
            let room: usize = w.possible.iter().map(|p| p.iter().filter(|d| d.open()).count()).sum();
            (affinity, foreign, room, std::cmp::Reverse(groups[w.group].pods.len()), w.group)
        });
        loop {
            let mut rest = Vec::new();
            let mut progress = false;
            for w in waiting {
                if w.concerned.iter().all(|(_, rules)| self.affinity_ready(rules)) {
                    self.place(universe, groups, nodes, &w, &[], &mut done);
                    self.settle(w);
                    progress = true;
                } else {
                    rest.push(w);
                }
            }
            waiting = rest;
            if waiting.is_empty() {
                break;
            }
            if progress {
                continue;
            }
            // Nothing to follow: the first group that its own terms select starts a domain for all that will follow it.
            let start = waiting.iter().position(|w| w.concerned.iter().all(|(_, rules)| self.may_start(rules)));
            let Some(at) = start else {
                for w in waiting {
                    let refused = "its required pod affinity selects no pod that runs or is planned".to_owned();
                    done.push(Part { refused: Some(refused), ..Part::whole(w.group, &groups[w.group]) });
                }
                break;
            };
            let w = waiting.remove(at);
            let followers: Vec<&Waiting> = waiting.iter().filter(|other| shares_affinity(&w, other)).collect();
            let mut parts = Vec::new();
            self.place(universe, groups, nodes, &w, &followers, &mut parts);
            done.append(&mut parts);
            self.settle(w);
        }
        done
    }

    fn settle(&mut self, waiting: Waiting) {
        let group = waiting.group;
        self.settled.extend(waiting.concerned.into_iter().map(|(key, rules)| (group, key, rules)));
    }

    /// Domains that bought nodes make count against a spread that was planned without them: a zone, say, that no GPU type
    /// is offered in gets a node of another pod, and kube-scheduler's minimum over zones becomes zero.
    pub fn overlooked(&self, bought: &Bits) -> Domains {
        let mut out = Domains::new();
        for (_, key, rules) in &self.settled {
            let key = &self.keys[*key];
            for s in rules.spread.iter().filter(|s| s.hard && s.eligible.contains(&false)) {
                let count = |domain: usize| s.base[domain] + self.counters[s.counter].planned[domain];
                let most = (0..key.values.len()).filter(|d| s.eligible[*d]).map(count).max().unwrap_or(0);
                for domain in (0..key.values.len()).filter(|d| !s.eligible[*d] && most - count(*d) > s.max_skew) {
                    let mut nodes = both(bought, &key.columns[domain]);
                    nodes.and(&s.counted);
                    if !nodes.is_empty() {
                        out.insert((Arc::clone(&key.name), Arc::clone(&key.values[domain])));
                    }
                }
            }
        }
        out
    }

    /// Planned pods by counter and domain.
    pub fn planned(&self) -> Vec<Vec<i64>> {
        self.counters.iter().map(|counter| counter.planned.clone()).collect()
    }

    /// Takes pods of a group out of the counts of one key's domain.
    pub fn unplan(&self, planned: &mut [Vec<i64>], group: usize, key: usize, domain: usize, count: usize) {
        for (_, _, rules) in self.settled.iter().filter(|(g, k, _)| *g == group && *k == key) {
            for counter in &rules.raises {
                planned[*counter][domain] -= i64::try_from(count).unwrap_or(i64::MAX);
            }
        }
    }

    /// The first group that has more pods in a domain than its rules allow once others went unplaced: group, key, domain
    /// and how many are too many. `placed` tells the group's pods in a domain.
    pub fn overflow(
        &self,
        planned: &[Vec<i64>],
        placed: &dyn Fn(usize, usize, usize) -> usize,
    ) -> Option<(usize, usize, usize, usize)> {
        for (group, key, rules) in &self.settled {
            for domain in 0..self.keys[*key].values.len() {
                let here = placed(*group, *key, domain);
                if here == 0 {
                    continue;
                }
                for s in rules.spread.iter().filter(|s| s.hard) {
                    let count = |d: usize| s.base[d] + planned[s.counter][d];
                    let eligible = s.eligible.iter().enumerate().filter(|(_, e)| **e).map(|(d, _)| count(d));
                    let domains = eligible.clone().count();
                    let least = if domains < s.min_domains { 0 } else { eligible.min().unwrap_or(0) };
                    let over = count(domain) - least - s.max_skew;
                    if over > 0 {
                        let drop = if s.own == 0 { here } else { here.min(usize::try_from(over).unwrap_or(here)) };
                        return Some((*group, *key, domain, drop));
                    }
                }
                let alone = |c: usize| {
                    self.counters.get(c).is_none_or(|counter| counter.running[domain] + planned[c][domain] == 0)
                };
                if rules.affinity.iter().any(|(c, _, hard)| *hard && alone(*c)) {
                    return Some((*group, *key, domain, here));
                }
            }
        }
        None
    }

    fn affinity_ready(&self, rules: &Rules) -> bool {
        rules
            .affinity
            .iter()
            .filter(|(_, _, hard)| *hard)
            .all(|(c, _, _)| self.counters.get(*c).is_some_and(Counter::anywhere))
    }

    fn may_start(&self, rules: &Rules) -> bool {
        rules
            .affinity
            .iter()
            .filter(|(_, _, hard)| *hard)
            .all(|(c, own, _)| self.counters.get(*c).is_some_and(|counter| *own || counter.anywhere()))
    }

    /// How a part could be placed in each domain of a key.
    fn possible(
        &self,
        universe: &mut Universe<'_>,
        group: &Group,
        part: &Part,
        key: usize,
        nodes: &[Existing<'_>],
    ) -> Vec<Possible> {
        let key_columns: Vec<Bits> = self.keys[key].columns.clone();
        key_columns
            .into_iter()
            .enumerate()
            .map(|(domain, mut columns)| {
                for (pin_key, pin) in &part.pins {
                    columns.and(&self.keys[*pin_key].columns[*pin]);
                }
                let mut new = false;
                let mut price = 0;
                let mut level = group.levels.len();
                for (at, bits) in group.levels.iter().enumerate() {
                    let mut both = bits.clone();
                    both.and(&columns);
                    if !both.is_empty() {
                        let id = universe.signature(both);
                        if universe.any_fits(id, &group.need) {
                            (new, level, price) = (true, at, coarse(universe.price_of(id, &group.need)));
                            break;
                        }
                    }
                }
                let exists = nodes.iter().any(|node| {
                    node.holds(&group.need)
                        && self.in_domain(node, key, domain)
                        && part.pins.iter().all(|(k, d)| self.in_domain(node, *k, *d))
                        && existing::admits(&group.class, node.state)
                });
                Possible { new, exists, level, price }
            })
            .collect()
    }

    /// Whether a node is in a domain.
    pub fn in_domain(&self, node: &Existing<'_>, key: usize, domain: usize) -> bool {
        let key = &self.keys[key];
        existing::label(node.state, &key.name) == Some(&key.values[domain])
    }

    fn place(
        &mut self,
        universe: &mut Universe<'_>,
        groups: &[Group],
        nodes: &[Existing<'_>],
        waiting: &Waiting,
        followers: &[&Waiting],
        done: &mut Vec<Part>,
    ) {
        let group = &groups[waiting.group];
        let mut parts = vec![Part::whole(waiting.group, group)];
        for (at, (key, rules)) in waiting.concerned.iter().enumerate() {
            let mut divided = Vec::new();
            for part in parts {
                if part.refused.is_some() {
                    divided.push(part);
                    continue;
                }
                let possible = if at == 0 {
                    waiting.possible[0].clone()
                } else {
                    self.possible(universe, group, &part, *key, nodes)
                };
                self.divide(group, &part, *key, rules, &possible, followers, &mut divided);
            }
            parts = divided;
        }
        done.append(&mut parts);
    }

    #[allow(clippy::too_many_arguments)]
    fn divide(
        &mut self,
        group: &Group,
        part: &Part,
        key: usize,
        rules: &Rules,
        possible: &[Possible],
        followers: &[&Waiting],
        out: &mut Vec<Part>,
    ) {
        let weight = (group.need[0] + (group.need[1] >> 22)).max(1);
        let mut counts = vec![0_usize; possible.len()];
        let mut placed = 0;
        while placed < part.count {
            let best = (0..possible.len())
                .filter(|d| possible[*d].open() && self.allowed(rules, *d))
                .min_by_key(|d| self.cost_of(key, rules, *d, &possible[*d], followers));
            let Some(domain) = best else { break };
            counts[domain] += 1;
            placed += 1;
            self.load[key][domain] += weight;
            for counter in &rules.raises {
                self.counters[*counter].planned[domain] += 1;
            }
            for (counter, _, hard) in &rules.anti {
                self.counters[*counter].refusers[domain] += i64::from(*hard);
            }
        }
        for (domain, count) in counts.into_iter().enumerate().filter(|(_, count)| *count > 0) {
            let mut pins = part.pins.clone();
            pins.push((key, domain));
            out.push(Part { group: part.group, pins, count, refused: None });
        }
        if placed < part.count {
            let refused = Some(self.refusal(key, rules, possible));
            out.push(Part { count: part.count - placed, refused, ..part.clone() });
        }
    }

    fn allowed(&self, rules: &Rules, domain: usize) -> bool {
        let spread = rules.spread.iter().filter(|s| s.hard).all(|s| self.skew_after(s, domain) <= s.max_skew);
        let anti = rules.anti.iter().all(|(c, _, hard)| !hard || self.counters[*c].total(domain) == 0);
        let refused = rules.raises.iter().any(|c| self.counters[*c].refusers[domain] > 0);
        let affinity = rules.affinity.iter().all(|(c, own, hard)| {
            let Some(counter) = self.counters.get(*c) else {
                return !hard;
            };
            !hard || counter.total(domain) > 0 || (*own && !counter.anywhere())
        });
        spread && anti && !refused && affinity
    }

    fn skew_after(&self, rule: &SpreadRule, domain: usize) -> i64 {
        let planned = &self.counters[rule.counter].planned;
        let count = |d: usize| rule.base[d] + planned[d];
        let eligible = rule.eligible.iter().enumerate().filter(|(_, e)| **e);
        let domains = eligible.clone().count();
        let least = if domains < rule.min_domains { 0 } else { eligible.map(|(d, _)| count(d)).min().unwrap_or(0) };
        count(domain) + rule.own - least
    }

    /// Order of the allowed domains: what must stay level, then what is liked, in the order in which Karpenter gives
    /// preferences up, last first (soft spread, node affinity, anti-affinity, affinity: core reference 3.6), then what is
    /// free and what evens out.
    fn cost_of(
        &self,
        key: usize,
        rules: &Rules,
        domain: usize,
        possible: &Possible,
        followers: &[&Waiting],
    ) -> [i64; 12] {
        let wide = |n: usize| i64::try_from(n).unwrap_or(i64::MAX);
        let blocked = followers
            .iter()
            .filter(|w| w.concerned.iter().zip(&w.possible).any(|((k, _), p)| *k == key && !p[domain].open()))
            .count();
        let (mut level, mut soft, mut skewed) = (0, 0, 0);
        for s in &rules.spread {
            let count = s.base[domain] + self.counters[s.counter].planned[domain];
            if s.hard {
                level += count;
            } else {
                soft += count;
                skewed += i64::from(self.skew_after(s, domain) > s.max_skew);
            }
        }
        let others =
            rules.raises.iter().filter(|c| self.counters[**c].spread).map(|c| self.counters[*c].total(domain)).sum();
        let disliked: i64 =
            rules.anti.iter().filter(|(_, _, hard)| !hard).map(|(c, _, _)| self.counters[*c].total(domain)).sum();
        let missed = rules.affinity.iter().filter(|(c, _, hard)| !hard && self.counters[*c].total(domain) == 0).count();
        [
            wide(blocked),
            level,
            others,
            skewed,
            wide(possible.level),
            disliked,
            wide(missed),
            soft,
            i64::from(!possible.exists),
            possible.price,
            self.load[key][domain],
            wide(domain),
        ]
    }

    fn refusal(&self, key: usize, rules: &Rules, possible: &[Possible]) -> String {
        let key = &self.keys[key];
        let open: Vec<usize> = (0..possible.len()).filter(|d| possible[*d].open()).collect();
        let names =
            |domains: &[usize]| domains.iter().map(|d| key.values[*d].as_ref()).collect::<Vec<&str>>().join(", ");
        if open.is_empty() {
            return format!("no {} it may use holds it", key.name);
        }
        let refused = |d: &usize| rules.raises.iter().any(|c| self.counters[*c].refusers[*d] > 0);
        if open.iter().all(|d| refused(d) || rules.anti.iter().any(|(c, _, h)| *h && self.counters[*c].total(*d) > 0)) {
            return format!("pod anti-affinity on {} leaves no domain: {} all taken", key.name, names(&open));
        }
        if let Some(s) =
            rules.spread.iter().find(|s| s.hard && open.iter().all(|d| self.skew_after(s, *d) > s.max_skew))
        {
            return format!(
                "topology spread on {} (maxSkew {}) allows no more pods in {}, and no node can be had in the other domains",
                key.name,
                s.max_skew,
                names(&open)
            );
        }
        format!("pod affinity and spread on {} agree on no domain of {}", key.name, names(&open))
    }
}

/// A group that waits for its domains.
struct Waiting {
    group: usize,
    concerned: Vec<(usize, Rules)>,
    possible: Vec<Vec<Possible>>,
}

/// Whether a domain could take a pod.
#[derive(Clone, Debug)]
struct Possible {
    new: bool,
    exists: bool,
    /// First preference level with a column there.
    level: usize,
    /// About what a pod costs there.
    price: i64,
}

impl Possible {
    fn open(&self) -> bool {
        self.new || self.exists
    }
}

impl Part {
    fn whole(index: usize, group: &Group) -> Self {
        Self { group: index, pins: Vec::new(), count: group.pods.len(), refused: None }
    }
}

fn shares_affinity(a: &Waiting, b: &Waiting) -> bool {
    let terms = |w: &Waiting| -> Vec<usize> {
        w.concerned.iter().flat_map(|(_, r)| r.affinity.iter().filter(|(_, _, h)| *h).map(|(c, _, _)| *c)).collect()
    };
    let mine = terms(a);
    terms(b).iter().any(|c| mine.contains(c))
}

/// A price to about three percent, so that small differences between zones don't draw everything into one.
fn coarse(price: i64) -> i64 {
    let shift = 58_u32.saturating_sub(price.leading_zeros());
    (price >> shift) << shift
}

fn intersects(a: &Bits, b: &Bits) -> bool {
    !both(a, b).is_empty()
}

fn both(a: &Bits, b: &Bits) -> Bits {
    let mut out = a.clone();
    out.and(b);
    out
}
