//! Builds the demand from assignments: column pools, merged items and size buckets.

use std::collections::{HashMap, HashSet};

use stowage_model::pod_class::{NodeTerm, Toleration};

use crate::columns::dims::{fits, is_extended};
use crate::columns::sets::ColumnSets;
use crate::groups::group::Group;
use crate::groups::topology::counts::Topology;
use crate::groups::topology::domains::Assignment;
use crate::state::demand::size_tiers::SizeTiers;
use crate::state::demand::{ColumnPool, Demand, DemandItem, Scratch, SizeBucket};

/// Distinct sizes above which buckets hold rounded sizes.
const MAX_EXACT_SIZES: usize = 200;
/// Significant bits kept when sizes are rounded into buckets.
const ROUNDED_BITS: u32 = 2;

impl<'g> Demand<'g> {
    /// `counters` is the number of host counters. With `by_priority`, pods of different priority never share a column pool.
    pub fn new(
        column_sets: &mut ColumnSets<'_>,
        topology: &Topology,
        groups: &'g [Group],
        assignments: &[Assignment],
        counters: usize,
        by_priority: bool,
    ) -> Self {
        let mut column_pools: Vec<ColumnPool> = Vec::new();
        let mut pool_ids: HashMap<(Vec<usize>, ConstraintKey<'g>), usize> = HashMap::new();
        let mut items: Vec<DemandItem> = Vec::new();
        let mut next: Vec<usize> = vec![0; groups.len()];
        for assignment in assignments {
            let group = &groups[assignment.group];
            let first = next[assignment.group];
            next[assignment.group] += assignment.count;
            if assignment.refused.is_some() {
                continue;
            }
            let levels: Vec<usize> = group
                .levels
                .iter()
                .map(|bits| {
                    let mut bits = bits.clone();
                    for (key, domain) in &assignment.pins {
                        bits.and(&topology.keys[*key].columns[*domain]);
                    }
                    // Extended resources are offered by few types: only columns that hold the pod may influence its dual prices.
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
                pins: assignment.pins.clone(),
                priority: by_priority.then_some(group.class.priority),
            };
            let column_pool = *pool_ids.entry((levels.clone(), constraint)).or_insert_with(|| {
                column_pools.push(ColumnPool { sample: assignment.group, pins: assignment.pins.clone(), levels });
                column_pools.len() - 1
            });
            let (group, count, least) = (assignment.group, assignment.count, assignment.least);
            items.push(DemandItem { group, column_pool, remaining: count, assigned: count, least, first });
        }
        let (items, merged_from) = merged(items, groups);
        let sizes: Vec<(usize, &[i64])> =
            items.iter().map(|item| (item.column_pool, groups[item.group].need.as_slice())).collect();
        let tiers = SizeTiers::of(column_sets, &sizes);
        let mut capped_items = vec![Vec::new(); counters];
        let mut followers = Vec::new();
        let mut followers_of: HashMap<u32, Vec<usize>> = HashMap::new();
        for (at, item) in items.iter().enumerate() {
            let host = &groups[item.group].host;
            for (counter, _) in &host.caps {
                if host.raises.contains(counter) {
                    capped_items[*counter as usize].push(at);
                }
            }
            for (counter, _) in &host.wants {
                followers_of.entry(*counter).or_default().push(at);
            }
            if !host.wants.is_empty() {
                followers.push(at);
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
            prices: vec![vec![1.0; dims]; tiers.classes.len()],
            items,
            merged_from,
            column_pools,
            tiers,
            buckets: Vec::new(),
            bucket_min: Vec::new(),
            bucket_sample: Vec::new(),
            dims,
            bucket_of: Vec::new(),
            rank_in_bucket: Vec::new(),
            has_rounded_buckets: false,
            remaining_in: Vec::new(),
            capped_items,
            followers,
            followers_of,
            host_caps: Vec::new(),
            work: 0,
            direction: Vec::with_capacity(dims),
            scratch,
        };
        demand.build_buckets();
        demand
    }

    fn build_buckets(&mut self) {
        let mut sizes: HashSet<&[i64]> = HashSet::new();
        let exact = self.items.iter().all(|item| {
            sizes.insert(&self.groups[item.group].need);
            sizes.len() <= MAX_EXACT_SIZES
        });
        let mut ids: HashMap<(usize, bool, Vec<i64>), usize> = HashMap::new();
        let mut buckets: Vec<SizeBucket> = Vec::new();
        let mut bucket_of = Vec::with_capacity(self.items.len());
        let mut bucket_min: Vec<i64> = Vec::new();
        let mut remaining_in = vec![0; self.column_pools.len()];
        for (at, item) in self.items.iter().enumerate() {
            let need = &self.groups[item.group].need;
            let size: Vec<i64> =
                if exact { need.clone() } else { need.iter().map(|n| rounded(*n, ROUNDED_BITS)).collect() };
            let follows = !self.groups[item.group].host.wants.is_empty();
            let id = *ids.entry((item.column_pool, follows, size)).or_insert_with(|| {
                buckets.push(SizeBucket { column_pool: item.column_pool, items: Vec::new(), follows });
                bucket_min.extend_from_slice(need);
                buckets.len() - 1
            });
            if !follows {
                buckets[id].items.push(at);
            }
            for (least, n) in bucket_min[id * self.dims..].iter_mut().zip(need) {
                *least = (*least).min(*n);
            }
            bucket_of.push(id);
            remaining_in[item.column_pool] += item.remaining;
        }
        // Largest first: the first item that fits is the one that fills most.
        let mut ranks = vec![0; self.items.len()];
        for bucket in &mut buckets {
            bucket.items.sort_by(|a, b| {
                let need = |at: &usize| &self.groups[self.items[*at].group].need;
                need(b).cmp(need(a)).then(a.cmp(b))
            });
            bucket.items.iter().enumerate().for_each(|(rank, item)| ranks[*item] = rank);
        }
        self.rank_in_bucket = ranks;
        self.bucket_sample = vec![0.0; buckets.len() * self.dims];
        self.buckets = buckets;
        self.bucket_of = bucket_of;
        self.has_rounded_buckets = !exact;
        self.bucket_min = bucket_min;
        self.remaining_in = remaining_in;
        for bucket in 0..self.buckets.len() {
            self.update_sample(bucket);
        }
    }
}

/// Merges items of one column pool and one size whose pods have no host rules: larger counts allow more copies of a node to be
/// purchased at once. Returns the items and, for each, the items it was merged from.
fn merged(items: Vec<DemandItem>, groups: &[Group]) -> (Vec<DemandItem>, Vec<Vec<DemandItem>>) {
    let mut ids: HashMap<(usize, &[i64]), usize> = HashMap::new();
    let mut out: Vec<DemandItem> = Vec::new();
    let mut parts: Vec<Vec<DemandItem>> = Vec::new();
    for item in items {
        let group = &groups[item.group];
        let next = out.len();
        let at = if group.host.is_free() { *ids.entry((item.column_pool, &group.need)).or_insert(next) } else { next };
        if at == next {
            out.push(item);
            parts.push(vec![item]);
        } else {
            out[at].remaining += item.remaining;
            out[at].assigned += item.assigned;
            out[at].least += item.least;
            parts[at].push(item);
        }
    }
    (out, parts)
}

/// Node constraints of a class; items with equal keys and levels share a column pool.
#[derive(PartialEq, Eq, Hash)]
struct ConstraintKey<'g> {
    terms: &'g [NodeTerm],
    volumes: &'g [NodeTerm],
    tolerations: &'g [Toleration],
    pins: Vec<(usize, usize)>,
    /// Set when pods are placed in order of priority.
    priority: Option<i32>,
}

/// A size rounded down to its highest `bits` bits.
fn rounded(n: i64, bits: u32) -> i64 {
    let shift = (64 - bits).saturating_sub(n.leading_zeros());
    (n >> shift) << shift
}
