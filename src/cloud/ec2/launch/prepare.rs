//! Prepares the CreateFleet request of a launch: selects offerings, reserves subnet addresses and capacity in reservations,
//! and ensures that the launch templates exist.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::future::try_join_all;
use kube::ResourceExt;
use stowage_api::Ec2NodeClass;
use stowage_api::launch_group::LaunchGroup;
use stowage_api::parse_requirements;
use stowage_model::events;
use stowage_runtime::clock;

use crate::ec2::launch::create_fleet::{FleetRequest, LaunchedInstance};
use crate::ec2::launch::launch_context::LaunchContext;
use crate::ec2::launch::launch_errors::{no_response, refused};
use crate::ec2::launch::request::Shapes;
use crate::ec2::launch::select::{Choice, choose, min_values_hold};
use crate::ec2::launch::select_reserved::{ReservationQuery, choose_reserved};
use crate::ec2::launch::templates::recent::{LaunchShape, RecentShape};
use crate::ec2::launch::templates::template_store::TemplateRef;
use crate::ec2::node_class::select_placement_group;
use crate::ec2::node_class::subnets::{AddressReservation, SubnetChoice};
use crate::ec2::offerings::unavailable::placement_scope;
use crate::ec2::placement_group::PlacementGroup;
use crate::{LaunchDetails, LaunchError, LaunchRequest};

/// A CreateFleet request that is ready to be sent.
#[derive(Debug)]
pub struct PreparedFleet {
    pub fleet: FleetRequest,
    /// Keep the templates from being deleted until EC2 has responded.
    pub templates: Vec<TemplateRef>,
    pub addresses: Vec<AddressReservation>,
    /// The placement group or the partition of it that failures apply to.
    pub placement_scope: Option<String>,
    /// The requested partition of the placement group.
    pub partition: Option<i32>,
    /// How long the preparation took, calls for templates included.
    pub took: Duration,
}

/// Prepares a request for up to `count` claims of a launch group, under an idempotency token.
///
/// # Errors
/// No offering is left, the class cannot launch, or a call failed; then everything reserved is released.
pub async fn prepare(
    context: &LaunchContext,
    request: &LaunchRequest,
    details: &LaunchDetails,
    launch_group: &LaunchGroup,
    count: usize,
    token: String,
) -> Result<PreparedFleet, LaunchError> {
    let Some((choice, count)) = select(context, request, details, &token, count) else {
        return Err(LaunchError::InsufficientCapacity { unavailable: vec![] });
    };
    match prepare_fleet(context, request, details, &choice, count, token.clone()).await {
        Ok(mut prepared) => {
            let count = prepared.fleet.count;
            prepared.fleet.for_launch_group(launch_group, count);
            let places = usize::try_from(count).unwrap_or(0);
            context.offerings.with_reservations(|reservations| reservations.truncate(&token, places));
            Ok(prepared)
        }
        Err(error) => {
            context.offerings.with_reservations(|reservations| reservations.release(&token));
            Err(error)
        }
    }
}

/// Selects the offerings of a launch of up to `count` instances, and the number of instances. A capacity reservation gets an
/// allocation for each instance under `token`.
fn select(
    context: &LaunchContext,
    request: &LaunchRequest,
    details: &LaunchDetails,
    token: &str,
    count: usize,
) -> Option<(Choice, usize)> {
    let requirements = &details.claim.spec.requirements;
    let free_choice = requirements.iter().all(|requirement| requirement.min_values.is_none());
    let parsed = parse_requirements(requirements).unwrap_or_default();
    let reserved = context.offerings.with_reservations(|reservations| {
        let left = |id: &str| reservations.available(id);
        let query = ReservationQuery { requirements: &parsed, free_choice, left: &left };
        let choice = choose_reserved(&request.overrides, &details.catalog, &query);
        let choice = choice?;
        let reservation = choice.reservation.as_ref()?;
        let places = usize::try_from(reservations.available(&reservation.id)).unwrap_or(0).min(count);
        reservations.allocate(&reservation.id, token, places, clock::now());
        Some((choice, places))
    });
    if reserved.is_none()
        && context.options.strict_min_values
        && !min_values_hold(&request.overrides, &details.catalog, requirements)
    {
        return None;
    }
    reserved.or_else(|| Some((choose(&request.overrides, &details.catalog, free_choice)?, count)))
}

async fn prepare_fleet(
    context: &LaunchContext,
    request: &LaunchRequest,
    details: &LaunchDetails,
    choice: &Choice,
    count: usize,
    token: String,
) -> Result<PreparedFleet, LaunchError> {
    let begun = Instant::now();
    let placement_group = resolve_placement_group(context, &details.class).await?;
    let template_inputs = context.template_inputs(Arc::clone(&details.class), placement_group);
    let (settings, region) = (context.options.settings(&details.class), context.offerings.snapshot());
    let shapes = Shapes::of(&settings, &region.types);
    let inputs = context.launch_inputs(request, &details.claim, &template_inputs, shapes);
    let tags = inputs.tags()?;
    let template_groups = inputs.template_groups(choice, &tags)?;
    let subnets = details.class.status.as_ref().map(|status| status.subnets.as_slice()).unwrap_or_default();
    let count = i64::try_from(count).unwrap_or(i64::MAX);
    let SubnetChoice { by_zone, instances, reservations: addresses } =
        context.node_classes.with_addresses(|addresses| addresses.reserve(subnets, &choice.fewest_pods(), count));
    let release_addresses = || context.node_classes.with_addresses(|free| free.release(&addresses, &[]));
    let now = clock::now();
    let ensured = template_groups.iter().map(|group| context.templates.ensure(&context.clients, &group.template, now));
    let templates = try_join_all(ensured).await.map_err(|error| {
        release_addresses();
        refused(&error)
    })?;
    let named: Vec<_> = templates.iter().map(|template| template.name().to_owned()).zip(&template_groups).collect();
    let Some(mut fleet) = inputs.fleet(token, choice, &named, &by_zone, tags) else {
        release_addresses();
        let message = format!("EC2NodeClass {} has no subnet in any zone of the offerings", details.class.name_any());
        return Err(LaunchError::Rejected { event: events::SUBNET_RESOLUTION_FAILED, message });
    };
    fleet.count = i32::try_from(instances).unwrap_or(i32::MAX);
    let partition = template_groups.first().and_then(|group| group.template.partition);
    let number = partition.map(|partition| partition.to_string());
    let placement_scope =
        template_inputs.placement_group.as_ref().map(|group| placement_scope(&group.id, number.as_deref()));
    if let Some(shape) = LaunchShape::of(request, &details.claim, choice) {
        let names = templates.iter().map(|template| template.name().to_owned()).collect();
        let class = Arc::clone(&template_inputs.class);
        let used_at = clock::now();
        context.recent_shapes.keep(RecentShape { shape, class, template_inputs, names, used_at });
    }
    Ok(PreparedFleet { fleet, templates, addresses, placement_scope, partition, took: begun.elapsed() })
}

/// The placement group that a class selects, as last resolved.
async fn resolve_placement_group(
    context: &LaunchContext,
    class: &Ec2NodeClass,
) -> Result<Option<PlacementGroup>, LaunchError> {
    let Some(selector) = &class.spec.placement_group_selector else { return Ok(None) };
    if let Some(group) = context.node_classes.placement_group(class) {
        return Ok(Some(group));
    }
    match select_placement_group::find(&context.clients, selector).await {
        Ok(Some(group)) => {
            context.node_classes.set_placement_group(class, Some(group.clone()));
            Ok(Some(group))
        }
        Ok(None) => Err(LaunchError::NodeClassNotReady {
            name: class.name_any(),
            reason: "its placement group does not exist".into(),
        }),
        Err(error) => Err(no_response(&error)),
    }
}

/// Releases the addresses and the allocation in a reservation that a call did not use.
pub fn release_unused(context: &LaunchContext, prepared: &PreparedFleet, launched: &[LaunchedInstance]) {
    let token = &prepared.fleet.token;
    let instances: Vec<&str> = launched.iter().map(|instance| instance.id.as_str()).collect();
    context.offerings.with_reservations(|reservations| {
        reservations.record_launched(token, &instances, clock::now());
        reservations.release(token);
    });
    let used: Vec<&str> = launched.iter().filter_map(|instance| instance.subnet.as_deref()).collect();
    context.node_classes.with_addresses(|free| free.release(&prepared.addresses, &used));
}
