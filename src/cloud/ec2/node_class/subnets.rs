//! Subnets that a node class selects, and the choice of a zone's subnet for the next launch by free addresses.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use aws_sdk_ec2::types::Filter;

use crate::api::node_class::{SubnetSelectorTerm, SubnetStatus};
use crate::cloud::ec2::aws::client::Clients;
use crate::cloud::ec2::aws::errors::ApiError;
use crate::cloud::ec2::aws::filters::{filter, tag_filters};

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
pub async fn find(clients: &Clients, terms: &[SubnetSelectorTerm]) -> Result<Vec<Subnet>, ApiError> {
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
    /// addresses that the smallest node of each zone may use: they are reserved for each of the `instances` until
    /// [`FreeAddresses::release`].
    pub fn reserve(
        &mut self,
        subnets: &[SubnetStatus],
        per_instance: &BTreeMap<String, i64>,
        instances: i64,
    ) -> (BTreeMap<String, String>, Vec<AddressReservation>) {
        let mut chosen: BTreeMap<String, String> = BTreeMap::new();
        let mut best: BTreeMap<&str, i64> = BTreeMap::new();
        for subnet in subnets.iter().filter(|subnet| per_instance.contains_key(&subnet.zone)) {
            let left = self.left(&subnet.id);
            if best.get(&*subnet.zone).is_none_or(|most| left > *most) {
                best.insert(&subnet.zone, left);
                chosen.insert(subnet.zone.clone(), subnet.id.clone());
            }
        }
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
        (chosen, reservations)
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
mod tests {
    use super::*;
    use crate::cloud::ec2::aws::filters::tests::text;
    use crate::test_support::fake_aws;

    fn subnet(id: &str, zone: &str, free: i64) -> Subnet {
        Subnet { id: id.into(), zone: zone.into(), zone_id: Some(format!("use1-{zone}")), free }
    }

    fn term(id: Option<&str>, tags: &[(&str, &str)]) -> SubnetSelectorTerm {
        let tags = tags.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        SubnetSelectorTerm { tags, id: id.map(str::to_owned) }
    }

    #[test]
    fn all_ids_share_one_call_and_each_term_with_tags_has_its_own() {
        let terms = [
            term(Some("subnet-1"), &[]),
            term(None, &[("a", "1"), ("b", "*")]),
            term(Some("subnet-2"), &[]),
            term(None, &[("c", "2")]),
        ];
        let calls: Vec<_> = queries(&terms).iter().map(|filters| text(filters)).collect();
        assert_eq!(calls, [vec!["subnet-id=subnet-1,subnet-2"], vec!["tag:a=1", "tag-key=b"], vec!["tag:c=2"]]);
        assert!(queries(&[]).is_empty());
    }

    #[test]
    fn the_status_lists_each_subnet_once_with_most_free_addresses_first() {
        let found = vec![subnet("s-3", "a", 5), subnet("s-2", "b", 9), subnet("s-1", "c", 5), subnet("s-3", "a", 5)];
        let ids: Vec<String> = status(found).into_iter().map(|subnet| subnet.id).collect();
        assert_eq!(ids, ["s-2", "s-1", "s-3"]);
    }

    fn addresses(subnets: &[Subnet]) -> (FreeAddresses, Vec<SubnetStatus>) {
        let mut addresses = FreeAddresses::default();
        addresses.set_described(subnets);
        (addresses, status(subnets.to_vec()))
    }

    fn zones(zones: &[&str], pods: i64) -> BTreeMap<String, i64> {
        zones.iter().map(|zone| ((*zone).to_owned(), pods)).collect()
    }

    #[test]
    fn c16_pending_launches_reserve_addresses_and_release_unused_ones() {
        let subnets = [subnet("s-1", "a", 100), subnet("s-2", "a", 90), subnet("s-3", "b", 50)];
        let (mut addresses, list) = addresses(&subnets);
        let (chosen, first) = addresses.reserve(&list, &zones(&["a", "b"], 20), 1);
        assert_eq!((&*chosen["a"], &*chosen["b"]), ("s-1", "s-3"));
        let (chosen, second) = addresses.reserve(&list, &zones(&["a"], 20), 1);
        assert_eq!(chosen["a"], "s-2", "the first launch reserves 20 of the other");
        addresses.release(&first, &["s-3"]);
        addresses.release(&second, &[]);
        assert_eq!((addresses.left("s-1"), addresses.left("s-2"), addresses.left("s-3")), (100, 90, 30));
        let (_, third) = addresses.reserve(&list, &zones(&["b"], 5), 1);
        addresses.set_described(&subnets);
        addresses.release(&third, &[]);
        assert_eq!(addresses.left("s-3"), 50, "a later description replaces the reservation");
    }

    #[test]
    fn each_instance_of_a_launch_reserves_its_own_addresses() {
        let (mut addresses, list) = addresses(&[subnet("s-1", "a", 100), subnet("s-2", "b", 100)]);
        let (_, taken) = addresses.reserve(&list, &zones(&["a", "b"], 10), 5);
        assert_eq!((addresses.left("s-1"), addresses.left("s-2")), (50, 50));
        addresses.release(&taken, &["s-1", "s-1", "s-1", "s-2"]);
        assert_eq!((addresses.left("s-1"), addresses.left("s-2")), (70, 90));
    }

    #[test]
    fn c15_after_exhaustion_the_next_launch_uses_another_subnet() {
        let (mut addresses, list) = addresses(&[subnet("s-1", "a", 100), subnet("s-2", "a", 90)]);
        addresses.record_exhausted("s-1");
        assert_eq!(addresses.reserve(&list, &zones(&["a"], 10), 1).0["a"], "s-2");
    }

    #[test]
    fn zones_without_offerings_get_no_subnet_and_ties_keep_the_order_of_the_status() {
        let (mut addresses, list) = addresses(&[subnet("s-1", "a", 10), subnet("s-2", "a", 10), subnet("s-3", "b", 1)]);
        let (chosen, _) = addresses.reserve(&list, &zones(&["a"], 1), 1);
        assert_eq!(chosen, BTreeMap::from([("a".to_owned(), "s-1".to_owned())]));
    }

    #[tokio::test]
    async fn all_pages_are_read() {
        let (clients, seen) = fake_aws::clients(Box::new(|request| {
            let item = |id: &str| {
                format!(
                    "<subnetSet><item><subnetId>{id}</subnetId><availabilityZone>us-east-1a</availabilityZone>\
                     <availabilityZoneId>use1-az1</availabilityZoneId><availableIpAddressCount>7</availableIpAddressCount></item></subnetSet>"
                )
            };
            match request.form.get("NextToken") {
                None => fake_aws::ok("DescribeSubnets", &format!("{}<nextToken>more</nextToken>", item("subnet-1"))),
                Some(_) => fake_aws::ok("DescribeSubnets", &item("subnet-2")),
            }
        }));
        let found = find(&clients, &[term(None, &[("k", "v")])]).await.unwrap();
        assert_eq!(found.len(), 2);
        assert_eq!(
            found[1],
            Subnet { id: "subnet-2".into(), zone: "us-east-1a".into(), zone_id: Some("use1-az1".into()), free: 7 }
        );
        let seen = seen.lock().unwrap();
        assert_eq!(seen[0].form["Filter.1.Name"], "tag:k");
        assert_eq!((&*seen[0].form["MaxResults"], seen.len()), ("500", 2));
    }
}
