//! Drift hashes of NodePools and EC2NodeClasses, equal to Karpenter's: nodes of a cluster that changes over must not drift.
//!
//! Karpenter hashes its Go values with hashstructure v2 (format 2, slices as sets, zero values ignored) over 64-bit FNV-1. The
//! Go names of types and fields and their order are part of the result, so they are spelled out here. Values come from JSON,
//! not from our types: an empty list or map that is present counts, one that is absent does not.

use serde_json::{Map, Value};

use super::duration;
use super::{Ec2NodeClassSpec, NodePoolSpec};

/// Version of [`node_pool`], for `karpenter.sh/nodepool-hash-version`.
pub const NODE_POOL_VERSION: &str = "v3";
/// Version of [`node_class`], for `karpenter.k8s.aws/ec2nodeclass-hash-version`.
pub const NODE_CLASS_VERSION: &str = "v6";

/// Drift hash of a NodePool, in decimal. Requirements, limits, weight and disruption have no part in it.
pub fn node_pool(spec: &NodePoolSpec) -> String {
    serde_json::to_value(&spec.template).map_or_else(|_| String::new(), |template| node_pool_template(&template))
}

/// [`node_pool`] of the JSON of `spec.template`, which also tells an empty list from an absent one.
pub fn node_pool_template(template: &Value) -> String {
    let metadata = &template["metadata"];
    let spec = &template["spec"];
    let object_meta = Struct::new("ObjectMeta")
        .field("Labels", strings(&metadata["labels"]))
        .field("Annotations", strings(&metadata["annotations"]));
    let reference = &spec["nodeClassRef"];
    let node_class_ref = Struct::new("NodeClassReference")
        .field("Kind", non_empty(&reference["kind"]))
        .field("Name", non_empty(&reference["name"]))
        .field("Group", non_empty(&reference["group"]));
    let spec_struct = Struct::new("NodeClaimTemplateSpec")
        .field("Taints", taints(&spec["taints"]))
        .field("StartupTaints", taints(&spec["startupTaints"]))
        .field("NodeClassRef", reference.is_object().then(|| node_class_ref.finish()))
        .field("TerminationGracePeriod", grace_period(&spec["terminationGracePeriod"]))
        .field("ExpireAfter", expiry(&spec["expireAfter"]));
    Struct::new("NodeClaimTemplate")
        .field("ObjectMeta", object_meta.non_zero())
        .field("Spec", spec_struct.non_zero())
        .finish()
        .to_string()
}

/// Drift hash of an EC2NodeClass, in decimal. `ca_bundle` is the cluster's CA as instances get it, base64; empty when there is
/// none. Selector terms have no part in it, what they resolve to is compared instead.
pub fn node_class(spec: &Ec2NodeClassSpec, ca_bundle: &str) -> String {
    let family = spec.effective_ami_family().to_owned();
    serde_json::to_value(spec).map_or_else(|_| String::new(), |spec| node_class_spec(&spec, &family, ca_bundle))
}

/// [`node_class`] of the JSON of `spec`, which also tells an empty list from an absent one.
pub fn node_class_spec(spec: &Value, ami_family: &str, ca_bundle: &str) -> String {
    let selector = &spec["placementGroupSelector"];
    let placement = Struct::new("PlacementGroupSelector")
        .field("Name", string(&selector["name"]))
        .field("ID", string(&selector["id"]));
    let metadata = &spec["metadataOptions"];
    let metadata_options = Struct::new("MetadataOptions")
        .field("HTTPEndpoint", string(&metadata["httpEndpoint"]))
        .field("HTTPProtocolIPv6", string(&metadata["httpProtocolIPv6"]))
        .field("HTTPPutResponseHopLimit", int64(&metadata["httpPutResponseHopLimit"]))
        .field("HTTPTokens", string(&metadata["httpTokens"]));
    let tracking = &spec["connectionTracking"];
    let connection_tracking = Struct::new("ConnectionTracking")
        .field("TCPEstablishedTimeout", int32(&tracking["tcpEstablishedTimeout"]))
        .field("UDPStreamTimeout", int32(&tracking["udpStreamTimeout"]))
        .field("UDPTimeout", int32(&tracking["udpTimeout"]));
    let cpu = &spec["cpuOptions"];
    let cpu_options =
        Struct::new("CPUOptions").field("NestedVirtualization", string(&cpu["nestedVirtualization"]));
    let hash = Struct::new("EC2NodeClassSpec")
        .field("PlacementGroupSelector", selector.is_object().then(|| placement.finish()))
        .field("AssociatePublicIPAddress", boolean(&spec["associatePublicIPAddress"]))
        .field("UserData", string(&spec["userData"]))
        .field("Role", non_empty(&spec["role"]))
        .field("InstanceProfile", string(&spec["instanceProfile"]))
        .field("Tags", strings(&spec["tags"]))
        .field("BlockDeviceMappings", set(&spec["blockDeviceMappings"], block_device_mapping))
        .field("InstanceStorePolicy", string(&spec["instanceStorePolicy"]))
        .field("NetworkInterfaces", set(&spec["networkInterfaces"], network_interface))
        .field("DetailedMonitoring", boolean(&spec["detailedMonitoring"]))
        .field("MetadataOptions", metadata.is_object().then(|| metadata_options.finish()))
        .field("ConnectionTracking", tracking.is_object().then(|| connection_tracking.finish()))
        .field("Context", string(&spec["context"]))
        .field("CPUOptions", cpu.is_object().then(|| cpu_options.finish()))
        .finish();
    (hash ^ text(ami_family) ^ text(ca_bundle) ^ text(&kubelet_text(&spec["kubelet"]))).to_string()
}

fn block_device_mapping(mapping: &Value) -> u64 {
    let ebs = &mapping["ebs"];
    let device = Struct::new("BlockDevice")
        .field("DeleteOnTermination", boolean(&ebs["deleteOnTermination"]))
        .field("Encrypted", boolean(&ebs["encrypted"]))
        .field("IOPS", int64(&ebs["iops"]))
        .field("KMSKeyID", string(&ebs["kmsKeyID"]))
        .field("SnapshotID", string(&ebs["snapshotID"]))
        .field("Throughput", int64(&ebs["throughput"]))
        .field("VolumeInitializationRate", int32(&ebs["volumeInitializationRate"]))
        .field("VolumeSize", ebs["volumeSize"].as_str().map(|size| text(&canonical_volume_size(size))))
        .field("VolumeType", string(&ebs["volumeType"]));
    Struct::new("BlockDeviceMapping")
        .field("DeviceName", string(&mapping["deviceName"]))
        .field("EBS", ebs.is_object().then(|| device.finish()))
        .field("RootVolume", boolean(&mapping["rootVolume"]).filter(|_| mapping["rootVolume"] == Value::Bool(true)))
        .finish()
}

fn network_interface(interface: &Value) -> u64 {
    let index = |name: &str| int32(&interface[name]).filter(|_| interface[name] != 0);
    Struct::new("NetworkInterface")
        .field("NetworkCardIndex", index("networkCardIndex"))
        .field("DeviceIndex", index("deviceIndex"))
        .field("InterfaceType", non_empty(&interface["interfaceType"]))
        .finish()
}

/// Quantities are hashed as Kubernetes writes them: the largest unit that keeps the number whole, so 1024Gi is 1Ti.
fn canonical_volume_size(size: &str) -> String {
    let digits = size.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = size.split_at(digits);
    let Ok(mut number) = number.parse::<u64>() else { return size.to_owned() };
    if number == 0 {
        return "0".into();
    }
    let (step, units): (u64, &[&str]) =
        if unit.ends_with('i') { (1024, &["Gi", "Ti", "Pi", "Ei"]) } else { (1000, &["G", "T", "P", "E"]) };
    let Some(mut index) = units.iter().position(|known| *known == unit) else { return size.to_owned() };
    while number % step == 0 && index + 1 < units.len() {
        number /= step;
        index += 1;
    }
    format!("{number}{}", units[index])
}

/// The kubelet's configuration as Go writes it: compact, keys sorted, `null` when there is none.
fn kubelet_text(kubelet: &Value) -> String {
    let Some(members) = kubelet.as_object().filter(|members| !members.is_empty()) else { return "null".into() };
    let mut json = String::new();
    write_sorted(&mut json, members);
    // Go's encoder escapes what HTML might misread.
    for (raw, escaped) in
        [("<", r"\u003c"), (">", r"\u003e"), ("&", r"\u0026"), ("\u{2028}", r"\u2028"), ("\u{2029}", r"\u2029")]
    {
        json = json.replace(raw, escaped);
    }
    json
}

fn write_sorted(out: &mut String, members: &Map<String, Value>) {
    let mut sorted: Vec<_> = members.iter().collect();
    sorted.sort_by_key(|(key, _)| key.as_str());
    out.push('{');
    for (index, (key, value)) in sorted.into_iter().enumerate() {
        if index > 0 {
            out.push(',');
        }
        out.push_str(&Value::from(key.as_str()).to_string());
        out.push(':');
        write_value(out, value);
    }
    out.push('}');
}

fn write_value(out: &mut String, value: &Value) {
    match value {
        Value::Object(members) => write_sorted(out, members),
        Value::Array(items) => {
            out.push('[');
            for (index, item) in items.iter().enumerate() {
                if index > 0 {
                    out.push(',');
                }
                write_value(out, item);
            }
            out.push(']');
        }
        scalar => out.push_str(&scalar.to_string()),
    }
}

fn taints(list: &Value) -> Option<u64> {
    set(list, |taint| {
        Struct::new("Taint")
            .field("Key", non_empty(&taint["key"]))
            .field("Value", non_empty(&taint["value"]))
            .field("Effect", non_empty(&taint["effect"]))
            .field("TimeAdded", taint["timeAdded"].as_str().and_then(time))
            .finish()
    })
}

/// A `metav1.Duration`, present even when it is zero.
fn grace_period(value: &Value) -> Option<u64> {
    let nanos = nanoseconds(value)?;
    Some(Struct::new("Duration").field("Duration", (nanos != 0).then(|| fnv1(&nanos.to_le_bytes()))).finish())
}

/// A `NillableDuration`: `Never` is the same as nothing.
fn expiry(value: &Value) -> Option<u64> {
    let nanos = nanoseconds(value)?;
    Some(Struct::new("NillableDuration").field("Duration", Some(fnv1(&nanos.to_le_bytes()))).finish())
}

fn nanoseconds(value: &Value) -> Option<i64> {
    duration::parse_or_never(value.as_str()?).ok()??.checked_mul(1_000_000)
}

/// A `metav1.Time` as Go marshals it: version, seconds since year 1, nanoseconds, offset in minutes.
fn time(text: &str) -> Option<u64> {
    /// Seconds from 0001-01-01 to 1970-01-01.
    const UNIX_EPOCH: i64 = 62_135_596_800;
    let at: k8s_openapi::jiff::Timestamp = text.parse().ok()?;
    let mut bytes = vec![1];
    bytes.extend((at.as_second() + UNIX_EPOCH).to_be_bytes());
    bytes.extend(at.subsec_nanosecond().to_be_bytes());
    bytes.extend(0_i16.to_be_bytes());
    Some(Struct::new("Time").field("Time", Some(fnv1(&bytes))).finish())
}

fn string(value: &Value) -> Option<u64> {
    value.as_str().map(text)
}

/// A string that is absent when empty.
fn non_empty(value: &Value) -> Option<u64> {
    value.as_str().filter(|value| !value.is_empty()).map(text)
}

fn boolean(value: &Value) -> Option<u64> {
    value.as_bool().map(|value| fnv1(&[u8::from(value)]))
}

fn int64(value: &Value) -> Option<u64> {
    value.as_i64().map(|value| fnv1(&value.to_le_bytes()))
}

fn int32(value: &Value) -> Option<u64> {
    value.as_i64().and_then(|value| i32::try_from(value).ok()).map(|value| fnv1(&value.to_le_bytes()))
}

/// A map of strings: order has no part in it.
fn strings(value: &Value) -> Option<u64> {
    let members = value.as_object()?;
    let hash = members.iter().fold(0, |hash, (key, value)| hash ^ ordered(text(key), text(value.as_str().unwrap_or(""))));
    Some(finish(hash))
}

/// A list as a set: order has no part in it, and a pair of equal items cancels out.
fn set(value: &Value, item: impl Fn(&Value) -> u64) -> Option<u64> {
    Some(value.as_array()?.iter().fold(0, |hash, value| hash ^ item(value)))
}

/// The hash of a Go struct as its fields are added, in the order of their declaration; absent ones have no part in it.
struct Struct {
    hash: u64,
    fields: usize,
}

impl Struct {
    fn new(type_name: &str) -> Self {
        Self { hash: text(type_name), fields: 0 }
    }

    fn field(mut self, name: &str, value: Option<u64>) -> Self {
        if let Some(value) = value {
            self.hash = finish(self.hash ^ ordered(text(name), value));
            self.fields += 1;
        }
        self
    }

    fn finish(self) -> u64 {
        self.hash
    }

    /// Nothing when the struct is its zero value.
    fn non_zero(self) -> Option<u64> {
        (self.fields > 0).then_some(self.hash)
    }
}

fn text(text: &str) -> u64 {
    fnv1(text.as_bytes())
}

fn ordered(first: u64, second: u64) -> u64 {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&first.to_le_bytes());
    bytes[8..].copy_from_slice(&second.to_le_bytes());
    fnv1(&bytes)
}

fn finish(hash: u64) -> u64 {
    fnv1(&hash.to_le_bytes())
}

/// 64-bit FNV-1 (not 1a).
fn fnv1(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
        hash.wrapping_mul(0x0100_0000_01b3) ^ u64::from(*byte)
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn merge(into: &mut Value, patch: &Value) {
        match (into, patch) {
            (Value::Object(into), Value::Object(patch)) => {
                for (key, value) in patch {
                    merge(into.entry(key.clone()).or_insert(Value::Null), value);
                }
            }
            (into, patch) => *into = patch.clone(),
        }
    }

    fn pool(patch: &Value) -> Value {
        let mut template = json!({
            "spec": {
                "requirements": [],
                "expireAfter": "720h",
                "nodeClassRef": { "group": "karpenter.k8s.aws", "kind": "EC2NodeClass", "name": "default" },
            },
        });
        merge(&mut template, patch);
        template
    }

    /// Vectors made by running Karpenter's own code.
    #[test]
    fn node_pool_hashes_are_karpenters() {
        let noschedule = json!([{ "key": "k", "value": "v", "effect": "NoSchedule" }]);
        for (name, patch, hash) in [
            ("base", json!({}), "6821555240594823858"),
            (
                "requirements have no part in it",
                json!({ "spec": { "requirements": [{ "key": "a", "operator": "Exists" }] } }),
                "6821555240594823858",
            ),
            ("same time in minutes", json!({ "spec": { "expireAfter": "43200m" } }), "6821555240594823858"),
            ("never", json!({ "spec": { "expireAfter": "Never" } }), "17369979337536258260"),
            ("30m", json!({ "spec": { "expireAfter": "30m" } }), "14741391904299649255"),
            ("a label", json!({ "metadata": { "labels": { "a": "b" } } }), "11962592403282335759"),
            ("two labels", json!({ "metadata": { "labels": { "a": "b", "c": "d" } } }), "2280442936857030030"),
            ("an empty label", json!({ "metadata": { "labels": { "a": "" } } }), "3858450450527687907"),
            ("an annotation", json!({ "metadata": { "annotations": { "a": "b" } } }), "4269314868079315848"),
            ("a taint", json!({ "spec": { "taints": noschedule } }), "17590007864747601603"),
            (
                "two taints",
                json!({ "spec": { "taints": [
                    { "key": "k", "effect": "NoSchedule" }, { "key": "j", "effect": "NoExecute" },
                ] } }),
                "8668838401552382031",
            ),
            (
                "two taints, the other way round",
                json!({ "spec": { "taints": [
                    { "key": "j", "effect": "NoExecute" }, { "key": "k", "effect": "NoSchedule" },
                ] } }),
                "8668838401552382031",
            ),
            ("a start-up taint", json!({ "spec": { "startupTaints": noschedule } }), "15284629203317741040"),
            ("1h to drain", json!({ "spec": { "terminationGracePeriod": "1h" } }), "14948894070871102041"),
            ("no time to drain", json!({ "spec": { "terminationGracePeriod": "0s" } }), "10356118934572431967"),
            (
                "another node class",
                json!({ "spec": { "nodeClassRef": { "name": "other" } } }),
                "1124401764309382548",
            ),
        ] {
            let template = pool(&patch);
            assert_eq!(node_pool_template(&template), hash, "{name}");
            let spec: NodePoolSpec = serde_json::from_value(json!({ "template": template })).unwrap();
            assert_eq!(node_pool(&spec), hash, "typed: {name}");
        }
    }

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

    /// Vectors of Karpenter's own test of the hash.
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
            (
                "UDP timeout",
                class(&json!({ "connectionTracking": { "udpStreamTimeout": 120 } })),
                "13743705849402595405",
            ),
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
            assert_eq!(node_class_spec(&spec, "Custom", "test-ca-bundle"), hash, "{name}");
            let typed: Ec2NodeClassSpec = serde_json::from_value(spec).unwrap();
            assert_eq!(node_class(&typed, "test-ca-bundle"), hash, "typed: {name}");
        }
    }

    #[test]
    fn selector_terms_have_no_part_in_the_hash_but_the_family_of_an_alias_has() {
        let base = node_class(&Ec2NodeClassSpec::default(), "");
        let with = |spec: Value| node_class(&serde_json::from_value(spec).unwrap(), "");
        let null = json!({ "metadataOptions": null });
        assert_eq!(with(null.clone()), base);
        let mut terms = null.clone();
        merge(&mut terms, &json!({ "subnetSelectorTerms": [{ "id": "subnet-1" }], "amiSelectorTerms": [{ "id": "ami-1" }] }));
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
    fn the_kubelets_configuration_is_written_as_go_writes_it() {
        for (kubelet, text) in [
            (Value::Null, "null"),
            (json!({}), "null"),
            (json!({ "maxPods": 110, "clusterDNS": ["10.0.0.10"] }), r#"{"clusterDNS":["10.0.0.10"],"maxPods":110}"#),
            (
                json!({ "kubeReserved": { "cpu": "vcpus < 2 ? 60 : 70" }, "a": { "z": 1, "b": [true, null] } }),
                r#"{"a":{"b":[true,null],"z":1},"kubeReserved":{"cpu":"vcpus \u003c 2 ? 60 : 70"}}"#,
            ),
        ] {
            assert_eq!(kubelet_text(&kubelet), text);
        }
    }

    #[test]
    fn an_empty_list_that_is_present_counts() {
        let absent = node_pool_template(&pool(&json!({})));
        let empty = node_pool_template(&pool(&json!({ "spec": { "taints": [] } })));
        assert_ne!(absent, empty);
    }
}
