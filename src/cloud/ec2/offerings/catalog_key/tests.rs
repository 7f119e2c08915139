use serde_json::{Value, json};
use stowage_test_objects::node_class;

use super::*;
use crate::catalog::embedded;

fn key_of(spec: Value) -> CatalogKey {
    let mut whole = json!({"amiSelectorTerms": [{"alias": "al2023@latest"}]});
    json_patch::merge(&mut whole, &spec);
    CatalogKey::of(&node_class("c", &json!({"spec": whole})), None, true)
}

fn entry(name: &str) -> RawInstanceType {
    embedded().instance_type(name).unwrap().clone()
}

#[test]
fn a_class_admits_the_types_its_nodes_can_have() {
    let group = |strategy: &str| {
        let placement_group = PlacementGroup { id: "pg-1".into(), strategy: strategy.into(), partitions: 0 };
        CatalogKey { placement_group: Some(placement_group), ..key_of(json!({})) }
    };
    let nested = || key_of(json!({"cpuOptions": {"nestedVirtualization": "enabled"}}));
    let tracking = || key_of(json!({"connectionTracking": {"udpTimeout": 30}}));
    let enclaves = |enabled: bool| key_of(json!({"enclaveOptions": {"enabled": enabled}}));
    let windows = || key_of(json!({"amiSelectorTerms": [{"alias": "windows2022@latest"}]}));
    let bottlerocket = || key_of(json!({"amiSelectorTerms": [{"alias": "bottlerocket@latest"}]}));
    let with = |name: &str, change: fn(&mut RawInstanceType)| {
        let mut entry = entry(name);
        change(&mut entry);
        entry
    };
    for (case, class, entry, expected) in [
        ("plain", key_of(json!({})), entry("m5.large"), true),
        ("AL2023 on a1", key_of(json!({})), entry("a1.large"), false),
        ("Bottlerocket on a1", bottlerocket(), entry("a1.large"), true),
        ("Windows on amd64", windows(), entry("m5.large"), true),
        ("Windows on arm64", windows(), entry("m7g.large"), false),
        ("nested, unknown", nested(), entry("m5.large"), false),
        ("nested, none", nested(), with("m5.large", |entry| entry.nested_virtualization = Some(false)), false),
        ("nested", nested(), with("m5.large", |entry| entry.nested_virtualization = Some(true)), true),
        ("tracking on nitro", tracking(), entry("m5.large"), true),
        ("tracking on xen", tracking(), entry("m4.large"), false),
        ("tracking on metal", tracking(), entry("m5.metal"), false),
        ("enclaves", enclaves(true), with("m5.xlarge", |entry| entry.nitro_enclaves = Some(true)), true),
        ("enclaves, none", enclaves(true), with("m5.large", |entry| entry.nitro_enclaves = Some(false)), false),
        ("enclaves off", enclaves(false), with("m5.large", |entry| entry.nitro_enclaves = Some(false)), true),
        ("group, unknown", group("cluster"), entry("m5.large"), true),
        ("group", group("spread"), with("m5.large", |e| e.placement_strategies = Some(vec!["spread".into()])), true),
        (
            "other group",
            group("cluster"),
            with("m5.large", |e| e.placement_strategies = Some(vec!["spread".into()])),
            false,
        ),
    ] {
        assert_eq!(class.admits(&entry), expected, "{case}");
    }
}

#[test]
fn every_network_interface_of_the_class_must_fit() {
    let class = |interfaces: &[(i32, i32, &str)]| {
        let interfaces: Vec<Value> = interfaces
            .iter()
            .map(|(card, device, kind)| json!({"networkCardIndex": card, "deviceIndex": device, "interfaceType": kind}))
            .collect();
        key_of(json!({"networkInterfaces": interfaces}))
    };
    let p5 = RawInstanceType { network_cards: vec![2; 32], efa: 32, ena_supported: Some(true), ..entry("m5.large") };
    for (interfaces, expected) in [
        (&[(0, 0, "interface"), (31, 1, "efa-only")][..], true),
        (&[(32, 0, "interface")], false),
        (&[(0, 2, "interface")], false),
        (&[(-1, 0, "interface")], false),
    ] {
        assert_eq!(class(interfaces).admits(&p5), expected, "{interfaces:?}");
    }
    let two = class(&[(0, 0, "interface"), (0, 1, "efa-only")]);
    assert!(two.admits(&p5));
    assert!(!two.admits(&RawInstanceType { efa: 0, ..p5.clone() }), "no room for the EFA");
    assert!(!two.admits(&RawInstanceType { ena_supported: Some(false), ..p5.clone() }));
    let only_sum = RawInstanceType { network_cards: Vec::new(), default_card_enis: Some(2), ..p5 };
    assert!(two.admits(&only_sum) && !class(&[(1, 0, "interface")]).admits(&only_sum));
}

#[test]
fn labels_of_the_class_are_added_to_its_types() {
    let mut labels = BTreeMap::from([("kubernetes.io/os".to_owned(), "linux".to_owned())]);
    key_of(json!({})).apply_labels(&mut labels);
    assert_eq!(labels.len(), 1);
    for (alias, build) in [("windows2019", "10.0.17763"), ("windows2022", "10.0.20348"), ("windows2025", "10.0.26100")]
    {
        let mut class = key_of(json!({"amiSelectorTerms": [{"alias": format!("{alias}@latest")}]}));
        class.placement_group = Some(PlacementGroup { id: "pg-1".into(), strategy: "partition".into(), partitions: 3 });
        class.apply_labels(&mut labels);
        let expected = [
            ("karpenter.k8s.aws/placement-group-id", "pg-1"),
            ("kubernetes.io/os", "windows"),
            ("node.kubernetes.io/windows-build", build),
        ];
        assert_eq!(labels.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect::<Vec<_>>(), expected);
        assert_eq!(class.partitions(), [Some("1".to_owned()), Some("2".to_owned()), Some("3".to_owned())]);
    }
    assert_eq!(key_of(json!({})).partitions(), [None]);
}

#[test]
fn subnets_and_reservations_are_read_from_the_status() {
    let class = json!({"spec": {"amiSelectorTerms": [{"id": "ami-1"}]},
        "status": {"subnets": [{"id": "subnet-1", "zone": "a", "zoneID": "use1-az1"}, {"id": "subnet-2", "zone": "b"}],
            "capacityReservations": [{"id": "cr-1", "availabilityZone": "a", "instanceMatchCriteria": "targeted", "ownerID": "1",
                "instanceType": "m5.large", "reservationType": "capacity-block", "state": "expiring"}]}});
    let class = node_class("c", &class);
    let key = CatalogKey::of(&class, None, true);
    assert_eq!(key.zones, [("a".to_owned(), Some("use1-az1".to_owned())), ("b".to_owned(), None)].into());
    assert_eq!(key.subnets["b"].iter().collect::<Vec<_>>(), ["subnet-2"]);
    let expected = Reservation {
        id: "cr-1".into(),
        instance_type: "m5.large".into(),
        zone: "a".into(),
        kind: "capacity-block".into(),
        interruptible: false,
        expiring: true,
    };
    assert_eq!(key.reservations, [expected]);
    assert_eq!(CatalogKey::of(&class, None, false).reservations, [], "the gate is off");
}
