#![allow(clippy::float_cmp, reason = "sums of whole numbers are exact")]
use serde_json::json;

use crate::state::demand::pattern::{add_pods, remove_pods};
use crate::test_support::plan_stages::{described, instance, item};
use crate::test_support::{HOST, World, affinity};

#[test]
fn items_of_one_size_without_host_rules_are_merged_until_split() {
    let mut world = World::new();
    world.pods("a", 2, &json!({"app": "a"}), "1", "1Gi", &json!({}));
    world.pods("b", 3, &json!({"app": "b"}), "1", "1Gi", &json!({"priority": 5}));
    world.pods("c", 1, &json!({}), "2", "1Gi", &json!({}));
    world.pods("d", 1, &json!({}), "1", "1Gi", &json!({"ports": [{"containerPort": 1, "hostPort": 80}]}));
    let mut instance = instance(&world);
    let mut state = instance.state(false);
    let mut counts: Vec<usize> = state.demand.items.iter().map(|item| item.remaining).collect();
    counts.sort_unstable();
    assert_eq!(counts, [1, 1, 5], "a and b are one item; d has a host port");
    let merged = item(&state, "a");
    state.demand.take(&[(merged, 3)], 1);
    let mut pattern = vec![(merged, 3)];
    state.demand.split_merged(std::iter::once(&mut pattern));
    assert_eq!(described(&state, &pattern), "a 2, b 1", "pods of the first group are placed first");
    assert_eq!((state.demand.items.len(), state.demand.remaining()), (4, 4));
}

#[test]
fn taking_and_restoring_a_pattern_are_inverse() {
    let mut world = World::new();
    world.pods("a", 4, &json!({}), "1", "1Gi", &json!({}));
    let mut instance = instance(&world);
    let mut state = instance.state(false);
    assert_eq!((state.demand.copies_of(&[(0, 2)]), state.demand.open_buckets(|_| true)), (2, vec![0]));
    state.demand.take(&[(0, 2)], 2);
    assert!(state.demand.is_empty() && state.demand.open_buckets(|_| true).is_empty());
    state.demand.restore(&[(0, 2)]);
    assert_eq!((state.demand.remaining(), state.demand.remaining_in(0)), (2, 2));
    assert_eq!(state.demand.open_buckets(|_| true), [0]);
    assert!(state.demand.open_buckets(|_| false).is_empty(), "only of accepted column pools");
}

#[test]
fn the_value_of_a_pod_is_the_dot_product_with_the_prices_of_its_column_pool() {
    let mut world = World::new();
    world.pods("a", 2, &json!({}), "1500m", "1Gi", &json!({}));
    let mut instance = instance(&world);
    let mut state = instance.state(false);
    state.demand.set_prices(0, vec![2.0, 0.0, 7.0, 0.0]);
    assert_eq!((state.demand.value(0), state.demand.pattern_value(&[(0, 2)])), (3007.0, 6014.0));
    assert_eq!(state.demand.value_at(0, &[1.0, 0.0, 0.0, 0.0]), 1500.0);
}

#[test]
fn followers_and_the_pods_they_follow_are_tied() {
    let mut world = World::new();
    world.pods("lead", 1, &json!({"app": "lead"}), "1", "1Gi", &json!({}));
    let follow = affinity("podAffinity", HOST, &json!({"app": "lead"}));
    world.pods("side", 1, &json!({}), "1", "1Gi", &follow);
    world.pods("other", 1, &json!({}), "1", "1Gi", &json!({}));
    let mut instance = instance(&world);
    let state = instance.state(false);
    assert_eq!(state.demand.followers(), [item(&state, "side")]);
    let tied = ["lead", "side", "other"].map(|name| state.demand.is_tied(item(&state, name)));
    assert_eq!(tied, [true, true, false]);
}

#[test]
fn patterns_keep_one_entry_per_item_and_none_of_zero() {
    let mut pattern = vec![(1, 2)];
    add_pods(&mut pattern, 1, 1);
    add_pods(&mut pattern, 4, 2);
    assert_eq!(pattern, [(1, 3), (4, 2)]);
    remove_pods(&mut pattern, 4, 2);
    assert_eq!(pattern, [(1, 3)]);
}
