//! The purchase of a subproblem's demand: to optimality where the instance is small, else by a portfolio of strategies.

use crate::planner::pack::exact::buy_exactly;
use crate::planner::pack::purchase::{REPRICE_SHARE, buy};
use crate::planner::pricing::subproblem::Subproblem;
use crate::planner::state::budget::Budget;
use crate::planner::state::plan_state::{PlanState, PurchasedNode, STRATEGIES, Strategy};

/// Work up to which a further strategy is tried: large demands are packed well by the first.
const PORTFOLIO_WORK_LIMIT: usize = 1_500_000;

/// The result of one strategy, to be restored if it wins.
struct Incumbent {
    /// Unplaced pods, then comparison price in micro-USD per hour: lower is better.
    objective: (usize, i64),
    purchased: Vec<PurchasedNode>,
    budgets: Vec<Budget>,
    exhausted: Vec<bool>,
    strategy: Strategy,
}

/// Purchases nodes for the remaining demand: exactly where it is little, else by the strategy with the fewest unplaced pods and
/// then the lowest cost.
pub(crate) fn buy_best(state: &mut PlanState<'_, '_>, subproblem: &mut Subproblem) {
    if let Some((purchased, budgets)) = buy_exactly(state, subproblem) {
        record(state, purchased, budgets);
        return;
    }
    let before = state.purchased.len();
    let (budgets, exhausted) = (state.budgets.clone(), subproblem.exhausted().to_vec());
    let mut incumbent: Option<Incumbent> = None;
    let mut strategies = STRATEGIES;
    if state.demand.has_rounded_buckets() {
        strategies.swap(0, 1);
    }
    for strategy in strategies {
        let enough = incumbent.is_some() && state.demand.work > PORTFOLIO_WORK_LIMIT;
        if enough || (strategy.limit_node_price && state.demand.host_caps.is_empty()) {
            continue;
        }
        state.strategy = strategy;
        buy(state, subproblem, REPRICE_SHARE);
        let unplaced = state.demand.remaining();
        let purchased = state.purchased.split_off(before);
        let cost = purchased.iter().map(|node| state.column_sets.columns[node.column].price).sum();
        for node in &purchased {
            state.demand.restore(&node.pattern);
        }
        let spent = std::mem::replace(&mut state.budgets, budgets.clone());
        let objective = (unplaced, cost);
        if incumbent.as_ref().is_none_or(|incumbent| objective < incumbent.objective) {
            let exhausted = subproblem.exhausted().to_vec();
            incumbent = Some(Incumbent { objective, purchased, budgets: spent, exhausted, strategy });
        }
        subproblem.set_exhausted(exhausted.clone());
    }
    if let Some(best) = incumbent {
        record(state, best.purchased, best.budgets);
        subproblem.set_exhausted(best.exhausted);
        state.strategy = best.strategy;
    }
}

/// Adds purchased nodes whose budget is spent already.
fn record(state: &mut PlanState<'_, '_>, purchased: Vec<PurchasedNode>, budgets: Vec<Budget>) {
    for node in &purchased {
        state.demand.take(&node.pattern, 1);
    }
    state.purchased.extend(purchased);
    state.budgets = budgets;
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::planner::pack::purchase::{REPRICE_SHARE, buy};
    use crate::planner::pack::strategy::buy_best;
    use crate::planner::state::plan_state::{STRATEGIES, Strategy};
    use crate::test_support::plan_stages::{instance, purchased, subproblem};
    use crate::test_support::planner::{HOST, World, affinity};

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
        buy_best(&mut state, &mut subproblem);
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
        buy_best(&mut state, &mut subproblem);
        let mut nodes = purchased(&state);
        nodes.sort();
        assert_eq!(nodes, ["a1.x2 in z-a: p 1", "a1.x4 in z-a: p 2"]);
        assert!(state.demand.is_empty() && subproblem.initial_prices.is_empty(), "without dual prices");
    }
}
