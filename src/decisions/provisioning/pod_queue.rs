//! The pods that wait for a plan.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use crate::decisions::demand::demand;
use crate::decisions::provisioning::batch_window::{BatchWindow, QUIET_PERIOD};
use crate::decisions::provisioning::purchase_backoff::PurchaseBackoff;
use crate::decisions::provisioning::quarantine::{Cause, Quarantine};
use crate::decisions::provisioning::supply_watch::SupplyWatch;
use crate::model::pod_class::PodClass;
use crate::model::time::UnixMillis;
use crate::state::instance_types::ReadyPool;
use crate::state::plan_record::Holds;
use crate::state::pods::Scheduling;
use crate::state::tables::ClusterState;

/// A pod that a plan left without a node is planned again after this time, whatever happens.
const RETRY_AFTER: Duration = Duration::from_secs(10);
/// Changes that can help end the wait at most this often.
const MIN_RETRY_PERIOD: Duration = Duration::from_secs(1);

/// A pod that its scheduler has not attempted in this time belongs to no burst.
const ATTEMPT_PERIOD: Duration = Duration::from_secs(10);

/// Pods that need a node.
#[derive(Debug, Default)]
pub struct PodQueue {
    /// When each pod was first observed to need a node.
    first_seen: BTreeMap<String, UnixMillis>,
    /// When a plan last left a pod without a node.
    failed: HashMap<String, UnixMillis>,
    supply: SupplyWatch,
    /// Something that can help changed since the failed pods were planned.
    is_helped: bool,
    /// When such a change last ended the wait of the failed pods.
    helped_at: UnixMillis,
    /// Pods that are left out of plans at present.
    quarantined: HashMap<String, Cause>,
}

impl PodQueue {
    /// Updates the queue with the present demand. Returns the batch of pods to plan; `None` when there are none.
    pub fn observe(
        &mut self,
        state: &ClusterState,
        holds: &Holds,
        quarantine: &mut Quarantine,
        backoff: &mut PurchaseBackoff,
        now: UnixMillis,
    ) -> Option<BatchWindow> {
        let demand = demand(state, holds, now);
        let demand: BTreeSet<&String> = demand.pending.iter().chain(&demand.displaced).collect();
        self.failed.retain(|key, at| demand.contains(key) && !at.is_older_than(RETRY_AFTER, now));
        backoff.observe(state, holds, &demand, |key| self.failed.contains_key(key), now);
        self.quarantined = quarantined(state, &demand, quarantine, now);
        self.quarantined.extend(backoff.left_out().iter().map(|key| (key.clone(), Cause::PurchasedInVain)));
        self.first_seen.retain(|key, _| demand.contains(key));
        let others = state.unbound.iter().filter(|key| !demand.contains(key)).filter_map(|key| state.pods.get(key));
        let unattempted = others
            .filter(|pod| pod.scheduling == Scheduling::Unattempted && !pod.daemon && pod.deleted_at.is_none())
            .filter(|pod| state.schedulers.has(pod) && !pod.first_seen.is_older_than(ATTEMPT_PERIOD, now))
            .filter(|pod| pod.first_seen.is_older_than(QUIET_PERIOD, now))
            .count();
        for key in demand {
            if !self.failed.contains_key(key) {
                self.first_seen.entry(key.clone()).or_insert(now);
            }
        }
        let waits = |key: &String| self.failed.contains_key(key) || self.quarantined.contains_key(key);
        let batch = || self.first_seen.iter().filter(|(key, _)| !waits(key)).map(|(_, at)| *at);
        let (opened, latest) = (batch().min()?, batch().max()?);
        Some(BatchWindow { opened, latest, unattempted })
    }

    /// Whether pods wait that a plan left without a node.
    pub fn has_failed(&self) -> bool {
        !self.failed.is_empty()
    }

    /// Ends the wait of the pods that a plan left without a node, if something changed that can help them: see [`SupplyWatch`].
    pub fn help(&mut self, state: &ClusterState, pools: &[ReadyPool], now: UnixMillis) {
        self.is_helped |= self.supply.improved(state, pools);
        if self.is_helped && self.helped_at.is_older_than(MIN_RETRY_PERIOD, now) {
            self.failed.clear();
            (self.is_helped, self.helped_at) = (false, now);
        }
    }

    /// Records what could be purchased when the present demand was planned.
    pub fn planned_with(&mut self, state: &ClusterState, pools: &[ReadyPool]) {
        self.supply.improved(state, pools);
        self.is_helped = false;
    }

    /// Number of pods that need a node and are left out of plans.
    pub fn quarantined(&self, cause: Cause) -> usize {
        self.quarantined.values().filter(|other| **other == cause).count()
    }

    /// When each pod was first observed to need a node.
    pub fn first_seen(&self) -> &BTreeMap<String, UnixMillis> {
        &self.first_seen
    }

    /// Records that a plan left a pod without a node.
    pub fn fail(&mut self, pod: &str, now: UnixMillis) {
        self.failed.insert(pod.to_owned(), now);
    }
}

/// The pods of the demand that are left out of plans. What no pod of the demand needs is forgotten.
fn quarantined(
    state: &ClusterState,
    demand: &BTreeSet<&String>,
    quarantine: &mut Quarantine,
    now: UnixMillis,
) -> HashMap<String, Cause> {
    if quarantine.is_empty() {
        return HashMap::new();
    }
    let class = |key: &String| Some(&state.pods.get(key)?.entry.as_ref().ok()?.class);
    let classes: HashSet<&Arc<PodClass>> = demand.iter().filter_map(|key| class(key)).collect();
    quarantine.forget(&classes.iter().map(|class| &***class).collect(), now);
    let causes: HashMap<*const PodClass, Cause> =
        classes.iter().filter_map(|class| Some((Arc::as_ptr(class), quarantine.cause(class, now)?))).collect();
    let cause = |key: &String| causes.get(&Arc::as_ptr(class(key)?)).copied();
    demand.iter().filter_map(|key| Some(((*key).clone(), cause(key)?))).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::test_support::objects;

    fn put(state: &mut ClusterState, name: &str, rejected: bool, now: i64) {
        let condition = json!({"type": "PodScheduled", "status": "False", "reason": "Unschedulable"});
        let conditions = if rejected { json!([condition]) } else { json!([]) };
        let container = json!({"name": "c", "resources": {"requests": {"cpu": if rejected { "1" } else { "2" }}}});
        let pod = json!({"spec": {"containers": [container]}, "status": {"conditions": conditions}});
        state.apply_pod(&objects::pod(name, &pod), UnixMillis(now));
    }

    fn window(queue: &mut PodQueue, state: &ClusterState, now: i64) -> Option<(i64, i64, usize)> {
        let (quarantine, backoff) = (&mut Quarantine::default(), &mut PurchaseBackoff::default());
        let window = queue.observe(state, &Holds::default(), quarantine, backoff, UnixMillis(now))?;
        Some((window.opened.0, window.latest.0, window.unattempted))
    }

    #[test]
    fn a_batch_spans_the_pods_that_need_a_node_and_are_not_planned_yet() {
        let (mut queue, mut state) = (PodQueue::default(), ClusterState::default());
        put(&mut state, "untried", false, 0);
        assert_eq!(window(&mut queue, &state, 0), None, "the scheduler has not tried it");
        put(&mut state, "a", true, 0);
        assert_eq!(window(&mut queue, &state, 99), Some((99, 99, 0)), "it was created a moment ago");
        put(&mut state, "b", true, 120);
        assert_eq!(window(&mut queue, &state, 120), Some((99, 120, 1)));
        state.delete_pod("n/a", UnixMillis(130));
        state.delete_pod("n/untried", UnixMillis(130));
        assert_eq!(window(&mut queue, &state, 130), Some((120, 120, 0)));
        let first_seen = BTreeMap::from([("n/b".to_owned(), UnixMillis(120))]);
        assert_eq!(queue.first_seen(), &first_seen);
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
        assert_eq!(window(&mut queue, &state, 100), Some((100, 100, 1)), "an unknown scheduler");
        assert_eq!(window(&mut queue, &state, 10_000), Some((100, 100, 0)), "not attempted for ten seconds");
        let condition = json!({"type": "PodScheduled", "status": "False", "reason": "Unschedulable"});
        state.apply_pod(&of_nobody("c", "hdd", &json!([condition])), UnixMillis(0));
        assert_eq!(window(&mut queue, &state, 100).map(|window| window.2), Some(2), "the scheduler runs");
    }

    #[test]
    fn a_quarantined_pod_opens_no_batch_until_its_time_is_over() {
        let (mut queue, mut state, holds) = (PodQueue::default(), ClusterState::default(), Holds::default());
        let mut quarantine = Quarantine::default();
        let mut observe = |state: &ClusterState, quarantine: &mut Quarantine, now| {
            let window = queue.observe(state, &holds, quarantine, &mut PurchaseBackoff::default(), now);
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
        queue.planned_with(&state, &[]);
        queue.fail("n/a", UnixMillis(now));
        queue.help(&state, &[], UnixMillis(now));
        assert_eq!((window(&mut queue, &state, now), queue.has_failed()), (None, true));
        queue.help(&state, &ready(1), UnixMillis(now));
        assert_eq!((window(&mut queue, &state, now), queue.has_failed()), (Some((0, 0, 0)), false));
        queue.planned_with(&state, &ready(1));
        queue.fail("n/a", UnixMillis(now));
        for (later, generation, is_planned) in [(100, 2, false), (999, 2, false), (1_000, 2, true)] {
            queue.help(&state, &ready(generation), UnixMillis(now + later));
            assert_eq!(window(&mut queue, &state, now + later).is_some(), is_planned, "at most once a second");
        }
        now += 1_000;
        queue.planned_with(&state, &ready(2));
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
}
