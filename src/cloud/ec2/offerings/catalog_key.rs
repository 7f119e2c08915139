//! The cache key of a catalog: everything of a node class that decides which offerings its nodes can use.

use std::collections::{BTreeMap, BTreeSet};

use stowage_api::Ec2NodeClass;
use stowage_model::labels;

use crate::catalog::{NodeSettings, RawInstanceType, architecture};
use crate::ec2::placement_group::PlacementGroup;

/// Windows builds by AMI family.
const WINDOWS_BUILDS: [(&str, &str); 3] =
    [("Windows2019", "10.0.17763"), ("Windows2022", "10.0.20348"), ("Windows2025", "10.0.26100")];
/// An upper bound of a placement group's partitions: EC2 allows fewer.
const MAX_PARTITIONS: i32 = 32;

/// A capacity reservation of a class.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Reservation {
    /// Such as `cr-0123456789abcdef0`.
    pub id: String,
    pub instance_type: String,
    /// Zone name.
    pub zone: String,
    /// `default` or `capacity-block`.
    pub kind: String,
    /// Whether its owner can reclaim instances.
    pub interruptible: bool,
    /// Whether it is a capacity block that is about to end: nothing is launched into it.
    pub expiring: bool,
}

/// A network interface that the class requires of every node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct NetworkInterface {
    card: i32,
    device: i32,
    efa_only: bool,
}

/// Everything of a node class that its catalog depends on. Classes with equal keys share a catalog.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CatalogKey {
    pub settings: NodeSettings,
    /// Zone ids, where known, by zone of the class's subnets.
    pub zones: BTreeMap<String, Option<String>>,
    /// Ids of its subnets by zone.
    pub subnets: BTreeMap<String, BTreeSet<String>>,
    pub reservations: Vec<Reservation>,
    pub placement_group: Option<PlacementGroup>,
    ami_family: String,
    interfaces: Vec<NetworkInterface>,
    nested_virtualization: bool,
    connection_tracking: bool,
    enclaves: bool,
}

impl CatalogKey {
    /// The key of a class. `placement_group` is the resolved group; `with_reservations` is the feature gate ReservedCapacity.
    pub fn of(class: &Ec2NodeClass, placement_group: Option<PlacementGroup>, with_reservations: bool) -> Self {
        let status = class.status.clone().unwrap_or_default();
        let spec = &class.spec;
        let reservations = status.capacity_reservations.into_iter().filter(|_| with_reservations);
        let mut subnets: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for subnet in &status.subnets {
            subnets.entry(subnet.zone.clone()).or_default().insert(subnet.id.clone());
        }
        Self {
            settings: NodeSettings::of(Some(class)),
            zones: status.subnets.into_iter().map(|subnet| (subnet.zone, subnet.zone_id)).collect(),
            subnets,
            reservations: reservations
                .map(|found| Reservation {
                    id: found.id,
                    instance_type: found.instance_type,
                    zone: found.availability_zone,
                    kind: found.reservation_type,
                    interruptible: found.interruptible.unwrap_or(false),
                    expiring: found.state == "expiring",
                })
                .collect(),
            placement_group,
            ami_family: spec.effective_ami_family().to_owned(),
            interfaces: spec
                .network_interfaces
                .iter()
                .flatten()
                .map(|interface| NetworkInterface {
                    card: interface.network_card_index,
                    device: interface.device_index,
                    efa_only: interface.interface_type == "efa-only",
                })
                .collect(),
            nested_virtualization: spec
                .cpu_options
                .as_ref()
                .is_some_and(|options| options.nested_virtualization.as_deref() == Some("enabled")),
            connection_tracking: spec.connection_tracking.is_some(),
            enclaves: spec.has_enclaves(),
        }
    }

    /// Whether nodes of the class can have an instance type (Karpenter's rules). A property that the catalog does not know is
    /// assumed to be supported, except nested virtualization, which few types support.
    pub fn admits(&self, entry: &RawInstanceType) -> bool {
        if self.windows_build().is_some() && architecture(entry) != Some("amd64") {
            return false;
        }
        if self.ami_family == "AL2023" && entry.name.starts_with("a1.") {
            return false;
        }
        if self.nested_virtualization && entry.nested_virtualization != Some(true) {
            return false;
        }
        if self.enclaves && entry.nitro_enclaves == Some(false) {
            return false;
        }
        if self.connection_tracking && entry.hypervisor != "nitro" {
            return false;
        }
        let supports_group = self.placement_group.as_ref().is_none_or(|group| {
            entry.placement_strategies.as_ref().is_none_or(|strategies| strategies.contains(&group.strategy))
        });
        supports_group && self.interfaces_fit(entry)
    }

    fn interfaces_fit(&self, entry: &RawInstanceType) -> bool {
        if self.interfaces.is_empty() {
            return true;
        }
        let one_card = [entry.default_card_enis.unwrap_or(entry.enis)];
        let cards = if entry.network_cards.is_empty() { &one_card[..] } else { &entry.network_cards };
        let fits = |interface: &NetworkInterface| {
            let card = usize::try_from(interface.card).ok().and_then(|index| cards.get(index));
            card.is_some_and(|slots| *slots > i64::from(interface.device))
        };
        let efa_only = self.interfaces.iter().filter(|interface| interface.efa_only).count();
        entry.ena_supported != Some(false)
            && self.interfaces.iter().all(fits)
            && i64::try_from(efa_only).is_ok_and(|count| count <= entry.efa)
    }

    /// The Windows build of the class's nodes; `None` for Linux.
    pub fn windows_build(&self) -> Option<&'static str> {
        WINDOWS_BUILDS.iter().find(|(family, _)| *family == self.ami_family).map(|(_, build)| *build)
    }

    /// Adds the labels that nodes of this class have to those of an instance type.
    pub fn apply_labels(&self, of_type: &mut BTreeMap<String, String>) {
        if let Some(build) = self.windows_build() {
            of_type.insert(labels::OS.to_owned(), "windows".to_owned());
            of_type.insert(labels::WINDOWS_BUILD.to_owned(), build.to_owned());
        }
        if let Some(group) = &self.placement_group {
            of_type.insert(labels::PLACEMENT_GROUP_ID.to_owned(), group.id.clone());
        }
    }

    /// The partitions of the placement group, numbered from 1; a single `None` where it has none.
    pub fn partitions(&self) -> Vec<Option<String>> {
        match &self.placement_group {
            Some(group) if group.strategy == "partition" && group.partitions > 0 => {
                (1..=group.partitions.min(MAX_PARTITIONS)).map(|partition| Some(partition.to_string())).collect()
            }
            _ => vec![None],
        }
    }
}

#[cfg(test)]
mod tests;
