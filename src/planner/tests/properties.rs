//! Properties of every plan.

use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use serde_json::{Value, json};
use stowage_model::labels::USD_PER_HOUR;
use stowage_model::units::{Bytes, MicroUsd};

use crate::columns::table::ColumnCache;
use crate::output::plan::Plan;
use crate::test_support::{HOST, World, ZONE, affinity, proven, spread};
use crate::tests::volumes;

#[derive(Clone, Debug)]
struct Workload {
    replicas: usize,
    cpu: usize,
    memory: usize,
    rule: usize,
    namespace: usize,
}

/// Kinds of rules that refer to their own workload only.
const OWN: usize = 16;
/// The same kinds, and rules that refer to other workloads, or to labels that few nodes have.
const ALL: usize = 22;

fn workload(rules: usize) -> impl Strategy<Value = Workload> {
    (1_usize..9, 0_usize..5, 0_usize..5, 0..rules, 0_usize..2)
        .prop_map(|(replicas, cpu, memory, rule, namespace)| Workload { replicas, cpu, memory, rule, namespace })
}

/// Variations of the cluster.
#[derive(Clone, Copy, Debug, Default)]
struct Features {
    /// A NodePool for each zone, of which one is limited.
    pools: bool,
    daemon: bool,
    /// A node without zone, and a cordoned one.
    nodes: bool,
    priorities: bool,
}

fn features() -> impl Strategy<Value = Features> {
    any::<[bool; 4]>().prop_map(|[pools, daemon, nodes, priorities]| Features { pools, daemon, nodes, priorities })
}

fn world(workloads: &[Workload], nodes: usize, limit: Option<i64>, features: Features) -> World {
    let limit = limit.map(|limit| {
        let by_price = limit % 2 == 0;
        if by_price { json!({USD_PER_HOUR: format!("{}m", limit * 40)}) } else { json!({"cpu": limit.to_string()}) }
    });
    let pool = limit.map_or(json!({}), |limit| json!({"limits": limit}));
    let mut world = World::default();
    if features.pools {
        for (at, zone) in crate::test_support::ZONES.iter().enumerate() {
            let mut pool = if at == 0 { pool.clone() } else { json!({}) };
            pool["requirements"] = json!([{"key": ZONE, "operator": "In", "values": [zone]}]);
            world.pool(&format!("pool-{zone}"), &pool);
        }
    } else {
        world.pool("default", &pool);
    }
    volumes::waiting_class(&mut world);
    if features.daemon {
        world.daemon("100m", &json!({"nodeSelector": {"kubernetes.io/arch": "amd64"}}));
    }
    if features.nodes {
        let labels = json!({"app": "app-0"});
        world.node("bare", "z-a", 3, &[(&labels, &json!({}))]).labels.remove(ZONE);
        world.node("cordoned", "z-b", 8, &[(&labels, &json!({}))]).schedulable = false;
    }
    for at in 0..nodes {
        let labels = json!({"app": format!("app-{at}")});
        let rule = affinity("podAntiAffinity", HOST, &labels);
        let spec = if at % 2 == 0 { json!({}) } else { rule };
        world.node(&format!("n{at}"), crate::test_support::ZONES[at % 3], 4, &[(&labels, &spec)]);
    }
    for (at, w) in workloads.iter().enumerate() {
        let labels = json!({"app": format!("app-{at}")});
        let other = json!({"app": format!("app-{}", (at + 1) % workloads.len())});
        let mut spec: Value = match w.rule {
            0 => spread(ZONE, &labels, &json!({})),
            1 => spread(HOST, &labels, &json!({})),
            2 => affinity("podAntiAffinity", HOST, &labels),
            3 => affinity("podAntiAffinity", ZONE, &labels),
            4 => affinity("podAffinity", ZONE, &labels),
            5 => affinity("podAffinity", HOST, &labels),
            6 => json!({"nodeSelector": {"kubernetes.io/arch": "arm64"}}),
            7 => json!({"nodeSelector": {ZONE: "z-b"}}),
            8 => json!({"requests": {"nvidia.com/gpu": "1"}}),
            9 => json!({"ports": [{"containerPort": 80, "hostPort": 80}]}),
            10 => spread(ZONE, &labels, &json!({"whenUnsatisfiable": "ScheduleAnyway"})),
            11 => spread(HOST, &labels, &json!({"whenUnsatisfiable": "ScheduleAnyway"})),
            12 => {
                let mut spec = spread(ZONE, &labels, &json!({}));
                spec["requests"] = json!({"nvidia.com/gpu": "1"});
                spec
            }
            16 => affinity("podAffinity", ZONE, &other),
            17 => affinity("podAntiAffinity", ZONE, &other),
            18 => affinity("podAntiAffinity", "rack", &labels),
            19 => spread("rack", &labels, &json!({"whenUnsatisfiable": "ScheduleAnyway"})),
            20 => spread(ZONE, &labels, &json!({"minDomains": 3, "maxSkew": 2})),
            21 => json!({"affinity": {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution":
                [{"weight": 1, "podAffinityTerm": {"topologyKey": ZONE, "labelSelector": {"matchLabels": other}}}]}}}),
            _ => json!({}),
        };
        if features.priorities {
            spec["priority"] = json!(at % 3);
        }
        spec["namespace"] = json!(["default", "other"][w.namespace]);
        let cpu = ["100m", "250m", "1", "1900m", "5"][w.cpu];
        let memory = ["64Mi", "1Gi", "3Gi", "7Gi", "30Gi"][w.memory];
        if ![14, 15].contains(&w.rule) {
            world.pods(&format!("w{at}"), w.replicas, &labels, cpu, memory, &spec);
            continue;
        }
        // A volume for each pod: bound in alternating zones, or provisioned where its pod is placed.
        for replica in 0..w.replicas {
            let name = format!("data-{at}-{replica}");
            if w.rule == 14 {
                volumes::bound(&mut world, &name, &volumes::in_zone(crate::test_support::ZONES[replica % 3]));
            } else {
                volumes::unbound(&mut world, &name);
            }
            spec["volumes"] = volumes::claims(&[&name])["volumes"].clone();
            spec["namespace"] = json!("default");
            world.pods(&format!("w{at}-{replica}"), 1, &labels, cpu, memory, &spec);
        }
    }
    world
}

/// 256 cases, the same in every run, so that failures are reproducible; PROPTEST_CASES and PROPTEST_RNG_SEED try others.
fn config() -> ProptestConfig {
    let mut config = ProptestConfig { failure_persistence: None, ..ProptestConfig::default() };
    config.max_global_rejects = config.cases;
    if config.rng_seed == RngSeed::Random {
        config.rng_seed = RngSeed::Fixed(11);
    }
    config
}

/// The plan in terms of names, so that indexes don't matter.
fn named(world: &World, plan: &Plan) -> Vec<(String, Vec<String>)> {
    let keys = |pods: &[usize]| {
        let mut keys: Vec<String> = pods.iter().map(|p| world.problem.pods[*p].key.to_string()).collect();
        keys.sort();
        keys
    };
    let mut out: Vec<(String, Vec<String>)> = plan
        .new_nodes
        .iter()
        .map(|n| (format!("{} {}", n.choices[0].instance_type.name, n.choices[0].zone), keys(&n.pods)))
        .chain(plan.placements.iter().map(|p| (world.problem.nodes[p.node].name.to_string(), keys(&p.pods))))
        .chain(plan.unschedulable.iter().map(|u| (u.reason.clone(), keys(&[u.pod]))))
        .collect();
    out.sort();
    out
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn plans_satisfy_all_rules_and_are_deterministic(
        workloads in prop::collection::vec(workload(ALL), 1..14), nodes in 0_usize..5,
        limit in prop::option::of(0_i64..40), features in features(), seed in any::<u64>(),
    ) {
        let mut world = world(&workloads, nodes, limit, features);
        let plan = world.plan();
        prop_assert_eq!(&plan, &proven(&world.problem, &ColumnCache::default()), "without a cache");
        prop_assert_eq!(&plan, &proven(&world.problem, &world.column_cache), "with the cache");
        if let (Some(bound), true) = (plan.lower_bound, plan.unschedulable.is_empty()) {
            prop_assert!(bound <= plan.cost, "bound {:?} over cost {:?}", bound, plan.cost);
        }
        let before = named(&world, &plan);
        // The order of the input does not change the plan.
        let len = world.problem.pods.len() as u64;
        let mut at = seed;
        for i in (1..world.problem.pods.len()).rev() {
            at = at.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(len | 1);
            world.problem.pods.swap(i, usize::try_from((at >> 33) % (i as u64 + 1)).unwrap());
        }
        world.problem.nodes.reverse();
        world.problem.pools.reverse();
        let after = world.plan();
        prop_assert_eq!(before, named(&world, &after));
    }

    #[test]
    fn without_limits_only_impossible_pods_are_unschedulable(
        workloads in prop::collection::vec(workload(OWN), 1..10),
    ) {
        let world = world(&workloads, 0, None, Features::default());
        let plan = world.plan();
        for left in &plan.unschedulable {
            let class = &world.problem.pods[left.pod].class;
            // Larger than any node, more than zones for zone anti-affinity, company too large for one node, no GPU zone,
            // or an Arm or GPU node too small for the memory.
            let excuse = class.requests.memory > Bytes::from_gib(24)
                || class.anti_affinity.iter().any(|t| &*t.key == ZONE)
                || class.affinity.iter().any(|t| &*t.key == HOST)
                || class.requests.get("nvidia.com/gpu") > 0;
            prop_assert!(excuse, "{}: {}", world.problem.pods[left.pod].key, left.reason);
        }
    }

    #[test]
    fn removing_a_pod_raises_the_cost_at_most_by_the_documented_bound(
        workloads in prop::collection::vec(workload(OWN), 1..10), nodes in 0_usize..3, which in any::<prop::sample::Index>(),
    ) {
        let mut world = world(&workloads, nodes, None, Features::default());
        let before = world.plan();
        world.problem.pods.remove(which.index(world.problem.pods.len()));
        let after = world.plan();
        // Without the pod, its followers are unschedulable, and pods may be placed whose spread counted its zone.
        prop_assume!(after.unschedulable.len() == before.unschedulable.len());
        prop_assert!(within(before.cost, after.cost), "{:?} became {:?}", before.cost, after.cost);
    }

    #[test]
    fn adding_an_instance_type_raises_the_cost_at_most_by_the_bound(
        workloads in prop::collection::vec(workload(OWN), 1..10), which in any::<prop::sample::Index>(),
    ) {
        let mut world = world(&workloads, 0, None, Features::default());
        let after = world.plan();
        let mut fewer = (*world.problem.pools[0].catalog).clone();
        fewer.instance_types.remove(which.index(fewer.instance_types.len()));
        world.problem.pools[0].catalog = std::sync::Arc::new(fewer);
        let before = world.plan();
        prop_assume!(after.unschedulable.len() == before.unschedulable.len());
        prop_assert!(within(before.cost, after.cost), "{:?} became {:?}", before.cost, after.cost);
    }
}

/// The solver is a heuristic: fewer pods or more instance types may raise the cost by this percentage. See docs/performance.md.
const SLACK_PERCENT: i64 = 50;

fn within(before: MicroUsd, after: MicroUsd) -> bool {
    after.0 * 100 <= before.0 * (100 + SLACK_PERCENT)
}
