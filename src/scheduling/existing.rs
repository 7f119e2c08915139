//! Nodes that exist or are in flight, as bins.

use std::collections::HashMap;
use std::sync::Arc;

use super::class::{NodeTerm, PodClass};
use super::groups::{HostCounters, HostRules};
use super::problem::NodeState;
use super::requirement::normalise_key;
use super::selectors::Selectors;
use super::universe::{Universe, fits};
use crate::api::labels;

/// Counters and caps of a node before anything is put there.
#[derive(Clone, Debug, Default)]
pub(super) struct HostState {
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
pub(super) struct Existing<'p> {
    /// Index into the problem's nodes.
    pub index: usize,
    pub state: &'p NodeState,
    pub free: Vec<i64>,
    pub host: HostState,
    /// Nodes of one kind are told apart by no pending pod's node constraints.
    pub kind: usize,
}

/// The schedulable nodes, initialized first, then by name.
pub(super) fn existing<'p>(
    universe: &Universe<'p>,
    selectors: &mut Selectors<'p>,
    counters: &HostCounters,
    keys: &[Arc<str>],
) -> Vec<Existing<'p>> {
    let problem = universe.problem;
    let mut order: Vec<usize> = (0..problem.nodes.len()).filter(|n| problem.nodes[*n].schedulable).collect();
    order.sort_by(|a, b| {
        let key = |n: &usize| (!problem.nodes[*n].initialized, &problem.nodes[*n].name);
        key(a).cmp(&key(b))
    });
    let mut classes = problem.pods.iter().map(|pod| &pod.class);
    let by_name = classes.any(|class| class.node_terms.iter().chain(&class.volume_terms).any(|t| t.name.is_some()));
    let mut kinds: HashMap<Vec<String>, usize> = HashMap::new();
    order
        .into_iter()
        .map(|index| {
            let state = &problem.nodes[index];
            let mut free = state.allocatable.clone();
            let mut host = HostState::default();
            free.sub(state.pods.requests());
            if counters.len() > 0 {
                state.pods.iter().for_each(|pod| host.add(&counters.running(pod, selectors)));
            }
            free.sub(&state.daemon_reserve);
            let mut kind: Vec<String> = keys
                .iter()
                .map(|key| label(state, key).map_or_else(|| "-".to_owned(), |value| format!("={value}")))
                .collect();
            kind.extend(
                state
                    .taints
                    .iter()
                    .map(|t| format!("{}|{}|{}", t.key, t.value.as_deref().unwrap_or_default(), t.effect)),
            );
            if by_name {
                kind.push(state.name.to_string());
            }
            let next = kinds.len();
            let kind = *kinds.entry(kind).or_insert(next);
            Existing { index, state, free: universe.dims.dense(&free), host, kind }
        })
        .collect()
}

/// A node's value of a label; the host name is the node's name where the label is missing.
pub(super) fn label<'n>(node: &'n NodeState, key: &str) -> Option<&'n str> {
    node.labels
        .get(key)
        .or_else(|| node.labels.iter().find(|(have, _)| normalise_key(have) == key).map(|(_, value)| value))
        .map(String::as_str)
        .or_else(|| (key == labels::HOSTNAME).then_some(&*node.name))
}

/// Whether a class's required node terms, volumes and tolerations admit a node.
pub(super) fn admits(class: &PodClass, node: &NodeState) -> bool {
    class.untolerated(&node.taints).is_none()
        && accepted(&class.node_terms, node)
        && accepted(&class.volume_terms, node)
}

/// Whether one of `terms` accepts a node, or there are none.
pub(super) fn accepted(terms: &[NodeTerm], node: &NodeState) -> bool {
    let accepts = |term: &NodeTerm| {
        !term.never
            && term.labels.iter().all(|(key, set)| set.accepts(label(node, key)))
            && term.name.as_ref().is_none_or(|set| set.contains(&node.name))
    };
    terms.is_empty() || terms.iter().any(accepts)
}

impl Existing<'_> {
    /// Whether one pod of this size fits what is free.
    pub fn holds(&self, need: &[i64]) -> bool {
        fits(need, &self.free)
    }
}
