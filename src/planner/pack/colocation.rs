//! Host affinity: nodes for pods that must share a node with other pods, purchased before the rest of the demand so that both find
//! room together.

use std::cmp::Reverse;

use crate::planner::pricing::subproblem::Subproblem;
use crate::planner::state::demand::pattern::{Bin, Pattern, add_pods};
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
    for (item, count) in added {
        add_pods(&mut pattern, item, count);
    }
    state.purchase(PurchasedNode { column, pattern }, 1);
    true
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::planner::pack::colocation::buy_for_affinity_groups;
    use crate::test_support::plan_stages::{instance, purchased, remaining, subproblem};
    use crate::test_support::planner::{HOST, World, affinity};

    fn bought(world: &World) -> (Vec<String>, String) {
        let mut instance = instance(world);
        let mut state = instance.state(false);
        let subproblem = subproblem(&mut state);
        buy_for_affinity_groups(&mut state, &subproblem);
        (purchased(&state), remaining(&state))
    }

    #[test]
    fn a_leader_and_its_followers_get_the_cheapest_node_that_holds_most_of_them() {
        let mut world = World::new();
        world.pods("lead", 2, &json!({"app": "lead"}), "1", "1Gi", &json!({}));
        world.pods("side", 3, &json!({}), "1", "1Gi", &affinity("podAffinity", HOST, &json!({"app": "lead"})));
        let (nodes, left) = bought(&world);
        assert_eq!((nodes, left.as_str()), (vec!["a1.x4 in z-a: lead 1, side 3".to_owned()], "lead 1"));
    }

    #[test]
    fn followers_beyond_one_node_get_a_node_with_another_leader() {
        let mut world = World::new();
        world.pods("lead", 2, &json!({"app": "lead"}), "1", "1Gi", &json!({}));
        world.pods("side", 20, &json!({}), "1", "1Gi", &affinity("podAffinity", HOST, &json!({"app": "lead"})));
        let (nodes, left) = bought(&world);
        let expected = ["a1.x16 in z-a: lead 1, side 15", "a1.x8 in z-a: lead 1, side 5"];
        assert_eq!((nodes, left.as_str()), (expected.map(str::to_owned).to_vec(), ""));
    }

    #[test]
    fn a_group_that_only_follows_itself_gets_one_node() {
        let labels = json!({"app": "club"});
        let together = affinity("podAffinity", HOST, &labels);
        let mut world = World::new();
        world.pods("club", 20, &labels, "1", "1Gi", &together);
        let (nodes, left) = bought(&world);
        assert_eq!((nodes, left.as_str()), (vec!["a1.x16 in z-a: club 16".to_owned()], "club 4"), "no second start");
        world.node("n", "z-a", 2, &[(&labels, &json!({}))]);
        assert!(bought(&world).0.is_empty(), "a member runs already");
    }

    #[test]
    fn followers_without_a_leader_are_left() {
        let mut world = World::new();
        world.pods("side", 1, &json!({}), "1", "1Gi", &affinity("podAffinity", HOST, &json!({"app": "lead"})));
        assert_eq!(bought(&world), (vec![], "side 1".to_owned()));
    }
}
