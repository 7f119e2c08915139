//! The drift hash of an EC2NodeClass.

use serde_json::{Map, Value};

use crate::api::Ec2NodeClassSpec;
use crate::api::hash::go::{Struct, boolean, int32, int64, non_empty, set, string, strings, text};

/// Version of [`node_class`], for `karpenter.k8s.aws/ec2nodeclass-hash-version`.
pub const NODE_CLASS_VERSION: &str = "v6";

/// Drift hash of an EC2NodeClass, in decimal. `ca_bundle` is the cluster's CA in base64, as in the user data; empty when there is
/// no CA. Selector terms are not hashed: drift compares the resources that they select.
///
/// # Panics
/// Never: every EC2NodeClass can be written as JSON.
pub fn node_class(spec: &Ec2NodeClassSpec, ca_bundle: &str) -> String {
    let family = spec.effective_ami_family();
    let spec = serde_json::to_value(spec).expect("an EC2NodeClass is JSON: its maps have strings as keys");
    node_class_spec(&spec, family, ca_bundle)
}

/// [`node_class`] of the JSON of `spec`, which distinguishes an empty list from an absent list.
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
    let cpu_options = Struct::new("CPUOptions").field("NestedVirtualization", string(&cpu["nestedVirtualization"]));
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

/// Quantities are hashed in the canonical form of Kubernetes: the largest unit that keeps the number whole, so 1024Gi is 1Ti.
fn canonical_volume_size(size: &str) -> String {
    let digits = size.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = size.split_at(digits);
    let Ok(mut number) = number.parse::<u64>() else {
        return size.to_owned();
    };
    if number == 0 {
        return "0".into();
    }
    let (step, units): (u64, &[&str]) =
        if unit.ends_with('i') { (1024, &["Gi", "Ti", "Pi", "Ei"]) } else { (1000, &["G", "T", "P", "E"]) };
    let Some(mut index) = units.iter().position(|known| *known == unit) else {
        return size.to_owned();
    };
    while number % step == 0 && index + 1 < units.len() {
        number /= step;
        index += 1;
    }
    format!("{number}{}", units[index])
}

/// The kubelet configuration as Go's JSON encoder writes it: compact, keys sorted, `null` when absent.
fn kubelet_text(kubelet: &Value) -> String {
    let Some(members) = kubelet.as_object().filter(|members| !members.is_empty()) else {
        return "null".into();
    };
    let mut json = String::new();
    write_sorted(&mut json, members);
    // Go's JSON encoder escapes the characters that are special in HTML.
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

#[cfg(test)]
mod tests;
