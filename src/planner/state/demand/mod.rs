//! The remaining demand: pods still to place, as items with counts, and ([`fill`]) the greedy bin-filling heuristic.
//!
//! Items (a part of a group) lie in size buckets of one column pool and nearly one size. A bin is filled from the bucket whose
//! requests, weighted by the dual prices, have the best dot product and cosine with the bin's free capacity (vector bin packing):
//! the work is per bucket, not per pod. Floats appear only here and in [`crate::pricing`], as scores and prices; every
//! capacity test is on integers.

pub mod build;
pub mod fill;
pub mod host_caps;
pub mod pattern;
pub mod size_tiers;

use std::collections::HashMap;

use crate::columns::bitset::Bits;
use crate::columns::dims::{dot, float, real};
use crate::groups::group::Group;
use crate::groups::host_rules::HostRules;
use crate::state::demand::pattern::Pattern;
use crate::state::demand::size_tiers::SizeTiers;

/// Columns and topology domains that items may use.
#[derive(Debug)]
pub(crate) struct ColumnPool {
    /// A group with the node constraints that all items of the pool share.
    pub sample: usize,
    /// Key and domain index of each assigned topology domain.
    pub pins: Vec<(usize, usize)>,
    /// Ids of column sets, most preferred level first; the last is all that the requirements allow.
    pub levels: Vec<usize>,
}

/// Pods of one assignment, or of several that are equal to the bin-filling heuristic.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DemandItem {
    pub group: usize,
    pub column_pool: usize,
    /// Pods not placed yet.
    pub remaining: usize,
    /// Pods of the assignment.
    pub assigned: usize,
    /// How many of them every valid assignment has in these domains, at least.
    pub least: usize,
    /// Index of its first pod in the group's list. Pods are placed from there, in the order of the items.
    pub first: usize,
}

/// Items of one column pool and nearly one size.
#[derive(Debug)]
struct SizeBucket {
    column_pool: usize,
    /// Items with remaining pods, largest first; empty for followers.
    items: Vec<usize>,
    /// Its items have required host affinity: only [`Demand::put_followers`] places them.
    follows: bool,
}

/// A host cap as a resource of the covering LP: a node has `per_node` units, and each pod of `members` uses one.
pub(crate) struct HostCap {
    counter: u32,
    per_node: i64,
    /// Items whose pods use a unit.
    members: Bits,
}

/// The remaining demand. Counts only decrease by [`Demand::take`] and increase by [`Demand::restore`].
pub(crate) struct Demand<'g> {
    pub groups: &'g [Group],
    pub items: Vec<DemandItem>,
    /// The items that each item was merged from, until [`Demand::split_merged`].
    merged_from: Vec<Vec<DemandItem>>,
    pub column_pools: Vec<ColumnPool>,
    /// Items that share dual prices.
    pub tiers: SizeTiers,
    buckets: Vec<SizeBucket>,
    /// Componentwise minimum of the requests of each bucket's items; `dims` numbers per bucket.
    bucket_min: Vec<i64>,
    /// Request of the first item of each bucket; `dims` numbers per bucket.
    bucket_sample: Vec<f64>,
    dims: usize,
    bucket_of: Vec<usize>,
    /// Rank of each item in its bucket, largest first.
    rank_in_bucket: Vec<usize>,
    /// Buckets hold items of nearly one size instead of exactly one.
    has_rounded_buckets: bool,
    /// Remaining pods by column pool.
    remaining_in: Vec<usize>,
    /// Dual prices by price class: of a unit of each resource, then of each host cap, in micro-USD per hour.
    prices: Vec<Vec<f64>>,
    /// Items with a host cap, by counter.
    capped_items: Vec<Vec<usize>>,
    /// Items with required host affinity.
    followers: Vec<usize>,
    /// Followers by each counter that they want above zero, ascending.
    followers_of: HashMap<u32, Vec<usize>>,
    /// Host caps that dual prices account for.
    pub host_caps: Vec<HostCap>,
    /// Buckets scored so far: the deterministic measure of effort that limits the search.
    pub work: usize,
    /// Priced direction of the free capacity of the bin being filled.
    direction: Vec<f64>,
    scratch: Scratch,
}

/// State of the bin being filled; reset after each bin.
#[derive(Default)]
struct Scratch {
    /// Pods put into the bin, by item.
    taken: Vec<usize>,
    /// Value of each host counter.
    counts: Vec<i32>,
    /// Lowest cap on each host counter.
    caps: Vec<i32>,
    /// Counters to reset.
    touched: Vec<u32>,
}

impl<'g> Demand<'g> {
    /// Copies the request of a bucket's first item into `bucket_sample`.
    fn update_sample(&mut self, bucket: usize) {
        if let Some(first) = self.buckets[bucket].items.first() {
            let need = &self.groups[self.items[*first].group].need;
            let sample = &mut self.bucket_sample[bucket * self.dims..(bucket + 1) * self.dims];
            sample.iter_mut().zip(need).for_each(|(s, n)| *s = real(*n));
        }
    }

    /// Position of an item in its bucket, or its insertion point.
    fn position(&self, item: usize) -> Result<usize, usize> {
        let ranks = &self.rank_in_bucket;
        self.buckets[self.bucket_of[item]].items.binary_search_by_key(&ranks[item], |have| ranks[*have])
    }

    /// Remaining pods of a column pool.
    pub fn remaining_in(&self, column_pool: usize) -> usize {
        self.remaining_in[column_pool]
    }

    /// Remaining pods of all items.
    pub fn remaining(&self) -> usize {
        self.items.iter().map(|item| item.remaining).sum()
    }

    /// Of the largest item of each bucket of a column pool, the one of highest dual value.
    pub fn most_valuable(&self, column_pool: usize) -> Option<usize> {
        let buckets = self.buckets.iter().filter(|bucket| bucket.column_pool == column_pool);
        let valued = buckets.filter_map(|bucket| bucket.items.first().copied()).map(|item| (self.value(item), item));
        valued.max_by(|a, b| a.0.total_cmp(&b.0).then(b.1.cmp(&a.1))).map(|(_, item)| item)
    }

    pub fn need(&self, item: usize) -> &'g [i64] {
        &self.groups[self.items[item].group].need
    }

    pub fn host(&self, item: usize) -> &'g HostRules {
        &self.groups[self.items[item].group].host
    }

    pub fn is_empty(&self) -> bool {
        self.items.iter().all(|item| item.remaining == 0)
    }

    /// Whether some item has a soft preference about the pods on its host.
    pub fn has_host_preferences(&self) -> bool {
        (0..self.items.len()).any(|item| !self.host(item).soft.is_empty() || !self.host(item).likes.is_empty())
    }

    pub fn set_prices(&mut self, price_class: usize, prices: Vec<f64>) {
        self.prices[price_class] = prices;
    }

    /// Dual prices by price class.
    pub fn prices(&self) -> &[Vec<f64>] {
        &self.prices
    }

    /// Dual value of one pod of an item, in micro-USD per hour.
    pub fn value(&self, item: usize) -> f64 {
        self.value_at(item, &self.prices[self.tiers.class_of[item]])
    }

    /// Value of one pod of an item at given prices of resources and host caps.
    pub fn value_at(&self, item: usize, prices: &[f64]) -> f64 {
        let caps: f64 = if self.host_caps.is_empty() {
            0.0
        } else {
            let cap_prices = prices.get(self.dims..).unwrap_or_default();
            self.host_caps
                .iter()
                .zip(cap_prices)
                .filter(|(cap, _)| cap.members.contains(item))
                .map(|(_, price)| price)
                .sum()
        };
        dot(self.need(item), prices) + caps
    }

    /// Dual value of a pattern.
    pub fn pattern_value(&self, pattern: &[(usize, usize)]) -> f64 {
        pattern.iter().map(|(item, count)| self.value(*item) * float(*count)).sum()
    }

    /// Whether there are too many sizes for a bucket each.
    pub fn has_rounded_buckets(&self) -> bool {
        self.has_rounded_buckets
    }

    /// Items with required host affinity: their pods must share a node with pods that raise a counter.
    pub fn followers(&self) -> &[usize] {
        &self.followers
    }

    /// Whether host affinity ties an item to other pods of its node: as a follower, or because a follower may depend on it.
    pub fn is_tied(&self, item: usize) -> bool {
        let rules = self.host(item);
        !rules.wants.is_empty() || rules.raises.iter().any(|counter| self.followers_of.contains_key(counter))
    }

    /// Takes `copies` of a pattern out of the demand.
    pub fn take(&mut self, pattern: &[(usize, usize)], copies: usize) {
        for (item, count) in pattern {
            self.items[*item].remaining -= count * copies;
            self.remaining_in[self.items[*item].column_pool] -= count * copies;
            if self.items[*item].remaining == 0 {
                let bucket = self.bucket_of[*item];
                if let Ok(at) = self.position(*item) {
                    self.buckets[bucket].items.remove(at);
                    if at == 0 {
                        self.update_sample(bucket);
                    }
                }
            }
        }
    }

    /// How many copies of a pattern the remaining demand fills.
    pub fn copies_of(&self, pattern: &[(usize, usize)]) -> usize {
        pattern.iter().map(|(item, count)| self.items[*item].remaining / count).min().unwrap_or(0)
    }

    /// Replaces merged items by the items they were merged from, in `patterns` too. Afterwards every item is of one group, and
    /// no bin can be filled anymore.
    pub fn split_merged<'c>(&mut self, patterns: impl Iterator<Item = &'c mut Pattern>) {
        let first: Vec<usize> = self
            .merged_from
            .iter()
            .scan(0, |sum, parts| {
                *sum += parts.len();
                Some(*sum - parts.len())
            })
            .collect();
        let mut parts = std::mem::take(&mut self.merged_from);
        let mut at: Vec<usize> = vec![0; parts.len()];
        for pattern in patterns {
            let mut split: Pattern = Vec::with_capacity(pattern.len());
            for (item, mut count) in pattern.drain(..) {
                while count > 0 {
                    let part = &mut parts[item][at[item]];
                    let taken = count.min(part.remaining);
                    if taken > 0 {
                        split.push((first[item] + at[item], taken));
                    }
                    part.remaining -= taken;
                    count -= taken;
                    if part.remaining == 0 && count > 0 {
                        at[item] += 1;
                    }
                }
            }
            *pattern = split;
        }
        self.items = parts.into_iter().flatten().collect();
        self.buckets.clear();
    }

    /// Returns a pattern to the demand.
    pub fn restore(&mut self, pattern: &[(usize, usize)]) {
        for (item, count) in pattern {
            if self.buckets.is_empty() {
                self.items[*item].remaining += count;
                self.remaining_in[self.items[*item].column_pool] += count;
                continue;
            }
            if self.items[*item].remaining == 0 && !self.buckets[self.bucket_of[*item]].follows {
                let bucket = self.bucket_of[*item];
                if let Err(at) = self.position(*item) {
                    self.buckets[bucket].items.insert(at, *item);
                    if at == 0 {
                        self.update_sample(bucket);
                    }
                }
            }
            self.items[*item].remaining += count;
            self.remaining_in[self.items[*item].column_pool] += count;
        }
    }

    /// Buckets with remaining pods, of the column pools that `accepts` admits.
    pub fn open_buckets(&self, accepts: impl Fn(usize) -> bool) -> Vec<usize> {
        (0..self.buckets.len())
            .filter(|bucket| {
                let bucket = &self.buckets[*bucket];
                let followers_left = bucket.follows && self.remaining_in[bucket.column_pool] > 0;
                (!bucket.items.is_empty() || followers_left) && accepts(bucket.column_pool)
            })
            .collect()
    }
}

#[cfg(test)]
mod tests;
