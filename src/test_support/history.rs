//! Random histories of a cluster: what watches and responses to writes may bring, in any order. Results that follow changes must equal
//! results that are computed from the final objects.

use std::collections::BTreeMap;

use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::{Node, Pod};
use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use serde_json::{Value, json};
use stowage_api::NodeClaim;
use stowage_model::labels;
use stowage_model::time::UnixMillis;
use stowage_test_objects as objects;

use crate::state::ClusterState;
use crate::state::plan_record::PlanRecord;

/// 256 histories, the same in every run; PROPTEST_CASES and PROPTEST_RNG_SEED try others.
pub(crate) fn config() -> ProptestConfig {
    let mut config = ProptestConfig { failure_persistence: None, ..ProptestConfig::default() };
    if config.rng_seed == RngSeed::Random {
        config.rng_seed = RngSeed::Fixed(14);
    }
    config
}

/// One event. `bits` chooses the details of an object.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Event {
    Pod {
        at: u8,
        on: u8,
        bits: u32,
    },
    PodGone(u8),
    Node {
        at: u8,
        id: u8,
        bits: u32,
    },
    NodeGone(u8),
    Claim {
        at: u8,
        id: u8,
        pods: u8,
        bits: u32,
    },
    ClaimGone(u8),
    /// A plan of a NodeClaim begins to be written.
    Assume {
        at: u8,
        pods: u8,
        bits: u32,
    },
    /// The write of the assumed plan of a NodeClaim ends.
    Settle(u8),
    /// A DaemonSet that requests this many CPUs; none deletes it.
    Daemons {
        at: u8,
        cpu: u8,
    },
    /// An earlier version of an object that is known, or whose deletion was observed.
    Late(u8),
    Wait(i64),
}

pub(crate) fn history() -> impl Strategy<Value = Vec<Event>> {
    let event = prop_oneof![
        6 => (0..6_u8, 0..6_u8, any::<u32>()).prop_map(|(at, on, bits)| Event::Pod { at, on, bits }),
        1 => (0..6_u8).prop_map(Event::PodGone),
        4 => (0..3_u8, 0..4_u8, any::<u32>()).prop_map(|(at, id, bits)| Event::Node { at, id, bits }),
        1 => (0..3_u8).prop_map(Event::NodeGone),
        5 => (0..3_u8, 0..4_u8, any::<u8>(), any::<u32>())
            .prop_map(|(at, id, pods, bits)| Event::Claim { at, id, pods, bits }),
        1 => (0..3_u8).prop_map(Event::ClaimGone),
        2 => (0..3_u8, any::<u8>(), any::<u32>()).prop_map(|(at, pods, bits)| Event::Assume { at, pods, bits }),
        1 => (0..3_u8).prop_map(Event::Settle),
        1 => (0..2_u8, 0..3_u8).prop_map(|(at, cpu)| Event::Daemons { at, cpu }),
        1 => any::<u8>().prop_map(Event::Late),
        2 => prop::sample::select(vec![1_i64, 200, 600, 1_500, 70_000, -30_000]).prop_map(Event::Wait),
    ];
    prop::collection::vec(event, 1..50)
}

#[derive(Clone, Debug)]
#[allow(clippy::large_enum_variant, reason = "a test holds a few dozen")]
enum Object {
    Pod(Pod),
    Node(Node),
    Claim(NodeClaim),
}

/// A state and what was applied to it.
#[derive(Debug)]
pub(crate) struct History {
    pub(crate) state: ClusterState,
    pub(crate) now: UnixMillis,
    pods: BTreeMap<String, Pod>,
    daemons: BTreeMap<String, DaemonSet>,
    /// Number of objects of each name that were deleted, part of their UIDs.
    generations: BTreeMap<String, u32>,
    version: u64,
    earlier: Vec<Object>,
}

const NAMES: [&str; 6] = ["n/p0", "n/p1", "n/p2", "n/p3", "m/p0", "m/p1"];

impl Default for History {
    fn default() -> Self {
        Self {
            state: ClusterState::default(),
            now: UnixMillis(1_000_000),
            pods: BTreeMap::new(),
            daemons: BTreeMap::new(),
            generations: BTreeMap::new(),
            version: 0,
            earlier: Vec::new(),
        }
    }
}

fn bit(bits: u32, at: u32) -> bool {
    bits >> at & 1 == 1
}

fn daemon_set(at: u8, cpu: u8) -> DaemonSet {
    let containers = json!([{"name": "c", "image": "i", "resources": {"requests": {"cpu": cpu.to_string()}}}]);
    let set = json!({"metadata": {"name": format!("daemons-{at}"), "namespace": "n", "uid": format!("owner-{}", at + 1)},
        "spec": {"selector": {}, "template": {"spec": {"containers": containers}}}});
    serde_json::from_value(set).unwrap()
}

fn picked(bits: u32, at: u32, of: u32) -> u32 {
    (bits >> at & 15) % of
}

impl History {
    pub(crate) fn apply(&mut self, event: Event) {
        match event {
            Event::Pod { at, on, bits } => {
                let pod = self.pod(at, on, bits);
                self.put(Object::Pod(pod));
            }
            Event::Node { at, id, bits } => {
                let node = self.node(&format!("node-{at}"), id, bits);
                self.put(Object::Node(node));
            }
            Event::Claim { at, id, pods, bits } => {
                let claim = self.claim(&format!("claim-{at}"), id, pods, bits);
                self.put(Object::Claim(claim));
            }
            Event::PodGone(at) => {
                let key = NAMES[usize::from(at)];
                self.state.delete_pod(key, self.now);
                self.pods.remove(key);
                self.bury(key);
            }
            Event::NodeGone(at) => {
                let name = format!("node-{at}");
                self.state.delete_node(&name);
                self.bury(&name);
            }
            Event::ClaimGone(at) => {
                let name = format!("claim-{at}");
                self.state.delete_claim(&name);
                self.bury(&name);
            }
            Event::Assume { at, pods, bits } => {
                let name = format!("claim-{at}");
                let plan = PlanRecord::of(&self.claim(&name, at, pods, bits));
                self.state.assume_plan(&name, plan);
            }
            Event::Settle(at) => {
                let name = format!("claim-{at}");
                if let Some(plan) = self.state.assumed_plan(&name).cloned() {
                    self.state.settle_plan(&name, &plan);
                }
            }
            Event::Daemons { at, cpu } => {
                let key = format!("n/daemons-{at}");
                if cpu == 0 {
                    self.state.daemons.delete(&key);
                    self.daemons.remove(&key);
                } else {
                    let set = daemon_set(at, cpu);
                    self.state.apply_daemon_set(&set);
                    self.daemons.insert(key, set);
                }
            }
            Event::Late(of) => {
                let Some(object) = self.earlier.get(usize::from(of) % self.earlier.len().max(1)).cloned() else {
                    return;
                };
                let before = self.versions();
                self.feed(&object);
                assert_eq!(before, self.versions(), "a late event changes nothing: {object:?}");
            }
            Event::Wait(millis) => self.now = UnixMillis(self.now.0 + millis),
        }
    }

    /// A state that got the final objects only, in another order.
    pub(crate) fn fresh(&self) -> ClusterState {
        let mut state = ClusterState::default();
        self.pods.values().rev().for_each(|pod| state.apply_pod(pod, self.now));
        self.state.claims.values().for_each(|claim| state.apply_claim((**claim).clone()));
        self.state.nodes.values().rev().for_each(|node| state.apply_node((**node).clone()));
        self.daemons.values().for_each(|set| state.apply_daemon_set(set));
        for name in self.state.claims.keys() {
            if let Some(plan) = self.state.assumed_plan(name) {
                state.assume_plan(name, plan.clone());
            }
        }
        state
    }

    fn versions(&self) -> Vec<(String, Option<u64>)> {
        let version = |text: &Option<String>| text.as_ref().and_then(|text| text.parse().ok());
        let nodes = self.state.nodes.iter().map(|(name, node)| (name, &node.metadata));
        let claims = self.state.claims.iter().map(|(name, claim)| (name, &claim.metadata));
        let objects = nodes.chain(claims).map(|(name, meta)| (name.clone(), version(&meta.resource_version)));
        let mut pods: Vec<_> = self.state.pods.iter().map(|(key, pod)| (key.clone(), pod.version)).collect();
        pods.sort();
        objects.chain(pods).collect()
    }

    fn bury(&mut self, name: &str) {
        *self.generations.entry(name.to_owned()).or_default() += 1;
    }

    fn put(&mut self, object: Object) {
        self.feed(&object);
        if let Object::Pod(pod) = &object {
            let meta = &pod.metadata;
            let key = [meta.namespace.clone().unwrap_or_default(), meta.name.clone().unwrap_or_default()].join("/");
            self.pods.insert(key, pod.clone());
        }
        // No write of ours concerns the claim of another provider.
        if !matches!(&object, Object::Claim(claim) if claim.spec.node_class_ref.group != "karpenter.k8s.aws") {
            self.earlier.push(object);
        }
    }

    fn feed(&mut self, object: &Object) {
        match object.clone() {
            Object::Pod(pod) => self.state.apply_pod(&pod, self.now),
            Object::Node(node) => self.state.apply_node(node),
            Object::Claim(claim) => self.state.apply_claim(claim),
        }
    }

    fn meta(&mut self, name: &str) -> Value {
        self.version += 1;
        let generation = self.generations.get(name).copied().unwrap_or_default();
        json!({"uid": format!("{name}-{generation}"), "resourceVersion": self.version.to_string()})
    }

    fn pod(&mut self, at: u8, on: u8, bits: u32) -> Pod {
        let key = NAMES[usize::from(at)];
        let (namespace, name) = key.split_once('/').unwrap();
        let mut meta = self.meta(key);
        meta["namespace"] = json!(namespace);
        // Of one UID it never changes.
        let is_early = (self.generations.get(key).copied().unwrap_or_default() + u32::from(at)).is_multiple_of(2);
        meta["creationTimestamp"] = json!(if is_early { "1970-01-01T00:10:00Z" } else { "1970-01-01T00:20:00Z" });
        if picked(bits, 1, 4) == 0 {
            meta["deletionTimestamp"] = json!("1970-01-01T00:30:00Z");
        }
        let owner = picked(bits, 5, 3);
        if owner > 0 {
            let kind = if picked(bits, 9, 8) == 0 { "DaemonSet" } else { "ReplicaSet" };
            meta["ownerReferences"] = json!([{"apiVersion": "apps/v1", "kind": kind, "name": "o",
                "uid": format!("owner-{owner}"), "controller": true}]);
        }
        let cpu = if picked(bits, 13, 8) == 0 { "lots".to_owned() } else { (picked(bits, 17, 3) + 1).to_string() };
        let phase = if picked(bits, 21, 6) == 0 { "Failed" } else { "Pending" };
        let node = (on < 3).then(|| format!("node-{on}"));
        objects::pod(
            name,
            &json!({"metadata": meta, "status": {"phase": phase}, "spec": {"nodeName": node, "containers": [
                {"name": "c", "image": "i", "resources": {"requests": {"cpu": cpu}}}]}}),
        )
    }

    fn node(&mut self, name: &str, id: u8, bits: u32) -> Node {
        let mut meta = self.meta(name);
        meta["creationTimestamp"] = json!(format!("1970-01-01T00:00:0{}Z", picked(bits, 0, 3)));
        meta["finalizers"] = if bit(bits, 4) { json!([labels::TERMINATION_FINALIZER]) } else { json!(["f"]) };
        meta["labels"] =
            json!({(labels::REGISTERED): bit(bits, 5).to_string(), (labels::INITIALIZED): bit(bits, 6).to_string()});
        if picked(bits, 7, 8) == 0 {
            meta["deletionTimestamp"] = json!("1970-01-01T00:30:00Z");
        }
        let keys =
            [None, None, Some(labels::PLANNED_TAINT), Some(labels::DISRUPTED_TAINT), Some(labels::UNREGISTERED_TAINT)];
        let taint = keys[picked(bits, 11, 5) as usize].map(|key| json!({"key": key, "effect": "NoSchedule"}));
        let taints: Vec<Value> = taint.into_iter().collect();
        let allocatable = match picked(bits, 15, 3) {
            0 => json!({}),
            cpu => json!({"cpu": (2 * cpu).to_string(), "memory": "8Gi", "pods": "20"}),
        };
        let ready = if bit(bits, 19) { "True" } else { "False" };
        let id = (id < 3).then(|| format!("aws:///z/i-{id}"));
        objects::node(
            name,
            &json!({"metadata": meta, "spec": {"providerID": id, "taints": taints},
                "status": {"allocatable": allocatable, "conditions": [{"type": "Ready", "status": ready}]}}),
        )
    }

    fn claim(&mut self, name: &str, id: u8, pods: u8, bits: u32) -> NodeClaim {
        let mut meta = self.meta(name);
        let planned: Vec<&str> =
            NAMES.iter().enumerate().filter(|(at, _)| pods >> at & 1 == 1).map(|(_, pod)| *pod).collect();
        let source = picked(bits, 26, 4);
        let source = (source > 0).then(|| format!("node-{}", source - 1));
        let source_claim = picked(bits, 28, 4);
        let source_claim = (source_claim > 0).then(|| format!("claim-{}", source_claim - 1));
        let until_ms = [None, None, Some(self.now.0 + 500), Some(self.now.0 + 60_000)][picked(bits, 24, 4) as usize];
        let owner = |at: usize| {
            json!({"uid": format!("owner-{}", 1 + at / 2 % 2), "at_ms": 900_000, "node": source,
                "source": source_claim, "until_ms": until_ms})
        };
        let owners: serde_json::Map<String, Value> = planned
            .iter()
            .enumerate()
            .filter(|(at, _)| at % 2 == 0)
            .map(|(at, pod)| ((*pod).to_owned(), owner(at)))
            .collect();
        let until = UnixMillis(self.now.0 + [-5_000, 500, 1_200, 60_000][picked(bits, 0, 4) as usize]);
        meta["annotations"] = json!({(labels::PLANNED_PODS): json!(planned).to_string(),
            (labels::PLANNED_OWNERS): json!(owners).to_string(), (labels::HOLD_UNTIL): until.rfc3339()});
        match picked(bits, 4, 6) {
            0 => meta["annotations"][labels::DISRUPTING] = json!("Empty/"),
            1 => meta["annotations"][labels::DISRUPTING] = json!("Drifted/"),
            2 => meta["deletionTimestamp"] = json!("1970-01-01T00:30:00Z"),
            _ => {}
        }
        meta["creationTimestamp"] = json!("1970-01-01T00:16:00Z");
        meta["finalizers"] = if bit(bits, 8) { json!([labels::TERMINATION_FINALIZER]) } else { json!(["f"]) };
        let pool = picked(bits, 9, 3);
        if pool > 0 {
            meta["labels"] = json!({(labels::NODE_POOL): format!("pool-{pool}")});
        }
        let conditions = ["Launched", "Registered", "Initialized"];
        let mut status = objects::launched("", &conditions[..picked(bits, 13, 4) as usize]);
        status["providerID"] = json!((id < 3).then(|| format!("aws:///z/i-{id}")));
        status["capacity"] =
            [json!({}), json!({"cpu": "2", "nvidia.com/gpu": "1"}), json!({"cpu": "4"}), json!({"cpu": "lots"})]
                [picked(bits, 17, 4) as usize]
                .clone();
        if bit(bits, 21) {
            status["nodeName"] = json!(format!("node-{}", picked(bits, 22, 3)));
        }
        // The class of a claim is immutable.
        let foreign = self.generations.get(name).is_some_and(|generation| generation % 4 == 3);
        let group = if foreign { "eks.amazonaws.com" } else { "karpenter.k8s.aws" };
        objects::claim(name, &json!({"metadata": meta, "status": status, "spec": {"nodeClassRef": {"group": group}}}))
    }
}
