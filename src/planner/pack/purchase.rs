//! Greedy purchase at dual prices: repeatedly fills the most promising columns and buys copies of the pattern with the highest value
//! per price. Prices are solved again once the remaining demand has lost a share of its value.

use crate::columns::dims::{dot, fits, float, real};
use crate::pack::min_values::{is_strict, min_values_hold};
use crate::pricing::duals::Prices;
use crate::pricing::subproblem::Subproblem;
use crate::state::demand::pattern::{Bin, Pattern};
use crate::state::plan_state::{PlanState, PurchasedNode};

/// Share of its value at the last pricing at which the remaining demand is priced again.
pub(crate) const REPRICE_SHARE: f64 = 0.88;
/// Minimum share of the incumbent's value per price for a shortlisted column to be purchased without a full comparison.
const MIN_SHORTLIST_SHARE: f64 = 0.985;
/// Columns on the shortlist.
const SHORTLIST: usize = 4;
/// Maximum share of the remaining value that copies of one node take: more would leave a demand of another mix than was priced.
const MAX_PURCHASE_SHARE: f64 = 0.05;
/// Share of its reference price that a resource counts for at least when a node is filled.
const REFERENCE_PRICE_SHARE: f64 = 0.3;
/// Maximum price of a node as a multiple of the remaining value: a larger node cannot be filled.
const MAX_PRICE_TO_VALUE: f64 = 1.3;
/// With [`Strategy::limit_node_price`]: maximum price as a multiple of the remaining value per node that host caps require.
///
/// [`Strategy::limit_node_price`]: crate::state::plan_state::Strategy::limit_node_price
const MAX_PRICE_TO_VALUE_PER_NODE: f64 = 1.15;
/// Buckets of pods from which on so few columns are filled: the work of filling one grows with them.
const MANY_BUCKETS: usize = 1_000;
const FEW_CANDIDATES: usize = 3;
/// Columns compared per price band; a band spans a factor of two.
const COLUMNS_PER_BAND: usize = 3;

/// Dual prices, and the remaining demand at these prices.
struct Pricing {
    prices: Prices,
    /// Value of the remaining demand that the subproblem can serve, in micro-USD per hour.
    remaining: f64,
    /// The same when the prices were solved.
    initial: f64,
    /// `remaining` by column pool.
    by_pool: Vec<f64>,
    /// Column pool that the next purchase must serve.
    seed: usize,
    /// Best columns of the last full comparison for the seed.
    shortlist: Vec<usize>,
    /// Value per price of the best column of the last full comparison.
    incumbent: f64,
}

/// A filled column: the value of its pattern per price, its price, and the node.
struct PricedPattern {
    value: f64,
    price: i64,
    node: PurchasedNode,
}

/// Purchases nodes until nothing that the subproblem can serve remains, or limits prevent it. Pods that no column can hold stay in
/// the demand. Prices are solved again when the remaining value falls below `reprice_share` of its value at the last pricing.
pub(crate) fn buy(state: &mut PlanState<'_, '_>, subproblem: &mut Subproblem, reprice_share: f64) {
    // Unplaceable items must not influence prices and seeds.
    let mut excluded = subproblem.unplaceable(state);
    state.demand.take(&excluded, 1);
    buy_placeable(state, subproblem, reprice_share, &mut excluded);
    state.demand.restore(&excluded);
}

/// Purchases nodes; items that turn out to fit no affordable column move from the demand to `excluded`.
fn buy_placeable(
    state: &mut PlanState<'_, '_>,
    subproblem: &mut Subproblem,
    reprice_share: f64,
    excluded: &mut Pattern,
) {
    let mut current: Option<Pricing> = None;
    while let Some(seed) = next_seed(state, subproblem, current.as_ref()) {
        let stale = current.as_ref().is_none_or(|p| p.remaining < p.initial * reprice_share);
        if stale {
            let Some(prices) = subproblem.price(state) else { return };
            let by_pool = value_by_pool(state, subproblem);
            let remaining = by_pool.iter().sum();
            let (initial, shortlist) = (remaining, Vec::new());
            current = Some(Pricing { prices, remaining, initial, by_pool, seed, shortlist, incumbent: 0.0 });
            continue;
        }
        let Some(pricing) = current.as_mut() else { return };
        if pricing.seed != seed {
            pricing.seed = seed;
            pricing.shortlist.clear();
        }
        if let Some(node) = best_purchase(state, subproblem, pricing) {
            let share =
                copies_within(pricing.remaining * MAX_PURCHASE_SHARE, state.demand.pattern_value(&node.pattern));
            let max = state.demand.copies_of(&node.pattern).min(share.max(1));
            let copies = state.affordable_copies(node.column, max);
            for (item, count) in &node.pattern {
                let value = state.demand.value(*item) * float(count * copies);
                pricing.by_pool[state.demand.items[*item].column_pool] -= value;
                pricing.remaining -= value;
            }
            state.purchase(node, copies);
        } else if let Some(item) = state.demand.most_valuable(seed) {
            let remaining = state.demand.items[item].remaining;
            let value = state.demand.value(item) * float(remaining);
            pricing.by_pool[seed] -= value;
            pricing.remaining -= value;
            state.demand.take(&[(item, remaining)], 1);
            excluded.push((item, remaining));
        } else {
            pricing.remaining -= pricing.by_pool[seed];
            subproblem.exhaust(seed);
        }
    }
}

/// Value of the remaining demand that the subproblem can serve, by column pool.
fn value_by_pool(state: &PlanState<'_, '_>, subproblem: &Subproblem) -> Vec<f64> {
    let demand = &state.demand;
    let mut out = vec![0.0; demand.column_pools.len()];
    for (at, item) in demand.items.iter().enumerate() {
        if item.remaining > 0 && subproblem.column_set(item.column_pool).is_some() {
            out[item.column_pool] += demand.value(at) * float(item.remaining);
        }
    }
    out
}

/// The column pool with the fewest columns, then the highest remaining value: constrained pods are packed first, flexible pods fill
/// up their nodes.
fn next_seed(state: &PlanState<'_, '_>, subproblem: &Subproblem, pricing: Option<&Pricing>) -> Option<usize> {
    let open = |pool: &usize| state.demand.remaining_in(*pool) > 0 && subproblem.column_set(*pool).is_some();
    let value = |pool: &usize| pricing.map_or(0.0, |pricing| pricing.by_pool[*pool]);
    (0..state.demand.column_pools.len()).filter(open).min_by(|a, b| {
        let by_width = subproblem.width(*a).cmp(&subproblem.width(*b));
        by_width.then(value(b).total_cmp(&value(a))).then(a.cmp(b))
    })
}

/// The purchase of highest value per price for the seed. Shortlisted columns are tried alone while they stay close to the
/// incumbent.
fn best_purchase(
    state: &mut PlanState<'_, '_>,
    subproblem: &Subproblem,
    pricing: &mut Pricing,
) -> Option<PurchasedNode> {
    let column_set = subproblem.column_set(pricing.seed)?;
    let need = state.demand.need(state.demand.most_valuable(pricing.seed)?);
    let binding = state.demand.binding_counters();
    let nodes = if state.strategy.limit_node_price { state.demand.nodes_for_host_caps() } else { 0 };
    let max_price = if nodes > 1 {
        pricing.remaining / float(nodes) * MAX_PRICE_TO_VALUE_PER_NODE
    } else {
        pricing.remaining * MAX_PRICE_TO_VALUE
    };
    for column in std::mem::take(&mut pricing.shortlist) {
        let eligible = fits(need, state.column_sets.room(column))
            && real(state.column_sets.columns[column].price) <= max_price
            && state.affords(column);
        if !eligible {
            continue;
        }
        pricing.shortlist.push(column);
        let filled = fill_candidates(state, subproblem, pricing, &[(column, f64::INFINITY)], &binding);
        if let Some(candidate) = filled.into_iter().next()
            && candidate.value >= pricing.incumbent * MIN_SHORTLIST_SHARE
        {
            return Some(candidate.node);
        }
    }
    let columns = |state: &_, pool: &dyn Fn(usize) -> bool| {
        promising_columns(state, subproblem, (column_set, pool), need, &pricing.prices, max_price)
    };
    let promising = columns(state, &|_| true);
    let mut filled = fill_candidates(state, subproblem, pricing, &promising, &binding);
    if filled.is_empty() {
        // `minValues` may permit none of these.
        let lenient: Vec<bool> = (0..state.budgets.len()).map(|pool| !is_strict(state, pool)).collect();
        if !lenient.iter().all(|lenient| *lenient) {
            let promising = columns(state, &|pool| lenient[pool]);
            filled = fill_candidates(state, subproblem, pricing, &promising, &binding);
        }
    }
    pricing.shortlist = filled.iter().take(SHORTLIST).map(|candidate| candidate.node.column).collect();
    let best = filled.into_iter().next()?;
    pricing.incumbent = best.value;
    Some(best.node)
}

/// Fills columns while their upper bound exceeds the incumbent (branch and bound without branching). `columns` are in descending
/// order of upper bound; the result is in descending order of value per price.
fn fill_candidates(
    state: &mut PlanState<'_, '_>,
    subproblem: &Subproblem,
    pricing: &Pricing,
    columns: &[(usize, f64)],
    binding: &[u32],
) -> Vec<PricedPattern> {
    let mut out: Vec<PricedPattern> = Vec::new();
    let mut is_crowded = false;
    // A pod whose dual price is zero still needs a node.
    let mut incumbent = f64::NEG_INFINITY;
    for (column, upper_bound) in columns.iter().copied() {
        if upper_bound <= incumbent || (out.len() >= FEW_CANDIDATES && is_crowded) {
            break;
        }
        // Evaluated once per column pool, not for each of its buckets.
        let accepted: Vec<bool> =
            (0..state.demand.column_pools.len()).map(|pool| subproblem.may_use(state, pool, column)).collect();
        let buckets = state.demand.open_buckets(|pool| accepted[pool]);
        is_crowded |= buckets.len() > MANY_BUCKETS;
        let host = state.daemon_host(column).clone();
        let bin = Bin { room: state.column_sets.room(column), host: &host, pattern: &[] };
        let prices = with_floor(subproblem.prices_on(state, &pricing.prices, column), &state.reference_prices);
        let power = state.strategy.cosine_power;
        let mut pattern = state.demand.fill(&bin, &prices, &buckets, Some(pricing.seed), binding, power);
        while !pattern.is_empty() && !min_values_hold(state, column, &pattern) {
            pattern.pop();
        }
        if pattern.is_empty() {
            continue;
        }
        let price = state.column_sets.columns[column].price;
        let value = state.demand.pattern_value(&pattern) / real(price.max(1));
        incumbent = value.max(incumbent);
        out.push(PricedPattern { value, price, node: PurchasedNode { column, pattern } });
    }
    out.sort_by(|a, b| b.value.total_cmp(&a.value).then(a.price.cmp(&b.price)).then(a.node.column.cmp(&b.node.column)));
    out
}

/// Prices to fill a node by: a resource that is free at the moment still counts, so that pods that use it are not left for last.
fn with_floor(prices: &[f64], reference: &[f64]) -> Vec<f64> {
    prices.iter().zip(reference).map(|(price, reference)| price.max(reference * REFERENCE_PRICE_SHARE)).collect()
}

/// Columns worth filling, each with the upper bound on the value of a pattern per price (the value of its whole capacity): the best
/// of each price band, within limits and `max_price`, that hold `need`. The cheapest column is admitted at any price. The columns are those of
/// a column set and of the NodePools that a function accepts.
fn promising_columns(
    state: &PlanState<'_, '_>,
    subproblem: &Subproblem,
    (column_set, accepts_pool): (usize, &dyn Fn(usize) -> bool),
    need: &[i64],
    prices: &Prices,
    max_price: f64,
) -> Vec<(usize, f64)> {
    let mut rated: Vec<(f64, i64, usize)> = Vec::new();
    let mut last_shape = usize::MAX;
    for column in state.column_sets.sets[column_set].bits.iter() {
        let price = state.column_sets.columns[column].price;
        let shape = state.column_sets.columns[column].shape;
        // Columns of a shape differ in zone and capacity type: the cheapest dominates, the first of equals.
        let of_shape = rated.last().filter(|_| shape == last_shape).map(|(_, price, _)| *price);
        if of_shape.is_some_and(|cheapest| price >= cheapest) {
            continue;
        }
        let room = state.column_sets.room(column);
        if !fits(need, room) || !state.affords(column) || !accepts_pool(state.column_sets.pool(column)) {
            continue;
        }
        let on_column = subproblem.prices_on(state, prices, column);
        let value = (dot(room, on_column) + state.demand.caps_value(on_column)) / real(price.max(1));
        if of_shape.is_some() {
            rated.pop();
        }
        rated.push((value, price, column));
        last_shape = shape;
    }
    let cheapest = rated.iter().map(|(_, price, _)| *price).min();
    let mut bands: Vec<Vec<(f64, i64, usize)>> = vec![Vec::new(); 65];
    for entry in rated.into_iter().filter(|(_, price, _)| real(*price) <= max_price || Some(*price) == cheapest) {
        let band = &mut bands[(64 - entry.1.leading_zeros()) as usize];
        let better = |a: &(f64, i64, usize), b: &(f64, i64, usize)| {
            b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)).then(a.2.cmp(&b.2)).is_lt()
        };
        let at = band.iter().position(|have| better(&entry, have)).unwrap_or(band.len());
        if at < COLUMNS_PER_BAND {
            band.insert(at, entry);
            band.truncate(COLUMNS_PER_BAND);
        }
    }
    let mut out: Vec<(usize, f64)> = bands.into_iter().flatten().map(|(value, _, column)| (column, value)).collect();
    let price = |column: usize| state.column_sets.columns[column].price;
    out.sort_by(|a, b| b.1.total_cmp(&a.1).then(price(a.0).cmp(&price(b.0))).then(a.0.cmp(&b.0)));
    out
}

/// How many times `each` goes into `value`.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
fn copies_within(value: f64, each: f64) -> usize {
    (value / each.max(1.0)) as usize
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::pack::purchase::{REPRICE_SHARE, buy};
    use crate::test_support::plan_stages::{instance, purchased, remaining, subproblem};
    use crate::test_support::{HOST, World, affinity};

    /// Cost in micro-USD per hour, nodes, and what remains.
    fn bought(pods: &[(&str, usize, &str, &str, Value)], pool: Value) -> (i64, Vec<String>, String) {
        let mut world = World::with_pools(&[("default", pool)]);
        for (name, count, cpu, memory, spec) in pods {
            world.pods(name, *count, &json!({}), cpu, memory, spec);
        }
        let mut instance = instance(&world);
        let mut state = instance.state(false);
        let mut subproblem = subproblem(&mut state);
        buy(&mut state, &mut subproblem, REPRICE_SHARE);
        (state.cost(), purchased(&state), remaining(&state))
    }

    #[test]
    fn pods_that_fill_nodes_exactly_are_bought_at_the_price_of_their_capacity() {
        let (cost, _, left) = bought(&[("p", 40, "1", "4Gi", json!({}))], json!({}));
        assert_eq!((cost, left.as_str()), (1_600_000, ""), "40 CPUs of a1");
    }

    #[test]
    fn pods_of_complementary_shape_are_mixed_on_a_node() {
        let pods = [("cpu", 8, "3", "4Gi", json!({})), ("memory", 8, "1", "12Gi", json!({}))];
        let (cost, nodes, left) = bought(&pods, json!({}));
        let separately = bought(&pods[..1], json!({})).0 + bought(&pods[1..], json!({})).0;
        assert!(nodes.iter().any(|node| node.contains("cpu") && node.contains("memory")), "{nodes:?}");
        assert!((1_280_000..separately).contains(&cost), "32 CPUs of a1 at least; {cost}, separately {separately}");
        assert_eq!(left, "");
    }

    #[test]
    fn the_most_constrained_column_pool_is_served_first_and_others_fill_up_its_nodes() {
        let gpu = json!({"requests": {"nvidia.com/gpu": "1"}});
        let (_, nodes, left) = bought(&[("p", 3, "1", "1Gi", json!({})), ("gpu", 1, "1", "1Gi", gpu)], json!({}));
        assert_eq!((nodes, left.as_str()), (vec!["g1.x4 in z-a: gpu 1, p 3".to_owned()], ""));
    }

    #[test]
    fn pods_whose_resources_have_no_price_get_nodes() {
        // Host caps price every node that the others need: CPU and memory are free.
        let labels = json!({"app": "apart"});
        let gpu = json!({"requests": {"nvidia.com/gpu": "1"}});
        for plain in [5, 50] {
            let arm = json!({"nodeSelector": {"kubernetes.io/arch": "arm64"}});
            let pods = [("gpu", 4, "1", "1Gi", gpu.clone()), ("plain", plain, "100m", "64Mi", arm)];
            let mut world = World::new();
            for (name, count, cpu, memory, spec) in &pods {
                world.pods(name, *count, &json!({}), cpu, memory, spec);
            }
            world.pods("apart", 4, &labels, "100m", "64Mi", &affinity("podAntiAffinity", HOST, &labels));
            let mut instance = instance(&world);
            let mut state = instance.state(false);
            let mut subproblem = subproblem(&mut state);
            buy(&mut state, &mut subproblem, REPRICE_SHARE);
            assert_eq!(remaining(&state), "", "{plain} plain pods");
        }
    }

    #[test]
    fn limits_end_the_purchase_and_the_rest_stays_in_the_demand() {
        let (cost, _, left) = bought(&[("p", 10, "1", "4Gi", json!({}))], json!({"limits": {"cpu": "8"}}));
        assert_eq!((cost, left.as_str()), (320_000, "p 2"));
    }

    #[test]
    fn pods_that_no_column_holds_stay_in_the_demand_and_do_not_influence_the_others() {
        let alone = bought(&[("p", 5, "1", "4Gi", json!({}))], json!({}));
        let pods = [("p", 5, "1", "4Gi", json!({})), ("huge", 2, "17", "1Gi", json!({}))];
        let (cost, nodes, left) = bought(&pods, json!({}));
        assert_eq!((cost, nodes, left.as_str()), (alone.0, alone.1, "huge 2"));
    }
}
