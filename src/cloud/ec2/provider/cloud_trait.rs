//! [`Cloud`] and its optional interfaces, implemented by EC2.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use futures::stream::BoxStream;
use futures::{FutureExt, StreamExt};
use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;
use stowage_api::launch_group::LaunchGroup;
use stowage_api::{Ec2NodeClass, NodeClaim, NodePool};
use stowage_model::instance_health::Unhealthy;
use stowage_model::offering::Catalog;
use stowage_model::time::UnixMillis;
use stowage_runtime::clock;

use crate::ec2::aws::errors::{ApiError, Class};
use crate::ec2::instances::spot_requests::SPOT_REQUESTS;
use crate::ec2::instances::{status_checks, tagging};
use crate::ec2::launch::templates::template_store;
use crate::ec2::offerings::region_snapshot::{Dataset, Source};
use crate::ec2::provider::{Ec2Provider, recording};
use crate::offering_state::{OfferingData, OfferingState};
use crate::{
    Capabilities, Cloud, CloudError, ClusterObserver, Drift, Instance, InstanceEvents, InstanceTagging, LaunchError,
    LaunchRequest, Launched, Message, NodeClassCloud, OfferingStatus, OptionalApi, Override, Resolution, ServiceStatus,
    Untagged,
};

/// How long a receive waits without a queue.
const NO_QUEUE: Duration = Duration::from_secs(20);

/// Karpenter's names of the controllers that make these calls.
const LIFECYCLE: &str = "nodeclaim.lifecycle";
const GARBAGE_COLLECTION: &str = "nodeclaim.garbagecollection";

impl Cloud for Ec2Provider {
    fn catalog(&self, class: &Ec2NodeClass) -> Arc<Catalog> {
        self.launch_context.catalog(class)
    }

    fn mark_unavailable(&self, offering: &Override) {
        self.offerings.mark_offering_unavailable(offering, clock::now());
    }

    fn launch(&self, request: LaunchRequest) -> BoxFuture<'_, Result<Launched, LaunchError>> {
        let call = async move { self.launcher.launch(&request).await };
        self.clients.metrics.timed([LIFECYCLE, "Create"], recording::launch_error, call).boxed()
    }

    fn describe<'a>(&'a self, provider_id: &'a str) -> BoxFuture<'a, Result<Option<Instance>, CloudError>> {
        let call = self.instances.describe(provider_id);
        self.clients.metrics.timed([LIFECYCLE, "Get"], recording::cloud_error, call).boxed()
    }

    fn terminate<'a>(&'a self, provider_id: &'a str) -> BoxFuture<'a, Result<bool, CloudError>> {
        let call = self.instances.terminate(provider_id);
        self.clients.metrics.timed([LIFECYCLE, "Delete"], recording::cloud_error, call).boxed()
    }

    fn list(&self) -> BoxFuture<'_, Result<Vec<Instance>, CloudError>> {
        self.clients.metrics.timed([GARBAGE_COLLECTION, "List"], recording::cloud_error, self.instances.list()).boxed()
    }

    fn launched_for<'a>(&'a self, claim: &'a NodeClaim) -> BoxFuture<'a, Result<Vec<Instance>, CloudError>> {
        let call = async move { self.instances.of_launch_group(LaunchGroup::of(claim).id).await };
        self.clients.metrics.timed([LIFECYCLE, "List"], recording::cloud_error, call).boxed()
    }

    fn receive_messages(&self) -> BoxFuture<'_, Result<Vec<Message>, CloudError>> {
        async move {
            let Some(queue) = &self.queue else {
                tokio::time::sleep(NO_QUEUE).await;
                return Ok(vec![]);
            };
            let received = self.clients.metrics.read(queue.receive(clock::now)).await?;
            for event in &received {
                self.record_event(event);
            }
            recording::received(&self.clients.metrics, &received, clock::now());
            Ok(received.into_iter().map(Message::from).collect())
        }
        .boxed()
    }

    fn delete_messages<'a>(&'a self, receipts: &'a [String]) -> BoxFuture<'a, Result<(), CloudError>> {
        async move {
            match &self.queue {
                Some(queue) => Ok(queue.delete(receipts).await?),
                None => Ok(()),
            }
        }
        .boxed()
    }

    fn capabilities(&self) -> Capabilities<'_> {
        Capabilities {
            node_classes: Some(self),
            instance_events: Some(self),
            instance_tagging: Some(self),
            cluster_observer: Some(self),
            service_status: Some(self),
            offering_status: Some(self),
            capacity_reservations: true,
            untrusted_messages: true,
        }
    }
}

impl NodeClassCloud for Ec2Provider {
    fn resolve<'a>(&'a self, class: &'a Ec2NodeClass, pools: &'a [Arc<NodePool>]) -> BoxFuture<'a, Resolution> {
        self.resolve_class(class, pools).boxed()
    }

    fn drift<'a>(
        &'a self,
        claim: &'a NodeClaim,
        class: &'a Ec2NodeClass,
    ) -> BoxFuture<'a, Result<Option<Drift>, CloudError>> {
        self.drift_of(claim, class).boxed()
    }

    fn instance_ca(&self) -> String {
        self.node_classes.cluster().ca_bundle.clone()
    }

    fn delete_unused_profiles<'a>(&'a self, used: &'a BTreeSet<String>) -> BoxFuture<'a, Result<(), CloudError>> {
        async move {
            if self.options.isolated_vpc {
                return Ok(());
            }
            let (profiles, cluster) = (self.node_classes.profiles(), &self.options.cluster_name);
            let deleted = profiles.delete_unused(&self.clients, cluster, used, clock::now()).await;
            match &deleted {
                Ok(()) => self.degraded_apis.record_recovery(OptionalApi::InstanceProfiles),
                Err(error) if error.class == Class::Unauthorized => {
                    let note = format!(
                        "unused instance profiles are not deleted: allow {} in the controller's policy ({error})",
                        error.action
                    );
                    self.degraded_apis.record_failure(OptionalApi::InstanceProfiles, note);
                }
                // Retried in half an hour; nothing depends on it.
                Err(_) => {}
            }
            Ok(deleted?)
        }
        .boxed()
    }

    fn release_class<'a>(&'a self, class: &'a Ec2NodeClass) -> BoxFuture<'a, Result<(), CloudError>> {
        async move {
            let cluster = &self.options.cluster_name;
            if !self.options.isolated_vpc {
                self.node_classes.profiles().delete_of_class(&self.clients, cluster, class).await?;
            }
            template_store::delete_of_class(&self.clients, cluster, &class.name_any()).await?;
            self.node_classes.forget(class);
            // A class without a dry run has no series.
            let _ = self.clients.metrics.user_data_bytes.remove_label_values(&[class.name_any()]);
            Ok(())
        }
        .boxed()
    }
}

impl InstanceEvents for Ec2Provider {
    fn unhealthy(&self) -> BoxFuture<'_, Result<Vec<Unhealthy>, CloudError>> {
        async move {
            let statuses = status_checks::describe_statuses(&self.clients.ec2).await;
            match &statuses {
                Ok(_) => self.degraded_apis.record_recovery(OptionalApi::StatusChecks),
                // The caller reports a missing permission with a separate event and stops polling.
                Err(error) if error.class == Class::Unauthorized => {
                    self.degraded_apis.record_recovery(OptionalApi::StatusChecks);
                }
                // Not transient: the client has retried for minutes.
                Err(error) => {
                    let note = format!("instances whose status checks fail are not replaced: {error}");
                    self.degraded_apis.record_failure(OptionalApi::StatusChecks, note);
                }
            }
            Ok(status_checks::unhealthy(&statuses?, clock::now()))
        }
        .boxed()
    }

    fn is_interrupted<'a>(&'a self, instance_id: &'a str) -> BoxFuture<'a, Result<bool, CloudError>> {
        async move {
            let answer = self.interruptions.ask(instance_id.to_owned()).await;
            Ok(answer.unwrap_or_else(|| Err(ApiError::not_called(SPOT_REQUESTS)))?)
        }
        .boxed()
    }
}

impl InstanceTagging for Ec2Provider {
    fn tag<'a>(&'a self, due: &'a [Untagged]) -> BoxStream<'a, (usize, Result<(), CloudError>)> {
        self.tagger.tag_all(due, tagging::PAUSE).boxed()
    }
}

impl ClusterObserver for Ec2Provider {
    fn observe(&self, classes: &[Arc<Ec2NodeClass>], pools: &[Arc<NodePool>]) {
        self.launch_context.recent_shapes.observe(classes, pools);
        self.offerings.retain_classes(classes);
    }

    fn registered(&self, claim: &NodeClaim, node: &Node) {
        self.offerings.record_memory(claim, node, clock::now());
    }
}

impl ServiceStatus for Ec2Provider {
    fn shifted_zones(&self) -> BTreeSet<String> {
        self.offerings.shifts().shifted_zones(clock::now())
    }

    fn failing_apis(&self) -> BTreeMap<OptionalApi, String> {
        let mut out = self.degraded_apis.failing();
        out.extend(self.offerings.snapshot().failing_apis());
        out
    }
}

impl OfferingStatus for Ec2Provider {
    fn offering_state(&self, most: usize, now: UnixMillis) -> OfferingState {
        let (unavailable, unavailable_count) = self.offerings.unavailable_entries(most, now);
        let (region, snapshot) = (self.offerings.region(), self.offerings.snapshot());
        let data = Dataset::ALL.into_iter().map(|dataset| {
            let (source, error) = match snapshot.source(dataset) {
                Source::Live => ("live", None),
                Source::Stale { error } => ("stale", Some(error.clone())),
                Source::Embedded { error } => ("embedded", error.clone()),
            };
            OfferingData { kind: dataset.to_string(), source, read_at: region.read_at(dataset), error }
        });
        let unavailable = unavailable.into_iter().map(|(scope, until)| (scope.to_string(), until)).collect();
        OfferingState { unavailable, unavailable_count, data: data.collect() }
    }
}
