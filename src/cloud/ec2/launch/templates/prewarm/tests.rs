use std::collections::BTreeSet;
use std::sync::Mutex;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use super::*;
use crate::api::{Ec2NodeClass, NodePool};
use crate::cloud::ec2::launch::request::tests::{claim, class, facts, request};
use crate::cloud::ec2::launch::templates::recent::tests::recent_shape;
use crate::cloud::ec2::node_class::capacity_reservations::tests::reservation;
use crate::cloud::ec2::node_class::cluster_facts::ClusterFacts;
use crate::cloud::ec2::node_class::subnets::Subnet;
use crate::cloud::ec2::options::Options;
use crate::cloud::ec2::provider::Ec2Provider;
use crate::cloud::{Cloud, ClusterObserver};
use crate::cloud::{LaunchDetails, LaunchRequest};
use crate::model::labels;
use crate::model::offering::CapacityType;
use crate::model::time::UnixMillis;
use crate::test_support::fake_aws;
use crate::test_support::fake_aws::Request;
use crate::test_support::objects::node_pool;

const MINUTE: Duration = Duration::from_mins(1);
const HOUR: Duration = Duration::from_hours(1);
/// Interval of sweeps.
const SWEEP: Duration = Duration::from_secs(10);

/// Launch templates by name, each with its image; what is refused.
#[derive(Default)]
struct Fake {
    templates: BTreeMap<String, String>,
    refused_image: Option<&'static str>,
    launched: usize,
}

impl Fake {
    fn answer(&mut self, request: &Request) -> Option<(u16, String)> {
        let form = &request.form;
        match request.action.as_str() {
            "DescribeLaunchTemplates" => {
                assert!(!self.templates.contains_key(&form["LaunchTemplateName.1"]), "it is known");
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
            other => panic!("{other} was not expected"),
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

/// EC2, of which one class and the NodePool `default` are known.
fn world() -> World {
    let fake = Arc::new(Mutex::new(Fake::default()));
    let answers = Arc::clone(&fake);
    let (clients, seen) = fake_aws::clients(Box::new(move |request| answers.lock().unwrap().answer(request)));
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
    /// A request of a fresh claim for m5.large, as the class is now.
    fn request(&self, uid: &str) -> LaunchRequest {
        let mut claim = claim(&(crate::clock::now() + MINUTE).rfc3339(), json!({}));
        claim.metadata.uid = Some(uid.to_owned());
        let base = request(Ec2NodeClass::clone(&self.class), claim.clone(), &["m5.large"]);
        let (class, catalog) = (Arc::clone(&self.class), self.ec2.catalog(&self.class));
        let details = LaunchDetails { claim, class, catalog, named: BTreeSet::new() };
        LaunchRequest { client_token: uid.to_owned(), details: Some(Arc::new(details)), ..base }
    }

    /// Launches a claim of its own with a label of this value. Returns calls for templates that it took.
    async fn launch(&self, uid: &str, tier: &str) -> usize {
        let before = self.calls();
        let request = LaunchRequest { labels: [("tier".to_owned(), tier.to_owned())].into(), ..self.request(uid) };
        self.ec2.launch(request).await.unwrap();
        self.calls() - before
    }

    /// Changes the class, and lets the cloud see it.
    fn change(&mut self, change: impl Fn(&mut Ec2NodeClass)) {
        let mut class = Ec2NodeClass::clone(&self.class);
        change(&mut class);
        self.class = Arc::new(class);
        self.ec2.observe(std::slice::from_ref(&self.class), &self.pools);
    }

    fn set_image(&mut self, id: &str) {
        self.change(|class| class.status.as_mut().unwrap().amis[0].id = id.to_owned());
    }

    /// Calls for launch templates so far.
    fn calls(&self) -> usize {
        self.seen.lock().unwrap().iter().filter(|request| request.action.contains("LaunchTemplate")).count()
    }

    /// Images of the templates in EC2.
    fn images(&self) -> Vec<String> {
        self.fake.lock().unwrap().templates.values().cloned().collect()
    }

    /// Sweeps; returns calls that it took.
    async fn sweep(&self, now: UnixMillis) -> usize {
        let before = self.calls();
        self.ec2.prewarmer.sweep(now).await;
        self.calls() - before
    }
}

#[tokio::test]
async fn a_template_stays_for_an_hour_after_the_last_launch_and_costs_no_calls() {
    let world = world();
    let begin = crate::clock::now();
    assert_eq!(world.launch("uid-1", "web").await, 2, "looked for and made");
    for number in 0..360 {
        assert_eq!(world.sweep(begin + SWEEP * number).await, 0);
    }
    assert_eq!(world.launch("uid-2", "web").await, 0);
    assert_eq!(world.sweep(begin + HOUR - Duration::from_millis(1)).await, 0);
    let end = crate::clock::now() + HOUR;
    assert_eq!((world.sweep(end).await, world.images().len()), (0, 1), "it was wanted a moment ago");
    assert_eq!((world.sweep(end + MINUTE).await, world.images().len()), (1, 0));
}

#[tokio::test]
async fn a_new_image_has_its_template_before_a_launch_and_the_old_one_goes_a_minute_later() {
    let mut world = world();
    let begin = crate::clock::now();
    world.launch("uid-1", "web").await;
    assert_eq!(world.sweep(begin + MINUTE * 5).await, 0);
    world.set_image("ami-new");
    assert_eq!(world.sweep(begin + MINUTE * 5 + SWEEP).await, 2, "looked for and made");
    assert_eq!(world.images().len(), 2);
    assert_eq!(world.sweep(begin + MINUTE * 6 - Duration::from_millis(1)).await, 0);
    assert_eq!(world.sweep(begin + MINUTE * 6).await, 1, "the old one is deleted");
    assert_eq!(world.images(), ["ami-new"]);
    assert_eq!(world.launch("uid-2", "web").await, 0);
}

#[tokio::test]
async fn a_template_is_made_anew_by_what_the_class_and_the_cluster_say_now() {
    let mut world = world();
    let mut now = crate::clock::now();
    world.launch("uid-1", "web").await;
    let mut made = async |world: &World| {
        now += SWEEP;
        world.sweep(now).await == 2
    };
    world.change(|class| class.status.as_mut().unwrap().security_groups[0].id = "sg-2".into());
    assert!(made(&world).await, "security group");
    world.change(|class| class.spec.kubelet = serde_json::from_value(json!({"maxPods": 50})).unwrap());
    assert!(made(&world).await, "pods of a node");
    let user_data = &world.seen.lock().unwrap().last().unwrap().form["LaunchTemplateData.UserData"].clone();
    let user_data = String::from_utf8(STANDARD.decode(user_data).unwrap()).unwrap();
    assert!(user_data.contains("maxPods: 50"), "{user_data}");
    world.ec2.node_classes.set_cluster(ClusterFacts { ca_bundle: "bmV3".into(), ..facts() });
    assert!(made(&world).await, "CA");
    world.change(|class| class.metadata.annotations = Some([("touched".to_owned(), "1".to_owned())].into()));
    assert!(!made(&world).await, "nothing that a template is made of");
    assert_eq!(world.launch("uid-2", "web").await, 0);
}

#[tokio::test]
async fn a_class_that_may_not_launch_makes_nothing_until_it_may() {
    let mut world = world();
    let begin = crate::clock::now();
    world.launch("uid-1", "web").await;
    world.set_image("ami-new");
    world.change(|class| class.metadata.generation = Some(4));
    assert_eq!(world.sweep(begin + SWEEP).await, 0);
    world.change(|class| class.status.as_mut().unwrap().conditions[0].observed_generation = Some(4));
    assert_eq!(world.sweep(begin + SWEEP * 2).await, 2);
    world.change(|class| class.status.as_mut().unwrap().conditions[0].status = "False".into());
    let last = crate::clock::now().max(begin + SWEEP * 2);
    assert_eq!((world.sweep(last + MINUTE).await, world.images().len()), (1, 1), "only what was wanted last stays");
}

#[tokio::test]
async fn what_is_gone_or_going_keeps_no_template() {
    let going = json!({"deletionTimestamp": "2026-01-01T00:00:00Z"});
    let (own_class, own_pool) = (Arc::new(class(json!({}))), pool(json!({}), "default"));
    let mut deleted = class(json!({}));
    deleted.metadata.deletion_timestamp = serde_json::from_value(going["deletionTimestamp"].clone()).unwrap();
    let (kept, gone) = ((0, 1), (1, 0));
    for (what, classes, pools, expected) in [
        ("all is there", vec![Arc::clone(&own_class)], vec![Arc::clone(&own_pool)], kept),
        ("no class", vec![], vec![Arc::clone(&own_pool)], gone),
        ("a class that is deleted", vec![Arc::new(deleted)], vec![Arc::clone(&own_pool)], gone),
        ("no pool", vec![Arc::clone(&own_class)], vec![], gone),
        ("a pool that is deleted", vec![Arc::clone(&own_class)], vec![pool(going, "default")], gone),
        ("a pool that has another class", vec![Arc::clone(&own_class)], vec![pool(json!({}), "other")], gone),
    ] {
        let world = world();
        world.launch("uid-1", "web").await;
        let end = crate::clock::now();
        world.ec2.observe(&classes, &pools);
        assert_eq!((world.sweep(end + MINUTE).await, world.images().len()), expected, "{what}");
        world.ec2.observe(std::slice::from_ref(&own_class), std::slice::from_ref(&own_pool));
        assert_eq!(world.sweep(end + MINUTE * 2 - Duration::from_millis(1)).await, 0, "{what}: nothing comes back");
    }
}

#[tokio::test]
async fn a_template_that_can_not_be_made_holds_up_no_other_and_is_tried_again_by_each_sweep() {
    for refused in ["ami-x86-new", "ami-arm-new"] {
        let mut world = world();
        let begin = crate::clock::now();
        world.launch("uid-1", "web").await;
        let of_arm = request(class(json!({})), claim("2026-01-01T00:00:00Z", json!({})), &["m6g.large"]).overrides;
        world.ec2.launch(LaunchRequest { overrides: of_arm, ..world.request("uid-2") }).await.unwrap();
        world.change(|class| class.status.as_mut().unwrap().amis.iter_mut().for_each(|image| image.id += "-new"));
        world.fake.lock().unwrap().refused_image = Some(refused);
        let new = |world: &World| world.images().iter().filter(|image| image.ends_with("-new")).count();
        world.sweep(begin + SWEEP).await;
        world.sweep(begin + SWEEP * 2).await;
        assert_eq!(new(&world), 1);
        assert_eq!(world.sweep(begin + SWEEP * 3).await, 2, "looked for and refused");
        world.fake.lock().unwrap().refused_image = None;
        assert_eq!(world.sweep(begin + SWEEP * 4).await, 2);
        assert_eq!(new(&world), 2);
        assert_eq!(world.sweep(begin + SWEEP * 5).await, 0);
    }
}

#[tokio::test]
async fn a_sweep_makes_so_few_templates_that_launches_can_be_asked_for_beside_it() {
    let world = world();
    for number in 0..=MAX_CREATED {
        world.ec2.launch_context.recent_shapes.keep(recent_shape(&format!("pool-{number}"), "x", 1, UnixMillis(0)));
    }
    assert_eq!(world.sweep(UnixMillis(0)).await, 2 * MAX_CREATED);
    assert_eq!(world.sweep(UnixMillis(0) + SWEEP).await, 2);
    assert_eq!(world.sweep(UnixMillis(0) + SWEEP * 2).await, 0);
}

#[tokio::test]
async fn of_a_pools_launches_the_last_four_that_differ_keep_their_templates() {
    let world = world();
    for tier in ["a", "b", "c", "d", "e"] {
        world.launch(&format!("uid-{tier}"), tier).await;
    }
    let end = crate::clock::now();
    assert_eq!((world.sweep(end + MINUTE).await, world.images().len()), (1, 4), "the first one is deleted");
    assert_eq!(world.launch("uid-b2", "b").await, 0);
    assert_eq!(world.launch("uid-a2", "a").await, 2);
}

#[tokio::test]
async fn a_launch_into_a_reservation_is_not_remembered() {
    let mut world = world();
    world.change(|class| {
        class.status.as_mut().unwrap().capacity_reservations = vec![reservation("cr-1", "default", None)];
    });
    world.ec2.offerings.with_reservations(|counts| counts.set_described([("cr-1", 5)], crate::clock::now()));
    let mut request = world.request("uid-1");
    for offering in &mut request.overrides {
        offering.capacity_type = CapacityType::Reserved;
    }
    let mut details = Arc::into_inner(request.details.take().unwrap()).unwrap();
    let requirement = json!([{"key": labels::CAPACITY_TYPE, "operator": "In", "values": ["reserved"]}]);
    details.claim.spec.requirements = serde_json::from_value(requirement).unwrap();
    let launched = world.ec2.launch(LaunchRequest { details: Some(Arc::new(details)), ..request }).await.unwrap();
    assert_eq!(launched.instance.reservation.map(|reservation| reservation.id).as_deref(), Some("cr-1"));
    assert_eq!((world.sweep(crate::clock::now() + MINUTE).await, world.images().len()), (1, 0), "deleted");
}

#[tokio::test]
async fn a_template_that_a_launch_found_deleted_is_kept_again() {
    let world = world();
    world.launch("uid-1", "web").await;
    let name = world.fake.lock().unwrap().templates.keys().next().unwrap().clone();
    world.fake.lock().unwrap().templates.clear();
    world.ec2.launch_context.templates.forget([name.as_str()]);
    assert_eq!(world.sweep(crate::clock::now()).await, 2);
    assert_eq!(world.images(), ["ami-x86"]);
}
