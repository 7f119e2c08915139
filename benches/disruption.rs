//! Benchmark of consolidation decisions in clusters that were scaled down: nodes of twelve types, filled to between a tenth and two
//! thirds, with every third deployment spread over zones. Decisions are executed until one removes nothing. Then a hundred pods end, and the next
//! decision follows. Beside it, nodes are removed one at a time, and decisions are executed for several paybacks. It prints tables and asserts
//! nothing but that something is saved.
//!
//! `cargo bench --bench disruption [-- NODES [SEED]]`: the clusters of at most this many nodes (2,000), with seeds from this one on (1).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fastrand::Rng;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use stowage::parts::{
    ClusterState, Consolidation, Decision, DerivedState, InstanceTypes, Memory, ReadyPool, Request, Simulator,
    SnapshotRequest,
};
use stowage_cloud::catalog::{SpotPricing, embedded};
use stowage_model::offering::InstanceType;
use stowage_model::resources::Resources;
use stowage_model::time::UnixMillis;
use stowage_planner::{Effort, PlanSettings, plan};

const NOW: UnixMillis = UnixMillis(1_800_000_000_000);
const DEFAULT_PAYBACK: &str = "1h";
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

    fn pod(&self, name: &str, node: Option<&str>, is_spread: bool) -> Value {
        let spread = json!([{"maxSkew": 1, "topologyKey": "topology.kubernetes.io/zone", "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": {"app": self.name}}}]);
        let requests = json!({"cpu": format!("{}m", self.cpu), "memory": format!("{}Mi", self.memory)});
        let rejected = json!([{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}]);
        let owner = json!([{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": self.name, "uid": self.name, "controller": true}]);
        json!({
            "metadata": {"name": name, "namespace": "n", "uid": name, "labels": {"app": self.name}, "creationTimestamp": CREATED, "ownerReferences": owner},
            "spec": {"nodeName": node, "containers": [{"name": "c", "image": "i", "resources": {"requests": requests}}],
                "topologySpreadConstraints": if is_spread { spread } else { json!([]) }},
            "status": {"phase": "Running", "conditions": if node.is_some() { json!([]) } else { rejected }},
        })
    }
}

struct Cluster {
    state: ClusterState,
    pools: Vec<ReadyPool>,
    apps: Vec<App>,
    /// Pods by node: their names, with the index of their application.
    nodes: BTreeMap<String, Vec<(String, usize)>>,
    /// Numbers of nodes and pods so far.
    counts: (usize, usize),
}

impl Cluster {
    /// Adds a node, and returns its name.
    fn add_node(&mut self, found: &InstanceType, zone: &str) -> String {
        let name = format!("node-{:05}", self.counts.0);
        self.counts.0 += 1;
        let labels = json!({
            "kubernetes.io/hostname": name, "topology.kubernetes.io/zone": zone, "kubernetes.io/arch": "amd64",
            "kubernetes.io/os": "linux", "karpenter.sh/nodepool": "default", "karpenter.sh/capacity-type": "on-demand",
            "node.kubernetes.io/instance-type": &*found.name, "karpenter.sh/initialized": "true", "karpenter.sh/registered": "true",
        });
        let resources = |resources: &Resources| json!(resources.to_map());
        let (capacity, allocatable) = (resources(&found.capacity), resources(&found.allocatable));
        let id = format!("aws:///{zone}/{name}");
        let condition = |kind: &str| json!({"type": kind, "status": "True", "reason": kind, "message": "", "lastTransitionTime": CREATED});
        let meta = json!({"name": name, "uid": name, "labels": labels, "creationTimestamp": CREATED});
        self.state.apply_node(read(json!({"metadata": meta, "spec": {"providerID": id},
            "status": {"allocatable": allocatable, "capacity": capacity, "conditions": [{"type": "Ready", "status": "True"}]}})));
        let conditions: Vec<Value> = ["Launched", "Registered", "Initialized"].map(condition).into();
        self.state.apply_claim(read(json!({"apiVersion": "karpenter.sh/v1", "kind": "NodeClaim", "metadata": meta,
            "spec": {"requirements": [], "nodeClassRef": {"group": "karpenter.k8s.aws", "kind": "EC2NodeClass", "name": "default"}},
            "status": {"providerID": id, "capacity": capacity, "allocatable": allocatable, "conditions": conditions}})));
        self.nodes.insert(name.clone(), Vec::new());
        name
    }

    /// Adds a pod on a node, or one that the scheduler rejected. Returns its key.
    fn add_pod(&mut self, node: Option<&str>, app: usize) -> String {
        self.counts.1 += 1;
        let name = format!("pod-{}", self.counts.1);
        let pod = read(self.apps[app].pod(&name, node, app.is_multiple_of(3)));
        self.state.apply_pod(&pod, UnixMillis(1));
        if let Some(pods) = node.and_then(|node| self.nodes.get_mut(node)) {
            pods.push((name.clone(), app));
        }
        format!("n/{name}")
    }

    /// Removes nodes. Their pods go where the planner places them.
    fn remove(&mut self, claims: &[String], derived: &DerivedState, request: (&PlanSettings, UnixMillis)) {
        let mut moved: BTreeMap<String, usize> = BTreeMap::new();
        for claim in claims {
            for (pod, app) in self.nodes.remove(claim).unwrap_or_default() {
                self.state.delete_pod(&format!("n/{pod}"), UnixMillis(1));
                moved.insert(self.add_pod(None, app), app);
            }
            self.state.delete_node(claim);
            self.state.delete_claim(claim);
        }
        let pools = self.pools.clone();
        let snapshot =
            derived.snapshot(&self.state, SnapshotRequest { pools: &pools, settings: request.0, now: request.1 });
        let plan = plan(&snapshot.problem, &snapshot.column_cache);
        assert!(plan.unschedulable.is_empty(), "pods without a place");
        let on_new: Vec<_> = plan
            .new_nodes
            .iter()
            .map(|node| (self.add_node(&node.choices[0].instance_type, &node.choices[0].zone), &node.pods))
            .collect();
        let existing = |at: usize| snapshot.node_refs[at].node.clone().expect("every node is registered");
        let on_existing = plan.placements.iter().map(|placement| (existing(placement.node), &placement.pods));
        for (node, pods) in on_existing.chain(on_new) {
            for pod in pods {
                let key = &*snapshot.problem.pods[*pod].key;
                self.state.delete_pod(key, UnixMillis(1));
                self.add_pod(Some(&node), moved[key]);
            }
        }
    }

    /// Ends pods of different nodes.
    fn end_pods(&mut self, count: usize, rng: &mut Rng) {
        let names: Vec<String> = self.nodes.keys().cloned().collect();
        for _ in 0..count {
            let node = &names[rng.usize(..names.len())];
            if let Some((pod, _)) = self.nodes.get_mut(node).and_then(Vec::pop) {
                self.state.delete_pod(&format!("n/{pod}"), UnixMillis(1));
            }
        }
    }

    fn pod_count(&self) -> usize {
        self.nodes.values().map(Vec::len).sum()
    }

    fn bill(&self, types: &InstanceTypes) -> f64 {
        self.state.claims.values().map(|claim| types.price(claim).usd()).sum()
    }
}

/// A cluster of a NodePool with this payback.
fn cluster(nodes: u64, seed: u64, payback: &str) -> Cluster {
    let nodes = usize::try_from(nodes).expect("a small number");
    let catalog = Arc::new(embedded().for_node_class(None, SpotPricing::ratio(0.35).expect("a ratio below 1")));
    let pool = json!({"apiVersion": "karpenter.sh/v1", "kind": "NodePool", "metadata": {"name": "default", "uid": "p",
            "annotations": {"stowage.dev/consolidation-payback": payback}},
        "spec": {"disruption": {"consolidateAfter": "30s", "budgets": [{"nodes": "100%"}]}, "template": {"spec": {
            "requirements": [{"key": "karpenter.sh/capacity-type", "operator": "In", "values": ["on-demand"]},
                {"key": "karpenter.k8s.aws/instance-category", "operator": "In", "values": ["c", "m", "r"]},
                {"key": "kubernetes.io/arch", "operator": "In", "values": ["amd64"]}],
            "nodeClassRef": {"group": "karpenter.k8s.aws", "kind": "EC2NodeClass", "name": "default"}}}}});
    let (rng, state) = (&mut Rng::with_seed(seed), ClusterState::default());
    let apps: Vec<App> = (0..nodes.max(30)).map(|at| App::new(at, rng)).collect();
    let pools = vec![ReadyPool { pool: Arc::new(read(pool.clone())), catalog: Arc::clone(&catalog) }];
    let mut out = Cluster { state, pools, apps, nodes: BTreeMap::new(), counts: (0, 0) };
    out.state.apply_pool(read(pool));
    for at in 0..nodes {
        let (family, size) =
            (["m6i", "c6i", "r6i"][rng.usize(..3)], ["large", "xlarge", "2xlarge", "4xlarge"][rng.usize(..4)]);
        let type_name = format!("{family}.{size}");
        let found =
            catalog.instance_types.iter().find(|found| *found.name == *type_name).expect("a type of the catalog");
        let name = out.add_node(found, &format!("us-east-1{}", ["a", "b", "c"][at % 3]));
        let (room, fill) = (&found.allocatable, rng.i64(10..=66));
        let (mut cpu, mut memory) = (room.cpu.0 * fill / 100, (room.memory.0 >> 20) * fill / 100);
        for _ in 0..60 {
            let app = rng.usize(..out.apps.len());
            if out.apps[app].cpu <= cpu && out.apps[app].memory <= memory {
                (cpu, memory) = (cpu - out.apps[app].cpu, memory - out.apps[app].memory);
                out.add_pod(Some(&name), app);
            }
        }
    }
    out
}

/// What is kept between decisions, as in a process that runs.
struct Bench {
    cluster: Cluster,
    derived: DerivedState,
    memory: Memory,
    settings: PlanSettings,
    types: InstanceTypes,
    now: UnixMillis,
}

impl Bench {
    fn new(cluster: Cluster) -> Self {
        let (derived, memory, settings) = (DerivedState::default(), Memory::default(), PlanSettings::default());
        let types = InstanceTypes::new(&cluster.pools);
        Self { cluster, derived, memory, settings, types, now: NOW }
    }

    fn gather(&self) -> Simulator {
        let request = SnapshotRequest { pools: &self.cluster.pools, settings: &self.settings, now: self.now };
        let claims = self.cluster.state.claims.keys().map(String::as_str);
        self.derived.simulator(&self.cluster.state, request, claims)
    }

    /// A decision, the seconds that it took, and those of them that it needed the state.
    fn decide(&mut self, effort: Effort) -> (Decision, f64, f64) {
        let clock = Instant::now();
        let facts = self.derived.facts(&self.cluster.state, &self.cluster.pools);
        let request = Request { pools: &self.cluster.pools, facts: &facts, most: usize::MAX, now: self.now };
        let holds = self.derived.holds(&self.cluster.state, self.now);
        let consolidation = Consolidation::begin(&self.cluster.state, &holds, &mut self.memory, request);
        let mut simulator = self.gather();
        let gathered = clock.elapsed().as_secs_f64();
        simulator.leave_out_unplaced(effort);
        let simulate = |without: &BTreeSet<String>| Some(simulator.simulate(without, effort));
        let decision = consolidation.decide(&mut self.memory, simulator.waiting_pods(), simulate, self.now);
        (decision, clock.elapsed().as_secs_f64(), gathered)
    }

    /// Removes one node after the other, in the order of price per pod, each if that saves a tenth of its price. Returns the removed nodes and
    /// the saving in USD per hour.
    fn one_at_a_time(&self) -> (Vec<String>, f64) {
        let (simulator, state) = (self.gather(), &self.cluster.state);
        let nodes = self.cluster.nodes.iter().filter(|(_, pods)| !pods.is_empty());
        let mut order: Vec<(&String, usize, f64)> =
            nodes.map(|(node, pods)| (node, pods.len(), self.types.price(&state.claims[node]).usd())).collect();
        #[expect(clippy::cast_precision_loss, reason = "few pods")]
        let key = |(_, pods, price): &(&String, usize, f64)| price / *pods as f64;
        order.sort_by(|a, b| key(b).total_cmp(&key(a)));
        let (mut removed, mut price_of_removed, mut saving) = (BTreeSet::new(), 0.0, 0.0);
        for (node, _, price) in order {
            removed.insert(node.clone());
            let outcome = simulator.simulate(&removed, Effort::Quick);
            let purchases: f64 = outcome.purchases.values().map(|price| price.usd()).sum();
            let saved = price_of_removed + price - purchases;
            if outcome.obstacles.is_empty() && saved - saving >= price / 10.0 {
                (price_of_removed, saving) = (price_of_removed + price, saved);
            } else {
                removed.remove(node);
            }
        }
        (removed.into_iter().collect(), saving)
    }

    /// Executes decisions from this one on, until one removes nothing. Returns the number of decisions and of moved pods.
    fn execute(&mut self, first: Decision, effort: Effort) -> (usize, usize) {
        let (mut last, mut decisions, mut moved) = (first, 1, 0);
        while !last.claims.is_empty() && decisions < 60 {
            moved += last.pods;
            self.cluster.remove(&last.claims, &self.derived, (&self.settings, self.now));
            self.now += Duration::from_mins(1);
            last = self.decide(effort).0;
            decisions += 1;
        }
        (decisions, moved)
    }

    /// The bill of a fresh plan for all pods, USD per hour.
    fn fresh_bill(&self) -> f64 {
        let all: BTreeSet<String> = self.cluster.nodes.keys().cloned().collect();
        self.gather().simulate(&all, Effort::Quick).purchases.values().map(|price| price.usd()).sum()
    }

    fn pods_of(&self, claims: &[String]) -> usize {
        claims.iter().map(|claim| self.cluster.state.pods_on(claim).count()).sum()
    }
}

fn decisions(nodes: u64, seed: u64, efforts: &[Effort]) {
    for effort in efforts {
        let mut bench = Bench::new(cluster(nodes, seed, DEFAULT_PAYBACK));
        let (pods, bill) = (bench.cluster.pod_count(), bench.cluster.bill(&bench.types));
        // Fills the caches, as in a process that runs.
        drop(bench.gather());
        let (first, seconds, gathered) = bench.decide(*effort);
        assert!(first.saving.0 > 0, "nothing is saved");
        let (decisions, _) = bench.execute(first.clone(), *effort);
        let last_bill = bench.cluster.bill(&bench.types);
        bench.cluster.end_pods(100, &mut Rng::with_seed(seed));
        bench.now += Duration::from_mins(1);
        let (next, next_seconds, next_gathered) = bench.decide(*effort);
        println!(
            "| {nodes}, {pods} | {effort:?} | {seconds:.2} ({gathered:.3}) | {} | {} | {} | {:.2} of {bill:.2} | {decisions} | {:.2} | {next_seconds:.2} ({next_gathered:.3}) | {} | {} |",
            first.plans,
            first.claims.len(),
            first.pods,
            first.saving.usd(),
            last_bill,
            next.plans,
            next.claims.len(),
        );
    }
}

fn heuristic(nodes: u64, seed: u64) {
    let mut bench = Bench::new(cluster(nodes, seed, DEFAULT_PAYBACK));
    let (clock, bill) = (Instant::now(), bench.cluster.bill(&bench.types));
    let (removed, saved) = bench.one_at_a_time();
    let (pods, seconds) = (bench.pods_of(&removed), clock.elapsed().as_secs_f64());
    let (decision, decided, _) = bench.decide(Effort::Quick);
    let (by_search, usd) = (decision.pods, decision.saving.usd());
    println!("| {nodes} | {bill:.2} | {saved:.2} | {pods} | {seconds:.2} | {usd:.2} | {by_search} | {decided:.2} |");
}

/// Decisions until none, for clusters of 12, 40 and 300 nodes of five seeds each.
fn payback(payback: &str, seed: u64) {
    let (mut before, mut after, mut fresh, mut nodes, mut pods, mut moved) = (0.0, 0.0, 0.0, 0, 0, 0);
    for (size, seed) in [12, 40, 300].into_iter().flat_map(|size| (seed..seed + 5).map(move |seed| (size, seed))) {
        let mut bench = Bench::new(cluster(size, seed, payback));
        (before, pods) = (before + bench.cluster.bill(&bench.types), pods + bench.cluster.pod_count());
        let first = bench.decide(Effort::Quick).0;
        moved += bench.execute(first, Effort::Quick).1;
        (after, fresh) = (after + bench.cluster.bill(&bench.types), fresh + bench.fresh_bill());
        nodes += bench.cluster.nodes.len();
    }
    let over = (after / fresh - 1.0) * 100.0;
    println!("| {payback} | {before:.2} | {after:.2} | {over:+.1} % | {moved} of {pods} | {nodes} |");
}

fn main() {
    let mut arguments = std::env::args().filter_map(|argument| argument.parse().ok());
    let (most, seed) = (arguments.next().unwrap_or(2_000), arguments.next().unwrap_or(1));
    let all = [12, 40, 300, 2_000, 10_000].into_iter().zip(seed..);
    let clusters: Vec<(u64, u64)> = all.filter(|(nodes, _)| *nodes <= most).collect();
    println!(
        "| nodes, pods | plans | seconds (with the state) | plans made | removed | moved | USD/h saved | decisions until none | USD/h then | \
         after 100 changes: seconds | plans made | removed |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|---|---|");
    for (nodes, seed) in &clusters {
        let efforts = if *nodes <= 300 { &[Effort::Quick, Effort::Normal][..] } else { &[Effort::Quick] };
        decisions(*nodes, *seed, efforts);
    }
    println!("\n| nodes | USD/h | one at a time: saved | moved | seconds | search: saved | moved | seconds |");
    println!("|---|---|---|---|---|---|---|---|");
    for (nodes, seed) in clusters.iter().filter(|(nodes, _)| *nodes <= 300) {
        heuristic(*nodes, *seed);
    }
    if most >= 300 {
        println!(
            "\n| payback | USD/h | then | over a fresh plan | pods moved | nodes then |\n|---|---|---|---|---|---|"
        );
        for one in ["5m", "15m", "30m", DEFAULT_PAYBACK, "2h", "4h", "12h"] {
            payback(one, seed);
        }
    }
}
