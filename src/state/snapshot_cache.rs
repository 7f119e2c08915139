//! The nodes of the last snapshot, so that the cost of a snapshot is proportional to the changes since then: a node is rebuilt
//! only when it, its claim or its pods changed, or while it changes with time.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use kube::ResourceExt;
use stowage_model::offering::Catalog;
use stowage_planner::{ColumnCache, NodeState};

use crate::state::pool_types::{InstanceTypes, ReadyPool};
use crate::state::tables::ClusterState;

/// The objects behind an entry of [`Problem::nodes`](stowage_planner::Problem::nodes).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeRef {
    /// Node name; `None` until a Node registers.
    pub node: Option<String>,
    /// NodeClaim; `None` for a node that is not managed by this controller.
    pub claim: Option<String>,
}

/// A cached node.
#[derive(Debug)]
pub struct CachedNode {
    pub state: Arc<NodeState>,
    pub node_ref: Arc<NodeRef>,
    /// False while the node changes with time, without a change of its objects.
    pub stable: bool,
}

/// Inputs that every node depends on.
#[derive(Clone, Debug)]
pub struct Inputs {
    /// [`DaemonSets::revision`](crate::state::daemon_sets::DaemonSets::revision).
    daemons: u64,
    catalogs: BTreeMap<String, Arc<Catalog>>,
}

impl Inputs {
    /// The inputs now.
    pub fn of(state: &ClusterState, pools: &[ReadyPool]) -> Self {
        let catalogs = pools.iter().map(|ready| (ready.pool.name_any(), Arc::clone(&ready.catalog)));
        Self { daemons: state.daemons.revision(), catalogs: catalogs.collect() }
    }

    /// Whether they are the same.
    pub fn is(&self, other: &Self) -> bool {
        let same = |((name, catalog), (other, another)): ((&String, &Arc<Catalog>), (&String, &Arc<Catalog>))| {
            name == other && Arc::ptr_eq(catalog, another)
        };
        self.daemons == other.daemons
            && self.catalogs.len() == other.catalogs.len()
            && self.catalogs.iter().zip(&other.catalogs).all(same)
    }
}

/// The nodes of the last snapshot of one [`ClusterState`].
#[derive(Debug, Default)]
pub struct SnapshotCache {
    inputs: Option<Inputs>,
    types: Arc<InstanceTypes>,
    /// The planner's column table, kept between plans.
    pub column_cache: ColumnCache,
    nodes: BTreeMap<String, CachedNode>,
    /// Revision of [`ClusterState::node_changes`] that `nodes` is up to date with.
    revision: u64,
    unstable: BTreeSet<String>,
    /// Nodes that could not be built; each snapshot tries again.
    left_out: BTreeSet<String>,
}

impl SnapshotCache {
    /// Begins a snapshot: returns the instance types of the pools, and the names of the nodes to rebuild, `held` nodes included.
    pub fn begin(
        &mut self,
        state: &ClusterState,
        pools: &[ReadyPool],
        held: impl Iterator<Item = String>,
    ) -> (Arc<InstanceTypes>, BTreeSet<String>) {
        let inputs = Inputs::of(state, pools);
        let current = self.inputs.as_ref().is_some_and(|known| known.is(&inputs));
        if !current {
            self.types = Arc::new(InstanceTypes::new(pools));
        }
        let changes = state.node_changes.since(self.revision).filter(|_| current);
        let mut rebuild: BTreeSet<String> = if let Some(changes) = changes {
            changes.map(str::to_owned).chain(self.unstable.iter().chain(&self.left_out).cloned()).collect()
        } else {
            self.nodes.clear();
            self.unstable.clear();
            self.left_out.clear();
            state.nodes.keys().cloned().collect()
        };
        rebuild.extend(held);
        self.inputs = Some(inputs);
        self.revision = state.node_changes.revision();
        (Arc::clone(&self.types), rebuild)
    }

    /// Leaves out a node that could not be built.
    pub fn leave_out(&mut self, name: String) {
        self.store(name.clone(), None);
        self.left_out.insert(name);
    }

    /// Names of the nodes that could not be built.
    pub fn left_out(&self) -> impl Iterator<Item = &String> {
        self.left_out.iter()
    }

    /// Stores a rebuilt node; `None` removes it.
    pub fn store(&mut self, name: String, node: Option<CachedNode>) {
        self.left_out.remove(&name);
        if node.as_ref().is_some_and(|node| !node.stable) {
            self.unstable.insert(name.clone());
        } else {
            self.unstable.remove(&name);
        }
        match node {
            Some(node) => drop(self.nodes.insert(name, node)),
            None => drop(self.nodes.remove(&name)),
        }
    }

    /// The instance types of the pools of the last snapshot.
    pub fn types(&self) -> &InstanceTypes {
        &self.types
    }

    /// The nodes, by name.
    pub fn nodes(&self) -> impl Iterator<Item = &CachedNode> {
        self.nodes.values()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use stowage_test_objects as objects;

    use super::*;

    #[test]
    fn a_node_that_could_not_be_built_is_tried_again_by_each_snapshot() {
        let (mut cache, mut state) = (SnapshotCache::default(), ClusterState::default());
        for name in ["a", "b"] {
            state.apply_node(objects::node(name, &json!({})));
        }
        let rebuilt = |cache: &mut SnapshotCache| cache.begin(&state, &[], std::iter::empty()).1.into_iter().collect();
        let first: Vec<String> = rebuilt(&mut cache);
        assert_eq!(first, ["a", "b"]);
        for name in first {
            cache.leave_out(name);
        }
        cache.store("a".into(), None);
        let again: Vec<String> = rebuilt(&mut cache);
        assert_eq!((again, cache.left_out().map(String::as_str).collect()), (vec!["b".to_owned()], vec!["b"]));
    }
}
