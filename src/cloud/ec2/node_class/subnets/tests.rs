use super::*;
use crate::ec2::aws::filters::tests::text;
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
    let SubnetChoice { by_zone: chosen, reservations: first, .. } =
        addresses.reserve(&list, &zones(&["a", "b"], 20), 1);
    assert_eq!((&*chosen["a"], &*chosen["b"]), ("s-1", "s-3"));
    let SubnetChoice { by_zone: chosen, reservations: second, .. } = addresses.reserve(&list, &zones(&["a"], 20), 1);
    assert_eq!(chosen["a"], "s-2", "the first launch reserves 20 of the other");
    addresses.release(&first, &["s-3"]);
    addresses.release(&second, &[]);
    assert_eq!((addresses.left("s-1"), addresses.left("s-2"), addresses.left("s-3")), (100, 90, 30));
    let third = addresses.reserve(&list, &zones(&["b"], 5), 1).reservations;
    addresses.set_described(&subnets);
    addresses.release(&third, &[]);
    assert_eq!(addresses.left("s-3"), 50, "a later description replaces the reservation");
}

#[test]
fn each_instance_of_a_launch_reserves_its_own_addresses() {
    let (mut addresses, list) = addresses(&[subnet("s-1", "a", 100), subnet("s-2", "b", 100)]);
    let taken = addresses.reserve(&list, &zones(&["a", "b"], 10), 5).reservations;
    assert_eq!((addresses.left("s-1"), addresses.left("s-2")), (50, 50));
    addresses.release(&taken, &["s-1", "s-1", "s-1", "s-2"]);
    assert_eq!((addresses.left("s-1"), addresses.left("s-2")), (70, 90));
}

#[test]
fn a_launch_requests_no_more_nodes_than_a_subnet_fits_while_a_sibling_has_room() {
    let instances = |free: &[(&str, &str, i64)], zones: BTreeMap<String, i64>, instances| {
        let subnets: Vec<Subnet> = free.iter().map(|(id, zone, free)| subnet(id, zone, *free)).collect();
        let (mut addresses, list) = addresses(&subnets);
        let choice = addresses.reserve(&list, &zones, instances);
        (choice.instances, choice.by_zone.into_keys().collect::<Vec<_>>().concat())
    };
    let a = || zones(&["a"], 10);
    let both = || zones(&["a", "b"], 10);
    for (case, found, expected) in [
        ("fits", instances(&[("1", "a", 100), ("2", "a", 90)], a(), 10), (10, "a")),
        ("split", instances(&[("1", "a", 100), ("2", "a", 90)], a(), 11), (10, "a")),
        ("no sibling", instances(&[("1", "a", 100)], a(), 11), (11, "a")),
        ("no room in siblings", instances(&[("1", "a", 100), ("2", "a", 9)], a(), 11), (11, "a")),
        ("no room at all", instances(&[("1", "a", 5), ("2", "a", 4)], a(), 3), (3, "a")),
        ("least zone", instances(&[("1", "a", 100), ("2", "b", 70), ("3", "b", 60)], both(), 20), (7, "ab")),
        ("tiny zone", instances(&[("1", "a", 900), ("2", "b", 20), ("3", "b", 10)], both(), 50), (50, "a")),
        ("full zone", instances(&[("1", "a", 90), ("2", "a", 80), ("3", "b", 0)], both(), 50), (9, "ab")),
    ] {
        assert_eq!(found, (expected.0, expected.1.to_owned()), "{case}");
    }
}

#[test]
fn c15_after_exhaustion_the_next_launch_uses_another_subnet() {
    let (mut addresses, list) = addresses(&[subnet("s-1", "a", 100), subnet("s-2", "a", 90)]);
    addresses.record_exhausted("s-1");
    assert_eq!(addresses.reserve(&list, &zones(&["a"], 10), 1).by_zone["a"], "s-2");
}

#[test]
fn zones_without_offerings_get_no_subnet_and_ties_keep_the_order_of_the_status() {
    let (mut addresses, list) = addresses(&[subnet("s-1", "a", 10), subnet("s-2", "a", 10), subnet("s-3", "b", 1)]);
    let chosen = addresses.reserve(&list, &zones(&["a"], 1), 1).by_zone;
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
