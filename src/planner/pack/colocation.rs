//! Host affinity: nodes for pods that must share a node with other pods, purchased before the rest of the demand so that both find
//! room together.

use std::cmp::Reverse;
use std::collections::VecDeque;

use crate::pricing::subproblem::Subproblem;
use crate::state::demand::pattern::{Bin, Pattern, add_pods};
use crate::state::plan_state::{PlanState, PurchasedNode};

/// Chains of leaders that are tried for one follower.
const MAX_CHAINS: usize = 16;
/// Groups in a chain, the follower included.
const MAX_CHAIN: usize = 12;

/// Purchases nodes for followers, i.e. items with required host affinity: a node per pod of a leader that they can follow, or one
/// node for a group that only its own pods satisfy. A leader may follow others itself.
pub(crate) fn buy_for_affinity_groups(state: &mut PlanState<'_, '_>, subproblem: &Subproblem) {
    for follower in state.demand.followers().to_vec() {
        while state.demand.items[follower].remaining > 0 {
            let (wanted, own) = state.demand.host(follower).wants[0];
            let chains = chains(state, follower);
            let mut bought = chains.iter().any(|chain| buy_for_followers(state, subproblem, follower, chain));
            // As in kube-scheduler, the first pod of such a group needs no match, but only while nothing matches anywhere.
            if !bought && chains.is_empty() && own && !is_placed(state, wanted) {
                bought = buy_for_followers(state, subproblem, follower, &[(follower, 1)]);
            }
            if !bought {
                break;
            }
        }
    }
}

/// Ways to put a pod that this follower follows on a new node: a leader without required host affinity, or one whose own pods satisfy it,
/// first, then each of its followers up to the leader of this one. Short chains come first.
fn chains(state: &PlanState<'_, '_>, follower: usize) -> Vec<Pattern> {
    let mut out = Vec::new();
    let mut open: VecDeque<Vec<usize>> = VecDeque::from([vec![follower]]);
    while let Some(path) = open.pop_front() {
        let last = path[path.len() - 1];
        let Some((wanted, _)) = state.demand.host(last).wants.first() else { continue };
        for leader in 0..state.demand.items.len() {
            let rules = state.demand.host(leader);
            if state.demand.items[leader].remaining == 0 || path.contains(&leader) || !rules.raises.contains(wanted) {
                continue;
            }
            let starts = rules.wants.first().is_none_or(|(counter, own)| *own && !is_placed(state, *counter));
            let longer: Vec<usize> = path.iter().copied().chain([leader]).collect();
            if starts {
                out.push(longer[1..].iter().rev().map(|item| (*item, 1)).collect());
            } else if longer.len() < MAX_CHAIN && open.len() < MAX_CHAINS {
                open.push_back(longer);
            }
            if out.len() == MAX_CHAINS {
                return out;
            }
        }
    }
    out
}

/// Whether a pod that raises this counter runs or is planned already.
fn is_placed(state: &PlanState<'_, '_>, counter: u32) -> bool {
    let new = state.purchased.iter().map(|node| &node.pattern);
    let placed = new.chain(state.placements.iter().map(|(_, pattern)| pattern));
    state.running_counters.contains(&counter)
        || placed.flatten().any(|(item, _)| state.demand.host(*item).raises.contains(&counter))
}

/// Purchases the node that holds `start` and the most followers; of equals, the cheapest. False when there is none.
fn buy_for_followers(
    state: &mut PlanState<'_, '_>,
    subproblem: &Subproblem,
    follower: usize,
    start: &[(usize, usize)],
) -> bool {
    let set_of = |item: usize| subproblem.column_set(state.demand.items[item].column_pool);
    let Some(own) = set_of(follower) else { return false };
    let mut bits = state.column_sets.sets[own].bits.clone();
    for (item, _) in start {
        let Some(set) = set_of(*item) else { return false };
        bits.and(&state.column_sets.sets[set].bits);
    }
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
        let bin = Bin { room: state.column_sets.room(column), host: &host, pattern: start };
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
        if !added.iter().chain(start).any(|(item, _)| *item == follower) {
            continue;
        }
        let price = Reverse(state.column_sets.columns[column].price);
        if best.as_ref().is_none_or(|(have, cost, ..)| (followers, price) > (*have, *cost)) {
            best = Some((followers, price, column, added));
        }
    }
    let Some((_, _, column, added)) = best else {
        return false;
    };
    let mut pattern = start.to_vec();
    for (item, count) in added {
        add_pods(&mut pattern, item, count);
    }
    state.purchase(PurchasedNode { column, pattern }, 1);
    true
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::pack::colocation::buy_for_affinity_groups;
    use crate::test_support::plan_stages::{instance, purchased, remaining, subproblem};
    use crate::test_support::{HOST, World, affinity};

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
