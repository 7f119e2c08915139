//! EC2NodeClass, `karpenter.k8s.aws/v1`.
//!
//! Members with a closed set of values are strings here and enums in the schema: an object that a newer schema accepted must not
//! break the watch.

#![allow(clippy::duplicated_attributes, reason = "printer columns of a CRD repeat arguments such as their type")]

pub mod selectors;
pub mod status;

use std::collections::BTreeMap;

use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::schema;

pub use crate::node_class::selectors::{
    AmiSelectorTerm, CapacityReservationSelectorTerm, PlacementGroupSelector, SecurityGroupSelectorTerm,
    SubnetSelectorTerm,
};
pub use crate::node_class::status::{
    AmiRequirement, AmiStatus, CapacityReservationStatus, Ec2NodeClassStatus, SecurityGroupStatus, SubnetStatus,
};

/// Launch configuration of instances: image, network, storage, identity.
#[derive(CustomResource, Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[kube(
    group = "karpenter.k8s.aws",
    version = "v1",
    kind = "EC2NodeClass",
    root = "Ec2NodeClass",
    plural = "ec2nodeclasses",
    singular = "ec2nodeclass",
    shortname = "ec2nc",
    shortname = "ec2ncs",
    category = "karpenter",
    status = "Ec2NodeClassStatus",
    derive = "PartialEq",
    doc = "Launch configuration of instances: image, network, storage, identity.",
    printcolumn(name = "Ready", type_ = "string", json_path = r#".status.conditions[?(@.type=="Ready")].status"#),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    printcolumn(name = "Role", type_ = "string", json_path = ".spec.role", priority = 1)
)]
#[serde(rename_all = "camelCase")]
pub struct Ec2NodeClassSpec {
    /// Subnets to launch instances in: all that match at least one term.
    #[serde(default)]
    #[schemars(length(max = 30))]
    pub subnet_selector_terms: Vec<SubnetSelectorTerm>,
    /// Security groups of the instances: all that match at least one term.
    #[serde(default)]
    #[schemars(length(max = 30))]
    pub security_group_selector_terms: Vec<SecurityGroupSelectorTerm>,
    /// Capacity reservations, used before other capacity: all that match at least one term.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 30))]
    pub capacity_reservation_selector_terms: Vec<CapacityReservationSelectorTerm>,
    /// Placement group to launch instances in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub placement_group_selector: Option<PlacementGroupSelector>,
    /// Whether instances get a public IPv4 address. Absent means the setting of the subnet.
    #[serde(default, rename = "associatePublicIPAddress", skip_serializing_if = "Option::is_none")]
    pub associate_public_ip_address: Option<bool>,
    /// Number of IP prefixes assigned to each network interface at launch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub ip_prefix_count: Option<i32>,
    /// Images to launch instances with: all that match at least one term.
    #[serde(default)]
    #[schemars(length(min = 1, max = 30))]
    pub ami_selector_terms: Vec<AmiSelectorTerm>,
    /// Operating system family of the image, which determines the user data format and the default volumes. Derived from the alias
    /// when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::ami_family")]
    pub ami_family: Option<String>,
    /// Custom user data, merged with the bootstrap configuration of the AMI family.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user_data: Option<String>,
    /// IAM role of the instances; the controller creates an instance profile with it. Mutually exclusive with `instanceProfile`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub role: Option<String>,
    /// Existing instance profile of the instances. Mutually exclusive with `role`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instance_profile: Option<String>,
    /// Tags of every EC2 resource that the controller creates for the class.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tags: Option<BTreeMap<String, String>>,
    /// Kubelet configuration, members of `kubelet.config.k8s.io/v1beta1`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::open_object")]
    pub kubelet: Option<BTreeMap<String, serde_json::Value>>,
    /// Volumes of the instances. Absent means the defaults of the AMI family.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 50))]
    pub block_device_mappings: Option<Vec<BlockDeviceMapping>>,
    /// Use of local NVMe disks. RAID0 combines them into one volume for ephemeral storage.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::instance_store_policy")]
    pub instance_store_policy: Option<String>,
    /// Network interfaces of the instances. Absent means a default for the instance type.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 150))]
    pub network_interfaces: Option<Vec<NetworkInterface>>,
    /// Whether detailed (one-minute) CloudWatch monitoring is enabled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub detailed_monitoring: Option<bool>,
    /// Options of the instance metadata service (IMDS).
    #[serde(default = "default_metadata_options", skip_serializing_if = "Option::is_none")]
    pub metadata_options: Option<MetadataOptions>,
    /// Idle timeouts of connection tracking.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub connection_tracking: Option<ConnectionTracking>,
    /// Context of CreateFleet requests, an opaque value issued by EC2.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub context: Option<String>,
    /// CPU options.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_options: Option<CpuOptions>,
    /// Nitro Enclaves.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub enclave_options: Option<EnclaveOptions>,
}

impl Ec2NodeClassSpec {
    /// Whether instances are enabled for Nitro Enclaves.
    pub fn has_enclaves(&self) -> bool {
        self.enclave_options.is_some_and(|options| options.enabled)
    }

    /// The AMI family in effect: `amiFamily`, else the family of the alias, else Custom.
    pub fn effective_ami_family(&self) -> &str {
        if let Some(family) = &self.ami_family {
            return family;
        }
        self.ami_selector_terms.iter().find_map(AmiSelectorTerm::alias_family).unwrap_or("Custom")
    }
}

/// A volume of an instance.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct BlockDeviceMapping {
    /// Device name, such as `/dev/xvda`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_name: Option<String>,
    /// The EBS volume.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ebs: Option<BlockDevice>,
    /// True for the single volume that holds the kubelet's data.
    #[serde(default, skip_serializing_if = "is_false")]
    pub root_volume: bool,
}

/// An EBS volume.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct BlockDevice {
    /// Whether the volume is deleted when the instance terminates.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub delete_on_termination: Option<bool>,
    /// Whether the volume is encrypted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encrypted: Option<bool>,
    /// Provisioned I/O operations per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub iops: Option<i64>,
    /// KMS key for the encryption: ID, alias or ARN.
    #[serde(default, rename = "kmsKeyID", skip_serializing_if = "Option::is_none")]
    pub kms_key_id: Option<String>,
    /// ID of the snapshot that the volume is created from.
    #[serde(default, rename = "snapshotID", skip_serializing_if = "Option::is_none")]
    pub snapshot_id: Option<String>,
    /// Provisioned throughput in MiB/s.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub throughput: Option<i64>,
    /// Rate in MiB/s at which the snapshot's blocks are downloaded to the volume.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 100, max = 300))]
    pub volume_initialization_rate: Option<i32>,
    /// Volume size, an integer with the unit Gi, G, Ti or T.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = schema::VOLUME_SIZE))]
    pub volume_size: Option<String>,
    /// EBS volume type.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::volume_type")]
    pub volume_type: Option<String>,
}

/// A network interface of an instance.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NetworkInterface {
    /// Index of the network card.
    #[schemars(range(min = 0))]
    pub network_card_index: i32,
    /// Device index of the interface.
    #[schemars(range(min = 0))]
    pub device_index: i32,
    /// Type of the interface: interface or efa-only.
    #[schemars(extend("enum" = ["interface", "efa-only"]))]
    pub interface_type: String,
}

/// Options of the instance metadata service (IMDS).
#[derive(Clone, Debug, Deserialize, JsonSchema, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct MetadataOptions {
    /// Whether the HTTP endpoint is reachable: enabled or disabled.
    #[serde(default = "enabled", skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::http_endpoint")]
    pub http_endpoint: Option<String>,
    /// Whether the IPv6 endpoint is reachable: enabled or disabled.
    #[serde(default = "disabled", rename = "httpProtocolIPv6", skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::http_protocol_ipv6")]
    pub http_protocol_ipv6: Option<String>,
    /// Maximum number of network hops of a response; with 1, pods without host network can't reach the service.
    #[serde(default = "one_hop", skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 64))]
    pub http_put_response_hop_limit: Option<i64>,
    /// Whether requests need a session token (IMDSv2): required or optional.
    #[serde(default = "required", skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::http_tokens")]
    pub http_tokens: Option<String>,
}

impl Default for MetadataOptions {
    /// The API server's defaults for an absent block.
    fn default() -> Self {
        Self {
            http_endpoint: enabled(),
            http_protocol_ipv6: disabled(),
            http_put_response_hop_limit: one_hop(),
            http_tokens: required(),
        }
    }
}

/// Idle timeouts of connection tracking, in seconds.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ConnectionTracking {
    /// Timeout of established TCP connections.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 60, max = 432_000))]
    pub tcp_established_timeout: Option<i32>,
    /// Timeout of UDP flows with more than one request and response.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 60, max = 180))]
    pub udp_stream_timeout: Option<i32>,
    /// Timeout of UDP flows with traffic in one direction or a single request and response.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 30, max = 60))]
    pub udp_timeout: Option<i32>,
}

/// CPU options.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct CpuOptions {
    /// Nested virtualization on the instance: enabled or disabled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::enabled_or_disabled")]
    pub nested_virtualization: Option<String>,
}

/// Options of Nitro Enclaves.
#[derive(Clone, Copy, Debug, Default, Deserialize, JsonSchema, PartialEq, Eq, Serialize)]
pub struct EnclaveOptions {
    /// Whether the instance is enabled for Nitro Enclaves; instance types are then restricted to those that support them.
    pub enabled: bool,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes the field by reference")]
fn is_false(value: &bool) -> bool {
    !value
}

// Defaults of optional members, the same as the API server's.
#[expect(clippy::unnecessary_wraps, reason = "serde requires a value of the field's type")]
fn default_metadata_options() -> Option<MetadataOptions> {
    Some(MetadataOptions::default())
}
#[expect(clippy::unnecessary_wraps, reason = "serde requires a value of the field's type")]
fn enabled() -> Option<String> {
    Some("enabled".into())
}
#[expect(clippy::unnecessary_wraps, reason = "serde requires a value of the field's type")]
fn disabled() -> Option<String> {
    Some("disabled".into())
}
#[expect(clippy::unnecessary_wraps, reason = "serde requires a value of the field's type")]
fn one_hop() -> Option<i64> {
    Some(1)
}
#[expect(clippy::unnecessary_wraps, reason = "serde requires a value of the field's type")]
fn required() -> Option<String> {
    Some("required".into())
}
