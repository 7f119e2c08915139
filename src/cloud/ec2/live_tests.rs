//! Calls of an EC2-compatible endpoint of another project. `AWS_ENDPOINT_URL` names it, as for the SDK; region us-east-1.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use serde_json::json;
use stowage_runtime::clock;

use crate::catalog::{NodeSettings, RawInstanceType, SpotPricing, embedded};
use crate::ec2::aws::client::AwsClients;
use crate::ec2::instances::status_checks;
use crate::ec2::interruption::messages::EventKind;
use crate::ec2::interruption::sqs_queue::Queue;
use crate::ec2::node_class::select_capacity_reservations;
use crate::ec2::offerings::instance_types;
use crate::ec2::offerings::refresh;
use crate::ec2::offerings::refresh::RegionApis;
use crate::ec2::offerings::region::Region;
use crate::ec2::offerings::region_snapshot::{Dataset, RegionSnapshot};

#[tokio::test]
#[ignore = "needs an EC2-compatible endpoint in AWS_ENDPOINT_URL"]
async fn region_data_is_read() {
    let clients = AwsClients::from_environment().await.unwrap();
    let region = Region::new(RegionSnapshot::embedded("us-east-1", embedded()));
    let apis = RegionApis { ec2: clients.ec2.clone(), pricing: None };
    refresh::hydrate(&region, &apis, refresh::start_timeout).await;
    let snapshot = region.snapshot();
    for dataset in [Dataset::Types, Dataset::Zones, Dataset::SpotPrices] {
        assert!(snapshot.source(dataset).is_live(), "{dataset}: {:?}", snapshot.source(dataset));
    }
    assert!(snapshot.types.len() > 500, "{} instance types", snapshot.types.len());

    // The endpoint and the embedded table agree on the instance types that both contain.
    let shape = |entry: &RawInstanceType| {
        let node = entry.as_node("us-east-1", &NodeSettings::default(), SpotPricing::Off);
        (node.capacity, node.allocatable)
    };
    let known: BTreeSet<&String> = snapshot.types.keys().collect();
    let mut differing = Vec::new();
    for table in embedded().instance_types.iter().filter(|entry| known.contains(&entry.name)) {
        let live = &snapshot.types[&table.name];
        let several_cards = live.network_cards.len() > 1;
        if shape(live) != shape(table) && !several_cards {
            differing.push(format!("{}: {:?} and {:?}", table.name, shape(live), shape(table)));
        }
    }
    assert!(differing.is_empty(), "{} differ, first {}", differing.len(), differing[0]);
    let table = embedded().instance_type("m5.large").unwrap();
    assert_eq!(
        snapshot.zones_of("m5.large").unwrap().iter().collect::<Vec<_>>(),
        table.zones.iter().collect::<Vec<_>>()
    );
}

#[tokio::test]
#[ignore = "needs an EC2-compatible endpoint in AWS_ENDPOINT_URL"]
async fn messages_are_sent_received_and_deleted() {
    let clients = AwsClients::from_environment().await.unwrap();
    let name = format!("stowage-test-{}", clock::now().0);
    let queue = Queue::new(clients.sqs.clone(), &name);
    assert!(queue.receive(clock::now).await.is_err(), "there is no such queue yet");
    let url = clients.sqs.create_queue().queue_name(&name).send().await.unwrap().queue_url.unwrap();
    let (account, region) = (url.rsplit('/').nth(1), clients.sqs.config().region().map(ToString::to_string));
    let event = |kind: &str, detail: serde_json::Value| {
        let source = if kind.starts_with("AWS") { "aws.health" } else { "aws.ec2" };
        json!({"version": "0", "source": source, "detail-type": kind, "time": "2026-01-01T00:00:00Z", "detail": detail,
            "account": account, "region": region})
        .to_string()
    };
    let entities = json!([{"entityValue": "i-2"}, {"entityValue": "i-3"}]);
    let health = json!({"service": "EC2", "eventTypeCategory": "scheduledChange", "affectedEntities": entities});
    for body in [
        event("EC2 Spot Instance Interruption Warning", json!({"instance-id": "i-1"})),
        event("AWS Health Event", health),
        "nonsense".to_owned(),
    ] {
        clients.sqs.send_message().queue_url(&url).message_body(body).send().await.unwrap();
    }
    let mut events = Vec::new();
    for _ in 0..5 {
        if events.len() < 3 || queue.counts().deleted < 1 {
            events.extend(queue.receive(clock::now).await.unwrap());
        }
    }
    events.sort_by(|a, b| a.instance_id.cmp(&b.instance_id));
    let seen: Vec<_> = events.iter().map(|event| (event.kind, event.instance_id.as_str())).collect();
    let expected =
        [(EventKind::SpotInterrupted, "i-1"), (EventKind::ScheduledChange, "i-2"), (EventKind::ScheduledChange, "i-3")];
    assert_eq!(seen, expected);
    let receipts: Vec<String> = events.into_iter().map(|event| event.receipt).collect();
    queue.delete(&receipts).await.unwrap();
    assert_eq!(queue.counts().deleted, 3);
    clients.sqs.delete_queue().queue_url(&url).send().await.unwrap();
}

#[tokio::test]
#[ignore = "needs an EC2-compatible endpoint in AWS_ENDPOINT_URL"]
async fn statuses_and_offerings_are_read() {
    let clients = AwsClients::from_environment().await.unwrap();
    let statuses = status_checks::describe_statuses(&clients.ec2).await.unwrap();
    assert_eq!(status_checks::unhealthy(&statuses, clock::now()), []);
    let zones = instance_types::zones_by_type(&instance_types::describe_offerings(&clients.ec2).await.unwrap());
    assert!(zones["m5.large"].contains("us-east-1a"));
}

#[tokio::test]
#[ignore = "needs an EC2-compatible endpoint in AWS_ENDPOINT_URL"]
async fn an_endpoint_without_capacity_reservations_fails_quickly() {
    let clients = AwsClients::from_environment().await.unwrap();
    let terms = [serde_json::from_value(json!({"tags": {"stowage": "*"}})).unwrap()];
    let began = Instant::now();
    match select_capacity_reservations::find(&clients, &terms).await {
        Ok(found) => assert_eq!(found, [], "none has this tag"),
        Err(error) => assert!(error.to_string().starts_with("ec2:DescribeCapacityReservations"), "{error}"),
    }
    assert!(began.elapsed() < Duration::from_secs(10), "a node class waits for it: {:?}", began.elapsed());
}
