//! The lifecycle of NodeClaims: launched, registered, initialized; then drained, terminated, deleted.
//! [`Queue`] decides which steps are due; [`run`] carries them out and retries failed steps.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use kube::{Api, ResourceExt};
use serde_json::json;
use stowage_api::NodeClaim;
use stowage_model::events;
use stowage_model::labels;
use stowage_model::time::UnixMillis;
use stowage_runtime::clock;
use stowage_runtime::sync::panics::catch_async;
use stowage_runtime::sync::{heartbeat, lock};
use tokio::task::JoinSet;

use crate::controllers::context::{Context, is_conflict, is_not_found};
use crate::controllers::deletion::{delete_claim_or_log, delete_node, request_deletion};
use crate::controllers::enforcement::opening::{Opening, open};
use crate::controllers::node_claim::detachment::report_volumes;
use crate::controllers::node_claim::drain::{DrainProgress, drain};
use crate::controllers::node_claim::drained::is_drained;
use crate::controllers::node_claim::launch;
use crate::controllers::node_claim::registration::{
    initialize, lacks_unregistered_taint, register, report_duplicate_nodes, report_uninitialized, sync_patch,
};
use crate::controllers::node_claim::step_error::StepError;
use crate::controllers::node_claim::termination::terminate;
use crate::controllers::run_loop::{Pace, RunLoop};
use crate::decisions::disruption::reason::DisruptionReason;
use crate::decisions::lifecycle::claim_queue::{DueStep, Queue, Requeue};
use crate::decisions::lifecycle::initialization::uninitialized_reason;
use crate::decisions::lifecycle::next_step::{REGISTRATION_TIMEOUT, Step, is_overdue};
use crate::decisions::staleness::Removal;
use crate::decisions::termination::detachment::{Detachment, detachment};
use crate::state::object_ext::{NodeClaimExt, ObjectExt};

const PACE: Pace = Pace { debounce: Duration::from_millis(20), resync: Duration::from_millis(500) };
/// Wait between two passes over a claim that waits for something outside, such as a drain.
const POLL_PERIOD: Duration = Duration::from_millis(500);
/// The same for a drain that waits until other nodes are closed.
const CLOSING_POLL_PERIOD: Duration = Duration::from_millis(50);
/// Wait between two passes over a claim whose provider id several Nodes have.
const DUPLICATE_POLL_PERIOD: Duration = Duration::from_secs(5);
/// Wait between two queries for the partition of an instance.
const PARTITION_POLL_PERIOD: Duration = Duration::from_secs(1);
/// Wait after a panic, which is a defect, before the step is retried.
const PANIC_RETRY: Duration = Duration::from_secs(30);

/// Runs until the process ends.
pub async fn run(ctx: Arc<Context>) {
    let mut run_loop = RunLoop::new(&ctx.cluster, PACE);
    let queue = Arc::new(Mutex::new(Queue::default()));
    let (done, mut finished) = tokio::sync::mpsc::unbounded_channel::<()>();
    // Aborts the running steps when this future is dropped.
    let mut steps = JoinSet::new();
    loop {
        while steps.try_join_next().is_some() {}
        let due = {
            // The cluster state is locked before the queue, so that a step that finishes never waits behind a writer of the state.
            let state = ctx.cluster.read();
            lock(&queue).start_due(&state, clock::now())
        };
        for due in due {
            let (ctx, queue, done) = (Arc::clone(&ctx), Arc::clone(&queue), done.clone());
            steps.spawn(heartbeat::for_spawned(async move {
                let requeue = catch_async(process(&ctx, &due)).await.unwrap_or_else(|panic| {
                    let DueStep { claim, step, .. } = &due;
                    ctx.metrics.steps_panicked.inc();
                    tracing::error!(claim, ?step, %panic, "step panicked, retrying");
                    Requeue::After(PANIC_RETRY)
                });
                lock(&queue).finish(due, requeue, clock::now());
                let _ = done.send(());
            }));
        }
        // The claims of a plan are launched at once; other changes are debounced.
        let wake = async {
            finished.recv().await;
        };
        run_loop.next_or(wake, &ctx.claims_created).await;
        while finished.try_recv().is_ok() {}
    }
}

/// Carries out a step and handles its failure.
async fn process(ctx: &Context, due: &DueStep) -> Requeue {
    let DueStep { claim, step, .. } = due;
    match carry_out(ctx, claim, step).await {
        Ok(requeue) => requeue,
        Err(StepError::Abandon { reason, message }) => {
            abandon(ctx, claim, reason, &message).await;
            Requeue::Now
        }
        Err(StepError::Api(error)) if is_not_found(&error) => Requeue::After(POLL_PERIOD),
        Err(StepError::Api(error)) if is_conflict(&error) => {
            refresh(ctx, claim).await;
            Requeue::Backoff { until: UnixMillis::MAX }
        }
        Err(error) => {
            tracing::warn!(claim, ?step, %error, "step failed, retrying");
            Requeue::Backoff { until: UnixMillis::MAX }
        }
    }
}

async fn carry_out(ctx: &Context, name: &str, step: &Step) -> Result<Requeue, StepError> {
    let (claim, node) = {
        let state = ctx.cluster.read();
        let Some(claim) = state.claims.get(name).cloned() else {
            return Ok(Requeue::Now);
        };
        let node = state.node_of(&claim).cloned();
        (claim, node)
    };
    match (step, &node) {
        (Step::AddFinalizer, _) => {
            let mut finalizers = claim.finalizers().to_vec();
            finalizers.push(labels::TERMINATION_FINALIZER.into());
            let patch = json!({"metadata": {"finalizers": finalizers, "resourceVersion": claim.resource_version()}});
            ctx.patch_claim(name, &patch).await?;
        }
        (Step::Launch, _) if ctx.pause().provisioning => return Ok(Requeue::After(POLL_PERIOD)),
        (Step::Launch, _) => launch::launch(ctx, &claim).await?,
        (Step::Abandon(_), _) if ctx.is_stale(Removal::Abandonment) => return Ok(Requeue::After(POLL_PERIOD)),
        (Step::Abandon(DisruptionReason::InitializationTimeout), _)
            if ctx.pause().disruption || ctx.is_stale(Removal::Disruption) =>
        {
            return Ok(Requeue::After(POLL_PERIOD));
        }
        (Step::Abandon(DisruptionReason::InitializationTimeout), Some(node)) => {
            let why = uninitialized_reason(&claim, node).unwrap_or("initialized meanwhile");
            abandon(ctx, name, DisruptionReason::InitializationTimeout, &overdue(why)).await;
            return Ok(Requeue::After(POLL_PERIOD));
        }
        (Step::Abandon(reason), _) => {
            abandon(ctx, name, *reason, "launch or registration timed out").await;
            return Ok(Requeue::After(POLL_PERIOD));
        }
        // The scheduler must not evaluate topology spread over partitions without the partition label.
        (Step::Sync, Some(_)) if launch::lacks_partition(&claim) => return learn_partition(ctx, &claim).await,
        (Step::Sync, Some(node)) if lacks_unregistered_taint(node) => {
            let note = "the node registered without the taint karpenter.sh/unregistered: pods may have been bound to it too early";
            ctx.emit_for_claim(&claim, events::UNREGISTERED_TAINT_MISSING.note(note)).await;
            ctx.add_to_node(&node.name_any(), &sync_patch(&claim, node)).await?;
        }
        (Step::Sync, Some(node)) => ctx.add_to_node(&node.name_any(), &sync_patch(&claim, node)).await?,
        (Step::Open, Some(node)) => {
            return Ok(match open(ctx, &claim, node).await? {
                Opening::Opened => Requeue::Now,
                Opening::Wait(wait) => Requeue::After(wait),
            });
        }
        (Step::Register, Some(node)) => register(ctx, &claim, node).await?,
        (Step::Initialize, Some(node)) => initialize(ctx, &claim, node).await?,
        (Step::ReportDuplicateNodes, _) => {
            report_duplicate_nodes(ctx, &claim).await?;
            return Ok(Requeue::After(DUPLICATE_POLL_PERIOD));
        }
        (Step::ReportUninitialized(reason), _) => {
            report_uninitialized(ctx, &claim, reason).await?;
            if is_overdue(&claim, clock::now()) {
                ctx.emit_for_claim_and_node(&claim, events::NOT_INITIALIZED.note(&overdue(reason))).await;
            }
            return Ok(Requeue::After(POLL_PERIOD));
        }
        (Step::WriteDeadline(deadline), _) => write_deadline(ctx, &claim, *deadline).await?,
        (Step::DeleteNode, Some(node)) => delete_node(ctx, node).await?,
        (Step::DeleteClaim, _) => request_deletion(ctx, &claim).await?,
        (Step::Drain, Some(node)) => {
            if is_instance_gone(ctx, &claim, node).await {
                tracing::info!(claim = name, node = node.name_any(), "instance is gone, drain skipped");
                return terminate(ctx, &claim, Some(node)).await;
            }
            return Ok(match drain(ctx, &claim, node).await? {
                DrainProgress::InProgress => Requeue::After(POLL_PERIOD),
                DrainProgress::Closing => Requeue::After(CLOSING_POLL_PERIOD),
                DrainProgress::Blocked { until } => Requeue::Backoff { until },
            });
        }
        (Step::Terminate, Some(node)) if !is_drained(ctx, &claim, node).await? => {}
        (Step::Terminate, Some(node)) => {
            let volumes = detachment(&ctx.cluster.read(), &claim, &node.name_any(), clock::now());
            let waits = matches!(volumes, Detachment::Wait(_)) && !is_instance_gone(ctx, &claim, node).await;
            report_volumes(ctx, &claim, &volumes, waits).await;
            if waits {
                return Ok(Requeue::After(POLL_PERIOD));
            }
            return terminate(ctx, &claim, Some(node)).await;
        }
        (Step::Terminate, None) => return terminate(ctx, &claim, None).await,
        // The Node was deleted since the step was chosen: choose again.
        (_, _) => {}
    }
    Ok(Requeue::Now)
}

fn overdue(reason: &str) -> String {
    let minutes = REGISTRATION_TIMEOUT.as_secs() / 60;
    format!("not initialized {minutes} minutes after it registered: {reason}")
}

/// Whether the cloud no longer has the instance of a node that is not ready. Asks rarely; a failure is not an answer.
async fn is_instance_gone(ctx: &Context, claim: &NodeClaim, node: &Node) -> bool {
    let name = claim.name_any();
    let Some(id) = claim.provider_id().filter(|_| lock(&ctx.instance_checks).is_due(&name, node, clock::now())) else {
        return false;
    };
    match ctx.cloud.describe(id).await {
        Ok(found) => found.is_none(),
        Err(error) => {
            tracing::debug!(claim = name, %error, "failed to look up the instance of a draining node");
            false
        }
    }
}

async fn learn_partition(ctx: &Context, claim: &NodeClaim) -> Result<Requeue, StepError> {
    if clock::now() > claim.created_at() + REGISTRATION_TIMEOUT {
        let message = "EC2 does not report the partition of the instance";
        return Err(StepError::abandon(DisruptionReason::RegistrationTimeout, message));
    }
    let learned = launch::learn_partition(ctx, claim).await?;
    Ok(if learned { Requeue::Now } else { Requeue::After(PARTITION_POLL_PERIOD) })
}

async fn write_deadline(ctx: &Context, claim: &NodeClaim, deadline: UnixMillis) -> Result<(), kube::Error> {
    let deadline = deadline.rfc3339();
    let patch = json!({"metadata": {"annotations": {(labels::TERMINATION_TIMESTAMP): deadline}}});
    ctx.patch_claim(&claim.name_any(), &patch).await?;
    let note = format!("all its pods will be deleted by {deadline}");
    ctx.emit_for_claim_and_node(claim, events::TERMINATION_GRACE_PERIOD_EXPIRING.note(&note)).await;
    Ok(())
}

/// Reads a claim and its Node from the API server after a conflict. The watch lags behind in a burst: another write based on it
/// would conflict again and keep the API server busy.
async fn refresh(ctx: &Context, name: &str) {
    let node = {
        let state = ctx.cluster.read();
        state.claims.get(name).and_then(|claim| state.node_of(claim)).map(|node| node.name_any())
    };
    if let Some(node) = node
        && let Ok(Some(node)) = Api::<Node>::all(ctx.client.clone()).get_opt(&node).await
    {
        ctx.cluster.update(|state| state.apply_node(node));
    }
    if let Ok(Some(claim)) = Api::<NodeClaim>::all(ctx.client.clone()).get_opt(name).await {
        ctx.cluster.update(|state| state.apply_claim(claim));
    }
}

async fn abandon(ctx: &Context, name: &str, reason: DisruptionReason, why: &str) {
    let claim = ctx.cluster.read().claims.get(name).cloned();
    let Some(claim) = claim else { return };
    tracing::warn!(claim = name, reason = reason.as_str(), why, "abandoning node claim");
    let note = format!("{}: {why}", reason.as_str());
    ctx.emit_for_claim(&claim, events::DISRUPTED.note(&note)).await;
    if delete_claim_or_log(ctx, &claim, reason).await
        && matches!(reason, DisruptionReason::LaunchTimeout | DisruptionReason::RegistrationTimeout)
    {
        ctx.record_registration(&claim, false);
    }
}

#[cfg(test)]
mod write_tests;
