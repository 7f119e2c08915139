//! A launch: request, result and errors.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use k8s_openapi::api::core::v1::Taint;
use kube::ResourceExt;
use stowage_api::{Ec2NodeClass, NodeClaim, conditions};
use stowage_model::events;
use stowage_model::events::DeclaredEvent;
use stowage_model::instance::Instance;
use stowage_model::offering::{CapacityType, Catalog};
use stowage_model::time::UnixMillis;

/// An offering that a launch may use.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Override {
    /// Instance type, such as `m7g.large`.
    pub instance_type: String,
    /// Zone name, such as `us-east-1a`.
    pub zone: String,
    pub capacity_type: CapacityType,
}

/// What to launch for one NodeClaim.
#[derive(Clone, Debug)]
pub struct LaunchRequest {
    /// Idempotency token, the UID of the NodeClaim: the same token never launches twice.
    pub client_token: String,
    /// Name of the NodeClaim.
    pub node_claim: String,
    /// Name of the NodePool.
    pub node_pool: String,
    /// Name of the EC2NodeClass.
    pub node_class: String,
    /// Acceptable offerings, cheapest first, never empty.
    pub overrides: Vec<Override>,
    /// Labels the kubelet registers the node with.
    pub labels: BTreeMap<String, String>,
    /// Taints the kubelet registers the node with (permanent, start-up and `karpenter.sh/unregistered`).
    pub taints: Vec<Taint>,
    /// The objects behind the request. EC2 requires them; the simulation checks the class only.
    pub details: Option<Arc<LaunchDetails>>,
}

/// The objects behind a launch.
#[derive(Debug)]
pub struct LaunchDetails {
    pub claim: NodeClaim,
    pub class: Arc<Ec2NodeClass>,
    /// The catalog that contains the offerings of the request.
    pub catalog: Arc<Catalog>,
    /// Provider ids already assigned to claims of its launch group.
    pub named: BTreeSet<String>,
}

/// Why a launch failed.
#[derive(Debug, thiserror::Error, Clone, PartialEq)]
pub enum LaunchError {
    /// No offering has capacity; `unavailable` lists the offerings that EC2 reported.
    #[error("no capacity in any of {} offerings", .unavailable.len())]
    InsufficientCapacity { unavailable: Vec<Override> },
    /// The API throttled the call: retry later.
    #[error("request rate exceeded, retry with backoff")]
    Throttled,
    /// The account has no service-linked role for spot instances, and the controller may not create it.
    #[error(
        "the account lacks the service-linked role of EC2 spot: run aws iam create-service-linked-role --aws-service-name spot.amazonaws.com"
    )]
    NoSpotRole,
    /// EC2 refused for a reason that needs an operator; nothing was launched. The reason of `event` is the reason of the `Launched`
    /// condition, too; `message` is the text of EC2.
    #[error("launch refused, {event}: {message}")]
    Rejected { event: &'static DeclaredEvent, message: String },
    #[error("node class {name} is not ready: {reason}")]
    NodeClassNotReady { name: String, reason: String },
    /// Any other error. An instance may have been launched: retry with the same token. `reason` is the reason of the `Launched`
    /// condition.
    #[error("launch failed: {message}")]
    Other { reason: &'static str, message: String },
}

impl LaunchError {
    /// A failure without a more specific reason than `LaunchFailed`.
    pub fn other(message: impl Into<String>) -> Self {
        Self::Other { reason: events::LAUNCH_FAILED.reason(), message: message.into() }
    }
}

/// The result of a launch.
#[derive(Clone, Debug)]
pub struct Launched {
    pub instance: Instance,
    /// Offerings that the same call reported as out of capacity.
    pub unavailable: Vec<Override>,
    /// When the call that launched the instance was sent; `None` for an instance of an earlier process.
    pub called_at: Option<UnixMillis>,
}

/// Checks that a class is Ready, and that Ready is of its current generation.
///
/// # Errors
/// [`LaunchError::NodeClassNotReady`]; [`LaunchError::Rejected`] while readiness is unknown.
pub fn launchable(class: &Ec2NodeClass) -> Result<(), LaunchError> {
    let not_ready = |reason: String| LaunchError::NodeClassNotReady { name: class.name_any(), reason };
    if class.metadata.deletion_timestamp.is_some() {
        return Err(not_ready("it is being deleted".into()));
    }
    let list = class.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default();
    match conditions::get(list, conditions::READY) {
        Some(ready) if ready.observed_generation != class.metadata.generation => {
            Err(not_ready("spec changed since it was last reconciled".into()))
        }
        Some(ready) if ready.status == "True" => Ok(()),
        Some(ready) if ready.status == "False" => Err(not_ready(ready.message.clone())),
        _ => Err(LaunchError::Rejected {
            event: events::NODE_CLASS_READINESS_UNKNOWN,
            message: format!("EC2NodeClass {} has not been reconciled yet", class.name_any()),
        }),
    }
}
