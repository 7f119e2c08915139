//! Dual prices: the value of a unit of each resource to each kind of demand, from a small linear program.
//!
//! Primal (covering LP): buy columns at least cost so that each demand of each resource is covered by columns it may use. It
//! relaxes the packing (pods may be split, and each resource may be served by another node), so its value is a lower bound on the
//! cost of every plan. The dual is solved by column generation: a column of the primal is a constraint (row) of the dual, and only
//! columns of negative reduced cost, i.e. violated rows, are added.
//!
//! Host caps ([`crate::state::demand::host_caps`]) are further resources, of which every column offers the same amount:
//! with them the LP accounts for a thousand mutually exclusive pods needing a thousand nodes.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap};

use microlp::{ComparisonOp, OptimizationDirection, Problem as Lp, Variable};

use crate::columns::bitset::Bits;
use crate::columns::dims::real;
use crate::columns::sets::ColumnSets;

/// Iterations of column generation. The bound is valid after each.
const MAX_ITERATIONS: usize = 30;
/// Rows used to more than this share of their price at the optimum are in the next solve from the start.
const TIGHT_SHARE: f64 = 0.98;

/// Dual prices in micro-USD per hour, of a unit of each resource, then of each host cap.
#[derive(Clone, Debug, Default)]
pub(crate) struct Prices {
    by_set: Vec<Vec<f64>>,
    /// By column kind; the last entry, all zero, is that of columns without a kind.
    by_kind: Vec<Vec<f64>>,
    /// Value of the LP, in micro-USD per hour: a lower bound on the cost of covering the amounts.
    pub bound: f64,
}

/// A demand of the LP.
pub(crate) struct LpDemand<'x> {
    /// Columns that may cover it.
    pub columns: &'x Bits,
    /// Amount of each resource and host cap.
    pub amount: &'x [i64],
    pub tier: usize,
}

/// What columns cost and hold in the LP.
pub(crate) struct Offer<P, R> {
    /// Price of a column, in micro-USD per hour.
    pub price: P,
    /// Usable capacity, of a resource dimension and the column's capacity in it.
    pub room: R,
}

/// The covering LP over column sets: built once, solved whenever the remaining amounts have changed.
pub(crate) struct CoveringLp {
    /// Column set of each demand.
    set_of: Vec<usize>,
    sets: usize,
    /// Kind of each column: columns that belong to the same sets share their prices. `usize::MAX` for those in no set.
    kind_of: Vec<usize>,
    /// Sets that the columns of each kind belong to.
    members: Vec<Vec<usize>>,
    /// Columns that no column of their kind dominates.
    rows: Vec<Row>,
    /// Largest capacity in each dimension, and the highest price: rows are scaled to near one.
    scale: Vec<f64>,
    price_scale: f64,
    /// Rows that were tight at the last optimum: the initial rows of the next solve.
    warm: BTreeSet<usize>,
}

/// A column of the primal: its capacity (resources, then host caps) and price, scaled.
struct Row {
    kind: usize,
    room: Vec<f64>,
    price: f64,
}

impl CoveringLp {
    /// The amounts of `demands` matter here only for merging. `caps_per_node` is what each column offers of each host cap. The
    /// caller leaves out demands that no column can hold. Beyond the `max_sets` sets with the largest CPU demand, the sets of each
    /// size tier are merged into their union, which keeps the LP a relaxation. At most 32 sets in all. With more than `max_couplings` couplings
    /// (see [`Self::couplings`]) fewer sets are distinguished: the time of a solution grows faster than their number.
    pub fn new(
        column_sets: &ColumnSets<'_>,
        demands: &[LpDemand<'_>],
        caps_per_node: &[i64],
        (max_sets, max_couplings): (usize, usize),
        offer: Offer<impl Fn(usize) -> i64, impl Fn(usize, i64) -> i64>,
    ) -> Self {
        let price = &offer.price;
        let room = |column: usize| -> Vec<i64> {
            let room = column_sets.room(column).iter().enumerate();
            room.map(|(dim, room)| (offer.room)(dim, *room).max(0)).collect()
        };
        let columns = column_sets.columns.len();
        let dims = column_sets.dims.len();
        let mut max_sets = max_sets;
        let (set_of, sets, kind_of, members) = loop {
            let (set_of, sets) = merged_sets(columns, demands, max_sets);
            let (kind_of, members) = column_kinds(columns, &sets);
            let couplings = members.iter().map(Vec::len).sum::<usize>() * (dims + caps_per_node.len());
            if couplings <= max_couplings || max_sets == 0 {
                break (set_of, sets, kind_of, members);
            }
            max_sets /= 2;
        };
        let kept = undominated(column_sets, &kind_of, members.len(), price);
        let mut scale: Vec<f64> = (0..dims)
            .map(|d| kept.iter().map(|c| real(column_sets.room(*c)[d].max(0))).fold(0.0, f64::max).max(1.0))
            .collect();
        scale.extend(caps_per_node.iter().map(|n| real(*n).max(1.0)));
        let price_scale = kept.iter().map(|c| real(price(*c))).fold(0.0, f64::max).max(1.0);
        let scaled = |column: usize| -> Vec<f64> {
            room(column).iter().chain(caps_per_node).zip(&scale).map(|(room, scale)| real(*room) / scale).collect()
        };
        let rows = kept
            .into_iter()
            .map(|column| Row { kind: kind_of[column], room: scaled(column), price: real(price(column)) / price_scale })
            .collect();
        Self { set_of, sets: sets.len(), kind_of, members, rows, scale, price_scale, warm: BTreeSet::new() }
    }

    /// Constraints that couple the price of a set with that of a column kind: the measure of the time that a solution takes.
    pub fn couplings(&self) -> usize {
        self.members.iter().map(Vec::len).sum::<usize>() * self.scale.len()
    }

    /// Prices for a demand, given by its position in the `demands` of [`Self::new`].
    pub fn of_demand<'x>(&self, prices: &'x Prices, demand: usize) -> &'x [f64] {
        &prices.by_set[self.set_of[demand]]
    }

    /// Prices on a column: the highest that any demand which may use the column pays; all zero where no demand may.
    pub fn of_column<'x>(&self, prices: &'x Prices, column: usize) -> &'x [f64] {
        prices.by_kind.get(self.kind_of[column]).or(prices.by_kind.last()).map_or(&[], Vec::as_slice)
    }

    /// Solves for the prices of `amounts`, given by position in the `demands` of [`Self::new`]. Column generation ends once no
    /// column's capacity is worth more than its price by the share `tolerance`. The bound is valid for every tolerance.
    pub fn prices<'x>(&mut self, amounts: impl Iterator<Item = (usize, &'x [i64])>, tolerance: f64) -> Option<Prices> {
        let dims = self.scale.len();
        let mut demanded = vec![vec![0.0; dims]; self.sets];
        for (demand, amount) in amounts {
            for (sum, more) in demanded[self.set_of[demand]].iter_mut().zip(amount) {
                *sum += real(*more);
            }
        }
        let mut lp = Lp::new(OptimizationDirection::Maximize);
        let set_vars: Vec<Vec<Option<Variable>>> = demanded
            .iter()
            .map(|amount| {
                (0..dims)
                    .map(|d| (amount[d] > 0.0).then(|| lp.add_var(amount[d] / self.scale[d], (0.0, f64::INFINITY))))
                    .collect()
            })
            .collect();
        let kind_vars = self.kind_variables(&mut lp, &set_vars);
        let mut in_lp = vec![false; self.rows.len()];
        let terms = |row: &Row| -> Vec<(Variable, f64)> {
            kind_vars[row.kind]
                .iter()
                .zip(&row.room)
                .filter_map(|(var, room)| var.filter(|_| *room > 0.0).map(|var| (var, *room)))
                .collect()
        };
        for at in self.initial_rows() {
            let terms = terms(&self.rows[at]);
            if !std::mem::replace(&mut in_lp[at], true) && !terms.is_empty() {
                lp.add_constraint(terms, ComparisonOp::Le, self.rows[at].price);
            }
        }
        let mut solved = lp.solve().ok()?.into_solution().ok()?;
        let mut solution = None;
        for _ in 0..MAX_ITERATIONS {
            let value = |var: &Option<Variable>| var.map_or(0.0, |var| solved.var_value(var).max(0.0));
            let by_kind: Vec<Vec<f64>> = kind_vars.iter().map(|vars| vars.iter().map(value).collect()).collect();
            let worth = |row: &Row| -> f64 { row.room.iter().zip(&by_kind[row.kind]).map(|(r, p)| r * p).sum() };
            // The most violated row of each kind: the column of most negative reduced cost.
            let mut entering: Vec<Option<(f64, usize)>> = vec![None; self.members.len()];
            for (at, row) in self.rows.iter().enumerate().filter(|(at, _)| !in_lp[*at]) {
                let ratio = worth(row) / row.price.max(1e-12);
                if ratio > 1.0 + tolerance && entering[row.kind].is_none_or(|(have, _)| ratio > have) {
                    entering[row.kind] = Some((ratio, at));
                }
            }
            let excess = entering.iter().flatten().map(|(ratio, _)| *ratio).fold(1.0, f64::max);
            let unscaled = |prices: &[f64]| -> Vec<f64> {
                prices.iter().zip(&self.scale).map(|(price, scale)| price / scale * self.price_scale).collect()
            };
            let done = entering.iter().all(Option::is_none);
            if done {
                self.warm = (0..self.rows.len())
                    .filter(|at| in_lp[*at] && worth(&self.rows[*at]) > self.rows[*at].price * TIGHT_SHARE)
                    .collect();
            }
            solution = Some(Prices {
                by_set: set_vars.iter().map(|vars| unscaled(&vars.iter().map(value).collect::<Vec<_>>())).collect(),
                by_kind: by_kind.iter().map(|prices| unscaled(prices)).chain([vec![0.0; dims]]).collect(),
                // Prices divided by the largest violation are dual feasible, so this is a bound (Farley's bound).
                bound: solved.objective() * self.price_scale / excess,
            });
            if done {
                break;
            }
            for (_, at) in entering.into_iter().flatten() {
                in_lp[at] = true;
                let (terms, price) = (terms(&self.rows[at]), self.rows[at].price);
                if !terms.is_empty() {
                    // From the last optimum, which takes less time than a new solve.
                    solved = solved.add_constraint(terms, ComparisonOp::Le, price).ok()?.into_solution().ok()?;
                }
            }
        }
        solution
    }

    /// The price variables of each column kind: at least the price variable of every set that may use the kind.
    fn kind_variables(&self, lp: &mut Lp, set_vars: &[Vec<Option<Variable>>]) -> Vec<Vec<Option<Variable>>> {
        let dims = self.scale.len();
        let mut kind_vars = Vec::with_capacity(self.members.len());
        for of in &self.members {
            let demanding: Vec<usize> =
                of.iter().copied().filter(|set| set_vars[*set].iter().any(Option::is_some)).collect();
            let vars = (0..dims)
                .map(|d| {
                    let of_sets: Vec<Variable> = demanding.iter().filter_map(|set| set_vars[*set][d]).collect();
                    match of_sets.as_slice() {
                        [] => None,
                        // The price of the only set is the price on the column.
                        [only] => Some(*only),
                        several => {
                            let on_column = lp.add_var(0.0, (0.0, f64::INFINITY));
                            for of_set in several {
                                lp.add_constraint([(*of_set, 1.0), (on_column, -1.0)], ComparisonOp::Le, 0.0);
                            }
                            Some(on_column)
                        }
                    }
                })
                .collect();
            kind_vars.push(vars);
        }
        kind_vars
    }

    /// The cheapest row per unit of each resource, of each kind: they bound every price. Then the rows of the last optimum.
    fn initial_rows(&self) -> Vec<usize> {
        let dims = self.scale.len();
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
        start.into_iter().flatten().map(|(_, at)| at).chain(self.warm.iter().copied()).collect()
    }
}

/// The set of each demand, and the distinct sets; those beyond `max_sets` by CPU demand become their union by size tier.
fn merged_sets(columns: usize, demands: &[LpDemand<'_>], max_sets: usize) -> (Vec<usize>, Vec<Bits>) {
    let mut ids: HashMap<&Bits, usize> = HashMap::new();
    let mut sets: Vec<(Bits, i64, usize)> = Vec::new();
    let mut set_of: Vec<usize> = Vec::with_capacity(demands.len());
    for demand in demands {
        let at = *ids.entry(demand.columns).or_insert_with(|| {
            sets.push((demand.columns.clone(), 0, demand.tier));
            sets.len() - 1
        });
        sets[at].1 += demand.amount[0];
        set_of.push(at);
    }
    if sets.len() <= max_sets {
        return (set_of, sets.into_iter().map(|(bits, ..)| bits).collect());
    }
    let mut order: Vec<usize> = (0..sets.len()).collect();
    order.sort_by_key(|at| (Reverse(sets[*at].1), *at));
    let mut unions: BTreeMap<usize, (usize, Bits)> = BTreeMap::new();
    let mut renumbered = vec![0; sets.len()];
    for (rank, at) in order.iter().enumerate() {
        if rank < max_sets {
            renumbered[*at] = rank;
        } else {
            let next = max_sets + unions.len();
            let (id, union) = unions.entry(sets[*at].2).or_insert_with(|| (next, Bits::empty(columns)));
            renumbered[*at] = *id;
            union.or(&sets[*at].0);
        }
    }
    let mut kept: Vec<Bits> = order.into_iter().take(max_sets).map(|at| sets[at].0.clone()).collect();
    let mut unions: Vec<(usize, Bits)> = unions.into_values().collect();
    unions.sort_unstable_by_key(|(id, _)| *id);
    kept.extend(unions.into_iter().map(|(_, union)| union));
    for at in &mut set_of {
        *at = renumbered[*at];
    }
    (set_of, kept)
}

/// The kind of each column, and the sets of each kind. At most 32 sets.
fn column_kinds(columns: usize, sets: &[Bits]) -> (Vec<usize>, Vec<Vec<usize>>) {
    let mut memberships: Vec<u32> = vec![0; columns];
    for (set, bits) in sets.iter().enumerate() {
        bits.iter().for_each(|column| memberships[column] |= 1 << set);
    }
    let mut kinds: BTreeMap<u32, usize> = BTreeMap::new();
    let mut members: Vec<Vec<usize>> = Vec::new();
    let mut kind_of = vec![usize::MAX; columns];
    for (column, mask) in memberships.iter().enumerate().filter(|(_, mask)| **mask != 0) {
        kind_of[column] = *kinds.entry(*mask).or_insert_with(|| {
            members.push((0..sets.len()).filter(|set| mask >> set & 1 == 1).collect());
            members.len() - 1
        });
    }
    (kind_of, members)
}

/// Columns in ascending order of price, without those that a cheaper column of their kind dominates in every dimension.
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

#[cfg(test)]
mod tests;
