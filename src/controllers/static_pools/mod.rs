//! Static NodePools: creates and removes NodeClaims until each has `spec.replicas` nodes, and replaces drifted ones.

pub mod create;
pub mod drift;
pub mod scale;
