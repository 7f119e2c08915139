//! Lower bound on plan cost: the value of the covering LP with capacities reduced to the reach of sums of requests.

use std::collections::{BTreeSet, HashMap};

use stowage_model::labels;

use crate::columns::bitset::Bits;
use crate::columns::dims::{fits, float, is_extended, real};
use crate::pricing::duals::{CoveringLp, LpDemand, Offer};
use crate::pricing::reach::{MAX_REQUESTS, Reach};
use crate::pricing::subproblem::Subproblem;
use crate::state::demand::ColumnPool;
use crate::state::plan_state::PlanState;

/// Column sets that the bound distinguishes, without size tiers, and besides one for each size tier.
const MAX_SETS: usize = 24;
const MAX_SETS_WITH_TIERS: usize = 16;
const MAX_COUPLINGS: usize = 6_000;
/// Reduced cost, as a share of the price, up to which column generation ignores a column.
const BOUND_TOLERANCE: f64 = 1e-9;

/// Purchases that cost less than this multiple of the bound are not improved.
const REACHED: f64 = 1.000_5;

/// A lower bound on the cost of new nodes.
#[derive(Clone, Debug, Default)]
pub(crate) struct LowerBound {
    /// Micro-USD per hour, as paid.
    pub cost: f64,
    /// Value of one pod of each item, in micro-USD per hour: the pods of no node are worth more than its price, and all pods are worth
    /// the bound. Empty if not known.
    pub values: Vec<f64>,
}

impl LowerBound {
    /// Whether the purchased nodes cost hardly more.
    pub fn is_reached(&self, state: &PlanState<'_, '_>) -> bool {
        real(state.cost()) <= self.cost * REACHED
    }
}

/// A lower bound, in micro-USD per hour as paid, on the cost of any plan of new nodes for the remaining demand, whatever the
/// weights of the NodePools and the domains assigned. `None` when the LP fails.
///
/// Every valid plan is a feasible solution of the LP: its nodes are columns bought; the pods of a group lie on columns that its
/// required node constraints allow and that hold the smallest pod of its size tier whole (with extended resources: the pod); for each resource the pods
/// on a node request at most its capacity, of which they use no more than sums of their requests reach; and pods with required
/// anti-affinity against each other use one unit each of a host cap. What the LP permits beyond that (split pods, ignored
/// domains) only makes it cheaper.
pub(crate) fn lower_bound(state: &mut PlanState<'_, '_>) -> Option<LowerBound> {
    let subproblem = Subproblem::relaxed(state);
    let unplaceable = subproblem.unplaceable(state);
    state.demand.take(&unplaceable, 1);
    state.demand.choose_host_caps(true);
    let reaches = reaches(state);
    let bounds = [false, true].map(|by_size| bound_of(state, &demands(state, &subproblem, by_size), &reaches));
    state.demand.restore(&unplaceable);
    // Tiers leave room for fewer other sets: either LP may be the stronger one.
    bounds.into_iter().flatten().reduce(|a, b| if b.cost > a.cost { b } else { a })
}

/// Whether an exact solution of the assigned demand is a lower bound too: no assignment, preference or rule restricts it that
/// another plan could do without, and comparison prices are paid prices.
pub(crate) fn is_exact_bound(state: &PlanState<'_, '_>) -> bool {
    let demand = &state.demand;
    let is_free = |item: usize| {
        let group = &demand.groups[demand.items[item].group];
        let over_hosts = group.class.spread.iter().any(|spread| *spread.key == *labels::HOSTNAME);
        group.host.wants.is_empty() && !over_hosts
    };
    let only = |pool: &ColumnPool| pool.pins.is_empty() && pool.levels.len() == 1;
    demand.is_empty()
        && state.placements.is_empty()
        && state.assignments.iter().all(|assignment| assignment.refused.is_none())
        && demand.column_pools.iter().all(only)
        && (0..demand.items.len()).all(is_free)
        && state.column_sets.columns.iter().all(|column| column.price == column.paid)
        && state.purchased.iter().all(|node| state.column_sets.columns[node.column].paid > 0)
}

/// The value of the LP; `None` when it fails.
fn bound_of<'d>(
    state: &PlanState<'_, '_>,
    demands: &'d [BoundDemand],
    reaches: &[Option<Reach>],
) -> Option<LowerBound> {
    let demand = |of: &'d BoundDemand| LpDemand { columns: &of.columns, amount: &of.amount, tier: of.tier };
    let sets: Vec<LpDemand<'_>> = demands.iter().map(demand).collect();
    let offer = Offer {
        // The paid price: the comparison price includes settings such as a node penalty.
        price: |column: usize| state.column_sets.columns[column].paid,
        room: |dim: usize, room: i64| {
            reaches.get(dim).and_then(Option::as_ref).map_or(room, |reach| reach.usable(room))
        },
    };
    let caps = state.demand.caps_per_node();
    let by_size = demands.iter().any(|of| of.tier > 0);
    let max_sets = if by_size { MAX_SETS_WITH_TIERS } else { MAX_SETS };
    let mut lp = CoveringLp::new(state.column_sets, &sets, &caps, (max_sets, MAX_COUPLINGS), offer);
    let amounts = demands.iter().enumerate().map(|(at, of)| (at, of.amount.as_slice()));
    let prices = lp.prices(amounts, BOUND_TOLERANCE)?;
    let mut values = vec![0.0; state.demand.items.len()];
    for (at, of) in demands.iter().enumerate() {
        let prices = lp.of_demand(&prices, at);
        of.items.iter().for_each(|item| values[*item] = state.demand.value_at(*item, prices));
    }
    // The LP is solved within a tolerance: scaled, the values are those of the bound.
    let worth = |at: usize| values[at] * float(state.demand.items[at].remaining);
    let total: f64 = (0..values.len()).map(worth).sum();
    if total > prices.bound {
        for value in &mut values {
            *value *= prices.bound / total;
        }
    }
    Some(LowerBound { cost: prices.bound, values })
}

/// A demand of the bound.
struct BoundDemand {
    columns: Bits,
    amount: Vec<i64>,
    tier: usize,
    items: Vec<usize>,
}

/// The remaining demand by the columns that it requires, and by size tier if `by_size`: a group may use every domain that its
/// requirements allow, because the assignment to domains is a choice of the planner.
fn demands(state: &PlanState<'_, '_>, subproblem: &Subproblem, by_size: bool) -> Vec<BoundDemand> {
    let demand = &state.demand;
    let dims = state.column_sets.dims.len() + demand.host_caps.len();
    // By the size of a pod that must be held whole (empty: any), and the required columns.
    let mut ids: HashMap<(&[i64], &Bits, usize), usize> = HashMap::new();
    let mut demands: Vec<(&[i64], &Bits, Vec<i64>, usize, Vec<usize>)> = Vec::new();
    for (at, item) in demand.items.iter().enumerate() {
        if item.remaining == 0 || subproblem.column_set(item.column_pool).is_none() {
            continue;
        }
        let group = &demand.groups[item.group];
        let whole: &[i64] = if is_extended(&group.need) { &group.need } else { &[] };
        let Some(required) = group.levels.last() else { continue };
        let tier = if by_size { demand.tiers.classes[demand.tiers.class_of[at]].tier } else { 0 };
        let id = *ids.entry((whole, required, tier)).or_insert_with(|| {
            demands.push((whole, required, vec![0; dims], tier, Vec::new()));
            demands.len() - 1
        });
        demand.add_amount(at, &mut demands[id].2);
        demands[id].4.push(at);
    }
    demands.sort_by(|a, b| b.2.cmp(&a.2).then(a.0.cmp(b.0)).then(a.3.cmp(&b.3)));
    let held = |whole: &[i64], required: &Bits, tier: usize| {
        let mut bits = required.clone();
        if by_size {
            bits.and(&demand.tiers.holding[tier]);
        }
        if !whole.is_empty() {
            bits.and(&state.column_sets.where_column(|column| fits(whole, state.column_sets.room(column))));
        }
        bits
    };
    let held = |(whole, required, amount, tier, items): (&[i64], &Bits, Vec<i64>, usize, Vec<usize>)| BoundDemand {
        columns: held(whole, required, tier),
        amount,
        tier,
        items,
    };
    demands.into_iter().map(held).collect()
}

/// The reach of the remaining requests, by resource.
fn reaches(state: &PlanState<'_, '_>) -> Vec<Option<Reach>> {
    let mut requests = vec![BTreeSet::new(); state.column_sets.dims.len()];
    let demand = &state.demand;
    for (at, _) in demand.items.iter().enumerate().filter(|(_, item)| item.remaining > 0) {
        for (of, need) in requests.iter_mut().zip(demand.need(at)) {
            if *need > 0 && of.len() <= MAX_REQUESTS {
                of.insert(*need);
            }
        }
    }
    requests.iter().map(Reach::of).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::pricing::lower_bound::lower_bound;
    use crate::test_support::plan_stages::instance;
    use crate::test_support::{HOST, World, affinity, spread};

    /// Bound of one deployment, in micro-USD per hour.
    #[allow(clippy::cast_possible_truncation)]
    fn bound(pods: usize, cpu: &str, memory: &str, spec: &Value) -> i64 {
        let mut world = World::new();
        world.pods("p", pods, &json!({"app": "p"}), cpu, memory, spec);
        let mut instance = instance(&world);
        let mut state = instance.state(false);
        let bound = lower_bound(&mut state).unwrap().cost.round() as i64;
        assert_eq!(state.demand.remaining(), pods, "the demand is unchanged");
        bound
    }

    #[test]
    fn pods_without_rules_cost_at_least_their_share_of_the_cheapest_nodes() {
        assert_eq!(bound(3, "1", "1Gi", &json!({})), 120_000, "3 CPUs at 40,000");
        assert_eq!(bound(2, "1", "8Gi", &json!({})), 128_000, "16 GiB of r1 at 8,000");
    }

    #[test]
    fn capacity_that_no_sum_of_requests_reaches_is_not_counted() {
        // Ten pods of 1500m fill a node of 16 CPUs up to 15, and no size is better.
        assert_eq!(bound(4, "1500m", "1Gi", &json!({})), 256_000);
    }

    #[test]
    fn pods_that_exclude_each_other_need_a_node_each_and_spread_pods_do_not() {
        let labels = json!({"app": "p"});
        assert_eq!(bound(3, "100m", "1Gi", &affinity("podAntiAffinity", HOST, &labels)), 240_000);
        assert_eq!(bound(3, "100m", "1Gi", &spread(HOST, &labels, &json!({}))), 24_000, "3 GiB of r1 at 8,000");
    }

    #[test]
    fn a_pod_with_an_extended_resource_is_held_whole() {
        // Four GPUs in one pod fit the larger type only; a share of the smaller type would cost less per CPU, not per GPU.
        let four = json!({"requests": {"nvidia.com/gpu": "4"}});
        assert_eq!(bound(1, "1", "1Gi", &four), 1_900_000);
        let one = json!({"requests": {"nvidia.com/gpu": "1"}});
        assert_eq!(bound(4, "1", "1Gi", &one), 1_900_000, "475,000 each on the larger type");
    }

    #[test]
    fn pods_that_no_column_holds_cost_nothing() {
        assert_eq!(bound(2, "100", "1Gi", &json!({})), 0);
    }
}
