//! What the cloud learns from the cluster: how node classes and NodePools are now, and what a Node shows of its instance type, once
//! it is registered and again after a restart.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;

use crate::api::{Ec2NodeClass, NodeClaim, NodePool};
use crate::controllers::context::Context;
use crate::model::labels;
use crate::state::ClusterState;

/// The state is looked at no more often than this.
const LOOK: Duration = Duration::from_secs(1);

/// Registered Nodes of ours that are not `told` of yet, with their claims. They are then, by UID; those that are gone are not.
fn untold(state: &ClusterState, told: &mut HashSet<String>) -> Vec<(Arc<NodeClaim>, Arc<Node>)> {
    let registered = |node: &&Arc<Node>| node.labels().get(labels::REGISTERED).is_some_and(|value| value == "true");
    let mut seen = HashSet::with_capacity(told.len());
    let mut due = Vec::new();
    for claim in state.claims.values() {
        let Some(node) = state.node_of(claim).filter(registered) else { continue };
        let uid = node.uid().unwrap_or_default();
        if !told.contains(&uid) {
            due.push((Arc::clone(claim), Arc::clone(node)));
        }
        seen.insert(uid);
    }
    *told = seen;
    due
}

/// Runs until the process ends.
pub async fn run(ctx: Arc<Context>) {
    let Some(observer) = ctx.cloud.capabilities().cluster_observer else { return std::future::pending().await };
    let mut changes = ctx.cluster.changes();
    let mut told = HashSet::new();
    loop {
        let (due, classes, pools) = {
            let state = ctx.cluster.read();
            let classes: Vec<Arc<Ec2NodeClass>> = state.classes.values().cloned().collect();
            let pools: Vec<Arc<NodePool>> = state.pools.values().cloned().collect();
            (untold(&state, &mut told), classes, pools)
        };
        observer.observe(&classes, &pools);
        for (claim, node) in due {
            observer.registered(&claim, &node);
        }
        let _ = changes.changed().await;
        tokio::time::sleep(LOOK).await;
        changes.mark_unchanged();
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::test_support::objects;

    fn claim(id: &str) -> NodeClaim {
        objects::claim(id, &json!({"status": objects::launched(id, &[])}))
    }

    fn node(id: &str, uid: &str, registered: Option<&str>) -> Node {
        let meta = json!({"uid": uid, "labels": {(labels::REGISTERED): registered}});
        objects::node(&format!("n-{id}"), &json!({"metadata": meta, "spec": {"providerID": format!("aws:///z/{id}")}}))
    }

    #[test]
    fn each_registered_node_of_ours_is_told_once() {
        let mut state = ClusterState::default();
        for id in ["i-1", "i-2", "i-3", "i-4"] {
            state.apply_claim(claim(id));
        }
        state.apply_node(node("i-1", "u1", Some("true")));
        state.apply_node(node("i-2", "u2", None));
        state.apply_node(node("i-3", "u3", Some("false")));
        state.apply_node(node("i-9", "u9", Some("true")));
        let mut told = HashSet::new();
        let mut look = |state: &ClusterState| {
            untold(state, &mut told).iter().map(|(claim, node)| (claim.name_any(), node.name_any())).collect::<Vec<_>>()
        };
        let pair = |id: &str| (id.to_owned(), format!("n-{id}"));
        assert_eq!(look(&state), [pair("i-1")], "at the start; others are not registered, or nobody's");
        assert_eq!(look(&state), []);
        state.apply_node(node("i-2", "u2", Some("true")));
        assert_eq!(look(&state), [pair("i-2")], "it registered");
        state.apply_node(node("i-1", "u1-again", Some("true")));
        assert_eq!(look(&state), [pair("i-1")], "another Node of that name");
        assert_eq!(look(&state), []);
    }
}
