//! Tests of [`super`]: what a claim may be launched as, and what it says afterwards.

use super::*;
use crate::cloud::InstanceState;
use crate::cloud::reservation::ReservationKind;
use crate::model::offering::CapacityType;
use crate::test_support::objects;

fn found(partitions: &[&str]) -> Arc<InstanceType> {
    let offering = |partition: &&str| Offering {
        zone: "z".into(),
        capacity_type: CapacityType::OnDemand,
        price: MicroUsd(1),
        available: true,
        left: None,
        labels: Arc::new([(labels::PLACEMENT_GROUP_PARTITION.to_owned(), (*partition).to_owned())].into()),
        risk_permille: 0,
    };
    Arc::new(InstanceType {
        name: "m5.large".into(),
        labels: BTreeMap::new(),
        capacity: Resources::default(),
        allocatable: Resources::default(),
        volume_limits: BTreeMap::new(),
        offerings: partitions.iter().map(offering).collect(),
    })
}

fn instance(partition: Option<i32>) -> Instance {
    Instance { partition, state: InstanceState::Pending, ..objects::instance("i-1", "", 0) }
}

#[test]
fn only_what_was_launched_into_a_reservation_has_its_labels() {
    let reservation = ReservedIn { id: "cr-1".into(), kind: ReservationKind::CapacityBlock };
    let reserved = Instance { capacity_type: CapacityType::Reserved, reservation: Some(reservation), ..instance(None) };
    let lines = |instance: &Instance| {
        let found = instance_labels(Some(&found(&[])), instance);
        found.into_iter().map(|(key, value)| format!("{key}={value}")).collect::<Vec<_>>().join("\n")
    };
    insta::assert_snapshot!(lines(&reserved), @r"
    karpenter.k8s.aws/capacity-reservation-id=cr-1
    karpenter.k8s.aws/capacity-reservation-interruptible=false
    karpenter.k8s.aws/capacity-reservation-type=capacity-block
    karpenter.sh/capacity-type=reserved
    node.kubernetes.io/instance-type=m5.large
    topology.kubernetes.io/zone=z
    ");
    insta::assert_snapshot!(lines(&instance(None)), @r"
    karpenter.sh/capacity-type=on-demand
    node.kubernetes.io/instance-type=m5.large
    topology.kubernetes.io/zone=z
    ");
}

#[test]
fn c10_a_claim_that_says_no_capacity_type_admits_all() {
    let kinds = [CapacityType::OnDemand, CapacityType::Spot, CapacityType::Reserved];
    let mut m5 = InstanceType::clone(&found(&["1"]));
    let one = m5.offerings[0].clone();
    m5.offerings = kinds.iter().map(|kind| Offering { capacity_type: *kind, ..one.clone() }).collect();
    let catalog = Catalog { region: "r".into(), instance_types: vec![Arc::new(m5)] };
    let admitted = |requirements: serde_json::Value| {
        let claim = objects::claim("c", &json!({"spec": {"requirements": requirements}}));
        let found = acceptable(&claim, &catalog);
        found.into_iter().map(|offering| offering.capacity_type).collect::<std::collections::BTreeSet<_>>()
    };
    assert_eq!(admitted(json!([])), kinds.into());
    let spot = json!([{"key": labels::CAPACITY_TYPE, "operator": "In", "values": ["spot"]}]);
    assert_eq!(admitted(spot), [CapacityType::Spot].into());
}

#[test]
fn c28_efa_is_promised_only_where_the_instance_was_launched_with_it() {
    let mut found = InstanceType::clone(&found(&[]));
    for room in [&mut found.capacity, &mut found.allocatable] {
        room.set(EFA, 4);
        room.set("cpu", 8_000);
    }
    let claim = |requests: serde_json::Value| -> NodeClaim {
        objects::claim("c", &json!({"spec": {"resources": {"requests": requests}}}))
    };
    let class = |kinds: &[&str]| -> Ec2NodeClass {
        let interface = |(device, kind): (usize, &&str)| json!({"networkCardIndex": 0, "deviceIndex": device, "interfaceType": kind});
        let interfaces: Vec<_> = kinds.iter().enumerate().map(interface).collect();
        objects::node_class("default", &json!({"spec": {"networkInterfaces": interfaces}}))
    };
    for (what, requests, kinds, efa) in [
        ("plain", json!({"cpu": "1"}), &[][..], false),
        ("asked for", json!({(EFA): "1"}), &[], true),
        ("none asked for", json!({(EFA): "0"}), &[], false),
        ("listed", json!({}), &["interface", "efa-only"], true),
        ("others listed", json!({}), &["interface"], false),
    ] {
        let (capacity, allocatable) = room(&found, &claim(requests), &class(kinds));
        let promised = [&capacity, &allocatable].map(|room| room.to_map().contains_key(EFA));
        assert_eq!(promised, [efa, efa], "{what}");
        assert!(capacity.to_map().contains_key("cpu"), "{what}");
    }
}

#[test]
fn a_partition_that_is_yet_to_be_told_is_an_empty_label_and_none_is_none() {
    let label =
        |partitions: &[&str], told| partition(Some(&found(partitions)), &instance(told)).map(|(_, value)| value);
    assert_eq!(label(&["1", "2"], Some(2)).as_deref(), Some("2"));
    assert_eq!(label(&["1", "2"], None).as_deref(), Some(""));
    assert_eq!(label(&[], None), None, "no partitions");
    let claim = |value: Option<&str>| -> NodeClaim {
        let own: BTreeMap<&str, &str> = value.iter().map(|value| (labels::PLACEMENT_GROUP_PARTITION, *value)).collect();
        objects::claim("c", &json!({"metadata": {"labels": own}}))
    };
    assert!(lacks_partition(&claim(Some(""))));
    assert!(!lacks_partition(&claim(Some("2"))) && !lacks_partition(&claim(None)));
}

#[test]
fn c12_c13_what_becomes_of_a_claim_depends_on_why_it_was_not_launched() {
    let offering =
        Override { instance_type: "m5.large".into(), zone: "z".into(), capacity_type: CapacityType::OnDemand };
    let rejected = |reason| LaunchError::Rejected { reason, message: "m".into() };
    let not_ready = LaunchError::NodeClassNotReady { name: "n".into(), reason: "no subnets".into() };
    let full = "1 offerings are out of capacity; its pods are planned anew";
    for (error, expected, event, why) in [
        (
            LaunchError::InsufficientCapacity { unavailable: vec![offering] },
            Fate::Deleted("insufficient_capacity"),
            Some("InsufficientCapacityError"),
            full,
        ),
        (
            LaunchError::NoSpotRole,
            Fate::Deleted("insufficient_capacity"),
            Some("SpotSLRCreationFailed"),
            "the account lacks the service-linked role of EC2 spot",
        ),
        (not_ready, Fate::Deleted("nodeclass_not_ready"), None, "EC2NodeClass n is not ready: no subnets"),
        (rejected("Unauthorized"), Fate::Kept("Unauthorized"), Some("Unauthorized"), "m"),
        (
            rejected("NodeClassReadinessUnknown"),
            Fate::Kept("NodeClassReadinessUnknown"),
            Some("NodeClassReadinessUnknown"),
            "m",
        ),
        (LaunchError::Throttled, Fate::Kept("RequestLimitExceeded"), Some("LaunchFailed"), "request rate exceeded"),
        (LaunchError::other("no answer"), Fate::Kept("LaunchFailed"), Some("LaunchFailed"), "launch failed: no answer"),
        (
            LaunchError::Other { reason: "InternalError", message: "ec2:CreateFleet: InternalError: oh".into() },
            Fate::Kept("InternalError"),
            Some("LaunchFailed"),
            "launch failed: ec2:CreateFleet: InternalError",
        ),
    ] {
        let (fate, told, text) = outcome(&error);
        assert_eq!((fate, told), (expected, event), "{error}");
        assert!(text.starts_with(why), "{text}");
    }
}

#[test]
fn c12_a_claim_that_is_kept_says_that_it_is_not_known_to_be_launched() {
    let claim = objects::claim("c", &json!({"metadata": {"generation": 1}}));
    let now = Time("2026-01-01T00:00:00Z".parse().unwrap());
    let list = unlaunched(&claim, "Unauthorized", "not permitted", &now);
    let launched = list.iter().find(|condition| condition.type_ == LAUNCHED).unwrap();
    let said = [&launched.status, &launched.reason, &launched.message].map(String::as_str);
    assert_eq!(said, ["Unknown", "Unauthorized", "not permitted"]);
    let again = NodeClaim {
        status: Some(crate::api::NodeClaimStatus { conditions: list.clone(), ..Default::default() }),
        ..claim
    };
    let later = Time("2026-01-01T00:01:00Z".parse().unwrap());
    for message in ["not permitted", "not permitted Encoded authorization failure message: a"] {
        assert_eq!(unlaunched(&again, "Unauthorized", message, &later), list, "nothing to write the second time");
    }
    assert_ne!(unlaunched(&again, "RequestLimitExceeded", "not permitted", &later), list);
}

#[test]
fn c12_what_is_told_of_a_failure_without_a_name_is_short() {
    for (what, why, expected) in [
        ("short", "m".to_owned(), "m".to_owned()),
        ("long", "x".repeat(400), "x".repeat(300)),
        ("just fits", "x".repeat(300), "x".repeat(300)),
        ("no half characters", format!("x{}", "ü".repeat(200)), format!("x{}", "ü".repeat(149))),
        ("empty", String::new(), String::new()),
    ] {
        assert_eq!(brief(&why), expected, "{what}");
    }
}
