//! Which Node and NodeClaim belong together: those with the same provider id.

use std::collections::BTreeSet;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;
use stowage_api::NodeClaim;
use stowage_model::time::UnixMillis;

use crate::state::object_ext::{NodeClaimExt, NodeExt, ObjectExt};
use crate::state::tables::ClusterState;

impl ClusterState {
    /// The NodeClaim of a Node.
    pub fn claim_of(&self, node: &Node) -> Option<&Arc<NodeClaim>> {
        let id = node.provider_id()?;
        self.node_by_provider_id.get(id).filter(|name| Some(name.as_str()) == node.metadata.name.as_deref())?;
        self.claims.get(self.claim_index.of_provider_id(id)?)
    }

    /// The Node of a NodeClaim, once one has registered with its provider id.
    pub fn node_of(&self, claim: &NodeClaim) -> Option<&Arc<Node>> {
        let id = claim.provider_id()?;
        self.nodes.get(self.node_by_provider_id.get(id)?)
    }

    /// Names of the Nodes that have the provider id of a NodeClaim besides its own Node.
    pub fn duplicate_nodes(&self, claim: &NodeClaim) -> Option<&BTreeSet<String>> {
        self.duplicate_nodes.get(claim.provider_id()?)
    }

    /// Updates the index of claims without a Node after a change of a claim or of its Node.
    pub(super) fn relink(&mut self, claim: &str) {
        self.claim_changes.record(claim);
        self.record_holds_of(claim);
        let Some(known) = self.claims.get(claim) else {
            self.in_flight.remove(claim);
            return;
        };
        if let Some(node) = self.node_of(known).map(|node| node.name_any()) {
            self.node_changes.record(&node);
            self.in_flight.remove(claim);
        } else {
            self.in_flight.insert(claim.to_owned());
        }
    }

    /// Relinks the NodeClaims of this provider id: more than one only by mistake.
    pub(super) fn relink_by_id(&mut self, id: Option<&str>) {
        let claims = id.map(|id| self.claim_index.all_of_provider_id(id).cloned().collect::<Vec<_>>());
        for claim in claims.unwrap_or_default() {
            self.relink(&claim);
        }
    }

    /// Gives a provider id that several Nodes have to one of them: the Node that its NodeClaim registered, or else the oldest.
    pub(super) fn choose_node(&mut self, id: &str) {
        let Some(mut names) = self.duplicate_nodes.remove(id) else { return };
        names.extend(self.node_by_provider_id.remove(id));
        let claim = self.claim_index.of_provider_id(id).and_then(|claim| self.claims.get(claim));
        let registered = claim.and_then(|claim| claim.status.as_ref()?.node_name.as_deref());
        let age = |name: &&String| {
            let created = self.nodes.get(*name).map(|node| node.created_at());
            (registered != Some(name.as_str()), created.unwrap_or(UnixMillis::MAX), (*name).clone())
        };
        if let Some(first) = names.iter().min_by_key(age).cloned() {
            names.remove(&first);
            self.node_changes.record(&first);
            for name in &names {
                self.node_changes.record(name);
            }
            self.node_by_provider_id.insert(id.to_owned(), first);
        }
        if !names.is_empty() {
            self.duplicate_nodes.insert(id.to_owned(), names);
        }
    }
}
