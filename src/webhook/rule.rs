//! What an admission rule is.

use serde_json::Value;

/// An admission rule. It works on the raw JSON of a pod and passes over whatever has an unexpected shape.
#[derive(Debug)]
pub struct Rule {
    /// Id in annotations, metrics and documentation. It is on users' pods: it never changes, and no other rule takes it.
    pub id: &'static str,
    /// One sentence for people.
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
