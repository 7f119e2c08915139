//! AWS APIs that Stowage works without, and the events about their failures.

use stowage_model::events;
use stowage_model::events::DeclaredEvent;

/// An AWS API whose failure degrades a feature and stops nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum OptionalApi {
    /// Version, endpoint and CA of the cluster.
    ClusterFacts,
    /// Zones of instance types.
    InstanceTypeZones,
    InstanceTypes,
    OnDemandPrices,
    /// Spot placement scores.
    PlacementScores,
    SpotPrices,
    /// Status checks of instances.
    StatusChecks,
    /// Zonal shifts of Application Recovery Controller.
    ZonalShifts,
    /// Deletion of unused instance profiles.
    InstanceProfiles,
    /// Tags that instances get after registration.
    InstanceTags,
}

impl OptionalApi {
    /// The event about its failure.
    pub const fn failed(self) -> &'static DeclaredEvent {
        match self {
            Self::ClusterFacts => events::CLUSTER_FACTS_UNREADABLE,
            Self::InstanceTypeZones => events::INSTANCE_TYPE_ZONES_UNREADABLE,
            Self::InstanceTypes => events::INSTANCE_TYPES_UNREADABLE,
            Self::OnDemandPrices => events::ON_DEMAND_PRICES_UNREADABLE,
            Self::PlacementScores => events::PLACEMENT_SCORES_UNREADABLE,
            Self::SpotPrices => events::SPOT_PRICES_UNREADABLE,
            Self::StatusChecks => events::STATUS_CHECKS_UNREADABLE,
            Self::ZonalShifts => events::ZONAL_SHIFTS_UNREADABLE,
            Self::InstanceProfiles => events::INSTANCE_PROFILES_UNWRITABLE,
            Self::InstanceTags => events::INSTANCE_TAGS_UNWRITABLE,
        }
    }

    /// The event about its recovery.
    pub const fn recovered(self) -> &'static DeclaredEvent {
        match self {
            Self::ClusterFacts => events::CLUSTER_FACTS_READABLE,
            Self::InstanceTypeZones => events::INSTANCE_TYPE_ZONES_READABLE,
            Self::InstanceTypes => events::INSTANCE_TYPES_READABLE,
            Self::OnDemandPrices => events::ON_DEMAND_PRICES_READABLE,
            Self::PlacementScores => events::PLACEMENT_SCORES_READABLE,
            Self::SpotPrices => events::SPOT_PRICES_READABLE,
            Self::StatusChecks => events::STATUS_CHECKS_READABLE,
            Self::ZonalShifts => events::ZONAL_SHIFTS_READABLE,
            Self::InstanceProfiles => events::INSTANCE_PROFILES_WRITABLE,
            Self::InstanceTags => events::INSTANCE_TAGS_WRITABLE,
        }
    }

    /// The note of [`Self::recovered`].
    pub const fn recovery_note(self) -> &'static str {
        match self {
            Self::InstanceProfiles | Self::InstanceTags => "it can be written again",
            _ => "it can be read again",
        }
    }
}
