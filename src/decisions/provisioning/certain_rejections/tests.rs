use proptest::prelude::*;
use serde_json::{Value, json};
use stowage_model::labels;
use stowage_test_objects as objects;

use super::*;

const NOW: UnixMillis = UnixMillis(100_000);

/// A pod of this CPU and priority that was just created.
fn pod(name: &str, cpu: &str, priority: i32, patch: &Value) -> k8s_openapi::api::core::v1::Pod {
    let container = json!({"name": "c", "resources": {"requests": {"cpu": cpu}}});
    let meta = json!({"creationTimestamp": NOW.rfc3339()});
    let mut pod = json!({"metadata": meta, "spec": {"containers": [container], "priority": priority}});
    json_patch::merge(&mut pod, patch);
    objects::pod(name, &pod)
}

/// A node with room for 4 CPUs.
fn node(name: &str, patch: &Value) -> Node {
    let mut node = json!({"status": {"allocatable": {"cpu": "4", "memory": "8Gi", "pods": "10"}}});
    json_patch::merge(&mut node, patch);
    objects::node(name, &node)
}

fn certain(known: &mut CertainRejections, state: &ClusterState, now: UnixMillis) -> String {
    known.evaluate(state, &Holds::default(), now).into_iter().collect::<Vec<_>>().join(" ")
}

#[test]
fn a_rejection_is_certain_if_no_node_has_room_for_the_pod_alone() {
    let required = |operator: &str| {
        let expression = json!({"key": "beta.kubernetes.io/arch", "operator": operator, "values": ["arm64"]});
        json!({"spec": {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution":
            {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}}}}})
    };
    let taint = |effect: &str| json!({"spec": {"taints": [{"key": "t", "effect": effect}]}});
    let tolerant = |key: &str| json!({"spec": {"tolerations": [{"key": key, "operator": "Exists"}]}});
    let arm = json!({"metadata": {"labels": {labels::ARCH: "arm64"}}});
    let (none, cordoned) = (json!({}), json!({"spec": {"unschedulable": true}}));
    // The CPU of the pod that runs on the node and its priority, the CPU of the new pod, and both of the rest.
    for (case, running, cpu, new, node_patch, expected) in [
        ("room", ("1", 0), "3", &none, &none, false),
        ("too large for the node", ("0", 0), "5", &none, &none, true),
        ("too large for what is left", ("2", 0), "3", &none, &none, true),
        ("it can preempt", ("2", -1), "3", &none, &none, false),
        ("too large with preemption", ("2", -1), "5", &none, &none, true),
        ("those of higher priority stay", ("2", 1), "3", &none, &none, true),
        ("a taint", ("0", 0), "1", &none, &taint("NoSchedule"), true),
        ("a preference", ("0", 0), "1", &none, &taint("PreferNoSchedule"), false),
        ("tolerated", ("0", 0), "1", &tolerant("t"), &taint("NoExecute"), false),
        (
            "the planned taint",
            ("0", 0),
            "1",
            &none,
            &json!({"spec": {"taints": [{"key": labels::PLANNED_TAINT, "effect": "NoSchedule"}]}}),
            true,
        ),
        ("cordoned", ("0", 0), "1", &none, &cordoned, true),
        ("cordoned, tolerated", ("0", 0), "1", &tolerant("node.kubernetes.io/unschedulable"), &cordoned, false),
        ("selected", ("0", 0), "1", &required("In"), &arm, false),
        ("not selected", ("0", 0), "1", &required("NotIn"), &arm, true),
        ("not labeled", ("0", 0), "1", &required("In"), &none, true),
    ] {
        let mut state = ClusterState::default();
        state.apply_node(node("x", node_patch));
        state.apply_pod(&pod("running", running.0, running.1, &json!({"spec": {"nodeName": "x"}})), NOW);
        state.apply_pod(&pod("new", cpu, 0, new), NOW);
        let found = certain(&mut CertainRejections::default(), &state, NOW);
        assert_eq!(found, if expected { "n/new" } else { "" }, "{case}");
    }
}

#[test]
fn only_new_pods_that_the_default_scheduler_attempts_next_are_rejected_for_certain() {
    let rejected =
        json!({"status": {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}]}});
    let volume = json!({"spec": {"volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "data"}}]}});
    let device = json!({"spec": {"resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "gpu"}]}});
    for (case, patch, age, expected) in [
        ("new", json!({}), 9_999, true),
        ("older", json!({}), 10_000, false),
        (
            "created long before it was observed",
            json!({"metadata": {"creationTimestamp": "1970-01-01T00:01:30Z"}}),
            0,
            false,
        ),
        ("rejected", rejected.clone(), 0, false),
        ("gated", json!({"spec": {"schedulingGates": [{"name": "g"}]}}), 0, false),
        ("of another scheduler", json!({"spec": {"schedulerName": "other"}}), 0, false),
        ("with a volume claim that is not known", volume, 0, false),
        ("with a claim of devices", device, 0, false),
    ] {
        let mut state = ClusterState::default();
        state.apply_pod(
            &pod("known", "1", 0, &json!({"spec": {"schedulerName": "other"}, "status": rejected["status"]})),
            NOW,
        );
        state.apply_pod(&pod("new", "1", 0, &patch), NOW);
        let now = UnixMillis(NOW.0 + age);
        assert_eq!(
            certain(&mut CertainRejections::default(), &state, now),
            if expected { "n/new" } else { "" },
            "{case}"
        );
    }
    let (mut state, mut known) = (ClusterState::default(), CertainRejections::default());
    state.apply_pod(&pod("gang", "1", 0, &json!({})), NOW);
    state.apply_pod(&pod("later", "1", 0, &json!({})), UnixMillis(NOW.0 + 1));
    assert_eq!(certain(&mut known, &state, NOW), "n/gang n/later");
    let held = Holds { by_pod: [("n/gang".to_owned(), "c".to_owned())].into(), ..Holds::default() };
    assert_eq!(known.evaluate(&state, &held, NOW).into_iter().collect::<Vec<_>>(), ["n/later"]);
    state.apply_pod(&pod("later", "1", 0, &rejected), UnixMillis(NOW.0 + 2));
    assert_eq!(certain(&mut known, &state, NOW), "", "a later one overtook it");
}

#[test]
fn the_work_is_bounded_and_continues_where_the_last_evaluation_found_room() {
    let mut state = ClusterState::default();
    for name in ["a", "b", "c"] {
        state.apply_node(node(name, &json!({})));
    }
    state.apply_pod(&pod("new", "4", 0, &json!({})), NOW);
    let class = Arc::clone(&state.pods["n/new"].entry.as_ref().unwrap().class);
    let mut known = CertainRejections::default();
    let mut rejected = |state: &ClusterState, mut left: usize| {
        known.follow(state);
        (known.is_rejected(state, &class, &mut left), left)
    };
    assert_eq!(rejected(&state, 2), (false, 2), "not decided");
    assert_eq!(rejected(&state, 0), (false, 0), "not decided");
    assert_eq!(rejected(&state, 10), (false, 9), "on a");
    for (on, left) in [("a", 8), ("b", 8), ("c", 6)] {
        state.apply_pod(&pod(&format!("on-{on}"), "1", 0, &json!({"spec": {"nodeName": on}})), NOW);
        // The last node itself, then the next one; in the end all others.
        assert_eq!(rejected(&state, 10), (on == "c", left), "{on} is taken");
    }
    assert_eq!(rejected(&state, 10), (true, 10), "no node changed");
    state.delete_pod("n/on-b", NOW);
    assert_eq!(rejected(&state, 10), (false, 9), "one node changed");
    state.delete_node("b");
    assert_eq!(rejected(&state, 10), (true, 8), "its node is gone");
}

#[test]
fn a_class_with_many_expressions_is_more_work() {
    let mut state = ClusterState::default();
    for name in ["a", "b"] {
        state.apply_node(node(name, &json!({})));
    }
    let expression = |key: &str| json!({"key": key, "operator": "Exists"});
    let terms =
        json!([{"matchExpressions": [expression("k"), expression("l")]}, {"matchExpressions": [expression("m")]}]);
    let required = json!({"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}});
    state.apply_pod(&pod("new", "1", 0, &json!({"spec": {"affinity": {"nodeAffinity": required}}})), NOW);
    let class = Arc::clone(&state.pods["n/new"].entry.as_ref().unwrap().class);
    for (left, expected) in [(7, (false, 7)), (8, (true, 0))] {
        let (mut known, mut left) = (CertainRejections::default(), left);
        known.follow(&state);
        assert_eq!((known.is_rejected(&state, &class, &mut left), left), expected);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn an_evaluation_after_changes_equals_one_of_the_whole_state(changes in prop::collection::vec((0..6_u8, 0..4_u8, 0..5_u8), 1..60)) {
        let (mut state, mut known) = (ClusterState::default(), CertainRejections::default());
        for cpu in 1..=5 {
            state.apply_pod(&pod(&format!("new-{cpu}"), &cpu.to_string(), cpu - 3, &json!({})), NOW);
        }
        for (kind, at, cpu) in changes {
            let name = format!("node-{at}");
            match kind {
                0 => state.apply_node(node(&name, &json!({"spec": {"unschedulable": cpu == 0}}))),
                1 => state.delete_node(&name),
                2 => state.delete_pod(&format!("n/on-{at}-{cpu}"), NOW),
                _ => {
                    let on = json!({"spec": {"nodeName": name}, "status": {"phase": if kind == 5 { "Succeeded" } else { "Running" }}});
                    state.apply_pod(&pod(&format!("on-{at}-{cpu}"), &cpu.to_string(), i32::from(kind) - 4, &on), NOW);
                }
            }
            let fresh = certain(&mut CertainRejections::default(), &state, NOW);
            prop_assert_eq!(certain(&mut known, &state, NOW), fresh);
        }
    }
}
