use serde_json::json;

use super::*;
use crate::model::labels;
use crate::test_support::objects;

#[test]
fn a_pod_that_stays_unattempted_does_not_pause_consolidation_when_others_are_created() {
    let mut state = ClusterState::default();
    state.apply_pod(&objects::pod("old", &json!({})), UnixMillis(0));
    let now = UnixMillis(0) + PENDING_PERIOD;
    state.apply_pod(&objects::pod("new", &json!({"spec": {"nodeName": "x"}})), now);
    assert_eq!(pause(&state, &mut PendingPods::default(), now), None);
    state.apply_pod(&objects::pod("untried", &json!({})), now);
    assert_eq!(pause(&state, &mut PendingPods::default(), now), Some(Pause::PodUnattempted));
}

#[test]
fn consolidation_waits_while_nodes_boot_or_drain_and_while_pods_wait_for_nodes() {
    let now = UnixMillis(1_000_000);
    let moment = Duration::from_secs(1);
    let rejected = json!({"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}]});
    let bound = json!({"spec": {"nodeName": "x"}});
    let unbound = json!({"status": rejected});
    let daemon = json!({"metadata": {"ownerReferences":
        [{"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "d", "uid": "d", "controller": true}]}});
    let marked = json!({(labels::DISRUPTING): "Empty/"});
    let old = (now - BOOT_TIMEOUT).rfc3339();
    let of_nobody = json!({"spec": {"schedulerName": "nobody"}});
    for (case, conditions, created, annotations, pod, seen, settled) in [
        ("initialized", &["Initialized"][..], &old, json!({}), None, now, true),
        ("booting", &[], &(now - BOOT_TIMEOUT + moment).rfc3339(), json!({}), None, now, false),
        ("never booted", &[], &old, json!({}), None, now, true),
        ("leaving, with a pod", &["Initialized"], &old, marked.clone(), Some(&bound), UnixMillis(0), false),
        ("leaving, without a pod", &["Initialized"], &old, marked, None, now, true),
        ("a pod runs", &["Initialized"], &old, json!({}), Some(&bound), now, true),
        ("a rejected pod", &["Initialized"], &old, json!({}), Some(&unbound), now - PENDING_PERIOD + moment, false),
        ("a pod rejected long ago", &["Initialized"], &old, json!({}), Some(&unbound), now - PENDING_PERIOD, true),
        ("a new pod", &["Initialized"], &old, json!({}), Some(&json!({})), now - PENDING_PERIOD + moment, false),
        (
            "a pod that no one schedules",
            &["Initialized"],
            &old,
            json!({}),
            Some(&json!({})),
            now - PENDING_PERIOD,
            true,
        ),
        ("a new pod of an unknown scheduler", &["Initialized"], &old, json!({}), Some(&of_nobody), now, true),
        ("a new DaemonSet pod", &["Initialized"], &old, json!({}), Some(&daemon), now, true),
    ] {
        let mut state = ClusterState::default();
        let meta = json!({"annotations": annotations, "creationTimestamp": created});
        let status = objects::launched("i-1", conditions);
        state.apply_claim(objects::claim("c", &json!({"metadata": meta, "status": status})));
        state.apply_node(objects::node("x", &json!({"spec": {"providerID": "aws:///z/i-1"}})));
        if let Some(patch) = pod {
            state.apply_pod(&objects::pod("a", patch), seen);
        }
        assert_eq!(pause(&state, &mut PendingPods::default(), now).is_none(), settled, "{case}");
    }
}

/// A pod that no node fits, rejected at `now`.
fn reject(state: &mut ClusterState, namespace: &str, name: &str, now: UnixMillis) {
    let rejected = json!({"type": "PodScheduled", "status": "False", "reason": "Unschedulable"});
    let meta = json!({"namespace": namespace, "uid": format!("{name}-{}", now.0)});
    state.apply_pod(&objects::pod(name, &json!({"metadata": meta, "status": {"conditions": [rejected]}})), now);
}

/// Seconds of `period` in which consolidation pauses, while the namespaces recreate their pods every 25 s in turns of `turn` seconds.
fn paused(namespaces: &[&str], turn: usize, period: usize) -> usize {
    let (mut state, mut pending) = (ClusterState::default(), PendingPods::default());
    let pass = |second: usize| {
        let now = UnixMillis(1_000_000) + Duration::from_secs(second as u64);
        if second.is_multiple_of(25) {
            let namespace = namespaces[second / turn % namespaces.len()];
            state.unbound.clone().iter().for_each(|key| state.delete_pod(key, now));
            reject(&mut state, namespace, "huge", now);
        }
        second.is_multiple_of(5) && pause(&state, &mut pending, now).is_some()
    };
    5 * (0..period).map(pass).filter(|paused| *paused).count()
}

#[test]
fn pods_that_fit_nowhere_and_are_recreated_pause_consolidation_for_two_minutes() {
    assert_eq!(paused(&["tenant"], 1, 3_600), 120);
}

#[test]
fn namespaces_that_take_turns_let_a_pass_through_every_ten_minutes() {
    let hour = paused(&["a", "b", "c", "d", "e", "f"], 100, 3_600);
    assert_eq!(3_600 - hour, 5 * 6 - 5, "{hour}");
}

/// Seconds of an hour in which consolidation pauses, while a pod that comes and goes keeps one node coming up, and a pod waits from time to
/// time.
#[test]
fn nodes_that_come_up_one_after_another_let_a_pass_through_every_ten_minutes() {
    let (mut state, mut pending) = (ClusterState::default(), PendingPods::default());
    let mut paused = 0;
    for second in (0..3_600).step_by(5) {
        let now = UnixMillis(1_000_000) + Duration::from_secs(second);
        if second.is_multiple_of(240) {
            let meta = json!({"creationTimestamp": now.rfc3339()});
            state.apply_claim(objects::claim(&format!("c{second}"), &json!({ "metadata": meta })));
        }
        if second.is_multiple_of(400) {
            reject(&mut state, "tenant", "small", now);
        }
        paused += 5 * u64::from(pause(&state, &mut pending, now).is_some());
    }
    assert_eq!(3_600 - paused, 5 * 5, "{paused}");
}

#[test]
fn a_namespace_that_was_quiet_pauses_consolidation_again() {
    let (mut state, mut pending, mut now) = (ClusterState::default(), PendingPods::default(), UnixMillis(1_000_000));
    for pass in 0..30 {
        reject(&mut state, "tenant", &format!("p{pass}"), now);
        let expected = (pass < 24).then_some(Pause::PodUnschedulable);
        assert_eq!(pause(&state, &mut pending, now), expected, "pass {pass}");
        now += Duration::from_secs(5);
    }
    reject(&mut state, "other", "first", now);
    assert_eq!(pause(&state, &mut pending, now), Some(Pause::PodUnschedulable), "another namespace");
    now += QUIET;
    assert_eq!(pause(&state, &mut pending, now), None);
    reject(&mut state, "tenant", "later", now);
    assert_eq!(pause(&state, &mut pending, now), Some(Pause::PodUnschedulable), "after it was quiet");
    assert_eq!(pending.namespaces.len(), 1, "only namespaces with new pods are remembered");
}

#[test]
fn a_clock_that_is_set_back_lengthens_no_pause() {
    let (mut state, mut pending) = (ClusterState::default(), PendingPods::default());
    let late = UnixMillis(1_000_000_000);
    reject(&mut state, "tenant", "before", late);
    assert!(pause(&state, &mut pending, late).is_some());
    let mut now = UnixMillis(1_000_000);
    let mut passes = 0;
    loop {
        state.unbound.clone().iter().for_each(|key| state.delete_pod(key, now));
        reject(&mut state, "tenant", "after", now);
        if pause(&state, &mut pending, now).is_none() && passes > 1 {
            break;
        }
        passes += 1;
        now += Duration::from_secs(5);
        assert!(passes < 30, "two minutes");
    }
}
