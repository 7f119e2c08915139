//! The search for the nodes to remove: the best prefix of the order, then single changes of it. A plan judges each set, because nodes that are
//! removed together share the room and the new nodes that their pods need.

use std::collections::{BTreeMap, BTreeSet};

use crate::decisions::disruption::consolidation::market_value::Floor;
use crate::decisions::disruption::consolidation::order::Source;

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
/// Work for changes of the best set: pods that are planned, and those that take as long as the rest of a plan.
const WORK: usize = 20_000;
const WORK_OF_A_PLAN: usize = 100;

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
    /// What is free on all nodes where pods may go, sources included: millicores and bytes of memory.
    pub free: [i64; 2],
    /// What new nodes cost at least.
    pub floor: Floor,
}

/// What a plan says about the removal of a set of sources.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Judgment {
    /// What the removal is worth, micro-USD per hour: at most the sum of the gains.
    Worth(i64),
    /// The pods of these have no place.
    Stuck(BTreeSet<usize>),
    /// The planner failed.
    Unknown,
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
}

/// Searches among sources that are in order.
pub fn search(
    sources: &[Source],
    limits: &Limits,
    cursor: &str,
    judge: impl FnMut(&BTreeSet<usize>) -> Judgment,
) -> Choice {
    let best = Choice { cursor: cursor.to_owned(), ..Choice::default() };
    let mut search = Search { sources, limits, judge, best, suspects: BTreeSet::new(), work: WORK };
    for _ in 0..CONFIRMATIONS {
        search.best_prefix();
        if !search.confirm() {
            break;
        }
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
    judge: F,
    best: Choice,
    /// Sources whose pods had no place in some set.
    suspects: BTreeSet<usize>,
    /// The remaining part of [`WORK`].
    work: usize,
}

impl<F: FnMut(&BTreeSet<usize>) -> Judgment> Search<'_, F> {
    /// The sources that the limits admit together, in order: one that exceeds them is skipped.
    fn within_limits(&self, order: impl Iterator<Item = usize>) -> Vec<usize> {
        let mut left = self.limits.clone();
        let mut out = Vec::new();
        for at in order {
            let source = &self.sources[at];
            let Some(of_pool) = left.of_pools.get_mut(&source.pool).filter(|nodes| **nodes > 0) else { continue };
            let fits = out.is_empty() || source.pods <= left.pods;
            if left.nodes > 0 && fits {
                *of_pool -= 1;
                left.nodes -= 1;
                left.pods = left.pods.saturating_sub(source.pods);
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
        let mut missing = [0, 1].map(|resource| -self.limits.free[resource]);
        for source in set.iter().map(|at| &self.sources[*at]) {
            for (missing, (load, free)) in missing.iter_mut().zip(source.load.iter().zip(source.free)) {
                *missing += load + free;
            }
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
        let judgment = (self.judge)(set);
        match &judgment {
            Judgment::Worth(worth) if *worth > self.best.worth => {
                (self.best.chosen, self.best.worth) = (set.clone(), *worth);
            }
            Judgment::Stuck(stuck) if set.len() == 1 => self.best.stuck.extend(stuck),
            _ => {}
        }
        judgment
    }

    /// The worth of the first sources of an order, without those whose pods have no place.
    fn prefix(&mut self, order: &[usize]) -> Option<i64> {
        let mut set: BTreeSet<usize> = order.iter().copied().collect();
        for _ in 0..REPAIRS {
            if set.is_empty() || self.bound(&set) <= self.best.worth {
                return None;
            }
            match self.judge(&set) {
                Judgment::Worth(worth) => return Some(worth),
                Judgment::Stuck(stuck) => {
                    set.retain(|at| !stuck.contains(at));
                    self.suspects.extend(stuck);
                }
                Judgment::Unknown => return None,
            }
        }
        None
    }

    /// Halves the prefix, then tries some between the best and its neighbors.
    fn best_prefix(&mut self) {
        let possible = (0..self.sources.len()).filter(|at| !self.best.stuck.contains(at));
        let order = self.within_limits(possible);
        let work = self.work;
        let mut tried = vec![(0, 0)];
        let mut count = order.len();
        while count > 0 {
            tried.extend(self.prefix(&order[..count]).map(|worth| (count, worth)));
            count /= 2;
        }
        tried.sort_unstable();
        for _ in 0..REFINEMENTS {
            let Some((best, _)) = tried.iter().enumerate().max_by_key(|(_, (_, worth))| *worth) else { break };
            let here = tried[best].0;
            let below = best.checked_sub(1).map_or(here, |below| tried[below].0);
            let above = tried.get(best + 1).map_or(order.len(), |above| above.0);
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

    /// Tries a change of the best set.
    fn change(&mut self, mut set: BTreeSet<usize>) {
        set.retain(|at| !self.best.stuck.contains(at));
        if self.work > 0 && !set.is_empty() && self.gain(&set) > self.best.worth && self.is_within_limits(&set) {
            self.judge(&set);
        }
    }

    /// Keeps nodes of the best set, those of least gain first.
    fn give_back(&mut self) {
        let mut order: Vec<usize> = self.best.chosen.iter().copied().collect();
        order.sort_by_key(|at| (self.sources[*at].gain, std::cmp::Reverse(*at)));
        for at in order.into_iter().take(GIVE_BACK) {
            self.change(without(&self.best.chosen, at));
        }
    }

    /// The sources that are added by themselves, and whether they count as tried: all, or else the first ones and some in turns, alternating so
    /// that little work, too, gets around.
    fn others(&self) -> Vec<(usize, bool)> {
        let order: Vec<usize> = (0..self.sources.len()).filter(|at| !self.best.stuck.contains(at)).collect();
        let pods: usize = order.iter().map(|at| self.sources[*at].pods).sum();
        if order.len() <= ADD && pods + order.len() * self.work_of_a_plan() <= self.work {
            return order.into_iter().map(|at| (at, true)).collect();
        }
        let key = |at: &usize| (self.sources[*at].claim <= self.best.cursor, &self.sources[*at].claim);
        let mut in_turns = order.clone();
        in_turns.sort_by(|a, b| key(a).cmp(&key(b)));
        in_turns.truncate(IN_TURNS);
        let mut first = order.into_iter().filter(|at| !in_turns.contains(at)).take(ADD - IN_TURNS);
        in_turns.iter().flat_map(|at| [Some((*at, true)), first.next().map(|at| (at, false))]).flatten().collect()
    }

    fn add(&mut self, others: &[(usize, bool)]) {
        let mut tried = 0;
        for (at, counts) in others {
            if *counts && self.work > 0 {
                self.best.cursor.clone_from(&self.sources[*at].claim);
                tried += 1;
            }
            if !self.best.chosen.contains(at) {
                self.change(with(&self.best.chosen, *at));
            }
        }
        self.best.tried = self.best.tried.max(tried);
    }

    fn exchange(&mut self) {
        let worth = self.best.worth;
        let chosen: Vec<usize> = self.best.chosen.iter().rev().copied().collect();
        let kept = self.kept();
        let pairs = chosen.iter().flat_map(|out| kept.iter().map(move |into| (*out, *into)));
        for (out, into) in pairs.take(EXCHANGE) {
            self.change(with(&without(&self.best.chosen, out), into));
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
