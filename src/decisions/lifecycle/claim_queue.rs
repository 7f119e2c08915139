//! Which claims are processed when: one step of a claim at a time, launches apart from other steps, failed steps with backoff.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::time::Duration;

use kube::ResourceExt;
use stowage_api::{NodeClaim, conditions, launch_group};
use stowage_model::time::UnixMillis;

use crate::decisions::lifecycle::next_step::{Step, next_step, step_if_uninitialized, step_with_duplicates};
use crate::decisions::termination::deadlines::termination_deadline;
use crate::decisions::termination::drain_order;
use crate::state::object_ext::{NodeClaimExt, ObjectExt};
use crate::state::pods::PodRecord;
use crate::state::tables::ClusterState;

/// First and longest wait after a failed step; the wait doubles.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(10));
/// Concurrent steps other than launches: launches that wait for EC2 do not delay other steps.
const CONCURRENCY: usize = 100;
/// Concurrent launches. The launches of a group share a call.
const LAUNCH_CONCURRENCY: usize = launch_group::MAX_SIZE;

/// When the claim is processed again after a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Requeue {
    Now,
    After(Duration),
    /// With exponential backoff, but not later than `until`.
    Backoff {
        until: UnixMillis,
    },
}

/// Which claims are being processed, and when the others are processed again.
#[derive(Debug, Default)]
pub struct Queue {
    running: HashSet<String>,
    /// How many of the running steps are launches.
    launching: usize,
    waiting: HashMap<String, Waiting>,
    /// Claims that may have a step now or later without a change: all but those whose node is initialized.
    active: BTreeSet<String>,
    /// Revision of [`ClusterState::claim_changes`] that `active` is up to date with.
    revision: u64,
}

/// A claim that is not processed for a while.
#[derive(Debug)]
struct Waiting {
    until: UnixMillis,
    /// The wait after the next failed step.
    next_backoff: Duration,
    /// The deadline of the claim's drain; the wait ends when it changes.
    deadline: Option<UnixMillis>,
}

/// A step to carry out.
#[derive(Debug)]
pub struct DueStep {
    pub claim: String,
    pub step: Step,
    /// The deadline of the claim's drain.
    deadline: Option<UnixMillis>,
}

impl Queue {
    /// Chooses the steps to start now, and records them as running.
    pub fn start_due(&mut self, state: &ClusterState, now: UnixMillis) -> Vec<DueStep> {
        match state.claim_changes.since(self.revision) {
            Some(changes) => self.active.extend(changes.map(str::to_owned)),
            None => self.active = state.claims.keys().cloned().collect(),
        }
        self.revision = state.claim_changes.revision();
        self.waiting.retain(|name, _| state.claims.contains_key(name));
        let mut out = Vec::new();
        let mut settled = Vec::new();
        for name in &self.active {
            let Some(claim) = state.claims.get(name) else {
                settled.push(name.clone());
                continue;
            };
            let deleting = claim.is_deleting();
            let deadline = termination_deadline(claim).filter(|_| deleting);
            let waits =
                self.waiting.get(name).is_some_and(|waiting| waiting.until > now && waiting.deadline == deadline);
            if waits || self.running.contains(name) {
                continue;
            }
            let node = state.node_of(claim);
            let drained = !deleting
                || node.is_none_or(|node| drain_order::waiting(state, claim, &node.name_any(), now).is_empty());
            let mut step = next_step(claim, node.map(|node| &**node), drained, now);
            step = step_if_uninitialized(claim, step, || is_unneeded(state, claim, now), now);
            let initialized =
                claim.has_condition(conditions::REGISTERED) && claim.has_condition(conditions::INITIALIZED);
            if state.duplicate_nodes(claim).is_some() {
                step = step_with_duplicates(claim, step, now);
            } else if step == Step::Nothing && initialized && !deleting {
                settled.push(name.clone());
            }
            let launch = step == Step::Launch;
            let has_capacity = if launch {
                self.launching < LAUNCH_CONCURRENCY
            } else {
                self.running.len() - self.launching < CONCURRENCY
            };
            if has_capacity && step != Step::Nothing {
                self.running.insert(name.clone());
                self.launching += usize::from(launch);
                out.push(DueStep { claim: name.clone(), step, deadline });
            }
        }
        for name in settled {
            self.active.remove(&name);
        }
        out
    }

    /// Records the end of a step.
    pub fn finish(&mut self, due: DueStep, requeue: Requeue, now: UnixMillis) {
        let DueStep { claim, step, deadline } = due;
        self.running.remove(&claim);
        self.launching -= usize::from(step == Step::Launch);
        let (until, next_backoff) = match requeue {
            Requeue::Now => {
                self.waiting.remove(&claim);
                return;
            }
            Requeue::After(wait) => (now + wait, BACKOFF.0),
            Requeue::Backoff { until } => {
                let wait = self.waiting.get(&claim).map_or(BACKOFF.0, |waiting| waiting.next_backoff);
                ((now + wait).min(until), (wait * 2).min(BACKOFF.1))
            }
        };
        self.waiting.insert(claim, Waiting { until, next_backoff, deadline });
    }
}

/// Whether no pod needs the node of a claim, or is planned there. Each node of a static NodePool is needed.
fn is_unneeded(state: &ClusterState, claim: &NodeClaim, now: UnixMillis) -> bool {
    let Some(node) = state.node_of(claim) else { return false };
    let is_held =
        state.planned.get(&claim.name_any()).is_some_and(|plan| !plan.pods.is_empty() && plan.ends_at() > now);
    claim.node_pool().is_some()
        && !state.is_static(claim)
        && !is_held
        && !state.is_protected(&**node)
        && !state.is_protected(claim)
        && !state.pods_on(&node.name_any()).any(PodRecord::needs_another_node)
}

#[cfg(test)]
mod tests;
