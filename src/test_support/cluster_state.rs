//! Cluster states.

use serde_json::json;
use stowage_model::labels;
use stowage_model::time::UnixMillis;
use stowage_test_objects as objects;

use crate::state::ClusterState;

/// NodeClaim `c` with its Node `node-c`, and the pod `n/a` planned there, which is unbound or bound to another Node.
pub(crate) fn state_with_planned_pod(bound: Option<&str>) -> ClusterState {
    let mut state = ClusterState::default();
    let plan = json!({(labels::PLANNED_PODS): "[\"n/a\"]", (labels::HOLD_UNTIL): "2099-01-01T00:00:00Z"});
    let patch = json!({"metadata": {"annotations": plan}, "status": objects::launched("i-1", &[])});
    state.apply_claim(objects::claim("c", &patch));
    state.apply_node(
        serde_json::from_value(json!({"metadata": {"name": "node-c"}, "spec": {"providerID": "aws:///z/i-1"},
            "status": {"allocatable": {"cpu": "2", "memory": "4Gi", "pods": "10"}}}))
        .unwrap(),
    );
    let pod = json!({"metadata": {"name": "a", "namespace": "n", "uid": "a"}, "spec": {"nodeName": bound,
        "containers": [{"name": "c", "image": "i", "resources": {"requests": {"cpu": "500m"}}}]}});
    state.apply_pod(&serde_json::from_value(pod).unwrap(), UnixMillis(1));
    state
}
