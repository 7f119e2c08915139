//! Subnets that a node class selects, and the choice of a zone's subnet for the next launch by free addresses.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use aws_sdk_ec2::types::Filter;
use stowage_api::node_class::{SubnetSelectorTerm, SubnetStatus};

use crate::ec2::aws::client::AwsClients;
use crate::ec2::aws::errors::ApiError;
use crate::ec2::aws::filters::{filter, tag_filters};

/// A subnet as EC2 describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Subnet {
    pub id: String,
    /// Zone name.
    pub zone: String,
    pub zone_id: Option<String>,
    /// Free IPv4 addresses.
    pub free: i64,
}

impl Subnet {
    /// Reads EC2's description; `None` where it lacks an id or a zone.
    pub fn read(subnet: &aws_sdk_ec2::types::Subnet) -> Option<Self> {
        Some(Self {
            id: subnet.subnet_id()?.to_owned(),
            zone: subnet.availability_zone()?.to_owned(),
            zone_id: subnet.availability_zone_id().map(str::to_owned),
            free: i64::from(subnet.available_ip_address_count().unwrap_or(0)),
        })
    }
}

/// The calls for selector terms: one for all ids, one for each term with tags.
pub fn queries(terms: &[SubnetSelectorTerm]) -> Vec<Vec<Filter>> {
    let ids: Vec<&String> = terms.iter().filter_map(|term| term.id.as_ref()).collect();
    let mut out = Vec::new();
    if !ids.is_empty() {
        out.push(vec![filter("subnet-id", ids)]);
    }
    out.extend(terms.iter().filter(|term| term.id.is_none()).map(|term| tag_filters(&term.tags)));
    out
}

/// The status list: each subnet once, most free addresses first, then by id.
pub fn status(mut found: Vec<Subnet>) -> Vec<SubnetStatus> {
    found.sort_by(|a, b| b.free.cmp(&a.free).then_with(|| a.id.cmp(&b.id)));
    let mut seen = BTreeSet::new();
    found.retain(|subnet| seen.insert(subnet.id.clone()));
    found.into_iter().map(|subnet| SubnetStatus { id: subnet.id, zone: subnet.zone, zone_id: subnet.zone_id }).collect()
}

/// Describes the subnets that some terms select.
///
/// # Errors
/// A call fails.
pub async fn find(clients: &AwsClients, terms: &[SubnetSelectorTerm]) -> Result<Vec<Subnet>, ApiError> {
    let mut found = Vec::new();
    for filters in queries(terms) {
        let call = clients.ec2.describe_subnets().set_filters(Some(filters)).max_results(500);
        let mut pages = call.into_paginator().send();
        while let Some(page) = pages.next().await {
            let page = page.map_err(ApiError::of("ec2:DescribeSubnets"))?;
            found.extend(page.subnets().iter().filter_map(Subnet::read));
        }
    }
    Ok(found)
}

/// Free addresses by subnet: the number EC2 last reported, less those that pending launches will use.
#[derive(Clone, Debug, Default)]
pub struct FreeAddresses {
    by_subnet: HashMap<String, SubnetAddresses>,
}

#[derive(Clone, Debug, Default)]
struct SubnetAddresses {
    described: i64,
    /// The number left with pending launches subtracted; `None` where there is none since the last description or exhaustion.
    left: Option<i64>,
    /// Incremented with every description, so that a launch releases only addresses of the description it reserved from.
    version: u64,
}

/// Addresses that a launch reserves in a subnet, and the version of the description it reserves from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AddressReservation {
    subnet: String,
    per_instance: i64,
    instances: i64,
    version: u64,
}

/// The subnets of a launch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SubnetChoice {
    /// Subnet id by zone name.
    pub by_zone: BTreeMap<String, String>,
    /// Number of instances that the launch may request.
    pub instances: i64,
    pub reservations: Vec<AddressReservation>,
}

/// Zones whose subnet fits fewer than this fraction of the instances that another zone fits are not used: each launch would be small.
const MIN_FRACTION: i64 = 16;

impl FreeAddresses {
    /// Applies the numbers that EC2 reported.
    pub fn set_described(&mut self, subnets: &[Subnet]) {
        for subnet in subnets {
            let free = self.by_subnet.entry(subnet.id.clone()).or_default();
            *free = SubnetAddresses { described: subnet.free, left: None, version: free.version + 1 };
        }
    }

    /// Records that EC2 found no free address in a subnet.
    pub fn record_exhausted(&mut self, subnet: &str) {
        let free = self.by_subnet.entry(subnet.to_owned()).or_default();
        *free = SubnetAddresses { described: 0, left: None, version: free.version + 1 };
    }

    fn left(&self, subnet: &str) -> i64 {
        self.by_subnet.get(subnet).map_or(0, |free| free.left.unwrap_or(free.described))
    }

    /// For each zone of a launch the subnet with most free addresses; of equal ones the earlier. `per_instance` is the number of
    /// addresses that the smallest node of each zone may use: they are reserved for each instance of the launch until
    /// [`FreeAddresses::release`].
    ///
    /// A launch can use one subnet of each zone, and EC2 may launch all instances in one zone. Their number is therefore limited
    /// to what the subnet of each zone fits while another subnet of the zone has room, so that further launches use that one.
    pub fn reserve(
        &mut self,
        subnets: &[SubnetStatus],
        per_instance: &BTreeMap<String, i64>,
        instances: i64,
    ) -> SubnetChoice {
        let mut chosen: BTreeMap<String, String> = BTreeMap::new();
        let mut best: BTreeMap<&str, i64> = BTreeMap::new();
        for subnet in subnets.iter().filter(|subnet| per_instance.contains_key(&subnet.zone)) {
            let left = self.left(&subnet.id);
            if best.get(&*subnet.zone).is_none_or(|most| left > *most) {
                best.insert(&subnet.zone, left);
                chosen.insert(subnet.zone.clone(), subnet.id.clone());
            }
        }
        let per_instance_in = |zone: &String| per_instance.get(zone).copied().unwrap_or(0).max(1);
        let fits = |zone: &String, subnet: &str| (self.left(subnet) / per_instance_in(zone)).min(instances);
        let largest = chosen.iter().map(|(zone, subnet)| fits(zone, subnet)).max().unwrap_or(0);
        // The limit of a zone, where another of its subnets has room.
        let limit = |zone: &String, subnet: &str| {
            let mut siblings = subnets.iter().filter(|other| other.zone == *zone && other.id != *subnet);
            let has_room = siblings.any(|sibling| self.left(&sibling.id) >= per_instance_in(zone));
            has_room.then(|| fits(zone, subnet))
        };
        chosen.retain(|zone, subnet| limit(zone, subnet).is_none_or(|fits| fits * MIN_FRACTION >= largest));
        let instances = chosen.iter().filter_map(|(zone, subnet)| limit(zone, subnet)).min().unwrap_or(instances);
        let reservations = chosen
            .iter()
            .map(|(zone, subnet)| {
                let per_instance = per_instance.get(zone).copied().unwrap_or(0);
                let left = self.left(subnet);
                let free = self.by_subnet.entry(subnet.clone()).or_default();
                free.left = Some(left - per_instance * instances);
                AddressReservation { subnet: subnet.clone(), per_instance, instances, version: free.version }
            })
            .collect();
        SubnetChoice { by_zone: chosen, instances, reservations }
    }

    /// Releases the reserved addresses that a launch did not use. `used` are the subnets of its instances.
    pub fn release(&mut self, reservations: &[AddressReservation], used: &[&str]) {
        for reservation in reservations {
            let launched: i64 = used.iter().map(|subnet| i64::from(*subnet == reservation.subnet)).sum();
            if let Some(free) = self.by_subnet.get_mut(&reservation.subnet)
                && free.version == reservation.version
                && let Some(left) = &mut free.left
            {
                *left += reservation.per_instance * (reservation.instances - launched).max(0);
            }
        }
    }
}

#[cfg(test)]
mod tests;
