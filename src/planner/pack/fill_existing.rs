//! Existing nodes: filled before anything is purchased, because their capacity is paid for.

use std::collections::HashMap;

use crate::columns::dims::PODS;
use crate::state::demand::pattern::Bin;
use crate::state::plan_state::PlanState;

/// First fit over existing nodes, in their order, each filled greedily at the reference prices: first with pods that no node can be bought
/// for, such as pods of a zone that no NodePool allows. `active` is by column pool.
pub(crate) fn fill_existing(state: &mut PlanState<'_, '_>, active: &[bool]) {
    let has_column = |pool: usize| {
        let columns = state.demand.column_pools[pool].levels.last();
        columns.is_some_and(|id| !state.column_sets.sets[*id].bits.is_empty())
    };
    let bound: Vec<bool> = active.iter().enumerate().map(|(pool, active)| *active && !has_column(pool)).collect();
    if bound.contains(&true) && bound != active {
        fill(state, &bound);
    }
    fill(state, active);
}

fn fill(state: &mut PlanState<'_, '_>, active: &[bool]) {
    // Admission by column pool and kind of node: equal for all nodes of a kind.
    let mut admitted: HashMap<(usize, usize), bool> = HashMap::new();
    for at in 0..state.existing.len() {
        if state.existing[at].free[PODS] <= 0 || state.demand.is_empty() {
            continue;
        }
        let node = &state.existing[at];
        let accepts: Vec<bool> = (0..state.demand.column_pools.len())
            .map(|pool| {
                active[pool]
                    && *admitted.entry((pool, node.kind)).or_insert_with(|| node.state.admits(state.class(pool)))
                    && state.demand.column_pools[pool]
                        .pins
                        .iter()
                        .all(|(key, domain)| state.topology.in_domain(node, *key, *domain))
            })
            .collect();
        let buckets = state.demand.open_buckets(|pool| accepts[pool]);
        if buckets.is_empty() {
            continue;
        }
        let bin = Bin { room: &node.free, host: &node.host, pattern: &[] };
        let pattern = state.demand.fill(&bin, &state.reference_prices, &buckets, None, &[], 0);
        if pattern.is_empty() {
            continue;
        }
        state.demand.take(&pattern, 1);
        let node = &mut state.existing[at];
        for (item, count) in &pattern {
            for _ in 0..*count {
                node.host.add(state.demand.host(*item));
            }
            for (free, need) in node.free.iter_mut().zip(state.demand.need(*item)) {
                *free -= need * i64::try_from(*count).unwrap_or(i64::MAX);
            }
        }
        state.placements.push((at, pattern));
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use stowage_model::units::MicroUsd;

    use crate::pack::fill_existing::fill_existing;
    use crate::test_support::plan_stages::{active, instance, placed, remaining};
    use crate::test_support::{HOST, World, affinity};

    #[test]
    fn nodes_are_filled_in_order_and_their_capacity_is_used_up() {
        let mut world = World::new();
        world.node("late", "z-a", 8, &[]).initialized = false;
        world.node("b", "z-a", 2, &[]);
        world.node("a", "z-a", 2, &[(&json!({}), &json!({}))]);
        world.pods("p", 20, &json!({}), "1", "1Gi", &json!({}));
        let mut instance = instance(&world);
        let mut state = instance.state(false);
        let active = active(&state);
        fill_existing(&mut state, &active);
        assert_eq!(placed(&state), ["a: p 1", "b: p 2", "late: p 8"], "initialized first, then by name");
        assert_eq!(remaining(&state), "p 9");
        assert!(state.existing.iter().all(|node| node.free[0] == 0));
        fill_existing(&mut state, &active);
        assert_eq!(placed(&state).len(), 3, "full");
    }

    #[test]
    fn nodes_that_consolidation_removes_first_are_filled_last() {
        let mut world = World::new();
        let one = (&json!({}), &json!({}));
        for (name, price, running) in
            [("a-empty", 900, 0), ("b-light", 600, 1), ("c-full", 800, 3), ("d-foreign", 0, 0)]
        {
            world.node(name, "z-a", 4, &vec![one; running]).price = MicroUsd(price);
        }
        world.pods("p", 7, &json!({}), "1", "1Gi", &json!({}));
        let mut instance = instance(&world);
        let mut state = instance.state(false);
        let active = active(&state);
        fill_existing(&mut state, &active);
        assert_eq!(placed(&state), ["d-foreign: p 4", "c-full: p 1", "b-light: p 2"]);
    }

    #[test]
    fn only_active_pods_that_a_node_admits_are_placed() {
        let mut world = World::new();
        world.node("n", "z-a", 8, &[]);
        world.pods(
            "elsewhere",
            1,
            &json!({}),
            "1",
            "1Gi",
            &json!({"nodeSelector": {"topology.kubernetes.io/zone": "z-b"}}),
        );
        world.pods("here", 1, &json!({}), "1", "1Gi", &json!({"nodeSelector": {"topology.kubernetes.io/zone": "z-a"}}));
        let mut instance = instance(&world);
        let mut state = instance.state(false);
        fill_existing(&mut state, &[false, false]);
        assert!(placed(&state).is_empty());
        fill_existing(&mut state, &[true, true]);
        assert_eq!(placed(&state), ["n: here 1"]);
    }

    #[test]
    fn pods_that_no_node_can_be_bought_for_come_first() {
        let in_zone = |zone: &str| json!({"nodeSelector": {"topology.kubernetes.io/zone": zone}});
        let only = json!([{"key": "topology.kubernetes.io/zone", "operator": "In", "values": ["z-a"]}]);
        let mut world = World::with_pools(&[("default", json!({"requirements": only}))]);
        world.node("n", "z-b", 2, &[]);
        world.pods("large", 1, &json!({}), "2", "1Gi", &json!({}));
        world.pods("small", 1, &json!({}), "1", "1Gi", &in_zone("z-b"));
        let mut instance = instance(&world);
        let mut state = instance.state(false);
        let active = active(&state);
        fill_existing(&mut state, &active);
        assert_eq!((placed(&state), remaining(&state)), (vec!["n: small 1".to_owned()], "large 1".to_owned()));
    }

    #[test]
    fn pods_that_a_running_pod_excludes_go_elsewhere() {
        let labels = json!({"app": "p"});
        let apart = affinity("podAntiAffinity", HOST, &labels);
        let mut world = World::new();
        world.node("a", "z-a", 8, &[(&labels, &apart)]);
        world.node("b", "z-a", 8, &[]);
        world.pods("p", 3, &labels, "1", "1Gi", &apart);
        let mut instance = instance(&world);
        let mut state = instance.state(false);
        let active = active(&state);
        fill_existing(&mut state, &active);
        assert_eq!((placed(&state), remaining(&state)), (vec!["b: p 1".to_owned()], "p 2".to_owned()));
    }
}
