//! Garbage: instances without a NodeClaim, NodeClaims without an instance, and deleted Nodes with neither.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;
use stowage_api::launch_group::LaunchGroup;
use stowage_api::{NodeClaim, conditions};
use stowage_model::instance::{Instance, InstanceState};
use stowage_model::labels;
use stowage_model::time::UnixMillis;

use crate::state::object_ext::{NodeClaimExt, NodeExt, ObjectExt};
use crate::state::tables::ClusterState;

/// A younger instance may belong to a claim whose provider id is not written yet.
const MIN_INSTANCE_AGE: Duration = Duration::from_secs(30);
/// The cloud may not list an instance that was launched more recently than this: 90 s were observed on EC2.
const MIN_LAUNCH_AGE: Duration = Duration::from_secs(100);
/// The same for a claim whose node has not registered: nothing contradicts the list.
const MIN_UNREGISTERED_AGE: Duration = Duration::from_mins(5);
/// The same for a claim that is registered and has no Node: the Node is gone, too.
const MIN_NODELESS_AGE: Duration = Duration::from_secs(10);
/// Instances that one pass may terminate, in a small cluster.
const MIN_TERMINATIONS: usize = 5;

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

/// The instances that NodeClaims account for.
struct Accounted<'a> {
    named: BTreeSet<&'a str>,
    /// Tokens of launches whose provider id is not written yet.
    waiting: BTreeSet<String>,
}

impl<'a> Accounted<'a> {
    fn by(claims: impl Iterator<Item = &'a NodeClaim> + Clone) -> Self {
        // The launch group of a claim; the simulated cloud launches each claim separately.
        let tokens = |claim: &NodeClaim| [Some(LaunchGroup::of(claim).id), claim.metadata.uid.clone()];
        let waiting = claims.clone().filter(|claim| claim.provider_id().is_none()).flat_map(tokens).flatten().collect();
        Self { named: claims.filter_map(|claim| claim.provider_id()).collect(), waiting }
    }

    fn has(&self, instance: &Instance) -> bool {
        self.named.contains(&*instance.provider_id) || self.waiting.contains(&instance.client_token)
    }
}

/// Provider ids of running instances that no claim names, and whose own claim, if it exists, names another instance.
fn leaked(state: &ClusterState, instances: &[Instance], now: UnixMillis) -> Vec<String> {
    let mut accounted = Accounted::by(state.claims.values().map(|claim| &**claim));
    accounted.named.extend(state.foreign_claims.values().flatten().map(String::as_str));
    let old = |instance: &&Instance| now > instance.launched_at + MIN_INSTANCE_AGE;
    let left =
        instances.iter().filter(|instance| old(instance) && !is_shutting_down(instance) && !accounted.has(instance));
    left.map(|instance| instance.provider_id.clone()).collect()
}

/// How many instances one pass may terminate: a tenth of all, or five.
pub fn max_terminations(instances: &[Instance]) -> usize {
    MIN_TERMINATIONS.max(instances.len() / 10)
}

/// The leaked instances that a fresh list of all NodeClaims does not account for either. The watched state may be minutes old, above all
/// after a change of the leader.
pub fn confirmed(leaked: Vec<String>, instances: &[Instance], live: &[NodeClaim]) -> Vec<String> {
    let accounted = Accounted::by(live.iter());
    let by_id: BTreeMap<&str, &Instance> =
        instances.iter().map(|instance| (instance.provider_id.as_str(), instance)).collect();
    let unknown =
        leaked.into_iter().filter(|id| by_id.get(id.as_str()).is_some_and(|instance| !accounted.has(instance)));
    unknown.collect()
}

/// Claims whose instance is gone or shutting down, or that are registered and name none. A claim with a ready node is kept, since the node
/// contradicts the list, and so is a claim that was launched so recently that the list may lack its instance: longer for a claim that is not
/// registered, and shorter for one whose Node is gone.
fn orphaned(state: &ClusterState, instances: &[Instance], now: UnixMillis) -> Vec<Arc<NodeClaim>> {
    let running = instances.iter().filter(|instance| !is_shutting_down(instance));
    let known: BTreeSet<&str> = running.map(|instance| instance.provider_id.as_str()).collect();
    state
        .claims
        .values()
        .filter(|claim| !claim.is_deleting())
        .filter(|claim| {
            let launched = claim.true_since(conditions::LAUNCHED);
            let registered = claim.has_condition(conditions::REGISTERED);
            let id = claim.provider_id().filter(|id| !id.is_empty());
            let age = match (registered, state.node_of(claim)) {
                (true, None) => MIN_NODELESS_AGE,
                (true, Some(_)) => MIN_LAUNCH_AGE,
                (false, _) => MIN_UNREGISTERED_AGE,
            };
            launched.is_some_and(|at| at.is_older_than(age, now)) && id.map_or(registered, |id| !known.contains(id))
        })
        .filter(|claim| state.node_of(claim).is_none_or(|node| !node.is_ready()))
        .cloned()
        .collect()
}

/// Deleting Nodes of ours without claim and instance: nothing else removes our finalizer.
fn stranded(state: &ClusterState, instances: &[Instance]) -> Vec<Arc<Node>> {
    let mut known: BTreeSet<&str> = state.claims.values().filter_map(|claim| claim.provider_id()).collect();
    known.extend(instances.iter().map(|instance| instance.provider_id.as_str()));
    known.extend(state.foreign_claims.values().flatten().map(String::as_str));
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
