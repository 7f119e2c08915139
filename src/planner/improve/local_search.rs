//! Ruin-and-recreate local search over the purchased nodes: remove the nodes with the most slack, repack their pods, keep the result
//! if it is cheaper.

use std::collections::BTreeSet;

use crate::columns::dims::{float, real};
use crate::improve::right_size::right_size;
use crate::pack::purchase::buy;
use crate::pack::refill::refill_purchased;
use crate::pack::strategy::Purchases;
use crate::patterns::improve::MAX_PODS;
use crate::pricing::subproblem::Subproblem;
use crate::state::plan_state::{PlanState, PurchasedNode, STRATEGIES};

/// Percent of the nodes that an attempt removes; the next share is used after an attempt that saved nothing.
const RUIN_PERCENT: [usize; 5] = [12, 25, 45, 6, 18];
/// Least nodes that an attempt removes.
const MIN_RUINED: usize = 4;
/// Consecutive attempts without savings that end the search.
const MAX_FAILURES: usize = 16;
/// Total work (buckets scored, construction included) that any plan may use.
const MIN_WORK: usize = 2_000_000;
/// Maximum work beyond construction: half of the work of construction, and no more than this.
const MAX_EXTRA_WORK: usize = 1_000_000;
/// A plan that costs less than this multiple of the dual value of its pods is near the bound: random removals are not worthwhile.
const NEAR_BOUND: f64 = 1.02;
/// Weight of a node without slack in random removals, as a share of its price.
const MIN_RUIN_WEIGHT: f64 = 0.02;
/// Share of its value at the last pricing at which repacked demand is priced again.
const REPRICE_SHARE: f64 = 0.5;
const SEED: u64 = 1;

/// Lowers the cost of the purchased nodes. Never increases the cost or the number of unplaced pods. Ends near the lower bound, or
/// when its share of work is used up.
pub(crate) fn improve_purchases(state: &mut PlanState<'_, '_>, subproblem: &mut Subproblem) {
    if state.purchased.is_empty() || subproblem.initial_prices(state).is_empty() {
        return;
    }
    let limit = (state.demand.work + (state.demand.work / 2).min(MAX_EXTRA_WORK)).max(MIN_WORK);
    right_size(state, state.fixed);
    let mut failures = 0;
    let mut attempt = 0;
    let mut random = fastrand::Rng::with_seed(SEED);
    while failures < MAX_FAILURES && state.demand.work < limit {
        // Removals by slack first; once every share has failed, random removals, which large plans have no work left for.
        let is_random = failures > RUIN_PERCENT.len();
        if is_random && (is_searched_later(state) || state.demand.work > MIN_WORK || is_near_bound(state, subproblem)) {
            break;
        }
        let percent = RUIN_PERCENT[attempt % RUIN_PERCENT.len()];
        let ruined = nodes_to_ruin(state, subproblem, percent, is_random.then_some(&mut random));
        if ruin_and_recreate(state, subproblem, &ruined) {
            failures = 0;
        } else {
            failures += 1;
            attempt += 1;
            state.strategy.cosine_power = STRATEGIES[attempt % 2].cosine_power;
        }
    }
}

/// Whether the search of patterns follows, which finds more in the same time.
fn is_searched_later(state: &PlanState<'_, '_>) -> bool {
    state.purchased.iter().flat_map(|node| &node.pattern).map(|(_, count)| count).sum::<usize>() <= MAX_PODS
}

/// Improves other purchases for the same demand, and keeps the better ones.
pub(crate) fn improve_other(state: &mut PlanState<'_, '_>, subproblem: &mut Subproblem, other: Purchases) {
    let improved = Purchases::of(state, subproblem);
    other.restore(state, subproblem);
    improve_purchases(state, subproblem);
    if (state.demand.remaining(), state.cost()) >= improved.objective {
        improved.restore(state, subproblem);
    }
}

/// Value of the pods of a node at the initial dual prices of the subproblem, in micro-USD per hour.
fn value_on(state: &PlanState<'_, '_>, subproblem: &Subproblem, node: &PurchasedNode) -> f64 {
    let value = |(item, count): &(usize, usize)| {
        let prices = &subproblem.initial_prices(state)[state.demand.tiers.class_of[*item]];
        state.demand.value_at(*item, prices) * float(*count)
    };
    node.pattern.iter().map(value).sum()
}

fn is_near_bound(state: &PlanState<'_, '_>, subproblem: &Subproblem) -> bool {
    let value: f64 = state.purchased.iter().map(|node| value_on(state, subproblem, node)).sum();
    real(state.cost()) < value * NEAR_BOUND
}

/// The given percent of the nodes, of those whose pods may all move: the nodes with the most slack (price minus dual value, as a
/// share of the price), or with `random` a random choice weighted by slack.
fn nodes_to_ruin(
    state: &PlanState<'_, '_>,
    subproblem: &Subproblem,
    percent: usize,
    mut random: Option<&mut fastrand::Rng>,
) -> BTreeSet<usize> {
    let may_move = |item: usize| subproblem.covers(state.demand.items[item].column_pool) && !state.demand.is_tied(item);
    let mut weighted = Vec::new();
    for (at, node) in state.purchased.iter().enumerate().skip(state.fixed) {
        if node.pattern.iter().all(|(item, _)| may_move(*item)) {
            let price = real(state.column_sets.columns[node.column].price);
            let slack = (price - value_on(state, subproblem, node)) / price.max(1.0);
            let weight = random.as_mut().map_or(slack, |random| (slack + MIN_RUIN_WEIGHT) * random.f64());
            weighted.push((weight, at));
        }
    }
    weighted.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    weighted.truncate(((state.purchased.len() - state.fixed) * percent / 100).max(MIN_RUINED));
    weighted.into_iter().map(|(_, at)| at).collect()
}

/// Removes nodes and places their pods again: in spare capacity of the others, then on new nodes. Restores the state and returns
/// false unless that is cheaper with no more unplaced pods.
fn ruin_and_recreate(state: &mut PlanState<'_, '_>, subproblem: &mut Subproblem, ruined: &BTreeSet<usize>) -> bool {
    if ruined.is_empty() {
        return false;
    }
    let before = state.purchased.clone();
    let budgets = state.budgets.clone();
    let objective = (state.demand.remaining(), state.cost());
    let mut kept = Vec::with_capacity(before.len());
    for (at, node) in before.iter().enumerate() {
        if ruined.contains(&at) {
            state.demand.restore(&node.pattern);
            state.refund(node.column);
        } else {
            kept.push(node.clone());
        }
    }
    state.purchased = kept;
    subproblem.reset_exhausted();
    let covered: Vec<bool> =
        (0..state.demand.column_pools.len()).map(|pool| subproblem.column_set(pool).is_some()).collect();
    refill_purchased(state, &covered);
    let first_new = state.purchased.len();
    buy(state, subproblem, REPRICE_SHARE);
    right_size(state, first_new);
    if state.demand.remaining() <= objective.0 && state.cost() < objective.1 {
        return true;
    }
    for node in std::mem::replace(&mut state.purchased, before) {
        state.demand.restore(&node.pattern);
    }
    for at in 0..state.purchased.len() {
        let pattern = state.purchased[at].pattern.clone();
        state.demand.take(&pattern, 1);
    }
    state.budgets = budgets;
    false
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::improve::local_search::improve_purchases;
    use crate::test_support::plan_stages::{instance, purchase, purchased, subproblem};
    use crate::test_support::{HOST, World, affinity};

    /// Four nodes of a1.x4 with one pod of 1 CPU each, improved; with or without dual prices.
    fn improved(spec: &Value, priced: bool) -> (i64, Vec<String>) {
        let mut world = World::new();
        world.pods("p", 4, &json!({"app": "p"}), "1", "4Gi", spec);
        let mut instance = instance(&world);
        let mut state = instance.state(false);
        let mut subproblem = subproblem(&mut state);
        if priced {
            subproblem.price(&mut state).unwrap();
        }
        for _ in 0..4 {
            purchase(&mut state, "a1.x4", "z-a", &[("p", 1)]);
        }
        improve_purchases(&mut state, &mut subproblem);
        assert!(state.demand.is_empty(), "every pod is placed again");
        (state.cost(), purchased(&state))
    }

    #[test]
    fn nodes_with_slack_are_removed_and_their_pods_repacked() {
        let (cost, _) = improved(&json!({}), true);
        assert_eq!(cost, 160_000, "4 CPUs of a1, none unused");
    }

    #[test]
    fn pods_that_exclude_each_other_keep_a_node_each_of_the_right_size() {
        let apart = affinity("podAntiAffinity", HOST, &json!({"app": "p"}));
        let (cost, nodes) = improved(&apart, true);
        assert_eq!((cost, nodes.len()), (320_000, 4), "right-sized to a1.x2");
    }

    #[test]
    fn an_optimal_plan_stays_as_it_is() {
        let mut world = World::new();
        world.pods("p", 4, &json!({}), "1", "4Gi", &json!({}));
        let mut instance = instance(&world);
        let mut state = instance.state(false);
        let mut subproblem = subproblem(&mut state);
        subproblem.price(&mut state).unwrap();
        purchase(&mut state, "a1.x2", "z-b", &[("p", 2)]);
        purchase(&mut state, "a1.x2", "z-b", &[("p", 2)]);
        let before = purchased(&state);
        improve_purchases(&mut state, &mut subproblem);
        assert_eq!(purchased(&state), before);
    }

    #[test]
    fn without_dual_prices_there_is_no_search() {
        assert_eq!(improved(&json!({}), false).0, 640_000, "an exact solution cannot be improved");
    }
}
