//! Benchmark of a consolidation decision in clusters that were scaled down: nodes of twelve types, filled to between a tenth and two
//! thirds, with every third deployment spread over zones. It prints a table and asserts nothing but that something is saved.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

use fastrand::Rng;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use stowage::parts::{
    ClusterState, Consolidation, DerivedState, Effort, InstanceTypes, Memory, ReadyPool, Request, Resources, Settings,
    SnapshotRequest, SpotPricing, UnixMillis, embedded,
};

const NOW: UnixMillis = UnixMillis(1_800_000_000_000);
const CREATED: &str = "2026-01-01T00:00:00Z";
/// Millicores of the pods.
const CPU: [i64; 10] = [50, 100, 100, 200, 250, 250, 500, 500, 1_000, 2_000];
/// MiB per core.
const MEMORY: [i64; 7] = [512, 1_024, 2_048, 2_048, 4_096, 4_096, 7_168];

fn read<T: DeserializeOwned>(object: Value) -> T {
    serde_json::from_value(object).expect("the bench writes valid objects")
}

struct App {
    name: String,
    cpu: i64,
    memory: i64,
}

impl App {
    fn new(at: usize, rng: &mut Rng) -> Self {
        let cpu = CPU[rng.usize(..CPU.len())];
        let memory = (cpu * MEMORY[rng.usize(..MEMORY.len())] / 1_000).max(64);
        Self { name: format!("app-{at}"), cpu, memory }
    }

    fn pod(&self, name: &str, node: &str, is_spread: bool) -> Value {
        let spread = json!([{"maxSkew": 1, "topologyKey": "topology.kubernetes.io/zone", "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": {"app": self.name}}}]);
        let requests = json!({"cpu": format!("{}m", self.cpu), "memory": format!("{}Mi", self.memory)});
        let owner = json!([{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": self.name, "uid": self.name, "controller": true}]);
        json!({
            "metadata": {"name": name, "namespace": "n", "uid": name, "labels": {"app": self.name}, "creationTimestamp": CREATED, "ownerReferences": owner},
            "spec": {"nodeName": node, "containers": [{"name": "c", "image": "i", "resources": {"requests": requests}}],
                "topologySpreadConstraints": if is_spread { spread } else { json!([]) }},
            "status": {"phase": "Running"},
        })
    }
}

struct Cluster {
    state: ClusterState,
    pools: Vec<ReadyPool>,
    pods: usize,
}

fn cluster(nodes: usize, seed: u64) -> Cluster {
    let catalog = Arc::new(embedded().for_node_class(None, SpotPricing::ratio(0.35).expect("a ratio below 1")));
    let pool = json!({"apiVersion": "karpenter.sh/v1", "kind": "NodePool", "metadata": {"name": "default", "uid": "p"},
        "spec": {"disruption": {"consolidateAfter": "30s", "budgets": [{"nodes": "100%"}]}, "template": {"spec": {
            "requirements": [{"key": "karpenter.sh/capacity-type", "operator": "In", "values": ["on-demand"]},
                {"key": "karpenter.k8s.aws/instance-category", "operator": "In", "values": ["c", "m", "r"]},
                {"key": "kubernetes.io/arch", "operator": "In", "values": ["amd64"]}],
            "nodeClassRef": {"group": "karpenter.k8s.aws", "kind": "EC2NodeClass", "name": "default"}}}}});
    let (rng, mut state, mut pods) = (&mut Rng::with_seed(seed), ClusterState::default(), 0);
    state.apply_pool(read(pool.clone()));
    let apps: Vec<App> = (0..nodes.max(30)).map(|at| App::new(at, rng)).collect();
    for at in 0..nodes {
        let (family, size) =
            (["m6i", "c6i", "r6i"][rng.usize(..3)], ["large", "xlarge", "2xlarge", "4xlarge"][rng.usize(..4)]);
        let type_name = format!("{family}.{size}");
        let found =
            catalog.instance_types.iter().find(|found| *found.name == *type_name).expect("a type of the catalog");
        let (name, zone) = (format!("node-{at:05}"), format!("us-east-1{}", ["a", "b", "c"][at % 3]));
        let labels = json!({
            "kubernetes.io/hostname": name, "topology.kubernetes.io/zone": zone, "kubernetes.io/arch": "amd64",
            "kubernetes.io/os": "linux", "karpenter.sh/nodepool": "default", "karpenter.sh/capacity-type": "on-demand",
            "node.kubernetes.io/instance-type": type_name, "karpenter.sh/initialized": "true", "karpenter.sh/registered": "true",
        });
        let resources = |resources: &Resources| json!(resources.to_map());
        let (capacity, allocatable) = (resources(&found.capacity), resources(&found.allocatable));
        let id = format!("aws:///{zone}/{name}");
        let condition = |kind: &str| json!({"type": kind, "status": "True", "reason": kind, "message": "", "lastTransitionTime": CREATED});
        let meta = json!({"name": name, "uid": name, "labels": labels, "creationTimestamp": CREATED});
        state.apply_node(read(json!({"metadata": meta, "spec": {"providerID": id},
            "status": {"allocatable": allocatable, "capacity": capacity, "conditions": [{"type": "Ready", "status": "True"}]}})));
        let conditions: Vec<Value> = ["Launched", "Registered", "Initialized"].map(condition).into();
        state.apply_claim(read(json!({"apiVersion": "karpenter.sh/v1", "kind": "NodeClaim", "metadata": meta,
            "spec": {"requirements": [], "nodeClassRef": {"group": "karpenter.k8s.aws", "kind": "EC2NodeClass", "name": "default"}},
            "status": {"providerID": id, "capacity": capacity, "allocatable": allocatable, "conditions": conditions}})));
        let fill = rng.i64(10..=66);
        let (mut cpu, mut memory) =
            (found.allocatable.cpu.0 * fill / 100, (found.allocatable.memory.0 >> 20) * fill / 100);
        for _ in 0..20 {
            let app = rng.usize(..apps.len());
            if apps[app].cpu <= cpu && apps[app].memory <= memory {
                (cpu, memory, pods) = (cpu - apps[app].cpu, memory - apps[app].memory, pods + 1);
                state.apply_pod(&read(apps[app].pod(&format!("pod-{pods}"), &name, app % 3 == 0)), UnixMillis(1));
            }
        }
    }
    Cluster { state, pools: vec![ReadyPool { pool: Arc::new(read(pool)), catalog }], pods }
}

fn main() {
    println!(
        "| nodes, pods | plans | seconds | of these to gather | plans made | nodes removed | pods moved | USD/h saved | of |"
    );
    println!("|---|---|---|---|---|---|---|---|---|");
    for (nodes, seed, efforts) in [
        (12, 1, &[Effort::Quick, Effort::Normal][..]),
        (40, 2, &[Effort::Quick, Effort::Normal]),
        (300, 3, &[Effort::Quick, Effort::Normal]),
        (2_000, 4, &[Effort::Quick]),
    ] {
        let cluster = cluster(nodes, seed);
        for effort in efforts {
            let (derived, settings, types) =
                (DerivedState::default(), Settings::default(), InstanceTypes::new(&cluster.pools));
            let gather = || {
                let request = SnapshotRequest { pools: &cluster.pools, settings: &settings, now: NOW };
                derived.simulator(&cluster.state, request, cluster.state.claims.keys().map(String::as_str))
            };
            // Fills the caches, as in a process that runs.
            gather().leave_out_unplaced(*effort);
            let clock = Instant::now();
            let request = Request { pools: &cluster.pools, types: &types, most: usize::MAX, now: NOW };
            let mut memory = Memory::default();
            let holds = derived.holds(&cluster.state, NOW);
            let consolidation = Consolidation::begin(&cluster.state, &holds, &mut memory, request);
            let simulator = gather();
            let gathered = clock.elapsed();
            let simulate = |without: &BTreeSet<String>| Some(simulator.simulate(without, *effort));
            let decision = consolidation.decide(&mut memory, 0, simulate, NOW);
            assert!(decision.saving.0 > 0, "nothing is saved");
            let bill: f64 = cluster.state.claims.values().map(|claim| types.price(claim).usd()).sum();
            println!(
                "| {nodes}, {} | {effort:?} | {:.2} | {:.3} | {} | {} | {} | {:.3} | {:.3} |",
                cluster.pods,
                clock.elapsed().as_secs_f64(),
                gathered.as_secs_f64(),
                decision.plans,
                decision.claims.len(),
                decision.pods,
                decision.saving.usd(),
                bill
            );
        }
    }
}
