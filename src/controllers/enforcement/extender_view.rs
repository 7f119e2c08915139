//! The extender's view of holds, kept current on every replica.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use kube::ResourceExt;

use crate::api::NodeClaim;
use crate::extender;
use crate::extender::{NodeRoom, PlannedPod, View, ViewInput};
use crate::model::labels;
use crate::model::resources::Resources;
use crate::model::time::UnixMillis;
use crate::state::snapshot::{daemons_to_come, is_leaving};
use crate::state::{Cluster, ClusterState, holds, now_ms};

/// The state is looked at no more often than this.
const LOOK: Duration = Duration::from_millis(20);
/// The state is looked at at least this often.
const TICK: Duration = Duration::from_millis(500);

/// Every replica's part: keeps the extender's view current.
pub async fn show(cluster: Arc<Cluster>, view: Arc<ArcSwap<View>>) {
    let mut changes = cluster.changes();
    loop {
        let now = now_ms();
        let input = view_input(&cluster.read(), now);
        view.store(Arc::new(View::build(input)));
        let _ = tokio::time::timeout(TICK, changes.changed()).await;
        tokio::time::sleep(LOOK).await;
        changes.mark_unchanged();
    }
}

/// What the extender should know of the state.
pub fn view_input(state: &ClusterState, now: i64) -> ViewInput {
    let holds = state.holds(now);
    let mut input = ViewInput { built_at: UnixMillis(now), max_age: extender::DEFAULT_MAX_AGE, ..ViewInput::default() };
    let mut claims: HashMap<String, &Arc<NodeClaim>> = HashMap::new();
    for claim in state.claims.values() {
        if let Some(node) = state.node_of(claim) {
            claims.insert(node.name_any(), claim);
        }
    }
    for (name, node) in &state.nodes {
        let claim = claims.get(name).copied();
        let taints = || node.spec.iter().flat_map(|spec| spec.taints.iter().flatten());
        let disrupting = node.metadata.deletion_timestamp.is_some()
            || claim.is_some_and(|claim| is_leaving(claim))
            || taints().any(|taint| taint.key == labels::DISRUPTED_TAINT);
        let live = claim.and_then(|claim| holds.by_claim.get(&claim.name_any()));
        if claim.is_none() && !disrupting {
            continue;
        }
        let allocatable = node
            .status
            .as_ref()
            .and_then(|status| status.allocatable.as_ref())
            .and_then(|map| Resources::from_map(map).ok())
            .unwrap_or_default();
        let daemon_reserve = live.map(|_| daemons_to_come(state, node)).unwrap_or_default();
        let mut free = allocatable.clone();
        for pod in state.pods_on(name).filter(|pod| pod.active()) {
            if let Ok(entry) = &pod.entry {
                free.sub(&entry.class.requests);
            }
        }
        if let Some(live) = live {
            // What the scheduler has put there lately may not show yet: while room is held, only held room is given out.
            // Who is to use the rest is for the planner to say, in a hold.
            free = Resources::default();
            for hold in live.iter().filter_map(|hold| held(state, hold)) {
                free.add(&hold.requests);
            }
            free.add(&daemon_reserve);
        }
        input.nodes.push(NodeRoom {
            name: Arc::from(name.as_str()),
            allocatable,
            free,
            daemon_reserve,
            disrupting,
            holds: live.into_iter().flatten().filter_map(|hold| held(state, hold)).collect(),
        });
    }
    for (pod, claim) in &holds.by_pod {
        let Some(found) = state.claims.get(claim) else { continue };
        let until = state.planned.get(claim).map_or(0, |planned| planned.until_ms);
        input.planned.insert(
            Arc::from(pod.as_str()),
            PlannedPod {
                node: state.node_of(found).map(|node| Arc::from(node.name_any())),
                claim: Arc::from(claim.as_str()),
                expires_at: UnixMillis(until),
            },
        );
    }
    input
}

fn held(state: &ClusterState, hold: &holds::Hold) -> Option<extender::Hold> {
    let key = hold.pod.as_ref().unwrap_or(&hold.original);
    let entry = state.pods.get(key).and_then(|pod| pod.entry.as_ref().ok())?;
    Some(extender::Hold {
        pod: Arc::from(key.as_str()),
        owner: hold.owner.as_deref().map(Arc::from),
        displaced: hold.owner.is_some() && hold.pod.is_none(),
        requests: entry.class.requests.clone(),
        priority: entry.class.priority,
        expires_at: UnixMillis(hold.expires_ms),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controllers::enforcement::nominations::tests::state;

    #[test]
    fn a_planned_pod_is_shown_with_its_node_and_its_room() {
        let input = view_input(&state(None), 5);
        assert_eq!(input.planned["n/a"].node.as_deref(), Some("node-c"));
        let room = &input.nodes[0];
        assert_eq!((room.holds.len(), room.holds[0].requests.cpu.0, room.free.cpu.0), (1, 500, 500));
        let input = view_input(&state(Some("node-c")), 5);
        assert!(input.planned.is_empty() && input.nodes[0].holds.is_empty());
        assert_eq!(input.nodes[0].free.cpu.0, 1_500, "a bound pod takes its room");
    }
}
