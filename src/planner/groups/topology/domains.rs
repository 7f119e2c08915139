//! Topology keys, their domains, and the groups assigned to them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::columns::bitset::Bits;
use crate::groups::group::Group;

/// Pods of a group that are assigned to the same domains.
#[derive(Clone, Debug)]
pub(crate) struct Assignment {
    pub group: usize,
    /// Key and domain index of each pin.
    pub pins: Vec<(usize, usize)>,
    pub count: usize,
    /// How many of them the group has in these domains in every valid assignment, at least.
    pub least: usize,
    /// Why these pods cannot be placed.
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
    /// Pseudo-domain of the columns and nodes without the label, where there are any: the last of `values`. No pods are counted there;
    /// hard spread and required affinity exclude it, anti-affinity permits it.
    pub absent: Option<usize>,
}

impl Assignment {
    /// All pods of a group, pinned to no domain.
    pub fn whole(index: usize, group: &Group) -> Self {
        Self { group: index, pins: Vec::new(), count: group.pods.len(), least: 0, refused: None }
    }
}

/// The number of pods of a group that a place has room for, where a previous iteration found it: by group, and by key and domain of
/// each pin.
pub(crate) type Room = BTreeMap<(usize, Vec<(usize, usize)>), usize>;

/// Values of topology keys.
pub(crate) type Domains = BTreeSet<(Arc<str>, Arc<str>)>;
