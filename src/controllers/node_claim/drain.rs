//! Drains a leaving node: taints it and evicts its pods in order, respecting PodDisruptionBudgets until the deadline.

use std::time::Duration;

use futures::{StreamExt, stream};
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::policy::v1::Eviction;
use k8s_openapi::apimachinery::pkg::apis::meta::v1 as meta;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{DeleteOptions, ObjectMeta};
use kube::api::{DeleteParams, PostParams, Preconditions};
use kube::core::Status;
use kube::{Api, ResourceExt};

use crate::api::conditions::Conditions;
use crate::api::{NodeClaim, conditions};
use crate::clock;
use crate::controllers::condition_writer::write_condition;
use crate::controllers::context::{Context, is_conflict, is_not_found, pod_reference};
use crate::controllers::disruption::taint::taint;
use crate::decisions::placement::closure::must_wait;
use crate::decisions::pod_ref::PodRef;
use crate::decisions::termination::drain_order::{DrainPass, waiting};
use crate::decisions::termination::drain_report::drain_report;
use crate::model::time::UnixMillis;
use crate::model::{events, labels};
use crate::state::object_ext::{NodeClaimExt, ObjectExt};

/// Concurrent evictions for one node.
const CONCURRENCY: usize = 10;

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
    let (refused, by_budget) = evict(ctx, node, pass.evict).await;
    report_waiting(ctx, claim, pods, report, by_budget).await;
    let deleted = delete(ctx, &name, pass.delete, pass.grace_period).await;
    let blocked = refused && deleted;
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

/// Evicts pods. Returns whether an eviction was refused or failed, and how many PodDisruptionBudgets refused.
async fn evict(ctx: &Context, node: &Node, pods: Vec<PodRef>) -> (bool, usize) {
    let name = node.name_any();
    let evictions = pods.into_iter().map(|pod| async move {
        let api: Api<Pod> = Api::namespaced(ctx.evictions.clone(), &pod.namespace);
        let preconditions = meta::Preconditions { uid: Some(pod.uid.clone()), resource_version: None };
        let eviction = Eviction {
            metadata: ObjectMeta { name: Some(pod.name.clone()), ..ObjectMeta::default() },
            delete_options: Some(DeleteOptions { preconditions: Some(preconditions), ..DeleteOptions::default() }),
        };
        // `Api::evict` of kube 5.0 writes the options as `delete_options`, which the API server ignores.
        let evicted =
            api.create_subresource::<_, Status>("eviction", &pod.name, &PostParams::default(), &eviction).await;
        (evicted, pod)
    });
    let mut results = stream::iter(evictions).buffer_unordered(CONCURRENCY);
    let (mut blocked, mut failed) = (0, false);
    while let Some((result, pod)) = results.next().await {
        match result {
            Ok(_) => {
                ctx.metrics.evictions.with_label_values(&["ok"]).inc();
                let note = format!("node {name} is being drained");
                ctx.emit(pod_reference(&pod.namespace, &pod.name, &pod.uid), events::EVICTED.note(&note)).await;
            }
            Err(error) if is_not_found(&error) || is_conflict(&error) => {}
            Err(kube::Error::Api(status)) if is_refused_by_budget(&status) => {
                ctx.metrics.evictions.with_label_values(&["refused"]).inc();
                blocked += 1;
            }
            Err(error) => {
                ctx.metrics.evictions.with_label_values(&["failed"]).inc();
                tracing::warn!(node = name, %error, "eviction failed, retrying");
                failed = true;
            }
        }
    }
    (blocked > 0 || failed, blocked)
}

/// Deletes pods with this grace period. Returns whether all of them are deleted.
async fn delete(ctx: &Context, node: &str, pods: Vec<PodRef>, grace_period: Duration) -> bool {
    let (mut all, mut deleted) = (true, Vec::new());
    let seconds = grace_period.as_secs();
    for pod in pods {
        let api: Api<Pod> = Api::namespaced(ctx.evictions.clone(), &pod.namespace);
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

/// Whether an eviction was refused because of PodDisruptionBudgets: one allows no more, or several match the pod (500). An
/// overloaded API server also responds with 429, but without that cause.
fn is_refused_by_budget(status: &Status) -> bool {
    let causes = status.details.iter().flat_map(|details| &details.causes);
    status.code == 500 || (status.code == 429 && causes.into_iter().any(|cause| cause.reason == "DisruptionBudget"))
}

#[cfg(test)]
mod write_tests;

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_a_refusal_by_a_budget_counts_as_one() {
        let refused = |code: u16, cause: Option<&str>| {
            let causes: Vec<_> = cause.map(|reason| json!({"reason": reason, "message": "m"})).into_iter().collect();
            is_refused_by_budget(&serde_json::from_value(json!({"code": code, "details": {"causes": causes}})).unwrap())
        };
        assert!(refused(429, Some("DisruptionBudget")) && refused(500, None));
        assert!(!refused(429, None) && !refused(429, Some("Other")) && !refused(503, Some("DisruptionBudget")));
    }
}
