//! Which schedulers run, and how far each has come with its queue.

use std::collections::BTreeMap;
use std::time::Duration;

use stowage_model::time::UnixMillis;

use crate::state::pods::{PodRecord, Scheduling};

/// Maximum number of schedulers that are remembered, beside the default scheduler.
const MAX_SCHEDULERS: usize = 100;
/// A scheduler that is not late attempts a new pod in this time.
const ATTEMPT_PERIOD: Duration = Duration::from_millis(500);
/// A scheduler that attempted no new pod for this time may have stopped.
const STOPPED_AFTER: Duration = Duration::from_secs(5);

/// The pods that a scheduler bound or rejected for the first time.
#[derive(Clone, Copy, Debug, Default)]
struct Attempts {
    /// When the last one was observed.
    last_at: UnixMillis,
    /// When the newest of these pods was first observed itself.
    newest: UnixMillis,
}

/// The schedulers that are known to run.
#[derive(Debug, Default)]
pub struct Schedulers {
    default: Attempts,
    /// Others, by name. They have rejected a pod: tenants may name any scheduler, but cannot write such a rejection.
    others: BTreeMap<Box<str>, Attempts>,
}

impl Schedulers {
    /// Records a pod as it is observed at `now`, and as it was before.
    pub(super) fn observe(&mut self, old: Option<&PodRecord>, new: &PodRecord, now: UnixMillis) {
        let rejected = matches!(new.scheduling, Scheduling::Unschedulable { .. } | Scheduling::SchedulerError);
        if let Some(name) = &new.scheduler
            && rejected
            && self.others.len() < MAX_SCHEDULERS
        {
            self.others.entry(name.clone()).or_default();
        }
        let Some(old) = old.filter(|old| old.scheduling == Scheduling::Unattempted) else { return };
        if rejected || new.scheduling == Scheduling::Bound {
            let known = match &new.scheduler {
                Some(name) => self.others.get_mut(name),
                None => Some(&mut self.default),
            };
            if let Some(attempts) = known {
                attempts.last_at = attempts.last_at.max(now);
                attempts.newest = attempts.newest.max(old.first_seen);
            }
        }
    }

    fn attempts(&self, pod: &PodRecord) -> Option<&Attempts> {
        pod.scheduler.as_ref().map_or(Some(&self.default), |name| self.others.get(name))
    }

    /// Whether the scheduler that a pod names is known to run: it is the default scheduler, or has rejected a pod.
    pub fn has(&self, pod: &PodRecord) -> bool {
        self.attempts(pod).is_some()
    }

    /// Whether the default scheduler attempts a pod next, as far as it can be known: it has not attempted it, nor a later one.
    pub fn is_next(&self, pod: &PodRecord) -> bool {
        pod.scheduling == Scheduling::Unattempted && pod.scheduler.is_none() && self.default.newest <= pod.first_seen
    }

    /// Whether a pod waits only because its scheduler is late: the scheduler works, and has attempted no pod yet that came after this one. A pod
    /// that later ones overtake waits for something else, such as the other pods of its gang.
    pub fn is_late(&self, pod: &PodRecord, now: UnixMillis) -> bool {
        pod.scheduling == Scheduling::Unattempted
            && pod.first_seen.is_older_than(ATTEMPT_PERIOD, now)
            && self.attempts(pod).is_some_and(|attempts| {
                !attempts.last_at.is_older_than(STOPPED_AFTER, now) && attempts.newest <= pod.first_seen
            })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use stowage_test_objects as objects;

    use super::*;
    use crate::state::tables::ClusterState;

    #[test]
    fn a_scheduler_is_known_once_it_rejects_a_pod() {
        let mut state = ClusterState::default();
        let of = |scheduler: &str, rejected: bool| {
            let condition = json!({"type": "PodScheduled", "status": "False", "reason": "Unschedulable"});
            let conditions = if rejected { json!([condition]) } else { json!([]) };
            let patch = json!({"spec": {"schedulerName": scheduler}, "status": {"conditions": conditions}});
            objects::pod(scheduler, &patch)
        };
        for (scheduler, rejected, known) in
            [("default-scheduler", false, true), ("nobody", false, false), ("nobody", true, true)]
        {
            state.apply_pod(&of(scheduler, rejected), UnixMillis(1));
            assert_eq!(state.schedulers.has(&state.pods[&format!("n/{scheduler}")]), known, "{scheduler}");
        }
        for number in 0..2 * MAX_SCHEDULERS {
            state.apply_pod(&of(&number.to_string(), true), UnixMillis(1));
        }
        assert_eq!(state.schedulers.others.len(), MAX_SCHEDULERS);
    }

    #[test]
    fn a_pod_waits_for_a_late_scheduler_until_later_pods_overtake_it() {
        let mut state = ClusterState::default();
        let rejected = json!([{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}]);
        let pod = |name: &str, scheduler: Option<&str>, conditions: &Value| {
            objects::pod(name, &json!({"spec": {"schedulerName": scheduler}, "status": {"conditions": conditions}}))
        };
        let late = |state: &ClusterState, at: i64| {
            let mut late: Vec<&str> = state
                .pods
                .values()
                .filter(|pod| state.schedulers.is_late(pod, UnixMillis(at)))
                .map(|pod| &*pod.name)
                .collect();
            late.sort_unstable();
            late.join(" ")
        };
        for (at, name) in [(101_000, "a"), (101_001, "b"), (101_002, "c"), (101_003, "d")] {
            state.apply_pod(&pod(name, None, &json!([])), UnixMillis(at));
        }
        state.apply_pod(&pod("other", Some("other"), &json!([])), UnixMillis(101_004));
        assert_eq!(late(&state, 102_500), "", "no scheduler has attempted a pod");
        state.apply_pod(&pod("a", None, &rejected), UnixMillis(101_500));
        assert_eq!(late(&state, 101_501), "b", "the others are not older than half a second");
        assert_eq!(late(&state, 102_500), "b c d");
        assert_eq!(late(&state, 106_501), "", "it attempted no pod for five seconds");
        let bound = objects::pod("c", &json!({"spec": {"nodeName": "x"}}));
        state.apply_pod(&bound, UnixMillis(106_000));
        assert_eq!(late(&state, 106_501), "d", "c overtook b");
        // An attempt that was not the first says nothing about new pods.
        state.apply_pod(&pod("a", None, &rejected), UnixMillis(120_000));
        assert_eq!(late(&state, 120_001), "");
        state.apply_pod(&pod("more", Some("other"), &json!([])), UnixMillis(120_000));
        state.apply_pod(&pod("other", Some("other"), &rejected), UnixMillis(120_002));
        assert_eq!(late(&state, 121_500), "more", "each scheduler has its own queue");
    }
}
