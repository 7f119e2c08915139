//! Divides the pods of one group over its places.

use std::collections::{BTreeSet, HashMap};

use crate::groups::group::Group;
use crate::groups::topology::counts::Topology;
use crate::groups::topology::followers::Followers;
use crate::groups::topology::places::{Divided, Possible};
use crate::groups::topology::rules::{Rules, SpreadRule};

/// Moves of placed pods that are tried to make room for a pod that has no place.
const MAX_MOVES: usize = 2_000;

/// A group that must be together joins the domain with most pods if it has at least one part in this many of all pods: they can share nodes.
/// Smaller groups fill gaps anywhere.
const JOINING_SHARE: i64 = 20;

/// Key and domain of each pin.
type Pins = Vec<(usize, usize)>;

/// Where pods are that required host affinity selects.
#[derive(Default)]
pub(crate) struct Company {
    running: BTreeSet<u32>,
    planned: HashMap<u32, HashMap<Pins, usize>>,
    /// Planned pods in all places.
    totals: HashMap<u32, usize>,
}

impl Company {
    /// `running` are the host counters above zero on some node.
    pub fn of_running(running: &BTreeSet<u32>) -> Self {
        Self { running: running.clone(), ..Self::default() }
    }

    pub fn anywhere(&self, counter: u32) -> bool {
        self.running.contains(&counter) || self.totals.get(&counter).is_some_and(|total| *total > 0)
    }

    fn plan(&mut self, counter: u32, pins: &Pins, add: bool) {
        let here = self.planned.entry(counter).or_default().entry(pins.clone()).or_default();
        for count in [here, self.totals.entry(counter).or_default()] {
            *count = if add { *count + 1 } else { count.saturating_sub(1) };
        }
    }

    fn planned_at(&self, counter: u32, pins: &Pins) -> usize {
        self.planned.get(&counter).and_then(|places| places.get(pins)).copied().unwrap_or(0)
    }
}

/// Least counts of the spread rules of a group, by key and rule.
type Least = Vec<Vec<i64>>;

impl Topology {
    /// Places the pods of a group that have no place. Pods that only preferences concern never stay without one.
    pub(crate) fn place(&mut self, groups: &[Group], company: &mut Company, one: &mut Divided, followers: &Followers) {
        self.update_eligible(one, company);
        let group = &groups[one.group];
        let weight = group.weight();
        let mut moves = MAX_MOVES;
        while one.left > 0 {
            let least = self.least(one);
            let together = one.wants.is_some() || one.has_affinity();
            let joins = together && self.weight / JOINING_SHARE <= group.total_weight();
            let best = one
                .open()
                .filter(|place| {
                    one.counts[*place] < one.possible[*place].room && self.allowed(one, *place, &least, company)
                })
                .min_by_key(|place| {
                    // Pods with required affinity prefer a domain with room for all of them.
                    let room = one.possible[*place].room - one.counts[*place];
                    (
                        if together { one.left.saturating_sub(room) } else { 0 },
                        self.scatter.map(|seed| mix(mix(seed, one.group as u64), *place as u64)),
                        self.cost_of(one, *place, &least, followers, joins),
                    )
                });
            let placed = match best {
                Some(place) => {
                    self.raise(group, company, one, place, weight, true);
                    true
                }
                None => self.rearrange(group, company, one, weight, &mut moves),
            };
            if !placed {
                break;
            }
        }
        one.refused = None;
        if one.left > 0 {
            self.explain(one, company);
        }
    }

    /// Sets why rules leave pods without a place, unless that is known.
    pub(crate) fn explain(&self, one: &mut Divided, company: &Company) {
        let must_hold = one.wants.is_some() || one.keys.iter().any(|(_, rules)| rules.must_hold(&self.counters));
        if must_hold && one.refused.is_none() {
            one.refused = Some(self.refusal(one, company));
        }
    }

    /// Counts a pod in a place, or removes it from there.
    fn raise(&mut self, group: &Group, company: &mut Company, one: &mut Divided, place: usize, weight: i64, add: bool) {
        let sign = if add { 1 } else { -1 };
        for (at, (key, rules)) in one.keys.iter().enumerate() {
            let domain = one.places.domains[place][at];
            self.load[*key][domain] = self.load[*key][domain].saturating_add(weight * sign);
            // Nodes without the label are in no domain: no pods are counted there.
            if self.keys[*key].absent != Some(domain) {
                for counter in &rules.raises {
                    self.counters[*counter].plan(domain, sign);
                }
                for (counter, _, hard) in &rules.anti {
                    self.counters[*counter].refusers[domain] += if *hard { sign } else { 0 };
                }
            }
        }
        if !group.host.raises.is_empty() {
            let pins = one.pins(place);
            for counter in &group.host.raises {
                company.plan(*counter, &pins, add);
            }
        }
        if add {
            one.counts[place] += 1;
            one.left -= 1;
        } else {
            one.counts[place] -= 1;
            one.left += 1;
        }
    }

    /// Changes the pods of a group in each place to these.
    pub(crate) fn restore(&mut self, groups: &[Group], company: &mut Company, one: &mut Divided, counts: &[usize]) {
        let group = &groups[one.group];
        let weight = group.weight();
        for (place, count) in counts.iter().enumerate() {
            while one.counts[place] != *count {
                self.raise(group, company, one, place, weight, one.counts[place] < *count);
            }
        }
    }

    /// Places pods of the group where `planned` has more, as far as its rules permit. Returns whether any was placed.
    pub(crate) fn bind(
        &mut self,
        groups: &[Group],
        company: &mut Company,
        one: &mut Divided,
        planned: &[usize],
    ) -> bool {
        let group = &groups[one.group];
        let weight = group.weight();
        let mut bound = false;
        for (place, planned) in planned.iter().enumerate() {
            while one.counts[place] < *planned && self.allowed(one, place, &self.least(one), company) {
                self.raise(group, company, one, place, weight, true);
                bound = true;
            }
        }
        bound
    }

    /// Moves one placed pod of the group to another place, so that one more pod finds a place.
    fn rearrange(
        &mut self,
        group: &Group,
        company: &mut Company,
        one: &mut Divided,
        weight: i64,
        moves: &mut usize,
    ) -> bool {
        if one.keys.len() < 2 {
            return false;
        }
        let open: Vec<usize> = one.open().collect();
        for from in open.iter().copied() {
            if one.counts[from] == 0 {
                continue;
            }
            self.raise(group, company, one, from, weight, false);
            for to in open.iter().copied().filter(|to| *to != from) {
                if *moves == 0 {
                    break;
                }
                *moves -= 1;
                let least = self.least(one);
                if one.counts[to] >= one.possible[to].room || !self.allowed(one, to, &least, company) {
                    continue;
                }
                self.raise(group, company, one, to, weight, true);
                let least = self.least(one);
                let free = open.iter().copied().find(|place| {
                    one.counts[*place] < one.possible[*place].room && self.allowed(one, *place, &least, company)
                });
                if let Some(place) = free {
                    self.raise(group, company, one, place, weight, true);
                    return true;
                }
                self.raise(group, company, one, to, weight, false);
            }
            self.raise(group, company, one, from, weight, true);
        }
        false
    }

    /// Removes pods of a group whose rules do not hold; returns how many.
    pub(crate) fn withdraw(&mut self, groups: &[Group], company: &mut Company, one: &mut Divided) -> usize {
        self.update_eligible(one, company);
        let group = &groups[one.group];
        let weight = group.weight();
        let mut withdrawn = 0;
        for place in 0..one.counts.len() {
            while one.counts[place] > 0 && !self.holds(one, place, company) {
                self.raise(group, company, one, place, weight, false);
                withdrawn += 1;
            }
        }
        withdrawn
    }

    /// Whether the rules of the group hold for its pods in a place.
    fn holds(&self, one: &Divided, place: usize, company: &Company) -> bool {
        let least = self.least(one);
        let rules_hold = one.keys.iter().enumerate().all(|(at, (key, rules))| {
            let domain = one.domain(place, at);
            if self.keys[*key].absent == Some(domain) {
                return !rules.requires_label();
            }
            let mut spreads = rules.spread.iter().zip(&least[at]).filter(|(s, _)| s.hard);
            spreads.all(|(s, least)| s.base[domain] + self.counters[s.counter].planned[domain] - least <= s.max_skew)
                && rules.affinity.iter().all(|(c, own, hard)| {
                    !hard
                        || self
                            .counters
                            .get(*c)
                            .is_some_and(|counter| finds_company(counter.total(domain), counter.everywhere, *own))
                })
        });
        rules_hold
            && one.wants.is_none_or(|(counter, _)| {
                one.possible[place].company || company.planned_at(counter, &one.pins(place)) > 0
            })
    }

    /// The least count over the eligible domains of each spread rule; zero with fewer domains than `minDomains`.
    fn least(&self, one: &Divided) -> Least {
        let of = |rule: &SpreadRule| {
            let planned = &self.counters[rule.least_counter].planned;
            let eligible = rule.eligible.iter().enumerate().filter(|(_, eligible)| **eligible);
            let (mut domains, mut least) = (0, i64::MAX);
            for (domain, _) in eligible {
                domains += 1;
                least = least.min(rule.base[domain] + planned[domain]);
            }
            if domains == 0 || domains < rule.min_domains { 0 } else { least }
        };
        one.keys.iter().map(|(_, rules)| rules.spread.iter().map(of).collect()).collect()
    }

    /// A domain in which the group could have a node counts for its spread, too. A domain that other rules bar it from counts only once it
    /// has a node.
    pub(crate) fn update_eligible(&self, one: &mut Divided, company: &Company) {
        if one.keys.iter().all(|(_, rules)| rules.spread.is_empty()) {
            return;
        }
        let own = |place: usize| one.counts[place] > 0;
        let reachable: Vec<usize> = (0..one.possible.len())
            .filter(|place| {
                own(*place)
                    || (one.possible[*place].counts
                        && one.possible[*place].room > 0
                        && self.is_permitted(one, *place, company))
            })
            .collect();
        for at in 0..one.keys.len() {
            let absent = self.keys[one.keys[at].0].absent;
            let domains: BTreeSet<usize> = reachable.iter().map(|place| one.domain(*place, at)).collect();
            for rule in &mut one.keys[at].1.spread {
                rule.eligible.clone_from(&rule.occupied);
                domains
                    .iter()
                    .filter(|domain| absent != Some(**domain))
                    .for_each(|domain| rule.eligible[*domain] = true);
            }
        }
    }

    /// Whether all rules but spread permit a pod of the group in a place.
    fn is_permitted(&self, one: &Divided, place: usize, company: &Company) -> bool {
        let of_keys = one.keys.iter().enumerate().all(|(at, (key, rules))| {
            let domain = one.domain(place, at);
            if self.keys[*key].absent == Some(domain) {
                return !rules.requires_label();
            }
            let anti = rules.anti.iter().all(|(c, _, hard)| !hard || self.counters[*c].total(domain) == 0);
            let refused = rules.raises.iter().any(|c| self.counters[*c].refusers[domain] > 0);
            let affinity = rules.affinity.iter().all(|(c, own, hard)| {
                let Some(counter) = self.counters.get(*c) else {
                    return !hard;
                };
                !hard || counter.total(domain) > 0 || (*own && !counter.anywhere())
            });
            anti && !refused && affinity
        });
        of_keys
            && one.wants.is_none_or(|(counter, own)| {
                one.possible[place].company
                    || company.planned_at(counter, &one.pins(place)) > 0
                    || (own && !company.anywhere(counter))
            })
    }

    /// Whether all rules permit one more pod of the group in a place.
    fn allowed(&self, one: &Divided, place: usize, least: &Least, company: &Company) -> bool {
        let spread = one.keys.iter().zip(least).enumerate().all(|(at, ((_, rules), least))| {
            let domain = one.domain(place, at);
            let mut hard = rules.spread.iter().zip(least).filter(|(s, _)| s.hard);
            hard.all(|(s, least)| self.count_after(s, domain) - least <= s.max_skew)
        });
        spread && self.is_permitted(one, place, company)
    }

    fn count_after(&self, rule: &SpreadRule, domain: usize) -> i64 {
        rule.base[domain] + self.counters[rule.counter].planned[domain] + rule.own
    }

    /// Lexicographic cost of an allowed place: level counts of hard spread, then preferences in the reverse of the order in which Karpenter
    /// relaxes them (soft spread, node affinity, anti-affinity, affinity: Karpenter core reference 3.6), then existing nodes, price and load: the
    /// least, or the most if the pod `joins` others.
    fn cost_of(&self, one: &Divided, place: usize, least: &Least, followers: &Followers, joins: bool) -> [i64; 12] {
        let wide = |n: usize| i64::try_from(n).unwrap_or(i64::MAX);
        let possible: &Possible = &one.possible[place];
        let mut blocked = 0;
        let [mut level, mut others, mut skewed, mut avoided, mut missed, mut soft, mut load] = [0_i64; 7];
        for (at, (key, rules)) in one.keys.iter().enumerate() {
            let domain = one.domain(place, at);
            blocked += followers.blocked(self, *key, domain);
            for (s, least) in rules.spread.iter().zip(&least[at]) {
                let count = s.base[domain] + self.counters[s.counter].planned[domain];
                if s.hard {
                    // A pod that its own spread selector does not select leaves the counts unchanged: any domain within maxSkew is equal.
                    level += if s.own > 0 { count } else { 0 };
                } else {
                    soft += count;
                    let nowhere = self.keys[*key].absent == Some(domain);
                    skewed += i64::from(nowhere || self.count_after(s, domain) - least > s.max_skew);
                }
            }
            let raised = rules.raises.iter().map(|c| &self.counters[*c]);
            others += raised.filter(|c| c.spread).map(|c| c.spread_total(domain)).sum::<i64>();
            let disliked = rules.anti.iter().filter(|(_, _, hard)| !hard);
            avoided += disliked.map(|(c, _, _)| self.counters[*c].total(domain)).sum::<i64>();
            let liked = rules.affinity.iter().filter(|(_, _, hard)| !hard);
            missed += wide(liked.filter(|(c, _, _)| self.counters[*c].total(domain) == 0).count());
            load = load.saturating_add(self.load[*key][domain]);
        }
        [
            wide(blocked),
            level,
            others,
            skewed,
            wide(possible.level),
            avoided,
            missed,
            soft,
            i64::from(!possible.exists),
            possible.price,
            if joins { -load } else { load },
            wide(place),
        ]
    }

    /// Why no place is allowed.
    fn refusal(&self, one: &Divided, company: &Company) -> String {
        let names = |at: usize, domains: &BTreeSet<usize>| {
            let key = &self.keys[one.keys[at].0];
            domains.iter().map(|d| key.values[*d].as_ref()).collect::<Vec<&str>>().join(", ")
        };
        let open_of = |at: usize| -> BTreeSet<usize> {
            let absent = self.keys[one.keys[at].0].absent;
            one.open().map(|place| one.domain(place, at)).filter(|domain| absent != Some(*domain)).collect()
        };
        let least = self.least(one);
        for (at, (key, rules)) in one.keys.iter().enumerate() {
            let (key, open) = (&self.keys[*key], open_of(at));
            if open.is_empty() && rules.must_hold(&self.counters) {
                return format!("no {} it may use holds it", key.name);
            }
            let refused = |d: &usize| rules.raises.iter().any(|c| self.counters[*c].refusers[*d] > 0);
            let excluded = |d: &usize| rules.anti.iter().any(|(c, _, hard)| *hard && self.counters[*c].total(*d) > 0);
            if !open.is_empty() && open.iter().all(|d| refused(d) || excluded(d)) {
                return format!("pod anti-affinity on {} leaves no domain: {} all taken", key.name, names(at, &open));
            }
            let full = |s: &SpreadRule, least: i64| open.iter().all(|d| self.count_after(s, *d) - least > s.max_skew);
            if let Some((s, _)) = rules.spread.iter().zip(&least[at]).find(|(s, least)| s.hard && full(s, **least)) {
                return format!(
                    "topology spread on {} (maxSkew {}) allows no more pods in {}, and no node can be had in the other domains",
                    key.name,
                    s.max_skew,
                    names(at, &open)
                );
            }
        }
        if one.wants.is_some() && !one.open().any(|place| self.is_permitted(one, place, company)) {
            return "no node can hold it together with the pods that its required affinity selects".to_owned();
        }
        let requires = |rules: &Rules| rules.must_hold(&self.counters);
        let at = one.keys.iter().position(|(_, rules)| requires(rules)).unwrap_or(0);
        let keys: Vec<&str> = one
            .keys
            .iter()
            .filter(|(_, rules)| requires(rules))
            .map(|(key, _)| self.keys[*key].name.as_ref())
            .collect();
        format!("pod affinity and spread on {} agree on no domain of {}", keys.join(" and "), names(at, &open_of(at)))
    }
}

/// Whether required affinity holds for a placed pod, if the affinity selects this many pods in its domain and everywhere, and the pod `itself`.
pub(crate) fn finds_company(here: i64, everywhere: i64, itself: bool) -> bool {
    here > i64::from(itself) || (itself && everywhere <= 1)
}

/// A pseudo-random number.
pub(crate) fn mix(seed: u64, value: u64) -> u64 {
    let mut mixed = (seed ^ value.wrapping_mul(0x9e37_79b9_7f4a_7c15)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed ^= mixed >> 31;
    mixed = mixed.wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 29)
}
