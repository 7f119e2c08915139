//! What is left to place, and ([`fill`]) the filling of one bin with it.
//!
//! Items (a part of a group) lie in buckets of one place (what nodes they may use) and nearly one size. A bin is filled
//! from the bucket whose requests, valued at the dual prices, point most nearly where the bin's remaining room points and
//! are largest: the work is per bucket, not per pod. Floats appear only here and in [`crate::planner::pricing::duals`], as scores; every
//! capacity test is on integers.

pub mod fill;
pub mod slots;

use std::collections::HashMap;

use crate::planner::columns::bitset::Bits;
use crate::planner::columns::dims::{dot, fits, float, is_extended, real};
use crate::planner::columns::sets::ColumnSets;
use crate::planner::groups::existing::HostState;
use crate::planner::groups::group::{Group, HostRules};
use crate::planner::groups::topology::counts::Topology;
use crate::planner::groups::topology::domains::Assignment;

/// Distinct sizes above which sizes are rounded into buckets.
const EXACT_SIZES: usize = 200;

/// Which nodes items may use.
#[derive(Debug)]
pub(crate) struct ColumnPool {
    /// A group whose node constraints all items of the place share.
    pub sample: usize,
    pub pins: Vec<(usize, usize)>,
    /// Signatures by preference level.
    pub levels: Vec<usize>,
}

/// Pods of one part of a group, or of several that nothing tells apart while nodes are filled.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DemandItem {
    pub group: usize,
    pub place: usize,
    pub left: usize,
    /// Pods taken so far come from the front of the group's list, in the order items were made.
    pub first: usize,
}

/// Items of one place and nearly one size.
#[derive(Debug)]
struct SizeBucket {
    place: usize,
    items: Vec<usize>,
    /// Its items must follow others: they are placed by [`Demand::put_wanting`] alone.
    follows: bool,
}

/// What a bin holds: items and how many pods of each.
pub(crate) type Content = Vec<(usize, usize)>;

/// A bin to fill.
pub(crate) struct Bin<'b> {
    pub room: &'b [i64],
    pub host: &'b HostState,
    pub content: &'b [(usize, usize)],
}

/// Pods of which one node holds at most `cap`.
pub(crate) struct Slot {
    counter: u32,
    cap: i64,
    /// Items that use it up.
    members: Bits,
}

/// What is left to place.
pub(crate) struct Demand<'g> {
    pub groups: &'g [Group],
    pub items: Vec<DemandItem>,
    /// What each item was made of, until [`Demand::split`].
    parts: Vec<Vec<DemandItem>>,
    pub places: Vec<ColumnPool>,
    buckets: Vec<SizeBucket>,
    /// Least request of any item of each bucket, and the request of its first item; `dims` numbers a bucket.
    least: Vec<i64>,
    sample: Vec<f64>,
    dims: usize,
    bucket_of: Vec<usize>,
    /// Where each item stands among those of its bucket, largest first.
    order: Vec<usize>,
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

impl<'g> Demand<'g> {
    pub fn new(
        column_sets: &mut ColumnSets<'_>,
        topology: &Topology,
        groups: &'g [Group],
        parts: &[Assignment],
        counters: usize,
        by_priority: bool,
    ) -> Self {
        let mut places: Vec<ColumnPool> = Vec::new();
        let mut place_ids: HashMap<(Vec<usize>, ConstraintKey<'g>), usize> = HashMap::new();
        let mut items: Vec<DemandItem> = Vec::new();
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
                        holding.and(&column_sets.where_column(|column| fits(&group.need, column_sets.room(column))));
                        if !holding.is_empty() {
                            bits = holding;
                        }
                    }
                    column_sets.column_set(bits)
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
                places.push(ColumnPool { sample: part.group, pins: part.pins.clone(), levels });
                places.len() - 1
            });
            items.push(DemandItem { group: part.group, place, left: part.count, first });
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
        let dims = column_sets.dims.len();
        let mut demand = Self {
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
            order: Vec::new(),
            rounded: false,
            left_of: Vec::new(),
            capped,
            wanting,
            slots: Vec::new(),
            work: 0,
            direction: Vec::with_capacity(dims),
            scratch,
        };
        demand.build_buckets();
        demand
    }

    fn build_buckets(&mut self) {
        let mut sizes: std::collections::HashSet<&[i64]> = std::collections::HashSet::new();
        let exact = self.items.iter().all(|item| {
            sizes.insert(&self.groups[item.group].need);
            sizes.len() <= EXACT_SIZES
        });
        let mut ids: HashMap<(usize, bool, Vec<i64>), usize> = HashMap::new();
        let mut buckets: Vec<SizeBucket> = Vec::new();
        let mut bucket_of = Vec::with_capacity(self.items.len());
        let mut least: Vec<i64> = Vec::new();
        let mut left_of = vec![0; self.places.len()];
        for (at, item) in self.items.iter().enumerate() {
            let need = &self.groups[item.group].need;
            let size: Vec<i64> = if exact { need.clone() } else { need.iter().map(|n| rounded(*n, 2)).collect() };
            let follows = !self.groups[item.group].host.wants.is_empty();
            let id = *ids.entry((item.place, follows, size)).or_insert_with(|| {
                buckets.push(SizeBucket { place: item.place, items: Vec::new(), follows });
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
        let mut order = vec![0; self.items.len()];
        for bucket in &mut buckets {
            bucket.items.sort_by(|a, b| {
                let need = |at: &usize| &self.groups[self.items[*at].group].need;
                need(b).cmp(need(a)).then(a.cmp(b))
            });
            bucket.items.iter().enumerate().for_each(|(place, item)| order[*item] = place);
        }
        self.order = order;
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

    /// Where an item is in its bucket, or where it belongs.
    fn position(&self, item: usize) -> Result<usize, usize> {
        self.buckets[self.bucket_of[item]].items.binary_search_by_key(&self.order[item], |have| self.order[*have])
    }

    /// Pods left in a place.
    pub fn left_of(&self, place: usize) -> usize {
        self.left_of[place]
    }

    /// The most valuable item left of a place, looking at the largest of each bucket.
    pub fn largest(&self, place: usize) -> Option<usize> {
        let firsts = self.buckets.iter().filter(|b| b.place == place).filter_map(|b| b.items.first().copied());
        let valued = firsts.map(|item| (self.worth(item), item));
        valued.max_by(|a, b| a.0.total_cmp(&b.0).then(b.1.cmp(&a.1))).map(|(_, item)| item)
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
        dot(self.need(item), prices) + slots
    }

    pub fn content_worth(&self, content: &[(usize, usize)]) -> f64 {
        content.iter().map(|(item, count)| self.worth(*item) * float(*count)).sum()
    }

    /// Whether there are too many sizes to keep each apart.
    pub fn is_rounded(&self) -> bool {
        self.rounded
    }

    /// Items that want company on their node.
    pub fn wanting(&self) -> Vec<usize> {
        self.wanting.clone()
    }

    /// Takes content out of the demand, `copies` times.
    pub fn take(&mut self, content: &[(usize, usize)], copies: usize) {
        for (item, count) in content {
            self.items[*item].left -= count * copies;
            self.left_of[self.items[*item].place] -= count * copies;
            if self.items[*item].left == 0 {
                let bucket = self.bucket_of[*item];
                if let Ok(at) = self.position(*item) {
                    self.buckets[bucket].items.remove(at);
                    if at == 0 {
                        self.resample(bucket);
                    }
                }
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
                if let Err(at) = self.position(*item) {
                    self.buckets[bucket].items.insert(at, *item);
                    if at == 0 {
                        self.resample(bucket);
                    }
                }
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
}

/// Items of one place and one size whose pods have no rules about their host are one: more copies of a node can be bought
/// at once. Returns the items and what each is made of.
fn merged(items: Vec<DemandItem>, groups: &[Group]) -> (Vec<DemandItem>, Vec<Vec<DemandItem>>) {
    let mut ids: HashMap<(usize, &[i64]), usize> = HashMap::new();
    let mut out: Vec<DemandItem> = Vec::new();
    let mut parts: Vec<Vec<DemandItem>> = Vec::new();
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
    terms: &'g [crate::model::pod_class::NodeTerm],
    volumes: &'g [crate::model::pod_class::NodeTerm],
    tolerations: &'g [crate::model::pod_class::Toleration],
    pins: Vec<(usize, usize)>,
    /// Set when pods are placed in order of priority.
    priority: Option<i32>,
}

/// A size rounded down to its highest bits.
fn rounded(n: i64, bits: u32) -> i64 {
    let shift = (64 - bits).saturating_sub(n.leading_zeros());
    (n >> shift) << shift
}
