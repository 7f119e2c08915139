//! What a node class may buy: the region's catalog, less the types that boot none of its images, the zones without
//! addresses, and those that are shifted away from, with as much memory as nodes showed. Kept until something in it changes.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use kube::ResourceExt;

use crate::api::Ec2NodeClass;
use crate::api::node_class::{AmiStatus, SubnetStatus};
use crate::cloud::Override;
use crate::cloud::ec2::boot_image::image_of;
use crate::cloud::ec2::offerings::catalog_key::ClassView;
use crate::cloud::ec2::offerings::class_offerings::OfferingInputs;
use crate::cloud::ec2::offerings::discovered_memory::DiscoveredMemory;
use crate::cloud::ec2::offerings::region::{Region, shared};
use crate::cloud::ec2::offerings::reservation_counts::ReservationCounts;
use crate::cloud::ec2::offerings::spot_risk::SpotRisk;
use crate::cloud::ec2::offerings::unavailable::Unavailable;
use crate::cloud::ec2::options::Options;
use crate::cloud::ec2::placement_group::PlacementGroup;
use crate::model::offering::{CapacityType, Catalog, InstanceType};
use crate::model::units::{Bytes, MicroUsd};

#[derive(Debug)]
struct Kept {
    whole: Arc<Catalog>,
    images: Vec<AmiStatus>,
    closed: BTreeSet<String>,
    /// Changes of discovered memory so far.
    discoveries: u64,
    seen: Arc<Catalog>,
}

/// What catalogs are drawn from besides the class.
pub struct Sources<'a> {
    /// What the region offers.
    pub region: &'a Region,
    /// How risky spot is.
    pub risk: &'a SpotRisk,
    /// What had no capacity.
    pub marks: &'a mut Unavailable,
    /// What memory nodes showed.
    pub memory: &'a mut DiscoveredMemory,
    /// What is left of capacity reservations.
    pub reservations: &'a ReservationCounts,
    /// Ids of zones that are shifted away from.
    pub shifted: &'a BTreeSet<String>,
    /// Settings.
    pub options: &'a Options,
}

/// Catalogs by name of node class.
#[derive(Debug, Default)]
pub struct Catalogs {
    kept: HashMap<String, Kept>,
}

/// Reserved offerings by instance type and zone: whether one of them may be had, and the price.
pub type ReservedOfferings = BTreeMap<(String, String), (bool, MicroUsd)>;

impl Catalogs {
    /// Forgets classes that are not there any more.
    pub fn keep(&mut self, classes: &[Arc<Ec2NodeClass>]) {
        self.kept.retain(|name, _| classes.iter().any(|class| class.name_any() == *name));
    }

    /// The reserved offerings of the classes that were looked at, as they were then.
    pub fn reserved(&self) -> ReservedOfferings {
        let mut out = ReservedOfferings::new();
        for found in self.kept.values().flat_map(|kept| &kept.seen.instance_types) {
            let reserved = found.offerings.iter().filter(|offering| offering.capacity_type == CapacityType::Reserved);
            for offering in reserved {
                let key = (found.name.to_string(), offering.zone.to_string());
                let (available, price) = out.entry(key).or_default();
                *available |= offering.available;
                *price = offering.price;
            }
        }
        out
    }

    /// What may be bought now for nodes of a class in a placement group, or in none.
    pub fn of(
        &mut self,
        sources: &mut Sources<'_>,
        class: &Ec2NodeClass,
        group: Option<PlacementGroup>,
        now_ms: i64,
    ) -> Arc<Catalog> {
        let group_id = group.as_ref().map(|group| group.id.clone());
        let (changes, discoveries) = (sources.marks.prune(now_ms), sources.memory.prune(now_ms));
        let risk = sources.risk.at(now_ms);
        let (marks, reservations, options) = (&*sources.marks, sources.reservations, sources.options);
        let market = OfferingInputs {
            stamp: [changes, reservations.changes(), risk.stamp],
            unavailable: &|offering: &Override, partition| {
                marks.covers_in(offering, group_id.as_deref(), partition, now_ms)
            },
            left: &|id| reservations.left(id),
            risk_permille: &|instance_type, zone| risk.permille(instance_type, zone),
        };
        let mut view = ClassView::of(class, group, options.reserved_capacity);
        view.settings = options.settings(class);
        let whole = sources.region.catalog(&view, &market);
        let status = class.status.clone().unwrap_or_default();
        let mut closed = marks.exhausted_zones(&status.subnets, now_ms);
        let away = |subnet: &&SubnetStatus| subnet.zone_id.as_ref().is_some_and(|id| sources.shifted.contains(id));
        closed.extend(status.subnets.iter().filter(away).map(|subnet| subnet.zone.clone()));
        let name = class.name_any();
        let kept = self.kept.get(&name);
        if let Some(kept) = kept
            && Arc::ptr_eq(&kept.whole, &whole)
            && kept.images == status.amis
            && kept.closed == closed
            && kept.discoveries == discoveries
        {
            return Arc::clone(&kept.seen);
        }
        let of_class = |found: &Arc<InstanceType>| {
            let image = image_of(&status.amis, &found.labels)?;
            let memory = sources.memory.of(&image.id, &found.name);
            Some(with_memory(without(found, &closed), memory))
        };
        let new = whole.instance_types.iter().filter_map(of_class).collect();
        let seen = renewed(kept.map(|kept| &kept.seen), Catalog { region: whole.region.clone(), instance_types: new });
        self.kept.insert(name, Kept { whole, images: status.amis, closed, discoveries, seen: Arc::clone(&seen) });
        seen
    }
}

/// The type with nothing available in some zones; the same one where that changes nothing.
fn without(found: &Arc<InstanceType>, zones: &BTreeSet<String>) -> Arc<InstanceType> {
    if !found.offerings.iter().any(|offering| offering.available && zones.contains(&*offering.zone)) {
        return Arc::clone(found);
    }
    let mut out = InstanceType::clone(found);
    for offering in &mut out.offerings {
        offering.available &= !zones.contains(&*offering.zone);
    }
    Arc::new(out)
}

/// The type with as much memory as its nodes showed, unless that can't be true. What is kept from pods stays as it was reckoned
/// from the estimate.
fn with_memory(found: Arc<InstanceType>, shown: Option<Bytes>) -> Arc<InstanceType> {
    let believed = |shown: &Bytes| shown.0 > found.capacity.memory.0 / 2 && shown.0 < found.capacity.memory.0 * 2;
    let Some(shown) = shown.filter(believed).filter(|shown| *shown != found.capacity.memory) else { return found };
    let mut out = Arc::unwrap_or_clone(found);
    let more = shown.0 - out.capacity.memory.0;
    out.capacity.memory = shown;
    // Where all was kept, how much it should have been is not known.
    if out.allocatable.memory.0 > 0 {
        out.allocatable.memory = Bytes((out.allocatable.memory.0 + more).max(0));
    }
    Arc::new(out)
}

/// A catalog made anew, with the types of the one before that did not change; that one itself where none did.
fn renewed(before: Option<&Arc<Catalog>>, new: Catalog) -> Arc<Catalog> {
    let Some(before) = before else { return Arc::new(new) };
    let new = Catalog { instance_types: shared(new.instance_types, &before.instance_types), ..new };
    if new == **before { Arc::clone(before) } else { Arc::new(new) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cloud::catalog::{MIB, embedded};
    use crate::cloud::ec2::node_class::ami_alias::one_of;
    use crate::cloud::ec2::node_class::capacity_reservations::tests::reservation;
    use crate::cloud::ec2::offerings::discovered_memory::tests::note;
    use crate::cloud::ec2::offerings::placement_scores::ScoreSettings;
    use crate::cloud::ec2::offerings::region::RegionSnapshot;
    use crate::cloud::ec2::offerings::unavailable::Subject;
    use crate::model::labels;
    use crate::model::offering::Offering;
    use crate::test_support::objects::node_class;

    struct World {
        region: Region,
        risk: SpotRisk,
        marks: Unavailable,
        memory: DiscoveredMemory,
        reservations: ReservationCounts,
        shifted: BTreeSet<String>,
        catalogs: Catalogs,
    }

    impl World {
        fn new(region: &str) -> Self {
            Self {
                region: Region::new(RegionSnapshot::stand_in(region, embedded(), 0)),
                risk: SpotRisk::new(ScoreSettings::default()),
                marks: Unavailable::default(),
                memory: DiscoveredMemory::default(),
                reservations: ReservationCounts::default(),
                shifted: BTreeSet::new(),
                catalogs: Catalogs::default(),
            }
        }

        fn see(&mut self, class: &Ec2NodeClass, now_ms: i64) -> Arc<Catalog> {
            let options = Options::of("c1");
            let mut sources = Sources {
                region: &self.region,
                risk: &self.risk,
                marks: &mut self.marks,
                memory: &mut self.memory,
                reservations: &self.reservations,
                shifted: &self.shifted,
                options: &options,
            };
            self.catalogs.of(&mut sources, class, None, now_ms)
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
    fn a_class_sees_its_zones_and_what_boots_its_images() {
        let seen = World::new("us-east-1").see(&class("us-east-1b", "arm64"), 0);
        assert!(seen.instance_types.len() > 100);
        for found in &seen.instance_types {
            assert_eq!(found.labels[labels::ARCH], "arm64");
            let available = found.offerings.iter().filter(|offering| offering.available);
            assert!(available.into_iter().all(|offering| &*offering.zone == "us-east-1b"));
        }
    }

    #[test]
    fn c11_a_catalog_is_shared_until_a_mark_comes_or_ends_and_then_all_but_one_type_is() {
        let (mut world, class) = (World::new("us-east-1"), class("us-east-1a", "amd64"));
        let first = world.see(&class, 0);
        assert!(Arc::ptr_eq(&first, &world.see(&class, 1)));
        let (instance_type, zone) = ("m5.xlarge".to_owned(), "us-east-1a".to_owned());
        let offering = Override { instance_type, zone, capacity_type: CapacityType::Spot };
        world.marks.mark(Subject::Offering(offering, None), 1);
        let second = world.see(&class, 2);
        for (before, after) in first.instance_types.iter().zip(&second.instance_types) {
            assert_eq!(Arc::ptr_eq(before, after), &*before.name != "m5.xlarge", "{}", before.name);
        }
        assert_eq!(*world.see(&class, 200_000), *first, "available again");
    }

    #[test]
    fn a_class_that_is_gone_offers_nothing_reserved_any_more() {
        let (mut world, mut class) = (World::new("us-east-1"), class("us-east-1a", "amd64"));
        class.status.as_mut().unwrap().capacity_reservations = vec![reservation("cr-1", "default", None)];
        world.see(&class, 0);
        assert_eq!(world.catalogs.reserved().len(), 1);
        world.catalogs.keep(&[Arc::new(class)]);
        assert_eq!(world.catalogs.reserved().len(), 1);
        world.catalogs.keep(&[]);
        assert!(world.catalogs.reserved().is_empty());
    }

    #[test]
    fn c11_discovered_memory_is_that_of_one_type_in_the_classes_that_boot_its_image() {
        let (mut world, class) = (World::new("us-east-1"), class("us-east-1a", "amd64"));
        let mut other = class.clone();
        other.metadata.name = Some("other".into());
        other.status.as_mut().unwrap().amis[0].id = "ami-2".into();
        let (first, others) = (world.see(&class, 0), world.see(&other, 0));
        let room = |catalog: &Catalog| {
            let found = catalog.instance_types.iter().find(|found| &*found.name == "m5.large").unwrap();
            (found.capacity.memory.0 / MIB, found.allocatable.memory.0 / MIB)
        };
        assert_eq!(room(&first), (7577, 6903), "7.5 % less than 8 GiB");
        note(&mut world.memory, "ami-1", "m5.large", "7700Mi", 1);
        let higher = world.see(&class, 1);
        assert_eq!(room(&higher), (7700, 7026), "what is kept from pods stays");
        for (before, after) in first.instance_types.iter().zip(&higher.instance_types) {
            assert_eq!(Arc::ptr_eq(before, after), &*before.name != "m5.large", "{}", before.name);
        }
        note(&mut world.memory, "ami-1", "m5.large", "7700Mi", 2);
        assert!(Arc::ptr_eq(&higher, &world.see(&class, 2)), "nothing new");
        world.marks.mark(Subject::Subnet("subnet-9".into()), 2);
        assert!(Arc::ptr_eq(&higher, &world.see(&class, 3)), "nothing new for the class");
        note(&mut world.memory, "ami-1", "m5.large", "7477Mi", 4);
        assert_eq!(room(&world.see(&class, 4)), (7477, 6803));
        note(&mut world.memory, "ami-1", "m5.large", "100Mi", 5);
        assert_eq!(room(&world.see(&class, 5)), (7577, 6903), "not believed");
        assert!(Arc::ptr_eq(&others, &world.see(&other, 5)), "another image");
        assert_eq!(*world.see(&class, 6_000_000_000), *first, "lapsed");
    }

    #[test]
    fn reservations_of_one_type_and_zone_are_counted_apart_and_their_counts_are_those_of_now() {
        let (mut world, mut class) = (World::new("us-east-1"), class("us-east-1a", "amd64"));
        let list = ["cr-1", "cr-2", "cr-3"].map(|id| reservation(id, "default", None));
        class.status.as_mut().unwrap().capacity_reservations = list.into();
        let left = |world: &mut World| {
            let seen = world.see(&class, 0);
            let m5 = seen.instance_types.iter().find(|found| &*found.name == "m5.large").unwrap();
            let reserved = m5.offerings.iter().filter(|offering| offering.capacity_type == CapacityType::Reserved);
            let of = |offering: &Offering| {
                let id = offering.label(labels::CAPACITY_RESERVATION_ID).unwrap_or_default().to_owned();
                (id, offering.available, offering.left)
            };
            reserved.map(of).collect::<Vec<_>>()
        };
        let line = |id: &str, left: i64| (id.to_owned(), left > 0, Some(left));
        assert_eq!(left(&mut world), [line("cr-1", 0), line("cr-2", 0), line("cr-3", 0)], "nothing is known of them");
        world.reservations.describe([("cr-1", 1), ("cr-2", 5)], 0);
        assert_eq!(left(&mut world), [line("cr-1", 1), line("cr-2", 5), line("cr-3", 0)]);
        world.reservations.take("cr-1", "uid", 1);
        assert_eq!(left(&mut world), [line("cr-1", 0), line("cr-2", 5), line("cr-3", 0)], "a launch is under way");
        world.reservations.give_back("uid");
        assert_eq!(left(&mut world), [line("cr-1", 1), line("cr-2", 5), line("cr-3", 0)], "it failed");
        let key = ("m5.large".to_owned(), "us-east-1a".to_owned());
        assert_eq!(world.catalogs.reserved(), [(key.clone(), (true, MicroUsd(1)))].into(), "one of three may be had");
        world.reservations.describe([("cr-1", 0), ("cr-2", 0)], 1);
        left(&mut world);
        assert_eq!(world.catalogs.reserved(), [(key, (false, MicroUsd(1)))].into());
    }

    #[test]
    fn c40_a_zone_that_is_shifted_away_from_has_nothing_available() {
        let (mut world, class) = (World::new("us-east-1"), class("us-east-1a", "amd64"));
        let available = |world: &mut World| {
            let seen = world.see(&class, 0);
            seen.instance_types.iter().flat_map(|found| &found.offerings).any(|offering| offering.available)
        };
        assert!(available(&mut world));
        world.shifted.insert("az2".into());
        assert!(available(&mut world), "another zone");
        world.shifted.insert("az1".into());
        assert!(!available(&mut world));
        world.shifted.clear();
        assert!(available(&mut world));
    }

    #[test]
    fn c15_an_exhausted_zone_has_nothing_available() {
        let (mut world, class) = (World::new("us-east-1"), class("us-east-1a", "amd64"));
        world.marks.mark(Subject::Subnet("subnet-1".into()), 0);
        let seen = world.see(&class, 1);
        assert!(seen.instance_types.iter().flat_map(|found| &found.offerings).all(|offering| !offering.available));
    }
}
