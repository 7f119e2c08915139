use k8s_openapi::api::core::v1::Node;
use serde_json::{Value, json};
use stowage_test_objects as objects;

use super::*;

const AT: &str = "2026-01-01T00:00:00Z";

fn condition(kind: &str, status: &str, message: &str) -> Value {
    json!({"type": kind, "status": status, "reason": "Because", "message": message, "lastTransitionTime": AT})
}

fn claim(name: &str, patch: &Value, conditions: &[Value]) -> NodeClaim {
    let mut all =
        json!({"metadata": {"finalizers": [labels::TERMINATION_FINALIZER]}, "status": {"conditions": conditions}});
    json_patch::merge(&mut all, patch);
    objects::claim(name, &all)
}

fn node(name: &str, pool: Option<&str>, conditions: &[Value]) -> Node {
    let metadata = json!({"labels": {(labels::NODE_POOL): pool}, "finalizers": [labels::TERMINATION_FINALIZER]});
    objects::node(name, &json!({"metadata": metadata, "status": {"conditions": conditions}}))
}

fn described(found: Vec<Found>) -> Vec<String> {
    let describe = |(about, event, note): Found| {
        let [kind, name] = [about.kind, about.name].map(Option::unwrap_or_default);
        format!("{kind}/{name} {}: {note}", event.reason())
    };
    found.into_iter().map(describe).collect()
}

/// A state that is followed.
fn followed() -> (ClusterState, Objects) {
    let (state, mut objects) = (ClusterState::default(), Objects::default());
    assert!(objects.events(&state).is_empty());
    (state, objects)
}

#[test]
fn a_condition_with_another_status_is_an_event_with_its_type_as_the_reason() {
    let (mut state, mut objects) = followed();
    let unknown = ["Registered", "Ready"].map(|kind| condition(kind, "Unknown", ""));
    state.apply_claim(claim("c", &json!({}), &unknown));
    state.apply_pool(objects::node_pool("p", &json!({"status": {"conditions": [condition("Ready", "Unknown", "")]}})));
    state.apply_node(node("n", Some("p"), &[condition("Ready", "False", ""), condition("Odd", "False", "")]));
    state.apply_node(node("theirs", None, &[condition("Ready", "False", "")]));
    assert_eq!(described(objects.events(&state)), [""; 0], "conditions of new objects are no transitions");
    let now = [
        condition("Registered", "True", ""),
        condition("Ready", "Unknown", "later"),
        condition("Initialized", "True", ""),
        condition("Drained", "Unknown", ""),
        condition("Consolidatable", "True", ""),
    ];
    state.apply_claim(claim("c", &json!({}), &now));
    let ready = condition("Ready", "False", "EC2NodeClass x is missing");
    state.apply_pool(objects::node_pool("p", &json!({"status": {"conditions": [ready]}})));
    state.apply_node(node("n", Some("p"), &[condition("Ready", "True", ""), condition("Odd", "True", "")]));
    state.apply_node(node("theirs", None, &[condition("Ready", "True", "")]));
    assert_eq!(
        described(objects.events(&state)),
        [
            "NodePool/p Ready: Ready Unknown -> False, Because: EC2NodeClass x is missing",
            "NodeClaim/c Registered: Registered Unknown -> True, Because",
            "NodeClaim/c Initialized: Initialized Unknown -> True, Because",
            "Node/n Ready: Ready False -> True, Because",
        ]
    );
    assert!(objects.events(&state).is_empty());
}

#[test]
fn a_node_that_replaces_others_is_reported_when_it_appears_and_when_it_is_launched() {
    let (mut state, mut objects) = followed();
    let mark = json!({"metadata": {"annotations": {(labels::DISRUPTING): "Underutilized/"}}});
    state.apply_claim(claim("old-0", &mark, &[]));
    assert!(objects.events(&state).is_empty());
    let plan = |sources: usize| {
        let owner = |number: usize| json!({"uid": "u", "at_ms": 1, "source": format!("old-{number}"), "node": "n"});
        let owners: serde_json::Map<_, _> =
            (0..sources).map(|number| (format!("x/p{number}"), owner(number))).collect();
        let pods: Vec<&String> = owners.keys().collect();
        json!({"metadata": {"annotations": {
            (labels::PLANNED_PODS): json!(pods).to_string(),
            (labels::PLANNED_OWNERS): Value::from(owners.clone()).to_string(),
        }}})
    };
    state.apply_claim(claim("new", &plan(2), &[]));
    state.apply_claim(claim("fast", &plan(7), &[condition("Launched", "True", "")]));
    state.apply_claim(claim("other", &json!({}), &[]));
    let [two, seven] = ["old-0, old-1", "old-0, old-1, old-2, old-3, old-4 and others"];
    assert_eq!(
        described(objects.events(&state)),
        [
            format!("NodeClaim/fast DisruptionLaunching: takes the pods of {seven}: Underutilized"),
            format!("NodeClaim/fast DisruptionWaitingReadiness: {seven} is removed when this node is ready"),
            format!("NodeClaim/new DisruptionLaunching: takes the pods of {two}: Underutilized"),
        ]
    );
    state.apply_claim(claim("new", &plan(2), &[condition("Launched", "True", "")]));
    state.apply_claim(claim("other", &json!({}), &[condition("Launched", "True", "")]));
    let waits = format!("NodeClaim/new DisruptionWaitingReadiness: {two} is removed when this node is ready");
    assert_eq!(described(objects.events(&state)), [waits]);
}

#[test]
fn a_finalizer_that_is_removed_is_reported_once() {
    let (mut state, mut objects) = followed();
    state.apply_claim(claim("a", &json!({}), &[]));
    state.apply_claim(claim("b", &json!({}), &[]));
    state.apply_claim(claim("without", &json!({"metadata": {"finalizers": []}}), &[]));
    state.apply_node(node("n", Some("p"), &[]));
    state.apply_node(node("theirs", None, &[]));
    assert!(objects.events(&state).is_empty());
    state.apply_claim(claim("a", &json!({"metadata": {"finalizers": []}}), &[]));
    for name in ["b", "without"] {
        state.delete_claim(name);
    }
    for name in ["n", "theirs"] {
        state.delete_node(name);
    }
    let finalized = |about: &str| format!("{about} Finalized: finalizer karpenter.sh/termination is removed");
    assert_eq!(described(objects.events(&state)), ["NodeClaim/a", "NodeClaim/b", "Node/n"].map(finalized));
    state.delete_claim("a");
    assert!(objects.events(&state).is_empty());
}

#[test]
fn reported_conditions_are_declared_once() {
    let reasons: BTreeSet<&str> = CONDITIONS.iter().map(|event| event.reason()).collect();
    assert_eq!(reasons.len(), CONDITIONS.len());
    assert!(!reasons.contains(LAUNCHED) && !reasons.contains(stowage_api::conditions::CONSOLIDATABLE));
}
