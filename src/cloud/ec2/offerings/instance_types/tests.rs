use aws_sdk_ec2::types::{
    EbsInfo, GpuInfo, InferenceAcceleratorInfo, InstanceTypeHypervisor, NetworkCardInfo, NeuronInfo,
    PlacementGroupInfo, PlacementGroupStrategy, UsageClassType,
};
use stowage_model::units::Bytes;

use super::*;
use crate::catalog::{NodeSettings, SpotPricing, embedded};
use crate::test_support::fake_aws;

fn card(index: i32, enis: i32, gbps: Option<f64>) -> NetworkCardInfo {
    NetworkCardInfo::builder()
        .network_card_index(index)
        .maximum_network_interfaces(enis)
        .set_baseline_bandwidth_in_gbps(gbps)
        .build()
}

fn network() -> aws_sdk_ec2::types::builders::NetworkInfoBuilder {
    NetworkInfo::builder()
        .maximum_network_interfaces(3)
        .default_network_card_index(0)
        .network_cards(card(0, 3, Some(0.75)))
        .ipv4_addresses_per_interface(10)
        .ena_support(EnaSupport::Required)
        .encryption_in_transit_supported(false)
}

fn m5_large() -> aws_sdk_ec2::types::builders::InstanceTypeInfoBuilder {
    InstanceTypeInfo::builder()
        .instance_type("m5.large".into())
        .current_generation(false)
        .supported_usage_classes(UsageClassType::OnDemand)
        .supported_usage_classes(UsageClassType::Spot)
        .bare_metal(false)
        .hypervisor(InstanceTypeHypervisor::Nitro)
        .processor_info(
            ProcessorInfo::builder()
                .supported_architectures(ArchitectureType::X8664)
                .sustained_clock_speed_in_ghz(3.1)
                .manufacturer("Intel")
                .build(),
        )
        .v_cpu_info(VCpuInfo::builder().default_v_cpus(2).build())
        .memory_info(MemoryInfo::builder().size_in_mib(8192).build())
        .ebs_info(
            EbsInfo::builder()
                .ebs_optimized_support(EbsOptimizedSupport::Default)
                .ebs_optimized_info(EbsOptimizedInfo::builder().maximum_bandwidth_in_mbps(4750).build())
                .build(),
        )
        .network_info(network().build())
        .placement_group_info(
            PlacementGroupInfo::builder()
                .supported_strategies(PlacementGroupStrategy::Cluster)
                .supported_strategies(PlacementGroupStrategy::Spread)
                .build(),
        )
        .nitro_enclaves_support(NitroEnclavesSupport::Unsupported)
        .burstable_performance_supported(false)
}

fn read(info: &InstanceTypeInfo) -> RawInstanceType {
    raw_instance_type(info, embedded()).unwrap()
}

#[test]
fn a_description_becomes_the_entry_of_the_embedded_table() {
    let entry = read(&m5_large().build());
    let table = embedded().instance_type("m5.large").unwrap();
    let expected = RawInstanceType {
        // What the embedded table does not have, or other APIs report.
        cpu_manufacturer: Some("Intel".into()),
        default_card_enis: Some(3),
        network_cards: vec![3],
        encryption_in_transit: Some(false),
        nitro_enclaves: Some(false),
        nested_virtualization: Some(false),
        placement_strategies: Some(vec!["cluster".into(), "spread".into()]),
        on_demand: None,
        zones: Vec::new(),
        ..table.clone()
    };
    assert_eq!(entry, expected);
}

#[test]
fn a_description_gives_the_node_that_karpenter_computes() {
    let node = read(&m5_large().build()).as_node("us-east-1", &NodeSettings::default(), SpotPricing::Off);
    assert_eq!((node.allocatable.cpu.0, node.allocatable.pods), (1930, 29));
    assert_eq!(node.allocatable.memory, Bytes::from_mib(6903));
    for (key, value) in [
        ("instance-cpu-manufacturer", "intel"),
        ("instance-ebs-bandwidth", "4750"),
        ("instance-network-bandwidth", "750"),
        ("instance-encryption-in-transit-supported", "false"),
        ("nitro-sandbox", "false"),
        ("instance-hypervisor", "nitro"),
    ] {
        assert_eq!(node.labels[&format!("karpenter.k8s.aws/{key}")], value, "{key}");
    }
}

#[test]
fn every_member_is_read() {
    let gpu = GpuDeviceInfo::builder()
        .name("H100")
        .manufacturer("NVIDIA")
        .count(8)
        .memory_info(GpuDeviceMemoryInfo::builder().size_in_mib(81_920).build());
    let neuron = NeuronDeviceInfo::builder()
        .name("Trainium")
        .count(16)
        .core_info(NeuronDeviceCoreInfo::builder().count(2).build())
        .build();
    let inferentia = InferenceDeviceInfo::builder().name("Inferentia").manufacturer("AWS").count(1).build();
    let info = m5_large()
        .instance_type("x99.48xlarge".into())
        .set_hypervisor(None)
        .current_generation(true)
        .bare_metal(true)
        .nitro_enclaves_support(NitroEnclavesSupport::Supported)
        .processor_info(
            ProcessorInfo::builder()
                .supported_architectures(ArchitectureType::I386)
                .supported_architectures(ArchitectureType::Arm64)
                .supported_features(SupportedAdditionalProcessorFeature::NestedVirtualization)
                .build(),
        )
        .network_info(
            network()
                .set_network_cards(None)
                .default_network_card_index(1)
                .network_cards(card(1, 7, Some(12.5)))
                .network_cards(card(0, 2, Some(100.0)))
                .efa_info(EfaInfo::builder().maximum_efa_interfaces(32).build())
                .ena_support(EnaSupport::Unsupported)
                .encryption_in_transit_supported(true)
                .build(),
        )
        .ebs_info(
            EbsInfo::builder()
                .ebs_optimized_support(EbsOptimizedSupport::Supported)
                .ebs_optimized_info(EbsOptimizedInfo::builder().maximum_bandwidth_in_mbps(1).build())
                .build(),
        )
        .instance_storage_info(
            InstanceStorageInfo::builder()
                .total_size_in_gb(30_400)
                .nvme_support(EphemeralNvmeSupport::Required)
                .build(),
        )
        .gpu_info(GpuInfo::builder().gpus(gpu.build()).build())
        .neuron_info(NeuronInfo::builder().neuron_devices(neuron).build())
        .inference_accelerator_info(InferenceAcceleratorInfo::builder().accelerators(inferentia).build())
        .build();
    let entry = read(&info);
    assert_eq!(entry.arch, ["i386", "arm64"]);
    assert_eq!((entry.cpu_manufacturer.as_deref(), entry.clock_mhz), (None, None));
    assert_eq!((entry.hypervisor.as_str(), entry.bare_metal, entry.current_generation), ("", true, true));
    assert_eq!((entry.network_cards.as_slice(), entry.enis, entry.default_card_enis), (&[2, 7][..], 9, Some(7)));
    assert_eq!((entry.ena_supported, entry.efa, entry.branch_enis), (Some(false), 32, 0));
    assert_eq!((entry.ebs_mbps, entry.network_mbps), (None, Some(112_500)), "not in the embedded table");
    assert_eq!((entry.encryption_in_transit, entry.nitro_enclaves), (Some(true), Some(true)));
    assert_eq!(entry.nested_virtualization, Some(true));
    assert_eq!((entry.instance_store_gb, entry.instance_store_nvme), (Some(30_400), Some(true)));
    assert_eq!((entry.gpus[0].name.as_str(), entry.gpus[0].count, entry.gpus[0].memory_mib), ("H100", 8, 81_920));
    assert_eq!((entry.neuron_devices[0].count, entry.neuron_devices[0].cores_per_device), (16, 2));
    assert_eq!(entry.inference_accelerators[0].manufacturer, "AWS");
}

#[test]
fn only_the_default_network_card_carries_pods() {
    let cards = |default: i32| {
        let network = network()
            .set_network_cards(None)
            .network_cards(card(0, 2, None))
            .network_cards(card(1, 1, None))
            .default_network_card_index(default)
            .ipv4_addresses_per_interface(50)
            .build();
        read(&m5_large().network_info(network).build())
            .as_node("us-east-1", &NodeSettings::default(), SpotPricing::Off)
            .capacity
            .pods
    };
    assert_eq!((cards(0), cards(1)), (100, 51), "as Karpenter computes it for p5.48xlarge");
}

#[test]
fn an_invalid_instance_type_is_reported_and_left_out() {
    let wrong = |info: InstanceTypeInfo| raw_instance_type(&info, embedded()).unwrap_err().to_string();
    assert_eq!(wrong(m5_large().set_memory_info(None).build()), "m5.large: memoryInfo is absent");
    assert_eq!(wrong(m5_large().set_v_cpu_info(None).build()), "m5.large: vCpuInfo is absent");
    assert_eq!(wrong(m5_large().set_network_info(None).build()), "m5.large: networkInfo is absent");
    assert_eq!(
        wrong(m5_large().v_cpu_info(VCpuInfo::builder().default_v_cpus(-2).build()).build()),
        "m5.large: vcpu is -2, expected 1 to 1048576"
    );
    assert_eq!(wrong(m5_large().instance_type("mac".into()).build()), "mac: name is not FAMILY.SIZE, as m7g.large");
    let far = network().network_cards(card(i32::MAX, 1, None)).network_cards(card(-1, 1, None)).build();
    assert_eq!(
        read(&m5_large().network_info(far).build()).network_cards,
        [3],
        "cards with an impossible index are skipped"
    );
    let (usable, unusable) =
        raw_instance_types(&[m5_large().build(), m5_large().set_memory_info(None).build()], embedded());
    assert_eq!((usable.len(), unusable.len()), (1, 1));
}

#[test]
fn zones_are_gathered_by_type() {
    let offering =
        |name: &str, zone: &str| InstanceTypeOffering::builder().instance_type(name.into()).location(zone).build();
    let zones = zones_by_type(&[
        offering("m5.large", "b"),
        offering("m5.large", "a"),
        offering("c5.large", "a"),
        InstanceTypeOffering::builder().location("a").build(),
    ]);
    let set = |zones: &[&str]| zones.iter().map(|zone| (*zone).to_owned()).collect::<BTreeSet<_>>();
    assert_eq!(zones, [("m5.large".to_owned(), set(&["a", "b"])), ("c5.large".to_owned(), set(&["a"]))].into());
}

/// An item of DescribeInstanceTypes, reduced to the members that are read.
const C6G: &str = "<item><instanceType>c6g.large</instanceType><currentGeneration>true</currentGeneration>\
    <supportedUsageClasses><item>on-demand</item><item>spot</item></supportedUsageClasses><bareMetal>false</bareMetal>\
    <hypervisor>nitro</hypervisor><processorInfo><supportedArchitectures><item>arm64</item></supportedArchitectures>\
    <sustainedClockSpeedInGhz>2.5</sustainedClockSpeedInGhz><manufacturer>AWS</manufacturer></processorInfo>\
    <vCpuInfo><defaultVCpus>2</defaultVCpus></vCpuInfo><memoryInfo><sizeInMiB>4096</sizeInMiB></memoryInfo>\
    <ebsInfo><ebsOptimizedSupport>default</ebsOptimizedSupport><ebsOptimizedInfo><maximumBandwidthInMbps>4750\
    </maximumBandwidthInMbps></ebsOptimizedInfo></ebsInfo><networkInfo><maximumNetworkInterfaces>3</maximumNetworkInterfaces>\
    <defaultNetworkCardIndex>0</defaultNetworkCardIndex><networkCards><item><networkCardIndex>0</networkCardIndex>\
    <maximumNetworkInterfaces>3</maximumNetworkInterfaces></item></networkCards><ipv4AddressesPerInterface>10\
    </ipv4AddressesPerInterface><enaSupport>required</enaSupport></networkInfo></item>";

#[tokio::test]
async fn instance_types_are_described_with_filters_and_all_pages() {
    let (clients, seen) = fake_aws::clients(Box::new(|seen| {
        let page = match seen.form.get("NextToken").map(String::as_str) {
            None => format!("<instanceTypeSet>{C6G}</instanceTypeSet><nextToken>t</nextToken>"),
            Some(_) => format!("<instanceTypeSet>{}</instanceTypeSet>", C6G.replace("c6g", "m6g")),
        };
        fake_aws::ok("DescribeInstanceTypes", &page)
    }));
    let infos = describe_instance_types(&clients.ec2).await.unwrap();
    let (usable, unusable) = raw_instance_types(&infos, embedded());
    assert_eq!(unusable, []);
    assert_eq!(usable.keys().collect::<Vec<_>>(), ["c6g.large", "m6g.large"]);
    let table = embedded().instance_type("c6g.large").unwrap();
    let entry = &usable["c6g.large"];
    assert_eq!((entry.vcpu, entry.memory_mib, entry.ebs_mbps), (table.vcpu, table.memory_mib, table.ebs_mbps));
    let seen = seen.lock().unwrap();
    let asked = |at: usize, key: &str| seen[at].form.get(key).cloned().unwrap_or_default();
    assert_eq!(seen.len(), 2);
    assert_eq!(asked(1, "NextToken"), "t");
    for (key, value) in [
        ("MaxResults", "100"),
        ("Filter.1.Name", "supported-virtualization-type"),
        ("Filter.1.Value.1", "hvm"),
        ("Filter.2.Name", "processor-info.supported-architecture"),
        ("Filter.2.Value.1", "x86_64"),
        ("Filter.2.Value.2", "arm64"),
    ] {
        assert_eq!(asked(0, key), value, "{key}");
    }
}

#[tokio::test]
async fn offerings_are_described_by_zone_and_all_pages() {
    let item = |zone: &str| format!("<item><instanceType>m5.large</instanceType><location>{zone}</location></item>");
    let (clients, seen) = fake_aws::clients(Box::new(move |seen| {
        let (zone, next) = match seen.form.get("NextToken") {
            None => ("us-east-1a", "<nextToken>t</nextToken>"),
            Some(_) => ("us-east-1b", ""),
        };
        let set = item(zone);
        fake_aws::ok(
            "DescribeInstanceTypeOfferings",
            &format!("<instanceTypeOfferingSet>{set}</instanceTypeOfferingSet>{next}"),
        )
    }));
    let zones = zones_by_type(&describe_offerings(&clients.ec2).await.unwrap());
    assert_eq!(zones["m5.large"].iter().collect::<Vec<_>>(), ["us-east-1a", "us-east-1b"]);
    let form = &seen.lock().unwrap()[0].form;
    assert_eq!((form["LocationType"].as_str(), form["MaxResults"].as_str()), ("availability-zone", "1000"));
}

#[tokio::test]
async fn an_empty_response_is_an_error() {
    let (clients, _) = fake_aws::clients(Box::new(|seen| fake_aws::ok(&seen.action, "")));
    let error = describe_instance_types(&clients.ec2).await.unwrap_err();
    assert_eq!(error.to_string(), "ec2:DescribeInstanceTypes: no instance types");
    let error = describe_offerings(&clients.ec2).await.unwrap_err();
    assert_eq!(error.to_string(), "ec2:DescribeInstanceTypeOfferings: no offerings");
}
