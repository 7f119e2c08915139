//! What the extender knows: the room of each node, its holds, and where each planned pod goes.

use std::collections::BTreeSet;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;
use stowage_model::labels;
use stowage_model::resources::Resources;
use stowage_model::time::UnixMillis;

use crate::extender;
use crate::extender::{NodeRoom, PlannedPod, View};
use crate::state::node_state::missing_daemon_requests;
use crate::state::object_ext::{NodeClaimExt, NodeExt, ObjectExt};
use crate::state::plan_record::{self, Holds};
use crate::state::tables::ClusterState;

/// The last view of one [`ClusterState`]. Nodes and plans are evaluated again only after a change that concerns them.
#[derive(Debug, Default)]
pub struct ViewCache {
    view: View,
    /// The holds of `view`.
    holds: Arc<Holds>,
    /// Revisions of [`ClusterState::node_changes`], [`ClusterState::claim_changes`] and DaemonSets that `view` is up to date with.
    revisions: (u64, u64, u64),
}

impl ViewCache {
    /// The view of a state that is known up to `as_of`.
    pub fn update(&mut self, state: &ClusterState, holds: &Arc<Holds>, as_of: UnixMillis) -> View {
        let (nodes, claims, daemons) = self.revisions;
        let changes = state.node_changes.since(nodes).zip(state.claim_changes.since(claims));
        let (mut nodes, claims): (BTreeSet<String>, BTreeSet<String>) = if let Some((nodes, claims)) = changes {
            let mut claims: BTreeSet<String> = claims.map(str::to_owned).collect();
            if !Arc::ptr_eq(&self.holds, holds) {
                claims.extend(differences(&self.holds, holds).cloned());
            }
            (nodes.map(str::to_owned).collect(), claims)
        } else {
            *self = Self::default();
            (state.nodes.keys().cloned().collect(), holds.by_claim.keys().cloned().collect())
        };
        if daemons != state.daemons.revision() {
            nodes.extend(self.view.held_nodes().map(|name| name.as_ref().to_owned()));
        }
        self.set_plans(state, holds, &claims);
        nodes.extend(claims.iter().filter_map(|claim| Some(state.node_of(state.claims.get(claim)?)?.name_any())));
        for name in nodes {
            match state.nodes.get(&name).and_then(|node| room(state, holds, &name, node)) {
                Some(room) => self.view.set_node(room),
                None => self.view.remove_node(&name),
            }
        }
        self.view.set_age(as_of, extender::DEFAULT_MAX_AGE);
        self.holds = Arc::clone(holds);
        self.revisions = (state.node_changes.revision(), state.claim_changes.revision(), state.daemons.revision());
        self.view.clone()
    }

    /// Sets the plans of the pods that these claims held, or hold now.
    fn set_plans(&mut self, state: &ClusterState, holds: &Holds, claims: &BTreeSet<String>) {
        for claim in claims {
            for pod in pods(&self.holds, claim).filter(|pod| !holds.by_pod.contains_key(*pod)) {
                self.view.remove_plan(pod);
            }
            let found = state.claims.get(claim);
            for hold in holds.by_claim.get(claim).into_iter().flatten() {
                let Some(pod) = hold.pod.as_deref() else { continue };
                let Some(found) = found else {
                    self.view.remove_plan(pod);
                    continue;
                };
                let plan = PlannedPod {
                    node: state.node_of(found).map(|node| Arc::from(node.name_any())),
                    claim: Arc::from(claim.as_str()),
                    expires_at: hold.expires_at,
                };
                self.view.set_plan(Arc::from(pod), plan);
            }
        }
    }
}

/// NodeClaims whose holds differ.
fn differences<'a>(before: &'a Holds, after: &'a Holds) -> impl Iterator<Item = &'a String> {
    let new = after.by_claim.iter().filter(|(claim, live)| before.by_claim.get(*claim) != Some(live));
    let old = before.by_claim.keys().filter(|claim| !after.by_claim.contains_key(*claim));
    new.map(|(claim, _)| claim).chain(old)
}

/// The pods that take the room of a NodeClaim.
fn pods<'a>(holds: &'a Holds, claim: &str) -> impl Iterator<Item = &'a str> {
    holds.by_claim.get(claim).into_iter().flatten().filter_map(|hold| hold.pod.as_deref())
}

/// A node of ours, or one that is being disrupted.
fn room(state: &ClusterState, holds: &Holds, name: &str, node: &Node) -> Option<NodeRoom> {
    let claim = state.claim_of(node);
    let disrupting = node.is_deleting()
        || claim.is_some_and(|claim| claim.is_leaving())
        || node.taints().any(|taint| taint.key == labels::DISRUPTED_TAINT);
    let live = claim.and_then(|claim| holds.by_claim.get(&claim.name_any()));
    if claim.is_none() && !disrupting {
        return None;
    }
    let allocatable = node
        .status
        .as_ref()
        .and_then(|status| status.allocatable.as_ref())
        .and_then(|map| Resources::from_map(map).ok())
        .unwrap_or_default();
    let daemon_reserve = live.map(|_| missing_daemon_requests(state, node)).unwrap_or_default();
    let mut free = allocatable.clone();
    if let Some(live) = live {
        // Pods that the scheduler just bound may not be visible yet: while a node has holds, only held room is offered. The
        // planner assigns the remaining room by further holds.
        free = Resources::default();
        for hold in live.iter().map(held) {
            free.add(&hold.requests);
        }
        free.add(&daemon_reserve);
    } else {
        for entry in state.pods_on(name).filter(|pod| pod.active()).filter_map(|pod| pod.entry.as_ref().ok()) {
            free.sub(&entry.class.requests);
        }
    }
    Some(NodeRoom {
        name: Arc::from(name),
        allocatable,
        free,
        daemon_reserve,
        disrupting,
        holds: live.into_iter().flatten().map(held).collect(),
    })
}

fn held(hold: &plan_record::Hold) -> extender::Hold {
    // Of a pod that is not known, a slot is held: while a node has holds, only held room is offered.
    let slot = || Resources { pods: 1, ..Resources::default() };
    let class = hold.class.as_ref();
    extender::Hold {
        pod: Arc::from(hold.pod.as_ref().unwrap_or(&hold.original).as_str()),
        owner: hold.owner.as_deref().map(Arc::from),
        displaced: hold.owner.is_some() && hold.pod.is_none(),
        requests: class.map_or_else(slot, |class| class.requests.clone()),
        priority: class.map_or(0, |class| class.priority),
        expires_at: hold.expires_at,
    }
}

#[cfg(test)]
mod tests;
