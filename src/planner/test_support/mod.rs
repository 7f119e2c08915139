//! A problem of the planner under construction, on a small catalog, and what tests read from its plan.

mod checker;
pub(crate) mod plan_stages;

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::{Value, json};
use stowage_model::offering::{CapacityType, Catalog, InstanceType, Offering};
use stowage_model::resources::Resources;
use stowage_model::units::{Bytes, MicroUsd, Millicores};

use crate::columns::table::ColumnCache;
use crate::input::intern::Interner;
use crate::input::node::{NodeState, Tenure};
use crate::input::pool::Pool;
use crate::input::problem::Problem;
use crate::output::plan::Plan;

pub(crate) const ZONES: [&str; 3] = ["z-a", "z-b", "z-c"];

/// Sizes of two CPU families, an Arm one, and a GPU one; allocatable is capacity.
pub(crate) fn catalog() -> Arc<Catalog> {
    let mut types = Vec::new();
    for (family, arch, gib_per_cpu, price) in
        [("c1", "amd64", 2, 40_000), ("m1", "amd64", 4, 48_000), ("r1", "amd64", 8, 64_000), ("a1", "arm64", 4, 40_000)]
    {
        for cpus in [2, 4, 8, 16] {
            types.push(instance(family, cpus, cpus * gib_per_cpu, 0, arch, price * cpus));
        }
    }
    types.push(instance("g1", 4, 16, 1, "amd64", 500_000));
    types.push(instance("g1", 16, 64, 4, "amd64", 1_900_000));
    types.sort_by(|a, b| a.name.cmp(&b.name));
    Arc::new(Catalog { region: "here".into(), instance_types: types.into_iter().map(Arc::new).collect() })
}

fn instance(family: &str, cpus: i64, gib: i64, gpus: i64, arch: &str, price: i64) -> InstanceType {
    let name = format!("{family}.x{cpus}");
    let mut capacity = Resources {
        cpu: Millicores::from_cores(cpus),
        memory: Bytes::from_gib(gib),
        pods: cpus * 8,
        ephemeral_storage: Bytes::from_gib(20),
        ..Default::default()
    };
    capacity.set("nvidia.com/gpu", gpus);
    let labels = [
        ("kubernetes.io/arch", arch),
        ("kubernetes.io/os", "linux"),
        ("node.kubernetes.io/instance-type", &name),
        ("karpenter.k8s.aws/instance-family", family),
        ("karpenter.k8s.aws/instance-cpu", &cpus.to_string()),
    ];
    let mut labels: BTreeMap<String, String> = labels.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
    if gpus > 0 {
        labels.insert("karpenter.k8s.aws/instance-gpu-count".into(), gpus.to_string());
    }
    // Spot and the GPU family are not everywhere.
    let zones = if gpus > 0 { &ZONES[..2] } else { &ZONES[..] };
    let mut offerings = Vec::new();
    for zone in zones {
        for (capacity_type, share) in [(CapacityType::Spot, 40), (CapacityType::OnDemand, 100)] {
            let offering = Offering {
                zone: Arc::from(*zone),
                capacity_type,
                price: MicroUsd(price * share / 100),
                available: true,
                left: None,
                labels: Arc::default(),
                risk_permille: 0,
            };
            offerings.push(offering);
        }
    }
    InstanceType {
        name: Arc::from(name),
        labels,
        allocatable: capacity.clone(),
        capacity,
        volume_limits: [(Arc::from("ebs.csi.aws.com"), 3 * cpus)].into(),
        offerings,
    }
}

/// A problem under construction.
#[derive(Default)]
pub(crate) struct World {
    pub problem: Problem,
    pub interner: Interner,
    /// The column cache, kept between plans as in the service.
    pub column_cache: ColumnCache,
}

impl World {
    /// One pool named `default` of on-demand capacity.
    pub fn new() -> Self {
        Self::with_pools(&[("default", json!({}))])
    }

    /// Pools by name; each value is merged into the spec of a default pool (`requirements`, `taints`, `labels` are merged into the
    /// template).
    pub fn with_pools(pools: &[(&str, Value)]) -> Self {
        let mut world = Self::default();
        for (name, extra) in pools {
            world.pool(name, extra);
        }
        world
    }

    pub fn pool(&mut self, name: &str, extra: &Value) {
        self.problem.pools.push(read_pool(name, extra).unwrap());
    }

    /// Pods `name-0..count`.
    pub fn pods(&mut self, name: &str, count: usize, labels: &Value, cpu: &str, memory: &str, spec: &Value) {
        for index in 0..count {
            let entry = self.interner.intern(&pod(&format!("{name}-{index}"), labels, cpu, memory, spec)).unwrap();
            self.problem.pods.push(entry);
        }
    }

    /// A node of the default pool, with pods of 1 CPU and the given labels and spec running on it.
    pub fn node(&mut self, name: &str, zone: &str, cpus: i64, running: &[(&Value, &Value)]) -> &mut NodeState {
        let labels = [
            ("topology.kubernetes.io/zone", zone),
            ("kubernetes.io/hostname", name),
            ("kubernetes.io/arch", "amd64"),
            ("karpenter.sh/nodepool", "default"),
        ];
        let pods = running
            .iter()
            .enumerate()
            .map(|(i, (labels, spec))| {
                self.interner.intern(&pod(&format!("{name}-running-{i}"), labels, "1", "1Gi", spec)).unwrap()
            })
            .collect();
        self.problem.nodes.push(Arc::new(NodeState {
            name: Arc::from(name),
            labels: labels.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect(),
            taints: Vec::new(),
            allocatable: Resources {
                cpu: Millicores::from_cores(cpus),
                memory: Bytes::from_gib(cpus * 4),
                pods: 50,
                ephemeral_storage: Bytes::from_gib(20),
                ..Default::default()
            },
            pods,
            daemon_reserve: Resources::default(),
            daemons: Vec::new(),
            schedulable: true,
            initialized: true,
            price: MicroUsd(0),
            tenure: Tenure::default(),
        }));
        self.at(self.problem.nodes.len() - 1)
    }

    /// A node, to change it.
    pub fn at(&mut self, node: usize) -> &mut NodeState {
        Arc::make_mut(&mut self.problem.nodes[node])
    }

    pub fn daemon(&mut self, cpu: &str, spec: &Value) {
        self.labeled_daemon(cpu, &json!({}), spec);
    }

    pub fn labeled_daemon(&mut self, cpu: &str, labels: &Value, spec: &Value) {
        let template = pod("d", labels, cpu, "0", spec);
        let set = json!({"metadata": {"name": "d", "namespace": "kube-system"}, "spec": {"selector": {},
            "template": {"metadata": {"labels": labels}, "spec": serde_json::to_value(template.spec).unwrap()}}});
        let daemon = self.interner.intern_daemon(&serde_json::from_value(set).unwrap()).unwrap();
        self.problem.daemons.push(daemon);
    }

    /// Plans, proves the plan, and checks it with the independent checker.
    pub fn plan(&self) -> Plan {
        let plan = proven(&self.problem, &self.column_cache);
        self.check(&plan);
        plan
    }

    /// Checks a plan with the independent checker.
    pub fn check(&self, plan: &Plan) {
        checker::check(&self.problem, plan).unwrap();
    }
}

/// A plan with what can be proven of it.
pub(crate) fn proven(problem: &Problem, cache: &ColumnCache) -> Plan {
    let mut plan = crate::plan(problem, cache);
    plan.prove();
    plan
}

pub(crate) fn pod(
    name: &str,
    labels: &Value,
    cpu: &str,
    memory: &str,
    spec: &Value,
) -> k8s_openapi::api::core::v1::Pod {
    let mut requests = json!({"cpu": cpu, "memory": memory});
    let mut full = spec.as_object().cloned().unwrap_or_default();
    if let Some(extra) = full.remove("requests") {
        requests.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    }
    let mut container = json!({"name": "c", "resources": {"requests": requests}});
    if let Some(ports) = full.remove("ports") {
        container["ports"] = ports;
    }
    full.insert("containers".into(), json!([container]));
    let namespace = full.remove("namespace").unwrap_or(json!("default"));
    serde_json::from_value(json!({"metadata": {"name": name, "namespace": namespace, "labels": labels}, "spec": full}))
        .unwrap()
}

pub(crate) fn spread(key: &str, labels: &Value, extra: &Value) -> Value {
    let mut constraint = json!({"maxSkew": 1, "topologyKey": key, "whenUnsatisfiable": "DoNotSchedule", "labelSelector": {"matchLabels": labels}});
    constraint.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    json!({"topologySpreadConstraints": [constraint]})
}

pub(crate) fn affinity(kind: &str, key: &str, labels: &Value) -> Value {
    json!({"affinity": {kind: {"requiredDuringSchedulingIgnoredDuringExecution":
        [{"topologyKey": key, "labelSelector": {"matchLabels": labels}}]}}})
}

pub(crate) const ZONE: &str = "topology.kubernetes.io/zone";
pub(crate) const HOST: &str = "kubernetes.io/hostname";

pub(crate) fn zones(plan: &Plan) -> BTreeMap<String, usize> {
    let mut out = BTreeMap::new();
    for node in &plan.new_nodes {
        *out.entry(node.choices[0].zone.to_string()).or_default() += node.pods.len();
    }
    out
}

pub(crate) fn types(plan: &Plan) -> Vec<String> {
    plan.new_nodes.iter().map(|n| n.choices[0].instance_type.name.to_string()).collect()
}

pub(crate) fn reason(plan: &Plan) -> &str {
    &plan.unschedulable.first().expect("a pod is unschedulable").reason
}

pub(crate) fn node_affinity(terms: &Value) -> Value {
    json!({"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}})
}

pub(crate) fn expression(key: &str, operator: &str, values: &[&str]) -> Value {
    json!({"key": key, "operator": operator, "values": values})
}

pub(crate) fn one(key: &str, operator: &str, values: &[&str]) -> Value {
    node_affinity(&json!([{"matchExpressions": [expression(key, operator, values)]}]))
}

/// Whether a plan has this lower bound, in micro-USD per hour, up to the rounding of the LP.
pub(crate) fn is_bound(plan: &Plan, micro_usd: i64) -> bool {
    plan.lower_bound.is_some_and(|bound| (micro_usd - 1..=micro_usd).contains(&bound.0))
}

/// A world with one default pool and one pod of 1 CPU with this spec.
pub(crate) fn lone(spec: &Value) -> World {
    let mut world = World::new();
    world.pods("p", 1, &json!({"app": "p"}), "1", "1Gi", spec);
    world
}

/// A pool of on-demand capacity, or of the given `capacity-types`, with the other members merged into it.
pub(crate) fn read_pool(name: &str, extra: &Value) -> Result<Pool, crate::input::pool::PoolError> {
    let on_demand = json!(["on-demand"]);
    let capacity_types = extra.get("capacity-types").unwrap_or(&on_demand);
    let mut requirements =
        vec![json!({"key": "karpenter.sh/capacity-type", "operator": "In", "values": capacity_types})];
    requirements.extend(extra.get("requirements").and_then(Value::as_array).cloned().unwrap_or_default());
    let mut spec = json!({"template": {
        "metadata": {"labels": extra.get("labels").cloned().unwrap_or(json!({}))},
        "spec": {"requirements": requirements, "taints": extra.get("taints").cloned().unwrap_or(json!([])),
            "startupTaints": extra.get("startupTaints").cloned().unwrap_or(json!([])),
            "nodeClassRef": {"group": "karpenter.k8s.aws", "kind": "EC2NodeClass", "name": "default"}}}});
    for key in ["weight", "limits"] {
        if let Some(value) = extra.get(key) {
            spec[key] = value.clone();
        }
    }
    let object = json!({"apiVersion": "karpenter.sh/v1", "kind": "NodePool", "metadata": {"name": name}, "spec": spec});
    Pool::new(&serde_json::from_value(object).unwrap(), catalog(), Resources::default(), 0)
}
