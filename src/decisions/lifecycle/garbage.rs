//! Garbage: instances without a NodeClaim, NodeClaims without an instance, and deleted Nodes with neither.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;

use crate::api::launch_group::LaunchGroup;
use crate::api::{NodeClaim, conditions};
use crate::model::instance::{Instance, InstanceState};
use crate::model::labels;
use crate::model::time::UnixMillis;
use crate::state::object_ext::{NodeClaimExt, NodeExt, ObjectExt};
use crate::state::tables::ClusterState;

/// A younger instance may belong to a claim whose provider id is not written yet.
const MIN_INSTANCE_AGE: Duration = Duration::from_secs(30);
/// The cloud may not list an instance that was launched more recently than this.
const MIN_LAUNCH_AGE: Duration = Duration::from_mins(1);

/// Objects without their counterpart.
#[derive(Debug, Default)]
pub struct Garbage {
    /// Provider ids of instances to terminate.
    pub leaked: Vec<String>,
    /// Claims to delete.
    pub orphaned: Vec<Arc<NodeClaim>>,
    /// Nodes to remove our finalizer from.
    pub stranded: Vec<Arc<Node>>,
}

impl Garbage {
    /// Compares a list of all instances with a later state of the cluster.
    pub fn find(state: &ClusterState, instances: &[Instance], now: UnixMillis) -> Self {
        Self {
            leaked: leaked(state, instances, now),
            orphaned: orphaned(state, instances, now),
            stranded: stranded(state, instances),
        }
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
pub fn profiles_in_use(state: &ClusterState) -> BTreeSet<String> {
    let classes = state.classes.values().filter_map(|class| class.status.as_ref()?.instance_profile.clone());
    let claims =
        state.claims.values().filter_map(|claim| claim.annotations().get(labels::INSTANCE_PROFILE_NAME).cloned());
    classes.chain(claims).collect()
}

#[cfg(test)]
mod tests;
