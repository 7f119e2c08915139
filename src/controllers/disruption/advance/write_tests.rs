use serde_json::{Value, json};

use super::*;
use crate::decisions::disruption::move_record::MoveRecord;
use crate::model::labels;
use crate::model::pause::Pause;
use crate::state::kinds::KINDS;
use crate::sync::lock;
use crate::test_support::consolidation_world::{add, world};
use crate::test_support::failures::{World, transcript};
use crate::test_support::objects::{claim, pod};

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

/// The marked node `source`, and `target` with room for its pod.
fn moving() -> World {
    let world = world(&["p"], "100%");
    add(&world, "source", "p", None, "100m");
    add(&world, "target", "p", None, "1500m");
    let at = clock::now();
    let record = MoveRecord {
        id: "m".into(),
        at,
        give_up: at + Duration::from_mins(5),
        sources: vec!["source".into()],
        usd_per_hour: 0.1,
    };
    let marked = json!({(labels::DISRUPTING): "Underutilized/", (labels::MOVE): record.annotation()});
    annotate(&world, "nodeclaims/source", &marked);
    annotate(&world, "nodeclaims/target", &room());
    world
}

async fn passed(ctx: Arc<Context>) -> String {
    pass(&ctx).await;
    "passed".into()
}

#[tokio::test]
async fn a_source_is_deleted_when_its_pods_have_room_under_every_failure() {
    insta::assert_snapshot!(transcript(moving, passed).await, @r#"
    undisturbed: passed
      DELETE nodeclaims/source {"preconditions":{"resourceVersion":"9","uid":"uid-source"}}
      changes nodeclaims/source (metadata.deletionGracePeriodSeconds metadata.deletionTimestamp)
    again: passed, no write, as undisturbed
    DELETE nodeclaims/source
      written by another | 409 | 422: passed; again: passed, 1 write, as undisturbed
      404: passed; again: passed, no write, differs: -nodeclaims/source
      429, Retry-After 2 s, once: passed, sent 2 times in 2 s; again: passed, no write, as undisturbed
      504: passed, sent 7 times; again: passed, 1 write, as undisturbed
      no answer: waits forever; again: passed, 1 write, as undisturbed
      lost answer: passed; again: passed, no write, as undisturbed
      crash before: stopped; again: passed, 1 write, as undisturbed
      crash after: stopped; again: passed, no write, as undisturbed
    "#);
}

/// The target is gone: the pod has no room any more. A new node that is not launched goes with the move.
#[tokio::test]
async fn a_move_is_rolled_back_under_every_failure() {
    let setup = || {
        let world = moving();
        // A second pod has no room.
        let owner = json!({"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "r", "controller": true});
        world.api.put(&pod("late", &json!({"metadata": {"ownerReferences": [owner]}, "spec": {"nodeName": "source"}})));
        let nothing = json!({(labels::PLANNED_PODS): null, (labels::PLANNED_OWNERS): null});
        annotate(&world, "nodeclaims/target", &nothing);
        world.api.put(&claim("new", &json!({"metadata": {"annotations": room()}})));
        world
    };
    insta::assert_snapshot!(transcript(setup, passed).await, @r#"
    undisturbed: passed
      DELETE nodeclaims/new {"preconditions":{"uid":"uid-new"}}
      PATCH nodes/source {"metadata":{"labels":{"node.kubernetes.io/exclude-from-external-load-balancers":null},"resourceVersion":"4"},"spec":{"taints":[]}}
      PATCH nodeclaims/source {"metadata":{"annotations":{"stowage.dev/disrupting":null,"stowage.dev/move":null},"resourceVersion":"9"}}
      changes nodeclaims/source (metadata.annotations), -nodeclaims/new
    again: passed, no write, as undisturbed
    DELETE nodeclaims/new
      written by another | 404: passed; again: passed, no write, as undisturbed
      409 | 422: passed; again: passed, 3 writes, as undisturbed
      429, Retry-After 2 s, once: passed, sent 2 times in 2 s; again: passed, no write, as undisturbed
      504: passed, sent 7 times; again: passed, 3 writes, as undisturbed
      no answer: waits forever; again: passed, 3 writes, as undisturbed
      lost answer: passed; again: passed, 2 writes, as undisturbed
      crash before: stopped; again: passed, 3 writes, as undisturbed
      crash after: stopped; again: passed, 2 writes, as undisturbed
    PATCH nodes/source
      written by another | 409 | 422 | lost answer: passed; again: passed, 2 writes, as undisturbed
      404: passed; again: passed, 1 write, differs: nodeclaims/source (metadata.annotations metadata.deletionGracePeriodSeconds metadata.deletionTimestamp), -nodes/source
      429, Retry-After 2 s, once: passed, sent 2 times in 2 s; again: passed, no write, as undisturbed
      504: passed, sent 7 times; again: passed, 2 writes, as undisturbed
      no answer: waits forever; again: passed, 2 writes, as undisturbed
      crash before | crash after: stopped; again: passed, 2 writes, as undisturbed
    PATCH nodeclaims/source
      written by another | 409 | 422: passed; again: passed, 2 writes, as undisturbed
      404: passed; again: passed, no write, differs: -nodeclaims/source
      429, Retry-After 2 s, once: passed, sent 2 times in 2 s; again: passed, no write, as undisturbed
      504: passed, sent 7 times; again: passed, 2 writes, as undisturbed
      no answer: waits forever; again: passed, 2 writes, as undisturbed
      lost answer: passed; again: passed, no write, as undisturbed
      crash before: stopped; again: passed, 2 writes, as undisturbed
      crash after: stopped; again: passed, no write, as undisturbed
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
    let owner = json!({"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "r", "controller": true});
    let another = pod("another", &json!({"metadata": {"ownerReferences": [owner]}, "spec": {"nodeName": "source"}}));
    let mut protected = serde_json::to_value(moving().api.stored("pods/n/on-source").unwrap()).unwrap();
    protected["metadata"]["annotations"] = json!({(labels::DO_NOT_DISRUPT): "true"});
    for (case, change) in [
        ("a pod was bound", Some(another)),
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
        assert_eq!(lock(&ctx.abandoned).contains("source"), change.is_some(), "{case}");
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
