//! What every reconciler works with.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex};

use k8s_openapi::api::core::v1::ObjectReference;
use kube::api::{Patch, PatchParams};
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use kube::{Api, Client, Resource, ResourceExt};
use serde_json::Value;
use tokio::sync::Notify;

use crate::api::NodeClaim;
use crate::cloud::Cloud;
use crate::planner::input::settings::Settings as PlanSettings;
use crate::state::snapshot::{ReadyPool, pool_ready};
use crate::state::{Cluster, now_ms};
use crate::sync::lock;
use crate::telemetry::controllers::ControllerMetrics;

/// How the scheduler is made to follow the plan (`--placement`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum PlacementMode {
    /// The extender's filter holds the room, and pods are nominated.
    Extender,
    /// Pods are nominated to their nodes; no extender needed.
    Nominate,
    /// Nodes are bought and the scheduler does as it likes.
    Off,
}

/// Settings of the reconcilers.
#[derive(Clone, Debug)]
pub struct Settings {
    /// How the scheduler is made to follow.
    pub placement: PlacementMode,
    /// A window closes when nothing new came for so long, milliseconds.
    pub batch_idle_ms: i64,
    /// A window is never open longer, milliseconds.
    pub batch_max_ms: i64,
    /// Settings of the planner.
    pub plan: PlanSettings,
}

/// What every reconciler works with.
pub struct Context {
    /// The API server.
    pub client: Client,
    /// The API server, for evictions: asked once. That a budget refuses one (429) is an answer, which the client's own
    /// retries would keep back for minutes, past the end of a drain.
    pub evictions: Client,
    /// The watched state.
    pub cluster: Arc<Cluster>,
    /// The cloud.
    pub cloud: Arc<dyn Cloud>,
    /// Settings.
    pub settings: Settings,
    /// Metrics.
    pub metrics: ControllerMetrics,
    /// Told when the NodeClaims of a plan are written: they are launched at once.
    pub claimed: Notify,
    recorder: Recorder,
    said: Mutex<HashMap<(String, String, String), i64>>,
}

/// Equal events on one object are sent again only after so long.
const EVENT_REPEAT_MS: i64 = 120_000;
/// More remembered events than this are forgotten by age.
const EVENT_MEMORY: usize = 20_000;
/// Longest note of an event (the API refuses more than 1,024 characters).
const EVENT_NOTE_CHARS: usize = 1_000;

impl Context {
    /// Puts a context together.
    pub fn new(
        client: Client,
        evictions: Client,
        cluster: Arc<Cluster>,
        cloud: Arc<dyn Cloud>,
        settings: Settings,
        metrics: ControllerMetrics,
    ) -> Self {
        let reporter = Reporter { controller: "stowage".into(), instance: None };
        let recorder = Recorder::new(client.clone(), reporter);
        let claimed = Notify::new();
        Self { client, evictions, cluster, cloud, settings, metrics, claimed, recorder, said: Mutex::default() }
    }

    /// Pools that may buy now, with what they may buy.
    pub fn ready_pools(&self) -> Vec<ReadyPool> {
        let state = self.cluster.read();
        let ready = state.pools.values().filter(|pool| pool_ready(pool));
        ready
            .filter_map(|pool| {
                let class = state.classes.get(&pool.spec.template.spec.node_class_ref.name)?;
                Some(ReadyPool { pool: Arc::clone(pool), catalog: self.cloud.catalog(class) })
            })
            .collect()
    }

    /// Tells something about an object in an event, once in two minutes for equal texts. A failure is only logged.
    pub async fn event(&self, about: ObjectReference, warning: bool, reason: &str, note: &str) {
        let key = (about.uid.clone().unwrap_or_default(), reason.to_owned(), note.to_owned());
        {
            let mut said = lock(&self.said);
            let now = now_ms();
            if said.len() > EVENT_MEMORY {
                said.retain(|_, at| now - *at < EVENT_REPEAT_MS);
            }
            if said.get(&key).is_some_and(|at| now - at < EVENT_REPEAT_MS) {
                return;
            }
            said.insert(key, now);
        }
        let event = Event {
            type_: if warning { EventType::Warning } else { EventType::Normal },
            reason: reason.to_owned(),
            note: Some(note.chars().take(EVENT_NOTE_CHARS).collect()),
            action: reason.to_owned(),
            secondary: None,
        };
        if let Err(error) = self.recorder.publish(&event, &about).await {
            tracing::debug!(%error, reason, "event could not be written");
        }
    }

    /// Tells something about the cloud in an event on every node class.
    pub async fn tell_classes(&self, warning: bool, reason: &str, note: &str) {
        let classes: Vec<_> = self.cluster.read().classes.values().cloned().collect();
        for class in classes {
            self.event(reference(&*class), warning, reason, note).await;
        }
    }

    /// Merge-patches a NodeClaim and takes the answer into the state.
    ///
    /// # Errors
    /// The API server's.
    pub async fn patch_claim(&self, name: &str, patch: &Value) -> Result<(), kube::Error> {
        let api: Api<NodeClaim> = Api::all(self.client.clone());
        let claim = api.patch(name, &PatchParams::default(), &Patch::Merge(patch)).await?;
        self.cluster.update(|state| state.apply_claim(claim));
        Ok(())
    }

    /// Merge-patches a NodeClaim's status and takes the answer into the state.
    ///
    /// # Errors
    /// The API server's.
    pub async fn patch_claim_status(&self, name: &str, status: &Value) -> Result<(), kube::Error> {
        let api: Api<NodeClaim> = Api::all(self.client.clone());
        let patch = serde_json::json!({ "status": status });
        let claim = api.patch_status(name, &PatchParams::default(), &Patch::Merge(&patch)).await?;
        self.cluster.update(|state| state.apply_claim(claim));
        Ok(())
    }

    /// [`Self::patch_claim_status`], and fails with a conflict where the claim was written since it was read.
    ///
    /// # Errors
    /// The API server's.
    pub async fn patch_claim_status_at(&self, claim: &NodeClaim, status: &Value) -> Result<(), kube::Error> {
        let api: Api<NodeClaim> = Api::all(self.client.clone());
        let patch = serde_json::json!({ "metadata": {"resourceVersion": claim.resource_version()}, "status": status });
        let written = api.patch_status(&claim.name_any(), &PatchParams::default(), &Patch::Merge(&patch)).await?;
        self.cluster.update(|state| state.apply_claim(written));
        Ok(())
    }

    /// Merge-patches a Node and takes the answer into the state.
    ///
    /// # Errors
    /// The API server's.
    pub async fn patch_node(&self, name: &str, patch: &Value) -> Result<(), kube::Error> {
        let api: Api<k8s_openapi::api::core::v1::Node> = Api::all(self.client.clone());
        let node = api.patch(name, &PatchParams::default(), &Patch::Merge(patch)).await?;
        self.cluster.update(|state| state.apply_node(node));
        Ok(())
    }
}

/// A reference to an object, for events.
pub fn reference<K: Resource<DynamicType = ()>>(object: &K) -> ObjectReference {
    object.object_ref(&())
}

/// A reference to a pod, for events.
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

/// Whether the API server said that the object isn't there.
pub fn is_not_found(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == 404)
}

/// Whether the API server said that somebody else was faster.
pub fn is_conflict(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == 409)
}

/// Nothing, where a write found that its object is gone already.
///
/// # Errors
/// Every other failure.
pub fn gone_is_fine(result: Result<(), kube::Error>) -> Result<(), kube::Error> {
    match result {
        Err(error) if is_not_found(&error) => Ok(()),
        other => other,
    }
}

/// Labels of a claim with one value each: its template's, and every requirement that leaves one value.
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
