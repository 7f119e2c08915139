//! Plans with pods that the planner panics over, or that the API server rejects NodeClaims for.

use serde_json::{Value, json};
use stowage_cloud::Cloud;
use stowage_model::labels;
use stowage_planner::{ColumnCache, Problem};
use stowage_test_objects::{claim, conditions_true, launched, node, node_pool, pod};

use super::write_tests::{pending, world};
use super::*;
use crate::controllers::caps::Capped;
use crate::decisions::placement::mode::PlacementMode;
use crate::state::plan_record::PlanRecord;
use crate::test_support::failures::World;
use crate::test_support::kubernetes::Fault;
use crate::test_support::kubernetes::object_store::Refusal;

/// A pending pod of a namespace that selects nodes by the label `team`, which the NodePool leaves open.
fn pending_of(world: &World, namespace: &str, name: &str, team: &str) {
    let unschedulable = json!({"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "m"});
    let container = json!({"name": "c", "image": "i", "resources": {"requests": {"cpu": "100m"}}});
    let meta = json!({"namespace": namespace, "uid": format!("uid-{namespace}-{name}")});
    let spec = json!({"containers": [container], "nodeSelector": if team.is_empty() { json!({}) } else { json!({"team": team}) }});
    world.api.put(&pod(name, &json!({"metadata": meta, "spec": spec, "status": {"conditions": [unschedulable]}})));
}

/// [`world`] with a NodePool that leaves the label `team` open.
fn open_world() -> World {
    let world = world();
    let ready = json!({"conditions": conditions_true(&["Ready"])});
    let open = json!([{"key": "team", "operator": "Exists"}]);
    let spec = json!({"template": {"spec": {"requirements": open}}});
    world.api.put(&node_pool("p", &json!({"spec": spec, "status": ready})));
    world
}

/// The number of pods that are left out of plans, by cause.
fn left_out(ctx: &Context, queue: &mut PodQueue) -> [usize; 3] {
    let (state, now) = (ctx.cluster.read(), clock::now());
    let (mut quarantine, mut backoff) = (lock(&ctx.quarantine), lock(&ctx.purchase_backoff));
    queue.observe(
        &state,
        &ctx.derived.holds(&state, now),
        &ctx.derived.demand(&state, now),
        &mut quarantine,
        &mut backoff,
        now,
    );
    Cause::ALL.map(|cause| queue.quarantined(cause))
}

/// The pods that NodeClaims are planned for, and the pods that are left out of plans.
async fn provisioned(world: &World, planner: Planner, passes: usize) -> (BTreeSet<String>, [usize; 3], Arc<Context>) {
    let ctx = world.api.context(Arc::clone(&world.cloud) as Arc<dyn Cloud>, PlacementMode::Nominate);
    let mut queue = PodQueue::default();
    for _ in 0..passes {
        provision(&ctx, &mut queue, &mut Unschedulable::default(), planner, Commit::All).await;
    }
    for _ in 0..500 {
        tokio::task::yield_now().await;
    }
    let left_out = left_out(&ctx, &mut queue);
    let state = ctx.cluster.read();
    let planned = state.claims.values().flat_map(|claim| PlanRecord::of(claim).pods).collect();
    drop(state);
    (planned, left_out, ctx)
}

fn keys(keys: &[&str]) -> BTreeSet<String> {
    keys.iter().map(|key| (*key).to_owned()).collect()
}

fn panics_over_poison(problem: &Problem, cache: &ColumnCache) -> Plan {
    assert!(!problem.pods.iter().any(|pod| pod.key.contains("poison")), "a defect");
    plan(problem, cache)
}

#[tokio::test]
async fn a_pod_that_the_planner_panics_over_is_left_out_and_the_others_are_planned() {
    let world = world();
    for tenant in ["a", "b", "c", "d", "e"] {
        pending_of(&world, tenant, "web", "");
    }
    pending_of(&world, "c", "poison", "");
    pending(&world, "large", "1500m");
    let (planned, quarantined, ctx) = provisioned(&world, panics_over_poison, 2).await;
    assert_eq!(planned.len(), 4 + 1, "{planned:?}");
    assert!(!planned.iter().any(|pod| pod.starts_with("c/")), "pods of one class are one unit");
    assert_eq!((quarantined, ctx.metrics.plans_failed.get()), ([2, 0, 0], 1));
    let events = world.api.events();
    let about =
        |name: &str| events.iter().any(|event| event.starts_with(&format!("Warning Quarantined on Pod/{name}: ")));
    assert!(about("poison") && !about("large"), "{events:?}");
}

#[tokio::test]
async fn a_planner_that_panics_over_everything_quarantines_no_pod() {
    fn panics(_: &Problem, _: &ColumnCache) -> Plan {
        panic!("a defect");
    }
    let world = world();
    pending_of(&world, "a", "web", "");
    pending_of(&world, "b", "web", "");
    let (planned, quarantined, ctx) = provisioned(&world, panics, 1).await;
    assert_eq!((planned.len(), quarantined, ctx.metrics.plans_failed.get()), (0, [0, 0, 0], 1));
}

#[tokio::test]
async fn the_neighbors_of_a_rejected_pod_are_planned_in_the_same_pass() {
    let world = open_world();
    pending_of(&world, "attacker", "poison", "bad");
    for tenant in ["a", "b", "c"] {
        pending_of(&world, tenant, "web", "");
    }
    pending_of(&world, "d", "web", "good");
    world.api.inject(Fault::Refused(Refusal::invalid("no team bad")), usize::MAX, |request| {
        request.body["spec"]["requirements"].to_string().contains("\"bad\"")
    });
    let (planned, quarantined, ctx) = provisioned(&world, plan, 1).await;
    assert_eq!(planned, keys(&["a/web", "b/web", "c/web", "d/web"]));
    assert_eq!(quarantined, [0, 1, 0]);
    assert_eq!(ctx.metrics.claims_rejected.with_label_values(&["p"]).get(), 1);
    let events = world.api.events();
    assert!(
        events.iter().any(|event| event.starts_with("Warning Quarantined on Pod/poison: left out of plans for 30 s: ")
            && event.contains("no team bad")),
        "{events:?}"
    );
    let requests = world.api.lines().len();
    let mut queue = PodQueue::default();
    provision(&ctx, &mut queue, &mut Unschedulable::default(), plan, Commit::All).await;
    assert_eq!(world.api.lines().len(), requests, "nothing is written for it before its time is over");
}

/// The trials have no other pod.
#[tokio::test]
async fn pods_of_several_namespaces_whose_node_claims_are_rejected_are_all_left_out() {
    let world = open_world();
    for tenant in ["a", "b"] {
        pending_of(&world, tenant, "poison", "bad");
    }
    pending_of(&world, "c", "web", "good");
    world.api.inject(Fault::Refused(Refusal::invalid("no team bad")), usize::MAX, |request| {
        request.body["spec"]["requirements"].to_string().contains("\"bad\"")
    });
    let (planned, quarantined, _) = provisioned(&world, plan, 1).await;
    assert_eq!((planned, quarantined), (keys(&["c/web"]), [0, 2, 0]));
}

/// A tenant pays nothing for rejected NodeClaims: they must not use up what others may purchase.
#[tokio::test]
async fn rejected_node_claims_do_not_count_against_the_cap() {
    let world = open_world();
    pending_of(&world, "attacker", "poison", "bad");
    pending_of(&world, "a", "web", "good");
    world.api.inject(Fault::Refused(Refusal::invalid("no team bad")), usize::MAX, |request| {
        request.body["spec"]["requirements"].to_string().contains("\"bad\"")
    });
    let (planned, _, ctx) = provisioned(&world, plan, 1).await;
    assert_eq!(planned, keys(&["a/web"]));
    assert_eq!(ctx.metrics.claims_rejected.with_label_values(&["p"]).get(), 1);
    let most = ctx.settings.max_purchases_per_minute;
    assert_eq!(ctx.admit(Capped::Purchase, most).await, most - 1);
}

#[tokio::test]
async fn a_node_pool_whose_node_claims_are_all_rejected_quarantines_no_pod() {
    let world = world();
    pending(&world, "a", "1500m");
    pending(&world, "b", "500m");
    world.api.inject_on("POST nodeclaims", Fault::Refused(Refusal::invalid("no node claims on Fridays")));
    let (planned, quarantined, _) = provisioned(&world, plan, 1).await;
    assert_eq!((planned.len(), quarantined), (0, [0, 0, 0]));
    let events = world.api.events();
    let expected = "Warning NodeClaimRejected on NodePool/p: ";
    assert!(events.iter().any(|event| event.starts_with(expected) && event.contains("Fridays")), "{events:?}");
}

/// The claim `old` names the pod `a`, and the API server refuses to change it.
#[tokio::test]
async fn a_node_claim_that_can_not_be_changed_delays_no_pod() {
    let world = world();
    pending(&world, "a", "500m");
    pending(&world, "b", "500m");
    let plan_of_old = json!({(labels::PLANNED_PODS): "[\"n/a\"]", (labels::HOLD_UNTIL): "1970-01-01T00:00:01Z"});
    let meta: Value = json!({"annotations": plan_of_old, "labels": {(labels::NODE_POOL): "p"},
        "deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": [labels::TERMINATION_FINALIZER]});
    world.api.put(&claim("old", &json!({"metadata": meta, "status": launched("i-1", &["Launched"])})));
    world.api.inject_on("PATCH nodeclaims/old", Fault::Refused(Refusal::invalid("frozen")));
    let (_, _, ctx) = provisioned(&world, plan, 1).await;
    let state = ctx.cluster.read();
    let holds = ctx.derived.holds(&state, clock::now());
    assert_eq!(holds.by_pod.len(), 2, "{holds:?}");
}

/// A world with the NodePools `p` and `poisonous` and the nodes `x0` to `x4` with room for the pod `a`.
fn supplied_world(pools: &[&str], nodes: &[&str]) -> World {
    let world = world();
    let ready = json!({"conditions": conditions_true(&["Ready"])});
    for name in pools {
        world.api.put(&node_pool(name, &json!({"metadata": {"generation": 1}, "status": ready})));
    }
    for (at, name) in nodes.iter().enumerate() {
        let own = json!({(labels::NODE_POOL): "p"});
        let status = launched(&format!("i-{at}"), &["Launched", "Registered", "Initialized"]);
        world.api.put(&claim(&format!("c-{name}"), &json!({"metadata": {"labels": own}, "status": status})));
        let labels = json!({(labels::REGISTERED): "true", (labels::INITIALIZED): "true", (labels::NODE_POOL): "p"});
        let room = json!({"cpu": "2", "memory": "8Gi", "pods": "29"});
        world.api.put(&node(
            name,
            &json!({"metadata": {"labels": labels}, "spec": {"providerID": format!("aws:///z/i-{at}")},
            "status": {"allocatable": room, "capacity": room, "conditions": [{"type": "Ready", "status": "True"}]}}),
        ));
        let container = json!({"name": "c", "image": "i", "resources": {"requests": {"cpu": "1500m"}}});
        let meta = json!({"namespace": "running", "labels": {"on": name}});
        world.api.put(&pod(name, &json!({"metadata": meta, "spec": {"nodeName": name, "containers": [container]}})));
    }
    world
}

/// Panics over the room of some nodes, over pods that run on others, and over some NodePools.
fn panics_over_supply(problem: &Problem, cache: &ColumnCache) -> Plan {
    assert!(!problem.pools.iter().any(|pool| pool.name.contains("poisonous")), "a defect about a NodePool");
    for node in &problem.nodes {
        assert!(!(node.schedulable && node.name.starts_with("room")), "a defect about a node");
        let poison = |pod: &stowage_planner::PodEntry| pod.labels.get("on").is_some_and(|on| on.starts_with("pods"));
        assert!(!node.pods.iter().any(poison), "a defect about running pods");
    }
    plan(problem, cache)
}

#[tokio::test]
async fn a_node_pool_that_the_planner_panics_over_is_left_out_until_it_changes() {
    let world = supplied_world(&["q", "poisonous"], &["x"]);
    pending_of(&world, "a", "web", "");
    pending(&world, "large", "1500m");
    let (planned, quarantined, ctx) = provisioned(&world, panics_over_supply, 1).await;
    assert_eq!((planned.len(), quarantined), (2, [0, 0, 0]), "{planned:?}");
    assert_eq!(lock(&ctx.supply_quarantine).counts(clock::now()), [1, 0, 0]);
    let events = world.api.events();
    let expected = "Warning Quarantined on NodePool/poisonous: left out of plans for 30 s: ";
    assert!(events.iter().any(|event| event.starts_with(expected)), "{events:?}");
    let pools = |ctx: &Context| take_snapshot(ctx, &ctx.ready_pools()).problem.pools.len();
    assert_eq!(pools(&ctx), 2);
    let ready = json!({"conditions": conditions_true(&["Ready"])});
    ctx.cluster.update(|state| {
        state.apply_pool(node_pool("poisonous", &json!({"metadata": {"generation": 2}, "status": ready})));
    });
    assert_eq!(pools(&ctx), 3);
}

#[tokio::test]
async fn nodes_that_the_planner_panics_over_are_left_out_and_purchases_are_bounded() {
    for (name, keeps_pods) in [("room", true), ("pods", false)] {
        let world = supplied_world(&["p"], &["x0", "x1", "x2", name, "x3"]);
        for at in 0..30 {
            pending(&world, &format!("large-{at}"), "1900m");
        }
        let (planned, quarantined, ctx) = provisioned(&world, panics_over_supply, 1).await;
        assert_eq!((planned.len(), quarantined), (20, [0, 0, 0]), "{name}: at most twenty purchases");
        assert_eq!(lock(&ctx.supply_quarantine).counts(clock::now()), [0, 1, 0], "{name}");
        let events = world.api.events();
        let expected = format!("Warning Quarantined on Node/{name}: left out of plans for 30 s: ");
        assert!(events.iter().any(|event| event.starts_with(&expected)), "{events:?}");
        let left_out = ["x0", "x1", "x2", name, "x3"].map(|node| ctx.is_left_out_of_plans(&format!("c-{node}")));
        assert_eq!(left_out, [false, false, false, true, false], "{name}");
        let nodes = take_snapshot(&ctx, &ctx.ready_pools()).problem.nodes;
        let known = nodes.iter().find(|node| &*node.name == name).map(|node| node.schedulable);
        assert_eq!(known, keeps_pods.then_some(false), "{name}: its pods count if the planner takes them");
        assert!(!world.api.lines().iter().any(|line| line.starts_with("DELETE")), "{name}");
    }
}

#[tokio::test]
async fn a_search_for_nodes_ends_after_a_bounded_number_of_plans() {
    static PLANS: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);
    fn counted(problem: &Problem, cache: &ColumnCache) -> Plan {
        PLANS.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
        panics_over_supply(problem, cache)
    }
    let names: Vec<String> = (0..80).map(|at| format!("{}{at}", if at % 2 == 0 { "x" } else { "pods" })).collect();
    let world = supplied_world(&["p"], &names.iter().map(String::as_str).collect::<Vec<_>>());
    pending(&world, "a", "1500m");
    let (planned, quarantined, ctx) = provisioned(&world, counted, 1).await;
    assert_eq!((planned.len(), quarantined), (1, [0, 0, 0]));
    let plans = PLANS.load(std::sync::atomic::Ordering::SeqCst);
    assert!(plans <= supply::MAX_TRIALS + 3, "{plans} plans");
    assert!(lock(&ctx.supply_quarantine).counts(clock::now())[1] >= 40);
}

/// The planner panics over the pod wherever there is a node: the pod is the cause, and no node is left out.
#[tokio::test]
async fn a_pod_that_the_planner_panics_over_on_every_node_leaves_no_node_out() {
    fn panics(problem: &Problem, cache: &ColumnCache) -> Plan {
        assert!(problem.nodes.is_empty() || !problem.pods.iter().any(|pod| pod.key.contains("poison")), "a defect");
        plan(problem, cache)
    }
    for namespaces in [&["a"][..], &["a", "b"]] {
        let world = supplied_world(&["p"], &["x0", "x1", "x2", "x3", "x4"]);
        for namespace in namespaces {
            pending_of(&world, namespace, "poison", "");
        }
        let (_, _, ctx) = provisioned(&world, panics, 1).await;
        assert_eq!(lock(&ctx.supply_quarantine).counts(clock::now()), [0, 0, 0], "{namespaces:?}");
    }
}

#[tokio::test]
async fn the_last_plan_keeps_the_reasons_of_pods_that_it_leaves_without_a_node() {
    let world = world();
    pending(&world, "small", "100m");
    pending(&world, "huge", "9999");
    let (.., ctx) = provisioned(&world, plan, 1).await;
    let last = lock(&ctx.last_plan).clone().unwrap();
    assert_eq!((last.pods, last.new_nodes, last.on_existing, last.left_out), (2, 1, 0, 1));
    assert!(last.reasons.len() == 1 && &*last.reasons[0].0 == "n/huge" && !last.reasons[0].1.is_empty(), "{last:?}");
}

/// A DaemonSet of the namespace `n`.
fn daemon_set(ctx: &Context, name: &str) {
    let spec = json!({"selector": {}, "template": {"spec": {"containers": [{"name": "c", "image": "i"}]}}});
    let set = json!({"metadata": {"name": name, "namespace": "n", "uid": format!("uid-{name}")}, "spec": spec});
    ctx.cluster.update(|state| state.apply_daemon_set(&serde_json::from_value(set).unwrap()));
}

fn panics_over_daemons(problem: &Problem, cache: &ColumnCache) -> Plan {
    let poison = problem.daemons.iter().any(|daemon| daemon.key.contains("poison"));
    let read = !(problem.pools.is_empty() && problem.nodes.is_empty());
    assert!(!(poison && read), "a defect about a DaemonSet");
    panics_over_supply(problem, cache)
}

#[tokio::test]
async fn daemon_sets_that_the_planner_panics_over_are_left_out_and_nothing_else_is() {
    for (extra, expected) in [(None, [0, 0, 2]), (Some("room"), [0, 1, 2])] {
        let world = supplied_world(&["p", "q"], &["x0", "x1", extra.unwrap_or("x2"), "x3"]);
        pending_of(&world, "a", "web", "");
        pending_of(&world, "b", "web", "");
        let ctx = world.api.context(Arc::clone(&world.cloud) as Arc<dyn Cloud>, PlacementMode::Nominate);
        for name in ["a", "poison-1", "b", "c", "d", "poison-2", "e"] {
            daemon_set(&ctx, name);
        }
        let mut queue = PodQueue::default();
        provision(&ctx, &mut queue, &mut Unschedulable::default(), panics_over_daemons, Commit::All).await;
        for _ in 0..500 {
            tokio::task::yield_now().await;
        }
        assert_eq!(lock(&ctx.supply_quarantine).counts(clock::now()), expected);
        assert_eq!(left_out(&ctx, &mut queue), [0, 0, 0]);
        let state = ctx.cluster.read();
        let planned: BTreeSet<String> = state.claims.values().flat_map(|claim| PlanRecord::of(claim).pods).collect();
        assert_eq!(planned, keys(&["a/web", "b/web"]));
        drop(state);
        let events = world.api.events();
        let text = "Warning Quarantined on DaemonSet/poison-1: left out of plans for 30 s: ";
        assert!(events.iter().any(|event| event.starts_with(text)), "{events:?}");
        let left = take_snapshot(&ctx, &ctx.ready_pools()).problem.daemons;
        assert_eq!(left.iter().map(|daemon| &*daemon.key).collect::<Vec<_>>(), ["n/a", "n/b", "n/c", "n/d", "n/e"]);
    }
}

#[tokio::test]
async fn a_search_for_daemon_sets_ends_after_a_bounded_number_of_plans() {
    static PLANS: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);
    fn counted(problem: &Problem, cache: &ColumnCache) -> Plan {
        PLANS.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
        panics_over_daemons(problem, cache)
    }
    let names: Vec<String> = (0..40).map(|at| format!("{}{at}", if at % 2 == 0 { "x" } else { "pods" })).collect();
    let world = supplied_world(&["p"], &names.iter().map(String::as_str).collect::<Vec<_>>());
    pending(&world, "a", "1500m");
    let ctx = world.api.context(Arc::clone(&world.cloud) as Arc<dyn Cloud>, PlacementMode::Nominate);
    (0..80).for_each(|at| daemon_set(&ctx, &format!("{}-{at}", if at % 2 == 0 { "ok" } else { "poison" })));
    provision(&ctx, &mut PodQueue::default(), &mut Unschedulable::default(), counted, Commit::All).await;
    let plans = PLANS.load(std::sync::atomic::Ordering::SeqCst);
    assert!(plans <= supply::MAX_TRIALS + 5, "{plans} plans");
    assert!(lock(&ctx.supply_quarantine).counts(clock::now())[2] >= 40);
}

/// Volumes are read for the pods that use them: the planner panics over one claim.
#[tokio::test]
async fn of_a_volume_that_the_planner_panics_over_the_pods_are_left_out_and_their_node() {
    fn panics(problem: &Problem, cache: &ColumnCache) -> Plan {
        let running = problem.nodes.iter().flat_map(|node| node.pods.iter());
        let mut uses = problem.pods.iter().chain(running);
        assert!(!uses.any(|pod| pod.claims.iter().any(|claim| claim.contains("bad"))), "a defect about a volume");
        plan(problem, cache)
    }
    let volume = |claim: &str| json!([{"name": "v", "persistentVolumeClaim": {"claimName": claim}}]);
    let unschedulable = json!({"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "m"});
    let world = supplied_world(&["p"], &["x0", "x1", "x2", "x3"]);
    let spec = |node: Option<&str>| json!({"nodeName": node, "containers": [], "volumes": volume("bad")});
    world.api.put(&pod("runs", &json!({"spec": spec(Some("x1"))})));
    let waits = json!({"spec": spec(None), "status": {"conditions": [unschedulable]}});
    world.api.put(&pod("waits", &waits));
    pending_of(&world, "a", "web", "");
    pending(&world, "large", "1900m");
    let (planned, quarantined, ctx) = provisioned(&world, panics, 1).await;
    assert_eq!(quarantined, [1, 0, 0], "the pod that waits");
    assert!(planned.iter().any(|pod| pod.ends_with("/large")), "{planned:?}");
    assert_eq!(lock(&ctx.supply_quarantine).counts(clock::now()), [0, 1, 0], "the node of the pod that runs");
}
