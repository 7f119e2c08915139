//! Current spot prices by instance type and zone.

use std::collections::BTreeMap;

use aws_sdk_ec2::Client;
use aws_sdk_ec2::primitives::DateTime;
use aws_sdk_ec2::types::SpotPrice;
use stowage_model::time::UnixMillis;
use stowage_model::units::MicroUsd;

use crate::ec2::aws::errors::ApiError;
use crate::ec2::offerings::instance_types::unusable_response;
use crate::ec2::offerings::list_prices::positive_price;

const HISTORY: &str = "ec2:DescribeSpotPriceHistory";
/// Records per page.
const PAGE_SIZE: i32 = 2000;

/// Spot prices by zone, by instance type.
pub type SpotPrices = BTreeMap<String, BTreeMap<String, MicroUsd>>;

/// The contents of a spot price history.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SpotHistory {
    pub prices: SpotPrices,
    /// Zone ids by zone name.
    pub zone_ids: BTreeMap<String, String>,
}

/// The latest record of each type and zone; of records with the same time, the last. Records without a type, a zone, a time or a
/// price above zero are skipped.
pub fn latest_prices(records: &[SpotPrice]) -> SpotHistory {
    let mut latest: BTreeMap<(&str, &str), (DateTime, MicroUsd)> = BTreeMap::new();
    let mut zone_ids = BTreeMap::new();
    for record in records {
        let (Some(name), Some(zone), Some(at)) =
            (record.instance_type(), record.availability_zone(), record.timestamp())
        else {
            continue;
        };
        if let Some(id) = record.availability_zone_id() {
            zone_ids.insert(zone.to_owned(), id.to_owned());
        }
        let Some(price) = record.spot_price().and_then(positive_price) else { continue };
        let key = (name.as_str(), zone);
        if latest.get(&key).is_none_or(|(latest_at, _)| latest_at <= at) {
            latest.insert(key, (*at, price));
        }
    }
    let mut prices = SpotPrices::new();
    for ((name, zone), (_, price)) in latest {
        prices.entry(name.to_owned()).or_default().insert(zone.to_owned(), price);
    }
    SpotHistory { prices, zone_ids }
}

/// Adds new prices to `prices`, replacing those of the same type and zone.
pub fn overlay(prices: &mut SpotPrices, new: SpotPrices) {
    for (name, zones) in new {
        prices.entry(name).or_default().extend(zones);
    }
}

/// Reads the prices in force at `now`.
///
/// # Errors
/// The call fails, or returns no price.
pub async fn describe_spot_prices(ec2: &Client, now: UnixMillis) -> Result<SpotHistory, ApiError> {
    let records: Result<Vec<_>, _> = ec2
        .describe_spot_price_history()
        .product_descriptions("Linux/UNIX")
        .product_descriptions("Linux/UNIX (Amazon VPC)")
        .start_time(DateTime::from_millis(now.0))
        .into_paginator()
        .page_size(PAGE_SIZE)
        .items()
        .send()
        .collect()
        .await;
    let history = latest_prices(&records.map_err(ApiError::of(HISTORY))?);
    if history.prices.is_empty() {
        return Err(unusable_response(HISTORY, "no spot prices"));
    }
    Ok(history)
}

#[cfg(test)]
mod tests;
