//! An immutable snapshot of free resources, holds and plans, indexed for constant-time verdicts.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use crate::extender::pod::ExtenderPod;
use crate::model::resources::Resources;
use crate::model::time::UnixMillis;

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

/// A node and the room on it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NodeRoom {
    /// Node name.
    pub name: Arc<str>,
    /// Allocatable resources; the base of [`crate::extender::prioritize`]'s shares.
    pub allocatable: Resources,
    /// Allocatable less the requests of every pod bound to the node (daemons included).
    pub free: Resources,
    /// Requests of daemon pods that are expected but not bound yet.
    pub daemon_reserve: Resources,
    /// Being disrupted: no new pod may be bound, except DaemonSet pods and pods that tolerate `karpenter.sh/disrupted`.
    pub disrupting: bool,
    /// Holds for planned pods that are not bound yet.
    pub holds: Vec<Hold>,
}

/// Room on a node that is reserved for one pod.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Hold {
    /// `namespace/name` of that pod.
    pub pod: Arc<str>,
    /// UID of the pod's controlling owner.
    pub owner: Option<Arc<str>>,
    /// The pod was evicted or deleted: the first successor pod, of the same owner, takes its room.
    pub displaced: bool,
    /// Requests of the pod, one pod slot included.
    pub requests: Resources,
    /// Priority of the pod: pods of higher priority are not bound by the hold.
    pub priority: i32,
    /// End of the hold.
    pub expires_at: UnixMillis,
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

/// An immutable snapshot that answers in constant time per node. See [`View::build`].
#[derive(Debug, Default)]
pub struct View {
    as_of: UnixMillis,
    max_age: Duration,
    nodes: Vec<NodeEntry>,
    /// Every node.
    by_name: HashMap<Arc<str>, usize>,
    /// Nodes with holds or being disrupted: the only nodes that filter evaluates.
    restrained: HashMap<Arc<str>, usize>,
    planned: HashMap<Arc<str>, PlannedPod>,
    /// Pods with a hold.
    held: HashSet<Arc<str>>,
    /// Nodes with holds of displaced pods, by the owner whose successor pods may take them.
    displaced: HashMap<Arc<str>, Vec<usize>>,
    any_disrupting: bool,
    /// Expiry of the last hold or plan.
    last_expiry: UnixMillis,
}

/// A node with precomputed sums.
#[derive(Debug)]
pub(crate) struct NodeEntry {
    pub(crate) name: Arc<str>,
    pub(crate) allocatable: Resources,
    pub(crate) disrupting: bool,
    /// Free room less the daemon reserve.
    open: Resources,
    /// `open` less every hold: the room when all holds bind, which is the usual case.
    leftover: Resources,
    holds: Vec<Hold>,
    /// While `now` is before this and the pod's priority is not above `min_priority`, every hold binds.
    first_expiry: UnixMillis,
    last_expiry: UnixMillis,
    min_priority: i32,
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

/// Room that a node has for a pod.
pub(crate) enum Leftover<'v> {
    /// Precomputed.
    Known(&'v Resources),
    /// Computed for this pod.
    Computed(Resources),
}

impl Leftover<'_> {
    pub(crate) fn get(&self) -> &Resources {
        match self {
            Self::Known(resources) => resources,
            Self::Computed(resources) => resources,
        }
    }
}

impl NodeEntry {
    fn new(node: NodeRoom) -> Self {
        let mut open = node.free;
        open.sub(&node.daemon_reserve);
        let mut leftover = open.clone();
        for hold in &node.holds {
            leftover.sub(&hold.requests);
        }
        Self {
            name: node.name,
            allocatable: node.allocatable,
            disrupting: node.disrupting,
            open,
            leftover,
            first_expiry: node.holds.iter().map(|hold| hold.expires_at).min().unwrap_or(UnixMillis::MAX),
            last_expiry: node.holds.iter().map(|hold| hold.expires_at).max().unwrap_or(UnixMillis::MIN),
            min_priority: node.holds.iter().map(|hold| hold.priority).min().unwrap_or(i32::MAX),
            holds: node.holds,
        }
    }

    /// Room for a pod of this priority besides the holds that bind it, and the number of those holds. `own` is the pod's key when it has
    /// a hold on some node, `slot` the hold of another pod that it may take.
    pub(crate) fn leftover(
        &self,
        now: UnixMillis,
        own: Option<&str>,
        priority: i32,
        slot: Option<&Hold>,
    ) -> (Leftover<'_>, usize) {
        if now >= self.last_expiry {
            return (Leftover::Known(&self.open), 0);
        }
        let is_own = |hold: &Hold| own.is_some_and(|own| *hold.pod == *own);
        if slot.is_none()
            && now < self.first_expiry
            && priority <= self.min_priority
            && !(own.is_some() && self.holds.iter().any(is_own))
        {
            return (Leftover::Known(&self.leftover), self.holds.len());
        }
        let mut left = self.open.clone();
        let mut binding = 0;
        for hold in &self.holds {
            let binds = now < hold.expires_at
                && hold.priority >= priority
                && !is_own(hold)
                && !slot.is_some_and(|slot| std::ptr::eq(slot, hold));
            if binds {
                left.sub(&hold.requests);
                binding += 1;
            }
        }
        (Leftover::Computed(left), binding)
    }

    /// A live hold of a displaced pod of `owner`, in the namespace of the owner, that a pod with these requests can take.
    fn slot(
        &self,
        now: UnixMillis,
        own: Option<&str>,
        priority: i32,
        (namespace, owner): (&str, &str),
        requests: &Resources,
    ) -> Option<&Hold> {
        // The UID of a controller may be copied to another namespace.
        let is_in_namespace = |hold: &Hold| hold.pod.split_once('/').is_some_and(|(own, _)| own == namespace);
        self.holds.iter().find(|hold| {
            hold.displaced
                && now < hold.expires_at
                && hold.owner.as_deref() == Some(owner)
                && is_in_namespace(hold)
                && requests.fits(self.leftover(now, own, priority, Some(hold)).0.get())
        })
    }
}

impl View {
    /// Builds the indexes. Linear in nodes and holds; called by the controllers, never on the request path.
    #[must_use]
    pub fn build(input: ViewInput) -> Self {
        let mut view = Self {
            as_of: input.as_of,
            max_age: input.max_age,
            by_name: HashMap::with_capacity(input.nodes.len()),
            nodes: Vec::with_capacity(input.nodes.len()),
            last_expiry: UnixMillis::MIN,
            ..Self::default()
        };
        for node in input.nodes {
            let entry = NodeEntry::new(node);
            let index = view.nodes.len();
            view.by_name.insert(entry.name.clone(), index);
            view.any_disrupting |= entry.disrupting;
            view.last_expiry = view.last_expiry.max(entry.last_expiry);
            view.held.extend(entry.holds.iter().map(|hold| hold.pod.clone()));
            if entry.disrupting || !entry.holds.is_empty() {
                view.restrained.insert(entry.name.clone(), index);
            }
            for owner in entry.holds.iter().filter(|hold| hold.displaced).filter_map(|hold| hold.owner.as_ref()) {
                let nodes = view.displaced.entry(owner.clone()).or_default();
                if nodes.last() != Some(&index) {
                    nodes.push(index);
                }
            }
            view.nodes.push(entry);
        }
        for (key, plan) in input.planned {
            view.last_expiry = view.last_expiry.max(plan.expires_at);
            view.planned.insert(key, plan);
        }
        view
    }

    /// True when the view is too old to restrain anyone. The default view, built from nothing, is.
    pub fn is_stale(&self, now: UnixMillis) -> bool {
        now.saturating_since(self.as_of) > self.max_age
    }

    /// False when every pod may be bound anywhere: no live hold, no live plan, no node being disrupted.
    pub(crate) fn restrains(&self, now: UnixMillis) -> bool {
        self.any_disrupting || now < self.last_expiry
    }

    /// The pod's key, when it has a hold.
    pub(crate) fn own<'k>(&self, key: &'k str) -> Option<&'k str> {
        self.held.contains(key).then_some(key)
    }

    /// The node, when it has holds or is being disrupted.
    pub(crate) fn restrained(&self, name: &str) -> Option<&NodeEntry> {
        self.restrained.get(name).and_then(|index| self.nodes.get(*index))
    }

    pub(crate) fn node(&self, name: &str) -> Option<&NodeEntry> {
        self.by_name.get(name).and_then(|index| self.nodes.get(*index))
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

    /// Nodes where this pod may take the hold of a displaced pod, in the order of the input.
    pub(crate) fn slots<'v>(
        &'v self,
        now: UnixMillis,
        pod: &ExtenderPod<'_>,
        requests: &Resources,
    ) -> Vec<&'v NodeEntry> {
        let Some((owner, nodes)) =
            pod.controller_uid().and_then(|owner| self.displaced.get(owner).map(|nodes| (owner, nodes)))
        else {
            return Vec::new();
        };
        let key = pod.key();
        let own = self.own(&key);
        let controller = (&*pod.metadata.namespace, owner);
        nodes
            .iter()
            .filter_map(|index| self.nodes.get(*index))
            .filter(|entry| !entry.disrupting && entry.slot(now, own, pod.priority(), controller, requests).is_some())
            .collect()
    }
}
