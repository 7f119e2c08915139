//! Assigns groups to topology domains, most constrained groups first, one pod at a time to the place of least cost. A place is a tuple of
//! domains, one for each key that the group's rules refer to, so no key is decided before another.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::rc::Rc;

use crate::columns::bitset::Bits;
use crate::columns::sets::ColumnSets;
use crate::groups::existing_nodes::ExistingNode;
use crate::groups::group::Group;
use crate::groups::pod_selectors::Selectors;
use crate::groups::topology::counts::Topology;
use crate::groups::topology::divide::{Company, mix};
use crate::groups::topology::domains::Assignment;
use crate::groups::topology::followers::{FollowerIndex, Followers};
use crate::groups::topology::places::{Divided, Places};
use crate::groups::topology::rules::{Counter, Rules};

/// Passes over all groups that place refused pods again and withdraw pods whose rules no longer hold.
const MAX_REPAIRS: usize = 6;
/// Further passes, which only withdraw pods.
const MAX_WITHDRAWALS: usize = 24;
/// How often pods that no order binds get other places.
const MAX_REBOUND: usize = 3;
/// Orders of the groups that are tried while pods are refused.
const MAX_ORDERS: usize = 40;
/// Pods times places up to which further orders are tried, over all of them.
const MAX_ORDER_WORK: usize = 400_000;

impl Topology {
    /// Assigns every group to domains of the keys that its rules refer to. `nodes` are the existing nodes with capacity, `running` the host
    /// counters above zero on some node.
    pub fn assign(
        &mut self,
        column_sets: &mut ColumnSets<'_>,
        selectors: &mut Selectors<'_>,
        groups: &[Group],
        (nodes, running): (&[ExistingNode<'_>], &BTreeSet<u32>),
    ) -> Vec<Assignment> {
        let mut done: Vec<Assignment> = Vec::new();
        let waiting = self.divisible(column_sets, selectors, groups, nodes, &mut done);
        let mut company = Company::of_running(running);
        let divided = self.divide_all(groups, &mut company, waiting);
        let divided = self.repair(groups, &mut company, divided);
        let divided = self.reorder(groups, &mut company, divided);
        for one in divided {
            let least = self.least_in_places(&one);
            for (place, count) in one.counts.iter().enumerate().filter(|(_, count)| **count > 0) {
                let least = least.as_ref().map_or(0, |least| least[place].min(*count));
                done.push(Assignment { group: one.group, pins: one.pins(place), count: *count, least, refused: None });
            }
            if one.left > 0 {
                done.push(Assignment {
                    group: one.group,
                    pins: Vec::new(),
                    count: one.left,
                    least: 0,
                    refused: one.refused,
                });
            }
            let group = one.group;
            self.settled.extend(one.keys.into_iter().map(|(key, rules)| (group, key, rules)));
        }
        done
    }

    /// The least number of pods of a group in each place, in any valid assignment: with one key, whose only rule is a required spread of the
    /// group's own pods, the other domains hold no more than `maxSkew` above a domain. `None` for other groups.
    fn least_in_places(&self, one: &Divided) -> Option<Vec<usize>> {
        let [(key, rules)] = one.keys.as_slice() else { return None };
        let [rule] = rules.spread.as_slice() else { return None };
        let pods: i64 = one.counts.iter().map(|count| i64::try_from(*count).unwrap_or(i64::MAX)).sum();
        let counter = &self.counters[rule.counter];
        let is_alone = counter.planned.iter().sum::<i64>() == pods
            && rules.anti.is_empty()
            && rules.affinity.is_empty()
            && one.wants.is_none()
            && rules.raises.iter().all(|raised| self.counters[*raised].refusers.iter().all(|refusers| *refusers == 0));
        if !rule.hard || rule.own != 1 || one.left > 0 || !is_alone {
            return None;
        }
        let absent = self.keys[*key].absent;
        let eligible = rule.eligible.iter().filter(|eligible| **eligible).count();
        let least_in = |domain: usize| {
            if !rule.eligible[domain] {
                return 0;
            }
            let enough = |own: &i64| {
                let least = if eligible < rule.min_domains { 0 } else { rule.base[domain] + own };
                let others = (0..rule.base.len()).filter(|other| *other != domain && absent != Some(*other));
                let room = others.map(|other| (least + rule.max_skew - rule.base[other]).max(0)).sum::<i64>();
                own + room >= pods
            };
            (0..=pods).find(enough).unwrap_or(0)
        };
        let least = (0..one.counts.len()).map(|place| usize::try_from(least_in(one.domain(place, 0))).unwrap_or(0));
        Some(least.collect())
    }

    /// The groups that rules concern. The assignments of all other groups are final.
    fn divisible(
        &mut self,
        column_sets: &mut ColumnSets<'_>,
        selectors: &mut Selectors<'_>,
        groups: &[Group],
        nodes: &[ExistingNode<'_>],
        done: &mut Vec<Assignment>,
    ) -> Vec<Divided> {
        let mut of_group: Vec<Vec<(usize, Rules)>> = Vec::with_capacity(groups.len());
        for group in groups {
            let all = (0..self.keys.len()).map(|key| (key, self.rules(column_sets, selectors, group, key)));
            of_group.push(all.collect());
        }
        self.count_by_constraint(column_sets, groups, &mut of_group);
        let mut keys_of: Vec<BTreeSet<usize>> = of_group
            .iter()
            .map(|all| all.iter().filter(|(_, rules)| rules.concern(&self.counters)).map(|(key, _)| *key).collect())
            .collect();
        share_keys(groups, &mut keys_of);
        let mut places: HashMap<Vec<usize>, Rc<Places>> = HashMap::new();
        let mut out = Vec::new();
        for (index, (group, all)) in groups.iter().zip(of_group).enumerate() {
            if group.class.affinity.iter().any(|term| term.selector.is_none()) {
                let refused =
                    "its required pod affinity has a term without a labelSelector, which selects no pod".to_owned();
                done.push(Assignment { refused: Some(refused), ..Assignment::whole(index, group) });
                continue;
            }
            if group.class.claims_devices {
                let refused = "its resourceClaims (dynamic resource allocation) are not supported".to_owned();
                done.push(Assignment { refused: Some(refused), ..Assignment::whole(index, group) });
                continue;
            }
            if keys_of[index].is_empty() {
                done.push(Assignment::whole(index, group));
                continue;
            }
            let keys: Vec<usize> = keys_of[index].iter().copied().collect();
            let places = Rc::clone(
                places
                    .entry(keys.clone())
                    .or_insert_with(|| Rc::new(self.places(column_sets.columns.len(), &keys, nodes))),
            );
            let possible = self.possible(column_sets, (index, group), &keys, &places, nodes);
            out.push(Divided {
                group: index,
                keys: all.into_iter().filter(|(key, _)| keys_of[index].contains(key)).collect(),
                counts: vec![0; possible.len()],
                places,
                possible,
                wants: group.host.wants.first().copied(),
                left: group.pods.len(),
                refused: None,
            });
        }
        out.sort_by_key(|one| {
            let affinity = one.wants.is_some() || one.has_affinity();
            let foreign = one.keys.iter().any(|(_, r)| r.spread.iter().any(|s| s.hard && s.own == 0));
            let room = (0..one.keys.len())
                .map(|at| one.open().map(|place| one.domain(place, at)).collect::<BTreeSet<usize>>().len())
                .sum::<usize>();
            (affinity, foreign, room, std::cmp::Reverse(groups[one.group].pods.len()), one.group)
        });
        out
    }

    /// Places every group once, after the groups that its required affinity selects.
    fn divide_all(&mut self, groups: &[Group], company: &mut Company, mut waiting: Vec<Divided>) -> Vec<Divided> {
        let index = FollowerIndex::new(self, groups, &waiting);
        let mut done: Vec<Divided> = Vec::new();
        while !waiting.is_empty() {
            let mut rest = Vec::new();
            let mut progress = false;
            for mut one in waiting {
                if self.affinity_ready(&one, company) {
                    let followers = index.of(groups, &one);
                    self.place(groups, company, &mut one, &followers);
                    done.push(one);
                    progress = true;
                } else {
                    rest.push(one);
                }
            }
            waiting = rest;
            if progress || waiting.is_empty() {
                continue;
            }
            // No group can follow another one: the first group that its own affinity terms select starts a domain for its followers.
            let Some(at) = waiting.iter().position(|one| self.may_start(one, company)) else {
                for mut one in waiting {
                    one.refused = Some("its required pod affinity selects no pod that runs or is planned".to_owned());
                    done.push(one);
                }
                break;
            };
            let mut one = waiting.remove(at);
            let followers = index.of(groups, &one);
            self.place(groups, company, &mut one, &followers);
            done.push(one);
        }
        done
    }

    /// Withdraws pods whose rules do not hold after all groups were placed, and places refused pods again: later groups may raise the least
    /// count of a spread, or be what an affinity selects.
    fn repair(&mut self, groups: &[Group], company: &mut Company, mut divided: Vec<Divided>) -> Vec<Divided> {
        let followers = Followers::default();
        for pass in 0..MAX_REPAIRS + MAX_WITHDRAWALS {
            let mut changed = false;
            for one in &mut divided {
                let withdrawn = self.withdraw(groups, company, one);
                let left = one.left;
                if left > 0 && pass < MAX_REPAIRS && (self.affinity_ready(one, company) || self.may_start(one, company))
                {
                    self.place(groups, company, one, &followers);
                }
                changed |= withdrawn > 0 || one.left < left;
            }
            if !changed {
                break;
            }
        }
        self.bind_in_some_order(groups, company, &mut divided);
        for one in divided.iter_mut().filter(|one| one.left > 0) {
            self.explain(one, company);
        }
        divided
    }

    /// Withdraws pods that kube-scheduler could bind in no order: pods may be each other's only company, which the first of them would not find.
    /// They get other places where there are some.
    fn bind_in_some_order(&mut self, groups: &[Group], company: &mut Company, divided: &mut [Divided]) {
        if !divided.iter().any(Divided::has_affinity) {
            return;
        }
        for pass in 0..MAX_REBOUND + MAX_WITHDRAWALS {
            let planned: Vec<Vec<usize>> = divided.iter().map(|one| one.counts.clone()).collect();
            for one in divided.iter_mut() {
                let none = vec![0; one.counts.len()];
                self.restore(groups, company, one, &none);
            }
            // Each bound pod is company for others and raises the least count of spreads: whatever binds first, the same pods bind.
            let mut progress = true;
            while progress {
                progress = false;
                for (one, planned) in divided.iter_mut().zip(&planned) {
                    progress |= self.bind(groups, company, one, planned);
                }
            }
            // Pods that bind after others may break the rules of those.
            let withdrawn: usize = divided.iter_mut().map(|one| self.withdraw(groups, company, one)).sum();
            if withdrawn == 0 && divided.iter().zip(&planned).all(|(one, planned)| one.counts == *planned) {
                return;
            }
            let followers = Followers::default();
            for one in divided.iter_mut().filter(|one| one.left > 0 && pass < MAX_REBOUND) {
                if self.affinity_ready(one, company) || self.may_start(one, company) {
                    self.place(groups, company, one, &followers);
                }
            }
        }
    }

    /// Divides the groups in other orders while rules refuse pods: refused groups come first, those that were refused most often before all
    /// others; then random orders with random places. The order with the fewest refused pods is kept, where pods of higher priority count first.
    fn reorder(&mut self, groups: &[Group], company: &mut Company, mut divided: Vec<Divided>) -> Vec<Divided> {
        let work: usize = divided.iter().map(|one| groups[one.group].pods.len() * one.possible.len()).sum();
        let mut best = Division::of(groups, &divided);
        if best.is_complete() {
            return divided;
        }
        let mut refusals: HashMap<usize, usize> = HashMap::new();
        let mut tried: BTreeSet<Vec<usize>> = BTreeSet::new();
        tried.insert(divided.iter().map(|one| one.group).collect());
        let mut is_best = true;
        for attempt in 0..MAX_ORDERS.min(MAX_ORDER_WORK / work.max(1)) {
            for one in divided.iter().filter(|one| one.refused.is_some()) {
                *refusals.entry(one.group).or_default() += 1;
            }
            divided.sort_by_key(|one| (std::cmp::Reverse(refusals.get(&one.group).copied().unwrap_or(0)), one.group));
            if self.scatter.is_some() || !tried.insert(divided.iter().map(|one| one.group).collect()) {
                // Pods refuse each other: any order, and any of the allowed places.
                let seed = attempt as u64;
                divided.sort_by_key(|one| mix(seed, one.group as u64));
                self.scatter = Some(seed);
            }
            self.clear(groups, company, &mut divided);
            divided = self.divide_all(groups, company, divided);
            divided = self.repair(groups, company, divided);
            let found = Division::of(groups, &divided);
            is_best = found.refused < best.refused;
            if is_best {
                best = found;
            }
            if best.is_complete() {
                break;
            }
        }
        self.scatter = None;
        if !is_best {
            self.clear(groups, company, &mut divided);
            for one in &mut divided {
                let (counts, refused) = best.by_group.remove(&one.group).unwrap_or_default();
                self.restore(groups, company, one, &counts);
                one.refused = refused;
            }
            for one in &mut divided {
                self.update_eligible(one, company);
            }
        }
        divided.sort_by_key(|one| best.order.get(&one.group).copied());
        divided
    }

    /// Removes all pods from their places.
    fn clear(&mut self, groups: &[Group], company: &mut Company, divided: &mut [Divided]) {
        for one in divided {
            let none = vec![0; one.counts.len()];
            self.restore(groups, company, one, &none);
            one.refused = None;
        }
    }

    fn affinity_ready(&self, one: &Divided, company: &Company) -> bool {
        let anywhere = |counter: &usize| self.counters.get(*counter).is_some_and(Counter::anywhere);
        one.wants.is_none_or(|(counter, _)| company.anywhere(counter))
            && one.keys.iter().all(|(_, r)| r.affinity.iter().filter(|(_, _, hard)| *hard).all(|(c, _, _)| anywhere(c)))
    }

    fn may_start(&self, one: &Divided, company: &Company) -> bool {
        let anywhere = |counter: &usize| self.counters.get(*counter).is_some_and(Counter::anywhere);
        let may = |(c, own, hard): &(usize, bool, bool)| !hard || (*own && *c < self.counters.len()) || anywhere(c);
        one.wants.is_none_or(|(counter, own)| own || company.anywhere(counter))
            && one.keys.iter().all(|(_, rules)| rules.affinity.iter().all(may))
    }

    /// Makes each spread constraint that some nodes do not count for use counters of its own, which only groups that may run on counted
    /// nodes raise: one for the most pods that it may count, and one for the least.
    fn count_by_constraint(
        &mut self,
        column_sets: &mut ColumnSets<'_>,
        groups: &[Group],
        of_group: &mut [Vec<(usize, Rules)>],
    ) {
        // By counter: the constraints that count only some of its pods.
        let mut partial: HashMap<usize, Vec<Partial>> = HashMap::new();
        for all in of_group.iter_mut() {
            for (_, rules) in all.iter_mut() {
                for spread in &mut rules.spread {
                    let base = spread.counter;
                    if let Some(nodes) = spread.counted_nodes.take() {
                        let known = partial.entry(base).or_default();
                        let found = known.iter().find(|one| one.columns == spread.counted && one.nodes == nodes);
                        (spread.counter, spread.least_counter) = if let Some(one) = found {
                            (one.most, one.least)
                        } else {
                            let (most, least) =
                                (self.split_counter(base, &spread.base), self.split_counter(base, &spread.base));
                            known.push(Partial { columns: spread.counted.clone(), nodes, most, least });
                            (most, least)
                        };
                    }
                    let counter = &mut self.counters[spread.counter];
                    counter.hard |= spread.hard;
                    counter.spread |= spread.hard;
                }
            }
        }
        if partial.is_empty() {
            return;
        }
        for (group, all) in groups.iter().zip(of_group) {
            let mut admitting: Option<Vec<bool>> = None;
            for (_, rules) in all {
                let mut more = Vec::new();
                for one in rules.raises.iter().filter_map(|c| partial.get(c)).flatten() {
                    let admitting = admitting.get_or_insert_with(|| {
                        column_sets.problem.nodes.iter().map(|n| n.schedulable && n.admits(&group.class)).collect()
                    });
                    let here = group.domains.intersection(&one.columns);
                    let mut nodes = one.nodes.iter().zip(admitting.iter()).filter(|(_, admits)| **admits);
                    if !here.is_empty() || nodes.clone().any(|(counted, _)| *counted) {
                        more.push(one.most);
                    }
                    // A constraint counts its own pods wherever they are.
                    let is_own = rules.spread.iter().any(|spread| spread.hard && spread.counter == one.most);
                    if is_own || here == group.domains && nodes.all(|(counted, _)| *counted) {
                        more.push(one.least);
                    }
                }
                rules.raises.extend(more);
            }
        }
    }
}

/// Counters of a spread constraint that counts only some columns and nodes.
struct Partial {
    columns: Bits,
    nodes: Vec<bool>,
    /// Counts the pods that may run there.
    most: usize,
    /// Counts the pods that run nowhere else.
    least: usize,
}

/// A division of all groups.
struct Division {
    /// Pods without a place that a required rule concerns, by priority, highest first.
    refused: BTreeMap<std::cmp::Reverse<i32>, usize>,
    /// Pods by place, and why others were refused.
    by_group: HashMap<usize, (Vec<usize>, Option<String>)>,
    /// Position of each group.
    order: HashMap<usize, usize>,
}

impl Division {
    fn is_complete(&self) -> bool {
        self.refused.values().all(|pods| *pods == 0)
    }

    fn of(groups: &[Group], divided: &[Divided]) -> Self {
        let mut refused: BTreeMap<std::cmp::Reverse<i32>, usize> = BTreeMap::new();
        for one in divided {
            let pods = if one.refused.is_some() { one.left } else { 0 };
            *refused.entry(std::cmp::Reverse(groups[one.group].class.priority)).or_default() += pods;
        }
        Self {
            refused,
            by_group: divided.iter().map(|one| (one.group, (one.counts.clone(), one.refused.clone()))).collect(),
            order: divided.iter().enumerate().map(|(at, one)| (one.group, at)).collect(),
        }
    }
}

/// Gives all groups that required host affinity connects the same keys: they share nodes, and so the domains of every key.
fn share_keys(groups: &[Group], keys_of: &mut [BTreeSet<usize>]) {
    if groups.iter().all(|group| group.host.wants.is_empty()) {
        return;
    }
    let wanted: BTreeSet<u32> =
        groups.iter().flat_map(|group| &group.host.wants).map(|(counter, _)| *counter).collect();
    let mut linked: HashMap<u32, Vec<usize>> = HashMap::new();
    for (index, group) in groups.iter().enumerate() {
        let counters = group.host.wants.iter().map(|(counter, _)| counter).chain(&group.host.raises);
        for counter in counters.filter(|counter| wanted.contains(counter)) {
            linked.entry(*counter).or_default().push(index);
        }
    }
    let mut seen = vec![false; groups.len()];
    let mut open_counters: BTreeSet<u32> = wanted;
    for start in 0..groups.len() {
        if seen[start] {
            continue;
        }
        let (mut members, mut at) = (vec![start], 0);
        seen[start] = true;
        while at < members.len() {
            let host = &groups[members[at]].host;
            for counter in host.wants.iter().map(|(counter, _)| counter).chain(&host.raises) {
                if open_counters.remove(counter) {
                    for other in &linked[counter] {
                        if !std::mem::replace(&mut seen[*other], true) {
                            members.push(*other);
                        }
                    }
                }
            }
            at += 1;
        }
        if members.len() > 1 {
            let all: BTreeSet<usize> = members.iter().flat_map(|member| keys_of[*member].iter().copied()).collect();
            for member in members {
                keys_of[member].clone_from(&all);
            }
        }
    }
}
