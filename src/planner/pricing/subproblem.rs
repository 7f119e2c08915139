//! The covering problem restricted to one preference level and one tier of NodePools, and its dual prices.

use crate::planner::columns::bitset::Bits;
use crate::planner::pricing::duals::{CoveringLp, Offer, Prices};
use crate::planner::state::demand::Pattern;
use crate::planner::state::plan_state::PlanState;

/// Column sets that dual prices distinguish when nodes are purchased.
const MAX_PRICED_SETS: usize = 12;
/// Reduced cost, as a share of the price, up to which column generation ignores a column. A purchase at such prices is as good.
const PRICING_TOLERANCE: f64 = 2e-3;

/// What may be purchased in one pass: the columns of each column pool.
pub(crate) struct Subproblem {
    column_set: Vec<Option<usize>>,
    /// Number of columns of each column pool.
    width: Vec<usize>,
    /// Column pools for which nothing more can be purchased.
    exhausted: Vec<bool>,
    /// Built at the first pricing: the column pools that had demand then, ascending, and their LP.
    lp: Option<(Vec<usize>, CoveringLp)>,
    /// Dual prices by column pool at the first pricing; empty before.
    pub initial_prices: Vec<Vec<f64>>,
}

impl Subproblem {
    /// The columns of each `active` column pool at a preference level, within a tier.
    pub fn new(state: &mut PlanState<'_, '_>, level: usize, tier: &Bits, active: &[bool]) -> Self {
        let levels = state.demand.column_pools.iter().map(|pool| pool.levels.get(level).copied());
        let of_level = levels.zip(active).map(|(level, active)| level.filter(|_| *active)).collect();
        Self::of_sets(state, of_level, tier)
    }

    /// All columns that the requirements of each column pool allow.
    pub fn relaxed(state: &mut PlanState<'_, '_>) -> Self {
        let all = Bits::full(state.column_sets.columns.len());
        let widest = state.demand.column_pools.iter().map(|pool| pool.levels.last().copied()).collect();
        Self::of_sets(state, widest, &all)
    }

    fn of_sets(state: &mut PlanState<'_, '_>, sets: Vec<Option<usize>>, tier: &Bits) -> Self {
        let mut within_tier = |id: usize| {
            let mut bits = state.column_sets.sets[id].bits.clone();
            bits.and(tier);
            (!bits.is_empty()).then(|| state.column_sets.column_set(bits))
        };
        let column_set: Vec<_> = sets.into_iter().map(|id| within_tier(id?)).collect();
        let width = column_set.iter().map(|id| id.map_or(0, |id| state.column_sets.sets[id].bits.len())).collect();
        Self { exhausted: vec![false; column_set.len()], column_set, width, lp: None, initial_prices: Vec::new() }
    }

    /// Whether the subproblem covers a column pool, exhausted or not.
    pub fn covers(&self, column_pool: usize) -> bool {
        self.column_set[column_pool].is_some()
    }

    /// Column set of a column pool; `None` where it has no columns or is exhausted.
    pub fn column_set(&self, column_pool: usize) -> Option<usize> {
        self.column_set[column_pool].filter(|_| !self.exhausted[column_pool])
    }

    /// Whether a column pool may purchase a column.
    pub fn may_use(&self, state: &PlanState<'_, '_>, column_pool: usize, column: usize) -> bool {
        self.column_set(column_pool).is_some_and(|id| state.column_sets.sets[id].bits.contains(column))
    }

    pub fn exhaust(&mut self, column_pool: usize) {
        self.exhausted[column_pool] = true;
    }

    pub fn exhausted(&self) -> &[bool] {
        &self.exhausted
    }

    pub fn set_exhausted(&mut self, exhausted: Vec<bool>) {
        self.exhausted = exhausted;
    }

    /// Makes every column pool available again, after nodes were removed.
    pub fn reset_exhausted(&mut self) {
        self.exhausted.fill(false);
    }

    /// Number of columns of a column pool.
    pub fn width(&self, column_pool: usize) -> usize {
        self.width[column_pool]
    }

    /// Dual prices on a column.
    pub fn prices_on<'x>(&self, prices: &'x Prices, column: usize) -> &'x [f64] {
        self.lp.as_ref().map_or(&[], |(_, lp)| lp.of_column(prices, column))
    }

    /// Remaining pods of items that no column of the subproblem holds.
    pub fn unplaceable(&self, state: &PlanState<'_, '_>) -> Pattern {
        let demand = &state.demand;
        let remaining = demand.items.iter().enumerate().filter(|(_, item)| item.remaining > 0);
        let fits_nowhere = |at: usize, column_pool: usize| {
            self.column_set(column_pool).is_some_and(|id| !state.column_sets.any_fits(id, demand.need(at)))
        };
        let unplaceable = remaining.filter(|(at, item)| fits_nowhere(*at, item.column_pool));
        unplaceable.map(|(at, item)| (at, item.remaining)).collect()
    }

    /// Solves the LP for the remaining demand, and sets the demand's prices. `None` when nothing remains or the LP fails.
    pub fn price(&mut self, state: &mut PlanState<'_, '_>) -> Option<Prices> {
        let mut amounts = self.amounts(state);
        if self.lp.is_none() {
            state.demand.choose_host_caps(false);
            amounts = self.amounts(state);
            self.lp = Some(self.covering_lp(state, &amounts));
        }
        let (pools, lp) = self.lp.as_mut()?;
        let by_position =
            amounts.iter().filter_map(|(pool, amount)| Some((pools.binary_search(pool).ok()?, amount.as_slice())));
        let prices = lp.prices(by_position, PRICING_TOLERANCE)?;
        for (pool, _) in &amounts {
            if let Ok(position) = pools.binary_search(pool) {
                state.demand.set_prices(*pool, lp.of_demand(&prices, position).to_vec());
            }
        }
        if self.initial_prices.is_empty() {
            self.initial_prices = state.demand.prices().to_vec();
        }
        Some(prices)
    }

    fn covering_lp(&self, state: &PlanState<'_, '_>, amounts: &[(usize, Vec<i64>)]) -> (Vec<usize>, CoveringLp) {
        let sets: Vec<(&Bits, &[i64])> = amounts
            .iter()
            .filter_map(|(pool, amount)| {
                Some((&state.column_sets.sets[self.column_set(*pool)?].bits, amount.as_slice()))
            })
            .collect();
        let offer =
            Offer { price: |column: usize| state.column_sets.columns[column].price, room: |_: usize, room: i64| room };
        let caps = state.demand.caps_per_node();
        let lp = CoveringLp::new(state.column_sets, &sets, &caps, MAX_PRICED_SETS, offer);
        (amounts.iter().map(|(pool, _)| *pool).collect(), lp)
    }

    /// Remaining amount of each resource, then of each host cap, by column pool.
    fn amounts(&self, state: &PlanState<'_, '_>) -> Vec<(usize, Vec<i64>)> {
        let demand = &state.demand;
        let dims = state.column_sets.dims.len() + demand.host_caps.len();
        let mut amounts: Vec<Option<Vec<i64>>> = vec![None; demand.column_pools.len()];
        for (at, item) in demand.items.iter().enumerate() {
            if item.remaining > 0 && self.column_set(item.column_pool).is_some() {
                demand.add_amount(at, amounts[item.column_pool].get_or_insert_with(|| vec![0; dims]));
            }
        }
        amounts.into_iter().enumerate().filter_map(|(pool, amount)| Some((pool, amount?))).collect()
    }
}
