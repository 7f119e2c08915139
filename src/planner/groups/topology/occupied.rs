//! Checks of the counts after purchases: domains that became eligible, and pods that exceed the skew because others were not placed.

use std::sync::Arc;

use crate::columns::bitset::Bits;
use crate::groups::topology::counts::Topology;
use crate::groups::topology::divide::finds_company;
use crate::groups::topology::domains::Domains;

impl Topology {
    /// Domains that purchased nodes make eligible although a spread was planned without them: for example, a zone without GPU types gets a
    /// node for another pod, and kube-scheduler's minimum over zones becomes zero.
    pub fn overlooked(&self, bought: &Bits) -> Domains {
        let mut out = Domains::new();
        for (_, key, rules) in &self.settled {
            let key = &self.keys[*key];
            for s in rules.spread.iter().filter(|s| s.hard && s.eligible.contains(&false)) {
                let count = |domain: usize| s.base[domain] + self.counters[s.counter].planned[domain];
                let most = (0..key.values.len()).filter(|d| s.eligible[*d]).map(count).max().unwrap_or(0);
                let others = (0..key.values.len()).filter(|d| !s.eligible[*d] && key.absent != Some(*d));
                for domain in others.filter(|d| most - count(*d) > s.max_skew) {
                    let mut nodes = bought.intersection(&key.columns[domain]);
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

    /// Subtracts pods of a group from the counts of a domain.
    pub fn unplan(&self, planned: &mut [Vec<i64>], group: usize, key: usize, domain: usize, count: usize) {
        for (_, _, rules) in self.settled.iter().filter(|(g, k, _)| *g == group && *k == key) {
            for counter in &rules.raises {
                planned[*counter][domain] -= i64::try_from(count).unwrap_or(i64::MAX);
            }
        }
    }

    /// The first group with more pods in a domain than its rules allow after other pods were left unplaced: group, key, domain and excess.
    /// `placed` returns the group's pods in a domain.
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
                let alone = |c: usize, own: bool| {
                    self.counters.get(c).is_none_or(|counter| {
                        let everywhere = counter.running.iter().chain(&planned[c]).sum();
                        !finds_company(counter.running[domain] + planned[c][domain], everywhere, own)
                    })
                };
                if rules.affinity.iter().any(|(c, own, hard)| *hard && alone(*c, *own)) {
                    return Some((*group, *key, domain, here));
                }
            }
        }
        None
    }
}
