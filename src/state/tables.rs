//! Tables of watched objects, and the effect of an event on them.

mod node_links;
mod plans;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::{LimitRange, Namespace, Node, Pod, Service};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::ResourceExt;
use stowage_api::{Ec2NodeClass, NodeClaim, NodePool};
use stowage_model::labels;
use stowage_model::pause::Pause;
use stowage_model::time::UnixMillis;
use stowage_planner::{DefaultSpread, Interner, Labels, Services, volumes::Volumes};

use crate::state::attachments::Attachments;
use crate::state::change_log::ChangeLog;
use crate::state::claim_index::ClaimIndex;
use crate::state::daemon_sets::DaemonSets;
use crate::state::deleted_uids::DeletedUids;
use crate::state::node_health::Unhealthy;
use crate::state::object_ext::{NodeClaimExt, NodeExt, ObjectExt};
use crate::state::plan_index::PlanIndex;
use crate::state::plan_record::PlanRecord;
use crate::state::pod_budgets::PodBudgets;
use crate::state::pod_progress::PodTimes;
use crate::state::pods::{PodRecord, Scheduling};
use crate::state::protections::{Protected, Protections, protection_ends};
use crate::state::schedulers::Schedulers;

/// The watched objects.
#[derive(Debug, Default)]
pub struct ClusterState {
    /// Pods by `namespace/name`.
    pub pods: HashMap<String, PodRecord>,
    /// Keys of pods by the node they are bound to.
    pub pods_by_node: HashMap<Arc<str>, BTreeSet<String>>,
    /// Keys of pods by the UID of their controlling owner. Invalid pods are left out.
    pods_by_owner: HashMap<Arc<str>, BTreeSet<Arc<str>>>,
    /// Keys of pods that are not bound to a node.
    pub unbound: BTreeSet<String>,
    /// Keys of pods that left their ReplicaSets for a surge.
    pub surged: BTreeSet<String>,
    pub schedulers: Schedulers,
    pub pod_times: PodTimes,
    /// When a pod was last bound to or removed from a node, by node. DaemonSet pods do not count.
    pub last_pod_event: HashMap<Arc<str>, UnixMillis>,
    /// Protections of pods, Nodes and NodeClaims by `karpenter.sh/do-not-disrupt` with a duration.
    pub protections: Protections,
    /// Nodes by name.
    pub nodes: BTreeMap<String, Arc<Node>>,
    /// Node name by provider id; of several Nodes with one provider id, the Node that [`Self::claim_of`] gives the NodeClaim to.
    pub node_by_provider_id: HashMap<String, String>,
    /// The other Nodes of provider ids that several Nodes have.
    duplicate_nodes: BTreeMap<String, BTreeSet<String>>,
    /// NodeClaims by name.
    pub claims: BTreeMap<String, Arc<NodeClaim>>,
    /// NodeClaims of other providers by name, with their provider ids. Nothing else is known of them: they are not ours to act on.
    pub foreign_claims: BTreeMap<String, Option<String>>,
    /// The plans of NodeClaims: those that they carry, or that are assumed.
    pub planned: BTreeMap<String, PlanRecord>,
    /// Plans that are assumed while they are written, by NodeClaim.
    assumed: BTreeMap<String, PlanRecord>,
    /// NodePools by name.
    pub pools: BTreeMap<String, Arc<NodePool>>,
    /// EC2NodeClasses by name.
    pub classes: BTreeMap<String, Arc<Ec2NodeClass>>,
    /// DaemonSets and LimitRanges.
    pub daemons: DaemonSets,
    /// PodDisruptionBudgets.
    pub pod_budgets: PodBudgets,
    /// Labels of namespaces; shared with the problems built from this state.
    pub namespaces: Arc<BTreeMap<String, Labels>>,
    /// Volume claims, volumes, storage classes and attach limits; shared with the problems built from this state.
    pub volumes: Arc<Volumes>,
    /// VolumeAttachments.
    pub attachments: Attachments,
    /// Selectors of Services, for default spread constraints; shared with the problems built from this state.
    pub services: Arc<Services>,
    /// The emergency stop; `None` before it was read.
    pub pause: Option<Pause>,
    /// Kinds whose first listing is complete.
    pub synced: BTreeSet<&'static str>,
    interner: Interner,
    deleted: DeletedUids,
    /// Changes of pods, nodes and NodeClaims so far: results derived from them are valid for one revision.
    pub revision: u64,
    /// Changes so far that may affect the live holds.
    pub hold_revision: u64,
    /// When a pod was last observed: plans whose holds ended before do not count for `hold_revision`.
    observed_at: UnixMillis,
    /// Nodes that changed, or whose claim or pods did.
    pub node_changes: ChangeLog,
    /// NodeClaims that changed, or whose node did.
    pub claim_changes: ChangeLog,
    /// Nodes with an unhealthy condition, by name.
    pub unhealthy: BTreeMap<String, Unhealthy>,
    /// Names of the nodes with the planned taint.
    pub tainted_nodes: BTreeSet<String>,
    pub plan_index: PlanIndex,
    pub claim_index: ClaimIndex,
    /// NodeClaims by the end of their holds; claims without planned pods are left out.
    held_until: BTreeSet<(UnixMillis, String)>,
    /// NodeClaims without a Node.
    pub in_flight: BTreeSet<String>,
}

impl ClusterState {
    /// What the emergency stop pauses; nothing before it was read.
    pub fn pause(&self) -> Pause {
        self.pause.unwrap_or_default()
    }

    /// When a pod was last observed.
    pub fn observed_at(&self) -> UnixMillis {
        self.observed_at
    }

    /// NodeClaims with holds that end after `now`, with the end; once for each where they have several.
    pub fn held_after(&self, now: UnixMillis) -> impl Iterator<Item = &(UnixMillis, String)> {
        self.held_until.range((UnixMillis(now.0.saturating_add(1)), String::new())..)
    }

    /// A state that gives these constraints to pods without topology spread constraints of their own.
    pub fn with_default_spread(default_spread: DefaultSpread) -> Self {
        let services = Arc::new(Services::new(default_spread.clone()));
        Self { interner: Interner::with_default_spread(default_spread), services, ..Self::default() }
    }

    /// Applies a pod observed at `now`.
    pub fn apply_pod(&mut self, pod: &Pod, now: UnixMillis) {
        self.revision += 1;
        let key = format!("{}/{}", pod.namespace().unwrap_or_default(), pod.name_any());
        if self.deleted.contains(&pod.metadata) {
            return;
        }
        let entry = self.interner.intern(pod).map_err(|error| error.to_string());
        let mut record = PodRecord::new(pod, entry);
        let old = self.pods.get(&key).filter(|old| old.uid == record.uid);
        if old.is_some_and(|old| matches!((old.version, record.version), (Some(old), Some(new)) if old > new)) {
            return;
        }
        if matches!(record.scheduling, Scheduling::Unschedulable { .. }) {
            record.first_unschedulable = old.and_then(|old| old.first_unschedulable).or(Some(now));
        }
        record.is_planned_unattempted = old.is_some_and(|old| old.is_planned_unattempted);
        record.is_launched_for = old.is_some_and(|old| old.is_launched_for);
        if let Some(old) = old {
            record.progress = self.pod_times.follow(old, &record, now);
        }
        record.do_not_disrupt = record.protected_until > now;
        record.was_unbound |= old.is_some_and(|old| old.was_unbound);
        let was_gated =
            |old: &&PodRecord| old.scheduling == Scheduling::Gated && record.scheduling != Scheduling::Gated;
        record.first_seen = old.filter(|old| !was_gated(old)).map_or(now, |old| old.first_seen);
        self.schedulers.observe(old, &record, now);
        let gone = !record.active() || record.deleted_at.is_some();
        let was_gone = old.is_some_and(|old| !old.active() || old.deleted_at.is_some());
        let moved = old.and_then(|old| old.node.clone()) != record.node;
        let counts = !record.daemon && (moved || gone != was_gone);
        let (is_new, resized) = (old.is_none(), old.is_some_and(|old| !same_class(old, &record)));
        self.observed_at = now;
        let end = |pod: &PodRecord| (pod.active(), pod.deleted_at.is_some(), pod.has_surged());
        let owner = |pod: &PodRecord| pod.entry.as_ref().ok().and_then(|entry| entry.owner.clone());
        let adopted = old.is_some_and(|old| owner(old) != owner(&record));
        let admitted = old.is_some_and(|old| old.admitted != record.admitted);
        if moved || resized || adopted || admitted || old.is_none_or(|old| end(old) != end(&record)) {
            let affects = |pod: &PodRecord| self.affects_holds(&key, pod);
            self.hold_revision += u64::from(affects(&record) || self.pods.get(&key).is_some_and(affects));
        }
        self.unlink(&key);
        if record.do_not_disrupt {
            self.protections.add(record.protected_until, Protected::Pod(key.clone()));
        }
        if counts && let Some(node) = &record.node {
            // A pod that is observed for the first time, after a start, may have been there for long.
            let at = record.last_event.filter(|at| is_new && *at < now && record.deleted_at.is_none()).unwrap_or(now);
            let last = self.last_pod_event.entry(node.clone()).or_insert(at);
            *last = at.max(*last);
        }
        if let Ok(entry) = &record.entry
            && let Some(owner) = &entry.owner
        {
            // One text for all pods of an owner.
            if let Some(sibling) = self
                .pods_of(owner)
                .next()
                .and_then(|pod| pod.owner.as_ref())
                .filter(|path| Some(*path) == record.owner.as_ref())
            {
                record.owner = Some(Arc::clone(sibling));
            }
            self.pods_by_owner.entry(Arc::clone(owner)).or_default().insert(Arc::clone(&entry.key));
        }
        if record.has_surged() {
            self.surged.insert(key.clone());
        }
        match &record.node {
            Some(node) => {
                let node = Arc::clone(node);
                self.node_changes.record(&node);
                self.pods_by_node.entry(node).or_default().insert(key.clone());
            }
            None => {
                self.unbound.insert(key.clone());
            }
        }
        if let Ok(entry) = &record.entry
            && record.daemon
            && (is_new || resized)
            && !gone
        {
            self.daemons.observe(entry);
        }
        self.pods.insert(key, record);
    }

    /// Removes a pod whose deletion was observed at `now`.
    pub fn delete_pod(&mut self, key: &str, now: UnixMillis) {
        self.revision += 1;
        self.observed_at = now;
        let affects = self.pods.get(key).is_some_and(|pod| self.affects_holds(key, pod));
        self.hold_revision += u64::from(affects);
        self.unlink(key);
        let old = self.pods.remove(key);
        self.deleted.record(old.as_ref().map(|old| old.uid.clone()));
        // A finished pod ended before.
        let ends = |old: &PodRecord| !old.daemon && old.active();
        let Some((ends, node)) = old.and_then(|old| Some((ends(&old), old.node?))) else { return };
        if !self.nodes.contains_key(&*node) {
            if !self.pods_by_node.contains_key(&node) {
                self.last_pod_event.remove(&node);
            }
        } else if ends {
            self.last_pod_event.insert(node, now);
        }
    }

    /// Ends the protections that are over.
    pub fn end_protections(&mut self, now: UnixMillis) {
        while let Some(of) = self.protections.end_next(now) {
            self.revision += 1;
            let node = match of {
                Protected::Pod(key) => self.pods.get_mut(&key).and_then(|pod| {
                    pod.do_not_disrupt = false;
                    pod.node.as_deref().map(str::to_owned)
                }),
                Protected::Node(name) => Some(name),
                Protected::Claim(name) => {
                    self.claims.get(&name).and_then(|claim| self.node_of(claim)).map(|node| node.name_any())
                }
            };
            if let Some(node) = node {
                self.node_changes.record(&node);
            }
        }
    }

    /// Whether a Node or NodeClaim has the annotation `karpenter.sh/do-not-disrupt`, and it protects.
    pub fn is_protected<K: ResourceExt>(&self, object: &K) -> bool {
        self.protections.lasts(protection_ends(object))
    }

    fn unlink(&mut self, key: &str) {
        self.unbound.remove(key);
        self.surged.remove(key);
        let Some(old) = self.pods.get(key) else { return };
        self.protections.remove(old.protected_until, Protected::Pod(key.to_owned()));
        if let Some(owner) = old.entry.as_ref().ok().and_then(|entry| entry.owner.as_deref())
            && let Some(keys) = self.pods_by_owner.get_mut(owner)
        {
            keys.remove(key);
            if keys.is_empty() {
                self.pods_by_owner.remove(owner);
            }
        }
        let Some(node) = old.node.clone() else { return };
        self.node_changes.record(&node);
        if let Some(keys) = self.pods_by_node.get_mut(&node) {
            keys.remove(key);
            if keys.is_empty() {
                self.pods_by_node.remove(&node);
            }
        }
    }

    /// Whether a change of this pod may affect the live holds: a plan with holds names it or a controller that it counts for, or its node may hold room.
    fn affects_holds(&self, key: &str, pod: &PodRecord) -> bool {
        let id = pod.node.as_deref().and_then(|node| self.nodes.get(node)?.provider_id());
        let mut claims = id.into_iter().flat_map(|id| self.claim_index.all_of_provider_id(id));
        // Ended plans say of which controller a displaced pod was.
        let displaced_of = |claim: &String| self.planned.get(claim)?.owners.get(key);
        let mut owners = self.plan_index.claims_of(key).filter_map(displaced_of);
        self.concerns_holds(key, pod)
            || owners.any(|owner| self.plan_index.is_live_owner(&owner.uid, self.observed_at))
            || claims.any(|claim| self.may_hold(claim))
    }

    /// Whether a plan with holds names this pod or its controller.
    fn concerns_holds(&self, key: &str, pod: &PodRecord) -> bool {
        let owner = pod.entry.as_ref().ok().and_then(|entry| entry.owner.as_deref());
        self.plan_index.is_live(key, self.observed_at)
            || owner.is_some_and(|owner| self.plan_index.is_live_owner(owner, self.observed_at))
    }

    /// Applies a Node, unless a newer version is known.
    pub fn apply_node(&mut self, node: Node) {
        self.revision += 1;
        let name = node.name_any();
        if self.deleted.is_gone(&node.metadata) {
            if self.nodes.get(&name).is_some_and(|known| known.metadata.uid == node.metadata.uid) {
                self.delete_node(&name);
            } else {
                self.deleted.record(node.metadata.uid);
            }
            return;
        }
        if self.nodes.get(&name).is_some_and(|known| newer(&known.metadata, &node.metadata)) {
            return;
        }
        let id = node.provider_id().map(str::to_owned);
        if self.nodes.get(&name).is_some_and(|known| known.provider_id() != id.as_deref()) {
            self.drop_node(&name);
        }
        self.node_changes.record(&name);
        if node.taints().any(|taint| taint.key == labels::PLANNED_TAINT) {
            self.tainted_nodes.insert(name.clone());
        } else {
            self.tainted_nodes.remove(&name);
        }
        if let Some(known) = self.nodes.get(&name) {
            self.protections.remove(protection_ends(&**known), Protected::Node(name.clone()));
        }
        if self.is_protected(&node) {
            self.protections.add(protection_ends(&node), Protected::Node(name.clone()));
        }
        match Unhealthy::of(&node) {
            Some(unhealthy) => drop(self.unhealthy.insert(name.clone(), unhealthy)),
            None => drop(self.unhealthy.remove(&name)),
        }
        self.nodes.insert(name.clone(), Arc::new(node));
        if let Some(id) = &id {
            match self.node_by_provider_id.get(id) {
                Some(known) if *known != name => {
                    self.duplicate_nodes.entry(id.clone()).or_default().insert(name);
                    self.choose_node(id);
                }
                // It may be another Node under the same name.
                Some(_) => self.choose_node(id),
                None => drop(self.node_by_provider_id.insert(id.clone(), name)),
            }
        }
        self.relink_by_id(id.as_deref());
    }

    /// Removes a Node.
    pub fn delete_node(&mut self, name: &str) {
        self.revision += 1;
        let node = self.drop_node(name);
        self.deleted.record(node.and_then(|node| node.uid()));
        self.last_pod_event.remove(name);
    }

    /// Removes a Node from every table.
    fn drop_node(&mut self, name: &str) -> Option<Arc<Node>> {
        self.node_changes.record(name);
        self.tainted_nodes.remove(name);
        self.unhealthy.remove(name);
        let node = self.nodes.remove(name)?;
        self.protections.remove(protection_ends(&*node), Protected::Node(name.to_owned()));
        if let Some(id) = node.provider_id() {
            if let Some(duplicates) = self.duplicate_nodes.get_mut(id) {
                duplicates.remove(name);
            }
            if self.node_by_provider_id.get(id).is_some_and(|known| known == name) {
                self.node_by_provider_id.remove(id);
            }
            self.choose_node(id);
            self.relink_by_id(Some(id));
        }
        Some(node)
    }

    /// Applies a NodeClaim from a watch or from the response to a write, unless a newer version is known.
    pub fn apply_claim(&mut self, claim: NodeClaim) {
        self.revision += 1;
        let name = claim.name_any();
        if self.deleted.is_gone(&claim.metadata) {
            if self.claims.get(&name).is_none_or(|known| known.metadata.uid == claim.metadata.uid) {
                self.delete_claim(&name);
            }
            self.deleted.record(claim.metadata.uid);
            return;
        }
        if self.claims.get(&name).is_some_and(|known| newer(&known.metadata, &claim.metadata)) {
            return;
        }
        if !claim.spec.node_class_ref.is_ours() {
            self.assumed.remove(&name);
            self.drop_claim(&name);
            self.relink(&name);
            self.foreign_claims.insert(name, claim.provider_id().map(str::to_owned));
            return;
        }
        self.foreign_claims.remove(&name);
        let before = self.drop_claim(&name);
        let is_new = before.is_none();
        if before.is_some_and(|before| before.metadata.uid != claim.metadata.uid) {
            // Another NodeClaim of the same name.
            self.assumed.remove(&name);
        }
        // Pods may be moved from it: with the first listing it may come after their plans.
        self.hold_revision += u64::from(is_new);
        self.add_plan(&name, self.plan_of(&claim));
        self.claim_index.add(&name, &claim);
        if self.is_protected(&claim) {
            self.protections.add(protection_ends(&claim), Protected::Claim(name.clone()));
        }
        let claim = Arc::new(claim);
        self.claims.insert(name.clone(), Arc::clone(&claim));
        if let Some(id) = claim.provider_id() {
            self.choose_node(id);
        }
        self.relink(&name);
        self.relink_by_id(claim.provider_id());
    }

    /// Removes a NodeClaim from every table.
    fn drop_claim(&mut self, name: &str) -> Option<Arc<NodeClaim>> {
        self.record_holds_of(name);
        let claim = self.claims.remove(name)?;
        self.protections.remove(protection_ends(&*claim), Protected::Claim(name.to_owned()));
        self.remove_plan(name);
        if let Some(node) = self.node_of(&claim).map(|node| node.name_any()) {
            self.node_changes.record(&node);
        }
        self.claim_index.remove(name, &claim);
        if let Some(id) = claim.provider_id() {
            // Another claim may have the same provider id, and another Node registered.
            self.choose_node(id);
            self.relink_by_id(Some(id));
        }
        Some(claim)
    }

    /// Whether a NodeClaim belongs to a static NodePool (`spec.replicas`): its node is neither empty nor underutilized.
    pub fn is_static(&self, claim: &NodeClaim) -> bool {
        let pool = claim.node_pool().and_then(|name| self.pools.get(name));
        pool.is_some_and(|pool| pool.spec.replicas.is_some())
    }

    /// Applies a NodePool. Those of other providers are left out.
    pub fn apply_pool(&mut self, pool: NodePool) {
        let name = pool.name_any();
        if pool.spec.template.spec.node_class_ref.is_ours() {
            self.pools.insert(name, Arc::new(pool));
        } else {
            self.pools.remove(&name);
        }
    }

    /// Removes a NodeClaim.
    pub fn delete_claim(&mut self, name: &str) {
        self.revision += 1;
        // Pods may be moved from it.
        self.hold_revision += 1;
        self.foreign_claims.remove(name);
        self.assumed.remove(name);
        let claim = self.drop_claim(name);
        self.deleted.record(claim.and_then(|claim| claim.uid()));
        self.relink(name);
    }

    /// Applies a DaemonSet.
    pub fn apply_daemon_set(&mut self, set: &DaemonSet) {
        let (pods, by_owner) = (&self.pods, &self.pods_by_owner);
        let pods_of = |owner: &str| {
            let records = by_owner.get(owner).into_iter().flatten().filter_map(|key| pods.get(&**key));
            records.filter(|pod| pod.active()).filter_map(|pod| pod.entry.as_ref().ok())
        };
        self.daemons.apply(&mut self.interner, set, pods_of);
    }

    /// Applies a LimitRange.
    pub fn apply_limit_range(&mut self, limit_range: &LimitRange) {
        self.daemons.apply_limit_range(&mut self.interner, limit_range);
    }

    /// Removes the LimitRange `namespace/name`.
    pub fn delete_limit_range(&mut self, key: &str) {
        self.daemons.delete_limit_range(&mut self.interner, key);
    }

    /// Applies a Namespace.
    pub fn apply_namespace(&mut self, namespace: &Namespace) {
        if self.namespaces.get(&namespace.name_any()) != Some(namespace.labels()) {
            Arc::make_mut(&mut self.namespaces).insert(namespace.name_any(), namespace.labels().clone());
        }
    }

    /// Applies a Service.
    pub fn apply_service(&mut self, service: &Service) {
        Arc::make_mut(&mut self.services).apply(service);
    }

    /// Records of the pods that a controller owns, in the order of their keys. Its UID may be copied to another namespace.
    pub fn pods_of<'a>(&'a self, owner: &str) -> impl Iterator<Item = &'a PodRecord> {
        self.pods_by_owner.get(owner).into_iter().flatten().filter_map(|key| self.pods.get(&**key))
    }

    /// Sizes of the tables, by name.
    pub fn table_sizes(&self) -> Vec<(&'static str, usize)> {
        let mut sizes = vec![
            ("pods", self.pods.len()),
            ("nodes", self.nodes.len()),
            ("nodeclaims", self.claims.len()),
            ("owners", self.pods_by_owner.len()),
            ("pod_events", self.last_pod_event.len()),
            ("protections", self.protections.len()),
            ("node_changes", self.node_changes.size()),
            ("claim_changes", self.claim_changes.size()),
        ];
        sizes.extend(self.interner.sizes());
        sizes
    }

    /// Records of the pods bound to a node.
    pub fn pods_on<'a>(&'a self, node: &str) -> impl Iterator<Item = &'a PodRecord> {
        self.pods_by_node.get(node).into_iter().flatten().filter_map(|key| self.pods.get(key))
    }
}

/// Whether two versions of a pod have the same requests and constraints.
fn same_class(old: &PodRecord, new: &PodRecord) -> bool {
    matches!((&old.entry, &new.entry), (Ok(old), Ok(new)) if Arc::ptr_eq(&old.class, &new.class))
}

/// Whether `known` is the same object as `other` at a later resource version. Resource versions are opaque by contract but are
/// etcd revisions in every release, and comparable by contract from Kubernetes 1.35; if they do not parse, the event wins.
fn newer(known: &ObjectMeta, other: &ObjectMeta) -> bool {
    let version = |meta: &ObjectMeta| meta.resource_version.as_deref().and_then(|text| text.parse::<u64>().ok());
    known.uid == other.uid && matches!((version(known), version(other)), (Some(known), Some(other)) if known > other)
}

#[cfg(test)]
mod tests;
