use std::collections::BTreeSet;

use serde_json::{Value, json};
use stowage_model::labels;
use stowage_model::pause::Pause;
use stowage_runtime::sync::lock;
use stowage_test_objects::{claim, pod};

use super::*;
use crate::decisions::disruption::move_record::MoveRecord;
use crate::state::kinds::KINDS;
use crate::test_support::consolidation_world::{add, add_of_others, world};
use crate::test_support::failures::{World, transcript};

fn annotate(world: &World, path: &str, annotations: &Value) {
    let mut object = world.api.stored(path).unwrap();
    json_patch::merge(
        &mut object,
        &json!({"metadata": {"annotations": annotations, "finalizers": [labels::TERMINATION_FINALIZER]}}),
    );
    world.api.put(&serde_json::from_value::<NodeClaim>(object).unwrap());
}

/// Room for the pod of `source` until the move is given up.
fn room() -> Value {
    let owner = json!({"uid": "r", "at_ms": 1, "until_ms": (clock::now() + Duration::from_mins(5)).0});
    json!({(labels::PLANNED_PODS): "[\"n/on-source\"]", (labels::PLANNED_OWNERS): json!({"n/on-source": owner}).to_string(),
        (labels::HOLD_UNTIL): "2000-01-01T00:00:00Z"})
}

/// Adds a marked node, the source of a move of its own, with a pod that requests 100m of CPU and, if it is `unheld`, goes to a node of others.
fn add_source(world: &World, name: &str, unheld: bool) {
    add(world, name, "p", None, "100m");
    let at = clock::now();
    let record = MoveRecord {
        id: name.into(),
        at,
        give_up: at + Duration::from_mins(5),
        sources: vec![name.into()],
        usd_per_hour: 0.1,
        unheld: if unheld { BTreeSet::from([format!("n/on-{name}")]) } else { BTreeSet::new() },
        replaced_by: None,
    };
    let marked = json!({(labels::DISRUPTING): "Underutilized/", (labels::MOVE): record.annotation()});
    annotate(world, &format!("nodeclaims/{name}"), &marked);
}

/// The marked node `source`, and `target` with room for its pod and 400m more.
fn moving() -> World {
    let world = world(&["p"], "100%");
    add_source(&world, "source", false);
    add(&world, "target", "p", None, "1500m");
    annotate(&world, "nodeclaims/target", &room());
    world
}

/// A pod that was bound to `source` since its move was decided.
fn late(cpu: &str) -> Pod {
    let owner = json!({"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "r", "controller": true});
    let container = json!({"name": "c", "resources": {"requests": {"cpu": cpu}}});
    let spec = json!({"nodeName": "source", "containers": [container]});
    pod("late", &json!({"metadata": {"ownerReferences": [owner]}, "spec": spec}))
}

async fn passed(ctx: Arc<Context>) -> String {
    pass(&ctx).await;
    "passed".into()
}

#[tokio::test]
async fn a_source_is_deleted_when_its_pods_have_room_under_every_failure() {
    insta::assert_snapshot!(transcript(moving, passed).await, @r#"
    undisturbed: passed
      DELETE nodeclaims/source {"preconditions":{"resourceVersion":"6","uid":"uid-source"}}
      changes nodeclaims/source (metadata.deletionGracePeriodSeconds metadata.deletionTimestamp)
    again: passed, no write, as undisturbed
    DELETE nodeclaims/source
    "#);
}

/// The target is gone: the pod has no room any more. A new node that is not launched goes with the move.
#[tokio::test]
async fn a_move_is_rolled_back_under_every_failure() {
    let setup = || {
        let world = moving();
        // A second pod has no room.
        world.api.put(&late("1"));
        let nothing = json!({(labels::PLANNED_PODS): null, (labels::PLANNED_OWNERS): null});
        annotate(&world, "nodeclaims/target", &nothing);
        world.api.put(&claim("new", &json!({"metadata": {"annotations": room()}})));
        world
    };
    insta::assert_snapshot!(transcript(setup, passed).await, @r#"
    undisturbed: passed
      DELETE nodeclaims/new {"preconditions":{"uid":"uid-new"}}
      PATCH nodeclaims/source {"metadata":{"annotations":{"stowage.dev/disrupting":null,"stowage.dev/move":null},"resourceVersion":"6"}}
      PATCH nodes/source [{"op":"test","path":"/metadata/uid","value":"node-source"},{"op":"test","path":"/metadata/resourceVersion","value":"4"},{"op":"add","path":"/spec/taints","value":[]}]
      event Normal DisruptionCanceled on NodeClaim/source: disruption as Underutilized is taken back: pod n/late fits on no other node
      event Normal DisruptionCanceled on Node/source: disruption as Underutilized is taken back: pod n/late fits on no other node
      changes nodeclaims/source (metadata.annotations), -nodeclaims/new
    again: passed, no write, as undisturbed
    DELETE nodeclaims/new
    PATCH nodeclaims/source
    PATCH nodes/source
    "#);
}

fn is_deleting(world: &World) -> bool {
    world.api.stored("nodeclaims/source").is_none_or(|claim| claim["metadata"]["deletionTimestamp"].is_string())
}

fn is_marked(world: &World) -> bool {
    world.api.stored("nodeclaims/source").unwrap()["metadata"]["annotations"][labels::DISRUPTING].is_string()
}

/// The watches lag behind: the API server knows more when the source is to be deleted.
#[tokio::test]
async fn the_last_look_before_the_deletion_is_at_the_api_server() {
    let mut protected = serde_json::to_value(moving().api.stored("pods/n/on-source").unwrap()).unwrap();
    protected["metadata"]["annotations"] = json!({(labels::DO_NOT_DISRUPT): "true"});
    for (case, change) in [
        ("a pod was bound", Some(late("1"))),
        ("a pod is protected now", Some(serde_json::from_value(protected).unwrap())),
        ("nothing changed", None),
    ] {
        let world = World { watched: false, ..moving() };
        let ctx = world.context();
        if let Some(pod) = &change {
            world.api.put(pod);
        }
        pass(&ctx).await;
        assert_eq!((is_deleting(&world), is_marked(&world)), (change.is_none(), true), "{case}");
        // The next pass rolls the move back.
        pass(&ctx).await;
        assert_eq!((is_deleting(&world), is_marked(&world)), (change.is_none(), change.is_none()), "{case}");
        assert_eq!(lock(&ctx.abandoned).contains_key("source"), change.is_some(), "{case}");
    }
}

/// Another client wrote the claim between the last look and the deletion, such as an interruption with its deadline.
#[tokio::test]
async fn a_source_that_changed_since_the_last_look_is_not_deleted() {
    let world = moving();
    let ctx = world.context();
    let other = world.api.clone();
    world.api.inject(crate::test_support::kubernetes::Fault::WrittenByAnother, 1, |request| request.method == "DELETE");
    pass(&ctx).await;
    assert!(!is_deleting(&world) && other.lines().iter().any(|line| line == "DELETE nodeclaims/source"));
    pass(&ctx).await;
    assert!(is_deleting(&world), "the next pass reads it again");
}

#[tokio::test]
async fn moves_stand_still_while_disruption_is_paused_or_a_watch_is_stale() {
    for (paused, stale) in [("all", false), ("disruption", false), ("none", true), ("none", false)] {
        let world = moving();
        let ctx = world.context();
        ctx.cluster.update(|state| state.pause = Some(Pause::parse(Some(paused))));
        if stale {
            for kind in KINDS {
                ctx.cluster.watch_signs().record_list(kind, clock::now() - Duration::from_mins(2));
            }
        }
        pass(&ctx).await;
        assert_eq!(is_deleting(&world), paused == "none" && !stale, "{paused} {stale}");
    }
}

/// A pod that was bound between the decision and the taint: room on a node that exists is kept for it too, so that the move goes on.
#[tokio::test]
async fn a_pod_that_was_bound_meanwhile_gets_room_under_every_failure() {
    let setup = || {
        let world = moving();
        world.api.put(&late("300m"));
        world
    };
    insta::assert_snapshot!(transcript(setup, passed).await, @r#"
    undisturbed: passed
      PATCH nodeclaims/target {"metadata":{"annotations":{"stowage.dev/hold-until":"TIME","stowage.dev/planned-owners":"{\"n/late\":{\"at_ms\":MILLIS,\"node\":\"source\",\"source\":\"source\",\"uid\":\"r\",\"until_ms\":MILLIS},\"n/on-source\":{\"at_ms\":1,\"uid\":\"r\",\"until_ms\":MILLIS}}","stowage.dev/planned-pods":"[\"n/on-source\",\"n/late\"]"}}}
      changes nodeclaims/target (metadata.annotations)
    again: passed, 1 write, differs: nodeclaims/source (metadata.deletionGracePeriodSeconds metadata.deletionTimestamp)
    PATCH nodeclaims/target
      written by another | lost answer: passed; again: passed, 1 write, differs: nodeclaims/source (metadata.deletionGracePeriodSeconds metadata.deletionTimestamp)
      404: passed; again: passed, no write, differs: nodeclaims/source (metadata.annotations), -nodeclaims/target
      429, Retry-After 2 s, once: passed, sent 2 times; again: passed, 1 write, differs: nodeclaims/source (metadata.deletionGracePeriodSeconds metadata.deletionTimestamp)
      crash after: stopped; again: passed, 1 write, differs: nodeclaims/source (metadata.deletionGracePeriodSeconds metadata.deletionTimestamp)
    "#);
    let world = setup();
    let ctx = world.context();
    pass(&ctx).await;
    assert!(!is_deleting(&world) && is_marked(&world));
    assert_eq!(ctx.cluster.read().planned["target"].pods, ["n/on-source", "n/late"]);
    pass(&ctx).await;
    assert!(is_deleting(&world));
}

/// Its target was deleted, and there is room on another node.
#[tokio::test]
async fn a_pod_whose_target_is_gone_gets_another_and_nothing_is_bought_for_it() {
    for (others, goes_on) in [("1500m", true), ("2", false)] {
        let world = moving();
        add(&world, "other", "p", None, others);
        let ctx = world.context();
        ctx.cluster.update(|state| {
            state.delete_claim("target");
            state.delete_node("target");
        });
        pass(&ctx).await;
        assert_eq!((is_deleting(&world), is_marked(&world)), (false, goes_on), "{others}");
        pass(&ctx).await;
        assert_eq!(is_deleting(&world), goes_on, "{others}");
        assert!(!world.api.lines().iter().any(|line| line.starts_with("POST nodeclaims")));
    }
}

/// Where no room can be kept, the pods are planned again right before the deletion.
#[tokio::test]
async fn f5_pods_move_to_a_node_that_is_not_ours_while_it_has_room() {
    for (cpus, sources, goes_on) in [
        ("100m", &["a"][..], 1),
        ("50m", &["a"], 0),
        // There is room for one: the pods of the other count.
        ("100m", &["a", "b"], 1),
        ("200m", &["a", "b"], 2),
    ] {
        let world = world(&["p"], "100%");
        for name in sources {
            add_source(&world, name, true);
        }
        add_of_others(&world, "others", cpus);
        let ctx = world.context();
        pass(&ctx).await;
        pass(&ctx).await;
        let claims = sources.iter().map(|name| world.api.stored(&format!("nodeclaims/{name}")).unwrap());
        let of_claim = |claim: Value| {
            let meta = &claim["metadata"];
            (meta["deletionTimestamp"].is_string(), meta["annotations"][labels::DISRUPTING].is_string())
        };
        let (deleted, marked): (Vec<bool>, Vec<bool>) = claims.map(of_claim).unzip();
        assert_eq!(deleted.iter().filter(|is_deleted| **is_deleted).count(), goes_on, "{cpus} {sources:?}");
        assert_eq!(deleted, marked, "the others are rolled back: {cpus} {sources:?}");
        assert!(!world.api.lines().iter().any(|line| line.starts_with("POST nodeclaims")));
    }
}

/// Successors of its pods would be bound to sources of the other move that are not tainted yet.
#[tokio::test]
async fn no_move_drains_while_others_begin() {
    let world = moving();
    let ctx = world.context();
    let others_begin = ctx.disrupting.lock().await;
    let mut passing = std::pin::pin!(pass(&ctx));
    // Many more steps than a pass takes.
    for _ in 0..1_000 {
        assert!(futures::poll!(&mut passing).is_pending() && !is_deleting(&world));
        tokio::task::yield_now().await;
    }
    drop(others_begin);
    passing.await;
    assert!(is_deleting(&world));
}
