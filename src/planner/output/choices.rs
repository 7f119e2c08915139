//! From bought bins to planned nodes: the cheapest column that holds a bin's pods, and every other one that does too.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use crate::api::Requirement;
use crate::model::offering::{InstanceType, MicroUsd};
use crate::model::resources::Resources;
use crate::planner::columns::bitset::Bits;
use crate::planner::columns::dims::fits;
use crate::planner::columns::sets::ColumnSets;
use crate::planner::input::settings::MinValuesPolicy;
use crate::planner::output::plan::{Choice, PlannedNode};
use crate::planner::output::product::{CHOSEN_AT_LAUNCH, Order, nameable};
use crate::planner::state::budget::Budget;
use crate::planner::state::plan_state::{PlanState, PurchasedNode};

/// Most instance types among a node's choices (Karpenter AWS reference 5.2).
pub(crate) const MAX_TYPES: usize = 60;

/// What nodes with the same choices have in common.
struct Common {
    choices: Arc<[Choice]>,
    /// The most of each resource that one of them has.
    most: Resources,
    narrowed: Vec<Requirement>,
    /// What daemons ask for on whichever is launched (core reference 3.10).
    daemons: Vec<i64>,
}

impl PlanState<'_, '_, '_> {
    /// Columns that every pod of a content may use, by the preference level that the content was bought at or better.
    pub fn common(&self, column: usize, content: &[(usize, usize)]) -> Bits {
        let mut bits = Bits::full(self.column_sets.columns.len());
        let mut seen: Vec<usize> = Vec::new();
        for (item, _) in content {
            let place = &self.demand.places[self.demand.items[*item].place];
            let level = place
                .levels
                .iter()
                .copied()
                .find(|id| self.column_sets.sets[*id].bits.contains(column))
                .or_else(|| place.levels.last().copied());
            if let Some(id) = level
                && !seen.contains(&id)
            {
                seen.push(id);
                bits.and(&self.column_sets.sets[id].bits);
            }
        }
        bits
    }

    /// Sum of a content's requests.
    pub fn load(&self, content: &[(usize, usize)]) -> Vec<i64> {
        let mut sum = vec![0; self.column_sets.dims.len()];
        for (item, count) in content {
            let count = i64::try_from(*count).unwrap_or(i64::MAX);
            for (total, need) in sum.iter_mut().zip(self.demand.need(*item)) {
                *total += need * count;
            }
        }
        sum
    }

    /// Columns that hold a content in place of `column`: same pool and pinned labels, cheapest first.
    pub fn alternatives(&self, column: usize, content: &[(usize, usize)]) -> impl Iterator<Item = usize> {
        let load = self.load(content);
        let common = self.common(column, content);
        let mut last: Option<(usize, bool)> = None;
        self.column_sets.by_price_for(&load).iter().copied().filter(move |c| {
            // Offerings of a shape stand side by side where they cost the same, and have the same room but for daemons.
            let shape = self.column_sets.columns[*c].shape;
            if last.is_none_or(|(of, _)| of != shape) {
                let mut offerings = self.column_sets.shapes[shape].first..self.column_sets.shapes[shape].end;
                last = Some((shape, offerings.any(|c| fits(&load, self.column_sets.room(c)))));
            }
            last.is_some_and(|(_, holds)| holds) && self.holds(*c, &load, &common, column)
        })
    }

    /// Whether a column holds a load of pods that may use the columns `common`, in place of another.
    fn holds(&self, other: usize, load: &[i64], common: &Bits, column: usize) -> bool {
        common.contains(other) && fits(load, self.column_sets.room(other)) && self.stands_in(other, column)
    }

    /// Moves each bought bin to the cheapest column that holds it and stays within its pool's limits.
    pub fn right_size(&mut self) {
        self.right_size_from(0);
    }

    /// As [`PlanState::right_size`], for the bins bought from `first` on.
    pub fn right_size_from(&mut self, first: usize) {
        // Copies come one after another, and are the same to a pool without limits.
        let mut last: Option<(PurchasedNode, usize)> = None;
        for at in first..self.bought.len() {
            if let Some((before, column)) = last.as_ref().filter(|(before, _)| *before == self.bought[at]) {
                let pool = self.column_sets.pool(before.column);
                if !self.budgets[pool].is_limited() {
                    self.bought[at].column = *column;
                    continue;
                }
            }
            let before = self.bought[at].clone();
            let (column, content) = (before.column, &before.content);
            let pool = self.column_sets.pool(column);
            self.budgets[pool].refund(&self.column_sets.instance_type(column).capacity);
            let cheaper = self.cheaper(column, content).unwrap_or(column);
            self.budgets[pool].spend(&self.column_sets.instance_type(cheaper).capacity, 1);
            self.bought[at].column = cheaper;
            last = Some((before, cheaper));
        }
    }

    /// The cheapest column that holds a content in place of `column` for less.
    fn cheaper(&self, column: usize, content: &[(usize, usize)]) -> Option<usize> {
        let load = self.load(content);
        let now = self.column_sets.columns[column].price;
        let mut common: Option<Bits> = None;
        self.column_sets
            .by_price_for(&load)
            .iter()
            .copied()
            .take_while(|c| self.column_sets.columns[*c].price < now)
            .filter(|c| fits(&load, self.column_sets.room(*c)))
            .find(|c| {
                common.get_or_insert_with(|| self.common(column, content)).contains(*c)
                    && self.stands_in(*c, column)
                    && self.budgets[self.column_sets.pool(*c)].allows(&self.column_sets.instance_type(*c).capacity)
                    && self.min_values_hold(*c, content)
            })
    }

    /// Whether a column could replace another as far as pool, pinned labels and daemons' ports go.
    fn stands_in(&self, other: usize, column: usize) -> bool {
        let host = self.daemon_host(other);
        self.column_sets.pool(other) == self.column_sets.pool(column)
            && self.column_sets.variant(other).pinned == self.column_sets.variant(column).pinned
            && ((host.counts.is_empty() && host.caps.is_empty())
                || self.column_sets.daemon_set(other) == self.column_sets.daemon_set(column))
    }

    /// Whether enough distinct values of each key with `minValues` remain among the types that hold a content, within what
    /// the limits leave.
    pub fn min_values_hold(&self, column: usize, content: &[(usize, usize)]) -> bool {
        let pool = self.column_sets.pool(column);
        if !self.minds_min_values(pool) {
            return true;
        }
        self.min_values_hold_within(&self.budgets[pool], column, content)
    }

    /// As [`Self::min_values_hold`], for a node that is bought already.
    pub fn min_values_still_hold(&self, column: usize, content: &[(usize, usize)]) -> bool {
        let pool = self.column_sets.pool(column);
        if !self.minds_min_values(pool) {
            return true;
        }
        let mut budget = self.budgets[pool].clone();
        budget.refund(&self.column_sets.instance_type(column).capacity);
        self.min_values_hold_within(&budget, column, content)
    }

    fn min_values_hold_within(&self, budget: &Budget, column: usize, content: &[(usize, usize)]) -> bool {
        let pool = self.column_sets.pool(column);
        let pays = |c: &usize| !budget.is_limited() || budget.allows(&self.column_sets.instance_type(*c).capacity);
        let others = self.alternatives(column, content).filter(|c| *c != column && pays(c));
        let columns: Vec<usize> = std::iter::once(column).chain(others).collect();
        self.keeps_min_values(pool, &self.nameable(pool, &columns))
    }

    /// Whether a pool has `minValues` that must hold.
    fn minds_min_values(&self, pool: usize) -> bool {
        self.column_sets.problem.settings.min_values_policy == MinValuesPolicy::Strict
            && self.column_sets.problem.pools[pool].requirements.iter().any(|r| r.min_values.is_some())
    }

    /// Whether columns have enough distinct values of each key with `minValues`.
    fn keeps_min_values(&self, pool: usize, columns: &[usize]) -> bool {
        self.column_sets.problem.pools[pool].requirements.iter().filter(|r| r.min_values.is_some()).all(|r| {
            let least = usize::try_from(r.min_values.unwrap_or(0)).unwrap_or(0);
            let values: BTreeSet<&str> = columns.iter().filter_map(|c| self.column_sets.label(*c, &r.key)).collect();
            values.len() >= least
        })
    }

    /// Those of a node's columns that its claim can name; where the pool has `minValues`, so that they hold if they can.
    fn nameable(&self, pool: usize, columns: &[usize]) -> Vec<usize> {
        let cheapest = nameable(self.column_sets, columns, Order::Price);
        if cheapest.len() == columns.len() || !self.minds_min_values(pool) || self.keeps_min_values(pool, &cheapest) {
            return cheapest;
        }
        let others = [Order::Types, Order::Zones].into_iter().map(|order| nameable(self.column_sets, columns, order));
        others.into_iter().find(|columns| self.keeps_min_values(pool, columns)).unwrap_or(cheapest)
    }

    /// The planned nodes, in a stable order.
    pub fn planned(&mut self, pods_of: &mut dyn FnMut(usize, usize) -> Vec<usize>) -> Vec<PlannedNode> {
        let bought = std::mem::take(&mut self.bought);
        let mut shared: HashMap<Vec<usize>, Common> = HashMap::new();
        // Nodes of one column with one load, for pods of the same places, have the same choices.
        let mut known: HashMap<(usize, Vec<i64>, Vec<usize>), Vec<usize>> = HashMap::new();
        let mut nodes: Vec<PlannedNode> = Vec::with_capacity(bought.len());
        for node in &bought {
            let pool = self.column_sets.pool(node.column);
            let limited = self.column_sets.problem.pools[pool].limits.is_some();
            // Where limits come into it, choices depend on what was planned before.
            let roomy = !limited || self.is_roomy(pool);
            let mut requests = self.load(&node.content);
            let named = |state: &Self| state.nameable(pool, &state.choices(node, roomy));
            let columns = if roomy {
                let mut places: Vec<usize> =
                    node.content.iter().map(|(item, _)| self.demand.items[*item].place).collect();
                places.sort_unstable();
                places.dedup();
                let key = (node.column, requests.clone(), places);
                known.entry(key).or_insert_with(|| named(self)).clone()
            } else {
                named(self)
            };
            if self.minds_min_values(pool) && !self.keeps_min_values(pool, &columns) {
                // The nodes before it took what the limits left of its alternatives.
                self.budgets[pool].refund(&self.column_sets.instance_type(node.column).capacity);
                self.demand.give_back(&node.content);
                continue;
            }
            if !shared.contains_key(&columns) {
                let mut most = self.column_sets.instance_type(node.column).capacity.clone();
                for column in &columns {
                    most.raise_to(&self.column_sets.instance_type(*column).capacity);
                }
                let choices = columns.iter().map(|c| self.choice(*c)).collect();
                let least = |dim: usize| columns.iter().map(|column| self.column_sets.overhead(*column)[dim]).min();
                let daemons = (0..self.column_sets.dims.len()).map(|dim| least(dim).unwrap_or(0)).collect();
                let narrowed = narrowed(self.column_sets, &columns);
                shared.insert(columns.clone(), Common { choices, most, narrowed, daemons });
            }
            let Common { choices, most, narrowed, daemons } = &shared[&columns];
            // Whatever of the choices is launched, limits hold: the largest of them is what is spent.
            if limited {
                let mut extra = most.clone();
                extra.sub(&self.column_sets.instance_type(node.column).capacity);
                self.budgets[pool].spend(&extra, 1);
                self.budgets[pool].add_node();
            }
            let mut pods: Vec<usize> = node.content.iter().flat_map(|(item, count)| pods_of(*item, *count)).collect();
            pods.sort_unstable();
            for (sum, more) in requests.iter_mut().zip(daemons) {
                *sum += more;
            }
            nodes.push(PlannedNode {
                pool,
                choices: Arc::clone(choices),
                pods,
                requests: self.column_sets.dims.sparse(&requests),
                requirements: pins(self.column_sets, node.column).into_iter().chain(narrowed.iter().cloned()).collect(),
            });
        }
        nodes
    }

    /// Whether a pool's limits leave room for the largest of anything it offers, on top of what is planned.
    fn is_roomy(&self, pool: usize) -> bool {
        self.budgets[pool].allows(&self.largest[pool])
    }

    fn choice(&self, column: usize) -> Choice {
        let instance_type = Arc::clone(self.column_sets.instance_type(column));
        let column = &self.column_sets.columns[column];
        Choice {
            instance_type,
            zone: Arc::clone(&column.zone),
            capacity_type: column.capacity_type,
            price: MicroUsd(column.paid),
        }
    }

    /// Columns that a node may be launched as: the bought one first, then the others by price, within limits and
    /// `minValues`, of at most [`MAX_TYPES`] instance types.
    fn choices(&self, node: &PurchasedNode, roomy: bool) -> Vec<usize> {
        let pool = self.column_sets.pool(node.column);
        let mut budget = self.budgets[pool].clone();
        budget.refund(&self.column_sets.instance_type(node.column).capacity);
        let pays = |c: usize| roomy || budget.allows(&self.column_sets.instance_type(c).capacity);
        let others = self.alternatives(node.column, &node.content).filter(|c| *c != node.column && pays(*c));
        // Types in order of their cheapest offering; those that minValues needs are kept before the cut.
        let type_of = |column: usize| Arc::as_ptr(self.column_sets.instance_type(column));
        let asking = |r: &&Requirement| r.min_values.is_some();
        let asked = self.column_sets.problem.pools[pool].requirements.iter().filter(asking).count();
        let mut seen = vec![type_of(node.column)];
        let (mut allowed, mut types) = (vec![node.column], vec![node.column]);
        let mut last = type_of(node.column);
        let mut others = others.peekable();
        while let Some(column) = others.next_if(|c| asked > 0 || types.len() < MAX_TYPES || seen.contains(&type_of(*c)))
        {
            if type_of(column) != last && !seen.contains(&type_of(column)) {
                seen.push(type_of(column));
                types.push(column);
            }
            last = type_of(column);
            allowed.push(column);
        }
        if asked == 0 {
            // The types are known: what is left are offerings of theirs that are dearer than the first of another type.
            if let Some(next) = others.peek().map(|column| self.column_sets.rank[*column]) {
                let shapes: BTreeSet<usize> = allowed.iter().map(|c| self.column_sets.columns[*c].shape).collect();
                let offerings = shapes
                    .into_iter()
                    .flat_map(|at| self.column_sets.shapes[at].first..self.column_sets.shapes[at].end);
                let (load, common) = (self.load(&node.content), self.common(node.column, &node.content));
                let known = allowed.len();
                allowed.extend(offerings.filter(|c| {
                    self.column_sets.rank[*c] > next
                        && *c != node.column
                        && self.holds(*c, &load, &common, node.column)
                        && pays(*c)
                }));
                allowed[known..].sort_unstable_by_key(|column| self.column_sets.rank[*column]);
            }
            return allowed;
        }
        if roomy && types.len() <= MAX_TYPES {
            return allowed;
        }
        let mut keep: HashSet<*const InstanceType> = HashSet::new();
        for r in self.column_sets.problem.pools[pool].requirements.iter().filter(asking) {
            let least = usize::try_from(r.min_values.unwrap_or(0)).unwrap_or(0);
            let mut values: BTreeSet<&str> = BTreeSet::new();
            for column in &types {
                if values.len() >= least {
                    break;
                }
                if let Some(value) = self.column_sets.label(*column, &r.key)
                    && values.insert(value)
                {
                    keep.insert(type_of(*column));
                }
            }
        }
        if !roomy {
            // What minValues doesn't need leaves the other nodes their share of the limits.
            let mut most = self.column_sets.instance_type(node.column).capacity.clone();
            let needed = types.iter().filter(|column| keep.contains(&type_of(**column)));
            needed.for_each(|column| most.raise_to(&self.column_sets.instance_type(*column).capacity));
            types.retain(|column| self.column_sets.instance_type(*column).capacity.fits(&most));
        }
        for column in &types {
            if keep.len() >= MAX_TYPES {
                break;
            }
            keep.insert(type_of(*column));
        }
        allowed.retain(|column| keep.contains(&type_of(*column)));
        allowed
    }
}

/// What the choices of a node demand of an offering's own labels: the values that they all have one of, where the same types
/// also come with others.
fn narrowed(column_sets: &ColumnSets<'_>, columns: &[usize]) -> Vec<Requirement> {
    let demand = |key: &&'static str| {
        let value = |column: usize| column_sets.columns[column].labels.get(*key).map(String::as_str);
        let chosen: Option<BTreeSet<&str>> = columns.iter().map(|column| value(*column)).collect();
        let chosen = chosen?;
        let shapes: BTreeSet<usize> = columns.iter().map(|column| column_sets.columns[*column].shape).collect();
        let mut offered =
            shapes.iter().flat_map(|shape| column_sets.shapes[*shape].first..column_sets.shapes[*shape].end);
        let narrower = offered.any(|column| value(column).is_none_or(|value| !chosen.contains(value)));
        narrower.then(|| Requirement {
            key: (*key).to_owned(),
            operator: "In".to_owned(),
            values: chosen.into_iter().map(str::to_owned).collect(),
            min_values: None,
        })
    };
    CHOSEN_AT_LAUNCH.iter().filter_map(demand).collect()
}

/// The labels that the pods of a node pinned.
fn pins(column_sets: &ColumnSets<'_>, column: usize) -> Vec<Requirement> {
    column_sets
        .variant(column)
        .pinned
        .iter()
        .map(|(key, value)| Requirement {
            key: key.clone(),
            operator: "In".to_owned(),
            values: vec![value.clone()],
            min_values: None,
        })
        .collect()
}
