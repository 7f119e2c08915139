//! Nodes that exist or are launching, as bins with free capacity and host counters.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use crate::columns::dims::fits;
use crate::columns::sets::ColumnSets;
use crate::groups::group::Group;
use crate::groups::host_rules::{HostCounters, HostRules};
use crate::groups::pod_selectors::Selectors;
use crate::input::node::{NodeState, Tenure};

/// Host counters and caps of a node before the plan places pods on it.
#[derive(Clone, Debug, Default)]
pub(crate) struct HostState {
    /// Counter and its value.
    pub counts: Vec<(u32, i32)>,
    /// Counter and its maximum value.
    pub caps: Vec<(u32, i32)>,
}

impl HostState {
    pub fn is_empty(&self) -> bool {
        self.counts.is_empty() && self.caps.is_empty()
    }

    /// Adds one pod with these rules.
    pub fn add(&mut self, rules: &HostRules) {
        for counter in &rules.raises {
            match self.counts.iter_mut().find(|(have, _)| have == counter) {
                Some((_, count)) => *count += 1,
                None => self.counts.push((*counter, 1)),
            }
        }
        for (counter, cap) in &rules.caps {
            match self.caps.iter_mut().find(|(have, _)| have == counter) {
                Some((_, have)) => *have = (*have).min(*cap),
                None => self.caps.push((*counter, *cap)),
            }
        }
    }
}

/// A schedulable node that exists or is launching.
#[derive(Debug)]
pub(crate) struct ExistingNode<'p> {
    /// Index into the problem's nodes.
    pub index: usize,
    pub state: &'p NodeState,
    pub free: Vec<i64>,
    pub host: HostState,
    /// Nodes of one kind are equal to the node constraints of all pending pods.
    pub kind: usize,
}

/// The schedulable nodes with capacity for a pod of some group, in the order in which they are filled; and the counters above zero on some
/// node, unschedulable nodes included, whose pods kube-scheduler counts too.
pub(crate) fn existing_nodes<'p>(
    column_sets: &ColumnSets<'p>,
    selectors: &mut Selectors<'p>,
    counters: &HostCounters,
    groups: &[Group],
) -> (Vec<ExistingNode<'p>>, BTreeSet<u32>) {
    let problem = column_sets.problem;
    let mut order: Vec<usize> = (0..problem.nodes.len()).collect();
    if counters.len() == 0 {
        order.retain(|n| problem.nodes[*n].schedulable);
    }
    order.sort_by_cached_key(|n| fill_rank(&problem.nodes[*n]));
    let terms = || groups.iter().flat_map(|group| group.class.node_terms.iter().chain(&group.class.volume_terms));
    let by_name = terms().any(|term| term.name.is_some());
    let keys: BTreeSet<&Arc<str>> = terms().flat_map(|term| term.labels.iter().map(|(key, _)| key)).collect();
    let least = least_needs(groups);
    let mut running = BTreeSet::new();
    let mut kinds: HashMap<Kind<'p>, usize> = HashMap::new();
    let mut out = Vec::new();
    for index in order {
        let state: &'p NodeState = &problem.nodes[index];
        let mut host = HostState::default();
        if counters.len() > 0 {
            state.pods.iter().for_each(|pod| host.add(&counters.running(pod, selectors)));
            running.extend(host.counts.iter().filter(|(_, count)| *count > 0).map(|(counter, _)| *counter));
            // Host ports of daemons that have not started yet are taken.
            state.daemons.iter().for_each(|daemon| host.add(&counters.daemon(daemon, selectors)));
        }
        if !state.schedulable {
            continue;
        }
        let free = free_on(column_sets, state);
        if !least.iter().any(|need| fits(need, &free)) {
            continue;
        }
        let kind = Kind {
            labels: keys.iter().map(|key| state.label(key)).collect(),
            taints: state.taints.iter().map(|t| (t.key.as_str(), t.value.as_deref(), t.effect.as_str())).collect(),
            name: by_name.then_some(&*state.name),
        };
        let next = kinds.len();
        let kind = *kinds.entry(kind).or_insert(next);
        out.push(ExistingNode { index, state, free, host, kind });
    }
    (out, running)
}

/// The order in which nodes are filled: initialized ones first, and of these the ones that stay. Consolidation first removes nodes whose unused part
/// costs much per pod: they are filled last, so that pods do not move to a node that is about to go.
fn fill_rank(node: &NodeState) -> (bool, Tenure, i64, Arc<str>) {
    let pods = i64::try_from(node.pods.len()).unwrap_or(i64::MAX);
    let unused = node.price.0.saturating_mul(1_000 - used_permille(node)) / 1_000;
    (!node.initialized, node.tenure, unused / pods.saturating_add(1), Arc::clone(&node.name))
}

/// The share of a node that its pods request: of CPU or memory, whichever is more.
fn used_permille(node: &NodeState) -> i64 {
    let (used, all) = (node.pods.requests(), &node.allocatable);
    let share = |used: i64, all: i64| i128::from(used.max(0)) * 1_000 / i128::from(all.max(1));
    let share = share(used.cpu.0, all.cpu.0).max(share(used.memory.0, all.memory.0));
    i64::try_from(share.min(1_000)).unwrap_or(1_000)
}

/// Free capacity of a node before the plan places pods on it.
pub(crate) fn free_on(column_sets: &ColumnSets<'_>, node: &NodeState) -> Vec<i64> {
    let mut free = column_sets.dims.dense(&node.allocatable);
    for taken in [node.pods.requests(), &node.daemon_reserve] {
        column_sets.dims.subtract(&mut free, taken);
    }
    free
}

/// What the node constraints of pending pods distinguish nodes by.
#[derive(PartialEq, Eq, Hash)]
struct Kind<'n> {
    labels: Vec<Option<&'n str>>,
    taints: Vec<(&'n str, Option<&'n str>, &'n str)>,
    name: Option<&'n str>,
}

/// Pareto-minimal requests of the groups: a node that holds none of them holds no pod.
fn least_needs(groups: &[Group]) -> Vec<&[i64]> {
    let below = |a: &[i64], b: &[i64]| a.iter().zip(b).all(|(a, b)| a <= b);
    let mut out: Vec<&[i64]> = Vec::new();
    for need in groups.iter().map(|group| group.need.as_slice()) {
        if !out.iter().any(|least| below(least, need)) {
            out.retain(|least| !below(need, least));
            out.push(need);
        }
    }
    out
}

impl ExistingNode<'_> {
    /// Whether the free capacity holds one pod of this size.
    pub fn holds(&self, need: &[i64]) -> bool {
        fits(need, &self.free)
    }
}
