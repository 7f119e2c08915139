//! Benchmark of the watched state of a large cluster: 10,000 nodes and 100,000 pods (or `STOWAGE_BENCH_NODES`, with ten pods each).
//! Memory, CPU per event, snapshot time, the time of an update of the extender's view and of a verdict, and the CPU that the pure part of
//! each loop takes in an idle second and in a second with 1,000 events. Every event is followed by the loops that are due, at their
//! shortest period. Linux only: it reads `/proc`.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::StreamExt;
use k8s_openapi::api::core::v1::{Node, Pod};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use stowage::parts::{
    Cluster, ClusterState, DerivedState, FilterArgs, Hold, NodeRoom, PART_NAMES, PureParts, ReadyPool, SnapshotRequest,
    View, ViewInput, condition_series, filter, node_series, pod_series, prioritize,
};
use stowage_cloud::catalog::{SpotPricing, embedded};
use stowage_model::resources::Resources;
use stowage_model::time::UnixMillis;
use stowage_model::units::Millicores;
use stowage_planner::PlanSettings;

const PODS_PER_NODE: usize = 10;
/// Events in a second under churn; the loops with the shortest period run once per [`TICK`].
const EVENTS: usize = 1_000;
/// Milliseconds.
const TICK: usize = 20;
const READY: &str = "2026-01-01T00:00:00Z";

fn read<T: DeserializeOwned>(object: Value) -> T {
    serde_json::from_value(object).expect("the bench writes valid objects")
}

fn pod(number: usize, node: Option<usize>) -> Pod {
    let (name, app) = (format!("app-{}-{number}", number % 1_000), number % 1_000);
    read(json!({
        "metadata": {"name": name, "namespace": format!("team-{}", app % 50), "uid": format!("3f1c9c1e-7c1b-4d0e-9d4e-{number:012}"),
            "creationTimestamp": READY, "resourceVersion": format!("{number}"),
            "labels": {"app": format!("app-{app}"), "pod-template-hash": format!("{app:010}"), "team": format!("team-{}", app % 50)},
            "ownerReferences": [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": format!("rs-{app}"), "controller": true}]},
        "spec": {"nodeName": node.map(|at| format!("node-{at}")),
            "containers": [{"name": "c", "image": "i", "resources": {"requests": {"cpu": "250m", "memory": "512Mi"}}}]},
        "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]},
    }))
}

fn labels(at: usize) -> Value {
    json!({
        "kubernetes.io/hostname": format!("node-{at}"), "topology.kubernetes.io/zone": format!("us-east-1{}", ["a", "b", "c"][at % 3]),
        "kubernetes.io/arch": "amd64", "kubernetes.io/os": "linux", "karpenter.sh/nodepool": format!("pool-{}", at % 10),
        "karpenter.sh/capacity-type": "on-demand", "node.kubernetes.io/instance-type": "m6i.xlarge",
        "karpenter.sh/initialized": "true", "karpenter.sh/registered": "true",
    })
}

fn node(at: usize, version: usize) -> Node {
    let size = json!({"cpu": "3920m", "memory": "14Gi", "pods": "58", "ephemeral-storage": "17Gi"});
    let condition = |kind: &str, status: &str, reason: &str| json!({"type": kind, "status": status, "reason": reason, "lastTransitionTime": READY});
    let conditions = [
        condition("MemoryPressure", "False", "KubeletHasSufficientMemory"),
        condition("DiskPressure", "False", "KubeletHasNoDiskPressure"),
        condition("PIDPressure", "False", "KubeletHasSufficientPID"),
        condition("Ready", "True", "KubeletReady"),
    ];
    read(json!({
        "metadata": {"name": format!("node-{at}"), "uid": format!("n-{at}"), "labels": labels(at), "resourceVersion": version.to_string()},
        "spec": {"providerID": format!("aws:///us-east-1a/i-{at}")},
        "status": {"allocatable": size, "capacity": size, "conditions": conditions},
    }))
}

fn cluster(nodes: usize) -> ClusterState {
    let mut state = ClusterState::default();
    for at in 0..10 {
        state.apply_pool(read(pool(at)));
    }
    let condition = |kind: &str| json!({"type": kind, "status": "True", "reason": kind, "message": "", "lastTransitionTime": READY});
    let conditions: Vec<Value> =
        ["Launched", "Registered", "Initialized", "Ready", "Consolidatable", "ConsistentStateFound"]
            .map(condition)
            .into();
    for at in 0..nodes {
        state.apply_node(node(at, 1));
        let size = json!({"cpu": "3920m", "memory": "14Gi", "pods": "58", "ephemeral-storage": "17Gi"});
        let pods: Vec<String> = (0..PODS_PER_NODE).map(|index| format!("team-0/app-{at}-{index}")).collect();
        let requirement = |key: &str, value: &str| json!({"key": key, "operator": "In", "values": [value]});
        state.apply_claim(read(json!({
            "apiVersion": "karpenter.sh/v1", "kind": "NodeClaim",
            "metadata": {"name": format!("claim-{at}"), "uid": format!("c-{at}"), "labels": labels(at), "creationTimestamp": READY,
                "finalizers": ["karpenter.sh/termination"], "resourceVersion": "1",
                // The plan of a node stays in its annotations after its holds have ended.
                "annotations": {"stowage.dev/planned-pods": json!(pods).to_string(), "stowage.dev/hold-until": "2026-01-01T00:10:00Z"}},
            "spec": {"requirements": [requirement("node.kubernetes.io/instance-type", "m6i.xlarge"), requirement("karpenter.sh/capacity-type", "on-demand")],
                "expireAfter": "Never",
                "nodeClassRef": {"group": "karpenter.k8s.aws", "kind": "EC2NodeClass", "name": "default"}},
            "status": {"providerID": format!("aws:///us-east-1a/i-{at}"), "capacity": size, "allocatable": size, "conditions": conditions},
        })));
        for index in 0..PODS_PER_NODE {
            state.apply_pod(&pod(at * PODS_PER_NODE + index, Some(at)), UnixMillis(1));
        }
    }
    state
}

fn pool(at: usize) -> Value {
    json!({"apiVersion": "karpenter.sh/v1", "kind": "NodePool", "metadata": {"name": format!("pool-{at}")},
        "spec": {"disruption": {"consolidateAfter": "1m", "consolidationPolicy": "WhenEmptyOrUnderutilized"}, "template": {"spec": {
            "requirements": [{"key": "karpenter.sh/capacity-type", "operator": "In", "values": ["on-demand"]}],
            "nodeClassRef": {"group": "karpenter.k8s.aws", "kind": "EC2NodeClass", "name": "default"}}}}})
}

/// Resident memory in MiB.
fn resident() -> usize {
    let pages = std::fs::read_to_string("/proc/self/statm").expect("Linux");
    pages.split(' ').nth(1).and_then(|pages| pages.parse::<usize>().ok()).expect("a number") / 256
}

/// Nodes of a request to the extender, and requests.
const CANDIDATES: usize = 1_000;
const ROUNDS: usize = 200;

/// Median and maximum of microseconds.
fn spread(mut times: Vec<f64>) -> String {
    times.sort_by(f64::total_cmp);
    format!("{:.1} µs, at most {:.1} µs", times[times.len() / 2], times[times.len() - 1])
}

/// Nanoseconds of filter and of prioritize per node, for 1,000 of the nodes, a tenth of which have two holds.
fn verdicts(nodes: usize) -> [f64; 2] {
    let now = UnixMillis(1_790_000_000_000);
    let hold = |pod: String| Hold {
        pod: pod.into(),
        requests: Resources { cpu: Millicores(500), pods: 1, ..Resources::default() },
        expires_at: now + Duration::from_mins(1),
        ..Hold::default()
    };
    let room = |at: usize| NodeRoom {
        name: format!("node-{at}").into(),
        free: Resources { cpu: Millicores(2_000), pods: 40, ..Resources::default() },
        allocatable: Resources { cpu: Millicores(4_000), pods: 58, ..Resources::default() },
        holds: (0..2 * usize::from(at.is_multiple_of(10))).map(|of| hold(format!("n/{at}-{of}"))).collect(),
        ..NodeRoom::default()
    };
    let max_age = Duration::from_mins(1);
    let input = ViewInput { as_of: now, max_age, nodes: (0..nodes).map(room).collect(), ..ViewInput::default() };
    let view = View::build(input);
    let names: Vec<String> = (0..CANDIDATES).map(|at| format!("node-{}", at * 7 % nodes)).collect();
    let container = json!({"name": "c", "resources": {"requests": {"cpu": "250m", "memory": "0"}}});
    let pod = json!({"metadata": {"name": "p", "namespace": "n"}, "spec": {"containers": [container]}});
    let body = json!({"Pod": pod, "NodeNames": names}).to_string();
    let args: FilterArgs<'_> = serde_json::from_str(&body).expect("a request");
    let per_node = |call: &dyn Fn(FilterArgs<'_>) -> usize| {
        let clock = Instant::now();
        let found: usize = (0..ROUNDS).map(|_| call(args.clone())).sum();
        assert_eq!(found, ROUNDS * CANDIDATES, "every node passes");
        clock.elapsed().as_secs_f64() * 1e9 / f64::from(u32::try_from(found).expect("few"))
    };
    [per_node(&|args| filter(&view, now, args).node_names.len()), per_node(&|args| prioritize(&view, now, args).len())]
}

fn main() {
    let nodes = std::env::var("STOWAGE_BENCH_NODES").ok().and_then(|nodes| nodes.parse().ok()).unwrap_or(10_000);
    let total = nodes * PODS_PER_NODE;
    let before = resident();
    let clock = Instant::now();
    let mut state = cluster(nodes);
    println!("| {nodes} nodes, {total} pods, 10 NodePools | |");
    println!("|---|---|");
    println!("| resident memory | {} MiB |", resident() - before);
    println!("| feeding it, parsing included | {:.1} s |", clock.elapsed().as_secs_f64());

    let now = UnixMillis(1_790_000_000_000);
    let catalog = Arc::new(embedded().for_node_class(None, SpotPricing::ratio(0.35).expect("a ratio below 1")));
    let pools: Vec<_> =
        (0..10).map(|at| ReadyPool { pool: Arc::new(read(pool(at))), catalog: Arc::clone(&catalog) }).collect();
    let (derived, settings) = (DerivedState::default(), PlanSettings::default());
    let snapshot = |state: &ClusterState| {
        let clock = Instant::now();
        drop(derived.snapshot(state, SnapshotRequest { pools: &pools, settings: &settings, now }));
        clock.elapsed().as_secs_f64() * 1e3
    };
    let (first, again) = (snapshot(&state), snapshot(&state));
    println!("| snapshot: first; without a change | {first:.1} ms; {again:.2} ms |");

    // A third each: a pod's status, a pod bound to a node or deleted, a node's status.
    let mut events: Vec<Box<dyn Fn(&mut ClusterState)>> = Vec::new();
    for number in 0..EVENTS {
        let at = number * 7 % nodes;
        let mut status = pod(at * PODS_PER_NODE, Some(at));
        status.metadata.resource_version = Some((total + number).to_string());
        let (new, heartbeat) = (pod(total + number / 6, Some(at)), node(at, number + 2));
        let key = format!(
            "{}/{}",
            new.metadata.namespace.as_deref().unwrap_or(""),
            new.metadata.name.as_deref().unwrap_or("")
        );
        events.push(match number % 6 {
            0 | 3 => Box::new(move |state| state.apply_pod(&status, now)),
            1 => Box::new(move |state| state.apply_pod(&new, now)),
            4 => Box::new(move |state| state.delete_pod(&key, now)),
            _ => Box::new(move |state| state.apply_node(heartbeat.clone())),
        });
    }

    // Warm caches, as after the first seconds of a process.
    let mut parts = PureParts::new(now);
    for (name, ..) in PART_NAMES {
        parts.pass(name, &state, &pools, now);
    }
    let mut idle: BTreeMap<&str, Duration> = BTreeMap::new();
    for (name, _, resync) in PART_NAMES {
        let clock = Instant::now();
        parts.pass(name, &state, &pools, now);
        idle.insert(name, clock.elapsed() * 1_000 / resync);
    }
    let mut updates = Vec::new();
    for number in 0..EVENTS {
        let at = number * 11 % nodes;
        state.apply_pod(&pod(total + EVENTS + number, Some(at)), now);
        let clock = Instant::now();
        parts.pass("extender view", &state, &pools, now);
        updates.push(clock.elapsed().as_secs_f64() * 1e6);
    }
    println!("| update of the extender's view after one pod was bound, median | {} |", spread(updates));
    let [filtered, scored] = verdicts(nodes);
    println!("| extender, per node of a request with 1,000: filter; prioritize | {filtered:.0} ns; {scored:.0} ns |");
    for (name, ..) in PART_NAMES {
        parts.pass(name, &state, &pools, now);
    }
    let (mut applied, mut busy) = (Duration::ZERO, BTreeMap::<&str, Duration>::new());
    let per_tick = EVENTS * TICK / 1_000;
    for (tick, chunk) in events.chunks(per_tick).enumerate() {
        let clock = Instant::now();
        for event in chunk {
            event(&mut state);
        }
        applied += clock.elapsed();
        for (name, debounce, _) in PART_NAMES {
            let every = (debounce as usize / TICK).max(1);
            // Of a loop with a period above one second, one pass counts in proportion.
            if every <= 50 && tick % every == 0 || every > 50 && tick == 25 {
                let clock = Instant::now();
                parts.pass(name, &state, &pools, now);
                *busy.entry(name).or_default() += clock.elapsed() * 1_000 / debounce.max(1_000);
            }
        }
    }
    let changed = snapshot(&state);
    println!("| snapshot after {EVENTS} events | {changed:.1} ms |");
    println!("| applying {EVENTS} events | {:.1} ms |", applied.as_secs_f64() * 1e3);
    println!("\n| CPU of a loop, ms | idle second | second with {EVENTS} events |");
    println!("|---|---|---|");
    let row = |name: &str, idle: Duration, busy: Duration| {
        println!("| {name} | {:.2} | {:.2} |", idle.as_secs_f64() * 1e3, busy.as_secs_f64() * 1e3);
    };
    for (name, ..) in PART_NAMES {
        row(name, idle[name], busy[name]);
    }
    row("all", idle.values().sum(), busy.values().sum());
    // Real nodes have more labels.
    let types = catalog.instance_types.iter().find(|found| &*found.name == "m6i.xlarge");
    let more = &types.expect("it is embedded").labels;
    for at in 0..nodes {
        let mut node = node(at, usize::MAX - 1);
        node.metadata.labels.get_or_insert_default().extend(more.clone());
        state.apply_node(node);
    }
    scrape(state);
}

/// A scrape of the series of all nodes, pods and conditions, part by part, as a client that reads at once gets it.
fn scrape(state: ClusterState) {
    let cluster = Arc::new(Cluster::new(state));
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    let (before, clock) = (resident(), Instant::now());
    let (mut bytes, mut first, mut longest, mut most) = (0, 0.0, 0.0_f64, 0);
    runtime.block_on(async {
        let mut parts =
            node_series(Arc::clone(&cluster)).chain(pod_series(Arc::clone(&cluster))).chain(condition_series(&cluster));
        let mut begin = Instant::now();
        while let Some(part) = parts.next().await {
            let took = begin.elapsed().as_secs_f64() * 1e3;
            if bytes == 0 {
                first = took;
            } else {
                longest = longest.max(took);
            }
            bytes += part.len();
            most = most.max(resident());
            begin = Instant::now();
        }
    });
    let seconds = clock.elapsed().as_secs_f64();
    println!("\n| scrape of the series of nodes, pods and conditions | {seconds:.2} s, {} MiB of text |", bytes >> 20);
    println!("|---|---|");
    println!("| of that: reading the nodes; the longest of the other parts | {first:.0} ms; {longest:.1} ms |");
    println!("| resident memory meanwhile | {} MiB |", most.saturating_sub(before));
}
