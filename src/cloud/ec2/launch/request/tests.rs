use std::collections::BTreeSet;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Taint;
use serde_json::json;
use stowage_model::events;
use stowage_test_objects as objects;

use super::*;
use crate::catalog::{SpotPricing, embedded};
use crate::ec2::launch::select::choose;
use crate::ec2::node_class::ami_alias::one_of;
use crate::launch_request::launchable;
use crate::{LaunchDetails, Override};

/// A ready class with two subnets and an image for each architecture.
pub fn class(spec: serde_json::Value) -> Ec2NodeClass {
    let mut whole = json!({"role": "r", "amiFamily": "AL2023"});
    json_patch::merge(&mut whole, &spec);
    let image = |id: &str, arch: &str| json!({"id": id, "name": "n", "requirements": [one_of(labels::ARCH, arch)]});
    let status = json!({
        "subnets": [
            {"id": "subnet-a", "zone": "us-east-1a", "zoneID": "use1-az1"},
            {"id": "subnet-b", "zone": "us-east-1b", "zoneID": "use1-az2"},
        ],
        "securityGroups": [{"id": "sg-1"}],
        "amis": [image("ami-x86", "amd64"), image("ami-arm", "arm64")],
        "instanceProfile": "c1_42",
        "conditions": [{"type": "Ready", "status": "True", "reason": "Ready", "message": "",
            "observedGeneration": 3, "lastTransitionTime": "2026-01-01T00:00:00Z"}],
    });
    let meta = json!({"uid": "class-uid", "generation": 3});
    objects::node_class("default", &json!({"metadata": meta, "spec": whole, "status": status}))
}

/// A claim with this creation timestamp.
pub fn claim(created: &str, spec: serde_json::Value) -> NodeClaim {
    let meta = json!({"uid": "uid-1", "creationTimestamp": created, "labels": {"team": "a"}});
    objects::claim("claim-1", &json!({"metadata": meta, "spec": spec}))
}

/// A request for on-demand instances of these types, in the zones of [`class`].
pub fn request(class: Ec2NodeClass, claim: NodeClaim, types: &[&str]) -> LaunchRequest {
    let catalog = embedded().for_node_class(Some(&class), SpotPricing::Off);
    let overrides = types.iter().flat_map(|name| {
        ["us-east-1a", "us-east-1b"].map(|zone| Override {
            instance_type: (*name).to_owned(),
            zone: zone.to_owned(),
            capacity_type: CapacityType::OnDemand,
        })
    });
    LaunchRequest {
        client_token: "uid-1".into(),
        node_claim: "claim-1".into(),
        node_pool: "default".into(),
        node_class: "default".into(),
        overrides: overrides.collect(),
        labels: BTreeMap::from([("tier".to_owned(), "web".to_owned())]),
        taints: vec![],
        details: Some(Arc::new(LaunchDetails {
            claim,
            class: Arc::new(class),
            catalog: Arc::new(catalog),
            named: BTreeSet::new(),
        })),
    }
}

pub fn facts() -> ClusterFacts {
    ClusterFacts {
        name: "c1".into(),
        endpoint: "https://c1".into(),
        ca_bundle: "Y2EK".into(),
        version: "1.34".into(),
        service_cidr: Some("10.100.0.0/16".into()),
        dns_ip: Some("10.100.0.10".into()),
    }
}

const LONG_AGO: &str = "2026-01-01T00:00:00Z";

fn template_inputs(details: &LaunchDetails) -> TemplateInputs {
    TemplateInputs { class: Arc::clone(&details.class), cluster: Arc::new(facts()), placement_group: None }
}

fn inputs<'a>(
    request: &'a LaunchRequest,
    details: &'a LaunchDetails,
    template_inputs: &'a TemplateInputs,
) -> LaunchInputs<'a> {
    let claim = &details.claim;
    LaunchInputs { request, claim, template_inputs, region: "us-east-1", manages_reservations: true, shapes: None }
}

fn with_groups<T>(
    request: &LaunchRequest,
    group: Option<&str>,
    then: impl FnOnce(&[TemplateGroup<'_>], &LaunchInputs<'_>) -> T,
) -> T {
    let details = request.details.clone().unwrap();
    let group = group.map(|id| PlacementGroup { id: id.to_owned(), strategy: "partition".to_owned(), partitions: 10 });
    let template_inputs = TemplateInputs { placement_group: group, ..template_inputs(&details) };
    let inputs = inputs(request, &details, &template_inputs);
    let choice = choose(&request.overrides, &details.catalog, true).unwrap();
    let groups = inputs.template_groups(&choice, &inputs.tags().unwrap()).unwrap();
    then(&groups, &inputs)
}

/// A choice without candidates: the fleet request reads its capacity type only.
fn on_demand() -> Choice {
    Choice { capacity_type: CapacityType::OnDemand, reservation: None, candidates: vec![] }
}

fn names<'a>(group: &'a TemplateGroup<'_>) -> Vec<&'a str> {
    group.candidates.iter().map(|candidate| &*candidate.instance_type.name).collect()
}

#[test]
fn types_with_the_same_image_and_pods_share_a_template() {
    let request =
        request(class(json!({})), claim(LONG_AGO, json!({})), &["m5.large", "c5.large", "m5.xlarge", "m6g.large"]);
    with_groups(&request, None, |groups, _| {
        let mut all: Vec<(Vec<&str>, &str)> =
            groups.iter().map(|group| (names(group), group.template.image_id.as_str())).collect();
        all.sort();
        assert_eq!(
            all,
            [(vec!["c5.large", "m5.large"], "ami-x86"), (vec!["m5.xlarge"], "ami-x86"), (vec!["m6g.large"], "ami-arm"),]
        );
        let text = STANDARD.decode(&groups[0].template.user_data).unwrap();
        let text = String::from_utf8(text).unwrap();
        for part in ["name: c1", "https://c1", "team=a", "tier=web", "karpenter.sh/unregistered"] {
            assert!(text.contains(part), "{part} is not in {text}");
        }
    });
}

#[test]
fn c18_labels_taints_and_kubelet_change_a_template_and_types_do_not() {
    let name = |request: &LaunchRequest| {
        with_groups(request, None, |groups, _| {
            let group = groups.iter().find(|group| names(group).contains(&"m5.large")).unwrap();
            group.template.name()
        })
    };
    let plain = || claim(LONG_AGO, json!({}));
    let of = |spec, claim, types: &[&str]| request(class(spec), claim, types);
    let base = name(&of(json!({}), plain(), &["m5.large"]));
    assert_eq!(name(&of(json!({}), plain(), &["m5.large", "c5.large", "m5.xlarge"])), base);
    let mut labeled = plain();
    labeled.metadata.labels = Some([("team".to_owned(), "b".to_owned())].into());
    let mut tainted = of(json!({}), plain(), &["m5.large"]);
    tainted.taints = vec![Taint { key: "team".into(), effect: "NoSchedule".into(), ..Taint::default() }];
    for (what, request) in [
        ("labels", of(json!({}), labeled, &["m5.large"])),
        ("taints", tainted),
        ("maxPods", of(json!({"kubelet": {"maxPods": 20}}), plain(), &["m5.large"])),
        ("another kubelet setting", of(json!({"kubelet": {"cpuCFSQuota": false}}), plain(), &["m5.large"])),
    ] {
        assert_ne!(name(&request), base, "{what}");
    }
}

#[test]
fn c22_an_al2023_class_without_a_service_cidr_is_not_ready() {
    let request = request(class(json!({})), claim(LONG_AGO, json!({})), &["m5.large"]);
    let details = request.details.clone().unwrap();
    let cluster = Arc::new(ClusterFacts { service_cidr: None, ..facts() });
    let template_inputs = TemplateInputs { cluster, ..template_inputs(&details) };
    let inputs = inputs(&request, &details, &template_inputs);
    let choice = choose(&request.overrides, &details.catalog, true).unwrap();
    let error = inputs.template_groups(&choice, &BTreeMap::new()).unwrap_err();
    let LaunchError::NodeClassNotReady { name, reason } = error else { panic!("{error}") };
    assert_eq!(name, "default");
    assert!(reason.contains("service CIDR"), "{reason}");
}

#[test]
fn block_device_mappings_of_the_class_replace_the_families_volumes() {
    let devices = |spec| {
        with_groups(&request(class(spec), claim(LONG_AGO, json!({})), &["m5.large"]), None, |groups, _| {
            let devices = groups[0].template.block_devices.iter();
            devices.filter_map(|mapping| mapping.device_name.clone()).collect::<Vec<_>>()
        })
    };
    assert_eq!(devices(json!({})), ["/dev/xvda"]);
    assert_eq!(devices(json!({"blockDeviceMappings": []})), ["/dev/xvda"]);
    assert_eq!(devices(json!({"amiFamily": "Bottlerocket"})), ["/dev/xvda", "/dev/xvdb"]);
    assert!(devices(json!({"amiFamily": "Custom"})).is_empty());
    let own = json!({"blockDeviceMappings": [{"deviceName": "/dev/sdz", "ebs": {"volumeSize": "30Gi"}}]});
    assert_eq!(devices(own), ["/dev/sdz"]);
}

#[test]
fn tenancy_partition_and_enclaves_come_from_the_claim() {
    let spec = json!({
        "requirements": [
            {"key": labels::INSTANCE_TENANCY, "operator": "In", "values": ["dedicated"]},
            {"key": labels::PLACEMENT_GROUP_PARTITION, "operator": "In", "values": ["2", "10"]},
        ],
        "resources": {"requests": {"eks.amazonaws.com/nitro-sandbox": "1"}},
    });
    let request = request(class(json!({})), claim(LONG_AGO, spec), &["m5.large"]);
    with_groups(&request, Some("pg-1"), |groups, _| {
        let template = &groups[0].template;
        assert_eq!((template.tenancy.as_str(), template.partition, template.enclave), ("dedicated", Some(10), true));
        assert_eq!(template.placement_group.as_deref(), Some("pg-1"));
    });
    with_groups(&request, None, |groups, _| assert_eq!(groups[0].template.partition, None, "only in a group"));
}

#[test]
fn a_class_enables_enclaves() {
    for enabled in [true, false] {
        let class = class(json!({"enclaveOptions": {"enabled": enabled}}));
        let request = request(class, claim(LONG_AGO, json!({})), &["m5.xlarge"]);
        with_groups(&request, None, |groups, _| assert_eq!(groups[0].template.enclave, enabled));
    }
}

#[test]
fn a_request_has_each_type_in_each_zone_with_a_subnet_cheapest_first() {
    let request = request(class(json!({"context": "ctx"})), claim(LONG_AGO, json!({})), &["m5.large", "m5.xlarge"]);
    with_groups(&request, None, |groups, inputs| {
        let named: Vec<_> = groups.iter().enumerate().map(|(n, group)| (format!("lt-{n}"), group)).collect();
        let subnets = BTreeMap::from([("us-east-1a".to_owned(), "subnet-a".to_owned())]);
        let fleet = inputs.fleet("t".into(), &on_demand(), &named, &subnets, BTreeMap::new()).unwrap();
        assert_eq!(fleet.templates.len(), 2);
        assert_eq!(fleet.templates[0].1[0].instance_type, "m5.large");
        assert!(fleet.templates.iter().flat_map(|(_, slots)| slots).all(|slot| slot.subnet == "subnet-a"));
        assert_eq!(fleet.instance_tags[CLAIM_TAG], "claim-1");
        assert_eq!((fleet.context.as_deref(), fleet.prioritized), (Some("ctx"), false));
        assert!(inputs.fleet("t".into(), &on_demand(), &named, &BTreeMap::new(), BTreeMap::new()).is_none());
    });
}

#[test]
fn a_request_has_at_most_fifty_templates_of_the_cheapest_types() {
    let request = request(class(json!({})), claim(LONG_AGO, json!({})), &["m5.large"]);
    let details = request.details.clone().unwrap();
    let template_inputs = template_inputs(&details);
    let mut choice = choose(&request.overrides, &details.catalog, true).unwrap();
    let first = choice.candidates.remove(0);
    // Each number of pods has user data of its own; the last type shares it with the first.
    for pods in (10..70).chain([10]) {
        let mut instance_type = InstanceType::clone(&first.instance_type);
        instance_type.capacity.pods = pods;
        choice.candidates.push(TypeOffer { instance_type: Arc::new(instance_type), zones: first.zones.clone() });
    }
    let groups = inputs(&request, &details, &template_inputs).template_groups(&choice, &BTreeMap::new()).unwrap();
    let pods: Vec<i64> = groups.iter().map(|group| group.candidates[0].instance_type.capacity.pods).collect();
    assert_eq!(pods, (10..60).collect::<Vec<_>>());
    assert_eq!(groups[0].candidates.len(), 2);
}

#[test]
fn annotations_of_the_claim_set_context_and_priority() {
    let mut annotated = claim(LONG_AGO, json!({}));
    let keys = [(labels::MIN_VALUES_RELAXED, "true"), (labels::PRICE_OVERLAY_APPLIED, "")];
    annotated.metadata.annotations = Some(keys.map(|(key, value)| (key.to_owned(), value.to_owned())).into());
    let request = request(class(json!({"context": "ctx"})), annotated, &["m5.large"]);
    with_groups(&request, None, |groups, inputs| {
        let named = [("lt".to_owned(), &groups[0])];
        let subnets = BTreeMap::from([("us-east-1a".to_owned(), "subnet-a".to_owned())]);
        let fleet = inputs.fleet("t".into(), &on_demand(), &named, &subnets, BTreeMap::new()).unwrap();
        assert_eq!((fleet.context, fleet.prioritized), (None, true));
    });
}

#[test]
fn only_a_class_that_is_ready_in_its_current_generation_launches() {
    assert_eq!(launchable(&class(json!({}))), Ok(()));
    let changed = |change: &dyn Fn(&mut Ec2NodeClass)| {
        let mut class = class(json!({}));
        change(&mut class);
        launchable(&class)
    };
    let status = |status: &'static str| {
        move |class: &mut Ec2NodeClass| class.status.as_mut().unwrap().conditions[0].status = status.into()
    };
    assert!(matches!(changed(&status("False")), Err(LaunchError::NodeClassNotReady { .. })));
    assert!(matches!(
        changed(&status("Unknown")),
        Err(LaunchError::Rejected { event: events::NODE_CLASS_READINESS_UNKNOWN, .. })
    ));
    assert!(matches!(
        changed(&|class| class.metadata.generation = Some(4)),
        Err(LaunchError::NodeClassNotReady { .. })
    ));
    assert!(matches!(changed(&|class| class.status = None), Err(LaunchError::Rejected { .. })));
}

#[test]
fn c19_a_restricted_tag_fails_the_launch() {
    let tagged = class(json!({"tags": {"karpenter.sh/nodeclaim": "x"}}));
    let request = request(tagged, claim(LONG_AGO, json!({})), &["m5.large"]);
    let details = request.details.clone().unwrap();
    let template_inputs = template_inputs(&details);
    let inputs = inputs(&request, &details, &template_inputs);
    assert!(matches!(inputs.tags(), Err(LaunchError::NodeClassNotReady { .. })));
}

#[test]
fn c34_user_data_contains_the_values_of_expressions_on_each_type() {
    let kubelet = json!({
        "maxPods": "vcpus * 10", "kubeReserved": {"cpu": "vcpus * 31", "memory": "1Gi", "pid": "vcpus / 0"},
        "systemReserved": {"memory": "11 * max_pods"},
    });
    let types: BTreeMap<String, RawInstanceType> =
        embedded().instance_types.iter().map(|entry| (entry.name.clone(), entry.clone())).collect();
    for (family, of_two, of_four) in [
        ("AL2023", ["maxPods: 20", "cpu: 70m", "memory: 224Mi"], ["maxPods: 40", "cpu: 130m", "memory: 448Mi"]),
        (
            "AL2",
            ["--max-pods=20", "--kube-reserved=\"cpu=70m,memory=1Gi\"", "--system-reserved=\"memory=224Mi\""],
            ["--max-pods=40", "--kube-reserved=\"cpu=130m,memory=1Gi\"", "--system-reserved=\"memory=448Mi\""],
        ),
        (
            "Bottlerocket",
            ["max-pods = 20", "cpu = \"70m\"", "memory = \"224Mi\""],
            ["max-pods = 40", "cpu = \"130m\"", "memory = \"448Mi\""],
        ),
    ] {
        let class = class(json!({"amiFamily": family, "kubelet": kubelet}));
        let settings = NodeSettings::of(Some(&class)).with_expressions(&class);
        let request = request(class, claim(LONG_AGO, json!({})), &["m5.large", "c5.large", "m5.xlarge"]);
        let details = request.details.clone().unwrap();
        let template_inputs = template_inputs(&details);
        let inputs =
            LaunchInputs { shapes: Shapes::of(&settings, &types), ..inputs(&request, &details, &template_inputs) };
        let choice = choose(&request.overrides, &details.catalog, true).unwrap();
        let groups = inputs.template_groups(&choice, &BTreeMap::new()).unwrap();
        let texts: BTreeMap<Vec<&str>, String> = groups
            .iter()
            .map(|group| {
                let mut types = names(group);
                types.sort_unstable();
                (types, String::from_utf8(STANDARD.decode(&group.template.user_data).unwrap()).unwrap())
            })
            .collect();
        for (types, parts) in [(vec!["c5.large", "m5.large"], of_two), (vec!["m5.xlarge"], of_four)] {
            let text = &texts[&types];
            for part in parts {
                assert!(text.contains(part), "{family}: {part} is not in {text}");
            }
            assert!(!text.contains("vcpus") && !text.contains("pid"), "{family}: {text}");
        }
        let gone = LaunchInputs { shapes: Some(Shapes { settings: &settings, types: &BTreeMap::new() }), ..inputs };
        assert!(
            gone.template_groups(&choice, &BTreeMap::new()).is_err(),
            "a type that EC2 does not describe is not launched"
        );
    }
}

#[test]
fn types_without_an_image_are_omitted_and_no_type_is_an_error() {
    let mut class = class(json!({}));
    class.status.as_mut().unwrap().amis.remove(0);
    let request = request(class, claim(LONG_AGO, json!({})), &["m5.large"]);
    let details = request.details.clone().unwrap();
    let template_inputs = template_inputs(&details);
    let inputs = inputs(&request, &details, &template_inputs);
    let choice = choose(&request.overrides, &details.catalog, true).unwrap();
    assert!(matches!(inputs.template_groups(&choice, &BTreeMap::new()), Err(LaunchError::Rejected { .. })));
}
