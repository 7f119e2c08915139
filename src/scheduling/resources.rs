//! Resource vectors. CPU in millicores, memory and storage in bytes, everything else in units.

use std::collections::BTreeMap;
use std::sync::Arc;

/// An amount of every resource. Absent is zero.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Resources {
    /// Millicores.
    pub cpu_milli: i64,
    /// Bytes.
    pub memory: i64,
    /// Bytes.
    pub ephemeral_storage: i64,
    /// Pod slots.
    pub pods: i64,
    /// Extended resources by name, as `nvidia.com/gpu`; no zero entries.
    pub extended: BTreeMap<Arc<str>, i64>,
}
