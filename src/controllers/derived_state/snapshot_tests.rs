//! Incremental snapshots equal fresh ones, and leaving nodes become demand.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde_json::{Value, json};
use stowage_model::labels;
use stowage_model::offering::Catalog;
use stowage_model::time::UnixMillis;
use stowage_planner::PlanSettings;
use stowage_test_objects as objects;

use super::*;
use crate::decisions::holds::resolve;
use crate::state::pool_types::ReadyPool;

const NODES: u64 = 9;

fn read<T: serde::de::DeserializeOwned>(object: &Value) -> T {
    serde_json::from_value(object.clone()).unwrap()
}

/// A state, its cache, and the objects that were applied to it and still exist.
#[derive(Default)]
struct World {
    state: ClusterState,
    cache: SnapshotCache,
    nodes: BTreeMap<u64, Value>,
    claims: BTreeMap<u64, Value>,
    pods: BTreeMap<u64, Value>,
    daemon: Option<Value>,
    /// Part of every UID: a deleted object is created again with another UID only.
    generation: u64,
}

impl World {
    fn node(&mut self, at: u64, ready: bool, initialized: bool) {
        let condition = json!({"type": "Ready", "status": if ready { "True" } else { "False" }});
        let node = json!({
            "metadata": {"name": format!("node-{at}"), "uid": format!("n-{at}-{}", self.generation),
                "labels": {(labels::INITIALIZED): initialized.to_string()}},
            "spec": {"providerID": format!("aws:///z/i-{at}")},
            "status": {"allocatable": {"cpu": "4", "memory": "8Gi", "pods": "20"}, "conditions": [condition]},
        });
        self.state.apply_node(read(&node));
        self.nodes.insert(at, node);
    }

    fn claim(&mut self, at: u64, planned: &[String], leaving: bool, sized: bool) {
        let plan =
            json!({(labels::PLANNED_PODS): json!(planned).to_string(), (labels::HOLD_UNTIL): "2030-01-01T00:00:00Z"});
        let metadata = json!({"uid": format!("c-{at}-{}", self.generation), "labels": {(labels::NODE_POOL): "p"}, "annotations": plan});
        let capacity = if sized { json!({"cpu": "4"}) } else { json!({}) };
        let status = json!({"providerID": format!("aws:///z/i-{at}"), "capacity": capacity});
        let mut claim = json!(objects::claim(&format!("claim-{at}"), &json!({"metadata": metadata, "status": status})));
        if leaving {
            claim["metadata"]["annotations"][labels::DISRUPTING] = json!("Drifted/");
        }
        self.state.apply_claim(read(&claim));
        self.claims.insert(at, claim);
    }

    fn pod(&mut self, name: u64, on: Option<u64>, ending: bool) {
        let condition = json!({"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "m"});
        let mut pod = json!({
            "metadata": {"name": format!("pod-{name}"), "namespace": "n", "uid": format!("p-{name}-{}", self.generation)},
            "spec": {"nodeName": on.map(|at| format!("node-{at}")),
                "containers": [{"name": "c", "image": "i", "resources": {"requests": {"cpu": format!("{}m", name + 1)}}}]},
            "status": {"conditions": if on.is_some() { json!([]) } else { json!([condition]) }},
        });
        if ending {
            pod["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
        }
        self.state.apply_pod(&read(&pod), UnixMillis(1));
        self.pods.insert(name, pod);
    }

    fn daemon(&mut self, cpu: u64) {
        let daemon = json!({
            "metadata": {"name": "d", "namespace": "n", "uid": "d"},
            "spec": {"selector": {}, "template": {"spec": {"containers": [
                {"name": "c", "image": "i", "resources": {"requests": {"cpu": format!("{cpu}m")}}}]}}},
        });
        self.state.apply_daemon_set(&read(&daemon));
        self.daemon = Some(daemon);
    }

    /// A state with the existing objects only.
    fn fresh(&self) -> ClusterState {
        let mut state = ClusterState::default();
        self.nodes.values().for_each(|node| state.apply_node(read(node)));
        self.claims.values().for_each(|claim| state.apply_claim(read(claim)));
        self.pods.values().for_each(|pod| state.apply_pod(&read(pod), UnixMillis(1)));
        self.daemon.iter().for_each(|daemon| state.apply_daemon_set(&read(daemon)));
        state
    }
}

fn pools(catalog: &Arc<Catalog>) -> Vec<ReadyPool> {
    let pool = json!({"apiVersion": "karpenter.sh/v1", "kind": "NodePool", "metadata": {"name": "p"},
        "spec": {"template": {"spec": {"requirements": [], "nodeClassRef": {"group": "karpenter.k8s.aws", "kind": "EC2NodeClass", "name": "n"}}}}});
    vec![ReadyPool { pool: Arc::new(read(&pool)), catalog: Arc::clone(catalog) }]
}

fn take_now(state: &ClusterState, cache: &mut SnapshotCache, catalog: &Arc<Catalog>) -> Snapshot {
    let (pools, settings, now) = (pools(catalog), PlanSettings::default(), UnixMillis(1_000));
    let request = SnapshotRequest { pools: &pools, settings: &settings, now };
    let holds = resolve(state, now);
    take(state, &holds, demand(state, &holds, now), cache, request)
}

fn rendered(snapshot: &Snapshot) -> String {
    let usage = snapshot.problem.pools.iter().map(|pool| (pool.usage.cpu.0, pool.node_count));
    let pods: Vec<_> = snapshot.problem.pods.iter().map(|pod| &pod.key).collect();
    format!("{:?} {:?} {:?} {pods:?}", snapshot.problem.nodes, snapshot.node_refs, usage.collect::<Vec<_>>())
}

#[test]
fn an_incremental_snapshot_equals_a_fresh_one_and_shares_unchanged_nodes() {
    let empty = || Arc::new(Catalog { region: "r".into(), instance_types: Vec::new() });
    let mut catalog = empty();
    let mut world = World::default();
    for at in 0..NODES {
        world.node(at, true, true);
        // Every third node has no claim; the others have claims of one pool.
        if at % 3 > 0 {
            world.claim(at, &[], false, true);
        }
    }
    let mut rng = fastrand::Rng::with_seed(7);
    let (mut before, mut shared): (Option<Snapshot>, usize) = (None, 0);
    let (mut unstable_before, mut in_flight, mut leaving) = (0, 0, 0);
    for step in 0..1_500 {
        let (at, name) = (rng.u64(0..NODES), rng.u64(0..20));
        let mut whole = false;
        match rng.u8(0..13) {
            0 => world.node(at, rng.bool(), rng.u8(0..4) > 0),
            1 => {
                world.state.delete_node(&format!("node-{at}"));
                world.nodes.remove(&at);
                world.generation += 1;
            }
            2 | 3 if at % 3 > 0 => {
                let planned = if rng.bool() { vec![format!("n/pod-{name}")] } else { Vec::new() };
                world.claim(at, &planned, rng.u8(0..4) == 0, rng.bool());
            }
            4 => {
                world.state.delete_claim(&format!("claim-{at}"));
                world.claims.remove(&at);
                world.generation += 1;
            }
            5 => {
                world.state.delete_pod(&format!("n/pod-{name}"), UnixMillis(1));
                world.pods.remove(&name);
                world.generation += 1;
            }
            6 if name < 5 => {
                world.daemon(name);
                whole = true;
            }
            7 if name == 0 => {
                catalog = empty();
                whole = true;
            }
            8 => world.pod(name, None, false),
            9 | 10 => world.node(at, true, true),
            _ => world.pod(name, Some(at), rng.u8(0..4) == 0),
        }
        let now = take_now(&world.state, &mut world.cache, &catalog);
        let fresh = take_now(&world.fresh(), &mut SnapshotCache::default(), &catalog);
        assert_eq!(rendered(&now), rendered(&fresh), "step {step}");
        let booting = now.problem.nodes.iter().filter(|node| !node.initialized).count();
        let unstable = resolve(&world.state, UnixMillis(1_000)).by_claim.len() + booting;
        if let Some(before) = before.filter(|_| !whole) {
            let same = |node| before.problem.nodes.iter().any(|old| Arc::ptr_eq(old, node));
            let kept = now.problem.nodes.iter().filter(|node| same(node)).count();
            // A pod that moves changes two nodes; unstable nodes are not shared.
            assert!(kept + unstable + unstable_before + 2 >= now.problem.nodes.len(), "step {step}: {kept} kept");
            shared += kept;
        }
        unstable_before = unstable;
        in_flight += world.state.in_flight.len();
        leaving += world.state.claim_index.leaving.len();
        before = Some(now);
    }
    assert!(shared > 3_000 && in_flight > 500 && leaving > 500, "{shared} {in_flight} {leaving}");
}

fn node(name: &str) -> Value {
    json!({"metadata": {"name": name, "uid": name, "labels": {(labels::INITIALIZED): "true"}},
        "spec": {"providerID": format!("aws:///z/{name}")},
        "status": {"allocatable": {"cpu": "4", "memory": "8Gi", "pods": "20"},
            "conditions": [{"type": "Ready", "status": "True"}]}})
}

fn web_pod(name: &str, node: Option<&str>, extra: &Value) -> Value {
    let mut spec = json!({"nodeName": node, "containers": [
        {"name": "c", "image": "i", "resources": {"requests": {"cpu": "1"}}}]});
    spec.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    let owner = json!({"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "r", "controller": true});
    json!({"metadata": {"name": name, "namespace": "n", "uid": name, "ownerReferences": [owner]}, "spec": spec})
}

#[test]
fn b41_pods_of_a_leaving_node_are_demand() {
    let mut state = ClusterState::default();
    for name in ["staying", "leaving"] {
        state.apply_node(read(&node(name)));
        let mut patch = json!({"metadata": {"labels": {(labels::NODE_POOL): "p"}},
            "status": {"providerID": format!("aws:///z/{name}"), "capacity": {"cpu": "4"}}});
        if name == "leaving" {
            patch["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
            patch["metadata"]["finalizers"] = json!(["f"]);
        }
        state.apply_claim(objects::claim(name, &patch));
    }
    let on_leaving = |name, extra: &Value| web_pod(name, Some("leaving"), extra);
    let mut daemons = on_leaving("daemons", &json!({}));
    daemons["metadata"]["ownerReferences"][0]["kind"] = json!("DaemonSet");
    let mut bare = on_leaving("bare", &json!({}));
    bare["metadata"]["ownerReferences"] = json!([]);
    let mut done = on_leaving("done", &json!({}));
    done["status"] = json!({"phase": "Succeeded"});
    let mut ending = on_leaving("ending", &json!({}));
    ending["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
    for object in
        [on_leaving("web", &json!({})), web_pod("other", Some("staying"), &json!({})), daemons, bare, done, ending]
    {
        state.apply_pod(&read(&object), UnixMillis(1));
    }
    let displaced = BTreeSet::from(["n/web".to_owned()]);
    let catalog = Arc::new(Catalog { region: "r".into(), instance_types: Vec::new() });
    let now = take_now(&state, &mut SnapshotCache::default(), &catalog);
    assert_eq!((&now.displaced, now.problem.pods.len()), (&displaced, 1));
    let nodes: Vec<&str> = now.problem.nodes.iter().map(|node| &*node.name).collect();
    assert_eq!(nodes, ["staying"], "without the leaving node");
    assert_eq!(now.problem.pools[0].usage.cpu.0, 4_000, "without the leaving claim");
}
