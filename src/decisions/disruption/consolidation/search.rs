//! The search for the nodes to remove: a selection by an estimate, or the best prefix of the order, then single changes of it. A plan judges each set,
//! because nodes that are removed together share the room and the new nodes that their pods need. Changes that are worthless by the estimate are left
//! out.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use crate::decisions::disruption::consolidation::market_value::Floor;
use crate::decisions::disruption::consolidation::order::Source;
use crate::decisions::disruption::consolidation::rooms::{Room, Rooms};
use crate::decisions::disruption::size::{Size, less, sum};

/// Price of new nodes for the selection, in thousandths of the least one: they are seldom full, and started before others end.
const SELECTION_PRICE: i64 = 1_300;
/// Selections that are planned, each without the unprofitable sources of the last.
const SELECTIONS: usize = 3;
/// No prefix is tried where the selection has at most this part of the sources: little changed.
const SMALL_PART: usize = 8;
/// Size of the first prefix where nothing is selected. Larger ones follow while they are better.
const FIRST_PREFIX: usize = 32;
/// Sets between the neighbors of the best prefix.
const REFINEMENTS: usize = 4;
/// Plans for a prefix, each without the nodes whose pods have no place in the last.
const REPAIRS: usize = 3;
/// Sources that are tried alone because they have no place in a larger set. Without those that have none even alone, others are within the
/// limits: as often, the best prefix is searched.
const CONFIRM: usize = 32;
const CONFIRMATIONS: usize = 3;
/// Changes of the best set in each round: nodes that are kept after all, further nodes, and exchanges.
const GIVE_BACK: usize = 16;
const ADD: usize = 32;
/// So many of these are tried in turns, where not all are tried.
const IN_TURNS: usize = ADD / 2;
/// Work for reading the nodes in each plan: one for four nodes, at most this.
const MAX_WORK_OF_NODES: usize = 500;
const EXCHANGE: usize = 48;
const ROUNDS: usize = 4;
/// With at most as many sources all sets are tried, as far as the work allows, but those that cannot be better.
const MAX_BRANCHED: usize = 16;
/// Work for changes of the best set: pods that are planned, and those that take as long as the rest of a plan. In clusters of more nodes than the
/// other number it is less in proportion, if a set was found: a single change matters less, and the next decision follows.
const WORK: usize = 20_000;
const MANY_NODES: usize = 100;
const WORK_OF_A_PLAN: usize = 100;
/// Maximum price of new nodes for further pods, in thousandths of the least one.
const MAX_PRICE: i64 = 1_500;
/// Rooms that the estimates of a round look at.
const STEPS: usize = 10_000_000;

/// What may be removed at once.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Limits {
    pub nodes: usize,
    /// Pods that move; the first node may have more.
    pub pods: usize,
    /// Nodes by NodePool; none of other NodePools.
    pub of_pools: BTreeMap<String, i64>,
    /// Other pods that each plan places, and nodes that it reads, which takes time.
    pub waiting: usize,
    pub cluster: usize,
    /// What is free on the nodes where pods may go while all stay.
    pub rooms: Vec<Room>,
    /// What new nodes cost at least.
    pub floor: Floor,
}

/// What a plan says about the removal of a set of sources.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Judgment {
    Worth(Judged),
    /// The pods of these have no place.
    Stuck(BTreeSet<usize>),
    /// The planner failed.
    Unknown,
}

/// What the removal of a set means.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Judged {
    /// Micro-USD per hour: at most the sum of the gains.
    pub worth: i64,
    /// What is free afterwards on the nodes that stay, and on new ones.
    pub rooms: Vec<Room>,
    /// What the new nodes cost, by source in proportion to its pods on them.
    pub bought: BTreeMap<usize, i64>,
    /// What the pods on new nodes need.
    pub load_of_new: Size,
}

/// The best set that was found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Choice {
    pub chosen: BTreeSet<usize>,
    /// Positive, unless nothing is chosen.
    pub worth: i64,
    /// Sources that cannot be removed even alone.
    pub stuck: BTreeSet<usize>,
    /// Number of plans.
    pub plans: usize,
    /// Where the next search goes on: each source is tried by itself after a bounded number of searches.
    pub cursor: String,
    /// Number of sources up to there that this search tried.
    pub tried: usize,
    /// Sources that nothing is gained by, in addition to the chosen ones, and what the new nodes for their pods cost at least.
    pub worthless: BTreeMap<usize, i64>,
}

/// Searches among sources that are in order.
pub fn search(
    sources: &[Source],
    limits: &Limits,
    cursor: &str,
    judge: impl FnMut(&BTreeSet<usize>) -> Judgment,
) -> Choice {
    let (mut free, mut own) = ([0; 2], vec![[0; 2]; sources.len()]);
    for room in &limits.rooms {
        free = sum(free, room.free);
        if let Some(own) = room.source.and_then(|at| own.get_mut(at)) {
            *own = room.free;
        }
    }
    let mut search = Search {
        sources,
        limits,
        free,
        own,
        judge,
        best: Choice { cursor: cursor.to_owned(), ..Choice::default() },
        rooms: Rooms::new(limits.rooms.clone()),
        bought: BTreeMap::new(),
        price_permille: 1_000,
        unprofitable: BTreeSet::new(),
        suspects: BTreeSet::new(),
        work: WORK,
    };
    let selected = search.selection();
    search.confirm();
    let first = if search.best.worth > 0 { usize::MAX } else { FIRST_PREFIX };
    if search.best.worth == 0 || selected * SMALL_PART > sources.len() {
        for _ in 0..CONFIRMATIONS {
            search.best_prefix(first);
            if !search.confirm() {
                break;
            }
        }
    }
    if search.best.worth > 0 {
        search.work = search.work.min(WORK * MANY_NODES / limits.cluster.max(MANY_NODES));
    }
    let others = search.others();
    for _ in 0..ROUNDS {
        let before = search.best.worth;
        search.give_back();
        search.add(&others);
        search.exchange();
        if search.best.worth == before {
            break;
        }
    }
    if sources.len() <= MAX_BRANCHED {
        search.branch(&BTreeSet::new(), 0, &mut Vec::new());
    }
    search.best
}

struct Search<'a, F> {
    sources: &'a [Source],
    limits: &'a Limits,
    /// Sum of the rooms, and what is free on each source where pods may go.
    free: Size,
    own: Vec<Size>,
    judge: F,
    best: Choice,
    /// What is free without the best set, and what its new nodes cost ([`Judged::bought`]).
    rooms: Rooms,
    bought: BTreeMap<usize, i64>,
    /// What its new nodes cost, in thousandths of the least price of what their pods need.
    price_permille: i64,
    /// Sources of the last set that was planned whose pods need new nodes that cost more than is gained.
    unprofitable: BTreeSet<usize>,
    /// Sources whose pods had no place in some set.
    suspects: BTreeSet<usize>,
    /// The remaining part of [`WORK`].
    work: usize,
}

impl<F: FnMut(&BTreeSet<usize>) -> Judgment> Search<'_, F> {
    /// The sources that the limits admit together, in order: one that exceeds them is skipped.
    fn within_limits(&self, order: impl Iterator<Item = usize>) -> Vec<usize> {
        let (mut of_pools, mut nodes, mut pods) = (self.limits.of_pools.clone(), self.limits.nodes, self.limits.pods);
        let mut out = Vec::new();
        for at in order {
            let source = &self.sources[at];
            let Some(of_pool) = of_pools.get_mut(&source.pool).filter(|nodes| **nodes > 0) else { continue };
            let fits = out.is_empty() || source.pods <= pods;
            if nodes > 0 && fits {
                *of_pool -= 1;
                nodes -= 1;
                pods = pods.saturating_sub(source.pods);
                out.push(at);
            }
        }
        out
    }

    fn is_within_limits(&self, set: &BTreeSet<usize>) -> bool {
        self.within_limits(set.iter().copied()).len() == set.len()
    }

    fn gain(&self, set: &BTreeSet<usize>) -> i64 {
        set.iter().map(|at| self.sources[*at].gain).sum()
    }

    /// An upper bound on the worth of a set: its pods need new nodes at least where their sum exceeds what is free on the others.
    fn bound(&self, set: &BTreeSet<usize>) -> i64 {
        let mut missing = less([0; 2], self.free);
        for at in set {
            missing = sum(missing, sum(self.sources[*at].load(), self.own[*at]));
        }
        self.gain(set).saturating_sub(self.limits.floor.cost(missing))
    }

    /// Work of a plan besides its own pods.
    fn work_of_a_plan(&self) -> usize {
        self.limits.waiting + (self.limits.cluster / 4).min(MAX_WORK_OF_NODES) + WORK_OF_A_PLAN
    }

    fn judge(&mut self, set: &BTreeSet<usize>) -> Judgment {
        self.best.plans += 1;
        let pods: usize = set.iter().map(|at| self.sources[*at].pods).sum();
        self.work = self.work.saturating_sub(pods + self.work_of_a_plan());
        let mut judgment = (self.judge)(set);
        if let Judgment::Worth(judged) = &judgment {
            let is_unprofitable = |at: &usize| judged.bought.get(at).is_some_and(|cost| *cost > self.sources[*at].gain);
            self.unprofitable = set.iter().copied().filter(is_unprofitable).collect();
        }
        match &mut judgment {
            Judgment::Worth(judged) if judged.worth > self.best.worth => {
                (self.best.chosen, self.best.worth) = (set.clone(), judged.worth);
                self.rooms = Rooms::new(std::mem::take(&mut judged.rooms));
                self.bought = std::mem::take(&mut judged.bought);
                let cost = self.gain(set).saturating_sub(judged.worth);
                let permille = i128::from(cost) * 1_000 / i128::from(self.limits.floor.cost(judged.load_of_new).max(1));
                self.price_permille = i64::try_from(permille).unwrap_or(MAX_PRICE).clamp(1_000, MAX_PRICE);
            }
            Judgment::Stuck(stuck) if set.len() == 1 => self.best.stuck.extend(&*stuck),
            _ => {}
        }
        judgment
    }

    /// The sources that are worth their removal by the estimate; then without those whose pods need more expensive new nodes by the plan, because
    /// constraints keep them from the rooms. Returns how many are worth it by the estimate, within the limits or not.
    fn selection(&mut self) -> usize {
        let (work, mut steps) = (self.work, STEPS);
        let floor = &self.limits.floor;
        let cost = |missing: Size| floor.cost(missing).saturating_mul(SELECTION_PRICE) / 1_000;
        let sources = self.sources.iter().enumerate().map(|(at, source)| (at, &*source.sizes, source.gain));
        let selected = self.rooms.clone().select(sources, cost, &mut steps);
        let all = selected.len();
        let mut selected = self.within_limits(selected.into_iter());
        for _ in 0..SELECTIONS {
            self.unprofitable.clear();
            self.prefix(&selected);
            let size = selected.len();
            selected.retain(|at| !self.unprofitable.contains(at) && !self.suspects.contains(at));
            if selected.len() == size {
                break;
            }
        }
        self.work = work;
        all
    }

    /// The worth of the first sources of an order, without those whose pods have no place.
    fn prefix(&mut self, order: &[usize]) -> Option<i64> {
        let mut set: BTreeSet<usize> = order.iter().copied().collect();
        for _ in 0..REPAIRS {
            if set.is_empty() || self.bound(&set) <= self.best.worth {
                return None;
            }
            match self.judge(&set) {
                Judgment::Worth(judged) => return Some(judged.worth),
                Judgment::Stuck(stuck) => {
                    set.retain(|at| !stuck.contains(at));
                    self.suspects.extend(stuck);
                }
                Judgment::Unknown => return None,
            }
        }
        None
    }

    /// Halves the prefix of this size, or doubles it while that is better, then tries some between the best and its neighbors.
    fn best_prefix(&mut self, first: usize) {
        let possible = (0..self.sources.len()).filter(|at| !self.best.stuck.contains(at));
        let order = self.within_limits(possible);
        let work = self.work;
        let mut tried = vec![(0, 0)];
        let mut largest = first.min(order.len());
        tried.extend(self.prefix(&order[..largest]).map(|worth| (largest, worth)));
        let of_first = self.best.worth;
        let mut count = largest / 2;
        while count > 0 {
            tried.extend(self.prefix(&order[..count]).map(|worth| (count, worth)));
            count /= 2;
        }
        let mut is_larger_better = self.best.worth == of_first;
        while is_larger_better && largest < order.len() {
            largest = (2 * largest).min(order.len());
            let smaller = self.best.worth;
            tried.extend(self.prefix(&order[..largest]).map(|worth| (largest, worth)));
            is_larger_better = self.best.worth > smaller || smaller == 0;
        }
        tried.sort_unstable();
        for _ in 0..REFINEMENTS {
            let Some((best, _)) = tried.iter().enumerate().max_by_key(|(_, (_, worth))| *worth) else { break };
            let here = tried[best].0;
            let below = best.checked_sub(1).map_or(here, |below| tried[below].0);
            let above = tried.get(best + 1).map_or(largest, |above| above.0);
            let gaps = [(below, here), (here, above)];
            let Some((low, high)) = gaps.into_iter().max_by_key(|(low, high)| high - low).filter(|(l, h)| h - l > 1)
            else {
                break;
            };
            let middle = usize::midpoint(low, high);
            let worth = self.prefix(&order[..middle]).unwrap_or(i64::MIN);
            tried.insert(tried.partition_point(|(count, _)| *count < middle), (middle, worth));
        }
        self.work = work;
    }

    /// Tries sources alone whose pods had no place in a larger set: there may be room for those of some.
    /// Returns whether some have no place.
    fn confirm(&mut self) -> bool {
        let stuck = self.best.stuck.len();
        for at in std::mem::take(&mut self.suspects).into_iter().take(CONFIRM) {
            if self.work > 0 && !self.best.stuck.contains(&at) {
                self.judge(&[at].into());
            }
        }
        self.best.stuck.len() > stuck
    }

    /// What new nodes cost for the pods of a source that have no room after the removal of the best set, at the prices of the new nodes of that set, if
    /// in addition there is `kept`. `None` where there are too few steps.
    fn cost(&mut self, at: usize, kept: Size, steps: &mut usize) -> Option<i64> {
        let missing = self.rooms.missing(at, &self.sources[at].sizes, steps)?;
        let least = self.limits.floor.cost(less(missing, kept));
        Some(least.saturating_mul(self.price_permille) / 1_000)
    }

    /// Tries a change of the best set.
    fn change(&mut self, mut set: BTreeSet<usize>) {
        set.retain(|at| !self.best.stuck.contains(at));
        let may_be_better = self.gain(&set) > self.best.worth && self.bound(&set) > self.best.worth;
        if self.work > 0 && !set.is_empty() && may_be_better && self.is_within_limits(&set) {
            self.judge(&set);
        }
    }

    /// What new nodes for the pods of a chosen source cost, more than the removal of its node gains.
    fn loss(&self, at: usize) -> i64 {
        self.bought.get(&at).copied().unwrap_or_default() - self.sources[at].gain
    }

    /// Keeps nodes of the best set, those of most loss first; not those whose pods hardly need new nodes.
    fn give_back(&mut self) {
        let mut order: Vec<usize> = self.best.chosen.iter().copied().collect();
        order.retain(|at| 2 * self.loss(*at) >= -self.sources[*at].gain);
        order.sort_by_key(|at| Reverse((self.loss(*at), *at)));
        for at in order.into_iter().take(GIVE_BACK) {
            self.change(without(&self.best.chosen, at));
        }
    }

    /// The sources that are added by themselves, and whether they count as tried: all, or else those of most worth and some in turns, alternating so
    /// that little work, too, gets around. By the estimate; those that are worthless follow in their turn without a plan.
    fn others(&mut self) -> Vec<(usize, bool)> {
        let order: Vec<usize> = (0..self.sources.len()).filter(|at| !self.best.stuck.contains(at)).collect();
        let mut steps = STEPS;
        let mut promising = Vec::new();
        for at in &order {
            let (gain, cost) = (self.sources[*at].gain, self.cost(*at, [0; 2], &mut steps));
            match cost.filter(|cost| gain <= *cost && !self.best.chosen.contains(at)) {
                Some(cost) => drop(self.best.worthless.insert(*at, cost)),
                // Those that are not estimated come last.
                None => promising.push((Reverse(cost.map_or(0, |cost| gain - cost)), *at)),
            }
        }
        let pods: usize = promising.iter().map(|(_, at)| self.sources[*at].pods).sum();
        if promising.len() <= ADD && pods + promising.len() * self.work_of_a_plan() <= self.work {
            return order.into_iter().map(|at| (at, true)).collect();
        }
        promising.sort_unstable();
        let key = |at: &usize| (self.sources[*at].claim <= self.best.cursor, &self.sources[*at].claim);
        let mut in_turns = order;
        in_turns.sort_by(|a, b| key(a).cmp(&key(b)));
        let is_promising = |at: &usize| !self.best.worthless.contains_key(at);
        let last = in_turns.iter().enumerate().filter(|(_, at)| is_promising(at)).nth(IN_TURNS).map(|(last, _)| last);
        in_turns.truncate(last.unwrap_or(in_turns.len()));
        let turn: BTreeSet<usize> = in_turns.iter().copied().collect();
        let mut first = promising.iter().map(|(_, at)| *at).filter(|at| !turn.contains(at)).take(ADD - IN_TURNS);
        let mut out = Vec::new();
        for at in &in_turns {
            out.push((*at, true));
            if is_promising(at) {
                out.extend(first.next().map(|at| (at, false)));
            }
        }
        out.extend(first.map(|at| (at, false)));
        out
    }

    fn add(&mut self, others: &[(usize, bool)]) {
        let (mut tried, mut steps) = (0, STEPS);
        for (at, counts) in others {
            if *counts && self.work > 0 {
                self.best.cursor.clone_from(&self.sources[*at].claim);
                tried += 1;
            }
            let gain = self.sources[*at].gain;
            if !self.best.chosen.contains(at) && self.cost(*at, [0; 2], &mut steps).is_none_or(|cost| gain > cost) {
                self.change(with(&self.best.chosen, *at));
            }
        }
        self.best.tried = self.best.tried.max(tried);
    }

    fn exchange(&mut self) {
        let (worth, mut steps) = (self.best.worth, STEPS);
        let chosen: Vec<usize> = self.best.chosen.iter().rev().copied().collect();
        let kept = self.kept();
        let pairs = chosen.iter().flat_map(|out| kept.iter().map(move |into| (*out, *into)));
        for (out, into) in pairs.take(EXCHANGE) {
            // As if the pods of a node that is kept left no gap elsewhere that is too small.
            let cost = self.cost(into, sum(self.sources[out].load(), self.own[out]), &mut steps);
            if cost.is_none_or(|cost| self.sources[into].gain - cost + self.loss(out) > 0) {
                self.change(with(&without(&self.best.chosen, out), into));
            }
            if self.best.worth > worth {
                return;
            }
        }
    }

    /// Tries each set of `set` and some of the sources from `next` on. Where pods have no place, they have none in a larger set.
    fn branch(&mut self, set: &BTreeSet<usize>, next: usize, crowded: &mut Vec<BTreeSet<usize>>) {
        let rest: i64 = self.sources[next..].iter().map(|source| source.gain.max(0)).sum();
        if next == self.sources.len() || self.work == 0 || self.gain(set) + rest <= self.best.worth {
            return;
        }
        let larger = with(set, next);
        let is_possible = !self.best.stuck.contains(&next)
            && self.is_within_limits(&larger)
            && !crowded.iter().any(|crowded| crowded.is_subset(&larger));
        if is_possible {
            if matches!(self.judge(&larger), Judgment::Stuck(_)) {
                crowded.push(larger);
            } else {
                self.branch(&larger, next + 1, crowded);
            }
        }
        self.branch(set, next + 1, crowded);
    }

    fn kept(&self) -> Vec<usize> {
        let is_kept = |at: &usize| !self.best.chosen.contains(at) && !self.best.stuck.contains(at);
        (0..self.sources.len()).filter(is_kept).collect()
    }
}

fn with(set: &BTreeSet<usize>, at: usize) -> BTreeSet<usize> {
    let mut set = set.clone();
    set.insert(at);
    set
}

fn without(set: &BTreeSet<usize>, at: usize) -> BTreeSet<usize> {
    let mut set = set.clone();
    set.remove(&at);
    set
}

#[cfg(test)]
mod tests;
