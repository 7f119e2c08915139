//! Capacity reservations that a node class selects: On-Demand Capacity Reservations and capacity blocks.

use std::collections::BTreeMap;
use std::time::Duration;

use aws_sdk_ec2::config::retry::RetryConfig;
use aws_sdk_ec2::types::{CapacityReservation, CapacityReservationType, Filter, InstanceMatchCriteria};
use futures::future::try_join_all;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;

use crate::api::node_class::{CapacityReservationSelectorTerm, CapacityReservationStatus};
use crate::cloud::ec2::aws::client::Clients;
use crate::cloud::ec2::aws::errors::{ApiError, Class};
use crate::cloud::ec2::aws::filters::{filter, tag_filters};

const ACTION: &str = "ec2:DescribeCapacityReservations";
/// How long before the end of a capacity block its nodes are let go, milliseconds: EC2 begins to take them ten minutes later.
const EXPIRES_BEFORE_MS: i64 = 40 * 60_000;

/// A reservation that was found.
#[derive(Clone, Debug, PartialEq)]
pub struct Found {
    /// As a class's status says it. Its state is not looked at: time decides that.
    pub status: CapacityReservationStatus,
    /// Instances that still fit.
    pub available: i64,
}

/// A call that finds what a term selects.
#[derive(Clone, Debug, PartialEq)]
enum Query {
    /// By id: EC2 takes no page size beside ids, and one unknown id fails the call, so each is asked for alone.
    Id(String),
    /// By filters that must all match.
    Filters(Vec<Filter>),
}

fn queries(terms: &[CapacityReservationSelectorTerm]) -> Vec<Query> {
    let query = |term: &CapacityReservationSelectorTerm| {
        if let Some(id) = &term.id {
            return Query::Id(id.clone());
        }
        let mut filters = tag_filters(&term.tags);
        filters.extend(term.owner_id.as_ref().map(|owner| filter("owner-id", [owner])));
        filters.extend(term.instance_match_criteria.as_ref().map(|kind| filter("instance-match-criteria", [kind])));
        Query::Filters(filters)
    };
    let mut out = Vec::new();
    for query in terms.iter().map(query) {
        if !out.contains(&query) {
            out.push(query);
        }
    }
    out
}

/// Asks EC2 for the active reservations that some terms select. A reservation that several terms select is there several
/// times; an id that EC2 doesn't know selects nothing.
///
/// # Errors
/// EC2's, of any of the calls.
pub async fn find(clients: &Clients, terms: &[CapacityReservationSelectorTerm]) -> Result<Vec<Found>, ApiError> {
    let found = try_join_all(queries(terms).into_iter().map(|query| ask(clients, query))).await?;
    Ok(found.into_iter().flatten().collect())
}

async fn ask(clients: &Clients, query: Query) -> Result<Vec<Found>, ApiError> {
    let call = clients.ec2.describe_capacity_reservations();
    let active = filter("state", ["active"]);
    let call = match query {
        Query::Id(id) => call.capacity_reservation_ids(id).filters(active),
        Query::Filters(filters) => call.set_filters(Some(filters)).filters(active).max_results(1000),
    };
    let mut found = Vec::new();
    let mut next: Option<String> = None;
    loop {
        // Not every endpoint knows this action, and a class can do without: no long waits.
        let few = aws_sdk_ec2::config::Builder::new().retry_config(RetryConfig::standard().with_max_attempts(3));
        let call = call.clone().set_next_token(next.take()).customize().config_override(few);
        let page = match call.send().await.map_err(ApiError::of(ACTION)) {
            Ok(page) => page,
            Err(error) if error.class == Class::NotFound => return Ok(found),
            Err(error) => return Err(error),
        };
        found.extend(page.capacity_reservations().iter().filter_map(read));
        match page.next_token() {
            Some(token) if !token.is_empty() => next = Some(token.to_owned()),
            _ => return Ok(found),
        }
    }
}

/// Reads EC2's description; `None`, and a line in the log, for what a class's status can't say.
fn read(found: &CapacityReservation) -> Option<Found> {
    let id = found.capacity_reservation_id().unwrap_or_default();
    let owner = found.owner_id().unwrap_or_default();
    let criteria = found.instance_match_criteria().map(InstanceMatchCriteria::as_str).unwrap_or_default();
    let kind = found.reservation_type().map(CapacityReservationType::as_str);
    let kind = kind.filter(|kind| !kind.is_empty()).unwrap_or("default");
    let zone = found.availability_zone().unwrap_or_default();
    let instance_type = found.instance_type().unwrap_or_default();
    let plain = |text: &str| !text.is_empty() && text.bytes().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit());
    let is_understood = id.strip_prefix("cr-").is_some_and(plain)
        && owner.len() == 12
        && owner.bytes().all(|c| c.is_ascii_digit())
        && ["open", "targeted"].contains(&criteria)
        && ["default", "capacity-block"].contains(&kind)
        && !zone.is_empty()
        && !instance_type.is_empty();
    if !is_understood {
        tracing::warn!(
            reservation = id,
            owner,
            criteria,
            kind,
            zone,
            instance_type,
            "capacity reservation is left out: not understood"
        );
        return None;
    }
    let end = found.end_date().and_then(|end| Timestamp::from_second(end.secs()).ok());
    Some(Found {
        status: CapacityReservationStatus {
            availability_zone: zone.to_owned(),
            end_time: end.map(Time),
            id: id.to_owned(),
            instance_match_criteria: criteria.to_owned(),
            instance_type: instance_type.to_owned(),
            owner_id: owner.to_owned(),
            reservation_type: kind.to_owned(),
            interruptible: Some(found.interruptible().unwrap_or(false)),
            state: String::new(),
        },
        available: found.available_instance_count().unwrap_or(0).into(),
    })
}

/// The status list at a time: each reservation once, by id, without those that have ended.
pub fn status(
    found: impl IntoIterator<Item = CapacityReservationStatus>,
    now_ms: i64,
) -> Vec<CapacityReservationStatus> {
    let lives = |one: &CapacityReservationStatus| end_ms(one).is_none_or(|end| end > now_ms);
    let by_id: BTreeMap<String, CapacityReservationStatus> =
        found.into_iter().filter(lives).map(|one| (one.id.clone(), one)).collect();
    let aged = |one: CapacityReservationStatus| {
        let expiring = expires_ms(&one).is_some_and(|at| at <= now_ms);
        let state = if expiring { "expiring" } else { "active" }.to_owned();
        CapacityReservationStatus { state, ..one }
    };
    by_id.into_values().map(aged).collect()
}

/// How long a status list stays right by itself; `None` for ever.
pub fn changes_in(list: &[CapacityReservationStatus], now_ms: i64) -> Option<Duration> {
    let times = list.iter().flat_map(|one| [expires_ms(one), end_ms(one)]).flatten();
    let next = times.filter(|at| *at > now_ms).min()?;
    u64::try_from(next - now_ms).ok().map(Duration::from_millis)
}

fn end_ms(one: &CapacityReservationStatus) -> Option<i64> {
    one.end_time.as_ref().map(|end| end.0.as_millisecond())
}

/// When nodes of a capacity block have to go.
fn expires_ms(one: &CapacityReservationStatus) -> Option<i64> {
    end_ms(one).filter(|_| one.reservation_type == "capacity-block").map(|end| end - EXPIRES_BEFORE_MS)
}

#[cfg(test)]
pub(crate) mod tests;
