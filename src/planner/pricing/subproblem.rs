//! The covering problem restricted to one preference level and one tier of NodePools, and its dual prices.

use crate::columns::bitset::Bits;
use crate::pricing::duals::{CoveringLp, LpDemand, Offer, Prices};
use crate::state::demand::pattern::Pattern;
use crate::state::plan_state::PlanState;

/// Column sets that dual prices distinguish when nodes are purchased: without size tiers, and besides one for each size tier.
const MAX_SETS: usize = 12;
const MAX_SETS_WITH_TIERS: usize = 4;
const MAX_COUPLINGS: usize = 2_500;
/// Reduced cost, as a share of the price, up to which column generation ignores a column. A purchase at such prices is as good.
const PRICING_TOLERANCE: f64 = 2e-3;

/// Work that a coupling of the LP counts as, in buckets scored: with size tiers the LP takes longer than filling nodes.
const WORK_PER_COUPLING: usize = 16;

/// What may be purchased in one pass: the columns of each column pool.
pub(crate) struct Subproblem {
    column_set: Vec<Option<usize>>,
    /// Number of columns of each column pool.
    width: Vec<usize>,
    /// Column pools for which nothing more can be purchased.
    exhausted: Vec<bool>,
    /// Without and with size tiers.
    pricings: [Option<Pricing>; 2],
}

/// The LP of a subproblem.
struct Pricing {
    /// Price classes that had demand at the first pricing, ascending.
    classes: Vec<usize>,
    lp: CoveringLp,
    /// Dual prices by price class at the first pricing.
    initial_prices: Vec<Vec<f64>>,
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
        Self { exhausted: vec![false; column_set.len()], column_set, width, pricings: [None, None] }
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

    fn pricing(&self, state: &PlanState<'_, '_>) -> Option<&Pricing> {
        self.pricings[usize::from(state.strategy.price_by_size)].as_ref()
    }

    /// Dual prices on a column.
    pub fn prices_on<'x>(&'x self, state: &PlanState<'_, '_>, prices: &'x Prices, column: usize) -> &'x [f64] {
        self.pricing(state).map_or(&[], |pricing| pricing.lp.of_column(prices, column))
    }

    /// Dual prices by price class at the first pricing of the current strategy; empty before.
    pub fn initial_prices(&self, state: &PlanState<'_, '_>) -> &[Vec<f64>] {
        self.pricing(state).map_or(&[], |pricing| &pricing.initial_prices)
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

    /// Solves the LP for the remaining demand, and sets the demand's prices. `None` when the LP fails.
    pub fn price(&mut self, state: &mut PlanState<'_, '_>) -> Option<Prices> {
        let by_size = state.strategy.price_by_size;
        if self.pricings.iter().all(Option::is_none) {
            state.demand.choose_host_caps(false);
        }
        let amounts = self.amounts(state);
        if self.pricing(state).is_none() {
            let lp = self.covering_lp(state, &amounts, by_size);
            let classes = amounts.iter().map(|(class, _)| *class).collect();
            self.pricings[usize::from(by_size)] = Some(Pricing { classes, lp, initial_prices: Vec::new() });
        }
        let pricing = self.pricings[usize::from(by_size)].as_mut()?;
        let position = |class: &usize| pricing.classes.binary_search(class).ok();
        let by_position = amounts.iter().filter_map(|(class, amount)| Some((position(class)?, amount.as_slice())));
        let prices = pricing.lp.prices(by_position, PRICING_TOLERANCE)?;
        if by_size {
            state.demand.work += pricing.lp.couplings() * WORK_PER_COUPLING;
        }
        for (class, _) in &amounts {
            if let Ok(position) = pricing.classes.binary_search(class) {
                state.demand.set_prices(*class, pricing.lp.of_demand(&prices, position).to_vec());
            }
        }
        if pricing.initial_prices.is_empty() {
            pricing.initial_prices = state.demand.prices().to_vec();
        }
        Some(prices)
    }

    /// The LP of the amounts by price class. With `by_size`, each is covered only by columns that hold a pod of its tier whole;
    /// otherwise a column pool has one price, of the columns that hold some pod whole.
    fn covering_lp(&self, state: &PlanState<'_, '_>, amounts: &[(usize, Vec<i64>)], by_size: bool) -> CoveringLp {
        let tiers = &state.demand.tiers;
        let holding_some = tiers.holding_some();
        let columns = |class: usize| -> Option<(Bits, usize)> {
            let class = tiers.classes[class];
            let mut bits = state.column_sets.sets[self.column_set(class.column_pool)?].bits.clone();
            if by_size {
                bits.and(&tiers.holding[class.tier]);
            } else if let Some(holding_some) = &holding_some {
                bits.and(holding_some);
            }
            Some((bits, if by_size { class.tier } else { 0 }))
        };
        let sets: Vec<(Bits, usize, &[i64])> = amounts
            .iter()
            .filter_map(|(class, amount)| {
                let (bits, tier) = columns(*class)?;
                Some((bits, tier, amount.as_slice()))
            })
            .collect();
        let demands: Vec<LpDemand<'_>> =
            sets.iter().map(|(columns, tier, amount)| LpDemand { columns, amount, tier: *tier }).collect();
        let max_sets = if by_size { MAX_SETS_WITH_TIERS } else { MAX_SETS };
        let offer =
            Offer { price: |column: usize| state.column_sets.columns[column].price, room: |_: usize, room: i64| room };
        CoveringLp::new(state.column_sets, &demands, &state.demand.caps_per_node(), (max_sets, MAX_COUPLINGS), offer)
    }

    /// Remaining amount of each resource, then of each host cap, by price class.
    fn amounts(&self, state: &PlanState<'_, '_>) -> Vec<(usize, Vec<i64>)> {
        let demand = &state.demand;
        let dims = state.column_sets.dims.len() + demand.host_caps.len();
        let mut amounts: Vec<Option<Vec<i64>>> = vec![None; demand.tiers.classes.len()];
        for (at, item) in demand.items.iter().enumerate() {
            if item.remaining > 0 && self.column_set(item.column_pool).is_some() {
                demand.add_amount(at, amounts[demand.tiers.class_of[at]].get_or_insert_with(|| vec![0; dims]));
            }
        }
        amounts.into_iter().enumerate().filter_map(|(class, amount)| Some((class, amount?))).collect()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::pricing::subproblem::Subproblem;
    use crate::test_support::World;
    use crate::test_support::plan_stages::{active, all_columns, described, instance, subproblem};

    #[test]
    fn a_subproblem_is_restricted_to_a_level_a_tier_and_active_column_pools() {
        let mut world = World::new();
        let preferred = json!({"affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [
            {"weight": 1, "preference": {"matchExpressions": [
                {"key": "kubernetes.io/arch", "operator": "In", "values": ["arm64"]}]}}]}}});
        world.pods("p", 1, &json!({}), "1", "1Gi", &preferred);
        let mut instance = instance(&world);
        let mut state = instance.state(false);
        let all = all_columns(&state);
        let tier =
            state.column_sets.where_column(|column| state.column_sets.instance_type(column).name.ends_with("x2"));
        let mut width = |level: usize, tier, active: bool| Subproblem::new(&mut state, level, tier, &[active]).width(0);
        // Four sizes of a1 in three zones; then c1, m1, r1 and the two sizes of g1 in two zones as well.
        assert_eq!((width(0, &all, true), width(1, &all, true)), (12, 52));
        assert_eq!((width(0, &tier, true), width(1, &tier, true)), (3, 12));
        assert_eq!((width(2, &all, true), width(0, &all, false)), (0, 0), "no such level, not active");
        assert_eq!(Subproblem::relaxed(&mut state).width(0), 52);
    }

    #[test]
    fn pods_that_no_column_holds_are_unplaceable_and_an_exhausted_pool_has_no_columns() {
        let mut world = World::new();
        world.pods("p", 2, &json!({}), "1", "1Gi", &json!({}));
        world.pods("huge", 3, &json!({}), "17", "1Gi", &json!({}));
        let mut instance = instance(&world);
        let mut state = instance.state(false);
        let mut subproblem = subproblem(&mut state);
        assert_eq!(described(&state, &subproblem.unplaceable(&state)), "huge 3");
        subproblem.exhaust(0);
        assert!(subproblem.column_set(0).is_none() && subproblem.covers(0));
        assert_eq!(subproblem.price(&mut state).unwrap().bound.to_bits(), 0, "no demand costs nothing");
        subproblem.reset_exhausted();
        assert!(subproblem.column_set(0).is_some());
    }

    #[test]
    #[allow(clippy::cast_possible_truncation)]
    fn pricing_sets_the_dual_prices_of_the_demand_and_keeps_the_first() {
        let mut world = World::new();
        world.pods("cpu", 4, &json!({}), "2", "1Gi", &json!({}));
        world.pods("memory", 1, &json!({}), "1", "64Gi", &json!({}));
        let mut instance = instance(&world);
        let mut state = instance.state(false);
        assert_eq!(active(&state), [true], "one column pool");
        let mut subproblem = subproblem(&mut state);
        let per_cpu = |prices: &[f64]| (prices[0] * 1000.0).round() as i64;
        // 9 CPUs and 68 GiB are one CPU of a1 and eight of r1: 16,000 a CPU and 6,000 a GiB make both cost what they do.
        let prices = subproblem.price(&mut state).unwrap();
        assert_eq!(
            (prices.bound.round() as i64, state.demand.pattern_value(&[(0, 4), (1, 1)]).round() as i64),
            (552_000, 552_000)
        );
        assert_eq!(per_cpu(&state.demand.prices()[0]), 16_000);
        state.demand.take(&[(1, 1)], 1);
        subproblem.price(&mut state).unwrap();
        assert_eq!(per_cpu(&state.demand.prices()[0]), 40_000, "without the memory only CPU has a price");
        assert_ne!(subproblem.initial_prices(&state), state.demand.prices(), "the first prices are kept");
    }
}
