//! The dependencies of every controller, and its writes to the API server.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use k8s_openapi::api::core::v1::ObjectReference;
use kube::api::{Patch, PatchParams};
use kube::runtime::events as kube_events;
use kube::runtime::events::{Event, Recorder, Reporter};
use kube::{Api, Client, Resource, ResourceExt};
use serde_json::Value;
use tokio::sync::Notify;

use crate::api::NodeClaim;
use crate::clock;
use crate::cloud::Cloud;
use crate::controllers::caps::Caps;
use crate::controllers::confirmed_drains::ConfirmedDrains;
use crate::controllers::derived_state::DerivedState;
use crate::decisions::demand::may_launch;
use crate::decisions::placement::mode::PlacementMode;
use crate::decisions::provisioning::quarantine::Quarantine;
use crate::decisions::staleness::Removal;
use crate::model::events::{EventSpec, EventType};
use crate::model::time::UnixMillis;
use crate::planner::input::settings::Settings as PlanSettings;
use crate::state::Cluster;
use crate::state::instance_types::ReadyPool;
use crate::state::watch_signs::Stale;
use crate::sync::lock;
use crate::telemetry::controllers::ControllerMetrics;

/// Settings of the controllers.
#[derive(Clone, Debug)]
pub struct Settings {
    pub placement: PlacementMode,
    /// Idle time after the last new pod before a batch is planned.
    pub batch_idle: Duration,
    /// Maximum time that a batch stays open.
    pub batch_max: Duration,
    /// Maximum number of NodeClaims created in any minute.
    pub max_purchases_per_minute: usize,
    /// Maximum number of nodes disrupted voluntarily, or collected as garbage, in any minute.
    pub max_disruptions_per_minute: usize,
    pub plan: PlanSettings,
}

/// The dependencies of every controller.
pub struct Context {
    pub client: Client,
    /// A client without retries, for evictions: a refusal by a PodDisruptionBudget (429) is a result, which retries would delay
    /// for minutes, past the deadline of a drain.
    pub evictions: Client,
    pub cluster: Arc<Cluster>,
    pub derived: Arc<DerivedState>,
    pub cloud: Arc<dyn Cloud>,
    pub settings: Settings,
    pub metrics: ControllerMetrics,
    pub caps: Caps,
    /// Notified when the NodeClaims of a plan have been created: they are launched at once.
    pub claims_created: Notify,
    pub confirmed_drains: ConfirmedDrains,
    /// Pods that are left out of plans for a while.
    pub quarantine: Mutex<Quarantine>,
    recorder: Recorder,
    emitted: Mutex<EmittedEvents>,
}

/// Equal events about one object are emitted at most once in this period.
const EVENT_REPEAT: Duration = Duration::from_mins(2);
/// Maximum number of events that are remembered. While so many were emitted in [`EVENT_REPEAT`], no other event is.
const EVENT_MEMORY: usize = 20_000;
/// Minimum time between two removals of old events from the memory.
const EVENT_SWEEP: Duration = Duration::from_secs(5);
/// Longest note of an event: the API server refuses more than 1,024 characters.
const EVENT_NOTE_CHARS: usize = 1_000;

/// The events that were emitted lately.
#[derive(Debug, Default)]
struct EmittedEvents {
    /// When an event was last emitted, by UID of its object, reason and note.
    at: HashMap<(String, String, String), UnixMillis>,
    /// When old events were last removed.
    swept: UnixMillis,
}

impl EmittedEvents {
    /// Records an event; false when it must not be emitted.
    fn record(&mut self, key: (String, String, String), now: UnixMillis) -> bool {
        if self.at.len() >= EVENT_MEMORY && self.swept.is_older_than(EVENT_SWEEP, now) {
            self.swept = now;
            self.at.retain(|_, at| !at.is_older_than(EVENT_REPEAT, now));
        }
        let known = self.at.get(&key);
        if known.is_some_and(|at| !at.is_older_than(EVENT_REPEAT, now))
            || known.is_none() && self.at.len() >= EVENT_MEMORY
        {
            return false;
        }
        self.at.insert(key, now);
        true
    }
}

impl Context {
    pub fn new(
        client: Client,
        evictions: Client,
        cluster: Arc<Cluster>,
        derived: Arc<DerivedState>,
        cloud: Arc<dyn Cloud>,
        settings: Settings,
        metrics: ControllerMetrics,
    ) -> Self {
        let reporter = Reporter { controller: "stowage".into(), instance: None };
        let recorder = Recorder::new(client.clone(), reporter);
        let (claims_created, quarantine, emitted) = (Notify::new(), Mutex::default(), Mutex::default());
        let caps = Caps::default();
        let confirmed_drains = ConfirmedDrains::default();
        Self {
            client,
            evictions,
            cluster,
            derived,
            cloud,
            settings,
            metrics,
            caps,
            claims_created,
            confirmed_drains,
            quarantine,
            recorder,
            emitted,
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

    /// Emits an event about an object, unless an equal one was emitted in the last two minutes. A failure is only logged.
    pub async fn emit(&self, about: ObjectReference, event: EventSpec<'_>) {
        let (declared, note) = (event.declared(), event.note());
        let reason = declared.reason();
        let key = (about.uid.clone().unwrap_or_default(), reason.to_owned(), note.to_owned());
        {
            let mut emitted = lock(&self.emitted);
            let now = clock::now();
            if !emitted.record(key, now) {
                return;
            }
        }
        let event = Event {
            type_: match declared.event_type() {
                EventType::Warning => kube_events::EventType::Warning,
                EventType::Normal => kube_events::EventType::Normal,
            },
            reason: reason.to_owned(),
            note: Some(note.chars().take(EVENT_NOTE_CHARS).collect()),
            action: reason.to_owned(),
            secondary: None,
        };
        if let Err(error) = self.recorder.publish(&event, &about).await {
            tracing::debug!(%error, reason, "failed to emit event");
        }
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

    /// Emits an event about every EC2NodeClass.
    pub async fn emit_for_classes(&self, event: EventSpec<'_>) {
        let classes: Vec<_> = self.cluster.read().classes.values().cloned().collect();
        for class in classes {
            self.emit(reference(&*class), event).await;
        }
    }

    /// Merge-patches a NodeClaim and applies the response to the state.
    pub async fn patch_claim(&self, name: &str, patch: &Value) -> Result<(), kube::Error> {
        let api: Api<NodeClaim> = Api::all(self.client.clone());
        let claim = api.patch(name, &PatchParams::default(), &Patch::Merge(patch)).await?;
        self.cluster.update(|state| state.apply_claim(claim));
        Ok(())
    }

    /// Merge-patches the status of a NodeClaim and applies the response to the state.
    pub async fn patch_claim_status(&self, name: &str, status: &Value) -> Result<(), kube::Error> {
        let api: Api<NodeClaim> = Api::all(self.client.clone());
        let patch = serde_json::json!({ "status": status });
        let claim = api.patch_status(name, &PatchParams::default(), &Patch::Merge(&patch)).await?;
        self.cluster.update(|state| state.apply_claim(claim));
        Ok(())
    }

    /// [`Self::patch_claim_status`] that fails with a conflict when the claim was written since it was read.
    pub async fn patch_claim_status_at(&self, claim: &NodeClaim, status: &Value) -> Result<(), kube::Error> {
        let api: Api<NodeClaim> = Api::all(self.client.clone());
        let patch = serde_json::json!({ "metadata": {"resourceVersion": claim.resource_version()}, "status": status });
        let written = api.patch_status(&claim.name_any(), &PatchParams::default(), &Patch::Merge(&patch)).await?;
        self.cluster.update(|state| state.apply_claim(written));
        Ok(())
    }

    /// Merge-patches a Node and applies the response to the state.
    pub async fn patch_node(&self, name: &str, patch: &Value) -> Result<(), kube::Error> {
        let api: Api<k8s_openapi::api::core::v1::Node> = Api::all(self.client.clone());
        let node = api.patch(name, &PatchParams::default(), &Patch::Merge(patch)).await?;
        self.cluster.update(|state| state.apply_node(node));
        Ok(())
    }
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
mod tests {
    use super::*;

    #[test]
    fn the_memory_of_events_is_bounded() {
        let (mut emitted, now) = (EmittedEvents::default(), UnixMillis(1_000_000));
        let key = |number: usize| (number.to_string(), String::new(), String::new());
        assert!((0..EVENT_MEMORY).all(|number| emitted.record(key(number), now)));
        assert!(!emitted.record(key(0), now), "repeated");
        assert!(!emitted.record(key(EVENT_MEMORY), now), "one more");
        assert_eq!(emitted.at.len(), EVENT_MEMORY);
        assert!(emitted.record(key(EVENT_MEMORY), now + EVENT_REPEAT));
        assert_eq!(emitted.at.len(), 1);
    }
}
#[cfg(test)]
mod write_tests;
