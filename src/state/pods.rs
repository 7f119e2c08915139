//! A pod reduced to what controllers look at.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;

use crate::model::labels;
use crate::planner::input::pod::PodEntry;

/// Where a pod stands with the scheduler.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Scheduling {
    /// Held back by a scheduling gate.
    Gated,
    /// The scheduler hasn't tried it yet.
    Untried,
    /// The scheduler tried and an extender or plugin failed with an error.
    Failed,
    /// The scheduler found no node; since when (milliseconds since the epoch) and its message.
    Unschedulable {
        /// Last transition of the condition.
        since_ms: i64,
        /// The scheduler's message.
        message: String,
    },
    /// Bound to a node.
    Bound,
}

/// A pod as the controllers see it.
#[derive(Clone, Debug)]
pub struct PodRecord {
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
    /// UID.
    pub uid: String,
    /// The pod as the planner sees it, or why it can't be understood.
    pub entry: Result<PodEntry, String>,
    /// Node it is bound to.
    pub node: Option<Arc<str>>,
    /// `status.nominatedNodeName`.
    pub nominated: Option<String>,
    /// Where it stands with the scheduler.
    pub scheduling: Scheduling,
    /// Succeeded or failed.
    pub terminal: bool,
    /// Being deleted: since when, milliseconds since the epoch.
    pub deleting_since_ms: Option<i64>,
    /// Controlled by a DaemonSet.
    pub daemon: bool,
    /// A static pod's mirror, or controlled by a Node.
    pub mirror: bool,
    /// Protected from voluntary disruption (`karpenter.sh/do-not-disrupt: "true"`).
    pub do_not_disrupt: bool,
    /// Tolerates `karpenter.sh/disrupted:NoSchedule`.
    pub tolerates_disruption: bool,
    /// `system-cluster-critical` or `system-node-critical`.
    pub critical: bool,
    /// Termination grace period, seconds; a year at most.
    pub grace_seconds: i64,
    /// Resource version, where it is a number.
    pub version: Option<u64>,
    /// The Ready condition is true.
    pub ready: bool,
    /// Nodes whose guard it tolerates: the values of its tolerations of [`labels::GUARD_TAINT`].
    pub admitted: Vec<Box<str>>,
    /// Has tolerations of any kind.
    pub tolerates: bool,
    /// When this process first saw it unschedulable, milliseconds since the epoch.
    pub first_unschedulable_ms: Option<i64>,
}

/// Longer grace periods than a year are as good as a year, and can be reckoned with.
const MAX_GRACE_SECONDS: i64 = 366 * 86_400;

impl PodRecord {
    /// Reduces a pod. `entry` is what the interner made of it.
    pub fn new(pod: &Pod, entry: Result<PodEntry, String>) -> Self {
        let meta = &pod.metadata;
        let spec = pod.spec.as_ref();
        let status = pod.status.as_ref();
        let owner = meta.owner_references.iter().flatten().find(|owner| owner.controller == Some(true));
        let node = spec.and_then(|spec| spec.node_name.as_deref()).filter(|name| !name.is_empty());
        let condition = |kind: &str| {
            status.and_then(|status| status.conditions.iter().flatten().find(|condition| condition.type_ == kind))
        };
        let scheduling = if node.is_some() {
            Scheduling::Bound
        } else if spec.is_some_and(|spec| spec.scheduling_gates.as_ref().is_some_and(|gates| !gates.is_empty())) {
            Scheduling::Gated
        } else {
            match condition("PodScheduled").filter(|condition| condition.status == "False") {
                Some(condition) if condition.reason.as_deref() == Some("Unschedulable") => Scheduling::Unschedulable {
                    since_ms: condition.last_transition_time.as_ref().map_or(0, |time| time.0.as_millisecond()),
                    message: condition.message.clone().unwrap_or_default(),
                },
                Some(condition) if condition.reason.as_deref() == Some("SchedulerError") => Scheduling::Failed,
                _ => Scheduling::Untried,
            }
        };
        let annotation = |key: &str| meta.annotations.as_ref().and_then(|map| map.get(key)).map(String::as_str);
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
        let tolerations = || spec.iter().flat_map(|spec| spec.tolerations.iter().flatten());
        let admitted = tolerations().filter(|toleration| toleration.key.as_deref() == Some(labels::GUARD_TAINT));
        Self {
            namespace: meta.namespace.clone().unwrap_or_default(),
            name: meta.name.clone().unwrap_or_default(),
            uid: meta.uid.clone().unwrap_or_default(),
            entry,
            node: node.map(Arc::from),
            nominated: status.and_then(|status| status.nominated_node_name.clone()).filter(|name| !name.is_empty()),
            scheduling,
            terminal: status
                .and_then(|status| status.phase.as_deref())
                .is_some_and(|phase| phase == "Succeeded" || phase == "Failed"),
            deleting_since_ms: meta.deletion_timestamp.as_ref().map(|time| time.0.as_millisecond()),
            daemon: owner.is_some_and(|owner| owner.kind == "DaemonSet"),
            mirror: annotation("kubernetes.io/config.mirror").is_some()
                || owner.is_some_and(|owner| owner.kind == "Node"),
            do_not_disrupt: annotation(labels::DO_NOT_DISRUPT) == Some("true"),
            tolerates_disruption,
            critical: spec
                .and_then(|spec| spec.priority_class_name.as_deref())
                .is_some_and(|class| class == "system-cluster-critical" || class == "system-node-critical"),
            grace_seconds: spec
                .and_then(|spec| spec.termination_grace_period_seconds)
                .unwrap_or(30)
                .clamp(0, MAX_GRACE_SECONDS),
            version: meta.resource_version.as_deref().and_then(|version| version.parse().ok()),
            ready: condition("Ready").is_some_and(|condition| condition.status == "True"),
            admitted: admitted.filter_map(|toleration| toleration.value.as_deref().map(Box::from)).collect(),
            tolerates: tolerations().next().is_some(),
            first_unschedulable_ms: None,
        }
    }

    /// `namespace/name`.
    pub fn key(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }

    /// Still needs its resources: not finished.
    pub fn active(&self) -> bool {
        !self.terminal
    }

    /// Needs a node that the scheduler could not find, and nobody else is finding one.
    pub fn unschedulable(&self) -> bool {
        matches!(self.scheduling, Scheduling::Unschedulable { .. })
            && !self.terminal
            && self.deleting_since_ms.is_none()
            && !self.daemon
            && !self.mirror
    }

    /// Would need a new place if its node went away: not finished, not a daemon's, not a mirror.
    pub fn reschedulable(&self) -> bool {
        !self.terminal && self.deleting_since_ms.is_none() && !self.daemon && !self.mirror
    }

    /// A drain has to wait for it: not finished, not tolerating disruption, not a mirror.
    pub fn drainable(&self) -> bool {
        !self.terminal && !self.mirror && !self.tolerates_disruption
    }
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
        assert_eq!(record(base.clone()).scheduling, Scheduling::Untried);
        let mut rejected = base.clone();
        rejected["status"] = serde_json::json!({"conditions": [
            {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes"}]});
        assert!(record(rejected.clone()).unschedulable());
        rejected["metadata"]["ownerReferences"] = serde_json::json!([
            {"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "d", "uid": "u", "controller": true}]);
        assert!(!record(rejected).unschedulable(), "a daemon's pod asks for no node");
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
