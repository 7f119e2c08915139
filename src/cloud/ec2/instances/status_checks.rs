//! Status checks and scheduled events of instances, from DescribeInstanceStatus.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use aws_sdk_ec2::Client;
use aws_sdk_ec2::types::{Filter, InstanceStatus, InstanceStatusSummary, StatusType};
use stowage_model::instance_health::{Category, Unhealthy};
use stowage_model::time::UnixMillis;

use crate::ec2::aws::errors::ApiError;
use crate::ec2::aws::filters::filter;

const STATUS: &str = "ec2:DescribeInstanceStatus";
/// Time that a check must have failed to count.
const TOLERATED: Duration = Duration::from_mins(2);
/// Codes of scheduled events that stop, reboot or retire an instance.
const EVENT_CODES: [&str; 5] =
    ["instance-reboot", "system-reboot", "system-maintenance", "instance-retirement", "instance-stop"];
/// Prefixes of descriptions of finished events, which EC2 returns for days.
const FINISHED: [&str; 2] = ["[Completed]", "[Canceled]"];

/// The unhealthy instances, by id, without duplicates. A failed check counts after two minutes, and not without a start time, because
/// the response is a forced termination. A scheduled event counts at once, until it is finished. Checks of attached volumes are
/// ignored.
pub fn unhealthy(statuses: &[InstanceStatus], now: UnixMillis) -> Vec<Unhealthy> {
    let mut found: BTreeMap<&str, BTreeSet<Category>> = BTreeMap::new();
    for status in statuses {
        let Some(id) = status.instance_id() else { continue };
        let mut report = |is_unhealthy: bool, category| {
            if is_unhealthy {
                found.entry(id).or_default().insert(category);
            }
        };
        report(failed(status.instance_status(), now), Category::InstanceStatus);
        report(failed(status.system_status(), now), Category::SystemStatus);
        let is_scheduled = status.events().iter().any(|event| {
            let known = event.code().is_some_and(|code| EVENT_CODES.contains(&code.as_str()));
            let text = event.description().unwrap_or_default().trim_start();
            known && !FINISHED.iter().any(|prefix| text.starts_with(prefix))
        });
        report(is_scheduled, Category::EventStatus);
    }
    let one = |(id, categories): (&str, _)| Unhealthy { instance_id: id.to_owned(), categories };
    found.into_iter().map(one).collect()
}

fn failed(summary: Option<&InstanceStatusSummary>, now: UnixMillis) -> bool {
    let details = summary.map(InstanceStatusSummary::details).unwrap_or_default();
    details.iter().any(|detail| {
        let since = detail.impaired_since().and_then(|since| since.to_millis().ok()).map(UnixMillis);
        detail.status() == Some(&StatusType::Failed)
            && since.is_some_and(|since| now.saturating_since(since) >= TOLERATED)
    })
}

/// Describes all instances of the account with a failed check or a scheduled event. Three scans, because EC2 combines filters with
/// AND: an instance may appear in several.
///
/// # Errors
/// A call fails. After an authorization failure the caller stops polling.
pub async fn describe_statuses(ec2: &Client) -> Result<Vec<InstanceStatus>, ApiError> {
    let (instance, system, events) = futures::try_join!(
        scan(ec2, filter("instance-status.status", ["impaired"])),
        scan(ec2, filter("system-status.status", ["impaired"])),
        scan(ec2, filter("event.code", EVENT_CODES)),
    )?;
    Ok([instance, system, events].concat())
}

async fn scan(ec2: &Client, filter: Filter) -> Result<Vec<InstanceStatus>, ApiError> {
    let statuses: Result<Vec<_>, _> =
        ec2.describe_instance_status().filters(filter).into_paginator().items().send().collect().await;
    statuses.map_err(ApiError::of(STATUS))
}

#[cfg(test)]
mod tests;
