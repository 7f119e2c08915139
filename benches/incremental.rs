//! Benchmark of incremental work in a large cluster: snapshot and plan of one pending pod, and of many, with 5,000 nodes of ten
//! pods each, after the first snapshot. `make bench` runs it; it prints a table and asserts only that every pod is placed.

use std::sync::Arc;
use std::time::Instant;

use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use stowage::parts::{ClusterState, DerivedState, ReadyPool, SnapshotRequest};
use stowage_cloud::catalog::{SpotPricing, embedded};
use stowage_model::time::UnixMillis;
use stowage_planner::{PlanSettings, plan};

const NODES: usize = 5_000;
const PODS_PER_NODE: usize = 10;
const RUNS: usize = 21;

fn read<T: DeserializeOwned>(object: Value) -> T {
    serde_json::from_value(object).expect("the bench writes valid objects")
}

fn pod(name: &str, app: usize, node: Option<usize>, spec: &Value) -> Value {
    let mut full = json!({
        "nodeName": node.map(|at| format!("node-{at}")),
        "containers": [{"name": "c", "image": "i", "resources": {"requests": {"cpu": "250m", "memory": "512Mi"}}}],
    });
    for (key, value) in spec.as_object().into_iter().flatten() {
        full[key] = value.clone();
    }
    let waiting = json!([{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "m"}]);
    json!({
        "metadata": {"name": name, "namespace": "n", "uid": name, "labels": {"app": format!("app-{app}")},
            "ownerReferences": [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": format!("rs-{app}"), "controller": true}]},
        "spec": full,
        "status": {"phase": if node.is_some() { "Running" } else { "Pending" }, "conditions": if node.is_some() { json!([]) } else { waiting }},
    })
}

/// Nodes with a claim each; `room` is the free CPU of each node.
fn cluster(room: &str) -> ClusterState {
    let mut state = ClusterState::default();
    let cpu = if room.is_empty() { "2500m" } else { room };
    for at in 0..NODES {
        let zone = format!("us-east-1{}", ["a", "b", "c"][at % 3]);
        let labels = json!({
            "kubernetes.io/hostname": format!("node-{at}"), "topology.kubernetes.io/zone": zone, "kubernetes.io/arch": "amd64",
            "kubernetes.io/os": "linux", "karpenter.sh/nodepool": "default", "karpenter.sh/capacity-type": "on-demand",
            "node.kubernetes.io/instance-type": "m6i.xlarge", "karpenter.sh/initialized": "true", "karpenter.sh/registered": "true",
        });
        let size = json!({"cpu": cpu, "memory": "14Gi", "pods": "58", "ephemeral-storage": "17Gi"});
        state.apply_node(read(json!({
            "metadata": {"name": format!("node-{at}"), "uid": format!("n-{at}"), "labels": labels},
            "spec": {"providerID": format!("aws:///{zone}/i-{at}")},
            "status": {"allocatable": size, "capacity": size, "conditions": [{"type": "Ready", "status": "True"}]},
        })));
        state.apply_claim(read(json!({
            "apiVersion": "karpenter.sh/v1", "kind": "NodeClaim",
            "metadata": {"name": format!("claim-{at}"), "uid": format!("c-{at}"), "labels": labels},
            "spec": {"requirements": [], "nodeClassRef": {"group": "karpenter.k8s.aws", "kind": "EC2NodeClass", "name": "default"}},
            "status": {"providerID": format!("aws:///{zone}/i-{at}"), "capacity": size, "allocatable": size},
        })));
        for index in 0..PODS_PER_NODE {
            let number = at * PODS_PER_NODE + index;
            state
                .apply_pod(&read(pod(&format!("running-{number}"), number % 200, Some(at), &json!({}))), UnixMillis(1));
        }
    }
    state
}

fn median(mut millis: Vec<f64>) -> f64 {
    millis.sort_by(f64::total_cmp);
    millis[millis.len() / 2]
}

fn main() {
    let catalog = Arc::new(embedded().for_node_class(None, SpotPricing::ratio(0.35).expect("a ratio below 1")));
    let pool = json!({"apiVersion": "karpenter.sh/v1", "kind": "NodePool", "metadata": {"name": "default"},
        "spec": {"template": {"spec": {
            "requirements": [{"key": "karpenter.sh/capacity-type", "operator": "In", "values": ["on-demand"]}],
            "nodeClassRef": {"group": "karpenter.k8s.aws", "kind": "EC2NodeClass", "name": "default"}}}}});
    let pools = vec![ReadyPool { pool: Arc::new(read(pool)), catalog }];
    let spread = json!({"topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "topology.kubernetes.io/zone",
        "whenUnsatisfiable": "DoNotSchedule", "labelSelector": {"matchLabels": {"app": "app-0"}}}]});
    println!(
        "| {NODES} nodes, {} running pods; pending | snapshot ms | plan ms | first snapshot ms |",
        NODES * PODS_PER_NODE
    );
    println!("|---|---|---|---|");
    for (name, room, count, spec) in [
        ("1 pod, room on nodes", "3920m", 1, json!({})),
        ("1 pod, no room", "", 1, json!({})),
        ("1 pod spread over zones, no room", "", 1, spread.clone()),
        ("100 pods, no room", "", 100, json!({})),
        ("10,000 pods, no room", "", 10_000, json!({})),
    ] {
        let mut state = cluster(room);
        let (derived, settings) = (DerivedState::default(), PlanSettings::default());
        let (mut took, mut solved, mut first) = (Vec::new(), Vec::new(), 0.0);
        for run in 0..RUNS {
            for at in 0..count {
                state.apply_pod(&read(pod(&format!("pending-{run}-{at}"), at % 200, None, &spec)), UnixMillis(1));
            }
            let clock = Instant::now();
            let request = SnapshotRequest { pools: &pools, settings: &settings, now: UnixMillis(1_000) };
            let snapshot = derived.snapshot(&state, request);
            let taken = clock.elapsed().as_secs_f64() * 1e3;
            let clock = Instant::now();
            let made = plan(&snapshot.problem, &snapshot.column_cache);
            solved.push(clock.elapsed().as_secs_f64() * 1e3);
            assert!(made.unschedulable.is_empty() && snapshot.problem.pods.len() == count, "a pod is not placed");
            if run == 0 {
                first = taken;
            } else {
                took.push(taken);
            }
            for at in 0..count {
                state.delete_pod(&format!("n/pending-{run}-{at}"), UnixMillis(1));
            }
        }
        println!("| {name} | {:.2} | {:.2} | {first:.1} |", median(took), median(solved));
    }
}
