//! What is left to place, and the filling of one bin with it.
//!
//! Items (a part of a group) lie in buckets of one place (what nodes they may use) and nearly one size. A bin is filled
//! from the bucket whose requests, valued at the dual prices, point most nearly where the bin's remaining room points and
//! are largest: the work is per bucket, not per pod. Floats appear only here and in [`super::duals`], as scores; every
//! capacity test is on integers.

use std::collections::HashMap;

use super::bits::Bits;
use super::existing::HostState;
use super::groups::{Group, HostRules};
use super::topology::{Part, Topology};
use super::universe::{Universe, fits};

/// Distinct sizes above which sizes are rounded into buckets.
const EXACT_SIZES: usize = 200;
/// Items of a bucket that are tried before the bucket is passed over.
const TRIES: usize = 48;
/// Exchanges that better one content, and items of a bucket that are tried in each.
const EXCHANGES: usize = 12;
const EXCHANGE_TRIES: usize = 12;
/// Most slots that prices know of.
const MAX_SLOTS: usize = 3;

/// Which nodes items may use.
#[derive(Debug)]
pub(super) struct Place {
    /// A group whose node constraints all items of the place share.
    pub sample: usize,
    pub pins: Vec<(usize, usize)>,
    /// Signatures by preference level.
    pub levels: Vec<usize>,
}

/// Pods of one part of a group, or of several that nothing tells apart while nodes are filled.
#[derive(Clone, Copy, Debug)]
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

/// Pods of which one node holds at most `cap`.
pub(super) struct Slot {
    counter: u32,
    cap: i64,
    /// Items that use it up.
    members: Bits,
}

/// What is left to place.
pub(super) struct Stock<'g> {
    pub groups: &'g [Group],
    pub items: Vec<Item>,
    /// What each item was made of, until [`Stock::split`].
    parts: Vec<Vec<Item>>,
    pub places: Vec<Place>,
    buckets: Vec<Bucket>,
    /// Least request of any item of each bucket, and the request of its first item; `dims` numbers a bucket.
    least: Vec<i64>,
    sample: Vec<f64>,
    dims: usize,
    bucket_of: Vec<usize>,
    /// Buckets hold items of nearly one size rather than of one.
    rounded: bool,
    /// Pods left in each place.
    left_of: Vec<usize>,
    /// Price of one unit of each resource, by item's place.
    place_prices: Vec<Vec<f64>>,
    /// Items that a counter caps, by counter.
    capped: Vec<Vec<usize>>,
    wanting: Vec<usize>,
    /// What prices know of the caps per node.
    pub slots: Vec<Slot>,
    /// Buckets compared so far: the work done, which ends improvement.
    pub work: usize,
    /// Where the room of the bin that is being filled points.
    direction: Vec<f64>,
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
                    // What asks for an extended resource competes for few types: prices shall know which ones hold it.
                    if is_extended(&group.need) {
                        let mut holding = bits.clone();
                        holding.and(&universe.where_column(|column| fits(&group.need, universe.room(column))));
                        if !holding.is_empty() {
                            bits = holding;
                        }
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
        let (items, parts) = merged(items, groups);
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
            parts,
            places,
            buckets: Vec::new(),
            least: Vec::new(),
            sample: Vec::new(),
            dims,
            bucket_of: Vec::new(),
            rounded: false,
            left_of: Vec::new(),
            capped,
            wanting,
            slots: Vec::new(),
            work: 0,
            direction: Vec::with_capacity(dims),
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
            let size: Vec<i64> = if exact { need.clone() } else { need.iter().map(|n| rounded(*n, 2)).collect() };
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
        self.rounded = !exact;
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
        self.worth_at(item, &self.place_prices[self.items[item].place])
    }

    /// What one pod of an item is worth at given prices of resources and slots.
    pub fn worth_at(&self, item: usize, prices: &[f64]) -> f64 {
        let slots: f64 = if self.slots.is_empty() {
            0.0
        } else {
            let of_slots = prices.get(self.dims..).unwrap_or_default();
            self.slots
                .iter()
                .zip(of_slots)
                .filter(|(slot, _)| slot.members.contains(item))
                .map(|(_, price)| price)
                .sum()
        };
        worth(self.need(item), prices) + slots
    }

    pub fn content_worth(&self, content: &[(usize, usize)]) -> f64 {
        content.iter().map(|(item, count)| self.worth(*item) * float(*count)).sum()
    }

    /// Chooses the slots that prices know of: counters whose caps make many nodes necessary, most first. With `certain`,
    /// only those that no plan can do without: pods that keep each other off by required anti-affinity or host ports. (A
    /// spread over hosts caps a node only as long as another has fewer, so it is a slot for our packing, not for a bound.)
    pub fn choose_slots(&mut self, certain: bool) {
        let mut needed: Vec<(usize, Slot)> = Vec::new();
        for (counter, items) in self.capped.iter().enumerate() {
            let id = u32::try_from(counter).unwrap_or(u32::MAX);
            let mut slot = Slot { counter: id, cap: 1, members: Bits::empty(self.items.len()) };
            let mut pods = 0;
            for item in items.iter().copied().filter(|item| self.items[*item].left > 0) {
                let group = &self.groups[self.items[item].group];
                let spread = group.class.spread.iter().any(|s| s.hard && *s.key == *crate::api::labels::HOSTNAME);
                let cap = group.host.caps.iter().find(|(c, _)| *c == id).map_or(1, |(_, cap)| (*cap).max(1));
                if certain && spread {
                    continue;
                }
                pods += self.items[item].left;
                slot.cap = slot.cap.max(i64::from(cap));
                slot.members.insert(item);
            }
            let nodes = pods.div_ceil(usize::try_from(slot.cap).unwrap_or(1));
            if nodes > 1 {
                needed.push((nodes, slot));
            }
        }
        needed.sort_by_key(|(nodes, slot)| (std::cmp::Reverse(*nodes), slot.counter));
        needed.truncate(MAX_SLOTS);
        self.slots = needed.into_iter().map(|(_, slot)| slot).collect();
        let prices = self.dims + self.slots.len();
        for place in &mut self.place_prices {
            place.resize(prices, 0.0);
        }
    }

    /// Nodes that the slots make necessary for what is left.
    pub fn slot_nodes(&self) -> usize {
        let nodes = |slot: &Slot| {
            let pods: usize = slot.members.iter().map(|item| self.items[item].left).sum();
            pods.div_ceil(usize::try_from(slot.cap).unwrap_or(1))
        };
        self.slots.iter().map(nodes).max().unwrap_or(0)
    }

    /// Whether there are too many sizes to keep each apart.
    pub fn is_rounded(&self) -> bool {
        self.rounded
    }

    /// How many of each slot a node has.
    pub fn slot_caps(&self) -> Vec<i64> {
        self.slots.iter().map(|slot| slot.cap).collect()
    }

    /// What the slots of a node are worth at prices of resources and slots.
    pub fn slots_worth(&self, prices: &[f64]) -> f64 {
        let of_slots = prices.get(self.dims..).unwrap_or_default();
        self.slots.iter().zip(of_slots).map(|(slot, price)| real(slot.cap) * price).sum()
    }

    /// Adds what is left of an item to an amount of resources and slots.
    pub fn add_demand(&self, item: usize, amount: &mut [i64]) {
        let left = i64::try_from(self.items[item].left).unwrap_or(i64::MAX);
        for (sum, need) in amount.iter_mut().zip(self.need(item)) {
            *sum += need * left;
        }
        for (sum, slot) in amount[self.dims..].iter_mut().zip(&self.slots) {
            if slot.members.contains(item) {
                *sum += left;
            }
        }
    }

    /// Counters that every new node should serve: slots that are worth something, dearest first.
    pub fn critical(&self) -> Vec<u32> {
        let mut worths: Vec<(f64, u32)> = Vec::new();
        for (at, slot) in self.slots.iter().enumerate() {
            let price = |place: &Vec<f64>| place.get(self.dims + at).copied().unwrap_or(0.0);
            let worth = self.place_prices.iter().map(price).fold(0.0, f64::max);
            if worth > 0.0 {
                worths.push((worth, slot.counter));
            }
        }
        worths.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        worths.into_iter().map(|(_, counter)| counter).collect()
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

    /// Takes items apart into the groups they were made of, in `contents` too: from here on every item is of one group, and
    /// nothing can be filled any more.
    pub fn split<'c>(&mut self, contents: impl Iterator<Item = &'c mut Content>) {
        let first: Vec<usize> = self
            .parts
            .iter()
            .scan(0, |sum, parts| {
                *sum += parts.len();
                Some(*sum - parts.len())
            })
            .collect();
        let mut parts = std::mem::take(&mut self.parts);
        let mut at: Vec<usize> = vec![0; parts.len()];
        for content in contents {
            let mut apart: Content = Vec::with_capacity(content.len());
            for (item, mut count) in content.drain(..) {
                while count > 0 {
                    let part = &mut parts[item][at[item]];
                    let taken = count.min(part.left);
                    if taken > 0 {
                        apart.push((first[item] + at[item], taken));
                    }
                    part.left -= taken;
                    count -= taken;
                    if part.left == 0 && count > 0 {
                        at[item] += 1;
                    }
                }
            }
            *content = apart;
        }
        self.items = parts.into_iter().flatten().collect();
        self.buckets.clear();
    }

    /// Puts content back.
    pub fn give_back(&mut self, content: &[(usize, usize)]) {
        for (item, count) in content {
            if self.buckets.is_empty() {
                self.items[*item].left += count;
                self.left_of[self.items[*item].place] += count;
                continue;
            }
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
    /// nothing leaves the stock until [`Stock::take`]. `power` is how much the direction counts against the size.
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
        let mut active: Vec<usize> = buckets.iter().copied().filter(|b| !self.buckets[*b].items.is_empty()).collect();
        if let Some(place) = seed
            && !content.iter().any(|(item, _)| self.items[*item].place == place)
        {
            let mut of_place: Vec<usize> = active.iter().copied().filter(|b| self.buckets[*b].place == place).collect();
            if !self.pick(&mut of_place, &mut room, prices, &mut content, (0, true)) {
                self.end(&content);
                // What had to come first left no room for the one pod that the node is for.
                return if first.is_empty() { Vec::new() } else { self.fill(bin, prices, buckets, seed, &[], power) };
            }
        }
        loop {
            if !self.wanting.is_empty() {
                self.put_wanting(&mut room, &mut content, &allowed);
            }
            if !self.pick(&mut active, &mut room, prices, &mut content, (power, false)) {
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
                for bucket in buckets.iter().copied() {
                    let prices = &self.place_prices[self.buckets[bucket].place];
                    let sample = &self.sample[bucket * self.dims..(bucket + 1) * self.dims];
                    let gain = sample.iter().zip(prices).map(|(n, p)| n * p).sum::<f64>() - own;
                    if gain <= least.max(own * 1e-3) || !fits(self.least(bucket), &freed) {
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

    fn least(&self, bucket: usize) -> &[i64] {
        &self.least[bucket * self.dims..(bucket + 1) * self.dims]
    }

    /// How well a bucket's pods go with the room that is left: their size along it, times a power of the cosine between
    /// the two. Size alone would take what is large in one resource, and leave room in the others that nothing fills.
    fn score(&self, bucket: usize, prices: &[f64], power: i32) -> f64 {
        let sample = &self.sample[bucket * self.dims..(bucket + 1) * self.dims];
        let (mut along, mut square) = (0.0, 0.0);
        for ((n, direction), price) in sample.iter().zip(&self.direction).zip(prices) {
            along += n * direction;
            square += (n * price) * (n * price);
        }
        if square > 0.0 { along * (along * along / square).powi(power) } else { 0.0 }
    }

    /// Puts the best item in, a single pod or what keeps the mix; false when none fits. Buckets that can't contribute any more are dropped from `open`.
    fn pick(
        &mut self,
        open: &mut Vec<usize>,
        room: &mut [i64],
        prices: &[f64],
        content: &mut Content,
        (power, single): (i32, bool),
    ) -> bool {
        self.work += open.len();
        self.direction.clear();
        self.direction.extend(room.iter().zip(prices).map(|(r, p)| real((*r).max(0)) * p * p));
        let mut best: Option<(f64, usize)> = None;
        let mut kept = 0;
        for at in 0..open.len() {
            let bucket = open[at];
            let range = bucket * self.dims..(bucket + 1) * self.dims;
            if !fits(&self.least[range.clone()], room) {
                continue;
            }
            open[kept] = bucket;
            let score = self.score(bucket, prices, power);
            if best.is_none_or(|(have, _)| score > have) {
                best = Some((score, kept));
            }
            kept += 1;
        }
        open.truncate(kept);
        while let Some((_, at)) = best {
            let found = self.buckets[open[at]]
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
                let score = self.score(*bucket, prices, power);
                if best.is_none_or(|(have, _)| score > have) {
                    best = Some((score, at));
                }
            }
        }
        false
    }
}

/// Items of one place and one size whose pods have no rules about their host are one: more copies of a node can be bought
/// at once. Returns the items and what each is made of.
fn merged(items: Vec<Item>, groups: &[Group]) -> (Vec<Item>, Vec<Vec<Item>>) {
    let mut ids: HashMap<(usize, &[i64]), usize> = HashMap::new();
    let mut out: Vec<Item> = Vec::new();
    let mut parts: Vec<Vec<Item>> = Vec::new();
    for item in items {
        let group = &groups[item.group];
        let next = out.len();
        let at = if group.host.is_free() { *ids.entry((item.place, &group.need)).or_insert(next) } else { next };
        if at == next {
            out.push(item);
            parts.push(vec![item]);
        } else {
            out[at].left += item.left;
            parts[at].push(item);
        }
    }
    (out, parts)
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

/// Whether a pod of this size asks for more than what every machine has.
pub(super) fn is_extended(need: &[i64]) -> bool {
    need[super::universe::COMMON..].iter().any(|n| *n > 0)
}

/// A size rounded down to its highest bits.
fn rounded(n: i64, bits: u32) -> i64 {
    let shift = (64 - bits).saturating_sub(n.leading_zeros());
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
