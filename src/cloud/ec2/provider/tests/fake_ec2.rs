//! EC2 in memory with faults, and the launch requests of the tests.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use serde_json::json;
use stowage_runtime::clock;

use crate::ec2::launch::request::tests::{claim, class, facts, request};
use crate::ec2::node_class::subnets::Subnet;
use crate::ec2::options::Options;
use crate::ec2::provider::Ec2Provider;
use crate::test_support::fake_aws;
use crate::test_support::fake_aws::Request;
use crate::{Cloud, LaunchDetails, LaunchError, LaunchRequest, Launched};

/// EC2 in memory: launch templates by name, instances by id, and faults.
#[derive(Default)]
pub(super) struct Fake {
    pub(super) templates: BTreeSet<String>,
    /// Id, launch tag, state.
    pub(super) instances: Vec<(String, String, &'static str)>,
    /// Client tokens of CreateFleet calls, in order.
    pub(super) tokens: Vec<String>,
    /// Target capacity and response by client token.
    pub(super) by_token: BTreeMap<String, (String, String)>,
    /// Whether responses of CreateFleet are lost.
    pub(super) lose_responses: bool,
    /// Whether DescribeInstances and TerminateInstances do not find instances yet.
    pub(super) hide_instances: bool,
    /// Maximum instances per CreateFleet call.
    pub(super) max_launched: Option<usize>,
    /// Responses of the next CreateFleet calls, last first.
    pub(super) scripted: Vec<Option<(u16, String)>>,
}

impl Fake {
    fn respond(&mut self, request: &Request) -> Option<(u16, String)> {
        let form = &request.form;
        match request.action.as_str() {
            "DescribeLaunchTemplates" => match self.templates.get(&form["LaunchTemplateName.1"]) {
                Some(name) => fake_aws::ok(
                    "DescribeLaunchTemplates",
                    &format!(
                        "<launchTemplates><item><launchTemplateId>id-{name}</launchTemplateId></item></launchTemplates>"
                    ),
                ),
                None => fake_aws::error("InvalidLaunchTemplateName.NotFoundException", "gone"),
            },
            "CreateLaunchTemplate" => {
                let name = form["LaunchTemplateName"].clone();
                self.templates.insert(name.clone());
                fake_aws::ok(
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
                        Some(id) => fake_aws::error("InvalidInstanceID.NotFound", id),
                        None => fake_aws::ok("DescribeInstances", "<reservationSet/>"),
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
                fake_aws::ok(
                    "DescribeInstances",
                    &format!("<reservationSet>{}</reservationSet>", items.collect::<String>()),
                )
            }
            "TerminateInstances" => {
                let id = &form["InstanceId.1"];
                if self.hide_instances {
                    return fake_aws::error("InvalidInstanceID.NotFound", id);
                }
                for (known, _, state) in &mut self.instances {
                    if known == id {
                        *state = "shutting-down";
                    }
                }
                let item = format!(
                    "<item><instanceId>{id}</instanceId><currentState><name>shutting-down</name></currentState></item>"
                );
                fake_aws::ok("TerminateInstances", &format!("<instancesSet>{item}</instancesSet>"))
            }
            other => panic!("unexpected call {other}"),
        }
    }

    fn create_fleet(&mut self, form: &BTreeMap<String, String>) -> Option<(u16, String)> {
        self.tokens.push(form["ClientToken"].clone());
        if let Some(response) = self.scripted.pop() {
            return response;
        }
        if !self.templates.contains(&form["LaunchTemplateConfigs.1.LaunchTemplateSpecification.LaunchTemplateName"]) {
            return fake_aws::error("InvalidLaunchTemplateName.NotFoundException", "gone");
        }
        let capacity = form["TargetCapacitySpecification.TotalTargetCapacity"].clone();
        let response = match self.by_token.get(&form["ClientToken"]) {
            Some((before, _)) if *before != capacity => {
                return fake_aws::error("IdempotentParameterMismatch", "other parameters");
            }
            Some((_, response)) => response.clone(),
            None => self.launch(capacity.parse().unwrap(), form),
        };
        self.by_token.insert(form["ClientToken"].clone(), (capacity, response.clone()));
        if self.lose_responses { None } else { fake_aws::ok("CreateFleet", &response) }
    }

    fn launch(&mut self, count: usize, form: &BTreeMap<String, String>) -> String {
        let key = form.iter().find(|(_, value)| *value == "stowage.dev/launch").unwrap().0;
        let tag = &form[&key.replace(".Key", ".Value")];
        let mut items = Vec::new();
        for _ in 0..count.min(self.max_launched.unwrap_or(count)) {
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
            if self.max_launched.is_some() { error } else { "" }
        )
    }
}

/// A CreateFleet response in which the only override failed.
pub(super) fn failed_override(code: &str) -> Option<(u16, String)> {
    let error = format!(
        "<errorSet><item><errorCode>{code}</errorCode><errorMessage>m</errorMessage><launchTemplateAndOverrides><overrides>\
         <instanceType>m5.large</instanceType><subnetId>subnet-a</subnetId><availabilityZone>us-east-1a</availabilityZone></overrides>\
         </launchTemplateAndOverrides></item></errorSet>"
    );
    fake_aws::ok("CreateFleet", &error)
}

pub(super) struct World {
    pub(super) ec2: Ec2Provider,
    pub(super) fake: Arc<Mutex<Fake>>,
}

pub(super) fn world() -> World {
    let fake = Arc::new(Mutex::new(Fake::default()));
    let endpoint = Arc::clone(&fake);
    let (clients, _) = fake_aws::clients(Box::new(move |request| endpoint.lock().unwrap().respond(request)));
    let ec2 = Ec2Provider::new(clients, Options::of("c1"), facts());
    let subnet = |id: &str, zone: &str, free| Subnet { id: id.into(), zone: zone.into(), zone_id: None, free };
    let subnets = [subnet("subnet-a", "us-east-1a", 100), subnet("subnet-b", "us-east-1b", 100)];
    ec2.node_classes.with_addresses(|addresses| addresses.set_described(&subnets));
    World { ec2, fake }
}

/// A request for a claim that this process created. A creation time in the future holds for any duration of the test.
pub(super) fn fresh() -> LaunchRequest {
    let created = (clock::now() + Duration::from_mins(1)).rfc3339();
    request(class(json!({})), claim(&created, json!({})), &["m5.large"])
}

/// A request for a claim that an earlier process created.
pub(super) fn inherited() -> LaunchRequest {
    request(class(json!({})), claim("2026-01-01T00:00:00Z", json!({})), &["m5.large"])
}

/// A request for a claim of a launch group that this process created.
pub(super) fn member(uid: &str, group: &str, size: usize) -> LaunchRequest {
    let mut request = fresh();
    let details = request.details.take().unwrap();
    let mut claim = details.claim.clone();
    claim.metadata.uid = Some(uid.into());
    claim.metadata.annotations =
        Some([(stowage_model::labels::LAUNCH_GROUP.to_owned(), format!("{group}/{size}"))].into());
    let (class, catalog) = (Arc::clone(&details.class), Arc::clone(&details.catalog));
    let details = LaunchDetails { claim, class, catalog, named: BTreeSet::new() };
    LaunchRequest {
        client_token: uid.into(),
        node_claim: format!("claim-{uid}"),
        details: Some(details.into()),
        ..request
    }
}

/// A request for a claim of a launch group that an earlier process created; other claims of the group name the instances `named`.
pub(super) fn inherited_member(uid: &str, group: &str, size: usize, named: &[&str]) -> LaunchRequest {
    let mut request = member(uid, group, size);
    let details = request.details.take().unwrap();
    let mut claim = details.claim.clone();
    claim.metadata.creation_timestamp = serde_json::from_value(json!("2026-01-01T00:00:00Z")).unwrap();
    let (class, catalog) = (Arc::clone(&details.class), Arc::clone(&details.catalog));
    let named = named.iter().map(|id| format!("aws:///us-east-1a/{id}")).collect();
    LaunchRequest { details: Some(LaunchDetails { claim, class, catalog, named }.into()), ..request }
}

pub(super) async fn launch_all(world: &World, requests: Vec<LaunchRequest>) -> Vec<Result<Launched, LaunchError>> {
    futures::future::join_all(requests.into_iter().map(|request| world.ec2.launch(request))).await
}

pub(super) fn ids(results: &[Result<Launched, LaunchError>]) -> BTreeSet<String> {
    results.iter().flatten().map(|launched| launched.instance.id.clone()).collect()
}

impl World {
    pub(super) fn fake(&self) -> MutexGuard<'_, Fake> {
        self.fake.lock().unwrap()
    }
}
