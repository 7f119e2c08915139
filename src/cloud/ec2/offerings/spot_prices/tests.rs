use super::*;
use crate::ec2::aws::errors::Class;
use crate::test_support::fake_aws;

fn record(name: &str, zone: &str, price: &str, at: Option<i64>) -> SpotPrice {
    SpotPrice::builder()
        .instance_type(name.into())
        .availability_zone(zone)
        .spot_price(price)
        .set_timestamp(at.map(DateTime::from_secs))
        .build()
}

fn priced(all: &[(&str, &str, i64)]) -> SpotPrices {
    let mut prices = SpotPrices::new();
    for (name, zone, price) in all {
        prices.entry((*name).to_owned()).or_default().insert((*zone).to_owned(), MicroUsd(*price));
    }
    prices
}

#[test]
fn the_latest_record_of_a_type_and_zone_is_used() {
    let history = latest_prices(&[
        record("m5.large", "a", "0.0300", Some(2)),
        record("m5.large", "a", "0.0200", Some(1)),
        record("m5.large", "b", "0.0400", Some(1)),
        record("m5.large", "b", "0.0410", Some(1)),
        record("c5.large", "a", "0.0000", Some(1)),
        record("c5.large", "a", "cheap", Some(1)),
        record("c5.large", "b", "0.01", None),
        SpotPrice::builder().spot_price("1").timestamp(DateTime::from_secs(1)).build(),
        SpotPrice::builder()
            .instance_type("r5.large".into())
            .availability_zone("a")
            .availability_zone_id("use1-az6")
            .spot_price("0.05")
            .timestamp(DateTime::from_secs(1))
            .build(),
    ]);
    let expected = priced(&[("m5.large", "a", 30_000), ("m5.large", "b", 41_000), ("r5.large", "a", 50_000)]);
    assert_eq!(history.prices, expected);
    assert_eq!(history.zone_ids, [("a".to_owned(), "use1-az6".to_owned())].into());
}

#[test]
fn new_prices_replace_those_of_the_same_type_and_zone() {
    let mut known = priced(&[("m5.large", "a", 1), ("m5.large", "b", 2), ("c5.large", "a", 3)]);
    overlay(&mut known, priced(&[("m5.large", "b", 20), ("r5.large", "a", 4)]));
    let expected = [("m5.large", "a", 1), ("m5.large", "b", 20), ("c5.large", "a", 3), ("r5.large", "a", 4)];
    assert_eq!(known, priced(&expected));
}

fn item(name: &str, zone: &str) -> String {
    format!(
        "<item><instanceType>{name}</instanceType><availabilityZone>{zone}</availabilityZone>\
         <availabilityZoneId>use1-az1</availabilityZoneId><productDescription>Linux/UNIX</productDescription>\
         <spotPrice>0.031500</spotPrice><timestamp>2026-01-01T00:00:00.000Z</timestamp></item>"
    )
}

#[tokio::test]
async fn the_history_is_read_from_now_on_and_all_pages() {
    let (clients, seen) = fake_aws::clients(Box::new(|seen| {
        let (name, next) = match seen.form.get("NextToken").map(String::as_str) {
            None => ("m5.large", "t"),
            Some(_) => ("m5.xlarge", ""),
        };
        let set = item(name, "us-east-1a");
        fake_aws::ok(
            "DescribeSpotPriceHistory",
            &format!("<nextToken>{next}</nextToken><spotPriceHistorySet>{set}</spotPriceHistorySet>"),
        )
    }));
    let history = describe_spot_prices(&clients.ec2, UnixMillis(1_767_225_600_000)).await.unwrap();
    assert_eq!(history.prices, priced(&[("m5.large", "us-east-1a", 31_500), ("m5.xlarge", "us-east-1a", 31_500)]));
    let seen = seen.lock().unwrap();
    assert_eq!(seen.len(), 2);
    let form = &seen[1].form;
    assert_eq!((form["MaxResults"].as_str(), form["StartTime"].as_str()), ("2000", "2026-01-01T00:00:00Z"));
    assert_eq!(form["ProductDescription.1"], "Linux/UNIX");
    assert_eq!(form["ProductDescription.2"], "Linux/UNIX (Amazon VPC)");
}

#[tokio::test]
async fn an_empty_and_a_refused_response_are_errors() {
    let (clients, _) =
        fake_aws::clients(Box::new(|_| fake_aws::ok("DescribeSpotPriceHistory", "<spotPriceHistorySet/><nextToken/>")));
    let error = describe_spot_prices(&clients.ec2, UnixMillis(0)).await.unwrap_err();
    assert_eq!(error.to_string(), "ec2:DescribeSpotPriceHistory: no spot prices");
    let (clients, _) = fake_aws::clients(Box::new(|_| fake_aws::error("UnauthorizedOperation", "no")));
    assert_eq!(describe_spot_prices(&clients.ec2, UnixMillis(0)).await.unwrap_err().class, Class::Unauthorized);
}
