//! What the extender knows: an immutable snapshot of room, holds and plans.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use crate::extender::pod::ExtenderPod;
use crate::model::resources::Resources;

/// Age past which a view restrains nobody, unless its input says otherwise: milliseconds.
pub const DEFAULT_MAX_AGE_MS: i64 = 60_000;

/// What a [`View`] is built from.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ViewInput {
    /// When it was gathered, milliseconds since the epoch.
    pub built_at_ms: i64,
    /// Past this age the view restrains nobody. Rebuild at least twice in this time, even when nothing changed.
    pub max_age_ms: i64,
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
    /// Requests of daemon pods that will come but are not bound yet.
    pub daemon_reserve: Resources,
    /// About to be disrupted: nothing new may come, except DaemonSet pods and pods that tolerate `karpenter.sh/disrupted`.
    pub disrupting: bool,
    /// Room kept for planned pods that are not bound yet.
    pub holds: Vec<Hold>,
}

/// Room on a node kept for one pod.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Hold {
    /// `namespace/name` of the pod it is kept for.
    pub pod: Arc<str>,
    /// UID of that pod's controlling owner.
    pub owner: Option<Arc<str>>,
    /// The pod is gone (drained, replaced): the first pod of the same owner takes its place.
    pub displaced: bool,
    /// Requests of the pod, one pod slot included.
    pub requests: Resources,
    /// Priority of the pod: pods of higher priority are not bound by the hold.
    pub priority: i32,
    /// End of the hold, milliseconds since the epoch.
    pub expires_at_ms: i64,
}

/// Where a pod is to go. Drop the plan when its node is gone or can no longer hold the pod: until then, or until it ends, the pod passes
/// nowhere else.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PlannedPod {
    /// The node; `None` while it has no Node object yet.
    pub node: Option<Arc<str>>,
    /// NodeClaim of the node, or the node's name when it is not one of ours.
    pub claim: Arc<str>,
    /// End of the plan, milliseconds since the epoch: afterwards the pod is free to go anywhere.
    pub expires_at_ms: i64,
}

/// An immutable snapshot that answers in constant time per node. See [`View::build`].
#[derive(Debug, Default)]
pub struct View {
    built_at_ms: i64,
    max_age_ms: i64,
    nodes: Vec<NodeEntry>,
    /// Every node.
    by_name: HashMap<Arc<str>, usize>,
    /// Nodes with holds or being disrupted: all that filter must look at.
    restrained: HashMap<Arc<str>, usize>,
    planned: HashMap<Arc<str>, PlannedPod>,
    /// Pods that room is held for.
    held: HashSet<Arc<str>>,
    /// Nodes with displaced holds by the owner that may take them.
    displaced: HashMap<Arc<str>, Vec<usize>>,
    any_disrupting: bool,
    /// When the last hold or plan ends.
    last_expiry_ms: i64,
}

/// A node with what can be summed up beforehand.
#[derive(Debug)]
pub(crate) struct NodeEntry {
    pub(crate) name: Arc<str>,
    pub(crate) allocatable: Resources,
    pub(crate) disrupting: bool,
    /// Free room less the daemon reserve.
    open: Resources,
    /// `open` less every hold, for the usual case that all of them bind.
    leftover: Resources,
    holds: Vec<Hold>,
    /// While `now` is before this and the pod's priority is not above `min_priority`, every hold binds.
    first_expiry_ms: i64,
    last_expiry_ms: i64,
    min_priority: i32,
}

/// What the plan says of a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Standing<'v> {
    /// Its node does not exist yet.
    Waiting(&'v str),
    /// It belongs on this node.
    Planned(&'v str),
    /// It may go anywhere that has room beside the holds.
    Free,
}

/// Room that is left to a pod on one node.
pub(crate) enum Leftover<'v> {
    /// Summed up beforehand.
    Known(&'v Resources),
    /// Worked out for this pod.
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
            first_expiry_ms: node.holds.iter().map(|hold| hold.expires_at_ms).min().unwrap_or(i64::MAX),
            last_expiry_ms: node.holds.iter().map(|hold| hold.expires_at_ms).max().unwrap_or(i64::MIN),
            min_priority: node.holds.iter().map(|hold| hold.priority).min().unwrap_or(i32::MAX),
            holds: node.holds,
        }
    }

    /// Room for a pod of this priority beside the holds that bind it, and how many bind. `own` is its key when room is held for it
    /// somewhere, `slot` a hold of another pod that it may take.
    pub(crate) fn leftover(
        &self,
        now_ms: i64,
        own: Option<&str>,
        priority: i32,
        slot: Option<&Hold>,
    ) -> (Leftover<'_>, usize) {
        if now_ms >= self.last_expiry_ms {
            return (Leftover::Known(&self.open), 0);
        }
        let is_own = |hold: &Hold| own.is_some_and(|own| *hold.pod == *own);
        if slot.is_none()
            && now_ms < self.first_expiry_ms
            && priority <= self.min_priority
            && !(own.is_some() && self.holds.iter().any(is_own))
        {
            return (Leftover::Known(&self.leftover), self.holds.len());
        }
        let mut left = self.open.clone();
        let mut binding = 0;
        for hold in &self.holds {
            let binds = now_ms < hold.expires_at_ms
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

    /// A live hold of a displaced pod of `owner` that a pod with these requests can take.
    fn slot(&self, now_ms: i64, own: Option<&str>, priority: i32, owner: &str, requests: &Resources) -> Option<&Hold> {
        self.holds.iter().find(|hold| {
            hold.displaced
                && now_ms < hold.expires_at_ms
                && hold.owner.as_deref() == Some(owner)
                && requests.fits(self.leftover(now_ms, own, priority, Some(hold)).0.get())
        })
    }
}

impl View {
    /// Sums up the input. Linear in nodes and holds; done by the controllers, never on the request path.
    #[must_use]
    pub fn build(input: ViewInput) -> Self {
        let mut view = Self {
            built_at_ms: input.built_at_ms,
            max_age_ms: input.max_age_ms,
            by_name: HashMap::with_capacity(input.nodes.len()),
            nodes: Vec::with_capacity(input.nodes.len()),
            last_expiry_ms: i64::MIN,
            ..Self::default()
        };
        for node in input.nodes {
            let entry = NodeEntry::new(node);
            let index = view.nodes.len();
            view.by_name.insert(entry.name.clone(), index);
            view.any_disrupting |= entry.disrupting;
            view.last_expiry_ms = view.last_expiry_ms.max(entry.last_expiry_ms);
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
            view.last_expiry_ms = view.last_expiry_ms.max(plan.expires_at_ms);
            view.planned.insert(key, plan);
        }
        view
    }

    /// Milliseconds since the view was gathered.
    pub fn age_ms(&self, now_ms: i64) -> i64 {
        now_ms.saturating_sub(self.built_at_ms)
    }

    /// True when the view is too old to restrain anyone. The default view, built from nothing, is.
    pub fn is_stale(&self, now_ms: i64) -> bool {
        self.age_ms(now_ms) > self.max_age_ms
    }

    /// Number of nodes with holds or being disrupted.
    pub fn restrained_nodes(&self) -> usize {
        self.restrained.len()
    }

    /// False when every pod may go everywhere: no live hold, no live plan, nothing being disrupted.
    pub(crate) fn restrains(&self, now_ms: i64) -> bool {
        self.any_disrupting || now_ms < self.last_expiry_ms
    }

    /// The key again when room is held for this pod.
    pub(crate) fn own<'k>(&self, key: &'k str) -> Option<&'k str> {
        self.held.contains(key).then_some(key)
    }

    /// The node, when it has holds or is being disrupted.
    pub(crate) fn restrained(&self, name: &str) -> Option<&NodeEntry> {
        self.restrained.get(name).and_then(|index| self.nodes.get(*index))
    }

    /// The node.
    pub(crate) fn node(&self, name: &str) -> Option<&NodeEntry> {
        self.by_name.get(name).and_then(|index| self.nodes.get(*index))
    }

    /// What the plan says of a pod. A plan onto a node that is being disrupted is void.
    pub(crate) fn standing(&self, now_ms: i64, key: &str) -> Standing<'_> {
        let Some(plan) = self.planned.get(key).filter(|plan| now_ms < plan.expires_at_ms) else {
            return Standing::Free;
        };
        match &plan.node {
            None => Standing::Waiting(&plan.claim),
            Some(node) if self.restrained(node).is_some_and(|entry| entry.disrupting) => Standing::Free,
            Some(node) => Standing::Planned(node),
        }
    }

    /// Nodes that keep the place of a displaced pod for this one, in the input's order.
    pub(crate) fn slots<'v>(&'v self, now_ms: i64, pod: &ExtenderPod<'_>, requests: &Resources) -> Vec<&'v NodeEntry> {
        let Some((owner, nodes)) =
            pod.controller_uid().and_then(|owner| self.displaced.get(owner).map(|nodes| (owner, nodes)))
        else {
            return Vec::new();
        };
        let key = pod.key();
        let own = self.own(&key);
        nodes
            .iter()
            .filter_map(|index| self.nodes.get(*index))
            .filter(|entry| !entry.disrupting && entry.slot(now_ms, own, pod.priority(), owner, requests).is_some())
            .collect()
    }
}
