//! A scripted cloud: returns the answers of a test and records the mutating calls.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Mutex};

use futures::future::BoxFuture;
use futures::stream::{self, BoxStream};
use futures::{FutureExt, StreamExt};
use stowage_api::{Ec2NodeClass, NodeClaim, NodePool};
use stowage_cloud::{
    Capabilities, Cloud, CloudError, Drift, Instance, InstanceEvents, InstanceTagging, LaunchError, LaunchRequest,
    Launched, Message, NodeClassCloud, OptionalApi, Override, Resolution, ServiceStatus, Untagged,
};
use stowage_model::instance_health::Unhealthy;
use stowage_model::offering::Catalog;
use stowage_runtime::sync::lock;

/// The scripted answers and the recorded calls. Without answers it is a cloud without instances on which every call succeeds.
#[derive(Default)]
pub struct FakeCloud {
    pub catalog: Arc<Catalog>,
    /// Answer to every launch; `None` throttles every launch.
    pub launched: Option<Result<Launched, LaunchError>>,
    /// Existing instances. A termination removes its instance.
    pub instances: Mutex<Vec<Instance>>,
    /// Answer to the resolution of a node class; `None` sets all conditions to true.
    pub resolution: Option<Resolution>,
    /// A node class whose resolution never ends.
    pub hanging_class: Option<String>,
    /// The cluster's CA; `None` is a cloud that does not resolve node classes.
    pub instance_ca: Option<String>,
    /// Messages of the queue, by read.
    pub messages: Mutex<VecDeque<Vec<Message>>>,
    /// Whether messages have to be confirmed.
    pub untrusted_messages: bool,
    /// The spot instances that the cloud shows as interrupted; `None` without the right to ask.
    pub interrupted: Option<BTreeSet<String>>,
    /// Failure of every description of an instance.
    pub describe_failure: Option<CloudError>,
    /// The provider id of an instance whose termination panics.
    pub panicking: Option<String>,
    pub shifted_zones: BTreeSet<String>,
    pub failing_apis: BTreeMap<OptionalApi, String>,
    /// Failure of every mutating call except launches.
    pub failure: Option<CloudError>,
    /// See [`Self::calls`].
    pub log: Mutex<Vec<String>>,
}

impl FakeCloud {
    /// The mutating calls so far, such as `terminate aws:///z/i-1`.
    pub fn calls(&self) -> Vec<String> {
        lock(&self.log).clone()
    }

    fn call(&self, call: String) -> Result<(), CloudError> {
        lock(&self.log).push(call);
        self.failure.clone().map_or(Ok(()), Err)
    }
}

impl Cloud for FakeCloud {
    fn catalog(&self, _: &Ec2NodeClass) -> Arc<Catalog> {
        Arc::clone(&self.catalog)
    }

    fn mark_unavailable(&self, offering: &Override) {
        let Override { instance_type, zone, capacity_type } = offering;
        lock(&self.log).push(format!("mark unavailable {instance_type} {zone} {capacity_type}"));
    }

    fn launch(&self, request: LaunchRequest) -> BoxFuture<'_, Result<Launched, LaunchError>> {
        lock(&self.log).push(format!("launch {}", request.client_token));
        let answer = self.launched.clone().unwrap_or(Err(LaunchError::Throttled));
        if let Ok(launched) = &answer {
            let mut instances = lock(&self.instances);
            if !instances.iter().any(|known| known.id == launched.instance.id) {
                instances.push(launched.instance.clone());
            }
        }
        async move { answer }.boxed()
    }

    fn describe<'a>(&'a self, provider_id: &'a str) -> BoxFuture<'a, Result<Option<Instance>, CloudError>> {
        let found = lock(&self.instances).iter().find(|instance| instance.provider_id == provider_id).cloned();
        let answer = self.describe_failure.clone().map_or(Ok(found), Err);
        async move { answer }.boxed()
    }

    fn terminate<'a>(&'a self, provider_id: &'a str) -> BoxFuture<'a, Result<bool, CloudError>> {
        assert!(self.panicking.as_deref() != Some(provider_id), "a defect about {provider_id}");
        let result = self.call(format!("terminate {provider_id}")).map(|()| {
            let mut instances = lock(&self.instances);
            let before = instances.len();
            instances.retain(|instance| instance.provider_id != provider_id);
            instances.len() < before
        });
        async move { result }.boxed()
    }

    fn list(&self) -> BoxFuture<'_, Result<Vec<Instance>, CloudError>> {
        let all = lock(&self.instances).clone();
        async move { Ok(all) }.boxed()
    }

    fn launched_for<'a>(&'a self, claim: &'a NodeClaim) -> BoxFuture<'a, Result<Vec<Instance>, CloudError>> {
        let mut found = lock(&self.instances).clone();
        found.retain(|instance| Some(&instance.client_token) == claim.metadata.uid.as_ref());
        async move { Ok(found) }.boxed()
    }

    fn receive_messages(&self) -> BoxFuture<'_, Result<Vec<Message>, CloudError>> {
        match lock(&self.messages).pop_front() {
            Some(messages) => async move { Ok(messages) }.boxed(),
            None => std::future::pending().boxed(),
        }
    }

    fn delete_messages<'a>(&'a self, receipts: &'a [String]) -> BoxFuture<'a, Result<(), CloudError>> {
        let result = self.call(format!("delete messages {receipts:?}"));
        async move { result }.boxed()
    }

    fn capabilities(&self) -> Capabilities<'_> {
        Capabilities {
            node_classes: self.instance_ca.as_ref().map(|_| self as &dyn NodeClassCloud),
            instance_events: self.untrusted_messages.then_some(self as &dyn InstanceEvents),
            instance_tagging: Some(self),
            service_status: Some(self),
            capacity_reservations: true,
            untrusted_messages: self.untrusted_messages,
            ..Capabilities::default()
        }
    }
}

impl NodeClassCloud for FakeCloud {
    fn resolve<'a>(&'a self, class: &'a Ec2NodeClass, _: &'a [Arc<NodePool>]) -> BoxFuture<'a, Resolution> {
        if self.hanging_class.is_some() && self.hanging_class == class.metadata.name {
            return std::future::pending().boxed();
        }
        let resolution = self.resolution.clone().unwrap_or_else(Resolution::all_true);
        async move { resolution }.boxed()
    }

    fn drift<'a>(&'a self, _: &'a NodeClaim, _: &'a Ec2NodeClass) -> BoxFuture<'a, Result<Option<Drift>, CloudError>> {
        async { Ok(None) }.boxed()
    }

    fn instance_ca(&self) -> String {
        self.instance_ca.clone().unwrap_or_default()
    }

    fn delete_unused_profiles<'a>(&'a self, used: &'a BTreeSet<String>) -> BoxFuture<'a, Result<(), CloudError>> {
        let result = self.call(format!("delete profiles other than {used:?}"));
        async move { result }.boxed()
    }

    fn release_class<'a>(&'a self, class: &'a Ec2NodeClass) -> BoxFuture<'a, Result<(), CloudError>> {
        let result = self.call(format!("release class {}", class.metadata.name.as_deref().unwrap_or_default()));
        async move { result }.boxed()
    }
}

impl InstanceEvents for FakeCloud {
    fn unhealthy(&self) -> BoxFuture<'_, Result<Vec<Unhealthy>, CloudError>> {
        async { Ok(Vec::new()) }.boxed()
    }

    fn is_interrupted<'a>(&'a self, instance_id: &'a str) -> BoxFuture<'a, Result<bool, CloudError>> {
        let answer = self.interrupted.as_ref().map(|interrupted| interrupted.contains(instance_id));
        async move { answer.ok_or_else(|| CloudError::Refused("ec2:DescribeSpotInstanceRequests".into())) }.boxed()
    }
}

impl InstanceTagging for FakeCloud {
    fn tag<'a>(&'a self, due: &'a [Untagged]) -> BoxStream<'a, (usize, Result<(), CloudError>)> {
        let tag = |(at, one): (usize, &Untagged)| (at, self.call(format!("tag {} of {}", one.provider_id, one.claim)));
        stream::iter(due.iter().enumerate().map(tag).collect::<Vec<_>>()).boxed()
    }
}

impl ServiceStatus for FakeCloud {
    fn shifted_zones(&self) -> BTreeSet<String> {
        self.shifted_zones.clone()
    }

    fn failing_apis(&self) -> BTreeMap<OptionalApi, String> {
        self.failing_apis.clone()
    }
}
