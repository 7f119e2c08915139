//! Nodes that exist or are in flight, as bins.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use crate::planner::columns::dims::fits;
use crate::planner::columns::sets::ColumnSets;
use crate::planner::groups::group::{Group, HostCounters, HostRules};
use crate::planner::groups::selectors::Selectors;
use crate::planner::input::node::NodeState;

/// Counters and caps of a node before anything is put there.
#[derive(Clone, Debug, Default)]
pub(crate) struct HostState {
    /// Counter and its value.
    pub counts: Vec<(u32, i32)>,
    /// Counter and the greatest value it may reach.
    pub caps: Vec<(u32, i32)>,
}

impl HostState {
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

/// A node that exists, with what is free on it.
#[derive(Debug)]
pub(crate) struct Existing<'p> {
    /// Index into the problem's nodes.
    pub index: usize,
    pub state: &'p NodeState,
    pub free: Vec<i64>,
    pub host: HostState,
    /// Nodes of one kind are told apart by no pending pod's node constraints.
    pub kind: usize,
}

/// The schedulable nodes that have room for a pod of some group, initialized first, then by name; and the counters that are
/// above zero on some node, one that takes no pods included: kube-scheduler counts its pods too.
pub(crate) fn existing<'p>(
    column_sets: &ColumnSets<'p>,
    selectors: &mut Selectors<'p>,
    counters: &HostCounters,
    groups: &[Group],
) -> (Vec<Existing<'p>>, BTreeSet<u32>) {
    let problem = column_sets.problem;
    let mut order: Vec<usize> = (0..problem.nodes.len()).collect();
    if counters.len() == 0 {
        order.retain(|n| problem.nodes[*n].schedulable);
    }
    order.sort_by(|a, b| {
        let key = |n: &usize| (!problem.nodes[*n].initialized, &problem.nodes[*n].name);
        key(a).cmp(&key(b))
    });
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
            // The ports of daemons to come are theirs already.
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
        out.push(Existing { index, state, free, host, kind });
    }
    (out, running)
}

/// What is free on a node before anything is put there.
pub(crate) fn free_on(column_sets: &ColumnSets<'_>, node: &NodeState) -> Vec<i64> {
    let mut free = column_sets.dims.dense(&node.allocatable);
    for taken in [node.pods.requests(), &node.daemon_reserve] {
        column_sets.dims.subtract(&mut free, taken);
    }
    free
}

/// What pending pods' node constraints can tell apart.
#[derive(PartialEq, Eq, Hash)]
struct Kind<'n> {
    labels: Vec<Option<&'n str>>,
    taints: Vec<(&'n str, Option<&'n str>, &'n str)>,
    name: Option<&'n str>,
}

/// Needs that no other group's need stays below in everything: what holds none of them holds no pod.
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

impl Existing<'_> {
    /// Whether one pod of this size fits what is free.
    pub fn holds(&self, need: &[i64]) -> bool {
        fits(need, &self.free)
    }
}
