//! The shell: locks, clock and background work. The trait that the controllers see is in `shell_cloud`.

pub mod cloud;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use arc_swap::ArcSwap;
use kube::{Client, ResourceExt};

use crate::api::Ec2NodeClass;
use crate::cloud::catalog::embedded;
use crate::cloud::ec2::aws::client::{Clients, ConnectError};
use crate::cloud::ec2::aws::errors::{ApiError, Class};
use crate::cloud::ec2::degraded_apis;
use crate::cloud::ec2::degraded_apis::DegradedApis;
use crate::cloud::ec2::instances::describe::{Describer, Finder, InstanceFacts, Terminator};
use crate::cloud::ec2::instances::describe::{describer, finder, instance_id, terminator};
use crate::cloud::ec2::interruption::messages::EventKind;
use crate::cloud::ec2::interruption::queue::{Queue, QueueCounts, Received};
use crate::cloud::ec2::launch;
use crate::cloud::ec2::launch::dry_run::Verdicts;
use crate::cloud::ec2::launch::group_batch::Batches;
use crate::cloud::ec2::launch::templates::recent::LaunchShapes;
use crate::cloud::ec2::launch::templates::store::Templates;
use crate::cloud::ec2::node_class::cluster_facts;
use crate::cloud::ec2::node_class::cluster_facts::{ClusterError, ClusterFacts};
use crate::cloud::ec2::node_class::images::SsmParameterCache;
use crate::cloud::ec2::node_class::instance_profiles::InstanceProfiles;
use crate::cloud::ec2::node_class::subnets::FreeAddresses;
use crate::cloud::ec2::offerings::catalog_cache::{CatalogCache, ReservedOfferings};
use crate::cloud::ec2::offerings::discovered_memory::DiscoveredMemory;
use crate::cloud::ec2::offerings::interruption_history::InterruptionKind;
use crate::cloud::ec2::offerings::placement_score_table::ScoreSettings;
use crate::cloud::ec2::offerings::placement_scores;
use crate::cloud::ec2::offerings::prices;
use crate::cloud::ec2::offerings::refresh;
use crate::cloud::ec2::offerings::refresh::RegionApis;
use crate::cloud::ec2::offerings::region::Region;
use crate::cloud::ec2::offerings::region_snapshot::{RegionResponses, RegionSnapshot};
use crate::cloud::ec2::offerings::reservation_counts::ReservationCounts;
use crate::cloud::ec2::offerings::spot_risk::SpotRisk;
use crate::cloud::ec2::offerings::unavailable::UnavailableOfferings;
use crate::cloud::ec2::offerings::zonal_shift;
use crate::cloud::ec2::offerings::zonal_shift::{ZonalShifts, zone_of};
use crate::cloud::ec2::options::Options;
use crate::cloud::ec2::placement_group::PlacementGroup;
use crate::cloud::{CloudError, Instance, InstanceState, MessageKind, Override};
use crate::model::offering::CapacityType;
use crate::model::time::UnixMillis;
use crate::sync::lock;

/// How long EC2 may take to describe what it launched, milliseconds.
const CONSISTENCY_MS: i64 = 60_000;
/// An instance that is going down is looked at no more often, milliseconds.
const GOING_MS: i64 = 2_000;
/// How often templates are looked after.
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
pub struct Ec2Provider {
    pub(crate) options: Options,
    pub(crate) clients: Clients,
    pub(crate) facts: ArcSwap<ClusterFacts>,
    pub(crate) unavailable: Mutex<UnavailableOfferings>,
    pub(crate) templates: Templates,
    pub(crate) shapes: LaunchShapes,
    /// How often in a row a template could not be made ahead.
    pub(crate) failures_ahead: AtomicUsize,
    pub(crate) parameters: SsmParameterCache,
    pub(crate) profiles: InstanceProfiles,
    pub(crate) verdicts: Verdicts,
    pub(crate) batches: Batches<launch::PreparedFleet>,
    /// Since when this process leads, milliseconds since the epoch.
    pub(crate) leading_since_ms: i64,
    region: Arc<Region>,
    risk: Arc<SpotRisk>,
    queue: Option<Queue>,
    addresses: Mutex<FreeAddresses>,
    reservations: Mutex<ReservationCounts>,
    shifts: ZonalShifts,
    pub(crate) degraded: DegradedApis,
    /// Ids of instances that are due for tags and could not be tagged.
    pub(crate) untaggable: Mutex<BTreeSet<String>>,
    /// What was last listed, for zones that EC2 is not to be asked about.
    listed: Mutex<Vec<Instance>>,
    catalogs: Mutex<CatalogCache>,
    memory: Mutex<DiscoveredMemory>,
    groups: Mutex<HashMap<String, Option<PlacementGroup>>>,
    describer: Describer,
    terminator: Terminator,
    finder: Finder,
    /// What was launched so lately that EC2 may not describe it yet, by id.
    recent: Mutex<HashMap<String, Instance>>,
    /// What the cluster's instances were bought as, by id: messages name only the instance.
    bought: Mutex<HashMap<String, Override>>,
    /// What the cluster's instances were at the last listing, by id.
    facts_of: Mutex<HashMap<String, InstanceFacts>>,
    /// When an instance that is going down was last looked at, by id, milliseconds since the epoch.
    going: Mutex<HashMap<String, i64>>,
}

impl Ec2Provider {
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
        let facts = cluster_facts::discover(Some(client), &clients, &options, None).await?;
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
        refresh::hydrate(&ec2.region, &ec2.apis(), refresh::start_timeout).await;
        Ok(ec2)
    }

    fn apis(&self) -> RegionApis {
        let priced = prices::has_pricing_api(&self.clients.region, self.options.isolated_vpc);
        RegionApis { ec2: self.clients.ec2.clone(), pricing: priced.then(|| self.clients.pricing.clone()) }
    }

    /// EC2 through these clients, for a cluster that is known.
    pub fn new(clients: Clients, options: Options, facts: ClusterFacts) -> Self {
        let scores = ScoreSettings { threshold: options.spot_score_threshold, ..ScoreSettings::default() };
        Self {
            describer: describer(&clients),
            terminator: terminator(&clients),
            finder: finder(&clients, &options.cluster_name),
            region: Arc::new(Region::new(RegionSnapshot::embedded(&clients.region, embedded()))),
            risk: Arc::new(SpotRisk::new(scores)),
            degraded: DegradedApis::default(),
            untaggable: Mutex::default(),
            queue: options.interruption_queue.as_ref().map(|name| Queue::new(clients.sqs.clone(), name)),
            catalogs: Mutex::default(),
            memory: Mutex::default(),
            facts: ArcSwap::from_pointee(facts),
            unavailable: Mutex::default(),
            templates: Templates::default(),
            shapes: LaunchShapes::default(),
            failures_ahead: AtomicUsize::default(),
            parameters: SsmParameterCache::default(),
            profiles: InstanceProfiles::default(),
            verdicts: Verdicts::default(),
            batches: Batches::default(),
            leading_since_ms: crate::clock::now().0,
            addresses: Mutex::default(),
            reservations: Mutex::default(),
            shifts: ZonalShifts::default(),
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
        let fresh = refresh::run(Arc::clone(&self.region), self.apis());
        let (region, risk) = (Arc::clone(&self.region), Arc::clone(&self.risk));
        let scores = placement_scores::keep_scoring(region, risk, self.clients.ec2.clone(), &self.degraded);
        let shifts = async {
            if self.options.zonal_shift {
                zonal_shift::watch(&self.clients, &self.options.cluster_name, &self.shifts, &self.degraded).await;
            }
        };
        futures::join!(fresh, scores, shifts, self.keep(client));
    }

    async fn keep(&self, client: Client) {
        match self.templates.hydrate(&self.clients, &self.options.cluster_name, crate::clock::now().0).await {
            Ok(0) => {}
            Ok(count) => tracing::info!(count, "launch templates of an earlier process, deleted when unused"),
            Err(error) => tracing::warn!(%error, "launch templates of an earlier process could not be listed"),
        }
        let (mut looked, mut judged) = (tokio::time::Instant::now(), tokio::time::Instant::now());
        loop {
            tokio::time::sleep(SWEEP).await;
            self.sweep_templates(crate::clock::now().0).await;
            self.forget_old(crate::clock::now().0);
            if looked.elapsed() >= FACTS_PERIOD {
                looked = tokio::time::Instant::now();
                let known = self.facts.load_full();
                match cluster_facts::discover(Some(&client), &self.clients, &self.options, Some(&known)).await {
                    Ok(facts) => {
                        self.facts.store(Arc::new(facts));
                        self.degraded.record_recovery(degraded_apis::CLUSTER);
                    }
                    Err(error) => {
                        tracing::warn!(%error, "what is known of the cluster stays as it was");
                        let note = format!("what is known of the cluster stays as it was: {error}");
                        self.degraded.record_failure(degraded_apis::CLUSTER, note);
                    }
                }
            }
            if judged.elapsed() >= DEPRECATION_PERIOD {
                judged = tokio::time::Instant::now();
                match self.parameters.forget_deprecated(&self.clients, crate::clock::now()).await {
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
    pub(crate) fn zone_id(&self, zone: &str) -> String {
        self.region.snapshot().zone_ids.get(zone).cloned().unwrap_or_default()
    }

    /// The reserved offerings that plans were made of; `None` where reserved capacity is not used.
    pub(crate) fn reserved(&self) -> Option<ReservedOfferings> {
        self.options.reserved_capacity.then(|| lock(&self.catalogs).reserved_offerings())
    }

    /// What is known of the region.
    pub(crate) fn snapshot(&self) -> Arc<RegionSnapshot> {
        self.region.snapshot()
    }

    /// What went by in the interruption queue so far; `None` without one.
    pub(crate) fn heard(&self) -> Option<QueueCounts> {
        self.queue.as_ref().map(Queue::counts)
    }

    /// Notes that an instance could not be terminated.
    fn not_terminated(&self, provider_id: &str) {
        let id = instance_id(provider_id).unwrap_or_default();
        let zone = lock(&self.bought).get(id).map(|bought| bought.zone.clone()).unwrap_or_default();
        self.clients.metrics.termination_failures.with_label_values(&[&zone, &self.zone_id(&zone)]).inc();
    }

    /// Takes in what the region's APIs answered.
    pub(crate) fn learn_region(&self, responses: RegionResponses) {
        self.region.apply(responses);
    }

    /// Attempts of calls so far, by EC2 action.
    pub fn calls(&self) -> BTreeMap<String, u64> {
        self.clients.calls()
    }

    pub(crate) fn addresses(&self) -> MutexGuard<'_, FreeAddresses> {
        lock(&self.addresses)
    }

    pub(crate) fn reservations(&self) -> MutexGuard<'_, ReservationCounts> {
        lock(&self.reservations)
    }

    pub(crate) fn shifts(&self) -> &ZonalShifts {
        &self.shifts
    }

    /// The id of an instance that EC2 may be called about.
    pub(crate) fn reachable<'a>(&self, provider_id: &'a str) -> Result<&'a str, CloudError> {
        self.not_shifted(provider_id)?;
        known(provider_id)
    }

    /// Whether an instance was launched so lately that its absence in EC2's answers means nothing.
    pub(crate) fn just_launched(&self, id: &str) -> bool {
        self.recent(id, crate::clock::now().0).is_some()
    }

    /// Says no to what is in a zone that is shifted away from: EC2 is not called there.
    fn not_shifted(&self, provider_id: &str) -> Result<(), CloudError> {
        let away = |zone: &&str| self.shifts.is_shifted(zone, crate::clock::now());
        match zone_of(provider_id).filter(away) {
            Some(zone) => {
                Err(CloudError::Other(format!("zone {zone} is shifted away from, instances there are left alone")))
            }
            None => Ok(()),
        }
    }

    /// The group of a class as last resolved; `None` while it wasn't, or where there is none.
    pub(crate) fn known_group(&self, class: &Ec2NodeClass) -> Option<PlacementGroup> {
        lock(&self.groups).get(&key(class)).cloned().flatten()
    }

    /// Whether the group of a class was resolved, also to none.
    pub(crate) fn looked_for_group(&self, class: &Ec2NodeClass) -> bool {
        lock(&self.groups).contains_key(&key(class))
    }

    /// What an instance was at the last listing.
    pub(crate) fn listed(&self, id: &str) -> Option<InstanceFacts> {
        lock(&self.facts_of).get(id).cloned()
    }

    pub(crate) fn know_group(&self, class: &Ec2NodeClass, group: Option<PlacementGroup>) {
        lock(&self.groups).insert(key(class), group);
    }

    /// Notes instances that EC2 may not describe yet.
    pub(crate) fn remember(&self, instances: &[Instance]) {
        let (mut recent, mut bought) = (lock(&self.recent), lock(&self.bought));
        for instance in instances {
            recent.insert(instance.id.clone(), instance.clone());
            bought.insert(instance.id.clone(), bought_as(instance));
        }
    }

    /// What an event about a spot instance says of its offering.
    fn heed(&self, event: &Received) {
        if event.kind == EventKind::CapacityReservationInterrupted {
            self.reservations().record_interrupted(&event.instance_id, crate::clock::now());
        }
        let setback = match event.kind.message_kind() {
            MessageKind::SpotInterruption => InterruptionKind::Interruption,
            MessageKind::RebalanceRecommendation => InterruptionKind::RebalanceRecommendation,
            MessageKind::CapacityReservationInterruption
            | MessageKind::ScheduledChange
            | MessageKind::Stopped
            | MessageKind::StateChange => return,
        };
        let offering = lock(&self.bought).get(&event.instance_id).cloned();
        let Some(offering) = offering.filter(|offering| offering.capacity_type == CapacityType::Spot) else { return };
        self.risk.record(&offering.instance_type, &offering.zone, setback, crate::clock::now());
        if setback == InterruptionKind::Interruption {
            launch::mark(self, &offering);
        }
    }

    fn forget_old(&self, now_ms: i64) {
        lock(&self.recent).retain(|_, instance| now_ms - instance.launched_at.0 < CONSISTENCY_MS);
        lock(&self.going).retain(|_, looked| now_ms - *looked < 600_000);
    }

    /// What was launched so lately that its absence in EC2's answers means nothing.
    fn recent(&self, id: &str, now_ms: i64) -> Option<Instance> {
        lock(&self.recent).get(id).filter(|instance| now_ms - instance.launched_at.0 < CONSISTENCY_MS).cloned()
    }

    /// What EC2 describes, and what it does not: instances that were just launched, or run in zones that EC2 is not to be asked
    /// about; of these, those that are `wanted`.
    fn with_unseen(&self, mut found: Vec<Instance>, wanted: impl Fn(&Instance) -> bool) -> Vec<Instance> {
        let now = crate::clock::now().0;
        let recent: Vec<Instance> = lock(&self.recent).values().cloned().collect();
        let recent = recent.into_iter().filter(|instance| now - instance.launched_at.0 < CONSISTENCY_MS);
        let listed: Vec<Instance> = lock(&self.listed).clone();
        let hidden = listed.into_iter().filter(|instance| self.shifts.is_shifted(&instance.zone, UnixMillis(now)));
        for instance in recent.chain(hidden).filter(wanted) {
            if found.iter().all(|other| other.id != instance.id) {
                found.push(instance);
            }
        }
        found
    }

    async fn describe_id(&self, id: &str) -> Result<Option<Instance>, CloudError> {
        let found =
            self.describer.ask(id.to_owned()).await.unwrap_or_else(|| Err(unanswered("ec2:DescribeInstances")))?;
        Ok(found.filter(|instance| instance.state != InstanceState::Terminated))
    }

    async fn terminate_id(&self, id: &str) -> Result<bool, CloudError> {
        let now = crate::clock::now().0;
        if lock(&self.going).get(id).is_some_and(|looked| now - *looked < GOING_MS) {
            return Ok(true);
        }
        let found = self.describe_id(id).await?;
        let recent = self.recent(id, now);
        match (&found, &recent) {
            (None, None) => {
                lock(&self.going).remove(id);
                self.reservations().record_terminated(id);
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

#[cfg(test)]
mod tests;
