//! Pods and DaemonSets as the planner reads them: identity, labels and an interned class.

use std::collections::BTreeMap;
use std::ops::Deref;
use std::sync::Arc;

use stowage_model::pod_class::{PodClass, Toleration};
use stowage_model::resources::Resources;
use stowage_model::time::UnixMillis;
use stowage_model::units::Millicores;

/// Labels of an object.
pub type Labels = BTreeMap<String, String>;

/// A pod: identity, labels and its interned class.
#[derive(Clone, Debug)]
pub struct PodEntry {
    /// `namespace/name`.
    pub key: Arc<str>,
    pub uid: Arc<str>,
    /// Shared between pods with equal label sets.
    pub labels: Arc<Labels>,
    /// Everything else that scheduling considers, shared between pods with equal constraints.
    pub class: Arc<PodClass>,
    /// `namespace/name` of its PersistentVolumeClaims, sorted; not part of its class.
    pub claims: Arc<[Arc<str>]>,
    /// UID of the controlling owner.
    pub owner: Option<Arc<str>>,
    /// The epoch when the object has no creation time.
    pub created_at: UnixMillis,
    /// When it came into its scheduler's queue, as far as observed; the epoch if not.
    pub queued_at: UnixMillis,
    /// Has a deletion timestamp: the pod occupies its node until it is gone, but no topology spread counts it.
    pub deleting: bool,
}

impl PodEntry {
    /// The order in which its scheduler attempts pods of one priority, as far as known.
    pub fn queue_position(&self) -> (UnixMillis, UnixMillis, &str) {
        (self.queued_at, self.created_at, &self.key)
    }

    /// A pod without constraints that tolerates every taint: every NodePool and node is considered for it.
    pub fn probe() -> Self {
        let tolerations = vec![Toleration { exists: true, ..Toleration::default() }];
        let requests = Resources { cpu: Millicores(1), pods: 1, ..Resources::default() };
        Self {
            key: Arc::from("stowage-probe/probe"),
            uid: Arc::default(),
            labels: Arc::default(),
            class: Arc::new(PodClass {
                namespace: Arc::from("stowage-probe"),
                requests,
                tolerations,
                ..PodClass::default()
            }),
            claims: Arc::default(),
            owner: None,
            created_at: UnixMillis(0),
            queued_at: UnixMillis(0),
            deleting: false,
        }
    }
}

/// The pods of a node, with the aggregates that every plan needs.
#[derive(Clone, Debug, Default)]
pub struct NodePods {
    entries: Vec<PodEntry>,
    requests: Resources,
    exclusive: Vec<Arc<PodClass>>,
}

impl NodePods {
    /// Adds a pod.
    pub fn push(&mut self, pod: PodEntry) {
        self.requests.add(&pod.class.requests);
        let excludes = !pod.class.anti_affinity.is_empty() || !pod.class.host_ports.is_empty();
        if excludes && !self.exclusive.iter().any(|class| Arc::ptr_eq(class, &pod.class)) {
            self.exclusive.push(Arc::clone(&pod.class));
        }
        self.entries.push(pod);
    }

    /// The sum of the pods' requests.
    pub fn requests(&self) -> &Resources {
        &self.requests
    }

    /// The classes among them that exclude other pods: by required anti-affinity, or by host ports.
    pub fn exclusive(&self) -> &[Arc<PodClass>] {
        &self.exclusive
    }
}

impl Deref for NodePods {
    type Target = [PodEntry];

    fn deref(&self) -> &[PodEntry] {
        &self.entries
    }
}

impl<'a> IntoIterator for &'a NodePods {
    type Item = &'a PodEntry;
    type IntoIter = std::slice::Iter<'a, PodEntry>;

    fn into_iter(self) -> Self::IntoIter {
        self.entries.iter()
    }
}

impl Extend<PodEntry> for NodePods {
    fn extend<I: IntoIterator<Item = PodEntry>>(&mut self, pods: I) {
        pods.into_iter().for_each(|pod| self.push(pod));
    }
}

impl FromIterator<PodEntry> for NodePods {
    fn from_iter<I: IntoIterator<Item = PodEntry>>(pods: I) -> Self {
        let mut out = Self::default();
        out.extend(pods);
        out
    }
}

/// A DaemonSet's pod, counted as overhead of a node.
#[derive(Clone, Debug)]
pub struct Daemon {
    /// `namespace/name` of the DaemonSet.
    pub key: Arc<str>,
    /// Class of its pods.
    pub class: Arc<PodClass>,
    /// Labels of its pods.
    pub labels: Arc<Labels>,
}

impl Daemon {
    /// One of its pods.
    pub(crate) fn pod(&self) -> PodEntry {
        PodEntry { labels: Arc::clone(&self.labels), class: Arc::clone(&self.class), ..PodEntry::probe() }
    }
}
