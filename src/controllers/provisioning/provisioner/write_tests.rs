use std::collections::BTreeMap;
use std::sync::OnceLock;

use serde_json::json;
use stowage_api::NodeClaim;
use stowage_model::labels;
use stowage_model::pause::Pause;
use stowage_model::time::UnixMillis;
use stowage_planner::{ColumnCache, Problem};
use stowage_test_objects::{catalog, claim, launched, node, node_class, node_pool, pod, pod_budget};

use super::*;
use crate::controllers::caps::Capped;
use crate::controllers::disruption::roll_back::release;
use crate::controllers::provisioning::plan_writer::withdraw;
use crate::state::plan_record::PlanRecord;
use crate::state::snapshot::SnapshotRequest;
use crate::test_support::failures::{World, transcript};
use crate::test_support::kubernetes::object_store::Refusal;
use crate::test_support::kubernetes::{FakeApi, Fault};
use crate::test_support::scripted_cloud::FakeCloud;

/// A ready pool and its class.
pub(super) fn world() -> World {
    let api = FakeApi::default();
    let ready = json!({"conditions": [{"type": "Ready", "status": "True", "reason": "Ready", "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z"}]});
    api.put(&node_class("default", &json!({"status": ready})));
    api.put(&node_pool("p", &json!({"status": ready})));
    World::new(api).with_cloud(FakeCloud { catalog: Arc::new(catalog()), ..FakeCloud::default() })
}

/// A pod of this size that the scheduler could not place.
pub(super) fn pending(world: &World, name: &str, cpu: &str) {
    let unschedulable = json!({"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "m"});
    let container = json!({"name": "c", "image": "i", "resources": {"requests": {"cpu": cpu}}});
    world.api.put(&pod(name, &json!({"spec": {"containers": [container]}, "status": {"conditions": [unschedulable]}})));
}

/// A NodeClaim of the pool with these annotations, and its initialized node `x` of this size.
fn initialized(world: &World, name: &str, annotations: &serde_json::Value, cpu: &str) {
    let meta = json!({"annotations": annotations, "labels": {(labels::NODE_POOL): "p"}});
    let status = launched("i-2", &["Launched", "Registered", "Initialized"]);
    world.api.put(&claim(name, &json!({"metadata": meta, "status": status})));
    let open = json!({(labels::REGISTERED): "true", (labels::INITIALIZED): "true", (labels::NODE_POOL): "p"});
    let room = json!({"cpu": cpu, "memory": "8Gi", "pods": "29"});
    world.api.put(&node(
        "x",
        &json!({"metadata": {"labels": open}, "spec": {"providerID": "aws:///z/i-2"},
        "status": {"allocatable": room, "capacity": room, "conditions": [{"type": "Ready", "status": "True"}]}}),
    ));
}

/// Plans and writes the plan. Returns the pods that have a hold.
async fn planned(ctx: Arc<Context>) -> String {
    let pools = ctx.ready_pools();
    let settings = &ctx.settings.plan;
    let request = SnapshotRequest { pools: &pools, settings, now: clock::now() };
    let snapshot = ctx.derived.snapshot(&ctx.cluster.read(), request);
    let plan = plan(&snapshot.problem, &snapshot.column_cache);
    let writer = PlanWriter { ctx: &ctx, pools: &pools, snapshot: &snapshot, plan: &plan, of_move: None, reason: None };
    let served = writer.write(&BTreeMap::new()).await.served;
    format!("{} pods, held for {served:?}", snapshot.problem.pods.len())
}

#[tokio::test]
async fn a_plan_is_written_under_every_failure() {
    let text = transcript(
        || {
            let world = world();
            pending(&world, "a", "1500m");
            pending(&world, "b", "1500m");
            world
        },
        planned,
    )
    .await;
    insta::assert_snapshot!(text, @r#"
    undisturbed: 2 pods, held for {"n/a", "n/b"}
      POST nodeclaims {"apiVersion":"karpenter.sh/v1","kind":"NodeClaim","metadata":{"annotations":{"karpenter.sh/nodepool-hash":"6821555240594823858","karpenter.sh/nodepool-hash-version":"v3","stowage.dev/hold-until":"TIME","stowage.dev/launch-group":"GROUP/2","stowage.dev/planned-offering":"m5.large/z/on-demand","stowage.dev/planned-owners":"{}","stowage.dev/planned-pods":"[\"n/a\"]"},"finalizers":["karpenter.sh/termination"],"generateName":"p-","labels":{"karpenter.k8s.aws/ec2nodeclass":"default","karpenter.sh/nodepool":"p"},"name":"p-1","ownerReferences":[{"apiVersion":"karpenter.sh/v1","blockOwnerDeletion":true,"kind":"NodePool","name":"p","uid":"uid-p"}]},"spec":{"expireAfter":"720h","nodeClassRef":{"group":"karpenter.k8s.aws","kind":"EC2NodeClass","name":"default"},"requirements":[{"key":"node.kubernetes.io/instance-type","operator":"In","values":["m5.large"]},{"key":"topology.kubernetes.io/zone","operator":"In","values":["z"]},{"key":"karpenter.sh/capacity-type","operator":"In","values":["on-demand"]}],"resources":{"requests":{"cpu":"1500m","pods":"1"}}}}
      POST nodeclaims {"apiVersion":"karpenter.sh/v1","kind":"NodeClaim","metadata":{"annotations":{"karpenter.sh/nodepool-hash":"6821555240594823858","karpenter.sh/nodepool-hash-version":"v3","stowage.dev/hold-until":"TIME","stowage.dev/launch-group":"GROUP/2","stowage.dev/planned-offering":"m5.large/z/on-demand","stowage.dev/planned-owners":"{}","stowage.dev/planned-pods":"[\"n/b\"]"},"finalizers":["karpenter.sh/termination"],"generateName":"p-","labels":{"karpenter.k8s.aws/ec2nodeclass":"default","karpenter.sh/nodepool":"p"},"name":"p-2","ownerReferences":[{"apiVersion":"karpenter.sh/v1","blockOwnerDeletion":true,"kind":"NodePool","name":"p","uid":"uid-p"}]},"spec":{"expireAfter":"720h","nodeClassRef":{"group":"karpenter.k8s.aws","kind":"EC2NodeClass","name":"default"},"requirements":[{"key":"node.kubernetes.io/instance-type","operator":"In","values":["m5.large"]},{"key":"topology.kubernetes.io/zone","operator":"In","values":["z"]},{"key":"karpenter.sh/capacity-type","operator":"In","values":["on-demand"]}],"resources":{"requests":{"cpu":"1500m","pods":"1"}}}}
      changes +nodeclaims/p-1, +nodeclaims/p-2
    again: 0 pods, held for {}, no write, as undisturbed
    POST nodeclaims
    "#);
}

/// The plan of the claim `old` holds room for the pod until a time that is over; the claim `new` has room for it.
#[tokio::test]
async fn f12_a_pod_moves_from_one_claims_plan_to_another_under_every_failure() {
    let text = transcript(
        || {
            let world = world();
            pending(&world, "a", "500m");
            let plan = json!({(labels::PLANNED_PODS): "[\"n/a\",\"n/gone\"]", (labels::HOLD_UNTIL): "1970-01-01T00:00:01Z"});
            let own = json!({(labels::NODE_POOL): "p"});
            let old = json!({"metadata": {"annotations": plan, "labels": own, "deletionTimestamp": "2026-01-01T00:00:00Z",
                "finalizers": [labels::TERMINATION_FINALIZER]}, "status": launched("i-1", &["Launched"])});
            world.api.put(&claim("old", &old));
            initialized(&world, "new", &json!({}), "2");
            world
        },
        planned,
    )
    .await;
    insta::assert_snapshot!(text, @r#"
    undisturbed: 1 pods, held for {"n/a"}
      PATCH nodeclaims/old {"metadata":{"annotations":{"stowage.dev/hold-until":"1970-01-01T00:00:01Z","stowage.dev/planned-owners":"{}","stowage.dev/planned-pods":"[\"n/gone\"]"}}}
      PATCH nodeclaims/new {"metadata":{"annotations":{"stowage.dev/hold-until":"TIME","stowage.dev/planned-owners":"{}","stowage.dev/planned-pods":"[\"n/a\"]"}}}
      changes nodeclaims/new (metadata.annotations), nodeclaims/old (metadata.annotations)
    again: 0 pods, held for {}, no write, as undisturbed
    PATCH nodeclaims/old
      409 | 422: 1 pods, held for {"n/a"}; again: 0 pods, held for {}, no write, differs: nodeclaims/old (metadata.annotations)
      504: 1 pods, held for {"n/a"}, sent 7 times; again: 0 pods, held for {}, no write, differs: nodeclaims/old (metadata.annotations)
    PATCH nodeclaims/new
      404: 1 pods, held for {}; again: 1 pods, held for {"n/a"}, 1 write, differs: +nodeclaims/p-1, -nodeclaims/new
    "#);
}

/// The plan of the claim `old` still reserves room for the pod, which does not fit on its node.
#[tokio::test]
async fn a_reservation_is_given_up_before_a_purchase_under_every_failure() {
    let text = transcript(
        || {
            let world = world();
            pending(&world, "a", "1500m");
            let plan = json!({(labels::PLANNED_PODS): "[\"n/a\"]", (labels::HOLD_UNTIL): "2099-01-01T00:00:00Z"});
            initialized(&world, "old", &plan, "1");
            world
        },
        planned,
    )
    .await;
    insta::assert_snapshot!(text, @r#"
    undisturbed: 1 pods, held for {"n/a"}
      PATCH nodeclaims/old {"metadata":{"annotations":{"stowage.dev/hold-until":"TIME","stowage.dev/planned-owners":"{}","stowage.dev/planned-pods":"[]"}}}
      POST nodeclaims {"apiVersion":"karpenter.sh/v1","kind":"NodeClaim","metadata":{"annotations":{"karpenter.sh/nodepool-hash":"6821555240594823858","karpenter.sh/nodepool-hash-version":"v3","stowage.dev/hold-until":"TIME","stowage.dev/planned-offering":"m5.large/z/on-demand","stowage.dev/planned-owners":"{}","stowage.dev/planned-pods":"[\"n/a\"]"},"finalizers":["karpenter.sh/termination"],"generateName":"p-","labels":{"karpenter.k8s.aws/ec2nodeclass":"default","karpenter.sh/nodepool":"p"},"name":"p-1","ownerReferences":[{"apiVersion":"karpenter.sh/v1","blockOwnerDeletion":true,"kind":"NodePool","name":"p","uid":"uid-p"}]},"spec":{"expireAfter":"720h","nodeClassRef":{"group":"karpenter.k8s.aws","kind":"EC2NodeClass","name":"default"},"requirements":[{"key":"node.kubernetes.io/instance-type","operator":"In","values":["m5.large"]},{"key":"topology.kubernetes.io/zone","operator":"In","values":["z"]},{"key":"karpenter.sh/capacity-type","operator":"In","values":["on-demand"]}],"resources":{"requests":{"cpu":"1500m","pods":"1"}}}}
      changes nodeclaims/old (metadata.annotations), +nodeclaims/p-1
    again: 0 pods, held for {}, no write, as undisturbed
    PATCH nodeclaims/old
      409 | 422: 1 pods, held for {"n/a"}; again: 0 pods, held for {}, no write, differs: nodeclaims/old (metadata.annotations)
      504: 1 pods, held for {"n/a"}, sent 7 times; again: 0 pods, held for {}, no write, differs: nodeclaims/old (metadata.annotations)
    POST nodeclaims
    "#);
}

/// What kube-scheduler or an owner does with pods while they are planned: a node for them would be empty.
#[tokio::test]
async fn nothing_is_purchased_or_held_for_a_pod_that_does_not_wait_any_more() {
    static CONTEXT: OnceLock<Arc<Context>> = OnceLock::new();
    fn slow(problem: &Problem, cache: &ColumnCache) -> Plan {
        let plan = plan(problem, cache);
        CONTEXT.get().unwrap().cluster.update(|state| {
            for name in ["bound", "small-1", "small-3"] {
                state.apply_pod(&pod(name, &json!({"spec": {"nodeName": "other"}})), clock::now());
            }
            state.delete_pod("n/deleted", clock::now());
            state.apply_pod(&pod("again", &json!({"metadata": {"uid": "of-its-successor"}})), clock::now());
        });
        plan
    }
    let world = world();
    initialized(&world, "c", &json!({}), "450m");
    for name in ["bound", "deleted", "again", "waits"] {
        pending(&world, name, "1500m");
    }
    for name in ["small-1", "small-2", "small-3", "small-4"] {
        pending(&world, name, "200m");
    }
    let ctx = Arc::clone(CONTEXT.get_or_init(|| world.context()));
    let mut queue = PodQueue::default();
    provision(&ctx, &mut queue, &mut Unschedulable::default(), slow, Commit::All).await;
    assert!(!queue.has_failed(), "a pod that was created again under its name is planned soon");
    let state = ctx.cluster.read();
    let planned = |(name, claim): (&String, &Arc<NodeClaim>)| {
        let cpu = claim.spec.resources.requests.get("cpu").map_or("what it has", |cpu| &cpu.0);
        format!("{} with {cpu}", state.planned[name].pods.join(", "))
    };
    let planned: BTreeSet<String> = state.claims.iter().map(planned).collect();
    assert_eq!(
        planned,
        ["n/small-2 with what it has", "n/small-4 with 200m", "n/waits with 1500m"].map(String::from).into()
    );
}

/// While pods arrive, a plan purchases the nodes of those that have waited long enough.
#[tokio::test]
async fn pods_on_nodes_that_are_not_committed_yet_are_planned_again() {
    let world = world();
    pending(&world, "first", "1500m");
    let ctx = world.context();
    let mut queue = PodQueue::default();
    let observe = |queue: &mut PodQueue, now| {
        let (state, mut backoff) = (ctx.cluster.read(), lock(&ctx.purchase_backoff));
        let (holds, demand) = (ctx.derived.holds(&state, now), ctx.derived.demand(&state, now));
        queue.observe(&state, &holds, &demand, &mut lock(&ctx.quarantine), &mut backoff, now)
    };
    let begin = clock::now();
    observe(&mut queue, begin);
    let rejected = json!({"type": "PodScheduled", "status": "False", "reason": "Unschedulable"});
    let container = json!({"name": "c", "image": "i", "resources": {"requests": {"cpu": "1500m"}}});
    let second = pod("second", &json!({"spec": {"containers": [container]}, "status": {"conditions": [rejected]}}));
    ctx.cluster.update(|state| state.apply_pod(&second, begin + Duration::from_secs(5)));
    observe(&mut queue, begin + Duration::from_secs(6));
    let planned = || ctx.cluster.read().planned.values().flat_map(|plan| plan.pods.clone()).collect::<BTreeSet<_>>();
    for (since, expected) in [(2, vec!["n/first"]), (2, vec!["n/first"]), (5, vec!["n/first", "n/second"])] {
        let commit = Commit::WaitingSince(begin + Duration::from_secs(since));
        provision(&ctx, &mut queue, &mut Unschedulable::default(), plan, commit).await;
        assert_eq!(planned(), expected.into_iter().map(String::from).collect(), "{since}");
        assert!(!queue.has_failed(), "it waits for nothing but its turn");
    }
    let created = world.api.lines().iter().filter(|line| *line == "POST nodeclaims").count();
    assert_eq!(created, 2);
}

/// A pod that arrives now, and that the scheduler could not place.
fn arrives(ctx: &Context, name: &str, cpu: &str) {
    let rejected = json!({"type": "PodScheduled", "status": "False", "reason": "Unschedulable"});
    let container = json!({"name": "c", "image": "i", "resources": {"requests": {"cpu": cpu}}});
    let pod = pod(name, &json!({"spec": {"containers": [container]}, "status": {"conditions": [rejected]}}));
    ctx.cluster.update(|state| state.apply_pod(&pod, clock::now()));
}

#[tokio::test]
async fn the_next_plan_counts_on_the_last_one_and_does_not_wait_until_existing_claims_carry_it() {
    let world = world();
    pending(&world, "a", "1500m");
    initialized(&world, "c", &json!({}), "2");
    world.api.inject_on("PATCH nodeclaims/c", Fault::NoAnswer);
    let ctx = world.context();
    let (mut queue, mut unschedulable) = (PodQueue::default(), Unschedulable::default());
    let both = async {
        provision(&ctx, &mut queue, &mut unschedulable, plan, Commit::All).await;
        arrives(&ctx, "b", "1500m");
        provision(&ctx, &mut queue, &mut unschedulable, plan, Commit::All).await;
    };
    tokio::time::timeout(Duration::from_secs(20), both).await.expect("nothing waits for the answer");
    let mut planned: Vec<_> = ctx.cluster.read().planned.values().map(|plan| plan.pods.concat()).collect();
    planned.sort();
    assert_eq!(planned, ["n/a", "n/b"], "each pod once, and nothing else in the room of the first");
    assert_eq!(world.api.lines(), ["PATCH nodeclaims/c", "POST nodeclaims"]);
}

#[tokio::test]
async fn the_next_plan_waits_when_those_of_several_plans_are_still_being_written() {
    for (others, written) in [(0, 0), (3, 0), (4, 1)] {
        let world = world();
        pending(&world, "a", "1500m");
        initialized(&world, "c", &json!({}), "2");
        let ctx = world.context();
        let _others = ctx.extension_slots.acquire_many(others).await.unwrap();
        provision(&ctx, &mut PodQueue::default(), &mut Unschedulable::default(), plan, Commit::All).await;
        assert_eq!(world.api.lines().len(), written, "{others} others");
        while world.api.lines().is_empty() {
            tokio::task::yield_now().await;
        }
    }
}

#[tokio::test]
async fn a_pod_whose_plan_an_existing_claim_does_not_take_is_planned_again_after_a_while() {
    let world = world();
    initialized(&world, "c", &json!({}), "2");
    world.api.inject_on("PATCH nodeclaims/c", Fault::Refused(Refusal::invalid("frozen")));
    let ctx = world.context();
    arrives(&ctx, "a", "1500m");
    // Longer than the batch window.
    let runs = tokio::time::timeout(3 * ctx.settings.batch.max, run(Arc::clone(&ctx)));
    assert!(runs.await.is_err());
    assert_eq!(world.api.lines(), ["PATCH nodeclaims/c"]);
    let state = ctx.cluster.read();
    assert_eq!((ctx.derived.holds(&state, clock::now()).by_pod.len(), lock(&ctx.unwritten).len()), (0, 0));
}

#[tokio::test]
async fn what_is_withdrawn_from_a_plan_that_is_being_written_does_not_come_back() {
    let world = world();
    let plan =
        PlanRecord { pods: vec!["n/a".into(), "n/b".into()], hold_until: UnixMillis::MAX, ..PlanRecord::default() };
    initialized(&world, "c", &json!({}), "2");
    let ctx = world.context();
    ctx.cluster.update(|state| state.assume_plan("c", plan.clone()));
    withdraw(&ctx, "c".into(), &["n/a"].into()).await;
    let extension = Extension { claim: "c".into(), pods: plan.pods };
    assert_eq!(write_extensions(&ctx, vec![extension]).await, ["n/a".to_owned()].into());
    assert_eq!(world.api.lines(), ["PATCH nodeclaims/c"], "one write was enough for both");
    assert_eq!(PlanRecord::of(&ctx.cluster.read().claims["c"]).pods, ["n/b"]);
}

#[tokio::test]
async fn room_is_not_released_if_the_one_write_for_several_changes_failed() {
    let world = world();
    let owners = json!({"n/a": {"uid": "rs", "at_ms": 0}}).to_string();
    let carried = json!({(labels::PLANNED_PODS): "[\"n/a\"]", (labels::PLANNED_OWNERS): owners,
        (labels::HOLD_UNTIL): "2099-01-01T00:00:00Z"});
    initialized(&world, "c", &carried, "2");
    world.api.inject_on("PATCH nodeclaims/c", Fault::Refused(Refusal::invalid("frozen")));
    let ctx = world.context();
    ctx.cluster.update(|state| {
        let mut plan = state.planned["c"].clone();
        plan.pods.push("n/b".into());
        state.assume_plan("c", plan);
    });
    let turn = ctx.plan_writes.lock("c").await;
    let extension = Extension { claim: "c".into(), pods: vec!["n/b".into()] };
    let pods = ["n/a"].into();
    let both = async { tokio::join!(write_extensions(&ctx, vec![extension]), release(&ctx, &pods)) };
    let ((unwritten, released), ()) = tokio::join!(both, async { drop(turn) });
    assert_eq!((unwritten, released), (["n/b".to_owned()].into(), false));
    assert_eq!(world.api.lines(), ["PATCH nodeclaims/c"]);
    assert_eq!(ctx.cluster.read().planned["c"].pods, ["n/a"], "as the NodeClaim says");
}

#[tokio::test]
async fn nothing_is_purchased_while_provisioning_is_paused() {
    for (paused, purchased) in [("provisioning", false), ("all", false), ("disruption", true)] {
        let world = world();
        pending(&world, "a", "1500m");
        let ctx = world.context();
        ctx.cluster.update(|state| state.pause = Some(Pause::parse(Some(paused))));
        let is_planning = || ctx.is_planning.load(Ordering::Relaxed);
        let begins = async {
            while !is_planning() {
                tokio::task::yield_now().await;
            }
        };
        // Longer than the batch window.
        let long = 4 * ctx.settings.batch.max;
        let runs = tokio::time::timeout(long, run(Arc::clone(&ctx)));
        let (_, begun) = tokio::join!(runs, tokio::time::timeout(long, begins));
        assert_eq!((begun.is_ok(), is_planning()), (purchased, false), "{paused}");
        assert_eq!(!world.api.lines().is_empty(), purchased, "{paused}");
    }
}

#[tokio::test]
async fn node_claims_beyond_the_cap_are_planned_again() {
    let world = world();
    for name in ["a", "b", "c"] {
        pending(&world, name, "1500m");
    }
    let ctx = world.context();
    ctx.admit(Capped::Purchase, ctx.settings.max_purchases_per_minute - 2).await;
    planned(Arc::clone(&ctx)).await;
    let created = || world.api.lines().iter().filter(|line| *line == "POST nodeclaims").count();
    assert_eq!(created(), 2);
    planned(ctx).await;
    assert_eq!(created(), 2);
}

/// A node purchased for such a pod would stay empty, be removed, and be purchased again.
#[tokio::test]
async fn nothing_is_purchased_for_a_draining_pod_that_a_disruption_budget_keeps() {
    for (allowed, planned_pods) in [(None, 1), (Some(1), 1), (Some(0), 0)] {
        let world = world();
        let meta = json!({"deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": [labels::TERMINATION_FINALIZER]});
        let status = launched("i-1", &["Launched", "Registered", "Initialized"]);
        world.api.put(&claim("old", &json!({"metadata": meta, "status": status})));
        world.api.put(&node("x", &json!({"spec": {"providerID": "aws:///z/i-1"}})));
        let owner = json!({"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "r", "controller": true});
        let container = json!({"name": "c", "image": "i", "resources": {"requests": {"cpu": "1"}}});
        let spec = json!({"nodeName": "x", "containers": [container]});
        world.api.put(&pod("a", &json!({"metadata": {"ownerReferences": [owner]}, "spec": spec})));
        if let Some(allowed) = allowed {
            let budget = json!({"spec": {"selector": {}}, "status": {"disruptionsAllowed": allowed}});
            world.api.put(&pod_budget("b", &budget));
        }
        let held = if planned_pods == 1 { "{\"n/a\"}" } else { "{}" };
        assert_eq!(planned(world.context()).await, format!("{planned_pods} pods, held for {held}"), "{allowed:?}");
        assert_eq!(world.api.writes().len(), planned_pods, "{allowed:?}");
    }
}
