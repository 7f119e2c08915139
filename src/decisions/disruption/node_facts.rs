//! What decisions read of each node and its pods, kept between them: only nodes that changed are read again.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;
use stowage_api::conditions;
use stowage_model::labels;
use stowage_model::offering::CapacityType;
use stowage_model::resources::Resources;
use stowage_model::time::UnixMillis;
use stowage_model::units::MicroUsd;
use stowage_planner::PodEntry;

use crate::decisions::disruption::blockers::{Blocker, protection};
use crate::decisions::disruption::eviction_cost::{EvictionUnits, of_node, of_node_with_ordinary_pods, settled_at};
use crate::state::node_state::reported_allocatable;
use crate::state::object_ext::{NodeClaimExt, ObjectExt};
use crate::state::pool_types::{InstanceTypes, ReadyPool, offering_of};
use crate::state::snapshot_cache::Inputs;
use crate::state::tables::ClusterState;

/// A node that is replaced before this age continues a row of replacements.
const REPLACEMENTS_IN_A_ROW: Duration = Duration::from_hours(1);

/// A node of ours.
#[derive(Clone, Debug, Default)]
pub struct NodeFacts {
    pub claim: String,
    pub node: String,
    pub pool: String,
    /// Marked, or being deleted.
    pub is_leaving: bool,
    /// The last time a pod was bound to or removed from the node, or its initialization. `None` before that.
    pub quiet_since: Option<UnixMillis>,
    /// What protects it: `karpenter.sh/do-not-disrupt` on the Node or a pod.
    pub protection: Option<Blocker>,
    /// Hourly price; zero when unknown.
    pub price: MicroUsd,
    /// As NodePool limits count it.
    pub capacity: Resources,
    pub is_spot: bool,
    pub created_at: UnixMillis,
    /// Replacements in a row that it is the last of ([`labels::REPLACEMENT_GENERATION`]).
    pub generation: u8,
    /// Pods on it that need another node when it is removed, those that are recreated in place included.
    pub pod_count: usize,
    /// What the kubelet reports as allocatable, and what is free of it.
    pub allocatable: Resources,
    pub free: Resources,
    /// Sum of the requests of these pods, and their elementwise maximum.
    pub load: Resources,
    pub largest: Resources,
    /// Pods to place elsewhere when it is removed.
    pub pods: Vec<PodEntry>,
    /// A pod among them whose spec is invalid, `namespace/name`.
    pub invalid_pod: Option<Arc<str>>,
    /// From this time on the cost of an eviction does not depend on the age of a pod.
    pub settled_at: UnixMillis,
    /// Eviction cost from then on: with the pods as they are, and if all were ordinary ones.
    pub settled_units: (EvictionUnits, EvictionUnits),
}

impl NodeFacts {
    fn read(state: &ClusterState, types: &InstanceTypes, node: &Node) -> Option<Self> {
        let (claim, name) = (state.claim_of(node)?, node.name_any());
        let pods = || state.pods_on(&name).filter(|pod| pod.needs_another_node());
        let (mut load, mut largest) = (Resources::default(), Resources::default());
        for entry in pods().filter_map(|pod| pod.entry.as_ref().ok()) {
            load.add(&entry.class.requests);
            largest.raise_to(&entry.class.requests);
        }
        let reschedulable = || state.pods_on(&name).filter(|pod| pod.reschedulable());
        // The claim has the time that an earlier leader observed.
        let last_event = state.last_pod_event.get(&*name).copied().max(claim.last_pod_event()).unwrap_or_default();
        let settled_at = settled_at(pods());
        let allocatable = reported_allocatable(node);
        let mut free = allocatable.clone();
        state
            .pods_on(&name)
            .filter(|pod| pod.active())
            .filter_map(|pod| pod.entry.as_ref().ok())
            .for_each(|entry| free.sub(&entry.class.requests));
        Some(Self {
            claim: claim.name_any(),
            pool: claim.node_pool().unwrap_or_default().to_owned(),
            is_leaving: claim.is_leaving() || node.is_deleting(),
            quiet_since: claim.true_since(conditions::INITIALIZED).map(|since| since.max(last_event)),
            protection: protection(state, node),
            price: types.price(claim),
            capacity: types.capacity(claim),
            is_spot: offering_of(claim).is_some_and(|(_, _, kind)| kind == CapacityType::Spot),
            created_at: claim.created_at(),
            generation: claim
                .annotations()
                .get(labels::REPLACEMENT_GENERATION)
                .and_then(|text| text.parse().ok())
                .unwrap_or(0),
            pod_count: pods().count(),
            allocatable,
            free,
            load,
            largest,
            pods: reschedulable().filter_map(|pod| pod.entry.as_ref().ok()).cloned().collect(),
            invalid_pod: reschedulable().find(|pod| pod.entry.is_err()).map(|pod| pod.key().into()),
            settled_at,
            settled_units: (of_node(pods(), settled_at), of_node_with_ordinary_pods(pods(), settled_at)),
            node: name.clone(),
        })
    }

    /// The replacements in a row that the node is the last of, and until when they count: while it is young.
    pub fn replacements(&self, now: UnixMillis) -> Option<(u8, UnixMillis)> {
        let until = self.created_at + REPLACEMENTS_IN_A_ROW;
        (self.generation > 0 && now < until).then_some((self.generation, until))
    }

    /// What the removal of the node costs in evictions, and what it would cost if all pods were ordinary ones.
    pub fn units(&self, state: &ClusterState, now: UnixMillis) -> (EvictionUnits, EvictionUnits) {
        if now >= self.settled_at {
            return self.settled_units;
        }
        let pods = || state.pods_on(&self.node);
        (of_node(pods(), now), of_node_with_ordinary_pods(pods(), now))
    }
}

/// The nodes of ours at one time.
#[derive(Clone, Debug, Default)]
pub struct Facts {
    /// By name of the node.
    pub nodes: Vec<Arc<NodeFacts>>,
    /// The instance types of the pools.
    pub types: Arc<InstanceTypes>,
}

/// The facts of one [`ClusterState`] as they were last read.
#[derive(Debug, Default)]
pub struct FactsCache {
    inputs: Option<Inputs>,
    types: Arc<InstanceTypes>,
    /// Revision of [`ClusterState::node_changes`] that `nodes` is up to date with.
    revision: u64,
    nodes: BTreeMap<String, Arc<NodeFacts>>,
}

impl FactsCache {
    /// The facts now. Takes as long as the nodes that changed.
    pub fn update(&mut self, state: &ClusterState, pools: &[ReadyPool]) -> Facts {
        let inputs = Inputs::of(state, pools);
        let current = self.inputs.as_ref().is_some_and(|known| known.is(&inputs));
        if !current {
            self.types = Arc::new(InstanceTypes::new(pools));
        }
        let changes = state.node_changes.since(self.revision).filter(|_| current);
        let changed: BTreeSet<&str> = if let Some(changes) = changes {
            changes.collect()
        } else {
            self.nodes.clear();
            state.nodes.keys().map(String::as_str).collect()
        };
        for name in changed {
            match state.nodes.get(name).and_then(|node| NodeFacts::read(state, &self.types, node)) {
                Some(facts) => drop(self.nodes.insert(name.to_owned(), Arc::new(facts))),
                None => drop(self.nodes.remove(name)),
            }
        }
        self.inputs = Some(inputs);
        self.revision = state.node_changes.revision();
        Facts { nodes: self.nodes.values().cloned().collect(), types: Arc::clone(&self.types) }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use stowage_test_objects as objects;

    use super::*;
    use crate::test_support::small_cluster::{NOW, SmallCluster};

    /// The facts of a cache that was up to date before `change`, which equal those of a new one.
    #[track_caller]
    fn after(cluster: &mut SmallCluster, cache: &mut FactsCache, change: impl FnOnce(&mut SmallCluster)) -> Facts {
        change(cluster);
        let facts = cache.update(&cluster.state, &cluster.pools);
        let new = FactsCache::default().update(&cluster.state, &cluster.pools);
        assert_eq!(format!("{:?}", facts.nodes), format!("{:?}", new.nodes));
        facts
    }

    #[test]
    fn facts_follow_every_change_of_the_node_its_claim_and_its_pods() {
        let (mut cluster, mut cache) = (SmallCluster::new(&[("p", json!({}))]), FactsCache::default());
        let mut after = |change: &dyn Fn(&mut SmallCluster)| after(&mut cluster, &mut cache, change).nodes;
        let facts = after(&|cluster| cluster.add_node("a", "p", "small/spot"));
        let expected = ("a", "p", MicroUsd(40_000), true, 0, false);
        let brief = |facts: &NodeFacts| {
            let NodeFacts { claim, pool, price, is_spot, pod_count, is_leaving, .. } = facts.clone();
            (claim, pool, price, is_spot, pod_count, is_leaving)
        };
        let (claim, pool, price, is_spot, pods, is_leaving) = expected;
        assert_eq!(brief(&facts[0]), (claim.into(), pool.into(), price, is_spot, pods, is_leaving));
        let facts = after(&|cluster| cluster.add_pod("x", Some("a"), "500m", &json!({})));
        assert_eq!((facts[0].pod_count, facts[0].pods.len(), facts[0].load.cpu.0), (1, 1, 500));
        let protected = json!({"metadata": {"annotations": {(labels::DO_NOT_DISRUPT): "true"}}});
        let facts = after(&|cluster| cluster.add_pod("x", Some("a"), "500m", &protected));
        assert_eq!(facts[0].protection, Some(Blocker::PodProtected("n/x".into())));
        let facts = after(&|cluster| cluster.state.delete_pod("n/x", NOW));
        assert_eq!((facts[0].pod_count, facts[0].quiet_since), (0, Some(NOW)));
        let facts = after(&|cluster| {
            let mut claim = (*cluster.state.claims["a"]).clone();
            claim.metadata.annotations = Some([(labels::DISRUPTING.to_owned(), "Drifted/".to_owned())].into());
            cluster.state.apply_claim(claim);
        });
        assert!(facts[0].is_leaving);
        let facts = after(&|cluster| cluster.add_node("b", "p", "large/on-demand"));
        assert_eq!(facts.len(), 2);
        let facts = after(&|cluster| cluster.state.delete_claim("a"));
        assert_eq!(facts.len(), 1, "the Node is not ours any more");
        let facts = after(&|cluster| cluster.state.delete_node("b"));
        assert!(facts.is_empty());
        // A Node that registers after its claim.
        let facts = after(&|cluster| {
            cluster.add_node("c", "p", "small/spot");
            cluster.state.delete_node("c");
        });
        assert!(facts.is_empty());
        let node = objects::node("late", &json!({"spec": {"providerID": "aws:///z/c"}}));
        let facts = after(&|cluster| cluster.state.apply_node(node.clone()));
        assert_eq!((facts[0].claim.as_str(), facts[0].node.as_str()), ("c", "late"));
    }

    #[test]
    fn nodes_that_did_not_change_are_not_read_again() {
        let (mut cluster, mut cache) = (SmallCluster::new(&[("p", json!({}))]), FactsCache::default());
        for name in ["a", "b"] {
            cluster.add_node(name, "p", "small/on-demand");
        }
        let before = cache.update(&cluster.state, &cluster.pools);
        cluster.add_pod("x", Some("b"), "1", &json!({}));
        let facts = cache.update(&cluster.state, &cluster.pools);
        assert!(Arc::ptr_eq(&facts.nodes[0], &before.nodes[0]) && !Arc::ptr_eq(&facts.nodes[1], &before.nodes[1]));
        // Prices change with the catalog.
        let catalog = stowage_model::offering::Catalog { region: "r".into(), instance_types: Vec::new() };
        cluster.pools[0].catalog = Arc::new(catalog);
        let facts = after(&mut cluster, &mut cache, |_| {});
        assert_eq!(facts.nodes[0].price, MicroUsd(0));
    }

    #[test]
    fn evictions_of_young_pods_become_cheaper_without_a_change() {
        let (mut cluster, mut cache) = (SmallCluster::new(&[("p", json!({}))]), FactsCache::default());
        cluster.add_node("a", "p", "small/on-demand");
        let young = json!({"metadata": {"creationTimestamp": NOW.rfc3339()}});
        cluster.add_pod("x", Some("a"), "1", &young);
        let facts = cache.update(&cluster.state, &cluster.pools);
        let units = |minutes| facts.nodes[0].units(&cluster.state, NOW + Duration::from_mins(minutes)).0.0;
        assert_eq!([0, 1, 5, 6].map(units), [3_000, 2_800, 2_000, 2_000]);
    }
}
