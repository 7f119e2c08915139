//! A pod reduced to the fields that controllers read.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use stowage_model::labels;
use stowage_model::resources::Resources;
use stowage_model::time::UnixMillis;
use stowage_planner::PodEntry;

use crate::state::protections::{is_invalid, protected_until};
use crate::state::surging_pods::Surge;

/// The scheduler's progress with a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Scheduling {
    /// The pod has a scheduling gate.
    Gated,
    /// The scheduler has not attempted the pod yet.
    Unattempted,
    /// An extender or plugin failed with an error (reason `SchedulerError`).
    SchedulerError,
    /// The scheduler found no node (reason `Unschedulable`).
    Unschedulable {
        /// Last transition of the condition.
        since: UnixMillis,
        /// The scheduler's message.
        message: String,
    },
    Bound,
}

/// `status.phase`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Phase {
    #[default]
    Pending,
    Running,
    Succeeded,
    Failed,
    Unknown,
}

impl Phase {
    fn of(name: Option<&str>) -> Self {
        match name {
            None | Some("" | "Pending") => Self::Pending,
            Some("Running") => Self::Running,
            Some("Succeeded") => Self::Succeeded,
            Some("Failed") => Self::Failed,
            Some(_) => Self::Unknown,
        }
    }

    /// The name in the API.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "Pending",
            Self::Running => "Running",
            Self::Succeeded => "Succeeded",
            Self::Failed => "Failed",
            Self::Unknown => "Unknown",
        }
    }

    /// Whether a pod in it has ended.
    pub fn is_final(self) -> bool {
        matches!(self, Self::Succeeded | Self::Failed)
    }
}

/// How far this process has come with a pod.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PodProgress {
    /// It was observed pending, and has not been ready since.
    pub is_starting: bool,
    /// The first plan with it, whether that found a node for it or not.
    pub decided_at: Option<UnixMillis>,
    /// The first plan that has a node for it, and was written.
    pub planned_at: Option<UnixMillis>,
}

/// A watched pod.
#[derive(Clone, Debug)]
pub struct PodRecord {
    pub namespace: String,
    pub name: String,
    pub uid: String,
    /// The planner's form of the pod, or the error of its spec.
    pub entry: Result<PodEntry, String>,
    /// Its resource limits, if it has some.
    pub limits: Option<Box<Resources>>,
    /// `spec.nodeName`.
    pub node: Option<Arc<str>>,
    /// `status.nominatedNodeName`.
    pub nominated: Option<String>,
    pub scheduling: Scheduling,
    /// No scheduler has attempted it since its spec changed, such as when it got a toleration; as far as the API server records that (1.34).
    pub awaits_attempt: bool,
    /// A scheduler has rejected it as it is now, with every toleration; `false` where the API server does not record that (before 1.34).
    pub refused: bool,
    pub phase: Phase,
    /// `metadata.deletionTimestamp`: the end of the pod's grace period.
    pub deleted_at: Option<UnixMillis>,
    /// Controlled by a DaemonSet.
    pub daemon: bool,
    /// Path of its first owner, as Karpenter's metrics write it; `None` when it is too long.
    pub owner: Option<Arc<str>>,
    /// Controlled by a StatefulSet, which creates a pod again under its name.
    pub keeps_name: bool,
    /// A static pod's mirror, or controlled by a Node.
    pub mirror: bool,
    /// Protected from voluntary disruption by `karpenter.sh/do-not-disrupt`, at this time.
    pub do_not_disrupt: bool,
    /// The end of this protection: [`UnixMillis::MAX`] if it has none, [`UnixMillis::MIN`] without the annotation.
    pub protected_until: UnixMillis,
    /// Its value is neither `true` nor `false` nor a duration.
    pub invalid_do_not_disrupt: bool,
    /// Tolerates `karpenter.sh/disrupted:NoSchedule`.
    pub tolerates_disruption: bool,
    /// `system-cluster-critical` or `system-node-critical`.
    pub critical: bool,
    /// Its successor is ready before it is evicted.
    pub surge: Option<Box<Surge>>,
    /// `controller.kubernetes.io/pod-deletion-cost`; 0 when absent or invalid.
    pub deletion_cost: i32,
    /// Termination grace period, at most [`MAX_GRACE_PERIOD`].
    pub grace_period: Duration,
    /// Resource version, if it is a number.
    pub version: Option<u64>,
    /// Since when the Ready condition is true.
    pub ready_since: Option<UnixMillis>,
    /// Values of its tolerations of [`labels::PLANNED_TAINT`]: UIDs of the NodeClaims whose nodes admit it.
    pub admitted: Vec<Box<str>>,
    /// Has at least one toleration.
    pub tolerates: bool,
    /// When it was bound, or ended, as its status says.
    pub last_event: Option<UnixMillis>,
    /// When this process first observed it, or observed that its last scheduling gate was removed.
    pub first_seen: UnixMillis,
    /// When this process first observed it as unschedulable.
    pub first_unschedulable: Option<UnixMillis>,
    /// The epoch when it has no creation time.
    pub created_at: UnixMillis,
    /// How far this process has come with it.
    pub progress: PodProgress,
    /// This process planned it before a scheduler attempted it.
    pub is_planned_unattempted: bool,
    /// This process launched a node for it.
    pub is_launched_for: bool,
    /// This process observed it without a node: a scheduler bound it. Others are created for a node.
    pub was_unbound: bool,
    /// `spec.schedulerName`; `None` is [`DEFAULT_SCHEDULER`].
    pub scheduler: Option<Box<str>>,
}

/// The scheduler of pods that name none.
const DEFAULT_SCHEDULER: &str = "default-scheduler";

/// Longer grace periods are clamped to this value, so that sums with points in time do not saturate.
const MAX_GRACE_PERIOD: Duration = Duration::from_hours(8784);
/// Longest path of an owner: its name, group and namespace have at most 253, 253 and 63 bytes, and seldom so many.
const MAX_OWNER_BYTES: usize = 600;
/// `terminationGracePeriodSeconds` of a pod that sets none.
const DEFAULT_GRACE_SECONDS: i64 = 30;

impl PodRecord {
    /// Reduces a pod. `entry` is the interner's result.
    pub fn new(pod: &Pod, entry: Result<PodEntry, String>) -> Self {
        let meta = &pod.metadata;
        let spec = pod.spec.as_ref();
        let status = pod.status.as_ref();
        let owner = meta.owner_references.iter().flatten().find(|owner| owner.controller == Some(true));
        let node = spec.and_then(|spec| spec.node_name.as_deref()).filter(|name| !name.is_empty());
        let condition = |kind: &str| {
            status.and_then(|status| status.conditions.iter().flatten().find(|condition| condition.type_ == kind))
        };
        let since = |kind: &str| condition(kind)?.last_transition_time.as_ref().map(UnixMillis::from);
        let phase = Phase::of(status.and_then(|status| status.phase.as_deref()));
        let scheduling = if node.is_some() {
            Scheduling::Bound
        } else if spec.is_some_and(|spec| spec.scheduling_gates.as_ref().is_some_and(|gates| !gates.is_empty())) {
            Scheduling::Gated
        } else {
            match condition("PodScheduled").filter(|condition| condition.status == "False") {
                Some(condition) if condition.reason.as_deref() == Some("Unschedulable") => Scheduling::Unschedulable {
                    since: condition.last_transition_time.as_ref().map(UnixMillis::from).unwrap_or_default(),
                    message: condition.message.clone().unwrap_or_default(),
                },
                Some(condition) if condition.reason.as_deref() == Some("SchedulerError") => Scheduling::SchedulerError,
                _ => Scheduling::Unattempted,
            }
        };
        let attempted = condition("PodScheduled").and_then(|condition| condition.observed_generation);
        let annotation = |key: &str| meta.annotations.as_ref().and_then(|map| map.get(key)).map(String::as_str);
        let do_not_disrupt = annotation(labels::DO_NOT_DISRUPT);
        let started = status.and_then(|status| status.start_time.as_ref().map(UnixMillis::from));
        let protected_until = protected_until(do_not_disrupt, started);
        let tolerates_disruption = spec.is_some_and(|spec| {
            spec.tolerations.iter().flatten().any(|toleration| {
                toleration.effect.as_deref().is_none_or(|effect| effect.is_empty() || effect == "NoSchedule")
                    && match toleration.key.as_deref() {
                        None | Some("") => toleration.operator.as_deref() == Some("Exists"),
                        Some(key) => {
                            key == labels::DISRUPTED_TAINT
                                && (toleration.operator.as_deref() == Some("Exists")
                                    || toleration.value.as_deref().unwrap_or_default().is_empty())
                        }
                    }
            })
        });
        let grace_seconds =
            spec.and_then(|spec| spec.termination_grace_period_seconds).unwrap_or(DEFAULT_GRACE_SECONDS);
        let tolerations = || spec.iter().flat_map(|spec| spec.tolerations.iter().flatten());
        let admitted = tolerations().filter(|toleration| toleration.key.as_deref() == Some(labels::PLANNED_TAINT));
        Self {
            namespace: meta.namespace.clone().unwrap_or_default(),
            name: meta.name.clone().unwrap_or_default(),
            uid: meta.uid.clone().unwrap_or_default(),
            limits: spec
                .and_then(|spec| Resources::limits_of_pod(spec).ok())
                .filter(|limits| *limits != Resources::default())
                .map(Box::new),
            entry,
            node: node.map(Arc::from),
            nominated: status.and_then(|status| status.nominated_node_name.clone()).filter(|name| !name.is_empty()),
            awaits_attempt: scheduling == Scheduling::Unattempted
                || attempted.is_some_and(|attempted| meta.generation.is_some_and(|present| attempted < present)),
            refused: matches!(scheduling, Scheduling::Unschedulable { .. })
                && attempted.is_some_and(|attempted| meta.generation.is_some_and(|present| attempted >= present)),
            scheduling,
            phase,
            deleted_at: meta.deletion_timestamp.as_ref().map(UnixMillis::from),
            daemon: owner.is_some_and(|owner| owner.kind == "DaemonSet"),
            owner: owner_path(pod).map(Arc::from),
            keeps_name: owner.is_some_and(|owner| owner.kind == "StatefulSet"),
            mirror: annotation("kubernetes.io/config.mirror").is_some()
                || owner.is_some_and(|owner| owner.kind == "Node"),
            do_not_disrupt: protected_until > UnixMillis::MIN,
            protected_until,
            invalid_do_not_disrupt: do_not_disrupt.is_some_and(is_invalid),
            tolerates_disruption,
            critical: spec
                .and_then(|spec| spec.priority_class_name.as_deref())
                .is_some_and(|class| class == "system-cluster-critical" || class == "system-node-critical"),
            surge: Surge::of(pod).map(Box::new),
            deletion_cost: annotation(labels::POD_DELETION_COST).and_then(|cost| cost.parse().ok()).unwrap_or(0),
            grace_period: Duration::from_secs(u64::try_from(grace_seconds).unwrap_or(0)).min(MAX_GRACE_PERIOD),
            version: meta.resource_version.as_deref().and_then(|version| version.parse().ok()),
            ready_since: condition("Ready")
                .filter(|condition| condition.status == "True")
                .map(|condition| condition.last_transition_time.as_ref().map(UnixMillis::from).unwrap_or_default()),
            admitted: admitted.filter_map(|toleration| toleration.value.as_deref().map(Box::from)).collect(),
            tolerates: tolerations().next().is_some(),
            // A pod that has ended is not ready since then.
            last_event: since(if phase.is_final() { "Ready" } else { "PodScheduled" }),
            first_seen: UnixMillis::default(),
            first_unschedulable: None,
            created_at: meta.creation_timestamp.as_ref().map(UnixMillis::from).unwrap_or_default(),
            progress: PodProgress { is_starting: phase == Phase::Pending, ..PodProgress::default() },
            is_planned_unattempted: false,
            is_launched_for: false,
            was_unbound: node.is_none(),
            scheduler: spec
                .and_then(|spec| spec.scheduler_name.as_deref())
                .filter(|name| !name.is_empty() && *name != DEFAULT_SCHEDULER)
                .map(Box::from),
        }
    }

    /// Whether the Ready condition is true.
    pub fn is_ready(&self) -> bool {
        self.ready_since.is_some()
    }

    /// `namespace/name`.
    pub fn key(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }

    /// Whether the pod still uses its resources: not finished.
    pub fn active(&self) -> bool {
        !self.phase.is_final()
    }

    /// Whether the pod needs a new node: rejected by the scheduler, not leaving, and no DaemonSet's or static pod's.
    pub fn unschedulable(&self) -> bool {
        matches!(self.scheduling, Scheduling::Unschedulable { .. })
            && self.active()
            && self.deleted_at.is_none()
            && !self.daemon
            && !self.mirror
    }

    /// Whether the pod needs another node if its node is removed: not finished, not deleting, and no DaemonSet's or static pod's. The successor of one that
    /// surges has its node.
    pub fn reschedulable(&self) -> bool {
        self.active() && self.deleted_at.is_none() && !self.daemon && !self.mirror && !self.has_surged()
    }

    /// Whether the pod left its ReplicaSet, which creates its successor.
    pub fn has_surged(&self) -> bool {
        self.surge.as_ref().is_some_and(|surge| surge.ready.is_some())
    }

    /// Whether the pod leaves its ReplicaSet before it is evicted.
    pub fn will_surge(&self) -> bool {
        self.surge.as_ref().is_some_and(|surge| surge.ready.is_none())
    }

    /// Whether the pod is deleting and its controller creates it again under the same name (StatefulSet): its node is not empty
    /// until it is gone.
    pub fn recreated_in_place(&self) -> bool {
        self.deleted_at.is_some() && self.active() && !self.daemon && !self.mirror
    }

    /// Whether a node is not empty because of the pod: it needs another node, or its successor will. One that surged may go back to its ReplicaSet.
    pub fn needs_another_node(&self) -> bool {
        self.reschedulable() || self.recreated_in_place() || (self.has_surged() && self.active())
    }

    /// Whether a drain waits for the pod: not finished, no static pod, and not tolerating the disruption taint.
    pub fn drainable(&self) -> bool {
        self.active() && !self.mirror && !self.tolerates_disruption
    }
}

/// The path of the first owner of a pod, as Karpenter writes it. Owners name any kind: what is too long for a label is left out.
fn owner_path(pod: &Pod) -> Option<String> {
    let meta = &pod.metadata;
    let owner = meta.owner_references.as_ref()?.first()?;
    let namespace = meta.namespace.as_deref().unwrap_or_default();
    let kind = owner.kind.to_lowercase();
    let path = format!("/apis/{}/namespaces/{namespace}/{kind}s/{}", owner.api_version, owner.name);
    (path.len() <= MAX_OWNER_BYTES).then_some(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(json: serde_json::Value) -> PodRecord {
        PodRecord::new(&serde_json::from_value(json).unwrap(), Err("not interned".into()))
    }

    #[test]
    fn only_a_rejected_pod_is_unschedulable() {
        let base = serde_json::json!({"metadata": {"name": "a", "namespace": "n"}, "spec": {"containers": []}});
        assert_eq!(record(base.clone()).scheduling, Scheduling::Unattempted);
        let mut rejected = base.clone();
        rejected["status"] = serde_json::json!({"conditions": [
            {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes"}]});
        assert!(record(rejected.clone()).unschedulable());
        rejected["metadata"]["ownerReferences"] = serde_json::json!([
            {"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "d", "uid": "u", "controller": true}]);
        assert!(!record(rejected).unschedulable(), "a DaemonSet's pod needs no new node");
        let mut gated = base.clone();
        gated["spec"]["schedulingGates"] = serde_json::json!([{"name": "g"}]);
        assert_eq!(record(gated).scheduling, Scheduling::Gated);
        let mut bound = base;
        bound["spec"]["nodeName"] = "node-1".into();
        assert_eq!(record(bound).scheduling, Scheduling::Bound);
    }

    #[test]
    fn a_pod_that_tolerates_the_disrupted_taint_is_not_drained() {
        let with = |toleration: serde_json::Value| {
            record(
                serde_json::json!({"metadata": {"name": "a"}, "spec": {"containers": [], "tolerations": [toleration]}}),
            )
            .drainable()
        };
        assert!(!with(serde_json::json!({"operator": "Exists"})));
        assert!(!with(serde_json::json!({"key": "karpenter.sh/disrupted", "operator": "Exists"})));
        assert!(with(
            serde_json::json!({"key": "karpenter.sh/disrupted", "operator": "Exists", "effect": "NoExecute"})
        ));
        assert!(with(serde_json::json!({"key": "other", "operator": "Exists"})));
    }
}
