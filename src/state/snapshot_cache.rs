//! Nodes as the planner saw them last, so that a snapshot costs in proportion to what changed since the one before: a node
//! is worked out again only when it, its claim or its pods have changed, or while time alone may change it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use k8s_openapi::api::core::v1::Node;

use crate::model::offering::Catalog;
use crate::planner::columns::table::ColumnCache;
use crate::planner::input::node::NodeState;
use crate::state::snapshot::{NodeRef, ReadyPool, Types};

/// A node as it was worked out.
#[derive(Debug)]
pub struct CachedNode {
    /// What the planner sees.
    pub state: Arc<NodeState>,
    /// What it is.
    pub subject: Arc<NodeRef>,
    /// Stays as it is until something changes.
    pub settled: bool,
}

/// What concerns every node.
#[derive(Clone, Debug, Default)]
pub struct Stamp {
    /// Changes of DaemonSets so far.
    pub daemons: u64,
    /// What can be bought, by NodePool.
    pub catalogs: BTreeMap<String, Arc<Catalog>>,
}

impl Stamp {
    fn is(&self, other: &Self) -> bool {
        let same = |((name, catalog), (other, another)): ((&String, &Arc<Catalog>), (&String, &Arc<Catalog>))| {
            name == other && Arc::ptr_eq(catalog, another)
        };
        self.daemons == other.daemons
            && self.catalogs.len() == other.catalogs.len()
            && self.catalogs.iter().zip(&other.catalogs).all(same)
    }
}

/// The nodes of the last snapshot, and the names of those that have changed since.
#[derive(Debug, Default)]
pub struct SnapshotCache {
    stamp: Option<Stamp>,
    types: Arc<Types>,
    /// The planner's column table, kept between plans.
    pub column_cache: ColumnCache,
    nodes: BTreeMap<String, CachedNode>,
    changed: BTreeSet<String>,
    unsettled: BTreeSet<String>,
}

impl SnapshotCache {
    /// Notes that a node, its claim or its pods changed.
    pub fn note(&mut self, node: &str) {
        if !self.changed.contains(node) {
            self.changed.insert(node.to_owned());
        }
    }

    /// Begins a snapshot: where what concerns every node is not as it was, all of `nodes` have changed. Returns the types of
    /// the pools.
    pub fn begin(&mut self, stamp: Stamp, pools: &[ReadyPool], nodes: &BTreeMap<String, Arc<Node>>) -> Arc<Types> {
        if !self.stamp.as_ref().is_some_and(|known| known.is(&stamp)) {
            self.nodes.clear();
            self.changed = nodes.keys().cloned().collect();
            self.types = Arc::new(Types::new(pools));
        }
        self.stamp = Some(stamp);
        Arc::clone(&self.types)
    }

    /// Names of the nodes that must be worked out anew, those that room is `held` on with them.
    pub fn changed(&mut self, held: impl Iterator<Item = String>) -> BTreeSet<String> {
        let mut out = std::mem::take(&mut self.changed);
        out.extend(self.unsettled.iter().cloned());
        out.extend(held);
        out
    }

    /// Keeps a node as it is now; `None` forgets it.
    pub fn keep(&mut self, name: String, known: Option<CachedNode>) {
        if known.as_ref().is_some_and(|known| !known.settled) {
            self.unsettled.insert(name.clone());
        } else {
            self.unsettled.remove(&name);
        }
        match known {
            Some(known) => drop(self.nodes.insert(name, known)),
            None => drop(self.nodes.remove(&name)),
        }
    }

    /// The nodes, by name.
    pub fn nodes(&self) -> impl Iterator<Item = &CachedNode> {
        self.nodes.values()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::model::labels;
    use crate::planner::input::settings::Settings;
    use crate::state::ClusterState;
    use crate::state::snapshot::{Snapshot, take};
    use crate::test_support::objects;

    const NODES: u64 = 9;

    fn read<T: serde::de::DeserializeOwned>(object: &Value) -> T {
        serde_json::from_value(object.clone()).unwrap()
    }

    /// A state, and the objects that it was told of and that are still there.
    #[derive(Default)]
    struct World {
        state: ClusterState,
        nodes: BTreeMap<u64, Value>,
        claims: BTreeMap<u64, Value>,
        pods: BTreeMap<u64, Value>,
        daemon: Option<Value>,
        /// An object that was deleted comes back with another UID only.
        lives: u64,
    }

    impl World {
        fn node(&mut self, at: u64, ready: bool, initialized: bool) {
            let condition = json!({"type": "Ready", "status": if ready { "True" } else { "False" }});
            let node = json!({
                "metadata": {"name": format!("node-{at}"), "uid": format!("n-{at}-{}", self.lives),
                    "labels": {(labels::INITIALIZED): initialized.to_string()}},
                "spec": {"providerID": format!("aws:///z/i-{at}")},
                "status": {"allocatable": {"cpu": "4", "memory": "8Gi", "pods": "20"}, "conditions": [condition]},
            });
            self.state.apply_node(read(&node));
            self.nodes.insert(at, node);
        }

        fn claim(&mut self, at: u64, planned: &[String], leaving: bool, sized: bool) {
            let capacity = if sized { json!({"cpu": "4"}) } else { json!({}) };
            let patch = json!({
                "metadata": {"uid": format!("c-{at}-{}", self.lives), "labels": {(labels::NODE_POOL): "p"},
                    "annotations": {(labels::PLANNED_PODS): json!(planned).to_string(), (labels::HOLD_UNTIL): "2030-01-01T00:00:00Z"}},
                "status": {"providerID": format!("aws:///z/i-{at}"), "capacity": capacity},
            });
            let mut claim = json!(objects::claim(&format!("claim-{at}"), &patch));
            if leaving {
                claim["metadata"]["annotations"][labels::DISRUPTING] = json!("Drifted/");
            }
            self.state.apply_claim(read(&claim));
            self.claims.insert(at, claim);
        }

        fn pod(&mut self, name: u64, on: Option<u64>, ending: bool) {
            let condition =
                json!({"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "m"});
            let mut pod = json!({
                "metadata": {"name": format!("pod-{name}"), "namespace": "n", "uid": format!("p-{name}-{}", self.lives)},
                "spec": {"nodeName": on.map(|at| format!("node-{at}")),
                    "containers": [{"name": "c", "image": "i", "resources": {"requests": {"cpu": format!("{}m", name + 1)}}}]},
                "status": {"conditions": if on.is_some() { json!([]) } else { json!([condition]) }},
            });
            if ending {
                pod["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
            }
            self.state.apply_pod(&read(&pod), 1);
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

        /// A state that was told of what is there now, and of nothing else.
        fn anew(&self) -> ClusterState {
            let mut state = ClusterState::default();
            self.nodes.values().for_each(|node| state.apply_node(read(node)));
            self.claims.values().for_each(|claim| state.apply_claim(read(claim)));
            self.pods.values().for_each(|pod| state.apply_pod(&read(pod), 1));
            self.daemon.iter().for_each(|daemon| state.apply_daemon_set(&read(daemon)));
            state
        }
    }

    fn pools(catalog: &Arc<Catalog>) -> Vec<ReadyPool> {
        let pool = Arc::new(objects::node_pool("p", &json!({})));
        vec![ReadyPool { pool, catalog: Arc::clone(catalog) }]
    }

    fn shown(snapshot: &Snapshot) -> String {
        let usage = snapshot.problem.pools.iter().map(|pool| (pool.usage.cpu.0, pool.node_count));
        let pods: Vec<_> = snapshot.problem.pods.iter().map(|pod| &pod.key).collect();
        format!("{:?} {:?} {:?} {pods:?}", snapshot.problem.nodes, snapshot.node_refs, usage.collect::<Vec<_>>())
    }

    #[test]
    fn a_snapshot_is_what_it_would_be_without_the_one_before_and_shares_what_has_not_changed() {
        let empty = || Arc::new(Catalog { region: "r".into(), instance_types: Vec::new() });
        let mut catalog = empty();
        let mut world = World::default();
        for at in 0..NODES {
            world.node(at, true, true);
            // Every third node is nobody's; the others are claims of one pool.
            if at % 3 > 0 {
                world.claim(at, &[], false, true);
            }
        }
        let mut rng = fastrand::Rng::with_seed(7);
        let (mut before, mut shared): (Option<Snapshot>, usize) = (None, 0);
        let (mut volatile_before, mut flying, mut leaving) = (0, 0, 0);
        for step in 0..1_500 {
            let (at, name) = (rng.u64(0..NODES), rng.u64(0..20));
            let mut whole = false;
            match rng.u8(0..13) {
                0 => world.node(at, rng.bool(), rng.u8(0..4) > 0),
                1 => {
                    world.state.delete_node(&format!("node-{at}"));
                    world.nodes.remove(&at);
                    world.lives += 1;
                }
                2 | 3 if at % 3 > 0 => {
                    let planned = if rng.bool() { vec![format!("n/pod-{name}")] } else { Vec::new() };
                    world.claim(at, &planned, rng.u8(0..4) == 0, rng.bool());
                }
                4 => {
                    world.state.delete_claim(&format!("claim-{at}"));
                    world.claims.remove(&at);
                    world.lives += 1;
                }
                5 => {
                    world.state.delete_pod(&format!("n/pod-{name}"), 1);
                    world.pods.remove(&name);
                    world.lives += 1;
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
            let without: BTreeSet<String> =
                if rng.u8(0..3) == 0 { [format!("claim-{at}")].into() } else { BTreeSet::new() };
            let look =
                |state: &ClusterState, without| take(state, &pools(&catalog), &Settings::default(), without, 1_000);
            let now = look(&world.state, &without);
            assert_eq!(shown(&now), shown(&look(&world.anew(), &without)), "step {step}");
            let now = look(&world.state, &BTreeSet::new());
            let up = |node: &&Arc<NodeState>| node.initialized;
            let volatile =
                world.state.holds(1_000).by_claim.len() + now.problem.nodes.iter().filter(|node| !up(node)).count();
            if let Some(before) = before.filter(|_| !whole) {
                let same = |node| before.problem.nodes.iter().any(|old| Arc::ptr_eq(old, node));
                let kept = now.problem.nodes.iter().filter(|node| same(node)).count();
                // A pod that moves changes two nodes; those that are not settled are not kept.
                assert!(kept + volatile + volatile_before + 2 >= now.problem.nodes.len(), "step {step}: {kept} kept");
                shared += kept;
            }
            volatile_before = volatile;
            flying += world.state.in_flight.len();
            leaving += world.state.claim_index.leaving.len();
            before = Some(now);
        }
        assert!(shared > 3_000 && flying > 500 && leaving > 500, "{shared} {flying} {leaving}");
    }

    #[test]
    fn a_snapshot_that_ended_halfway_loses_no_change() {
        let catalog = Arc::new(Catalog { region: "r".into(), instance_types: Vec::new() });
        let look = |state: &ClusterState| take(state, &pools(&catalog), &Settings::default(), &BTreeSet::new(), 1_000);
        let mut world = World::default();
        world.node(0, true, true);
        look(&world.state);
        world.pod(1, Some(0), false);
        let halfway = std::thread::scope(|scope| {
            let snapshot = scope.spawn(|| {
                let mut seen = world.state.seen.lock().unwrap();
                assert_eq!(seen.changed(std::iter::empty()).len(), 1);
                panic!("on purpose, with the changes taken out");
            });
            snapshot.join()
        });
        assert!(halfway.is_err() && world.state.seen.is_poisoned());
        assert_eq!(shown(&look(&world.state)), shown(&look(&world.anew())));
        assert!(!world.state.seen.is_poisoned());
    }
}
