//! Why consolidation pauses: pods move or wait for a node, so that a simulation does not see where every pod is.
//!
//! Tenants choose how many pods wait, how often new ones are created, and with them how often a node comes up. The pods of one namespace,
//! those of all, and the nodes that come up pause consolidation for a bounded time only.

use std::collections::BTreeMap;
use std::time::Duration;

use kube::ResourceExt;

use crate::api::{NodeClaim, conditions};
use crate::decisions::disruption::candidates::is_occupied;
use crate::model::time::UnixMillis;
use crate::state::node_state::BOOT_TIMEOUT;
use crate::state::object_ext::{NodeClaimExt, ObjectExt};
use crate::state::pods::{PodRecord, Scheduling};
use crate::state::tables::ClusterState;

/// A pod without a node that is younger than this may still be bound or planned.
const PENDING_PERIOD: Duration = Duration::from_secs(30);
/// New pods of one namespace pause consolidation for this time; then they do not until [`QUIET`].
const MAX_PAUSE: Duration = Duration::from_mins(2);
/// A namespace without a new pod that waits for this time may pause consolidation again.
const QUIET: Duration = Duration::from_mins(5);
/// After this time of pauses because of pods or of nodes that come up, one pass is made. It moves no pod to such a node.
const MAX_TOTAL: Duration = Duration::from_mins(10);

/// Why consolidation pauses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pause {
    /// A node is coming up.
    NodeBooting,
    /// A marked node still has pods.
    NodeLeaving,
    /// The scheduler has not attempted a new pod yet.
    PodUnattempted,
    /// A pod was rejected a short time ago.
    PodUnschedulable,
}

impl Pause {
    /// Every reason.
    pub const ALL: [Self; 4] = [Self::NodeBooting, Self::NodeLeaving, Self::PodUnattempted, Self::PodUnschedulable];

    /// The label of metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::NodeBooting => "node_booting",
            Self::NodeLeaving => "node_leaving",
            Self::PodUnattempted => "pod_unattempted",
            Self::PodUnschedulable => "pod_unschedulable",
        }
    }
}

/// The pauses so far because of pods that wait for a node, or of nodes that come up for them.
#[derive(Debug, Default)]
pub struct PendingPods {
    namespaces: BTreeMap<String, Episode>,
    /// Begin of the pauses since the last pass that was not paused.
    paused_since: Option<UnixMillis>,
}

/// A time in which a namespace had new pods that wait, without a gap of [`QUIET`].
#[derive(Debug)]
struct Episode {
    began: UnixMillis,
    last: UnixMillis,
}

/// Why consolidation pauses; `None` when it does not. Called for every pass.
pub fn pause(state: &ClusterState, pending: &mut PendingPods, now: UnixMillis) -> Option<Pause> {
    let waiting = pending.observe(state, now);
    let claims = || state.claims.values().filter(|claim| !claim.is_deleting());
    let occupied = |claim: &NodeClaim| state.node_of(claim).is_some_and(|node| is_occupied(state, &node.name_any()));
    if claims().any(|claim| claim.is_leaving() && occupied(claim)) {
        return Some(Pause::NodeLeaving);
    }
    let booting = claims().any(|claim| {
        !claim.has_condition(conditions::INITIALIZED) && !claim.created_at().is_older_than(BOOT_TIMEOUT, now)
    });
    pending.limit(booting.then_some(Pause::NodeBooting).or(waiting), now)
}

impl PendingPods {
    /// Why pods of namespaces that have not paused consolidation for too long pause it.
    fn observe(&mut self, state: &ClusterState, now: UnixMillis) -> Option<Pause> {
        let pods = state.unbound.iter().filter_map(|key| state.pods.get(key)).filter(|pod| !pod.daemon);
        let mut waiting: BTreeMap<&str, Pause> = BTreeMap::new();
        for (pod, why) in pods.filter_map(|pod| Some((pod, waits(state, pod, now)?))) {
            waiting.entry(&pod.namespace).or_insert(why);
        }
        // An episode that ends later than now is from before the clock was set back.
        self.namespaces.retain(|_, episode| episode.last <= now && !episode.last.is_older_than(QUIET, now));
        let mut found = None;
        for (namespace, why) in waiting {
            let episode = self.namespaces.entry(namespace.to_owned()).or_insert(Episode { began: now, last: now });
            episode.last = now;
            if !episode.began.is_older_than(MAX_PAUSE, now) {
                found = found.or(Some(why));
            }
        }
        found
    }

    /// Lets a pass through after [`MAX_TOTAL`], whoever's pods wait or have a node come up.
    fn limit(&mut self, why: Option<Pause>, now: UnixMillis) -> Option<Pause> {
        let since = *self.paused_since.get_or_insert(now);
        let paused = why.filter(|_| since <= now && !since.is_older_than(MAX_TOTAL, now));
        if paused.is_none() {
            self.paused_since = None;
        }
        paused
    }
}

/// Why a pod that is not bound pauses consolidation. A pod that no node was launched for in [`PENDING_PERIOD`] will not move.
fn waits(state: &ClusterState, pod: &PodRecord, now: UnixMillis) -> Option<Pause> {
    let is_recent = |at: UnixMillis| !at.is_older_than(PENDING_PERIOD, now);
    match pod.scheduling {
        Scheduling::Unattempted => {
            (is_recent(pod.first_seen) && state.is_scheduled(pod)).then_some(Pause::PodUnattempted)
        }
        Scheduling::Unschedulable { .. } => {
            pod.first_unschedulable.is_some_and(is_recent).then_some(Pause::PodUnschedulable)
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests;
