//! The catalog: instance types, their offerings and prices.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use crate::labels;
use crate::requirement::Requirements;
use crate::resources::Resources;
use crate::units::MicroUsd;

/// The purchase option of capacity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CapacityType {
    /// A capacity reservation.
    Reserved,
    /// Spot.
    Spot,
    /// On-demand.
    OnDemand,
}

impl CapacityType {
    /// The value of `karpenter.sh/capacity-type`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Reserved => "reserved",
            Self::Spot => "spot",
            Self::OnDemand => "on-demand",
        }
    }

    /// Parses the value of `karpenter.sh/capacity-type`.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        match text {
            "reserved" => Some(Self::Reserved),
            "spot" => Some(Self::Spot),
            "on-demand" => Some(Self::OnDemand),
            _ => None,
        }
    }
}

impl fmt::Display for CapacityType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// An instance type in one zone with one capacity type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offering {
    /// Zone name.
    pub zone: Arc<str>,
    /// Capacity type.
    pub capacity_type: CapacityType,
    /// Price.
    pub price: MicroUsd,
    /// False while its capacity is known to be insufficient.
    pub available: bool,
    /// Instances left in a reservation; `None` is unlimited.
    pub left: Option<i64>,
    /// Labels of this offering alone, besides zone and capacity type: zone id, reservation, partition. Mostly shared
    /// between the offerings of a zone.
    pub labels: Arc<BTreeMap<String, String>>,
    /// Risk premium in thousandths of the price: part of the objective of a plan, never paid.
    pub risk_permille: i64,
}

impl Offering {
    /// The value of one of [`OFFERING_LABELS`].
    pub fn label(&self, key: &str) -> Option<&str> {
        match key {
            labels::ZONE => Some(&self.zone),
            labels::CAPACITY_TYPE => Some(self.capacity_type.as_str()),
            key => self.labels.get(key).map(String::as_str),
        }
    }

    /// The price with its risk premium, for the objective.
    pub fn price_at_risk(&self) -> MicroUsd {
        let thousandths = i128::from(self.price.0) * i128::from(1_000 + self.risk_permille.max(0));
        MicroUsd(i64::try_from(thousandths / 1_000).unwrap_or(i64::MAX))
    }
}

/// Labels whose values the offering decides, not the instance type.
pub const OFFERING_LABELS: [&str; 7] = [
    labels::ZONE,
    labels::CAPACITY_TYPE,
    labels::ZONE_ID,
    labels::CAPACITY_RESERVATION_ID,
    labels::CAPACITY_RESERVATION_TYPE,
    labels::CAPACITY_RESERVATION_INTERRUPTIBLE,
    labels::PLACEMENT_GROUP_PARTITION,
];

/// An instance type as a node of one node class.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InstanceType {
    /// Name, such as `m7g.large`.
    pub name: Arc<str>,
    /// Every label that is the same in each of its offerings (arch, os, instance-type, region, `karpenter.k8s.aws/*`).
    /// A well-known key that is absent here does not exist on the node.
    pub labels: BTreeMap<String, String>,
    /// Capacity that the node reports.
    pub capacity: Resources,
    /// Capacity less kube-reserved, system-reserved and the eviction threshold.
    pub allocatable: Resources,
    /// Attachment limits by CSI driver; a driver without an entry has no limit.
    pub volume_limits: BTreeMap<Arc<str>, i64>,
    /// Offerings, by zone then capacity type.
    pub offerings: Vec<Offering>,
}

impl InstanceType {
    /// Whether nodes of the type can satisfy requirements. Keys of offerings are ignored, and keys that only the requirements name are labels
    /// of the template.
    pub fn serves(&self, requirements: &Requirements) -> bool {
        requirements.iter().all(|(key, set)| match self.labels.get(&**key) {
            // Every type is available in both tenancies; the launch requests the required one.
            _ if **key == *labels::INSTANCE_TENANCY => set.accepts(Some("default")) || set.accepts(Some("dedicated")),
            Some(value) => set.accepts(Some(value)),
            None => {
                let elsewhere = OFFERING_LABELS.contains(&&**key) || **key == *labels::NODE_POOL;
                elsewhere || !labels::is_well_known(key) || set.accepts_absence()
            }
        })
    }

    /// The hourly price of an offering.
    pub fn price(&self, zone: &str, capacity_type: CapacityType) -> Option<MicroUsd> {
        let is_wanted = |offering: &&Offering| &*offering.zone == zone && offering.capacity_type == capacity_type;
        self.offerings.iter().find(is_wanted).map(|offering| offering.price)
    }
}

/// All instance types and offerings of one node class. Immutable and shared.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Catalog {
    /// Region.
    pub region: String,
    /// Instance types by name.
    pub instance_types: Vec<Arc<InstanceType>>,
}
