//! The EC2 provider: wires the stores and services, which own all state, and implements the interface of a cloud with them.
//!
//! Locks: every store documents its own. No method holds a lock of one store while it calls another store, except that
//! [`crate::ec2::instances::tagging`] updates the list of degraded APIs under its lock.

pub mod background;
pub mod class_resolution;
pub mod cloud_trait;
pub mod provider_metrics;
pub mod recording;

use std::sync::Arc;

use kube::Client;
use stowage_model::offering::CapacityType;
use stowage_runtime::clock;

use crate::MessageKind;
use crate::ec2::aws::client::{AwsClients, ConnectError};
use crate::ec2::aws::errors::{ApiError, Class};
use crate::ec2::failing_apis::DegradedApis;
use crate::ec2::instances::instance_store::InstanceStore;
use crate::ec2::instances::spot_requests::{Interruptions, interruptions};
use crate::ec2::instances::tagging::Tagger;
use crate::ec2::interruption::messages::EventKind;
use crate::ec2::interruption::sqs_queue::{Queue, QueueCounts, Received};
use crate::ec2::launch::class_dry_run::DryRunValidator;
use crate::ec2::launch::launch_context::LaunchContext;
use crate::ec2::launch::launcher::Launcher;
use crate::ec2::launch::templates::prewarm::Prewarmer;
use crate::ec2::node_class::class_store::NodeClassStore;
use crate::ec2::node_class::cluster_facts;
use crate::ec2::node_class::cluster_facts::{ClusterError, ClusterFacts};
use crate::ec2::offerings::interruption_history::InterruptionKind;
use crate::ec2::offerings::list_prices;
use crate::ec2::offerings::offering_store::OfferingStore;
use crate::ec2::offerings::refresh;
use crate::ec2::offerings::refresh::RegionApis;
use crate::ec2::options::Options;

/// Why EC2 can't be used.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// EC2 refuses even a dry run of DescribeInstanceTypes.
    #[error(
        "EC2 in {region} refuses DescribeInstanceTypes, check the endpoint, the credentials and the controller's policy: {source}"
    )]
    Probe { region: String, source: ApiError },
    /// The facts that nodes need to join the cluster are incomplete.
    #[error(transparent)]
    Cluster(#[from] ClusterError),
}

/// Amazon EC2. Cheap to share behind an `Arc`.
#[derive(Debug)]
pub struct Ec2Provider {
    pub(crate) clients: AwsClients,
    pub(crate) options: Arc<Options>,
    pub(crate) degraded_apis: Arc<DegradedApis>,
    pub(crate) offerings: Arc<OfferingStore>,
    pub(crate) node_classes: Arc<NodeClassStore>,
    pub(crate) instances: Arc<InstanceStore>,
    pub(crate) interruptions: Interruptions,
    pub(crate) launch_context: Arc<LaunchContext>,
    pub(crate) launcher: Launcher,
    pub(crate) dry_run: DryRunValidator,
    pub(crate) prewarmer: Prewarmer,
    pub(crate) tagger: Tagger,
    pub(crate) queue: Option<Queue>,
}

impl Ec2Provider {
    /// Connects with the configuration of the environment, and checks that EC2 accepts the credentials.
    ///
    /// # Errors
    /// [`StartError::Connect`] and [`StartError::Probe`].
    pub async fn connect() -> Result<AwsClients, StartError> {
        let clients = AwsClients::from_environment().await?;
        probe(&clients).await?;
        Ok(clients)
    }

    /// Discovers the cluster and the region. Called by the leader: the time of this call separates the launches of the previous
    /// leader from the launches of this process.
    ///
    /// # Errors
    /// [`StartError::Cluster`].
    pub async fn start(client: &Client, clients: AwsClients, options: Options) -> Result<Self, StartError> {
        let facts = cluster_facts::discover(Some(client), &clients, &options, None).await?;
        tracing::info!(
            region = clients.region,
            cluster = facts.name,
            endpoint = facts.endpoint,
            version = facts.version,
            service_cidr = facts.service_cidr,
            dns = facts.dns_ip,
            "connected to EC2"
        );
        let ec2 = Self::new(clients, options, facts);
        refresh::hydrate(ec2.offerings.region(), &ec2.apis(), refresh::start_timeout).await;
        Ok(ec2)
    }

    /// The APIs that the region is refreshed from.
    pub(crate) fn apis(&self) -> RegionApis {
        let priced = list_prices::has_pricing_api(&self.clients.region, self.options.isolated_vpc);
        RegionApis { ec2: self.clients.ec2.clone(), pricing: priced.then(|| self.clients.pricing.clone()) }
    }

    /// The provider of a known cluster.
    pub fn new(clients: AwsClients, options: Options, facts: ClusterFacts) -> Self {
        let options = Arc::new(options);
        let degraded_apis = Arc::new(DegradedApis::default());
        let offerings = Arc::new(OfferingStore::new(&clients.region, Arc::clone(&options)));
        let node_classes = Arc::new(NodeClassStore::new(facts));
        let instances = Arc::new(InstanceStore::new(&clients, &options.cluster_name, Arc::clone(&offerings)));
        let launch_context = Arc::new(LaunchContext::new(
            clients.clone(),
            Arc::clone(&options),
            Arc::clone(&offerings),
            Arc::clone(&node_classes),
        ));
        Self {
            launcher: Launcher::new(Arc::clone(&launch_context), Arc::clone(&instances)),
            dry_run: DryRunValidator::new(Arc::clone(&launch_context)),
            prewarmer: Prewarmer::new(Arc::clone(&launch_context)),
            tagger: Tagger::new(
                clients.clone(),
                &options.cluster_name,
                Arc::clone(&instances),
                Arc::clone(&degraded_apis),
            ),
            queue: options.interruption_queue.as_ref().map(|name| Queue::new(clients.sqs.clone(), name)),
            interruptions: interruptions(&clients),
            launch_context,
            instances,
            node_classes,
            offerings,
            degraded_apis,
            options,
            clients,
        }
    }

    /// The counters of the interruption queue; `None` without a queue.
    pub(crate) fn queue_counts(&self) -> Option<QueueCounts> {
        self.queue.as_ref().map(Queue::counts)
    }

    /// Records the consequences of an event for the offering or the reservation of its instance.
    pub(crate) fn record_event(&self, event: &Received) {
        let now = clock::now();
        if event.kind == EventKind::CapacityReservationInterrupted {
            self.offerings.with_reservations(|reservations| reservations.record_interrupted(&event.instance_id, now));
        }
        let kind = match event.kind.message_kind() {
            MessageKind::SpotInterruption => InterruptionKind::Interruption,
            MessageKind::RebalanceRecommendation => InterruptionKind::RebalanceRecommendation,
            MessageKind::CapacityReservationInterruption
            | MessageKind::ScheduledChange
            | MessageKind::Stopped
            | MessageKind::StateChange => return,
        };
        let offering = self.instances.offering(&event.instance_id);
        let Some(offering) = offering.filter(|offering| offering.capacity_type == CapacityType::Spot) else { return };
        self.offerings.risk().record(&offering.instance_type, &offering.zone, kind, now);
        if kind == InterruptionKind::Interruption {
            self.offerings.mark_offering_unavailable(&offering, now);
        }
    }
}

/// Checks that EC2 responds and accepts the credentials.
async fn probe(clients: &AwsClients) -> Result<(), StartError> {
    let call = clients.ec2.describe_instance_types().dry_run(true);
    match call.send().await.map_err(ApiError::of("ec2:DescribeInstanceTypes")) {
        Err(source) if source.class != Class::DryRunOk => {
            Err(StartError::Probe { region: clients.region.clone(), source })
        }
        // Some endpoints ignore `DryRun` and respond.
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests;
