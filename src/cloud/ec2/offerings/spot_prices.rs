//! Spot prices now, by instance type and zone.

use std::collections::BTreeMap;

use aws_sdk_ec2::Client;
use aws_sdk_ec2::primitives::DateTime;
use aws_sdk_ec2::types::SpotPrice;

use crate::cloud::ec2::aws::errors::ApiError;
use crate::cloud::ec2::offerings::instance_types::unusable_answer;
use crate::cloud::ec2::offerings::prices::positive_price;
use crate::model::units::MicroUsd;

const HISTORY: &str = "ec2:DescribeSpotPriceHistory";
/// Records of one answer.
const PAGE: i32 = 2000;

/// Spot prices by zone, by instance type.
pub type SpotPrices = BTreeMap<String, BTreeMap<String, MicroUsd>>;

/// What the history tells.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SpotHistory {
    /// Prices.
    pub prices: SpotPrices,
    /// Ids of the zones it names, by name.
    pub zone_ids: BTreeMap<String, String>,
}

/// Reads records: of several for one type and zone the latest counts, of equally late ones the last. Records without a time,
/// a place or a price above zero are left out.
pub fn read(records: &[SpotPrice]) -> SpotHistory {
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
        if latest.get(&key).is_none_or(|(known, _)| known <= at) {
            latest.insert(key, (*at, price));
        }
    }
    let mut prices = SpotPrices::new();
    for ((name, zone), (_, price)) in latest {
        prices.entry(name.to_owned()).or_default().insert(zone.to_owned(), price);
    }
    SpotHistory { prices, zone_ids }
}

/// Lays new prices over known ones; nothing is taken away.
pub fn overlay(known: &mut SpotPrices, new: SpotPrices) {
    for (name, zones) in new {
        known.entry(name).or_default().extend(zones);
    }
}

/// The prices in force at `now_ms`.
///
/// # Errors
/// The call fails, or there is none.
pub async fn describe_spot_prices(ec2: &Client, now_ms: i64) -> Result<SpotHistory, ApiError> {
    let records: Result<Vec<_>, _> = ec2
        .describe_spot_price_history()
        .product_descriptions("Linux/UNIX")
        .product_descriptions("Linux/UNIX (Amazon VPC)")
        .start_time(DateTime::from_millis(now_ms))
        .into_paginator()
        .page_size(PAGE)
        .items()
        .send()
        .collect()
        .await;
    let history = read(&records.map_err(ApiError::of(HISTORY))?);
    if history.prices.is_empty() {
        return Err(unusable_answer(HISTORY, "no spot prices"));
    }
    Ok(history)
}

#[cfg(test)]
mod tests;
