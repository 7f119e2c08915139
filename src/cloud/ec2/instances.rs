//! Instances in EC2: describing, listing and terminating them.

use std::collections::{BTreeSet, HashMap};

use aws_sdk_ec2::types::{Filter, InstanceLifecycleType, InstanceStateName, Placement};
use futures::future::join_all;

use super::client::Clients;
use super::coalesce::{BY_ID, Coalescer, Told};
use super::errors::{ApiError, Class};
use super::fleet::{CLAIM_TAG, LAUNCH_TAG};
use super::launch_template::CLUSTER_TAG;
use super::selectors::filter;
use crate::api::labels;
use crate::cloud::reservation::{ReservationKind, ReservedIn};
use crate::cloud::{Instance, InstanceState};
use crate::scheduling::offering::CapacityType;

/// States of instances that are there: a terminated one reads as gone.
const THERE: [&str; 5] = ["pending", "running", "stopping", "stopped", "shutting-down"];

/// Where the id of an instance is written on Nodes.
pub fn provider_id(zone: &str, id: &str) -> String {
    format!("aws:///{zone}/{id}")
}

/// The instance id in a provider id; `None` for another cloud's.
pub fn instance_id(provider_id: &str) -> Option<&str> {
    let (scheme, rest) = provider_id.split_once("://")?;
    let id = rest.rsplit('/').next()?;
    (scheme == "aws" && id.starts_with("i-")).then_some(id)
}

/// Reads EC2's description; `None` where it lacks an id.
pub fn read(instance: &aws_sdk_ec2::types::Instance) -> Option<Instance> {
    let id = instance.instance_id()?.to_owned();
    let zone = instance.placement().and_then(|placement| placement.availability_zone()).unwrap_or_default().to_owned();
    let tag = |key: &str| {
        let found = instance.tags().iter().find(|tag| tag.key() == Some(key));
        found.and_then(|tag| tag.value()).unwrap_or_default().to_owned()
    };
    let state = match instance.state().and_then(|state| state.name()) {
        Some(InstanceStateName::Pending) => InstanceState::Pending,
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
        // EC2 says 0 while it doesn't know.
        partition: partition.filter(|partition| *partition > 0),
        image_id: instance.image_id().unwrap_or_default().to_owned(),
        launched_at_ms: instance.launch_time().and_then(|time| time.to_millis().ok()).unwrap_or(0),
        state,
    })
}

/// What a node class decided of an instance that the instance itself tells, for drift.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct InstanceFacts {
    /// Ids of its security groups.
    pub security_groups: BTreeSet<String>,
    /// Id of its subnet.
    pub subnet: Option<String>,
    /// Id of the capacity reservation that it was bought in.
    pub reservation: Option<String>,
}

/// Reads what decides of drift.
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

/// The reservation that an instance was launched into. One that merely fell into an open reservation was bought on demand.
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

fn there() -> Filter {
    filter("instance-state-name", THERE)
}

/// Every instance that matches.
async fn matching<T>(clients: &Clients, filters: Vec<Filter>, read: Read<T>) -> Result<Vec<T>, ApiError> {
    let call = clients.ec2.describe_instances().set_filters(Some(filters)).max_results(1000);
    pages(call, read).await
}

/// What is read off one of EC2's descriptions; `None` leaves it out.
type Read<T> = fn(&aws_sdk_ec2::types::Instance) -> Option<T>;

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

/// Every instance of a cluster that a pool launched and that isn't terminated.
///
/// # Errors
/// EC2's.
pub async fn of_cluster(clients: &Clients, cluster: &str) -> Result<Vec<(Instance, InstanceFacts)>, ApiError> {
    let filters = vec![
        filter("tag-key", [labels::NODE_POOL]),
        filter("tag-key", [labels::EC2_NODE_CLASS]),
        filter(format!("tag:{CLUSTER_TAG}"), [cluster]),
        there(),
    ];
    matching(clients, filters, read_both).await
}

/// What decides of an instance's drift, as EC2 has it now; `None` for one that isn't there.
///
/// # Errors
/// EC2's.
pub async fn facts_of(clients: &Clients, id: &str) -> Result<Option<InstanceFacts>, ApiError> {
    let call = clients.ec2.describe_instances().instance_ids(id).filters(there());
    match pages(call, |instance| Some(read_facts(instance))).await {
        Ok(found) => Ok(found.into_iter().next()),
        Err(error) if error.class == Class::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// The living instances that were launched for a group, the oldest first.
///
/// # Errors
/// EC2's.
pub async fn of_group(clients: &Clients, cluster: &str, group: &str) -> Result<Vec<Instance>, ApiError> {
    let filters = vec![
        filter(format!("tag:{LAUNCH_TAG}"), [group]),
        filter(format!("tag:{CLUSTER_TAG}"), [cluster]),
        filter("instance-state-name", ["pending", "running"]),
    ];
    let mut found = matching(clients, filters, read).await?;
    found.sort_by(|a, b| a.launched_at_ms.cmp(&b.launched_at_ms).then_with(|| a.id.cmp(&b.id)));
    Ok(found)
}

/// Answers of DescribeInstances by id; `None` for an instance that isn't there.
pub type Describer = Coalescer<String, Result<Option<Instance>, ApiError>>;
/// Answers of TerminateInstances by id; false for an instance that isn't there.
pub type Terminator = Coalescer<String, Result<bool, ApiError>>;

/// Describes instances, those of a short window in one call.
pub fn describer(clients: &Clients) -> Describer {
    let clients = clients.clone();
    let told = Told::new(&clients.metrics, "describe_instances");
    Coalescer::start(BY_ID, told, move |ids| describe_all(clients.clone(), ids))
}

/// Terminates instances, those of a short window in one call.
pub fn terminator(clients: &Clients) -> Terminator {
    let clients = clients.clone();
    let told = Told::new(&clients.metrics, "terminate_instances");
    Coalescer::start(BY_ID, told, move |ids| terminate_all(clients.clone(), ids))
}

/// Describes by id. One id that EC2 doesn't know fails the whole call: then, and where the answer leaves some out, each of
/// those is asked for by itself.
async fn describe_all(clients: Clients, ids: Vec<String>) -> HashMap<String, Result<Option<Instance>, ApiError>> {
    let mut out = HashMap::new();
    match describe(&clients, ids.clone()).await {
        Ok(found) => out.extend(found.into_iter().map(|instance| (instance.id.clone(), Ok(Some(instance))))),
        // Asking one by one helps against nothing but an unknown id.
        Err(error) if error.class != Class::NotFound => {
            return ids.into_iter().map(|id| (id, Err(error.clone()))).collect();
        }
        Err(_) if ids.len() == 1 => return ids.into_iter().map(|id| (id, Ok(None))).collect(),
        Err(_) => {}
    }
    let left: Vec<&String> = ids.iter().filter(|id| !out.contains_key(*id)).collect();
    let alone = left.into_iter().map(|id| {
        let clients = &clients;
        async move {
            let answer = match describe(clients, vec![id.clone()]).await {
                Ok(found) => Ok(found.into_iter().next()),
                Err(error) if error.class == Class::NotFound => Ok(None),
                Err(error) => Err(error),
            };
            (id.clone(), answer)
        }
    });
    let alone = join_all(alone).await;
    out.extend(alone);
    out
}

async fn describe(clients: &Clients, ids: Vec<String>) -> Result<Vec<Instance>, ApiError> {
    pages(clients.ec2.describe_instances().set_instance_ids(Some(ids)).filters(there()), read).await
}

/// Terminates by id. Where EC2 refuses the whole call, or leaves some out, each of those is tried by itself.
async fn terminate_all(clients: Clients, ids: Vec<String>) -> HashMap<String, Result<bool, ApiError>> {
    let mut out: HashMap<String, Result<bool, ApiError>> = HashMap::new();
    match terminate(&clients, ids.clone()).await {
        Ok(going) => out.extend(going.into_iter().map(|id| (id, Ok(true)))),
        Err(error) if error.is_passing() || ids.len() == 1 => {
            let answer = if error.class == Class::NotFound { Ok(false) } else { Err(error) };
            return ids.into_iter().map(|id| (id, answer.clone())).collect();
        }
        Err(_) => {}
    }
    let left: Vec<&String> = ids.iter().filter(|id| !out.contains_key(*id)).collect();
    let alone = left.into_iter().map(|id| {
        let clients = &clients;
        async move {
            let answer = match terminate(clients, vec![id.clone()]).await {
                Ok(_) => Ok(true),
                Err(error) if error.class == Class::NotFound => Ok(false),
                Err(error) => Err(error),
            };
            (id.clone(), answer)
        }
    });
    let alone = join_all(alone).await;
    out.extend(alone);
    out
}

/// Ids that are going away now.
async fn terminate(clients: &Clients, ids: Vec<String>) -> Result<Vec<String>, ApiError> {
    let call = clients.ec2.terminate_instances().set_instance_ids(Some(ids));
    let answer = call.send().await.map_err(ApiError::of("ec2:TerminateInstances"))?;
    let going = answer.terminating_instances().iter().filter(|change| {
        let state = change.current_state().and_then(|state| state.name());
        matches!(state, Some(InstanceStateName::ShuttingDown | InstanceStateName::Terminated))
    });
    Ok(going.filter_map(|change| change.instance_id()).map(str::to_owned).collect())
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::super::client::wire;
    use super::*;

    fn item(id: &str, more: &str) -> String {
        format!(
            "<item><instancesSet><item><instanceId>{id}</instanceId><instanceType>m5.large</instanceType><imageId>ami-1</imageId>\
             <instanceState><name>running</name></instanceState><placement><availabilityZone>us-east-1a</availabilityZone></placement>\
             <launchTime>2026-01-02T03:04:05.000Z</launchTime>{more}</item></instancesSet></item>"
        )
    }

    fn reservations(items: &str) -> Option<(u16, String)> {
        wire::ok("DescribeInstances", &format!("<reservationSet>{items}</reservationSet>"))
    }

    fn ids(request: &wire::Seen) -> Vec<String> {
        (1..).map_while(|n| request.form.get(&format!("InstanceId.{n}")).cloned()).collect()
    }

    fn counted(seen: &Mutex<Vec<wire::Seen>>) -> Vec<usize> {
        seen.lock().unwrap().iter().map(|request| ids(request).len()).collect()
    }

    #[test]
    fn ids_are_read_off_provider_ids() {
        for (provider_id, expected) in [
            ("aws:///us-east-1a/i-0123", Some("i-0123")),
            ("aws:///i-0123", Some("i-0123")),
            ("kwok-aws:///a/i-0123", None),
            ("aws:///us-east-1a/", None),
            ("i-0123", None),
        ] {
            assert_eq!(instance_id(provider_id), expected, "{provider_id}");
        }
        assert_eq!(provider_id("a", "i-1"), "aws:///a/i-1");
    }

    #[tokio::test]
    async fn an_instance_is_read_with_its_tags_and_capacity_type() {
        let (clients, _) = wire::clients(Box::new(|_| {
            let tags = format!(
                "<tagSet><item><key>{LAUNCH_TAG}</key><value>uid</value></item><item><key>{CLAIM_TAG}</key><value>claim</value></item></tagSet>"
            );
            let spot = item("i-1", &format!("{tags}<spotInstanceRequestId>sir-1</spotInstanceRequestId>"));
            // One that merely fell into an open reservation was bought on demand.
            let open = item(
                "i-2",
                "<capacityReservationId>cr-1</capacityReservationId><subnetId>subnet-1</subnetId>\
                 <groupSet><item><groupId>sg-1</groupId></item></groupSet>",
            );
            reservations(&(spot + &open))
        }));
        let found = of_cluster(&clients, "c1").await.unwrap();
        assert_eq!(
            found[0].0,
            Instance {
                id: "i-1".into(),
                provider_id: "aws:///us-east-1a/i-1".into(),
                client_token: "uid".into(),
                node_claim: "claim".into(),
                instance_type: "m5.large".into(),
                zone: "us-east-1a".into(),
                capacity_type: CapacityType::Spot,
                reservation: None,
                partition: None,
                image_id: "ami-1".into(),
                launched_at_ms: 1_767_323_045_000,
                state: InstanceState::Running,
            }
        );
        assert_eq!(found[1].0.capacity_type, CapacityType::OnDemand);
        let facts = InstanceFacts {
            security_groups: ["sg-1".to_owned()].into(),
            subnet: Some("subnet-1".into()),
            reservation: None,
        };
        assert_eq!(found[1].1, facts);
    }

    #[tokio::test]
    async fn c39_instances_with_another_clusters_tags_or_without_a_pools_are_not_listed() {
        let (clients, seen) = wire::clients(Box::new(|_| reservations("")));
        assert!(of_cluster(&clients, "c1").await.unwrap().is_empty());
        let form = &seen.lock().unwrap()[0].form;
        let filter =
            |n: usize| (form[&format!("Filter.{n}.Name")].as_str(), form[&format!("Filter.{n}.Value.1")].as_str());
        assert_eq!(filter(1), ("tag-key", labels::NODE_POOL));
        assert_eq!(filter(2), ("tag-key", labels::EC2_NODE_CLASS));
        assert_eq!(filter(3), ("tag:eks:eks-cluster-name", "c1"));
    }

    #[tokio::test]
    async fn only_what_may_run_nowhere_else_is_in_a_reservation() {
        let (clients, _) = wire::clients(Box::new(|_| {
            let only = "<capacityReservationSpecification><capacityReservationPreference>capacity-reservations-only</capacityReservationPreference></capacityReservationSpecification>";
            let id = "<capacityReservationId>cr-1</capacityReservationId>";
            let lifecycle = |kind: &str| format!("{id}{only}<instanceLifecycle>{kind}</instanceLifecycle>");
            reservations(
                &[
                    item("i-1", &format!("{id}{only}")),
                    item("i-2", &lifecycle("capacity-block")),
                    item("i-3", &lifecycle("interruptible-capacity-reservation")),
                    item("i-4", only),
                    item("i-5", id),
                ]
                .concat(),
            )
        }));
        let found = of_cluster(&clients, "c1").await.unwrap();
        let kinds: Vec<_> =
            found.iter().map(|(one, _)| one.reservation.as_ref().map(|one| (&*one.id, one.kind))).collect();
        let of = |kind| Some(("cr-1", kind));
        assert_eq!(
            kinds,
            [
                of(ReservationKind::OnDemand),
                of(ReservationKind::CapacityBlock),
                of(ReservationKind::Interruptible),
                None,
                None
            ]
        );
        let types: Vec<_> = found.iter().map(|(one, _)| one.capacity_type).collect();
        let (reserved, on_demand) = (CapacityType::Reserved, CapacityType::OnDemand);
        assert_eq!(types, [reserved, reserved, reserved, on_demand, on_demand]);
    }

    #[tokio::test]
    async fn a_partition_is_known_when_ec2_says_which() {
        let (clients, _) = wire::clients(Box::new(|_| {
            let placed = |id: &str, number: i32| {
                let zone = "<availabilityZone>us-east-1a</availabilityZone>";
                item(id, "").replace(zone, &format!("{zone}<partitionNumber>{number}</partitionNumber>"))
            };
            reservations(&(placed("i-1", 3) + &placed("i-2", 0) + &item("i-3", "")))
        }));
        let found = of_cluster(&clients, "c1").await.unwrap();
        assert_eq!(found.iter().map(|(one, _)| one.partition).collect::<Vec<_>>(), [Some(3), None, None]);
    }

    #[tokio::test]
    async fn one_unknown_id_does_not_hide_the_others() {
        let (clients, seen) = wire::clients(Box::new(|request| {
            let ids = ids(request);
            match ids.iter().find(|id| *id == "i-gone") {
                Some(_) => wire::refusal("InvalidInstanceID.NotFound", "i-gone"),
                None => reservations(&ids.iter().map(|id| item(id, "")).collect::<String>()),
            }
        }));
        let describer = describer(&clients);
        let ask = |id: &str| describer.ask(id.to_owned());
        let answers = futures::future::join3(ask("i-1"), ask("i-gone"), ask("i-2")).await;
        assert!(matches!(answers.0, Some(Ok(Some(_)))) && matches!(answers.2, Some(Ok(Some(_)))));
        assert_eq!(answers.1, Some(Ok(None)));
        assert_eq!(counted(&seen), [3, 1, 1, 1]);
    }

    #[tokio::test]
    async fn a_refused_describe_is_not_repeated_for_each() {
        let (clients, seen) = wire::clients(Box::new(|_| wire::refusal("UnauthorizedOperation", "no")));
        let answers = describe_all(clients, vec!["i-1".into(), "i-2".into()]).await;
        assert!(answers.values().all(|answer| answer.as_ref().is_err_and(|error| error.class == Class::Unauthorized)));
        assert_eq!(seen.lock().unwrap().len(), 1);
    }

    #[tokio::test]
    async fn terminations_share_a_call_and_those_left_out_are_tried_alone() {
        let (clients, seen) = wire::clients(Box::new(|request| {
            let ids = ids(request);
            if ids == ["i-gone"] {
                return wire::refusal("InvalidInstanceID.NotFound", "i-gone");
            }
            let going = ids.iter().filter(|id| *id != "i-gone").map(|id| {
                format!(
                    "<item><instanceId>{id}</instanceId><currentState><name>shutting-down</name></currentState></item>"
                )
            });
            wire::ok("TerminateInstances", &format!("<instancesSet>{}</instancesSet>", going.collect::<String>()))
        }));
        let terminator = terminator(&clients);
        let ask = |id: &str| terminator.ask(id.to_owned());
        let answers = futures::future::join3(ask("i-1"), ask("i-gone"), ask("i-2")).await;
        assert_eq!(answers, (Some(Ok(true)), Some(Ok(false)), Some(Ok(true))));
        assert_eq!(counted(&seen), [3, 1]);
    }

    #[tokio::test]
    async fn the_instances_of_a_group_are_found_by_their_tag_the_oldest_first() {
        let (clients, seen) = wire::clients(Box::new(|_| {
            let young = item("i-1", "").replace("2026-01-02", "2026-01-03");
            reservations(&(young + &item("i-2", "")))
        }));
        let found = of_group(&clients, "c1", "group").await.unwrap();
        assert_eq!(found.iter().map(|instance| &*instance.id).collect::<Vec<_>>(), ["i-2", "i-1"]);
        let form = &seen.lock().unwrap()[0].form;
        assert_eq!((&*form["Filter.1.Name"], &*form["Filter.1.Value.1"]), ("tag:stowage.dev/launch", "group"));
        assert_eq!(form["Filter.3.Value.2"], "running");
    }
}
