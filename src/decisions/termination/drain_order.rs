//! Drain order: groups of pods are evicted one after the other; pods that would outlast the deadline are deleted.

use std::cmp::Reverse;
use std::time::Duration;

use stowage_api::NodeClaim;
use stowage_model::time::UnixMillis;

use crate::decisions::pod_ref::PodRef;
use crate::decisions::termination::deadlines::termination_deadline;
use crate::state::pods::PodRecord;
use crate::state::tables::ClusterState;

/// A terminating pod is stuck this long after its `deletionTimestamp`, which includes its grace period (Karpenter core reference
/// 5.10).
const STUCK_AFTER: Duration = Duration::from_mins(1);
/// The same after the deadline of the drain: the instance is terminated with the pod.
const STUCK_AFTER_DEADLINE: Duration = Duration::from_secs(5);
/// A pod that is deleted again gets a grace period of at least a second; a pod that ends within this time is left alone.
const MIN_SHORTENING: Duration = Duration::from_secs(2);

/// A pod that is deleted gets a grace period of at least this.
const MIN_GRACE_PERIOD: Duration = Duration::from_secs(1);

/// What one pass of a drain does.
#[derive(Debug, PartialEq, Eq)]
pub struct DrainPass {
    /// Pods to evict.
    pub evict: Vec<PodRef>,
    /// Pods to delete regardless of their budgets.
    pub delete: Vec<PodRef>,
    /// Grace period of the deleted pods, in whole seconds: it ends at the deadline.
    pub grace_period: Duration,
    /// When the next of the other pods must be deleted; [`UnixMillis::MAX`] when none must be.
    pub next_deletion: UnixMillis,
}

impl DrainPass {
    /// Evicts the next group of pods of the claim's node, and deletes the pods that would outlast the deadline.
    pub fn new(state: &ClusterState, claim: &NodeClaim, node: &str, now: UnixMillis) -> Self {
        let deadline = termination_deadline(claim);
        let waiting = waiting(state, claim, node, now);
        let late = |pod: &PodRecord| deadline.is_some_and(|deadline| must_be_deleted(pod, deadline, now));
        let left = deadline.map_or(Duration::ZERO, |deadline| deadline.saturating_since(now));
        Self {
            evict: next_group(&waiting).into_iter().filter(|pod| !late(pod)).map(PodRef::of).collect(),
            delete: waiting.iter().copied().filter(|pod| late(pod)).map(PodRef::of).collect(),
            grace_period: Duration::from_secs(left.as_secs()).max(MIN_GRACE_PERIOD),
            next_deletion: deadline.map_or(UnixMillis::MAX, |deadline| next_deletion(&waiting, deadline, now)),
        }
    }
}

/// Pods that the drain of the claim's node waits for.
pub fn waiting<'a>(state: &'a ClusterState, claim: &NodeClaim, node: &str, now: UnixMillis) -> Vec<&'a PodRecord> {
    let over = termination_deadline(claim).is_some_and(|deadline| now > deadline);
    let stuck_after = if over { STUCK_AFTER_DEADLINE } else { STUCK_AFTER };
    let stuck = |pod: &PodRecord| pod.deleted_at.is_some_and(|at| now > at + stuck_after);
    state.pods_on(node).filter(|pod| pod.drainable() && !stuck(pod)).collect()
}

/// The waiting pods to evict now: the first nonempty group of other pods, DaemonSet pods, critical pods, critical DaemonSet pods.
/// A protected pod is waited for and not evicted.
fn next_group<'a>(waiting: &[&'a PodRecord]) -> Vec<&'a PodRecord> {
    let group = |pod: &PodRecord| (pod.critical, pod.daemon);
    let Some(first) = waiting.iter().map(|pod| group(pod)).min() else {
        return Vec::new();
    };
    let mut out: Vec<&PodRecord> = waiting
        .iter()
        .filter(|pod| group(pod) == first && pod.deleted_at.is_none() && !pod.do_not_disrupt)
        .copied()
        .collect();
    // Their successors get the room of their own before smaller ones take parts of it.
    out.sort_by_cached_key(|pod| (Reverse(size(pod)), pod.key()));
    out
}

/// Millicores, or memory at 4 GiB per core if that is more.
fn size(pod: &PodRecord) -> i64 {
    const MEMORY_PER_MILLICORE: i64 = (4 << 30) / 1_000;
    let requests = pod.entry.as_ref().ok().map(|entry| &entry.class.requests);
    requests.map_or(0, |requests| requests.cpu.0.max(requests.memory.0 / MEMORY_PER_MILLICORE))
}

/// Whether a pod must be deleted to meet the deadline: it runs and needs the remaining time to terminate, or it terminates after the
/// deadline.
fn must_be_deleted(pod: &PodRecord, deadline: UnixMillis, now: UnixMillis) -> bool {
    match pod.deleted_at {
        None => now > latest_deletion(pod, deadline),
        Some(end) => end > deadline.max(now + MIN_SHORTENING),
    }
}

/// The latest time to delete a running pod for its grace period to end at the deadline.
fn latest_deletion(pod: &PodRecord, deadline: UnixMillis) -> UnixMillis {
    deadline - pod.grace_period
}

/// When the next of these pods must be deleted; [`UnixMillis::MAX`] when none must be.
fn next_deletion(waiting: &[&PodRecord], deadline: UnixMillis, now: UnixMillis) -> UnixMillis {
    let running = waiting.iter().filter(|pod| pod.deleted_at.is_none());
    let due = running.map(|pod| latest_deletion(pod, deadline) + Duration::from_millis(1));
    due.filter(|at| *at > now).min().unwrap_or(UnixMillis::MAX)
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use stowage_model::labels;
    use stowage_test_objects as objects;

    use super::*;

    fn pod(name: &str, json: serde_json::Value) -> PodRecord {
        let mut all =
            json!({"metadata": {"name": name, "namespace": "n"}, "spec": {"containers": [], "nodeName": "x"}});
        json_patch::merge(&mut all, &json);
        PodRecord::new(&serde_json::from_value(all).unwrap(), Err(String::new()))
    }

    fn claim(annotations: &serde_json::Value) -> NodeClaim {
        let deletion = "1970-01-01T00:01:40Z";
        let meta = json!({"annotations": annotations, "deletionTimestamp": deletion, "finalizers": ["f"]});
        objects::claim("c", &json!({"metadata": meta, "spec": {"terminationGracePeriod": "1h"}}))
    }

    #[test]
    fn large_pods_of_a_group_are_evicted_first() {
        let mut state = ClusterState::default();
        for (name, requests) in [
            ("a", json!({})),
            ("b", json!({"cpu": "1"})),
            ("c", json!({"cpu": "100m", "memory": "8Gi"})),
            ("d", json!({"cpu": "1", "memory": "1Gi"})),
        ] {
            let container = json!({"name": "c", "resources": {"requests": requests}});
            state.apply_pod(
                &objects::pod(name, &json!({"spec": {"nodeName": "x", "containers": [container]}})),
                UnixMillis(1),
            );
        }
        let pass = DrainPass::new(&state, &claim(&json!({})), "x", UnixMillis(2));
        assert_eq!(pass.evict.iter().map(|pod| &*pod.name).collect::<Vec<_>>(), ["c", "b", "d", "a"]);
    }

    #[test]
    fn a_pass_evicts_a_group_and_deletes_pods_that_would_outlast_the_deadline() {
        let mut state = ClusterState::default();
        for (name, grace) in [("short", 10), ("long", 40)] {
            let spec = json!({"nodeName": "x", "terminationGracePeriodSeconds": grace});
            state.apply_pod(&objects::pod(name, &json!({"spec": spec})), UnixMillis(1));
        }
        let names = |pods: Vec<PodRef>| pods.into_iter().map(|pod| pod.name).collect::<Vec<_>>().join(" ");
        let pass = |deadline: Option<&str>, now: i64| {
            let pass = DrainPass::new(
                &state,
                &claim(&json!({(labels::TERMINATION_TIMESTAMP): deadline})),
                "x",
                UnixMillis(now),
            );
            (names(pass.evict), names(pass.delete), pass.grace_period.as_secs(), pass.next_deletion.0)
        };
        let text = |evict: &str, delete: &str| (evict.to_owned(), delete.to_owned());
        let expect = |(evict, delete), grace: u64, next: i64| (evict, delete, grace, next);
        let deadline = Some("1970-01-01T00:01:40Z");
        assert_eq!(pass(deadline, 60_000), expect(text("long short", ""), 40, 60_001));
        assert_eq!(pass(deadline, 60_001), expect(text("short", "long"), 39, 90_001), "long needs 40 s");
        assert_eq!(pass(deadline, 99_999), expect(text("", "long short"), 1, i64::MAX), "at least a second");
        let grace_period = pass(None, 100_000);
        assert_eq!(grace_period, expect(text("long short", ""), 3_600, 3_660_001), "an hour after the deletion");
    }

    #[test]
    fn a_drain_that_budgets_block_continues_when_a_pod_must_be_deleted() {
        let running = |grace: i64| pod("p", json!({"spec": {"terminationGracePeriodSeconds": grace}}));
        let terminating = pod("q", json!({"metadata": {"deletionTimestamp": "1970-01-01T00:00:01Z"}}));
        let (short, long) = (running(10), running(40));
        let deadline = UnixMillis(100_000);
        let next = |pods: &[&PodRecord], now| next_deletion(pods, deadline, UnixMillis(now)).0;
        assert_eq!(next(&[&short, &long, &terminating], 0), 60_001);
        assert_eq!(next(&[&short, &long, &terminating], 60_001), 90_001, "the other is due already");
        assert!(must_be_deleted(&long, deadline, UnixMillis(60_001)));
        assert!(!must_be_deleted(&long, deadline, UnixMillis(60_000)));
        assert_eq!(next(&[&terminating], 0), i64::MAX);
    }

    #[test]
    fn c38_after_its_deadline_a_drain_deletes_every_pod_and_waits_for_no_stuck_pod() {
        let mut state = ClusterState::default();
        let mut put = |name: &str, deletion: Option<&str>| {
            let pod = json!({"metadata": {"name": name, "namespace": "n", "uid": name, "deletionTimestamp": deletion,
                    "annotations": {(labels::DO_NOT_DISRUPT): "true"}},
                "spec": {"containers": [], "nodeName": "x", "terminationGracePeriodSeconds": 600}});
            state.apply_pod(&serde_json::from_value(pod).unwrap(), UnixMillis(1));
        };
        put("running", None);
        put("stuck", Some("1970-01-01T00:01:35Z"));
        put("slow", Some("1970-01-01T00:10:00Z"));
        let now = UnixMillis(101_000);
        let names = |annotations: serde_json::Value| {
            let waiting = waiting(&state, &claim(&annotations), "x", now);
            let mut names: Vec<_> = waiting.iter().map(|pod| pod.name.clone()).collect();
            names.sort();
            names
        };
        let over = json!({(labels::TERMINATION_TIMESTAMP): "1970-01-01T00:01:30Z"});
        assert_eq!(names(over), ["running", "slow"]);
        assert_eq!(names(json!({})), ["running", "slow", "stuck"], "the deadline is an hour ahead");
        let deleted = |name: &str| must_be_deleted(&state.pods[&format!("n/{name}")], UnixMillis(90_000), now);
        assert!(deleted("running") && deleted("slow"), "despite protection and a grace period of ten minutes");
        assert!(!deleted("stuck"), "its grace period is over: it is not deleted repeatedly");
    }

    #[test]
    fn groups_are_evicted_one_after_the_other_and_protected_pods_are_waited_for() {
        let daemon = json!({"metadata": {"ownerReferences": [{"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "d", "uid": "d", "controller": true}]}});
        let critical = json!({"spec": {"priorityClassName": "system-cluster-critical"}});
        let all = [
            pod("web", json!({})),
            pod("protected", json!({"metadata": {"annotations": {(labels::DO_NOT_DISRUPT): "true"}}})),
            pod("agent", daemon),
            pod("dns", critical),
        ];
        let names = |from: usize| {
            next_group(&all[from..].iter().collect::<Vec<_>>()).iter().map(|pod| pod.name.clone()).collect::<Vec<_>>()
        };
        assert_eq!(names(0), ["web"]);
        assert_eq!(names(1), Vec::<String>::new(), "no other group while a protected pod is waited for");
        assert_eq!(names(2), ["agent"]);
        assert_eq!(names(3), ["dns"]);
    }
}
