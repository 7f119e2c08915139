//! Describes, lists and terminates instances.

use std::collections::{BTreeSet, HashMap};

use aws_sdk_ec2::types::{Filter, InstanceLifecycleType, InstanceStateName, Placement};
use futures::future::join_all;
use stowage_model::labels;
use stowage_model::offering::CapacityType;
use stowage_model::reservation::{ReservationKind, ReservedIn};
use stowage_model::time::UnixMillis;

use crate::ec2::aws::batcher::{BY_GROUP, BY_ID, BatchMetrics, Coalescer};
use crate::ec2::aws::client::AwsClients;
use crate::ec2::aws::errors::{ApiError, Class};
use crate::ec2::aws::filters::filter;
use crate::ec2::tags::CLUSTER_TAG;
use crate::ec2::tags::{CLAIM_TAG, LAUNCH_TAG};
use crate::{Instance, InstanceState};

/// States of instances that exist: all except `terminated`.
const EXISTING: [&str; 5] = ["pending", "running", "stopping", "stopped", "shutting-down"];

/// The provider id of an instance, as Nodes have it.
pub fn provider_id(zone: &str, id: &str) -> String {
    format!("aws:///{zone}/{id}")
}

/// The instance id in a provider id; `None` for another cloud.
pub fn instance_id(provider_id: &str) -> Option<&str> {
    let (scheme, rest) = provider_id.split_once("://")?;
    let id = rest.rsplit('/').next()?;
    (scheme == "aws" && id.starts_with("i-")).then_some(id)
}

/// Converts EC2's description; `None` without an id.
pub fn read(instance: &aws_sdk_ec2::types::Instance) -> Option<Instance> {
    let id = instance.instance_id()?.to_owned();
    let zone = instance.placement().and_then(|placement| placement.availability_zone()).unwrap_or_default().to_owned();
    let tag = |key: &str| {
        let found = instance.tags().iter().find(|tag| tag.key() == Some(key));
        found.and_then(|tag| tag.value()).unwrap_or_default().to_owned()
    };
    let state = match instance.state().and_then(|state| state.name()) {
        Some(InstanceStateName::Pending) => InstanceState::Pending,
        Some(InstanceStateName::Stopping | InstanceStateName::Stopped) => InstanceState::Stopped,
        Some(InstanceStateName::ShuttingDown) => InstanceState::ShuttingDown,
        Some(InstanceStateName::Terminated) => InstanceState::Terminated,
        _ => InstanceState::Running,
    };
    let lifecycle = instance.instance_lifecycle().map(InstanceLifecycleType::as_str).unwrap_or_default();
    let spot = instance.spot_instance_request_id().is_some_and(|id| !id.is_empty()) || lifecycle == "spot";
    let reservation = reservation(instance, lifecycle).filter(|_| !spot);
    let capacity_type = match reservation {
        Some(_) => CapacityType::Reserved,
        None if spot => CapacityType::Spot,
        None => CapacityType::OnDemand,
    };
    let partition = instance.placement().and_then(Placement::partition_number);
    Some(Instance {
        provider_id: provider_id(&zone, &id),
        id,
        client_token: tag(LAUNCH_TAG),
        node_claim: tag(CLAIM_TAG),
        instance_type: instance.instance_type().map(|kind| kind.as_str().to_owned()).unwrap_or_default(),
        zone,
        capacity_type,
        reservation,
        // EC2 returns 0 while the value is unknown.
        partition: partition.filter(|partition| *partition > 0),
        image_id: instance.image_id().unwrap_or_default().to_owned(),
        launched_at: UnixMillis(instance.launch_time().and_then(|time| time.to_millis().ok()).unwrap_or(0)),
        state,
    })
}

/// The attributes of an instance that its node class determines; inputs of drift detection.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct InstanceFacts {
    /// Ids of its security groups.
    pub security_groups: BTreeSet<String>,
    /// Id of its subnet.
    pub subnet: Option<String>,
    /// Id of the capacity reservation that it was launched into.
    pub reservation: Option<String>,
}

/// Reads the inputs of drift detection.
pub fn read_facts(instance: &aws_sdk_ec2::types::Instance) -> InstanceFacts {
    let groups = instance.security_groups().iter().filter_map(|group| group.group_id());
    InstanceFacts {
        security_groups: groups.map(str::to_owned).collect(),
        subnet: instance.subnet_id().map(str::to_owned),
        reservation: read(instance).and_then(|found| found.reservation).map(|reservation| reservation.id),
    }
}

fn read_both(instance: &aws_sdk_ec2::types::Instance) -> Option<(Instance, InstanceFacts)> {
    Some((read(instance)?, read_facts(instance)))
}

/// The reservation that an instance was launched into. An instance that merely matched an open reservation is on-demand.
fn reservation(instance: &aws_sdk_ec2::types::Instance, lifecycle: &str) -> Option<ReservedIn> {
    let only = instance
        .capacity_reservation_specification()
        .and_then(|specification| specification.capacity_reservation_preference())
        .is_some_and(|preference| preference.as_str() == "capacity-reservations-only");
    let id = instance.capacity_reservation_id().filter(|id| only && !id.is_empty())?.to_owned();
    let kind = match lifecycle {
        "capacity-block" => ReservationKind::CapacityBlock,
        "interruptible-capacity-reservation" => ReservationKind::Interruptible,
        _ => ReservationKind::OnDemand,
    };
    Some(ReservedIn { id, kind })
}

/// The filter of instances that exist.
pub fn existing() -> Filter {
    filter("instance-state-name", EXISTING)
}

/// All instances that match the filters.
async fn matching<T>(clients: &AwsClients, filters: Vec<Filter>, read: Read<T>) -> Result<Vec<T>, ApiError> {
    let call = clients.ec2.describe_instances().set_filters(Some(filters)).max_results(1000);
    pages(call, read).await
}

/// Extracts a value from a description; `None` skips the instance.
pub type Read<T> = fn(&aws_sdk_ec2::types::Instance) -> Option<T>;

async fn pages<T>(
    call: aws_sdk_ec2::operation::describe_instances::builders::DescribeInstancesFluentBuilder,
    read: Read<T>,
) -> Result<Vec<T>, ApiError> {
    let mut pages = call.into_paginator().send();
    let mut found = Vec::new();
    while let Some(page) = pages.next().await {
        let page = page.map_err(ApiError::of("ec2:DescribeInstances"))?;
        found.extend(page.reservations().iter().flat_map(aws_sdk_ec2::types::Reservation::instances).filter_map(read));
    }
    Ok(found)
}

/// All instances of a cluster that a NodePool launched and that are not terminated.
///
/// # Errors
/// DescribeInstances failed.
pub async fn of_cluster(clients: &AwsClients, cluster: &str) -> Result<Vec<(Instance, InstanceFacts)>, ApiError> {
    let filters = vec![
        filter("tag-key", [labels::NODE_POOL]),
        filter("tag-key", [labels::EC2_NODE_CLASS]),
        filter(format!("tag:{CLUSTER_TAG}"), [cluster]),
        existing(),
    ];
    matching(clients, filters, read_both).await
}

/// The inputs of drift detection of an instance; `None` if it does not exist.
///
/// # Errors
/// DescribeInstances failed.
pub async fn facts_of(clients: &AwsClients, id: &str) -> Result<Option<InstanceFacts>, ApiError> {
    let call = clients.ec2.describe_instances().instance_ids(id).filters(existing());
    match pages(call, |instance| Some(read_facts(instance))).await {
        Ok(found) => Ok(found.into_iter().next()),
        Err(error) if error.class == Class::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// The pending and running instances of a launch group, oldest first.
///
/// # Errors
/// DescribeInstances failed.
pub async fn of_launch_group(clients: &AwsClients, cluster: &str, group: &str) -> Result<Vec<Instance>, ApiError> {
    let filters = vec![
        filter(format!("tag:{LAUNCH_TAG}"), [group]),
        filter(format!("tag:{CLUSTER_TAG}"), [cluster]),
        filter("instance-state-name", ["pending", "running"]),
    ];
    let mut found = matching(clients, filters, read).await?;
    found.sort_by(|a, b| a.launched_at.cmp(&b.launched_at).then_with(|| a.id.cmp(&b.id)));
    Ok(found)
}

/// Results of DescribeInstances by launch group: its existing instances.
pub type Finder = Coalescer<String, Result<Vec<Instance>, ApiError>>;
/// Results of DescribeInstances by id; `None` for an instance that EC2 does not know.
pub type Describer = Coalescer<String, Result<Option<Instance>, ApiError>>;
/// Results of TerminateInstances by id; false for an instance that does not exist.
pub type Terminator = Coalescer<String, Result<bool, ApiError>>;

/// Finds the instances of launch groups, batched.
pub fn finder(clients: &AwsClients, cluster: &str) -> Finder {
    let (clients, cluster) = (clients.clone(), cluster.to_owned());
    let metrics = BatchMetrics::new(&clients.metrics, "find_instances");
    Coalescer::start(BY_GROUP, metrics, move |groups| of_launch_groups(clients.clone(), cluster.clone(), groups))
}

async fn of_launch_groups(
    clients: AwsClients,
    cluster: String,
    groups: Vec<String>,
) -> HashMap<String, Result<Vec<Instance>, ApiError>> {
    let filters =
        vec![filter(format!("tag:{LAUNCH_TAG}"), &groups), filter(format!("tag:{CLUSTER_TAG}"), [cluster]), existing()];
    let found = matching(&clients, filters, read).await;
    let of_group = |group: &String| {
        let of = |all: &Vec<Instance>| all.iter().filter(|one| one.client_token == *group).cloned().collect();
        found.as_ref().map(of).map_err(Clone::clone)
    };
    groups.iter().map(|group| (group.clone(), of_group(group))).collect()
}

/// Describes instances, batched.
pub fn describer(clients: &AwsClients) -> Describer {
    let clients = clients.clone();
    let metrics = BatchMetrics::new(&clients.metrics, "describe_instances");
    Coalescer::start(BY_ID, metrics, move |ids| describe_all(clients.clone(), ids))
}

/// Terminates instances, batched.
pub fn terminator(clients: &AwsClients) -> Terminator {
    let clients = clients.clone();
    let metrics = BatchMetrics::new(&clients.metrics, "terminate_instances");
    Coalescer::start(BY_ID, metrics, move |ids| terminate_all(clients.clone(), ids))
}

async fn describe_all(clients: AwsClients, ids: Vec<String>) -> HashMap<String, Result<Option<Instance>, ApiError>> {
    // Terminated instances, too: EC2's word is final, and the absence of an instance from its response is not.
    each(&clients, &ids, vec![], |instance| read(instance).map(|found| (found.id.clone(), found))).await
}

/// Describes instances by id in one call and extracts a value from each. The result has every id; `None` for an instance that does
/// not exist, or that the filters omit.
///
/// EC2 fails the whole call for an unknown id, and names it: the call is repeated without the named ids. Only when none is named,
/// each id is described on its own.
pub async fn each<T: Clone>(
    clients: &AwsClients,
    ids: &[String],
    filters: Vec<Filter>,
    read: Read<(String, T)>,
) -> HashMap<String, Result<Option<T>, ApiError>> {
    let mut out: HashMap<String, Result<Option<T>, ApiError>> = ids.iter().map(|id| (id.clone(), Ok(None))).collect();
    let mut left = ids.to_vec();
    // Every repetition has fewer ids than the call before it.
    while !left.is_empty() {
        match describe(clients, left.clone(), &filters, read).await {
            Ok(found) => {
                out.extend(found.into_iter().map(|(id, found)| (id, Ok(Some(found)))));
                return out;
            }
            Err(error) if error.class != Class::NotFound => {
                out.extend(left.into_iter().map(|id| (id, Err(error.clone()))));
                return out;
            }
            Err(_) if left.len() == 1 => return out,
            Err(error) => {
                let unknown = named_ids(&error.message);
                let known: Vec<String> = left.iter().filter(|id| !unknown.contains(id.as_str())).cloned().collect();
                if known.len() == left.len() {
                    break;
                }
                left = known;
            }
        }
    }
    let filters = &filters;
    let alone = left.into_iter().map(|id| async move {
        let response = match describe(clients, vec![id.clone()], filters, read).await {
            Ok(found) => Ok(found.into_iter().next().map(|(_, found)| found)),
            Err(error) if error.class == Class::NotFound => Ok(None),
            Err(error) => Err(error),
        };
        (id, response)
    });
    let alone = join_all(alone).await;
    out.extend(alone);
    out
}

/// The instance ids in the message of an error, as in `The instance IDs 'i-1, i-2' do not exist`.
fn named_ids(message: &str) -> BTreeSet<&str> {
    let words = message.split(|c: char| !c.is_ascii_alphanumeric() && c != '-');
    words.filter(|word| word.starts_with("i-")).collect()
}

async fn describe<T>(
    clients: &AwsClients,
    ids: Vec<String>,
    filters: &[Filter],
    read: Read<T>,
) -> Result<Vec<T>, ApiError> {
    let filters = Some(filters.to_vec()).filter(|filters| !filters.is_empty());
    pages(clients.ec2.describe_instances().set_instance_ids(Some(ids)).set_filters(filters), read).await
}

/// Terminates instances by id. If EC2 refuses the whole call, or omits some ids, each of these is terminated on its own.
async fn terminate_all(clients: AwsClients, ids: Vec<String>) -> HashMap<String, Result<bool, ApiError>> {
    let mut out: HashMap<String, Result<bool, ApiError>> = HashMap::new();
    match terminate(&clients, ids.clone()).await {
        Ok(terminating) => out.extend(terminating.into_iter().map(|id| (id, Ok(true)))),
        Err(error) if error.is_transient() || ids.len() == 1 => {
            let response = if error.class == Class::NotFound { Ok(false) } else { Err(error) };
            return ids.into_iter().map(|id| (id, response.clone())).collect();
        }
        Err(_) => {}
    }
    let left: Vec<&String> = ids.iter().filter(|id| !out.contains_key(*id)).collect();
    let alone = left.into_iter().map(|id| {
        let clients = &clients;
        async move {
            let response = match terminate(clients, vec![id.clone()]).await {
                Ok(_) => Ok(true),
                Err(error) if error.class == Class::NotFound => Ok(false),
                Err(error) => Err(error),
            };
            (id.clone(), response)
        }
    });
    let alone = join_all(alone).await;
    out.extend(alone);
    out
}

/// Ids of instances that are being terminated.
async fn terminate(clients: &AwsClients, ids: Vec<String>) -> Result<Vec<String>, ApiError> {
    let call = clients.ec2.terminate_instances().set_instance_ids(Some(ids));
    let response = call.send().await.map_err(ApiError::of("ec2:TerminateInstances"))?;
    let terminating = response.terminating_instances().iter().filter(|change| {
        let state = change.current_state().and_then(|state| state.name());
        matches!(state, Some(InstanceStateName::ShuttingDown | InstanceStateName::Terminated))
    });
    Ok(terminating.filter_map(|change| change.instance_id()).map(str::to_owned).collect())
}

#[cfg(test)]
mod tests;
