//! Observed state of an EC2NodeClass.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::schema;

/// Observed state of an EC2NodeClass.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Ec2NodeClassStatus {
    /// Selected subnets, by number of free addresses in descending order, then by ID.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub subnets: Vec<SubnetStatus>,
    /// Selected security groups, ordered by ID.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub security_groups: Vec<SecurityGroupStatus>,
    /// Selected capacity reservations, ordered by ID.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub capacity_reservations: Vec<CapacityReservationStatus>,
    /// Selected images, newest first, then by ID.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub amis: Vec<AmiStatus>,
    /// Instance profile in use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instance_profile: Option<String>,
    /// Conditions: one for each resolved resource, ValidationSucceeded and Ready.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::conditions")]
    pub conditions: Vec<Condition>,
}

/// A selected subnet.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Eq, Serialize)]
pub struct SubnetStatus {
    /// Subnet ID.
    pub id: String,
    /// Zone name.
    pub zone: String,
    /// Zone ID; absent in objects written by old versions.
    #[serde(default, rename = "zoneID", skip_serializing_if = "Option::is_none")]
    pub zone_id: Option<String>,
}

/// A selected security group.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Eq, Serialize)]
pub struct SecurityGroupStatus {
    /// Security group ID.
    pub id: String,
    /// Group name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

/// A selected capacity reservation.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct CapacityReservationStatus {
    /// Zone name.
    pub availability_zone: String,
    /// Time at which the reservation ends.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub end_time: Option<Time>,
    /// Capacity reservation ID.
    #[schemars(regex(pattern = "^cr-[0-9a-z]+$"))]
    pub id: String,
    /// Instance match criteria: open or targeted.
    #[schemars(extend("enum" = ["open", "targeted"]))]
    pub instance_match_criteria: String,
    /// Instance type of the reserved capacity.
    pub instance_type: String,
    /// AWS account that owns the reservation.
    #[serde(rename = "ownerID")]
    #[schemars(regex(pattern = "^[0-9]{12}$"))]
    pub owner_id: String,
    /// Type of the reservation: default or capacity-block.
    #[serde(default = "default_reservation")]
    #[schemars(extend("enum" = ["default", "capacity-block"]))]
    pub reservation_type: String,
    /// Whether the owner can interrupt instances in the reservation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interruptible: Option<bool>,
    /// State of the reservation: active or expiring.
    #[serde(default = "active")]
    #[schemars(extend("enum" = ["active", "expiring"]))]
    pub state: String,
}

/// A selected image.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Eq, Serialize)]
pub struct AmiStatus {
    /// Image ID.
    pub id: String,
    /// Image name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Whether the image is deprecated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deprecated: Option<bool>,
    /// Requirements on the instance types that the image supports.
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

// Defaults of members, the same as the API server's.
fn default_reservation() -> String {
    "default".into()
}
fn active() -> String {
    "active".into()
}
