//! Host affinity: nodes for pods that must share a node with other pods, purchased before the rest of the demand so that both find
//! room together.

use std::cmp::Reverse;

use crate::planner::pricing::subproblem::Subproblem;
use crate::planner::state::demand::{Bin, Pattern, add_pods};
use crate::planner::state::plan_state::{PlanState, PurchasedNode};

/// Purchases nodes for followers, i.e. items with required host affinity: a node per pod of a leader that they can follow, or one
/// node for a group that only its own pods satisfy.
pub(crate) fn buy_for_affinity_groups(state: &mut PlanState<'_, '_>, subproblem: &Subproblem) {
    for follower in state.demand.followers().to_vec() {
        while state.demand.items[follower].remaining > 0 {
            let rules = state.demand.host(follower);
            let satisfies_itself = rules.wants.iter().all(|(_, own)| *own);
            let leader = (0..state.demand.items.len()).find(|other| {
                let other_rules = state.demand.host(*other);
                *other != follower
                    && state.demand.items[*other].remaining > 0
                    && other_rules.wants.is_empty()
                    && rules.wants.iter().all(|(counter, _)| other_rules.raises.contains(counter))
            });
            let start = match leader {
                Some(leader) => (leader, 1),
                // As in kube-scheduler, the first pod of such a group needs no match, but only while nothing matches anywhere.
                None if satisfies_itself && !leader_is_placed(state, follower) => (follower, 1),
                None => break,
            };
            if !buy_for_followers(state, subproblem, follower, start) {
                break;
            }
        }
    }
}

/// Whether a pod that this item must follow runs or is planned already.
fn leader_is_placed(state: &PlanState<'_, '_>, follower: usize) -> bool {
    let planned = |counter: u32| {
        let patterns = state.purchased.iter().flat_map(|node| &node.pattern);
        patterns.into_iter().any(|(item, _)| state.demand.host(*item).raises.contains(&counter))
    };
    let wants = &state.demand.host(follower).wants;
    wants.iter().any(|(counter, _)| state.running_counters.contains(counter) || planned(*counter))
}

/// Purchases the node that holds `start` and the most followers; of equals, the cheapest. False when there is none.
fn buy_for_followers(
    state: &mut PlanState<'_, '_>,
    subproblem: &Subproblem,
    follower: usize,
    start: (usize, usize),
) -> bool {
    let set_of = |item: usize| subproblem.column_set(state.demand.items[item].column_pool);
    let (Some(own), Some(first)) = (set_of(follower), set_of(start.0)) else {
        return false;
    };
    let mut bits = state.column_sets.sets[own].bits.clone();
    bits.and(&state.column_sets.sets[first].bits);
    let mut best: Option<(usize, Reverse<i64>, usize, Pattern)> = None;
    let mut last_shape: Option<usize> = None;
    for column in bits.iter() {
        // One offering per shape: they differ in zone and capacity type only.
        let shape = state.column_sets.columns[column].shape;
        if last_shape == Some(shape) || !state.affords(column) {
            continue;
        }
        last_shape = Some(shape);
        let host = state.daemon_host(column).clone();
        let bin = Bin { room: state.column_sets.room(column), host: &host, pattern: &[start] };
        if !state.demand.is_feasible(&bin) {
            continue;
        }
        let buckets = {
            let sets = &state.column_sets.sets;
            let holds = |pool: usize| subproblem.column_set(pool).is_some_and(|id| sets[id].bits.contains(column));
            state.demand.open_buckets(holds)
        };
        let added = state.demand.fill_followers(&bin, &buckets);
        let followers: usize = added.iter().map(|(_, count)| *count).sum();
        let price = Reverse(state.column_sets.columns[column].price);
        if best.as_ref().is_none_or(|(have, cost, ..)| (followers, price) > (*have, *cost)) {
            best = Some((followers, price, column, added));
        }
    }
    let Some((followers, _, column, added)) = best else {
        return false;
    };
    if followers == 0 && start.0 != follower {
        return false;
    }
    let mut pattern = vec![start];
    added.into_iter().for_each(|(item, count)| add_pods(&mut pattern, item, count));
    state.purchase(PurchasedNode { column, pattern }, 1);
    true
}
