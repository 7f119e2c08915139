//! What the last passes of the leader decided, for operators. Bounded.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use stowage_model::time::UnixMillis;
use stowage_model::units::MicroUsd;
use stowage_planner::{Plan, Unschedulable};

use crate::decisions::provisioning::unschedulable::in_turns;
use crate::state::snapshot::Snapshot;

/// Maximum number of pods whose reason is kept.
pub const MAX_PODS: usize = 1_000;
/// Maximum length of a reason, in characters.
pub const MAX_REASON: usize = 300;

/// The last plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LastPlan {
    pub at: UnixMillis,
    pub took: Duration,
    /// Pods that it has a node for, or leaves out. Those that are planned again are not counted.
    pub pods: usize,
    pub new_nodes: usize,
    /// Pods on nodes that exist or are launching.
    pub on_existing: usize,
    /// Pods that it leaves without a node.
    pub left_out: usize,
    /// At most [`MAX_PODS`] of these, `namespace/name`, with the reason; namespaces in turns.
    pub reasons: Vec<(Arc<str>, String)>,
}

impl LastPlan {
    /// Summarizes a plan that took this long.
    pub fn of(snapshot: &Snapshot, plan: &Plan, took: Duration) -> Self {
        let reason = |text: &str| text.chars().take(MAX_REASON).collect();
        let mut left_out: BTreeMap<&str, Vec<&Unschedulable>> = BTreeMap::new();
        for failed in &plan.unschedulable {
            left_out.entry(&snapshot.problem.pods[failed.pod].class.namespace).or_default().push(failed);
        }
        Self {
            at: snapshot.taken_at,
            took,
            pods: plan.pods().count(),
            new_nodes: plan.new_nodes.len(),
            on_existing: plan.placements.iter().map(|placement| placement.pods.len()).sum(),
            left_out: plan.unschedulable.len(),
            reasons: in_turns(left_out, MAX_PODS)
                .into_iter()
                .map(|failed| (Arc::clone(&snapshot.problem.pods[failed.pod].key), reason(&failed.reason)))
                .collect(),
        }
    }

    /// This plan and one of the same pass before it, as one.
    #[must_use]
    pub fn after(mut self, first: Option<&Self>) -> Self {
        if let Some(first) = first {
            self.took += first.took;
            self.pods += first.pods;
            self.new_nodes += first.new_nodes;
            self.on_existing += first.on_existing;
            self.left_out += first.left_out;
            self.reasons.extend(first.reasons.iter().cloned());
            self.reasons.truncate(MAX_PODS);
        }
        self
    }
}

/// The last pass of consolidation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LastConsolidation {
    pub at: UnixMillis,
    /// It waited for a further candidate, and decided nothing.
    pub waits: bool,
    /// Nodes that it may remove.
    pub candidates: usize,
    /// Number of nodes by the first blocker, `none` for those that are removed.
    pub verdicts: BTreeMap<&'static str, usize>,
    /// Nodes that it removes.
    pub chosen: usize,
    /// Pods on these.
    pub pods: usize,
    /// What that saves per hour.
    pub saving: MicroUsd,
    /// Plans that it made.
    pub plans: usize,
    pub took: Duration,
}

impl LastConsolidation {
    /// A pass of this time without candidates.
    pub fn at(now: UnixMillis) -> Self {
        Self {
            at: now,
            waits: false,
            candidates: 0,
            verdicts: BTreeMap::new(),
            chosen: 0,
            pods: 0,
            saving: MicroUsd(0),
            plans: 0,
            took: Duration::ZERO,
        }
    }
}
