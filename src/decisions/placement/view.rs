//! What the extender knows: the room of each node, its holds, and where each planned pod goes.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;

use crate::extender;
use crate::extender::{NodeRoom, PlannedPod, ViewInput};
use crate::model::labels;
use crate::model::resources::Resources;
use crate::model::time::UnixMillis;
use crate::state::node_state::missing_daemon_requests;
use crate::state::object_ext::{NodeClaimExt, NodeExt, ObjectExt};
use crate::state::plan_record::{self, Holds};
use crate::state::tables::ClusterState;

/// The nodes of the last view of one [`ClusterState`]: a node is evaluated again only when it changed, or while it has holds.
#[derive(Debug, Default)]
pub struct ViewCache {
    rooms: BTreeMap<String, NodeRoom>,
    /// Nodes that had holds in the last view.
    held: BTreeSet<String>,
    /// Revision of [`ClusterState::node_changes`] that `rooms` is up to date with.
    revision: u64,
}

impl ViewCache {
    /// The content of the view of a state that is known up to `as_of`.
    pub fn input(&mut self, state: &ClusterState, holds: &Holds, as_of: UnixMillis) -> ViewInput {
        let mut rebuild = std::mem::take(&mut self.held);
        if let Some(changes) = state.node_changes.since(self.revision) {
            rebuild.extend(changes.map(str::to_owned));
        } else {
            self.rooms.clear();
            rebuild = state.nodes.keys().cloned().collect();
        }
        self.revision = state.node_changes.revision();
        let held = holds.by_claim.keys().filter_map(|claim| state.node_of(state.claims.get(claim)?));
        self.held = held.map(|node| node.name_any()).collect();
        rebuild.extend(self.held.iter().cloned());
        for name in rebuild {
            match state.nodes.get(&name).and_then(|node| room(state, holds, &name, node)) {
                Some(room) => drop(self.rooms.insert(name, room)),
                None => drop(self.rooms.remove(&name)),
            }
        }
        let nodes = self.rooms.values().cloned().collect();
        ViewInput { as_of, max_age: extender::DEFAULT_MAX_AGE, nodes, planned: planned(state, holds) }
    }
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
        for hold in live.iter().filter_map(|hold| held(state, hold)) {
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
        holds: live.into_iter().flatten().filter_map(|hold| held(state, hold)).collect(),
    })
}

fn planned(state: &ClusterState, holds: &Holds) -> BTreeMap<Arc<str>, PlannedPod> {
    let planned = holds.by_pod.iter().filter_map(|(pod, claim)| {
        let found = state.claims.get(claim)?;
        let plan = PlannedPod {
            node: state.node_of(found).map(|node| Arc::from(node.name_any())),
            claim: Arc::from(claim.as_str()),
            expires_at: state.planned.get(claim).map(|plan| plan.hold_until).unwrap_or_default(),
        };
        Some((Arc::from(pod.as_str()), plan))
    });
    planned.collect()
}

fn held(state: &ClusterState, hold: &plan_record::Hold) -> Option<extender::Hold> {
    let key = hold.pod.as_ref().unwrap_or(&hold.original);
    let entry = state.pods.get(key).and_then(|pod| pod.entry.as_ref().ok())?;
    Some(extender::Hold {
        pod: Arc::from(key.as_str()),
        owner: hold.owner.as_deref().map(Arc::from),
        displaced: hold.owner.is_some() && hold.pod.is_none(),
        requests: entry.class.requests.clone(),
        priority: entry.class.priority,
        expires_at: hold.expires_at,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decisions::holds::resolve;
    use crate::test_support::state_with_planned_pod;

    fn view_of(bound: Option<&str>) -> ViewInput {
        let (state, now) = (state_with_planned_pod(bound), UnixMillis(5));
        ViewCache::default().input(&state, &resolve(&state, now), now)
    }

    #[test]
    fn a_planned_pod_is_in_the_view_with_its_node_and_hold() {
        let input = view_of(None);
        assert_eq!(input.as_of, UnixMillis(5));
        assert_eq!(input.planned["n/a"].node.as_deref(), Some("node-c"));
        let room = &input.nodes[0];
        assert_eq!((room.holds.len(), room.holds[0].requests.cpu.0, room.free.cpu.0), (1, 500, 500));
        let input = view_of(Some("node-c"));
        assert!(input.planned.is_empty() && input.nodes[0].holds.is_empty());
        assert_eq!(input.nodes[0].free.cpu.0, 1_500, "a bound pod takes its room");
    }
}
