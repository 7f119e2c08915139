//! Instances without a NodeClaim, NodeClaims without an instance, and Nodes that are left of either.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;

use crate::api::{NodeClaim, conditions};
use crate::cloud::launch_group::LaunchGroup;
use crate::cloud::{Cloud, CloudError, Instance, InstanceState};
use crate::controllers::context::Context;
use crate::controllers::node_claim::{lifecycle, metrics};
use crate::model::labels;
use crate::state::snapshot::node_ready;
use crate::state::{Cluster, ClusterState, now_ms};

/// How often the two are compared.
const PERIOD: Duration = Duration::from_secs(30);
/// How often at first: an earlier process may have left something.
const FIRST_PERIOD: Duration = Duration::from_secs(10);
/// So many times at first.
const FIRST_LOOKS: usize = 20;
/// How often unused instance profiles are looked for.
const PROFILES_PERIOD: Duration = Duration::from_mins(30);
/// An instance that isn't older may belong to a claim whose launch is not written down yet, milliseconds.
const YOUNG_INSTANCE_MS: i64 = 30_000;
/// The cloud may not list an instance that a claim was launched with no longer ago than this, milliseconds.
const YOUNG_CLAIM_MS: i64 = 60_000;

/// What has no counterpart.
#[derive(Debug, Default)]
pub struct Garbage {
    /// Provider ids of instances to terminate.
    pub leaked: Vec<String>,
    /// Claims to delete.
    pub orphaned: Vec<Arc<NodeClaim>>,
    /// Nodes to let go of.
    pub stranded: Vec<Arc<Node>>,
}

impl Garbage {
    /// Compares the cloud's instances with the cluster. The cloud is asked first: a claim that is made meanwhile is then known
    /// when its instance is looked for, and an instance that is launched meanwhile is not on the list.
    ///
    /// # Errors
    /// The cloud's.
    pub async fn find(cloud: &dyn Cloud, cluster: &Cluster) -> Result<Self, CloudError> {
        let instances = cloud.list().await?;
        let (state, now) = (cluster.read(), now_ms());
        Ok(Self {
            leaked: leaked(&state, &instances, now),
            orphaned: orphaned(&state, &instances, now),
            stranded: stranded(&state, &instances),
        })
    }
}

fn is_going(instance: &Instance) -> bool {
    matches!(instance.state, InstanceState::ShuttingDown | InstanceState::Terminated)
}

/// Provider ids of instances that no claim knows: none names it, and the claim it was launched for, if there is one, names
/// another. Those that are going already are left alone.
pub fn leaked(state: &ClusterState, instances: &[Instance], now: i64) -> Vec<String> {
    let id = |claim: &NodeClaim| claim.status.as_ref().and_then(|status| status.provider_id.clone());
    let named: BTreeSet<String> = state.claims.values().filter_map(|claim| id(claim)).collect();
    // The group that a claim was to be launched in; the simulated cloud launches each by itself.
    let tokens = |claim: &Arc<NodeClaim>| [Some(LaunchGroup::of(claim).id), claim.metadata.uid.clone()];
    let waiting: BTreeSet<String> =
        state.claims.values().filter(|claim| id(claim).is_none()).flat_map(tokens).flatten().collect();
    let known =
        |instance: &&Instance| named.contains(&instance.provider_id) || waiting.contains(&instance.client_token);
    let old = |instance: &&Instance| now - instance.launched_at.0 > YOUNG_INSTANCE_MS;
    let left = instances.iter().filter(|instance| old(instance) && !is_going(instance) && !known(instance));
    left.map(|instance| instance.provider_id.clone()).collect()
}

/// Claims whose instance is gone, or going. A node that is still ready contradicts the list, so its claim stays; so does a claim
/// that was launched since the list was made.
pub fn orphaned(state: &ClusterState, instances: &[Instance], now: i64) -> Vec<Arc<NodeClaim>> {
    let there = instances.iter().filter(|instance| !is_going(instance));
    let known: BTreeSet<&str> = there.map(|instance| instance.provider_id.as_str()).collect();
    state
        .claims
        .values()
        .filter(|claim| claim.metadata.deletion_timestamp.is_none())
        .filter(|claim| {
            let status = claim.status.as_ref();
            let launched = status.is_some_and(|status| conditions::is_true(&status.conditions, "Launched"));
            let id = status.and_then(|status| status.provider_id.as_deref());
            let since = status.and_then(|status| conditions::get(&status.conditions, conditions::LAUNCHED));
            let old = since.is_some_and(|since| now - since.last_transition_time.0.as_millisecond() >= YOUNG_CLAIM_MS);
            launched && old && id.is_some_and(|id| !known.contains(id))
        })
        .filter(|claim| state.node_of(claim).is_none_or(|node| !node_ready(node)))
        .cloned()
        .collect()
}

/// Nodes of ours that are being deleted and have neither claim nor instance any more: nobody else takes our finalizer off.
pub fn stranded(state: &ClusterState, instances: &[Instance]) -> Vec<Arc<Node>> {
    let id = |claim: &Arc<NodeClaim>| claim.status.as_ref().and_then(|status| status.provider_id.clone());
    let mut known: BTreeSet<String> = state.claims.values().filter_map(id).collect();
    known.extend(instances.iter().map(|instance| instance.provider_id.clone()));
    let ours = |node: &&Arc<Node>| {
        node.labels().contains_key(labels::NODE_POOL)
            && node.finalizers().iter().any(|finalizer| finalizer == labels::TERMINATION_FINALIZER)
    };
    let going = state.nodes.values().filter(|node| node.metadata.deletion_timestamp.is_some());
    let without = |node: &&Arc<Node>| {
        node.spec.as_ref().and_then(|spec| spec.provider_id.as_ref()).is_some_and(|id| !known.contains(id))
    };
    going.filter(ours).filter(without).cloned().collect()
}

/// Instance profiles that classes name, or claims: their instances may still ask for credentials.
pub fn profiles_in_use(state: &ClusterState) -> BTreeSet<String> {
    let classes = state.classes.values().filter_map(|class| class.status.as_ref()?.instance_profile.clone());
    let claims =
        state.claims.values().filter_map(|claim| claim.annotations().get(labels::INSTANCE_PROFILE_NAME).cloned());
    classes.chain(claims).collect()
}

/// Deletes instance profiles that nothing uses any more, until the process ends.
pub async fn profiles(ctx: Arc<Context>) {
    let Some(node_classes) = ctx.cloud.capabilities().node_classes else { return std::future::pending().await };
    loop {
        tokio::time::sleep(PROFILES_PERIOD).await;
        let used = profiles_in_use(&ctx.cluster.read());
        if let Err(error) = node_classes.delete_unused_profiles(&used).await {
            tracing::warn!(%error, "unused instance profiles could not be deleted, trying again later");
        }
    }
}

/// Runs until the process ends.
pub async fn run(ctx: Arc<Context>) {
    let mut looks = 0;
    loop {
        match Garbage::find(&*ctx.cloud, &ctx.cluster).await {
            Ok(garbage) => {
                looks += 1;
                clear(&ctx, garbage).await;
            }
            Err(error) => tracing::warn!(%error, "instances could not be listed, trying again"),
        }
        tokio::time::sleep(if looks < FIRST_LOOKS { FIRST_PERIOD } else { PERIOD }).await;
    }
}

async fn clear(ctx: &Context, garbage: Garbage) {
    for id in garbage.leaked {
        tracing::warn!(instance = id, "instance without a node claim is terminated");
        ctx.metrics.garbage_collected.with_label_values(&["instance"]).inc();
        let node = {
            let state = ctx.cluster.read();
            state.node_by_provider_id.get(&id).and_then(|name| state.nodes.get(name)).cloned()
        };
        // The Node first: an instance that is going is not looked at again.
        if let Some(node) = node.filter(|node| node.metadata.deletion_timestamp.is_none())
            && let Err(error) = lifecycle::delete_node(ctx, &node).await
        {
            tracing::warn!(node = node.name_any(), %error, "its node could not be deleted, trying again");
            continue;
        }
        if let Err(error) = ctx.cloud.terminate(&id).await {
            tracing::warn!(instance = id, %error, "instance could not be terminated, trying again");
        }
    }
    for claim in garbage.orphaned {
        tracing::warn!(claim = claim.name_any(), "its instance is gone, it goes");
        ctx.metrics.garbage_collected.with_label_values(&["nodeclaim"]).inc();
        match lifecycle::delete_claim(ctx, &claim).await {
            Ok(()) => metrics::count(ctx, &claim, "garbage_collected"),
            Err(error) => {
                tracing::warn!(claim = claim.name_any(), %error, "node claim could not be deleted, trying again");
            }
        }
    }
    for node in garbage.stranded {
        tracing::warn!(node = node.name_any(), "its node claim and its instance are gone, it goes");
        ctx.metrics.garbage_collected.with_label_values(&["node"]).inc();
        if let Err(error) = lifecycle::release_node(ctx, &node).await {
            tracing::warn!(node = node.name_any(), %error, "node could not be let go of, trying again");
        }
    }
}

#[cfg(test)]
mod write_tests;

#[cfg(test)]
mod tests;
