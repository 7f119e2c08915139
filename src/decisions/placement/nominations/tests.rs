use serde_json::json;
use stowage_test_objects as objects;

use super::*;
use crate::decisions::holds::resolve;
use crate::decisions::placement::planned_taint::planned_taint;
use crate::test_support::state_with_planned_pod;

fn count(state: &ClusterState, placement: PlacementMode, tainted: bool) -> usize {
    to_nominate(state, &resolve(state, UnixMillis(5)), placement, tainted, "c", "node-c").len()
}

#[test]
fn at_most_max_skew_pods_of_a_spread_are_nominated_to_a_node() {
    let mut state = state_with_planned_pod(None);
    let planned = "[\"n/s1\",\"n/s2\",\"n/s3\"]";
    let plan = json!({(labels::PLANNED_PODS): planned, (labels::HOLD_UNTIL): "2099-01-01T00:00:00Z"});
    let patch = json!({"metadata": {"annotations": plan}, "status": objects::launched("i-1", &[])});
    state.apply_claim(objects::claim("c", &patch));
    for name in ["s1", "s2", "s3"] {
        let pod = json!({"metadata": {"name": name, "namespace": "n", "uid": name, "labels": {"app": "s"}},
            "spec": {"containers": [{"name": "c", "image": "i"}], "topologySpreadConstraints": [{"maxSkew": 2,
                "topologyKey": labels::ZONE, "whenUnsatisfiable": "DoNotSchedule", "labelSelector": {"matchLabels": {"app": "s"}}}]}});
        state.apply_pod(&serde_json::from_value(pod).unwrap(), UnixMillis(1));
    }
    assert_eq!(count(&state, PlacementMode::Nominate, false), 2);
    assert_eq!(count(&state, PlacementMode::Extender, false), 0, "the extender's filter directs them");
    assert_eq!(count(&state, PlacementMode::Nominate, true), 0, "the planned taint directs them");
}

#[test]
fn only_pods_without_the_nomination_are_nominated() {
    let mut state = state_with_planned_pod(None);
    assert_eq!(count(&state, PlacementMode::Nominate, false), 1);
    let pod = json!({"metadata": {"name": "a", "namespace": "n", "uid": "a"}, "spec": {"containers": []},
        "status": {"nominatedNodeName": "node-c"}});
    state.apply_pod(&serde_json::from_value(pod).unwrap(), UnixMillis(2));
    assert_eq!(count(&state, PlacementMode::Nominate, false), 0);
}

/// The planned pod waits for the open node of its claim, which is new at the epoch.
fn open(bound: Option<&str>) -> ClusterState {
    let mut state = state_with_planned_pod(bound);
    let meta = json!({"labels": {(labels::REGISTERED): "true"}, "creationTimestamp": "1970-01-01T00:00:00Z"});
    let status = json!({"conditions": [{"type": "Ready", "status": "True"}],
        "allocatable": {"cpu": "2", "memory": "4Gi", "pods": "10"}});
    let spec = json!({"providerID": "aws:///z/i-1"});
    state.apply_node(objects::node("node-c", &json!({"metadata": meta, "spec": spec, "status": status})));
    state
}

/// One pass `at` this time.
fn pass(nominations: &mut Nominations, state: &ClusterState, placement: PlacementMode, at: i64) -> NominationActions {
    nominations.choose(state, &Arc::new(resolve(state, UnixMillis(at))), placement, UnixMillis(at))
}

#[test]
fn a_pod_is_nominated_to_a_registered_ready_node_at_most_five_times_a_second() {
    let mut nominations = Nominations::new(UnixMillis(0));
    let mut nominated = |state: &ClusterState, placement, at| {
        let nominate = pass(&mut nominations, state, placement, at).nominate;
        nominate.into_iter().map(|(node, pods)| (node, pods.len())).collect::<Vec<_>>()
    };
    let open = open(None);
    assert_eq!(nominated(&state_with_planned_pod(None), PlacementMode::Nominate, 0), [], "not registered");
    assert_eq!(nominated(&open, PlacementMode::Off, 0), []);
    assert_eq!(nominated(&open, PlacementMode::Nominate, 0), [("node-c".to_owned(), 1)]);
    assert_eq!(nominated(&open, PlacementMode::Nominate, 199), [], "nominated a moment ago");
    assert_eq!(nominated(&open, PlacementMode::Nominate, 200), [("node-c".to_owned(), 1)]);
}

#[test]
fn pods_are_nominated_beside_the_taint_where_nodes_may_open_before_they_are_bound() {
    let mut state = open(None);
    let mut node = (*state.nodes["node-c"]).clone();
    let taint = planned_taint(&state.claims["c"], UnixMillis(0));
    node.spec.as_mut().unwrap().taints = taint.map(|taint| vec![taint]);
    state.apply_node(node);
    let by = |placement, state: &ClusterState, at| {
        !pass(&mut Nominations::new(UnixMillis(0)), state, placement, at).nominate.is_empty()
    };
    let nominated = |state: &ClusterState, at| by(PlacementMode::Nominate, state, at);
    assert_eq!([29_999, 30_000].map(|at| nominated(&state, at)), [false, true]);
    let agent = json!({"metadata": {"name": "agent", "namespace": "n", "uid": "agent"},
        "spec": {"selector": {}, "template": {"spec": {"containers": [{"name": "c", "image": "i"}]}}}});
    state.apply_daemon_set(&serde_json::from_value(agent).unwrap());
    assert!(nominated(&state, 0), "the node opens for a while for a DaemonSet pod");
    assert!(![0, 30_000].iter().any(|at| by(PlacementMode::Extender, &state, *at)), "the filter keeps them off others");
}

#[test]
fn a_retry_is_triggered_by_an_unplanned_end_and_every_two_seconds() {
    let mut nominations = Nominations::new(UnixMillis(0));
    let mut trigger = |state: &ClusterState, placement, at| pass(&mut nominations, state, placement, at).trigger;
    let waiting = open(None);
    assert!(trigger(&waiting, PlacementMode::Extender, 1_999).is_empty());
    assert_eq!(trigger(&waiting, PlacementMode::Extender, 2_000), ["node-c"]);
    assert!(trigger(&waiting, PlacementMode::Extender, 3_999).is_empty());
    assert_eq!(trigger(&open(Some("other")), PlacementMode::Extender, 3_999), ["node-c"], "bound elsewhere");
    assert!(trigger(&open(Some("other")), PlacementMode::Extender, 9_000).is_empty(), "no pod waits");
    assert!(trigger(&waiting, PlacementMode::Extender, 10_999).is_empty(), "it waits for less than two seconds");
    assert!(trigger(&waiting, PlacementMode::Nominate, 99_000).is_empty(), "without an extender");
    assert!(trigger(&open(Some("node-c")), PlacementMode::Extender, 99_000).is_empty(), "bound as planned");
}

#[test]
fn a_hold_is_renewed_after_another_pod_of_its_class_was_bound_as_planned() {
    let mut state = open(None);
    let plan = json!({(labels::PLANNED_PODS): "[\"n/a\",\"n/b\"]", (labels::HOLD_UNTIL): "1970-01-01T00:00:30Z"});
    let status = json!({"providerID": "aws:///z/i-1"});
    state.apply_claim(objects::claim("c", &json!({"metadata": {"annotations": plan}, "status": status})));
    let put = |name: &str, bound: Option<&str>, state: &mut ClusterState| {
        let rejected = json!({"type": "PodScheduled", "status": "False", "reason": "Unschedulable"});
        let pod = json!({"spec": {"nodeName": bound}, "status": {"conditions": [rejected]}});
        state.apply_pod(&objects::pod(name, &pod), UnixMillis(1));
    };
    put("a", None, &mut state);
    put("b", None, &mut state);
    let mut nominations = Nominations::new(UnixMillis(0));
    let mut renewed = |state: &ClusterState, placement, at| {
        let actions = pass(&mut nominations, state, placement, at);
        (actions.ended.len(), actions.renew)
    };
    let due = (0, vec!["c".to_owned()]);
    assert_eq!(renewed(&state, PlacementMode::Nominate, 11_000), (0, vec![]), "no pod was bound");
    put("a", Some("node-c"), &mut state);
    assert_eq!(renewed(&state, PlacementMode::Nominate, 12_000), (1, due.1.clone()));
    assert_eq!(renewed(&state, PlacementMode::Off, 13_000), (0, vec![]), "not enforced");
    assert_eq!(renewed(&state, PlacementMode::Nominate, 26_999), due);
    assert_eq!(renewed(&state, PlacementMode::Nominate, 27_000), (0, vec![]), "no progress for fifteen seconds");
}

#[test]
fn a_pod_that_is_bound_as_planned_has_waited_since_its_node_became_ready() {
    let (booting, ready, bound) = (state_with_planned_pod(None), open(None), open(Some("node-c")));
    let waited = |passes: &[(&ClusterState, i64)]| {
        let mut nominations = Nominations::new(UnixMillis(0));
        let mut bound_after =
            |state: &ClusterState, at| pass(&mut nominations, state, PlacementMode::Nominate, at).bound_after;
        passes.iter().map(|(state, at)| bound_after(state, *at)).last().unwrap()
    };
    let since = [(&booting, 0), (&ready, 100), (&ready, 200), (&bound, 350), (&bound, 400)];
    assert_eq!(waited(&since[..4]), vec![Duration::from_millis(250)]);
    assert!(waited(&since[..3]).is_empty() && waited(&since).is_empty(), "once");
    assert!(waited(&since[1..4]).is_empty(), "since when it is ready was not observed");
}

#[test]
fn a_pass_ends_after_a_number_of_nominations_and_the_next_one_goes_on_there() {
    let mut state = ClusterState::default();
    for claim in ["c", "d", "e"] {
        let pods: Vec<String> = (0..=MAX_NOMINATIONS / 2).map(|at| format!("{claim}{at}")).collect();
        let planned: Vec<String> = pods.iter().map(|pod| format!("n/{pod}")).collect();
        let plan =
            json!({(labels::PLANNED_PODS): json!(planned).to_string(), (labels::HOLD_UNTIL): "2099-01-01T00:00:00Z"});
        let patch = json!({"metadata": {"annotations": plan}, "status": objects::launched(claim, &[])});
        state.apply_claim(objects::claim(claim, &patch));
        let ready = json!({"conditions": [{"type": "Ready", "status": "True"}], "allocatable": {"cpu": "99", "memory": "99Gi", "pods": "99"}});
        let node = json!({"metadata": {"labels": {(labels::REGISTERED): "true"}}, "spec": {"providerID": format!("aws:///z/{claim}")}, "status": ready});
        state.apply_node(objects::node(&format!("node-{claim}"), &node));
        for pod in &pods {
            state.apply_pod(&objects::pod(pod, &json!({})), UnixMillis(1));
        }
    }
    let mut nominations = Nominations::new(UnixMillis(0));
    let passes = [0, 1, 2, 200, 400].map(|at| {
        let nominate = pass(&mut nominations, &state, PlacementMode::Nominate, at).nominate;
        nominate.into_keys().collect::<Vec<_>>().join(" ")
    });
    assert_eq!(passes, ["node-c node-d", "node-e", "", "node-c node-d", "node-c node-e"]);
}
