use serde_json::json;

use super::*;
use crate::ec2::aws::client::pricing_region;
use crate::ec2::aws::errors::Class;
use crate::test_support::fake_aws;

fn product(name: &str, prices: &[(&str, &str)]) -> String {
    let dimensions: serde_json::Map<String, serde_json::Value> = prices
        .iter()
        .enumerate()
        .map(|(at, (currency, price))| (format!("d{at}"), json!({"unit": "Hrs", "pricePerUnit": {(*currency): price}})))
        .collect();
    json!({
        "product": {"productFamily": "Compute Instance", "attributes": {"instanceType": name, "memory": "8 GiB"}, "sku": "S"},
        "serviceCode": "AmazonEC2",
        "terms": {"OnDemand": {"S.T": {"priceDimensions": dimensions, "sku": "S"}}},
    })
    .to_string()
}

#[test]
fn the_price_of_a_product_is_read() {
    let found = |name: &str, price: i64| Some((name.to_owned(), MicroUsd(price)));
    for (json, region, expected) in [
        (product("m5.large", &[("USD", "0.0960000000")]), "us-east-1", found("m5.large", 96_000)),
        (product("m5.large", &[("CNY", "1.3260000000")]), "cn-north-1", found("m5.large", 1_326_000)),
        (product("m5.large", &[("USD", "0.0960000000")]), "cn-north-1", None),
        (product("m5.large", &[("USD", "0.0000000000")]), "us-east-1", None),
        (product("m5.large", &[("USD", "free")]), "us-east-1", None),
        (product("m5.large", &[("USD", "-1")]), "us-east-1", None),
        (product("m5.large", &[("USD", "inf")]), "us-east-1", None),
        (product("m5.large", &[("USD", "0"), ("USD", "3"), ("USD", "2.5")]), "us-east-1", found("m5.large", 2_500_000)),
        (product("m5.large", &[]), "us-east-1", None),
        (r#"{"product": {"attributes": {}}, "terms": {}}"#.to_owned(), "us-east-1", None),
        (r#"{"product": {"attributes": {"instanceType": "m5.large"}}}"#.to_owned(), "us-east-1", None),
        ("{".to_owned(), "us-east-1", None),
    ] {
        assert_eq!(product_price(&json, region), expected, "{json}");
    }
}

#[test]
fn only_govcloud_and_isolated_vpcs_have_no_pricing_api() {
    for (region, endpoint, has_api) in [
        ("us-east-1", "us-east-1", true),
        ("us-west-2", "us-east-1", true),
        ("ap-southeast-2", "ap-south-1", true),
        ("cn-north-1", "cn-northwest-1", true),
        ("eu-west-3", "eu-central-1", true),
        ("me-south-1", "us-east-1", true),
        ("us-gov-west-1", "us-east-1", false),
    ] {
        assert_eq!((pricing_region(region), has_pricing_api(region, false)), (endpoint, has_api), "{region}");
        assert!(!has_pricing_api(region, true));
    }
}

fn page(products: &[String], next: Option<&str>) -> (u16, String) {
    let mut body = json!({"FormatVersion": "aws_v1", "PriceList": products});
    if let Some(next) = next {
        body["NextToken"] = json!(next);
    }
    (200, body.to_string())
}

#[tokio::test]
async fn shared_and_bare_metal_prices_are_read_concurrently_and_all_pages() {
    let (clients, seen) = fake_aws::clients(Box::new(|seen| {
        let asked: serde_json::Value = serde_json::from_str(&seen.body).unwrap();
        let metal = seen.body.contains("Dedicated");
        Some(match (metal, asked.get("NextToken").and_then(|token| token.as_str())) {
            (true, _) => page(&[product("m5.metal", &[("USD", "4.608")])], None),
            (false, None) => page(&[product("m5.large", &[("USD", "0.096")]), "junk".into()], Some("t")),
            (false, Some(_)) => page(&[product("m5.xlarge", &[("USD", "0.192")])], Some("")),
        })
    }));
    let prices = get_products(&clients.pricing, "us-west-2").await.unwrap();
    let expected = [("m5.large", 96_000), ("m5.metal", 4_608_000), ("m5.xlarge", 192_000)];
    assert_eq!(prices, expected.into_iter().map(|(name, price)| (name.to_owned(), MicroUsd(price))).collect());
    let seen = seen.lock().unwrap();
    assert_eq!(seen.len(), 3);
    let shared: serde_json::Value =
        serde_json::from_str(&seen.iter().find(|seen| seen.body.contains("Shared")).unwrap().body).unwrap();
    assert_eq!((&shared["ServiceCode"], &shared["MaxResults"]), (&json!("AmazonEC2"), &json!(100)));
    let filters: BTreeMap<&str, &str> = shared["Filters"]
        .as_array()
        .unwrap()
        .iter()
        .map(|filter| {
            assert_eq!(filter["Type"], "TERM_MATCH");
            (filter["Field"].as_str().unwrap(), filter["Value"].as_str().unwrap())
        })
        .collect();
    let expected = [
        ("regionCode", "us-west-2"),
        ("serviceCode", "AmazonEC2"),
        ("preInstalledSw", "NA"),
        ("operatingSystem", "Linux"),
        ("capacitystatus", "Used"),
        ("marketoption", "OnDemand"),
        ("tenancy", "Shared"),
        ("productFamily", "Compute Instance"),
    ];
    assert_eq!(filters, expected.into_iter().collect());
}

#[tokio::test]
async fn an_empty_or_refused_scan_fails_the_call() {
    let (clients, _) = fake_aws::clients(Box::new(|seen| {
        let metal = seen.body.contains("Dedicated");
        Some(if metal { page(&[], None) } else { page(&[product("m5.large", &[("USD", "0.096")])], None) })
    }));
    let error = get_products(&clients.pricing, "us-west-2").await.unwrap_err();
    assert_eq!(error.to_string(), "pricing:GetProducts: no prices of tenancy Dedicated");
    let (clients, _) = fake_aws::clients(Box::new(|_| {
        Some((400, r#"{"__type": "com.amazonaws.pricing#AccessDeniedException", "Message": "no"}"#.into()))
    }));
    assert_eq!(get_products(&clients.pricing, "us-west-2").await.unwrap_err().class, Class::Unauthorized);
}
