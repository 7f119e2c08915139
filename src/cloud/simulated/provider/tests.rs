//! The provider with a clock that only the test advances.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicI64, Ordering};

use serde_json::json;
use stowage_model::offering::CapacityType;
use stowage_test_objects::{claim, node_class};

use super::*;
use crate::{LaunchDetails, MessageKind};

fn opened(config: SimulatedConfig) -> (Arc<SimulatedEc2>, Arc<AtomicI64>) {
    let time = Arc::new(AtomicI64::new(1_000_000));
    let clock = Arc::clone(&time);
    let ec2 = SimulatedEc2::with_clock(config, Box::new(move || UnixMillis(clock.load(Ordering::SeqCst)))).unwrap();
    (Arc::new(ec2), time)
}

fn quick() -> SimulatedConfig {
    SimulatedConfig { api_delay: Duration::ZERO, poll: Duration::ZERO, ..SimulatedConfig::default() }
}

fn request(claim: &str) -> LaunchRequest {
    LaunchRequest {
        client_token: format!("uid-{claim}"),
        node_claim: claim.to_owned(),
        node_pool: "pool".to_owned(),
        node_class: "class".to_owned(),
        overrides: vec![Override {
            instance_type: "m5.large".to_owned(),
            zone: "us-east-1a".to_owned(),
            capacity_type: CapacityType::Spot,
        }],
        labels: BTreeMap::new(),
        taints: Vec::new(),
        details: None,
    }
}

#[tokio::test]
async fn instances_survive_a_restart_and_no_token_launches_twice() {
    let folder = tempfile::tempdir().unwrap();
    let config = SimulatedConfig { state_file: Some(folder.path().join("state")), ..quick() };
    let (ec2, _) = opened(config.clone());
    let first = ec2.launch(request("one")).await.unwrap().instance;
    let second = ec2.launch(request("two")).await.unwrap().instance;
    assert!(ec2.terminate(&second.provider_id).await.unwrap());
    drop(ec2);
    let (ec2, time) = opened(config);
    assert_eq!(ec2.launch(request("one")).await.unwrap().instance.id, first.id);
    time.fetch_add(60_000, Ordering::SeqCst);
    let listed = ec2.list().await.unwrap();
    assert_eq!(listed.iter().map(|instance| &instance.id).collect::<Vec<_>>(), [&first.id]);
    assert_ne!(ec2.launch(request("three")).await.unwrap().instance.id, second.id);
}

#[tokio::test]
async fn a_standby_takes_over_the_state_file_after_the_leader_exits() {
    let folder = tempfile::tempdir().unwrap();
    let config = SimulatedConfig { state_file: Some(folder.path().join("state")), ..quick() };
    let (leader, _) = opened(config.clone());
    let (standby, _) = opened(config);
    let instance = leader.launch(request("one")).await.unwrap().instance;
    let refused = standby.list().await.unwrap_err().to_string();
    assert!(refused.contains("is in use by another process"), "{refused}");
    assert!(matches!(standby.launch(request("one")).await, Err(LaunchError::Other { .. })));
    drop(leader);
    assert_eq!(standby.launch(request("one")).await.unwrap().instance.id, instance.id);
}

#[tokio::test]
async fn messages_are_received_and_deleted_through_the_trait() {
    let (ec2, time) = opened(quick());
    let instance = ec2.launch(request("one")).await.unwrap().instance;
    ec2.trigger(&instance.id, InstanceEvent::SpotInterruption).unwrap();
    let messages = ec2.receive_messages().await.unwrap();
    assert_eq!(messages.iter().map(|message| message.kind).collect::<Vec<_>>(), [MessageKind::SpotInterruption]);
    ec2.delete_messages(&[messages[0].receipt.clone()]).await.unwrap();
    time.fetch_add(60_000, Ordering::SeqCst);
    assert!(ec2.receive_messages().await.unwrap().is_empty());
    time.fetch_add(60_000, Ordering::SeqCst);
    let messages = ec2.receive_messages().await.unwrap();
    assert_eq!(messages.iter().map(|message| message.kind).collect::<Vec<_>>(), [MessageKind::StateChange]);
    assert!(ec2.describe(&instance.provider_id).await.unwrap().is_some());
}

#[tokio::test]
async fn an_event_wakes_a_waiting_receive() {
    let config =
        SimulatedConfig { api_delay: Duration::ZERO, poll: Duration::from_hours(1), ..SimulatedConfig::default() };
    let (ec2, _) = opened(config);
    let instance = ec2.launch(request("one")).await.unwrap().instance;
    let waiting = ec2.receive_messages();
    let event = async {
        tokio::task::yield_now().await;
        ec2.trigger(&instance.id, InstanceEvent::Rebalance).unwrap();
    };
    let (messages, ()) = tokio::join!(waiting, event);
    assert_eq!(messages.unwrap().len(), 1);
}

#[tokio::test]
async fn an_offering_marked_unavailable_can_still_be_launched() {
    let (ec2, time) = opened(quick());
    let class = Ec2NodeClass::new("class", stowage_api::Ec2NodeClassSpec::default());
    let offering = request("one").overrides.remove(0);
    let available = |catalog: &Catalog| {
        let found = catalog.instance_types.iter().find(|entry| &*entry.name == "m5.large").unwrap();
        found
            .offerings
            .iter()
            .find(|o| &*o.zone == "us-east-1a" && o.capacity_type == CapacityType::Spot)
            .unwrap()
            .available
    };
    let before = ec2.catalog(&class);
    assert!(available(&before));
    assert!(Arc::ptr_eq(&before, &ec2.catalog(&class)), "nothing changed, so the catalog is shared");
    ec2.mark_unavailable(&offering);
    assert!(!available(&ec2.catalog(&class)));
    assert!(ec2.launch(request("one")).await.is_ok());
    time.fetch_add(180_000, Ordering::SeqCst);
    assert!(available(&ec2.catalog(&class)));
}

#[tokio::test]
async fn a_class_that_is_not_ready_launches_nothing() {
    let (ec2, _) = opened(quick());
    let ready = |status: &str| {
        let condition = json!({"type": "Ready", "status": status, "reason": "r", "message": "no image", "lastTransitionTime": "2026-01-01T00:00:00Z"});
        let class = Arc::new(node_class("class", &json!({"status": {"conditions": [condition]}})));
        let catalog = ec2.catalog(&class);
        let details = LaunchDetails { claim: claim("c", &json!({})), class, catalog, named: BTreeSet::new() };
        LaunchRequest { details: Some(Arc::new(details)), ..request("one") }
    };
    let refused = ec2.launch(ready("False")).await.unwrap_err();
    assert_eq!(refused, LaunchError::NodeClassNotReady { name: "class".into(), reason: "no image".into() });
    assert!(ec2.list().await.unwrap().is_empty());
    ec2.launch(ready("True")).await.unwrap();
}
