use std::collections::BTreeSet;

use serde_json::json;

use super::NodeClassVersion::{V5, V6};
use super::*;
use crate::hash::tests::merge;

fn class(patch: &Value) -> Value {
    let mut spec = json!({
        "associatePublicIPAddress": false,
        "userData": "userdata-test-1",
        "role": "role-1",
        "tags": { "keyTag-1": "valueTag-1", "keyTag-2": "valueTag-2" },
        "blockDeviceMappings": [
            {
                "deviceName": "map-device-1",
                "ebs": {
                    "deleteOnTermination": false, "encrypted": false, "iops": 0, "kmsKeyID": "fakeKMSKeyID",
                    "snapshotID": "fakeSnapshot", "throughput": 0, "volumeSize": "2G", "volumeType": "standard",
                },
            },
            { "deviceName": "map-device-2" },
        ],
        "detailedMonitoring": false,
        "metadataOptions": {
            "httpEndpoint": "disabled", "httpProtocolIPv6": "disabled", "httpPutResponseHopLimit": 1,
            "httpTokens": "optional",
        },
        "context": "fake-context",
    });
    merge(&mut spec, patch);
    spec
}

/// Test vectors of Karpenter's own test of the hash.
#[test]
fn node_class_hashes_are_karpenters() {
    let mut sized = class(&json!({}));
    sized["blockDeviceMappings"][0]["ebs"]["volumeSize"] = json!("10G");
    for (name, spec, hash) in [
        ("base", class(&json!({})), "11148166120438674859"),
        ("user data", class(&json!({ "userData": "userdata-test-2" })), "11774429238106843388"),
        ("a tag", class(&json!({ "tags": { "keyTag-test-3": "valueTag-test-3" } })), "9327338697296909506"),
        ("context", class(&json!({ "context": "context-2" })), "2279761750428738028"),
        ("monitoring", class(&json!({ "detailedMonitoring": true })), "1936848126751988570"),
        ("local disks", class(&json!({ "instanceStorePolicy": "RAID0" })), "16697988646989909967"),
        (
            "TCP timeout",
            class(&json!({ "connectionTracking": { "tcpEstablishedTimeout": 300 } })),
            "1619669030802245540",
        ),
        ("UDP timeout", class(&json!({ "connectionTracking": { "udpStreamTimeout": 120 } })), "13743705849402595405"),
        (
            "virtualization",
            class(&json!({ "cpuOptions": { "nestedVirtualization": "enabled" } })),
            "6157846767212910604",
        ),
        ("volume size", sized, "10372902467896351912"),
        (
            "instance profile",
            class(&json!({ "role": null, "instanceProfile": "test-instance-profile" })),
            "10323991363677716244",
        ),
    ] {
        let spec: Ec2NodeClassSpec = serde_json::from_value(spec).unwrap();
        assert_eq!(node_class(&spec, V6, "test-ca-bundle"), hash, "{name}");
    }
}

/// A spec with its hashes by Karpenter 1.14.1 (`v5`) and 1.15.0 (`v6`), for the CA bundle `test-ca`.
#[derive(serde::Deserialize)]
struct Vector {
    name: String,
    spec: Ec2NodeClassSpec,
    /// Absent for members that 1.14 does not know.
    v5: Option<String>,
    v6: String,
}

fn vectors() -> Vec<Vector> {
    serde_json::from_str(include_str!("../vectors/node_class.json")).unwrap()
}

#[test]
fn hashes_of_both_versions_are_those_of_their_releases() {
    let wrong: Vec<_> = vectors()
        .into_iter()
        .flat_map(|Vector { name, spec, v5, v6 }| {
            let other = |version, hash: &String| (node_class(&spec, version, "test-ca") != *hash).then_some(version);
            [v5.and_then(|hash| other(V5, &hash)), other(V6, &v6)].map(|wrong| Some((name.clone(), wrong?)))
        })
        .flatten()
        .collect();
    assert_eq!(wrong, []);
}

#[test]
fn version_5_also_hashes_what_its_release_does_not_know() {
    let hashes = |specs: &[Value]| -> BTreeSet<String> {
        let read = |spec: &Value| serde_json::from_value(spec.clone()).unwrap();
        specs.iter().map(|spec| node_class(&read(spec), V5, "")).collect()
    };
    let specs = [
        json!({ "kubelet": {} }),
        json!({ "kubelet": { "topologyManagerPolicy": "best-effort" } }),
        json!({ "kubelet": { "topologyManagerPolicy": "restricted" } }),
        json!({ "kubelet": { "maxPods": "vcpus * 10" } }),
        json!({ "enclaveOptions": { "enabled": false } }),
        json!({ "enclaveOptions": { "enabled": true } }),
    ];
    assert_eq!(hashes(&specs).len(), specs.len());
    assert_eq!(hashes(&[json!({ "kubelet": {} }), json!({ "kubelet": { "maxPods": null } })]).len(), 1);
}

#[test]
fn selector_terms_are_not_hashed_but_the_family_of_an_alias_is() {
    let base = node_class(&Ec2NodeClassSpec::default(), V6, "");
    let with = |spec: Value| node_class(&serde_json::from_value(spec).unwrap(), V6, "");
    let null = json!({ "metadataOptions": null });
    assert_eq!(with(null.clone()), base);
    let mut terms = null.clone();
    merge(
        &mut terms,
        &json!({ "subnetSelectorTerms": [{ "id": "subnet-1" }], "amiSelectorTerms": [{ "id": "ami-1" }] }),
    );
    assert_eq!(with(terms), base);
    let mut alias = null;
    merge(&mut alias, &json!({ "amiSelectorTerms": [{ "alias": "al2023@latest" }] }));
    assert_ne!(with(alias), base);
}

#[test]
fn volume_sizes_are_hashed_in_canonical_form() {
    for (size, canonical) in [
        ("1024Gi", "1Ti"),
        ("1000G", "1T"),
        ("1000Gi", "1000Gi"),
        ("20Gi", "20Gi"),
        ("64T", "64T"),
        ("Ti", "Ti"),
        ("1024Ti", "1Pi"),
    ] {
        assert_eq!(canonical_volume_size(size), canonical, "{size}");
    }
}

#[test]
fn the_kubelet_configuration_is_encoded_as_in_go() {
    for (kubelet, text) in [
        (Value::Null, "null"),
        (json!({}), "null"),
        (json!({ "maxPods": 110, "clusterDNS": ["10.0.0.10"] }), r#"{"clusterDNS":["10.0.0.10"],"maxPods":110}"#),
        (
            json!({ "kubeReserved": { "cpu": "vcpus < 2 ? 60 : 70" }, "a": { "z": 1, "b": [true, null] } }),
            r#"{"a":{"b":[true,null],"z":1},"kubeReserved":{"cpu":"vcpus \u003c 2 ? 60 : 70"}}"#,
        ),
    ] {
        assert_eq!(kubelet::json(&kubelet), text);
    }
}
