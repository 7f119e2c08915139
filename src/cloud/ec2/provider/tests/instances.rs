//! Instances, interruption events, discovered memory, and the deletion of node classes.

use futures::StreamExt;
use serde_json::json;
use stowage_api::Ec2NodeClass;
use stowage_model::offering::CapacityType;
use stowage_model::time::UnixMillis;
use stowage_runtime::clock;

use crate::ec2::interruption::messages::EventKind;
use crate::ec2::interruption::sqs_queue::Received;
use crate::ec2::launch::request::tests::{class, facts};
use crate::ec2::offerings::discovered_memory::tests::node;
use crate::ec2::options::Options;
use crate::ec2::provider::Ec2Provider;
use crate::ec2::provider::tests::fake_ec2::{World, fresh, world};
use crate::test_support::fake_aws;
use crate::{Cloud, ClusterObserver, Instance, InstanceState, InstanceTagging, NodeClassCloud, Override, Untagged};

#[tokio::test]
async fn an_instance_that_ec2_does_not_describe_yet_exists_and_can_be_terminated() {
    let world = world();
    let id = world.ec2.launch(fresh()).await.unwrap().instance.provider_id;
    world.fake().hide_instances = true;
    assert!(world.ec2.describe(&id).await.unwrap().is_some());
    assert_eq!(world.ec2.list().await.unwrap().len(), 1);
    world.ec2.terminate(&id).await.unwrap_err();
    let due = [Untagged { provider_id: id.clone(), node: "node-1".into(), claim: "claim-1".into() }];
    assert!(world.ec2.tag(&due).next().await.unwrap().1.is_err());
    world.fake().hide_instances = false;
    assert!(world.ec2.terminate(&id).await.unwrap(), "it is shutting down");
    assert!(world.ec2.terminate(&id).await.unwrap());
    assert_eq!(world.ec2.clients.attempts()["TerminateInstances"], 2, "one failed call, one successful call");
}

#[tokio::test]
async fn a_terminated_instance_does_not_exist() {
    let world = world();
    world.fake().instances.push(("i-0000000000000000c".into(), "uid-2".into(), "terminated"));
    assert!(!world.ec2.terminate("aws:///us-east-1a/i-0000000000000000c").await.unwrap());
    assert!(!world.ec2.terminate("aws:///us-east-1a/i-0000000000000000d").await.unwrap(), "an unknown instance");
    assert!(world.ec2.describe("aws:///us-east-1a/i-0000000000000000c").await.unwrap().is_none());
    world.ec2.describe("kwok-aws:///a/i-1").await.unwrap_err();
}

#[tokio::test]
async fn an_interrupted_spot_offering_is_unavailable() {
    let world = world();
    let spot =
        Override { instance_type: "m5.large".into(), zone: "us-east-1a".into(), capacity_type: CapacityType::Spot };
    world.ec2.instances.remember(&[Instance {
        id: "i-1".into(),
        provider_id: "aws:///us-east-1a/i-1".into(),
        client_token: String::new(),
        node_claim: String::new(),
        instance_type: spot.instance_type.clone(),
        zone: spot.zone.clone(),
        capacity_type: spot.capacity_type,
        reservation: None,
        partition: None,
        image_id: String::new(),
        launched_at: UnixMillis(0),
        state: InstanceState::Running,
    }]);
    let event = |kind, id: &str| Received { receipt: "r".into(), kind, instance_id: id.into(), at: UnixMillis(0) };
    world.ec2.record_event(&event(EventKind::RebalanceRecommendation, "i-1"));
    world.ec2.record_event(&event(EventKind::SpotInterrupted, "i-unknown"));
    let is_unavailable = |world: &World| world.ec2.offerings.unavailable().is_unavailable(&spot, None, clock::now());
    assert!(!is_unavailable(&world));
    world.ec2.record_event(&event(EventKind::SpotInterrupted, "i-1"));
    assert!(is_unavailable(&world));
}

#[tokio::test]
async fn a_registered_node_changes_the_catalog_of_its_image_only() {
    let ec2 = world().ec2;
    let memory_mib = |class: &Ec2NodeClass| {
        let catalog = ec2.catalog(class);
        catalog
            .instance_types
            .iter()
            .find(|found| &*found.name == "m5.large")
            .map(|found| found.capacity.memory.0 >> 20)
    };
    let (own, mut other) = (class(json!({})), class(json!({})));
    other.metadata.name = Some("other".into());
    other.status.as_mut().unwrap().amis[0].id = "ami-new".into();
    let (claim, node) = node(json!("ami-x86"), "m5.large", json!({"memory": "7500Mi"}));
    ec2.registered(&claim, &node);
    assert_eq!((memory_mib(&own), memory_mib(&other)), (Some(7500), Some(7577)));
}

#[tokio::test]
async fn c35_in_an_isolated_vpc_a_class_is_released_without_iam() {
    let templates = "<launchTemplates><item><launchTemplateId>lt-1</launchTemplateId><launchTemplateName>t</launchTemplateName></item></launchTemplates>";
    let (clients, seen) = fake_aws::clients(Box::new(move |request| match request.action.as_str() {
        "DescribeLaunchTemplates" => fake_aws::ok("DescribeLaunchTemplates", templates),
        "DeleteLaunchTemplate" => fake_aws::ok("DeleteLaunchTemplate", ""),
        other => panic!("unexpected call {other}"),
    }));
    let options = Options { isolated_vpc: true, ..Options::of("c1") };
    Ec2Provider::new(clients, options, facts()).release_class(&class(json!({}))).await.unwrap();
    let actions: Vec<String> = seen.lock().unwrap().iter().map(|request| request.action.clone()).collect();
    assert_eq!(actions, ["DescribeLaunchTemplates", "DeleteLaunchTemplate"]);
}
