//! Static NodePools: creates and removes NodeClaims until each has `spec.replicas` nodes, and replaces outdated ones.

pub mod create;
pub mod rollout;
pub mod scale;
