//! A cluster on the fake API server whose nodes may be consolidated or replaced at once.

use std::sync::Arc;

use serde_json::{Value, json};
use stowage_model::labels;
use stowage_model::offering::Catalog;
use stowage_test_objects::{
    catalog, claim, conditions_true, instance_type, launched, node, node_class, node_pool, offering, pod,
};

use crate::test_support::failures::World;
use crate::test_support::kubernetes::FakeApi;
use crate::test_support::scripted_cloud::FakeCloud;

fn two_types() -> Catalog {
    let mut catalog = catalog();
    let resources = [("cpu", "16"), ("memory", "64Gi"), ("pods", "110")];
    catalog.instance_types.push(Arc::new(instance_type("m5.4xlarge", &resources, vec![offering("z", 768_000)])));
    catalog
}

/// The label that the pods of a NodePool select.
const TEAM: &str = "team";

/// NodePools that consolidate at once, within this budget.
pub(crate) fn world(pools: &[&str], budget: &str) -> World {
    let api = FakeApi::default();
    let ready = json!({"conditions": conditions_true(&["Ready"])});
    api.put(&node_class("default", &json!({"status": ready})));
    for pool in pools {
        let disruption = json!({"consolidateAfter": "0s", "budgets": [{"nodes": budget}]});
        let template = json!({"metadata": {"labels": {TEAM: pool}}});
        api.put(&node_pool(pool, &json!({"spec": {"template": template, "disruption": disruption}, "status": ready})));
    }
    let world = World::new(api).with_cloud(FakeCloud { catalog: Arc::new(two_types()), ..FakeCloud::default() });
    World { watched: true, ..world }
}

/// Adds an m5.large node, its claim of the same name, and a pod with this CPU request on it, for its NodePool only.
pub(crate) fn add(world: &World, name: &str, pool: &str, condition: Option<&str>, cpu: &str) {
    add_of_type(world, name, pool, condition, cpu, ("m5.large", "2"));
}

/// Adds a node of this size without a NodeClaim, as of another node group. Pods for the NodePool `p` fit on it.
pub(crate) fn add_of_others(world: &World, name: &str, cpus: &str) {
    let labels = json!({TEAM: "p", (labels::ZONE): "z", (labels::HOSTNAME): name});
    let meta = json!({"labels": labels, "creationTimestamp": "2026-01-01T00:00:00Z"});
    put_node(world, name, &meta, &json!({"cpu": cpus, "memory": "8Gi", "pods": "29"}));
}

fn put_node(world: &World, name: &str, meta: &Value, size: &Value) {
    let ready = json!({"capacity": size, "allocatable": size, "conditions": [{"type": "Ready", "status": "True"}]});
    let mut meta = meta.clone();
    meta["uid"] = json!(format!("node-{name}"));
    let spec = json!({"providerID": format!("aws:///z/{name}")});
    world.api.put(&node(name, &json!({"metadata": meta, "spec": spec, "status": ready})));
}

/// The same of another type, with this number of CPUs.
pub(crate) fn add_of_type(
    world: &World,
    name: &str,
    pool: &str,
    condition: Option<&str>,
    cpu: &str,
    (instance_type, cpus): (&str, &str),
) {
    let size = json!({"cpu": cpus, "memory": "8Gi", "pods": "29"});
    let labels = json!({(labels::NODE_POOL): pool, (labels::INSTANCE_TYPE): instance_type, (labels::ZONE): "z",
        (labels::CAPACITY_TYPE): "on-demand", (labels::INITIALIZED): "true", (labels::HOSTNAME): name,
        (labels::ARCH): "amd64", (labels::OS): "linux", TEAM: pool});
    let meta = json!({"labels": labels, "creationTimestamp": "2026-01-01T00:00:00Z"});
    let mut status = launched(name, &["Launched", "Registered", "Initialized"]);
    if let Some(condition) = condition {
        status["conditions"].as_array_mut().unwrap().push(conditions_true(&[condition])[0].clone());
    }
    status["capacity"] = size.clone();
    world.api.put(&claim(name, &json!({"metadata": meta, "spec": {"expireAfter": "Never"}, "status": status})));
    put_node(world, name, &meta, &size);
    let owner = json!({"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "r", "controller": true});
    let container = json!({"name": "c", "resources": {"requests": {"cpu": cpu}}});
    let meta = json!({"creationTimestamp": "2026-01-01T00:00:00Z", "ownerReferences": [owner]});
    let spec = json!({"nodeName": name, "nodeSelector": {TEAM: pool}, "containers": [container]});
    world.api.put(&pod(&format!("on-{name}"), &json!({"metadata": meta, "spec": spec})));
}
