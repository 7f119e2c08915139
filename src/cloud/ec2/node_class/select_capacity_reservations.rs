//! Capacity reservations that a node class selects: On-Demand Capacity Reservations and capacity blocks.

use std::collections::BTreeMap;
use std::time::Duration;

use aws_sdk_ec2::config::retry::RetryConfig;
use aws_sdk_ec2::types::{CapacityReservation, CapacityReservationType, Filter, InstanceMatchCriteria};
use futures::future::try_join_all;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use stowage_api::node_class::{CapacityReservationSelectorTerm, CapacityReservationStatus};
use stowage_model::time::UnixMillis;

use crate::ec2::aws::client::AwsClients;
use crate::ec2::aws::errors::{ApiError, Class};
use crate::ec2::aws::filters::{filter, tag_filters};

const ACTION: &str = "ec2:DescribeCapacityReservations";
/// How long before the end of a capacity block its nodes are disrupted. EC2 starts to terminate them ten minutes later.
const EXPIRES_BEFORE: Duration = Duration::from_mins(40);

/// A capacity reservation as EC2 describes it.
#[derive(Clone, Debug, PartialEq)]
pub struct DescribedReservation {
    /// The entry of a class's status. Its state is empty: it depends on the time.
    pub status: CapacityReservationStatus,
    /// Available instances.
    pub available: i64,
}

/// The call for a selector term.
#[derive(Clone, Debug, PartialEq)]
enum Query {
    /// By id. EC2 accepts no page size with ids, and one unknown id fails the call, so each id has its own call.
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

/// Describes the active reservations that some terms select. A reservation that several terms select is included several times;
/// an unknown id selects nothing.
///
/// # Errors
/// Any of the calls fails.
pub async fn find(
    clients: &AwsClients,
    terms: &[CapacityReservationSelectorTerm],
) -> Result<Vec<DescribedReservation>, ApiError> {
    let found = try_join_all(queries(terms).into_iter().map(|query| describe(clients, query))).await?;
    Ok(found.into_iter().flatten().collect())
}

async fn describe(clients: &AwsClients, query: Query) -> Result<Vec<DescribedReservation>, ApiError> {
    let call = clients.ec2.describe_capacity_reservations();
    let active = filter("state", ["active"]);
    let call = match query {
        Query::Id(id) => call.capacity_reservation_ids(id).filters(active),
        Query::Filters(filters) => call.set_filters(Some(filters)).filters(active).max_results(1000),
    };
    let mut found = Vec::new();
    let mut next: Option<String> = None;
    loop {
        // Some EC2-compatible endpoints lack this action, and a class works without it: few attempts.
        let few_attempts =
            aws_sdk_ec2::config::Builder::new().retry_config(RetryConfig::standard().with_max_attempts(3));
        let call = call.clone().set_next_token(next.take()).customize().config_override(few_attempts);
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

/// Reads EC2's description; `None`, with a warning, for one that a class's status can't express.
fn read(found: &CapacityReservation) -> Option<DescribedReservation> {
    let id = found.capacity_reservation_id().unwrap_or_default();
    let owner = found.owner_id().unwrap_or_default();
    let criteria = found.instance_match_criteria().map(InstanceMatchCriteria::as_str).unwrap_or_default();
    let kind = found.reservation_type().map(CapacityReservationType::as_str);
    let kind = kind.filter(|kind| !kind.is_empty()).unwrap_or("default");
    let zone = found.availability_zone().unwrap_or_default();
    let instance_type = found.instance_type().unwrap_or_default();
    let plain = |text: &str| !text.is_empty() && text.bytes().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit());
    let is_valid = id.strip_prefix("cr-").is_some_and(plain)
        && owner.len() == 12
        && owner.bytes().all(|c| c.is_ascii_digit())
        && ["open", "targeted"].contains(&criteria)
        && ["default", "capacity-block"].contains(&kind)
        && !zone.is_empty()
        && !instance_type.is_empty();
    if !is_valid {
        tracing::warn!(
            reservation = id,
            owner,
            criteria,
            kind,
            zone,
            instance_type,
            "ignored capacity reservation with unexpected values"
        );
        return None;
    }
    let end = found.end_date().and_then(|end| Timestamp::from_second(end.secs()).ok());
    Some(DescribedReservation {
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

/// The status list at a time: each reservation once, by id, without expired ones.
pub fn status(
    found: impl IntoIterator<Item = CapacityReservationStatus>,
    now: UnixMillis,
) -> Vec<CapacityReservationStatus> {
    let has_not_ended = |one: &CapacityReservationStatus| end(one).is_none_or(|end| end > now);
    let by_id: BTreeMap<String, CapacityReservationStatus> =
        found.into_iter().filter(has_not_ended).map(|one| (one.id.clone(), one)).collect();
    let with_state = |one: CapacityReservationStatus| {
        let expiring = expiring_from(&one).is_some_and(|at| at <= now);
        let state = if expiring { "expiring" } else { "active" }.to_owned();
        CapacityReservationStatus { state, ..one }
    };
    by_id.into_values().map(with_state).collect()
}

/// Time until the status list changes without a change in EC2; `None` where it never does.
pub fn changes_in(list: &[CapacityReservationStatus], now: UnixMillis) -> Option<Duration> {
    let times = list.iter().flat_map(|one| [expiring_from(one), end(one)]).flatten();
    times.filter(|at| *at > now).min().map(|at| at.saturating_since(now))
}

fn end(one: &CapacityReservationStatus) -> Option<UnixMillis> {
    one.end_time.as_ref().map(UnixMillis::from)
}

/// When a capacity block is expiring: its nodes are disrupted from then on.
fn expiring_from(one: &CapacityReservationStatus) -> Option<UnixMillis> {
    end(one).filter(|_| one.reservation_type == "capacity-block").map(|end| end - EXPIRES_BEFORE)
}

#[cfg(test)]
pub(crate) mod tests;
