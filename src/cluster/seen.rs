//! Nodes as the planner saw them last, so that a snapshot costs in proportion to what changed since the one before: a node
//! is worked out again only when it, its claim or its pods have changed.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use k8s_openapi::api::core::v1::Node;

use crate::api::NodeClaim;
use crate::scheduling::offering::Catalogue;
use crate::scheduling::problem::NodeState;

/// What a node was worked out from, and what came of it.
#[derive(Debug)]
struct Known {
    node: Arc<Node>,
    claim: Option<Arc<NodeClaim>>,
    pods: u64,
    state: Arc<NodeState>,
}

/// What concerns every node.
#[derive(Clone, Debug, Default)]
pub struct Stamp {
    /// Changes of DaemonSets so far.
    pub daemons: u64,
    /// What can be bought, by NodePool.
    pub catalogues: BTreeMap<String, Arc<Catalogue>>,
}

impl Stamp {
    fn is(&self, other: &Self) -> bool {
        let same = |((name, catalogue), (other, another)): ((&String, &Arc<Catalogue>), (&String, &Arc<Catalogue>))| {
            name == other && Arc::ptr_eq(catalogue, another)
        };
        self.daemons == other.daemons
            && self.catalogues.len() == other.catalogues.len()
            && self.catalogues.iter().zip(&other.catalogues).all(same)
    }
}

/// The nodes of the last snapshot.
#[derive(Debug, Default)]
pub struct Seen {
    stamp: Stamp,
    by_name: HashMap<String, Known>,
}

impl Seen {
    /// Forgets everything unless what concerns every node is as it was.
    pub fn begin(&mut self, stamp: Stamp) {
        if !self.stamp.is(&stamp) {
            self.by_name.clear();
        }
        self.stamp = stamp;
    }

    /// The node as it was worked out before, if nothing of it has changed. `pods` counts the changes of its pods.
    pub fn get(
        &self,
        name: &str,
        node: &Arc<Node>,
        claim: Option<&Arc<NodeClaim>>,
        pods: u64,
    ) -> Option<Arc<NodeState>> {
        let known = self.by_name.get(name)?;
        let same_claim = match (&known.claim, claim) {
            (Some(known), Some(claim)) => Arc::ptr_eq(known, claim),
            (None, None) => true,
            _ => false,
        };
        (Arc::ptr_eq(&known.node, node) && same_claim && known.pods == pods).then(|| Arc::clone(&known.state))
    }

    /// Keeps a node for the next snapshot.
    pub fn keep(
        &mut self,
        name: &str,
        node: &Arc<Node>,
        claim: Option<&Arc<NodeClaim>>,
        pods: u64,
        state: &Arc<NodeState>,
    ) {
        let known = Known { node: Arc::clone(node), claim: claim.cloned(), pods, state: Arc::clone(state) };
        self.by_name.insert(name.to_owned(), known);
    }

    /// Forgets the nodes that are gone.
    pub fn forget(&mut self, name: &str) {
        self.by_name.remove(name);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::sync::Mutex;

    use serde_json::{Value, json};

    use super::*;
    use crate::api::labels;
    use crate::cluster::State;
    use crate::cluster::snapshot::{ReadyPool, Snapshot, take};
    use crate::scheduling::problem::Settings;

    fn read<T: serde::de::DeserializeOwned>(object: Value) -> T {
        serde_json::from_value(object).unwrap()
    }

    /// Every third node is nobody's; the others are claims of one pool.
    fn node(state: &mut State, at: u64, ready: bool, life: u64) {
        let condition = json!({"type": "Ready", "status": if ready { "True" } else { "False" }});
        state.apply_node(read(json!({
            "metadata": {"name": format!("node-{at}"), "uid": format!("n-{at}-{life}"), "labels": {(labels::INITIALIZED): "true"}},
            "spec": {"providerID": format!("aws:///z/i-{at}")},
            "status": {"allocatable": {"cpu": "4", "memory": "8Gi", "pods": "20"}, "conditions": [condition]},
        })));
    }

    fn claim(state: &mut State, at: u64, planned: &[String]) {
        state.apply_claim(read(json!({
            "apiVersion": "karpenter.sh/v1", "kind": "NodeClaim",
            "metadata": {"name": format!("claim-{at}"), "uid": format!("c-{at}"), "labels": {(labels::NODE_POOL): "p"},
                "annotations": {(labels::PLANNED_PODS): json!(planned).to_string(), (labels::HOLD_UNTIL): "2030-01-01T00:00:00Z"}},
            "spec": {"requirements": [], "nodeClassRef": {"group": "g", "kind": "k", "name": "n"}},
            "status": {"providerID": format!("aws:///z/i-{at}"), "capacity": {"cpu": "4"}},
        })));
    }

    fn pod(state: &mut State, name: u64, on: Option<u64>, life: u64) {
        let condition = json!({"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "m"});
        state.apply_pod(
            &read(json!({
                "metadata": {"name": format!("pod-{name}"), "namespace": "n", "uid": format!("p-{name}-{life}")},
                "spec": {"nodeName": on.map(|at| format!("node-{at}")),
                    "containers": [{"name": "c", "image": "i", "resources": {"requests": {"cpu": format!("{}m", name + 1)}}}]},
                "status": {"conditions": if on.is_some() { json!([]) } else { json!([condition]) }},
            })),
            1,
        );
    }

    fn daemon(state: &mut State, cpu: u64) {
        state.apply_daemon_set(&read(json!({
            "metadata": {"name": "d", "namespace": "n", "uid": "d"},
            "spec": {"selector": {}, "template": {"spec": {"containers": [
                {"name": "c", "image": "i", "resources": {"requests": {"cpu": format!("{cpu}m")}}}]}}},
        })));
    }

    fn pools(catalogue: &Arc<Catalogue>) -> Vec<ReadyPool> {
        let pool = json!({"apiVersion": "karpenter.sh/v1", "kind": "NodePool", "metadata": {"name": "p"},
            "spec": {"template": {"spec": {"requirements": [], "nodeClassRef": {"group": "g", "kind": "k", "name": "n"}}}}});
        vec![ReadyPool { pool: Arc::new(read(pool)), catalogue: Arc::clone(catalogue) }]
    }

    fn shown(snapshot: &Snapshot) -> String {
        format!("{:?} {:?}", snapshot.problem.nodes, snapshot.subjects)
    }

    #[test]
    fn a_snapshot_is_what_it_would_be_without_the_one_before_and_shares_what_has_not_changed() {
        const NODES: u64 = 9;
        let empty = || Arc::new(Catalogue { region: "r".into(), instance_types: Vec::new() });
        let mut catalogue = empty();
        let mut state = State::default();
        for at in 0..NODES {
            node(&mut state, at, true, 0);
            if at % 3 > 0 {
                claim(&mut state, at, &[]);
            }
        }
        // An object that was deleted comes back with another UID only.
        let (mut node_lives, mut pod_lives) = ([0; 9], [0; 20]);
        let mut rng = fastrand::Rng::with_seed(7);
        let (mut before, mut shared): (Option<Snapshot>, usize) = (None, 0);
        let mut held_before = 0;
        for step in 0..600 {
            let (at, name) = (rng.u64(0..NODES), rng.u64(0..20));
            let (here, this) = (usize::try_from(at).unwrap(), usize::try_from(name).unwrap());
            let whole = match rng.u8(0..9) {
                0 => {
                    node(&mut state, at, rng.bool(), node_lives[here]);
                    false
                }
                1 => {
                    state.delete_node(&format!("node-{at}"));
                    node_lives[here] += 1;
                    node(&mut state, at, true, node_lives[here]);
                    false
                }
                2 if at % 3 > 0 => {
                    claim(&mut state, at, &[format!("n/pod-{name}")]);
                    false
                }
                3 => {
                    state.delete_pod(&format!("n/pod-{name}"), 1);
                    pod_lives[this] += 1;
                    false
                }
                4 => {
                    daemon(&mut state, name);
                    true
                }
                5 if name == 0 => {
                    catalogue = empty();
                    true
                }
                6 => {
                    pod(&mut state, name, None, pod_lives[this]);
                    false
                }
                _ => {
                    pod(&mut state, name, Some(at), pod_lives[this]);
                    false
                }
            };
            let look = |state: &State| take(state, &pools(&catalogue), &Settings::default(), &BTreeSet::new(), 1_000);
            let now = look(&state);
            let held = state.holds(1_000).by_claim.len();
            if let Some(before) = before.filter(|_| !whole) {
                let same = |node| before.problem.nodes.iter().any(|old| Arc::ptr_eq(old, node));
                let kept = now.problem.nodes.iter().filter(|node| same(node)).count();
                // A pod that moves changes two nodes; those that room is held on are not kept.
                assert!(kept + held + held_before + 2 >= now.problem.nodes.len(), "step {step}: {kept} kept");
                shared += kept;
            }
            state.seen = Mutex::default();
            assert_eq!(shown(&now), shown(&look(&state)), "step {step}");
            // The next step starts from what was seen last.
            before = Some(look(&state));
            held_before = held;
        }
        assert!(shared > 1_000, "{shared}");
    }
}
