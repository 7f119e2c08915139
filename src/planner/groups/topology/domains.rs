//! Topology keys, their domains, and the groups assigned to them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::planner::columns::bitset::Bits;
use crate::planner::groups::group::Group;

/// A group's pods that share their domains.
#[derive(Clone, Debug)]
pub(crate) struct Assignment {
    pub group: usize,
    /// Key and value index of each domain it is pinned to.
    pub pins: Vec<(usize, usize)>,
    pub count: usize,
    /// Why these pods can go nowhere.
    pub refused: Option<String>,
}

/// A topology key and its domains.
#[derive(Debug)]
pub(crate) struct Key {
    pub name: Arc<str>,
    pub values: Vec<Arc<str>>,
    /// Columns of each value.
    pub columns: Vec<Bits>,
    /// Index of each node's value.
    pub of_node: Vec<Option<usize>>,
    /// What stands for all columns and nodes that have no such label, where there are any: the last of `values`. It is no
    /// domain: nothing is counted there, no spread and no affinity that must hold admits it, anti-affinity does.
    pub absent: Option<usize>,
}

impl Assignment {
    /// All pods of a group, pinned to no domain.
    pub fn whole(index: usize, group: &Group) -> Self {
        Self { group: index, pins: Vec::new(), count: group.pods.len(), refused: None }
    }
}

/// How many pods of a group a domain has room for, where that is known: by the group, and the key and the domain with those
/// of the keys before it.
pub(crate) type Room = BTreeMap<(usize, Vec<(usize, usize)>), usize>;

/// Values of topology keys.
pub(crate) type Domains = BTreeSet<(Arc<str>, Arc<str>)>;

/// Pins with one more.
pub(crate) fn with(pins: &[(usize, usize)], key: usize, domain: usize) -> Vec<(usize, usize)> {
    pins.iter().copied().chain([(key, domain)]).collect()
}
