use stowage_api::node_class::BlockDevice;

use super::*;
use crate::ec2::tags::{launch_tags, restricted_tag};
use crate::test_support::fake_aws;

pub fn template() -> Template {
    Template {
        cluster: "c1".into(),
        region: "us-west-2".into(),
        class: "default".into(),
        image_id: "ami-std-x86".into(),
        user_data: "dXNlcg==".into(),
        instance_profile: "c1_42".into(),
        security_groups: vec!["sg-1".into(), "sg-2".into()],
        block_devices: vec![BlockDeviceMapping {
            device_name: Some("/dev/xvda".into()),
            ebs: Some(BlockDevice {
                encrypted: Some(true),
                volume_type: Some("gp3".into()),
                volume_size: Some("20Gi".into()),
                iops: Some(0),
                ..BlockDevice::default()
            }),
            root_volume: false,
        }],
        metadata: Some(MetadataOptions::default()),
        detailed_monitoring: false,
        nested_virtualization: None,
        enclave: false,
        tenancy: "default".into(),
        placement_group: None,
        partition: None,
        network_interfaces: vec![],
        efa: 0,
        public_ip: None,
        ip_prefixes: None,
        connection_tracking: None,
        ipv6: false,
        tags: launch_tags(&BTreeMap::new(), "c1", "default", "default").unwrap(),
        capacity_type: CapacityType::OnDemand,
        reservation: None,
        manages_reservations: true,
    }
}

#[test]
fn the_example_of_the_reference_is_rendered() {
    let data = template().data();
    assert_eq!(data.image_id(), Some("ami-std-x86"));
    assert_eq!(data.user_data(), Some("dXNlcg=="));
    assert_eq!(data.iam_instance_profile().unwrap().name(), Some("c1_42"));
    assert_eq!(data.monitoring().unwrap().enabled(), Some(false));
    assert_eq!(data.enclave_options().unwrap().enabled(), Some(false));
    let volume = &data.block_device_mappings()[0];
    assert_eq!(volume.device_name(), Some("/dev/xvda"));
    let ebs = volume.ebs().unwrap();
    assert_eq!(
        (ebs.encrypted(), ebs.volume_size(), ebs.iops(), ebs.delete_on_termination()),
        (Some(true), Some(20), None, None)
    );
    assert_eq!(ebs.volume_type().unwrap().as_str(), "gp3");
    let metadata = data.metadata_options().unwrap();
    assert_eq!(metadata.http_endpoint().unwrap().as_str(), "enabled");
    assert_eq!(metadata.http_protocol_ipv6().unwrap().as_str(), "disabled");
    assert_eq!(metadata.http_put_response_hop_limit(), Some(1));
    assert_eq!(metadata.http_tokens().unwrap().as_str(), "required");
    assert_eq!(metadata.instance_metadata_tags().unwrap().as_str(), "disabled");
    let [interface] = data.network_interfaces() else { panic!("one interface") };
    assert_eq!((interface.device_index(), interface.groups().len()), (Some(0), 2));
    assert_eq!((interface.associate_public_ip_address(), interface.network_card_index()), (None, None));
    assert_eq!(data.placement().unwrap().tenancy().unwrap().as_str(), "default");
    let reservation = data.capacity_reservation_specification().unwrap();
    assert_eq!(reservation.capacity_reservation_preference().unwrap().as_str(), "none");
    assert!(data.security_group_ids().is_empty() && data.instance_type().is_none() && data.cpu_options().is_none());
}

#[test]
fn instances_run_in_the_chosen_reservation_or_in_none() {
    for (kind, market) in [
        (ReservationKind::OnDemand, None),
        (ReservationKind::CapacityBlock, Some("capacity-block")),
        (ReservationKind::Interruptible, Some("interruptible-capacity-reservation")),
    ] {
        let data = Template {
            capacity_type: CapacityType::Reserved,
            reservation: Some(ReservedIn { id: "cr-1".into(), kind }),
            ..template()
        }
        .data();
        let reservation = data.capacity_reservation_specification().unwrap();
        assert_eq!(reservation.capacity_reservation_preference().unwrap().as_str(), "capacity-reservations-only");
        assert_eq!(reservation.capacity_reservation_target().unwrap().capacity_reservation_id(), Some("cr-1"));
        let options = data.instance_market_options();
        let requested = options.and_then(|options| options.market_type()).map(|market| market.as_str().to_owned());
        assert_eq!(requested.as_deref(), market);
    }
    let data = template().data();
    assert!(data.instance_market_options().is_none());
    assert!(data.capacity_reservation_specification().unwrap().capacity_reservation_target().is_none());
    let data = Template { manages_reservations: false, ..template() }.data();
    assert!(data.capacity_reservation_specification().is_none(), "the default of EC2");
}

#[test]
fn c07_sizes_are_rounded_up_to_whole_gibibytes() {
    for (size, expected) in
        [("50G", Some(47)), ("20Gi", Some(20)), ("1Ti", Some(1024)), ("1T", Some(932)), ("Ti", None)]
    {
        assert_eq!(gibibytes(size), expected, "{size}");
    }
}

#[test]
fn c18_any_difference_in_content_changes_the_name() {
    let base = template();
    let name = base.name();
    assert!(name.starts_with("karpenter.k8s.aws/"));
    assert_eq!(template().name(), name, "same content, same template");
    assert_eq!(
        name, "karpenter.k8s.aws/bf568fd8ff6e7f26e1f66504b4f580ba09cf40e321d987bed8b2bf4ebf6d81dc",
        "equal in every version of this program with the same format"
    );
    let mut names = std::collections::BTreeSet::from([name]);
    let changes: [fn(&mut Template); 10] = [
        |t| t.user_data = "b3RoZXI=".into(),
        |t| t.class = "twin".into(),
        |t| t.instance_profile = "other".into(),
        |t| t.security_groups.pop().map_or((), drop),
        |t| t.tags.insert("team".into(), "a".into()).map_or((), drop),
        |t| t.capacity_type = CapacityType::Spot,
        |t| t.image_id = "ami-2".into(),
        |t| t.tenancy = "dedicated".into(),
        |t| t.efa = 1,
        |t| t.reservation = Some(ReservedIn { id: "cr-1".into(), kind: ReservationKind::OnDemand }),
    ];
    for change in changes {
        let mut changed = base.clone();
        change(&mut changed);
        assert!(names.insert(changed.name()), "{changed:?}");
    }
}

/// The form of a CreateLaunchTemplate request with every option.
async fn form_of_every_option() -> String {
    let mut all = template();
    all.block_devices = serde_json::from_value(json!([{"deviceName": "/dev/xvda", "rootVolume": true, "ebs": {
        "deleteOnTermination": true, "encrypted": true, "iops": 3000, "kmsKeyID": "k", "snapshotID": "snap-1",
        "throughput": 125, "volumeInitializationRate": 100, "volumeSize": "20Gi", "volumeType": "gp3",
    }}]))
    .unwrap();
    all.metadata = Some(MetadataOptions::default());
    all.nested_virtualization = Some("enabled".into());
    (all.placement_group, all.partition) = (Some("pg-1".into()), Some(2));
    all.public_ip = Some(true);
    all.ip_prefixes = Some(1);
    all.connection_tracking = serde_json::from_value(json!({"tcpEstablishedTimeout": 60})).unwrap();
    all.capacity_type = CapacityType::Spot;
    all.reservation = Some(ReservedIn { id: "cr-1".into(), kind: ReservationKind::CapacityBlock });
    all.manages_reservations = true;
    let mut text = String::new();
    for (efa, ipv6) in [(0, false), (2, true)] {
        (all.efa, all.ipv6) = (efa, ipv6);
        let (clients, seen) = fake_aws::clients(Box::new(|_| None));
        let call = clients.ec2.create_launch_template().launch_template_data(all.data());
        call.launch_template_name("n").client_token("t").send().await.unwrap_err();
        let form: Vec<String> =
            seen.lock().unwrap()[0].form.iter().map(|(key, value)| format!("{key}={value}\n")).collect();
        text.extend(form);
    }
    text
}

#[tokio::test]
async fn a_change_of_the_request_increments_the_format_in_the_name() {
    let digest = Sha256::digest(form_of_every_option().await);
    let start: Vec<String> = digest.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
    let message =
        "templates of an earlier version of this program must not be used: increment FORMAT, then update this test";
    assert_eq!((FORMAT, start.concat().as_str()), (2, "252c28b1ba90cf3b"), "{message}");
}

#[test]
fn c19_tags_are_those_that_karpenters_policy_requires() {
    let own = BTreeMap::from([("Name".to_owned(), "mine".to_owned())]);
    let tags = launch_tags(&own, "c1", "default", "").unwrap();
    let expected = [
        ("Name", "mine"),
        ("eks:eks-cluster-name", "c1"),
        ("karpenter.k8s.aws/ec2nodeclass", "default"),
        ("karpenter.sh/nodepool", ""),
        ("kubernetes.io/cluster/c1", "owned"),
    ];
    assert_eq!(tags.iter().map(|(key, value)| (&**key, &**value)).collect::<Vec<_>>(), expected);
    for key in ["karpenter.sh/nodepool", "eks:eks-cluster-name", "kubernetes.io/cluster/other"] {
        let own = BTreeMap::from([(key.to_owned(), "x".to_owned())]);
        assert!(launch_tags(&own, "c1", "default", "p").unwrap_err().contains(key));
    }
    assert!(restricted_tag(&BTreeMap::from([("kubernetes.io/cluster/".to_owned(), "x".to_owned())])).is_none());
}

#[test]
fn c19_spot_requests_are_tagged_for_spot_only() {
    let kinds = |capacity_type| {
        let data = Template { capacity_type, ..template() }.data();
        data.tag_specifications()
            .iter()
            .map(|tags| {
                assert_eq!(tags.tags().len(), 4);
                tags.resource_type().unwrap().as_str().to_owned()
            })
            .collect::<Vec<_>>()
    };
    assert_eq!(kinds(CapacityType::OnDemand), ["network-interface"]);
    assert_eq!(kinds(CapacityType::Spot), ["network-interface", "spot-instances-request"]);
    assert_eq!(template().tags().resource_type().unwrap().as_str(), "launch-template");
}

#[test]
fn c27_an_ipv6_cluster_requests_a_primary_ipv6_address() {
    let data = Template { ipv6: true, ip_prefixes: Some(2), ..template() }.data();
    let interface = &data.network_interfaces()[0];
    assert_eq!((interface.primary_ipv6(), interface.ipv6_address_count()), (Some(true), Some(1)));
    assert_eq!((interface.ipv6_prefix_count(), interface.ipv4_prefix_count()), (Some(2), None));
    let data = Template { ip_prefixes: Some(2), ..template() }.data();
    let interface = &data.network_interfaces()[0];
    assert_eq!((interface.primary_ipv6(), interface.ipv4_prefix_count()), (None, Some(2)));
}

#[test]
fn c28_efa_has_one_interface_per_card_unless_the_class_lists_interfaces() {
    let tracking = Some(ConnectionTracking { udp_timeout: Some(45), ..ConnectionTracking::default() });
    let efa = Template { efa: 3, connection_tracking: tracking.clone(), public_ip: Some(true), ..template() };
    let data = efa.data();
    let indexes: Vec<_> = data
        .network_interfaces()
        .iter()
        .map(|one| {
            assert_eq!(one.interface_type(), Some("efa"));
            assert_eq!(one.connection_tracking_specification().unwrap().udp_timeout(), Some(45));
            (one.network_card_index(), one.device_index())
        })
        .collect();
    assert_eq!(indexes, [(Some(0), Some(0)), (Some(1), Some(1)), (Some(2), Some(1))]);

    let interface = |card, device, kind: &str| NetworkInterface {
        network_card_index: card,
        device_index: device,
        interface_type: kind.into(),
    };
    let list = vec![interface(0, 0, "interface"), interface(1, 1, "efa-only")];
    let data = Template { network_interfaces: list, ..efa }.data();
    let [first, second] = data.network_interfaces() else { panic!("two interfaces") };
    assert_eq!((first.interface_type(), first.associate_public_ip_address()), (Some("interface"), Some(true)));
    assert!(first.connection_tracking_specification().is_some());
    assert_eq!((second.interface_type(), second.groups().len()), (Some("efa-only"), 2));
    assert_eq!((second.associate_public_ip_address(), second.ipv4_prefix_count()), (None, None));
    assert!(second.connection_tracking_specification().is_none());
}

#[test]
fn placement_nested_virtualization_and_ipv6_metadata_are_rendered() {
    let data = Template {
        placement_group: Some("pg-1".into()),
        partition: Some(2),
        tenancy: "dedicated".into(),
        nested_virtualization: Some("enabled".into()),
        region: "us-iso-east-1".into(),
        block_devices: vec![],
        user_data: String::new(),
        ..template()
    }
    .data();
    let placement = data.placement().unwrap();
    assert_eq!((placement.group_id(), placement.partition_number()), (Some("pg-1"), Some(2)));
    assert_eq!(placement.tenancy().unwrap().as_str(), "dedicated");
    assert_eq!(data.cpu_options().unwrap().nested_virtualization().unwrap().as_str(), "enabled");
    assert!(data.metadata_options().unwrap().http_protocol_ipv6().is_none());
    assert!(data.block_device_mappings().is_empty() && data.user_data().is_none());
}
