use serde_json::{Value, json};
use stowage_test_objects as objects;

use super::*;
use crate::decisions::demand::demand;

fn put(state: &mut ClusterState, name: &str, rejected: bool, now: i64) {
    let condition = json!({"type": "PodScheduled", "status": "False", "reason": "Unschedulable"});
    let conditions = if rejected { json!([condition]) } else { json!([]) };
    let container = json!({"name": "c", "resources": {"requests": {"cpu": if rejected { "1" } else { "2" }}}});
    let pod = json!({"spec": {"containers": [container]}, "status": {"conditions": conditions}});
    state.apply_pod(&objects::pod(name, &pod), UnixMillis(now));
}

fn window(queue: &mut PodQueue, state: &ClusterState, now: i64) -> Option<(i64, i64, usize)> {
    let (quarantine, backoff) = (&mut Quarantine::default(), &mut PurchaseBackoff::default());
    let (holds, now) = (Holds::default(), UnixMillis(now));
    let window = queue.observe(state, &holds, &demand(state, &holds, now), quarantine, backoff, now)?;
    Some((window.opened.0, window.latest.0, window.unattempted))
}

#[test]
fn a_batch_spans_the_pods_that_need_a_node_and_are_not_planned_yet() {
    let (mut queue, mut state) = (PodQueue::default(), ClusterState::default());
    put(&mut state, "untried", false, 0);
    assert_eq!(window(&mut queue, &state, 0), None, "the scheduler has not tried it");
    put(&mut state, "a", true, 0);
    assert_eq!(window(&mut queue, &state, 99), Some((0, 0, 0)), "it was created a moment ago");
    put(&mut state, "b", true, 120);
    assert_eq!(window(&mut queue, &state, 120), Some((0, 120, 1)));
    state.delete_pod("n/a", UnixMillis(130));
    state.delete_pod("n/untried", UnixMillis(130));
    assert_eq!(window(&mut queue, &state, 130), Some((120, 120, 0)));
    let first_seen = BTreeMap::from([("n/b".to_owned(), UnixMillis(120))]);
    assert_eq!(queue.first_seen(), &first_seen);
}

#[test]
fn a_batch_begins_with_its_first_rejection_while_another_plan_is_written() {
    let (mut queue, mut state) = (PodQueue::default(), ClusterState::default());
    put(&mut state, "a", true, 0);
    assert_eq!(window(&mut queue, &state, 10), Some((0, 0, 0)));
    let held = Holds { by_pod: [("n/a".to_owned(), "c".to_owned())].into(), ..Holds::default() };
    let (quarantine, backoff) = (&mut Quarantine::default(), &mut PurchaseBackoff::default());
    put(&mut state, "b", true, 300);
    let now = UnixMillis(500);
    let window_at_500 = queue.observe(&state, &held, &demand(&state, &held, now), quarantine, backoff, now).unwrap();
    assert_eq!(
        (window_at_500.opened.0, window_at_500.latest.0),
        (300, 300),
        "the plan of the first was written meanwhile"
    );
    assert_eq!(window(&mut queue, &state, 700), Some((300, 500, 0)), "the hold of the first ended since then");
}

#[test]
fn an_unattempted_pod_waits_from_its_creation_or_the_last_plan_on() {
    let (mut queue, mut state) = (PodQueue::default(), ClusterState::default());
    put(&mut state, "a", true, 0);
    let sibling = json!({"name": "c", "resources": {"requests": {"cpu": "1"}}});
    state.apply_pod(&objects::pod("b", &json!({"spec": {"containers": [sibling]}})), UnixMillis(200));
    state.delete_pod("n/a", UnixMillis(200));
    assert_eq!(window(&mut queue, &state, 600), None, "no pod of its class is rejected");
    put(&mut state, "c", true, 700);
    assert_eq!(window(&mut queue, &state, 700), Some((200, 700, 1)));
    let mut queue = PodQueue::default();
    queue.planned_with(&state, &[], UnixMillis(500));
    assert_eq!(window(&mut queue, &state, 700), Some((500, 700, 1)), "it was no demand when others were planned");
}

#[test]
fn f25_pods_that_no_scheduler_attempts_lengthen_no_batch() {
    let (mut queue, mut state) = (PodQueue::default(), ClusterState::default());
    put(&mut state, "a", true, 0);
    put(&mut state, "untried", false, 0);
    let of_nobody = |name: &str, disk: &str, conditions: &Value| {
        let spec = json!({"schedulerName": "nobody", "nodeSelector": {"disk": disk}});
        objects::pod(name, &json!({"spec": spec, "status": {"conditions": conditions}}))
    };
    state.apply_pod(&of_nobody("b", "ssd", &json!([])), UnixMillis(0));
    assert_eq!(window(&mut queue, &state, 100), Some((0, 0, 1)), "an unknown scheduler");
    assert_eq!(window(&mut queue, &state, 10_000), Some((0, 0, 0)), "not attempted for ten seconds");
    let condition = json!({"type": "PodScheduled", "status": "False", "reason": "Unschedulable"});
    state.apply_pod(&of_nobody("c", "hdd", &json!([condition])), UnixMillis(0));
    assert_eq!(window(&mut queue, &state, 100).map(|window| window.2), Some(2), "the scheduler runs");
}

#[test]
fn a_quarantined_pod_opens_no_batch_until_its_time_is_over() {
    let (mut queue, mut state, holds) = (PodQueue::default(), ClusterState::default(), Holds::default());
    let mut quarantine = Quarantine::default();
    let mut observe = |state: &ClusterState, quarantine: &mut Quarantine, now| {
        let window =
            queue.observe(state, &holds, &demand(state, &holds, now), quarantine, &mut PurchaseBackoff::default(), now);
        (window.is_some(), Cause::ALL.map(|cause| queue.quarantined(cause)))
    };
    put(&mut state, "a", true, 0);
    let class = Arc::clone(&state.pods["n/a"].entry.as_ref().unwrap().class);
    let wait = quarantine.add(&class, Cause::PlannerPanic, UnixMillis(0)).unwrap();
    assert_eq!(observe(&state, &mut quarantine, UnixMillis(1)), (false, [1, 0, 0]));
    let over = UnixMillis(0) + wait;
    assert_eq!(observe(&state, &mut quarantine, over), (true, [0, 0, 0]));
    state.delete_pod("n/a", over);
    observe(&state, &mut quarantine, over);
    assert!(quarantine.is_empty(), "the pod is gone");
}

#[test]
fn a_pod_without_a_node_is_planned_again_at_once_when_a_node_pool_becomes_ready() {
    let (mut queue, mut state) = (PodQueue::default(), ClusterState::default());
    let catalog = Arc::new(objects::catalog());
    let ready = |generation: i64| {
        let pool = objects::node_pool("p", &json!({"metadata": {"generation": generation}}));
        [ReadyPool { pool: Arc::new(pool), catalog: Arc::clone(&catalog) }]
    };
    put(&mut state, "a", true, 0);
    assert_eq!(window(&mut queue, &state, 0), Some((0, 0, 0)));
    let mut now = 60_000;
    queue.planned_with(&state, &[], UnixMillis(now));
    queue.fail("n/a", UnixMillis(now));
    queue.help(&state, &[], UnixMillis(now));
    assert_eq!((window(&mut queue, &state, now), queue.has_failed()), (None, true));
    queue.help(&state, &ready(1), UnixMillis(now));
    assert_eq!((window(&mut queue, &state, now), queue.has_failed()), (Some((0, 0, 0)), false));
    queue.planned_with(&state, &ready(1), UnixMillis(now));
    queue.fail("n/a", UnixMillis(now));
    for (later, generation, is_planned) in [(100, 2, false), (999, 2, false), (1_000, 2, true)] {
        queue.help(&state, &ready(generation), UnixMillis(now + later));
        assert_eq!(window(&mut queue, &state, now + later).is_some(), is_planned, "at most once a second");
    }
    now += 1_000;
    queue.planned_with(&state, &ready(2), UnixMillis(now));
    queue.fail("n/a", UnixMillis(now));
    queue.help(&state, &ready(2), UnixMillis(now + 5_000));
    assert_eq!(window(&mut queue, &state, now + 5_000), None, "nothing changed");
}

#[test]
fn a_pod_without_a_node_is_planned_again_after_ten_seconds_or_when_it_is_new() {
    let (mut queue, mut state) = (PodQueue::default(), ClusterState::default());
    put(&mut state, "a", true, 0);
    put(&mut state, "b", true, 0);
    assert_eq!(window(&mut queue, &state, 0), Some((0, 0, 0)));
    queue.fail("n/a", UnixMillis(5));
    assert_eq!(window(&mut queue, &state, 5), Some((0, 0, 0)), "the other");
    for pod in ["n/a", "n/b"] {
        queue.fail(pod, UnixMillis(6));
    }
    assert_eq!(window(&mut queue, &state, 10_005), None);
    assert_eq!(window(&mut queue, &state, 10_006), Some((0, 0, 0)));
    for pod in ["n/a", "n/b"] {
        queue.fail(pod, UnixMillis(10_006));
    }
    state.delete_pod("n/a", UnixMillis(10_007));
    assert_eq!(window(&mut queue, &state, 10_007), None);
    put(&mut state, "new", true, 10_008);
    assert_eq!(window(&mut queue, &state, 10_008), Some((10_008, 10_008, 0)));
}
