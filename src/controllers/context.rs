//! The dependencies of every controller, and its writes to the API server.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use k8s_openapi::api::core::v1::{Node, ObjectReference, Taint};
use kube::api::{Patch, PatchParams};
use kube::{Api, Client, Resource, ResourceExt};
use serde_json::{Value, json};
use stowage_api::NodeClaim;
use stowage_cloud::Cloud;
use stowage_model::events::EventSpec;
use stowage_model::time::UnixMillis;
use stowage_planner::PlanSettings;
use stowage_runtime::clock;
use stowage_runtime::sync::lock;
use stowage_runtime::telemetry::controllers::ControllerMetrics;
use tokio::sync::{Notify, Semaphore};

use crate::controllers::caps::Caps;
use crate::controllers::confirmed_drains::{ClaimSet, ConfirmedDrains};
use crate::controllers::derived_state::DerivedState;
use crate::controllers::event_recorder::EventRecorder;
use crate::decisions::demand::may_launch;
use crate::decisions::disruption::reason::DisruptionReason;
use crate::decisions::last_decisions::{LastConsolidation, LastPlan};
use crate::decisions::lifecycle::instance_checks::InstanceChecks;
use crate::decisions::lifecycle::registration_health::RegistrationHealth;
use crate::decisions::placement::closure::{ClosedNodes, any_source};
use crate::decisions::placement::mode::PlacementMode;
use crate::decisions::provisioning::batch_window::BatchLimits;
use crate::decisions::provisioning::purchase_backoff::PurchaseBackoff;
use crate::decisions::provisioning::quarantine::Quarantine;
use crate::decisions::provisioning::supply_quarantine::SupplyQuarantine;
use crate::decisions::staleness::Removal;
use crate::state::Cluster;
use crate::state::object_ext::{NodeExt, ObjectExt};
use crate::state::plan_record::PlanRecord;
use crate::state::pool_types::ReadyPool;
use crate::state::watch_signs::Stale;

/// Settings of the controllers.
#[derive(Clone, Debug)]
pub struct Settings {
    pub placement: PlacementMode,
    pub batch: BatchLimits,
    /// Maximum number of NodeClaims created in any minute.
    pub max_purchases_per_minute: usize,
    /// Maximum number of nodes disrupted voluntarily, or collected as garbage, in any minute.
    pub max_disruptions_per_minute: usize,
    /// Maximum number of pods evicted in any second, but for those of nodes with a deadline.
    pub max_evictions_per_second: usize,
    /// Whether unhealthy nodes are repaired.
    pub node_repair: bool,
    /// Whether static NodePools are served.
    pub static_capacity: bool,
    /// Whether consolidation replaces spot nodes with spot nodes.
    pub spot_to_spot: bool,
    /// The component that events name.
    pub reporting_component: String,
    pub plan: PlanSettings,
}

/// Clients of the API server. Each has a limit of requests in flight of its own.
pub struct Clients {
    pub writes: Client,
    /// To create NodeClaims, and for the plans that they carry. Pods wait for these writes, which do not queue behind those for the nodes of earlier plans.
    pub plans: Client,
    /// Without retries, for evictions: a refusal by a PodDisruptionBudget (429) is a result, which retries would delay for minutes, past
    /// the deadline of a drain.
    pub evictions: Client,
}

/// The dependencies of every controller.
pub struct Context {
    pub client: Client,
    pub plan_client: Client,
    pub eviction_client: Client,
    pub cluster: Arc<Cluster>,
    pub derived: Arc<DerivedState>,
    pub cloud: Arc<dyn Cloud>,
    pub settings: Settings,
    pub metrics: ControllerMetrics,
    pub caps: Caps,
    /// One for each request of an eviction that is under way.
    pub eviction_slots: Semaphore,
    /// Notified when the NodeClaims of a plan have been created: they are launched at once.
    pub claims_created: Notify,
    /// A batch of pods is open or being planned.
    pub is_planning: AtomicBool,
    /// One for each proof of a written plan that may run.
    pub proof_slots: Arc<Semaphore>,
    pub confirmed_drains: ConfirmedDrains,
    /// Claims whose drain is in the log.
    pub drains_logged: ClaimSet,
    /// Pods that are left out of plans for a while.
    pub quarantine: Mutex<Quarantine>,
    /// Pods that are left out of plans because nodes were purchased for them in vain.
    pub purchase_backoff: Mutex<PurchaseBackoff>,
    /// NodePools and nodes that are left out of plans for a while.
    pub supply_quarantine: Mutex<SupplyQuarantine>,
    pub last_plan: Mutex<Option<Arc<LastPlan>>>,
    pub last_consolidation: Mutex<Option<LastConsolidation>>,
    /// The nodes that would be disrupted, while disruption is only reported.
    pub reported: Mutex<BTreeMap<String, DisruptionReason>>,
    pub plan_writes: PlanWrites,
    /// Pods whose plan could not be written.
    pub unwritten: Mutex<BTreeSet<String>>,
    /// One for each plan whose additions to existing NodeClaims may be written while the next one is made.
    pub extension_slots: Arc<Semaphore>,
    /// Held while chosen nodes are marked, so that two choices do not use the same budget.
    pub disrupting: tokio::sync::Mutex<()>,
    /// Claims whose disruption was given up: they are not chosen again for a while.
    pub abandoned: Mutex<BTreeMap<String, Duration>>,
    /// Whether the nodes of each NodePool register.
    pub registration_health: Mutex<RegistrationHealth>,
    recorder: EventRecorder,
    /// Claims with a Node that is not ready whose instance was looked up.
    pub instance_checks: Mutex<InstanceChecks>,
}

/// Held while the plan of a NodeClaim is written: several loops write plans.
#[derive(Debug)]
pub struct PlanWrites([tokio::sync::Mutex<()>; 64]);

impl Default for PlanWrites {
    fn default() -> Self {
        Self(std::array::from_fn(|_| tokio::sync::Mutex::default()))
    }
}

impl PlanWrites {
    /// Waits for other writers of this claim, and of few others.
    pub async fn lock(&self, claim: &str) -> tokio::sync::MutexGuard<'_, ()> {
        let mut hasher = DefaultHasher::new();
        claim.hash(&mut hasher);
        let at = usize::try_from(hasher.finish() % self.0.len() as u64).unwrap_or(0);
        self.0[at].lock().await
    }
}

/// Concurrent evictions for all nodes: an interruption may concern thousands of pods.
const MAX_EVICTIONS: usize = 100;

/// Plans whose additions to existing NodeClaims are being written.
const MAX_EXTENSIONS: usize = 4;

/// Attempts to write an object that other clients write at the same time.
const ATTEMPTS: u32 = 5;

impl Context {
    pub fn new(
        clients: Clients,
        cluster: Arc<Cluster>,
        derived: Arc<DerivedState>,
        cloud: Arc<dyn Cloud>,
        settings: Settings,
        metrics: ControllerMetrics,
    ) -> Self {
        let Clients { writes: client, plans: plan_client, evictions: eviction_client } = clients;
        let recorder = EventRecorder::new(client.clone(), settings.reporting_component.clone());
        let (claims_created, quarantine, instance_checks) = (Notify::new(), Mutex::default(), Mutex::default());
        let caps = Caps::after(&cluster.read(), clock::now());
        let confirmed_drains = ConfirmedDrains::default();
        Self {
            client,
            plan_client,
            eviction_client,
            eviction_slots: Semaphore::new(MAX_EVICTIONS),
            cluster,
            derived,
            cloud,
            settings,
            metrics,
            caps,
            claims_created,
            is_planning: AtomicBool::new(false),
            proof_slots: Arc::new(Semaphore::new(1)),
            confirmed_drains,
            drains_logged: ClaimSet::default(),
            quarantine,
            purchase_backoff: Mutex::default(),
            supply_quarantine: Mutex::default(),
            last_plan: Mutex::default(),
            last_consolidation: Mutex::default(),
            reported: Mutex::default(),
            plan_writes: PlanWrites::default(),
            unwritten: Mutex::default(),
            extension_slots: Arc::new(Semaphore::new(MAX_EXTENSIONS)),
            disrupting: tokio::sync::Mutex::default(),
            abandoned: Mutex::default(),
            registration_health: Mutex::default(),
            recorder,
            instance_checks,
        }
    }

    /// Whether a watch that this removal depends on is too old for it. The caller tries again in its next pass.
    pub fn is_stale(&self, removal: Removal) -> bool {
        let Some(Stale { kind, age }) = removal.held_up_by(self.cluster.watch_signs(), clock::now()) else {
            return false;
        };
        let decision = removal.metric_label();
        tracing::debug!(decision, kind, seconds = age.as_secs(), "watch is stale, nothing is removed");
        self.metrics.stale_decisions.with_label_values(&[decision]).inc();
        true
    }

    /// Pools that may launch nodes now, with their offerings.
    pub fn ready_pools(&self) -> Vec<ReadyPool> {
        let state = self.cluster.read();
        let ready = state.pools.values().filter(|pool| may_launch(pool));
        ready
            .filter_map(|pool| {
                let class = state.classes.get(&pool.spec.template.spec.node_class_ref.name)?;
                Some(ReadyPool { pool: Arc::clone(pool), catalog: self.cloud.catalog(class) })
            })
            .collect()
    }

    /// The nodes to keep closed while pods move.
    pub fn closed_nodes(&self, now: UnixMillis) -> ClosedNodes {
        if self.settings.placement != PlacementMode::Nominate || !any_source(&self.cluster.read(), now) {
            return ClosedNodes::default();
        }
        let pools = self.ready_pools();
        self.derived.closed_nodes(&self.cluster.read(), &pools, now)
    }

    /// Emits an event about an object, unless an equal one was emitted in the last two minutes. Returns whether it is written.
    pub async fn emit(&self, about: ObjectReference, event: EventSpec<'_>) -> bool {
        self.emit_at(about, event, clock::now()).await
    }

    /// [`Self::emit`] at this time.
    pub async fn emit_at(&self, about: ObjectReference, event: EventSpec<'_>, now: UnixMillis) -> bool {
        self.recorder.emit(&about, event, now).await
    }

    /// Emits an event about a NodeClaim.
    pub async fn emit_for_claim(&self, claim: &NodeClaim, event: EventSpec<'_>) {
        self.emit(reference(claim), event).await;
    }

    /// Emits an event about a NodeClaim, and the same about its Node, if it has one.
    pub async fn emit_for_claim_and_node(&self, claim: &NodeClaim, event: EventSpec<'_>) {
        self.emit_for_claim(claim, event).await;
        let node = self.cluster.read().node_of(claim).cloned();
        if let Some(node) = node {
            self.emit(reference(&*node), event).await;
        }
    }

    /// The name of the Node of a NodeClaim, for the log.
    pub fn node_name_of(&self, claim: &NodeClaim) -> Option<String> {
        self.cluster.read().node_of(claim).map(|node| node.name_any())
    }

    /// Records that the node of a claim registered, or that the claim was abandoned before.
    pub fn record_registration(&self, claim: &NodeClaim, registered: bool) {
        let state = self.cluster.read();
        let Some(pool) = claim.node_pool().and_then(|pool| state.pools.get(pool)) else { return };
        let class = state.classes.get(&pool.spec.template.spec.node_class_ref.name);
        let class = class.and_then(|class| class.metadata.generation);
        lock(&self.registration_health).record(pool, class, claim, registered);
    }

    /// Emits an event about every EC2NodeClass.
    pub async fn emit_for_classes(&self, event: EventSpec<'_>) {
        let classes: Vec<_> = self.cluster.read().classes.values().cloned().collect();
        for class in classes {
            self.emit(reference(&*class), event).await;
        }
    }

    /// Merge-patches a NodeClaim and applies the response to the state.
    pub async fn patch_claim(&self, name: &str, patch: &Value) -> Result<(), kube::Error> {
        self.patch_claim_with(&self.client, name, patch).await
    }

    /// Writes the plan of a NodeClaim, and applies the response to the state.
    pub async fn write_plan(&self, name: &str, plan: &PlanRecord) -> Result<(), kube::Error> {
        let patch = json!({"metadata": {"annotations": plan.annotations()}});
        self.patch_claim_with(&self.plan_client, name, &patch).await
    }

    async fn patch_claim_with(&self, client: &Client, name: &str, patch: &Value) -> Result<(), kube::Error> {
        let api: Api<NodeClaim> = Api::all(client.clone());
        let claim = api.patch(name, &PatchParams::default(), &Patch::Merge(patch)).await?;
        self.cluster.update(|state| state.apply_claim(claim));
        Ok(())
    }

    /// Reads a NodeClaim from the API server and applies it to the state.
    pub async fn read_claim(&self, name: &str) -> Result<NodeClaim, kube::Error> {
        let claim = Api::<NodeClaim>::all(self.client.clone()).get(name).await?;
        self.cluster.update(|state| state.apply_claim(claim.clone()));
        Ok(claim)
    }

    /// Writes the status that `next` returns for the present version of a NodeClaim: conditions are a list, and a list that is based
    /// on an older version would drop what another client wrote. Nothing is written where `next` returns `None`.
    pub async fn update_claim_status(
        &self,
        claim: &NodeClaim,
        next: impl Fn(&NodeClaim) -> Option<Value>,
    ) -> Result<(), kube::Error> {
        let name = claim.name_any();
        let known = self.cluster.read().claims.get(&name).filter(|known| known.uid() == claim.uid()).cloned();
        let mut claim = known.map_or_else(|| claim.clone(), |known| (*known).clone());
        for attempt in 1..=ATTEMPTS {
            let Some(status) = next(&claim) else { return Ok(()) };
            match self.patch_claim_status_at(&claim, &status).await {
                Err(error) if is_conflict(&error) && attempt < ATTEMPTS => {
                    claim = self.read_claim(&name).await?;
                }
                done => return done,
            }
        }
        Ok(())
    }

    /// Merge-patches the status of a NodeClaim and applies the response to the state. Fails with a conflict when the claim was
    /// written since it was read.
    pub async fn patch_claim_status_at(&self, claim: &NodeClaim, status: &Value) -> Result<(), kube::Error> {
        let api: Api<NodeClaim> = Api::all(self.client.clone());
        let patch = json!({ "metadata": {"resourceVersion": claim.resource_version()}, "status": status });
        let written = api.patch_status(&claim.name_any(), &PatchParams::default(), &Patch::Merge(&patch)).await?;
        self.cluster.update(|state| state.apply_claim(written));
        Ok(())
    }

    /// Merge-patches a Node and applies the response to the state.
    pub async fn patch_node(&self, name: &str, patch: &Value) -> Result<(), kube::Error> {
        let api: Api<Node> = Api::all(self.client.clone());
        let node = api.patch(name, &PatchParams::default(), &Patch::Merge(patch)).await?;
        self.cluster.update(|state| state.apply_node(node));
        Ok(())
    }

    /// Adds to the lists and maps of a Node's metadata, replaces other fields, and applies the response to the state.
    pub async fn add_to_node(&self, name: &str, patch: &Value) -> Result<(), kube::Error> {
        let api: Api<Node> = Api::all(self.client.clone());
        let node = api.patch(name, &PatchParams::default(), &Patch::Strategic(patch)).await?;
        self.cluster.update(|state| state.apply_node(node));
        Ok(())
    }

    /// Replaces the taints of a Node, sets labels or (`None`) removes them, and applies the response to the state. Fails with a conflict when the
    /// taints changed since the Node was read. Other changes do not matter: kubelets and controllers write Nodes all the time.
    pub async fn set_taints(
        &self,
        node: &Node,
        taints: &[Taint],
        labels: &[(&str, Option<&str>)],
    ) -> Result<(), kube::Error> {
        let (name, api) = (node.name_any(), Api::<Node>::all(self.client.clone()));
        let (mut node, mut retries) = (Cow::Borrowed(node), 1..ATTEMPTS);
        loop {
            let operations = serde_json::from_value(taint_operations(&node, taints, labels));
            let operations = operations.map_err(kube::Error::SerdeError)?;
            match api.patch(&name, &PatchParams::default(), &Patch::<()>::Json(operations)).await {
                Ok(written) => {
                    self.cluster.update(|state| state.apply_node(written));
                    return Ok(());
                }
                // A failed test of the patch has the code of an invalid object.
                Err(kube::Error::Api(mut status)) if status.code == 422 => {
                    let present = api.get(&name).await?;
                    self.cluster.update(|state| state.apply_node(present.clone()));
                    let is_other = present.metadata.uid != node.metadata.uid || !present.taints().eq(node.taints());
                    let is_newer = present.metadata.resource_version != node.metadata.resource_version;
                    if is_newer && !is_other && retries.next().is_some() {
                        node = Cow::Owned(present);
                        continue;
                    }
                    if is_other {
                        status.code = 409;
                    }
                    return Err(kube::Error::Api(status));
                }
                Err(error) => return Err(error),
            }
        }
    }
}

/// The JSON patch of [`Context::set_taints`].
fn taint_operations(node: &Node, taints: &[Taint], labels: &[(&str, Option<&str>)]) -> Value {
    let old: Vec<&Taint> = node.taints().collect();
    let test = |path: &str, value: Value| json!({"op": "test", "path": path, "value": value});
    let mut operations = vec![test("/metadata/uid", json!(node.metadata.uid))];
    let lacks_labels = node.labels().is_empty() && labels.iter().any(|(_, value)| value.is_some());
    // What does not exist can't be tested.
    if old.is_empty() || lacks_labels {
        operations.push(test("/metadata/resourceVersion", json!(node.metadata.resource_version)));
    }
    if old.is_empty() {
        operations.push(json!({"op": "add", "path": "/spec/taints", "value": taints}));
    } else {
        operations.push(test("/spec/taints", json!(old)));
        operations.push(json!({"op": "replace", "path": "/spec/taints", "value": taints}));
    }
    if lacks_labels {
        operations.push(json!({"op": "add", "path": "/metadata/labels", "value": {}}));
    }
    for (key, value) in labels {
        let path = format!("/metadata/labels/{}", key.replace('~', "~0").replace('/', "~1"));
        match value {
            Some(value) => operations.push(json!({"op": "add", "path": path, "value": value})),
            None if node.labels().contains_key(*key) => operations.push(json!({"op": "remove", "path": path})),
            None => {}
        }
    }
    Value::Array(operations)
}

/// A reference to an object, for events about it.
pub fn reference<K: Resource<DynamicType = ()>>(object: &K) -> ObjectReference {
    object.object_ref(&())
}

/// A reference to a pod, for events about it.
pub fn pod_reference(namespace: &str, name: &str, uid: &str) -> ObjectReference {
    ObjectReference {
        api_version: Some("v1".into()),
        kind: Some("Pod".into()),
        namespace: Some(namespace.to_owned()),
        name: Some(name.to_owned()),
        uid: Some(uid.to_owned()),
        ..ObjectReference::default()
    }
}

/// Whether the API server responded that the object does not exist.
pub fn is_not_found(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == 404)
}

/// Whether the object was written or replaced since it was read.
pub fn is_conflict(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == 409)
}

/// Whether the API server, or an admission policy or webhook, rejected the object itself: the same request fails again.
pub fn is_rejection(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if matches!(status.code, 400 | 403 | 413 | 422))
}

/// Success when the object of a write no longer exists.
pub fn ignore_not_found(result: Result<(), kube::Error>) -> Result<(), kube::Error> {
    match result {
        Err(error) if is_not_found(&error) => Ok(()),
        other => other,
    }
}

/// Labels of a claim's node: the claim's own, and every requirement with a single value.
pub fn single_values(claim: &NodeClaim) -> BTreeMap<String, String> {
    let mut out = claim.labels().clone();
    for requirement in &claim.spec.requirements {
        if requirement.operator == "In" && requirement.values.len() == 1 {
            out.entry(requirement.key.clone()).or_insert_with(|| requirement.values[0].clone());
        }
    }
    out
}

#[cfg(test)]
mod write_tests;
