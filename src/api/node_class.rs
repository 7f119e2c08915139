//! EC2NodeClass, `karpenter.k8s.aws/v1`.
//!
//! Members with a closed set of values are strings here and enums in the schema: an object that a newer schema let in must
//! not stop a watch of all of them.

#![allow(clippy::duplicated_attributes, reason = "columns of a CRD share members such as their type")]

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::api::schema;

/// How instances are made: image, network, storage, identity.
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
    doc = "How instances are made: image, network, storage, identity.",
    printcolumn(name = "Ready", type_ = "string", json_path = r#".status.conditions[?(@.type=="Ready")].status"#),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    printcolumn(name = "Role", type_ = "string", json_path = ".spec.role", priority = 1)
)]
#[serde(rename_all = "camelCase")]
pub struct Ec2NodeClassSpec {
    /// Subnets instances may start in; a subnet that any term matches is in.
    #[serde(default)]
    #[schemars(length(max = 30))]
    pub subnet_selector_terms: Vec<SubnetSelectorTerm>,
    /// Security groups of the instances; a group that any term matches is in.
    #[serde(default)]
    #[schemars(length(max = 30))]
    pub security_group_selector_terms: Vec<SecurityGroupSelectorTerm>,
    /// Capacity reservations to use before anything else; a reservation that any term matches is in.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 30))]
    pub capacity_reservation_selector_terms: Vec<CapacityReservationSelectorTerm>,
    /// Placement group to start instances in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub placement_group_selector: Option<PlacementGroupSelector>,
    /// Whether instances get a public IPv4 address; absent leaves it to the subnet.
    #[serde(default, rename = "associatePublicIPAddress", skip_serializing_if = "Option::is_none")]
    pub associate_public_ip_address: Option<bool>,
    /// Number of IP prefixes given to each network interface at launch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub ip_prefix_count: Option<i32>,
    /// Images instances may run; an image that any term matches is in.
    #[serde(default)]
    #[schemars(length(min = 1, max = 30))]
    pub ami_selector_terms: Vec<AmiSelectorTerm>,
    /// How the image is booted: format of its user data, default volumes. Follows from an alias when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::ami_family")]
    pub ami_family: Option<String>,
    /// User data, merged with what the AMI family needs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user_data: Option<String>,
    /// IAM role of the instances; an instance profile is made for it. Excludes `instanceProfile`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub role: Option<String>,
    /// Instance profile of the instances, made by the user. Excludes `role`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instance_profile: Option<String>,
    /// Tags of every EC2 resource made.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub tags: BTreeMap<String, String>,
    /// Members of the kubelet's configuration, `kubelet.config.k8s.io/v1beta1`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::open_object")]
    pub kubelet: Option<BTreeMap<String, serde_json::Value>>,
    /// Volumes of the instances; absent is what the AMI family has by default.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 50))]
    pub block_device_mappings: Vec<BlockDeviceMapping>,
    /// What to do with local NVMe disks; RAID0 makes one volume of them for pods.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::instance_store_policy")]
    pub instance_store_policy: Option<String>,
    /// Network interfaces of the instances; absent is what fits the instance type.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 150))]
    pub network_interfaces: Vec<NetworkInterface>,
    /// Whether CloudWatch gets figures each minute.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub detailed_monitoring: Option<bool>,
    /// Access to the instance metadata service.
    #[serde(default = "default_metadata_options", skip_serializing_if = "Option::is_none")]
    pub metadata_options: Option<MetadataOptions>,
    /// Idle timeouts of tracked connections.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub connection_tracking: Option<ConnectionTracking>,
    /// CreateFleet context, an opaque value that EC2 gives.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub context: Option<String>,
    /// Processor options.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_options: Option<CpuOptions>,
}

impl Ec2NodeClassSpec {
    /// The AMI family that counts: `amiFamily`, else the alias's, else Custom.
    pub fn effective_ami_family(&self) -> &str {
        if let Some(family) = &self.ami_family {
            return family;
        }
        self.ami_selector_terms.iter().find_map(AmiSelectorTerm::alias_family).unwrap_or("Custom")
    }
}

/// Selects subnets by tags or by id.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Eq, Serialize)]
pub struct SubnetSelectorTerm {
    /// Tags the subnet must have; the value `*` asks for the key only.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(schema_with = "schema::selector_tags")]
    pub tags: BTreeMap<String, String>,
    /// Subnet id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = "subnet-[0-9a-z]+"))]
    pub id: Option<String>,
}

/// Selects security groups by tags, by id or by name.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Eq, Serialize)]
pub struct SecurityGroupSelectorTerm {
    /// Tags the group must have; the value `*` asks for the key only.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(schema_with = "schema::selector_tags")]
    pub tags: BTreeMap<String, String>,
    /// Security group id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = "sg-[0-9a-z]+"))]
    pub id: Option<String>,
    /// Group name (the field, not the Name tag).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

/// Selects capacity reservations by tags, by id or by match criteria.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct CapacityReservationSelectorTerm {
    /// Tags the reservation must have; the value `*` asks for the key only.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(schema_with = "schema::selector_tags")]
    pub tags: BTreeMap<String, String>,
    /// Capacity reservation id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = "^cr-[0-9a-z]+$"))]
    pub id: Option<String>,
    /// AWS account that owns the reservation.
    #[serde(default, rename = "ownerID", skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = "^[0-9]{12}$"))]
    pub owner_id: Option<String>,
    /// Which instances the reservation takes: open or targeted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::instance_match_criteria")]
    pub instance_match_criteria: Option<String>,
}

/// Selects a placement group by name or by id.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Eq, Serialize)]
pub struct PlacementGroupSelector {
    /// Placement group name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1))]
    pub name: Option<String>,
    /// Placement group id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = "^pg-[0-9a-z]+$"))]
    pub id: Option<String>,
}

/// Selects images.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct AmiSelectorTerm {
    /// `family@version`, as `al2023@latest` or `bottlerocket@v1.20.4`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 30))]
    pub alias: Option<String>,
    /// Tags the image must have; the value `*` asks for the key only.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(schema_with = "schema::selector_tags")]
    pub tags: BTreeMap<String, String>,
    /// Image id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = "ami-[0-9a-z]+"))]
    pub id: Option<String>,
    /// Image name (the field, not the Name tag); `*` and `?` are wildcards.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Owner of the image: an account id, `self`, `amazon` or `aws-marketplace`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// Name or ARN of the SSM parameter that holds the image id.
    #[serde(default, rename = "ssmParameter", skip_serializing_if = "Option::is_none")]
    pub ssm_parameter: Option<String>,
}

impl AmiSelectorTerm {
    /// The AMI family of the term's alias, as `AL2023`; nothing without an alias or with one of no known family.
    pub fn alias_family(&self) -> Option<&'static str> {
        let (family, _) = self.alias.as_deref()?.split_once('@')?;
        ALIAS_FAMILIES.iter().find(|(alias, _)| *alias == family).map(|(_, family)| *family)
    }
}

/// Family part of an alias, and the AMI family it stands for.
pub const ALIAS_FAMILIES: [(&str, &str); 6] = [
    ("al2", "AL2"),
    ("al2023", "AL2023"),
    ("bottlerocket", "Bottlerocket"),
    ("windows2019", "Windows2019"),
    ("windows2022", "Windows2022"),
    ("windows2025", "Windows2025"),
];

/// A volume of an instance.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct BlockDeviceMapping {
    /// Device name, as `/dev/xvda`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_name: Option<String>,
    /// The EBS volume.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ebs: Option<BlockDevice>,
    /// True for the one volume that holds the kubelet's data.
    #[serde(default, skip_serializing_if = "is_false")]
    pub root_volume: bool,
}

/// An EBS volume.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct BlockDevice {
    /// Whether the volume goes when the instance does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub delete_on_termination: Option<bool>,
    /// Whether it is encrypted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encrypted: Option<bool>,
    /// Provisioned operations per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub iops: Option<i64>,
    /// KMS key: id, alias or ARN.
    #[serde(default, rename = "kmsKeyID", skip_serializing_if = "Option::is_none")]
    pub kms_key_id: Option<String>,
    /// Snapshot it starts from.
    #[serde(default, rename = "snapshotID", skip_serializing_if = "Option::is_none")]
    pub snapshot_id: Option<String>,
    /// Provisioned throughput, MiB/s.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub throughput: Option<i64>,
    /// Rate at which the snapshot is copied in, MiB/s.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 100, max = 300))]
    pub volume_initialization_rate: Option<i32>,
    /// Size, whole Gi, G, Ti or T.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = schema::VOLUME_SIZE))]
    pub volume_size: Option<String>,
    /// Volume type.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::volume_type")]
    pub volume_type: Option<String>,
}

/// A network interface of an instance.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NetworkInterface {
    /// Network card.
    #[schemars(range(min = 0))]
    pub network_card_index: i32,
    /// Device on the card.
    #[schemars(range(min = 0))]
    pub device_index: i32,
    /// interface or efa-only.
    #[schemars(extend("enum" = ["interface", "efa-only"]))]
    pub interface_type: String,
}

/// Access to the instance metadata service.
#[derive(Clone, Debug, Deserialize, JsonSchema, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct MetadataOptions {
    /// Whether the service answers at all: enabled or disabled.
    #[serde(default = "enabled", skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::http_endpoint")]
    pub http_endpoint: Option<String>,
    /// Whether it answers on IPv6: enabled or disabled.
    #[serde(default = "disabled", rename = "httpProtocolIPv6", skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::http_protocol_ipv6")]
    pub http_protocol_ipv6: Option<String>,
    /// Hops its answer may travel; 1 keeps it from pods without host network.
    #[serde(default = "one_hop", skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 64))]
    pub http_put_response_hop_limit: Option<i64>,
    /// Whether a session token is needed: required or optional.
    #[serde(default = "required", skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::http_tokens")]
    pub http_tokens: Option<String>,
}

impl Default for MetadataOptions {
    /// What the API server stores when the block is absent.
    fn default() -> Self {
        Self {
            http_endpoint: enabled(),
            http_protocol_ipv6: disabled(),
            http_put_response_hop_limit: one_hop(),
            http_tokens: required(),
        }
    }
}

/// Idle timeouts of tracked connections, in seconds.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ConnectionTracking {
    /// Of established TCP connections.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 60, max = 432_000))]
    pub tcp_established_timeout: Option<i32>,
    /// Of UDP flows with more than one request and response.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 60, max = 180))]
    pub udp_stream_timeout: Option<i32>,
    /// Of UDP flows with traffic in one direction or a single request and response.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 30, max = 60))]
    pub udp_timeout: Option<i32>,
}

/// Processor options.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct CpuOptions {
    /// Whether virtual machines may run inside the instance: enabled or disabled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::enabled_or_disabled")]
    pub nested_virtualization: Option<String>,
}

/// Observed state of an EC2NodeClass.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Ec2NodeClassStatus {
    /// Subnets the terms select: most free addresses first, then by id.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub subnets: Vec<SubnetStatus>,
    /// Security groups the terms select, by id.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub security_groups: Vec<SecurityGroupStatus>,
    /// Capacity reservations the terms select, by id.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub capacity_reservations: Vec<CapacityReservationStatus>,
    /// Images the terms select: newest first, then by id.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub amis: Vec<AmiStatus>,
    /// Instance profile in use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instance_profile: Option<String>,
    /// What is resolved, ValidationSucceeded and Ready.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::conditions")]
    pub conditions: Vec<Condition>,
}

/// A subnet in use.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Eq, Serialize)]
pub struct SubnetStatus {
    /// Subnet id.
    pub id: String,
    /// Zone name.
    pub zone: String,
    /// Zone id; absent in objects of old versions.
    #[serde(default, rename = "zoneID", skip_serializing_if = "Option::is_none")]
    pub zone_id: Option<String>,
}

/// A security group in use.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Eq, Serialize)]
pub struct SecurityGroupStatus {
    /// Security group id.
    pub id: String,
    /// Group name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

/// A capacity reservation in use.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct CapacityReservationStatus {
    /// Zone name.
    pub availability_zone: String,
    /// When the reservation ends.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub end_time: Option<Time>,
    /// Capacity reservation id.
    #[schemars(regex(pattern = "^cr-[0-9a-z]+$"))]
    pub id: String,
    /// Which instances it takes: open or targeted.
    #[schemars(extend("enum" = ["open", "targeted"]))]
    pub instance_match_criteria: String,
    /// Instance type it holds.
    pub instance_type: String,
    /// AWS account that owns it.
    #[serde(rename = "ownerID")]
    #[schemars(regex(pattern = "^[0-9]{12}$"))]
    pub owner_id: String,
    /// default or capacity-block.
    #[serde(default = "default_reservation")]
    #[schemars(extend("enum" = ["default", "capacity-block"]))]
    pub reservation_type: String,
    /// Whether its instances can be taken back by the owner.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interruptible: Option<bool>,
    /// active or expiring.
    #[serde(default = "active")]
    #[schemars(extend("enum" = ["active", "expiring"]))]
    pub state: String,
}

/// An image in use.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Eq, Serialize)]
pub struct AmiStatus {
    /// Image id.
    pub id: String,
    /// Image name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Whether its owner has deprecated it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deprecated: Option<bool>,
    /// Which instance types it boots on.
    pub requirements: Vec<AmiRequirement>,
}

/// A requirement on the labels of an instance type.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Eq, Serialize)]
pub struct AmiRequirement {
    /// Label key.
    pub key: String,
    /// In, NotIn, Exists, DoesNotExist, Gt or Lt.
    pub operator: String,
    /// Values of the operator.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "atomic"))]
    pub values: Vec<String>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes the field by reference")]
fn is_false(value: &bool) -> bool {
    !value
}

// Defaults of optional members: what the API server would have stored.
#[expect(clippy::unnecessary_wraps, reason = "serde wants a value of the field's type")]
fn default_metadata_options() -> Option<MetadataOptions> {
    Some(MetadataOptions::default())
}
#[expect(clippy::unnecessary_wraps, reason = "serde wants a value of the field's type")]
fn enabled() -> Option<String> {
    Some("enabled".into())
}
#[expect(clippy::unnecessary_wraps, reason = "serde wants a value of the field's type")]
fn disabled() -> Option<String> {
    Some("disabled".into())
}
#[expect(clippy::unnecessary_wraps, reason = "serde wants a value of the field's type")]
fn one_hop() -> Option<i64> {
    Some(1)
}
#[expect(clippy::unnecessary_wraps, reason = "serde wants a value of the field's type")]
fn required() -> Option<String> {
    Some("required".into())
}
fn default_reservation() -> String {
    "default".into()
}
fn active() -> String {
    "active".into()
}
