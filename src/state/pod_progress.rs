//! How long pods take, as Karpenter's metrics measure it (Karpenter core reference 8).

use std::sync::Mutex;
use std::time::Duration;

use stowage_model::time::UnixMillis;
use stowage_runtime::sync::lock;

use crate::state::pods::{Phase, PodProgress, PodRecord};

/// Times that are kept until they are taken; more are dropped.
const MAX_TIMES: usize = 100_000;

/// What a pod took its time for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PodStage {
    /// From when it needed a node until the first plan with it.
    Decision,
    /// From its creation until it was bound.
    Bound,
    /// From its creation until it was ready.
    Startup,
    /// From the first plan that has a node for it until it was bound.
    PlannedToBound,
    /// From that plan until it was ready.
    PlannedToStartup,
}

/// Times of pods, while somebody takes them.
#[derive(Debug, Default)]
pub struct PodTimes(Mutex<Option<Vec<(PodStage, Duration)>>>);

impl PodTimes {
    /// Takes the times since the last call. The first call returns none: times are kept from then on.
    pub fn take(&self) -> Vec<(PodStage, Duration)> {
        lock(&self.0).replace(Vec::new()).unwrap_or_default()
    }

    pub(super) fn add(&self, stage: PodStage, time: Duration) {
        if let Some(times) = lock(&self.0).as_mut().filter(|times| times.len() < MAX_TIMES) {
            times.push((stage, time));
        }
    }

    /// Adds what a pod has come to since it was `old`, as observed at `now`, and returns its progress.
    pub(super) fn follow(&self, old: &PodRecord, new: &PodRecord, now: UnixMillis) -> PodProgress {
        let mut progress = old.progress;
        let ended = |stage: PodStage, planned: PodStage, at: UnixMillis| {
            self.add(stage, at.saturating_since(new.created_at));
            if let Some(begin) = progress.planned_at {
                self.add(planned, now.saturating_since(begin));
            }
        };
        if old.node.is_none() && new.node.is_some() && new.active() {
            ended(PodStage::Bound, PodStage::PlannedToBound, new.last_event.unwrap_or(now));
        }
        let is_ready = new.ready_since.filter(|_| new.phase == Phase::Running);
        if let Some(since) = is_ready.filter(|_| progress.is_starting) {
            ended(PodStage::Startup, PodStage::PlannedToStartup, since);
        }
        progress.is_starting =
            new.phase == Phase::Pending || (progress.is_starting && is_ready.is_none() && new.active());
        progress
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use stowage_test_objects as objects;

    use super::*;
    use crate::state::tables::ClusterState;

    const CREATED: &str = "2026-01-01T00:00:00Z";

    /// Seconds after the creation of the pods.
    fn at(second: i64) -> UnixMillis {
        UnixMillis::parse_rfc3339(CREATED).unwrap() + Duration::from_secs(second.unsigned_abs())
    }

    fn condition(kind: &str, status: &str, second: i64) -> Value {
        let reason = if status == "False" { "Unschedulable" } else { "" };
        json!({"type": kind, "status": status, "reason": reason, "lastTransitionTime": at(second).rfc3339()})
    }

    /// Applies the pod `a` of this phase and with these conditions, bound if it is scheduled.
    fn apply(state: &mut ClusterState, phase: &str, conditions: &[Value], now: i64) {
        let node = conditions.iter().any(|one| one["type"] == "PodScheduled" && one["status"] == "True");
        let node = node.then_some("n1");
        let patch = json!({
            "metadata": {"creationTimestamp": CREATED},
            "spec": {"nodeName": node},
            "status": {"phase": phase, "conditions": conditions},
        });
        state.apply_pod(&objects::pod("a", &patch), at(now));
    }

    fn taken(state: &ClusterState) -> Vec<(PodStage, u64)> {
        state.pod_times.take().into_iter().map(|(stage, time)| (stage, time.as_secs())).collect()
    }

    #[test]
    fn a_pod_is_decided_planned_bound_and_ready_once() {
        let mut state = ClusterState::default();
        assert_eq!(taken(&state), []);
        let [rejected, bound] = [condition("PodScheduled", "False", 1), condition("PodScheduled", "True", 30)];
        let [unready, ready] = [condition("Ready", "False", 30), condition("Ready", "True", 42)];
        apply(&mut state, "Pending", &[], 0);
        apply(&mut state, "Pending", &[rejected], 1);
        for now in [3, 5] {
            state.record_decided(["n/a", "n/gone"], at(now));
            state.record_planned([&"n/a".to_owned()], at(now + 1));
        }
        assert_eq!(taken(&state), [(PodStage::Decision, 2)]);
        apply(&mut state, "Pending", std::slice::from_ref(&bound), 31);
        assert_eq!(taken(&state), [(PodStage::Bound, 30), (PodStage::PlannedToBound, 27)]);
        apply(&mut state, "Running", &[bound.clone(), unready.clone()], 40);
        assert_eq!(taken(&state), []);
        for _ in 0..2 {
            apply(&mut state, "Running", &[bound.clone(), ready.clone()], 43);
            apply(&mut state, "Running", &[bound.clone(), unready.clone()], 50);
        }
        assert_eq!(taken(&state), [(PodStage::Startup, 42), (PodStage::PlannedToStartup, 39)]);
    }

    #[test]
    fn what_was_not_observed_or_never_started_is_not_measured() {
        let bound = condition("PodScheduled", "True", 30);
        // It ran before.
        let mut state = ClusterState::default();
        assert_eq!(taken(&state), []);
        apply(&mut state, "Running", &[bound.clone(), condition("Ready", "False", 40)], 100);
        apply(&mut state, "Running", &[bound.clone(), condition("Ready", "True", 101)], 101);
        state.record_decided(["n/a"], at(102));
        assert_eq!(taken(&state), []);
        // It ended before it was ready.
        let mut state = ClusterState::default();
        assert_eq!(taken(&state), []);
        apply(&mut state, "Pending", &[], 103);
        apply(&mut state, "Failed", &[condition("Ready", "False", 104)], 104);
        assert_eq!(taken(&state), []);
        assert!(!state.pods["n/a"].progress.is_starting);
    }

    #[test]
    fn nothing_is_kept_where_nobody_takes_it_and_at_most_so_many() {
        let times = PodTimes::default();
        times.add(PodStage::Bound, Duration::ZERO);
        assert_eq!(times.take(), []);
        (0..=MAX_TIMES).for_each(|_| times.add(PodStage::Bound, Duration::ZERO));
        assert_eq!(times.take().len(), MAX_TIMES);
        assert_eq!(times.take(), []);
    }
}
