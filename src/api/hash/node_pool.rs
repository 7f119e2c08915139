//! The drift hash of a NodePool.

use serde_json::Value;

use crate::api::hash::go::{Struct, fnv1, non_empty, set, strings};
use crate::api::{NodePoolSpec, duration};

/// Version of [`node_pool`], for `karpenter.sh/nodepool-hash-version`.
pub const NODE_POOL_VERSION: &str = "v3";

/// Drift hash of a NodePool, in decimal. Requirements, limits, weight and disruption are not hashed.
///
/// # Panics
/// Never: every NodePool can be written as JSON.
pub fn node_pool(spec: &NodePoolSpec) -> String {
    node_pool_template(
        &serde_json::to_value(&spec.template).expect("a NodePool is JSON: its maps have strings as keys"),
    )
}

/// [`node_pool`] of the JSON of `spec.template`, which distinguishes an empty list from an absent list.
pub fn node_pool_template(template: &Value) -> String {
    let metadata = &template["metadata"];
    let spec = &template["spec"];
    let object_meta = Struct::new("ObjectMeta")
        .field("Labels", strings(&metadata["labels"]))
        .field("Annotations", strings(&metadata["annotations"]));
    let reference = &spec["nodeClassRef"];
    let node_class_ref = Struct::new("NodeClassReference")
        .field("Kind", non_empty(&reference["kind"]))
        .field("Name", non_empty(&reference["name"]))
        .field("Group", non_empty(&reference["group"]));
    let spec_struct = Struct::new("NodeClaimTemplateSpec")
        .field("Taints", taints(&spec["taints"]))
        .field("StartupTaints", taints(&spec["startupTaints"]))
        .field("NodeClassRef", reference.is_object().then(|| node_class_ref.finish()))
        .field("TerminationGracePeriod", grace_period(&spec["terminationGracePeriod"]))
        .field("ExpireAfter", expiry(&spec["expireAfter"]));
    Struct::new("NodeClaimTemplate")
        .field("ObjectMeta", object_meta.non_zero())
        .field("Spec", spec_struct.non_zero())
        .finish()
        .to_string()
}

fn taints(list: &Value) -> Option<u64> {
    set(list, |taint| {
        Struct::new("Taint")
            .field("Key", non_empty(&taint["key"]))
            .field("Value", non_empty(&taint["value"]))
            .field("Effect", non_empty(&taint["effect"]))
            .field("TimeAdded", taint["timeAdded"].as_str().and_then(time))
            .finish()
    })
}

/// A `metav1.Duration`, hashed even when it is zero.
fn grace_period(value: &Value) -> Option<u64> {
    let nanos = nanoseconds(value)?;
    Some(Struct::new("Duration").field("Duration", (nanos != 0).then(|| fnv1(&nanos.to_le_bytes()))).finish())
}

/// A `NillableDuration`: `Never` is the same as absent.
fn expiry(value: &Value) -> Option<u64> {
    let nanos = nanoseconds(value)?;
    Some(Struct::new("NillableDuration").field("Duration", Some(fnv1(&nanos.to_le_bytes()))).finish())
}

fn nanoseconds(value: &Value) -> Option<i64> {
    duration::parse_or_never(value.as_str()?).ok()??.checked_mul(1_000_000)
}

/// A `metav1.Time` as Go marshals it: version, seconds since year 1, nanoseconds, offset in minutes.
fn time(text: &str) -> Option<u64> {
    /// Seconds from 0001-01-01 to 1970-01-01.
    const UNIX_EPOCH: i64 = 62_135_596_800;
    let at: k8s_openapi::jiff::Timestamp = text.parse().ok()?;
    let mut bytes = vec![1];
    bytes.extend((at.as_second() + UNIX_EPOCH).to_be_bytes());
    bytes.extend(at.subsec_nanosecond().to_be_bytes());
    bytes.extend(0_i16.to_be_bytes());
    Some(Struct::new("Time").field("Time", Some(fnv1(&bytes))).finish())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::api::hash::tests::merge;

    fn pool(patch: &Value) -> Value {
        let mut template = json!({
            "spec": {
                "requirements": [],
                "expireAfter": "720h",
                "nodeClassRef": { "group": "karpenter.k8s.aws", "kind": "EC2NodeClass", "name": "default" },
            },
        });
        merge(&mut template, patch);
        template
    }

    /// Test vectors computed with Karpenter's own code.
    #[test]
    fn node_pool_hashes_are_karpenters() {
        let noschedule = json!([{ "key": "k", "value": "v", "effect": "NoSchedule" }]);
        for (name, patch, hash) in [
            ("base", json!({}), "6821555240594823858"),
            (
                "requirements are not hashed",
                json!({ "spec": { "requirements": [{ "key": "a", "operator": "Exists" }] } }),
                "6821555240594823858",
            ),
            ("same time in minutes", json!({ "spec": { "expireAfter": "43200m" } }), "6821555240594823858"),
            ("never", json!({ "spec": { "expireAfter": "Never" } }), "17369979337536258260"),
            ("30m", json!({ "spec": { "expireAfter": "30m" } }), "14741391904299649255"),
            ("a label", json!({ "metadata": { "labels": { "a": "b" } } }), "11962592403282335759"),
            ("two labels", json!({ "metadata": { "labels": { "a": "b", "c": "d" } } }), "2280442936857030030"),
            ("an empty label", json!({ "metadata": { "labels": { "a": "" } } }), "3858450450527687907"),
            ("an annotation", json!({ "metadata": { "annotations": { "a": "b" } } }), "4269314868079315848"),
            ("a taint", json!({ "spec": { "taints": noschedule } }), "17590007864747601603"),
            (
                "two taints",
                json!({ "spec": { "taints": [
                    { "key": "k", "effect": "NoSchedule" }, { "key": "j", "effect": "NoExecute" },
                ] } }),
                "8668838401552382031",
            ),
            (
                "two taints in the other order",
                json!({ "spec": { "taints": [
                    { "key": "j", "effect": "NoExecute" }, { "key": "k", "effect": "NoSchedule" },
                ] } }),
                "8668838401552382031",
            ),
            ("a start-up taint", json!({ "spec": { "startupTaints": noschedule } }), "15284629203317741040"),
            (
                "a termination grace period of 1h",
                json!({ "spec": { "terminationGracePeriod": "1h" } }),
                "14948894070871102041",
            ),
            (
                "a termination grace period of 0s",
                json!({ "spec": { "terminationGracePeriod": "0s" } }),
                "10356118934572431967",
            ),
            ("another node class", json!({ "spec": { "nodeClassRef": { "name": "other" } } }), "1124401764309382548"),
        ] {
            let template = pool(&patch);
            assert_eq!(node_pool_template(&template), hash, "{name}");
            let spec: NodePoolSpec = serde_json::from_value(json!({ "template": template })).unwrap();
            assert_eq!(node_pool(&spec), hash, "typed: {name}");
        }
    }

    /// Test vectors computed with hashstructure v2.0.2 on Go types of the same names. The Rust types cannot distinguish an empty list
    /// or map from an absent list or map, so only the JSON has these hashes.
    #[test]
    fn empty_members_that_are_present_are_hashed() {
        for (name, patch, hash) in [
            ("no labels", json!({ "metadata": { "labels": {} } }), "1287117484082965808"),
            ("no taints", json!({ "spec": { "taints": [] } }), "17700736223175069915"),
            (
                "a taint with its time",
                json!({ "spec": { "taints": [
                    { "key": "k", "effect": "NoSchedule", "timeAdded": "2026-01-02T03:04:05Z" },
                ] } }),
                "13425324752680102820",
            ),
            (
                "many members",
                json!({
                    "metadata": { "labels": { "a": "b" }, "annotations": { "c": "d" } },
                    "spec": {
                        "taints": [{ "key": "k", "value": "v", "effect": "NoSchedule" }],
                        "startupTaints": [{ "key": "s", "effect": "NoExecute" }],
                        "terminationGracePeriod": "1h",
                        "expireAfter": "Never",
                    },
                }),
                "9622146656929632697",
            ),
            ("expires at once", json!({ "spec": { "expireAfter": "0s" } }), "15640125381500602090"),
        ] {
            assert_eq!(node_pool_template(&pool(&patch)), hash, "{name}");
        }
    }
}
