//! A snapshot of free resources, holds and plans, indexed for constant-time verdicts.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::Hash;
use std::sync::Arc;
use std::time::Duration;

use rpds::{HashTrieMapSync, RedBlackTreeMapSync, RedBlackTreeSetSync};
use stowage_model::resources::Resources;
use stowage_model::time::UnixMillis;

use crate::extender::name::Name;
use crate::extender::pod_fields::ExtenderPod;
use crate::extender::room::{NodeEntry, NodeRoom};

/// Age past which a view restrains no pod, unless its input says otherwise.
pub const DEFAULT_MAX_AGE: Duration = Duration::from_mins(1);

/// The input of [`View::build`].
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ViewInput {
    /// Time up to which the nodes and pods are known: the last event or bookmark of their watches.
    pub as_of: UnixMillis,
    /// Past this age the view restrains no pod. Idle watches get a bookmark twice in this time.
    pub max_age: Duration,
    /// Nodes that exist as Node objects.
    pub nodes: Vec<NodeRoom>,
    /// Plans by pod, `namespace/name`. A pod leaves when it is bound or its plan is dropped.
    pub planned: BTreeMap<Arc<str>, PlannedPod>,
}

/// The node that a pod is planned for. Until the plan expires or is removed from the input, the pod passes the filter on no other node:
/// remove it when the node is gone or can no longer hold the pod.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PlannedPod {
    /// The node; `None` while it has no Node object yet.
    pub node: Option<Arc<str>>,
    /// NodeClaim of the node, or the node's name for a node that this controller does not manage.
    pub claim: Arc<str>,
    /// End of the plan: afterwards the pod may be bound to any node.
    pub expires_at: UnixMillis,
}

/// A snapshot that answers in constant time per node. Its maps are persistent: a clone shares them, and a change of a clone copies only
/// the path to what changes, so that the next view costs what changed since the last, whatever the size of the cluster.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct View {
    as_of: UnixMillis,
    max_age: Duration,
    /// Every node.
    nodes: HashTrieMapSync<Arc<str>, Arc<NodeEntry>>,
    /// Nodes with holds or being disrupted: the only nodes that filter evaluates.
    restrained: HashTrieMapSync<Arc<str>, Arc<NodeEntry>>,
    planned: HashTrieMapSync<Arc<str>, PlannedPod>,
    /// Pods with a hold, with the number of their holds.
    held: HashTrieMapSync<Arc<str>, usize>,
    /// Nodes with holds of displaced pods, by the owner whose successor pods may take them.
    displaced: HashTrieMapSync<Arc<str>, RedBlackTreeSetSync<Arc<str>>>,
    /// Number of nodes that are being disrupted.
    disrupting: usize,
    /// Number of nodes and plans by the time when their last hold expires.
    expiries: RedBlackTreeMapSync<UnixMillis, usize>,
}

/// The nodes on which the plan allows a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Standing<'v> {
    /// None yet: the planned node does not exist.
    Waiting(&'v str),
    /// This node only.
    Planned(&'v str),
    /// Every node with enough room besides the holds.
    Free,
}

impl View {
    /// A view of nodes and plans. Linear in them: the controllers change the last view instead.
    #[must_use]
    pub fn build(input: ViewInput) -> Self {
        let mut view = Self { as_of: input.as_of, max_age: input.max_age, ..Self::default() };
        input.nodes.into_iter().for_each(|node| view.set_node(node));
        input.planned.into_iter().for_each(|(pod, plan)| view.set_plan(pod, plan));
        view
    }

    /// Sets the time up to which nodes and pods are known, and the age past which the view restrains no pod.
    pub fn set_age(&mut self, as_of: UnixMillis, max_age: Duration) {
        (self.as_of, self.max_age) = (as_of, max_age);
    }

    /// Adds a node, or replaces the node of this name.
    pub fn set_node(&mut self, node: NodeRoom) {
        let entry = Arc::new(NodeEntry::new(node));
        if self.nodes.get(&entry.name).is_some_and(|known| *known == entry) {
            return;
        }
        self.remove_node(&entry.name);
        if entry.disrupting || !entry.holds.is_empty() {
            self.restrained.insert_mut(Arc::clone(&entry.name), Arc::clone(&entry));
        }
        self.disrupting += usize::from(entry.disrupting);
        if !entry.holds.is_empty() {
            self.add_expiry(entry.last_expiry);
        }
        for hold in &entry.holds {
            let holds = self.held.get(&hold.pod).copied().unwrap_or_default();
            self.held.insert_mut(Arc::clone(&hold.pod), holds + 1);
            if let (true, Some(owner)) = (hold.displaced, &hold.owner) {
                changed(&mut self.displaced, owner, |nodes| nodes.insert_mut(Arc::clone(&entry.name)));
            }
        }
        self.nodes.insert_mut(Arc::clone(&entry.name), entry);
    }

    /// Removes a node.
    pub fn remove_node(&mut self, name: &str) {
        let Some(entry) = self.nodes.get(name).cloned() else { return };
        self.nodes.remove_mut(name);
        self.restrained.remove_mut(name);
        self.disrupting -= usize::from(entry.disrupting);
        if !entry.holds.is_empty() {
            self.remove_expiry(entry.last_expiry);
        }
        for hold in &entry.holds {
            match self.held.get(&hold.pod).copied() {
                Some(holds) if holds > 1 => self.held.insert_mut(Arc::clone(&hold.pod), holds - 1),
                _ => drop(self.held.remove_mut(&hold.pod)),
            }
            if let (true, Some(owner)) = (hold.displaced, &hold.owner) {
                changed(&mut self.displaced, owner, |nodes| _ = nodes.remove_mut(name));
                if self.displaced.get(owner).is_some_and(RedBlackTreeSetSync::is_empty) {
                    self.displaced.remove_mut(owner);
                }
            }
        }
    }

    /// Sets the plan of a pod, `namespace/name`.
    pub fn set_plan(&mut self, pod: Arc<str>, plan: PlannedPod) {
        if self.planned.get(&pod) == Some(&plan) {
            return;
        }
        self.remove_plan(&pod);
        self.add_expiry(plan.expires_at);
        self.planned.insert_mut(pod, plan);
    }

    /// Removes the plan of a pod: it may be bound to any node.
    pub fn remove_plan(&mut self, pod: &str) {
        let Some(expires_at) = self.planned.get(pod).map(|plan| plan.expires_at) else { return };
        self.planned.remove_mut(pod);
        self.remove_expiry(expires_at);
    }

    /// Names of the nodes with holds.
    pub fn held_nodes(&self) -> impl Iterator<Item = &Arc<str>> {
        self.restrained.iter().filter(|(_, entry)| !entry.holds.is_empty()).map(|(name, _)| name)
    }

    fn add_expiry(&mut self, at: UnixMillis) {
        let count = self.expiries.get(&at).copied().unwrap_or_default();
        self.expiries.insert_mut(at, count + 1);
    }

    fn remove_expiry(&mut self, at: UnixMillis) {
        match self.expiries.get(&at).copied() {
            Some(count) if count > 1 => self.expiries.insert_mut(at, count - 1),
            _ => drop(self.expiries.remove_mut(&at)),
        }
    }

    /// True when the view is too old to restrain anyone. The default view, built from nothing, is.
    pub fn is_stale(&self, now: UnixMillis) -> bool {
        now.saturating_since(self.as_of) > self.max_age
    }

    /// False when every pod may be bound anywhere: no live hold, no live plan, no node being disrupted.
    pub(crate) fn restrains(&self, now: UnixMillis) -> bool {
        self.disrupting > 0 || self.expiries.last().is_some_and(|(last, _)| now < *last)
    }

    /// The pod's key, when it has a hold.
    pub(crate) fn own<'k>(&self, key: &'k str) -> Option<&'k str> {
        self.held.contains_key(key).then_some(key)
    }

    /// The node, when it has holds or is being disrupted.
    pub(crate) fn restrained(&self, name: &str) -> Option<&NodeEntry> {
        self.restrained.get(name).map(|entry| &**entry)
    }

    pub(crate) fn node(&self, name: &str) -> Option<&NodeEntry> {
        self.nodes.get(name).map(|entry| &**entry)
    }

    /// The nodes on which the plan allows a pod. A plan for a node that is being disrupted is void.
    pub(crate) fn standing(&self, now: UnixMillis, key: &str) -> Standing<'_> {
        let Some(plan) = self.planned.get(key).filter(|plan| now < plan.expires_at) else {
            return Standing::Free;
        };
        match &plan.node {
            None => Standing::Waiting(&plan.claim),
            Some(node) if self.restrained(node).is_some_and(|entry| entry.disrupting) => Standing::Free,
            Some(node) => Standing::Planned(node),
        }
    }

    /// The candidates where this pod may take the hold of a displaced pod. Of the other nodes with such holds none is evaluated: a
    /// controller may have thousands.
    pub(crate) fn slots(
        &self,
        now: UnixMillis,
        pod: &ExtenderPod<'_>,
        requests: &Resources,
        candidates: &[Name<'_>],
    ) -> BTreeSet<&str> {
        let Some((owner, nodes)) =
            pod.controller_uid().and_then(|owner| self.displaced.get(owner).map(|nodes| (owner, nodes)))
        else {
            return BTreeSet::new();
        };
        let key = pod.key();
        let own = self.own(&key);
        let controller = (&*pod.metadata.namespace, owner);
        candidates
            .iter()
            .filter(|name| nodes.contains(name.as_str()))
            .filter_map(|name| self.restrained(name.as_str()))
            .filter(|entry| !entry.disrupting && entry.slot(now, own, pod.priority(), controller, requests).is_some())
            .map(|entry| &*entry.name)
            .collect()
    }
}

/// Changes the set of a key, which is empty at first.
fn changed<K: Eq + Hash + Clone, T: Ord>(
    sets: &mut HashTrieMapSync<K, RedBlackTreeSetSync<T>>,
    key: &K,
    change: impl FnOnce(&mut RedBlackTreeSetSync<T>),
) {
    let mut set = sets.get(key).cloned().unwrap_or_default();
    change(&mut set);
    sets.insert_mut(key.clone(), set);
}
