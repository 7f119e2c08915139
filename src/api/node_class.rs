//! EC2NodeClass, `karpenter.k8s.aws/v1`.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How instances are made.
#[derive(CustomResource, Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[kube(group = "karpenter.k8s.aws", version = "v1", kind = "EC2NodeClass", root = "Ec2NodeClass", plural = "ec2nodeclasses", status = "Ec2NodeClassStatus")]
#[serde(rename_all = "camelCase")]
pub struct Ec2NodeClassSpec {
    /// IAM role of the instances.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub role: Option<String>,
}

/// Observed state of an EC2NodeClass.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
pub struct Ec2NodeClassStatus {
    /// Conditions.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
}
