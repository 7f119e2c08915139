//! What a node class decides about the offerings its nodes may be: its part of the key that catalogs are kept under.

use std::collections::{BTreeMap, BTreeSet};

use crate::api::Ec2NodeClass;
use crate::cloud::catalog::{NodeSettings, RawInstanceType, architecture};
use crate::cloud::ec2::placement_group::PlacementGroup;
use crate::model::labels;

/// Builds by the AMI family that boots them.
const WINDOWS_BUILDS: [(&str, &str); 3] =
    [("Windows2019", "10.0.17763"), ("Windows2022", "10.0.20348"), ("Windows2025", "10.0.26100")];
/// More partitions than EC2 allows a placement group.
const MOST_PARTITIONS: i32 = 32;

/// A capacity reservation of a class.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Reservation {
    /// As `cr-0123456789abcdef0`.
    pub id: String,
    /// Instance type it holds.
    pub instance_type: String,
    /// Zone name.
    pub zone: String,
    /// `default` or `capacity-block`.
    pub kind: String,
    /// Whether its owner can take instances back.
    pub interruptible: bool,
    /// A capacity block that is about to end: nothing is launched into it any more.
    pub expiring: bool,
}

/// A network interface that every node must be able to have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Interface {
    card: i32,
    device: i32,
    efa_only: bool,
}

/// Everything of a node class that its catalog depends on. Classes with equal views share one.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClassView {
    /// Shape of the nodes.
    pub settings: NodeSettings,
    /// Zone ids, where known, by the zones of the class's subnets.
    pub zones: BTreeMap<String, Option<String>>,
    /// Ids of its subnets by zone: what is out of addresses is so for classes with the same.
    pub subnets: BTreeMap<String, BTreeSet<String>>,
    /// Its capacity reservations.
    pub reservations: Vec<Reservation>,
    /// Its placement group.
    pub placement_group: Option<PlacementGroup>,
    ami_family: String,
    interfaces: Vec<Interface>,
    nested_virtualization: bool,
    connection_tracking: bool,
}

impl ClassView {
    /// Reads a class. `placement_group` is what its selector resolves to; `with_reservations` says whether reserved capacity
    /// is used at all (the gate ReservedCapacity).
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
                .map(|interface| Interface {
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
        }
    }

    /// Whether nodes of the class can be of an instance type (Karpenter's list). What the catalog does not know of a type
    /// counts for it, but for nested virtualization, which few types have.
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
        if self.connection_tracking && entry.hypervisor != "nitro" {
            return false;
        }
        let placed = self.placement_group.as_ref().is_none_or(|group| {
            entry.placement_strategies.as_ref().is_none_or(|known| known.contains(&group.strategy))
        });
        placed && self.interfaces_fit(entry)
    }

    fn interfaces_fit(&self, entry: &RawInstanceType) -> bool {
        if self.interfaces.is_empty() {
            return true;
        }
        let one_card = [entry.default_card_enis.unwrap_or(entry.enis)];
        let cards = if entry.network_cards.is_empty() { &one_card[..] } else { &entry.network_cards };
        let fits = |interface: &Interface| {
            let card = usize::try_from(interface.card).ok().and_then(|index| cards.get(index));
            card.is_some_and(|most| *most > i64::from(interface.device))
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

    /// Makes the labels of an instance type those of a node of this class.
    pub fn put_labels(&self, of_type: &mut BTreeMap<String, String>) {
        if let Some(build) = self.windows_build() {
            of_type.insert(labels::OS.to_owned(), "windows".to_owned());
            of_type.insert(labels::WINDOWS_BUILD.to_owned(), build.to_owned());
        }
        if let Some(group) = &self.placement_group {
            of_type.insert(labels::PLACEMENT_GROUP_ID.to_owned(), group.id.clone());
        }
    }

    /// Partitions to choose from, from 1; one nameless one where there are none.
    pub fn partitions(&self) -> Vec<Option<String>> {
        match &self.placement_group {
            Some(group) if group.strategy == "partition" && group.partitions > 0 => {
                (1..=group.partitions.min(MOST_PARTITIONS)).map(|partition| Some(partition.to_string())).collect()
            }
            _ => vec![None],
        }
    }
}

#[cfg(test)]
mod tests;
