//! Tests of [`super`]: what is due for a claim.

use super::*;
use crate::test_support::objects;

fn claim(conditions: &[&str], patch: Value) -> NodeClaim {
    let meta = json!({"finalizers": [labels::TERMINATION_FINALIZER], "creationTimestamp": "2026-01-01T00:00:00Z"});
    let startup = json!([{"key": "cni", "effect": "NoSchedule"}]);
    let spec = json!({"startupTaints": startup, "resources": {"requests": {"nvidia.com/gpu": "1"}}});
    let mut whole = json!({"metadata": meta, "spec": spec, "status": objects::launched("i-1", conditions)});
    json_patch::merge(&mut whole, &patch);
    objects::claim("c", &whole)
}

fn node(patch: Value) -> Node {
    let meta = json!({"finalizers": [labels::TERMINATION_FINALIZER], "labels": {(labels::REGISTERED): "true"}});
    let ready = json!([{"type": "Ready", "status": "True"}]);
    let status = json!({"conditions": ready, "allocatable": {"nvidia.com/gpu": "1"}});
    let mut whole = json!({"metadata": meta, "status": status});
    json_patch::merge(&mut whole, &patch);
    objects::node("n", &whole)
}

#[test]
fn every_state_of_a_claim_has_one_next_step() {
    let start = "2026-01-01T00:00:00Z".parse::<k8s_openapi::jiff::Timestamp>().unwrap().as_millisecond();
    let none = json!({});
    let deleting = json!({"metadata": {"deletionTimestamp": "2026-01-01T00:01:00Z"}});
    let closed = json!({"metadata": {"deletionTimestamp": "2026-01-01T00:01:00Z"}, "spec": {"taints": [{"key": labels::DISRUPTED_TAINT, "effect": "NoSchedule"}]}});
    let ready: &[&str] = &["Launched", "Registered", "Initialized"];
    let taint = |key: &str| json!({"spec": {"taints": [{"key": key, "effect": "NoSchedule"}]}});
    let cases: Vec<(&str, NodeClaim, Option<Node>, bool, i64, Step)> = vec![
        ("new", claim(&[], json!({"metadata": {"finalizers": null}})), None, true, 0, Step::AddFinalizer),
        ("not launched", claim(&[], none.clone()), None, true, 1, Step::Launch),
        ("never launched", claim(&[], none.clone()), None, true, 300_001, Step::GiveUp("launch_timeout")),
        ("booting", claim(&["Launched"], none.clone()), None, true, 300_001, Step::Nothing),
        ("never booted", claim(&["Launched"], none.clone()), None, true, 900_001, Step::GiveUp("registration_timeout")),
        (
            "node is there",
            claim(&["Launched"], none.clone()),
            Some(node(json!({"metadata": {"finalizers": null}}))),
            true,
            1,
            Step::Sync,
        ),
        (
            "node is closed",
            claim(&["Launched"], none.clone()),
            Some(node(taint(labels::UNREGISTERED_TAINT))),
            true,
            1,
            Step::Open,
        ),
        ("node is open", claim(&["Launched"], none.clone()), Some(node(none.clone())), true, 1, Step::Register),
        (
            "node not ready",
            claim(&["Launched", "Registered"], none.clone()),
            Some(node(json!({"status": {"conditions": null}}))),
            true,
            1,
            Step::Explain("NodeNotReady"),
        ),
        (
            "start-up taint",
            claim(&["Launched", "Registered"], none.clone()),
            Some(node(taint("cni"))),
            true,
            1,
            Step::Explain("StartupTaintsExist"),
        ),
        (
            "not-ready taint",
            claim(&["Launched", "Registered"], none.clone()),
            Some(node(taint("node.kubernetes.io/not-ready"))),
            true,
            1,
            Step::Explain("KnownEphemeralTaintsExist"),
        ),
        (
            "no GPU yet",
            claim(&["Launched", "Registered"], none.clone()),
            Some(node(json!({"status": {"allocatable": {"nvidia.com/gpu": "0"}}}))),
            true,
            1,
            Step::Explain("ResourceNotRegistered"),
        ),
        (
            "all there",
            claim(&["Launched", "Registered"], none.clone()),
            Some(node(none.clone())),
            true,
            1,
            Step::Initialize,
        ),
        ("settled", claim(ready, none.clone()), Some(node(none.clone())), true, 1, Step::Nothing),
        ("node deleted by hand", claim(ready, none.clone()), Some(node(deleting.clone())), true, 1, Step::FollowNode),
        (
            "claim deleted, with a time to drain",
            claim(
                ready,
                json!({"metadata": {"deletionTimestamp": "2026-01-01T00:01:00Z"}, "spec": {"terminationGracePeriod": "30s"}}),
            ),
            Some(node(none.clone())),
            false,
            1,
            Step::WriteDeadline(start + 90_000),
        ),
        ("claim deleted", claim(ready, deleting.clone()), Some(node(none.clone())), false, 1, Step::DeleteNode),
        ("draining", claim(ready, deleting.clone()), Some(node(deleting.clone())), false, 1, Step::Drain),
        ("never closed", claim(ready, deleting.clone()), Some(node(deleting.clone())), true, 1, Step::Drain),
        ("drained", claim(ready, deleting.clone()), Some(node(closed.clone())), true, 1, Step::Terminate),
        ("deleted before it had a node", claim(&[], deleting.clone()), None, true, 1, Step::Terminate),
        (
            "let go of",
            claim(ready, json!({"metadata": {"deletionTimestamp": "2026-01-01T00:01:00Z", "finalizers": null}})),
            None,
            true,
            1,
            Step::Nothing,
        ),
    ];
    for (case, claim, node, drained, after, step) in cases {
        assert_eq!(next_step(&claim, node.as_ref(), drained, start + after), step, "{case}");
    }
}

#[test]
fn a_drain_that_is_left_alone_is_looked_at_when_its_end_changes() {
    let deleted = |annotations: &Value| {
        claim(&[], json!({"metadata": {"deletionTimestamp": "2026-01-01T00:01:00Z", "annotations": annotations}}))
    };
    let mut state = ClusterState::default();
    let work = Mutex::new(Work::default());
    let mut due_now = |claim: NodeClaim, now: i64| {
        state.apply_claim(claim);
        work.lock().unwrap().busy.clear();
        let due = due(&state, &work, now);
        if let Some((name, _, deadline)) = due.first() {
            work.lock()
                .unwrap()
                .later
                .insert(name.clone(), Later { at: now + 10_000, next: 10_000, deadline: *deadline });
        }
        due.len()
    };
    let hurried = json!({(labels::TERMINATION_TIMESTAMP): "2026-01-01T00:02:00Z"});
    let steps = [
        (json!({}), 0, 1),
        (json!({}), 9_000, 0),
        (hurried.clone(), 9_001, 1),
        (hurried.clone(), 9_002, 0),
        (hurried, 19_001, 1),
    ];
    for (annotations, now, expected) in steps {
        assert_eq!(due_now(deleted(&annotations), now), expected, "at {now} with {annotations}");
    }
}
