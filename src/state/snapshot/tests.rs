use std::collections::BTreeMap;

use serde_json::{Value, json};
use stowage_model::offering::{CapacityType, Catalog, InstanceType, Offering};
use stowage_model::resources::Resources;
use stowage_model::units::{Bytes, MicroUsd, Millicores};
use stowage_planner::{ColumnCache, Tenure};
use stowage_test_objects as objects;

use super::*;

fn read<T: serde::de::DeserializeOwned>(object: &Value) -> T {
    serde_json::from_value(object.clone()).unwrap()
}

/// A pool `p` that may launch `x2`, `x4` and `x8`, named by their number of vCPUs.
fn pools() -> Vec<ReadyPool> {
    let instance_type = |cpus: i64| {
        let capacity = Resources {
            cpu: Millicores::from_cores(cpus),
            memory: Bytes::from_gib(cpus),
            pods: 50,
            ..Resources::default()
        };
        Arc::new(InstanceType {
            name: format!("x{cpus}").into(),
            labels: BTreeMap::new(),
            allocatable: capacity.clone(),
            capacity,
            volume_limits: BTreeMap::new(),
            offerings: vec![Offering {
                zone: "z".into(),
                capacity_type: CapacityType::OnDemand,
                price: MicroUsd(cpus),
                available: true,
                left: None,
                labels: Arc::default(),
                risk_permille: 0,
            }],
        })
    };
    let catalog = Catalog { region: "r".into(), instance_types: [2, 4, 8].map(instance_type).into() };
    let limits = json!({"cpu": "16", (labels::USD_PER_HOUR): "1"});
    let pool = objects::node_pool("p", &json!({"spec": {"limits": limits}}));
    vec![ReadyPool { pool: Arc::new(pool), catalog: Arc::new(catalog) }]
}

/// A claim planned as `x2` that may be launched as any of `types`.
fn claim(name: &str, types: &[&str]) -> Value {
    let metadata =
        json!({"labels": {(labels::NODE_POOL): "p"}, "annotations": {(labels::PLANNED_OFFERING): "x2/z/on-demand"}});
    let requirements = json!([{"key": labels::INSTANCE_TYPE, "operator": "In", "values": types}]);
    json!(objects::claim(name, &json!({"metadata": metadata, "spec": {"requirements": requirements}})))
}

fn node(name: &str) -> Value {
    json!({"metadata": {"name": name, "uid": name, "labels": {(labels::INITIALIZED): "true"}},
        "spec": {"providerID": format!("aws:///z/{name}")},
        "status": {"allocatable": {"cpu": "4", "memory": "8Gi", "pods": "20"},
            "conditions": [{"type": "Ready", "status": "True"}]}})
}

fn pod(name: &str, node: Option<&str>, extra: &Value) -> Value {
    let mut spec = json!({"nodeName": node, "containers": [
        {"name": "c", "image": "i", "resources": {"requests": {"cpu": "1"}}}]});
    spec.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    let owner = json!({"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "r", "controller": true});
    json!({"metadata": {"name": name, "namespace": "n", "uid": name, "ownerReferences": [owner]}, "spec": spec})
}

/// A snapshot without holds and demand.
fn snapshot(state: &ClusterState) -> Snapshot {
    let (pools, settings) = (pools(), PlanSettings::default());
    let request = SnapshotRequest { pools: &pools, settings: &settings, now: UnixMillis(1_000) };
    take(state, &Holds::default(), Demand::default(), &mut SnapshotCache::default(), request)
}

#[test]
fn before_its_launch_a_claim_counts_as_its_largest_alternative_against_limits() {
    let used = |state: &ClusterState| {
        let usage = &snapshot(state).problem.pools[0].usage;
        // The price of x2 is 2 micro-USD.
        (usage.cpu.0, usage.get(labels::USD_PER_HOUR))
    };
    let mut state = ClusterState::default();
    let mut object = claim("c", &["x2", "x4", "x8"]);
    state.apply_claim(read(&object));
    assert_eq!(used(&state), (8_000, 8), "planned as x2, but may be launched as x8");
    for (key, value) in [(labels::INSTANCE_TYPE, "x4"), (labels::ZONE, "z"), (labels::CAPACITY_TYPE, "on-demand")] {
        object["metadata"]["labels"][key] = json!(value);
    }
    state.apply_claim(read(&object));
    assert_eq!(used(&state), (4_000, 4), "launched");
    object["status"] = json!({"providerID": "aws:///z/i", "capacity": {"cpu": "3900m"}});
    state.apply_claim(read(&object));
    assert_eq!(used(&state), (3_900, 4), "as reported");
}

#[test]
fn a_claim_counts_as_the_highest_price_that_it_may_be_launched_for() {
    let used = |change: Value| {
        let mut object = claim("c", &["x2", "x4", "x8"]);
        json_patch::merge(&mut object, &change);
        let mut state = ClusterState::default();
        state.apply_claim(read(&object));
        snapshot(&state).problem.pools[0].usage.get(labels::USD_PER_HOUR)
    };
    let annotated = |key: &str, value: &str| json!({"metadata": {"annotations": {key: value}}});
    assert_eq!(used(annotated(labels::MAX_PRICE, "0.000005")), 4, "no more than its maximum price");
    let gone = json!({"metadata": {"labels": {(labels::INSTANCE_TYPE): "x3", (labels::ZONE): "z", (labels::CAPACITY_TYPE): "on-demand"}}});
    assert_eq!(used(gone.clone()), 0, "of a type that is not offered any more");
    let mut with_price = gone;
    json_patch::merge(&mut with_price, &annotated(labels::USD_PER_HOUR, "0.25"));
    assert_eq!(used(with_price), 250_000, "as it was launched for");
    assert_eq!(used(json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}})), 0, "leaving");
    let reported =
        json!({"status": {"providerID": "aws:///z/i", "capacity": {"cpu": "2", (labels::USD_PER_HOUR): "9"}}});
    assert_eq!(used(reported), 8, "what a kubelet reports is no price");
}

#[test]
fn snapshots_share_the_column_cache() {
    let mut state = ClusterState::default();
    let (pools, settings) = (pools(), PlanSettings::default());
    let mut cache = SnapshotCache::default();
    let mut next = |state: &ClusterState| {
        let request = SnapshotRequest { pools: &pools, settings: &settings, now: UnixMillis(1_000) };
        take(state, &Holds::default(), Demand::default(), &mut cache, request).column_cache
    };
    let first = next(&state);
    state.apply_node(read(&node("n")));
    assert!(next(&state) == first);
    assert!(ColumnCache::default() != first);
}

#[test]
fn a_terminating_pod_keeps_its_room_and_is_flagged_as_deleting() {
    let mut state = ClusterState::default();
    state.apply_node(read(&node("n")));
    let mut object = pod("web", Some("n"), &json!({}));
    state.apply_pod(&read(&object), UnixMillis(1));
    let pods = |state: &ClusterState| {
        let now = snapshot(state);
        let pods = &now.problem.nodes[0].pods;
        (pods.iter().map(|pod| pod.deleting).collect::<Vec<_>>(), pods.requests().cpu.0)
    };
    assert_eq!(pods(&state), (vec![false], 1_000));
    object["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
    state.apply_pod(&read(&object), UnixMillis(2));
    assert_eq!(pods(&state), (vec![true], 1_000));
}

#[test]
fn a_node_reserves_the_host_ports_of_its_daemons_until_their_pods_exist() {
    let mut state = ClusterState::default();
    let ports = json!([{"name": "c", "image": "i", "ports": [{"containerPort": 80, "hostPort": 80}]}]);
    let set = json!({"metadata": {"name": "d", "namespace": "n", "uid": "d"},
        "spec": {"selector": {}, "template": {"spec": {"containers": ports}}}});
    state.apply_daemon_set(&read(&set));
    state.apply_claim(read(&claim("c", &["x2"])));
    let reserved =
        |state: &ClusterState| snapshot(state).problem.nodes.iter().map(|node| node.daemons.len()).collect::<Vec<_>>();
    assert_eq!(reserved(&state), [1]);
    state.apply_node(read(&node("n")));
    let mut object = claim("c", &["x2"]);
    object["status"] = json!({"providerID": "aws:///z/n"});
    state.apply_claim(read(&object));
    assert_eq!(reserved(&state), [1], "the node registered, its DaemonSet pod does not exist");
    let mut daemons = pod("d-1", Some("n"), &json!({"containers": ports}));
    daemons["metadata"]["ownerReferences"][0] =
        json!({"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "d", "uid": "d", "controller": true});
    let mut copy = daemons.clone();
    copy["metadata"]["namespace"] = json!("attacker");
    state.apply_pod(&read(&copy), UnixMillis(1));
    assert_eq!(reserved(&state), [1], "a pod with a copied UID in another namespace");
    state.apply_pod(&read(&daemons), UnixMillis(1));
    assert_eq!(reserved(&state), [0]);
}

#[test]
fn f20_a_node_is_filled_by_whether_it_may_be_removed() {
    let protects = json!({(labels::DO_NOT_DISRUPT): "true"});
    let none = json!({});
    for (case, owned, on_node, on_pod, expected) in [
        ("may be removed", true, &none, &none, Tenure::MayBeRemoved),
        ("protected", true, &protects, &none, Tenure::Stays),
        ("protected by its pod", true, &none, &protects, Tenure::Stays),
        ("not ours", false, &protects, &none, Tenure::NotOurs),
    ] {
        let mut state = ClusterState::default();
        if owned {
            state.apply_claim(objects::claim("c", &json!({"status": objects::launched("n", &[])})));
        }
        let mut object = node("n");
        object["metadata"]["annotations"] = on_node.clone();
        state.apply_node(read(&object));
        let mut object = pod("a", Some("n"), &json!({}));
        object["metadata"]["annotations"] = on_pod.clone();
        state.apply_pod(&read(&object), UnixMillis(1));
        assert_eq!(snapshot(&state).problem.nodes[0].tenure, expected, "{case}");
    }
}
