use serde_json::{Value, json};
use stowage_api::NodeClaim;
use stowage_model::labels;
use stowage_test_objects as objects;

use super::*;
use crate::test_support::history::{self, History};

fn deleted(annotations: &Value) -> NodeClaim {
    let metadata = json!({"finalizers": [labels::TERMINATION_FINALIZER], "annotations": annotations,
        "creationTimestamp": "2026-01-01T00:00:00Z", "deletionTimestamp": "2026-01-01T00:01:00Z"});
    objects::claim("c", &json!({"metadata": metadata, "status": objects::launched("i-1", &[])}))
}

#[test]
fn a_waiting_drain_is_processed_when_its_deadline_changes() {
    let mut state = ClusterState::default();
    let mut queue = Queue::default();
    let mut started = |claim: NodeClaim, now: i64| {
        state.apply_claim(claim);
        let due = queue.start_due(&state, UnixMillis(now));
        let count = due.len();
        for due in due {
            queue.finish(due, Requeue::After(Duration::from_secs(10)), UnixMillis(now));
        }
        count
    };
    let hurried = json!({(labels::TERMINATION_TIMESTAMP): "2026-01-01T00:02:00Z"});
    for (annotations, now, expected) in [
        (json!({}), 0, 1),
        (json!({}), 9_000, 0),
        (hurried.clone(), 9_001, 1),
        (hurried.clone(), 9_002, 0),
        (hurried, 19_001, 1),
    ] {
        assert_eq!(started(deleted(&annotations), now), expected, "at {now} with {annotations}");
    }
}

#[test]
fn a_node_that_never_initializes_is_abandoned_when_no_pod_needs_it() {
    use crate::decisions::disruption::reason::DisruptionReason;
    use crate::decisions::lifecycle::next_step::REGISTRATION_TIMEOUT;

    let registered = UnixMillis::parse_rfc3339("2026-01-01T00:00:00Z").unwrap();
    let over = registered + REGISTRATION_TIMEOUT;
    let startup = json!([{"key": "s", "effect": "NoSchedule"}]);
    let ready = json!({"conditions": [{"type": "Ready", "status": "True"}]});
    let step = |meta: &Value, node: &Value, pod: Option<&Value>, now: UnixMillis| {
        let mut state = ClusterState::default();
        let mut whole = json!({"finalizers": [labels::TERMINATION_FINALIZER], "labels": {(labels::NODE_POOL): "p"}});
        json_patch::merge(&mut whole, meta);
        let status = objects::launched("i", &["Launched", "Registered"]);
        let patch = json!({"metadata": whole, "spec": {"startupTaints": startup}, "status": status});
        state.apply_claim(objects::claim("c", &patch));
        let mut whole = json!({"spec": {"providerID": "aws:///z/i", "taints": startup}, "status": ready});
        json_patch::merge(&mut whole, node);
        state.apply_node(objects::node("x", &whole));
        if let Some(pod) = pod {
            let mut whole = json!({"spec": {"nodeName": "x"}});
            json_patch::merge(&mut whole, pod);
            state.apply_pod(&objects::pod("a", &whole), now);
        }
        Queue::default().start_due(&state, now).pop().expect("a step").step
    };
    let report = Step::ReportUninitialized("StartupTaintsExist");
    let abandon = Step::Abandon(DisruptionReason::InitializationTimeout);
    let none = json!({});
    let daemon = json!({"metadata": {"ownerReferences":
        [{"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "d", "uid": "d", "controller": true}]}});
    let held =
        json!({"annotations": {(labels::PLANNED_PODS): "[\"n/b\"]", (labels::HOLD_UNTIL): "2026-01-01T01:00:00Z"}});
    let protected = json!({"metadata": {"annotations": {(labels::DO_NOT_DISRUPT): "true"}}});
    let standalone = json!({"labels": null});
    for (case, meta, node, pod, now, expected) in [
        ("too early", &none, &none, None, over - Duration::from_millis(1), &report),
        ("empty", &none, &none, None, over, &abandon),
        ("a DaemonSet's pod", &none, &none, Some(&daemon), over, &abandon),
        ("a pod runs there", &none, &none, Some(&none), over, &report),
        ("a pod is planned there", &held, &none, None, over, &report),
        ("protected", &none, &protected, None, over, &report),
        ("of no NodePool", &standalone, &none, None, over, &report),
        ("initialized", &none, &json!({"spec": {"taints": null}}), None, over, &Step::Initialize),
    ] {
        assert_eq!(&step(meta, node, pod, now), expected, "{case}");
    }
}

#[test]
fn the_backoff_doubles_up_to_its_limit_and_a_poll_resets_it() {
    let mut state = ClusterState::default();
    state.apply_claim(deleted(&json!({})));
    let mut queue = Queue::default();
    let mut now = UnixMillis(0);
    let mut wait = |requeue| {
        let due = queue.start_due(&state, now).pop().expect("the wait is over");
        queue.finish(due, requeue, now);
        let until = queue.waiting["c"].until;
        let wait = until.saturating_since(now).as_millis();
        now = until;
        wait
    };
    let backoff = Requeue::Backoff { until: UnixMillis::MAX };
    let waits: Vec<u128> = (0..7).map(|_| wait(backoff)).collect();
    assert_eq!(waits, [250, 500, 1_000, 2_000, 4_000, 8_000, 10_000]);
    assert_eq!(wait(Requeue::After(Duration::from_millis(500))), 500);
    assert_eq!(wait(backoff), 250);
    let soon = UnixMillis(26_600);
    assert_eq!(wait(Requeue::Backoff { until: soon }), 100, "not later than requested");
}

#[test]
fn an_initialized_claim_is_evaluated_again_when_it_or_its_node_changes() {
    let mut state = ClusterState::default();
    let mut queue = Queue::default();
    let meta = json!({"finalizers": [labels::TERMINATION_FINALIZER]});
    let status = objects::launched("i-1", &["Launched", "Registered", "Initialized"]);
    state.apply_claim(objects::claim("c", &json!({"metadata": meta, "status": status})));
    let node = |meta: &Value| objects::node("x", &json!({"metadata": meta, "spec": {"providerID": "aws:///z/i-1"}}));
    state.apply_node(node(&json!({})));
    let mut due = |state: &ClusterState| {
        let due = queue.start_due(state, UnixMillis(0));
        let steps: Vec<Step> = due.iter().map(|due| due.step.clone()).collect();
        for due in due {
            queue.finish(due, Requeue::Now, UnixMillis(0));
        }
        (steps, queue.active.len())
    };
    assert_eq!(due(&state), (vec![], 0));
    state.apply_node(node(&json!({"deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": ["f"]})));
    assert_eq!(due(&state), (vec![Step::DeleteClaim], 1));
    assert_eq!(due(&state), (vec![Step::DeleteClaim], 1), "until it is done");
    state.delete_claim("c");
    assert_eq!(due(&state), (vec![], 0));
}

proptest::proptest! {
    #![proptest_config(history::config())]

    #[test]
    fn the_steps_of_every_history_equal_those_of_a_queue_that_evaluates_every_claim(events in history::history(), fates in proptest::collection::vec(0..4_u8, 50)) {
        let mut history = History::default();
        let (mut queue, mut full) = (Queue::default(), Queue::default());
        let mut running: Vec<(DueStep, DueStep)> = Vec::new();
        for (event, fate) in events.into_iter().zip(fates) {
            history.apply(event);
            let (state, now) = (&history.state, history.now);
            full.active = state.claims.keys().cloned().collect();
            let (due, expected) = (queue.start_due(state, now), full.start_due(state, now));
            let steps = |due: &[DueStep]| due.iter().map(|due| (due.claim.clone(), due.step.clone())).collect::<Vec<_>>();
            assert_eq!(steps(&due), steps(&expected), "after {event:?}");
            running.extend(due.into_iter().zip(expected));
            let requeue = match fate {
                0 => Requeue::Now,
                1 => Requeue::After(Duration::from_millis(500)),
                2 => Requeue::Backoff { until: UnixMillis::MAX },
                _ => continue,
            };
            for (due, expected) in running.drain(..) {
                queue.finish(due, requeue, now);
                full.finish(expected, requeue, now);
            }
        }
    }
}
