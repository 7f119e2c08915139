//! Topology rules of a group on one key, and the counters they refer to.

use std::sync::Arc;

use stowage_model::labels;
use stowage_model::pod_class::{PodClass, PodTerm, Spread};

use crate::columns::bitset::Bits;

/// Counts of the pods that a selector selects, by domain of a key.
pub(crate) struct Counter {
    pub running: Vec<i64>,
    /// Running pods that a spread constraint counts: kube-scheduler ignores pods being deleted.
    pub staying: Vec<i64>,
    pub planned: Vec<i64>,
    /// Pods, running or planned in the domain, whose required anti-affinity excludes the selected pods.
    pub refusers: Vec<i64>,
    /// Pods in all domains, running and planned.
    pub everywhere: i64,
    /// Pods of `staying`, by node.
    pub at: Vec<(usize, i64)>,
    /// A required rule uses it.
    pub hard: bool,
    /// A hard spread constraint uses it.
    pub spread: bool,
}

impl Counter {
    pub fn total(&self, domain: usize) -> i64 {
        self.running[domain] + self.planned[domain]
    }

    /// Count for a spread constraint.
    pub fn spread_total(&self, domain: usize) -> i64 {
        self.staying[domain] + self.planned[domain]
    }

    pub fn anywhere(&self) -> bool {
        self.everywhere > 0
    }

    /// Adds planned pods in a domain, or removes them.
    pub fn plan(&mut self, domain: usize, pods: i64) {
        self.planned[domain] += pods;
        self.everywhere += pods;
    }
}

pub(crate) struct SpreadRule {
    pub counter: usize,
    /// Counter of the pods that are counted wherever they get a node; [`Self::counter`] has those, too, that are counted on some nodes only.
    pub least_counter: usize,
    pub own: i64,
    pub max_skew: i64,
    pub min_domains: usize,
    pub hard: bool,
    /// Running pods that the constraint counts, by domain.
    pub base: Vec<i64>,
    /// Domains that have a node which the constraint counts.
    pub occupied: Vec<bool>,
    /// Domains that the global minimum includes: `occupied`, and those in which the group may have a node.
    pub eligible: Vec<bool>,
    /// Columns whose nodes make their domain eligible, whether or not the pod fits there.
    pub counted: Bits,
    /// Whether the constraint counts each node, where it counts some nodes or columns only.
    pub counted_nodes: Option<Vec<bool>>,
}

/// A group's rules on one key.
#[derive(Default)]
pub(crate) struct Rules {
    pub spread: Vec<SpreadRule>,
    /// Counter, whether it selects the pod itself, whether the rule is required.
    pub anti: Vec<(usize, bool, bool)>,
    pub affinity: Vec<(usize, bool, bool)>,
    pub raises: Vec<usize>,
}

impl Rules {
    pub fn concern(&self, counters: &[Counter]) -> bool {
        !self.spread.is_empty()
            || !self.anti.is_empty()
            || !self.affinity.is_empty()
            || self.raises.iter().any(|c| counters[*c].hard)
    }

    /// Whether the rules include required affinity.
    pub fn has_affinity(&self) -> bool {
        self.affinity.iter().any(|(_, _, hard)| *hard)
    }

    /// Whether a node needs a label of the key.
    pub fn requires_label(&self) -> bool {
        self.has_affinity() || self.spread.iter().any(|s| s.hard)
    }

    /// Whether a required rule is affected: a rule of the group, or a rule of pods that count the group.
    pub fn must_hold(&self, counters: &[Counter]) -> bool {
        self.spread.iter().any(|s| s.hard)
            || self.anti.iter().chain(&self.affinity).any(|(_, _, hard)| *hard)
            || self.raises.iter().any(|c| counters[*c].hard)
    }
}

/// The rules of a class on keys other than the host name; preferences only where they are respected.
pub(crate) fn rules_of(class: &PodClass, respect: bool) -> impl Iterator<Item = (&Arc<str>, Rule<'_>)> {
    let spread = class.spread.iter().filter(move |s| s.hard || respect).map(|s| (&s.key, Rule::Spread(s)));
    let anti = class.anti_affinity.iter().map(|t| (&t.key, Rule::Anti(t, true)));
    let affinity = class.affinity.iter().map(|t| (&t.key, Rule::Affinity(t, true)));
    let soft_anti = class.preferred_anti_affinity.iter().filter(move |_| respect);
    let soft = class.preferred_affinity.iter().filter(move |_| respect);
    spread
        .chain(anti)
        .chain(affinity)
        .chain(soft_anti.map(|(_, t)| (&t.key, Rule::Anti(t, false))))
        .chain(soft.map(|(_, t)| (&t.key, Rule::Affinity(t, false))))
        .filter(|(key, _)| ***key != *labels::HOSTNAME)
}

pub(crate) enum Rule<'c> {
    Spread(&'c Spread),
    Anti(&'c PodTerm, bool),
    Affinity(&'c PodTerm, bool),
}
