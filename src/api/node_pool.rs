//! NodePool, `karpenter.sh/v1`.

#![allow(clippy::duplicated_attributes, reason = "printer columns of a CRD repeat arguments such as their type")]

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Taint;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::schema;

/// A template for nodes, with limits on their number and size and rules for their disruption.
#[derive(CustomResource, Clone, Debug, Deserialize, JsonSchema, PartialEq, Serialize)]
#[kube(
    group = "karpenter.sh",
    version = "v1",
    kind = "NodePool",
    plural = "nodepools",
    singular = "nodepool",
    category = "karpenter",
    status = "NodePoolStatus",
    derive = "PartialEq",
    doc = "A template for nodes, with limits on their number and size and rules for their disruption.",
    scale(spec_replicas_path = ".spec.replicas", status_replicas_path = ".status.nodes"),
    printcolumn(name = "NodeClass", type_ = "string", json_path = ".spec.template.spec.nodeClassRef.name"),
    printcolumn(name = "Nodes", type_ = "string", json_path = ".status.nodes"),
    printcolumn(name = "Ready", type_ = "string", json_path = r#".status.conditions[?(@.type=="Ready")].status"#),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    printcolumn(name = "Weight", type_ = "integer", json_path = ".spec.weight", priority = 1),
    printcolumn(name = "CPU", type_ = "string", json_path = ".status.resources.cpu", priority = 1),
    printcolumn(name = "Memory", type_ = "string", json_path = ".status.resources.memory", priority = 1)
)]
#[serde(rename_all = "camelCase")]
pub struct NodePoolSpec {
    /// Template of the pool's NodeClaims. Nodes drift and are replaced when it changes; a change of requirements replaces only the
    /// nodes that no longer satisfy them.
    pub template: NodeClaimTemplate,
    /// Rules for voluntary disruption of the nodes.
    #[serde(default)]
    #[schemars(extend("default" = { "consolidateAfter": "0s" }))]
    pub disruption: Disruption,
    /// Maximum total capacity of the pool's nodes, by resource; `nodes` limits the number of nodes, and `stowage.dev/usd-per-hour` the sum of their
    /// prices.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::quantities")]
    pub limits: Option<BTreeMap<String, Quantity>>,
    /// Preference among NodePools, 1 to 100; pools with a higher weight are used first. Absent means 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 100))]
    pub weight: Option<i32>,
    /// Number of nodes of a static pool, independent of pods. Absent means a dynamic pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub replicas: Option<i64>,
}

/// Template of a NodeClaim.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
pub struct NodeClaimTemplate {
    /// Labels and annotations of the nodes.
    #[serde(default, skip_serializing_if = "TemplateMetadata::is_absent")]
    pub metadata: TemplateMetadata,
    /// Specification of the nodes.
    pub spec: NodeClaimTemplateSpec,
}

/// Labels and annotations copied to NodeClaims and nodes.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
pub struct TemplateMetadata {
    /// Labels of the nodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::template_labels")]
    pub labels: Option<BTreeMap<String, String>>,
    /// Annotations of the nodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-map-type" = "granular"))]
    pub annotations: Option<BTreeMap<String, String>>,
}

impl TemplateMetadata {
    /// True if labels and annotations are absent.
    pub fn is_absent(&self) -> bool {
        self.labels.is_none() && self.annotations.is_none()
    }
}

/// Specification of a pool's nodes.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeClaimTemplateSpec {
    /// Permanent taints: a pod must tolerate them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::taints")]
    pub taints: Option<Vec<Taint>>,
    /// Taints that another component removes while a node starts: a pod need not tolerate them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::taints")]
    pub startup_taints: Option<Vec<Taint>>,
    /// Requirements on instance type, zone, capacity type and labels; every node satisfies all of them.
    #[schemars(length(max = 100), extend("x-kubernetes-list-type" = "atomic"))]
    pub requirements: Vec<Requirement>,
    /// The EC2NodeClass with the launch configuration of the instances.
    pub node_class_ref: NodeClassRef,
    /// Maximum time that a drain may take, such as `1h30m`; the remaining pods are then deleted. Absent means no maximum.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = schema::DURATION))]
    pub termination_grace_period: Option<String>,
    /// Age at which a node is replaced: `Never` or a duration such as `720h`.
    #[serde(default = "thirty_days", skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = schema::DURATION_OR_NEVER))]
    pub expire_after: Option<String>,
}

/// The API server's default of `expireAfter`, for objects that were not read from an API server.
#[expect(clippy::unnecessary_wraps, reason = "serde requires a value of the field's type")]
pub(crate) fn thirty_days() -> Option<String> {
    Some("720h".into())
}

/// A requirement on a label of the node, with Karpenter's `minValues`.
#[derive(Clone, Debug, Default, Deserialize, Hash, JsonSchema, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Requirement {
    /// Label key.
    #[schemars(length(max = 316), regex(pattern = schema::QUALIFIED_NAME))]
    pub key: String,
    /// In, NotIn, Exists, DoesNotExist, Gt, Lt, Gte or Lte.
    #[schemars(extend("enum" = ["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt", "Gte", "Lte"]))]
    pub operator: String,
    /// Values of the operator: at least one for In, one non-negative integer for Gt, Lt, Gte and Lte, none for Exists and
    /// DoesNotExist.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(
        inner(length(max = 63), regex(pattern = schema::LABEL_VALUE)),
        extend("x-kubernetes-list-type" = "atomic")
    )]
    pub values: Vec<String>,
    /// Minimum number of distinct values of this key among the instance types of a launch request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 50))]
    pub min_values: Option<i64>,
}

/// Reference to the object with the launch configuration of the instances.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Eq, Serialize)]
pub struct NodeClassRef {
    /// API group, such as `karpenter.k8s.aws`.
    #[schemars(regex(pattern = "^[^/]*$"))]
    pub group: String,
    /// Kind, such as `EC2NodeClass`.
    pub kind: String,
    /// Name.
    pub name: String,
}

impl NodeClassRef {
    /// Whether it names an EC2NodeClass of `karpenter.k8s.aws`. Other providers, such as EKS Auto Mode, use NodePools and NodeClaims of the
    /// same kind with classes of their own.
    pub fn is_ours(&self) -> bool {
        self.group == "karpenter.k8s.aws" && self.kind == "EC2NodeClass"
    }
}

/// Rules for voluntary disruption of the nodes.
#[derive(Clone, Debug, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Disruption {
    /// Time since the last pod event on a node before it may be consolidated: `Never` or a duration such as `30s`.
    #[serde(default = "zero_seconds")]
    #[schemars(regex(pattern = schema::DURATION_OR_NEVER))]
    pub consolidate_after: String,
    /// Nodes that may be consolidated: WhenEmpty, WhenEmptyOrUnderutilized or Balanced.
    #[serde(default = "when_empty_or_underutilized")]
    #[schemars(extend("enum" = ["WhenEmpty", "WhenEmptyOrUnderutilized", "Balanced"]))]
    pub consolidation_policy: String,
    /// Limits on the number of nodes disrupted at once; the most restrictive active budget applies.
    #[serde(default = "ten_percent")]
    #[schemars(length(max = 50), extend("x-kubernetes-list-type" = "atomic"))]
    pub budgets: Vec<Budget>,
}

fn zero_seconds() -> String {
    "0s".into()
}
fn when_empty_or_underutilized() -> String {
    "WhenEmptyOrUnderutilized".into()
}
fn ten_percent() -> Vec<Budget> {
    vec![Budget { nodes: ten_percent_of_nodes(), ..Budget::default() }]
}
fn ten_percent_of_nodes() -> String {
    "10%".into()
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

/// A limit on the number of nodes disrupted at once.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Eq, Serialize)]
pub struct Budget {
    /// A count (`5`) or a percentage of the pool's nodes (`10%`).
    #[serde(default = "ten_percent_of_nodes")]
    #[schemars(regex(pattern = "^((100|[0-9]{1,2})%|[0-9]+)$"))]
    pub nodes: String,
    /// Disruption reasons that the budget applies to. Absent means all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::disruption_reasons")]
    pub reasons: Option<Vec<String>>,
    /// Cron schedule (UTC) at which the budget becomes active, such as `0 9 * * mon-fri` or `@daily`; requires `duration`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(
        pattern = r"^(@(annually|yearly|monthly|weekly|daily|midnight|hourly))|((.+)\s(.+)\s(.+)\s(.+)\s(.+))$"
    ))]
    pub schedule: Option<String>,
    /// Time that the budget stays active after each activation, in hours and minutes such as `8h30m`; requires `schedule`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = "^((([0-9]+(h|m))|([0-9]+h[0-9]+m))(0s)?)$"))]
    pub duration: Option<String>,
}

/// Observed state of a NodePool.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NodePoolStatus {
    /// Sum of the capacity of the pool's nodes.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(schema_with = "schema::quantities")]
    pub resources: BTreeMap<String, Quantity>,
    /// Number of nodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("default" = 0))]
    pub nodes: Option<i64>,
    /// Generation of the node class at the last evaluation of the registration health.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node_class_observed_generation: Option<i64>,
    /// Conditions: ValidationSucceeded, NodeClassReady, NodeRegistrationHealthy and Ready.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::conditions")]
    pub conditions: Vec<Condition>,
}
