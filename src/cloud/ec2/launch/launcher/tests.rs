//! Launches into capacity reservations: requests to EC2, and the counts and marks after its responses.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::json;
use stowage_api::Ec2NodeClass;
use stowage_model::events;
use stowage_model::labels;
use stowage_model::offering::CapacityType;
use stowage_model::reservation::ReservationKind;
use stowage_runtime::clock;

use super::*;
use crate::ec2::launch::request::tests::{claim, class, facts};
use crate::ec2::node_class::select_capacity_reservations::tests::reservation;
use crate::ec2::node_class::subnets::Subnet;
use crate::ec2::options::Options;
use crate::ec2::placement_group::PlacementGroup;
use crate::ec2::provider::Ec2Provider;
use crate::test_support::fake_aws;
use crate::test_support::fake_aws::Request;
use crate::{Cloud, Override, ReservedIn};

/// The next responses to CreateFleet, first to last; afterwards each call launches an instance.
type Responses = Arc<Mutex<VecDeque<Option<(u16, String)>>>>;

struct World {
    ec2: Arc<Ec2Provider>,
    class: Ec2NodeClass,
    responses: Responses,
    seen: Arc<Mutex<Vec<Request>>>,
}

fn respond(responses: &Responses, launched: &Mutex<usize>, request: &Request) -> Option<(u16, String)> {
    match request.action.as_str() {
        "DescribeLaunchTemplates" => fake_aws::error("InvalidLaunchTemplateName.NotFoundException", "gone"),
        "CreateLaunchTemplate" => fake_aws::ok(
            "CreateLaunchTemplate",
            "<launchTemplate><launchTemplateId>lt-1</launchTemplateId></launchTemplate>",
        ),
        "DescribeInstances" => fake_aws::ok("DescribeInstances", "<reservationSet/>"),
        "CreateFleet" => responses.lock().unwrap().pop_front().unwrap_or_else(|| {
            let mut count = launched.lock().unwrap();
            let capacity: usize = request.form["TargetCapacitySpecification.TotalTargetCapacity"].parse().unwrap();
            let ids: Vec<String> =
                (*count + 1..=*count + capacity).map(|number| format!("<item>i-{number}</item>")).collect();
            let ids = ids.concat();
            *count += capacity;
            let subnet = &request.form["LaunchTemplateConfigs.1.Overrides.1.SubnetId"];
            fake_aws::ok(
                "CreateFleet",
                &format!(
                    "<fleetInstanceSet><item><instanceIds>{ids}</instanceIds><instanceType>m5.large</instanceType>\
                     <launchTemplateAndOverrides><overrides><subnetId>{subnet}</subnetId></overrides>\
                     </launchTemplateAndOverrides></item></fleetInstanceSet>"
                ),
            )
        }),
        other => panic!("unexpected call {other}"),
    }
}

/// A class with reservations of m5.large in us-east-1a: ids and available instances.
fn world(reservations: &[(&str, i64)]) -> World {
    world_with(Options::of("c1"), reservations)
}

fn world_with(options: Options, reservations: &[(&str, i64)]) -> World {
    let (responses, launched) = (Responses::default(), Mutex::default());
    let endpoint = Arc::clone(&responses);
    let (clients, seen) = fake_aws::clients(Box::new(move |request| respond(&endpoint, &launched, request)));
    let ec2 = Ec2Provider::new(clients, options, facts());
    let subnet = |id: &str, zone: &str| Subnet { id: id.into(), zone: zone.into(), zone_id: None, free: 1_000 };
    let subnets = [subnet("subnet-a", "us-east-1a"), subnet("subnet-b", "us-east-1b")];
    ec2.node_classes.with_addresses(|addresses| addresses.set_described(&subnets));
    let mut class = class(json!({}));
    let list = reservations.iter().map(|(id, _)| reservation(id, "default", None));
    class.status.as_mut().unwrap().capacity_reservations = list.collect();
    ec2.offerings.with_reservations(|counts| counts.set_described(reservations.iter().copied(), clock::now()));
    World { ec2: Arc::new(ec2), class, responses, seen }
}

impl World {
    /// A request for m5.large of any of these capacity types, for a claim that this process created.
    fn request(&self, uid: &str, capacity_types: &[CapacityType]) -> LaunchRequest {
        let catalog = self.ec2.catalog(&self.class);
        let created = (clock::now() + Duration::from_mins(1)).rfc3339();
        let offerings = |capacity_type: &CapacityType| {
            let one = |zone: &str| Override {
                instance_type: "m5.large".into(),
                zone: zone.into(),
                capacity_type: *capacity_type,
            };
            ["us-east-1a", "us-east-1b"].map(one)
        };
        LaunchRequest {
            client_token: uid.into(),
            node_claim: "claim-1".into(),
            node_pool: "default".into(),
            node_class: "default".into(),
            overrides: capacity_types.iter().flat_map(offerings).collect(),
            labels: BTreeMap::new(),
            taints: vec![],
            details: Some(Arc::new(LaunchDetails {
                claim: claim(&created, json!({})),
                class: Arc::new(self.class.clone()),
                catalog,
                named: BTreeSet::new(),
            })),
        }
    }

    /// Launches the claims of a launch group.
    async fn launch_group(&self, size: usize, capacity_types: &[CapacityType]) -> Vec<Result<Launched, LaunchError>> {
        let requests = (1..=size).map(|number| {
            let mut request = self.request(&format!("uid-{number}"), capacity_types);
            let details = Arc::get_mut(request.details.as_mut().unwrap()).unwrap();
            details.claim.annotations_mut().insert(labels::LAUNCH_GROUP.into(), format!("group/{size}"));
            self.ec2.launch(request)
        });
        futures::future::join_all(requests).await
    }

    fn is_unavailable(&self, capacity_type: CapacityType) -> bool {
        let one = self.request("uid", &[capacity_type]).overrides.remove(0);
        self.ec2.offerings.unavailable().is_unavailable(&one, None, clock::now())
    }

    async fn launch(&self, uid: &str, capacity_types: &[CapacityType]) -> Result<Launched, LaunchError> {
        self.ec2.launch(self.request(uid, capacity_types)).await
    }

    fn next(&self, response: Option<(u16, String)>) {
        self.responses.lock().unwrap().push_back(response);
    }

    fn left(&self, id: &str) -> i64 {
        self.ec2.offerings.with_reservations(|counts| counts.available(id))
    }

    /// A form field of each call of an action.
    fn sent(&self, action: &str, member: &str) -> Vec<Option<String>> {
        let seen = self.seen.lock().unwrap();
        seen.iter().filter(|one| one.action == action).map(|one| one.form.get(member).cloned()).collect()
    }
}

fn failed_override(code: &str) -> Option<(u16, String)> {
    let slot = "<overrides><instanceType>m5.large</instanceType><subnetId>subnet-a</subnetId><availabilityZone>us-east-1a</availabilityZone></overrides>";
    fake_aws::ok(
        "CreateFleet",
        &format!(
            "<errorSet><item><errorCode>{code}</errorCode><errorMessage>m</errorMessage>\
             <launchTemplateAndOverrides>{slot}</launchTemplateAndOverrides></item></errorSet>"
        ),
    )
}

const BOTH: [CapacityType; 2] = [CapacityType::Reserved, CapacityType::OnDemand];
const TARGET: &str =
    "LaunchTemplateData.CapacityReservationSpecification.CapacityReservationTarget.CapacityReservationId";
const PREFERENCE: &str = "LaunchTemplateData.CapacityReservationSpecification.CapacityReservationPreference";

#[tokio::test]
async fn a_launch_into_a_reservation_decreases_its_count() {
    let world = world(&[("cr-1", 2)]);
    let begin = clock::now();
    let launched = world.launch("uid-1", &BOTH).await.unwrap();
    assert!(launched.called_at.is_some_and(|at| (begin..=clock::now()).contains(&at)));
    let instance = launched.instance;
    assert_eq!(instance.capacity_type, CapacityType::Reserved);
    assert_eq!(instance.reservation, Some(ReservedIn { id: "cr-1".into(), kind: ReservationKind::OnDemand }));
    assert_eq!(world.sent("CreateLaunchTemplate", TARGET), [Some("cr-1".to_owned())]);
    assert_eq!(world.sent("CreateLaunchTemplate", PREFERENCE), [Some("capacity-reservations-only".to_owned())]);
    assert_eq!(world.left("cr-1"), 1);
    let user_data = world.sent("CreateLaunchTemplate", "LaunchTemplateData.UserData").remove(0).unwrap();
    let text =
        String::from_utf8(base64::Engine::decode(&base64::prelude::BASE64_STANDARD, user_data).unwrap()).unwrap();
    assert!(text.contains("karpenter.sh/capacity-type=reserved"), "{text}");
}

#[tokio::test]
async fn c10_reserved_comes_before_spot_and_spot_before_on_demand() {
    let world = world(&[("cr-1", 1)]);
    let all = [CapacityType::OnDemand, CapacityType::Spot, CapacityType::Reserved];
    let launch =
        async |uid: &str, kinds: &[CapacityType]| world.launch(uid, kinds).await.unwrap().instance.capacity_type;
    assert_eq!(launch("uid-1", &all).await, CapacityType::Reserved);
    assert_eq!(launch("uid-2", &all).await, CapacityType::Spot, "the reservation is full");
    assert_eq!(launch("uid-3", &BOTH).await, CapacityType::OnDemand, "no spot");
}

#[tokio::test]
async fn concurrent_launches_never_exceed_the_capacity_of_reservations() {
    let world = world(&[("cr-1", 1), ("cr-2", 1)]);
    let launches = ["uid-1", "uid-2", "uid-3", "uid-4"].map(|uid| world.launch(uid, &BOTH));
    let mut ids: Vec<Option<String>> = futures::future::join_all(launches)
        .await
        .into_iter()
        .map(|launched| launched.unwrap().instance.reservation.map(|reservation| reservation.id))
        .collect();
    ids.sort();
    assert_eq!(ids, [None, None, Some("cr-1".to_owned()), Some("cr-2".to_owned())]);
    assert_eq!((world.left("cr-1"), world.left("cr-2")), (0, 0));
}

#[tokio::test]
async fn c14_after_full_reservations_the_next_and_then_on_demand_are_tried_at_once() {
    let world = world(&[("cr-1", 5), ("cr-2", 3)]);
    world.next(failed_override("ReservationCapacityExceeded"));
    world.next(failed_override("ReservationCapacityExceeded"));
    let launched = world.launch("uid-1", &BOTH).await.unwrap();
    assert_eq!((launched.instance.capacity_type, launched.unavailable), (CapacityType::OnDemand, vec![]));
    let asked: Vec<Option<String>> = world.sent("CreateLaunchTemplate", TARGET);
    assert_eq!(asked, [Some("cr-1".to_owned()), Some("cr-2".to_owned()), None]);
    let tokens: Vec<String> = world.sent("CreateFleet", "ClientToken").into_iter().flatten().collect();
    assert_eq!(tokens, ["uid-1", "uid-1-1", "uid-1-2"]);
    assert_eq!((world.left("cr-1"), world.left("cr-2")), (0, 0));
    assert!(!world.is_unavailable(CapacityType::Reserved), "the offering is not marked");
}

#[tokio::test]
async fn c14_a_call_that_fails_for_a_full_reservation_falls_back_to_on_demand() {
    let world = world(&[("cr-1", 5)]);
    world.next(fake_aws::error("ReservationCapacityExceeded", "full"));
    let launched = world.launch("uid-1", &BOTH).await.unwrap();
    assert_eq!((launched.instance.capacity_type, world.left("cr-1")), (CapacityType::OnDemand, 0));
}

#[tokio::test]
async fn c14_a_throttled_call_releases_its_allocation_until_the_retry() {
    let world = world(&[("cr-1", 1)]);
    for _ in 0..2 {
        world.next(fake_aws::error("RequestLimitExceeded", "slow down"));
    }
    let error = world.launch("uid-1", &BOTH).await.unwrap_err();
    assert_eq!(error, LaunchError::Throttled);
    assert_eq!(world.left("cr-1"), 1, "nothing was launched");
    assert_eq!(world.launch("uid-1", &BOTH).await.unwrap().instance.capacity_type, CapacityType::Reserved);
    world.next(failed_override("RequestLimitExceeded"));
    world.ec2.offerings.with_reservations(|counts| {
        counts.set_described([("cr-1", 1)], clock::now() + Duration::from_millis(1));
    });
    let error = world.launch("uid-2", &BOTH).await.unwrap_err();
    assert!(matches!(error, LaunchError::Rejected { event: events::REQUEST_LIMIT_EXCEEDED, .. }), "{error}");
    assert_eq!(
        world.left("cr-1"),
        1,
        "throttling of one override: nothing was launched, and the reservation is unaffected"
    );
}

#[tokio::test]
async fn a_throttled_launch_selects_again_without_a_search() {
    let world = world(&[]);
    for _ in 0..2 {
        world.next(fake_aws::error("RequestLimitExceeded", "slow down"));
    }
    let kinds = [CapacityType::OnDemand];
    assert_eq!(world.launch("uid-1", &kinds).await.unwrap_err(), LaunchError::Throttled);
    let in_a = world.request("uid-1", &kinds).overrides.remove(0);
    world.ec2.offerings.mark_offering_unavailable(&in_a, clock::now());
    world.launch("uid-1", &kinds).await.unwrap();
    let zones = world.sent("CreateFleet", "LaunchTemplateConfigs.1.Overrides.1.AvailabilityZone");
    assert_eq!(zones.into_iter().flatten().collect::<Vec<_>>(), ["us-east-1a", "us-east-1a", "us-east-1b"]);
    let tokens = world.sent("CreateFleet", "ClientToken");
    assert!(tokens.iter().all(|token| token.as_deref() == Some("uid-1")), "{tokens:?}");
    assert!(world.sent("DescribeInstances", "Action").is_empty());
}

#[tokio::test]
async fn after_a_refusal_for_a_quota_the_next_launch_is_on_demand() {
    for code in ["MaxFleetCountExceeded", "MaxSpotInstanceCountExceeded", "VcpuLimitExceeded"] {
        let world = world(&[]);
        world.next(fake_aws::error(code, "quota"));
        let kinds = [CapacityType::Spot, CapacityType::OnDemand];
        let error = world.launch("uid-1", &kinds).await.unwrap_err();
        let unavailable = world.request("uid-1", &kinds[..1]).overrides;
        assert_eq!(error, LaunchError::InsufficientCapacity { unavailable }, "{code}");
        assert!(world.is_unavailable(CapacityType::Spot), "{code}");
        assert_eq!(
            world.launch("uid-2", &kinds).await.unwrap().instance.capacity_type,
            CapacityType::OnDemand,
            "{code}"
        );
    }
    for code in ["Unsupported", "InvalidFleetConfiguration", "InvalidParameterValue"] {
        let world = world(&[]);
        world.next(fake_aws::error(code, "may be an error of the class"));
        let error = world.launch("uid-1", &[CapacityType::Spot]).await.unwrap_err();
        assert!(matches!(error, LaunchError::Rejected { .. }), "{code}: {error}");
        assert!(!world.is_unavailable(CapacityType::Spot), "{code}");
    }
}

#[tokio::test]
async fn the_tokens_of_an_earlier_process_are_skipped_in_one_attempt_after_the_wait() {
    for (used, attempts) in [(3, 1), (150, 2)] {
        let world = world(&[]);
        for _ in 0..used {
            world.next(fake_aws::error("IdempotentParameterMismatch", "other parameters"));
        }
        let batch = world.ec2.launcher.batches.of("uid-1", clock::now());
        let Turn::Call(mut state) = batch.turn("uid-1").await else { panic!("nobody else launches") };
        assert!(!state.attempts.token_reused(UnixMillis(0)), "a wait since 1970");
        drop(state);
        let kinds = [CapacityType::OnDemand];
        for _ in 1..attempts {
            let error = world.launch("uid-1", &kinds).await.unwrap_err();
            assert!(error.to_string().contains("waiting for its instances"), "{error}");
        }
        world.launch("uid-1", &kinds).await.unwrap();
        let tokens: Vec<String> = world.sent("CreateFleet", "ClientToken").into_iter().flatten().collect();
        assert_eq!((tokens.len(), tokens.last().unwrap()), (used + 1, &format!("uid-1-{used}")));
    }
}

#[tokio::test]
async fn after_repeated_server_faults_the_next_launch_is_on_demand() {
    let world = world(&[]);
    let kinds = [CapacityType::Spot, CapacityType::OnDemand];
    for _ in 0..4 {
        world.next(Some((503, String::new())));
    }
    let error = world.launch("uid-1", &kinds).await.unwrap_err();
    assert!(matches!(error, LaunchError::Other { .. }), "{error}");
    let error = world.launch("uid-1", &kinds).await.unwrap_err();
    assert!(matches!(error, LaunchError::InsufficientCapacity { .. }), "{error}");
    let searches = world.sent("DescribeInstances", "Action").len();
    let launched = world.launch("uid-1", &kinds).await.unwrap();
    assert_eq!(launched.instance.capacity_type, CapacityType::OnDemand);
    assert_eq!(world.sent("DescribeInstances", "Action").len(), searches + 1, "the faulty calls may have launched");
    let tokens: Vec<String> = world.sent("CreateFleet", "ClientToken").into_iter().flatten().collect();
    assert_eq!(tokens, ["uid-1", "uid-1", "uid-1", "uid-1", "uid-1-1"]);
}

#[tokio::test]
async fn after_no_instance_and_no_error_the_next_launch_is_on_demand() {
    let world = world(&[]);
    world.next(fake_aws::ok("CreateFleet", "<fleetInstanceSet/>"));
    let kinds = [CapacityType::Spot, CapacityType::OnDemand];
    let error = world.launch("uid-1", &kinds).await.unwrap_err();
    assert!(matches!(error, LaunchError::InsufficientCapacity { .. }), "{error}");
    assert_eq!(world.launch("uid-2", &kinds).await.unwrap().instance.capacity_type, CapacityType::OnDemand);
}

#[tokio::test]
async fn a_group_uses_all_places_of_a_reservation_in_one_call() {
    let world = world(&[("cr-1", 3), ("cr-2", 1)]);
    let launched = world.launch_group(5, &BOTH).await;
    let mut ids: Vec<Option<String>> =
        launched.into_iter().map(|one| one.unwrap().instance.reservation.map(|reservation| reservation.id)).collect();
    ids.sort();
    assert_eq!(ids, [None, Some("cr-1"), Some("cr-1"), Some("cr-1"), Some("cr-2")].map(|id| id.map(str::to_owned)));
    let counts = world.sent("CreateFleet", "TargetCapacitySpecification.TotalTargetCapacity");
    assert_eq!(counts.into_iter().flatten().collect::<Vec<_>>(), ["3", "1", "1"]);
    assert_eq!((world.left("cr-1"), world.left("cr-2")), (0, 0));
}

#[tokio::test]
async fn a_group_is_split_over_the_subnets_of_a_zone_by_free_addresses() {
    let mut world = world(&[]);
    let subnets = [("subnet-a", 100), ("subnet-c", 70), ("subnet-d", 10)].map(|(id, free)| Subnet {
        id: id.into(),
        zone: "us-east-1a".into(),
        zone_id: None,
        free,
    });
    world.ec2.node_classes.with_addresses(|addresses| addresses.set_described(&subnets));
    world.class.status.as_mut().unwrap().subnets = crate::ec2::node_class::subnets::status(subnets.to_vec());
    let launched = world.launch_group(5, &[CapacityType::OnDemand]).await;
    assert!(launched.iter().all(Result::is_ok), "{launched:?}");
    let sent = |member| world.sent("CreateFleet", member).into_iter().flatten().collect::<Vec<_>>();
    // 29 pods per node.
    assert_eq!(sent("TargetCapacitySpecification.TotalTargetCapacity"), ["3", "2"]);
    assert_eq!(sent("LaunchTemplateConfigs.1.Overrides.1.SubnetId"), ["subnet-a", "subnet-c"]);
}

#[tokio::test]
async fn a_failed_launch_releases_its_allocation() {
    let world = world(&[("cr-1", 1)]);
    world.next(fake_aws::error("UnauthorizedOperation", "no"));
    let error = world.launch("uid-1", &BOTH).await.unwrap_err();
    assert!(matches!(error, LaunchError::Rejected { event: events::UNAUTHORIZED, .. }), "{error}");
    assert_eq!(world.left("cr-1"), 1);
    let mut request = world.request("uid-1", &BOTH);
    let mut class = world.class.clone();
    class.status.as_mut().unwrap().subnets.clear();
    let details = request.details.take().unwrap();
    let (claim, catalog) = (details.claim.clone(), Arc::clone(&details.catalog));
    request.details = Some(Arc::new(LaunchDetails { claim, class: Arc::new(class), catalog, named: BTreeSet::new() }));
    let error = world.ec2.launch(request).await.unwrap_err();
    assert!(matches!(error, LaunchError::Rejected { event: events::SUBNET_RESOLUTION_FAILED, .. }), "{error}");
    assert_eq!(world.left("cr-1"), 1);
}

#[tokio::test]
async fn a_reserved_only_claim_is_re_planned_when_all_reservations_are_full() {
    let world = world(&[("cr-1", 1)]);
    world.next(failed_override("ReservationCapacityExceeded"));
    let error = world.launch("uid-1", &[CapacityType::Reserved]).await.unwrap_err();
    assert_eq!(error, LaunchError::InsufficientCapacity { unavailable: vec![] });
    let closed = world.ec2.catalog(&world.class);
    let m5 = closed.instance_types.iter().find(|found| &*found.name == "m5.large").unwrap();
    let reserved = m5.offerings.iter().filter(|offering| offering.capacity_type == CapacityType::Reserved);
    let seen: Vec<_> = reserved.map(|one| (one.label(labels::CAPACITY_RESERVATION_ID), one.available)).collect();
    assert_eq!(seen, [(Some("cr-1"), false)], "the next plan does not use it");
}

#[tokio::test]
async fn reservations_are_not_used_while_the_gate_is_off() {
    let world = world_with(Options { reserved_capacity: false, ..Options::of("c1") }, &[("cr-1", 1)]);
    let launched = world.launch("uid-1", &BOTH).await.unwrap();
    assert_eq!(launched.instance.capacity_type, CapacityType::OnDemand);
    assert_eq!(
        world.sent("CreateLaunchTemplate", PREFERENCE),
        [None],
        "EC2 may place instances into open reservations"
    );
}

#[tokio::test]
async fn a_failure_in_a_partition_marks_that_partition_only() {
    let mut world = world(&[]);
    world.class.spec.placement_group_selector = serde_json::from_value(json!({"id": "pg-1"})).unwrap();
    let group = PlacementGroup { id: "pg-1".into(), strategy: "partition".into(), partitions: 3 };
    world.ec2.node_classes.set_placement_group(&world.class, Some(group));
    let in_partition = |partition: &str| {
        let mut request = world.request("uid-1", &[CapacityType::OnDemand]);
        let spec = json!({"requirements": [{"key": labels::PLACEMENT_GROUP_PARTITION, "operator": "In", "values": [partition]}]});
        let details = request.details.take().unwrap();
        let (class, catalog) = (Arc::clone(&details.class), Arc::clone(&details.catalog));
        let claim = claim("2099-01-01T00:00:00Z", spec);
        request.details = Some(Arc::new(LaunchDetails { claim, class, catalog, named: BTreeSet::new() }));
        request
    };
    world.next(failed_override("InsufficientInstanceCapacity"));
    let error = world.ec2.launch(in_partition("2")).await.unwrap_err();
    assert_eq!(error, LaunchError::InsufficientCapacity { unavailable: vec![] }, "nothing to mark for other groups");
    let available = |partition: &str| {
        let seen = world.ec2.catalog(&world.class);
        let m5 = seen.instance_types.iter().find(|found| &*found.name == "m5.large").unwrap();
        let mut here = m5.offerings.iter().filter(|one| {
            &*one.zone == "us-east-1a" && one.label(labels::PLACEMENT_GROUP_PARTITION) == Some(partition)
        });
        here.find(|one| one.capacity_type == CapacityType::OnDemand).unwrap().available
    };
    assert!(available("1") && !available("2") && available("3"));
    let launched = world.ec2.launch(in_partition("3")).await.unwrap();
    assert_eq!(launched.instance.partition, Some(3));
    let number = world.sent("CreateLaunchTemplate", "LaunchTemplateData.Placement.PartitionNumber");
    assert_eq!(number, [Some("2".to_owned()), Some("3".to_owned())]);
}
