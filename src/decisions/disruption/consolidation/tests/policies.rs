//! Policies of a NodePool beyond the objective: `Balanced`, spot to spot, and rows of replacements.

use stowage_model::offering::{CapacityType, Catalog};

use super::*;

fn policy(name: &str) -> Value {
    json!({"spec": {"disruption": {"consolidationPolicy": name}}})
}

/// The moves of a decision: those that pay, and the others.
fn priced(cluster: &SmallCluster, memory: &mut Memory, spot_to_spot: bool) -> Priced {
    let facts = cluster.facts();
    let request = Request { pools: &cluster.pools, facts: &facts, most: 1_000, now: NOW };
    let consolidation = Consolidation::begin(&cluster.state, &Holds::default(), memory, request);
    let mut simulator = cluster.simulator();
    if spot_to_spot {
        simulator.allow_spot_to_spot();
    }
    let decision = consolidation.decide(memory, 0, |without| Some(simulator.simulate(without, Effort::Quick)), NOW);
    if decision.claims.is_empty() {
        return Priced::default();
    }
    let (_, moves) = simulator.moves(&decision.claims.into_iter().collect(), Effort::Normal);
    consolidation.priced(moves)
}

/// The removed nodes, with the scores of their moves.
fn removed(cluster: &SmallCluster) -> Vec<String> {
    let describe = |one: &Move| {
        let claims: Vec<&str> = one.sources.keys().map(String::as_str).collect();
        let scores = one.scores.iter().map(|(pool, score)| format!(" {pool} {:.2}", score.value()));
        format!("{}{}", claims.join("+"), scores.collect::<String>())
    };
    priced(cluster, &mut Memory::default(), false).pay.iter().map(describe).collect()
}

/// Karpenter core reference 4.11: the share of the cost by the share of the evictions is at least a half.
#[test]
fn balanced_removes_a_node_whose_evictions_are_worth_its_share_of_the_cost() {
    // `a` costs a fifth of the NodePool.
    for (on_a, on_b, of_balanced, of_other) in [
        (1, 7, &["a p 1.00"][..], &["a"][..]),
        // Five of ten units for a fifth of the cost, which is not enough.
        (4, 4, &[], &["a"]),
        (4, 5, &[], &["a"]),
        // Two of five units: exactly a half.
        (1, 2, &["a p 0.50"], &["a"]),
        (1, 1, &[], &["a"]),
    ] {
        for (name, expected) in [("Balanced", of_balanced), ("WhenEmptyOrUnderutilized", of_other)] {
            let mut pool = policy(name);
            json_patch::merge(&mut pool, &no_purchases());
            let mut cluster = SmallCluster::new(&[("p", pool)]);
            cluster.add_node("a", "p", "small/on-demand");
            cluster.add_node("b", "p", "large/on-demand");
            // There is no room for those of `b` on `a`.
            for (node, pods, cpu) in [("a", on_a, 400 / on_a), ("b", on_b, 7_600 / on_b)] {
                for n in 0..pods {
                    cluster.add_pod(&format!("{node}{n}"), Some(node), &format!("{cpu}m"), &json!({}));
                }
            }
            assert_eq!(removed(&cluster), expected, "{name}, {on_a} and {on_b} pods");
        }
    }
}

#[test]
fn the_score_counts_what_pods_cost_and_new_nodes_but_not_the_age_of_pods() {
    let young = json!({"metadata": {"creationTimestamp": NOW.rfc3339()}});
    let cost = |cost: &str| json!({"metadata": {"annotations": {(labels::POD_DELETION_COST): cost}}});
    let (free, dear, ordinary) = (cost("-2147483648"), cost("268435456"), json!({}));
    for (case, patch, with_room, expected) in [
        // Four fifths of the cost, for two of eight units.
        ("an ordinary pod", &ordinary, true, "a p 3.20"),
        ("a young pod", &young, true, "a p 3.20"),
        ("a pod that is free of charge", &free, true, "a p 5.60"),
        ("a pod of three units", &dear, true, "a p 2.00"),
        // A new spot node costs a tenth.
        ("a new node", &ordinary, false, "a p 2.88"),
    ] {
        let mut cluster = SmallCluster::new(&[("p", policy("Balanced"))]);
        cluster.add_node("a", "p", "large/on-demand");
        cluster.add_pod("x", Some("a"), if with_room { "100m" } else { "1500m" }, patch);
        cluster.add_node("b", "p", "small/on-demand");
        for n in 0..5 {
            let protected = json!({"metadata": {"annotations": {(labels::DO_NOT_DISRUPT): "true"}}});
            cluster.add_pod(&format!("on-b{n}"), Some("b"), "300m", &protected);
        }
        assert_eq!(removed(&cluster), [expected], "{case}");
    }
}

/// Every move under `Balanced` has the score that is computed from the cluster alone, and a saving.
#[test]
fn no_move_under_balanced_has_a_score_below_a_half() {
    let (rng, mut moves, mut fewer) = (&mut fastrand::Rng::with_seed(11), 0, 0);
    for round in 0..60 {
        let build = |name: &str, rng: &mut fastrand::Rng| {
            let mut cluster = SmallCluster::new(&[("p", policy(name)), ("q", policy("WhenEmptyOrUnderutilized"))]);
            for n in 0..rng.usize(2..=7) {
                let (claim, large) = (format!("c{n}"), rng.bool());
                let pool = if rng.u8(..4) == 0 { "q" } else { "p" };
                cluster.add_node(&claim, pool, if large { "large/on-demand" } else { "small/on-demand" });
                for pod in 0..rng.usize(0..6) {
                    cluster.add_pod(&format!("{claim}-{pod}"), Some(&claim), "300m", &json!({}));
                }
            }
            cluster
        };
        let seed = rng.u64(..);
        let cluster = build("Balanced", &mut fastrand::Rng::with_seed(seed));
        let nodes = cluster.facts().nodes;
        let of_p = || nodes.iter().filter(|node| node.pool == "p");
        let units = |claim: &str| 1.0 + f64::from(u32::try_from(cluster.state.pods_on(claim).count()).unwrap());
        let usd = |price: MicroUsd| price.usd();
        let cost: f64 = of_p().map(|node| usd(node.price)).sum();
        let all: f64 = of_p().map(|node| units(&node.claim)).sum();
        let found = priced(&cluster, &mut Memory::default(), false).pay;
        for one in &found {
            let price = |pool: Option<&str>| -> f64 {
                let of_pool = one.sources.values().filter(|source| pool.is_none_or(|pool| source.pool == pool));
                of_pool.map(|source| usd(source.price)).sum()
            };
            let of_p = one.sources.values().filter(|source| source.pool == "p");
            let evicted: f64 = of_p.map(|source| units(&source.claim)).sum();
            assert_eq!(one.scores.len(), usize::from(evicted > 0.0), "round {round}");
            if evicted > 0.0 {
                let saving = usd(one.saving) * price(Some("p")) / price(None);
                let score = (saving / cost) / (evicted / all);
                assert!(score >= 0.499 && (score - one.scores["p"].value()).abs() < 0.001, "round {round}: {score}");
                moves += 1;
            }
        }
        let count = |moves: &[Move]| moves.iter().map(|one| one.sources.len()).sum::<usize>();
        let others = build("WhenEmptyOrUnderutilized", &mut fastrand::Rng::with_seed(seed));
        fewer += usize::from(count(&found) < count(&priced(&others, &mut Memory::default(), false).pay));
    }
    assert!(moves > 20 && fewer > 3, "{moves} moves, fewer in {fewer} rounds");
}

/// The only move of a node may look good together with others, and not by itself.
#[test]
fn the_nodes_of_a_move_that_does_not_pay_by_itself_are_tried_again_later() {
    let mut cluster = SmallCluster::new(&[("p", policy("Balanced"))]);
    cluster.add_node("a", "p", "large/on-demand");
    cluster.add_pod("x", Some("a"), "1500m", &json!({}));
    let mut memory = Memory::default();
    let pay = priced(&cluster, &mut memory, false).pay;
    let why = Blocker::SavesTooLittle { saving: MicroUsd(1), needed: MicroUsd(2) };
    memory.dropped(&[(pay[0].clone(), why.clone())], NOW);
    let of_a = |memory: &mut Memory, after: u64| {
        verdicts(&cluster, memory, &Holds::default(), 9, NOW + Duration::from_secs(after)).remove(0).blockers
    };
    assert_eq!(of_a(&mut memory, 59), [why]);
    assert_eq!(of_a(&mut memory, 60), []);
}

/// The moves of the removal of these nodes, judged by themselves.
fn judged(cluster: &SmallCluster, claims: &[&str]) -> Priced {
    let facts = cluster.facts();
    let request = Request { pools: &cluster.pools, facts: &facts, most: 9, now: NOW };
    let consolidation = Consolidation::begin(&cluster.state, &Holds::default(), &mut Memory::default(), request);
    let without = claims.iter().map(|claim| (*claim).to_owned()).collect();
    let mut simulator = cluster.simulator();
    simulator.allow_spot_to_spot();
    consolidation.priced(simulator.moves(&without, Effort::Normal).1)
}

#[test]
fn a_move_is_judged_by_itself_and_for_each_pool_that_is_balanced() {
    // `a` is small and has four pods; its NodePool has another node, which costs four times as much and has one pod.
    let build = |policy_of_c: &str| {
        let mut cluster = SmallCluster::new(&[("p", policy("Balanced")), ("q", policy(policy_of_c))]);
        cluster.add_node("a", "p", "small/on-demand");
        for n in 0..4 {
            cluster.add_pod(&format!("a{n}"), Some("a"), "300m", &json!({}));
        }
        cluster.add_node("b", "p", "large/on-demand");
        cluster.add_pod("full", Some("b"), "7900m", &json!({}));
        cluster.add_node("c", "q", "large/on-demand");
        cluster.add_pod("on-c", Some("c"), "200m", &json!({}));
        cluster
    };
    let too_little = |saving, needed| Blocker::SavesTooLittle { saving: MicroUsd(saving), needed: MicroUsd(needed) };
    let why = |priced: &Priced| priced.others.iter().map(|(_, why)| why.clone()).collect::<Vec<_>>();
    // 60,000 of 500,000, for five of seven units.
    let mut cluster = build("Balanced");
    remove(&mut cluster, "c");
    let alone = judged(&cluster, &["a"]);
    assert!(alone.pay.is_empty() && matches!(&why(&alone)[..], [Blocker::SavesTooLittle { .. }]), "{:?}", why(&alone));
    // With `c` it saves 460,000, of which a fifth is for `p`: too little for its five units, whatever the policy of `q` is.
    for policy_of_c in ["Balanced", "WhenEmptyOrUnderutilized"] {
        let together = judged(&build(policy_of_c), &["a", "c"]);
        assert!(together.pay.is_empty(), "{policy_of_c}");
        assert_eq!(why(&together), [too_little(460_000, 892_860)], "{policy_of_c}");
    }
}

#[test]
fn alternatives_that_the_launch_may_not_use_do_not_count() {
    // The node costs 42,000. With the least saving, 16 types are cheap enough, or 14 and two that are only a little cheaper.
    for (prices, pays) in [
        ((0..16).map(|n| 35_000 + n).collect::<Vec<i64>>(), true),
        ((0..14).map(|n| 35_000 + n).chain([41_800, 41_900]).collect(), false),
    ] {
        let mut cluster = spot_market(&prices);
        let mut types = cluster.pools[0].catalog.instance_types.clone();
        types.retain(|known| &*known.name != "large");
        let mut offering = objects::offering("z", 42_000);
        offering.capacity_type = CapacityType::Spot;
        let size = [("cpu", "8"), ("memory", "32Gi"), ("pods", "110")];
        types.push(Arc::new(objects::instance_type("large", &size, vec![offering])));
        cluster.pools[0].catalog = Arc::new(Catalog { region: "r".into(), instance_types: types });
        cluster.add_node("a", "p", "large/spot");
        cluster.add_pod("x", Some("a"), "1500m", &json!({}));
        let Priced { pay, others } = judged(&cluster, &["a"]);
        assert_eq!(pay.len(), usize::from(pays), "{prices:?}");
        let why: Vec<Blocker> = others.into_iter().map(|(_, why)| why).collect();
        assert_eq!(why, if pays { vec![] } else { vec![Blocker::Obstacle(Obstacle::FewAlternatives(14))] });
    }
}

/// A cluster whose pools buy spot instances of these types: 2 CPUs each, at these prices in micro-USD per hour, and large ones.
fn spot_market(prices: &[i64]) -> SmallCluster {
    let mut cluster = SmallCluster::new(&[("p", json!({}))]);
    let mut types = cluster.pools[0].catalog.instance_types.clone();
    types.retain(|instance_type| &*instance_type.name == "large");
    for (n, price) in prices.iter().enumerate() {
        let mut offering = objects::offering("z", *price);
        offering.capacity_type = CapacityType::Spot;
        let size = [("cpu", "2"), ("memory", "8Gi"), ("pods", "110")];
        types.push(Arc::new(objects::instance_type(&format!("t{n:02}"), &size, vec![offering])));
    }
    cluster.pools[0].catalog = Arc::new(Catalog { region: "r".into(), instance_types: types });
    cluster
}

#[test]
fn b53_spot_replaces_spot_with_fifteen_cheaper_types_where_the_gate_is_on() {
    let near = |count: i64| (0..count).map(|n| 40_000 + 100 * n).collect::<Vec<_>>();
    for (case, prices, is_on, removed, blocker) in [
        ("the gate is off", near(20), false, false, "spot_to_spot"),
        ("enough", near(20), true, true, ""),
        ("just enough", near(15), true, true, ""),
        ("too few", near(14), true, false, "few_alternatives"),
        ("too few near the lowest price", [near(14), vec![100_000; 9]].concat(), true, false, "few_alternatives"),
        ("none is cheaper", vec![160_000; 20], true, false, "few_alternatives"),
    ] {
        let mut cluster = spot_market(&prices);
        cluster.add_node("a", "p", "large/spot");
        cluster.add_pod("x", Some("a"), "1500m", &json!({}));
        let mut memory = Memory::default();
        let Priced { pay, others } = priced(&cluster, &mut memory, is_on);
        assert_eq!((pay.len(), others.len()), (usize::from(removed), 0), "{case}");
        if let [one] = &pay[..] {
            let types = one.plan.new_nodes[0].choices.iter().map(|choice| choice.instance_type.name.to_string());
            let expected: Vec<String> = (0..15).map(|n| format!("t{n:02}")).collect();
            assert_eq!(types.collect::<Vec<_>>(), expected, "{case}: the cheapest");
        }
        let found = memory.found.get("a").map_or("", Blocker::kind);
        assert_eq!(found, blocker, "{case}");
    }
}

#[test]
fn spot_nodes_that_share_a_new_spot_node_need_no_alternatives() {
    let mut cluster = spot_market(&[40_000, 41_000]);
    for name in ["a", "b"] {
        cluster.add_node(name, "p", "large/spot");
        cluster.add_pod(&format!("on-{name}"), Some(name), "900m", &json!({}));
    }
    let pay = priced(&cluster, &mut Memory::default(), true).pay;
    assert_eq!(pay.iter().map(|one| one.sources.len()).collect::<Vec<_>>(), [2]);
    assert_eq!(pay[0].plan.new_nodes[0].choices.len(), 2);
    // One goes to the other's room.
    let pay = priced(&cluster, &mut Memory::default(), false).pay;
    assert_eq!(pay.iter().map(|one| (one.sources.len(), one.plan.new_nodes.len())).collect::<Vec<_>>(), [(1, 0)]);
}

#[test]
fn min_values_keep_more_alternatives_of_a_spot_node() {
    for (least, expected) in [(Some(18), 18), (Some(3), 15), (None, 15)] {
        let prices: Vec<i64> = (0..25).map(|n| 40_000 + 100 * n).collect();
        let mut cluster = spot_market(&prices);
        if let Some(least) = least {
            let requirement = json!({"key": labels::INSTANCE_TYPE, "operator": "Exists", "minValues": least});
            let patch = json!({"spec": {"template": {"spec": {"requirements": [requirement]}}}});
            let pool = SmallCluster::new(&[("p", patch)]).pools.remove(0).pool;
            cluster.state.apply_pool((*pool).clone());
            cluster.pools[0].pool = pool;
        }
        cluster.add_node("a", "p", "large/spot");
        cluster.add_pod("x", Some("a"), "1500m", &json!({}));
        let pay = priced(&cluster, &mut Memory::default(), true).pay;
        let types: BTreeSet<_> = pay[0].plan.new_nodes[0].choices.iter().map(|c| &c.instance_type.name).collect();
        assert_eq!(types.len(), expected, "{least:?}");
    }
}

/// Two types whose prices change places after every replacement.
#[test]
fn an_oscillating_price_ends_after_two_replacements() {
    let minute = Duration::from_mins(1);
    let catalog = |first: i64, second: i64| {
        let size = [("cpu", "2"), ("memory", "8Gi"), ("pods", "110")];
        let types = [("small", first), ("large", second)];
        let types = types.map(|(name, price)| objects::instance_type(name, &size, vec![objects::offering("z", price)]));
        Arc::new(Catalog { region: "r".into(), instance_types: types.into_iter().map(Arc::new).collect() })
    };
    let mut cluster = SmallCluster::new(&[("p", json!({}))]);
    cluster.add_node("n0", "p", "small/on-demand");
    cluster.add_pod("x", Some("n0"), "1500m", &json!({}));
    let (mut memory, mut generations) = (Memory::default(), Vec::new());
    for at in 0..6 {
        cluster.pools[0].catalog = if at % 2 == 0 { catalog(400_000, 100_000) } else { catalog(100_000, 400_000) };
        let Priced { pay, .. } = priced(&cluster, &mut memory, false);
        let [one] = &pay[..] else { break };
        let (old, new) = (format!("n{at}"), format!("n{}", at + 1));
        let generation = one.generation(NOW);
        generations.push(generation);
        let offering = format!("{}/on-demand", one.plan.new_nodes[0].choices[0].instance_type.name);
        remove(&mut cluster, &old);
        cluster.add_node(&new, "p", &offering);
        let annotations = json!({(labels::REPLACEMENT_GENERATION): generation.to_string()});
        let young = json!({"annotations": annotations, "creationTimestamp": (NOW - minute * 30).rfc3339()});
        patch_claim(&mut cluster, &new, &json!({"metadata": young}));
        cluster.add_pod(&format!("x{at}"), Some(&new), "1500m", &json!({}));
    }
    assert_eq!(generations, [1, 2], "{:?}", verdicts(&cluster, &mut memory, &Holds::default(), 9, NOW));
    let until = (NOW + minute * 30).rfc3339();
    let Some(why) = memory.found.get("n2") else { panic!("{memory:?}") };
    assert_eq!(why.kind(), "repeated_replacement");
    assert!(why.to_string().contains(&until), "{why}");
    // It is removed where its pod has room, and when it is old enough.
    cluster.add_node("room", "p", "large/on-demand");
    cluster.add_pod(
        "stays",
        Some("room"),
        "300m",
        &json!({"metadata": {"annotations": {(labels::DO_NOT_DISRUPT): "true"}}}),
    );
    assert_eq!(removed(&cluster), ["n2"]);
    remove(&mut cluster, "room");
    let old = json!({"creationTimestamp": (NOW - minute * 60).rfc3339()});
    patch_claim(&mut cluster, "n2", &json!({"metadata": old}));
    let pay = priced(&cluster, &mut Memory::default(), false).pay;
    assert_eq!(pay.iter().map(|one| one.generation(NOW)).collect::<Vec<_>>(), [1]);
}
