//! The interface of a cloud: what every cloud does ([`Cloud`]), and what only some clouds can do ([`Capabilities`]).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use futures::future::BoxFuture;
use futures::stream::BoxStream;
use k8s_openapi::api::core::v1::Node;
use stowage_api::{Ec2NodeClass, NodeClaim, NodePool};
use stowage_model::drift_reason::Drift;
use stowage_model::instance::Instance;
use stowage_model::instance_health::Unhealthy;
use stowage_model::offering::Catalog;
use stowage_model::time::UnixMillis;

use crate::call_error::CloudError;
use crate::launch_request::{LaunchError, LaunchRequest, Launched, Override};
use crate::message::Message;
use crate::node_class_resolution::Resolution;
use crate::offering_state::OfferingState;
use crate::optional_api::OptionalApi;

/// A cloud that launches nodes. Every method is safe to repeat.
pub trait Cloud: Send + Sync {
    /// Instance types, offerings, prices and availability for nodes of `class`. Cached; does no I/O.
    fn catalog(&self, class: &Ec2NodeClass) -> Arc<Catalog>;
    /// Records that an offering has no capacity: [`Cloud::catalog`] reports it as unavailable for a while.
    fn mark_unavailable(&self, offering: &Override);
    /// Launches one instance (as CreateFleet `instant`), or returns the instance that `client_token` already launched.
    fn launch(&self, request: LaunchRequest) -> BoxFuture<'_, Result<Launched, LaunchError>>;
    /// Describes an instance; `None` when it no longer exists.
    fn describe<'a>(&'a self, provider_id: &'a str) -> BoxFuture<'a, Result<Option<Instance>, CloudError>>;
    /// Starts termination; `Ok(false)` when the instance no longer exists.
    fn terminate<'a>(&'a self, provider_id: &'a str) -> BoxFuture<'a, Result<bool, CloudError>>;
    /// Lists the instances of this cluster that are not terminated.
    fn list(&self) -> BoxFuture<'_, Result<Vec<Instance>, CloudError>>;
    /// Lists the instances that were launched for a claim, or for its launch group, and are not terminated.
    fn launched_for<'a>(&'a self, claim: &'a NodeClaim) -> BoxFuture<'a, Result<Vec<Instance>, CloudError>>;
    /// Waits (bounded, as a long poll) for messages of the interruption queue.
    fn receive_messages(&self) -> BoxFuture<'_, Result<Vec<Message>, CloudError>>;
    /// Deletes handled messages. A message whose deletion fails is received again.
    fn delete_messages<'a>(&'a self, receipts: &'a [String]) -> BoxFuture<'a, Result<(), CloudError>>;
    /// What this cloud can do beyond launching instances.
    fn capabilities(&self) -> Capabilities<'_>;
}

/// The optional interfaces of a cloud. A controller whose interface is absent has nothing to do.
#[derive(Clone, Copy, Default)]
pub struct Capabilities<'a> {
    /// Resolution of node classes. Without it every condition of a class is true, and classes carry neither a drift hash nor a
    /// finalizer.
    pub node_classes: Option<&'a dyn NodeClassCloud>,
    pub instance_events: Option<&'a dyn InstanceEvents>,
    pub instance_tagging: Option<&'a dyn InstanceTagging>,
    pub cluster_observer: Option<&'a dyn ClusterObserver>,
    pub service_status: Option<&'a dyn ServiceStatus>,
    pub offering_status: Option<&'a dyn OfferingStatus>,
    /// Whether others can write to the interruption queue: messages are then confirmed before anything is deleted.
    pub untrusted_messages: bool,
    /// Whether instances run in capacity reservations, which end before their instances do.
    pub capacity_reservations: bool,
}

/// Discovers and validates the AWS resources that node classes select.
pub trait NodeClassCloud: Send + Sync {
    /// Resolves a class to subnets, security groups, images and so on, and evaluates its conditions. `pools` are the NodePools
    /// that reference it.
    fn resolve<'a>(&'a self, class: &'a Ec2NodeClass, pools: &'a [Arc<NodePool>]) -> BoxFuture<'a, Resolution>;
    /// The difference between the instance of a claim and its resolved node class; `None` without one. Mostly evaluated from
    /// caches.
    ///
    /// # Errors
    /// Drift cannot be evaluated now.
    fn drift<'a>(
        &'a self,
        claim: &'a NodeClaim,
        class: &'a Ec2NodeClass,
    ) -> BoxFuture<'a, Result<Option<Drift>, CloudError>>;
    /// The cluster CA that instances are configured with, base64. The drift hash of a class includes it.
    fn instance_ca(&self) -> String;
    /// Deletes the instance profiles that were created for classes and are not in `used`.
    fn delete_unused_profiles<'a>(&'a self, used: &'a BTreeSet<String>) -> BoxFuture<'a, Result<(), CloudError>>;
    /// Deletes what was created for a node class that no NodeClaim uses any more.
    fn release_class<'a>(&'a self, class: &'a Ec2NodeClass) -> BoxFuture<'a, Result<(), CloudError>>;
}

/// Reports of the cloud about instances.
pub trait InstanceEvents: Send + Sync {
    /// Unhealthy instances of the account, including instances of other clusters.
    fn unhealthy(&self) -> BoxFuture<'_, Result<Vec<Unhealthy>, CloudError>>;
    /// Whether the cloud interrupts a spot instance, as far as it shows that already.
    ///
    /// # Errors
    /// The cloud cannot be asked; the right to ask is optional.
    fn is_interrupted<'a>(&'a self, instance_id: &'a str) -> BoxFuture<'a, Result<bool, CloudError>>;
}

/// An instance that has a Node, but not yet the tags that name it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Untagged {
    pub provider_id: String,
    /// Name of its Node.
    pub node: String,
    /// Name of its NodeClaim.
    pub claim: String,
}

/// Tags instances with the names of their Node and NodeClaim.
pub trait InstanceTagging: Send + Sync {
    /// Tags instances at the rate that the API permits. Yields each outcome as soon as it is known, with its index in `due`. A
    /// terminated instance counts as tagged.
    fn tag<'a>(&'a self, due: &'a [Untagged]) -> BoxStream<'a, (usize, Result<(), CloudError>)>;
}

/// Learns from objects of the cluster. Does no I/O.
pub trait ClusterObserver: Send + Sync {
    /// Records the current node classes and NodePools. Called within a second of each change.
    fn observe(&self, classes: &[Arc<Ec2NodeClass>], pools: &[Arc<NodePool>]);
    /// Records the actual capacity of an instance type from a registered Node.
    fn registered(&self, claim: &NodeClaim, node: &Node);
}

/// The state of the services that a cloud uses.
pub trait ServiceStatus: Send + Sync {
    /// Names of zones with an active zonal shift: nothing is launched there, and instances there are not touched.
    fn shifted_zones(&self) -> BTreeSet<String>;
    /// Optional APIs that fail now, with consequence and cause.
    fn failing_apis(&self) -> BTreeMap<OptionalApi, String>;
}

/// The state of the offerings, for operators.
pub trait OfferingStatus: Send + Sync {
    /// The state at `now`, with at most `most` entries of unavailable capacity. Does no I/O.
    fn offering_state(&self, most: usize, now: UnixMillis) -> OfferingState;
}
