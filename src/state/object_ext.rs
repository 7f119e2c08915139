//! Extension traits: facts that many modules read from Kubernetes objects.

use k8s_openapi::api::core::v1::{Node, Taint};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::ResourceExt;
use stowage_api::{NodeClaim, conditions};
use stowage_model::labels;
use stowage_model::time::UnixMillis;

/// Metadata of any object.
pub trait ObjectExt: ResourceExt {
    /// Whether the object has a deletion timestamp.
    fn is_deleting(&self) -> bool {
        self.meta().deletion_timestamp.is_some()
    }

    /// The creation timestamp; the epoch when there is none.
    fn created_at(&self) -> UnixMillis {
        self.meta().creation_timestamp.as_ref().map(UnixMillis::from).unwrap_or_default()
    }

    /// The deletion timestamp.
    fn deleted_at(&self) -> Option<UnixMillis> {
        self.meta().deletion_timestamp.as_ref().map(UnixMillis::from)
    }

    /// The NodePool label.
    fn node_pool(&self) -> Option<&str> {
        self.labels().get(labels::NODE_POOL).map(String::as_str)
    }

    /// Whether the label has the value `true`.
    fn is_labeled(&self, key: &str) -> bool {
        self.labels().get(key).is_some_and(|value| value == "true")
    }

    /// Whether the annotation has the value `true`.
    fn is_annotated(&self, key: &str) -> bool {
        self.annotations().get(key).is_some_and(|value| value == "true")
    }

    /// Whether the finalizer is set.
    fn has_finalizer(&self, name: &str) -> bool {
        self.finalizers().iter().any(|finalizer| finalizer == name)
    }
}

impl<K: ResourceExt> ObjectExt for K {}

/// Facts of a Node.
pub trait NodeExt {
    /// Its taints.
    fn taints(&self) -> impl Iterator<Item = &Taint>;

    /// `spec.providerID`.
    fn provider_id(&self) -> Option<&str>;

    /// Whether the Ready condition is True.
    fn is_ready(&self) -> bool;
}

impl NodeExt for Node {
    fn taints(&self) -> impl Iterator<Item = &Taint> {
        self.spec.iter().flat_map(|spec| spec.taints.iter().flatten())
    }

    fn provider_id(&self) -> Option<&str> {
        self.spec.as_ref()?.provider_id.as_deref()
    }

    fn is_ready(&self) -> bool {
        let conditions = self.status.iter().flat_map(|status| status.conditions.iter().flatten());
        conditions.into_iter().any(|condition| condition.type_ == "Ready" && condition.status == "True")
    }
}

/// Facts of a NodeClaim.
pub trait NodeClaimExt {
    /// `status.providerID`.
    fn provider_id(&self) -> Option<&str>;

    /// A condition of the status.
    fn condition(&self, kind: &str) -> Option<&Condition>;

    /// The last part of the provider id: the id of the instance.
    fn instance_id(&self) -> Option<&str>;

    /// Whether a condition of the status is True.
    fn has_condition(&self, kind: &str) -> bool;

    /// Last transition of a condition that is True; `None` for every other condition.
    fn true_since(&self, kind: &str) -> Option<UnixMillis>;

    /// `status.lastPodEventTime`.
    fn last_pod_event(&self) -> Option<UnixMillis>;

    /// Whether the claim is deleted or marked for disruption.
    fn is_leaving(&self) -> bool;

    /// Whether a taint is one of the claim's startup taints, which some agent removes.
    fn is_startup_taint(&self, taint: &Taint) -> bool;
}

impl NodeClaimExt for NodeClaim {
    fn provider_id(&self) -> Option<&str> {
        self.status.as_ref()?.provider_id.as_deref()
    }

    fn condition(&self, kind: &str) -> Option<&Condition> {
        conditions::get(&self.status.as_ref()?.conditions, kind)
    }

    fn instance_id(&self) -> Option<&str> {
        self.provider_id()?.rsplit('/').next()
    }

    fn has_condition(&self, kind: &str) -> bool {
        self.true_since(kind).is_some()
    }

    fn true_since(&self, kind: &str) -> Option<UnixMillis> {
        let condition = self.condition(kind).filter(|condition| condition.status == "True")?;
        Some(UnixMillis::from(&condition.last_transition_time))
    }

    fn last_pod_event(&self) -> Option<UnixMillis> {
        self.status.as_ref()?.last_pod_event_time.as_ref().map(UnixMillis::from)
    }

    fn is_leaving(&self) -> bool {
        self.is_deleting() || self.annotations().contains_key(labels::DISRUPTING)
    }

    fn is_startup_taint(&self, taint: &Taint) -> bool {
        self.spec.startup_taints.iter().any(|other| other.key == taint.key && other.effect == taint.effect)
    }
}
