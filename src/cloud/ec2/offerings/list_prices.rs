//! On-demand list prices, from the Pricing API.

use std::collections::{BTreeMap, HashMap};

use aws_sdk_pricing::Client;
use aws_sdk_pricing::types::{Filter, FilterType};
use serde::Deserialize;
use stowage_model::units::MicroUsd;

use crate::ec2::aws::errors::ApiError;
use crate::ec2::offerings::instance_types::unusable_response;

const PRODUCTS: &str = "pricing:GetProducts";
/// Products per page, the API's maximum.
const PAGE_SIZE: i32 = 100;

/// On-demand prices by instance type, millionths of the region's currency per hour.
pub type OnDemandPrices = BTreeMap<String, MicroUsd>;

/// Whether there is a reachable Pricing API: not from an isolated VPC, and not for the GovCloud regions.
pub fn has_pricing_api(region: &str, isolated_vpc: bool) -> bool {
    !isolated_vpc && !region.starts_with("us-gov")
}

/// The reason why a region has no Pricing API; `None` where it has one.
pub fn missing_api(region: &str) -> Option<String> {
    (!has_pricing_api(region, false)).then(|| format!("AWS has no Pricing API for {region}"))
}

fn is_priced_in_yuan(region: &str) -> bool {
    region.starts_with("cn-")
}

fn currency(region: &str) -> &'static str {
    if is_priced_in_yuan(region) { "CNY" } else { "USD" }
}

/// Factor from a us-east-1 list price in dollars to an estimated price in yuan. Not the exchange rate: in Beijing the prices of
/// most types are 8 to 12 times as high. Without it spot prices, which EC2 reports in yuan there, would exceed on-demand prices.
const YUAN_PER_DOLLAR: i64 = 10;

/// The price to use while the region's price list can't be read: the us-east-1 price, in the region's currency.
pub fn fallback_price(region: &str, us_east_1: MicroUsd) -> MicroUsd {
    MicroUsd(us_east_1.0.saturating_mul(if is_priced_in_yuan(region) { YUAN_PER_DOLLAR } else { 1 }))
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

/// The instance type and price of one entry of a price list, which is a JSON string. `None` where there is no price above zero
/// in the region's currency, or no instance type. The lowest of several prices is used.
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
    MicroUsd::from_usd(text.parse().ok()?).filter(|price| price.0 > 0)
}

/// Parses the entries of a price list; entries without a price are skipped.
pub fn parse_price_list(price_list: &[String], region: &str) -> OnDemandPrices {
    price_list.iter().filter_map(|json| product_price(json, region)).collect()
}

/// Reads the prices of shared and of bare-metal instances concurrently. A bare-metal price overrides a shared one.
///
/// # Errors
/// Either call fails or returns no price.
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
    let filters = filters.map_err(|error| unusable_response(PRODUCTS, error.to_string()))?;
    let mut pages = pricing
        .get_products()
        .service_code("AmazonEC2")
        .set_filters(Some(filters))
        .into_paginator()
        .page_size(PAGE_SIZE)
        .send();
    let mut prices = OnDemandPrices::new();
    // One page at a time: a region's list has some ten megabytes of JSON.
    while let Some(page) = pages.next().await {
        let page = page.map_err(ApiError::of(PRODUCTS))?;
        prices.extend(parse_price_list(page.price_list(), region));
    }
    if prices.is_empty() {
        return Err(unusable_response(PRODUCTS, format!("no prices of tenancy {tenancy}")));
    }
    Ok(prices)
}

#[cfg(test)]
mod tests;
