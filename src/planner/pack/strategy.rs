//! The purchase of a subproblem's demand: to optimality where the instance is small, else by a portfolio of strategies.

use crate::columns::dims::real;
use crate::pack::exact::buy_exactly;
use crate::pack::purchase::{REPRICE_SHARE, buy};
use crate::pricing::subproblem::Subproblem;
use crate::state::plan_state::{PlanState, PurchasedNode, STRATEGIES, Strategy};
use crate::state::pool_budget::Budget;

/// Work up to which a further strategy is tried: large demands are packed well by the first.
const PORTFOLIO_WORK_LIMIT: usize = 1_500_000;
/// Share by which the bound with size tiers exceeds the bound without from which prices by size are tried first.
const SIZES_MATTER: f64 = 0.1;
/// Share up to which prices by size are not worth their time.
const EQUAL_BOUNDS: f64 = 0.001;
/// Multiple of the lowest cost up to which the best purchases of the other kind of prices are improved, too.
const NEAR_WINNER: f64 = 1.03;

/// The purchases of a state, to be restored if they win.
#[derive(Clone)]
pub(crate) struct Purchases {
    /// Unplaced pods, then comparison price in micro-USD per hour: lower is better.
    pub objective: (usize, i64),
    nodes: Vec<PurchasedNode>,
    budgets: Vec<Budget>,
    exhausted: Vec<bool>,
    strategy: Strategy,
    work: usize,
}

impl Purchases {
    pub fn of(state: &PlanState<'_, '_>, subproblem: &Subproblem) -> Self {
        Self {
            objective: (state.demand.remaining(), state.cost()),
            nodes: state.purchased.clone(),
            budgets: state.budgets.clone(),
            exhausted: subproblem.exhausted().to_vec(),
            strategy: state.strategy,
            work: state.demand.work,
        }
    }

    /// Replaces the purchases of the state by these.
    pub fn restore(self, state: &mut PlanState<'_, '_>, subproblem: &mut Subproblem) {
        for node in std::mem::replace(&mut state.purchased, self.nodes) {
            state.demand.restore(&node.pattern);
        }
        for at in 0..state.purchased.len() {
            let pattern = state.purchased[at].pattern.clone();
            state.demand.take(&pattern, 1);
        }
        state.budgets = self.budgets;
        subproblem.set_exhausted(self.exhausted);
        state.strategy = self.strategy;
        state.demand.work = self.work;
    }
}

/// What [`buy_best`] found besides the purchases that it made.
pub(crate) enum Bought {
    /// The purchases are exact.
    Exactly,
    /// The best purchases at prices of the other kind, with size tiers or without, if they cost nearly as little.
    Greedily(Option<Purchases>),
}

/// Purchases nodes for the remaining demand: exactly where it is little, else by the strategy with the fewest unplaced pods and
/// then the lowest cost, out of the first `most` strategies.
pub(crate) fn buy_best(state: &mut PlanState<'_, '_>, subproblem: &mut Subproblem, most: usize) -> Bought {
    if let Some((purchased, budgets)) = buy_exactly(state, subproblem) {
        for node in &purchased {
            state.demand.take(&node.pattern, 1);
        }
        state.purchased.extend(purchased);
        state.budgets = budgets;
        return Bought::Exactly;
    }
    let strategies = strategies(state, subproblem);
    let before = Purchases::of(state, subproblem);
    // By kind of prices: the work of one kind does not shorten the improvement at the other.
    let mut best: [Option<Purchases>; 2] = [None, None];
    let mut work = [before.work; 2];
    for strategy in strategies.into_iter().take(most) {
        let kind = usize::from(strategy.price_by_size);
        let enough = best.iter().any(Option::is_some) && work[0].max(work[1]) > PORTFOLIO_WORK_LIMIT;
        if enough || (strategy.limit_node_price && state.demand.host_caps.is_empty()) {
            continue;
        }
        (state.strategy, state.demand.work) = (strategy, work[kind]);
        buy(state, subproblem, REPRICE_SHARE);
        work[kind] = state.demand.work;
        let found = Purchases::of(state, subproblem);
        if best[kind].as_ref().is_none_or(|best| found.objective < best.objective) {
            best[kind] = Some(found);
        }
        before.clone().restore(state, subproblem);
    }
    for (best, work) in best.iter_mut().zip(work) {
        if let Some(best) = best {
            best.work = work;
        }
    }
    let [plain, by_size] = best;
    let (winner, other) = match (plain, by_size) {
        (Some(plain), Some(by_size)) if by_size.objective < plain.objective => (Some(by_size), Some(plain)),
        (None, by_size) => (by_size, None),
        (plain, by_size) => (plain, by_size),
    };
    let Some(winner) = winner else { return Bought::Greedily(None) };
    let is_near = |other: &Purchases| {
        other.objective.0 == winner.objective.0 && real(other.objective.1) <= real(winner.objective.1) * NEAR_WINNER
    };
    let other = other.filter(is_near);
    winner.restore(state, subproblem);
    Bought::Greedily(other)
}

/// The strategies in the order of trial: the first is the best guess, because a large demand has no time for others.
fn strategies(state: &mut PlanState<'_, '_>, subproblem: &mut Subproblem) -> Vec<Strategy> {
    let mut strategies = STRATEGIES;
    if state.demand.has_rounded_buckets() {
        strategies.swap(0, 1);
    }
    let unplaceable = subproblem.unplaceable(state);
    state.demand.take(&unplaceable, 1);
    let bounds = [false, true].map(|price_by_size| {
        state.strategy.price_by_size = price_by_size;
        subproblem.price(state).map_or(0.0, |prices| prices.bound)
    });
    state.demand.restore(&unplaceable);
    let by_size = |strategy: &Strategy| Strategy { price_by_size: true, ..*strategy };
    if bounds[1] <= bounds[0] * (1.0 + EQUAL_BOUNDS) {
        strategies.to_vec()
    } else if bounds[1] <= bounds[0] * (1.0 + SIZES_MATTER) {
        strategies.iter().copied().chain(strategies.iter().take(1).map(by_size)).collect()
    } else {
        strategies.iter().take(2).map(by_size).chain(strategies).collect()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::pack::purchase::{REPRICE_SHARE, buy};
    use crate::pack::strategy::buy_best;
    use crate::state::plan_state::{STRATEGIES, Strategy};
    use crate::test_support::plan_stages::{instance, purchased, subproblem};
    use crate::test_support::{HOST, World, affinity};

    /// Too many distinct sizes for an exact solution; some pods exclude each other.
    fn world() -> World {
        let mut world = World::new();
        for (at, (cpu, memory)) in
            [("700m", "3Gi"), ("1300m", "1Gi"), ("2900m", "9Gi"), ("1", "7Gi")].iter().enumerate()
        {
            let name = format!("p{at}");
            world.pods(&name, 9, &json!({}), cpu, memory, &json!({}));
        }
        let labels = json!({"app": "apart"});
        world.pods("apart", 7, &labels, "300m", "1Gi", &affinity("podAntiAffinity", HOST, &labels));
        world
    }

    fn cost_of(strategy: Strategy) -> i64 {
        let world = world();
        let mut instance = instance(&world);
        let mut state = instance.state(false);
        let mut subproblem = subproblem(&mut state);
        state.strategy = strategy;
        buy(&mut state, &mut subproblem, REPRICE_SHARE);
        assert!(state.demand.is_empty());
        state.cost()
    }

    #[test]
    fn the_cheapest_strategy_of_the_portfolio_is_kept() {
        let costs = STRATEGIES.map(cost_of);
        let world = world();
        let mut instance = instance(&world);
        let mut state = instance.state(false);
        let mut subproblem = subproblem(&mut state);
        buy_best(&mut state, &mut subproblem, usize::MAX);
        let best = costs.iter().position(|cost| cost == costs.iter().min().unwrap()).unwrap();
        assert!(costs.iter().any(|cost| *cost != costs[best]), "the strategies differ: {costs:?}");
        assert_eq!((state.cost(), state.strategy), (costs[best], STRATEGIES[best]));
        assert!(state.demand.is_empty());
        let pods: usize = state.purchased.iter().flat_map(|node| &node.pattern).map(|(_, count)| count).sum();
        assert_eq!(pods, 43, "every pod is on one node");
    }

    #[test]
    fn a_small_instance_is_solved_exactly() {
        let mut world = World::new();
        world.pods("p", 3, &json!({}), "2", "1Gi", &json!({}));
        let mut instance = instance(&world);
        let mut state = instance.state(false);
        let mut subproblem = subproblem(&mut state);
        buy_best(&mut state, &mut subproblem, usize::MAX);
        let mut nodes = purchased(&state);
        nodes.sort();
        assert_eq!(nodes, ["a1.x2 in z-a: p 1", "a1.x4 in z-a: p 2"]);
        assert!(state.demand.is_empty() && subproblem.initial_prices(&state).is_empty(), "without dual prices");
    }
}
