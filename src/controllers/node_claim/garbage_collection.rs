//! Garbage collection: instances without a NodeClaim, NodeClaims without an instance, and deleted Nodes with neither.

use std::sync::Arc;
use std::time::Duration;

use kube::api::ListParams;
use kube::{Api, ResourceExt};

use crate::api::NodeClaim;
use crate::clock;
use crate::cloud::{Cloud, CloudError, Instance};
use crate::controllers::context::Context;
use crate::controllers::deletion::{delete_claim_or_log, delete_node, release_node};
use crate::decisions::disruption::reason::DisruptionReason;
use crate::decisions::lifecycle::garbage::{Garbage, confirmed, profiles_in_use};
use crate::state::Cluster;
use crate::state::object_ext::ObjectExt;

/// How often instances and NodeClaims are compared.
const PERIOD: Duration = Duration::from_secs(30);
/// How often after the start: an earlier process may have left garbage.
const FIRST_PERIOD: Duration = Duration::from_secs(10);
/// Number of passes after the start.
const FIRST_PASSES: usize = 20;
/// How often unused instance profiles are deleted.
const PROFILES_PERIOD: Duration = Duration::from_mins(30);
/// Compares the cloud's instances with the cluster. The cloud is queried first: a claim created meanwhile is known when its instance
/// is compared, and an instance launched meanwhile is not on the list.
async fn compare(cloud: &dyn Cloud, cluster: &Cluster) -> Result<(Garbage, Vec<Instance>), CloudError> {
    let instances = cloud.list().await?;
    Ok((Garbage::find(&cluster.read(), &instances, clock::now()), instances))
}

/// The garbage. Before an instance is terminated, all NodeClaims are listed again.
async fn find(ctx: &Context) -> Result<Garbage, FindError> {
    let (mut garbage, instances) = compare(&*ctx.cloud, &ctx.cluster).await?;
    if !garbage.leaked.is_empty() {
        let live = Api::<NodeClaim>::all(ctx.client.clone()).list(&ListParams::default()).await?;
        let found = garbage.leaked.len();
        garbage.leaked = confirmed(garbage.leaked, &instances, &live.items);
        if garbage.leaked.len() < found {
            let confirmed = garbage.leaked.len();
            tracing::warn!(
                found,
                confirmed,
                "instances without node claim remain: they have one after all, or wait for the next pass"
            );
        }
    }
    Ok(garbage)
}

#[derive(Debug, thiserror::Error)]
enum FindError {
    #[error("can't list instances: {0}")]
    Cloud(#[from] CloudError),
    #[error("can't list NodeClaims: {0}")]
    Api(#[from] kube::Error),
}

/// Deletes unused instance profiles, until the process ends. Does nothing when the cloud has no node classes to resolve.
pub async fn profiles(ctx: Arc<Context>) {
    let Some(node_classes) = ctx.cloud.capabilities().node_classes else { return std::future::pending().await };
    loop {
        tokio::time::sleep(PROFILES_PERIOD).await;
        let used = profiles_in_use(&ctx.cluster.read());
        if let Err(error) = node_classes.delete_unused_profiles(&used).await {
            tracing::warn!(%error, "failed to delete unused instance profiles, retrying");
        }
    }
}

/// Runs until the process ends.
pub async fn run(ctx: Arc<Context>) {
    let mut passes = 0;
    loop {
        match find(&ctx).await {
            Ok(garbage) => {
                passes += 1;
                collect(&ctx, garbage).await;
            }
            Err(error) => tracing::warn!(%error, "failed to find garbage, retrying"),
        }
        tokio::time::sleep(if passes < FIRST_PASSES { FIRST_PERIOD } else { PERIOD }).await;
    }
}

async fn collect(ctx: &Context, garbage: Garbage) {
    for id in garbage.leaked {
        tracing::warn!(instance = id, "terminating instance without node claim");
        let node = {
            let state = ctx.cluster.read();
            state.node_by_provider_id.get(&id).and_then(|name| state.nodes.get(name)).cloned()
        };
        // The Node first: a terminated instance is not garbage in the next pass.
        if let Some(node) = node.filter(|node| !node.is_deleting())
            && let Err(error) = delete_node(ctx, &node).await
        {
            tracing::warn!(node = node.name_any(), %error, "failed to delete node of leaked instance, retrying");
            continue;
        }
        match ctx.cloud.terminate(&id).await {
            Ok(_) => ctx.metrics.garbage_collected.with_label_values(&["instance"]).inc(),
            Err(error) => tracing::warn!(instance = id, %error, "failed to terminate leaked instance, retrying"),
        }
    }
    for claim in garbage.orphaned {
        tracing::warn!(claim = claim.name_any(), "deleting node claim without instance");
        if delete_claim_or_log(ctx, &claim, DisruptionReason::GarbageCollected).await {
            ctx.metrics.garbage_collected.with_label_values(&["nodeclaim"]).inc();
        }
    }
    for node in garbage.stranded {
        tracing::warn!(node = node.name_any(), "releasing deleted node without node claim and instance");
        match release_node(ctx, &node).await {
            Ok(()) => ctx.metrics.garbage_collected.with_label_values(&["node"]).inc(),
            Err(error) => {
                tracing::warn!(node = node.name_any(), %error, "failed to remove finalizer from node, retrying");
            }
        }
    }
}

#[cfg(test)]
mod write_tests;

#[cfg(test)]
mod tests;
