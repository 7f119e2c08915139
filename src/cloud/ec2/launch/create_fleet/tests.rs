use stowage_model::events;

use super::*;
use crate::test_support::fake_aws;

fn slot(instance_type: &str, zone: &str, price: i64) -> FleetOverride {
    FleetOverride {
        instance_type: instance_type.into(),
        zone: zone.into(),
        subnet: format!("subnet-{zone}"),
        image: "ami-1".into(),
        price: MicroUsd(price),
    }
}

fn request(capacity_type: CapacityType) -> FleetRequest {
    FleetRequest {
        token: "uid".into(),
        count: 1,
        context: None,
        capacity_type,
        reservation: None,
        prioritized: false,
        templates: vec![
            ("lt-a".into(), vec![slot("m5.large", "1a", 96_000), slot("m5.large", "1b", 96_000)]),
            ("lt-b".into(), vec![slot("m5.xlarge", "1a", 192_000)]),
        ],
        tags: BTreeMap::from([("karpenter.sh/nodepool".to_owned(), "default".to_owned())]),
        instance_tags: BTreeMap::from([(LAUNCH_TAG.to_owned(), "uid".to_owned())]),
    }
}

async fn sent(request: &FleetRequest) -> BTreeMap<String, String> {
    let (clients, seen) = fake_aws::clients(Box::new(|_| fake_aws::ok("CreateFleet", "<fleetId>fleet-1</fleetId>")));
    request.input().send_with(&clients.ec2).await.unwrap();
    let seen = seen.lock().unwrap();
    seen[0].form.clone()
}

#[tokio::test]
async fn the_example_of_the_reference_is_sent() {
    let form = sent(&request(CapacityType::OnDemand)).await;
    for (key, value) in [
        ("Type", "instant"),
        ("ClientToken", "uid"),
        ("TargetCapacitySpecification.TotalTargetCapacity", "1"),
        ("TargetCapacitySpecification.DefaultTargetCapacityType", "on-demand"),
        ("OnDemandOptions.AllocationStrategy", "lowest-price"),
        ("LaunchTemplateConfigs.1.LaunchTemplateSpecification.LaunchTemplateName", "lt-a"),
        ("LaunchTemplateConfigs.1.LaunchTemplateSpecification.Version", "$Latest"),
        ("LaunchTemplateConfigs.1.Overrides.1.InstanceType", "m5.large"),
        ("LaunchTemplateConfigs.1.Overrides.1.SubnetId", "subnet-1a"),
        ("LaunchTemplateConfigs.1.Overrides.1.ImageId", "ami-1"),
        ("LaunchTemplateConfigs.1.Overrides.1.AvailabilityZone", "1a"),
        ("LaunchTemplateConfigs.1.Overrides.1.Priority", "0.096"),
        ("LaunchTemplateConfigs.1.Overrides.2.AvailabilityZone", "1b"),
        ("LaunchTemplateConfigs.2.Overrides.1.InstanceType", "m5.xlarge"),
    ] {
        assert_eq!(form.get(key).map(String::as_str), Some(value), "{key}");
    }
    assert!(!form.contains_key("SpotOptions.AllocationStrategy") && !form.contains_key("Context"));
}

#[tokio::test]
async fn c19_instance_volume_and_fleet_are_tagged_and_the_instance_with_its_claim() {
    let form = sent(&request(CapacityType::Spot)).await;
    let tags = |number: usize| {
        let kind = form[&format!("TagSpecification.{number}.ResourceType")].clone();
        let prefix = format!("TagSpecification.{number}.Tag.");
        let keys = form.iter().filter(|(key, _)| key.starts_with(&prefix) && key.ends_with(".Key"));
        (kind, keys.map(|(_, value)| value.clone()).collect::<Vec<_>>())
    };
    let pool = "karpenter.sh/nodepool".to_owned();
    assert_eq!(tags(1), ("instance".into(), vec![pool.clone(), LAUNCH_TAG.into()]));
    assert_eq!(tags(2), ("volume".into(), vec![pool.clone()]));
    assert_eq!(tags(3), ("fleet".into(), vec![pool]));
}

#[tokio::test]
async fn claims_of_a_group_share_a_call_and_the_group_tag() {
    let mut fleet = request(CapacityType::OnDemand);
    fleet.instance_tags = BTreeMap::from([(CLAIM_TAG.to_owned(), "claim-1".to_owned())]);
    let mut alone = fleet.clone();
    alone.for_launch_group(&LaunchGroup { id: "uid-1".into(), size: 1 }, 1);
    assert_eq!((alone.instance_tags.len(), &*alone.instance_tags[LAUNCH_TAG]), (2, "uid-1"), "a single claim is named");
    fleet.for_launch_group(&LaunchGroup { id: "group".into(), size: 200 }, 150);
    let form = sent(&fleet).await;
    assert_eq!(form["TargetCapacitySpecification.TotalTargetCapacity"], "150");
    assert_eq!(
        (&*form["TagSpecification.1.Tag.2.Key"], &*form["TagSpecification.1.Tag.2.Value"]),
        (LAUNCH_TAG, "group")
    );
    assert!(!form.contains_key("TagSpecification.1.Tag.3.Key"), "no claim is named");
}

#[tokio::test]
async fn spot_and_overlaid_prices_choose_the_strategy() {
    let form = sent(&request(CapacityType::Spot)).await;
    assert_eq!(form["SpotOptions.AllocationStrategy"], "price-capacity-optimized");
    assert_eq!(form["TargetCapacitySpecification.DefaultTargetCapacityType"], "spot");
    let overlaid = FleetRequest { prioritized: true, context: Some("c".into()), ..request(CapacityType::Spot) };
    let form = sent(&overlaid).await;
    assert_eq!((&*form["SpotOptions.AllocationStrategy"], &*form["Context"]), ("capacity-optimized-prioritized", "c"));
    let overlaid = FleetRequest { prioritized: true, ..request(CapacityType::OnDemand) };
    assert_eq!(sent(&overlaid).await["OnDemandOptions.AllocationStrategy"], "prioritized");
}

/// A request for an instance in a reservation.
fn reserved(kind: ReservationKind) -> FleetRequest {
    FleetRequest { reservation: Some(ReservedIn { id: "cr-1".into(), kind }), ..request(CapacityType::Reserved) }
}

#[tokio::test]
async fn c40_the_request_depends_on_the_kind_of_reservation() {
    let target = "TargetCapacitySpecification.DefaultTargetCapacityType";
    let form = sent(&reserved(ReservationKind::OnDemand)).await;
    assert_eq!((&*form[target], &*form["OnDemandOptions.AllocationStrategy"]), ("on-demand", "lowest-price"));
    let form = sent(&reserved(ReservationKind::CapacityBlock)).await;
    assert_eq!(form[target], "capacity-block");
    assert!(!form.keys().any(|key| key.starts_with("OnDemandOptions") || key.starts_with("SpotOptions")));
    let form = sent(&reserved(ReservationKind::Interruptible)).await;
    assert_eq!(form[target], "reserved-capacity");
    let options: Vec<&str> =
        form.iter().filter(|(key, _)| key.starts_with("ReservedCapacityOptions")).map(|(_, value)| &**value).collect();
    assert_eq!(options, ["interruptible-capacity-reservation"]);
    assert!(!form.keys().any(|key| key.starts_with("OnDemandOptions")));
}

async fn response(inner: &'static str) -> FleetResponse {
    let (clients, _) = fake_aws::clients(Box::new(move |_| fake_aws::ok("CreateFleet", inner)));
    let request = request(CapacityType::OnDemand);
    let output = request.input().send_with(&clients.ec2).await.unwrap();
    FleetResponse::read(&output, &request)
}

#[tokio::test]
async fn instances_and_errors_of_a_response_are_both_read() {
    let read = response(
        "<fleetInstanceSet><item><instanceIds><item>i-1</item></instanceIds><instanceType>m5.xlarge</instanceType>\
         <launchTemplateAndOverrides><overrides><subnetId>subnet-1a</subnetId><availabilityZone>1a</availabilityZone>\
         <imageId>ami-9</imageId></overrides></launchTemplateAndOverrides></item></fleetInstanceSet>\
         <errorSet><item><errorCode>InsufficientInstanceCapacity</errorCode><errorMessage>none</errorMessage>\
         <launchTemplateAndOverrides><overrides><instanceType>m5.large</instanceType><subnetId>subnet-1b</subnetId></overrides>\
         </launchTemplateAndOverrides></item></errorSet>",
    )
    .await;
    let launched = LaunchedInstance {
        id: "i-1".into(),
        instance_type: "m5.xlarge".into(),
        zone: "1a".into(),
        subnet: Some("subnet-1a".into()),
        image: "ami-9".into(),
    };
    assert_eq!(read.launched, [launched]);
    assert_eq!(read.errors[0].zone.as_deref(), Some("1b"), "the zone of the subnet, where the response has none");
    assert!(!read.lacks_template());
}

#[tokio::test]
async fn fields_missing_in_a_response_are_those_of_the_request() {
    let read = response(
        "<fleetInstanceSet><item><instanceIds><item>i-1</item></instanceIds><instanceType>m5.xlarge</instanceType></item></fleetInstanceSet>",
    )
    .await;
    assert_eq!((&*read.launched[0].zone, &*read.launched[0].image), ("1a", "ami-1"));
}

fn error(code: &str, instance_type: &str, zone: &str) -> FleetError {
    let some = |text: &str| (!text.is_empty()).then(|| text.to_owned());
    FleetError {
        code: code.into(),
        message: "m".into(),
        instance_type: some(instance_type),
        zone: some(zone),
        subnet: some(zone).map(|zone| format!("subnet-{zone}")),
    }
}

fn offering(instance_type: &str, zone: &str, capacity_type: CapacityType) -> Override {
    Override { instance_type: instance_type.into(), zone: zone.into(), capacity_type }
}

#[test]
fn c11_an_error_marks_its_own_offering() {
    let request = request(CapacityType::Spot);
    let errors = [error("InsufficientInstanceCapacity", "m5.xlarge", "1a")];
    let feedback = CapacityFeedback::of_errors(&errors, &request, None);
    assert_eq!(feedback.marks, [CapacityScope::Offering(offering("m5.xlarge", "1a", CapacityType::Spot), None)]);
    assert!(
        CapacityFeedback::of_errors(&[error("InsufficientInstanceCapacity", "", "")], &request, None).marks.is_empty()
    );
    let grouped = CapacityFeedback::of_errors(&errors, &request, Some("pg-1"));
    assert!(matches!(&grouped.marks[..], [CapacityScope::Offering(_, Some(group))] if group == "pg-1"));
    let LaunchError::InsufficientCapacity { unavailable } = failure(&errors, &grouped) else { panic!("capacity") };
    assert_eq!(unavailable, [], "the controller marks what it receives for every placement group");
}

#[test]
fn c12_only_unfulfillable_errors_make_an_insufficient_capacity_error() {
    let request = request(CapacityType::OnDemand);
    let fail = |errors: &[FleetError]| failure(errors, &CapacityFeedback::of_errors(errors, &request, None));
    let none = [error("InsufficientInstanceCapacity", "m5.large", "1a"), error("VcpuLimitExceeded", "m5.xlarge", "1a")];
    let LaunchError::InsufficientCapacity { unavailable } = fail(&none) else { panic!("capacity") };
    assert_eq!(unavailable.len(), 2);
    let mixed = [none[0].clone(), error("UnauthorizedOperation", "m5.large", "1b")];
    let LaunchError::Rejected { event, message } = fail(&mixed) else { panic!("rejected") };
    assert_eq!(event, events::UNAUTHORIZED);
    assert_eq!(message, "InsufficientInstanceCapacity: m; UnauthorizedOperation: m");
}

#[test]
fn fewer_instances_without_a_named_offering_are_insufficient_capacity() {
    let unnamed = |code: &str| error(code, "", "");
    let mut request = request(CapacityType::Spot);
    request.count = 2;
    let none = CapacityFeedback::of(&FleetResponse::default(), &request, None);
    assert_eq!(none.offerings().len(), 3, "every offering of the request");
    assert_eq!(failure(&[], &none), LaunchError::InsufficientCapacity { unavailable: none.offerings() });
    let of_account = FleetResponse { launched: vec![], errors: vec![unnamed("MaxSpotInstanceCountExceeded")] };
    let all = CapacityFeedback::of(&of_account, &request, None);
    assert_eq!(all.offerings(), none.offerings(), "an error that names no offering is about all of them");
    let invalid = FleetResponse { launched: vec![], errors: vec![unnamed("InvalidParameterValue")] };
    assert_eq!(CapacityFeedback::of(&invalid, &request, None), CapacityFeedback::default(), "not about capacity");
    let launched = LaunchedInstance {
        id: "i-1".into(),
        instance_type: "m5.large".into(),
        zone: "1a".into(),
        subnet: None,
        image: String::new(),
    };
    let mut response = FleetResponse { launched: vec![launched], errors: vec![] };
    let some = CapacityFeedback::of(&response, &request, None);
    assert_eq!(some, CapacityFeedback::default(), "the next plan may get more");
    assert_eq!(failure(&[], &some), LaunchError::InsufficientCapacity { unavailable: vec![] });
    let in_reservation = FleetRequest { count: 2, ..reserved(ReservationKind::OnDemand) };
    assert!(CapacityFeedback::of(&response, &in_reservation, None).reservation_full);
    request.count = 1;
    assert!(response.is_complete(&request));
    response.errors.push(error("InsufficientInstanceCapacity", "m5.large", "1a"));
    assert_eq!(
        CapacityFeedback::of(&response, &request, None).offerings().len(),
        1,
        "errors count when all is launched"
    );
}

#[test]
fn a_spot_price_above_on_demand_and_an_unsupported_zone_mark_their_offering() {
    let request = request(CapacityType::Spot);
    for code in ["SpotMaxPriceTooLow", "InvalidFleetConfiguration"] {
        let errors = [error(code, "m5.large", "1a")];
        let feedback = CapacityFeedback::of_errors(&errors, &request, None);
        let unavailable = vec![offering("m5.large", "1a", CapacityType::Spot)];
        assert_eq!(failure(&errors, &feedback), LaunchError::InsufficientCapacity { unavailable }, "{code}");
    }
}

#[test]
fn c13_a_fleet_quota_and_a_missing_spot_role_are_insufficient_capacity() {
    let request = request(CapacityType::Spot);
    let errors = [
        error("MaxFleetCountExceeded", "m5.large", "1a"),
        error("AuthFailure.ServiceLinkedRoleCreationNotPermitted", "m5.large", "1b"),
    ];
    let feedback = CapacityFeedback::of_errors(&errors, &request, None);
    assert!(feedback.no_spot_role);
    assert!(feedback.marks.contains(&CapacityScope::CapacityType(CapacityType::Spot)));
    assert_eq!(failure(&errors, &feedback), LaunchError::NoSpotRole);
    assert!(matches!(failure(&errors[..1], &CapacityFeedback::default()), LaunchError::InsufficientCapacity { .. }));
}

#[test]
fn c15_an_exhausted_subnet_and_the_offering_of_the_error_are_marked() {
    let errors = [error("InsufficientFreeAddressesInSubnet", "m5.large", "1a")];
    let feedback = CapacityFeedback::of_errors(&errors, &request(CapacityType::OnDemand), None);
    assert_eq!(
        feedback.marks,
        [
            CapacityScope::Subnet("subnet-1a".into()),
            CapacityScope::Offering(offering("m5.large", "1a", CapacityType::OnDemand), None),
        ]
    );
    assert_eq!(feedback.exhausted, BTreeSet::from(["subnet-1a".to_owned()]));
}

#[test]
fn c14_only_capacity_errors_make_a_reservation_full() {
    let request = reserved(ReservationKind::OnDemand);
    let learn = |code: &str| CapacityFeedback::of_errors(&[error(code, "m5.large", "1a")], &request, None);
    for (code, full) in [
        ("ReservationCapacityExceeded", true),
        ("InsufficientInstanceCapacity", true),
        ("RequestLimitExceeded", false),
        ("UnauthorizedOperation", false),
        ("InternalError", false),
    ] {
        let feedback = learn(code);
        assert_eq!(feedback.reservation_full, full, "{code}");
        assert!(feedback.marks.is_empty(), "{code}");
    }
    let subnet = learn("InsufficientFreeAddressesInSubnet");
    assert_eq!(subnet.marks, [CapacityScope::Subnet("subnet-1a".into())], "exhausted addresses mark the subnet");
    let mut spread = error("InvalidParameter", "m5.large", "1a");
    spread.message = "You have reached the limit of instances in this spread placement group".into();
    assert!(CapacityFeedback::of_errors(&[spread], &request, Some("pg-1")).reservation_full);
}

#[test]
fn a_full_spread_group_marks_every_type_of_the_zone() {
    let mut full = error("Unsupported", "m5.large", "1a");
    full.message = "You have reached the limit of instances in this spread placement group".into();
    let feedback = CapacityFeedback::of_errors(&[full], &request(CapacityType::OnDemand), Some("pg-1"));
    let scope =
        |name: &str| CapacityScope::Offering(offering(name, "1a", CapacityType::OnDemand), Some("pg-1".to_owned()));
    assert_eq!(feedback.marks, ["m5.large", "m5.xlarge"].map(scope));
}

#[tokio::test]
async fn c17_a_missing_template_is_recognized_by_its_code() {
    let read = response(
        "<errorSet><item><errorCode>InvalidLaunchTemplateName.NotFoundException</errorCode><errorMessage>gone</errorMessage></item></errorSet>",
    )
    .await;
    assert!(read.lacks_template());
}
