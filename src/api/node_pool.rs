//! NodePool, `karpenter.sh/v1`.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Taint;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Desired nodes of one kind.
#[derive(CustomResource, Clone, Debug, Deserialize, JsonSchema, PartialEq, Serialize)]
#[kube(group = "karpenter.sh", version = "v1", kind = "NodePool", plural = "nodepools", status = "NodePoolStatus")]
#[serde(rename_all = "camelCase")]
pub struct NodePoolSpec {
    /// Template of the NodeClaims this pool makes.
    pub template: NodeClaimTemplate,
    /// When nodes may be disrupted.
    #[serde(default)]
    pub disruption: Disruption,
    /// Upper bound on the sum of the pool's capacity.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limits: Option<BTreeMap<String, Quantity>>,
    /// 1 to 100, higher first; absent is 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight: Option<i32>,
    /// Static pool size.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replicas: Option<i64>,
}

/// Template of a NodeClaim.
#[derive(Clone, Debug, Deserialize, JsonSchema, PartialEq, Serialize)]
pub struct NodeClaimTemplate {
    /// Labels and annotations of the nodes.
    #[serde(default)]
    pub metadata: TemplateMetadata,
    /// What the nodes must be.
    pub spec: NodeClaimTemplateSpec,
}

/// Labels and annotations copied to nodes.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
pub struct TemplateMetadata {
    /// Labels of the nodes.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Annotations of the nodes.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
}

/// What the nodes of a pool must be.
#[derive(Clone, Debug, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeClaimTemplateSpec {
    /// Permanent taints.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub taints: Vec<Taint>,
    /// Taints that something on the node removes during start-up.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub startup_taints: Vec<Taint>,
    /// Requirements on instance type, zone, capacity type and labels.
    pub requirements: Vec<Requirement>,
    /// The EC2NodeClass.
    pub node_class_ref: NodeClassRef,
    /// Longest drain.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub termination_grace_period: Option<String>,
    /// Age at which a node is replaced; `Never` or a duration.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expire_after: Option<String>,
}

/// A requirement on a label, with Karpenter's `minValues`.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Requirement {
    /// Label key.
    pub key: String,
    /// In, NotIn, Exists, DoesNotExist, Gt, Lt, Gte, Lte.
    pub operator: String,
    /// Values of the operator.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub values: Vec<String>,
    /// Fewest distinct values that must stay possible.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min_values: Option<i64>,
}

/// Reference to an EC2NodeClass.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Eq, Serialize)]
pub struct NodeClassRef {
    /// API group.
    pub group: String,
    /// Kind.
    pub kind: String,
    /// Name.
    pub name: String,
}

/// When nodes may be disrupted.
#[derive(Clone, Debug, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Disruption {
    /// Quiet time before consolidation; `Never` or a duration.
    #[serde(default = "zero_seconds")]
    pub consolidate_after: String,
    /// WhenEmpty, WhenEmptyOrUnderutilized or Balanced.
    #[serde(default = "when_empty_or_underutilized")]
    pub consolidation_policy: String,
    /// How many nodes at once.
    #[serde(default = "ten_percent")]
    pub budgets: Vec<Budget>,
}

fn zero_seconds() -> String {
    "0s".into()
}
fn when_empty_or_underutilized() -> String {
    "WhenEmptyOrUnderutilized".into()
}
fn ten_percent() -> Vec<Budget> {
    vec![Budget { nodes: "10%".into(), ..Budget::default() }]
}

impl Default for Disruption {
    fn default() -> Self {
        Self {
            consolidate_after: zero_seconds(),
            consolidation_policy: when_empty_or_underutilized(),
            budgets: ten_percent(),
        }
    }
}

/// A bound on simultaneous disruption.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Eq, Serialize)]
pub struct Budget {
    /// A count or a percentage.
    pub nodes: String,
    /// Reasons it applies to; absent is all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasons: Option<Vec<String>>,
    /// Cron schedule (UTC) of its activation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub schedule: Option<String>,
    /// How long it stays active.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub duration: Option<String>,
}

/// Observed state of a NodePool.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NodePoolStatus {
    /// Sum of the capacity of the pool's nodes.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub resources: BTreeMap<String, Quantity>,
    /// Number of nodes.
    #[serde(default)]
    pub nodes: Option<i64>,
    /// Generation of the node class last seen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node_class_observed_generation: Option<i64>,
    /// Conditions.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
}
