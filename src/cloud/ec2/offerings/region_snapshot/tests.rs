use super::*;
use crate::catalog::embedded;
use crate::ec2::aws::errors::Class;
use crate::ec2::offerings::instance_types::unusable_response;

fn refused() -> ApiError {
    ApiError {
        action: "pricing:GetProducts",
        code: "AccessDeniedException".into(),
        message: "no".into(),
        class: Class::Unauthorized,
    }
}

fn prices(all: &[(&str, i64)]) -> OnDemandPrices {
    all.iter().map(|(name, price)| ((*name).to_owned(), MicroUsd(*price))).collect()
}

#[test]
fn the_embedded_table_is_used_until_an_api_responds() {
    let snapshot = RegionSnapshot::embedded("us-east-1", embedded());
    assert_eq!((snapshot.types.len(), snapshot.version), (1235, 1));
    assert!(snapshot.zones_of("a1.medium").unwrap().contains("us-east-1c"));
    assert!(snapshot.zones_of("no.such").unwrap().is_empty());
    assert_eq!(snapshot.on_demand["m5.large"], MicroUsd(96_000));
    for dataset in Dataset::ALL {
        assert_eq!(snapshot.source(dataset), &Source::Embedded { error: None });
    }
    let elsewhere = RegionSnapshot::embedded("ap-south-2", embedded());
    assert_eq!(elsewhere.zones_of("m5.large"), None, "the embedded table has the zones of one region only");
}

#[test]
fn in_china_fallback_prices_are_comparable_with_spot_prices() {
    let first = RegionSnapshot::embedded("cn-north-1", embedded());
    let (m5, zone) = (&first.types["m5.large"], "cn-north-1a");
    assert_eq!(first.price(m5, zone, CapacityType::OnDemand), Some(MicroUsd(960_000)));
    // In yuan, as EC2 reports spot prices there.
    let spot = [("m5.large".to_owned(), [(zone.to_owned(), MicroUsd(400_000))].into())].into();
    let history = SpotHistory { prices: spot, ..SpotHistory::default() };
    let responses =
        RegionResponses { spot: Some(Ok(history)), on_demand: Some(Err(refused())), ..RegionResponses::default() };
    let (second, transitions) = first.updated(responses);
    assert_eq!(transitions.len(), 1, "the failed price list is reported");
    let price = |snapshot: &RegionSnapshot, kind| snapshot.price(m5, zone, kind).unwrap();
    assert!(price(&second, CapacityType::Spot) < price(&second, CapacityType::OnDemand));
    let read =
        RegionResponses { on_demand: Some(Ok(prices(&[("m5.large", 1_013_000)]))), ..RegionResponses::default() };
    assert_eq!(price(&second.updated(read).0, CapacityType::OnDemand), MicroUsd(1_013_000), "the price of the list");
}

#[test]
fn responses_are_applied_and_a_failure_is_reported_once() {
    let first = RegionSnapshot::embedded("us-east-1", embedded());
    let responses = RegionResponses {
        types: Some(Ok((*first.types).clone())),
        zones: Some(Ok((**first.zones.as_ref().unwrap()).clone())),
        on_demand: Some(Err(refused())),
        spot: Some(Ok(SpotHistory {
            zone_ids: [("us-east-1a".into(), "use1-az6".into())].into(),
            ..SpotHistory::default()
        })),
    };
    let (second, transitions) = first.updated(responses);
    assert_eq!(second.version, 2, "types and zones are unchanged, spot prices are known now");
    assert_eq!(second.zone_ids["us-east-1a"], "use1-az6");
    let lines: Vec<String> = transitions.iter().map(SourceTransition::to_string).collect();
    assert_eq!(
        lines,
        ["on-demand prices could not be read, using the us-east-1 price list embedded in the binary: \
          pricing:GetProducts: AccessDeniedException: no"]
    );
    assert_eq!(second.source(Dataset::Types), &Source::Live);
    let error = Some("pricing:GetProducts: AccessDeniedException: no".to_owned());
    assert_eq!(second.source(Dataset::OnDemandPrices), &Source::Embedded { error });

    let again = RegionResponses { on_demand: Some(Err(refused())), ..RegionResponses::default() };
    let (third, transitions) = second.updated(again);
    assert_eq!((third.version, transitions.len()), (2, 0), "reported once");

    let recovered = RegionResponses { on_demand: Some(Ok(prices(&[("m5.large", 1)]))), ..RegionResponses::default() };
    let (fourth, transitions) = third.updated(recovered);
    assert_eq!(transitions, [SourceTransition { dataset: Dataset::OnDemandPrices, error: None }]);
    assert_eq!(transitions[0].to_string(), "on-demand prices are read from AWS again");
    assert_eq!((fourth.version, fourth.on_demand["m5.large"]), (3, MicroUsd(1)));
    assert_eq!(fourth.on_demand["m5.xlarge"], MicroUsd(192_000), "prices are overlaid, none is removed");
}

#[test]
fn an_earlier_response_is_used_while_refreshes_fail() {
    let first = RegionSnapshot::embedded("us-east-1", embedded());
    let failed =
        || RegionResponses { types: Some(Err(unusable_response("ec2:X", "empty"))), ..RegionResponses::default() };
    let live = RegionResponses { types: Some(Ok(BTreeMap::new())), ..RegionResponses::default() };
    let (second, _) = first.updated(live);
    let (third, transitions) = second.updated(failed());
    let (fourth, repeated) = third.updated(failed());
    assert_eq!((transitions.len(), repeated.len()), (1, 0));
    let expected = Source::Stale { error: "ec2:X: empty".into() };
    assert_eq!(fourth.source(Dataset::Types), &expected);
    assert!(fourth.types.is_empty(), "the last response, not the embedded table");
}

#[test]
fn an_api_is_unreadable_from_its_first_failure_until_it_responds() {
    let uncalled = RegionSnapshot::embedded("us-east-1", embedded());
    assert!(uncalled.failing_apis().is_empty(), "not called yet");
    let (failing, _) =
        uncalled.updated(RegionResponses { on_demand: Some(Err(refused())), ..RegionResponses::default() });
    let all = failing.failing_apis();
    assert_eq!(all.keys().copied().collect::<Vec<_>>(), [OptionalApi::OnDemandPrices]);
    let note = &all[&OptionalApi::OnDemandPrices];
    assert!(note.contains("embedded in the binary") && note.contains("AccessDeniedException"), "{note}");
    let (read, _) = failing.updated(RegionResponses { on_demand: Some(Ok([].into())), ..RegionResponses::default() });
    assert!(read.failing_apis().is_empty());
}
