use serde_json::json;

use super::super::client::wire::{self, Seen};
use super::super::messages::EventKind;
use super::super::prepare::tests::{claim, class, facts, request};
use super::super::subnets::Subnet;
use super::*;

/// EC2 in a few lines: templates by name, instances by id, and what goes wrong.
#[derive(Default)]
struct Fake {
    templates: BTreeSet<String>,
    /// Id, UID tag, state.
    instances: Vec<(String, String, &'static str)>,
    /// Tokens heard, and whether a call's answer gets lost, or its instances don't show.
    tokens: Vec<String>,
    lose_answers: bool,
    hide_instances: bool,
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
                let uid = form.iter().find(|(_, value)| *value == "tag:stowage.dev/nodeclaim-uid");
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
                         <tagSet><item><key>stowage.dev/nodeclaim-uid</key><value>{uid}</value></item></tagSet></item></instancesSet></item>"
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

    fn create_fleet(&mut self, form: &std::collections::BTreeMap<String, String>) -> Option<(u16, String)> {
        self.tokens.push(form["ClientToken"].clone());
        if let Some(answer) = self.fleet.pop() {
            return answer;
        }
        if !self.templates.contains(&form["LaunchTemplateConfigs.1.LaunchTemplateSpecification.LaunchTemplateName"]) {
            return wire::refusal("InvalidLaunchTemplateName.NotFoundException", "gone");
        }
        let id = format!("i-{:017x}", self.instances.len() + 1);
        self.instances.push((id.clone(), "uid-1".into(), "running"));
        let answer = wire::ok(
            "CreateFleet",
            &format!(
                "<fleetInstanceSet><item><instanceIds><item>{id}</item></instanceIds><instanceType>m5.large</instanceType>\
                 <launchTemplateAndOverrides><overrides><subnetId>subnet-a</subnetId><availabilityZone>us-east-1a</availabilityZone>\
                 <imageId>ami-x86</imageId></overrides></launchTemplateAndOverrides></item></fleetInstanceSet>"
            ),
        );
        if self.lose_answers { None } else { answer }
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
    ec2: Ec2,
    fake: Arc<Mutex<Fake>>,
}

fn world() -> World {
    let fake = Arc::new(Mutex::new(Fake::default()));
    let answers = Arc::clone(&fake);
    let (clients, _) = wire::clients(Box::new(move |request| answers.lock().unwrap().answer(request)));
    let ec2 = Ec2::new(clients, Options::of("c1"), facts());
    let subnet = |id: &str, zone: &str, free| Subnet { id: id.into(), zone: zone.into(), zone_id: None, free };
    ec2.addresses().describe(&[subnet("subnet-a", "us-east-1a", 100), subnet("subnet-b", "us-east-1b", 100)]);
    World { ec2, fake }
}

/// A claim made a minute from now: fresh, whatever the clocks say.
fn fresh() -> LaunchRequest {
    let created = k8s_openapi::jiff::Timestamp::from_millisecond(now_ms() + 60_000).unwrap().to_string();
    request(class(json!({})), claim(&created, json!({})), &["m5.large"])
}

/// A claim that an earlier process made.
fn old() -> LaunchRequest {
    request(class(json!({})), claim("2026-01-01T00:00:00Z", json!({})), &["m5.large"])
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
    assert_eq!(world.ec2.calls()["CreateFleet"], 1);
    assert!(!world.ec2.calls().contains_key("DescribeInstances"), "nothing to look for");
}

#[tokio::test]
async fn a_lost_answer_launches_nothing_twice() {
    let world = world();
    world.fake().lose_answers = true;
    let error = world.ec2.launch(fresh()).await.unwrap_err();
    assert!(matches!(error, LaunchError::Other(_)), "{error}");
    assert!(world.fake().tokens.iter().all(|token| token == "uid-1"), "every attempt has the same token");
    world.fake().lose_answers = false;
    let before = world.fake().tokens.len();
    let launched = world.ec2.launch(fresh()).await.unwrap();
    assert_eq!(launched.instance.id, "i-00000000000000001");
    assert_eq!(world.fake().tokens.len(), before, "found by its tag, not asked for again");
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
    world.ec2.launch(fresh()).await.unwrap();
    assert_eq!(world.ec2.calls()["CreateLaunchTemplate"], 2);
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
    assert!(world.ec2.unavailable.lock().unwrap().covers(&unavailable[0], None, now_ms()));
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
    world.ec2.addresses().describe(&[third]);
    world.fake().fleet.push(refused_slot("InsufficientFreeAddressesInSubnet"));
    let request = request(class.clone(), claim("2026-01-01T00:00:00Z", json!({})), &["m5.large"]);
    world.ec2.launch(request).await.unwrap_err();
    let pods = [("us-east-1a".to_owned(), 10)].into();
    let (chosen, _) = world.ec2.addresses().take(&class.status.as_ref().unwrap().subnets, &pods);
    assert_eq!(chosen["us-east-1a"], "subnet-c");
    let marks = world.ec2.unavailable.lock().unwrap();
    assert!(marks.exhausted_zones(&class.status.unwrap().subnets, now_ms()).is_empty(), "the zone has another subnet");
}

#[tokio::test]
async fn what_ec2_does_not_describe_yet_is_neither_gone_nor_let_go() {
    let world = world();
    let id = world.ec2.launch(fresh()).await.unwrap().instance.provider_id;
    world.fake().hide_instances = true;
    assert!(world.ec2.describe(&id).await.unwrap().is_some());
    assert_eq!(world.ec2.list().await.unwrap().len(), 1);
    world.ec2.terminate(&id).await.unwrap_err();
    world.fake().hide_instances = false;
    assert!(world.ec2.terminate(&id).await.unwrap(), "it is going");
    assert!(world.ec2.terminate(&id).await.unwrap());
    assert_eq!(world.ec2.calls()["TerminateInstances"], 2, "one refused, one that worked");
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
    lock(&world.ec2.bought).insert("i-1".into(), spot.clone());
    let event = |kind, id: &str| Received { receipt: "r".into(), kind, instance_id: id.into(), at_ms: 0 };
    world.ec2.heed(&event(EventKind::RebalanceRecommendation, "i-1"));
    world.ec2.heed(&event(EventKind::SpotInterrupted, "i-unknown"));
    let covered = |world: &World| lock(&world.ec2.unavailable).covers(&spot, None, now_ms());
    assert!(!covered(&world));
    world.ec2.heed(&event(EventKind::SpotInterrupted, "i-1"));
    assert!(covered(&world));
}
