//! Sends a prepared CreateFleet request, and records the capacity feedback of its response.

use stowage_runtime::clock;

use crate::ec2::aws::errors;
use crate::ec2::aws::errors::{ApiError, Class};
use crate::ec2::launch::create_fleet::{CapacityFeedback, FleetResponse};
use crate::ec2::launch::launch_context::LaunchContext;
use crate::ec2::launch::launch_errors::{no_response, refused};
use crate::ec2::launch::prepare::PreparedFleet;
use crate::{LaunchError, LaunchRequest};

/// The result of a CreateFleet call.
pub enum FleetOutcome {
    /// EC2 responded: the launched instances and the failed overrides.
    Responded(FleetResponse, CapacityFeedback),
    /// The capacity reservation is full: select again.
    ReservationFull,
    /// A launch template no longer exists: recreate it and retry.
    TemplateGone,
    /// An earlier call used the same token with other parameters.
    TokenReused,
    /// EC2 refused, so that nothing was launched.
    Refused(LaunchError),
    /// EC2 throttled the call, so that nothing was launched.
    Throttled,
    /// EC2 received the call and failed to process it.
    ServerFault(ApiError),
    /// EC2 may have received the call.
    NoResponse(LaunchError),
}

/// Calls CreateFleet and records the capacity feedback of its response.
pub async fn create_fleet(context: &LaunchContext, request: &LaunchRequest, prepared: &PreparedFleet) -> FleetOutcome {
    let fleet = &prepared.fleet;
    tracing::info!(
        claim = request.node_claim,
        token = fleet.token,
        instances = fleet.count,
        capacity_type = %fleet.capacity_type,
        offerings = fleet.templates.iter().map(|(_, offerings)| offerings.len()).sum::<usize>(),
        prepared_us = u64::try_from(prepared.took.as_micros()).unwrap_or(u64::MAX),
        "calling CreateFleet"
    );
    let response = fleet.input().send_with(&context.clients.fleet).await;
    match response.map_err(ApiError::of("ec2:CreateFleet")) {
        Ok(response) => {
            let response = FleetResponse::read(&response, fleet);
            let feedback = record(context, request, &response, prepared);
            FleetOutcome::Responded(response, feedback)
        }
        Err(error) => match (error.class, &fleet.reservation) {
            _ if error.is_invalid_fleet() => FleetOutcome::Refused(refused(&error)),
            (_, None) if error.lacks_all_capacity() => {
                FleetOutcome::Refused(record_unavailable(context, request, prepared, &error))
            }
            (Class::Unfulfillable, Some(reservation)) => {
                record_full_reservation(context, &reservation.id);
                FleetOutcome::ReservationFull
            }
            (Class::LaunchTemplateNotFound, _) => FleetOutcome::TemplateGone,
            (Class::TokenReused, _) => FleetOutcome::TokenReused,
            (Class::Throttled, _) => FleetOutcome::Throttled,
            (Class::Server, _) => FleetOutcome::ServerFault(error),
            _ if error.is_transient() => FleetOutcome::NoResponse(no_response(&error)),
            _ => FleetOutcome::Refused(refused(&error)),
        },
    }
}

/// Records that EC2 refused or failed a whole call: the offerings of the request, or its capacity reservation, are unavailable for a
/// while, so that the next plan uses others. Returns the error of the launch.
pub fn record_unavailable(
    context: &LaunchContext,
    request: &LaunchRequest,
    prepared: &PreparedFleet,
    error: &ApiError,
) -> LaunchError {
    let fleet = &prepared.fleet;
    tracing::warn!(
        claim = request.node_claim,
        capacity_type = %fleet.capacity_type,
        reservation = fleet.reservation.as_ref().map(|reservation| &reservation.id),
        %error,
        "CreateFleet failed, its offerings are unavailable for three minutes"
    );
    let labels = ["", "", fleet.capacity_type.as_str(), error.launch_event().reason()];
    context.clients.metrics.launch_failures.with_label_values(&labels).inc();
    if let Some(reservation) = &fleet.reservation {
        record_full_reservation(context, &reservation.id);
        return LaunchError::InsufficientCapacity { unavailable: vec![] };
    }
    let marks = fleet.unavailable(prepared.placement_scope.as_deref());
    let feedback = CapacityFeedback { marks, ..CapacityFeedback::default() };
    let unavailable = feedback.offerings();
    context.offerings.mark_unavailable(feedback.marks, clock::now());
    LaunchError::InsufficientCapacity { unavailable }
}

fn record(
    context: &LaunchContext,
    request: &LaunchRequest,
    response: &FleetResponse,
    prepared: &PreparedFleet,
) -> CapacityFeedback {
    let fleet = &prepared.fleet;
    let feedback = CapacityFeedback::of(response, fleet, prepared.placement_scope.as_deref());
    for error in &response.errors {
        tracing::info!(
            claim = request.node_claim,
            code = error.code,
            instance_type = error.instance_type,
            zone = error.zone,
            error = error.message,
            "CreateFleet could not use an offering"
        );
        let zone = error.zone.as_deref().unwrap_or_default();
        let reason = errors::launch_event(&format!("{}: {}", error.code, error.message)).reason();
        let labels = [zone, &context.offerings.zone_id(zone), fleet.capacity_type.as_str(), reason];
        context.clients.metrics.launch_failures.with_label_values(&labels).inc();
    }
    context.offerings.mark_unavailable(feedback.marks.iter().cloned(), clock::now());
    if let Some(reservation) = fleet.reservation.as_ref().filter(|_| feedback.reservation_full) {
        record_full_reservation(context, &reservation.id);
    }
    context.node_classes.with_addresses(|addresses| {
        for subnet in &feedback.exhausted {
            addresses.record_exhausted(subnet);
        }
    });
    feedback
}

fn record_full_reservation(context: &LaunchContext, reservation: &str) {
    tracing::info!(reservation, "capacity reservation is full");
    context.offerings.with_reservations(|reservations| reservations.record_exhausted(reservation, clock::now()));
}
