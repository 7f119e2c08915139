//! Behaviors 29 to 34: affinity and anti-affinity between pods.

use serde_json::{Value, json};

use crate::input::settings::PreferencePolicy;
use crate::test_support::{HOST, World, ZONE, affinity, reason, spread, types, zones};

#[test]
fn b29_zone_anti_affinity_places_one_pod_per_zone() {
    let labels = json!({"app": "p"});
    let mut world = World::new();
    world.pods("p", 4, &labels, "100m", "64Mi", &affinity("podAntiAffinity", ZONE, &labels));
    let plan = world.plan();
    assert_eq!((plan.new_nodes.len(), zones(&plan).len(), plan.unschedulable.len()), (3, 3, 1));
    assert!(reason(&plan).contains("anti-affinity on topology.kubernetes.io/zone"), "{}", reason(&plan));
}

#[test]
fn b30_anti_affinity_of_a_running_pod_excludes_a_new_pod() {
    let (guard, web) = (json!({"app": "guard"}), json!({"app": "web"}));
    for (key, elsewhere) in [(HOST, 1), (ZONE, 1)] {
        let mut world = World::new();
        world.node("n", "z-a", 8, &[(&guard, &affinity("podAntiAffinity", key, &web))]);
        world.pods("p", 1, &web, "100m", "64Mi", &json!({}));
        let plan = world.plan();
        assert_eq!(plan.new_nodes.len(), elsewhere, "{key}");
        assert!(key == HOST || zones(&plan).keys().all(|z| z != "z-a"));
    }
}

#[test]
fn b31_affinity_to_a_running_pod_uses_its_zone() {
    let db = json!({"app": "db"});
    let mut world = World::new();
    world.node("n", "z-b", 1, &[(&db, &json!({}))]);
    world.pods("p", 3, &json!({"app": "p"}), "1", "1Gi", &affinity("podAffinity", ZONE, &db));
    assert_eq!(zones(&world.plan()).keys().collect::<Vec<_>>(), ["z-b"]);
}

#[test]
fn affinity_to_pods_of_the_same_plan_follows_them() {
    let db = json!({"app": "db"});
    let mut world = World::new();
    world.pods("p", 3, &json!({"app": "p"}), "1", "1Gi", &affinity("podAffinity", ZONE, &db));
    assert!(reason(&world.plan()).contains("affinity"));
    world.pods("db", 1, &db, "1", "1Gi", &json!({"nodeSelector": {ZONE: "z-c"}}));
    assert_eq!(zones(&world.plan()).keys().collect::<Vec<_>>(), ["z-c"]);
    let mut world = World::new();
    world.pods("p", 3, &json!({"app": "p"}), "1", "1Gi", &affinity("podAffinity", HOST, &db));
    let plan = world.plan();
    assert!(reason(&plan).ends_with("no new node meets its pod affinity"), "{}", reason(&plan));
}

#[test]
fn b32_self_affinity_keeps_all_pods_in_one_zone_or_on_one_node() {
    let labels = json!({"app": "p"});
    let mut world = World::new();
    world.pods("p", 20, &labels, "1", "1Gi", &affinity("podAffinity", ZONE, &labels));
    let plan = world.plan();
    assert_eq!((zones(&plan).len(), plan.unschedulable.len()), (1, 0));
    let mut world = World::new();
    world.pods("p", 7, &labels, "1", "1Gi", &affinity("podAffinity", HOST, &labels));
    let plan = world.plan();
    assert_eq!((plan.new_nodes.len(), &*types(&plan)[0]), (1, "a1.x8"));
    let mut world = World::new();
    world.pods("p", 20, &labels, "1", "1Gi", &affinity("podAffinity", HOST, &labels));
    let plan = world.plan();
    assert_eq!((plan.new_nodes.len(), plan.unschedulable.len()), (1, 4), "no node holds more than 16");
}

#[test]
fn host_affinity_to_planned_pods_shares_their_nodes() {
    let db = json!({"app": "db"});
    let mut world = World::new();
    world.pods("db", 2, &db, "1", "1Gi", &affinity("podAntiAffinity", HOST, &db));
    world.pods("p", 20, &json!({"app": "p"}), "1", "1Gi", &affinity("podAffinity", HOST, &db));
    let plan = world.plan();
    assert_eq!((plan.new_nodes.len(), plan.unschedulable.len()), (2, 0));
}

#[test]
fn b33_namespaces_and_their_selector_are_respected() {
    let web = json!({"app": "web"});
    let away = |term: &Value| {
        let mut term = term.clone();
        term.as_object_mut().unwrap().extend([
            ("topologyKey".to_owned(), json!(HOST)),
            ("labelSelector".to_owned(), json!({"matchLabels": web})),
        ]);
        json!({"affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}})
    };
    for (term, nodes) in [
        (json!({}), 1),
        (json!({"namespaces": ["other"]}), 2),
        (json!({"namespaceSelector": {"matchLabels": {"tier": "x"}}}), 2),
        (json!({"namespaceSelector": {"matchLabels": {"tier": "y"}}}), 1),
        (json!({"namespaceSelector": {}}), 2),
    ] {
        let mut world = World::new();
        std::sync::Arc::make_mut(&mut world.problem.namespaces)
            .insert("other".into(), [("tier".to_owned(), "x".to_owned())].into());
        world.pods("p", 1, &json!({}), "100m", "64Mi", &away(&term));
        world.pods("web", 1, &web, "100m", "64Mi", &json!({"namespace": "other"}));
        assert_eq!(world.plan().new_nodes.len(), nodes, "{term}");
    }
}

#[test]
fn b34_match_label_keys_spread_each_revision_separately() {
    let mut world = World::new();
    for revision in ["v1", "v2"] {
        let labels = json!({"app": "p", "pod-template-hash": revision});
        let spec = spread(ZONE, &json!({"app": "p"}), &json!({"matchLabelKeys": ["pod-template-hash"]}));
        world.pods(revision, 3, &labels, "1", "1Gi", &spec);
    }
    let plan = world.plan();
    assert_eq!(zones(&plan).into_values().collect::<Vec<_>>(), [2, 2, 2]);
}

#[test]
fn preferences_are_relaxed_in_karpenters_order() {
    // Relaxed first: pod affinity, then pod anti-affinity, node affinity, soft spread; the last relaxation accepts an untolerated
    // PreferNoSchedule taint.
    let (db, web) = (json!({"app": "db"}), json!({"app": "web"}));
    let term = |labels: &Value| json!({"weight": 1, "podAffinityTerm": {"topologyKey": ZONE, "labelSelector": {"matchLabels": labels}}});
    let near = |labels: &Value| ("podAffinity", json!([term(labels)]));
    let away = |labels: &Value| ("podAntiAffinity", json!([term(labels)]));
    let in_zone = |zone: &str| {
        let wanted = json!([{"key": ZONE, "operator": "In", "values": [zone]}]);
        ("nodeAffinity", json!([{"weight": 1, "preference": {"matchExpressions": wanted}}]))
    };
    let soft = spread(ZONE, &web, &json!({"whenUnsatisfiable": "ScheduleAnyway"}));
    // A database runs in z-a.
    for (preferences, spread, want) in [
        (vec![near(&db)], false, vec!["z-a"]),
        (vec![near(&db), away(&db)], false, vec!["z-b", "z-c"]),
        (vec![near(&db), in_zone("z-c")], false, vec!["z-c"]),
        (vec![away(&db), in_zone("z-a")], false, vec!["z-a"]),
        (vec![in_zone("z-a")], true, vec!["z-a", "z-b", "z-c"]),
    ] {
        let mut world = World::new();
        world.node("n", "z-a", 1, &[(&db, &json!({}))]);
        let mut spec = if spread { soft.clone() } else { json!({}) };
        for (kind, terms) in preferences {
            spec["affinity"][kind]["preferredDuringSchedulingIgnoredDuringExecution"] = terms;
        }
        world.pods("p", 3, &web, "1", "1Gi", &spec);
        assert_eq!(zones(&world.plan()).into_keys().collect::<Vec<_>>(), want, "{spec}");
    }
}

#[test]
fn preferred_host_affinity_is_satisfied_where_there_is_room() {
    let db = json!({"app": "db"});
    let mut near = affinity("podAffinity", HOST, &db);
    let terms = near["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"].take();
    near["affinity"]["podAffinity"] = json!({"preferredDuringSchedulingIgnoredDuringExecution": [
        {"weight": 1, "podAffinityTerm": terms[0]}]});
    let mut world = World::new();
    world.node("a", "z-a", 8, &[]);
    world.node("b", "z-a", 4, &[(&db, &json!({}))]);
    world.pods("p", 5, &json!({"app": "p"}), "1", "1Gi", &near);
    let on = |world: &World| {
        let plan = world.plan();
        let mut counts: Vec<(usize, usize)> = plan.placements.iter().map(|p| (p.node, p.pods.len())).collect();
        counts.sort_unstable();
        counts
    };
    assert_eq!(on(&world), [(0, 2), (1, 3)], "three fit on its node");
    world.problem.settings.preference_policy = PreferencePolicy::Ignore;
    assert_eq!(on(&world), [(0, 5)]);
    // A new node that becomes empty is not purchased.
    let mut world = World::new();
    world.pods("db", 2, &db, "1", "1Gi", &affinity("podAntiAffinity", HOST, &db));
    world.pods("p", 2, &json!({"app": "p"}), "1", "1Gi", &near);
    let plan = world.plan();
    assert!(plan.new_nodes.iter().all(|node| node.pods.iter().any(|pod| *pod < 2)), "{:?}", plan.new_nodes);
}

#[test]
fn anti_affinity_that_selects_a_daemon_excludes_the_nodes_that_run_it() {
    for key in [HOST, ZONE] {
        let mut rule = affinity("podAntiAffinity", key, &json!({"daemon": "agent"}));
        rule["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][0]["namespaceSelector"] =
            json!({});
        let planned = |daemon: &Value| {
            let mut world = World::new();
            world.labeled_daemon("100m", &json!({"daemon": "agent"}), daemon);
            world.pods("p", 1, &json!({"app": "p"}), "1", "1Gi", &rule);
            world.plan()
        };
        let on_arm = planned(&json!({"nodeSelector": {"kubernetes.io/arch": "arm64"}}));
        assert_eq!(types(&on_arm), ["c1.x2"], "{key}: an Arm node would be cheaper");
        assert_eq!(planned(&json!({})).unschedulable.len(), 1, "{key}: every node runs the daemon");
    }
}

/// In one zone, a pod of much CPU and one of much memory share a node.
#[test]
fn workloads_that_must_be_in_one_zone_each_choose_the_same_one() {
    let mut world = World::new();
    for (name, cpu, memory) in [("cpu", "3", "1Gi"), ("memory", "900m", "15Gi")] {
        let labels = json!({"app": name});
        world.pods(name, 6, &labels, cpu, memory, &affinity("podAffinity", ZONE, &labels));
    }
    let plan = world.plan();
    assert_eq!((zones(&plan).len(), plan.unschedulable.len()), (1, 0));
    assert!(plan.optimal, "{:?} of at least {:?}", plan.cost, plan.lower_bound);
}
