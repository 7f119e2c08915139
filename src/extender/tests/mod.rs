//! Tests of the verdicts, and their shared fixtures.

mod verdicts;
mod wire;

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use stowage_model::resources::Resources;
use stowage_model::time::UnixMillis;
use stowage_model::units::{Bytes, Millicores};

use super::*;

const NOW: UnixMillis = UnixMillis(1_000_000);
const LATER: UnixMillis = UnixMillis(1_060_000);
const MILLISECOND: Duration = Duration::from_millis(1);
const GI: i64 = 1 << 30;

fn room(cpu_milli: i64, memory_gi: i64) -> Resources {
    Resources { cpu: Millicores(cpu_milli), memory: Bytes(memory_gi * GI), pods: 10, ..Resources::default() }
}

fn requests(cpu_milli: i64, memory_gi: i64) -> Resources {
    Resources { pods: 1, ..room(cpu_milli, memory_gi) }
}

fn node(name: &str, holds: Vec<Hold>) -> NodeRoom {
    NodeRoom { name: name.into(), allocatable: room(4000, 16), free: room(4000, 16), holds, ..NodeRoom::default() }
}

fn hold(pod: &str, cpu_milli: i64) -> Hold {
    Hold { pod: pod.into(), requests: requests(cpu_milli, 1), expires_at: LATER, ..Hold::default() }
}

fn plan(pod: &str, node: Option<&str>) -> (Arc<str>, PlannedPod) {
    (pod.into(), PlannedPod { node: node.map(Arc::from), claim: "claim-1".into(), expires_at: LATER })
}

fn view<const N: usize>(nodes: Vec<NodeRoom>, planned: [(Arc<str>, PlannedPod); N]) -> View {
    View::build(ViewInput { as_of: NOW, max_age: Duration::from_mins(2), nodes, planned: planned.into() })
}

fn pod(name: &str, cpu: &str) -> Value {
    json!({
        "metadata": {"name": name, "namespace": "default", "uid": format!("uid-{name}"), "creationTimestamp": null},
        "spec": {"priority": 0, "containers": [{"name": "c", "resources": {"requests": {"cpu": cpu, "memory": "1Gi"}}}]},
        "status": {}
    })
}

fn asked(pod: &Value, names: &[&str]) -> String {
    json!({"Pod": pod, "Nodes": null, "NodeNames": names}).to_string()
}

/// Names that pass, then `name: reason` of those that don't.
fn filtered(view: &View, now: UnixMillis, pod: &Value, names: &[&str]) -> (Vec<String>, Vec<String>) {
    let body = asked(pod, names);
    let args: FilterArgs<'_> = serde_json::from_str(&body).unwrap();
    let result = serde_json::to_value(filter(view, now, args)).unwrap();
    assert_eq!(result["Error"], "");
    assert_eq!(result["FailedNodes"], json!({}));
    let passed = result["NodeNames"].as_array().unwrap().iter().map(|name| name.as_str().unwrap().to_owned()).collect();
    let failed = result["FailedAndUnresolvableNodes"].as_object().unwrap();
    (passed, failed.iter().map(|(name, reason)| format!("{name}: {}", reason.as_str().unwrap())).collect())
}

fn pass(names: &[&str]) -> (Vec<String>, Vec<String>) {
    (names.iter().map(|name| (*name).to_owned()).collect(), vec![])
}

fn scores(view: &View, pod: &Value, names: &[&str]) -> Vec<i64> {
    let body = asked(pod, names);
    prioritize(view, NOW, serde_json::from_str(&body).unwrap()).into_iter().map(|entry| entry.score).collect()
}
