//! The drift hash of a NodePool.

use serde_json::Value;

use crate::NodePoolSpec;
use crate::duration::parse_or_never;
use crate::hash::go::{Struct, duration, fnv1, non_empty, set, strings};

/// Version of [`node_pool`], for `karpenter.sh/nodepool-hash-version`.
pub const NODE_POOL_VERSION: &str = "v3";

/// Drift hash of a NodePool, in decimal. Requirements, limits, weight and disruption are not hashed.
///
/// # Panics
/// Never: every NodePool can be written as JSON.
pub fn node_pool(spec: &NodePoolSpec) -> String {
    let template = serde_json::to_value(&spec.template).expect("a NodePool is JSON: its maps have strings as keys");
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
        let taint = Struct::new("Taint")
            .field("Key", non_empty(&taint["key"]))
            .field("Value", non_empty(&taint["value"]))
            .field("Effect", non_empty(&taint["effect"]))
            .field("TimeAdded", taint["timeAdded"].as_str().and_then(time));
        Some(taint.finish())
    })
}

/// A `metav1.Duration`, hashed even when it is zero.
fn grace_period(value: &Value) -> Option<u64> {
    nanoseconds(value).map(duration)
}

/// A `NillableDuration`: `Never` is the same as absent.
fn expiry(value: &Value) -> Option<u64> {
    let nanos = nanoseconds(value)?;
    Some(Struct::new("NillableDuration").field("Duration", Some(fnv1(&nanos.to_le_bytes()))).finish())
}

fn nanoseconds(value: &Value) -> Option<i64> {
    parse_or_never(value.as_str()?).ok()??.checked_mul(1_000_000)
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
    use super::*;

    /// A template with its hash by Karpenter 1.14.1, which is also that of 1.15.0.
    #[derive(serde::Deserialize)]
    struct Vector {
        name: String,
        template: Value,
        v3: String,
    }

    #[test]
    fn node_pool_hashes_are_karpenters() {
        let vectors: Vec<Vector> = serde_json::from_str(include_str!("vectors/node_pool.json")).unwrap();
        let hash =
            |template: &Value| node_pool(&serde_json::from_value(serde_json::json!({ "template": template })).unwrap());
        let wrong: Vec<_> = vectors.iter().filter(|vector| hash(&vector.template) != vector.v3).collect();
        let names: Vec<_> = wrong.iter().map(|vector| &vector.name).collect();
        assert_eq!(names, Vec::<&String>::new());
    }
}
