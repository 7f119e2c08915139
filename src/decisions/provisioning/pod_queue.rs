//! The pods that wait for a plan.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

use crate::decisions::demand::demand;
use crate::decisions::provisioning::batch_window::BatchWindow;
use crate::model::time::UnixMillis;
use crate::state::plan_record::Holds;
use crate::state::pods::Scheduling;
use crate::state::tables::ClusterState;

/// A pod that a plan left without a node is planned again after this time.
const RETRY_AFTER: Duration = Duration::from_secs(10);

/// Pods that need a node.
#[derive(Debug, Default)]
pub struct PodQueue {
    /// When each pod was first observed to need a node.
    first_seen: BTreeMap<String, UnixMillis>,
    /// When a plan last left a pod without a node.
    failed: HashMap<String, UnixMillis>,
}

impl PodQueue {
    /// Updates the queue with the present demand. Returns the batch of pods to plan; `None` when there are none.
    pub fn observe(&mut self, state: &ClusterState, holds: &Holds, now: UnixMillis) -> Option<BatchWindow> {
        let demand = demand(state, holds, &BTreeSet::new());
        let demand: BTreeSet<&String> = demand.pending.iter().chain(&demand.displaced).collect();
        self.failed.retain(|key, at| demand.contains(key) && !at.is_older_than(RETRY_AFTER, now));
        self.first_seen.retain(|key, _| demand.contains(key));
        for key in demand {
            if !self.failed.contains_key(key) {
                self.first_seen.entry(key.clone()).or_insert(now);
            }
        }
        let batch = || self.first_seen.iter().filter(|(key, _)| !self.failed.contains_key(*key)).map(|(_, at)| *at);
        let unbound = state.unbound.iter().filter_map(|key| state.pods.get(key));
        let unattempted = unbound
            .filter(|pod| pod.scheduling == Scheduling::Unattempted && !pod.daemon && pod.deleted_at.is_none())
            .count();
        let (opened, latest) = (batch().min()?, batch().max()?);
        Some(BatchWindow { opened, latest, last_created: state.last_pod_created, unattempted })
    }

    /// When each pod was first observed to need a node.
    pub fn first_seen(&self) -> &BTreeMap<String, UnixMillis> {
        &self.first_seen
    }

    /// Records that a plan left a pod without a node.
    pub fn fail(&mut self, pod: &str, now: UnixMillis) {
        self.failed.insert(pod.to_owned(), now);
    }

    /// Records that there is no plan.
    pub fn fail_all(&mut self, now: UnixMillis) {
        self.failed.extend(self.first_seen.keys().map(|key| (key.clone(), now)));
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::test_support::objects;

    fn put(state: &mut ClusterState, name: &str, rejected: bool, now: i64) {
        let condition = json!({"type": "PodScheduled", "status": "False", "reason": "Unschedulable"});
        let conditions = if rejected { json!([condition]) } else { json!([]) };
        state.apply_pod(&objects::pod(name, &json!({"status": {"conditions": conditions}})), UnixMillis(now));
    }

    fn window(queue: &mut PodQueue, state: &ClusterState, now: i64) -> Option<(i64, i64, usize)> {
        let window = queue.observe(state, &Holds::default(), UnixMillis(now))?;
        Some((window.opened.0, window.latest.0, window.unattempted))
    }

    #[test]
    fn a_batch_spans_the_pods_that_need_a_node_and_are_not_planned_yet() {
        let (mut queue, mut state) = (PodQueue::default(), ClusterState::default());
        put(&mut state, "untried", false, 0);
        assert_eq!(window(&mut queue, &state, 0), None, "the scheduler has not tried it");
        put(&mut state, "a", true, 0);
        assert_eq!(window(&mut queue, &state, 10), Some((10, 10, 1)));
        put(&mut state, "b", true, 20);
        assert_eq!(window(&mut queue, &state, 20), Some((10, 20, 1)));
        state.delete_pod("n/a", UnixMillis(30));
        state.delete_pod("n/untried", UnixMillis(30));
        assert_eq!(window(&mut queue, &state, 30), Some((20, 20, 0)));
        let first_seen = BTreeMap::from([("n/b".to_owned(), UnixMillis(20))]);
        assert_eq!(queue.first_seen(), &first_seen);
    }

    #[test]
    fn a_pod_without_a_node_is_planned_again_after_ten_seconds_or_when_it_is_new() {
        let (mut queue, mut state) = (PodQueue::default(), ClusterState::default());
        put(&mut state, "a", true, 0);
        put(&mut state, "b", true, 0);
        assert_eq!(window(&mut queue, &state, 0), Some((0, 0, 0)));
        queue.fail("n/a", UnixMillis(5));
        assert_eq!(window(&mut queue, &state, 5), Some((0, 0, 0)), "the other");
        queue.fail_all(UnixMillis(6));
        assert_eq!(window(&mut queue, &state, 10_005), None);
        assert_eq!(window(&mut queue, &state, 10_006), Some((0, 0, 0)));
        queue.fail_all(UnixMillis(10_006));
        state.delete_pod("n/a", UnixMillis(10_007));
        assert_eq!(window(&mut queue, &state, 10_007), None);
        put(&mut state, "new", true, 10_008);
        assert_eq!(window(&mut queue, &state, 10_008), Some((10_008, 10_008, 0)));
    }
}
