//! The bin-filling heuristic: greedy vector packing by priced dot product and cosine, followed by improving swaps.

use std::collections::{BTreeSet, HashSet};

use crate::columns::dims::{dot, fits, real};
use crate::state::demand::Demand;
use crate::state::demand::pattern::{Bin, Pattern, add_pods};

/// Items tried per bucket before the bucket is dropped for this bin.
const MAX_ITEMS_TRIED: usize = 48;
/// Maximum improving swaps per bin, and items tried per bucket in each swap.
const MAX_SWAPS: usize = 12;
const SWAP_ITEMS_TRIED: usize = 12;
/// Least gain of a swap, as a share of the value of the pod that leaves.
const MIN_SWAP_GAIN: f64 = 1e-3;

/// A bucket that may still contribute to the bin.
#[derive(Clone, Copy)]
struct OpenBucket {
    bucket: usize,
    /// Squared norm of its priced sample request, and the exponent of the cosine in its score; `None` scores by dot product.
    cosine: Option<(f64, i32)>,
}

/// The bin being filled: its remaining capacity, and the pods added to it.
struct Fill {
    room: Vec<i64>,
    added: Pattern,
}

impl Demand<'_> {
    /// Whether the pattern of a bin fits its capacity and satisfies all host rules.
    pub fn is_feasible(&mut self, bin: &Bin<'_>) -> bool {
        let room = self.open_bin(bin);
        let scratch = &self.scratch;
        let fits = room.iter().all(|free| *free >= 0);
        let allowed =
            scratch.touched.iter().all(|counter| scratch.counts[*counter as usize] <= scratch.caps[*counter as usize]);
        self.close_bin(&[]);
        fits && allowed
    }

    /// The followers (required host affinity) of `buckets` that can join the pattern of a bin.
    pub fn fill_followers(&mut self, bin: &Bin<'_>, buckets: &[usize]) -> Pattern {
        let mut fill = Fill { room: self.open_bin(bin), added: Vec::new() };
        for (item, count) in bin.pattern {
            self.scratch.taken[*item] += count;
        }
        let allowed = buckets.iter().copied().collect();
        self.put_followers(&mut fill, &allowed);
        self.close_bin(&fill.added);
        for (item, _) in bin.pattern {
            self.scratch.taken[*item] = 0;
        }
        fill.added
    }

    /// Fills a bin from `buckets` and returns the pods to add. The demand is unchanged until [`Demand::take`].
    ///
    /// Puts one item of each counter of `binding` first, then one of the column pool `seed` (the result is empty if none fits),
    /// then items by score. `prices` weight the resources; `cosine_power` is the exponent of the cosine in the score.
    pub fn fill(
        &mut self,
        bin: &Bin<'_>,
        prices: &[f64],
        buckets: &[usize],
        seed: Option<usize>,
        binding: &[u32],
        cosine_power: i32,
    ) -> Pattern {
        let mut fill = Fill { room: self.open_bin(bin), added: Vec::new() };
        let allowed: HashSet<usize> = if binding.is_empty() && self.followers.is_empty() {
            HashSet::default()
        } else {
            buckets.iter().copied().collect()
        };
        for counter in binding {
            let best = self.best_of_counter(*counter, &fill.room, prices, &allowed);
            if let Some(item) = best {
                self.put(item, 1, &mut fill);
            }
        }
        let nonempty = buckets.iter().copied().filter(|bucket| !self.buckets[*bucket].items.is_empty());
        let mut open: Vec<OpenBucket> = nonempty.map(|bucket| self.open_bucket(bucket, prices, cosine_power)).collect();
        if let Some(pool) = seed
            && !fill.added.iter().any(|(item, _)| self.items[*item].column_pool == pool)
        {
            let of_seed = open.iter().filter(|open| self.buckets[open.bucket].column_pool == pool);
            let mut of_seed: Vec<OpenBucket> = of_seed.map(|open| OpenBucket { cosine: None, ..*open }).collect();
            if !self.put_best(&mut of_seed, prices, &mut fill, true) {
                self.close_bin(&fill.added);
                // The pods of binding host caps left no room for a pod of the seed: retry without them.
                return if binding.is_empty() {
                    Vec::new()
                } else {
                    self.fill(bin, prices, buckets, seed, &[], cosine_power)
                };
            }
        }
        loop {
            if !self.followers.is_empty() {
                self.put_followers(&mut fill, &allowed);
            }
            if !self.put_best(&mut open, prices, &mut fill, false) {
                break;
            }
        }
        if bin.pattern.is_empty() && self.followers.is_empty() {
            self.improve_by_swaps(buckets, seed, &mut fill);
        }
        self.close_bin(&fill.added);
        fill.added
    }

    /// Loads a bin's host state and pattern into the scratch state; returns the free capacity.
    fn open_bin(&mut self, bin: &Bin<'_>) -> Vec<i64> {
        for (counter, count) in &bin.host.counts {
            self.scratch.counts[*counter as usize] += count;
            self.scratch.touched.push(*counter);
        }
        for (counter, cap) in &bin.host.caps {
            let have = &mut self.scratch.caps[*counter as usize];
            *have = (*have).min(*cap);
            self.scratch.touched.push(*counter);
        }
        let mut room = bin.room.to_vec();
        for (item, count) in bin.pattern {
            subtract(&mut room, self.need(*item), *count);
            self.apply_host_rules(*item, i32::try_from(*count).unwrap_or(i32::MAX));
        }
        room
    }

    /// Resets the scratch state.
    fn close_bin(&mut self, added: &[(usize, usize)]) {
        for counter in self.scratch.touched.drain(..) {
            self.scratch.counts[counter as usize] = 0;
            self.scratch.caps[counter as usize] = i32::MAX;
        }
        for (item, _) in added {
            self.scratch.taken[*item] = 0;
        }
    }

    fn apply_host_rules(&mut self, item: usize, count: i32) {
        let rules = &self.groups[self.items[item].group].host;
        let scratch = &mut self.scratch;
        for counter in &rules.raises {
            scratch.counts[*counter as usize] += count;
            scratch.touched.push(*counter);
        }
        for (counter, cap) in &rules.caps {
            let have = &mut scratch.caps[*counter as usize];
            *have = (*have).min(*cap);
            scratch.touched.push(*counter);
        }
    }

    /// How many pods of an item the host rules still admit on the bin.
    fn host_capacity(&self, item: usize) -> i32 {
        let rules = self.host(item);
        if rules.is_free() {
            return i32::MAX;
        }
        let scratch = &self.scratch;
        for (counter, cap) in &rules.caps {
            if !rules.raises.contains(counter) && scratch.counts[*counter as usize] > *cap {
                return 0;
            }
        }
        let mut capacity = i32::MAX;
        for counter in &rules.raises {
            let own = rules.caps.iter().find(|(c, _)| c == counter).map_or(i32::MAX, |(_, cap)| *cap);
            let cap = own.min(scratch.caps[*counter as usize]);
            capacity = capacity.min(cap.saturating_sub(scratch.counts[*counter as usize]));
        }
        if rules.wants.iter().any(|(counter, _)| scratch.counts[*counter as usize] == 0) {
            return 0;
        }
        capacity.max(0)
    }

    /// How many pods of an item can join the bin.
    fn max_count(&self, item: usize, room: &[i64]) -> usize {
        let remaining = self.items[item].remaining - self.scratch.taken[item];
        if remaining == 0 {
            return 0;
        }
        let by_room = self
            .need(item)
            .iter()
            .zip(room)
            .filter(|(n, _)| **n > 0)
            .map(|(n, r)| (r / n).max(0))
            .min()
            .unwrap_or(i64::MAX);
        let by_host = usize::try_from(self.host_capacity(item)).unwrap_or(0);
        remaining.min(usize::try_from(by_room).unwrap_or(usize::MAX)).min(by_host)
    }

    fn put(&mut self, item: usize, count: usize, fill: &mut Fill) {
        subtract(&mut fill.room, self.need(item), count);
        if self.scratch.taken[item] > 0 {
            add_pods(&mut fill.added, item, count);
        } else {
            fill.added.push((item, count));
        }
        self.scratch.taken[item] += count;
        self.apply_host_rules(item, i32::try_from(count).unwrap_or(i32::MAX));
    }

    /// Puts the followers that can join the bin, and the followers of those.
    fn put_followers(&mut self, fill: &mut Fill, allowed: &HashSet<usize>) {
        for _ in 0..self.followers.len() {
            let mut any = false;
            // Only those that a pod in the bin leads, in the order of the items.
            let scratch = &self.scratch;
            let led = scratch.touched.iter().filter(|counter| scratch.counts[**counter as usize] > 0);
            let mut open: BTreeSet<usize> =
                led.filter_map(|counter| self.followers_of.get(counter)).flatten().copied().collect();
            while let Some(item) = open.pop_first() {
                if !allowed.contains(&self.bucket_of[item]) {
                    continue;
                }
                let count = self.max_count(item, &fill.room);
                if count > 0 {
                    self.put(item, count, fill);
                    any = true;
                    let raised = self.host(item).raises.iter();
                    let led = raised.filter_map(|counter| self.followers_of.get(counter)).flatten();
                    open.extend(led.copied().filter(|other| *other > item));
                }
            }
            if !any {
                break;
            }
        }
    }

    /// The item of highest dot product, of those that a counter caps and that fit.
    fn best_of_counter(&self, counter: u32, room: &[i64], prices: &[f64], allowed: &HashSet<usize>) -> Option<usize> {
        let direction: Vec<f64> = priced_direction(room, prices).collect();
        let mut best: Option<(f64, usize)> = None;
        for item in &self.capped_items[counter as usize] {
            if self.items[*item].remaining > self.scratch.taken[*item]
                && allowed.contains(&self.bucket_of[*item])
                && fits(self.need(*item), room)
                && self.host_capacity(*item) > 0
            {
                let score = dot(self.need(*item), &direction);
                if best.is_none_or(|(have, _)| score > have) {
                    best = Some((score, *item));
                }
            }
        }
        best.map(|(_, item)| item)
    }

    /// Dual value of a pod of the bucket's sample size, host caps excluded.
    fn bucket_value(&self, bucket: usize) -> f64 {
        let Some(first) = self.buckets[bucket].items.first() else { return 0.0 };
        let prices = &self.prices[self.tiers.class_of[*first]];
        self.sample(bucket).iter().zip(prices).map(|(n, p)| n * p).sum()
    }

    fn sample(&self, bucket: usize) -> &[f64] {
        &self.bucket_sample[bucket * self.dims..(bucket + 1) * self.dims]
    }

    fn bucket_min(&self, bucket: usize) -> &[i64] {
        &self.bucket_min[bucket * self.dims..(bucket + 1) * self.dims]
    }

    fn open_bucket(&self, bucket: usize, prices: &[f64], cosine_power: i32) -> OpenBucket {
        let norm = || self.sample(bucket).iter().zip(prices).map(|(n, price)| (n * price) * (n * price)).sum();
        OpenBucket { bucket, cosine: (cosine_power > 0).then(|| (norm(), cosine_power)) }
    }

    /// Score of a bucket: the dot product of its sample request with the free capacity, times a power of the cosine between them.
    /// The dot product alone would pick requests that are large in one resource and strand capacity in the others.
    fn score(&self, open: OpenBucket) -> f64 {
        let along: f64 = self.sample(open.bucket).iter().zip(&self.direction).map(|(n, direction)| n * direction).sum();
        match open.cosine {
            None => along,
            Some((norm, power)) if norm > 0.0 => along * (along * along / norm).powi(power),
            Some(_) => 0.0,
        }
    }

    /// Puts pods of the best-scored bucket that fits; false when none fits. Drops buckets that cannot contribute any more.
    fn put_best(&mut self, open: &mut Vec<OpenBucket>, prices: &[f64], fill: &mut Fill, single: bool) -> bool {
        self.work += open.len();
        self.direction.clear();
        self.direction.extend(priced_direction(&fill.room, prices));
        let mut best: Option<(f64, usize)> = None;
        let mut kept = 0;
        for at in 0..open.len() {
            let bucket = open[at];
            if !fits(self.bucket_min(bucket.bucket), &fill.room) {
                continue;
            }
            open[kept] = bucket;
            let score = self.score(bucket);
            if best.is_none_or(|(have, _)| score > have) {
                best = Some((score, kept));
            }
            kept += 1;
        }
        open.truncate(kept);
        while let Some((_, at)) = best {
            let found = self.buckets[open[at].bucket]
                .items
                .iter()
                .take(MAX_ITEMS_TRIED)
                .map(|item| (*item, self.max_count(*item, &fill.room)))
                .find(|(_, count)| *count > 0);
            if let Some((item, count)) = found {
                // Half of the pods that fit, so that the next score sees a changed direction and the mix is preserved.
                let count = if single { 1 } else { count.div_ceil(2) };
                self.put(item, count, fill);
                return true;
            }
            open.remove(at);
            best = None;
            for (at, bucket) in open.iter().enumerate() {
                let score = self.score(*bucket);
                if best.is_none_or(|(have, _)| score > have) {
                    best = Some((score, at));
                }
            }
        }
        false
    }

    /// Local search in one bin: repeatedly swaps one pod for a more valuable pod that fits in its place, best gain first. Pods
    /// with host rules stay, and so does the last pod of the seed. Requires an initially empty bin and no followers.
    fn improve_by_swaps(&mut self, buckets: &[usize], seed: Option<usize>, fill: &mut Fill) {
        let mut freed = vec![0; self.dims];
        // A bucket below the lowest value in the bin cannot improve any swap.
        let lowest = fill.added.iter().map(|(item, _)| self.value(*item)).fold(f64::INFINITY, f64::min);
        let valued = buckets.iter().map(|bucket| (self.bucket_value(*bucket), *bucket));
        let mut valued: Vec<(f64, usize)> = valued.filter(|(value, _)| *value > lowest).collect();
        valued.sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        for _ in 0..MAX_SWAPS {
            let of_seed = |item: usize| Some(self.items[item].column_pool) == seed;
            let seed_pods: usize = fill.added.iter().filter(|(item, _)| of_seed(*item)).map(|(_, count)| *count).sum();
            let mut best: Option<(f64, usize, usize)> = None;
            for (at, (item, _)) in fill.added.iter().enumerate() {
                if !self.host(*item).is_free() || (of_seed(*item) && seed_pods == 1) {
                    continue;
                }
                for ((f, r), n) in freed.iter_mut().zip(&fill.room).zip(self.need(*item)) {
                    *f = r + n;
                }
                let (own, best_gain) = (self.value(*item), best.map_or(0.0, |(gain, ..)| gain));
                self.work += buckets.len() / 2;
                let min_gain = best_gain.max(own * MIN_SWAP_GAIN);
                for (_, bucket) in valued.iter().take_while(|(value, _)| value - own > min_gain) {
                    if !fits(self.bucket_min(*bucket), &freed) {
                        continue;
                    }
                    let other = self.buckets[*bucket].items.iter().copied().take(SWAP_ITEMS_TRIED).find(|other| {
                        *other != *item
                            && self.host(*other).is_free()
                            && self.items[*other].remaining > self.scratch.taken[*other]
                            && fits(self.need(*other), &freed)
                    });
                    if let Some(other) = other {
                        let gain = self.value(other) - own;
                        if gain > own * MIN_SWAP_GAIN && best.is_none_or(|(have, ..)| gain > have) {
                            best = Some((gain, at, other));
                        }
                    }
                }
            }
            let Some((_, at, other)) = best else { break };
            let item = fill.added[at].0;
            fill.added[at].1 -= 1;
            self.scratch.taken[item] -= 1;
            for (r, n) in fill.room.iter_mut().zip(self.need(item)) {
                *r += n;
            }
            if fill.added[at].1 == 0 {
                fill.added.remove(at);
            }
            let count = self.max_count(other, &fill.room);
            self.put(other, count, fill);
        }
    }
}

fn subtract(room: &mut [i64], need: &[i64], count: usize) {
    let count = i64::try_from(count).unwrap_or(i64::MAX);
    for (r, n) in room.iter_mut().zip(need) {
        *r -= n * count;
    }
}

/// The free capacity as weights of requests: a dot product with it is the product of the two priced vectors, so each price counts
/// squared.
fn priced_direction(room: &[i64], prices: &[f64]) -> impl Iterator<Item = f64> {
    room.iter().zip(prices).map(|(r, p)| real((*r).max(0)) * p * p)
}

#[cfg(test)]
mod tests;
