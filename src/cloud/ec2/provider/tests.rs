use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard};

use futures::StreamExt;
use serde_json::json;

use super::*;
use crate::api::Ec2NodeClass;
use crate::cloud::ec2::aws::client::wire;
use crate::cloud::ec2::aws::client::wire::Seen;
use crate::cloud::ec2::interruption::messages::EventKind;
use crate::cloud::ec2::launch::request::tests::{claim, class, facts, request};
use crate::cloud::ec2::node_class::subnets::Subnet;
use crate::cloud::ec2::offerings::discovered_memory::tests::node;
use crate::cloud::{
    Cloud, CloudError, ClusterObserver, InstanceEvents, InstanceTagging, LaunchDetails, LaunchError, LaunchRequest,
    Launched, NodeClassCloud, ServiceStatus, Untagged,
};
use crate::cloud::{Instance, InstanceState, Override};
use crate::model::time::UnixMillis;

/// EC2 in a few lines: templates by name, instances by id, and what goes wrong.
#[derive(Default)]
struct Fake {
    templates: BTreeSet<String>,
    /// Id, launch tag, state.
    instances: Vec<(String, String, &'static str)>,
    /// Tokens heard, in order; what was asked and answered by token; and whether a call's answer gets lost, or its instances
    /// don't show.
    tokens: Vec<String>,
    heard: BTreeMap<String, (String, String)>,
    lose_answers: bool,
    hide_instances: bool,
    /// How many instances a call gets at most.
    room: Option<usize>,
    /// Answers of CreateFleet before any other, last first.
    fleet: Vec<Option<(u16, String)>>,
}

impl Fake {
    fn answer(&mut self, request: &Seen) -> Option<(u16, String)> {
        let form = &request.form;
        match request.action.as_str() {
            "DescribeLaunchTemplates" => match self.templates.get(&form["LaunchTemplateName.1"]) {
                Some(name) => wire::ok(
                    "DescribeLaunchTemplates",
                    &format!(
                        "<launchTemplates><item><launchTemplateId>id-{name}</launchTemplateId></item></launchTemplates>"
                    ),
                ),
                None => wire::refusal("InvalidLaunchTemplateName.NotFoundException", "gone"),
            },
            "CreateLaunchTemplate" => {
                let name = form["LaunchTemplateName"].clone();
                self.templates.insert(name.clone());
                wire::ok(
                    "CreateLaunchTemplate",
                    &format!("<launchTemplate><launchTemplateId>id-{name}</launchTemplateId></launchTemplate>"),
                )
            }
            "CreateFleet" => self.create_fleet(form),
            "DescribeInstances" => {
                let uid = form.iter().find(|(_, value)| *value == "tag:stowage.dev/launch");
                let uid = uid.map(|(key, _)| form[&key.replace("Name", "Value.1")].clone());
                let id = form.get("InstanceId.1");
                if self.hide_instances || id.is_some_and(|id| self.instances.iter().all(|(known, ..)| known != id)) {
                    return match id {
                        Some(id) => wire::refusal("InvalidInstanceID.NotFound", id),
                        None => wire::ok("DescribeInstances", "<reservationSet/>"),
                    };
                }
                let items = self.instances.iter().filter(|(known, of, state)| {
                    uid.as_ref().is_none_or(|uid| uid == of)
                        && id.is_none_or(|id| id == known)
                        && *state != "terminated"
                });
                let items = items.map(|(id, uid, state)| {
                    format!(
                        "<item><instancesSet><item><instanceId>{id}</instanceId><instanceType>m5.large</instanceType>\
                         <instanceState><name>{state}</name></instanceState><placement><availabilityZone>us-east-1a</availabilityZone></placement>\
                         <tagSet><item><key>stowage.dev/launch</key><value>{uid}</value></item></tagSet></item></instancesSet></item>"
                    )
                });
                wire::ok(
                    "DescribeInstances",
                    &format!("<reservationSet>{}</reservationSet>", items.collect::<String>()),
                )
            }
            "TerminateInstances" => {
                let id = &form["InstanceId.1"];
                if self.hide_instances {
                    return wire::refusal("InvalidInstanceID.NotFound", id);
                }
                for (known, _, state) in &mut self.instances {
                    if known == id {
                        *state = "shutting-down";
                    }
                }
                let item = format!(
                    "<item><instanceId>{id}</instanceId><currentState><name>shutting-down</name></currentState></item>"
                );
                wire::ok("TerminateInstances", &format!("<instancesSet>{item}</instancesSet>"))
            }
            other => panic!("{other} was not expected"),
        }
    }

    fn create_fleet(&mut self, form: &BTreeMap<String, String>) -> Option<(u16, String)> {
        self.tokens.push(form["ClientToken"].clone());
        if let Some(answer) = self.fleet.pop() {
            return answer;
        }
        if !self.templates.contains(&form["LaunchTemplateConfigs.1.LaunchTemplateSpecification.LaunchTemplateName"]) {
            return wire::refusal("InvalidLaunchTemplateName.NotFoundException", "gone");
        }
        let asked = form["TargetCapacitySpecification.TotalTargetCapacity"].clone();
        let answer = match self.heard.get(&form["ClientToken"]) {
            Some((before, _)) if *before != asked => {
                return wire::refusal("IdempotentParameterMismatch", "other parameters");
            }
            Some((_, answer)) => answer.clone(),
            None => self.launch(asked.parse().unwrap(), form),
        };
        self.heard.insert(form["ClientToken"].clone(), (asked, answer.clone()));
        if self.lose_answers { None } else { wire::ok("CreateFleet", &answer) }
    }

    fn launch(&mut self, count: usize, form: &BTreeMap<String, String>) -> String {
        let key = form.iter().find(|(_, value)| *value == "stowage.dev/launch").unwrap().0;
        let tag = &form[&key.replace(".Key", ".Value")];
        let mut items = Vec::new();
        for _ in 0..count.min(self.room.unwrap_or(count)) {
            let id = format!("i-{:017x}", self.instances.len() + 1);
            items.push(format!("<item>{id}</item>"));
            self.instances.push((id, tag.clone(), "running"));
        }
        let ids = items.concat();
        let error = "<errorSet><item><errorCode>InsufficientInstanceCapacity</errorCode></item></errorSet>";
        format!(
            "<fleetInstanceSet><item><instanceIds>{ids}</instanceIds><instanceType>m5.large</instanceType>\
             <launchTemplateAndOverrides><overrides><subnetId>subnet-a</subnetId><availabilityZone>us-east-1a</availabilityZone>\
             <imageId>ami-x86</imageId></overrides></launchTemplateAndOverrides></item></fleetInstanceSet>{}",
            if self.room.is_some() { error } else { "" }
        )
    }
}

fn refused_slot(code: &str) -> Option<(u16, String)> {
    let error = format!(
        "<errorSet><item><errorCode>{code}</errorCode><errorMessage>m</errorMessage><launchTemplateAndOverrides><overrides>\
         <instanceType>m5.large</instanceType><subnetId>subnet-a</subnetId><availabilityZone>us-east-1a</availabilityZone></overrides>\
         </launchTemplateAndOverrides></item></errorSet>"
    );
    wire::ok("CreateFleet", &error)
}

struct World {
    ec2: Ec2Provider,
    fake: Arc<Mutex<Fake>>,
}

fn world() -> World {
    let fake = Arc::new(Mutex::new(Fake::default()));
    let answers = Arc::clone(&fake);
    let (clients, _) = wire::clients(Box::new(move |request| answers.lock().unwrap().answer(request)));
    let ec2 = Ec2Provider::new(clients, Options::of("c1"), facts());
    let subnet = |id: &str, zone: &str, free| Subnet { id: id.into(), zone: zone.into(), zone_id: None, free };
    let subnets = [subnet("subnet-a", "us-east-1a", 100), subnet("subnet-b", "us-east-1b", 100)];
    ec2.node_classes.with_addresses(|addresses| addresses.set_described(&subnets));
    World { ec2, fake }
}

/// A claim made a minute from now: fresh, whatever the clocks say.
fn fresh() -> LaunchRequest {
    let created = k8s_openapi::jiff::Timestamp::from_millisecond(crate::clock::now().0 + 60_000).unwrap().to_string();
    request(class(json!({})), claim(&created, json!({})), &["m5.large"])
}

/// A claim that an earlier process made.
fn old() -> LaunchRequest {
    request(class(json!({})), claim("2026-01-01T00:00:00Z", json!({})), &["m5.large"])
}

/// A claim of a launch group: fresh.
fn member(uid: &str, group: &str, size: usize) -> LaunchRequest {
    let mut request = fresh();
    let details = request.details.take().unwrap();
    let mut claim = details.claim.clone();
    claim.metadata.uid = Some(uid.into());
    claim.metadata.annotations =
        Some([(crate::model::labels::LAUNCH_GROUP.to_owned(), format!("{group}/{size}"))].into());
    let (class, catalog) = (Arc::clone(&details.class), Arc::clone(&details.catalog));
    let details = LaunchDetails { claim, class, catalog, named: BTreeSet::new() };
    LaunchRequest {
        client_token: uid.into(),
        node_claim: format!("claim-{uid}"),
        details: Some(details.into()),
        ..request
    }
}

/// The same claim, made by an earlier process that launched some of its group.
fn inherited(uid: &str, group: &str, size: usize, named: &[&str]) -> LaunchRequest {
    let mut request = member(uid, group, size);
    let details = request.details.take().unwrap();
    let mut claim = details.claim.clone();
    claim.metadata.creation_timestamp = serde_json::from_value(json!("2026-01-01T00:00:00Z")).unwrap();
    let (class, catalog) = (Arc::clone(&details.class), Arc::clone(&details.catalog));
    let named = named.iter().map(|id| format!("aws:///us-east-1a/{id}")).collect();
    LaunchRequest { details: Some(LaunchDetails { claim, class, catalog, named }.into()), ..request }
}

async fn launch_all(world: &World, requests: Vec<LaunchRequest>) -> Vec<Result<Launched, LaunchError>> {
    futures::future::join_all(requests.into_iter().map(|request| world.ec2.launch(request))).await
}

fn ids(answers: &[Result<Launched, LaunchError>]) -> BTreeSet<String> {
    answers.iter().flatten().map(|launched| launched.instance.id.clone()).collect()
}

impl World {
    fn fake(&self) -> MutexGuard<'_, Fake> {
        self.fake.lock().unwrap()
    }
}

#[tokio::test]
async fn a_claim_becomes_an_instance() {
    let world = world();
    let launched = world.ec2.launch(fresh()).await.unwrap();
    let instance = &launched.instance;
    assert_eq!(instance.provider_id, "aws:///us-east-1a/i-00000000000000001");
    assert_eq!((&*instance.client_token, &*instance.node_claim, &*instance.image_id), ("uid-1", "claim-1", "ami-x86"));
    assert_eq!((instance.capacity_type, instance.state), (CapacityType::OnDemand, InstanceState::Pending));
    assert_eq!(world.fake().tokens, ["uid-1"]);
    assert_eq!(world.ec2.clients.calls()["CreateFleet"], 1);
    assert!(!world.ec2.clients.calls().contains_key("DescribeInstances"), "nothing to look for");
}

#[tokio::test]
async fn a_lost_answer_launches_nothing_twice() {
    let world = world();
    world.fake().lose_answers = true;
    let error = world.ec2.launch(fresh()).await.unwrap_err();
    assert!(matches!(error, LaunchError::Other { .. }), "{error}");
    assert!(world.fake().tokens.iter().all(|token| token == "uid-1"), "every attempt has the same token");
    world.fake().lose_answers = false;
    let before = world.fake().tokens.len();
    let launched = world.ec2.launch(fresh()).await.unwrap();
    assert_eq!(launched.instance.id, "i-00000000000000001");
    assert_eq!(world.fake().tokens.len(), before, "found by its tag, not asked for again");
}

#[tokio::test]
async fn the_claims_of_a_group_share_a_call_and_each_gets_an_instance_of_its_own() {
    let world = world();
    let uids: Vec<String> = (0..50).map(|number| format!("u{number}")).collect();
    let requests = || uids.iter().map(|uid| member(uid, "group", 50)).collect::<Vec<_>>();
    let answers = launch_all(&world, requests()).await;
    assert_eq!((ids(&answers).len(), world.ec2.clients.calls()["CreateFleet"]), (50, 1));
    assert_eq!(answers[7].as_ref().unwrap().instance.node_claim, "claim-u7");
    let again = launch_all(&world, requests()).await;
    let id = |answer: &Result<Launched, LaunchError>| answer.as_ref().unwrap().instance.id.clone();
    assert!(answers.iter().zip(&again).all(|(first, second)| id(first) == id(second)), "what is not written yet stays");
    assert_eq!(world.ec2.clients.calls()["CreateFleet"], 1);
}

#[tokio::test]
async fn a_group_that_is_launched_in_part_says_so_to_those_that_got_nothing() {
    let world = world();
    world.fake().room = Some(2);
    let requests = ["a", "b", "c"].map(|uid| member(uid, "group", 3)).to_vec();
    let answers = launch_all(&world, requests).await;
    assert_eq!(ids(&answers).len(), 2);
    assert!(matches!(answers[2], Err(LaunchError::InsufficientCapacity { .. })), "{:?}", answers[2]);
    world.fake().room = None;
    world.ec2.launch(member("c", "group", 3)).await.unwrap();
    assert_eq!(world.fake().tokens, ["group", "group-1"]);
    assert_eq!(world.fake().instances.len(), 3);
}

#[tokio::test]
async fn a_group_whose_answer_was_lost_takes_over_what_was_launched() {
    for hidden in [false, true] {
        let world = world();
        world.fake().lose_answers = true;
        let requests = || ["a", "b", "c"].map(|uid| member(uid, "group", 3)).to_vec();
        assert!(ids(&launch_all(&world, requests()).await).is_empty());
        world.fake().lose_answers = false;
        world.fake().hide_instances = hidden;
        // One comes back before the others: the call is made again as it was, or its instances are found.
        let first = world.ec2.launch(member("b", "group", 3)).await.unwrap();
        let mut all = ids(&launch_all(&world, vec![member("a", "group", 3), member("c", "group", 3)]).await);
        all.insert(first.instance.id);
        assert_eq!((all.len(), world.fake().instances.len()), (3, 3), "hidden: {hidden}");
        assert!(world.fake().tokens.iter().all(|token| token == "group"));
    }
}

#[tokio::test]
async fn after_a_crash_a_groups_instances_go_to_those_of_its_claims_that_have_none() {
    let world = world();
    for id in ["i-a", "i-b"] {
        world.fake().instances.push((id.into(), "group".into(), "running"));
    }
    // i-a was written down before the crash; the third claim was never launched.
    let requests = ["b", "c"].map(|uid| inherited(uid, "group", 3, &["i-a"])).to_vec();
    let answers = launch_all(&world, requests).await;
    assert_eq!(ids(&answers), BTreeSet::from(["i-b".to_owned(), "i-00000000000000003".to_owned()]));
    assert_eq!(world.fake().tokens, ["group"]);
}

#[tokio::test]
async fn after_a_crash_instances_that_do_not_show_yet_are_waited_for() {
    let world = world();
    world.fake().heard.insert("group".into(), ("3".into(), String::new()));
    let requests = || ["b", "c"].map(|uid| inherited(uid, "group", 3, &[])).to_vec();
    let answers = launch_all(&world, requests()).await;
    assert!(answers.iter().all(|answer| answer.as_ref().is_err_and(|error| error.to_string().contains("waiting"))));
    for id in ["i-a", "i-b"] {
        world.fake().instances.push((id.into(), "group".into(), "pending"));
    }
    assert_eq!(ids(&launch_all(&world, requests()).await).len(), 2);
    assert_eq!(world.fake().instances.len(), 2, "nothing was launched anew");
}

#[tokio::test]
async fn a_crash_after_the_call_launches_nothing_twice() {
    let world = world();
    world.fake().instances.push(("i-0000000000000000a".into(), "uid-1".into(), "running"));
    let launched = world.ec2.launch(old()).await.unwrap();
    assert_eq!(launched.instance.id, "i-0000000000000000a");
    assert!(world.fake().tokens.is_empty());
}

#[tokio::test]
async fn what_was_launched_for_a_claim_is_found_by_its_group_also_while_ec2_does_not_show_it() {
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
async fn a_token_that_was_used_for_something_else_waits_for_its_instance() {
    let world = world();
    world.fake().fleet.push(wire::refusal("IdempotentParameterMismatch", "other parameters"));
    let error = world.ec2.launch(old()).await.unwrap_err();
    assert!(error.to_string().contains("waiting"), "{error}");
    world.fake().instances.push(("i-0000000000000000b".into(), "uid-1".into(), "pending"));
    assert_eq!(world.ec2.launch(old()).await.unwrap().instance.id, "i-0000000000000000b");
}

#[tokio::test]
async fn c17_a_template_deleted_behind_our_back_is_made_again() {
    let world = world();
    world.ec2.launch(fresh()).await.unwrap();
    world.fake().templates.clear();
    world.ec2.launch(member("uid-2", "uid-2", 1)).await.unwrap();
    assert_eq!(world.ec2.clients.calls()["CreateLaunchTemplate"], 2);
    assert_eq!(world.fake().instances.len(), 2);
}

#[tokio::test]
async fn c11_want_of_capacity_comes_back_at_once_and_is_remembered() {
    let world = world();
    world.fake().fleet.push(refused_slot("InsufficientInstanceCapacity"));
    let request = fresh();
    let error = world.ec2.launch(request.clone()).await.unwrap_err();
    let LaunchError::InsufficientCapacity { unavailable } = error else { panic!("{error}") };
    assert_eq!(unavailable, [request.overrides[0].clone()]);
    assert!(world.ec2.offerings.unavailable().is_unavailable(&unavailable[0], None, crate::clock::now()));
    world.ec2.launch(request).await.unwrap();
    assert_eq!(world.fake().tokens, ["uid-1", "uid-1-1"], "answered tokens are not used again");
}

#[tokio::test]
async fn c12_any_other_error_keeps_the_claim_with_its_reason() {
    let world = world();
    world.fake().fleet.push(refused_slot("UnauthorizedOperation"));
    let error = world.ec2.launch(fresh()).await.unwrap_err();
    assert!(matches!(error, LaunchError::Rejected { reason: "Unauthorized", .. }), "{error}");
    world.fake().fleet.push(wire::refusal("UnauthorizedOperation", "no"));
    let error = world.ec2.launch(fresh()).await.unwrap_err();
    assert!(matches!(error, LaunchError::Rejected { reason: "Unauthorized", .. }), "{error}");
}

#[tokio::test]
async fn c15_after_an_exhausted_subnet_the_next_launch_takes_another_one() {
    let world = world();
    let subnets = ["subnet-a", "subnet-c"].map(|id| json!({"id": id, "zone": "us-east-1a"}));
    let mut class = class(json!({}));
    class.status.as_mut().unwrap().subnets = subnets.map(|subnet| serde_json::from_value(subnet).unwrap()).into();
    let third = Subnet { id: "subnet-c".into(), zone: "us-east-1a".into(), zone_id: None, free: 50 };
    world.ec2.node_classes.with_addresses(|addresses| addresses.set_described(&[third]));
    world.fake().fleet.push(refused_slot("InsufficientFreeAddressesInSubnet"));
    let request = request(class.clone(), claim("2026-01-01T00:00:00Z", json!({})), &["m5.large"]);
    world.ec2.launch(request).await.unwrap_err();
    let pods = [("us-east-1a".to_owned(), 10)].into();
    let subnets = &class.status.as_ref().unwrap().subnets;
    let (chosen, _) = world.ec2.node_classes.with_addresses(|addresses| addresses.reserve(subnets, &pods, 1));
    assert_eq!(chosen["us-east-1a"], "subnet-c");
    let marks = world.ec2.offerings.unavailable();
    assert!(
        marks.exhausted_zones(&class.status.unwrap().subnets, crate::clock::now()).is_empty(),
        "the zone has another subnet"
    );
}

#[tokio::test]
async fn what_ec2_does_not_describe_yet_is_neither_gone_nor_let_go() {
    let world = world();
    let id = world.ec2.launch(fresh()).await.unwrap().instance.provider_id;
    world.fake().hide_instances = true;
    assert!(world.ec2.describe(&id).await.unwrap().is_some());
    assert_eq!(world.ec2.list().await.unwrap().len(), 1);
    world.ec2.terminate(&id).await.unwrap_err();
    let due = [Untagged { provider_id: id.clone(), node: "node-1".into(), claim: "claim-1".into() }];
    assert!(world.ec2.tag(&due).next().await.unwrap().1.is_err());
    world.fake().hide_instances = false;
    assert!(world.ec2.terminate(&id).await.unwrap(), "it is going");
    assert!(world.ec2.terminate(&id).await.unwrap());
    assert_eq!(world.ec2.clients.calls()["TerminateInstances"], 2, "one refused, one that worked");
}

#[tokio::test]
async fn a_terminated_instance_is_gone() {
    let world = world();
    world.fake().instances.push(("i-0000000000000000c".into(), "uid-2".into(), "terminated"));
    assert!(!world.ec2.terminate("aws:///us-east-1a/i-0000000000000000c").await.unwrap());
    assert!(!world.ec2.terminate("aws:///us-east-1a/i-0000000000000000d").await.unwrap(), "nor is one that never was");
    assert!(world.ec2.describe("aws:///us-east-1a/i-0000000000000000c").await.unwrap().is_none());
    world.ec2.describe("kwok-aws:///a/i-1").await.unwrap_err();
}

#[tokio::test]
async fn an_interrupted_spot_offering_is_left_alone_for_a_while() {
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
    let event = |kind, id: &str| Received { receipt: "r".into(), kind, instance_id: id.into(), at_ms: 0 };
    world.ec2.record_event(&event(EventKind::RebalanceRecommendation, "i-1"));
    world.ec2.record_event(&event(EventKind::SpotInterrupted, "i-unknown"));
    let covered = |world: &World| world.ec2.offerings.unavailable().is_unavailable(&spot, None, crate::clock::now());
    assert!(!covered(&world));
    world.ec2.record_event(&event(EventKind::SpotInterrupted, "i-1"));
    assert!(covered(&world));
}

#[tokio::test]
async fn a_registered_node_changes_what_its_class_offers_and_not_what_classes_of_other_images_do() {
    let ec2 = world().ec2;
    let of = |class: &Ec2NodeClass| {
        let seen = ec2.catalog(class);
        seen.instance_types.iter().find(|found| &*found.name == "m5.large").map(|found| found.capacity.memory.0 >> 20)
    };
    let (own, mut other) = (class(json!({})), class(json!({})));
    other.metadata.name = Some("other".into());
    other.status.as_mut().unwrap().amis[0].id = "ami-new".into();
    let (claim, node) = node(json!("ami-x86"), "m5.large", json!({"memory": "7500Mi"}));
    ec2.registered(&claim, &node);
    assert_eq!((of(&own), of(&other)), (Some(7500), Some(7577)));
}

#[tokio::test]
async fn c35_in_an_isolated_vpc_a_class_is_released_without_iam() {
    let templates = "<launchTemplates><item><launchTemplateId>lt-1</launchTemplateId><launchTemplateName>t</launchTemplateName></item></launchTemplates>";
    let (clients, seen) = wire::clients(Box::new(move |request| match request.action.as_str() {
        "DescribeLaunchTemplates" => wire::ok("DescribeLaunchTemplates", templates),
        "DeleteLaunchTemplate" => wire::ok("DeleteLaunchTemplate", ""),
        other => panic!("{other} was not expected"),
    }));
    let options = Options { isolated_vpc: true, ..Options::of("c1") };
    Ec2Provider::new(clients, options, facts()).release_class(&class(json!({}))).await.unwrap();
    let actions: Vec<String> = seen.lock().unwrap().iter().map(|request| request.action.clone()).collect();
    assert_eq!(actions, ["DescribeLaunchTemplates", "DeleteLaunchTemplate"]);
}

/// EC2 that answers each call with the last of these that is left.
fn scripted(answers: Vec<Option<(u16, String)>>) -> Ec2Provider {
    let answers = Mutex::new(answers);
    let (clients, _) = wire::clients(Box::new(move |_| {
        let mut left = answers.lock().unwrap();
        if left.len() > 1 { left.pop().unwrap() } else { left[0].clone() }
    }));
    Ec2Provider::new(clients, Options::of("c1"), facts())
}

#[tokio::test]
async fn status_checks_that_fail_are_told_and_those_that_are_refused_are_told_elsewhere() {
    let reported = |ec2: &Ec2Provider| ec2.unreadable().into_keys().collect::<Vec<_>>();
    let failing = scripted(vec![wire::refusal("InvalidParameterValue", "odd")]);
    failing.unhealthy().await.unwrap_err();
    assert_eq!(reported(&failing), ["StatusChecks"]);
    assert!(failing.unreadable()["StatusChecks"].contains("ec2:DescribeInstanceStatus: InvalidParameterValue"));
    let refused = scripted(vec![wire::refusal("UnauthorizedOperation", "no")]);
    assert!(matches!(refused.unhealthy().await, Err(CloudError::Refused(_))));
    assert!(reported(&refused).is_empty());
    let well = scripted(vec![wire::ok("DescribeInstanceStatus", "<instanceStatusSet/>")]);
    well.degraded_apis.record_failure(crate::cloud::ec2::degraded_apis::STATUS_CHECKS, "it failed".into());
    assert!(well.unhealthy().await.unwrap().is_empty());
    assert!(reported(&well).is_empty(), "it is over");
}

#[tokio::test]
async fn profiles_that_iam_does_not_let_go_are_told_until_it_does() {
    let refusal = |code: &str| {
        let error = format!("<Error><Type>Sender</Type><Code>{code}</Code><Message>no</Message></Error>");
        let iam = "https://iam.amazonaws.com/doc/2010-05-08/";
        Some((403, format!(r#"<ErrorResponse xmlns="{iam}">{error}<RequestId>r</RequestId></ErrorResponse>"#)))
    };
    let none = r#"<ListInstanceProfilesResponse xmlns="https://iam.amazonaws.com/doc/2010-05-08/"><ListInstanceProfilesResult>
        <InstanceProfiles/><IsTruncated>false</IsTruncated></ListInstanceProfilesResult></ListInstanceProfilesResponse>"#;
    let ec2 = scripted(vec![Some((200, none.to_owned())), refusal("ValidationError"), refusal("AccessDenied")]);
    let used = BTreeSet::new();
    let reported = || ec2.unwritable().into_values().collect::<String>();
    assert!(matches!(ec2.delete_unused_profiles(&used).await, Err(CloudError::Refused(_))));
    assert!(reported().contains("allow iam:ListInstanceProfiles in the controller's policy"), "{}", reported());
    ec2.delete_unused_profiles(&used).await.unwrap_err();
    assert!(!reported().is_empty(), "another failure says nothing of rights");
    ec2.delete_unused_profiles(&used).await.unwrap();
    assert_eq!(reported(), "");
}
