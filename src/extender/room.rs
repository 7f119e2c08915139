//! The room on one node: what is free, and which pods hold it.

use std::sync::Arc;

use stowage_model::resources::Resources;
use stowage_model::time::UnixMillis;

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

/// A node with precomputed sums.
#[derive(Debug, PartialEq)]
pub(crate) struct NodeEntry {
    pub(crate) name: Arc<str>,
    pub(crate) allocatable: Resources,
    pub(crate) disrupting: bool,
    /// Free room less the daemon reserve.
    open: Resources,
    /// `open` less every hold: the room when all holds bind, which is the usual case.
    leftover: Resources,
    pub(crate) holds: Vec<Hold>,
    /// While `now` is before this and the pod's priority is not above `min_priority`, every hold binds.
    first_expiry: UnixMillis,
    pub(crate) last_expiry: UnixMillis,
    min_priority: i32,
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
    pub(crate) fn new(node: NodeRoom) -> Self {
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
    pub(crate) fn slot(
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
