//! CreateFleet: the request for the instances of a launch group, and the interpretation of its response. Pure.

use std::collections::{BTreeMap, BTreeSet};

use aws_sdk_ec2::operation::create_fleet::CreateFleetOutput;
use aws_sdk_ec2::operation::create_fleet::builders::CreateFleetInputBuilder;
use aws_sdk_ec2::types::{
    DefaultTargetCapacityType, FleetLaunchTemplateConfigRequest, FleetLaunchTemplateOverridesRequest,
    FleetLaunchTemplateSpecificationRequest, FleetOnDemandAllocationStrategy, FleetReservationType, FleetType,
    OnDemandOptionsRequest, ReservedCapacityOptionsRequest, ResourceType, SpotAllocationStrategy, SpotOptionsRequest,
    TargetCapacitySpecificationRequest,
};
use stowage_api::launch_group::LaunchGroup;
use stowage_model::offering::CapacityType;
use stowage_model::reservation::ReservationKind;
use stowage_model::units::MicroUsd;

use crate::ec2::aws::errors;
use crate::ec2::aws::errors::{Class, class_of, is_full_spread_group, is_out_of_addresses};
use crate::ec2::offerings::unavailable::CapacityScope;
use crate::ec2::tags::{CLAIM_TAG, LAUNCH_TAG, tag_specification};
use crate::{LaunchError, Override, ReservedIn};

/// An offering of the request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FleetOverride {
    pub instance_type: String,
    /// Zone name.
    pub zone: String,
    /// Subnet id.
    pub subnet: String,
    /// Image id.
    pub image: String,
    /// The priority of the override: the lowest price comes first when prices are overlaid.
    pub price: MicroUsd,
}

/// A request for equivalent instances.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FleetRequest {
    /// Idempotency token.
    pub token: String,
    /// Number of instances.
    pub count: i32,
    /// The `context` of the class, passed to EC2 unchanged.
    pub context: Option<String>,
    /// Capacity type of all overrides.
    pub capacity_type: CapacityType,
    /// Capacity reservation of all overrides.
    pub reservation: Option<ReservedIn>,
    /// Whether EC2 allocates by the priority of the overrides instead of by its own prices.
    pub prioritized: bool,
    /// Overrides by name of the launch template.
    pub templates: Vec<(String, Vec<FleetOverride>)>,
    /// Tags of the fleet, the volumes and the instances.
    pub tags: BTreeMap<String, String>,
    /// Additional tags of the instances.
    pub instance_tags: BTreeMap<String, String>,
}

impl FleetRequest {
    /// Makes this a request for `count` claims of a launch group. Which claim gets which instance is not known in advance, so that
    /// the instances of several claims carry only the tag of their launch group until they are Nodes.
    pub fn for_launch_group(&mut self, group: &LaunchGroup, count: i32) {
        self.count = count;
        self.instance_tags.insert(LAUNCH_TAG.to_owned(), group.id.clone());
        if group.size > 1 {
            self.instance_tags.remove(CLAIM_TAG);
        }
    }

    /// The input of the API call.
    pub fn input(&self) -> CreateFleetInputBuilder {
        let target = TargetCapacitySpecificationRequest::builder()
            .total_target_capacity(self.count)
            .default_target_capacity_type(self.target());
        let mut instance = self.tags.clone();
        instance.extend(self.instance_tags.clone());
        let input = CreateFleetInputBuilder::default()
            .r#type(FleetType::Instant)
            .client_token(&self.token)
            .set_context(self.context.clone())
            .set_launch_template_configs(Some(
                self.templates.iter().map(|(name, overrides)| config(name, overrides)).collect(),
            ))
            .target_capacity_specification(target.build())
            .tag_specifications(tag_specification(ResourceType::Instance, &instance))
            .tag_specifications(tag_specification(ResourceType::Volume, &self.tags))
            .tag_specifications(tag_specification(ResourceType::Fleet, &self.tags));
        match self.target() {
            DefaultTargetCapacityType::Spot => {
                let strategy = if self.prioritized {
                    SpotAllocationStrategy::CapacityOptimizedPrioritized
                } else {
                    SpotAllocationStrategy::PriceCapacityOptimized
                };
                input.spot_options(SpotOptionsRequest::builder().allocation_strategy(strategy).build())
            }
            DefaultTargetCapacityType::CapacityBlock => input,
            DefaultTargetCapacityType::ReservedCapacity => {
                let kind = FleetReservationType::InterruptibleCapacityReservation;
                input.reserved_capacity_options(
                    ReservedCapacityOptionsRequest::builder().reservation_types(kind).build(),
                )
            }
            _ => {
                let strategy = if self.prioritized {
                    FleetOnDemandAllocationStrategy::Prioritized
                } else {
                    FleetOnDemandAllocationStrategy::LowestPrice
                };
                input.on_demand_options(OnDemandOptionsRequest::builder().allocation_strategy(strategy).build())
            }
        }
    }

    /// The offerings of the request, unavailable in the `placement_scope` of its placement group.
    pub fn unavailable(&self, placement_scope: Option<&str>) -> Vec<CapacityScope> {
        let overrides = self.templates.iter().flat_map(|(_, overrides)| overrides);
        let scopes: BTreeSet<(&str, &str)> =
            overrides.map(|one| (one.instance_type.as_str(), one.zone.as_str())).collect();
        let scope = |(instance_type, zone): (&str, &str)| {
            let (instance_type, zone) = (instance_type.to_owned(), zone.to_owned());
            let offering = Override { instance_type, zone, capacity_type: self.capacity_type };
            CapacityScope::Offering(offering, placement_scope.map(str::to_owned))
        };
        scopes.into_iter().map(scope).collect()
    }

    /// The target capacity type of EC2: instances in an On-Demand Capacity Reservation are on-demand.
    fn target(&self) -> DefaultTargetCapacityType {
        match (self.capacity_type, self.reservation.as_ref().map(|reservation| reservation.kind)) {
            (CapacityType::Spot, _) => DefaultTargetCapacityType::Spot,
            (_, Some(ReservationKind::CapacityBlock)) => DefaultTargetCapacityType::CapacityBlock,
            (_, Some(ReservationKind::Interruptible)) => DefaultTargetCapacityType::ReservedCapacity,
            (_, Some(ReservationKind::OnDemand) | None) => DefaultTargetCapacityType::OnDemand,
        }
    }
}

fn config(template: &str, overrides: &[FleetOverride]) -> FleetLaunchTemplateConfigRequest {
    let one = |fleet_override: &FleetOverride| {
        FleetLaunchTemplateOverridesRequest::builder()
            .instance_type(fleet_override.instance_type.as_str().into())
            .subnet_id(&fleet_override.subnet)
            .image_id(&fleet_override.image)
            .availability_zone(&fleet_override.zone)
            .priority(fleet_override.price.usd())
            .build()
    };
    let specification =
        FleetLaunchTemplateSpecificationRequest::builder().launch_template_name(template).version("$Latest").build();
    FleetLaunchTemplateConfigRequest::builder()
        .launch_template_specification(specification)
        .set_overrides(Some(overrides.iter().map(one).collect()))
        .build()
}

/// An instance that a fleet launched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LaunchedInstance {
    pub id: String,
    pub instance_type: String,
    /// Zone name.
    pub zone: String,
    /// Subnet id.
    pub subnet: Option<String>,
    /// Image id.
    pub image: String,
}

/// Why a fleet could not use an override.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FleetError {
    pub code: String,
    pub message: String,
    /// Instance type that the error names.
    pub instance_type: Option<String>,
    /// Zone that the error names.
    pub zone: Option<String>,
    /// Subnet that the error names.
    pub subnet: Option<String>,
}

/// The response of EC2.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FleetResponse {
    /// At most as many instances as requested, unless EC2 exceeds the request.
    pub launched: Vec<LaunchedInstance>,
    /// Overrides that failed, possibly in addition to launched instances.
    pub errors: Vec<FleetError>,
}

impl FleetResponse {
    /// Reads the response of EC2. A missing zone or image is taken from the request.
    pub fn read(response: &CreateFleetOutput, request: &FleetRequest) -> Self {
        let requested = || request.templates.iter().flat_map(|(_, overrides)| overrides);
        let mut launched = Vec::new();
        for reported in response.instances() {
            let overrides = reported.launch_template_and_overrides().and_then(|used| used.overrides());
            let subnet = overrides.and_then(|used| used.subnet_id()).or(reported.subnet_id());
            let instance_type = reported
                .instance_type()
                .or(overrides.and_then(|used| used.instance_type()))
                .map(|kind| kind.as_str().to_owned())
                .unwrap_or_default();
            let fleet_override = requested().find(|fleet_override| {
                fleet_override.instance_type == instance_type
                    && subnet.is_none_or(|subnet| subnet == fleet_override.subnet)
            });
            let zone = overrides.and_then(|used| used.availability_zone()).or(reported.availability_zone());
            let zone = zone
                .map(str::to_owned)
                .or_else(|| fleet_override.map(|fleet_override| fleet_override.zone.clone()))
                .unwrap_or_default();
            let image = overrides.and_then(|used| used.image_id()).map(str::to_owned);
            let image =
                image.or_else(|| fleet_override.map(|fleet_override| fleet_override.image.clone())).unwrap_or_default();
            for id in reported.instance_ids() {
                launched.push(LaunchedInstance {
                    id: id.clone(),
                    instance_type: instance_type.clone(),
                    zone: zone.clone(),
                    subnet: subnet.map(str::to_owned),
                    image: image.clone(),
                });
            }
        }
        let errors = response.errors().iter().map(|error| {
            let overrides = error.launch_template_and_overrides().and_then(|used| used.overrides());
            let subnet = overrides.and_then(|used| used.subnet_id()).map(str::to_owned);
            let zone = overrides.and_then(|used| used.availability_zone()).map(str::to_owned).or_else(|| {
                requested()
                    .find(|fleet_override| Some(&fleet_override.subnet) == subnet.as_ref())
                    .map(|fleet_override| fleet_override.zone.clone())
            });
            FleetError {
                code: error.error_code().unwrap_or_default().to_owned(),
                message: error.error_message().unwrap_or_default().to_owned(),
                instance_type: overrides.and_then(|used| used.instance_type()).map(|kind| kind.as_str().to_owned()),
                zone,
                subnet,
            }
        });
        Self { launched, errors: errors.collect() }
    }

    /// Whether EC2 launched fewer instances than requested, and reported no error.
    fn is_short_without_error(&self, request: &FleetRequest) -> bool {
        self.errors.is_empty() && !self.is_complete(request)
    }

    /// Whether EC2 launched as many instances as requested.
    pub fn is_complete(&self, request: &FleetRequest) -> bool {
        i32::try_from(self.launched.len()).is_ok_and(|launched| launched >= request.count)
    }

    /// Whether nothing was launched because a launch template no longer exists.
    pub fn lacks_template(&self) -> bool {
        self.launched.is_empty()
            && self.errors.iter().any(|error| class_of(&error.code) == Class::LaunchTemplateNotFound)
    }
}

/// The capacity information in the errors of a fleet.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CapacityFeedback {
    /// Capacity that is unavailable for a while.
    pub marks: Vec<CapacityScope>,
    /// Subnets without free addresses.
    pub exhausted: BTreeSet<String>,
    /// The service-linked role of EC2 spot is missing, and the controller may not create it.
    pub no_spot_role: bool,
    /// The capacity reservation of the request is full. Its count records that instead of a mark on the offering, since other
    /// reservations of the type and zone may have capacity.
    pub reservation_full: bool,
}

impl CapacityFeedback {
    /// Evaluates the response to a request. `placement_scope` is its placement group or a partition of it
    /// ([`placement_scope`](crate::ec2::offerings::unavailable::placement_scope)). Fewer instances than requested without an
    /// error mean insufficient capacity.
    pub fn of(response: &FleetResponse, request: &FleetRequest, placement_scope: Option<&str>) -> Self {
        if response.is_short_without_error(request) {
            let reservation_full = request.reservation.is_some();
            let is_unavailable = !reservation_full && response.launched.is_empty();
            let marks = if is_unavailable { request.unavailable(placement_scope) } else { vec![] };
            return Self { marks, reservation_full, ..Self::default() };
        }
        let mut out = Self::of_errors(&response.errors, request, placement_scope);
        let unnamed = out.marks.is_empty() && !out.reservation_full && response.errors.iter().all(is_capacity);
        if unnamed && response.launched.is_empty() {
            // The errors name no offering. Without marks the next plan would be the same.
            out.marks = request.unavailable(placement_scope);
        }
        out
    }

    fn of_errors(errors: &[FleetError], request: &FleetRequest, placement_scope: Option<&str>) -> Self {
        let mut out = Self::default();
        let mut mark = |subject: CapacityScope| {
            if !out.marks.contains(&subject) {
                out.marks.push(subject);
            }
        };
        let offering = |instance_type: &str, zone: &str| {
            let (instance_type, zone) = (instance_type.to_owned(), zone.to_owned());
            let offering = Override { instance_type, zone, capacity_type: request.capacity_type };
            CapacityScope::Offering(offering, placement_scope.map(str::to_owned))
        };
        for error in errors {
            if is_out_of_addresses(&error.code)
                && let Some(subnet) = &error.subnet
            {
                mark(CapacityScope::Subnet(subnet.clone()));
                out.exhausted.insert(subnet.clone());
            }
            let spread_is_full = placement_scope.is_some() && is_full_spread_group(&error.message);
            if request.reservation.is_some() {
                // A full spread placement group counts as full, too: the next plan would otherwise be identical. Karpenter leaves the
                // count unchanged.
                out.reservation_full |= spread_is_full || class_of(&error.code) == Class::Unfulfillable;
                continue;
            }
            match (class_of(&error.code), &error.instance_type, &error.zone) {
                (_, _, Some(zone)) if spread_is_full => {
                    let overrides = request.templates.iter().flat_map(|(_, overrides)| overrides);
                    for fleet_override in overrides.filter(|fleet_override| fleet_override.zone == *zone) {
                        mark(offering(&fleet_override.instance_type, zone));
                    }
                }
                (Class::Unfulfillable, Some(instance_type), Some(zone)) => mark(offering(instance_type, zone)),
                (Class::NoSpotRole, _, _) => {
                    mark(CapacityScope::CapacityType(CapacityType::Spot));
                    out.no_spot_role = true;
                }
                _ => {}
            }
        }
        out
    }

    /// The offerings that are unavailable everywhere: without those of a placement group, capacity types and subnets.
    pub fn offerings(&self) -> Vec<Override> {
        let one = |subject: &CapacityScope| match subject {
            CapacityScope::Offering(offering, None) => Some(offering.clone()),
            CapacityScope::Offering(_, Some(_)) | CapacityScope::CapacityType(_) | CapacityScope::Subnet(_) => None,
        };
        self.marks.iter().filter_map(one).collect()
    }
}

fn is_capacity(error: &FleetError) -> bool {
    matches!(class_of(&error.code), Class::Unfulfillable | Class::NoSpotRole)
}

/// The error of the claims for which a request launched no instance.
pub fn failure(errors: &[FleetError], feedback: &CapacityFeedback) -> LaunchError {
    if errors.iter().all(is_capacity) {
        if feedback.no_spot_role {
            return LaunchError::NoSpotRole;
        }
        return LaunchError::InsufficientCapacity { unavailable: feedback.offerings() };
    }
    let texts: BTreeSet<String> = errors.iter().map(|error| format!("{}: {}", error.code, error.message)).collect();
    let message = texts.into_iter().collect::<Vec<_>>().join("; ");
    LaunchError::Rejected { event: errors::launch_event(&message), message }
}

#[cfg(test)]
mod tests;
