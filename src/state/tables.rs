//! Tables of watched objects, and how an event changes them.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};

use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::{Namespace, Node, PersistentVolume, PersistentVolumeClaim, Pod, Service};
use k8s_openapi::api::storage::v1::{CSINode, StorageClass};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::ResourceExt;

use crate::api::{Ec2NodeClass, NodeClaim, NodePool};
use crate::planner::input::default_spread::{DefaultSpread, Services};
use crate::planner::input::intern::Interner;
use crate::planner::input::pod::{Daemon, Labels};
use crate::planner::input::volumes::objects;
use crate::planner::input::volumes::objects::{Claim, Volume, Volumes};
use crate::state::claim_index::ClaimIndex;
use crate::state::holds;
use crate::state::holds::{Holds, Planned};
use crate::state::pods::{PodRecord, Scheduling};
use crate::state::snapshot_cache::SnapshotCache;
use crate::sync::lock;

/// A DaemonSet as overhead.
#[derive(Clone, Debug)]
pub struct DaemonRecord {
    /// UID of the DaemonSet, the owner of its pods.
    pub uid: Arc<str>,
    /// Its pods as the planner sees them.
    pub daemon: Daemon,
}

/// Everything the watches have told so far.
#[derive(Debug, Default)]
pub struct ClusterState {
    /// Pods by `namespace/name`.
    pub pods: HashMap<String, PodRecord>,
    /// Keys of pods by the node they are bound to.
    pub pods_by_node: HashMap<Arc<str>, BTreeSet<String>>,
    /// Keys of pods not bound to a node.
    pub unbound: BTreeSet<String>,
    /// When a pod was last created, milliseconds since the epoch.
    pub last_pod_created_ms: i64,
    /// When a pod last came to or went from a node, milliseconds since the epoch.
    pub last_pod_event_ms: HashMap<Arc<str>, i64>,
    /// Nodes by name.
    pub nodes: BTreeMap<String, Arc<Node>>,
    /// Node name by provider id.
    pub node_by_provider_id: HashMap<String, String>,
    /// NodeClaims by name.
    pub claims: BTreeMap<String, Arc<NodeClaim>>,
    /// The plans that the NodeClaims carry, by NodeClaim.
    pub planned: BTreeMap<String, Planned>,
    /// NodePools by name.
    pub pools: BTreeMap<String, Arc<NodePool>>,
    /// EC2NodeClasses by name.
    pub classes: BTreeMap<String, Arc<Ec2NodeClass>>,
    /// DaemonSets by `namespace/name`; those that can't be understood are left out.
    pub daemons: BTreeMap<String, DaemonRecord>,
    /// Labels of namespaces; shared with the problems made from it.
    pub namespaces: Arc<BTreeMap<String, Labels>>,
    /// Claims, volumes, storage classes and what nodes can attach; shared with the problems made from it.
    pub volumes: Arc<Volumes>,
    /// What Services select, where there is a default spread; shared with the problems made from it.
    pub services: Arc<Services>,
    /// Kinds whose first listing is complete.
    pub synced: BTreeSet<&'static str>,
    interner: Interner,
    gone: Gone,
    holds: Mutex<Option<Resolved>>,
    /// Nodes of the last snapshot, and which have changed since.
    pub(crate) seen: Mutex<SnapshotCache>,
    pub(crate) claim_index: ClaimIndex,
    /// NodeClaims by when the holds of their plans end, milliseconds since the epoch; those whose plan is empty are left out.
    pub(crate) held_until: BTreeSet<(i64, String)>,
    /// NodeClaims without a Node.
    pub(crate) in_flight: BTreeSet<String>,
    /// Changes of DaemonSets so far.
    pub(crate) daemon_changes: u64,
}

/// The live holds, and until when they are what they are, milliseconds since the epoch.
#[derive(Debug)]
struct Resolved {
    holds: Arc<Holds>,
    until_ms: i64,
}

/// UIDs of objects that were deleted lately, so that the late answer to a write can't bring one back.
#[derive(Debug, Default)]
struct Gone {
    uids: HashSet<String>,
    order: VecDeque<String>,
}

impl Gone {
    /// Far more than writes can be under way.
    const CAPACITY: usize = 10_000;

    fn note(&mut self, uid: Option<String>) {
        let Some(uid) = uid else { return };
        if self.uids.insert(uid.clone()) {
            self.order.push_back(uid);
        }
        while self.order.len() > Self::CAPACITY {
            if let Some(oldest) = self.order.pop_front() {
                self.uids.remove(&oldest);
            }
        }
    }

    /// Whether an object was deleted, or is with this very write: it was being deleted and its last finalizer went.
    fn has(&self, meta: &ObjectMeta) -> bool {
        let last = meta.deletion_timestamp.is_some() && meta.finalizers.as_ref().is_none_or(Vec::is_empty);
        last || meta.uid.as_ref().is_some_and(|uid| self.uids.contains(uid))
    }
}

impl ClusterState {
    /// The live holds at `now_ms`. Worked out once for everyone who looks before something changes or a hold runs out.
    pub fn holds(&self, now_ms: i64) -> Arc<Holds> {
        let mut resolved = lock(&self.holds);
        if let Some(known) = resolved.as_ref().filter(|known| now_ms < known.until_ms) {
            return Arc::clone(&known.holds);
        }
        let holds = Arc::new(holds::resolve(self, now_ms));
        let until_ms = self.held_after(now_ms).next().map_or(i64::MAX, |(until, _)| *until);
        *resolved = Some(Resolved { holds: Arc::clone(&holds), until_ms });
        holds
    }

    /// NodeClaims with plans whose holds end after `now_ms`, and when.
    pub(crate) fn held_after(&self, now_ms: i64) -> impl Iterator<Item = &(i64, String)> {
        self.held_until.range((now_ms.saturating_add(1), String::new())..)
    }

    /// What was worked out from pods, nodes and claims no longer holds.
    fn touch(&mut self) {
        self.holds = Mutex::default();
    }

    /// One that gives pods without topology spread constraints of their own these.
    pub fn with_default_spread(default_spread: DefaultSpread) -> Self {
        let services = Arc::new(Services::new(default_spread.clone()));
        Self { interner: Interner::with_default_spread(default_spread), services, ..Self::default() }
    }

    /// Takes in a pod as it is now.
    pub fn apply_pod(&mut self, pod: &Pod, now_ms: i64) {
        self.touch();
        let key = format!("{}/{}", pod.namespace().unwrap_or_default(), pod.name_any());
        if pod.metadata.uid.as_ref().is_some_and(|uid| self.gone.uids.contains(uid)) {
            return;
        }
        let entry = self.interner.intern(pod).map_err(|error| error.to_string());
        let mut record = PodRecord::new(pod, entry);
        let old = self.pods.get(&key).filter(|old| old.uid == record.uid);
        if old.is_some_and(|old| matches!((old.version, record.version), (Some(old), Some(new)) if old > new)) {
            return;
        }
        if matches!(record.scheduling, Scheduling::Unschedulable { .. }) {
            record.first_unschedulable_ms = old.and_then(|old| old.first_unschedulable_ms).or(Some(now_ms));
        }
        if old.is_none() {
            self.last_pod_created_ms = self.last_pod_created_ms.max(now_ms);
        }
        let gone = record.terminal || record.deleting_since_ms.is_some();
        let was_gone = old.is_some_and(|old| old.terminal || old.deleting_since_ms.is_some());
        let moved = old.and_then(|old| old.node.clone()) != record.node;
        if !record.daemon
            && (moved || gone != was_gone)
            && let Some(node) = &record.node
        {
            self.last_pod_event_ms.insert(node.clone(), now_ms);
        }
        self.unlink(&key);
        match &record.node {
            Some(node) => {
                let node = Arc::clone(node);
                self.note_change(&node);
                self.pods_by_node.entry(node).or_default().insert(key.clone());
            }
            None => {
                self.unbound.insert(key.clone());
            }
        }
        self.pods.insert(key, record);
    }

    /// Forgets a pod.
    pub fn delete_pod(&mut self, key: &str, now_ms: i64) {
        self.touch();
        self.unlink(key);
        let old = self.pods.remove(key);
        self.gone.note(old.as_ref().map(|old| old.uid.clone()));
        if let Some(old) = old
            && let Some(node) = old.node
            && !old.daemon
            && self.nodes.contains_key(&*node)
        {
            self.last_pod_event_ms.insert(node, now_ms);
        }
    }

    /// The next snapshot works this node out anew.
    fn note_change(&mut self, node: &str) {
        self.seen.get_mut().unwrap_or_else(PoisonError::into_inner).note(node);
    }

    /// What a NodeClaim says of its node, or whether it has one, may have changed.
    fn relink(&mut self, claim: &str) {
        let Some(known) = self.claims.get(claim) else {
            self.in_flight.remove(claim);
            return;
        };
        if let Some(node) = self.node_of(known).map(|node| node.name_any()) {
            self.note_change(&node);
            self.in_flight.remove(claim);
        } else {
            self.in_flight.insert(claim.to_owned());
        }
    }

    /// Relinks the NodeClaim of this provider id.
    fn relink_by_id(&mut self, id: Option<&str>) {
        if let Some(claim) = id.and_then(|id| self.claim_index.of_provider_id(id)).map(str::to_owned) {
            self.relink(&claim);
        }
    }

    fn unlink(&mut self, key: &str) {
        self.unbound.remove(key);
        let Some(node) = self.pods.get(key).and_then(|old| old.node.clone()) else { return };
        self.note_change(&node);
        if let Some(keys) = self.pods_by_node.get_mut(&node) {
            keys.remove(key);
            if keys.is_empty() {
                self.pods_by_node.remove(&node);
            }
        }
    }

    /// Takes in a node as it is now, unless a newer one is known.
    pub fn apply_node(&mut self, node: Node) {
        self.touch();
        let name = node.name_any();
        if self.gone.has(&node.metadata) {
            self.delete_node(&name);
            return;
        }
        if self.nodes.get(&name).is_some_and(|known| newer(&known.metadata, &node.metadata)) {
            return;
        }
        let id_of = |node: &Node| node.spec.as_ref().and_then(|spec| spec.provider_id.clone());
        let id = id_of(&node);
        if self.nodes.get(&name).is_some_and(|known| id_of(known) != id) {
            self.drop_node(&name);
        }
        if let Some(id) = &id {
            self.node_by_provider_id.insert(id.clone(), name.clone());
        }
        self.note_change(&name);
        self.nodes.insert(name, Arc::new(node));
        self.relink_by_id(id.as_deref());
    }

    /// Forgets a node.
    pub fn delete_node(&mut self, name: &str) {
        self.touch();
        let node = self.drop_node(name);
        self.gone.note(node.and_then(|node| node.uid()));
        self.last_pod_event_ms.remove(name);
    }

    /// Takes a node out of what is known of it by any key.
    fn drop_node(&mut self, name: &str) -> Option<Arc<Node>> {
        self.note_change(name);
        let node = self.nodes.remove(name)?;
        if let Some(id) = node.spec.as_ref().and_then(|spec| spec.provider_id.as_deref())
            && self.node_by_provider_id.get(id).is_some_and(|known| known == name)
        {
            self.node_by_provider_id.remove(id);
            self.relink_by_id(Some(id));
        }
        Some(node)
    }

    /// Takes in a NodeClaim, from a watch or from the answer to a write, unless a newer one is known.
    pub fn apply_claim(&mut self, claim: NodeClaim) {
        self.touch();
        let name = claim.name_any();
        if self.gone.has(&claim.metadata) {
            self.delete_claim(&name);
            return;
        }
        if self.claims.get(&name).is_some_and(|known| newer(&known.metadata, &claim.metadata)) {
            return;
        }
        self.forget_claim(&name);
        let planned = Planned::of(&claim);
        if !planned.pods.is_empty() {
            self.held_until.insert((planned.until_ms, name.clone()));
        }
        self.planned.insert(name.clone(), planned);
        self.claim_index.add(&name, &claim);
        self.claims.insert(name.clone(), Arc::new(claim));
        self.relink(&name);
    }

    /// Takes a NodeClaim out of what is known of it by other keys.
    fn forget_claim(&mut self, name: &str) -> Option<Arc<NodeClaim>> {
        let claim = self.claims.remove(name)?;
        if let Some(planned) = self.planned.remove(name) {
            self.held_until.remove(&(planned.until_ms, name.to_owned()));
        }
        if let Some(node) = self.node_of(&claim).map(|node| node.name_any()) {
            self.note_change(&node);
        }
        self.claim_index.remove(name, &claim);
        Some(claim)
    }

    /// Forgets a NodeClaim.
    pub fn delete_claim(&mut self, name: &str) {
        self.touch();
        let claim = self.forget_claim(name);
        self.gone.note(claim.and_then(|claim| claim.uid()));
        self.relink(name);
    }

    /// Takes in a DaemonSet.
    pub fn apply_daemon_set(&mut self, set: &DaemonSet) {
        self.daemon_changes += 1;
        let key = format!("{}/{}", set.namespace().unwrap_or_default(), set.name_any());
        match self.interner.intern_daemon(set) {
            Ok(daemon) => {
                let uid = Arc::from(set.uid().unwrap_or_default());
                self.daemons.insert(key, DaemonRecord { uid, daemon });
            }
            Err(error) => {
                tracing::warn!(daemon_set = key, %error, "daemon set is not counted as overhead");
                self.daemons.remove(&key);
            }
        }
    }

    /// Forgets the DaemonSet of this `namespace/name`.
    pub fn delete_daemon_set(&mut self, key: &str) {
        self.daemon_changes += 1;
        self.daemons.remove(key);
    }

    /// Takes in a namespace.
    pub fn apply_namespace(&mut self, namespace: &Namespace) {
        if self.namespaces.get(&namespace.name_any()) != Some(namespace.labels()) {
            Arc::make_mut(&mut self.namespaces).insert(namespace.name_any(), namespace.labels().clone());
        }
    }

    /// Takes in a claim.
    pub fn apply_volume_claim(&mut self, claim: &PersistentVolumeClaim) {
        let key = format!("{}/{}", claim.namespace().unwrap_or_default(), claim.name_any());
        Arc::make_mut(&mut self.volumes).claims.insert(key, Claim::new(claim));
    }

    /// Takes in a volume. One that can't be understood is left out, and so are pods that are bound to it.
    pub fn apply_volume(&mut self, volume: &PersistentVolume) {
        let name = volume.name_any();
        let volumes = &mut Arc::make_mut(&mut self.volumes).volumes;
        match Volume::new(volume) {
            Ok(volume) => {
                volumes.insert(name, volume);
            }
            Err(error) => {
                tracing::warn!(volume = name, %error, "volume can't be understood");
                volumes.remove(&name);
            }
        }
    }

    /// Takes in a storage class.
    pub fn apply_storage_class(&mut self, class: &StorageClass) {
        Arc::make_mut(&mut self.volumes).classes.insert(class.name_any(), objects::StorageClass::new(class));
    }

    /// Takes in what a node's drivers can attach.
    pub fn apply_csi_node(&mut self, node: &CSINode) {
        Arc::make_mut(&mut self.volumes).limits.insert(node.name_any(), objects::attach_limits(node));
    }

    /// Takes in a Service.
    pub fn apply_service(&mut self, service: &Service) {
        Arc::make_mut(&mut self.services).apply(service);
    }

    /// The NodeClaim of a Node.
    pub fn claim_of(&self, node: &Node) -> Option<&Arc<NodeClaim>> {
        let id = node.spec.as_ref()?.provider_id.as_deref()?;
        // Of two Nodes of one provider id, the claim belongs to the one that came last.
        self.node_by_provider_id.get(id).filter(|name| Some(name.as_str()) == node.metadata.name.as_deref())?;
        self.claims.get(self.claim_index.of_provider_id(id)?)
    }

    /// The Node of a NodeClaim, once one has registered with its provider id.
    pub fn node_of(&self, claim: &NodeClaim) -> Option<&Arc<Node>> {
        let id = claim.status.as_ref()?.provider_id.as_deref()?;
        self.nodes.get(self.node_by_provider_id.get(id)?)
    }

    /// Records of the pods bound to a node.
    pub fn pods_on<'a>(&'a self, node: &str) -> impl Iterator<Item = &'a PodRecord> {
        self.pods_by_node.get(node).into_iter().flatten().filter_map(|key| self.pods.get(key))
    }
}

/// Whether `known` is the same object as `other` at a later resource version. Versions are opaque by contract but are
/// etcd revisions in every release, and comparable by contract from Kubernetes 1.35; where they don't parse, the event wins.
fn newer(known: &ObjectMeta, other: &ObjectMeta) -> bool {
    let version = |meta: &ObjectMeta| meta.resource_version.as_deref().and_then(|text| text.parse::<u64>().ok());
    known.uid == other.uid && matches!((version(known), version(other)), (Some(known), Some(other)) if known > other)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::test_support::objects;

    fn pod(json: serde_json::Value) -> Pod {
        serde_json::from_value(json).unwrap()
    }

    #[test]
    fn a_problem_keeps_the_volumes_that_it_was_made_with() {
        let read = |object: serde_json::Value| serde_json::from_value::<PersistentVolumeClaim>(object).unwrap();
        let mut state = ClusterState::default();
        state.apply_volume_claim(&read(serde_json::json!({"metadata": {"name": "c", "namespace": "n"}, "spec": {}})));
        let before = Arc::clone(&state.volumes);
        let metadata = serde_json::json!({"name": "c", "namespace": "n", "annotations": {"pv.kubernetes.io/bind-completed": "yes"}});
        state.apply_volume_claim(&read(serde_json::json!({"metadata": metadata, "spec": {"volumeName": "v"}})));
        assert!(!before.claims["n/c"].bound && state.volumes.claims["n/c"].bound);
        let volume = serde_json::json!({"metadata": {"name": "v"}, "spec": {"nodeAffinity": {"required": {"nodeSelectorTerms": [
            {"matchExpressions": [{"key": "z", "operator": "Near"}]}]}}}});
        state.apply_volume(&serde_json::from_value(volume).unwrap());
        assert!(state.volumes.volumes.is_empty(), "not understood");
    }

    #[test]
    fn a_pod_moves_from_unbound_to_its_node_and_is_forgotten() {
        let mut state = ClusterState::default();
        let mut json = serde_json::json!({"metadata": {"name": "a", "namespace": "n", "uid": "1"},
            "spec": {"containers": [{"name": "c", "image": "i"}]}});
        state.apply_pod(&pod(json.clone()), 10);
        assert!(state.unbound.contains("n/a"));
        assert_eq!(state.last_pod_created_ms, 10);
        json["spec"]["nodeName"] = "node-1".into();
        state.apply_pod(&pod(json), 20);
        assert!(state.unbound.is_empty());
        assert_eq!(state.pods_on("node-1").count(), 1);
        assert_eq!(state.last_pod_event_ms.get("node-1"), Some(&20));
        state.apply_node(serde_json::from_value(serde_json::json!({"metadata": {"name": "node-1"}})).unwrap());
        state.delete_pod("n/a", 30);
        assert_eq!(state.pods_on("node-1").count(), 0);
        assert!(state.pods_by_node.is_empty());
        assert_eq!(state.last_pod_event_ms.get("node-1"), Some(&30));
    }

    #[test]
    fn a_late_answer_brings_nothing_back() {
        let mut state = ClusterState::default();
        let claim = |version: &str, finalizers: &[&str]| -> NodeClaim {
            let deletion = "2026-01-01T00:00:00Z";
            let meta = json!({"resourceVersion": version, "finalizers": finalizers, "deletionTimestamp": deletion});
            objects::claim("c", &json!({ "metadata": meta }))
        };
        state.apply_claim(claim("1", &["f"]));
        assert_eq!(state.claims.len(), 1);
        state.apply_claim(claim("2", &[]));
        assert!(state.claims.is_empty(), "the write took its last finalizer off");
        state.apply_claim(claim("1", &["f"]));
        assert!(state.claims.is_empty(), "an answer older than its deletion");
    }

    #[test]
    fn a_stale_event_does_not_undo_a_write() {
        let mut state = ClusterState::default();
        let claim = |version: &str, annotation: &str| -> NodeClaim {
            let meta = json!({"resourceVersion": version, "annotations": {"a": annotation}});
            objects::claim("c", &json!({ "metadata": meta }))
        };
        state.apply_claim(claim("9", "old"));
        state.apply_claim(claim("10", "new"));
        state.apply_claim(claim("9", "old"));
        assert_eq!(state.claims["c"].annotations()["a"], "new");
    }
}
