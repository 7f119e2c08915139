use std::collections::BTreeSet;

use serde_json::json;
use stowage_model::offering::CapacityType::{OnDemand, Reserved, Spot};
use stowage_test_objects::node_class;

use super::*;
use crate::catalog::embedded;
use crate::ec2::offerings::region_snapshot::{RegionResponses, RegionSnapshot};
use crate::ec2::offerings::spot_prices::SpotHistory;
use crate::ec2::placement_group::PlacementGroup;

fn region() -> RegionSnapshot {
    RegionSnapshot::embedded("us-east-1", embedded())
}

/// A class in us-east-1a and -1b, with a reservation of m5.large in -1a.
fn class() -> CatalogKey {
    let class = json!({"spec": {"amiSelectorTerms": [{"alias": "al2023@latest"}]},
        "status": {"subnets": [{"id": "subnet-1", "zone": "us-east-1a", "zoneID": "use1-az6"}, {"id": "subnet-2", "zone": "us-east-1b"}],
            "capacityReservations": [{"id": "cr-1", "availabilityZone": "us-east-1a", "instanceMatchCriteria": "targeted",
                "ownerID": "1", "instanceType": "m5.large", "interruptible": true}]}});
    CatalogKey::of(&node_class("c", &class), None, true)
}

fn inputs() -> OfferingInputs<'static> {
    OfferingInputs { versions: [0; 3], unavailable: &|_, _| false, reserved: &|_| 2, risk_permille: &|_, _| 0 }
}

fn find<'a>(types: &'a [Arc<InstanceType>], name: &str) -> &'a Arc<InstanceType> {
    types.iter().find(|entry| &*entry.name == name).unwrap()
}

fn offering<'a>(entry: &'a InstanceType, zone: &str, capacity_type: CapacityType) -> &'a Offering {
    entry.offerings.iter().find(|o| &*o.zone == zone && o.capacity_type == capacity_type).unwrap()
}

#[test]
fn a_type_is_offered_in_all_its_zones_and_available_in_those_of_the_class() {
    let types = base(&region(), &class());
    assert!(types.windows(2).all(|pair| pair[0].name < pair[1].name));
    let m5 = find(&types, "m5.large");
    let lines: Vec<String> = m5
        .offerings
        .iter()
        .map(|o| {
            let labels: Vec<String> = o
                .labels
                .iter()
                .map(|(key, value)| format!("{}={value}", key.rsplit('/').next().unwrap_or_default()))
                .collect();
            format!("{} {} {} {} [{}]", o.zone, o.capacity_type, o.price.0, o.available, labels.join(", "))
        })
        .collect();
    insta::assert_snapshot!(lines.join("\n"), @r"
    us-east-1a reserved 1 true [capacity-reservation-id=cr-1, capacity-reservation-interruptible=true, capacity-reservation-type=default, zone-id=use1-az6]
    us-east-1a spot 96000 true [zone-id=use1-az6]
    us-east-1a on-demand 96000 true [zone-id=use1-az6]
    us-east-1b spot 96000 true []
    us-east-1b on-demand 96000 true []
    us-east-1c spot 96000 false []
    us-east-1c on-demand 96000 false []
    us-east-1d spot 96000 false []
    us-east-1d on-demand 96000 false []
    us-east-1f spot 96000 false []
    us-east-1f on-demand 96000 false []
    ");
}

#[test]
fn a_type_that_the_class_does_not_admit_is_unavailable() {
    let types = base(&region(), &class());
    let a1 = find(&types, "a1.large");
    assert!(!a1.offerings.is_empty() && a1.offerings.iter().all(|offering| !offering.available));
}

#[test]
fn zones_of_the_class_are_used_where_the_zones_of_types_are_unknown() {
    let elsewhere = RegionSnapshot::embedded("eu-west-1", embedded());
    let types = base(&elsewhere, &class());
    let zones: BTreeSet<&str> = find(&types, "m5.large").offerings.iter().map(|o| &*o.zone).collect();
    assert_eq!(zones, ["us-east-1a", "us-east-1b"].into());
    assert_eq!(find(&types, "m5.large").labels["topology.kubernetes.io/region"], "eu-west-1");
}

#[test]
fn spot_costs_the_on_demand_price_until_spot_prices_are_known() {
    let prices = [("m5.large".to_owned(), [("us-east-1a".to_owned(), MicroUsd(31_500))].into())].into();
    let history = SpotHistory { prices, ..SpotHistory::default() };
    let before = base(&region(), &class());
    assert_eq!(offering(find(&before, "m5.large"), "us-east-1a", Spot).price, MicroUsd(96_000));
    let (after, _) = region().updated(RegionResponses { spot: Some(Ok(history)), ..RegionResponses::default() });
    let types = base(&after, &class());
    let spot: Vec<_> = find(&types, "m5.large").offerings.iter().filter(|o| o.capacity_type == Spot).collect();
    assert_eq!(spot.len(), 1);
    assert_eq!((&*spot[0].zone, spot[0].price), ("us-east-1a", MicroUsd(31_500)));
    assert!(find(&types, "c5.large").offerings.iter().all(|o| o.capacity_type != Spot));
}

#[test]
fn c10_reserved_is_cheaper_than_spot_and_spot_is_cheaper_than_on_demand() {
    let prices = [("m5.large".to_owned(), [("us-east-1a".to_owned(), MicroUsd(31_500))].into())].into();
    let history = SpotHistory { prices, ..SpotHistory::default() };
    let (region, _) = region().updated(RegionResponses { spot: Some(Ok(history)), ..RegionResponses::default() });
    let base = base(&region, &class());
    let cheapest = |inputs: &OfferingInputs<'_>| {
        let types = with_inputs(&base, inputs);
        let available = find(&types, "m5.large").offerings.iter().filter(|o| o.available);
        available.min_by_key(|o| o.price).map(|o| (o.zone.to_string(), o.capacity_type))
    };
    let zone = |zone: &str, capacity_type| Some((zone.to_owned(), capacity_type));
    assert_eq!(cheapest(&inputs()), zone("us-east-1a", Reserved));
    let used_up = OfferingInputs { reserved: &|_| 0, ..inputs() };
    assert_eq!(cheapest(&used_up), zone("us-east-1a", Spot));
    let no_spot = OfferingInputs { unavailable: &|o, _| o.capacity_type == Spot, ..used_up };
    assert_eq!(cheapest(&no_spot), zone("us-east-1a", OnDemand));
    let only_b = OfferingInputs { unavailable: &|o, _| o.capacity_type == Spot || o.zone == "us-east-1a", ..no_spot };
    assert_eq!(cheapest(&only_b), zone("us-east-1b", OnDemand));
    assert_eq!(cheapest(&OfferingInputs { unavailable: &|_, _| true, ..only_b }), None);
}

#[test]
fn c11_an_offering_without_capacity_is_unavailable_and_no_other() {
    let base = base(&region(), &class());
    let exhausted = Override { instance_type: "m5.xlarge".into(), zone: "us-east-1a".into(), capacity_type: Spot };
    let unavailable = |o: &Override, _: Option<&str>| *o == exhausted;
    let before = with_inputs(&base, &inputs());
    let types = with_inputs(&base, &OfferingInputs { unavailable: &unavailable, ..inputs() });
    let m5 = find(&types, "m5.xlarge");
    assert!(!offering(m5, "us-east-1a", Spot).available);
    assert!(offering(m5, "us-east-1a", OnDemand).available && offering(m5, "us-east-1b", Spot).available);
    for (entry, other) in
        base.iter().zip(&types).filter(|(entry, _)| !["m5.xlarge", "m5.large"].contains(&&*entry.name))
    {
        assert!(Arc::ptr_eq(entry, other), "{}", entry.name);
    }
    let again = with_inputs(&base, &inputs());
    assert_eq!(again, before, "available again after expiry");
}

#[test]
fn c14_only_its_instance_count_makes_a_reservation_unavailable() {
    let base = base(&region(), &class());
    let reserved = |inputs: &OfferingInputs<'_>| {
        let types = with_inputs(&base, inputs);
        let found = offering(find(&types, "m5.large"), "us-east-1a", Reserved).clone();
        (found.available, found.left)
    };
    assert_eq!(reserved(&inputs()), (true, Some(2)));
    assert_eq!(
        reserved(&OfferingInputs { unavailable: &|_, _| true, ..inputs() }),
        (true, Some(2)),
        "not by an unavailable offering"
    );
    assert_eq!(reserved(&OfferingInputs { reserved: &|_| 0, ..inputs() }), (false, Some(0)));
    assert_eq!(reserved(&OfferingInputs { reserved: &|_| -1, ..inputs() }), (false, Some(0)));
    let labels = offering(find(&base, "m5.large"), "us-east-1a", Reserved).labels.clone();
    let expected = [
        ("karpenter.k8s.aws/capacity-reservation-id", "cr-1"),
        ("karpenter.k8s.aws/capacity-reservation-interruptible", "true"),
        ("karpenter.k8s.aws/capacity-reservation-type", "default"),
        ("topology.k8s.aws/zone-id", "use1-az6"),
    ];
    assert_eq!(labels.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect::<Vec<_>>(), expected);
}

#[test]
fn c40_an_expiring_capacity_block_is_unavailable() {
    let mut class = class();
    class.reservations[0].expiring = true;
    let types = with_inputs(&base(&region(), &class), &inputs());
    assert!(!offering(find(&types, "m5.large"), "us-east-1a", Reserved).available);
}

#[test]
fn each_offering_in_a_partition_group_is_repeated_for_each_partition() {
    let mut class = class();
    class.placement_group = Some(PlacementGroup { id: "pg-1".into(), strategy: "partition".into(), partitions: 2 });
    let types = base(&region(), &class);
    let m5 = find(&types, "m5.xlarge");
    assert_eq!(m5.labels["karpenter.k8s.aws/placement-group-id"], "pg-1");
    let spot = m5.offerings.iter().filter(|o| o.capacity_type == Spot && &*o.zone == "us-east-1a");
    let partitions: Vec<&str> =
        spot.map(|o| o.labels["karpenter.k8s.aws/placement-group-partition"].as_str()).collect();
    assert_eq!(partitions, ["1", "2"]);
}

#[test]
fn only_spot_offerings_have_a_risk_and_it_does_not_change_the_price() {
    let base = base(&region(), &class());
    let risky = |name: &str, zone: &str| if name == "m5.large" && zone == "us-east-1a" { 250 } else { 0 };
    let types = with_inputs(&base, &OfferingInputs { risk_permille: &risky, ..inputs() });
    let m5 = find(&types, "m5.large");
    let seen = |zone, capacity_type| {
        let found = offering(m5, zone, capacity_type);
        (found.risk_permille, found.price.0)
    };
    assert_eq!(seen("us-east-1a", Spot), (250, 96_000));
    assert_eq!(seen("us-east-1a", OnDemand), (0, 96_000));
    assert_eq!(seen("us-east-1b", Spot), (0, 96_000));
}

#[test]
fn reserved_prices_are_nearly_zero_and_ordered_by_on_demand_price() {
    let prices =
        [0, 4_200, 96_000, 192_000, 3_060_000, 98_320_000, 218_400_000].map(|price| reserved_price(MicroUsd(price)).0);
    assert_eq!(prices, [0, 1, 1, 2, 31, 984, 1_000]);
}
