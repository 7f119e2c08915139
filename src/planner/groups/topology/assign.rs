//! Assigns groups to topology domains greedily, most constrained groups first, one pod at a time to the domain of least cost.

use crate::planner::columns::bitset::Bits;
use crate::planner::columns::sets::ColumnSets;
use crate::planner::groups::existing::ExistingNode;
use crate::planner::groups::group::{Group, usable};
use crate::planner::groups::selectors::Selectors;
use crate::planner::groups::topology::counts::Topology;
use crate::planner::groups::topology::domains::{Assignment, with};
use crate::planner::groups::topology::rules::{Counter, Rules, SpreadRule};

impl Topology {
    /// Assigns every group to domains of the keys that its rules refer to.
    pub fn assign(
        &mut self,
        column_sets: &mut ColumnSets<'_>,
        selectors: &mut Selectors<'_>,
        groups: &[Group],
        nodes: &[ExistingNode<'_>],
    ) -> Vec<Assignment> {
        let mut done: Vec<Assignment> = Vec::new();
        let mut waiting: Vec<Waiting> = Vec::new();
        for (index, group) in groups.iter().enumerate() {
            if group.class.affinity.iter().any(|term| term.selector.is_none()) {
                let refused =
                    "its required pod affinity has a term without a labelSelector, which selects no pod".to_owned();
                done.push(Assignment { refused: Some(refused), ..Assignment::whole(index, group) });
                continue;
            }
            let mut concerned: Vec<(usize, Rules)> = Vec::new();
            for key in 0..self.keys.len() {
                let rules = self.rules(column_sets, selectors, (index, group), key);
                if rules.concern(&self.counters) {
                    concerned.push((key, rules));
                }
            }
            if concerned.is_empty() {
                done.push(Assignment { group: index, pins: Vec::new(), count: group.pods.len(), refused: None });
                continue;
            }
            let possible = concerned
                .iter()
                .map(|(key, _)| self.possible(column_sets, group, &Assignment::whole(index, group), *key, nodes))
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
                    self.place(column_sets, groups, nodes, &w, &[], &mut done);
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
            // No group can follow another one: the first group that its own affinity terms select starts a domain for its followers.
            let start = waiting.iter().position(|w| w.concerned.iter().all(|(_, rules)| self.may_start(rules)));
            let Some(at) = start else {
                for w in waiting {
                    let refused = "its required pod affinity selects no pod that runs or is planned".to_owned();
                    done.push(Assignment { refused: Some(refused), ..Assignment::whole(w.group, &groups[w.group]) });
                }
                break;
            };
            let w = waiting.remove(at);
            let followers: Vec<&Waiting> = waiting.iter().filter(|other| shares_affinity(&w, other)).collect();
            let mut parts = Vec::new();
            self.place(column_sets, groups, nodes, &w, &followers, &mut parts);
            done.append(&mut parts);
            self.settle(w);
        }
        done
    }

    fn settle(&mut self, waiting: Waiting) {
        let group = waiting.group;
        self.settled.extend(waiting.concerned.into_iter().map(|(key, rules)| (group, key, rules)));
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

    /// Feasibility and price of each domain of a key for a part of a group.
    fn possible(
        &self,
        column_sets: &mut ColumnSets<'_>,
        group: &Group,
        part: &Assignment,
        key: usize,
        nodes: &[ExistingNode<'_>],
    ) -> Vec<Possible> {
        let key_columns: Vec<Bits> = self.keys[key].columns.clone();
        let reserved = column_sets.has_counted.then(|| reservable(column_sets, group));
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
                if self.room_in(part.group, &part.pins, key, domain) == 0 {
                    return Possible { new, exists: false, level, price };
                }
                for (at, bits) in group.levels.iter().enumerate() {
                    let mut both = bits.clone();
                    both.and(&columns);
                    if !both.is_empty() {
                        let id = column_sets.column_set(both);
                        if column_sets.any_fits(id, &group.need) {
                            (new, level, price) = (true, at, coarse(column_sets.price_of(id, &group.need)));
                            break;
                        }
                    }
                }
                if let Some(reserved) = reserved.as_ref().filter(|_| !new) {
                    columns.and(reserved);
                    let id = column_sets.column_set(columns);
                    if column_sets.any_fits(id, &group.need) {
                        (new, price) = (true, coarse(column_sets.price_of(id, &group.need)));
                    }
                }
                let exists = nodes.iter().any(|node| {
                    node.holds(&group.need)
                        && self.in_domain(node, key, domain)
                        && part.pins.iter().all(|(k, d)| self.in_domain(node, *k, *d))
                        && node.state.admits(&group.class)
                });
                if exists && group.levels.len() == 1 {
                    // Without preferences an existing node ranks like a new node.
                    level = 0;
                }
                Possible { new, exists, level, price }
            })
            .collect()
    }

    fn place(
        &mut self,
        column_sets: &mut ColumnSets<'_>,
        groups: &[Group],
        nodes: &[ExistingNode<'_>],
        waiting: &Waiting,
        followers: &[&Waiting],
        done: &mut Vec<Assignment>,
    ) {
        let group = &groups[waiting.group];
        let mut parts = vec![Assignment::whole(waiting.group, group)];
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
                    self.possible(column_sets, group, &part, *key, nodes)
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
        part: &Assignment,
        key: usize,
        rules: &Rules,
        possible: &[Possible],
        followers: &[&Waiting],
        out: &mut Vec<Assignment>,
    ) {
        let weight = group.need[0].saturating_add(group.need[1] >> 22).max(1);
        let mut counts = vec![0_usize; possible.len()];
        let mut placed = 0;
        while placed < part.count {
            let best = (0..possible.len())
                .filter(|d| {
                    possible[*d].open()
                        && self.room_in(part.group, &part.pins, key, *d) > 0
                        && self.allowed(key, rules, *d)
                })
                .min_by_key(|d| {
                    // Pods with required affinity prefer a domain with room for all of them.
                    let together = rules.affinity.iter().any(|(_, _, hard)| *hard);
                    let left_over = (part.count - placed).saturating_sub(self.room_in(part.group, &part.pins, key, *d));
                    (if together { left_over } else { 0 }, self.cost_of(key, rules, *d, &possible[*d], followers))
                });
            let Some(domain) = best else { break };
            counts[domain] += 1;
            placed += 1;
            self.load[key][domain] = self.load[key][domain].saturating_add(weight);
            if !self.room.is_empty()
                && let Some(room) = self.room.get_mut(&(part.group, with(&part.pins, key, domain)))
            {
                *room -= 1;
            }
            // Nodes without the label are in no domain: no pods are counted there.
            if self.keys[key].absent != Some(domain) {
                for counter in &rules.raises {
                    self.counters[*counter].planned[domain] += 1;
                }
                for (counter, _, hard) in &rules.anti {
                    self.counters[*counter].refusers[domain] += i64::from(*hard);
                }
            }
        }
        for (domain, count) in counts.into_iter().enumerate().filter(|(_, count)| *count > 0) {
            let mut pins = part.pins.clone();
            pins.push((key, domain));
            out.push(Assignment { group: part.group, pins, count, refused: None });
        }
        if placed < part.count && !rules.must_hold(&self.counters) {
            // Preferences never leave a pod unplaced.
            out.push(Assignment { count: part.count - placed, ..part.clone() });
        } else if placed < part.count {
            let refused = Some(self.refusal(key, rules, possible));
            out.push(Assignment { count: part.count - placed, refused, ..part.clone() });
        }
    }

    fn allowed(&self, key: usize, rules: &Rules, domain: usize) -> bool {
        if self.keys[key].absent == Some(domain) {
            return !rules.spread.iter().any(|s| s.hard) && !rules.affinity.iter().any(|(_, _, hard)| *hard);
        }
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

    /// Lexicographic cost of an allowed domain: level counts of hard spread, then preferences in the reverse of the order in which Karpenter
    /// relaxes them (soft spread, node affinity, anti-affinity, affinity: Karpenter core reference 3.6), then existing nodes, price and load.
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
                // A pod that its own spread selector does not select leaves the counts unchanged: any domain within maxSkew is equal.
                level += if s.own > 0 { count } else { 0 };
            } else {
                soft += count;
                let nowhere = self.keys[key].absent == Some(domain);
                skewed += i64::from(nowhere || self.skew_after(s, domain) > s.max_skew);
            }
        }
        let others =
            rules.raises.iter().map(|c| &self.counters[*c]).filter(|c| c.spread).map(|c| c.spread_total(domain)).sum();
        let avoided: i64 =
            rules.anti.iter().filter(|(_, _, hard)| !hard).map(|(c, _, _)| self.counters[*c].total(domain)).sum();
        let missed = rules.affinity.iter().filter(|(c, _, hard)| !hard && self.counters[*c].total(domain) == 0).count();
        [
            wide(blocked),
            level,
            others,
            skewed,
            wide(possible.level),
            avoided,
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
        let open: Vec<usize> = (0..possible.len()).filter(|d| possible[*d].open() && key.absent != Some(*d)).collect();
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

/// A group without an assignment yet.
struct Waiting {
    group: usize,
    concerned: Vec<(usize, Rules)>,
    possible: Vec<Vec<Possible>>,
}

/// Feasibility of a domain for a pod.
#[derive(Clone, Debug)]
struct Possible {
    new: bool,
    exists: bool,
    /// First preference level with a column there.
    level: usize,
    /// Estimated price of a pod there.
    price: i64,
}

impl Possible {
    fn open(&self) -> bool {
        self.new || self.exists
    }
}

fn shares_affinity(a: &Waiting, b: &Waiting) -> bool {
    let terms = |w: &Waiting| -> Vec<usize> {
        w.concerned.iter().flat_map(|(_, r)| r.affinity.iter().filter(|(_, _, h)| *h).map(|(c, _, _)| *c)).collect()
    };
    let mine = terms(a);
    terms(b).iter().any(|c| mine.contains(c))
}

/// Columns of counted reservations that a group may use.
fn reservable(column_sets: &mut ColumnSets<'_>, group: &Group) -> Bits {
    let mut bits = usable(column_sets, group);
    bits.and(&column_sets.where_column(|column| column_sets.columns[column].left.is_some_and(|left| left > 0)));
    bits
}

/// A price rounded down by at most about three percent, so that small price differences do not concentrate all pods in one zone.
fn coarse(price: i64) -> i64 {
    let shift = 58_u32.saturating_sub(price.leading_zeros());
    (price >> shift) << shift
}
