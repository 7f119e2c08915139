//! Dual prices: what a unit of each resource is worth to each kind of demand, from a small linear program.
//!
//! Primal: buy columns at least cost so that each demand of each resource is covered by the columns it may use. It relaxes
//! the packing (pods may be cut, and each resource may be served by another node), so its value is a lower bound on any
//! plan's cost. We solve the dual, whose rows (columns to buy) are added as they are violated.
//!
//! Besides the resources there are *slots*: pods of which a node may hold only so many (anti-affinity on the host) use up
//! one each. A slot is one more resource, of which every column has the same amount. With it the program knows that a
//! thousand pods that keep off each other need a thousand nodes.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use microlp::{ComparisonOp, OptimizationDirection, Problem as Lp, Variable};

use crate::planner::columns::bitset::Bits;
use crate::planner::columns::dims::real;
use crate::planner::columns::sets::ColumnSets;

/// Rounds of adding violated rows.
const MAX_ROUNDS: usize = 30;

/// Prices by demand, and by kind of column.
#[derive(Clone, Debug, Default)]
pub(crate) struct Prices {
    /// Price of a unit of each resource, then of each slot, in micro-USD per hour, by set of columns.
    by_set: Vec<Vec<f64>>,
    by_kind: Vec<Vec<f64>>,
    /// Least cost, in micro-USD per hour.
    pub bound: f64,
}

/// What columns cost and hold.
pub(crate) struct Offer<P, R> {
    /// Price of a column.
    pub price: P,
    /// What counts of a column's room of a resource: of column, resource and room.
    pub room: R,
}

/// What can be bought, as demands see it: made once, priced as often as what is left changes.
pub(crate) struct CoveringLp {
    /// Set of columns of each demand.
    set_of: Vec<usize>,
    sets: usize,
    /// Columns that the same sets hold are of one kind and share their prices; `usize::MAX` where none holds them.
    kind_of: Vec<usize>,
    /// Sets that hold the columns of each kind.
    members: Vec<Vec<usize>>,
    /// Columns that no other of their kind beats: kind, room (resources, then slots) and price, scaled near one.
    rows: Vec<Row>,
    scale: Vec<f64>,
    price_scale: f64,
    /// Rows that mattered last time; they are the start of the next.
    warm: BTreeSet<usize>,
}

struct Row {
    kind: usize,
    room: Vec<f64>,
    price: f64,
}

impl CoveringLp {
    /// `demands` are sets of columns with the amount wanted of each resource (and slot), which here only decides what is
    /// merged when there are many sets. `slots` is how many of each slot a column has. A demand that no column of its set
    /// can meet is left out by the caller. Sets of columns beyond the `max_sets` that want most (at most 31) are merged into
    /// one that may use what any of them may.
    pub fn new(
        column_sets: &ColumnSets<'_>,
        demands: &[(&Bits, &[i64])],
        slots: &[i64],
        max_sets: usize,
        offer: Offer<impl Fn(usize) -> i64, impl Fn(usize, usize, i64) -> i64>,
    ) -> Self {
        let price = &offer.price;
        let room = |column: usize| -> Vec<i64> {
            let room = column_sets.room(column).iter().enumerate();
            room.map(|(dim, room)| (offer.room)(column, dim, *room).max(0)).collect()
        };
        let columns = column_sets.columns.len();
        let mut ids: HashMap<&Bits, usize> = HashMap::new();
        let mut merged: Vec<(Bits, i64)> = Vec::new();
        let mut set_of: Vec<usize> = Vec::with_capacity(demands.len());
        for (bits, amount) in demands {
            let at = *ids.entry(*bits).or_insert_with(|| {
                merged.push(((*bits).clone(), 0));
                merged.len() - 1
            });
            merged[at].1 += amount[0];
            set_of.push(at);
        }
        if merged.len() > max_sets {
            let mut order: Vec<usize> = (0..merged.len()).collect();
            order.sort_by_key(|at| (std::cmp::Reverse(merged[*at].1), *at));
            let mut all = (Bits::empty(columns), 0);
            let mut place = vec![max_sets; merged.len()];
            for (rank, at) in order.iter().enumerate() {
                if rank < max_sets {
                    place[*at] = rank;
                } else {
                    all.0.or(&merged[*at].0);
                }
            }
            merged = order.into_iter().take(max_sets).map(|at| merged[at].clone()).collect();
            merged.push(all);
            for at in &mut set_of {
                *at = place[*at];
            }
        }

        let mut held: Vec<u32> = vec![0; columns];
        for (set, (bits, _)) in merged.iter().enumerate() {
            bits.iter().for_each(|column| held[column] |= 1 << set);
        }
        let mut kinds: BTreeMap<u32, usize> = BTreeMap::new();
        let mut members: Vec<Vec<usize>> = Vec::new();
        let mut kind_of = vec![usize::MAX; columns];
        for (column, mask) in held.iter().enumerate().filter(|(_, mask)| **mask != 0) {
            kind_of[column] = *kinds.entry(*mask).or_insert_with(|| {
                members.push((0..merged.len()).filter(|set| mask >> set & 1 == 1).collect());
                members.len() - 1
            });
        }
        let dims = column_sets.dims.len();
        let kept = undominated(column_sets, &kind_of, members.len(), price);
        let mut scale: Vec<f64> = (0..dims)
            .map(|d| kept.iter().map(|c| real(column_sets.room(*c)[d].max(0))).fold(0.0, f64::max).max(1.0))
            .collect();
        scale.extend(slots.iter().map(|n| real(*n).max(1.0)));
        let price_scale = kept.iter().map(|c| real(price(*c))).fold(0.0, f64::max).max(1.0);
        let rows = kept
            .into_iter()
            .map(|column| Row {
                kind: kind_of[column],
                room: room(column).iter().chain(slots).zip(&scale).map(|(room, scale)| real(*room) / scale).collect(),
                price: real(price(column)) / price_scale,
            })
            .collect();
        Self { set_of, sets: merged.len(), kind_of, members, rows, scale, price_scale, warm: BTreeSet::new() }
    }

    /// Prices of a demand, by its place in the list that the lp was made of.
    pub fn of_demand<'x>(&self, prices: &'x Prices, demand: usize) -> &'x [f64] {
        &prices.by_set[self.set_of[demand]]
    }

    /// Prices on a column; all zero where no demand may use it.
    pub fn of_column<'x>(&self, prices: &'x Prices, column: usize) -> &'x [f64] {
        prices.by_kind.get(self.kind_of[column]).or(prices.by_kind.last()).map_or(&[], Vec::as_slice)
    }

    /// Solves for prices of `amounts`, which belong to the demands that the lp was made of. What a column holds may be
    /// worth more than its price by the share `slack`: a column more in the program costs a solution, and who buys by
    /// these prices doesn't see the difference. The bound is one in any case.
    pub fn prices<'x>(&mut self, amounts: impl Iterator<Item = (usize, &'x [i64])>, slack: f64) -> Option<Prices> {
        let dims = self.scale.len();
        let mut wanted = vec![vec![0.0; dims]; self.sets];
        for (demand, amount) in amounts {
            for (sum, more) in wanted[self.set_of[demand]].iter_mut().zip(amount) {
                *sum += real(*more);
            }
        }
        let mut lp = Lp::new(OptimizationDirection::Maximize);
        let set_vars: Vec<Vec<Option<Variable>>> = wanted
            .iter()
            .map(|amount| {
                (0..dims)
                    .map(|d| (amount[d] > 0.0).then(|| lp.add_var(amount[d] / self.scale[d], (0.0, f64::INFINITY))))
                    .collect()
            })
            .collect();
        let mut kind_vars: Vec<Vec<Option<Variable>>> = Vec::with_capacity(self.members.len());
        for of in &self.members {
            let asking: Vec<usize> =
                of.iter().copied().filter(|set| set_vars[*set].iter().any(Option::is_some)).collect();
            let vars = (0..dims)
                .map(|d| {
                    let asked: Vec<Variable> = asking.iter().filter_map(|set| set_vars[*set][d]).collect();
                    match asked.as_slice() {
                        [] => None,
                        // One demand alone needs no price of its own on the column.
                        [only] => Some(*only),
                        several => {
                            let paid = lp.add_var(0.0, (0.0, f64::INFINITY));
                            for asked in several {
                                lp.add_constraint([(*asked, 1.0), (paid, -1.0)], ComparisonOp::Le, 0.0);
                            }
                            Some(paid)
                        }
                    }
                })
                .collect();
            kind_vars.push(vars);
        }
        let mut in_lp = vec![false; self.rows.len()];
        let add_row = |lp: &mut Lp, row: &Row| {
            let terms: Vec<(Variable, f64)> = kind_vars[row.kind]
                .iter()
                .zip(&row.room)
                .filter_map(|(var, room)| var.filter(|_| *room > 0.0).map(|var| (var, *room)))
                .collect();
            if !terms.is_empty() {
                lp.add_constraint(terms, ComparisonOp::Le, row.price);
            }
        };
        // Start with the cheapest per unit of each resource, which bounds every price.
        let mut start: Vec<Option<(f64, usize)>> = vec![None; self.members.len() * dims];
        for (at, row) in self.rows.iter().enumerate() {
            for d in (0..dims).filter(|d| row.room[*d] > 0.0) {
                let per_unit = row.price / row.room[d];
                let best = &mut start[row.kind * dims + d];
                if best.is_none_or(|(have, _)| per_unit < have) {
                    *best = Some((per_unit, at));
                }
            }
        }
        for at in start.into_iter().flatten().map(|(_, at)| at).chain(self.warm.iter().copied()) {
            if !std::mem::replace(&mut in_lp[at], true) {
                add_row(&mut lp, &self.rows[at]);
            }
        }
        let mut solution = None;
        for _ in 0..MAX_ROUNDS {
            let solved = lp.solve().ok()?.into_solution().ok()?;
            let value = |var: &Option<Variable>| var.map_or(0.0, |var| solved.var_value(var).max(0.0));
            let by_kind: Vec<Vec<f64>> = kind_vars.iter().map(|vars| vars.iter().map(value).collect()).collect();
            let paid = |row: &Row| -> f64 { row.room.iter().zip(&by_kind[row.kind]).map(|(r, p)| r * p).sum() };
            let mut worst: Vec<Option<(f64, usize)>> = vec![None; self.members.len()];
            for (at, row) in self.rows.iter().enumerate().filter(|(at, _)| !in_lp[*at]) {
                let ratio = paid(row) / row.price.max(1e-12);
                if ratio > 1.0 + slack && worst[row.kind].is_none_or(|(have, _)| ratio > have) {
                    worst[row.kind] = Some((ratio, at));
                }
            }
            let excess = worst.iter().flatten().map(|(ratio, _)| *ratio).fold(1.0, f64::max);
            let unscale = |prices: &[f64]| -> Vec<f64> {
                prices.iter().zip(&self.scale).map(|(price, scale)| price / scale * self.price_scale).collect()
            };
            let done = worst.iter().all(Option::is_none);
            if done {
                self.warm = (0..self.rows.len())
                    .filter(|at| in_lp[*at] && paid(&self.rows[*at]) > self.rows[*at].price * 0.98)
                    .collect();
            }
            solution = Some(Prices {
                by_set: set_vars.iter().map(|vars| unscale(&vars.iter().map(value).collect::<Vec<_>>())).collect(),
                by_kind: by_kind.iter().map(|prices| unscale(prices)).chain([vec![0.0; dims]]).collect(),
                // Prices shrunk by the worst excess are feasible, so this much is a bound even before the last round.
                bound: solved.objective() * self.price_scale / excess,
            });
            if done {
                break;
            }
            for (_, at) in worst.into_iter().flatten() {
                in_lp[at] = true;
                add_row(&mut lp, &self.rows[at]);
            }
        }
        solution
    }
}

/// Columns, cheapest first, without those that a cheaper one of their kind equals or exceeds in everything.
fn undominated(
    column_sets: &ColumnSets<'_>,
    kind_of: &[usize],
    kinds: usize,
    price: &impl Fn(usize) -> i64,
) -> Vec<usize> {
    let mut kept: Vec<Vec<usize>> = vec![Vec::new(); kinds];
    let mut out = Vec::new();
    let mut by_price: Vec<usize> = column_sets.by_price.iter().copied().filter(|c| kind_of[*c] != usize::MAX).collect();
    by_price.sort_by_key(|column| price(*column));
    for column in by_price {
        let room = column_sets.room(column);
        let of_kind = &mut kept[kind_of[column]];
        if !of_kind.iter().rev().any(|have| room.iter().zip(column_sets.room(*have)).all(|(r, h)| r <= h)) {
            of_kind.push(column);
            out.push(column);
        }
    }
    out
}
