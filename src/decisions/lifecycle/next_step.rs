//! The NodeClaim state machine: the next step of a claim as a pure function of the claim and its Node.

use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use stowage_api::{NodeClaim, conditions};
use stowage_model::labels;
use stowage_model::launch_timing::LAUNCH_TIMEOUT;
use stowage_model::time::UnixMillis;

use crate::decisions::disruption::mark::is_tainted;
use crate::decisions::disruption::reason::DisruptionReason;
use crate::decisions::lifecycle::initialization::uninitialized_reason;
use crate::decisions::termination::deadlines::unwritten_deadline;
use crate::state::object_ext::{NodeClaimExt, NodeExt, ObjectExt};

/// A launched claim whose Node is not registered after this time is abandoned.
pub const REGISTRATION_TIMEOUT: Duration = Duration::from_mins(15);

/// The next step of a claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    Nothing,
    /// Add our finalizer.
    AddFinalizer,
    /// Launch the instance.
    Launch,
    /// Delete the claim after a timeout.
    Abandon(DisruptionReason),
    /// Write the claim's labels and taints and our finalizer to the Node.
    Sync,
    /// Nominate the planned pods and remove the unregistered taint.
    Open,
    /// Set the Registered condition.
    Register,
    /// Set the Initialized condition.
    Initialize,
    /// Report that several Nodes have the provider id of the claim: to the Registered condition while no Node is registered.
    ReportDuplicateNodes,
    /// Write to the Initialized condition why the Node is not initialized.
    ReportUninitialized(&'static str),
    /// Write the deadline of the drain to the claim.
    WriteDeadline(UnixMillis),
    /// Delete the Node.
    DeleteNode,
    /// Taint the Node and evict its pods.
    Drain,
    /// Terminate the instance; when it is gone, remove our finalizer from the Node and the claim.
    Terminate,
    /// Delete the claim, whose Node was deleted.
    DeleteClaim,
}

/// The next step of a claim. `drained` says whether the drain of its node waits for no pod.
pub fn next_step(claim: &NodeClaim, node: Option<&Node>, drained: bool, now: UnixMillis) -> Step {
    let has_finalizer = claim.has_finalizer(labels::TERMINATION_FINALIZER);
    if claim.is_deleting() {
        return if has_finalizer { termination_step(claim, node, drained) } else { Step::Nothing };
    }
    if !has_finalizer {
        return Step::AddFinalizer;
    }
    let created = claim.created_at();
    if !claim.has_condition(conditions::LAUNCHED) {
        let timed_out = now > created + LAUNCH_TIMEOUT;
        return if timed_out { Step::Abandon(DisruptionReason::LaunchTimeout) } else { Step::Launch };
    }
    let registered = claim.has_condition(conditions::REGISTERED);
    let Some(node) = node else {
        let timed_out = !registered && now > created + REGISTRATION_TIMEOUT;
        return if timed_out { Step::Abandon(DisruptionReason::RegistrationTimeout) } else { Step::Nothing };
    };
    if node.is_deleting() {
        return Step::DeleteClaim;
    }
    if !registered {
        return registration_step(node);
    }
    if claim.has_condition(conditions::INITIALIZED) {
        return Step::Nothing;
    }
    uninitialized_reason(claim, node).map_or(Step::Initialize, Step::ReportUninitialized)
}

/// The next step of a claim whose provider id several Nodes have, instead of `step`. None of them is registered: which one is the
/// instance's own is unknown. A Node that is registered already keeps the claim.
pub fn step_with_duplicates(claim: &NodeClaim, step: Step, now: UnixMillis) -> Step {
    match step {
        Step::Sync | Step::Open | Step::Register if now > claim.created_at() + REGISTRATION_TIMEOUT => {
            Step::Abandon(DisruptionReason::RegistrationTimeout)
        }
        Step::Sync | Step::Open | Step::Register | Step::Nothing => Step::ReportDuplicateNodes,
        step => step,
    }
}

/// The next step of a claim whose node is not initialized, instead of `step`: it is abandoned once that lasts for [`REGISTRATION_TIMEOUT`]
/// after the registration, if `is_unneeded`. Pods on it keep it: what is missing need not concern them.
pub fn step_if_uninitialized(claim: &NodeClaim, step: Step, is_unneeded: impl Fn() -> bool, now: UnixMillis) -> Step {
    match step {
        Step::ReportUninitialized(_) if is_overdue(claim, now) && is_unneeded() => {
            Step::Abandon(DisruptionReason::InitializationTimeout)
        }
        step => step,
    }
}

/// Whether a claim whose node is not initialized registered [`REGISTRATION_TIMEOUT`] ago.
pub fn is_overdue(claim: &NodeClaim, now: UnixMillis) -> bool {
    claim.true_since(conditions::REGISTERED).is_some_and(|at| at.is_older_than(REGISTRATION_TIMEOUT, now))
}

fn registration_step(node: &Node) -> Step {
    if !node.has_finalizer(labels::TERMINATION_FINALIZER) {
        return Step::Sync;
    }
    let unregistered = node.taints().any(|taint| taint.key == labels::UNREGISTERED_TAINT);
    if unregistered || !node.is_labeled(labels::REGISTERED) { Step::Open } else { Step::Register }
}

fn termination_step(claim: &NodeClaim, node: Option<&Node>, drained: bool) -> Step {
    if let Some(deadline) = unwritten_deadline(claim) {
        return Step::WriteDeadline(deadline);
    }
    match node {
        Some(node) if !node.is_deleting() => Step::DeleteNode,
        // Its instance is gone; finalizers of others keep the Node. As in Karpenter, the claim stays until it is gone.
        Some(node)
            if claim.has_condition(conditions::REGISTERED)
                && claim.has_condition(conditions::INSTANCE_TERMINATING)
                && !node.has_finalizer(labels::TERMINATION_FINALIZER) =>
        {
            Step::Nothing
        }
        Some(node) if !drained || !is_tainted(node) => Step::Drain,
        _ => Step::Terminate,
    }
}

#[cfg(test)]
mod tests;
