use serde_json::json;

use super::*;
use crate::cloud::catalog::embedded;
use crate::cloud::ec2::aws::errors::Class;
use crate::cloud::ec2::degraded_apis::Troubles;
use crate::cloud::ec2::offerings::instance_types::unusable_answer;
use crate::test_support::objects::node_class;

fn class(zone: &str) -> ClassView {
    let spec = json!({"amiSelectorTerms": [{"alias": "al2023@latest"}]});
    let class = json!({"spec": spec, "status": {"subnets": [{"id": "subnet-1", "zone": zone}]}});
    ClassView::of(&node_class("c", &class), None, false)
}

fn refused() -> ApiError {
    ApiError {
        action: "pricing:GetProducts",
        code: "AccessDeniedException".into(),
        message: "no".into(),
        class: Class::Unauthorized,
    }
}

fn market(stamp: u64) -> OfferingInputs<'static> {
    OfferingInputs { stamp: [stamp, 0, 0], unavailable: &|_, _| false, left: &|_| 0, risk_permille: &|_, _| 0 }
}

fn prices(all: &[(&str, i64)]) -> OnDemandPrices {
    all.iter().map(|(name, price)| ((*name).to_owned(), MicroUsd(*price))).collect()
}

#[test]
fn the_table_in_the_binary_stands_in_until_something_is_answered() {
    let snapshot = RegionSnapshot::stand_in("us-east-1", embedded(), 7);
    assert_eq!((snapshot.types.len(), snapshot.version), (1235, 1));
    assert!(snapshot.zones_of("a1.medium").unwrap().contains("us-east-1c"));
    assert!(snapshot.zones_of("no.such").unwrap().is_empty());
    assert_eq!(snapshot.on_demand["m5.large"], MicroUsd(96_000));
    for part in Part::ALL {
        assert_eq!(snapshot.source(part), &Source::StandIn { since_ms: 7, why: None });
    }
    let elsewhere = RegionSnapshot::stand_in("ap-south-2", embedded(), 7);
    assert_eq!(elsewhere.zones_of("m5.large"), None, "the table knows no other region's zones");
}

#[test]
fn where_there_is_no_pricing_api_that_is_told_and_us_east_1s_prices_are_planned_with() {
    let region = Region::new(RegionSnapshot::stand_in("us-gov-west-1", embedded(), 7));
    let told = || Troubles::default().unreadable(&region.snapshot());
    let expected = "on-demand prices could not be read, the price list of us-east-1 in the binary stands in: \
        AWS has no Pricing API for us-gov-west-1";
    assert_eq!(told(), [("OnDemandPrices", expected.to_owned())].into());
    let catalog = region.catalog(&class("us-gov-west-1a"), &market(0));
    let m5 = catalog.instance_types.iter().find(|found| &*found.name == "m5.large").unwrap();
    let offers: BTreeSet<_> = m5.offerings.iter().map(|o| (&*o.zone, o.capacity_type, o.price, o.available)).collect();
    let zone = "us-gov-west-1a";
    let price = MicroUsd(96_000);
    assert_eq!(offers, [(zone, CapacityType::OnDemand, price, true), (zone, CapacityType::Spot, price, true)].into());
    let others = Answers { spot: Some(Ok(SpotHistory::default())), zones: Some(Ok([].into())), ..Answers::default() };
    assert!(region.learn(others, 8).is_empty());
    assert_eq!(told().len(), 1, "it stays so");
    let asked = RegionSnapshot::stand_in("cn-north-1", embedded(), 7);
    assert!(Troubles::default().unreadable(&asked).is_empty(), "China has one");
}

#[test]
fn in_china_prices_that_stand_in_can_be_compared_with_spot_prices() {
    let first = RegionSnapshot::stand_in("cn-north-1", embedded(), 0);
    let (m5, zone) = (&first.types["m5.large"], "cn-north-1a");
    assert_eq!(first.price(m5, zone, CapacityType::OnDemand), Some(MicroUsd(960_000)));
    // In yuan, as EC2 tells it there.
    let spot = [("m5.large".to_owned(), [(zone.to_owned(), MicroUsd(400_000))].into())].into();
    let history = SpotHistory { prices: spot, ..SpotHistory::default() };
    let answers = Answers { spot: Some(Ok(history)), on_demand: Some(Err(refused())), ..Answers::default() };
    let (second, turns) = first.after(answers, 1);
    assert_eq!(turns.len(), 1, "the list that failed is told");
    let price = |snapshot: &RegionSnapshot, kind| snapshot.price(m5, zone, kind).unwrap();
    assert!(price(&second, CapacityType::Spot) < price(&second, CapacityType::OnDemand));
    let read = Answers { on_demand: Some(Ok(prices(&[("m5.large", 1_013_000)]))), ..Answers::default() };
    assert_eq!(price(&second.after(read, 2).0, CapacityType::OnDemand), MicroUsd(1_013_000), "the list's own");
}

#[test]
fn answers_are_taken_in_and_what_failed_is_told_once() {
    let first = RegionSnapshot::stand_in("us-east-1", embedded(), 0);
    let answers = Answers {
        types: Some(Ok((*first.types).clone())),
        zones: Some(Ok((**first.zones.as_ref().unwrap()).clone())),
        on_demand: Some(Err(refused())),
        spot: Some(Ok(SpotHistory {
            zone_ids: [("us-east-1a".into(), "use1-az6".into())].into(),
            ..SpotHistory::default()
        })),
    };
    let (second, turns) = first.after(answers, 10);
    assert_eq!(second.version, 2, "types and zones are what they were, spot prices are known now");
    assert_eq!(second.zone_ids["us-east-1a"], "use1-az6");
    let lines: Vec<String> = turns.iter().map(Turn::to_string).collect();
    assert_eq!(
        lines,
        ["on-demand prices could not be read, the price list of us-east-1 in the binary stands in: \
          pricing:GetProducts: AccessDeniedException: no"]
    );
    assert_eq!(second.source(Part::Types), &Source::Live { as_of_ms: 10 });
    let why = Some("pricing:GetProducts: AccessDeniedException: no".to_owned());
    assert_eq!(second.source(Part::OnDemandPrices), &Source::StandIn { since_ms: 0, why });

    let again = Answers { on_demand: Some(Err(refused())), ..Answers::default() };
    let (third, turns) = second.after(again, 20);
    assert_eq!((third.version, turns.len()), (2, 0), "told once");

    let answered = Answers { on_demand: Some(Ok(prices(&[("m5.large", 1)]))), ..Answers::default() };
    let (fourth, turns) = third.after(answered, 30);
    assert_eq!(turns, [Turn { part: Part::OnDemandPrices, why: None }]);
    assert_eq!(turns[0].to_string(), "on-demand prices are EC2's own");
    assert_eq!((fourth.version, fourth.on_demand["m5.large"]), (3, MicroUsd(1)));
    assert_eq!(fourth.on_demand["m5.xlarge"], MicroUsd(192_000), "prices are overlaid, none is taken away");
}

#[test]
fn an_older_answer_serves_while_refreshes_fail() {
    let first = RegionSnapshot::stand_in("us-east-1", embedded(), 0);
    let failed = || Answers { types: Some(Err(unusable_answer("ec2:X", "empty"))), ..Answers::default() };
    let live = Answers { types: Some(Ok(BTreeMap::new())), ..Answers::default() };
    let (second, _) = first.after(live, 10);
    let (third, turns) = second.after(failed(), 20);
    let (fourth, silence) = third.after(failed(), 30);
    assert_eq!((turns.len(), silence.len()), (1, 0));
    let expected = Source::Stale { as_of_ms: 10, since_ms: 20, why: "ec2:X: empty".into() };
    assert_eq!(fourth.source(Part::Types), &expected);
    assert!(fourth.types.is_empty(), "EC2's last answer, not the table");
}

#[test]
fn a_catalog_is_made_once_and_again_only_when_something_changes() {
    let region = Region::new(RegionSnapshot::stand_in("us-east-1", embedded(), 0));
    let (a, b) = (class("us-east-1a"), class("us-east-1b"));
    let first = region.catalog(&a, &market(0));
    assert!(Arc::ptr_eq(&first, &region.catalog(&a.clone(), &market(0))));
    assert!(!Arc::ptr_eq(&first, &region.catalog(&b, &market(0))));
    let same = |left: &Catalog, right: &Catalog| {
        let pairs = left.instance_types.iter().zip(&right.instance_types);
        pairs
            .filter(|(left, right)| !Arc::ptr_eq(left, right))
            .map(|(left, _)| left.name.to_string())
            .collect::<Vec<_>>()
    };
    let stamped = region.catalog(&a, &market(1));
    assert!(same(&first, &stamped).is_empty(), "nothing changed but the stamp");

    let new = Answers { on_demand: Some(Ok(prices(&[("m5.large", 5)]))), ..Answers::default() };
    assert_eq!(region.learn(new, 1).len(), 0);
    let repriced = region.catalog(&a, &market(1));
    assert_eq!(same(&stamped, &repriced), ["m5.large"]);
    assert_eq!(repriced.instance_types.len(), 1235);

    let gone: OfferingInputs<'_> = OfferingInputs { unavailable: &|o, _| o.instance_type == "c5.large", ..market(2) };
    let short = region.catalog(&a, &gone);
    assert_eq!(same(&repriced, &short), ["c5.large"]);
    let back = region.catalog(&a, &market(3));
    assert_eq!(*back, *repriced);
    assert_eq!(same(&short, &back), ["c5.large"]);
}

#[test]
fn the_number_of_catalogs_is_bounded() {
    let region = Region::new(RegionSnapshot::stand_in("us-east-1", embedded(), 0));
    let empty = Answers { types: Some(Ok(BTreeMap::new())), ..Answers::default() };
    region.learn(empty, 0);
    for zone in 0..3 * MOST_CATALOGUES {
        region.catalog(&class(&zone.to_string()), &market(0));
    }
    assert!(region.built.lock().unwrap().len() <= MOST_CATALOGUES);
}
