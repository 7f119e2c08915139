//! The filling of one bin.

use crate::planner::columns::dims::{dot, fits, real};
use crate::planner::state::demand::{Bin, Content, Demand};

/// Items of a bucket that are tried before the bucket is passed over.
const TRIES: usize = 48;
/// Exchanges that better one content, and items of a bucket that are tried in each.
const EXCHANGES: usize = 12;
const EXCHANGE_TRIES: usize = 12;

/// A bucket that may still contribute to a bin.
#[derive(Clone, Copy)]
struct Open {
    bucket: usize,
    /// Square of the value of one of its pods, and the power of the cosine that its score has; `None` without one.
    square: Option<(f64, i32)>,
}

impl Demand<'_> {
    fn host_room(&self, item: usize) -> i32 {
        let rules = self.host(item);
        if rules.is_free() {
            return i32::MAX;
        }
        let s = &self.scratch;
        let mut room = i32::MAX;
        for (counter, cap) in &rules.caps {
            if !rules.raises.contains(counter) && s.counts[*counter as usize] > *cap {
                return 0;
            }
        }
        for counter in &rules.raises {
            let own = rules.caps.iter().find(|(c, _)| c == counter).map_or(i32::MAX, |(_, cap)| *cap);
            let cap = own.min(s.caps[*counter as usize]);
            room = room.min(cap.saturating_sub(s.counts[*counter as usize]));
        }
        if rules.wants.iter().any(|(counter, _)| s.counts[*counter as usize] == 0) {
            return 0;
        }
        room.max(0)
    }

    fn apply_host(&mut self, item: usize, count: i32) {
        let rules = &self.groups[self.items[item].group].host;
        let s = &mut self.scratch;
        for counter in &rules.raises {
            s.counts[*counter as usize] += count;
            s.touched.push(*counter);
        }
        for (counter, cap) in &rules.caps {
            let have = &mut s.caps[*counter as usize];
            *have = (*have).min(*cap);
            s.touched.push(*counter);
        }
    }

    fn begin(&mut self, bin: &Bin<'_>) -> Vec<i64> {
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
        for (item, count) in bin.content {
            subtract(&mut room, self.need(*item), *count);
            self.apply_host(*item, i32::try_from(*count).unwrap_or(i32::MAX));
        }
        room
    }

    fn end(&mut self, content: &[(usize, usize)]) {
        for counter in self.scratch.touched.drain(..) {
            self.scratch.counts[counter as usize] = 0;
            self.scratch.caps[counter as usize] = i32::MAX;
        }
        for (item, _) in content {
            self.scratch.taken[*item] = 0;
        }
    }

    /// Whether a bin can begin with its content: it fits and keeps every rule about pods on one host.
    pub fn host_starts(&mut self, bin: &Bin<'_>) -> bool {
        let room = self.begin(bin);
        let s = &self.scratch;
        let fits = room.iter().all(|r| *r >= 0);
        let allowed = s.touched.iter().all(|c| s.counts[*c as usize] <= s.caps[*c as usize]);
        self.end(&[]);
        fits && allowed
    }

    /// The pods that must follow what a bin holds and fit with it.
    pub fn follow(&mut self, bin: &Bin<'_>, buckets: &[usize]) -> Content {
        let mut room = self.begin(bin);
        let mut content: Content = Vec::new();
        for (item, count) in bin.content {
            self.scratch.taken[*item] += count;
        }
        let allowed = buckets.iter().copied().collect();
        self.put_wanting(&mut room, &mut content, &allowed);
        self.end(&content);
        for (item, _) in bin.content {
            self.scratch.taken[*item] = 0;
        }
        content
    }

    /// Fills a bin from `buckets`, first with items of `first` counters, then by direction and size. Returns what to add;
    /// nothing leaves the demand until [`Demand::take`]. `power` is how much the direction counts against the size.
    pub fn fill(
        &mut self,
        bin: &Bin<'_>,
        prices: &[f64],
        buckets: &[usize],
        seed: Option<usize>,
        first: &[u32],
        power: i32,
    ) -> Content {
        let mut room = self.begin(bin);
        let mut content: Content = Vec::new();
        let allowed: std::collections::HashSet<usize> = if first.is_empty() && self.wanting.is_empty() {
            std::collections::HashSet::default()
        } else {
            buckets.iter().copied().collect()
        };
        for counter in first {
            let best = self.best_of_counter(*counter, &room, prices, &allowed);
            if let Some(item) = best {
                self.put(item, 1, &mut room, &mut content);
            }
        }
        let some = buckets.iter().copied().filter(|bucket| !self.buckets[*bucket].items.is_empty());
        let mut active: Vec<Open> = some.map(|bucket| self.open(bucket, prices, power)).collect();
        if let Some(place) = seed
            && !content.iter().any(|(item, _)| self.items[*item].place == place)
        {
            let of_place = active.iter().filter(|open| self.buckets[open.bucket].place == place);
            let mut of_place: Vec<Open> = of_place.map(|open| Open { square: None, ..*open }).collect();
            if !self.pick(&mut of_place, &mut room, prices, &mut content, true) {
                self.end(&content);
                // What had to come first left no room for the one pod that the node is for.
                return if first.is_empty() { Vec::new() } else { self.fill(bin, prices, buckets, seed, &[], power) };
            }
        }
        loop {
            if !self.wanting.is_empty() {
                self.put_wanting(&mut room, &mut content, &allowed);
            }
            if !self.pick(&mut active, &mut room, prices, &mut content, false) {
                break;
            }
        }
        self.exchange(bin.content.len(), &mut room, buckets, seed, &mut content);
        self.end(&content);
        content
    }

    /// Betters a content pod by pod: one leaves for one that is worth more and fits in its place. Pods with rules about
    /// their host stay, and so does the last of the place that the bin is bought for.
    fn exchange(
        &mut self,
        held: usize,
        room: &mut [i64],
        buckets: &[usize],
        seed: Option<usize>,
        content: &mut Content,
    ) {
        if held > 0 || !self.wanting.is_empty() {
            return;
        }
        let mut freed = vec![0; self.dims];
        // Nothing leaves for what is worth less than the least of what is there.
        let least_own = content.iter().map(|(item, _)| self.worth(*item)).fold(f64::INFINITY, f64::min);
        let valued = buckets.iter().map(|bucket| (self.sample_value(*bucket), *bucket));
        let mut valued: Vec<(f64, usize)> = valued.filter(|(value, _)| *value > least_own).collect();
        valued.sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        for _ in 0..EXCHANGES {
            let of_seed = |item: usize| Some(self.items[item].place) == seed;
            let kept: usize = content.iter().filter(|(item, _)| of_seed(*item)).map(|(_, count)| *count).sum();
            let mut best: Option<(f64, usize, usize)> = None;
            for (at, (item, _)) in content.iter().enumerate() {
                if !self.host(*item).is_free() || (of_seed(*item) && kept == 1) {
                    continue;
                }
                for ((f, r), n) in freed.iter_mut().zip(room.iter()).zip(self.need(*item)) {
                    *f = r + n;
                }
                let (own, least) = (self.worth(*item), best.map_or(0.0, |(gain, ..)| gain));
                self.work += buckets.len() / 2;
                let worthwhile = least.max(own * 1e-3);
                for (_, bucket) in valued.iter().take_while(|(value, _)| value - own > worthwhile) {
                    let bucket = *bucket;
                    if !fits(self.least(bucket), &freed) {
                        continue;
                    }
                    let other = self.buckets[bucket].items.iter().copied().take(EXCHANGE_TRIES).find(|other| {
                        *other != *item
                            && self.host(*other).is_free()
                            && self.items[*other].left > self.scratch.taken[*other]
                            && fits(self.need(*other), &freed)
                    });
                    if let Some(other) = other {
                        let gain = self.worth(other) - own;
                        if gain > own * 1e-3 && best.is_none_or(|(have, ..)| gain > have) {
                            best = Some((gain, at, other));
                        }
                    }
                }
            }
            let Some((_, at, other)) = best else { break };
            let item = content[at].0;
            content[at].1 -= 1;
            self.scratch.taken[item] -= 1;
            for (r, n) in room.iter_mut().zip(self.need(item)) {
                *r += n;
            }
            if content[at].1 == 0 {
                content.remove(at);
            }
            let count = self.count_that_fits(other, room);
            self.put(other, count, room, content);
        }
    }

    fn put_wanting(&mut self, room: &mut [i64], content: &mut Content, allowed: &std::collections::HashSet<usize>) {
        for at in 0..self.wanting.len() {
            let item = self.wanting[at];
            if !allowed.contains(&self.bucket_of[item]) {
                continue;
            }
            let count = self.count_that_fits(item, room);
            if count > 0 {
                self.put(item, count, room, content);
            }
        }
    }

    fn best_of_counter(
        &self,
        counter: u32,
        room: &[i64],
        prices: &[f64],
        allowed: &std::collections::HashSet<usize>,
    ) -> Option<usize> {
        let direction = direction(room, prices);
        let mut best: Option<(f64, usize)> = None;
        for item in &self.capped[counter as usize] {
            if self.items[*item].left > self.scratch.taken[*item]
                && allowed.contains(&self.bucket_of[*item])
                && fits(self.need(*item), room)
                && self.host_room(*item) > 0
            {
                let score = dot(self.need(*item), &direction);
                if best.is_none_or(|(have, _)| score > have) {
                    best = Some((score, *item));
                }
            }
        }
        best.map(|(_, item)| item)
    }

    fn count_that_fits(&self, item: usize, room: &[i64]) -> usize {
        let left = self.items[item].left - self.scratch.taken[item];
        if left == 0 {
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
        let host = usize::try_from(self.host_room(item)).unwrap_or(0);
        left.min(usize::try_from(by_room).unwrap_or(usize::MAX)).min(host)
    }

    fn put(&mut self, item: usize, count: usize, room: &mut [i64], content: &mut Content) {
        subtract(room, self.need(item), count);
        match content.iter_mut().find(|(have, _)| self.scratch.taken[item] > 0 && *have == item) {
            Some((_, have)) => *have += count,
            None => content.push((item, count)),
        }
        self.scratch.taken[item] += count;
        self.apply_host(item, i32::try_from(count).unwrap_or(i32::MAX));
    }

    /// What a pod of a bucket is worth, about.
    fn sample_value(&self, bucket: usize) -> f64 {
        let prices = &self.place_prices[self.buckets[bucket].place];
        let sample = &self.sample[bucket * self.dims..(bucket + 1) * self.dims];
        sample.iter().zip(prices).map(|(n, p)| n * p).sum()
    }

    fn least(&self, bucket: usize) -> &[i64] {
        &self.least[bucket * self.dims..(bucket + 1) * self.dims]
    }

    /// A bucket to pick from, by a power of the cosine.
    fn open(&self, bucket: usize, prices: &[f64], power: i32) -> Open {
        let sample = &self.sample[bucket * self.dims..(bucket + 1) * self.dims];
        let square = || sample.iter().zip(prices).map(|(n, price)| (n * price) * (n * price)).sum();
        Open { bucket, square: (power > 0).then(|| (square(), power)) }
    }

    /// How well a bucket's pods go with the room that is left: their size along it, times a power of the cosine between
    /// the two. Size alone would take what is large in one resource, and leave room in the others that nothing fills.
    fn score(&self, open: Open) -> f64 {
        let sample = &self.sample[open.bucket * self.dims..(open.bucket + 1) * self.dims];
        let along: f64 = sample.iter().zip(&self.direction).map(|(n, direction)| n * direction).sum();
        match open.square {
            None => along,
            Some((square, power)) if square > 0.0 => along * (along * along / square).powi(power),
            Some(_) => 0.0,
        }
    }

    /// Puts the best item in, a single pod or what keeps the mix; false when none fits. Buckets that can't contribute any more are dropped from `open`.
    fn pick(
        &mut self,
        open: &mut Vec<Open>,
        room: &mut [i64],
        prices: &[f64],
        content: &mut Content,
        single: bool,
    ) -> bool {
        self.work += open.len();
        self.direction.clear();
        self.direction.extend(room.iter().zip(prices).map(|(r, p)| real((*r).max(0)) * p * p));
        let mut best: Option<(f64, usize)> = None;
        let mut kept = 0;
        for at in 0..open.len() {
            let bucket = open[at];
            if !fits(self.least(bucket.bucket), room) {
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
                .take(TRIES)
                .map(|item| (*item, self.count_that_fits(*item, room)))
                .find(|(_, count)| *count > 0);
            if let Some((item, count)) = found {
                // Half of what fits at a time keeps the mix while many are left.
                let count = if single { 1 } else { count.div_ceil(2) };
                self.put(item, count, room, content);
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
}

fn subtract(room: &mut [i64], need: &[i64], count: usize) {
    let count = i64::try_from(count).unwrap_or(i64::MAX);
    for (r, n) in room.iter_mut().zip(need) {
        *r -= n * count;
    }
}

/// Where the remaining room points, valued.
fn direction(room: &[i64], prices: &[f64]) -> Vec<f64> {
    room.iter().zip(prices).map(|(r, p)| real((*r).max(0)) * p * p).collect()
}
