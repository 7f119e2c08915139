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
        purchased.iter().for_each(|node| state.demand.restore(&node.pattern));
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
    purchased.iter().for_each(|node| state.demand.take(&node.pattern, 1));
    state.purchased.extend(purchased);
    state.budgets = budgets;
}
