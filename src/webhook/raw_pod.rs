//! Accessors for the raw JSON of a pod. A member of an unexpected shape counts as absent.

use serde_json::{Map, Value};

/// Elements of an array member; none when it is absent, null or of another type.
pub(crate) fn list<'a>(object: &'a Value, member: &str) -> &'a [Value] {
    object.get(member).and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default()
}

/// As [`list`], mutable.
pub(crate) fn list_mut<'a>(object: &'a mut Value, member: &str) -> &'a mut [Value] {
    object.get_mut(member).and_then(Value::as_array_mut).map(Vec::as_mut_slice).unwrap_or_default()
}

/// A string member; empty when it is absent or of another type.
pub(crate) fn text<'a>(object: &'a Value, member: &str) -> &'a str {
    object.get(member).and_then(Value::as_str).unwrap_or_default()
}

/// The object at a member of `object`, created when absent or null; `None` when either is of another type.
pub(crate) fn object_mut<'a>(object: &'a mut Value, member: &str) -> Option<&'a mut Map<String, Value>> {
    let slot = object.as_object_mut()?.entry(member).or_insert(Value::Null);
    if slot.is_null() {
        *slot = Value::Object(Map::new());
    }
    slot.as_object_mut()
}

/// The array at a member of `object`, created when absent or null; `None` when either is of another type.
pub(crate) fn array_mut<'a>(object: &'a mut Value, member: &str) -> Option<&'a mut Vec<Value>> {
    let slot = object.as_object_mut()?.entry(member).or_insert(Value::Null);
    if slot.is_null() {
        *slot = Value::Array(Vec::new());
    }
    slot.as_array_mut()
}

/// Members of `spec` that hold containers with resources. Ephemeral containers may have none.
pub(crate) const CONTAINERS: [&str; 2] = ["containers", "initContainers"];

/// Required node selector terms.
pub(crate) const REQUIRED_NODE_TERMS: &str =
    "/spec/affinity/nodeAffinity/requiredDuringSchedulingIgnoredDuringExecution";
/// Preferred node affinity.
pub(crate) const NODE_AFFINITY: &str = "/spec/affinity/nodeAffinity";
