//! Dual prices: what a unit of each resource is worth to each kind of demand, from a small linear program.
//!
//! Primal: buy instance types at least cost so that each group's demand of each resource is covered by the types it may
//! use. It relaxes the packing (pods may be cut, and each resource may be served by another node), so its value is a
//! lower bound on any plan's cost. We solve the dual, whose rows (types) are added as they are violated.

use std::collections::{BTreeSet, HashMap};

use microlp::{ComparisonOp, OptimizationDirection, Problem as Lp, Variable};

use super::bits::Bits;
use super::stock::real;

/// Groups beyond this many are merged into one that may use everything.
const MAX_GROUPS: usize = 24;
/// Rounds of adding violated rows.
const MAX_ROUNDS: usize = 30;

/// A type that can be bought: its room and price.
pub(super) struct Supply<'u> {
    pub room: &'u [i64],
    pub price: i64,
}

/// Prices by group, and by type.
#[derive(Clone, Debug, Default)]
pub(super) struct Prices {
    /// Price of a unit of each resource, in micro-USD per hour, by demand given.
    pub demand: Vec<Vec<f64>>,
    /// Price of a unit of each resource on each supply.
    pub supply: Vec<Vec<f64>>,
    /// Least cost, in micro-USD per hour.
    pub bound: f64,
}

/// Solves for prices. `demands` are sets of supplies with the amount wanted of each resource; a demand that no supply
/// of its set can meet is left out by the caller.
///
/// `warm` holds the rows that mattered last time; they are the start this time.
pub(super) fn prices(
    demands: &[(&Bits, Vec<i64>)],
    supplies: &[Supply<'_>],
    dims: usize,
    warm: &mut BTreeSet<usize>,
) -> Option<Prices> {
    // Merge demands of equal sets, and the smallest ones when there are too many sets.
    let mut sets: HashMap<&Bits, usize> = HashMap::new();
    let mut merged: Vec<(Bits, Vec<f64>)> = Vec::new();
    let mut of_demand: Vec<usize> = Vec::with_capacity(demands.len());
    for (bits, amount) in demands {
        let at = *sets.entry(*bits).or_insert_with(|| {
            merged.push(((*bits).clone(), vec![0.0; dims]));
            merged.len() - 1
        });
        for (sum, more) in merged[at].1.iter_mut().zip(amount) {
            *sum += real(*more);
        }
        of_demand.push(at);
    }
    if merged.len() > MAX_GROUPS {
        let mut order: Vec<usize> = (0..merged.len()).collect();
        order.sort_by(|a, b| merged[*b].1[0].total_cmp(&merged[*a].1[0]).then(a.cmp(b)));
        let mut all = (Bits::empty(supplies.len()), vec![0.0; dims]);
        let mut place = vec![0; merged.len()];
        let mut kept = Vec::new();
        for (rank, at) in order.into_iter().enumerate() {
            if rank < MAX_GROUPS {
                place[at] = kept.len();
                kept.push(merged[at].clone());
            } else {
                place[at] = MAX_GROUPS;
                all.0.or(&merged[at].0);
                for (sum, more) in all.1.iter_mut().zip(&merged[at].1) {
                    *sum += more;
                }
            }
        }
        kept.push(all);
        merged = kept;
        for at in &mut of_demand {
            *at = place[*at];
        }
    }

    // Supplies in the same demands' sets share their prices.
    let mut kinds: HashMap<Vec<usize>, usize> = HashMap::new();
    let mut members: Vec<Vec<usize>> = Vec::new();
    let kind_of: Vec<Option<usize>> = (0..supplies.len())
        .map(|supply| {
            let of: Vec<usize> = (0..merged.len()).filter(|g| merged[*g].0.contains(supply)).collect();
            if of.is_empty() {
                return None;
            }
            Some(*kinds.entry(of).or_insert_with_key(|of| {
                members.push(of.clone());
                members.len() - 1
            }))
        })
        .collect();

    // Scale each resource so that prices are near one.
    let scale: Vec<f64> =
        (0..dims).map(|d| supplies.iter().map(|s| real(s.room[d].max(0))).fold(0.0, f64::max).max(1.0)).collect();
    let price_scale = supplies.iter().map(|s| real(s.price)).fold(0.0, f64::max).max(1.0);
    let mut lp = Lp::new(OptimizationDirection::Maximize);
    let demand_vars: Vec<Vec<Option<Variable>>> = merged
        .iter()
        .map(|(_, amount)| {
            (0..dims)
                .map(|d| (amount[d] > 0.0).then(|| lp.add_var(amount[d] / scale[d], (0.0, f64::INFINITY))))
                .collect()
        })
        .collect();
    let supply_vars: Vec<Vec<Option<Variable>>> = members
        .iter()
        .map(|of| {
            (0..dims)
                .map(|d| match of.as_slice() {
                    // One demand alone needs no price of its own on the supply.
                    [only] => demand_vars[*only][d],
                    _ => of.iter().any(|g| demand_vars[*g][d].is_some()).then(|| lp.add_var(0.0, (0.0, f64::INFINITY))),
                })
                .collect()
        })
        .collect();
    for (of, vars) in members.iter().zip(&supply_vars) {
        for d in 0..dims {
            for group in of.iter().filter(|_| of.len() > 1) {
                if let (Some(asked), Some(paid)) = (demand_vars[*group][d], vars[d]) {
                    lp.add_constraint([(asked, 1.0), (paid, -1.0)], ComparisonOp::Le, 0.0);
                }
            }
        }
    }
    let mut in_lp = vec![false; supplies.len()];
    let add_row = |lp: &mut Lp, supply: usize| {
        let Some(kind) = kind_of[supply] else { return };
        let row: Vec<(Variable, f64)> = (0..dims)
            .filter_map(|d| {
                let amount = real(supplies[supply].room[d].max(0)) / scale[d];
                supply_vars[kind][d].filter(|_| amount > 0.0).map(|var| (var, amount))
            })
            .collect();
        if !row.is_empty() {
            lp.add_constraint(row, ComparisonOp::Le, real(supplies[supply].price) / price_scale);
        }
    };
    // Start with the cheapest type per unit of each resource, which bounds every price.
    let mut start: Vec<Option<(f64, usize)>> = vec![None; members.len() * dims];
    for (at, supply) in supplies.iter().enumerate() {
        let Some(kind) = kind_of[at] else { continue };
        for d in 0..dims {
            if supply.room[d] > 0 {
                let per_unit = real(supply.price) / real(supply.room[d]);
                let best = &mut start[kind * dims + d];
                if best.is_none_or(|(have, _)| per_unit < have) {
                    *best = Some((per_unit, at));
                }
            }
        }
    }
    let last = warm.iter().map(|at| (0.0, *at)).collect::<Vec<_>>();
    for (_, at) in start.into_iter().flatten().chain(last) {
        if !std::mem::replace(&mut in_lp[at], true) {
            add_row(&mut lp, at);
        }
    }
    let mut solution = None;
    for _ in 0..MAX_ROUNDS {
        let solved = lp.solve().ok()?.into_solution().ok()?;
        let value = |var: Option<Variable>, d: usize| {
            var.map_or(0.0, |var| solved.var_value(var).max(0.0) / scale[d] * price_scale)
        };
        let by_kind: Vec<Vec<f64>> =
            supply_vars.iter().map(|vars| (0..dims).map(|d| value(vars[d], d)).collect()).collect();
        let mut worst: Vec<Option<(f64, usize)>> = vec![None; members.len()];
        for (at, supply) in supplies.iter().enumerate() {
            let Some(kind) = kind_of[at] else { continue };
            let paid: f64 = supply.room.iter().zip(&by_kind[kind]).map(|(r, p)| real((*r).max(0)) * p).sum();
            let ratio = paid / real(supply.price.max(1));
            if !in_lp[at] && ratio > 1.0 + 1e-9 && worst[kind].is_none_or(|(have, _)| ratio > have) {
                worst[kind] = Some((ratio, at));
            }
        }
        let excess = worst.iter().flatten().map(|(ratio, _)| *ratio).fold(1.0, f64::max);
        let found = Prices {
            demand: of_demand.iter().map(|at| (0..dims).map(|d| value(demand_vars[*at][d], d)).collect()).collect(),
            supply: kind_of
                .iter()
                .map(|kind| kind.map_or_else(|| vec![0.0; dims], |kind| by_kind[kind].clone()))
                .collect(),
            // Prices shrunk by the worst excess are feasible, so this much is a bound even before the last round.
            bound: solved.objective() * price_scale / excess,
        };
        solution = Some(found);
        if worst.iter().all(Option::is_none) {
            let paid = |at: usize, kind: usize| -> f64 {
                supplies[at].room.iter().zip(&by_kind[kind]).map(|(r, p)| real((*r).max(0)) * p).sum()
            };
            *warm = (0..supplies.len())
                .filter(|at| {
                    in_lp[*at] && kind_of[*at].is_some_and(|k| paid(*at, k) > real(supplies[*at].price) * 0.98)
                })
                .collect();
            break;
        }
        for (_, at) in worst.into_iter().flatten() {
            in_lp[at] = true;
            add_row(&mut lp, at);
        }
    }
    solution
}
