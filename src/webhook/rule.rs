//! The type of an admission rule.

use serde_json::Value;

/// An admission rule. It works on the raw JSON of a pod and ignores members with an unexpected shape.
#[derive(Debug)]
pub struct Rule {
    /// ID in annotations, metrics and documentation. Users' pods carry it: it never changes and is never reused.
    pub id: &'static str,
    /// One sentence for the documentation.
    pub summary: &'static str,
    /// Changes the pod and returns whether it did. A second run on its own output changes nothing.
    pub apply: fn(&mut Value) -> bool,
    /// Warnings for the creator of the pod, once every rule has changed it.
    pub warnings: fn(&Value) -> Vec<String>,
}

impl Rule {
    /// For rules that only warn.
    pub(crate) fn changes_nothing(_: &mut Value) -> bool {
        false
    }

    /// For rules that never warn.
    pub(crate) fn warns_of_nothing(_: &Value) -> Vec<String> {
        Vec::new()
    }
}
