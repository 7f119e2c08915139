use std::collections::BTreeSet;
use std::sync::Mutex;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use stowage_api::{Ec2NodeClass, NodePool};
use stowage_model::labels;
use stowage_model::offering::CapacityType;
use stowage_model::time::UnixMillis;
use stowage_runtime::clock;
use stowage_test_objects::node_pool;

use super::*;
use crate::ec2::launch::request::tests::{claim, class, facts, request};
use crate::ec2::launch::templates::recent::tests::recent_shape;
use crate::ec2::node_class::cluster_facts::ClusterFacts;
use crate::ec2::node_class::select_capacity_reservations::tests::reservation;
use crate::ec2::node_class::subnets::Subnet;
use crate::ec2::options::Options;
use crate::ec2::provider::Ec2Provider;
use crate::test_support::fake_aws;
use crate::test_support::fake_aws::Request;
use crate::{Cloud, ClusterObserver};
use crate::{LaunchDetails, LaunchRequest};

const MINUTE: Duration = Duration::from_mins(1);
const HOUR: Duration = Duration::from_hours(1);
/// Interval of sweeps.
const SWEEP: Duration = Duration::from_secs(10);

/// EC2 in memory: the images of launch templates by name, and an image whose templates can't be created.
#[derive(Default)]
struct Fake {
    templates: BTreeMap<String, String>,
    refused_image: Option<&'static str>,
    launched: usize,
}

impl Fake {
    fn respond(&mut self, request: &Request) -> Option<(u16, String)> {
        let form = &request.form;
        match request.action.as_str() {
            "DescribeLaunchTemplates" => {
                assert!(!self.templates.contains_key(&form["LaunchTemplateName.1"]), "it was created before");
                fake_aws::error("InvalidLaunchTemplateName.NotFoundException", "gone")
            }
            "CreateLaunchTemplate" => {
                let (name, image) = (&form["LaunchTemplateName"], &form["LaunchTemplateData.ImageId"]);
                if self.refused_image == Some(image) {
                    return fake_aws::error("UnauthorizedOperation", "no");
                }
                self.templates.insert(name.clone(), image.clone());
                let id = format!("<launchTemplate><launchTemplateId>{name}</launchTemplateId></launchTemplate>");
                fake_aws::ok("CreateLaunchTemplate", &id)
            }
            "DeleteLaunchTemplate" => {
                self.templates.remove(&form["LaunchTemplateId"]).unwrap();
                fake_aws::ok("DeleteLaunchTemplate", "")
            }
            "CreateFleet" => {
                self.launched += 1;
                let items = format!("<instanceIds><item>i-{}</item></instanceIds>", self.launched);
                let item = format!("<item>{items}<instanceType>m5.large</instanceType></item>");
                fake_aws::ok("CreateFleet", &format!("<fleetInstanceSet>{item}</fleetInstanceSet>"))
            }
            other => panic!("unexpected call {other}"),
        }
    }
}

struct World {
    ec2: Ec2Provider,
    fake: Arc<Mutex<Fake>>,
    seen: Arc<Mutex<Vec<Request>>>,
    class: Arc<Ec2NodeClass>,
    pools: Vec<Arc<NodePool>>,
}

/// A provider with one class and the NodePool `default`.
fn world() -> World {
    let fake = Arc::new(Mutex::new(Fake::default()));
    let endpoint = Arc::clone(&fake);
    let (clients, seen) = fake_aws::clients(Box::new(move |request| endpoint.lock().unwrap().respond(request)));
    let ec2 = Ec2Provider::new(clients, Options::of("c1"), facts());
    let subnet = |id: &str, zone: &str| Subnet { id: id.into(), zone: zone.into(), zone_id: None, free: 1_000 };
    let subnets = [subnet("subnet-a", "us-east-1a"), subnet("subnet-b", "us-east-1b")];
    ec2.node_classes.with_addresses(|addresses| addresses.set_described(&subnets));
    World { ec2, fake, seen, class: Arc::new(class(json!({}))), pools: vec![pool(json!({}), "default")] }
}

fn pool(metadata: Value, class: &str) -> Arc<NodePool> {
    let spec = json!({"template": {"spec": {"nodeClassRef": {"name": class}}}});
    Arc::new(node_pool("default", &json!({"metadata": metadata, "spec": spec})))
}

impl World {
    /// A request for m5.large with the current class, for a claim that this process created.
    fn request(&self, uid: &str) -> LaunchRequest {
        let mut claim = claim(&(clock::now() + MINUTE).rfc3339(), json!({}));
        claim.metadata.uid = Some(uid.to_owned());
        let base = request(Ec2NodeClass::clone(&self.class), claim.clone(), &["m5.large"]);
        let (class, catalog) = (Arc::clone(&self.class), self.ec2.catalog(&self.class));
        let details = LaunchDetails { claim, class, catalog, named: BTreeSet::new() };
        LaunchRequest { client_token: uid.to_owned(), details: Some(Arc::new(details)), ..base }
    }

    /// Launches a claim with a label of this value. Returns the number of launch template calls.
    async fn launch(&self, uid: &str, tier: &str) -> usize {
        let before = self.calls();
        let request = LaunchRequest { labels: [("tier".to_owned(), tier.to_owned())].into(), ..self.request(uid) };
        self.ec2.launch(request).await.unwrap();
        self.calls() - before
    }

    /// Changes the class and reports it to the provider.
    fn change(&mut self, change: impl Fn(&mut Ec2NodeClass)) {
        let mut class = Ec2NodeClass::clone(&self.class);
        change(&mut class);
        self.class = Arc::new(class);
        self.ec2.observe(std::slice::from_ref(&self.class), &self.pools);
    }

    fn set_image(&mut self, id: &str) {
        self.change(|class| class.status.as_mut().unwrap().amis[0].id = id.to_owned());
    }

    /// Launch template calls so far.
    fn calls(&self) -> usize {
        self.seen.lock().unwrap().iter().filter(|request| request.action.contains("LaunchTemplate")).count()
    }

    /// Images of the templates in EC2.
    fn images(&self) -> Vec<String> {
        self.fake.lock().unwrap().templates.values().cloned().collect()
    }

    /// Runs a sweep and returns the number of launch template calls.
    async fn sweep(&self, now: UnixMillis) -> usize {
        let before = self.calls();
        self.ec2.prewarmer.sweep(now).await;
        self.calls() - before
    }
}

#[tokio::test]
async fn a_template_stays_for_an_hour_after_the_last_launch_without_calls() {
    let world = world();
    let begin = clock::now();
    assert_eq!(world.launch("uid-1", "web").await, 2, "described and created");
    for number in 0..360 {
        assert_eq!(world.sweep(begin + SWEEP * number).await, 0);
    }
    assert_eq!(world.launch("uid-2", "web").await, 0);
    assert_eq!(world.sweep(begin + HOUR - Duration::from_millis(1)).await, 0);
    let end = clock::now() + HOUR;
    assert_eq!((world.sweep(end).await, world.images().len()), (0, 1), "it was used less than a minute ago");
    assert_eq!((world.sweep(end + MINUTE).await, world.images().len()), (1, 0));
}

#[tokio::test]
async fn a_new_image_gets_its_template_before_a_launch() {
    let mut world = world();
    let begin = clock::now();
    world.launch("uid-1", "web").await;
    assert_eq!(world.sweep(begin + MINUTE * 5).await, 0);
    world.set_image("ami-new");
    assert_eq!(world.sweep(begin + MINUTE * 5 + SWEEP).await, 2, "described and created");
    assert_eq!(world.images().len(), 2);
    assert_eq!(world.sweep(begin + MINUTE * 6 - Duration::from_millis(1)).await, 0);
    assert_eq!(world.sweep(begin + MINUTE * 6).await, 1, "the old template is deleted after a minute");
    assert_eq!(world.images(), ["ami-new"]);
    assert_eq!(world.launch("uid-2", "web").await, 0);
}

#[tokio::test]
async fn a_changed_input_of_class_or_cluster_creates_a_new_template() {
    let mut world = world();
    let mut now = clock::now();
    world.launch("uid-1", "web").await;
    let mut created = async |world: &World| {
        now += SWEEP;
        world.sweep(now).await == 2
    };
    world.change(|class| class.status.as_mut().unwrap().security_groups[0].id = "sg-2".into());
    assert!(created(&world).await, "security group");
    world.change(|class| class.spec.kubelet = serde_json::from_value(json!({"maxPods": 50})).unwrap());
    assert!(created(&world).await, "pods of a node");
    let user_data = &world.seen.lock().unwrap().last().unwrap().form["LaunchTemplateData.UserData"].clone();
    let user_data = String::from_utf8(STANDARD.decode(user_data).unwrap()).unwrap();
    assert!(user_data.contains("maxPods: 50"), "{user_data}");
    world.ec2.node_classes.set_cluster(ClusterFacts { ca_bundle: "bmV3".into(), ..facts() });
    assert!(created(&world).await, "CA");
    world.change(|class| class.metadata.annotations = Some([("touched".to_owned(), "1".to_owned())].into()));
    assert!(!created(&world).await, "annotations are no input of templates");
    assert_eq!(world.launch("uid-2", "web").await, 0);
}

#[tokio::test]
async fn a_class_that_is_not_ready_gets_no_templates() {
    let mut world = world();
    let begin = clock::now();
    world.launch("uid-1", "web").await;
    world.set_image("ami-new");
    world.change(|class| class.metadata.generation = Some(4));
    assert_eq!(world.sweep(begin + SWEEP).await, 0);
    world.change(|class| class.status.as_mut().unwrap().conditions[0].observed_generation = Some(4));
    assert_eq!(world.sweep(begin + SWEEP * 2).await, 2);
    world.change(|class| class.status.as_mut().unwrap().conditions[0].status = "False".into());
    let last = clock::now().max(begin + SWEEP * 2);
    assert_eq!((world.sweep(last + MINUTE).await, world.images().len()), (1, 1), "only the current template stays");
}

#[tokio::test]
async fn a_deleted_class_or_pool_keeps_no_template() {
    let deleting = json!({"deletionTimestamp": "2026-01-01T00:00:00Z"});
    let (own_class, own_pool) = (Arc::new(class(json!({}))), pool(json!({}), "default"));
    let mut deleted = class(json!({}));
    deleted.metadata.deletion_timestamp = serde_json::from_value(deleting["deletionTimestamp"].clone()).unwrap();
    let (kept, gone) = ((0, 1), (1, 0));
    for (what, classes, pools, expected) in [
        ("class and pool exist", vec![Arc::clone(&own_class)], vec![Arc::clone(&own_pool)], kept),
        ("no class", vec![], vec![Arc::clone(&own_pool)], gone),
        ("a class that is being deleted", vec![Arc::new(deleted)], vec![Arc::clone(&own_pool)], gone),
        ("no pool", vec![Arc::clone(&own_class)], vec![], gone),
        ("a pool that is being deleted", vec![Arc::clone(&own_class)], vec![pool(deleting, "default")], gone),
        ("a pool of another class", vec![Arc::clone(&own_class)], vec![pool(json!({}), "other")], gone),
    ] {
        let world = world();
        world.launch("uid-1", "web").await;
        let end = clock::now();
        world.ec2.observe(&classes, &pools);
        assert_eq!((world.sweep(end + MINUTE).await, world.images().len()), expected, "{what}");
        world.ec2.observe(std::slice::from_ref(&own_class), std::slice::from_ref(&own_pool));
        assert_eq!(
            world.sweep(end + MINUTE * 2 - Duration::from_millis(1)).await,
            0,
            "{what}: no template is created again"
        );
    }
}

#[tokio::test]
async fn a_failed_creation_blocks_no_other_template_and_is_retried() {
    for refused in ["ami-x86-new", "ami-arm-new"] {
        let mut world = world();
        let begin = clock::now();
        world.launch("uid-1", "web").await;
        let arm = request(class(json!({})), claim("2026-01-01T00:00:00Z", json!({})), &["m6g.large"]).overrides;
        world.ec2.launch(LaunchRequest { overrides: arm, ..world.request("uid-2") }).await.unwrap();
        world.change(|class| class.status.as_mut().unwrap().amis.iter_mut().for_each(|image| image.id += "-new"));
        world.fake.lock().unwrap().refused_image = Some(refused);
        let new = |world: &World| world.images().iter().filter(|image| image.ends_with("-new")).count();
        world.sweep(begin + SWEEP).await;
        world.sweep(begin + SWEEP * 2).await;
        assert_eq!(new(&world), 1);
        assert_eq!(world.sweep(begin + SWEEP * 3).await, 2, "described, not created");
        world.fake.lock().unwrap().refused_image = None;
        assert_eq!(world.sweep(begin + SWEEP * 4).await, 2);
        assert_eq!(new(&world), 2);
        assert_eq!(world.sweep(begin + SWEEP * 5).await, 0);
    }
}

#[tokio::test]
async fn a_sweep_creates_a_limited_number_of_templates() {
    let world = world();
    for number in 0..=MAX_CREATED {
        world.ec2.launch_context.recent_shapes.keep(recent_shape(&format!("pool-{number}"), "x", 1, UnixMillis(0)));
    }
    assert_eq!(world.sweep(UnixMillis(0)).await, 2 * MAX_CREATED);
    assert_eq!(world.sweep(UnixMillis(0) + SWEEP).await, 2);
    assert_eq!(world.sweep(UnixMillis(0) + SWEEP * 2).await, 0);
}

#[tokio::test]
async fn templates_of_the_last_four_distinct_shapes_of_a_pool_are_kept() {
    let world = world();
    for tier in ["a", "b", "c", "d", "e"] {
        world.launch(&format!("uid-{tier}"), tier).await;
    }
    let end = clock::now();
    assert_eq!(
        (world.sweep(end + MINUTE).await, world.images().len()),
        (1, 4),
        "the template of the oldest shape is deleted"
    );
    assert_eq!(world.launch("uid-b2", "b").await, 0);
    assert_eq!(world.launch("uid-a2", "a").await, 2);
}

#[tokio::test]
async fn a_launch_into_a_reservation_is_no_recent_shape() {
    let mut world = world();
    world.change(|class| {
        class.status.as_mut().unwrap().capacity_reservations = vec![reservation("cr-1", "default", None)];
    });
    world.ec2.offerings.with_reservations(|counts| counts.set_described([("cr-1", 5)], clock::now()));
    let mut request = world.request("uid-1");
    for offering in &mut request.overrides {
        offering.capacity_type = CapacityType::Reserved;
    }
    let mut details = Arc::into_inner(request.details.take().unwrap()).unwrap();
    let requirement = json!([{"key": labels::CAPACITY_TYPE, "operator": "In", "values": ["reserved"]}]);
    details.claim.spec.requirements = serde_json::from_value(requirement).unwrap();
    let launched = world.ec2.launch(LaunchRequest { details: Some(Arc::new(details)), ..request }).await.unwrap();
    assert_eq!(launched.instance.reservation.map(|reservation| reservation.id).as_deref(), Some("cr-1"));
    assert_eq!((world.sweep(clock::now() + MINUTE).await, world.images().len()), (1, 0), "deleted");
}

#[tokio::test]
async fn a_template_that_was_found_deleted_is_created_again() {
    let world = world();
    world.launch("uid-1", "web").await;
    let name = world.fake.lock().unwrap().templates.keys().next().unwrap().clone();
    world.fake.lock().unwrap().templates.clear();
    world.ec2.launch_context.templates.forget([name.as_str()]);
    assert_eq!(world.sweep(clock::now()).await, 2);
    assert_eq!(world.images(), ["ami-x86"]);
}
