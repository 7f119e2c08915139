//! Comparison with the optimum, on instances small enough to enumerate every division of the pods over nodes.

use serde_json::{Value, json};
use stowage_model::offering::CapacityType;
use stowage_model::resources::Resources;

use crate::input::pod::PodEntry;
use crate::test_support::{HOST, World, affinity, catalog};

/// Number of instances.
const CASES: u64 = 400;

/// A small demand of `least` to `least` + 2 pods without rules about zones: one workload of up to `replicas`
/// pods after the other, drawn from `seed`.
fn world(seed: u64, least: usize, replicas: usize) -> World {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut draw = |below: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from((state >> 33) % below as u64).unwrap()
    };
    let mut world = World::new();
    let mut left = least + draw(3);
    let mut number = 0;
    while left > 0 {
        let replicas = left.min(1 + draw(replicas));
        let labels = json!({"app": format!("app-{number}")});
        let spec: Value = match draw(6) {
            0 => affinity("podAntiAffinity", HOST, &labels),
            1 => json!({"nodeSelector": {"kubernetes.io/arch": "arm64"}}),
            2 => json!({"requests": {"nvidia.com/gpu": "1"}}),
            _ => json!({}),
        };
        let cpu = ["300m", "700m", "1500m", "2300m", "3900m"][draw(5)];
        let memory = ["512Mi", "1500Mi", "4Gi", "9Gi", "15Gi"][draw(5)];
        world.pods(&format!("w{number}"), replicas, &labels, cpu, memory, &spec);
        left -= replicas;
        number += 1;
    }
    world
}

/// Price of the cheapest node that holds all of these pods, if any does.
fn cheapest(pods: &[&PodEntry]) -> Option<i64> {
    let mut sum = Resources::default();
    for pod in pods {
        sum.add(&pod.class.requests);
    }
    let apart = pods.iter().enumerate().any(|(at, pod)| {
        pod.class.anti_affinity.iter().any(|term| {
            pods.iter().enumerate().any(|(other, company)| {
                at != other && term.selector.as_ref().is_some_and(|selector| selector.selects(&company.labels))
            })
        })
    });
    if apart {
        return None;
    }
    let catalog = catalog();
    let holds = catalog.instance_types.iter().filter(|found| {
        sum.iter().all(|(name, amount)| amount <= found.allocatable.get(name))
            && pods.iter().all(|pod| pod.class.accepts_node(&found.labels, ""))
    });
    let offerings = holds.flat_map(|found| found.offerings.iter());
    offerings.filter(|offering| offering.capacity_type == CapacityType::OnDemand).map(|offering| offering.price.0).min()
}

/// Minimum cost of nodes for all of these pods, by enumeration of their divisions.
fn optimum(pods: &[PodEntry]) -> Option<i64> {
    let full = (1_usize << pods.len()) - 1;
    let price: Vec<Option<i64>> = (0..=full)
        .map(|set| {
            let members: Vec<&PodEntry> =
                pods.iter().enumerate().filter(|(at, _)| set >> at & 1 == 1).map(|(_, pod)| pod).collect();
            cheapest(&members)
        })
        .collect();
    let mut best: Vec<Option<i64>> = vec![None; full + 1];
    best[0] = Some(0);
    for set in 1..=full {
        let lowest = set & set.wrapping_neg();
        let mut part = set;
        while part > 0 {
            if part & lowest != 0
                && let (Some(price), Some(rest)) = (price[part], best[set & !part])
                && best[set].is_none_or(|have| price + rest < have)
            {
                best[set] = Some(price + rest);
            }
            part = (part - 1) & set;
        }
    }
    best[full]
}

#[test]
fn small_plans_are_optimal() {
    let mut compared = 0;
    for seed in 0..CASES {
        let world = world(seed, 3 + usize::try_from(seed).unwrap() % 4, 4);
        let plan = world.plan();
        let best = optimum(&world.problem.pods);
        assert_eq!(plan.unschedulable.is_empty(), best.is_some(), "seed {seed}");
        let Some(best) = best else { continue };
        assert_eq!(plan.cost.0, best, "seed {seed}: {plan:?}");
        if let Some(bound) = plan.lower_bound {
            assert!(bound.0 <= best, "seed {seed}: the bound {} is above the optimum, {best}", bound.0);
        }
        compared += 1;
    }
    assert!(compared > 300, "only {compared} instances can be planned");
}

#[test]
fn medium_plans_are_near_the_optimum() {
    let mut over: Vec<i64> = Vec::new();
    for seed in 0..CASES / 8 {
        // Every pod has a different size: too many states for the exact solver.
        let world = world(seed, 11, 1);
        let plan = world.plan();
        let Some(best) = optimum(&world.problem.pods) else { continue };
        assert!(plan.cost.0 >= best, "seed {seed}: {} is below the optimum, {best}", plan.cost.0);
        assert!(plan.lower_bound.is_none_or(|bound| bound.0 <= best), "seed {seed}: the bound is above the optimum");
        over.push((plan.cost.0 - best) * 10_000 / best);
    }
    over.sort_unstable();
    let len = i64::try_from(over.len()).unwrap();
    let optimal = over.iter().filter(|gap| **gap == 0).count();
    let at = |percent: usize| over[(over.len() - 1) * percent / 100];
    let mean = over.iter().sum::<i64>() / len;
    println!(
        "{len} cases: {optimal} optimal; over the optimum, hundredths of a percent: mean {mean}, 90th {}, 99th {}, worst {}",
        at(90),
        at(99),
        at(100)
    );
    assert!(len > 25, "only {len} instances can be planned");
    assert!(mean <= MEAN, "mean {mean}");
    assert!(at(100) <= WORST, "worst {}", at(100));
}

/// Maximum mean distance from the optimum, in hundredths of a percent.
const MEAN: i64 = 500;
/// Maximum distance from the optimum, in hundredths of a percent.
const WORST: i64 = 4_500;
