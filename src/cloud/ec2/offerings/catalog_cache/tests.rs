use stowage_model::labels;
use stowage_model::offering::Offering;
use stowage_test_objects::node_class;

use super::*;
use crate::catalog::embedded;
use crate::catalog::overhead::MIB;
use crate::ec2::node_class::ami_alias::one_of;
use crate::ec2::node_class::select_capacity_reservations::tests::reservation;
use crate::ec2::offerings::discovered_memory::tests::record;
use crate::ec2::offerings::placement_score_table::ScoreSettings;
use crate::ec2::offerings::region_snapshot::RegionSnapshot;
use crate::ec2::offerings::unavailable::CapacityScope;

struct World {
    region: Region,
    risk: SpotRisk,
    unavailable: UnavailableOfferings,
    memory: DiscoveredMemory,
    reservations: ReservationCounts,
    shifted_zone_ids: BTreeSet<String>,
    catalogs: CatalogCache,
}

impl World {
    fn new(region: &str) -> Self {
        Self {
            region: Region::new(RegionSnapshot::embedded(region, embedded())),
            risk: SpotRisk::new(ScoreSettings::default()),
            unavailable: UnavailableOfferings::default(),
            memory: DiscoveredMemory::default(),
            reservations: ReservationCounts::default(),
            shifted_zone_ids: BTreeSet::new(),
            catalogs: CatalogCache::default(),
        }
    }

    fn catalog(&mut self, class: &Ec2NodeClass, now_millis: i64) -> Arc<Catalog> {
        let options = Options::of("c1");
        let mut sources = CatalogSources {
            region: &self.region,
            risk: &self.risk,
            unavailable: &mut self.unavailable,
            memory: &mut self.memory,
            reservations: &self.reservations,
            shifted_zone_ids: &self.shifted_zone_ids,
            options: &options,
        };
        self.catalogs.catalog(&mut sources, class, None, UnixMillis(now_millis))
    }
}

fn class(zone: &str, arch: &str) -> Ec2NodeClass {
    let subnets = serde_json::json!([{"id": "subnet-1", "zone": zone, "zoneID": "az1"}]);
    let patch = serde_json::json!({"spec": {"amiFamily": "AL2023"}, "status": {"subnets": subnets}});
    let mut class = node_class("default", &patch);
    let requirements = vec![one_of(labels::ARCH, arch)];
    if let Some(status) = &mut class.status {
        status.amis = vec![AmiStatus { id: "ami-1".into(), requirements, ..AmiStatus::default() }];
    }
    class
}

#[test]
fn a_catalog_has_the_zones_of_the_class_and_types_that_boot_its_images() {
    let catalog = World::new("us-east-1").catalog(&class("us-east-1b", "arm64"), 0);
    assert!(catalog.instance_types.len() > 100);
    for found in &catalog.instance_types {
        assert_eq!(found.labels[labels::ARCH], "arm64");
        let available = found.offerings.iter().filter(|offering| offering.available);
        assert!(available.into_iter().all(|offering| &*offering.zone == "us-east-1b"));
    }
}

#[test]
fn c11_a_catalog_is_shared_until_an_offering_becomes_unavailable() {
    let (mut world, class) = (World::new("us-east-1"), class("us-east-1a", "amd64"));
    let first = world.catalog(&class, 0);
    assert!(Arc::ptr_eq(&first, &world.catalog(&class, 1)));
    let (instance_type, zone) = ("m5.xlarge".to_owned(), "us-east-1a".to_owned());
    let offering = Override { instance_type, zone, capacity_type: CapacityType::Spot };
    world.unavailable.mark(CapacityScope::Offering(offering, None), UnixMillis(1));
    let second = world.catalog(&class, 2);
    for (before, after) in first.instance_types.iter().zip(&second.instance_types) {
        assert_eq!(Arc::ptr_eq(before, after), &*before.name != "m5.xlarge", "{}", before.name);
    }
    assert_eq!(*world.catalog(&class, 200_000), *first, "available again");
}

#[test]
fn a_deleted_class_has_no_reserved_offerings() {
    let (mut world, mut class) = (World::new("us-east-1"), class("us-east-1a", "amd64"));
    class.status.as_mut().unwrap().capacity_reservations = vec![reservation("cr-1", "default", None)];
    world.catalog(&class, 0);
    assert_eq!(world.catalogs.reserved_offerings().len(), 1);
    world.catalogs.retain_classes(&[Arc::new(class)]);
    assert_eq!(world.catalogs.reserved_offerings().len(), 1);
    world.catalogs.retain_classes(&[]);
    assert!(world.catalogs.reserved_offerings().is_empty());
}

#[test]
fn c11_discovered_memory_applies_to_one_type_in_classes_with_its_image() {
    let (mut world, class) = (World::new("us-east-1"), class("us-east-1a", "amd64"));
    let mut other = class.clone();
    other.metadata.name = Some("other".into());
    other.status.as_mut().unwrap().amis[0].id = "ami-2".into();
    let (first, others) = (world.catalog(&class, 0), world.catalog(&other, 0));
    let room = |catalog: &Catalog| {
        let found = catalog.instance_types.iter().find(|found| &*found.name == "m5.large").unwrap();
        (found.capacity.memory.0 / MIB, found.allocatable.memory.0 / MIB)
    };
    assert_eq!(room(&first), (7577, 6903), "7.5 % less than 8 GiB");
    record(&mut world.memory, "ami-1", "m5.large", "7700Mi", UnixMillis(1));
    let higher = world.catalog(&class, 1);
    assert_eq!(room(&higher), (7700, 7026), "the overhead stays");
    for (before, after) in first.instance_types.iter().zip(&higher.instance_types) {
        assert_eq!(Arc::ptr_eq(before, after), &*before.name != "m5.large", "{}", before.name);
    }
    record(&mut world.memory, "ami-1", "m5.large", "7700Mi", UnixMillis(2));
    assert!(Arc::ptr_eq(&higher, &world.catalog(&class, 2)), "nothing changed");
    world.unavailable.mark(CapacityScope::Subnet("subnet-9".into()), UnixMillis(2));
    assert!(Arc::ptr_eq(&higher, &world.catalog(&class, 3)), "nothing changed for the class");
    record(&mut world.memory, "ami-1", "m5.large", "7477Mi", UnixMillis(4));
    assert_eq!(room(&world.catalog(&class, 4)), (7477, 6803));
    record(&mut world.memory, "ami-1", "m5.large", "100Mi", UnixMillis(5));
    assert_eq!(room(&world.catalog(&class, 5)), (7577, 6903), "not plausible");
    assert!(Arc::ptr_eq(&others, &world.catalog(&other, 5)), "another image");
    assert_eq!(*world.catalog(&class, 6_000_000_000), *first, "expired");
}

#[test]
fn reservations_of_one_type_and_zone_have_separate_counts() {
    let (mut world, mut class) = (World::new("us-east-1"), class("us-east-1a", "amd64"));
    let list = ["cr-1", "cr-2", "cr-3"].map(|id| reservation(id, "default", None));
    class.status.as_mut().unwrap().capacity_reservations = list.into();
    let left = |world: &mut World| {
        let catalog = world.catalog(&class, 0);
        let m5 = catalog.instance_types.iter().find(|found| &*found.name == "m5.large").unwrap();
        let reserved = m5.offerings.iter().filter(|offering| offering.capacity_type == CapacityType::Reserved);
        let of = |offering: &Offering| {
            let id = offering.label(labels::CAPACITY_RESERVATION_ID).unwrap_or_default().to_owned();
            (id, offering.available, offering.left)
        };
        reserved.map(of).collect::<Vec<_>>()
    };
    let line = |id: &str, left: i64| (id.to_owned(), left > 0, Some(left));
    assert_eq!(left(&mut world), [line("cr-1", 0), line("cr-2", 0), line("cr-3", 0)], "not described yet");
    world.reservations.set_described([("cr-1", 1), ("cr-2", 5)], UnixMillis(0));
    assert_eq!(left(&mut world), [line("cr-1", 1), line("cr-2", 5), line("cr-3", 0)]);
    world.reservations.allocate("cr-1", "uid", 1, UnixMillis(1));
    assert_eq!(left(&mut world), [line("cr-1", 0), line("cr-2", 5), line("cr-3", 0)], "a launch is pending");
    world.reservations.release("uid");
    assert_eq!(left(&mut world), [line("cr-1", 1), line("cr-2", 5), line("cr-3", 0)], "it failed");
    let key = ("m5.large".to_owned(), "us-east-1a".to_owned());
    assert_eq!(
        world.catalogs.reserved_offerings(),
        [(key.clone(), (true, MicroUsd(1)))].into(),
        "one of three reservations has capacity"
    );
    world.reservations.set_described([("cr-1", 0), ("cr-2", 0)], UnixMillis(1));
    left(&mut world);
    assert_eq!(world.catalogs.reserved_offerings(), [(key, (false, MicroUsd(1)))].into());
}

#[test]
fn c40_a_shifted_zone_has_no_available_offering() {
    let (mut world, class) = (World::new("us-east-1"), class("us-east-1a", "amd64"));
    let available = |world: &mut World| {
        let catalog = world.catalog(&class, 0);
        catalog.instance_types.iter().flat_map(|found| &found.offerings).any(|offering| offering.available)
    };
    assert!(available(&mut world));
    world.shifted_zone_ids.insert("az2".into());
    assert!(available(&mut world), "another zone");
    world.shifted_zone_ids.insert("az1".into());
    assert!(!available(&mut world));
    world.shifted_zone_ids.clear();
    assert!(available(&mut world));
}

#[test]
fn c15_an_exhausted_zone_has_no_available_offering() {
    let (mut world, class) = (World::new("us-east-1"), class("us-east-1a", "amd64"));
    world.unavailable.mark(CapacityScope::Subnet("subnet-1".into()), UnixMillis(0));
    let catalog = world.catalog(&class, 1);
    assert!(catalog.instance_types.iter().flat_map(|found| &found.offerings).all(|offering| !offering.available));
}
