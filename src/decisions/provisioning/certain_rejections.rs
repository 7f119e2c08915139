//! New pods that kube-scheduler is certain to reject: no node has room for one of them, even if it were alone. They are planned before they are
//! attempted.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::ops::Bound;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Node, Taint};
use kube::ResourceExt;
use stowage_model::pod_class::PodClass;
use stowage_model::resources::Resources;
use stowage_model::time::UnixMillis;

use crate::decisions::demand::newer_than;
use crate::state::node_state::reported_allocatable;
use crate::state::object_ext::NodeExt;
use crate::state::plan_record::Holds;
use crate::state::pods::PodRecord;
use crate::state::tables::ClusterState;

/// A pod that the scheduler has not attempted for this time, since its creation, waits for something else, or no scheduler runs.
const MAX_AGE: Duration = Duration::from_secs(10);
/// Maximum number of classes that are remembered from one evaluation to the next.
const MAX_CLASSES: usize = 1_000;
/// Maximum work of one evaluation: comparisons of a class with a node, times the [`size`] of the class. The classes that are left wait for the next evaluation
/// or their rejection.
const MAX_WORK: usize = 200_000;
/// Keeps pods off a node that is cordoned.
const CORDONED: &str = "node.kubernetes.io/unschedulable";

/// The certain rejections of one [`ClusterState`]. A class is compared with each node when it is new, and when the node that had room for it has none
/// any more; otherwise with the nodes that changed.
#[derive(Debug, Default)]
pub struct CertainRejections {
    /// By node.
    rooms: BTreeMap<String, Room>,
    /// Revision of [`ClusterState::node_changes`] that `rooms` is up to date with.
    revision: u64,
    /// By address of the class.
    verdicts: HashMap<usize, (Arc<PodClass>, Verdict)>,
}

/// Where a pod of a class would have room.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Verdict {
    /// On this node, and maybe on others.
    On(String),
    /// On no node, at this revision of [`ClusterState::node_changes`].
    Nowhere(u64),
}

/// What a node offers to pods.
#[derive(Debug)]
struct Room {
    node: Arc<Node>,
    taints: Vec<Taint>,
    allocatable: Resources,
    /// Without what its pods request.
    free: Resources,
    /// What its pods request, by priority.
    requested: BTreeMap<i32, Resources>,
}

impl Room {
    fn of(state: &ClusterState, name: &str) -> Option<Self> {
        let node = Arc::clone(state.nodes.get(name)?);
        let mut taints: Vec<Taint> = node.taints().cloned().collect();
        if node.spec.as_ref().is_some_and(|spec| spec.unschedulable == Some(true)) {
            taints.push(Taint { key: CORDONED.into(), effect: "NoSchedule".into(), ..Taint::default() });
        }
        let allocatable = reported_allocatable(&node);
        let (mut free, mut requested) = (allocatable.clone(), BTreeMap::<i32, Resources>::new());
        let classes =
            state.pods_on(name).filter(|pod| pod.active()).filter_map(|pod| Some(&pod.entry.as_ref().ok()?.class));
        for class in classes {
            free.sub(&class.requests);
            requested.entry(class.priority).or_default().add(&class.requests);
        }
        Some(Self { node, taints, allocatable, free, requested })
    }

    /// Whether the node admits a pod, and has room for it, or had if the pod preempted those of lower priority.
    fn takes(&self, class: &PodClass) -> bool {
        self.has_room_for(class)
            && class.untolerated(&self.taints).is_none()
            && class.accepts_node(self.node.labels(), self.node.metadata.name.as_deref().unwrap_or_default())
    }

    fn has_room_for(&self, class: &PodClass) -> bool {
        if class.requests.fits(&self.free) {
            return true;
        }
        if self.requested.range(..class.priority).next().is_none() {
            return false;
        }
        let mut free = self.allocatable.clone();
        self.requested.range(class.priority..).for_each(|(_, requests)| free.sub(requests));
        class.requests.fits(&free)
    }
}

impl CertainRejections {
    /// The new pods without a hold that the default scheduler has not attempted and is certain to reject. Of other schedulers it is not known what
    /// they wait for; nor is it of a pod that a later one overtook, which may wait for the rest of its gang.
    pub fn evaluate(&mut self, state: &ClusterState, holds: &Holds, now: UnixMillis) -> BTreeSet<String> {
        let is_plannable = |pod: &PodRecord| {
            let Ok(entry) = &pod.entry else { return false };
            let has_volumes = || entry.claims.iter().all(|claim| state.volumes.claims.contains_key(&**claim));
            // After a start, a pod is new to this process that may have waited for long.
            let is_new = !entry.created_at.is_older_than(MAX_AGE, now);
            is_new && !entry.class.claims_devices && has_volumes()
        };
        let new = newer_than(MAX_AGE, state, holds, now);
        let pods: Vec<_> = new.filter(|(_, pod)| state.schedulers.is_next(pod) && is_plannable(pod)).collect();
        if pods.is_empty() {
            return BTreeSet::new();
        }
        self.follow(state);
        if self.verdicts.len() > MAX_CLASSES {
            let class = |pod: &PodRecord| Some(Arc::as_ptr(&pod.entry.as_ref().ok()?.class).addr());
            let present: HashSet<usize> = pods.iter().filter_map(|(_, pod)| class(pod)).collect();
            self.verdicts.retain(|address, _| present.contains(address));
        }
        let (mut known, mut left) = (HashMap::new(), MAX_WORK);
        let mut is_certain = |pod: &PodRecord| {
            let Ok(entry) = &pod.entry else { return false };
            let address = Arc::as_ptr(&entry.class).addr();
            *known.entry(address).or_insert_with(|| self.is_rejected(state, &entry.class, &mut left))
        };
        pods.into_iter().filter(|(_, pod)| is_certain(pod)).map(|(key, _)| key.clone()).collect()
    }

    /// Brings the rooms up to date.
    fn follow(&mut self, state: &ClusterState) {
        if let Some(changed) = state.node_changes.since(self.revision) {
            for name in changed {
                match Room::of(state, name) {
                    Some(room) => drop(self.rooms.insert(name.to_owned(), room)),
                    None => drop(self.rooms.remove(name)),
                }
            }
        } else {
            self.verdicts.clear();
            let rooms = state.nodes.keys().filter_map(|name| Some((name.clone(), Room::of(state, name)?)));
            self.rooms = rooms.collect();
        }
        self.revision = state.node_changes.revision();
    }

    /// Whether no node takes a pod of a class; `false` when too little work is `left`.
    fn is_rejected(&mut self, state: &ClusterState, class: &Arc<PodClass>, left: &mut usize) -> bool {
        if *left == 0 {
            return false;
        }
        let address = Arc::as_ptr(class).addr();
        let last = self.verdicts.get(&address).map(|(_, verdict)| verdict);
        let still = match last {
            Some(Verdict::On(name)) => first(class, self.rooms.get_key_value(name), left).map(Verdict::On),
            Some(Verdict::Nowhere(revision)) => state.node_changes.since(*revision).map(|changed| {
                let changed = changed.filter_map(|name| self.rooms.get_key_value(name));
                first(class, changed, left).map_or(Verdict::Nowhere(self.revision), Verdict::On)
            }),
            None => None,
        };
        let verdict = match still {
            Some(verdict) => verdict,
            None if *left < self.rooms.len().saturating_mul(size(class)) => return false,
            None => {
                let last = if let Some(Verdict::On(name)) = last { name } else { "" };
                // Those before the last one were full when it was found.
                let after = self.rooms.range::<str, _>((Bound::Excluded(last), Bound::Unbounded));
                let others = self.rooms.range::<str, _>((Bound::Unbounded, Bound::Included(last)));
                first(class, after.chain(others), left).map_or(Verdict::Nowhere(self.revision), Verdict::On)
            }
        };
        let rejected = matches!(verdict, Verdict::Nowhere(_));
        self.verdicts.insert(address, (Arc::clone(class), verdict));
        rejected
    }
}

/// What a comparison with a node may cost, in label lookups.
fn size(class: &PodClass) -> usize {
    1 + class.node_terms.iter().map(|term| term.labels.iter().count()).sum::<usize>() + class.tolerations.len()
}

/// The first node that takes a pod of a class. Subtracts the work.
fn first<'r>(
    class: &PodClass,
    rooms: impl IntoIterator<Item = (&'r String, &'r Room)>,
    left: &mut usize,
) -> Option<String> {
    let size = size(class);
    let takes = |(_, room): &(&String, &Room)| {
        *left = left.saturating_sub(size);
        room.takes(class)
    };
    rooms.into_iter().find(takes).map(|(name, _)| name.clone())
}

#[cfg(test)]
mod tests;
