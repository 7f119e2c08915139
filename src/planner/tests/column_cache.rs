//! The column cache between plans.

use std::collections::BTreeSet;
use std::sync::Arc;

use serde_json::{Value, json};
use stowage_model::units::MicroUsd;

use crate::columns::table::{ColumnCache, ColumnTable, TableInputs};
use crate::test_support::{World, ZONE, proven};

#[test]
fn nodes_and_their_pods_are_no_input_of_the_column_table() {
    let mut world = World::new();
    let cache = ColumnCache::default();
    let empty = cache.column_table(TableInputs::of(&world.problem), |_| ColumnTable::default());
    world.node("n", ZONE, 4, &[(&json!({"app": "p"}), &json!({}))]);
    let with_node = cache.column_table(TableInputs::of(&world.problem), |_| panic!("the table is cached"));
    assert!(Arc::ptr_eq(&empty, &with_node));
    world.daemon("1", &json!({}));
    let with_daemon = cache.column_table(TableInputs::of(&world.problem), |_| ColumnTable::default());
    assert!(!Arc::ptr_eq(&empty, &with_daemon));
}

#[test]
fn the_column_cache_is_reused_and_does_not_change_plans() {
    let team = json!({"requirements": [{"key": "team", "operator": "Exists"}]});
    let catalog = crate::test_support::catalog();
    let with = |pools: &[(&str, Value)], change: &dyn Fn(&mut World)| {
        let mut world = World::with_pools(pools);
        for pool in &mut world.problem.pools {
            pool.catalog = Arc::clone(&catalog);
        }
        world.pods("p", 5, &json!({"app": "p"}), "1", "3Gi", &json!({}));
        change(&mut world);
        world
    };
    let plain = [("default", json!({}))];
    let pods = |spec: Value| move |world: &mut World| world.pods("q", 2, &json!({"app": "q"}), "1", "1Gi", &spec);
    let worlds = [
        with(&plain, &|_| {}),
        with(&plain, &pods(json!({"requests": {"nvidia.com/gpu": "1"}}))),
        with(&plain, &|world| world.daemon("1500m", &json!({}))),
        with(&plain, &|world| world.daemon("500m", &json!({"nodeSelector": {"kubernetes.io/arch": "arm64"}}))),
        with(&plain, &|world| world.problem.settings.node_penalty = MicroUsd(500_000)),
        with(&plain, &|world| world.problem.pools[0].catalog = crate::test_support::catalog()),
        with(&plain, &|world| world.pods("q", 40, &json!({}), "2", "1Gi", &json!({}))),
        with(&[("default", json!({"taints": [{"key": "t", "effect": "NoSchedule"}]}))], &|_| {}),
        with(
            &[("default", json!({"taints": [{"key": "t", "effect": "PreferNoSchedule"}]})), ("other", json!({}))],
            &|_| {},
        ),
        with(&[("default", json!({"labels": {"team": "a"}}))], &pods(json!({"nodeSelector": {"team": "a"}}))),
        with(&[("default", team.clone())], &pods(json!({"nodeSelector": {"team": "a"}}))),
        with(&[("default", team)], &pods(json!({"nodeSelector": {"team": "b"}}))),
        with(
            &[(
                "default",
                json!({"requirements": [{"key": "kubernetes.io/arch", "operator": "In", "values": ["arm64"]}]}),
            )],
            &|_| {},
        ),
        with(&[("default", json!({})), ("second", json!({}))], &|_| {}),
    ];
    let alone: Vec<String> = worlds.iter().map(|world| format!("{:?}", world.plan())).collect();
    let distinct: BTreeSet<&String> = alone.iter().collect();
    assert!(distinct.len() > 9, "distinct plans: {}", distinct.len());
    let cache = ColumnCache::default();
    let order = (0..worlds.len()).chain((0..worlds.len()).rev()).chain((0..40).map(|at| at * 5 % worlds.len()));
    for at in order {
        let problem = &worlds[at].problem;
        let cached = || cache.column_table(TableInputs::of(problem), |_| panic!("world {at}: its table is not cached"));
        assert_eq!(format!("{:?}", proven(problem, &cache)), alone[at], "world {at}");
        let table = cached();
        assert_eq!(format!("{:?}", proven(problem, &cache)), alone[at], "world {at}, again");
        assert!(Arc::ptr_eq(&table, &cached()), "world {at}: the second plan made another table");
    }
}
