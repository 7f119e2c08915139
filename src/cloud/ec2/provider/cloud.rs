//! The trait [`Cloud`], as EC2 keeps it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use futures::future::BoxFuture;
use futures::stream::BoxStream;
use futures::{FutureExt, StreamExt};
use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;

use crate::api::{Ec2NodeClass, NodeClaim, NodePool};
use crate::cloud::ec2::aws::errors::Class;
use crate::cloud::ec2::degraded_apis;
use crate::cloud::ec2::instances::describe;
use crate::cloud::ec2::instances::describe::InstanceFacts;
use crate::cloud::ec2::instances::{status_checks, tagging};
use crate::cloud::ec2::launch;
use crate::cloud::ec2::launch::templates::store;
use crate::cloud::ec2::observability::recording;
use crate::cloud::ec2::offerings::catalog_cache::CatalogSources;
use crate::cloud::ec2::provider::{Ec2Provider, NO_QUEUE, bought_as, key, known, unanswered};
use crate::cloud::launch_group::LaunchGroup;
use crate::cloud::{
    Capabilities, Cloud, CloudError, ClusterObserver, Drift, Instance, InstanceEvents, InstanceTagging, LaunchError,
    LaunchRequest, Launched, Message, NodeClassCloud, Override, Resolution, ServiceStatus, Untagged,
};
use crate::model::instance_health::Unhealthy;
use crate::model::offering::Catalog;
use crate::sync::lock;

impl Cloud for Ec2Provider {
    fn catalog(&self, class: &Ec2NodeClass) -> Arc<Catalog> {
        let group = self.known_group(class);
        let (mut unavailable, mut memory) = (lock(&self.unavailable), lock(&self.memory));
        let (region, risk, reservations) = (&self.region, &self.risk, &self.reservations());
        let (unavailable, memory, shifted_zone_ids) =
            (&mut *unavailable, &mut *memory, &self.shifts.shifted_zone_ids(crate::clock::now()));
        let mut sources = CatalogSources {
            region,
            risk,
            unavailable,
            memory,
            reservations,
            shifted_zone_ids,
            options: &self.options,
        };
        lock(&self.catalogs).catalog(&mut sources, class, group, crate::clock::now())
    }

    fn mark_unavailable(&self, offering: &Override) {
        launch::mark(self, offering);
    }

    fn launch(&self, request: LaunchRequest) -> BoxFuture<'_, Result<Launched, LaunchError>> {
        let metrics = &self.clients.metrics;
        metrics.timed("Create", recording::launch_error, async move { self.launch_claim(&request).await }).boxed()
    }

    fn describe<'a>(&'a self, provider_id: &'a str) -> BoxFuture<'a, Result<Option<Instance>, CloudError>> {
        let call = async move {
            let id = known(provider_id)?;
            if let Err(error) = self.not_shifted(provider_id) {
                let cached = lock(&self.listed).iter().find(|instance| instance.id == id).cloned();
                return cached.map(Some).ok_or(error);
            }
            Ok(self.describe_id(id).await?.or_else(|| self.recent(id, crate::clock::now().0)))
        };
        self.clients.metrics.timed("Get", recording::cloud_error, call).boxed()
    }

    fn terminate<'a>(&'a self, provider_id: &'a str) -> BoxFuture<'a, Result<bool, CloudError>> {
        let call = async move {
            let id = known(provider_id)?;
            self.not_shifted(provider_id)?;
            let result = self.terminate_id(id).await;
            if result.is_err() {
                self.not_terminated(provider_id);
            }
            result
        };
        self.clients.metrics.timed("Delete", recording::cloud_error, call).boxed()
    }

    fn list(&self) -> BoxFuture<'_, Result<Vec<Instance>, CloudError>> {
        let call = async move {
            let found = describe::of_cluster(&self.clients, &self.options.cluster_name).await?;
            let (mut found, facts): (Vec<Instance>, Vec<InstanceFacts>) = found.into_iter().unzip();
            *lock(&self.facts_of) = found.iter().map(|instance| instance.id.clone()).zip(facts).collect();
            found = self.with_unseen(found, |_| true);
            lock(&self.listed).clone_from(&found);
            let reserved =
                found.iter().filter_map(|one| Some((one.id.as_str(), one.reservation.as_ref()?.id.as_str())));
            self.reservations().reconcile_running(reserved);
            *lock(&self.bought) = found.iter().map(|one| (one.id.clone(), bought_as(one))).collect();
            Ok(found)
        };
        self.clients.metrics.timed("List", recording::cloud_error, call).boxed()
    }

    fn launched_for<'a>(&'a self, claim: &'a NodeClaim) -> BoxFuture<'a, Result<Vec<Instance>, CloudError>> {
        let call = async move {
            let group = LaunchGroup::of(claim).id;
            let found = self.finder.ask(group.clone()).await;
            let found = found.unwrap_or_else(|| Err(unanswered("ec2:DescribeInstances")))?;
            Ok(self.with_unseen(found, |instance| instance.client_token == group))
        };
        self.clients.metrics.timed("List", recording::cloud_error, call).boxed()
    }

    fn receive_messages(&self) -> BoxFuture<'_, Result<Vec<Message>, CloudError>> {
        async move {
            let Some(queue) = &self.queue else {
                tokio::time::sleep(NO_QUEUE).await;
                return Ok(vec![]);
            };
            let received = queue.receive(|| crate::clock::now().0).await?;
            for event in &received {
                self.heed(event);
            }
            recording::received(&self.clients.metrics, &received, crate::clock::now());
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
            capacity_reservations: true,
        }
    }
}

impl NodeClassCloud for Ec2Provider {
    fn resolve<'a>(&'a self, class: &'a Ec2NodeClass, pools: &'a [Arc<NodePool>]) -> BoxFuture<'a, Resolution> {
        async move { self.resolve_class(class, pools).await }.boxed()
    }

    fn drift<'a>(
        &'a self,
        claim: &'a NodeClaim,
        class: &'a Ec2NodeClass,
    ) -> BoxFuture<'a, Result<Option<Drift>, CloudError>> {
        async move { self.drift_of(claim, class).await }.boxed()
    }

    fn instance_ca(&self) -> String {
        self.facts.load().ca_bundle.clone()
    }

    fn delete_unused_profiles<'a>(&'a self, used: &'a BTreeSet<String>) -> BoxFuture<'a, Result<(), CloudError>> {
        async move {
            if self.options.isolated_vpc {
                return Ok(());
            }
            let cluster = &self.options.cluster_name;
            let deleted = self.profiles.delete_unused(&self.clients, cluster, used, crate::clock::now()).await;
            match &deleted {
                Ok(()) => self.degraded.record_recovery(degraded_apis::PROFILES),
                Err(error) if error.class == Class::Unauthorized => {
                    let note = format!(
                        "instance profiles that nothing uses any more are kept: allow {} in the controller's policy ({error})",
                        error.action
                    );
                    self.degraded.record_failure(degraded_apis::PROFILES, note);
                }
                // The next look is in half an hour, and nobody waits for it.
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
                self.profiles.delete_of_class(&self.clients, cluster, class).await?;
            }
            store::delete_of_class(&self.clients, cluster, &class.name_any()).await?;
            lock(&self.groups).remove(&key(class));
            // There is none where the class was never tried.
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
                Ok(_) => self.degraded.record_recovery(degraded_apis::STATUS_CHECKS),
                // Whoever asks tells of that by itself, and asks no more.
                Err(error) if error.class == Class::Unauthorized => {
                    self.degraded.record_recovery(degraded_apis::STATUS_CHECKS)
                }
                // It lasts: the client has tried again for minutes.
                Err(error) => {
                    let note = format!("instances whose status checks fail are not replaced: {error}");
                    self.degraded.record_failure(degraded_apis::STATUS_CHECKS, note);
                }
            }
            Ok(status_checks::unhealthy(&statuses?, crate::clock::now().0))
        }
        .boxed()
    }

    fn messages_received(&self) -> BTreeMap<&'static str, u64> {
        self.queue.as_ref().map(|queue| queue.counts().received).unwrap_or_default()
    }
}

impl InstanceTagging for Ec2Provider {
    fn tag<'a>(&'a self, due: &'a [Untagged]) -> BoxStream<'a, (usize, Result<(), CloudError>)> {
        self.tag_all(due, tagging::PAUSE).boxed()
    }
}

impl ClusterObserver for Ec2Provider {
    fn observe(&self, classes: &[Arc<Ec2NodeClass>], pools: &[Arc<NodePool>]) {
        self.shapes.observe(classes, pools);
        lock(&self.catalogs).retain_classes(classes);
    }

    fn registered(&self, claim: &NodeClaim, node: &Node) {
        lock(&self.memory).record(claim, node, crate::clock::now());
    }
}

impl ServiceStatus for Ec2Provider {
    fn shifted_zones(&self) -> BTreeSet<String> {
        self.shifts.shifted_zones(crate::clock::now())
    }

    fn unreadable(&self) -> BTreeMap<&'static str, String> {
        let mut unreadable = self.degraded.unreadable();
        unreadable.extend(self.snapshot().unreadable());
        unreadable
    }

    fn unwritable(&self) -> BTreeMap<&'static str, String> {
        self.degraded.unwritable()
    }
}
