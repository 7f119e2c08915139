use std::collections::BTreeSet;

use serde_json::json;
use stowage_model::offering::CapacityType;
use stowage_model::units::MicroUsd;
use stowage_test_objects::node_class;

use super::*;
use crate::OptionalApi;
use crate::catalog::embedded;
use crate::ec2::offerings::list_prices::OnDemandPrices;
use crate::ec2::offerings::spot_prices::SpotHistory;

fn class(zone: &str) -> CatalogKey {
    let spec = json!({"amiSelectorTerms": [{"alias": "al2023@latest"}]});
    let class = json!({"spec": spec, "status": {"subnets": [{"id": "subnet-1", "zone": zone}]}});
    CatalogKey::of(&node_class("c", &class), None, false)
}

fn inputs(version: u64) -> OfferingInputs<'static> {
    OfferingInputs { versions: [version, 0, 0], unavailable: &|_, _| false, reserved: &|_| 0, risk_permille: &|_, _| 0 }
}

fn prices(all: &[(&str, i64)]) -> OnDemandPrices {
    all.iter().map(|(name, price)| ((*name).to_owned(), MicroUsd(*price))).collect()
}

#[test]
fn without_a_pricing_api_that_is_reported_and_us_east_1_prices_are_used() {
    let region = Region::new(RegionSnapshot::embedded("us-gov-west-1", embedded()));
    let failing = || region.snapshot().failing_apis();
    let expected = "on-demand prices could not be read, using the us-east-1 price list embedded in the binary: \
        AWS has no Pricing API for us-gov-west-1";
    assert_eq!(failing(), [(OptionalApi::OnDemandPrices, expected.to_owned())].into());
    let catalog = region.catalog(&class("us-gov-west-1a"), &inputs(0));
    let m5 = catalog.instance_types.iter().find(|found| &*found.name == "m5.large").unwrap();
    let offers: BTreeSet<_> = m5.offerings.iter().map(|o| (&*o.zone, o.capacity_type, o.price, o.available)).collect();
    let zone = "us-gov-west-1a";
    let price = MicroUsd(96_000);
    assert_eq!(offers, [(zone, CapacityType::OnDemand, price, true), (zone, CapacityType::Spot, price, true)].into());
    let others = RegionResponses {
        spot: Some(Ok(SpotHistory::default())),
        zones: Some(Ok([].into())),
        ..RegionResponses::default()
    };
    assert!(region.apply(others).is_empty());
    assert_eq!(failing().len(), 1, "permanent");
    let china = RegionSnapshot::embedded("cn-north-1", embedded());
    assert!(china.failing_apis().is_empty(), "China has one");
}

#[test]
fn a_catalog_is_rebuilt_only_when_an_input_changes() {
    let region = Region::new(RegionSnapshot::embedded("us-east-1", embedded()));
    let (a, b) = (class("us-east-1a"), class("us-east-1b"));
    let first = region.catalog(&a, &inputs(0));
    assert!(Arc::ptr_eq(&first, &region.catalog(&a.clone(), &inputs(0))));
    assert!(!Arc::ptr_eq(&first, &region.catalog(&b, &inputs(0))));
    let same = |left: &Catalog, right: &Catalog| {
        let pairs = left.instance_types.iter().zip(&right.instance_types);
        pairs
            .filter(|(left, right)| !Arc::ptr_eq(left, right))
            .map(|(left, _)| left.name.to_string())
            .collect::<Vec<_>>()
    };
    let revised = region.catalog(&a, &inputs(1));
    assert!(same(&first, &revised).is_empty(), "nothing changed but the version");

    let new = RegionResponses { on_demand: Some(Ok(prices(&[("m5.large", 5)]))), ..RegionResponses::default() };
    assert_eq!(region.apply(new).len(), 0);
    let repriced = region.catalog(&a, &inputs(1));
    assert_eq!(same(&revised, &repriced), ["m5.large"]);
    assert_eq!(repriced.instance_types.len(), 1235);

    let unavailable: OfferingInputs<'_> =
        OfferingInputs { unavailable: &|o, _| o.instance_type == "c5.large", ..inputs(2) };
    let short = region.catalog(&a, &unavailable);
    assert_eq!(same(&repriced, &short), ["c5.large"]);
    let back = region.catalog(&a, &inputs(3));
    assert_eq!(*back, *repriced);
    assert_eq!(same(&short, &back), ["c5.large"]);
}

#[test]
fn the_number_of_cached_catalogs_is_bounded() {
    let region = Region::new(RegionSnapshot::embedded("us-east-1", embedded()));
    let empty = RegionResponses { types: Some(Ok(BTreeMap::new())), ..RegionResponses::default() };
    region.apply(empty);
    for zone in 0..3 * MAX_CATALOGS {
        region.catalog(&class(&zone.to_string()), &inputs(0));
    }
    assert!(region.catalogs.lock().unwrap().len() <= MAX_CATALOGS);
}
