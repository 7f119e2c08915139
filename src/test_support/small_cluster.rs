//! A cluster for tests of disruption: nodes of two instance types, with pods.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use stowage_model::labels;
use stowage_model::offering::{CapacityType, Catalog};
use stowage_model::time::UnixMillis;
use stowage_planner::{Effort, PlanSettings};
use stowage_test_objects as objects;

use crate::decisions::disruption::node_facts::{Facts, FactsCache};
use crate::decisions::disruption::simulated_removal::{SimulatedRemoval, Simulator};
use crate::state::plan_record::Holds;
use crate::state::pool_types::ReadyPool;
use crate::state::snapshot::SnapshotRequest;
use crate::state::snapshot_cache::SnapshotCache;
use crate::state::tables::ClusterState;

/// The present: every node and pod is an hour old.
pub(crate) const NOW: UnixMillis = UnixMillis(1_800_000_000_000);
/// CPUs of the types `small` and `large`, and their prices in micro-USD per hour: on-demand and spot.
const TYPES: [(&str, &str, &str, i64, i64); 2] =
    [("small", "2", "8Gi", 100_000, 40_000), ("large", "8", "32Gi", 400_000, 160_000)];

/// A cluster, and what can be bought.
pub(crate) struct SmallCluster {
    pub state: ClusterState,
    pub pools: Vec<ReadyPool>,
}

impl SmallCluster {
    /// NodePools with these patches, without nodes. They buy on-demand and spot nodes.
    pub fn new(pools: &[(&str, Value)]) -> Self {
        let types = TYPES.map(|(name, cpu, memory, on_demand, spot)| {
            let mut offerings = vec![objects::offering("z", on_demand), objects::offering("z", spot)];
            offerings[1].capacity_type = CapacityType::Spot;
            objects::instance_type(name, &[("cpu", cpu), ("memory", memory), ("pods", "110")], offerings)
        });
        let catalog =
            Arc::new(Catalog { region: "r".into(), instance_types: types.into_iter().map(Arc::new).collect() });
        let (mut state, mut ready) = (ClusterState::default(), Vec::new());
        for (name, patch) in pools {
            let disruption = json!({"consolidateAfter": "30s", "budgets": [{"nodes": "100%"}]});
            let mut full = json!({"spec": {"disruption": disruption}});
            json_patch::merge(&mut full, patch);
            let pool = objects::node_pool(name, &full);
            state.apply_pool(pool.clone());
            ready.push(ReadyPool { pool: Arc::new(pool), catalog: Arc::clone(&catalog) });
        }
        Self { state, pools: ready }
    }

    /// Adds an initialized node of a NodePool, with its NodeClaim: `TYPE/CAPACITY TYPE`.
    pub fn add_node(&mut self, name: &str, pool: &str, offering: &str) {
        let (type_name, capacity_type) = offering.split_once('/').unwrap();
        let (_, cpu, memory, ..) = TYPES.iter().find(|(name, ..)| *name == type_name).unwrap();
        let size = json!({"cpu": cpu, "memory": memory, "pods": "110"});
        let node_labels = json!({(labels::NODE_POOL): pool, (labels::INSTANCE_TYPE): type_name, (labels::ZONE): "z",
            (labels::CAPACITY_TYPE): capacity_type, (labels::ARCH): "amd64", (labels::OS): "linux", (labels::INITIALIZED): "true",
            (labels::HOSTNAME): name});
        let meta = json!({"creationTimestamp": (NOW - Duration::from_hours(1)).rfc3339(), "labels": node_labels});
        let mut status = objects::launched(name, &["Launched", "Registered", "Initialized"]);
        status["capacity"] = size.clone();
        self.state.apply_claim(objects::claim(name, &json!({"metadata": meta, "status": status})));
        let ready = json!({"capacity": size, "allocatable": size, "conditions": [{"type": "Ready", "status": "True"}]});
        let spec = json!({"providerID": format!("aws:///z/{name}")});
        self.state.apply_node(objects::node(name, &json!({"metadata": meta, "spec": spec, "status": ready})));
    }

    /// Adds a node of this type without a NodeClaim, as of another node group.
    pub fn add_node_of_others(&mut self, name: &str, type_name: &str) {
        let (_, cpu, memory, ..) = TYPES.iter().find(|(name, ..)| *name == type_name).unwrap();
        let size = json!({"cpu": cpu, "memory": memory, "pods": "110"});
        let ready = json!({"capacity": size, "allocatable": size, "conditions": [{"type": "Ready", "status": "True"}]});
        let meta = json!({"labels": {(labels::HOSTNAME): name, (labels::ZONE): "z"}});
        self.state.apply_node(objects::node(name, &json!({"metadata": meta, "status": ready})));
    }

    /// Adds a pod of a ReplicaSet with a CPU request: on this node, or else rejected.
    pub fn add_pod(&mut self, name: &str, node: Option<&str>, cpu: &str, patch: &Value) {
        let owner = json!({"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "r", "controller": true});
        let container = json!({"name": "c", "resources": {"requests": {"cpu": cpu}}});
        let rejected = json!([{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}]);
        let mut pod = json!({
            "metadata": {"creationTimestamp": (NOW - Duration::from_hours(1)).rfc3339(), "ownerReferences": [owner]},
            "spec": {"nodeName": node, "containers": [container]},
            "status": {"conditions": if node.is_some() { json!([]) } else { rejected }},
        });
        json_patch::merge(&mut pod, patch);
        self.state.apply_pod(&objects::pod(name, &pod), NOW - Duration::from_hours(1));
    }

    pub fn facts(&self) -> Facts {
        FactsCache::default().update(&self.state, &self.pools)
    }

    /// What simulates the removal of any node, once the present demand is planned.
    pub fn simulator(&self) -> Simulator {
        let mut simulator = self.simulator_before_plan();
        simulator.leave_out_unplaced(Effort::Normal);
        simulator
    }

    /// What simulates the removal of any node, before the present demand is planned.
    pub fn simulator_before_plan(&self) -> Simulator {
        let settings = PlanSettings::default();
        let request = SnapshotRequest { pools: &self.pools, settings: &settings, now: NOW };
        let claims = self.state.claims.keys().map(String::as_str);
        Simulator::new(&self.state, &Holds::default(), &self.facts(), &mut SnapshotCache::default(), request, claims)
    }

    /// The outcome of the removal of these claims.
    pub fn simulate(&self, without: &[&str]) -> SimulatedRemoval {
        self.simulator().simulate(&without.iter().map(|claim| (*claim).to_owned()).collect(), Effort::Normal)
    }
}
