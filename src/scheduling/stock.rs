//! What is left to place, and the filling of one bin with it.
//!
//! Items (a part of a group) lie in buckets of one place (what nodes they may use) and nearly one size. A bin is filled
//! from the bucket whose requests, valued at the dual prices, point most nearly where the bin's remaining room points and
//! are largest: the work is per bucket, not per pod. Floats appear only here and in [`super::duals`], as scores; every
//! capacity test is on integers.

use std::collections::HashMap;

use super::existing::HostState;
use super::groups::{Group, HostRules};
use super::topology::{Part, Topology};
use super::universe::{Universe, fits};

/// Distinct sizes above which sizes are rounded into buckets.
const EXACT_SIZES: usize = 200;
/// Items of a bucket that are tried before the bucket is passed over.
const TRIES: usize = 48;

/// Which nodes items may use.
#[derive(Debug)]
pub(super) struct Place {
    /// A group whose node constraints all items of the place share.
    pub sample: usize,
    pub pins: Vec<(usize, usize)>,
    /// Signatures by preference level.
    pub levels: Vec<usize>,
}

/// Pods of one part of a group.
#[derive(Debug)]
pub(super) struct Item {
    pub group: usize,
    pub place: usize,
    pub left: usize,
    /// Pods taken so far come from the front of the group's list, in the order items were made.
    pub first: usize,
}

/// Items of one place and nearly one size.
#[derive(Debug)]
struct Bucket {
    place: usize,
    items: Vec<usize>,
    /// Its items must follow others: they are placed by [`Stock::put_wanting`] alone.
    follows: bool,
}

/// What a bin holds: items and how many pods of each.
pub(super) type Content = Vec<(usize, usize)>;

/// A bin to fill.
pub(super) struct Bin<'b> {
    pub room: &'b [i64],
    pub host: &'b HostState,
    pub content: &'b [(usize, usize)],
}

/// What is left to place.
pub(super) struct Stock<'g> {
    pub groups: &'g [Group],
    pub items: Vec<Item>,
    pub places: Vec<Place>,
    buckets: Vec<Bucket>,
    /// Least request of any item of each bucket, and the request of its first item; `dims` numbers a bucket.
    least: Vec<i64>,
    sample: Vec<f64>,
    dims: usize,
    bucket_of: Vec<usize>,
    /// Pods left in each place.
    left_of: Vec<usize>,
    /// Price of one unit of each resource, by item's place.
    place_prices: Vec<Vec<f64>>,
    /// Items that a counter caps, by counter.
    capped: Vec<Vec<usize>>,
    wanting: Vec<usize>,
    pub soft_cap: Vec<i32>,
    /// Buckets compared so far: the work done, which ends improvement.
    pub work: usize,
    scratch: Scratch,
}

#[derive(Default)]
struct Scratch {
    taken: Vec<usize>,
    counts: Vec<i32>,
    caps: Vec<i32>,
    touched: Vec<u32>,
}

impl<'g> Stock<'g> {
    pub fn new(
        universe: &mut Universe<'_>,
        topology: &Topology,
        groups: &'g [Group],
        parts: &[Part],
        counters: usize,
        by_priority: bool,
    ) -> Self {
        let mut places: Vec<Place> = Vec::new();
        let mut place_ids: HashMap<(Vec<usize>, ConstraintKey<'g>), usize> = HashMap::new();
        let mut items: Vec<Item> = Vec::new();
        let mut next: Vec<usize> = vec![0; groups.len()];
        for part in parts {
            let group = &groups[part.group];
            let first = next[part.group];
            next[part.group] += part.count;
            if part.refused.is_some() {
                continue;
            }
            let levels: Vec<usize> = group
                .levels
                .iter()
                .map(|bits| {
                    let mut bits = bits.clone();
                    for (key, domain) in &part.pins {
                        bits.and(&topology.keys[*key].columns[*domain]);
                    }
                    universe.signature(bits)
                })
                .collect();
            let constraint = ConstraintKey {
                terms: &group.class.node_terms,
                volumes: &group.class.volume_terms,
                tolerations: &group.class.tolerations,
                pins: part.pins.clone(),
                priority: by_priority.then_some(group.class.priority),
            };
            let place = *place_ids.entry((levels.clone(), constraint)).or_insert_with(|| {
                places.push(Place { sample: part.group, pins: part.pins.clone(), levels });
                places.len() - 1
            });
            items.push(Item { group: part.group, place, left: part.count, first });
        }
        let mut capped = vec![Vec::new(); counters];
        let mut wanting = Vec::new();
        for (at, item) in items.iter().enumerate() {
            let host = &groups[item.group].host;
            for (counter, _) in &host.caps {
                if host.raises.contains(counter) {
                    capped[*counter as usize].push(at);
                }
            }
            if !host.wants.is_empty() {
                wanting.push(at);
            }
        }
        let scratch = Scratch {
            taken: vec![0; items.len()],
            counts: vec![0; counters],
            caps: vec![i32::MAX; counters],
            touched: Vec::new(),
        };
        let dims = universe.dims.len();
        let mut stock = Self {
            groups,
            place_prices: vec![vec![1.0; dims]; places.len()],
            items,
            places,
            buckets: Vec::new(),
            least: Vec::new(),
            sample: Vec::new(),
            dims,
            bucket_of: Vec::new(),
            left_of: Vec::new(),
            capped,
            wanting,
            soft_cap: vec![i32::MAX; counters],
            work: 0,
            scratch,
        };
        stock.build_buckets();
        stock
    }

    fn build_buckets(&mut self) {
        let mut sizes: std::collections::HashSet<&[i64]> = std::collections::HashSet::new();
        let exact = self.items.iter().all(|item| {
            sizes.insert(&self.groups[item.group].need);
            sizes.len() <= EXACT_SIZES
        });
        let mut ids: HashMap<(usize, bool, Vec<i64>), usize> = HashMap::new();
        let mut buckets: Vec<Bucket> = Vec::new();
        let mut bucket_of = Vec::with_capacity(self.items.len());
        let mut least: Vec<i64> = Vec::new();
        let mut left_of = vec![0; self.places.len()];
        for (at, item) in self.items.iter().enumerate() {
            let need = &self.groups[item.group].need;
            let size: Vec<i64> = if exact { need.clone() } else { need.iter().map(|n| rounded(*n)).collect() };
            let follows = !self.groups[item.group].host.wants.is_empty();
            let id = *ids.entry((item.place, follows, size)).or_insert_with(|| {
                buckets.push(Bucket { place: item.place, items: Vec::new(), follows });
                least.extend_from_slice(need);
                buckets.len() - 1
            });
            if !follows {
                buckets[id].items.push(at);
            }
            for (least, n) in least[id * self.dims..].iter_mut().zip(need) {
                *least = (*least).min(*n);
            }
            bucket_of.push(id);
            left_of[item.place] += item.left;
        }
        // Largest first within a bucket, so that what fits is what fills.
        for bucket in &mut buckets {
            bucket.items.sort_by(|a, b| {
                let need = |at: &usize| &self.groups[self.items[*at].group].need;
                need(b).cmp(need(a)).then(a.cmp(b))
            });
        }
        self.sample = vec![0.0; buckets.len() * self.dims];
        self.buckets = buckets;
        self.bucket_of = bucket_of;
        self.least = least;
        self.left_of = left_of;
        for bucket in 0..self.buckets.len() {
            self.resample(bucket);
        }
    }

    /// Notes the requests of a bucket's first item.
    fn resample(&mut self, bucket: usize) {
        if let Some(first) = self.buckets[bucket].items.first() {
            let need = &self.groups[self.items[*first].group].need;
            let sample = &mut self.sample[bucket * self.dims..(bucket + 1) * self.dims];
            sample.iter_mut().zip(need).for_each(|(s, n)| *s = real(*n));
        }
    }

    /// Pods left in a place.
    pub fn left_of(&self, place: usize) -> usize {
        self.left_of[place]
    }

    /// The most valuable item left of a place, looking at the largest of each bucket.
    pub fn largest(&self, place: usize) -> Option<usize> {
        let firsts = self.buckets.iter().filter(|b| b.place == place).filter_map(|b| b.items.first().copied());
        firsts.max_by(|a, b| self.worth(*a).total_cmp(&self.worth(*b)).then(b.cmp(a)))
    }

    pub fn need(&self, item: usize) -> &'g [i64] {
        &self.groups[self.items[item].group].need
    }

    pub fn host(&self, item: usize) -> &'g HostRules {
        &self.groups[self.items[item].group].host
    }

    pub fn is_empty(&self) -> bool {
        self.items.iter().all(|item| item.left == 0)
    }

    pub fn set_prices(&mut self, place: usize, prices: Vec<f64>) {
        self.place_prices[place] = prices;
    }

    /// Prices by place.
    pub fn prices(&self) -> &[Vec<f64>] {
        &self.place_prices
    }

    /// What one pod of an item is worth at the dual prices.
    pub fn worth(&self, item: usize) -> f64 {
        worth(self.need(item), &self.place_prices[self.items[item].place])
    }

    pub fn content_worth(&self, content: &[(usize, usize)]) -> f64 {
        content.iter().map(|(item, count)| self.worth(*item) * float(*count)).sum()
    }

    /// Nodes that the caps per node make necessary for what is left, and the counters that need nearly as many.
    pub fn nodes_needed(&self) -> (usize, Vec<u32>) {
        let mut needed: Vec<(usize, u32)> = Vec::new();
        for (counter, items) in self.capped.iter().enumerate() {
            let id = u32::try_from(counter).unwrap_or(u32::MAX);
            let mut pods = 0;
            let mut cap = 1;
            for item in items.iter().filter(|item| self.items[**item].left > 0) {
                pods += self.items[*item].left;
                let own = self.host(*item).caps.iter().find(|(c, _)| *c == id).map_or(1, |(_, cap)| (*cap).max(1));
                cap = cap.max(usize::try_from(own).unwrap_or(1));
            }
            if pods > 0 {
                needed.push((pods.div_ceil(cap), id));
            }
        }
        let most = needed.iter().map(|(n, _)| *n).max().unwrap_or(0);
        needed.retain(|(n, _)| *n * 4 >= most * 3);
        needed.sort_by_key(|(n, id)| (std::cmp::Reverse(*n), *id));
        (most, needed.into_iter().map(|(_, id)| id).collect())
    }

    /// Items that want company on their node.
    pub fn wanting(&self) -> Vec<usize> {
        self.wanting.clone()
    }

    /// Takes content out of the stock, `copies` times.
    pub fn take(&mut self, content: &[(usize, usize)], copies: usize) {
        for (item, count) in content {
            self.items[*item].left -= count * copies;
            self.left_of[self.items[*item].place] -= count * copies;
            if self.items[*item].left == 0 {
                let bucket = self.bucket_of[*item];
                self.buckets[bucket].items.retain(|have| have != item);
                self.resample(bucket);
            }
        }
    }

    /// Puts content back.
    pub fn give_back(&mut self, content: &[(usize, usize)]) {
        for (item, count) in content {
            if self.items[*item].left == 0 && !self.buckets[self.bucket_of[*item]].follows {
                let bucket = self.bucket_of[*item];
                let groups = self.groups;
                let items = &self.items;
                let key = |at: usize| (std::cmp::Reverse(&groups[items[at].group].need), at);
                let at = self.buckets[bucket].items.partition_point(|have| key(*have) < key(*item));
                self.buckets[bucket].items.insert(at, *item);
                self.resample(bucket);
            }
            self.items[*item].left += count;
            self.left_of[self.items[*item].place] += count;
        }
    }

    /// Buckets with something left whose place is accepted.
    pub fn open_buckets(&self, accepts: impl Fn(usize) -> bool) -> Vec<usize> {
        (0..self.buckets.len())
            .filter(|b| {
                let bucket = &self.buckets[*b];
                (!bucket.items.is_empty() || (bucket.follows && self.left_of[bucket.place] > 0))
                    && accepts(bucket.place)
            })
            .collect()
    }

    fn host_room(&self, item: usize, soft: bool) -> i32 {
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
            let mut cap = own.min(s.caps[*counter as usize]);
            if soft && rules.soft.contains(counter) {
                cap = cap.min(self.soft_cap[*counter as usize]);
            }
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
    /// nothing leaves the stock until [`Stock::take`].
    pub fn fill(
        &mut self,
        bin: &Bin<'_>,
        prices: &[f64],
        buckets: &[usize],
        seed: Option<usize>,
        first: &[u32],
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
        let mut active: Vec<usize> = buckets.to_vec();
        if let Some(place) = seed
            && !content.iter().any(|(item, _)| self.items[*item].place == place)
        {
            let mut of_place: Vec<usize> = active.iter().copied().filter(|b| self.buckets[*b].place == place).collect();
            if !self.pick(&mut of_place, &mut room, prices, true, &mut content, true) {
                self.end(&content);
                // What had to come first left no room for the one pod that the node is for.
                return if first.is_empty() { Vec::new() } else { self.fill(bin, prices, buckets, seed, &[]) };
            }
        }
        for soft in [true, false] {
            let mut open = active.clone();
            loop {
                if !self.wanting.is_empty() {
                    self.put_wanting(&mut room, &mut content, &allowed);
                }
                if !self.pick(&mut open, &mut room, prices, soft, &mut content, false) {
                    break;
                }
            }
            active.retain(|b| fits(self.least(*b), &room));
        }
        self.end(&content);
        content
    }

    fn put_wanting(&mut self, room: &mut [i64], content: &mut Content, allowed: &std::collections::HashSet<usize>) {
        for at in 0..self.wanting.len() {
            let item = self.wanting[at];
            if !allowed.contains(&self.bucket_of[item]) {
                continue;
            }
            let count = self.count_that_fits(item, room, false);
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
                && self.host_room(*item, true) > 0
            {
                let score = dot(self.need(*item), &direction);
                if best.is_none_or(|(have, _)| score > have) {
                    best = Some((score, *item));
                }
            }
        }
        best.map(|(_, item)| item)
    }

    fn count_that_fits(&self, item: usize, room: &[i64], soft: bool) -> usize {
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
        let host = usize::try_from(self.host_room(item, soft)).unwrap_or(0);
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

    fn least(&self, bucket: usize) -> &[i64] {
        &self.least[bucket * self.dims..(bucket + 1) * self.dims]
    }

    fn score(&self, bucket: usize, direction: &[f64]) -> f64 {
        let sample = &self.sample[bucket * self.dims..(bucket + 1) * self.dims];
        sample.iter().zip(direction).map(|(n, d)| n * d).sum()
    }

    /// Puts the best item in; false when none fits. Buckets that can't contribute any more are dropped from `open`.
    fn pick(
        &mut self,
        open: &mut Vec<usize>,
        room: &mut [i64],
        prices: &[f64],
        soft: bool,
        content: &mut Content,
        single: bool,
    ) -> bool {
        let direction = direction(room, prices);
        self.work += open.len();
        let mut order: Option<(f64, usize)> = None;
        open.retain(|b| {
            if self.buckets[*b].items.is_empty() || !fits(self.least(*b), room) {
                return false;
            }
            let score = self.score(*b, &direction);
            if order.is_none_or(|(have, _)| score > have) {
                order = Some((score, *b));
            }
            true
        });
        while let Some((_, best)) = order {
            let found = self.buckets[best]
                .items
                .iter()
                .take(TRIES)
                .map(|item| (*item, self.count_that_fits(*item, room, soft)))
                .find(|(_, count)| *count > 0);
            if let Some((item, count)) = found {
                // Half of what fits at a time keeps the mix while many are left.
                let count = if single { 1 } else { count.div_ceil(2) };
                self.put(item, count, room, content);
                return true;
            }
            open.retain(|b| *b != best);
            order = None;
            for b in open.iter() {
                let score = self.score(*b, &direction);
                if order.is_none_or(|(have, _)| score > have) {
                    order = Some((score, *b));
                }
            }
        }
        false
    }
}

/// The node constraints of a class, for telling places apart.
#[derive(PartialEq, Eq, Hash)]
struct ConstraintKey<'g> {
    terms: &'g [super::class::NodeTerm],
    volumes: &'g [super::class::NodeTerm],
    tolerations: &'g [super::class::Toleration],
    pins: Vec<(usize, usize)>,
    /// Set when pods are placed in order of priority.
    priority: Option<i32>,
}

/// A size rounded to an eighth of an octave or so: the three highest bits.
fn rounded(n: i64) -> i64 {
    if n <= 8 {
        return n;
    }
    let shift = 61_i64.saturating_sub(i64::from(n.leading_zeros()));
    (n >> shift) << shift
}

fn subtract(room: &mut [i64], need: &[i64], count: usize) {
    let count = i64::try_from(count).unwrap_or(i64::MAX);
    for (r, n) in room.iter_mut().zip(need) {
        *r -= n * count;
    }
}

#[allow(clippy::cast_precision_loss)]
pub(super) fn real(n: i64) -> f64 {
    n as f64
}

#[allow(clippy::cast_precision_loss)]
pub(super) fn float(n: usize) -> f64 {
    n as f64
}

/// Where the remaining room points, valued.
fn direction(room: &[i64], prices: &[f64]) -> Vec<f64> {
    room.iter().zip(prices).map(|(r, p)| real((*r).max(0)) * p * p).collect()
}

fn dot(need: &[i64], direction: &[f64]) -> f64 {
    need.iter().zip(direction).map(|(n, d)| real(*n) * d).sum()
}

pub(super) fn worth(need: &[i64], prices: &[f64]) -> f64 {
    dot(need, prices)
}
