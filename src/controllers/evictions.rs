//! Evicts pods with the Eviction API, which respects PodDisruptionBudgets. All drains together keep to a number of requests at a time, and to a rate.

use futures::{StreamExt, stream};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::policy::v1::Eviction;
use k8s_openapi::apimachinery::pkg::apis::meta::v1 as meta;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{DeleteOptions, ObjectMeta};
use kube::Api;
use kube::api::PostParams;
use kube::core::Status;
use stowage_api::NodeClaim;
use stowage_runtime::clock;

use crate::controllers::context::{Context, is_conflict, is_not_found};
use crate::controllers::node_claim::claim_metrics;
use crate::decisions::pod_ref::PodRef;

/// Concurrent evictions for one node.
const CONCURRENCY: usize = 10;

/// The result of evictions from a node.
#[derive(Debug, Default)]
pub struct Evicted {
    pub pods: Vec<PodRef>,
    /// Number of pods whose eviction PodDisruptionBudgets refused.
    pub refused: usize,
    pub failed: usize,
    /// Not tried, because of the rate.
    pub postponed: usize,
}

/// Evicts the first of these pods of the node of a claim that the rate allows, all if it is urgent: the instance ends soon. The caller reports them
/// ([`note`]), so that events delay no eviction.
pub async fn evict(ctx: &Context, claim: &NodeClaim, node: &str, mut pods: Vec<PodRef>, is_urgent: bool) -> Evicted {
    let mut out = Evicted::default();
    if !is_urgent {
        let most = ctx.settings.max_evictions_per_second;
        let admitted = ctx.caps.admit_evictions(pods.len(), most, clock::now());
        out.postponed = pods.len() - admitted;
        pods.truncate(admitted);
    }
    let mut results =
        stream::iter(pods).map(|pod| async { (evict_one(ctx, &pod).await, pod) }).buffer_unordered(CONCURRENCY);
    while let Some((result, pod)) = results.next().await {
        ctx.metrics.eviction_requests.with_label_values(&[code(&result)]).inc();
        match result {
            Ok(_) => {
                ctx.metrics.evictions.with_label_values(&["ok"]).inc();
                out.pods.push(pod);
            }
            Err(error) if is_not_found(&error) || is_conflict(&error) => {}
            Err(kube::Error::Api(status)) if is_refused_by_budget(&status) => {
                ctx.metrics.evictions.with_label_values(&["refused"]).inc();
                out.refused += 1;
            }
            Err(error) => {
                ctx.metrics.evictions.with_label_values(&["failed"]).inc();
                tracing::warn!(node, %error, "eviction failed, retrying");
                out.failed += 1;
            }
        }
    }
    claim_metrics::count_pods_drained(ctx, claim, out.pods.len());
    if !is_urgent {
        // No pod leaves: others may.
        ctx.caps.take_back_evictions(out.refused + out.failed);
    }
    out
}

/// The note of the event about a pod that was evicted from this node.
pub fn note(node: &str) -> String {
    format!("node {node} is being drained")
}

async fn evict_one(ctx: &Context, pod: &PodRef) -> Result<Status, kube::Error> {
    // Never closed.
    let _slot = ctx.eviction_slots.acquire().await;
    let api: Api<Pod> = Api::namespaced(ctx.eviction_client.clone(), &pod.namespace);
    let preconditions = meta::Preconditions { uid: Some(pod.uid.clone()), resource_version: None };
    let eviction = Eviction {
        metadata: ObjectMeta { name: Some(pod.name.clone()), ..ObjectMeta::default() },
        delete_options: Some(DeleteOptions { preconditions: Some(preconditions), ..DeleteOptions::default() }),
    };
    // `Api::evict` of kube 5.0 writes the options as `delete_options`, which the API server ignores.
    api.create_subresource("eviction", &pod.name, &PostParams::default(), &eviction).await
}

/// The status code of a response, as Karpenter counts it; empty without a response.
fn code<T>(result: &Result<T, kube::Error>) -> String {
    match result {
        Ok(_) => "200".into(),
        Err(kube::Error::Api(status)) => status.code.to_string(),
        Err(_) => String::new(),
    }
}

/// Whether an eviction was refused because of PodDisruptionBudgets: one allows no more, or several match the pod (500). An
/// overloaded API server also responds with 429, but without that cause.
fn is_refused_by_budget(status: &Status) -> bool {
    let causes = status.details.iter().flat_map(|details| &details.causes);
    status.code == 500 || (status.code == 429 && causes.into_iter().any(|cause| cause.reason == "DisruptionBudget"))
}

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
