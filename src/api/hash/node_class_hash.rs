//! The drift hash of an EC2NodeClass.

use serde_json::Value;

use crate::Ec2NodeClassSpec;
use crate::hash::go::{Struct, boolean, int32, int64, non_empty, non_false, set, string, strings, text};
use crate::hash::kubelet;

/// A version of the algorithm, for `karpenter.k8s.aws/ec2nodeclass-hash-version`. Each release of Karpenter writes its own version, and
/// computes hashes of any other version again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NodeClassVersion {
    /// Of Karpenter 1.14. What that release does not know is hashed in addition: fields since 1.15, and members of `kubelet` that were
    /// not in its schema. It cannot have launched a node with them.
    V5,
    /// Of Karpenter 1.15.
    #[default]
    V6,
}

impl NodeClassVersion {
    /// The version that an EC2NodeClass with this annotation keeps: its own if it is known, so that the hashes of its NodeClaims remain
    /// comparable and the Karpenter that wrote them finds its own version again.
    pub fn kept(annotation: Option<&str>) -> Self {
        let known = [Self::V5, Self::V6].into_iter().find(|version| annotation == Some(version.as_str()));
        known.unwrap_or_default()
    }

    /// The value of the annotation.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::V5 => "v5",
            Self::V6 => "v6",
        }
    }
}

/// Drift hash of an EC2NodeClass, in decimal. `ca_bundle` is the cluster's CA in base64, as in the user data; empty when there is
/// no CA. Selector terms are not hashed: drift compares the resources that they select.
///
/// # Panics
/// Never: every EC2NodeClass can be written as JSON.
pub fn node_class(spec: &Ec2NodeClassSpec, version: NodeClassVersion, ca_bundle: &str) -> String {
    let family = text(spec.effective_ami_family());
    let spec = serde_json::to_value(spec).expect("an EC2NodeClass is JSON: its maps have strings as keys");
    let enclave = spec["enclaveOptions"].is_object().then(|| enclave_options(&spec["enclaveOptions"]));
    let hash = match version {
        NodeClassVersion::V5 => {
            let (kubelet, unknown) = kubelet::v5(&spec["kubelet"]);
            fields(&spec, kubelet, None) ^ unknown ^ enclave.unwrap_or(0)
        }
        NodeClassVersion::V6 => fields(&spec, None, enclave) ^ text(&kubelet::json(&spec["kubelet"])),
    };
    (hash ^ family ^ text(ca_bundle)).to_string()
}

/// The struct `EC2NodeClassSpec`.
fn fields(spec: &Value, kubelet: Option<u64>, enclave_options: Option<u64>) -> u64 {
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
    Struct::new("EC2NodeClassSpec")
        .field("PlacementGroupSelector", selector.is_object().then(|| placement.finish()))
        .field("AssociatePublicIPAddress", boolean(&spec["associatePublicIPAddress"]))
        .field("UserData", string(&spec["userData"]))
        .field("Role", non_empty(&spec["role"]))
        .field("InstanceProfile", string(&spec["instanceProfile"]))
        .field("Tags", strings(&spec["tags"]))
        .field("Kubelet", kubelet)
        .field("BlockDeviceMappings", set(&spec["blockDeviceMappings"], |mapping| Some(block_device_mapping(mapping))))
        .field("InstanceStorePolicy", string(&spec["instanceStorePolicy"]))
        .field("NetworkInterfaces", set(&spec["networkInterfaces"], |interface| Some(network_interface(interface))))
        .field("DetailedMonitoring", boolean(&spec["detailedMonitoring"]))
        .field("MetadataOptions", metadata.is_object().then(|| metadata_options.finish()))
        .field("ConnectionTracking", tracking.is_object().then(|| connection_tracking.finish()))
        .field("Context", string(&spec["context"]))
        .field("CPUOptions", cpu.is_object().then(|| cpu_options.finish()))
        .field("EnclaveOptions", enclave_options)
        .finish()
}

fn enclave_options(options: &Value) -> u64 {
    Struct::new("EnclaveOptions").field("Enabled", non_false(&options["enabled"])).finish()
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
        .field("RootVolume", non_false(&mapping["rootVolume"]))
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

#[cfg(test)]
mod tests;
