//! Garbage collection: instances without a NodeClaim, NodeClaims without an instance, and deleted Nodes with neither.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;

use crate::api::{NodeClaim, conditions};
use crate::clock;
use crate::cloud::launch_group::LaunchGroup;
use crate::cloud::{Cloud, CloudError, Instance, InstanceState};
use crate::controllers::context::Context;
use crate::controllers::deletion::{delete_claim_or_log, delete_node, release_node};
use crate::decisions::disruption::reason::DisruptionReason;
use crate::model::labels;
use crate::model::time::UnixMillis;
use crate::state::object_ext::{NodeClaimExt, NodeExt, ObjectExt};
use crate::state::{Cluster, ClusterState};

/// How often instances and NodeClaims are compared.
const PERIOD: Duration = Duration::from_secs(30);
/// How often after the start: an earlier process may have left garbage.
const FIRST_PERIOD: Duration = Duration::from_secs(10);
/// Number of passes after the start.
const FIRST_PASSES: usize = 20;
/// How often unused instance profiles are deleted.
const PROFILES_PERIOD: Duration = Duration::from_mins(30);
/// A younger instance may belong to a claim whose provider id is not written yet.
const MIN_INSTANCE_AGE: Duration = Duration::from_secs(30);
/// The cloud may not list an instance that was launched more recently than this.
const MIN_LAUNCH_AGE: Duration = Duration::from_mins(1);

/// Objects without their counterpart.
#[derive(Debug, Default)]
struct Garbage {
    /// Provider ids of instances to terminate.
    leaked: Vec<String>,
    /// Claims to delete.
    orphaned: Vec<Arc<NodeClaim>>,
    /// Nodes to remove our finalizer from.
    stranded: Vec<Arc<Node>>,
}

impl Garbage {
    /// Compares the cloud's instances with the cluster. The cloud is queried first: a claim created meanwhile is known when its
    /// instance is compared, and an instance launched meanwhile is not on the list.
    async fn find(cloud: &dyn Cloud, cluster: &Cluster) -> Result<Self, CloudError> {
        let instances = cloud.list().await?;
        let (state, now) = (cluster.read(), clock::now());
        Ok(Self {
            leaked: leaked(&state, &instances, now),
            orphaned: orphaned(&state, &instances, now),
            stranded: stranded(&state, &instances),
        })
    }
}

fn is_shutting_down(instance: &Instance) -> bool {
    matches!(instance.state, InstanceState::ShuttingDown | InstanceState::Terminated)
}

/// Provider ids of running instances that no claim names, and whose own claim, if it exists, names another instance.
fn leaked(state: &ClusterState, instances: &[Instance], now: UnixMillis) -> Vec<String> {
    let named: BTreeSet<&str> = state.claims.values().filter_map(|claim| claim.provider_id()).collect();
    // The launch group of a claim; the simulated cloud launches each claim separately.
    let tokens = |claim: &Arc<NodeClaim>| [Some(LaunchGroup::of(claim).id), claim.metadata.uid.clone()];
    let waiting: BTreeSet<String> =
        state.claims.values().filter(|claim| claim.provider_id().is_none()).flat_map(tokens).flatten().collect();
    let known =
        |instance: &&Instance| named.contains(&*instance.provider_id) || waiting.contains(&instance.client_token);
    let old = |instance: &&Instance| now > instance.launched_at + MIN_INSTANCE_AGE;
    let left = instances.iter().filter(|instance| old(instance) && !is_shutting_down(instance) && !known(instance));
    left.map(|instance| instance.provider_id.clone()).collect()
}

/// Claims whose instance is gone or shutting down. A claim with a ready node is kept, since the node contradicts the list, and so is
/// a claim that may have been launched after the list was made.
fn orphaned(state: &ClusterState, instances: &[Instance], now: UnixMillis) -> Vec<Arc<NodeClaim>> {
    let running = instances.iter().filter(|instance| !is_shutting_down(instance));
    let known: BTreeSet<&str> = running.map(|instance| instance.provider_id.as_str()).collect();
    state
        .claims
        .values()
        .filter(|claim| !claim.is_deleting())
        .filter(|claim| {
            let launched = claim.true_since(conditions::LAUNCHED);
            launched.is_some_and(|at| at.is_older_than(MIN_LAUNCH_AGE, now))
                && claim.provider_id().is_some_and(|id| !known.contains(id))
        })
        .filter(|claim| state.node_of(claim).is_none_or(|node| !node.is_ready()))
        .cloned()
        .collect()
}

/// Deleting Nodes of ours without claim and instance: nothing else removes our finalizer.
fn stranded(state: &ClusterState, instances: &[Instance]) -> Vec<Arc<Node>> {
    let mut known: BTreeSet<&str> = state.claims.values().filter_map(|claim| claim.provider_id()).collect();
    known.extend(instances.iter().map(|instance| instance.provider_id.as_str()));
    let is_ours = |node: &&Arc<Node>| node.node_pool().is_some() && node.has_finalizer(labels::TERMINATION_FINALIZER);
    let deleting = state.nodes.values().filter(|node| node.is_deleting());
    let without = |node: &&Arc<Node>| node.provider_id().is_some_and(|id| !known.contains(id));
    deleting.filter(is_ours).filter(without).cloned().collect()
}

/// Instance profiles of node classes, and of claims, whose instances may still request credentials.
fn profiles_in_use(state: &ClusterState) -> BTreeSet<String> {
    let classes = state.classes.values().filter_map(|class| class.status.as_ref()?.instance_profile.clone());
    let claims =
        state.claims.values().filter_map(|claim| claim.annotations().get(labels::INSTANCE_PROFILE_NAME).cloned());
    classes.chain(claims).collect()
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
        match Garbage::find(&*ctx.cloud, &ctx.cluster).await {
            Ok(garbage) => {
                passes += 1;
                collect(&ctx, garbage).await;
            }
            Err(error) => tracing::warn!(%error, "failed to list instances, retrying"),
        }
        tokio::time::sleep(if passes < FIRST_PASSES { FIRST_PERIOD } else { PERIOD }).await;
    }
}

async fn collect(ctx: &Context, garbage: Garbage) {
    for id in garbage.leaked {
        tracing::warn!(instance = id, "terminating instance without node claim");
        ctx.metrics.garbage_collected.with_label_values(&["instance"]).inc();
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
        if let Err(error) = ctx.cloud.terminate(&id).await {
            tracing::warn!(instance = id, %error, "failed to terminate leaked instance, retrying");
        }
    }
    for claim in garbage.orphaned {
        tracing::warn!(claim = claim.name_any(), "deleting node claim without instance");
        ctx.metrics.garbage_collected.with_label_values(&["nodeclaim"]).inc();
        delete_claim_or_log(ctx, &claim, DisruptionReason::GarbageCollected).await;
    }
    for node in garbage.stranded {
        tracing::warn!(node = node.name_any(), "releasing deleted node without node claim and instance");
        ctx.metrics.garbage_collected.with_label_values(&["node"]).inc();
        if let Err(error) = release_node(ctx, &node).await {
            tracing::warn!(node = node.name_any(), %error, "failed to remove finalizer from node, retrying");
        }
    }
}

#[cfg(test)]
mod write_tests;

#[cfg(test)]
mod tests;
