//! Column generation over node patterns: the values of whole pods, a lower bound of whole pods, and patterns worth buying.

use crate::columns::dims::float;
use crate::patterns::branch_and_bound::{Branched, branch};
use crate::patterns::knapsack::Offered;
use crate::patterns::master::{Master, PricedPattern};
use crate::patterns::node_kinds::{Kinds, NodeKind};
use crate::state::demand::pattern::Pattern;

/// Kinds of nodes that patterns enter the master problem of in a round, and patterns of each.
const MAX_PROMISING: usize = 16;
const MAX_OF_NODE: usize = 4;
/// Reduced cost, as a share of the price, up to which a pattern does not enter.
const TOLERANCE: f64 = 1e-4;
/// Largest weight of the values of the best bound when patterns are priced, against those of the master problem, which swing at first
/// (Wentges's smoothing). Halved where the patterns do not improve the master problem.
const SMOOTHING: f64 = 0.5;
const MIN_SMOOTHING: f64 = 0.1;
/// Share of their price that the pods of a pattern are worth at least for it to be considered for what rounding has left.
const NEARLY_TIGHT: f64 = 0.97;
/// Share of a node of a pattern from which rounding buys a whole node.
const ROUND_UP: f64 = 0.8;
/// Share by which a bound may fall short of the value of the master problem for the search of patterns to end: before rounding, and for
/// what rounding has left.
const GAP: f64 = 5e-4;
const RESIDUAL_GAP: f64 = 5e-3;
/// Share by which the value of the master problem falls in some rounds for the generation of patterns to continue before rounding.
const TAIL: f64 = 2e-3;
const TAIL_ROUNDS: usize = 4;
/// Steps of branch and bound for a kind of node, as long as that finds patterns, and otherwise.
const QUICK_STEPS: usize = 200;
const FULL_STEPS: usize = 5_000;
/// Steps of the subgradient method, for a kind of node that a bound of the last round does not exclude.
const SUBGRADIENT_STEPS: usize = 5;
/// Elements of the master problem's inverse that are updated in the time of one step of branch and bound.
const ELEMENTS_PER_STEP: usize = 32;

/// When to end the generation of patterns.
struct Goal {
    /// Share by which the bound may fall short of the value of the master problem.
    gap: f64,
    /// Share by which the value falls in [`TAIL_ROUNDS`] rounds below which the generation ends.
    tail: f64,
    /// A bound that suffices, in micro-USD per hour.
    ceiling: f64,
    /// Total work.
    work: usize,
}

/// A kind of node that may have a pattern worth more than its price.
struct Promising {
    node: usize,
    /// The price, and a little more.
    target: f64,
    upper_bound: f64,
}

/// A search with all patterns that it has found.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct PatternSearch {
    pub kinds: Kinds,
    /// Price of the cheapest node for one pod of each kind.
    single: Vec<f64>,
    /// Multipliers of the resources of each kind of node at its last bound.
    multipliers: Vec<Vec<f64>>,
    patterns: Vec<PricedPattern>,
    /// Values of pods of the best bound so far, by kind; at first a guess.
    pub values: Vec<f64>,
    /// Whether the pods of no node are worth more than its price at these values.
    is_feasible: bool,
    /// A lower bound on the cost of all pods, in micro-USD per hour.
    pub bound: f64,
    /// Steps of branch and bound, and other work in that unit.
    pub work: usize,
}

impl PatternSearch {
    /// `values` is a guess of the value of a pod of each kind; `is_feasible` if the pods of no node are worth more than its price.
    /// `None` where a pod fits no kind of node.
    pub fn new(kinds: Kinds, values: Vec<f64>, is_feasible: bool) -> Option<Self> {
        let mut single = vec![f64::INFINITY; kinds.pods.len()];
        for node in &kinds.nodes {
            for pod in &node.pods {
                single[*pod] = single[*pod].min(node.price);
            }
        }
        if single.iter().any(|price| price.is_infinite()) {
            return None;
        }
        let multipliers = kinds.nodes.iter().map(NodeKind::equal_shares).collect();
        Some(Self { kinds, single, multipliers, patterns: Vec::new(), values, is_feasible, bound: 0.0, work: 0 })
    }

    /// Adds a known pattern, for the cheapest kind of node that holds it.
    pub fn add_known(&mut self, pods: &Pattern) {
        if let Some(node) = self.kinds.cheapest_node(pods).filter(|_| !pods.is_empty()) {
            let pattern = PricedPattern { node, price: self.kinds.nodes[node].price, pods: pods.clone() };
            if !self.patterns.contains(&pattern) {
                self.patterns.push(pattern);
            }
        }
    }

    fn counts(&self) -> Vec<usize> {
        self.kinds.pods.iter().map(|pod| pod.count).collect()
    }

    /// Generates patterns for these counts until the goal is reached. Returns the solved master problem and the best bound.
    fn generate(&mut self, counts: &[usize], patterns: &mut Vec<PricedPattern>, goal: &Goal) -> (Master, f64) {
        let mut master = Master::new(counts, &self.single);
        let sum =
            |values: &[f64]| -> f64 { values.iter().zip(counts).map(|(value, count)| value * float(*count)).sum() };
        let mut center = self.values.clone();
        let mut bound = if self.is_feasible { sum(&center) } else { 0.0 };
        let mut is_full = false;
        let mut weight = SMOOTHING;
        let mut totals: Vec<f64> = Vec::new();
        loop {
            self.work += master.optimize(patterns) / ELEMENTS_PER_STEP;
            let total = master.cost();
            let exact = master.values();
            let mixed = |(center, value): (&f64, &f64)| center * weight + value * (1.0 - weight);
            let values: Vec<f64> = center.iter().zip(&exact).map(mixed).collect();
            let (mut entering, excess) =
                if is_full { self.all_entering(counts, &values) } else { self.some_entering(counts, &values) };
            let lower = sum(&values) / excess;
            if lower > bound {
                bound = lower;
                center = values.iter().map(|value| value / excess).collect();
            }
            let worth = |pattern: &PricedPattern| -> f64 {
                pattern.pods.iter().map(|(pod, count)| exact[*pod] * float(*count)).sum()
            };
            entering.retain(|pattern| worth(pattern) > pattern.price * (1.0 + TOLERANCE));
            totals.push(total);
            let is_flat =
                totals.len() > TAIL_ROUNDS && totals[totals.len() - 1 - TAIL_ROUNDS] < total * (1.0 + goal.tail);
            let is_done = (is_full && weight == 0.0 && entering.is_empty()) || (is_flat && goal.tail > 0.0);
            if is_done || bound >= (total * (1.0 - goal.gap)).min(goal.ceiling) || self.work >= goal.work {
                self.is_feasible = bound > 0.0;
                self.values = center;
                return (master, bound);
            }
            if !entering.is_empty() {
                (is_full, weight) = (false, (weight * 2.0).clamp(MIN_SMOOTHING, SMOOTHING));
            } else if weight > 0.0 {
                weight = if weight > MIN_SMOOTHING { weight / 2.0 } else { 0.0 };
            } else {
                (is_full, weight) = (true, 0.0);
            }
            patterns.extend(entering);
        }
    }

    /// The kinds of nodes with patterns that may be worth more than their price, the largest ratio first, and that ratio of all others.
    fn promising(&mut self, counts: &[usize], values: &[f64]) -> (Vec<Promising>, f64) {
        let offered = Offered { kinds: &self.kinds, counts, values };
        let mut excess: f64 = 1.0;
        let mut promising = Vec::new();
        for (node, of) in self.kinds.nodes.iter().enumerate() {
            let target = of.price * (1.0 + TOLERANCE);
            let upper_bound = offered.upper_bound(of, &mut self.multipliers[node], target, SUBGRADIENT_STEPS);
            self.work += of.pods.len() / 4 + 1;
            if upper_bound > target {
                promising.push(Promising { node, target, upper_bound });
            } else {
                excess = excess.max(upper_bound / of.price.max(1.0));
            }
        }
        let ratio = |of: &Promising| of.upper_bound / of.target;
        promising.sort_by(|a, b| ratio(b).total_cmp(&ratio(a)).then(a.node.cmp(&b.node)));
        (promising, excess)
    }

    /// Patterns of negative reduced cost, each of other pods than those before as far as there are some; and an upper bound on the ratio of
    /// value to price of any pattern.
    fn some_entering(&mut self, counts: &[usize], values: &[f64]) -> (Vec<PricedPattern>, f64) {
        let (promising, mut excess) = self.promising(counts, values);
        excess = promising.iter().map(|of| of.upper_bound / (of.target / (1.0 + TOLERANCE))).fold(excess, f64::max);
        let mut entering: Vec<PricedPattern> = Vec::new();
        let mut left = counts.to_vec();
        let mut steps = 0;
        for of in promising.iter().take(MAX_PROMISING) {
            let node = &self.kinds.nodes[of.node];
            let mut counts = counts.to_vec();
            for _ in 0..MAX_OF_NODE {
                let offered = Offered { kinds: &self.kinds, counts: &counts, values };
                let filled = offered.fill(node, &self.multipliers[of.node], of.upper_bound, of.target, QUICK_STEPS);
                steps += filled.steps;
                if filled.pattern.is_empty() {
                    break;
                }
                filled.pattern.iter().for_each(|(pod, count)| left[*pod] = left[*pod].saturating_sub(*count));
                counts.clone_from(&left);
                if !entering.iter().any(|have| have.pods == filled.pattern) {
                    entering.push(PricedPattern { node: of.node, price: node.price, pods: filled.pattern });
                }
            }
        }
        self.work += steps;
        (entering, excess)
    }

    /// A pattern of most negative reduced cost for each kind of node at most; and the largest ratio of value to price that a
    /// pattern of any kind may have, at least one: values divided by it satisfy every constraint of the dual (Farley's bound).
    fn all_entering(&mut self, counts: &[usize], values: &[f64]) -> (Vec<PricedPattern>, f64) {
        let (promising, mut excess) = self.promising(counts, values);
        let offered = Offered { kinds: &self.kinds, counts, values };
        let mut entering: Vec<PricedPattern> = Vec::new();
        for Promising { node, target, upper_bound } in promising {
            let of = &self.kinds.nodes[node];
            let filled = offered.fill(of, &self.multipliers[node], upper_bound, target, FULL_STEPS);
            self.work += filled.steps;
            excess = excess.max(filled.upper_bound / of.price.max(1.0));
            if !filled.pattern.is_empty() && !entering.iter().any(|have| have.pods == filled.pattern) {
                entering.push(PricedPattern { node, price: of.price, pods: filled.pattern });
            }
        }
        (entering, excess)
    }

    /// The cheapest nodes for all pods that cost less than `ceiling`, by branch and bound; `values` must be those of the bound.
    pub fn branch(&mut self, ceiling: f64, steps: usize) -> Branched {
        let branched = branch(&self.kinds, &self.values, &self.multipliers, ceiling, steps);
        self.work += branched.steps;
        branched
    }

    /// Raises the bound by patterns for all pods, up to a `ceiling` that suffices.
    pub fn raise_bound(&mut self, limit: usize, ceiling: f64) {
        let counts = self.counts();
        let mut patterns = std::mem::take(&mut self.patterns);
        let goal = Goal { gap: GAP, tail: 0.0, ceiling, work: limit };
        let (_, bound) = self.generate(&counts, &mut patterns, &goal);
        self.patterns = patterns;
        self.bound = self.bound.max(bound);
    }

    /// Whole nodes for all pods that cost less than `ceiling`, by diving: buys the whole nodes of the fractional optimum, then generates
    /// patterns for the pods left, and so on. `None` if the bound of those reaches the ceiling. Few patterns are generated beyond a work of `limit`.
    pub fn dive(&mut self, ceiling: f64, limit: usize) -> Option<Vec<(usize, Pattern)>> {
        let mut counts = self.counts();
        let mut patterns = self.patterns.clone();
        let mut nodes = Vec::new();
        let mut cost = 0.0;
        while counts.iter().any(|count| *count > 0) {
            let goal = Goal { gap: RESIDUAL_GAP, tail: TAIL, ceiling: ceiling - cost, work: limit };
            let (master, bound) = self.generate(&counts, &mut patterns, &goal);
            if cost + bound >= ceiling {
                return None;
            }
            let bought = nodes.len();
            self.round(&mut counts, &patterns, &master, &mut nodes);
            cost += nodes[bought..].iter().map(|(node, _)| self.kinds.nodes[*node].price).sum::<f64>();
            patterns = residual(&patterns, &counts, &self.values);
        }
        (cost < ceiling).then_some(nodes)
    }

    /// Buys whole nodes, those of the patterns with the largest amounts first: whole numbers and nearly whole numbers, at least one node.
    fn round(
        &self,
        counts: &mut [usize],
        patterns: &[PricedPattern],
        master: &Master,
        nodes: &mut Vec<(usize, Pattern)>,
    ) {
        let (of_patterns, singles) = master.nodes();
        let cheapest = |pod: usize| self.kinds.nodes.iter().position(|node| node.pods.binary_search(&pod).is_ok());
        let single = |(pod, amount): (usize, f64)| {
            let pod_on = |node: usize| (amount, node, vec![(pod, 1)]);
            cheapest(pod).map(pod_on)
        };
        let of_pattern = |(at, amount): (usize, f64)| {
            let pattern: &PricedPattern = &patterns[at];
            (amount, pattern.node, pattern.pods.clone())
        };
        let mut order: Vec<(f64, usize, Pattern)> =
            of_patterns.into_iter().map(of_pattern).chain(singles.into_iter().filter_map(single)).collect();
        order.retain(|(amount, ..)| *amount > 1e-3);
        order.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)).then_with(|| a.2.cmp(&b.2)));
        let mut bought = false;
        for (amount, node, pattern) in order {
            #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
            let copies = ((amount + 1.0 - ROUND_UP) as usize).max(usize::from(!bought));
            for _ in 0..copies {
                let fill = |(pod, count): &(usize, usize)| (*pod, (*count).min(counts[*pod]));
                let pods: Pattern = pattern.iter().map(fill).filter(|(_, count)| *count > 0).collect();
                // A pattern that others have taken pods from is no longer worth its price.
                if pods.is_empty() || (bought && pods != pattern) {
                    break;
                }
                for (pod, count) in &pods {
                    counts[*pod] -= count;
                }
                nodes.push((node, pods));
                bought = true;
            }
        }
    }
}

/// Patterns cut to the pods left, of those that are worth nearly their price.
fn residual(patterns: &[PricedPattern], counts: &[usize], values: &[f64]) -> Vec<PricedPattern> {
    let mut out: Vec<PricedPattern> = Vec::new();
    for pattern in patterns {
        let cut = pattern.pods.iter().map(|(pod, count)| (*pod, (*count).min(counts[*pod])));
        let pods: Pattern = cut.filter(|(_, count)| *count > 0).collect();
        let worth: f64 = pods.iter().map(|(pod, count)| values[*pod] * float(*count)).sum();
        if worth >= pattern.price * NEARLY_TIGHT {
            out.push(PricedPattern { pods, ..*pattern });
        }
    }
    out
}
