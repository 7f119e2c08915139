//! What the pattern search distinguishes: pods by request, columns and host rules; nodes by price, capacity and the pods that may use them.

use std::collections::HashMap;

use crate::columns::bitset::Bits;
use crate::columns::dims::{fits, float, real};
use crate::groups::host_rules::HostRules;
use crate::state::demand::pattern::{Pattern, add_pods};
use crate::state::plan_state::PlanState;

/// Kinds of nodes above which a search round takes too long.
const MAX_NODE_KINDS: usize = 4_000;
/// Pods of one node kind that some other kind of node cannot hold are told apart by a mask of column sets.
const MAX_COLUMN_SETS: usize = 64;

/// Pods that are equal to the search.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct PodKind {
    /// Items of the demand, in order of placement.
    pub items: Vec<usize>,
    /// Pods of all items.
    pub count: usize,
    /// Request of one pod in the dimensions of the search.
    pub need: Vec<i64>,
    /// Counters that a pod raises, and caps on counters, by the search's own numbers.
    pub raises: Vec<u32>,
    pub caps: Vec<(u32, i32)>,
    /// Number of its column set.
    pub set: usize,
}

/// Nodes that are equal to the search; the cheapest column stands for all.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct NodeKind {
    pub column: usize,
    /// Micro-USD per hour.
    pub price: f64,
    /// Capacity in the dimensions of the search.
    pub room: Vec<i64>,
    /// Kinds of pods that may use it and that fit, ascending.
    pub pods: Vec<usize>,
    /// How many pods of each of these kinds it holds alone.
    pub most: Vec<usize>,
    /// Counters and caps of its DaemonSets.
    pub counts: Vec<(u32, i32)>,
    pub caps: Vec<(u32, i32)>,
    /// Column sets that contain it.
    pub mask: u64,
}

impl NodeKind {
    /// Multipliers at which each resource is worth an equal share of the price.
    pub fn equal_shares(&self) -> Vec<f64> {
        let dims = float(self.room.len().max(1));
        self.room.iter().map(|room| self.price / dims / real((*room).max(1))).collect()
    }
}

/// The kinds of pods and nodes of a demand.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Kinds {
    pub pods: Vec<PodKind>,
    pub nodes: Vec<NodeKind>,
    /// Number of host counters.
    pub counters: usize,
    /// The column sets of the pods; a subset has none.
    pub sets: Vec<Bits>,
}

/// Pods of an item that may use the same columns.
pub(crate) struct Part {
    pub item: usize,
    pub count: usize,
    /// Number of a column set.
    pub set: usize,
}

/// What a search is about.
pub(crate) struct Scope<'s> {
    pub parts: &'s [Part],
    /// The columns of a column set.
    pub columns: &'s dyn Fn(usize) -> Bits,
    /// Price of a column, in micro-USD per hour.
    pub price: &'s dyn Fn(usize) -> i64,
    /// Whether the host rules of an item hold in every plan.
    pub keeps_rules: &'s dyn Fn(usize) -> bool,
}

impl Kinds {
    /// The kinds of a demand. `None` where there are too many kinds of nodes or column sets, more than `max_pods` of pods, or no pods.
    pub fn of(state: &PlanState<'_, '_>, scope: &Scope<'_>, max_pods: usize) -> Option<Self> {
        let demand = &state.demand;
        let total = total_need(state, scope.parts);
        // A resource that nobody requests never constrains.
        let dims: Vec<usize> = (0..total.len()).filter(|dim| total[*dim] > 0).collect();
        let mut sets: Vec<Bits> = Vec::new();
        let mut set_of: HashMap<usize, usize> = HashMap::new();
        let mut counters = Counters::default();
        let mut ids: HashMap<(usize, Vec<i64>, Vec<u32>, Vec<(u32, i32)>), usize> = HashMap::new();
        let mut pods: Vec<PodKind> = Vec::new();
        for part in scope.parts.iter().filter(|part| part.count > 0) {
            let at = part.item;
            let set = *set_of.entry(part.set).or_insert_with(|| {
                let bits = (scope.columns)(part.set);
                sets.iter().position(|have| *have == bits).unwrap_or_else(|| {
                    sets.push(bits);
                    sets.len() - 1
                })
            });
            let none = HostRules::default();
            let rules = if (scope.keeps_rules)(at) { demand.host(at) } else { &none };
            let (raises, caps) = counters.of(rules);
            let need: Vec<i64> = dims.iter().map(|dim| demand.need(at)[*dim]).collect();
            let id = *ids.entry((set, need.clone(), raises.clone(), caps.clone())).or_insert_with(|| {
                pods.push(PodKind { items: Vec::new(), count: 0, need, raises, caps, set });
                pods.len() - 1
            });
            pods[id].items.push(at);
            pods[id].count += part.count;
            if pods.len() > max_pods {
                return None;
            }
        }
        if pods.is_empty() || sets.len() > MAX_COLUMN_SETS {
            return None;
        }
        let nodes = node_kinds(state, scope, &sets, &pods, &dims, &mut counters)?;
        Some(Self { pods, nodes, counters: counters.len(), sets })
    }

    /// The kinds for these pods alone, given by kind and count, and the number here of each of their kinds of nodes.
    pub fn subset(&self, pods: &Pattern) -> (Self, Vec<usize>) {
        let mut counters = Counters::default();
        let kept = |(at, count): &(usize, usize)| {
            let kind = &self.pods[*at];
            let raises = kind.raises.iter().map(|counter| counters.number(*counter)).collect();
            let caps = kind.caps.iter().map(|(counter, cap)| (counters.number(*counter), *cap)).collect();
            PodKind { items: kind.items.clone(), count: *count, need: kind.need.clone(), raises, caps, set: kind.set }
        };
        let kept: Vec<PodKind> = pods.iter().map(kept).collect();
        let mut nodes: Vec<NodeKind> = Vec::new();
        let mut numbers = Vec::new();
        for (at, node) in self.nodes.iter().enumerate() {
            let holds = |pod: &usize| node.mask >> kept[*pod].set & 1 == 1 && fits(&kept[*pod].need, &node.room);
            let held: Vec<usize> = (0..kept.len()).filter(holds).collect();
            if !held.is_empty() {
                let (counts, caps) = (counters.known(&node.counts), counters.known(&node.caps));
                let most = most_of(&kept, &held, &node.room, &caps);
                nodes.push(NodeKind { room: node.room.clone(), pods: held, most, counts, caps, ..*node });
                numbers.push(at);
            }
        }
        (Self { pods: kept, nodes, counters: counters.len(), sets: Vec::new() }, numbers)
    }

    /// The least value of an item of each kind of pod.
    pub fn least_values(&self, of_items: &[f64]) -> Vec<f64> {
        let least = |items: &[usize]| items.iter().filter_map(|item| of_items.get(*item)).copied().reduce(f64::min);
        self.pods.iter().map(|pod| least(&pod.items).unwrap_or(0.0)).collect()
    }

    /// The kind of pod of each item, the last of several; `usize::MAX` for none.
    pub fn kind_of_items(&self, items: usize) -> Vec<usize> {
        let mut kind_of = vec![usize::MAX; items];
        for (at, pod) in self.pods.iter().enumerate() {
            pod.items.iter().for_each(|item| kind_of[*item] = at);
        }
        kind_of
    }

    /// The cheapest kind of node that holds these pods.
    pub fn cheapest_node(&self, pods: &Pattern) -> Option<usize> {
        self.nodes.iter().position(|node| self.holds(node, pods))
    }

    /// Whether a kind of node holds these pods.
    pub fn holds(&self, node: &NodeKind, pods: &Pattern) -> bool {
        let mut left = node.room.clone();
        let mut counts = vec![0_i64; self.counters];
        let mut caps = vec![i64::MAX; self.counters];
        node.counts.iter().for_each(|(counter, count)| counts[*counter as usize] += i64::from(*count));
        let mut cap = |caps_of: &[(u32, i32)]| {
            for (counter, cap) in caps_of {
                let have = &mut caps[*counter as usize];
                *have = (*have).min(i64::from(*cap));
            }
        };
        cap(&node.caps);
        for (pod, count) in pods {
            let (kind, count) = (&self.pods[*pod], i64::try_from(*count).unwrap_or(i64::MAX));
            left.iter_mut().zip(&kind.need).for_each(|(left, need)| *left -= need.saturating_mul(count));
            kind.raises.iter().for_each(|counter| counts[*counter as usize] += count);
            cap(&kind.caps);
        }
        pods.iter().all(|(pod, _)| node.pods.binary_search(pod).is_ok())
            && left.iter().all(|left| *left >= 0)
            && counts.iter().zip(&caps).all(|(count, cap)| count <= cap)
    }
}

/// A pattern of items as one of kinds of pods.
pub(crate) fn in_kinds(kind_of: &[usize], pattern: &Pattern) -> Pattern {
    let mut pods = Pattern::new();
    for (item, count) in pattern.iter().filter(|(item, _)| kind_of[*item] != usize::MAX) {
        add_pods(&mut pods, kind_of[*item], *count);
    }
    pods.sort_unstable();
    pods
}

/// How many pods of each kind a node of this room and these caps holds alone.
pub(crate) fn most_of(pods: &[PodKind], held: &[usize], room: &[i64], caps: &[(u32, i32)]) -> Vec<usize> {
    let most = |pod: &usize| {
        let pod = &pods[*pod];
        let by_room = pod.need.iter().zip(room).filter(|(need, _)| **need > 0).map(|(need, room)| room / need);
        let raised = pod.caps.iter().chain(caps).filter(|(counter, _)| pod.raises.contains(counter));
        let most = by_room.chain(raised.map(|(_, cap)| i64::from(*cap))).min();
        most.map_or(pod.count, |most| usize::try_from(most).unwrap_or(0)).min(pod.count)
    };
    held.iter().map(most).collect()
}

/// Sum of the requests by resource.
fn total_need(state: &PlanState<'_, '_>, parts: &[Part]) -> Vec<i64> {
    let mut total = vec![0_i64; state.column_sets.dims.len()];
    for part in parts {
        let count = i64::try_from(part.count).unwrap_or(i64::MAX);
        for (sum, need) in total.iter_mut().zip(state.demand.need(part.item)) {
            *sum = sum.saturating_add(need.saturating_mul(count));
        }
    }
    total
}

/// Host counters by the search's own numbers.
#[derive(Default)]
struct Counters(HashMap<u32, u32>);

impl Counters {
    fn len(&self) -> usize {
        self.0.len()
    }

    fn number(&mut self, counter: u32) -> u32 {
        let next = u32::try_from(self.0.len()).unwrap_or(u32::MAX);
        *self.0.entry(counter).or_insert(next)
    }

    fn of(&mut self, rules: &HostRules) -> (Vec<u32>, Vec<(u32, i32)>) {
        let raises = rules.raises.iter().map(|counter| self.number(*counter)).collect();
        let caps = rules.caps.iter().map(|(counter, cap)| (self.number(*counter), *cap)).collect();
        (raises, caps)
    }

    fn known(&self, of: &[(u32, i32)]) -> Vec<(u32, i32)> {
        of.iter().filter_map(|(counter, value)| Some((*self.0.get(counter)?, *value))).collect()
    }
}

/// The columns that no column dominates: one at most as expensive, with at least the room, that all of its pods may use.
fn node_kinds(
    state: &PlanState<'_, '_>,
    scope: &Scope<'_>,
    sets: &[Bits],
    pods: &[PodKind],
    dims: &[usize],
    counters: &mut Counters,
) -> Option<Vec<NodeKind>> {
    let columns = &*state.column_sets;
    let mut masks = vec![0_u64; columns.columns.len()];
    for (at, set) in sets.iter().enumerate() {
        set.iter().for_each(|column| masks[column] |= 1 << at);
    }
    let mut by_price: Vec<usize> = columns.by_price.iter().copied().filter(|column| masks[*column] != 0).collect();
    by_price.sort_by_key(|column| (scope.price)(*column));
    // Room beyond all requests makes no difference.
    let most: Vec<i64> = dims
        .iter()
        .enumerate()
        .map(|(at, _)| {
            let of_kind = |pod: &PodKind| pod.need[at].saturating_mul(i64::try_from(pod.count).unwrap_or(i64::MAX));
            pods.iter().map(of_kind).fold(0, i64::saturating_add)
        })
        .collect();
    let mut nodes: Vec<NodeKind> = Vec::new();
    let mut last: Option<(usize, usize, u64, i64)> = None;
    for column in by_price {
        let price = (scope.price)(column);
        // Offerings of one shape, price and DaemonSets differ in zone only.
        let identity = (columns.columns[column].shape, columns.daemon_set(column), masks[column], price);
        if last.replace(identity) == Some(identity) {
            continue;
        }
        let full = columns.room(column);
        let room: Vec<i64> = dims.iter().zip(&most).map(|(dim, most)| full[*dim].clamp(0, *most)).collect();
        let host = state.daemon_host(column);
        let (counts, caps) = (counters.known(&host.counts), counters.known(&host.caps));
        let dominates = |have: &NodeKind| {
            have.mask & masks[column] == masks[column]
                && room.iter().zip(&have.room).all(|(mine, other)| mine <= other)
                && (have.counts.is_empty() && have.caps.is_empty() || (have.counts == counts && have.caps == caps))
        };
        if nodes.iter().rev().any(dominates) {
            continue;
        }
        let mask = masks[column];
        let allowed = |pod: &PodKind| mask >> pod.set & 1 == 1 && fits(&pod.need, &room);
        let held: Vec<usize> = (0..pods.len()).filter(|pod| allowed(&pods[*pod])).collect();
        if held.is_empty() {
            continue;
        }
        let most = most_of(pods, &held, &room, &caps);
        nodes.push(NodeKind { column, price: real(price), room, pods: held, most, counts, caps, mask });
        if nodes.len() > MAX_NODE_KINDS {
            return None;
        }
    }
    Some(nodes)
}
