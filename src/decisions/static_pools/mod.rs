//! Static NodePools (`spec.replicas`): how many NodeClaims to create, which to remove, and which outdated nodes to replace (Karpenter core
//! reference 3.20, 4.12).

pub mod launch_backoff;
pub mod removal;
pub mod replicas;
pub mod rollout;
