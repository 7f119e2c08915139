//! Drift hashes of NodePools and EC2NodeClasses, equal to Karpenter's: the nodes of a cluster that migrates must not drift.
//!
//! Karpenter hashes its Go values with hashstructure v2 (format 2, slices as sets, zero values ignored) over 64-bit FNV-1. The
//! Go names of types and fields and their order are part of the result, so they are listed here. An empty list or map that is present
//! is hashed, an absent list or map is not, so hashed lists and maps are `Option`s in the Rust types.
//!
//! The files in `vectors` have specs with the results of Karpenter's own `Hash`.

pub mod go;
mod kubelet;
pub mod node_class_hash;
pub mod node_pool_hash;

pub use crate::hash::node_class_hash::{NodeClassVersion, node_class};
pub use crate::hash::node_pool_hash::{NODE_POOL_VERSION, node_pool};

#[cfg(test)]
mod tests {
    use serde_json::Value;

    /// Merges `patch` into `into`, member by member.
    pub(crate) fn merge(into: &mut Value, patch: &Value) {
        match (into, patch) {
            (Value::Object(into), Value::Object(patch)) => {
                for (key, value) in patch {
                    merge(into.entry(key.clone()).or_insert(Value::Null), value);
                }
            }
            (into, patch) => *into = patch.clone(),
        }
    }
}
