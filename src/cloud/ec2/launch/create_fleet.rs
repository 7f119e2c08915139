//! CreateFleet: the request for the instances of a launch group, and what its answer means.

use std::collections::{BTreeMap, BTreeSet};

use aws_sdk_ec2::operation::create_fleet::CreateFleetOutput;
use aws_sdk_ec2::operation::create_fleet::builders::CreateFleetInputBuilder;
use aws_sdk_ec2::types::{
    DefaultTargetCapacityType, FleetLaunchTemplateConfigRequest, FleetLaunchTemplateOverridesRequest,
    FleetLaunchTemplateSpecificationRequest, FleetOnDemandAllocationStrategy, FleetReservationType, FleetType,
    OnDemandOptionsRequest, ReservedCapacityOptionsRequest, ResourceType, SpotAllocationStrategy, SpotOptionsRequest,
    TargetCapacitySpecificationRequest,
};

use crate::cloud::ec2::aws::errors;
use crate::cloud::ec2::aws::errors::{Class, class_of};
use crate::cloud::ec2::offerings::unavailable::CapacityScope;
use crate::cloud::ec2::tags::{CLAIM_TAG, LAUNCH_TAG, tag_specification};
use crate::cloud::launch_group::LaunchGroup;
use crate::cloud::reservation::ReservationKind;
use crate::cloud::{LaunchError, Override, ReservedIn};
use crate::model::offering::CapacityType;
use crate::model::units::MicroUsd;

/// An offering in the request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slot {
    /// Instance type.
    pub instance_type: String,
    /// Zone name.
    pub zone: String,
    /// Subnet.
    pub subnet: String,
    /// Image.
    pub image: String,
    /// Price, which is the priority where prices were overlaid.
    pub price: MicroUsd,
}

/// A request for instances that are alike.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FleetRequest {
    /// Idempotency token.
    pub token: String,
    /// How many instances.
    pub count: i32,
    /// EC2's opaque context, where the class has one.
    pub context: Option<String>,
    /// Capacity type of all slots.
    pub capacity_type: CapacityType,
    /// The capacity reservation that all slots are in.
    pub reservation: Option<ReservedIn>,
    /// Whether EC2 should follow our prices instead of its own.
    pub prioritized: bool,
    /// Slots by launch template.
    pub templates: Vec<(String, Vec<Slot>)>,
    /// Tags of fleet, volumes and instances.
    pub tags: BTreeMap<String, String>,
    /// Tags of the instances besides.
    pub instance_tags: BTreeMap<String, String>,
}

impl FleetRequest {
    /// Makes it a request for `count` claims of a launch group. Whose each instance is can't be told beforehand, so that those of
    /// several claims are tagged with their group alone until they are nodes.
    pub fn for_group(&mut self, group: &LaunchGroup, count: i32) {
        self.count = count;
        self.instance_tags.insert(LAUNCH_TAG.to_owned(), group.id.clone());
        if group.size > 1 {
            self.instance_tags.remove(CLAIM_TAG);
        }
    }

    /// The request as EC2 takes it.
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
            .set_launch_template_configs(Some(self.templates.iter().map(|(name, slots)| config(name, slots)).collect()))
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

    /// What EC2 calls the capacity: instances in an On-Demand Capacity Reservation are on-demand to it.
    fn target(&self) -> DefaultTargetCapacityType {
        match (self.capacity_type, self.reservation.as_ref().map(|reservation| reservation.kind)) {
            (CapacityType::Spot, _) => DefaultTargetCapacityType::Spot,
            (_, Some(ReservationKind::CapacityBlock)) => DefaultTargetCapacityType::CapacityBlock,
            (_, Some(ReservationKind::Interruptible)) => DefaultTargetCapacityType::ReservedCapacity,
            (_, Some(ReservationKind::OnDemand) | None) => DefaultTargetCapacityType::OnDemand,
        }
    }
}

fn config(template: &str, slots: &[Slot]) -> FleetLaunchTemplateConfigRequest {
    let one = |slot: &Slot| {
        FleetLaunchTemplateOverridesRequest::builder()
            .instance_type(slot.instance_type.as_str().into())
            .subnet_id(&slot.subnet)
            .image_id(&slot.image)
            .availability_zone(&slot.zone)
            .priority(slot.price.usd())
            .build()
    };
    let specification =
        FleetLaunchTemplateSpecificationRequest::builder().launch_template_name(template).version("$Latest").build();
    FleetLaunchTemplateConfigRequest::builder()
        .launch_template_specification(specification)
        .set_overrides(Some(slots.iter().map(one).collect()))
        .build()
}

/// An instance that a fleet launched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LaunchedInstance {
    /// Instance id.
    pub id: String,
    /// Instance type.
    pub instance_type: String,
    /// Zone name.
    pub zone: String,
    /// Subnet.
    pub subnet: Option<String>,
    /// Image.
    pub image: String,
}

/// Why a fleet could not use a slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FleetError {
    /// Error code.
    pub code: String,
    /// What EC2 says.
    pub message: String,
    /// Instance type, where the error is about one.
    pub instance_type: Option<String>,
    /// Zone, where the error is about one.
    pub zone: Option<String>,
    /// Subnet, where the error is about one.
    pub subnet: Option<String>,
}

/// What EC2 answered.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FleetAnswer {
    /// Instances; as many as were asked for or fewer, unless EC2 does what it was not asked for.
    pub born: Vec<LaunchedInstance>,
    /// Slots that did not work, also when another one did.
    pub errors: Vec<FleetError>,
}

impl FleetAnswer {
    /// Reads EC2's answer. Where it leaves the zone or the image out they are those of the request.
    pub fn read(answer: &CreateFleetOutput, request: &FleetRequest) -> Self {
        let slots = || request.templates.iter().flat_map(|(_, slots)| slots);
        let mut born = Vec::new();
        for launched in answer.instances() {
            let overrides = launched.launch_template_and_overrides().and_then(|used| used.overrides());
            let subnet = overrides.and_then(|used| used.subnet_id()).or(launched.subnet_id());
            let instance_type = launched
                .instance_type()
                .or(overrides.and_then(|used| used.instance_type()))
                .map(|kind| kind.as_str().to_owned())
                .unwrap_or_default();
            let slot = slots()
                .find(|slot| slot.instance_type == instance_type && subnet.is_none_or(|subnet| subnet == slot.subnet));
            let zone = overrides.and_then(|used| used.availability_zone()).or(launched.availability_zone());
            let zone = zone.map(str::to_owned).or_else(|| slot.map(|slot| slot.zone.clone())).unwrap_or_default();
            let image = overrides.and_then(|used| used.image_id()).map(str::to_owned);
            let image = image.or_else(|| slot.map(|slot| slot.image.clone())).unwrap_or_default();
            for id in launched.instance_ids() {
                born.push(LaunchedInstance {
                    id: id.clone(),
                    instance_type: instance_type.clone(),
                    zone: zone.clone(),
                    subnet: subnet.map(str::to_owned),
                    image: image.clone(),
                });
            }
        }
        let errors = answer.errors().iter().map(|error| {
            let overrides = error.launch_template_and_overrides().and_then(|used| used.overrides());
            let subnet = overrides.and_then(|used| used.subnet_id()).map(str::to_owned);
            let zone = overrides
                .and_then(|used| used.availability_zone())
                .map(str::to_owned)
                .or_else(|| slots().find(|slot| Some(&slot.subnet) == subnet.as_ref()).map(|slot| slot.zone.clone()));
            FleetError {
                code: error.error_code().unwrap_or_default().to_owned(),
                message: error.error_message().unwrap_or_default().to_owned(),
                instance_type: overrides.and_then(|used| used.instance_type()).map(|kind| kind.as_str().to_owned()),
                zone,
                subnet,
            }
        });
        Self { born, errors: errors.collect() }
    }

    /// Whether nothing was launched because a launch template isn't there any more.
    pub fn lacks_template(&self) -> bool {
        self.born.is_empty() && self.errors.iter().any(|error| class_of(&error.code) == Class::LaunchTemplateGone)
    }
}

/// What a fleet's errors teach.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CapacityFeedback {
    /// What not to try for a while.
    pub marks: Vec<CapacityScope>,
    /// Subnets without free addresses.
    pub exhausted: BTreeSet<String>,
    /// The account may not make the role that spot needs.
    pub no_spot_role: bool,
    /// The capacity reservation of the request has no room. Its count says so, not a mark on the offering: other reservations
    /// of that type and zone may have.
    pub reservation_full: bool,
}

impl CapacityFeedback {
    /// Learns from errors of a request in a placement group or a partition of one ([`placement_scope`](crate::cloud::ec2::offerings::unavailable::placement_scope)), or in
    /// none.
    pub fn of(errors: &[FleetError], request: &FleetRequest, group: Option<&str>) -> Self {
        let mut out = Self::default();
        let mut mark = |subject: CapacityScope| {
            if !out.marks.contains(&subject) {
                out.marks.push(subject);
            }
        };
        let offering = |instance_type: &str, zone: &str| {
            let (instance_type, zone) = (instance_type.to_owned(), zone.to_owned());
            let offering = Override { instance_type, zone, capacity_type: request.capacity_type };
            CapacityScope::Offering(offering, group.map(str::to_owned))
        };
        for error in errors {
            if error.code == "InsufficientFreeAddressesInSubnet"
                && let Some(subnet) = &error.subnet
            {
                mark(CapacityScope::Subnet(subnet.clone()));
                out.exhausted.insert(subnet.clone());
            }
            let spread = group.is_some() && error.message.contains("limit of instances in this spread placement group");
            if request.reservation.is_some() {
                // A full spread group too (Karpenter leaves the count alone): or the next plan would come to the same.
                out.reservation_full |= spread || class_of(&error.code) == Class::Unfulfillable;
                continue;
            }
            match (class_of(&error.code), &error.instance_type, &error.zone) {
                (_, _, Some(zone)) if spread => {
                    let slots = request.templates.iter().flat_map(|(_, slots)| slots);
                    for slot in slots.filter(|slot| slot.zone == *zone) {
                        mark(offering(&slot.instance_type, zone));
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

    /// The single offerings among what is marked.
    pub fn offerings(&self) -> Vec<Override> {
        let one = |subject: &CapacityScope| match subject {
            CapacityScope::Offering(offering, _) => Some(offering.clone()),
            CapacityScope::CapacityType(_) | CapacityScope::Subnet(_) => None,
        };
        self.marks.iter().filter_map(one).collect()
    }
}

/// Why nothing was launched.
pub fn failure(errors: &[FleetError], lessons: &CapacityFeedback) -> LaunchError {
    let passing = |error: &FleetError| matches!(class_of(&error.code), Class::Unfulfillable | Class::NoSpotRole);
    if !errors.is_empty() && errors.iter().all(passing) {
        if lessons.no_spot_role {
            return LaunchError::NoSpotRole;
        }
        return LaunchError::InsufficientCapacity { unavailable: lessons.offerings() };
    }
    let texts: BTreeSet<String> = errors.iter().map(|error| format!("{}: {}", error.code, error.message)).collect();
    let message = texts.into_iter().collect::<Vec<_>>().join("; ");
    if message.is_empty() {
        let message = "EC2 launched fewer instances than it was asked for and did not say why".to_owned();
        return LaunchError::Rejected { reason: "LaunchFailed", message };
    }
    LaunchError::Rejected { reason: errors::reason(&message), message }
}

#[cfg(test)]
mod tests;
