//! The shell: locks, clock, background work, and the [`Cloud`] trait.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use arc_swap::ArcSwap;
use futures::FutureExt;
use futures::future::BoxFuture;
use kube::{Client, ResourceExt};

use super::batches::Batches;
use super::catalogues::{Catalogues, ReservedOfferings, Sources};
use super::class_view::PlacementGroup;
use super::client::{Clients, ConnectError};
use super::cluster::{self, ClusterError, ClusterFacts};
use super::errors::{ApiError, Class};
use super::images::Parameters;
use super::instances::{self, Describer, InstanceFacts, Terminator, describer, instance_id, terminator};
use super::interruption_history::Setback;
use super::messages::EventKind;
use super::placement_scores::{self, ScoreSettings};
use super::profile::Profiles;
use super::queue::{Queue, QueueCounts, Received};
use super::refresh::{self, Feeds};
use super::region::{self, Region, RegionSnapshot};
use super::reservation_counts::ReservationCounts;
use super::spot_risk::SpotRisk;
use super::subnets::Addresses;
use super::templates::{self, Templates};
use super::unavailable::Unavailable;
use super::validate::Verdicts;
use super::zonal_shift::{self, Shifts, zone_of};
use super::{Options, launch, metrics, now_ms, prices, status_checks, tagging};
use crate::api::{Ec2NodeClass, NodeClaim};
use crate::cloud::catalogue::embedded;
use crate::cloud::health::Unhealthy;
use crate::cloud::{
    Cloud, CloudError, Drift, Instance, InstanceState, LaunchError, LaunchRequest, Launched, Message, MessageKind,
    Override, Resolution,
};
use crate::scheduling::offering::{CapacityType, Catalogue};

/// How long EC2 may take to describe what it launched, milliseconds.
const CONSISTENCY_MS: i64 = 60_000;
/// An instance that is going down is looked at no more often, milliseconds.
const GOING_MS: i64 = 2_000;
/// How often unused templates are looked for.
const SWEEP: Duration = Duration::from_secs(10);
/// How often the cluster's version and addresses are looked up again.
const FACTS_PERIOD: Duration = Duration::from_mins(5);
/// How often images that `@latest` stands for are looked at, whether they are deprecated.
const DEPRECATION_PERIOD: Duration = Duration::from_mins(30);
/// How long a receive waits where there is no queue.
const NO_QUEUE: Duration = Duration::from_secs(20);

/// Why EC2 can't be used.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// No clients.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// EC2 refuses even to describe instance types.
    #[error(
        "EC2 in {region} refuses DescribeInstanceTypes, check the endpoint, the credentials and the controller's policy: {source}"
    )]
    Probe {
        /// Region.
        region: String,
        /// What EC2 said.
        source: ApiError,
    },
    /// The cluster isn't known well enough to launch nodes for it.
    #[error(transparent)]
    Cluster(#[from] ClusterError),
}

/// Amazon EC2. Cheap to share behind an `Arc`.
#[derive(Debug)]
pub struct Ec2 {
    pub(super) options: Options,
    pub(super) clients: Clients,
    pub(super) facts: ArcSwap<ClusterFacts>,
    pub(super) unavailable: Mutex<Unavailable>,
    pub(super) templates: Templates,
    pub(super) parameters: Parameters,
    pub(super) profiles: Profiles,
    pub(super) verdicts: Verdicts,
    pub(super) batches: Batches<launch::Ready>,
    /// Since when this process leads, milliseconds since the epoch.
    pub(super) leading_since_ms: i64,
    region: Arc<Region>,
    risk: Arc<SpotRisk>,
    queue: Option<Queue>,
    addresses: Mutex<Addresses>,
    reservations: Mutex<ReservationCounts>,
    shifts: Shifts,
    /// What was last listed, for zones that EC2 is not to be asked about.
    listed: Mutex<Vec<Instance>>,
    catalogues: Mutex<Catalogues>,
    groups: Mutex<HashMap<String, Option<PlacementGroup>>>,
    describer: Describer,
    terminator: Terminator,
    /// What was launched so lately that EC2 may not describe it yet, by id.
    recent: Mutex<HashMap<String, Instance>>,
    /// What the cluster's instances were bought as, by id: messages name only the instance.
    bought: Mutex<HashMap<String, Override>>,
    /// What the cluster's instances were at the last listing, by id.
    facts_of: Mutex<HashMap<String, InstanceFacts>>,
    /// When an instance that is going down was last looked at, by id, milliseconds since the epoch.
    going: Mutex<HashMap<String, i64>>,
}

impl Ec2 {
    /// Connects as the environment says, and asks EC2 whether it may be used at all.
    ///
    /// # Errors
    /// [`StartError`].
    pub async fn connect() -> Result<Clients, StartError> {
        let clients = Clients::from_environment().await?;
        probe(&clients).await?;
        Ok(clients)
    }

    /// Finds out about the cluster and the region. To be called by the leader: what an earlier one launched is told from what
    /// this one launches by the time of this call.
    ///
    /// # Errors
    /// [`StartError::Cluster`].
    pub async fn start(client: &Client, clients: Clients, options: Options) -> Result<Self, StartError> {
        let facts = cluster::discover(client, &clients, &options).await?;
        tracing::info!(
            region = clients.region,
            cluster = facts.name,
            endpoint = facts.endpoint,
            version = facts.version,
            service_cidr = facts.service_cidr,
            dns = facts.dns_ip,
            "EC2 answers"
        );
        let ec2 = Self::new(clients, options, facts);
        refresh::hydrate(&ec2.region, &ec2.feeds(), refresh::patience).await;
        Ok(ec2)
    }

    fn feeds(&self) -> Feeds {
        let priced = prices::can_be_asked(&self.clients.region, self.options.isolated_vpc);
        Feeds { ec2: self.clients.ec2.clone(), pricing: priced.then(|| self.clients.pricing.clone()) }
    }

    /// EC2 through these clients, for a cluster that is known.
    pub fn new(clients: Clients, options: Options, facts: ClusterFacts) -> Self {
        Self {
            describer: describer(&clients),
            terminator: terminator(&clients),
            region: Arc::new(Region::new(RegionSnapshot::stand_in(&clients.region, embedded(), now_ms()))),
            risk: Arc::new(SpotRisk::new(ScoreSettings::default())),
            queue: options.interruption_queue.as_ref().map(|name| Queue::new(clients.sqs.clone(), name)),
            catalogues: Mutex::default(),
            facts: ArcSwap::from_pointee(facts),
            unavailable: Mutex::default(),
            templates: Templates::default(),
            parameters: Parameters::default(),
            profiles: Profiles::default(),
            verdicts: Verdicts::default(),
            batches: Batches::default(),
            leading_since_ms: now_ms(),
            addresses: Mutex::default(),
            reservations: Mutex::default(),
            shifts: Shifts::default(),
            listed: Mutex::default(),
            groups: Mutex::default(),
            recent: Mutex::default(),
            bought: Mutex::default(),
            facts_of: Mutex::default(),
            going: Mutex::default(),
            options,
            clients,
        }
    }

    /// Keeps templates, and what is known of the region and the cluster, in order until the process ends.
    pub async fn run(self: Arc<Self>, client: Client) {
        let fresh = refresh::keep_fresh(Arc::clone(&self.region), self.feeds());
        let (region, risk) = (Arc::clone(&self.region), Arc::clone(&self.risk));
        let scores = placement_scores::keep_scoring(region, risk, self.clients.ec2.clone());
        let shifts = async {
            if self.options.zonal_shift {
                zonal_shift::watch(&self.clients, &self.options.cluster_name, &self.shifts).await;
            }
        };
        futures::join!(fresh, scores, shifts, self.keep(client));
    }

    async fn keep(&self, client: Client) {
        match self.templates.hydrate(&self.clients, &self.options.cluster_name, now_ms()).await {
            Ok(0) => {}
            Ok(count) => tracing::info!(count, "launch templates of an earlier process, deleted when unused"),
            Err(error) => tracing::warn!(%error, "launch templates of an earlier process could not be listed"),
        }
        let (mut looked, mut judged) = (tokio::time::Instant::now(), tokio::time::Instant::now());
        loop {
            tokio::time::sleep(SWEEP).await;
            for id in self.templates.take_unused(now_ms()) {
                match templates::delete(&self.clients, &id).await {
                    Ok(()) => tracing::info!(id, "unused launch template deleted"),
                    Err(error) => tracing::warn!(id, %error, "unused launch template could not be deleted"),
                }
            }
            self.forget_old(now_ms());
            if looked.elapsed() >= FACTS_PERIOD {
                looked = tokio::time::Instant::now();
                match cluster::discover(&client, &self.clients, &self.options).await {
                    Ok(facts) => self.facts.store(Arc::new(facts)),
                    Err(error) => tracing::warn!(%error, "what is known of the cluster stays as it was"),
                }
            }
            if judged.elapsed() >= DEPRECATION_PERIOD {
                judged = tokio::time::Instant::now();
                match self.parameters.forget_deprecated(&self.clients, now_ms()).await {
                    Ok(names) if names.is_empty() => {}
                    Ok(names) => tracing::info!(
                        ?names,
                        "images of these SSM parameters are deprecated, newer ones are asked for"
                    ),
                    Err(error) => tracing::warn!(%error, "images could not be looked at, deprecated ones stay for now"),
                }
            }
        }
    }

    /// Id of a zone; empty where it is not known.
    pub(super) fn zone_id(&self, zone: &str) -> String {
        self.region.snapshot().zone_ids.get(zone).cloned().unwrap_or_default()
    }

    /// The reserved offerings that plans were made of; `None` where reserved capacity is not used.
    pub(super) fn reserved(&self) -> Option<ReservedOfferings> {
        self.options.reserved_capacity.then(|| lock(&self.catalogues).reserved())
    }

    /// What is known of the region.
    pub(super) fn snapshot(&self) -> Arc<RegionSnapshot> {
        self.region.snapshot()
    }

    /// What went by in the interruption queue so far; `None` without one.
    pub(super) fn heard(&self) -> Option<QueueCounts> {
        self.queue.as_ref().map(Queue::counts)
    }

    /// Notes that an instance could not be terminated.
    fn not_terminated(&self, provider_id: &str) {
        let id = instance_id(provider_id).unwrap_or_default();
        let zone = lock(&self.bought).get(id).map(|bought| bought.zone.clone()).unwrap_or_default();
        self.clients.metrics.termination_failures.with_label_values(&[&zone, &self.zone_id(&zone)]).inc();
    }

    /// Takes in what the region's APIs answered.
    pub(super) fn learn_region(&self, answers: region::Answers) {
        self.region.learn(answers, now_ms());
    }

    /// Attempts of calls so far, by EC2 action.
    pub fn calls(&self) -> BTreeMap<String, u64> {
        self.clients.calls()
    }

    pub(super) fn addresses(&self) -> MutexGuard<'_, Addresses> {
        lock(&self.addresses)
    }

    pub(super) fn reservations(&self) -> MutexGuard<'_, ReservationCounts> {
        lock(&self.reservations)
    }

    pub(super) fn shifts(&self) -> &Shifts {
        &self.shifts
    }

    /// Says no to what is in a zone that is shifted away from: EC2 is not called there.
    fn not_shifted(&self, provider_id: &str) -> Result<(), CloudError> {
        let away = |zone: &&str| self.shifts.is_away_from(zone, now_ms());
        match zone_of(provider_id).filter(away) {
            Some(zone) => {
                Err(CloudError::Other(format!("zone {zone} is shifted away from, instances there are left alone")))
            }
            None => Ok(()),
        }
    }

    /// The group of a class as last resolved; `None` while it wasn't, or where there is none.
    pub(super) fn known_group(&self, class: &Ec2NodeClass) -> Option<PlacementGroup> {
        lock(&self.groups).get(&key(class)).cloned().flatten()
    }

    /// Whether the group of a class was resolved, also to none.
    pub(super) fn looked_for_group(&self, class: &Ec2NodeClass) -> bool {
        lock(&self.groups).contains_key(&key(class))
    }

    /// What an instance was at the last listing.
    pub(super) fn listed(&self, id: &str) -> Option<InstanceFacts> {
        lock(&self.facts_of).get(id).cloned()
    }

    pub(super) fn know_group(&self, class: &Ec2NodeClass, group: Option<PlacementGroup>) {
        lock(&self.groups).insert(key(class), group);
    }

    /// Notes instances that EC2 may not describe yet.
    pub(super) fn remember(&self, instances: &[Instance]) {
        let (mut recent, mut bought) = (lock(&self.recent), lock(&self.bought));
        for instance in instances {
            recent.insert(instance.id.clone(), instance.clone());
            bought.insert(instance.id.clone(), bought_as(instance));
        }
    }

    /// What an event about a spot instance says of its offering.
    fn heed(&self, event: &Received) {
        if event.kind == EventKind::CapacityReservationInterrupted {
            self.reservations().interrupted(&event.instance_id, now_ms());
        }
        let setback = match event.kind.message_kind() {
            MessageKind::SpotInterruption => Setback::Interrupted,
            MessageKind::RebalanceRecommendation => Setback::RebalanceRecommended,
            MessageKind::CapacityReservationInterruption
            | MessageKind::ScheduledChange
            | MessageKind::Stopped
            | MessageKind::StateChange => return,
        };
        let offering = lock(&self.bought).get(&event.instance_id).cloned();
        let Some(offering) = offering.filter(|offering| offering.capacity_type == CapacityType::Spot) else { return };
        self.risk.note(&offering.instance_type, &offering.zone, setback, now_ms());
        if setback == Setback::Interrupted {
            launch::mark(self, &offering);
        }
    }

    fn forget_old(&self, now_ms: i64) {
        lock(&self.recent).retain(|_, instance| now_ms - instance.launched_at_ms < CONSISTENCY_MS);
        lock(&self.going).retain(|_, looked| now_ms - *looked < 600_000);
    }

    /// What was launched so lately that its absence in EC2's answers means nothing.
    fn recent(&self, id: &str, now_ms: i64) -> Option<Instance> {
        lock(&self.recent).get(id).filter(|instance| now_ms - instance.launched_at_ms < CONSISTENCY_MS).cloned()
    }

    async fn describe_id(&self, id: &str) -> Result<Option<Instance>, CloudError> {
        let found =
            self.describer.ask(id.to_owned()).await.unwrap_or_else(|| Err(unanswered("ec2:DescribeInstances")))?;
        Ok(found.filter(|instance| instance.state != InstanceState::Terminated))
    }

    async fn terminate_id(&self, id: &str) -> Result<bool, CloudError> {
        let now = now_ms();
        if lock(&self.going).get(id).is_some_and(|looked| now - *looked < GOING_MS) {
            return Ok(true);
        }
        let found = self.describe_id(id).await?;
        let recent = self.recent(id, now);
        match (&found, &recent) {
            (None, None) => {
                lock(&self.going).remove(id);
                self.reservations().gone(id);
                return Ok(false);
            }
            (Some(instance), _) if instance.state == InstanceState::ShuttingDown => {}
            _ => {
                let going = self.terminator.ask(id.to_owned()).await;
                if !going.unwrap_or_else(|| Err(unanswered("ec2:TerminateInstances")))? {
                    return match recent {
                        // To let go of it now would leak it.
                        Some(_) => {
                            Err(CloudError::Other(format!("EC2 does not know {id} yet, which it just launched")))
                        }
                        None => Ok(false),
                    };
                }
                lock(&self.recent).remove(id);
            }
        }
        lock(&self.going).insert(id.to_owned(), now);
        Ok(true)
    }
}

/// Whether EC2 answers and the credentials are good for anything.
async fn probe(clients: &Clients) -> Result<(), StartError> {
    let call = clients.ec2.describe_instance_types().dry_run(true);
    match call.send().await.map_err(ApiError::of("ec2:DescribeInstanceTypes")) {
        Err(source) if source.class != Class::DryRunOk => {
            Err(StartError::Probe { region: clients.region.clone(), source })
        }
        // Some endpoints know no dry run and answer.
        _ => Ok(()),
    }
}

fn unanswered(action: &'static str) -> ApiError {
    ApiError::unasked(action)
}

fn key(class: &Ec2NodeClass) -> String {
    class.uid().unwrap_or_else(|| class.name_any())
}

/// A lock whatever became of earlier holders: none leaves anything half done.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn bought_as(instance: &Instance) -> Override {
    Override {
        instance_type: instance.instance_type.clone(),
        zone: instance.zone.clone(),
        capacity_type: instance.capacity_type,
    }
}

fn known(provider_id: &str) -> Result<&str, CloudError> {
    instance_id(provider_id).ok_or_else(|| CloudError::Other(format!("{provider_id} names no EC2 instance")))
}

impl Cloud for Ec2 {
    fn catalogue(&self, class: &Ec2NodeClass) -> Arc<Catalogue> {
        let group = self.known_group(class);
        let mut marks = lock(&self.unavailable);
        let (region, risk, reservations) = (&self.region, &self.risk, &self.reservations());
        let (marks, shifted) = (&mut *marks, &self.shifts.zone_ids(now_ms()));
        let mut sources = Sources { region, risk, marks, reservations, shifted, options: &self.options };
        lock(&self.catalogues).of(&mut sources, class, group, now_ms())
    }

    fn mark_unavailable(&self, offering: &Override) {
        launch::mark(self, offering);
    }

    fn launch(&self, request: LaunchRequest) -> BoxFuture<'_, Result<Launched, LaunchError>> {
        let metrics = &self.clients.metrics;
        metrics.timed("Create", metrics::launch_error, async move { self.launch_claim(&request).await }).boxed()
    }

    fn describe<'a>(&'a self, provider_id: &'a str) -> BoxFuture<'a, Result<Option<Instance>, CloudError>> {
        let call = async move {
            let id = known(provider_id)?;
            if let Err(error) = self.not_shifted(provider_id) {
                let cached = lock(&self.listed).iter().find(|instance| instance.id == id).cloned();
                return cached.map(Some).ok_or(error);
            }
            Ok(self.describe_id(id).await?.or_else(|| self.recent(id, now_ms())))
        };
        self.clients.metrics.timed("Get", metrics::cloud_error, call).boxed()
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
        self.clients.metrics.timed("Delete", metrics::cloud_error, call).boxed()
    }

    fn list(&self) -> BoxFuture<'_, Result<Vec<Instance>, CloudError>> {
        let call = async move {
            let found = instances::of_cluster(&self.clients, &self.options.cluster_name).await?;
            let (mut found, facts): (Vec<Instance>, Vec<InstanceFacts>) = found.into_iter().unzip();
            *lock(&self.facts_of) = found.iter().map(|instance| instance.id.clone()).zip(facts).collect();
            let now = now_ms();
            let recent: Vec<Instance> = lock(&self.recent).values().cloned().collect();
            let unseen = recent.into_iter().filter(|instance| now - instance.launched_at_ms < CONSISTENCY_MS);
            let unseen: Vec<Instance> =
                unseen.filter(|instance| found.iter().all(|other| other.id != instance.id)).collect();
            found.extend(unseen);
            let mut listed = lock(&self.listed);
            let away = listed.iter().filter(|instance| self.shifts.is_away_from(&instance.zone, now));
            let hidden: Vec<Instance> =
                away.filter(|instance| found.iter().all(|other| other.id != instance.id)).cloned().collect();
            found.extend(hidden);
            listed.clone_from(&found);
            drop(listed);
            let reserved =
                found.iter().filter_map(|one| Some((one.id.as_str(), one.reservation.as_ref()?.id.as_str())));
            self.reservations().running(reserved);
            *lock(&self.bought) = found.iter().map(|one| (one.id.clone(), bought_as(one))).collect();
            Ok(found)
        };
        self.clients.metrics.timed("List", metrics::cloud_error, call).boxed()
    }

    fn receive_messages(&self) -> BoxFuture<'_, Result<Vec<Message>, CloudError>> {
        async move {
            let Some(queue) = &self.queue else {
                tokio::time::sleep(NO_QUEUE).await;
                return Ok(vec![]);
            };
            let received = queue.receive(now_ms).await?;
            for event in &received {
                self.heed(event);
            }
            metrics::received(&self.clients.metrics, &received, now_ms());
            Ok(received.into_iter().map(Message::from).collect())
        }
        .boxed()
    }

    fn messages_received(&self) -> Option<BTreeMap<&'static str, u64>> {
        Some(self.queue.as_ref().map(|queue| queue.counts().received).unwrap_or_default())
    }

    fn delete_message<'a>(&'a self, receipt: &'a str) -> BoxFuture<'a, Result<(), CloudError>> {
        async move {
            match &self.queue {
                Some(queue) => Ok(queue.delete(receipt).await?),
                None => Ok(()),
            }
        }
        .boxed()
    }

    fn unhealthy(&self) -> BoxFuture<'_, Result<Vec<Unhealthy>, CloudError>> {
        async move {
            let statuses = status_checks::describe_statuses(&self.clients.ec2).await?;
            Ok(status_checks::unhealthy(&statuses, now_ms()))
        }
        .boxed()
    }

    fn drift<'a>(
        &'a self,
        claim: &'a NodeClaim,
        class: &'a Ec2NodeClass,
    ) -> BoxFuture<'a, Result<Option<Drift>, CloudError>> {
        async move { self.drift_of(claim, class).await }.boxed()
    }

    fn resolve<'a>(&'a self, class: &'a Ec2NodeClass) -> BoxFuture<'a, Resolution> {
        async move { self.resolve_class(class).await }.boxed()
    }

    fn instance_ca(&self) -> Option<String> {
        Some(self.facts.load().ca_bundle.clone())
    }

    fn tag<'a>(&'a self, provider_id: &'a str, node: &'a str, claim: &'a str) -> BoxFuture<'a, Result<(), CloudError>> {
        async move {
            let id = known(provider_id)?;
            self.not_shifted(provider_id)?;
            let known = tagging::tag(&self.clients, id, node, claim, &self.options.cluster_name).await?;
            if !known && self.recent(id, now_ms()).is_some() {
                return Err(CloudError::Other(format!("EC2 does not know {id} yet, which it just launched")));
            }
            Ok(())
        }
        .boxed()
    }

    fn delete_unused_profiles<'a>(&'a self, used: &'a BTreeSet<String>) -> BoxFuture<'a, Result<(), CloudError>> {
        async move {
            if !self.options.isolated_vpc {
                let cluster = &self.options.cluster_name;
                self.profiles.delete_unused(&self.clients, cluster, used, now_ms()).await?;
            }
            Ok(())
        }
        .boxed()
    }

    fn shifted_zones(&self) -> BTreeSet<String> {
        self.shifts.zones(now_ms())
    }

    fn release_class<'a>(&'a self, class: &'a Ec2NodeClass) -> BoxFuture<'a, Result<(), CloudError>> {
        async move {
            let cluster = &self.options.cluster_name;
            if !self.options.isolated_vpc {
                self.profiles.delete_of_class(&self.clients, cluster, class).await?;
            }
            templates::delete_of_class(&self.clients, cluster, &class.name_any()).await?;
            lock(&self.groups).remove(&key(class));
            // There is none where the class was never tried.
            let _ = self.clients.metrics.user_data_bytes.remove_label_values(&[class.name_any()]);
            Ok(())
        }
        .boxed()
    }
}

#[cfg(test)]
#[path = "shell_tests.rs"]
mod tests;
