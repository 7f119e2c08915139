//! Branch and bound over whole nodes, for few pods: proves how little the nodes cost.
//!
//! The next node holds a pod of the most valuable kind that is left. The slack (ceiling - cost - value of the remaining
//! pods) bounds how far the price of that node may exceed the value of its pods: few patterns are that good. Only full patterns are tried, because moving a
//! pod to a node that has room for it never costs more.

use std::collections::HashMap;

use crate::columns::dims::float;
use crate::patterns::knapsack::Offered;
use crate::patterns::node_kinds::Kinds;
use crate::state::demand::pattern::Pattern;

/// Steps that a pattern counts as besides those that found it.
const STEPS_PER_PATTERN: usize = 4;

/// What a search found.
pub(crate) struct Branched {
    /// The cheapest nodes found below the ceiling: kinds and pods.
    pub nodes: Option<Vec<(usize, Pattern)>>,
    /// Whether no cheaper nodes exist: below the ceiling, if none were found.
    pub is_proven: bool,
    pub steps: usize,
}

struct Branching<'k> {
    kinds: &'k Kinds,
    values: &'k [f64],
    multipliers: &'k [Vec<f64>],
    /// Kinds of pods, the most valuable first.
    order: Vec<usize>,
    ceiling: f64,
    nodes: Vec<(usize, Pattern)>,
    best: Option<Vec<(usize, Pattern)>>,
    /// Cost of the nodes so far when these pods were left before.
    known: HashMap<Vec<usize>, f64>,
    steps_left: usize,
}

/// The cheapest nodes for all pods that cost less than `ceiling`. `values` are values of pods by kind at which the pods of no node are worth more
/// than its price; `multipliers` are prices of the resources of each kind of node.
pub(crate) fn branch(kinds: &Kinds, values: &[f64], multipliers: &[Vec<f64>], ceiling: f64, steps: usize) -> Branched {
    let mut order: Vec<usize> = (0..kinds.pods.len()).collect();
    order.sort_by(|a, b| values[*b].total_cmp(&values[*a]).then(a.cmp(b)));
    let left: Vec<usize> = kinds.pods.iter().map(|pod| pod.count).collect();
    let (known, nodes, best) = (HashMap::new(), Vec::new(), None);
    let mut branching = Branching { kinds, values, multipliers, order, ceiling, nodes, best, known, steps_left: steps };
    branching.visit(&left, 0.0);
    let steps_left = branching.steps_left;
    Branched { nodes: branching.best, is_proven: steps_left > 0, steps: steps - steps_left }
}

impl Branching<'_> {
    fn spend(&mut self, steps: usize) {
        self.steps_left = self.steps_left.saturating_sub(steps);
    }

    /// Adds nodes for the pods left to nodes of a cost.
    fn visit(&mut self, left: &[usize], cost: f64) {
        let Some(first) = self.order.iter().copied().find(|kind| left[*kind] > 0) else {
            if cost < self.ceiling {
                self.ceiling = cost;
                self.best = Some(self.nodes.clone());
            }
            return;
        };
        let worth: f64 = left.iter().zip(self.values).map(|(count, value)| float(*count) * value).sum();
        let slack = self.ceiling - cost - worth;
        if slack <= 0.0 || self.known.get(left).is_some_and(|known| *known <= cost) {
            return;
        }
        self.known.insert(left.to_vec(), cost);
        for (waste, node, pattern) in self.patterns(left, first, slack) {
            // The ceiling falls.
            if self.steps_left == 0 || waste >= self.ceiling - cost - worth {
                return;
            }
            let mut rest = left.to_vec();
            for (kind, count) in &pattern {
                rest[*kind] -= count;
            }
            let cost = cost + self.kinds.nodes[node].price;
            self.nodes.push((node, pattern));
            self.visit(&rest, cost);
            self.nodes.pop();
        }
    }

    /// Full patterns of these pods, with a pod of the kind `first`, on nodes whose price exceeds their worth by less than `slack`; the least
    /// excess first.
    fn patterns(&mut self, left: &[usize], first: usize, slack: f64) -> Vec<(f64, usize, Pattern)> {
        let offered = Offered { kinds: self.kinds, counts: left, values: self.values };
        let mut found: Vec<(f64, usize, Pattern)> = Vec::new();
        for (at, node) in self.kinds.nodes.iter().enumerate() {
            if self.steps_left == 0 {
                break;
            }
            if node.pods.binary_search(&first).is_err() {
                continue;
            }
            let mut patterns = Vec::new();
            let (of, target) = ((node, self.multipliers[at].as_slice()), node.price - slack);
            let steps = offered.all_with(first, of, target, self.steps_left, &mut patterns);
            self.steps_left = self.steps_left.saturating_sub(1 + steps + patterns.len() * STEPS_PER_PATTERN);
            let worth = |pattern: &Pattern| -> f64 {
                pattern.iter().map(|(kind, count)| self.values[*kind] * float(*count)).sum()
            };
            found.extend(patterns.into_iter().map(|pattern| (node.price - worth(&pattern), at, pattern)));
        }
        self.spend(found.len());
        // The cheapest node of each pattern.
        found.sort_by(|a, b| a.2.cmp(&b.2).then(a.0.total_cmp(&b.0)).then(a.1.cmp(&b.1)));
        found.dedup_by(|later, earlier| later.2 == earlier.2);
        found.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)).then_with(|| a.2.cmp(&b.2)));
        found
    }
}
