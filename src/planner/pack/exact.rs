//! The least that a few pods can cost: every way of dividing them among nodes is tried. Most plans of a cluster at rest are for a
//! few pods, and there one node too large is much of the whole.
//!
//! Pods of one item are alike, so a load of a node is how many it has of each; the best division of a load is the best of
//! one node for a part of it and the best division of the rest.

use crate::planner::columns::dims::fits;
use crate::planner::pack::strategy::Round;
use crate::planner::state::budget::Budget;
use crate::planner::state::demand::{Bin, Content};
use crate::planner::state::plan_state::{PlanState, PurchasedNode};

/// Most loads that are looked at.
const MOST_LOADS: usize = 1_024;
/// Most pairs of a load and a part of it that are compared.
const MOST_PAIRS: usize = 60_000;

/// The best division of a load: what it costs, on how many nodes, and the load of one of them.
#[derive(Clone, Copy)]
struct Division {
    cost: i64,
    nodes: usize,
    part: usize,
}

/// Loads as numbers: the digits are how many pods of each item there are.
struct Loads {
    /// Items and how many pods of each there are in all.
    items: Content,
    /// What one pod of each item adds to the number of a load.
    unit: Vec<usize>,
}

impl Loads {
    /// `None` when there are too many to look at.
    fn of(items: Content) -> Option<Self> {
        let (mut loads, mut pairs) = (1_usize, 1_usize);
        let mut unit = Vec::with_capacity(items.len());
        for (_, count) in &items {
            unit.push(loads);
            loads = loads.checked_mul(count + 1).filter(|loads| *loads <= MOST_LOADS)?;
            pairs = pairs.checked_mul((count + 1) * (count + 2) / 2).filter(|pairs| *pairs <= MOST_PAIRS)?;
        }
        Some(Self { items, unit })
    }

    /// The load of all pods.
    fn all(&self) -> usize {
        self.items.iter().zip(&self.unit).map(|((_, count), unit)| count * unit).sum()
    }

    fn digits(&self, load: usize) -> Vec<usize> {
        self.items.iter().zip(&self.unit).map(|((_, count), unit)| load / unit % (count + 1)).collect()
    }

    fn content(&self, load: usize) -> Content {
        let counts = self.items.iter().zip(self.digits(load));
        counts.filter(|(_, count)| *count > 0).map(|((item, _), count)| (*item, count)).collect()
    }

    /// The parts of a load that have a pod of its last item, largest first: of every division one node has one.
    fn parts(&self, load: usize) -> Vec<usize> {
        let digits = self.digits(load);
        let last = digits.iter().rposition(|digit| *digit > 0);
        let mut parts = vec![0];
        for (at, (digit, unit)) in digits.iter().zip(&self.unit).enumerate().rev() {
            let least = usize::from(Some(at) == last);
            parts = parts.into_iter().flat_map(|part| (least..=*digit).rev().map(move |n| part + n * unit)).collect();
        }
        parts
    }
}

impl PlanState<'_, '_, '_> {
    /// The cheapest nodes for all that is left, and what their NodePools may still buy then. `None` when that is too much to
    /// try every strategy, when pods must follow others, or when limits forbid the result.
    pub fn buy_exactly(&mut self, round: &Round) -> Option<(Vec<PurchasedNode>, Vec<Budget>)> {
        if !self.demand.wanting().is_empty() {
            return None;
        }
        let hopeless = self.hopeless(round);
        let left = self.demand.items.iter().enumerate().map(|(at, item)| (at, item.left)).filter(|(_, left)| *left > 0);
        let served = |at: usize| round.column_set(self.demand.items[at].place).is_some();
        let items: Content = left.filter(|item| served(item.0) && !hopeless.contains(item)).collect();
        let loads = Loads::of(items)?;
        let mut single: Vec<Option<usize>> = vec![None];
        let mut best: Vec<Option<Division>> = vec![Some(Division { cost: 0, nodes: 0, part: 0 })];
        for load in 1..=loads.all() {
            single.push(self.cheapest_for(round, &loads.content(load)));
            let mut found: Option<Division> = None;
            for part in loads.parts(load) {
                let (Some(column), Some(rest)) = (single[part], best[load - part]) else { continue };
                let division = Division {
                    cost: self.column_sets.columns[column].price.saturating_add(rest.cost),
                    nodes: rest.nodes + 1,
                    part,
                };
                if found.is_none_or(|have| (division.cost, division.nodes) < (have.cost, have.nodes)) {
                    found = Some(division);
                }
            }
            best.push(found);
        }
        let mut budgets = self.budgets.clone();
        let mut bought = Vec::new();
        let mut load = loads.all();
        while load > 0 {
            let part = best[load]?.part;
            let column = single[part]?;
            let (capacity, pool) = (&self.column_sets.instance_type(column).capacity, self.column_sets.pool(column));
            if budgets[pool].copies(capacity, 1) == 0 {
                return None;
            }
            budgets[pool].spend(capacity, 1);
            bought.push(PurchasedNode { column, content: loads.content(part) });
            load -= part;
        }
        Some((bought, budgets))
    }

    /// The cheapest column that one node with this content may be.
    fn cheapest_for(&mut self, round: &Round, content: &[(usize, usize)]) -> Option<usize> {
        let load = self.load(content);
        let mut bits = None;
        for (item, _) in content {
            let own = &self.column_sets.sets[round.column_set(self.demand.items[*item].place)?].bits;
            bits.get_or_insert_with(|| own.clone()).and(own);
        }
        let bits = bits?;
        let (mut tried, mut allowed) = (None, false);
        let first = self.column_sets.by_price.len() - self.column_sets.by_price_for(&load).len();
        for at in first..self.column_sets.by_price.len() {
            let column = self.column_sets.by_price[at];
            let budget = &self.budgets[self.column_sets.pool(column)];
            if !bits.contains(column)
                || !fits(&load, self.column_sets.room(column))
                || (budget.is_limited() && !budget.allows(&self.column_sets.instance_type(column).capacity))
            {
                continue;
            }
            let daemons = self.column_sets.daemon_set(column);
            if tried != Some(daemons) {
                let host = self.daemon_host(column).clone();
                allowed = self.demand.host_starts(&Bin { room: self.column_sets.room(column), host: &host, content });
                tried = Some(daemons);
            }
            if allowed && self.min_values_hold(column, content) {
                return Some(column);
            }
        }
        None
    }
}
