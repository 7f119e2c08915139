//! Bettering what was bought.

use std::collections::BTreeSet;

use crate::planner::columns::dims::{float, real};
use crate::planner::pack::strategy::Round;
use crate::planner::state::demand::Bin;
use crate::planner::state::plan_state::{PATIENCE, PlanState, PurchasedNode, STRATEGIES};

/// Percent of the nodes that one attempt gives back.
const SHARES: [usize; 5] = [12, 25, 45, 6, 18];
/// Attempts in a row that may save nothing.
const MOST_FAILURES: usize = 16;
/// Buckets that may be compared for a plan in all, bettering included, however small it is.
const LEAST_WORK: usize = 2_000_000;
/// Buckets that may be compared beyond that in bettering a plan: half as many as were for making it, and no more than these.
const MOST_WORK: usize = 1_000_000;
/// A plan that costs less than so many times what its pods are worth at the first prices is looked at no further than by its waste.
const NEAR: f64 = 1.02;
/// What a node that wastes nothing weighs when nodes are drawn, as a share of its price.
const LEAST_WEIGHT: f64 = 0.02;
/// Share of its worth at which what is placed anew is priced again.
const PATIENCE_AGAIN: f64 = 0.5;

impl PlanState<'_, '_, '_> {
    /// Fills what is free on bought nodes.
    pub fn top_up(&mut self, active: &dyn Fn(usize) -> bool) {
        for at in 0..self.bought.len() {
            let node = self.bought[at].clone();
            let accepts: Vec<bool> = (0..self.demand.places.len())
                .map(|place| {
                    active(place)
                        && self.demand.places[place]
                            .levels
                            .iter()
                            .any(|id| self.column_sets.sets[*id].bits.contains(node.column))
                })
                .collect();
            let buckets = self.demand.open_buckets(|place| accepts[place]);
            if buckets.is_empty() {
                continue;
            }
            let host = self.daemon_host(node.column).clone();
            let bin = Bin { room: self.column_sets.room(node.column), host: &host, content: &node.content };
            let more = self.demand.fill(&bin, &self.reference, &buckets, None, &[], 0);
            if more.is_empty() {
                continue;
            }
            let mut content = node.content.clone();
            for (item, count) in &more {
                match content.iter_mut().find(|(have, _)| have == item) {
                    Some((_, have)) => *have += count,
                    None => content.push((*item, *count)),
                }
            }
            if self.min_values_still_hold(node.column, &content) {
                self.demand.take(&more, 1);
                self.bought[at].content = content;
            }
        }
    }

    /// Makes what was bought cheaper: the nodes that waste most are given back and their pods placed anew, first in what is
    /// free on the others. Kept only where it costs less. Ends near the bound, or with its share of work.
    pub fn improve(&mut self, round: &mut Round) {
        if self.bought.is_empty() || self.first_prices.is_empty() {
            return;
        }
        self.patience = PATIENCE_AGAIN;
        let limit = (self.demand.work + (self.demand.work / 2).min(MOST_WORK)).max(LEAST_WORK);
        self.right_size();
        let mut failures = 0;
        let mut share = 0;
        let mut random = fastrand::Rng::with_seed(1);
        while failures < MOST_FAILURES && self.demand.work < limit {
            // Where giving back those that waste most has not helped, chance may; of large plans it needs more tries than there is time for.
            let by_chance = failures > SHARES.len();
            if by_chance && (self.demand.work > LEAST_WORK || self.is_near()) {
                break;
            }
            let gone = self.wasteful(round, SHARES[share % SHARES.len()], by_chance.then_some(&mut random));
            if self.repack(round, &gone) {
                failures = 0;
            } else {
                failures += 1;
                share += 1;
                self.strategy.power = STRATEGIES[share % 2].power;
            }
        }
        self.patience = PATIENCE;
    }

    fn cost(&self) -> i64 {
        self.bought.iter().map(|node| self.column_sets.columns[node.column].price).sum()
    }

    /// What the pods of a node are worth at the first prices.
    fn worth_on(&self, node: &PurchasedNode) -> f64 {
        let worth = |(item, count): &(usize, usize)| {
            self.demand.worth_at(*item, &self.first_prices[self.demand.items[*item].place]) * float(*count)
        };
        node.content.iter().map(worth).sum()
    }

    /// Whether the plan can't become much cheaper.
    fn is_near(&self) -> bool {
        let worth: f64 = self.bought.iter().map(|node| self.worth_on(node)).sum();
        real(self.cost()) < worth * NEAR
    }

    /// The `share` percent of the nodes that waste most of their price; by `chance`, any node may be among them, those that waste
    /// more sooner.
    fn wasteful(&self, round: &Round, share: usize, mut chance: Option<&mut fastrand::Rng>) -> BTreeSet<usize> {
        let mut waste = Vec::new();
        for (at, node) in self.bought.iter().enumerate() {
            if node.content.iter().all(|(item, _)| self.may_move(round, *item)) {
                let price = real(self.column_sets.columns[node.column].price);
                let wasted = (price - self.worth_on(node)) / price.max(1.0);
                let weight = chance.as_mut().map_or(wasted, |random| (wasted + LEAST_WEIGHT) * random.f64());
                waste.push((weight, at));
            }
        }
        waste.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        waste.truncate((self.bought.len() * share / 100).max(4));
        waste.into_iter().map(|(_, at)| at).collect()
    }

    /// One attempt without the nodes that are to be `gone`; false when it saved nothing.
    fn repack(&mut self, round: &mut Round, gone: &BTreeSet<usize>) -> bool {
        if gone.is_empty() {
            return false;
        }
        let before = self.bought.clone();
        let budgets = self.budgets.clone();
        let cost = self.cost();
        let unplaced: usize = self.demand.items.iter().map(|item| item.left).sum();
        let mut kept = Vec::with_capacity(before.len());
        for (at, node) in before.iter().enumerate() {
            if gone.contains(&at) {
                self.demand.give_back(&node.content);
                let pool = self.column_sets.pool(node.column);
                self.budgets[pool].refund(&self.column_sets.instance_type(node.column).capacity);
            } else {
                kept.push(node.clone());
            }
        }
        self.bought = kept;
        round.dead.fill(false);
        let served: Vec<bool> = (0..self.demand.places.len()).map(|place| round.column_set(place).is_some()).collect();
        self.top_up(&|place| served[place]);
        let from = self.bought.len();
        self.buy(round);
        self.right_size_from(from);
        let left: usize = self.demand.items.iter().map(|item| item.left).sum();
        if left <= unplaced && self.cost() < cost {
            return true;
        }
        for node in std::mem::replace(&mut self.bought, before) {
            self.demand.give_back(&node.content);
        }
        for at in 0..self.bought.len() {
            let content = self.bought[at].content.clone();
            self.demand.take(&content, 1);
        }
        self.budgets = budgets;
        false
    }

    /// Pods that lead or follow others on one host stay where they are, as do those the round doesn't serve.
    fn may_move(&self, round: &Round, item: usize) -> bool {
        let rules = self.demand.host(item);
        round.has(self.demand.items[item].place)
            && rules.wants.is_empty()
            && self
                .demand
                .wanting()
                .iter()
                .all(|other| self.demand.host(*other).wants.iter().all(|(counter, _)| !rules.raises.contains(counter)))
    }

    /// Buys for pods that must share a node with others: a node for each leader they can follow, or one node for all of a
    /// group that only its own pods can lead.
    pub fn company(&mut self, round: &mut Round) {
        for item in self.demand.wanting() {
            while self.demand.items[item].left > 0 {
                let rules = self.demand.host(item);
                let led_by_itself = rules.wants.iter().all(|(_, own)| *own);
                let leader = (0..self.demand.items.len()).find(|other| {
                    let other_rules = self.demand.host(*other);
                    *other != item
                        && self.demand.items[*other].left > 0
                        && other_rules.wants.is_empty()
                        && rules.wants.iter().all(|(counter, _)| other_rules.raises.contains(counter))
                });
                let start = match leader {
                    Some(leader) => vec![(leader, 1)],
                    // A group of its own may start once, where nothing it could follow runs or is planned.
                    None if led_by_itself && !self.has_company(item) => vec![(item, 1)],
                    None => break,
                };
                if !self.buy_company(round, item, &start) {
                    break;
                }
            }
        }
    }

    /// Whether a pod that this item must follow runs or is planned already.
    fn has_company(&self, item: usize) -> bool {
        let wants = &self.demand.host(item).wants;
        let raised = |counter: u32| {
            self.running_counters.contains(&counter)
                || self
                    .bought
                    .iter()
                    .flat_map(|node| &node.content)
                    .any(|(i, _)| self.demand.host(*i).raises.contains(&counter))
        };
        wants.iter().any(|(counter, _)| raised(*counter))
    }

    /// Buys the cheapest node that holds `start` and all its followers, or else the one that holds most of them.
    fn buy_company(&mut self, round: &Round, item: usize, start: &[(usize, usize)]) -> bool {
        let place = |i: usize| self.demand.items[i].place;
        let (Some(own), Some(first)) = (round.column_set(place(item)), round.column_set(place(start[0].0))) else {
            return false;
        };
        let mut bits = self.column_sets.sets[own].bits.clone();
        bits.and(&self.column_sets.sets[first].bits);
        let mut best: Option<(usize, std::cmp::Reverse<i64>, usize, crate::planner::state::demand::Content)> = None;
        let mut seen: Option<usize> = None;
        for column in bits.iter() {
            let shape = self.column_sets.columns[column].shape;
            if seen == Some(shape)
                || !self.budgets[self.column_sets.pool(column)].allows(&self.column_sets.instance_type(column).capacity)
            {
                continue;
            }
            seen = Some(shape);
            let host = self.daemon_host(column).clone();
            let bin = Bin { room: self.column_sets.room(column), host: &host, content: start };
            if !self.demand.host_starts(&bin) {
                continue;
            }
            let buckets = self.demand.open_buckets(|p| {
                round.column_set(p).is_some_and(|id| self.column_sets.sets[id].bits.contains(column))
            });
            let more = self.demand.follow(&bin, &buckets);
            let followers: usize = more.iter().map(|(_, count)| *count).sum();
            let price = std::cmp::Reverse(self.column_sets.columns[column].price);
            if best.as_ref().is_none_or(|(have, cost, ..)| (followers, price) > (*have, *cost)) {
                best = Some((followers, price, column, more));
            }
        }
        let Some((followers, _, column, more)) = best else {
            return false;
        };
        if followers == 0 && start[0].0 != item {
            return false;
        }
        let mut content = start.to_vec();
        for (item, count) in more {
            match content.iter_mut().find(|(have, _)| *have == item) {
                Some((_, have)) => *have += count,
                None => content.push((item, count)),
            }
        }
        self.budgets[self.column_sets.pool(column)].spend(&self.column_sets.instance_type(column).capacity.clone(), 1);
        self.demand.take(&content, 1);
        self.bought.push(PurchasedNode { column, content });
        true
    }
}
