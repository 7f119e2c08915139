//! The pricing problem of column generation: the most valuable pattern of a kind of node, a bounded knapsack with several resources
//! and host rules. Branch and bound, with the Lagrangian relaxation of the resources as upper bound.

use crate::columns::dims::{float, real};
use crate::patterns::node_kinds::{Kinds, NodeKind};
use crate::state::demand::pattern::Pattern;

/// Relative difference below which values are equal.
const PRECISION: f64 = 1e-9;

/// A pattern of a kind of node and what is known of the best.
pub(crate) struct Filled {
    /// Kinds of pods and counts, ascending. Empty if none has a value above the target.
    pub pattern: Pattern,
    /// No pattern of the kind has a higher value than this and the target.
    pub upper_bound: f64,
    /// Steps of branch and bound.
    pub steps: usize,
}

/// Values and counts of the pods of a knapsack, by kind of pod.
pub(crate) struct Offered<'k> {
    pub kinds: &'k Kinds,
    pub counts: &'k [usize],
    pub values: &'k [f64],
}

impl Offered<'_> {
    /// The Lagrangian bound at given multipliers (the price of a unit of each resource), and the resources that the relaxed solution uses.
    fn relaxed(&self, node: &NodeKind, multipliers: &[f64], used: &mut [f64]) -> f64 {
        used.fill(0.0);
        let mut bound: f64 = node.room.iter().zip(multipliers).map(|(room, price)| real(*room) * price).sum();
        for (pod, most) in node.pods.iter().zip(&node.most) {
            let (count, value) = (self.counts[*pod].min(*most), self.values[*pod]);
            if count == 0 || value <= 0.0 {
                continue;
            }
            let need = &self.kinds.pods[*pod].need;
            let cost: f64 = need.iter().zip(multipliers).map(|(need, price)| real(*need) * price).sum();
            if value > cost {
                let count = float(count);
                bound += (value - cost) * count;
                for (used, need) in used.iter_mut().zip(need) {
                    *used += real(*need) * count;
                }
            }
        }
        bound
    }

    /// Lowers the upper bound on the value of a pattern by better `multipliers`, until it is at most `target` or the steps of the subgradient
    /// method run out.
    pub fn upper_bound(&self, node: &NodeKind, multipliers: &mut [f64], target: f64, steps: usize) -> f64 {
        let mut used = vec![0.0; multipliers.len()];
        let mut trial = multipliers.to_vec();
        let mut best = f64::INFINITY;
        for _ in 0..=steps {
            let bound = self.relaxed(node, &trial, &mut used);
            if bound < best {
                best = bound;
                multipliers.copy_from_slice(&trial);
            }
            if best <= target {
                break;
            }
            // In units of the node's capacity. Polyak's step towards the target.
            let slope = |room: i64, used: f64| (real(room) - used) / real(room.max(1));
            let norm: f64 = node.room.iter().zip(&used).map(|(room, used)| slope(*room, *used).powi(2)).sum();
            if norm < PRECISION {
                break;
            }
            let step = (bound - target * 0.98).max(0.0) / norm;
            for ((price, room), used) in trial.iter_mut().zip(&node.room).zip(&used) {
                *price = (*price - step * slope(*room, *used) / real((*room).max(1))).max(0.0);
            }
        }
        best
    }

    /// The most valuable pattern of a kind of node that branch and bound finds in so many steps, if its value is more than `target`.
    pub fn fill(&self, node: &NodeKind, multipliers: &[f64], upper_bound: f64, target: f64, steps: usize) -> Filled {
        let mut search = Search::new(self, node, multipliers, (target, steps), None);
        search.visit(0, 0.0, worth_of(node, multipliers));
        let upper_bound = if search.steps_left > 0 { search.best.min(upper_bound) } else { upper_bound };
        let pattern = search.in_kinds(&search.best_pattern);
        Filled { pattern, upper_bound, steps: steps - search.steps_left }
    }

    /// Adds to `found` every pattern of a value above `target` that has a pod of the kind `first` and to which no further pod can be added.
    /// Returns the steps, which are as many as given if some patterns may be missing.
    pub fn all_with(
        &self,
        first: usize,
        (node, multipliers): (&NodeKind, &[f64]),
        target: f64,
        steps: usize,
        found: &mut Vec<Pattern>,
    ) -> usize {
        let mut search = Search::new(self, node, multipliers, (target, steps), Some(first));
        search.patterns = Some(Vec::new());
        search.visit(0, 0.0, worth_of(node, multipliers));
        let patterns = search.patterns.take().unwrap_or_default();
        found.extend(patterns.iter().map(|pattern| search.in_kinds(pattern)));
        steps - search.steps_left
    }
}

/// The capacity of a node at the multipliers.
fn worth_of(node: &NodeKind, multipliers: &[f64]) -> f64 {
    node.room.iter().zip(multipliers).map(|(room, price)| real(*room) * price).sum()
}

/// A kind of pod in branch and bound.
struct Choice {
    pod: usize,
    value: f64,
    /// Price of its resources at the multipliers.
    cost: f64,
    /// Value per cost.
    efficiency: f64,
    count: usize,
}

/// Branch and bound over the counts of the kinds of pods, in descending order of value per cost.
struct Search<'s> {
    kinds: &'s Kinds,
    choices: Vec<Choice>,
    /// The most that the choices from each position on can add to the Lagrangian bound.
    rest: Vec<f64>,
    room: Vec<i64>,
    counts: Vec<i32>,
    caps: Vec<i32>,
    current: Pattern,
    best: f64,
    best_pattern: Pattern,
    /// All patterns above the target, instead of the best.
    patterns: Option<Vec<Pattern>>,
    /// Whether each pattern has a pod of the first choice.
    needs_first: bool,
    steps_left: usize,
}

impl<'s> Search<'s> {
    fn new(
        offered: &Offered<'s>,
        node: &NodeKind,
        multipliers: &[f64],
        (target, steps_left): (f64, usize),
        first: Option<usize>,
    ) -> Self {
        let of_node = node.pods.iter().copied().zip(node.most.iter().copied());
        let worthless = |pod: usize| offered.values[pod] <= 0.0 && first.is_none();
        let open = of_node.filter(|(pod, _)| offered.counts[*pod] > 0 && !worthless(*pod));
        let mut choices: Vec<Choice> = open
            .map(|(pod, most)| {
                let need = &offered.kinds.pods[pod].need;
                let cost: f64 = need.iter().zip(multipliers).map(|(need, price)| real(*need) * price).sum();
                let value = offered.values[pod];
                let efficiency = value / f64::max(cost, f64::MIN_POSITIVE);
                Choice { pod, value, cost, efficiency, count: offered.counts[pod].min(most) }
            })
            .collect();
        let is_first = |choice: &Choice| Some(choice.pod) == first;
        choices.sort_unstable_by(|a, b| {
            let by_efficiency = b.efficiency.total_cmp(&a.efficiency).then(a.pod.cmp(&b.pod));
            is_first(b).cmp(&is_first(a)).then(by_efficiency)
        });
        let mut rest = vec![0.0; choices.len() + 1];
        for (at, choice) in choices.iter().enumerate().rev() {
            rest[at] = rest[at + 1] + (choice.value - choice.cost).max(0.0) * float(choice.count);
        }
        let mut counts = vec![0; offered.kinds.counters];
        let mut caps = vec![i32::MAX; offered.kinds.counters];
        node.counts.iter().for_each(|(counter, count)| counts[*counter as usize] += count);
        for (counter, cap) in &node.caps {
            let have = &mut caps[*counter as usize];
            *have = (*have).min(*cap);
        }
        let room = node.room.clone();
        let (current, best_pattern) = (Pattern::new(), Pattern::new());
        Self {
            kinds: offered.kinds,
            choices,
            rest,
            room,
            counts,
            caps,
            current,
            best: target,
            best_pattern,
            patterns: None,
            needs_first: first.is_some(),
            steps_left,
        }
    }

    /// A pattern of choices as one of kinds of pods.
    fn in_kinds(&self, choices: &Pattern) -> Pattern {
        let mut pattern: Pattern = choices.iter().map(|(at, count)| (self.choices[*at].pod, *count)).collect();
        pattern.sort_unstable();
        pattern
    }

    /// Whether no further pod can be added.
    fn is_full(&self) -> bool {
        (0..self.choices.len()).all(|at| {
            let put = self.current.iter().find(|(have, _)| *have == at).map_or(0, |(_, count)| *count);
            put >= self.choices[at].count || self.max_count(at) == 0
        })
    }

    /// Adds choices from position `from` on. `value` is that of the current pattern, `worth` the price of the room left.
    fn visit(&mut self, from: usize, value: f64, worth: f64) {
        if value > self.best * (1.0 + PRECISION) {
            if self.patterns.is_none() {
                self.best = value;
                self.best_pattern.clone_from(&self.current);
            } else if !self.current.is_empty() && self.is_full() {
                let current = self.current.clone();
                self.patterns.iter_mut().for_each(|patterns| patterns.push(current.clone()));
            }
        }
        let end = if self.needs_first && self.current.is_empty() { 1 } else { self.choices.len() };
        for at in from..end.min(self.choices.len()) {
            let goal = self.best * (1.0 + PRECISION);
            if value + worth + self.rest[at] <= goal {
                return;
            }
            let (gain, cost) = (self.choices[at].value, self.choices[at].cost);
            for count in (1..=self.max_count(at)).rev() {
                if self.steps_left == 0 {
                    return;
                }
                self.steps_left -= 1;
                let (more, left) = (value + gain * float(count), worth - cost * float(count));
                if more + left + self.rest[at + 1] <= self.best * (1.0 + PRECISION) {
                    if gain >= cost {
                        break;
                    }
                    continue;
                }
                let caps = self.put(at, count);
                self.visit(at + 1, more, left);
                self.remove(at, count, caps);
            }
        }
    }

    /// How many pods of a choice can join the current pattern.
    fn max_count(&self, at: usize) -> usize {
        let choice = &self.choices[at];
        let pod = &self.kinds.pods[choice.pod];
        let by_room = pod.need.iter().zip(&self.room).filter(|(need, _)| **need > 0).map(|(need, room)| room / need);
        let mut most = by_room.min().map_or(choice.count, |most| usize::try_from(most).unwrap_or(0)).min(choice.count);
        for (counter, cap) in &pod.caps {
            if !pod.raises.contains(counter) && self.counts[*counter as usize] > *cap {
                return 0;
            }
        }
        for counter in &pod.raises {
            let own = pod.caps.iter().find(|(of, _)| of == counter).map_or(i32::MAX, |(_, cap)| *cap);
            let left = own.min(self.caps[*counter as usize]).saturating_sub(self.counts[*counter as usize]);
            most = most.min(usize::try_from(left).unwrap_or(0));
        }
        most
    }

    /// Adds pods of a choice; returns the caps that it lowered, to be restored.
    fn put(&mut self, at: usize, count: usize) -> Vec<(u32, i32)> {
        let pod = &self.kinds.pods[self.choices[at].pod];
        let pods = i64::try_from(count).unwrap_or(i64::MAX);
        self.room.iter_mut().zip(&pod.need).for_each(|(room, need)| *room -= need * pods);
        let raised = i32::try_from(count).unwrap_or(i32::MAX);
        pod.raises.iter().for_each(|counter| self.counts[*counter as usize] += raised);
        let mut lowered = Vec::new();
        for (counter, cap) in &pod.caps {
            let have = &mut self.caps[*counter as usize];
            if *cap < *have {
                lowered.push((*counter, *have));
                *have = *cap;
            }
        }
        self.current.push((at, count));
        lowered
    }

    fn remove(&mut self, at: usize, count: usize, lowered: Vec<(u32, i32)>) {
        self.current.pop();
        let pod = &self.kinds.pods[self.choices[at].pod];
        let pods = i64::try_from(count).unwrap_or(i64::MAX);
        self.room.iter_mut().zip(&pod.need).for_each(|(room, need)| *room += need * pods);
        let raised = i32::try_from(count).unwrap_or(i32::MAX);
        pod.raises.iter().for_each(|counter| self.counts[*counter as usize] -= raised);
        lowered.into_iter().rev().for_each(|(counter, cap)| self.caps[counter as usize] = cap);
    }
}
