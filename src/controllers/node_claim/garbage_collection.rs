//! Garbage collection: instances without a NodeClaim, NodeClaims without an instance, and deleted Nodes with neither.

use std::sync::Arc;
use std::time::Duration;

use kube::api::ListParams;
use kube::{Api, ResourceExt};
use stowage_api::NodeClaim;
use stowage_cloud::{Cloud, CloudError, Instance};
use stowage_runtime::clock;
use stowage_runtime::sync::heartbeat;

use crate::controllers::caps::Capped;
use crate::controllers::context::Context;
use crate::controllers::deletion::{delete_claim_or_log, delete_node, release_node};
use crate::decisions::disruption::reason::DisruptionReason;
use crate::decisions::lifecycle::garbage::{Garbage, confirmed, max_terminations, profiles_in_use};
use crate::decisions::staleness::Removal;
use crate::state::Cluster;
use crate::state::object_ext::ObjectExt;

/// Values of the metric label `kind`.
pub const INSTANCE: &str = "instance";
pub const NODE_CLAIM: &str = "nodeclaim";
pub const NODE: &str = "node";
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

/// The garbage, and how many instances may be terminated. Before any is, all NodeClaims are listed again.
async fn find(ctx: &Context) -> Result<(Garbage, usize), CloudError> {
    let (mut garbage, instances) = compare(&*ctx.cloud, &ctx.cluster).await?;
    if !garbage.leaked.is_empty() {
        let leaked = std::mem::take(&mut garbage.leaked);
        match Api::<NodeClaim>::all(ctx.client.clone()).list(&ListParams::default()).await {
            Ok(live) => garbage.leaked = confirmed(leaked, &instances, &live.items),
            Err(error) => tracing::warn!(%error, "failed to list node claims, no instance is terminated"),
        }
    }
    Ok((garbage, max_terminations(&instances)))
}

/// Deletes unused instance profiles, until the process ends. Does nothing when the cloud has no node classes to resolve.
pub async fn profiles(ctx: Arc<Context>) {
    let Some(node_classes) = ctx.cloud.capabilities().node_classes else { return heartbeat::rest_forever().await };
    loop {
        heartbeat::rest(tokio::time::sleep(PROFILES_PERIOD)).await;
        if ctx.is_stale(Removal::GarbageCollection) {
            continue;
        }
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
        if !ctx.pause().disruption && !ctx.is_stale(Removal::GarbageCollection) {
            match find(&ctx).await {
                Ok((garbage, most)) => {
                    passes += 1;
                    let most = ctx.admit(Capped::Disruption, most.min(garbage.leaked.len())).await;
                    collect(&ctx, garbage, most).await;
                }
                Err(error) => tracing::warn!(%error, "failed to list instances, retrying"),
            }
        }
        heartbeat::rest(tokio::time::sleep(if passes < FIRST_PASSES { FIRST_PERIOD } else { PERIOD })).await;
    }
}

/// Clears the garbage. At most `most` instances are terminated; those that can not be do not count, and keep no other alive.
async fn collect(ctx: &Context, garbage: Garbage, most: usize) {
    let mut terminated = 0;
    for id in garbage.leaked {
        heartbeat::progress();
        if terminated == most {
            tracing::warn!(terminated, "other instances without node claim wait for the next pass");
            break;
        }
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
            Ok(_) => {
                terminated += 1;
                ctx.metrics.garbage_collected.with_label_values(&[INSTANCE]).inc();
            }
            Err(error) => tracing::warn!(instance = id, %error, "failed to terminate leaked instance, retrying"),
        }
    }
    for claim in garbage.orphaned {
        tracing::warn!(claim = claim.name_any(), "deleting node claim without instance");
        if delete_claim_or_log(ctx, &claim, DisruptionReason::GarbageCollected).await {
            ctx.metrics.garbage_collected.with_label_values(&[NODE_CLAIM]).inc();
        }
    }
    for node in garbage.stranded {
        tracing::warn!(node = node.name_any(), "releasing deleted node without node claim and instance");
        match release_node(ctx, &node).await {
            Ok(()) => ctx.metrics.garbage_collected.with_label_values(&[NODE]).inc(),
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
