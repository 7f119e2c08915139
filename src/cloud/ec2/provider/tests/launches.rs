//! Launches under faults: lost responses, partial launches, crashes and errors.

use std::collections::BTreeSet;

use serde_json::json;
use stowage_model::events;
use stowage_model::offering::CapacityType;
use stowage_runtime::clock;

use crate::ec2::launch::request::tests::{claim, class, request};
use crate::ec2::node_class::subnets::Subnet;
use crate::ec2::provider::tests::fake_ec2::{
    failed_override, fresh, ids, inherited, inherited_member, launch_all, member, world,
};
use crate::test_support::fake_aws;
use crate::{Cloud, InstanceState, LaunchError, Launched};

#[tokio::test]
async fn a_claim_becomes_an_instance() {
    let world = world();
    let launched = world.ec2.launch(fresh()).await.unwrap();
    let instance = &launched.instance;
    assert_eq!(instance.provider_id, "aws:///us-east-1a/i-00000000000000001");
    assert_eq!((&*instance.client_token, &*instance.node_claim, &*instance.image_id), ("uid-1", "claim-1", "ami-x86"));
    assert_eq!((instance.capacity_type, instance.state), (CapacityType::OnDemand, InstanceState::Pending));
    assert_eq!(world.fake().tokens, ["uid-1"]);
    assert_eq!(world.ec2.clients.attempts()["CreateFleet"], 1);
    assert!(!world.ec2.clients.attempts().contains_key("DescribeInstances"), "a new group has no instances to find");
}

#[tokio::test]
async fn a_lost_response_launches_nothing_twice() {
    let world = world();
    world.fake().lose_responses = true;
    let error = world.ec2.launch(fresh()).await.unwrap_err();
    assert!(matches!(error, LaunchError::Other { .. }), "{error}");
    assert!(world.fake().tokens.iter().all(|token| token == "uid-1"), "every attempt has the same token");
    world.fake().lose_responses = false;
    let before = world.fake().tokens.len();
    let launched = world.ec2.launch(fresh()).await.unwrap();
    assert_eq!(launched.instance.id, "i-00000000000000001");
    assert_eq!(world.fake().tokens.len(), before, "found by its tag, without another call");
}

#[tokio::test]
async fn claims_of_a_group_share_a_call_and_get_one_instance_each() {
    let world = world();
    let uids: Vec<String> = (0..50).map(|number| format!("u{number}")).collect();
    let requests = || uids.iter().map(|uid| member(uid, "group", 50)).collect::<Vec<_>>();
    let results = launch_all(&world, requests()).await;
    assert_eq!((ids(&results).len(), world.ec2.clients.attempts()["CreateFleet"]), (50, 1));
    assert_eq!(results[7].as_ref().unwrap().instance.node_claim, "claim-u7");
    let again = launch_all(&world, requests()).await;
    let id = |result: &Result<Launched, LaunchError>| result.as_ref().unwrap().instance.id.clone();
    assert!(
        results.iter().zip(&again).all(|(first, second)| id(first) == id(second)),
        "assignments are kept until they are written to the claims"
    );
    assert_eq!(world.ec2.clients.attempts()["CreateFleet"], 1);
}

#[tokio::test]
async fn claims_without_an_instance_of_a_partial_launch_get_an_error() {
    let world = world();
    world.fake().max_launched = Some(2);
    let requests = ["a", "b", "c"].map(|uid| member(uid, "group", 3)).to_vec();
    let results = launch_all(&world, requests).await;
    assert_eq!(ids(&results).len(), 2);
    assert!(matches!(results[2], Err(LaunchError::InsufficientCapacity { .. })), "{:?}", results[2]);
    world.fake().max_launched = None;
    world.ec2.launch(member("c", "group", 3)).await.unwrap();
    assert_eq!(world.fake().tokens, ["group", "group-1"]);
    assert_eq!(world.fake().instances.len(), 3);
}

#[tokio::test]
async fn a_group_takes_over_instances_of_a_lost_response() {
    for hidden in [false, true] {
        let world = world();
        world.fake().lose_responses = true;
        let requests = || ["a", "b", "c"].map(|uid| member(uid, "group", 3)).to_vec();
        assert!(ids(&launch_all(&world, requests()).await).is_empty());
        world.fake().lose_responses = false;
        world.fake().hide_instances = hidden;
        // One claim is retried before the others: the same call is repeated, or its instances are found.
        let first = world.ec2.launch(member("b", "group", 3)).await.unwrap();
        let mut all = ids(&launch_all(&world, vec![member("a", "group", 3), member("c", "group", 3)]).await);
        all.insert(first.instance.id);
        assert_eq!((all.len(), world.fake().instances.len()), (3, 3), "hidden: {hidden}");
        assert!(world.fake().tokens.iter().all(|token| token == "group"));
    }
}

#[tokio::test]
async fn after_a_crash_claims_without_an_instance_get_the_instances_of_their_group() {
    let world = world();
    for id in ["i-a", "i-b"] {
        world.fake().instances.push((id.into(), "group".into(), "running"));
    }
    // i-a was written to its claim before the crash; the third claim was never launched.
    let requests = ["b", "c"].map(|uid| inherited_member(uid, "group", 3, &["i-a"])).to_vec();
    let results = launch_all(&world, requests).await;
    assert_eq!(ids(&results), BTreeSet::from(["i-b".to_owned(), "i-00000000000000003".to_owned()]));
    assert_eq!(world.fake().tokens, ["group"]);
}

#[tokio::test]
async fn after_a_crash_instances_that_are_not_described_yet_are_awaited() {
    let world = world();
    world.fake().by_token.insert("group".into(), ("3".into(), String::new()));
    let requests = || ["b", "c"].map(|uid| inherited_member(uid, "group", 3, &[])).to_vec();
    let results = launch_all(&world, requests()).await;
    assert!(results.iter().all(|result| result.as_ref().is_err_and(|error| error.to_string().contains("waiting"))));
    for id in ["i-a", "i-b"] {
        world.fake().instances.push((id.into(), "group".into(), "pending"));
    }
    assert_eq!(ids(&launch_all(&world, requests()).await).len(), 2);
    assert_eq!(world.fake().instances.len(), 2, "no further instance is launched");
}

#[tokio::test]
async fn a_crash_after_the_call_launches_nothing_twice() {
    let world = world();
    world.fake().instances.push(("i-0000000000000000a".into(), "uid-1".into(), "running"));
    let launched = world.ec2.launch(inherited()).await.unwrap();
    assert_eq!(launched.instance.id, "i-0000000000000000a");
    assert!(world.fake().tokens.is_empty());
}

#[tokio::test]
async fn instances_of_a_claim_are_found_by_group_before_ec2_describes_them() {
    let world = world();
    let requests = ["a", "b"].map(|uid| member(uid, "group", 2)).to_vec();
    let launched = ids(&launch_all(&world, requests).await);
    world.ec2.launch(fresh()).await.unwrap();
    let member = member("a", "group", 2);
    let found = async || -> BTreeSet<String> {
        let found = world.ec2.launched_for(&member.details.as_ref().unwrap().claim).await.unwrap();
        found.into_iter().map(|instance| instance.id).collect()
    };
    assert_eq!(found().await, launched);
    world.fake().hide_instances = true;
    assert_eq!(found().await, launched);
}

#[tokio::test]
async fn a_token_used_with_other_parameters_waits_for_its_instance() {
    let world = world();
    world.fake().scripted.push(fake_aws::error("IdempotentParameterMismatch", "other parameters"));
    let error = world.ec2.launch(inherited()).await.unwrap_err();
    assert!(error.to_string().contains("waiting"), "{error}");
    world.fake().instances.push(("i-0000000000000000b".into(), "uid-1".into(), "pending"));
    assert_eq!(world.ec2.launch(inherited()).await.unwrap().instance.id, "i-0000000000000000b");
}

#[tokio::test]
async fn c17_an_externally_deleted_template_is_created_again() {
    let world = world();
    world.ec2.launch(fresh()).await.unwrap();
    world.fake().templates.clear();
    world.ec2.launch(member("uid-2", "uid-2", 1)).await.unwrap();
    assert_eq!(world.ec2.clients.attempts()["CreateLaunchTemplate"], 2);
    assert_eq!(world.fake().instances.len(), 2);
}

#[tokio::test]
async fn c11_insufficient_capacity_is_reported_at_once_and_recorded() {
    let world = world();
    world.fake().scripted.push(failed_override("InsufficientInstanceCapacity"));
    let request = fresh();
    let error = world.ec2.launch(request.clone()).await.unwrap_err();
    let LaunchError::InsufficientCapacity { unavailable } = error else { panic!("{error}") };
    assert_eq!(unavailable, [request.overrides[0].clone()]);
    assert!(world.ec2.offerings.unavailable().is_unavailable(&unavailable[0], None, clock::now()));
    world.ec2.launch(request).await.unwrap();
    assert_eq!(world.fake().tokens, ["uid-1", "uid-1-1"], "a token with a response is not used again");
}

#[tokio::test]
async fn c12_any_other_error_is_a_rejection_with_its_reason() {
    let world = world();
    world.fake().scripted.push(failed_override("UnauthorizedOperation"));
    let error = world.ec2.launch(fresh()).await.unwrap_err();
    assert!(matches!(error, LaunchError::Rejected { event: events::UNAUTHORIZED, .. }), "{error}");
    world.fake().scripted.push(fake_aws::error("UnauthorizedOperation", "no"));
    let error = world.ec2.launch(fresh()).await.unwrap_err();
    assert!(matches!(error, LaunchError::Rejected { event: events::UNAUTHORIZED, .. }), "{error}");
}

#[tokio::test]
async fn c15_the_launch_after_an_exhausted_subnet_uses_another_subnet() {
    let world = world();
    let subnets = ["subnet-a", "subnet-c"].map(|id| json!({"id": id, "zone": "us-east-1a"}));
    let mut class = class(json!({}));
    class.status.as_mut().unwrap().subnets = subnets.map(|subnet| serde_json::from_value(subnet).unwrap()).into();
    let third = Subnet { id: "subnet-c".into(), zone: "us-east-1a".into(), zone_id: None, free: 50 };
    world.ec2.node_classes.with_addresses(|addresses| addresses.set_described(&[third]));
    world.fake().scripted.push(failed_override("InsufficientFreeAddressesInSubnet"));
    let request = request(class.clone(), claim("2026-01-01T00:00:00Z", json!({})), &["m5.large"]);
    world.ec2.launch(request).await.unwrap_err();
    let pods = [("us-east-1a".to_owned(), 10)].into();
    let subnets = &class.status.as_ref().unwrap().subnets;
    let chosen = world.ec2.node_classes.with_addresses(|addresses| addresses.reserve(subnets, &pods, 1)).by_zone;
    assert_eq!(chosen["us-east-1a"], "subnet-c");
    let marks = world.ec2.offerings.unavailable();
    assert!(
        marks.exhausted_zones(&class.status.unwrap().subnets, clock::now()).is_empty(),
        "the zone has another subnet"
    );
}
