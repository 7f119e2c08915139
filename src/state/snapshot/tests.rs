use serde_json::{Value, json};

use super::*;
use crate::model::offering::Offering;
use crate::model::units::{Bytes, Millicores};
use crate::test_support::objects;

fn read<T: serde::de::DeserializeOwned>(object: &Value) -> T {
    serde_json::from_value(object.clone()).unwrap()
}

/// A pool `p` that may buy `x2`, `x4` and `x8`, of as many vCPUs.
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
    let pool = objects::node_pool("p", &json!({"spec": {"limits": {"cpu": "16"}}}));
    vec![ReadyPool { pool: Arc::new(pool), catalog: Arc::new(catalog) }]
}

/// A claim that was planned as `x2` and may become any of `types`.
fn claim(name: &str, types: &[&str]) -> Value {
    let annotations = json!({(labels::PLANNED_OFFERING): "x2/z/on-demand"});
    let requirements = json!([{"key": labels::INSTANCE_TYPE, "operator": "In", "values": types}]);
    let meta = json!({"labels": {(labels::NODE_POOL): "p"}, "annotations": annotations});
    json!(objects::claim(name, &json!({"metadata": meta, "spec": {"requirements": requirements}})))
}

fn node(name: &str) -> Value {
    let room = json!({"cpu": "4", "memory": "8Gi", "pods": "20"});
    let status = json!({"allocatable": room, "conditions": [{"type": "Ready", "status": "True"}]});
    let spec = json!({"providerID": format!("aws:///z/{name}")});
    let own = json!({(labels::INITIALIZED): "true"});
    json!(objects::node(name, &json!({"metadata": {"labels": own}, "spec": spec, "status": status})))
}

fn pod(name: &str, node: Option<&str>, extra: &Value) -> Value {
    let container = json!({"name": "c", "image": "i", "resources": {"requests": {"cpu": "1"}}});
    let mut spec = json!({"nodeName": node, "containers": [container]});
    json_patch::merge(&mut spec, extra);
    let owner = json!({"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "r", "controller": true});
    json!(objects::pod(name, &json!({"metadata": {"ownerReferences": [owner]}, "spec": spec})))
}

fn look(state: &ClusterState, without: &[&str]) -> Snapshot {
    let without = without.iter().map(|name| (*name).to_owned()).collect();
    take(state, &pools(), &Settings::default(), &without, 1_000)
}

#[test]
fn a_claim_counts_against_limits_as_the_largest_it_may_become_until_it_is_what_it_is() {
    let used = |state: &ClusterState| look(state, &[]).problem.pools[0].usage.cpu.0;
    let mut state = ClusterState::default();
    let mut object = claim("c", &["x2", "x4", "x8"]);
    state.apply_claim(read(&object));
    assert_eq!(used(&state), 8_000, "planned as x2, but it may be launched as x8");
    assert_eq!(look(&state, &["c"]).problem.pools[0].usage.cpu.0, 0, "and as much is free without it");
    for (key, value) in [(labels::INSTANCE_TYPE, "x4"), (labels::ZONE, "z"), (labels::CAPACITY_TYPE, "on-demand")] {
        object["metadata"]["labels"][key] = json!(value);
    }
    state.apply_claim(read(&object));
    assert_eq!(used(&state), 4_000, "launched");
    object["status"] = json!({"providerID": "aws:///z/i", "capacity": {"cpu": "3900m"}});
    state.apply_claim(read(&object));
    assert_eq!(used(&state), 3_900, "as it reports");
}

#[test]
fn b41_the_pods_of_a_node_being_deleted_need_another_place() {
    let mut state = ClusterState::default();
    for name in ["stays", "goes"] {
        state.apply_node(read(&node(name)));
        let mut object = claim(name, &["x4"]);
        object["status"] = json!({"providerID": format!("aws:///z/{name}"), "capacity": {"cpu": "4"}});
        if name == "goes" {
            object["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
            object["metadata"]["finalizers"] = json!(["f"]);
        }
        state.apply_claim(read(&object));
    }
    let on_goes = |name, extra: &Value| pod(name, Some("goes"), extra);
    let mut daemons = on_goes("daemons", &json!({}));
    daemons["metadata"]["ownerReferences"][0]["kind"] = json!("DaemonSet");
    let mut bare = on_goes("bare", &json!({}));
    bare["metadata"]["ownerReferences"] = json!([]);
    let mut done = on_goes("done", &json!({}));
    done["status"] = json!({"phase": "Succeeded"});
    let mut ending = on_goes("ending", &json!({}));
    ending["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
    for object in [on_goes("web", &json!({})), pod("other", Some("stays"), &json!({})), daemons, bare, done, ending] {
        state.apply_pod(&read(&object), 1);
    }
    let displaced = BTreeSet::from(["n/web".to_owned()]);
    assert_eq!(demand(&state, &state.holds(1_000), &BTreeSet::new()).displaced, displaced);
    let now = look(&state, &[]);
    assert_eq!((&now.displaced, now.problem.pods.len()), (&displaced, 1));
    let nodes: Vec<&str> = now.problem.nodes.iter().map(|node| &*node.name).collect();
    assert_eq!(nodes, ["stays"], "what goes is gone already");
    assert_eq!(now.problem.pools[0].usage.cpu.0, 4_000, "and is none of its pool's usage");
    assert_eq!(look(&state, &["stays"]).displaced.len(), 2, "as if it were deleted too");
}

#[test]
fn a_pod_that_begins_to_end_keeps_its_room_on_its_node_and_is_marked() {
    let mut state = ClusterState::default();
    state.apply_node(read(&node("n")));
    let mut object = pod("web", Some("n"), &json!({}));
    state.apply_pod(&read(&object), 1);
    let seen = |state: &ClusterState| {
        let now = look(state, &[]);
        let pods = &now.problem.nodes[0].pods;
        (pods.iter().map(|pod| pod.deleting).collect::<Vec<_>>(), pods.requests().cpu.0)
    };
    assert_eq!(seen(&state), (vec![false], 1_000));
    object["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
    state.apply_pod(&read(&object), 2);
    assert_eq!(seen(&state), (vec![true], 1_000));
}

#[test]
fn a_node_in_flight_keeps_the_host_ports_of_its_daemons_until_they_are_there() {
    let mut state = ClusterState::default();
    let ports = json!([{"name": "c", "image": "i", "ports": [{"containerPort": 80, "hostPort": 80}]}]);
    let set = json!({"metadata": {"name": "d", "namespace": "n", "uid": "d"},
        "spec": {"selector": {}, "template": {"spec": {"containers": ports}}}});
    state.apply_daemon_set(&read(&set));
    state.apply_claim(read(&claim("c", &["x2"])));
    let kept =
        |state: &ClusterState| look(state, &[]).problem.nodes.iter().map(|node| node.daemons.len()).collect::<Vec<_>>();
    assert_eq!(kept(&state), [1]);
    state.apply_node(read(&node("n")));
    let mut object = claim("c", &["x2"]);
    object["status"] = json!({"providerID": "aws:///z/n"});
    state.apply_claim(read(&object));
    assert_eq!(kept(&state), [1], "it came up, its daemon's pod didn't");
    let mut daemons = pod("d-1", Some("n"), &json!({"containers": ports}));
    daemons["metadata"]["ownerReferences"][0] =
        json!({"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "d", "uid": "d", "controller": true});
    state.apply_pod(&read(&daemons), 1);
    assert_eq!(kept(&state), [0]);
}
