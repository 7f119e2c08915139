//! The terms of a rehearsal: where pods are, what counts them, and what binding one requires.

use std::rc::Rc;

/// Domain of a node without the label.
pub(super) const NOWHERE: usize = usize::MAX;

/// Where pods are: a node of the plan, in its order.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Node {
    /// Index into the placements.
    Existing(usize),
    /// Index into the purchased nodes.
    New(usize),
}

/// Pods of one group whose nodes no rule of the group distinguishes.
pub(super) struct Cell {
    pub(super) group: usize,
    /// Domain by key.
    pub(super) domains: Rc<[usize]>,
    /// The spread constraints that count the pods here, as indexes of tallies.
    pub(super) counted: Vec<usize>,
    pub(super) pods: usize,
    /// Node, item and number of pods.
    pub(super) places: Vec<(Node, usize, usize)>,
}

/// Pods of a selector by domain of a key.
#[derive(Clone)]
pub(super) struct Tally {
    pub(super) key: usize,
    pub(super) pods: Vec<i64>,
    pub(super) everywhere: i64,
    /// Pods whose required anti-affinity excludes the selected pods.
    pub(super) refusers: Vec<i64>,
}

/// Pods that a spread constraint counts.
#[derive(Clone)]
pub(super) struct SpreadTally {
    pub(super) key: usize,
    /// Whether it counts each node.
    pub(super) nodes: Rc<[bool]>,
    pub(super) pods: Vec<i64>,
    /// Domains with a counted node.
    pub(super) eligible: Rc<[usize]>,
    /// The least count of the eligible domains, and how many have it.
    pub(super) least: (i64, usize),
}

impl SpreadTally {
    pub(super) fn find_least(&mut self) {
        let counts = || self.eligible.iter().map(|domain| self.pods[*domain]);
        let least = counts().min().unwrap_or(0);
        self.least = (least, counts().filter(|count| *count == least).count());
    }

    pub(super) fn add(&mut self, domain: usize) {
        self.pods[domain] += 1;
        if self.pods[domain] == self.least.0 + 1 && self.eligible.binary_search(&domain).is_ok() {
            self.least.1 -= 1;
            if self.least.1 == 0 {
                self.find_least();
            }
        }
    }
}

/// What binding a pod of a group requires and changes, as indexes of tallies.
#[derive(Default)]
pub(super) struct Rules {
    /// Tally, whether the constraint selects the pod itself, `maxSkew`, `minDomains`.
    pub(super) spread: Vec<(usize, bool, i64, usize)>,
    pub(super) anti: Vec<usize>,
    /// Tallies of the required terms, and whether all of them select the pod itself.
    pub(super) affinity: Option<(Vec<usize>, bool)>,
    /// Tallies of the selectors that select it.
    pub(super) raises: Vec<usize>,
    /// The same of spread constraints.
    pub(super) raises_spread: Vec<usize>,
}
