//! Reports the cluster to the cloud: node classes, NodePools, and each Node of ours once after its registration. A restart reports
//! every Node again.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;
use stowage_api::{Ec2NodeClass, NodeClaim, NodePool};
use stowage_model::labels;
use stowage_runtime::sync::heartbeat;

use crate::controllers::context::Context;
use crate::controllers::run_loop::{Pace, RunLoop};
use crate::state::ClusterState;
use crate::state::object_ext::ObjectExt;

const PACE: Pace = Pace { debounce: Duration::from_secs(1), resync: Duration::MAX };

/// Registered Nodes with claims whose UID is not in `reported`. Afterwards `reported` holds the UIDs of all registered Nodes.
fn unreported(state: &ClusterState, reported: &mut HashSet<String>) -> Vec<(Arc<NodeClaim>, Arc<Node>)> {
    let mut registered = HashSet::with_capacity(reported.len());
    let mut new = Vec::new();
    for claim in state.claims.values() {
        let Some(node) = state.node_of(claim).filter(|node| node.is_labeled(labels::REGISTERED)) else { continue };
        let uid = node.uid().unwrap_or_default();
        if !reported.contains(&uid) {
            new.push((Arc::clone(claim), Arc::clone(node)));
        }
        registered.insert(uid);
    }
    *reported = registered;
    new
}

/// Runs until the process ends. Does nothing when the cloud does not observe the cluster.
pub async fn run(ctx: Arc<Context>) {
    let Some(observer) = ctx.cloud.capabilities().cluster_observer else { return heartbeat::rest_forever().await };
    let mut run_loop = RunLoop::new(&ctx.cluster, PACE);
    let mut reported = HashSet::new();
    loop {
        let (new, classes, pools) = {
            let state = ctx.cluster.read();
            let classes: Vec<Arc<Ec2NodeClass>> = state.classes.values().cloned().collect();
            let pools: Vec<Arc<NodePool>> = state.pools.values().cloned().collect();
            (unreported(&state, &mut reported), classes, pools)
        };
        observer.observe(&classes, &pools);
        for (claim, node) in new {
            observer.registered(&claim, &node);
        }
        run_loop.next().await;
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use stowage_test_objects as objects;

    use super::*;

    fn claim(id: &str) -> NodeClaim {
        objects::claim(id, &json!({"status": objects::launched(id, &[])}))
    }

    fn node(id: &str, uid: &str, registered: Option<&str>) -> Node {
        let meta = json!({"uid": uid, "labels": {(labels::REGISTERED): registered}});
        objects::node(&format!("n-{id}"), &json!({"metadata": meta, "spec": {"providerID": format!("aws:///z/{id}")}}))
    }

    #[test]
    fn each_registered_node_of_ours_is_reported_once() {
        let mut state = ClusterState::default();
        for id in ["i-1", "i-2", "i-3", "i-4"] {
            state.apply_claim(claim(id));
        }
        state.apply_node(node("i-1", "u1", Some("true")));
        state.apply_node(node("i-2", "u2", None));
        state.apply_node(node("i-3", "u3", Some("false")));
        state.apply_node(node("i-9", "u9", Some("true")));
        let mut reported = HashSet::new();
        let mut new = |state: &ClusterState| {
            unreported(state, &mut reported)
                .iter()
                .map(|(claim, node)| (claim.name_any(), node.name_any()))
                .collect::<Vec<_>>()
        };
        let pair = |id: &str| (id.to_owned(), format!("n-{id}"));
        assert_eq!(new(&state), [pair("i-1")], "the others are not registered, or not ours");
        assert_eq!(new(&state), []);
        state.apply_node(node("i-2", "u2", Some("true")));
        assert_eq!(new(&state), [pair("i-2")], "registered");
        state.apply_node(node("i-1", "u1-again", Some("true")));
        assert_eq!(new(&state), [pair("i-1")], "another Node with the same name");
        assert_eq!(new(&state), []);
    }
}
