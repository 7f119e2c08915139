//! How long pods wait for their nodes.

use std::time::Duration;

use stowage_model::time::UnixMillis;

use crate::state::pod_progress::PodStage;
use crate::state::pods::Scheduling;
use crate::state::tables::ClusterState;

/// A part of the time that a pod waits for its node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PodWait {
    /// From its creation, as this process observed it, to the launch call of its node.
    CreatedToCall,
    /// From its first rejection by kube-scheduler to that call.
    RejectedToCall,
    /// From that rejection until its NodeClaim is recorded as launched.
    RejectedToLaunched,
    /// From the time at which its node is ready until it is bound to the node.
    ReadyToBound,
}

impl PodWait {
    pub fn metric_label(self) -> &'static str {
        match self {
            Self::CreatedToCall => "created_to_call",
            Self::RejectedToCall => "rejected_to_call",
            Self::RejectedToLaunched => "rejected_to_launched",
            Self::ReadyToBound => "ready_to_bound",
        }
    }
}

impl ClusterState {
    /// Records that a plan decided on these pods.
    pub fn record_decided<'k>(&mut self, keys: impl IntoIterator<Item = &'k str>, now: UnixMillis) {
        for key in keys {
            let pod = self.pods.get_mut(key).filter(|pod| pod.node.is_none() && pod.progress.decided_at.is_none());
            if let Some(pod) = pod {
                pod.progress.decided_at = Some(now);
                let since = pod.first_unschedulable.unwrap_or(pod.first_seen);
                self.pod_times.add(PodStage::Decision, now.saturating_since(since));
            }
        }
    }

    /// Records that these pods were planned, and the plan written at `now`.
    pub fn record_planned<'k>(&mut self, keys: impl IntoIterator<Item = &'k String>, now: UnixMillis) {
        for key in keys {
            if let Some(pod) = self.pods.get_mut(key) {
                pod.is_planned_unattempted |= pod.scheduling == Scheduling::Unattempted;
                pod.progress.planned_at.get_or_insert(now);
            }
        }
    }

    /// Records that the instance of a NodeClaim was launched by a call at `called`, and that the NodeClaim says so at `now`. Returns the waits of the
    /// pods that it was planned for. Pods that have a node, or for which a launch was recorded before, have none; a pod that was not rejected before
    /// the call has no wait since its rejection.
    pub fn record_launch(&mut self, claim: &str, called: UnixMillis, now: UnixMillis) -> Vec<(PodWait, Duration)> {
        let planned = self.planned.get(claim).map(|plan| plan.pods.clone()).unwrap_or_default();
        let mut waits = Vec::new();
        for key in planned {
            let Some(pod) = self.pods.get_mut(&key).filter(|pod| pod.node.is_none() && !pod.is_launched_for) else {
                continue;
            };
            pod.is_launched_for = true;
            waits.push((PodWait::CreatedToCall, called.saturating_since(pod.first_seen)));
            if let Some(rejected) = pod.first_unschedulable.filter(|rejected| *rejected <= called) {
                waits.push((PodWait::RejectedToCall, called.saturating_since(rejected)));
                waits.push((PodWait::RejectedToLaunched, now.saturating_since(rejected)));
            }
        }
        waits
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use stowage_model::labels;
    use stowage_test_objects as objects;

    use super::*;

    #[test]
    fn a_pod_that_was_planned_before_its_first_attempt_is_known_until_it_is_gone() {
        let mut state = ClusterState::default();
        let condition = json!({"type": "PodScheduled", "status": "False", "reason": "Unschedulable"});
        let rejected = json!({"status": {"conditions": [condition]}});
        state.apply_pod(&objects::pod("new", &json!({})), UnixMillis(1));
        state.apply_pod(&objects::pod("rejected", &rejected), UnixMillis(1));
        let early = |state: &ClusterState| ["n/new", "n/rejected"].map(|key| state.pods[key].is_planned_unattempted);
        assert_eq!(early(&state), [false, false]);
        state.record_planned(["n/new", "n/rejected", "n/gone"].map(String::from).iter(), UnixMillis(1));
        state.apply_pod(&objects::pod("new", &rejected), UnixMillis(2));
        state.record_planned(["n/new".to_owned()].iter(), UnixMillis(2));
        assert_eq!(early(&state), [true, false]);
    }

    #[test]
    fn the_pods_of_a_launch_have_waited_since_their_creation_and_their_rejection() {
        let mut state = ClusterState::default();
        let condition = json!({"type": "PodScheduled", "status": "False", "reason": "Unschedulable"});
        let rejected = json!({"status": {"conditions": [condition]}});
        let put = |state: &mut ClusterState, name: &str, patch: &serde_json::Value, at: i64| {
            state.apply_pod(&objects::pod(name, patch), UnixMillis(at));
        };
        for name in ["early", "late", "untried"] {
            put(&mut state, name, &json!({}), 1_000);
        }
        put(&mut state, "early", &rejected, 1_100);
        put(&mut state, "late", &rejected, 1_600);
        put(&mut state, "bound", &json!({"spec": {"nodeName": "x"}}), 1_000);
        let planned = "[\"n/early\",\"n/late\",\"n/untried\",\"n/bound\",\"n/gone\"]";
        for claim in ["first", "second"] {
            let meta = json!({"annotations": {(labels::PLANNED_PODS): planned}});
            state.apply_claim(objects::claim(claim, &json!({"metadata": meta})));
        }
        let waits = |state: &mut ClusterState, claim: &str| {
            let waits = state.record_launch(claim, UnixMillis(1_500), UnixMillis(1_900));
            waits.into_iter().map(|(wait, time)| (wait.metric_label(), time.as_millis())).collect::<Vec<_>>()
        };
        let expected = [
            ("created_to_call", 500),
            ("rejected_to_call", 400),
            ("rejected_to_launched", 800),
            ("created_to_call", 500),
            ("created_to_call", 500),
        ];
        assert_eq!(waits(&mut state, "first"), expected);
        put(&mut state, "early", &rejected, 2_000);
        assert_eq!(waits(&mut state, "second"), [], "counted once, also after a change of the pod");
        assert_eq!(waits(&mut state, "unknown"), []);
    }
}
