//! The cloud behind the plan: a small trait, Amazon EC2, and the simulated EC2 that is the embedded default.

pub mod ami_family;
pub mod catalog;
pub mod draw;
pub mod ec2;
pub mod health;
pub mod kubelet_config;
pub mod launch_group;
pub mod reservation;
pub mod simulated;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use futures::stream::{self, BoxStream};
use futures::{FutureExt, StreamExt};
use k8s_openapi::api::core::v1::{Node, Taint};

use crate::api::{Ec2NodeClass, Ec2NodeClassStatus, NodeClaim, NodePool};
use crate::cloud::launch_group::LaunchGroup;
pub use crate::cloud::reservation::ReservedIn;
use crate::model::offering::{CapacityType, Catalog};

/// An offering a launch may take: instance type, zone, capacity type.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Override {
    /// Instance type, as `m7g.large`.
    pub instance_type: String,
    /// Zone name, as `us-east-1a`.
    pub zone: String,
    /// Capacity type.
    pub capacity_type: CapacityType,
}

/// What to launch for one NodeClaim.
#[derive(Clone, Debug)]
pub struct LaunchRequest {
    /// Idempotency token, the NodeClaim's UID: the same token never launches twice.
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
    /// The objects behind the request, for a cloud that makes instances of them.
    pub details: Option<Arc<LaunchDetails>>,
}

/// The objects behind a launch.
#[derive(Debug)]
pub struct LaunchDetails {
    /// The NodeClaim.
    pub claim: NodeClaim,
    /// Its node class.
    pub class: Arc<Ec2NodeClass>,
    /// The catalog that the request's offerings were taken from.
    pub catalog: Arc<Catalog>,
    /// Provider ids that claims of its launch group name already.
    pub named: BTreeSet<String>,
}

/// An instance as the cloud knows it.
#[derive(Clone, Debug, PartialEq)]
pub struct Instance {
    /// As `i-0123456789abcdef0`.
    pub id: String,
    /// As `aws:///us-east-1a/i-0123456789abcdef0`.
    pub provider_id: String,
    /// Token it was launched with, or the launch group whose call launched it.
    pub client_token: String,
    /// NodeClaim it was launched for (a tag).
    pub node_claim: String,
    /// Instance type.
    pub instance_type: String,
    /// Zone name.
    pub zone: String,
    /// Capacity type.
    pub capacity_type: CapacityType,
    /// Capacity reservation that it was launched into.
    pub reservation: Option<ReservedIn>,
    /// Partition of its placement group; `None` where it has none or that is not known yet.
    pub partition: Option<i32>,
    /// Image id.
    pub image_id: String,
    /// Milliseconds since the epoch.
    pub launched_at_ms: i64,
    /// State.
    pub state: InstanceState,
}

/// Life of an instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InstanceState {
    /// Booting.
    Pending,
    /// Running.
    Running,
    /// Going away.
    ShuttingDown,
    /// Gone; still described for a while.
    Terminated,
}

/// Why a launch failed.
#[derive(Debug, thiserror::Error, Clone, PartialEq)]
pub enum LaunchError {
    /// Every offering is out of capacity; these were seen to be.
    #[error("no capacity in any of {} offerings", .unavailable.len())]
    InsufficientCapacity {
        /// Offerings without capacity.
        unavailable: Vec<Override>,
    },
    /// The API throttled the call: try again later.
    #[error("request rate exceeded, retry with backoff")]
    Throttled,
    /// The account has no role for spot instances, and the controller may not make it.
    #[error(
        "the account lacks the service-linked role of EC2 spot: run aws iam create-service-linked-role --aws-service-name spot.amazonaws.com"
    )]
    NoSpotRole,
    /// EC2 refused for a reason that somebody has to look at; nothing was launched.
    #[error("launch refused, {reason}: {message}")]
    Rejected {
        /// In a word, as the NodeClaim's Launched condition says it.
        reason: &'static str,
        /// What EC2 says.
        message: String,
    },
    /// The node class can't launch.
    #[error("node class {name} is not ready: {reason}")]
    NodeClassNotReady {
        /// Node class.
        name: String,
        /// Why.
        reason: String,
    },
    /// Anything else; whether an instance was launched is not known, so retry with the same token.
    #[error("launch failed: {message}")]
    Other {
        /// In a word, as the NodeClaim's Launched condition says it.
        reason: &'static str,
        /// What is known of it.
        message: String,
    },
}

impl LaunchError {
    /// A failure of which no more is known than this text.
    pub fn other(message: impl Into<String>) -> Self {
        Self::Other { reason: "LaunchFailed", message: message.into() }
    }
}

/// An error's text without the details of a refusal, which EC2 encrypts anew each time.
pub fn lasting(text: &str) -> &str {
    text.split_once("Encoded authorization failure message").map_or(text, |(lasting, _)| lasting).trim_end()
}

/// A failure of any other call.
#[derive(Debug, thiserror::Error, Clone, PartialEq)]
pub enum CloudError {
    /// The API throttled the call.
    #[error("request rate exceeded, retry with backoff")]
    Throttled,
    /// The controller may not make the call: asking again helps only once its policy is another.
    #[error("{0}")]
    Refused(String),
    /// Anything else.
    #[error("{0}")]
    Other(String),
}

/// A launched instance and what else the launch learnt.
#[derive(Clone, Debug)]
pub struct Launched {
    /// The instance.
    pub instance: Instance,
    /// Offerings seen to be out of capacity on the way.
    pub unavailable: Vec<Override>,
}

/// What a queue message says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MessageKind {
    /// Two minutes' notice of a spot interruption.
    SpotInterruption,
    /// Raised risk of interruption.
    RebalanceRecommendation,
    /// Two minutes' notice by the owner of the capacity reservation.
    CapacityReservationInterruption,
    /// Scheduled maintenance.
    ScheduledChange,
    /// The instance stops or has stopped.
    Stopped,
    /// The instance shuts down or has terminated.
    StateChange,
}

/// A message of the interruption queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// Handle to delete it with.
    pub receipt: String,
    /// What it says.
    pub kind: MessageKind,
    /// Instance it is about.
    pub instance_id: String,
    /// When the event happened, milliseconds since the epoch.
    pub at_ms: i64,
}

/// What is known of a node class's condition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It holds.
    True,
    /// It doesn't: reason and message.
    False(&'static str, String),
    /// It holds, but without something that the class asks for: reason and message, told in an event.
    Degraded(&'static str, String),
    /// It can't be told yet: reason and message.
    Unknown(&'static str, String),
    /// An API failed: what was known before stands. The message says what failed.
    Unjudged(String),
}

/// What a node class comes to in the cloud.
#[derive(Clone, Debug, PartialEq)]
pub struct Resolution {
    /// The status without its conditions; `None` leaves it as it is.
    pub status: Option<Ec2NodeClassStatus>,
    /// Verdicts by condition.
    pub verdicts: Vec<(&'static str, Verdict)>,
    /// When to look again, unless the class changes before.
    pub again: Duration,
}

/// Why a node is not what is asked for any more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Drift {
    /// In a word, as the NodeClaim's Drifted condition says it.
    pub reason: &'static str,
    /// For people: what is and what should be.
    pub message: String,
}

/// An instance that became a Node, and has no tags that say so yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Untagged {
    /// Its provider id.
    pub provider_id: String,
    /// Name of its Node.
    pub node: String,
    /// Name of its NodeClaim.
    pub claim: String,
}

/// What Stowage needs of a cloud. Every method is safe to repeat.
pub trait Cloud: Send + Sync {
    /// Instance types, offerings, prices and availability for nodes of `class`. Cached; does no I/O.
    fn catalog(&self, class: &Ec2NodeClass) -> Arc<Catalog>;
    /// Notes that an offering had no capacity: it is unavailable in [`Cloud::catalog`] for a while.
    fn mark_unavailable(&self, offering: &Override);
    /// Launches one instance (as CreateFleet `instant`), or returns the one that `client_token` launched before.
    fn launch(&self, request: LaunchRequest) -> BoxFuture<'_, Result<Launched, LaunchError>>;
    /// Describes an instance; `None` when it is gone.
    fn describe<'a>(&'a self, provider_id: &'a str) -> BoxFuture<'a, Result<Option<Instance>, CloudError>>;
    /// Starts termination; `Ok(false)` when the instance is already gone.
    fn terminate<'a>(&'a self, provider_id: &'a str) -> BoxFuture<'a, Result<bool, CloudError>>;
    /// Every instance of this cluster that is not terminated.
    fn list(&self) -> BoxFuture<'_, Result<Vec<Instance>, CloudError>>;
    /// Instances that were launched for a claim, or for its launch group, and are not terminated.
    fn launched_for<'a>(&'a self, claim: &'a NodeClaim) -> BoxFuture<'a, Result<Vec<Instance>, CloudError>> {
        async move {
            let tokens = [Some(LaunchGroup::of(claim).id), claim.metadata.uid.clone()];
            let mut found = self.list().await?;
            found.retain(|instance| tokens.iter().flatten().any(|token| *token == instance.client_token));
            Ok(found)
        }
        .boxed()
    }
    /// Waits (bounded, as a long poll) for messages of the interruption queue.
    fn receive_messages(&self) -> BoxFuture<'_, Result<Vec<Message>, CloudError>>;
    /// Messages received since the start, by kind, also those that had no effect, where the cloud counts them itself.
    fn messages_received(&self) -> Option<BTreeMap<&'static str, u64>> {
        None
    }
    /// Deletes handled messages. One that could not be deleted comes back.
    fn delete_messages<'a>(&'a self, receipts: &'a [String]) -> BoxFuture<'a, Result<(), CloudError>>;
    /// Instances that are there and not well, also such as are not of this cluster. A cloud that can't tell says none.
    fn unhealthy(&self) -> BoxFuture<'_, Result<Vec<health::Unhealthy>, CloudError>> {
        async { Ok(vec![]) }.boxed()
    }
    /// Why a claim's instance is not what its node class comes to now; `None` where it is. An error says that this can't be told
    /// now. Mostly answered from what is known already.
    fn drift<'a>(
        &'a self,
        _claim: &'a NodeClaim,
        _class: &'a Ec2NodeClass,
    ) -> BoxFuture<'a, Result<Option<Drift>, CloudError>> {
        async { Ok(None) }.boxed()
    }
    /// What a node class comes to: subnets, images and so on; `pools` are the NodePools that name it. Without an answer of its own a cloud has nothing to discover, every
    /// condition holds, and looking again costs nothing.
    fn resolve<'a>(&'a self, _class: &'a Ec2NodeClass, _pools: &'a [Arc<NodePool>]) -> BoxFuture<'a, Resolution> {
        let all = crate::api::conditions::EC2_NODE_CLASS_DEPENDENTS.iter();
        let verdicts = all.map(|kind| (*kind, Verdict::True)).collect();
        let resolution = Resolution { status: None, verdicts, again: Duration::ZERO };
        async move { resolution }.boxed()
    }
    /// Takes in how node classes and NodePools are now, for what is made ahead of launches. Called within a second of each change; does no I/O.
    fn observe(&self, _classes: &[Arc<Ec2NodeClass>], _pools: &[Arc<NodePool>]) {}
    /// The CA that instances get, base64, if this cloud makes real ones: then node classes carry a drift hash, which the CA is part
    /// of, and a finalizer.
    fn instance_ca(&self) -> Option<String> {
        None
    }
    /// Tags instances with their nodes' and their claims' names, as fast as the cloud's API likes. Gives the outcome of each as soon
    /// as it is known, by its place in `due`. One that is gone is fine.
    fn tag<'a>(&'a self, due: &'a [Untagged]) -> BoxStream<'a, (usize, Result<(), CloudError>)> {
        stream::iter(0..due.len()).map(|at| (at, Ok(()))).boxed()
    }
    /// Takes in what a claim's Node, now that it is registered, shows of its instance type. A cloud that knows all of its types
    /// learns nothing.
    fn registered(&self, _claim: &NodeClaim, _node: &Node) {}
    /// Deletes the instance profiles that were made for classes and that none of `used` is any more.
    fn delete_unused_profiles<'a>(&'a self, _used: &'a BTreeSet<String>) -> BoxFuture<'a, Result<(), CloudError>> {
        async { Ok(()) }.boxed()
    }
    /// Names of zones that are shifted away from: nothing is launched there, and what runs there is left alone.
    fn shifted_zones(&self) -> BTreeSet<String> {
        BTreeSet::new()
    }
    /// Optional things that can't be read now, by a word for each: what that means and why.
    fn unreadable(&self) -> BTreeMap<&'static str, String> {
        BTreeMap::new()
    }
    /// Optional things that can't be written now, by a word for each: what that means and why.
    fn unwritable(&self) -> BTreeMap<&'static str, String> {
        BTreeMap::new()
    }
    /// Deletes what was made for a node class that no NodeClaim uses any more.
    fn release_class<'a>(&'a self, _class: &'a Ec2NodeClass) -> BoxFuture<'a, Result<(), CloudError>> {
        async { Ok(()) }.boxed()
    }
}
