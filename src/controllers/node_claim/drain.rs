//! Drains a leaving node: taints it and evicts its pods in order, respecting PodDisruptionBudgets until the deadline.

use std::time::Duration;

use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::{DeleteParams, Preconditions};
use kube::{Api, ResourceExt};
use stowage_api::conditions::Conditions;
use stowage_api::{NodeClaim, conditions};
use stowage_model::time::UnixMillis;
use stowage_model::{events, labels};
use stowage_runtime::clock;

use crate::controllers::condition_writer::write_condition;
use crate::controllers::context::{Context, is_not_found, pod_reference};
use crate::controllers::disruption::taint::taint;
use crate::controllers::evictions::{evict, note};
use crate::decisions::disruption::mark::DisruptionMark;
use crate::decisions::placement::closure::must_wait;
use crate::decisions::pod_ref::PodRef;
use crate::decisions::termination::drain_order::{DrainPass, waiting};
use crate::decisions::termination::drain_report::drain_report;
use crate::state::object_ext::{NodeClaimExt, ObjectExt};

/// State of a drain after a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DrainProgress {
    InProgress,
    /// The successors of its pods could still be bound elsewhere than planned.
    Closing,
    /// The API server refuses evictions. At `until` the next pod must be deleted regardless of its budget.
    Blocked {
        until: UnixMillis,
    },
}

fn preconditions(pod: &PodRef) -> Preconditions {
    Preconditions { uid: Some(pod.uid.clone()), resource_version: None }
}

/// One pass over a draining node: taints it, evicts the next group of pods, and deletes the pods that would outlast the deadline.
pub async fn drain(ctx: &Context, claim: &NodeClaim, node: &Node) -> Result<DrainProgress, kube::Error> {
    taint(ctx, node).await?;
    let name = node.name_any();
    let now = clock::now();
    let closed = ctx.closed_nodes(now);
    if must_wait(&ctx.cluster.read(), &closed, claim, now) {
        return Ok(DrainProgress::Closing);
    }
    let (pass, report, pods) = {
        let state = ctx.cluster.read();
        let pods = waiting(&state, claim, &name, now).len();
        (DrainPass::new(&state, claim, &name, now), drain_report(&state, claim, &name, now), pods)
    };
    if ctx.drains_logged.insert(claim.uid().unwrap_or_default()) {
        let (node_pool, instance) = (claim.node_pool(), claim.instance_id());
        let instance_type = claim.labels().get(labels::INSTANCE_TYPE);
        tracing::info!(
            claim = claim.name_any(),
            node = name,
            node_pool,
            instance,
            instance_type,
            pods,
            "draining node"
        );
    }
    let is_urgent = DisruptionMark::of(claim).is_some_and(|mark| mark.deadline.is_some());
    let evicted = evict(ctx, claim, &name, pass.evict, is_urgent).await;
    report_waiting(ctx, claim, pods, report, evicted.refused).await;
    let deleted = delete(ctx, &name, pass.delete, pass.grace_period).await;
    let note = note(&name);
    for pod in evicted.pods {
        ctx.emit(pod_reference(&pod.namespace, &pod.name, &pod.uid), events::EVICTED.note(&note)).await;
    }
    let blocked = evicted.refused + evicted.failed > 0 && evicted.postponed == 0 && deleted;
    Ok(if blocked { DrainProgress::Blocked { until: pass.next_deletion } } else { DrainProgress::InProgress })
}

/// Reports the pods that keep the node, or else how many evictions PodDisruptionBudgets refused: by an event and a condition, which says from the start that
/// the node is draining.
async fn report_waiting(ctx: &Context, claim: &NodeClaim, pods: usize, waiting: Option<String>, refused: usize) {
    let refusal = || format!("{refused} pods can't be evicted now without breaking their PodDisruptionBudget");
    let note = waiting.or_else(|| (refused > 0).then(refusal));
    if let Some(note) = &note {
        ctx.emit_for_claim_and_node(claim, events::FAILED_DRAINING.note(note)).await;
    } else if pods == 0 || claim.condition(conditions::DRAINED).is_some() {
        return;
    }
    let note = note.as_deref().unwrap_or(conditions::DRAINING);
    let draining = |list: &mut Conditions<'_>| list.set_unknown(conditions::DRAINED, conditions::DRAINING, note);
    if let Err(error) = write_condition(ctx, claim, draining).await {
        tracing::debug!(claim = claim.name_any(), %error, "failed to write the condition of a draining node");
    }
}

/// Deletes pods with this grace period. Returns whether all of them are deleted.
async fn delete(ctx: &Context, node: &str, pods: Vec<PodRef>, grace_period: Duration) -> bool {
    let (mut all, mut deleted) = (true, Vec::new());
    let seconds = grace_period.as_secs();
    for pod in pods {
        let api: Api<Pod> = Api::namespaced(ctx.eviction_client.clone(), &pod.namespace);
        let params = DeleteParams {
            grace_period_seconds: u32::try_from(seconds).ok(),
            preconditions: Some(preconditions(&pod)),
            ..DeleteParams::default()
        };
        match api.delete(&pod.name, &params).await {
            Ok(_) => deleted.push(pod),
            Err(error) if is_not_found(&error) => {}
            Err(error) => {
                tracing::warn!(node, pod = pod.name, %error, "failed to delete pod, retrying");
                all = false;
            }
        }
    }
    // The events last: they must not delay a deletion.
    let note = format!(
        "deleted with a grace period of {seconds} s, because the time for the drain of node {node} ends: \
         PodDisruptionBudgets and {} do not hold it up",
        labels::DO_NOT_DISRUPT
    );
    for pod in deleted {
        ctx.emit(pod_reference(&pod.namespace, &pod.name, &pod.uid), events::DISRUPTED.note(&note)).await;
    }
    all
}

#[cfg(test)]
mod write_tests;
