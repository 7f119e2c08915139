//! On-demand list prices, from the Pricing API.

use std::collections::{BTreeMap, HashMap};

use aws_sdk_pricing::Client;
use aws_sdk_pricing::types::{Filter, FilterType};
use serde::Deserialize;

use crate::cloud::catalog::micro_usd;
use crate::cloud::ec2::aws::errors::ApiError;
use crate::cloud::ec2::offerings::instance_types::unusable_answer;
use crate::model::units::MicroUsd;

const PRODUCTS: &str = "pricing:GetProducts";
/// Products of one answer, the API's most.
const PAGE: i32 = 100;

/// On-demand prices by instance type, millionths of the region's currency per hour.
pub type OnDemandPrices = BTreeMap<String, MicroUsd>;

/// Whether there is a Pricing API to ask: not from a VPC without a way out, and not for the GovCloud regions.
pub fn can_be_asked(region: &str, isolated_vpc: bool) -> bool {
    !isolated_vpc && !region.starts_with("us-gov")
}

/// Why there is no Pricing API to ask in a region; `None` where there is one.
pub fn unlisted(region: &str) -> Option<String> {
    (!can_be_asked(region, false)).then(|| format!("AWS has no Pricing API for {region}"))
}

fn is_in_yuan(region: &str) -> bool {
    region.starts_with("cn-")
}

/// The currency of a region's prices.
fn currency(region: &str) -> &'static str {
    if is_in_yuan(region) { "CNY" } else { "USD" }
}

/// Yuan that are taken for a dollar of us-east-1's list. Not the rate of exchange: in Beijing most types cost 8 to 12 times the
/// number. Without it spot prices, which EC2 tells in yuan there, would seem dearer than on-demand ones.
const YUAN: i64 = 10;

/// What stands in for a region's price while its list can't be read: us-east-1's, in the region's currency.
pub fn stand_in(region: &str, of_us_east_1: MicroUsd) -> MicroUsd {
    MicroUsd(of_us_east_1.0.saturating_mul(if is_in_yuan(region) { YUAN } else { 1 }))
}

#[derive(Deserialize)]
struct PricedProduct {
    product: Product,
    #[serde(default)]
    terms: Terms,
}

#[derive(Deserialize)]
struct Product {
    attributes: Attributes,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Attributes {
    instance_type: Option<String>,
}

#[derive(Default, Deserialize)]
struct Terms {
    #[serde(default, rename = "OnDemand")]
    on_demand: HashMap<String, Term>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Term {
    #[serde(default)]
    price_dimensions: HashMap<String, PriceDimension>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct PriceDimension {
    #[serde(default)]
    price_per_unit: HashMap<String, String>,
}

/// The instance type and price of one entry of a price list, which is JSON in a string. `None` where there is no price
/// above zero in the region's currency, or no instance type. Of several prices the least counts.
pub fn product_price(json: &str, region: &str) -> Option<(String, MicroUsd)> {
    let product: PricedProduct = serde_json::from_str(json).ok()?;
    let price = product
        .terms
        .on_demand
        .values()
        .flat_map(|term| term.price_dimensions.values())
        .filter_map(|dimension| positive_price(dimension.price_per_unit.get(currency(region))?))
        .min()?;
    Some((product.product.attributes.instance_type?, price))
}

/// A price above zero written in decimal.
pub(crate) fn positive_price(text: &str) -> Option<MicroUsd> {
    micro_usd(text.parse().ok()?).filter(|price| price.0 > 0)
}

/// The prices of a price list.
pub fn read(price_list: &[String], region: &str) -> OnDemandPrices {
    price_list.iter().filter_map(|json| product_price(json, region)).collect()
}

/// Prices of shared instances and, over them, of bare metal, asked side by side.
///
/// # Errors
/// Either call fails or knows no price.
pub async fn get_products(pricing: &Client, region: &str) -> Result<OnDemandPrices, ApiError> {
    let (mut shared, metal) = futures::try_join!(
        scan(pricing, region, "Shared", "Compute Instance"),
        scan(pricing, region, "Dedicated", "Compute Instance (bare metal)"),
    )?;
    shared.extend(metal);
    Ok(shared)
}

async fn scan(pricing: &Client, region: &str, tenancy: &str, family: &str) -> Result<OnDemandPrices, ApiError> {
    let filters = [
        ("regionCode", region),
        ("serviceCode", "AmazonEC2"),
        ("preInstalledSw", "NA"),
        ("operatingSystem", "Linux"),
        ("capacitystatus", "Used"),
        ("marketoption", "OnDemand"),
        ("tenancy", tenancy),
        ("productFamily", family),
    ];
    let filters: Result<Vec<Filter>, _> = filters
        .into_iter()
        .map(|(field, value)| Filter::builder().r#type(FilterType::TermMatch).field(field).value(value).build())
        .collect();
    let filters = filters.map_err(|error| unusable_answer(PRODUCTS, error.to_string()))?;
    let mut pages = pricing
        .get_products()
        .service_code("AmazonEC2")
        .set_filters(Some(filters))
        .into_paginator()
        .page_size(PAGE)
        .send();
    let mut prices = OnDemandPrices::new();
    // Page by page: a region's list is some ten megabytes of JSON, of which little is kept.
    while let Some(page) = pages.next().await {
        let page = page.map_err(ApiError::of(PRODUCTS))?;
        prices.extend(read(page.price_list(), region));
    }
    if prices.is_empty() {
        return Err(unusable_answer(PRODUCTS, format!("no prices of tenancy {tenancy}")));
    }
    Ok(prices)
}

#[cfg(test)]
mod tests;
