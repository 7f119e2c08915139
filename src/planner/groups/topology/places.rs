//! Tuples of domains: a pod with rules on several keys is assigned to one domain of each key at once.

use std::collections::BTreeMap;
use std::rc::Rc;

use crate::columns::bitset::Bits;
use crate::columns::sets::ColumnSets;
use crate::groups::existing_nodes::ExistingNode;
use crate::groups::group::{Group, usable};
use crate::groups::topology::counts::Topology;
use crate::groups::topology::rules::Rules;

/// The tuples of domains of some keys that a column or an existing node has, in lexicographic order.
pub(crate) struct Places {
    pub domains: Vec<Vec<usize>>,
    columns: Vec<Bits>,
    /// Existing nodes (indexes into the list of schedulable nodes), by tuple.
    nodes: Vec<Vec<usize>>,
}

/// Feasibility of a tuple of domains for a pod.
#[derive(Clone, Debug)]
pub(crate) struct Possible {
    /// A column there holds the pod.
    pub new: bool,
    /// An existing node there holds the pod.
    pub exists: bool,
    /// A spread constraint of the pod counts a new node there, whether or not the pod's volumes permit it.
    pub counts: bool,
    /// An existing node there holds the pod and runs a pod that its required host affinity selects.
    pub company: bool,
    /// First preference level with a column there.
    pub level: usize,
    /// Estimated price of a pod there.
    pub price: i64,
    /// Pods that the tuple has room for.
    pub room: usize,
}

impl Possible {
    pub fn open(&self) -> bool {
        (self.new || self.exists) && self.room > 0
    }
}

/// A group with rules, and the pods that it has in each place.
pub(crate) struct Divided {
    pub group: usize,
    /// Keys that its rules refer to, ascending.
    pub keys: Vec<(usize, Rules)>,
    pub places: Rc<Places>,
    pub possible: Vec<Possible>,
    /// Counter of its required host affinity, and whether its own pods raise it.
    pub wants: Option<(u32, bool)>,
    /// Pods by place.
    pub counts: Vec<usize>,
    /// Pods without a place.
    pub left: usize,
    /// Why the rules leave pods without a place.
    pub refused: Option<String>,
}

impl Divided {
    /// Key and domain of each pin of a place.
    pub fn pins(&self, place: usize) -> Vec<(usize, usize)> {
        self.keys.iter().map(|(key, _)| *key).zip(self.places.domains[place].iter().copied()).collect()
    }

    pub fn domain(&self, place: usize, at: usize) -> usize {
        self.places.domains[place][at]
    }

    /// Whether it has required affinity on one of its keys.
    pub fn has_affinity(&self) -> bool {
        self.keys.iter().any(|(_, rules)| rules.has_affinity())
    }

    /// Places that hold a pod.
    pub fn open(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.possible.len()).filter(|place| self.possible[*place].open())
    }
}

impl Topology {
    /// The places of some keys.
    pub(crate) fn places(&self, columns: usize, keys: &[usize], nodes: &[ExistingNode<'_>]) -> Places {
        let mut of_column: Vec<Vec<usize>> = vec![Vec::with_capacity(keys.len()); columns];
        for key in keys {
            for (domain, bits) in self.keys[*key].columns.iter().enumerate() {
                bits.iter().for_each(|column| of_column[column].push(domain));
            }
        }
        let mut found: BTreeMap<Vec<usize>, (Bits, Vec<usize>)> = BTreeMap::new();
        let empty = || (Bits::empty(columns), Vec::new());
        for (column, domains) in of_column.into_iter().enumerate() {
            match found.get_mut(&domains) {
                Some((bits, _)) => bits.insert(column),
                None => found.entry(domains).or_insert_with(empty).0.insert(column),
            }
        }
        for (at, node) in nodes.iter().enumerate() {
            let domain = |key: &usize| self.keys[*key].of_node[node.index].or(self.keys[*key].absent);
            if let Some(domains) = keys.iter().map(domain).collect::<Option<Vec<usize>>>() {
                found.entry(domains).or_insert_with(empty).1.push(at);
            }
        }
        let mut places = Places { domains: Vec::new(), columns: Vec::new(), nodes: Vec::new() };
        for (domains, (columns, nodes)) in found {
            places.domains.push(domains);
            places.columns.push(columns);
            places.nodes.push(nodes);
        }
        places
    }

    /// Feasibility and price of each place for a group. `keys` are those of the places.
    pub(crate) fn possible(
        &self,
        column_sets: &mut ColumnSets<'_>,
        (index, group): (usize, &Group),
        keys: &[usize],
        places: &Places,
        nodes: &[ExistingNode<'_>],
    ) -> Vec<Possible> {
        let reserved = column_sets.has_counted.then(|| reservable(column_sets, group));
        let wanted = group.host.wants.first().map(|(counter, _)| *counter);
        let mut out = Vec::with_capacity(places.domains.len());
        for (at, domains) in places.domains.iter().enumerate() {
            let columns = &places.columns[at];
            let pins = keys.iter().copied().zip(domains.iter().copied()).collect();
            let room = self.room.get(&(index, pins)).copied().unwrap_or(usize::MAX);
            let mut found = Possible {
                new: false,
                exists: false,
                counts: false,
                company: false,
                level: group.levels.len(),
                price: 0,
                room,
            };
            let here = column_sets.common_set(&group.domains, columns);
            found.counts = column_sets.any_fits(here, &group.need);
            for (level, bits) in group.levels.iter().enumerate().filter(|_| found.counts) {
                let id = column_sets.common_set(bits, columns);
                if column_sets.any_fits(id, &group.need) {
                    (found.new, found.level) = (true, level);
                    found.price = coarse(column_sets.price_of(id, &group.need));
                    break;
                }
            }
            if let Some(reserved) = reserved.as_ref().filter(|_| found.counts && !found.new) {
                let id = column_sets.column_set(columns.intersection(reserved));
                if column_sets.any_fits(id, &group.need) {
                    (found.new, found.price) = (true, coarse(column_sets.price_of(id, &group.need)));
                }
            }
            for node in places.nodes[at].iter().map(|at| &nodes[*at]) {
                if (found.exists && (wanted.is_none() || found.company)) || !node.holds(&group.need) {
                    continue;
                }
                let with_company =
                    wanted.is_some_and(|counter| node.host.counts.iter().any(|(c, n)| *c == counter && *n > 0));
                if (!found.exists || with_company) && node.state.admits(&group.class) {
                    found.exists = true;
                    found.company |= with_company;
                }
            }
            if found.exists && !found.new && found.room == usize::MAX {
                found.room = room_on(places.nodes[at].iter().map(|at| &nodes[*at]), group);
            }
            if found.exists && group.levels.len() == 1 {
                // Without preferences an existing node ranks like a new node.
                found.level = 0;
            }
            out.push(found);
        }
        out
    }
}

/// Pods of a group that nodes have capacity for, as far as anybody asks.
fn room_on<'n, 'p: 'n>(nodes: impl Iterator<Item = &'n ExistingNode<'p>>, group: &Group) -> usize {
    let mut room = 0;
    for node in nodes.filter(|node| node.holds(&group.need) && node.state.admits(&group.class)) {
        let most =
            node.free.iter().zip(&group.need).filter(|(_, need)| **need > 0).map(|(free, need)| free / need).min();
        room = most.map_or(usize::MAX, |most| room.saturating_add(usize::try_from(most).unwrap_or(0)));
        if room >= group.pods.len() {
            return usize::MAX;
        }
    }
    room
}

/// Columns of counted reservations that a group may use.
fn reservable(column_sets: &mut ColumnSets<'_>, group: &Group) -> Bits {
    let mut bits = usable(column_sets, group);
    bits.and(&column_sets.where_column(|column| column_sets.columns[column].left.is_some_and(|left| left > 0)));
    bits
}

/// A price rounded down by at most about three percent, so that small price differences do not concentrate all pods in one zone.
fn coarse(price: i64) -> i64 {
    let shift = 58_u32.saturating_sub(price.leading_zeros());
    (price >> shift) << shift
}
