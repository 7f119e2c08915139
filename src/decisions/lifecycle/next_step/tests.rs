use serde_json::{Value, json};
use stowage_test_objects as objects;

use super::*;

/// Merges objects, and keeps null in the result, where it deletes a member of the object that is patched with it.
fn merge(into: &mut Value, from: Value) {
    match (into, from) {
        (Value::Object(into), Value::Object(from)) => {
            for (key, value) in from {
                merge(into.entry(key).or_insert(Value::Null), value);
            }
        }
        (into, from) => *into = from,
    }
}

fn claim(conditions: &[&str], json: Value) -> NodeClaim {
    let mut patch = json!({
        "metadata": {"finalizers": [labels::TERMINATION_FINALIZER], "creationTimestamp": "2026-01-01T00:00:00Z"},
        "spec": {"startupTaints": [{"key": "cni", "effect": "NoSchedule"}], "resources": {"requests": {"nvidia.com/gpu": "1"}}},
        "status": objects::launched("i-1", conditions)});
    merge(&mut patch, json);
    objects::claim("c", &patch)
}

fn node(json: Value) -> Node {
    let mut all = json!({"metadata": {"name": "n", "finalizers": [labels::TERMINATION_FINALIZER], "labels": {(labels::REGISTERED): "true"}},
        "status": {"conditions": [{"type": "Ready", "status": "True"}], "allocatable": {"nvidia.com/gpu": "1"}}});
    json_patch::merge(&mut all, &json);
    serde_json::from_value(all).unwrap()
}

#[test]
fn of_several_nodes_with_one_provider_id_none_is_registered() {
    let claim = claim(&["Launched"], json!({}));
    let created = claim.created_at();
    for step in [Step::Sync, Step::Open, Step::Register, Step::Nothing] {
        assert_eq!(step_with_duplicates(&claim, step, created), Step::ReportDuplicateNodes);
    }
    let late = created + REGISTRATION_TIMEOUT + Duration::from_millis(1);
    let abandoned = Step::Abandon(DisruptionReason::RegistrationTimeout);
    assert_eq!(step_with_duplicates(&claim, Step::Sync, late), abandoned);
    assert_eq!(step_with_duplicates(&claim, Step::Nothing, late), Step::ReportDuplicateNodes, "its node is registered");
    assert_eq!(step_with_duplicates(&claim, Step::Drain, late), Step::Drain);
}

#[test]
fn every_state_of_a_claim_has_one_next_step() {
    let start = UnixMillis::parse_rfc3339("2026-01-01T00:00:00Z").unwrap();
    let none = json!({});
    let deleting = json!({"metadata": {"deletionTimestamp": "2026-01-01T00:01:00Z"}});
    let tainted = json!({"metadata": {"deletionTimestamp": "2026-01-01T00:01:00Z"}, "spec": {"taints": [{"key": labels::DISRUPTED_TAINT, "effect": "NoSchedule"}]}});
    let mut kept_by_others = tainted.clone();
    kept_by_others["metadata"]["finalizers"] = json!(["others"]);
    let ready: &[&str] = &["Launched", "Registered", "Initialized"];
    let taint = |key: &str| json!({"spec": {"taints": [{"key": key, "effect": "NoSchedule"}]}});
    let cases: Vec<(&str, NodeClaim, Option<Node>, bool, u64, Step)> = vec![
        ("new", claim(&[], json!({"metadata": {"finalizers": null}})), None, true, 0, Step::AddFinalizer),
        ("not launched", claim(&[], none.clone()), None, true, 1, Step::Launch),
        (
            "never launched",
            claim(&[], none.clone()),
            None,
            true,
            300_001,
            Step::Abandon(DisruptionReason::LaunchTimeout),
        ),
        ("booting", claim(&["Launched"], none.clone()), None, true, 300_001, Step::Nothing),
        (
            "never booted",
            claim(&["Launched"], none.clone()),
            None,
            true,
            900_001,
            Step::Abandon(DisruptionReason::RegistrationTimeout),
        ),
        (
            "node exists",
            claim(&["Launched"], none.clone()),
            Some(node(json!({"metadata": {"finalizers": null}}))),
            true,
            1,
            Step::Sync,
        ),
        (
            "node is unregistered",
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
            Step::ReportUninitialized("NodeNotReady"),
        ),
        (
            "startup taint",
            claim(&["Launched", "Registered"], none.clone()),
            Some(node(taint("cni"))),
            true,
            1,
            Step::ReportUninitialized("StartupTaintsExist"),
        ),
        (
            "not-ready taint",
            claim(&["Launched", "Registered"], none.clone()),
            Some(node(taint("node.kubernetes.io/not-ready"))),
            true,
            1,
            Step::ReportUninitialized("KnownEphemeralTaintsExist"),
        ),
        (
            "no GPU yet",
            claim(&["Launched", "Registered"], none.clone()),
            Some(node(json!({"status": {"allocatable": {"nvidia.com/gpu": "0"}}}))),
            true,
            1,
            Step::ReportUninitialized("ResourceNotRegistered"),
        ),
        (
            "complete",
            claim(&["Launched", "Registered"], none.clone()),
            Some(node(none.clone())),
            true,
            1,
            Step::Initialize,
        ),
        ("initialized", claim(ready, none.clone()), Some(node(none.clone())), true, 1, Step::Nothing),
        ("node deleted by hand", claim(ready, none.clone()), Some(node(deleting.clone())), true, 1, Step::DeleteClaim),
        (
            "claim deleted, with a grace period",
            claim(
                ready,
                json!({"metadata": {"deletionTimestamp": "2026-01-01T00:01:00Z"}, "spec": {"terminationGracePeriod": "30s"}}),
            ),
            Some(node(none.clone())),
            false,
            1,
            Step::WriteDeadline(start + Duration::from_secs(90)),
        ),
        ("claim deleted", claim(ready, deleting.clone()), Some(node(none.clone())), false, 1, Step::DeleteNode),
        ("draining", claim(ready, deleting.clone()), Some(node(deleting.clone())), false, 1, Step::Drain),
        ("not tainted", claim(ready, deleting.clone()), Some(node(deleting.clone())), true, 1, Step::Drain),
        ("drained", claim(ready, deleting.clone()), Some(node(tainted.clone())), true, 1, Step::Terminate),
        (
            "its instance is gone, a finalizer of others keeps the node",
            claim(&["Launched", "Registered", "Initialized", "InstanceTerminating"], deleting.clone()),
            Some(node(json!({"metadata": {"deletionTimestamp": "2026-01-01T00:01:00Z", "finalizers": ["others"]}}))),
            true,
            1,
            Step::Nothing,
        ),
        (
            "its instance may run, a finalizer of others keeps the node",
            claim(ready, deleting.clone()),
            Some(node(kept_by_others)),
            true,
            1,
            Step::Terminate,
        ),
        ("deleted before it had a node", claim(&[], deleting.clone()), None, true, 1, Step::Terminate),
        (
            "without our finalizer",
            claim(ready, json!({"metadata": {"deletionTimestamp": "2026-01-01T00:01:00Z", "finalizers": null}})),
            None,
            true,
            1,
            Step::Nothing,
        ),
    ];
    for (case, claim, node, drained, after, step) in cases {
        assert_eq!(next_step(&claim, node.as_ref(), drained, start + Duration::from_millis(after)), step, "{case}");
    }
}
