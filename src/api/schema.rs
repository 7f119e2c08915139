//! Parts of the schema that derive macros cannot express: patterns, and members whose schema differs from their Rust type.
//! Patterns and bounds are those of Karpenter's CRDs: stored objects and manifests depend on each character.

use schemars::{Schema, SchemaGenerator, json_schema};

/// A Kubernetes qualified name: an optional DNS prefix and a slash, then a name.
pub const QUALIFIED_NAME: &str =
    r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*(\/))?([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]$";
/// The value of a label, which may be empty.
pub const LABEL_VALUE: &str = r"^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$";
/// Hours, minutes and seconds, such as `1h30m`.
pub const DURATION: &str = "^([0-9]+(s|m|h))+$";
/// [`DURATION`] or `Never`.
pub const DURATION_OR_NEVER: &str = "^(([0-9]+(s|m|h))+|Never)$";
/// A Kubernetes quantity.
pub const QUANTITY: &str = r"^(\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))(([KMGTPE]i)|[numkMGTPE]|([eE](\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))))?$";
/// Size of an EBS volume: whole Gi, G, Ti or T within EC2's bounds.
pub const VOLUME_SIZE: &str = "^((?:[1-9][0-9]{0,3}|[1-4][0-9]{4}|[5][0-8][0-9]{3}|59000)Gi|(?:[1-9][0-9]{0,3}|[1-5][0-9]{4}|[6][0-3][0-9]{3}|64000)G|([1-9]||[1-5][0-7]|58)Ti|([1-9]||[1-5][0-9]|6[0-3]|64)T)$";

const CONDITION_TYPE: &str =
    r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])$";
const CONDITION_REASON: &str = "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$";
const CONDITION_REASON_OR_EMPTY: &str = "^([A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?|)$";

/// Quantities by resource name; a quantity is an integer or a string.
pub fn quantities(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "object",
        "additionalProperties": {
            "anyOf": [{ "type": "integer" }, { "type": "string" }],
            "pattern": QUANTITY,
            "x-kubernetes-int-or-string": true,
        },
    })
}

/// Labels of a template.
pub fn template_labels(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "object",
        "maxProperties": 100,
        "x-kubernetes-map-type": "atomic",
        "additionalProperties": { "type": "string", "maxLength": 63, "pattern": LABEL_VALUE },
    })
}

/// Taints of a node.
pub fn taints(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "array",
        "x-kubernetes-list-type": "atomic",
        "items": {
            "type": "object",
            "description": "A taint of the node; only pods that tolerate it are scheduled there.",
            "required": ["effect", "key"],
            "properties": {
                "key": {
                    "type": "string",
                    "description": "Key of the taint.",
                    "minLength": 1,
                    "pattern": QUALIFIED_NAME,
                },
                "value": { "type": "string", "description": "Value of the taint.", "pattern": QUALIFIED_NAME },
                "effect": {
                    "type": "string",
                    "description": "Effect on pods that don't tolerate the taint.",
                    "enum": ["NoSchedule", "PreferNoSchedule", "NoExecute"],
                },
                "timeAdded": {
                    "type": "string",
                    "description": "Time at which the taint was added.",
                    "format": "date-time",
                },
            },
        },
    })
}

/// Disruption reasons that a budget can name. `Unhealthy` exists since Karpenter 1.15.
pub fn disruption_reasons(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "array",
        "maxItems": 50,
        "x-kubernetes-list-type": "set",
        "items": { "type": "string", "enum": ["Underutilized", "Empty", "Drifted", "Unhealthy"] },
    })
}

/// Status conditions, a map list by type.
pub fn conditions(_: &mut SchemaGenerator) -> Schema {
    conditions_with(
        &["lastTransitionTime", "message", "reason", "status", "type"],
        &json_schema!({ "maxLength": 1024, "minLength": 1, "pattern": CONDITION_REASON }),
    )
}

/// Status conditions of a NodeClaim: reason and message may be absent, reason may be empty.
pub fn conditions_with_optional_reason(_: &mut SchemaGenerator) -> Schema {
    conditions_with(
        &["lastTransitionTime", "status", "type"],
        &json_schema!({ "maxLength": 1024, "pattern": CONDITION_REASON_OR_EMPTY }),
    )
}

fn conditions_with(required: &[&str], reason: &Schema) -> Schema {
    let mut reason = reason.clone();
    reason.insert("type".into(), "string".into());
    reason.insert("description".into(), "Machine-readable reason of the last transition, in CamelCase.".into());
    json_schema!({
        "type": "array",
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": ["type"],
        "items": {
            "type": "object",
            "description": "A condition of the object.",
            "required": required,
            "properties": {
                "type": {
                    "type": "string",
                    "description": "Type of the condition.",
                    "maxLength": 316,
                    "pattern": CONDITION_TYPE,
                },
                "status": {
                    "type": "string",
                    "description": "Status of the condition: True, False or Unknown.",
                    "enum": ["True", "False", "Unknown"],
                },
                "reason": reason,
                "message": {
                    "type": "string",
                    "description": "Human-readable details of the last transition.",
                    "maxLength": 32768,
                },
                "lastTransitionTime": {
                    "type": "string",
                    "description": "Time at which the status last changed.",
                    "format": "date-time",
                },
                "observedGeneration": {
                    "type": "integer",
                    "description": "Generation of the object at the last evaluation of the condition.",
                    "format": "int64",
                    "minimum": 0,
                },
            },
        },
    })
}

/// Tags of a selector term.
pub fn selector_tags(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "object", "maxProperties": 20, "additionalProperties": { "type": "string" } })
}

/// An object with any members.
pub fn open_object(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "object", "x-kubernetes-preserve-unknown-fields": true })
}

fn one_of(values: &[&str]) -> Schema {
    json_schema!({ "type": "string", "enum": values })
}

/// AMI families.
pub fn ami_family(_: &mut SchemaGenerator) -> Schema {
    one_of(&["AL2", "AL2023", "Bottlerocket", "Custom", "Windows2019", "Windows2022", "Windows2025"])
}

/// Instance store policies.
pub fn instance_store_policy(_: &mut SchemaGenerator) -> Schema {
    one_of(&["RAID0"])
}

/// Match criteria of a capacity reservation.
pub fn instance_match_criteria(_: &mut SchemaGenerator) -> Schema {
    one_of(&["open", "targeted"])
}

/// EBS volume types.
pub fn volume_type(_: &mut SchemaGenerator) -> Schema {
    one_of(&["standard", "io1", "io2", "gp2", "sc1", "st1", "gp3"])
}

/// An enum of `enabled` and `disabled`.
pub fn enabled_or_disabled(_: &mut SchemaGenerator) -> Schema {
    one_of(&["enabled", "disabled"])
}

fn with_default(mut schema: Schema, default: &str) -> Schema {
    schema.insert("default".into(), default.into());
    schema
}

/// `metadataOptions.httpEndpoint`.
pub fn http_endpoint(_: &mut SchemaGenerator) -> Schema {
    with_default(one_of(&["enabled", "disabled"]), "enabled")
}

/// `metadataOptions.httpProtocolIPv6`.
pub fn http_protocol_ipv6(_: &mut SchemaGenerator) -> Schema {
    with_default(one_of(&["enabled", "disabled"]), "disabled")
}

/// `metadataOptions.httpTokens`.
pub fn http_tokens(_: &mut SchemaGenerator) -> Schema {
    with_default(one_of(&["required", "optional"]), "required")
}
