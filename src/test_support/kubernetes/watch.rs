//! A watch without delay: applies changes of stored objects to the watched state.

use std::sync::Arc;

use serde::de::DeserializeOwned;
use serde_json::Value;
use stowage_model::time::UnixMillis;

use crate::state::ClusterState;
use crate::test_support::kubernetes::object_store::Key;

/// Applies an object to the state, as a watch does.
pub fn apply(state: &mut ClusterState, key: &Key, object: Value) {
    fn parsed<K: DeserializeOwned>(object: Value) -> K {
        serde_json::from_value(object).unwrap()
    }
    let name = key.name.clone();
    match key.resource.as_str() {
        "nodeclaims" => state.apply_claim(parsed(object)),
        "nodes" => state.apply_node(parsed(object)),
        "pods" => state.apply_pod(&parsed(object), UnixMillis(0)),
        "poddisruptionbudgets" => state.pod_budgets.apply(&parsed(object)),
        "nodepools" => drop(state.pools.insert(name, Arc::new(parsed(object)))),
        "ec2nodeclasses" => drop(state.classes.insert(name, Arc::new(parsed(object)))),
        _ => {}
    }
}

/// Removes an object from the state, as a watch does.
pub fn remove(state: &mut ClusterState, key: &Key) {
    match key.resource.as_str() {
        "nodeclaims" => state.delete_claim(&key.name),
        "nodes" => state.delete_node(&key.name),
        "pods" => state.delete_pod(&format!("{}/{}", key.namespace, key.name), UnixMillis(0)),
        "poddisruptionbudgets" => state.pod_budgets.delete(&format!("{}/{}", key.namespace, key.name)),
        "nodepools" => drop(state.pools.remove(&key.name)),
        "ec2nodeclasses" => drop(state.classes.remove(&key.name)),
        _ => {}
    }
}
