//! Lower bound on plan cost: the value of the covering LP with capacities reduced to the reach of sums of requests.

use std::collections::{BTreeSet, HashMap};

use crate::planner::columns::bitset::Bits;
use crate::planner::columns::dims::{fits, is_extended};
use crate::planner::pricing::duals::{CoveringLp, Offer};
use crate::planner::pricing::reach::{MAX_REQUESTS, Reach};
use crate::planner::pricing::subproblem::Subproblem;
use crate::planner::state::plan_state::PlanState;

/// Column sets that the bound distinguishes.
const MAX_BOUND_SETS: usize = 24;
/// Reduced cost, as a share of the price, up to which column generation ignores a column.
const BOUND_TOLERANCE: f64 = 1e-9;

/// A lower bound, in micro-USD per hour as paid, on the cost of any plan of new nodes for the remaining demand, whatever the
/// weights of the NodePools and the domains assigned. `None` when the LP fails.
///
/// Every valid plan is a feasible solution of the LP: its nodes are columns bought; the pods of a group lie on columns that its
/// required node constraints allow (with extended resources: on columns that hold one such pod whole); for each resource the pods
/// on a node request at most its capacity, of which they use no more than sums of their requests reach; and pods with required
/// anti-affinity against each other use one unit each of a host cap. What the LP permits beyond that (split pods, ignored
/// domains) only makes it cheaper.
pub(crate) fn lower_bound(state: &mut PlanState<'_, '_>) -> Option<f64> {
    let subproblem = Subproblem::relaxed(state);
    let unplaceable = subproblem.unplaceable(state);
    state.demand.take(&unplaceable, 1);
    state.demand.choose_host_caps(true);
    let demands = demands(state, &subproblem);
    state.demand.restore(&unplaceable);
    let sets: Vec<(&Bits, &[i64])> = demands.iter().map(|(bits, amount)| (bits, amount.as_slice())).collect();
    let reaches = reaches(state);
    let offer = Offer {
        // The paid price: the comparison price includes settings such as a node penalty.
        price: |column: usize| state.column_sets.columns[column].paid,
        room: |dim: usize, room: i64| {
            reaches.get(dim).and_then(Option::as_ref).map_or(room, |reach| reach.usable(room))
        },
    };
    let caps = state.demand.caps_per_node();
    let mut lp = CoveringLp::new(state.column_sets, &sets, &caps, MAX_BOUND_SETS, offer);
    let amounts = demands.iter().enumerate().map(|(at, (_, amount))| (at, amount.as_slice()));
    lp.prices(amounts, BOUND_TOLERANCE).map(|prices| prices.bound)
}

/// The remaining demand by the columns that it requires: a group may use every domain its requirements allow, because the
/// assignment to domains is a choice of the planner.
fn demands(state: &PlanState<'_, '_>, subproblem: &Subproblem) -> Vec<(Bits, Vec<i64>)> {
    let demand = &state.demand;
    let dims = state.column_sets.dims.len() + demand.host_caps.len();
    // By the size of a pod that must be held whole (empty: any), and the required columns.
    let mut ids: HashMap<(&[i64], &Bits), usize> = HashMap::new();
    let mut demands: Vec<(&[i64], &Bits, Vec<i64>)> = Vec::new();
    for (at, item) in demand.items.iter().enumerate() {
        if item.remaining == 0 || subproblem.column_set(item.column_pool).is_none() {
            continue;
        }
        let group = &demand.groups[item.group];
        let whole: &[i64] = if is_extended(&group.need) { &group.need } else { &[] };
        let Some(required) = group.levels.last() else { continue };
        let id = *ids.entry((whole, required)).or_insert_with(|| {
            demands.push((whole, required, vec![0; dims]));
            demands.len() - 1
        });
        demand.add_amount(at, &mut demands[id].2);
    }
    demands.sort_by(|a, b| b.2.cmp(&a.2).then(a.0.cmp(b.0)));
    let held = |whole: &[i64], required: &Bits| {
        let mut bits = required.clone();
        if !whole.is_empty() {
            bits.and(&state.column_sets.where_column(|column| fits(whole, state.column_sets.room(column))));
        }
        bits
    };
    demands.into_iter().map(|(whole, required, amount)| (held(whole, required), amount)).collect()
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
