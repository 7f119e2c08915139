//! The fields of a pod that a verdict depends on, borrowed from the request.

use std::borrow::Cow;
use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use stowage_model::labels::DISRUPTED_TAINT;
use stowage_model::resources::Resources;

use crate::extender::name::Name;
use crate::extender::request_quantity::Quantity;

/// A pod as kube-scheduler sends it: no `kind`, no `apiVersion`. Fields that no verdict needs are skipped.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ExtenderPod<'a> {
    #[serde(borrow)]
    pub metadata: ObjectMeta<'a>,
    #[serde(borrow)]
    pub spec: PodSpec<'a>,
    #[serde(borrow)]
    pub status: PodStatus<'a>,
}

/// `metadata` of a pod.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ObjectMeta<'a> {
    #[serde(borrow)]
    pub name: Cow<'a, str>,
    #[serde(borrow)]
    pub namespace: Cow<'a, str>,
    #[serde(borrow)]
    pub uid: Cow<'a, str>,
    #[serde(borrow)]
    pub owner_references: Option<Vec<OwnerReference<'a>>>,
}

/// An owner of a pod.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct OwnerReference<'a> {
    /// Kind, such as `ReplicaSet`.
    #[serde(borrow)]
    pub kind: Cow<'a, str>,
    #[serde(borrow)]
    pub uid: Cow<'a, str>,
    /// Whether this owner controls the pod.
    pub controller: Option<bool>,
}

/// `spec` of a pod.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct PodSpec<'a> {
    pub priority: Option<i32>,
    #[serde(borrow)]
    pub containers: Option<Vec<Container<'a>>>,
    /// Init containers; those that always restart are sidecars.
    #[serde(borrow)]
    pub init_containers: Option<Vec<Container<'a>>>,
    #[serde(borrow)]
    pub resources: Option<Requirements<'a>>,
    /// Overhead of the runtime class.
    #[serde(borrow)]
    pub overhead: Option<BTreeMap<Name<'a>, Quantity<'a>>>,
    #[serde(borrow)]
    pub tolerations: Option<Vec<Toleration<'a>>>,
}

/// A container.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Container<'a> {
    /// `Always` on an init container makes it a sidecar.
    #[serde(borrow)]
    pub restart_policy: Option<Name<'a>>,
    #[serde(borrow)]
    pub resources: Option<Requirements<'a>>,
}

/// Resources of a container or pod.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Requirements<'a> {
    /// Requests (the API server fills them in from the limits).
    #[serde(borrow)]
    pub requests: Option<BTreeMap<Name<'a>, Quantity<'a>>>,
}

/// A toleration.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Toleration<'a> {
    /// Key; empty with `Exists` tolerates every taint.
    #[serde(borrow)]
    pub key: Cow<'a, str>,
    /// `Exists` or `Equal`, the default.
    #[serde(borrow)]
    pub operator: Cow<'a, str>,
    /// Value for `Equal`.
    #[serde(borrow)]
    pub value: Cow<'a, str>,
    /// Effect; empty tolerates every effect.
    #[serde(borrow)]
    pub effect: Cow<'a, str>,
}

/// `status` of a pod.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct PodStatus<'a> {
    /// Node it is nominated to.
    #[serde(borrow)]
    pub nominated_node_name: Cow<'a, str>,
}

impl ExtenderPod<'_> {
    /// `namespace/name`.
    pub fn key(&self) -> String {
        format!("{}/{}", self.metadata.namespace, self.metadata.name)
    }

    /// Priority; absent is 0.
    pub fn priority(&self) -> i32 {
        self.spec.priority.unwrap_or_default()
    }

    fn owners(&self) -> &[OwnerReference<'_>] {
        self.metadata.owner_references.as_deref().unwrap_or_default()
    }

    /// UID of the controlling owner.
    pub fn controller_uid(&self) -> Option<&str> {
        self.owners().iter().find(|owner| owner.controller == Some(true)).map(|owner| &*owner.uid)
    }

    /// Whether a DaemonSet controls it. Any other owner reference is the pod's own claim.
    pub fn is_daemon(&self) -> bool {
        self.owners().iter().any(|owner| owner.controller == Some(true) && owner.kind == "DaemonSet")
    }

    /// Whether it tolerates `karpenter.sh/disrupted:NoSchedule`.
    pub fn tolerates_disruption(&self) -> bool {
        self.spec.tolerations.as_deref().unwrap_or_default().iter().any(|toleration| {
            let effect = toleration.effect.is_empty() || toleration.effect == "NoSchedule";
            let exists = toleration.operator == "Exists";
            let key = toleration.key == DISRUPTED_TAINT || (toleration.key.is_empty() && exists);
            effect && key && (exists || toleration.value.is_empty())
        })
    }

    /// The pod's requests as kube-scheduler counts them: containers plus sidecars, or the peak of the init containers if it is larger;
    /// pod-level resources override; overhead is added; one pod slot.
    pub fn requests(&self) -> Resources {
        let mut total = sum(self.spec.containers.as_deref().unwrap_or_default());
        let mut sidecars = Resources::default();
        let mut peak = Resources::default();
        for container in self.spec.init_containers.as_deref().unwrap_or_default() {
            let mut running = container_requests(container);
            if container.restart_policy.as_ref().is_some_and(|policy| policy.as_str() == "Always") {
                sidecars.add(&running);
                peak.raise_to(&sidecars);
            } else {
                running.add(&sidecars);
                peak.raise_to(&running);
            }
        }
        total.add(&sidecars);
        total.raise_to(&peak);
        if let Some(requests) = self.spec.resources.as_ref().and_then(|resources| resources.requests.as_ref()) {
            for (name, quantity) in requests {
                total.set(name.as_str(), quantity.amount(name.as_str()));
            }
        }
        if let Some(overhead) = &self.spec.overhead {
            total.add(&resources(overhead));
        }
        total.pods = 1;
        total
    }
}

fn sum(containers: &[Container<'_>]) -> Resources {
    let mut total = Resources::default();
    for container in containers {
        total.add(&container_requests(container));
    }
    total
}

fn container_requests(container: &Container<'_>) -> Resources {
    container
        .resources
        .as_ref()
        .and_then(|requirements| requirements.requests.as_ref())
        .map(resources)
        .unwrap_or_default()
}

fn resources(amounts: &BTreeMap<Name<'_>, Quantity<'_>>) -> Resources {
    let mut total = Resources::default();
    for (name, quantity) in amounts {
        total.set(name.as_str(), quantity.amount(name.as_str()));
    }
    total
}
