//! The instances of the cluster: calls to describe, list and terminate them, with corrections for EC2's eventual consistency. At most
//! one lock is held at a time, and none across an `await`.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use stowage_model::time::UnixMillis;
use stowage_runtime::clock;
use stowage_runtime::sync::lock;

use crate::ec2::aws::client::AwsClients;
use crate::ec2::aws::errors::ApiError;
use crate::ec2::instances::describe;
use crate::ec2::instances::describe::{
    Describer, Finder, InstanceFacts, Terminator, describer, finder, instance_id, terminator,
};
use crate::ec2::offerings::offering_store::OfferingStore;
use crate::ec2::offerings::shifted_zones::zone_of;
use crate::{CloudError, Instance, InstanceState, Override};

/// How long EC2 may omit an instance from its responses after the launch.
const CONSISTENCY: Duration = Duration::from_mins(1);
/// Minimum time between two polls of an instance that is shutting down.
const TERMINATION_POLL: Duration = Duration::from_secs(2);
/// How long the last poll of a terminating instance is remembered.
const TERMINATION_MEMORY: Duration = Duration::from_mins(10);

#[derive(Debug)]
pub struct InstanceStore {
    clients: AwsClients,
    cluster_name: String,
    offerings: Arc<OfferingStore>,
    describer: Describer,
    terminator: Terminator,
    finder: Finder,
    state: Mutex<State>,
}

/// All maps are by instance id.
#[derive(Debug, Default)]
struct State {
    /// The last listing; used for zones with an active zonal shift.
    listed: Vec<Instance>,
    /// The inputs of drift detection of each listed instance.
    facts: HashMap<String, InstanceFacts>,
    /// The offering of each instance: queue messages name only the instance.
    offerings: HashMap<String, Override>,
    /// Launched within [`CONSISTENCY`], so that EC2 may not describe it yet.
    recent: HashMap<String, Instance>,
    /// When a terminating instance was last polled.
    terminating: HashMap<String, UnixMillis>,
}

impl InstanceStore {
    pub fn new(clients: &AwsClients, cluster_name: &str, offerings: Arc<OfferingStore>) -> Self {
        Self {
            describer: describer(clients),
            terminator: terminator(clients),
            finder: finder(clients, cluster_name),
            clients: clients.clone(),
            cluster_name: cluster_name.to_owned(),
            offerings,
            state: Mutex::default(),
        }
    }

    /// Records instances that EC2 may not describe yet.
    pub fn remember(&self, instances: &[Instance]) {
        let mut state = lock(&self.state);
        for instance in instances {
            state.recent.insert(instance.id.clone(), instance.clone());
            state.offerings.insert(instance.id.clone(), offering_of(instance));
        }
    }

    /// Deletes expired records.
    pub fn prune(&self, now: UnixMillis) {
        let mut state = lock(&self.state);
        state.recent.retain(|_, instance| is_recent(instance, now));
        state.terminating.retain(|_, polled| !polled.is_older_than(TERMINATION_MEMORY, now));
    }

    /// An instance that was launched so recently that its absence from a response of EC2 is not conclusive.
    pub fn recent(&self, id: &str, now: UnixMillis) -> Option<Instance> {
        lock(&self.state).recent.get(id).filter(|instance| is_recent(instance, now)).cloned()
    }

    /// The offering that an instance was launched as; `None` for an unknown instance.
    pub fn offering(&self, id: &str) -> Option<Override> {
        lock(&self.state).offerings.get(id).cloned()
    }

    /// The facts of an instance at the last listing.
    pub fn facts(&self, id: &str) -> Option<InstanceFacts> {
        lock(&self.state).facts.get(id).cloned()
    }

    /// The id of an instance that EC2 may be called about.
    ///
    /// # Errors
    /// The provider id names no EC2 instance, or the zone of the instance has an active zonal shift.
    pub fn reachable<'a>(&self, provider_id: &'a str) -> Result<&'a str, CloudError> {
        self.not_shifted(provider_id)?;
        parse(provider_id)
    }

    /// EC2 is not called about instances in zones with an active zonal shift.
    fn not_shifted(&self, provider_id: &str) -> Result<(), CloudError> {
        let now = clock::now();
        match zone_of(provider_id).filter(|zone| self.offerings.shifts().is_shifted(zone, now)) {
            Some(zone) => {
                Err(CloudError::Other(format!("zone {zone} has an active zonal shift, its instances are not changed")))
            }
            None => Ok(()),
        }
    }

    /// Describes an instance; `None` when it no longer exists. An instance in a zone with an active zonal shift is read from
    /// the last listing.
    ///
    /// # Errors
    /// EC2 failed, or the instance is in a shifted zone and not listed.
    pub async fn describe(&self, provider_id: &str) -> Result<Option<Instance>, CloudError> {
        let id = parse(provider_id)?;
        if let Err(error) = self.not_shifted(provider_id) {
            let listed = lock(&self.state).listed.iter().find(|instance| instance.id == id).cloned();
            return listed.map(Some).ok_or(error);
        }
        Ok(self.describe_id(id).await?.or_else(|| self.recent(id, clock::now())))
    }

    async fn describe_id(&self, id: &str) -> Result<Option<Instance>, CloudError> {
        let found = self
            .describer
            .ask(id.to_owned())
            .await
            .unwrap_or_else(|| Err(ApiError::not_called("ec2:DescribeInstances")))?;
        if found.as_ref().is_some_and(|instance| instance.state == InstanceState::Terminated) {
            lock(&self.state).recent.remove(id);
            return Ok(None);
        }
        Ok(found)
    }

    /// Terminates an instance; `Ok(false)` when it no longer exists.
    ///
    /// # Errors
    /// EC2 failed, or the zone of the instance has an active zonal shift.
    pub async fn terminate(&self, provider_id: &str) -> Result<bool, CloudError> {
        let id = parse(provider_id)?;
        self.not_shifted(provider_id)?;
        let result = self.terminate_id(id).await;
        if result.is_err() {
            self.count_failed_termination(id);
        }
        result
    }

    async fn terminate_id(&self, id: &str) -> Result<bool, CloudError> {
        let now = clock::now();
        let polled = lock(&self.state).terminating.get(id).copied();
        if polled.is_some_and(|polled| !polled.is_older_than(TERMINATION_POLL, now)) {
            return Ok(true);
        }
        let found = self.describe_id(id).await?;
        let recent = self.recent(id, now);
        match (&found, &recent) {
            (None, None) => {
                lock(&self.state).terminating.remove(id);
                self.offerings.with_reservations(|reservations| reservations.record_terminated(id));
                return Ok(false);
            }
            (Some(instance), _) if instance.state == InstanceState::ShuttingDown => {}
            _ => {
                let terminated = self.terminator.ask(id.to_owned()).await;
                if !terminated.unwrap_or_else(|| Err(ApiError::not_called("ec2:TerminateInstances")))? {
                    return match recent {
                        // Reporting it as absent would leak it.
                        Some(_) => {
                            Err(CloudError::Other(format!("EC2 does not know {id} yet, which it just launched")))
                        }
                        None => Ok(false),
                    };
                }
                lock(&self.state).recent.remove(id);
            }
        }
        lock(&self.state).terminating.insert(id.to_owned(), now);
        Ok(true)
    }

    fn count_failed_termination(&self, id: &str) {
        let zone = self.offering(id).map(|offering| offering.zone).unwrap_or_default();
        let zone_id = self.offerings.zone_id(&zone);
        self.clients.metrics.termination_failures.with_label_values(&[&zone, &zone_id]).inc();
    }

    /// Lists the instances of the cluster that are not terminated.
    ///
    /// # Errors
    /// DescribeInstances failed.
    pub async fn list(&self) -> Result<Vec<Instance>, CloudError> {
        let described = describe::of_cluster(&self.clients, &self.cluster_name).await?;
        let (found, facts): (Vec<Instance>, Vec<InstanceFacts>) = described.into_iter().unzip();
        let facts = found.iter().map(|instance| instance.id.clone()).zip(facts).collect();
        let found = self.with_hidden(found, |_| true);
        {
            let mut state = lock(&self.state);
            state.facts = facts;
            state.listed.clone_from(&found);
            state.offerings = found.iter().map(|instance| (instance.id.clone(), offering_of(instance))).collect();
        }
        let reserved = found
            .iter()
            .filter_map(|instance| Some((instance.id.as_str(), instance.reservation.as_ref()?.id.as_str())));
        self.offerings.with_reservations(|reservations| reservations.reconcile_running(reserved));
        Ok(found)
    }

    /// Lists the instances of a launch group that are not terminated.
    ///
    /// # Errors
    /// DescribeInstances failed.
    pub async fn of_launch_group(&self, launch_group: String) -> Result<Vec<Instance>, CloudError> {
        let found = self.finder.ask(launch_group.clone()).await;
        let found = found.unwrap_or_else(|| Err(ApiError::not_called("ec2:DescribeInstances")))?;
        Ok(self.with_hidden(found, |instance| instance.client_token == launch_group))
    }

    /// Adds the instances that match `filter` and that EC2 does not describe: recent launches, and instances in zones with an active zonal shift.
    fn with_hidden(&self, mut found: Vec<Instance>, filter: impl Fn(&Instance) -> bool) -> Vec<Instance> {
        let now = clock::now();
        let (recent, listed): (Vec<Instance>, Vec<Instance>) = {
            let state = lock(&self.state);
            (state.recent.values().filter(|instance| is_recent(instance, now)).cloned().collect(), state.listed.clone())
        };
        let shifts = self.offerings.shifts();
        let shifted = listed.into_iter().filter(|instance| shifts.is_shifted(&instance.zone, now));
        for instance in recent.into_iter().chain(shifted).filter(filter) {
            if found.iter().all(|other| other.id != instance.id) {
                found.push(instance);
            }
        }
        found
    }
}

fn is_recent(instance: &Instance, now: UnixMillis) -> bool {
    !instance.launched_at.is_older_than(CONSISTENCY, now)
}

fn offering_of(instance: &Instance) -> Override {
    Override {
        instance_type: instance.instance_type.clone(),
        zone: instance.zone.clone(),
        capacity_type: instance.capacity_type,
    }
}

fn parse(provider_id: &str) -> Result<&str, CloudError> {
    instance_id(provider_id).ok_or_else(|| CloudError::Other(format!("{provider_id} names no EC2 instance")))
}
