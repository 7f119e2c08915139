//! Has pods leave their ReplicaSets before they are evicted, or brings them back.

use futures::{StreamExt, stream};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::Api;
use kube::api::{Patch, PatchParams};
use serde_json::json;
use stowage_model::{events, labels};
use stowage_runtime::clock;

use crate::controllers::context::{Context, is_conflict, is_not_found, pod_reference};
use crate::decisions::disruption::surge::{Surging, to_return};
use crate::decisions::staleness::Removal;

/// Concurrent writes.
const CONCURRENCY: usize = 16;

const NOTE: &str = "the pod leaves its ReplicaSet, and its node when its successor is ready";

/// Has these pods leave. The next pass tries again what failed.
///
/// # Errors
/// Why a pod may not be written.
pub async fn release(ctx: &Context, pods: &[Surging]) -> Result<(), String> {
    let release = async |one: &Surging| {
        let Surging { pod, surge } = one;
        match release_one(ctx, one).await {
            Ok(()) => {
                tracing::info!(
                    namespace = pod.namespace,
                    pod = pod.name,
                    replica_set = surge.replica_set,
                    "pod left its ReplicaSet to surge"
                );
                ctx.emit(pod_reference(&pod.namespace, &pod.name, &pod.uid), events::SURGED.note(NOTE)).await;
                None
            }
            Err(error) if is_denied(&error) => {
                Some(format!("pod {}/{} may not leave its ReplicaSet: {error}", pod.namespace, pod.name))
            }
            Err(error) => {
                log(one, &error);
                None
            }
        }
    };
    let refused: Vec<Option<String>> = stream::iter(pods).map(release).buffer_unordered(CONCURRENCY).collect().await;
    refused.into_iter().flatten().next().map_or(Ok(()), Err)
}

/// Whether a policy, a webhook or the rights of the ServiceAccount forbid the change.
fn is_denied(error: &kube::Error) -> bool {
    let denies = |code: u16, message: &str| code == 403 || (code == 422 && message.contains("denied request"));
    matches!(error, kube::Error::Api(status) if denies(status.code, &status.message))
}

/// Whether the pod is not what it was, such as one that left before: a test of the patch failed.
fn is_changed(error: &kube::Error) -> bool {
    let is_invalid = matches!(error, kube::Error::Api(status) if status.code == 422) && !is_denied(error);
    is_invalid || is_not_found(error) || is_conflict(error)
}

async fn release_one(ctx: &Context, Surging { pod, surge }: &Surging) -> Result<(), kube::Error> {
    // The label is tested, so that a pod which left before keeps what was recorded then.
    let label = format!("/metadata/labels/{}", labels::POD_TEMPLATE_HASH);
    let operations = json!([
        {"op": "test", "path": "/metadata/uid", "value": &pod.uid},
        {"op": "test", "path": label, "value": &surge.hash},
        {"op": "remove", "path": label},
        {"op": "add", "path": format!("/metadata/annotations/{}", labels::SURGED.replace('/', "~1")), "value": json!(surge).to_string()},
    ]);
    let patch = serde_json::from_value(operations).map_err(kube::Error::SerdeError)?;
    write(ctx, &pod.namespace, &pod.name, &Patch::<()>::Json(patch)).await
}

/// Brings the pods whose nodes stay back to their ReplicaSets. Returns whether all are back, or were changed by others.
pub async fn bring_back(ctx: &Context) -> bool {
    let pods = to_return(&ctx.cluster.read());
    if pods.is_empty() || ctx.is_stale(Removal::Departure) {
        return true;
    }
    let bring_back = async |one: Surging| {
        let Surging { pod, surge } = &one;
        match bring_back_one(ctx, &one).await {
            Ok(()) => {
                let (namespace, pod, replica_set) = (&pod.namespace, &pod.name, &surge.replica_set);
                tracing::info!(namespace, pod, replica_set, "pod is back in its ReplicaSet");
                true
            }
            Err(error) => {
                log(&one, &error);
                is_changed(&error)
            }
        }
    };
    let results = stream::iter(pods).map(bring_back).buffer_unordered(CONCURRENCY);
    results.fold(true, |all, written| async move { all && written }).await
}

/// With the ReplicaSet as its controller: if it was deleted meanwhile, the garbage collector deletes the pod.
async fn bring_back_one(ctx: &Context, Surging { pod, surge }: &Surging) -> Result<(), kube::Error> {
    let present = Api::<Pod>::namespaced(ctx.client.clone(), &pod.namespace).get(&pod.name).await?;
    let mut owners = present.metadata.owner_references.unwrap_or_default();
    if !owners.iter().any(|owner| owner.controller == Some(true)) {
        owners.push(OwnerReference {
            api_version: "apps/v1".to_owned(),
            kind: "ReplicaSet".to_owned(),
            name: surge.replica_set.clone(),
            uid: surge.uid.clone(),
            controller: Some(true),
            block_owner_deletion: None,
        });
    }
    let patch = json!({"metadata": {
        "uid": pod.uid,
        "resourceVersion": present.metadata.resource_version,
        "labels": {(labels::POD_TEMPLATE_HASH): surge.hash},
        "annotations": {(labels::SURGED): null},
        "ownerReferences": owners,
    }});
    write(ctx, &pod.namespace, &pod.name, &Patch::Merge(&patch)).await
}

async fn write<P: serde::Serialize + std::fmt::Debug>(
    ctx: &Context,
    namespace: &str,
    name: &str,
    patch: &Patch<P>,
) -> Result<(), kube::Error> {
    let api: Api<Pod> = Api::namespaced(ctx.client.clone(), namespace);
    let changed = api.patch(name, &PatchParams::default(), patch).await?;
    ctx.cluster.update(|state| state.apply_pod(&changed, clock::now()));
    Ok(())
}

fn log(Surging { pod, .. }: &Surging, error: &kube::Error) {
    if is_changed(error) {
        tracing::debug!(namespace = pod.namespace, pod = pod.name, %error, "pod changed, deciding again");
    } else {
        tracing::warn!(namespace = pod.namespace, pod = pod.name, %error, "failed to write pod that surges, retrying");
    }
}

#[cfg(test)]
mod write_tests;
