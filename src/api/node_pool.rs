//! NodePool, `karpenter.sh/v1`.

#![allow(clippy::duplicated_attributes, reason = "columns of a CRD share members such as their type")]

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Taint;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::api::schema;

/// Desired nodes of one kind: what they must be, how many there may be and when they may be replaced.
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
    doc = "Desired nodes of one kind: what they must be, how many there may be and when they may be replaced.",
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
    /// Template of the NodeClaims this pool makes. A change here replaces the nodes (drift), except to requirements.
    pub template: NodeClaimTemplate,
    /// When nodes may be disrupted.
    #[serde(default)]
    #[schemars(extend("default" = { "consolidateAfter": "0s" }))]
    pub disruption: Disruption,
    /// Upper bound on the sum of the pool's capacity, by resource; `nodes` bounds the number of nodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::quantities")]
    pub limits: Option<BTreeMap<String, Quantity>>,
    /// Order of preference among NodePools: 1 to 100, higher first; absent is 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 100))]
    pub weight: Option<i32>,
    /// Number of nodes of a static pool, kept whether or not pods need them. Absent makes the pool dynamic.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub replicas: Option<i64>,
}

/// Template of a NodeClaim.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
pub struct NodeClaimTemplate {
    /// Labels and annotations of the nodes.
    #[serde(default, skip_serializing_if = "TemplateMetadata::is_empty")]
    pub metadata: TemplateMetadata,
    /// What the nodes must be.
    pub spec: NodeClaimTemplateSpec,
}

/// Labels and annotations copied to NodeClaims and nodes.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
pub struct TemplateMetadata {
    /// Labels of the nodes.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(schema_with = "schema::template_labels")]
    pub labels: BTreeMap<String, String>,
    /// Annotations of the nodes.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("x-kubernetes-map-type" = "granular"))]
    pub annotations: BTreeMap<String, String>,
}

impl TemplateMetadata {
    /// True when there is neither a label nor an annotation.
    pub fn is_empty(&self) -> bool {
        self.labels.is_empty() && self.annotations.is_empty()
    }
}

/// What the nodes of a pool must be.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeClaimTemplateSpec {
    /// Permanent taints: a pod must tolerate them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::taints")]
    pub taints: Vec<Taint>,
    /// Taints that something on the node removes during start-up: a pod need not tolerate them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::taints")]
    pub startup_taints: Vec<Taint>,
    /// Requirements on instance type, zone, capacity type and labels; all must hold.
    #[schemars(length(max = 100), extend("x-kubernetes-list-type" = "atomic"))]
    pub requirements: Vec<Requirement>,
    /// The EC2NodeClass that says how instances are made.
    pub node_class_ref: NodeClassRef,
    /// Longest time a node may drain before its pods are deleted regardless, as `1h30m`; absent is without bound.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = schema::DURATION))]
    pub termination_grace_period: Option<String>,
    /// Age at which a node is replaced: `Never` or a duration as `720h`.
    #[serde(default = "thirty_days", skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = schema::DURATION_OR_NEVER))]
    pub expire_after: Option<String>,
}

/// The API server's default of `expireAfter`, applied here too for objects that never met an API server.
#[expect(clippy::unnecessary_wraps, reason = "serde wants a value of the field's type")]
pub(crate) fn thirty_days() -> Option<String> {
    Some("720h".into())
}

/// A requirement on a label of the node, with Karpenter's `minValues`.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Eq, Serialize)]
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
    /// Fewest distinct values of this key that must stay possible when a node is bought.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 50))]
    pub min_values: Option<i64>,
}

/// Reference to the object that says how instances are made.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Eq, Serialize)]
pub struct NodeClassRef {
    /// API group, as `karpenter.k8s.aws`.
    #[schemars(regex(pattern = "^[^/]*$"))]
    pub group: String,
    /// Kind, as `EC2NodeClass`.
    pub kind: String,
    /// Name.
    pub name: String,
}

/// When nodes may be disrupted.
#[derive(Clone, Debug, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Disruption {
    /// Quiet time of a node before it may be consolidated: `Never` or a duration as `30s`.
    #[serde(default = "zero_seconds")]
    #[schemars(regex(pattern = schema::DURATION_OR_NEVER))]
    pub consolidate_after: String,
    /// WhenEmpty, WhenEmptyOrUnderutilized or Balanced.
    #[serde(default = "when_empty_or_underutilized")]
    #[schemars(extend("enum" = ["WhenEmpty", "WhenEmptyOrUnderutilized", "Balanced"]))]
    pub consolidation_policy: String,
    /// How many nodes may be disrupted at once; the tightest active budget counts.
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

/// A bound on simultaneous disruption.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Eq, Serialize)]
pub struct Budget {
    /// A count (`5`) or a percentage of the pool's nodes (`10%`).
    #[serde(default = "ten_percent_of_nodes")]
    #[schemars(regex(pattern = "^((100|[0-9]{1,2})%|[0-9]+)$"))]
    pub nodes: String,
    /// Reasons it applies to; absent is all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::disruption_reasons")]
    pub reasons: Option<Vec<String>>,
    /// Cron schedule (UTC) of its activation, as `0 9 * * mon-fri` or `@daily`; needs `duration`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(
        pattern = r"^(@(annually|yearly|monthly|weekly|daily|midnight|hourly))|((.+)\s(.+)\s(.+)\s(.+)\s(.+))$"
    ))]
    pub schedule: Option<String>,
    /// How long it stays active from each activation, in hours and minutes as `8h30m`; needs `schedule`.
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
    /// Generation of the node class that the registration health was last judged on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node_class_observed_generation: Option<i64>,
    /// ValidationSucceeded, NodeClassReady, NodeRegistrationHealthy and Ready.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::conditions")]
    pub conditions: Vec<Condition>,
}
