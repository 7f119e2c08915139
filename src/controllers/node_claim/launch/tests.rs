//! Tests of [`super`]: the offerings a claim may be launched as, and what is written to it afterwards.

use stowage_cloud::InstanceState;
use stowage_model::offering::{CapacityType, Offering};
use stowage_model::reservation::ReservationKind;
use stowage_model::time::UnixMillis;
use stowage_test_objects as objects;

use super::*;

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
    Instance {
        id: "i-1".into(),
        provider_id: "aws:///z/i-1".into(),
        client_token: String::new(),
        node_claim: String::new(),
        instance_type: "m5.large".into(),
        zone: "z".into(),
        capacity_type: CapacityType::OnDemand,
        reservation: None,
        partition,
        image_id: "ami-1".into(),
        launched_at: UnixMillis(0),
        state: InstanceState::Pending,
    }
}

#[test]
fn only_an_instance_in_a_reservation_has_its_labels() {
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
fn c10_a_claim_without_capacity_type_admits_all() {
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
fn a_claim_admits_no_offering_above_its_maximum_price() {
    let mut m5 = InstanceType::clone(&found(&["1"]));
    let one = m5.offerings[0].clone();
    let at = |price| Offering { price: MicroUsd(price), zone: price.to_string().into(), ..one.clone() };
    m5.offerings = [40_000, 48_000, 48_001].map(at).into();
    let catalog = Catalog { region: "r".into(), instance_types: vec![Arc::new(m5)] };
    let admitted = |annotations: serde_json::Value| {
        let claim =
            objects::claim("c", &json!({"metadata": {"annotations": annotations}, "spec": {"requirements": []}}));
        acceptable(&claim, &catalog).into_iter().map(|offering| offering.zone).collect::<Vec<_>>()
    };
    assert_eq!(admitted(json!({(labels::MAX_PRICE): "0.048000"})), ["40000", "48000"]);
    assert_eq!(admitted(json!({(labels::MAX_PRICE): "0.01"})).len(), 0);
    for unreadable in [json!({}), json!({(labels::MAX_PRICE): "cheap"}), json!({(labels::MAX_PRICE): "NaN"})] {
        assert_eq!(admitted(unreadable).len(), 3);
    }
}

#[test]
fn c28_efa_is_promised_only_if_the_instance_was_launched_with_it() {
    let mut found = InstanceType::clone(&found(&[]));
    for room in [&mut found.capacity, &mut found.allocatable] {
        room.set(EFA, 4);
        room.set("cpu", 8_000);
    }
    let claim =
        |requests: serde_json::Value| objects::claim("c", &json!({"spec": {"resources": {"requests": requests}}}));
    let class = |kinds: &[&str]| -> Ec2NodeClass {
        let interface = |(device, kind): (usize, &&str)| json!({"networkCardIndex": 0, "deviceIndex": device, "interfaceType": kind});
        let interfaces: Vec<_> = kinds.iter().enumerate().map(interface).collect();
        serde_json::from_value(
            json!({"apiVersion": "karpenter.k8s.aws/v1", "kind": "EC2NodeClass", "metadata": {"name": "n"},
            "spec": {"amiSelectorTerms": [], "networkInterfaces": interfaces}}),
        )
        .unwrap()
    };
    for (case, requests, kinds, efa) in [
        ("plain", json!({"cpu": "1"}), &[][..], false),
        ("requested", json!({(EFA): "1"}), &[], true),
        ("zero requested", json!({(EFA): "0"}), &[], false),
        ("listed by the class", json!({}), &["interface", "efa-only"], true),
        ("other interfaces listed", json!({}), &["interface"], false),
    ] {
        let (capacity, allocatable) = capacity_and_allocatable(&found, &claim(requests), &class(kinds));
        let promised = [&capacity, &allocatable].map(|room| room.to_map().contains_key(EFA));
        assert_eq!(promised, [efa, efa], "{case}");
        assert!(capacity.to_map().contains_key("cpu"), "{case}");
    }
}

#[test]
fn an_unknown_partition_is_an_empty_label_and_no_partition_is_no_label() {
    let label =
        |partitions: &[&str], number| partition(Some(&found(partitions)), &instance(number)).map(|(_, value)| value);
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
fn c12_c13_the_disposition_of_a_claim_depends_on_the_launch_error() {
    let offering =
        Override { instance_type: "m5.large".into(), zone: "z".into(), capacity_type: CapacityType::OnDemand };
    let rejected = |event| LaunchError::Rejected { event, message: "m".into() };
    let not_ready = LaunchError::NodeClassNotReady { name: "n".into(), reason: "no subnets".into() };
    let full = "all 1 offerings returned insufficient capacity; its pods will be re-planned";
    for (error, expected, event, why) in [
        (
            LaunchError::InsufficientCapacity { unavailable: vec![offering] },
            LaunchDisposition::Delete(DisruptionReason::InsufficientCapacity),
            Some(events::INSUFFICIENT_CAPACITY_ERROR),
            full,
        ),
        (
            LaunchError::NoSpotRole,
            LaunchDisposition::Delete(DisruptionReason::InsufficientCapacity),
            Some(events::SPOT_SLR_CREATION_FAILED),
            "the account lacks the service-linked role of EC2 spot",
        ),
        (
            not_ready,
            LaunchDisposition::Delete(DisruptionReason::NodeClassNotReady),
            None,
            "EC2NodeClass n is not ready: no subnets",
        ),
        (rejected(events::UNAUTHORIZED), LaunchDisposition::Retry("Unauthorized"), Some(events::UNAUTHORIZED), "m"),
        (
            rejected(events::NODE_CLASS_READINESS_UNKNOWN),
            LaunchDisposition::Retry("NodeClassReadinessUnknown"),
            Some(events::NODE_CLASS_READINESS_UNKNOWN),
            "m",
        ),
        (
            LaunchError::Throttled,
            LaunchDisposition::Retry("RequestLimitExceeded"),
            Some(events::LAUNCH_FAILED),
            "request rate exceeded",
        ),
        (
            LaunchError::other("no answer"),
            LaunchDisposition::Retry("LaunchFailed"),
            Some(events::LAUNCH_FAILED),
            "launch failed: no answer",
        ),
        (
            LaunchError::Other { reason: "InternalError", message: "ec2:CreateFleet: InternalError: oh".into() },
            LaunchDisposition::Retry("InternalError"),
            Some(events::LAUNCH_FAILED),
            "launch failed: ec2:CreateFleet: InternalError",
        ),
    ] {
        let failure = LaunchFailure::of(&error);
        assert_eq!((failure.disposition, failure.event), (expected, event), "{error}");
        assert!(failure.message.starts_with(why), "{}", failure.message);
    }
}

#[test]
fn c12_a_retried_claim_has_an_unknown_launched_condition() {
    let claim = objects::claim("c", &json!({"metadata": {"generation": 1}}));
    let now = UnixMillis::parse_rfc3339("2026-01-01T00:00:00Z").unwrap();
    let list = unlaunched_conditions(&claim, "Unauthorized", "not permitted", now).unwrap();
    let launched = list.iter().find(|condition| condition.type_ == LAUNCHED).unwrap();
    let written = [&launched.status, &launched.reason, &launched.message].map(String::as_str);
    assert_eq!(written, ["Unknown", "Unauthorized", "not permitted"]);
    let again = NodeClaim {
        status: Some(stowage_api::node_claim::NodeClaimStatus { conditions: list.clone(), ..Default::default() }),
        ..claim
    };
    let later = UnixMillis::parse_rfc3339("2026-01-01T00:01:00Z").unwrap();
    for message in ["not permitted", "not permitted Encoded authorization failure message: a"] {
        assert_eq!(unlaunched_conditions(&again, "Unauthorized", message, later), None, "nothing to write");
    }
    assert!(unlaunched_conditions(&again, "RequestLimitExceeded", "not permitted", later).is_some());
}

#[test]
fn c12_the_message_of_an_unclassified_failure_is_short() {
    for (case, message, expected) in [
        ("short", "m".to_owned(), "m".to_owned()),
        ("long", "x".repeat(400), "x".repeat(300)),
        ("just fits", "x".repeat(300), "x".repeat(300)),
        ("no half characters", format!("x{}", "ü".repeat(200)), format!("x{}", "ü".repeat(149))),
        ("empty", String::new(), String::new()),
    ] {
        assert_eq!(brief(&message), expected, "{case}");
    }
}
